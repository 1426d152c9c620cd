/* Gradients of what a score function captures, for any GPU from sm_80 on, f32 as well as
 * 16-bit problems. A CTA has 64 queries of one head and passes by their keys, as bwd_queries
 * does; dX = P (dP - delta) times the score's derivative by a read is a term of the element
 * that was read. Terms are summed along what the read does not vary with (pass/scatter.h), in
 * one order, and such sums are added to their element exactly (exact_sum.cuh), so that the
 * order of CTAs changes no bit.
 *
 *     head       in registers; one sum a CTA
 *     row        in registers; one sum a query
 *     column     over the CTA's queries; one sum a key
 *     diagonal   through shared memory, and on from block to block while keys follow each other
 *     element    stored: bwd_elements.cu has those that heads or batches share
 *     else       in tables where they are small, of each query (bwd_query_tables.cuh) or of
 *                the CTA (bwd_tables.cuh), or each term for itself; in rows of a query's own
 *
 * A launch is of CU_READS reads at most, FIRST and on. Shared memory: Q and dO of the CTA's
 * queries, [CFG_STAGES] of K and V of PASS keys, what is summed (scratch), then tables. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "mma.cuh"
#include "copy.cuh"
#include "bwd_copy.cuh"
#include "bwd_tile.cuh"
#include "bwd_mod.cuh"
#include "bwd_store.cuh"
#include "bwd_row.cuh"
#if CFG_F32
#include "bwd_mma32.cuh"
#else
#include "bwd_mma.cuh"
#endif
#include "bwd_pass.cuh"
#include "bwd_keys.cuh"
#include "exact_sum.cuh"
#include "place.cuh"
#include "bwd_element.cuh"
#include "bwd_read_terms.cuh"
#include "bwd_tables.cuh"
#include "bwd_query_tables.cuh"

enum {
    READS_ROOM = READS_ALL < CU_READS ? READS_ALL : CU_READS,
    DIAGONALS = STAY + PASS - 1 /* of a tile */
};

/* What a CTA has summed and not yet added. */
struct sums {
    float row[READS_ROOM][2];   /* of a thread's two queries */
    float diagonal[READS_ROOM]; /* thread t: where key - query is t - (STAY - 1) in the block */
    int key0;                   /* that block's first key; -1: none */
    table_unit unit[READS_ROOM];
};

DEVICE constexpr bool may_have_table(int r)
{
    return read_kind(r) == READ_ANY || read_kind(r) == READ_ELEMENT;
}

struct scratch {
    float tile[TERM_ROOM], diagonal[DIAGONALS + 1], column[4][PASS], head[4];
    int peak[READS_ROOM][4]; /* of terms for tables, by warp */
};
enum { SCRATCH = (sizeof(scratch) + 15) / 16 * 16 };

DEVICE void add_term(const cu_fwd &p, const mod_args &mod, const cu_read &to, int r,
                     const query_tile &t, int q, int kv, float x)
{
    if (x != 0.f) /* NaN too */
        add_exactly(to, read_place(mod, p, t.b, t.h, r, q, kv, to.stride), x);
}

/* ---- sums along an axis ---- */

DEVICE void sum_rows(float (&row)[2], const float (&term)[S_COUNT])
{
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        row[i / 2 & 1] += term[i];
}

DEVICE void add_columns(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                        const query_tile &t, int key0, const float (&term)[S_COUNT], scratch &m)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        float x = term[i / 2 * 4 + (i & 1)] + term[i / 2 * 4 + (i & 1) + 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            x += __shfl_xor_sync(~0u, x, step);
        if (lane < 4)
            m.column[warp][i / 2 * 8 + 2 * lane + (i & 1)] = x;
    }
    __syncthreads();
    int c = threadIdx.x;
    if (c < PASS && key0 + c < t.kv_len)
        add_term(p.f, mod, to, r, t, t.row0 + t.q_offset, key0 + c + t.kv_offset,
                 (m.column[0][c] + m.column[1][c]) + (m.column[2][c] + m.column[3][c]));
    __syncthreads();
}

/* The element of the diagonal of thread `at` in the block from key0 on, by its first query and
 * key. */
