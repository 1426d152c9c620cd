/* Keys in parts that hang on nothing but where keys stand (CFG_PART_KEYS): each part of a row
 * starts from nothing, and parts are joined in their order, by one formula. A CTA that has many
 * rows walks its parts one after another and puts what it has by, in memory that stays in L2;
 * few rows (CFG_BY_PARTS) leave their parts to `join_parts`. */
#pragma once

#include "epilogue.cuh"

/* How a row's sums so far go on with those of its next part. A part without a live key changes
 * nothing, whatever its sums hold. */
struct joining {
    float old, own;
    int keeps, takes;
};

DEVICE float joined(float x, float y, const joining &j)
{
    float sum = fmaf(y, j.own, x * j.old);
    return j.keeps ? x : j.takes ? y : sum;
}

/* m and l, offset and sum so far, become those with the next part's. */
DEVICE joining join_state(float &m, float &l, float next_m, float next_l)
{
    float top = fmaxf(m, next_m);
    joining j = {exp2_fast(m - top), exp2_fast(next_m - top), next_l == 0.f, l == 0.f};
    l = joined(l, next_l, j);
    m = j.keeps ? m : j.takes ? next_m : top;
    return j;
}

#if CFG_PART_KEYS && CFG_FIRST_WARP
enum {
    PART_BLOCKS = CFG_PART_KEYS / CFG_TN,
    PUT_THREADS = CFG_WGS * 128,
    PUT_WORDS = O_COUNT / 4 + 1 /* of 16 bytes, a thread's */
};

/* Ends a part: all lanes of a row have its sum, NaN where it is lost. */
DEVICE void part_end(row_state &t)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        t.l[i] = quad_sum(t.l[i]);
        t.l[i] = row_is_lost(t.m[i], t.l[i]) ? NOT_A_NUMBER : t.l[i];
    }
}

#if CFG_BY_PARTS
/* Leaves the part to join_parts. */
DEVICE void part_store(const cu_fwd &p, const tile &t, const row_state &w,
                       const float (&o)[O_COUNT])
{
    int g = t.h / p.decode.group, lane = threadIdx.x & 3;
    long long first = ((long long)(t.b * p.G + g) * p.n_split + t.part) * p.decode.rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = t.row0 + row_of_thread() + 8 * i;
        float peak = quad_max(w.peak[i]);
        if (row >= p.decode.rows)
            continue;
        if (lane == 0)
            *(float4 *)(p.part_ml + (first + row) * 4) = make_float4(w.m[i], w.l[i], peak, 0.f);
        float *to = p.part_o + (first + row) * CFG_E + 2 * lane;
#pragma unroll
        for (int k = 0; k < O_COUNT / 4; k++)
            *(float2 *)(to + 8 * k) = make_float2(o[4 * k + 2 * i], o[4 * k + 2 * i + 1]);
    }
}

/* Q of an item, by the threads of a warpgroup: what is not there becomes zeros. */
DEVICE void item_load_q(u32 q, const cu_fwd &p, const tile &t)
{
    enum { EACH = CFG_D / 8 };
#pragma unroll 4
    for (int i = threadIdx.x & 127; i < 64 * EACH; i += 128) {
        int r = i / EACH, piece = i % EACH;
        packed_row x = unpack_row(p, t, t.row0 + r);
        uint4 w = make_uint4(0, 0, 0, 0);
        if (t.row0 + r < p.decode.rows && piece * 8 < CFG_D_REAL)
            w = __ldg((const uint4 *)(query_row(p, t.b, x.h, x.m) + piece * 8));
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                         swizzled(q, PANEL_Q, r, piece)),
                     "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                     : "memory");
    }
}
#else
DEVICE float4 *put_place(const cu_fwd &p)
{
    return (float4 *)p.part_o + (long long)blockIdx.x * PUT_WORDS * PUT_THREADS + threadIdx.x
           - 128;
}

/* Puts a thread's sums by, and starts from nothing. */
DEVICE void part_put_by(const cu_fwd &p, row_state &w, float (&o)[O_COUNT])
{
    float4 *to = put_place(p);
#pragma unroll
    for (int k = 0; k < O_COUNT / 4; k++)
        __stcg(to + k * PUT_THREADS,
               make_float4(o[4 * k], o[4 * k + 1], o[4 * k + 2], o[4 * k + 3]));
    __stcg(to + (PUT_WORDS - 1) * PUT_THREADS, make_float4(w.m[0], w.m[1], w.l[0], w.l[1]));
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        o[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w.m[i] = M_START;
        w.l[i] = 0.f;
    }
}

/* What was put by, joined with the part that has ended. */
DEVICE void part_join(const cu_fwd &p, row_state &w, float (&o)[O_COUNT])
{
    const float4 *from = put_place(p);
    float4 was = __ldcg(from + (PUT_WORDS - 1) * PUT_THREADS);
    float m[2] = {was.x, was.y}, l[2] = {was.z, was.w};
    joining j[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        j[i] = join_state(m[i], l[i], w.m[i], w.l[i]);
        w.m[i] = m[i];
        w.l[i] = l[i];
    }
#pragma unroll
    for (int k = 0; k < O_COUNT / 4; k++) {
        float4 x = __ldcg(from + k * PUT_THREADS);
        o[4 * k] = joined(x.x, o[4 * k], j[0]);
        o[4 * k + 1] = joined(x.y, o[4 * k + 1], j[0]);
        o[4 * k + 2] = joined(x.z, o[4 * k + 2], j[1]);
        o[4 * k + 3] = joined(x.w, o[4 * k + 3], j[1]);
    }
}

/* One lane of a row keeps its sum, as the end of a tile adds up what lanes have. */
DEVICE void part_share_sums(row_state &w)
{
    int is_first = (threadIdx.x & 3) == 0;
    w.l[0] = is_first ? w.l[0] : 0.f;
    w.l[1] = is_first ? w.l[1] : 0.f;
}
#endif
#endif
