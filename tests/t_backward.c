/* Backward on the CPU: every level against float64, over masks, scores, lengths, strides and
 * poisoned memory; equal bits over threads. */
#include "support/amx_trap.h"
#include "support/backward_case.h"
#include "support/run_case.h"
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void check_levels(const backward_case *c)
{
    backward_case_run r;
    backward_case_make(c, &r);
    for (const char *const *level = case_levels(); *level; level++) {
        backward_case_check(&r, *level, 2, BACKWARD_PROVEN, NULL);
        if (c->forward.mask)
            backward_case_check(&r, *level, 1, BACKWARD_RUNS, NULL);
    }
    backward_case_free(&r);
}

/* In a short run each case has one dtype, and the cases take turns; an emulator runs every
 * other one. */
static int is_left_out(size_t n, int dtype, int n_dtypes)
{
    const int has_other = (int)(n % (size_t)n_dtypes) != dtype;
    return (is_short_run() && has_other) || (is_emulated_run() && n % 2);
}

static void test_shapes(void **state)
{
    static const char *const problems[] = {
        "b1 h1 q1 kv1 d1 f32",        "b1 h2 q5 kv7 d3 dv9 f32",
        "b2 h4/2 q33 kv100 d40 f32",  "b1 h3/1 q97 kv193 d64 f32",
        "b1 h2 q200 kv400 d64 f32",   "b1 h2/1 q130 kv250 d80 dv24 f32",
        "b1 h1 q100 kv200 d256 f32",  "b1 h1 q64 kv64 d17 dv256 f32",
        "b1 h1 q1 kv1 d1 bf16",       "b1 h2 q5 kv7 d3 dv9 bf16",
        "b2 h4/2 q33 kv100 d40 bf16", "b1 h3/1 q97 kv193 d64 bf16",
        "b1 h2 q200 kv400 d64 bf16",  "b1 h2/1 q131 kv250 d80 dv24 bf16",
        "b1 h1 q101 kv200 d256 bf16", "b2 h4/2 q33 kv100 d40 f16",
        "b1 h3/1 q97 kv193 d64 f16",
    };
    (void)state;
    for (size_t n = 0; n < sizeof problems / sizeof *problems; n++) {
        if (is_short_run() && n % 3)
            continue;
        const backward_case c = {.forward = {.problem = problems[n], .seed = n + 1},
                                 .has_d_lse = n % 2,
                                 .is_added = n % 3 == 2,
                                 .pad = n % 4 == 3 ? 5 : 0};
        check_levels(&c);
    }
}

static const char *const masks[] = {
    "q >= kv",
    "q >= kv && q - kv <= 40",
    "kv < 70 || q >= kv",
    "doc[q] == doc[kv]",
    "q >= kv && doc[q] == doc[kv]",
    "(q + kv) % 3 == 0",
    "h == 1 || kv <= q",
    "kv > q + 50",
    "false",
};

static void test_masks(void **state)
{
    static const char *const dtypes[] = {"f32", "bf16", "f16"};
    (void)state;
    for (size_t n = 0; n < sizeof masks / sizeof *masks; n++)
        for (int d = 0; d < 3; d++) {
            char problem[96];
            if (is_left_out(n, d, 3))
                continue;
            snprintf(problem, sizeof problem, "b2 h4/2 q%d kv%d d%d %s", 110 + (int)n * 17,
                     230 + (int)n * 11, d == 0 ? 24 : 32, dtypes[d]);
            backward_case c = {.forward = {.problem = problem,
                                           .mask = masks[n],
                                           .layout = (case_layout)(n % 3),
                                           .seed = n + 40}};
            c.forward.kv_len = n % 2 ? 201 : 0;
            c.forward.q_offset = n % 4 == 3 ? 30 : 0;
            check_levels(&c);
        }
}

/* So many heads that tiles are of twice the keys. */
static void test_wide_tiles(void **state)
{
    static const forward_case cases[] = {
        {.problem = "b16 h8/4 q7 kv400 d8 f32"},
        {.problem = "b16 h4 q5 kv390 d16 bf16", .mask = "q + 385 >= kv && q - kv <= -200"},
        {.problem = "b32 h2 q9 kv400 d8 bf16", .mask = "doc[q] == doc[kv]"},
        {.problem = "b16 h4 q4 kv500 d8 f16", .score = "score + table[kv]"},
        {.problem = "b32 h2 q3 kv400 d8 bf16",
         .mask = "(q + kv) % 3 == 0",
         .score = "score + rel[h, clamp(q - kv + 30, 0, 63)]"},
    };
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        backward_case c = {.forward = cases[n], .has_captures = cases[n].score != NULL};
        c.forward.seed = n + 300;
        if (!is_left_out(n, 1, 2))
            check_levels(&c);
    }
}

