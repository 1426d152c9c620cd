/* Forward kernels on packed bf16 with AVX512-BF16 dot products: two products and an f32 sum per
 * lane and step. Worth it where vdpbf16ps runs as often as an FMA (Zen 5: 516 against 256
 * GFLOP/s a core); where it runs at half that rate block_f32_tmpl.c is as good. Its shapes and
 * order, with pairs of neighbours (dims of Q and K, keys of P and V) in place of elements.
 * The instruction takes subnormal numbers as 0, those of V too, which f32 kernels keep.
 * Compiled with the flags of the AMX level, the only one that has this extension. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#if defined(LEVEL_AMX)

#include "cpu/kernels/panel_products.h"
#include "cpu/kernels/softmax_rows.h"

typedef uint16_t bf16;

/* ---- online softmax ---- */

static ALWAYS_INLINE void store_p(bf16 *p, vf x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

ROW_EXP(row_exp, bf16, store_p)
SOFTMAX(softmax, row_exp)

/* ---- packing ---- */

/* Elements [d, d + 32) of row j, 0 past the row's end; never reads past it. */
static ALWAYS_INLINE __m512i load_part(const cpu_rows *from, int64_t j, int32_t d)
{
    const bf16 *row = (const bf16 *)(const void *)(from->base + j * from->stride);
    const int32_t left = from->dim - d;
    if (left >= 32)
        return _mm512_loadu_si512(row + d);
    if (left <= 0)
        return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(((__mmask32)1 << left) - 1, row + d);
}

static CPU_PACK_ROWS(pack_rows)
{
    bf16 *out = to;
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += 32)
            _mm512_storeu_si512(out + (int64_t)i * ld + d, i < n ? load_part(from, i, d)
                                                                 : _mm512_setzero_si512());
}

/* Squares of 16 keys x 16 pairs are transposed in registers. */
static CPU_PACK_KEYS(pack_keys)
{
    const int32_t pairs = (from->dim + 1) / 2;
    float *out = to;
    for (int32_t j = 0; j < padded; j += VF) {
        float *panel = out + (int64_t)(j / PANEL) * PANEL * pairs + j % PANEL;
        for (int32_t t = 0; t < pairs; t += VF) {
            vf square[VF];
            for (int i = 0; i < VF; i++) {
                square[i] = j + i < n ? (vf)load_part(from, j + i, 2 * t) : vf_set(0);
                __builtin_prefetch(from->base + (j + i + VF) * from->stride + 4 * t, 0, 3);
            }
            vf_transpose(square);
            for (int i = 0; i < VF && t + i < pairs; i++)
                vf_store(panel + (int64_t)(t + i) * PANEL, square[i]);
        }
    }
}

static ALWAYS_INLINE int any_nonfinite(__m512i x)
{
    const __m512i exponents = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponents), exponents) != 0;
}

/* Lanes of two keys' 32 columns taken by turns, low half then high. */
static ALWAYS_INLINE void store_turns(bf16 *to, __m512i x, __m512i y)
{
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i a = _mm512_permutexvar_epi64(order, x);
    const __m512i b = _mm512_permutexvar_epi64(order, y);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(a, b));
}

static CPU_PACK_VALUES(pack_values)
{
    const __m512i zero = _mm512_setzero_si512();
    bf16 *out = to;
    int nonfinite = 0;
    for (int32_t d = 0; d < from->dim; d += PANEL, out += (int64_t)padded * PANEL)
        for (int32_t j = 0; j < padded; j += 2) {
            const __m512i x = j < n ? load_part(from, j, d) : zero;
            const __m512i y = j + 1 < n ? load_part(from, j + 1, d) : zero;
            nonfinite |= any_nonfinite(x) | any_nonfinite(y);
            __builtin_prefetch(from->base + (j + VF) * from->stride + 2 * d, 0, 3);
            __builtin_prefetch(from->base + (j + 1 + VF) * from->stride + 2 * d, 0, 3);
            store_turns(out + (int64_t)j * PANEL, x, y);
        }
    return nonfinite;
}

const cpu_kernels cpu_bf16_dot = {
    .name = "AVX512-BF16 dot products",
    .flops_of_ns = 150,
    .strip = STRIP_ROWS,
    .is_even = 1,
    .panel = PANEL,
    .element = 2,
    .depth = 2,
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
    .near_rows = 2,
    .decode_qk = cpu_decode_qk_bf16,
    .decode_pv = cpu_decode_pv_bf16,
    .prefetch_parts = 1,
    .few = &cpu_f32_avx512,
    .few_coded_rows = 4,
    .dequantise = cpu_dequantise_avx512,
    .store_rows = cpu_store_rows_avx512,
};

#endif
