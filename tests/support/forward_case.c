/* Forward cases: data, truth and comparison. */
#include "support/forward_case.h"

#include "base/convert.h"
#include "base/cpu_features.h"
#include "ref/ref.h"
#include "support/problem_case.h"
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { GUARD = 64, CAPTURE = 512 };

static uint64_t next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static float uniform(uint64_t *state)
{
    return (float)(next(state) >> 40) * 0x1p-24f;
}

static float normal(uint64_t *state)
{
    const float u = uniform(state) + 0x1p-25f, t = 6.2831853f * uniform(state);
    return sqrtf(-2 * logf(u)) * cosf(t);
}

forward_case case_in_f16(const forward_case *c, char text[96])
{
    forward_case f16 = *c;
    snprintf(text, 96, "%s", c->problem);
    strcpy(strstr(text, "bf16"), "f16");
    f16.problem = text;
    return f16;
}

/* ---- captures ---- */

const saccade_binding *case_bindings(int32_t *n)
{
    static int32_t doc[CAPTURE], W = 7;
    static float h_scale[16], rel[16 * 64], table[CAPTURE], c = 2.5f;
    static uint16_t rel_bf16[16 * 64 + 1], table_f16[CAPTURE + 1]; /* not at whole words */
    static saccade_binding all[8];
    uint64_t seed = 5;
    const int64_t line[1] = {CAPTURE}, heads[1] = {16}, square[2] = {16, 64};
    *n = 8;
    if (all[0].name)
        return all;
    for (int i = 0; i < CAPTURE; i++) {
        doc[i] = i / 37;
        table[i] = normal(&seed);
        table_f16[i + 1] = f16_from_f32(table[i]);
    }
    for (int i = 0; i < 16; i++)
        h_scale[i] = 0.5f + uniform(&seed);
    for (int i = 0; i < 16 * 64; i++) {
        rel[i] = normal(&seed);
        rel_bf16[i + 1] = bf16_from_f32(rel[i]);
    }
    all[0] = (saccade_binding){"doc", saccade_tensor_of(doc, SACCADE_I32, 1, line)};
    all[1] = (saccade_binding){"W", saccade_tensor_of(&W, SACCADE_I32, 0, NULL)};
    all[2] = (saccade_binding){"h_scale", saccade_tensor_of(h_scale, SACCADE_F32, 1, heads)};
    all[3] = (saccade_binding){"rel", saccade_tensor_of(rel, SACCADE_F32, 2, square)};
    all[4] = (saccade_binding){"table", saccade_tensor_of(table, SACCADE_F32, 1, line)};
    all[5] = (saccade_binding){"c", saccade_tensor_of(&c, SACCADE_F32, 0, NULL)};
    all[6] = (saccade_binding){"rel_bf16",
                               saccade_tensor_of(rel_bf16 + 1, SACCADE_BF16, 2, square)};
    all[7] = (saccade_binding){"table_f16",
                               saccade_tensor_of(table_f16 + 1, SACCADE_F16, 1, line)};
    return all;
}

