/* A block of rows against a block of keys: five products, strip by strip as far as scores and
 * weights go, so that S and dP of a strip stay in the first-level cache.
 *
 * Under interval masks a strip's scores span few of the block's keys; products run over those
 * spans alone, in steps of 32 keys and whole strips of rows. */
#include "cpu/backward/backward.h"

#include "base/convert.h"
#include "base/integers.h"

#include <assert.h>
#include <string.h>

enum { LD = BACKWARD_KEYS, GROUP = JIT_GROUP };

/* ---- spans ---- */

static int32_t clamp(int64_t key, int32_t n)
{
    return key < 0 ? 0 : key < n ? (int32_t)key : n;
}

/* Keys of the block that any row of strip r0 sees. */
static void span_strip(const backward_worker *w, int32_t r0, int32_t *from, int32_t *past)
{
    const saccade_sizes *s = &w->job->run->sizes;
    const int64_t at = (w->b * s->H + w->h) * s->Q + w->i0;
    int64_t first = INT64_MAX, last = 0;
    for (int32_t r = r0; r < r0 + backward_strip_rows(w, r0); r++) {
        const int32_t a = w->job->first[at + r], z = w->job->past[at + r];
        if (a < z) {
            first = a < first ? a : first;
            last = z > last ? z : last;
        }
    }
    *from = clamp(first - w->j0, w->n) / GROUP * GROUP;
    *past = clamp(last - w->j0, w->n);
}

/* Keys that rows [r0, r0 + rows) of the block may see, by its cells. Whether they see all. */
static int span_cells(const backward_worker *w, int32_t r0, int32_t rows, int32_t *from,
                      int32_t *past)
{
    const int32_t n_cells = (w->n + BACKWARD_CELL - 1) / BACKWARD_CELL;
    int32_t first = n_cells, last = 0, full = 0;
    const int32_t c0 = r0 / BACKWARD_CELL, c1 = (r0 + rows - 1) / BACKWARD_CELL;
    for (int32_t c = 0; c < n_cells; c++) {
        int any = 0, all = 1;
        for (int32_t r = c0; r <= c1; r++) {
            any |= w->cells[r][c] != CPU_EMPTY;
            all &= w->cells[r][c] == CPU_FULL;
        }
        first = any && c < first ? c : first;
        last = any ? c + 1 : last;
        full += all;
    }
    *from = first < last ? first * BACKWARD_CELL : 0;
    *past = last * BACKWARD_CELL < w->n ? last * BACKWARD_CELL : w->n;
    return full == last - first;
}

/* Whether spans of strips may differ from all keys of the block. */
static int is_cut(const backward_worker *w)
{
    return !w->is_full && (w->job->live.by == CPU_BY_LIMITS || w->job->runs);
}

static void find_spans(backward_worker *w, int32_t strip)
{
    const int by_limits = !w->is_full && w->job->live.by == CPU_BY_LIMITS;
    const int by_cells = !w->is_full && w->job->runs;
    for (int32_t r = 0; r < w->m; r += strip) {
        const int32_t n = r / strip;
        w->from[n] = 0;
        w->past[n] = w->n;
        w->sees_all[n] = (uint8_t)w->is_full;
        if (by_limits)
            span_strip(w, r, &w->from[n], &w->past[n]);
        else if (by_cells)
            w->sees_all[n] =
                (uint8_t)span_cells(w, r, backward_strip_rows(w, r), &w->from[n], &w->past[n]);
    }
}

/* ---- operands ---- */

/* Where row r of a block begins in what pack_values or pack_columns made: steps of 32 rows by
 * all columns, or panels by all rows. */
static const char *operand_at(const cpu_kernels *k, const void *operand, int32_t r, int32_t ld)
{
    return (const char *)operand
           + (size_t)(r * (k->is_by_keys ? ld : k->panel)) * (size_t)k->element;
}

/* Rows or keys of packed operands: of a short block, as many as products read. */
static int32_t padded(int32_t n, int32_t most)
{
    const int32_t up = (n + 63) / 64 * 64;
    return up < most ? up : most;
}

static int pack_steps(const backward_worker *w, const cpu_rows *from, void *to)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const int32_t rows = padded(w->m, w->job->g.rows);
    if (kernels->pack_columns)
        return kernels->pack_columns(from, w->m, rows, to);
    return kernels->block->pack_values(from, w->m, rows, to);
}

