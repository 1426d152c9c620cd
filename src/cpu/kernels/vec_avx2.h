/* vec_avx2.h: vectors of eight floats, AVX2 with FMA and F16C. Vocabulary: vec_portable.h. */
#ifndef SACCADE_CPU_KERNELS_VEC_AVX2_H
#define SACCADE_CPU_KERNELS_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>

/* 6 x 2 accumulators, 2 vectors of the panel and a broadcast row: 15 of 16 registers. */
enum { VF = 8, STRIP_ROWS = 6, PANEL_VECTORS = 2, HAS_FMA = 1 };

typedef __m256 vf;

static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

static inline vf vf_load_first(const float *p, int32_t n)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
}

static inline void vf_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}

static inline vf vf_set(float x)
{
    return _mm256_set1_ps(x);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

static inline float vf_max_lanes(vf x)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

static inline float vf_sum_lanes(vf x)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

static inline vf vf_scale(vf x, vf n)
{
    const vf normal = _mm256_cmp_ps(n, _mm256_set1_ps(-126.5f), _CMP_NLE_UQ);
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(x), bits);
    return _mm256_and_ps(_mm256_castsi256_ps(sum), normal);
}

static inline vf vf_round(vf x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vf vf_where_live(vf s, vf x)
{
    const vf dead = _mm256_set1_ps(-__builtin_inff());
    return _mm256_and_ps(_mm256_cmp_ps(s, dead, _CMP_NEQ_UQ), x);
}

static inline vf vf_where_nonzero(vf s, vf x)
{
    return _mm256_and_ps(_mm256_cmp_ps(s, _mm256_setzero_ps(), _CMP_NEQ_UQ), x);
}

static inline int vf_any_nonfinite(vf x)
{
    const vf zero = _mm256_mul_ps(x, _mm256_setzero_ps()); /* NaN for infinities and NaN */
    return _mm256_movemask_ps(_mm256_cmp_ps(zero, zero, _CMP_UNORD_Q));
}

static inline vf vf_note_nonfinite(vf noted, vf x)
{
    const __m256i size = _mm256_srli_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 1), 1);
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(noted), size));
}

static inline vf vf_from_bf16(const uint16_t *p)
{
    const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static inline vf vf_from_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static inline void vf_to_bf16(uint16_t *p, vf x)
{
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i r = _mm256_blendv_epi8(_mm256_add_epi32(bits, half), kept, nan);
    r = _mm256_srli_epi32(r, 16);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(r));
}

static inline void vf_to_f16(uint16_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline vf vf_sum_each(const vf r[VF])
{
    vf t[4], u[2];
    for (int i = 0; i < 4; i++) /* sums of two lanes of two rows, of four, of halves */
        t[i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1])
               + _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        u[i] = _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44)
               + _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee);
    return _mm256_permute2f128_ps(u[0], u[1], 0x20) + _mm256_permute2f128_ps(u[0], u[1], 0x31);
}

static inline void vf_transpose(vf r[VF])
{
    vf t[VF];
    for (int i = 0; i < VF; i += 2) { /* pairs, then fours, then halves */
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < VF; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < VF; i++)
        r[i] = t[i];
}

#endif
