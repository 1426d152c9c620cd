/* The CUDA back end as a solver: a plan holds compiled programs for one architecture, a run fills
 * launch parameters and puts kernels on the caller's stream. Nothing is allocated, compiled or
 * copied in a run. */
#include "cuda/cuda.h"

#include "base/convert.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_SHARED = 8,      /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    COUNTER_BYTES = 256, /* head of the workspace: the tile counter */
    MAX_ARGS = 2 * MOD_MAX_CAPTURES
};

/* the programs of a plan */
enum { MAIN, PEAKS, CAREFUL, PROGRAMS };

typedef struct loaded {
    cu_image image;
    void *library, *kernel;
} loaded;

typedef struct state {
    cu_family family;
    cu_tile tile;
    int rung, given_up; /* tiles tried before; every tile spilled */
    cu_mod_text facts;
    char arch[16];
    char *mod_text;
    loaded programs[PROGRAMS];
    atomic_uint ready; /* bit per device: attributes set */
    int is_present;    /* there is a device for arch */
    cu_device device;  /* what the plan was tuned for */
} state;

static int round_up(int x, int to)
{
    return (x + to - 1) / to * to;
}

static int padded(int64_t dim)
{
    return round_up((int)dim, 16);
}

/* ---- applicable ---- */

static int is_half(saccade_dtype t)
{
    return t == SACCADE_BF16 || t == SACCADE_F16;
}

static int say(char *why, const char *text)
{
    snprintf(why, 160, "%s", text);
    return 0;
}

static int applicable(const plan_problem *p, int32_t level, char *why)
{
    const cu_driver *driver;
    saccade_error err;
    (void)level;
    if (!is_half(p->dtype) || p->kv_dtype != p->dtype)
        return say(why, "the CUDA back end takes bf16 and f16, the same for Q, K and V");
    if (p->sizes.D % 8 || p->sizes.Dv % 8 || p->sizes.D > 256 || p->sizes.Dv > 256)
        return say(why, "the CUDA back end takes head dims that are multiples of 8 up to 256");
    if (!p->arch && cu_get_driver(&driver, &err) != SACCADE_OK)
        return say(why, err.message);
    return 1;
}

/* ---- create ---- */

static void put_config(const state *s, const plan_problem *p, int is_lazy, int has_peaks,
                       strbuf *out)
{
    const int is_90 = s->family == CU_SM90, groups = s->tile.groups;
    const struct {
        const char *name;
        int value;
    } rows[] = {
        {"SM", is_90 ? 90 : 80},
        {"F16", p->dtype == SACCADE_F16},
        {"F32", p->dtype == SACCADE_F32},
        {"D", padded(p->sizes.D)},
        {"E", padded(p->sizes.Dv)},
        {"D_REAL", (int)p->sizes.D},
        {"E_REAL", (int)p->sizes.Dv},
        {"WGS", groups},
        {"TN", s->tile.keys},
        {"STAGES", s->tile.stages},
        {"PINGPONG", s->tile.is_pingpong},
        {"ANCHOR", is_90},
        {"RUNS", 1},
        {"LAZY", is_lazy},
        {"ROWMAX", has_peaks},
        {"SCALE_FIRST", p->scale <= 0 && s->facts.score != CU_SCORE_GENERAL},
        {"REGS_PRODUCER", groups == 1 ? 56 : groups == 2 ? 40 : 32},
        {"REGS_CONSUMER", groups == 1 ? 256 : groups == 2 ? 232 : 160},
        {"WARPS", is_90 ? groups * 4 : groups},
        {"FIRST_WARP", is_90 ? 4 : 0},
    };
    strbuf_puts(out, "/* generated: constants of this instance */\n#pragma once\n");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        strbuf_printf(out, "#define CFG_%s %d\n", rows[i].name, rows[i].value);
}

static saccade_status compile_one(const state *s, const plan_problem *p, const char *entry,
                                  int is_lazy, int has_peaks, cu_image *out,
                                  saccade_error *err)
{
    strbuf config, products;
    strbuf_init(&config, 0);
    strbuf_init(&products, 0);
    put_config(s, p, is_lazy, has_peaks, &config);
    cu_emit_products(&s->tile, padded(p->sizes.Dv), p->dtype == SACCADE_F16, &products);
    const cu_source generated[] = {{"cfg.cuh", strbuf_text(&config)},
                                   {"mod.cuh", s->mod_text},
                                   {"wgmma.cuh", strbuf_text(&products)}};
    saccade_status status = strbuf_status(&config, err);
    if (status == SACCADE_OK)
        status = strbuf_status(&products, err);
    if (status == SACCADE_OK)
        status = cu_compile(entry, generated, 3, s->arch, out, err);
    strbuf_free(&config);
    strbuf_free(&products);
    return status;
}

