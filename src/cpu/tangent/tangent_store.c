/* Results of an item: out, lse and their rates. O' is relative to c and becomes relative to the
 * mean of the rates, which a sink, held and part of the sum, makes smaller. */
#include "cpu/tangent/tangent.h"

#include <math.h>

/* m log2 e as the exponents of P had it. */
static double exponent_of(const tangent_worker *w, float m)
{
    const int is_fused = w->job->tangent->kernels->block->is_fused && fabsf(m) < CPU_FUSED_MOST;
    return is_fused ? (double)(m * (float)M_LOG2E) : (double)m * M_LOG2E;
}

static void store_stat(const tangent_worker *w, const saccade_tensor *t, int32_t r,
                       double value)
{
    const int64_t i = w->i0 + r;
    if (t)
        ((float *)t->data)[w->b * t->stride[0] + w->h * t->stride[1] + i * t->stride[2]] =
            (float)value;
}

/* Statistics of row r; its sum becomes what O is divided by, and O' relative to all of it. */
static void finish_row(tangent_worker *w, int32_t r)
{
    const tangent_job *job = w->job;
    const plan_run *run = job->run;
    const int32_t o_ld = job->g.o_ld;
    const double sink = plan_sink_of(run, w->b, w->h, w->i0 + r);
    const double l = w->row_l[r];
    const double own = l == 0 ? -INFINITY : exponent_of(w, w->row_m[r]) * M_LN2 + log(l);
    const int has_sink = sink != -INFINITY && !isnan(own);
    const double most = own > sink ? own : sink;
    const double all = has_sink ? most + log(exp(own - most) + exp(sink - most)) : own;
    const double part = l == 0 ? 0 : has_sink ? exp(own - all) : 1; /* of the keys */
    const double mean = l == 0 ? 0 : (w->row_c[r] + w->rest[r] / l) * part;
    store_stat(w, run->lse, r, isnan(l) ? NAN : all);
    store_stat(w, job->t->lse, r, isnan(l) ? NAN : mean);
    if (l == 0)
        return;
    for (int32_t d = 0; d < o_ld; d++)
        w->o_dot[r * o_ld + d] += (float)(w->row_c[r] - mean) * w->o[r * o_ld + d];
    w->row_l[r] = (float)(l / part);
    if (run->dropout.is_on)
        w->row_l[r] /= run->dropout.factor;
}

static void store_rows(const tangent_worker *w, const saccade_tensor *t, const float *from)
{
    if (!t)
        return;
    const int64_t each = (int64_t)saccade_dtype_bytes(t->dtype);
    char *at = (char *)t->data
               + (w->b * t->stride[0] + w->h * t->stride[1] + w->i0 * t->stride[2]) * each;
    w->job->tangent->kernels->block->store_rows(from, w->job->g.o_ld, w->row_l, w->m, t->dtype,
                                                (int32_t)t->shape[3], at, t->stride[2] * each);
}

void tangent_store(tangent_worker *w)
{
    for (int32_t r = 0; r < w->m; r++)
        finish_row(w, r);
    store_rows(w, w->job->run->out, w->o);
    store_rows(w, w->job->t->out, w->o_dot);
}
