/* The CPU's solver: pack, order, run, merge.
 *
 *     for each wave of (batch, kv head):
 *         weigh items
 *         pack K and V, in parallel over blocks of keys          (or threads do: item_keys.c)
 *         run items, the longest first                            (item.c)
 *         merge the splits of each block of rows, in order of keys */
#include "cpu/cpu.h"

#include "base/parallel.h"
#include "base/status.h"

#include <stdio.h>

static int is_supported(saccade_dtype dtype)
{
    return dtype == SACCADE_F32 || dtype == SACCADE_F16 || dtype == SACCADE_BF16;
}

static int tile_applicable(const plan_problem *problem, int32_t level, char *why)
{
    (void)level;
    if (is_supported(problem->dtype) && is_supported(problem->kv_dtype))
        return 1;
    snprintf(
        why, 160, "the CPU computes in f32, f16 and bf16, got %s",
        saccade_dtype_name(is_supported(problem->dtype) ? problem->kv_dtype : problem->dtype));
    return 0;
}

/* Where there is no encoder or no executable memory the interpreter gives the same. Masks that
 * are limits are not evaluated (item_scores.c), so they need no code. */
static saccade_status compile_mods(const saccade_plan *plan, cpu_state *state,
                                   saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    const mod_fn *mask = state->limits ? NULL : p->mask;
    saccade_error why = {0};
    if (!p->score && !mask)
        return SACCADE_OK;
    const saccade_status status = jit_create(p->score, mask, plan->level, &state->jit, &why);
    if (status == SACCADE_OK || status == SACCADE_EBACKEND)
        return SACCADE_OK;
    return status_fail(err, status, "%s", why.message);
}

/* Streams of tiles; where there is no code for them tiles run block by block. */
static saccade_status compile_stream(const saccade_plan *plan, cpu_state *state,
                                     saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    const cpu_kernels *k = state->kernels;
    const int32_t D = (int32_t)p->sizes.D, Dv = (int32_t)p->sizes.Dv;
    saccade_error why = {0};
    int32_t spills;
    if (!k->stream || (p->score && !state->jit))
        return SACCADE_OK;
    const amx_shape shape = {
        .score = p->score ? jit_graph_of(state->jit) : NULL,
        .frame_at = p->score ? jit_frame_at(state->jit) : 0,
        .depth = (D + 31) / 32,
        .panels = (Dv + 31) / 32,
        .q_stride = (D + 31) / 32 * 32 * k->element,
        .o_stride = (Dv + 31) / 32 * 128,
        .has_narrow = state->limits && !p->score,
        .is_split = k->is_split,
    };
    const saccade_status status = amx_code_create(&shape, &state->code, &spills, &why);
    if (status == SACCADE_OK && state->jit)
        jit_reserve(state->jit, spills);
    if (status == SACCADE_OK || status == SACCADE_EBACKEND)
        return SACCADE_OK;
    return status_fail(err, status, "%s", why.message);
}

static saccade_status tile_create(saccade_plan *plan, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    cpu_state *state = arena_alloc(&plan->arena, sizeof *state);
    FAIL_IF_NULL(state);
    state->kernels = cpu_kernels_for(p, plan->level);
    if (p->score)
        TRY(eval_compile(p->score, &plan->arena, &state->score, err));
    if (p->mask)
        TRY(eval_compile(p->mask, &plan->arena, &state->mask, err));
    if (p->mask && !pass_interval(p->mask, &plan->arena, &state->limits, state->limit_nodes))
        state->limits = NULL;
    if (state->limits)
        state->slopes = cpu_find_slopes(state->limits, &plan->arena);
    FAIL_IF(plan->arena.has_failed, SACCADE_ENOMEM, "out of memory");
    plan->state = state;
    TRY(compile_mods(plan, state, err));
    return compile_stream(plan, state, err);
}

static size_t tile_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return cpu_geometry_of(plan, sizes).bytes;
}

static saccade_status tile_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                                   saccade_error *err)
{
    (void)plan;
    return cpu_prepare_mask(mask, err);
}

/* ---- forward ---- */

/* Keys of [j0, j1) in [first, past). */
static int64_t overlap(int64_t j0, int64_t j1, int64_t first, int64_t past)
{
    j0 = first > j0 ? first : j0;
    j1 = past < j1 ? past : j1;
    return j1 > j0 ? j1 - j0 : 0;
}

