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

saccade_status saccade_forward(const saccade_plan *plan, const saccade_forward_args *args,
                               saccade_error *err)
{
    saccade_forward_args a;
    api_captures captures;
    plan_run run = {.out = NULL};
    FAIL_IF(!plan || !args, SACCADE_EINVAL, "forward: got NULL, expected plan and arguments");
    saccade_forward_args_init(&a);
    TRY(RECORD_READ(&a, args, "arguments"));
    api_inputs in = API_INPUTS_OF(a);
    in.k_scale = a.k_scale;
    in.v_scale = a.v_scale;
    TRY(api_read_inputs(plan, &in, &run, &captures, err));
    TRY(api_check_outputs(plan, &a, &run.sizes, err));
    TRY(api_read_workspace(&in, plan_workspace(plan, &run.sizes), &run, err));
    run.out = a.out;
    run.lse = a.lse;
    run.row_max = a.row_max;
    return plan->solver->forward(plan, &run, err);
}
