/* Shared values of scores in backward: what of a score a query brings alone, a key or a
 * diagonal (emit_shares.c). A warp has 16 keys by BWD_ROWS queries of a step; its lanes make
 * each value once, while the step's scores are on their way, and hand them to each other. */
#pragma once

/* Where scores are general: others have no shared values. */
#define HAS_SHARES (CFG_SHARES && !IS_LINE && !SLOPE_CAP)

#if HAS_SHARES
enum { SHARE_ROWS = BWD_ROWS / 32, SHARE_DIAGONALS = (BWD_ROWS + 15 + 31) / 32 };

/* What a lane has made for a step: of queries lane, lane + 32 and so on; of its two keys; of
 * diagonals: number d has those with query - key = d - 15 from the warp's first ones on. */
struct lane_shares {
#if SLOPE_ROWS
    u32 row[SLOPE_ROWS][SHARE_ROWS];
#endif
#if SLOPE_KEYS
    u32 key[SLOPE_KEYS][2];
#endif
#if SLOPE_DIAGONALS
    u32 diagonal[SLOPE_DIAGONALS][SHARE_DIAGONALS];
#endif
};

DEVICE void share_step(lane_shares &to, const cu_fwd &p, const mod_args &mod, const places &at)
{
    int lane = threadIdx.x & 31, q = at.q - 2 * (lane & 3);
#if SLOPE_ROWS
#pragma unroll
    for (int j = 0; j < SHARE_ROWS; j++) {
        u32 x[SLOPE_ROWS];
        slope_of_row(mod, p, at.b, at.h, q + lane + 32 * j, x);
#pragma unroll
        for (int i = 0; i < SLOPE_ROWS; i++)
            to.row[i][j] = x[i];
    }
#endif
#if SLOPE_KEYS || SLOPE_DIAGONALS
    slope_row first;
    slope_row_begin(mod, p, at.b, at.h, q, first);
#endif
#if SLOPE_KEYS
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 x[SLOPE_KEYS];
        slope_of_key(mod, p, at.b, at.h, first, at.kv + 8 * j, x);
#pragma unroll
        for (int i = 0; i < SLOPE_KEYS; i++)
            to.key[i][j] = x[i];
    }
#endif
#if SLOPE_DIAGONALS
#pragma unroll
    for (int j = 0; j < SHARE_DIAGONALS; j++) {
        u32 x[SLOPE_DIAGONALS];
        slope_of_diagonal(mod, p, at.b, at.h, first, at.kv - lane / 4 + 15 - lane - 32 * j, x);
#pragma unroll
        for (int i = 0; i < SLOPE_DIAGONALS; i++)
            to.diagonal[i][j] = x[i];
    }
#endif
}

#if SLOPE_DIAGONALS
/* Those of this thread's first key and queries 8 i on; i may be -1. */
DEVICE void two_diagonals(u32 &x, u32 &y, const u32 (&of)[SHARE_DIAGONALS], int i)
{
    int d = 8 * i + 2 * (threadIdx.x & 3) - (threadIdx.x & 31) / 4 + 15;
    int first = (8 * i + 8) / 32, last = (8 * i + 22) / 32; /* no lane is outside */
    x = __shfl_sync(~0u, of[first], d & 31);
    y = __shfl_sync(~0u, of[first], d + 1 & 31);
    if (first < last) {
        u32 above = __shfl_sync(~0u, of[last], d & 31);
        u32 after = __shfl_sync(~0u, of[last], d + 1 & 31);
        x = d < 32 * last ? x : above;
        y = d + 1 < 32 * last ? y : after;
    }
}
#endif

/* Values for two queries, 8 i on, and two keys; called for each i from 0 on. */
DEVICE void share_next(slope_shared &x, const lane_shares &of, int i)
{
#if SLOPE_ROWS
#pragma unroll
    for (int r = 0; r < SLOPE_ROWS; r++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            x.row[r][j] =
                __shfl_sync(~0u, of.row[r][i / 4], (8 * i & 31) + 2 * (threadIdx.x & 3) + j);
#endif
#if SLOPE_KEYS
#pragma unroll
    for (int k = 0; k < SLOPE_KEYS; k++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            x.key[k][j] = of.key[k][j];
#endif
#if SLOPE_DIAGONALS
#pragma unroll
    for (int k = 0; k < SLOPE_DIAGONALS; k++) {
        if (i == 0)
            two_diagonals(x.diagonal[k][1], x.diagonal[k][3], of.diagonal[k], -1);
        else
            x.diagonal[k][1] = x.diagonal[k][0], x.diagonal[k][3] = x.diagonal[k][2];
        two_diagonals(x.diagonal[k][0], x.diagonal[k][2], of.diagonal[k], i);
    }
#endif
}
#endif
