/* A run: kernels put on the caller's stream. Nothing is allocated, compiled or copied here. */
#include "cuda/run.h"

#include <stdatomic.h>

enum {
    MAX_SHARED = 8,  /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    SHORT_KEYS = 512 /* up to here two launches cost more than exact offsets, H200 */
};

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

saccade_status run_start(const run_args *a, void *kernel, int64_t grid, int threads, int shared,
                         void **parameters, saccade_error *err)
{
    return cu_check(a->driver,
                    a->driver->launch(kernel, (unsigned)grid, 1, 1, (unsigned)threads, 1, 1,
                                      (unsigned)shared, a->stream, parameters, NULL),
                    "cuLaunchKernel", err);
}

saccade_status run_start_with(const run_args *a, void *kernel, const unsigned grid[2],
                              int threads, int shared, int attribute, int value,
                              void **parameters, saccade_error *err)
{
    cu_launch_attribute one = {.id = attribute, .value = {.values = {value, 1, 1}}};
    const cu_launch how = {.grid_x = grid[0],
                           .grid_y = grid[1],
                           .grid_z = 1,
                           .block_x = (unsigned)threads,
                           .block_y = 1,
                           .block_z = 1,
                           .shared_bytes = (unsigned)shared,
                           .stream = a->stream,
                           .attributes = &one,
                           .n_attributes = 1};
    return cu_check(a->driver, a->driver->launch_ex(&how, kernel, parameters, NULL),
                    "cuLaunchKernelEx", err);
}

/* After another kernel of the run, which may still be running when this one is placed (sm_90a
 * programs wait for it by themselves). */
static saccade_status start_next(const run_args *a, void *kernel, int64_t grid, int threads,
                                 int shared, void **parameters, saccade_error *err)
{
    const unsigned size[2] = {(unsigned)grid, 1};
    if (a->form->family != CU_SM90)
        return run_start(a, kernel, grid, threads, shared, parameters, err);
    return run_start_with(a, kernel, size, threads, shared, WITH_OVERLAP, 1, parameters, err);
}

/* A pass over all tiles; where offsets are late, a second one, with exact offsets, over the
 * tiles whose rows came out not finite; last the careful kernel, for what is still not. */
static saccade_status launch_passes(const saccade_plan *plan, const plan_run *run, run_args *a,
                                    saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_form *form = a->form;
    const plan_problem *problem = &plan->problem;
    const int n_sm = s->device.n_sm, is_main = form != &s->plain;
    const int shared = cu_shared_bytes(form, &s->facts, problem);
    const int threads =
        cu_tile_threads(form->family, &form->tile, cu_padded(problem->sizes.Dv));
    const int grid = form->family != CU_SM90 || a->p.n_tiles < n_sm ? a->p.n_tiles : n_sm;
    const int64_t looks = (run_groups(form, &run->sizes) + 31) / 32;
    void *const exact = s->programs[is_main ? CU_PEAKS : CU_PLAIN].kernel;
    /* all tiles run at once: none are drawn, none listed */
    const int is_short =
        form->family == CU_SM90 && a->p.n_tiles <= n_sm && a->p.N <= SHORT_KEYS;
    const int is_exact = !is_main || run->row_max || (is_short && s->is_lazy);
    void *const first = is_exact ? exact : s->programs[CU_MAIN].kernel;
    void *parameters[] = {&a->p, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
    if (form->family == CU_SM90 && !is_short)
        TRY(run_start(a, s->programs[CU_CAREFUL].other, 1, 1, 0, parameters, err));
    if (s->is_lazy && first != exact) {
        cu_fwd again = a->p;
        void *second[] = {&again, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
        again.order = a->p.redo;
        again.n_listed = a->p.redo_count;
        again.redo = NULL;
        TRY(start_next(a, first, grid, threads, shared, parameters, err));
        TRY(start_next(a, exact, grid, threads, shared, second, err));
    } else {
        a->p.redo = NULL;
        TRY((is_short ? run_start : start_next)(a, first, grid, threads, shared, parameters,
                                                err));
    }
    return start_next(a, s->programs[CU_CAREFUL].kernel, looks < 4 * n_sm ? looks : 4 * n_sm,
                      128, 0, parameters, err);
}

static saccade_status launch_tiles(const saccade_plan *plan, const plan_run *run, run_args *a,
                                   saccade_error *err)
{
    const cu_form *form = a->form;
    if (form->family == CU_SM90) {
        TRY(run_encode_map(a->driver, run->q, run_rows(form), PROMOTE_256, &a->maps[0], err));
        TRY(run_encode_map(a->driver, run->k, form->tile.keys, PROMOTE_256, &a->maps[1], err));
        TRY(run_encode_map(a->driver, run->v, form->tile.keys, PROMOTE_256, &a->maps[2], err));
    }
    return launch_passes(plan, run, a, err);
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
    return form ? launch_tiles(plan, run, &a, err) : run_launch_decode(plan, run, &a, err);
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
