/* Gradients of captures whose derivative is large beside what differs in a row, where values
 * have a mean: the sum of a row's dX counts, which dO . O in 16 bits does not tell. With out in
 * 16 bits and in f32, at every level and on emulated tiles, against float64. */
#include "support/backward_case.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cpu/kernels/backward_kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/room.h"

enum { MEAN = 10 };

static void add_mean(const saccade_tensor *t)
{
    for (int64_t row = 0; row < t->shape[0] * t->shape[1] * t->shape[2]; row++) {
        const int64_t i = row % t->shape[2], h = row / t->shape[2] % t->shape[1];
        const int64_t b = row / t->shape[2] / t->shape[1];
        const int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
        for (int64_t d = 0; d < t->shape[3]; d++) {
            char *x = (char *)t->data + (at + d) * (int64_t)saccade_dtype_bytes(t->dtype);
            convert_to_element(t->dtype, convert_element(t->dtype, x) + MEAN, x);
        }
    }
}

static void store(const saccade_tensor *t, const double *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        convert_to_element(t->dtype, from[i],
                           (char *)t->data + i * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* Truth, with bounds of captures' gradients that are a part of the largest. */
static void solve(backward_case_run *r, double part)
{
    const saccade_sizes *s = &r->f.sizes;
    add_mean(&r->f.v.t);
    case_solve(&r->f);
    store(&r->out.t, r->f.out, s->B * s->H * s->Q * s->Dv);
    store(&r->lse.t, r->f.lse, s->B * s->H * s->Q);
    backward_case_solve(r);
    for (int c = 0; c < 8; c++) {
        double most = 0;
        for (int64_t i = 0; r->captured[c] && i < r->captured_count[c]; i++)
            most = fmax(most, fabs(r->captured[c][i]));
        r->captured_bound[c] = part * most;
    }
}

/* One thread and three: equal bits of dQ, which has a term of delta. */
static void check_threads(const backward_case_run *r, const char *level)
{
    const size_t bytes = backward_case_bytes(r, BACKWARD_DQ);
    char *one[BACKWARD_GRADIENTS] = {malloc(bytes)},
         *three[BACKWARD_GRADIENTS] = {malloc(bytes)};
    assert_non_null(one[BACKWARD_DQ]);
    assert_non_null(three[BACKWARD_DQ]);
    backward_case_check(r, level, 1, BACKWARD_PROVEN, one);
    backward_case_check(r, level, 3, BACKWARD_PROVEN, three);
    assert_memory_equal(one[BACKWARD_DQ], three[BACKWARD_DQ], bytes);
    free(one[BACKWARD_DQ]);
    free(three[BACKWARD_DQ]);
}

static void check(const backward_case *c, double part)
{
    backward_case_run r;
    backward_case_make(c, &r);
    solve(&r, part);
    for (const char *const *level = case_levels(); *level; level++)
        check_threads(&r, *level);
    r.c.kernels = r.f.dtype == SACCADE_BF16 ? &cpu_backward_bf16_tiles_portable
                                            : &cpu_backward_f16_tiles_portable;
    backward_case_check(&r, NULL, 1, BACKWARD_PROVEN, NULL);
    backward_case_free(&r);
}

static void sums_over_rows(void **state)
{
    static const char *const scores[] = {
        "score + h_scale[h] * 0.01 * (kv - q)",
        "score + c * 0.001 * kv",
        "score + table[kv < 180 ? 0 : 1 + kv % 7]",
    };
    char text[96];
    (void)state;
    for (int n = 0; n < (int)(sizeof scores / sizeof *scores); n++) {
        backward_case c = {.forward = {.problem = "b1 h2/1 q150 kv400 d16 dv32 bf16",
                                       .score = scores[n],
                                       .mask = n == 1 ? "q + 260 >= kv" : NULL,
                                       .seed = (uint64_t)n + 3},
                           .has_d_lse = n == 1,
                           .has_captures = 1};
        backward_case halves = c;
        halves.forward = case_in_f16(&c.forward, text);
        for (c.has_f32_out = 0; c.has_f32_out < 2; c.has_f32_out++) {
            halves.has_f32_out = c.has_f32_out;
            check(&c, 0.04);
            check(&halves, 0.005);
        }
    }
}

/* ---- runs over parts of the keys ---- */

enum { H = 2, Q = 64, KV = 256, D = 16 };
static uint16_t q[H * Q * D], k[H * KV * D], v[H * KV * D], d_out[H * Q * D], out[H * Q * D];
static float out_f32[H * Q * D], lse[H * Q], slope[H] = {0.1f, 0.2f}, d_slope[H];

/* Keys [first, first + n). */
static saccade_tensor keys(uint16_t *data, int64_t first, int64_t n)
{
    saccade_tensor t =
        saccade_tensor_of(data + first * D, SACCADE_BF16, 4, (int64_t[]){1, H, n, D});
    t.stride[0] = H * KV * D;
    t.stride[1] = KV * D;
    return t;
}

static saccade_tensor rows(uint16_t *data)
{
    return saccade_tensor_of(data, SACCADE_BF16, 4, (int64_t[]){1, H, Q, D});
}

/* What forward leaves and backward is told. */
static saccade_tensor results(saccade_dtype dtype)
{
    void *data = dtype == SACCADE_F32 ? (void *)out_f32 : out;
    return saccade_tensor_of(data, dtype, 4, (int64_t[]){1, H, Q, D});
}

static saccade_plan *slopes_plan(const char *backend, const char *level,
                                 saccade_dtype out_dtype)
{
    static const char text[] = "score + slope[h] * 0.01 * (kv - q)";
    const saccade_capture capture = {"slope", SACCADE_F32, 1};
    const saccade_context_options options = {.size = sizeof options, .level = level};
    saccade_mod *parsed, *score;
    saccade_context *context;
    saccade_plan *plan;
    saccade_problem p;
    assert_int_equal(saccade_context_create(&options, &context, NULL), SACCADE_OK);
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &parsed, NULL), 0);
    assert_int_equal(saccade_mod_bind(parsed, &capture, 1, &score, NULL), 0);
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = H, .Hkv = H, .D = D, .Dv = D};
    p.dtype = p.d_out_dtype = SACCADE_BF16;
    p.out_dtype = out_dtype;
    p.score = score;
    p.backend = backend;
    p.gradients = SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = &(const char *){"slope"};
    p.n_gradient_captures = 1;
    assert_int_equal(saccade_plan_create(context, &p, &plan, NULL), SACCADE_OK);
    saccade_mod_destroy(score);
    saccade_mod_destroy(parsed);
    saccade_context_destroy(context);
    return plan;
}

