/* Sinks: the oracle against its formula out sigmoid(lse - sink) and finite differences, back
 * ends and levels against the oracle, all kinds of sinks that a row may meet, gradients, and
 * parts of the keys of which one has them. */
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

/* Every head and row of a run has its sink; strides of 0 where one serves many. */
typedef enum sink_kind { SINK_PER_HEAD, SINK_PER_ROW, SINK_KINDS } sink_kind;

typedef struct results {
    saccade_tensor out, lse, row_max, dq, dk, dv, sinks;
} results;

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

static saccade_tensor make(saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    t.data = calloc((size_t)count(&t), saccade_dtype_bytes(dtype));
    assert_non_null(t.data);
    return t;
}

static double get(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

static void put(const saccade_tensor *t, int64_t at, double x)
{
    const float narrow = (float)x;
    if (t->dtype == SACCADE_F64)
        ((double *)t->data)[at] = x;
    else
        convert_from_f32(t->dtype, &narrow,
                         (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype), 1);
}

/* From nothing to far above every score. */
static const double values[] = {0.5,  -INFINITY, 3,      -2.25, 40,     1.5,
                                -500, 1e4,       -0.125, 5,     -3e38f, 2};
enum { VALUES = sizeof values / sizeof values[0] };

static saccade_tensor sinks_of(const saccade_sizes *s, sink_kind kind, saccade_dtype dtype)
{
    const int64_t head[1] = {s->H}, row[3] = {1, s->H, s->Q};
    const saccade_tensor t = kind == SINK_PER_HEAD ? make(dtype, 1, head) : make(dtype, 3, row);
    for (int64_t i = 0; i < count(&t); i++)
        put(&t, i, values[i % VALUES]);
    return t;
}

/* ---- runs ---- */

static saccade_plan *plan_of(const saccade_problem *p, const char *level)
{
    saccade_error err = {0};
    saccade_context *context;
    saccade_plan *plan;
    const saccade_context_options options = {
        .size = sizeof options, .threads = 2, .level = level};
    assert_int_equal(saccade_context_create(&options, &context, &err), SACCADE_OK);
    if (saccade_plan_create(context, p, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    saccade_context_destroy(context);
    return plan;
}

static void *take(size_t *bytes)
{
    *bytes = (*bytes + 63) / 64 * 64;
    return *bytes ? aligned_alloc(64, *bytes) : NULL;
}

static saccade_problem problem_of(const case_run *r, saccade_dtype sinks, const char *backend)
{
    saccade_problem p = r->problem;
    p.sinks_dtype = sinks;
    p.backend = backend;
    return p;
}

/* want: CASE_OUT_ONLY leaves lse and row_max out. */
static void forward(const case_run *r, const saccade_problem *p, const char *level,
                    const saccade_tensor *sinks, case_outputs want, results *to)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    const saccade_dtype stat = p->dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    saccade_error err = {0};
    saccade_plan *plan = plan_of(p, level);
    saccade_forward_args a = r->args;
    *to = (results){.out = make(p->out_dtype ? p->out_dtype : p->dtype, 4, shape),
                    .lse = make(stat, 3, shape),
                    .row_max = make(stat, 3, shape)};
    a.q = &r->q.t;
    a.k = &r->k.t;
    a.v = &r->v.t;
    a.out = &to->out;
    a.lse = want == CASE_OUT_ONLY ? NULL : &to->lse;
    a.row_max = want == CASE_ALL ? &to->row_max : NULL;
    a.sinks = sinks;
    a.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace = take(&a.workspace_bytes);
    if (saccade_forward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
    saccade_plan_destroy(plan);
}

static void drop(results *r)
{
    saccade_tensor *all[] = {&r->out, &r->lse, &r->row_max, &r->dq, &r->dk, &r->dv, &r->sinks};
    for (int i = 0; i < 7; i++)
        free(all[i]->data);
}

static double ulp_at(saccade_dtype dtype, double at)
{
    const int bits = dtype == SACCADE_BF16 ? 8 : dtype == SACCADE_F16 ? 11 : 24;
    return at == 0 ? 0 : ldexp(1, ilogb(at) - bits + 1);
}

/* Within 2 |plain - gold| + ulps, inf and NaN exactly. */
static void compare(const char *what, const case_run *r, const saccade_tensor *got,
                    const saccade_tensor *plain, const saccade_tensor *gold, int ulps)
{
    double error = 0, most = 0;
    for (int64_t i = 0; i < count(gold); i++)
        if (isfinite(get(gold, i))) {
            error = fmax(error, fabs(get(plain, i) - get(gold, i)));
            most = fmax(most, fabs(get(gold, i)));
        }
    const double bound = 2 * error + ulps * ulp_at(got->dtype, most);
    for (int64_t i = 0; i < count(gold); i++) {
        const double x = get(got, i), y = get(gold, i);
        const int is_same = isnan(y) ? isnan(x) : x == y;
        if (isfinite(y) ? !(fabs(x - y) <= bound) : !is_same)
            fail_msg("%s[%lld]: got %.9g, expected %.9g within %.3g, %s", what, (long long)i, x,
                     y, bound, r->c.problem);
    }
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

static void one_forward(const case_run *r, sink_kind kind, saccade_dtype dtype)
{
    const saccade_tensor sinks = sinks_of(&r->sizes, kind, dtype);
    const saccade_problem ref = problem_of(r, dtype, "ref"), cpu = problem_of(r, dtype, "cpu");
    const saccade_problem three = problem_of(r, dtype, "plain");
    results gold, plain, got;
    saccade_problem wide = ref;
    wide.out_dtype = r->dtype == SACCADE_F32 ? SACCADE_NONE : SACCADE_F32;
    forward(r, &wide, NULL, &sinks, CASE_ALL, &gold);
    forward(r, &three, NULL, &sinks, CASE_ALL, &plain);
    for (int want = CASE_ALL; want <= CASE_OUT_ONLY; want++)
        for (const char *const *level = case_levels(); *level; level++) {
            forward(r, &cpu, *level, &sinks, (case_outputs)want, &got);
            compare(*level, r, &got.out, &plain.out, &gold.out, 2);
            if (want != CASE_OUT_ONLY)
                compare("lse", r, &got.lse, &plain.lse, &gold.lse, 4);
            if (want == CASE_ALL)
                compare("row_max", r, &got.row_max, &plain.row_max, &gold.row_max, 8);
            drop(&got);
        }
    drop(&gold);
    drop(&plain);
    free(sinks.data);
}

static void levels_agree(void **unused)
{
    (void)unused;
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    for (int n = 0; n < CASES; n++) {
        case_run r;
        case_make(&cases[n], &r);
        for (int kind = 0; kind < SINK_KINDS; kind++)
            one_forward(&r, (sink_kind)kind, dtypes[(n + kind) % 3]);
        case_free(&r);
    }
}

/* The oracle by its other formula: what it gives without sinks, times sigmoid(lse - sink). */
static void oracle_is_sigmoid(void **unused)
{
    (void)unused;
    case_run r;
    results with, without;
    case_make(&cases[3], &r);
    const saccade_sizes *s = &r.sizes;
    const saccade_tensor sinks = sinks_of(s, SINK_PER_ROW, SACCADE_F32);
    saccade_problem p = problem_of(&r, SACCADE_F32, "ref");
    p.out_dtype = SACCADE_F32;
    forward(&r, &p, NULL, &sinks, CASE_ALL, &with);
    p.sinks_dtype = SACCADE_NONE;
    forward(&r, &p, NULL, NULL, CASE_ALL, &without);
    for (int64_t row = 0; row < s->B * s->H * s->Q; row++) {
        const double a = get(&sinks, row % (s->H * s->Q)), lse = get(&without.lse, row);
        const double keep = lse == -INFINITY ? 0 : 1 / (1 + exp(a - lse));
        const double sum = lse == -INFINITY ? a : fmax(a, lse) + log1p(exp(-fabs(a - lse)));
        assert_true(get(&with.row_max, row) == get(&without.row_max, row));
        assert_true(sum == get(&with.lse, row)
                    || fabs(sum - get(&with.lse, row)) <= 1e-6 * (1 + fabs(sum)));
        for (int64_t d = 0; d < s->Dv; d++)
            assert_true(fabs(keep * get(&without.out, row * s->Dv + d)
                             - get(&with.out, row * s->Dv + d))
                        <= 1e-6);
    }
    drop(&with);
    drop(&without);
    free(sinks.data);
    case_free(&r);
}

/* +inf and NaN make their row NaN, and leave other rows alone; dead rows are 0 even then. */
static void nan_stays_in_its_row(void **unused)
{
    (void)unused;
    for (int n = 0; n < 2; n++) {
        case_run r;
        results got;
        case_make(&cases[n ? 3 : 4], &r);
        const saccade_sizes *s = &r.sizes;
        const saccade_tensor sinks = sinks_of(s, SINK_PER_ROW, SACCADE_F32);
        const saccade_problem p = problem_of(&r, SACCADE_F32, "cpu");
        put(&sinks, 50, NAN);
        put(&sinks, 51, INFINITY);
        put(&sinks, 2, NAN); /* dead in case 3 */
        for (const char *const *level = case_levels(); *level; level++) {
            forward(&r, &p, *level, &sinks, CASE_ALL, &got);
            for (int64_t row = 0; row < s->Q; row++) {
                const int is_nan = row == 50 || row == 51 || (row == 2 && !n);
                assert_true(isnan(get(&got.out, row * s->Dv)) == is_nan);
                assert_true(isnan(get(&got.lse, row)) == (is_nan || row == 2));
                assert_false(isnan(get(&got.row_max, row)));
            }
            drop(&got);
        }
        free(sinks.data);
        case_free(&r);
    }
}

/* ---- backward ---- */

enum {
    Q_K_V_SINKS =
        SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V | SACCADE_GRADIENT_SINKS
};

static saccade_tensor like(const saccade_tensor *t, saccade_dtype dtype)
{
    return make(dtype, t->rank, t->shape);
}

/* f: forward's out and lse; gradients in f32, which begin at `start` and are added to. */
static void backward(const case_run *r, const saccade_problem *p, const char *level,
                     const saccade_tensor *sinks, const saccade_tensor *d_out,
                     const saccade_tensor *d_lse, double start, results *f)
{
    saccade_error err = {0};
    saccade_plan *plan = plan_of(p, level);
    saccade_backward_args a;
    const saccade_dtype dtype = p->dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    f->dq = like(&r->q.t, dtype);
    f->dk = like(&r->k.t, dtype);
    f->dv = like(&r->v.t, dtype);
    f->sinks = like(sinks, dtype);
    for (int64_t i = 0; i < count(sinks); i++)
        put(&f->sinks, i, start);
    saccade_backward_args_init(&a);
    a.accumulate = start != 0 ? SACCADE_GRADIENT_SINKS : 0;
    a.q = &r->q.t;
    a.k = &r->k.t;
    a.v = &r->v.t;
    a.out = &f->out;
    a.lse = &f->lse;
    a.d_out = d_out;
    a.d_lse = d_lse;
    a.d_q = &f->dq;
    a.d_k = &f->dk;
    a.d_v = &f->dv;
    a.sinks = sinks;
    a.d_sinks = &f->sinks;
    a.positions = r->args.positions;
    a.bindings = r->args.bindings;
    a.n_bindings = r->args.n_bindings;
    assert_int_equal(saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err),
                     SACCADE_OK);
    a.workspace = take(&a.workspace_bytes);
    if (saccade_backward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
    saccade_plan_destroy(plan);
}

static void fill(const saccade_tensor *t, uint64_t seed)
{
    for (int64_t i = 0; i < count(t); i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        put(t, i, (double)(seed >> 40) * 0x1p-23 - 1);
    }
}

/* Sums are compared at the size of their terms. */
static void compare_sinks(const char *level, const results *got, const results *plain,
                          const results *gold, double start, double terms)
{
    double error = 0;
    for (int64_t i = 0; i < count(&gold->sinks); i++)
        error = fmax(error, fabs(get(&plain->sinks, i) - get(&gold->sinks, i)));
    for (int64_t i = 0; i < count(&gold->sinks); i++) {
        const double x = get(&got->sinks, i), y = get(&gold->sinks, i);
        if (!(fabs(x - y) <= 2 * error + 4 * ulp_at(gold->out.dtype, 1) * sqrt(terms)))
            fail_msg("%s: d_sinks[%lld]: got %.9g, expected %.9g within %.3g (start %g)", level,
                     (long long)i, x, y, 2 * error, start);
    }
}

static void one_backward(const case_run *r, sink_kind kind, int has_d_lse, double start)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    const saccade_tensor sinks = sinks_of(s, kind, SACCADE_F32);
    const saccade_tensor d_out = make(r->dtype, 4, shape), d_lse = make(SACCADE_F32, 3, shape);
    const char *const backends[] = {"ref", "plain", "cpu"};
    const double terms = kind == SINK_PER_HEAD ? (double)(s->B * s->Q) : (double)s->B;
    results gold, plain, got;
    saccade_problem p[3];
    fill(&d_out, 3);
    fill(&d_lse, 4);
    for (int n = 0; n < 3; n++) {
        p[n] = problem_of(r, SACCADE_F32, backends[n]);
        p[n].gradients = Q_K_V_SINKS;
    }
    results *const with[2] = {&gold, &plain};
    for (int n = 0; n < 2; n++) {
        forward(r, &p[n], NULL, &sinks, CASE_ALL, with[n]);
        backward(r, &p[n], NULL, &sinks, &d_out, has_d_lse ? &d_lse : NULL, start, with[n]);
    }
    for (const char *const *level = case_levels(); *level; level++) {
        forward(r, &p[2], *level, &sinks, CASE_ALL, &got);
        backward(r, &p[2], *level, &sinks, &d_out, has_d_lse ? &d_lse : NULL, start, &got);
        compare("dq", r, &got.dq, &plain.dq, &gold.dq, 16);
        compare("dk", r, &got.dk, &plain.dk, &gold.dk, 16);
        compare("dv", r, &got.dv, &plain.dv, &gold.dv, 16);
        compare_sinks(*level, &got, &plain, &gold, start, terms);
        drop(&got);
    }
    drop(&gold);
    drop(&plain);
    free(sinks.data);
    free(d_out.data);
    free(d_lse.data);
}

static void gradients_agree(void **unused)
{
    (void)unused;
    static const int which[] = {0, 3, 4, 6};
    for (int n = 0; n < 4; n++) {
        case_run r;
        forward_case c = cases[which[n]];
        c.kv_len = 0; /* no NaN past the end: gradients there are held against 0 */
        case_make(&c, &r);
        for (int kind = 0; kind < SINK_KINDS; kind++)
            one_backward(&r, (sink_kind)kind, n % 2 == 0, kind ? 2.5 : 0);
        case_free(&r);
    }
}

/* sum(out d_out) + sum(lse d_lse) of a float64 problem. */
static double loss(const case_run *r, const saccade_problem *p, const saccade_tensor *sinks,
                   const saccade_tensor *d_out, const saccade_tensor *d_lse)
{
    results f;
    double sum = 0;
    forward(r, p, NULL, sinks, CASE_ALL, &f);
    for (int64_t i = 0; i < count(&f.out); i++)
        sum += get(&f.out, i) * get(d_out, i);
    for (int64_t i = 0; i < count(&f.lse); i++)
        sum += isfinite(get(&f.lse, i)) ? get(&f.lse, i) * get(d_lse, i) : 0;
    drop(&f);
    return sum;
}

static saccade_tensor widened(const saccade_tensor *t)
{
    const saccade_tensor wide = like(t, SACCADE_F64);
    for (int64_t i = 0; i < count(t); i++)
        put(&wide, i, get(t, i));
    return wide;
}

/* Rows 0 to 2 have no live key: there lse = sink is all. */
static void differences(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b2 h2 q9 kv12 d8 f32", .mask = "q >= kv + 3"};
    case_run r;
    results f;
    case_make(&c, &r);
    const saccade_sizes *s = &r.sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    const saccade_tensor d_out = make(SACCADE_F64, 4, shape);
    const saccade_tensor d_lse = make(SACCADE_F64, 3, shape);
    case_tensor *const inputs[] = {&r.q, &r.k, &r.v};
    saccade_tensor narrow[3], sinks = sinks_of(s, SINK_PER_HEAD, SACCADE_F64);
    for (int n = 0; n < 3; n++) {
        narrow[n] = inputs[n]->t;
        inputs[n]->t = widened(&narrow[n]);
    }
    put(&sinks, 1, -0.75);
    fill(&d_out, 5);
    fill(&d_lse, 6);
    saccade_problem p = problem_of(&r, SACCADE_F64, "ref");
    p.dtype = SACCADE_F64;
    p.kv_dtype = SACCADE_F64;
    p.gradients = Q_K_V_SINKS;
    forward(&r, &p, NULL, &sinks, CASE_ALL, &f);
    backward(&r, &p, NULL, &sinks, &d_out, &d_lse, 0, &f);
    for (int64_t h = 0; h < s->H; h++) {
        const double at = get(&sinks, h), step = 1e-5;
        put(&sinks, h, at + step);
        const double up = loss(&r, &p, &sinks, &d_out, &d_lse);
        put(&sinks, h, at - step);
        const double down = loss(&r, &p, &sinks, &d_out, &d_lse);
        put(&sinks, h, at);
        assert_true(fabs((up - down) / (2 * step) - get(&f.sinks, h)) <= 1e-7);
    }
    for (int n = 0; n < 3; n++) { /* and a few elements of q, k and v */
        const saccade_tensor *gradient[] = {&f.dq, &f.dk, &f.dv};
        for (int64_t i = 3; i < count(&inputs[n]->t); i += 29) {
            const double at = get(&inputs[n]->t, i), step = 1e-5;
            put(&inputs[n]->t, i, at + step);
            const double up = loss(&r, &p, &sinks, &d_out, &d_lse);
            put(&inputs[n]->t, i, at - step);
            const double down = loss(&r, &p, &sinks, &d_out, &d_lse);
            put(&inputs[n]->t, i, at);
            assert_true(fabs((up - down) / (2 * step) - get(gradient[n], i)) <= 1e-7);
        }
    }
    for (int n = 0; n < 3; n++) {
        free(inputs[n]->t.data);
        inputs[n]->t = narrow[n];
    }
    drop(&f);
    free(sinks.data);
    free(d_out.data);
    free(d_lse.data);
    case_free(&r);
}

/* ---- parts ---- */

/* Two halves of the keys, of which the first has the sinks, merge to the whole. */
static void parts_merge(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b1 h4/2 q20 kv64 d16 f32"};
    case_run r;
    results whole, part[2], merged;
    case_make(&c, &r);
    const saccade_tensor sinks = sinks_of(&r.sizes, SINK_PER_HEAD, SACCADE_F32);
    saccade_problem p = problem_of(&r, SACCADE_F32, "cpu");
    const saccade_tensor k = r.k.t, v = r.v.t;
    forward(&r, &p, NULL, &sinks, CASE_ALL, &whole);
    forward(&r, &p, NULL, &sinks, CASE_ALL, &merged);
    for (int n = 0; n < 2; n++) {
        r.k.t.shape[2] = r.v.t.shape[2] = 32;
        r.k.t.data = (float *)k.data + n * 32 * k.stride[2];
        r.v.t.data = (float *)v.data + n * 32 * v.stride[2];
        p.sinks_dtype = n ? SACCADE_NONE : SACCADE_F32;
        forward(&r, &p, NULL, n ? NULL : &sinks, CASE_ALL, &part[n]);
    }
    r.k.t = k;
    r.v.t = v;
    const saccade_tensor outs[2] = {part[0].out, part[1].out};
    const saccade_tensor lses[2] = {part[0].lse, part[1].lse};
    saccade_merge_args a;
    saccade_merge_args_init(&a);
    a.outs = outs;
    a.lses = lses;
    a.n = 2;
    a.out = &merged.out;
    a.lse = &merged.lse;
    assert_int_equal(saccade_merge(NULL, &a, NULL), SACCADE_OK);
    for (int64_t i = 0; i < count(&whole.out); i++)
        assert_true(fabs(get(&whole.out, i) - get(&merged.out, i)) <= 1e-6);
    for (int64_t i = 0; i < count(&whole.lse); i++)
        assert_true(fabs(get(&whole.lse, i) - get(&merged.lse, i))
                    <= 1e-6 * (1 + fabs(get(&whole.lse, i))));
    drop(&whole);
    drop(&merged);
    drop(&part[0]);
    drop(&part[1]);
    free(sinks.data);
    case_free(&r);
}

/* ---- mistakes ---- */

static void refuses(const case_run *r, const saccade_problem *p, const saccade_tensor *sinks,
                    const char *says)
{
    saccade_error err = {0};
    saccade_plan *plan = plan_of(p, NULL);
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

static void mistakes(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b2 h4/2 q20 kv64 d16 f32"};
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    case_run r;
    case_make(&c, &r);
    saccade_tensor sinks = sinks_of(&r.sizes, SINK_PER_HEAD, SACCADE_F32);
    saccade_problem p = problem_of(&r, SACCADE_F32, NULL);
    refuses(&r, &p, NULL, "got no tensor");
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_is_sigmoid),
        cmocka_unit_test(levels_agree),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(gradients_agree),
        cmocka_unit_test(differences),
        cmocka_unit_test(parts_merge),
        cmocka_unit_test(mistakes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
