/* A run: launch parameters filled, kernels put on the caller's stream. Nothing is allocated,
 * compiled or copied here. */
#include "cuda/cuda.h"

#include "base/convert.h"

#include <stdatomic.h>
#include <string.h>

enum {
    MAX_SHARED = 8,      /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    COUNTER_BYTES = 256, /* head of the workspace: the tile counter */
    DECODE_ROWS = 16,    /* rows of a decode tile */
    DECODE_BLOCK_Q = 64, /* block masks for decode have one row of blocks */
    MAX_ARGS = 2 * MOD_MAX_CAPTURES
};

int cu_shared_bytes(const cu_form *f, const cu_mod_text *facts, const plan_problem *p)
{
    const int buffers = f->family == CU_SM90 ? f->tile.groups : 1; /* of mask columns */
    return cu_tile_shared(f->family, &f->tile, cu_padded(p->sizes.D), cu_padded(p->sizes.Dv))
           + buffers * f->tile.keys * facts->column_words * 4;
}

static int decode_shared(const cu_state *s, const plan_problem *p, int64_t spans)
{
    return cu_decode_shared(&s->decode, cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                            s->facts.column_words, spans);
}

/* ---- workspace: counters, then flags, then the list of tiles to do again; for decode, flags,
 * counts of blocks, then parts ---- */

static int rows_of(const cu_form *f)
{
    return cu_tile_rows(f->family, &f->tile);
}

static int64_t tiles_of(const cu_form *f, const saccade_sizes *sizes)
{
    return sizes->B * sizes->H * ((sizes->Q + rows_of(f) - 1) / rows_of(f));
}

/* groups of 16 rows, each with its flag */
static int64_t groups_of(const cu_form *f, const saccade_sizes *sizes)
{
    return tiles_of(f, sizes) * (rows_of(f) / 16);
}

static size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

typedef struct decode_space {
    size_t counts, part_o, part_ml, bytes; /* offsets */
} decode_space;

static decode_space decode_layout(const cu_state *s, const saccade_sizes *sizes, int E)
{
    const size_t spans = (size_t)cu_decode_spans(sizes), slots = spans + (size_t)s->device.n_sm;
    decode_space d;
    d.counts = COUNTER_BYTES + aligned((size_t)(sizes->B * sizes->H * sizes->Q) * sizeof(int));
    d.part_o = d.counts + aligned((size_t)s->device.n_sm * 4 * sizeof(int));
    d.part_ml = d.part_o + slots * DECODE_ROWS * (size_t)E * sizeof(float);
    d.bytes = d.part_ml + slots * DECODE_ROWS * 4 * sizeof(float);
    return d;
}

static int is_decode(const cu_state *s, const saccade_sizes *sizes)
{
    return s->decode.groups && cu_decode_applies(sizes);
}

/* flags, and the list of tiles to do again */
static size_t tiles_space(const cu_form *f, const saccade_sizes *sizes)
{
    if (!f->tile.groups)
        return 0;
    return COUNTER_BYTES + 2 * (size_t)groups_of(f, sizes) * sizeof(int);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Enough for every run of at most these sizes, short ones too. */
size_t cu_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const cu_state *s = plan->state;
    const size_t tiles =
        larger(tiles_space(&s->form, sizes),
               larger(tiles_space(&s->peaks, sizes), tiles_space(&s->plain, sizes)));
    saccade_sizes few = *sizes;
    while (few.Q > 1 && !is_decode(s, &few))
        few.Q = few.Q > 64 ? 64 : few.Q - 1;
    if (!is_decode(s, &few))
        return tiles;
    return larger(tiles, decode_layout(s, &few, cu_padded(plan->problem.sizes.Dv)).bytes);
}

/* ---- block masks ---- */

/* Blocks of a mask as a kernel walks them: rows, keys, and heads that share a tile. */
typedef struct blocks {
    int rows, keys, group;
} blocks;

