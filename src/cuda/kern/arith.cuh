/* What generated mods call. The exact half is mod/arith.h itself, compiled for the device:
 * programs are built without contraction (--fmad=false), so that it gives the same bits as on
 * the host; kernels that want a fused multiply-add write fmaf. The fast half is for what lies
 * downstream of score. Then reads of captures, whose indices are clamped into the tensor. */
#pragma once

#define POS_INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

#define SCORE_NONE 0
#define SCORE_AFFINE 1
#define SCORE_GENERAL 2
#define MASK_NONE 0
#define MASK_INTERVAL 1
#define MASK_GENERAL 2

/* a score register in natural units */
#if CFG_SCALE_FIRST
#define SCORE_SCALE 1.f
#else
#define SCORE_SCALE p.scale
#endif

#define INFINITY POS_INF
#define NAN NOT_A_NUMBER
#define INT32_MAX 2147483647
#include "arith.h"

DEVICE int sac_iabs(int x)
{
    return x < 0 ? ar_sub(0, x) : x;
}

DEVICE float sac_fdiv(float x, float y)
{
    return y == 0.f ? 0.f : __fdiv_rn(x, y);
}

/* ---- fast ---- */

DEVICE float sac_inverse(float y)
{
    return y == 0.f ? 0.f : 1.f / y;
}

DEVICE float sac_fdiv_fast(float x, float y)
{
    return y == 0.f ? 0.f : __fdividef(x, y);
}

DEVICE float sac_sigmoid_fast(float x)
{
    return __fdividef(1.f, 1.f + __expf(-x));
}

DEVICE float sac_pow_fast(float x, float y)
{
    return powf(x, y);
}

DEVICE float tanh_power(float x)
{
    return exp2_fast(fabsf(x) * -2.8853901f);
}

/* tanh |x| = (1 - e) / (1 + e), e = e^(-2|x|): for small x only half of e's error is left;
 * 1 - 2 / (1 + e^(2x)) would keep all of the quotient's. Absolute error 2.8e-7, below 1.1e-7
 * for |x| < 0.2 (all floats, on an H200). Four at once share one reciprocal, which leaves 1.25
 * operations of the special function unit for each; two of one row do where no row's bits may
 * follow from another row. */
DEVICE void sac_tanh4(float &x0, float &x1, float &x2, float &x3)
{
    float e0 = tanh_power(x0), e1 = tanh_power(x1), e2 = tanh_power(x2), e3 = tanh_power(x3);
    /* NaN, which a mask may hide, counts as 1 for the others' sake */
    float d0 = 1.f + fminf(e0, 1.f), d1 = 1.f + fminf(e1, 1.f);
    float d2 = 1.f + fminf(e2, 1.f), d3 = 1.f + fminf(e3, 1.f);
    float a = d0 * d1, b = d2 * d3;
#if CFG_INVARIANT
    float ra = rcp_fast(a), rb = rcp_fast(b);
#else
    float r = rcp_fast(a * b), ra = r * b, rb = r * a;
#endif
    x0 = copysignf((1.f - e0) * (ra * d1), x0);
    x1 = copysignf((1.f - e1) * (ra * d0), x1);
    x2 = copysignf((1.f - e2) * (rb * d3), x2);
    x3 = copysignf((1.f - e3) * (rb * d2), x3);
}

/* ---- captures ---- */

DEVICE long long step(const cu_capture &c, int d, int i)
{
    return max(0, min(i, c.shape[d] - 1)) * c.stride[d];
}

DEVICE bool scalar_bool(const cu_capture &c)
{
    return c.shape[0] != 0;
}

DEVICE int scalar_int(const cu_capture &c)
{
    return c.shape[0];
}

DEVICE float scalar_float(const cu_capture &c)
{
    return __int_as_float(c.shape[0]);
}

#define LOADER(name, result, stored)                             \
    DEVICE result load_##name(const cu_capture &c, long long at) \
    {                                                            \
        return (result)__ldg((const stored *)c.data + at);       \
    }
LOADER(u8, int, unsigned char)
LOADER(i8, int, signed char)
LOADER(u16, int, unsigned short)
LOADER(i16, int, short)
LOADER(u32, int, unsigned int)
LOADER(i32, int, int)
LOADER(u64, int, unsigned long long)
LOADER(i64, int, long long)
LOADER(f32, float, float)
LOADER(f64, float, double)
#undef LOADER

DEVICE bool load_bool(const cu_capture &c, long long at)
{
    return __ldg((const unsigned char *)c.data + at) != 0;
}

DEVICE float load_bf16(const cu_capture &c, long long at)
{
    return __uint_as_float((u32)__ldg((const u16 *)c.data + at) << 16);
}

DEVICE float load_f16(const cu_capture &c, long long at)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(__ldg((const u16 *)c.data + at)));
    return y;
}

/* What a dense read is: an element that a tile has brought, or one that is loaded. */
#if CFG_DENSE
#define DENSE_READ(tile, element) tile
#else
#define DENSE_READ(tile, element) element
#endif

#if CFG_DENSE
/* An element's bits in the low end of a word (dense.cuh), as its load_ gives it. */
#define AS_INT(name, stored)   \
    DEVICE int as_##name(u32 x) \
    {                          \
        return (int)(stored)x; \
    }
AS_INT(u8, unsigned char)
AS_INT(i8, signed char)
AS_INT(u16, unsigned short)
AS_INT(i16, short)
AS_INT(u32, unsigned int)
AS_INT(i32, int)
#undef AS_INT

DEVICE bool as_bool(u32 x)
{
    return (x & 255) != 0;
}

DEVICE float as_bf16(u32 x)
{
    return __uint_as_float(x << 16);
}

DEVICE float as_f16(u32 x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x));
    return y;
}

DEVICE float as_f32(u32 x)
{
    return __uint_as_float(x);
}

/* A coordinate of a tensor map, clamped as loads are. A dimension without a stride has the size
 * 1 there. */
DEVICE int dense_index(const cu_capture &c, int d, int i)
{
    return c.stride[d] ? max(0, min(i, c.shape[d] - 1)) : 0;
}
#endif
