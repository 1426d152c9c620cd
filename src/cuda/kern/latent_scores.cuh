/* Latent decode: the warpgroup that makes scores and weights. */
#pragma once

#include "latent_place.cuh"
#include "copy.cuh"
#include "decode_rows.cuh"

enum { SCORE_BARRIER = 8 };

struct scorer {
    row_state rows;
    tile_rows at;
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
    sure_keys sure;
#endif
};

/* Rows past the last one repeat it: nobody reads what comes of them. */
DEVICE void take_q(const arena &a, const cu_fwd &p, const span &s)
{
    int last = packed_rows(p, s) - 1, piece = threadIdx.x & 7;
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < ROWS; row += 16) {
        const u16 *from = packed_row_address(p, s, min(s.row0 + row, last)) + piece * 8;
        u32 to = swizzled(a.q, PANEL, row, piece);
#pragma unroll
        for (int i = 0; i < PANELS_D; i++) {
            int is_there = i * 64 + piece * 8 < CFG_D_REAL;
            copy16(to + i * PANEL, from + (is_there ? i * 64 : 0), is_there);
        }
    }
    copy_commit();
    copy_wait<0>();
    fence_async_proxy();
    named_sync(SCORE_BARRIER, 128);
}

/* Begins the products of the I'th sum of block n, each when its panel is there. */
template <int I> DEVICE void start_sum(float (&t)[S_COUNT], const arena &a, u32 n)
{
    u64 q = operand(a.q, 16), k = operand(stage_of(a, n), 16);
    asm volatile("" : "+l"(q)); /* made anew: kept, those of all products would be spilled */
    wgmma_fence();
#pragma unroll
    for (int i = sum_begin(I); i < min(PANELS_D, sum_begin(I + 1)); i++) {
        if (nth_begins(i))
            await_unit(a, n, nth_unit(i));
#pragma unroll
        for (int kk = 0; kk < 4; kk++) {
            int panel = nth_panel(i), at = (panel * PANEL + kk * 32) / 16;
            if (panel * 4 + kk < CFG_D / 16)
                wgmma_qk(t, q + at, k + at, i > sum_begin(I) || kk > 0);
        }
    }
    wgmma_commit();
}

DEVICE void add_sum(float (&s)[S_COUNT], float (&t)[S_COUNT])
{
#pragma unroll
    for (int i = 0; i < S_COUNT; i++) {
        asm volatile("" : "+f"(t[i])::"memory"); /* read behind the wait, */
        s[i] += t[i];
        asm volatile("" : "+f"(s[i])::"memory"); /* and before the next products */
    }
}

/* s += the sums from the I'th on, whose products run one ahead, and the one before, `done`: the
 * tensor cores cut off what they add, which a sum of all columns would show. */
template <int I>
DEVICE void add_sums(float (&s)[S_COUNT], float (&done)[S_COUNT], float (&next)[S_COUNT],
                     const arena &a, u32 n)
{
    if constexpr (sum_begin(I) < PANELS_D) {
        start_sum<I>(next, a, n);
        wgmma_wait<1>();
        add_sum(s, done);
        add_sums<I + 1>(s, next, done, a, n);
    } else {
        wgmma_wait<0>();
        add_sum(s, done);
    }
}

/* s = Q K^T for block n. No product may be under way when it is weighed: beside masks ptxas
 * would make all products wait for each other. */
DEVICE void make_scores(float (&s)[S_COUNT], const arena &a, u32 n)
{
    float even[S_COUNT], odd[S_COUNT];
    start_sum<0>(even, a, n);
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = 0.f;
    add_sums<1>(s, even, odd, a, n);
}

/* Values beyond the end of the keys may be anything; 0 * NaN must not be seen. Their scores are
 * masked, whatever the other warps' products still read. */
DEVICE void clear_values(u32 stage, int from)
{
    enum { EACH = 2 * SIDE_PANELS * 8 }; /* pieces of 16 bytes in a row */
#pragma unroll 1
    for (int i = from * EACH + threadIdx.x % 128; i < KEYS * EACH; i += 128)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         swizzled(stage, PANEL, i / EACH, i % EACH)),
                     "r"(0)
                     : "memory");
    fence_async_proxy();
}

/* The block's weights as fragments of products with V, and what O is to be multiplied by
 * before, to the two groups that add them. */
