/* The numbers that a stream's code reads: exponentials by polynomials or by words. */
#include "cpu/amx_flow.h"

#include <string.h>

#define LOG2_E 0x1.715476p+0f

/* 2^f on [0, 1) = ((c0 f + c1) f + ..) f + 1: to 8.6e-5 and to 8.3e-8, exactly 1 at 0. */
static const float rough_exp2[] = {0x1.3baaa6p-4f, 0x1.d2378ap-3f, 0x1.63e658p-1f, 1.0f};
static const float exact_exp2[AMX_COEFFICIENTS] = {0x1.e974fcp-10f, 0x1.277854p-7f,
                                                   0x1.c91ce6p-5f,  0x1.ebdb56p-3f,
                                                   0x1.62e4bap-1f,  1.0f};

/* A weight 2^t as a word of bf16: round(128 (127 + t)) has the exponent and, as its last 7
 * bits, t's fraction m. What 128 + m is above 128 2^(m / 128) is taken off, rounded, one number
 * for two m. The relative error is at most 7.7e-3 where rounding to bf16 has 3.9e-3. */
enum { WORD_ONE = 128, WORD_BIAS = 127 * WORD_ONE };
static const uint8_t corrections[64] = {
        0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8,
        8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11,
        11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 9, 9,
        9, 8, 8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 3, 2, 1, 1};

int amx_coefficients(const amx_shape *shape)
{
    if (shape->is_word)
        return 0;
    return shape->is_exact ? AMX_COEFFICIENTS : (int)(sizeof rough_exp2 / sizeof *rough_exp2);
}

float amx_shift(const amx_shape *shape, float anchor)
{
    return shape->is_word ? WORD_BIAS - anchor * (WORD_ONE * LOG2_E) : -(anchor * LOG2_E);
}

void amx_step_begin(amx_step *step, const amx_shape *shape, float scale)
{
    static const int64_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    step->constants[0] = (shape->score ? 1 : scale) * LOG2_E * (shape->is_word ? WORD_ONE : 1);
    memcpy(step->corrections, corrections, sizeof corrections);
    memcpy(step->order, order, sizeof order);
    memcpy(step->constants + 1, shape->is_exact ? exact_exp2 : rough_exp2,
           (size_t)amx_coefficients(shape) * sizeof(float));
    for (int32_t j = 0; j < FLOW_KEYS; j++)
        step->columns[j] = j;
}