static void run_forward(const saccade_plan *plan, saccade_dtype out_dtype)
{
    const saccade_sizes sizes = {1, H, H, Q, KV, D, D};
    const saccade_tensor tq = rows(q), tk = keys(k, 0, KV), tv = keys(v, 0, KV);
    const saccade_tensor to = results(out_dtype);
    const saccade_tensor tl = saccade_tensor_of(lse, SACCADE_F32, 3, (int64_t[]){1, H, Q});
    const saccade_binding binding = {"slope",
                                     saccade_tensor_of(slope, SACCADE_F32, 1, (int64_t[]){H})};
    saccade_forward_args run;
    saccade_forward_args_init(&run);
    run.q = &tq, run.k = &tk, run.v = &tv, run.out = &to, run.lse = &tl;
    run.bindings = &binding, run.n_bindings = 1;
    run.workspace = room(saccade_plan_workspace(plan, &sizes), &run.workspace_bytes);
    assert_int_equal(saccade_forward(plan, &run, NULL), SACCADE_OK);
    free(run.workspace);
}

/* Adds to d_slope what keys [first, first + n) give, with out and lse of all. */
static void add_part(const saccade_plan *plan, saccade_dtype out_dtype, int32_t first,
                     int64_t n)
{
    const saccade_sizes sizes = {1, H, H, Q, n, D, D};
    const saccade_tensor tq = rows(q), tk = keys(k, first, n), tv = keys(v, first, n);
    const saccade_tensor to = results(out_dtype), t_d_out = rows(d_out);
    const saccade_tensor tl = saccade_tensor_of(lse, SACCADE_F32, 3, (int64_t[]){1, H, Q});
    const saccade_tensor offset = saccade_tensor_of(&first, SACCADE_I32, 1, (int64_t[]){1});
    const saccade_positions positions = {.size = sizeof positions, .kv_offset = &offset};
    const saccade_binding binding = {"slope",
                                     saccade_tensor_of(slope, SACCADE_F32, 1, (int64_t[]){H})};
    const saccade_binding made = {"slope",
                                  saccade_tensor_of(d_slope, SACCADE_F32, 1, (int64_t[]){H})};
    saccade_backward_args run;
    saccade_backward_args_init(&run);
    run.q = &tq, run.k = &tk, run.v = &tv, run.out = &to, run.lse = &tl;
    run.d_out = &t_d_out, run.positions = &positions;
    run.bindings = &binding, run.n_bindings = 1;
    run.d_captures = &made, run.n_d_captures = 1;
    run.accumulate = SACCADE_GRADIENT_CAPTURES;
    run.workspace = room(saccade_plan_backward_workspace(plan, &sizes), &run.workspace_bytes);
    assert_int_equal(saccade_backward(plan, &run, NULL), SACCADE_OK);
    free(run.workspace);
}

