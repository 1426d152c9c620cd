/* saccade_dist_forward_local and its backward: this rank's rows against keys that its caller
 * has gathered. Nothing is exchanged here, so a failure ends no transport. */
#include "api/api.h"
#include "dist/dist.h"

size_t saccade_dist_local_workspace(const saccade_dist *dist, int64_t B, int is_backward)
{
    if (!dist || B < 1 || B > 1 << 30)
        return SIZE_MAX;
    const saccade_sizes sizes = dist_sizes(dist, B);
    return is_backward ? plan_backward_workspace(dist->plan, &sizes, NULL)
                       : plan_workspace(dist->plan, &sizes);
}

static saccade_status check_rows(const saccade_dist *d, const void *args, saccade_error *err)
{
    FAIL_AT(!d || !args, SACCADE_EINVAL, "dist local", 0, 0,
            "got NULL, expected one rank's part of a plan and arguments");
    FAIL_AT(!d->n_rows, SACCADE_EINVAL, "dist local", 0, 0,
            "rank %d holds no rows, expected no call", d->transport.rank);
    return SACCADE_OK;
}

saccade_status saccade_dist_forward_local(saccade_dist *dist, const saccade_forward_args *args,
                                          saccade_error *err)
{
    saccade_forward_args a;
    api_captures captures;
    plan_run run = {.out = NULL};
    TRY(check_rows(dist, args, err));
    saccade_forward_args_init(&a);
    TRY(RECORD_READ(&a, args, "arguments"));
    const api_inputs in = API_INPUTS_OF(a);
    TRY(api_refuse_over_ranks(&a, err));
    TRY(api_read_shard(dist, &in, dist->KV, &run, err));
    TRY(api_read_sinks(dist->plan, in.sinks, dist->n_rows, &run, err));
    TRY(api_read_context(dist->plan, &in, &run, &captures, err));
    TRY(api_read_shard_outputs(dist, &a, &run, err));
    TRY(api_read_workspace(&in, saccade_dist_local_workspace(dist, run.sizes.B, 0), &run, err));
    return dist_forward_local(dist, &run, err);
}

/* The caller adds up what ranks made. */
static saccade_status check_captures(const api_backward_call *call, saccade_error *err)
{
    for (int32_t i = 0; i < call->args.n_d_captures; i++) {
        const saccade_binding *given = &call->args.d_captures[i];
        const saccade_dtype dtype = given->tensor.dtype;
        FAIL_AT(dtype == SACCADE_F16 || dtype == SACCADE_BF16, SACCADE_EINVAL, given->name, 0,
                0, "got a gradient in %s of some rows of a sequence, expected f32",
                saccade_dtype_name(dtype));
    }
    return SACCADE_OK;
}

static saccade_status read_backward(const saccade_dist *dist, const saccade_backward_args *args,
                                    api_backward_call *call, saccade_error *err)
{
    TRY(check_rows(dist, args, err));
    TRY(api_start_backward(dist->plan, args, "dist backward", call, err));
    const saccade_forward_args strange = {.ragged = call->args.ragged,
                                          .pages = call->args.pages};
    TRY(api_refuse_over_ranks(&strange, err));
    TRY(api_read_shard(dist, &call->in, dist->KV, &call->run, err));
    TRY(api_read_sinks(dist->plan, call->in.sinks, dist->n_rows, &call->run, err));
    TRY(api_read_context(dist->plan, &call->in, &call->run, &call->captures, err));
    TRY(api_read_gradients(dist->plan, &call->args, dist->n_rows, &call->run, call->captured,
                           &call->gradients, err));
    TRY(api_check_shard_gradients(call, err));
    return check_captures(call, err);
}

static size_t backward_bytes(const saccade_dist *dist, const api_backward_call *call)
{
    const saccade_sizes sizes = dist_sizes(dist, call->run.sizes.B);
    const plan_gradients captured = {.captures = call->gradients.captures,
                                     .positions = call->gradients.positions};
    return plan_backward_workspace(dist->plan, &sizes, &captured);
}

saccade_status saccade_dist_local_backward_workspace(const saccade_dist *dist,
                                                     const saccade_backward_args *args,
                                                     size_t *bytes, saccade_error *err)
{
    api_backward_call call;
    FAIL_AT(!bytes, SACCADE_EINVAL, "dist local", 0, 0, "got NULL, expected room for a size");
    TRY(read_backward(dist, args, &call, err));
    *bytes = backward_bytes(dist, &call);
    return SACCADE_OK;
}

saccade_status saccade_dist_backward_local(saccade_dist *dist,
                                           const saccade_backward_args *args,
                                           saccade_error *err)
{
    api_backward_call call;
    TRY(read_backward(dist, args, &call, err));
    TRY(api_check_gradients_apart(&call.args, &call.run, err));
    TRY(api_read_workspace(&call.in, backward_bytes(dist, &call), &call.run, err));
    api_clear_unread(dist->plan, &call.args);
    return dist_backward_local(dist, &call.run, &call.gradients, err);
}
