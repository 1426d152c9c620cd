/* One item of work: a block of query rows against its live blocks of keys, FlashAttention-2's
 * loop (arXiv 2307.08691, algorithm 1) with O, m and l of the whole block held by one thread.
 *
 * A tile is taken strip by strip, a few rows at a time, so that scores are made, changed,
 * masked, exponentiated and multiplied into O without leaving the first-level cache:
 *
 *     K, V block --pack--> | per strip: scores -> score mod -> mask -> softmax -> values |
 *
 * Few rows (decode) take K and V unpacked, all rows in one strip; AMX takes most of the rest by
 * streams (item_stream.c).
 * Split items leave (O, m, l) for cpu_merge_item, which adds them up in order of keys. */
#include "cpu/cpu.h"

#include "base/convert.h"
#include "cpu/asking.h"
#include "cpu/item.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static cpu_worker *worker_of(const cpu_job *job, int thread)
{
    return (cpu_worker *)(void *)(job->memory + job->g.thread_off
                                  + (size_t)thread * job->g.thread_bytes);
}

void cpu_begin_threads(cpu_job *job)
{
    const cpu_scratch at = cpu_scratch_of(job->plan, &job->g);
    const cpu_state *state = job->plan->state;
    static_assert(sizeof(cpu_worker) <= 1024, "room in front of the scratch");
    for (int n = 0; n < job->plan->threads; n++) {
        cpu_worker *w = worker_of(job, n);
        char *base = (char *)w;
        *w = (cpu_worker){.job = job, .kernels = state->kernels};
        w->q = base + at.q;
        w->k = base + at.k;
        w->v = base + at.v;
        w->s = (float *)(void *)(base + at.s);
        w->o = (float *)(void *)(base + at.o);
        w->m = (float *)(void *)(base + at.stats);
        w->l = w->m + CPU_MOST_ROWS;
        w->alpha = w->l + CPU_MOST_ROWS;
        w->most = w->alpha + CPU_MOST_ROWS;
        w->own.at.k = base + at.own;
        w->own.at.v = w->own.at.k + (size_t)job->g.own_blocks * job->g.k_bytes;
        w->own.at.wild = base + at.own_wild;
        w->live = (uint8_t *)(base + at.live);
        w->flow = base + at.flow;
        w->row = (float *)(void *)(base + at.row);
        w->ranges = (pass_range *)(void *)(base + at.ranges);
        w->limits.first = (int64_t *)(void *)(base + at.limits);
        w->limits.past = w->limits.first + CPU_MOST_ROWS;
        w->values = (double *)(void *)(base + at.values);
        if (state->jit)
            w->jit = jit_begin(state->jit, &job->run->score_env, &job->run->mask_env,
                               job->plan->problem.scale, base + at.jit);
        if (state->score)
            w->score = eval_begin(state->score, &job->run->score_env, base + at.score);
        if (state->mask)
            w->mask = eval_begin(state->mask, &job->run->mask_env, base + at.mask);
    }
}

/* ---- items ---- */

cpu_rows cpu_rows_of(const saccade_tensor *t, int64_t b, int64_t h)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    return (cpu_rows){
        .base = (const char *)t->data + (b * t->stride[0] + h * t->stride[1]) * bytes,
        .stride = t->stride[2] * bytes,
        .dtype = t->dtype,
        .dim = (int32_t)t->shape[3],
    };
}

/* Items of a head: splits fastest, then row blocks, then heads of the group. */
cpu_item cpu_item_of(const cpu_job *job, int64_t index)
{
    const cpu_geometry *g = &job->g;
    const saccade_sizes *s = &job->run->sizes;
    const int32_t group = job->plan->problem.group;
    cpu_item item = {.head = index / g->head_items};
    int64_t rest = index % g->head_items;
    item.b = (job->head0 + item.head) / s->Hkv;
    item.g = (job->head0 + item.head) % s->Hkv;
    item.split = rest % g->splits;
    rest /= g->splits;
    cpu_box *box = &item.box;
    box->b = item.b;
    box->i0 = rest % g->row_blocks * g->block_rows;
    box->i1 = box->i0 + g->block_rows < s->Q ? box->i0 + g->block_rows : s->Q;
    box->h0 = item.g * group + rest / g->row_blocks * g->item_heads;
    box->h1 = box->h0 + g->item_heads;
    box->j0 = item.split * g->split_blocks * CPU_BLOCK_KEYS;
    box->j1 = box->j0 + g->split_blocks * CPU_BLOCK_KEYS;
    box->j1 = box->j1 < s->KV ? box->j1 : s->KV;
    return item;
}

