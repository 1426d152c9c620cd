/* Codes of K and V, and the numbers that they stand for. */
#include "base/quantize.h"

#include "base/convert.h"

#include <assert.h>
#include <math.h>

float quant_largest(saccade_dtype dtype)
{
    assert(quant_is_dtype(dtype));
    return dtype == SACCADE_E4M3   ? 448.0f
           : dtype == SACCADE_E5M2 ? 57344.0f
           : dtype == SACCADE_I8   ? 127.0f
                                   : 7.0f;
}

static bool is_fp8(saccade_dtype dtype)
{
    return dtype == SACCADE_E4M3 || dtype == SACCADE_E5M2;
}

float quant_scale(saccade_dtype dtype, saccade_dtype scale_dtype, float most)
{
    if (!isfinite(most))
        return NAN;
    const float scale = most == 0 ? 1.0f : most / quant_largest(dtype);
    if (scale_dtype != SACCADE_F16)
        return scale > 0 ? scale : 0x1p-149f;
    const float rounded = f16_to_f32(f16_from_f32(scale));
    return rounded == 0 ? 0x1p-24f : isinf(rounded) ? 65504.0f : rounded;
}

float quant_most(saccade_dtype dtype, const float *from, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        const float x = fabsf(from[i]);
        if (isfinite(x) ? x > most : !is_fp8(dtype))
            most = x;
    }
    return most;
}

/* Integers from -most to most; NaN has no code, and what has NaN for its scale needs none. */
static int nearest(float x, float most)
{
    if (isnan(x))
        return 0;
    return (int)lrintf(x > most ? most : x < -most ? -most : x);
}

/* A zero is one under any scale: a head of zeros alone may have been given a scale of 0. */
static uint8_t fp8_of(saccade_dtype dtype, float x, float scale)
{
    const float code = !isfinite(x) ? NAN : x == 0 && scale == 0 ? x : x / scale;
    return dtype == SACCADE_E4M3 ? e4m3_from_f32(code) : e5m2_from_f32(code);
}

static void put_i4(uint8_t *row, int64_t i, int code)
{
    uint8_t *byte = row + i / 2;
    const int shift = i % 2 ? 4 : 0;
    *byte = (uint8_t)((*byte & (0xf0 >> shift)) | (code & 15) << shift);
}

void quant_encode(saccade_dtype dtype, const float *from, int64_t n, float scale, void *row,
                  int64_t first)
{
    uint8_t *to = row;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = first + i;
        if (is_fp8(dtype))
            to[at] = fp8_of(dtype, from[i], scale);
        else if (dtype == SACCADE_I8)
            to[at] = (uint8_t)nearest(from[i] / scale, 127);
        else
            put_i4(to, at, nearest(from[i] / scale, 7));
    }
}

void quant_decode(saccade_dtype dtype, const void *row, int64_t first, int64_t n, float *to)
{
    const uint8_t *from = row;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = first + i;
        if (dtype == SACCADE_E4M3)
            to[i] = e4m3_to_f32(from[at]);
        else if (dtype == SACCADE_E5M2)
            to[i] = e5m2_to_f32(from[at]);
        else if (dtype == SACCADE_I8)
            to[i] = (float)(int8_t)from[at];
        else
            to[i] = (float)(((from[at / 2] >> (at % 2 * 4) & 15) ^ 8) - 8);
    }
}
