/* saccade_backward: arguments into a run and the gradients that it is to make. */
#include "api/api.h"

#include "base/tensor_walk.h"

#include <string.h>

static saccade_status check_input(const saccade_plan *plan, const saccade_tensor *t,
                                  const char *name, saccade_dtype dtype, const saccade_sizes *s,
                                  saccade_error *err)
{
    const api_expected expected = {name, dtype, 4, plan->backend->device};
    int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    return api_check_tensor(t, &expected, shape, err);
}

/* lse and its gradient: inputs here, so strides may be anything. */
static saccade_status check_row_input(const saccade_plan *plan, const saccade_tensor *t,
                                      const char *name, const saccade_sizes *s,
                                      saccade_error *err)
{
    const int is_wide = plan->problem.dtype == SACCADE_F64 && t && t->dtype == SACCADE_F64;
    const api_expected expected = {name, is_wide ? SACCADE_F64 : SACCADE_F32, 3,
                                   plan->backend->device};
    int64_t shape[3] = {s->B, s->H, s->Q};
    return api_check_tensor(t, &expected, shape, err);
}

/* Sums over dimensions of stride 0 are made on the host alone, but for those of keys in chunks
 * (is_chunks): check_one_place says which. */
static saccade_status check_places(const saccade_plan *plan, const saccade_tensor *t,
                                   const char *name, int is_chunks, saccade_error *err)
{
    return plan->backend->device == SACCADE_CPU || is_chunks ? api_check_sum(t, name, err)
                                                             : api_check_output(t, name, err);
}

/* A gradient of q, k or v, in the dtype of `like` or in f32. */
static saccade_status check_gradient(const saccade_plan *plan, const saccade_tensor *t,
                                     const char *name, uint32_t bit, const saccade_tensor *like,
                                     saccade_error *err)
{
    int64_t shape[4] = {like->shape[0], like->shape[1], like->shape[2], like->shape[3]};
    const int is_wanted = (plan->problem.gradients & bit) != 0;
    FAIL_AT(!is_wanted != !t, SACCADE_EINVAL, name, 0, 0,
            "got %s tensor, expected %s: the plan's problem %s this gradient", t ? "a" : "no",
            t ? "none" : "one", t ? "does not name" : "names");
    if (!t)
        return SACCADE_OK;
    const int is_f32 = t->dtype == SACCADE_F32 && like->dtype != SACCADE_F64;
    const api_expected expected = {name, is_f32 ? SACCADE_F32 : like->dtype, 4,
                                   plan->backend->device};
    TRY(api_check_tensor(t, &expected, shape, err));
    const int is_chunks = plan->problem.has_chunks && bit != SACCADE_GRADIENT_Q;
    return check_places(plan, t, name, is_chunks, err);
}

/* ---- captures ---- */

static int32_t index_of(const mod_fn *fn, const char *name)
{
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        if (strcmp(fn->captures[i].name, name) == 0)
            return (int32_t)i;
    return -1;
}

/* What a capture's gradient may be besides f32: f64 where the problem is, or the capture's own
 * f16 or bf16. */
static int is_capture_dtype(const saccade_plan *plan, saccade_dtype dtype,
                            const saccade_tensor *capture)
{
    if (dtype == SACCADE_F64)
        return plan->problem.dtype == SACCADE_F64;
    return dtype == capture->dtype && (dtype == SACCADE_F16 || dtype == SACCADE_BF16);
}

static saccade_status check_capture(const saccade_plan *plan, const saccade_binding *given,
                                    const saccade_tensor *capture, saccade_error *err)
{
    const saccade_tensor *t = &given->tensor;
    const int is_own = is_capture_dtype(plan, t->dtype, capture);
    const api_expected expected = {given->name, is_own ? t->dtype : SACCADE_F32, capture->rank,
                                   plan->backend->device};
    int64_t shape[SACCADE_MAX_RANK];
    memcpy(shape, capture->shape, sizeof shape);
    TRY(api_check_strided(t, &expected, shape, err));
    return check_places(plan, t, given->name, 0, err);
}

/* A capture that simplification removed, or whose score is the identity: nothing reads it. */
static uint64_t unread_of(const saccade_plan *plan, const char *name)
{
    const int32_t i = index_of(plan->source_score, name);
    return i < 0 ? 0 : plan->unread_captures & (uint64_t)1 << i;
}

