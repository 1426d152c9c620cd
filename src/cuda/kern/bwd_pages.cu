/* Gradients where keys lie in pages or chunks. Before the other kernels of backward,
 * bwd_pages_begin brings K and V into one piece, row by row as the table says. What those
 * kernels make of a page that one entry has alone they store there themselves; after them
 * bwd_pages_sum gives each other row of the caller's dK and dV the sum over the keys that it
 * holds, in one order (src/plan/gradient_sums.c has the same sums on the host). A sorted list
 * of the table's entries says which keys those are. */
#include "cfg.cuh"
#define CFG_CHUNKS 1
#include "ptx.cuh"
#include "bwd.h"
#include "one_piece.cuh"

enum {
    WARPS = PAGES_COPIERS / 32,
    DIGITS = 256,
    EACH = 4 /* columns of a thread in sums */
};

/* ---- 1. the list of entries ---- */

/* The entry above, its place among all of them below: batch by batch, chunk by chunk. What
 * holds no live key comes last, by an entry past all others. */
DEVICE u64 listed_entry(const cu_fwd &p, const cu_pages &x, u32 place)
{
    int b = (int)(place / x.per_batch), i = (int)(place % x.per_batch);
    chunk_table table = chunks_of(p, b);
    int first = -1;
    if ((long long)i * p.chunks.size < live_keys(p, b))
        first = chunk_entry(table, i * p.chunks.size);
    u32 key = first < 0 ? (u32)p.chunks.last + 1 : (u32)min(first, p.chunks.last);
    return (u64)key << 32 | place;
}

/* Lanes of the warp that hold the same digit. */
DEVICE u32 lanes_alike(u32 digit, int is_there)
{
    return __match_any_sync(~0u, is_there ? digit : DIGITS + (threadIdx.x & 31));
}

struct sorter {
    const u64 *from;
    u64 *to;
    u32 n, part; /* entries, and of a warp */
    int shift;
    u32 (*counts)[DIGITS]; /* [WARPS] */
};

DEVICE void count_digits(const sorter &s)
{
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (u32 i = 0; i < s.part; i += 32) {
        u32 at = warp * s.part + i + lane;
        int is_there = i + lane < s.part && at < s.n;
        u32 digit = is_there ? (u32)(s.from[at] >> s.shift) & (DIGITS - 1) : 0;
        u32 alike = lanes_alike(digit, is_there);
        if (is_there && lane == (u32)__ffs(alike) - 1)
            s.counts[warp][digit] += __popc(alike);
        __syncwarp();
    }
}

/* Counts into where each warp's entries of a digit begin. sums: [DIGITS] */
DEVICE void place_digits(const sorter &s, u32 *sums)
{
    u32 all = 0;
    if (threadIdx.x < DIGITS) {
        for (int w = 0; w < WARPS; w++)
            all += s.counts[w][threadIdx.x];
        sums[threadIdx.x] = all;
    }
    for (u32 d = 1; d < DIGITS; d *= 2) {
        __syncthreads();
        u32 more = threadIdx.x >= d && threadIdx.x < DIGITS ? sums[threadIdx.x - d] : 0;
        __syncthreads();
        if (threadIdx.x < DIGITS)
            sums[threadIdx.x] += more;
    }
    if (threadIdx.x < DIGITS) {
        u32 before = sums[threadIdx.x] - all; /* own */
        for (int w = 0; w < WARPS; w++) {
            u32 count = s.counts[w][threadIdx.x];
            s.counts[w][threadIdx.x] = before;
            before += count;
        }
    }
    __syncthreads();
}

DEVICE void move_digits(const sorter &s)
{
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (u32 i = 0; i < s.part; i += 32) {
        u32 at = warp * s.part + i + lane;
        int is_there = i + lane < s.part && at < s.n;
        u64 entry = is_there ? s.from[at] : 0;
        u32 digit = (u32)(entry >> s.shift) & (DIGITS - 1);
        u32 alike = lanes_alike(digit, is_there);
        u32 base = is_there ? s.counts[warp][digit] : 0;
        __syncwarp();
        if (is_there && lane == (u32)__ffs(alike) - 1)
            s.counts[warp][digit] = base + __popc(alike);
        __syncwarp();
        if (is_there)
            s.to[base + __popc(alike & ((1u << lane) - 1))] = entry;
    }
}

/* By digits from the lowest: stable, so entries of one row or page stay in their order. One CTA
 * does it while others copy keys, which are at least as many and far larger. */
