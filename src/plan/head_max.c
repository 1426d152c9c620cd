/* The largest score of each head: of the maxima of its rows, which a run leaves in row_max or,
 * where none is wanted, in the workspace before the solver's. */
#include "plan/plan.h"

#include "base/convert.h"
#include "base/integers.h"
#include "base/status.h"

#include <math.h>

size_t plan_head_max_room(const plan_problem *p, const saccade_sizes *s)
{
    const int64_t each =
        (int64_t)saccade_dtype_bytes(p->dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32);
    return p->has_head_max ? (size_t)round_up(s->B * s->H * s->Q * each, 64) : 0;
}

/* NaN is larger than all. */
static double greater(double a, double b)
{
    return b > a || isnan(b) ? b : a;
}

static double element(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

static double batch_max(const plan_run *run, int64_t b, int64_t h)
{
    const saccade_tensor *t = run->row_max;
    const int32_t *first = run->ragged ? run->ragged->q_first : NULL;
    const int64_t begin = first ? first[b] : 0;
    const int64_t past = first ? first[b + 1] : run->sizes.Q;
    const int64_t at = (first ? 0 : b * t->stride[0]) + h * t->stride[1];
    double most = -INFINITY;
    for (int64_t i = begin; i < past; i++)
        most = greater(most, element(t, at + i * t->stride[2]));
    return most;
}

void plan_reduce_rows(const plan_run *run)
{
    const saccade_tensor *t = run->head_max;
    const int is_joint = t->shape[0] == 1;
    for (int64_t h = 0; h < run->sizes.H; h++) {
        double most = -INFINITY;
        for (int64_t b = 0; b < run->sizes.B; b++) {
            const double own = batch_max(run, b, h);
            most = is_joint ? greater(most, own) : own;
            const int64_t at = (is_joint ? 0 : b * t->stride[0]) + h * t->stride[1];
            if (t->dtype == SACCADE_F64)
                ((double *)t->data)[at] = most;
            else
                ((float *)t->data)[at] = (float)most;
        }
    }
}

/* The run with row_max in its workspace. */
static plan_run with_rows(const saccade_plan *plan, const plan_run *run, saccade_tensor *rows)
{
    plan_run own = *run;
    const size_t room = plan_head_max_room(&plan->problem, &run->sizes);
    const int64_t B = run->q->shape[0], Q = run->q->shape[2], H = run->sizes.H;
    *rows = (saccade_tensor){.data = run->workspace,
                             .dtype = run->head_max->dtype,
                             .rank = 3,
                             .device = run->q->device,
                             .shape = {B, H, Q},
                             .stride = {H * Q, Q, 1}};
    own.row_max = rows;
    own.workspace = (char *)run->workspace + room;
    own.workspace_bytes -= room;
    return own;
}

saccade_status plan_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    saccade_tensor rows;
    if (!run->head_max)
        return plan_forward_rows(plan, run, err);
    const plan_run own = run->row_max ? *run : with_rows(plan, run, &rows);
    TRY(plan_forward_rows(plan, &own, err));
    if (plan->solver->head_max)
        return plan->solver->head_max(plan, &own, err);
    plan_reduce_rows(&own);
    return SACCADE_OK;
}
