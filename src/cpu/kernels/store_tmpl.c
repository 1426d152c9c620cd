/* Rows of O in the output's dtype, compiled once per level. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#include "base/convert.h"

#include <string.h>

#if !defined(LEVEL_AMX)

#include "cpu/kernels/row_parts.h"

static ALWAYS_INLINE void store_row(const float *o, float scale, saccade_dtype dtype, int32_t E,
                                    char *to)
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
    convert_from_f32(dtype, rest, to + (int64_t)d * each, E - d);
}

CPU_STORE_ROWS(LEVEL_NAME(cpu_store_rows))
{
    const size_t bytes = (size_t)E * (dtype == SACCADE_F32 ? 4 : 2);
    for (int32_t r = 0; r < rows; r++, o += o_ld) {
        char *row = (char *)to + r * stride;
        if (l[r] == 0)
            memset(row, 0, bytes); /* all 0 in every dtype */
        else if (dtype == SACCADE_BF16)
            store_row(o, 1 / l[r], SACCADE_BF16, E, row);
        else
            store_row(o, 1 / l[r], dtype, E, row);
    }
}

#if defined(LEVEL_AVX512)
CPU_ANY_NONFINITE(LEVEL_NAME(cpu_any_nonfinite))
{
    vf noted = vf_set(0);
    for (int64_t i = 0; i < n; i += VF)
        noted = vf_note_nonfinite(noted, vf_load(o + i));
    return vf_any_nonfinite(noted);
}
#endif

#endif
