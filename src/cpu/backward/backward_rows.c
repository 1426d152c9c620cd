/* What backward needs to know of each row before its tiles: lse, delta, and under interval
 * masks its live keys. */
#include "cpu/backward/backward.h"

#include <math.h>

static float stat_of(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return ((const float *)t->data)[b * t->stride[0] + h * t->stride[1] + i * t->stride[2]];
}

/* The lse that weights are made with. Scores and lse of such a size are so coarse in f32 that
 * they do not tell the weights: of keys that all have a bias of -1e9, each would weigh 1. The
 * row weighs nothing then, as on CUDA (cuda/kern/bwd_row.cuh). */
static float weighing_lse(float lse)
{
    return isfinite(lse) && fabsf(lse) > (float)BACKWARD_LSE_MOST ? INFINITY : lse;
}

double backward_d_lse_of(const backward_job *job, int64_t b, int64_t h, int64_t i)
{
    const saccade_tensor *d_lse = job->gradients->d_lse;
    return d_lse ? (double)stat_of(d_lse, b, h, i) : 0;
}

/* shift: from a row's number to where it lies. */
static void find_stats(const backward_job *job, int64_t b, int64_t h, int64_t i0, int64_t shift,
                       int32_t n)
{
    const plan_run *run = job->run;
    const saccade_tensor *d_lse = job->gradients->d_lse;
    const int64_t at = (b * run->sizes.H + h) * run->sizes.Q + i0;
    const cpu_rows d_out = cpu_rows_from(cpu_rows_of(job->gradients->d_out, b, h), i0 + shift);
    const cpu_rows out = cpu_rows_from(cpu_rows_of(run->out, b, h), i0 + shift);
    job->backward->kernels->row_dots(&d_out, &out, n, job->delta + at);
    for (int32_t r = 0; r < n; r++) {
        job->lse[at + r] = weighing_lse(stat_of(run->lse, b, h, i0 + shift + r));
        if (d_lse)
            job->delta[at + r] -= stat_of(d_lse, b, h, i0 + shift + r);
    }
}

static void find_limits(const backward_job *job, int64_t b, int64_t h, int64_t i0, int32_t n,
                        backward_worker *w)
{
    const plan_run *run = job->run;
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, b);
    const eval_point first = {(int32_t)b, (int32_t)h, (int32_t)i0 + at.q_offset, 0, 0};
    const int64_t row = (b * run->sizes.H + h) * run->sizes.Q + i0;
    cpu_limits *l = &w->limits;
    cpu_find_limits(plan_limits(&job->plan->problem), run, &first, n, at.kv_offset, w->values,
                    l, 0);
    cpu_limit_rows(l, 0, n);
    for (int32_t r = 0; r < n; r++) {
        job->first[row + r] = (int32_t)l->first[r];
        job->past[row + r] = (int32_t)l->past[r];
    }
    const int64_t KV = run->sizes.KV;
    job->spans[(b * run->sizes.H + h) * job->g.row_blocks + i0 / job->g.rows] =
        (backward_span){(int32_t)(l->any_first < KV ? l->any_first : KV), (int32_t)l->any_past,
                        (int32_t)(l->all_first < KV ? l->all_first : KV),
                        (int32_t)(l->all_past < KV ? l->all_past : KV)};
}

/* Rows that the run does not have see nothing. */
static void skip_rows(const backward_job *job, int64_t b, int64_t h, int64_t i0)
{
    const saccade_sizes *s = &job->run->sizes;
    if (job->live.by == CPU_BY_LIMITS)
        job->spans[(b * s->H + h) * job->g.row_blocks + i0 / job->g.rows] =
            (backward_span){(int32_t)s->KV, 0, (int32_t)s->KV, 0};
}

static double sink_term(const void *of, int64_t b, int64_t h, int64_t i)
{
    const backward_job *job = of;
    const saccade_sizes *s = &job->run->sizes;
    const int64_t at = (b * s->H + h) * s->Q + i;
    const plan_part *part = job->run->rows ? plan_part_of(job->run->rows, i) : NULL;
    const int64_t place = part ? part->row + i - part->first : i;
    const double sink = plan_sink_of(job->run, b, h, place);
    if (job->lse[at] == INFINITY) /* weighing_lse's */
        return 0;
    const double delta =
        plan_sink_delta(job->run, job->gradients, b, h, place, (double)job->delta[at]);
    return -plan_sink_weight(sink, (double)job->lse[at]) * delta;
}

void backward_sum_sinks(const backward_job *job, const plan_gradients *gradients)
{
    if (gradients->sinks)
        plan_sum_sinks(job->run, gradients, sink_term, job, job->plan->threads);
}

void backward_find_rows(void *arg, int64_t index, int thread)
{
    const backward_job *job = arg;
    const saccade_sizes *s = &job->run->sizes;
    const int64_t head = index / job->g.row_blocks, b = head / s->H, h = head % s->H;
    const int64_t i0 = index % job->g.row_blocks * job->g.rows;
    const int32_t n = (int32_t)(s->Q - i0 < job->g.rows ? s->Q - i0 : job->g.rows);
    const plan_part *part = job->run->rows ? plan_part_of(job->run->rows, i0) : NULL;
    if (job->run->rows && !part) {
        skip_rows(job, b, h, i0);
        return;
    }
    find_stats(job, b, h, i0, part ? part->row - part->first : 0, n);
    if (job->live.by == CPU_BY_LIMITS)
        find_limits(job, b, h, i0, n, backward_worker_of(job, thread));
}
