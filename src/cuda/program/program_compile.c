/* The programs of a plan compiled side by side. The main program chooses its tile first: one
 * that spills registers or waits for its products one by one gives way to the next smaller.
 * Other programs start beside it, most often for the tile that it keeps. */
#include "cuda/program/program.h"

#include "base/threads.h"

#include <pthread.h>
#include <stdlib.h>

/* ---- one program ---- */

static int is_clean(const cu_image *image)
{
    return image->report.spill_bytes == 0 && !image->report.is_serialised;
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
    j->status = cu_compile_instance(j->state, j->problem, j->which, &j->out->form,
                                    &j->out->image, &j->err);
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
    j->has_thread = thread_begin(&j->thread, NULL, run_job, j) == 0;
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

/* Programs that begin together: forward's beside CU_MAIN, those of them that have its tile,
 * backward's, and those that wait for backward's choice. */
typedef enum part { BESIDE_MAIN, WITH_MAIN, BACKWARD, AFTER_TILES } part;

static int is_in(cu_program i, part which)
{
    const cu_program_kind *kind = &cu_program_kinds[i];
    const int is_backward = kind->operation == CU_OP_BACKWARD;
    switch (which) {
    case BESIDE_MAIN:
        return !is_backward && i != CU_MAIN;
    case WITH_MAIN:
        return kind->follows_main;
    case BACKWARD:
        return is_backward && !kind->follows_tiles;
    default:
        return kind->follows_tiles;
    }
}

static void begin_jobs(job *jobs, cu_state *s, const plan_problem *p, part which)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (is_in((cu_program)i, which))
            begin_job(&jobs[i], s, p, (cu_program)i);
}

static saccade_status end_jobs(job *jobs, part which, saccade_status status, saccade_error *err)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (is_in((cu_program)i, which))
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
    return cu_compile_instance(s, p, CU_MAIN, &l->form, &l->image, err);
}

/* After the first tile has spilled or waited: the first clean one of the others, or else it. */
static saccade_status search_main(cu_state *s, const plan_problem *p, saccade_error *err)
{
    for (int rung = 1; choose_main(s, p, rung); rung++) {
        TRY(compile_main(s, p, err));
        if (is_clean(&s->programs[CU_MAIN].image))
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
    if (is_clean(&s->programs[CU_MAIN].image))
        return SACCADE_OK;
    TRY(end_jobs(jobs, WITH_MAIN, SACCADE_OK, err));
    TRY(search_main(s, p, err));
    if (s->given_up)
        return SACCADE_OK; /* the followers are compiled for the first tile already */
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (cu_program_kinds[i].follows_main)
            drop(&s->programs[i]);
    begin_jobs(jobs, s, p, WITH_MAIN);
    return SACCADE_OK;
}

/* ---- the other programs' forms ---- */

/* Where a program is left out, others that make the same take two times as long and more; so
 * many bytes spilled cost it less. */
enum { SPILL_LAST = 256 };

/* Whether no smaller form is looked for. */
static int is_good(const cu_program_kind *kind, const cu_image *image)
{
    return image->report.spill_bytes <= kind->spill_most && !image->report.is_serialised;
}

static int is_better(const cu_image *image, const cu_image *best)
{
    if (image->report.is_serialised != best->report.is_serialised)
        return best->report.is_serialised;
    return image->report.spill_bytes < best->report.spill_bytes;
}

/* Takes a smaller form if the first one spills and that one spills less. */
static saccade_status settle(const cu_state *s, const plan_problem *p, cu_program which,
                             cu_loaded *best, saccade_error *err)
{
    const cu_program_kind *kind = &cu_program_kinds[which];
    cu_form smaller;
    for (int rung = 1; !is_good(kind, &best->image) && kind->choose(s, p, rung, &smaller);
         rung++) {
        cu_image image = {0};
        TRY(cu_compile_instance(s, p, which, &smaller, &image, err));
        if (!is_better(&image, &best->image)) {
            free(image.code);
            continue;
        }
        free(best->image.code);
        *best = (cu_loaded){.form = smaller, .rung = rung, .image = image};
    }
    if (kind->is_optional
        && (best->image.report.spill_bytes > SPILL_LAST || best->image.report.is_serialised)) {
        drop(best);
        best->form = (cu_form){0};
    }
    return SACCADE_OK;
}

static saccade_status settle_all(cu_state *s, const plan_problem *p, part which,
                                 saccade_status status, saccade_error *err)
{
    for (int i = 0; i < CU_PROGRAMS && status == SACCADE_OK; i++)
        if (is_in((cu_program)i, which) && s->programs[i].image.code)
            status = settle(s, p, (cu_program)i, &s->programs[i], err);
    return status;
}

/* ---- all of them ---- */

static saccade_status end_backward(job *jobs, cu_state *s, const plan_problem *p,
                                   saccade_status status, saccade_error *err)
{
    status = end_jobs(jobs, BACKWARD, status, err);
    status = settle_all(s, p, BACKWARD, status, err);
    if (status == SACCADE_OK)
        begin_jobs(jobs, s, p, AFTER_TILES);
    return end_jobs(jobs, AFTER_TILES, status, err);
}

saccade_status cu_compile_backward(cu_state *s, const plan_problem *p, saccade_error *err)
{
    job jobs[CU_PROGRAMS] = {{0}};
    begin_jobs(jobs, s, p, BACKWARD);
    return end_backward(jobs, s, p, SACCADE_OK, err);
}

saccade_status cu_compile_programs(cu_state *s, const plan_problem *p, saccade_error *err)
{
    job jobs[CU_PROGRAMS] = {{0}};
    choose_main(s, p, 0);
    begin_jobs(jobs, s, p, BESIDE_MAIN);
    begin_jobs(jobs, s, p, BACKWARD);
    saccade_status status = compile_first(s, p, jobs, err);
    status = end_jobs(jobs, BESIDE_MAIN, status, err);
    status = settle_all(s, p, BESIDE_MAIN, status, err);
    return end_backward(jobs, s, p, status, err);
}
