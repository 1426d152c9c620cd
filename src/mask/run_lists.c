/* Runs of blocks: growing lists while a mask is built, their joining into mask_runs, and the
 * operations that need no mod: transpose, refinement, walking two rows side by side. */
#include "mask/mask_build.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- lists ---- */

saccade_status lists_open(run_lists *lists, int64_t rows, saccade_error *err)
{
    memset(lists, 0, sizeof *lists);
    lists->rows = rows;
    lists->last = malloc((size_t)rows * sizeof *lists->last);
    FAIL_IF_NULL(lists->last);
    memset(lists->last, 0xff, (size_t)rows * sizeof *lists->last);
    return SACCADE_OK;
}

void lists_close(run_lists *lists)
{
    free(lists->entries);
    free(lists->last);
    memset(lists, 0, sizeof *lists);
}

static int grow(run_lists *lists)
{
    const int64_t capacity = lists->capacity ? 2 * lists->capacity : lists->rows + 16;
    run_entry *entries = realloc(lists->entries, (size_t)capacity * sizeof *entries);
    if (!entries) {
        lists->failed = 1;
        return 0;
    }
    lists->entries = entries;
    lists->capacity = capacity;
    return 1;
}

void lists_add(run_lists *lists, int64_t row, int64_t first, int64_t count, int full)
{
    const int64_t last = lists->last[row];
    if (last >= 0) {
        saccade_run *run = &lists->entries[last].run;
        if (run->full == full && run->first + run->count == first) {
            run->count += (int32_t)count;
            return;
        }
    }
    if (lists->failed || (lists->n == lists->capacity && !grow(lists)))
        return;
    lists->last[row] = lists->n;
    lists->entries[lists->n++] = (run_entry){row, {(int32_t)first, (int32_t)count, full}};
}

/* ---- joining ---- */

static mask_runs *runs_alloc(const mask_runs *shape, int64_t n_runs)
{
    const int64_t rows = shape->B * shape->H * shape->rows;
    mask_runs *runs = malloc(sizeof *runs);
    int64_t *row_begin = calloc((size_t)rows + 1, sizeof *row_begin);
    int64_t *row_live = calloc((size_t)rows + 1, sizeof *row_live);
    saccade_run *list = malloc(((size_t)n_runs + 1) * sizeof *list);
    if (!runs || !row_begin || !row_live || !list) {
        free(runs);
        free(row_begin);
        free(row_live);
        free(list);
        return NULL;
    }
    *runs = *shape;
    runs->row_begin = row_begin;
    runs->row_live = row_live;
    runs->runs = list;
    runs->stats = (saccade_block_mask_stats){0};
    runs->stats.runs = n_runs;
    runs->stats.bytes = (int64_t)sizeof *runs + (2 * rows + 2) * (int64_t)sizeof *row_begin
                        + (n_runs + 1) * (int64_t)sizeof *list;
    return runs;
}

void runs_destroy(mask_runs *runs)
{
    if (!runs)
        return;
    free((void *)runs->row_begin);
    free((void *)runs->row_live);
    free((void *)runs->runs);
    free(runs);
}

static void count_blocks(mask_runs *runs)
{
    saccade_block_mask_stats *s = &runs->stats;
    s->blocks = runs->B * runs->H * runs->rows * runs->columns;
    for (int64_t i = 0; i < s->runs; i++)
        *(runs->runs[i].full ? &s->full : &s->partial) += runs->runs[i].count;
    s->sparsity = s->blocks ? 1 - (double)(s->full + s->partial) / (double)s->blocks : 0;
}

saccade_status lists_join(const run_lists *lists, int64_t n, const mask_runs *shape,
                          mask_runs **out, saccade_error *err)
{
    int64_t total = 0, base = 0;
    for (int64_t i = 0; i < n; i++) {
        FAIL_IF(lists[i].failed, SACCADE_ENOMEM, "out of memory");
        total += lists[i].n;
    }
    mask_runs *runs = runs_alloc(shape, total);
    FAIL_IF_NULL(runs);
    int64_t *begin = (int64_t *)runs->row_begin, *live = (int64_t *)runs->row_live;
    saccade_run *list = (saccade_run *)runs->runs;
    for (int64_t i = 0; i < n; base += lists[i++].rows)
        for (int64_t e = 0; e < lists[i].n; e++)
            begin[base + lists[i].entries[e].row + 1]++;
    for (int64_t row = 0; row < base; row++)
        begin[row + 1] += begin[row];
    base = 0;
    for (int64_t i = 0; i < n; base += lists[i++].rows)
        for (int64_t e = 0; e < lists[i].n; e++) { /* begin moves to the row's end */
            const int64_t row = base + lists[i].entries[e].row;
            list[begin[row]++] = lists[i].entries[e].run;
            live[row] += lists[i].entries[e].run.count;
        }
    memmove(begin + 1, begin, (size_t)base * sizeof *begin);
    begin[0] = 0;
    count_blocks(runs);
    *out = runs;
    return SACCADE_OK;
}

