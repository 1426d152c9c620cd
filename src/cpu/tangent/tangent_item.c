/* One item: a block of query rows of one head against its live blocks of keys, with O, O' and
 * the rows' statistics held by one thread, as in forward/item.c. */
#include "cpu/tangent/tangent.h"

#include "base/convert.h"
#include "base/integers.h"
#include "cpu/kernels/drop.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { LD = CPU_BLOCK_KEYS };

/* ---- a thread's memory ---- */

static tangent_worker *worker_of(const tangent_job *job, int thread)
{
    return (tangent_worker *)(void *)(job->memory + job->g.thread_off
                                      + (size_t)thread * job->g.thread_bytes);
}

static float *floats(char *base, size_t off)
{
    return (float *)(void *)(base + off);
}

static void begin_mods(tangent_worker *w, char *base, const tangent_scratch *at)
{
    const tangent_job *job = w->job;
    const cpu_state *state = cpu_state_of(job->plan);
    const cpu_tangent_plan *p = job->tangent;
    const eval_prog *score = p->score ? p->score : state->score;
    const jit_program *jit = p->score ? p->jit : state->jit;
    if (jit)
        w->jit = jit_begin(jit, &job->score_env, &job->run->mask_env,
                           (float)job->plan->problem.scale, base + at->jit);
    if (score)
        w->score = eval_begin(score, &job->score_env, base + at->score);
    if (state->mask)
        w->mask = eval_begin(state->mask, &job->run->mask_env, base + at->mask);
}

static void begin_thread(tangent_job *job, tangent_worker *w, const tangent_scratch *at)
{
    char *base = (char *)w;
    const int32_t each = (int32_t)round_up(job->g.rows, 16);
    *w = (tangent_worker){.job = job, .head_slope = 1};
    w->q = base + at->q;
    w->q_dot = base + at->q_dot;
    w->s = floats(base, at->s);
    w->x = floats(base, at->x);
    w->y = floats(base, at->y);
    w->slope = floats(base, at->slope);
    w->added = floats(base, at->added);
    w->o = floats(base, at->o);
    w->o_dot = floats(base, at->o_dot);
    w->row_m = floats(base, at->stats);
    w->row_l = w->row_m + each;
    w->row_c = w->row_l + each;
    w->rest = w->row_c + each;
    w->alpha = w->rest + each;
    w->ones = w->alpha + each;
    w->live = (uint8_t *)(base + at->live);
    w->row = floats(base, at->row);
    w->most = floats(base, at->most);
    w->ranges = base + at->ranges;
    w->limits.first = (int64_t *)(void *)(base + at->limits);
    w->limits.past = w->limits.first + CPU_MOST_ROWS;
    w->values = (double *)(void *)(base + at->values);
    for (int32_t r = 0; r < each; r++)
        w->ones[r] = 1;
    begin_mods(w, base, at);
    w->score_head = w->mask_head = w->jit_head = -1;
}

void tangent_begin_threads(tangent_job *job)
{
    const tangent_scratch at = tangent_scratch_of(job->plan, job->tangent, &job->g);
    static_assert(sizeof(tangent_worker) <= 1024, "room in front of the scratch");
    for (int n = 0; n < job->plan->threads; n++)
        begin_thread(job, worker_of(job, n), &at);
}

/* ---- values ---- */

static float weight(const tangent_worker *w, const float *of, int32_t i, int32_t j)
{
    const float *row = of + (int64_t)i * LD;
    const uint16_t *halves = (const uint16_t *)(const void *)row;
    return w->job->tangent->kernels->block->element == 4 ? row[j] : bf16_to_f32(halves[j]);
}

static void note_live(tangent_worker *w, int32_t rows)
{
    for (int32_t n = 0; n < rows * LD; n++)
        w->live[n] = w->s[n] != -INFINITY;
}

static void scale_rows(const tangent_worker *w, int32_t r0, int32_t rows)
{
    const int32_t o_ld = w->job->g.o_ld;
    for (int32_t i = r0; i < r0 + rows; i++)
        for (int32_t d = 0; d < o_ld; d++) {
            w->o[i * o_ld + d] *= w->alpha[i];
            w->o_dot[i * o_ld + d] *= w->alpha[i];
        }
}

