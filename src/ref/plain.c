/* Plain attention in the problem's dtype, the yardstick of errors and of speed: what three
 * ordinary passes give, without any of this library's ideas.
 *     1. S = scale * Q K^T kept in f32, then score and mask in f32
 *     2. P = softmax(S) in f32, rounded to the dtype
 *     3. O = P V accumulated in f32, rounded to the dtype
 * Sums run in the order of keys and dims. One row of S is kept at a time, per thread. */
#include "ref/rows.h"

#include "base/convert.h"
#include "base/parallel.h"
#include "base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The mods compiled for the strip interpreter; what a plan of this solver keeps. */
typedef struct plain_progs {
    const eval_prog *score, *mask; /* NULL: none */
} plain_progs;

/* Heads each thread's memory; the interpreter's states and the arrays follow it. */
typedef struct plain_row {
    int64_t b, h, i;
    plan_position at;
    eval_state *score, *mask;
    float *q;      /* [D] */
    float *p;      /* [KV] */
    float *out;    /* [Dv] */
    uint8_t *live; /* [KV] */
    float m, l;    /* the sink counts in l, not in m */
    float top;     /* the larger of m and the sink */
    float sink;
    dropout_words head;
} plain_row;

typedef struct plain_job {
    const plan_problem *problem;
    const plan_run *run;
    const plain_progs *progs;
    float *k, *v; /* [B][Hkv][D][KV], [B][Hkv][KV][Dv]: widened to f32 */
    char *threads;
    size_t thread_bytes;
    float *out, *lse; /* of ref_plain; NULL: the run's tensors */
} plain_job;

