/* The float64 oracle and plain attention, against attention written out in this file, by their
 * algebra (linear in V, keys in any order, split keys merge, constants move lse only), and the
 * gradients against finite differences. */
#include "ref/ladder.h"
#include "ref/ref.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t state, seed_now;

/* Every random number after this follows from the seed, which failures print. */
static void start(uint64_t seed)
{
    state = seed_now = seed;
}

static double uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53 * 2 - 1;
}

static int64_t between(int64_t lo, int64_t hi)
{
    return lo + (int64_t)((uniform() + 1) / 2 * (double)(hi - lo + 1));
}

static void check_ok(saccade_status status, const saccade_error *err)
{
    if (status != SACCADE_OK)
        fail_msg("%s: %s", err->where, err->message);
}

/* ---- a problem with everything it needs ---- */

enum { CAPTURES = 4 };

typedef struct fixture {
    saccade_tensor q, k, v;
    void *memory[3];
    saccade_mod *score, *mask;
    saccade_tensor score_tensors[CAPTURES], mask_tensors[CAPTURES];
    int32_t q_offset[4], kv_offset[4], kv_len[4];
    plan_problem problem;
    plan_run run;
    double *out, *lse, *row_max;
} fixture;

/* Rows lie with a gap after each, heads and rows in either order; gaps hold NaN. */
static saccade_tensor new_tensor(saccade_dtype dtype, int64_t B, int64_t H, int64_t N,
                                 int64_t D, void **memory)
{
    const int64_t shape[4] = {B, H, N, D}, pitch = D + between(0, 3);
    saccade_tensor t = saccade_tensor_of(NULL, dtype, 4, shape);
    const int heads_first = (int)between(0, 1);
    t.stride[2] = heads_first ? pitch : H * pitch;
    t.stride[1] = heads_first ? N * pitch : pitch;
    t.stride[0] = H * N * pitch;
    const int64_t n = B * H * N * pitch;
    float *values = malloc((size_t)n * sizeof *values);
    *memory = malloc((size_t)n * saccade_dtype_bytes(dtype));
    assert_true(values && *memory);
    for (int64_t i = 0; i < n; i++)
        values[i] = NAN;
    for (int64_t i = 0; i < B * H * N * D; i++)
        values[i / D / N / H * t.stride[0] + i / D / N % H * t.stride[1]
               + i / D % N * t.stride[2] + i % D] = (float)(2 * uniform());
    for (int64_t i = 0; i < n && dtype == SACCADE_F64; i++)
        ((double *)*memory)[i] = (double)values[i];
    if (dtype != SACCADE_F64)
        convert_from_f32(dtype, values, *memory, n);
    free(values);
    t.data = *memory;
    return t;
}

