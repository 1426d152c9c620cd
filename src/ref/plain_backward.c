/* Plain gradients in the problem's dtype, the yardstick of backward's errors: from what forward
 * left, row by row and key by key, with P and dS rounded to the dtype as operands of products
 * are, and every sum in f32 in the order of rows and keys. */
#include "ref/rows.h"

#include "base/convert.h"
#include "base/status.h"
#include "plan/gradient_sums.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { READS = 512 };

typedef struct plain_gradients {
    const plan_problem *problem;
    const plan_run *run;
    const plan_gradients *given;
    ref_inputs in;
    const mod_fn *all; /* the score mod's value and derivatives, or NULL */
    uint32_t n_reads, reads[READS], results[READS + 2];
    float *dq, *dk, *dv, *captures[MOD_MAX_CAPTURES]; /* row-major */
    float *q, *k, *v, *d_out, *out;                   /* a row of each */
    float *delta;                                     /* [B][H][Q] */
    char *memory;
} plain_gradients;

static float rounded(saccade_dtype dtype, float x)
{
    uint16_t half;
    if (dtype == SACCADE_F32)
        return x;
    convert_from_f32(dtype, &x, &half, 1);
    return (float)convert_element(dtype, &half);
}

static float dot(const float *x, const float *y, int64_t n)
{
    float sum = 0;
    for (int64_t d = 0; d < n; d++)
        sum += x[d] * y[d];
    return sum;
}

static void add_scaled(float *to, float x, const float *row, int64_t n)
{
    for (int64_t d = 0; d < n; d++)
        to[d] += x * row[d];
}

static void load_row(const saccade_tensor *t, int64_t b, int64_t h, int64_t i, float *to)
{
    const int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
    convert_to_f32(t->dtype,
                   (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype), to,
                   t->shape[3]);
}

static float stat_of(const saccade_tensor *t, const ref_row *row)
{
    const int64_t at = row->b * t->stride[0] + row->h * t->stride[1] + row->i * t->stride[2];
    return ((const float *)t->data)[at];
}

/* ---- a row ---- */

static float value_at(const plain_gradients *job, const ref_row *row, int64_t j, float s,
                      uint32_t result)
{
    eval_point point = ref_point(row, j);
    mod_fn fn = *job->all;
    point.score = (double)s;
    fn.result = result;
    return (float)eval_scalar(&fn, &job->run->score_env, &point, row->values, NULL);
}

/* Row-major place of what load `node` reads. */
static int64_t place_read(const plain_gradients *job, const ref_row *row, int64_t j,
                          uint32_t node)
{
    const mod_fn *score = job->problem->score;
    const saccade_tensor *t = &job->run->score_env.tensors[score->nodes[node].imm.i];
    const eval_point point = ref_point(row, j);
    mod_fn index = *score;
    int64_t at = 0;
    for (int32_t d = 0; d < t->rank; d++) {
        index.result = score->args[score->nodes[node].args + (uint32_t)d];
        const double x = eval_scalar(&index, &job->run->score_env, &point, row->values, NULL);
        const double last = (double)(t->shape[d] - 1);
        at = at * t->shape[d] + (int64_t)(x < 0 ? 0 : x > last ? last : x);
    }
    return at;
}

static void add_key(const plain_gradients *job, const ref_row *row, int64_t j, float delta)
{
    const saccade_sizes *s = &job->run->sizes;
    const saccade_dtype dtype = job->problem->dtype;
    const int64_t g = row->h / job->problem->group;
    const int64_t key = (row->b * s->Hkv + g) * s->KV + j;
    const int64_t query = (row->b * s->H + row->h) * s->Q + row->i;
    load_row(job->run->k, row->b, g, j, job->k);
    load_row(job->run->v, row->b, g, j, job->v);
    const float raw = (float)job->problem->scale * dot(job->q, job->k, s->D);
    const float x = job->all ? value_at(job, row, j, raw, job->results[0]) : raw;
    const float p = expf(x - stat_of(job->run->lse, row));
    const float z = (float)ref_factor(&job->in, row, j);
    const float dx = p * (z * dot(job->d_out, job->v, s->Dv) - delta);
    const float slope = job->all ? value_at(job, row, j, raw, job->results[1]) : 1;
    for (uint32_t n = 0; n < job->n_reads; n++) {
        const int32_t capture = job->problem->score->nodes[job->reads[n]].imm.i;
        job->captures[capture][place_read(job, row, j, job->reads[n])] +=
            dx * value_at(job, row, j, raw, job->results[2 + n]);
    }
    add_scaled(job->dv + key * s->Dv, rounded(dtype, z * p), job->d_out, s->Dv);
    add_scaled(job->dk + key * s->D, rounded(dtype, dx * slope), job->q, s->D);
    add_scaled(job->dq + query * s->D, rounded(dtype, dx * slope), job->k, s->D);
}

static void add_row(const plain_gradients *job, const ref_row *row)
{
    const saccade_sizes *s = &job->run->sizes;
    load_row(job->run->q, row->b, row->h, row->i, job->q);
    load_row(job->given->d_out, row->b, row->h, row->i, job->d_out);
    load_row(job->run->out, row->b, row->h, row->i, job->out);
    float delta = dot(job->d_out, job->out, s->Dv);
    if (job->given->d_lse)
        delta -= stat_of(job->given->d_lse, row);
    job->delta[(row->b * s->H + row->h) * s->Q + row->i] = delta;
    for (int64_t j = 0; j < s->KV; j++)
        if (row->live[j])
            add_key(job, row, j, delta);
}

