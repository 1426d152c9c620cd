/* saccade_append on a GPU: kern/append_keys.cu, one kernel for an architecture, compiled at the
 * first call and kept until the process ends. */
#include "cuda/cuda.h"
#include "kv/append.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARPS = 8, ARCHITECTURES = 8 };

typedef struct appender {
    int sm; /* 0: nothing here yet */
    void *kernel;
} appender;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static appender appenders[ARCHITECTURES];

static saccade_status load(const cu_driver *driver, int sm, void **out, saccade_error *err)
{
    char arch[16];
    cu_image image;
    void *library = NULL;
    snprintf(arch, sizeof arch, "sm_%d", sm);
    TRY(cu_compile("append_keys.cu", NULL, 0, arch, &image, err));
    int failed = driver->library_load(&library, image.code, NULL, NULL, 0, NULL, NULL, 0);
    free(image.code);
    failed = failed ? failed : driver->library_kernel(out, library, "append_keys");
    return cu_check(driver, failed, "loading what appends keys", err);
}

/* With the lock held. */
static saccade_status find(const cu_driver *driver, int sm, void **out, saccade_error *err)
{
    int i = 0;
    while (i < ARCHITECTURES && appenders[i].sm && appenders[i].sm != sm)
        i++;
    FAIL_IF(i == ARCHITECTURES, SACCADE_ELIMIT, "append: got GPUs of more than %d kinds",
            ARCHITECTURES);
    if (!appenders[i].sm) {
        TRY(load(driver, sm, &appenders[i].kernel, err));
        appenders[i].sm = sm;
    }
    *out = appenders[i].kernel;
    return SACCADE_OK;
}

/* The context of the device is current. */
static saccade_status kernel_of(const cu_driver *driver, int device, void **out,
                                saccade_error *err)
{
    cu_device found;
    TRY(cu_get_device(driver, device, &found, err));
    FAIL_IF(found.sm < 80, SACCADE_EBACKEND, "append: got a GPU sm_%d, expected sm_80 or later",
            found.sm);
    pthread_mutex_lock(&lock);
    const saccade_status status = find(driver, found.sm, out, err);
    pthread_mutex_unlock(&lock);
    return status;
}

static saccade_status launch(const cu_driver *driver, const kv_append *a, int device,
                             void *stream, saccade_error *err)
{
    void *kernel = NULL;
    void *parameters[] = {(void *)(uintptr_t)a};
    TRY(kernel_of(driver, device, &kernel, err));
    if (!a)
        return SACCADE_OK;
    const long long rows = a->n * a->heads;
    FAIL_IF(rows > INT32_MAX, SACCADE_ELIMIT, "append: got too many keys for one launch");
    return cu_check(driver,
                    driver->launch(kernel, (unsigned)((rows + WARPS - 1) / WARPS),
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