static int is_clean(const cu_report *r)
{
    return r->spill_bytes == 0 && !r->is_serialised;
}

static const char *entry_of(cu_family family)
{
    return family == CU_SM90 ? "fwd_sm90.cu" : "fwd_sm80.cu";
}

/* The first tile of the ladder whose main program neither spills nor waits; failing that, the
 * first tile. */
static saccade_status choose_tile(state *s, const plan_problem *p, saccade_error *err)
{
    cu_image *image = &s->programs[MAIN].image;
    const int D = padded(p->sizes.D), E = padded(p->sizes.Dv);
    for (s->rung = 0; cu_tile_choice(s->family, D, E, p->dtype, s->rung, &s->tile); s->rung++) {
        TRY(compile_one(s, p, entry_of(s->family), s->tile.is_lazy, 0, image, err));
        if (is_clean(&image->report))
            return SACCADE_OK;
        free(image->code);
        image->code = NULL;
    }
    s->given_up = 1;
    s->rung = 0;
    cu_tile_choice(s->family, D, E, p->dtype, 0, &s->tile);
    return compile_one(s, p, entry_of(s->family), s->tile.is_lazy, 0, image, err);
}

static saccade_status compile_all(state *s, const plan_problem *p, saccade_error *err)
{
    TRY(choose_tile(s, p, err));
    TRY(compile_one(s, p, entry_of(s->family), 0, 1, &s->programs[PEAKS].image, err));
    return compile_one(s, p, "careful.cu", 0, 0, &s->programs[CAREFUL].image, err);
}

static saccade_status load_all(state *s, const cu_driver *driver, saccade_error *err)
{
    const char *const names[PROGRAMS] = {s->family == CU_SM90 ? "fwd_sm90" : "fwd_sm80",
                                         s->family == CU_SM90 ? "fwd_sm90" : "fwd_sm80",
                                         "careful"};
    for (int i = 0; i < PROGRAMS; i++) {
        loaded *l = &s->programs[i];
        TRY(cu_check(driver,
                     driver->library_load(&l->library, l->image.code, NULL, NULL, 0, NULL, NULL,
                                          0),
                     "cuLibraryLoadData", err));
        TRY(cu_check(driver, driver->library_kernel(&l->kernel, l->library, names[i]),
                     "cuLibraryGetKernel", err));
    }
    return SACCADE_OK;
}

/* Target: the one asked for, else that of the device whose context is current, else device 0's. */
static saccade_status choose_target(state *s, const plan_problem *p, const cu_driver **driver,
                                    saccade_error *err)
{
    int device = 0;
    void *context = NULL;
    s->device = (cu_device){.sm = 90, .n_sm = 132, .l2_bytes = 60 << 20};
    s->is_present = cu_get_driver(driver, p->arch ? NULL : err) == SACCADE_OK;
    FAIL_IF(!p->arch && !s->is_present, SACCADE_EBACKEND, "%s",
            err ? err->message : "no CUDA driver");
    if (s->is_present) {
        (*driver)->context_current(&context);
        if (context)
            (*driver)->context_device(&device);
        TRY(cu_get_device(*driver, device, &s->device, err));
    }
    if (p->arch)
        snprintf(s->arch, sizeof s->arch, "%.15s", p->arch);
    else
        snprintf(s->arch, sizeof s->arch, "sm_%d%s", s->device.sm, s->device.sm == 90 ? "a" : "");
    s->family = strcmp(s->arch, "sm_90a") == 0 ? CU_SM90 : CU_SM80;
    const int wanted = atoi(s->arch + strcspn(s->arch, "0123456789"));
    FAIL_AT(wanted < 80 || wanted > 200, SACCADE_EINVAL, "arch", 0, 0,
            "got '%s', expected sm_80 or later, as in sm_90a", s->arch);
    s->is_present = s->is_present && (wanted == s->device.sm ||
                                      (strncmp(s->arch, "compute_", 8) == 0 &&
                                       wanted <= s->device.sm));
    return SACCADE_OK;
}

