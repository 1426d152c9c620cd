/* Dense reads of backward: tiles that come beside Q (dense.cuh), whose rows are keys and whose
 * columns are queries. */
#pragma once

#include "dense.cuh"

#if CFG_DENSE
#define HAS_DENSE_SCORE (SCORE_DENSE > 0)
#define HAS_DENSE_MASK (MASK_DENSE > 0)

/* Where this thread reads the tiles of a step. */
struct dense_lanes {
    u32 of[DENSE_READS];
};

/* Elements of COUNT reads from FIRST on for eight queries, 8 i on, and two keys, as scores4
 * takes four scores; called for each i from 0 on. pairs: of the present 16 queries. */
template <int FIRST, int COUNT, int TURNED>
DEVICE void dense_next(u32 (&x)[COUNT][4], u32 (&pairs)[COUNT][2][4], const dense_lanes &at,
                       int i)
{
    if (i % 2 == 0)
        dense_pairs<FIRST, COUNT, TURNED>(at.of, 8 * i, pairs);
    dense_half(pairs, i % 2, x);
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        u32 y = x[r][1];
        x[r][1] = x[r][2];
        x[r][2] = y;
    }
}
#else
#define HAS_DENSE_SCORE 0
#define HAS_DENSE_MASK 0

struct dense_lanes {
};
#endif
