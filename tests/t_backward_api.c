/* saccade_backward from outside: back end cpu against ref, finite differences of ref in
 * float64, accumulation, gradients of captures, and what is refused. */
#include "saccade.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { H = 4, HKV = 2, Q = 9, KV = 11, D = 5, DV = 3 };
enum { NQ = H * Q * D, NK = HKV * KV * D, NV = HKV * KV * DV, NO = H * Q * DV, NB = H * KV };

static const char score_text[] = "x = score + w * bias[h, kv]; 3.0 * tanh(x / 3.0)";
static const char mask_text[] = "q + 2 >= kv && kv != 1";

static double noise(int n, int salt)
{
    const double x = sin(n * 12.9898 + salt * 78.233) * 43758.5453;
    return 2 * (x - floor(x)) - 1;
}

typedef struct inputs {
    double q[NQ], k[NK], v[NV], bias[NB], w, d_out[NO], d_lse[H * Q];
} inputs;

static void fill(inputs *in)
{
    for (int i = 0; i < NQ; i++)
        in->q[i] = noise(i, 1);
    for (int i = 0; i < NK; i++)
        in->k[i] = noise(i, 2);
    for (int i = 0; i < NV; i++)
        in->v[i] = noise(i, 3);
    for (int i = 0; i < NB; i++)
        in->bias[i] = noise(i, 4);
    for (int i = 0; i < NO; i++)
        in->d_out[i] = noise(i, 5);
    for (int i = 0; i < H * Q; i++)
        in->d_lse[i] = noise(i, 6);
    in->w = 0.7;
}

static const int64_t q_shape[] = {1, H, Q, D}, k_shape[] = {1, HKV, KV, D},
                     v_shape[] = {1, HKV, KV, DV}, o_shape[] = {1, H, Q, DV},
                     row_shape[] = {1, H, Q}, bias_shape[] = {H, KV};

static saccade_mod *mod_of(saccade_kind kind, const char *text, saccade_dtype dtype)
{
    const saccade_capture captures[] = {{"bias", dtype, 2}, {"w", dtype, 0}};
    saccade_mod *generic, *bound = NULL;
    saccade_error err = {0};
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, &err), 0);
    if (saccade_mod_bind(generic, captures, kind == SACCADE_SCORE ? 2 : 0, &bound, &err))
        fail_msg("%s", err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static const char *const names[] = {"bias", "w"};

static saccade_plan *plan_of(const char *backend, saccade_dtype dtype, uint32_t gradients)
{
    saccade_mod *score = mod_of(SACCADE_SCORE, score_text, dtype);
    saccade_mod *mask = mod_of(SACCADE_MASK, mask_text, dtype);
    saccade_plan *plan = NULL;
    saccade_error err = {0};
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = H, .Hkv = HKV, .D = D, .Dv = DV};
    p.dtype = dtype;
    p.score = score;
    p.mask = mask;
    p.backend = backend;
    p.gradients = gradients;
    p.gradient_captures = names;
    p.n_gradient_captures = 2;
    if (saccade_plan_create(NULL, &p, &plan, &err))
        fail_msg("%s: %s", err.where, err.message);
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
    return plan;
}

/* A run's tensors in one dtype, f32 or f64. */
typedef struct tensors {
    saccade_dtype dtype;
    saccade_tensor q, k, v, out, lse, d_out, d_lse, dq, dk, dv, d_bias, d_w;
    saccade_binding bindings[2], d_captures[2];
    int32_t n_bindings;
} tensors;

static saccade_tensor make(saccade_dtype dtype, int32_t rank, const int64_t *shape,
                           const double *values)
{
    int64_t n = 1;
    for (int32_t d = 0; d < rank; d++)
        n *= shape[d];
    void *data = calloc((size_t)n, saccade_dtype_bytes(dtype));
    assert_non_null(data);
    for (int64_t i = 0; values && i < n; i++) {
        if (dtype == SACCADE_F64)
            ((double *)data)[i] = values[i];
        else
            ((float *)data)[i] = (float)values[i];
    }
    return saccade_tensor_of(data, dtype, rank, shape);
}

