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

/* Where 0 * NaN threatens, of a strip that sees none yet: whether any of these is dead. */
static int note_live(backward_worker *w, int32_t r0, int32_t rows, int32_t from, int32_t past)
{
    int any_dead = 0;
    for (int32_t r = r0; r < r0 + rows && backward_is_nonfinite(w); r++)
        for (int32_t j = from; j < past; j++) {
            w->live[r * LD + j] = w->s[r * LD + j] != -INFINITY;
            any_dead |= !w->live[r * LD + j];
        }
    return any_dead;
}

/* Keys to whole groups. */
static int32_t whole(int32_t keys)
{
    return (keys + BACKWARD_GROUP - 1) / BACKWARD_GROUP * BACKWARD_GROUP;
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
                          .n_panels = (whole(past - from) + k->panel - 1) / k->panel,
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

static void make_scores(const cpu_kernels *k, const cpu_strip_scores *c, int32_t n)
{
    k->scores(c->q, c->q_ld, c->k, c->D, c->rows, n, c->scale, c->s, c->ld);
}

/* dP. */
static void make_incoming(const cpu_kernels *k, const cpu_strip_scores *c, int32_t n)
{
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
    const int32_t n = whole(past - from);
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
                            .dp = is_weighing ? w->results[1] + from : w->dp + r0 * LD + from,
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

/* What follows weights but for the gradients of captures. */
static void end_weights(backward_worker *w, int32_t r0, int32_t rows, const cpu_stretch *keys)
{
    backward_drop_weights(w, r0, rows, keys->from, keys->past);
    if (w->job->backward->is_weighing)
        backward_add_weighing(w, r0, rows, keys->from, keys->past);
}

static void add_sums(backward_worker *w, int32_t r0, int32_t rows, uint32_t groups)
{
    if (groups && w->job->backward->n_reads && !w->job->backward->is_weighing)
        backward_add_sums(w, r0, rows, groups);
}

void backward_close_strip(backward_worker *w, backward_strip *o)
{
    end_weights(w, o->r0, o->rows, &(cpu_stretch){.from = o->from, .past = o->past});
    add_sums(w, o->r0, o->rows, backward_groups_of(o->from, o->past));
    o->is_open = 0;
}

void backward_make_weights(backward_worker *w, backward_strip *o)
{
    if (!o->is_open)
        return;
    w->job->backward->kernels->weights(&o->weights);
    backward_close_strip(w, o);
}

/* ---- scores of some keys beside weights of those before ---- */

static int make_beside(backward_worker *w, int32_t r0, const cpu_stretch *keys,
                       backward_strip *open)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const int32_t rows = backward_strip_rows(w, r0), from = keys->from, past = keys->past;
    const cpu_strip_scores scores = scores_of(w, r0, from, past);
    if (backward_is_streamed(w, r0, from, past)) {
        backward_make_weights(w, open);
        open_weights(w, r0, from, past, open);
        open->is_open = 0;
        backward_stream_strip(w, &scores, &open->weights, r0, from, past);
        return 0;
    }
    backward_end_stream(w);
    if (open->is_open) {
        kernels->overlap(&scores, &open->weights);
        backward_close_strip(w, open);
    } else {
        make_scores(kernels->block, &scores, scores.n_panels * kernels->block->panel);
        make_incoming(kernels->block, &scores, scores.n_panels * kernels->block->panel);
    }
    backward_change_scores(w, r0, rows, from, past);
    backward_drop_incoming(w, r0, rows, from, past);
    open_weights(w, r0, from, past, open);
    if (w->job->backward->is_weighing)
        backward_begin_weighing(w, rows, from, whole(past));
    return note_live(w, r0, rows, from, past);
}

/* ---- scores of all keys, then weights of those that are left ---- */

/* Of these groups, whose scores are made, those that have a live one. */
static uint32_t find_seen(const backward_worker *w, int32_t r0, uint32_t groups)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const int may_end = w->job->plan->problem.score != NULL;
    const uint32_t sure = may_end ? 0 : groups & w->every[r0 / kernels->block->strip];
    uint32_t seen = sure;
    cpu_stretch keys;
    for (uint32_t left = groups & ~sure; backward_take(w, &left, &keys);)
        seen |= kernels->seen(w->s + r0 * LD + keys.from, LD, backward_strip_rows(w, r0),
                              whole(keys.past - keys.from))
                << keys.from / BACKWARD_GROUP;
    return seen;
}

