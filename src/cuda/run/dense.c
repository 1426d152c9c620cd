/* Tensors that scores and masks read at their own query and key, as tensor copies take them
 * (dense.cuh): queries or keys are neighbours in memory, all else lies whole 16 bytes apart,
 * and no position of the run is outside, where reads are clamped and copies give zeros. */
#include "cuda/run/run.h"

/* Of dense read r. */
static const saccade_tensor *tensor_of(const saccade_plan *plan, const plan_run *run, int r)
{
    const cu_mod_text *facts = &((const cu_state *)plan->state)->facts;
    const eval_env *env = r < facts->n_dense_score ? &run->score_env : &run->mask_env;
    return &env->tensors[facts->dense[r].capture];
}

/* Whether positions [offset, offset + n) of a run are within [0, size). Offsets on a device are
 * not known. */
static int is_within(const saccade_tensor *offset, int64_t n, int64_t size)
{
    if (offset->dtype == SACCADE_NONE)
        return n <= size;
    if (offset->device.kind != SACCADE_CPU)
        return 0;
    const int32_t first = *(const int32_t *)offset->data;
    return first >= 0 && first + n <= size;
}

/* Queries lie side by side; otherwise keys do. */
static int is_turned(const saccade_tensor *t, const cu_dense *read)
{
    return t->stride[read->kv] != 1 && t->stride[read->q] == 1;
}

static int takes(const saccade_plan *plan, const plan_run *run, int r)
{
    const cu_dense *read = &((const cu_state *)plan->state)->facts.dense[r];
    const saccade_tensor *t = tensor_of(plan, run, r);
    const int64_t rows = plan->rows ? plan->rows->all : run->sizes.Q;
    const int near = is_turned(t, read) ? read->q : read->kv;
    const int far = near == read->q ? read->kv : read->q;
    int ok = t->stride[near] == 1 && t->stride[far] > 0 && (uintptr_t)t->data % 16 == 0
             && is_within(&run->positions.q_offset, rows, t->shape[read->q])
             && is_within(&run->positions.kv_offset, run->sizes.KV, t->shape[read->kv]);
    for (int d = 0; d < t->rank; d++)
        ok = ok && t->shape[d] > 0 && t->stride[d] >= 0
             && (d == near
                 || (run_stride(t, d) * read->bytes % 16 == 0
                     && run_stride(t, d) * read->bytes < (int64_t)1 << 40));
    return ok;
}

int run_takes_dense(const saccade_plan *plan, const plan_run *run)
{
    const cu_mod_text *facts = &((const cu_state *)plan->state)->facts;
    const int is_of_mask = facts->n_dense_score == 0;
    if (is_of_mask && run->block_mask
        && cu_limits_find(run->q->device.index, run->block_mask, plan).of_row)
        return 0; /* limits of rows stand for the mask */
    for (int r = 0; r < facts->n_dense; r++)
        if (!takes(plan, run, r))
            return 0;
    return 1;
}

/* Map over (near, far, others), in boxes of a panel: see dense.cuh. */
static saccade_status encode(const cu_driver *driver, const cu_form *form,
                             const saccade_tensor *t, const cu_dense *read, cu_map *out,
                             saccade_error *err)
{
    enum { U8 = 0, U16 = 1, U32 = 2, SWIZZLE_32 = 1, SWIZZLE_64 = 2, SWIZZLE_128 = 3 };
    const int turned = is_turned(t, read), near = turned ? read->q : read->kv;
    const int far = turned ? read->kv : read->q, each = read->bytes;
    const int line = CU_DENSE_ROW((turned ? 64 : form->tile.keys) * each);
    const uint32_t rows = (uint32_t)(turned ? form->tile.keys : run_rows(form));
    const uint32_t box[5] = {(uint32_t)(line / each), rows, 1, 1, 1};
    const uint32_t steps[5] = {1, 1, 1, 1, 1};
    uint64_t size[5] = {(uint64_t)t->shape[near], (uint64_t)t->shape[far], 1, 1, 1};
    const int64_t step = run_stride(t, far);
    uint64_t stride[4] = {step ? (uint64_t)(step * each) : 16, 16, 16, 16};
    for (int d = 0, n = 2; d < t->rank; d++)
        if (d != near && d != far) {
            if (run_stride(t, d)) {
                size[n] = (uint64_t)t->shape[d];
                stride[n - 1] = (uint64_t)(run_stride(t, d) * each);
            }
            n++;
        }
    return cu_check(driver,
                    driver->encode_map(out,
                                       each == 1   ? U8
                                       : each == 2 ? U16
                                                   : U32,
                                       5, t->data, size, stride, box, steps, 0,
                                       line == 128  ? SWIZZLE_128
                                       : line == 64 ? SWIZZLE_64
                                                    : SWIZZLE_32,
                                       PROMOTE_128, 0),
                    "cuTensorMapEncodeTiled", err);
}

saccade_status run_map_dense(const saccade_plan *plan, const plan_run *run, run_args *a,
                             saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[CU_DENSE].form;
    for (int r = 0; r < s->facts.n_dense; r++) {
        const cu_dense *read = &s->facts.dense[r];
        const saccade_tensor *t = tensor_of(plan, run, r);
        a->p.dense_turned |= is_turned(t, read) << r;
        TRY(encode(a->driver, form, t, read, &a->dense[r], err));
    }
    return SACCADE_OK;
}
