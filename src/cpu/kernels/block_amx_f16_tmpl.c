/* Forward kernels for f16 on AMX, which multiplies bf16 alone. Every f16 number is the exact
 * sum of two of bf16 (11 bits are 8 + 3): high = bf16(x), low = x - high. A product then is
 *
 *     high high + high low + low high + low low     scores: all four, exact before their sum
 *     high high + high low + low high               values: P has 16 bits this way, f16 has 11
 *
 * An infinity has no low part: it becomes NaN, as a NaN does, and so does every score that
 * touches it. Rows that come out NaN are made again by `careful` kernels in f32 (item.c).
 * Layouts are those of amx_tiles.h, with a step of 32 pairs of parts in place of 32 elements:
 *   Q, P [rows][D/32][high 32, low 32]    K, V [columns/32][steps][high unit, low unit]
 * so that an element takes 4 bytes, as in f32, and P fits over S. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#include "cpu/kernels/amx_split.h"
#include "cpu/kernels/softmax_rows.h"

/* ---- products ---- */

static CPU_SCORES(scores)
{
    const int32_t depth = (D + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t n_panels = (n + UNIT - 1) / UNIT;
    const char *keys = k;
    for (int32_t p = 0; p < n_panels; p++) {
        ZERO_UNIT();
        for (int32_t d = 0; d < depth; d++, keys += SPLIT_BYTES)
            multiply_split(1, (const char *)q + d * SPLIT_ROW, q_ld * 4, TILE_BYTES, keys);
        store_unit(s + p * UNIT, s_ld * 4);
    }
    for (int32_t i = 0; i < rows; i++)
        scale_row(s + (int64_t)i * s_ld, n_panels * UNIT, scale);
}

static CPU_VALUES(values)
{
    const int32_t depth = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int32_t i = 0; i < rows; i++)
        scale_row(o + (int64_t)i * o_ld, o_ld, alpha[i]);
    (void)block;
    for (int32_t c = 0; c < n_panels; c++) {
        const char *panel = (const char *)v + (int64_t)c * SPLIT_BYTES;
        load_unit(o + c * UNIT, o_ld * 4);
        for (int32_t d = 0; d < depth; d++)
            multiply_split(0, (const char *)p + d * SPLIT_ROW, p_ld * 4, TILE_BYTES,
                           panel + (int64_t)(d * n_panels) * SPLIT_BYTES);
        store_unit(o + c * UNIT, o_ld * 4);
    }
}

/* ---- online softmax ---- */

/* Tiles take 32 keys: an odd 16 of them get weight 0. */
static ALWAYS_INLINE float row_exp(float *s, int32_t n, float base, int is_fused)
{
    vf sum = vf_set(0);
    for (int32_t j = 0; j < n; j += TILE_DEPTH) {
        vf x[TILE_DEPTH / VF];
        for (int32_t c = 0; c < TILE_DEPTH; c += VF) {
            x[c / VF] = vf_set(0);
            if (j + c < n)
                x[c / VF] = exp2_poly(exponent(vf_load(s + j + c), base, is_fused));
            sum += x[c / VF];
        }
        store_split((bf16 *)(void *)(s + j), x);
    }
    return vf_sum_lanes(sum);
}

SOFTMAX(softmax, row_exp)

/* ---- packing ---- */

static CPU_PACK_ROWS(pack_rows)
{
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += TILE_DEPTH) {
            bf16 *out = (bf16 *)to + 2 * ((int64_t)i * ld + d);
            if (i < n)
                (void)load_split(from, i, d, out);
            else
                memset(out, 0, SPLIT_ROW);
        }
}

/* Pairs of dims are 32-bit words: squares of VF keys x VF words are transposed, high parts
 * first, then low ones. */
static CPU_PACK_KEYS(pack_keys)
{
    enum { WORDS = TILE_DEPTH / 2 }; /* of each part */
    const int32_t depth = (from->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    float *out = to, words[VF][2 * WORDS];
    for (int32_t j = 0; j < padded; j += VF)
        for (int32_t d = 0; d < depth; d++) {
            float *step =
                out + ((int64_t)(j / UNIT) * depth + d) * (SPLIT_BYTES / 4) + j % UNIT;
            memset(words, 0, sizeof words);
            for (int32_t i = 0; i < VF && j + i < n; i++)
                (void)load_split(from, j + i, d * TILE_DEPTH, (bf16 *)(void *)words[i]);
            for (int32_t t = 0; t < 2 * WORDS; t += VF) {
                vf square[VF];
                for (int32_t i = 0; i < VF; i++)
                    square[i] = vf_load(words[i] + t);
                vf_transpose(square);
                for (int32_t i = 0; i < VF; i++) /* a low unit follows its high one */
                    vf_store(step + (int64_t)(t + i) * UNIT, square[i]);
            }
        }
}

/* Pairs of keys j, j + 1 of 32 columns. */
static CPU_PACK_VALUES(pack_values)
{
    const int32_t panels = (from->dim + UNIT - 1) / UNIT;
    unsigned nonfinite = 0;
    for (int32_t d = 0; d < from->dim; d += UNIT)
        for (int32_t j = 0; j < padded; j += 2) {
            bf16 even[2 * UNIT] = {0}, odd[2 * UNIT] = {0};
            const int64_t step = j / TILE_DEPTH * panels + d / UNIT;
            bf16 *high = (bf16 *)to + step * (SPLIT_BYTES / 2) + j % TILE_DEPTH * UNIT;
            bf16 *low = high + UNIT_BYTES / sizeof *high;
            if (j < n)
                nonfinite |= load_split(from, j, d, even);
            if (j + 1 < n)
                nonfinite |= load_split(from, j + 1, d, odd);
            for (int32_t c = 0; c < UNIT; c++) {
                high[2 * c] = even[c];
                high[2 * c + 1] = odd[c];
                low[2 * c] = even[UNIT + c];
                low[2 * c + 1] = odd[UNIT + c];
            }
        }
    return (int)nonfinite;
}

/* ---- the table ---- */

#if defined(LEVEL_AMX)
#define F32(name) name##_avx512
#else
#define F32(name) LEVEL_NAME(name)
#endif

const cpu_kernels LEVEL_NAME(cpu_f16_tiles) = {
    .name = "AMX bf16 tiles, f16 as sums of two",
    .flops_of_ns = TILES_FLOPS / 3,
    .strip = UNIT,
    .panel = UNIT,
    .element = 4,
    .depth = TILE_DEPTH,
    .is_fused = HAS_FMA,
    .is_split = 1,
    .is_by_keys = 1,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .decode_rows = 32,
    .narrow_rows = 32,
    .near_rows = 32,
    .pack_decode = LEVEL_NAME(cpu_pack_decode_split),
    .decode_qk = LEVEL_NAME(cpu_decode_qk_split),
    .decode_pv = LEVEL_NAME(cpu_decode_pv_split),
    .prefetch_parts = MOST_PARTS,
    .dequantise = F32(cpu_dequantise),
    .store_rows = F32(cpu_store_rows),
    .begin = tiles_begin,
    .end = tiles_end,
    .careful = &F32(cpu_f32),
    .few = &F32(cpu_f32),
    .few_rows = 4,
#if defined(LEVEL_AMX)
    .flow = cpu_flow_run_amx,
    .any_nonfinite = cpu_any_nonfinite_avx512,
    .take_rows = cpu_take_rows_amx,
#endif
};
