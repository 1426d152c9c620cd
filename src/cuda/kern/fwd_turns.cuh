/* Shared memory of the forward kernel for Hopper, its barriers and rings, and how a producer
 * hands tiles to consumers. Tiles lie in swizzled rows of 128 bytes, in panels of 64 columns: Q
 * [panels][ROWS][64], K and V [CFG_STAGES][panels][CFG_TN][64], dense reads, then barriers. */
#pragma once

enum {
    THREADS = (CFG_WGS + 1) * 128,
    LOADERS = CFG_CHUNKS ? 2 : 0, /* producers that are told which tile to load */
    LISTED = 8
};

/* addresses of this CTA's shared memory */
struct arena {
    u32 q, k, v;
    /* Barriers of 8 bytes. There are two turn_full and two turn_empty, and CFG_STAGES of each
     * of the k_ and v_ ones. The anchor is never waited for: see next_block. */
    u32 q_full, q_empty, turn_full, turn_empty, anchor;
    u32 k_full, k_empty, v_full, v_empty;
#if CFG_DENSE
    u32 dense, dense_full, dense_empty; /* CU_DENSE_STAGES of each */
#endif
    u32 turn;   /* [2] tile numbers that the producer hands to the consumers */
    u32 listed; /* [LISTED] tiles that list_tile has listed, by their numbers */
#if CFG_SHARES
    u32 shares; /* [CFG_WGS] SHARE_BYTES */
#endif
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
#if CFG_DENSE
    s.dense = s.q_full;
    s.q_full += CU_DENSE_STAGES * dense_stage_bytes();
#endif
    s.q_empty = s.q_full + 8;
    s.anchor = s.q_full + 16;
    s.turn_full = s.q_full + 24;
    s.turn_empty = s.q_full + 40;
    s.k_full = s.q_full + 56;
    s.k_empty = s.k_full + CFG_STAGES * 8;
    s.v_full = s.k_empty + CFG_STAGES * 8;
    s.v_empty = s.v_full + CFG_STAGES * 8;
    s.turn = s.v_empty + CFG_STAGES * 8;
#if CFG_DENSE
    s.dense_full = s.turn;
    s.dense_empty = s.dense_full + CU_DENSE_STAGES * 8;
    s.turn = s.dense_empty + CU_DENSE_STAGES * 8;
#endif
    s.listed = s.turn + 8;
    u32 end = s.listed + LISTED * 4;
#if CFG_SHARES
    s.shares = end;
    end += CFG_WGS * SHARE_BYTES;
#endif
    s.columns = (mask_column *)(shared + (end - base));
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
#if CFG_DENSE
    for (int i = 0; i < CU_DENSE_STAGES; i++) {
        barrier_init(s.dense_full + i * 8, 1);
        barrier_init(s.dense_empty + i * 8, CFG_WGS * 4);
    }
#endif
    for (int i = 0; i < LISTED; i++)
        store_word(s.listed + i * 4, ~0u);
    fence_barrier_init();
}

/* A tile that the second pass makes again, if one of the warps asks; of the others that have
 * rows of it most then find it listed. */
DEVICE void list_tile(const arena &s, const cu_fwd &p, int id, int is_bad)
{
#if CFG_LAZY
    if ((threadIdx.x & 31) == 0 && is_bad && p.redo) {
        int before;
        asm volatile("atom.shared.exch.b32 %0, [%1], %2;"
                     : "=r"(before)
                     : "r"(s.listed + id % LISTED * 4), "r"(id)
                     : "memory");
        if (before != id)
            p.redo[atomicAdd(p.redo_count, 1)] = id;
    }
#endif
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

/* Which tile this CTA makes next (a turn). All producers draw the next tile of the work
 * order from one counter in global memory, so that no CTA waits for another. A producer hands
 * the tile's number to its consumers through two slots of shared memory. */
enum { NO_MORE = -1 };

DEVICE void turn_pass(const arena &s, u32 n, int id)
{
    u32 slot = ring_slot<2>(n);
    barrier_wait(s.turn_empty + slot * 8, ring_parity<2>(n) ^ 1);
    store_word(s.turn + slot * 4, (u32)id);
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
        id = (int)load_word(s.turn + slot * 4);
    __syncwarp(); /* all lanes have seen this round before there can be another */
    barrier_arrive_if(s.turn_empty + slot * 8, is_first);
    return __shfl_sync(~0u, id, 0);
}
