/* Rows of O in the output's dtype, compiled once per level. */
#include "cpu/cpu.h"
#include "cpu/vec.h"

#include "base/convert.h"

#if !defined(LEVEL_AMX)

static ALWAYS_INLINE void narrow(saccade_dtype dtype, char *to, int32_t d, vf x)
{
    if (dtype == SACCADE_F32)
        vf_store((float *)(void *)to + d, x);
    else if (dtype == SACCADE_BF16)
        vf_to_bf16((uint16_t *)(void *)to + d, x);
    else
        vf_to_f16((uint16_t *)(void *)to + d, x);
}

CPU_STORE_ROW(LEVEL_NAME(cpu_store_row))
{
    const int32_t each = dtype == SACCADE_F32 ? 4 : 2;
    float rest[VF];
    int32_t d = 0;
    for (; d + VF <= E; d += VF)
        narrow(dtype, to, d, vf_load(o + d) * vf_set(scale));
    if (d == E)
        return;
    for (int32_t n = 0; n < E - d; n++)
        rest[n] = o[d + n] * scale;
    convert_from_f32(dtype, rest, (char *)to + (int64_t)d * each, E - d);
}

#endif
