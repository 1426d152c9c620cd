/* Many fully live blocks of keys in one stream of instructions: while the tiles multiply, the
 * vector units do the softmax of the block between (measured in docs/kernels.md).
 *
 *     step n:   tiles    Q K(n+1)^T -> S      P(n-1) V(n-1) -> O
 *               vectors  exp S(n) -> P(n)     maxima of S(n+1)
 *
 * One S serves both blocks: a 32 x 32 square of it is written when its exponentials are taken.
 * P is double. Vector work comes in slices, two rows of a square, placed between tile products;
 * how many per product is the only tuning, and changes no result. FA2 (arXiv 2307.08691)
 * alg. 1: O is multiplied by alpha, only in rows whose maximum has risen, after the values of
 * the block before are in it. Rows of l stay vectors of partial sums until the end. */
#include "cpu/cpu.h"
#include "cpu/vec.h"

#include "cpu/amx_tiles.h"
#include "cpu/amx_units.h"
#include "cpu/softmax_rows.h"

enum {
    SQUARES = CPU_STREAM_KEYS / UNIT, /* of S, side by side */
    PER_BLOCK = CPU_BLOCK_KEYS / CPU_STREAM_KEYS, /* steps of a packed block */
    SLICE_ROWS = 2,
    SLICES = UNIT / SLICE_ROWS, /* of a square */
    P_BYTES = CPU_STREAM_KEYS * 2, /* a row of P */
};

typedef struct flow {
    const cpu_stream *a;
    float *s;                     /* [32][128], rows CPU_BLOCK_KEYS apart */
    char *p, *p_before;           /* [32][128] bf16 */
    const char *k_next, *v_before; /* NULL: none */
    int32_t depth, panels;        /* of 32 dims of Q, of 32 columns of V */
    vf factor;                    /* of scores in the exponent */
    uint32_t exp_at, max_at, max_end; /* slices done; maxima that may be looked for */
    int has_maxima;               /* the score function finds them */
    float shift[UNIT];            /* -m log2 e */
    float alpha[UNIT];            /* of O, due after the block before */
    _Alignas(64) float sum[UNIT][16]; /* partial sums of rows */
    _Alignas(64) float most[UNIT][16]; /* and partial maxima */
} flow;

/* ---- slices of vector work ---- */