static void fill(uint16_t *to, int n, float mean, uint32_t seed)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        const float x = (float)(seed >> 8) * 0x1p-23f - 1 + mean;
        convert_from_f32(SACCADE_BF16, &x, to + i, 1);
    }
}

static void fill_inputs(float mean)
{
    fill(q, H * Q * D, 0, 1);
    fill(k, H * KV * D, 0, 2);
    fill(v, H * KV * D, mean, 3);
    fill(d_out, H * Q * D, 0, 4);
}

/* What rows of a part of the keys sum to says nothing about delta. */
static void parts_of_the_keys(void **state)
{
    saccade_plan *plan = slopes_plan("cpu", NULL, SACCADE_BF16);
    float whole[H];
    (void)state;
    fill_inputs(0);
    run_forward(plan, SACCADE_BF16);
    memset(d_slope, 0, sizeof d_slope);
    add_part(plan, SACCADE_BF16, 0, KV);
    memcpy(whole, d_slope, sizeof whole);
    memset(d_slope, 0, sizeof d_slope);
    add_part(plan, SACCADE_BF16, 0, 100);
    add_part(plan, SACCADE_BF16, 100, KV - 100);
    for (int h = 0; h < H; h++)
        if (!(fabsf(d_slope[h] - whole[h]) <= 0.05f * fabsf(whole[h])))
            fail_msg("[%d]: got %.9g, expected about %.9g", h, (double)d_slope[h],
                     (double)whole[h]);
    saccade_plan_destroy(plan);
}

/* ---- out in f32 ---- */

/* The slopes' gradient of keys [0, cut) and [cut, KV), with out of all. */
static void sum_parts(const saccade_plan *plan, int32_t cut, float *to)
{
    memset(d_slope, 0, sizeof d_slope);
    if (cut)
        add_part(plan, SACCADE_F32, 0, cut);
    add_part(plan, SACCADE_F32, cut, KV - cut);
    memcpy(to, d_slope, sizeof d_slope);
}

/* The largest error, as a part of the truth. */
static float error_of(const float *got, const float *gold)
{
    float most = 0;
    for (int h = 0; h < H; h++)
        most = fmaxf(most, fabsf(got[h] - gold[h]) / fabsf(gold[h]));
    return most;
}

static void round_results(void)
{
    for (int i = 0; i < H * Q * D; i++) {
        uint16_t narrow;
        convert_from_f32(SACCADE_BF16, &out_f32[i], &narrow, 1);
        convert_to_f32(SACCADE_BF16, &narrow, &out_f32[i], 1);
    }
}

/* As forward left it, which rounds P; then as if it had rounded its results too. Runs over
 * parts of the keys, which can make no delta of their own, are as good as the whole. */
static void results_in_f32(void **state)
{
    float gold[H], got[H];
    (void)state;
    fill_inputs(MEAN);
    saccade_plan *plan = slopes_plan("ref", NULL, SACCADE_F32);
    run_forward(plan, SACCADE_F32);
    sum_parts(plan, 0, gold);
    saccade_plan_destroy(plan);
    for (const char *const *level = case_levels(); *level; level++)
        for (int is_plain = 0; is_plain < 2; is_plain++) {
            plan = slopes_plan(is_plain ? "plain" : "cpu", *level, SACCADE_F32);
            run_forward(plan, SACCADE_F32);
            for (int32_t cut = 0; cut <= 100 && (!cut || !is_plain); cut += 100) {
                sum_parts(plan, cut, got);
                if (!(error_of(got, gold) <= 0.2f))
                    fail_msg("%s %s, cut at %d: %.3g off", is_plain ? "plain" : "cpu", *level,
                             cut, (double)error_of(got, gold));
            }
            round_results();
            sum_parts(plan, 0, got);
            assert_true(error_of(got, gold) > 1);
            saccade_plan_destroy(plan);
        }
}

