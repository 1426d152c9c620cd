/* The CUDA back end as a solver: a plan holds compiled programs for one architecture. They are
 * compiled side by side; one that spills registers or waits for its products one by one gives
 * way to the next smaller tile, as far as there is one. Runs: launch.c. */
#include "cuda/cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- applicable ---- */

static int say(char *why, const char *text)
{
    snprintf(why, 160, "%.150s", text);
    return 0;
}

static int applicable(const plan_problem *p, int32_t level, char *why)
{
    const cu_driver *driver;
    saccade_error err;
    (void)level;
    if (p->kv_dtype != p->dtype
        || (p->dtype != SACCADE_BF16 && p->dtype != SACCADE_F16 && p->dtype != SACCADE_F32))
        return say(why, "the CUDA back end takes bf16, f16 and f32, the same for Q, K and V");
    if (p->sizes.D > 256 || p->sizes.Dv > 256)
        return say(why, "the CUDA back end takes head dims up to 256");
    if (!p->arch && cu_get_driver(&driver, &err) != SACCADE_OK)
        return say(why, err.message);
    return 1;
}

/* ---- create ---- */

/* one program to compile */
typedef struct instance {
    const char *entry;
    cu_form form;
    int is_lazy, has_peaks, is_packed;
} instance;

static void put_config(const cu_state *s, const plan_problem *p, const instance *i, strbuf *out)
{
    const int is_groups = strcmp(i->entry, "fwd_sm90.cu") == 0,
              is_f32 = p->dtype == SACCADE_F32;
    const int groups = i->form.tile.groups, E = cu_padded(p->sizes.Dv);
    const int parts = is_f32 ? cu_parts(E) : 1, whole = 32 * parts; /* panels */
    const struct {
        const char *name;
        int value;
    } rows[] = {
        {"SM", i->form.family == CU_SM90 ? 90 : 80},
        {"F16", p->dtype == SACCADE_F16},
        {"F32", is_f32},
        {"D", cu_padded(p->sizes.D)},
        {"E", is_f32 ? (E + whole - 1) / whole * whole : E},
        {"D_REAL", (int)p->sizes.D},
        {"E_REAL", (int)p->sizes.Dv},
        {"WGS", groups},
        {"PARTS", parts},
        {"TN", i->form.tile.keys},
        {"STAGES", i->form.tile.stages},
        {"PINGPONG", i->form.tile.is_pingpong},
        {"LAZY", i->is_lazy},
        {"ROWMAX", i->has_peaks},
        {"PACKED", i->is_packed},
        {"Q_SHARED", cu_is_q_shared((int)p->sizes.D, (int)p->sizes.Dv)},
        {"SCALE_FIRST", p->scale <= 0 && s->facts.score != CU_SCORE_GENERAL},
        {"REGS_PRODUCER", groups == 1   ? 56
                          : groups == 2 ? 40
                                        : 32},
        {"REGS_CONSUMER", groups == 1   ? 256
                          : groups == 2 ? 232
                                        : 160},
        {"FIRST_WARP", is_groups ? 4 : 0},
    };
    strbuf_puts(out, "/* generated: constants of this instance */\n#pragma once\n");
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
        strbuf_printf(out, "#define CFG_%s %d\n", rows[k].name, rows[k].value);
}

static saccade_status compile_one(const cu_state *s, const plan_problem *p, const instance *i,
                                  cu_image *out, saccade_error *err)
{
    strbuf config, products;
    strbuf_init(&config, 0);
    strbuf_init(&products, 0);
    put_config(s, p, i, &config);
    cu_emit_products(&i->form.tile, cu_padded(p->sizes.Dv), p->dtype == SACCADE_F16, &products);
    const cu_source generated[] = {{"cfg.cuh", strbuf_text(&config)},
                                   {"mod.cuh", s->mod_text},
                                   {"wgmma.cuh", strbuf_text(&products)}};
    saccade_status status = strbuf_status(&config, err);
    if (status == SACCADE_OK)
        status = strbuf_status(&products, err);
    if (status == SACCADE_OK)
        status = cu_compile(i->entry, generated, 3, s->arch, out, err);
    strbuf_free(&config);
    strbuf_free(&products);
    return status;
}

