/* Strips of a tile: scores, what changes them, weights. On AMX the weights of a strip are made
 * beside the next strip's scores, so a strip stays open in between. */
#include "cpu/backward/backward.h"

#include "base/integers.h"

#include <math.h>
#include <string.h>

enum { LD = BACKWARD_KEYS };

int32_t backward_strip_rows(const backward_worker *w, int32_t r0)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    return w->m - r0 < strip ? w->m - r0 : strip;
}

int backward_needs_dp(const cpu_backward_plan *b)
{
    return b->has_dq || b->has_dk || b->n_reads;
}

int backward_is_nonfinite(const backward_worker *w)
{
    return w->k_nonfinite || w->q_nonfinite || w->o_nonfinite;
}

/* Whether any is dead. */
static int note_live(backward_worker *w, int32_t r0, int32_t rows, int32_t from, int32_t past)
{
    int any_dead = 0;
    for (int32_t r = r0; r < r0 + rows; r++) {
        memset(w->live + r * LD, 0, LD);
        for (int32_t j = from; j < past; j++) {
            w->live[r * LD + j] = w->s[r * LD + j] != -INFINITY;
            any_dead |= !w->live[r * LD + j];
        }
    }
    return any_dead;
}

void backward_clear_weights(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                            int32_t past)
{
    const int32_t step = w->job->backward->kernels->step;
    const int32_t depth = w->job->backward->kernels->depth;
    /* Kernels on tiles, whose spans begin at a strip of keys, fill up the last themselves. */
    if (from >= past || w->job->backward->kernels->turn_sums)
        return;
    const size_t bytes = (size_t)(past - from) * sizeof(float);
    for (int32_t r = r0 / step; r < round_up(r0 + rows, depth) / step; r++) {
        memset((float *)w->p + r * LD + from, 0, bytes);
        memset((float *)w->ds + r * LD + from, 0, bytes);
    }
}

/* Scores of a strip, as kernels make them. */
static cpu_strip_scores scores_of(const backward_worker *w, int32_t r0, int32_t from,
                                  int32_t past)
{
    const cpu_kernels *k = w->job->backward->kernels->block;
    const saccade_sizes *s = &w->job->plan->problem.sizes;
    const size_t element = (size_t)k->element;
    const int64_t D = round_up(s->D, k->depth), E = round_up(s->Dv, k->depth);
    cpu_strip_scores c = {.q = (const char *)w->q_at.rows
                               + (size_t)r0 * (size_t)w->q_at.ld * element,
                          .k = (const char *)w->k_turned + (size_t)(from * D) * element,
                          .q_ld = w->q_at.ld,
                          .o_ld = w->o_at.ld,
                          .D = (int32_t)s->D,
                          .Dv = (int32_t)s->Dv,
                          .rows = backward_strip_rows(w, r0),
                          .n_panels = ((past - from + 15) / 16 * 16 + k->panel - 1) / k->panel,
                          .ld = LD,
                          .scale = backward_scale_of(w) / backward_late_scale(w),
                          .slope = w->head_slope,
                          .s = w->s + r0 * LD + from,
                          .dp = w->dp + r0 * LD + from};
    if (backward_needs_dp(w->job->backward)) {
        c.o = (const char *)w->o_at.rows + (size_t)r0 * (size_t)w->o_at.ld * element;
        c.v = (const char *)w->v_turned + (size_t)(from * E) * element;
    }
    return c;
}

static void make_scores(const cpu_kernels *k, const cpu_strip_scores *c)
{
    const int32_t n = c->n_panels * k->panel;
    k->scores(c->q, c->q_ld, c->k, c->D, c->rows, n, c->scale, c->s, c->ld);
    if (c->o)
        k->scores(c->o, c->o_ld, c->v, c->Dv, c->rows, n, c->slope, c->dp, c->ld);
}

static void open_weights(const backward_worker *w, int32_t r0, int32_t from, int32_t past,
                         backward_strip *o)
{
    const backward_job *job = w->job;
    const saccade_sizes *s = &job->run->sizes;
    const int64_t at = (w->b * s->H + w->h) * s->Q + w->i0 + r0;
    const int64_t step = r0 / job->backward->kernels->step * LD + from;
    const int32_t n = (past - from + 15) / 16 * 16;
    const int is_weighing = job->backward->is_weighing;
    o->is_open = 1;
    o->r0 = r0;
    o->rows = backward_strip_rows(w, r0);
    o->from = from;
    o->past = past;
    for (int32_t r = 0; r < o->rows; r++)
        o->delta[r] = is_weighing ? 0 : w->head_slope * job->delta[at + r];
    o->weights =
        (cpu_strip_weights){.s = w->s + r0 * LD + from,
                            .dp = is_weighing ? backward_begin_weighing(w, o->rows, from, n)
                                              : w->dp + r0 * LD + from,
                            .ld = LD,
                            .rows = o->rows,
                            .n = n,
                            .scale = backward_late_scale(w),
                            .lse = job->lse + at,
                            .delta = o->delta,
                            .slope = job->backward->has_slopes ? w->results[1] + from : NULL,
                            .dx = job->backward->n_reads ? w->dx + from : NULL,
                            .p = (float *)w->p + step,
                            .ds = (float *)w->ds + step};
}

void backward_close_strip(backward_worker *w, backward_strip *o, int32_t past)
{
    backward_drop_weights(w, o->r0, o->rows, o->from, o->past);
    if (w->job->backward->is_weighing)
        backward_add_weighing(w, o->r0, o->rows, o->from, o->past);
    else if (w->job->backward->n_reads)
        backward_add_sums(w, o->r0, o->rows, o->from, o->past);
    backward_clear_weights(w, o->r0, o->rows, o->past, past); /* scores were whole panels */
    o->is_open = 0;
}

void backward_make_weights(backward_worker *w, backward_strip *o, int32_t past)
{
    if (!o->is_open)
        return;
    w->job->backward->kernels->weights(&o->weights);
    backward_close_strip(w, o, past);
}

int backward_make_strip(backward_worker *w, int32_t r0, int32_t from, int32_t past,
                        backward_strip *open, int32_t all_past)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const cpu_strip_scores scores = scores_of(w, r0, from, past);
    const int32_t rows = backward_strip_rows(w, r0);
    if (backward_is_streamed(w, r0)) {
        backward_make_weights(w, open, all_past);
        open_weights(w, r0, from, past, open);
        open->is_open = 0;
        backward_stream_strip(w, &scores, &open->weights, r0, from, past);
        return 0;
    }
    backward_end_stream(w);
    if (open->is_open && kernels->overlap) {
        kernels->overlap(&scores, &open->weights);
        backward_close_strip(w, open, all_past);
    } else {
        backward_make_weights(w, open, all_past);
        make_scores(kernels->block, &scores);
    }
    backward_change_scores(w, r0, rows, from, past);
    backward_drop_incoming(w, r0, rows, from, past);
    open_weights(w, r0, from, past, open);
    const int any_dead = backward_is_nonfinite(w) && note_live(w, r0, rows, from, past);
    if (!kernels->overlap)
        backward_make_weights(w, open, all_past);
    return any_dead;
}