/* Row j of a tensor of the item's keys, in f32. */
static void load_row(const tangent_worker *w, const saccade_tensor *t, int64_t j, float *to)
{
    const cpu_rows all = cpu_rows_of(t, w->b, w->g);
    convert_to_f32(all.dtype, cpu_rows_from(all, j).base, to, all.dim);
}

/* add_values where V or V' holds infinities or NaN: keys that are dead in a row must not touch
 * it, not even by 0 * NaN. */
static void careful_values(tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t rows)
{
    const tangent_job *job = w->job;
    const int32_t o_ld = job->g.o_ld, E = (int32_t)job->run->sizes.Dv;
    float *v = w->row, *v_dot = w->row + E;
    scale_rows(w, r0, rows);
    memset(v_dot, 0, (size_t)E * sizeof *v_dot);
    for (int32_t j = 0; j < t->past - t->from; j++) {
        load_row(w, job->run->v, t->j0 + t->from + j, v);
        if (job->t->v)
            load_row(w, job->t->v, t->j0 + t->from + j, v_dot);
        for (int32_t i = 0; i < rows; i++) {
            float *o = w->o + (r0 + i) * o_ld, *dot = w->o_dot + (r0 + i) * o_ld;
            const float p = weight(w, w->s, i, j), p_dot = weight(w, w->x, i, j);
            for (int32_t d = 0; d < E && w->live[i * LD + j]; d++) {
                o[d] += p * v[d];
                dot[d] += p_dot * v[d] + p * v_dot[d];
            }
        }
    }
}

static void add_values(const tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t rows)
{
    const cpu_kernels *k = w->job->tangent->kernels->block;
    const int32_t o_ld = w->job->g.o_ld, n = (t->past - t->from + 15) / 16 * 16;
    const size_t columns = (size_t)(k->is_by_keys ? o_ld : k->panel);
    const size_t skip = (size_t)t->from * columns * (size_t)k->element;
    float *o = w->o + r0 * o_ld, *dot = w->o_dot + r0 * o_ld;
    k->values(w->x, LD, t->keys.v + skip, n, t->padded, rows, o_ld / k->panel, w->alpha + r0,
              dot, o_ld);
    if (t->keys.v_dot)
        k->values(w->s, LD, t->keys.v_dot + skip, n, t->padded, rows, o_ld / k->panel, w->ones,
                  dot, o_ld);
    k->values(w->s, LD, t->keys.v + skip, n, t->padded, rows, o_ld / k->panel, w->alpha + r0, o,
              o_ld);
}

/* ---- dropout: sums have all weights, O and O' those that are kept ---- */

static void drop_bf16(float *row, const uint16_t *keep, int32_t n)
{
    uint16_t *p = (uint16_t *)(void *)row;
    for (int32_t j = 0; j < n; j++)
        p[j] &= keep[j];
}

static void drop(tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t rows)
{
    const tangent_job *job = w->job;
    const int32_t n = t->past - t->from;
    uint16_t room[CPU_DROP_ROOM(CPU_BLOCK_KEYS)];
    if (!job->run->dropout.is_on)
        return;
    const cpu_drop head = cpu_drop_of(job->plan, job->run, w->b, w->h);
    for (int32_t i = 0; i < rows; i++) {
        const int32_t q = (int32_t)w->i0 + r0 + i + w->at.q_offset;
        const int32_t kv = (int32_t)t->j0 + t->from + w->at.kv_offset;
        const uint16_t *keep = cpu_drop_row(&head, q, kv, n, room);
        void (*by)(float *, const uint16_t *, int32_t) =
            job->tangent->kernels->block->element == 4 ? cpu_drop_f32 : drop_bf16;
        by(w->s + i * LD, keep, n);
        by(w->x + i * LD, keep, n);
    }
}

/* ---- strips ---- */

