/* Runs by proof: the grid of blocks is subdivided from the top, each box of positions asked of
 * the prover; what is always or never live is settled at once, so the cost follows the mask's
 * boundary, not its area. Left columns are visited before right ones, so that every row's runs
 * come in order. Bands of rows are independent tasks; how many there are changes no result. */
#include "mask/mask_build.h"

#include "base/clock.h"
#include "base/parallel.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

enum { BANDS_PER_THREAD = 8, BAND_MIN = 16 /* rows of blocks */ };
static const int64_t ROWS_MAX = (int64_t)1 << 27; /* of all heads: some 50 bytes each */

/* One task: rows [row0, row0 + lists.rows) of one (b, h). */
typedef struct band {
    run_lists lists;
    int64_t head, row0;
    int64_t evaluated, unknown; /* blocks */
} band;

typedef struct build {
    const mask_source *source;
    int32_t block_q, block_kv;
    int64_t columns;
    band *bands;
    mask_worker *workers;
} build;

/* Blocks [row, row + rows) x [column, column + columns) of a band's head. */
typedef struct grid_box {
    int64_t row, rows, column, columns;
} grid_box;

typedef struct task {
    const build *build;
    band *band;
    mask_worker *worker;
    int64_t q_offset, kv_offset;
} task;

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static pass_box positions_of(const task *t, const grid_box *g)
{
    const mask_source *s = t->build->source;
    const int64_t bq = t->build->block_q, bk = t->build->block_kv;
    const int32_t b = t->worker->b, h = t->worker->h;
    return (pass_box){
        .lo = {b, h, (int32_t)(g->row * bq + t->q_offset),
               (int32_t)(g->column * bk + t->kv_offset)},
        .hi = {b, h, (int32_t)(min64((g->row + g->rows) * bq, s->Q) - 1 + t->q_offset),
               (int32_t)(min64((g->column + g->columns) * bk, s->KV) - 1 + t->kv_offset)}};
}

static void emit(task *t, const grid_box *g, int full)
{
    for (int64_t row = g->row; row < g->row + g->rows; row++)
        lists_add(&t->band->lists, row - t->band->row0, g->column, g->columns, full);
}

static void emit_one(task *t, const grid_box *g, const pass_box *box)
{
    const int seen = resolve_box(t->worker, box);
    if (seen & SEEN_UNKNOWN && (seen & SEEN_BOTH) != SEEN_BOTH) {
        t->band->unknown++;
        emit(t, g, 0);
        return;
    }
    t->band->evaluated += t->worker->has_evaluated;
    if (seen & SEEN_LIVE)
        emit(t, g, !(seen & SEEN_DEAD));
}

/* Where to cut n blocks: at the largest power of two below n. */
static int64_t half_of(int64_t n)
{
    int64_t half = 1;
    while (2 * half < n)
        half *= 2;
    return half;
}

/* Settles blocks that are one to the proof, or a single one. */
static int settle(task *t, const grid_box *g)
{
    const pass_box box = positions_of(t, g);
    const pass_verdict v = pass_prove_next(t->build->source->prover, &box, t->worker->scratch);
    if (v == PASS_ALWAYS)
        emit(t, g, 1);
    else if (v != PASS_NEVER && g->rows == 1 && g->columns == 1)
        emit_one(t, g, &box);
    else if (v != PASS_NEVER)
        return 0;
    watch_settled(t->worker, g->rows * g->columns);
    return 1;
}

static void subdivide(task *t, const grid_box *g)
{
    if (watch_is_stopped(t->worker) || settle(t, g))
        return;
    const int64_t rows = g->rows > 1 && 2 * g->rows > g->columns ? half_of(g->rows) : g->rows;
    const int64_t columns =
        g->columns > 1 && 2 * g->columns > g->rows ? half_of(g->columns) : g->columns;
    for (int64_t c = 0; c < g->columns; c += columns) {
        for (int64_t r = 0; r < g->rows; r += rows) {
            const grid_box part = {g->row + r, min64(rows, g->rows - r), g->column + c,
                                   min64(columns, g->columns - c)};
            subdivide(t, &part);
        }
    }
}

static void build_band(void *arg, int64_t item, int thread)
{
    const build *w = arg;
    const mask_source *s = w->source;
    band *band = &w->bands[item];
    task t = {.build = w, .band = band, .worker = &w->workers[thread]};
    const int64_t b = band->head / s->H;
    const grid_box all = {band->row0, band->lists.rows, 0, w->columns};
    t.q_offset = s->q_offset ? s->q_offset[b] : 0;
    t.kv_offset = s->kv_offset ? s->kv_offset[b] : 0;
    worker_head(t.worker, (int32_t)b, (int32_t)(band->head % s->H));
    const pass_box box = positions_of(&t, &all);
    pass_prove(s->prover, &box, t.worker->scratch); /* fills the scratch */
    subdivide(&t, &all);
}

