/* Few queries, many keys. A span is one (b, g, tile of 16 packed rows): the query heads of a
 * group share it, so that K and V are read once. In a CTA each warp takes every CFG_WGS-th
 * block through its own TMA ring; partial results meet in shared memory. Spans are shared out
 * in one of two ways (cu_decode_cluster): whole ones to each CTA, or one to a cluster whose
 * CTAs join their parts through shared memory; or the blocks of all spans as one line cut into
 * equal pieces (Flash-Decoding, with the cut of stream-K), which `decode_end` joins.
 *
 * Order of merging: by warp, then by CTA: fixed by the problem and the device model. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "softmax.cuh"
#include "rows.cuh"
#include "mma.cuh"
#include "careful.cuh"

enum {
    WARPS = CFG_WGS, /* even */
    HALF = WARPS / 2,
    KEYS = CFG_TN,
    ROWS = 16,
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    PANEL = KEYS * 128,
    STAGE = (PANELS_D + PANELS_E) * PANEL,
    O_STEP =
        CFG_E + 8, /* floats of a row where warps meet: no two rows of a store share banks */
    S_COUNT = KEYS / 2,
    O_COUNT = CFG_E / 2
};

/* ---- spans ---- */

struct span {
    int b, g, row0; /* row0: first packed row, head-major within the group */
    int first, n;   /* blocks of keys; without runs they are neighbours */
};

/* x / d by multiplication: by is 2^32 / d rounded up, 0 for d = 1; exact where x d < 2^32. A
 * division is 20 instructions, and a dozen of them stood before the first copy. */
DEVICE int quotient(int x, u32 by)
{
    return by ? __umulhi(x, by) : x;
}

DEVICE span span_place(const cu_fwd &p, int i)
{
    span s;
    int pair = quotient(i, p.few.by_tiles);
    s.row0 = (i - pair * p.few.tiles) * ROWS;
    s.b = quotient(pair, p.few.by_G);
    s.g = pair - s.b * p.G;
    return s;
}

/* head and query of a packed row */
struct place {
    int h, m;
};

DEVICE place row_place(const cu_fwd &p, const span &s, int packed)
{
    int h = quotient(packed, p.few.by_M);
    place x = {s.g * p.few.group + h, packed - h * p.M};
    return x;
}

/* rows of a span that are there */
DEVICE int span_rows(const cu_fwd &p, const span &s)
{
    return min((int)ROWS, p.few.rows - s.row0);
}

/* keys that the interval mask leaves to any row of the span */
DEVICE void span_limits(const cu_fwd &p, const mod_args &mod, const span &s, int &lo, int &hi)
{
#if MOD_MASK == MASK_INTERVAL
    int least = 0x7fffffff, most = -0x7fffffff;
    int q_offset = position(p.q_offset, s.b), kv_offset = position(p.kv_offset, s.b);
#pragma unroll 1
    for (int r = 0; r < span_rows(p, s); r++) {
        int from, to;
        place x = row_place(p, s, s.row0 + r);
        mask_interval(mod, p, s.b, x.h, x.m + q_offset, from, to);
        if (from < to) {
            least = min(least, from);
            most = max(most, to);
        }
    }
    lo = (int)max((long long)lo, (long long)least - kv_offset);
    hi = (int)min((long long)hi, (long long)most - kv_offset);
#endif
}

/* the row of the block mask that the group's heads share */
DEVICE int mask_row_of(const cu_fwd &p, const span &s)
{
    return s.b * p.mask_b + s.g * p.mask_h;
}

/* Every span has a block, so that each row is written by somebody; it may be dead throughout.
 */
DEVICE void span_count(const cu_fwd &p, const mod_args &mod, span &s)
{
    int lo = 0, hi = max(0, min(position(p.kv_len, s.b), p.N));
    if (p.runs) {
        int row = mask_row_of(p, s), begin = p.run_start[row], end = p.run_start[row + 1];
        s.first = 0;
        s.n = begin < end ? p.runs[end - 1].ordinal + p.runs[end - 1].count : 1;
        return;
    }
    span_limits(p, mod, s, lo, hi);
    s.first = hi > lo ? lo / KEYS : 0;
    s.n = hi > lo ? (hi + KEYS - 1) / KEYS - s.first : 1;
}

/* The line of all blocks: where spans begin. */
struct line {
    const int *prefix; /* blocks before each span; unused where all spans are alike */
    int each, spans;   /* blocks of every span, or 0 */
};

DEVICE int line_at(const line &l, int i)
{
    return l.each ? i * l.each : l.prefix[i];
}