static double get(const saccade_tensor *t, int64_t b, int64_t h, int64_t n, int64_t d)
{
    const int64_t at = b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d;
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

static double *at_f64(const saccade_tensor *t, int64_t b, int64_t h, int64_t n, int64_t d)
{
    assert_int_equal(t->dtype, SACCADE_F64);
    return (double *)t->data + b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d;
}

static double *new_doubles(int64_t n)
{
    double *x = malloc((size_t)n * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN;
    return x;
}

/* Parses and binds one mod; captures are f32 but those named doc. */
static saccade_mod *compile(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *bound;
    saccade_capture captures[CAPTURES];
    saccade_error err;
    check_ok(saccade_mod_parse(kind, text, strlen(text), &generic, &err), &err);
    const int32_t n = saccade_mod_capture_count(generic);
    assert_true(n <= CAPTURES);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = strcmp(captures[i].name, "doc") == 0 ? SACCADE_I32 : SACCADE_F32;
    }
    check_ok(saccade_mod_bind(generic, captures, n, &bound, &err), &err);
    saccade_mod_destroy(generic);
    return bound;
}

static void make(const saccade_sizes *s, saccade_dtype dtype, const char *mask,
                 const char *score, const saccade_binding *bindings, int32_t n_bindings,
                 fixture *f)
{
    saccade_error err;
    memset(f, 0, sizeof *f);
    f->q = new_tensor(dtype, s->B, s->H, s->Q, s->D, &f->memory[0]);
    f->k = new_tensor(dtype, s->B, s->Hkv, s->KV, s->D, &f->memory[1]);
    f->v = new_tensor(dtype, s->B, s->Hkv, s->KV, s->Dv, &f->memory[2]);
    f->mask = mask ? compile(SACCADE_MASK, mask) : NULL;
    f->score = score ? compile(SACCADE_SCORE, score) : NULL;
    f->problem = (plan_problem){
        .sizes = *s,
        .dtype = dtype,
        .kv_dtype = dtype,
        .out_dtype = dtype,
        .scale = 0.5f,
        .mask = f->mask ? mod_function(f->mask) : NULL,
        .score = f->score ? mod_function(f->score) : NULL,
        .group = (int32_t)(s->H / s->Hkv),
    };
    f->run = (plan_run){.sizes = *s, .q = &f->q, .k = &f->k, .v = &f->v};
    eval_sizes(s, f->run.score_env.size);
    eval_sizes(s, f->run.mask_env.size);
    f->run.score_env.tensors = f->score_tensors;
    f->run.mask_env.tensors = f->mask_tensors;
    if (f->score)
        check_ok(
            eval_resolve(f->problem.score, bindings, n_bindings, 1, f->score_tensors, &err),
            &err);
    if (f->mask)
        check_ok(eval_resolve(f->problem.mask, NULL, 0, 1, f->mask_tensors, &err), &err);
    f->out = new_doubles(s->B * s->H * s->Q * s->Dv);
    f->lse = new_doubles(s->B * s->H * s->Q);
    f->row_max = new_doubles(s->B * s->H * s->Q);
}

static void drop(fixture *f)
{
    for (int i = 0; i < 3; i++)
        free(f->memory[i]);
    saccade_mod_destroy(f->score);
    saccade_mod_destroy(f->mask);
    free(f->out);
    free(f->lse);
    free(f->row_max);
}

static void set_positions(fixture *f, int with_q, int with_kv, int with_len)
{
    const int64_t B = f->run.sizes.B;
    assert_true(B <= 4);
    for (int64_t b = 0; b < B; b++) {
        f->q_offset[b] = (int32_t)between(-3, 9);
        f->kv_offset[b] = (int32_t)between(-3, 9);
        f->kv_len[b] = (int32_t)between(0, f->run.sizes.KV);
    }
    if (with_q)
        f->run.positions.q_offset = saccade_tensor_of(f->q_offset, SACCADE_I32, 1, &B);
    if (with_kv)
        f->run.positions.kv_offset = saccade_tensor_of(f->kv_offset, SACCADE_I32, 1, &B);
    if (with_len)
        f->run.positions.kv_len = saccade_tensor_of(f->kv_len, SACCADE_I32, 1, &B);
}

static void forward(fixture *f)
{
    saccade_error err;
    check_ok(ref_forward(&f->problem, &f->run, f->out, f->lse, f->row_max, &err), &err);
}

static void assert_near(double x, double y, double tolerance)
{
    const int both_nan = isnan(x) && isnan(y);
    if (!both_nan && x != y && !(fabs(x - y) <= tolerance))
        fail_msg("seed %llu: got %.17g, expected %.17g", (unsigned long long)seed_now, x, y);
}

/* ---- attention written out, for a few variants ---- */

typedef struct variant {
    const char *mask, *score;
    int (*live)(int64_t q, int64_t kv);
    double (*change)(double s, int64_t h, int64_t H, int64_t q, int64_t kv);
} variant;

static int is_causal(int64_t q, int64_t kv)
{
    return q >= kv;
}

static int is_in_window(int64_t q, int64_t kv)
{
    return q >= kv && q - kv <= 4;
}

static int is_every_third(int64_t q, int64_t kv)
{
    return (q + kv) % 3 == 0;
}

static double capped(double s, int64_t h, int64_t H, int64_t q, int64_t kv)
{
    (void)h, (void)H, (void)q, (void)kv;
    return 5 * tanh(s / 5);
}

static double sloped(double s, int64_t h, int64_t H, int64_t q, int64_t kv)
{
    return s + exp2(-8.0 * (double)(h + 1) / (double)H) * (double)(kv - q);
}

static double sloped_capped(double s, int64_t h, int64_t H, int64_t q, int64_t kv)
{
    return capped(sloped(s, h, H, q, kv), h, H, q, kv);
}

/* Gone for near keys: a score of -inf is a masked position. */
static double far_only(double s, int64_t h, int64_t H, int64_t q, int64_t kv)
{
    (void)h, (void)H;
    return q - kv > 2 ? s : -INFINITY;
}

static const variant variants[] = {
    {NULL, NULL, NULL, NULL},
    {"q >= kv", NULL, is_causal, NULL},
    {"q >= kv && q - kv <= 4", "5.0 * tanh(score / 5.0)", is_in_window, capped},
    {"(q + kv) % 3 == 0", "score + exp2(-8.0 * (h + 1) / H) * (kv - q)", is_every_third,
     sloped},
    {"q >= kv", "score = score + exp2(-8.0 * (h + 1) / H) * (kv - q); 5.0 * tanh(score / 5.0)",
     is_causal, sloped_capped},
    {NULL, "q - kv > 2 ? score : -inf", NULL, far_only},
};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

static double written_score(const fixture *f, const variant *v, int64_t b, int64_t h, int64_t i,
                            int64_t j)
{
    const saccade_sizes *s = &f->run.sizes;
    const int64_t q = i + (f->run.positions.q_offset.dtype ? f->q_offset[b] : 0);
    const int64_t kv = j + (f->run.positions.kv_offset.dtype ? f->kv_offset[b] : 0);
    double x = 0;
    if (f->run.positions.kv_len.dtype && j >= f->kv_len[b])
        return -INFINITY;
    if (v->live && !v->live(q, kv))
        return -INFINITY;
    for (int64_t d = 0; d < s->D; d++)
        x += get(&f->q, b, h, i, d) * get(&f->k, b, h / f->problem.group, j, d);
    x *= 0.5;
    return v->change ? v->change(x, h, s->H, q, kv) : x;
}

static void check_row(const fixture *f, const variant *v, int64_t b, int64_t h, int64_t i)
{
    const saccade_sizes *s = &f->run.sizes;
    const int64_t row = (b * s->H + h) * s->Q + i;
    double m = -INFINITY, l = 0;
    for (int64_t j = 0; j < s->KV; j++)
        m = fmax(m, written_score(f, v, b, h, i, j));
    for (int64_t j = 0; j < s->KV && m > -INFINITY; j++)
        l += exp(written_score(f, v, b, h, i, j) - m);
    assert_near(f->row_max[row], m, 1e-12);
    assert_near(f->lse[row], m > -INFINITY ? m + log(l) : m, 1e-12);
    for (int64_t d = 0; d < s->Dv; d++) {
        double o = 0;
        for (int64_t j = 0; j < s->KV && m > -INFINITY; j++)
            o += exp(written_score(f, v, b, h, i, j) - m) / l
                 * get(&f->v, b, h / f->problem.group, j, d);
        assert_near(f->out[row * s->Dv + d], o, 1e-12);
    }
}

static saccade_sizes random_sizes(void)
{
    const int64_t Hkv = between(1, 2), group = between(1, 2) * 2;
    return (saccade_sizes){between(1, 2),  Hkv * group,   Hkv,          between(1, 12),
                           between(1, 17), between(1, 6), between(1, 6)};
}

static void oracle_equals_attention_written_out(void **unused)
{
    static const saccade_dtype dtypes[] = {SACCADE_F64, SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    (void)unused;
    for (uint64_t seed = 1; seed <= 120; seed++) {
        start(seed);
        const variant *v = &variants[seed % VARIANTS];
        saccade_sizes s = random_sizes();
        s.H = v->change == sloped || v->change == sloped_capped ? s.Hkv * 4 / s.Hkv : s.H;
        fixture f;
        make(&s, dtypes[between(0, 3)], v->mask, v->score, NULL, 0, &f);
        set_positions(&f, (int)between(0, 1), (int)between(0, 1), (int)between(0, 1));
        forward(&f);
        for (int64_t row = 0; row < s.B * s.H * s.Q; row++)
            check_row(&f, v, row / s.Q / s.H, row / s.Q % s.H, row % s.Q);
        drop(&f);
    }
}

/* ---- hard values ---- */

static void empty_rows_are_zero(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 2, 1, 6, 5, 3, 2};
    fixture f;
    start(5);
    make(&s, SACCADE_F64, "kv > q + 1", NULL, NULL, 0, &f);
    forward(&f);
    for (int64_t row = 0; row < s.H * s.Q; row++) {
        const int is_empty = row % s.Q >= 3; /* keys 5, 6, ... are not there */
        assert_int_equal(f.lse[row] == -INFINITY, is_empty);
        assert_int_equal(f.row_max[row] == -INFINITY, is_empty);
        for (int64_t d = 0; d < s.Dv; d++)
            assert_true((f.out[row * s.Dv + d] == 0) == is_empty);
    }
    drop(&f);
}

static void what_masked_positions_hold_never_shows(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 2, 2, 7, 9, 3, 4};
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    fixture f;
    start(6);
    make(&s, SACCADE_F64, "kv != 3", "log(score * 0.0 + 1.0) + score", NULL, 0, &f);
    set_positions(&f, 0, 0, 1);
    f.kv_len[0] = 7;
    forward(&f);
    double *out = new_doubles(s.H * s.Q * s.Dv);
    memcpy(out, f.out, (size_t)(s.H * s.Q * s.Dv) * sizeof *out);
    for (int n = 0; n < 3; n++) {
        for (int64_t j = 3; j < s.KV; j += j == 3 ? 4 : 1)
            for (int64_t h = 0; h < s.H; h++) {
                *at_f64(&f.k, 0, h, j, n) = poisons[n];
                *at_f64(&f.v, 0, h, j, n) = poisons[n];
            }
        forward(&f);
        assert_memory_equal(out, f.out, (size_t)(s.H * s.Q * s.Dv) * sizeof *out);
    }
    free(out);
    drop(&f);
}

