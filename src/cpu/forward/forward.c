/* The forward operation over all waves (forward.h draws the order). A wave is some heads of a
 * run, or all heads of several sequences of a ragged one, whose items are then one list. */
#include "cpu/forward/forward.h"

#include "base/parallel.h"
#include "base/status.h"
#include "cpu/forward/item.h"
#include "cpu/schedule/layout.h"

#include <assert.h>

/* What the work of a wave is counted by, through all its parts. */
typedef enum wave_way { BY_ITEM, BY_ROWS, BY_BLOCK, WAYS } wave_way;

/* A run, or a sequence of one, and where its work begins in the wave's. */
typedef struct forward_part {
    cpu_job job;
    plan_sequence sequence; /* of ragged runs */
    int64_t first[WAYS];
} forward_part;

typedef struct forward_wave {
    const saccade_plan *plan;
    forward_part *parts;
    int64_t n_parts, count[WAYS];
    int64_t *weight; /* by item */
    int32_t *order;
    int64_t each; /* items next to each other that one thread runs */
} forward_wave;

static forward_part *part_at(const forward_wave *wave, wave_way by, int64_t index)
{
    int64_t lo = 0, hi = wave->n_parts;
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (wave->parts[mid].first[by] <= index)
            lo = mid;
        else
            hi = mid;
    }
    return &wave->parts[lo];
}

static int64_t items_of(const cpu_job *job)
{
    return job->n_heads * job->g.head_items;
}

/* ---- items by weight ---- */

/* All splits of a block of rows. */
static void weigh_rows(void *arg, int64_t index, int thread)
{
    const forward_part *part = part_at(arg, BY_ROWS, index);
    const cpu_job *job = &part->job;
    const cpu_scratch *at = &job->g.scratch;
    char *own = job->threads + (size_t)thread * job->thread_bytes;
    int64_t from, to;
    const int64_t n0 = (index - part->first[BY_ROWS]) * job->g.splits;
    const cpu_box rows = cpu_item_of(job, n0).box;
    cpu_span_of(&job->live, &rows, (double *)(void *)(own + at->values), &from, &to);
    for (int64_t n = n0; n < n0 + job->g.splits; n++) {
        const cpu_box box = cpu_item_of(job, n).box;
        job->weight[n] = cpu_weight_of(&job->live, &box, from, to,
                                       (pass_range *)(void *)(own + at->ranges));
    }
}

/* Where each key is read by no more items than this, threads pack keys for themselves: packing
 * them ahead would send them through memory for too few readers. */
enum { FEW_READERS = 8, MOST_IN_RUN = 16 };

