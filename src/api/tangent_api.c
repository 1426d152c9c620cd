/* saccade_tangent: arguments into a run, directions and what is to change along them. */
#include "api/api.h"

#include "base/quantize.h"
#include "base/tensor_walk.h"

#include <string.h>

/* f64 where the problem is and the tensor too, else f32 for statistics and captures. */
static saccade_dtype narrow_dtype(const saccade_plan *plan, const saccade_tensor *t)
{
    return plan->problem.dtype == SACCADE_F64 && t->dtype == SACCADE_F64 ? SACCADE_F64
                                                                         : SACCADE_F32;
}

/* It needs no workspace and has second derivatives too. */
static int is_ref(const saccade_plan *plan)
{
    return !plan->solver->tangent_workspace;
}

static saccade_status check_places(const saccade_plan *plan, const saccade_tensor *t,
                                   const char *name, saccade_error *err)
{
    return is_ref(plan) ? api_check_sum(t, name, err) : api_check_output(t, name, err);
}

/* An optional tensor of `like`'s shape, or of rank 3 of its first three lengths. */
static saccade_status check(const saccade_plan *plan, const saccade_tensor *t, const char *name,
                            saccade_dtype dtype, const int64_t *shape, int32_t rank,
                            int is_output, saccade_error *err)
{
    int64_t expected[SACCADE_MAX_RANK] = {0};
    if (!t)
        return SACCADE_OK;
    const api_expected x = {name, dtype, rank, plan->backend->device};
    memcpy(expected, shape, (size_t)rank * sizeof *shape);
    TRY(api_check_tensor(t, &x, expected, err));
    return is_output ? check_places(plan, t, name, err) : SACCADE_OK;
}

static saccade_status check_capture(const saccade_plan *plan, const saccade_binding *given,
                                    const saccade_tensor *capture, int is_output,
                                    saccade_error *err)
{
    const saccade_tensor *t = &given->tensor;
    const api_expected x = {given->name, narrow_dtype(plan, t), capture->rank,
                            plan->backend->device};
    int64_t shape[SACCADE_MAX_RANK];
    memcpy(shape, capture->shape, sizeof shape);
    TRY(api_check_strided(t, &x, shape, err));
    return is_output ? check_places(plan, t, given->name, err) : SACCADE_OK;
}

static saccade_status check_stat(const saccade_plan *plan, const saccade_tensor *t,
                                 const char *name, const int64_t *shape, int is_output,
                                 saccade_error *err)
{
    return t ? check(plan, t, name, narrow_dtype(plan, t), shape, 3, is_output, err)
             : SACCADE_OK;
}

/* A result like q, k or v: of its dtype or f32. */
static saccade_status check_result(const saccade_plan *plan, const saccade_tensor *t,
                                   const char *name, const saccade_tensor *like,
                                   saccade_error *err)
{
    const int is_f32 = t && t->dtype == SACCADE_F32;
    return check(plan, t, name, is_f32 ? SACCADE_F32 : like->dtype, like->shape, 4, 1, err);
}

static saccade_status check_tensors(const saccade_plan *plan, const saccade_tangent_args *a,
                                    const plan_run *run, saccade_error *err)
{
    const saccade_sizes *s = &run->sizes;
    const int64_t out[4] = {s->B, s->H, s->Q, s->Dv};
    const int has_results =
        a->d_q_dot || a->d_k_dot || a->d_v_dot || a->n_d_captures_dot || a->d_lse;
    TRY(check(plan, a->q_dot, "q_dot", run->q->dtype, run->q->shape, 4, 0, err));
    TRY(check(plan, a->k_dot, "k_dot", run->k->dtype, run->k->shape, 4, 0, err));
    TRY(check(plan, a->v_dot, "v_dot", run->v->dtype, run->v->shape, 4, 0, err));
    TRY(check(plan, a->out_dot, "out_dot", plan->problem.out_dtype, out, 4, 1, err));
    TRY(check_stat(plan, a->lse_dot, "lse_dot", out, 1, err));
    TRY(check(plan, a->out, "out", plan->problem.out_dtype, out, 4, 1, err));
    TRY(check_stat(plan, a->lse, "lse", out, 1, err));
    TRY(check(plan, a->d_out, "d_out", plan->problem.d_out_dtype, out, 4, 0, err));
    TRY(check_stat(plan, a->d_lse, "d_lse", out, 0, err));
    FAIL_AT((has_results || a->d_out) && !is_ref(plan), SACCADE_EBACKEND, "d_out", 0, 0,
            "got gradients to change along a direction on back end %s, expected ref",
            plan->backend->name);
    FAIL_AT(has_results && !a->d_out, SACCADE_EINVAL, "d_out", 0, 0,
            "got no tensor, expected one: tangents of gradients or d_lse are given");
    TRY(check_result(plan, a->d_q_dot, "d_q_dot", run->q, err));
    TRY(check_result(plan, a->d_k_dot, "d_k_dot", run->k, err));
    return check_result(plan, a->d_v_dot, "d_v_dot", run->v, err);
}

static int32_t index_of(const mod_fn *fn, const char *name)
{
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        if (strcmp(fn->captures[i].name, name) == 0)
            return (int32_t)i;
    return -1;
}

/* A capture that simplification removed: nothing reads it, so it changes nothing. */
static int is_unread(const saccade_plan *plan, const char *name)
{
    return index_of(plan->problem.score, name) < 0 && index_of(plan->source_score, name) >= 0;
}

