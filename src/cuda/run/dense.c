/* Tensors that scores and masks read at their own query and key, as tensor copies take them
 * (dense.cuh): queries or keys are neighbours in memory, all else lies whole 16 bytes apart,
 * and no position of the run is outside, where reads are clamped and copies give zeros. */
#include "cuda/run/run.h"

/* A program's dense reads, and the blocks of scores that it takes at a time: rows of queries by
 * columns of keys, in backward rows of keys by columns of queries. */
typedef struct reads {
    const cu_mod_text *facts;
    int rows, columns, is_by_keys;
} reads;

static reads reads_of(const cu_state *s, cu_program program)
{
    const cu_form *form = &s->programs[program].form;
    if (program == CU_BWD_DENSE)
        return (reads){&s->backward_facts, form->tile.keys, form->backward.rows, 1};
    return (reads){&s->facts, run_rows(form), form->tile.keys, 0};
}

static const saccade_tensor *tensor_of(const reads *x, const plan_run *run, int r)
{
    const eval_env *env = r < x->facts->n_dense_score ? &run->score_env : &run->mask_env;
    return &env->tensors[x->facts->dense[r].capture];
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

/* Dimensions of a tensor that go with rows and columns, and which of them has neighbours in
 * memory. */
typedef struct sides {
    int row, column, near, far;
} sides;

static sides sides_of(const reads *x, const cu_dense *read, const saccade_tensor *t)
{
    const int row = x->is_by_keys ? read->kv : read->q;
    const int column = x->is_by_keys ? read->q : read->kv;
    const int is_turned = t->stride[column] != 1 && t->stride[row] == 1;
    return (sides){row, column, is_turned ? row : column, is_turned ? column : row};
}

static int takes(const reads *x, const saccade_plan *plan, const plan_run *run, int r)
{
    const cu_dense *read = &x->facts->dense[r];
    const saccade_tensor *t = tensor_of(x, run, r);
    const int64_t rows = plan->rows ? plan->rows->all : run->sizes.Q;
    const sides of = sides_of(x, read, t);
    int ok = t->stride[of.near] == 1 && t->stride[of.far] > 0 && (uintptr_t)t->data % 16 == 0
             && is_within(&run->positions.q_offset, rows, t->shape[read->q])
             && is_within(&run->positions.kv_offset, run->sizes.KV, t->shape[read->kv]);
    for (int d = 0; d < t->rank; d++)
        ok = ok && t->shape[d] > 0 && t->stride[d] >= 0
             && (d == of.near
                 || (run_stride(t, d) * read->bytes % 16 == 0
                     && run_stride(t, d) * read->bytes < (int64_t)1 << 40));
    return ok;
}

int run_takes_dense(const saccade_plan *plan, const plan_run *run, cu_program program)
{
    const reads x = reads_of(plan->state, program);
    const int is_of_mask = x.facts->n_dense_score == 0;
    if (program == CU_DENSE && is_of_mask && run->block_mask
        && cu_limits_find(run->q->device.index, run->block_mask, plan).of_row)
        return 0; /* limits of rows stand for the mask */
    for (int r = 0; r < x.facts->n_dense; r++)
        if (!takes(&x, plan, run, r))
            return 0;
    return 1;
}

/* Map over (near, far, others), in boxes of a panel: see dense.cuh. */
static saccade_status encode(const cu_driver *driver, const reads *x, const saccade_tensor *t,
                             const cu_dense *read, cu_map *out, saccade_error *err)
{
    enum { U8 = 0, U16 = 1, U32 = 2, SWIZZLE_32 = 1, SWIZZLE_64 = 2, SWIZZLE_128 = 3 };
    enum { GROUP_ROWS = 64 };
    const sides of = sides_of(x, read, t);
    const int is_turned = of.near == of.row, near = of.near, far = of.far, each = read->bytes;
    const int line = CU_DENSE_ROW((is_turned ? GROUP_ROWS : x->columns) * each);
    const uint32_t lines = (uint32_t)(is_turned ? x->columns : x->rows);
    const uint32_t box[5] = {(uint32_t)(line / each), lines, 1, 1, 1};
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

saccade_status run_map_dense(const saccade_plan *plan, const plan_run *run, cu_program program,
                             run_args *a, int *turned, saccade_error *err)
{
    const reads x = reads_of(plan->state, program);
    *turned = 0;
    for (int r = 0; r < x.facts->n_dense; r++) {
        const cu_dense *read = &x.facts->dense[r];
        const saccade_tensor *t = tensor_of(&x, run, r);
        const sides of = sides_of(&x, read, t);
        *turned |= (of.near == of.row) << r;
        TRY(encode(a->driver, &x, t, read, &a->dense[r], err));
    }
    return SACCADE_OK;
}
