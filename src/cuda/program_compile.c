/* The programs of a plan compiled side by side. The main program chooses its tile first: one
 * that spills registers or waits for its products one by one gives way to the next smaller.
 * Other programs start beside it, most often for the tile that it keeps. */
#include "cuda/cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- one program ---- */

static void put_config(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                       const cu_form *form, strbuf *out)
{
    const int is_f32 = p->dtype == SACCADE_F32, groups = form->tile.groups;
    const int has_producer = kind->operation == CU_OP_FORWARD && form->family == CU_SM90;
    const int E = cu_padded(p->sizes.Dv), parts = is_f32 ? cu_parts(E) : 1;
    const int whole = 32 * parts; /* columns of O in panels */
    const struct {
        const char *name;
        int value;
    } rows[] = {
        {"SM", form->family == CU_SM90 ? 90 : 80},
        {"F16", p->dtype == SACCADE_F16},
        {"F32", is_f32},
        {"D", cu_padded(p->sizes.D)},
        {"E", is_f32 ? (E + whole - 1) / whole * whole : E},
        {"D_REAL", (int)p->sizes.D},
        {"E_REAL", (int)p->sizes.Dv},
        {"WGS", groups},
        {"PARTS", parts},
        {"TN", form->tile.keys},
        {"STAGES", form->tile.stages},
        {"PINGPONG", form->tile.is_pingpong},
        {"LAZY", kind->may_be_lazy && s->is_lazy},
        {"ROWMAX", kind->has_maxima},
        {"PACKED", kind->is_packed},
        {"CHUNKS", p->has_chunks},
        {"Q_SHARED", cu_is_q_shared((int)p->sizes.D, (int)p->sizes.Dv)},
        {"SCALE_FIRST", p->scale <= 0 && s->facts.score != CU_SCORE_GENERAL},
        {"REGS_PRODUCER", groups == 1   ? 56
                          : groups == 2 ? 40
                                        : 32},
        {"REGS_CONSUMER", groups == 1   ? 256
                          : groups == 2 ? 232
                                        : 160},
        {"FIRST_WARP", has_producer ? 4 : 0},
    };
    strbuf_puts(out, "/* generated: constants of this instance */\n#pragma once\n");
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
        strbuf_printf(out, "#define CFG_%s %d\n", rows[k].name, rows[k].value);
}

static saccade_status compile_one(const cu_state *s, const plan_problem *p, cu_program which,
                                  const cu_form *form, cu_image *out, saccade_error *err)
{
    const cu_program_kind *kind = &cu_program_kinds[which];
    char entry[32];
    strbuf config, products;
    strbuf_init(&config, 0);
    strbuf_init(&products, 0);
    snprintf(entry, sizeof entry, "%s.cu", kind->kernel[form->family]);
    put_config(s, p, kind, form, &config);
    cu_emit_products(&form->tile, cu_padded(p->sizes.Dv), p->dtype == SACCADE_F16, &products);
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

static int is_clean(const cu_loaded *l)
{
    return l->image.report.spill_bytes == 0 && !l->image.report.is_serialised;
}

static void drop(cu_loaded *l)
{
    free(l->image.code);
    l->image = (cu_image){0};
}

/* ---- programs side by side ---- */

typedef struct job {
    const cu_state *state;
    const plan_problem *problem;
    cu_program which;
    cu_loaded *out;
    saccade_error err;
    saccade_status status;
    pthread_t thread;
    int is_begun, has_thread;
} job;

static void *run_job(void *argument)
{
    job *j = argument;
    j->status =
        compile_one(j->state, j->problem, j->which, &j->out->form, &j->out->image, &j->err);
    return NULL;
}

/* Begins the program's first form, if it has one; without a thread to spare it is compiled at
 * once. */
static void begin_job(job *j, cu_state *s, const plan_problem *p, cu_program which)
{
    cu_loaded *out = &s->programs[which];
    if (!cu_program_kinds[which].choose(s, p, 0, &out->form)) {
        out->form = (cu_form){0};
        return;
    }
    *j = (job){.state = s, .problem = p, .which = which, .out = out, .is_begun = 1};
    j->has_thread = pthread_create(&j->thread, NULL, run_job, j) == 0;
    if (!j->has_thread)
        run_job(j);
}

/* `before` is the status so far; the first error is kept. */
static saccade_status end_job(job *j, saccade_status before, saccade_error *err)
{
    if (!j->is_begun)
        return before;
    if (j->has_thread)
        pthread_join(j->thread, NULL);
    j->is_begun = 0;
    if (before != SACCADE_OK)
        return before;
    if (j->status != SACCADE_OK && err)
        *err = j->err;
    return j->status;
}

static void begin_others(job *jobs, cu_state *s, const plan_problem *p, int followers_only)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (i != CU_MAIN && (cu_program_kinds[i].follows_main || !followers_only))
            begin_job(&jobs[i], s, p, (cu_program)i);
}

