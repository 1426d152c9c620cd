/* arith.h: what the operations of ops.def compute, the one definition of it. ar_* are int32,
 * fm_* float. Nothing here is undefined behaviour, and every fm_* is a fixed sequence of IEEE
 * + - * / sqrt and integer operations (no libm, no fused multiply-add, no fast-math), without
 * branches, so that it gives the same bits in C, vectorised, in generated code and on a GPU
 * (NVRTC compiles this very file, without contraction). Only the bits of a NaN are open.
 * Maximum errors over all float32 in ulp (SACCADE_EXHAUSTIVE=1 t_eval_arith):
 *   exp 1.0  exp2 1.1  log 0.9  log2 0.9  sin 2.8  cos 2.8  tan 4.7  tanh 1.4  sigmoid 2.5
 *   erf 1.4  rsqrt 1.5  pow 0.51 (sampled); floor ceil trunc round abs sqrt exact. */
#ifndef SACCADE_MOD_ARITH_H
#define SACCADE_MOD_ARITH_H

#include "base/convert.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* ---- int32: wraps; by 0 gives 0; INT_MIN / -1 wraps; shift counts mod 32 ---- */

static inline int32_t ar_add(int32_t x, int32_t y)
{
    return (int32_t)((uint32_t)x + (uint32_t)y);
}

static inline int32_t ar_sub(int32_t x, int32_t y)
{
    return (int32_t)((uint32_t)x - (uint32_t)y);
}

static inline int32_t ar_mul(int32_t x, int32_t y)
{
    return (int32_t)((uint32_t)x * (uint32_t)y);
}

/* Truncates. The double quotient is exact enough: it is at least 1 / |y| away from a whole
 * number that it doesn't equal, and its ulp is smaller. This form vectorises. */
static inline int32_t ar_div(int32_t x, int32_t y)
{
    const int32_t divisor = y == 0 || y == -1 ? 1 : y;
    const int32_t quotient = (int32_t)((double)x / (double)divisor);
    const int32_t result = y == -1 ? ar_sub(0, x) : quotient;
    return y == 0 ? 0 : result;
}

static inline int32_t ar_rem(int32_t x, int32_t y)
{
    const int32_t rest = ar_sub(x, ar_mul(ar_div(x, y), y));
    return y == 0 ? 0 : rest;
}

/* Rounds towards minus infinity, as Python's //. */
static inline int32_t ar_floordiv(int32_t x, int32_t y)
{
    const int32_t quotient = ar_div(x, y), rest = ar_rem(x, y);
    return ar_sub(quotient, rest != 0 && (rest ^ y) < 0);
}

/* Has the sign of y, as Python's %. */
static inline int32_t ar_floormod(int32_t x, int32_t y)
{
    const int32_t rest = ar_rem(x, y);
    return ar_add(rest, rest != 0 && (rest ^ y) < 0 ? y : 0);
}

static inline int32_t ar_shl(int32_t x, int32_t y)
{
    return (int32_t)((uint32_t)x << (y & 31));
}

/* Keeps the sign. */
static inline int32_t ar_shr(int32_t x, int32_t y)
{
    return x >> (y & 31);
}

/* Truncates, saturates, NaN gives 0. */
static inline int32_t ar_f2i(float x)
{
    const float number = x == x ? x : 0.0f;
    const float above = number < -0x1p31f ? -0x1p31f : number;
    const int32_t whole = (int32_t)(above > 0x1.fffffep30f ? 0x1.fffffep30f : above);
    return number >= 0x1p31f ? INT32_MAX : whole;
}

/* ---- float: exactly rounded ---- */

static inline float fm_fabs(float x)
{
    return f32_from_bits(f32_bits(x) & 0x7fffffffu);
}

/* magnitude of x, sign of y. */
static inline float fm_with_sign(float x, float y)
{
    return f32_from_bits((f32_bits(x) & 0x7fffffffu) | (f32_bits(y) & 0x80000000u));
}

