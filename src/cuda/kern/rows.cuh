/* What every forward kernel shares around its products: which tile and rows a thread works on,
 * the walk over the block mask's runs, the user's score and mask on a fragment of scores, and
 * the end of a row. */
#pragma once

/* one tile of rows of one (batch, head) */
struct tile {
    int id, b, h, row0, block; /* block: index among the query blocks of (b, h) */
    int q_offset, kv_offset, kv_len;
};

DEVICE int position(const cu_position &p, int b)
{
    return p.by_batch ? __ldg(p.by_batch + (long long)b * p.step) : p.value;
}

DEVICE tile tile_at(const cu_fwd &p, int id, int rows)
{
    tile t;
    t.id = id;
    t.block = t.id % p.n_qblk;
    int bh = t.id / p.n_qblk;
    t.h = bh % p.H;
    t.b = bh / p.H;
    t.row0 = t.block * rows;
    t.q_offset = position(p.q_offset, t.b);
    t.kv_offset = position(p.kv_offset, t.b);
    t.kv_len = max(0, min(position(p.kv_len, t.b), p.N));
    return t;
}

/* the tile that comes at a turn of the work order */
DEVICE tile tile_of(const cu_fwd &p, int turn, int rows)
{
    return tile_at(p, p.order ? __ldg(p.order + turn) : turn, rows);
}

/* Live key blocks of a tile, in one order for producer and consumers. Kept small: it lives in
 * the registers of the inner loop. Scores that grow with the key (ALiBi) are walked from the
 * right, so that the largest come first and the rows' offsets are right from the start. */
struct block_walk {
    int run, end;    /* indices: next run, and the one past the last */
    int block, last; /* present block, last block of the present run */
    int partial;     /* of the present run */
#if MOD_SCORE == SCORE_AFFINE
    int step; /* 1 or -1 */
#endif
};

#if MOD_SCORE == SCORE_AFFINE
#define WALK_STEP(w) (w).step
#else
#define WALK_STEP(w) 1
#endif

DEVICE int block_count(int kv_len)
{
    return (kv_len + CFG_TN - 1) / CFG_TN;
}

DEVICE int walk_step(const cu_fwd &p, const mod_args &mod, const tile &t)
{
#if MOD_SCORE == SCORE_AFFINE
    score_row r;
    score_row_begin(mod, p, t.b, t.h, t.row0 + t.q_offset, r);
    return r.alpha > 0.f ? -1 : 1;
#else
    return 1;
#endif
}

DEVICE block_walk walk_begin(const cu_fwd &p, const mod_args &mod, const tile &t)
{
    block_walk w;
    int n = block_count(t.kv_len), left = walk_step(p, mod, t) < 0;
#if MOD_SCORE == SCORE_AFFINE
    w.step = left ? -1 : 1;
#endif
    w.run = w.end = 0;
    w.partial = MOD_MASK != MASK_NONE;
    w.block = left ? n : -1;
    w.last = left ? 0 : n - 1;
    if (p.runs) {
        int row = t.b * p.mask_b + t.h * p.mask_h + t.block;
        int from = __ldg(p.run_start + row), to = __ldg(p.run_start + row + 1);
        w.run = left ? to - 1 : from;
        w.end = left ? from - 1 : to;
        w.last = w.block;
    } else if (n == 0) {
        w.last = w.block;
    }
    return w;
}

DEVICE int walk_next(block_walk &w, const cu_fwd &p, int kv_len)
{
    if (w.block != w.last) {
        w.block += WALK_STEP(w);
        return 1;
    }
#if MOD_SCORE == SCORE_AFFINE
    while (w.run != w.end) {
        int4 run = __ldg((const int4 *)p.runs + w.run);
        int from = run.x, to = min(run.x + run.y, block_count(kv_len)) - 1;
        w.run += w.step;
        w.partial = run.z;
        w.block = w.step > 0 ? from : to;
        w.last = w.step > 0 ? to : from;
        if (from <= to)
            return 1;
        w.last = w.block;
    }
    return 0;
#else
    if (w.run == w.end)
        return 0;
    int4 run = __ldg((const int4 *)p.runs + w.run++);
    w.block = run.x;
    w.last = min(run.x + run.y, block_count(kv_len)) - 1;
    w.partial = run.z;
    if (w.block <= w.last)
        return 1;
    w.run = w.end; /* ascending: nothing live follows */
    w.last = w.block;
    return 0;
#endif
}

