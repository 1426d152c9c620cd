/* Forward attention for Hopper: one CTA makes a tile of CFG_WGS * 64 rows of one head. A
 * producer warp feeds K and V blocks through shared memory (TMA, mbarriers); each consumer
 * warpgroup holds 64 rows, its scores S and its output O in registers. The product of the next
 * block's scores runs while this block's softmax is computed, and P goes to the second product
 * straight from registers (FA3, arXiv 2407.08608, section 3).
 *
 * cfg.cuh: constants of this instance. mod.cuh: the user's mask and score. wgmma.cuh: the
 * products at its widths. Shared memory, tiles in swizzled rows of 128 bytes, panels of 64
 * columns: Q [panels][ROWS][64], K and V [CFG_STAGES][panels][CFG_TN][64], barriers. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "walk.cuh"
#include "epilogue.cuh"
#include "wgmma.cuh"
#include "kv.cuh"
#include "shared.cuh"
#include "gather.cuh"
#include "block90.cuh"
#include "parts.cuh"

enum {
    THREADS = (CFG_WGS + 1) * 128,
    LOADERS = CFG_CHUNKS ? 2 : 0 /* producers that are told which tile to load */
};

/* addresses of this CTA's shared memory */
struct arena {
    u32 q, k, v;
    /* Barriers of 8 bytes. There are two turn_full and two turn_empty, and CFG_STAGES of each
     * of the k_ and v_ ones. The anchor is never waited for: see next_block. */
    u32 q_full, q_empty, turn_full, turn_empty, anchor;
    u32 k_full, k_empty, v_full, v_empty;
    u32 turn;             /* [2] tile numbers that the producer hands to the consumers */
    mask_column *columns; /* [CFG_WGS][CFG_TN] what a general mask needs of each key */
};

DEVICE arena carve(char *shared)
{
    arena s;
    u32 base = smem_address(shared);
    s.q = base;
    s.k = s.q + Q_BYTES;
    s.v = s.k + CFG_STAGES * K_BYTES;
    s.q_full = s.v + CFG_STAGES * V_BYTES;
    s.q_empty = s.q_full + 8;
    s.anchor = s.q_full + 16;
    s.turn_full = s.q_full + 24;
    s.turn_empty = s.q_full + 40;
    s.k_full = s.q_full + 56;
    s.k_empty = s.k_full + CFG_STAGES * 8;
    s.v_full = s.k_empty + CFG_STAGES * 8;
    s.v_empty = s.v_full + CFG_STAGES * 8;
    s.turn = s.v_empty + CFG_STAGES * 8;
    s.columns = (mask_column *)(shared + (s.turn + 8 - base));
    return s;
}

/* With CFG_GATHERS warps copy keys by 16 bytes, and all lanes arrive where they are there. */
enum { FILLS = CFG_GATHERS ? 32 : 1 };

DEVICE void init_barriers(const arena &s)
{
    barrier_init(s.q_full, 1);
    barrier_init(s.q_empty, CFG_WGS * 4);
    barrier_init(s.anchor, 1);
    for (int i = 0; i < 2; i++) {
        barrier_init(s.turn_full + i * 8, 1);
        barrier_init(s.turn_empty + i * 8, CFG_WGS * 4 + LOADERS);
    }
    for (int i = 0; i < CFG_STAGES; i++) {
        barrier_init(s.k_full + i * 8, FILLS);
        barrier_init(s.v_full + i * 8, FILLS);
        barrier_init(s.k_empty + i * 8, CFG_WGS * 4);
        barrier_init(s.v_empty + i * 8, CFG_WGS * 4);
    }
    fence_barrier_init();
}

/* The n-th block of a ring lies in slot n % SLOTS. Each pass over the ring is a round, and the
 * parity of the round is what a barrier of the slot is waited for with. */
template <int SLOTS> DEVICE u32 ring_slot(u32 n)
{
    return n % SLOTS;
}

template <int SLOTS> DEVICE u32 ring_parity(u32 n)
{
    return n / SLOTS & 1;
}

/* 1. Which tile this CTA makes next (a turn). All producers draw the next tile of the work
 * order from one counter in global memory, so that no CTA waits for another. A producer hands
 * the tile's number to its consumers through two slots of shared memory. */
enum { NO_MORE = -1 };

DEVICE void turn_pass(const arena &s, u32 n, int id)
{
    u32 slot = ring_slot<2>(n);
    barrier_wait(s.turn_empty + slot * 8, ring_parity<2>(n) ^ 1);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(s.turn + slot * 4), "r"(id) : "memory");
    barrier_arrive(s.turn_full + slot * 8);
}