static double at(const saccade_tensor *t, int64_t i)
{
    return t->dtype == SACCADE_F64 ? ((double *)t->data)[i] : (double)((float *)t->data)[i];
}

static tensors tensors_of(saccade_dtype dtype, const inputs *in)
{
    tensors t = {.dtype = dtype, .n_bindings = 2};
    t.q = make(dtype, 4, q_shape, in->q);
    t.k = make(dtype, 4, k_shape, in->k);
    t.v = make(dtype, 4, v_shape, in->v);
    t.out = make(dtype, 4, o_shape, NULL);
    t.lse = make(dtype, 3, row_shape, NULL);
    t.d_out = make(dtype, 4, o_shape, in->d_out);
    t.d_lse = make(dtype, 3, row_shape, in->d_lse);
    t.dq = make(dtype, 4, q_shape, NULL);
    t.dk = make(dtype, 4, k_shape, NULL);
    t.dv = make(dtype, 4, v_shape, NULL);
    t.d_bias = make(dtype, 2, bias_shape, NULL);
    t.d_w = make(dtype, 0, NULL, NULL);
    t.bindings[0] = (saccade_binding){"bias", make(dtype, 2, bias_shape, in->bias)};
    t.bindings[1] = (saccade_binding){"w", make(dtype, 0, NULL, &in->w)};
    if (dtype == SACCADE_F64)
        *(double *)t.bindings[1].tensor.data = in->w;
    else
        *(float *)t.bindings[1].tensor.data = (float)in->w;
    t.d_captures[0] = (saccade_binding){"bias", t.d_bias};
    t.d_captures[1] = (saccade_binding){"w", t.d_w};
    return t;
}

static void drop(tensors *t)
{
    saccade_tensor *all[] = {&t->q,     &t->k,  &t->v,  &t->out, &t->lse,    &t->d_out,
                             &t->d_lse, &t->dq, &t->dk, &t->dv,  &t->d_bias, &t->d_w};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
    free(t->bindings[0].tensor.data);
    free(t->bindings[1].tensor.data);
}

static const saccade_sizes sizes = {1, H, HKV, Q, KV, D, DV};

static void *workspace(size_t bytes)
{
    void *memory = aligned_alloc(64, bytes / 64 * 64 + 64);
    assert_non_null(memory);
    return memory;
}