static void live_nan_and_inf_fill_their_row_only(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 1, 1, 5, 6, 2, 3};
    static const double poisons[] = {NAN, INFINITY};
    for (int n = 0; n < 2; n++) {
        fixture f;
        float bias[5] = {0, 0, 0, 0, 0};
        const int64_t shape[1] = {5};
        bias[2] = (float)poisons[n];
        const saccade_binding binding = {"bias",
                                         saccade_tensor_of(bias, SACCADE_F32, 1, shape)};
        start(7);
        make(&s, SACCADE_F64, NULL, "kv == 4 ? score + bias[q] : score", &binding, 1, &f);
        forward(&f);
        for (int64_t i = 0; i < s.Q; i++) {
            assert_int_equal(isnan(f.lse[i]) != 0, i == 2);
            assert_int_equal(isnan(f.row_max[i]) != 0, i == 2);
            for (int64_t d = 0; d < s.Dv; d++)
                assert_int_equal(isnan(f.out[i * s.Dv + d]) != 0, i == 2);
        }
        drop(&f);
    }
}

/* ---- algebra ---- */

static void output_is_linear_in_v(void **unused)
{
    (void)unused;
    const saccade_sizes s = {2, 4, 2, 6, 8, 3, 3};
    const int64_t n = s.B * s.H * s.Q * s.Dv;
    fixture f;
    start(8);
    make(&s, SACCADE_F64, "q >= kv", "3.0 * tanh(score / 3.0)", NULL, 0, &f);
    forward(&f);
    double *first = f.out, *second = new_doubles(n);
    for (int64_t row = 0; row < s.B * s.Hkv * s.KV; row++)
        for (int64_t d = 0; d < s.Dv; d++) {
            double *v = at_f64(&f.v, row / s.KV / s.Hkv, row / s.KV % s.Hkv, row % s.KV, d);
            *v = 2 * *v + 1;
        }
    f.out = second;
    forward(&f);
    for (int64_t i = 0; i < n; i++)
        assert_near(second[i], 2 * first[i] + 1, 1e-12); /* weights of a row sum to 1 */
    free(first);
    drop(&f);
}