/* Lane 0 reads the number, and then lane 0 itself reports the slot as read: the arrival of
 * another lane would not be ordered after the read. */
DEVICE int turn_take(const arena &s, u32 n)
{
    u32 slot = ring_slot<2>(n);
    int id = 0, is_first = (threadIdx.x & 31) == 0;
    barrier_wait(s.turn_full + slot * 8, ring_parity<2>(n));
    if (is_first)
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(id) : "r"(s.turn + slot * 4) : "memory");
    __syncwarp(); /* all lanes have seen this round before there can be another */
    barrier_arrive_if(s.turn_empty + slot * 8, is_first);
    return __shfl_sync(~0u, id, 0);
}

/* 2. The producer is one thread. It loads K one block ahead of V, because consumers make the
 * scores of a block before they multiply the block before it by V. With chunks, which
 * take many small copies, it loads Q and hands out tiles, while a thread of the next warp loads
 * K and one of the next V; with CFG_GATHERS those are whole warps. */
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
template <int PANELS>
DEVICE void load_block(u32 dst, u32 full, const tensor_map *map, int first, head_box at)
{
    barrier_expect(full, PANELS * PANEL_KV);
#pragma unroll
    for (int p = 0; p < PANELS; p++)
        copy_box(dst + p * PANEL_KV, map, p * 64, first, at.h, at.b, full, EVICT_LAST);
}

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
                         const tensor_map *mv)
{
    int g = kv_head(p, t.h), is_value = is_value_loader();
    chunk_table chunks = chunks_of(p, t.b);
    block_walk walk = walk_begin(p, mod, t);
    int more = walk_next(walk, p, t.kv_len);
    if (threadIdx.x == 0) {
        if (more && !CFG_SPLIT)
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
                         const tensor_map *mv)
{
    int g = kv_head(p, t.h);
    head_box k = key_box(p, t.b, g), v = value_box(p, t.b, g);
    block_walk walk = walk_begin(p, mod, t);
    int more = walk_next(walk, p, t.kv_len);
    if (!more)
        return;
    if (!CFG_SPLIT)
        load_q(s, r, mq, row_place(t, t.row0), query_box(p, t.b, t.h));
    load_k(s, r, mk, key_place(t, walk.block * CFG_TN), k);
    while (more) {
        int block = walk.block;
        more = walk_next(walk, p, t.kv_len);
        if (more)
            load_k(s, r, mk, key_place(t, walk.block * CFG_TN), k);
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
                    const tensor_map *mk, const tensor_map *mv)
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
#if CFG_SPLIT
        tile t = item_at(p, turn);
#elif CFG_RAGGED
        tile t = tile_at(p, load_new((is_first ? p.ragged.order : p.order) + turn), ROWS);
#else
        tile t =
            p.n_listed ? tile_at(p, load_new(p.order + turn), ROWS) : tile_of(p, turn, ROWS);
#endif
        turn_pass(s, turns++, t.id);
        produce_tile(s, r, p, mod, t, mq, mk, mv);
        if (p.n_listed || (CFG_SPLIT && !p.counter))
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
#if CFG_SPLIT
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
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(id) : "r"(s.turn + slot * 4) : "memory");
#if CFG_GATHERS
        __syncwarp();
        barrier_arrive_if(s.turn_empty + slot * 8, (threadIdx.x & 31) == 0);
#else
        barrier_arrive(s.turn_empty + slot * 8);
#endif
        if (id == NO_MORE)
            return;
        produce_tile(s, r, p, mod, consumed_tile(p, id), 0, mk, mv);
    }
}
#endif

/* 3. The products of a block and its softmax: block90.cuh. */
template <int FIRST>
DEVICE int softmax_of(const arena &sm, consumer &c, const cu_fwd &p, const mod_args &mod,
                      const block_walk &walk, int wg, float (&s)[S_COUNT], float (&rescale)[2])
{
    return softmax_step<FIRST>(c, p, mod, walk.block * CFG_TN, walk_masked(walk, c.at.kv_len),
                               sm.columns + wg * CFG_TN, wg, s, rescale);
}

/* The weights of a block packed, 0 where dropout drops them. */
DEVICE void pack_kept(u32 (&prob)[S_COUNT / 2], const float (&s)[S_COUNT], const consumer &c,
                      const cu_fwd &p, const block_walk &walk)
{
    pack_p(prob, s);
#if CFG_DROP && !DROP_MIXED
    int column = walk.block * CFG_TN + 2 * (threadIdx.x & 3);
    drop_packed(prob, c.at.drop, p.drop, c.at.q, column + c.at.kv_offset);
#endif
}

