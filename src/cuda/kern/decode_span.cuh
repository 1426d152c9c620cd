/* What decode works on: spans of packed rows, the line of all their blocks, how it is shared
 * out over CTAs, and the way through a share. */
#pragma once

enum {
    WARPS = CFG_WGS,
    KEYS = CFG_TN,
    ROWS = CFG_SPAN_ROWS,
    PARTS = CFG_COLUMN_PARTS,    /* warps that share 16 rows */
    SHARERS = ROWS / 16 * PARTS, /* warps that share a stream of keys */
    STREAMS = WARPS / SHARERS,   /* even, or one */
    HALF = (STREAMS + 1) / 2,
    HAS_LOADERS = SHARERS > 1, /* else each warp loads what it reads */
    LOADERS = HAS_LOADERS ? DECODE_LOADERS : 0,
    /* warps that load a stream: K, and V; of codes, that load some keys each */
    LOADS = !HAS_LOADERS ? 1
            : CFG_CODES  ? LOADERS / STREAMS
                         : 2,
    THREADS = (WARPS + LOADERS) * 32,
    O_STEP = CFG_E + 8, /* floats of a row of O in shared memory: no two rows share banks */
    OWN_KEYS = CFG_LATENT ? KEYS : KEYS / PARTS, /* whose scores a warp makes */
    S_COUNT = OWN_KEYS / 2,
    O_COUNT = CFG_E / PARTS / 2,
    IS_FIXED = CFG_INVARIANT == 2, /* pieces of spans begin at multiples of PIECE blocks */
    PIECE = PIECE_KEYS / KEYS      /* a multiple of STREAMS */
};

/* ---- a warp's place in the CTA ---- */

/* Warps that load follow those that compute, LOADS for each stream. */
DEVICE int is_loader()
{
    return HAS_LOADERS && threadIdx.x / 32 >= WARPS;
}

/* Made anew wherever it is used: kept, it would be spilled. */
DEVICE int stream_of_warp()
{
    u32 thread = threadIdx.x;
    if (HAS_LOADERS)
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int warp = thread / 32;
    return is_loader() ? (warp - WARPS) / LOADS : warp / SHARERS;
}

/* Whether a warp that loads brings K; whether V. */
DEVICE int loads_keys()
{
    return LOADS == 1 || threadIdx.x / 32 % LOADS == 0;
}

DEVICE int loads_values()
{
    return LOADS == 1 || threadIdx.x / 32 % LOADS == 1;
}

/* The first of a warp's 16 rows among those of a span. */
DEVICE int warp_row()
{
    int warp = threadIdx.x / 32;
    return (CFG_LATENT ? warp % 4 : warp % SHARERS / PARTS) * 16;
}

/* Which of O's columns it has. */
DEVICE int column_part()
{
    return threadIdx.x / 32 % PARTS;
}

/* All warps that compute are here. */
DEVICE void sync_rows()
{
    if (HAS_LOADERS)
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
    else
        __syncthreads();
}

/* ---- spans ---- */

struct span {
    int b, g, row0; /* row0: first packed row, head-major within the group */
    int first, n;   /* live blocks of keys; without runs they are neighbours */
#if CFG_RAGGED
    int q_first, q_len, kv_first; /* of the sequence; q_len 0: its rows are not decode's */
#endif
};

/* What a batch's positions and lengths are, in the form that the careful rows take them. */
DEVICE tile batch_of(const cu_fwd &p, int b)
{
    tile t;
    t.id = t.h = t.row0 = t.block = 0;
    t.b = b;
    t.q_offset = position(p.q_offset, b);
    t.kv_offset = position(p.kv_offset, b);
    t.kv_len = live_keys(p, b);
#if CFG_RAGGED
    place_sequence(p, t);
#endif
    return t;
}

/* Keys of a batch. */
DEVICE int batch_keys(const cu_fwd &p, int b)
{
#if CFG_RAGGED
    return batch_of(p, b).kv_len;
#else
    return live_keys(p, b);
#endif
}

/* x / d by multiplication: by is 2^32 / d rounded up, 0 for d = 1; exact where x d < 2^32. A
 * division is 20 instructions, and a dozen of them stood before the first copy. */
DEVICE int quotient(int x, u32 by)
{
    return by ? __umulhi(x, by) : x;
}