static void keys_may_come_in_any_order(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 2, 1, 5, 9, 3, 2};
    fixture f, g;
    start(9);
    make(&s, SACCADE_F64, NULL, "score * 2.0", NULL, 0, &f);
    start(9);
    make(&s, SACCADE_F64, NULL, "score * 2.0", NULL, 0, &g);
    for (int64_t j = 0; j < s.KV; j++)
        for (int64_t d = 0; d < s.D; d++) {
            *at_f64(&g.k, 0, 0, j, d) = *at_f64(&f.k, 0, 0, j * 4 % 9, d);
            if (d < s.Dv)
                *at_f64(&g.v, 0, 0, j, d) = *at_f64(&f.v, 0, 0, j * 4 % 9, d);
        }
    forward(&f);
    forward(&g);
    for (int64_t i = 0; i < s.H * s.Q; i++) {
        assert_near(f.lse[i], g.lse[i], 1e-12);
        for (int64_t d = 0; d < s.Dv; d++)
            assert_near(f.out[i * s.Dv + d], g.out[i * s.Dv + d], 1e-12);
    }
    drop(&f);
    drop(&g);
}

static void a_constant_moves_lse_only(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 2, 2, 6, 7, 3, 2};
    fixture f, g;
    start(10);
    make(&s, SACCADE_F64, "q >= kv", NULL, NULL, 0, &f);
    start(10);
    make(&s, SACCADE_F64, "q >= kv", "score + 3.5", NULL, 0, &g);
    forward(&f);
    forward(&g);
    for (int64_t i = 0; i < s.H * s.Q; i++) {
        assert_near(g.lse[i], f.lse[i] + 3.5, 1e-12);
        assert_near(g.row_max[i], f.row_max[i] + 3.5, 1e-12);
        for (int64_t d = 0; d < s.Dv; d++)
            assert_near(f.out[i * s.Dv + d], g.out[i * s.Dv + d], 1e-12);
    }
    drop(&f);
    drop(&g);
}

static void future_keys_do_not_matter_under_causal(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 1, 1, 8, 8, 3, 2};
    fixture f;
    start(11);
    make(&s, SACCADE_F64, "q >= kv", NULL, NULL, 0, &f);
    forward(&f);
    const double out = f.out[4 * s.Dv], lse = f.lse[4], later = f.out[5 * s.Dv];
    *at_f64(&f.k, 0, 0, 5, 0) += 1;
    *at_f64(&f.v, 0, 0, 5, 0) += 1;
    forward(&f);
    assert_true(f.out[4 * s.Dv] == out && f.lse[4] == lse);
    assert_true(f.out[5 * s.Dv] != later);
    drop(&f);
}