static void forward(const saccade_plan *plan, tensors *t)
{
    saccade_error err = {0};
    saccade_forward_args a;
    saccade_forward_args_init(&a);
    a.q = &t->q;
    a.k = &t->k;
    a.v = &t->v;
    a.out = &t->out;
    a.lse = &t->lse;
    a.bindings = t->bindings;
    a.n_bindings = t->n_bindings;
    a.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    a.workspace = workspace(a.workspace_bytes);
    if (saccade_forward(plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
}

static saccade_backward_args args_of(const saccade_plan *plan, tensors *t)
{
    saccade_backward_args a;
    saccade_backward_args_init(&a);
    a.q = &t->q;
    a.k = &t->k;
    a.v = &t->v;
    a.out = &t->out;
    a.lse = &t->lse;
    a.d_out = &t->d_out;
    a.d_lse = &t->d_lse;
    a.d_q = &t->dq;
    a.d_k = &t->dk;
    a.d_v = &t->dv;
    a.d_captures = t->d_captures;
    a.n_d_captures = 2;
    a.bindings = t->bindings;
    a.n_bindings = t->n_bindings;
    a.workspace_bytes = saccade_plan_backward_workspace(plan, &sizes);
    a.workspace = workspace(a.workspace_bytes);
    return a;
}

static const uint32_t all =
    SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V | SACCADE_GRADIENT_CAPTURES;

/* Forward and backward; `added` gradients are added to what is there. */
static void run(const char *backend, tensors *t, uint32_t added)
{
    saccade_error err = {0};
    saccade_plan *plan = plan_of(backend, t->dtype, all);
    forward(plan, t);
    saccade_backward_args a = args_of(plan, t);
    a.accumulate = added;
    if (saccade_backward(plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
    saccade_plan_destroy(plan);
}

static void near(const saccade_tensor *a, const saccade_tensor *b, double scale, int64_t n,
                 double bound)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++) {
        most = fabs(at(b, i)) > most ? fabs(at(b, i)) : most;
        if (!(fabs(at(a, i) - scale * at(b, i)) <= bound))
            fail_msg("element %d: got %g, expected %g", (int)i, at(a, i), scale * at(b, i));
    }
    assert_true(most > 0.01);
}

static void near_all(const tensors *a, const tensors *b, double scale, double bound)
{
    near(&a->dq, &b->dq, scale, NQ, bound);
    near(&a->dk, &b->dk, scale, NK, bound);
    near(&a->dv, &b->dv, scale, NV, bound);
    near(&a->d_bias, &b->d_bias, scale, NB, bound);
    near(&a->d_w, &b->d_w, scale, 1, bound);
}

static void cpu_is_ref(void **state)
{
    inputs in;
    (void)state;
    fill(&in);
    tensors gold = tensors_of(SACCADE_F64, &in), got = tensors_of(SACCADE_F32, &in);
    run("ref", &gold, 0);
    run("cpu", &got, 0);
    near_all(&got, &gold, 1, 2e-5);
    run("cpu", &got, all);
    near_all(&got, &gold, 2, 4e-5);
    run("ref", &got, all & ~(uint32_t)SACCADE_GRADIENT_K);
    near(&got.dq, &gold.dq, 3, NQ, 6e-5);
    near(&got.dk, &gold.dk, 1, NK, 2e-5);
    drop(&gold);
    drop(&got);
}

/* sum(out * d_out) + sum(lse * d_lse) by ref in float64. */
static double loss(const inputs *in)
{
    double sum = 0;
    tensors t = tensors_of(SACCADE_F64, in);
    saccade_plan *plan = plan_of("ref", SACCADE_F64, 0);
    forward(plan, &t);
    for (int i = 0; i < NO; i++)
        sum += at(&t.out, i) * in->d_out[i];
    for (int i = 0; i < H * Q; i++)
        sum += at(&t.lse, i) * in->d_lse[i];
    saccade_plan_destroy(plan);
    drop(&t);
    return sum;
}

static void differences(inputs *in, double *x, const saccade_tensor *gradient, int64_t n,
                        int64_t step)
{
    const double h = 1e-5;
    for (int64_t i = 0; i < n; i += step) {
        const double held = x[i];
        x[i] = held + h;
        const double above = loss(in);
        x[i] = held - h;
        const double below = loss(in);
        x[i] = held;
        const double slope = (above - below) / (2 * h);
        if (!(fabs(slope - at(gradient, i)) <= 1e-8))
            fail_msg("element %d: got %.12g, expected %.12g", (int)i, at(gradient, i), slope);
    }
}

static void ref_is_the_slope(void **state)
{
    inputs in;
    (void)state;
    fill(&in);
    tensors gold = tensors_of(SACCADE_F64, &in);
    run("ref", &gold, 0);
    differences(&in, in.q, &gold.dq, NQ, 7);
    differences(&in, in.k, &gold.dk, NK, 7);
    differences(&in, in.v, &gold.dv, NV, 7);
    differences(&in, in.bias, &gold.d_bias, NB, 5);
    differences(&in, &in.w, &gold.d_w, 1, 1);
    drop(&gold);
}

static void refused(const saccade_plan *plan, const saccade_backward_args *a, const char *where)
{
    saccade_error err = {0};
    assert_int_equal(saccade_backward(plan, a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
    assert_non_null(strstr(err.message, "got"));
}

static void what_is_wrong_is_said(void **state)
{
    inputs in;
    saccade_error err = {0};
    (void)state;
    fill(&in);
    tensors t = tensors_of(SACCADE_F32, &in);
    saccade_plan *plan = plan_of("cpu", SACCADE_F32, all), *dq = plan_of("cpu", SACCADE_F32, 1);
    saccade_plan *none = plan_of("cpu", SACCADE_F32, 0);
    const saccade_backward_args good = args_of(plan, &t);
    saccade_backward_args a = good;
    refused(none, &a, "backward");
    assert_int_equal(saccade_plan_backward_workspace(none, &sizes), 0);
    refused(dq, &a, "d_k");
    a.d_k = NULL;
    refused(plan, &a, "d_k");
    a = good;
    a.lse = NULL;
    refused(plan, &a, "lse");
    a = good;
    a.n_d_captures = 1;
    refused(plan, &a, "w");
    a = good;
    a.workspace_bytes--;
    refused(plan, &a, "workspace");
    a = good;
    saccade_tensor wrong = t.dv;
    wrong.shape[2]++;
    a.d_v = &wrong;
    refused(plan, &a, "d_v");
    a = good;
    a.accumulate = 32;
    refused(plan, &a, "accumulate");
    a = good;
    a.size = 9; /* ends inside of a pointer */
    refused(plan, &a, "arguments");
    assert_int_equal(saccade_backward(NULL, &good, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_backward(plan, NULL, &err), SACCADE_EINVAL);
    free(good.workspace);
    saccade_plan_destroy(plan);
    saccade_plan_destroy(dq);
    saccade_plan_destroy(none);
    drop(&t);
}

static saccade_plan *plain_plan(const char *backend, uint32_t gradients, int64_t h, int64_t hkv,
                                int64_t d, int64_t dv)
{
    saccade_plan *plan = NULL;
    saccade_error err = {0};
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = h, .Hkv = hkv, .D = d, .Dv = dv};
    p.backend = backend;
    p.gradients = gradients;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), 0);
    return plan;
}

enum { QKV = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

/* V is a view of K: gradients in one place are refused, and add up where both are added. */
static void one_place(const char *backend)
{
    inputs in;
    saccade_error err = {0};
    fill(&in);
    tensors t = tensors_of(SACCADE_F32, &in), one = tensors_of(SACCADE_F32, &in);
    saccade_plan *plan = plain_plan(backend, QKV, H, HKV, D, DV);
    t.n_bindings = one.n_bindings = 0;
    free(t.v.data);
    free(one.v.data);
    t.v.data = one.v.data = t.k.data;
    for (int d = 0; d < 4; d++)
        t.v.stride[d] = one.v.stride[d] = t.k.stride[d];
    forward(plan, &t);
    saccade_backward_args a = args_of(plan, &t), b;
    a.n_d_captures = 0;
    assert_int_equal(saccade_backward(plan, &a, &err), 0);
    b = a;
    for (int first = 0; first <= D - DV; first++) { /* channels of K that V is */
        memset(one.dk.data, 0, NK * sizeof(float));
        saccade_tensor dv = one.dk;
        dv.data = (float *)one.dk.data + first;
        dv.shape[3] = DV;
        b.d_q = &one.dq, b.d_k = &one.dk, b.d_v = &dv;
        b.accumulate = 0;
        refused(plan, &b, "d_v");
        size_t bytes; /* who asks for a size need not have the memory yet */
        assert_int_equal(saccade_backward_workspace(plan, &b, &bytes, &err), 0);
        b.accumulate = SACCADE_GRADIENT_V;
        refused(plan, &b, "d_v");
        b.accumulate = SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
        assert_int_equal(saccade_backward(plan, &b, &err), 0);
        for (int i = 0; i < NK; i++) {
            const int d = i % D - first;
            const double value = d >= 0 && d < DV ? at(&t.dv, i / D * DV + d) : 0;
            assert_true(fabs(at(&one.dk, i) - at(&t.dk, i) - value) < 1e-5);
        }
    }
    free(a.workspace);
    saccade_plan_destroy(plan);
    t.v.data = one.v.data = NULL;
    drop(&t);
    drop(&one);
}

static void gradients_in_one_place(void **state)
{
    (void)state;
    one_place("cpu");
    one_place("ref");
    one_place("plain");
}

/* Gradients of one packed tensor [B, N, H + 2 Hkv, D] are none in one place; those of one that
 * begins a head too early are. */
static void packed_gradients(void **state)
{
    enum { N = 7, HEADS = H + 2 * HKV };
    static float packed[N * HEADS * D], more[N * HEADS * D], lse[H * N], d_out[N * HEADS * D];
    const int64_t rows[] = {1, H, N, D}, keys[] = {1, HKV, N, D}, stats[] = {1, H, N};
    saccade_error err = {0};
    (void)state;
    saccade_plan *plan = plain_plan("cpu", QKV, H, HKV, D, D);
    saccade_tensor t[6];
    for (int i = 0; i < 6; i++) {
        const int first = i % 3 == 0 ? 0 : i % 3 == 1 ? H : H + HKV;
        t[i] = saccade_tensor_of((i < 3 ? packed : more) + first * D, SACCADE_F32, 4,
                                 i % 3 ? keys : rows);
        t[i].stride[1] = D;
        t[i].stride[2] = HEADS * D;
    }
    const saccade_tensor o = saccade_tensor_of(d_out, SACCADE_F32, 4, rows);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, stats);
    const saccade_sizes s = {1, H, HKV, N, N, D, D};
    saccade_backward_args a;
    saccade_backward_args_init(&a);
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = a.d_out = &o, a.lse = &l;
    a.d_q = &t[3], a.d_k = &t[4], a.d_v = &t[5];
    a.workspace_bytes = saccade_plan_backward_workspace(plan, &s);
    a.workspace = workspace(a.workspace_bytes);
    if (saccade_backward(plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    t[4].data = more + (H - 1) * D;
    refused(plan, &a, "d_k");
    t[4].data = more + HEADS * D - 1; /* heads of the next row, a channel early */
    refused(plan, &a, "d_k");
    t[4].data = more + H * D;
    a.d_q = &t[0];
    refused(plan, &a, "d_q");
    t[3].data = d_out; /* of other strides */
    a.d_q = &t[3];
    refused(plan, &a, "d_q");
    a.accumulate = QKV;
    refused(plan, &a, "d_q");
    free(a.workspace);
    saccade_plan_destroy(plan);
}

/* All gradients of a score that reads `bias` of this rank, and nothing else. */
static saccade_plan *plan_reading(const char *text, int32_t rank)
{
    const saccade_capture capture = {"bias", SACCADE_F32, rank};
    saccade_error err = {0};
    saccade_mod *generic, *score;
    saccade_plan *plan = NULL;
    saccade_problem p;
    saccade_problem_init(&p);
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &generic, &err), 0);
    assert_int_equal(saccade_mod_bind(generic, &capture, 1, &score, &err), 0);
    p.sizes = (saccade_sizes){.H = H, .Hkv = HKV, .D = D, .Dv = DV};
    p.score = score;
    p.gradients = all;
    p.gradient_captures = names;
    p.n_gradient_captures = 1;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), 0);
    saccade_mod_destroy(score);
    saccade_mod_destroy(generic);
    return plan;
}

