/* Sinks: the oracle against its formula out sigmoid(lse - sink) and finite differences, back
 * ends and levels against the oracle, all kinds of sinks that a row may meet, gradients, and
 * parts of the keys of which one has them. */
#include "support/device_case.h"
#include "support/run_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Every head and row of a run has its sink; strides of 0 where one serves many. */
typedef enum sink_kind { SINK_PER_HEAD, SINK_PER_ROW, SINK_KINDS } sink_kind;

/* From nothing to far above every score. */
static const double values[] = {0.5,  -INFINITY, 3,      -2.25, 40,     1.5,
                                -500, 1e4,       -0.125, 5,     -3e38f, 2};
enum { VALUES = sizeof values / sizeof values[0] };

static saccade_tensor sinks_of(const saccade_sizes *s, sink_kind kind, saccade_dtype dtype)
{
    const int64_t head[1] = {s->H}, row[3] = {1, s->H, s->Q};
    const saccade_tensor t =
        kind == SINK_PER_HEAD ? run_make(dtype, 1, head) : run_make(dtype, 3, row);
    for (int64_t i = 0; i < run_count(&t); i++)
        run_put(&t, i, values[i % VALUES]);
    return t;
}

/* ---- runs ---- */

static run_options options_of(const case_run *r, const char *backend, const char *level,
                              const saccade_tensor *sinks)
{
    run_options o = {.problem = r->problem, .level = level, .sinks = sinks};
    o.problem.backend = backend;
    o.problem.sinks_dtype = sinks ? sinks->dtype : SACCADE_NONE;
    return o;
}

/* ---- forward ---- */

static const forward_case cases[] = {
    {.problem = "b2 h4/2 q70 kv130 d40 dv24 f32", .mask = "causal()", .kv_len = 120},
    {.problem = "b1 h4/2 q200 kv500 d64 bf16", .score = "softcap(c)", .data = CASE_WIDE},
    {.problem = "b1 h12/2 q1 kv3000 d64 bf16", .layout = CASE_BNHD},
    {.problem = "b2 h2 q90 kv90 d64 f16", .mask = "q >= kv + 5", .score = "alibi()"},
    {.problem = "b1 h2 q300 kv700 d64 bf16", .mask = "causal()", .q_offset = 400},
    {.problem = "b1 h2 q260 kv600 d128 bf16", .data = CASE_CLIFF},
    {.problem = "b1 h2 q40 kv80 d64 f32", .data = CASE_LOW, .mask = "sliding_window(W)"},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* The oracle's results, in f32 where outputs would be rounded, and plain's. */
static void solve(const case_run *r, const saccade_tensor *sinks, run_results *gold,
                  run_results *plain)
{
    run_options ref = options_of(r, "ref", NULL, sinks);
    const run_options three = options_of(r, "plain", NULL, sinks);
    ref.problem.out_dtype = r->dtype == SACCADE_F32 ? SACCADE_NONE : SACCADE_F32;
    run_forward(r, &ref, gold);
    run_forward(r, &three, plain);
}

static void check_forward(const case_run *r, const run_options *o, const char *what,
                          const run_results *gold, const run_results *plain)
{
    run_results got;
    run_forward(r, o, &got);
    run_compare(what, r, &got.out, &plain->out, &gold->out, 2);
    if (o->want != CASE_OUT_ONLY)
        run_compare("lse", r, &got.lse, &plain->lse, &gold->lse, 4);
    if (o->want == CASE_ALL)
        run_compare("row_max", r, &got.row_max, &plain->row_max, &gold->row_max, 8);
    run_drop(&got);
}

static void one_forward(const case_run *r, sink_kind kind, saccade_dtype dtype, int on_device)
{
    const saccade_tensor sinks = sinks_of(&r->sizes, kind, dtype);
    run_results gold, plain;
    solve(r, &sinks, &gold, &plain);
    for (int want = CASE_ALL; want <= CASE_OUT_ONLY; want++) {
        run_options o = options_of(r, on_device ? "cuda" : "cpu", NULL, &sinks);
        o.want = (case_outputs)want;
        if (on_device) {
            check_forward(r, &o, "cuda", &gold, &plain);
            continue;
        }
        for (const char *const *level = case_levels(); *level; level++) {
            o.level = *level;
            check_forward(r, &o, *level, &gold, &plain);
        }
    }
    run_drop(&gold);
    run_drop(&plain);
    free(sinks.data);
}

static void all_forward(int on_device)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    for (int n = 0; n < CASES; n++) {
        case_run r;
        case_make(&cases[n], &r);
        for (int kind = 0; kind < SINK_KINDS; kind++)
            one_forward(&r, (sink_kind)kind, dtypes[(n + kind) % 3], on_device);
        case_free(&r);
    }
}