/* the mask must be looked at: partial, or holding the end of the keys */
DEVICE int walk_masked(const block_walk &w, int kv_len)
{
    return w.partial | (w.block * CFG_TN + CFG_TN > kv_len);
}

/* What a thread's two rows (8 apart) need in the inner loop. */
struct tile_rows {
    int q;                 /* position of the first */
    int kv_len, kv_offset; /* of the batch */
    int b, h;              /* dead unless the mod asks */
#if CFG_PACKED
    int q1, h1; /* the second row's, where heads of a group share a tile */
#endif
#if MOD_SCORE
    score_row score[2]; /* what the score needs that no key changes */
#endif
};

DEVICE int row_q(const tile_rows &r, int i)
{
#if CFG_PACKED
    return i ? r.q1 : r.q;
#else
    return r.q + 8 * i;
#endif
}

DEVICE int row_h(const tile_rows &r, int i)
{
#if CFG_PACKED
    return i ? r.h1 : r.h;
#else
    return r.h;
#endif
}

/* the group of 16 rows that this thread's warp, or pair of warps, works on */
DEVICE int group_of_thread(void)
{
    return ((int)threadIdx.x / 32 - CFG_FIRST_WARP) / CFG_PARTS;
}

/* which part of O's columns it owns */
DEVICE int part_of_thread(void)
{
    return (int)threadIdx.x / 32 % CFG_PARTS;
}

/* row of the tile that this thread's first row is */
DEVICE int row_of_thread(void)
{
    return group_of_thread() * 16 + (threadIdx.x & 31) / 4;
}

DEVICE void rows_place(tile_rows &r, const cu_fwd &p, const mod_args &mod, const tile &t)
{
    r.q = t.row0 + row_of_thread() + t.q_offset;
    r.kv_len = t.kv_len;
    r.kv_offset = t.kv_offset;
    r.b = t.b;
    r.h = t.h;
#if MOD_SCORE
    score_row_begin(mod, p, t.b, t.h, r.q, r.score[0]);
    score_row_begin(mod, p, t.b, t.h, r.q + 8, r.score[1]);
#endif
}

/* Factor from a score register to log2 units. */
DEVICE float score_unit(const cu_fwd &p)
{
#if MOD_SCORE == SCORE_GENERAL
    return SCORE_UNIT * 1.4426950408889634f;
#elif CFG_SCALE_FIRST
    return 1.4426950408889634f;
#else
    return p.scale * 1.4426950408889634f;
#endif
}

#if MOD_SCORE == SCORE_GENERAL
/* Scores that would be infinite in log2 units, and so pass for masked, stay finite: the lowest
 * float, as biases that stand for masks have it. */
DEVICE float not_lowest(float x)
{
    return SCORE_IS_LOW && x > NEG_INF ? fmaxf(x, LOWEST / SCORE_UNIT) : x;
}
#endif

/* The score function on a fragment whose first column is `column`. shift: per row, log2 units,
 * added to every score of this block. Affine scores alpha * kv + beta cost one FMA: the part of
 * alpha * kv that is the same for the whole block goes to shift. */
template <int COUNT>
DEVICE void apply_score(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                        float (&s)[COUNT], float (&shift)[2])
{
    shift[0] = shift[1] = 0.f;
#if CFG_SCALE_FIRST
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] *= p.scale;
#endif
#if MOD_SCORE == SCORE_AFFINE
#pragma unroll
    for (int i = 0; i < 2; i++)
        shift[i] = score_offset(mod, p, r.b, row_h(r, i), r.score[i], column + r.kv_offset)
                   * 1.4426950408889634f;
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] =
                fmaf(r.score[i / 2].alpha_raw, (float)(8 * g + (i & 1)), s[4 * g + i]);
    }
#elif MOD_SCORE == SCORE_GENERAL
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
        int kv = column + 8 * g + r.kv_offset;
        float x[4] = {s[4 * g], s[4 * g + 1], s[4 * g + 2], s[4 * g + 3]};
        score4(mod, p, r.b, r.h, r.score[0], r.score[1], kv, kv + 1, x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] = not_lowest(x[i]);
    }
#endif
}

#if SCORE_TANH
/* Scores unit * tanh(k s), k and unit constant. Where |k s| < 1/2 a score is s times a
 * polynomial in v = s^2 - TANH_EDGE, made on the multiply-add units alone and straight in log2
 * units: the product with s is that of the exponent. The sign of v tells where that holds;
 * where it does not for all of a warp's scores (NaN too), the score function itself is asked, a
 * few fours at a time. */