/* Keys in two parts, by kv_len and by kv_offset with moved pointers, merge to the whole. */
static void split_keys_merge_to_the_whole(void **unused)
{
    (void)unused;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        fixture f;
        start(seed);
        const int64_t KV = between(2, 12), cut = between(1, KV - 1);
        const saccade_sizes s = {1, 2, 1, 6, KV, 3, 2};
        const int64_t rows = s.H * s.Q;
        make(&s, SACCADE_F64, "q >= kv - 2", "score * 1.5 + 0.1 * kv", NULL, 0, &f);
        forward(&f);
        double *whole = f.out, *whole_lse = f.lse;
        double *out[2] = {new_doubles(rows * s.Dv), new_doubles(rows * s.Dv)};
        double *lse[2] = {new_doubles(rows), new_doubles(rows)};
        for (int part = 0; part < 2; part++) {
            f.run.sizes.KV = part ? KV - cut : cut;
            f.kv_offset[0] = part ? (int32_t)cut : 0;
            f.run.positions.kv_offset = saccade_tensor_of(f.kv_offset, SACCADE_I32, 0, NULL);
            f.k.data = at_f64(&f.k, 0, 0, part ? cut : 0, 0);
            f.v.data = at_f64(&f.v, 0, 0, part ? cut : 0, 0);
            f.out = out[part];
            f.lse = lse[part];
            forward(&f);
        }
        for (int64_t i = 0; i < rows; i++) {
            const double m = fmax(lse[0][i], lse[1][i]);
            if (m == -INFINITY)
                continue;
            const double a = exp(lse[0][i] - m), b = exp(lse[1][i] - m);
            assert_near(m + log(a + b), whole_lse[i], 1e-12);
            for (int64_t d = 0; d < s.Dv; d++)
                assert_near((a * out[0][i * s.Dv + d] + b * out[1][i * s.Dv + d]) / (a + b),
                            whole[i * s.Dv + d], 1e-12);
        }
        free(out[0]);
        free(lse[0]);
        free(whole);
        free(whole_lse);
        drop(&f);
    }
}

/* ---- gradients ---- */

/* sum(out * d_out) + sum(lse * d_lse) over rows that are not empty. */
static double weighted(fixture *f, const double *d_out, const double *d_lse)
{
    const saccade_sizes *s = &f->run.sizes;
    double sum = 0;
    forward(f);
    for (int64_t i = 0; i < s->B * s->H * s->Q; i++) {
        if (f->lse[i] == -INFINITY)
            continue;
        sum += d_lse ? f->lse[i] * d_lse[i] : 0;
        for (int64_t d = 0; d < s->Dv; d++)
            sum += f->out[i * s->Dv + d] * d_out[i * s->Dv + d];
    }
    return sum;
}

static double difference(fixture *f, double *x, const double *d_out, const double *d_lse)
{
    const double step = 0x1p-12, kept = *x;
    *x = kept + step;
    const double above = weighted(f, d_out, d_lse);
    *x = kept - step;
    const double below = weighted(f, d_out, d_lse);
    *x = kept;
    return (above - below) / (2 * step);
}

static double *random_doubles(int64_t n)
{
    double *x = new_doubles(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = uniform();
    return x;
}

static void check_tensor(fixture *f, const saccade_tensor *t, const double *gradient,
                         const double *d_out, const double *d_lse)
{
    const int64_t *n = t->shape;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        double *x = at_f64(t, i / n[3] / n[2] / n[1], i / n[3] / n[2] % n[1], i / n[3] % n[2],
                           i % n[3]);
        assert_near(gradient[i], difference(f, x, d_out, d_lse), 2e-6);
    }
}

