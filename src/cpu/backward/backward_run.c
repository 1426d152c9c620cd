/* A backward run: rows, then waves of (batch, kv head), whose items leave sums of dQ by chunks,
 * added up in the order of chunks. */
#include "cpu/backward/backward.h"

#include "base/parallel.h"
#include "base/status.h"
#include "plan/gradient_sums.h"

#include <string.h>

static int64_t wave_heads(const backward_job *job)
{
    return job->g.wave * job->plan->problem.group;
}

float *backward_partial_of(const backward_job *job, int64_t chunk, int64_t head)
{
    return (float *)(void *)(job->memory + job->g.partial_off)
           + (chunk * wave_heads(job) + head) * job->g.dq_rows * job->g.dq_ld;
}

uint8_t *backward_touched_of(const backward_job *job, int64_t chunk, int64_t head)
{
    return (uint8_t *)(job->memory + job->g.touched_off)
           + (chunk * wave_heads(job) + head) * job->g.row_blocks;
}

/* ---- dQ ---- */

static void add_rows(float *to, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

/* par_fn over blocks of rows of the wave's query heads. The first chunk's sum becomes all. */
static void merge_rows(void *arg, int64_t index, int thread)
{
    const backward_job *job = arg;
    const saccade_sizes *s = &job->run->sizes;
    const int64_t head = index / job->g.row_blocks, block = index % job->g.row_blocks;
    const int64_t group = job->plan->problem.group;
    const int64_t all = backward_head_of(job, head / group) * group + head % group;
    const int64_t rows_each = job->g.rows, i0 = block * rows_each, ld = job->g.dq_ld;
    const int32_t n = (int32_t)(s->Q - i0 < rows_each ? s->Q - i0 : rows_each);
    const saccade_tensor *dq = job->gradients->dq;
    const plan_rows *rows = job->run->rows;
    const plan_part *mine = rows ? plan_part_of(rows, i0) : NULL;
    if (rows && !mine)
        return;
    const int64_t place = mine ? mine->row + i0 - mine->first : i0;
    const cpu_rows to = cpu_rows_of(dq, all / s->H, all % s->H);
    float *sum = NULL;
    for (int64_t chunk = 0; chunk < job->g.chunks; chunk++) {
        float *part = backward_partial_of(job, chunk, head) + i0 * ld;
        if (!backward_touched_of(job, chunk, head)[block])
            continue;
        if (sum)
            add_rows(sum, part, n * ld);
        else
            sum = part;
    }
    if (!sum) {
        sum = backward_partial_of(job, 0, head) + i0 * ld;
        memset(sum, 0, (size_t)(n * ld) * sizeof *sum);
    }
    (void)thread;
    char *at = (char *)dq->data + (to.base - (const char *)dq->data) + place * to.stride;
    const int is_added = (job->gradients->added & SACCADE_GRADIENT_Q) != 0;
    job->backward->kernels->store(sum, (int32_t)ld, n, to.dim, (float)job->plan->problem.scale,
                                  is_added, to.dtype, at, to.stride);
}

/* ---- the run ---- */

static void run_wave(backward_job *job, int64_t n_heads, int is_serial)
{
    const backward_geometry *g = &job->g;
    const int threads = job->threads;
    const int64_t n_items = n_heads * g->chunks;
    par_for(n_items, threads, backward_weigh_item, job);
    int32_t *order = (int32_t *)(void *)(job->memory + g->order_off);
    cpu_order((const int64_t *)(const void *)(job->memory + g->weight_off), order, n_items);
    if (is_serial) /* by index: the order of sums must be one whatever the threads */
        for (int64_t n = 0; n < n_items; n++)
            order[n] = (int32_t)n;
    par_for(n_items, is_serial ? 1 : threads, backward_run_item, job);
    if (job->backward->has_dq)
        par_for(n_heads * job->plan->problem.group * g->row_blocks, threads, merge_rows, job);
}

/* n (batch, KV head) pairs from `first` on, in waves. */
static void run_heads(backward_job *job, int64_t first, int64_t step, int64_t n, int is_serial)
{
    job->step = step;
    for (int64_t at = 0; at < n; at += job->g.wave) {
        job->head0 = first + at * step;
        run_wave(job, n - at < job->g.wave ? n - at : job->g.wave, is_serial);
    }
}

void backward_run_items(backward_job *job)
{
    const backward_order how = backward_order_of(job);
    const int64_t B = job->run->sizes.B, G = job->run->sizes.Hkv;
    switch (how) {
    case BACKWARD_BY_BATCH:
        for (int64_t b = 0; b < B; b++)
            run_heads(job, b * G, 1, G, 0);
        return;
    case BACKWARD_BY_HEAD:
        for (int64_t g = 0; g < G; g++)
            run_heads(job, g, G, B, 0);
        return;
    case BACKWARD_BY_BOTH:
        for (int64_t n = 0; n < B * G; n++)
            run_heads(job, n, 1, 1, 0);
        return;
    default:
        run_heads(job, 0, 1, B * G, how == BACKWARD_SERIAL);
    }
}

saccade_status cpu_backward_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                                    saccade_error *err)
{
    const mask_runs *runs;
    if (!cpu_has_cells(&plan->problem, mask))
        return SACCADE_OK;
    return mask_runs_for(mask, BACKWARD_CELL, BACKWARD_CELL, 1, &runs, err);
}