static int64_t head_of(const cpu_worker *w, int32_t r)
{
    const cpu_box *box = &w->item.box;
    return box->h0 + r / (box->i1 - box->i0);
}

static int64_t index_of(const cpu_worker *w, int32_t r)
{
    const cpu_box *box = &w->item.box;
    return box->i0 + r % (box->i1 - box->i0);
}

/* Whether the mask's limits replace its tiles and its evaluation. */
int item_has_limits(const cpu_worker *w)
{
    return ((const cpu_state *)w->job->plan->state)->limits && !w->job->live.is_imported;
}

static void find_limits(cpu_worker *w)
{
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0);
    for (int32_t r = 0; r < w->rows; r += each) {
        const eval_point row = {(int32_t)w->item.b, (int32_t)head_of(w, r),
                                (int32_t)index_of(w, r) + w->at.q_offset, 0, 0};
        cpu_find_limits(w->job->plan->state, w->job->run, &row, each, w->at.kv_offset,
                        w->values, &w->limits, r);
    }
    cpu_limit_rows(&w->limits, 0, w->rows);
}

void item_clear_rows(cpu_worker *w, int32_t r0, int32_t n)
{
    const int64_t o_ld = w->job->g.o_ld;
    memset(w->o + r0 * o_ld, 0, (size_t)(n * o_ld) * sizeof(float));
    for (int32_t r = r0; r < r0 + n; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
}

/* The item's rows, before anything is known of their keys. */
static void stand_item(cpu_worker *w, const cpu_item *item)
{
    const cpu_box *box = &item->box;
    w->item = *item;
    w->at = plan_position_of(&w->job->run->positions, w->job->run->sizes.KV, item->b);
    w->rows = (int32_t)((box->i1 - box->i0) * (box->h1 - box->h0));
    w->score_head = w->mask_head = w->jit_head = -1;
    w->stored = 0;
}

void item_pack_queries(cpu_worker *w, int32_t r0, int32_t n, int32_t to)
{
    const cpu_job *job = w->job;
    const cpu_box *box = &w->item.box;
    const int32_t each = (int32_t)(box->i1 - box->i0), strip = w->kernels->strip;
    const size_t row_bytes = (size_t)job->g.q_ld * (size_t)w->kernels->element;
    char *at = (char *)w->q + (size_t)to * row_bytes;
    for (int32_t r = r0, own; r < r0 + n; r += own, at += (size_t)own * row_bytes) {
        const cpu_rows q = cpu_rows_of(job->run->q, w->item.b, head_of(w, r));
        own = each - r % each < r0 + n - r ? each - r % each : r0 + n - r;
        w->kernels->pack_rows(&q, index_of(w, r), own, own, job->g.q_ld, at);
    }
    if (w->kernels->stream && n % strip) /* no rows of chance: they might raise flags */
        memset(at, 0, (size_t)(strip - n % strip) * row_bytes);
}

/* ---- strips ---- */

/* Places a state on row r; computes there what depends on no key. */
static void stand_on(const cpu_worker *w, eval_state *state, int64_t *head, int32_t r)
{
    if (*head != head_of(w, r)) {
        *head = head_of(w, r);
        eval_head(state, (int32_t)w->item.b, (int32_t)*head);
    }
    eval_row(state, (int32_t)index_of(w, r) + w->at.q_offset);
}

static void apply_mask(cpu_worker *w, const item_tile *t, int32_t r, float *s)
{
    uint8_t live[CPU_BLOCK_KEYS];
    const cpu_box row = {w->item.b, head_of(w, r), 0, index_of(w, r), 0, t->j0, t->j0 + t->n};
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
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0);
    if (w->jit_head == head_of(w, r))
        return;
    w->jit_head = head_of(w, r);
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

static float probability(const cpu_worker *w, int32_t i, int32_t j)
{
    const float *row = w->s + (int64_t)i * CPU_BLOCK_KEYS;
    const uint16_t *parts = (const uint16_t *)(const void *)row;
    if (w->kernels->is_split)
        return bf16_to_f32(parts[j / 32 * 64 + j % 32])
               + bf16_to_f32(parts[j / 32 * 64 + 32 + j % 32]);
    return w->kernels->element == 4 ? row[j] : bf16_to_f32(parts[j]);
}

static void scale_rows(cpu_worker *w, int32_t r0, int32_t n_rows)
{
    const int32_t o_ld = w->job->g.o_ld;
    for (int32_t i = 0; i < n_rows; i++)
        for (int32_t d = 0; d < o_ld; d++)
            w->o[(int64_t)(r0 + i) * o_ld + d] *= w->alpha[i];
}

/* O += P V where V holds infinities or NaN: keys that are dead in a row must not touch it, not
 * even by 0 * NaN. Keys from `first` on; live [n_rows][CPU_BLOCK_KEYS]. */
static void careful_values(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows,
                           int32_t first)
{
    const saccade_tensor *v = w->job->run->v;
    const int32_t o_ld = w->job->g.o_ld;
    const int64_t E = v->shape[3];
    const cpu_rows from = cpu_rows_of(v, w->item.b, w->item.g);
    for (int32_t j = first; j < t->n; j++) {
        convert_to_f32(from.dtype, from.base + (t->j0 + j) * from.stride, w->row, E);
        for (int32_t i = 0; i < n_rows; i++) {
            const float p = probability(w, i, j);
            for (int64_t d = 0; d < E && w->live[i * CPU_BLOCK_KEYS + j]; d++)
                w->o[(int64_t)(r0 + i) * o_ld + d] += p * w->row[d];
        }
    }
}

static void note_live(cpu_worker *w, int32_t n_rows)
{
    for (int32_t n = 0; n < n_rows * CPU_BLOCK_KEYS; n++)
        w->live[n] = w->s[n] != -INFINITY;
}

/* The part of a tile that a strip of rows needs: whole panels from the first live key on, no
 * key past the last. 0 when there is none. */
static int narrow(const cpu_worker *w, int32_t r0, int32_t n_rows, item_tile *t)
{
    if (t->is_full || !item_has_limits(w))
        return 1;
    cpu_limits l = w->limits;
    cpu_limit_rows(&l, r0, n_rows);
    if (cpu_cover_of_limits(&l, t->j0, t->j0 + t->n) == CPU_EMPTY)
        return 0;
    const int64_t before = l.any_first > t->j0 ? l.any_first - t->j0 : 0;
    const int64_t after = l.any_past - t->j0 < t->n ? l.any_past - t->j0 : t->n;
    t->first = (int32_t)(before / JIT_GROUP * JIT_GROUP);
    t->j0 += t->first;
    t->n = (int32_t)after - t->first;
    t->is_full = cpu_cover_of_limits(&l, t->j0, t->j0 + t->n) == CPU_FULL;
    return 1;
}

void item_run_strip(cpu_worker *w, item_tile t, int32_t r0, int32_t n_rows)
{
    const cpu_kernels *k = w->kernels;
    const cpu_geometry *g = &w->job->g;
    if (!narrow(w, r0, n_rows, &t))
        return;
    const int32_t n = (t.n + 15) / 16 * 16, D = (int32_t)w->job->run->q->shape[3];
    const size_t element = (size_t)k->element, key_pitch = g->k_bytes / CPU_BLOCK_KEYS;
    const char *q = (const char *)w->q + (size_t)r0 * (size_t)g->q_ld * element;
    float *o = w->o + (int64_t)r0 * g->o_ld;
    k->scores(q, g->q_ld, (const char *)t.k + (size_t)t.first * key_pitch, D, n_rows,
              (n + k->panel - 1) / k->panel, item_scale_of(w, &t), w->s, CPU_BLOCK_KEYS);
    const float *most = item_change_scores(w, &t, r0, n_rows);
    if (t.is_wild)
        note_live(w, n_rows);
    k->softmax(w->s, CPU_BLOCK_KEYS, n_rows, n, most, w->m + r0, w->l + r0, w->alpha);
    if (t.is_wild) {
        scale_rows(w, r0, n_rows);
        careful_values(w, &t, r0, n_rows, 0);
        return;
    }
    const size_t columns = (size_t)(k->is_by_keys ? g->o_ld : k->panel);
    k->values(w->s, CPU_BLOCK_KEYS, (const char *)t.v + (size_t)t.first * columns * element, n,
              CPU_BLOCK_KEYS, n_rows, g->o_ld / k->panel, w->alpha, o, g->o_ld);
}

/* Scores of a tile whose few rows read K where it lies. */
static const float *direct_scores(cpu_worker *w, const item_tile *t, cpu_asking *next)
{
    const cpu_rows k = cpu_rows_of(w->job->run->k, w->item.b, w->item.g);
    w->kernels->dots(w->q, w->job->g.q_ld, &k, t->j0, t->n, w->rows, item_scale_of(w, t), w->s,
                     CPU_BLOCK_KEYS, next);
    return item_change_scores(w, t, 0, w->rows);
}

/* Which keys are live, when it turns out to matter only after the scores have become P: they
 * are made again, in the memory that packed keys would have. */
static void find_live_late(cpu_worker *w, const item_tile *t)
{
    float *p = w->s;
    cpu_asking nothing = {0};
    w->s = w->k;
    direct_scores(w, t, &nothing);
    note_live(w, w->rows);
    w->s = p;
}

/* Softmax of a tile, two rows at a time, asking for lines between. */
static void direct_softmax(cpu_worker *w, const item_tile *t, const float *most,
                           cpu_asking *next)
{
    const int32_t n = (t->n + 15) / 16 * 16, share = asking_share(next, (w->rows + 1) / 2);
    for (int32_t r = 0; r < w->rows; r += 2) {
        const int32_t n_rows = r + 1 < w->rows ? 2 : 1;
        ask_lines(next, share);
        w->kernels->softmax(w->s + (int64_t)r * CPU_BLOCK_KEYS, CPU_BLOCK_KEYS, n_rows, n,
                            most ? most + r : NULL, w->m + r, w->l + r, w->alpha + r);
    }
}

/* The tile's V is asked for while its K is used, and the next K while V is, a sixth of it
 * during softmax: a phase that asks for nothing leaves memory idle. */
static void run_direct(cpu_worker *w, const item_tile *t)
{
    const cpu_kernels *kernels = w->kernels;
    const cpu_rows k = cpu_rows_of(w->job->run->k, w->item.b, w->item.g);
    const cpu_rows v = cpu_rows_of(w->job->run->v, w->item.b, w->item.g);
    enum { EARLY = CPU_BLOCK_KEYS / 6 };
    cpu_asking next_v = asking_begin(&v, t->j0, t->n);
    cpu_asking early_k = asking_begin(&k, t->j0 + t->n, EARLY);
    cpu_asking next_k = asking_begin(&k, t->j0 + t->n + EARLY, CPU_BLOCK_KEYS - EARLY);
    direct_softmax(w, t, direct_scores(w, t, &next_v), &early_k);
    const int32_t done = kernels->sums(w->s, CPU_BLOCK_KEYS, &v, t->j0, t->n, w->rows, w->alpha,
                                       w->o, w->job->g.o_ld, &next_k);
    if (done == t->n)
        return;
    find_live_late(w, t);
    careful_values(w, t, 0, w->rows, done);
}

/* ---- tiles ---- */

void item_find_operands(cpu_worker *w, item_tile *t)
{
    const cpu_job *job = w->job;
    const int64_t block = t->j0 / CPU_BLOCK_KEYS;
    if (job->g.is_shared && w->kernels == ((const cpu_state *)job->plan->state)->kernels) {
        const cpu_packed packed = item_packed(w, block, block + 1);
        t->k = packed.k;
        t->v = packed.v;
        t->is_wild = *packed.wild;
        return;
    }
    const cpu_rows k = cpu_rows_of(job->run->k, w->item.b, w->item.g);
    const cpu_rows v = cpu_rows_of(job->run->v, w->item.b, w->item.g);
    w->kernels->pack_keys(&k, t->j0, t->n, CPU_BLOCK_KEYS, w->k);
    t->is_wild = w->kernels->pack_values(&v, t->j0, t->n, CPU_BLOCK_KEYS, w->v);
    t->k = w->k;
    t->v = w->v;
}

/* Rows [r0, r0 + rows) of the item, whole strips of it. */
void item_run_tile(cpu_worker *w, int64_t j0, int64_t j1, int32_t r0, int32_t rows)
{
    const int32_t strip = w->kernels->strip;
    cpu_box box = w->item.box;
    box.j0 = j0;
    box.j1 = j1;
    const cpu_cover cover = item_has_limits(w) ? cpu_cover_of_limits(&w->limits, j0, j1)
                                               : cpu_cover_of(&w->job->live, &box, w->ranges);
    if (cover == CPU_EMPTY)
        return;
    item_tile t = {.j0 = j0, .n = (int32_t)(j1 - j0), .is_full = cover == CPU_FULL};
    if (w->job->g.is_direct) {
        run_direct(w, &t);
        return;
    }
    item_find_operands(w, &t);
    for (int32_t r = r0; r < r0 + rows; r += strip)
        item_run_strip(w, t, r, r0 + rows - r < strip ? r0 + rows - r : strip);
}

/* ---- the keys of an item ---- */

static void run_keys(cpu_worker *w, int64_t begin, int64_t end)
{
    if (item_can_stream(w)) {
        item_run_streams(w, begin, end);
        return;
    }
    item_pack_queries(w, 0, w->rows, 0);
    item_clear_rows(w, 0, w->rows);
    const int64_t first = begin / CPU_BLOCK_KEYS, past = (end - 1) / CPU_BLOCK_KEYS + 1;
    if (w->job->is_local && begin < end && past - first <= w->job->g.own_blocks)
        item_packed(w, first, past); /* those that the next item needs too stay */
    for (int64_t j = begin; j < end; j += CPU_BLOCK_KEYS)
        item_run_tile(w, j, j + CPU_BLOCK_KEYS < end ? j + CPU_BLOCK_KEYS : end, 0, w->rows);
}

/* ---- results ---- */

static void store_stat(const saccade_tensor *t, int64_t b, int64_t h, int64_t i, float value)
{
    if (t)
        ((float *)t->data)[b * t->stride[0] + h * t->stride[1] + i * t->stride[2]] = value;
}

/* m log2 e as the exponents of P had it: what is rounded there may be 1e-4 for m of thousands,
 * and parts of a row must not differ by that. */
static double exponent_of(const cpu_worker *w, float m)
{
    const int is_fused = w->kernels->is_fused && fabsf(m) < CPU_FUSED_MOST;
    return is_fused ? (double)(m * (float)M_LOG2E) : (double)m * M_LOG2E;
}

static void store_stats(const cpu_worker *w, int32_t r)
{
    const plan_run *run = w->job->run;
    const int64_t b = w->item.b, h = head_of(w, r), i = index_of(w, r);
    const float l = w->l[r], m = isnan(l) ? NAN : w->m[r];
    if (run->lse)
        store_stat(run->lse, b, h, i,
                   l == 0 ? -INFINITY : (float)(exponent_of(w, m) * M_LN2 + log((double)l)));
    store_stat(run->row_max, b, h, i, m);
}

char *item_out_of(const cpu_worker *w, int32_t r)
{
    const saccade_tensor *out = w->job->run->out;
    const int64_t at = w->item.b * out->stride[0] + head_of(w, r) * out->stride[1]
                       + index_of(w, r) * out->stride[2];
    return (char *)out->data + at * (int64_t)saccade_dtype_bytes(out->dtype);
}

/* A row with no live key is 0 and -INF; one with a NaN or +INF score has l = NaN. */
static void store_rows(const cpu_worker *w, int32_t r, int32_t n)
{
    const saccade_tensor *out = w->job->run->out;
    const int32_t o_ld = w->job->g.o_ld;
    w->kernels->store_rows(w->o + (int64_t)r * o_ld, o_ld, w->l + r, n, out->dtype,
                           (int32_t)out->shape[3], item_out_of(w, r),
                           out->stride[2] * (int64_t)saccade_dtype_bytes(out->dtype));
}

/* All but the strips that are stored already. */
static void store_item(const cpu_worker *w)
{
    const plan_run *run = w->job->run;
    const int32_t head = (int32_t)(w->item.box.i1 - w->item.box.i0);
    const int32_t each = w->stored ? w->kernels->strip : head;
    for (int32_t r = 0; r < w->rows; r += each)
        if (!w->stored || !(w->stored >> (r / each) & 1))
            store_rows(w, r, w->rows - r < each ? w->rows - r : each);
    for (int32_t r = 0; (run->lse || run->row_max) && r < w->rows; r++)
        store_stats(w, r);
}

/* (m, l) of all rows, then O, of one split item. */
static float *partial_of(const cpu_job *job, int64_t index)
{
    return (float *)(void *)(job->memory + job->g.partial_off
                             + (size_t)index * job->g.partial_bytes);
}

static void keep_partial(const cpu_worker *w, int64_t index)
{
    float *to = partial_of(w->job, index);
    memcpy(to, w->m, (size_t)w->rows * sizeof *to);
    memcpy(to + w->rows, w->l, (size_t)w->rows * sizeof *to);
    memcpy(to + 2 * w->rows, w->o, (size_t)w->rows * (size_t)w->job->g.o_ld * sizeof *to);
}

/* What add_part takes nothing of: O is not looked at. */
static void keep_nothing(const cpu_worker *w, int64_t index)
{
    float *to = partial_of(w->job, index);
    for (int32_t r = 0; r < w->rows; r++) {
        to[r] = -INFINITY;
        to[w->rows + r] = 0;
    }
}

/* Keys of the item that some row may see. */
static void find_keys(cpu_worker *w, int64_t *begin, int64_t *end)
{
    const cpu_box *box = &w->item.box;
    *begin = box->j0;
    *end = box->j1 < w->at.kv_len ? box->j1 : w->at.kv_len;
    if (!item_has_limits(w))
        return;
    find_limits(w);
    const int64_t first = w->limits.any_first / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
    *begin = first > *begin ? first : *begin;
    *end = w->limits.any_past < *end ? w->limits.any_past : *end;
}

static void run_item(cpu_worker *w, int64_t begin, int64_t end)
{
    if (w->kernels->begin)
        w->kernels->begin();
    run_keys(w, begin, end);
    if (w->kernels->end)
        w->kernels->end();
}

static int has_nan(const cpu_worker *w)
{
    for (int32_t r = 0; r < w->rows; r++)
        if (isnan(w->l[r]))
            return 1;
    return 0;
}

void cpu_run_item(void *arg, int64_t at, int thread)
{
    cpu_job *job = arg;
    const int32_t *order = (const int32_t *)(const void *)(job->memory + job->g.order_off);
    const int64_t index = order[at];
    const cpu_item item = cpu_item_of(job, index);
    cpu_worker *w = worker_of(job, thread);
    const cpu_kernels *quick = ((const cpu_state *)job->plan->state)->kernels;
    const int64_t rows = (item.box.h1 - item.box.h0) * (item.box.i1 - item.box.i0);
    const int is_few = job->g.is_direct && rows <= quick->careful_rows;
    int64_t begin, end;
    stand_item(w, &item);
    find_keys(w, &begin, &end);
    if (job->g.splits > 1 && begin >= end) {
        keep_nothing(w, index);
        return;
    }
    w->kernels = is_few ? quick->careful : quick;
    run_item(w, begin, end);
    if (w->kernels->careful && has_nan(w)) {
        w->kernels = quick->careful;
        stand_item(w, &item);
        run_item(w, begin, end);
    }
    if (job->g.splits > 1) {
        keep_partial(w, index);
        return;
    }
    store_item(w);
}

/* Weight of a part whose maximum is m in a row whose maximum is all. */
static float part_weight(const cpu_worker *w, float m, float all)
{
    return m == -INFINITY ? 0 : (float)exp2(exponent_of(w, m) - exponent_of(w, all));
}

static void add_part(cpu_worker *w, const float *part, int32_t r)
{
    const int32_t o_ld = w->job->g.o_ld;
    const float *po = part + 2 * w->rows + (int64_t)r * o_ld;
    float *o = w->o + (int64_t)r * o_ld;
    const float m = part[r], l = part[w->rows + r];
    if (m == -INFINITY && l == 0)
        return; /* no live key */
    const float all = isnan(l) || m > w->m[r] ? m : w->m[r];
    const float keep = part_weight(w, w->m[r], all), take = part_weight(w, m, all);
    for (int32_t d = 0; d < o_ld; d++)
        o[d] = (keep == 0 ? 0 : keep * o[d]) + (take == 0 ? 0 : take * po[d]);
    w->l[r] = (keep == 0 ? 0 : keep * w->l[r]) + (take == 0 ? 0 : take * l);
    w->m[r] = all;
}

void cpu_merge_item(void *arg, int64_t at, int thread)
{
    cpu_job *job = arg;
    const cpu_item item = cpu_item_of(job, at * job->g.splits);
    cpu_worker *w = worker_of(job, thread);
    stand_item(w, &item);
    item_clear_rows(w, 0, w->rows);
    for (int64_t n = 0; n < job->g.splits; n++)
        for (int32_t r = 0; r < w->rows; r++)
            add_part(w, partial_of(job, at * job->g.splits + n), r);
    store_item(w);
}
