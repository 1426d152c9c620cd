/* Gradients of captures. Each read's dX times derivative is summed along its axis, in vectors
 * per strip and in double from tile to tile:
 *
 *     head, row, diagonal   a sum per chunk and query head, row or difference of positions
 *     column                owned by the item of the keys
 *     place                 stored, where positions have elements of their own
 *                           (backward_stored.c); else added by every position, in fixed point
 *                           where there is a bound (backward_fixed.c), or one item after the
 *                           other where they could meet there (backward_order_of)
 *
 * After all items the sums are added to the gradient in the order of reads, heads, chunks and
 * places along the axis: equal bits whatever the threads. */
#include "cpu/backward/backward.h"

#include "base/convert.h"
#include "base/tensor_walk.h"

#include <string.h>

enum { LD = BACKWARD_KEYS };

/* ---- sums ---- */

static int64_t axis_length(const backward_job *job, backward_axis axis)
{
    const saccade_sizes *s = &job->run->sizes;
    return axis == BACKWARD_HEAD     ? 1
           : axis == BACKWARD_ROW    ? s->Q
           : axis == BACKWARD_COLUMN ? s->KV
                                     : s->Q + s->KV - 1;
}

double *backward_sums_of(const backward_job *job, uint32_t read, int64_t chunk, int64_t h)
{
    const saccade_sizes *s = &job->run->sizes;
    const backward_axis axis = job->backward->reads[read].axis;
    double *base = (double *)(void *)(job->memory + job->g.read_off + read * job->g.read_bytes);
    const int64_t part = axis == BACKWARD_COLUMN ? 0 : chunk;
    return base + (part * s->B * s->H + h) * axis_length(job, axis);
}

static int64_t head_of(const backward_worker *w)
{
    return w->b * w->job->run->sizes.H + w->h;
}

void backward_begin_sums(const backward_worker *w, int64_t head)
{
    const backward_job *job = w->job;
    const int64_t group = job->plan->problem.group;
    for (uint32_t n = 0; n < job->backward->n_reads; n++) {
        const backward_axis axis = job->backward->reads[n].axis;
        if (axis == BACKWARD_COLUMN || axis == BACKWARD_PLACE)
            continue;
        memset(backward_sums_of(job, n, w->chunk, backward_head_of(job, head) * group), 0,
               (size_t)(group * axis_length(job, axis)) * sizeof(double));
    }
}

static float *tile_sums(const backward_worker *w, uint32_t read)
{
    return w->sums + read * BACKWARD_SUMS;
}

/* Keys of the worker's block from its first on, as sums of columns have them. */
static double *columns_of(const backward_worker *w, uint32_t read)
{
    return backward_sums_of(w->job, read, 0, head_of(w)) + w->j0;
}

void backward_begin_columns(const backward_worker *w)
{
    for (uint32_t n = 0; n < w->job->backward->n_reads; n++)
        if (w->job->backward->reads[n].axis == BACKWARD_COLUMN)
            memset(columns_of(w, n), 0, (size_t)backward_keys_there(w) * sizeof(double));
}

void backward_begin_lines(backward_worker *w)
{
    for (uint32_t n = 0; n < w->job->backward->n_reads; n++) {
        const backward_axis axis = w->job->backward->reads[n].axis;
        if (axis == BACKWARD_COLUMN || axis == BACKWARD_DIAGONAL)
            memset(tile_sums(w, n), 0, BACKWARD_SUMS * sizeof(float));
    }
}

/* Place d of a tile's diagonals: key j and row i with j - i = d - (BACKWARD_ROWS - 1). */
static void end_diagonals(const backward_worker *w, uint32_t n)
{
    const int64_t first = w->j0 - w->i0 - (BACKWARD_ROWS - 1) + w->job->run->sizes.Q - 1;
    double *to = backward_sums_of(w->job, n, w->chunk, head_of(w));
    for (int64_t d = BACKWARD_ROWS - w->m; d < BACKWARD_ROWS + w->n - 1; d++)
        to[first + d] += (double)tile_sums(w, n)[d];
}

static void end_columns(const backward_worker *w, uint32_t n)
{
    double *to = columns_of(w, n);
    for (int32_t j = 0; j < w->n; j++)
        to[j] += (double)tile_sums(w, n)[j];
}

