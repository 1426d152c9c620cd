/* A block of rows against a block of keys: five products, strip by strip as far as scores and
 * weights go, so that S and dP of a strip stay in the first-level cache.
 *
 * A strip's scores are made for the groups of keys that its rows' limits or its cells leave,
 * and all that follows for those of which scores leave some. Sums pass over the others, as
 * exact zeros of theirs would leave them. */
#include "cpu/backward/backward.h"

#include "base/convert.h"
#include "base/integers.h"

#include <assert.h>
#include <string.h>

enum { LD = BACKWARD_KEYS };
static_assert(JIT_GROUP == 2 * BACKWARD_GROUP, "compiled code begins at a pair of groups");

/* ---- groups of keys ---- */

static int32_t clamp(int64_t key, int32_t n)
{
    return key < 0 ? 0 : key < n ? (int32_t)key : n;
}

/* Those of whole panels from the first to the last key that any row of strip r0 sees. */
static uint32_t groups_of_limits(const backward_worker *w, int32_t r0)
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
    const int32_t from = clamp(first - w->j0, w->n), past = clamp(last - w->j0, w->n);
    const int32_t up = (past + JIT_GROUP - 1) / JIT_GROUP * JIT_GROUP;
    return from < past ? backward_groups_of(from / JIT_GROUP * JIT_GROUP, up < w->n ? up : w->n)
                       : 0;
}

/* Those that rows [r0, r0 + rows) of the block may see, by its cells; *every: that they all see
 * whole. */
static uint32_t groups_of_cells(const backward_worker *w, int32_t r0, int32_t rows,
                                uint32_t *every)
{
    const int32_t c0 = r0 / BACKWARD_CELL, c1 = (r0 + rows - 1) / BACKWARD_CELL;
    uint32_t some = 0;
    for (int32_t j = 0; j < w->n; j += BACKWARD_CELL) {
        const int32_t past = j + BACKWARD_CELL < w->n ? j + BACKWARD_CELL : w->n;
        int any = 0, all = 1;
        for (int32_t r = c0; r <= c1; r++) {
            any |= w->cells[r][j / BACKWARD_CELL] != CPU_EMPTY;
            all &= w->cells[r][j / BACKWARD_CELL] == CPU_FULL;
        }
        some |= any ? backward_groups_of(j, past) : 0;
        *every |= all ? backward_groups_of(j, past) : 0;
    }
    return some;
}

/* What groups_of_cells tells, by runs that were imported. */
static uint32_t groups_of_runs(const backward_worker *w, int32_t r0, int32_t rows,
                               uint32_t *every)
{
    const int64_t i0 = w->i0 + r0;
    const cpu_box box = {w->b, w->h, w->h + 1, i0, i0 + rows, w->j0, w->j0 + w->n};
    const cpu_groups groups = cpu_groups_of(&w->job->live, BACKWARD_GROUP, &box);
    *every = groups.every & backward_groups_of(0, w->n);
    return backward_pairs_of(groups.some) & backward_groups_of(0, w->n);
}

static void find_groups(backward_worker *w, int32_t strip)
{
    const int by_limits = !w->is_full && w->job->live.by == CPU_BY_LIMITS;
    const int by_cells = !w->is_full && w->job->runs;
    const int by_runs = !w->is_full && w->job->live.is_imported;
    const uint32_t all = backward_groups_of(0, w->n);
    for (int32_t r = 0; r < w->m; r += strip) {
        const int32_t n = r / strip;
        w->every[n] = w->is_full ? all : 0;
        w->some[n] = by_limits  ? groups_of_limits(w, r)
                     : by_cells ? groups_of_cells(w, r, backward_strip_rows(w, r), &w->every[n])
                     : by_runs  ? groups_of_runs(w, r, backward_strip_rows(w, r), &w->every[n])
                                : all;
    }
}

/* Whether each strip has all groups. */
static int is_whole(const backward_worker *w)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    for (int32_t n = 0; n * strip < w->m; n++)
        if (w->some[n] != backward_groups_of(0, w->n))
            return 0;
    return 1;
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

/* The strips that have a group of keys, a bit each. */
static uint32_t strips_of(const backward_worker *w, int32_t group)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    uint32_t strips = 0;
    for (int32_t n = 0; n * strip < w->m; n++)
        strips |= (w->some[n] >> group & 1) << n;
    return strips;
}

/* c[j] += sum over rows of these strips, for keys [j0, j1). */
static void add_turned(const backward_worker *w, const void *weights, const void *operand,
                       int32_t ld, uint32_t strips, int32_t j0, int32_t j1, float *c)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const cpu_kernels *k = kernels->block;
    const int by_dims = kernels->turn_sums != NULL;
    const int32_t rows = padded(w->m, w->job->g.rows), c_ld = by_dims ? LD : ld;
    const float *a = (const float *)weights + j0;
    cpu_stretch of[BACKWARD_STRIPS];
    int32_t n = 0;
    c += by_dims ? j0 : (int64_t)j0 * ld;
    while (strips) {
        const int32_t first = __builtin_ctz(strips);
        const int32_t past = first + __builtin_ctz(~((uint64_t)strips >> first));
        const int32_t r1 = past * k->strip;
        of[n++] = (cpu_stretch){.from = first * k->strip, .past = r1 < w->m ? r1 : w->m};
        strips &= (uint32_t)(UINT64_MAX << past);
    }
    if (n && kernels->turned_of) {
        kernels->turned_of(a, LD, operand, rows, of, n, j1 - j0, ld / k->panel, c, c_ld);
        return;
    }
    for (int32_t i = 0; i < n; i++)
        kernels->turned(a + of[i].from / kernels->step * LD, LD,
                        operand_at(k, operand, of[i].from, ld), rows, of[i].past - of[i].from,
                        j1 - j0, ld / k->panel, c, c_ld);
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

