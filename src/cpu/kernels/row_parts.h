/* row_parts.h: elements of rows of any dtype as vectors of f32. Needs vec.h. */
#ifndef SACCADE_CPU_KERNELS_ROW_PARTS_H
#define SACCADE_CPU_KERNELS_ROW_PARTS_H

#include "base/convert.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

static ALWAYS_INLINE vf widen(const cpu_rows *from, const char *row, int32_t d)
{
    if (from->dtype == SACCADE_F32)
        return vf_load((const float *)(const void *)row + d);
    if (from->dtype == SACCADE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)row + d);
    return vf_from_f16((const uint16_t *)(const void *)row + d);
}

/* VF elements of x into a row of a dtype, rounded to it. */
static ALWAYS_INLINE void narrow(saccade_dtype dtype, char *to, int32_t d, vf x)
{
    if (dtype == SACCADE_F32)
        vf_store((float *)(void *)to + d, x);
    else if (dtype == SACCADE_BF16)
        vf_to_bf16((uint16_t *)(void *)to + d, x);
    else
        vf_to_f16((uint16_t *)(void *)to + d, x);
}

/* Elements [d, d + VF) of row j, 0 past the row's end; never reads past it. */
static ALWAYS_INLINE vf load_part(const cpu_rows *from, int64_t j, int32_t d)
{
    const char *row = from->base + j * from->stride;
    float part[VF] = {0};
    if (d + VF <= from->dim)
        return widen(from, row, d);
    if (d < from->dim)
        convert_to_f32(from->dtype, row + d * (int64_t)saccade_dtype_bytes(from->dtype), part,
                       from->dim - d);
    return vf_load(part);
}

#endif
