/* Backward on AMX tiles, emulated wherever the machine has none (amx_tiles.h): against float64
 * over shapes, masks, scores and data, and the level AMX as it is chosen and compiled
 * (amx_trap.h), bit for bit what emulated tiles give. */
#include "support/amx_trap.h"
#include "support/backward_case.h"
#include "support/sanitizers.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cpu/kernels/backward_kernels.h"
#include "saccade_config.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Emulated tiles take most of the time: where better levels serve, those take turns. */
static const cpu_backward_kernels *emulated(int is_f16, int turn)
{
    const cpu_level level = cpu_features_get()->level;
    const cpu_backward_kernels *list[3][2] = {
        {&cpu_backward_bf16_tiles_portable, &cpu_backward_f16_tiles_portable}};
    int n = 1;
#if HAVE_LEVEL_AVX2
    if (level >= CPU_AVX2) {
        list[n][0] = &cpu_backward_bf16_tiles_avx2;
        list[n++][1] = &cpu_backward_f16_tiles_avx2;
    }
#endif
#if HAVE_LEVEL_AVX512
    if (level >= CPU_AVX512) {
        list[n][0] = &cpu_backward_bf16_tiles_avx512;
        list[n++][1] = &cpu_backward_f16_tiles_avx512;
    }
#endif
    (void)level;
    return list[turn % n][is_f16];
}

static void check_one(backward_case *c, int is_f16, int turn)
{
    backward_case_run r;
    c->kernels = emulated(is_f16, turn);
    backward_case_make(c, &r);
    backward_case_check(&r, NULL, 2, BACKWARD_PROVEN, NULL);
    if (c->forward.mask)
        backward_case_check(&r, NULL, 1, turn % 2 ? BACKWARD_RUNS : BACKWARD_IMPORTED, NULL);
    backward_case_free(&r);
}

static int is_slow(void)
{
    return HAS_ADDRESS_SANITIZER || HAS_THREAD_SANITIZER || is_emulated_run();
}

/* In bf16 and in f16. */
static void check(backward_case *c, int turn)
{
    char text[96];
    check_one(c, 0, turn);
    if (is_slow() && turn % 2)
        return;
    c->forward = case_in_f16(&c->forward, text);
    check_one(c, 1, turn + 1);
}

static void shapes(void **state)
{
    static const char *const problems[] = {
        "b1 h1 q1 kv1 d1 bf16",           "b1 h2 q5 kv7 d3 dv9 bf16",
        "b2 h4/2 q33 kv100 d40 bf16",     "b1 h3/1 q97 kv193 d64 bf16",
        "b1 h1 q131 kv250 d80 dv24 bf16", "b1 h1 q40 kv200 d128 dv256 bf16",
        "b1 h1 q231 kv50 d40 bf16",       "b32 h2 q3 kv390 d8 bf16",
    };
    (void)state;
    for (int n = 0; n < (int)(sizeof problems / sizeof *problems); n++) {
        backward_case c = {.forward = {.problem = problems[n], .seed = (uint64_t)n + 1},
                           .has_d_lse = n % 2,
                           .is_added = n % 3 == 2,
                           .pad = n % 4 == 3 ? 5 : 0};
        check(&c, n);
    }
}

static void masks(void **state)
{
    static const char *const texts[] = {
        "q >= kv",           "q >= kv && q - kv <= 40", "kv < 70 || q >= kv",
        "doc[q] == doc[kv]", "(q + kv) % 3 == 0",       "kv > q + 50",
    };
    (void)state;
    for (int n = 0; n < (int)(sizeof texts / sizeof *texts); n++) {
        char problem[96];
        snprintf(problem, sizeof problem, "b1 h2/1 q%d kv%d d32 bf16", 80 + n * 17,
                 230 + n * 11);
        backward_case c = {.forward = {.problem = problem,
                                       .mask = texts[n],
                                       .layout = (case_layout)(n % 3),
                                       .seed = (uint64_t)n + 40}};
        c.forward.kv_len = n % 2 ? 201 : 0;
        c.forward.q_offset = n % 4 == 3 ? 30 : 0;
        c.unwanted = n == 2 ? 1 << BACKWARD_DQ : n == 4 ? 1 << BACKWARD_DK : 0;
        if (!is_slow() || n % 3 == 0)
            check(&c, n);
    }
}

