/* Words of PTX used by the kernels: barriers in shared memory, tensor copies, warpgroup matrix
 * products, register hand-over, conversions. Nothing here knows about attention. No header is
 * needed, which keeps NVRTC fast. */
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__
#define NEG_INF __int_as_float(0xff800000)

struct __align__(64) tensor_map
{
    u64 opaque[16];
};

DEVICE u32 smem_address(const void *p)
{
    return (u32)__cvta_generic_to_shared(p);
}

/* barriers */
DEVICE void barrier_init(u32 bar, u32 count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

DEVICE void barrier_expect(u32 bar, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

DEVICE void barrier_arrive(u32 bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

DEVICE void barrier_arrive_if(u32 bar, int yes)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(bar),
                 "r"(yes)
                 : "memory");
}

DEVICE int barrier_test(u32 bar, u32 parity)
{
    u32 ok;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(ok)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return ok;
}

DEVICE void barrier_wait(u32 bar, u32 parity)
{
    while (!barrier_test(bar, parity))
        ;
}

DEVICE u32 load_word(u32 at)
{
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

DEVICE void store_two_words(u32 at, u32 x, u32 y)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}

DEVICE void load_two_words(u32 &x, u32 &y, u32 at)
{
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(at) : "memory");
}

DEVICE void store_word(u32 at, u32 x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

DEVICE void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* named_sync that returns whether x is not 0 in any of the threads. */
DEVICE int named_any(int id, int threads, int x)
{
    int any;
    asm volatile("{.reg .pred p, q; setp.ne.s32 p, %3, 0;\n"
                 "barrier.cta.red.or.pred q, %1, %2, p;\n"
                 "selp.s32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"(x)
                 : "memory");
    return any;
}

DEVICE void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* L2 eviction hints, encoded as createpolicy would */
#define EVICT_FIRST 0x12F0000000000000ull
#define EVICT_NORMAL 0x1000000000000000ull
#define EVICT_LAST 0x14F0000000000000ull

/* A number of which the compiler knows no more than that it is had behind grid_wait_before:
 * loads of data that is read only are not ordered by that, but those whose address hangs on the
 * number are. */
DEVICE int number_behind(int x)
{
    asm volatile("" : "+r"(x)::"memory");
    return x;
}

#if CFG_SM >= 90
/* box at (d, n, h, b) of a 4-D map into shared memory; bytes are counted on bar */
DEVICE void copy_box(u32 dst, const tensor_map *map, int d, int n, int h, int b, u32 bar,
                     u64 hint)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(dst),
                 "l"(map), "r"(d), "r"(n), "r"(h), "r"(b), "r"(bar), "l"(hint)
                 : "memory");
}

/* A box at (x, y, a, b, c) of a 5-D map: read once. */
DEVICE void copy_box5(u32 dst, const tensor_map *map, int x, int y, int a, int b, int c,
                      u32 bar)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(a), "r"(b), "r"(c), "r"(bar)
                 : "memory");
}

DEVICE void fence_barrier_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void map_prefetch(const tensor_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* The larger, or NaN where one is. */
DEVICE float max_or_nan(float x, float y)
{
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

/* Overlap of kernels on a stream: what comes next may be placed on the device already, and
 * waits there itself until this kernel is over. */
DEVICE void grid_let_next(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE void grid_wait_before(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Loads that stay behind grid_wait_before: what the kernel before wrote. */
DEVICE int load_new(const int *p)
{
    int x;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

DEVICE float4 load_new4(const float *p)
{
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

/* clusters: 16 bytes at an address of this CTA's shared memory, but in CTA `rank` of its own */
DEVICE float4 cluster_load(u32 at, int rank)
{
    float4 x;
    asm volatile("{.reg .u32 a; mapa.shared::cluster.u32 a, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];}"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at), "r"(rank)
                 : "memory");
    return x;
}

DEVICE void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

DEVICE void fence_async_proxy(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* warpgroup matrix products; the products themselves are generated for the widths of an
 * instance */
DEVICE void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> DEVICE void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N> DEVICE void registers_grow(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> DEVICE void registers_shrink(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* operand in shared memory, 128-byte swizzle, rows of 8 stepping by 1024 bytes; lbo in bytes */
DEVICE u64 operand(u32 addr, u32 lbo)
{
    return (u64)((addr & 0x3ffff) >> 4) | (u64)(lbo >> 4) << 16 | (u64)(1024 >> 4) << 32
           | 1ull << 62;
}
#endif

/* arithmetic */
DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_fast(float x)
{
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float rcp_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* two floats to a register of the storage type, lower column in the low half */
DEVICE u32 pack(float lo, float hi)
{
    u32 r;
#if CFG_F16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
    return r;
}

/* As pack; what is negative becomes 0. */
DEVICE u32 pack_positive(float lo, float hi)
{
    u32 r;
#if CFG_F16
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
    return r;
}

DEVICE float half_to_float(u16 x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

/* one stored element */
#if CFG_F32
typedef float elem;
#else
typedef u16 elem;
#endif

DEVICE float to_float(elem x)
{
#if CFG_F32
    return x;
#elif CFG_F16
    return half_to_float(x);
#else
    return __uint_as_float((u32)x << 16);
#endif
}

DEVICE elem from_float(float x)
{
#if CFG_F32
    return x;
#else
    return (elem)pack(x, 0.f);
#endif
}

/* One stored element of a result: f32 where parts of the keys are to be merged. */
#if CFG_OUT_F32
typedef float out_elem;

DEVICE float to_float(out_elem x)
{
    return x;
}
#else
typedef elem out_elem;
#endif

DEVICE out_elem out_from_float(float x)
{
#if CFG_OUT_F32
    return x;
#else
    return from_float(x);
#endif
}

/* Two and four neighbours of a row whose address suits one store. */
DEVICE void store_out2(out_elem *to, float x, float y)
{
#if CFG_F32 || CFG_OUT_F32
    *(float2 *)to = make_float2(x, y);
#else
    *(u32 *)to = pack(x, y);
#endif
}

DEVICE void store_out4(out_elem *to, float x, float y, float z, float w)
{
#if CFG_F32 || CFG_OUT_F32
    *(float4 *)to = make_float4(x, y, z, w);
#else
    *(uint2 *)to = make_uint2(pack(x, y), pack(z, w));
#endif
}

/* Transposes four words of four lanes: lane j of a quad ends with word j of lanes 0..3. */
DEVICE void quad_transpose(u32 (&w)[4])
{
    int one = threadIdx.x & 1, two = threadIdx.x & 2;
    u32 x = __shfl_xor_sync(~0u, one ? w[0] : w[1], 1);
    u32 y = __shfl_xor_sync(~0u, one ? w[2] : w[3], 1);
    (one ? w[0] : w[1]) = x;
    (one ? w[2] : w[3]) = y;
    x = __shfl_xor_sync(~0u, two ? w[0] : w[2], 2);
    y = __shfl_xor_sync(~0u, two ? w[1] : w[3], 2);
    (two ? w[0] : w[2]) = x;
    (two ? w[1] : w[3]) = y;
}