static int is_clean(const cu_report *r)
{
    return r->spill_bytes == 0 && !r->is_serialised;
}

static const char *const entries[] = {"fwd_sm90.cu", "fwd_sm80.cu", "fwd_f32.cu"};

static instance main_instance(const cu_state *s)
{
    return (instance){entries[s->form.family], s->form, s->is_lazy, 0, 0};
}

/* Late offsets suit scores that rarely climb far: plain ones, bounded ones, and those affine in
 * the key, which are walked from their larger end. A general score is not trusted with it. */
static int may_be_lazy(const cu_state *s)
{
    return s->form.tile.is_lazy && (s->facts.score != CU_SCORE_GENERAL || s->facts.is_bounded);
}

/* A program compiled beside others. */
typedef struct job {
    const cu_state *state;
    const plan_problem *problem;
    instance what;
    cu_image *out;
    saccade_error err;
    saccade_status status;
    pthread_t thread;
    int is_running;
} job;

static void *run_job(void *argument)
{
    job *j = argument;
    j->status = compile_one(j->state, j->problem, &j->what, j->out, &j->err);
    return NULL;
}

/* Without a thread to spare the job is done at once. */
static void start_job(job *j, const cu_state *s, const plan_problem *p, instance what,
                      cu_image *out)
{
    *j = (job){.state = s, .problem = p, .what = what, .out = out};
    j->is_running = pthread_create(&j->thread, NULL, run_job, j) == 0;
    if (!j->is_running)
        run_job(j);
}

/* `before` is what went before; the first error is kept. */
static saccade_status end_job(job *j, saccade_status before, saccade_error *err)
{
    if (j->is_running)
        pthread_join(j->thread, NULL);
    if (before != SACCADE_OK)
        return before;
    if (j->status != SACCADE_OK && err)
        *err = j->err;
    return j->status;
}

enum { THE_MAIN = 1, THE_OTHERS = 2 };

/* The programs of the present tile, side by side. */
static saccade_status compile_tile(cu_state *s, const plan_problem *p, int which,
                                   saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    job jobs[2];
    s->is_lazy = may_be_lazy(s);
    const instance first = main_instance(s);
    instance exact = first, careful = first;
    exact.is_lazy = careful.is_lazy = 0;
    exact.has_peaks = 1;
    careful.entry = "careful.cu";
    if (which & THE_OTHERS) {
        start_job(&jobs[0], s, p, exact, &s->programs[CU_PEAKS].image);
        start_job(&jobs[1], s, p, careful, &s->programs[CU_CAREFUL].image);
    }
    if (which & THE_MAIN)
        status = compile_one(s, p, &first, &s->programs[CU_MAIN].image, err);
    for (int i = 0; i < 2 && which & THE_OTHERS; i++)
        status = end_job(&jobs[i], status, err);
    return status;
}

/* The rung'th of the tiles that fit the GPU's shared memory. */
static int find_tile(const cu_state *s, const plan_problem *p, int rung, cu_form *form)
{
    const int most = cu_shared_most(atoi(s->arch + strcspn(s->arch, "0123456789")));
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    for (int i = 0; cu_tile_choice(form->family, D, E, p->dtype, i, &form->tile); i++)
        if (cu_shared_bytes(form, &s->facts, p) <= most && rung-- == 0)
            return 1;
    return 0;
}

static int next_tile(cu_state *s, const plan_problem *p, int rung)
{
    s->rung = rung;
    return find_tile(s, p, rung, &s->form);
}

static void drop_tile(cu_state *s)
{
    for (int i = CU_MAIN; i <= CU_CAREFUL; i++) {
        free(s->programs[i].image.code);
        s->programs[i].image = (cu_image){0};
    }
}