DEVICE void sort_entries(const cu_fwd &p, const cu_pages &x)
{
    __shared__ u32 counts[WARPS][DIGITS], sums[DIGITS];
    u32 part = (x.n + WARPS - 1) / WARPS;
    u64 *from = x.entries, *to = x.entries + x.n;
    for (u32 i = threadIdx.x; i < x.n; i += PAGES_COPIERS)
        from[i] = listed_entry(p, x, i);
    for (int shift = 32; shift < 64 && ((u64)p.chunks.last + 1) << 32 >> shift; shift += 8) {
        sorter s = {from, to, x.n, part, shift, counts};
        for (int i = threadIdx.x; i < WARPS * DIGITS; i += PAGES_COPIERS)
            counts[i / DIGITS][i % DIGITS] = 0;
        __syncthreads();
        count_digits(s);
        __syncthreads();
        place_digits(s, sums);
        move_digits(s);
        __syncthreads();
        u64 *held = from;
        from = to;
        to = held;
    }
    if (from != x.entries)
        for (u32 i = threadIdx.x; i < x.n; i += PAGES_COPIERS)
            x.entries[i] = from[i];
    __syncthreads();
}

/* Which entries have their pages alone. */
DEVICE void find_own(const cu_fwd &p, const cu_pages &x)
{
    for (u32 i = threadIdx.x; i < x.n; i += PAGES_COPIERS) {
        u64 entry = x.entries[i];
        u32 key = (u32)(entry >> 32);
        int is_own = key <= (u32)p.chunks.last
                     && (i == 0 || (u32)(x.entries[i - 1] >> 32) != key)
                     && (i + 1 == x.n || (u32)(x.entries[i + 1] >> 32) != key);
        x.own[(u32)entry] = is_own ? (int)key : -1;
    }
}

extern "C" __global__ void __launch_bounds__(PAGES_COPIERS)
    bwd_pages_begin(const __grid_constant__ cu_bwd p, const __grid_constant__ cu_pages x)
{
    if (blockIdx.x)
        gather_block(p.f, x.k, x.v, x.is_even, p.f.N, blockIdx.x - 1);
    else
        sort_entries(p.f, x);
    if (blockIdx.x == 0 && x.own)
        find_own(p.f, x);
    if (blockIdx.x == 0 && x.lens)
        count_keys(p.f, x.lens);
}

/* ---- 2. sums ---- */

/* The gradient of K or of V, and where that of each key lies: [B][G][N][dim]. */
struct side {
    char *to;
    const float *each;
    cu_stride s;
    int dim, is_wide, is_added;
    int is_even; /* whether four elements are stored at once */
};

DEVICE side side_of(const cu_bwd &p, const cu_pages &x, int is_value)
{
    int which = is_value ? BWD_OF_V : BWD_OF_K;
    return {(char *)(is_value ? p.dv : p.dk), is_value ? x.dv : x.dk, is_value ? p.dvs : p.dks,
            is_value ? CFG_E_REAL : CFG_D_REAL, p.wide & which, p.added & which,
            x.even_results & which};
}

/* The first entry of the list that names `key` or what comes after it, found by a whole warp:
 * each round looks at 32 entries, and leaves the stretch between two of them. */
DEVICE u32 first_entry(const cu_pages &x, u32 key)
{
    u32 low = 0, n = x.n, lane = threadIdx.x & 31;
    while (n) {
        u32 step = (n + 31) / 32, at = lane * step;
        int is_before = at < n && (u32)(__ldg(x.entries + low + at) >> 32) < key;
        u32 before = __popc(__ballot_sync(~0u, is_before)); /* the first lanes, if any */
        if (!before)
            return low;
        u32 past = before * step; /* the next looked at, or the end */
        low += past - step + 1;
        n = min(past, n) - (past - step) - 1;
    }
    return low;
}

struct row_sum {
    double x[EACH];
    int n;
};

