/* Backward cases: data, truth, plain gradients and comparison. */
#include "support/backward_case.h"

#include "base/convert.h"
#include "cpu/backward/backward.h"
#include "ref/rows.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { GUARD = 64 };

static float noise(uint64_t *state)
{
    float sum = 0;
    for (int n = 0; n < 4; n++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(*state >> 40) * 0x1p-24f - 0.5f;
    }
    return 1.7f * sum;
}

/* ---- tensors ---- */

static case_tensor tensor_of(saccade_dtype dtype, const int64_t shape[4], int32_t rank, int pad)
{
    case_tensor made = {.t = {.dtype = dtype, .rank = rank}};
    const size_t each = saccade_dtype_bytes(dtype);
    int64_t stride = 1;
    for (int32_t d = rank - 1; d >= 0; d--) {
        made.t.shape[d] = shape[d];
        made.t.stride[d] = stride;
        stride = stride * shape[d] + (d == 3 ? pad : 0);
    }
    made.bytes = ((size_t)stride + 2 * GUARD) * each;
    made.memory = malloc(made.bytes);
    assert_non_null(made.memory);
    memset(made.memory, 0xff, made.bytes);
    made.t.data = (char *)made.memory + GUARD * each;
    return made;
}

static char *place(const saccade_tensor *t, int64_t at)
{
    const int64_t n = t->rank == 4 ? t->shape[3] : 1, d = at % n, row = at / n;
    const int64_t i = row % t->shape[2], h = row / t->shape[2] % t->shape[1];
    const int64_t b = row / t->shape[2] / t->shape[1];
    return (char *)t->data
           + (b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + d)
                 * (int64_t)saccade_dtype_bytes(t->dtype);
}

static void put(const saccade_tensor *t, int64_t at, double x)
{
    const float narrow = (float)x;
    convert_from_f32(t->dtype, &narrow, place(t, at), 1);
}

static double get(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype, place(t, at));
}

static int64_t count(const saccade_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * (t->rank == 4 ? t->shape[3] : 1);
}

static void shape_of(const backward_case_run *r, int which, int64_t shape[4])
{
    const saccade_sizes *s = &r->f.sizes;
    shape[0] = s->B;
    shape[1] = which == BACKWARD_DQ ? s->H : s->Hkv;
    shape[2] = which == BACKWARD_DQ ? s->Q : s->KV;
    shape[3] = which == BACKWARD_DV ? s->Dv : s->D;
}

static double *doubles(const saccade_tensor *t)
{
    const int64_t n = count(t);
    double *all = malloc((size_t)n * sizeof *all);
    assert_non_null(all);
    for (int64_t i = 0; i < n; i++)
        all[i] = get(t, i);
    return all;
}

/* ---- a run through the plan's own derivations ---- */

typedef struct resolved {
    saccade_tensor score[8], mask[8];
    plan_run run;
} resolved;

static void resolve(const backward_case_run *r, const saccade_plan *plan, resolved *to)
{
    saccade_error err = {0};
    const case_run *f = &r->f;
    const mod_fn *fns[2] = {plan->problem.score, plan->problem.mask};
    saccade_tensor *tensors[2] = {to->score, to->mask};
    to->run = (plan_run){.sizes = f->sizes,
                         .q = &f->q.t,
                         .k = &f->k.t,
                         .v = &f->v.t,
                         .out = &r->out.t,
                         .lse = &r->lse.t,
                         .positions = case_positions(&f->at)};
    for (int m = 0; m < 2; m++) {
        saccade_binding mine[8];
        int32_t n = 0;
        for (uint32_t i = 0; fns[m] && i < fns[m]->n_captures; i++)
            for (int32_t j = 0; j < f->args.n_bindings; j++)
                if (strcmp(f->args.bindings[j].name, fns[m]->captures[i].name) == 0)
                    mine[n++] = f->args.bindings[j];
        if (fns[m])
            assert_int_equal(eval_resolve(fns[m], mine, n, 1, tensors[m], &err), SACCADE_OK);
    }
    eval_sizes(&f->sizes, to->run.score_env.size);
    eval_sizes(&f->sizes, to->run.mask_env.size);
    to->run.score_env.tensors = to->score;
    to->run.mask_env.tensors = to->mask;
}

/* ---- plain gradients ---- */

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

static void row_of(const saccade_tensor *t, int64_t b, int64_t h, int64_t i, float *to)
{
    const int64_t at = ((b * t->shape[1] + h) * t->shape[2] + i) * t->shape[3];
    convert_to_f32(t->dtype, place(t, at), to, t->shape[3]);
}

