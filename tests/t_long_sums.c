/* Long sums in f32 beside float64: what is small is not lost to a sum that has grown large, but
 * for what one block of keys, or of queries, adds to it. Every level, forward and backward. */
#include <saccade.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/room.h"

enum { FEW = 100, MANY = 4096, D = 8 };
/* One term of 2^24, to which f32 adds no 1, and then ones. */
static const float large = 0x1p24f;
static float zeros[MANY * D], terms[MANY * D], ones[MANY * D], out[MANY * D], lse[MANY];
static float d_v[MANY * D], signs[2 * D], d_bias[2];

static saccade_tensor tensor(float *data, int64_t n)
{
    return saccade_tensor_of(data, SACCADE_F32, 4, (int64_t[]){1, 1, n, D});
}

static saccade_mod *score_of(const char *text)
{
    const saccade_capture bias = {"bias", SACCADE_F32, 1};
    saccade_mod *parsed, *bound;
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &parsed, NULL), 0);
    assert_int_equal(saccade_mod_bind(parsed, &bias, 1, &bound, NULL), 0);
    saccade_mod_destroy(parsed);
    return bound;
}

/* A plan that makes gradients of values, or, of this score, of its bias. NULL: this machine has
 * no such level. */
static saccade_plan *plan_of(const char *level, saccade_mod *score)
{
    const saccade_context_options options = {
        .size = sizeof options, .threads = 1, .level = level};
    saccade_context *context;
    saccade_plan *plan;
    saccade_problem p;
    if (saccade_context_create(&options, &context, NULL))
        return NULL;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 1, .Hkv = 1, .D = D, .Dv = D};
    p.backend = "cpu";
    p.gradients = score ? SACCADE_GRADIENT_CAPTURES : SACCADE_GRADIENT_V;
    p.score = score;
    p.gradient_captures = &(const char *){"bias"};
    p.n_gradient_captures = score != NULL;
    assert_int_equal(saccade_plan_create(context, &p, &plan, NULL), SACCADE_OK);
    saccade_context_destroy(context);
    return plan;
}

static void forward(const saccade_plan *plan, float *values, int64_t Q, int64_t KV)
{
    const saccade_sizes sizes = {1, 1, 1, Q, KV, D, D};
    const saccade_tensor q = tensor(zeros, Q), k = tensor(zeros, KV), v = tensor(values, KV);
    const saccade_tensor o = tensor(out, Q);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, (int64_t[]){1, 1, Q});
    saccade_forward_args run;
    saccade_forward_args_init(&run);
    run.q = &q, run.k = &k, run.v = &v, run.out = &o, run.lse = &l;
    run.workspace = room(saccade_plan_workspace(plan, &sizes), &run.workspace_bytes);
    assert_int_equal(saccade_forward(plan, &run, NULL), SACCADE_OK);
    free(run.workspace);
}

static void backward(const saccade_plan *plan, int64_t Q, int64_t KV)
{
    const saccade_sizes sizes = {1, 1, 1, Q, KV, D, D};
    const saccade_tensor q = tensor(zeros, Q), k = tensor(zeros, KV), v = tensor(ones, KV);
    const saccade_tensor o = tensor(out, Q), d_out = tensor(terms, Q), dv = tensor(d_v, KV);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, (int64_t[]){1, 1, Q});
    saccade_backward_args run;
    saccade_backward_args_init(&run);
    run.q = &q, run.k = &k, run.v = &v, run.out = &o, run.lse = &l;
    run.d_out = &d_out, run.d_v = &dv;
    run.workspace = room(saccade_plan_backward_workspace(plan, &sizes), &run.workspace_bytes);
    assert_int_equal(saccade_backward(plan, &run, NULL), SACCADE_OK);
    free(run.workspace);
}

/* At most a block of 256 ones is lost. */
static void assert_near(const float *got, int64_t n, double exact)
{
    const double most = exact * (256 + 8) / (double)large;
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - exact) <= most))
            fail_msg("[%lld]: got %.9g, expected %.9g within %.3g", (long long)i,
                     (double)got[i], exact, most);
}

static const char *const levels[] = {"portable", "avx2", "avx512"};
enum { LEVELS = sizeof levels / sizeof *levels };

/* Of two keys that weigh 1/2 and whose values differ in sign, so that out is 0. */
static void bias_of_keys(const saccade_plan *plan)
{
    const saccade_sizes sizes = {1, 1, 1, MANY, 2, D, D};
    const saccade_tensor q = tensor(zeros, MANY), k = tensor(zeros, 2), v = tensor(signs, 2);
    const saccade_tensor o = tensor(zeros, MANY), d_out = tensor(terms, MANY);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, (int64_t[]){1, 1, MANY});
    const saccade_binding bias = {"bias",
                                  saccade_tensor_of(zeros, SACCADE_F32, 1, (int64_t[]){2})};
    const saccade_binding d = {"bias",
                               saccade_tensor_of(d_bias, SACCADE_F32, 1, (int64_t[]){2})};
    saccade_backward_args run;
    saccade_backward_args_init(&run);
    run.q = &q, run.k = &k, run.v = &v, run.out = &o, run.lse = &l, run.d_out = &d_out;
    run.bindings = &bias, run.n_bindings = 1;
    run.d_captures = &d, run.n_d_captures = 1;
    run.workspace = room(saccade_plan_backward_workspace(plan, &sizes), &run.workspace_bytes);
    assert_int_equal(saccade_backward(plan, &run, NULL), SACCADE_OK);
    free(run.workspace);
}

/* With a plan of each level that this machine has. */
static void at_levels(saccade_mod *score, void (*run)(const saccade_plan *))
{
    for (int n = 0; n < LEVELS; n++) {
        saccade_plan *plan = plan_of(levels[n], score);
        if (!plan)
            continue;
        run(plan);
        saccade_plan_destroy(plan);
    }
}

/* All weights are 1 / MANY. */
static void check_keys(const saccade_plan *plan)
{
    forward(plan, terms, FEW, MANY);
    assert_near(out, FEW * D, ((double)large + MANY - 1) / MANY);
}

/* All weights are 1 / FEW. */
static void check_queries(const saccade_plan *plan)
{
    forward(plan, ones, MANY, FEW);
    backward(plan, MANY, FEW);
    assert_near(d_v, FEW * D, ((double)large + MANY - 1) / FEW);
}

static void check_columns(const saccade_plan *plan)
{
    for (int i = 0; i < MANY; i++)
        lse[i] = logf(2);
    bias_of_keys(plan);
    assert_near(d_bias, 1, ((double)large + MANY - 1) * D / 2);
}

static void sums_over_keys(void **state)
{
    (void)state;
    at_levels(NULL, check_keys);
}

static void sums_over_queries(void **state)
{
    (void)state;
    at_levels(NULL, check_queries);
}

static void sums_of_columns(void **state)
{
    saccade_mod *score = score_of("score + bias[kv]");
    (void)state;
    at_levels(score, check_columns);
    saccade_mod_destroy(score);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_over_keys),
        cmocka_unit_test(sums_over_queries),
        cmocka_unit_test(sums_of_columns),
    };
    for (int i = 0; i < 2 * D; i++)
        signs[i] = i < D ? 1 : -1;
    for (int i = 0; i < MANY * D; i++) {
        terms[i] = i < D ? large : 1;
        ones[i] = 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