DEVICE long long diagonal_place(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                                const query_tile &t, int key0, int at)
{
    int d = at - (STAY - 1);
    return read_place(mod, p.f, t.b, t.h, r, t.row0 + max(-d, 0) + t.q_offset,
                      key0 + max(d, 0) + t.kv_offset, to.stride);
}

/* By the first warp: the diagonals that no later block has. Buckets are often all the same. */
DEVICE void add_left(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                     const query_tile &t, int key0, int at, float x)
{
    long long place = diagonal_place(p, mod, to, r, t, key0, min(at, PASS - 1));
    x = at < PASS ? x : 0.f;
    if (__all_sync(~0u, place == __shfl_sync(~0u, place, 0))) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
            x += __shfl_xor_sync(~0u, x, step);
        x = at == 0 ? x : 0.f;
    }
    if (x != 0.f)
        add_exactly(to, place, x);
}

DEVICE void add_diagonal(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                         const query_tile &t, int key0, int at, float x)
{
    if (x != 0.f)
        add_exactly(to, diagonal_place(p, mod, to, r, t, key0, at), x);
}

/* sum: of the block from key `before` on, then of this one. */
DEVICE void sum_diagonals(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                          const query_tile &t, int key0, const float (&term)[S_COUNT],
                          float &sum, int before, scratch &m)
{
    int at = threadIdx.x;
    share_terms(term, m.tile);
    if (at < DIAGONALS)
        m.diagonal[at] = sum;
    __syncthreads();
    if (at < DIAGONALS) {
        int d = at - (STAY - 1), is_next = before >= 0 && key0 == before + PASS;
        float x = is_next && at + PASS < DIAGONALS ? m.diagonal[at + PASS] : 0.f;
#pragma unroll
        for (int c = 0; c < PASS; c++)
            x += (unsigned)(c - d) < STAY ? m.tile[(c - d) * PITCH + c] : 0.f;
        if (before >= 0 && !is_next && at >= PASS)
            add_diagonal(p, mod, to, r, t, before, at, sum);
        if (at < 32)
            add_left(p, mod, to, r, t, key0, at, x);
        sum = x;
    }
    __syncthreads();
}

/* Every term for itself, but that a thread sums those of neighbours among a key's queries that
 * go to one element, as clamped distances do. */
DEVICE void add_terms(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                      const query_tile &t, int key0, const float (&term)[S_COUNT], float *tile)
{
    enum { ROWS = STAY * PASS / THREADS };
    int c = threadIdx.x % PASS, from = threadIdx.x / PASS * ROWS;
    long long last = -1;
    float sum = 0.f;
    share_terms(term, tile);
    __syncthreads();
#pragma unroll 1
    for (int row = from; row < from + ROWS; row++) {
        float x = tile[row * PITCH + c];
        if (x == 0.f) /* not NaN */
            continue;
        long long place = read_place(mod, p.f, t.b, t.h, r, t.row0 + row + t.q_offset,
                                     key0 + c + t.kv_offset, to.stride);
        if (place != last && sum != 0.f)
            add_exactly(to, last, sum);
        sum = place == last ? sum + x : x;
        last = place;
    }
    if (sum != 0.f)
        add_exactly(to, last, sum);
    __syncthreads();
}

DEVICE void put_elements(const cu_bwd &p, const mod_args &mod, const cu_read &to, int is_adding,
                         int r, const query_tile &t, int key0, const float (&term)[S_COUNT],
                         scratch &m)
{
    put_terms(to, elements_of(p, mod, to, r, t, key0), rows_left(p, t), t.kv_len - key0, term,
              is_adding, m.tile);
}

/* ---- a block, the end ---- */

template <int FIRST>
DEVICE void tell_peaks(const cu_tables &tables, const float (&term)[READS_ROOM][S_COUNT],
                       scratch &m)
{
#pragma unroll
    for (int k = 0; k < READS_ROOM && FIRST + k < MOD_READS; k++)
        if (may_have_table(FIRST + k) && tables.of[k].n && !tables.of[k].pitch)
            m.peak[k][threadIdx.x / 32] = peak_of(term[k]);
}

