/* Backward kernels for f16 on AMX: those of backward_amx_tmpl.c with every number as the sum of
 * two of bf16 (block_amx_f16_tmpl.c), P and dS too, to 16 bits. Products leave out low low, but
 * for S and dP, where dP - delta may cancel to 0.
 *   columns [rows/32][D/32][high 32 dims x 32 rows, low]
 *   weights [rows/2][high ld, low ld] pairs
 * An infinity has no low part, and 0 times one is NaN: runs whose inputs hold any take the
 * careful kernels, and so do problems whose slope, by which dS is multiplied, may be one. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#include "cpu/kernels/amx_columns.h"
#include "cpu/kernels/amx_split.h"
#include "cpu/kernels/weight_pairs.h"

/* ---- products ---- */

static ALWAYS_INLINE void load_columns(const char *a)
{
    TILE_LOAD(4, a, TILE_BYTES);
    TILE_LOAD(5, a + TILE_ROWS * TILE_BYTES, TILE_BYTES);
}

static ALWAYS_INLINE void load_weights(const char *b, int64_t stride)
{
    TILE_LOAD(6, b, stride);
    TILE_LOAD(7, b + TILE_BYTES, stride);
}

static ALWAYS_INLINE void multiply_loaded(void)
{
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
}

static CPU_TURNED(turned)
{
    const int32_t steps = (rows + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t low = (int64_t)a_ld * 4, stride = 2 * low;
    (void)block;
    for (int32_t j = 0; j < keys; j += UNIT)
        for (int32_t v = 0; v < n_panels; v++) {
            float *to = c + (int64_t)v * UNIT * c_ld + j;
            load_unit(to, (int64_t)c_ld * 4);
            for (int32_t t = 0; t < steps; t++) {
                const char *columns =
                    (const char *)b + ((int64_t)t * n_panels + v) * SPLIT_BYTES;
                const char *weights = (const char *)a + (int64_t)j * 4 + t * TILE_ROWS * stride;
                load_columns(columns + UNIT_BYTES);
                load_weights(weights, stride);
                multiply_loaded();
                load_columns(columns);
                multiply_loaded();
                load_weights(weights + low, stride);
                multiply_loaded();
            }
            store_unit(to, (int64_t)c_ld * 4);
        }
}

/* ---- weights ---- */

/* High and low pairs of 2 rows of VF keys; the parts of rows, if they are wanted. */
static ALWAYS_INLINE void store_parts(int32_t *pairs, int32_t ld, vf first, vf second,
                                      uint16_t *rows[2])
{
    vf high[2];
    const two_rows top = narrow_two(first, second);
    widen_two(top, high);
    const two_rows rest = narrow_two(first - high[0], second - high[1]);
    store_pairs(pairs, top);
    store_pairs(pairs + ld, rest);
    if (rows) {
        store_first(rows[0], top);
        store_second(rows[1], top);
        store_first(rows[0] + TILE_DEPTH, rest);
        store_second(rows[1] + TILE_DEPTH, rest);
    }
}

/* Two rows of 32 keys, of which n are there, 16 or more. All of dP is read before dS comes to
 * lie over it. */
static ALWAYS_INLINE void weigh_square(const row_pair *r, int rows, int32_t j, int32_t n,
                                       int32_t ld, int is_fused, int has_dx)
{
    enum { PARTS = TILE_DEPTH / VF };
    vf p[PARTS][2], ds[PARTS][2];
    float none[TILE_DEPTH]; /* where the second row is not there */
    for (int c = 0; c < PARTS; c++)
        for (int i = 0; i < 2; i++) {
            const int32_t at = j + c * VF;
            p[c][i] = ds[c][i] = vf_set(0);
            if (i >= rows || c * VF >= n)
                continue;
            const vf x = vf_set(r->scale) * vf_load(r->s[i] + at);
            p[c][i] = weight_of(x, &r->row[i], is_fused);
            ds[c][i] = score_gradient(x, p[c][i], vf_load(r->dp[i] + at), &r->row[i], NULL,
                                      has_dx ? r->dx[i] + at : NULL);
        }
    for (int c = 0; c < PARTS; c++) {
        uint16_t *to[2] = {r->ds_rows[0] + 2 * j + c * VF,
                           (rows == 2 ? r->ds_rows[1] + 2 * j : (uint16_t *)(void *)none)
                               + c * VF};
        store_parts(r->p + j + c * VF, ld, p[c][0], p[c][1], NULL);
        store_parts(r->ds + j + c * VF, ld, ds[c][0], ds[c][1], to);
    }
}

static ALWAYS_INLINE void weigh_split(const row_pair *r, int rows, const cpu_strip_weights *w,
                                      int is_fused, int has_dx)
{
    for (int32_t j = 0; j < w->n; j += TILE_DEPTH)
        weigh_square(r, rows, j, w->n - j, w->p_ld, is_fused, has_dx);
}

/* Tiles take 32 rows: those that are not there get weights 0. */
static CPU_WEIGHTS(weigh_strip)
{
    const size_t bytes = (size_t)((strip->n + UNIT - 1) / UNIT * UNIT) * sizeof(int32_t);
    for (int32_t i = 0; i < strip->rows; i += 2) {
        const int rows = i + 1 < strip->rows ? 2 : 1;
        row_pair r = pair_of(strip, i, rows);
        r.p += (int64_t)(i / 2) * strip->p_ld; /* a pair has two lines */
        r.ds += (int64_t)(i / 2) * strip->p_ld;
        const int is_fused = r.row[0].is_fused && (rows == 1 || r.row[1].is_fused);
        if (rows == 2 && is_fused && !strip->dx)
            weigh_split(&r, 2, strip, 1, 0);
        else
            weigh_split(&r, rows, strip, is_fused, strip->dx != NULL);
    }
    for (int32_t i = (strip->rows + 1) / 2 * 2; i < UNIT; i++) {
        memset((int32_t *)strip->p + (int64_t)i * strip->p_ld, 0, bytes);
        memset((int32_t *)strip->ds + (int64_t)i * strip->p_ld, 0, bytes);
    }
}

/* Weights of a unit made between the products of the next, as backward_amx_tmpl.c makes them:
 * `due` steps of two rows by 32 keys after each product with one part. */
typedef struct unit_weights {
    const cpu_strip_weights *strip;
    int32_t done, due;
} unit_weights;

static ALWAYS_INLINE void weigh_step(const cpu_strip_weights *strip, int32_t step)
{
    row_pair r = pair_of(strip, 2 * step, 2);
    r.p += (int64_t)step * strip->p_ld; /* a pair has two lines */
    r.ds += (int64_t)step * strip->p_ld;
    weigh_square(&r, 2, 0, UNIT, strip->p_ld, 1, 0);
}

static ALWAYS_INLINE void weigh_due(unit_weights *w)
{
    for (int32_t n = 0; n < w->due && w->done < UNIT / 2; n++)
        weigh_step(w->strip, w->done++);
}

/* forward's scores of a unit. */
static ALWAYS_INLINE void score_unit(const void *q, int32_t q_ld, const void *k, int32_t D,
                                     float *s, int32_t s_ld, unit_weights *w)
{
    const int64_t stride = (int64_t)q_ld * 4;
    const char *rows = q, *keys = k;
    ZERO_UNIT();
    for (int32_t d = 0; d < D; d += TILE_DEPTH, rows += SPLIT_ROW, keys += SPLIT_BYTES) {
        TILE_LOAD(4, rows + TILE_BYTES, stride);
        TILE_LOAD(5, rows + TILE_BYTES + TILE_ROWS * stride, stride);
        multiply_part(keys + UNIT_BYTES);
        weigh_due(w);
        multiply_part(keys);
        weigh_due(w);
        TILE_LOAD(4, rows, stride);
        TILE_LOAD(5, rows + TILE_ROWS * stride, stride);
        multiply_loaded();
        weigh_due(w);
        multiply_part(keys + UNIT_BYTES);
        weigh_due(w);
    }
    store_unit(s, (int64_t)s_ld * 4);
}

static NEVER_INLINE void overlap_unit(const cpu_strip_scores *c, const cpu_strip_weights *strip)
{
    const int32_t steps =
        (c->D + TILE_DEPTH - 1) / TILE_DEPTH + (c->Dv + TILE_DEPTH - 1) / TILE_DEPTH;
    unit_weights w = {.strip = strip, .due = (UNIT / 2 + 4 * steps - 1) / (4 * steps)};
    score_unit(c->q, c->q_ld, c->k, c->D, c->s, c->ld, &w);
    score_unit(c->o, c->o_ld, c->v, c->Dv, c->dp, c->ld, &w);
    while (w.done < UNIT / 2)
        weigh_step(strip, w.done++);
    for (int32_t i = 0; i < c->rows; i++) {
        scale_row(c->s + (int64_t)i * c->ld, UNIT, c->scale);
        scale_row(c->dp + (int64_t)i * c->ld, UNIT, c->slope);
    }
}

static CPU_OVERLAP(overlap)
{
    const cpu_strip_scores *c = scores;
    const cpu_kernels *block = &LEVEL_NAME(cpu_f16_tiles);
    if (HAS_FMA && weights->is_near && !weights->dx && weights->rows == UNIT
        && weights->n == UNIT && c->n_panels == 1 && c->o) {
        overlap_unit(c, weights);
        return;
    }
    block->scores(c->q, c->q_ld, c->k, c->D, c->rows, c->n_panels, c->scale, c->s, c->ld);
    if (c->o)
        block->scores(c->o, c->o_ld, c->v, c->Dv, c->rows, c->n_panels, c->slope, c->dp, c->ld);
    weigh_strip(weights);
}

/* ---- packing ---- */

/* The parts of 2 rows of 32 dims become pairs. */
static ALWAYS_INLINE void interleave(const bf16 *even, const bf16 *odd, uint16_t to[UNIT][2])
{
#if defined(LEVEL_AMX)
    const __m512i left = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i right = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    _mm512_storeu_si512(to[0], _mm512_permutex2var_epi64(low, left, high));
    _mm512_storeu_si512(to[UNIT / 2], _mm512_permutex2var_epi64(low, right, high));
#else
    for (int32_t c = 0; c < UNIT; c++) {
        to[c][0] = even[c];
        to[c][1] = odd[c];
    }
#endif
}

static CPU_PACK_VALUES(pack_columns)
{
    unsigned nonfinite = 0;
    float *out = to;
    for (int32_t i = 0; i < padded; i += TILE_DEPTH)
        for (int32_t d = 0; d < from->dim; d += UNIT, out += SPLIT_BYTES / 4) {
            uint16_t high[TILE_ROWS][UNIT][2], low[TILE_ROWS][UNIT][2];
            for (int32_t r = 0; r < TILE_DEPTH; r += 2) {
                bf16 parts[2][2 * TILE_DEPTH] = {{0}};
                for (int32_t t = 0; t < 2 && i + r + t < n; t++)
                    nonfinite |= load_split(from, i + r + t, d, parts[t]);
                interleave(parts[0], parts[1], high[r / 2]);
                interleave(parts[0] + TILE_DEPTH, parts[1] + TILE_DEPTH, low[r / 2]);
            }
            turn_pairs(high, out);
            turn_pairs(low, out + UNIT_BYTES / 4);
        }
    return (int)nonfinite;
}

#if defined(LEVEL_AMX)
#define ROWS(name) name##_avx512
#else
#define ROWS(name) LEVEL_NAME(name)
#endif

const cpu_backward_kernels LEVEL_NAME(cpu_backward_f16_tiles) = {
    .block = &LEVEL_NAME(cpu_f16_tiles),
    .rows = 96,
    .piece = UNIT,
    .step = 1,
    .depth = TILE_DEPTH,
    .is_apart = 1,
    .careful = &ROWS(cpu_backward_f32),
    .weights = weigh_strip,
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
