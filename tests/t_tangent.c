/* saccade_tangent: forward mode and second derivatives by the oracle in float64, against finite
 * differences of forward and backward, by the symmetry of second derivatives, and what is
 * refused. */
#include "saccade.h"

#include "support/fail_alloc.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { H = 4, HKV = 2, Q = 7, KV = 9, D = 5, DV = 3 };
enum { NQ = H * Q * D, NK = HKV * KV * D, NV = HKV * KV * DV, NB = H * KV, NO = H * Q * DV };
enum { AT_Q, AT_K = NQ, AT_V = AT_K + NK, AT_B = AT_V + NV, AT_W = AT_B + NB, ALL = AT_W + 1 };

static const int64_t q_shape[] = {1, H, Q, D}, k_shape[] = {1, HKV, KV, D},
                     v_shape[] = {1, HKV, KV, DV}, o_shape[] = {1, H, Q, DV},
                     bias_shape[] = {H, KV};
static const saccade_sizes sizes = {1, H, HKV, Q, KV, D, DV};

static const char *const scores[] = {
    "x = score + w * bias[h, kv]; 3.0 * tanh(x / 3.0)",
    "score * w + bias[h, kv] * bias[h, (q + kv) % KV] * score",
    "q > kv ? exp(0.3 * score) * w : score + sqrt(2.0 + bias[h, kv] * bias[h, kv])",
    "kv == 3 ? -inf : bias[h, int(abs(kv - q))] * sigmoid(score) + w * w * score",
    NULL,
};
static const char mask_text[] = "q + 2 >= kv && kv != 1 && q != 4";

/* One vector of all inputs, or of all gradients. */
typedef struct point {
    double x[ALL];
} point;

static double noise(int n, int salt)
{
    const double x = sin(n * 12.9898 + salt * 78.233) * 43758.5453;
    return 2 * (x - floor(x)) - 1;
}

static point random_point(int salt)
{
    point p;
    for (int i = 0; i < ALL; i++)
        p.x[i] = noise(i, salt);
    return p;
}

static saccade_tensor view(double *x, int32_t rank, const int64_t *shape)
{
    return saccade_tensor_of(x, SACCADE_F64, rank, shape);
}

static saccade_mod *mod_of(saccade_kind kind, const char *text)
{
    const saccade_capture captures[] = {{"bias", SACCADE_F64, 2}, {"w", SACCADE_F64, 0}};
    saccade_mod *generic, *bound = NULL;
    saccade_error err = {0};
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, &err), 0);
    if (saccade_mod_bind(generic, captures, kind == SACCADE_SCORE ? 2 : 0, &bound, &err))
        fail_msg("%s", err.message);
    saccade_mod_destroy(generic);
    return bound;
}

typedef struct problem {
    saccade_mod *score, *mask;
    saccade_plan *plan;
    int n_captures;
} problem;

static problem open_problem(const char *score, const char *backend)
{
    static const char *const names[] = {"bias", "w"};
    problem p = {.score = score ? mod_of(SACCADE_SCORE, score) : NULL,
                 .mask = mod_of(SACCADE_MASK, mask_text),
                 .n_captures = score ? 2 : 0};
    saccade_error err = {0};
    saccade_problem of;
    saccade_problem_init(&of);
    of.sizes = sizes;
    of.dtype = SACCADE_F64;
    of.score = p.score;
    of.mask = p.mask;
    of.backend = backend;
    of.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V
                   | (score ? SACCADE_GRADIENT_CAPTURES : 0);
    of.gradient_captures = names;
    of.n_gradient_captures = p.n_captures;
    if (saccade_plan_create(NULL, &of, &p.plan, &err))
        fail_msg("%s", err.message);
    return p;
}

static void close_problem(problem *p)
{
    saccade_plan_destroy(p->plan);
    saccade_mod_destroy(p->score);
    saccade_mod_destroy(p->mask);
}

/* Upstream gradients, held. */
static double d_out[NO], d_lse[H * Q];