DEVICE void hand_over(const arena &a, u32 n, const float (&s)[S_COUNT], int raised,
                      const float (&rescale)[2])
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    barrier_wait(a.weights_empty, (n & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                         a.weights + ((warp * 4 + i) * 32 + lane) * 16),
                     "r"(pack(s[8 * i], s[8 * i + 1])), "r"(pack(s[8 * i + 2], s[8 * i + 3])),
                     "r"(pack(s[8 * i + 4], s[8 * i + 5])),
                     "r"(pack(s[8 * i + 6], s[8 * i + 7]))
                     : "memory");
    if (raised && (lane & 3) == 0) {
        store_word(a.factors + (warp_row() + lane / 4) * 4, __float_as_uint(rescale[0]));
        store_word(a.factors + (warp_row() + lane / 4 + 8) * 4, __float_as_uint(rescale[1]));
    }
    if (lane == 0)
        store_word(a.raised + warp * 4, raised);
    __syncwarp();
    barrier_arrive_if(a.weights_full, lane == 0);
}

/* The softmax of block `at` of a span, number n of the CTA, whose products are done. */
DEVICE void weigh_block(scorer &c, const arena &a, const cu_fwd &p, const mod_args &mod,
                        const span &x, int at, u32 n, float (&s)[S_COUNT])
{
    float shift[2], rescale[2] = {1.f, 1.f}, peak[2];
    int partial, block = block_at(p, x, at, partial);
    int first = block * KEYS, tail = c.at.kv_len - first;
    int column = first + 2 * (threadIdx.x & 3);
    float unit = score_unit(p);
    barrier_arrive_if(barrier_of(a.empty, n, 0), HAS_REST && (threadIdx.x & 31) == 0);
    apply_score(c.at, p, mod, column, s, shift);
#if MOD_MASK == MASK_GENERAL && MASK_COLUMN_WORDS
    if (partial) {
        named_sync(SCORE_BARRIER, 128);
        share_columns(c.at, p, mod, first, a.columns, 128);
        named_sync(SCORE_BARRIER, 128);
    }
#endif
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
    partial &= first < c.sure.from || first + (int)KEYS > c.sure.to;
#endif
    int masked = masked_by(partial, tail < KEYS);
    if (masked) {
        apply_mask(c.at, p, mod, column, masked, a.columns, s);
        if (tail < KEYS)
            clear_values(stage_of(a, n), max(0, tail));
    }
    rows_peak_of(s, unit, shift, peak);
    int raised = rows_raise_to(c.rows, peak, rescale);
    rows_exp(c.rows, s, unit, shift);
    hand_over(a, n, s, raised, rescale);
}

/* What the span's rows have beside their columns; those are put by the other groups. */
DEVICE void put_piece(scorer &c, const arena &a, const cu_fwd &p, const piece &x, int &lost)
{
    int lane = threadIdx.x & 31, row0 = warp_row() + lane / 4, is_first = (lane & 3) == 0;
    row_sums y[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = row0 + 8 * r;
        y[r].x = make_float3(c.rows.m[r], quad_sum(c.rows.l[r]), quad_max(c.rows.peak[r]));
        float inv =
            x.is_whole && row < span_rows(p, x.s) ? row_inverse(p, x.s, row, y[r].x) : 1.f;
        if (is_first)
            a.sums[row] = make_float4(y[r].x.x, y[r].x.y, y[r].x.z, inv);
    }
    sync_rows();
    sync_rows();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = row0 + 8 * r, is_there = is_first && row < span_rows(p, x.s);
        y[r].is_bad =
            a.bad[row] != 0.f || a.bad[ROWS + row] != 0.f || row_is_lost(y[r].x.x, y[r].x.y);
        if (is_there)
            put_row(p, x.s, row, x.slot, x.is_whole, y[r]);
        u32 bad = __ballot_sync(~0u, is_there && y[r].is_bad && p.decode.cluster);
#pragma unroll 1
        for (; bad; bad &= bad - 1)
            chain_row(p, x.s, warp_row() + (__ffs(bad) - 1) / 4 + 8 * r, lost);
    }
}

DEVICE void make_weights(const arena &a, const cu_fwd &p, const mod_args &mod, const line &l)
{
    scorer c;
    cursor at;
    int end = share_of_cta(p, mod, l, at), lost = -1;
    u32 n = 0;
#pragma unroll 1
    while (at.t < end) {
        piece x = next_piece(p, mod, l, at, end);
        take_q(a, p, x.s);
        rows_begin(c.rows);
        place_packed(c.at, p, mod, x.s);
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
        c.sure = sure_keys_of(c.at, p, mod);
#endif
#pragma unroll 1
        for (int i = x.first; i < x.last; i++, n++) {
            float s[S_COUNT];
            make_scores(s, a, n);
            weigh_block(c, a, p, mod, x.s, i, n, s);
        }
        put_piece(c, a, p, x, lost);
    }
    redo_chain(p, mod, lost);
}
