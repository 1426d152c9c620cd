/* vec_avx512.h: vectors of sixteen floats, AVX-512 F BW VL DQ. Vocabulary: vec_portable.h. */
#ifndef SACCADE_CPU_KERNELS_VEC_AVX512_H
#define SACCADE_CPU_KERNELS_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>

/* 12 x 2 accumulators, 2 vectors of the panel and a broadcast row: 27 of 32 registers. */
enum { VF = 16, STRIP_ROWS = 12, PANEL_VECTORS = 2, HAS_FMA = 1 };

typedef __m512 vf;

static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

/* The first n of a vector's elements, fewer than all, and zeros. */
static inline vf vf_load_first(const float *p, int32_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

static inline void vf_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}

static inline vf vf_set(float x)
{
    return _mm512_set1_ps(x);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

static inline float vf_max_lanes(vf x)
{
    return _mm512_reduce_max_ps(x);
}

static inline float vf_sum_lanes(vf x)
{
    return _mm512_reduce_add_ps(x);
}

/* Subnormal results would cost Intel's CPUs a hundred cycles each, here and in products. */
static inline vf vf_scale(vf x, vf n)
{
    const __mmask16 normal = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, x, n);
}

#define VF_HAS_FRACTION 1

/* x - floor(x); 0 for infinities. vf_scale takes any n here, by its floor, and gives 0
 * below -126. */
static inline vf vf_fraction(vf x)
{
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

static inline vf vf_round(vf x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vf vf_where_live(vf s, vf x)
{
    const vf dead = _mm512_set1_ps(-__builtin_inff());
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(s, dead, _CMP_NEQ_UQ), x);
}

static inline vf vf_where_nonzero(vf s, vf x)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_NEQ_UQ), x);
}

static inline int vf_any_nonfinite(vf x)
{
    return _mm512_fpclass_ps_mask(x, 0x99) != 0; /* quiet, +inf, -inf, signalling */
}

static inline vf vf_note_nonfinite(vf noted, vf x)
{
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MAX));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(noted), size));
}

static inline vf vf_from_bf16(const uint16_t *p)
{
    const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

static inline vf vf_from_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

static inline void vf_to_bf16(uint16_t *p, vf x)
{
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i r = _mm512_add_epi32(bits, half);
    r = _mm512_mask_or_epi32(r, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}

static inline void vf_to_f16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/* Lane i of the result: all lanes of r[i] by `op`. */
#define VF_EACH(name, op)                                                                   \
    static inline vf name(const vf r[VF])                                                   \
    {                                                                                       \
        vf t[8], u[4], v[2];                                                                \
        for (int i = 0; i < 8; i++) /* two lanes of two rows, of four, of quarters twice */ \
            t[i] = op(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]),                           \
                      _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));                          \
        for (int i = 0; i < 4; i++)                                                         \
            u[i] = op(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),                      \
                      _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));                     \
        for (int i = 0; i < 2; i++)                                                         \
            v[i] = op(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88),                   \
                      _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));                  \
        return op(_mm512_shuffle_f32x4(v[0], v[1], 0x88),                                   \
                  _mm512_shuffle_f32x4(v[0], v[1], 0xdd));                                  \
    }

VF_EACH(vf_sum_each, _mm512_add_ps)
VF_EACH(vf_max_each, _mm512_max_ps)

static inline void vf_transpose(vf r[VF])
{
    vf t[VF];
    for (int i = 0; i < VF; i += 2) { /* pairs, fours, then quarters twice */
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < VF; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

#endif
