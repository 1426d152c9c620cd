/* Forward kernels in f32, compiled once per level: products by panel_products.h, softmax by
 * softmax_rows.h. Inputs of any dtype become f32 when packed. The caller bounds and masks; -INF
 * is dead. */
#include "cpu/cpu.h"
#include "cpu/vec.h"

#include "base/convert.h"

#if !defined(LEVEL_AMX)

#include "cpu/panel_products.h"
#include "cpu/softmax_rows.h"

/* ---- online softmax ---- */

ROW_EXP(row_exp, float, vf_store)
SOFTMAX(softmax, row_exp)

/* ---- packing ---- */

static ALWAYS_INLINE vf widen(const cpu_rows *from, const char *row, int32_t d)
{
    if (from->dtype == SACCADE_F32)
        return vf_load((const float *)(const void *)row + d);
    if (from->dtype == SACCADE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)row + d);
    return vf_from_f16((const uint16_t *)(const void *)row + d);
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

/* Asks for an element that is packed soon; rows past the end are asked for in vain. */
static ALWAYS_INLINE void ask_row(const cpu_rows *from, int64_t j, int32_t d)
{
    const int32_t each = from->dtype == SACCADE_F32 ? 4 : 2;
    __builtin_prefetch(from->base + j * from->stride + (int64_t)d * each, 0, 3);
}

static CPU_PACK_ROWS(pack_rows)
{
    float *out = to;
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += VF)
            vf_store(out + (int64_t)i * ld + d, i < n ? load_part(from, j0 + i, d) : vf_set(0));
}

/* Squares of VF keys x VF dims are transposed in registers. */
static CPU_PACK_KEYS(pack_keys)
{
    const int32_t D = from->dim;
    float *out = to;
    for (int32_t j = 0; j < padded; j += VF) {
        float *panel = out + (int64_t)(j / PANEL) * PANEL * D + j % PANEL;
        for (int32_t d = 0; d < D; d += VF) {
            vf square[VF];
            for (int t = 0; t < VF; t++) {
                square[t] = j + t < n ? load_part(from, j0 + j + t, d) : vf_set(0);
                ask_row(from, j0 + j + t + VF, d);
            }
            vf_transpose(square);
            for (int t = 0; t < VF && d + t < D; t++)
                vf_store(panel + (int64_t)(d + t) * PANEL, square[t]);
        }
    }
}

static CPU_PACK_VALUES(pack_values)
{
    float *out = to;
    int wild = 0;
    for (int32_t d = 0; d < from->dim; d += PANEL, out += (int64_t)padded * PANEL)
        for (int32_t j = 0; j < padded; j++)
            for (int c = 0; c < PANEL_VECTORS; c++) {
                const vf x = j < n ? load_part(from, j0 + j, d + c * VF) : vf_set(0);
                ask_row(from, j0 + j + VF, d + c * VF);
                wild |= vf_any_wild(x);
                vf_store(out + (int64_t)j * PANEL + c * VF, x);
            }
    return wild;
}

const cpu_kernels LEVEL_NAME(cpu_f32) = {
    .name = "f32",
    .strip = STRIP_ROWS,
    .panel = PANEL,
    .element = 4,
    .depth = 1,
    .is_fused = HAS_FMA,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .direct_rows = 32,
    .dots = LEVEL_NAME(cpu_dots),
    .sums = LEVEL_NAME(cpu_sums),
    .store_rows = LEVEL_NAME(cpu_store_rows),
};

#endif
