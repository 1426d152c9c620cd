/* Loads of the forward kernel for Hopper. The producer is one thread. It loads K one block
 * ahead of V, because consumers make the scores of a block before they multiply the block
 * before it by V. With chunks, which take many small copies, it loads Q and hands out tiles,
 * while a thread of the next warp loads K and one of the next V; with CFG_GATHERS those are
 * whole warps. */
#pragma once

struct producer {
    u32 k, v, q; /* how many loads of each have begun */
};

#if CFG_CHUNKS
/* Places of FEW copies are found before those are begun. EARLY: of a block's first ones before
 * its slot is free, since beside products an instruction takes 5 to 20 cycles
 * (docs/lab/094); three groups leave no registers for that. */
enum { EARLY = CFG_WGS <= 2, FEW = EARLY ? 2 : 1 };

DEVICE int is_value_loader(void)
{
    return threadIdx.x >= 64;
}

struct places {
    chunk_place of[FEW];
};

/* From key i of the block on that begins with key `first`. n: keys of the batch. */
DEVICE places find_places(const cu_fwd &p, const chunk_table &chunks, int b, int first, int i,
                          int n)
{
    places x;
    int has_b = (is_value_loader() ? p.vs.b : p.ks.b) != 0;
#pragma unroll
    for (int k = 0; k < FEW; k++, i += p.chunks.box)
        x.of[k] = chunk_box(chunks, has_b, b, first + i, i < CFG_TN ? n : 0);
    return x;
}

/* at: of the block's first copies. */
template <int PANELS>
DEVICE void load_block(u32 dst, u32 full, const cu_fwd &p, const chunk_table &chunks,
                       const tensor_map *map, int b, int h, int n, int first, places at)
{
    int box = p.chunks.box;
    barrier_expect(full, PANELS * PANEL_KV);
#pragma unroll 1
    for (int i = 0;;) {
#pragma unroll
        for (int k = 0; k < FEW; k++, i += box)
            if (k == 0 || i < CFG_TN) {
#pragma unroll
                for (int d = 0; d < PANELS; d++)
                    copy_box(dst + d * PANEL_KV + i * 128, map, d * 64, at.of[k].row, h,
                             at.of[k].b, full, EVICT_LAST);
            }
        if (i >= CFG_TN)
            return;
        at = find_places(p, chunks, b, first, i, n);
    }
}
#else
DEVICE void load_k(const arena &s, producer &r, const tensor_map *map, int first, head_box at)
{
    u32 slot = ring_slot<CFG_STAGES>(r.k);
    barrier_wait(s.k_empty + slot * 8, ring_parity<CFG_STAGES>(r.k++) ^ 1);
    load_block<PANELS_D>(s.k + slot * K_BYTES, s.k_full + slot * 8, map, first, at);
}

DEVICE void load_v(const arena &s, producer &r, const tensor_map *map, int first, head_box at)
{
    u32 slot = ring_slot<CFG_STAGES>(r.v);
    barrier_wait(s.v_empty + slot * 8, ring_parity<CFG_STAGES>(r.v++) ^ 1);
    load_block<PANELS_E>(s.v + slot * V_BYTES, s.v_full + slot * 8, map, first, at);
}
#endif

/* The tiles of dense reads for block n. */
DEVICE void load_dense(const arena &s, u32 n, const cu_fwd &p, const dense_maps *maps,
                       const dense_places &at, const tile &t, const block_walk &walk)
{
#if CFG_DENSE
    u32 slot = ring_slot<CU_DENSE_STAGES>(n);
    int is_masked = walk.partial && !has_limits(p);
    barrier_wait(s.dense_empty + slot * 8, ring_parity<CU_DENSE_STAGES>(n) ^ 1);
    barrier_expect(s.dense_full + slot * 8, dense_block_bytes(is_masked));
    load_dense_tiles(s.dense + slot * dense_stage_bytes(), s.dense_full + slot * 8, p, maps, at,
                     walk.block * CFG_TN + t.kv_offset, is_masked);
#endif
}