saccade_mod *case_mod_of(saccade_kind kind, const char *text, const saccade_binding *known,
                         int32_t n_known)
{
    saccade_error err = {0};
    saccade_capture captures[8];
    saccade_mod *generic, *bound;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err) != SACCADE_OK)
        fail_msg("%s: %d:%d: %s", text, err.line, err.column, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = SACCADE_F32;
        for (int32_t j = 0; j < n_known; j++)
            if (strcmp(known[j].name, captures[i].name) == 0)
                captures[i].dtype = known[j].tensor.dtype;
    }
    if (saccade_mod_bind(generic, captures, n, &bound, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

saccade_mod *case_mod(saccade_kind kind, const char *text)
{
    int32_t n;
    const saccade_binding *all = case_bindings(&n);
    return case_mod_of(kind, text, all, n);
}

/* ---- tensors ---- */

static void lay_out(saccade_tensor *t, case_layout layout, int is_kv)
{
    const int64_t *n = t->shape;
    const int64_t pad = layout == CASE_PADDED ? 5 : 0;
    t->stride[3] = 1;
    t->stride[2] = n[3] + pad;
    t->stride[1] = n[2] * t->stride[2] + 3 * pad;
    t->stride[0] = n[1] * t->stride[1];
    if (layout == CASE_BNHD) {
        t->stride[1] = n[3];
        t->stride[2] = n[1] * n[3];
    }
    if (layout == CASE_BROADCAST && is_kv)
        t->stride[0] = t->stride[1] = 0;
}

static int64_t offset_of(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
}

/* Memory of a rank 3 or 4 tensor between guards, all bytes 0xff: NaN in every float dtype. */
static case_tensor tensor_make(saccade_dtype dtype, int32_t rank, const int64_t *shape,
                               case_layout layout, int is_kv)
{
    case_tensor made = {.t = {.dtype = dtype, .rank = rank}};
    const size_t each = saccade_dtype_bytes(dtype);
    int64_t past = 1;
    memcpy(made.t.shape, shape, (size_t)rank * sizeof *shape);
    if (rank == 3) {
        made.t.shape[3] = 1;
        lay_out(&made.t, layout == CASE_PADDED ? CASE_PADDED : CASE_BHND, 0);
        made.t.shape[3] = 0;
    } else {
        lay_out(&made.t, layout, is_kv);
    }
    for (int32_t d = 0; d < rank; d++)
        past += (shape[d] - 1) * made.t.stride[d];
    made.bytes = ((size_t)past + 2 * GUARD) * each;
    made.memory = malloc(made.bytes);
    assert_non_null(made.memory);
    memset(made.memory, 0xff, made.bytes);
    made.t.data = (char *)made.memory + GUARD * each;
    return made;
}

static void put(const saccade_tensor *t, int64_t at, float x)
{
    const int64_t each = (int64_t)saccade_dtype_bytes(t->dtype);
    convert_from_f32(t->dtype, &x, (char *)t->data + at * each, 1);
}

static double get(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* One element of row i of K (is_key), or of Q. */
static float element(const case_run *r, int is_key, int64_t i, int64_t d, uint64_t *seed)
{
    const float x = normal(seed), D = (float)r->sizes.D, side = is_key ? 1.0f : 1.0f / 64;
    switch (r->c.data) {
    case CASE_WIDE:
        return 4 * x;
    case CASE_DOMINANT:
        return is_key && i == r->sizes.KV / 3 ? 24 / sqrtf(D) : 1 + 0.1f * x;
    case CASE_ASCENDING:
        return is_key ? (float)(i % 512) / 128 + 0.01f * x : 1 + 0.01f * x;
    case CASE_LOW: /* -60 * 61 = -3660 and a little */
        return d == 0 ? (is_key ? -60 : 61 * sqrtf(D)) : side * x;
    case CASE_CLIFF:
        if (d == 0)
            return is_key ? (i < r->sizes.KV / 3 ? -61.5f : 0) : 61 * sqrtf(D);
        return side * x;
    case CASE_JUMP:
        return is_key && i >= r->sizes.KV - 70 ? 60 * x : x;
    case CASE_ZERO:
        return 0;
    default:
        return x;
    }
}

static void fill(case_run *r, case_tensor *made, int is_key, int64_t dim, uint64_t *seed)
{
    const saccade_tensor *t = &made->t;
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++)
                for (int64_t d = 0; d < dim; d++) {
                    const int is_dead = t != &r->q.t && i >= r->positions[2][b]
                                        && r->c.layout != CASE_BROADCAST;
                    const float x =
                        t == &r->v.t ? normal(seed) : element(r, is_key, i, d, seed);
                    put(t, offset_of(t, b, h, i) + d, is_dead ? NAN : x);
                }
}

static void make_data(case_run *r)
{
    const saccade_sizes *s = &r->sizes;
    const saccade_dtype kv = r->c.kv_dtype ? r->c.kv_dtype : r->dtype;
    const int64_t q[4] = {s->B, s->H, s->Q, s->D}, k[4] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[4] = {s->B, s->Hkv, s->KV, s->Dv};
    uint64_t seed = r->c.seed;
    r->q = tensor_make(r->dtype, 4, q, r->c.layout, 0);
    r->k = tensor_make(kv, 4, k, r->c.layout, 1);
    fill(r, &r->q, 0, s->D, &seed);
    fill(r, &r->k, 1, s->D, &seed);
    if (r->c.layout == CASE_LATENT) {
        r->v = (case_tensor){.t = r->k.t};
        r->v.t.shape[3] = s->Dv;
        return;
    }
    r->v = tensor_make(kv, 4, v, r->c.layout, 1);
    fill(r, &r->v, 0, s->Dv, &seed);
}

static void make_positions(case_run *r)
{
    const saccade_sizes *s = &r->sizes;
    assert_true(s->B <= 64);
    for (int32_t b = 0; b < s->B; b++) {
        const int32_t all = (int32_t)s->KV, n = r->c.kv_len;
        const int32_t len = n > 0 ? n - b : n < 0 && b % 2 == 0 ? -1 - n : all;
        r->positions[0][b] = r->c.q_offset ? r->c.q_offset + b : 0;
        r->positions[1][b] = r->c.kv_offset ? r->c.kv_offset + b : 0;
        r->positions[2][b] = len < 0 ? 0 : len;
    }
    for (int n = 0; n < 3; n++)
        r->position[n] = saccade_tensor_of(r->positions[n], SACCADE_I32, 1, &s->B);
    saccade_positions_init(&r->at);
    if (r->c.q_offset)
        r->at.q_offset = &r->position[0];
    if (r->c.kv_offset)
        r->at.kv_offset = &r->position[1];
    if (r->c.kv_len)
        r->at.kv_len = &r->position[2];
    r->args.positions = &r->at;
}

/* Only the captures that a text names may be bound. */
static void make_bindings(case_run *r)
{
    int32_t n_all, n = 0;
    const saccade_binding *all = case_bindings(&n_all);
    const saccade_mod *mods[2] = {r->score, r->mask};
    for (int32_t i = 0; i < n_all; i++) {
        int is_used = 0;
        for (int m = 0; m < 2; m++)
            for (int32_t j = 0; mods[m] && j < saccade_mod_capture_count(mods[m]); j++)
                is_used |= strcmp(saccade_mod_capture(mods[m], j).name, all[i].name) == 0;
        if (is_used)
            r->used[n++] = all[i];
    }
    r->args.bindings = r->used;
    r->args.n_bindings = n;
}

/* ---- truth ---- */

plan_positions case_positions(const saccade_positions *at)
{
    const saccade_tensor none = {.dtype = SACCADE_NONE};
    return (plan_positions){.q_offset = at->q_offset ? *at->q_offset : none,
                            .kv_offset = at->kv_offset ? *at->kv_offset : none,
                            .kv_len = at->kv_len ? *at->kv_len : none};
}

static double ulp(saccade_dtype dtype, double at)
{
    const int bits = dtype == SACCADE_BF16 ? 8 : dtype == SACCADE_F16 ? 11 : 24;
    return at == 0 ? 0 : ldexp(1, ilogb(at) - bits + 1);
}

static void widen(double *most, double x)
{
    if (isfinite(x) && fabs(x) > *most)
        *most = fabs(x);
}

/* 2 max|plain - gold| + n_ulp ulps at max|gold|. */
static double bound(const double *gold, const float *plain, int64_t n, saccade_dtype dtype,
                    int n_ulp)
{
    double error = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        widen(&most, gold[i]);
        widen(&error, (double)plain[i] - gold[i]);
    }
    return 2 * error + n_ulp * ulp(dtype, most);
}

void case_solve(case_run *r)
{
    saccade_error err = {0};
    saccade_tensor score_tensors[8], mask_tensors[8];
    saccade_plan *plan = case_plan(r, "portable", 1);
    const plan_problem *p = &plan->problem;
    const saccade_sizes *s = &r->sizes;
    const int64_t rows = s->B * s->H * s->Q;
    plan_run run = {.sizes = *s,
                    .q = &r->q.t,
                    .k = &r->k.t,
                    .v = &r->v.t,
                    .positions = case_positions(&r->at)};
    const mod_fn *fns[2] = {p->score, p->mask};
    saccade_tensor *tensors[2] = {score_tensors, mask_tensors};
    for (int m = 0; m < 2; m++) {
        saccade_binding mine[8];
        int32_t n = 0;
        for (uint32_t i = 0; fns[m] && i < fns[m]->n_captures; i++)
            for (int32_t j = 0; j < r->args.n_bindings; j++)
                if (strcmp(r->args.bindings[j].name, fns[m]->captures[i].name) == 0)
                    mine[n++] = r->args.bindings[j];
        if (fns[m])
            assert_int_equal(eval_resolve(fns[m], mine, n, 1, tensors[m], &err), SACCADE_OK);
    }
    eval_sizes(s, run.score_env.size);
    eval_sizes(s, run.mask_env.size);
    run.score_env.tensors = score_tensors;
    run.mask_env.tensors = mask_tensors;
    float *out = malloc((size_t)(rows * (s->Dv + 1)) * sizeof *out);
    assert_non_null(out);
    assert_int_equal(ref_forward(p, &run, r->out, r->lse, r->row_max, &err), SACCADE_OK);
    assert_int_equal(ref_plain(p, &run, out, out + rows * s->Dv, &err), SACCADE_OK);
    r->out_bound = bound(r->out, out, rows * s->Dv, r->dtype, 2);
    r->lse_bound = bound(r->lse, out + rows * s->Dv, rows, SACCADE_F32, 4);
    free(out);
    saccade_plan_destroy(plan);
}

void case_make(const forward_case *c, case_run *r)
{
    memset(r, 0, sizeof *r);
    r->c = *c;
    problem_case(c->problem, &r->sizes, &r->dtype);
    r->mask = c->mask ? case_mod(SACCADE_MASK, c->mask) : NULL;
    r->score = c->score ? case_mod(SACCADE_SCORE, c->score) : NULL;
    saccade_forward_args_init(&r->args);
    make_positions(r);
    make_bindings(r);
    make_data(r);
    saccade_problem_init(&r->problem);
    r->problem.sizes = r->sizes;
    r->problem.dtype = r->dtype;
    r->problem.kv_dtype = c->kv_dtype;
    r->problem.scale = c->scale == 0 ? NAN : c->scale;
    r->problem.score = r->score;
    r->problem.mask = r->mask;
    r->problem.backend = "cpu";
    r->args.q = &r->q.t;
    r->args.k = &r->k.t;
    r->args.v = &r->v.t;
    const size_t rows = (size_t)(r->sizes.B * r->sizes.H * r->sizes.Q);
    r->out = malloc(rows * (size_t)(r->sizes.Dv + 2) * sizeof(double));
    assert_non_null(r->out);
    r->lse = r->out + rows * (size_t)r->sizes.Dv;
    r->row_max = r->lse + rows;
    case_solve(r);
}

void case_free(case_run *r)
{
    saccade_mod_destroy(r->mask);
    saccade_mod_destroy(r->score);
    free(r->q.memory);
    free(r->k.memory);
    free(r->v.memory);
    free(r->out);
}

/* ---- comparison ---- */

/* A short run draws one level with each call, the same in every run; where a level is asked
 * for, the run is about that one. */
static int draw_level(int most)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return getenv("SACCADE_LEVEL") ? most : (int)((state >> 16) % (uint32_t)(most + 1));
}

