/* Scores of a strip: the mod, then the mask, compiled, interpreted or by limits. */
#include "cpu/forward/item.h"

#include <assert.h>
#include <math.h>

/* Sets a mod to row r; computes there what depends on no key. */
static void open_on(const cpu_worker *w, item_mod *mod, int32_t r)
{
    cpu_open_row(mod->state, &mod->head, w->item.b, item_head_of(w, r),
                 (int32_t)item_index_of(w, r) + w->at.q_offset);
}

static void apply_mask(cpu_worker *w, const item_tile *t, int32_t r, float *s)
{
    const cpu_box row = {w->item.b, item_head_of(w, r), 0, item_index_of(w, r), 0,
                         t->j0,     t->j0 + t->n};
    if (w->mask.state)
        open_on(w, &w->mask, r);
    cpu_mask_row(&w->job->live, w->mask.state, &row, s);
}

static void cut(const cpu_worker *w, const item_tile *t, int32_t r, float *s)
{
    cpu_cut_row(w->limits.first[r] - t->j0, w->limits.past[r] - t->j0, t->n, s);
}

void item_open_compiled(cpu_worker *w, int32_t r)
{
    static_assert((int)CPU_MOST_ROWS <= (int)JIT_ROWS, "room for values of an item's rows");
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0), strip = w->kernels->strip;
    /* streams take whole strips: what lay in the rows past the last might raise flags */
    const int is_stream = w->kernels->flow && w->job->g.is_shared;
    const int32_t rows = is_stream ? (each + strip - 1) / strip * strip : each;
    if (w->code.head == item_head_of(w, r))
        return;
    w->code.head = item_head_of(w, r);
    w->code.j0 = -1;
    jit_head(w->code.state, (int32_t)w->item.b, (int32_t)w->code.head);
    jit_rows(w->code.state, (int32_t)w->item.box.i0 + w->at.q_offset, rows);
}

/* Compiled: scale, score and mask of n_rows rows in one pass that also finds their maxima. */
static void run_compiled(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows,
                         int is_masked, float *s)
{
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0);
    const int32_t col0 = t->block ? t->first : 0, n = t->block ? t->block : t->n;
    const int64_t j0 = t->j0 - col0;
    item_code *code = &w->code;
    for (int32_t r = r0, end; r < r0 + n_rows; r = end) {
        end = (r / each + 1) * each < r0 + n_rows ? (r / each + 1) * each : r0 + n_rows;
        item_open_compiled(w, r);
        if (code->j0 != j0 || code->n < n)
            jit_cols(code->state, (int32_t)j0 + w->at.kv_offset, n);
        code->j0 = j0;
        code->n = n;
        jit_tile(code->state, s + (int64_t)(r - r0) * CPU_BLOCK_KEYS, CPU_BLOCK_KEYS, r % each,
                 end - r, col0, t->n, is_masked, w->most + (r - r0));
    }
}

/* Whether the mask's value decides about the tile's keys: compiled code then applies it too. */
static int is_masked(const cpu_worker *w, const item_tile *t)
{
    return !t->is_full && w->job->live.by == CPU_BY_MASK;
}

static int is_compiled(const cpu_worker *w, const item_tile *t)
{
    return w->code.state && (w->score.state || is_masked(w, t));
}

float item_scale_of(const cpu_worker *w, const item_tile *t)
{
    return is_compiled(w, t) ? 1 : (float)w->job->plan->problem.scale;
}

int32_t item_columns_of(const cpu_worker *w, const item_tile *t)
{
    return is_compiled(w, t) ? (t->n + JIT_GROUP - 1) / JIT_GROUP * JIT_GROUP : t->n;
}

/* Compiled passes cover groups of JIT_GROUP keys, so their maxima hold when no group is cut. */
const float *item_change_scores(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows,
                                float *s)
{
    const int by_limits = !t->is_full && w->job->live.by == CPU_BY_LIMITS;
    const int compiled = is_compiled(w, t), masked = is_masked(w, t);
    if (compiled)
        run_compiled(w, t, r0, n_rows, masked, s);
    for (int32_t i = 0; i < n_rows; i++, s += CPU_BLOCK_KEYS) {
        if (w->score.state && !compiled) {
            open_on(w, &w->score, r0 + i);
            eval_score(w->score.state, (int32_t)t->j0 + w->at.kv_offset, t->n, s);
        }
        if (by_limits)
            cut(w, t, r0 + i, s);
        else if (!t->is_full && !(compiled && masked))
            apply_mask(w, t, r0 + i, s);
        for (int32_t j = t->n; j % 16 != 0; j++)
            s[j] = -INFINITY;
    }
    return compiled && (t->is_full || masked) && t->n % JIT_GROUP == 0 ? w->most : NULL;
}
