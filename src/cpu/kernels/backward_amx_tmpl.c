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

#include "cpu/kernels/amx_columns.h"
#include "cpu/kernels/amx_stream.h"
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

/* Sums of 32 dims stay together: their columns are near while all keys pass. A unit's sums are
 * brought near beside the products of the one before. */
static CPU_TURNED(turned)
{
    const int32_t steps = (rows + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t each = (UNIT + steps - 1) / steps;
    const int32_t per_panel = (keys + UNIT - 1) / UNIT, all = per_panel * n_panels;
    const int64_t a_stride = (int64_t)a_ld * 4, stride = (int64_t)c_ld * 4;
    float *past = NULL, *to = c;
    (void)block;
    for (int32_t n = 0, j = 0, v = 0; n < all; n++) {
        const char *columns = (const char *)b + (int64_t)v * UNIT_BYTES;
        const char *weights = (const char *)a + (int64_t)j * UNIT * 4;
        if (++j == per_panel)
            j = 0, v++;
        float *next = n + 1 < all ? c + (int64_t)v * UNIT * c_ld + j * UNIT : to;
        multiply_first(0, columns, TILE_BYTES, weights, a_stride, past, to, stride);
        prefetch_sums(next, stride, 0, each);
        for (int32_t t = 1; t < steps; t++) {
            multiply_pairs(columns + (int64_t)t * n_panels * UNIT_BYTES,
                           weights + t * TILE_ROWS * a_stride, a_stride);
            prefetch_sums(next, stride, t * each, (t + 1) * each);
        }
        past = to;
        to = next;
    }
    store_unit(past, stride);
}

/* dQ likewise, strip by strip. */
static CPU_ADD_VALUES(add_values)
{
    const cpu_strip_values *w = values;
    const int32_t steps = (w->n + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t each = (UNIT + steps - 1) / steps;
    const int32_t all = (w->rows + UNIT - 1) / UNIT * w->n_panels;
    const int64_t p_stride = (int64_t)w->p_ld * 4, stride = (int64_t)w->o_ld * 4;
    float *past = NULL, *to = w->o;
    for (int32_t n = 0, r = 0, v = 0; n < all; n++) {
        const char *weights = (const char *)w->p + (int64_t)r * UNIT * p_stride;
        const char *panel = (const char *)w->v + (int64_t)v * UNIT_BYTES;
        if (++v == w->n_panels)
            v = 0, r++;
        float *next = n + 1 < all ? w->o + (int64_t)r * UNIT * w->o_ld + v * UNIT : to;
        multiply_first(1, weights, p_stride, panel, 2 * TILE_BYTES, past,
                       w->is_first ? NULL : to, stride);
        prefetch_sums(next, stride, 0, each);
        for (int32_t t = 1; t < steps; t++) {
            multiply_unit(weights + t * TILE_BYTES, p_stride,
                          panel + (int64_t)t * w->n_panels * UNIT_BYTES);
            prefetch_sums(next, stride, t * each, (t + 1) * each);
        }
        past = to;
        to = next;
    }
    store_unit(past, stride);
}

/* ---- weights ---- */

/* Tiles take 32 rows and 32 keys: those that are not there get weights 0. */
static void fill_up(const cpu_strip_weights *w)
{
    const int32_t whole = (w->n + UNIT - 1) / UNIT * UNIT, pairs = (w->rows + 1) / 2;
    for (int32_t i = w->n < whole ? 0 : pairs; i < TILE_ROWS; i++) {
        const int32_t from = i < pairs ? w->n : 0;
        const size_t bytes = (size_t)(whole - from) * sizeof(int32_t);
        memset((int32_t *)w->p + (int64_t)i * w->ld + from, 0, bytes);
        memset((int32_t *)w->ds + (int64_t)i * w->ld + from, 0, bytes);
    }
    for (int32_t i = 0; i < w->rows && w->n < whole; i++)
        memset((uint16_t *)(void *)(w->dp + (int64_t)i * w->ld) + w->n, 0,
               16 * sizeof(uint16_t));
}

static CPU_WEIGHTS(weights)
{
    weigh_pairs(strip);
    fill_up(strip);
}

/* Weights in pieces, done by turns with products of tiles: those run beside vectors. A piece is
 * few enough instructions that the processor sees the next products behind it. */
enum { PIECE_KEYS = 96 };
typedef struct pieces {
    row_pair pair[TILE_ROWS];
    weigh_part *part;
    int32_t n, per_pair, all, done;
    int32_t due, rate; /* in 1 / 256 of a piece */
} pieces;

static ALWAYS_INLINE void weigh_next(pieces *w)
{
    const int32_t from = w->done % w->per_pair * PIECE_KEYS;
    const int32_t past = from + PIECE_KEYS < w->n ? from + PIECE_KEYS : w->n;
    w->part(&w->pair[w->done / w->per_pair], from, past);
    w->done++;
}

/* After a step of products. */
static ALWAYS_INLINE void weigh_due(pieces *w)
{
    for (w->due += w->rate; w->due >= 256 && w->done < w->all; w->due -= 256)
        weigh_next(w);
}

/* 0: some row is not like most. */
static int begin_pieces(const cpu_strip_weights *strip, int32_t products, pieces *w)
{
    if (strip->rows % 2)
        return 0;
    w->part = near_part(strip);
    for (int32_t i = 0; i < strip->rows; i += 2) {
        const row_pair r = pair_of(strip, i, 2);
        if (!is_near(&r.row[0]) || !is_near(&r.row[1]))
            return 0;
        w->pair[i / 2] = r;
    }
    w->n = strip->n;
    w->per_pair = (w->n + PIECE_KEYS - 1) / PIECE_KEYS;
    w->all = strip->rows / 2 * w->per_pair;
    w->done = w->due = 0;
    w->rate = (w->all * 256 + products - 1) / products;
    return 1;
}

/* forward's scores with pieces of weights between the products. */
static void scores_between(const void *q, int32_t q_ld, const void *k, int32_t D, int32_t rows,
                           int32_t n_panels, float scale, float *s, int32_t s_ld, pieces *w)
{
    const int32_t depth = (D + TILE_DEPTH - 1) / TILE_DEPTH;
    const char *keys = k;
    for (int32_t p = 0; p < n_panels; p++) {
        ZERO_UNIT();
        for (int32_t d = 0; d < depth; d++, keys += UNIT_BYTES) {
            multiply_unit((const char *)q + d * TILE_BYTES, q_ld * 2, keys);
            weigh_due(w);
        }
        store_unit(s + p * UNIT, s_ld * 4);
    }
    for (int32_t i = 0; i < rows; i++)
        scale_row(s + (int64_t)i * s_ld, n_panels * UNIT, scale);
}

static CPU_OVERLAP(overlap)
{
    const cpu_strip_scores *c = scores;
    const cpu_kernels *block = &LEVEL_NAME(cpu_bf16_tiles);
    const int32_t steps = (c->D + TILE_DEPTH - 1) / TILE_DEPTH
                          + (c->o ? (c->Dv + TILE_DEPTH - 1) / TILE_DEPTH : 0);
    pieces w;
    if (begin_pieces(weights, steps * c->n_panels, &w)) {
        scores_between(c->q, c->q_ld, c->k, c->D, c->rows, c->n_panels, c->scale, c->s, c->ld,
                       &w);
        if (c->o)
            scores_between(c->o, c->o_ld, c->v, c->Dv, c->rows, c->n_panels, c->slope, c->dp,
                           c->ld, &w);
        while (w.done < w.all)
            weigh_next(&w);
    } else {
        block->scores(c->q, c->q_ld, c->k, c->D, c->rows, c->n_panels * UNIT, c->scale, c->s,
                      c->ld);
        if (c->o)
            block->scores(c->o, c->o_ld, c->v, c->Dv, c->rows, c->n_panels * UNIT, c->slope,
                          c->dp, c->ld);
        weigh_pairs(weights);
    }
    fill_up(weights);
}

static CPU_OVERLAP_VALUES(overlap_values)
{
    const cpu_strip_values *c = values;
    const int32_t steps = (c->n + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t o_stride = (int64_t)c->o_ld * 4, p_stride = (int64_t)c->p_ld * 4;
    pieces w;
    if (!begin_pieces(weights, c->rows / UNIT * c->n_panels * steps, &w)) {
        weigh_pairs(weights);
        w.all = w.done = w.due = w.rate = 0;
    }
    for (int32_t r = 0; r < c->rows; r += UNIT)
        for (int32_t d = 0; d < c->n_panels; d++) {
            float *o = c->o + (int64_t)r * c->o_ld + d * UNIT;
            if (c->is_first)
                ZERO_UNIT();
            else
                load_unit(o, o_stride);
            for (int32_t t = 0; t < steps; t++) {
                multiply_unit((const char *)(c->p + (int64_t)r * c->p_ld) + t * TILE_BYTES,
                              p_stride,
                              (const char *)c->v + ((int64_t)t * c->n_panels + d) * UNIT_BYTES);
                weigh_due(&w);
            }
            store_unit(o, o_stride);
        }
    while (w.done < w.all)
        weigh_next(&w);
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
/* take_pairs where all rows and dims are there. */
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
    .step = 2,
    .depth = TILE_DEPTH,
    .is_apart = 1,
    .weights = weights,
    .overlap = overlap,
    .overlap_values = overlap_values,
    .add_values = add_values,
    .stream = stream_strip,
    .end_stream = end_stream,
    .turned = turned,
    .pack_columns = pack_columns,
    .turn_sums = turn_sums,
    .row_dots = ROWS(cpu_row_dots),
    .seen = ROWS(cpu_seen),
    .sum_rows = ROWS(cpu_sum_rows),
    .sum_columns = ROWS(cpu_sum_columns),
    .sum_diagonals = ROWS(cpu_sum_diagonals),
    .store = ROWS(cpu_store_gradient),
};