static void test_scores(void **state)
{
    static const char *const scores[] = {
        "score + exp2(-8.0 * (h + 1) / H) * (kv - q)",
        "20 * tanh(score / 20)",
        "score * h_scale[h]",
        "score + rel[h, clamp(kv - q + 32, 0, 63)]",
        "kv % 5 == 0 ? -inf : score * score",
        "table[kv]",
        "q > kv + 30 ? score * 0.5 : c * tanh(score / c) + table[q]",
    };
    (void)state;
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++)
        for (int d = 0; d < 2; d++) {
            if (is_left_out(n, d, 2))
                continue;
            backward_case c = {.forward = {.problem = d ? "b2 h4/2 q101 kv230 d32 bf16"
                                                        : "b2 h4/2 q101 kv230 d32 f32",
                                           .score = scores[n],
                                           .mask = n % 2 ? masks[n] : NULL,
                                           .seed = n + 80}};
            check_levels(&c);
        }
}

static void test_data(void **state)
{
    (void)state;
    for (int data = CASE_NORMAL; data < CASE_DATA; data++) {
        backward_case c = {.forward = {.problem = "b1 h2 q120 kv300 d32 f32",
                                       .mask = data % 2 ? "q + 150 >= kv" : NULL,
                                       .data = (case_data)data,
                                       .seed = 7}};
        if (!is_left_out((size_t)data, 0, 2))
            check_levels(&c);
        c.forward.problem = "b1 h2 q120 kv300 d32 bf16";
        if (!is_left_out((size_t)data, 1, 2))
            check_levels(&c);
    }
}

/* Reads of every axis; several reads of one tensor, guarded ones, scalars and tables. */
static void test_captures(void **state)
{
    static const char *const scores[] = {
        "score * h_scale[h]",
        "score + c * h_scale[h]",
        "score + table[q]",
        "score + table[kv] * table[q]",
        "score + rel[h, clamp(q - kv + 30, 0, 63)]",
        "score + rel[h, q > kv ? min(q - kv, 31) / 4 : 40]",
        "score * c + table[abs(kv - q)] + table[kv]",
        "q > kv + 20 ? table[q] * score : c * tanh(score / c)",
        "score + rel[h, q % 64]",
        "score + rel[min(q, 15), kv % 64] + rel[h, 3]",
        "score + rel[q, kv]",
        "score + table[q * 7 + kv]",
    };
    (void)state;
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++)
        for (int d = 0; d < 2; d++) {
            if (is_left_out(n, d, 2) || (is_short_run() && n % 4 < 2))
                continue;
            backward_case c = {.forward = {.problem = d ? "b2 h4/2 q101 kv230 d32 bf16"
                                                        : "b2 h4/2 q101 kv230 d32 f32",
                                           .score = scores[n],
                                           .mask = n % 3 ? masks[n % 8] : NULL,
                                           .seed = n + 180},
                               .has_captures = 1,
                               .is_added = n % 5 == 1,
                               .has_d_lse = n % 2,
                               .unwanted = n % 4 == 3 ? 7 : 0};
            if (n == 10)
                c.forward.problem = d ? "b1 h1 q16 kv60 d32 bf16" : "b2 h4/2 q16 kv64 d32 f32";
            check_levels(&c);
        }
}

/* A product of vectors, a read a channel: 128 of them, by row, by key and by both. */
static void test_many_reads(void **state)
{
    static const char *const scores[] = {
        "score + 0.1 * sum(c, 64, table[64 * q + c] * rel[h, c])",
        "score + 0.1 * sum(c, 64, table[q + c] * table[7 * kv + 64 * c])",
        "score + 0.1 * sum(c, 64, rel[q % 7, c] * table[q * kv + c])",
    };
    (void)state;
    if (is_emulated_run())
        skip();
    for (size_t n = 0; n < sizeof scores / sizeof *scores; n++) {
        const backward_case c = {.forward = {.problem = is_short_run()
                                                            ? "b1 h2/1 q5 kv19 d16 f32"
                                                            : "b1 h2/1 q13 kv37 d16 f32",
                                             .score = scores[n],
                                             .mask = n ? masks[n] : NULL,
                                             .seed = n + 300},
                                 .has_captures = 1};
        check_levels(&c);
    }
}