/* the span that holds block t */
DEVICE int line_find(const line &l, int t)
{
    if (l.each)
        return min(t / l.each, l.spans - 1);
    int lo = 0, hi = l.spans - 1; /* prefix[lo] <= t < prefix[hi + 1] */
#pragma unroll 1
    while (lo < hi) {
        int middle = (lo + hi + 1) / 2;
        if (l.prefix[middle] <= t)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo;
}

/* prefix[i]: blocks of the spans before i; all threads. */
DEVICE void sum_spans(const cu_fwd &p, const mod_args &mod, int *prefix, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        span s = span_place(p, i);
        span_count(p, mod, s);
        prefix[i + 1] = s.n;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int each = (n + 31) / 32, from = min(n, (int)threadIdx.x * each),
            to = min(n, from + each);
        int sum = 0;
#pragma unroll 1
        for (int i = from; i < to; i++)
            sum += prefix[i + 1];
        int before = sum;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, before, d);
            before += threadIdx.x >= d ? other : 0;
        }
        before -= sum;
#pragma unroll 1
        for (int i = from; i < to; i++)
            prefix[i + 1] = before += prefix[i + 1];
        if (threadIdx.x == 0)
            prefix[0] = 0;
    }
    __syncthreads();
}

/* Shares of the line's blocks among n CTAs: the first `larger` get one more than `each`. */
struct shares {
    int n, each, larger;
};

DEVICE shares share_out(int n, int total)
{
    int each = total / n;
    shares x = {n, each, total - each * n};
    return x;
}

DEVICE int share_begin(const shares &x, int cta)
{
    return cta * x.each + min(cta, x.larger);
}

DEVICE int share_owner(const shares &x, int block)
{
    int edge = x.larger * (x.each + 1);
    return block < edge ? block / (x.each + 1) : x.larger + (block - edge) / x.each;
}

/* ---- blocks of a span ---- */

/* the block at place `at` of a span, and whether its scores need the mask */
DEVICE int block_at(const cu_fwd &p, const span &s, int at, int &partial)
{
    partial = MOD_MASK != MASK_NONE;
    if (!p.runs)
        return s.first + at;
    int row = mask_row_of(p, s), i = p.run_start[row], last = p.run_start[row + 1] - 1;
    if (i > last)
        return 0;
#pragma unroll 1
    while (i < last) { /* the run holding `at` is among i .. last */
        int middle = (i + last + 1) / 2;
        if (p.runs[middle].ordinal <= at)
            i = middle;
        else
            last = middle - 1;
    }
    partial = p.runs[i].is_partial;
    return p.runs[i].first + at - p.runs[i].ordinal;
}

/* a place in the CTA's share, moving forward */
struct cursor {
    int t, index; /* block of the whole line; span holding it */
    int from, to; /* that span's blocks in the line */
    span s;
};

DEVICE void cursor_place(const cu_fwd &p, const mod_args &mod, const line &l, cursor &c)
{
    c.from = line_at(l, c.index);
    c.to = line_at(l, c.index + 1);
    c.s = span_place(p, c.index);
    c.s.first = 0;
#if MOD_MASK == MASK_INTERVAL
    span_count(p, mod, c.s);
#endif
}

DEVICE cursor cursor_at(const cu_fwd &p, const mod_args &mod, const line &l, int t)
{
    cursor c;
    c.t = t;
    c.index = line_find(l, t);
    cursor_place(p, mod, l, c);
    return c;
}

/* After t has moved: whether the span is another one. */
DEVICE int cursor_follow(const cu_fwd &p, const mod_args &mod, const line &l, cursor &c)
{
    if (c.t < c.to)
        return 0;
#pragma unroll 1
    do
        c.index++;
    while (c.t >= line_at(l, c.index + 1));
    cursor_place(p, mod, l, c);
    return 1;
}

DEVICE const u16 *query_row(const cu_fwd &p, const span &s, int packed)
{
    place x = row_place(p, s, packed);
    return (const u16 *)p.q + s.b * p.qs.b + x.h * p.qs.h + x.m * p.qs.n;
}

/* Q of a span on its way to L2: behind the copies under way it would come too late. */
DEVICE void call_q(const cu_fwd &p, const span &s)
{
    enum { LINES = (CFG_D_REAL + 63) / 64 };
    int n = span_rows(p, s) * LINES;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < n; i += 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(query_row(p, s, s.row0 + i / LINES)
                                                      + i % LINES * 64));
}

/* ---- one warp's stream ---- */

struct stream {
    u32 buffer, full; /* CFG_STAGES stages; barriers */
    u32 loads, uses;
    cursor ahead;
};

DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const line &l, int end,
                      const tensor_map *mk, const tensor_map *mv)
{
    if (w.ahead.t >= end)
        return;
    if (cursor_follow(p, mod, l, w.ahead))
        call_q(p, w.ahead.s);
    int partial, slot = w.loads % CFG_STAGES;
    int first = block_at(p, w.ahead.s, w.ahead.t - w.ahead.from, partial) * KEYS;
    u32 to = w.buffer + slot * STAGE, full = w.full + slot * 8;
    if ((threadIdx.x & 31) == 0) {
        barrier_expect(full, STAGE);
        int kg = p.ks.h ? w.ahead.s.g : 0, kb = p.ks.b ? w.ahead.s.b : 0;
        int vg = p.vs.h ? w.ahead.s.g : 0, vb = p.vs.b ? w.ahead.s.b : 0;
#pragma unroll
        for (int i = 0; i < PANELS_D; i++)
            copy_box(to + i * PANEL, mk, i * 64, first, kg, kb, full, EVICT_NORMAL);
#pragma unroll
        for (int i = 0; i < PANELS_E; i++)
            copy_box(to + (PANELS_D + i) * PANEL, mv, i * 64, first, vg, vb, full,
                     EVICT_NORMAL);
    }
    w.loads++;
    w.ahead.t += WARPS;
}

/* V beyond the end of the keys may hold anything; 0 * NaN must not be seen. */
DEVICE void clear_tail(u32 v, int from)
{
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < (KEYS - from) * 8 * PANELS_E; i += 32) {
        int row = from + i / (8 * PANELS_E), chunk = i % (8 * PANELS_E);
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(swizzled(v, PANEL, row, chunk)),
            "r"(0)
            : "memory");
    }
    __syncwarp();
}

/* ---- rows ---- */

DEVICE void place_packed(tile_rows &r, const cu_fwd &p, const mod_args &mod, const span &s)
{
    int last = p.few.rows - 1, lane = threadIdx.x & 31;
    place x = row_place(p, s, min(s.row0 + lane / 4, last));
    place y = row_place(p, s, min(s.row0 + lane / 4 + 8, last));
    int q_offset = position(p.q_offset, s.b);
    r.b = s.b;
    r.h = x.h;
    r.h1 = y.h;
    r.q = x.m + q_offset;
    r.q1 = y.m + q_offset;
    r.kv_offset = position(p.kv_offset, s.b);
    r.kv_len = max(0, min(position(p.kv_len, s.b), p.N));
#if MOD_SCORE
    score_row_begin(mod, p, r.b, r.h, r.q, r.score[0]);
    score_row_begin(mod, p, r.b, r.h1, r.q1, r.score[1]);
#endif
}

/* two neighbours of a row, column elements after `at`; lanes read up to column + 7 */
DEVICE u32 q_pair(const u16 *at, int lane_column, int column)
{
    u32 x = 0;
    if (column + 7 < CFG_D_REAL || lane_column + column < CFG_D_REAL)
        x = *(const u32 *)(at + column);
    return x;
}

/* Rows past the last one repeat it: nobody reads what comes of them. */
DEVICE void load_packed_q(q_fragments &q, const cu_fwd &p, const span &s)
{
    int last = p.few.rows - 1, lane = threadIdx.x & 31, d = 2 * (lane & 3);
    const u16 *row0 = query_row(p, s, min(s.row0 + lane / 4, last)) + d;
    const u16 *row1 = query_row(p, s, min(s.row0 + lane / 4 + 8, last)) + d;
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4] = {q_pair(row0, d, kk * 16), q_pair(row1, d, kk * 16),
                    q_pair(row0, d, kk * 16 + 8), q_pair(row1, d, kk * 16 + 8)};
        q_keep(q, kk, a);
    }
}

struct fragment {
    row_state rows;
    tile_rows at;
#if MOD_MASK == MASK_INTERVAL
    int from, to; /* keys from <= j < to are live in all rows */
#endif
    q_fragments q;
    float o[O_COUNT];
};

#if MOD_MASK == MASK_INTERVAL
DEVICE void place_interval(fragment &f, const cu_fwd &p, const mod_args &mod)
{
    int from, to, other, end;
    mask_interval(mod, p, f.at.b, f.at.h, f.at.q, from, to);
    mask_interval(mod, p, f.at.b, f.at.h1, f.at.q1, other, end);
    from = max(from, other);
    to = min(to, end);
    for (int i = 4; i < 32; i *= 2) {
        from = max(from, __shfl_xor_sync(~0u, from, i));
        to = min(to, __shfl_xor_sync(~0u, to, i));
    }
    f.from = (int)max(0ll, (long long)from - f.at.kv_offset);
    f.to = (int)max(0ll, min((long long)to - f.at.kv_offset, 0x7fffffffll));
}
#endif

