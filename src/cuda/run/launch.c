/* A run: kernels put on the caller's stream. Nothing is allocated, compiled or copied here. */
#include "cuda/run/run.h"

#include <stdatomic.h>

enum { MAX_SHARED = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */

saccade_status run_make_ready(cu_state *s, const plan_problem *problem, const cu_driver *driver,
                              int device, saccade_error *err)
{
    const uint64_t bit = (uint64_t)1 << device; /* cu_enter bounds it */
    if (atomic_load(&s->ready) & bit)
        return SACCADE_OK;
    for (int i = 0; i < CU_PROGRAMS; i++) {
        const cu_loaded *l = &s->programs[i];
        if (!l->kernel || !cu_program_kinds[i].shared)
            continue;
        const cu_program_kind *kind = &cu_program_kinds[i];
        const int bytes = kind->shared(s, problem, &l->form);
        TRY(cu_check(driver, driver->kernel_set(MAX_SHARED, bytes, l->kernel, device),
                     "cuKernelSetAttribute", err));
        if (kind->other_has_shared)
            TRY(cu_check(driver, driver->kernel_set(MAX_SHARED, bytes, l->other, device),
                         "cuKernelSetAttribute", err));
    }
    atomic_fetch_or(&s->ready, bit);
    return SACCADE_OK;
}

typedef saccade_status launch_operation(const saccade_plan *plan, const plan_run *run,
                                        run_args *a, saccade_error *err);

/* Whether kernels find what they read of the caller's by numbers of tiles, so that no load of
 * it can come before their wait (number_behind); a capture may be one number for all. */
static int starts_early(const plan_problem *p, const cu_state *s, const plan_run *run)
{
    const int has_captures = (p->score && p->score->n_captures)
                             || (p->mask && p->mask->n_captures);
    return s->family == CU_SM90 && !has_captures && !run->ragged && !run->dropout.is_on;
}

static saccade_status launch(const saccade_plan *plan, const cu_driver *driver,
                             const plan_run *run, cu_program program, const cu_runs *runs,
                             saccade_error *err)
{
    static launch_operation *const operations[CU_OPERATIONS] = {
        [CU_OP_DECODE] = run_launch_decode,
        [CU_OP_SMALL] = run_launch_small,
        [CU_OP_PARTS] = run_launch_parts,
        [CU_OP_FORWARD] = run_launch_tiles};
    cu_state *s = plan->state;
    run_args a = {0};
    const plan_problem *problem = &plan->problem;
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    a.driver = driver;
    a.stream = run->stream;
    a.program = program;
    a.n_first = runs ? runs->turns.first : 0;
    a.family = s->programs[program].form.family;
    a.starts_early = starts_early(problem, s, run);
    run_fill(plan, run, run_tiles_form(s, program), runs, &a.p);
    TRY(run_captures(problem->score, run->score_env.tensors, a.captures, err));
    TRY(run_captures(problem->mask, run->mask_env.tensors, a.captures + n_score, err));
    TRY(run_make_ready(s, problem, driver, run->q->device.index, err));
    return operations[cu_program_kinds[program].operation](plan, run, &a, err);
}

saccade_status run_check_positions(const cu_state *s, const plan_run *run, saccade_error *err)
{
    FAIL_AT(s->facts.mask == CU_MASK_INTERVAL && !plan_is_near(&run->positions, &run->sizes),
            SACCADE_EINVAL, "positions", 0, 0,
            "got offsets that lead out of -2^29 to 2^30 - 1, expected positions within, where "
            "the mask is one interval of keys a row");
    return SACCADE_OK;
}

saccade_status cu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    const cu_state *s = plan->state;
    cu_program program = CU_MAIN;
    const cu_driver *driver;
    const cu_runs *runs;
    plan_run local;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    FAIL_AT(run->ragged && run->block_mask, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one with ragged sequences on a GPU, where lengths are known to kernels alone: "
            "expected none");
    TRY(run_check_positions(s, run, err));
    TRY(cu_local_run(plan, run, &local, err));
    TRY(run_choose_program(plan, &local, &program, err));
    FAIL_IF(run_groups(run_tiles_form(s, program), &local.sizes) > INT32_MAX, SACCADE_ELIMIT,
            "cuda: got too many rows for one run");
    TRY(run_find_runs(plan, &local, program, &runs, err));
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, run->q->device.index, &pushed, err));
    const saccade_status status = launch(plan, driver, &local, program, runs, err);
    cu_leave(driver, pushed);
    return status;
}