static void levels_agree(void **unused)
{
    (void)unused;
    all_forward(0);
}

static void device_agrees(void **unused)
{
    (void)unused;
    if (!has_device())
        skip();
    all_forward(1);
}

/* The oracle by its other formula: what it gives without sinks, times sigmoid(lse - sink). */
static void oracle_is_sigmoid(void **unused)
{
    (void)unused;
    case_run r;
    run_results with, without;
    case_make(&cases[3], &r);
    const saccade_sizes *s = &r.sizes;
    const saccade_tensor sinks = sinks_of(s, SINK_PER_ROW, SACCADE_F32);
    run_options o = options_of(&r, "ref", NULL, &sinks),
                none = options_of(&r, "ref", NULL, NULL);
    o.problem.out_dtype = none.problem.out_dtype = SACCADE_F32;
    run_forward(&r, &o, &with);
    run_forward(&r, &none, &without);
    for (int64_t row = 0; row < s->B * s->H * s->Q; row++) {
        const double a = run_get(&sinks, row % (s->H * s->Q)), lse = run_get(&without.lse, row);
        const double keep = lse == -INFINITY ? 0 : 1 / (1 + exp(a - lse));
        const double sum = lse == -INFINITY ? a : fmax(a, lse) + log1p(exp(-fabs(a - lse)));
        assert_true(run_get(&with.row_max, row) == run_get(&without.row_max, row));
        assert_true(sum == run_get(&with.lse, row)
                    || fabs(sum - run_get(&with.lse, row)) <= 1e-6 * (1 + fabs(sum)));
        for (int64_t d = 0; d < s->Dv; d++)
            assert_true(fabs(keep * run_get(&without.out, row * s->Dv + d)
                             - run_get(&with.out, row * s->Dv + d))
                        <= 1e-6);
    }
    run_drop(&with);
    run_drop(&without);
    free(sinks.data);
    case_free(&r);
}

/* +inf and NaN make their row NaN, and leave other rows alone; dead rows are 0 even then. */
static void check_nan(const case_run *r, const run_options *o, int has_dead)
{
    const saccade_sizes *s = &r->sizes;
    run_results got;
    run_forward(r, o, &got);
    for (int64_t row = 0; row < s->Q; row++) {
        const int is_nan = row == 50 || row == 51 || (row == 2 && !has_dead);
        assert_true(isnan(run_get(&got.out, row * s->Dv)) == is_nan);
        assert_true(isnan(run_get(&got.lse, row)) == (is_nan || row == 2));
        assert_false(isnan(run_get(&got.row_max, row)));
    }
    run_drop(&got);
}

static void nan_stays_in_its_row(void **unused)
{
    (void)unused;
    for (int has_dead = 0; has_dead < 2; has_dead++) {
        case_run r;
        case_make(&cases[has_dead ? 3 : 4], &r);
        const saccade_tensor sinks = sinks_of(&r.sizes, SINK_PER_ROW, SACCADE_F32);
        run_options o = options_of(&r, "cpu", NULL, &sinks);
        run_put(&sinks, 50, NAN);
        run_put(&sinks, 51, INFINITY);
        run_put(&sinks, 2, NAN);
        for (const char *const *level = case_levels(); *level; level++) {
            o.level = *level;
            check_nan(&r, &o, has_dead);
        }
        o.problem.backend = "cuda";
        if (has_device())
            check_nan(&r, &o, has_dead);
        free(sinks.data);
        case_free(&r);
    }
}

