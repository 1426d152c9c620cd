/* One warp of decode: its rows in registers, and one block of keys. */
#pragma once

#include "decode_rows.cuh"

#if CFG_CODES
#include "decode_codes.cuh"
#else
#include "decode_stream.cuh"
#endif

/* ---- blocks on their way ---- */

/* Where the warp's stream has its stages and barriers. */
DEVICE void place_stream(stream &w, u32 buffers, u32 barriers)
{
    int at = stream_of_warp();
    w.buffer = buffers + at * CFG_STAGES * STAGE;
#if !CFG_CODES || CFG_CODE_BOXES || CFG_SPAN_ROWS > 16
    w.full = barriers + at * CFG_STAGES * 8;
#endif
#if CFG_SPAN_ROWS > 16
    w.empty = w.full + STREAMS * CFG_STAGES * 8;
#endif
}

/* c: where the CTA's share begins. */
DEVICE void begin_loads(stream &w, const cu_fwd &p, const mod_args &mod, const line &l,
                        const cursor &c, int end)
{
    w.loads = 0;
    stream_place(w) = c;
    stream_place(w).t += stream_of_warp();
    stream_begin(w, p, mod, l, end);
}

#if CFG_SPAN_ROWS > 16
/* A warp's part where others compute: K or V of all blocks of a stream. Nothing of theirs is
 * kept for it, else ptxas spills. */
DEVICE void load_share(stream &w, u32 buffers, u32 barriers, const cu_fwd &p,
                       const mod_args &mod, const line &l, int cta, const tensor_map *mk,
                       const tensor_map *mv)
{
    registers_shrink<CFG_REGS_PRODUCER>();
    if (stream_of_warp() >= STREAMS)
        return;
    place_stream(w, buffers, barriers);
    int begin, end;
    place_share(p, mod, l, shares_of(p, l), cta, begin, end);
    begin_loads(w, p, mod, l, cursor_at(p, mod, l, begin), end);
#pragma unroll 1
    while (has_next(w, end)) {
        barrier_wait(w.empty + w.loads % CFG_STAGES * 8, w.loads / CFG_STAGES & 1 ^ 1);
        load_next(w, p, mod, l, end, mk, mv);
    }
}
#endif

/* ---- rows ---- */

#if CFG_COLUMN_PARTS > 1
/* Where two warps that share rows leave weights (16 bytes a lane) and the largest score of each
 * row. */
struct pair_memory {
    u32 weights, peaks;
};
#endif

struct fragment {
    row_state rows;
    tile_rows at;
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
    sure_keys sure;
#endif
    q_fragments q;
#if CFG_CODES
    float back[2]; /* what Q's rows were divided by */
    int unit;      /* o is in units of 2^(unit - 127) */
#endif
#if CFG_COLUMN_PARTS > 1
    pair_memory pair;
#endif
    float o[O_COUNT];
};

DEVICE void take_q(fragment &f, const cu_fwd &p, const span &s)
{
#if CFG_CODES
    load_packed_q(f.q, f.back, p, s);
#else
    load_packed_q(f.q, p, s);
#endif
}

#if CFG_COLUMN_PARTS > 1
#include "decode_columns.cuh"
#endif

DEVICE void use_block(stream &w, fragment &f, const cu_fwd &p, const mod_args &mod,
                      const span &s, int at, mask_column *columns)
{
    float sc[S_COUNT], shift[2], rescale[2], peak[2];
    int partial, block = block_at(p, s, at, partial), own = column_part() * OWN_KEYS;
    u32 stage = await_block(w);
    int first = block * KEYS, tail = f.at.kv_len - first;
#if MOD_MASK == MASK_INTERVAL || MOD_SURE
    partial &= first < f.sure.from || first + (int)KEYS > f.sure.to;
#endif
#if CFG_CODES && CFG_COLUMN_PARTS > 1
    score_own(sc, f.q, p, stage, f.back);
#elif CFG_CODES
    block_scores(sc, f.q, p, stage, f.back);
#elif CFG_COLUMN_PARTS > 1
    score_own(sc, f.q, stage + own * 128);
#else
    mma_qk(sc, f.q, stage);
#endif
    int column = first + own + 2 * (threadIdx.x & 3);
    float unit = score_unit(p);
    apply_score(f.at, p, mod, column, sc, shift);
    int masked = masked_by(partial, tail < KEYS);
    if (masked) {
#if MOD_MASK == MASK_GENERAL
        if (partial) {
            __syncwarp();
            share_columns(f.at, p, mod, first + own, columns, 32);
            __syncwarp();
        }
#endif
        apply_mask(f.at, p, mod, column, masked, columns, sc);
        if (tail < KEYS)
            clear_values(stage, max(0, tail));
    }
    rows_peak_of(sc, unit, shift, peak);
#if CFG_COLUMN_PARTS > 1
    share_peaks(f.pair, peak);
#endif
    int raised = rows_raise_to(f.rows, peak, rescale);
    rows_exp(f.rows, sc, unit, shift);
    if (raised)
        rows_scale(f.o, rescale);
#if CFG_CODES && CFG_COLUMN_PARTS > 1
    block_values(f.o, f.unit, f.pair, sc, p, stage);
#elif CFG_CODES
    block_values(f.o, f.unit, sc, p, stage);
#elif CFG_COLUMN_PARTS > 1
    add_values(f.o, f.pair, sc, stage + PANELS_D * PANEL);
#else
    mma_pv(f.o, sc, stage + PANELS_D * PANEL);
#endif
    w.uses++;
    __syncwarp();
}

#if CFG_SPAN_ROWS > 16
/* use_block, or where the span has none of the warp's rows nothing; then the block's place is
 * free. */
DEVICE void pass_block(stream &w, fragment &f, const cu_fwd &p, const mod_args &mod,
                       const span &s, int at, mask_column *columns, int has_rows)
{
    u32 empty = w.empty + w.uses % CFG_STAGES * 8;
    if (has_rows) {
        use_block(w, f, p, mod, s, at, columns);
    } else {
        await_block(w);
        w.uses++;
    }
    barrier_arrive_if(empty, (threadIdx.x & 31) == 0);
}
#endif