/* Groups side by side that the same strips have are multiplied at once. */
static void multiply_turned(const backward_worker *w, const void *weights, const void *operand,
                            int32_t ld, float *c)
{
    const int32_t n = (w->n + BACKWARD_GROUP - 1) / BACKWARD_GROUP;
    for (int32_t first = 0, past; first < n; first = past) {
        const uint32_t strips = strips_of(w, first);
        for (past = first + 1; past < n && strips_of(w, past) == strips; past++)
            ;
        const int32_t j1 = past * BACKWARD_GROUP;
        add_turned(w, weights, operand, ld, strips, first * BACKWARD_GROUP,
                   j1 < w->n ? j1 : w->n, c);
    }
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
        if (!w->some[n])
            clear_dq(w, n * strip, strip);
}

static const float ones[BACKWARD_ROWS] = {[0 ... BACKWARD_ROWS - 1] = 1};

/* The strip's groups in one sum. */
static void add_strip(const backward_worker *w, int32_t r0)
{
    const cpu_kernels *k = w->job->backward->kernels->block;
    const int32_t ld = w->job->g.dq_ld;
    cpu_stretch of[BACKWARD_KEYS / BACKWARD_GROUP];
    int32_t n = 0;
    for (uint32_t left = w->some[r0 / k->strip]; backward_take(w, &left, &of[n]); n++) {
        of[n].past += -of[n].past & (BACKWARD_GROUP - 1);
        of[n].at = of[n].from;
    }
    if (n)
        k->values_of(w->dp + r0 * LD, LD, w->k_steps, of, n, padded(w->n, w->job->g.keys),
                     backward_strip_rows(w, r0), ld / k->panel, ones, w->dq + (int64_t)r0 * ld,
                     ld);
}

/* Groups that lie side by side of a strip whose kernels add to sums at once. */
static void add_keys(const backward_worker *w, int32_t r0, const cpu_stretch *keys,
                     int is_first)
{
    const cpu_backward_kernels *kernels = w->job->backward->kernels;
    const cpu_kernels *k = kernels->block;
    const int32_t ld = w->job->g.dq_ld, n = keys->past - keys->from;
    const cpu_strip_values values = {.p = w->dp + r0 * LD + keys->from,
                                     .v = operand_at(k, w->k_steps, keys->from, ld),
                                     .p_ld = LD,
                                     .n = n + (-n & (BACKWARD_GROUP - 1)),
                                     .rows = k->strip,
                                     .n_panels = ld / k->panel,
                                     .o_ld = ld,
                                     .is_first = is_first,
                                     .o = w->dq + (int64_t)r0 * ld};
    if (kernels->add_values)
        kernels->add_values(&values);
    else
        k->values(values.p, LD, values.v, values.n, padded(w->n, w->job->g.keys),
                  backward_strip_rows(w, r0), values.n_panels, ones, values.o, ld);
}

/* Rows from r0 on, the first of a strip. */
static void add_dq(const backward_worker *w, int32_t r0)
{
    const cpu_kernels *k = w->job->backward->kernels->block;
    for (int32_t r = r0; r < w->m; r += k->strip) {
        int is_first = w->dq_is_new;
        cpu_stretch keys;
        if (k->values_of) {
            add_strip(w, r);
            continue;
        }
        for (uint32_t left = w->some[r / k->strip]; backward_take(w, &left, &keys);) {
            add_keys(w, r, &keys, is_first);
            is_first = 0;
        }
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
static int32_t make_last(backward_worker *w, backward_strip *open, int any_dead)
{
    const cpu_backward_plan *b = w->job->backward;
    const cpu_kernels *k = b->kernels->block;
    const int32_t rows = open->r0, ld = w->job->g.dq_ld;
    if (!open->is_open || !b->kernels->overlap_values || !b->has_dq || !rows || !is_whole(w)
        || (any_dead && w->k_nonfinite)) {
        backward_make_weights(w, open);
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
    backward_close_strip(w, open);
    return rows;
}

void backward_run_tile(backward_worker *w)
{
    const int32_t strip = w->job->backward->kernels->block->strip;
    int any_dead = !w->is_full;
    backward_strip open = {0};
    pack_keys(w);
    pack_rows(w);
    find_groups(w, strip);
    backward_begin_lines(w);
    for (int32_t r = 0; r < w->m; r += strip)
        any_dead |= backward_make_strip(w, r, &open);
    backward_end_stream(w);
    const int32_t dq_rows = make_last(w, &open, any_dead);
    backward_end_lines(w);
    add_products(w, any_dead, dq_rows);
}