/* ---- backward ---- */

enum {
    Q_K_V_SINKS =
        SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V | SACCADE_GRADIENT_SINKS
};

/* Sums are compared at the size of their terms, which out's rounding enters. */
static void compare_sinks(const char *what, const run_results *got, const run_results *plain,
                          const run_results *gold, double terms)
{
    double error = 0;
    for (int64_t i = 0; i < run_count(&gold->d_sinks); i++)
        error = fmax(error, fabs(run_get(&plain->d_sinks, i) - run_get(&gold->d_sinks, i)));
    const double most = 2 * error + 4 * run_ulp(gold->out.dtype, 1) * sqrt(terms);
    for (int64_t i = 0; i < run_count(&gold->d_sinks); i++) {
        const double x = run_get(&got->d_sinks, i), y = run_get(&gold->d_sinks, i);
        if (!(fabs(x - y) <= most))
            fail_msg("%s: d_sinks[%lld]: got %.9g, expected %.9g within %.3g", what,
                     (long long)i, x, y, most);
    }
}

static void both_ways(const case_run *r, const run_options *o, run_results *to)
{
    run_forward(r, o, to);
    run_backward(r, o, to);
}

static void check_backward(const case_run *r, const run_options *o, const char *what,
                           const run_results *gold, const run_results *plain, double terms)
{
    run_results got;
    both_ways(r, o, &got);
    run_compare("dq", r, &got.dq, &plain->dq, &gold->dq, 16);
    run_compare("dk", r, &got.dk, &plain->dk, &gold->dk, 16);
    run_compare("dv", r, &got.dv, &plain->dv, &gold->dv, 16);
    compare_sinks(what, &got, plain, gold, terms);
    run_drop(&got);
}

static void one_backward(const case_run *r, sink_kind kind, int has_d_lse, double start,
                         int on_device)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    const saccade_tensor sinks = sinks_of(s, kind, SACCADE_F32);
    const saccade_tensor d_out = run_make(r->dtype, 4, shape);
    const saccade_tensor d_lse = run_make(SACCADE_F32, 3, shape);
    const double terms = kind == SINK_PER_HEAD ? (double)(s->B * s->Q) : (double)s->B;
    run_results gold, plain;
    run_options o = options_of(r, "ref", NULL, &sinks);
    run_randomise(&d_out, 3);
    run_randomise(&d_lse, 4);
    o.problem.gradients = Q_K_V_SINKS;
    o.d_out = &d_out;
    o.d_lse = has_d_lse ? &d_lse : NULL;
    o.start = start;
    both_ways(r, &o, &gold);
    o.problem.backend = "plain";
    both_ways(r, &o, &plain);
    o.problem.backend = on_device ? "cuda" : "cpu";
    if (on_device)
        check_backward(r, &o, "cuda", &gold, &plain, terms);
    for (const char *const *level = case_levels(); *level && !on_device; level++) {
        o.level = *level;
        check_backward(r, &o, *level, &gold, &plain, terms);
    }
    run_drop(&gold);
    run_drop(&plain);
    free(sinks.data);
    free(d_out.data);
    free(d_lse.data);
}

static void all_backward(int on_device)
{
    static const int which[] = {0, 3, 4, 6};
    for (int n = 0; n < 4; n++) {
        case_run r;
        forward_case c = cases[which[n]];
        c.kv_len = 0; /* no NaN past the end: gradients there are held against 0 */
        if (on_device && strstr(c.problem, "f32"))
            continue;
        case_make(&c, &r);
        for (int kind = 0; kind < SINK_KINDS; kind++)
            one_backward(&r, (sink_kind)kind, n % 2 == 0, kind ? 2.5 : 0, on_device);
        case_free(&r);
    }
}

static void gradients_agree(void **unused)
{
    (void)unused;
    all_backward(0);
}

static void device_gradients_agree(void **unused)
{
    (void)unused;
    if (!has_device())
        skip();
    all_backward(1);
}

/* What dO holds in rows without a live key reaches no gradient, be it NaN; on a GPU none of
 * sinks, as products of whole tiles multiply it by weights of 0 (docs/cuda.md). */