/* Runs drive blocks of keys, unless the mask has limits. */
static saccade_status find_runs(backward_job *job, saccade_error *err)
{
    const saccade_block_mask *mask = job->run->block_mask;
    if (!cpu_has_cells(&job->plan->problem, mask))
        return SACCADE_OK;
    return mask_runs_prepared(mask, BACKWARD_CELL, BACKWARD_CELL, 1, &job->runs, err);
}

/* Threads that a run is worth, by its five products, as if all scores were live, and by K and V
 * and their gradients once: one that is woken for less comes when all is done. */
static int threads_of(const saccade_plan *plan, const saccade_sizes *s)
{
    enum { NS_OF_THREAD = 8000, BYTES_OF_NS = 8 };
    const double heads = (double)s->B * (double)s->H, kv = (double)s->KV;
    const double flops = 2 * heads * (double)s->Q * kv * (3 * (double)s->D + 2 * (double)s->Dv);
    const double ns = flops / cpu_state_of(plan)->needs.kernels->flops_of_ns
                      + 8 * heads * kv * (double)(s->D + s->Dv) / BYTES_OF_NS;
    const double worth = 1 + ns / NS_OF_THREAD;
    return worth < plan->threads ? (int)worth : plan->threads;
}

/* Where the workspace has the room that saccade_backward_workspace asked for. */
static void begin_fixed(backward_job *job, const plan_gradients *gradients)
{
    const plan_run *run = job->run;
    const size_t before =
        job->g.bytes + backward_places_bytes(job->plan, job->backward, &run->sizes, gradients);
    const size_t bytes = backward_fixed_bytes(job->backward, gradients);
    if (bytes && run->workspace_bytes >= before + bytes)
        backward_begin_fixed(job, job->memory + before);
}

saccade_status cpu_backward(const saccade_plan *plan, const cpu_backward_plan *backward,
                            const plan_run *run, const plan_gradients *gradients,
                            saccade_error *err)
{
    const saccade_sizes *s = &run->sizes;
    backward_places places;
    backward_job job = {.plan = plan,
                        .backward = backward,
                        .run = run,
                        .gradients = gradients,
                        .threads = threads_of(plan, s)};
    TRY(plan_check_places(run, err));
    TRY(cpu_live_of(&plan->problem, run, &job.live, err));
    TRY(find_runs(&job, err));
    job.memory = run->workspace;
    job.g = backward_geometry_of(plan, backward, s);
    job.lse = (float *)(void *)(job.memory + job.g.lse_off);
    job.delta = (float *)(void *)(job.memory + job.g.delta_off);
    job.first = (int32_t *)(void *)(job.memory + job.g.first_off);
    job.past = (int32_t *)(void *)(job.memory + job.g.past_off);
    job.spans = (backward_span *)(void *)(job.memory + job.g.span_off);
    backward_begin_threads(&job);
    if (backward_has_nonfinite(&job)) {
        const cpu_backward_plan careful = backward_careful_of(backward);
        return cpu_backward(plan, &careful, run, gradients, err);
    }
    par_for(s->B * s->H * job.g.row_blocks, job.threads, backward_find_rows, &job);
    if (backward_has_weighing(plan, backward)) {
        backward_weigh_rows(&job);
        backward_begin_threads(&job);
    }
    backward_sum_sinks(&job, gradients);
    job.reads = (backward_read_run *)(void *)(job.memory + job.g.reads_off);
    memset(job.reads, 0, backward->n_reads * sizeof *job.reads);
    backward_begin_places(plan, backward, run, gradients, job.memory + job.g.bytes, &places);
    job.gradients = &places.made;
    backward_begin_stored(&job, gradients, &places);
    backward_begin_captures(&job);
    backward_find_dense(&job);
    begin_fixed(&job, gradients);
    backward_run_items(&job);
    backward_spread(&job);
    backward_end_fixed(&job);
    backward_end_places(plan, backward, run, gradients, &places);
    return SACCADE_OK;
}
