/* Plans, and the one place that names the back ends. */
#include "api/api.h"

#include "plan/prefix.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const plan_backend backends[] = {
    {"cpu", cpu_solvers, SACCADE_CPU, NULL},
    {"cuda", cuda_solvers, SACCADE_CUDA, &cu_carry},
    {"ref", ref_solvers, SACCADE_CPU, NULL},
    {"plain", plain_solvers, SACCADE_CPU, NULL},
};
enum { BACKENDS = sizeof backends / sizeof backends[0] };

/* That of the name; of "auto" the GPU's for a problem that names an architecture of one. */
static saccade_status find_backend(const saccade_problem *problem, const plan_backend **out,
                                   saccade_error *err)
{
    const char *name = problem->backend;
    if (!name || strcmp(name, "auto") == 0)
        name = problem->arch ? "cuda" : backends[0].name;
    for (int i = 0; i < BACKENDS; i++) {
        if (strcmp(backends[i].name, name) == 0) {
            FAIL_AT(problem->arch && backends[i].device != SACCADE_CUDA, SACCADE_EINVAL, "arch",
                    0, 0, "got '%.40s' with back end %s, expected it with cuda or auto",
                    problem->arch, name);
            *out = &backends[i];
            return SACCADE_OK;
        }
    }
    return status_fail_at(err, SACCADE_EINVAL, "backend", 0, 0,
                          "got '%.40s', expected auto, cpu, cuda, ref or plain", name);
}

/* The plan that `problem`, checked for its size only, asks for; destroyed by the caller also
 * after a failure. */
static saccade_status fill_plan(const saccade_context *context, const saccade_problem *problem,
                                int is_part, saccade_plan *plan, saccade_error *err)
{
    static _Atomic uint64_t n_plans;
    plan->number = atomic_fetch_add(&n_plans, 1) + 1;
    plan->threads = context->threads;
    plan->level = context->level;
    TRY(find_backend(problem, &plan->backend, err));
    TRY(plan_derive(problem, plan, err));
    plan->problem.has_rows = is_part;
    plan->problem.has_chunks |= is_part && plan->backend->device == SACCADE_CPU;
    if (plan->problem.has_prefix)
        return plan_create_prefix(plan, problem, err);
    return plan_choose(plan, plan->backend->solvers, err);
}

saccade_status api_plan_create(const saccade_context *context, const saccade_problem *problem,
                               int is_part, saccade_plan **out, saccade_error *err)
{
    saccade_context defaults;
    if (!context) {
        TRY(api_context(NULL, &defaults, err));
        context = &defaults;
    }
    saccade_plan *plan = calloc(1, sizeof *plan);
    FAIL_IF_NULL(plan);
    arena_init(&plan->arena);
    const saccade_status status = fill_plan(context, problem, is_part, plan, err);
    if (status == SACCADE_OK)
        *out = plan;
    else
        saccade_plan_destroy(plan);
    return status;
}

saccade_status saccade_plan_create(saccade_context *context, const saccade_problem *problem,
                                   saccade_plan **out, saccade_error *err)
{
    saccade_problem own;
    FAIL_AT(!problem || !out, SACCADE_EINVAL, "plan", 0, 0,
            "got NULL, expected a problem and a result");
    saccade_problem_init(&own);
    TRY(RECORD_READ(&own, problem, "problem"));
    return api_plan_create(context, &own, 0, out, err);
}

void saccade_plan_destroy(saccade_plan *plan)
{
    plan_destroy(plan);
}

int api_sizes_hold(const saccade_plan *plan, const saccade_sizes *s)
{
    const saccade_sizes *own = &plan->problem.sizes;
    return s->H >= own->H && s->Hkv >= own->Hkv && s->D >= own->D && s->Dv >= own->Dv;
}

size_t saccade_plan_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    if (!plan || !sizes)
        return 0;
    return api_sizes_hold(plan, sizes) ? plan_workspace(plan, sizes) : SIZE_MAX;
}

saccade_status saccade_plan_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                                    saccade_error *err)
{
    FAIL_AT(!plan || !mask, SACCADE_EINVAL, "prepare", 0, 0,
            "got NULL, expected plan and block mask");
    if (plan->source_mask)
        mask_is_of(mask, plan->source_mask, plan->number); /* runs need not compare nodes */
    return plan->solver->prepare(plan, mask, err);
}

saccade_status saccade_plan_explain(const saccade_plan *plan, char **text, saccade_error *err)
{
    strbuf sb;
    FAIL_AT(!plan || !text, SACCADE_EINVAL, "explain", 0, 0,
            "got NULL, expected a plan and a result");
    strbuf_init(&sb, 0);
    saccade_status status = plan_explain(plan, &sb, err);
    if (status == SACCADE_OK) {
        char *stolen = strbuf_steal(&sb);
        if (stolen)
            *text = stolen;
        else
            status = status_fail(err, SACCADE_ENOMEM, "out of memory");
    }
    strbuf_free(&sb);
    return status;
}