/* S and S' of a strip. */
static void make_scores(const tangent_worker *w, const tangent_tile *t, int32_t r0,
                        int32_t rows)
{
    const tangent_job *job = w->job;
    const cpu_kernels *k = job->tangent->kernels->block;
    const int32_t D = (int32_t)job->run->sizes.D, q_ld = job->g.q_ld;
    const int32_t n = (t->past - t->from + k->panel - 1) / k->panel * k->panel;
    const size_t pitch = (size_t)round_up(D, k->depth) * (size_t)k->element;
    const size_t row = (size_t)r0 * (size_t)q_ld * (size_t)k->element;
    const size_t skip = (size_t)t->from * pitch;
    const float rate = (float)job->plan->problem.scale * w->head_slope;
    k->scores(w->q + row, q_ld, t->keys.k + skip, D, rows, n, tangent_scale_of(w, t), w->s, LD);
    if (job->t->q)
        k->scores(w->q_dot + row, q_ld, t->keys.k + skip, D, rows, n, rate, w->x, LD);
    else if (job->t->k)
        k->scores(w->q + row, q_ld, t->keys.k_dot + skip, D, rows, n, rate, w->x, LD);
    else
        memset(w->x, 0, (size_t)rows * LD * sizeof *w->x);
    if (job->t->q && job->t->k)
        k->scores(w->q + row, q_ld, t->keys.k_dot + skip, D, rows, n, rate, w->y, LD);
}

/* The part of a tile that a strip of rows can see. 0 when there is none. */
static int narrow(const tangent_worker *w, int32_t r0, int32_t rows, tangent_tile *t)
{
    t->from = 0;
    t->past = t->n;
    if (t->is_full)
        return 1;
    cpu_limits l = w->limits;
    if (w->job->live.by == CPU_BY_LIMITS)
        cpu_limit_rows(&l, r0, rows);
    const int64_t i0 = w->i0 + r0;
    cpu_box box = {w->b, w->h, w->h + 1, i0, i0 + rows, t->j0, t->j0 + t->n};
    const cpu_cover cover = cpu_narrow(&w->job->live, &l, JIT_GROUP, &box);
    t->from = (int32_t)(box.j0 - t->j0);
    t->past = (int32_t)(box.j1 - t->j0);
    t->is_full = cover == CPU_FULL;
    return cover != CPU_EMPTY;
}

static void run_strip(tangent_worker *w, tangent_tile t, int32_t r0, int32_t rows)
{
    const tangent_job *job = w->job;
    const int32_t o_ld = job->g.o_ld;
    if (!narrow(w, r0, rows, &t))
        return;
    make_scores(w, &t, r0, rows);
    tangent_change_scores(w, &t, r0, rows);
    if (*t.keys.nonfinite)
        note_live(w, rows);
    const cpu_strip_rates rates = {.s = w->s,
                                   .x = w->x,
                                   .y = job->t->q && job->t->k ? w->y : NULL,
                                   .slope = job->tangent->has_slopes ? w->slope : NULL,
                                   .added = job->tangent->has_rates ? w->added : NULL,
                                   .ld = LD,
                                   .rows = rows,
                                   .n = (t.past - t.from + 15) / 16 * 16,
                                   .m = w->row_m + r0,
                                   .l = w->row_l + r0,
                                   .c = w->row_c + r0,
                                   .rest = w->rest + r0,
                                   .alpha = w->alpha + r0,
                                   .o = w->o + r0 * o_ld,
                                   .o_dot = w->o_dot + r0 * o_ld,
                                   .o_ld = o_ld};
    job->tangent->kernels->weights(&rates);
    drop(w, &t, r0, rows);
    if (*t.keys.nonfinite)
        careful_values(w, &t, r0, rows);
    else
        add_values(w, &t, r0, rows);
}

/* ---- the item ---- */