/* Adds columns from `column` on of key j of head g. The first one keeps the sign of zeros. */
DEVICE void add_key(row_sum &sum, const cu_fwd &p, const side &s, int b, int g, int j,
                    int column)
{
    const float *row = s.each + ((long long)(b * p.G + g) * p.N + j) * s.dim + column;
    float x[EACH] = {};
    if (s.dim % EACH == 0) {
        float4 y = __ldg((const float4 *)row);
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (column + i < s.dim)
                x[i] = __ldg(row + i);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        sum.x[i] = sum.n ? sum.x[i] + (double)x[i] : (double)x[i];
    sum.n++;
}

/* A row of the gradient: of a page, or of the rows that chunks begin at, which are those of one
 * batch or (b -1) of all. A key past the last of these is that row's, as when it is read. */
struct pool_row {
    int page, row, b, h;
    int is_last;
    u32 from; /* entries from here on may hold it */
};

/* Entries of these hold the row: its page's, or those of chunks that reach it. */
DEVICE u32 first_key(const cu_chunks &c, const pool_row &at)
{
    return c.is_paged ? at.page : max(0, at.row - c.size + 1);
}

DEVICE row_sum sum_of(const cu_fwd &p, const cu_pages &x, const side &s, const pool_row &at,
                      int column)
{
    const cu_chunks &c = p.chunks;
    u32 last = c.is_paged ? at.page : at.row;
    int g1 = s.s.h ? at.h + 1 : p.G;
    row_sum sum = {};
    for (u32 i = at.from; i < x.n; i++) {
        u64 entry = __ldg(x.entries + i);
        u32 key = (u32)(entry >> 32), place = (u32)entry;
        if (key > last)
            break;
        int b = (int)(place / x.per_batch), j0 = (int)(place % x.per_batch) * c.size;
        int at_key = c.is_paged ? at.row : at.row - (int)key;
        if (at.b >= 0 && at.b != b)
            continue;
        int past = min(at.is_last ? c.size : at_key + 1, p.N - j0);
        for (int j = at_key; j < past; j++)
            for (int g = at.h; g < g1; g++)
                add_key(sum, p, s, b, g, j0 + j, column);
    }
    return sum;
}

/* One element, in f32 or in the problem's dtype. */
DEVICE float element_of(const side &s, long long at)
{
    return CFG_F32 || s.is_wide ? ((const float *)s.to)[at]
                                : to_float(((const elem *)s.to)[at]);
}

DEVICE void store_element(const side &s, long long at, float x)
{
    if (CFG_F32 || s.is_wide)
        ((float *)s.to)[at] = x;
    else
        ((elem *)s.to)[at] = from_float(x);
}

/* The first n of four columns. */
DEVICE void store_sum(const side &s, long long at, int n, const row_sum &sum)
{
    float y[EACH];
    if (!sum.n && s.is_added)
        return;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        y[i] = (float)(s.is_added && i < n ? sum.x[i] + element_of(s, at + i) : sum.x[i]);
    if (!s.is_even) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i < n)
                store_element(s, at + i, y[i]);
    } else if (CFG_F32 || s.is_wide) {
        *(float4 *)((float *)s.to + at) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
        *(uint2 *)((elem *)s.to + at) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    }
}

/* Rows of the page that are stored already: those with a key where one entry has it alone. */
DEVICE int stored_rows(const cu_fwd &p, const cu_pages &x, const pool_row &at)
{
    if (!x.own || at.from == x.n)
        return 0;
    u32 place = (u32)__ldg(x.entries + at.from);
    if (__ldg(x.own + place) != at.page)
        return 0;
    return (int)min((long long)x.rows,
                    p.N - (long long)(place % x.per_batch) * p.chunks.size);
}

/* PAGES_SUMS rows from at.row on, by a warp, `lanes` threads of it a row. */
DEVICE void sum_rows(const cu_bwd &p, const cu_pages &x, const side &s, pool_row at, int lanes)
{
    const cu_chunks &c = p.f.chunks;
    int past = min(at.row + PAGES_SUMS, x.rows), lane = threadIdx.x & 31;
    at.from = first_entry(x, first_key(c, at));
    at.row = max(at.row, stored_rows(p.f, x, at)) + lane / lanes;
    lane %= lanes;
    for (; at.row < past; at.row += 32 / lanes) {
        u32 key = first_key(c, at); /* of pages the same for all rows */
        while (!c.is_paged && at.from < x.n
               && (u32)(__ldg(x.entries + at.from) >> 32) < key)
            at.from++;
        at.is_last = at.row == x.rows - 1 && (!c.is_paged || at.page == c.last);
        long long place = (c.is_paged ? at.page : max(at.b, 0)) * s.s.b + at.h * s.s.h
                          + at.row * s.s.n;
        for (int d = EACH * lane; d < s.dim; d += EACH * lanes)
            store_sum(s, place + d, min(s.dim - d, (int)EACH), sum_of(p.f, x, s, at, d));
    }
}

/* A warp to some rows of a head of a page or pool. */
extern "C" __global__ void __launch_bounds__(PAGES_THREADS)
    bwd_pages_sum(const __grid_constant__ cu_bwd p, const __grid_constant__ cu_pages x)
{
    enum {
        DIM = CFG_D_REAL > CFG_E_REAL ? CFG_D_REAL : CFG_E_REAL,
        LANES = DIM > 64 ? 32 : DIM > 32 ? 16 : 8
    };
    const cu_chunks &c = p.f.chunks;
    int is_value = blockIdx.x >= (u32)x.key_blocks;
    side s = side_of(p, x, is_value);
    u32 parts = (x.rows + PAGES_SUMS - 1) / PAGES_SUMS, heads = s.s.h ? p.f.G : 1;
    u32 pools = c.is_paged ? c.last + 1 : s.s.b ? p.f.B : 1;
    u32 block = blockIdx.x - (is_value ? x.key_blocks : 0);
    u32 turn = block * (PAGES_THREADS / 32) + threadIdx.x / 32;
    u32 head = turn / parts, pool = head / heads;
    if (pool >= pools)
        return;
    pool_row at = {};
    at.row = (int)(turn - head * parts) * PAGES_SUMS;
    at.h = (int)(head - pool * heads);
    at.page = (int)pool;
    at.b = !c.is_paged && pools > 1 ? (int)pool : -1;
    sum_rows(p, x, s, at, LANES);
}
