/* Few queries, many keys: the keys of all (batch, kv head) pairs are one line of blocks, cut
 * into equal pieces, one for each CTA, so that every CTA streams the same number of bytes and
 * all end together (Flash-Decoding, with the cut of stream-K). The query heads of a group share
 * a tile of 16 packed rows, so that K and V are read once. In a CTA each warp takes every
 * CFG_WGS-th block through its own TMA ring; partial results meet in shared memory, and those
 * of a line cut between CTAs in `decode_end`. A span is one (b, g, tile of packed rows).
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
    S_COUNT = KEYS / 2,
    O_COUNT = CFG_E / 2
};

/* ---- spans ---- */

struct span {
    int b, g, row0; /* row0: first packed row, head-major within the group */
    int first, n;   /* blocks of keys; without runs they are neighbours */
};

DEVICE int packed_rows(const cu_fwd &p)
{
    return p.H / p.G * p.M;
}

DEVICE int row_tiles(const cu_fwd &p)
{
    return (packed_rows(p) + ROWS - 1) / ROWS;
}

DEVICE span span_place(const cu_fwd &p, int i)
{
    span s;
    int tiles = row_tiles(p);
    s.row0 = i % tiles * ROWS;
    s.g = i / tiles % p.G;
    s.b = i / tiles / p.G;
    return s;
}

/* keys that the interval mask leaves to any row of the span */
DEVICE void span_limits(const cu_fwd &p, const mod_args &mod, const span &s, int &lo, int &hi)
{
#if MOD_MASK == MASK_INTERVAL
    int group = p.H / p.G, least = 0x7fffffff, most = -0x7fffffff;
    int q_offset = position(p.q_offset, s.b), kv_offset = position(p.kv_offset, s.b);
    for (int r = s.row0; r < min(s.row0 + (int)ROWS, packed_rows(p)); r++) {
        int from, to;
        mask_interval(mod, p, s.b, s.g * group + r / p.M, r % p.M + q_offset, from, to);
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
        for (int i = from; i < to; i++)
            sum += prefix[i + 1];
        int before = sum;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, before, d);
            before += threadIdx.x >= d ? other : 0;
        }
        before -= sum;
        for (int i = from; i < to; i++)
            prefix[i + 1] = before += prefix[i + 1];
        if (threadIdx.x == 0)
            prefix[0] = 0;
    }
    __syncthreads();
}

/* Shares of `total` blocks among n CTAs: the first total % n get one more. */
DEVICE int share_begin(int cta, int n, int total)
{
    return cta * (total / n) + min(cta, total % n);
}

DEVICE int share_owner(int block, int n, int total)
{
    int each = total / n, larger = total % n, edge = larger * (each + 1);
    return block < edge ? block / (each + 1) : larger + (block - edge) / each;
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
    span s;
};

/* the span that holds block t */
DEVICE int span_of(const int *prefix, int spans, int t)
{
    int lo = 0, hi = spans - 1; /* prefix[lo] <= t < prefix[hi + 1] */
    while (lo < hi) {
        int middle = (lo + hi + 1) / 2;
        if (prefix[middle] <= t)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo;
}

DEVICE void cursor_find(const cu_fwd &p, const mod_args &mod, const int *prefix, cursor &c)
{
    int moved = 0;
    while (c.t >= prefix[c.index + 1]) {
        c.index++;
        moved = 1;
    }
    if (moved || c.s.n == 0) {
        c.s = span_place(p, c.index);
        span_count(p, mod, c.s);
    }
}

/* ---- one warp's stream ---- */

struct stream {
    u32 buffer, full; /* CFG_STAGES stages; barriers */
    u32 loads, uses;
    cursor ahead;
};

DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const int *prefix,
                      int end, const tensor_map *mk, const tensor_map *mv)
{
    if (w.ahead.t >= end)
        return;
    cursor_find(p, mod, prefix, w.ahead);
    int partial, slot = w.loads % CFG_STAGES;
    int first = block_at(p, w.ahead.s, w.ahead.t - prefix[w.ahead.index], partial) * KEYS;
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
    int group = p.H / p.G, last = packed_rows(p) - 1, lane = threadIdx.x & 31;
    int r0 = min(s.row0 + lane / 4, last), r1 = min(s.row0 + lane / 4 + 8, last);
    int q_offset = position(p.q_offset, s.b);
    r.b = s.b;
    r.h = s.g * group + r0 / p.M;
    r.h1 = s.g * group + r1 / p.M;
    r.q = r0 % p.M + q_offset;
    r.q1 = r1 % p.M + q_offset;
    r.kv_offset = position(p.kv_offset, s.b);
    r.kv_len = max(0, min(position(p.kv_len, s.b), p.N));
#if MOD_SCORE
    score_row_begin(mod, p, r.b, r.h, r.q, r.score[0]);
    score_row_begin(mod, p, r.b, r.h1, r.q1, r.score[1]);
#endif
}

