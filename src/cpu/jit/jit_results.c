/* A score function with several results, as backward and forward mode run it. */
#include "cpu/jit/jit.h"

#include "base/cpu_features.h"
#include "base/status.h"
#include "cpu/jit/jit_graph.h"
#include "plan/plan.h"

saccade_status jit_compile_results(const saccade_plan *plan, const mod_fn *fn,
                                   const uint32_t *results, uint32_t n, int may_be_rough,
                                   arena *arena, const eval_prog **prog, jit_program **jit,
                                   saccade_error *err)
{
    const int is_rough = may_be_rough && plan->problem.dtype == SACCADE_BF16
                         && plan->level >= CPU_AVX512
                         && jit_allows_rough_tanh(plan->problem.score_facts);
    const mod_fn *mask = plan_limits(&plan->problem) ? NULL : plan->problem.mask;
    saccade_error why = {0};
    TRY(eval_compile_results(fn, results, n, arena, prog, err));
    const saccade_status status =
        jit_create_results(fn, results, n, mask, plan->level, is_rough, jit, &why);
    if (status == SACCADE_OK || status == SACCADE_EBACKEND)
        return SACCADE_OK;
    return status_fail(err, status, "%s", why.message);
}