DEVICE void use_block(stream &w, fragment &f, const cu_fwd &p, const mod_args &mod,
                      const span &s, int at, mask_column *columns)
{
    float sc[S_COUNT], shift[2], rescale[2];
    int partial, slot = w.uses % CFG_STAGES, block = block_at(p, s, at, partial);
    u32 k = w.buffer + slot * STAGE, v = k + PANELS_D * PANEL;
    barrier_wait(w.full + slot * 8, w.uses / CFG_STAGES & 1);
    int first = block * KEYS, tail = f.at.kv_len - first;
#if MOD_MASK == MASK_INTERVAL
    partial &= first < f.from || first + (int)KEYS > f.to;
#endif
    mma_qk(sc, f.q, k);
    int column = first + 2 * (threadIdx.x & 3);
    float unit = score_unit(p);
    apply_score(f.at, p, mod, column, sc, shift);
    if (partial | (tail < KEYS)) {
#if MOD_MASK == MASK_GENERAL
        __syncwarp();
        share_columns(f.at, p, mod, first, columns, 32);
        __syncwarp();
#endif
        apply_mask(f.at, p, mod, column, columns, sc);
        if (tail < KEYS)
            clear_tail(v, max(0, tail));
    }
    int raised = rows_raise(f.rows, sc, unit, shift, rescale);
    rows_exp(f.rows, sc, unit, shift);
    if (raised)
        rows_scale(f.o, rescale);
    mma_pv(f.o, sc, v);
    w.uses++;
    __syncwarp();
}

/* ---- merging ---- */

/* shared: O of half the warps, [HALF][ROWS][O_STEP], and (m, l, peak), [WARPS][ROWS][4] */
struct meeting {
    float *o, *ml, *sum; /* sum: (m, l, peak) of the CTA's rows, where a cluster reads them */
};

/* where this thread's accumulators lie in the O of place w */
DEVICE float *meet_place(const meeting &sh, int w)
{
    int lane = threadIdx.x & 31;
    return sh.o + (w * ROWS + lane / 4) * O_STEP + 2 * (lane & 3);
}

DEVICE void meet_put(const meeting &sh, const fragment &f, int w)
{
    float *o = meet_place(sh, w);
#pragma unroll
    for (int g = 0; g < CFG_E / 8; g++) {
        *(float2 *)(o + 8 * g) = make_float2(f.o[4 * g], f.o[4 * g + 1]);
        *(float2 *)(o + 8 * O_STEP + 8 * g) = make_float2(f.o[4 * g + 2], f.o[4 * g + 3]);
    }
}

DEVICE void meet_add(const meeting &sh, fragment &f, int w)
{
    const float *o = meet_place(sh, w);
#pragma unroll
    for (int g = 0; g < CFG_E / 8; g++) {
        float2 a = *(const float2 *)(o + 8 * g), b = *(const float2 *)(o + 8 * O_STEP + 8 * g);
        f.o[4 * g] += a.x;
        f.o[4 * g + 1] += a.y;
        f.o[4 * g + 2] += b.x;
        f.o[4 * g + 3] += b.y;
    }
}

/* The warps' rows to shared memory, brought to one offset: the upper half of the warps adds its
 * own to the lower half's, whose sums are there for all on return. */
DEVICE void meet(const meeting &sh, fragment &f)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float l[2] = {quad_sum(f.rows.l[0]), quad_sum(f.rows.l[1])};
    float peak[2] = {quad_max(f.rows.peak[0]), quad_max(f.rows.peak[1])}, by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *ml = sh.ml + (warp * ROWS + lane / 4 + 8 * i) * 4;
        if ((lane & 3) == 0) {
            ml[0] = f.rows.m[i];
            ml[1] = l[i];
            ml[2] = peak[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = M_START;
        for (int w = 0; w < WARPS; w++)
            m = fmaxf(m, sh.ml[(w * ROWS + lane / 4 + 8 * i) * 4]);
        by[i] = exp2_fast(f.rows.m[i] - m);
    }
    rows_scale(f.o, by);
    if (warp >= HALF)
        meet_put(sh, f, warp - HALF);
    __syncthreads();
    if (warp < HALF)
        meet_add(sh, f, warp);
    __syncthreads();
    if (warp < HALF)
        meet_put(sh, f, warp);
    __syncthreads();
}

/* (m, l, peak) of a row over all warps */
DEVICE float3 meet_row(const meeting &sh, int row)
{
    float3 x = make_float3(M_START, 0.f, NEG_INF);
    for (int w = 0; w < WARPS; w++) {
        const float *ml = sh.ml + (w * ROWS + row) * 4;
        x.x = fmaxf(x.x, ml[0]);
        x.z = fmaxf(x.z, ml[2]);
    }
    for (int w = 0; w < WARPS; w++) {
        const float *ml = sh.ml + (w * ROWS + row) * 4;
        x.y += ml[1] * exp2_fast(ml[0] - x.x);
    }
    return x;
}

