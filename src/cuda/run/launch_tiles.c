/* Forward by tiles put on a stream: a first pass, for which keys of small pages are brought
 * into one piece, a second one over the tiles that a first pass with late offsets lists, and
 * the careful kernel. */
#include "cuda/run/run.h"

enum { BEGIN_THREADS = 1024 }; /* of ragged runs: they order the tiles */
enum { SHORT_KEYS = 512 };     /* up to here two launches cost more than exact offsets, H200 */

saccade_status run_start_next(const run_args *a, void *kernel, int64_t grid, int threads,
                              int shared, void **parameters, saccade_error *err)
{
    const unsigned size[2] = {(unsigned)grid, 1};
    if (a->family != CU_SM90)
        return run_start(a, kernel, grid, threads, shared, parameters, err);
    return run_start_with(a, kernel, size, threads, shared, WITH_OVERLAP, 1, parameters, err);
}

static saccade_status call_between(const plan_run *run, saccade_error *err)
{
    return run->between ? run->between(run->between_user, err) : SACCADE_OK;
}

/* The first pass; where some keys come from elsewhere, first the tiles that need none of them.
 * Counters start anew, lists of tiles go on. */
static saccade_status start_first(const plan_run *run, const run_args *a, void *kernel,
                                  int n_sm, int threads, int shared, int is_short,
                                  saccade_error *err)
{
    const int is_sm90 = a->family == CU_SM90, n_first = a->p.order ? a->n_first : 0;
    cu_fwd part = a->p;
    void *parameters[] = {&part, (void *)a->captures, (void *)&a->maps[0], (void *)&a->maps[1],
                          (void *)&a->maps[2], (void *)a->dense};
    if (n_first) {
        part.n_tiles = n_first;
        TRY(run_start_next(a, kernel, is_sm90 && n_first > n_sm ? n_sm : n_first, threads,
                           shared, parameters, err));
    }
    TRY(call_between(run, err));
    if (n_first && is_sm90)
        TRY(cu_check(a->driver,
                     a->driver->fill32((cu_ptr)(uintptr_t)a->p.counter, 0, 1, a->stream),
                     "cuMemsetD32Async", err));
    part.order = n_first ? a->p.order + n_first : a->p.order;
    part.n_tiles = a->p.n_tiles - n_first;
    const int grid = is_sm90 && part.n_tiles > n_sm ? n_sm : part.n_tiles;
    if (run->between || a->program == CU_ONE_PIECE)
        return run_start(a, kernel, grid, threads, shared, parameters, err);
    return is_short
               ? run_start_first(a, kernel, (unsigned)grid, threads, shared, 1, parameters, err)
               : run_start_next(a, kernel, grid, threads, shared, parameters, err);
}

/* The kernel that makes rows again which are not finite. */
static saccade_status start_careful(const saccade_plan *plan, const run_args *a, int64_t groups,
                                    void **parameters, saccade_error *err)
{
    const cu_state *s = plan->state;
    const int64_t looks = (groups + 31) / 32, most = 4 * s->device.n_sm;
    return run_start_next(a, s->programs[CU_CAREFUL].kernel, looks < most ? looks : most, 128,
                          0, parameters, err);
}

/* The first pass makes all tiles. If its offsets are late, a second pass with exact offsets
 * makes the tiles again whose rows are not finite. Last comes the careful kernel for rows that
 * are still not finite. */
static saccade_status launch_passes(const saccade_plan *plan, const plan_run *run, run_args *a,
                                    saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_form *form = &s->programs[a->program].form;
    const plan_problem *problem = &plan->problem;
    const int n_sm = s->device.n_sm, is_main = a->program != CU_UNALIGNED;
    const int shared = cu_shared_bytes(form, &s->facts, problem);
    const int threads =
        cu_tile_threads(form->family, &form->tile, cu_padded(problem->sizes.Dv));
    const int grid = form->family != CU_SM90 || a->p.n_tiles < n_sm ? a->p.n_tiles : n_sm;
    void *const exact = s->programs[is_main ? CU_EXACT : CU_UNALIGNED].kernel;
    /* all tiles run at once: none are drawn, none listed */
    const int is_short =
        form->family == CU_SM90 && a->p.n_tiles <= n_sm && a->p.N <= SHORT_KEYS && !run->ragged;
    const int is_lazy = cu_program_kinds[a->program].may_be_lazy
                        && s->programs[CU_MAIN].form.tile.is_lazy;
    const int is_exact = !is_main || run->row_max || (is_short && is_lazy);
    void *const first = is_exact ? exact : s->programs[a->program].kernel;
    const int is_late = is_lazy && first != exact;
    void *parameters[] = {&a->p, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
    if (form->family == CU_SM90 && !is_short)
        TRY((run->ragged ? run_start : run_start_next)(a, s->programs[CU_CAREFUL].other, 1,
                                                       run->ragged ? BEGIN_THREADS : 1, 0,
                                                       parameters, err));
    if (!is_late)
        a->p.redo = NULL;
    if (a->program == CU_ONE_PIECE) {
        run_args whole = *a; /* of the first pass: others look up keys where they lie */
        TRY(run_collect_keys(plan, run, &whole, err));
        TRY(start_first(run, &whole, first, n_sm, threads, shared, is_short, err));
    } else {
        TRY(start_first(run, a, first, n_sm, threads, shared, is_short, err));
    }
    if (is_late) {
        cu_fwd again = a->p;
        void *second[] = {&again, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
        again.order = a->p.redo;
        again.n_listed = a->p.redo_count;
        again.redo = NULL;
        TRY(run_start_next(a, exact, grid, threads, shared, second, err));
    }
    return start_careful(plan, a, run_groups(form, &run->sizes), parameters, err);
}

saccade_status run_launch_tiles(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[a->program].form;
    TRY(run_launch_short(plan, run, a, err));
    if (s->part_dim) /* behind what tiles take */
        a->p.part_o = (float *)((char *)run->workspace
                                + run_tiles_space(form, &run->sizes, plan->problem.is_ragged));
    if (form->family == CU_SM90 && run->block_mask && s->facts.mask == CU_MASK_GENERAL)
        a->p.limits = cu_limits_find(run->q->device.index, run->block_mask, plan);
    if (form->family == CU_SM90) {
        TRY(run_encode_map(a->driver, run->q, run_rows(form), PROMOTE_128, &a->maps[0], err));
        const int box = run_place_box(run, 0, &form->tile, &a->p.chunks);
        TRY(run_encode_map(a->driver, run->k, box, PROMOTE_128, &a->maps[1], err));
        TRY(run_encode_map(a->driver, run->v, box, PROMOTE_128, &a->maps[2], err));
    }
    if (a->program == CU_DENSE)
        TRY(run_map_dense(plan, run, CU_DENSE, a, &a->p.dense_turned, err));
    return launch_passes(plan, run, a, err);
}
