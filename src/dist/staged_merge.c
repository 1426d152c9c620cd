/* Partial results become one, window after window, in f32:
 *     m = max(lse, lse')   w = exp(lse - m)   w' = exp(lse' - m)
 *     out = (w out + w' out') / (w + w')      lse = m + log(w + w')
 * A dead side (lse -inf) leaves the other as it is. A lse of NaN or +inf makes the row NaN. */
#include "dist/staged.h"

#include "base/convert.h"
#include "base/parallel.h"

#include <math.h>
#include <string.h>

/* ---- two of them ---- */

typedef struct merge_job {
    const plan_rows *rows;
    const saccade_tensor *part_out, *part_lse, *out, *lse;
} merge_job;

static void merge_row(const float *part, float part_lse, int64_t dim, float *out, float *lse)
{
    if (part_lse == -INFINITY)
        return;
    if (*lse == -INFINITY) {
        memcpy(out, part, (size_t)dim * sizeof *out);
        *lse = part_lse;
        return;
    }
    const double m = part_lse > *lse || isnan(part_lse) ? (double)part_lse : (double)*lse;
    const double w = exp((double)*lse - m), w_part = exp((double)part_lse - m);
    const float a = (float)(w / (w + w_part)), b = (float)(w_part / (w + w_part));
    for (int64_t d = 0; d < dim; d++)
        out[d] = a * out[d] + b * part[d];
    *lse = (float)(m + log(w + w_part));
}

/* par_fn over (b, h) and parts. */
static void merge_rows(void *arg, int64_t item, int thread)
{
    const merge_job *job = arg;
    const plan_part *part = &job->rows->part[item % job->rows->n];
    const int64_t rows = job->out->shape[2], dim = job->out->shape[3];
    const int64_t at = item / job->rows->n * rows + part->row;
    const float *part_out = (const float *)job->part_out->data + at * dim;
    const float *part_lse = (const float *)job->part_lse->data + at;
    float *out = (float *)job->out->data + at * dim, *lse = (float *)job->lse->data + at;
    (void)thread;
    for (int64_t i = 0; i < part->count; i++)
        merge_row(part_out + i * dim, part_lse[i], dim, out + i * dim, lse + i);
}

void stage_merge(const plan_rows *rows, const saccade_tensor *part_out,
                 const saccade_tensor *part_lse, const saccade_tensor *out,
                 const saccade_tensor *lse, int threads)
{
    merge_job job = {rows, part_out, part_lse, out, lse};
    par_for(out->shape[0] * out->shape[1] * rows->n, threads, merge_rows, &job);
}

/* ---- the end ---- */

typedef struct finish_job {
    const saccade_dist *dist;
    const plan_run *run;
    const saccade_tensor *out, *lse;
} finish_job;

/* The sink is one more term of the row's sum. Returns what out is multiplied by. */
static float add_sink(double sink, float *lse)
{
    if (sink == -INFINITY)
        return 1;
    const double m = sink > (double)*lse || isnan(sink) ? sink : (double)*lse;
    const double w = exp((double)*lse - m), all = w + exp(sink - m);
    *lse = (float)(m + log(all));
    return (float)(w / all);
}

static void finish_row(const finish_job *job, int64_t b, int64_t h, int64_t i)
{
    const saccade_tensor *out = job->run->out, *to = job->run->lse;
    const int64_t dim = job->out->shape[3];
    const int64_t at = (b * job->out->shape[1] + h) * job->out->shape[2] + i;
    float *row = (float *)job->out->data + at * dim, lse = ((float *)job->lse->data)[at];
    const float factor = add_sink(plan_sink_of(job->run, b, h, i), &lse);
    for (int64_t d = 0; factor != 1 && d < dim; d++)
        row[d] *= factor;
    convert_from_f32(out->dtype, row,
                     (char *)out->data
                         + (b * out->stride[0] + h * out->stride[1] + i * out->stride[2])
                               * (int64_t)saccade_dtype_bytes(out->dtype),
                     dim);
    if (to)
        ((float *)to->data)[b * to->stride[0] + h * to->stride[1] + i * to->stride[2]] = lse;
}

static void finish_head(void *arg, int64_t item, int thread)
{
    const finish_job *job = arg;
    const plan_rows *rows = &job->dist->rows;
    const int64_t H = job->out->shape[1];
    (void)thread;
    for (int32_t n = 0; n < rows->n; n++)
        for (int64_t i = 0; i < rows->part[n].count; i++)
            finish_row(job, item / H, item % H, rows->part[n].row + i);
}

void stage_finish(const saccade_dist *d, const plan_run *run, const saccade_tensor *out,
                  const saccade_tensor *lse)
{
    finish_job job = {d, run, out, lse};
    par_for(out->shape[0] * out->shape[1], d->plan->threads, finish_head, &job);
}
