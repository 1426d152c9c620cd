/* Quantised rows as floats, compiled once per level: a block of them lies in L1 or L2 when the
 * products read it. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"
#include "cpu/kernels/vec_codes.h"

#include <string.h>

#if !defined(LEVEL_AMX)

static ALWAYS_INLINE void put(saccade_dtype dtype, char *to, int32_t d, vf x)
{
    if (dtype == SACCADE_F32)
        vf_store((float *)(void *)to + d, x);
    else
        vf_to_bf16((uint16_t *)(void *)to + d, x);
}

static ALWAYS_INLINE vf scales_of(float scale, const float *by_channel, int32_t d)
{
    if (!by_channel)
        return vf_set(scale);
    return vf_set(scale) * vf_load(by_channel + d);
}

static ALWAYS_INLINE void convert_row(saccade_dtype from, saccade_dtype to, const uint8_t *row,
                                      int32_t dim, float scale, const float *by_channel,
                                      char *at)
{
    const size_t each = to == SACCADE_F32 ? 4 : 2;
    uint8_t rest[VF] = {0};
    char last[VF * 4];
    int32_t d = 0;
    for (; d + VF <= dim; d += VF)
        put(to, at, d, vf_from_codes(from, row, d) * scales_of(scale, by_channel, d));
    if (d == dim)
        return;
    if (from == SACCADE_I4)
        memcpy(rest, row + d / 2, (size_t)(dim - d + 1) / 2);
    else
        memcpy(rest, row + d, (size_t)(dim - d));
    put(to, last, 0, vf_from_codes(from, rest, 0) * scales_of(scale, by_channel, d));
    memcpy(at + (size_t)d * each, last, (size_t)(dim - d) * each);
}

static ALWAYS_INLINE void convert_rows(saccade_dtype from, saccade_dtype to,
                                       const cpu_rows *rows, int32_t n, const float *by_row,
                                       const float *by_channel, char *at)
{
    const float factor = from == SACCADE_E4M3 ? CPU_E4M3_FACTOR : 1;
    const int64_t stride = rows->dim * (to == SACCADE_F32 ? 4 : 2);
    const char *row = rows->base;
    for (int32_t j = 0; j < n; j++, row += rows->stride, at += stride)
        if (by_channel)
            convert_row(from, to, (const uint8_t *)row, rows->dim, factor * by_row[j],
                        by_channel, at);
        else
            convert_row(from, to, (const uint8_t *)row, rows->dim, factor * by_row[j], NULL,
                        at);
}

static ALWAYS_INLINE void convert_to(saccade_dtype to, const cpu_rows *rows, int32_t n,
                                     const float *by_row, const float *by_channel, char *at)
{
    if (rows->dtype == SACCADE_E4M3)
        convert_rows(SACCADE_E4M3, to, rows, n, by_row, by_channel, at);
    else if (rows->dtype == SACCADE_E5M2)
        convert_rows(SACCADE_E5M2, to, rows, n, by_row, by_channel, at);
    else if (rows->dtype == SACCADE_I8)
        convert_rows(SACCADE_I8, to, rows, n, by_row, by_channel, at);
    else
        convert_rows(SACCADE_I4, to, rows, n, by_row, by_channel, at);
}

KV_DEQUANTISE(LEVEL_NAME(cpu_dequantise))
{
    if (dtype == SACCADE_F32)
        convert_to(SACCADE_F32, from, n, by_row, by_channel, to);
    else
        convert_to(SACCADE_BF16, from, n, by_row, by_channel, to);
}

#endif