DEVICE span span_place(const cu_fwd &p, int i)
{
    span s;
    int pair = quotient(i, p.decode.by_tiles);
    s.row0 = (i - pair * p.decode.tiles) * ROWS;
    s.b = quotient(pair, p.decode.by_G);
    s.g = pair - s.b * p.G;
#if CFG_RAGGED
    tile t = batch_of(p, s.b);
    s.q_first = t.q_first;
    s.kv_first = t.kv_first;
    s.q_len = t.q_len <= p.decode.most ? t.q_len : 0;
#endif
    return s;
}

/* A packed row of the span's batch and KV head. */
DEVICE packed_row unpack_row(const cu_fwd &p, const span &s, int packed)
{
#if CFG_RAGGED
    int n = s.q_len, h = packed / n;
#else
    int n = p.M, h = quotient(packed, p.decode.by_M);
#endif
    packed_row x = {s.g * p.decode.group + h, packed - h * n};
    return x;
}

/* packed rows of the span's batch and KV head */
DEVICE int packed_rows(const cu_fwd &p, const span &s)
{
#if CFG_RAGGED
    return s.q_len * p.decode.group;
#else
    return p.decode.rows;
#endif
}

/* rows of a span that are there */
DEVICE int span_rows(const cu_fwd &p, const span &s)
{
    return min((int)ROWS, packed_rows(p, s) - s.row0);
}

/* Where row m of its batch lies in tensors that have a row for each. */
DEVICE int span_row(const span &s, int m)
{
#if CFG_RAGGED
    return s.q_first + m;
#else
    return m;
#endif
}

DEVICE int span_key(const span &s, int j)
{
#if CFG_RAGGED
    return s.kv_first + j;
#else
    return j;
#endif
}

/* keys that the interval mask leaves to any row of the span; with CFG_MONOTONE by the first and
 * the last row of each head, which bound the others even where they see nothing, with CFG_ALIKE
 * by those of one head that is there whole */