/* Adding 2^23 to a smaller float rounds it to a whole number; from there on all are whole. */
static inline float fm_trunc(float x)
{
    const float a = fm_fabs(x);
    const float near = (a + 0x1p23f) - 0x1p23f;
    const float down = near > a ? near - 1.0f : near;
    return fm_with_sign(a < 0x1p23f ? down : a, x);
}

static inline float fm_floor(float x)
{
    const float whole = fm_trunc(x);
    return whole > x ? whole - 1.0f : whole;
}

static inline float fm_ceil(float x)
{
    const float whole = fm_trunc(x);
    return whole < x ? whole + 1.0f : whole;
}

/* To nearest, half away from zero, as C's roundf. */
static inline float fm_round(float x)
{
    const float whole = fm_trunc(x);
    const float next = whole + fm_with_sign(1.0f, x);
    return fm_fabs(x - whole) >= 0.5f ? next : whole;
}

static inline float fm_sqrt(float x)
{
    return sqrtf(x);
}

static inline float fm_rsqrt(float x)
{
    return 1.0f / sqrtf(x);
}

/* ---- exponentials ---- */

/* Adding it to a small float leaves the nearest whole number in the low bits of the sum. */
#define FM_ROUND 0x1.8p23f

/* y * 2^n for |n| <= 250, rounded once: the first product is exact. */
static inline float fm_scale(float y, uint32_t n)
{
    const uint32_t half = (uint32_t)((int32_t)n >> 1);
    return y * f32_from_bits((half + 127u) << 23) * f32_from_bits((n - half + 127u) << 23);
}

/* e^x = 2^n e^r, |r| <= ln 2 / 2; ln 2 in two parts (Cody and Waite), minimax polynomial. */
static inline float fm_exp(float x)
{
    const float above = x < -104.0f ? -104.0f : x; /* gives 0; the other end gives infinity */
    const float v = above > 89.0f ? 89.0f : above;
    const float shifted = v * 0x1.715476p+0f + FM_ROUND;
    const float n = shifted - FM_ROUND;
    const float r = v - n * 0x1.63p-1f - n * -0x1.bd0106p-13f;
    float p = 0x1.6a4d74p-10f;
    p = p * r + 0x1.123e58p-7f;
    p = p * r + 0x1.5558b8p-5f;
    p = p * r + 0x1.55548cp-3f;
    p = p * r + 0x1.fffffcp-2f;
    return fm_scale(1.0f + (r + r * r * p), f32_bits(shifted) - f32_bits(FM_ROUND));
}

/* 2^x = 2^n 2^r, |r| <= 1/2; exact for whole x. */
static inline float fm_exp2(float x)
{
    const float above = x < -151.0f ? -151.0f : x;
    const float v = above > 129.0f ? 129.0f : above;
    const float shifted = v + FM_ROUND;
    const float r = v - (shifted - FM_ROUND);
    float p = 0x1.417a34p-13f;
    p = p * r + 0x1.5f0f74p-10f;
    p = p * r + 0x1.3b2ddap-7f;
    p = p * r + 0x1.c6af72p-5f;
    p = p * r + 0x1.ebfbdcp-3f;
    return fm_scale(1.0f + (0x1.62e43p-1f * r + r * r * p),
                    f32_bits(shifted) - f32_bits(FM_ROUND));
}

/* ---- logarithms ---- */

/* x = 2^k (1 + f), 1 + f within sqrt(1/2) .. sqrt(2); s = f / (2 + f) and
 * log(1 + f) = f - f^2/2 + s (f^2/2 + rest). x positive, finite. */
typedef struct fm_log_parts {
    float k, f, half, tail; /* half: f^2/2; tail: s (f^2/2 + rest) */
} fm_log_parts;