DEVICE float tanh_factor(float s, u32 &small)
{
    float v = fmaf(s, s, -TANH_EDGE);
    float y = fmaf(TANH_C4, v, TANH_C3);
    y = fmaf(y, v, TANH_C2);
    y = fmaf(y, v, TANH_C1);
    small &= __float_as_uint(v);
    return fmaf(y, v, TANH_C0);
}

/* s becomes 2^(score - m) of the scores; row sums grow. No key of the block is masked. Returns
 * whether most of them were asked for. The sums so far are never negative and change nothing in
 * `small`: without them ptxas puts all exponentials behind the last vote, and spills. */
template <int COUNT>
DEVICE int rows_exp_tanh(row_state &t, const tile_rows &r, const cu_fwd &p, const mod_args &mod,
                         int column, float (&s)[COUNT], float unit)
{
    enum { N = 8 };
    float a[2] = {t.l[0], t.l[1]}, b[2] = {0.f, 0.f};
    int asked = 0;
#pragma unroll
    for (int from = 0; from < COUNT; from += N) {
        float e[N];
        u32 small = ~(__float_as_uint(a[0]) | __float_as_uint(a[1]) | __float_as_uint(b[0])
                      | __float_as_uint(b[1]));
#pragma unroll
        for (int i = 0; i < N; i++)
            e[i] = fmaf(s[from + i], tanh_factor(s[from + i], small), -t.m[i / 2 & 1]);
        if (!__all_sync(~0u, (int)small < 0)) {
            asked += N;
#pragma unroll
            for (int g = 0; g < N; g += 4) {
                int kv = column + 2 * (from + g) + r.kv_offset;
                float x[4] = {s[from + g], s[from + g + 1], s[from + g + 2], s[from + g + 3]};
                score4(mod, p, r.b, r.h, r.score[0], r.score[1], kv, kv + 1, x);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    e[g + i] = fmaf(x[i], unit, -t.m[i / 2]);
            }
        }
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            s[from + i] = exp2_fast(e[i]);
            s[from + i + 1] = exp2_fast(e[i + 1]);
            a[i / 2 & 1] += s[from + i];
            b[i / 2 & 1] += s[from + i + 1];
        }
    }
    t.l[0] = a[0] + b[0];
    t.l[1] = a[1] + b[1];
    return asked > COUNT / 2;
}

/* The largest score is that of the largest s. */
template <int COUNT>
DEVICE int rows_raise_tanh(row_state &t, const tile_rows &r, const cu_fwd &p,
                           const mod_args &mod, int column, const float (&s)[COUNT], float unit,
                           float (&rescale)[2])
{
    float peak[2];
    rows_peak(s, peak);
    float x[4] = {peak[0], peak[0], peak[1], peak[1]};
    score4(mod, p, r.b, r.h, r.score[0], r.score[1], column, column, x);
    peak[0] = x[0] * unit;
    peak[1] = x[2] * unit;
    return rows_raise_to(t, peak, rescale);
}
#endif

#if MOD_MASK == MASK_GENERAL
/* What the mask needs of the keys of a block, made once by the 128 (or 32) threads that will
 * read it; shared holds CFG_TN of them. */
DEVICE void share_columns(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int first,
                          mask_column *shared, int threads)
{
#if MASK_COLUMN_WORDS
    mask_row row;
    mask_row_begin(mod, p, r.b, r.h, r.q, row); /* only what no row changes is used */
    for (int c = threadIdx.x % threads; c < CFG_TN; c += threads)
        mask_column_begin(mod, p, r.b, r.h, row, first + c + r.kv_offset, shared[c]);
#endif
}
#else
#define MASK_COLUMN_WORDS 0
struct mask_column {
};
#endif

/* -INF from column hi on, and before column lo; per row. */
template <int COUNT> DEVICE void cut_right(float (&s)[COUNT], const int (&hi)[2])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 8 * (i / 4) + (i & 1) < hi[i / 2 & 1] ? s[i] : NEG_INF;
}

template <int COUNT> DEVICE void cut_left(float (&s)[COUNT], const int (&lo)[2])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 8 * (i / 4) + (i & 1) >= lo[i / 2 & 1] ? s[i] : NEG_INF;
}

