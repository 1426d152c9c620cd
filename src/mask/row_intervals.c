/* Rows whose live keys are one interval: found by the runs and, in blocks that these leave
 * open, by evaluating the mask, which ends with the first row that has another form. */
#include "mask/mask_build.h"

#include "base/status.h"

#include <stdlib.h>

typedef struct limits_build {
    const saccade_block_mask *mask;
    const mask_runs *runs;
    eval_state *eval;
    int64_t left; /* positions that may still be evaluated */
} limits_build;

/* A row's interval so far. */
typedef struct limits_row {
    int64_t from, past; /* past <= from: none yet */
} limits_row;

/* Keys [from, past) are live; whether they go on where the interval ended. */
static int add_live(limits_row *row, int64_t from, int64_t past)
{
    if (row->past <= row->from)
        row->from = from;
    else if (row->past != from)
        return 0;
    row->past = past;
    return 1;
}

static int add_evaluated(limits_build *x, int32_t kv_offset, int64_t from, int64_t past,
                         limits_row *row)
{
    uint8_t live[EVAL_STRIP];
    for (int64_t at = from; at < past; at += EVAL_STRIP) {
        const int32_t n = (int32_t)(past - at < EVAL_STRIP ? past - at : EVAL_STRIP);
        x->left -= n;
        eval_mask(x->eval, (int32_t)at + kv_offset, n, live);
        for (int32_t i = 0; i < n; i++)
            if (live[i] && !add_live(row, at + i, at + i + 1))
                return 0;
    }
    return x->left >= 0;
}

static int find_row(limits_build *x, int64_t block_row, int32_t kv_offset, limits_row *row)
{
    const mask_runs *r = x->runs;
    const int64_t keys = x->mask->view.sizes.KV;
    for (int64_t i = r->row_begin[block_row]; i < r->row_begin[block_row + 1]; i++) {
        const int64_t from = (int64_t)r->runs[i].first * r->block_kv;
        const int64_t to = from + (int64_t)r->runs[i].count * r->block_kv;
        const int64_t past = to < keys ? to : keys;
        if (r->runs[i].full ? !add_live(row, from, past)
                            : !add_evaluated(x, kv_offset, from, past, row))
            return 0;
    }
    return 1;
}

static int find_head(limits_build *x, int64_t b, int64_t h, int32_t *out)
{
    const mask_view *view = &x->mask->view;
    const mask_runs *r = x->runs;
    const int32_t q_offset = view->q_offset ? view->q_offset[b] : 0;
    const int32_t kv_offset = view->kv_offset ? view->kv_offset[b] : 0;
    eval_head(x->eval, (int32_t)b, (int32_t)h);
    for (int64_t q = 0; q < view->sizes.Q; q++) {
        limits_row row = {0, 0};
        eval_row(x->eval, (int32_t)q + q_offset);
        if (!find_row(x, (b * r->H + h) * r->rows + q / r->block_q, kv_offset, &row))
            return 0;
        out[2 * q] = (int32_t)row.from;
        out[2 * q + 1] = (int32_t)row.past;
    }
    return 1;
}

saccade_status mask_row_limits(const saccade_block_mask *mask, const mask_runs *runs,
                               int64_t most, int32_t **out, saccade_error *err)
{
    *out = NULL;
    (void)err;
    if (!mask->prog || mask->is_imported)
        return SACCADE_OK;
    limits_build x = {.mask = mask, .runs = runs, .left = most};
    const int64_t rows = mask->view.sizes.Q;
    void *memory = aligned_alloc(64, eval_state_bytes(mask->prog));
    int32_t *limits = malloc((size_t)(runs->B * runs->H * rows) * 2 * sizeof *limits);
    int is_found = 1;
    if (memory && limits) {
        x.eval = eval_begin(mask->prog, &mask->view.env, memory);
        for (int64_t i = 0; i < runs->B * runs->H && is_found; i++)
            is_found = find_head(&x, i / runs->H, i % runs->H, limits + i * rows * 2);
    }
    free(memory);
    if (memory && limits && is_found) {
        *out = limits;
        return SACCADE_OK;
    }
    free(limits); /* without memory too: limits only make runs faster */
    return SACCADE_OK;
}
