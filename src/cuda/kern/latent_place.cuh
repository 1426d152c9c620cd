/* Latent decode: who does what in a CTA, and where in shared memory. Warps 0 to 3 make scores
 * and weights of 64 rows, the next four the left half of O's columns, the next the right half,
 * the last four load. A block of keys arrives, and makes room, in units of panels of 64
 * columns: first what keys have beyond their values, then panels of both halves of these. */
#pragma once

#include "decode_span.cuh"

enum {
    PANEL = KEYS * 128, /* 64 columns of a block, and of Q */
    PANELS_D = (CFG_D + 63) / 64,
    SIDE_PANELS = CFG_E / 128, /* of each half of V */
    AT_ONCE = CFG_LATENT,      /* panels of a product with V */
    PRODUCTS = SIDE_PANELS / AT_ONCE,
    REST_PANELS = PANELS_D - 2 * SIDE_PANELS, /* of keys, not of values */
    HAS_REST = REST_PANELS > 0,
    UNITS = HAS_REST + PRODUCTS,
    SUM_PANELS = 2, /* of a sum that the products of scores add up before it is rounded */
    FIRST_SUM =
        (REST_PANELS - 1) % SUM_PANELS + 1, /* of a block's first, where it has a rest */
    FIRST_PANELS = HAS_REST ? FIRST_SUM : SUM_PANELS,
    STAGE = PANELS_D * PANEL,
    WEIGHTS = ROWS * KEYS * 2,
    SUMS = ROWS * 16,
    KEY_LOADERS = CFG_CODES ? LOADERS : 1 /* warps that bring keys */
};
static_assert(ROWS == 64 && KEYS == 64, "a wgmma has 64 rows, and panels of Q and K are alike");
static_assert(SIDE_PANELS % AT_ONCE == 0 && REST_PANELS >= 0, "whole units");

/* ---- roles ---- */

enum { SCORES, LEFT, RIGHT, LOADS_KEYS };

DEVICE int role_of_thread()
{
    return threadIdx.x / 128;
}

/* From as many as each thread of the CTA begins with. */
template <int REGISTERS> DEVICE void registers_become()
{
    if constexpr (REGISTERS < 65536 / THREADS)
        registers_shrink<REGISTERS>();
    else
        registers_grow<REGISTERS>();
}

/* ---- units ---- */

DEVICE constexpr int unit_panels(int unit)
{
    return HAS_REST && unit == 0 ? REST_PANELS : 2 * AT_ONCE;
}

/* The i'th panel of a unit. */
DEVICE constexpr int unit_panel(int unit, int i)
{
    int product = unit - HAS_REST, side = i / AT_ONCE;
    return HAS_REST && unit == 0 ? 2 * SIDE_PANELS + i
                                 : side * SIDE_PANELS + product * AT_ONCE + i % AT_ONCE;
}

/* Where the i'th sum of a block begins among its panels. */
DEVICE constexpr int sum_begin(int i)
{
    return i == 0 ? 0 : FIRST_PANELS + (i - 1) * SUM_PANELS;
}

/* The i'th panel of a block in the order in which they come; its unit, and whether it is the
 * first of that. */
DEVICE constexpr int nth_unit(int i)
{
    return i < REST_PANELS ? 0 : HAS_REST + (i - REST_PANELS) / (2 * AT_ONCE);
}

DEVICE constexpr int nth_begins(int i)
{
    return i == 0 || nth_unit(i) != nth_unit(i - 1);
}

DEVICE constexpr int nth_panel(int i)
{
    return i < REST_PANELS ? unit_panel(0, i)
                           : unit_panel(nth_unit(i), (i - REST_PANELS) % (2 * AT_ONCE));
}

/* ---- shared memory ---- */

