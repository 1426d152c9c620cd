/* The programs of a plan compiled side by side, each in a thread that goes down the forms which
 * its program may take, best first: one that spills registers or waits for its products one by
 * one gives way to the next. Where the first does not do, as many of the next are tried at a
 * time as there are CPUs for: a compiler takes a second for each. Programs that have the main
 * one's tile begin beside it for its first, and once more if it takes another. */
#include "cuda/program/program.h"

#include "base/cpus.h"
#include "base/threads.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

enum { ALL_FORMS = INT_MAX, MOST_AT_A_TIME = 8 };

/* ---- which form is taken ---- */

/* Where a program is left out, others that make the same take two times as long and more; so
 * many bytes spilled cost it less. */
enum { SPILL_LAST = 256 };

/* Whether no smaller form is looked for. */
static int is_good(cu_program which, const cu_image *image)
{
    return image->code && image->report.spill_bytes <= cu_program_kinds[which].spill_most
           && !image->report.is_serialised;
}

/* Of forms of which none is good; where all tiles of the main program are bad, its first stays
 * with the programs that are compiled for it. */
static int is_better(cu_program which, const cu_image *image, const cu_image *best)
{
    if (!best->code)
        return 1;
    if (which == CU_MAIN)
        return 0;
    if (image->report.is_serialised != best->report.is_serialised)
        return best->report.is_serialised;
    return image->report.spill_bytes < best->report.spill_bytes;
}

/* Whether a plan does better without the program. */
static int is_left_out(cu_program which, const cu_image *image)
{
    return cu_program_kinds[which].is_optional
           && (image->report.spill_bytes > SPILL_LAST || image->report.is_serialised);
}

static void drop(cu_loaded *l)
{
    free(l->image.code);
    l->image = (cu_image){0};
}

/* ---- one program, and its forms on trial ---- */

typedef struct job {
    cu_state *state;
    const plan_problem *problem;
    cu_program which;
    int rung, end; /* the next form to try, and the one not to try any more */
    cu_loaded best;
    saccade_error err;
    saccade_status status;
    pthread_t thread;
    int is_begun, has_thread;
} job;

typedef struct trial {
    const job *job;
    cu_loaded got;
    saccade_error err;
    saccade_status status;
    pthread_t thread;
    int has_thread;
} trial;

static void *run_trial(void *argument)
{
    trial *t = argument;
    t->status = cu_compile_instance(t->job->state, t->job->problem, t->job->which, &t->got.form,
                                    &t->got.image, &t->err);
    return NULL;
}

/* All of them side by side, the first one in the caller's thread; without a thread to spare
 * those that lack one follow it. */
static void run_trials(trial *trials, int n)
{
    for (int i = 1; i < n; i++)
        trials[i].has_thread =
            thread_begin(&trials[i].thread, NULL, run_trial, &trials[i]) == 0;
    for (int i = 0; i < n; i++)
        if (trials[i].has_thread)
            pthread_join(trials[i].thread, NULL);
        else
            run_trial(&trials[i]);
}

static int is_done(const job *j)
{
    return j->status != SACCADE_OK || is_good(j->which, &j->best.image) || j->rung >= j->end;
}

/* Takes the form if it is better than the best so far, or keeps the error; in the order of
 * forms, so that none after the first good one counts. */
static void judge(job *j, trial *t)
{
    if (!is_done(j) && t->status != SACCADE_OK) {
        j->status = t->status;
        j->err = t->err;
    } else if (!is_done(j)
               && (is_good(j->which, &t->got.image)
                   || is_better(j->which, &t->got.image, &j->best.image))) {
        drop(&j->best);
        j->best = t->got;
        return;
    }
    drop(&t->got);
}

/* Tries the next forms, at most `most` of them. */
static void try_forms(job *j, int most)
{
    trial trials[MOST_AT_A_TIME] = {{0}};
    const cu_program_kind *kind = &cu_program_kinds[j->which];
    int n = 0;
    for (; n < most && j->rung + n < j->end; n++) {
        trials[n] = (trial){.job = j, .got.rung = j->rung + n};
        if (!kind->choose(j->state, j->problem, j->rung + n, &trials[n].got.form))
            break;
    }
    run_trials(trials, n);
    for (int i = 0; i < n; i++)
        judge(j, &trials[i]);
    j->rung = n < most ? j->end : j->rung + n;
}

/* Half of the CPUs: other programs are on their way too. */
static int forms_at_a_time(void)
{
    const int n = cpus_usable(2 * MOST_AT_A_TIME) / 2;
    return n > 1 ? n : 1;
}

