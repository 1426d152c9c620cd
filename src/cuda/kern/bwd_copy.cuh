/* Copies between global and shared memory that the backward kernel adds to those of ptx.cuh:
 * plain runs of bytes, sums into global memory, and matrices of 16-bit words. */
#pragma once

#include "shared.cuh"

#if CFG_SM >= 90
/* bytes (a multiple of 16) to shared memory, counted on bar */
DEVICE void copy_bytes(u32 to, const void *from, u32 bytes, u32 bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}

/* Adds `bytes` of shared memory to global memory: floats, or 32-bit integers, whose sums do
 * not depend on their order. */
DEVICE void add_bytes(void *to, u32 from, u32 bytes)
{
#if CFG_FIXED
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 "
                 "[%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
#else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                 "[%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
#endif
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* all but the last PENDING sums have read their shared memory */
template <int PENDING> DEVICE void add_wait(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

DEVICE void store_matrices(u32 at, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}
#endif

DEVICE float2 load_two(u32 at)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
}

DEVICE void store_four(u32 at, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x0), "r"(x1),
                 "r"(x2), "r"(x3)
                 : "memory");
}

DEVICE int4 load_four(u32 at)
{
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

#if CFG_F32 && !CFG_THIRDS
/* A word with 0 for what is infinite or NaN. */
DEVICE u32 without_special(u32 x)
{
    return (x & 0x7f800000u) == 0x7f800000u ? 0 : x;
}
#else
/* Whether one of a packed register's two floats is infinite or NaN. */
DEVICE int has_special(u32 x)
{
    enum { EXPONENT = CFG_F16 ? 0x7c00 : 0x7f80 };
    return (x & EXPONENT) == EXPONENT || (x >> 16 & EXPONENT) == EXPONENT;
}

/* A packed register with 0 for what is infinite or NaN. */
DEVICE u32 without_special(u32 x)
{
    return (has_special(x & 0xffffu) ? 0 : x & 0xffffu)
           | (has_special(x >> 16) ? 0 : x & 0xffff0000u);
}
#endif

/* two queries' lse and delta, as they lie together */
DEVICE float4 load_stats(u32 at)
{
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at));
    return x;
}

DEVICE void store_stats(u32 at, float2 x)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y) : "memory");
}

/* a float that another kernel wrote */
DEVICE float load_float(const float *p)
{
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}

/* the two floats of a packed register */
DEVICE void unpack(u32 x, float &lo, float &hi)
{
#if CFG_F16
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        "cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(lo), "=f"(hi)
        : "r"(x));
#else
    lo = __uint_as_float(x << 16);
    hi = __uint_as_float(x & 0xffff0000u);
#endif
}
