/* Plans whose runs compute some rows of a sequence: sizes, block masks and positions of these
 * rows alone, as if they were all there are. Where each stands in the sequence is a table on
 * the device, by blocks of ROW_BLOCK rows (kern/rows.cuh). */
#include "cuda/mask/device_mask.h"

#include <stdlib.h>

uint64_t cu_rows_owner(const saccade_plan *plan)
{
    return plan->rows ? plan->number : 0;
}

int64_t cu_row_count(const plan_rows *rows)
{
    const plan_part *last = rows->n ? &rows->part[rows->n - 1] : NULL;
    return last ? last->row + last->count : 0;
}

saccade_sizes cu_local_sizes(const saccade_plan *plan, const saccade_sizes *sizes)
{
    saccade_sizes local = *sizes;
    if (plan->rows)
        local.Q = cu_row_count(plan->rows);
    return local;
}

saccade_sizes cu_whole_sizes(const saccade_plan *plan, const saccade_sizes *sizes)
{
    saccade_sizes whole = *sizes;
    if (plan->rows)
        whole.Q = plan->rows->all;
    return whole;
}

saccade_status cu_local_run(const saccade_plan *plan, const plan_run *run, plan_run *out,
                            saccade_error *err)
{
    const cu_state *s = plan->state;
    *out = *run;
    out->sizes = cu_local_sizes(plan, &run->sizes);
    FAIL_AT(plan->rows && (!s->row_shift || s->row_device != run->q->device.index),
            SACCADE_EINVAL, "q", 0, 0,
            "got rows of a sequence on device %d, expected saccade_dist_prepare on it first",
            run->q->device.index);
    return SACCADE_OK;
}

/* ---- where rows stand ---- */

static saccade_status copy_shifts(const cu_driver *driver, const int32_t *shift, size_t bytes,
                                  int device, cu_ptr *out, saccade_error *err)
{
    void *pushed;
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status = cu_alloc_filled(driver, bytes, shift, bytes, out, err);
    cu_leave(driver, pushed);
    return status;
}

saccade_status cu_place_rows(const saccade_plan *plan, const cu_driver *driver, int device,
                             saccade_error *err)
{
    cu_state *s = plan->state;
    const plan_rows *rows = plan->rows;
    if (!rows || (s->row_shift && s->row_device == device))
        return SACCADE_OK;
    cu_free_rows(s);
    const int64_t blocks = (cu_row_count(rows) + ROW_BLOCK - 1) / ROW_BLOCK;
    int32_t *shift = calloc((size_t)blocks + 1, sizeof *shift);
    FAIL_IF_NULL(shift);
    for (int32_t i = 0; i < rows->n; i++)
        for (int64_t row = 0; row < rows->part[i].count; row += ROW_BLOCK)
            shift[(rows->part[i].row + row) / ROW_BLOCK] =
                (int32_t)(rows->part[i].first - rows->part[i].row);
    s->row_device = device;
    const saccade_status status = copy_shifts(
        driver, shift, ((size_t)blocks + 1) * sizeof *shift, device, &s->row_shift, err);
    free(shift);
    return status;
}

void cu_free_rows(cu_state *s)
{
    const cu_driver *driver;
    void *pushed;
    if (s->row_shift && cu_get_driver(&driver, NULL) == SACCADE_OK
        && cu_enter(driver, s->row_device, &pushed, NULL) == SACCADE_OK) {
        driver->free(s->row_shift);
        cu_leave(driver, pushed);
    }
    s->row_shift = 0;
}

/* ---- runs of block masks ---- */

