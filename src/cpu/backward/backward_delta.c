/* delta once more, from P and dP, before the items of runs in 16 bits whose captures get sums
 * over a row's keys. dO . O has the rounding of O, and of the P that made it, in it, so that a
 * row's dX sum to dlse + r. A sum of dX f over keys then has r times the mean of f too, however
 * little f varies: of slopes times distances of thousands, and where values have a mean, which
 * dO . O has and dX does not, that is more than all the rest. A first pass over the items makes
 *
 *     W = sum p      S = sum p z (dO . v)      delta = S + (dO . O) (1 - p_sink - W) - dlse
 *
 * where 1 - p_sink - W is what weights lack by rounding. If it is not small, other runs hold
 * keys of the row, and dO . O is all that is known of them. */
#include "cpu/backward/backward.h"

#include "base/parallel.h"

#include <math.h>
#include <string.h>

enum { LD = BACKWARD_KEYS, WEIGHTS = 0, PRODUCTS = 1 };
/* What weights of all keys may lack. */
static const double most_lacking = 0x1p-8;

int backward_has_weighing(const saccade_plan *plan, const cpu_backward_plan *backward)
{
    int sums_keys = 0;
    for (uint32_t n = 0; n < backward->n_reads; n++)
        sums_keys |= backward->reads[n].sums_keys;
    return sums_keys && plan->problem.out_dtype != SACCADE_F32;
}

/* The second result is room for dP that is 1 everywhere, of which dX is P. */
cpu_backward_plan backward_weighing_of(const cpu_backward_plan *backward)
{
    static const backward_read reads[] = {
        [WEIGHTS] = {.axis = BACKWARD_ROW}, [PRODUCTS] = {.axis = BACKWARD_ROW}};
    return (cpu_backward_plan){.kernels = backward->kernels,
                               .is_weighing = 1,
                               .reads = reads,
                               .n_reads = 2,
                               .n_results = 2};
}

void backward_begin_weighing(const backward_worker *w, int32_t rows, int32_t from, int32_t past)
{
    for (int32_t r = 0; r < rows; r++)
        for (int32_t j = from; j < past; j++)
            w->results[1][r * LD + j] = 1;
}

void backward_add_weighing(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                           int32_t past)
{
    const cpu_backward_kernels *k = w->job->backward->kernels;
    const int64_t head = w->b * w->job->run->sizes.H + w->h;
    for (uint32_t n = WEIGHTS; n <= PRODUCTS; n++) {
        double *sums = backward_sums_of(w->job, n, w->chunk, head) + w->i0 + r0;
        k->sum_rows(w->dx + from, n == PRODUCTS ? w->dp + r0 * LD + from : NULL, LD, rows,
                    past - from, w->sums);
        for (int32_t r = 0; r < rows; r++)
            sums[r] += (double)w->sums[r];
    }
}

static double sum_of(const backward_job *job, uint32_t read, int64_t head, int64_t i)
{
    double sum = 0;
    for (int64_t chunk = 0; chunk < job->g.chunks; chunk++)
        sum += backward_sums_of(job, read, chunk, head)[i];
    return sum;
}

/* par_fn over heads. */
static void end_head(void *arg, int64_t head, int thread)
{
    const backward_job *job = arg;
    const saccade_sizes *s = &job->run->sizes;
    const int64_t b = head / s->H, h = head % s->H;
    (void)thread;
    for (int64_t i = 0; i < s->Q; i++) {
        const plan_part *part = job->run->rows ? plan_part_of(job->run->rows, i) : NULL;
        if (job->run->rows && !part)
            continue;
        const int64_t place = part ? part->row + i - part->first : i;
        float *delta = &job->delta[head * s->Q + i];
        const double lse = (double)job->lse[head * s->Q + i];
        const double sink = plan_sink_weight(plan_sink_of(job->run, b, h, place), lse);
        const double lacking = 1 - sink - sum_of(job, WEIGHTS, head, i);
        const double d_lse = backward_d_lse_of(job, b, h, place);
        const double exact =
            sum_of(job, PRODUCTS, head, i) + ((double)*delta + d_lse) * lacking - d_lse;
        if (isfinite(lse) && fabs(lacking) <= most_lacking && isfinite(exact))
            *delta = (float)exact;
    }
}

void backward_weigh_rows(const backward_job *job)
{
    const cpu_backward_plan weighing = backward_weighing_of(job->backward);
    backward_job first = *job;
    first.backward = &weighing;
    first.g = backward_geometry_of(job->plan, &weighing, &job->run->sizes);
    first.reads = (backward_read_run *)(void *)(first.memory + first.g.reads_off);
    memset(first.reads, 0, weighing.n_reads * sizeof *first.reads);
    backward_begin_threads(&first);
    backward_run_items(&first);
    par_for(job->run->sizes.B * job->run->sizes.H, job->threads, end_head, &first);
}