static saccade_status end_others(job *jobs, int followers_only, saccade_status status,
                                 saccade_error *err)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (cu_program_kinds[i].follows_main || !followers_only)
            status = end_job(&jobs[i], status, err);
    return status;
}

/* ---- the main program's tile ---- */

/* Late offsets suit scores that rarely climb far: plain ones, bounded ones, and those affine in
 * the key, which are walked from their larger end. A general score is not trusted with it. */
static int may_be_lazy(const cu_state *s)
{
    return s->programs[CU_MAIN].form.tile.is_lazy
           && (s->facts.score != CU_SCORE_GENERAL || s->facts.is_bounded);
}

static int choose_main(cu_state *s, const plan_problem *p, int rung)
{
    cu_loaded *l = &s->programs[CU_MAIN];
    if (!cu_program_kinds[CU_MAIN].choose(s, p, rung, &l->form))
        return 0;
    l->rung = rung;
    s->is_lazy = may_be_lazy(s);
    return 1;
}

static saccade_status compile_main(cu_state *s, const plan_problem *p, saccade_error *err)
{
    cu_loaded *l = &s->programs[CU_MAIN];
    drop(l);
    return compile_one(s, p, CU_MAIN, &l->form, &l->image, err);
}

/* After the first tile has spilled or waited: the first clean one of the others, or else it. */
static saccade_status search_main(cu_state *s, const plan_problem *p, saccade_error *err)
{
    for (int rung = 1; choose_main(s, p, rung); rung++) {
        TRY(compile_main(s, p, err));
        if (is_clean(&s->programs[CU_MAIN]))
            return SACCADE_OK;
    }
    s->given_up = 1;
    choose_main(s, p, 0);
    return compile_main(s, p, err);
}

static saccade_status compile_first(cu_state *s, const plan_problem *p, job *jobs,
                                    saccade_error *err)
{
    TRY(compile_main(s, p, err));
    if (is_clean(&s->programs[CU_MAIN]))
        return SACCADE_OK;
    TRY(end_others(jobs, 1, SACCADE_OK, err));
    TRY(search_main(s, p, err));
    if (s->given_up)
        return SACCADE_OK; /* the followers are compiled for the first tile already */
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (cu_program_kinds[i].follows_main)
            drop(&s->programs[i]);
    begin_others(jobs, s, p, 1);
    return SACCADE_OK;
}

/* ---- the other programs' forms ---- */

/* Takes a smaller form if the first one spills and that one spills less. */
static saccade_status settle(const cu_state *s, const plan_problem *p, cu_program which,
                             cu_loaded *best, saccade_error *err)
{
    cu_form smaller;
    for (int rung = 1;
         !is_clean(best) && cu_program_kinds[which].choose(s, p, rung, &smaller); rung++) {
        cu_image image = {0};
        TRY(compile_one(s, p, which, &smaller, &image, err));
        if (image.report.spill_bytes >= best->image.report.spill_bytes) {
            free(image.code);
            continue;
        }
        free(best->image.code);
        *best = (cu_loaded){.form = smaller, .rung = rung, .image = image};
    }
    return SACCADE_OK;
}

saccade_status cu_compile_programs(cu_state *s, const plan_problem *p, saccade_error *err)
{
    job jobs[CU_PROGRAMS] = {{0}};
    choose_main(s, p, 0);
    begin_others(jobs, s, p, 0);
    saccade_status status = compile_first(s, p, jobs, err);
    status = end_others(jobs, 0, status, err);
    for (int i = 0; i < CU_PROGRAMS && status == SACCADE_OK; i++)
        if (i != CU_MAIN && s->programs[i].image.code)
            status = settle(s, p, (cu_program)i, &s->programs[i], err);
    return status;
}