static void add_scaled(float *to, float x, const float *row, int64_t n)
{
    for (int64_t d = 0; d < n; d++)
        to[d] += x * row[d];
}

enum { READS = 256 };

typedef struct plain_job {
    const backward_case_run *r;
    const plan_problem *problem;
    ref_inputs in;
    const mod_fn *all; /* value and derivatives of the score mod, or NULL */
    uint32_t n_reads, reads[READS], results[READS + 2];
    float *sum[BACKWARD_GRADIENTS];
    float *captured[8];
    double *squares[8]; /* of the terms of each element */
} plain_job;

/* Score and derivative at a raw score. */
static void change(const plain_job *job, const ref_row *row, int64_t j, float *s, float *slope)
{
    eval_point point = ref_point(row, j);
    *slope = 1;
    if (!job->all)
        return;
    mod_fn fn = *job->all;
    point.score = (double)*s;
    fn.result = job->results[1];
    *slope = (float)eval_scalar(&fn, &job->in.run->score_env, &point, row->values, NULL);
    fn.result = job->results[0];
    *s = (float)eval_scalar(&fn, &job->in.run->score_env, &point, row->values, NULL);
}

/* dX of key j to whatever its score reads. */
static void add_reads(const plain_job *job, const ref_row *row, int64_t j, float s, float dx)
{
    const mod_fn *score = job->problem->score;
    const eval_env *env = &job->in.run->score_env;
    eval_point point = ref_point(row, j);
    point.score = (double)s;
    for (uint32_t n = 0; n < job->n_reads; n++) {
        const mod_node *load = &score->nodes[job->reads[n]];
        const saccade_tensor *t = &env->tensors[load->imm.i];
        mod_fn fn = *score;
        int64_t at = 0;
        for (int32_t d = 0; d < t->rank; d++) {
            fn.result = score->args[load->args + (uint32_t)d];
            const double x = eval_scalar(&fn, env, &point, row->values, NULL);
            const double last = (double)(t->shape[d] - 1);
            at = at * t->shape[d] + (int64_t)(x < 0 ? 0 : x > last ? last : x);
        }
        fn = *job->all;
        fn.result = job->results[2 + n];
        const float term = dx * (float)eval_scalar(&fn, env, &point, row->values, NULL);
        job->captured[load->imm.i][at] += term;
        job->squares[load->imm.i][at] += (double)term * (double)term;
    }
}

static void plain_row(const plain_job *job, ref_row *row)
{
    const backward_case_run *r = job->r;
    const saccade_sizes *s = &r->f.sizes;
    const saccade_dtype dtype = r->f.dtype;
    const int64_t b = row->b, h = row->h, i = row->i, g = h / job->problem->group;
    const int64_t at = (b * s->H + h) * s->Q + i;
    float q[512], k[512], v[512], d_out[512], out[512];
    row_of(&r->f.q.t, b, h, i, q);
    row_of(&r->d_out.t, b, h, i, d_out);
    row_of(&r->out.t, b, h, i, out);
    float delta = dot(d_out, out, s->Dv);
    if (r->d_lse.memory)
        delta -= (float)get(&r->d_lse.t, at);
    for (int64_t j = 0; j < s->KV; j++) {
        const int64_t key = (b * s->Hkv + g) * s->KV + j;
        float slope;
        if (!row->live[j])
            continue;
        row_of(&r->f.k.t, b, g, j, k);
        row_of(&r->f.v.t, b, g, j, v);
        const float raw = (float)job->problem->scale * dot(q, k, s->D);
        float x = raw;
        change(job, row, j, &x, &slope);
        const float p = expf(x - (float)get(&r->lse.t, at));
        float dx = p * (dot(d_out, v, s->Dv) - delta);
        add_reads(job, row, j, raw, dx);
        dx *= slope;
        add_scaled(job->sum[BACKWARD_DV] + key * s->Dv, rounded(dtype, p), d_out, s->Dv);
        add_scaled(job->sum[BACKWARD_DK] + key * s->D, rounded(dtype, dx), q, s->D);
        add_scaled(job->sum[BACKWARD_DQ] + at * s->D, rounded(dtype, dx), k, s->D);
    }
}

static double ulp_at(saccade_dtype dtype, double x)
{
    const int bits = dtype == SACCADE_BF16 ? 8 : dtype == SACCADE_F16 ? 11 : 24;
    return x == 0 ? 0 : ldexp(1, ilogb(x) - bits + 1);
}