static void *run_job(void *argument)
{
    job *j = argument;
    for (int most = 1; !is_done(j); most = forms_at_a_time())
        try_forms(j, most);
    return NULL;
}

/* Begins the program with the form of that rung, if it has any form; without a thread to spare
 * it is compiled at once. What it has from forms before is the best so far. */
static void begin_job(job *j, cu_state *s, const plan_problem *p, cu_program which, int rung,
                      int end)
{
    cu_loaded *out = &s->programs[which];
    cu_form first = {0};
    if (!cu_program_kinds[which].choose(s, p, end == ALL_FORMS ? 0 : rung, &first)) {
        out->form = (cu_form){0};
        return;
    }
    if (!out->image.code)
        out->form = first;
    *j = (job){.state = s, .problem = p, .which = which, .rung = rung, .end = end};
    j->best = *out;
    out->image = (cu_image){0};
    j->is_begun = 1;
    if (is_done(j))
        return;
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
    j->is_begun = j->has_thread = 0;
    if (j->end == ALL_FORMS && !j->state->has_large_heads
        && is_left_out(j->which, &j->best.image)) {
        drop(&j->best);
        j->best.form = (cu_form){0};
    }
    j->state->programs[j->which] = j->best;
    if (before == SACCADE_OK && j->status != SACCADE_OK && err)
        *err = j->err;
    return before == SACCADE_OK ? j->status : before;
}

/* ---- programs side by side ---- */

/* Programs that begin together: forward's that have a tile of their own, the main one and those
 * that have its tile, backward's, and those that wait for backward's choice. */
typedef enum part { OWN_TILE, MAIN_TILE, BACKWARD, AFTER_TILES } part;

static int is_in(cu_program i, part which)
{
    const cu_program_kind *kind = &cu_program_kinds[i];
    const int is_backward = kind->operation == CU_OP_BACKWARD;
    switch (which) {
    case OWN_TILE:
        return !is_backward && i != CU_MAIN && !kind->follows_main;
    case MAIN_TILE:
        return kind->follows_main;
    case BACKWARD:
        return is_backward && !kind->follows_tiles;
    default:
        return kind->follows_tiles;
    }
}

static void begin_jobs(job *jobs, cu_state *s, const plan_problem *p, part which, int rung,
                       int end)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (is_in((cu_program)i, which))
            begin_job(&jobs[i], s, p, (cu_program)i, rung, end);
}

static saccade_status end_jobs(job *jobs, part which, saccade_status status, saccade_error *err)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (is_in((cu_program)i, which))
            status = end_job(&jobs[i], status, err);
    return status;
}

static saccade_status end_backward(job *jobs, cu_state *s, const plan_problem *p,
                                   saccade_status status, saccade_error *err)
{
    status = end_jobs(jobs, BACKWARD, status, err);
    if (status == SACCADE_OK)
        begin_jobs(jobs, s, p, AFTER_TILES, 0, ALL_FORMS);
    return end_jobs(jobs, AFTER_TILES, status, err);
}

saccade_status cu_compile_backward(cu_state *s, const plan_problem *p, saccade_error *err)
{
    job jobs[CU_PROGRAMS] = {{0}};
    begin_jobs(jobs, s, p, BACKWARD, 0, ALL_FORMS);
    return end_backward(jobs, s, p, SACCADE_OK, err);
}

/* ---- problems whose results are those of another ---- */

enum { NO_RUNG = -1 };

/* Programs of forward that look for a form of their own. On sm_90a the one with maxima has the
 * main one's. */
static int chooses_form(const cu_state *s, cu_program i)
{
    return i == CU_MAIN || is_in(i, OWN_TILE) || (i == CU_EXACT && s->family != CU_SM90);
}

static int rung_of(const cu_state *s, const plan_problem *p, cu_program i, const cu_tile *tile)
{
    cu_form form;
    for (int rung = 0; cu_program_kinds[i].choose(s, p, rung, &form); rung++)
        if (form.tile.groups == tile->groups && form.tile.keys == tile->keys
            && form.tile.is_lazy == tile->is_lazy)
            return rung;
    return NO_RUNG;
}

/* Once a program's first form is through: begins it with the tile that the other problem's has,
 * if that is another; where it has no such tile, it chooses its own. */
static void begin_like(job *j, cu_state *s, const plan_problem *p, cu_program i,
                       const cu_loaded *other)
{
    if (!s->programs[i].form.tile.groups)
        return;
    if (!other->form.tile.groups) {
        drop(&s->programs[i]);
        s->programs[i].form = (cu_form){0};
        return;
    }
    const int rung = rung_of(s, p, i, &other->form.tile);
    if (rung > 0)
        drop(&s->programs[i]);
    if (rung != 0)
        begin_job(j, s, p, i, rung > 0 ? rung : 1, rung > 0 ? rung + 1 : ALL_FORMS);
}