void backward_end_lines(const backward_worker *w)
{
    for (uint32_t n = 0; n < w->job->backward->n_reads; n++) {
        if (w->job->backward->reads[n].axis == BACKWARD_COLUMN)
            end_columns(w, n);
        else if (w->job->backward->reads[n].axis == BACKWARD_DIAGONAL)
            end_diagonals(w, n);
    }
}

/* ---- places ---- */

/* Index d of a load at a position, clamped as kernels read it. */
static int64_t index_at(const backward_job *job, const mod_node *load, uint32_t d,
                        const eval_point *at, double *values)
{
    mod_fn fn = *job->plan->problem.score;
    const eval_env *env = &job->run->score_env;
    fn.result = fn.args[load->args + d];
    const double x = eval_scalar(&fn, env, at, values, NULL);
    const double last = (double)(env->tensors[load->imm.i].shape[d] - 1);
    return (int64_t)(x < 0 ? 0 : x > last ? last : x);
}

/* Elements from the gradient's first one, of those indices that vary with one of `deps`, or of
 * those that do not. */
static int64_t place_at(const backward_job *job, const backward_read *read,
                        const eval_point *at, int deps, int is_moving, double *values)
{
    const mod_fn *fn = job->plan->problem.score;
    const mod_node *load = &fn->nodes[read->node];
    const saccade_tensor *t = &job->gradients->captures[read->capture];
    int64_t place = 0;
    for (uint32_t d = 0; load->op == OP_LOAD && d < load->n_args; d++)
        if (((fn->nodes[fn->args[load->args + d]].deps & deps) != 0) == is_moving)
            place += index_at(job, load, d, at, values) * t->stride[d];
    return place;
}

int64_t backward_place_of(const backward_job *job, const backward_read *read,
                          const eval_point *at, double *values)
{
    return place_at(job, read, at, 0, 0, values);
}

eval_point backward_point_at(const backward_job *job, int64_t b, int64_t h, int64_t i,
                             int64_t j)
{
    const plan_run *run = job->run;
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, b);
    return (eval_point){(int32_t)b, (int32_t)h, (int32_t)i + at.q_offset,
                        (int32_t)j + at.kv_offset, 0};
}

void backward_add_to(const saccade_tensor *t, int64_t place, double x)
{
    char *at = (char *)t->data + place * (int64_t)saccade_dtype_bytes(t->dtype);
    const float sum = (float)(convert_element(t->dtype, at) + x);
    if (x != 0)
        convert_from_f32(t->dtype, &sum, at, 1);
}

double backward_factor_of(const backward_job *job, const backward_read *read, int64_t b,
                          int64_t h, double *values)
{
    const eval_point at = backward_point_at(job, b, h, 0, 0);
    return read->factor ? eval_scalar(read->factor, &job->run->score_env, &at, values, NULL)
                        : 1;
}

/* Position (r, j) of the tile, r a row of the strip at r0. Neighbours of one place, as clamped
 * indices have many, are added up before. */
static void add_places(backward_worker *w, uint32_t n, const float *g, int32_t r0, int32_t rows,
                       uint32_t groups)
{
    const backward_read *read = &w->job->backward->reads[n];
    const saccade_tensor *to = &w->job->gradients->captures[read->capture];
    const double factor = backward_factor_of(w->job, read, w->b, w->h, w->values);
    const cpu_stretch span = backward_span_of(w, groups);
    int64_t place = 0;
    double sum = 0;
    for (int32_t r = 0; r < rows; r++) {
        const int64_t *element;
        const int64_t first =
            backward_find_elements(w, n, r0 + r, span.from, span.past, to->stride, &element);
        for (int32_t j = span.from; j < span.past; j++) {
            if (!(groups >> j / BACKWARD_GROUP & 1))
                continue;
            const float dx = w->dx[r * LD + j];
            const int64_t next = first + element[j];
            if (dx == 0)
                continue;
            if (next != place)
                backward_add_to(to, place, backward_scaled(factor, sum));
            sum = (next == place ? sum : 0) + (double)(g ? dx * g[r * LD + j] : dx);
            place = next;
        }
    }
    backward_add_to(to, place, backward_scaled(factor, sum));
}

