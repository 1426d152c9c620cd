/* The forward operation over all waves (forward.h draws the order). A wave is some heads of a
 * run, or all heads of several sequences of a ragged one, whose items are then one list. */
#include "cpu/forward/forward.h"

#include "base/parallel.h"
#include "base/status.h"
#include "cpu/forward/item.h"
#include "cpu/schedule/layout.h"

#include <assert.h>

/* What the work of a wave is counted by, through all its parts. */
typedef enum wave_way { BY_ITEM, BY_ROWS, WAYS } wave_way;

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
    int is_ordered; /* else items are alike, and run in the order of their numbers */
    double work;    /* an estimate, in ns of one thread */
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
        job->weight[n] = cpu_weight_of(&job->live, &box, from, to, own + at->ranges);
    }
}

/* Threads pack keys for themselves where at most FEW_READERS items read each key: packed ahead,
 * keys would go through memory for too few readers. Without a mask they also do where at most
 * PACKERS threads share a head, since keys that another core has packed are slow to read. */
enum { FEW_READERS = 8, MOST_IN_RUN = 16, PACKERS = 2 };

static int is_local(const cpu_job *job, int is_alike)
{
    const cpu_geometry *g = &job->g;
    int64_t keys = 0;
    if (!g->is_shared) /* an item packs for itself alone, or not at all */
        return 0;
    if (job->live.by != CPU_BY_LIMITS) /* one block: none waits for it */
        return g->is_own || (g->key_blocks == 1 && g->own_blocks > 0)
               || (is_alike && g->key_blocks <= g->own_blocks
                   && PACKERS * job->n_heads >= job->plan->threads);
    for (int64_t n = 0; n < items_of(job); n++)
        keys += job->weight[n]; /* of masks with limits: keys, not tiles */
    return keys <= FEW_READERS * job->n_heads * job->run->sizes.KV;
}

/* Of the order, items whose rows the run has; returns how many. How items are cut, and whether
 * they pack for themselves, follows from all rows. */