DEVICE void load_packed_q(q_fragments &q, const cu_fwd &p, const span &s)
{
    int group = p.H / p.G, n = packed_rows(p), lane = threadIdx.x & 31;
    const u16 *row[2];
    int has[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = s.row0 + lane / 4 + 8 * i;
        has[i] = r < n;
        r = has[i] ? r : n - 1;
        row[i] = (const u16 *)p.q + s.b * p.qs.b + (s.g * group + r / p.M) * p.qs.h
                 + (long long)(r % p.M) * p.qs.n;
    }
    load_q(q, row[0], has[0], row[1], has[1], 0);
}

struct fragment {
    row_state rows;
    tile_rows at;
    q_fragments q;
    float o[O_COUNT];
};

DEVICE void use_block(stream &w, fragment &f, const cu_fwd &p, const mod_args &mod,
                      const span &s, int at, mask_column *columns)
{
    float sc[S_COUNT], shift[2], rescale[2];
    int partial, slot = w.uses % CFG_STAGES, block = block_at(p, s, at, partial);
    u32 k = w.buffer + slot * STAGE, v = k + PANELS_D * PANEL;
    barrier_wait(w.full + slot * 8, w.uses / CFG_STAGES & 1);
    int first = block * KEYS, tail = f.at.kv_len - first;
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

/* shared: O of half the warps, [HALF][ROWS][CFG_E], and (m, l, peak), [WARPS][ROWS][4] */
struct meeting {
    float *o, *ml;
    u32 q; /* and Q, where registers have no room for it */
};

/* where this thread's accumulators lie in the O of place w */
DEVICE float *meet_place(const meeting &sh, int w)
{
    int lane = threadIdx.x & 31;
    return sh.o + (w * ROWS + lane / 4) * CFG_E + 2 * (lane & 3);
}

DEVICE void meet_put(const meeting &sh, const fragment &f, int w)
{
    float *o = meet_place(sh, w);
#pragma unroll
    for (int g = 0; g < CFG_E / 8; g++) {
        *(float2 *)(o + 8 * g) = make_float2(f.o[4 * g], f.o[4 * g + 1]);
        *(float2 *)(o + 8 * CFG_E + 8 * g) = make_float2(f.o[4 * g + 2], f.o[4 * g + 3]);
    }
}

DEVICE void meet_add(const meeting &sh, fragment &f, int w)
{
    const float *o = meet_place(sh, w);
#pragma unroll
    for (int g = 0; g < CFG_E / 8; g++) {
        float2 a = *(const float2 *)(o + 8 * g), b = *(const float2 *)(o + 8 * CFG_E + 8 * g);
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

/* Row r of span s, its sum and maximum known: statistics, and where its flag is. */
DEVICE long long finish_row(const cu_fwd &p, const span &s, int r, float3 x)
{
    int packed = s.row0 + r, h = s.g * (p.H / p.G) + packed / p.M, m = packed % p.M;
    put_lse(p, s.b, h, m, x.y == 0.f ? NEG_INF : (x.x + log2f(x.y)) * 0.6931471805599453f);
    put_row_max(p, s.b, h, m, x.z * 0.6931471805599453f);
    return ((long long)s.b * p.H + h) * p.M + m;
}

DEVICE u16 *output_row(const cu_fwd &p, const span &s, int r)
{
    int packed = s.row0 + r, h = s.g * (p.H / p.G) + packed / p.M;
    return (u16 *)p.o + s.b * p.os.b + h * p.os.h + (long long)(packed % p.M) * p.os.n;
}

/* A span's result, or its part for decode_end. Thread e of each warp's row takes columns. */
DEVICE void write_piece(const meeting &sh, const cu_fwd &p, const span &s, int slot,
                        int is_whole)
{
    int lane = threadIdx.x & 31;
    for (int r = threadIdx.x / 32; r < ROWS && s.row0 + r < packed_rows(p); r += WARPS) {
        float3 x = meet_row(sh, r);
        float inv = x.y == 0.f ? 0.f : rcp_fast(x.y), zero = 0.f;
        for (int e = lane; e < CFG_E; e += 32) {
            float sum = 0.f;
            for (int w = 0; w < HALF; w++)
                sum += sh.o[(w * ROWS + r) * CFG_E + e];
            zero = fmaf(sum, 0.f, zero);
            if (!is_whole)
                p.part_o[((long long)slot * ROWS + r) * CFG_E + e] = sum;
            else if (e < CFG_E_REAL)
                output_row(p, s, r)[e] = from_float(sum * inv);
        }
        int bad = __any_sync(~0u, zero != 0.f) || !(x.y < 3e38f);
        if (lane == 0 && is_whole)
            p.flags[finish_row(p, s, r, x)] = bad;
        if (lane == 0 && !is_whole) {
            float *ml = p.part_ml + ((long long)slot * ROWS + r) * 4;
            ml[0] = x.x;
            ml[1] = x.y;
            ml[2] = x.z;
        }
    }
}

/* ---- kernels ---- */

DEVICE void begin_fragment(fragment &f, const cu_fwd &p, const mod_args &mod, const span &s,
                           u32 q)
{
#if CFG_Q_SHARED
    f.q = q + threadIdx.x * 16;
#endif
    rows_begin(f.rows);
    place_packed(f.at, p, mod, s);
    load_packed_q(f.q, p, s);
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        f.o[i] = 0.f;
}

DEVICE void run_share(stream &w, const meeting &sh, const cu_fwd &p, const mod_args &mod,
                      const int *prefix, int spans, int begin, int end, mask_column *columns,
                      const tensor_map *mk, const tensor_map *mv)
{
    cursor c = {begin, span_of(prefix, spans, begin), {0, 0, 0, 0, 0}};
    int mine = begin + threadIdx.x / 32;
    while (c.t < end) {
        cursor_find(p, mod, prefix, c);
        int first = prefix[c.index], last = min(prefix[c.index + 1], end);
        fragment f;
        begin_fragment(f, p, mod, c.s, sh.q);
        for (; mine < last; mine += WARPS) {
            use_block(w, f, p, mod, c.s, mine - first, columns);
            load_next(w, p, mod, prefix, end, mk, mv);
        }
        meet(sh, f);
        int is_whole = c.t == first && last == prefix[c.index + 1];
        write_piece(sh, p, c.s, blockIdx.x + c.index, is_whole);
        __syncthreads();
        c.t = last;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    decode(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
           const __grid_constant__ tensor_map mk, const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    meeting sh;
    stream w;
    int warp = threadIdx.x / 32, spans = p.B * p.G * row_tiles(p);
    w.buffer = smem_address(shared) + warp * CFG_STAGES * STAGE;
    sh.o = (float *)(shared + WARPS * CFG_STAGES * STAGE);
    sh.ml = sh.o + HALF * ROWS * CFG_E;
    char *q = (char *)(sh.ml + WARPS * ROWS * 4); /* Q where registers have no room for it */
    sh.q = smem_address(q);
    mask_column *columns = (mask_column *)(q + (CFG_Q_SHARED ? WARPS * 32 * CFG_D : 0));
    u64 *bars = (u64 *)(columns + (MASK_COLUMN_WORDS ? WARPS * KEYS : 0));
    bars = (u64 *)(((u64)bars + 7) & ~7ull);
    int *prefix = (int *)(bars + WARPS * CFG_STAGES);
    w.full = smem_address(bars + warp * CFG_STAGES);
    w.loads = w.uses = 0;
    if ((threadIdx.x & 31) == 0)
        for (int i = 0; i < CFG_STAGES; i++)
            barrier_init(w.full + i * 8, 1);
    fence_barrier_init();
    sum_spans(p, mod, prefix, spans); /* holds the barrier that orders the above */
    int total = prefix[spans], begin = share_begin(blockIdx.x, gridDim.x, total);
    int end = share_begin(blockIdx.x + 1, gridDim.x, total);
    w.ahead.t = begin + warp;
    w.ahead.index = span_of(prefix, spans, begin);
    w.ahead.s.n = 0;
    for (int i = 0; i < CFG_STAGES; i++)
        load_next(w, p, mod, prefix, end, &mk, &mv);
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i <= spans; i += blockDim.x)
            p.done[i] = prefix[i];
    run_share(w, sh, p, mod, prefix, spans, begin, end, columns + warp * KEYS, &mk, &mv);
}

/* Row r of a cut span, whose pieces lie in `count` slots; lanes look at the pieces' sums 32 at
 * a time, then own columns. */
DEVICE void join_row(const cu_fwd &p, const span &s, int slot, int count, int r)
{
    int lane = threadIdx.x & 31;
    float3 sum = make_float3(M_START, 0.f, NEG_INF);
    for (int j = lane; j < count; j += 32) {
        const float *ml = p.part_ml + ((long long)(slot + j) * ROWS + r) * 4;
        sum.x = fmaxf(sum.x, ml[0]);
        sum.z = fmaxf(sum.z, ml[2]);
    }
    for (int i = 16; i; i /= 2) {
        sum.x = fmaxf(sum.x, __shfl_xor_sync(~0u, sum.x, i));
        sum.z = fmaxf(sum.z, __shfl_xor_sync(~0u, sum.z, i));
    }
    float o[(CFG_E + 31) / 32] = {};
    for (int j0 = 0; j0 < count; j0 += 32) {
        long long row = 0;
        float by = 0.f, l = 0.f;
        if (j0 + lane < count) {
            row = (long long)(slot + j0 + lane) * ROWS + r;
            by = exp2_fast(p.part_ml[row * 4] - sum.x);
            l = p.part_ml[row * 4 + 1] * by;
        }
        for (int j = 0; j < min(32, count - j0); j++) {
            long long from = __shfl_sync(~0u, row, j) * CFG_E;
            float w = __shfl_sync(~0u, by, j);
            sum.y += __shfl_sync(~0u, l, j);
            for (int i = 0; i < (CFG_E + 31) / 32; i++)
                if (lane + 32 * i < CFG_E)
                    o[i] = fmaf(p.part_o[from + lane + 32 * i], w, o[i]);
        }
    }
    float inv = sum.y == 0.f ? 0.f : rcp_fast(sum.y), zero = 0.f;
    for (int i = 0; i < (CFG_E + 31) / 32; i++) {
        zero = fmaf(o[i], 0.f, zero);
        if (lane + 32 * i < CFG_E_REAL)
            output_row(p, s, r)[lane + 32 * i] = from_float(o[i] * inv);
    }
    int bad = __any_sync(~0u, zero != 0.f) || !(sum.y < 3e38f);
    if (lane == 0)
        p.flags[finish_row(p, s, r, sum)] = bad;
}

/* One CTA a span: joins what was cut, then does rows again that are not finite. */
extern "C" __global__ void __launch_bounds__(128, 6)
    decode_end(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    int index = blockIdx.x;
    span s = span_place(p, index);
    int n = p.n_split, total = p.done[gridDim.x];
    int first = share_owner(p.done[index], n, total);
    int count = share_owner(p.done[index + 1] - 1, n, total) - first + 1;
    int rows = min((int)ROWS, packed_rows(p) - s.row0);
    if (count > 1)
        for (int r = threadIdx.x / 32; r < rows; r += 4)
            join_row(p, s, first + index, count, r);
    __syncthreads();
    for (int r = threadIdx.x / 32; r < rows; r += 4) {
        int packed = s.row0 + r, h = s.g * (p.H / p.G) + packed / p.M, m = packed % p.M;
        tile t = {0,
                  s.b,
                  h,
                  0,
                  0,
                  position(p.q_offset, s.b),
                  position(p.kv_offset, s.b),
                  max(0, min(position(p.kv_len, s.b), p.N))};
        if (p.flags[((long long)s.b * p.H + h) * p.M + m])
            redo_row(p, mod, t, m);
    }
}
