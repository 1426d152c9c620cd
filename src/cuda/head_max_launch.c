/* The largest score of each head on a GPU: kern/head_max.cu. */
#include "cuda/cuda.h"
#include "cuda/kern/head_max.h"

enum { THREADS = 256 };

static const cu_small finder = {"head_max.cu", "head_max", {"head_max"}};

saccade_status cu_head_max_prepare(const cu_driver *driver, saccade_error *err)
{
    int device = 0;
    void *context = NULL, *pushed;
    void *const *kernel;
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status = cu_small_find(driver, &finder, device, &kernel, err);
    cu_leave(driver, pushed);
    return status;
}

static cu_head_max_run describe(const plan_run *run)
{
    const saccade_tensor *rows = run->row_max, *out = run->head_max;
    return (cu_head_max_run){.rows = rows->data,
                             .out = out->data,
                             .b = rows->stride[0],
                             .h = rows->stride[1],
                             .i = rows->stride[2],
                             .out_b = out->stride[0],
                             .out_h = out->stride[1],
                             .first = run->ragged ? run->ragged->q_first : NULL,
                             .B = (int)run->sizes.B,
                             .H = (int)run->sizes.H,
                             .M = (int)run->sizes.Q,
                             .all = (int)rows->shape[2],
                             .is_joint = out->shape[0] == 1};
}

saccade_status cu_head_max(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    void *const *kernel;
    cu_head_max_run p = describe(run);
    void *parameters[] = {&p};
    const long long grid = (long long)p.H * (p.is_joint ? 1 : p.B);
    const int device = run->q->device.index;
    (void)plan;
    FAIL_IF(grid > INT32_MAX, SACCADE_ELIMIT, "head_max: got too many heads for one launch");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    saccade_status status = cu_small_find(driver, &finder, device, &kernel, err);
    if (status == SACCADE_OK)
        status = cu_check(driver,
                          driver->launch(kernel[0], (unsigned)grid, 1, 1, THREADS, 1, 1, 0,
                                         run->stream, parameters, NULL),
                          "cuLaunchKernel", err);
    cu_leave(driver, pushed);
    return status;
}