/* Masks and lengths whose gradients FlexAttention got wrong: PyTorch issues 158212, 141126,
 * 136232 (lse has a gradient), 139462 (more keys than the batch's rows), 188322 (blocks alone
 * decide). */
static void test_flex(void **state)
{
    static const backward_case cases[] = {
        {.forward = {.problem = "b1 h2 q192 kv192 d32 f32",
                     .mask = "q < 64 && kv < 64 && q > kv - 4"
                             " || q / 64 == 1 && kv < 64 && (q - 64) % 4 != 1"
                             "    && kv <= floordiv(q - 65, 4) * 4 + 1"
                             " || q / 64 == 1 && kv / 64 == 1 && (q - 64) % 4 != 1"
                             "    && floordiv(q - 65, 4) == floordiv(kv - 65, 4)"
                             " || q / 64 == 1 && kv >= 128"
                             "    && floordiv(q - 65, 4) == floordiv(kv - 129, 4)"
                             " || q >= 128 && kv < 64 && kv <= (q - 128) / 4 * 4"}},
        {.forward = {.problem = "b1 h2 q256 kv256 d32 f32",
                     .mask = "kv < 16 || q / 16 - kv / 16 >= 0 && q / 16 - kv / 16 < 2"}},
        {.forward = {.problem = "b1 h2 q130 kv130 d64 f32", .mask = "q >= kv"}, .has_d_lse = 1},
        {.forward = {.problem = "b2 h1 q2 kv2 d16 f32", .mask = "q >= kv"}},
        {.forward = {.problem = "b1 h2 q140 kv96 d32 f32", .mask = "q / 70 != kv / 24 % 2"}},
    };
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        backward_case_run r;
        backward_case_make(&cases[n], &r);
        for (const char *const *level = case_levels(); *level; level++)
            for (int mask = BACKWARD_PROVEN; mask <= BACKWARD_IMPORTED; mask++)
                backward_case_check(&r, *level, 2, (backward_mask)mask, NULL);
        backward_case_free(&r);
    }
}

/* Twice dO, twice the gradients, to the bit. */
static void test_linear(void **state)
{
    const backward_case c = {.forward = {.problem = "b1 h4/2 q110 kv230 d40 f32",
                                         .mask = "q + 90 >= kv",
                                         .seed = 5}};
    backward_case_run r;
    float *once[BACKWARD_GRADIENTS], *twice[BACKWARD_GRADIENTS];
    (void)state;
    backward_case_make(&c, &r);
    for (int g = 0; g < BACKWARD_GRADIENTS; g++) {
        once[g] = malloc(backward_case_bytes(&r, g));
        twice[g] = malloc(backward_case_bytes(&r, g));
    }
    for (const char *const *level = case_levels(); *level; level++) {
        backward_case_check(&r, *level, 1, BACKWARD_PROVEN, (char **)once);
        for (int64_t i = 0; i < 4 * 110 * 40; i++)
            ((float *)r.d_out.t.data)[i] *= 2;
        backward_case_solve(&r);
        backward_case_check(&r, *level, 1, BACKWARD_PROVEN, (char **)twice);
        for (int g = 0; g < BACKWARD_GRADIENTS; g++)
            for (size_t i = 0; i < backward_case_bytes(&r, g) / sizeof(float); i++)
                assert_true(isnan(once[g][i]) || twice[g][i] == 2 * once[g][i]);
    }
    for (int g = 0; g < BACKWARD_GRADIENTS; g++) {
        free(once[g]);
        free(twice[g]);
    }
    backward_case_free(&r);
}

/* Only what is wanted is written. */
static void test_wanted(void **state)
{
    (void)state;
    if (is_emulated_run())
        skip();
    for (int unwanted = 1; unwanted < 7; unwanted += is_short_run() ? 2 : 1) {
        backward_case c = {.forward = {.problem = "b1 h4/2 q130 kv400 d32 f32",
                                       .mask = "q + 200 >= kv",
                                       .seed = 3},
                           .unwanted = unwanted};
        check_levels(&c);
        c.forward.problem = "b1 h4/2 q130 kv400 d32 bf16";
        c.forward.score = "score * h_scale[h]";
        check_levels(&c);
    }
}