/* form: of the tiles; NULL: decode */
static blocks blocks_for(const cu_state *s, const cu_form *form, const saccade_block_mask *mask,
                         const saccade_sizes *sizes)
{
    const int imported = mask_get_view(mask)->imported_block_q;
    blocks x = {DECODE_BLOCK_Q, s->decode.keys, (int)(sizes->H / sizes->Hkv)};
    if (form)
        x = (blocks){rows_of(form), form->tile.keys, 1};
    if (imported >= sizes->Q && x.rows >= sizes->Q) /* one row of blocks holds all queries */
        x.rows = imported;
    return x;
}

/* A kernel takes blocks of an imported mask whole or in parts. Its lists may say what no mod
 * does, and a group's heads see the same of them only where they are the same. */
static int is_suited(const cu_state *s, const cu_form *form, const saccade_block_mask *mask,
                     const saccade_sizes *sizes)
{
    const mask_view *view = mask ? mask_get_view(mask) : NULL;
    if (!mask || !view->imported_block_q)
        return 1;
    const blocks x = blocks_for(s, form, mask, sizes);
    const mask_runs *own =
        mask_runs_ready(mask, view->imported_block_q, view->imported_block_kv, 0);
    return own && own->block_q % x.rows == 0 && own->block_kv % x.keys == 0
           && (x.group == 1 || own->H == 1);
}

static saccade_status unsuited(const cu_state *s, const saccade_block_mask *mask,
                               saccade_error *err)
{
    const mask_view *view = mask_get_view(mask);
    const cu_form *form = s->plain.tile.groups ? &s->plain : &s->form;
    FAIL_AT(1, SACCADE_EINVAL, "block_mask", 0, 0,
            "got imported blocks of %d x %d, expected multiples of %d x %d",
            view->imported_block_q, view->imported_block_kv, rows_of(form), form->tile.keys);
}

static saccade_status make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                int device, const saccade_sizes *sizes, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *const forms[] = {NULL, &s->form, &s->peaks, &s->plain};
    const cu_driver *driver;
    int n = 0, has_decode = 0;
    TRY(cu_get_driver(&driver, err));
    for (int i = 0; i < 4; i++) {
        const int is_there = forms[i] ? forms[i]->tile.groups > 0 : is_decode(s, sizes);
        if (!is_there || !is_suited(s, forms[i], mask, sizes))
            continue;
        if (has_decode && forms[i] != &s->plain)
            continue; /* few rows are tiles only where they are plain */
        has_decode |= !forms[i];
        const blocks x = blocks_for(s, forms[i], mask, sizes);
        TRY(cu_runs_make(driver, device, mask, x.rows, x.keys, x.group, sizes,
                         (size_t)s->device.l2_bytes, err));
        n++;
    }
    return n ? SACCADE_OK : unsuited(s, mask, err);
}

saccade_status cu_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                          saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    void *context = NULL;
    int device = 0;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(cu_get_driver(&driver, err));
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    saccade_sizes sizes = mask_get_view(mask)->sizes;
    if (sizes.B == 1 && plan->problem.sizes.B > 1) /* one mask for a batch the plan hints at */
        sizes.B = plan->problem.sizes.B;
    sizes.H = plan->problem.sizes.H;
    sizes.Hkv = plan->problem.sizes.Hkv;
    sizes.D = plan->problem.sizes.D;
    sizes.Dv = plan->problem.sizes.Dv;
    return make_runs(plan, mask, device, &sizes, err);
}

/* form: of the tiles; NULL where the run is decode */
static saccade_status find_runs(const cu_state *s, const plan_run *run, const cu_form *form,
                                const cu_runs **out, saccade_error *err)
{
    const int device = run->q->device.index;
    *out = NULL;
    if (!run->block_mask)
        return SACCADE_OK;
    const blocks x = blocks_for(s, form, run->block_mask, &run->sizes);
    *out = cu_runs_find(device, run->block_mask, x.rows, x.keys, x.group, &run->sizes);
    FAIL_IF(!*out, SACCADE_EINVAL,
            "cuda: got a block mask that has no copy on device %d for this batch, expected "
            "saccade_plan_prepare first",
            device);
    return SACCADE_OK;
}

/* ---- tensors ---- */

/* the stride of a dimension, 0 where it makes no difference */
static int64_t stride_of(const saccade_tensor *t, int d)
{
    return t->shape[d] == 1 ? 0 : t->stride[d];
}