#if MOD_MASK == MASK_GENERAL
template <int COUNT>
DEVICE void cut_general(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                        const mask_column *columns, float (&s)[COUNT])
{
    mask_row row[2];
    mask_row_begin(mod, p, r.b, row_h(r, 0), row_q(r, 0), row[0]);
    mask_row_begin(mod, p, r.b, row_h(r, 1), row_q(r, 1), row[1]);
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
        bool live[4];
        int at = 8 * g + 2 * (threadIdx.x & 3), kv = column + 8 * g + r.kv_offset;
        mask4(mod, p, r.b, r.h, row[0], row[1], kv, kv + 1, columns[at], columns[at + 1], live);
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] = live[i] ? s[4 * g + i] : NEG_INF;
    }
}
#endif

/* -INF where the mask or the end of the keys says so. Limits count columns of this fragment,
 * whose first is `column`; often no row of a warp is cut in a block that is partial for the
 * tile. columns: what a general mask needs of the keys. */
template <int COUNT>
DEVICE void apply_mask(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                       const mask_column *columns, float (&s)[COUNT])
{
    int hi[2];
    hi[0] = hi[1] = r.kv_len - column;
#if MOD_MASK == MASK_GENERAL
    cut_general(r, p, mod, column, columns, s);
#elif MOD_MASK == MASK_INTERVAL
    int lo[2], base = column + r.kv_offset, end = base + COUNT * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int from, to; /* live: from <= kv < to */
        mask_interval(mod, p, r.b, row_h(r, i), row_q(r, i), from, to);
        lo[i] = min(max(from, base), end) - base;
        hi[i] = min(hi[i], max(min(to, end), base) - base);
    }
    if (__any_sync(~0u, max(lo[0], lo[1]) > 0))
        cut_left(s, lo);
#endif
    if (__any_sync(~0u, min(hi[0], hi[1]) < CFG_TN))
        cut_right(s, hi);
}

/* The same for a block of keys that all THREADS threads of the CTA work on. */
template <int THREADS, int COUNT>
DEVICE void apply_mask_together(const tile_rows &r, const cu_fwd &p, const mod_args &mod,
                                int block, int column, mask_column *columns,
                                float (&s)[COUNT])
{
#if MOD_MASK == MASK_GENERAL
    __syncthreads();
    share_columns(r, p, mod, block * CFG_TN, columns, THREADS);
    __syncthreads();
#endif
    apply_mask(r, p, mod, column, columns, s);
}

/* statistics of a row, where they are wanted */
DEVICE void put_lse(const cu_fwd &p, int b, int h, int m, float x)
{
    if (p.lse)
        p.lse[b * p.lse_s.b + h * p.lse_s.h + m * p.lse_s.n] = x;
}

DEVICE void put_row_max(const cu_fwd &p, int b, int h, int m, float x)
{
    if (p.row_max)
        p.row_max[b * p.max_s.b + h * p.max_s.h + m * p.max_s.n] = x;
}

/* End of a row: its sum, lse and maximum; inv gets 1 / sum, or 0 for a row without a live key.
 * Rows whose result is not finite or whose sum is lost are flagged, 16 rows a warp, for the
 * careful kernel to do again: a NaN there may be one that lay in V at a masked key. */
template <int COUNT>
DEVICE void rows_finish(row_state &w, const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                        float (&inv)[2])
{
    float zero = 0.f; /* becomes NaN with any element that is not finite */
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        zero = fmaf(o[i], 0.f, zero);
    int lane = threadIdx.x & 31, bad = zero != 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float l = quad_sum(w.l[i]);
        inv[i] = l == 0.f ? 0.f : 1.f / l;
        bad |= row_is_lost(w.m[i], l);
#if CFG_ROWMAX
        float peak = quad_max(w.peak[i]);
#endif
        int m = t.row0 + row_of_thread() + 8 * i;
        if ((lane & 3) == 0 && part_of_thread() == 0 && m < p.M) {
            put_lse(p, t.b, t.h, m,
                    l == 0.f ? NEG_INF : (w.m[i] + log2f(l)) * 0.6931471805599453f);
#if CFG_ROWMAX
            put_row_max(p, t.b, t.h, m, peak * 0.6931471805599453f);
#endif
        }
    }
#if CFG_PARTS > 1
    bad = __syncthreads_or(bad); /* one flag for both; its neighbours are done again in vain */
#endif
    bad = __any_sync(~0u, bad);
    if (lane == 0 && bad && p.redo)
        p.redo[atomicAdd(p.redo_count, 1)] = t.id; /* once for each of its warps, at most */
    if (lane == 0)
        p.flags[t.id * p.tile_groups + group_of_thread()] = bad;
}