static void open_rows(tangent_worker *w, int64_t index)
{
    const tangent_job *job = w->job;
    const saccade_sizes *s = &job->run->sizes;
    const int32_t group = job->plan->problem.group;
    const int64_t each = group * job->g.row_blocks, rest = index % each;
    w->head = index / each;
    w->b = (job->head0 + w->head) / s->Hkv;
    w->g = (job->head0 + w->head) % s->Hkv;
    w->h = w->g * group + rest / job->g.row_blocks;
    /* under causal masks the last rows are the longest work */
    w->i0 = (job->g.row_blocks - 1 - rest % job->g.row_blocks) * CPU_BLOCK_ROWS;
    w->m = (int32_t)smaller(s->Q - w->i0, CPU_BLOCK_ROWS);
    w->at = plan_position_of(&job->run->positions, s->KV, w->b);
    w->score_head = w->mask_head = w->jit_head = -1;
    const mod_fn *slope = job->tangent->slope;
    if (slope && !job->tangent->has_slopes) {
        const eval_point point = {(int32_t)w->b, (int32_t)w->h, 0, 0, 0};
        w->head_slope = (float)eval_scalar(slope, &job->score_env, &point, w->values, NULL);
    }
}

static void clear_rows(tangent_worker *w)
{
    const size_t bytes = (size_t)(w->job->g.rows * w->job->g.o_ld) * sizeof(float);
    memset(w->o, 0, bytes);
    memset(w->o_dot, 0, bytes);
    for (int32_t r = 0; r < w->job->g.rows; r++) {
        w->row_m[r] = -INFINITY;
        w->row_l[r] = w->row_c[r] = w->rest[r] = 0;
    }
}

static void pack_queries(tangent_worker *w, const saccade_tensor *t, char *to)
{
    const tangent_job *job = w->job;
    const cpu_kernels *k = job->tangent->kernels->block;
    const cpu_rows rows = cpu_rows_from(cpu_rows_of(t, w->b, w->h), w->i0);
    k->pack_rows(&rows, w->m, (int32_t)round_up(w->m, k->strip), job->g.q_ld, to);
}

static void run_tile(tangent_worker *w, int64_t j0, int64_t j1)
{
    const tangent_job *job = w->job;
    const int32_t strip = job->tangent->kernels->block->strip;
    const cpu_box box = {w->b, w->h, w->h + 1, w->i0, w->i0 + w->m, j0, j1};
    const cpu_cover cover = cpu_cover_of(&job->live, &w->limits, &box, w->ranges);
    if (cover == CPU_EMPTY)
        return;
    const int32_t n = (int32_t)(j1 - j0);
    const tangent_tile t = {.keys = tangent_keys_of(job, w->head, j0 / CPU_BLOCK_KEYS),
                            .j0 = j0,
                            .n = n,
                            .padded = (int32_t)round_up(n, 32),
                            .is_full = cover == CPU_FULL};
    for (int32_t r = 0; r < w->m; r += strip)
        run_strip(w, t, r, w->m - r < strip ? w->m - r : strip);
}

/* Keys that some row of the item may see. */
static void find_keys(tangent_worker *w, int64_t *begin, int64_t *end)
{
    const tangent_job *job = w->job;
    *begin = 0;
    *end = w->at.kv_len;
    if (job->live.by != CPU_BY_LIMITS)
        return;
    const eval_point row = {(int32_t)w->b, (int32_t)w->h, (int32_t)w->i0 + w->at.q_offset, 0,
                            0};
    cpu_find_limits(job->live.limits, job->run, &row, w->m, w->at.kv_offset, w->values,
                    &w->limits, 0);
    cpu_limit_rows(&w->limits, 0, w->m);
    *begin = w->limits.any_first / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
    *end = smaller(w->limits.any_past, *end);
}

void tangent_run_item(void *arg, int64_t index, int thread)
{
    const tangent_job *job = arg;
    const cpu_kernels *k = job->tangent->kernels->block;
    tangent_worker *w = worker_of(job, thread);
    int64_t begin, end;
    open_rows(w, index);
    clear_rows(w);
    pack_queries(w, job->run->q, w->q);
    if (job->t->q)
        pack_queries(w, job->t->q, w->q_dot);
    find_keys(w, &begin, &end);
    if (k->begin)
        k->begin();
    for (int64_t j = begin; j < end; j += CPU_BLOCK_KEYS)
        run_tile(w, j, smaller(j + CPU_BLOCK_KEYS, w->at.kv_len));
    if (k->end)
        k->end();
    tangent_store(w);
}