static void destroy(saccade_plan *plan)
{
    state *s = plan->state;
    const cu_driver *driver;
    if (!s)
        return;
    for (int i = 0; i < PROGRAMS; i++) {
        if (s->programs[i].library && cu_get_driver(&driver, NULL) == SACCADE_OK)
            driver->library_unload(s->programs[i].library);
        free(s->programs[i].image.code);
    }
    free(s->mod_text);
    free(s);
    plan->state = NULL;
}

static saccade_status emit(state *s, saccade_plan *plan, saccade_error *err)
{
    strbuf text;
    strbuf_init(&text, 0);
    const saccade_status status =
        cu_emit_mod(&plan->problem, &plan->arena, &text, &s->facts, err);
    s->mod_text = strbuf_steal(&text);
    strbuf_free(&text);
    return status;
}

static saccade_status create(saccade_plan *plan, saccade_error *err)
{
    const cu_driver *driver = NULL;
    saccade_status status = SACCADE_OK;
    state *s = calloc(1, sizeof *s);
    FAIL_IF_NULL(s);
    plan->state = s;
    TRY_GOTO(choose_target(s, &plan->problem, &driver, err));
    TRY_GOTO(emit(s, plan, err));
    TRY_GOTO(compile_all(s, &plan->problem, err));
    if (s->is_present)
        TRY_GOTO(load_all(s, driver, err));
out:
    if (status != SACCADE_OK)
        destroy(plan);
    return status;
}

/* ---- run ---- */

static int shared_of(const state *s, const plan_problem *p)
{
    return cu_tile_shared(s->family, &s->tile, padded(p->sizes.D), padded(p->sizes.Dv),
                          p->dtype) +
           s->tile.groups * s->tile.keys * s->facts.column_words * 4;
}

static int64_t tiles_of(const state *s, const saccade_sizes *sizes)
{
    const int rows = cu_tile_rows(s->family, &s->tile);
    return sizes->B * sizes->H * ((sizes->Q + rows - 1) / rows);
}

static int warps_of(const state *s)
{
    return s->tile.groups * (s->family == CU_SM90 ? 4 : 1);
}

static size_t workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const state *s = plan->state;
    return COUNTER_BYTES + (size_t)tiles_of(s, sizes) * (size_t)warps_of(s) * sizeof(int);
}

static saccade_status prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                              saccade_error *err)
{
    const state *s = plan->state;
    const cu_driver *driver;
    const mask_view *view = mask_get_view(mask);
    int device = 0;
    void *context = NULL;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(cu_get_driver(&driver, err));
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    saccade_sizes sizes = view->sizes;
    sizes.H = plan->problem.sizes.H;
    sizes.Hkv = plan->problem.sizes.Hkv;
    sizes.D = plan->problem.sizes.D;
    sizes.Dv = plan->problem.sizes.Dv;
    return cu_runs_make(driver, device, mask, cu_tile_rows(s->family, &s->tile), s->tile.keys,
                        &sizes, (size_t)s->device.l2_bytes, err);
}

/* the stride of a dimension, 0 where it makes no difference */
static int64_t stride_of(const saccade_tensor *t, int d)
{
    return t->shape[d] == 1 ? 0 : t->stride[d];
}

