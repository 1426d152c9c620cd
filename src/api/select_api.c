/* saccade_block_mask_select: the blocks of a mask from a tensor, on the host or on a GPU. */
#include "api/api.h"
#include "cuda/small/small.h"

saccade_status saccade_block_mask_select(saccade_block_mask *mask, const saccade_tensor *blocks,
                                         void *stream, saccade_error *err)
{
    FAIL_AT(!mask, SACCADE_EINVAL, "block_mask", 0, 0, "got NULL, expected one");
    const mask_view *view = mask_get_view(mask);
    const struct mask_selection *x = &view->selection;
    FAIL_AT(!x->most, SACCADE_EINVAL, "block_mask", 0, 0,
            "got a mask that is not selected, expected one of "
            "saccade_block_mask_create_selected");
    FAIL_AT(!blocks, SACCADE_EINVAL, "blocks", 0, 0, "got NULL, expected a tensor");
    const int64_t unit = view->imported_block_q, rows = (view->sizes.Q + unit - 1) / unit;
    const api_expected expected = {"blocks", SACCADE_I32, 4,
                                   blocks->device.kind == SACCADE_CUDA ? SACCADE_CUDA
                                                                       : SACCADE_CPU};
    int64_t shape[4] = {x->B, x->Hkv, rows, 0};
    saccade_tensor any = *blocks; /* entries may lie apart from each other */
    any.stride[3] = any.rank == 4 ? 1 : any.stride[3];
    const int is_empty = any.rank == 4 && any.shape[3] == 0;
    if (is_empty) { /* rows without entries, which nothing reads: data may be NULL */
        any.shape[3] = 1;
        any.data = mask;
    }
    TRY(api_check_tensor(&any, &expected, shape, err));
    shape[3] = is_empty ? 0 : shape[3];
    FAIL_AT(shape[3] > x->most || blocks->stride[3] < 0, SACCADE_EINVAL, "blocks", 0, 0,
            "got %lld entries %lld apart in a row, expected at most %d", (long long)shape[3],
            (long long)blocks->stride[3], x->most);
    return expected.device == SACCADE_CUDA ? cu_select_blocks(mask, blocks, stream, err)
                                           : mask_select(mask, blocks, err);
}
