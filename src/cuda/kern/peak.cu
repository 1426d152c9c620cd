/* What the tensor cores give at most: products of bf16 tiles that never leave shared memory (by
 * wgmma) or registers (by mma.sync), on numbers that look random, since zeros draw less power
 * and run faster. Sums start again now and then, as those of a real product do. */
#include "cfg.cuh"
#include "ptx.cuh"

#if CFG_SM >= 90
#include "wgmma.cuh"
#endif

enum { THREADS = 256, RESTART = 64 };

/* two bf16 of either sign around 1 */
DEVICE u32 noise(u32 seed)
{
    seed = (seed ^ 61) ^ (seed >> 16);
    seed *= 9;
    seed ^= seed >> 4;
    seed *= 0x27d4eb2d;
    seed ^= seed >> 15;
    return (seed & 0x80ff80ff) | 0x3f003f00;
}

#if CFG_SM >= 90
/* Two warpgroups, 64 x CFG_TN each, over 64 columns in four steps. */
extern "C" __global__ void __launch_bounds__(THREADS, 1) peak(int rounds, float *out)
{
    extern __shared__ __align__(1024) u32 words[];
    enum { A_BYTES = 64 * 128, B_BYTES = CFG_TN * 128, ALL = 2 * A_BYTES + B_BYTES };
    float sums[CFG_TN / 2], all = 0.f;
    u32 base = (smem_address(words) + 1023) & ~1023u;
    for (int i = threadIdx.x; i < ALL / 4; i += THREADS)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + 4 * i),
                     "r"(noise(i + blockIdx.x * 65537)));
    fence_async_proxy();
    __syncthreads();
    u32 a = base + threadIdx.x / 128 * A_BYTES, b = base + 2 * A_BYTES;
    for (int i = 0; i < CFG_TN / 2; i++)
        sums[i] = 0.f;
    for (int r = 0; r < rounds; r++) {
        wgmma_fence();
        for (int k = 0; k < 4; k++)
            wgmma_qk(sums, operand(a + 32 * k, 16), operand(b + 32 * k, 16),
                     k > 0 || r % RESTART);
        wgmma_commit();
        wgmma_wait<0>();
    }
    for (int i = 0; i < CFG_TN / 2; i++)
        all += sums[i];
    if (all == 1.5f)
        out[threadIdx.x] = all;
}
#else
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Eight warps; each keeps sums of 64 x 32 in registers, and 16 columns of both sides. */
extern "C" __global__ void __launch_bounds__(THREADS) peak(int rounds, float *out)
{
    u32 a[4][4], b[4][2], seed = (blockIdx.x * THREADS + threadIdx.x) * 32;
    float sums[4][4][4], all = 0.f;
    for (int i = 0; i < 4; i++) {
        for (int w = 0; w < 4; w++)
            a[i][w] = noise(seed + i * 4 + w);
        for (int w = 0; w < 2; w++)
            b[i][w] = noise(seed + 16 + i * 2 + w);
    }
    for (int r = 0; r < rounds; r += RESTART) {
        for (int i = 0; i < 64; i++)
            sums[i / 16][i / 4 % 4][i % 4] = 0.f;
        for (int n = 0; n < RESTART; n++)
            for (int i = 0; i < 16; i++)
                multiply(sums[i / 4][i % 4], a[i / 4], b[i % 4]);
        for (int i = 0; i < 64; i++)
            all += sums[i / 16][i / 4 % 4][i % 4];
    }
    if (all == 1.5f)
        out[threadIdx.x] = all;
}
#endif
