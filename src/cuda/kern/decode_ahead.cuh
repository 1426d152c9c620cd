/* What a warp of decode knows of the block that it will copy next. Entries of the chunk table
 * are read here, a block before they are used, so that no copy waits for them. */
#pragma once

#define WIDENS (CFG_LATENT && CFG_CODES) /* threads that load have keys of their own */

enum { NO_BLOCK = -1, ENTRIES = WIDENS ? 1 : (KEYS + 31) / 32 };

struct lookahead {
    cursor at;
    int first, n; /* first key of the block, or NO_BLOCK; keys of its batch */
#if CFG_CHUNKS
    chunk_table chunks;
    int entry[ENTRIES]; /* of the keys that the lane finds: key_of_lane */
#endif
};

/* The i'th of the two keys of a block that a thread widens columns of; four lanes have one. */
DEVICE int widened_key(int i)
{
    return 32 * i + threadIdx.x % 128 / 4;
}

/* The i'th key that this lane finds the place of, counted from the block's first; `each`: keys
 * of a copy. */
DEVICE int key_of_lane(int i, int each)
{
    if (WIDENS)
        return widened_key(threadIdx.x & 1);
    return (32 * i + (int)(threadIdx.x & 31)) * each;
}

/* The block at x.at. */
DEVICE void find_block(lookahead &x, const cu_fwd &p, int each, int end)
{
    int partial;
    x.first = NO_BLOCK;
    if (x.at.t >= end)
        return;
    x.first = block_at(p, x.at.s, x.at.t - x.at.from, partial) * KEYS;
#if CFG_CHUNKS
#pragma unroll
    for (int i = 0; i < ENTRIES; i++) {
        int key = key_of_lane(i, each), j = x.first + key;
        x.entry[i] = key < KEYS && j < x.n ? chunk_entry(x.chunks, j) : -1;
    }
#endif
}

DEVICE void find_batch(lookahead &x, const cu_fwd &p)
{
    x.n = batch_keys(p, x.at.s.b);
#if CFG_CHUNKS
    x.chunks = chunks_of(p, x.at.s.b);
#endif
}

DEVICE void ahead_begin(lookahead &x, const cu_fwd &p, const mod_args &mod, const line &l,
                        int each, int end)
{
    cursor_seek(p, mod, l, x.at, end);
    if (x.at.t < end)
        find_batch(x, p);
    find_block(x, p, each, end);
}

/* On to the warp's next block. */
DEVICE void ahead_move(lookahead &x, const cu_fwd &p, const mod_args &mod, const line &l,
                       int each, int end)
{
    x.at.t = next_place(x.at.t);
    if (cursor_seek(p, mod, l, x.at, end)) {
        prefetch_q(p, x.at.s);
        find_batch(x, p);
    }
    find_block(x, p, each, end);
}

/* Where the lane's i'th key lies; row -1: it is not there. */
struct lane_key {
    int b, row;
};

DEVICE lane_key find_key(const lookahead &x, int i, int each)
{
    int key = key_of_lane(i, each), j = x.first + key, b = x.at.s.b;
#if CFG_CHUNKS
    chunk_place at = chunk_place_by(x.chunks, b, j, x.entry[i]);
    lane_key y = {at.b, key < KEYS && j < x.n ? at.row : -1};
#else
    lane_key y = {b, key < KEYS && j < x.n ? span_key(x.at.s, j) : -1};
#endif
    return y;
}
