/* Products of 16 rows by mma.sync. Blocks of K and V lie in shared memory in swizzled rows of
 * 128 bytes, in panels of 64 columns, as TMA writes them. The accumulators lie as wgmma's do:
 * elements 4g + {0,1} are of row lane / 4, elements 4g + {2,3} of that row + 8, at columns 8g +
 * 2 (lane % 4) + {0,1}; so softmax.cuh and epilogue.cuh serve both. */
#pragma once

#include "shared.cuh"

DEVICE void mma16(float *d, const u32 *a, u32 b0, u32 b1)
{
#if CFG_F16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A fragments of Q, CFG_D / 16 steps of four words: in registers, or, where O leaves no room
 * for them (CFG_Q_SHARED), in shared memory, each thread's own at q, then 16 * threads bytes to
 * the next step. */
#if CFG_Q_SHARED
typedef u32 q_fragments;
enum { Q_STEP = CFG_WGS / CFG_COLUMN_PARTS * 32 * 16 };

DEVICE void q_step(u32 (&a)[4], q_fragments q, int kk)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(q + kk * Q_STEP));
}

DEVICE void q_keep(q_fragments q, int kk, const u32 (&a)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(q + kk * Q_STEP), "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}
#else
struct q_fragments {
    u32 x[CFG_D / 4];
};

DEVICE void q_step(u32 (&a)[4], const q_fragments &q, int kk)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = q.x[4 * kk + i];
}

DEVICE void q_keep(q_fragments &q, int kk, const u32 (&a)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        q.x[4 * kk + i] = a[i];
}
#endif

/* s = Q K^T for 16 rows and 2 * COUNT keys. */
template <int COUNT> DEVICE void mma_qk(float (&s)[COUNT], const q_fragments &q, u32 k)
{
    enum { KEYS = COUNT * 2 };
    int lane = threadIdx.x & 31;
    int row = (lane & 7) + (lane >> 4) * 8, chunk = lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 0.f;
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4];
        q_step(a, q, kk);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            load_matrices(b, swizzled(k, KEYS * 128, n * 16 + row, kk * 2 + chunk));
            mma16(s + n * 8, a, b[0], b[1]);
            mma16(s + n * 8 + 4, a, b[2], b[3]);
        }
    }
}

/* o += P V; s holds probabilities. */
template <int COUNT> DEVICE void mma_pv(float (&o)[CFG_E / 2], const float (&s)[COUNT], u32 v)
{
    enum { KEYS = COUNT * 2 };
    int lane = threadIdx.x & 31;
    int row = lane & 15, chunk = lane >> 4;
#pragma unroll
    for (int kk = 0; kk < KEYS / 16; kk++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = pack(s[kk * 8 + 2 * i], s[kk * 8 + 2 * i + 1]);
#pragma unroll
        for (int n = 0; n < CFG_E / 16; n++) {
            u32 b[4];
            load_matrices_transposed(b, swizzled(v, KEYS * 128, kk * 16 + row, n * 2 + chunk));
            mma16(o + n * 8, a, b[0], b[1]);
            mma16(o + n * 8 + 4, a, b[2], b[3]);
        }
    }
}

/* Two neighbouring elements of a row in global memory, 0 past the end. */
DEVICE u32 load_pair(const u16 *row, int d, int is_there, int is_plain)
{
    if (!is_there || d >= CFG_D_REAL)
        return 0;
    if (!is_plain)
        return __ldg((const u32 *)(row + d));
    u32 hi = d + 1 < CFG_D_REAL ? __ldg(row + d + 1) : 0;
    return __ldg(row + d) | hi << 16;
}

/* Q of the two rows of this thread. */
DEVICE void load_q(q_fragments &q, const u16 *row0, int has0, const u16 *row1, int has1,
                   int is_plain)
{
    int d = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4] = {load_pair(row0, kk * 16 + d, has0, is_plain),
                    load_pair(row1, kk * 16 + d, has1, is_plain),
                    load_pair(row0, kk * 16 + d + 8, has0, is_plain),
                    load_pair(row1, kk * 16 + d + 8, has1, is_plain)};
        q_keep(q, kk, a);
    }
}
