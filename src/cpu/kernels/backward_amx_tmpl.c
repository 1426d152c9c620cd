/* Backward kernels on packed bf16 with AMX tiles: scores and dQ are forward's kernels
 * (block_amx_tmpl.c), weights those of weight_pairs.h. Pairs of rows of P and dS are what tiles
 * B take, so nothing is transposed in the loop over tiles:
 *
 *     dV^T += dO^T P    dK^T += Q^T dS      A: columns of Q or dO, B: pairs of rows of weights
 *
 * Sums of dK and dV lie [dim][keys] then, and are turned when a block of keys is done.
 *   columns [rows/32][D/32][32 dims][32 rows] bf16, tiles A of 16 dims x 32 rows
 *   weights [rows/2][ld] pairs, tiles B of 16 pairs x 16 keys
 * Levels other than AMX compile the same code on emulated tiles: tests run those anywhere. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#include "base/integers.h"

#include "cpu/kernels/amx_columns.h"
#include "cpu/kernels/weight_pairs.h"

/* C += 32 dims x 32 rows of A times 16 pairs of rows x 32 keys of B, of rows b_stride apart. */
static ALWAYS_INLINE void multiply_pairs(const char *a, const char *b, int64_t b_stride)
{
    TILE_LOAD(6, b, b_stride);
    TILE_LOAD(4, a, TILE_BYTES);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, b + TILE_BYTES, b_stride);
    TILE_DOT(1, 4, 7);
    TILE_LOAD(5, a + TILE_ROWS * TILE_BYTES, TILE_BYTES);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
}