/* Gradients of a bias [1, H, Q, KV] that lies as [KV, 1, Q, H]: those of one that does not. */
static void captures_lie_anyhow(void **state)
{
    static const int64_t shape[] = {1, H, Q, KV}, turned[] = {Q * H, 1, H, Q * H};
    float d_bias[2][H * Q * KV];
    inputs in;
    saccade_error err = {0};
    (void)state;
    fill(&in);
    tensors t = tensors_of(SACCADE_F32, &in);
    saccade_plan *plan = plan_reading("score + bias[0, h, q, kv]", 4);
    free(t.bindings[0].tensor.data);
    t.bindings[0].tensor = make(SACCADE_F32, 4, shape, NULL);
    t.n_bindings = 1;
    forward(plan, &t);
    for (int n = 0; n < 2; n++) {
        saccade_binding d = {"bias", saccade_tensor_of(d_bias[n], SACCADE_F32, 4, shape)};
        if (n)
            memcpy(d.tensor.stride, turned, sizeof turned);
        saccade_backward_args a = args_of(plan, &t);
        a.d_captures = &d;
        a.n_d_captures = 1;
        if (saccade_backward(plan, &a, &err))
            fail_msg("%s: %s", err.where, err.message);
        free(a.workspace);
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < Q * KV; i++)
            assert_true(d_bias[0][h * Q * KV + i]
                        == d_bias[1][i % KV * Q * H + h + i / KV * H]);
    saccade_plan_destroy(plan);
    drop(&t);
}

