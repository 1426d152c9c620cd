/* Few queries, many keys. A span is one (b, g, tile of ROWS packed rows): the query heads of a
 * group share it, so that K and V are read once. In a CTA each stream takes every STREAMS-th
 * block through its own TMA ring; it is one warp, or where spans have more than 16 rows one
 * for each 16 of them. Partial results are added up in shared memory. Spans are
 * shared out in one of two ways (cu_decode_cluster): whole ones to each CTA, or one to a
 * cluster whose CTAs join their parts through shared memory; or the blocks of all spans as one
 * line cut into equal pieces (Flash-Decoding, with the cut of stream-K), which `decode_end`
 * joins. With `owns` every CTA has a span of its own, however long. With IS_FIXED, where a
 * row's bits must depend on its keys alone, pieces of PIECE_KEYS keys at fixed positions are
 * dealt to CTAs in turn, and `decode_end` joins every span.
 *
 * Order of merging: by stream, then by CTA or piece: fixed by problem and device model. */
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
#include "decode_end.cuh"

DEVICE void begin_fragment(fragment &f, const cu_fwd &p, const mod_args &mod, const span &s)
{
    rows_begin(f.rows);
#if CFG_CODES
    f.unit = 127;
#endif
    place_packed(f.at, p, mod, s);
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
    f.sure = sure_keys_of(f.at, p, mod);
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
    int mine = c.t + stream_of_warp();
    int lost = -1,
        is_cluster = p.decode.cluster > 1; /* a CTA without a block has rows to join, too */
    while (c.t < end || is_cluster) {
        span s = c.s;
        int first = c.from, last = min(c.to, end), begins = c.t == first;
        int is_whole = owns_span(p) || (begins && last == c.to);
        begin_fragment(f, p, mod, s);
        for (; mine < last; mine += STREAMS) {
#if CFG_SPAN_ROWS > 16
            pass_block(w, f, p, mod, s, mine - first, columns, warp_row() < span_rows(p, s));
#else
            use_block(w, f, p, mod, s, mine - first, columns);
            load_next(w, p, mod, l, end, mk, mv);
#endif
        }
        c.t = last;
        if (last < end) {
            cursor_follow(p, mod, l, c);
            if (PARTS > 1)
                sync_rows(); /* two warps read it */
            take_q(f, p, c.s);
        }
#if CFG_COLUMN_PARTS > 1
        write_columns(sh, f, p, s, piece_slot(blockIdx.x, begins), is_whole, lost);
#else
        reduce_warps(sh, f);
        if (is_cluster) {
            end_span(sh, p, s, lost);
            break;
        }
        write_piece(sh, p, s, piece_slot(blockIdx.x, begins), is_whole, lost);
#endif
        sync_rows();
    }
    redo_chain(p, mod, lost);
}

#if CFG_INVARIANT == 2
/* run_share for fixed pieces (IS_FIXED): c stands at a live piece; its dead blocks are passed
 * over. */
DEVICE void run_pieces(stream &w, fragment &f, const reduce_memory &sh, const cu_fwd &p,
                       const mod_args &mod, const line &l, cursor &c, int end,
                       mask_column *columns, const tensor_map *mk, const tensor_map *mv)
{
    int lost = -1; /* decode_end makes them again */
    while (c.t < end) {
        span s = c.s;
        int slot = c.t / PIECE, first = c.t - c.from, last = min(first + PIECE, s.first + s.n);
        begin_fragment(f, p, mod, s);
        for (int at = first + stream_of_warp(); at < last; at += STREAMS)
            if (at >= s.first) {
                use_block(w, f, p, mod, s, at, columns);
                load_next(w, p, mod, l, end, mk, mv);
            }
        c.t += (int)gridDim.x * PIECE;
        if (cursor_seek_piece(p, mod, l, c, end) && c.t < end)
            take_q(f, p, c.s);
        reduce_warps(sh, f);
        write_piece(sh, p, s, slot, 0, lost);
        __syncthreads();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
           const __grid_constant__ tensor_map mk, const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    reduce_memory sh;
    stream w;
    fragment f;
    int warp = threadIdx.x / 32;
    line l = line_of(p);
    sh.o = (float *)(shared + STREAMS * CFG_STAGES * STAGE);
    sh.ml = sh.o + (PARTS > 1 ? 0 : HALF * ROWS * O_STEP);
    sh.sum = sh.ml + STREAMS * PARTS * ROWS * 4;
    char *q = (char *)(sh.sum + ROWS * 4); /* Q where registers have no room for it */
#if CFG_COLUMN_PARTS > 1
    f.pair = pair_at(smem_address(q));
    q += COUPLES * DECODE_PAIR_BYTES;
#endif
    mask_column *columns = (mask_column *)(q + (CFG_Q_SHARED ? WARPS / PARTS * 32 * CFG_D : 0));
    u64 *bars = (u64 *)(columns + (MASK_COLUMN_WORDS ? WARPS * KEYS : 0));
    bars = (u64 *)(((u64)bars + 7) & ~7ull);
    int *prefix = (int *)(bars + (1 + HAS_LOADERS) * STREAMS * CFG_STAGES);
    l.prefix = smem_address(prefix);
#if CFG_Q_SHARED
    f.q = smem_address(q) + (threadIdx.x / 32 / PARTS * 32 + threadIdx.x % 32) * 16;
#endif
    place_stream(w, smem_address(shared), smem_address(bars));
#if !CFG_CODES || CFG_CODE_BOXES || CFG_SPAN_ROWS > 16
    if ((threadIdx.x & 31) == 0 && is_loader() == HAS_LOADERS && loads_keys()
        && stream_of_warp() < STREAMS) {
#if !CFG_CODES || CFG_CODE_BOXES
        map_prefetch(&mk);
        map_prefetch(&mv);
#endif
        for (int i = 0; i < CFG_STAGES; i++) {
            barrier_init(w.full + i * 8, stage_arrivals(p));
#if CFG_SPAN_ROWS > 16
            barrier_init(w.empty + i * 8, SHARERS);
#endif
        }
    }
    fence_barrier_init();
#endif
    if (HAS_LOADERS)
        __syncthreads();
    else
        __syncwarp();
    grid_let_next();
    grid_wait_before();
    int cta = number_behind(blockIdx.x);
    if (!l.each)
        sum_spans(p, mod, prefix, l.spans);
#if CFG_SPAN_ROWS > 16
    if (is_loader())
        return load_share(w, smem_address(shared), smem_address(bars), p, mod, l, cta, &mk,
                          &mv);
    registers_grow<CFG_REGS_CONSUMER>();
    place_stream(w, smem_address(shared), smem_address(bars));
#endif
    shares x = shares_of(p, l);
    int begin, end;
    place_share(p, mod, l, x, cta, begin, end);
    cursor c = cursor_at(p, mod, l, begin);
    if (IS_FIXED)
        cursor_seek_piece(p, mod, l, c, end);
    if (c.t < end)
        take_q(f, p, c.s); /* before all else: later it would wait behind the copies */
#if CFG_SPAN_ROWS == 16
    begin_loads(w, p, mod, l, c, end);
#pragma unroll 1
    for (int i = 0; i < CFG_STAGES; i++)
        load_next(w, p, mod, l, end, &mk, &mv);
#endif
    w.uses = 0;
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