static cu_stride strides_of(const saccade_tensor *t)
{
    return (cu_stride){stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

/* 16-byte pieces: what the tensor copies and the 16-byte stores need */
static saccade_status check_aligned(const saccade_tensor *t, const char *name,
                                    saccade_error *err)
{
    FAIL_AT((uintptr_t)t->data % 16, SACCADE_EINVAL, name, 0, 0,
            "got an address that is not a multiple of 16 bytes");
    for (int d = 0; d < 3; d++)
        FAIL_AT(stride_of(t, d) % 8, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d, expected a multiple of 8 (16 bytes)",
                (long long)t->stride[d], d);
    FAIL_AT(t->shape[2] > 1 && t->stride[2] == 0, SACCADE_EINVAL, name, 0, 0,
            "got a broadcast dimension 2, expected memory for each row");
    return SACCADE_OK;
}

/* Map over (d, n, h, b) in boxes of 64 columns x rows, 128-byte swizzle. */
static saccade_status encode(const cu_driver *driver, const saccade_tensor *t, int rows,
                             cu_map *out, saccade_error *err)
{
    enum { F16 = 6, BF16 = 9, SWIZZLE_128 = 3, PROMOTE_256 = 3 };
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
                                       size, stride, box, steps, 0, SWIZZLE_128, PROMOTE_256, 0),
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
        if (t->rank == 0) {
            FAIL_AT(t->device.kind != SACCADE_CPU, SACCADE_EINVAL, fn->captures[i].name, 0, 0,
                    "got a scalar on the device, expected one on the host (it goes by value)");
            c->shape[0] = scalar_bits(&fn->captures[i], t);
            continue;
        }
        FAIL_AT(t->device.kind != SACCADE_CUDA, SACCADE_EINVAL, fn->captures[i].name, 0, 0,
                "got a tensor on the host, expected one on the device");
        c->data = t->data;
        for (int d = 0; d < t->rank; d++) {
            c->shape[d] = (int)t->shape[d];
            c->stride[d] = t->stride[d];
        }
    }
    return SACCADE_OK;
}

static void fill_block_mask(const state *s, const plan_run *run, const cu_runs *runs, cu_fwd *p)
{
    const int rows = cu_tile_rows(s->family, &s->tile);
    p->n_qblk = (int)((run->sizes.Q + rows - 1) / rows);
    p->n_tiles = (int)tiles_of(s, &run->sizes);
    if (!runs)
        return;
    p->runs = (const cu_run *)(uintptr_t)runs->runs;
    p->run_start = (const int *)(uintptr_t)runs->run_start;
    p->order = (const int *)(uintptr_t)runs->order;
    p->mask_b = runs->mask_b;
    p->mask_h = runs->mask_h;
}

static void fill(const saccade_plan *plan, const plan_run *run, const cu_runs *runs, cu_fwd *p)
{
    const state *s = plan->state;
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
    p->B = (int)run->sizes.B;
    p->H = (int)run->sizes.H;
    p->G = (int)run->sizes.Hkv;
    p->M = (int)run->sizes.Q;
    p->N = (int)run->sizes.KV;
    p->scale = plan->problem.scale;
    p->q_offset = position_of(&run->positions.q_offset, 0);
    p->kv_offset = position_of(&run->positions.kv_offset, 0);
    p->kv_len = position_of(&run->positions.kv_len, (int)run->sizes.KV);
    p->counter = run->workspace;
    p->flags = (int *)((char *)run->workspace + COUNTER_BYTES);
    fill_block_mask(s, run, runs, p);
}

/* Shared memory above 48 KB is asked for once per device. */
static saccade_status make_ready(state *s, const cu_driver *driver, int device, int shared,
                                 saccade_error *err)
{
    const unsigned bit = 1u << (device & 31);
    if (atomic_load(&s->ready) & bit)
        return SACCADE_OK;
    for (int i = MAIN; i <= PEAKS; i++)
        TRY(cu_check(driver,
                     driver->kernel_set(MAX_SHARED, shared, s->programs[i].kernel, device),
                     "cuKernelSetAttribute", err));
    atomic_fetch_or(&s->ready, bit);
    return SACCADE_OK;
}

static saccade_status launch_careful(const state *s, const cu_driver *driver, cu_fwd *p,
                                     cu_capture *captures, void *stream, saccade_error *err)
{
    void *parameters[] = {p, captures};
    const int64_t looks = ((int64_t)p->n_tiles * warps_of(s) + 31) / 32;
    const int most = 4 * s->device.n_sm;
    return cu_check(driver,
                    driver->launch(s->programs[CAREFUL].kernel,
                                   (unsigned)(looks < most ? looks : most), 1, 1, 128, 1, 1, 0,
                                   stream, parameters, NULL),
                    "careful kernel", err);
}