static size_t round64(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static size_t state_bytes(const eval_prog *prog)
{
    return prog ? eval_state_bytes(prog) : 0;
}

static size_t thread_bytes(const plain_progs *progs, const saccade_sizes *s)
{
    return round64(sizeof(plain_row)) + round64(state_bytes(progs->score))
           + round64(state_bytes(progs->mask))
           + round64((size_t)(s->D + s->KV + s->Dv) * sizeof(float) + (size_t)s->KV);
}

static size_t widened_bytes(const saccade_sizes *s)
{
    return round64((size_t)(s->B * s->Hkv * s->KV * (s->D + s->Dv)) * sizeof(float));
}

static saccade_status compile(const plan_problem *problem, arena *arena, plain_progs *out,
                              saccade_error *err)
{
    *out = (plain_progs){NULL, NULL};
    if (problem->score)
        TRY(eval_compile(problem->score, arena, &out->score, err));
    if (problem->mask)
        TRY(eval_compile(problem->mask, arena, &out->mask, err));
    return SACCADE_OK;
}

/* ---- inputs ---- */

static plain_row *row_of(const plain_job *job, int thread)
{
    return (plain_row *)(void *)(job->threads + (size_t)thread * job->thread_bytes);
}

static void load_row(const saccade_tensor *t, int64_t b, int64_t h, int64_t n, float *to)
{
    const int64_t at = b * t->stride[0] + h * t->stride[1] + n * t->stride[2];
    convert_to_f32(t->dtype,
                   (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype), to,
                   t->shape[3]);
}

/* Keys lie side by side, so that a loop over them is one of vectors. */
static void widen_head(void *arg, int64_t item, int thread)
{
    const plain_job *job = arg;
    const saccade_sizes *s = &job->run->sizes;
    const int64_t b = item / s->Hkv, g = item % s->Hkv;
    const plan_run *run = job->run;
    const plan_problem *p = job->problem;
    const int64_t kv_len = plan_position_of(&run->positions, s->KV, b).kv_len;
    float *key = row_of(job, thread)->q;
    memset(job->k + item * s->D * s->KV, 0, (size_t)(s->D * s->KV) * sizeof *job->k);
    memset(job->v + item * s->KV * s->Dv, 0, (size_t)(s->Dv * s->KV) * sizeof *job->v);
    for (int64_t j = 0; j < kv_len; j++) {
        const plan_place at = plan_place_of(run->chunks, run->k, b, j);
        if (at.row < 0)
            continue;
        plan_load_key(run->v, run->v_scale, &p->v_groups, at.b, g, at.row,
                      job->v + (item * s->KV + j) * s->Dv);
        plan_load_key(run->k, run->k_scale, &p->k_groups, at.b, g, at.row, key);
        for (int64_t d = 0; d < s->D; d++)
            job->k[(item * s->D + d) * s->KV + j] = key[d];
    }
}

static float round_to(saccade_dtype dtype, float x)
{
    if (dtype == SACCADE_F16)
        return f16_to_f32(f16_from_f32(x));
    return dtype == SACCADE_BF16 ? bf16_to_f32(bf16_from_f32(x)) : x;
}

/* ---- the three passes of one row ---- */

/* Partial blocks ask the mask, a strip of keys at a time. */
static void find_live(const plain_job *job, plain_row *row)
{
    uint8_t asked[EVAL_STRIP];
    ref_block_row(job->run, row->b, row->h, row->i, row->at.kv_len, row->live);
    for (int64_t j0 = 0; j0 < row->at.kv_len && row->mask; j0 += EVAL_STRIP) {
        const int64_t left = row->at.kv_len - j0;
        const int32_t n = (int32_t)(left < EVAL_STRIP ? left : EVAL_STRIP);
        eval_mask(row->mask, (int32_t)j0 + row->at.kv_offset, n, asked);
        for (int32_t j = 0; j < n; j++)
            if (row->live[j0 + j] == 1)
                row->live[j0 + j] = asked[j];
    }
}

/* scale q . k of n keys, none of them where all are dead; k [D][KV]. */
static void dot_keys(const plain_job *job, const float *k, const plain_row *row, int64_t j0,
                     int64_t n)
{
    const saccade_sizes *s = &job->run->sizes;
    float *to = row->p + j0;
    memset(to, 0, (size_t)n * sizeof *to);
    uint8_t any = 0;
    for (int64_t j = 0; j < n; j++)
        any |= row->live[j0 + j];
    if (!any)
        return;
    for (int64_t d = 0; d < s->D; d++)
        for (int64_t j = 0; j < n; j++)
            to[j] += row->q[d] * k[d * s->KV + j0 + j];
    for (int64_t j = 0; j < n; j++)
        to[j] *= (float)job->problem->scale;
}

static void pass_scores(const plain_job *job, const float *k, plain_row *row)
{
    const saccade_sizes *s = &job->run->sizes;
    for (int64_t j = 0; j < s->KV; j += EVAL_STRIP)
        dot_keys(job, k, row, j, s->KV - j < EVAL_STRIP ? s->KV - j : EVAL_STRIP);
    for (int64_t j = 0; j < s->KV && row->score; j += EVAL_STRIP) {
        const int64_t left = s->KV - j;
        eval_score(row->score, (int32_t)j + row->at.kv_offset,
                   (int32_t)(left < EVAL_STRIP ? left : EVAL_STRIP), row->p + j);
    }
    for (int64_t j = 0; j < s->KV; j++)
        if (!row->live[j])
            row->p[j] = -INFINITY;
}

/* Of a weight: 1 without dropout. */
static float factor_of(const plain_job *job, const plain_row *row, int64_t j)
{
    const plan_dropout *d = &job->run->dropout;
    return d->is_on ? (float)plan_dropout_factor(
               d, row->head, (int32_t)row->i + row->at.q_offset, (int32_t)j + row->at.kv_offset)
                    : 1;
}

static void pass_softmax(const plain_job *job, plain_row *row)
{
    const int64_t KV = job->run->sizes.KV;
    row->m = -INFINITY;
    row->l = 0;
    for (int64_t j = 0; j < KV; j++) {
        row->live[j] = row->p[j] != -INFINITY;
        if (row->p[j] > row->m || isnan(row->p[j]))
            row->m = row->p[j];
    }
    if (row->m == INFINITY)
        row->m = NAN;
    row->top = row->sink > row->m || isnan(row->sink) ? row->sink : row->m;
    for (int64_t j = 0; j < KV; j++) {
        row->p[j] = row->live[j] ? expf(row->p[j] - row->top) : 0;
        row->l += row->p[j];
    }
    if (row->m != -INFINITY && row->sink != -INFINITY)
        row->l += expf(row->sink - row->top);
    for (int64_t j = 0; j < KV; j++)
        if (row->live[j])
            row->p[j] =
                round_to(job->problem->dtype, factor_of(job, row, j) * row->p[j] / row->l);
}

static void pass_values(const plain_job *job, const float *v, plain_row *row)
{
    const saccade_sizes *s = &job->run->sizes;
    memset(row->out, 0, (size_t)s->Dv * sizeof *row->out);
    for (int64_t j = 0; j < s->KV; j++) {
        if (!row->live[j])
            continue;
        for (int64_t d = 0; d < s->Dv; d++)
            row->out[d] += row->p[j] * v[j * s->Dv + d];
    }
    for (int64_t d = 0; d < s->Dv; d++)
        row->out[d] = round_to(job->problem->out_dtype, row->out[d]);
}

/* ---- rows ---- */

static void begin_row(const plain_job *job, plain_row *row)
{
    const saccade_sizes *s = &job->run->sizes;
    const plain_progs *progs = job->progs;
    char *at = (char *)row + round64(sizeof *row);
    *row = (plain_row){.live = NULL};
    if (progs->score)
        row->score = eval_begin(progs->score, &job->run->score_env, at);
    at += round64(state_bytes(progs->score));
    if (progs->mask)
        row->mask = eval_begin(progs->mask, &job->run->mask_env, at);
    at += round64(state_bytes(progs->mask));
    row->q = (float *)(void *)at;
    row->p = row->q + s->D;
    row->out = row->p + s->KV;
    row->live = (uint8_t *)(row->out + s->Dv);
}

static void place(const plain_job *job, int64_t item, plain_row *row)
{
    const saccade_sizes *s = &job->run->sizes;
    eval_state *states[2] = {row->score, row->mask};
    row->b = item / s->Q / s->H;
    row->h = item / s->Q % s->H;
    row->i = item % s->Q;
    row->at = plan_position_of(&job->run->positions, s->KV, row->b);
    row->sink = (float)plan_sink_of(job->run, row->b, row->h, row->i);
    if (job->run->dropout.is_on)
        row->head = plan_dropout_head(job->problem, job->run, row->b, row->h);
    for (int n = 0; n < 2; n++) {
        if (!states[n])
            continue;
        eval_head(states[n], (int32_t)row->b, (int32_t)row->h);
        eval_row(states[n], (int32_t)row->i + row->at.q_offset);
    }
}

static void store_stat(const saccade_tensor *t, const plain_row *row, float value)
{
    if (t)
        ref_store(t, row->b * t->stride[0] + row->h * t->stride[1] + row->i * t->stride[2],
                  (double)value);
}

static void store(const plain_job *job, int64_t item, const plain_row *row)
{
    const saccade_tensor *o = job->run->out;
    const int64_t Dv = job->run->sizes.Dv;
    const float lse = row->m == -INFINITY ? row->sink : row->top + logf(row->l);
    if (job->out) {
        memcpy(job->out + item * Dv, row->out, (size_t)Dv * sizeof *row->out);
        if (job->lse)
            job->lse[item] = lse;
        return;
    }
    const int64_t at = row->b * o->stride[0] + row->h * o->stride[1] + row->i * o->stride[2];
    for (int64_t d = 0; d < Dv; d++)
        ref_store(o, at + d, (double)row->out[d]);
    store_stat(job->run->lse, row, lse);
    store_stat(job->run->row_max, row, row->m);
}

static void run_row(void *arg, int64_t item, int thread)
{
    const plain_job *job = arg;
    const saccade_sizes *s = &job->run->sizes;
    plain_row *row = row_of(job, thread);
    place(job, item, row);
    const int64_t head = row->b * s->Hkv + row->h / job->problem->group;
    load_row(job->run->q, row->b, row->h, row->i, row->q);
    find_live(job, row);
    pass_scores(job, job->k + head * s->KV * s->D, row);
    pass_softmax(job, row);
    pass_values(job, job->v + head * s->KV * s->Dv, row);
    store(job, item, row);
}

static void run_all(plain_job *job, int threads, void *memory)
{
    const saccade_sizes *s = &job->run->sizes;
    job->k = memory;
    job->v = job->k + s->B * s->Hkv * s->KV * s->D;
    job->threads = (char *)memory + widened_bytes(s);
    job->thread_bytes = thread_bytes(job->progs, s);
    for (int n = 0; n < threads; n++)
        begin_row(job, row_of(job, n));
    par_for(s->B * s->Hkv, threads, widen_head, job);
    par_for(s->B * s->H * s->Q, threads, run_row, job);
}

/* ---- as a function, for tests ---- */

saccade_status ref_plain(const plan_problem *problem, const plan_run *run, float *out,
                         float *lse, saccade_error *err)
{
    const int threads = par_max_threads();
    saccade_status status = SACCADE_OK;
    plain_progs progs;
    void *memory = NULL;
    arena arena;
    arena_init(&arena);
    TRY_GOTO(ref_check_block_mask(run, err));
    TRY_GOTO(compile(problem, &arena, &progs, err));
    memory = aligned_alloc(64, widened_bytes(&run->sizes)
                                   + (size_t)threads * thread_bytes(&progs, &run->sizes));
    FAIL_IF_NULL_GOTO(memory);
    plain_job job = {problem, run, &progs, NULL, NULL, NULL, 0, out, lse};
    run_all(&job, threads, memory);
out:
    free(memory);
    arena_free(&arena);
    return status;
}

/* ---- as a solver ---- */

static int plain_applicable(const plan_problem *problem, int32_t level, char *why)
{
    (void)level;
    const int fits = problem->dtype != SACCADE_F64 && problem->kv_dtype != SACCADE_F64;
    if (!fits)
        strcpy(why, "plain works in f32, f16 and bf16");
    else if (problem->has_chunks && problem->gradients)
        strcpy(why, "plain makes no gradients of keys in pages or chunks");
    return fits && !(problem->has_chunks && problem->gradients);
}

static size_t backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                                 const plan_gradients *gradients)
{
    (void)plan;
    (void)sizes;
    (void)gradients;
    return 0; /* ref_plain_backward takes its memory itself */
}

