/* Tensors, positions and captures of a run as kernels take them. */
#include "cuda/run/run.h"

#include "base/convert.h"
#include "base/quantize.h"

#include <assert.h>
#include <string.h>

/* ---- tensors ---- */

int64_t run_stride(const saccade_tensor *t, int d)
{
    return t->shape[d] == 1 ? 0 : t->stride[d];
}

cu_stride run_strides(const saccade_tensor *t)
{
    return (cu_stride){run_stride(t, 0), run_stride(t, 1), run_stride(t, 2)};
}

/* Whether rows lie on 16 bytes, which tensor copies and 16-byte stores need. */
int run_has_aligned_rows(const saccade_tensor *t)
{
    int ok = (uintptr_t)t->data % 16 == 0 && (t->shape[2] == 1 || t->stride[2] != 0);
    for (int d = 0; d < 3; d++)
        ok = ok && quant_bytes(t->dtype, run_stride(t, d)) % 16 == 0;
    return ok;
}

/* whether a row of so many elements is whole 16 bytes */
static int is_whole(int64_t dim, saccade_dtype dtype)
{
    return dim * (int64_t)saccade_dtype_bytes(dtype) % 16 == 0;
}

/* Whether tensor copies, 16-byte loads and 16-byte stores do for this run. */
int run_is_aligned(const plan_run *run)
{
    return run_has_aligned_rows(run->q) && run_has_aligned_rows(run->k)
           && run_has_aligned_rows(run->v) && run_has_aligned_rows(run->out)
           && is_whole(run->sizes.D, run->q->dtype) && is_whole(run->sizes.Dv, run->q->dtype);
}

