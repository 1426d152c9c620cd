/* One warp of decode over quantised K and V: a ring of blocks of codes in shared memory, copied
 * by 16 bytes from wherever a table says, and products of what they widen to. Heads wider than
 * 256 have other warps that load, and products of their own (decode_code_columns.cuh).
 *
 * Scales that a key has alone multiply scores and weights (where Q is f16, V: its range is too
 * short for both); with scales of channels the elements are made before they are multiplied.
 * Where scales stay out of K, its codes are f16, and Q of bf16 becomes f16 by a power of two
 * for each row. V and weights are f16, too, where a block's scales are close to each other. */
#pragma once

#include "copy.cuh"
#include "code_words.cuh"
#include "decode_scales.cuh"

enum {
    K_ROW = CFG_D * CODE_BITS / 8, /* bytes of a key */
    V_ROW = CFG_E * CODE_BITS / 8,
    /* eight rows share no banks: steps of an odd number of pieces, or swizzled ones */
    K_STEP = CFG_CODE_BOXES ? K_ROW : (K_ROW / 16 | 1) * 16,
    V_STEP = CFG_CODE_BOXES ? V_ROW : (V_ROW / 16 | 1) * 16,
    V_AT = KEYS * K_STEP, /* in a stage: K, V, scales of K's keys, of V's */
    SCALES_AT = V_AT + KEYS * V_STEP,
    UNIT = CFG_CODE_BOXES ? 1024 : 16, /* of the swizzle's pattern */
    STAGE = (SCALES_AT + KEYS * 16 + UNIT - 1) / UNIT * UNIT
};

/* 16 bytes of a row of K or V. */
DEVICE u32 piece_of(u32 at, int step, int row, int piece)
{
    return at + row * step + (CFG_CODE_BOXES ? piece ^ (row & 7) : piece) * 16;
}

#define HALF_SCORES !CFG_K_CHANNELS /* Q and K are multiplied as f16 */
#define SCALED_WEIGHTS (!CFG_V_CHANNELS && !CFG_F16)
#define COPIES (CFG_Q_SHARED ? 4 : 16) /* under way at once: wide heads have few registers */
#define Q_STEPS (CFG_Q_SHARED ? 6 : CFG_D / 16) /* of Q under way at once */
/* P and V as f16, where scales of V allow it: not where a row's bits may not follow from the
 * scales of keys that it does not see. */
#define HALF_VALUES (SCALED_WEIGHTS && CFG_E <= 128 && !CFG_INVARIANT)

struct stream {
    u32 buffer, full; /* full: barriers, with CFG_CODE_BOXES or warps that load */
#if CFG_SPAN_ROWS > 16
    u32 empty; /* as many: all warps have read the stage */
#endif
    u32 loads, uses;
    lookahead ahead;
#if CFG_SPAN_ROWS == 16
    int is_owing; /* scales of the last block wait here until they have come */
    k_scale_word k_scale;
    v_scale_word v_scale;
#endif
};

DEVICE cursor &stream_place(stream &w)
{
    return w.ahead.at;
}

DEVICE u32 stage_of(const stream &w, u32 n)
{
    return w.buffer + n % CFG_STAGES * STAGE;
}

/* ---- copies ---- */

#if CFG_SPAN_ROWS > 16
#include "decode_code_loads.cuh"
#else
/* Arrivals that fill a stage. */
DEVICE int stage_arrivals(const cu_fwd &p)
{
    return 1;
}

DEVICE void stream_begin(stream &w, const cu_fwd &p, const mod_args &mod, const line &l,
                         int end)
{
    w.is_owing = 0;
    ahead_begin(w.ahead, p, mod, l, 1, end);
}

