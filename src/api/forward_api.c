/* saccade_forward: arguments into a run. */
#include "api/api.h"

saccade_status api_check_outputs(const saccade_plan *plan, const saccade_forward_args *a,
                                 const saccade_sizes *s, saccade_error *err)
{
    const api_expected out = {"out", plan->problem.out_dtype, 4, plan->backend->device};
    int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    TRY(api_check_tensor(a->out, &out, shape, err));
    TRY(api_check_output(a->out, "out", err));
    TRY(api_check_stats(plan, a->lse, "lse", s, err));
    return api_check_stats(plan, a->row_max, "row_max", s, err);
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
    FAIL_IF(!plan || !args, SACCADE_EINVAL, "%s: got NULL, expected plan and arguments", what);
    saccade_forward_args_init(a);
    TRY(RECORD_READ(a, args, "arguments"));
    TRY(api_read_ragged(plan, a->ragged, &call->ragged, err));
    TRY(view_tensors(&call->ragged, a, call->view, err));
    call->in = (api_inputs)API_INPUTS_OF(*a);
    call->in.k_scale = a->k_scale;
    call->in.v_scale = a->v_scale;
    call->in.ragged = &call->ragged;
    return api_read_inputs(plan, &call->in, &call->run, &call->captures, err);
}

saccade_status saccade_forward(const saccade_plan *plan, const saccade_forward_args *args,
                               saccade_error *err)
{
    api_forward_call call;
    plan_run *run = &call.run;
    TRY(api_start_forward(plan, args, "forward", &call, err));
    const saccade_sizes rows = api_row_sizes(run);
    TRY(api_check_outputs(plan, &call.args, &rows, err));
    TRY(api_read_workspace(&call.in, plan_workspace(plan, &run->sizes), run, err));
    run->out = call.args.out;
    run->lse = call.args.lse;
    run->row_max = call.args.row_max;
    return plan_forward(plan, run, err);
}