#if CFG_F32
/* O / l to global memory: 8 neighbours a thread and panel (mma32.cuh). */
template <int COUNT>
DEVICE void rows_store(const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                       const float (&inv)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = t.row0 + row_of_thread() + 8 * i;
        float *row = (float *)p.o + t.b * p.os.b + t.h * p.os.h + m * p.os.n;
#pragma unroll
        for (int g = 0; g < COUNT / 8; g++) {
            int column =
                part_of_thread() * COUNT * 2 + g / 2 * 32 + 8 * (threadIdx.x & 3) + g % 2 * 4;
            const float *x = &o[g / 2 * 16 + g % 2 + 2 * i];
            if (m >= p.M || column >= CFG_E_REAL)
                continue;
            if (!p.is_plain) {
                *(float4 *)(row + column) =
                    make_float4(x[0] * inv[i], x[4] * inv[i], x[8] * inv[i], x[12] * inv[i]);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (column + j < CFG_E_REAL)
                    row[column + j] = x[4 * j] * inv[i];
        }
    }
}
#else
/* Four words of four lanes, transposed: lane j of a quad ends with word j of lanes 0..3. */
DEVICE void quad_transpose(u32 (&w)[4])
{
    int one = threadIdx.x & 1, two = threadIdx.x & 2;
    u32 x = __shfl_xor_sync(~0u, one ? w[0] : w[1], 1);
    u32 y = __shfl_xor_sync(~0u, one ? w[2] : w[3], 1);
    (one ? w[0] : w[1]) = x;
    (one ? w[2] : w[3]) = y;
    x = __shfl_xor_sync(~0u, two ? w[0] : w[2], 2);
    y = __shfl_xor_sync(~0u, two ? w[1] : w[3], 2);
    (two ? w[0] : w[2]) = x;
    (two ? w[1] : w[3]) = y;
}

DEVICE void store_plain(u16 *to, const u32 (&w)[4], int count)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            to[i] = (u16)(w[i / 2] >> (i & 1) * 16);
}

/* O / l to global memory, 16 bytes a lane, straight from registers. */
template <int COUNT>
DEVICE void rows_store(const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                       const float (&inv)[2])
{
    enum { CHUNKS = COUNT / 4 }; /* of 8 columns */
    int j = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = t.row0 + row_of_thread() + 8 * i;
        u16 *row = (u16 *)p.o + t.b * p.os.b + t.h * p.os.h + m * p.os.n;
#pragma unroll
        for (int g = 0; g < CHUNKS; g += 4) {
            u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int at = g + k < CHUNKS ? 4 * (g + k) + 2 * i : 0;
                w[k] = pack(o[at] * inv[i], o[at + 1] * inv[i]);
            }
            quad_transpose(w);
            if (m >= p.M || (g + j) * 8 >= CFG_E_REAL)
                continue;
            u16 *to = row + (g + j) * 8;
#if CFG_SM < 90
            if (p.is_plain) {
                store_plain(to, w, CFG_E_REAL - (g + j) * 8);
                continue;
            }
#endif
            *(uint4 *)to = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}
#endif

/* ---- one score at a time, for kernels that are not in a hurry ---- */

DEVICE bool is_live(const mod_args &mod, const cu_fwd &p, int b, int h, int q, int kv)
{
#if MOD_MASK == MASK_INTERVAL
    int from, to;
    mask_interval(mod, p, b, h, q, from, to);
    return from <= kv && kv < to;
#elif MOD_MASK == MASK_GENERAL
    mask_row r;
    bool live[4];
    mask_column c;
    mask_row_begin(mod, p, b, h, q, r);
    mask_column_begin(mod, p, b, h, r, kv, c);
    mask4(mod, p, b, h, r, r, kv, kv, c, c, live);
    return live[0];
#else
    return true;
#endif
}

/* The score function at a point, of the bare dot product; natural units. */
DEVICE float score_of(const mod_args &mod, const cu_fwd &p, int b, int h, int q, int kv,
                      float dot)
{
#if MOD_SCORE == SCORE_NONE
    return dot * p.scale;
#else
    score_row r;
    score_row_begin(mod, p, b, h, q, r);
#if MOD_SCORE == SCORE_AFFINE
    return fmaf(dot, p.scale, score_offset(mod, p, b, h, r, kv));
#else
    float x[4] = {dot, dot, dot, dot};
    score4(mod, p, b, h, r, r, kv, kv, x);
    return x[0] * SCORE_UNIT;
#endif
#endif
}