/* All splits of a block of rows. */
static void weigh_rows(void *arg, int64_t index, int thread)
{
    cpu_job *job = arg;
    const cpu_state *state = job->plan->state;
    const cpu_scratch at = cpu_scratch_of(job->plan, &job->g);
    char *own = job->memory + job->g.thread_off + (size_t)thread * job->g.thread_bytes;
    int64_t *weight = (int64_t *)(void *)(job->memory + job->g.weight_off), first, past;
    const int by_limits = state->limits && !job->live.is_imported;
    const int64_t n0 = index * job->g.splits;
    for (int64_t n = n0; n < n0 + job->g.splits; n++) {
        const cpu_box box = cpu_item_of(job, n).box;
        if (by_limits && n == n0)
            cpu_span_of_limits(state, job->run, &box, (double *)(void *)(own + at.values),
                               &first, &past);
        weight[n] = by_limits ? overlap(box.j0, box.j1, first, past)
                              : cpu_weight_of(&job->live, &box,
                                              (pass_range *)(void *)(own + at.ranges));
    }
}

/* Where each key is read by this few items, packing is not worth a way through memory. */
enum { FEW_READERS = 8, MOST_IN_RUN = 16 };

static int is_local(const cpu_job *job, int64_t n_heads, int64_t n_items)
{
    const cpu_state *state = job->plan->state;
    const int64_t *weight = (const int64_t *)(const void *)(job->memory + job->g.weight_off);
    int64_t keys = 0;
    if (!job->g.is_shared || !state->limits || job->live.is_imported)
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
    run_items(job, n_items);
    if (g->splits > 1)
        par_for(n_rows, n_rows <= FEW ? 1 : threads, cpu_merge_item, job);
}

static saccade_status tile_forward(const saccade_plan *plan, const plan_run *run,
                                   saccade_error *err)
{
    cpu_job job = {.plan = plan, .run = run, .memory = run->workspace};
    TRY(cpu_live_of(plan, run, &job.live, err));
    job.g = cpu_geometry_of(plan, &run->sizes);
    cpu_begin_threads(&job);
    for (; job.head0 < job.g.heads; job.head0 += job.g.wave) {
        const int64_t left = job.g.heads - job.head0;
        run_wave(&job, left < job.g.wave ? left : job.g.wave);
    }
    return SACCADE_OK;
}

/* ---- explain ---- */

static saccade_status tile_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const cpu_state *state = plan->state;
    const plan_problem *p = &plan->problem;
    const char *engine = state->jit ? "compiled" : "strip interpreter";
    strbuf_printf(out,
                  "method: FlashAttention-2, %s%d rows x %d keys, strips of %d rows\n"
                  "products: %s, panels of %d columns; K and V packed once per key head\n"
                  "score: %s\nmask: %s\n",
                  state->code ? "streams of tiles, else blocks of " : "tiles of ",
                  CPU_BLOCK_ROWS, CPU_BLOCK_KEYS, state->kernels->strip, state->kernels->name,
                  state->kernels->panel, p->score ? engine : "none",
                  !p->mask        ? "none"
                  : state->limits ? "two limits a row, no evaluation"
                                  : engine);
    if (p->sizes.B && p->sizes.Q && p->sizes.KV) {
        const cpu_geometry g = cpu_geometry_of(plan, &p->sizes);
        strbuf_printf(out,
                      "work: %lld items of up to %d rows, keys in %lld split%s\n"
                      "workspace: %zu bytes, %s\n",
                      (long long)(g.heads * g.head_items), g.item_rows * g.item_heads,
                      (long long)g.splits, g.splits > 1 ? "s, merged in order" : "", g.bytes,
                      g.is_shared   ? "K and V packed ahead"
                      : g.is_direct ? "K and V read where they lie"
                                    : "each item packs its own keys");
    }
    if (state->code)
        amx_code_print(state->code, out);
    if (state->jit)
        TRY(jit_print(state->jit, out, err));
    return strbuf_status(out, err);
}

static void tile_destroy(saccade_plan *plan)
{
    const cpu_state *state = plan->state;
    if (!state)
        return;
    amx_code_destroy(state->code);
    jit_destroy(state->jit);
}

static const plan_solver tile = {
    .name = "cpu-tile",
    .backend = "cpu",
    .applicable = tile_applicable,
    .create = tile_create,
    .workspace = tile_workspace,
    .prepare = tile_prepare,
    .forward = tile_forward,
    .explain = tile_explain,
    .destroy = tile_destroy,
};
const plan_solver *const cpu_solvers[] = {&tile, NULL};