static void gradients_equal_finite_differences(void **unused)
{
    static const char *const masks[] = {NULL, "q >= kv", "kv > q", "kv % 2 == 0"};
    static const char *const scores[] = {
        NULL, "3.0 * tanh(score / 3.0)", "score = score - 0.25 * (q - kv); sin(score)",
        "score * score * 0.1 + exp(-score * score)", "kv * 0.5"};
    (void)unused;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        start(seed);
        const saccade_sizes s = {
            between(1, 2), 4, between(1, 2) * 2, between(1, 4), between(1, 5), between(1, 3),
            between(1, 3)};
        const int with_lse = (int)between(0, 1);
        fixture f;
        saccade_error err;
        make(&s, SACCADE_F64, masks[seed % 4], scores[seed % 5], NULL, 0, &f);
        set_positions(&f, (int)between(0, 1), 0, (int)between(0, 1));
        double *d_out = random_doubles(s.B * s.H * s.Q * s.Dv);
        double *d_lse = random_doubles(s.B * s.H * s.Q);
        double *dq = new_doubles(s.B * s.H * s.Q * s.D);
        double *dk = new_doubles(s.B * s.Hkv * s.KV * s.D);
        double *dv = new_doubles(s.B * s.Hkv * s.KV * s.Dv);
        const double *used_lse = with_lse ? d_lse : NULL;
        check_ok(ref_backward(&f.problem, &f.run, d_out, used_lse, dq, dk, dv, &err), &err);
        check_tensor(&f, &f.q, dq, d_out, used_lse);
        check_tensor(&f, &f.k, dk, d_out, used_lse);
        check_tensor(&f, &f.v, dv, d_out, used_lse);
        free(d_out);
        free(d_lse);
        free(dq);
        free(dk);
        free(dv);
        drop(&f);
    }
}

/* A table read twice with different indices, a scalar, and an integer tensor that has none. */
static void capture_gradients_equal_finite_differences(void **unused)
{
    (void)unused;
    const saccade_sizes s = {1, 2, 1, 4, 5, 2, 2};
    float table[2][5], factor = 0.75f;
    int32_t doc[5] = {0, 0, 1, 1, 4};
    const int64_t table_shape[2] = {2, 5}, doc_shape[1] = {5};
    const saccade_binding bindings[] = {
        {"table", saccade_tensor_of(table, SACCADE_F32, 2, table_shape)},
        {"factor", saccade_tensor_of(&factor, SACCADE_F32, 0, NULL)},
        {"doc", saccade_tensor_of(doc, SACCADE_I32, 1, doc_shape)}};
    fixture f;
    saccade_error err;
    start(21);
    for (int i = 0; i < 10; i++)
        table[i / 5][i % 5] = (float)uniform();
    make(&s, SACCADE_F64, "q + 1 >= kv",
         "factor * score + table[h, doc[kv]] * table[0, kv] + table[h, q - 2]", bindings, 3,
         &f);
    double d_table[10] = {0}, d_factor = 0, *d_captures[CAPTURES] = {NULL};
    for (uint32_t i = 0; i < f.problem.score->n_captures; i++) {
        const char *name = f.problem.score->captures[i].name;
        d_captures[i] = strcmp(name, "table") == 0    ? d_table
                        : strcmp(name, "factor") == 0 ? &d_factor
                                                      : NULL;
    }
    double *d_out = random_doubles(s.H * s.Q * s.Dv), *d_lse = random_doubles(s.H * s.Q);
    check_ok(ref_backward_captures(&f.problem, &f.run, d_out, d_lse, d_captures, &err), &err);
    for (int i = 0; i < 11; i++) {
        float *x = i < 10 ? &table[i / 5][i % 5] : &factor;
        const float kept = *x, up = kept + 0x1p-8f, down = kept - 0x1p-8f;
        *x = up;
        const double above = weighted(&f, d_out, d_lse);
        *x = down;
        const double below = weighted(&f, d_out, d_lse);
        *x = kept;
        assert_near(i < 10 ? d_table[i] : d_factor,
                    (above - below) / ((double)up - (double)down), 5e-5);
    }
    free(d_out);
    free(d_lse);
    drop(&f);
}

/* ---- plain ---- */

static void plain_is_near_the_oracle(void **unused)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    static const double ulps[] = {0x1p-23, 0x1p-10, 0x1p-7};
    (void)unused;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        start(seed);
        const int t = (int)(seed % 3);
        const variant *v = &variants[seed % VARIANTS];
        const saccade_sizes s = random_sizes();
        const int64_t rows = s.B * s.H * s.Q;
        saccade_error err;
        fixture f;
        make(&s, dtypes[t], v->mask, v->score, NULL, 0, &f);
        set_positions(&f, (int)between(0, 1), (int)between(0, 1), (int)between(0, 1));
        forward(&f);
        float *out = malloc((size_t)(rows * s.Dv) * sizeof *out);
        float *lse = malloc((size_t)rows * sizeof *lse);
        assert_true(out && lse);
        check_ok(ref_plain(&f.problem, &f.run, out, lse, &err), &err);
        for (int64_t i = 0; i < rows; i++) {
            assert_near((double)lse[i], f.lse[i], 2e-5);
            for (int64_t d = 0; d < s.Dv; d++)
                assert_near((double)out[i * s.Dv + d], f.out[i * s.Dv + d], 8 * ulps[t]);
        }
        free(out);
        free(lse);
        drop(&f);
    }
}

