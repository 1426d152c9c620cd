/* Properties that attention has whatever computes it, at every level and dtype; no oracle. A
 * solver passes this file unchanged. */
#include "support/forward_case.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct result {
    float *out, *lse; /* [B,H,Q,Dv], [B,H,Q] */
    size_t n_out, n_lse;
} result;

static result result_of(const case_run *r, const char *level)
{
    const saccade_sizes *s = &r->sizes;
    result got = {.n_lse = (size_t)(s->B * s->H * s->Q)};
    saccade_plan *plan = case_plan(r, level, 2);
    got.n_out = got.n_lse * (size_t)s->Dv;
    got.out = malloc(got.n_out * sizeof(float));
    got.lse = malloc(got.n_lse * sizeof(float));
    assert_true(got.out && got.lse);
    case_check(r, plan, NULL, level, got.out, got.lse);
    saccade_plan_destroy(plan);
    return got;
}

static void result_free(result *r)
{
    free(r->out);
    free(r->lse);
}

static void set(const saccade_tensor *t, int64_t at, float x)
{
    const int64_t each = (int64_t)saccade_dtype_bytes(t->dtype);
    convert_from_f32(t->dtype, &x, (char *)t->data + at * each, 1);
}

static float get(const saccade_tensor *t, int64_t at)
{
    const int64_t each = (int64_t)saccade_dtype_bytes(t->dtype);
    return (float)convert_element(t->dtype, (const char *)t->data + at * each);
}

static void close_to(const char *what, const char *level, double x, double y, double most)
{
    if (!(fabs(x - y) <= most) && !(x == y))
        fail_msg("%s at %s: got %.9g, expected %.9g within %.3g", what, level, x, y, most);
}

static const char *const problems[] = {
    "b2 h4/2 q70 kv300 d24 f32",
    "b1 h4/2 q130 kv600 d64 bf16",
    "b1 h4/1 q2 kv700 d32 f16",
};

typedef void (*property)(const char *problem, const char *level);

static void for_all(property check)
{
    for (size_t n = 0; n < sizeof problems / sizeof problems[0]; n++)
        for (const char *const *level = case_levels(); *level; level++)
            check(problems[n], *level);
}

/* V -> 2 V doubles out, exactly: a power of two scales every rounding along. */
static void check_linear(const char *problem, const char *level)
{
    case_run r;
    case_make(&(forward_case){.problem = problem, .mask = "kv % 7 != q % 7"}, &r);
    const int64_t n = r.sizes.B * r.sizes.Hkv * r.sizes.KV * r.sizes.Dv;
    result one = result_of(&r, level);
    for (int64_t at = 0; at < n; at++)
        set(&r.v.t, at, 2 * get(&r.v.t, at));
    case_solve(&r);
    result two = result_of(&r, level);
    for (size_t at = 0; at < one.n_out; at++)
        close_to("2 V", level, two.out[at], 2 * one.out[at], 0);
    result_free(&one);
    result_free(&two);
    case_free(&r);
}

/* V = 1 gives rows of 1 where a row has a key. */
static void check_ones(const char *problem, const char *level)
{
    case_run r;
    case_make(&(forward_case){.problem = problem, .mask = "q % 5 != 0 && (kv ^ q) % 3 != 0"},
              &r);
    const int64_t n = r.sizes.B * r.sizes.Hkv * r.sizes.KV * r.sizes.Dv;
    for (int64_t at = 0; at < n; at++)
        set(&r.v.t, at, 1);
    case_solve(&r);
    result got = result_of(&r, level);
    const double most = r.dtype == SACCADE_BF16 ? 0x1p-7 : r.dtype == SACCADE_F16 ? 0x1p-9
                                                                                  : 4e-6;
    for (size_t at = 0; at < got.n_out; at++) {
        const size_t i = at / (size_t)r.sizes.Dv % (size_t)r.sizes.Q;
        close_to("V = 1", level, got.out[at], i % 5 == 0 ? 0 : 1, most);
    }
    result_free(&got);
    case_free(&r);
}