static saccade_status open_runs(const mask_runs *r, int64_t rows, int64_t n_runs,
                                cu_selected *out, saccade_error *err)
{
    const int64_t heads = r->B * r->H;
    out->r = *r;
    out->r.rows = rows;
    out->begin = calloc((size_t)(heads * rows) + 1, sizeof *out->begin);
    out->live = calloc((size_t)(heads * rows) + 1, sizeof *out->live);
    out->runs = calloc((size_t)n_runs + 1, sizeof *out->runs);
    FAIL_IF(!out->begin || !out->live || !out->runs, SACCADE_ENOMEM, "out of memory");
    out->r.row_begin = out->begin;
    out->r.row_live = out->live;
    out->r.runs = out->runs;
    return SACCADE_OK;
}

/* Blocks [first, past) of `unit` rows that hold the rows of a part; *to: the first one's place
 * among those that are here. */
static void blocks_of(const plan_part *part, int64_t unit, int64_t *first, int64_t *past,
                      int64_t *to)
{
    *first = part->first / unit;
    *past = (part->first + part->count + unit - 1) / unit;
    *to = part->row / unit;
}

/* Rows of blocks that are here, one after the other. */
static void take_rows(const mask_runs *r, const plan_rows *rows, int64_t unit, cu_selected *out)
{
    int64_t n = 0, at = 0, first, past, to;
    for (int64_t head = 0; head < r->B * r->H; head++)
        for (int32_t i = 0; i < rows->n; i++) {
            blocks_of(&rows->part[i], unit, &first, &past, &to);
            for (int64_t row = head * r->rows + first; row < head * r->rows + past; row++) {
                out->begin[at] = n;
                out->live[at++] = r->row_live[row];
                for (int64_t k = r->row_begin[row]; k < r->row_begin[row + 1]; k++)
                    out->runs[n++] = r->runs[k];
            }
        }
    out->begin[at] = n;
}

/* Of each run of blocks of queries what is here, in places among those. */
static int64_t cut_run(const saccade_run *run, const plan_rows *rows, int64_t unit,
                       saccade_run *to, int64_t *live)
{
    int64_t n = 0, first, past, place;
    for (int32_t i = 0; i < rows->n; i++) {
        blocks_of(&rows->part[i], unit, &first, &past, &place);
        const int64_t from = run->first > first ? run->first : first;
        const int64_t end = run->first + run->count;
        if ((end < past ? end : past) <= from)
            continue;
        if (to) {
            to[n] = *run;
            to[n].first = (int32_t)(from - first + place);
            to[n].count = (int32_t)((end < past ? end : past) - from);
        }
        *live += (end < past ? end : past) - from;
        n++;
    }
    return n;
}

static void take_columns(const mask_runs *r, const plan_rows *rows, int64_t unit,
                         cu_selected *out)
{
    int64_t n = 0;
    const int64_t all = r->B * r->H * r->rows;
    for (int64_t row = 0; row < all; row++) {
        out->begin[row] = n;
        for (int64_t k = r->row_begin[row]; k < r->row_begin[row + 1]; k++)
            n += cut_run(&r->runs[k], rows, unit, out->runs + n, &out->live[row]);
    }
    out->begin[all] = n;
}

saccade_status cu_select_rows(const mask_runs *r, const plan_rows *rows, int unit,
                              int is_transposed, cu_selected *out, saccade_error *err)
{
    const int64_t all = r->B * r->H * r->rows, blocks = (cu_row_count(rows) + unit - 1) / unit;
    int64_t n = r->row_begin[all], live = 0;
    *out = (cu_selected){.runs = NULL};
    if (is_transposed) {
        const int64_t whole = n;
        n = 0;
        for (int64_t k = 0; k < whole; k++)
            n += cut_run(&r->runs[k], rows, unit, NULL, &live);
    }
    TRY(open_runs(r, is_transposed ? r->rows : blocks, n, out, err));
    (is_transposed ? take_columns : take_rows)(r, rows, unit, out);
    if (is_transposed)
        out->r.columns = blocks;
    return SACCADE_OK;
}

void cu_selected_free(cu_selected *s)
{
    free(s->begin);
    free(s->live);
    free(s->runs);
}