static saccade_status plain_create(saccade_plan *plan, saccade_error *err)
{
    plain_progs *progs = arena_alloc(&plan->arena, sizeof *progs);
    FAIL_IF_NULL(progs);
    TRY(compile(&plan->problem, &plan->arena, progs, err));
    plan->state = progs;
    return SACCADE_OK;
}

static size_t plain_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return widened_bytes(sizes) + (size_t)plan->threads * thread_bytes(plan->state, sizes);
}

static saccade_status plain_solve(const saccade_plan *plan, const plan_run *run,
                                  saccade_error *err)
{
    plain_job job = {&plan->problem, run, plan->state, NULL, NULL, NULL, 0, NULL, NULL};
    TRY(ref_check_block_mask(run, err));
    run_all(&job, plan->threads, run->workspace);
    return SACCADE_OK;
}

static saccade_status plain_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    strbuf_printf(out,
                  "method: three passes a row: scores in f32, softmax in f32 rounded to %s,\n"
                  "  weighted values in f32 rounded to %s. No blocks are skipped.\n"
                  "workspace: K and V in f32 and KV floats a thread\n",
                  saccade_dtype_name(plan->problem.dtype),
                  saccade_dtype_name(plan->problem.out_dtype));
    return strbuf_status(out, err);
}

static void plain_destroy(saccade_plan *plan)
{
    (void)plan;
}

static const plan_solver plain = {
    .name = "plain-3-pass",
    .applicable = plain_applicable,
    .create = plain_create,
    .workspace = plain_workspace,
    .prepare = ref_prepare,
    .forward = plain_solve,
    .backward_workspace = backward_workspace,
    .backward = ref_plain_backward,
    .explain = plain_explain,
    .destroy = plain_destroy,
};
const plan_solver *const plain_solvers[] = {&plain, NULL};
