/* Kernels that no plan owns: compiled for an architecture at the first call, and kept until the
 * process ends. */
#include "cuda/small/small.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HELD = 16 };

typedef struct held_kernels {
    const char *file; /* NULL: nothing here yet */
    int sm;
    void *kernel[CU_SMALL_KERNELS];
} held_kernels;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static held_kernels held[HELD];

static saccade_status load(const cu_driver *driver, const cu_small *which, held_kernels *out,
                           saccade_error *err)
{
    char arch[16];
    cu_image image;
    void *library = NULL;
    snprintf(arch, sizeof arch, "sm_%d", out->sm);
    TRY(cu_compile(which->file, NULL, 0, arch, &image, err));
    int failed = driver->library_load(&library, image.code, NULL, NULL, 0, NULL, NULL, 0);
    free(image.code);
    for (int i = 0; i < CU_SMALL_KERNELS && which->names[i] && !failed; i++)
        failed = driver->library_kernel(&out->kernel[i], library, which->names[i]);
    if (failed && library)
        driver->library_unload(library);
    TRY(cu_check(driver, failed, which->what, err));
    out->file = which->file;
    return SACCADE_OK;
}

/* With the lock held. */
static saccade_status find(const cu_driver *driver, const cu_small *which, int sm,
                           held_kernels **out, saccade_error *err)
{
    int i = 0;
    while (i < HELD && held[i].file
           && (held[i].sm != sm || strcmp(held[i].file, which->file) != 0))
        i++;
    FAIL_IF(i == HELD, SACCADE_ELIMIT, "%s: got GPUs of too many kinds", which->what);
    *out = &held[i];
    if (held[i].file)
        return SACCADE_OK;
    held[i].sm = sm;
    return load(driver, which, &held[i], err);
}

saccade_status cu_small_find(const cu_driver *driver, const cu_small *which, int device,
                             void *const **out, saccade_error *err)
{
    cu_device about;
    held_kernels *found = NULL;
    TRY(cu_get_device(driver, device, &about, err));
    FAIL_IF(about.sm < 80, SACCADE_EBACKEND, "%s: got a GPU sm_%d, expected sm_80 or later",
            which->what, about.sm);
    pthread_mutex_lock(&lock);
    const saccade_status status = find(driver, which, about.sm, &found, err);
    pthread_mutex_unlock(&lock);
    if (status == SACCADE_OK)
        *out = found->kernel;
    return status;
}

saccade_status cu_small_prepare(const cu_driver *driver, const cu_small *which, int device,
                                saccade_error *err)
{
    void *const *kernel;
    void *pushed;
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status = cu_small_find(driver, which, device, &kernel, err);
    cu_leave(driver, pushed);
    return status;
}

saccade_status cu_small_launch(const cu_small *which, const cu_small_run *run, int device,
                               void *stream, saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    void *const *kernel;
    void *parameters[] = {run->parameters};
    FAIL_IF(run->blocks > INT32_MAX, SACCADE_ELIMIT,
            "%s: got %lld blocks for one launch, expected at most %d", which->what, run->blocks,
            INT32_MAX);
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    saccade_status status = cu_small_find(driver, which, device, &kernel, err);
    if (status == SACCADE_OK)
        status =
            cu_check(driver,
                     driver->launch(kernel[run->kernel], (unsigned)run->blocks,
                                    run->sides ? (unsigned)run->sides : 1, 1,
                                    (unsigned)run->threads, 1, 1, 0, stream, parameters, NULL),
                     "cuLaunchKernel", err);
    cu_leave(driver, pushed);
    return status;
}