/* 2 max|plain - gold| + 2 ulp at max|gold|. */
static double bound_of(const double *gold, const float *plain, int64_t n, float scale,
                       saccade_dtype dtype)
{
    double error = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = fabs((double)rounded(dtype, scale * plain[i]) - gold[i]);
        if (isfinite(gold[i]) && fabs(gold[i]) > most)
            most = fabs(gold[i]);
        if (isfinite(e) && e > error)
            error = e;
    }
    return 2 * error + 2 * ulp_at(dtype, most);
}

static void find_plain_reads(plain_job *job, uint32_t *nodes)
{
    const mod_fn *score = job->problem->score;
    for (uint32_t i = 0; i < score->n_nodes; i++) {
        const mod_node *node = &score->nodes[i];
        if ((node->op == OP_LOAD || node->op == OP_SCALAR) && node->type == MOD_FLOAT
            && job->r->captured[node->imm.i]) {
            assert_true(job->n_reads < READS);
            job->reads[job->n_reads] = nodes[job->n_reads] = i;
            job->n_reads++;
        }
    }
    for (int c = 0; c < 8; c++)
        if (job->r->captured[c]) {
            job->captured[c] = calloc((size_t)job->r->captured_count[c], sizeof(float));
            job->squares[c] = calloc((size_t)job->r->captured_count[c], sizeof(double));
            assert_non_null(job->captured[c]);
            assert_non_null(job->squares[c]);
        }
}

/* Sums of many terms into few numbers may also differ by 4 eps of the dtype times the root of
 * the terms' squares. */
static void bound_captures(backward_case_run *r, plain_job *job)
{
    const saccade_dtype dtype = r->f.dtype;
    const double eps = dtype == SACCADE_BF16  ? 0x1p-8
                       : dtype == SACCADE_F16 ? 0x1p-11
                                              : 0x1p-24;
    for (int c = 0; c < 8; c++) {
        double most = 0;
        if (!r->captured[c])
            continue;
        r->captured_bound[c] =
            bound_of(r->captured[c], job->captured[c], r->captured_count[c], 1, SACCADE_F32);
        for (int64_t i = 0; i < r->captured_count[c]; i++)
            most = job->squares[c][i] > most ? job->squares[c][i] : most;
        r->captured_bound[c] += 4 * eps * sqrt(most);
        free(job->captured[c]);
        free(job->squares[c]);
    }
}

static void solve_plain(backward_case_run *r, const plan_problem *problem, const plan_run *run)
{
    const saccade_sizes *s = &r->f.sizes;
    saccade_error err = {0};
    plain_job job = {.r = r, .problem = problem};
    arena arena;
    arena_init(&arena);
    size_t n_values = ref_most_values(problem);
    if (problem->score) {
        uint32_t wanted[READS + 1] = {pass_find_score(problem->score)};
        find_plain_reads(&job, wanted + 1);
        assert_int_equal(pass_value_and_gradient(problem->score, wanted, 1 + job.n_reads,
                                                 &arena, &job.all, job.results, &err),
                         SACCADE_OK);
        n_values += ref_score_values(problem, job.all);
    }
    void *memory = malloc(ref_widened_bytes(s) + ref_row_bytes(s, n_values));
    assert_non_null(memory);
    job.in = ref_widen(problem, run, 1, memory);
    ref_row row = ref_row_in(s, n_values, (char *)memory + ref_widened_bytes(s));
    int64_t n[BACKWARD_GRADIENTS], shape[4];
    for (int which = 0; which < BACKWARD_GRADIENTS; which++) {
        shape_of(r, which, shape);
        n[which] = shape[0] * shape[1] * shape[2] * shape[3];
        job.sum[which] = calloc((size_t)n[which], sizeof(float));
        assert_non_null(job.sum[which]);
    }
    for (int64_t at = 0; at < s->B * s->H * s->Q; at++) {
        ref_compute_row(&job.in, at / s->Q / s->H, at / s->Q % s->H, at % s->Q, &row);
        plain_row(&job, &row);
    }
    for (int which = 0; which < BACKWARD_GRADIENTS; which++) {
        const float scale = which == BACKWARD_DV ? 1 : (float)problem->scale;
        r->bound[which] = bound_of(r->gold[which], job.sum[which], n[which], scale, r->f.dtype);
        free(job.sum[which]);
    }
    bound_captures(r, &job);
    free(memory);
    arena_free(&arena);
}