static inline fm_log_parts fm_split_log(float x)
{
    const int is_tiny = x < 0x1p-126f;
    const uint32_t bits = f32_bits(is_tiny ? x * 0x1p24f : x);
    const uint32_t moved = bits - 0x3f3504f3u; /* sqrt(1/2) */
    const int32_t k = (int32_t)moved >> 23;
    const float f = f32_from_bits(bits - ((uint32_t)k << 23)) - 1.0f;
    const float s = f / (2.0f + f), z = s * s;
    float p = 0x1.f13b2p-3f;
    p = p * z + 0x1.23d3ep-2f;
    p = p * z + 0x1.999c26p-2f;
    p = p * z + 0x1.555554p-1f;
    fm_log_parts parts;
    parts.k = (float)(is_tiny ? k - 24 : k);
    parts.f = f;
    parts.half = 0.5f * f * f;
    parts.tail = s * (parts.half + z * p);
    return parts;
}

/* Puts the ends right: 0, negative, infinity, NaN. */
static inline float fm_end_log(float x, float result)
{
    const float number = x < INFINITY ? result : x; /* infinity and NaN stay */
    const float positive = x < 0.0f ? NAN : number;
    return x == 0.0f ? -INFINITY : positive;
}

static inline float fm_log(float x)
{
    const fm_log_parts a = fm_split_log(x);
    const float low = a.tail + a.k * 0x1.7f7d1cp-20f;
    return fm_end_log(x, (low - a.half + a.f) + a.k * 0x1.62e4p-1f);
}

/* log(1 + f) in two floats times 1 / ln 2 in two floats; exact for powers of two. */
static inline float fm_log2(float x)
{
    const fm_log_parts a = fm_split_log(x);
    const float high = f32_from_bits(f32_bits(a.f - a.half) & 0xfffff000u);
    const float low = (a.f - high) - a.half + a.tail;
    const float sum = (low + high) * 0x1.47652cp-12f + low * 0x1.714p+0f + high * 0x1.714p+0f;
    return fm_end_log(x, sum + a.k);
}

/* ---- trigonometry ---- */

/* 2 / pi after the binary point, 32 zeros first. */
static const uint32_t fm_two_over_pi[9] = {0u,          0xa2f9836eu, 0x4e441529u,
                                           0xfc2757d1u, 0xf534ddc0u, 0xdb629599u,
                                           0x3c439041u, 0xfe5163abu, 0xdebbc561u};

static inline uint32_t fm_window(uint32_t word, uint32_t shift)
{
    const uint64_t pair = (uint64_t)fm_two_over_pi[word] << 32 | fm_two_over_pi[word + 1];
    return (uint32_t)(pair << shift >> 32);
}

/* |x| = (quadrant + 4 n) pi/2 + result, |result| <= pi/4 (1 + 2^-22), for any finite x, by
 * Payne and Hanek: the 96 bits of 2/pi that matter at x's exponent, times its 24 bits, give
 * |x| 2/pi mod 4 as a fixed-point number of 2 + 62 bits. */
static inline float fm_reduce(float x, uint32_t *quadrant)
{
    const uint32_t bits = f32_bits(x) & 0x7fffffffu, exponent = bits >> 23;
    const uint32_t m = (bits & 0x7fffffu) | 0x800000u;
    const uint32_t start = exponent < 120u ? 0u : exponent - 120u;
    const uint32_t word = start >> 5, shift = start & 31u;
    const uint64_t turns = ((uint64_t)(m * fm_window(word, shift)) << 32)
                           + (uint64_t)m * fm_window(word + 1, shift)
                           + ((uint64_t)m * fm_window(word + 2, shift) >> 32)
                           + 0x2000000000000000u; /* half a quadrant, to round */
    const int64_t rest = (int64_t)(turns & 0x3fffffffffffffffu) - 0x2000000000000000;
    const uint64_t a = (uint64_t)(rest < 0 ? -rest : rest);
    const float high = (float)(int32_t)(a >> 38) * 0x1p-24f; /* each part is exact */
    const float low = (float)(int32_t)(a >> 14 & 0xffffffu) * 0x1p-48f
                      + (float)(int32_t)(a & 0x3fffu) * 0x1p-62f;
    const float r = (high + low) * 0x1.921fb6p+0f;
    const int is_small = bits <= 0x3f490fdbu; /* pi/4 */
    *quadrant = is_small ? 0u : (uint32_t)(turns >> 62);
    return is_small ? f32_from_bits(bits) : rest < 0 ? -r : r;
}

