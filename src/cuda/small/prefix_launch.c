/* Batches that share keys on a GPU: kern/prefix.cu. */
#include "cuda/program/program.h"
#include "cuda/small/small.h"
#include "plan/prefix.h"

enum { LIST_THREADS = 128, MERGE_WARPS = 8 };
enum { WRITE, MERGE };

static const cu_small kernels = {
    "prefix.cu", "shared_prefix", {"prefix_write", "prefix_merge_rows"}};

static saccade_status prepare(const saccade_plan *own, saccade_error *err)
{
    const cu_state *s = own->state;
    const cu_driver *driver;
    saccade_error none;
    if (!s->is_present || cu_get_driver(&driver, &none) != SACCADE_OK)
        return SACCADE_OK; /* a plan for a GPU that is not here */
    return cu_small_prepare(driver, &kernels, cu_current_device(driver), err);
}

static saccade_status write_lists(const prefix_lists *lists, int device, void *stream,
                                  saccade_error *err)
{
    const cu_small_run run = {.kernel = WRITE,
                              .blocks = (long long)lists->pieces + 1 + lists->B,
                              .threads = LIST_THREADS,
                              .parameters = (void *)(uintptr_t)lists};
    return cu_small_launch(&kernels, &run, device, stream, err);
}

static saccade_status merge(const prefix_merge *m, int device, void *stream, saccade_error *err)
{
    const long long rows = (long long)m->B * m->Q * m->H;
    const cu_small_run run = {.kernel = MERGE,
                              .blocks = (rows + MERGE_WARPS - 1) / MERGE_WARPS,
                              .threads = 32 * MERGE_WARPS,
                              .parameters = (void *)(uintptr_t)m};
    return cu_small_launch(&kernels, &run, device, stream, err);
}

const plan_prefix_steps cu_prefix_steps = {prepare, write_lists, merge};