static saccade_status check_unread(const saccade_plan *plan, const saccade_tangent_args *a,
                                   const saccade_binding *given, int is_output,
                                   saccade_error *err)
{
    const saccade_tensor *capture = NULL;
    for (int32_t i = 0; i < a->n_bindings; i++)
        if (a->bindings[i].name && strcmp(a->bindings[i].name, given->name) == 0)
            capture = &a->bindings[i].tensor;
    FAIL_AT(!capture, SACCADE_EINVAL, given->name, 0, 0,
            "got a tangent of a capture that is not bound, expected its tensor");
    return check_capture(plan, given, capture, is_output, err);
}

static void clear_unread(const saccade_plan *plan, const saccade_tangent_args *a)
{
    for (int32_t i = 0; i < a->n_d_captures_dot; i++)
        if (is_unread(plan, a->d_captures_dot[i].name))
            tensor_clear(&a->d_captures_dot[i].tensor);
}

/* By capture of the score. */
static saccade_status read_captures(const saccade_plan *plan, const saccade_tangent_args *a,
                                    const plan_run *run, int is_output, saccade_tensor *out,
                                    saccade_error *err)
{
    const mod_fn *score = plan->problem.score;
    const saccade_binding *given = is_output ? a->d_captures_dot : a->captures_dot;
    const int32_t n = is_output ? a->n_d_captures_dot : a->n_captures_dot;
    const char *where = is_output ? "d_captures_dot" : "captures_dot";
    FAIL_AT(n < 0 || n > MOD_MAX_CAPTURES || (n && !given), SACCADE_EINVAL, where, 0, 0,
            "got %d%s, expected 0 to %d and their array", n, given ? "" : " and NULL",
            MOD_MAX_CAPTURES);
    for (int32_t i = 0; i < n; i++) {
        const char *name = given[i].name ? given[i].name : "";
        const int32_t c = index_of(score, name);
        if (is_unread(plan, name)) {
            TRY(check_unread(plan, a, &given[i], is_output, err));
            continue;
        }
        FAIL_AT(c < 0, SACCADE_EINVAL, where, 0, 0,
                "got '%.60s', expected a capture that the score reads", name);
        FAIL_AT(score->captures[c].type != MOD_FLOAT, SACCADE_EINVAL, name, 0, 0,
                "got integers, expected a float capture to have a tangent");
        FAIL_AT(out[c].data, SACCADE_EINVAL, name, 0, 0, "got two of one name, expected one");
        TRY(check_capture(plan, &given[i], &run->score_env.tensors[c], is_output, err));
        out[c] = given[i].tensor;
    }
    return SACCADE_OK;
}

saccade_status saccade_tangent(const saccade_plan *plan, const saccade_tangent_args *args,
                               saccade_error *err)
{
    saccade_tangent_args a;
    saccade_tensor dots[MOD_MAX_CAPTURES] = {{0}}, results[MOD_MAX_CAPTURES] = {{0}};
    api_captures captures;
    plan_run run = {.out = NULL};
    FAIL_AT(!plan || !args, SACCADE_EINVAL, "tangent", 0, 0,
            "got NULL, expected plan and arguments");
    FAIL_AT(!plan->solver->tangent, SACCADE_EBACKEND, "tangent", 0, 0,
            "got a plan of back end %s, expected cpu or ref: no other has a forward mode",
            plan->backend->name);
    FAIL_AT(!is_ref(plan) && !plan->problem.has_tangents, SACCADE_EINVAL, "tangent", 0, 0,
            "got a plan whose problem has no tangents, expected one that says so");
    FAIL_AT(quant_is_dtype(plan->problem.kv_dtype), SACCADE_EBACKEND, "tangent", 0, 0,
            "got kv_dtype %s, expected f32, f16, bf16 or f64: codes have no tangents",
            saccade_dtype_name(plan->problem.kv_dtype));
    FAIL_AT(plan->problem.is_ragged, SACCADE_EBACKEND, "tangent", 0, 0,
            "got a ragged plan, expected one whose batches have one length");
    FAIL_AT(plan->problem.page, SACCADE_EBACKEND, "tangent", 0, 0,
            "got a plan of keys in pages, expected one of keys in one piece");
    saccade_tangent_args_init(&a);
    TRY(RECORD_READ(&a, args, "arguments"));
    const api_inputs in = {.q = a.q,
                           .k = a.k,
                           .v = a.v,
                           .positions = a.positions,
                           .block_mask = a.block_mask,
                           .bindings = a.bindings,
                           .n_bindings = a.n_bindings,
                           .workspace = a.workspace,
                           .workspace_bytes = a.workspace_bytes,
                           .sinks = a.sinks,
                           .dropout = a.dropout};
    TRY(api_read_inputs(plan, &in, &run, &captures, err));
    TRY(check_tensors(plan, &a, &run, err));
    run.out = a.out;
    run.lse = a.lse;
    TRY(read_captures(plan, &a, &run, 0, dots, err));
    TRY(read_captures(plan, &a, &run, 1, results, err));
    TRY(api_read_workspace(&in, plan_tangent_workspace(plan, &run.sizes), &run, err));
    clear_unread(plan, &a);
    const plan_tangents t = {.q = a.q_dot,
                             .k = a.k_dot,
                             .v = a.v_dot,
                             .captures = dots,
                             .out = a.out_dot,
                             .lse = a.lse_dot,
                             .d_out = a.d_out,
                             .d_lse = a.d_lse,
                             .dq = a.d_q_dot,
                             .dk = a.d_k_dot,
                             .dv = a.d_v_dot,
                             .d_captures = results};
    return plan->solver->tangent(plan, &run, &t, err);
}

size_t saccade_plan_tangent_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    if (!plan || !sizes || !plan->problem.has_tangents)
        return 0;
    return api_sizes_hold(plan, sizes) ? plan_tangent_workspace(plan, sizes) : SIZE_MAX;
}
