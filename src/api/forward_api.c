/* saccade_forward: arguments into a run. */
#include "api/api.h"

static saccade_status check_places(const saccade_forward_args *a, saccade_error *err)
{
    const api_place outputs[] = {{a->out, "out", 0},
                                 {a->lse, "lse", 0},
                                 {a->row_max, "row_max", 0},
                                 {a->head_max, "head_max", 0}};
    const api_place inputs[] = {
        {a->q, "q", 0}, {a->k, "k", 0}, {a->v, "v", 0}, {a->sinks, "sinks", 0}};
    return api_check_places(&(api_places){.outputs = outputs,
                                          .inputs = inputs,
                                          .n_outputs = sizeof outputs / sizeof outputs[0],
                                          .n_inputs = sizeof inputs / sizeof inputs[0],
                                          .n_bindings = a->n_bindings,
                                          .bindings = a->bindings},
                            err);
}

saccade_status api_check_outputs(const saccade_plan *plan, const saccade_forward_args *a,
                                 const saccade_sizes *s, saccade_error *err)
{
    const api_expected out = {"out", plan->problem.out_dtype, 4, plan->backend->device};
    int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    TRY(api_check_tensor(a->out, &out, shape, err));
    TRY(api_check_output(a->out, "out", err));
    TRY(api_check_stats(plan, a->lse, "lse", s, err));
    TRY(api_check_stats(plan, a->row_max, "row_max", s, err));
    return check_places(a, err);
}

static saccade_status check_head_max(const saccade_plan *plan, const saccade_tensor *t,
                                     const plan_run *run, saccade_error *err)
{
    const int is_wide = plan->problem.dtype == SACCADE_F64 && t && t->dtype == SACCADE_F64;
    const api_expected expected = {"head_max", is_wide ? SACCADE_F64 : SACCADE_F32, 2,
                                   plan->backend->device};
    int64_t shape[2] = {t && t->rank == 2 && t->shape[0] == 1 ? 1 : run->sizes.B, run->sizes.H};
    FAIL_AT(t && !plan->problem.has_head_max, SACCADE_EINVAL, "head_max", 0, 0,
            "got one, expected NULL: the plan's problem has no head_max");
    if (!t)
        return SACCADE_OK;
    TRY(api_check_tensor(t, &expected, shape, err));
    const int64_t most = run->sizes.B * run->sizes.Q;
    FAIL_AT(!run->row_max && run->ragged && run->ragged->q_first && run->q->shape[2] > most,
            SACCADE_EINVAL, "head_max", 0, 0,
            "got %lld rows in q, expected at most %lld (sequences times the longest), or "
            "row_max beside it",
            (long long)run->q->shape[2], (long long)most);
    return api_check_output(t, "head_max", err);
}

static saccade_status view_tensors(const api_ragged *r, saccade_forward_args *a,
                                   saccade_tensor view[6], saccade_error *err)
{
    TRY(api_view_rows(r, &a->q, 3, "q", &view[0], err));
    TRY(api_view_keys(r, &a->k, "k", &view[1], err));
    TRY(api_view_keys(r, &a->v, "v", &view[2], err));
    TRY(api_view_rows(r, &a->out, 3, "out", &view[3], err));
    TRY(api_view_rows(r, &a->lse, 2, "lse", &view[4], err));
    return api_view_rows(r, &a->row_max, 2, "row_max", &view[5], err);
}

saccade_status api_start_forward(const saccade_plan *plan, const saccade_forward_args *args,
                                 const char *what, api_forward_call *call, saccade_error *err)
{
    saccade_forward_args *a = &call->args;
    call->run = (plan_run){.out = NULL};
    FAIL_AT(!plan || !args, SACCADE_EINVAL, what, 0, 0,
            "got NULL, expected plan and arguments");
    saccade_forward_args_init(a);
    TRY(RECORD_READ(a, args, "arguments"));
    TRY(api_read_ragged(plan, a->ragged, &call->ragged, err));
    TRY(view_tensors(&call->ragged, a, call->view, err));
    call->in = (api_inputs)API_INPUTS_OF(*a);
    call->in.k_scale = a->k_scale;
    call->in.v_scale = a->v_scale;
    call->in.ragged = &call->ragged;
    TRY(api_read_inputs(plan, &call->in, &call->run, &call->captures, err));
    return api_read_prefix(plan, a->prefix, &call->run, &call->prefix, err);
}

saccade_status saccade_forward(const saccade_plan *plan, const saccade_forward_args *args,
                               saccade_error *err)
{
    api_forward_call call;
    plan_run *run = &call.run;
    TRY(api_start_forward(plan, args, "forward", &call, err));
    const saccade_sizes rows = api_row_sizes(run);
    run->row_max = call.args.row_max;
    run->head_max = call.args.head_max;
    TRY(check_head_max(plan, run->head_max, run, err));
    TRY(api_check_outputs(plan, &call.args, &rows, err));
    TRY(api_read_workspace(&call.in, plan_workspace(plan, &run->sizes), run, err));
    run->out = call.args.out;
    run->lse = call.args.lse;
    return plan_forward(plan, run, err);
}
