/* A plan: choosing its solver, and the workspaces of its runs.
 * Choosing asks the solvers of the wanted back end in order and takes the first that applies;
 * why the others did not is kept for `explain`. There is no silent fall-back: what no solver of
 * the wanted back end takes is an error with the reasons. */
#include "plan/plan.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdio.h>
#include <stdlib.h>

enum { WHY_BYTES = 160 };

static const int64_t MOST_LENGTH = (int64_t)1 << 30;

/* Elements of [B, heads, length, dim], at least 1; as doubles they do not wrap. */
static double elements(int64_t B, int64_t heads, int64_t length, int64_t dim)
{
    return (double)B * (double)heads * (double)length * (double)dim;
}

int plan_is_possible(const saccade_sizes *s)
{
    const int64_t dim = s->D > s->Dv ? s->D : s->Dv;
    return s->B >= 0 && s->Q >= 0 && s->KV >= 0 && s->B <= MOST_LENGTH && s->Q <= MOST_LENGTH
           && s->KV <= MOST_LENGTH && elements(s->B, s->H, s->Q, dim) <= 0x1p48
           && elements(s->B, s->Hkv, s->KV, dim) <= 0x1p48;
}

int plan_has_lengths(const plan_problem *problem)
{
    const saccade_sizes *s = &problem->sizes;
    return s->B && s->Q && s->KV && plan_is_possible(s);
}

/* Of what a solver is given at a time: a sequence of a ragged run, or all of a run. */
static saccade_sizes given_sizes(const saccade_plan *plan, int is_whole, const saccade_sizes *s)
{
    saccade_sizes given = *s;
    if (plan->problem.is_ragged && !is_whole)
        given.B = 1;
    return given;
}

size_t plan_workspace(const saccade_plan *plan, const saccade_sizes *s)
{
    const saccade_sizes given = given_sizes(plan, plan->solver->takes_ragged, s);
    if (!plan_is_possible(s))
        return SIZE_MAX;
    const size_t room = plan_head_max_room(&plan->problem, s);
    return sum_bytes(room, plan->solver->workspace(plan, &given));
}

size_t plan_backward_workspace(const saccade_plan *plan, const saccade_sizes *s,
                               const plan_gradients *gradients)
{
    if (!plan->problem.gradients)
        return 0;
    const saccade_sizes given = given_sizes(plan, plan->solver->takes_ragged_backward, s);
    if (!plan_is_possible(s))
        return SIZE_MAX;
    return sum_bytes(plan_pool_room(plan, gradients),
                     plan->solver->backward_workspace(plan, &given, gradients));
}

size_t plan_tangent_workspace(const saccade_plan *plan, const saccade_sizes *s)
{
    if (!plan->problem.has_tangents || !plan->solver->tangent_workspace)
        return 0;
    return plan_is_possible(s) ? plan->solver->tangent_workspace(plan, s) : SIZE_MAX;
}

saccade_status plan_choose(saccade_plan *plan, const plan_solver *const *solvers,
                           saccade_error *err)
{
    char why[WHY_BYTES] = "built without this back end";
    for (int i = 0; solvers[i]; i++) {
        why[0] = 0;
        if (plan->problem.gradients && !solvers[i]->backward) {
            snprintf(why, sizeof why, "%s makes no gradients", solvers[i]->name);
            continue;
        }
        if (plan->problem.has_tangents && !solvers[i]->tangent) {
            snprintf(why, sizeof why, "%s has no forward mode", solvers[i]->name);
            continue;
        }
        if (!solvers[i]->applicable(&plan->problem, plan->level, why))
            continue;
        plan->solver = solvers[i];
        const saccade_status status = solvers[i]->create(plan, err);
        if (status != SACCADE_OK)
            plan->solver = NULL;
        return status;
    }
    return status_fail_at(err, SACCADE_EBACKEND, "plan", 0, 0,
                          "no kernel takes this problem: %s", why);
}

void plan_destroy(saccade_plan *plan)
{
    if (!plan)
        return;
    if (plan->solver)
        plan->solver->destroy(plan);
    arena_free(&plan->arena);
    free(plan);
}