static void test_threads(void **state)
{
    static const char *const problems[] = {"b1 h4/2 q230 kv900 d32 f32",
                                           "b1 h4/2 q230 kv900 d32 bf16"};
    (void)state;
    for (int n = 0; n < 2; n++) {
        const backward_case c = {
            .forward = {.problem = problems[n], .mask = "q + 500 >= kv", .seed = 9}};
        backward_case_run r;
        backward_case_make(&c, &r);
        for (const char *const *level = case_levels(); *level; level++) {
            static const int32_t threads[] = {1, 2, 3, 7};
            char *copies[4][BACKWARD_GRADIENTS];
            const int step = is_short_run() ? 2 : 1;
            for (int t = 0; t < 4; t += step) {
                for (int g = 0; g < BACKWARD_GRADIENTS; g++)
                    copies[t][g] = malloc(backward_case_bytes(&r, g));
                backward_case_check(&r, *level, threads[t], BACKWARD_PROVEN, copies[t]);
            }
            for (int t = 0; t < 4; t += step)
                for (int g = 0; g < BACKWARD_GRADIENTS; g++)
                    assert_memory_equal(copies[t][g], copies[0][g], backward_case_bytes(&r, g));
            for (int t = 0; t < 4; t += step)
                for (int g = 0; g < BACKWARD_GRADIENTS; g++)
                    free(copies[t][g]);
        }
        backward_case_free(&r);
    }
}

/* ---- rows whose lse is too large to tell weights ---- */

enum { LOST_ROW = 37 };

static void set_row(const saccade_tensor *t, float x)
{
    for (int64_t h = 0; h < t->shape[1]; h++)
        for (int64_t d = 0; d < t->shape[3]; d++)
            run_put(t, (h * t->shape[2] + LOST_ROW) * t->shape[3] + d, x);
}

/* Other kernels multiply operands that are not finite: last bits may differ. */
static void near(const char *what, const case_run *r, const char *level, float x,
                 const saccade_tensor *got, const saccade_tensor *want)
{
    for (int64_t i = 0; i < run_count(want); i++)
        if (!(fabs(run_get(got, i) - run_get(want, i)) <= 1e-3 + 1e-2 * fabs(run_get(want, i))))
            fail_msg("%s[%lld]: got %g, expected %g as where dO is 1 and not %g: %s, %s, %s",
                     what, (long long)i, run_get(got, i), run_get(want, i), (double)x,
                     r->c.problem, r->c.score, level);
}

static void check_lost_row(const case_run *r, run_options *o)
{
    static const float values[] = {1, 3e38f, INFINITY, NAN};
    const int64_t D = r->sizes.D;
    run_results got[4];
    for (int n = 0; n < 4; n++) {
        set_row(o->d_out, values[n]);
        run_forward(r, o, &got[n]);
        run_backward(r, o, &got[n]);
        near("dq", r, o->level, values[n], &got[n].dq, &got[0].dq);
        near("dk", r, o->level, values[n], &got[n].dk, &got[0].dk);
        near("dv", r, o->level, values[n], &got[n].dv, &got[0].dv);
        near("d_sinks", r, o->level, values[n], &got[n].d_sinks, &got[0].d_sinks);
        for (int64_t i = 0; i < r->sizes.H * D; i++)
            assert_true(run_get(&got[n].dq, (i / D * r->sizes.Q + LOST_ROW) * D + i % D) == 0);
    }
    for (int n = 0; n < 4; n++)
        run_drop(&got[n]);
}

/* Such a row's gradients are exact zeros, whatever dO is there and whether its products with V
 * are within f32's range. */
