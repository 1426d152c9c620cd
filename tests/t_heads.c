/* Heads spread over runs: a plan of heads h_offset and on of heads_global sees global heads in
 * its mods, captures and block masks, and gives bit for bit what a run of all heads gives. */
#include "support/forward_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BOUNDS = 3 }; /* key heads [0, 1), [1, 3) and [3, Hkv) are a run each */

/* Key heads where each run begins, and the end. */
static void cut(const saccade_sizes *s, int64_t at[BOUNDS + 1])
{
    at[0] = 0;
    at[1] = 1;
    at[2] = 3;
    at[3] = s->Hkv;
}

/* Heads [h0, h1) of a tensor [B, H, ...]. */
static saccade_tensor heads_of(const saccade_tensor *t, int64_t h0, int64_t h1)
{
    saccade_tensor part = *t;
    part.data = (char *)t->data + h0 * t->stride[1] * (int64_t)saccade_dtype_bytes(t->dtype);
    part.shape[1] = h1 - h0;
    return part;
}

static saccade_tensor make(saccade_dtype dtype, int32_t rank, int64_t B, int64_t H, int64_t N,
                           int64_t D)
{
    const int64_t shape[4] = {B, H, N, D};
    const size_t n = (size_t)(B * H * N * (rank == 4 ? D : 1));
    void *data = calloc(n, saccade_dtype_bytes(dtype));
    assert_non_null(data);
    return saccade_tensor_of(data, dtype, rank, shape);
}

static size_t bytes_of(const saccade_tensor *t)
{
    size_t n = saccade_dtype_bytes(t->dtype);
    for (int32_t d = 0; d < t->rank; d++)
        n *= (size_t)t->shape[d];
    return n;
}

static void *workspace(size_t bytes, void **to, size_t *size)
{
    *size = (bytes + 63) / 64 * 64;
    *to = *size ? aligned_alloc(64, *size) : NULL;
    return *to;
}