/* ---- the whole ---- */

/* A budget is spent in one fixed order, so one thread spends it. */
static int threads_for(const mask_source *s)
{
    const int n = s->threads > 0 ? s->threads : par_max_threads();
    return s->budget >= 0 ? 1 : n;
}

static int64_t band_rows(int64_t rows, int64_t heads, int threads)
{
    const int64_t wanted = threads == 1 ? 1 : (int64_t)threads * BANDS_PER_THREAD / heads + 1;
    const int64_t per_band = (rows + wanted - 1) / wanted;
    return threads > 1 && per_band < BAND_MIN ? min64(BAND_MIN, rows) : per_band;
}

static saccade_status open_bands(build *w, int64_t rows, int64_t heads, int64_t per_band,
                                 saccade_error *err)
{
    band *band = w->bands;
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row += per_band, band++) {
            band->head = head;
            band->row0 = row;
            TRY(lists_open(&band->lists, min64(per_band, rows - row), err));
        }
    return SACCADE_OK;
}

static saccade_status join_bands(const build *w, int64_t n_bands, int threads,
                                 const mask_runs *shape, mask_runs **out, saccade_error *err)
{
    run_lists *lists = malloc((size_t)n_bands * sizeof *lists);
    FAIL_IF_NULL(lists);
    for (int64_t i = 0; i < n_bands; i++)
        lists[i] = w->bands[i].lists;
    const saccade_status status = lists_join(lists, n_bands, shape, out, err);
    free(lists);
    if (status != SACCADE_OK)
        return status;
    saccade_block_mask_stats *s = &(*out)->stats;
    for (int64_t i = 0; i < n_bands; i++) {
        s->evaluated += w->bands[i].evaluated;
        s->unknown += w->bands[i].unknown;
    }
    for (int i = 0; i < threads; i++)
        s->evaluated_positions += w->workers[i].positions;
    s->proven = s->blocks - s->evaluated - s->unknown;
    return SACCADE_OK;
}

saccade_status build_check_rows(const mask_runs *shape, saccade_error *err)
{
    const int64_t heads = shape->B * shape->H;
    const int64_t rows = shape->rows > shape->columns ? shape->rows : shape->columns;
    FAIL_AT(rows > ROWS_MAX / heads, SACCADE_ELIMIT, "block", 0, 0,
            "got %lld rows or columns of blocks for each of %lld heads, expected at most 2^27 "
            "together; larger blocks make fewer",
            (long long)rows, (long long)heads);
    return SACCADE_OK;
}

saccade_status build_runs(const mask_source *source, int32_t block_q, int32_t block_kv,
                          mask_runs **out, saccade_error *err)
{
    const int64_t start = clock_ns(), heads = source->B * source->H;
    const int threads = threads_for(source);
    const mask_runs shape = {.block_q = block_q,
                             .block_kv = block_kv,
                             .B = source->B,
                             .H = source->H,
                             .rows = (source->Q + block_q - 1) / block_q,
                             .columns = (source->KV + block_kv - 1) / block_kv};
    TRY(build_check_rows(&shape, err));
    const int64_t per_band = band_rows(shape.rows, heads, threads);
    const int64_t n_bands = heads * ((shape.rows + per_band - 1) / per_band);
    build w = {
        .source = source, .block_q = block_q, .block_kv = block_kv, .columns = shape.columns};
    saccade_status status = SACCADE_OK;
    mask_watch watch;
    w.bands = calloc((size_t)n_bands, sizeof *w.bands);
    w.workers = calloc((size_t)threads, sizeof *w.workers);
    FAIL_IF_GOTO(!w.bands || !w.workers, SACCADE_ENOMEM, "out of memory");
    for (int i = 0; i < threads; i++)
        TRY_GOTO(worker_open(source, &w.workers[i], err));
    TRY_GOTO(open_bands(&w, shape.rows, heads, per_band, err));
    watch_open(&watch, source->progress,
               (double)heads * (double)shape.rows * (double)shape.columns, w.workers, threads);
    par_for(n_bands, threads, build_band, &w);
    TRY_GOTO(watch_close(&watch, err));
    TRY_GOTO(join_bands(&w, n_bands, threads, &shape, out, err));
    (*out)->stats.seconds = (double)(clock_ns() - start) * 1e-9;
out:
    for (int i = 0; w.workers && i < threads; i++)
        worker_close(&w.workers[i]);
    for (int64_t i = 0; w.bands && i < n_bands; i++)
        lists_close(&w.bands[i].lists);
    free(w.workers);
    free(w.bands);
    return status;
}
