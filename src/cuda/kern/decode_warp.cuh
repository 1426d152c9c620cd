/* One warp of decode: its ring of copies, its rows in registers, and one block of keys. */
#pragma once

/* ---- one warp's stream ---- */

struct stream {
    u32 buffer, full; /* CFG_STAGES stages; barriers */
    u32 loads, uses;
    cursor ahead;
};

#if CFG_CHUNKS
/* Keys [first, first + KEYS) of one of K and V: each lane finds the place of a copy, lane 0
 * begins them. */
template <int PANELS>
DEVICE void load_chunks(u32 to, u32 full, const cu_fwd &p, const span &s, int has_b, int h,
                        const tensor_map *map, int first)
{
    int box = p.chunks.box, lane = threadIdx.x & 31, n = live_keys(p, s.b);
    chunk_table x = chunks_of(p, s.b);
#pragma unroll 1
    for (int i0 = 0; i0 < KEYS; i0 += 32 * box) {
        int mine = i0 + lane * box;
        chunk_place at = chunk_box(x, has_b, s.b, first + mine, mine < KEYS ? n : 0);
#pragma unroll 1
        for (int i = i0; i < min((int)KEYS, i0 + 32 * box); i += box) {
            int from = (i - i0) / box, row = __shfl_sync(~0u, at.row, from);
            int b = __shfl_sync(~0u, at.b, from);
#pragma unroll
            for (int d = 0; d < PANELS; d++)
                if (lane == 0)
                    copy_box(to + d * PANEL + i * 128, map, d * 64, row, h, b, full,
                             EVICT_NORMAL);
        }
    }
}
#endif

DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const line &l, int end,
                      const tensor_map *mk, const tensor_map *mv)
{
    if (w.ahead.t >= end)
        return;
    if (cursor_follow(p, mod, l, w.ahead))
        call_q(p, w.ahead.s);
    int partial, slot = w.loads % CFG_STAGES;
    int first = block_at(p, w.ahead.s, w.ahead.t - w.ahead.from, partial) * KEYS;
    u32 to = w.buffer + slot * STAGE, full = w.full + slot * 8;
#if CFG_CHUNKS
    if ((threadIdx.x & 31) == 0)
        barrier_expect(full, STAGE);
    __syncwarp();
    load_chunks<PANELS_D>(to, full, p, w.ahead.s, p.ks.b != 0,
                          key_box(p, w.ahead.s.b, w.ahead.s.g).h, mk, first);
    load_chunks<PANELS_E>(to + PANELS_D * PANEL, full, p, w.ahead.s, p.vs.b != 0,
                          value_box(p, w.ahead.s.b, w.ahead.s.g).h, mv, first);
#else
    if ((threadIdx.x & 31) == 0) {
        barrier_expect(full, STAGE);
        head_box k = key_box(p, w.ahead.s.b, w.ahead.s.g);
        head_box v = value_box(p, w.ahead.s.b, w.ahead.s.g);
#pragma unroll
        for (int i = 0; i < PANELS_D; i++)
            copy_box(to + i * PANEL, mk, i * 64, first, k.h, k.b, full, EVICT_NORMAL);
#pragma unroll
        for (int i = 0; i < PANELS_E; i++)
            copy_box(to + (PANELS_D + i) * PANEL, mv, i * 64, first, v.h, v.b, full,
                     EVICT_NORMAL);
    }
#endif
    w.loads++;
    w.ahead.t += WARPS;
}

/* V beyond the end of the keys may hold anything; 0 * NaN must not be seen. */
DEVICE void clear_tail(u32 v, int from)
{
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < (KEYS - from) * 8 * PANELS_E; i += 32) {
        int row = from + i / (8 * PANELS_E), chunk = i % (8 * PANELS_E);
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(swizzled(v, PANEL, row, chunk)),
            "r"(0)
            : "memory");
    }
    __syncwarp();
}

/* ---- rows ---- */