template <int FIRST>
DEVICE void take_block(const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                       const cu_tables &tables, const query_tile &t, int key0,
                       const float (&term)[READS_ROOM][S_COUNT], sums &s, scratch &m,
                       int *room)
{
#pragma unroll
    for (int k = 0; k < READS_ROOM && FIRST + k < MOD_READS; k++) {
        int r = FIRST + k;
        if (c.elsewhere >> k & 1)
            continue;
        if (read_kind(r) == READ_HEAD || read_kind(r) == READ_ROW)
            sum_rows(s.row[k], term[k]);
        else if (read_kind(r) == READ_COLUMN)
            add_columns(p, mod, c.of[k], r, t, key0, term[k], m);
        else if (read_kind(r) == READ_DIAGONAL)
            sum_diagonals(p, mod, c.of[k], r, t, key0, term[k], s.diagonal[k], s.key0, m);
        else if (c.of[k].rows)
            add_to_rows(p, mod, c.of[k], r, t, key0, term[k], m.tile);
        else if (tables.of[k].pitch)
            add_to_query_tables(p, mod, tables.of[k], r, t, key0, term[k], m.tile, room);
        else if (read_kind(r) == READ_ELEMENT && !c.of[k].words)
            put_elements(p, mod, c.of[k], c.is_adding, r, t, key0, term[k], m);
        else if (tables.of[k].n)
            add_to_table(p, mod, tables.of[k], c.of[k], r, t, key0, term[k], s.unit[k],
                         m.peak[k], room);
        else
            add_terms(p, mod, c.of[k], r, t, key0, term[k], m.tile);
    }
    s.key0 = key0;
}

DEVICE void end_head(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                     const query_tile &t, float x, scratch &m)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
        x += __shfl_xor_sync(~0u, x, step);
    if ((threadIdx.x & 31) == 0)
        m.head[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        add_term(p.f, mod, to, r, t, t.row0 + t.q_offset, t.kv_offset,
                 (m.head[0] + m.head[1]) + (m.head[2] + m.head[3]));
    __syncthreads();
}

DEVICE void end_row(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                    const query_tile &t, int half, float x)
{
    int lane = threadIdx.x & 31, row = t.row0 + warp_row() + lane / 4 + 8 * half;
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    if ((lane & 3) == 0 && row < tile_rows_of(p.f, t).q_len)
        add_term(p.f, mod, to, r, t, row + t.q_offset, t.kv_offset, x);
}

template <int FIRST>
DEVICE void end_sums(const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                     const cu_tables &tables, const query_tile &t, sums &s, scratch &m,
                     int *room)
{
    __syncthreads();
#pragma unroll
    for (int k = 0; k < READS_ROOM && FIRST + k < MOD_READS; k++) {
        int r = FIRST + k;
        if (c.elsewhere >> k & 1)
            continue;
        if (read_kind(r) == READ_HEAD)
            end_head(p, mod, c.of[k], r, t, s.row[k][0] + s.row[k][1], m);
        if (read_kind(r) == READ_ROW) {
            end_row(p, mod, c.of[k], r, t, 0, s.row[k][0]);
            end_row(p, mod, c.of[k], r, t, 1, s.row[k][1]);
        }
        if (read_kind(r) == READ_DIAGONAL && s.key0 >= 0 && threadIdx.x >= PASS
            && threadIdx.x < DIAGONALS)
            add_diagonal(p, mod, c.of[k], r, t, s.key0, threadIdx.x, s.diagonal[k]);
        if (may_have_table(r) && tables.of[k].pitch)
            end_query_tables(p, mod, tables.of[k], c.of[k], c.is_adding, r, t, room);
        else if (may_have_table(r) && tables.of[k].n && s.unit[k].blocks > 0)
            empty_table(p, mod, tables.of[k], c.of[k], r, t, s.unit[k], room);
    }
}

/* ---- the kernel ---- */