/* ---- cases ---- */

static void solve_captures(backward_case_run *r, const plan_problem *problem,
                           const plan_run *run, const double *d_out, const double *d_lse)
{
    saccade_error err = {0};
    const mod_fn *score = problem->score;
    for (uint32_t c = 0; r->c.has_captures && c < score->n_captures; c++) {
        const saccade_tensor *t = &run->score_env.tensors[c];
        if (score->captures[c].type != MOD_FLOAT)
            continue;
        r->captured_count[c] = 1;
        for (int32_t d = 0; d < t->rank; d++)
            r->captured_count[c] *= t->shape[d];
        free(r->captured[c]);
        r->captured[c] = calloc((size_t)r->captured_count[c], sizeof(double));
        assert_non_null(r->captured[c]);
    }
    assert_int_equal(ref_backward_captures(problem, run, d_out, d_lse, r->captured, &err),
                     SACCADE_OK);
}

void backward_case_solve(backward_case_run *r)
{
    saccade_error err = {0};
    saccade_plan *plan = case_plan(&r->f, "portable", 1);
    resolved with;
    resolve(r, plan, &with);
    double *d_out = doubles(&r->d_out.t);
    double *d_lse = r->d_lse.memory ? doubles(&r->d_lse.t) : NULL;
    assert_int_equal(ref_backward(&plan->problem, &with.run, d_out, d_lse, r->gold[BACKWARD_DQ],
                                  r->gold[BACKWARD_DK], r->gold[BACKWARD_DV], &err),
                     SACCADE_OK);
    solve_captures(r, &plan->problem, &with.run, d_out, d_lse);
    solve_plain(r, &plan->problem, &with.run);
    free(d_out);
    free(d_lse);
    saccade_plan_destroy(plan);
}

void backward_case_make(const backward_case *c, backward_case_run *r)
{
    uint64_t seed = c->forward.seed + 77;
    memset(r, 0, sizeof *r);
    r->c = *c;
    case_make(&c->forward, &r->f);
    const saccade_sizes *s = &r->f.sizes;
    const int64_t rows[4] = {s->B, s->H, s->Q, s->Dv};
    if (c->has_f32_out) {
        r->f.problem.out_dtype = SACCADE_F32;
        r->f.problem.d_out_dtype = r->f.dtype;
    }
    r->out = tensor_of(c->has_f32_out ? SACCADE_F32 : r->f.dtype, rows, 4, c->pad);
    r->d_out = tensor_of(r->f.dtype, rows, 4, c->pad);
    r->lse = tensor_of(SACCADE_F32, rows, 3, 0);
    if (c->has_d_lse)
        r->d_lse = tensor_of(SACCADE_F32, rows, 3, 0);
    for (int64_t i = 0; i < count(&r->out.t); i++) {
        put(&r->out.t, i, r->f.out[i]);
        put(&r->d_out.t, i, (double)noise(&seed));
    }
    for (int64_t i = 0; i < count(&r->lse.t); i++) {
        put(&r->lse.t, i, r->f.lse[i]);
        if (c->has_d_lse)
            put(&r->d_lse.t, i, (double)noise(&seed));
    }
    for (int which = 0; which < BACKWARD_GRADIENTS; which++) {
        int64_t shape[4];
        shape_of(r, which, shape);
        r->gold[which] = malloc((size_t)(shape[0] * shape[1] * shape[2] * shape[3])
                                * sizeof(double));
        assert_non_null(r->gold[which]);
    }
    backward_case_solve(r);
}

void backward_case_free(backward_case_run *r)
{
    case_free(&r->f);
    free(r->out.memory);
    free(r->lse.memory);
    free(r->d_out.memory);
    free(r->d_lse.memory);
    for (int which = 0; which < BACKWARD_GRADIENTS; which++)
        free(r->gold[which]);
    for (int c = 0; c < 8; c++)
        free(r->captured[c]);
}

/* ---- comparison ---- */

static case_tensor gradient_of(const backward_case_run *r, int which)
{
    int64_t shape[4];
    shape_of(r, which, shape);
    return tensor_of(r->f.dtype, shape, 4, r->c.pad);
}

size_t backward_case_bytes(const backward_case_run *r, int which)
{
    const case_tensor made = gradient_of(r, which);
    free(made.memory);
    return made.bytes;
}