/* 2^t, t <= 0 or a little above; rough: to 8.6e-5, exactly 1 at 0. */
static ALWAYS_INLINE vf exp2_rough(vf t)
{
#if defined(__AVX512DQ__)
    const vf f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* -INF: 0 */
    vf p = vf_fma(f, vf_set(0x1.3baaa6p-4f), vf_set(0x1.d2378ap-3f));
    p = vf_fma(p, f, vf_set(0x1.63e658p-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return _mm512_scalef_ps(p, t);
#else
    return exp2_poly(t);
#endif
}

static ALWAYS_INLINE void store_pair(char *p, vf x, vf y)
{
#if defined(LEVEL_AMX)
    _mm512_store_si512(p, (__m512i)_mm512_cvtne2ps_pbh(y, x));
#else
    vf_to_bf16((uint16_t *)(void *)p, x);
    vf_to_bf16((uint16_t *)(void *)p + VF, y);
#endif
}

static ALWAYS_INLINE void exp_slice(flow *f, int is_rough)
{
    const uint32_t square = f->exp_at / SLICES, r0 = f->exp_at % SLICES * SLICE_ROWS;
    f->exp_at++;
#pragma GCC unroll 2
    for (uint32_t r = r0; r < r0 + SLICE_ROWS; r++) {
        const float *s = f->s + r * CPU_BLOCK_KEYS + square * UNIT;
        char *p = f->p + r * P_BYTES + square * TILE_BYTES;
        const vf shift = vf_set(f->shift[r]);
#pragma GCC unroll 4
        for (int c = 0; c < UNIT; c += 2 * VF) {
            const vf t0 = vf_fma(vf_load(s + c), f->factor, shift);
            const vf t1 = vf_fma(vf_load(s + c + VF), f->factor, shift);
            const vf x = is_rough ? exp2_rough(t0) : exp2_poly(t0);
            const vf y = is_rough ? exp2_rough(t1) : exp2_poly(t1);
            float *sum = f->sum[r] + c % 16;
            store_pair(p + 2 * c, x, y);
            if (VF < 16) {
                vf_store(sum, vf_load(sum) + x);
                vf_store(f->sum[r] + (c + VF) % 16, vf_load(f->sum[r] + (c + VF) % 16) + y);
            } else {
                vf_store(sum, vf_load(sum) + (x + y));
            }
        }
    }
}

/* Raw maxima of the next block, by lanes. */
static ALWAYS_INLINE void max_slice(flow *f)
{
    const uint32_t square = f->max_at / SLICES, r0 = f->max_at % SLICES * SLICE_ROWS;
    f->max_at++;
#pragma GCC unroll 2
    for (uint32_t r = r0; r < r0 + SLICE_ROWS; r++) {
        const float *s = f->s + r * CPU_BLOCK_KEYS + square * UNIT;
#pragma GCC unroll 8
        for (int c = 0; c < UNIT; c += VF) {
            float *most = f->most[r] + c % 16;
            vf_store(most, vf_max(vf_load(most), vf_load(s + c)));
        }
    }
}

static ALWAYS_INLINE void slice(flow *f, int is_rough)
{
    if (f->exp_at < SQUARES * SLICES)
        exp_slice(f, is_rough);
    if (f->max_at < f->max_end)
        max_slice(f);
}

/* ---- tiles, with slices between them ---- */

/* One step of a unit: rate slices to four products. */
static ALWAYS_INLINE void multiply_merged(flow *f, int rate, int is_rough, const char *a,
                                          int64_t a_stride, const char *b)
{
    TILE_LOAD(4, a, a_stride);
    TILE_STREAM(6, b, 2 * TILE_BYTES);
    TILE_DOT(0, 4, 6);
    if (rate >= 4)
        slice(f, is_rough);
    TILE_STREAM(7, b + TILE_BYTES, 2 * TILE_BYTES);
    TILE_DOT(1, 4, 7);
    if (rate >= 2)
        slice(f, is_rough);
    TILE_LOAD(5, a + TILE_ROWS * a_stride, a_stride);
    TILE_DOT(2, 5, 6);
    if (rate >= 4)
        slice(f, is_rough);
    TILE_DOT(3, 5, 7);
    if (rate >= 1)
        slice(f, is_rough);
}

/* Scores of a square of the next block; its exponentials must be taken by the time of the
 * store. */
static ALWAYS_INLINE void scores_unit(flow *f, int rate, int is_rough, int32_t square)
{
    const char *k = f->k_next + (int64_t)square * f->depth * UNIT_BYTES;
    ZERO_UNIT();
    for (int32_t d = 0; d < f->depth; d++)
        multiply_merged(f, rate, is_rough, (const char *)f->a->q + d * TILE_BYTES,
                        f->a->q_ld * 2, k + (int64_t)d * UNIT_BYTES);
    while (rate && f->exp_at < ((uint32_t)square + 1) * SLICES)
        exp_slice(f, is_rough);
    store_unit(f->s + square * UNIT, CPU_BLOCK_KEYS * 4);
    f->max_end = f->has_maxima ? 0 : ((uint32_t)square + 1) * SLICES;
}

/* A panel of values of the block before. */
static ALWAYS_INLINE void values_unit(flow *f, int rate, int is_rough, int32_t panel)
{
    const char *v = f->v_before + (int64_t)panel * CPU_BLOCK_KEYS * UNIT * 2;
    float *o = f->a->o + panel * UNIT;
    load_unit(o, f->a->o_ld * 4);
    for (int32_t d = 0; d < CPU_STREAM_KEYS / TILE_DEPTH; d++)
        multiply_merged(f, rate, is_rough, f->p_before + d * TILE_BYTES, P_BYTES,
                        v + (int64_t)d * UNIT_BYTES);
    store_unit(o, f->a->o_ld * 4);
}

/* Values spread evenly between the squares of scores. */
static ALWAYS_INLINE void step(flow *f, int rate, int is_rough)
{
    for (int32_t square = 0, panel = 0; square < SQUARES; square++) {
        for (; f->v_before && panel * SQUARES < (square + 1) * f->panels; panel++)
            values_unit(f, rate, is_rough, panel);
        if (f->k_next)
            scores_unit(f, rate, is_rough, square);
    }
    while (rate && f->exp_at < SQUARES * SLICES)
        exp_slice(f, is_rough);
    while (f->max_at < f->max_end)
        max_slice(f);
}

/* ---- between steps ---- */

static ALWAYS_INLINE void scale_row(float *row, int32_t n, float alpha)
{
    for (int32_t d = 0; d < n; d += VF)
        vf_store(row + d, vf_set(alpha) * vf_load(row + d));
}

/* What O holds now is of blocks before the one whose P is ready: bring it to P's maximum. */
static void settle(flow *f)
{
    for (int32_t r = 0; r < f->a->rows; r++)
        if (f->alpha[r] != 1)
            scale_row(f->a->o + (int64_t)r * f->a->o_ld, f->a->o_ld, f->alpha[r]);
}

/* Largest lane of each row. */
static void reduce_maxima(const flow *f, float out[UNIT])
{
    for (int32_t r = 0; r < UNIT; r += VF) {
        vf all[VF];
        vf top = vf_set(-INFINITY);
        for (int32_t c = 0; c < 16; c += VF) {
            for (int i = 0; i < VF; i++)
                all[i] = vf_load(f->most[r + i] + c);
            vf_transpose(all);
            for (int i = 0; i < VF; i++)
                top = vf_max(top, all[i]);
        }
        vf_store(out + r, top);
    }
}

/* New maxima; known ones are of changed scores, found ones of raw. A row without a live score
 * keeps -INF, and 0 stands in for it. */
static void raise_maxima(flow *f, const float *known)
{
    const cpu_stream *a = f->a;
    float found[UNIT];
    if (!known)
        reduce_maxima(f, found);
    for (int32_t r = 0; r < a->rows; r++) {
        const float block = known ? known[r] : a->scale * found[r];
        const float m = block > a->m[r] ? block : a->m[r];
        f->alpha[r] = 1;
        if (m > a->m[r]) {
            f->alpha[r] = row_scale(a->m[r], m);
            scale_row(f->sum[r], 16, f->alpha[r]);
            f->shift[r] = -(m * LOG2_E);
            a->m[r] = m;
        }
    }
}

/* S holds the scores of block n whole. */
static void begin_block(flow *f, int32_t n)
{
    const cpu_stream *a = f->a;
    raise_maxima(f, a->change ? a->change(a->arg, n) : NULL);
    for (int32_t r = 0; r < UNIT; r++)
        for (int c = 0; c < 16; c += VF)
            vf_store(f->most[r] + c, vf_set(-INFINITY));
    f->exp_at = f->max_at = f->max_end = 0;
}

static void begin_flow(flow *f, const cpu_stream *a)
{
    f->a = a;
    f->s = a->s;
    f->p = (char *)(a->s + UNIT * CPU_BLOCK_KEYS);
    f->p_before = f->p + UNIT * P_BYTES;
    f->k_next = a->k;
    f->v_before = NULL;
    f->depth = (a->D + TILE_DEPTH - 1) / TILE_DEPTH;
    f->panels = a->o_ld / UNIT;
    f->has_maxima = a->change != NULL;
    f->factor = vf_set(a->change ? LOG2_E : a->scale * LOG2_E);
    f->exp_at = f->max_at = f->max_end = 0;
    memset(f->sum, 0, sizeof f->sum);
    for (int32_t r = 0; r < UNIT; r++) {
        const float m = r < a->rows ? a->m[r] : 0;
        f->shift[r] = m == -INFINITY ? 0 : -(m * LOG2_E);
        f->alpha[r] = 1;
        f->sum[r][0] = r < a->rows ? a->l[r] : 0;
        for (int c = 0; c < 16; c++)
            f->most[r][c] = -INFINITY;
    }
}

static void end_flow(flow *f)
{
    for (int32_t r = 0; r < f->a->rows; r++) {
        vf sum = vf_load(f->sum[r]);
        for (int c = VF; c < 16; c += VF)
            sum += vf_load(f->sum[r] + c);
        f->a->l[r] = vf_sum_lanes(sum);
    }
}

/* Operands of step n, n_bytes of each packed step; NULL past the last. */
static const char *step_of(const cpu_stream *a, const char *first, int32_t n, int64_t n_bytes)
{
    if (n >= a->n_blocks * PER_BLOCK)
        return NULL;
    return first + (size_t)(n / PER_BLOCK) * a->pitch + n % PER_BLOCK * n_bytes;
}

static ALWAYS_INLINE void run(const cpu_stream *a, int rate, int is_rough)
{
    flow f;
    begin_flow(&f, a);
    step(&f, 0, is_rough); /* scores of the first block */
    for (int32_t n = 0; n < a->n_blocks * PER_BLOCK; n++) {
        begin_block(&f, n);
        f.k_next = step_of(a, a->k, n + 1, (int64_t)SQUARES * f.depth * UNIT_BYTES);
        step(&f, rate, is_rough);
        settle(&f);
        f.v_before = step_of(a, a->v, n, CPU_STREAM_KEYS * UNIT * 2);
        char *p = f.p;
        f.p = f.p_before;
        f.p_before = p;
    }
    f.exp_at = SQUARES * SLICES;
    step(&f, 0, is_rough); /* values of the last */
    end_flow(&f);
}

#define RUN(name, rate, is_rough)              \
    static void name(const cpu_stream *stream) \
    {                                          \
        run(stream, rate, is_rough);           \
    }
RUN(run_sparse, 1, 0)
RUN(run_even, 2, 0)
RUN(run_dense, 4, 0)
RUN(run_sparse_rough, 1, 1)
RUN(run_even_rough, 2, 1)
RUN(run_dense_rough, 4, 1)

/* 64 slices over 4 steps for each 32 dims of Q and of V. */
CPU_STREAM(LEVEL_NAME(cpu_stream_tiles))
{
    const int32_t depth = (stream->D + 31) / 32 + stream->o_ld / 32;
    const int pick = (depth > 12 ? 0 : depth > 6 ? 1 : 2) + (stream->is_rough ? 3 : 0);
    static void (*const runs[])(const cpu_stream *) = {run_sparse,       run_even,
                                                       run_dense,        run_sparse_rough,
                                                       run_even_rough,   run_dense_rough};
    runs[pick](stream);
}
