/* The numbers that a stream's code reads: exponentials by polynomials or by words. */
#include "cpu/flow/flow.h"

#include <string.h>

/* 2^f on [0, 1] = ((c0 f + c1) f + ..) f + 1: to 8.6e-5; and to 9.7e-8, exactly 1 at 0 and 2 at
 * 1, as in exp2_poly.h. */
static const float approx_exp2[] = {0x1.3baaa6p-4f, 0x1.d2378ap-3f, 0x1.63e658p-1f, 1.0f};
static const float exact_exp2[FLOW_COEFFICIENTS] = {
    0x1.eca6fp-10f, 0x1.269deep-7f, 0x1.c94444p-5f, 0x1.ebd8a2p-3f, 0x1.62e4c8p-1f, 1.0f};

/* A weight 2^t is made as a word of bf16 directly: round(128 (127 + t)) has the exponent of 2^t
 * and, in its last 7 bits, the fraction of t as m. So the word stands for 128 + m where it
 * should be 128 2^(m / 128): the difference, rounded, is subtracted, one entry for two m. The
 * relative error is at most 7.7e-3, where rounding to bf16 has 3.9e-3. */
enum { WORD_BIAS = 127 * JIT_WORD_ONE };
static const uint8_t corrections[64] = {
    0,  1,  1,  2,  2,  3,  4,  4,  5,  5,  5,  6,  6,  7,  7,  8,  8,  8,  9,  9,  9,  9,
    10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10,
    10, 10, 9,  9,  9,  8,  8,  8,  7,  7,  6,  6,  5,  5,  4,  3,  3,  2,  1,  1};

/* Chosen by the last two bits of the exponent, so that [32, 64) stands first; fitted to make
 * the largest error of tanh itself small. */
const float jit_tanh_terms[JIT_TABLE_TERMS][JIT_TABLE_SEGMENTS] = {
    {-0x1.bbcd04p-20f, -0x1.9bb1fap-21f, -0x1.b54122p-22f, -0x1.fec722p-23f, -0x1.2da7a4p-8f,
     -0x1.21e54cp-9f, -0x1.3649bep-10f, -0x1.692506p-11f, -0x1.6b884p-12f, -0x1.4f955ap-13f,
     -0x1.5fa51p-14f, -0x1.93c06ep-15f, -0x1.91fe18p-16f, -0x1.6fd958p-17f, -0x1.80a212p-18f,
     -0x1.ba7312p-19f},
    {0x1.fdcaccp-13f, 0x1.2210ep-13f, 0x1.6d3058p-14f, 0x1.ed82ep-15f, 0x1.5c9a9ap-4f,
     0x1.968c8ep-5f, 0x1.0053aep-5f, 0x1.57999ap-6f, 0x1.9e5662p-7f, 0x1.d2f8f6p-8f,
     0x1.211412p-8f, 0x1.7f137p-9f, 0x1.c9e7bp-10f, 0x1.008a1ep-10f, 0x1.3dacc6p-11f,
     0x1.a687b2p-12f},
    {-0x1.c5083ep-7f, -0x1.3d8e58p-7f, -0x1.db675p-8f, -0x1.747b3ep-8f, -0x1.32f87cp-1f,
     -0x1.b1f75ep-2f, -0x1.423286p-2f, -0x1.f1648cp-3f, -0x1.66da54p-3f, -0x1.ee9058p-4f,
     -0x1.6a5c3ep-4f, -0x1.159702p-4f, -0x1.8ec3a6p-5f, -0x1.129bbcp-5f, -0x1.9409e8p-6f,
     -0x1.37926p-6f},
    {0x1.befcccp-2f, 0x1.8735ccp-2f, 0x1.5f9bf6p-2f, 0x1.41c502p-2f, 0x1.0a37bcp+1f,
     0x1.ca06fp+0f, 0x1.92868ap+0f, 0x1.67e18ap+0f, 0x1.38ed38p+0f, 0x1.0af72p+0f,
     0x1.d45b88p-1f, 0x1.a33394p-1f, 0x1.6e3824p-1f, 0x1.3b1a48p-1f, 0x1.171b9cp-1f,
     0x1.f89a7cp-2f}};

int flow_coefficients(const flow_shape *shape)
{
    if (shape->is_word)
        return 0;
    return shape->is_exact ? FLOW_COEFFICIENTS
                           : (int)(sizeof approx_exp2 / sizeof *approx_exp2);
}

float flow_shift(const flow_shape *shape, float anchor)
{
    return shape->is_word ? WORD_BIAS - anchor * (JIT_WORD_ONE * JIT_LOG2_E)
                          : -(anchor * JIT_LOG2_E);
}

void flow_step_begin(flow_step_args *step, const flow_shape *shape, float scale)
{
    static const int64_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    step->constants[0] =
        (shape->score ? 1 : scale) * JIT_LOG2_E * (shape->is_word ? JIT_WORD_ONE : 1);
    memcpy(step->corrections, corrections, sizeof corrections);
    memcpy(step->order, order, sizeof order);
    memcpy(step->constants + 1, shape->is_exact ? exact_exp2 : approx_exp2,
           (size_t)flow_coefficients(shape) * sizeof(float));
    memcpy(step->tanh_terms, jit_tanh_terms, sizeof jit_tanh_terms);
    for (int32_t j = 0; j < FLOW_KEYS; j++)
        step->columns[j] = j;
}