static void differ(const backward_case_run *r, const char *level, int which, int64_t at,
                   double x, double gold)
{
    const forward_case *c = &r->c.forward;
    fail_msg("%s, d%c[%lld]: got %.9g, expected %.9g within %.3g\n  --problem \"%s\" mask %s "
             "score %s layout %d data %d offsets %d %d kv_len %d seed %llu",
             level, "qkv"[which], (long long)at, x, gold, r->bound[which], c->problem,
             c->mask ? c->mask : "none", c->score ? c->score : "none", (int)c->layout,
             (int)c->data, c->q_offset, c->kv_offset, c->kv_len, (unsigned long long)c->seed);
}

/* Elements within the bound, inf and NaN exactly; then whatever else the tensor lies among. */
static void compare(const backward_case_run *r, const char *level, int which, case_tensor *made)
{
    const saccade_tensor *t = &made->t;
    const double start = r->c.is_added;
    const double most = r->bound[which] + (r->c.is_added ? 2 * ulp_at(r->f.dtype, 1) : 0);
    for (int64_t i = 0; i < count(t); i++) {
        const double x = get(t, i), gold = r->gold[which][i] + start;
        const int is_same = isnan(gold) ? isnan(x) : x == gold;
        if (!isfinite(gold) ? !is_same : !(fabs(x - gold) <= most))
            differ(r, level, which, i, x, gold);
        memset(place(t, i), 0xff, saccade_dtype_bytes(t->dtype));
    }
    for (size_t n = 0; n < made->bytes; n++)
        if (((const unsigned char *)made->memory)[n] != 0xff)
            differ(r, level, which, (int64_t)n, 0, 255);
}

/* The mask's blocks out as index tensors and in again. */
static saccade_block_mask *import(const backward_case_run *r, const saccade_block_mask *mask,
                                  const saccade_binding *bindings, int32_t n_bindings)
{
    saccade_error err = {0};
    saccade_block_indices x = {0};
    saccade_block_mask *imported;
    int32_t **const lists[4] = {&x.kv_num_blocks, &x.full_kv_num_blocks, &x.kv_indices,
                                &x.full_kv_indices};
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, &err), SACCADE_OK);
    for (int n = 0; n < 4; n++) {
        *lists[n] = calloc((size_t)(x.B * x.H * x.rows * (n < 2 ? 1 : x.columns)), 4);
        assert_non_null(*lists[n]);
    }
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, &err), SACCADE_OK);
    if (saccade_block_mask_import(NULL, &x, r->f.mask, &r->f.sizes, r->f.args.positions,
                                  bindings, n_bindings, &imported, &err)
        != SACCADE_OK)
        fail_msg("%s", err.message);
    for (int n = 0; n < 4; n++)
        free(*lists[n]);
    return imported;
}

static saccade_block_mask *block_mask_of(const backward_case_run *r, const saccade_plan *plan,
                                         backward_mask which)
{
    saccade_error err = {0};
    saccade_block_mask *mask;
    const saccade_block_mask_options odd = {
        .size = sizeof odd, .block_q = 70, .block_kv = 24};
    const saccade_binding *used = r->f.args.bindings;
    saccade_binding mine[8];
    int32_t n = 0;
    for (int32_t i = 0; i < r->f.args.n_bindings; i++)
        for (int32_t j = 0; j < saccade_mod_capture_count(r->f.mask); j++)
            if (strcmp(saccade_mod_capture(r->f.mask, j).name, used[i].name) == 0)
                mine[n++] = used[i];
    if (saccade_block_mask_create(NULL, r->f.mask, &r->f.sizes, r->f.args.positions, mine, n,
                                  which == BACKWARD_IMPORTED ? &odd : NULL, &mask, &err)
        != SACCADE_OK)
        fail_msg("%s", err.message);
    if (which == BACKWARD_IMPORTED) {
        saccade_block_mask *imported = import(r, mask, mine, n);
        saccade_block_mask_destroy(mask);
        mask = imported;
    }
    assert_int_equal(saccade_plan_prepare(plan, mask, &err), SACCADE_OK);
    assert_int_equal(cpu_backward_prepare(plan, mask, &err), SACCADE_OK);
    return mask;
}

static void compare_captures(const backward_case_run *r, const char *level, float *const *got)
{
    for (int c = 0; c < 8; c++)
        for (int64_t i = 0; r->captured[c] && i < r->captured_count[c]; i++) {
            const double x = (double)got[c][i], gold = r->captured[c][i] + r->c.is_added;
            if (!(fabs(x - gold) <= r->captured_bound[c] + r->c.is_added * 0x1p-22))
                fail_msg("%s, capture %d[%lld]: got %.9g, expected %.9g within %.3g\n"
                         "  --problem \"%s\" mask %s score %s seed %llu",
                         level, c, (long long)i, x, gold, r->captured_bound[c],
                         r->c.forward.problem, r->c.forward.mask ? r->c.forward.mask : "none",
                         r->c.forward.score, (unsigned long long)r->c.forward.seed);
        }
}

