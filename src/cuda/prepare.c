/* What a plan's runs need on a device before the first of them, forward's and backward's: rows
 * of its own, lists of a block mask's live blocks, tiles that divide what ranks share. */
#include "cuda/cuda.h"

#include "cuda/backward/cuda_backward.h"
#include "cuda/small/small.h"

saccade_status cu_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                          saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(cu_get_driver(&driver, err));
    const int device = cu_current_device(driver);
    TRY(cu_place_rows(plan, driver, device, err));
    if (!mask)
        return SACCADE_OK;
    TRY(cu_runs_check(&plan->problem, mask, err));
    saccade_sizes sizes = mask_get_view(mask)->sizes;
    if (sizes.B == 1 && plan->problem.sizes.B > 1) /* one mask for a batch the plan hints at */
        sizes.B = plan->problem.sizes.B;
    sizes.H = plan->problem.sizes.H;
    sizes.Hkv = plan->problem.sizes.Hkv;
    sizes.D = plan->problem.sizes.D;
    sizes.Dv = plan->problem.sizes.Dv;
    sizes = cu_local_sizes(plan, &sizes);
    if (mask_get_view(mask)->selection.most)
        TRY(cu_select_prepare(driver, device, err));
    TRY(run_make_runs(plan, mask, driver, device, &sizes, err));
    return plan->problem.gradients ? cu_backward_make_runs(plan, mask, device, &sizes, err)
                                   : SACCADE_OK;
}

/* ---- tiles ---- */

static int64_t common_multiple(int64_t a, int64_t b)
{
    int64_t x = a;
    while (x % b)
        x += a;
    return x;
}

int64_t cu_row_tile(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const cu_state *s = plan->state;
    int64_t tile = ROW_BLOCK;
    (void)sizes;
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (s->programs[i].form.tile.groups > 0
            && (cu_program_kinds[i].operation == CU_OP_FORWARD
                || cu_program_kinds[i].operation == CU_OP_SMALL))
            tile = common_multiple(
                tile, cu_tile_rows(s->programs[i].form.family, &s->programs[i].form.tile));
    if (cu_backward_has_wide(s) && (plan->problem.sizes.D > 64 || plan->problem.sizes.Dv > 64))
        tile = common_multiple(tile, s->programs[CU_BWD_WIDE].form.backward.stay);
    return tile;
}
