/* The walk of a tile over its live blocks of keys: all blocks, or the runs of a block mask. The
 * producer and the consumers of a tile walk alike, each for itself. */
#pragma once

#include "tile.cuh"
#if CFG_BY_PARTS
#include "items.cuh"
#endif

/* A place in the walk. It is small because it stays in registers through the loop over keys.
 * Scores that grow with the key (ALiBi) are walked from the right: the largest come first, and
 * the rows' offsets are right from the start. Where rows are to have bits of their own, all
 * walks go to the right, since heads that share a tile may slope either way. */
#define WALKS_LEFT (MOD_SCORE == SCORE_AFFINE && !CFG_INVARIANT)
struct block_walk {
    int run, end;    /* the next run, and the one past the last */
    int block, last; /* the present block, and the last one of the present run */
    int partial;     /* whether the present run needs the mask */
#if WALKS_LEFT
    int step; /* 1 to the right, -1 to the left */
#endif
};

#if WALKS_LEFT
#define WALK_STEP(w) (w).step
#else
#define WALK_STEP(w) 1
#endif

DEVICE int block_count(int kv_len)
{
    return (kv_len + CFG_TN - 1) / CFG_TN;
}

DEVICE int walk_step(const cu_fwd &p, const mod_args &mod, const tile &t)
{
#if WALKS_LEFT
    score_row r;
    score_row_begin(mod, p, t.b, t.h, t.row0 + t.q_offset, r);
    return r.alpha > 0.f ? -1 : 1;
#else
    return 1;
#endif
}

#if CFG_RAGGED || CFG_BY_PARTS
/* Limits are found here, not by a block mask: lengths are known here alone, or rows of several
 * heads share the tile. `run` and `end` are the first block that needs no mask and the one past
 * the last. */
DEVICE block_walk walk_begin(const cu_fwd &p, const mod_args &mod, const tile &t)
{
    block_walk w;
#if CFG_BY_PARTS
    tile_keys k = item_keys(p, mod, t);
#else
    tile_keys k = keys_of(p, mod, t, CFG_TILE_ROWS);
#endif
    int left = walk_step(p, mod, t) < 0;
    int first = k.from / CFG_TN, past = k.past > k.from ? block_count(k.past) : first;
#if WALKS_LEFT
    w.step = left ? -1 : 1;
#endif
    w.run = (k.all_from + CFG_TN - 1) / CFG_TN;
    w.end = k.all_past / CFG_TN;
    w.partial = 0;
    w.block = left ? past : first - 1;
    w.last = past <= first ? w.block : left ? first : past - 1;
    return w;
}

DEVICE int walk_next(block_walk &w, const cu_fwd &p, int kv_len)
{
    if (w.block == w.last)
        return 0;
    w.block += WALK_STEP(w);
    w.partial = MOD_MASK != MASK_NONE && (w.block < w.run || w.block >= w.end);
    return 1;
}
#else
DEVICE block_walk walk_begin(const cu_fwd &p, const mod_args &mod, const tile &t)
{
    block_walk w;
    int n = block_count(t.kv_len), left = walk_step(p, mod, t) < 0;
#if WALKS_LEFT
    w.step = left ? -1 : 1;
#endif
    w.run = w.end = 0;
    w.partial = MOD_MASK != MASK_NONE;
    w.block = left ? n : -1;
    w.last = left ? 0 : n - 1;
    if (p.runs) {
        int row = t.b * p.mask_b + t.h * p.mask_h + t.block;
        int from = __ldg(p.run_start + row), to = __ldg(p.run_start + row + 1);
        w.run = left ? to - 1 : from;
        w.end = left ? from - 1 : to;
        w.last = w.block;
    } else if (n == 0) {
        w.last = w.block;
    }
    return w;
}

DEVICE int walk_next(block_walk &w, const cu_fwd &p, int kv_len)
{
    if (w.block != w.last) {
        w.block += WALK_STEP(w);
        return 1;
    }
#if WALKS_LEFT
    while (w.run != w.end) {
        int4 run = __ldg((const int4 *)p.runs + w.run);
        int from = run.x, to = min(run.x + run.y, block_count(kv_len)) - 1;
        w.run += w.step;
        w.partial = run.z;
        w.block = w.step > 0 ? from : to;
        w.last = w.step > 0 ? to : from;
        if (from <= to)
            return 1;
        w.last = w.block;
    }
    return 0;
#else
    if (w.run == w.end)
        return 0;
    int4 run = __ldg((const int4 *)p.runs + w.run++);
    w.block = run.x;
    w.last = min(run.x + run.y, block_count(kv_len)) - 1;
    w.partial = run.z;
    if (w.block <= w.last)
        return 1;
    w.run = w.end; /* runs ascend: no run after one past kv_len is live */
    w.last = w.block;
    return 0;
#endif
}
#endif

/* Why scores of the present block may be masked. */
DEVICE int walk_masked(const block_walk &w, int kv_len)
{
    return masked_by(w.partial, w.block * CFG_TN + CFG_TN > kv_len);
}
