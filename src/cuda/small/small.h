/* small.h: kernels that no plan owns, and what starts them. */
#ifndef SACCADE_CUDA_SMALL_SMALL_H
#define SACCADE_CUDA_SMALL_SMALL_H

#include "cuda/driver/driver.h"
#include "kv/append.h"
#include "plan/plan.h"

/* ---- small_kernels.c: kernels that no plan owns ---- */

enum { CU_SMALL_KERNELS = 4 };
typedef struct cu_small {
    const char *file, *what;             /* of kern/; whose they are, for messages */
    const char *names[CU_SMALL_KERNELS]; /* NULL after the last */
} cu_small;
/* A launch of one of them. */
typedef struct cu_small_run {
    int kernel;       /* of the file's */
    long long blocks; /* along x */
    int sides;        /* along y, 0: 1 */
    int threads;      /* of a block */
    void *parameters; /* the kernel's one */
} cu_small_run;
/* Compiled at the first call for an architecture. The device's context is current. */
saccade_status cu_small_find(const cu_driver *driver, const cu_small *which, int device,
                             void *const **out, saccade_error *err);
/* cu_small_find from any context, before runs. */
saccade_status cu_small_prepare(const cu_driver *driver, const cu_small *which, int device,
                                saccade_error *err);
/* From any context; compiles what is not. */
saccade_status cu_small_launch(const cu_small *which, const cu_small_run *run, int device,
                               void *stream, saccade_error *err);

/* ---- append_launch.c: new keys into pools ---- */

/* Compiled at the first call for a GPU's architecture, and kept. */
saccade_status cu_append_prepare(int device, saccade_error *err);
saccade_status cu_append(const kv_append *a, int device, void *stream, saccade_error *err);

/* ---- head_max_launch.c: the largest score of each head ---- */

/* Compiled for the GPU of the current context, or the first, at the first call. */
saccade_status cu_head_max_prepare(const cu_driver *driver, saccade_error *err);
saccade_status cu_head_max(const saccade_plan *plan, const plan_run *run, saccade_error *err);

/* ---- prefix_launch.c: batches that share keys ---- */

extern const struct plan_prefix_steps cu_prefix_steps;

/* ---- select_launch.c: blocks selected on a device ---- */

saccade_status cu_select_prepare(const cu_driver *driver, int device, saccade_error *err);
/* Makes the lists of the mask's copies on the device that the tensor lies on. */
saccade_status cu_select_blocks(const saccade_block_mask *mask, const saccade_tensor *blocks,
                                void *stream, saccade_error *err);

#endif