static CPU_TURNED(turned)
{
    const int32_t steps = (rows + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t a_stride = (int64_t)a_ld * 4;
    (void)block;
    for (int32_t j = 0; j < keys; j += UNIT)
        for (int32_t v = 0; v < n_panels; v++) {
            const char *columns = (const char *)b + (int64_t)v * UNIT_BYTES;
            const char *weights = (const char *)a + (int64_t)j * 4;
            float *to = c + (int64_t)v * UNIT * c_ld + j;
            load_unit(to, (int64_t)c_ld * 4);
            for (int32_t t = 0; t < steps; t++)
                multiply_pairs(columns + (int64_t)t * n_panels * UNIT_BYTES,
                               weights + t * TILE_ROWS * a_stride, a_stride);
            store_unit(to, (int64_t)c_ld * 4);
        }
}

/* ---- weights ---- */

/* Tiles take 32 rows and 32 keys: those that are not there get weights 0. */
static void fill_up(const cpu_strip_weights *w)
{
    const int32_t whole = (w->n + UNIT - 1) / UNIT * UNIT, pairs = (w->rows + 1) / 2;
    for (int32_t i = w->n < whole ? 0 : pairs; i < TILE_ROWS; i++) {
        const int32_t from = i < pairs ? w->n : 0;
        const size_t bytes = (size_t)(whole - from) * sizeof(int32_t);
        memset((int32_t *)w->p + (int64_t)i * w->p_ld + from, 0, bytes);
        memset((int32_t *)w->ds + (int64_t)i * w->p_ld + from, 0, bytes);
    }
    for (int32_t i = 0; i < w->rows && w->n < whole; i++)
        memset((char *)w->ds_rows + (int64_t)i * w->ds_ld + w->n * 2, 0, 16 * sizeof(uint16_t));
}

static CPU_WEIGHTS(weights)
{
    weigh_pairs(strip);
    fill_up(strip);
}

/* Weights of units, 32 x 32 scores, made a few at a time between products of others: tiles
 * run beside vectors, if so few of either follow each other that the processor sees both. A
 * step is two rows. */
enum { UNIT_STEPS = UNIT / 2 };

typedef struct unit_weights {
    const float *s, *dp, *slope;
    int32_t *p, *ds;
    uint16_t *rows;
    int32_t ld, p_ld, rows_ld;
    int32_t all, done, due; /* steps; how many follow two products of tiles */
    vf factor;
    float base[UNIT], delta[UNIT];
} unit_weights;

static ALWAYS_INLINE void begin_unit(const cpu_strip_weights *strip, int32_t products,
                                     unit_weights *w)
{
    w->s = strip->s;
    w->dp = strip->dp;
    w->slope = strip->slope;
    w->p = strip->p;
    w->ds = strip->ds;
    w->rows = strip->ds_rows;
    w->ld = strip->ld;
    w->p_ld = strip->p_ld;
    w->rows_ld = strip->ds_ld / 2;
    w->all = strip->n / UNIT * UNIT_STEPS;
    w->done = 0;
    w->due = (w->all * 2 + products - 1) / products;
    w->factor = vf_set(strip->scale * LOG2_E);
    for (int32_t i = 0; i < UNIT; i += VF) {
        vf_store(w->base + i, vf_load(strip->lse + i) * vf_set(-LOG2_E));
        vf_store(w->delta + i, vf_load(strip->delta + i));
    }
}

/* To the first row of the next 32 keys. */
static ALWAYS_INLINE void next_unit(unit_weights *w, int has_slope)
{
    const int32_t back = UNIT * w->ld - UNIT, pairs_back = UNIT_STEPS * w->p_ld - UNIT;
    w->s -= back;
    w->dp -= back;
    if (has_slope)
        w->slope -= back;
    w->p -= pairs_back;
    w->ds -= pairs_back;
    w->rows -= UNIT * w->rows_ld - UNIT;
}

static ALWAYS_INLINE void weigh_step(unit_weights *w, int has_slope)
{
    const int32_t row = 2 * (w->done++ % UNIT_STEPS);
    const vf base[2] = {vf_set(w->base[row]), vf_set(w->base[row + 1])};
    const vf delta[2] = {vf_set(w->delta[row]), vf_set(w->delta[row + 1])};
    for (int32_t j = 0; j < UNIT; j += VF) {
        vf p[2], ds[2];
        for (int r = 0; r < 2; r++) {
            const vf x = vf_load(w->s + r * w->ld + j);
            p[r] = exp2_rough(vf_fma(x, w->factor, base[r]));
            ds[r] = p[r] * (vf_load(w->dp + r * w->ld + j) - delta[r]);
            if (has_slope)
                ds[r] = ds[r] * vf_load(w->slope + r * w->ld + j);
            ds[r] = vf_where_live(x, ds[r]);
        }
        const two_rows halves = narrow_two(ds[0], ds[1]);
        store_pairs(w->p + j, narrow_two(p[0], p[1]));
        store_pairs(w->ds + j, halves);
        store_first(w->rows + j, halves);
        store_second(w->rows + w->rows_ld + j, halves);
    }
    w->s += 2 * w->ld;
    w->dp += 2 * w->ld;
    if (has_slope)
        w->slope += 2 * w->ld;
    w->p += w->p_ld;
    w->ds += w->p_ld;
    w->rows += 2 * w->rows_ld;
    if (w->done % UNIT_STEPS == 0)
        next_unit(w, has_slope);
}

/* After every second product. */
static ALWAYS_INLINE void weigh_due(unit_weights *w, int has_slope)
{
    for (int32_t n = 0; n < w->due && w->done < w->all; n++)
        weigh_step(w, has_slope);
}

/* forward's scores of a unit. */
static ALWAYS_INLINE void score_unit(const void *q, int32_t q_ld, const void *k, int32_t D,
                                     float *s, int32_t s_ld, unit_weights *w, int has_slope)
{
    const int64_t stride = (int64_t)q_ld * 2;
    const char *rows = q, *keys = k;
    ZERO_UNIT();
    for (int32_t d = 0; d < D; d += TILE_DEPTH, rows += TILE_BYTES, keys += UNIT_BYTES) {
        TILE_LOAD(4, rows, stride);
        TILE_STREAM(6, keys, 2 * TILE_BYTES);
        TILE_DOT(0, 4, 6);
        TILE_STREAM(7, keys + TILE_BYTES, 2 * TILE_BYTES);
        TILE_DOT(1, 4, 7);
        weigh_due(w, has_slope);
        TILE_LOAD(5, rows + TILE_ROWS * stride, stride);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        weigh_due(w, has_slope);
    }
    store_unit(s, (int64_t)s_ld * 4);
}

static ALWAYS_INLINE void overlap_unit(const cpu_strip_scores *c,
                                       const cpu_strip_weights *strip, int has_slope)
{
    const int32_t steps =
        (c->D + TILE_DEPTH - 1) / TILE_DEPTH + (c->Dv + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t D = round_up(c->D, TILE_DEPTH), Dv = round_up(c->Dv, TILE_DEPTH);
    unit_weights w;
    begin_unit(strip, 4 * steps * c->n_panels, &w);
    for (int32_t p = 0; p < c->n_panels; p++) {
        score_unit(c->q, c->q_ld, (const char *)c->k + p * D * TILE_BYTES, c->D,
                   c->s + p * UNIT, c->ld, &w, has_slope);
        score_unit(c->o, c->o_ld, (const char *)c->v + p * Dv * TILE_BYTES, c->Dv,
                   c->dp + p * UNIT, c->ld, &w, has_slope);
    }
    while (w.done < w.all)
        weigh_step(&w, has_slope);
    for (int32_t i = 0; i < c->rows && (c->scale != 1 || c->slope != 1); i++) {
        scale_row(c->s + (int64_t)i * c->ld, c->n_panels * UNIT, c->scale);
        scale_row(c->dp + (int64_t)i * c->ld, c->n_panels * UNIT, c->slope);
    }
}

static NEVER_INLINE void overlap_near(const cpu_strip_scores *c, const cpu_strip_weights *strip)
{
    overlap_unit(c, strip, 0);
}

static NEVER_INLINE void overlap_slope(const cpu_strip_scores *c,
                                       const cpu_strip_weights *strip)
{
    overlap_unit(c, strip, 1);
}

static CPU_OVERLAP(overlap)
{
    const cpu_strip_scores *c = scores;
    const cpu_kernels *block = &LEVEL_NAME(cpu_bf16_tiles);
    if (HAS_FMA && weights->is_near && !weights->dx && weights->rows == UNIT
        && weights->n % UNIT == 0 && c->o) {
        if (weights->slope)
            overlap_slope(c, weights);
        else
            overlap_near(c, weights);
        return;
    }
    block->scores(c->q, c->q_ld, c->k, c->D, c->rows, c->n_panels, c->scale, c->s, c->ld);
    if (c->o)
        block->scores(c->o, c->o_ld, c->v, c->Dv, c->rows, c->n_panels, c->slope, c->dp, c->ld);
    weigh_pairs(weights);
    fill_up(weights);
}

/* ---- packing ---- */

/* 32 rows by 32 dims from row i and dim d on, as pairs of rows [16][32]: zeros where there are
 * none. Whether any is infinite or NaN. */
static unsigned take_pairs(const cpu_rows *from, int64_t i, int32_t n, int32_t d,
                           uint16_t pairs[TILE_ROWS][UNIT][2])
{
    const int32_t left = from->dim - d < UNIT ? from->dim - d : UNIT;
    unsigned nonfinite = 0;
    for (int32_t r = 0; r < TILE_DEPTH; r++) {
        uint16_t row[UNIT] = {0};
        if (i + r < n)
            memcpy(row, from->base + (i + r) * from->stride + (int64_t)d * 2,
                   (size_t)left * sizeof *row);
        for (int32_t c = 0; c < UNIT; c++) {
            nonfinite |= (row[c] & 0x7f80) == 0x7f80;
            pairs[r / 2][c][r % 2] = row[c];
        }
    }
    return nonfinite;
}

#if defined(LEVEL_AMX)
/* The same where all are there. */
static ALWAYS_INLINE unsigned take_whole(const char *row, int64_t stride,
                                         uint16_t pairs[TILE_ROWS][UNIT][2])
{
    const __m512i left = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i right = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 nonfinite = 0;
    for (int32_t r = 0; r < TILE_ROWS; r++, row += 2 * stride) {
        const __m512i even = _mm512_loadu_si512(row);
        const __m512i odd = _mm512_loadu_si512(row + stride);
        const __m512i low = _mm512_unpacklo_epi16(even, odd);
        const __m512i high = _mm512_unpackhi_epi16(even, odd);
        _mm512_storeu_si512(pairs[r][0], _mm512_permutex2var_epi64(low, left, high));
        _mm512_storeu_si512(pairs[r][16], _mm512_permutex2var_epi64(low, right, high));
        nonfinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(even, exponent), exponent)
                     | _mm512_cmpeq_epi16_mask(_mm512_and_si512(odd, exponent), exponent);
    }
    return nonfinite != 0;
}
#endif

static CPU_PACK_VALUES(pack_columns)
{
    unsigned nonfinite = 0;
    float *out = to;
    for (int32_t i = 0; i < padded; i += TILE_DEPTH)
        for (int32_t d = 0; d < from->dim; d += UNIT, out += UNIT_BYTES / 4) {
            uint16_t pairs[TILE_ROWS][UNIT][2] __attribute__((aligned(64)));
#if defined(LEVEL_AMX)
            if (i + TILE_DEPTH <= n && d + UNIT <= from->dim)
                nonfinite |= take_whole(from->base + i * from->stride + (int64_t)d * 2,
                                        from->stride, pairs);
            else
#endif
                nonfinite |= take_pairs(from, i, n, d, pairs);
            turn_pairs(pairs, out);
        }
    return (int)nonfinite;
}

#if defined(LEVEL_AMX)
#define ROWS(name) name##_avx512
#else
#define ROWS(name) LEVEL_NAME(name)
#endif

const cpu_backward_kernels LEVEL_NAME(cpu_backward_bf16_tiles) = {
    .block = &LEVEL_NAME(cpu_bf16_tiles),
    .rows = 192,
    .piece = UNIT,
    .step = 2,
    .depth = TILE_DEPTH,
    .is_apart = 1,
    .weights = weights,
    .overlap = overlap,
    .turned = turned,
    .pack_columns = pack_columns,
    .turn_sums = turn_sums,
    .row_dots = ROWS(cpu_row_dots),
    .sum_rows = ROWS(cpu_sum_rows),
    .sum_columns = ROWS(cpu_sum_columns),
    .sum_diagonals = ROWS(cpu_sum_diagonals),
    .store = ROWS(cpu_store_gradient),
};