static int is_local(const cpu_job *job)
{
    int64_t keys = 0;
    if (!job->g.is_shared || job->live.by != CPU_BY_LIMITS)
        return 0;
    for (int64_t n = 0; n < items_of(job); n++)
        keys += job->weight[n]; /* of masks with limits: keys, not tiles */
    return keys <= FEW_READERS * job->n_heads * job->run->sizes.KV;
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

/* Items of several sequences differ in their rows too. */
static void weigh_by_rows(const cpu_job *job)
{
    for (int64_t n = 0; n < items_of(job); n++) {
        const cpu_box box = cpu_item_of(job, n).box;
        job->weight[n] *= (box.i1 - box.i0) * (box.h1 - box.h0);
    }
}

/* ---- the phases of a wave ---- */

static void pack_block(void *arg, int64_t index, int thread)
{
    const forward_part *part = part_at(arg, BY_BLOCK, index);
    cpu_pack_block(&part->job, index - part->first[BY_BLOCK], thread);
}

/* Items next to each other, whose keys overlap, by one thread. */
static void run_neighbours(void *arg, int64_t index, int thread)
{
    const forward_wave *wave = arg;
    const int64_t past = (index + 1) * wave->each;
    for (int64_t n = index * wave->each; n < past && n < wave->count[BY_ITEM]; n++) {
        const int64_t item = wave->order[n];
        const forward_part *part = part_at(wave, BY_ITEM, item);
        cpu_run_item(&part->job, item - part->first[BY_ITEM], thread);
    }
}

static void merge_rows(void *arg, int64_t index, int thread)
{
    const forward_part *part = part_at(arg, BY_ROWS, index);
    if (part->job.g.splits > 1)
        cpu_merge_item(&part->job, index - part->first[BY_ROWS], thread);
}

/* Where each part's items and blocks of rows begin, and the weights of its items. */
static void count_items(forward_wave *wave)
{
    int64_t *count = wave->count;
    count[BY_ITEM] = count[BY_ROWS] = count[BY_BLOCK] = 0;
    for (int64_t p = 0; p < wave->n_parts; p++) {
        forward_part *part = &wave->parts[p];
        part->job.weight = wave->weight + count[BY_ITEM];
        part->first[BY_ITEM] = count[BY_ITEM];
        part->first[BY_ROWS] = count[BY_ROWS];
        count[BY_ITEM] += items_of(&part->job);
        count[BY_ROWS] += items_of(&part->job) / part->job.g.splits;
    }
}

/* Which parts are packed ahead; gives whether any is not, and whether any is split. */
static void count_blocks(forward_wave *wave, int *any_local, int *any_split)
{
    *any_local = *any_split = 0;
    for (int64_t p = 0; p < wave->n_parts; p++) {
        forward_part *part = &wave->parts[p];
        cpu_job *job = &part->job;
        job->is_local = is_local(job);
        part->first[BY_BLOCK] = wave->count[BY_BLOCK];
        if (job->g.is_shared && !job->is_local)
            wave->count[BY_BLOCK] += job->n_heads * job->g.key_blocks;
        if (wave->n_parts > 1)
            weigh_by_rows(job);
        *any_local |= job->is_local;
        *any_split |= job->g.splits > 1;
    }
}

enum { FEW = 8 }; /* blocks of rows that are weighed and merged sooner than threads wake up */

static void run_wave(forward_wave *wave)
{
    const int threads = wave->plan->threads;
    int64_t *count = wave->count;
    int any_local, any_split;
    count_items(wave);
    const int few = count[BY_ROWS] <= FEW ? 1 : threads;
    par_for(count[BY_ROWS], few, weigh_rows, wave);
    if (wave->n_parts > 1) /* whose scratch lies elsewhere */
        cpu_forget_threads(&wave->parts[0].job);
    count_blocks(wave, &any_local, &any_split);
    cpu_order(wave->weight, wave->order, count[BY_ITEM]);
    par_for(count[BY_BLOCK], threads, pack_block, wave);
    const int64_t share = count[BY_ITEM] / (8 * threads);
    wave->each = !any_local ? 1 : share < MOST_IN_RUN ? share + 1 : MOST_IN_RUN;
    count[BY_ITEM] = keep_parts(&wave->parts[0].job, wave->order, count[BY_ITEM]);
    par_for((count[BY_ITEM] + wave->each - 1) / wave->each, threads, run_neighbours, wave);
    if (any_split)
        par_for(count[BY_ROWS], few, merge_rows, wave);
}

/* ---- a run, or a sequence alone ---- */

/* All heads, as many at a time as their packed keys have room for. */
static void run_heads(forward_part *part, char *memory)
{
    cpu_job *job = &part->job;
    const cpu_geometry *g = &job->g;
    forward_wave wave = {.plan = job->plan, .parts = part, .n_parts = 1};
    wave.weight = (int64_t *)(void *)(memory + g->weight_off);
    wave.order = (int32_t *)(void *)(memory + g->order_off);
    job->packed = memory + g->packed_off;
    job->nonfinite = memory + g->nonfinite_off;
    job->partial = memory + g->partial_off;
    for (job->head0 = 0; job->head0 < g->heads; job->head0 += g->wave) {
        const int64_t left = g->heads - job->head0;
        job->n_heads = left < g->wave ? left : g->wave;
        run_wave(&wave);
    }
}

static saccade_status forward_whole(const saccade_plan *plan, const plan_run *run,
                                    saccade_error *err)
{
    forward_part part = {.job = {.plan = plan, .run = run}};
    cpu_job *job = &part.job;
    TRY(cpu_live_of(&plan->problem, run, &job->live, err));
    job->g = cpu_geometry_of(&cpu_state_of(plan)->needs, &run->sizes);
    job->threads = (char *)run->workspace + job->g.thread_off;
    job->thread_bytes = job->g.scratch.bytes;
    cpu_forget_threads(job);
    run_heads(&part, run->workspace);
    return SACCADE_OK;
}

/* ---- sequences ---- */

/* Memory of a ragged run: its parts, what a wave holds, the threads' scratch. */
typedef struct ragged_memory {
    size_t wave_off, wave_bytes, thread_off, thread_bytes, bytes;
} ragged_memory;

/* Of a wave of many sequences; one that needs more is a wave alone. */
static const size_t most_of_many = (size_t)256 << 20;

static ragged_memory memory_of(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const cpu_needs *needs = &cpu_state_of(plan)->needs;
    saccade_sizes longest = *sizes;
    ragged_memory m;
    longest.B = 1;
    const cpu_geometry g = cpu_geometry_of(needs, &longest);
    const int64_t B = sizes->B > 1 ? sizes->B : 1;
    const size_t scores =
        bytes64((int64_t)needs->kernels->decode_rows * CPU_BLOCK_KEYS, sizeof(float));
    const size_t one = g.thread_off + 256, few = most_of_many > one ? most_of_many : one;
    size_t end = bytes64(B, sizeof(forward_part));
    m.wave_bytes = (size_t)B > few / one ? few : (size_t)B * one;
    place(m.wave_bytes, &m.wave_off, &end);
    m.thread_bytes = g.scratch.bytes + scores; /* decode of a short one keeps them */
    place((size_t)plan->threads * m.thread_bytes, &m.thread_off, &end);
    m.bytes = end;
    return m;
}

size_t cpu_forward_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    if (!plan->problem.is_ragged)
        return cpu_geometry_of(&cpu_state_of(plan)->needs, sizes).bytes;
    return memory_of(plan, sizes).bytes;
}

