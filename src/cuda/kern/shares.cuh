/* Shared values of scores: what a key brings alone, or a diagonal, is made once for a block by
 * the warpgroup that reads it, while its scores are on their way, and comes from shared memory
 * (emit_shares.c). Of a block there are CFG_TN values of keys, and CFG_TN + 63 of diagonals:
 * number d has those with column - row = d - 63. Rows read two neighbours at once, odd ones
 * from the second of two copies, in which all stand one further. */
#pragma once

#include "shared.cuh"
#include "tile.cuh"

#if CFG_SHARES
enum {
    SHARE_KEYS = CFG_TN * 4,             /* bytes of a value of keys */
    SHARE_DIAGONALS = (CFG_TN + 64) * 4, /* of a copy of a value of diagonals */
    SHARE_BLOCK = SCORE_KEYS * SHARE_KEYS + SCORE_DIAGONALS * 2 * SHARE_DIAGONALS
};
#define SHARE_BYTES (2 * SHARE_BLOCK) /* of a group: two blocks by turns */

DEVICE int share_row(void)
{
    return (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
}

#if SCORE_DIAGONALS
DEVICE void share_put(u32 at, int d, const u32 (&x)[SCORE_DIAGONALS])
{
#pragma unroll
    for (int j = 0; j < SCORE_DIAGONALS; j++) {
        u32 to = at + j * 2 * SHARE_DIAGONALS + d * 4;
        store_word(to, x[j]);
        store_word(to + SHARE_DIAGONALS + 4, x[j]);
    }
}

/* Diagonals [0, 63) of the block at `to`, which neighbours have in common: of the one at `from`
 * they are the last. */
DEVICE void share_neighbour(u32 to, u32 from)
{
    u32 x[SCORE_DIAGONALS];
    int d = min(threadIdx.x & 63, 62u);
#pragma unroll
    for (int j = 0; j < SCORE_DIAGONALS; j++)
        x[j] = load_word(from + j * 2 * SHARE_DIAGONALS + (d + CFG_TN) * 4);
    share_put(to, d, x);
}
#endif

/* This thread's part of the block of keys from `first` on: a key, and a diagonal that the block
 * before does not have. */
DEVICE void share_make(share_ahead &to, const tile_rows &r, const cu_fwd &p,
                       const mod_args &mod, int first)
{
    int kv = first + r.kv_offset, n = min(threadIdx.x & 127, CFG_TN - 1);
#if SCORE_KEYS
    score_of_key(mod, p, r.b, r.h, r.score[0], kv + n, to.key);
#endif
#if SCORE_DIAGONALS
    score_of_diagonal(mod, p, r.b, r.h, r.score[0], kv + share_row() + n, to.diagonal);
#endif
}

/* Block n of the group, of the keys from `first` on, into one half of what the group has in
 * `room`. Its threads wait for each other before they read, and so none of them still reads
 * what was in this half. What comes next is most often the neighbour, which is begun. */
DEVICE void share_block(tile_rows &r, const cu_fwd &p, const mod_args &mod, int first, u32 n,
                        u32 room)
{
    share_reads &at = r.shares;
    u32 to = room + (n & 1) * SHARE_BLOCK, from = room + (~n & 1) * SHARE_BLOCK;
    u32 diagonals = to + SCORE_KEYS * SHARE_KEYS;
    int own = min(threadIdx.x & 127, CFG_TN - 1);
    if (at.past != first) {
        share_make(at.ahead, r, p, mod, first);
#if SCORE_DIAGONALS
        u32 x[SCORE_DIAGONALS];
        int d = threadIdx.x & 63;
        score_of_diagonal(mod, p, r.b, r.h, r.score[0],
                          first + r.kv_offset + share_row() + d - 63, x);
        share_put(diagonals, d, x);
    } else {
        share_neighbour(diagonals, from + SCORE_KEYS * SHARE_KEYS);
#endif
    }
#if SCORE_KEYS
#pragma unroll
    for (int i = 0; i < SCORE_KEYS; i++)
        store_word(to + i * SHARE_KEYS + own * 4, at.ahead.key[i]);
#endif
#if SCORE_DIAGONALS
    share_put(diagonals, own + 63, at.ahead.diagonal);
    int read = 2 * (threadIdx.x & 3) - share_row() + 63;
    at.diagonal = diagonals + read * 4 + (read & 1) * (SHARE_DIAGONALS + 4);
#endif
    at.key = to + 8 * (threadIdx.x & 3);
    at.past = first + CFG_TN;
    share_make(at.ahead, r, p, mod, at.past);
}

/* Values for the four scores of a row pair, 8g keys on; before the first, the second row's. */
DEVICE void share_first(const share_reads &at, score_shared &x)
{
#if SCORE_DIAGONALS
#pragma unroll
    for (int j = 0; j < SCORE_DIAGONALS; j++)
        load_two_words(x.diagonal[j][0], x.diagonal[j][1],
                       at.diagonal + j * 2 * SHARE_DIAGONALS - 32);
#endif
}

DEVICE void share_next(const share_reads &at, int g, score_shared &x)
{
#if SCORE_KEYS
#pragma unroll
    for (int i = 0; i < SCORE_KEYS; i++)
        load_two_words(x.key[i][0], x.key[i][1], at.key + i * SHARE_KEYS + g * 32);
#endif
#if SCORE_DIAGONALS
#pragma unroll
    for (int j = 0; j < SCORE_DIAGONALS; j++) {
        x.diagonal[j][2] = x.diagonal[j][0];
        x.diagonal[j][3] = x.diagonal[j][1];
        load_two_words(x.diagonal[j][0], x.diagonal[j][1],
                       at.diagonal + j * 2 * SHARE_DIAGONALS + g * 32);
    }
#endif
}
#endif