/* Rows of KEYS keys. In pages lane i knows where key i lies; else rows follow each other. */
template <int ROW, int STEP>
DEVICE void copy_codes_of(u32 to, const code_byte *head, const cu_stride &stride,
                          const lookahead &x, lane_key at)
{
    enum { PIECES = ROW / 16 };
    int lane = threadIdx.x & 31;
#if CFG_CHUNKS
    long long mine = at.row < 0 ? -1 : at.b * stride.b + at.row * stride.n;
#else
    const code_byte *first = head + at.b * stride.b + span_key(x.at.s, x.first) * stride.n;
#endif
#pragma unroll COPIES
    for (int i = 0; i < KEYS * PIECES / 32; i++) {
        int row = (32 * i + lane) / PIECES, piece = (32 * i + lane) % PIECES;
#if CFG_CHUNKS
        long long from = __shfl_sync(~0u, mine, row);
        copy16(to + row * STEP + piece * 16, head + (from < 0 ? 0 : from + piece * 16),
               from >= 0);
#else
        int is_there = x.first + row < x.n;
        copy16(to + row * STEP + piece * 16,
               is_there ? first + row * stride.n + piece * 16 : head, is_there);
#endif
    }
}

/* To shared memory with the scales of the block loaded last. */
DEVICE void keep_scales(stream &w)
{
    u32 to = stage_of(w, w.loads - 1) + SCALES_AT;
    if (w.is_owing) {
        int lane = threadIdx.x & 31;
        char *at = (char *)__cvta_shared_to_generic(to);
        ((k_scale_word *)at)[lane] = w.k_scale;
        ((v_scale_word *)(at + 8 * KEYS))[lane] = w.v_scale;
    }
    w.is_owing = 0;
}

/* A block that lies in one piece, where a row is 128 bytes: a tensor copy each of K and V. */
DEVICE void copy_boxes(const stream &w, u32 to, const cu_fwd &p, const tensor_map *mk,
                       const tensor_map *mv)
{
    const span &s = w.ahead.at.s;
    u32 full = w.full + w.loads % CFG_STAGES * 8;
    if ((threadIdx.x & 31) != 0)
        return;
    int row = span_key(s, w.ahead.first);
    head_box k = key_box(p, s.b, s.g), v = value_box(p, s.b, s.g);
    barrier_expect(full, KEYS * (K_ROW + V_ROW));
    copy_box(to, mk, 0, row, k.h, k.b, full, EVICT_NORMAL);
    copy_box(to + V_AT, mv, 0, row, v.h, v.b, full, EVICT_NORMAL);
}

/* Begins the copy of the next block; without one an empty group keeps the count. */
DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const line &l, int end,
                      const tensor_map *mk, const tensor_map *mv)
{
    keep_scales(w);
    if (w.ahead.first != NO_BLOCK) {
        int g = w.ahead.at.s.g;
        u32 to = stage_of(w, w.loads);
        lane_key at = find_key(w.ahead, 0, 1);
        find_scale<CFG_K_TOKENS>(w.k_scale, p.k_scale, g, at);
        find_scale<CFG_V_TOKENS>(w.v_scale, p.v_scale, g, at);
#if CFG_CODE_BOXES
        copy_boxes(w, to, p, mk, mv);
#else
        copy_codes_of<K_ROW, K_STEP>(to, (const code_byte *)p.k + g * p.ks.h, p.ks,
                                     w.ahead, at);
        copy_codes_of<V_ROW, V_STEP>(to + V_AT, (const code_byte *)p.v + g * p.vs.h, p.vs,
                                     w.ahead, at);
#endif
        w.is_owing = 1;
        w.loads++;
        ahead_move(w.ahead, p, mod, l, 1, end);
    }
    copy_commit();
}

/* The oldest block, when it is there. */
DEVICE u32 await_block(stream &w)
{
#if CFG_CODE_BOXES
    barrier_wait(w.full + w.uses % CFG_STAGES * 8, w.uses / CFG_STAGES & 1);
#else
    copy_wait<CFG_STAGES - 1>();
#endif
    __syncwarp();
    return stage_of(w, w.uses);
}
#endif

/* Keys past the end came as zeros, but in tensor copies, where 0 * NaN must not be seen. Later
 * tensor copies into the stage come after these stores. */
DEVICE void clear_values(u32 stage, int from)
{
#if CFG_CODE_BOXES
    enum { PIECES = V_ROW / 16 };
    for (int i = threadIdx.x & 31; i < (KEYS - from) * PIECES; i += 32)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         piece_of(stage + V_AT, V_STEP, from + i / PIECES, i % PIECES)),
                     "r"(0)
                     : "memory");
    fence_async_proxy();
    __syncwarp();