static inline float fm_sin_near(float r)
{
    const float z = r * r;
    float p = -0x1.9951f2p-13f;
    p = p * z + 0x1.110774p-7f;
    p = p * z + -0x1.555546p-3f;
    return r + r * z * p;
}

static inline float fm_cos_near(float r)
{
    const float z = r * r;
    float p = 0x1.99e80cp-16f;
    p = p * z + -0x1.6c0c28p-10f;
    p = p * z + 0x1.55554ap-5f;
    return 1.0f - (0.5f * z - z * z * p);
}

/* sin(r + quadrant pi/2); infinite and NaN x give NaN. */
static inline float fm_turn(float x, float r, uint32_t quadrant)
{
    const float s = fm_sin_near(r), c = fm_cos_near(r);
    const uint32_t bits = f32_bits(quadrant & 1u ? c : s) ^ (quadrant & 2u) << 30;
    return fm_fabs(x) < INFINITY ? f32_from_bits(bits) : NAN;
}

static inline float fm_sin(float x)
{
    uint32_t quadrant;
    const float r = fm_reduce(x, &quadrant);
    const float y = fm_turn(x, r, quadrant);
    return f32_from_bits(f32_bits(y) ^ (f32_bits(x) & 0x80000000u));
}

static inline float fm_cos(float x)
{
    uint32_t quadrant;
    const float r = fm_reduce(x, &quadrant);
    return fm_turn(x, r, quadrant + 1u);
}

static inline float fm_tan(float x)
{
    uint32_t quadrant;
    const float r = fm_reduce(x, &quadrant);
    const float s = fm_sin_near(r), c = fm_cos_near(r);
    const int is_odd = (int)(quadrant & 1u);
    const float y = (is_odd ? -c : s) / (is_odd ? s : c);
    const float turned = f32_from_bits(f32_bits(y) ^ (f32_bits(x) & 0x80000000u));
    return fm_fabs(x) < INFINITY ? turned : NAN;
}

/* ---- bounded curves ---- */

static inline float fm_tanh(float x)
{
    const float a = fm_fabs(x), z = a * a;
    float p = -0x1.750ce4p-8f;
    p = p * z + 0x1.51f8cep-6f;
    p = p * z + -0x1.b835a4p-5f;
    p = p * z + 0x1.1106f6p-3f;
    p = p * z + -0x1.555532p-2f;
    const float near = a + a * z * p;
    const float far = 1.0f - 2.0f / (fm_exp(2.0f * a) + 1.0f);
    return fm_with_sign(a < 0.625f ? near : far, x);
}