static saccade_status launch(const saccade_plan *plan, const cu_driver *driver,
                             const plan_run *run, const cu_runs *runs, saccade_error *err)
{
    state *s = plan->state;
    cu_fwd p;
    cu_capture captures[MAX_ARGS];
    cu_map maps[3];
    const plan_problem *problem = &plan->problem;
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    const int rows = cu_tile_rows(s->family, &s->tile);
    const int shared = shared_of(s, problem);
    fill(plan, run, runs, &p);
    TRY(pack_captures(problem->score, run->score_env.tensors, captures, err));
    TRY(pack_captures(problem->mask, run->mask_env.tensors, captures + n_score, err));
    TRY(make_ready(s, driver, run->q->device.index, shared, err));
    TRY(encode(driver, run->q, rows, &maps[0], err));
    TRY(encode(driver, run->k, s->tile.keys, &maps[1], err));
    TRY(encode(driver, run->v, s->tile.keys, &maps[2], err));
    const int grid = p.n_tiles < s->device.n_sm ? p.n_tiles : s->device.n_sm;
    void *parameters[] = {&p, captures, &maps[0], &maps[1], &maps[2]};
    if (grid < p.n_tiles)
        TRY(cu_check(driver,
                     driver->fill32((cu_ptr)(uintptr_t)p.counter, 0, 1, run->stream),
                     "cuMemsetD32Async", err));
    TRY(cu_check(driver,
                 driver->launch(s->programs[run->row_max ? PEAKS : MAIN].kernel, (unsigned)grid,
                                1, 1, (unsigned)cu_tile_threads(s->family, &s->tile), 1, 1,
                                (unsigned)shared, run->stream, parameters, NULL),
                 "forward kernel", err));
    return launch_careful(s, driver, &p, captures, run->stream, err);
}

static saccade_status forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    const state *s = plan->state;
    const cu_driver *driver;
    const cu_runs *runs = NULL;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(check_aligned(run->q, "q", err));
    TRY(check_aligned(run->k, "k", err));
    TRY(check_aligned(run->v, "v", err));
    TRY(check_aligned(run->out, "out", err));
    FAIL_IF(tiles_of(s, &run->sizes) > INT32_MAX / warps_of(s), SACCADE_ELIMIT,
            "cuda: got too many rows for one run");
    if (run->block_mask) {
        runs = cu_runs_find(run->q->device.index, run->block_mask,
                            cu_tile_rows(s->family, &s->tile), s->tile.keys, &run->sizes);
        FAIL_IF(!runs, SACCADE_EINVAL,
                "cuda: got a block mask without a copy on device %d, expected "
                "saccade_plan_prepare first", run->q->device.index);
    }
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, run->q->device.index, &pushed, err));
    const saccade_status status = launch(plan, driver, run, runs, err);
    cu_leave(driver, pushed);
    return status;
}

/* ---- explain ---- */

static saccade_status explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const state *s = plan->state;
    const plan_problem *p = &plan->problem;
    int registers = 0, spills = 0, serialised = 0;
    for (int i = 0; i < PROGRAMS; i++) {
        const cu_report *r = &s->programs[i].image.report;
        registers = r->registers > registers ? r->registers : registers;
        spills = r->spill_bytes > spills ? r->spill_bytes : spills;
        serialised |= r->is_serialised;
    }
    strbuf_printf(out, "arch: %s\n", s->arch);
    strbuf_printf(out, "tile: %dx%d\n", cu_tile_rows(s->family, &s->tile), s->tile.keys);
    strbuf_printf(out, "pipeline stages: %d\n", s->tile.stages);
    strbuf_printf(out, "registers: %d\n", registers);
    strbuf_printf(out, "spill bytes: %d\n", spills);
    strbuf_printf(out, "shared memory: %d\n",
                  shared_of(s, p));
    strbuf_printf(out, "serialised products: %s\n", serialised ? "yes" : "no");
    strbuf_printf(out, "offsets: %s\n", s->tile.is_lazy ? "late, with a second pass" : "exact");
    if (s->given_up)
        strbuf_puts(out, "tile note: every tile of the ladder spills or waits; the first is kept\n");
    else if (s->rung)
        strbuf_printf(out, "tile note: %d larger tile%s spilled or waited\n", s->rung,
                      s->rung == 1 ? "" : "s");
    strbuf_puts(out, "code:\n");
    strbuf_puts(out, s->mod_text);
    return strbuf_status(out, err);
}

static const plan_solver cuda_tile = {
    .name = "cuda-tile",
    .backend = "cuda",
    .applicable = applicable,
    .create = create,
    .workspace = workspace,
    .prepare = prepare,
    .forward = forward,
    .explain = explain,
    .destroy = destroy,
};

const plan_solver *const cuda_solvers[] = {&cuda_tile, NULL};