/* where the flag of row r of span s is */
DEVICE long long flag_of(const cu_fwd &p, const span &s, int r)
{
    place x = row_place(p, s, s.row0 + r);
    return ((long long)s.b * p.H + x.h) * p.M + x.m;
}

/* Row r of span s, its sum and maximum known: statistics. */
DEVICE void finish_row(const cu_fwd &p, const span &s, int r, float3 x)
{
    place at = row_place(p, s, s.row0 + r);
    float lse = x.y == 0.f ? NEG_INF : (x.x + log2f(x.y)) * 0.6931471805599453f;
    put_lse(p, s.b, at.h, at.m, lse);
    put_row_max(p, s.b, at.h, at.m, x.z * 0.6931471805599453f);
}

DEVICE u16 *output_row(const cu_fwd &p, const span &s, int r)
{
    place x = row_place(p, s, s.row0 + r);
    return (u16 *)p.o + s.b * p.os.b + x.h * p.os.h + x.m * p.os.n;
}

/* Row r of a span, not finite, again; rare, so one copy for all callers. */
__device__ __noinline__ void redo_at(const cu_fwd &p, const mod_args &mod, span s, int r)
{
    __syncwarp(); /* the row is there, written by other lanes */
    place at = row_place(p, s, s.row0 + r);
    tile t = {0,
              s.b,
              at.h,
              0,
              0,
              position(p.q_offset, s.b),
              position(p.kv_offset, s.b),
              max(0, min(position(p.kv_len, s.b), p.N))};
    redo_row(p, mod, t, at.m);
}

/* A span's result, or its part for decode_end. Thread e of each warp's row takes columns. */
DEVICE void write_piece(const meeting &sh, const cu_fwd &p, const mod_args &mod, const span &s,
                        int slot, int is_whole)
{
    int lane = threadIdx.x & 31;
    for (int r = threadIdx.x / 32; r < span_rows(p, s); r += WARPS) {
        float3 x = meet_row(sh, r);
        float inv = x.y == 0.f ? 0.f : rcp_fast(x.y), zero = 0.f;
        for (int e = lane; e < CFG_E; e += 32) {
            float sum = 0.f;
            for (int w = 0; w < HALF; w++)
                sum += sh.o[(w * ROWS + r) * O_STEP + e];
            zero = fmaf(sum, 0.f, zero);
            if (!is_whole)
                p.part_o[((long long)slot * ROWS + r) * CFG_E + e] = sum;
            else if (e < CFG_E_REAL)
                output_row(p, s, r)[e] = from_float(sum * inv);
        }
        int bad = __any_sync(~0u, zero != 0.f) || !(x.y < 3e38f);
        if (lane == 0 && is_whole)
            finish_row(p, s, r, x);
        if (p.few.cluster) {
            if (bad)
                redo_at(p, mod, s, r);
            continue;
        }
        if (lane == 0)
            p.flags[flag_of(p, s, r)] = bad && is_whole;
        if (lane == 0 && !is_whole) {
            float *ml = p.part_ml + ((long long)slot * ROWS + r) * 4;
            ml[0] = x.x;
            ml[1] = x.y;
            ml[2] = x.z;
        }
    }
}

/* ---- one launch: a cluster of CTAs has a span to itself ---- */

/* Row r out of the shared memory of all CTAs of the cluster; one warp. */
DEVICE void join_near(const meeting &sh, const cu_fwd &p, const mod_args &mod, const span &s,
                      int r)
{
    int lane = threadIdx.x & 31, n = p.few.cluster;
    u32 stats = smem_address(sh.sum + r * 4), o = smem_address(sh.o + r * O_STEP);
    float3 sum = make_float3(M_START, 0.f, NEG_INF);
    for (int i = 0; i < n; i++) {
        float4 x = load_near(stats, i);
        sum.x = fmaxf(sum.x, x.x);
        sum.z = fmaxf(sum.z, x.z);
    }
    float zero = 0.f;
    float4 y[(CFG_E + 127) / 128] = {};
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        float4 x = load_near(stats, i);
        float by = exp2_fast(x.x - sum.x);
        sum.y += x.y * by;
#pragma unroll
        for (int e = 0; e < CFG_E; e += 128)
#pragma unroll
            for (int w = 0; w < HALF; w++)
                if (e + 4 * lane < CFG_E) {
                    float4 part = load_near(o + (w * ROWS * O_STEP + e + 4 * lane) * 4, i);
                    y[e / 128].x = fmaf(part.x, by, y[e / 128].x);
                    y[e / 128].y = fmaf(part.y, by, y[e / 128].y);
                    y[e / 128].z = fmaf(part.z, by, y[e / 128].z);
                    y[e / 128].w = fmaf(part.w, by, y[e / 128].w);
                }
    }
    float inv = sum.y == 0.f ? 0.f : rcp_fast(sum.y);
    for (int e = 0; e < CFG_E; e += 128) {
        float4 x = y[e / 128];
        zero = fmaf(x.x + x.y, 0.f, fmaf(x.z + x.w, 0.f, zero));
        if (e + 4 * lane < CFG_E_REAL)
            *(uint2 *)(output_row(p, s, r) + e + 4 * lane) =
                make_uint2(pack(x.x * inv, x.y * inv), pack(x.z * inv, x.w * inv));
    }
    if (lane == 0)
        finish_row(p, s, r, sum);
    if (__any_sync(~0u, zero != 0.f) || !(sum.y < 3e38f))
        redo_at(p, mod, s, r);
}