/* 1 / (1 + e^-x), from the exponential that can't overflow. */
static inline float fm_sigmoid(float x)
{
    const float e = fm_exp(-fm_fabs(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* Near 0 an odd polynomial; beyond, 1 - e^-g with g = -log erfc as a polynomial. */
static inline float fm_erf(float x)
{
    const float a = fm_fabs(x), z = a * a;
    float p = 0x1.49fb9ap-14f;
    p = p * z + -0x1.a4d07ep-11f;
    p = p * z + 0x1.54318ap-8f;
    p = p * z + -0x1.b7ff9p-6f;
    p = p * z + 0x1.ce2d5cp-4f;
    p = p * z + -0x1.81274p-2f;
    p = p * z + 0x1.06eba8p-3f;
    const float near = a + a * p;
    const float b = a > 3.95f ? 3.95f : a; /* erf is 1 from there on */
    float g = 0x1.55ae3cp-16f;
    g = g * b + -0x1.bed09p-12f;
    g = g * b + 0x1.0ebbf6p-8f;
    g = g * b + -0x1.99da64p-6f;
    g = g * b + 0x1.badd9ap-4f;
    g = g * b + 0x1.4458a8p-1f;
    g = g * b + 0x1.21235cp+0f;
    g = g * b + -0x1.50b0b6p-13f;
    const float far = 1.0f - fm_exp(-g);
    return fm_with_sign(a < 0.875f ? near : far, x);
}

/* ---- power, in double: y log2 x needs some 40 bits ---- */

static inline uint64_t fm_bits64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double fm_from_bits64(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* log2 of a positive float, relative error 2^-48: 2/ln 2 atanh(s) as its series. */
static inline double fm_log2_wide(float x)
{
    const uint64_t bits = fm_bits64((double)x);
    const uint64_t moved = bits - 0x3fe6a09e667f3bcdu; /* sqrt(1/2) */
    const int32_t k = (int32_t)(moved >> 32) >> 20;
    const double f = fm_from_bits64(bits - ((uint64_t)(uint32_t)k << 52)) - 1.0;
    const double s = f / (2.0 + f), z = s * s;
    double p = 0x1.3703c1f4d0ffep-3;
    p = p * z + 0x1.5b9ac9b743f0dp-3;
    p = p * z + 0x1.89f3b1694cffep-3;
    p = p * z + 0x1.c68f568d31760p-3;
    p = p * z + 0x1.0c9a84994022dp-2;
    p = p * z + 0x1.484b13d7c02a9p-2;
    p = p * z + 0x1.a61762a7aded9p-2;
    p = p * z + 0x1.2776c50ef9bfep-1;
    p = p * z + 0x1.ec709dc3a03fdp-1;
    p = p * z + 0x1.71547652b82fep+1;
    return s * p + (double)k;
}

/* 2^t, |t| <= 200, relative error 2^-46: the series of e^(r ln 2). */
static inline double fm_exp2_wide(double t)
{
    const double shifted = t + 0x1.8p52, r = t - (shifted - 0x1.8p52);
    double p = 0x1.e8cac7351bb25p-32;
    p = p * r + 0x1.e4cf5158b8ecap-28;
    p = p * r + 0x1.b5253d395e7c4p-24;
    p = p * r + 0x1.62c0223a5c824p-20;
    p = p * r + 0x1.ffcbfc588b0c7p-17;
    p = p * r + 0x1.430912f86c787p-13;
    p = p * r + 0x1.5d87fe78a6731p-10;
    p = p * r + 0x1.3b2ab6fba4e77p-7;
    p = p * r + 0x1.c6b08d704a0c0p-5;
    p = p * r + 0x1.ebfbdff82c58fp-3;
    p = p * r + 0x1.62e42fefa39efp-1;
    p = p * r + 1.0;
    return p * fm_from_bits64((fm_bits64(shifted) + 1023u) << 52);
}

/* As C's pow, ends included. & and | join conditions: no branches. */
static inline float fm_pow(float x, float y)
{
    const float a = fm_fabs(x), y_size = fm_fabs(y);
    const int is_whole = fm_trunc(y) == y;
    const int is_odd = (y_size < 0x1p24f) & is_whole & ar_f2i(y);
    const double finite = a < INFINITY ? fm_log2_wide(a) : (double)a;
    const double t = (double)y * (a == 0.0f ? -(double)INFINITY : finite);
    const double above = t < -200.0 ? -200.0 : t;
    const float size = (float)fm_exp2_wide(above > 200.0 ? 200.0 : above);
    const int is_undefined = (x < 0.0f) & !is_whole & (a < INFINITY);
    const float result = is_undefined ? NAN : size;
    const uint32_t sign = f32_bits(x) & 0x80000000u & (uint32_t)-is_odd;
    const int is_one = (x == 1.0f) | (y == 0.0f) | ((x == -1.0f) & (y_size == INFINITY));
    return is_one ? 1.0f : f32_from_bits(f32_bits(result) ^ sign);
}

#endif
