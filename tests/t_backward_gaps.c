/* Backward over masks with gaps: rows that see keys here and there. Gradients, those of
 * captures too, against float64 at every level and on emulated tiles, and equal bits whether a
 * block mask tells where gaps are or scores do, and over threads; and what kernels do with
 * stretches. */
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

static const char *const masks[] = {
    "(q - kv) % 8 == 0 && q >= kv",                             /* dilated */
    "q / 64 == kv / 64 || q % 64 == kv % 64",                   /* axial */
    "abs(q / 64 - kv / 64) <= 2 && abs(q % 64 - kv % 64) <= 6", /* a window of an image */
    "abs(q / 24 - kv / 24) <= 3 && abs(q % 24 - kv % 24) <= 2",
    "kv / 64 % 4 == q / 64 % 4",                 /* strided blocks */
    "q / 50 * 7 % 5 == kv / 50 * 7 % 5",         /* documents in turns */
    "q >= kv && (q - kv < 64 || kv % 64 >= 60)", /* strided, with a window */
    "kv / 16 % 3 == q / 12 % 3 && kv != 17",
    "kv % 96 < 3 || kv == q",
    "h == 1 ? kv / 32 % 3 == 1 : q / 6 % 2 == kv / 16 % 2",
};
enum { MASKS = sizeof masks / sizeof *masks };

/* Of tiles proven while running by one thread, of a block mask's runs by three, and of runs
 * that were imported by two. */
static void check_bits(const backward_case_run *r, const char *level)
{
    static const int32_t threads[] = {1, 3, 2};
    char *copies[BACKWARD_IMPORTED + 1][BACKWARD_GRADIENTS];
    for (int mask = BACKWARD_PROVEN; mask <= BACKWARD_IMPORTED; mask++) {
        for (int g = 0; g < BACKWARD_GRADIENTS; g++)
            copies[mask][g] = malloc(backward_case_bytes(r, g));
        backward_case_check(r, level, threads[mask], (backward_mask)mask, copies[mask]);
        for (int g = 0; g < BACKWARD_GRADIENTS; g++)
            assert_memory_equal(copies[mask][g], copies[0][g], backward_case_bytes(r, g));
    }
    for (int mask = BACKWARD_PROVEN; mask <= BACKWARD_IMPORTED; mask++)
        for (int g = 0; g < BACKWARD_GRADIENTS; g++)
            free(copies[mask][g]);
}

static void check_case(const backward_case *c)
{
    backward_case_run r;
    backward_case_make(c, &r);
    for (const char *const *level = case_levels(); *level; level++)
        check_bits(&r, *level);
    backward_case_free(&r);
}

/* Every other case of an emulator's run, every third of a short one. */
static int is_left_out(int n)
{
    return (is_short_run() && n % 3) || (is_emulated_run() && n % 2);
}

static void masks_with_gaps(void **state)
{
    static const char *const dtypes[] = {"f32", "bf16", "f16"};
    (void)state;
    for (int n = 0; n < MASKS; n++)
        for (int d = 0; d < 3; d++) {
            char problem[96];
            snprintf(problem, sizeof problem, "b1 h4/2 q%d kv%d d%d dv%d %s", 161 + 13 * n,
                     411 + 7 * n, 24 + 8 * (n % 3), d ? 32 : 41, dtypes[d]);
            const backward_case c = {.forward = {.problem = problem,
                                                 .mask = masks[n],
                                                 .kv_len = n % 4 == 3 ? 370 : 0,
                                                 .q_offset = n % 3 == 2 ? 100 : 0,
                                                 .seed = (unsigned)(n + 3)},
                                     .has_d_lse = n % 2};
            if (!is_left_out(n + d))
                check_case(&c);
        }
}

/* So many heads that tiles are of all the keys that they may have. */
static void wide_tiles(void **state)
{
    (void)state;
    for (int n = 0; n < MASKS; n++) {
        const backward_case c = {.forward = {.problem = n % 2 ? "b2 h32/16 q70 kv410 d16 bf16"
                                                              : "b2 h32/16 q70 kv410 d16 f32",
                                             .mask = masks[n],
                                             .seed = (unsigned)(n + 60)}};
        if (!is_left_out(n))
            check_case(&c);
    }
}

/* Along rows, columns and diagonals, and place by place, in fixed point and dense; scores that
 * end keys themselves. */
static void captures(void **state)
{
    static const char *const scores[] = {
        "score + h_scale[h] * table[kv]",
        "score * c + table[q] * table[kv]",
        "score + rel[h, clamp(q - kv + 30, 0, 63)]",
        "score + table[(q * 3 + kv * 7) % 50]",
        "score + table[q + kv]",
        "kv / 16 % 2 == 0 ? -inf : score + table[abs(q - kv)]",
        "score + rel[min(q, 15), kv % 64] + rel[h, 3]",
    };
    enum { SCORES = sizeof scores / sizeof *scores };
    (void)state;
    for (int n = 0; n < MASKS * 2; n++) {
        const backward_case c = {.forward = {.problem = n % 2 ? "b2 h4/2 q131 kv395 d32 bf16"
                                                              : "b2 h4/2 q131 kv395 d32 f32",
                                             .mask = n == 2 * MASKS - 1 ? NULL : masks[n / 2],
                                             .score = scores[n % SCORES],
                                             .seed = (unsigned)(n + 20)},
                                 .has_captures = 1,
                                 .is_added = n % 5 == 4};
        backward_case_run r;
        if (is_left_out(n))
            continue;
        backward_case_make(&c, &r);
        for (const char *const *level = case_levels(); *level; level++) {
            if (c.forward.mask)
                check_bits(&r, *level);
            else
                backward_case_check(&r, *level, 2, BACKWARD_PROVEN, NULL);
        }
        backward_case_free(&r);
    }
}

