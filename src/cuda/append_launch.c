/* saccade_append on a GPU: kern/append_keys.cu. */
#include "cuda/cuda.h"

enum { WARPS = 8 };

static const cu_small appender = {"append_keys.cu", "append", {"append_keys"}};

/* The context of the device is current. a: NULL to compile only. */
static saccade_status launch(const cu_driver *driver, const kv_append *a, int device,
                             void *stream, saccade_error *err)
{
    void *const *kernel;
    void *parameters[] = {(void *)(uintptr_t)a};
    TRY(cu_small_find(driver, &appender, device, &kernel, err));
    if (!a)
        return SACCADE_OK;
    const long long rows = a->n * a->heads;
    FAIL_IF(rows > INT32_MAX, SACCADE_ELIMIT, "append: got too many keys for one launch");
    return cu_check(driver,
                    driver->launch(kernel[0], (unsigned)((rows + WARPS - 1) / WARPS),
                                   (unsigned)a->sides, 1, 32 * WARPS, 1, 1, 0, stream,
                                   parameters, NULL),
                    "cuLaunchKernel", err);
}

saccade_status cu_append(const kv_append *a, int device, void *stream, saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status = launch(driver, a, device, stream, err);
    cu_leave(driver, pushed);
    return status;
}

saccade_status cu_append_prepare(int device, saccade_error *err)
{
    return cu_append(NULL, device, NULL, err);
}
