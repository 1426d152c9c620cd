/* A backward run: its workspace, its block mask's runs, its kernels put on the stream. Nothing
 * is allocated, compiled or copied here but by cu_backward_prepare. */
#include "cuda/cuda_backward.h"
#include "cuda/run.h"

#include <stdatomic.h>

/* ---- workspace ---- */

/* offsets of the parts of cu_bwd */
typedef struct space {
    size_t lse2, minus_delta, precision, bounds, dq_sum, bytes;
} space;

static size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static int64_t query_blocks(const saccade_sizes *s)
{
    return (s->Q + BWD_ROWS - 1) / BWD_ROWS;
}

static space space_of(const plan_problem *p, const cu_backward *b, const saccade_sizes *s)
{
    const size_t rows = (size_t)(s->B * s->H * query_blocks(s)) * BWD_ROWS;
    const size_t columns = (size_t)(cu_padded(p->sizes.D) + 63) / 64 * 64;
    const size_t bounds = (size_t)(s->B * s->Hkv) * BWD_CHUNKS * 2 * sizeof(unsigned);
    space x = {0};
    x.minus_delta = aligned(rows * sizeof(float));
    x.precision = x.minus_delta * 2;
    x.bounds = x.minus_delta * 3;
    x.dq_sum = x.bounds + aligned(bounds);
    x.bytes = x.dq_sum + (b->tile.groups ? rows * columns * sizeof(float) : 0);
    return x;
}

size_t cu_backward_workspace(const saccade_plan *plan, const cu_backward *b,
                             const saccade_sizes *sizes)
{
    return space_of(&plan->problem, b, sizes).bytes;
}

/* ---- block masks ---- */

/* An imported mask's blocks are taken whole or in parts. */
static int is_suited(const saccade_block_mask *mask, int rows, int keys)
{
    const mask_view *view = mask ? mask_get_view(mask) : NULL;
    return !view || !view->imported_block_q
           || (view->imported_block_q % rows == 0 && view->imported_block_kv % keys == 0);
}

static int tile_keys(const cu_backward *b)
{
    return b->tile.groups * 64;
}

saccade_status cu_backward_prepare(const saccade_plan *plan, const cu_backward *b,
                                   const saccade_block_mask *mask, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    void *context = NULL;
    int device = 0;
    saccade_sizes sizes = mask_get_view(mask)->sizes;
    TRY(cu_get_driver(&driver, err));
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    if (sizes.B == 1 && plan->problem.sizes.B > 1)
        sizes.B = plan->problem.sizes.B;
    sizes.H = plan->problem.sizes.H;
    sizes.Hkv = plan->problem.sizes.Hkv;
    sizes.D = plan->problem.sizes.D;
    sizes.Dv = plan->problem.sizes.Dv;
    FAIL_AT(!is_suited(mask, BWD_ROWS, 64), SACCADE_EINVAL, "block_mask", 0, 0,
            "got imported blocks of %d x %d, expected multiples of %d x 64",
            mask_get_view(mask)->imported_block_q, mask_get_view(mask)->imported_block_kv,
            BWD_ROWS);
    const size_t l2 = (size_t)s->device.l2_bytes;
    if (b->tile.groups && is_suited(mask, BWD_ROWS, tile_keys(b)))
        TRY(cu_runs_make(driver, device, mask, BWD_ROWS, tile_keys(b), 0, &sizes, l2, err));
    TRY(cu_runs_make(driver, device, mask, BWD_ROWS, 64, 0, &sizes, l2, err));
    return cu_runs_make(driver, device, mask, BWD_ROWS, b->pass.rows, 1, &sizes, l2, err);
}

/* Runs for these blocks; *out stays NULL without a block mask. */
static saccade_status find_runs(const plan_run *run, int keys, int group, const cu_runs **out,
                                saccade_error *err)
{
    *out = NULL;
    if (!run->block_mask)
        return SACCADE_OK;
    *out = cu_runs_find(run->q->device.index, run->block_mask, BWD_ROWS, keys, group,
                        &run->sizes);
    FAIL_IF(!*out, SACCADE_EINVAL,
            "cuda: got a block mask that has no copy for backward on device %d, expected it "
            "prepared",
            run->q->device.index);
    return SACCADE_OK;
}

/* ---- parameters ---- */

static int is_aligned(const cu_backward_run *run)
{
    const saccade_tensor *const written[] = {run->dq, run->dk, run->dv};
    int ok = run_is_aligned(run->forward) && run_has_aligned_rows(run->d_out);
    for (int i = 0; i < 3; i++)
        ok = ok && (!written[i] || run_has_aligned_rows(written[i]));
    return ok;
}