const char *const *case_levels(void)
{
    static const char *levels[CPU_LEVELS + 1], *alone[CPU_LEVELS][2];
    cpu_level most = CPU_PORTABLE;
    cpu_level_allowed(&most, NULL);
    for (int n = 0; n <= (int)most; n++)
        levels[n] = alone[n][0] = cpu_level_name((cpu_level)n);
    return is_short_run() ? alone[draw_level((int)most)] : levels;
}

saccade_plan *case_plan(const case_run *r, const char *level, int32_t threads)
{
    saccade_error err = {0};
    saccade_context *context;
    saccade_plan *plan = NULL;
    const saccade_context_options options = {.size = sizeof options,
                                             .threads = threads,
                                             .level = level};
    if (saccade_context_create(&options, &context, &err) != SACCADE_OK
        || saccade_plan_create(context, &r->problem, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", r->c.problem, err.message);
    saccade_context_destroy(context);
    return plan;
}

static void differ(const case_run *r, const char *what, const char *name, int64_t at, double x,
                   double gold, double most)
{
    const forward_case *c = &r->c;
    fail_msg("%s, %s[%lld]: got %.9g, expected %.9g within %.3g\n  --problem \"%s\" mask %s "
             "score %s layout %d data %d kv %s offsets %d %d kv_len %d seed %llu",
             what, name, (long long)at, x, gold, most, c->problem, c->mask ? c->mask : "none",
             c->score ? c->score : "none", (int)c->layout, (int)c->data,
             saccade_dtype_name(c->kv_dtype), c->q_offset, c->kv_offset, c->kv_len,
             (unsigned long long)c->seed);
}

/* inf and NaN exactly, the rest within the bound. */
static void compare(const case_run *r, const char *what, const char *name, int64_t at, double x,
                    double gold, double most)
{
    const int is_same = isnan(gold) ? isnan(x) : isinf(gold) ? x == gold : 0;
    if (!isfinite(gold) ? !is_same : !(fabs(x - gold) <= most))
        differ(r, what, name, at, x, gold, most);
}

static void compare_rows(const case_run *r, const char *what, const saccade_tensor *t,
                         const char *name, const double *gold, double most, float *copy)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t E = t->rank == 4 ? t->shape[3] : 1;
    int64_t at = 0;
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t h = 0; h < s->H; h++)
            for (int64_t i = 0; i < s->Q; i++)
                for (int64_t d = 0; d < E; d++, at++) {
                    const double x = get(t, offset_of(t, b, h, i) + d);
                    compare(r, what, name, at, x, gold[at], most);
                    if (copy)
                        copy[at] = (float)x;
                }
}