#endif
}

/* ---- products ---- */

/* Column of O, within its block of 16 bytes of V, of element c of a thread's pair in tile j. */
DEVICE int code_column(int j, int c)
{
    int l = threadIdx.x & 3;
    return CODE_BITS == 4 ? 8 * l + 4 * c + j : 4 * l + 2 * c + j;
}

/* What a stage keeps of a key's scale; at: where it begins with those of K, or of V. */
DEVICE void get_scale_word(float &x, u32 at, int key)
{
    x = __uint_as_float(load_word(at + key * 4));
}

DEVICE void get_scale_word(long long &x, u32 at, int key)
{
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(at + key * 8) : "memory");
}

template <typename T> DEVICE T scale_word(u32 at, int key)
{
    T x;
    get_scale_word(x, at, key);
    return x;
}

/* The scale of channel d, where a key's channels have several. */
template <int CHANNELS> DEVICE float channel_scale(const cu_scale &s, long long at, int d)
{
    return s.data ? load_scale(s, at + d / (CHANNELS | !CHANNELS) * s.d) : 1.f;
}

/* A word of K: codes as f16, or elements as Q has them. d: channel of its first code. */
DEVICE void widen_key(u32 w, const cu_fwd &p, u32 scales, int key, int d, u32 (&h)[PAIRS])
{
    widen<0>(w, h);
#if CFG_K_CHANNELS
    long long at = scale_word<long long>(scales, key);
    enum { APART = CODE_BITS == 4 ? 4 : 1, NEXT = CODE_BITS == 4 ? 1 : 2 };
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        h[i] = scaled_pair(h[i], channel_scale<CFG_K_CHANNELS>(p.k_scale, at, d + NEXT * i),
                           channel_scale<CFG_K_CHANNELS>(p.k_scale, at, d + NEXT * i + APART));
#endif
}

/* The number of score i among a block's keys; own: that of the warp's first key. */
DEVICE int key_of_score(int i)
{
    int own = PARTS > 1 ? column_part() * OWN_KEYS : 0;
    return own + 8 * (i / 4) + 2 * (threadIdx.x & 3) + (i & 1);
}

/* Scores of codes in natural units. back: what a row's Q was divided by. */
DEVICE void scale_scores(float (&s)[S_COUNT], u32 scales, const float (&back)[2])
{
#if HALF_SCORES
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] *= scale_word<float>(scales, key_of_score(i)) * back[i / 2 & 1];
#endif
}

DEVICE void mma_key(float *s, const u32 *q, u32 b0, u32 b1)
{
#if HALF_SCORES
    mma_halves(s, q, b0, b1);
#else
    mma16(s, q, b0, b1);
#endif
}

#if CFG_COLUMN_PARTS == 1
/* s = Q K^T in natural units. */
DEVICE void block_scores(float (&s)[S_COUNT], const q_fragments &q, const cu_fwd &p, u32 stage,
                         const float (&back)[2])
{
    int lane = threadIdx.x & 31;
    u32 scales = stage + SCALES_AT;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = 0.f;
#pragma unroll COPIES
    for (int e = 0; e < K_ROW / 16; e++) {
        u32 w[4];
        load_matrices(w, piece_of(stage, K_STEP, lane, e));
#pragma unroll
        for (int j = 0; j < PAIRS / 2; j++) {
            u32 a[4];
            q_step(a, q, e * (PAIRS / 2) + j);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 h[PAIRS];
                widen_key(w[n], p, scales, 8 * n + lane / 4,
                          e * 128 / CODE_BITS + (lane & 3) * (32 / CODE_BITS), h);
                mma_key(s + 4 * n, a, h[2 * j], h[2 * j + 1]);
            }
        }
    }
    scale_scores(s, scales, back);
}
#endif