/* Both problems' programs side by side, this one's with their first forms. */
static saccade_status compile_both(job *jobs, cu_state *s, const plan_problem *p,
                                   cu_state *other, const plan_problem *of_other,
                                   saccade_error *err)
{
    job others[CU_PROGRAMS] = {{0}};
    saccade_status status = SACCADE_OK;
    for (int i = 0; i < CU_PROGRAMS; i++) {
        if (!chooses_form(s, (cu_program)i) || i == CU_EXACT)
            continue;
        begin_job(&jobs[i], s, p, (cu_program)i, 0, 1);
        if (jobs[i].is_begun)
            begin_job(&others[i], other, of_other, (cu_program)i, 0, ALL_FORMS);
    }
    status = end_job(&others[CU_MAIN], status, err);
    status = end_job(&jobs[CU_MAIN], status, err);
    if (status == SACCADE_OK && chooses_form(s, CU_EXACT))
        begin_job(&others[CU_EXACT], other, of_other, CU_EXACT, 0, ALL_FORMS);
    for (int i = 0; i < CU_PROGRAMS; i++) {
        status = end_job(&others[i], status, err);
        status = end_job(&jobs[i], status, err);
    }
    return status;
}

saccade_status cu_compile_like(cu_state *s, const plan_problem *p, cu_state *other,
                               const plan_problem *of_other, saccade_error *err)
{
    job jobs[CU_PROGRAMS] = {{0}}, backward[CU_PROGRAMS] = {{0}};
    begin_jobs(backward, s, p, BACKWARD, 0, ALL_FORMS);
    saccade_status status = compile_both(jobs, s, p, other, of_other, err);
    for (int i = 0; status == SACCADE_OK && i < CU_PROGRAMS; i++)
        if (chooses_form(s, (cu_program)i) && i != CU_EXACT)
            begin_like(&jobs[i], s, p, (cu_program)i, &other->programs[i]);
    status = end_job(&jobs[CU_MAIN], status, err);
    for (int i = 0; status == SACCADE_OK && i < CU_PROGRAMS; i++)
        if (is_in((cu_program)i, MAIN_TILE))
            begin_job(&jobs[i], s, p, (cu_program)i, 0,
                      chooses_form(s, (cu_program)i) ? 1 : ALL_FORMS);
    status = end_jobs(jobs, MAIN_TILE, status, err);
    if (status == SACCADE_OK && chooses_form(s, CU_EXACT))
        begin_like(&jobs[CU_EXACT], s, p, CU_EXACT, &other->programs[CU_EXACT]);
    status = end_jobs(jobs, MAIN_TILE, status, err);
    status = end_jobs(jobs, OWN_TILE, status, err);
    return end_backward(backward, s, p, status, err);
}

/* ---- a plan's programs ---- */

/* The programs of the main one's first tile are through before it says which tile it takes. */
static saccade_status end_main(job *jobs, cu_state *s, const plan_problem *p,
                               saccade_error *err)
{
    saccade_status status = end_jobs(jobs, MAIN_TILE, SACCADE_OK, err);
    status = end_job(&jobs[CU_MAIN], status, err);
    if (status != SACCADE_OK)
        return status;
    const int is_other = s->programs[CU_MAIN].rung != 0;
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (is_other && is_in((cu_program)i, MAIN_TILE))
            drop(&s->programs[i]);
    begin_jobs(jobs, s, p, MAIN_TILE, is_other ? 0 : 1, ALL_FORMS);
    return SACCADE_OK;
}

saccade_status cu_compile_programs(cu_state *s, const plan_problem *p, saccade_error *err)
{
    job jobs[CU_PROGRAMS] = {{0}};
    begin_job(&jobs[CU_MAIN], s, p, CU_MAIN, 0, ALL_FORMS);
    begin_jobs(jobs, s, p, MAIN_TILE, 0, 1);
    begin_jobs(jobs, s, p, OWN_TILE, 0, ALL_FORMS);
    begin_jobs(jobs, s, p, BACKWARD, 0, ALL_FORMS);
    saccade_status status = end_main(jobs, s, p, err);
    status = end_jobs(jobs, MAIN_TILE, status, err);
    status = end_jobs(jobs, OWN_TILE, status, err);
    return end_backward(jobs, s, p, status, err);
}
