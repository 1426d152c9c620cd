/* Forward by small tiles put on a stream: one launch, CTAs that share the tiles. */
#include "cuda/run/run.h"

/* is_next: beside the kernel before it, where no load may come before its wait. */
static saccade_status start_tiles(const saccade_plan *plan, const run_args *a,
                                  const cu_fwd *part, int is_next, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[a->program].form;
    const int shared = cu_shared_bytes(form, &s->facts, &plan->problem);
    const int threads = 128 * (1 + form->teams), n_sm = s->device.n_sm;
    void *parameters[] = {(void *)part, (void *)a->captures, (void *)&a->maps[0],
                          (void *)&a->maps[1], (void *)&a->maps[2]};
    return (is_next && a->starts_early ? run_start_next : run_start)(
        a, s->programs[a->program].kernel, part->n_tiles < n_sm ? part->n_tiles : n_sm, threads,
        shared, parameters, err);
}

/* Where some keys come from elsewhere, first the tiles that need none of them. */
static saccade_status start_parts(const saccade_plan *plan, const plan_run *run,
                                  const run_args *a, int n_first, saccade_error *err)
{
    cu_fwd part = a->p;
    part.n_tiles = n_first;
    if (n_first)
        TRY(start_tiles(plan, a, &part, 1, err));
    TRY(run->between(run->between_user, err));
    part.work = part.work ? part.work + n_first : part.work;
    part.n_tiles = a->p.n_tiles - n_first;
    return start_tiles(plan, a, &part, 0, err);
}

saccade_status run_launch_small(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[a->program].form;
    const int keys = form->tile.keys, device = run->q->device.index;
    const cu_pieces *pieces = NULL;
    if (run->block_mask) {
        pieces = cu_pieces_find(device, run->block_mask, keys, &run->sizes, plan);
        a->p.work = (const cu_work *)(uintptr_t)pieces->work;
        a->p.pieces = (const int *)(uintptr_t)pieces->pieces;
        if (s->facts.mask == CU_MASK_GENERAL)
            a->p.limits = cu_limits_find(device, run->block_mask, plan);
    }
    TRY(run_encode_map(a->driver, run->q, run_rows(form), PROMOTE_128, &a->maps[0], err));
    TRY(run_encode_map(a->driver, run->k, keys, PROMOTE_128, &a->maps[1], err));
    TRY(run_encode_map(a->driver, run->v, keys, PROMOTE_128, &a->maps[2], err));
    return run->between ? start_parts(plan, run, a, pieces ? pieces->n_first : 0, err)
                        : start_tiles(plan, a, &a->p, 1, err);
}