static void check_dead_rows(const case_run *r, run_options *o, const saccade_tensor *d_out)
{
    const saccade_sizes *s = &r->sizes;
    run_results zero, nan;
    for (int fill = 0; fill < 2; fill++) {
        for (int64_t head = 0; head < s->B * s->H; head++)
            for (int64_t d = 0; d < 3 * s->Dv; d++) /* rows 0 to 2, dead */
                run_put(d_out, head * s->Q * s->Dv + d, fill ? NAN : 0);
        both_ways(r, o, fill ? &nan : &zero);
    }
    const saccade_tensor *a[] = {&zero.dq, &zero.dk, &zero.dv, &zero.d_sinks};
    const saccade_tensor *b[] = {&nan.dq, &nan.dk, &nan.dv, &nan.d_sinks};
    const int first = o->problem.backend && !strcmp(o->problem.backend, "cuda") ? 3 : 0;
    for (int n = first; n < 4; n++)
        for (int64_t i = 0; i < run_count(a[n]); i++) {
            const double x = run_get(a[n], i), y = run_get(b[n], i);
            if (!(fabs(x - y) <= (n == 3 ? 0 : 1e-6)))
                fail_msg("gradient %d, element %lld: got %g for NaN, %g for 0", n, (long long)i,
                         y, x);
        }
    run_drop(&zero);
    run_drop(&nan);
}

static void dead_rows_give_nothing(void **unused)
{
    static const char *const others[] = {"ref", "plain", "cuda"};
    const int n_others = has_device() ? 3 : 2;
    (void)unused;
    for (int kind = 0; kind < SINK_KINDS; kind++) {
        const forward_case c = {.problem = "b2 h2 q9 kv12 d8 f32", .mask = "q >= kv + 3"};
        case_run r;
        case_make(&c, &r);
        const int64_t shape[4] = {r.sizes.B, r.sizes.H, r.sizes.Q, r.sizes.Dv};
        const saccade_tensor d_out = run_make(r.dtype, 4, shape);
        const saccade_tensor d_lse = run_make(SACCADE_F32, 3, shape);
        const saccade_tensor sinks = sinks_of(&r.sizes, (sink_kind)kind, SACCADE_F32);
        run_options o = options_of(&r, "cpu", NULL, &sinks);
        run_randomise(&d_out, 5);
        run_randomise(&d_lse, 6);
        o.problem.gradients = Q_K_V_SINKS;
        o.d_out = &d_out;
        o.d_lse = kind ? &d_lse : NULL;
        for (const char *const *level = case_levels(); *level; level++) {
            o.level = *level;
            check_dead_rows(&r, &o, &d_out);
        }
        for (int n = 0; n < n_others; n++) {
            o.problem.backend = others[n];
            o.level = NULL;
            check_dead_rows(&r, &o, &d_out);
        }
        free(d_out.data);
        free(d_lse.data);
        free(sinks.data);
        case_free(&r);
    }
}

/* ---- finite differences ---- */

/* sum(out d_out) + sum(lse d_lse) of a float64 problem. */
static double loss(const case_run *r, const run_options *o)
{
    run_results f;
    double sum = 0;
    run_forward(r, o, &f);
    for (int64_t i = 0; i < run_count(&f.out); i++)
        sum += run_get(&f.out, i) * run_get(o->d_out, i);
    for (int64_t i = 0; i < run_count(&f.lse); i++)
        sum += isfinite(run_get(&f.lse, i)) ? run_get(&f.lse, i) * run_get(o->d_lse, i) : 0;
    run_drop(&f);
    return sum;
}

/* Every step'th element of x, whose gradient is held. */
static void check_differences(const case_run *r, const run_options *o, const saccade_tensor *x,
                              const saccade_tensor *gradient, int64_t step)
{
    const double h = 1e-5;
    for (int64_t i = 0; i < run_count(x); i += step) {
        const double at = run_get(x, i);
        run_put(x, i, at + h);
        const double above = run_get(x, i), up = loss(r, o); /* as x's dtype has it */
        run_put(x, i, at - h);
        const double below = run_get(x, i), down = loss(r, o);
        run_put(x, i, at);
        assert_true(fabs((up - down) / (above - below) - run_get(gradient, i)) <= 1e-7);
    }
}