/* The first tile of the ladder whose main program neither spills nor waits; failing that, the
 * first tile. Mostly the first will do, so its other programs are begun with it. */
static saccade_status choose_tile(cu_state *s, const plan_problem *p, saccade_error *err)
{
    const cu_report *report = &s->programs[CU_MAIN].image.report;
    next_tile(s, p, 0);
    TRY(compile_tile(s, p, THE_MAIN | THE_OTHERS, err));
    if (is_clean(report))
        return SACCADE_OK;
    for (int rung = 1; !is_clean(report) && next_tile(s, p, rung); rung++) {
        drop_tile(s);
        TRY(compile_tile(s, p, THE_MAIN, err));
    }
    if (is_clean(report))
        return compile_tile(s, p, THE_OTHERS, err);
    drop_tile(s);
    s->given_up = 1;
    next_tile(s, p, 0);
    return compile_tile(s, p, THE_MAIN | THE_OTHERS, err);
}

/* Row maxima beside O may want a smaller tile than the main program. On sm_90a they share its
 * tile: the program that keeps them also does again the tiles that the main one lists. */
static int next_peaks(const cu_state *s, const plan_problem *p, int rung, instance *out)
{
    cu_form form = {.family = s->form.family};
    const int found = form.family != CU_SM90 && find_tile(s, p, s->rung + rung, &form);
    *out = (instance){entries[form.family], form, 0, 1, 0};
    return found;
}

static instance decode_instance(const cu_tile *tile)
{
    return (instance){"decode.cu", {CU_SM90, *tile}, 0, 1, 1};
}

/* One program for both: row maxima cost little beside what plain rows cost. */
static instance plain_instance(const cu_form *form)
{
    return (instance){entries[form->family], *form, 0, 1, 0};
}

static int next_plain(const cu_state *s, const plan_problem *p, int rung, instance *out)
{
    cu_form form = {.family = CU_SM80};
    const int found = find_tile(s, p, rung, &form);
    *out = plain_instance(&form);
    return found;
}

static int next_decode(const cu_state *s, const plan_problem *p, int rung, instance *out)
{
    cu_tile tile = {0};
    const int found = cu_decode_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                                       s->facts.column_words, rung, &tile);
    *out = decode_instance(&tile);
    return found;
}

typedef int next_instance(const cu_state *s, const plan_problem *p, int rung, instance *out);

/* Takes a smaller tile where the first one spills and that one does so less. */
static saccade_status settle(const cu_state *s, const plan_problem *p, next_instance *next,
                             cu_image *best, cu_tile *tile, int *best_rung, saccade_error *err)
{
    instance smaller;
    for (int rung = 1; !is_clean(&best->report) && next(s, p, rung, &smaller); rung++) {
        cu_image image = {0}, old = *best;
        TRY(compile_one(s, p, &smaller, &image, err));
        if (image.report.spill_bytes >= best->report.spill_bytes) {
            free(image.code);
            continue;
        }
        *best = image;
        *tile = smaller.form.tile;
        *best_rung = rung;
        free(old.code);
    }
    return SACCADE_OK;
}

static saccade_status compile_tiles(cu_state *s, const plan_problem *p, saccade_error *err)
{
    TRY(choose_tile(s, p, err));
    s->peaks = s->form;
    return settle(s, p, next_peaks, &s->programs[CU_PEAKS].image, &s->peaks.tile,
                  &s->peaks_rung, err);
}

