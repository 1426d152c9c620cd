/* What happens to weights besides softmax: sinks of rows, the sums that are sinks' gradients,
 * and dropout. A row of lse, which includes its sink,
 * and delta = dO . O - dlse adds -exp(sink - lse) delta to its sink's gradient. */
#include "plan/plan.h"

#include "base/convert.h"
#include "base/parallel.h"

#include <math.h>

double plan_sink_of(const plan_run *run, int64_t b, int64_t h, int64_t i)
{
    const plan_sinks *s = &run->sinks;
    if (s->dtype == SACCADE_NONE)
        return -INFINITY;
    const int64_t at = b * s->stride[0] + h * s->stride[1] + i * s->stride[2];
    const double sink = convert_element(
        s->dtype, (const char *)s->data + at * (int64_t)saccade_dtype_bytes(s->dtype));
    return sink == INFINITY ? NAN : sink;
}

double plan_sink_weight(double sink, double lse)
{
    return sink == -INFINITY ? 0 : exp(sink - lse);
}

static const char *element_at(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    const int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
    return (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
}

static int is_row_zero(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    const char *row = element_at(t, b, h, i);
    for (int64_t d = 0; d < t->shape[3]; d++)
        if (convert_element(t->dtype, row + d * (int64_t)saccade_dtype_bytes(t->dtype)) != 0)
            return 0;
    return 1;
}

double plan_sink_delta(const plan_run *run, const plan_gradients *gradients, int64_t b,
                       int64_t h, int64_t i, double delta)
{
    if (isfinite(delta))
        return delta;
    const saccade_tensor *lse = run->lse, *d_lse = gradients->d_lse;
    const double sink = plan_sink_of(run, b, h, i);
    if (sink == -INFINITY)
        return 0;
    if (sink != convert_element(lse->dtype, element_at(lse, b, h, i))
        || !is_row_zero(run->out, b, h, i))
        return delta;
    return d_lse ? -convert_element(d_lse->dtype, element_at(d_lse, b, h, i)) : 0;
}

/* ---- dropout ---- */

dropout_words plan_dropout_head(const plan_problem *problem, const plan_run *run, int64_t b,
                                int64_t h)
{
    return dropout_head(run->dropout.seed, run->dropout.offset,
                        (uint32_t)(b + run->mask_env.b_offset),
                        (uint32_t)(h + problem->h_offset));
}

double plan_dropout_factor(const plan_dropout *d, dropout_words head, int32_t q, int32_t kv)
{
    const int is_kept = dropout_bits(head, (uint32_t)q, (uint32_t)kv) >= d->threshold;
    return is_kept ? (double)d->factor : 0;
}

/* ---- gradients of sinks ---- */

typedef struct sum_job {
    const plan_run *run;
    const saccade_tensor *to;
    int is_added;
    plan_sink_term *term;
    const void *of;
} sum_job;

/* Elements and strides of d_sinks along b, h and i. */
typedef struct sink_shape {
    int64_t n[3], stride[3];
} sink_shape;

static sink_shape shape_of(const saccade_tensor *t)
{
    if (t->rank == 1)
        return (sink_shape){{1, t->shape[0], 1}, {0, t->stride[0], 0}};
    return (sink_shape){{t->shape[0], t->shape[1], t->shape[2]},
                        {t->stride[0], t->stride[1], t->stride[2]}};
}

/* Rows of batch b, in their order: those that lie at `place` among q's, -1: all. */
static double sum_rows(const sum_job *job, int64_t b, int64_t h, int64_t place)
{
    const plan_rows *rows = job->run->rows;
    double sum = 0;
    if (!rows) {
        const int64_t first = place < 0 ? 0 : place;
        const int64_t past = place < 0 ? job->run->sizes.Q : place + 1;
        for (int64_t i = first; i < past; i++)
            sum += job->term(job->of, b, h, i);
        return sum;
    }
    for (int32_t n = 0; n < rows->n; n++)
        for (int64_t i = 0; i < rows->part[n].count; i++)
            if (place < 0 || rows->part[n].row + i == place)
                sum += job->term(job->of, b, h, rows->part[n].first + i);
    return sum;
}

static void add_element(const saccade_tensor *t, int64_t at, double x, int is_added)
{
    char *to = (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
    convert_to_element(t->dtype, is_added ? convert_element(t->dtype, to) + x : x, to);
}

static void sum_head(void *arg, int64_t h, int thread)
{
    const sum_job *job = arg;
    const sink_shape s = shape_of(job->to);
    const int64_t B = job->run->sizes.B;
    (void)thread;
    for (int64_t n = 0; n < s.n[0]; n++)
        for (int64_t i = 0; i < s.n[2]; i++) {
            const int64_t place = job->to->rank == 1 || s.n[2] == 1 ? -1 : i;
            double sum = 0;
            for (int64_t b = s.n[0] == 1 ? 0 : n; b < (s.n[0] == 1 ? B : n + 1); b++)
                sum += sum_rows(job, b, h, place);
            add_element(job->to, n * s.stride[0] + h * s.stride[1] + i * s.stride[2], sum,
                        job->is_added);
        }
}

void plan_sum_sinks(const plan_run *run, const plan_gradients *gradients, plan_sink_term *term,
                    const void *of, int threads)
{
    sum_job job = {run, gradients->sinks, (gradients->added & SACCADE_GRADIENT_SINKS) != 0,
                   term, of};
    par_for(run->sizes.H, threads, sum_head, &job);
}