static saccade_tensor widened(const saccade_tensor *t)
{
    const saccade_tensor wide = run_like(t, SACCADE_F64);
    for (int64_t i = 0; i < run_count(t); i++)
        run_put(&wide, i, run_get(t, i));
    return wide;
}

/* Rows 0 to 2 have no live key: there lse = sink is all. Gradients of narrow sinks may be
 * wide. */
static void differences_of(saccade_dtype sinks_dtype)
{
    const forward_case c = {.problem = "b2 h2 q9 kv12 d8 f32", .mask = "q >= kv + 3"};
    case_run r;
    run_results f;
    case_make(&c, &r);
    const int64_t shape[4] = {r.sizes.B, r.sizes.H, r.sizes.Q, r.sizes.Dv};
    const saccade_tensor d_out = run_make(SACCADE_F64, 4, shape);
    const saccade_tensor d_lse = run_make(SACCADE_F64, 3, shape);
    case_tensor *const inputs[] = {&r.q, &r.k, &r.v};
    saccade_tensor narrow[3], sinks = sinks_of(&r.sizes, SINK_PER_HEAD, sinks_dtype);
    for (int n = 0; n < 3; n++) {
        narrow[n] = inputs[n]->t;
        inputs[n]->t = widened(&narrow[n]);
    }
    run_put(&sinks, 1, -0.75);
    run_randomise(&d_out, 5);
    run_randomise(&d_lse, 6);
    run_options o = options_of(&r, "ref", NULL, &sinks);
    o.problem.dtype = o.problem.kv_dtype = SACCADE_F64;
    o.problem.gradients = Q_K_V_SINKS;
    o.d_out = &d_out;
    o.d_lse = &d_lse;
    both_ways(&r, &o, &f);
    assert_int_equal(f.d_sinks.dtype, SACCADE_F64);
    check_differences(&r, &o, &sinks, &f.d_sinks, 1);
    check_differences(&r, &o, &r.q.t, &f.dq, 29);
    check_differences(&r, &o, &r.k.t, &f.dk, 29);
    check_differences(&r, &o, &r.v.t, &f.dv, 29);
    for (int n = 0; n < 3; n++) {
        free(inputs[n]->t.data);
        inputs[n]->t = narrow[n];
    }
    run_drop(&f);
    free(sinks.data);
    free(d_out.data);
    free(d_lse.data);
    case_free(&r);
}

static void differences(void **unused)
{
    (void)unused;
    differences_of(SACCADE_F64);
    differences_of(SACCADE_F32);
}

/* ---- parts ---- */

static void merge(const run_results part[2], run_results *to)
{
    const saccade_tensor outs[2] = {part[0].out, part[1].out};
    const saccade_tensor lses[2] = {part[0].lse, part[1].lse};
    saccade_merge_args a;
    saccade_merge_args_init(&a);
    a.outs = outs;
    a.lses = lses;
    a.n = 2;
    a.out = &to->out;
    a.lse = &to->lse;
    assert_int_equal(saccade_merge(NULL, &a, NULL), SACCADE_OK);
}