static void fill_tensor(const saccade_tensor *t, void **data, cu_stride *strides)
{
    if (!t)
        return;
    *data = t->data;
    *strides = run_strides(t);
}

static void fill(const saccade_plan *plan, const cu_backward *b, const cu_backward_run *run,
                 cu_bwd *p)
{
    const cu_state *s = plan->state;
    const space at = space_of(&plan->problem, b, &run->forward->sizes);
    char *base = run->workspace;
    void *d_out = NULL;
    *p = (cu_bwd){0};
    run_fill(plan, run->forward, &s->programs[CU_MAIN].form, NULL, &p->f);
    p->f.is_plain = !is_aligned(run);
    fill_tensor(run->d_out, &d_out, &p->dos);
    p->d_out = d_out;
    if (run->d_lse) {
        p->dlse = run->d_lse->data;
        p->dlse_s = run_strides(run->d_lse);
    }
    fill_tensor(run->dq, &p->dq, &p->dqs);
    fill_tensor(run->dk, &p->dk, &p->dks);
    fill_tensor(run->dv, &p->dv, &p->dvs);
    p->n_mblk = (int)query_blocks(&run->forward->sizes);
    p->slope_most = (float)b->facts.slope_most;
    p->lse2 = (float *)(base + at.lse2);
    p->minus_delta = (float *)(base + at.minus_delta);
    p->precision = (float *)(base + at.precision);
    p->bounds = (unsigned *)(base + at.bounds);
    p->dq_sum = run->dq ? (float *)(base + at.dq_sum) : NULL;
}

/* tiles of keys, and the runs of query blocks of each */
static void fill_tiles(const cu_runs *runs, int keys, cu_fwd *p)
{
    p->n_qblk = (p->N + keys - 1) / keys;
    p->n_tiles = p->B * p->G * p->n_qblk;
    if (!runs)
        return;
    p->runs = (const cu_run *)(uintptr_t)runs->runs;
    p->run_start = (const int *)(uintptr_t)runs->run_start;
    p->order = (const int *)(uintptr_t)runs->order;
    p->mask_b = runs->mask_b;
    p->mask_h = runs->mask_h;
}

static void fill_queries(const cu_runs *runs, cu_bwd *p)
{
    if (!runs)
        return;
    p->q_runs = (const cu_run *)(uintptr_t)runs->runs;
    p->q_run_start = (const int *)(uintptr_t)runs->run_start;
    p->q_order = (const int *)(uintptr_t)runs->order;
    p->q_mask_b = runs->mask_b;
    p->q_mask_h = runs->mask_h;
}

/* ---- launch ---- */

typedef struct launch {
    cu_bwd p;
    run_args a; /* captures, maps of Q, K, V; driver and stream */
    cu_map d_out;
} launch;

/* Rows of a CTA of bwd_prepare: a few lanes to each. */
static int prepare_rows(const plan_problem *p)
{
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv), dim = D > E ? D : E;
    return dim > 128 ? 8 : dim > 64 ? 16 : 32;
}