/* 4. Consumer warpgroup wg. */
struct progress {
    u32 n;     /* blocks whose scores have been made, over all tiles; of V one less is used */
    u32 tiles; /* tiles that had a block, and so a Q to wait for */
};

DEVICE void release(u32 empty, u32 n)
{
    barrier_arrive_if(empty + ring_slot<CFG_STAGES>(n) * 8, (threadIdx.x & 31) == 0);
}

DEVICE void await(u32 full, u32 n)
{
    barrier_wait(full + ring_slot<CFG_STAGES>(n) * 8, ring_parity<CFG_STAGES>(n));
#if CFG_GATHERS
    fence_async_proxy(); /* products read what gather.cuh wrote */
#endif
}

DEVICE void start_qk(const arena &sm, float (&s)[S_COUNT], int wg, u32 n)
{
    product_qk(s, sm.q + wg * 64 * 128, sm.k + ring_slot<CFG_STAGES>(n) * K_BYTES);
    wgmma_commit();
}

DEVICE void start_pv(const arena &sm, float (&o)[O_COUNT], const u32 (&prob)[S_COUNT / 2],
                     u32 n)
{
    await(sm.v_full, n);
    product_pv(o, prob, sm.v + ring_slot<CFG_STAGES>(n) * V_BYTES);
    wgmma_commit();
}

#if CFG_CHUNKS
/* Behind the last key its page may hold anything, and 0 * NaN must not be seen. Each group
 * clears all it reads, so that none waits for another. */
DEVICE void clear_tail(const arena &sm, const consumer &c, u32 n, int wg)
{
    enum { EACH = PANELS_E * 8 }; /* pieces of 16 bytes in a row */
    if (c.live >= CFG_TN)
        return;
    u32 v = sm.v + ring_slot<CFG_STAGES>(n) * V_BYTES;
    await(sm.v_full, n);
#pragma unroll 1
    for (int i = c.live * EACH + (threadIdx.x & 127); i < CFG_TN * EACH; i += 128) {
        int row = i / EACH, piece = i % EACH;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         v + piece / 8 * PANEL_KV + row * 128 + piece % 8 * 16),
                     "r"(0)
                     : "memory");
    }
    fence_async_proxy();
    named_sync(8 + wg, 128);
}
#else
DEVICE void clear_tail(const arena &, const consumer &, u32, int)
{
}
#endif

/* The first block of a tile has no product with V to run beside. */
DEVICE void first_block(const arena &sm, u32 n, u32 tiles, consumer &c, const cu_fwd &p,
                        const mod_args &mod, const block_walk &walk, int wg,
                        float (&s)[S_COUNT], u32 (&prob)[S_COUNT / 2])
{
    float unused[2];
    if (!CFG_SPLIT)
        barrier_wait(sm.q_full, tiles & 1);
    await(sm.k_full, n);
    wgmma_fence();
    start_qk(sm, s, wg, n);
    wgmma_wait<0>();
    release(sm.k_empty, n);
    softmax_of<1>(sm, c, p, mod, walk, wg, s, unused);
    pack_kept(prob, s, c, p, walk);
}

/* The product for the scores of block n runs together with O += P V of block n - 1, and the
 * latter goes on while the softmax of block n is computed. */
DEVICE void next_block(const arena &sm, u32 n, consumer &c, const cu_fwd &p,
                       const mod_args &mod, const block_walk &walk, int wg, float (&s)[S_COUNT],
                       float (&o)[O_COUNT], u32 (&prob)[S_COUNT / 2])
{
    float rescale[2];
    clear_tail(sm, c, n - 1, wg);
    await(sm.k_full, n);
#if CFG_PINGPONG
    named_sync(1 + wg, 256);
#endif
    wgmma_fence();
    start_qk(sm, s, wg, n);
    start_pv(sm, o, prob, n - 1);
#if CFG_PINGPONG
    named_arrive(1 + (wg + 1 == CFG_WGS ? 0 : wg + 1), 256);
#endif
    wgmma_wait<1>();
    release(sm.k_empty, n);
    int raised = softmax_of<0>(sm, c, p, mod, walk, wg, s, rescale);
    /* No row sum is negative, so this arrival never happens. ptxas does not know that, and so
     * it keeps the wait that follows behind the exponentials which the sum depends on. Without
     * this line it moves the wait before all of them. */
    barrier_arrive_if(sm.anchor, c.rows.l[0] < 0.f);
    wgmma_wait<0>();
    release(sm.v_empty, n - 1);
    if (raised)
        rows_scale(o, rescale);
    pack_kept(prob, s, c, p, walk);
}

