/* saccade_block_mask_select on a GPU: the lists of all of a mask's copies there are made again
 * by kern/select_lists.cu, in the memory that they have. */
#include "cuda/mask/device_mask.h"
#include "cuda/small/small.h"
#include "cuda/kern/select.h"

#include <string.h>

enum { BIT_THREADS = 128, LIST_WARPS = 8, SCAN_THREADS = 1024 };
enum { BITS, COUNT, SCAN, RUNS };

static const cu_small selector = {
    "select_lists.cu",
    "selected blocks",
    {"select_bits", "select_count", "select_scan", "select_runs"},
};

static cu_list list_of(const cu_copy *c, const mask_view *view)
{
    const int block_q = view->imported_block_q, block_kv = view->imported_block_kv;
    const int by_q = block_q / c->rows, by_kv = block_kv / c->keys;
    return (cu_list){.runs = (cu_run *)(uintptr_t)c->runs->runs,
                     .start = (int *)(uintptr_t)c->runs->run_start,
                     .batches = c->runs->list_batches,
                     .heads = c->runs->list_heads,
                     .rows = c->runs->n_qblk,
                     .columns = c->runs->list_columns,
                     .row_blocks = c->is_transposed ? by_kv : by_q,
                     .column_blocks = c->is_transposed ? by_q : by_kv,
                     .is_transposed = c->is_transposed,
                     .is_partial = view->mod != NULL};
}

static void describe(const mask_view *view, const saccade_tensor *blocks, cu_select *s)
{
    const int64_t columns =
        (view->sizes.KV + view->imported_block_kv - 1) / view->imported_block_kv;
    s->blocks = blocks->data;
    s->B = (int)blocks->shape[0];
    s->H = (int)blocks->shape[1];
    s->rows = (int)blocks->shape[2];
    s->entries = (int)blocks->shape[3];
    s->columns = (int)columns;
    s->words = (int)((columns + 31) / 32);
    for (int i = 0; i < 4; i++)
        s->stride[i] = blocks->stride[i];
}

static saccade_status launch(const cu_driver *driver, void *const *kernel, cu_select *s,
                             void *stream, saccade_error *err)
{
    void *parameters[] = {s};
    long long most = 0;
    for (int i = 0; i < s->n_lists; i++) {
        const cu_list *l = &s->list[i];
        const long long n = (long long)l->batches * l->heads * l->rows;
        most = n > most ? n : most;
    }
    const unsigned grid = (unsigned)((most + LIST_WARPS - 1) / LIST_WARPS);
    const unsigned lists = (unsigned)s->n_lists;
    int failed = driver->launch(kernel[BITS], (unsigned)(s->B * s->H * s->rows), 1, 1,
                                BIT_THREADS, 1, 1, 0, stream, parameters, NULL);
    failed = failed ? failed
                    : driver->launch(kernel[COUNT], grid, lists, 1, 32 * LIST_WARPS, 1, 1, 0,
                                     stream, parameters, NULL);
    failed = failed ? failed
                    : driver->launch(kernel[SCAN], lists, 1, 1, SCAN_THREADS, 1, 1, 0, stream,
                                     parameters, NULL);
    failed = failed ? failed
                    : driver->launch(kernel[RUNS], grid, lists, 1, 32 * LIST_WARPS, 1, 1, 0,
                                     stream, parameters, NULL);
    return cu_check(driver, failed, "lists of selected blocks", err);
}

/* A dozen copies at a time; few masks have as many. */
static saccade_status select_all(const cu_driver *driver, const saccade_block_mask *mask,
                                 const saccade_tensor *blocks, void *stream, saccade_error *err)
{
    const mask_view *view = mask_get_view(mask);
    const int device = blocks->device.index;
    void *const *kernel;
    TRY(cu_small_find(driver, &selector, device, &kernel, err));
    for (int first = 0, n = 1; first < n; first += SELECT_LISTS) {
        cu_copy copies[SELECT_LISTS];
        cu_select s;
        memset(&s, 0, sizeof s);
        n = cu_runs_copies(device, mask, first, SELECT_LISTS, copies);
        FAIL_AT(n == 0, SACCADE_EINVAL, "block_mask", 0, 0,
                "got one that has no copy on device %d, expected saccade_plan_prepare first",
                device);
        s.n_lists = n - first < SELECT_LISTS ? n - first : SELECT_LISTS;
        for (int i = 0; i < s.n_lists; i++)
            s.list[i] = list_of(&copies[i], view);
        s.bits = (unsigned *)(uintptr_t)copies[0].runs->bits;
        describe(view, blocks, &s);
        TRY(launch(driver, kernel, &s, stream, err));
    }
    return SACCADE_OK;
}

saccade_status cu_select_blocks(const saccade_block_mask *mask, const saccade_tensor *blocks,
                                void *stream, saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, blocks->device.index, &pushed, err));
    const saccade_status status = select_all(driver, mask, blocks, stream, err);
    cu_leave(driver, pushed);
    return status;
}

saccade_status cu_select_prepare(const cu_driver *driver, int device, saccade_error *err)
{
    return cu_small_prepare(driver, &selector, device, err);
}