/* ---- as plans ---- */

static void check_solver(const plan_solver *solver, saccade_dtype dtype, double tolerance)
{
    const saccade_sizes s = {2, 4, 2, 5, 7, 3, 4};
    const int64_t rows = s.B * s.H * s.Q, shape[4] = {s.B, s.H, s.Q, s.Dv};
    saccade_plan plan = {.solver = solver, .threads = 2};
    saccade_error err;
    char why[160] = "";
    fixture f;
    start(31);
    make(&s, dtype, "q >= kv", "2.0 * tanh(score / 2.0)", NULL, 0, &f);
    forward(&f);
    arena_init(&plan.arena);
    plan.problem = f.problem;
    assert_true(solver->applicable(&plan.problem, 0, why));
    check_ok(solver->create(&plan, &err), &err);
    const size_t bytes = solver->workspace(&plan, &s);
    char *workspace = aligned_alloc(64, bytes + 64);
    unsigned char out[4 * 4096];
    float lse[64], row_max[64];
    assert_non_null(workspace);
    memset(workspace + bytes, 0x5a, 64);
    memset(out, 0x5a, sizeof out);
    f.run.workspace = workspace;
    f.run.workspace_bytes = bytes;
    const saccade_tensor o = saccade_tensor_of(out, dtype, 4, shape);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, shape);
    const saccade_tensor m = saccade_tensor_of(row_max, SACCADE_F32, 3, shape);
    f.run.out = &o;
    f.run.lse = &l;
    f.run.row_max = &m;
    check_ok(solver->forward(&plan, &f.run, &err), &err);
    for (int64_t i = 0; i < rows; i++) {
        assert_near((double)lse[i], f.lse[i], 1e-5);
        assert_near((double)row_max[i], f.row_max[i], 1e-5);
    }
    for (int64_t i = 0; i < rows * s.Dv; i++)
        assert_near(convert_element(dtype, out + i * (int64_t)saccade_dtype_bytes(dtype)),
                    f.out[i], tolerance);
    for (size_t i = (size_t)(rows * s.Dv) * saccade_dtype_bytes(dtype); i < sizeof out; i++)
        assert_int_equal(out[i], 0x5a);
    for (int i = 0; i < 64; i++)
        assert_int_equal(workspace[bytes + (size_t)i], 0x5a);
    strbuf text;
    strbuf_init(&text, 0);
    check_ok(solver->explain(&plan, &text, &err), &err);
    assert_non_null(strstr(strbuf_text(&text), "workspace"));
    strbuf_free(&text);
    solver->destroy(&plan);
    arena_free(&plan.arena);
    free(workspace);
    drop(&f);
}

static void solvers_run_in_their_workspace(void **unused)
{
    (void)unused;
    check_solver(ref_solvers[0], SACCADE_F64, 1e-12);
    check_solver(ref_solvers[0], SACCADE_F32, 1e-6);
    check_solver(ref_solvers[0], SACCADE_F16, 2e-3);
    check_solver(ref_solvers[0], SACCADE_BF16, 1.6e-2);
    check_solver(plain_solvers[0], SACCADE_F32, 1e-6);
    check_solver(plain_solvers[0], SACCADE_F16, 4e-3);
    check_solver(plain_solvers[0], SACCADE_BF16, 3e-2);
    char why[160];
    const plan_problem wide = {.dtype = SACCADE_F64, .kv_dtype = SACCADE_F64};
    assert_false(plain_solvers[0]->applicable(&wide, 0, why));
}

/* ---- block masks given as index tensors ---- */

enum { BLOCK_Q = 4, BLOCK_KV = 3, BLOCK_ROWS = 3, BLOCK_COLUMNS = 5 };

static int block_state[BLOCK_ROWS][BLOCK_COLUMNS]; /* 0 absent, 1 PARTIAL, 2 FULL */

/* The mod decides inside PARTIAL blocks only. */
static int is_live_by_blocks(int64_t q, int64_t kv)
{
    const int of_block = block_state[q / BLOCK_Q][kv / BLOCK_KV];
    return of_block == 2 || (of_block == 1 && is_every_third(q, kv));
}

static saccade_block_mask *import_blocks(const fixture *f)
{
    int32_t counts[2][BLOCK_ROWS] = {{0}}, columns[2][BLOCK_ROWS][BLOCK_COLUMNS] = {{{0}}};
    saccade_block_mask *mask;
    saccade_error err;
    for (int i = 0; i < BLOCK_ROWS; i++)
        for (int32_t j = 0; j < BLOCK_COLUMNS; j++) {
            const int is_full = block_state[i][j] == 2;
            if (block_state[i][j])
                columns[is_full][i][counts[is_full][i]++] = j;
        }
    const saccade_block_indices indices = {
        1,        1,         BLOCK_ROWS,        BLOCK_COLUMNS, BLOCK_Q,
        BLOCK_KV, counts[0], &columns[0][0][0], counts[1],     &columns[1][0][0]};
    check_ok(saccade_block_mask_import(NULL, &indices, f->mask, &f->run.sizes, NULL, NULL, 0,
                                       &mask, &err),
             &err);
    return mask;
}