/* out, lse and gradients at a point. */
typedef struct value {
    double out[NO], lse[H * Q];
    point d;
} value;

static value value_at(const problem *p, point *at)
{
    value r;
    memset(&r, 0, sizeof r);
    const saccade_tensor q = view(at->x + AT_Q, 4, q_shape), k = view(at->x + AT_K, 4, k_shape);
    const saccade_tensor v = view(at->x + AT_V, 4, v_shape), out = view(r.out, 4, o_shape);
    const saccade_tensor lse = view(r.lse, 3, o_shape), from = view(d_out, 4, o_shape);
    const saccade_tensor from_lse = view(d_lse, 3, o_shape);
    const saccade_tensor dq = view(r.d.x + AT_Q, 4, q_shape);
    const saccade_tensor dk = view(r.d.x + AT_K, 4, k_shape);
    const saccade_tensor dv = view(r.d.x + AT_V, 4, v_shape);
    const saccade_binding given[] = {{"bias", view(at->x + AT_B, 2, bias_shape)},
                                     {"w", view(at->x + AT_W, 0, NULL)}};
    const saccade_binding d_given[] = {{"bias", view(r.d.x + AT_B, 2, bias_shape)},
                                       {"w", view(r.d.x + AT_W, 0, NULL)}};
    saccade_error err = {0};
    saccade_forward_args f;
    saccade_backward_args a;
    saccade_forward_args_init(&f);
    saccade_backward_args_init(&a);
    f.q = a.q = &q;
    f.k = a.k = &k;
    f.v = a.v = &v;
    f.out = a.out = &out;
    f.lse = a.lse = &lse;
    f.bindings = a.bindings = given;
    f.n_bindings = a.n_bindings = p->n_captures;
    f.workspace_bytes = saccade_plan_workspace(p->plan, &sizes);
    f.workspace = aligned_alloc(64, (f.workspace_bytes + 63) / 64 * 64);
    assert_int_equal(saccade_forward(p->plan, &f, &err), SACCADE_OK);
    free(f.workspace);
    a.d_out = &from;
    a.d_lse = &from_lse;
    a.d_q = &dq;
    a.d_k = &dk;
    a.d_v = &dv;
    a.d_captures = d_given;
    a.n_d_captures = p->n_captures;
    if (saccade_backward(p->plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    return r;
}

/* The tangents of all that value_at gives, in direction u. */
static saccade_status tangent_at(const problem *p, point *at, point *u, value *r,
                                 saccade_error *err)
{
    memset(r, 0xff, sizeof *r);
    const saccade_tensor q = view(at->x + AT_Q, 4, q_shape), k = view(at->x + AT_K, 4, k_shape);
    const saccade_tensor v = view(at->x + AT_V, 4, v_shape), out = view(r->out, 4, o_shape);
    const saccade_tensor lse = view(r->lse, 3, o_shape), from = view(d_out, 4, o_shape);
    const saccade_tensor from_lse = view(d_lse, 3, o_shape);
    const saccade_tensor q_dot = view(u->x + AT_Q, 4, q_shape);
    const saccade_tensor k_dot = view(u->x + AT_K, 4, k_shape);
    const saccade_tensor v_dot = view(u->x + AT_V, 4, v_shape);
    const saccade_tensor dq = view(r->d.x + AT_Q, 4, q_shape);
    const saccade_tensor dk = view(r->d.x + AT_K, 4, k_shape);
    const saccade_tensor dv = view(r->d.x + AT_V, 4, v_shape);
    const saccade_binding given[] = {{"bias", view(at->x + AT_B, 2, bias_shape)},
                                     {"w", view(at->x + AT_W, 0, NULL)}};
    const saccade_binding dots[] = {{"bias", view(u->x + AT_B, 2, bias_shape)},
                                    {"w", view(u->x + AT_W, 0, NULL)}};
    const saccade_binding results[] = {{"bias", view(r->d.x + AT_B, 2, bias_shape)},
                                       {"w", view(r->d.x + AT_W, 0, NULL)}};
    saccade_tangent_args a;
    saccade_tangent_args_init(&a);
    a.q = &q;
    a.k = &k;
    a.v = &v;
    a.q_dot = &q_dot;
    a.k_dot = &k_dot;
    a.v_dot = &v_dot;
    a.captures_dot = dots;
    a.n_captures_dot = p->n_captures;
    a.out_dot = &out;
    a.lse_dot = &lse;
    a.d_out = &from;
    a.d_lse = &from_lse;
    a.d_q_dot = &dq;
    a.d_k_dot = &dk;
    a.d_v_dot = &dv;
    a.d_captures_dot = results;
    a.n_d_captures_dot = p->n_captures;
    a.bindings = given;
    a.n_bindings = p->n_captures;
    return saccade_tangent(p->plan, &a, err);
}

static void near(const char *what, const double *got, const double *a, const double *b, int n,
                 double step)
{
    double most = 0;
    for (int i = 0; i < n; i++) {
        const double slope = isinf(a[i]) ? 0 : (a[i] - b[i]) / (2 * step); /* dead rows' lse */
        most = fabs(slope) > most ? fabs(slope) : most;
        if (!(fabs(got[i] - slope) <= 1e-7 * (1 + fabs(slope))))
            fail_msg("%s[%d]: got %.12g, expected %.12g", what, i, got[i], slope);
    }
    assert_true(most > 1e-3);
}

static void begin(void)
{
    for (int i = 0; i < NO; i++)
        d_out[i] = noise(i, 31);
    for (int i = 0; i < H * Q; i++)
        d_lse[i] = noise(i, 32);
}

static void tangents_are_slopes(void **state)
{
    const double step = 1e-5;
    (void)state;
    begin();
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++) {
        problem p = open_problem(scores[n], "ref");
        point at = random_point(1), u = random_point(2), up = at, down = at;
        value dot;
        for (int i = 0; i < ALL; i++) {
            up.x[i] += step * u.x[i];
            down.x[i] -= step * u.x[i];
        }
        const value a = value_at(&p, &up), b = value_at(&p, &down);
        assert_int_equal(tangent_at(&p, &at, &u, &dot, NULL), SACCADE_OK);
        near("out", dot.out, a.out, b.out, NO, step);
        near("lse", dot.lse, a.lse, b.lse, H * Q, step);
        near("dq", dot.d.x + AT_Q, a.d.x + AT_Q, b.d.x + AT_Q, NQ, step);
        near("dk", dot.d.x + AT_K, a.d.x + AT_K, b.d.x + AT_K, NK, step);
        near("dv", dot.d.x + AT_V, a.d.x + AT_V, b.d.x + AT_V, NV, step);
        if (p.n_captures) {
            near("bias", dot.d.x + AT_B, a.d.x + AT_B, b.d.x + AT_B, NB, step);
            near("w", dot.d.x + AT_W, a.d.x + AT_W, b.d.x + AT_W, 1, step);
        }
        close_problem(&p);
    }
}

/* u . (second derivative in direction v) = v . (that in direction u), almost to the bit; the
 * first derivative in direction u is the gradient's product with u. */
static void second_derivatives_are_symmetric(void **state)
{
    (void)state;
    begin();
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++) {
        problem p = open_problem(scores[n], "ref");
        point at = random_point(1), u = random_point(3), v = random_point(4);
        const int all = p.n_captures ? ALL : AT_B;
        double uv = 0, vu = 0, jvp = 0, vjp = 0;
        value by_u, by_v;
        const value here = value_at(&p, &at);
        assert_int_equal(tangent_at(&p, &at, &u, &by_u, NULL), SACCADE_OK);
        assert_int_equal(tangent_at(&p, &at, &v, &by_v, NULL), SACCADE_OK);
        for (int i = 0; i < all; i++) {
            uv += u.x[i] * by_v.d.x[i];
            vu += v.x[i] * by_u.d.x[i];
            vjp += u.x[i] * here.d.x[i];
        }
        for (int i = 0; i < NO; i++)
            jvp += d_out[i] * by_u.out[i];
        for (int i = 0; i < H * Q; i++)
            jvp += d_lse[i] * by_u.lse[i];
        assert_true(fabs(uv) > 0.1);
        assert_true(fabs(uv - vu) <= 1e-11 * fabs(uv));
        assert_true(fabs(jvp - vjp) <= 1e-11 * (1 + fabs(vjp)));
        close_problem(&p);
    }
}