template <int FIRST>
DEVICE void make_terms(const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                       const cu_tables &tables, char *memory)
{
    scratch &m = *(scratch *)(memory + STAY_BYTES + CFG_STAGES * PASS_BYTES);
    int *room = (int *)((char *)&m + SCRATCH);
    u32 shared = smem_address(memory);
    query_tile t = c.from < 0 ? query_tile_at(p, blockIdx.x)
                              : query_tile_of(p, c.from + (int)blockIdx.x);
#if CFG_RAGGED
    if (t.row0 >= tile_rows_of(p.f, t).q_len)
        return;
#endif
    clear_tables(tables, (float4 *)room);
    rows keys = rows_of_keys(p, tile_rows_of(p.f, t), t.b, t.g, t.kv_len);
    float term[READS_ROOM][S_COUNT];
    sums s;
    int stage = 0, row = t.row0 + warp_row() + (threadIdx.x & 31) / 4;
    float2 stat[2] = {stats_of(p, tile_rows_of(p.f, t), t.b, t.h, row),
                      stats_of(p, tile_rows_of(p.f, t), t.b, t.h, row + 8)};
    key_walk walk = key_begin(p, mod, t);
    dropper drop = no_dropper();
    dropper_enter(drop, p.f, t.b, t.h);
#pragma unroll
    for (int r = 0; r < READS_ROOM; r++) {
        s.row[r][0] = s.row[r][1] = s.diagonal[r] = 0.f;
        s.unit[r] = {LEAST_TOP, 0};
    }
    s.key0 = -1;
    copy_both<STAY>(shared, rows_of_queries(p, tile_rows_of(p.f, t), t.b, t.h), t.row0,
                    p.f.is_plain);
    int more = key_next(walk, p, t);
    if (more)
        copy_both<PASS>(shared + STAY_BYTES, keys, walk.block * PASS, p.f.is_plain);
    copy_commit();
    while (more) {
        int key0 = walk.block * PASS;
        int masked = masked_by(walk.masked, key0 + PASS > t.kv_len);
        u32 pass = shared + STAY_BYTES + stage * PASS_BYTES;
        more = key_next(walk, p, t);
#if CFG_STAGES > 1
        if (more)
            copy_both<PASS>(shared + STAY_BYTES + (stage ^ 1) * PASS_BYTES, keys,
                            walk.block * PASS, p.f.is_plain);
        copy_commit();
#endif
        copy_wait<CFG_STAGES - 1>();
        __syncthreads();
        terms_of_queries<FIRST>(term, p, mod, t, key0, masked, drop, shared, pass, stat, 0);
        tell_peaks<FIRST>(tables, term, m);
        __syncthreads();
#if CFG_STAGES > 1
        stage ^= 1;
#else
        if (more)
            copy_both<PASS>(shared + STAY_BYTES, keys, walk.block * PASS, p.f.is_plain);
        copy_commit();
#endif
        take_block<FIRST>(p, mod, c, tables, t, key0, term, s, m, room);
    }
    end_sums<FIRST>(p, mod, c, tables, t, s, m, room);
}

/* The launch's reads, from c.first on. */
template <int FIRST>
DEVICE void choose_reads(const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                         const cu_tables &tables, char *memory)
{
    if constexpr (FIRST + CU_READS < MOD_READS) {
        if (c.first != FIRST)
            return choose_reads<FIRST + CU_READS>(p, mod, c, tables, memory);
    }
    make_terms<FIRST>(p, mod, c, tables, memory);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_captures(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
                 const __grid_constant__ cu_reads c, const __grid_constant__ cu_tables tables)
{
    extern __shared__ __align__(1024) char memory[];
    choose_reads<0>(p, mod, c, tables, memory);
}

/* Every element of one gradient: 0, or what its sum comes to, over what it holds or added
 * to it. */
extern "C" __global__ void __launch_bounds__(256)
    bwd_captures_end(const __grid_constant__ cu_read to, const __grid_constant__ cu_shape shape,
                     int is_added)
{
    long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= to.n)
        return;
    float x = to.words ? exact_sum_of(to, at) : 0.f;
    for (int part = 0; part < to.parts; part++)
        x += to.rows[part * to.n + at];
    put_element(to, place_in(shape, at), x, is_added);
}
