/* The CPU's solver: which problems it takes, what a plan keeps, what it says of itself. */
#include "cpu/cpu.h"

#include "base/quantize.h"
#include "base/status.h"
#include "cpu/backward/backward.h"
#include "cpu/forward/forward.h"
#include "cpu/tangent/tangent.h"

#include <stdio.h>

static int is_supported(saccade_dtype dtype)
{
    return dtype == SACCADE_F32 || dtype == SACCADE_F16 || dtype == SACCADE_BF16;
}

static int tile_applicable(const plan_problem *problem, int32_t level, char *why)
{
    (void)level;
    if (is_supported(problem->dtype)
        && (is_supported(problem->kv_dtype) || quant_is_dtype(problem->kv_dtype)))
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
    const mod_fn *mask = plan_limits(p) ? NULL : p->mask;
    saccade_error why = {0};
    if (!p->score && !mask)
        return SACCADE_OK;
    const saccade_status status =
        jit_create(p->score_facts, mask, plan->level, &state->jit, &why);
    if (status == SACCADE_OK || status == SACCADE_EBACKEND)
        return SACCADE_OK;
    return status_fail(err, status, "%s", why.message);
}

/* Streams of tiles; where there is no code for them tiles run block by block. */
static saccade_status compile_stream(const saccade_plan *plan, cpu_state *state,
                                     saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    const cpu_kernels *k = state->needs.kernels;
    const int32_t D = (int32_t)p->sizes.D, Dv = (int32_t)p->sizes.Dv;
    saccade_error why = {0};
    int32_t spills;
    if (!k->flow || p->weight || (p->score && !state->jit)) /* weights: dropped by blocks */
        return SACCADE_OK;
    if (p->is_invariant) /* rows of a stream share what their exponents are relative to */
        return SACCADE_OK;
    if (p->score && jit_has_shortcuts(state->jit))
        return SACCADE_OK;
    const flow_shape shape = {
        .score = p->score ? jit_graph_of(state->jit) : NULL,
        .frame_at = p->score ? jit_frame_at(state->jit) : 0,
        .depth = (D + 31) / 32,
        .panels = (Dv + 31) / 32,
        .q_stride = (D + 31) / 32 * 32 * k->element,
        .o_stride = (Dv + 31) / 32 * 128,
        .has_narrow = plan_limits(p) && !p->score,
        .is_split = k->is_split,
    };
    const saccade_status status = flow_code_create(&shape, &state->code, &spills, &why);
    if (status == SACCADE_OK && state->jit)
        jit_reserve(state->jit, spills);
    if (status == SACCADE_OK || status == SACCADE_EBACKEND)
        return SACCADE_OK;
    return status_fail(err, status, "%s", why.message);
}

/* After everything is compiled: code says how much of a state it uses. */
static cpu_needs needs_of(const saccade_plan *plan, const cpu_state *state)
{
    const plan_problem *p = &plan->problem;
    return (cpu_needs){
        .kernels = state->needs.kernels,
        .sizes = p->sizes,
        .threads = plan->threads,
        .limit_nodes = plan_limits(p) ? plan_limits(p)->fn->n_nodes : 0,
        .mask_nodes = p->mask ? p->mask->n_nodes : 0,
        .score_bytes = state->score ? eval_state_bytes(state->score) : 0,
        .mask_bytes = state->mask ? eval_state_bytes(state->mask) : 0,
        .jit_bytes = state->jit ? jit_state_bytes(state->jit) : 0,
        .flow_bytes = state->code ? FLOW_BYTES : 0,
        .room_bytes = kv_room(p, CPU_BLOCK_KEYS),
        .is_invariant = p->is_invariant,
    };
}

static saccade_status create_backward(const saccade_plan *plan, arena *memory, cpu_state *state,
                                      saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    state->backward = arena_alloc(memory, sizeof *state->backward);
    FAIL_IF_NULL(state->backward);
    state->backward->has_dq = (p->gradients & SACCADE_GRADIENT_Q) != 0;
    state->backward->has_dk = (p->gradients & SACCADE_GRADIENT_K) != 0;
    state->backward->has_dv = (p->gradients & SACCADE_GRADIENT_V) != 0;
    state->backward->captures = p->gradient_captures;
    return cpu_backward_create(plan, memory, state->backward, err);
}

static saccade_status create_tangent(const saccade_plan *plan, arena *memory, cpu_state *state,
                                     saccade_error *err)
{
    state->tangent = arena_alloc(memory, sizeof *state->tangent);
    FAIL_IF_NULL(state->tangent);
    return cpu_tangent_create(plan, memory, state->tangent, err);
}

static saccade_status make(saccade_plan *plan, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    cpu_state *state = arena_alloc(&plan->arena, sizeof *state);
    FAIL_IF_NULL(state);
    state->needs.kernels = cpu_kernels_for(p, plan->level);
    if (p->score)
        TRY(eval_compile(p->score, &plan->arena, &state->score, err));
    if (p->mask)
        TRY(eval_compile(p->mask, &plan->arena, &state->mask, err));
    plan->state = state;
    TRY(compile_mods(plan, state, err));
    TRY(compile_stream(plan, state, err));
    state->needs = needs_of(plan, state);
    if (p->has_tangents)
        TRY(create_tangent(plan, &plan->arena, state, err));
    return p->gradients ? create_backward(plan, &plan->arena, state, err) : SACCADE_OK;
}