/* Words of V of keys (8 k + 2 (lane & 3)) and the next one; d: channel of the first code. */
template <int IN_HALVES>
DEVICE void widen_values(u32 w, const cu_fwd &p, u32 scales, int k, int d, u32 (&h)[PAIRS])
{
#if SCALED_WEIGHTS
    if (IN_HALVES)
        widen<1>(w, h);
    else
        widen_value(w, h);
#else
    int key = 8 * k + 2 * (threadIdx.x & 3);
    widen<1>(w, h);
#if CFG_V_CHANNELS
    long long lo = scale_word<long long>(scales, key),
              hi = scale_word<long long>(scales, key + 1);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        h[i] = scaled_pair(h[i], channel_scale<CFG_V_CHANNELS>(p.v_scale, lo, d + i),
                           channel_scale<CFG_V_CHANNELS>(p.v_scale, hi, d + i));
#else
    float lo = scale_word<float>(scales, key), hi = scale_word<float>(scales, key + 1);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        h[i] = scaled_pair(h[i], lo, hi);
#endif
#endif
}

#if HALF_VALUES
/* 2^(x - 127), 0 where that is too small; NaN where it is too large, so that rows are done
 * again. */
DEVICE float power_of(int x)
{
    return x > 254 ? NOT_A_NUMBER : __uint_as_float((u32)max(0, x) << 23);
}

/* Weights times scales are f16 where a block's scales are within 2^RANGE of each other: o is
 * then in units of 2^(unit - 127), of which every scale is 1 to 2^7, so that weights of 2^8 fit
 * and small ones are kept as well as f16 problems keep theirs. Returns whether they are. */
DEVICE int settle_unit(float (&o)[O_COUNT], int &unit, u32 scales)
{
    enum { RANGE = 6, LEAST = 20, MOST = 250 };
    u32 mine = __float_as_uint(scale_word<float>(scales, threadIdx.x & 31));
    int high = __reduce_max_sync(~0u, mine) >> 23;
    int low = (__reduce_min_sync(~0u, mine - 1) + 1) >> 23; /* of those that are not 0 */
    if (high < LEAST || high > MOST || high - low > RANGE) /* negative ones and NaN, too */
        return 0;
    if (high > unit + RANGE || low < unit) {
        float by = power_of(127 + unit - (high - RANGE));
#pragma unroll
        for (int i = 0; i < O_COUNT; i++)
            o[i] *= by;
        unit = high - RANGE;
    }
    return 1;
}
#endif

/* Weights s times the scales of V that stay out of it; whether they and V are to be f16. */
DEVICE int scale_weights(float (&s)[S_COUNT], float (&o)[O_COUNT], int &unit, u32 scales)
{
    int is_narrow = 0;
    float by = 1.f;
#if HALF_VALUES
    is_narrow = settle_unit(o, unit, scales);
    by = power_of(254 - unit);
#endif
#if SCALED_WEIGHTS
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] *= scale_word<float>(scales, key_of_score(i)) * by;
#endif
    return is_narrow;
}

/* o += S V for the columns of a piece of 16 bytes of each key, in f16 or in Q's dtype. w: the
 * piece's codes as a load of matrices leaves them; d: the lane's first column. */
template <int IN_HALVES>
DEVICE void add_piece(float *o, const u32 (&a)[KEYS / 16][4], const u32 (&w)[4],
                      const cu_fwd &p, u32 scales, int d)
{
#pragma unroll
    for (int kk = 0; kk < KEYS / 16; kk++) {
        u32 h[2][PAIRS];
        widen_values<IN_HALVES>(w[2 * kk], p, scales, 2 * kk, d, h[0]);
        widen_values<IN_HALVES>(w[2 * kk + 1], p, scales, 2 * kk + 1, d, h[1]);
#pragma unroll
        for (int j = 0; j < PAIRS; j++)
            if (IN_HALVES)
                mma_halves(o + j * 4, a[kk], h[0][j], h[1][j]);
            else
                mma16(o + j * 4, a[kk], h[0][j], h[1][j]);
    }
}

