/* The forward operation over all waves of heads (forward.h draws the order). */
#include "cpu/forward/forward.h"

#include "base/parallel.h"
#include "base/status.h"
#include "cpu/forward/item.h"

/* All splits of a block of rows. */
static void weigh_rows(void *arg, int64_t index, int thread)
{
    cpu_job *job = arg;
    const cpu_scratch *at = &job->g.scratch;
    char *own = job->memory + job->g.thread_off + (size_t)thread * at->bytes;
    int64_t *weight = (int64_t *)(void *)(job->memory + job->g.weight_off), from, to;
    const int64_t n0 = index * job->g.splits;
    const cpu_box rows = cpu_item_of(job, n0).box;
    cpu_span_of(&job->live, &rows, (double *)(void *)(own + at->values), &from, &to);
    for (int64_t n = n0; n < n0 + job->g.splits; n++) {
        const cpu_box box = cpu_item_of(job, n).box;
        weight[n] = cpu_weight_of(&job->live, &box, from, to,
                                  (pass_range *)(void *)(own + at->ranges));
    }
}

/* Where each key is read by no more items than this, threads pack keys for themselves: packing
 * them ahead would send them through memory for too few readers. */
enum { FEW_READERS = 8, MOST_IN_RUN = 16 };

static int is_local(const cpu_job *job, int64_t n_heads, int64_t n_items)
{
    const int64_t *weight = (const int64_t *)(const void *)(job->memory + job->g.weight_off);
    int64_t keys = 0;
    if (!job->g.is_shared || job->live.by != CPU_BY_LIMITS)
        return 0;
    for (int64_t n = 0; n < n_items; n++)
        keys += weight[n]; /* of masks with limits: keys, not tiles */
    return keys <= FEW_READERS * n_heads * job->run->sizes.KV;
}

typedef struct item_runs {
    cpu_job *job;
    int64_t n_items, each;
} item_runs;

/* Items next to each other, whose keys overlap, by one thread. */
static void run_neighbours(void *arg, int64_t index, int thread)
{
    const item_runs *runs = arg;
    for (int64_t n = index * runs->each; n < (index + 1) * runs->each && n < runs->n_items; n++)
        cpu_run_item(runs->job, n, thread);
}

static void run_items(cpu_job *job, int64_t n_items)
{
    const int64_t share = n_items / (8 * job->plan->threads);
    const int64_t each = !job->is_local ? 1 : share < MOST_IN_RUN ? share + 1 : MOST_IN_RUN;
    item_runs runs = {job, n_items, each};
    par_for((n_items + each - 1) / each, job->plan->threads, run_neighbours, &runs);
}

/* Of `order`, items whose rows the run has; returns how many. How items are cut, and whether
 * they pack for themselves, follows from all rows. */
static int64_t keep_parts(const cpu_job *job, int32_t *order, int64_t n_items)
{
    int64_t kept = 0;
    if (!job->run->rows)
        return n_items;
    for (int64_t n = 0; n < n_items; n++)
        if (plan_part_of(job->run->rows, cpu_item_of(job, order[n]).box.i0))
            order[kept++] = order[n];
    return kept;
}

enum { FEW = 8 }; /* blocks of rows that are weighed and merged sooner than threads wake up */

static void run_wave(cpu_job *job, int64_t n_heads)
{
    const cpu_geometry *g = &job->g;
    const int threads = job->plan->threads;
    const int64_t n_items = n_heads * g->head_items;
    const int64_t *weight = (const int64_t *)(const void *)(job->memory + g->weight_off);
    int32_t *order = (int32_t *)(void *)(job->memory + g->order_off);
    const int64_t n_rows = n_items / g->splits; /* blocks of them */
    par_for(n_rows, n_rows <= FEW ? 1 : threads, weigh_rows, job);
    cpu_order(weight, order, n_items);
    job->is_local = is_local(job, n_heads, n_items);
    if (g->is_shared && !job->is_local)
        par_for(n_heads * g->key_blocks, threads, cpu_pack_block, job);
    run_items(job, keep_parts(job, order, n_items));
    if (g->splits > 1)
        par_for(n_rows, n_rows <= FEW ? 1 : threads, cpu_merge_item, job);
}

saccade_status cpu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    cpu_job job = {.plan = plan, .run = run, .memory = run->workspace};
    TRY(cpu_live_of(&plan->problem, run, &job.live, err));
    job.g = cpu_geometry_of(&cpu_state_of(plan)->needs, &run->sizes);
    cpu_begin_threads(&job);
    for (; job.head0 < job.g.heads; job.head0 += job.g.wave) {
        const int64_t left = job.g.heads - job.head0;
        run_wave(&job, left < job.g.wave ? left : job.g.wave);
    }
    return SACCADE_OK;
}