DEVICE void span_limits(const cu_fwd &p, const mod_args &mod, const span &s, int &lo, int &hi)
{
#if MOD_MASK == MASK_INTERVAL
    int least = 0x7fffffff, most = -0x7fffffff;
#if CFG_RAGGED
    tile t = batch_of(p, s.b);
    int q_offset = t.q_offset, kv_offset = t.kv_offset;
#else
    int q_offset = position(p.q_offset, s.b), kv_offset = position(p.kv_offset, s.b);
#endif
    int rows = span_rows(p, s), of_head = packed_rows(p, s) / p.decode.group;
#pragma unroll 1
    for (int r = 0, n; r < rows; r += n) {
        packed_row x = unpack_row(p, s, s.row0 + r);
        n = CFG_MONOTONE ? min(of_head - x.m, rows - r) : 1;
#pragma unroll 1
        for (int m = x.m; m < x.m + n; m += max(n - 1, 1)) {
            int from, to;
            mask_interval(mod, p, s.b, x.h, m + q_offset, from, to);
            if (CFG_MONOTONE || from < to) {
                least = min(least, from);
                most = max(most, to);
            }
        }
        if (CFG_ALIKE && n == of_head)
            break;
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

/* Every span with rows has a block, perhaps a dead one, so that each row is written by
 * somebody. */
DEVICE void span_count(const cu_fwd &p, const mod_args &mod, span &s)
{
    int lo = 0, hi = batch_keys(p, s.b);
#if CFG_RAGGED
    if (span_rows(p, s) <= 0) {
        s.first = s.n = 0;
        return;
    }
#endif
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
    u32 prefix;      /* in shared memory: blocks before each span; unused where all are alike */
    int each, spans; /* blocks of every span, or 0 */
};

DEVICE int blocks_before(const line &l, int i)
{
    return (int)load_word(l.prefix + 4 * i);
}

DEVICE int line_at(const line &l, int i)
{
    return l.each ? i * l.each : blocks_before(l, i);
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
        if (blocks_before(l, middle) <= t)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo;
}

/* prefix[i]: blocks of the spans before i; all threads. */
DEVICE void sum_spans(const cu_fwd &p, const mod_args &mod, int *prefix, int n)
{
    for (int i = number_behind(threadIdx.x); i < n; i += blockDim.x) {
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

/* ---- blocks of a span ---- */

/* the block at place `at` of a span, and whether its scores need the mask */
DEVICE int block_at(const cu_fwd &p, const span &s, int at, int &partial)
{
    partial = MOD_MASK != MASK_NONE;
    if (!p.runs)
        return IS_FIXED ? at : s.first + at;
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
#if MOD_MASK == MASK_INTERVAL || CFG_INVARIANT == 2
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

/* Where pieces are fixed, CTAs take every gridDim.x-th of them, and the line has all blocks of
 * each span, live or not. */
DEVICE int piece_is_live(const cursor &c)
{
    int at = (c.t - c.from) / PIECE * PIECE;
    return at < c.s.first + c.s.n && at + PIECE > c.s.first;
}

/* The place of a stream's next block. */
DEVICE int next_place(int t)
{
    t += STREAMS;
    return IS_FIXED && t % PIECE < STREAMS ? t + (int)(gridDim.x - 1) * PIECE : t;
}

/* To the stream's first live block at or after t; whether the span is another one. */
DEVICE int cursor_seek(const cu_fwd &p, const mod_args &mod, const line &l, cursor &c, int end)
{
#if CFG_INVARIANT == 2
    int is_other = 0;
#pragma unroll 1
    while (c.t < end) {
        is_other |= cursor_follow(p, mod, l, c);
        int at = c.t - c.from;
        if (at >= c.s.first && at < c.s.first + c.s.n)
            break;
        if (at < c.s.first && piece_is_live(c))
            c.t = next_place(c.t);
        else
            c.t += (int)gridDim.x * PIECE - at % PIECE + at % STREAMS;
    }
    return is_other;
#else
    return c.t < end && cursor_follow(p, mod, l, c);
#endif
}

/* Moves c to this CTA's first live piece at or after c.t; returns whether that lies in another
 * span. */
DEVICE int cursor_seek_piece(const cu_fwd &p, const mod_args &mod, const line &l, cursor &c,
                             int end)
{
    int is_other = 0;
#pragma unroll 1
    while (c.t < end) {
        is_other |= cursor_follow(p, mod, l, c);
        if (piece_is_live(c))
            break;
        c.t += (int)gridDim.x * PIECE;
    }
    return is_other;
}

DEVICE const u16 *packed_row_address(const cu_fwd &p, const span &s, int packed)
{
    packed_row x = unpack_row(p, s, packed);
    return query_row(p, s.b, x.h, span_row(s, x.m));
}

/* Prefetches Q of a span into L2: behind the copies under way it would come too late. */
DEVICE void prefetch_q(const cu_fwd &p, const span &s)
{
    enum { LINES = (CFG_D_REAL + 63) / 64 };
    int n = span_rows(p, s) * LINES;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < n; i += 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            packed_row_address(p, s, s.row0 + i / LINES) + i % LINES * 64));
}

/* ---- shares ---- */

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
    line l = {0, p.decode.span_blocks, p.decode.spans};
    return l;
}

DEVICE int owns_span(const cu_fwd &p)
{
    return CFG_ONE_SPAN || p.decode.owns;
}

/* A CTA's only span, on a line where each has room for all keys. */
DEVICE void own_share(const cu_fwd &p, const mod_args &mod, const line &l, int cta, int &begin,
                      int &end)
{
    span s = span_place(p, cta);
    span_count(p, mod, s);
    begin = line_at(l, cta);
    end = begin + s.n;
}

/* In one launch: whole spans for each CTA, or a part of one span for each CTA of a cluster. */
DEVICE void cluster_share(const cu_fwd &p, const line &l, int cta, int &begin, int &end)
{
    int n = p.decode.cluster, clusters = gridDim.x / n, at = cta / n;
    int rank = cta - at * n;
    begin = line_at(l, l.spans * at / clusters);
    end = line_at(l, l.spans * (at + 1) / clusters);
    if (n > 1) {
        int count = end - begin;
        end = begin + (rank + 1) * count / n;
        begin += rank * count / n;
    }
}

DEVICE shares shares_of(const cu_fwd &p, const line &l)
{
    shares x = {(int)gridDim.x, p.decode.share, p.decode.larger};
    return l.each ? x : share_out(gridDim.x, line_at(l, l.spans));
}

/* The CTA's blocks of the line. */
DEVICE void place_share(const cu_fwd &p, const mod_args &mod, const line &l, const shares &x,
                        int cta, int &begin, int &end)
{
    begin = share_begin(x, cta);
    end = share_begin(x, cta + 1);
    if (owns_span(p))
        own_share(p, mod, l, cta, begin, end);
    else if (p.decode.cluster)
        cluster_share(p, l, cta, begin, end);
    if (IS_FIXED) {
        begin = cta * PIECE;
        end = line_at(l, l.spans);
    }
}

/* Where a piece of a cut span lies: each CTA has a place for the piece that a span begins with,
 * and before it one for the rest of a span that another CTA began. */
DEVICE int piece_slot(int cta, int begins_span)
{
    return 2 * cta + begins_span;
}