static void what_is_wrong_is_said(void **state)
{
    problem p = open_problem(scores[0], "ref");
    point at = random_point(1);
    double out[NO];
    const saccade_tensor q = view(at.x + AT_Q, 4, q_shape), k = view(at.x + AT_K, 4, k_shape);
    const saccade_tensor v = view(at.x + AT_V, 4, v_shape), o = view(out, 4, o_shape);
    const saccade_binding given[] = {{"bias", view(at.x + AT_B, 2, bias_shape)},
                                     {"w", view(at.x + AT_W, 0, NULL)}};
    const saccade_binding unknown = {"nothing", given[1].tensor};
    saccade_error err = {0};
    saccade_tangent_args good, a;
    (void)state;
    saccade_tangent_args_init(&good);
    good.q = &q;
    good.k = &k;
    good.v = &v;
    good.out_dot = &o;
    good.bindings = given;
    good.n_bindings = 2;
    assert_int_equal(saccade_tangent(p.plan, &good, &err), SACCADE_OK);
    for (int i = 0; i < NO; i++) /* no direction, no change */
        assert_true(out[i] == 0);
    assert_int_equal(saccade_tangent(NULL, &good, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_tangent(p.plan, NULL, &err), SACCADE_EINVAL);
    a = good;
    a.q_dot = &k;
    assert_int_equal(saccade_tangent(p.plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "q_dot");
    a = good;
    a.d_q_dot = &q;
    assert_int_equal(saccade_tangent(p.plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "d_out");
    a = good;
    a.captures_dot = &unknown;
    a.n_captures_dot = 1;
    assert_int_equal(saccade_tangent(p.plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "captures_dot");
    close_problem(&p);
    saccade_problem of;
    saccade_plan *plan;
    saccade_problem_init(&of);
    of.backend = "cpu";
    assert_int_equal(saccade_plan_create(NULL, &of, &plan, &err), SACCADE_OK);
    assert_int_equal(saccade_tangent(plan, &good, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "tangent");
    saccade_plan_destroy(plan);
    of.backend = "plain";
    assert_int_equal(saccade_plan_create(NULL, &of, &plan, &err), SACCADE_OK);
    assert_int_equal(saccade_tangent(plan, &good, &err), SACCADE_EBACKEND);
    saccade_plan_destroy(plan);
    of.backend = "ref";
    of.page = 4;
    assert_int_equal(saccade_plan_create(NULL, &of, &plan, &err), SACCADE_OK);
    assert_int_equal(saccade_tangent(plan, &good, &err), SACCADE_EBACKEND);
    assert_string_equal(err.where, "tangent");
    saccade_plan_destroy(plan);
}

static saccade_status use_tangent(void *arg, saccade_error *err)
{
    point at = random_point(1), u = random_point(2);
    value dot;
    return tangent_at(arg, &at, &u, &dot, err);
}

static void no_memory_is_an_error(void **state)
{
    problem p = open_problem(scores[0], "ref");
    (void)state;
    begin();
    assert_true(fail_alloc_sweep("tangent", use_tangent, &p) > 3);
    close_problem(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tangents_are_slopes),
        cmocka_unit_test(second_derivatives_are_symmetric),
        cmocka_unit_test(what_is_wrong_is_said),
        cmocka_unit_test(no_memory_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