/* Map over (d, n, h, b) in boxes of 128 bytes x rows, 128-byte swizzle; codes are bytes. */
saccade_status run_encode_map(const cu_driver *driver, const saccade_tensor *t, int rows,
                              int promotion, cu_map *out, saccade_error *err)
{
    enum { U8 = 0, F16 = 6, BF16 = 9, SWIZZLE_128 = 3 };
    const uint32_t bytes = (uint32_t)saccade_dtype_bytes(t->dtype);
    const int type = bytes == 1 ? U8 : t->dtype == SACCADE_BF16 ? BF16 : F16;
    const uint64_t size[4] = {(uint64_t)t->shape[3], (uint64_t)t->shape[2],
                              run_stride(t, 1) ? (uint64_t)t->shape[1] : 1,
                              run_stride(t, 0) ? (uint64_t)t->shape[0] : 1};
    uint64_t stride[3];
    for (int d = 0; d < 3; d++) {
        const int64_t s = run_stride(t, 2 - d);
        stride[d] = s ? (uint64_t)s * bytes : 16;
    }
    const uint32_t box[4] = {128 / bytes, (uint32_t)rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return cu_check(driver,
                    driver->encode_map(out, type, 4, t->data,
                                       size, stride, box, steps, 0, SWIZZLE_128, promotion, 0),
                    "cuTensorMapEncodeTiled", err);
}

static cu_position position_of(const saccade_tensor *t, int otherwise)
{
    if (t->dtype == SACCADE_NONE)
        return (cu_position){NULL, 0, otherwise};
    if (t->device.kind == SACCADE_CPU)
        return (cu_position){NULL, 0, *(const int32_t *)t->data};
    return (cu_position){t->data, t->rank ? (int)t->stride[0] : 0, 0};
}

/* A scalar's bits, by its type in the mod. */
static int scalar_bits(const mod_capture *c, const saccade_tensor *t)
{
    const double x = convert_element(t->dtype, t->data);
    return c->type == MOD_FLOAT ? (int)f32_bits((float)x) : (int)(int64_t)x;
}

saccade_status run_captures(const mod_fn *fn, const saccade_tensor *tensors, cu_capture *out,
                            saccade_error *err)
{
    for (uint32_t i = 0; fn && i < fn->n_captures; i++) {
        const saccade_tensor *t = &tensors[i];
        cu_capture *c = &out[i];
        memset(c, 0, sizeof *c);
        FAIL_AT((t->device.kind == SACCADE_CPU) != (t->rank == 0), SACCADE_EINVAL,
                fn->captures[i].name, 0, 0,
                "got it on the %s, expected scalars on the host and tensors on the device",
                t->rank ? "host" : "device");
        if (t->rank == 0) {
            c->shape[0] = scalar_bits(&fn->captures[i], t);
            continue;
        }
        c->data = t->data;
        for (int d = 0; d < t->rank; d++) {
            c->shape[d] = (int)t->shape[d];
            c->stride[d] = t->stride[d];
        }
    }
    return SACCADE_OK;
}

/* ---- parameters ---- */

/* Strides of K and V in bytes where they are quantised, else in elements. */
static cu_stride key_strides(const saccade_tensor *t)
{
    const cu_stride s = run_strides(t);
    return t->dtype == SACCADE_I4 ? (cu_stride){s.b / 2, s.h / 2, s.n / 2} : s;
}

static cu_scale scale_of(const saccade_tensor *t, const plan_groups *groups)
{
    if (!t)
        return (cu_scale){0};
    return (cu_scale){t->data,          run_stride(t, 0),        run_stride(t, 1),
                      run_stride(t, 2),  run_stride(t, 3),        groups->tokens,
                      groups->channels, t->dtype == SACCADE_F16};
}

int run_shift(int64_t size)
{
    int shift = 0;
    while ((int64_t)1 << shift < size)
        shift++;
    return (int64_t)1 << shift == size ? shift : -1;
}

static cu_chunks chunks_of(const plan_run *run)
{
    const plan_chunks *c = run->chunks;
    return (cu_chunks){.first = c->first,
                       .start = c->start,
                       .step = c->row_stride,
                       .count = c->count,
                       .size = c->size,
                       .shift = run_shift(c->size),
                       .entries = c->entries,
                       .last = (int)run->k->shape[c->is_paged ? 0 : 2] - 1,
                       .is_paged = c->is_paged,
                       .has_last = run->positions.pages != NULL};
}

int run_place_box(const plan_run *run, int is_decode, const cu_tile *tile, cu_chunks *chunks)
{
    chunks->box = cu_keys_in_both(run->chunks ? run->chunks->size : tile->keys, tile->keys);
    chunks->is_small = cu_gathers(is_decode, tile, chunks->box);
    return chunks->box;
}

static cu_drop drop_of(const plan_problem *problem, const plan_run *run)
{
    const plan_dropout *d = &run->dropout;
    return (cu_drop){.state = (const unsigned long long *)(const void *)d->state,
                     .seed = d->seed,
                     .offset = d->offset,
                     .b_offset = run->mask_env.b_offset,
                     .h_offset = (int)problem->h_offset,
                     .threshold = d->threshold,
                     .factor = d->factor};
}

static void fill_ragged(const plan_run *run, const cu_form *form, cu_fwd *p)
{
    const int64_t k = run->k->shape[2], v = run->v->shape[2];
    p->ragged = (cu_ragged){.q_first = run->ragged->q_first,
                            .kv_first = run->ragged->kv_first,
                            .rows = (int)run->q->shape[2],
                            .keys = (int)(k < v ? k : v),
                            .is_end = run->ragged->is_end,
                            .order = p->redo + run_groups(form, &run->sizes),
                            .n_tiles = p->counter + 2};
}

void run_fill_runs(const plan_problem *problem, const cu_runs *runs, cu_fwd *p)
{
    if (!runs)
        return;
    p->runs = (const cu_run *)(uintptr_t)runs->runs;
    p->run_start = (const int *)(uintptr_t)cu_runs_start(runs, problem);
    p->order = (const int *)(uintptr_t)runs->order;
    p->block_keys = runs->keys;
    p->mask_b = runs->mask_b;
    p->mask_h = runs->mask_h;
}

void run_fill(const saccade_plan *plan, const plan_run *run, const cu_form *form,
              const cu_runs *runs, cu_fwd *p)
{
    const int rows = run_rows(form);
    memset(p, 0, sizeof *p);
    p->q = run->q->data;
    p->k = run->k->data;
    p->v = run->v->data;
    p->o = run->out->data;
    p->lse = run->lse ? run->lse->data : NULL;
    p->row_max = run->row_max ? run->row_max->data : NULL;
    p->qs = run_strides(run->q);
    p->ks = key_strides(run->k);
    p->vs = key_strides(run->v);
    p->k_scale = scale_of(run->k_scale, &plan->problem.k_groups);
    p->v_scale = scale_of(run->v_scale, &plan->problem.v_groups);
    p->os = run_strides(run->out);
    if (run->lse)
        p->lse_s = run_strides(run->lse);
    if (run->row_max)
        p->max_s = run_strides(run->row_max);
    p->B = (int)run->sizes.B;
    p->H = (int)run->sizes.H;
    p->G = (int)run->sizes.Hkv;
    p->M = (int)run->sizes.Q;
    p->N = (int)run->sizes.KV;
    p->scale = (float)plan->problem.scale;
    p->is_plain = !run_is_aligned(run);
    p->q_offset = position_of(&run->positions.q_offset, 0);
    p->kv_offset = position_of(&run->positions.kv_offset, 0);
    p->kv_len = position_of(&run->positions.kv_len, (int)run->sizes.KV);
    p->counter = run->workspace;
    p->flags = (int *)((char *)run->workspace + RUN_COUNTER_BYTES);
    p->n_qblk = rows ? (int)((run->sizes.Q + rows - 1) / rows) : 0; /* 0: decode alone */
    p->n_tiles = (int)run_tiles(form, &run->sizes);
    p->tile_groups = rows / 16;
    p->redo_count = p->counter + 1;
    p->redo = p->flags + run_groups(form, &run->sizes);
    assert(plan->problem.has_chunks || !run->chunks);
    if (run->chunks)
        p->chunks = chunks_of(run);
    p->sinks = run->sinks.data;
    p->sinks_s = (cu_stride){run->sinks.stride[0], run->sinks.stride[1], run->sinks.stride[2]};
    p->row_shift = (const int *)(uintptr_t)((const cu_state *)plan->state)->row_shift;
    p->M_all = plan->rows ? (int)plan->rows->all : p->M;
    p->drop = drop_of(&plan->problem, run);
    if (run->ragged)
        fill_ragged(run, form, p);
    run_fill_runs(&plan->problem, runs, p);
}
