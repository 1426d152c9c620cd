/* Number formats narrower than f32. Narrowing rounds to nearest, ties to even; NaN stays NaN,
   and signs are kept. */
#ifndef SACCADE_BASE_CONVERT_H
#define SACCADE_BASE_CONVERT_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float bf16_to_f32(uint16_t x)
{
    return f32_from_bits((uint32_t)x << 16);
}

static inline uint16_t bf16_from_f32(float x)
{
    const uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u); /* quiet, so that the cut payload isn't inf */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float f16_to_f32(uint16_t x)
{
    const uint32_t sign = (x & 0x8000u) << 16, magnitude = x & 0x7fffu;
    if (magnitude < 0x0400u) /* subnormal: a multiple of 2^-24 */
        return f32_from_bits(sign | f32_bits((float)magnitude * 0x1p-24f));
    if (magnitude >= 0x7c00u)
        return f32_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13
                             | (magnitude > 0x7c00u ? 0x400000u : 0u));
    return f32_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

/* Rounds a magnitude to a format of `shift` fewer mantissa bits whose exponents sit `rebias`
   lower. Below `normal` the unit is fixed: adding `magic`, whose ulp is that unit, rounds. */
static inline uint32_t narrow_f32(uint32_t magnitude, int shift, uint32_t rebias,
                                  uint32_t normal, float magic)
{
    if (magnitude < normal)
        return f32_bits(f32_from_bits(magnitude) + magic) - f32_bits(magic);
    const uint32_t half = (1u << (shift - 1)) - 1u + (magnitude >> shift & 1u);
    return (magnitude + half - (rebias << 23)) >> shift;
}

static inline uint16_t f16_from_f32(float x)
{
    const uint32_t bits = f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x1ffu));
    if (magnitude >= 0x477ff000u) /* 65520: halfway between the largest and what follows it */
        return (uint16_t)(sign | 0x7c00u);
    return (uint16_t)(sign | narrow_f32(magnitude, 13, 112u, 0x38800000u, 0.5f));
}

/* fp8 e4m3 (OCP, "fn"): no infinity, largest 448; narrowing saturates, as GPUs do. */
static inline float e4m3_to_f32(uint8_t x)
{
    const uint32_t sign = (x & 0x80u) << 24, magnitude = x & 0x7fu;
    if (magnitude == 0x7fu)
        return f32_from_bits(sign | 0x7fc00000u);
    if (magnitude < 8u) /* subnormal: a multiple of 2^-9 */
        return f32_from_bits(sign | f32_bits((float)magnitude * 0x1p-9f));
    return f32_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

static inline uint8_t e4m3_from_f32(float x)
{
    const uint32_t bits = f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) /* 448 */
        return (uint8_t)(sign | 0x7eu);
    return (uint8_t)(sign | narrow_f32(magnitude, 20, 120u, 0x3c800000u, 0x1p14f));
}

/* fp8 e5m2 (OCP): the upper byte of f16; narrowing saturates at 57344, infinities too. */
static inline float e5m2_to_f32(uint8_t x)
{
    return f16_to_f32((uint16_t)(x << 8));
}

static inline uint8_t e5m2_from_f32(float x)
{
    const uint32_t bits = f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u)
        return (uint8_t)(sign | 0x7eu);
    if (magnitude >= 0x47600000u) /* 57344 */
        return (uint8_t)(sign | 0x7bu);
    return (uint8_t)(sign | narrow_f32(magnitude, 21, 112u, 0x38800000u, 0x1p7f));
}

/* n contiguous elements of a floating dtype: f16, bf16, f32 or f64. */
bool convert_is_float(saccade_dtype dtype);
void convert_to_f32(saccade_dtype dtype, const void *from, float *to, int64_t n);
void convert_from_f32(saccade_dtype dtype, const float *from, void *to, int64_t n);

/* one element of any dtype but i4 as double; exact but for i64 and u64 beyond 2^53. */
double convert_element(saccade_dtype dtype, const void *element);
/* x as one element of a floating dtype, by way of f32 where that is narrower than double. */
void convert_to_element(saccade_dtype dtype, double x, void *element);

#endif