static void imported_blocks_overrule_the_mod(void **unused)
{
    static const variant by_blocks = {"(q + kv) % 3 == 0", NULL, is_live_by_blocks, NULL};
    const saccade_sizes s = {1, 2, 1, 10, 13, 3, 2};
    (void)unused;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        fixture f;
        saccade_error err;
        start(seed);
        for (int i = 0; i < BLOCK_ROWS * BLOCK_COLUMNS; i++)
            block_state[i / BLOCK_COLUMNS][i % BLOCK_COLUMNS] = (int)between(0, 2);
        make(&s, SACCADE_F64, by_blocks.mask, NULL, NULL, 0, &f);
        saccade_block_mask *mask = import_blocks(&f);
        f.run.block_mask = mask;
        saccade_plan plan = {.solver = ref_solvers[0], .problem = f.problem};
        check_ok(ref_solvers[0]->prepare(&plan, mask, &err), &err);
        forward(&f);
        for (int64_t row = 0; row < s.H * s.Q; row++)
            check_row(&f, &by_blocks, 0, row / s.Q, row % s.Q);
        saccade_block_mask_destroy(mask);
        drop(&f);
    }
}

/* ---- the ladder's own truth ---- */

static saccade_tensor view(const float *data, const ladder_problem *p)
{
    const int64_t shape[4] = {1, 1, p->N, p->d};
    return saccade_tensor_of((void *)(uintptr_t)data, SACCADE_F32, 4, shape);
}

static void ladder_agrees_with_the_oracle(void **unused)
{
    (void)unused;
    const ladder_problem sizes = {.N = 40, .d = 6, .M = 60, .block = 8, .splits = 3};
    const int64_t N = sizes.N, d = sizes.d;
    ladder_data data;
    saccade_error err;
    check_ok(ladder_data_create(&sizes, 4, 1, &data, &err), &err);
    const ladder_problem *p = &data.problem;
    const saccade_tensor q = view(p->Q, p), k = view(p->K, p), v = view(p->V, p);
    const plan_problem problem = {.scale = 1, .group = 1};
    const plan_run run = {.sizes = {1, 1, 1, N, N, d, d}, .q = &q, .k = &k, .v = &v};
    double *out = new_doubles(N * d), *gradients = new_doubles(3 * N * d);
    double *d_out = new_doubles(N * d);
    for (int64_t i = 0; i < N * d; i++)
        d_out[i] = (double)p->dO[i];
    check_ok(ref_forward(&problem, &run, out, NULL, NULL, &err), &err);
    check_ok(ref_backward(&problem, &run, d_out, NULL, gradients, gradients + N * d,
                          gradients + 2 * N * d, &err),
             &err);
    for (const ladder_rung *rung = ladder_rungs; rung->name; rung++) {
        double error;
        ladder_run counted = ladder_start(&data);
        rung->counted(&counted);
        check_ok(ladder_error(&data, rung, &error, &err), &err);
        const double *expected = rung->kind == LADDER_BACKWARD ? gradients : out;
        if (rung->kind == LADDER_SOFTMAX || rung->kind == LADDER_SPARSE)
            continue;
        for (int64_t i = 0; i < ladder_out_size(rung, p); i++)
            assert_near(data.truth[i], expected[i], 1e-12);
    }
    free(out);
    free(gradients);
    free(d_out);
    ladder_data_destroy(&data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_equals_attention_written_out),
        cmocka_unit_test(empty_rows_are_zero),
        cmocka_unit_test(what_masked_positions_hold_never_shows),
        cmocka_unit_test(live_nan_and_inf_fill_their_row_only),
        cmocka_unit_test(output_is_linear_in_v),
        cmocka_unit_test(keys_may_come_in_any_order),
        cmocka_unit_test(a_constant_moves_lse_only),
        cmocka_unit_test(future_keys_do_not_matter_under_causal),
        cmocka_unit_test(split_keys_merge_to_the_whole),
        cmocka_unit_test(gradients_equal_finite_differences),
        cmocka_unit_test(capture_gradients_equal_finite_differences),
        cmocka_unit_test(plain_is_near_the_oracle),
        cmocka_unit_test(solvers_run_in_their_workspace),
        cmocka_unit_test(imported_blocks_overrule_the_mod),
        cmocka_unit_test(ladder_agrees_with_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
