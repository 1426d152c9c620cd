/* Forward by tiles put on a stream: a first pass, where offsets are late one over the tiles it
 * lists, and the careful kernel. */
#include "cuda/run.h"

enum { SHORT_KEYS = 512 }; /* up to here two launches cost more than exact offsets, H200 */

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

saccade_status run_launch_tiles(const saccade_plan *plan, const plan_run *run, run_args *a,
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