struct arena {
    u32 q, ring, weights; /* panels of Q; stages; weights of a block as fragments */
    u32 full, empty;      /* barriers of each stage and unit */
    u32 weights_full, weights_empty;
    u32 factors, raised; /* what O's rows are to be multiplied by; whether, for each 16 */
    float4 *sums;        /* of each row at a span's end: offset, sum, maximum, 1 / sum */
    float *bad;          /* [2][ROWS] not 0 where a half of the row is not finite */
    mask_column *columns;
    int *prefix;
};

DEVICE arena carve(char *shared)
{
    arena a;
    u32 base = smem_address(shared);
    char *at = shared + (1 + CFG_STAGES) * STAGE + WEIGHTS;
    a.q = base;
    a.ring = base + STAGE;
    a.weights = a.ring + CFG_STAGES * STAGE;
    a.sums = (float4 *)at;
    a.bad = (float *)(at + SUMS);
    at += SUMS + 2 * ROWS * 4;
    a.factors = smem_address(at);
    a.raised = a.factors + ROWS * 4;
    a.full = a.raised + 16;
    a.empty = a.full + CFG_STAGES * UNITS * 8;
    a.weights_full = a.empty + CFG_STAGES * UNITS * 8;
    a.weights_empty = a.weights_full + 8;
    at += ROWS * 4 + 16 + (2 * CFG_STAGES * UNITS + 2) * 8;
    a.columns = (mask_column *)at;
    a.prefix = (int *)(at + 4 * MASK_COLUMN_WORDS * KEYS);
    return a;
}

DEVICE void init_barriers(const arena &a)
{
    for (int i = 0; i < CFG_STAGES; i++)
        for (int u = 0; u < UNITS; u++) {
            barrier_init(a.full + (i * UNITS + u) * 8, KEY_LOADERS);
            barrier_init(a.empty + (i * UNITS + u) * 8, HAS_REST && u == 0 ? 4 : 8);
        }
    barrier_init(a.weights_full, 4);
    barrier_init(a.weights_empty, 8);
    fence_barrier_init();
}

/* Of block n of the CTA's share. */
DEVICE u32 stage_of(const arena &a, u32 n)
{
    return a.ring + n % CFG_STAGES * STAGE;
}

DEVICE u32 barrier_of(u32 barriers, u32 n, int unit)
{
    return barriers + (n % CFG_STAGES * UNITS + unit) * 8;
}

DEVICE u32 turn_of(u32 n)
{
    return n / CFG_STAGES & 1;
}

/* Until a unit has come. What warps have stored there is seen by products behind a fence, which
 * is not theirs: it would wait for all that they load. */
DEVICE void await_unit(const arena &a, u32 n, int unit)
{
    barrier_wait(barrier_of(a.full, n, unit), turn_of(n));
    if (CFG_CODES)
        fence_async_proxy();
}

/* ---- the way through a share ---- */

/* x, which all lanes have, so that ptxas knows it too: products stand in loops that count to
 * it. */
DEVICE int of_all(int x)
{
    return __shfl_sync(~0u, x, 0);
}

/* The CTA's part of a span: blocks [first, last) of it, to slot if it is not the whole. */
struct piece {
    span s;
    int first, last, slot, is_whole;
};

DEVICE int share_of_cta(const cu_fwd &p, const mod_args &mod, const line &l, cursor &c)
{
    int begin, end;
    place_share(p, mod, l, shares_of(p, l), number_behind(blockIdx.x), begin, end);
    c = cursor_at(p, mod, l, begin);
    c.t = of_all(c.t);
    return of_all(end);
}

/* The piece at c, which moves on behind it. */
DEVICE piece next_piece(const cu_fwd &p, const mod_args &mod, const line &l, cursor &c, int end)
{
    piece x;
    int begins = c.t == c.from, past = min(c.to, end);
    x.s = c.s;
    x.first = of_all(c.t - c.from);
    x.last = of_all(past - c.from);
    x.slot = piece_slot(blockIdx.x, begins);
    x.is_whole = owns_span(p) || (begins && past == c.to);
    c.t = of_all(past);
    if (past < end)
        cursor_follow(p, mod, l, c);
    return x;
}