DEVICE void load_q(const arena &s, producer &r, const tensor_map *map, int first, head_box at)
{
    barrier_wait(s.q_empty, r.q++ & 1 ^ 1);
    barrier_expect(s.q_full, PANELS_D * PANEL_Q);
#pragma unroll
    for (int i = 0; i < PANELS_D; i++)
        copy_box(s.q + i * PANEL_Q, map, i * 64, first, at.h, at.b, s.q_full, EVICT_FIRST);
}

#if CFG_GATHERS
/* The entry of this lane's key among 32, read before it is used. */
DEVICE int read_entry(const chunk_table &chunks, int j, int n)
{
    return j < n ? chunk_entry(chunks, j) : -1;
}

/* entry: of the lane's key among the first 32 of the block. */
DEVICE void gather_block(const arena &s, const cu_fwd &p, const chunk_table &chunks, int entry,
                         u32 slot, int is_value, const tile &t, int g, int first)
{
    int j = first + (threadIdx.x & 31);
    const elem *head = is_value ? value_head(p, 0, g) : key_head(p, 0, g);
    u32 to = is_value ? s.v + slot * V_BYTES : s.k + slot * K_BYTES;
#pragma unroll 1
    for (int r0 = 0; r0 < CFG_TN; r0 += 32, j += 32) {
        chunk_place at = chunk_place_by(chunks, t.b, j, entry);
        int row = j < t.kv_len ? at.row : -1;
        entry = read_entry(chunks, j + 32, t.kv_len);
        long long mine = gather_place(at.b, row, is_value ? p.vs : p.ks);
        if (PANELS_D == PANELS_E && CFG_D_REAL == CFG_E_REAL)
            gather_rows<CFG_TN, PANELS_D, CFG_D_REAL, 1>(to, r0, head, mine);
        else if (is_value)
            gather_rows<CFG_TN, PANELS_E, CFG_E_REAL, 1>(to, r0, head, mine);
        else
            gather_rows<CFG_TN, PANELS_D, CFG_D_REAL, 1>(to, r0, head, mine);
    }
    gather_arrive((is_value ? s.v_full : s.k_full) + slot * 8);
}
#endif

#if CFG_CHUNKS
DEVICE void produce_tile(const arena &s, producer &r, const cu_fwd &p, const mod_args &mod,
                         const tile &t, const tensor_map *mq, const tensor_map *mk,
                         const tensor_map *mv, const dense_maps *)
{
    int g = kv_head(p, t.h), is_value = is_value_loader();
    chunk_table chunks = chunks_of(p, t.b);
    block_walk walk = walk_begin(p, mod, t);
    int more = walk_next(walk, p, t.kv_len);
    if (threadIdx.x == 0) {
        if (more && !CFG_BY_PARTS)
            load_q(s, r, mq, row_place(t, t.row0), query_box(p, t.b, t.h));
        return;
    }
#pragma unroll 1
    for (; more; more = walk_next(walk, p, t.kv_len)) {
        u32 slot = ring_slot<CFG_STAGES>(r.k), parity = ring_parity<CFG_STAGES>(r.k++) ^ 1;
#if CFG_GATHERS
        int first = walk.block * CFG_TN;
        int entry = read_entry(chunks, first + (threadIdx.x & 31), t.kv_len);
        barrier_wait((is_value ? s.v_empty : s.k_empty) + slot * 8, parity);
        gather_block(s, p, chunks, entry, slot, is_value, t, g, first);
#else
        int first = walk.block * CFG_TN;
        places at;
        if (EARLY)
            at = find_places(p, chunks, t.b, first, 0, t.kv_len);
        barrier_wait((is_value ? s.v_empty : s.k_empty) + slot * 8, parity);
        if (!EARLY)
            at = find_places(p, chunks, t.b, first, 0, t.kv_len);
        if (is_value)
            load_block<PANELS_E>(s.v + slot * V_BYTES, s.v_full + slot * 8, p, chunks, mv,
                                 t.b, value_box(p, t.b, g).h, t.kv_len, first, at);
        else
            load_block<PANELS_D>(s.k + slot * K_BYTES, s.k_full + slot * 8, p, chunks, mk,
                                 t.b, key_box(p, t.b, g).h, t.kv_len, first, at);
#endif
    }
}
#else
DEVICE void produce_tile(const arena &s, producer &r, const cu_fwd &p, const mod_args &mod,
                         const tile &t, const tensor_map *mq, const tensor_map *mk,
                         const tensor_map *mv, const dense_maps *md)
{
    int g = kv_head(p, t.h);
    head_box k = key_box(p, t.b, g), v = value_box(p, t.b, g);
    dense_places dense = dense_places_at(p, mod, t.b, t.h, t.row0 + t.q_offset);
    block_walk walk = walk_begin(p, mod, t);
    int more = walk_next(walk, p, t.kv_len);
    if (!more)
        return;
    if (!CFG_BY_PARTS)
        load_q(s, r, mq, row_place(t, t.row0), query_box(p, t.b, t.h));
    load_k(s, r, mk, key_place(t, walk.block * CFG_TN), k);
    load_dense(s, r.k - 1, p, md, dense, t, walk);
    while (more) {
        int block = walk.block;
        more = walk_next(walk, p, t.kv_len);
        if (more) {
            load_k(s, r, mk, key_place(t, walk.block * CFG_TN), k);
            load_dense(s, r.k - 1, p, md, dense, t, walk);
        }
        load_v(s, r, mv, key_place(t, block * CFG_TN), v);
    }
}
#endif

