/* Backward kernels for f16 on AMX: those of backward_amx_tmpl.c with every number as the sum of
 * two of bf16 (block_amx_f16_tmpl.c), P and dS too, to 16 bits. Products leave out low low, but
 * for S and dP, which are forward's kernels.
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
            const vf x = vf_load(r->s[i] + at);
            p[c][i] = weight_of(x, &r->row[i], is_fused);
            ds[c][i] = score_gradient(x, p[c][i], vf_load(r->dp[i] + at), &r->row[i], NULL,
                                      has_dx ? r->dx[i] + at : NULL);
        }
    for (int c = 0; c < PARTS; c++) {
        uint16_t *to[2] = {(uint16_t *)(void *)(r->dp[0] + j) + c * VF,
                           (uint16_t *)(void *)(rows == 2 ? r->dp[1] + j : none) + c * VF};
        store_parts(r->p + j + c * VF, ld, p[c][0], p[c][1], NULL);
        store_parts(r->ds + j + c * VF, ld, ds[c][0], ds[c][1], to);
    }
}

static ALWAYS_INLINE void weigh_split(const row_pair *r, int rows, const cpu_strip_weights *w,
                                      int is_fused, int has_dx)
{
    const cpu_stretch all = {0, w->n, 0}, *of = w->of ? w->of : &all;
    for (const cpu_stretch *past = of + (w->of ? w->n_of : 1); of < past; of++)
        for (int32_t j = of->from; j < of->past; j += TILE_DEPTH)
            weigh_square(r, rows, j, of->past - j, w->ld, is_fused, has_dx);
}

/* Tiles take 32 rows: those that are not there get weights 0. */
static CPU_WEIGHTS(weights)
{
    const size_t bytes = (size_t)((strip->n + UNIT - 1) / UNIT * UNIT) * sizeof(int32_t);
    for (int32_t i = 0; i < strip->rows; i += 2) {
        const int rows = i + 1 < strip->rows ? 2 : 1;
        row_pair r = pair_of(strip, i, rows);
        r.p += (int64_t)(i / 2) * strip->ld; /* a pair has two lines */
        r.ds += (int64_t)(i / 2) * strip->ld;
        const int is_fused = r.row[0].is_fused && (rows == 1 || r.row[1].is_fused);
        if (rows == 2 && is_fused && !strip->dx)
            weigh_split(&r, 2, strip, 1, 0);
        else
            weigh_split(&r, rows, strip, is_fused, strip->dx != NULL);
    }
    for (int32_t i = (strip->rows + 1) / 2 * 2; i < UNIT; i++) {
        memset((int32_t *)strip->p + (int64_t)i * strip->ld, 0, bytes);
        memset((int32_t *)strip->ds + (int64_t)i * strip->ld, 0, bytes);
    }
}

/* ---- packing ---- */

static CPU_PACK_VALUES(pack_columns)
{
    unsigned nonfinite = 0;
    float *out = to;
    for (int32_t i = 0; i < padded; i += TILE_DEPTH)
        for (int32_t d = 0; d < from->dim; d += UNIT, out += SPLIT_BYTES / 4) {
            uint16_t high[TILE_ROWS][UNIT][2], low[TILE_ROWS][UNIT][2];
            for (int32_t r = 0; r < TILE_DEPTH; r++) {
                bf16 parts[2 * TILE_DEPTH] = {0};
                if (i + r < n)
                    nonfinite |= load_split(from, i + r, d, parts);
                for (int32_t c = 0; c < UNIT; c++) {
                    high[r / 2][c][r % 2] = parts[c];
                    low[r / 2][c][r % 2] = parts[TILE_DEPTH + c];
                }
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
    .step = 1,
    .depth = TILE_DEPTH,
    .is_apart = 1,
    .careful = &ROWS(cpu_backward_f32),
    .weights = weights,
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