static saccade_status start_prepare(const saccade_plan *plan, const cu_backward *b, launch *l,
                                    saccade_error *err)
{
    const cu_loaded *program = &b->programs[CU_BWD_PREPARE];
    const int64_t rows = (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk * BWD_ROWS;
    const int each = prepare_rows(&plan->problem);
    void *parameters[] = {&l->p};
    if (cu_backward_is_fixed(b))
        TRY(run_start(&l->a, program->other, (int64_t)l->p.f.B * l->p.f.G * BWD_CHUNKS, 256, 0,
                      parameters, err));
    return run_start(&l->a, program->kernel, (rows + each - 1) / each, 256, 0, parameters, err);
}

/* dK, dV and the sums of dQ by tiles, then dQ from its sums. */
static saccade_status start_tiles(const saccade_plan *plan, const cu_backward *b,
                                  const cu_backward_run *run, launch *l, saccade_error *err)
{
    const cu_driver *driver = l->a.driver;
    const int D = cu_padded(plan->problem.sizes.D), E = cu_padded(plan->problem.sizes.Dv);
    const int64_t blocks = (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk;
    cu_map *m = l->a.maps;
    void *parameters[] = {&l->p, l->a.captures, &m[0], &m[1], &m[2], &l->d_out};
    TRY(run_encode_map(driver, run->forward->q, BWD_ROWS, PROMOTE_256, &m[0], err));
    TRY(run_encode_map(driver, run->forward->k, tile_keys(b), PROMOTE_256, &m[1], err));
    TRY(run_encode_map(driver, run->forward->v, tile_keys(b), PROMOTE_256, &m[2], err));
    TRY(run_encode_map(driver, run->d_out, BWD_ROWS, PROMOTE_256, &l->d_out, err));
    TRY(start_prepare(plan, b, l, err));
    TRY(run_start(&l->a, b->programs[CU_BWD_TILES].kernel, l->p.f.n_tiles,
                  cu_backward_tile_threads(&b->tile), cu_backward_tile_shared(&b->tile, D, E),
                  parameters, err));
    if (!run->dq)
        return SACCADE_OK;
    return run_start(&l->a, b->programs[CU_BWD_FINISH].kernel, blocks * ((D + 63) / 64), 128, 0,
                     parameters, err);
}

static saccade_status start_plain(const saccade_plan *plan, const cu_backward *b,
                                  const cu_backward_run *run, launch *l, saccade_error *err)
{
    const cu_loaded *program = &b->programs[CU_BWD_PLAIN];
    const int threads = cu_backward_pass_threads(&b->pass);
    const int shared = cu_backward_pass_shared(&b->pass, cu_padded(plan->problem.sizes.D),
                                               cu_padded(plan->problem.sizes.Dv));
    void *parameters[] = {&l->p, l->a.captures};
    l->p.dq_sum = NULL;
    TRY(start_prepare(plan, b, l, err));
    if (run->dk || run->dv)
        TRY(run_start(&l->a, program->kernel, l->p.f.n_tiles, threads, shared, parameters,
                      err));
    if (!run->dq)
        return SACCADE_OK;
    return run_start(&l->a, program->other, (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk, threads,
                     shared, parameters, err);
}

/* Shared memory above 48 KB is asked for once per device. */
static saccade_status make_ready(const saccade_plan *plan, cu_backward *b,
                                 const cu_driver *driver, int device, saccade_error *err)
{
    enum { MAX_SHARED = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    const uint64_t bit = (uint64_t)1 << (device & 63);
    const int D = cu_padded(plan->problem.sizes.D), E = cu_padded(plan->problem.sizes.Dv);
    const cu_loaded *plain = &b->programs[CU_BWD_PLAIN];
    const int shared = cu_backward_pass_shared(&b->pass, D, E);
    if (atomic_load(&b->ready) & bit)
        return SACCADE_OK;
    int failed = driver->kernel_set(MAX_SHARED, shared, plain->kernel, device);
    failed = failed ? failed : driver->kernel_set(MAX_SHARED, shared, plain->other, device);
    if (!failed && b->tile.groups)
        failed = driver->kernel_set(MAX_SHARED, cu_backward_tile_shared(&b->tile, D, E),
                                    b->programs[CU_BWD_TILES].kernel, device);
    TRY(cu_check(driver, failed, "cuKernelSetAttribute", err));
    atomic_fetch_or(&b->ready, bit);
    return SACCADE_OK;
}

static saccade_status start(const saccade_plan *plan, cu_backward *b,
                            const cu_backward_run *run, const cu_driver *driver,
                            saccade_error *err)
{
    const plan_run *forward = run->forward;
    const plan_problem *problem = &plan->problem;
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    const cu_runs *tiles, *queries = NULL;
    launch l;
    fill(plan, b, run, &l.p);
    const int is_tiles = b->tile.groups && !l.p.f.is_plain
                         && is_suited(forward->block_mask, BWD_ROWS, tile_keys(b));
    const int keys = is_tiles ? tile_keys(b) : 64;
    l.a.driver = driver;
    l.a.stream = forward->stream;
    TRY(find_runs(forward, keys, 0, &tiles, err));
    if (!is_tiles)
        TRY(find_runs(forward, b->pass.rows, 1, &queries, err));
    fill_tiles(tiles, keys, &l.p.f);
    fill_queries(queries, &l.p);
    TRY(run_captures(problem->score, forward->score_env.tensors, l.a.captures, err));
    TRY(run_captures(problem->mask, forward->mask_env.tensors, l.a.captures + n_score, err));
    TRY(make_ready(plan, b, driver, forward->q->device.index, err));
    return is_tiles ? start_tiles(plan, b, run, &l, err) : start_plain(plan, b, run, &l, err);
}

saccade_status cu_backward_start(const saccade_plan *plan, cu_backward *b,
                                 const cu_backward_run *run, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    FAIL_IF(!run->forward->lse, SACCADE_EINVAL, "cuda: got no lse, expected forward's");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, run->forward->q->device.index, &pushed, err));
    const saccade_status status = start(plan, b, run, driver, err);
    cu_leave(driver, pushed);
    return status;
}