static void the_pass_is_told(void **state)
{
    (void)state;
    for (int is_f32 = 0; is_f32 < 2; is_f32++) {
        saccade_plan *plan = slopes_plan("cpu", NULL, is_f32 ? SACCADE_F32 : SACCADE_BF16);
        char *text;
        assert_int_equal(saccade_plan_explain(plan, &text, NULL), SACCADE_OK);
        assert_int_equal(strstr(text, "in a first pass") != NULL, !is_f32);
        assert_int_equal(strstr(text, "\ntheir gradient: bf16\n") != NULL, is_f32);
        saccade_free(text);
        saccade_plan_destroy(plan);
    }
}

/* ---- which captures want it ---- */

static int32_t sums_of(const char *text, const char *name)
{
    const saccade_capture captures[] = {{"t", SACCADE_F32, 1}, {"n", SACCADE_I32, 0}};
    saccade_mod *parsed, *score;
    saccade_error err = {0};
    int32_t sums = -1;
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &parsed, NULL), 0);
    const int32_t n = saccade_mod_capture_count(parsed);
    assert_int_equal(saccade_mod_bind(parsed, captures, n, &score, NULL), 0);
    const saccade_status status =
        saccade_mod_sums_keys(score, &name, name ? 1 : 0, &sums, &err);
    assert_int_equal(saccade_mod_sums_keys(parsed, NULL, 0, &sums, NULL), SACCADE_EINVAL);
    saccade_mod_destroy(score);
    saccade_mod_destroy(parsed);
    return status == SACCADE_OK ? sums : -1;
}

static void which_sum_keys(void **state)
{
    (void)state;
    assert_int_equal(sums_of("score + t[h] * (kv - q)", "t"), 1);
    assert_int_equal(sums_of("score + t[min(abs(kv - q), 7)] + 0 * n", "t"), 1);
    assert_int_equal(sums_of("score * t[q]", "t"), 1);
    assert_int_equal(sums_of("score + t[kv]", "t"), 0);
    assert_int_equal(sums_of("score + t[q - kv + 100]", "t"), 0);
    assert_int_equal(sums_of("score + t[h] * (kv - q)", NULL), 0);
    assert_int_equal(sums_of("score + t[h] - t[h]", "t"), 1);
    assert_int_equal(sums_of("score + (false ? t[h] : 0.0)", "t"), 0); /* nothing reads it */
    assert_int_equal(sums_of("score + t[n]", "n"), 0);                 /* has no gradient */
    assert_int_equal(sums_of("score + t[0]", "t"), 1);
    assert_int_equal(sums_of("score + t[n]", "t"), 1);
    assert_int_equal(sums_of("score + t[kv + n * q]", "t"), 0);
    assert_int_equal(sums_of("score + t[n * kv]", "t"), 1); /* n may be 0 */
    assert_int_equal(sums_of("score + t[kv / 2]", "t"), 1);
    assert_int_equal(sums_of("score + t[clamp(kv, 0, 7)]", "t"), 1);
    assert_int_equal(sums_of("score + t[kv < n ? kv : n]", "t"), 1);
    assert_int_equal(sums_of("x = kv - q; score + t[x < 0 ? x + n : x]", "t"), 0);
    assert_int_equal(sums_of("score + t[kv + int(score)]", "t"), 1);
    assert_int_equal(sums_of("score + t[kv] * t[q]", "t"), 1);
    assert_int_equal(sums_of("score + t[kv] - t[kv + 1]", "t"), 0); /* one term a read */
    assert_int_equal(sums_of("score = score + t[kv]; softcap(20.0)", "t"), 0);
    assert_int_equal(sums_of("score = softcap(20.0); score + t[0]", "t"), 1);
    assert_int_equal(sums_of("score + t[kv]", "u"), -1);
    assert_int_equal(saccade_mod_sums_keys(NULL, NULL, 0, &(int32_t){0}, NULL), SACCADE_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_over_rows), cmocka_unit_test(parts_of_the_keys),
        cmocka_unit_test(results_in_f32), cmocka_unit_test(the_pass_is_told),
        cmocka_unit_test(which_sum_keys)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