#if CFG_COLUMN_PARTS == 1
/* o += S V, in f16 or in Q's dtype. */
template <int IN_HALVES>
DEVICE void add_values(float (&o)[O_COUNT], const float (&s)[S_COUNT], const cu_fwd &p,
                       u32 stage, u32 scales)
{
    int lane = threadIdx.x & 31;
    u32 a[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        a[i / 4][i & 3] =
            IN_HALVES ? pack_halves(s[2 * i], s[2 * i + 1]) : pack(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int e = 0; e < V_ROW / 16; e++) {
        u32 w[4];
        load_matrices_transposed(w, piece_of(stage + V_AT, V_STEP, lane, e));
        add_piece<IN_HALVES>(o + e * PAIRS * 4, a, w, p, scales,
                             e * 128 / CODE_BITS + lane / 4 * PAIRS);
    }
}

/* o += P V; s holds probabilities. */
DEVICE void block_values(float (&o)[O_COUNT], int &unit, float (&s)[S_COUNT], const cu_fwd &p,
                         u32 stage)
{
    u32 scales = stage + SCALES_AT + 8 * KEYS;
    if (scale_weights(s, o, unit, scales))
        add_values<1>(o, s, p, stage, scales);
    else
        add_values<0>(o, s, p, stage, scales);
}
#endif

/* ---- Q ---- */

#if CFG_CODES == DTYPE_I4
/* Elements x and y of a row. */
DEVICE u32 q_two(const u16 *row, int x, int y)
{
    return row[x] | (u32)row[y] << 16;
}
#endif

/* A fragments of Q in the order of K's codes. */
DEVICE void q_step_load(u32 (&a)[4], const u16 *row0, const u16 *row1, int step)
{
    int l = threadIdx.x & 3;
#if CFG_CODES == DTYPE_I4
    int d = step / 2 * 32 + 8 * l + step % 2 * 2;
    a[0] = q_two(row0, d, d + 4);
    a[1] = q_two(row1, d, d + 4);
    a[2] = q_two(row0, d + 1, d + 5);
    a[3] = q_two(row1, d + 1, d + 5);
#else
    int d = step * 16 + 4 * l;
    uint2 x = {}, y = {};
    if (step * 16 < CFG_D_REAL) {
        x = *(const uint2 *)(row0 + d);
        y = *(const uint2 *)(row1 + d);
    }
    a[0] = x.x;
    a[1] = y.x;
    a[2] = x.y;
    a[3] = y.y;
#endif
}

#if HALF_SCORES && !CFG_F16
/* Largest exponent of a row's elements, at least one whose factor is a number. */
DEVICE int q_exponent(const u16 *row)
{
    u32 most = 20 << 7;
    for (int d = 8 * (threadIdx.x & 3); d < CFG_D_REAL; d += 32) {
        uint4 x = *(const uint4 *)(row + d);
        u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            most = max(most, max(w[i] & 0x7fffu, w[i] >> 16 & 0x7fffu));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    return most >> 7 == 255 ? 140 : most >> 7; /* what is not finite stays so */
}

/* A pair of bf16 times 2^(140 - exponent), as f16. */
DEVICE u32 q_halves(u32 x, float by)
{
    return pack_halves(__uint_as_float(x << 16) * by, __uint_as_float(x & 0xffff0000) * by);
}
#endif

/* Rows past the last one repeat it: nobody reads what comes of them. */
DEVICE void load_packed_q(q_fragments &q, float (&back)[2], const cu_fwd &p, const span &s)
{
    int last = packed_rows(p, s) - 1, lane = threadIdx.x & 31;
    int row = s.row0 + warp_row() + lane / 4;
    const u16 *row0 = packed_row_address(p, s, min(row, last));
    const u16 *row1 = packed_row_address(p, s, min(row + 8, last));
    back[0] = back[1] = 1.f;
#if HALF_SCORES && !CFG_F16
    int e0 = q_exponent(row0), e1 = q_exponent(row1);
    float by0 = __uint_as_float((u32)(127 + 140 - e0) << 23), by1;
    by1 = __uint_as_float((u32)(127 + 140 - e1) << 23);
    back[0] = __uint_as_float((u32)(127 - 140 + e0) << 23);
    back[1] = __uint_as_float((u32)(127 - 140 + e1) << 23);
#endif
#pragma unroll Q_STEPS
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4];
        q_step_load(a, row0, row1, kk);
#if HALF_SCORES && !CFG_F16
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = q_halves(a[i], i & 1 ? by1 : by0);
#endif
        q_keep(q, kk, a);
    }
}
