/* Forward kernels on packed bf16 with AMX tiles; amx_tiles.h has the layouts.
 *
 * A unit is a square of 2 x 2 tiles C: with two tiles A and two B all eight registers are in
 * use and every tile read serves two products. Scores, softmax and values of one block of keys
 * one after the other; flow_run_tmpl.c merges them where masks are simple.
 * Levels other than AMX compile the same code on emulated tiles: tests run those anywhere. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#include "cpu/kernels/amx_tiles.h"
#include "cpu/kernels/amx_units.h"
#include "cpu/kernels/softmax_rows.h"

typedef uint16_t bf16;

/* ---- products ---- */

static CPU_SCORES(scores)
{
    const int32_t depth = (D + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t n_panels = (n + UNIT - 1) / UNIT;
    const char *keys = k;
    for (int32_t p = 0; p < n_panels; p++, keys += (int64_t)depth * UNIT_BYTES) {
        ZERO_UNIT();
        for (int32_t d = 0; d < depth; d++)
            multiply_unit((const char *)q + d * TILE_BYTES, q_ld * 2,
                          keys + (int64_t)d * UNIT_BYTES);
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
        const char *panel = (const char *)v + (int64_t)c * UNIT_BYTES;
        load_unit(o + c * UNIT, o_ld * 4);
        for (int32_t d = 0; d < depth; d++)
            multiply_unit((const char *)p + d * TILE_BYTES, p_ld * 4,
                          panel + (int64_t)(d * n_panels) * UNIT_BYTES);
        store_unit(o + c * UNIT, o_ld * 4);
    }
}

/* ---- online softmax ---- */

static ALWAYS_INLINE void store_p(bf16 *p, vf x)
{
#if defined(LEVEL_AMX)
    _mm256_storeu_si256((__m256i *)(void *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    vf_to_bf16(p, x);
#endif
}

ROW_EXP(row_exp, bf16, store_p)
SOFTMAX(softmax_rows, row_exp)

/* Tiles take 32 keys: the odd 16 get weight 0. */
static CPU_SOFTMAX(softmax)
{
    softmax_rows(s, s_ld, rows, n, known, m, l, alpha);
    for (int32_t i = 0; i < rows && n % TILE_DEPTH; i++)
        memset((bf16 *)(void *)(s + (int64_t)i * s_ld) + n, 0, 16 * sizeof(bf16));
}

/* ---- packing ---- */

/* 32 bf16 of row j from d on, 0 past the row's end; never reads past it. */
static void load_part(const cpu_rows *from, int64_t j, int32_t d, bf16 *part)
{
    const bf16 *row = (const bf16 *)(const void *)(from->base + j * from->stride);
    const int32_t left = from->dim - d;
    if (left >= TILE_DEPTH) {
        memcpy(part, row + d, TILE_BYTES);
        return;
    }
    memset(part, 0, TILE_BYTES);
    if (left > 0)
        memcpy(part, row + d, (size_t)left * sizeof *part);
}

static CPU_PACK_ROWS(pack_rows)
{
    bf16 *out = to;
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += TILE_DEPTH) {
            if (i < n)
                load_part(from, i, d, out + (int64_t)i * ld + d);
            else
                memset(out + (int64_t)i * ld + d, 0, TILE_BYTES);
        }
}

/* Prefetches rows ahead of packing, since the processor's own prefetching ends with each page;
 * but no rows past the block, which are often on their way to the second-level cache
 * already. */
enum { ROWS_AHEAD = 32 };

static ALWAYS_INLINE const char *row_of(const cpu_rows *from, int64_t j, int64_t past,
                                        int32_t d)
{
    const char *row = from->base + j * from->stride + (int64_t)d * 2;
    if (j + ROWS_AHEAD < past)
        __builtin_prefetch(row + ROWS_AHEAD * from->stride);
    return row;
}

static ALWAYS_INLINE void transpose_words(vf square[VF], float *unit, int32_t t)
{
    vf_transpose(square);
    for (int32_t i = 0; i < VF; i++)
        vf_store(unit + (int64_t)(t + i) * UNIT, square[i]);
}

/* A unit of VF keys where rows or dims end: zeros past them. */
static void pack_rest(const cpu_rows *from, int64_t j, int32_t n, int32_t d, float *unit)
{
    float words[VF][TILE_DEPTH / 2];
    memset(words, 0, sizeof words);
    for (int32_t i = 0; i < VF && i < n; i++)
        load_part(from, j + i, d, (bf16 *)(void *)words[i]);
    for (int32_t t = 0; t < TILE_DEPTH / 2; t += VF) {
        vf square[VF];
        for (int32_t i = 0; i < VF; i++)
            square[i] = vf_load(words[i] + t);
        transpose_words(square, unit, t);
    }
}

/* Pairs of dims are 32-bit words: squares of VF keys x VF words are transposed. */
static CPU_PACK_KEYS(pack_keys)
{
    const int32_t depth = (from->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    float *out = to;
    for (int32_t j = 0; j < padded; j += VF)
        for (int32_t d = 0; d < depth; d++) {
            float *unit = out + ((int64_t)(j / UNIT) * depth + d) * (UNIT_BYTES / 4) + j % UNIT;
            if (j + VF > n || (d + 1) * TILE_DEPTH > from->dim) {
                pack_rest(from, j, n - j, d * TILE_DEPTH, unit);
                continue;
            }
            for (int32_t t = 0; t < TILE_DEPTH / 2; t += VF) {
                vf square[VF];
                for (int32_t i = 0; i < VF; i++)
                    square[i] = vf_load((const float *)(const void *)row_of(
                                            from, j + i, n, d * TILE_DEPTH)
                                        + t);
                transpose_words(square, unit, t);
            }
        }
}

/* Pairs of keys j, j + 1 of 32 columns; whether any is infinite or NaN. */
static ALWAYS_INLINE unsigned pack_pair(const cpu_rows *from, int64_t j, int32_t n, int32_t d,
                                        bf16 *out)
{
    bf16 even[UNIT] = {0}, odd[UNIT] = {0};
    unsigned nonfinite = 0;
    if (n > 0)
        load_part(from, j, d, even);
    if (n > 1)
        load_part(from, j + 1, d, odd);
    for (int32_t c = 0; c < UNIT; c++) {
        nonfinite |= ((even[c] & 0x7f80) == 0x7f80) | ((odd[c] & 0x7f80) == 0x7f80);
        out[2 * c] = even[c];
        out[2 * c + 1] = odd[c];
    }
    return nonfinite;
}

#if defined(LEVEL_AMX)
/* Packs 32 columns of the 32 keys from j on, all of which exist; rows before `past` are
 * prefetched. Returns the larger of `most` and of the columns' bits, lane by lane, the bits
 * shifted left by one so that signs do not count. */
static ALWAYS_INLINE __m512i pack_whole(const cpu_rows *from, int64_t j, int64_t past,
                                        int32_t d, bf16 *out, __m512i most)
{
    const __m512i left = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i right = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (int32_t i = 0; i < TILE_DEPTH; i += 2, out += 2 * UNIT) {
        const __m512i even = _mm512_loadu_si512(row_of(from, j + i, past, d));
        const __m512i odd = _mm512_loadu_si512(row_of(from, j + i + 1, past, d));
        const __m512i low = _mm512_unpacklo_epi16(even, odd);
        const __m512i high = _mm512_unpackhi_epi16(even, odd);
        _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, left, high));
        _mm512_storeu_si512(out + UNIT, _mm512_permutex2var_epi64(low, right, high));
        most = _mm512_max_epu16(
            most, _mm512_max_epu16(_mm512_add_epi16(even, even), _mm512_add_epi16(odd, odd)));
    }
    return most;
}
#endif

static CPU_PACK_VALUES(pack_values)
{
    bf16 *out = to;
    unsigned nonfinite = 0;
#if defined(LEVEL_AMX)
    __m512i most = _mm512_setzero_si512();
#endif
    for (int32_t unit = 0; unit < padded; unit += TILE_DEPTH)
        for (int32_t d = 0; d < from->dim; d += UNIT) {
#if defined(LEVEL_AMX)
            if (unit + TILE_DEPTH <= n && d + UNIT <= from->dim) {
                most = pack_whole(from, unit, n, d, out, most);
                out += TILE_DEPTH * UNIT;
                continue;
            }
#endif
            for (int32_t j = unit; j < unit + TILE_DEPTH; j += 2, out += 2 * UNIT)
                nonfinite |= pack_pair(from, j, n - j, d, out);
        }
#if defined(LEVEL_AMX)
    nonfinite |= _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16((int16_t)0xff00)) != 0;
#endif
    return (int)nonfinite;
}