/* With them those that they share a panel of keys with: of tiles both ways, else those before,
 * where panels begin. */
static uint32_t whole_panels(const cpu_backward_kernels *kernels, uint32_t groups)
{
    const uint32_t even = UINT32_C(0x55555555);
    if (kernels->turn_sums)
        return backward_pairs_of(groups);
    return kernels->block->panel > BACKWARD_GROUP ? groups | (groups >> 1 & even) : groups;
}

/* Of these groups. */
static void make_weights(backward_worker *w, int32_t r0, uint32_t groups)
{
    const int32_t rows = backward_strip_rows(w, r0);
    cpu_stretch of[BACKWARD_KEYS / BACKWARD_GROUP];
    backward_strip o;
    int32_t n = 0;
    for (uint32_t left = groups; backward_take(w, &left, &of[n]); n++) {
        backward_drop_incoming(w, r0, rows, of[n].from, of[n].past);
        of[n].past = whole(of[n].past);
    }
    open_weights(w, r0, 0, w->n, &o);
    o.weights.of = of;
    o.weights.n_of = n;
    for (int32_t i = 0; i < n && w->job->backward->is_weighing; i++)
        backward_begin_weighing(w, rows, of[i].from, of[i].past);
    w->job->backward->kernels->weights(&o.weights);
    for (uint32_t left = groups; backward_take(w, &left, &of[0]);)
        end_weights(w, r0, rows, &of[0]);
}

static int make_apart(backward_worker *w, int32_t r0)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const int32_t rows = backward_strip_rows(w, r0);
    uint32_t *some = &w->some[r0 / kernels->block->strip];
    cpu_stretch keys;
    int any_dead = 0;
    for (uint32_t left = *some; backward_take(w, &left, &keys);) {
        const cpu_strip_scores scores = scores_of(w, r0, keys.from, keys.past);
        make_scores(kernels->block, &scores, whole(keys.past - keys.from));
        backward_change_scores(w, r0, rows, keys.from, keys.past);
        any_dead |= note_live(w, r0, rows, keys.from, keys.past);
    }
    *some = find_seen(w, r0, *some);
    if (!*some)
        return any_dead;
    for (uint32_t left = whole_panels(kernels, *some); backward_take(w, &left, &keys);) {
        const cpu_strip_scores scores = scores_of(w, r0, keys.from, keys.past);
        make_incoming(kernels->block, &scores, whole(keys.past - keys.from));
    }
    if (kernels->turn_sums) /* these products take whole panels of weights */
        *some = whole_panels(kernels, *some) & backward_groups_of(0, w->n);
    make_weights(w, r0, *some);
    return any_dead;
}

int backward_make_strip(backward_worker *w, int32_t r0, backward_strip *open)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const int32_t rows = backward_strip_rows(w, r0);
    const uint32_t *some = &w->some[r0 / kernels->block->strip];
    int any_dead = 0;
    if (backward_is_nonfinite(w))
        memset(w->live + r0 * LD, 0, (size_t)rows * LD);
    if (!kernels->overlap)
        any_dead = make_apart(w, r0);
    if (w->job->has_stored)
        backward_store_zeros(w, w->i0 + r0, rows, *some);
    if (!kernels->overlap) {
        add_sums(w, r0, rows, *some);
        return any_dead;
    }
    cpu_stretch keys;
    for (uint32_t left = *some; backward_take(w, &left, &keys);)
        any_dead |= make_beside(w, r0, &keys, open);
    return any_dead;
}
