/* New keys into the pools of a cache (saccade_append): a warp to a row of one head, of K where
 * blockIdx.y is 0 and of V where it is 1. Scales that a row has alone are made here, by the
 * rule of base/quantize.c and with its bits. */
#include "convert.cuh"

#include "append.h"
#include "elements.cuh"

enum { WARPS = 8, EACH = 4 };

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;

/* ---- elements ---- */

/* Elements d to d + 3 of a row, as many as lie before D; zeros else. */
DEVICE void load_four(const append_side &s, const char *row, int d, float (&x)[EACH])
{
    if (!s.is_even) {
        for (int i = 0; i < EACH; i++)
            x[i] = d + i < s.D ? load_as(row, d + i, s.from_dtype) : 0.f;
    } else if (s.from_dtype == DTYPE_F32) {
        float4 y = *(const float4 *)(row + 4 * d);
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
        uint2 y = *(const uint2 *)(row + 2 * d);
        u32 pair[2] = {y.x, y.y};
        for (int i = 0; i < EACH; i++) {
            u16 half = (u16)(pair[i / 2] >> 16 * (i & 1));
            x[i] = s.from_dtype == DTYPE_F16 ? f16_value(half) : bf16_value(half);
        }
    }
}

/* ---- codes: as base/convert.h and base/quantize.c make them ---- */

/* magnitude, finite and within range, to a format of `shift` fewer bits of mantissa */
DEVICE u32 narrowed(u32 magnitude, int shift, u32 rebias, u32 normal, float magic)
{
    if (magnitude < normal)
        return __float_as_uint(__uint_as_float(magnitude) + magic) - __float_as_uint(magic);
    u32 half = (1u << (shift - 1)) - 1u + (magnitude >> shift & 1u);
    return (magnitude + half - (rebias << 23)) >> shift;
}

DEVICE u32 fp8_code(int dtype, float x)
{
    u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    int is_e4m3 = dtype == DTYPE_E4M3;
    if (magnitude > 0x7f800000u)
        return sign | (is_e4m3 ? 0x7fu : 0x7eu);
    if (magnitude >= (is_e4m3 ? 0x43e00000u : 0x47600000u)) /* 448, 57344 */
        return sign | (is_e4m3 ? 0x7eu : 0x7bu);
    return sign
           | (is_e4m3 ? narrowed(magnitude, 20, 120u, 0x3c800000u, 16384.f)
                      : narrowed(magnitude, 21, 112u, 0x38800000u, 128.f));
}

DEVICE int whole_code(float x, float most)
{
    if (x != x)
        return 0;
    return __float2int_rn(x > most ? most : x < -most ? -most : x);
}

DEVICE int is_finite(float x)
{
    return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u;
}

DEVICE u32 code_of(int dtype, float x, float scale)
{
    if (dtype == DTYPE_I8)
        return (u32)whole_code(x / scale, 127.f) & 255u;
    if (dtype == DTYPE_I4)
        return (u32)whole_code(x / scale, 7.f) & 15u;
    if (x == 0.f && scale == 0.f) /* of a head of zeros alone: not 0 / 0 */
        return fp8_code(dtype, x);
    return fp8_code(dtype, is_finite(x) ? x / scale : __uint_as_float(0x7fc00000u));
}

/* ---- scales ---- */

DEVICE float largest_code(int dtype)
{
    return dtype == DTYPE_E4M3   ? 448.f
           : dtype == DTYPE_E5M2 ? 57344.f
           : dtype == DTYPE_I8   ? 127.f
                                 : 7.f;
}

/* Of the bits of a group's largest magnitude. */
DEVICE float made_scale(const append_side &s, u32 most)
{
    if (most >= 0x7f800000u)
        return __uint_as_float(0x7fc00000u);
    float scale = most ? __uint_as_float(most) / largest_code(s.to_dtype) : 1.f;
    if (!s.scale_is_f16)
        return scale > 0.f ? scale : __uint_as_float(1u);
    float rounded = f16_value(f16_bits(scale));
    return rounded == 0.f ? 5.9604645e-8f : is_finite(rounded) ? rounded : 65504.f;
}

/* The scale of channels [first, end) at `at`, made of the row or read. */
DEVICE float settle_scale(const append_side &s, const char *row, int first, int end, char *at)
{
    int lane = threadIdx.x & 31;
    u32 most = 0;
    if (!s.scale)
        return 1.f;
    if (!s.is_made)
        return s.scale_is_f16 ? f16_value(*(const u16 *)at) : *(const float *)at;
    for (int d = first / EACH * EACH + EACH * lane; d < end; d += 32 * EACH) {
        float x[EACH];
        load_four(s, row, d, x);
        for (int i = 0; i < EACH; i++) {
            u32 magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
            int counts = d + i >= first && d + i < end
                         && (s.to_dtype == DTYPE_I8 || s.to_dtype == DTYPE_I4
                             || magnitude < 0x7f800000u);
            most = counts ? max(most, magnitude) : most;
        }
    }
    float scale = made_scale(s, __reduce_max_sync(~0u, most));
    if (lane == 0 && s.scale_is_f16)
        *(u16 *)at = scale == scale ? f16_bits(scale) : (u16)0x7e00;
    else if (lane == 0)
        *(float *)at = scale;
    return scale;
}