int64_t runs_row(const mask_runs *runs, int64_t b, int64_t h, int64_t row,
                 const saccade_run **first)
{
    const int64_t head = (runs->B == 1 ? 0 : b) * runs->H + (runs->H == 1 ? 0 : h);
    const int64_t at = head * runs->rows + row;
    *first = runs->runs + runs->row_begin[at];
    return runs->row_begin[at + 1] - runs->row_begin[at];
}

/* ---- walking ---- */

static int kind_at(const saccade_run *runs, int64_t n, int64_t *i, int64_t column,
                   int64_t *until)
{
    while (*i < n && (int64_t)runs[*i].first + runs[*i].count <= column)
        ++*i;
    if (*i == n)
        return 0;
    const int inside = runs[*i].first <= column;
    const int64_t change = inside ? (int64_t)runs[*i].first + runs[*i].count : runs[*i].first;
    if (change < *until)
        *until = change;
    return inside ? 1 + (runs[*i].full != 0) : 0;
}

void runs_walk(const saccade_run *a, int64_t n_a, const saccade_run *b, int64_t n_b,
               int64_t columns, run_piece piece, void *arg)
{
    int64_t ia = 0, ib = 0;
    for (int64_t column = 0; column < columns;) {
        int64_t until = columns;
        const int kind_a = kind_at(a, n_a, &ia, column, &until);
        const int kind_b = kind_at(b, n_b, &ib, column, &until);
        piece(arg, column, until, kind_a, kind_b);
        column = until;
    }
}

/* ---- transpose ---- */

/* A sweep over the rows: `since` and `kind` tell each column's open run, and only columns where
 * a row differs from the one before are touched, so the cost is that of both results. */
typedef struct sweep {
    run_lists *lists; /* one row per column */
    int64_t row;
    int64_t *since;
} sweep;

static void close_runs(void *arg, int64_t first, int64_t past, int before, int now)
{
    sweep *s = arg;
    if (before == now)
        return;
    for (int64_t c = first; c < past; c++) {
        if (before)
            lists_add(s->lists, c, s->since[c], s->row - s->since[c], before == 2);
        s->since[c] = s->row;
    }
}

static void sweep_head(const mask_runs *runs, int64_t b, int64_t h, sweep *s)
{
    const saccade_run *before = NULL, *now = NULL;
    int64_t n_before = 0;
    for (s->row = 0; s->row <= runs->rows; s->row++) {
        const int64_t n_now = s->row < runs->rows ? runs_row(runs, b, h, s->row, &now) : 0;
        runs_walk(before, n_before, now, n_now, runs->columns, close_runs, s);
        before = now;
        n_before = n_now;
    }
}

saccade_status runs_transpose(const mask_runs *runs, mask_runs **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const int64_t heads = runs->B * runs->H;
    mask_runs shape = *runs;
    shape.rows = runs->columns;
    shape.columns = runs->rows;
    run_lists *lists = calloc((size_t)heads, sizeof *lists);
    int64_t *since = calloc((size_t)runs->columns, sizeof *since);
    FAIL_IF_GOTO(!lists || !since, SACCADE_ENOMEM, "out of memory");
    for (int64_t i = 0; i < heads; i++) {
        sweep s = {.lists = &lists[i], .since = since};
        TRY_GOTO(lists_open(&lists[i], runs->columns, err));
        sweep_head(runs, i / runs->H, i % runs->H, &s);
    }
    TRY_GOTO(lists_join(lists, heads, &shape, out, err));
    (*out)->stats.proven = runs->stats.proven;
    (*out)->stats.evaluated = runs->stats.evaluated;
    (*out)->stats.unknown = runs->stats.unknown;
    (*out)->stats.evaluated_positions = runs->stats.evaluated_positions;
out:
    for (int64_t i = 0; lists && i < heads; i++)
        lists_close(&lists[i]);
    free(lists);
    free(since);
    return status;
}

/* ---- refinement ---- */

saccade_status runs_refine(const mask_runs *runs, int32_t block_q, int32_t block_kv, int64_t Q,
                           int64_t KV, mask_runs **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const int64_t per_row = runs->block_q / block_q, per_column = runs->block_kv / block_kv;
    mask_runs shape = *runs;
    run_lists list = {0};
    shape.block_q = block_q;
    shape.block_kv = block_kv;
    shape.rows = ceil_div(Q, block_q);
    shape.columns = ceil_div(KV, block_kv);
    TRY(build_check_rows(&shape, err));
    TRY_GOTO(lists_open(&list, shape.B * shape.H * shape.rows, err));
    for (int64_t at = 0; at < list.rows; at++) {
        const int64_t head = at / shape.rows, row = at % shape.rows / per_row;
        const int64_t from = head * runs->rows + row;
        for (int64_t i = runs->row_begin[from]; i < runs->row_begin[from + 1]; i++) {
            const saccade_run *run = &runs->runs[i];
            const int64_t first = run->first * per_column;
            const int64_t past = ((int64_t)run->first + run->count) * per_column;
            lists_add(&list, at, first, (past < shape.columns ? past : shape.columns) - first,
                      run->full);
        }
    }
    TRY_GOTO(lists_join(&list, 1, &shape, out, err));
    (*out)->stats.proven = (*out)->stats.blocks;
out:
    lists_close(&list);
    return status;
}