static void test_lost_rows(void **state)
{
    static const char *const problems[] = {"b1 h2 q130 kv300 d32 f32",
                                           "b1 h2 q130 kv300 d32 bf16",
                                           "b1 h2 q130 kv300 d32 f16"};
    static const char *const scores[] = {"q == 37 ? score - 1.0e6 : score",
                                         "q == 37 ? score - 1.0e6 : 5.0 * tanh(score / 5.0)"};
    static const char *const lost_masks[] = {NULL, "q + 150 >= kv", "(q + kv) % 3 != 0"};
    (void)state;
    for (int n = 0; n < 18; n++) {
        case_run r;
        if (is_left_out((size_t)n / 3, n % 3, 3))
            continue;
        case_make(&(forward_case){.problem = problems[n / 6],
                                  .score = scores[n / 3 % 2],
                                  .mask = lost_masks[n % 3],
                                  .seed = (uint64_t)n + 400},
                  &r);
        for (int64_t i = 0; i < r.sizes.Dv; i++) /* 4 in a row of V that all rows see */
            for (int64_t h = 0; h < r.sizes.Hkv; h++)
                run_put(&r.v.t, h * r.v.t.stride[1] + 5 * r.v.t.stride[2] + i, 4);
        const int64_t shape[4] = {1, r.sizes.H, r.sizes.Q, r.sizes.Dv};
        const saccade_tensor d_out = run_make(r.dtype, 4, shape);
        const saccade_tensor sinks = run_make(SACCADE_F32, 1, &r.sizes.H);
        run_randomise(&d_out, 3);
        for (int64_t h = 0; h < r.sizes.H; h++)
            run_put(&sinks, h, -1e6);
        run_options o = {.problem = r.problem, .d_out = &d_out, .sinks = &sinks};
        o.problem.backend = "cpu";
        o.problem.sinks_dtype = SACCADE_F32;
        o.problem.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V
                              | SACCADE_GRADIENT_SINKS;
        for (const char *const *level = case_levels(); *level; level++) {
            o.level = *level;
            check_lost_row(&r, &o);
        }
        if (!getenv("SACCADE_LEVEL") && amx_trap_begin()) {
            o.level = "amx";
            check_lost_row(&r, &o);
            amx_trap_end();
        }
        free(d_out.data);
        free(sinks.data);
        case_free(&r);
    }
}

/* ---- what lies at dead positions reaches nothing ---- */

static void poison(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    const size_t each = saccade_dtype_bytes(t->dtype);
    memset((char *)t->data
               + (size_t)(b * t->stride[0] + h * t->stride[1] + i * t->stride[2]) * each,
           0xff, (size_t)t->shape[3] * each);
}

/* The row's queries and dO, and the keys, are NaN where the mask is false for all of a row or
 * column, and in rows and keys that others see only where they are dead. */
static void test_poison(void **state)
{
    static const char *const problems[] = {"b1 h2 q130 kv230 d32 f32",
                                           "b1 h2 q130 kv230 d32 bf16"};
    static const char *const texts[] = {
        "q != 57 && kv != 33 && kv != 201 && q + 100 >= kv", /* dead rows and columns */
        "kv <= q || kv == 7",
    };
    (void)state;
    for (int n = 0; n < 4; n++) {
        const backward_case c = {
            .forward = {.problem = problems[n / 2], .mask = texts[n % 2], .seed = 21}};
        backward_case_run r;
        backward_case_make(&c, &r);
        for (int64_t h = 0; h < 2 && n % 2 == 0; h++) {
            poison(&r.f.q.t, 0, h, 57);
            poison(&r.d_out.t, 0, h, 57);
            poison(&r.f.k.t, 0, h, 33);
            poison(&r.f.v.t, 0, h, 201);
            poison(&r.f.k.t, 0, h, 201);
        }
        if (n % 2) /* a live NaN: rows before it have exact, finite gradients */
            poison(&r.d_out.t, 0, 1, 100);
        backward_case_solve(&r);
        for (const char *const *level = case_levels(); *level; level++)
            for (int mask = BACKWARD_PROVEN; mask <= BACKWARD_IMPORTED; mask++)
                backward_case_check(&r, *level, 1, (backward_mask)mask, NULL);
        backward_case_free(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),     cmocka_unit_test(test_masks),
        cmocka_unit_test(test_wide_tiles), cmocka_unit_test(test_scores),
        cmocka_unit_test(test_data),       cmocka_unit_test(test_wanted),
        cmocka_unit_test(test_threads),    cmocka_unit_test(test_poison),
        cmocka_unit_test(test_captures),   cmocka_unit_test(test_many_reads),
        cmocka_unit_test(test_flex),       cmocka_unit_test(test_linear),
        cmocka_unit_test(test_lost_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