static void tile_destroy(saccade_plan *plan)
{
    const cpu_state *state = plan->state;
    if (!state)
        return;
    if (state->backward)
        cpu_backward_destroy(state->backward);
    if (state->tangent)
        cpu_tangent_destroy(state->tangent);
    flow_code_destroy(state->code);
    jit_destroy(state->jit);
}

static saccade_status tile_create(saccade_plan *plan, saccade_error *err)
{
    const saccade_status status = make(plan, err);
    if (status != SACCADE_OK)
        tile_destroy(plan);
    return status;
}

static size_t tile_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return cpu_forward_workspace(plan, sizes);
}

static saccade_status tile_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                                   saccade_error *err)
{
    TRY(cpu_prepare_mask(&plan->problem, mask, err));
    return cpu_state_of(plan)->backward ? cpu_backward_prepare(plan, mask, err) : SACCADE_OK;
}

static size_t tile_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                                      const plan_gradients *gradients)
{
    return cpu_backward_workspace(plan, cpu_state_of(plan)->backward, sizes, gradients);
}

static saccade_status tile_backward(const saccade_plan *plan, const plan_run *run,
                                    const plan_gradients *gradients, saccade_error *err)
{
    return cpu_backward(plan, cpu_state_of(plan)->backward, run, gradients, err);
}

static size_t tile_tangent_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return cpu_tangent_workspace(plan, cpu_state_of(plan)->tangent, sizes);
}

static saccade_status tile_tangent(const saccade_plan *plan, const plan_run *run,
                                   const plan_tangents *tangents, saccade_error *err)
{
    return cpu_tangent(plan, cpu_state_of(plan)->tangent, run, tangents, err);
}

/* Of forward and, where there is one, of backward. */
static int64_t tile_rows(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const int64_t rows = cpu_geometry_of(&cpu_state_of(plan)->needs, sizes).block_rows;
    int64_t both = rows;
    while (cpu_state_of(plan)->backward && both % cpu_state_of(plan)->backward->kernels->rows)
        both += rows;
    return both;
}

/* ---- explain ---- */

static saccade_status tile_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const cpu_state *state = plan->state;
    const plan_problem *p = &plan->problem;
    const cpu_kernels *k = state->needs.kernels;
    const char *engine = state->jit ? "compiled" : "strip interpreter";
    strbuf_printf(out,
                  "method: FlashAttention-2, %s%d rows x %d keys, strips of %d rows\n"
                  "products: %s, panels of %d columns\n"
                  "score: %s\nmask: %s\n",
                  state->code ? "streams of tiles, else blocks of " : "tiles of ",
                  CPU_BLOCK_ROWS, CPU_BLOCK_KEYS, k->strip, k->name, k->panel,
                  p->score ? engine : "none",
                  !p->mask         ? "none"
                  : plan_limits(p) ? "two limits a row, no evaluation"
                                   : engine);
    if (plan_has_lengths(p)) {
        cpu_geometry g = cpu_geometry_of(&state->needs, &p->sizes);
        cpu_cut_evenly(&state->needs, &p->sizes, &g);
        strbuf_printf(out,
                      "work: %lld items of up to %d rows, keys in %lld split%s\n"
                      "workspace: %zu bytes, %s\n",
                      (long long)(g.heads * g.head_items), g.item_rows * g.item_heads,
                      (long long)g.splits, g.splits > 1 ? "s, merged in order" : "", g.bytes,
                      g.is_own      ? "each thread packs the keys of its heads"
                      : g.is_shared ? "K and V packed where they are first needed"
                      : g.is_decode && quant_is_dtype(p->kv_dtype)
                          ? "K and V converted on the way"
                      : g.is_decode ? "K and V read where they lie"
                                    : "each item packs its own keys");
    }
    if (state->backward)
        cpu_backward_explain(plan, state->backward, out);
    if (state->tangent)
        cpu_tangent_explain(plan, state->tangent, out);
    if (state->code)
        flow_code_print(state->code, out);
    if (state->jit)
        TRY(jit_print(state->jit, out, err));
    return strbuf_status(out, err);
}

static const plan_solver tile = {
    .name = "cpu-tile",
    .applicable = tile_applicable,
    .create = tile_create,
    .workspace = tile_workspace,
    .prepare = tile_prepare,
    .forward = cpu_forward,
    .takes_ragged = 1,
    .backward_workspace = tile_backward_workspace,
    .backward = tile_backward,
    .tangent_workspace = tile_tangent_workspace,
    .tangent = tile_tangent,
    .row_tile = tile_rows,
    .explain = tile_explain,
    .destroy = tile_destroy,
};
const plan_solver *const cpu_solvers[] = {&tile, NULL};