const cpu_kernels LEVEL_NAME(cpu_bf16_tiles) = {
    .name = "AMX bf16 tiles",
    .flops_of_ns = TILES_FLOPS,
    .strip = UNIT,
    .panel = UNIT,
    .element = 2,
    .depth = TILE_DEPTH,
    .is_fused = HAS_FMA,
    .is_by_keys = 1,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
#if defined(LEVEL_AMX)
    .dequantise = cpu_dequantise_avx512,
    .store_rows = cpu_store_rows_amx,
    .take_rows = cpu_take_rows_amx,
#else
    .dequantise = LEVEL_NAME(cpu_dequantise),
    .store_rows = LEVEL_NAME(cpu_store_rows),
#endif
    .decode_rows = 64,
    .narrow_rows = 64,
    .near_rows = 64,
    .pack_decode = LEVEL_NAME(cpu_pack_decode_tiles),
    .decode_qk = LEVEL_NAME(cpu_decode_qk_tiles),
    .decode_pv = LEVEL_NAME(cpu_decode_pv_tiles),
    .prefetch_parts = MOST_PARTS,
    .few_coded_rows = 4,
#if defined(LEVEL_AMX)
    .few = &cpu_f32_avx512,
    .flow = cpu_flow_run_amx,
    .any_nonfinite = cpu_any_nonfinite_avx512,
#else
    .few = &LEVEL_NAME(cpu_f32),
#endif
    .begin = tiles_begin,
    .end = tiles_end,
};