static void pack_keys(backward_worker *w)
{
    const backward_job *job = w->job;
    const cpu_backward_plan *b = job->backward;
    if (w->is_packed)
        return;
    w->is_packed = 1;
    const cpu_rows k = kv_block(&w->k, w->j0, w->n, w->k_room);
    const cpu_rows v = kv_block(&w->v, w->j0, w->n, w->v_room);
    const int32_t keys = padded(w->n, w->job->g.keys);
    b->kernels->block->pack_keys(&k, w->n, keys, w->k_turned);
    if (backward_needs_dp(b))
        b->kernels->block->pack_keys(&v, w->n, keys, w->v_turned);
    if (b->has_dq)
        w->k_nonfinite = b->kernels->block->pack_values(&k, w->n, keys, w->k_steps);
}

/* Rows as scores read them: packed, unless they lie as packing would leave them and not so far
 * apart that a strip's rows share few sets of the nearest cache. */
static backward_operand take_rows(const backward_worker *w, const cpu_rows *from, int32_t ld,
                                  void *to)
{
    enum { FARTHEST = 1024 };
    const cpu_backward_kernels *b = w->job->backward->kernels;
    const int32_t rows = (int32_t)round_up(w->m, b->depth), each = b->block->element;
    const saccade_dtype packed = each == 4 ? SACCADE_F32 : SACCADE_BF16;
    if (from->dtype == packed && from->dim == ld && rows == w->m && from->stride >= 0
        && from->stride <= FARTHEST && from->stride % each == 0
        && (uintptr_t)from->base % (uintptr_t)each == 0)
        return (backward_operand){from->base, (int32_t)from->stride / each};
    b->block->pack_rows(from, w->m, rows, ld, to);
    return (backward_operand){to, ld};
}

static void pack_rows(backward_worker *w)
{
    const backward_job *job = w->job;
    const cpu_backward_plan *b = job->backward;
    const int64_t i0 = w->i0 + w->shift;
    const cpu_rows q = cpu_rows_from(cpu_rows_of(job->run->q, w->b, w->h), i0);
    const cpu_rows o = cpu_rows_from(cpu_rows_of(job->gradients->d_out, w->b, w->h), i0);
    w->q_at = take_rows(w, &q, job->g.q_ld, w->q_rows);
    if (backward_needs_dp(b))
        w->o_at = take_rows(w, &o, job->g.o_ld, w->o_rows);
    if (b->has_dk)
        w->q_nonfinite = pack_steps(w, &q, w->q_steps);
    if (b->has_dv)
        w->o_nonfinite = pack_steps(w, &o, w->o_steps);
}

/* ---- products ---- */

/* The weight of row r and key j as a product takes it. */
static float weight_at(const backward_worker *w, const void *weights, int32_t r, int32_t j)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const uint16_t *pairs = weights;
    if (!kernels->is_apart)
        return ((const float *)weights)[r * LD + j];
    assert(kernels->step == 2); /* others are for finite operands */
    return bf16_to_f32(pairs[(r / 2 * LD + j) * 2 + r % 2]);
}

static int meets(const backward_worker *w, int32_t strip, int32_t j0, int32_t j1)
{
    return w->from[strip] < j1 && w->past[strip] > j0;
}

/* c[j] += sum over rows [r0, r1). */
static void add_rows_turned(const backward_worker *w, const void *weights, const void *operand,
                            int32_t ld, int32_t r0, int32_t r1, int32_t j0, int32_t j1,
                            float *c)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const cpu_kernels *k = kernels->block;
    const int by_dims = kernels->turn_sums != NULL;
    kernels->turned((const float *)weights + r0 / kernels->step * LD + j0, LD,
                    operand_at(k, operand, r0, ld), padded(w->m, w->job->g.rows), r1 - r0,
                    j1 - j0, ld / k->panel, c + (by_dims ? j0 : (int64_t)j0 * ld),
                    by_dims ? LD : ld);
}

/* c[j] += sum over rows of the block: those whose spans meet keys [j0, j1). */
static void add_turned(const backward_worker *w, const void *weights, const void *operand,
                       int32_t ld, int32_t j0, int32_t j1, float *c)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    const int32_t strips = (w->m + strip - 1) / strip;
    for (int32_t first = 0, past; first < strips; first = past + 1) {
        for (past = first; past < strips && meets(w, past, j0, j1); past++)
            ;
        if (first < past)
            add_rows_turned(w, weights, operand, ld, first * strip,
                            past * strip < w->m ? past * strip : w->m, j0, j1, c);
    }
}