/* Indices that are lines: a step of a row, a step of a key. */
void backward_dense_strides(const backward_read *read, const saccade_tensor *t, int64_t *by_row,
                            int64_t *by_key)
{
    *by_row = *by_key = 0;
    for (int d = 0; d < read->rank; d++) {
        *by_row += read->by_q[d] * t->stride[d];
        *by_key += read->by_kv[d] * t->stride[d];
    }
}

int backward_is_inside(const backward_job *job, const backward_read *read)
{
    double *values = backward_worker_of(job, 0)->values;
    const mod_fn *fn = job->plan->problem.score;
    const saccade_sizes *s = &job->run->sizes;
    const mod_node *load = &fn->nodes[read->node];
    const saccade_tensor *t = &job->run->score_env.tensors[read->capture];
    mod_fn index = *fn;
    for (int64_t head = 0; head < s->B * s->H; head++)
        for (uint32_t d = 0; d < load->n_args; d++)
            for (int corner = 0; corner < 4; corner++) {
                const eval_point at =
                    backward_point_at(job, head / s->H, head % s->H, corner & 1 ? s->Q - 1 : 0,
                                      corner & 2 ? s->KV - 1 : 0);
                index.result =
                    read->sum[d] == PASS_NO_NODE ? fn->args[load->args + d] : read->sum[d];
                const double x = eval_scalar(&index, &job->run->score_env, &at, values, NULL);
                if (x < 0 || x > (double)(t->shape[d] - 1))
                    return 0;
            }
    return 1;
}

static double sum_row(const float *dx, const float *slope, int32_t n)
{
    double sum = 0;
    for (int32_t j = 0; j < n; j++)
        sum += dx[j] == 0 ? 0 : (double)dx[j] * (slope ? (double)slope[j] : 1);
    return sum;
}

/* n keys of a row, by_key elements apart: vectors of 16 at a time, as far as they go, where
 * they lie side by side. */
static void add_line(const cpu_backward_kernels *kernels, const float *dx, const float *slope,
                     float factor, int32_t n, int64_t by_key, float *to)
{
    int32_t j = 0;
    if (by_key == 0) { /* all of a row's to one place, where f32 would lose what is small */
        *to = (float)((double)*to + backward_scaled((double)factor, sum_row(dx, slope, n)));
        return;
    }
    if (by_key == 1 && factor == 1) {
        j = n / 16 * 16;
        kernels->sum_columns(dx, slope, LD, 1, j, to);
    }
    for (; j < n; j++)
        to[j * by_key] += dx[j] == 0 ? 0 : factor * (slope ? dx[j] * slope[j] : dx[j]);
}

static void add_dense(backward_worker *w, const backward_read *read, const float *g, int32_t r0,
                      int32_t rows, uint32_t groups)
{
    const backward_job *job = w->job;
    const saccade_tensor *t = &job->gradients->captures[read->capture];
    const eval_point at = backward_point_at(job, w->b, w->h, w->i0 + r0, w->j0);
    const float factor = (float)backward_factor_of(job, read, w->b, w->h, w->values);
    int64_t by_row, by_key;
    backward_dense_strides(read, t, &by_row, &by_key);
    float *to = (float *)t->data + backward_place_of(job, read, &at, w->values);
    for (int32_t r = 0; r < rows; r++, to += by_row) {
        cpu_stretch keys;
        for (uint32_t left = groups; backward_take(w, &left, &keys);) {
            const int32_t from = r * LD + keys.from;
            add_line(job->backward->kernels, w->dx + from, g ? g + from : NULL, factor,
                     keys.past - keys.from, by_key, to + keys.from * by_key);
        }
    }
}

static int may_add_dense(const backward_job *job, const backward_read *read)
{
    const saccade_tensor *to = &job->gradients->captures[read->capture];
    return read->is_dense && to->dtype == SACCADE_F32
           && (!read->is_slanted || backward_is_spread(to)) && backward_is_inside(job, read);
}