/* ---- rows ---- */

DEVICE void store_code(const append_side &s, char *row, int d, u32 code)
{
    if (s.to_dtype != DTYPE_I4) {
        ((u8 *)row)[d] = (u8)code;
        return;
    }
    int shift = d % 2 ? 4 : 0;
    u8 *byte = (u8 *)row + d / 2;
    *byte = (u8)((*byte & (0xf0 >> shift)) | code << shift);
}

/* Four codes from a multiple of 4 on; those of channels [first, end) alone. */
DEVICE void store_four(const append_side &s, char *row, int d, int first, int end,
                       const u32 (&code)[EACH])
{
    if (s.is_even && d >= first && d + EACH <= end) {
        if (s.to_dtype == DTYPE_I4)
            *(u16 *)(row + d / 2) =
                (u16)(code[0] | code[1] << 4 | code[2] << 8 | code[3] << 12);
        else
            *(u32 *)(row + d) = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
        return;
    }
    for (int i = 0; i < EACH; i++)
        if (d + i >= first && d + i < end)
            store_code(s, row, d + i, code[i]);
}

DEVICE void quantise_row(const append_side &s, const char *from, char *to, char *scale)
{
    int lane = threadIdx.x & 31, span = s.channels ? s.channels : s.D;
    int scale_bytes = s.scale_is_f16 ? 2 : 4;
    for (int first = 0, g = 0; first < s.D; first += span, g++) {
        int end = s.D - first < span ? s.D : first + span;
        float by = settle_scale(s, from, first, end, scale + g * s.scale_d * scale_bytes);
        for (int d = first / EACH * EACH + EACH * lane; d < end; d += 32 * EACH) {
            float x[EACH];
            u32 code[EACH];
            load_four(s, from, d, x);
            for (int i = 0; i < EACH; i++)
                code[i] = code_of(s.to_dtype, x[i], by);
            store_four(s, to, d, first, end, code);
        }
        __syncwarp(); /* two groups may share a byte */
    }
}

DEVICE void cast_row(const append_side &s, const char *from, char *to)
{
    for (int d = EACH * (threadIdx.x & 31); d < s.D; d += 32 * EACH) {
        float x[EACH];
        load_four(s, from, d, x);
        if (s.to_dtype == DTYPE_F32) {
            if (s.is_even)
                *(float4 *)(to + 4 * d) = make_float4(x[0], x[1], x[2], x[3]);
            else
                for (int i = 0; i < EACH && d + i < s.D; i++)
                    ((float *)to)[d + i] = x[i];
            continue;
        }
        u16 y[EACH];
        for (int i = 0; i < EACH; i++)
            y[i] = s.to_dtype == DTYPE_F16 ? f16_bits(x[i]) : bf16_bits(x[i]);
        if (s.is_even)
            *(uint2 *)(to + 2 * d) = make_uint2(y[0] | (u32)y[1] << 16, y[2] | (u32)y[3] << 16);
        else
            for (int i = 0; i < EACH && d + i < s.D; i++)
                ((u16 *)to)[d + i] = y[i];
    }
}

DEVICE int bytes_of(int dtype)
{
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F16 || dtype == DTYPE_BF16 ? 2 : 1;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    append_keys(const __grid_constant__ kv_append a)
{
    const append_side &s = a.side[blockIdx.y];
    long long item = (long long)blockIdx.x * WARPS + threadIdx.x / 32, t = item / a.heads;
    int h = (int)(item % a.heads), is_code = s.to_dtype >= DTYPE_E4M3 || s.to_dtype == DTYPE_I8;
    if (t >= a.n)
        return;
    append_place at = append_place_of(&a, t);
    if (at.page < 0)
        return;
    const char *from =
        (const char *)s.from + (t * s.from_n + h * s.from_h) * bytes_of(s.from_dtype);
    long long place = at.page * s.to_b + h * s.to_h + at.key * s.to_n;
    char *to =
        (char *)s.to + (s.to_dtype == DTYPE_I4 ? place / 2 : place * bytes_of(s.to_dtype));
    long long group = s.tokens ? at.key / s.tokens : 0;
    char *scale =
        (char *)s.scale
        + (at.page * s.scale_b + h * s.scale_h + group * s.scale_n) * (s.scale_is_f16 ? 2 : 4);
    if (is_code)
        quantise_row(s, from, to, scale);
    else
        cast_row(s, from, to);
}