static int64_t keep_parts(const forward_wave *wave)
{
    const cpu_job *job = &wave->parts[0].job;
    int64_t kept = 0;
    if (!job->run->rows)
        return wave->count[BY_ITEM];
    for (int64_t n = 0; n < wave->count[BY_ITEM]; n++)
        if (plan_part_of(job->run->rows, cpu_item_of(job, wave->order[n]).box.i0))
            wave->order[kept++] = wave->order[n];
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

/* Items next to each other, whose keys overlap, by one thread. */
static void run_neighbours(void *arg, int64_t index, int thread)
{
    const forward_wave *wave = arg;
    const int64_t past = (index + 1) * wave->each;
    for (int64_t n = index * wave->each; n < past && n < wave->count[BY_ITEM]; n++) {
        const int64_t item = wave->is_ordered ? wave->order[n] : n;
        const forward_part *part = part_at(wave, BY_ITEM, item);
        cpu_run_item(&part->job, item - part->first[BY_ITEM], thread);
    }
}

/* Where each part's items and blocks of rows begin, and the weights of its items. */
static void count_items(forward_wave *wave)
{
    int64_t *count = wave->count;
    count[BY_ITEM] = count[BY_ROWS] = 0;
    for (int64_t p = 0; p < wave->n_parts; p++) {
        forward_part *part = &wave->parts[p];
        part->job.weight = wave->weight + count[BY_ITEM];
        part->first[BY_ITEM] = count[BY_ITEM];
        part->first[BY_ROWS] = count[BY_ROWS];
        count[BY_ITEM] += items_of(&part->job);
        count[BY_ROWS] += items_of(&part->job) / part->job.g.splits;
    }
}

/* What a run takes one thread, from the number of its scores, K and V once, and a little for
 * each item. Masks without limits are ignored, so the estimate is then too high. */
static double work_of(const cpu_job *job)
{
    enum { ITEM_NS = 1000, BYTES_OF_NS = 8 };
    const saccade_sizes *s = &job->run->sizes;
    const int64_t rows = job->g.item_rows * job->g.item_heads;
    const double width = (double)(s->D + s->Dv), heads = (double)job->n_heads;
    double scores = 0;
    for (int64_t n = 0; job->live.by == CPU_BY_LIMITS && n < items_of(job); n++)
        scores += (double)(job->weight[n] * rows);
    if (job->live.by != CPU_BY_LIMITS)
        scores = heads * job->plan->problem.group * (double)s->Q * (double)s->KV;
    return 2 * width * scores / cpu_state_of(job->plan)->needs.kernels->flops_of_ns
           + 4 * width * heads * (double)s->KV / BYTES_OF_NS
           + (double)ITEM_NS * (double)items_of(job);
}

/* As many as the work is worth: one that is woken for less comes when all is done. */
static int threads_of(const forward_wave *wave)
{
    enum { NS_OF_THREAD = 8000 };
    const double worth = 1 + wave->work / NS_OF_THREAD;
    return worth < wave->plan->threads ? (int)worth : wave->plan->threads;
}

/* Which parts pack for themselves, and states of the others. */
static int open_parts(forward_wave *wave)
{
    int any_local = 0;
    wave->work = 0;
    for (int64_t p = 0; p < wave->n_parts; p++) {
        cpu_job *job = &wave->parts[p].job;
        job->is_local = is_local(job, !wave->is_ordered);
        wave->work += work_of(job);
        if (wave->n_parts > 1)
            weigh_by_rows(job);
        any_local |= job->is_local;
        cpu_open_wave(job);
    }
    return any_local;
}

/* Items that differ in nothing but the rows and keys they begin at. */
static int are_alike(const forward_wave *wave)
{
    const cpu_job *job = &wave->parts[0].job;
    const int is_plain = job->live.by == CPU_BY_MASK && !job->live.mask && !job->live.runs;
    return wave->n_parts == 1 && !job->run->rows
           && (job->g.is_own || (is_plain && job->g.splits == 1));
}

/* About so many, in whole parts of a head: a thread that begins within one packs it again. */
static int64_t whole_parts(int64_t share, int64_t head_items)
{
    if (share >= head_items)
        return share / head_items * head_items;
    for (int64_t n = share; n < 2 * share && n <= head_items; n++)
        if (head_items % n == 0)
            return n;
    return share;
}

/* How many items run next to each other on one thread: of short keys a thread's whole share,
 * so that it packs those of few heads, and of longer ones two at least. */
static int64_t neighbours(const forward_wave *wave, int any_local)
{
    enum { FINE = 8 }; /* shares of a thread */
    const cpu_geometry *g = &wave->parts[0].job.g;
    const int64_t threads = wave->plan->threads, items = wave->count[BY_ITEM];
    const int64_t whole = (items + threads - 1) / threads, share = items / (FINE * threads) + 1;
    const int64_t each = share < MOST_IN_RUN ? share : MOST_IN_RUN;
    const int is_one_block = wave->n_parts == 1 && g->key_blocks == 1;
    if (wave->n_parts == 1 && g->is_own)
        return g->own_items;
    if (!any_local)
        return 1;
    if (is_one_block && whole <= FINE)
        return whole < g->head_items ? whole : g->head_items;
    if (wave->is_ordered && !is_one_block)
        return each;
    return whole_parts(each == 1 && whole > 2 ? 2 : each, g->head_items);
}

/* Blocks of rows that are weighed sooner than threads wake up. */
enum { FEW_ROWS = 8, FEW_BY_LIMITS = 64 };

static void order_items(forward_wave *wave)
{
    const int by_limits = wave->parts[0].job.live.by == CPU_BY_LIMITS;
    const int64_t few = by_limits ? FEW_BY_LIMITS : FEW_ROWS, rows = wave->count[BY_ROWS];
    wave->is_ordered = !are_alike(wave);
    if (wave->is_ordered)
        par_for(rows, rows <= few ? 1 : wave->plan->threads, weigh_rows, wave);
    if (wave->n_parts > 1) /* whose scratch lies elsewhere */
        cpu_forget_threads(&wave->parts[0].job);
}

static void run_wave(forward_wave *wave)
{
    int64_t *n_items = &wave->count[BY_ITEM];
    count_items(wave);
    order_items(wave);
    const int any_local = open_parts(wave);
    if (wave->is_ordered)
        cpu_order(wave->weight, wave->order, *n_items);
    wave->each = neighbours(wave, any_local);
    *n_items = keep_parts(wave);
    par_for((*n_items + wave->each - 1) / wave->each, threads_of(wave), run_neighbours, wave);
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
    job->states = (_Atomic uint8_t *)(void *)(memory + g->state_off);
    job->partial = memory + g->partial_off;
    job->left = (_Atomic int32_t *)(void *)(memory + g->left_off);
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
    if (!run->rows)
        cpu_cut_evenly(&cpu_state_of(plan)->needs, &run->sizes, &job->g);
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

/* Of a wave of many sequences; one that needs more is a wave alone. Callers may keep a
 * workspace of about this from run to run, where fresh memory is mapped page by page. */
static const size_t most_of_many = (size_t)48 << 20;

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
    const size_t blocks = (size_t)(g->heads * g->key_blocks);
    return g->is_shared && !g->is_own ? blocks * (g->k_bytes + g->v_bytes) : 0;
}

static size_t parts_bytes(const cpu_geometry *g)
{
    return g->splits > 1 ? (size_t)(g->heads * g->head_items) * g->partial_bytes : 0;
}

/* Parts of splits, and how many of each block of rows are left. */
static size_t partial_bytes(const cpu_geometry *g)
{
    const int64_t items = g->splits > 1 ? g->heads * g->head_items : 0;
    return parts_bytes(g) + bytes64(items, sizeof(int32_t));
}

/* What a sequence takes of a wave. */
static size_t part_bytes(const cpu_geometry *g)
{
    return packed_bytes(g) + partial_bytes(g) + 2 * bytes64(g->heads * g->key_blocks, 1)
           + (size_t)(g->heads * g->head_items) * (sizeof(int64_t) + sizeof(int32_t));
}

/* The end of a wave that begins with part `first`: as many parts as fit in `room` bytes, at
 * least one. */
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
        job->left = (_Atomic int32_t *)(void *)(job->partial + parts_bytes(&job->g));
        memory = job->nonfinite + bytes64(job->g.heads * job->g.key_blocks, 1);
        job->states = (_Atomic uint8_t *)(void *)memory;
        memory += bytes64(job->g.heads * job->g.key_blocks, 1);
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