/* An element of each position, stored but where nothing is seen, which is zeros. */
static void stored_captures(void **state)
{
    (void)state;
    for (int n = 0; n < MASKS; n++) {
        const backward_case c = {
            .forward = {.problem = n % 2 ? "b1 h1 q16 kv64 d32 bf16" : "b1 h1 q16 kv64 d32 f32",
                        .mask = n % 4 < 2 ? "kv / 16 % 2 == q / 8 % 2" : "kv % 48 < 3",
                        .score = n % 3 ? "score + rel[q, kv]" : "score * rel[q, kv]",
                        .seed = (unsigned)(n + 90)},
            .has_captures = 1};
        if (!is_left_out(n))
            check_case(&c);
    }
}

/* ---- tiles, emulated wherever there are none ---- */

static void emulated_tiles(void **state)
{
    static const cpu_backward_kernels *const kernels[] = {&cpu_backward_bf16_tiles_portable,
                                                          &cpu_backward_f16_tiles_portable};
    static const char *const dtypes[] = {"bf16", "f16"};
    (void)state;
    if (HAS_ADDRESS_SANITIZER || HAS_THREAD_SANITIZER || is_emulated_run())
        skip();
    for (int n = 0; n < 2 * MASKS; n++) {
        char problem[64];
        snprintf(problem, sizeof problem, "b1 h2/1 q%d kv%d d32 %s", 70 + 11 * n, 395 - 9 * n,
                 dtypes[n % 2]);
        const backward_case c = {
            .forward = {.problem = problem,
                        .mask = masks[n / 2],
                        .score = n % 6 < 4 ? NULL : "score + rel[h, clamp(q - kv + 30, 0, 63)]",
                        .seed = (unsigned)(n + 40)},
            .has_captures = n % 6 >= 4,
            .kernels = kernels[n % 2]};
        backward_case_run r;
        if (is_left_out(n / 2))
            continue;
        backward_case_make(&c, &r);
        backward_case_check(&r, NULL, 2, BACKWARD_PROVEN, NULL);
        backward_case_check(&r, NULL, 2, BACKWARD_RUNS, NULL);
        backward_case_free(&r);
    }
}

/* ---- kernels ---- */

enum { ROWS = 96, KEYS = 40, LD = 64, DIMS = 64, GAP_FROM = 24, GAP_PAST = 60 };

/* Pairs of bf16 or floats, of about 1. */
static void fill(const cpu_backward_kernels *k, void *to, size_t words)
{
    for (size_t n = 0; n < words; n++) {
        const float x = (float)((n * 7919 + n * n) % 257) / 128 - 1;
        if (k->step == 1)
            ((float *)to)[n] = x;
        else
            ((uint32_t *)to)[n] = (uint32_t)bf16_from_f32(x) * 0x10001u;
    }
}

/* Rows in stretches give the bits of all rows, where weights between them are 0. */
static void check_turned(const cpu_backward_kernels *k)
{
    static float weights[ROWS * LD], rows[ROWS * DIMS], all[KEYS * DIMS], some[KEYS * DIMS];
    const cpu_stretch of[] = {{0, GAP_FROM, 0}, {GAP_PAST, ROWS, 0}};
    const int32_t panels = DIMS / k->block->panel;
    fill(k, weights, ROWS / (size_t)k->step * LD);
    fill(k, rows, ROWS / (size_t)k->step * DIMS);
    for (int32_t n = 0; n < KEYS * DIMS; n++)
        all[n] = some[n] = 0.25f;
    k->turned_of(weights, LD, rows, ROWS, of, 2, KEYS, panels, some, DIMS);
    for (int32_t i = GAP_FROM / k->step; i < GAP_PAST / k->step; i++)
        memset(weights + i * LD, 0, LD * sizeof *weights);
    k->turned(weights, LD, rows, ROWS, ROWS, KEYS, panels, all, DIMS);
    assert_memory_equal(all, some, sizeof all);
}

/* The last group of keys has a NaN, which is seen, and the one before nothing. */
static void check_seen(const cpu_backward_kernels *k)
{
    static float s[5 * LD];
    for (int32_t n = 0; n < 5 * LD; n++)
        s[n] = -INFINITY;
    s[2 * LD + 7] = -3e38f;
    s[4 * LD + 16] = INFINITY;
    s[63] = NAN;
    assert_int_equal(k->seen(s, LD, 5, 64), 11);
    assert_int_equal(k->seen(s, LD, 4, 48), 1);
    assert_int_equal(k->seen(s + LD, LD, 1, 64), 0);
}

static void kernels_pass_over_gaps(void **state)
{
    plan_problem problem = {.dtype = SACCADE_F32, .sizes = {.D = 64, .Dv = 64}};
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int32_t level = 0; level <= (int32_t)cpu_features_get()->level; level++) {
            problem.dtype = problem.kv_dtype = bf16 ? SACCADE_BF16 : SACCADE_F32;
            const cpu_backward_kernels *k = cpu_backward_kernels_for(&problem, level);
            check_seen(k);
            if (k->turned_of)
                check_turned(k);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_pass_over_gaps),
        cmocka_unit_test(masks_with_gaps),
        cmocka_unit_test(wide_tiles),
        cmocka_unit_test(captures),
        cmocka_unit_test(stored_captures),
        cmocka_unit_test(emulated_tiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
