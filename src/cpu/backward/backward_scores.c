/* Scores of a strip: the mod and its slope, then the mask, compiled, interpreted or by limits,
 * as forward has them (forward/item_scores.c): what is dead there must be dead here. */
#include "cpu/backward/backward.h"

#include <math.h>
#include <string.h>

/* Places a state on row i of the tile's head; computes there what depends on no key. */
static void open_on(const backward_worker *w, eval_state *state, int64_t *head, int64_t i)
{
    cpu_open_row(state, head, w->b, w->h, (int32_t)i + w->at.q_offset);
}

static void apply_mask(backward_worker *w, int64_t i, int64_t j, int32_t n, float *s)
{
    const cpu_box row = {w->b, w->h, 0, i, 0, j, j + n};
    if (w->mask)
        open_on(w, w->mask, &w->mask_head, i);
    cpu_mask_row(&w->job->live, w->mask, &row, s);
}

static void cut(const backward_worker *w, int64_t i, int64_t j, int32_t n, float *s)
{
    const backward_job *job = w->job;
    const int64_t at = (w->b * job->run->sizes.H + w->h) * job->run->sizes.Q;
    cpu_cut_row(job->first[at + i] - j, job->past[at + i] - j, n, s);
}

/* Puts the compiled mod on the tile. */
static void open_compiled(backward_worker *w)
{
    if (w->jit_head != w->h) {
        w->jit_head = w->h;
        w->jit_i0 = w->jit_j0 = -1;
        jit_head(w->jit, (int32_t)w->b, (int32_t)w->h);
    }
    if (w->jit_i0 != w->i0)
        jit_rows(w->jit, (int32_t)w->i0 + w->at.q_offset, w->m);
    if (w->jit_j0 != w->j0)
        jit_cols(w->jit, (int32_t)w->j0 + w->at.kv_offset, w->n);
    w->jit_i0 = w->i0;
    w->jit_j0 = w->j0;
}

static int has_score(const backward_worker *w)
{
    return w->job->plan->problem.score != NULL;
}

/* Whether the mask's value decides about the tile's keys: compiled code then applies it too. */
static int is_masked(const backward_worker *w)
{
    return !w->is_full && w->job->live.by == CPU_BY_MASK;
}

int backward_sees_all(const backward_worker *w, int32_t r0, int32_t from, int32_t past)
{
    const uint32_t groups = backward_groups_of(from, past);
    return (w->every[r0 / w->job->backward->kernels->block->strip] & groups) == groups;
}

int backward_is_compiled(const backward_worker *w)
{
    return w->jit && (has_score(w) || is_masked(w));
}

/* A pass for the mask alone leaves scores as they are. */
float backward_scale_of(const backward_worker *w)
{
    return backward_is_compiled(w) && has_score(w) ? 1 : (float)w->job->plan->problem.scale;
}

/* Where nothing but the mask changes scores, weights may scale them. */
float backward_late_scale(const backward_worker *w)
{
    const float scale = (float)w->job->plan->problem.scale;
    const int is_late = w->job->backward->kernels->overlap && scale > 0;
    return is_late && !has_score(w) ? scale : 1;
}

static void run_compiled(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                         int32_t past, int masked)
{
    w->out[0] = w->s + r0 * BACKWARD_KEYS + from;
    for (uint32_t n = 1; n < w->job->backward->n_results; n++)
        w->out[n] = w->results[n] + from;
    const int32_t keys = past - from;
    open_compiled(w);
    if (w->job->backward->score)
        jit_tiles(w->jit, w->out, BACKWARD_KEYS, r0, rows, from, keys, masked);
    else
        jit_tile(w->jit, w->out[0], BACKWARD_KEYS, r0, rows, from, keys, masked, w->most);
}

/* Row r, of a strip that begins at r0. */
static void interpret(backward_worker *w, int32_t r0, int32_t r, int32_t from, int32_t n)
{
    float **out = w->out;
    out[0] = w->s + r * BACKWARD_KEYS + from;
    for (uint32_t k = 1; k < w->job->backward->n_results; k++)
        out[k] = w->results[k] + (r - r0) * BACKWARD_KEYS + from;
    const int32_t kv0 = (int32_t)w->j0 + from + w->at.kv_offset;
    open_on(w, w->score, &w->score_head, w->i0 + r);
    if (w->job->backward->score)
        eval_results(w->score, kv0, n, out[0], out);
    else
        eval_score(w->score, kv0, n, out[0]);
}

/* Rows that weigh nothing (backward_rows.c) see no key: 0 times what dO holds may be NaN. */
static int is_lost(const backward_worker *w, int64_t i)
{
    const saccade_sizes *s = &w->job->run->sizes;
    return w->job->lse[(w->b * s->H + w->h) * s->Q + i] == INFINITY;
}

static void lose(int32_t n, float *s)
{
    for (int32_t j = 0; j < n; j++)
        s[j] = -INFINITY;
}

/* Score, then mask, then the end of the keys up to a multiple of 16. */
void backward_change_scores(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                            int32_t past)
{
    const int by_limits = !w->is_full && w->job->live.by == CPU_BY_LIMITS;
    const int is_whole = backward_sees_all(w, r0, from, past);
    const int compiled = backward_is_compiled(w), masked = is_masked(w) && !is_whole;
    const int32_t n = past - from;
    if (compiled)
        run_compiled(w, r0, rows, from, past, masked);
    for (int32_t r = r0; r < r0 + rows; r++) {
        float *s = w->s + r * BACKWARD_KEYS + from;
        if (has_score(w) && !compiled)
            interpret(w, r0, r, from, n);
        if (by_limits)
            cut(w, w->i0 + r, w->j0 + from, n, s);
        else if (!is_whole && !(compiled && masked))
            apply_mask(w, w->i0 + r, w->j0 + from, n, s);
        if (is_lost(w, w->i0 + r))
            lose(n, s);
        for (int32_t j = n; j % 16 != 0; j++)
            s[j] = -INFINITY;
    }
}

/* ---- units ---- */

/* Limits are cut where they cross a unit, and compiled code asks the mask that it has. Masks
 * that only rows can be asked for, such as imported ones, are left to strips. */
int backward_changes_units(const backward_worker *w, int32_t r0, int32_t from, int32_t past)
{
    const int is_asked = !w->is_full && w->job->live.by != CPU_BY_LIMITS
                         && !backward_sees_all(w, r0, from, past);
    if (backward_is_compiled(w))
        return !is_asked || is_masked(w);
    return !has_score(w) && !is_asked;
}

void backward_change_unit(backward_worker *w, int32_t r0, int32_t key, int32_t n, float *unit)
{
    enum { LD = CPU_UNIT_ROWS };
    float *tiles[2] = {unit, unit + 2 * CPU_UNIT};
    const int masked = is_masked(w) && !backward_sees_all(w, r0, key, key + n);
    if (!has_score(w) && !masked)
        return;
    open_compiled(w);
    if (w->job->backward->score)
        jit_tiles(w->jit, tiles, LD, r0, LD, key, n, masked);
    else
        jit_tile(w->jit, unit, LD, r0, LD, key, n, masked, w->most);
}