/* Clears what a run may write, then looks at every other byte. */
static void check_guards(const case_run *r, const char *what, case_tensor *made)
{
    const saccade_tensor *t = &made->t;
    const size_t each = saccade_dtype_bytes(t->dtype);
    const int64_t E = t->rank == 4 ? t->shape[3] : 1;
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++)
                memset((char *)t->data + (size_t)offset_of(t, b, h, i) * each, 0xff,
                       (size_t)E * each);
    for (size_t n = 0; n < made->bytes; n++)
        if (((const unsigned char *)made->memory)[n] != 0xff)
            differ(r, what, "guard", (int64_t)n, 0, 0xff, 0);
}

void case_check(const case_run *r, const saccade_plan *plan, const saccade_block_mask *mask,
                const char *what, float *out, float *lse)
{
    saccade_error err = {0};
    const saccade_sizes *s = &r->sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    case_tensor o = tensor_make(r->dtype, 4, shape, r->c.layout, 0);
    case_tensor l = tensor_make(SACCADE_F32, 3, shape, r->c.layout, 0);
    case_tensor m = tensor_make(SACCADE_F32, 3, shape, r->c.layout, 0);
    saccade_forward_args args = r->args;
    args.out = &o.t;
    if (r->c.outputs != CASE_OUT_ONLY)
        args.lse = &l.t;
    if (r->c.outputs == CASE_ALL)
        args.row_max = &m.t;
    args.block_mask = mask;
    args.workspace_bytes = saccade_plan_workspace(plan, s);
    char *memory = aligned_alloc(64, args.workspace_bytes + 64);
    assert_non_null(memory);
    memset(memory, 0xff, args.workspace_bytes + 64);
    args.workspace = memory;
    if (saccade_forward(plan, &args, &err) != SACCADE_OK)
        fail_msg("%s, %s: %s: %s", what, r->c.problem, err.where, err.message);
    for (int n = 0; n < 64; n++)
        assert_int_equal((unsigned char)memory[args.workspace_bytes + (size_t)n], 0xff);
    compare_rows(r, what, &o.t, "out", r->out, r->out_bound, out);
    if (r->c.outputs != CASE_OUT_ONLY)
        compare_rows(r, what, &l.t, "lse", r->lse, r->lse_bound, lse);
    /* the largest rounding error of a row, where lse has their mean */
    if (r->c.outputs == CASE_ALL)
        compare_rows(r, what, &m.t, "row_max", r->row_max, 2 * r->lse_bound, NULL);
    check_guards(r, what, &o);
    check_guards(r, what, &l);
    check_guards(r, what, &m);
    free(memory);
    free(o.memory);
    free(l.memory);
    free(m.memory);
}
