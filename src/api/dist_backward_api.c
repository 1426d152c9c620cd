/* saccade_dist_backward: arguments into a run of the whole sequence, this rank's part of it and
 * the gradients that it is to make. */
#include "api/api.h"
#include "base/integers.h"
#include "dist/dist.h"

saccade_status api_check_shard_gradients(const api_backward_call *call, saccade_error *err)
{
    const plan_gradients *g = &call->gradients;
    if (g->dq)
        TRY(api_check_output(g->dq, "d_q", err));
    if (g->dk)
        TRY(api_check_output(g->dk, "d_k", err));
    if (g->dv)
        TRY(api_check_output(g->dv, "d_v", err));
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (call->captured[c].dtype != SACCADE_NONE)
            TRY(api_check_output(&call->captured[c], "d_captures", err));
    if (!g->sinks)
        return SACCADE_OK;
    FAIL_AT(g->sinks->rank == 3 && g->sinks->shape[2] > 1, SACCADE_EINVAL, "d_sinks", 0, 0,
            "got one for each of %lld rows, expected sinks that all rows share: ranks add up "
            "their gradients",
            (long long)g->sinks->shape[2]);
    return api_check_output(g->sinks, "d_sinks", err);
}

static saccade_status read_call(const saccade_dist *d, const saccade_backward_args *args,
                                api_backward_call *call, saccade_error *err)
{
    FAIL_AT(!args, SACCADE_EINVAL, "dist backward", 0, 0, "got NULL, expected arguments");
    TRY(api_start_backward(d->plan, args, "dist backward", call, err));
    const saccade_forward_args strange = {.ragged = call->args.ragged,
                                          .pages = call->args.pages};
    TRY(api_refuse_over_ranks(&strange, err));
    TRY(api_check_exchange(d, err));
    TRY(api_read_shard(d, &call->in, d->n_keys, &call->run, err));
    TRY(api_read_sinks(d->plan, call->in.sinks, d->n_rows, &call->run, err));
    TRY(api_read_context(d->plan, &call->in, &call->run, &call->captures, err));
    TRY(api_read_gradients(d->plan, &call->args, d->n_rows, &call->run, call->captured,
                           &call->gradients, err));
    return api_check_shard_gradients(call, err);
}

static size_t workspace_of(const saccade_dist *d, const api_backward_call *call)
{
    const saccade_sizes *s = &call->run.sizes;
    if (d->stages)
        return dist_staged_backward_workspace(d, s->B, &call->gradients);
    if (d->plan->backend->device != SACCADE_CPU)
        return dist_device_backward_workspace(d, s->B, &call->gradients);
    const size_t solver = plan_backward_workspace(d->plan, s, NULL);
    const size_t back = dist_return_of(d, s->B, call->captured, call->gradients.sinks).bytes;
    return dist_workspace(d, s->B, sum_bytes(back, solver));
}

static saccade_status backward(saccade_dist *d, const saccade_backward_args *args,
                               saccade_error *err)
{
    api_backward_call call;
    TRY(read_call(d, args, &call, err));
    TRY(api_check_gradients_apart(&call.args, &call.run, err));
    TRY(api_read_workspace(&call.in, workspace_of(d, &call), &call.run, err));
    api_clear_unread(d->plan, &call.args);
    if (d->stages)
        return dist_staged_backward(d, &call.run, &call.gradients, err);
    return d->plan->backend->device == SACCADE_CPU
               ? dist_backward(d, &call.run, &call.gradients, err)
               : dist_device_backward(d, &call.run, &call.gradients, err);
}

saccade_status saccade_dist_backward(saccade_dist *dist, const saccade_backward_args *args,
                                     saccade_error *err)
{
    FAIL_AT(!dist, SACCADE_EINVAL, "dist backward", 0, 0,
            "got NULL, expected one rank's part of a plan");
    const saccade_status status = backward(dist, args, err);
    if (status != SACCADE_OK)
        dist_abort(&dist->transport);
    return status;
}

saccade_status saccade_dist_backward_workspace(const saccade_dist *dist,
                                               const saccade_backward_args *args, size_t *bytes,
                                               saccade_error *err)
{
    api_backward_call call;
    FAIL_AT(!dist || !bytes, SACCADE_EINVAL, "dist backward", 0, 0,
            "got NULL, expected one rank's part of a plan and room for a size");
    TRY(read_call(dist, args, &call, err));
    *bytes = workspace_of(dist, &call);
    return SACCADE_OK;
}
