/* Few queries, many keys. A span is one (b, g, tile of 16 packed rows): the query heads of a
 * group share it, so that K and V are read once. In a CTA each warp takes every CFG_WGS-th
 * block through its own TMA ring; partial results are added up in shared memory. Spans are
 * shared out in one of two ways (cu_decode_cluster): whole ones to each CTA, or one to a
 * cluster whose CTAs join their parts through shared memory; or the blocks of all spans as one
 * line cut into equal pieces (Flash-Decoding, with the cut of stream-K), which `decode_end`
 * joins. With `owns` every CTA has a span of its own, however long. With IS_FIXED, where a
 * row's bits must depend on its keys alone, pieces of PIECE_KEYS keys at fixed positions are
 * dealt to CTAs in turn, and `decode_end` joins every span.
 *
 * Order of merging: by warp, then by CTA or piece: fixed by problem and device model. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "mma.cuh"
#include "careful.cuh"
#include "decode_span.cuh"
#include "decode_warp.cuh"
#include "decode_join.cuh"

DEVICE void begin_fragment(fragment &f, const cu_fwd &p, const mod_args &mod, const span &s)
{
    rows_begin(f.rows);
#if CFG_CODES
    f.unit = 127;
#endif
    place_packed(f.at, p, mod, s);
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
    place_interval(f, p, mod);
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        f.o[i] = 0.f;
}

/* f: Q of the first span is there. */
DEVICE void run_share(stream &w, fragment &f, const reduce_memory &sh, const cu_fwd &p,
                      const mod_args &mod, const line &l, cursor &c, int end,
                      mask_column *columns, const tensor_map *mk, const tensor_map *mv)
{
    int mine = c.t + threadIdx.x / 32;
    int is_cluster = p.decode.cluster > 1; /* a CTA without a block has rows to join, too */
    while (c.t < end || is_cluster) {
        span s = c.s;
        int index = c.index, first = c.from, last = min(c.to, end);
        int is_whole = owns_span(p) || (c.t == first && last == c.to);
        begin_fragment(f, p, mod, s);
        for (; mine < last; mine += WARPS) {
            use_block(w, f, p, mod, s, mine - first, columns);
            load_next(w, p, mod, l, end, mk, mv);
        }
        c.t = last;
        if (last < end) {
            cursor_follow(p, mod, l, c);
            take_q(f, p, c.s);
        }
        reduce_warps(sh, f);
        if (is_cluster)
            return end_span(sh, p, mod, s);
        write_piece(sh, p, mod, s, blockIdx.x + index, is_whole);
        __syncthreads();
    }
}

/* run_share for fixed pieces (IS_FIXED): c stands at a live piece; its dead blocks are passed
 * over. */
DEVICE void run_pieces(stream &w, fragment &f, const reduce_memory &sh, const cu_fwd &p,
                       const mod_args &mod, const line &l, cursor &c, int end,
                       mask_column *columns, const tensor_map *mk, const tensor_map *mv)
{
    while (c.t < end) {
        span s = c.s;
        int slot = c.t / PIECE, first = c.t - c.from, last = min(first + PIECE, s.first + s.n);
        begin_fragment(f, p, mod, s);
        for (int at = first + threadIdx.x / 32; at < last; at += WARPS)
            if (at >= s.first) {
                use_block(w, f, p, mod, s, at, columns);
                load_next(w, p, mod, l, end, mk, mv);
            }
        c.t += (int)gridDim.x * PIECE;
        if (cursor_seek_piece(p, mod, l, c, end) && c.t < end)
            take_q(f, p, c.s);
        reduce_warps(sh, f);
        write_piece(sh, p, mod, s, slot, 0);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    decode(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
           const __grid_constant__ tensor_map mk, const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    reduce_memory sh;
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
#if !CFG_CODES || CFG_CODE_BOXES
    w.full = smem_address(bars + warp * CFG_STAGES);
    if ((threadIdx.x & 31) == 0) {
        map_prefetch(&mk);
        map_prefetch(&mv);
        for (int i = 0; i < CFG_STAGES; i++)
            barrier_init(w.full + i * 8, CFG_CHUNKS && p.chunks.is_small ? 32 : 1);
    }
    fence_barrier_init();
#endif
    __syncwarp();
    grid_let_next();
    grid_wait_before();
    int cta = number_behind(blockIdx.x);
    if (!l.each)
        sum_spans(p, mod, prefix, l.spans);
    shares x = {(int)gridDim.x, p.decode.share, p.decode.larger};
    if (!l.each)
        x = share_out(gridDim.x, line_at(l, l.spans));
    int begin = share_begin(x, cta), end = share_begin(x, cta + 1);
    if (owns_span(p))
        own_share(p, mod, l, cta, begin, end);
    else if (p.decode.cluster)
        cluster_share(p, l, cta, begin, end);
    if (IS_FIXED) {
        begin = cta * PIECE;
        end = line_at(l, l.spans);
    }
    cursor c = cursor_at(p, mod, l, begin);
    if (IS_FIXED)
        cursor_seek_piece(p, mod, l, c, end);
    if (c.t < end)
        take_q(f, p, c.s); /* before all else: later it would wait behind the copies */
    stream_place(w) = c;
    stream_place(w).t += warp;
    stream_begin(w, p, mod, l, end);
#pragma unroll 1
    for (int i = 0; i < CFG_STAGES; i++)
        load_next(w, p, mod, l, end, &mk, &mv);
    if (!l.each && !p.decode.cluster && threadIdx.x == 0) {
        joint j = joint_at(l, x, cta);
        ((int4 *)p.done)[cta] = make_int4(j.index, j.first, j.count, 0);
    }
#if CFG_INVARIANT == 2
    run_pieces(w, f, sh, p, mod, l, c, end, columns + warp * KEYS, &mk, &mv);
#else
    run_share(w, f, sh, p, mod, l, c, end, columns + warp * KEYS, &mk, &mv);
#endif
}

/* One CTA for each cut between shares (x) and row of a span (y): joins what was cut, then does
 * rows again that are not finite. With fixed pieces x is the span. */
extern "C" __global__ void __launch_bounds__(128, 4)
    decode_end(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
#if CFG_INVARIANT == 2
    grid_wait_before();
    int at = number_behind(blockIdx.x);
    span s = span_place(p, at);
    span_count(p, mod, s);
    int slot = at * (p.decode.span_blocks / PIECE), r = blockIdx.y;
    if (r < span_rows(p, s)
        && join_row(p, s, slot, s.first / PIECE, (s.first + s.n - 1) / PIECE + 1, r))
        redo_at(p, mod, s, r);
#else
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
    j.index = number_behind(j.index);
    span s = span_place(p, j.index);
    if (j.count && r < span_rows(p, s) && join_row(p, s, j.first + j.index, 0, j.count, r))
        redo_at(p, mod, s, r);
    redo_flagged(p, mod);
#endif
}
