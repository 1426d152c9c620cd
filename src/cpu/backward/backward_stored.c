/* Gradients of captures of which each position has an element of its own: rows of dX times the
 * derivative go to them as they are made, in the gradient's dtype. Tiles, strips and keys that
 * nothing sees are stored as zeros by the owner of the keys, so that nothing is cleared before
 * but what no position reads. A gradient that is added to, or that has a dimension of stride 0
 * or keys apart, is summed as others are (backward_captures.c). */
#include "cpu/backward/backward.h"

#include <math.h>
#include <string.h>

enum { LD = BACKWARD_KEYS };

/* ---- which reads ---- */

int backward_is_spread(const saccade_tensor *t)
{
    for (int32_t d = 0; d < t->rank; d++)
        if (t->shape[d] > 1 && t->stride[d] == 0)
            return 0;
    return 1;
}

static int may_store(const backward_job *job, const backward_read *read,
                     const saccade_tensor *to)
{
    const saccade_sizes *s = &job->run->sizes;
    int64_t by_row, by_key;
    if (!read->is_own || !read->is_dense || !backward_is_spread(to))
        return 0;
    backward_dense_strides(read, to, &by_row, &by_key);
    return by_key == 1 && (s->B == 1 || backward_has_index(job, read, VAR_B))
           && (s->H == 1 || backward_has_index(job, read, VAR_H))
           && backward_is_inside(job, read);
}

void backward_begin_stored(backward_job *job, const plan_gradients *wanted,
                           backward_places *places)
{
    job->has_stored = 0;
    for (uint32_t n = 0; n < job->backward->n_reads; n++) {
        const backward_read *read = &job->backward->reads[n];
        const saccade_tensor *to = &wanted->captures[read->capture];
        job->reads[n].is_stored =
            !(wanted->added & SACCADE_GRADIENT_CAPTURES) && may_store(job, read, to);
        if (!job->reads[n].is_stored)
            continue;
        job->has_stored = 1;
        places->captures[read->capture] = *to;
    }
}

int backward_stores_all(const backward_job *job, int32_t capture)
{
    const saccade_sizes *s = &job->run->sizes;
    const saccade_tensor *to = &job->gradients->captures[capture];
    int64_t count = 1;
    for (int32_t d = 0; d < to->rank; d++)
        count *= to->shape[d];
    for (uint32_t n = 0; n < job->backward->n_reads; n++)
        if (job->reads[n].is_stored && job->backward->reads[n].capture == capture)
            return count == s->B * s->H * s->Q * s->KV;
    return 0;
}

/* ---- rows ---- */

/* Rows from row i of the head on, at the key that the block begins with. */
typedef struct stored_rows {
    char *at;
    int64_t stride; /* bytes */
    size_t each;
    saccade_dtype dtype;
} stored_rows;

static stored_rows rows_of(const backward_worker *w, const backward_read *read, int64_t i)
{
    const backward_job *job = w->job;
    const saccade_tensor *to = &job->gradients->captures[read->capture];
    const size_t each = saccade_dtype_bytes(to->dtype);
    const eval_point at = backward_point_at(job, w->b, w->h, i, w->j0);
    int64_t by_row, by_key;
    backward_dense_strides(read, to, &by_row, &by_key);
    return (stored_rows){(char *)to->data
                             + backward_place_of(job, read, &at, w->values) * (int64_t)each,
                         by_row * (int64_t)each, each, to->dtype};
}

/* Of the keys that there are those that no group has. */
static void clear(const backward_worker *w, const stored_rows *to, int64_t rows,
                  uint32_t groups, int32_t there)
{
    for (int64_t r = 0; r < rows; r++) {
        char *row = to->at + r * to->stride;
        int32_t from = 0;
        cpu_stretch keys;
        for (uint32_t left = groups; backward_take(w, &left, &keys); from = keys.past)
            memset(row + (size_t)from * to->each, 0, (size_t)(keys.from - from) * to->each);
        memset(row + (size_t)from * to->each, 0, (size_t)(there - from) * to->each);
    }
}

/* 0 of dX stays 0, whatever the derivative: as sums of one row, or times an infinite factor. */
static void multiply(const cpu_backward_kernels *k, const float *dx, const float *slope,
                     float factor, int32_t n, float *to)
{
    memset(to, 0, LD * sizeof *to);
    if (slope)
        k->sum_columns(dx, slope, LD, 1, n, to);
    for (int32_t j = 0; j < n && !slope; j++)
        to[j] = dx[j] == 0 ? 0 : factor * dx[j];
}

/* Keys that lie side by side, of rows of the strip. */
static void store_keys(const cpu_backward_kernels *k, const float *dx, const float *slope,
                       float factor, int32_t rows, int32_t n, const stored_rows *to, char *at)
{
    float row[LD];
    if (!slope && isfinite(factor)) {
        k->store(dx, LD, rows, n, factor, 0, to->dtype, at, to->stride);
        return;
    }
    for (int32_t r = 0; r < rows; r++, at += to->stride) {
        multiply(k, dx + r * LD, slope ? slope + r * LD : NULL, factor, n, row);
        k->store(row, LD, 1, n, 1, 0, to->dtype, at, to->stride);
    }
}

void backward_store_strip(backward_worker *w, uint32_t n, int32_t r0, int32_t rows,
                          uint32_t groups)
{
    const backward_job *job = w->job;
    const backward_read *read = &job->backward->reads[n];
    const float factor = (float)backward_factor_of(job, read, w->b, w->h, w->values);
    const float *slope = read->factor ? NULL : w->results[read->result];
    const stored_rows to = rows_of(w, read, w->i0 + r0);
    cpu_stretch keys;
    while (backward_take(w, &groups, &keys))
        store_keys(job->backward->kernels, w->dx + keys.from, slope ? slope + keys.from : NULL,
                   factor, rows, keys.past - keys.from, &to,
                   to.at + (size_t)keys.from * to.each);
}

void backward_store_zeros(backward_worker *w, int64_t i, int64_t rows, uint32_t groups)
{
    const backward_job *job = w->job;
    const int32_t there = backward_keys_there(w);
    if (w->n == there && groups == backward_groups_of(0, there))
        return;
    for (uint32_t n = 0; n < job->backward->n_reads && rows > 0; n++)
        if (job->reads[n].is_stored) {
            const stored_rows to = rows_of(w, &job->backward->reads[n], i);
            clear(w, &to, rows, groups, there);
        }
}