/* Live positions alone, of rows and keys as they lie: c[j] += weight rows[i]. */
static void careful_turned(const backward_worker *w, const void *weights, const cpu_rows *rows,
                           int32_t ld, float *c)
{
    const int by_dims = w->job->backward->kernels->turn_sums != NULL;
    const int64_t by_j = by_dims ? 1 : ld, by_d = by_dims ? LD : 1;
    for (int32_t r = 0; r < w->m; r++) {
        const int64_t i = w->i0 + w->shift + r;
        convert_to_f32(rows->dtype, rows->base + i * rows->stride, w->row, rows->dim);
        for (int32_t j = 0; j < w->n; j++) {
            const float x = weight_at(w, weights, r, j);
            for (int32_t d = 0; w->live[r * LD + j] && d < rows->dim; d++)
                c[j * by_j + d * by_d] += x * w->row[d];
        }
    }
}

static void multiply_turned(const backward_worker *w, const void *weights, const void *operand,
                            int32_t ld, float *c)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    if (!is_cut(w)) {
        add_turned(w, weights, operand, ld, 0, w->n, c);
        return;
    }
    for (int32_t j = 0; j < w->n; j += strip)
        add_turned(w, weights, operand, ld, j, j + strip < w->n ? j + strip : w->n, c);
}

/* Sums of dQ of the block's rows from r0 on become 0. */
static void clear_dq(const backward_worker *w, int32_t r0, int32_t rows)
{
    const int64_t ld = w->job->g.dq_ld;
    memset(w->dq + r0 * ld, 0, (size_t)(rows * ld) * sizeof *w->dq);
}

/* Where no tile has added to the block's dQ: the first products begin it where kernels can, and
 * strips without keys have zeros. */
static void begin_dq(const backward_worker *w, int is_careful)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const int32_t strip = kernels->block->strip;
    const int by_strips = kernels->add_values && !is_careful;
    if (!w->dq_is_new)
        return;
    if (!by_strips)
        clear_dq(w, 0, (int32_t)round_up(w->m, kernels->depth));
    for (int32_t n = 0; by_strips && n * strip < w->m; n++)
        if (w->from[n] >= w->past[n])
            clear_dq(w, n * strip, strip);
}

/* Rows from r0 on, the first of a strip. */
static void add_dq(const backward_worker *w, int32_t r0)
{
    static const float ones[BACKWARD_ROWS] = {[0 ... BACKWARD_ROWS - 1] = 1};
    const cpu_kernels *k = w->job->backward->kernels->block;
    const int32_t ld = w->job->g.dq_ld;
    for (int32_t r = r0; r < w->m; r += k->strip) {
        const int32_t from = w->from[r / k->strip], n = w->past[r / k->strip] - from;
        if (n > 0 && w->job->backward->kernels->add_values)
            w->job->backward->kernels->add_values(
                &(cpu_strip_values){.p = w->dp + r * LD + from,
                                    .v = operand_at(k, w->k_steps, from, ld),
                                    .p_ld = LD,
                                    .n = (n + 15) / 16 * 16,
                                    .rows = k->strip,
                                    .n_panels = ld / k->panel,
                                    .o_ld = ld,
                                    .is_first = w->dq_is_new,
                                    .o = w->dq + (int64_t)r * ld});
        else if (n > 0)
            k->values(w->dp + r * LD + from, LD, operand_at(k, w->k_steps, from, ld),
                      (n + 15) / 16 * 16, padded(w->n, w->job->g.keys),
                      backward_strip_rows(w, r), ld / k->panel, ones, w->dq + (int64_t)r * ld,
                      ld);
    }
}

static void careful_dq(const backward_worker *w)
{
    const cpu_rows k = kv_block(&w->k, w->j0, w->n, w->k_room);
    const int32_t ld = w->job->g.dq_ld;
    for (int32_t j = 0; j < w->n; j++) {
        convert_to_f32(k.dtype, k.base + j * k.stride, w->row, k.dim);
        for (int32_t r = 0; r < w->m; r++) {
            const float x = weight_at(w, w->ds, r, j);
            for (int32_t d = 0; w->live[r * LD + j] && d < k.dim; d++)
                w->dq[(int64_t)r * ld + d] += x * w->row[d];
        }
    }
}