/* The tiles are those of the work order or, in a second pass, those that the first pass has
 * listed; then p.n_listed points to their number, which only the device knows. With
 * programmatic launch this kernel may begin while the kernel before it on the stream still
 * runs. Waiting for that one here suffices for the whole CTA, since consumers do nothing before
 * they get a turn. */
DEVICE void produce(const arena &s, const cu_fwd &p, const mod_args &mod, const tensor_map *mq,
                    const tensor_map *mk, const tensor_map *mv, const dense_maps *md)
{
    producer r = {0, 0, 0};
    u32 turns = 0;
    grid_wait_before();
    int turn = number_behind(blockIdx.x);
#if CFG_RAGGED /* both passes have a list that the device has made */
    int is_first = !p.n_listed, n = load_new(is_first ? p.ragged.n_tiles : p.n_listed);
#else
    int n = p.n_listed ? load_new(p.n_listed) : p.n_tiles;
#endif
    while (turn < n) {
#if CFG_BY_PARTS
        tile t = item_at(p, turn);
#elif CFG_RAGGED
        tile t = tile_at(p, load_new((is_first ? p.ragged.order : p.order) + turn), ROWS);
#else
        tile t =
            p.n_listed ? tile_at(p, load_new(p.order + turn), ROWS) : tile_of(p, turn, ROWS);
#endif
        turn_pass(s, turns++, t.id);
        produce_tile(s, r, p, mod, t, mq, mk, mv, md);
        if (p.n_listed || (CFG_BY_PARTS && !p.counter))
            turn += gridDim.x;
        else
            turn = n > gridDim.x ? atomicAdd(p.counter, 1) + gridDim.x : n;
    }
    grid_let_next();
    turn_pass(s, turns, NO_MORE);
}

/* The tile that a number handed over stands for. */
DEVICE tile consumed_tile(const cu_fwd &p, int id)
{
#if CFG_BY_PARTS
    return item_at(p, id);
#else
    return tile_at(p, id, ROWS);
#endif
}

#if CFG_CHUNKS
/* Loaders are told tiles as consumers are. */
DEVICE void load_along(const arena &s, const cu_fwd &p, const mod_args &mod,
                       const tensor_map *mk, const tensor_map *mv)
{
    producer r = {0, 0, 0};
    for (u32 n = 0;; n++) {
        u32 slot = ring_slot<2>(n);
        int id;
        barrier_wait(s.turn_full + slot * 8, ring_parity<2>(n));
        id = (int)load_word(s.turn + slot * 4);
#if CFG_GATHERS
        __syncwarp();
        barrier_arrive_if(s.turn_empty + slot * 8, (threadIdx.x & 31) == 0);
#else
        barrier_arrive(s.turn_empty + slot * 8);
#endif
        if (id == NO_MORE)
            return;
        produce_tile(s, r, p, mod, consumed_tile(p, id), 0, mk, mv, 0);
    }
}
#endif