static saccade_status check_unread(const saccade_plan *plan, const saccade_backward_args *a,
                                   const saccade_binding *given, saccade_error *err)
{
    const saccade_tensor *capture = NULL;
    FAIL_AT(plan->backend->device != SACCADE_CPU, SACCADE_EBACKEND, given->name, 0, 0,
            "got a gradient of a capture that the simplified score does not read, expected "
            "none of it on a GPU: it is 0");
    for (int32_t i = 0; i < a->n_bindings; i++)
        if (a->bindings[i].name && strcmp(a->bindings[i].name, given->name) == 0)
            capture = &a->bindings[i].tensor;
    FAIL_AT(!capture, SACCADE_EINVAL, given->name, 0, 0,
            "got a gradient of a capture that is not bound, expected its tensor");
    return check_capture(plan, given, capture, err);
}

void api_clear_unread(const saccade_plan *plan, const saccade_backward_args *a)
{
    for (int32_t n = 0; n < a->n_d_captures && !(a->accumulate & SACCADE_GRADIENT_CAPTURES);
         n++)
        if (unread_of(plan, a->d_captures[n].name))
            tensor_clear(&a->d_captures[n].tensor);
}

/* By capture of the score; whatever the plan asked for has to be given, so that no gradient is
 * lost by a forgotten name. */
static saccade_status read_captures(const saccade_plan *plan, const saccade_backward_args *a,
                                    const plan_run *run, saccade_tensor *out,
                                    saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    uint64_t given = 0, unread = 0;
    FAIL_AT(a->n_d_captures < 0 || a->n_d_captures > MOD_MAX_CAPTURES
                || (a->n_d_captures && !a->d_captures),
            SACCADE_EINVAL, "d_captures", 0, 0, "got %d%s, expected 0 to %d and their array",
            a->n_d_captures, a->d_captures ? "" : " and NULL", MOD_MAX_CAPTURES);
    for (int32_t n = 0; n < a->n_d_captures; n++) {
        const char *name = a->d_captures[n].name;
        FAIL_AT(!name, SACCADE_EINVAL, "d_captures", 0, 0, "got no name in entry %d", n);
        const int32_t i = index_of(p->score, name);
        const uint64_t is_unread = unread_of(plan, name);
        FAIL_AT(is_unread & unread, SACCADE_EINVAL, name, 0, 0,
                "got two gradients of one name, expected one");
        unread |= is_unread;
        if (is_unread) {
            TRY(check_unread(plan, a, &a->d_captures[n], err));
            continue;
        }
        FAIL_AT(i < 0 || !(p->gradient_captures >> i & 1), SACCADE_EINVAL, name, 0, 0,
                "got a gradient that the plan's problem did not ask for");
        FAIL_AT(given >> i & 1, SACCADE_EINVAL, name, 0, 0,
                "got two gradients of one name, expected one");
        TRY(check_capture(plan, &a->d_captures[n], &run->score_env.tensors[i], err));
        out[i] = a->d_captures[n].tensor;
        given |= (uint64_t)1 << i;
    }
    for (int32_t i = 0; i < MOD_MAX_CAPTURES; i++)
        FAIL_AT((p->gradient_captures & ~given) >> i & 1, SACCADE_EINVAL,
                p->score->captures[i].name, 0, 0,
                "got no tensor for the gradient that the plan's problem asked for");
    return SACCADE_OK;
}

/* Of the shape of sinks, which were read; f32, or on the host their own dtype. */
static saccade_status check_sinks(const saccade_plan *plan, const saccade_backward_args *a,
                                  saccade_error *err)
{
    static const char name[] = "d_sinks";
    const saccade_tensor *t = a->d_sinks, *like = a->sinks;
    const int is_wanted = (plan->problem.gradients & SACCADE_GRADIENT_SINKS) != 0;
    FAIL_AT(is_wanted != (t != NULL), SACCADE_EINVAL, name, 0, 0,
            "got %s tensor, expected %s: the plan's problem %s this gradient", t ? "a" : "no",
            t ? "none" : "one", t ? "does not name" : "names");
    if (!t)
        return SACCADE_OK;
    const int is_own = t->dtype == like->dtype && plan->backend->device == SACCADE_CPU;
    const int is_wide = t->dtype == SACCADE_F64 && plan->problem.dtype == SACCADE_F64;
    const api_expected expected = {name, is_own || is_wide ? t->dtype : SACCADE_F32, like->rank,
                                   plan->backend->device};
    int64_t shape[SACCADE_MAX_RANK];
    memcpy(shape, like->shape, sizeof shape);
    TRY(api_check_tensor(t, &expected, shape, err));
    return api_check_output(t, name, err);
}

/* ---- places ---- */

