/* Scores of a strip: the mod, then the mask, compiled, interpreted or by limits. */
#include "cpu/item.h"

#include <assert.h>
#include <math.h>

/* Places a state on row r; computes there what depends on no key. */
static void stand_on(const cpu_worker *w, eval_state *state, int64_t *head, int32_t r)
{
    if (*head != item_head_of(w, r)) {
        *head = item_head_of(w, r);
        eval_head(state, (int32_t)w->item.b, (int32_t)*head);
    }
    eval_row(state, (int32_t)item_index_of(w, r) + w->at.q_offset);
}

static void apply_mask(cpu_worker *w, const item_tile *t, int32_t r, float *s)
{
    uint8_t live[CPU_BLOCK_KEYS];
    const cpu_box row = {w->item.b, item_head_of(w, r), 0, item_index_of(w, r), 0,
                         t->j0,     t->j0 + t->n};
    if (w->mask)
        stand_on(w, w->mask, &w->mask_head, r);
    cpu_row_live(&w->job->live, w->mask, &row, live);
    for (int32_t j = 0; j < t->n; j++)
        s[j] = live[j] ? s[j] : -INFINITY;
}

static void cut(const cpu_worker *w, const item_tile *t, int32_t r, float *s)
{
    const int64_t first = w->limits.first[r] - t->j0, past = w->limits.past[r] - t->j0;
    for (int32_t j = 0; j < t->n && j < first; j++)
        s[j] = -INFINITY;
    for (int32_t j = past > 0 ? (int32_t)(past < t->n ? past : t->n) : 0; j < t->n; j++)
        s[j] = -INFINITY;
}

/* Puts the compiled mod on row r's head. */
void item_stand_compiled(cpu_worker *w, int32_t r)
{
    static_assert((int)CPU_MOST_ROWS <= (int)JIT_ROWS, "room for values of an item's rows");
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0);
    if (w->jit_head == item_head_of(w, r))
        return;
    w->jit_head = item_head_of(w, r);
    w->jit_j0 = -1;
    jit_head(w->jit, (int32_t)w->item.b, (int32_t)w->jit_head);
    jit_rows(w->jit, (int32_t)w->item.box.i0 + w->at.q_offset, each);
}

/* Compiled: scale, score and mask of n_rows rows in one pass that also finds their maxima. */
static void run_compiled(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows,
                         int is_masked, float *most)
{
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0);
    for (int32_t r = r0, end; r < r0 + n_rows; r = end) {
        end = (r / each + 1) * each < r0 + n_rows ? (r / each + 1) * each : r0 + n_rows;
        item_stand_compiled(w, r);
        if (w->jit_j0 != t->j0 || w->jit_n < t->n)
            jit_cols(w->jit, (int32_t)t->j0 + w->at.kv_offset, t->n);
        w->jit_j0 = t->j0;
        w->jit_n = t->n;
        jit_tile(w->jit, w->s + (int64_t)(r - r0) * CPU_BLOCK_KEYS, CPU_BLOCK_KEYS, r % each,
                 end - r, 0, t->n, is_masked, most + (r - r0));
    }
}

static void interpret_score(cpu_worker *w, const item_tile *t, int32_t r, float *s)
{
    stand_on(w, w->score, &w->score_head, r);
    eval_score(w->score, (int32_t)t->j0 + w->at.kv_offset, t->n, s);
}

/* Which of them runs on a tile: the compiled pass, and with the mask. */
static int is_compiled(const cpu_worker *w, const item_tile *t)
{
    return w->jit
           && (w->score || (!t->is_full && !item_has_limits(w) && !w->job->live.is_imported));
}

/* The scores kernel scales unless the compiled pass does. */
float item_scale_of(const cpu_worker *w, const item_tile *t)
{
    return is_compiled(w, t) ? 1 : w->job->plan->problem.scale;
}

/* Score, then mask, then the end of the keys. The rows' maxima where they are known, or NULL.
 * Compiled passes cover groups of JIT_GROUP keys, so theirs hold when no group is cut. */
const float *item_change_scores(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows)
{
    const int by_limits = !t->is_full && item_has_limits(w), compiled = is_compiled(w, t);
    const int is_masked = !t->is_full && !by_limits && !w->job->live.is_imported;
    if (compiled)
        run_compiled(w, t, r0, n_rows, is_masked, w->most);
    for (int32_t i = 0; i < n_rows; i++) {
        float *s = w->s + (int64_t)i * CPU_BLOCK_KEYS;
        if (w->score && !compiled)
            interpret_score(w, t, r0 + i, s);
        if (by_limits)
            cut(w, t, r0 + i, s);
        else if (!t->is_full && !(compiled && is_masked))
            apply_mask(w, t, r0 + i, s);
        for (int32_t j = t->n; j % 16 != 0; j++)
            s[j] = -INFINITY;
    }
    return compiled && (t->is_full || is_masked) && t->n % JIT_GROUP == 0 ? w->most : NULL;
}