/* A capture that the simplified score does not read has gradient 0; what is refused, and what
 * only asks for bytes, writes nothing. */
static void unread_captures_are_cleared_by_runs(void **state)
{
    inputs in;
    size_t bytes;
    saccade_error err = {0};
    (void)state;
    fill(&in);
    tensors t = tensors_of(SACCADE_F32, &in);
    saccade_plan *plan = plan_reading("x = bias[h, kv]; score", 2);
    t.n_bindings = 1;
    forward(plan, &t);
    saccade_backward_args a = args_of(plan, &t);
    a.n_d_captures = 1;
    float *d_bias = t.d_bias.data;
    d_bias[3] = 7;
    assert_int_equal(saccade_backward_workspace(plan, &a, &bytes, &err), 0);
    assert_true(d_bias[3] == 7);
    a.workspace_bytes = 64;
    refused(plan, &a, "workspace");
    assert_true(d_bias[3] == 7);
    a.workspace_bytes = bytes;
    a.n_bindings = 0;
    refused(plan, &a, "bias");
    a.n_bindings = 1;
    assert_int_equal(saccade_backward(plan, &a, &err), 0);
    assert_true(d_bias[3] == 0);
    free(a.workspace);
    saccade_plan_destroy(plan);
    drop(&t);
}

static void plans_that_cannot_are_refused(void **state)
{
    saccade_plan *plan = NULL;
    saccade_error err = {0};
    saccade_problem p;
    (void)state;
    saccade_problem_init(&p);
    p.gradients = 64;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    p.gradients = SACCADE_GRADIENT_Q;
    p.backend = "plain";
    p.dtype = SACCADE_F64;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EBACKEND);
    p.dtype = SACCADE_F32;
    p.gradients = SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = names;
    p.n_gradient_captures = 1;
    p.backend = "cpu";
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "gradient_captures");
    assert_null(plan);
}