DEVICE void place_packed(tile_rows &r, const cu_fwd &p, const mod_args &mod, const span &s)
{
    int last = p.decode.rows - 1, lane = threadIdx.x & 31;
    place x = row_place(p, s, min(s.row0 + lane / 4, last));
    place y = row_place(p, s, min(s.row0 + lane / 4 + 8, last));
    int q_offset = position(p.q_offset, s.b);
    r.b = s.b;
    r.h = x.h;
    r.h1 = y.h;
    r.q = x.m + q_offset;
    r.q1 = y.m + q_offset;
    r.kv_offset = position(p.kv_offset, s.b);
    r.kv_len = live_keys(p, s.b);
#if MOD_SCORE
    score_row_begin(mod, p, r.b, r.h, r.q, r.score[0]);
    score_row_begin(mod, p, r.b, r.h1, r.q1, r.score[1]);
#endif
}

/* two neighbours of a row, column elements after `at`; lanes read up to column + 7 */
DEVICE u32 q_pair(const u16 *at, int lane_column, int column)
{
    u32 x = 0;
    if (column + 7 < CFG_D_REAL || lane_column + column < CFG_D_REAL)
        x = *(const u32 *)(at + column);
    return x;
}

/* Rows past the last one repeat it: nobody reads what comes of them. */
DEVICE void load_packed_q(q_fragments &q, const cu_fwd &p, const span &s)
{
    int last = p.decode.rows - 1, lane = threadIdx.x & 31, d = 2 * (lane & 3);
    const u16 *row0 = packed_row(p, s, min(s.row0 + lane / 4, last)) + d;
    const u16 *row1 = packed_row(p, s, min(s.row0 + lane / 4 + 8, last)) + d;
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4] = {q_pair(row0, d, kk * 16), q_pair(row1, d, kk * 16),
                    q_pair(row0, d, kk * 16 + 8), q_pair(row1, d, kk * 16 + 8)};
        q_keep(q, kk, a);
    }
}

struct fragment {
    row_state rows;
    tile_rows at;
#if MOD_MASK == MASK_INTERVAL
    int from, to; /* keys from <= j < to are live in all rows */
#endif
    q_fragments q;
    float o[O_COUNT];
};

#if MOD_MASK == MASK_INTERVAL
DEVICE void place_interval(fragment &f, const cu_fwd &p, const mod_args &mod)
{
    int from, to, other, end;
    mask_interval(mod, p, f.at.b, f.at.h, f.at.q, from, to);
    mask_interval(mod, p, f.at.b, f.at.h1, f.at.q1, other, end);
    from = max(from, other);
    to = min(to, end);
    for (int i = 4; i < 32; i *= 2) {
        from = max(from, __shfl_xor_sync(~0u, from, i));
        to = min(to, __shfl_xor_sync(~0u, to, i));
    }
    f.from = (int)max(0ll, (long long)from - f.at.kv_offset);
    f.to = (int)max(0ll, min((long long)to - f.at.kv_offset, 0x7fffffffll));
}
#endif

DEVICE void use_block(stream &w, fragment &f, const cu_fwd &p, const mod_args &mod,
                      const span &s, int at, mask_column *columns)
{
    float sc[S_COUNT], shift[2], rescale[2];
    int partial, slot = w.uses % CFG_STAGES, block = block_at(p, s, at, partial);
    u32 k = w.buffer + slot * STAGE, v = k + PANELS_D * PANEL;
    barrier_wait(w.full + slot * 8, w.uses / CFG_STAGES & 1);
    int first = block * KEYS, tail = f.at.kv_len - first;
#if MOD_MASK == MASK_INTERVAL
    partial &= first < f.from || first + (int)KEYS > f.to;
#endif
    mma_qk(sc, f.q, k);
    int column = first + 2 * (threadIdx.x & 3);
    float unit = score_unit(p);
    apply_score(f.at, p, mod, column, sc, shift);
    if (partial | (tail < KEYS)) {
#if MOD_MASK == MASK_GENERAL
        __syncwarp();
        share_columns(f.at, p, mod, first, columns, 32);
        __syncwarp();
#endif
        apply_mask(f.at, p, mod, column, columns, sc);
        if (tail < KEYS)
            clear_tail(v, max(0, tail));
    }
    int raised = rows_raise(f.rows, sc, unit, shift, rescale);
    rows_exp(f.rows, sc, unit, shift);
    if (raised)
        rows_scale(f.o, rescale);
    mma_pv(f.o, sc, v);
    w.uses++;
    __syncwarp();
}
