/* Loads of the backward kernel for Hopper, by one thread, or of Q by one and of dO by another.
 * Where CTAs take many tiles, operands of the next one are on their way while gradients are
 * stored.
 *
 * What a step is about lies beside its tiles in shared memory, so that nobody else walks: its
 * number among all query tiles, where its first query stands, its head, flags. A tile's end
 * says which turn comes, the parity of its K and V, and which tile has ended. */
#pragma once

/* What a thread loads of a step. Who loads Q loads K and V, and says what steps are about. */
enum { LOADS_Q = 1, LOADS_O = 2 };

struct loader {
    query_walk walk;
    ring<CFG_STAGES> at;
    u32 n;    /* steps begun, a tile's end with them */
    int left; /* MORE_STEPS, ALL_STEPS, or 0 */
};

enum { MORE_STEPS = 1, ALL_STEPS = 2 };

struct load_maps {
    const tensor_map *q, *k, *v, *d_out;
    const dense_maps *dense;
};

DEVICE void load_keys(const arena &s, const cu_bwd &p, const key_tile &t, const load_maps &maps)
{
    int g = keys_head(p, t);
    head_box k = key_box(p.f, t.b, g), v = value_box(p.f, t.b, g);
    barrier_expect(s.kv_full, K_BYTES + V_BYTES);
#pragma unroll
    for (int i = 0; i < PANELS_D; i++)
        copy_box(s.k + i * KEY_PANEL, maps.k, i * 64, tile_rows_of(p.f, t).kv_first + t.key0,
                 k.h, k.b, s.kv_full, EVICT_FIRST);
#pragma unroll
    for (int i = 0; i < PANELS_E; i++)
        copy_box(s.v + i * KEY_PANEL, maps.v, i * 64, tile_rows_of(p.f, t).kv_first + t.key0,
                 v.h, v.b, s.kv_full, EVICT_FIRST);
}

/* Where dense reads of a step lie: in two slots by turns. A slot is free when step n is loaded,
 * as all consumers have read the tiles of step n - 2. */
DEVICE u32 dense_slot(u32 n)
{
    return n & (CU_DENSE_STAGES - 1);
}

/* Dense reads of the present block; first: its first query. */
DEVICE void load_dense(const arena &s, const loader &l, const cu_bwd &p, const mod_args &mod,
                       const key_tile &t, int first, int masked, const load_maps &maps)
{
#if CFG_DENSE
    dense_places at = dense_places_at(p.f, mod, t.b, l.walk.h, t.key0 + t.kv_offset);
    load_dense_tiles(s.dense + dense_slot(l.n) * DENSE_BYTES, s.q_full + l.at.slot * 8, p.f,
                     maps.dense, at, first + t.q_offset, masked);
#endif
}

/* beside: bytes that come beside Q */
DEVICE void load_queries(const arena &s, const loader &l, int share, const cu_bwd &p,
                         const key_tile &t, int tile, int beside, const load_maps &maps)
{
    u32 slot = l.at.slot, q_full = s.q_full + slot * 8, o_full = s.o_full + slot * 8;
    int q0 = tile_rows_of(p.f, t).q_first + l.walk.block * BWD_ROWS;
    if (share & LOADS_Q) {
        head_box q = query_box(p.f, t.b, l.walk.h);
        barrier_expect(q_full, Q_BYTES + STAT_BYTES + beside);
#pragma unroll
        for (int i = 0; i < PANELS_D; i++)
            copy_box(s.q + slot * Q_BYTES + i * QUERY_PANEL, maps.q, i * 64, q0, q.h, q.b,
                     q_full, EVICT_LAST);
        copy_bytes(s.lse + slot * STAT_BYTES, p.lse2 + (long long)tile * BWD_ROWS, STAT_BYTES,
                   q_full);
    }
    if (share & LOADS_O) {
        head_box o = box_at(p.dos, t.b, l.walk.h);
        barrier_expect(o_full, O_BYTES + STAT_BYTES);
#pragma unroll
        for (int i = 0; i < PANELS_E; i++)
            copy_box(s.d_out + slot * O_BYTES + i * QUERY_PANEL, maps.d_out, i * 64, q0, o.h,
                     o.b, o_full, EVICT_LAST);
        copy_bytes(s.delta + slot * STAT_BYTES, p.minus_delta + (long long)tile * BWD_ROWS,
                   STAT_BYTES, o_full);
    }
}

/* Whether some group that does not pass the tile's steps has keys past kv_len too. */
DEVICE int has_cut_group(const key_tile &t)
{
    if (!CFG_PASSES)
        return t.key0 + KEYS > t.kv_len;
    return (min(t.kv_len - t.key0, (int)KEYS) & 63) != 0;
}

/* The tile that this CTA takes next, or none. */
DEVICE int next_turn(const cu_bwd &p)
{
    int ctas; /* read here: kept through the loop it would cost a register */
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
    return CFG_TAKES_MANY ? ctas + (int)atomicAdd(p.tiles_taken, 1u) : p.f.n_tiles;
}

DEVICE void load_step(const arena &s, loader &l, int share, const cu_bwd &p,
                      const mod_args &mod, const key_tile &t, const load_maps &maps)
{
    if (!l.left)
        return;
    int first_flag = l.left == ALL_STEPS ? STEP_FIRST : 0;
    l.left = query_next(l.walk, p, mod, t) ? MORE_STEPS : 0;
    int tile = row_block(p, tile_rows_of(p.f, t), t.b, l.walk.h, l.walk.block);
    int masked = masked_by(l.walk.masked, has_cut_group(t));
    int first = l.walk.block * BWD_ROWS,
        flags = step_flags(tile_rows_of(p.f, t).q_len - first, masked);
#if CFG_ROWS
    first += l.left ? row_shift(p.f, first) : 0;
#endif
    u32 step = s.steps + (l.n & (STEPS - 1)) * 16;
    if (l.left) {
        if (share & LOADS_Q)
            store_four(step, tile, first, l.walk.h, flags | first_flag);
        load_queries(s, l, share, p, t, tile, dense_block_bytes(masked), maps);
        if (share & LOADS_Q)
            load_dense(s, l, p, mod, t, first, masked, maps);
    } else { /* a slot's rounds are those of both of its barriers */
        if (share & LOADS_Q) {
            int4 ended = load_four(s.tile);
            store_four(step, next_turn(p), ended.y ^ 1, ended.z, STEP_END | first_flag);
            barrier_arrive(s.q_full + l.at.slot * 8);
        }
        if (share & LOADS_O)
            barrier_arrive(s.o_full + l.at.slot * 8);
    }
    l.n++;
    ring_next(l.at);
}

DEVICE loader no_loads(void)
{
    loader l;
    l.at = {0, 0};
    l.n = 0;
    return l;
}

/* K and V of a tile; of the CTA's first one, or when the one before has ended and nothing of it
 * is read any more. */
DEVICE void load_begin(const arena &s, loader &l, int share, const cu_bwd &p, const key_tile &t,
                       const load_maps &maps)
{
    l.walk = query_begin(p, t);
    l.left = ALL_STEPS;
    if (share & LOADS_Q) {
        store_four(s.tile, t.b, load_four(s.tile).y ^ 1, id_of(p.f, t), 0);
        store_four(s.tile + 16, t.key0, t.q_offset, t.kv_offset, t.kv_len);
        load_keys(s, p, t, maps);
    }
    grid_wait_before();
}
