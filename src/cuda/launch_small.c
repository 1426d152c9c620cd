/* Forward by small tiles put on a stream: one launch, CTAs that share the tiles. */
#include "cuda/run.h"

saccade_status run_launch_small(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_form *form = &s->programs[CU_SMALL].form;
    const plan_problem *p = &plan->problem;
    const int keys = form->tile.keys, device = run->q->device.index;
    const int shared = cu_small_shared(&form->tile, cu_padded(p->sizes.D),
                                       cu_padded(p->sizes.Dv), s->facts.column_words);
    void *parameters[] = {&a->p, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
    if (run->block_mask) {
        const cu_pieces *pieces = cu_pieces_find(device, run->block_mask, keys, &run->sizes);
        a->p.work = (const cu_work *)(uintptr_t)pieces->work;
        a->p.pieces = (const int *)(uintptr_t)pieces->pieces;
        if (s->facts.mask == CU_MASK_GENERAL)
            a->p.limits = cu_limits_find(device, run->block_mask, plan);
    }
    TRY(run_encode_map(a->driver, run->q, run_rows(form), PROMOTE_256, &a->maps[0], err));
    TRY(run_encode_map(a->driver, run->k, keys, PROMOTE_256, &a->maps[1], err));
    TRY(run_encode_map(a->driver, run->v, keys, PROMOTE_256, &a->maps[2], err));
    const int threads =
        128 * (1 + cu_small_teams(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv)));
    const int n_sm = s->device.n_sm, grid = a->p.n_tiles < n_sm ? a->p.n_tiles : n_sm;
    return run_start_next(a, s->programs[CU_SMALL].kernel, grid, threads, shared, parameters,
                          err);
}