saccade_status api_check_gradients_apart(const saccade_backward_args *a, const plan_run *run,
                                         saccade_error *err)
{
    enum { OTHERS = 4 };
    api_place outputs[OTHERS + MOD_MAX_CAPTURES] = {
        {run->q ? a->d_q : NULL, "d_q", SACCADE_GRADIENT_Q},
        {run->k ? a->d_k : NULL, "d_k", SACCADE_GRADIENT_K},
        {run->k ? a->d_v : NULL, "d_v", SACCADE_GRADIENT_V},
        {a->d_sinks, "d_sinks", SACCADE_GRADIENT_SINKS},
    };
    const api_place inputs[] = {{run->q, "q", 0},
                                {run->k, "k", 0},
                                {run->v, "v", 0},
                                {run->q ? a->out : NULL, "out", 0},
                                {run->q ? a->lse : NULL, "lse", 0},
                                {run->q ? a->d_out : NULL, "d_out", 0},
                                {run->q ? a->d_lse : NULL, "d_lse", 0},
                                {a->sinks, "sinks", 0}};
    for (int32_t i = 0; i < a->n_d_captures; i++)
        outputs[OTHERS + i] = (api_place){&a->d_captures[i].tensor, a->d_captures[i].name,
                                          SACCADE_GRADIENT_CAPTURES};
    return api_check_places(&(api_places){.outputs = outputs,
                                          .inputs = inputs,
                                          .n_outputs = OTHERS + a->n_d_captures,
                                          .n_inputs = sizeof inputs / sizeof inputs[0],
                                          .n_bindings = a->n_bindings,
                                          .added = a->accumulate,
                                          .bindings = a->bindings},
                            err);
}

/* ---- the run ---- */

saccade_status api_read_gradients(const saccade_plan *plan, const saccade_backward_args *a,
                                  int64_t rows, plan_run *run, saccade_tensor *captures,
                                  plan_gradients *out, saccade_error *err)
{
    saccade_sizes own = run->sizes;
    const saccade_sizes *s = &own;
    own.Q = rows;
    if (run->q) {
        own.B = run->q->shape[0];
        TRY(check_input(plan, a->out, "out", plan->problem.out_dtype, s, err));
        TRY(check_row_input(plan, a->lse, "lse", s, err));
        TRY(check_input(plan, a->d_out, "d_out", plan->problem.d_out_dtype, s, err));
        if (a->d_lse)
            TRY(check_row_input(plan, a->d_lse, "d_lse", s, err));
        TRY(check_gradient(plan, a->d_q, "d_q", SACCADE_GRADIENT_Q, run->q, err));
    }
    if (run->k) {
        TRY(check_gradient(plan, a->d_k, "d_k", SACCADE_GRADIENT_K, run->k, err));
        TRY(check_gradient(plan, a->d_v, "d_v", SACCADE_GRADIENT_V, run->v, err));
    }
    TRY(read_captures(plan, a, run, captures, err));
    TRY(check_sinks(plan, a, err));
    run->out = a->out;
    run->lse = a->lse;
    *out = (plan_gradients){.d_out = a->d_out,
                            .d_lse = a->d_lse,
                            .dq = a->d_q,
                            .dk = a->d_k,
                            .dv = a->d_v,
                            .captures = captures,
                            .sinks = a->d_sinks,
                            .positions = &run->positions,
                            .added = a->accumulate};
    return SACCADE_OK;
}

saccade_status api_start_backward(const saccade_plan *plan, const saccade_backward_args *args,
                                  const char *what, api_backward_call *call, saccade_error *err)
{
    FAIL_AT(!plan->problem.gradients, SACCADE_EINVAL, what, 0, 0,
            "got a plan for forward only, expected one whose problem names its gradients");
    memset(call, 0, sizeof *call);
    saccade_backward_args_init(&call->args);
    TRY(RECORD_READ(&call->args, args, "arguments"));
    FAIL_AT(call->args.accumulate & ~(uint32_t)PLAN_GRADIENTS, SACCADE_EINVAL, "accumulate", 0,
            0, "got bits 0x%x, expected SACCADE_GRADIENT_*", (unsigned)call->args.accumulate);
    call->in = (api_inputs)API_INPUTS_OF(call->args);
    return SACCADE_OK;
}

static saccade_status view_tensors(const api_ragged *r, api_backward_call *call,
                                   saccade_error *err)
{
    saccade_backward_args *a = &call->args;
    saccade_tensor *view = call->view;
    TRY(api_view_rows(r, &a->q, 3, "q", view++, err));
    TRY(api_view_keys(r, &a->k, "k", view++, err));
    TRY(api_view_keys(r, &a->v, "v", view++, err));
    TRY(api_view_rows(r, &a->out, 3, "out", view++, err));
    TRY(api_view_rows(r, &a->lse, 2, "lse", view++, err));
    TRY(api_view_rows(r, &a->d_out, 3, "d_out", view++, err));
    TRY(api_view_rows(r, &a->d_lse, 2, "d_lse", view++, err));
    TRY(api_view_rows(r, &a->d_q, 3, "d_q", view++, err));
    TRY(api_view_keys(r, &a->d_k, "d_k", view++, err));
    return api_view_keys(r, &a->d_v, "d_v", view, err);
}