static void scores(void **state)
{
    static const char *const texts[] = {
        "20 * tanh(score / 20)",
        "score * h_scale[h] + rel[h, clamp(kv - q + 32, 0, 63)]",
        "q > kv + 30 ? score * 0.5 : c * tanh(score / c) + table[q]",
    };
    (void)state;
    for (int n = 0; n < (int)(sizeof texts / sizeof *texts); n++) {
        backward_case c = {.forward = {.problem = "b1 h2/1 q101 kv215 d32 bf16",
                                       .score = texts[n],
                                       .mask = n % 2 ? "q + 100 >= kv" : NULL,
                                       .seed = (uint64_t)n + 80},
                           .has_captures = 1};
        if (!is_slow() || n == 1)
            check(&c, n);
    }
}

/* Compiled scores without captures, which go by streams where masks let them: masks by limits,
 * evaluated, as runs and imported. */
static void every_mask_of_a_score(void **state)
{
    static const char *const scores[] = {"20 * tanh(score / 20)", "score + 0.1 * (kv - q)"};
    static const char *const masks[] = {"q + 100 >= kv", "(q + kv) % 3 == 0"};
    (void)state;
    for (int n = 0; n < 4; n++) {
        backward_case_run r;
        const backward_case c = {.forward = {.problem = "b1 h2/1 q101 kv215 d32 bf16",
                                             .mask = masks[n % 2],
                                             .score = scores[n / 2],
                                             .seed = 31},
                                 .kernels = emulated(0, n)};
        if (is_slow() && n % 3)
            continue;
        backward_case_make(&c, &r);
        for (int mask = BACKWARD_PROVEN; mask <= BACKWARD_IMPORTED; mask++)
            backward_case_check(&r, NULL, 1, (backward_mask)mask, NULL);
        backward_case_free(&r);
    }
}

static void data(void **state)
{
    (void)state;
    for (int kind = CASE_NORMAL; kind < CASE_DATA; kind++) {
        backward_case c = {.forward = {.problem = "b1 h1 q70 kv200 d32 bf16",
                                       .mask = kind % 2 ? "q + 150 >= kv" : NULL,
                                       .data = (case_data)kind,
                                       .seed = 7}};
        if (!is_slow() || kind % 4 == 1)
            check(&c, kind);
    }
}

static uint16_t *element(const saccade_tensor *t, int64_t i, int64_t d)
{
    return (uint16_t *)t->data + i * t->stride[2] + d * t->stride[3];
}

static uint16_t number(int is_f16, float x)
{
    return is_f16 ? f16_from_f32(x) : bf16_from_f32(x);
}

/* Where tiles end in keys past kv_len, 0 times a row's NaN stays out of their gradients. */
static void poison_meets_the_length(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        backward_case_run r;
        const backward_case c = {
            .forward = {.problem = "b1 h1 q9 kv60 d16 bf16", .kv_len = 41, .seed = 9},
            .kernels = emulated(0, n)};
        backward_case_make(&c, &r);
        *element(n ? &r.d_out.t : &r.f.q.t, 3, 5) = bf16_from_f32(NAN);
        backward_case_solve(&r);
        backward_case_check(&r, NULL, 1, BACKWARD_PROVEN, NULL);
        backward_case_free(&r);
    }
}