/* Contiguous f32 tensors like the captures whose gradients are wanted; a bit for each. */
static uint64_t make_captured(const backward_case_run *r, const plan_run *run, float **got,
                              saccade_tensor *tensors)
{
    uint64_t wanted = 0;
    for (int c = 0; c < 8; c++) {
        if (!r->captured[c])
            continue;
        const saccade_tensor *t = &run->score_env.tensors[c];
        got[c] = malloc((size_t)r->captured_count[c] * sizeof(float));
        assert_non_null(got[c]);
        for (int64_t i = 0; i < r->captured_count[c]; i++)
            got[c][i] = r->c.is_added ? 1 : NAN;
        tensors[c] = saccade_tensor_of(got[c], SACCADE_F32, t->rank, t->shape);
        wanted |= (uint64_t)1 << c;
    }
    return wanted;
}

void backward_case_check(const backward_case_run *r, const char *level, int32_t threads,
                         backward_mask which, char *copies[BACKWARD_GRADIENTS])
{
    saccade_error err = {0};
    saccade_plan *plan = case_plan(&r->f, level, threads);
    case_tensor gradients[BACKWARD_GRADIENTS];
    const saccade_tensor *wanted[BACKWARD_GRADIENTS];
    resolved with;
    arena arena;
    arena_init(&arena);
    resolve(r, plan, &with);
    for (int n = 0; n < BACKWARD_GRADIENTS; n++) {
        gradients[n] = gradient_of(r, n);
        wanted[n] = r->c.unwanted >> n & 1 ? NULL : &gradients[n].t;
        for (int64_t i = 0; r->c.is_added && i < count(&gradients[n].t); i++)
            put(&gradients[n].t, i, 1);
    }
    cpu_backward_plan backward = {.has_dq = wanted[BACKWARD_DQ] != NULL,
                                  .has_dk = wanted[BACKWARD_DK] != NULL,
                                  .has_dv = wanted[BACKWARD_DV] != NULL};
    float *captured[8] = {NULL};
    saccade_tensor d_captures[8];
    backward.captures = make_captured(r, &with.run, captured, d_captures);
    assert_int_equal(cpu_backward_create(plan, &arena, &backward, &err), SACCADE_OK);
    if (r->c.kernels && !(r->c.kernels->careful && backward.has_slopes))
        backward.kernels = r->c.kernels;
    const size_t bytes = cpu_backward_workspace(plan, &backward, &r->f.sizes, NULL);
    unsigned char *memory = aligned_alloc(64, bytes + 64);
    assert_non_null(memory);
    memset(memory, 0xff, bytes + 64);
    with.run.workspace = memory;
    with.run.workspace_bytes = bytes;
    saccade_block_mask *mask = which == BACKWARD_PROVEN ? NULL : block_mask_of(r, plan, which);
    with.run.block_mask = mask;
    const plan_gradients asked = {.d_out = &r->d_out.t,
                                  .d_lse = r->d_lse.memory ? &r->d_lse.t : NULL,
                                  .dq = wanted[BACKWARD_DQ],
                                  .dk = wanted[BACKWARD_DK],
                                  .dv = wanted[BACKWARD_DV],
                                  .captures = d_captures,
                                  .added = r->c.is_added ? ~0u : 0};
    if (cpu_backward(plan, &backward, &with.run, &asked, &err) != SACCADE_OK)
        fail_msg("%s: %s", r->c.forward.problem, err.message);
    for (int n = 0; n < 64; n++)
        assert_int_equal(memory[bytes + (size_t)n], 0xff);
    for (int n = 0; n < BACKWARD_GRADIENTS; n++) {
        if (copies && copies[n])
            memcpy(copies[n], gradients[n].memory, gradients[n].bytes);
        if (wanted[n])
            compare(r, level, n, &gradients[n]);
        free(gradients[n].memory);
    }
    compare_captures(r, level, captured);
    for (int c = 0; c < 8; c++)
        free(captured[c]);
    saccade_block_mask_destroy(mask);
    cpu_backward_destroy(&backward);
    arena_free(&arena);
    free(memory);
    saccade_plan_destroy(plan);
}
