/* vec_codes.h: vectors of VF floats from codes of quantised K and V, for *_tmpl.c, after vec.h.
 * e4m3 comes as its value times 2^-8: as f16 it is one shift away, subnormals included, and the
 * scale makes up for the rest. */
#ifndef SACCADE_CPU_KERNELS_VEC_CODES_H
#define SACCADE_CPU_KERNELS_VEC_CODES_H

#include "base/convert.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#include <string.h>

#if defined(LEVEL_AVX2)
/* The two halves of each of 8 bytes as signed bytes. */
static ALWAYS_INLINE __m128i i4_bytes(__m128i packed)
{
    const __m128i w = _mm_cvtepu8_epi16(packed), both = _mm_or_si128(w, _mm_slli_epi16(w, 4));
    const __m128i half = _mm_and_si128(both, _mm_set1_epi8(15)), eight = _mm_set1_epi8(8);
    return _mm_sub_epi8(_mm_xor_si128(half, eight), eight);
}
#endif

#if defined(LEVEL_AVX512) || defined(LEVEL_AMX)

static ALWAYS_INLINE __m128i code_bytes(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static ALWAYS_INLINE vf vf_from_i8_bytes(__m128i x)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}

/* Signed bytes shifted to where f16 has its mantissa: the second copy of the sign goes. */
static ALWAYS_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    const __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(code_bytes(p)), 7);
    const __m256i bits = _mm256_and_si256(w, _mm256_set1_epi16((int16_t)0xbf80));
    const __m256i size = _mm256_and_si256(w, _mm256_set1_epi16(0x3f80));
    const __mmask16 number = _mm256_cmpneq_epi16_mask(size, _mm256_set1_epi16(0x3f80));
    const vf nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffe000));
    return _mm512_mask_cvtph_ps(nan, number, bits);
}

static ALWAYS_INLINE vf vf_from_e5m2(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(code_bytes(p)), 8));
}

/* Eight codes of a word to the upper ends of eight lanes, and down again with their signs. */
static ALWAYS_INLINE vf vf_from_i4(const uint8_t *p)
{
    const __m512i word = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i up =
        _mm512_set_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m128i both = _mm_loadl_epi64((const __m128i *)(const void *)p);
    const __m512i words = _mm512_permutexvar_epi32(word, _mm512_castsi128_si512(both));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sllv_epi32(words, up), 28));
}

#elif defined(LEVEL_AVX2)

static ALWAYS_INLINE __m128i code_bytes(const uint8_t *p)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)p);
}

static ALWAYS_INLINE vf vf_from_i8_bytes(__m128i x)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
}

static ALWAYS_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    const __m128i w = _mm_cvtepu8_epi16(code_bytes(p));
    const __m128i most = _mm_set1_epi16(0x7f), size = _mm_and_si128(w, most);
    const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(most, w), 8);
    const __m128i nan = _mm_slli_epi16(_mm_cmpeq_epi16(size, most), 9);
    const __m128i nan_bits = _mm_and_si128(nan, _mm_set1_epi16(0x7e00));
    const __m128i bits = _mm_or_si128(_mm_slli_epi16(size, 7), sign);
    return _mm256_cvtph_ps(_mm_or_si128(bits, nan_bits));
}

static ALWAYS_INLINE vf vf_from_e5m2(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(code_bytes(p)), 8));
}

static ALWAYS_INLINE vf vf_from_i4(const uint8_t *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return vf_from_i8_bytes(i4_bytes(_mm_cvtsi32_si128(word)));
}

#endif

#if defined(LEVEL_AVX2) || defined(LEVEL_AVX512) || defined(LEVEL_AMX)

static ALWAYS_INLINE vf vf_from_i8(const uint8_t *p)
{
    return vf_from_i8_bytes(code_bytes(p));
}

#else

static ALWAYS_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    vf x;
    for (int i = 0; i < VF; i++)
        x[i] = e4m3_to_f32(p[i]) * (1 / CPU_E4M3_FACTOR);
    return x;
}

static ALWAYS_INLINE vf vf_from_e5m2(const uint8_t *p)
{
    vf x;
    for (int i = 0; i < VF; i++)
        x[i] = e5m2_to_f32(p[i]);
    return x;
}

static ALWAYS_INLINE vf vf_from_i8(const uint8_t *p)
{
    vf x;
    for (int i = 0; i < VF; i++)
        x[i] = (float)(int8_t)p[i];
    return x;
}

static ALWAYS_INLINE vf vf_from_i4(const uint8_t *p)
{
    vf x;
    for (int i = 0; i < VF; i++)
        x[i] = (float)(((p[i / 2] >> (i % 2 * 4) & 15) ^ 8) - 8);
    return x;
}

#endif

/* Codes [d, d + VF) of a row. */
static ALWAYS_INLINE vf vf_from_codes(saccade_dtype dtype, const uint8_t *row, int32_t d)
{
    if (dtype == SACCADE_E4M3)
        return vf_from_e4m3(row + d);
    if (dtype == SACCADE_E5M2)
        return vf_from_e5m2(row + d);
    return dtype == SACCADE_I8 ? vf_from_i8(row + d) : vf_from_i4(row + d / 2);
}

#endif