/* After meet: rows of the span shared out over the warps of the cluster. */
DEVICE void end_span(const meeting &sh, const cu_fwd &p, const mod_args &mod, const span &s)
{
    int rank = blockIdx.x % p.few.cluster, warp = threadIdx.x / 32;
    for (int r = threadIdx.x; r < ROWS; r += WARPS * 32) {
        float3 x = meet_row(sh, r);
        *(float4 *)(sh.sum + r * 4) = make_float4(x.x, x.y, x.z, 0.f);
    }
    cluster_sync();
#pragma unroll 1
    for (int r = rank + p.few.cluster * warp; r < span_rows(p, s); r += p.few.cluster * WARPS)
        join_near(sh, p, mod, s, r);
    cluster_sync(); /* others may still be reading here */
}

/* ---- kernels ---- */

DEVICE void begin_fragment(fragment &f, const cu_fwd &p, const mod_args &mod, const span &s)
{
    rows_begin(f.rows);
    place_packed(f.at, p, mod, s);
#if MOD_MASK == MASK_INTERVAL
    place_interval(f, p, mod);
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        f.o[i] = 0.f;
}

/* f: Q of the first span is there. */
DEVICE void run_share(stream &w, fragment &f, const meeting &sh, const cu_fwd &p,
                      const mod_args &mod, const line &l, cursor &c, int end,
                      mask_column *columns, const tensor_map *mk, const tensor_map *mv)
{
    int mine = c.t + threadIdx.x / 32;
    int is_near = p.few.cluster > 1; /* then a CTA without a block has rows to join, too */
    while (c.t < end || is_near) {
        span s = c.s;
        int index = c.index, first = c.from, last = min(c.to, end);
        int is_whole = c.t == first && last == c.to;
        begin_fragment(f, p, mod, s);
        for (; mine < last; mine += WARPS) {
            use_block(w, f, p, mod, s, mine - first, columns);
            load_next(w, p, mod, l, end, mk, mv);
        }
        c.t = last;
        if (last < end) {
            cursor_follow(p, mod, l, c);
            load_packed_q(f.q, p, c.s);
        }
        meet(sh, f);
        if (is_near)
            return end_span(sh, p, mod, s);
        write_piece(sh, p, mod, s, blockIdx.x + index, is_whole);
        __syncthreads();
    }
}

/* The pieces of a span that was cut, as the CTA after the first cut sees it. */
struct joint {
    int index, first; /* span; CTA of its first piece */
    int count;        /* pieces; 0: none, or another CTA's to join */
};

DEVICE joint joint_at(const line &l, const shares &x, int cta)
{
    joint j = {0, 0, 0};
    int t = share_begin(x, cta);
    if (cta == 0 || t >= line_at(l, l.spans))
        return j;
    j.index = line_find(l, t);
    int from = line_at(l, j.index), to = line_at(l, j.index + 1);
    j.first = share_owner(x, from);
    if (t > from && j.first == cta - 1)
        j.count = share_owner(x, to - 1) - j.first + 1;
    return j;
}

DEVICE line line_of(const cu_fwd &p)
{
    line l = {0, p.few.span_blocks, p.few.spans};
    return l;
}