/* more: whether scores of the tile are still to be made. */
DEVICE void last_product(const arena &sm, const consumer &c, u32 n, int wg, float (&o)[O_COUNT],
                         const u32 (&prob)[S_COUNT / 2], int more)
{
    clear_tail(sm, c, n, wg);
    barrier_arrive_if(sm.q_empty, !more && (threadIdx.x & 31) == 0);
    wgmma_fence();
    start_pv(sm, o, prob, n);
    wgmma_wait<0>();
    release(sm.v_empty, n);
}

/* What the tile's rows need in the loop; rows of several heads come without tensor copies. */
DEVICE void place_consumed(const arena &sm, consumer &c, const cu_fwd &p, const mod_args &mod,
                           const tile &t, int wg)
{
#if CFG_SPLIT
    item_rows_place(c.at, p, mod, t);
    named_sync(8 + wg, 128); /* all warps are done with the Q before */
    item_load_q(sm.q, p, t);
    fence_async_proxy();
    named_sync(8 + wg, 128);
#else
    rows_place(c.at, p, mod, t);
#endif
}

DEVICE void consume_tile(const arena &sm, progress &done, const cu_fwd &p, const mod_args &mod,
                         int id, int wg)
{
    consumer c;
    float s[S_COUNT], o[O_COUNT];
    u32 prob[S_COUNT / 2];
    tile begin = consumed_tile(p, id);

    rows_begin(c.rows);
    place_consumed(sm, c, p, mod, begin, wg);
    c.unit = score_unit(p);
#if SCORE_TANH
    c.large = 0;
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        o[i] = 0.f;
    block_walk walk = walk_begin(p, mod, begin);
#if CFG_PART_KEYS && !CFG_SPLIT
    int more = walk_next(walk, p, c.at.kv_len), parts = 0;
    while (more) {
        int past = (walk.block / PART_BLOCKS + 1) * PART_BLOCKS;
        first_block(sm, done.n++, done.tiles, c, p, mod, walk, wg, s, prob);
        while ((more = walk_next(walk, p, c.at.kv_len)) && walk.block < past)
            next_block(sm, done.n++, c, p, mod, walk, wg, s, o, prob);
        last_product(sm, c, done.n - 1, wg, o, prob, more);
        part_end(c.rows);
        if (parts++)
            part_join(p, c.rows, o);
        if (more)
            part_put_by(p, c.rows, o);
    }
    done.tiles += parts > 0;
    part_share_sums(c.rows);
#else
    if (walk_next(walk, p, c.at.kv_len)) {
        first_block(sm, done.n++, done.tiles++, c, p, mod, walk, wg, s, prob);
        while (walk_next(walk, p, c.at.kv_len))
            next_block(sm, done.n++, c, p, mod, walk, wg, s, o, prob);
        last_product(sm, c, done.n - 1, wg, o, prob, 0);
    }
#endif
    /* The tile's place is computed again, for keeping it in registers would cost the loop above
     * some of its own. The statement hides from the compiler that id has not changed. */
    asm volatile("" : "+r"(id));
    tile end = consumed_tile(p, id);
#if CFG_SPLIT
    part_end(c.rows);
    part_store(p, end, c.rows, o);
#else
    float inv[2];
    rows_finish(c.rows, p, end, o, inv);
    rows_store(p, end, o, inv);
#endif
}

DEVICE void consume(const arena &sm, const cu_fwd &p, const mod_args &mod, int wg)
{
    progress done = {0, 0};
#if CFG_PINGPONG
    if (wg == 0)
        named_arrive(1, 256); /* nobody comes before the first group's first block */
#endif
    for (u32 i = 0;; i++) {
        int id = turn_take(sm, i);
        if (id == NO_MORE)
            return;
        consume_tile(sm, done, p, mod, id, wg);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_sm90(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
             const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
             const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    arena s = carve(shared);
    if (threadIdx.x == 0)
        init_barriers(s);
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group == 0) {
        registers_shrink<CFG_REGS_PRODUCER>();
        if (threadIdx.x == 0)
            produce(s, p, mod, &mq, &mk, &mv);
#if CFG_CHUNKS
        else if (CFG_GATHERS ? threadIdx.x >= 32 && threadIdx.x < 96
                             : threadIdx.x == 32 || threadIdx.x == 64)
            load_along(s, p, mod, &mk, &mv);
#endif
    } else {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(s, p, mod, group - 1);
    }
}

#if CFG_SPLIT
#include "join_parts.cuh"
#endif