int backward_has_index(const backward_job *job, const backward_read *read, int32_t var)
{
    const mod_fn *fn = job->plan->problem.score;
    const mod_node *load = &fn->nodes[read->node];
    for (uint32_t d = 0; d < load->n_args; d++) {
        const mod_node *index = &fn->nodes[fn->args[load->args + d]];
        if (index->op == OP_VAR && index->imm.i == var
            && job->gradients->captures[read->capture].stride[d] != 0)
            return 1;
    }
    return 0;
}

/* Whether keys have places of their own: some dimension that kv indexes is not summed over. */
static int has_keys(const backward_job *job, const backward_read *read)
{
    const mod_fn *fn = job->plan->problem.score;
    const mod_node *load = &fn->nodes[read->node];
    for (uint32_t d = 0; d < load->n_args; d++)
        if (fn->nodes[fn->args[load->args + d]].deps & DEP_KV
            && job->gradients->captures[read->capture].stride[d] != 0)
            return 1;
    return 0;
}

/* Items of one head have keys of their own, and so places of their own where keys are a dense
 * index of the one read; items of different batches where b is an index as well, of different
 * heads where h is. */
backward_order backward_order_of(const backward_job *job)
{
    const saccade_sizes *s = &job->run->sizes;
    int by_batch = 0, by_head = 0;
    for (uint32_t n = 0; n < job->backward->n_reads; n++) {
        const backward_read *read = &job->backward->reads[n];
        if (read->axis != BACKWARD_PLACE || job->reads[n].fixed.sums || job->reads[n].is_stored)
            continue;
        if (!may_add_dense(job, read) || !has_keys(job, read))
            return BACKWARD_SERIAL;
        for (uint32_t m = 0; m < n; m++)
            if (job->backward->reads[m].axis == BACKWARD_PLACE && !job->reads[m].fixed.sums
                && job->backward->reads[m].capture == read->capture)
                return BACKWARD_SERIAL;
        by_batch |= s->B > 1 && !backward_has_index(job, read, VAR_B);
        by_head |= s->H > 1 && !backward_has_index(job, read, VAR_H);
    }
    return by_batch && by_head ? BACKWARD_BY_BOTH
           : by_batch          ? BACKWARD_BY_BATCH
           : by_head           ? BACKWARD_BY_HEAD
                               : BACKWARD_FREE;
}

/* ---- a strip ---- */

static void add_to_places(backward_worker *w, uint32_t n, const float *g, int32_t r0,
                          int32_t rows, uint32_t groups)
{
    const backward_job *job = w->job;
    if (job->reads[n].is_stored)
        backward_store_strip(w, n, r0, rows, groups);
    else if (job->reads[n].fixed.sums)
        backward_add_fixed(w, n, r0, rows, groups);
    else if (job->reads[n].is_dense)
        add_dense(w, &job->backward->reads[n], g, r0, rows, groups);
    else
        add_places(w, n, g, r0, rows, groups);
}

/* Sums of a read along its axis, of keys side by side. */
static void add_along(backward_worker *w, uint32_t n, const float *g, int32_t r0, int32_t rows,
                      const cpu_stretch *keys)
{
    const backward_job *job = w->job;
    const cpu_backward_kernels *k = job->backward->kernels;
    const backward_axis axis = job->backward->reads[n].axis;
    const int32_t from = keys->from, count = keys->past - from;
    const float *dx = w->dx + from, *slope = g ? g + from : NULL;
    float *to = tile_sums(w, n);
    if (axis == BACKWARD_COLUMN) {
        k->sum_columns(dx, slope, LD, rows, count, to + from);
    } else if (axis == BACKWARD_DIAGONAL) {
        k->sum_diagonals(dx, slope, LD, rows, count, to + from - r0 + BACKWARD_ROWS - 1);
    } else {
        double *sums = backward_sums_of(job, n, w->chunk, head_of(w));
        k->sum_rows(dx, slope, LD, rows, count, to);
        for (int32_t r = 0; r < rows; r++)
            sums[axis == BACKWARD_ROW ? w->i0 + r0 + r : 0] += (double)to[r];
    }
}

