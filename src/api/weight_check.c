/* What a run's weights go through: the rate of dropout, which is one number for all of a run,
 * and the seed and offset that say which weights are kept. */
#include "api/api.h"

#include <math.h>

static saccade_status find_rate(const saccade_plan *plan, const saccade_tensor *captures,
                                const plan_run *run, double *out, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    double values[PLAN_WEIGHT_NODES];
    eval_env env = {.tensors = captures};
    const eval_point at = {0};
    plan_set_env(p, &run->sizes, &env);
    *out = eval_scalar(p->weight, &env, &at, values, NULL);
    FAIL_AT(!(*out >= 0 && *out <= 1), SACCADE_EINVAL, "weight", 0, 0,
            "got a rate of %g, expected 0 to 1", *out);
    return SACCADE_OK;
}

static saccade_status read_state(const saccade_plan *plan, const saccade_tensor *t,
                                 plan_dropout *out, saccade_error *err)
{
    int64_t shape[1] = {2};
    FAIL_AT(!t, SACCADE_EINVAL, "dropout", 0, 0,
            "got no tensor, expected seed and offset: the plan's problem has a weight");
    FAIL_AT(t->dtype != SACCADE_I64 && t->dtype != SACCADE_U64, SACCADE_EINVAL, "dropout", 0, 0,
            "got dtype %s, expected i64 or u64", saccade_dtype_name(t->dtype));
    const int is_host = t->device.kind == SACCADE_CPU;
    const api_expected expected = {"dropout", t->dtype, 1,
                                   is_host ? SACCADE_CPU : plan->backend->device};
    TRY(api_check_tensor(t, &expected, shape, err));
    FAIL_AT(t->stride[0] != 1, SACCADE_EINVAL, "dropout", 0, 0,
            "got stride %lld, expected 1: the offset behind the seed", (long long)t->stride[0]);
    const uint64_t *state = t->data;
    out->state = is_host ? NULL : state;
    out->seed = is_host ? state[0] : 0;
    out->offset = is_host ? state[1] : 0;
    return SACCADE_OK;
}

saccade_status api_read_dropout(const saccade_plan *plan, const saccade_tensor *state,
                                const saccade_tensor *captures, plan_run *run,
                                saccade_error *err)
{
    double rate;
    FAIL_AT(!plan->problem.weight && state, SACCADE_EINVAL, "dropout", 0, 0,
            "got a tensor, expected none: the plan's problem has no weight");
    if (!plan->problem.weight)
        return SACCADE_OK;
    TRY(find_rate(plan, captures, run, &rate, err));
    TRY(read_state(plan, state, &run->dropout, err));
    const uint32_t threshold = (uint32_t)lrint(rate * DROPOUT_ONE);
    const uint32_t kept = DROPOUT_ONE - threshold;
    run->dropout.is_on = 1;
    run->dropout.threshold = threshold;
    run->dropout.factor = kept ? (float)DROPOUT_ONE / (float)kept : 0;
    return SACCADE_OK;
}
