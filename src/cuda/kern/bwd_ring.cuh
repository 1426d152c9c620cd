/* Places of what passes by in shared memory, and what its steps say. */
#pragma once

/* STEP_BY_END: what is masked is so by the end of the keys alone. STEP_FIRST: the tile's first
 * step; together with STEP_END, the tile has no step at all. STEP_ROWS: from this bit on, how
 * many queries the step has, where these are fewer than a block's and that matters. */
enum { STEP_MASKED = 1, STEP_END = 2, STEP_FIRST = 4, STEP_BY_END = 8, STEP_ROWS = 8 };

/* masked: see masked_by. */
DEVICE int masked_flags(int masked)
{
    return (masked ? STEP_MASKED : 0) | (masked == MASKED_BY_END ? STEP_BY_END : 0);
}

/* Whether queries past the last are cut from steps that no mask cuts: rows there weigh 0 times
 * what K holds, which may be NaN, and that matters for sums along diagonals; and their scores
 * may be NaN. */
#define CUTS_ROWS (CFG_TERMS || SCORE_MAY_BE_NAN)

/* What a step says with so many queries from its first on. Where the mask hides keys from all
 * rows but those past the last, that matters too. Rows of other sequences are cleared
 * besides. */
DEVICE int step_flags(int rows, int masked)
{
    int is_cut = (masked || CUTS_ROWS || CFG_RAGGED) && rows < BWD_ROWS;
    return masked_flags(masked) | (is_cut ? rows << STEP_ROWS : 0);
}

/* How many queries a step has, where all steps say so. */
DEVICE int step_rows(const int4 &step)
{
    int n = step.w >> STEP_ROWS;
    return n ? n : BWD_ROWS;
}

/* A place in a ring of SLOTS, and the parity of its round. */
template <int SLOTS> struct ring {
    u32 slot, parity;
};

template <int SLOTS> DEVICE void ring_next(ring<SLOTS> &r)
{
    r.slot++;
    if (r.slot == SLOTS) {
        r.slot = 0;
        r.parity ^= 1;
    }
}

/* one arrival of each warp */
DEVICE void warp_arrives(u32 bar)
{
    __syncwarp();
    barrier_arrive_if(bar, (threadIdx.x & 31) == 0);
}