void backward_add_sums(backward_worker *w, int32_t r0, int32_t rows, uint32_t groups)
{
    for (uint32_t n = 0; n < w->job->backward->n_reads; n++) {
        const backward_read *read = &w->job->backward->reads[n];
        const float *g = read->factor ? NULL : w->results[read->result];
        cpu_stretch keys;
        if (read->axis == BACKWARD_PLACE)
            add_to_places(w, n, g, r0, rows, groups);
        else
            for (uint32_t left = groups; backward_take(w, &left, &keys);)
                add_along(w, n, g, r0, rows, &keys);
    }
}

void backward_find_dense(backward_job *job)
{
    for (uint32_t n = 0; n < job->backward->n_reads; n++)
        job->reads[n].is_dense = job->backward->reads[n].axis == BACKWARD_PLACE
                                 && may_add_dense(job, &job->backward->reads[n]);
}

/* ---- gradients ---- */

void backward_begin_captures(const backward_job *job)
{
    if (job->gradients->added & SACCADE_GRADIENT_CAPTURES)
        return;
    for (int32_t c = 0; c < MOD_MAX_CAPTURES; c++)
        if (job->backward->captures >> c & 1 && !backward_stores_all(job, c))
            tensor_clear(&job->gradients->captures[c]);
}

/* A position on place t of the axis. */
static eval_point axis_point(const backward_job *job, backward_axis axis, int64_t b, int64_t h,
                             int64_t t)
{
    const int64_t d = t - (job->run->sizes.Q - 1);
    if (axis == BACKWARD_DIAGONAL)
        return backward_point_at(job, b, h, d < 0 ? -d : 0, d < 0 ? 0 : d);
    return backward_point_at(job, b, h, axis == BACKWARD_ROW ? t : 0,
                             axis == BACKWARD_COLUMN ? t : 0);
}

/* Where each place of the axis belongs, but for indices that do not vary along it: found once a
 * batch unless they vary with h. */
static void find_moving(const backward_job *job, const backward_read *read, int64_t b,
                        int64_t h, int64_t *moving, double *values)
{
    const mod_fn *fn = job->plan->problem.score;
    const mod_node *load = &fn->nodes[read->node];
    const int64_t n = axis_length(job, read->axis);
    int deps = 0;
    for (uint32_t d = 0; load->op == OP_LOAD && d < load->n_args; d++) {
        const int of = fn->nodes[fn->args[load->args + d]].deps;
        deps |= of & (DEP_Q | DEP_KV) ? of : 0;
    }
    for (int64_t t = 0; t < n && (h == 0 || deps & DEP_H); t++) {
        const eval_point at = axis_point(job, read->axis, b, h, t);
        moving[t] = place_at(job, read, &at, DEP_Q | DEP_KV, 1, values);
    }
}

static void spread_head(const backward_job *job, uint32_t n, int64_t b, int64_t h,
                        const int64_t *moving, double *values)
{
    const backward_read *read = &job->backward->reads[n];
    const saccade_tensor *to = &job->gradients->captures[read->capture];
    const int64_t head = b * job->run->sizes.H + h;
    const double factor = backward_factor_of(job, read, b, h, values);
    const eval_point at = backward_point_at(job, b, h, 0, 0);
    const int64_t fixed = place_at(job, read, &at, DEP_Q | DEP_KV, 0, values);
    const int64_t chunks = read->axis == BACKWARD_COLUMN ? 1 : job->g.chunks;
    for (int64_t t = 0; t < axis_length(job, read->axis); t++) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            sum += backward_sums_of(job, n, chunk, head)[t];
        backward_add_to(to, fixed + moving[t], backward_scaled(factor, sum));
    }
}

void backward_spread(const backward_job *job)
{
    const saccade_sizes *s = &job->run->sizes;
    double *values = backward_worker_of(job, 0)->values;
    int64_t *moving = (int64_t *)(void *)(job->memory + job->g.moving_off);
    for (uint32_t n = 0; n < job->backward->n_reads; n++) {
        if (job->backward->reads[n].axis == BACKWARD_PLACE)
            continue;
        for (int64_t b = 0; b < s->B; b++)
            for (int64_t h = 0; h < s->H; h++) {
                find_moving(job, &job->backward->reads[n], b, h, moving, values);
                spread_head(job, n, b, h, moving, values);
            }
    }
}
