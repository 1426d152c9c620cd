/* Rows of O to the output where bf16 is rounded by an instruction, which takes and gives 0 for
 * subnormal numbers; other dtypes as level AVX-512 has them. */
#include "cpu/kernels/kernels.h"

#if defined(LEVEL_AMX)

#include "cpu/kernels/vec.h"

#include <string.h>

enum { EACH = 2 * VF };

/* Columns of a row times one over its sum, 0 where it is not live. */
static ALWAYS_INLINE __m512i columns(const float *o, vf scale, __mmask16 live)
{
    const vf low = _mm512_maskz_mul_ps(live, vf_load(o), scale);
    const vf high = _mm512_maskz_mul_ps(live, vf_load(o + VF), scale);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

CPU_STORE_ROWS(cpu_store_rows_amx)
{
    if (dtype != SACCADE_BF16 || E % EACH) {
        cpu_store_rows_avx512(o, o_ld, l, rows, dtype, E, to, stride);
        return;
    }
    for (int32_t r = 0; r < rows; r++, o += o_ld) {
        const __mmask16 live = l[r] == 0 ? 0 : UINT16_MAX;
        const vf scale = vf_set(1 / l[r]);
        for (int32_t d = 0; d < E; d += EACH)
            _mm512_storeu_si512((char *)to + r * stride + d * 2, columns(o + d, scale, live));
    }
}

static void clear(float *o, int64_t n)
{
    for (int64_t i = 0; i < n; i += VF)
        vf_store(o + i, vf_set(0));
}

/* One over each of up to VF sums, 0 for 0. */
static ALWAYS_INLINE void invert(const float *l, int32_t n, float out[VF])
{
    const __mmask16 rows = (__mmask16)(n < VF ? (1 << n) - 1 : UINT16_MAX);
    const vf sum = _mm512_maskz_loadu_ps(rows, l);
    const __mmask16 live = _mm512_cmp_ps_mask(sum, vf_set(0), _CMP_NEQ_UQ);
    vf_store(out, _mm512_maskz_div_ps(live, vf_set(1), sum));
}

/* A row that no key is live for is 0 already. */
static ALWAYS_INLINE int take(float *o, int32_t o_ld, const float *l, int32_t rows, int32_t E,
                              char *to, int64_t stride, int is_far)
{
    __m512i most = _mm512_setzero_si512(); /* bits but for signs */
    float scale[VF];
    for (int32_t r = 0; r < rows; r++, o += o_ld, to += stride) {
        if (r % VF == 0)
            invert(l + r, rows - r, scale);
        const vf by = vf_set(scale[r % VF]);
        for (int32_t d = 0; d < E; d += EACH) {
            const __m512i x = columns(o + d, by, UINT16_MAX);
            if (is_far)
                _mm512_stream_si512((void *)(to + d * 2), x);
            else
                _mm512_storeu_si512(to + d * 2, x);
            most = _mm512_max_epu16(most, _mm512_add_epi16(x, x));
            clear(o + d, EACH);
        }
    }
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16((int16_t)0xff00)) != 0;
}

CPU_TAKE_ROWS(cpu_take_rows_amx)
{
    if (dtype != SACCADE_BF16 || E % EACH) {
        const int is_nonfinite = cpu_any_nonfinite_avx512(o, (int64_t)rows * o_ld);
        cpu_store_rows_avx512(o, o_ld, l, rows, dtype, E, to, stride);
        clear(o, (int64_t)rows * o_ld);
        return is_nonfinite;
    }
    if (!is_far || ((uintptr_t)to | (uintptr_t)stride) % 64)
        return take(o, o_ld, l, rows, E, to, stride, 0);
    return take(o, o_ld, l, rows, E, to, stride, 1);
}

#endif