static saccade_status compile_all(cu_state *s, const plan_problem *p, saccade_error *err)
{
    cu_image *const plain = &s->programs[CU_PLAIN].image;
    cu_image *const decode = &s->programs[CU_DECODE].image;
    job jobs[2];
    instance first[2];
    if (s->form.family != CU_SM90)
        return compile_tiles(s, p, err);
    next_plain(s, p, 0, &first[0]);
    next_decode(s, p, 0, &first[1]);
    s->plain = first[0].form;
    s->decode = first[1].form.tile;
    start_job(&jobs[0], s, p, first[0], plain);
    start_job(&jobs[1], s, p, first[1], decode);
    saccade_status status = compile_tiles(s, p, err);
    for (int i = 0; i < 2; i++)
        status = end_job(&jobs[i], status, err);
    TRY(status);
    TRY(settle(s, p, next_plain, plain, &s->plain.tile, &s->plain_rung, err));
    return settle(s, p, next_decode, decode, &s->decode, &s->decode_rung, err);
}

static saccade_status load_all(cu_state *s, const cu_driver *driver, saccade_error *err)
{
    static const char *const tiles[] = {"fwd_sm90", "fwd_sm80", "fwd_f32"};
    const char *tile = tiles[s->form.family];
    const char *const names[CU_PROGRAMS] = {tile, tile, "careful", "fwd_sm80", "decode"};
    const char *const others[CU_PROGRAMS] = {
        [CU_CAREFUL] = "begin", [CU_DECODE] = "decode_end"};
    for (int i = 0; i < CU_PROGRAMS; i++) {
        cu_loaded *l = &s->programs[i];
        if (!l->image.code)
            continue;
        TRY(cu_check(
            driver,
            driver->library_load(&l->library, l->image.code, NULL, NULL, 0, NULL, NULL, 0),
            "cuLibraryLoadData", err));
        TRY(cu_check(driver, driver->library_kernel(&l->kernel, l->library, names[i]),
                     "cuLibraryGetKernel", err));
        if (others[i])
            TRY(cu_check(driver, driver->library_kernel(&l->other, l->library, others[i]),
                         "cuLibraryGetKernel", err));
    }
    return SACCADE_OK;
}

/* Target: the one asked for, else the device's whose context is current, else device 0's. */
static saccade_status choose_target(cu_state *s, const plan_problem *p,
                                    const cu_driver **driver, saccade_error *err)
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
        snprintf(s->arch, sizeof s->arch, "sm_%d%s", s->device.sm,
                 s->device.sm == 90 ? "a" : "");
    /* tensor copies want rows of whole 16 bytes */
    const int is_sm90 =
        strcmp(s->arch, "sm_90a") == 0 && p->sizes.D % 8 == 0 && p->sizes.Dv % 8 == 0;
    s->form.family = p->dtype == SACCADE_F32 ? CU_F32 : is_sm90 ? CU_SM90 : CU_SM80;
    const int wanted = atoi(s->arch + strcspn(s->arch, "0123456789"));
    FAIL_AT(wanted < 80 || wanted > 200, SACCADE_EINVAL, "arch", 0, 0,
            "got '%s', expected sm_80 or later, as in sm_90a", s->arch);
    s->is_present = s->is_present
                    && (wanted == s->device.sm
                        || (strncmp(s->arch, "compute_", 8) == 0 && wanted <= s->device.sm));
    return SACCADE_OK;
}

static void destroy(saccade_plan *plan)
{
    cu_state *s = plan->state;
    const cu_driver *driver;
    if (!s)
        return;
    for (int i = 0; i < CU_PROGRAMS; i++) {
        if (s->programs[i].library && cu_get_driver(&driver, NULL) == SACCADE_OK)
            driver->library_unload(s->programs[i].library);
        free(s->programs[i].image.code);
    }
    free(s->mod_text);
    free(s);
    plan->state = NULL;
}

static saccade_status emit(cu_state *s, saccade_plan *plan, saccade_error *err)
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
    cu_state *s = calloc(1, sizeof *s);
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

static const plan_solver cuda_tile = {
    .name = "cuda-tile",
    .backend = "cuda",
    .applicable = applicable,
    .create = create,
    .workspace = cu_workspace,
    .prepare = cu_prepare,
    .forward = cu_forward,
    .explain = cu_explain,
    .destroy = destroy,
};

const plan_solver *const cuda_solvers[] = {&cuda_tile, NULL};