/* Where an operand holds an infinity or NaN, 0 times it must not reach what is dead. */
static void add_products(backward_worker *w, int any_dead, int32_t dq_rows)
{
    const backward_job *job = w->job;
    const cpu_backward_plan *b = job->backward;
    const cpu_rows q = cpu_rows_of(job->run->q, w->b, w->h);
    const cpu_rows o = cpu_rows_of(job->gradients->d_out, w->b, w->h);
    if (b->has_dv && any_dead && w->o_nonfinite)
        careful_turned(w, w->p, &o, job->g.dv_ld, w->dv);
    else if (b->has_dv)
        multiply_turned(w, w->p, w->o_steps, job->g.dv_ld, w->dv);
    if (b->has_dk && any_dead && w->q_nonfinite)
        careful_turned(w, w->ds, &q, job->g.dq_ld, w->dk);
    else if (b->has_dk)
        multiply_turned(w, w->ds, w->q_steps, job->g.dq_ld, w->dk);
    if (!b->has_dq)
        return;
    const int is_careful = any_dead && w->k_nonfinite;
    begin_dq(w, is_careful);
    if (is_careful)
        careful_dq(w);
    else
        add_dq(w, dq_rows);
}

/* Makes the last strip's weights. If no strip is cut, multiplies dQ of the earlier strips at
 * the same time. Returns how many rows of dQ are done. */
static int32_t make_last(backward_worker *w, backward_strip *open, int any_dead, int32_t past)
{
    const cpu_backward_plan *b = w->job->backward;
    const cpu_kernels *k = b->kernels->block;
    const int32_t rows = open->r0, ld = w->job->g.dq_ld;
    if (!open->is_open || !b->kernels->overlap_values || !b->has_dq || !rows || is_cut(w)
        || (any_dead && w->k_nonfinite)) {
        backward_make_weights(w, open, past);
        return 0;
    }
    const cpu_strip_values values = {.p = w->dp,
                                     .v = w->k_steps,
                                     .p_ld = LD,
                                     .n = w->n,
                                     .rows = rows,
                                     .n_panels = ld / k->panel,
                                     .o_ld = ld,
                                     .is_first = w->dq_is_new,
                                     .o = w->dq};
    b->kernels->overlap_values(&values, &open->weights);
    backward_close_strip(w, open, past);
    return rows;
}

/* Keys [*from, *past) that products may touch: the strips' spans and, since whole strips of
 * keys are multiplied, one strip more on either side. */
static void span_block(const backward_worker *w, int32_t strip, int32_t *from, int32_t *past)
{
    *from = w->n;
    *past = 0;
    for (int32_t n = 0; n * strip < w->m; n++)
        if (w->from[n] < w->past[n]) {
            *from = w->from[n] < *from ? w->from[n] : *from;
            *past = w->past[n] > *past ? w->past[n] : *past;
        }
    *from = *from > strip ? *from - strip : 0;
    *past = *past + strip < w->n ? *past + strip : w->n;
}

void backward_run_tile(backward_worker *w)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    int32_t from, past;
    int any_dead = !w->is_full;
    backward_strip open = {0};
    pack_keys(w);
    pack_rows(w);
    find_spans(w, strip);
    span_block(w, strip, &from, &past);
    backward_begin_lines(w);
    for (int32_t r = 0, n = 0; r < w->m; r += strip, n++) {
        const int32_t rows = backward_strip_rows(w, r);
        if (w->from[n] >= w->past[n]) {
            if (backward_is_nonfinite(w))
                memset(w->live + r * LD, 0, (size_t)rows * LD);
            backward_clear_weights(w, r, rows, from, past);
            if (w->job->has_stored)
                backward_store_zeros(w, w->i0 + r, rows);
            continue;
        }
        backward_clear_weights(w, r, rows, from, w->from[n]);
        any_dead |= backward_make_strip(w, r, w->from[n], w->past[n], &open, past);
    }
    backward_end_stream(w);
    const int32_t dq_rows = make_last(w, &open, any_dead, past);
    backward_end_lines(w);
    add_products(w, any_dead, dq_rows);
}
