/* Block masks as backward walks them: for every tile of keys the blocks of queries that it
 * meets, and for the plain way also for every tile of queries its blocks of keys. */
#include "cuda/backward/cuda_backward.h"

#include "base/integers.h"
#include "cuda/emit/emit.h"

int cu_backward_is_suited(const saccade_block_mask *mask, int rows, int keys)
{
    const mask_view *view = mask ? mask_get_view(mask) : NULL;
    return !view || !view->imported_block_q
           || (view->imported_block_q % rows == 0 && view->imported_block_kv % keys == 0);
}

int cu_backward_suits_dense(const cu_state *s, const saccade_block_mask *mask)
{
    return cu_backward_has_dense(s)
           && cu_backward_is_suited(mask, BWD_ROWS, s->programs[CU_BWD_DENSE].form.tile.keys);
}

/* Which copies of a mask tell what tiles of keys meet: heads of a group come together, but
 * where a kernel keeps something of the head that it is at. */
static int key_runs(const saccade_plan *plan)
{
    const plan_problem *p = &plan->problem;
    const int by_rows = p->group > 1 && !p->weight && !cu_has_captures(p) ? RUNS_BY_ROWS : 0;
    return RUNS_OF_KEYS - by_rows - (cu_backward_cut_heads(p) > 1 ? RUNS_IN_PARTS : 0);
}

const cu_runs *cu_backward_key_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                    int device, const saccade_sizes *sizes, int keys)
{
    return cu_runs_find(device, mask, BWD_ROWS, keys, key_runs(plan), sizes, plan);
}

/* Without a block mask: many heads of few keys, of which a tile of more would be empty in part.
 * Query heads are not cut into parts here. */
static int sees_few(const saccade_plan *plan, const saccade_sizes *sizes, int keys, int most)
{
    const cu_state *s = plan->state;
    const int64_t blocks = ceil_div(sizes->KV, keys);
    return plan->problem.group == 1 && !plan->problem.has_chunks && blocks <= most
           && sizes->B * sizes->Hkv * blocks >= 2 * s->device.n_sm;
}

int cu_backward_takes_few(const saccade_plan *plan, const saccade_block_mask *mask, int device,
                          const saccade_sizes *sizes, int most)
{
    const cu_state *s = plan->state;
    const int keys = s->programs[CU_BWD_FEW].form.tile.keys;
    if (!keys || !cu_backward_is_suited(mask, BWD_ROWS, keys))
        return 0;
    if (!mask)
        return sees_few(plan, sizes, keys, most);
    if (cu_has_captures(&plan->problem)) /* their tiles are walked beside */
        return 0;
    const cu_runs *runs = cu_backward_key_runs(plan, mask, device, sizes, keys);
    if (!runs || !runs->n_blocks)
        return 0;
    const int64_t lists = (int64_t)runs->list_batches * runs->list_heads;
    return s->tiles == 's'
           || (cu_backward_sees_few(runs->n_blocks, lists, sizes->Q, most)
               && !cu_backward_takes_short(plan, sizes, 1));
}

saccade_status cu_backward_make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                     int device, const saccade_sizes *sizes, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *plain = &s->programs[CU_BWD_PLAIN].form;
    const int tile_keys = s->programs[CU_BWD_TILES].form.tile.keys, keys = plain->tile.keys;
    const int wide_rows = s->programs[CU_BWD_WIDE].form.backward.stay;
    const int short_keys = s->programs[CU_BWD_SHORT].form.tile.keys, of_keys = key_runs(plan);
    const int dense_keys = s->programs[CU_BWD_DENSE].form.tile.keys;
    const cu_driver *driver;
    FAIL_AT(!cu_backward_is_suited(mask, BWD_ROWS, keys), SACCADE_EINVAL, "block_mask", 0, 0,
            "got imported blocks of %d x %d, expected multiples of %d x %d for gradients",
            mask_get_view(mask)->imported_block_q, mask_get_view(mask)->imported_block_kv,
            BWD_ROWS, keys);
    TRY(cu_get_driver(&driver, err));
    if (cu_backward_has_tiles(s) && cu_backward_is_suited(mask, BWD_ROWS, tile_keys))
        TRY(cu_runs_make(driver, device, mask, BWD_ROWS, tile_keys, of_keys, sizes, plan, err));
    if (cu_backward_takes_short(plan, sizes, 1)
        && cu_backward_is_suited(mask, BWD_ROWS, short_keys))
        TRY(cu_runs_make(driver, device, mask, BWD_ROWS, short_keys, of_keys, sizes, plan,
                         err));
    if (cu_backward_suits_dense(s, mask))
        TRY(cu_runs_make(driver, device, mask, BWD_ROWS, dense_keys, of_keys, sizes, plan,
                         err));
    TRY(cu_runs_make(driver, device, mask, BWD_ROWS, keys, of_keys, sizes, plan, err));
    if (cu_backward_takes_few(plan, mask, device, sizes, BWD_FEW_BLOCKS))
        TRY(cu_runs_make(driver, device, mask, BWD_ROWS, keys, 1, sizes, plan, err));
    if (cu_backward_has_wide(s) && cu_backward_is_suited(mask, wide_rows, keys))
        TRY(cu_runs_make(driver, device, mask, wide_rows, keys, 1, sizes, plan, err));
    if (cu_backward_has_f32(s))
        TRY(cu_runs_make(driver, device, mask, BWD_ROWS,
                         s->programs[CU_BWD_F32].form.backward.rows, 1, sizes, plan, err));
    return cu_runs_make(driver, device, mask, BWD_ROWS, plain->backward.rows, 1, sizes, plan,
                        err);
}

static saccade_status find(const saccade_plan *plan, const plan_run *run, int rows, int keys,
                           int group, const cu_runs **out, saccade_error *err)
{
    const int device = run->q->device.index;
    *out = cu_runs_find(device, run->block_mask, rows, keys, group, &run->sizes, plan);
    FAIL_IF(!*out, SACCADE_EINVAL,
            "cuda: got a block mask that has no copy for backward on device %d for this batch, "
            "expected saccade_plan_prepare first",
            device);
    return SACCADE_OK;
}

saccade_status cu_backward_find_runs(const saccade_plan *plan, const plan_run *run,
                                     cu_program program, cu_backward_runs *out,
                                     saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *plain = &s->programs[CU_BWD_PLAIN].form;
    const int keys = s->programs[program].form.tile.keys;
    *out = (cu_backward_runs){NULL, NULL, NULL};
    if (!run->block_mask)
        return SACCADE_OK;
    TRY(find(plan, run, BWD_ROWS, keys, key_runs(plan), &out->tiles, err));
    if (program == CU_BWD_PLAIN || cu_has_captures(&plan->problem))
        TRY(find(plan, run, BWD_ROWS, plain->backward.rows, 1, &out->queries, err));
    if (program == CU_BWD_F32)
        TRY(find(plan, run, BWD_ROWS, s->programs[program].form.backward.rows, 1,
                 &out->wide_queries, err));
    if (program == CU_BWD_FEW || program == CU_BWD_WIDE)
        TRY(find(plan, run, s->programs[program].form.backward.stay, keys, 1,
                 &out->wide_queries, err));
    return SACCADE_OK;
}
