/* saccade_append on a GPU: kern/append_keys.cu. */
#include "cuda/small/small.h"

enum { WARPS = 8 };

static const cu_small appender = {"append_keys.cu", "append", {"append_keys"}};

saccade_status cu_append(const kv_append *a, int device, void *stream, saccade_error *err)
{
    const cu_small_run run = {.blocks = (a->n * a->heads + WARPS - 1) / WARPS,
                              .sides = a->sides,
                              .threads = 32 * WARPS,
                              .parameters = (void *)(uintptr_t)a};
    return cu_small_launch(&appender, &run, device, stream, err);
}

saccade_status cu_append_prepare(int device, saccade_error *err)
{
    const cu_driver *driver;
    TRY(cu_get_driver(&driver, err));
    return cu_small_prepare(driver, &appender, device, err);
}