/* Rows of chunks, and sequences of a ragged run, are added up place by place where tables name
 * them again; dimensions of stride 0 across them are not. */
static saccade_status check_one_place(const plan_run *run, const saccade_tensor *t,
                                      const char *name, int is_keys, saccade_error *err)
{
    const int is_paged = run->chunks && run->chunks->is_paged;
    if (!t || !(run->ragged || (is_keys && run->chunks)))
        return SACCADE_OK;
    FAIL_AT(t->shape[2] > 1 && !t->stride[2], SACCADE_EINVAL, name, 0, 0,
            "got stride 0 over rows, expected a place for each: the run is ragged or in pages");
    FAIL_AT((run->ragged || is_paged) && t->shape[0] > 1 && !t->stride[0], SACCADE_EINVAL, name,
            0, 0,
            "got stride 0 in dimension 0, expected a place for each: the run is ragged or "
            "in pages");
    return SACCADE_OK;
}

static saccade_status check_all_places(const plan_run *run, const saccade_backward_args *a,
                                       saccade_error *err)
{
    TRY(check_one_place(run, a->d_q, "d_q", 0, err));
    TRY(check_one_place(run, a->d_k, "d_k", 1, err));
    return check_one_place(run, a->d_v, "d_v", 1, err);
}

/* Sequences add to gradients of captures and sinks one after the other, without losing bits. */
static saccade_status check_ragged_captures(const saccade_plan *plan,
                                            const api_backward_call *call, saccade_error *err)
{
    const saccade_tensor *sinks = call->gradients.sinks;
    FAIL_AT(call->run.ragged && sinks
                && (sinks->dtype == SACCADE_F16 || sinks->dtype == SACCADE_BF16),
            SACCADE_EINVAL, "d_sinks", 0, 0,
            "got a gradient in %s of a ragged run, expected f32",
            saccade_dtype_name(sinks->dtype));
    for (int i = 0; call->run.ragged && i < MOD_MAX_CAPTURES; i++) {
        const saccade_dtype dtype = call->captured[i].dtype;
        FAIL_AT((plan->problem.gradient_captures >> i & 1)
                    && (dtype == SACCADE_F16 || dtype == SACCADE_BF16),
                SACCADE_EINVAL, plan->problem.score->captures[i].name, 0, 0,
                "got a gradient in %s of a ragged run, expected f32",
                saccade_dtype_name(dtype));
    }
    return SACCADE_OK;
}

static saccade_status read_call(const saccade_plan *plan, const saccade_backward_args *args,
                                api_backward_call *call, saccade_error *err)
{
    FAIL_AT(!plan || !args, SACCADE_EINVAL, "backward", 0, 0,
            "got NULL, expected plan and arguments");
    TRY(api_start_backward(plan, args, "backward", call, err));
    TRY(api_read_ragged(plan, call->args.ragged, &call->ragged, err));
    TRY(view_tensors(&call->ragged, call, err));
    call->in = (api_inputs)API_INPUTS_OF(call->args);
    call->in.ragged = &call->ragged;
    TRY(api_read_inputs(plan, &call->in, &call->run, &call->captures, err));
    TRY(api_read_gradients(plan, &call->args, call->run.q->shape[2], &call->run, call->captured,
                           &call->gradients, err));
    TRY(check_all_places(&call->run, &call->args, err));
    return check_ragged_captures(plan, call, err);
}

saccade_status saccade_backward(const saccade_plan *plan, const saccade_backward_args *args,
                                saccade_error *err)
{
    api_backward_call call;
    TRY(read_call(plan, args, &call, err));
    TRY(api_check_gradients_apart(&call.args, &call.run, err));
    call.gradients.is_least = 1;
    TRY(api_read_workspace(&call.in,
                           plan_backward_workspace(plan, &call.run.sizes, &call.gradients),
                           &call.run, err));
    api_clear_unread(plan, &call.args);
    return plan_backward(plan, &call.run, &call.gradients, err);
}

saccade_status saccade_backward_workspace(const saccade_plan *plan,
                                          const saccade_backward_args *args, size_t *bytes,
                                          saccade_error *err)
{
    api_backward_call call;
    FAIL_AT(!bytes, SACCADE_EINVAL, "backward", 0, 0, "got NULL, expected room for a size");
    TRY(read_call(plan, args, &call, err));
    *bytes = plan_backward_workspace(plan, &call.run.sizes, &call.gradients);
    return SACCADE_OK;
}

size_t saccade_plan_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    if (!plan || !sizes || !plan->problem.gradients)
        return 0;
    return api_sizes_hold(plan, sizes) ? plan_backward_workspace(plan, sizes, NULL) : SIZE_MAX;
}
