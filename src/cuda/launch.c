/* A run: kernels put on the caller's stream. Nothing is allocated, compiled or copied here. */
#include "cuda/run.h"

#include <stdatomic.h>

enum { MAX_SHARED = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */

/* Shared memory above 48 KB is asked for once per device. */
static saccade_status make_ready(cu_state *s, const plan_problem *problem,
                                 const cu_driver *driver, int device, saccade_error *err)
{
    enum { MOST = 232448 };
    const uint32_t bit = 1u << (device & 31);
    if (atomic_load(&s->ready) & bit)
        return SACCADE_OK;
    const int shared = cu_shared_bytes(&s->form, &s->facts, problem);
    const int peaks = cu_shared_bytes(&s->peaks, &s->facts, problem);
    const int plain = cu_shared_bytes(&s->plain, &s->facts, problem);
    const int bytes[CU_PROGRAMS] = {shared, peaks, 0, plain, MOST};
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (s->programs[i].kernel && bytes[i])
            TRY(cu_check(
                driver, driver->kernel_set(MAX_SHARED, bytes[i], s->programs[i].kernel, device),
                "cuKernelSetAttribute", err));
    atomic_fetch_or(&s->ready, bit);
    return SACCADE_OK;
}

static saccade_status launch(const saccade_plan *plan, const cu_driver *driver,
                             const plan_run *run, const cu_form *form, const cu_runs *runs,
                             saccade_error *err)
{
    cu_state *s = plan->state;
    run_args a;
    const plan_problem *problem = &plan->problem;
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    a.driver = driver;
    a.stream = run->stream;
    a.form = form;
    run_fill(plan, run, form ? form : &s->form, runs, &a.p);
    TRY(run_captures(problem->score, run->score_env.tensors, a.captures, err));
    TRY(run_captures(problem->mask, run->mask_env.tensors, a.captures + n_score, err));
    TRY(make_ready(s, problem, driver, run->q->device.index, err));
    return form ? run_launch_tiles(plan, run, &a, err) : run_launch_decode(plan, run, &a, err);
}

saccade_status cu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = NULL;
    const cu_driver *driver;
    const cu_runs *runs;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(run_choose_form(s, run, &form, err));
    FAIL_IF(run_groups(form ? form : &s->form, &run->sizes) > INT32_MAX, SACCADE_ELIMIT,
            "cuda: got too many rows for one run");
    TRY(run_find_runs(s, run, form, &runs, err));
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, run->q->device.index, &pushed, err));
    const saccade_status status = launch(plan, driver, run, form, runs, err);
    cu_leave(driver, pushed);
    return status;
}
