/* The largest score of each head on a GPU: kern/head_max.cu. */
#include "cuda/small/small.h"
#include "cuda/kern/head_max.h"

enum { THREADS = 256 };

static const cu_small finder = {"head_max.cu", "head_max", {"head_max"}};

saccade_status cu_head_max_prepare(const cu_driver *driver, saccade_error *err)
{
    return cu_small_prepare(driver, &finder, cu_current_device(driver), err);
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
    cu_head_max_run p = describe(run);
    const cu_small_run launch = {.blocks = (long long)p.H * (p.is_joint ? 1 : p.B),
                                 .threads = THREADS,
                                 .parameters = &p};
    (void)plan;
    return cu_small_launch(&finder, &launch, run->q->device.index, run->stream, err);
}
