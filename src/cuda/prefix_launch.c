/* Batches that share keys on a GPU: kern/prefix.cu. */
#include "cuda/cuda.h"
#include "plan/prefix.h"

enum { LIST_THREADS = 128, MERGE_WARPS = 8 };
enum { WRITE, MERGE };

static const cu_small kernels = {
    "prefix.cu", "shared_prefix", {"prefix_write", "prefix_merge_rows"}};

/* Compiles, and launches where there are parameters. */
static saccade_status start(int device, int which, long long grid, int threads,
                            void *parameters, void *stream, saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    void *const *kernel;
    void *all[] = {parameters};
    FAIL_IF(grid > INT32_MAX, SACCADE_ELIMIT,
            "shared_prefix: got too many rows for one launch");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    saccade_status status = cu_small_find(driver, &kernels, device, &kernel, err);
    if (status == SACCADE_OK && parameters)
        status = cu_check(driver,
                          driver->launch(kernel[which], (unsigned)grid, 1, 1, (unsigned)threads,
                                         1, 1, 0, stream, all, NULL),
                          "cuLaunchKernel", err);
    cu_leave(driver, pushed);
    return status;
}

static saccade_status prepare(const saccade_plan *own, saccade_error *err)
{
    const cu_state *s = own->state;
    const cu_driver *driver;
    saccade_error none;
    int device = 0;
    void *context = NULL;
    if (!s->is_present || cu_get_driver(&driver, &none) != SACCADE_OK)
        return SACCADE_OK; /* a plan for a GPU that is not here */
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    return start(device, WRITE, 1, 1, NULL, NULL, err);
}

static saccade_status write_lists(const prefix_lists *lists, int device, void *stream,
                                  saccade_error *err)
{
    return start(device, WRITE, (long long)lists->pieces + 1 + lists->B, LIST_THREADS,
                 (void *)(uintptr_t)lists, stream, err);
}

static saccade_status merge(const prefix_merge *m, int device, void *stream, saccade_error *err)
{
    const long long rows = (long long)m->B * m->Q * m->H;
    return start(device, MERGE, (rows + MERGE_WARPS - 1) / MERGE_WARPS, 32 * MERGE_WARPS,
                 (void *)(uintptr_t)m, stream, err);
}

const plan_prefix_steps cu_prefix_steps = {prepare, write_lists, merge};