/* Exchanging keys, with their values, changes nothing but the order of sums. */
static void check_permuted(const char *problem, const char *level)
{
    case_run r;
    case_make(&(forward_case){.problem = problem}, &r);
    result one = result_of(&r, level);
    const saccade_tensor *tensors[2] = {&r.k.t, &r.v.t};
    for (int n = 0; n < 2; n++) {
        const saccade_tensor *t = tensors[n];
        for (int64_t head = 0; head < t->shape[0] * t->shape[1]; head++)
            for (int64_t j = 0; j < t->shape[2] / 2; j++)
                for (int64_t d = 0; d < t->shape[3]; d++) {
                    const int64_t from = head * t->shape[2], last = t->shape[2] - 1;
                    const int64_t a = (from + j) * t->shape[3] + d;
                    const int64_t b = (from + last - j) * t->shape[3] + d;
                    const float x = get(t, a), y = get(t, b);
                    set(t, a, y);
                    set(t, b, x);
                }
    }
    case_solve(&r);
    result two = result_of(&r, level);
    for (size_t at = 0; at < one.n_out; at++)
        close_to("keys reversed", level, two.out[at], one.out[at], 2 * r.out_bound);
    for (size_t at = 0; at < one.n_lse; at++)
        close_to("keys reversed, lse", level, two.lse[at], one.lse[at], 2 * r.lse_bound);
    result_free(&one);
    result_free(&two);
    case_free(&r);
}

/* Adding a constant to all scores moves lse by it and leaves out where it was. */
static void check_shifted(const char *problem, const char *level)
{
    case_run r, moved;
    case_make(&(forward_case){.problem = problem, .mask = "q + 200 >= kv"}, &r);
    case_make(&(forward_case){.problem = problem, .mask = "q + 200 >= kv",
                              .score = "score + 3.0"},
              &moved);
    result one = result_of(&r, level), two = result_of(&moved, level);
    for (size_t at = 0; at < one.n_out; at++)
        close_to("score + 3", level, two.out[at], one.out[at], r.out_bound + moved.out_bound);
    for (size_t at = 0; at < one.n_lse; at++)
        close_to("score + 3, lse", level, two.lse[at], one.lse[at] + 3,
                 r.lse_bound + moved.lse_bound);
    result_free(&one);
    result_free(&two);
    case_free(&r);
    case_free(&moved);
}

/* Keys of the future may hold anything under causal: the same bits come out. */
static void check_future(const char *problem, const char *level)
{
    case_run r;
    case_make(&(forward_case){.problem = problem, .mask = "causal()"}, &r);
    result one = result_of(&r, level);
    for (int64_t head = 0; head < r.sizes.B * r.sizes.Hkv; head++)
        for (int64_t j = r.sizes.Q; j < r.sizes.KV; j++) {
            set(&r.k.t, (head * r.sizes.KV + j) * r.sizes.D, NAN);
            set(&r.v.t, (head * r.sizes.KV + j) * r.sizes.Dv, INFINITY);
        }
    case_solve(&r);
    result two = result_of(&r, level);
    assert_memory_equal(one.lse, two.lse, one.n_lse * sizeof(float));
    for (size_t at = 0; at < one.n_out; at++)
        close_to("future", level, two.out[at], one.out[at], r.out_bound);
    result_free(&one);
    result_free(&two);
    case_free(&r);
}

/* Two parts of the keys, merged by their lse, give the whole. */
static void check_split(const char *problem, const char *level)
{
    static const char *const masks[] = {"true", "kv < 111", "kv >= 111"};
    case_run r[3];
    result got[3];
    for (int n = 0; n < 3; n++) {
        case_make(&(forward_case){.problem = problem, .mask = masks[n]}, &r[n]);
        got[n] = result_of(&r[n], level);
    }
    for (size_t i = 0; i < got[0].n_lse; i++) {
        const double a = got[1].lse[i], b = got[2].lse[i], m = fmax(a, b);
        const double wa = exp(a - m), wb = exp(b - m);
        close_to("merged lse", level, m + log(wa + wb), got[0].lse[i],
                 r[0].lse_bound + r[1].lse_bound + r[2].lse_bound);
        for (size_t d = 0; d < (size_t)r[0].sizes.Dv; d++) {
            const size_t at = i * (size_t)r[0].sizes.Dv + d;
            close_to("merged", level, (wa * got[1].out[at] + wb * got[2].out[at]) / (wa + wb),
                     got[0].out[at], r[0].out_bound + r[1].out_bound + r[2].out_bound);
        }
    }
    for (int n = 0; n < 3; n++) {
        result_free(&got[n]);
        case_free(&r[n]);
    }
}

#define PROPERTY(name, check)          \
    static void name(void **state)     \
    {                                  \
        (void)state;                   \
        for_all(check);                \
    }
PROPERTY(is_linear_in_v, check_linear)
PROPERTY(weights_sum_to_one, check_ones)
PROPERTY(keys_have_no_order, check_permuted)
PROPERTY(constants_move_lse_only, check_shifted)
PROPERTY(future_does_not_matter, check_future)
PROPERTY(splits_merge, check_split)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_linear_in_v),          cmocka_unit_test(weights_sum_to_one),
        cmocka_unit_test(keys_have_no_order),      cmocka_unit_test(constants_move_lse_only),
        cmocka_unit_test(future_does_not_matter),  cmocka_unit_test(splits_merge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
