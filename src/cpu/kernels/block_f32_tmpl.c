/* Forward kernels in f32, compiled once per level: products by panel_products.h, softmax by
 * softmax_rows.h. Inputs of any dtype become f32 when packed. The caller bounds and masks; -INF
 * is dead. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#if !defined(LEVEL_AMX)

#include "cpu/kernels/panel_products.h"
#include "cpu/kernels/row_parts.h"
#include "cpu/kernels/softmax_rows.h"

/* ---- online softmax ---- */

ROW_EXP(row_exp, float, vf_store)
SOFTMAX(softmax, row_exp)

/* ---- packing ---- */

/* Prefetches an element that is packed soon; prefetching past the last row does no harm. */
static ALWAYS_INLINE void prefetch_element(const cpu_rows *from, int64_t j, int32_t d)
{
    const int32_t each = from->dtype == SACCADE_F32 ? 4 : 2;
    __builtin_prefetch(from->base + j * from->stride + (int64_t)d * each, 0, 3);
}

static CPU_PACK_ROWS(pack_rows)
{
    float *out = to;
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += VF)
            vf_store(out + (int64_t)i * ld + d, i < n ? load_part(from, i, d) : vf_set(0));
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
                square[t] = j + t < n ? load_part(from, j + t, d) : vf_set(0);
                prefetch_element(from, j + t + VF, d);
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
    int nonfinite = 0;
    for (int32_t d = 0; d < from->dim; d += PANEL, out += (int64_t)padded * PANEL)
        for (int32_t j = 0; j < padded; j++)
            for (int c = 0; c < PANEL_VECTORS; c++) {
                const vf x = j < n ? load_part(from, j, d + c * VF) : vf_set(0);
                prefetch_element(from, j + VF, d + c * VF);
                nonfinite |= vf_any_nonfinite(x);
                vf_store(out + (int64_t)j * PANEL + c * VF, x);
            }
    return nonfinite;
}

const cpu_kernels LEVEL_NAME(cpu_f32) = {
    .name = "f32",
    .flops_of_ns = HAS_FMA ? 5 * VF : VF,
    .strip = STRIP_ROWS,
    .is_even = 1,
    .panel = PANEL,
    .element = 4,
    .depth = 1,
    .is_fused = HAS_FMA,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .values_of = values_of,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .decode_rows = 16,
    .narrow_rows = 8,
    .near_rows = VF == 16 ? 2 : 8,
    .decode_qk = LEVEL_NAME(cpu_decode_qk),
    .decode_pv = LEVEL_NAME(cpu_decode_pv),
    .prefetch_parts = 1,
    .dequantise = LEVEL_NAME(cpu_dequantise),
    .store_rows = LEVEL_NAME(cpu_store_rows),
};

#endif