static saccade_plan *plan_of(const case_run *r, const saccade_problem *problem,
                             const char *level, const saccade_block_mask *mask)
{
    saccade_error err = {0};
    saccade_context *context;
    saccade_plan *plan;
    const saccade_context_options options = {
        .size = sizeof options, .threads = 2, .level = level};
    assert_int_equal(saccade_context_create(&options, &context, &err), SACCADE_OK);
    if (saccade_plan_create(context, problem, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    if (mask)
        assert_int_equal(saccade_plan_prepare(plan, mask, &err), SACCADE_OK);
    saccade_context_destroy(context);
    return plan;
}

/* Of key heads [g0, g1); all where there is no other. */
static saccade_problem problem_of(const case_run *r, int64_t g0, int64_t g1)
{
    const int64_t group = r->sizes.H / r->sizes.Hkv;
    saccade_problem p = r->problem;
    if (g0 == 0 && g1 == r->sizes.Hkv)
        return p;
    p.sizes.Hkv = g1 - g0;
    p.sizes.H = group * (g1 - g0);
    p.h_offset = group * g0;
    p.heads_global = r->sizes.H;
    return p;
}

/* ---- forward ---- */

typedef struct results {
    saccade_tensor out, lse, row_max;
} results;

static results make_results(const case_run *r)
{
    const saccade_sizes *s = &r->sizes;
    return (results){make(r->dtype, 4, s->B, s->H, s->Q, s->Dv),
                     make(SACCADE_F32, 3, s->B, s->H, s->Q, 0),
                     make(SACCADE_F32, 3, s->B, s->H, s->Q, 0)};
}

static void free_results(results *x)
{
    free(x->out.data);
    free(x->lse.data);
    free(x->row_max.data);
}

static void forward(const case_run *r, int64_t g0, int64_t g1, const char *level,
                    const saccade_block_mask *mask, const results *to)
{
    saccade_error err = {0};
    const int64_t group = r->sizes.H / r->sizes.Hkv;
    const saccade_problem problem = problem_of(r, g0, g1);
    saccade_plan *plan = plan_of(r, &problem, level, mask);
    const saccade_tensor q = heads_of(&r->q.t, g0 * group, g1 * group);
    const saccade_tensor k = heads_of(&r->k.t, g0, g1), v = heads_of(&r->v.t, g0, g1);
    const saccade_tensor out = heads_of(&to->out, g0 * group, g1 * group);
    const saccade_tensor lse = heads_of(&to->lse, g0 * group, g1 * group);
    const saccade_tensor row_max = heads_of(&to->row_max, g0 * group, g1 * group);
    saccade_forward_args args = r->args;
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &out;
    args.lse = &lse;
    args.row_max = &row_max;
    args.block_mask = mask;
    workspace(saccade_plan_workspace(plan, &r->sizes), &args.workspace, &args.workspace_bytes);
    if (saccade_forward(plan, &args, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    free(args.workspace);
    saccade_plan_destroy(plan);
}

/* ---- backward ---- */

typedef struct gradients {
    saccade_tensor dq, dk, dv;
    saccade_binding captured;
} gradients;

static gradients make_gradients(const case_run *r, const char *capture)
{
    const saccade_sizes *s = &r->sizes;
    gradients x = {.dq = make(SACCADE_F32, 4, s->B, s->H, s->Q, s->D),
                   .dk = make(SACCADE_F32, 4, s->B, s->Hkv, s->KV, s->D),
                   .dv = make(SACCADE_F32, 4, s->B, s->Hkv, s->KV, s->Dv)};
    for (int32_t i = 0; capture && i < r->args.n_bindings; i++)
        if (strcmp(r->args.bindings[i].name, capture) == 0) {
            const saccade_tensor *t = &r->args.bindings[i].tensor;
            size_t n = 1;
            for (int32_t d = 0; d < t->rank; d++)
                n *= (size_t)t->shape[d];
            void *data = calloc(n, sizeof(float));
            assert_non_null(data);
            x.captured = (saccade_binding){
                capture, saccade_tensor_of(data, SACCADE_F32, t->rank, t->shape)};
        }
    return x;
}

static void free_gradients(gradients *x)
{
    free(x->dq.data);
    free(x->dk.data);
    free(x->dv.data);
    free(x->captured.tensor.data);
}

/* dO is what forward left, for want of another tensor. Gradients of captures add up. */
static void backward(const case_run *r, int64_t g0, int64_t g1, const char *level,
                     const saccade_block_mask *mask, const results *from, const gradients *to)
{
    saccade_error err = {0};
    const int64_t group = r->sizes.H / r->sizes.Hkv;
    const char *const names[1] = {to->captured.name};
    saccade_problem problem = problem_of(r, g0, g1);
    problem.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (names[0]) {
        problem.gradients |= SACCADE_GRADIENT_CAPTURES;
        problem.gradient_captures = names;
        problem.n_gradient_captures = 1;
    }
    saccade_plan *plan = plan_of(r, &problem, level, mask);
    const saccade_tensor q = heads_of(&r->q.t, g0 * group, g1 * group);
    const saccade_tensor k = heads_of(&r->k.t, g0, g1), v = heads_of(&r->v.t, g0, g1);
    const saccade_tensor out = heads_of(&from->out, g0 * group, g1 * group);
    const saccade_tensor lse = heads_of(&from->lse, g0 * group, g1 * group);
    const saccade_tensor dq = heads_of(&to->dq, g0 * group, g1 * group);
    const saccade_tensor dk = heads_of(&to->dk, g0, g1), dv = heads_of(&to->dv, g0, g1);
    saccade_backward_args args;
    saccade_backward_args_init(&args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = args.d_out = &out;
    args.lse = &lse;
    args.d_q = &dq;
    args.d_k = &dk;
    args.d_v = &dv;
    args.d_captures = &to->captured;
    args.n_d_captures = names[0] != NULL;
    args.accumulate = SACCADE_GRADIENT_CAPTURES;
    args.positions = r->args.positions;
    args.bindings = r->args.bindings;
    args.n_bindings = r->args.n_bindings;
    args.block_mask = mask;
    workspace(saccade_plan_backward_workspace(plan, &r->sizes), &args.workspace,
              &args.workspace_bytes);
    if (saccade_backward(plan, &args, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    free(args.workspace);
    saccade_plan_destroy(plan);
}

/* ---- comparison ---- */

static void same(const case_run *r, const char *level, const char *what,
                 const saccade_tensor *all, const saccade_tensor *parts)
{
    if (memcmp(all->data, parts->data, bytes_of(all)) != 0)
        fail_msg("%s %s: heads in %d runs differ from one run\n"
                 "  --problem \"%s\" mask %s score %s",
                 level, what, BOUNDS, r->c.problem, r->c.mask ? r->c.mask : "none",
                 r->c.score ? r->c.score : "none");
}

static void compare(const case_run *r, const char *level, const saccade_block_mask *mask,
                    const char *capture, int has_backward)
{
    int64_t at[BOUNDS + 1];
    results all = make_results(r), parts = make_results(r);
    cut(&r->sizes, at);
    forward(r, 0, r->sizes.Hkv, level, mask, &all);
    for (int n = 0; n < BOUNDS; n++)
        forward(r, at[n], at[n + 1], level, mask, &parts);
    same(r, level, "out", &all.out, &parts.out);
    same(r, level, "lse", &all.lse, &parts.lse);
    same(r, level, "row_max", &all.row_max, &parts.row_max);
    if (has_backward) {
        gradients one = make_gradients(r, capture), many = make_gradients(r, capture);
        backward(r, 0, r->sizes.Hkv, level, mask, &all, &one);
        for (int n = 0; n < BOUNDS; n++)
            backward(r, at[n], at[n + 1], level, mask, &all, &many);
        same(r, level, "d_q", &one.dq, &many.dq);
        same(r, level, "d_k", &one.dk, &many.dk);
        same(r, level, "d_v", &one.dv, &many.dv);
        if (capture)
            same(r, level, capture, &one.captured.tensor, &many.captured.tensor);
        free_gradients(&one);
        free_gradients(&many);
    }
    free_results(&all);
    free_results(&parts);
}

/* ---- block masks ---- */

/* Of `text`, over all heads; exported and imported with `inside` as its mod if is_imported. */
static saccade_block_mask *mask_of(const case_run *r, const char *text, int is_imported,
                                   const saccade_mod *inside)
{
    saccade_error err = {0};
    saccade_block_mask *mask, *imported;
    saccade_block_indices x = {0};
    saccade_mod *mod = case_mod(SACCADE_MASK, text);
    const saccade_block_mask_options odd = {
        .size = sizeof odd, .block_q = 24, .block_kv = 40};
    assert_int_equal(saccade_block_mask_create(NULL, mod, &r->sizes, r->args.positions, NULL, 0,
                                               is_imported ? &odd : NULL, &mask, &err),
                     SACCADE_OK);
    saccade_mod_destroy(mod);
    if (!is_imported)
        return mask;
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, &err), SACCADE_OK);
    int32_t **const lists[4] = {&x.kv_num_blocks, &x.kv_indices, &x.full_kv_num_blocks,
                                &x.full_kv_indices};
    for (int n = 0; n < 4; n++)
        *lists[n] = calloc((size_t)(x.B * x.H * x.rows * (n % 2 ? x.columns : 1)), 4);
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, &err), SACCADE_OK);
    assert_int_equal(saccade_block_mask_import(NULL, &x, inside, &r->sizes, r->args.positions,
                                               NULL, 0, &imported, &err),
                     SACCADE_OK);
    for (int n = 0; n < 4; n++)
        free(*lists[n]);
    saccade_block_mask_destroy(mask);
    return imported;
}

/* ---- tests ---- */

static const char BY_HEAD[] = "(q + kv * (h + 2)) % 5 < 3 && kv <= q + 40 * h";

static const struct {
    const char *problem, *mask, *score, *capture;
} cases[] = {
    {"b2 h12/6 q33 kv150 d40 f32", NULL, "alibi()", NULL},
    {"b1 h12/6 q40 kv150 d64 dv32 bf16", BY_HEAD, "score * h_scale[h] + 0.1 * rel[h, kv % 64]",
     "h_scale"},
    {"b1 h6/6 q29 kv170 d32 f16", "q >= kv && q - kv <= 9 * (h + 1)",
     "score * h_scale[h] + 0.01 * Hkv * (H - h)", "h_scale"},
    {"b2 h5/5 q31 kv90 d24 f32", "q >= kv", "score + rel[h, floormod(q - kv, 64)]", "rel"},
    {"b1 h8/4 q1 kv500 d64 bf16", "kv % (h + 1) == 0", "alibi()", NULL},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static case_run *made(int n)
{
    case_run *r = malloc(sizeof *r);
    const forward_case c = {.problem = cases[n].problem,
                            .mask = cases[n].mask,
                            .score = cases[n].score,
                            .layout = n % 2 ? CASE_BNHD : CASE_PADDED,
                            .q_offset = n == 4 ? 499 : 0,
                            .seed = 70 + (uint64_t)n};
    assert_non_null(r);
    case_make(&c, r);
    return r;
}

static void compare_masks(const case_run *r, const char *level, const char *capture,
                          int has_backward)
{
    compare(r, level, NULL, capture, has_backward);
    if (!r->c.mask)
        return;
    saccade_block_mask *runs = mask_of(r, r->c.mask, 0, NULL);
    compare(r, level, runs, capture, has_backward);
    saccade_block_mask_destroy(runs);
    saccade_block_mask *imported = mask_of(r, BY_HEAD, 1, r->mask);
    compare(r, level, imported, capture, has_backward);
    saccade_block_mask_destroy(imported);
}

static void on_cpus(void **unused)
{
    (void)unused;
    for (int n = 0; n < CASES; n++) {
        case_run *r = made(n);
        for (const char *const *level = case_levels(); *level; level++)
            compare_masks(r, *level, cases[n].capture, 1);
        case_free(r);
        free(r);
    }
}

static void by_the_references(void **unused)
{
    (void)unused;
    for (int n = 0; n < CASES; n++) {
        case_run *r = made(n);
        r->problem.backend = "ref";
        compare_masks(r, "portable", cases[n].capture, n == 2);
        r->problem.backend = "plain";
        compare_masks(r, "portable", NULL, 0);
        case_free(r);
        free(r);
    }
}

static void refused(const saccade_problem *p, const char *where)
{
    saccade_error err = {0};
    saccade_plan *plan;
    assert_int_equal(saccade_plan_create(NULL, p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
}

/* Heads outside of all heads, parts of groups, block masks of a part of the heads. */
static void wrong_heads(void **unused)
{
    (void)unused;
    saccade_error err = {0};
    case_run *r = made(1);
    saccade_problem p = problem_of(r, 1, 3); /* heads 2 to 5 of 12, two for each key head */
    p.h_offset = 9;
    refused(&p, "h_offset");
    p.h_offset = -1;
    refused(&p, "h_offset");
    p.h_offset = 0;
    p.heads_global = 3;
    refused(&p, "heads_global");
    p.heads_global = 2;
    refused(&p, "h_offset");
    p.heads_global = INT64_MAX - 1;
    refused(&p, "heads_global");
    saccade_sizes own = r->sizes;
    own.H = own.Hkv = 4;
    p = problem_of(r, 1, 3);
    p.score = NULL;
    saccade_plan *plan = plan_of(r, &p, NULL, NULL);
    saccade_block_mask *mask;
    assert_int_equal(
        saccade_block_mask_create(NULL, r->mask, &own, NULL, NULL, 0, NULL, &mask, &err),
        SACCADE_OK);
    saccade_forward_args args = r->args;
    const saccade_tensor q = heads_of(&r->q.t, 2, 6), k = heads_of(&r->k.t, 1, 3);
    const saccade_tensor v = heads_of(&r->v.t, 1, 3);
    args.q = args.out = &q;
    args.k = &k;
    args.v = &v;
    args.n_bindings = 0;
    args.block_mask = mask;
    assert_int_equal(saccade_forward(plan, &args, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "block_mask");
    assert_string_equal(err.message, "got 4 heads, expected 12 or 1");
    saccade_block_mask_destroy(mask);
    saccade_plan_destroy(plan);
    case_free(r);
    free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_cpus),
        cmocka_unit_test(by_the_references),
        cmocka_unit_test(wrong_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