/* Two halves of the keys, of which the first has the sinks, merge to the whole. */
static void parts_merge(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b1 h4/2 q20 kv64 d16 f32"};
    case_run r;
    run_results whole, part[2], merged;
    case_make(&c, &r);
    const saccade_tensor sinks = sinks_of(&r.sizes, SINK_PER_HEAD, SACCADE_F32);
    const run_options with = options_of(&r, "cpu", NULL, &sinks);
    const run_options without = options_of(&r, "cpu", NULL, NULL);
    const saccade_tensor k = r.k.t, v = r.v.t;
    run_forward(&r, &with, &whole);
    run_forward(&r, &with, &merged);
    for (int n = 0; n < 2; n++) {
        r.k.t.shape[2] = r.v.t.shape[2] = 32;
        r.k.t.data = (float *)k.data + n * 32 * k.stride[2];
        r.v.t.data = (float *)v.data + n * 32 * v.stride[2];
        run_forward(&r, n ? &without : &with, &part[n]);
    }
    r.k.t = k;
    r.v.t = v;
    merge(part, &merged);
    for (int64_t i = 0; i < run_count(&whole.out); i++)
        assert_true(fabs(run_get(&whole.out, i) - run_get(&merged.out, i)) <= 1e-6);
    for (int64_t i = 0; i < run_count(&whole.lse); i++) {
        const double x = run_get(&whole.lse, i);
        assert_true(fabs(x - run_get(&merged.lse, i)) <= 1e-6 * (1 + fabs(x)));
    }
    run_drop(&whole);
    run_drop(&merged);
    run_drop(&part[0]);
    run_drop(&part[1]);
    free(sinks.data);
    case_free(&r);
}

/* ---- mistakes ---- */

static void refuses(const case_run *r, const saccade_problem *p, const saccade_tensor *sinks,
                    const char *says)
{
    saccade_error err = {0};
    saccade_plan *plan;
    assert_int_equal(saccade_plan_create(NULL, p, &plan, &err), SACCADE_OK);
    saccade_forward_args a = r->args;
    a.q = &r->q.t;
    a.k = &r->k.t;
    a.v = &r->v.t;
    a.out = &r->q.t; /* never looked at */
    a.sinks = sinks;
    assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "sinks");
    assert_non_null(strstr(err.message, says));
    saccade_plan_destroy(plan);
}

/* Each sink's gradient has a place: none is a sum over a stride of 0. */
static void refuses_one_place(const case_run *r, const saccade_tensor *sinks)
{
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_problem p = options_of(r, NULL, NULL, sinks).problem;
    saccade_tensor d_sinks = *sinks;
    saccade_backward_args a;
    d_sinks.stride[0] = 0;
    p.gradients = SACCADE_GRADIENT_SINKS;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    const int64_t shape[3] = {r->sizes.B, r->sizes.H, r->sizes.Q};
    const saccade_tensor lse = run_make(SACCADE_F32, 3, shape);
    saccade_backward_args_init(&a);
    a.q = a.out = a.d_out = &r->q.t;
    a.k = &r->k.t;
    a.v = &r->v.t;
    a.lse = &lse;
    a.positions = r->args.positions;
    a.sinks = sinks;
    a.d_sinks = &d_sinks;
    assert_int_equal(saccade_backward(plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "d_sinks");
    assert_non_null(strstr(err.message, "got stride 0"));
    free(lse.data);
    saccade_plan_destroy(plan);
}

static void mistakes(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b2 h4/2 q20 kv64 d16 f32"};
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    case_run r;
    case_make(&c, &r);
    saccade_tensor sinks = sinks_of(&r.sizes, SINK_PER_HEAD, SACCADE_F32);
    saccade_problem p = options_of(&r, NULL, NULL, &sinks).problem;
    refuses(&r, &p, NULL, "got no tensor");
    refuses_one_place(&r, &sinks);
    sinks.shape[0] = 3;
    refuses(&r, &p, &sinks, "expected 4");
    sinks.shape[0] = 4;
    sinks.dtype = SACCADE_BF16;
    refuses(&r, &p, &sinks, "expected f32");
    sinks.rank = 2;
    refuses(&r, &p, &sinks, "got rank 2");
    p.sinks_dtype = SACCADE_NONE;
    refuses(&r, &p, &sinks, "no sinks_dtype");
    p.gradients = Q_K_V_SINKS;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "gradients");
    p.sinks_dtype = SACCADE_I32;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "sinks_dtype");
    free(sinks.data);
    case_free(&r);
}

/* argument: which tests to run, with * */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_is_sigmoid),
        cmocka_unit_test(levels_agree),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(gradients_agree),
        cmocka_unit_test(dead_rows_give_nothing),
        cmocka_unit_test(differences),
        cmocka_unit_test(parts_merge),
        cmocka_unit_test(mistakes),
        cmocka_unit_test(device_agrees),
        cmocka_unit_test(device_gradients_agree),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
