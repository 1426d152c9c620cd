/* Scores of a strip: the mod with its slopes, then the mask, compiled, interpreted or by
 * limits, as forward has them (forward/item_scores.c): what is dead there must be dead here. */
#include "cpu/tangent/tangent.h"

#include <math.h>

enum { LD = CPU_BLOCK_KEYS };

/* Places a state on row i of the item's head; computes there what depends on no key. */
static void open_on(const tangent_worker *w, eval_state *state, int64_t *head, int64_t i)
{
    cpu_open_row(state, head, w->b, w->h, (int32_t)i + w->at.q_offset);
}

static void apply_mask(tangent_worker *w, int64_t i, int64_t j, int32_t n, float *s)
{
    const cpu_box row = {w->b, w->h, 0, i, 0, j, j + n};
    if (w->mask)
        open_on(w, w->mask, &w->mask_head, i);
    cpu_mask_row(&w->job->live, w->mask, &row, s);
}

static void cut(const tangent_worker *w, int32_t r, int64_t j, int32_t n, float *s)
{
    cpu_cut_row(w->limits.first[r] - j, w->limits.past[r] - j, n, s);
}

/* ---- compiled ---- */

static int has_score(const tangent_worker *w)
{
    return w->job->plan->problem.score != NULL;
}

/* Whether the mask's value decides about the tile's keys: compiled code then applies it too. */
static int is_masked(const tangent_worker *w, const tangent_tile *t)
{
    return !t->is_full && w->job->live.by == CPU_BY_MASK;
}

static int is_compiled(const tangent_worker *w, const tangent_tile *t)
{
    return w->jit && (has_score(w) || is_masked(w, t));
}

float tangent_scale_of(const tangent_worker *w, const tangent_tile *t)
{
    return is_compiled(w, t) ? 1 : (float)w->job->plan->problem.scale;
}

/* Puts the compiled mod on the item and the block of keys. */
static void open_compiled(tangent_worker *w, const tangent_tile *t)
{
    if (w->jit_head != w->h) {
        w->jit_head = w->h;
        w->jit_i0 = w->jit_j0 = -1;
        jit_head(w->jit, (int32_t)w->b, (int32_t)w->h);
    }
    if (w->jit_i0 != w->i0)
        jit_rows(w->jit, (int32_t)w->i0 + w->at.q_offset, w->m);
    if (w->jit_j0 != t->j0)
        jit_cols(w->jit, (int32_t)t->j0 + w->at.kv_offset, t->n);
    w->jit_i0 = w->i0;
    w->jit_j0 = t->j0;
}

/* The tiles of all results: the value's, slopes and rates, those that the graph has. */
static uint32_t results_of(const tangent_worker *w, float *tiles[3])
{
    const cpu_tangent_plan *p = w->job->tangent;
    uint32_t n = 0;
    tiles[n++] = w->s;
    if (p->has_slopes)
        tiles[n++] = w->slope;
    if (p->has_rates)
        tiles[n++] = w->added;
    return n;
}

static void run_compiled(tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t n_rows)
{
    const int32_t n = t->past - t->from;
    const int masked = is_masked(w, t);
    float *tiles[3];
    results_of(w, tiles);
    open_compiled(w, t);
    if (w->job->tangent->score)
        jit_tiles(w->jit, tiles, LD, r0, n_rows, t->from, n, masked);
    else
        jit_tile(w->jit, w->s, LD, r0, n_rows, t->from, n, masked, w->most);
}

static void interpret(tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t i)
{
    const int32_t kv0 = (int32_t)t->j0 + t->from + w->at.kv_offset, n = t->past - t->from;
    float *out[3];
    const uint32_t results = results_of(w, out);
    for (uint32_t k = 0; k < results; k++)
        out[k] += i * LD;
    open_on(w, w->score, &w->score_head, w->i0 + r0 + i);
    if (w->job->tangent->score)
        eval_results(w->score, kv0, n, out[0], out);
    else
        eval_score(w->score, kv0, n, out[0]);
}

/* Score, then mask, then the end of the keys up to a multiple of 16. */
void tangent_change_scores(tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t n_rows)
{
    const int by_limits = !t->is_full && w->job->live.by == CPU_BY_LIMITS;
    const int compiled = is_compiled(w, t), masked = is_masked(w, t);
    const int32_t n = t->past - t->from;
    if (compiled)
        run_compiled(w, t, r0, n_rows);
    for (int32_t i = 0; i < n_rows; i++) {
        float *s = w->s + i * LD;
        if (has_score(w) && !compiled)
            interpret(w, t, r0, i);
        if (by_limits)
            cut(w, r0 + i, t->j0 + t->from, n, s);
        else if (!t->is_full && !(compiled && masked))
            apply_mask(w, w->i0 + r0 + i, t->j0 + t->from, n, s);
        for (int32_t j = n; j % 16 != 0; j++)
            s[j] = -INFINITY;
    }
}