/* In one launch: whole spans for each CTA, or a part of one span for each CTA of a cluster. */
DEVICE void near_share(const cu_fwd &p, const line &l, int &begin, int &end)
{
    int n = p.few.cluster, clusters = gridDim.x / n, at = blockIdx.x / n;
    int rank = blockIdx.x - at * n;
    begin = line_at(l, l.spans * at / clusters);
    end = line_at(l, l.spans * (at + 1) / clusters);
    if (n > 1) {
        int count = end - begin;
        end = begin + (rank + 1) * count / n;
        begin += rank * count / n;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    decode(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
           const __grid_constant__ tensor_map mk, const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    meeting sh;
    stream w;
    fragment f;
    int warp = threadIdx.x / 32;
    line l = line_of(p);
    w.buffer = smem_address(shared) + warp * CFG_STAGES * STAGE;
    sh.o = (float *)(shared + WARPS * CFG_STAGES * STAGE);
    sh.ml = sh.o + HALF * ROWS * O_STEP;
    sh.sum = sh.ml + WARPS * ROWS * 4;
    char *q = (char *)(sh.sum + ROWS * 4); /* Q where registers have no room for it */
    mask_column *columns = (mask_column *)(q + (CFG_Q_SHARED ? WARPS * 32 * CFG_D : 0));
    u64 *bars = (u64 *)(columns + (MASK_COLUMN_WORDS ? WARPS * KEYS : 0));
    bars = (u64 *)(((u64)bars + 7) & ~7ull);
    int *prefix = (int *)(bars + WARPS * CFG_STAGES);
    l.prefix = prefix;
#if CFG_Q_SHARED
    f.q = smem_address(q) + threadIdx.x * 16;
#endif
    w.full = smem_address(bars + warp * CFG_STAGES);
    w.loads = w.uses = 0;
    if ((threadIdx.x & 31) == 0) {
        map_prefetch(&mk);
        map_prefetch(&mv);
        for (int i = 0; i < CFG_STAGES; i++)
            barrier_init(w.full + i * 8, 1);
    }
    fence_barrier_init();
    __syncwarp();
    grid_let_next();
    if (!l.each)
        sum_spans(p, mod, prefix, l.spans);
    shares x = {(int)gridDim.x, p.few.share, p.few.larger};
    if (!l.each)
        x = share_out(gridDim.x, line_at(l, l.spans));
    int begin = share_begin(x, blockIdx.x), end = share_begin(x, blockIdx.x + 1);
    if (p.few.cluster)
        near_share(p, l, begin, end);
    cursor c = cursor_at(p, mod, l, begin);
    if (begin < end)
        load_packed_q(f.q, p, c.s); /* before all else: later it would wait behind the copies */
    w.ahead = c;
    w.ahead.t += warp;
#pragma unroll 1
    for (int i = 0; i < CFG_STAGES; i++)
        load_next(w, p, mod, l, end, &mk, &mv);
    if (!l.each && !p.few.cluster && threadIdx.x == 0) {
        joint j = joint_at(l, x, blockIdx.x);
        ((int4 *)p.done)[blockIdx.x] = make_int4(j.index, j.first, j.count, 0);
    }
    run_share(w, f, sh, p, mod, l, c, end, columns + warp * KEYS, &mk, &mv);
}

/* ---- joining ---- */

enum {
    JOIN_WARPS = 4,
    JOIN_EACH = 8,                    /* pieces that a warp has under way at once */
    JOIN_PARTS = (CFG_E + 127) / 128, /* of four columns a lane */
    JOIN_CHUNK = JOIN_WARPS * JOIN_EACH
};

struct join_pieces {
    float4 o[JOIN_EACH][JOIN_PARTS];
    float m[JOIN_EACH];
};

/* of pieces from, from + JOIN_WARPS, ... those before count, this lane's columns */
DEVICE void join_load(join_pieces &x, const cu_fwd &p, long long row, int from, int count)
{
    int column = 4 * (threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < JOIN_EACH; i++) {
        int j = from + i * JOIN_WARPS;
        x.m[i] = M_START;
        if (j < count)
            x.m[i] = load_new4(p.part_ml + (row + j * ROWS) * 4).x;
#pragma unroll
        for (int e = 0; e < JOIN_PARTS; e++) {
            x.o[i][e] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (j < count && column + 128 * e < CFG_E)
                x.o[i][e] = load_new4(p.part_o + (row + j * ROWS) * CFG_E + column + 128 * e);
        }
    }
}

/* (m, l, peak) of all pieces */
DEVICE float3 join_sums(const cu_fwd &p, long long row, int count)
{
    int lane = threadIdx.x & 31;
    float3 sum = make_float3(M_START, 0.f, NEG_INF);
    for (int j = lane; j < count; j += 32) {
        float4 ml = load_new4(p.part_ml + (row + j * ROWS) * 4);
        float m = fmaxf(sum.x, ml.x);
        sum.y = sum.y * exp2_fast(sum.x - m) + ml.y * exp2_fast(ml.x - m);
        sum.x = m;
        sum.z = fmaxf(sum.z, ml.z);
    }
    float m = sum.x;
    for (int i = 16; i; i /= 2) {
        m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
        sum.z = fmaxf(sum.z, __shfl_xor_sync(~0u, sum.z, i));
    }
    sum.y *= exp2_fast(sum.x - m);
    for (int i = 16; i; i /= 2)
        sum.y += __shfl_xor_sync(~0u, sum.y, i);
    sum.x = m;
    return sum;
}

/* Row r of a cut span by a CTA: warps take every JOIN_WARPS-th piece, lanes own columns.
 * Returns whether it is not finite, to the first warp. */
DEVICE int join_row(const cu_fwd &p, const span &s, int slot, int count, int r)
{
    __shared__ float4 shared[JOIN_WARPS][JOIN_PARTS][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    long long row = (long long)slot * ROWS + r;
    join_pieces x;
    float4 o[JOIN_PARTS] = {};
    join_load(x, p, row, warp, count);
    float3 sum = join_sums(p, row, count);
    for (int j0 = 0; j0 < count; j0 += JOIN_CHUNK) {
        if (j0)
            join_load(x, p, row, j0 + warp, count);
#pragma unroll
        for (int i = 0; i < JOIN_EACH; i++) {
            float by = exp2_fast(x.m[i] - sum.x);
#pragma unroll
            for (int e = 0; e < JOIN_PARTS; e++) {
                o[e].x = fmaf(x.o[i][e].x, by, o[e].x);
                o[e].y = fmaf(x.o[i][e].y, by, o[e].y);
                o[e].z = fmaf(x.o[i][e].z, by, o[e].z);
                o[e].w = fmaf(x.o[i][e].w, by, o[e].w);
            }
        }
    }
    for (int e = 0; e < JOIN_PARTS; e++)
        shared[warp][e][lane] = o[e];
    __syncthreads();
    if (warp)
        return 0;
    float inv = sum.y == 0.f ? 0.f : rcp_fast(sum.y), zero = 0.f;
    for (int e = 0; e < JOIN_PARTS; e++) {
        float4 y = o[e];
        for (int i = 1; i < JOIN_WARPS; i++) {
            float4 other = shared[i][e][lane];
            y.x += other.x;
            y.y += other.y;
            y.z += other.z;
            y.w += other.w;
        }
        zero = fmaf(y.x + y.y, 0.f, fmaf(y.z + y.w, 0.f, zero));
        int column = 4 * lane + 128 * e;
        if (column < CFG_E_REAL)
            *(uint2 *)(output_row(p, s, r) + column) =
                make_uint2(pack(y.x * inv, y.y * inv), pack(y.z * inv, y.w * inv));
    }
    if (lane == 0)
        finish_row(p, s, r, sum);
    return __any_sync(~0u, zero != 0.f) || !(sum.y < 3e38f);
}

/* Rows flagged by `decode`, shared out over all CTAs. */
DEVICE void redo_flagged(const cu_fwd &p, const mod_args &mod)
{
    int rows = p.B * p.H * p.M, step = gridDim.x * gridDim.y * 128;
#pragma unroll 1
    for (int first = (blockIdx.y * gridDim.x + blockIdx.x) * 128; first < rows; first += step) {
        int mine = first + threadIdx.x;
        if (!__syncthreads_or(mine < rows && load_new(p.flags + mine)))
            continue;
#pragma unroll 1
        for (int i = first + threadIdx.x / 32; i < min(first + 128, rows); i += 4) {
            if (!load_new(p.flags + i))
                continue;
            int head = i / p.M, b = head / p.H, h = head % p.H, g = h / p.few.group;
            span s = {b, g, 0, 0, 0};
            redo_at(p, mod, s, (h - g * p.few.group) * p.M + i % p.M);
        }
    }
}

/* One CTA for each cut between shares (x) and row of a span (y): joins what was cut, then does
 * rows again that are not finite. */
extern "C" __global__ void __launch_bounds__(128, 4)
    decode_end(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    int cta = blockIdx.x + 1, r = blockIdx.y, n = p.n_split;
    line l = line_of(p);
    joint j = {0, 0, 0};
    if (l.each)
        j = joint_at(l, share_out(n, l.each * l.spans), cta);
    grid_wait_before();
    if (!l.each && cta < n) {
        const int *x = p.done + 4 * cta;
        j.index = load_new(x);
        j.first = load_new(x + 1);
        j.count = load_new(x + 2);
    }
    span s = span_place(p, j.index);
    if (j.count && r < span_rows(p, s) && join_row(p, s, j.first + j.index, j.count, r))
        redo_at(p, mod, s, r);
    redo_flagged(p, mod);
}