/* What lies where nothing is live must not reach a gradient. */
static void poison(void **state)
{
    (void)state;
    for (int n = 0; n < 8; n++) {
        const int is_f16 = n >= 4;
        backward_case_run r;
        const backward_case c = {.forward = {.problem = is_f16 ? "b1 h1 q70 kv200 d32 f16"
                                                               : "b1 h1 q70 kv200 d32 bf16",
                                             .mask = "kv + 5 < q || kv % 7 == 3 && q > 2",
                                             .seed = 9},
                                 .kernels = emulated(is_f16, n)};
        backward_case_make(&c, &r);
        *element(n % 2 ? &r.f.v.t : &r.f.k.t, 195, 3) =
            number(is_f16, n % 4 < 2 ? NAN : INFINITY);
        *element(n % 2 ? &r.d_out.t : &r.f.q.t, 1, 5) =
            number(is_f16, n % 4 < 2 ? INFINITY : NAN);
        backward_case_solve(&r);
        backward_case_check(&r, NULL, 2, BACKWARD_PROVEN, NULL);
        backward_case_free(&r);
    }
}

#if HAVE_LEVEL_AMX && HAVE_LEVEL_AVX512
/* Runs the case twice; whether it is the level's own kernels decides which. */
static void with_amx(const char *problem, const char *mask, const char *score, uint64_t seed)
{
    backward_case_run r;
    const backward_case c = {
        .forward = {.problem = problem, .mask = mask, .score = score, .seed = seed}};
    char *real[BACKWARD_GRADIENTS], *made[BACKWARD_GRADIENTS];
    backward_case_make(&c, &r);
    for (int n = 0; n < BACKWARD_GRADIENTS; n++) {
        real[n] = malloc(backward_case_bytes(&r, n));
        made[n] = malloc(backward_case_bytes(&r, n));
        assert_true(real[n] && made[n]);
    }
    backward_case_check(&r, "amx", 2, BACKWARD_PROVEN, real);
    r.c.kernels = r.f.dtype == SACCADE_F16 ? &cpu_backward_f16_tiles_avx512
                                           : &cpu_backward_bf16_tiles_avx512;
    backward_case_check(&r, "amx", 1, BACKWARD_PROVEN, made);
    for (int n = 0; n < BACKWARD_GRADIENTS; n++) {
        assert_memory_equal(real[n], made[n], backward_case_bytes(&r, n));
        free(real[n]);
        free(made[n]);
    }
    backward_case_free(&r);
}

static void level(void **state)
{
    const int is_trapped = cpu_features_get()->level < CPU_AMX;
    (void)state;
    if (!amx_trap_begin()) {
        print_message("neither AMX nor AVX512-BF16 with a decoder: no AMX instruction ran\n");
        skip();
    }
    const int64_t count = amx_trap_count();
    with_amx("b1 h2/1 q70 kv200 d40 dv72 bf16", NULL, NULL, 1);
    with_amx("b1 h1 q100 kv230 d64 bf16", "q + 60 >= kv", NULL, 2);
    with_amx("b1 h2 q33 kv50 d32 bf16", "(q + kv) % 3 == 0", "20 * tanh(score / 20)", 3);
    with_amx("b1 h1 q70 kv200 d40 f16", "q + 60 >= kv", "score * h_scale[h]", 4);
    assert_int_equal(amx_trap_count() > count, is_trapped);
    amx_trap_end();
    plan_problem p = {.dtype = SACCADE_BF16, .kv_dtype = SACCADE_BF16};
    p.out_dtype = SACCADE_F32;
    p.d_out_dtype = SACCADE_BF16;
    assert_ptr_equal(cpu_backward_kernels_for(&p, CPU_AMX), &cpu_backward_bf16_tiles_amx);
    p.d_out_dtype = SACCADE_F32; /* which tiles do not take */
    assert_ptr_equal(cpu_backward_kernels_for(&p, CPU_AMX), &cpu_backward_f32_avx512);
}
#else
static void level(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    unsetenv("SACCADE_LEVEL"); /* this test is of one level */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes),
        cmocka_unit_test(masks),
        cmocka_unit_test(scores),
        cmocka_unit_test(data),
        cmocka_unit_test(poison),
        cmocka_unit_test(poison_meets_the_length),
        cmocka_unit_test(level),
        cmocka_unit_test(every_mask_of_a_score),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
