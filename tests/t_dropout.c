/* Dropout: the generator against known answers, its layout, how many weights are kept, the same
 * weights on every back end and level, gradients against plain's and finite differences, and
 * texts of weights. */
#include "support/amx_trap.h"
#include "support/device_case.h"
#include "support/run_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the generator ---- */

/* From the test vectors of Random123, the generator's authors': 7 and 10 rounds. */
static void known_answers(void **unused)
{
    (void)unused;
    static const struct {
        int rounds;
        uint32_t key[2], counter[4], answer[4];
    } rows[] = {
        {7, {0, 0}, {0, 0, 0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        {7, {~0u, ~0u}, {~0u, ~0u, ~0u, ~0u}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        {7,
         {0xa4093822, 0x299f31d0},
         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
        {10, {0, 0}, {0, 0, 0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {10,
         {0xa4093822, 0x299f31d0},
         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        const uint32_t *k = rows[n].key, *c = rows[n].counter;
        const dropout_words x =
            dropout_philox(k[0], k[1], c[0], c[1], c[2], c[3], rows[n].rounds);
        for (int i = 0; i < 4; i++)
            assert_int_equal(x.w[i], rows[n].answer[i]);
    }
}

/* Frozen: bits of seed 0x123456789abcdef0, offset 7, b 1, h 3. Every weight of a square has
 * bits of its own. */
static void layout(void **unused)
{
    (void)unused;
    const dropout_words head = dropout_head(0x123456789abcdef0u, 7, 1, 3);
    int taken[32][4][2] = {{{0}}};
    for (uint32_t q = 0; q < 16; q++)
        for (uint32_t kv = 0; kv < 16; kv++) {
            const int patch = (int)((q & 7) * 4 + (kv >> 1 & 3));
            const int word = (int)(2 * (kv & 1) + (q >> 3)), half = (int)(kv >> 3);
            const dropout_words x =
                dropout_patch(head, 16 + (q & 7), 0x3ffffffcu + (kv >> 1 & 3));
            assert_int_equal(dropout_bits(head, 32 + q, 0xfffffff0u + kv),
                             x.w[word] >> (16 * half) & 0xffff);
            assert_int_equal(taken[patch][word][half]++, 0);
        }
    static const uint32_t bits[4] = {0xbb9a, 0x0e84, 0xca4e, 0xe813};
    assert_int_equal(dropout_bits(head, 0, 0), bits[0]);
    assert_int_equal(dropout_bits(head, 8, 1), bits[1]);
    assert_int_equal(dropout_bits(head, 1000, 77777), bits[2]);
    assert_int_equal(dropout_bits(head, 0xffffffffu, 14), bits[3]);
}

/* ---- runs ---- */

static saccade_mod *weight_of(const char *text)
{
    return case_mod(SACCADE_WEIGHT, text);
}

static run_options options_of(const case_run *r, const char *backend, const char *level,
                              const saccade_mod *weight, const saccade_tensor *state)
{
    run_options o = {.problem = r->problem, .level = level, .dropout = state};
    o.problem.backend = backend;
    o.problem.weight = weight;
    return o;
}

static saccade_tensor state_of(int64_t values[2])
{
    const int64_t shape[1] = {2};
    return saccade_tensor_of(values, SACCADE_I64, 1, shape);
}

static const forward_case cases[] = {
    {.problem = "b2 h4/2 q70 kv130 d40 dv24 f32", .mask = "causal()", .kv_len = 120},
    {.problem = "b1 h4/2 q200 kv500 d64 bf16", .score = "softcap(c)", .data = CASE_WIDE},
    {.problem = "b1 h12/2 q1 kv3000 d64 bf16", .layout = CASE_BNHD, .q_offset = 2999},
    {.problem = "b2 h2 q90 kv90 d64 f16", .mask = "q >= kv + 5", .score = "alibi()"},
    {.problem = "b1 h2 q300 kv700 d64 bf16",
     .mask = "sliding_window(W)",
     .q_offset = 405,
     .kv_offset = 3},
    {.problem = "b1 h2 q40 kv80 d64 f32", .q_offset = -21, .kv_offset = -5},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* Kernels of each kind, and positions that patches do and don't lie by. */
static const forward_case device_cases[] = {
    {.problem = "b2 h2 q300 d128 bf16", .mask = "causal()"},
    {.problem = "b1 h4/2 q257 kv400 d64 bf16", .score = "softcap(c)", .data = CASE_WIDE},
    {.problem = "b2 h4/1 q200 kv333 d64 f16", .mask = "q >= kv + 5", .score = "alibi()"},
    {.problem = "b1 h2 q150 kv300 d128 bf16",
     .mask = "sliding_window(W)",
     .q_offset = 151,
     .kv_offset = 3},
    {.problem = "b1 h2 q130 kv260 d64 bf16", .q_offset = 128, .kv_offset = -48},
    {.problem = "b1 h2 q90 kv200 d256 bf16", .mask = "causal()", .q_offset = 110},
    {.problem = "b2 h2/1 q200 d256 bf16", .mask = "causal()"},
    {.problem = "b2 h3 q70 kv130 d40 dv24 bf16", .mask = "causal()"},
    {.problem = "b1 h2 q100 kv140 d36 dv20 f16"},
    {.problem = "b2 h4/2 q70 kv130 d64 f32", .mask = "causal()"},
    {.problem = "b1 h2 q40 kv80 d128 f32", .q_offset = -21, .kv_offset = -5},
    {.problem = "b1 h2 q130 kv260 d64 bf16",
     .score = "score * h_scale[h]",
     .mask = "kv % 3 > 0"},
    {.problem = "b1 h12/2 q1 kv3000 d64 bf16", .layout = CASE_BNHD, .q_offset = 2999},
    {.problem = "b1 h2 q150 kv300 d128 bf16", .score = "softcap(c)", .data = CASE_WIDE},
};
enum { DEVICE_CASES = sizeof device_cases / sizeof device_cases[0] };

/* With lse and row maxima, and out alone. */
static void same_results(const case_run *r, run_options *o, const run_results *plain,
                         const run_results *gold)
{
    for (int want = CASE_ALL; want <= CASE_OUT_ONLY; want += 2) {
        run_results got;
        o->want = (case_outputs)want;
        run_forward(r, o, &got);
        run_compare(o->level ? o->level : "device", r, &got.out, &plain->out, &gold->out, 2);
        if (want == CASE_ALL)
            run_compare("lse", r, &got.lse, &plain->lse, &gold->lse, 4);
        run_drop(&got);
    }
}

/* 7 of 10 weights, sinks too where a case's number is odd. */
static void one_case(const forward_case *c, int n, int on_device)
{
    int64_t values[2] = {-77 - n, 3};
    const int64_t heads[1] = {12};
    const saccade_tensor state = state_of(values);
    saccade_tensor sinks = run_make(SACCADE_F32, 1, heads);
    saccade_mod *weight = weight_of("dropout(0.3)");
    run_results gold, plain;
    case_run r;
    case_make(c, &r);
    sinks.shape[0] = r.sizes.H;
    run_options o = options_of(&r, "ref", NULL, weight, &state);
    o.sinks = n % 2 ? &sinks : NULL;
    o.problem.sinks_dtype = n % 2 ? SACCADE_F32 : SACCADE_NONE;
    o.problem.out_dtype = r.dtype == SACCADE_F32 ? SACCADE_NONE : SACCADE_F32;
    run_forward(&r, &o, &gold);
    o.problem.out_dtype = SACCADE_NONE;
    o.problem.backend = "plain";
    run_forward(&r, &o, &plain);
    o.problem.backend = on_device ? "cuda" : "cpu";
    o.is_dropout_there = n % 2;
    for (const char *const *level = case_levels(); *level && !on_device; level++) {
        o.level = *level;
        same_results(&r, &o, &plain, &gold);
    }
    if (on_device) {
        same_results(&r, &o, &plain, &gold);
    } else if (!getenv("SACCADE_LEVEL") && amx_trap_begin()) {
        o.level = "amx";
        same_results(&r, &o, &plain, &gold);
        amx_trap_end();
    }
    run_drop(&gold);
    run_drop(&plain);
    free(sinks.data);
    saccade_mod_destroy(weight);
    case_free(&r);
}

static void levels_agree(void **unused)
{
    (void)unused;
    for (int n = 0; n < CASES; n++)
        one_case(&cases[n], n, 0);
}

static void device_agrees(void **unused)
{
    (void)unused;
    if (!has_device())
        skip();
    for (int n = 0; n < CASES + DEVICE_CASES; n++)
        if (is_device_case(n))
            one_case(n < CASES ? &cases[n] : &device_cases[n - CASES], n, 1);
}

/* ---- which weights ---- */

/* V the identity: out is the weights themselves, times their number as all scores are 0. */
static void weights_of(const char *problem, int32_t q_offset, double rate,
                       const char *const *backends, double error)
{
    char text[32];
    const uint32_t threshold = (uint32_t)lrint(rate * DROPOUT_ONE);
    const forward_case c = {.problem = problem, .data = CASE_ZERO, .q_offset = q_offset};
    int64_t values[2] = {42, 0x7fffffffffffffff};
    const saccade_tensor state = state_of(values);
    snprintf(text, sizeof text, "dropout(%g)", rate);
    saccade_mod *weight = weight_of(text);
    case_run r;
    run_results got;
    case_make(&c, &r);
    const saccade_sizes *s = &r.sizes;
    for (int64_t i = 0; i < s->B * s->H * s->KV; i++)
        for (int64_t d = 0; d < s->Dv; d++)
            run_put(&r.v.t, i * s->Dv + d, i % s->KV == d);
    for (int n = 0; backends[n]; n++) {
        run_options o = options_of(&r, backends[n], NULL, weight, &state);
        o.problem.h_offset = 2;
        o.problem.heads_global = 9;
        run_forward(&r, &o, &got);
        for (int64_t at = 0; at < run_count(&got.out); at++) {
            const int64_t kv = at % s->Dv, row = at / s->Dv, q = row % s->Q;
            const int64_t h = row / s->Q % s->H, b = row / s->Q / s->H;
            const dropout_words head =
                dropout_head(42, 0x7fffffffffffffffu, (uint32_t)b, (uint32_t)h + 2);
            const int64_t at_q =
                q_offset ? q + q_offset + b : q; /* the case's offset grows with the batch */
            const int is_kept = dropout_bits(head, (uint32_t)at_q, (uint32_t)kv) >= threshold;
            const double x = run_get(&got.out, at) * (double)s->KV * (1 - rate);
            if (!(fabs(x - is_kept) <= error))
                fail_msg("%s: b %lld h %lld q %lld kv %lld: got %g, expected %d", backends[n],
                         (long long)b, (long long)h, (long long)q, (long long)kv, x, is_kept);
        }
        run_drop(&got);
    }
    saccade_mod_destroy(weight);
    case_free(&r);
}

static void weights_are_those_of_the_bits(void **unused)
{
    static const char *const backends[] = {"ref", "plain", "cpu", NULL};
    (void)unused;
    weights_of("b2 h3 q37 kv48 d8 dv48 f32", 11, 0.25, backends, 1e-5);
}

static void device_weights_are_those_of_the_bits(void **unused)
{
    static const char *const backends[] = {"cuda", NULL};
    (void)unused;
    if (!has_device())
        skip();
    /* Few dropped and most, which kernels compare in different ways; of D64 three groups. */
    for (int n = 0; n < 4; n++) {
        const int32_t q_offset = n % 2 * 11;
        const double rate = n < 2 ? 0.25 : 0.75;
        weights_of("b2 h3 q37 kv48 d8 dv48 f32", q_offset, rate, backends, 1e-5);
        weights_of("b2 h3 q137 kv256 d64 dv256 bf16", q_offset, rate, backends, 4e-3);
        weights_of("b2 h3 q137 kv128 d128 f16", q_offset, rate, backends, 1e-3);
        weights_of("b2 h3 q137 kv64 d64 bf16", q_offset, rate, backends, 4e-3);
        weights_of("b2 h3 q70 kv60 d20 dv60 f16", q_offset, rate, backends, 1e-3);
    }
}

/* Of 2^20 weights, in all and by each bit of their positions, within 5 standard deviations;
 * neighbours, heads and offsets know nothing of each other. */
static void statistics(void **unused)
{
    (void)unused;
    static const double rates[] = {0.1, 0.5, 0.9};
    enum { SIDE = 512, COUNT = 4 * SIDE * SIDE };
    for (int n = 0; n < 3; n++) {
        const uint32_t threshold = (uint32_t)lrint(rates[n] * DROPOUT_ONE);
        const double p = 1 - threshold / (double)DROPOUT_ONE;
        int64_t kept = 0, by_q[9] = {0}, by_kv[9] = {0}, both[5] = {0};
        for (uint32_t h = 0; h < 4; h++) {
            const dropout_words head = dropout_head((uint64_t)n, 1, 0, h);
            const dropout_words next = dropout_head((uint64_t)n, 2, 0, h);
            for (uint32_t q = 0; q < SIDE; q++)
                for (uint32_t kv = 0; kv < SIDE; kv++) {
                    const int is_kept = dropout_bits(head, q, kv) >= threshold;
                    if (!is_kept)
                        continue;
                    kept++;
                    for (int bit = 0; bit < 9; bit++) {
                        by_q[bit] += q >> bit & 1;
                        by_kv[bit] += kv >> bit & 1;
                    }
                    if (q % 8 == 0) { /* pairs, on a part of all */
                        both[0] += dropout_bits(head, q, kv ^ 1) >= threshold;
                        both[1] += dropout_bits(head, q, kv ^ 8) >= threshold;
                        both[2] += dropout_bits(head, q ^ 8, kv) >= threshold;
                        both[3] += dropout_bits(head, q, kv ^ 16) >= threshold;
                        both[4] += dropout_bits(next, q, kv) >= threshold;
                    }
                }
        }
        const double half = COUNT / 2.0, part = COUNT / 8.0, pp = p * p;
        assert_true(fabs((double)kept - COUNT * p) <= 5 * sqrt(COUNT * p * (1 - p)));
        for (int bit = 0; bit < 9; bit++) {
            assert_true(fabs((double)by_q[bit] - half * p) <= 5 * sqrt(half * p * (1 - p)));
            assert_true(fabs((double)by_kv[bit] - half * p) <= 5 * sqrt(half * p * (1 - p)));
        }
        for (int i = 0; i < 5; i++) /* pairs count twice in the first four */
            assert_true(fabs((double)both[i] - part * pp)
                        <= 5 * sqrt(2 * part * pp * (1 - pp)));
    }
}

/* Rate 0 is no dropout, rate 1 leaves nothing but lse; rates are captured scalars too. */
static void rates(void **unused)
{
    (void)unused;
    int64_t values[2] = {1, 2};
    const saccade_tensor state = state_of(values);
    case_run r;
    run_results none, got;
    case_make(&cases[1], &r);
    const run_options plain = options_of(&r, "cpu", NULL, NULL, NULL);
    run_forward(&r, &plain, &none);
    static const char *const texts[] = {"dropout(0)", "dropout(1)",
                                        "p = 2 * c - 4; dropout(p)"};
    for (int n = 0; n < 3; n++) {
        saccade_mod *weight = weight_of(texts[n]);
        for (const char *const *level = case_levels(); *level; level++) {
            const run_options o = options_of(&r, "cpu", *level, weight, &state);
            run_forward(&r, &o, &got);
            run_compare(texts[n], &r, &got.lse, &none.lse, &none.lse, 8);
            for (int64_t i = 0; i < run_count(&got.out) && n; i++)
                assert_true(run_get(&got.out, i) == 0);
            if (!n)
                run_compare("0", &r, &got.out, &none.out, &none.out, 2);
            run_drop(&got);
        }
        saccade_mod_destroy(weight);
    }
    run_drop(&none);
    case_free(&r);
}

/* ---- backward ---- */

enum { Q_K_V = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

static void both_ways(const case_run *r, const run_options *o, run_results *to)
{
    run_forward(r, o, to);
    run_backward(r, o, to);
}

static void same_gradients(const case_run *r, const run_options *o, const run_results *plain,
                           const run_results *gold)
{
    /* On a device, in f32: a last place of the problem's dtype, half of one for the weights,
     * which are rounded before they are divided by their sum, and half for what follows from
     * them. */
    const int bits = r->dtype == SACCADE_BF16 ? 8 : r->dtype == SACCADE_F16 ? 11 : 24;
    const int is_there = strcmp(o->problem.backend, "cuda") == 0;
    const int ulps = bits == 24 || !is_there ? 16 : 1 << (24 - bits);
    run_results got;
    both_ways(r, o, &got);
    run_compare("dq", r, &got.dq, &plain->dq, &gold->dq, ulps);
    run_compare("dk", r, &got.dk, &plain->dk, &gold->dk, ulps);
    run_compare("dv", r, &got.dv, &plain->dv, &gold->dv, ulps);
    run_drop(&got);
}

/* nan_row: of Q, which gets a NaN in all batches and heads; -1: none. */
static void one_backward(forward_case c, int n, int on_device, int nan_row)
{
    int64_t values[2] = {5, n};
    const saccade_tensor state = state_of(values);
    saccade_mod *weight = weight_of("dropout(0.2)");
    run_results gold, plain;
    case_run r;
    c.kv_len = 0;
    case_make(&c, &r);
    for (int64_t head = 0; nan_row >= 0 && head < r.sizes.B * r.sizes.H; head++)
        run_put(&r.q.t,
                head / r.sizes.H * r.q.t.stride[0] + head % r.sizes.H * r.q.t.stride[1]
                    + nan_row * r.q.t.stride[2],
                NAN);
    const int64_t shape[4] = {r.sizes.B, r.sizes.H, r.sizes.Q, r.sizes.Dv};
    const saccade_tensor d_out = run_make(r.dtype, 4, shape);
    const saccade_tensor d_lse = run_make(SACCADE_F32, 3, shape);
    run_randomise(&d_out, 3);
    run_randomise(&d_lse, 4);
    run_options o = options_of(&r, "ref", NULL, weight, &state);
    o.problem.gradients = Q_K_V;
    o.d_out = &d_out;
    o.d_lse = &d_lse;
    both_ways(&r, &o, &gold);
    o.problem.backend = "plain";
    both_ways(&r, &o, &plain);
    o.problem.backend = on_device ? "cuda" : "cpu";
    o.is_dropout_there = n % 2;
    for (const char *const *level = case_levels(); *level && !on_device; level++) {
        o.level = *level;
        same_gradients(&r, &o, &plain, &gold);
    }
    if (on_device)
        same_gradients(&r, &o, &plain, &gold);
    else if (!getenv("SACCADE_LEVEL") && amx_trap_begin()) {
        o.level = "amx";
        same_gradients(&r, &o, &plain, &gold);
        amx_trap_end();
    }
    run_drop(&gold);
    run_drop(&plain);
    free(d_out.data);
    free(d_lse.data);
    saccade_mod_destroy(weight);
    case_free(&r);
}

static void gradients_agree(void **unused)
{
    (void)unused;
    static const int which[] = {0, 1, 3, 4};
    for (int n = 0; n < 4; n++)
        one_backward(cases[which[n]], which[n], 0, -1);
}

/* A row whose weights are NaN: what dropout drops of them is NaN too. */
static void gradients_of_nan_agree(void **unused)
{
    (void)unused;
    static const int which[] = {0, 1, 3, 4};
    for (int n = 0; n < 4; n++)
        one_backward(cases[which[n]], which[n], 0, 37);
}

static void device_gradients_agree(void **unused)
{
    (void)unused;
    if (!has_device())
        skip();
    for (int n = 0; n < DEVICE_CASES; n++)
        if (is_device_case(n))
            one_backward(device_cases[n], n, 1, -1);
}

static saccade_tensor widened(const saccade_tensor *t)
{
    const saccade_tensor wide = run_like(t, SACCADE_F64);
    for (int64_t i = 0; i < run_count(t); i++)
        run_put(&wide, i, run_get(t, i));
    return wide;
}

static double loss(const case_run *r, const run_options *o)
{
    run_results f;
    double sum = 0;
    run_forward(r, o, &f);
    for (int64_t i = 0; i < run_count(&f.out); i++)
        sum += run_get(&f.out, i) * run_get(o->d_out, i);
    run_drop(&f);
    return sum;
}

static void differences(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b1 h2 q9 kv21 d8 f32", .mask = "q + 9 >= kv"};
    int64_t values[2] = {8, 9};
    const saccade_tensor state = state_of(values);
    saccade_mod *weight = weight_of("dropout(0.4)");
    case_run r;
    run_results f;
    case_make(&c, &r);
    const int64_t shape[4] = {r.sizes.B, r.sizes.H, r.sizes.Q, r.sizes.Dv};
    const saccade_tensor d_out = run_make(SACCADE_F64, 4, shape);
    case_tensor *const inputs[] = {&r.q, &r.k, &r.v};
    saccade_tensor narrow[3];
    for (int n = 0; n < 3; n++) {
        narrow[n] = inputs[n]->t;
        inputs[n]->t = widened(&narrow[n]);
    }
    run_randomise(&d_out, 5);
    run_options o = options_of(&r, "ref", NULL, weight, &state);
    o.problem.dtype = o.problem.kv_dtype = SACCADE_F64;
    o.problem.gradients = Q_K_V;
    o.d_out = &d_out;
    both_ways(&r, &o, &f);
    const saccade_tensor *gradient[] = {&f.dq, &f.dk, &f.dv};
    for (int n = 0; n < 3; n++)
        for (int64_t i = 1; i < run_count(&inputs[n]->t); i += 13) {
            const double at = run_get(&inputs[n]->t, i), h = 1e-5;
            run_put(&inputs[n]->t, i, at + h);
            const double up = loss(&r, &o);
            run_put(&inputs[n]->t, i, at - h);
            const double down = loss(&r, &o);
            run_put(&inputs[n]->t, i, at);
            assert_true(fabs((up - down) / (2 * h) - run_get(gradient[n], i)) <= 1e-7);
        }
    for (int n = 0; n < 3; n++) {
        free(inputs[n]->t.data);
        inputs[n]->t = narrow[n];
    }
    run_drop(&f);
    free(d_out.data);
    saccade_mod_destroy(weight);
    case_free(&r);
}

/* ---- texts and mistakes ---- */

static void texts(void **unused)
{
    (void)unused;
    static const struct {
        const char *text, *says;
    } rows[] = {{"0.5", "expected dropout(rate)"},
                {"dropout(0.5) * 2", "expected dropout(rate)"},
                {"dropout(0.1, 0.2)", "expected dropout(rate)"},
                {"dropout(q * 0.1)", "got 'q' in a weight"},
                {"dropout(score)", "got 'score' in a weight"},
                {"dropout(table[0])", "got 'table' in a weight"},
                {"q = 3; dropout(0.1)", "got 'q' in a weight"},
                {"dropout(causal())", "got 'causal' in a weight"},
                {"dropout(true)", "a rate: got bool"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_error err = {0};
        saccade_mod *mod = NULL;
        assert_int_equal(
            saccade_mod_parse(SACCADE_WEIGHT, rows[i].text, strlen(rows[i].text), &mod, &err),
            SACCADE_ETYPE);
        if (!strstr(err.message, rows[i].says))
            fail_msg("%s: got '%s'", rows[i].text, err.message);
    }
    saccade_error err = {0};
    saccade_mod *mod = weight_of("p = c / 8; dropout(p + 0.1)"), *again;
    char text[200];
    saccade_mod_print(mod, text, sizeof text);
    assert_int_equal(saccade_mod_parse(SACCADE_WEIGHT, text, strlen(text), &again, &err),
                     SACCADE_OK);
    assert_non_null(strstr(text, "dropout("));
    assert_int_equal(saccade_mod_kind(again), SACCADE_WEIGHT);
    saccade_mod_destroy(mod);
    saccade_mod_destroy(again);
}

static void refuses(const case_run *r, const saccade_mod *weight, const saccade_tensor *state,
                    const char *where, const char *says)
{
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_problem p = r->problem;
    saccade_forward_args a = r->args;
    p.weight = weight;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    a.out = &r->q.t; /* never looked at */
    a.dropout = state;
    assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
    if (!strstr(err.message, says))
        fail_msg("got '%s'", err.message);
    saccade_plan_destroy(plan);
}

/* A rate that follows a sequence's own length would be another one in each. */
static void ragged_runs_have_one_rate(void **unused)
{
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_error err = {0};
    saccade_mod *weight = case_mod(SACCADE_WEIGHT, "dropout(1.0 / KV)");
    (void)unused;
    saccade_problem_init(&p);
    p.weight = weight;
    p.ragged = 1;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "weight");
    saccade_mod_destroy(weight);
}

static void mistakes(void **unused)
{
    (void)unused;
    const forward_case c = {.problem = "b2 h4/2 q20 kv64 d16 f32"};
    int64_t values[2] = {1, 2};
    saccade_tensor state = state_of(values);
    saccade_mod *weight = weight_of("dropout(0.5)"), *much = weight_of("dropout(1.5)");
    saccade_mod *longer = weight_of("dropout(float(KV))"); /* known when it runs */
    saccade_error err = {0};
    saccade_plan *plan;
    case_run r;
    case_make(&c, &r);
    refuses(&r, weight, NULL, "dropout", "got no tensor");
    refuses(&r, NULL, &state, "dropout", "has no weight");
    saccade_problem never = r.problem;
    never.weight = much;
    assert_int_equal(saccade_plan_create(NULL, &never, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "weight");
    assert_string_equal(err.message, "got a rate of 1.5, expected 0 to 1");
    refuses(&r, longer, &state, "weight", "got a rate of 64");
    state.shape[0] = 3;
    refuses(&r, weight, &state, "dropout", "expected 2");
    state.shape[0] = 2;
    state.dtype = SACCADE_F32;
    refuses(&r, weight, &state, "dropout", "expected i64 or u64");
    saccade_problem p = r.problem;
    p.mask = weight;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "got a weight, expected a mask"));
    saccade_mod_destroy(weight);
    saccade_mod_destroy(much);
    saccade_mod_destroy(longer);
    case_free(&r);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(layout),
        cmocka_unit_test(levels_agree),
        cmocka_unit_test(weights_are_those_of_the_bits),
        cmocka_unit_test(device_agrees),
        cmocka_unit_test(device_weights_are_those_of_the_bits),
        cmocka_unit_test(device_gradients_agree),
        cmocka_unit_test(statistics),
        cmocka_unit_test(rates),
        cmocka_unit_test(gradients_agree),
        cmocka_unit_test(gradients_of_nan_agree),
        cmocka_unit_test(differences),
        cmocka_unit_test(texts),
        cmocka_unit_test(mistakes),
        cmocka_unit_test(ragged_runs_have_one_rate),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