/* Sums along diagonals of a long run of many heads are more than a size can say. */
static void lengths_beyond_memory(void **state)
{
    static const char text[] = "score + t[clamp(q - kv + 100, 0, 100)]";
    const saccade_capture t = {.name = "t", .dtype = SACCADE_F32, .rank = 1};
    const char *const name = "t";
    saccade_mod *generic, *score;
    saccade_plan *plan;
    saccade_error err = {0};
    saccade_problem p;
    (void)state;
    assert_int_equal(
        saccade_mod_parse(SACCADE_SCORE, text, sizeof text - 1, &generic, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, &t, 1, &score, &err), SACCADE_OK);
    saccade_mod_destroy(generic);
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){0, 65536, 1, 0, 0, 1, 1};
    p.backend = "cpu";
    p.score = score;
    p.gradients = SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = &name;
    p.n_gradient_captures = 1;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    saccade_sizes s = {1 << 18, 65536, 1, 1, 1 << 30, 1, 1};
    assert_true(saccade_plan_backward_workspace(plan, &s) == SIZE_MAX);
    s.KV = 1 << 20;
    s.B = 1;
    assert_true(saccade_plan_backward_workspace(plan, &s) < SIZE_MAX / 2);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(score);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cpu_is_ref),
        cmocka_unit_test(ref_is_the_slope),
        cmocka_unit_test(what_is_wrong_is_said),
        cmocka_unit_test(gradients_in_one_place),
        cmocka_unit_test(packed_gradients),
        cmocka_unit_test(captures_lie_anyhow),
        cmocka_unit_test(unread_captures_are_cleared_by_runs),
        cmocka_unit_test(plans_that_cannot_are_refused),
        cmocka_unit_test(lengths_beyond_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
