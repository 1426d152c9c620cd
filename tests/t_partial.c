/* Results in f32 of f16 and bf16 problems: the numbers that would have been rounded, on every
 * level, and what parts of the keys need to become the whole by saccade_merge. */
#include "support/forward_case.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { GAP = 5 }; /* elements between rows of out */

static saccade_tensor make(const case_run *r, saccade_dtype dtype)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t row = s->Dv + GAP;
    void *data = calloc((size_t)(s->B * s->H * s->Q * row), saccade_dtype_bytes(dtype));
    assert_non_null(data);
    return (saccade_tensor){.data = data,
                            .dtype = dtype,
                            .rank = 4,
                            .shape = {s->B, s->H, s->Q, s->Dv},
                            .stride = {s->Q * s->H * row, row, s->H * row, 1}};
}

static saccade_tensor make_stats(const case_run *r)
{
    const int64_t shape[3] = {r->sizes.B, r->sizes.H, r->sizes.Q};
    void *data = calloc((size_t)(shape[0] * shape[1] * shape[2]), sizeof(float));
    assert_non_null(data);
    return saccade_tensor_of(data, SACCADE_F32, 3, shape);
}

static saccade_plan *plan_of(const case_run *r, const char *level, saccade_dtype out_dtype,
                             uint32_t gradients)
{
    saccade_error err = {0};
    saccade_context *context;
    saccade_plan *plan;
    saccade_problem problem = r->problem;
    const saccade_context_options options = {
        .size = sizeof options, .threads = 2, .level = level};
    problem.out_dtype = out_dtype;
    problem.gradients = gradients;
    assert_int_equal(saccade_context_create(&options, &context, &err), SACCADE_OK);
    if (saccade_plan_create(context, &problem, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    saccade_context_destroy(context);
    return plan;
}

/* args without outputs and workspace. */
static void forward(const case_run *r, const char *level, saccade_forward_args args,
                    const saccade_tensor *out, const saccade_tensor *lse)
{
    saccade_error err = {0};
    saccade_plan *plan = plan_of(r, level, out->dtype, 0);
    const size_t bytes = (saccade_plan_workspace(plan, &r->sizes) + 63) / 64 * 64;
    args.workspace = bytes ? aligned_alloc(64, bytes) : NULL;
    args.workspace_bytes = bytes;
    args.out = out;
    args.lse = lse;
    if (saccade_forward(plan, &args, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    free(args.workspace);
    saccade_plan_destroy(plan);
}

static const void *at(const saccade_tensor *t, int64_t row)
{
    const int64_t H = t->shape[1], Q = t->shape[2];
    const int64_t place = row / (H * Q) * t->stride[0] + row / Q % H * t->stride[1]
                          + row % Q * t->stride[2];
    return (const char *)t->data + place * (int64_t)saccade_dtype_bytes(t->dtype);
}

static const forward_case cases[] = {
    {.problem = "b1 h4/2 q70 kv300 d64 bf16", .mask = "causal()", .seed = 1},
    {.problem = "b2 h3 q33 kv290 d40 dv24 bf16", .score = "alibi()", .seed = 2},
    {.problem = "b1 h2 q40 kv600 d64 dv96 f16", .score = "softcap(20.0)",
     .mask = "(q + kv) % 3 != 0", .seed = 3},
    {.problem = "b1 h4/1 q1 kv5000 d64 bf16", .seed = 4},
    {.problem = "b2 h4/2 q2 kv3000 d128 f16", .mask = "kv % 7 != 3", .seed = 5},
    {.problem = "b1 h2 q400 kv400 d64 bf16", .mask = "q >= kv && q - kv < 50", .seed = 6},
    {.problem = "b1 h1 q20 kv100 d24 dv17 f16", .kv_dtype = SACCADE_F32, .seed = 7},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static case_run *made(int n)
{
    case_run *r = malloc(sizeof *r);
    assert_non_null(r);
    case_make(&cases[n], r);
    return r;
}

static void drop(case_run *r)
{
    case_free(r);
    free(r);
}

/* ---- one rounding ---- */

static void compare_rounded(const case_run *r, const char *level, int has_lse)
{
    const saccade_sizes *s = &r->sizes;
    saccade_tensor narrow = make(r, r->dtype), wide = make(r, SACCADE_F32);
    saccade_tensor lse = make_stats(r), *wanted = has_lse ? &lse : NULL;
    uint16_t rounded[4096];
    int differs = 0;
    assert_true(s->Dv <= 4096);
    forward(r, level, r->args, &narrow, wanted);
    forward(r, level, r->args, &wide, wanted);
    for (int64_t row = 0; row < s->B * s->H * s->Q; row++) {
        const float *x = at(&wide, row);
        convert_from_f32(r->dtype, x, rounded, s->Dv);
        if (memcmp(rounded, at(&narrow, row), (size_t)s->Dv * 2) != 0)
            fail_msg("%s: row %lld in f32 does not round to the one in %s\n  --problem \"%s\"",
                     level, (long long)row, saccade_dtype_name(r->dtype), r->c.problem);
        for (int64_t d = 0; d < s->Dv; d++)
            differs |= (double)x[d] != convert_element(r->dtype, rounded + d);
        for (int64_t d = s->Dv; d < s->Dv + GAP; d++)
            assert_true(x[d] == 0 || row + 1 == s->B * s->H * s->Q);
    }
    assert_true(differs); /* it was not rounded before */
    free(narrow.data);
    free(wide.data);
    free(lse.data);
}

static void f32_rounds_to_the_narrow_result(void **unused)
{
    (void)unused;
    for (int n = 0; n < CASES; n++) {
        case_run *r = made(n);
        for (const char *const *level = case_levels(); *level; level++)
            for (int has_lse = 0; has_lse < 2; has_lse++)
                compare_rounded(r, *level, has_lse);
        if (r->c.kv_dtype == SACCADE_NONE && r->sizes.KV <= 600) {
            r->problem.backend = "plain";
            compare_rounded(r, "portable", 1);
            r->problem.backend = "ref";
            compare_rounded(r, "portable", 1);
        }
        drop(r);
    }
}

/* ---- two parts of the keys ---- */

/* Keys [0, n) by kv_len, the others as a view of their own that stands at n. */
static void merge_parts(const case_run *r, const char *level, int64_t n,
                        const saccade_tensor *out, const saccade_tensor *lse)
{
    saccade_error err = {0};
    int32_t first = (int32_t)n;
    saccade_tensor outs[2] = {make(r, SACCADE_F32), make(r, SACCADE_F32)};
    saccade_tensor lses[2] = {make_stats(r), make_stats(r)};
    const saccade_tensor number = saccade_tensor_of(&first, SACCADE_I32, 0, NULL);
    saccade_positions before, after;
    saccade_forward_args args = r->args;
    saccade_positions_init(&before);
    saccade_positions_init(&after);
    before.kv_len = after.kv_offset = &number;
    args.positions = &before;
    forward(r, level, args, &outs[0], &lses[0]);
    saccade_tensor k = *args.k, v = *args.v;
    k.data = (char *)k.data + n * k.stride[2] * (int64_t)saccade_dtype_bytes(k.dtype);
    v.data = (char *)v.data + n * v.stride[2] * (int64_t)saccade_dtype_bytes(v.dtype);
    k.shape[2] = v.shape[2] = r->sizes.KV - n;
    args.k = &k;
    args.v = &v;
    args.positions = &after;
    forward(r, level, args, &outs[1], &lses[1]);
    const saccade_merge_args m = {
        .size = sizeof m, .outs = outs, .lses = lses, .n = 2, .out = out, .lse = lse};
    if (saccade_merge(NULL, &m, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    for (int i = 0; i < 2; i++) {
        free(outs[i].data);
        free(lses[i].data);
    }
}

static void compare_parts(const case_run *r, const char *level, int64_t n)
{
    const saccade_sizes *s = &r->sizes;
    saccade_tensor out = make(r, r->dtype), lse = make_stats(r);
    merge_parts(r, level, n, &out, &lse);
    for (int64_t row = 0; row < s->B * s->H * s->Q; row++) {
        for (int64_t d = 0; d < s->Dv; d++) {
            const double x = convert_element(r->dtype, (const uint16_t *)at(&out, row) + d);
            if (!(fabs(x - r->out[row * s->Dv + d]) <= r->out_bound))
                fail_msg("%s, merged at key %lld, row %lld: got %.9g, expected %.9g within %.3g"
                         "\n  --problem \"%s\"",
                         level, (long long)n, (long long)row, x, r->out[row * s->Dv + d],
                         r->out_bound, r->c.problem);
        }
        const double x = (double)((const float *)lse.data)[row];
        assert_true(x == r->lse[row] || fabs(x - r->lse[row]) <= r->lse_bound);
    }
    free(out.data);
    free(lse.data);
}

static void merged_parts_are_the_whole(void **unused)
{
    (void)unused;
    for (int n = 0; n < CASES; n++) {
        case_run *r = made(n);
        for (const char *const *level = case_levels(); *level; level++) {
            compare_parts(r, *level, r->sizes.KV / 3);
            compare_parts(r, *level, r->sizes.KV - 1);
        }
        drop(r);
    }
}

/* ---- backward from what forward left ---- */

static void gradient_of_q(const case_run *r, const char *level, const saccade_tensor *out,
                          const saccade_tensor *lse, const saccade_tensor *dq)
{
    saccade_error err = {0};
    saccade_plan *plan = plan_of(r, level, out->dtype, SACCADE_GRADIENT_Q);
    const size_t bytes = (saccade_plan_backward_workspace(plan, &r->sizes) + 63) / 64 * 64;
    saccade_backward_args a;
    saccade_backward_args_init(&a);
    a.q = r->args.q;
    a.k = r->args.k;
    a.v = r->args.v;
    a.out = a.d_out = out;
    a.lse = lse;
    a.d_q = dq;
    a.positions = r->args.positions;
    a.bindings = r->args.bindings;
    a.n_bindings = r->args.n_bindings;
    a.workspace = bytes ? aligned_alloc(64, bytes) : NULL;
    a.workspace_bytes = bytes;
    if (saccade_backward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    free(a.workspace);
    saccade_plan_destroy(plan);
}

/* The truth is the oracle's, which makes out again and reads dO in f32. */
static void backward_takes_f32(void **unused)
{
    (void)unused;
    for (int n = 0; n < 2; n++) {
        case_run *r = made(n);
        const saccade_sizes *s = &r->sizes;
        const int64_t shape[4] = {s->B, s->H, s->Q, s->D}, all = s->B * s->H * s->Q * s->D;
        saccade_tensor out = make(r, SACCADE_F32), lse = make_stats(r);
        float *got = calloc((size_t)all, sizeof *got);
        float *gold = calloc((size_t)all, sizeof *gold);
        assert_true(got && gold);
        const saccade_tensor dq = saccade_tensor_of(got, SACCADE_F32, 4, shape);
        const saccade_tensor truth = saccade_tensor_of(gold, SACCADE_F32, 4, shape);
        for (const char *const *level = case_levels(); *level; level++) {
            double most = 0, error = 0;
            r->problem.backend = "cpu";
            forward(r, *level, r->args, &out, &lse);
            gradient_of_q(r, *level, &out, &lse, &dq);
            r->problem.backend = "ref";
            gradient_of_q(r, "portable", &out, &lse, &truth);
            for (int64_t i = 0; i < all; i++) {
                most = fmax(most, fabs((double)gold[i]));
                error = fmax(error, fabs((double)got[i] - (double)gold[i]));
            }
            assert_true(most > 0 && error <= 0.03 * most);
        }
        free(got);
        free(gold);
        free(out.data);
        free(lse.data);
        drop(r);
    }
}

/* ---- mistakes ---- */

static void wrong_dtypes(void **unused)
{
    static const struct {
        saccade_dtype dtype, out;
    } wrong[] = {{SACCADE_BF16, SACCADE_F16}, {SACCADE_F16, SACCADE_F64},
                 {SACCADE_F32, SACCADE_BF16}, {SACCADE_F64, SACCADE_F32},
                 {SACCADE_BF16, SACCADE_I32}, {SACCADE_BF16, (saccade_dtype)77}};
    (void)unused;
    saccade_error err = {0};
    saccade_plan *plan;
    char *text;
    case_run *r = made(0);
    for (size_t n = 0; n < sizeof wrong / sizeof wrong[0]; n++) {
        saccade_problem p = r->problem;
        p.dtype = wrong[n].dtype;
        p.out_dtype = wrong[n].out;
        p.backend = "ref";
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, "out_dtype");
    }
    for (int n = 0; n < 2; n++) { /* neither out's nor q's */
        saccade_problem p = r->problem;
        p.dtype = SACCADE_BF16;
        p.out_dtype = n ? SACCADE_F32 : SACCADE_NONE;
        p.d_out_dtype = n ? SACCADE_F16 : SACCADE_F32;
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, "d_out_dtype");
        assert_string_equal(err.message, n ? "got f16 with dtype bf16, expected that or f32"
                                           : "got f32 with dtype bf16, expected that");
    }
    plan = plan_of(r, NULL, SACCADE_F32, 0);
    saccade_tensor out = make(r, SACCADE_BF16);
    saccade_forward_args args = r->args;
    args.out = &out;
    assert_int_equal(saccade_forward(plan, &args, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "out");
    assert_int_equal(saccade_plan_explain(plan, &text, &err), SACCADE_OK);
    assert_non_null(strstr(text, "results: f32"));
    saccade_free(text);
    saccade_plan_destroy(plan);
    free(out.data);
    drop(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f32_rounds_to_the_narrow_result),
        cmocka_unit_test(merged_parts_are_the_whole),
        cmocka_unit_test(backward_takes_f32),
        cmocka_unit_test(wrong_dtypes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
