/* Every allocation of src/ref failing in turn. */
#include "ref/ladder.h"
#include "ref/ref.h"
#include "support/fail_alloc.h"

#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int ignore(void *user, const saccade_ladder_row *row)
{
    (void)user, (void)row;
    return 0;
}

static saccade_status use_ladder(void *arg, saccade_error *err)
{
    saccade_ladder_options o;
    saccade_ladder_options_init(&o);
    (void)arg;
    o.N = 12, o.d = 4, o.M = 16;
    o.only = "flash2";
    return saccade_ladder_run(&o, ignore, NULL, err);
}

enum { ROWS = 6, DIM = 4 };

/* Mods are made outside: only what src/ref takes is to fail. */
typedef struct problem_of_test {
    plan_problem problem;
    plan_run run;
    saccade_tensor q, k, v, bias;
} problem_of_test;

static saccade_status use_functions(void *arg, saccade_error *err)
{
    const problem_of_test *t = arg;
    double out[ROWS * DIM], dq[ROWS * DIM], dk[ROWS * DIM], dv[ROWS * DIM], d_bias[ROWS] = {0};
    double *const d_captures[] = {d_bias};
    float plain[ROWS * DIM];
    TRY(ref_forward(&t->problem, &t->run, out, NULL, NULL, err));
    TRY(ref_plain(&t->problem, &t->run, plain, NULL, err));
    TRY(ref_backward(&t->problem, &t->run, out, NULL, dq, dk, dv, err));
    return ref_backward_captures(&t->problem, &t->run, out, NULL, d_captures, err);
}

static saccade_mod *compile(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *bound;
    saccade_capture bias = {"bias", SACCADE_F32, 1};
    saccade_error err;
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, &err), SACCADE_OK);
    assert_int_equal(
        saccade_mod_bind(generic, &bias, saccade_mod_capture_count(generic), &bound, &err),
        SACCADE_OK);
    saccade_mod_destroy(generic);
    return bound;
}

static void ref_survives_failing_allocations(void **state)
{
    static float values[ROWS * DIM];
    const int64_t shape[4] = {1, 1, ROWS, DIM}, bias_shape[1] = {ROWS};
    saccade_mod *mask = compile(SACCADE_MASK, "q >= kv");
    saccade_mod *score = compile(SACCADE_SCORE, "tanh(score) + bias[q]");
    problem_of_test t = {
        .problem = {.dtype = SACCADE_F32, .kv_dtype = SACCADE_F32, .scale = 1, .group = 1},
        .run = {.sizes = {1, 1, 1, ROWS, ROWS, DIM, DIM}},
    };
    (void)state;
    for (int i = 0; i < ROWS * DIM; i++)
        values[i] = (float)(i % 5) - 2;
    t.problem.mask = mod_function(mask);
    t.problem.score = mod_function(score);
    t.q = t.k = t.v = saccade_tensor_of(values, SACCADE_F32, 4, shape);
    t.bias = saccade_tensor_of(values, SACCADE_F32, 1, bias_shape);
    t.run.q = &t.q, t.run.k = &t.k, t.run.v = &t.v;
    eval_sizes(&t.run.sizes, t.run.score_env.size);
    eval_sizes(&t.run.sizes, t.run.mask_env.size);
    t.run.score_env.tensors = &t.bias;
    assert_true(fail_alloc_sweep("ladder", use_ladder, NULL) >= 5);
    assert_true(fail_alloc_sweep("oracle and plain", use_functions, &t) >= 4);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(score);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ref_survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