/* ---- the run ---- */

static saccade_status find_reads(plain_gradients *job, arena *arena, saccade_error *err)
{
    const mod_fn *score = job->problem->score;
    uint32_t wanted[READS + 1];
    if (!score)
        return SACCADE_OK;
    wanted[0] = pass_find_score(score);
    for (uint32_t i = 0; i < score->n_nodes; i++) {
        const mod_node *node = &score->nodes[i];
        if ((node->op != OP_LOAD && node->op != OP_SCALAR) || node->type != MOD_FLOAT
            || !(job->problem->gradient_captures >> node->imm.i & 1))
            continue;
        FAIL_AT(job->n_reads == READS, SACCADE_ELIMIT, "score", 0, 0,
                "got over %d reads of captures whose gradients are wanted", READS);
        job->reads[job->n_reads] = i;
        wanted[++job->n_reads] = i;
    }
    return pass_value_and_gradient(score, wanted, 1 + job->n_reads, arena, &job->all,
                                   job->results, err);
}

static float *take(char **at, int64_t n)
{
    float *taken = (float *)(void *)*at;
    *at += (size_t)n * sizeof *taken;
    return taken;
}

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

/* All arrays one after the other, zeroed. */
static saccade_status take_memory(plain_gradients *job, saccade_error *err)
{
    const saccade_sizes *s = &job->run->sizes;
    const int64_t rows = s->B * s->H * s->Q, keys = s->B * s->Hkv * s->KV;
    int64_t n = rows * (s->D + 1) + keys * (s->D + s->Dv) + 2 * s->D + 3 * s->Dv;
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (job->problem->gradient_captures >> c & 1)
            n += count(&job->given->captures[c]);
    char *at = job->memory = calloc((size_t)n, sizeof(float));
    FAIL_IF_NULL(at);
    job->dq = take(&at, rows * s->D);
    job->dk = take(&at, keys * s->D);
    job->dv = take(&at, keys * s->Dv);
    job->q = take(&at, s->D);
    job->k = take(&at, s->D);
    job->v = take(&at, s->Dv);
    job->d_out = take(&at, s->Dv);
    job->out = take(&at, s->Dv);
    job->delta = take(&at, rows);
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (job->problem->gradient_captures >> c & 1)
            job->captures[c] = take(&at, count(&job->given->captures[c]));
    return SACCADE_OK;
}

static void store(float *from, float scale, const saccade_tensor *to, uint32_t is_added)
{
    if (!to)
        return;
    const saccade_tensor each = saccade_tensor_of(from, SACCADE_F32, to->rank, to->shape);
    for (int64_t i = 0; i < count(to); i++)
        from[i] *= scale;
    plan_sum_repeated(&each, to, is_added != 0, 1);
}

static double sink_term(const void *of, int64_t b, int64_t h, int64_t i)
{
    const plain_gradients *job = of;
    const saccade_sizes *s = &job->run->sizes;
    const ref_row row = {.b = b, .h = h, .i = i};
    const float sink = (float)plan_sink_of(job->run, b, h, i);
    const float p = sink == -INFINITY ? 0 : expf(sink - stat_of(job->run->lse, &row));
    const float delta = job->delta[(b * s->H + h) * s->Q + i];
    return (double)(-p * (float)plan_sink_delta(job->run, job->given, b, h, i, (double)delta));
}

static void store_all(const plain_gradients *job)
{
    const plan_gradients *g = job->given;
    const float scale = (float)job->problem->scale;
    store(job->dq, scale, g->dq, g->added & SACCADE_GRADIENT_Q);
    store(job->dk, scale, g->dk, g->added & SACCADE_GRADIENT_K);
    store(job->dv, 1, g->dv, g->added & SACCADE_GRADIENT_V);
    if (g->sinks)
        plan_sum_sinks(job->run, g, sink_term, job, 1);
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (job->captures[c])
            store(job->captures[c], 1, &g->captures[c], g->added & SACCADE_GRADIENT_CAPTURES);
}

static saccade_status run_rows(plain_gradients *job, saccade_error *err)
{
    const saccade_sizes *s = &job->run->sizes;
    const size_t n_values =
        ref_most_values(job->problem) + ref_score_values(job->problem, job->all);
    char *memory = malloc(ref_widened_bytes(s) + ref_row_bytes(s, n_values));
    FAIL_IF_NULL(memory);
    job->in = ref_widen(job->problem, job->run, 1, memory);
    ref_row row = ref_row_in(s, n_values, memory + ref_widened_bytes(s));
    for (int64_t at = 0; at < s->B * s->H * s->Q; at++) {
        ref_compute_row(&job->in, at / s->Q / s->H, at / s->Q % s->H, at % s->Q, &row);
        add_row(job, &row);
    }
    free(memory);
    return SACCADE_OK;
}

saccade_status ref_plain_backward(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *gradients, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    arena arena;
    plain_gradients job = {.problem = &plan->problem, .run = run, .given = gradients};
    TRY(ref_check_block_mask(run, err));
    arena_init(&arena);
    TRY_GOTO(find_reads(&job, &arena, err));
    TRY_GOTO(take_memory(&job, err));
    TRY_GOTO(run_rows(&job, err));
    store_all(&job);
out:
    free(job.memory);
    arena_free(&arena);
    return status;
}
