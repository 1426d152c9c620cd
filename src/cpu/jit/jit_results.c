/* A score function with several results, as backward and forward mode run it. */
#include "cpu/jit/jit.h"

#include "base/status.h"
#include "plan/plan.h"

saccade_status jit_compile_results(const saccade_plan *plan, const mod_fn *fn,
                                   const uint32_t *results, uint32_t n, arena *arena,
                                   const eval_prog **prog, jit_program **jit,
                                   saccade_error *err)
{
    const mod_fn *mask = plan_limits(&plan->problem) ? NULL : plan->problem.mask;
    saccade_error why = {0};
    TRY(eval_compile_results(fn, results, n, arena, prog, err));
    const saccade_status status =
        jit_create_results(fn, results, n, mask, plan->level, jit, &why);
    if (status == SACCADE_OK || status == SACCADE_EBACKEND)
        return SACCADE_OK;
    return status_fail(err, status, "%s", why.message);
}
