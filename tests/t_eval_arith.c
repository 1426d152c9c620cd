/* The shared mathematics of arith.h: its error against libm in double, its ends, and equal bits
   from the loops of every instruction-set level. A sample of all float32; with
   SACCADE_EXHAUSTIVE set, all of them (minutes). */
#include "mod/arith.h"
#include "support/strip_levels.h"
#include "support/ulp.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static double wide_rsqrt(double x)
{
    return 1.0 / sqrt(x);
}

/* max: the stated maximum error, in ulp of the result. */
static const struct curve {
    const char *name;
    mod_op op;
    float (*shared)(float);
    double (*wide)(double);
    double max;
} curves[] = {
    {"exp", OP_fexp, fm_exp, exp, 1.0},
    {"exp2", OP_fexp2, fm_exp2, exp2, 1.1},
    {"log", OP_flog, fm_log, log, 0.9},
    {"log2", OP_flog2, fm_log2, log2, 0.9},
    {"sin", OP_fsin, fm_sin, sin, 2.8},
    {"cos", OP_fcos, fm_cos, cos, 2.8},
    {"tan", OP_ftan, fm_tan, tan, 4.7},
    {"tanh", OP_ftanh, fm_tanh, tanh, 1.4},
    {"sigmoid", OP_fsigmoid, fm_sigmoid, wide_sigmoid, 2.5},
    {"erf", OP_ferf, fm_erf, erf, 1.4},
    {"rsqrt", OP_frsqrt, fm_rsqrt, wide_rsqrt, 1.5},
    {"sqrt", OP_fsqrt, fm_sqrt, sqrt, 0.5},
    {"floor", OP_ffloor, fm_floor, floor, 0.0},
    {"ceil", OP_fceil, fm_ceil, ceil, 0.0},
    {"trunc", OP_ftrunc, fm_trunc, trunc, 0.0},
    {"round", OP_fround, fm_round, round, 0.0},
    {"abs", OP_fabs, fm_fabs, fabs, 0.0},
};
enum { N_CURVES = sizeof curves / sizeof curves[0] };

static uint32_t sample_step(void)
{
    return getenv("SACCADE_EXHAUSTIVE") != NULL ? 1 : 9973; /* prime: all bit patterns mix */
}

static void test_error(void **unused)
{
    (void)unused;
    for (int i = 0; i < N_CURVES; i++) {
        double worst = 0.0;
        float at = 0.0f;
        for (uint64_t bits = 0; bits < 1ull << 32; bits += sample_step()) {
            const float x = f32_from_bits((uint32_t)bits);
            const double error = ulp_error(curves[i].shared(x), curves[i].wide((double)x));
            if (error > worst) {
                worst = error;
                at = x;
            }
        }
        printf("%-8s %.3f ulp at %a\n", curves[i].name, worst, (double)at);
        if (worst > curves[i].max)
            fail_msg("%s: %.3f ulp at %a, expected at most %.2f", curves[i].name, worst,
                     (double)at, curves[i].max);
    }
}

/* C's pow in double, rounded, gives the ends and the middle. */
static void check_pow(float x, float y, double *worst)
{
    const float got = fm_pow(x, y);
    const double want = pow((double)x, (double)y), error = ulp_error(got, want);
    const int wrong_zero = want == 0.0 && got == 0.0f && !signbit(want) != !signbit(got);
    if (error > 0.51 || wrong_zero)
        fail_msg("pow(%a, %a): got %a, expected %a", (double)x, (double)y, (double)got, want);
    *worst = error > *worst ? error : *worst;
}

static void test_pow(void **unused)
{
    static const float ends[] = {0.0f, -0.0f, 1.0f, -1.0f, 2.0f, -2.0f, 3.0f, -3.0f, 0.5f,
                                 -0.5f, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1p-149f,
                                 0x1.fffffep127f, 0x1p24f, 16777215.0f, -16777215.0f, 1.5f};
    enum { N_ENDS = sizeof ends / sizeof ends[0] };
    uint32_t state = 12345;
    double worst = 0.0;
    (void)unused;
    for (int i = 0; i < N_ENDS * N_ENDS; i++)
        check_pow(ends[i / N_ENDS], ends[i % N_ENDS], &worst);
    for (int i = 0; i < 300000; i++) {
        state = state * 1664525u + 1013904223u;
        const float x = f32_from_bits(state);
        state = state * 1664525u + 1013904223u;
        const float any = f32_from_bits(state);
        const float size = (float)((double)(int32_t)state * 0x1p-24); /* |y log2 x| < 128 */
        check_pow(x, any, &worst);
        check_pow(fm_fabs(x), (float)(size / (fabs(log2(fabs((double)x))) + 1e-3)), &worst);
        check_pow(x, (float)((int32_t)state >> 26), &worst);
    }
    printf("pow      %.3f ulp\n", worst);
}

/* Exact results, and far arguments. */
static void test_exact(void **unused)
{
    (void)unused;
    for (int n = -149; n <= 127; n++) {
        const float power = (float)ldexp(1.0, n);
        assert_true(fm_exp2((float)n) == power);
        assert_true(fm_log2(power) == (float)n);
    }
    assert_true(fm_exp(0.0f) == 1.0f && fm_tanh(0.0f) == 0.0f && signbit(fm_tanh(-0.0f)));
    assert_true(fm_sigmoid(0.0f) == 0.5f && fm_erf(INFINITY) == 1.0f);
    assert_true(fm_sin(1e30f) == (float)sin((double)1e30f));
    assert_true(fm_round(0.5f) == 1.0f && fm_round(-2.5f) == -3.0f);
    assert_true(fm_round(0.49999997f) == 0.0f && fm_floor(-0.5f) == -1.0f);
    assert_true(signbit(fm_floor(-0.0f)) && signbit(fm_ceil(-0.5f)));
}

/* ---- levels ---- */

static void test_levels(void **unused)
{
    static float x[STRIP_LANES], y[STRIP_LANES], got[STRIP_LANES];
    uint32_t bits = 0;
    (void)unused;
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < STRIP_LANES; i++) {
            x[i] = f32_from_bits(bits += 41957u);
            y[i] = f32_from_bits(bits * 2654435761u);
        }
        for (int t = 0; t < strip_levels(); t++) {
            for (int c = 0; c <= N_CURVES; c++) {
                const mod_op op = c < N_CURVES ? curves[c].op : OP_fpow;
                strip_level[t]->op[op](got, x, y, x, STRIP_LANES / STRIP_GROUP, 0);
                for (int i = 0; i < STRIP_LANES; i++) {
                    const float want =
                        c < N_CURVES ? curves[c].shared(x[i]) : fm_pow(x[i], y[i]);
                    if (f32_bits(got[i]) != f32_bits(want) && !(isnan(got[i]) && isnan(want)))
                        fail_msg("op %d level %d at %a: got %a, expected %a", op, t,
                                 (double)x[i], (double)got[i], (double)want);
                }
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_pow),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