static cu_stride strides_of(const saccade_tensor *t)
{
    return (cu_stride){stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

/* Whether rows lie on 16 bytes, which tensor copies and 16-byte stores need. */
static int is_aligned(const saccade_tensor *t)
{
    int ok = (uintptr_t)t->data % 16 == 0 && (t->shape[2] == 1 || t->stride[2] != 0);
    for (int d = 0; d < 3; d++)
        ok = ok && stride_of(t, d) * (int64_t)saccade_dtype_bytes(t->dtype) % 16 == 0;
    return ok;
}

/* whether a row of so many elements is whole 16 bytes */
static int is_whole(int64_t dim, saccade_dtype dtype)
{
    return dim * (int64_t)saccade_dtype_bytes(dtype) % 16 == 0;
}

/* Whether tensor copies, 16-byte loads and 16-byte stores do for this run. */
static int is_run_aligned(const plan_run *run)
{
    return is_aligned(run->q) && is_aligned(run->k) && is_aligned(run->v)
           && is_aligned(run->out) && is_whole(run->sizes.D, run->q->dtype)
           && is_whole(run->sizes.Dv, run->q->dtype);
}

/* L2 fetches: 256 bytes suit blocks that many CTAs read; decode reads all once, and there plain
 * lines gave 4310 GB/s, 256 bytes 4050 (B16 64/8 KV32768 D128, H200). */
enum { PROMOTE_NONE = 0, PROMOTE_256 = 3 };

/* Map over (d, n, h, b) in boxes of 64 columns x rows, 128-byte swizzle. */
static saccade_status encode(const cu_driver *driver, const saccade_tensor *t, int rows,
                             int promotion, cu_map *out, saccade_error *err)
{
    enum { F16 = 6, BF16 = 9, SWIZZLE_128 = 3 };
    const uint64_t size[4] = {(uint64_t)t->shape[3], (uint64_t)t->shape[2],
                              stride_of(t, 1) ? (uint64_t)t->shape[1] : 1,
                              stride_of(t, 0) ? (uint64_t)t->shape[0] : 1};
    uint64_t stride[3];
    for (int d = 0; d < 3; d++) {
        const int64_t s = stride_of(t, 2 - d);
        stride[d] = s ? (uint64_t)s * 2 : 16;
    }
    const uint32_t box[4] = {64, (uint32_t)rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return cu_check(driver,
                    driver->encode_map(out, t->dtype == SACCADE_BF16 ? BF16 : F16, 4, t->data,
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

static saccade_status pack_captures(const mod_fn *fn, const saccade_tensor *tensors,
                                    cu_capture *out, saccade_error *err)
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

static void fill_runs(const cu_runs *runs, cu_fwd *p)
{
    if (!runs)
        return;
    p->runs = (const cu_run *)(uintptr_t)runs->runs;
    p->run_start = (const int *)(uintptr_t)runs->run_start;
    p->order = (const int *)(uintptr_t)runs->order;
    p->block_keys = runs->keys;
    p->mask_b = runs->mask_b;
    p->mask_h = runs->mask_h;
}

static void fill(const saccade_plan *plan, const plan_run *run, const cu_form *form,
                 const cu_runs *runs, cu_fwd *p)
{
    const int rows = rows_of(form);
    memset(p, 0, sizeof *p);
    p->q = run->q->data;
    p->k = run->k->data;
    p->v = run->v->data;
    p->o = run->out->data;
    p->lse = run->lse ? run->lse->data : NULL;
    p->row_max = run->row_max ? run->row_max->data : NULL;
    p->qs = strides_of(run->q);
    p->ks = strides_of(run->k);
    p->vs = strides_of(run->v);
    p->os = strides_of(run->out);
    if (run->lse)
        p->lse_s = strides_of(run->lse);
    if (run->row_max)
        p->max_s = strides_of(run->row_max);
    p->B = (int)run->sizes.B;
    p->H = (int)run->sizes.H;
    p->G = (int)run->sizes.Hkv;
    p->M = (int)run->sizes.Q;
    p->N = (int)run->sizes.KV;
    p->scale = plan->problem.scale;
    p->is_plain = !is_run_aligned(run);
    p->q_offset = position_of(&run->positions.q_offset, 0);
    p->kv_offset = position_of(&run->positions.kv_offset, 0);
    p->kv_len = position_of(&run->positions.kv_len, (int)run->sizes.KV);
    p->counter = run->workspace;
    p->flags = (int *)((char *)run->workspace + COUNTER_BYTES);
    p->n_qblk = (int)((run->sizes.Q + rows - 1) / rows);
    p->n_tiles = (int)tiles_of(form, &run->sizes);
    p->tile_groups = rows / 16;
    p->redo_count = p->counter + 1;
    p->redo = p->flags + groups_of(form, &run->sizes);
    fill_runs(runs, p);
}

/* ---- kernels ---- */

/* Shared memory above 48 KB is asked for once per device. */
static saccade_status make_ready(cu_state *s, const plan_problem *problem,
                                 const cu_driver *driver, int device, saccade_error *err)
{
    enum { MOST = 232448 };
    const uint32_t bit = 1u << (device & 31);
    if (atomic_load(&s->ready) & bit)
        return SACCADE_OK;
    const int shared = cu_shared_bytes(&s->form, &s->facts, problem);
    const int peaks = cu_shared_bytes(&s->peaks, &s->facts, problem);
    const int plain = cu_shared_bytes(&s->plain, &s->facts, problem);
    const int bytes[CU_PROGRAMS] = {shared, peaks, 0, plain, MOST};
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (s->programs[i].kernel && bytes[i])
            TRY(cu_check(
                driver, driver->kernel_set(MAX_SHARED, bytes[i], s->programs[i].kernel, device),
                "cuKernelSetAttribute", err));
    atomic_fetch_or(&s->ready, bit);
    return SACCADE_OK;
}

typedef struct launch_args {
    const cu_form *form; /* NULL: decode */
    cu_fwd p;
    cu_capture captures[MAX_ARGS];
    cu_map maps[3];
    const cu_driver *driver;
    void *stream;
} launch_args;

static saccade_status start(const launch_args *a, void *kernel, int64_t grid, int threads,
                            int shared, void **parameters, saccade_error *err)
{
    return cu_check(a->driver,
                    a->driver->launch(kernel, (unsigned)grid, 1, 1, (unsigned)threads, 1, 1,
                                      (unsigned)shared, a->stream, parameters, NULL),
                    "cuLaunchKernel", err);
}

/* A pass over all tiles; where offsets are late, a second one, with exact offsets, over the
 * tiles whose rows came out not finite; last the careful kernel, for what is still not. */
static saccade_status launch_passes(const saccade_plan *plan, const plan_run *run,
                                    launch_args *a, saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_form *form = a->form;
    const plan_problem *problem = &plan->problem;
    const int n_sm = s->device.n_sm, is_main = form != &s->plain;
    const int shared = cu_shared_bytes(form, &s->facts, problem);
    const int threads =
        cu_tile_threads(form->family, &form->tile, cu_padded(problem->sizes.Dv));
    const int grid = form->family != CU_SM90 || a->p.n_tiles < n_sm ? a->p.n_tiles : n_sm;
    const int64_t looks = (groups_of(form, &run->sizes) + 31) / 32;
    void *const exact = s->programs[is_main ? CU_PEAKS : CU_PLAIN].kernel;
    void *const first = is_main && !run->row_max ? s->programs[CU_MAIN].kernel : exact;
    void *parameters[] = {&a->p, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
    if (s->is_lazy && first != exact) {
        cu_fwd again = a->p;
        void *second[] = {&again, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
        again.order = a->p.redo;
        again.n_listed = a->p.redo_count;
        again.redo = NULL;
        TRY(start(a, first, grid, threads, shared, parameters, err));
        TRY(start(a, exact, grid, threads, shared, second, err));
    } else {
        a->p.redo = NULL;
        TRY(start(a, first, grid, threads, shared, parameters, err));
    }
    return start(a, s->programs[CU_CAREFUL].kernel, looks < 4 * n_sm ? looks : 4 * n_sm, 128, 0,
                 parameters, err);
}

static saccade_status launch_tiles(const saccade_plan *plan, const plan_run *run,
                                   launch_args *a, saccade_error *err)
{
    const cu_form *form = a->form;
    if (form->family == CU_SM90) {
        TRY(encode(a->driver, run->q, rows_of(form), PROMOTE_256, &a->maps[0], err));
        TRY(encode(a->driver, run->k, form->tile.keys, PROMOTE_256, &a->maps[1], err));
        TRY(encode(a->driver, run->v, form->tile.keys, PROMOTE_256, &a->maps[2], err));
        TRY(cu_check(a->driver,
                     a->driver->fill32((cu_ptr)(uintptr_t)a->p.counter, 0, 2, a->stream),
                     "cuMemsetD32Async", err));
    }
    return launch_passes(plan, run, a, err);
}

/* ---- decode ---- */

/* CUlaunchAttributeID: CTAs of a cluster; whether the kernel may be placed while the one before
 * still runs (it waits for it by itself) */
enum { WITH_CLUSTER = 4, WITH_OVERLAP = 6 };

static saccade_status start_with(const launch_args *a, void *kernel, const unsigned grid[2],
                                 int threads, int shared, int attribute, int value,
                                 void **parameters, saccade_error *err)
{
    cu_launch_attribute one = {.id = attribute, .value = {.values = {value, 1, 1}}};
    const cu_launch how = {.grid_x = grid[0],
                           .grid_y = grid[1],
                           .grid_z = 1,
                           .block_x = (unsigned)threads,
                           .block_y = 1,
                           .block_z = 1,
                           .shared_bytes = (unsigned)shared,
                           .stream = a->stream,
                           .attributes = &one,
                           .n_attributes = 1};
    return cu_check(a->driver, a->driver->launch_ex(&how, kernel, parameters, NULL),
                    "cuLaunchKernelEx", err);
}

/* Blocks of every span where all have the same, known here; else 0. */
static int span_blocks(const cu_state *s, const cu_fwd *p)
{
    const int len = p->kv_len.value < p->N ? p->kv_len.value : p->N;
    if (p->kv_len.by_batch || s->facts.mask == CU_MASK_INTERVAL || p->runs)
        return 0;
    return len > 0 ? (len + s->decode.keys - 1) / s->decode.keys : 1;
}

/* CTAs that share the keys: each with a block for every warp, if there are so many; 128 of 132
 * multiprocessors read faster than all (docs/kernels.md). */
static int decode_ctas(const cu_state *s, const cu_fwd *p, int spans)
{
    const int n_sm = s->device.n_sm, even = n_sm / 32 * 32;
    const int most = even * 20 >= n_sm * 19 ? even : n_sm;
    const int64_t blocks = spans * (int64_t)((p->N + s->decode.keys - 1) / s->decode.keys);
    const int64_t ctas = (blocks + s->decode.groups - 1) / s->decode.groups;
    return ctas < 1 ? 1 : ctas < most ? (int)ctas : most;
}

/* One launch, without cuts between CTAs of different clusters, where spans are alike: CTAs of a
 * cluster, 0 where two launches with equal shares are better; *grid: all CTAs. */
static int decode_cluster(const cu_state *s, const cu_fwd *p, int spans, unsigned *grid)
{
    const int blocks = (p->N + s->decode.keys - 1) / s->decode.keys;
    const int is_alike =
        !p->kv_len.by_batch && !p->q_offset.by_batch && !p->kv_offset.by_batch && !p->runs;
    const int is_light = s->facts.score != CU_SCORE_GENERAL && s->facts.mask != CU_MASK_GENERAL;
    return is_alike ? cu_decode_cluster(s->device.n_sm, spans, blocks, s->decode.groups,
                                        is_light, grid)
                    : 0;
}

static unsigned reciprocal(int d)
{
    return d == 1 ? 0 : (unsigned)(((1ull << 32) + (unsigned)d - 1) / (unsigned)d);
}

static void fill_few(const cu_state *s, cu_fwd *p, int rows, int spans)
{
    cu_few *f = &p->few;
    f->group = p->H / p->G;
    f->rows = rows;
    f->tiles = (rows + DECODE_ROWS - 1) / DECODE_ROWS;
    f->spans = spans;
    f->span_blocks = span_blocks(s, p);
    p->n_split = decode_ctas(s, p, spans);
    f->share = spans * f->span_blocks / p->n_split;
    f->larger = spans * f->span_blocks % p->n_split;
    f->by_tiles = reciprocal(f->tiles);
    f->by_G = reciprocal(p->G);
    f->by_M = reciprocal(p->M);
}

static saccade_status launch_decode(const saccade_plan *plan, const plan_run *run,
                                    launch_args *a, saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_loaded *program = &s->programs[CU_DECODE];
    const saccade_sizes *sizes = &run->sizes;
    const int spans = (int)cu_decode_spans(sizes), threads = s->decode.groups * 32;
    const int rows = (int)(sizes->H / sizes->Hkv * sizes->Q);
    const int shared = decode_shared(s, &plan->problem, spans);
    const decode_space d = decode_layout(s, sizes, cu_padded(plan->problem.sizes.Dv));
    char *base = run->workspace;
    void *parameters[] = {&a->p, a->captures, &a->maps[1], &a->maps[2]};
    unsigned grid[2] = {1, 1};
    a->p.done = (int *)(base + d.counts);
    a->p.part_o = (float *)(base + d.part_o);
    a->p.part_ml = (float *)(base + d.part_ml);
    fill_few(s, &a->p, rows, spans);
    a->p.few.cluster = decode_cluster(s, &a->p, spans, grid);
    TRY(encode(a->driver, run->k, s->decode.keys, PROMOTE_NONE, &a->maps[1], err));
    TRY(encode(a->driver, run->v, s->decode.keys, PROMOTE_NONE, &a->maps[2], err));
    if (a->p.few.cluster)
        return start_with(a, program->kernel, grid, threads, shared, WITH_CLUSTER,
                          a->p.few.cluster, parameters, err);
    TRY(start(a, program->kernel, a->p.n_split, threads, shared, parameters, err));
    grid[0] = a->p.n_split > 1 ? (unsigned)a->p.n_split - 1 : 1;
    grid[1] = (unsigned)(rows < DECODE_ROWS ? rows : DECODE_ROWS);
    return start_with(a, program->kernel_end, grid, 128, 0, WITH_OVERLAP, 1, parameters, err);
}

static saccade_status launch(const saccade_plan *plan, const cu_driver *driver,
                             const plan_run *run, const cu_form *form, const cu_runs *runs,
                             saccade_error *err)
{
    cu_state *s = plan->state;
    launch_args a;
    const plan_problem *problem = &plan->problem;
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    a.driver = driver;
    a.stream = run->stream;
    a.form = form;
    fill(plan, run, form ? form : &s->form, runs, &a.p);
    TRY(pack_captures(problem->score, run->score_env.tensors, a.captures, err));
    TRY(pack_captures(problem->mask, run->mask_env.tensors, a.captures + n_score, err));
    TRY(make_ready(s, problem, driver, run->q->device.index, err));
    return form ? launch_tiles(plan, run, &a, err) : launch_decode(plan, run, &a, err);
}

/* Which tiles a run takes; NULL for decode. Only the sm_90a kernels need aligned rows. */
static saccade_status choose_form(const cu_state *s, const plan_run *run, const cu_form **out,
                                  saccade_error *err)
{
    const int is_free = s->form.family != CU_SM90 || is_run_aligned(run);
    const cu_form *const forms[] = {NULL, run->row_max ? &s->peaks : &s->form, &s->plain};
    const int may[] = {is_free && is_decode(s, &run->sizes), is_free, s->plain.tile.groups > 0};
    for (int i = 0; i < 3; i++)
        if (may[i] && is_suited(s, forms[i], run->block_mask, &run->sizes)) {
            *out = forms[i];
            return SACCADE_OK;
        }
    return unsuited(s, run->block_mask, err);
}

saccade_status cu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = NULL;
    const cu_driver *driver;
    const cu_runs *runs;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(choose_form(s, run, &form, err));
    FAIL_IF(groups_of(form ? form : &s->form, &run->sizes) > INT32_MAX, SACCADE_ELIMIT,
            "cuda: got too many rows for one run");
    TRY(find_runs(s, run, form, &runs, err));
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, run->q->device.index, &pushed, err));
    const saccade_status status = launch(plan, driver, run, form, runs, err);
    cu_leave(driver, pushed);
    return status;
}