static size_t packed_bytes(const cpu_geometry *g)
{
    return g->is_shared ? (size_t)(g->heads * g->key_blocks) * (g->k_bytes + g->v_bytes) : 0;
}

static size_t partial_bytes(const cpu_geometry *g)
{
    return g->splits > 1 ? (size_t)(g->heads * g->head_items) * g->partial_bytes : 0;
}

/* What a sequence takes of a wave. */
static size_t part_bytes(const cpu_geometry *g)
{
    return packed_bytes(g) + partial_bytes(g) + bytes64(g->heads * g->key_blocks, 1)
           + (size_t)(g->heads * g->head_items) * (sizeof(int64_t) + sizeof(int32_t));
}

/* Parts [first, past) that have room together, at least one. */
static int64_t wave_past(const forward_part *parts, int64_t first, int64_t n, size_t room)
{
    int64_t past = first;
    size_t bytes = 256; /* weights and order end at whole lines */
    while (past < n && bytes + part_bytes(&parts[past].job.g) <= room)
        bytes += part_bytes(&parts[past++].job.g);
    return past > first ? past : first + 1;
}

static void run_many(const saccade_plan *plan, forward_part *parts, int64_t n, char *memory)
{
    forward_wave wave = {.plan = plan, .parts = parts, .n_parts = n};
    int64_t n_items = 0;
    for (int64_t p = 0; p < n; p++) {
        parts[p].job.n_heads = parts[p].job.g.heads;
        n_items += items_of(&parts[p].job);
    }
    wave.weight = (int64_t *)(void *)memory;
    memory += bytes64(n_items, sizeof(int64_t));
    wave.order = (int32_t *)(void *)memory;
    memory += bytes64(n_items, sizeof(int32_t));
    for (int64_t p = 0; p < n; p++) {
        cpu_job *job = &parts[p].job;
        job->packed = memory;
        job->partial = job->packed + packed_bytes(&job->g);
        job->nonfinite = job->partial + partial_bytes(&job->g);
        memory = job->nonfinite + bytes64(job->g.heads * job->g.key_blocks, 1);
    }
    run_wave(&wave);
}

/* Every sequence is cut into items as in a run of its own. */
static saccade_status forward_ragged(const saccade_plan *plan, const plan_run *run,
                                     saccade_error *err)
{
    const ragged_memory m = memory_of(plan, &run->sizes);
    char *base = run->workspace;
    forward_part *parts = (forward_part *)(void *)base;
    int64_t n = 0;
    for (int64_t b = 0; b < run->sizes.B; b++) {
        forward_part *part = &parts[n];
        cpu_job *job = &part->job;
        *part = (forward_part){.job = {.plan = plan, .run = &part->sequence.run}};
        plan_sequence_of(run, b, &part->sequence);
        if (part->sequence.run.sizes.Q == 0)
            continue;
        TRY(cpu_live_of(&plan->problem, job->run, &job->live, err));
        job->g = cpu_geometry_of(&cpu_state_of(plan)->needs, &job->run->sizes);
        job->threads = base + m.thread_off;
        job->thread_bytes = m.thread_bytes;
        assert(job->g.scratch.bytes <= m.thread_bytes);
        n++;
    }
    for (int64_t first = 0, past; first < n; first = past) {
        past = wave_past(parts, first, n, m.wave_bytes);
        cpu_forget_threads(&parts[first].job);
        if (past - first == 1)
            run_heads(&parts[first], base + m.wave_off);
        else
            run_many(plan, parts + first, past - first, base + m.wave_off);
    }
    return SACCADE_OK;
}

saccade_status cpu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    return run->ragged ? forward_ragged(plan, run, err) : forward_whole(plan, run, err);
}
