/* The ladder: counters equal the closed formulas, results equal float64, and the theorems of
 * the papers hold over a range of chip memory. */
#include "ref/ladder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static int64_t between(uint64_t *state, int64_t lo, int64_t hi)
{
    return lo + (int64_t)(next(state) % (uint64_t)(hi - lo + 1));
}

static ladder_problem random_problem(uint64_t *state, int64_t most_N, int64_t most_d)
{
    ladder_problem p = {.N = between(state, 1, most_N), .d = between(state, 1, most_d)};
    p.M = between(state, p.d, p.N * p.d);
    p.block = between(state, 1, p.N + 3);
    p.splits = between(state, 1, p.N);
    return p;
}

static ladder_data make(const ladder_problem *sizes, uint64_t seed, float q_scale)
{
    ladder_data data;
    saccade_error err;
    if (ladder_data_create(sizes, seed, q_scale, &data, &err) != SACCADE_OK)
        fail_msg("%s", err.message);
    return data;
}

static const ladder_rung *find(const char *name)
{
    const ladder_rung *rung = ladder_rungs;
    while (rung->name && strcmp(rung->name, name) != 0)
        rung++;
    assert_non_null(rung->name);
    return rung;
}

static ladder_count count(ladder_data *data, const ladder_rung *rung)
{
    ladder_run run = ladder_start(data);
    rung->counted(&run);
    return run.count;
}

static double error_of(ladder_data *data, const ladder_rung *rung)
{
    double error;
    assert_int_equal(ladder_error(data, rung, &error, NULL), SACCADE_OK);
    return error;
}

static void say(const ladder_problem *p, const ladder_rung *rung, uint64_t seed)
{
    print_message("%s: N %lld, d %lld, M %lld, block %lld, splits %lld, seed %llu\n",
                  rung->name, (long long)p->N, (long long)p->d, (long long)p->M,
                  (long long)p->block, (long long)p->splits, (unsigned long long)seed);
}

/* ---- counters, results ---- */

static void check_rung(ladder_data *data, const ladder_rung *rung, uint64_t seed)
{
    const ladder_problem *p = &data->problem;
    const ladder_count c = count(data, rung);
    const double error = error_of(data, rung);
    const int is_right = c.reads + c.writes == rung->accesses(p) && c.flops == rung->flops(p)
                         && c.fallbacks == 0
                         && error < (rung->kind == LADDER_BACKWARD ? 3e-5 : 5e-6);
    if (is_right)
        return;
    say(p, rung, seed);
    fail_msg("accesses %lld of %lld, flops %lld of %lld, fallbacks %lld, error %g",
             (long long)(c.reads + c.writes), (long long)rung->accesses(p), (long long)c.flops,
             (long long)rung->flops(p), (long long)c.fallbacks, error);
}

static void counters_equal_formulas_and_results_float64(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        uint64_t s = seed;
        const ladder_problem sizes = random_problem(&s, 80, 24);
        ladder_data data = make(&sizes, seed, 1);
        for (const ladder_rung *rung = ladder_rungs; rung->name; rung++)
            check_rung(&data, rung, seed);
        ladder_data_destroy(&data);
    }
}

static void stated_formulas_are_met_exactly_where_they_are_exact(void **state)
{
    (void)state;
    static const char *const exact[] = {"softmax-naive", "softmax-safe", "softmax-online",
                                        "softmax-block", "attention-3-pass"};
    const ladder_problem sizes = {.N = 96, .d = 16, .M = 512, .block = 32, .splits = 4};
    const int64_t N = 96, d = 16;
    ladder_data data = make(&sizes, 7, 1);
    for (size_t i = 0; i < sizeof exact / sizeof exact[0]; i++) {
        const ladder_rung *rung = find(exact[i]);
        const ladder_count c = count(&data, rung);
        assert_true((double)(c.reads + c.writes) == rung->stated(&data.problem));
    }
    ladder_count c = count(&data, find("softmax-naive"));
    assert_int_equal(c.flops, 3 * N * N - N);
    assert_int_equal(c.repeats, N * N);
    c = count(&data, find("softmax-safe"));
    assert_int_equal(c.flops, 6 * N * N - 2 * N);
    assert_int_equal(c.reads, 3 * N * N);
    assert_int_equal(c.writes, N * N);
    c = count(&data, find("softmax-online"));
    assert_int_equal(c.flops, 8 * N * N);
    assert_int_equal(c.repeats, 0);
    c = count(&data, find("attention-3-pass"));
    assert_int_equal(c.reads + c.writes, 3 * N * N + 4 * N * d);
    ladder_data_destroy(&data);
}

static void timed_twins_give_the_same_bits(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        uint64_t s = seed + 1000;
        const ladder_problem sizes = random_problem(&s, 60, 20);
        ladder_data data = make(&sizes, seed, 1);
        for (const ladder_rung *rung = ladder_rungs; rung->name; rung++) {
            const size_t bytes = (size_t)ladder_out_size(rung, &data.problem) * sizeof(float);
            float *counted = malloc(bytes);
            assert_non_null(counted);
            count(&data, rung);
            memcpy(counted, data.out, bytes);
            memset(data.out, 0xff, bytes);
            ladder_run run = ladder_start(&data);
            rung->timed(&run);
            assert_int_equal(run.count.reads, 0);
            if (memcmp(counted, data.out, bytes) != 0) {
                say(&data.problem, rung, seed);
                fail_msg("the timed twin gives other bits");
            }
            free(counted);
        }
        ladder_data_destroy(&data);
    }
}

/* ---- theorems ---- */

static void theorem_1_extra_memory_is_linear(void **state)
{
    (void)state;
    for (int64_t N = 32; N <= 256; N *= 2) {
        const ladder_problem sizes = {.N = N, .d = 8, .M = 256, .block = 8, .splits = 4};
        ladder_data data = make(&sizes, 3, 1);
        assert_int_equal(count(&data, find("attention-standard")).extra, 2 * N * N);
        assert_int_equal(count(&data, find("attention-3-pass")).extra, N * N);
        assert_int_equal(count(&data, find("flash1-row")).extra, 0);
        assert_int_equal(count(&data, find("flash1-block")).extra, 2 * N);
        assert_int_equal(count(&data, find("flash2")).extra, N);
        assert_int_equal(count(&data, find("backward-flash")).extra, 0);
        assert_int_equal(count(&data, find("backward-standard")).extra, 2 * N * N);
        ladder_data_destroy(&data);
    }
}

/* Over d <= M <= N d: accesses of FlashAttention fall as N^2 d^2 / M, within constants that do
 * not depend on M, while standard attention's stay; the chip holds at most 2 M + O(d) forward
 * (its blocks of M / 4 and a tile of scores), 3 M + O(d) backward. */
static void theorems_2_and_5_over_a_range_of_m(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double least, most;
        int64_t chip;
    } rungs[] = {
        {"flash1-block", 6, 25, 2}, {"flash2", 4, 15, 2}, {"backward-flash", 10, 40, 3}};
    const int64_t N = 192, d = 16;
    for (size_t n = 0; n < sizeof rungs / sizeof rungs[0]; n++) {
        const ladder_rung *rung = find(rungs[n].name);
        int64_t before = INT64_MAX;
        for (int64_t M = d; M <= N * d; M *= 2) {
            const ladder_problem sizes = {.N = N, .d = d, .M = M, .block = 8, .splits = 4};
            ladder_data data = make(&sizes, 5, 1);
            const ladder_count c = count(&data, rung);
            const int64_t accesses = c.reads + c.writes;
            const double ratio =
                (double)accesses * (double)M / ((double)(N * d) * (double)(N * d));
            if (M >= 4 * d && (ratio < rungs[n].least || ratio > rungs[n].most))
                fail_msg("%s at M %lld: ratio %g", rung->name, (long long)M, ratio);
            if (M >= 8 * d)
                assert_true(accesses < before);
            assert_true(c.chip <= rungs[n].chip * M + 32 * d);
            assert_int_equal(count(&data, find("attention-standard")).reads
                                 + count(&data, find("attention-standard")).writes,
                             4 * N * N + 4 * N * d);
            before = accesses;
            ladder_data_destroy(&data);
        }
    }
}

/* Theorem 4: what sparse blocks cost over the dense algorithm falls in proportion to s. */
static void theorem_4_accesses_follow_live_blocks(void **state)
{
    (void)state;
    for (int64_t N = 128; N <= 512; N *= 2) {
        const ladder_problem sizes = {.N = N, .d = 8, .M = 256, .block = 8, .splits = 4};
        ladder_data data = make(&sizes, 9, 1);
        const ladder_count dense = count(&data, find("flash1-block"));
        const ladder_count sparse = count(&data, find("flash1-sparse"));
        const double s = (double)sparse.visits / (double)dense.visits;
        const int64_t fixed = 3 * N * 8 + 2 * N; /* K, V and the start of O, l, m */
        const double share = (double)(sparse.reads + sparse.writes - fixed)
                             / (double)(dense.reads + dense.writes - fixed);
        assert_true(s > 0 && s < 0.5);
        assert_true(fabs(share - s) < 1e-9);
        ladder_data_destroy(&data);
    }
}

static void passes_fall_from_three_to_one(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t passes;
    } expected[] = {{"softmax-naive", 2},      {"softmax-safe", 3},
                    {"softmax-online", 2},     {"attention-3-pass", 3},
                    {"attention-standard", 3}, {"flash1-row", 1},
                    {"flash1-block", 1},       {"flash2", 1},
                    {"backward-standard", 5},  {"backward-flash", 1}};
    const ladder_problem sizes = {.N = 50, .d = 6, .M = 100, .block = 7, .splits = 3};
    ladder_data data = make(&sizes, 2, 1);
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        assert_int_equal(count(&data, find(expected[i].name)).visits,
                         expected[i].passes * 50 * 50);
    assert_int_equal(count(&data, find("decode-split")).visits, 50);
    ladder_data_destroy(&data);
}

/* ---- merging ---- */

enum { DIM = 5, PARTS = 12 };

typedef struct part {
    ladder_state state;
    float o[DIM];
} part;

/* Softmax state of keys [first, past) of scores x and values v, in float64. */
static void part_of(const double *x, const double *v, int64_t first, int64_t past, part *out)
{
    double m = -INFINITY, l = 0, o[DIM] = {0};
    for (int64_t j = first; j < past; j++)
        m = fmax(m, x[j]);
    for (int64_t j = first; j < past; j++) {
        l += exp(x[j] - m);
        for (int c = 0; c < DIM; c++)
            o[c] += exp(x[j] - m) * v[j * DIM + c];
    }
    for (int c = 0; c < DIM; c++)
        out->o[c] = l > 0 ? (float)(o[c] / l) : 0;
    out->state = (ladder_state){(float)m, (float)l, out->o};
}

/* Random cuts of the keys, empty parts included, merged two at a time in random order: every
 * tree and every order gives the whole. */
static void merging_is_associative_and_commutative(void **state)
{
    (void)state;
    enum { KEYS = 40 };
    const ladder_problem p = {.d = DIM};
    for (uint64_t seed = 1; seed <= 300; seed++) {
        uint64_t s = seed;
        double x[KEYS], v[KEYS * DIM];
        part parts[PARTS], whole;
        ladder_run run = {.p = &p};
        int64_t n = PARTS, cut = 0;
        for (int j = 0; j < KEYS; j++)
            x[j] = (double)between(&s, -4000, 4000) / 100;
        for (int j = 0; j < KEYS * DIM; j++)
            v[j] = (double)between(&s, -1000, 1000) / 500;
        part_of(x, v, 0, KEYS, &whole);
        for (int i = 0; i < PARTS; i++) {
            const int64_t past = i == PARTS - 1 ? KEYS : between(&s, cut, KEYS);
            part_of(x, v, cut, past, &parts[i]);
            cut = past;
        }
        while (n > 1) {
            const int64_t a = between(&s, 0, n - 1), b = (a + between(&s, 1, n - 1)) % n;
            ladder_merge(&run, &parts[a].state, &parts[b].state);
            parts[b] = parts[n - 1];
            parts[b].state.o = parts[b].o;
            n--;
        }
        /* the survivor of the last merge may have moved to place 0 */
        if (parts[0].state.m != whole.state.m
            || fabsf(parts[0].state.l - whole.state.l) > 1e-5f * whole.state.l)
            fail_msg("seed %llu: m %g, l %g, expected %g, %g", (unsigned long long)seed,
                     (double)parts[0].state.m, (double)parts[0].state.l, (double)whole.state.m,
                     (double)whole.state.l);
        for (int c = 0; c < DIM; c++)
            assert_true(fabsf(parts[0].o[c] - whole.o[c]) < 1e-5f);
    }
}

static void empty_parts_are_neutral(void **state)
{
    (void)state;
    const ladder_problem p = {.d = 2};
    ladder_run run = {.p = &p};
    float o[2] = {0, 0}, full[2] = {3, -4}, none[2] = {0, 0};
    ladder_state x = {-INFINITY, 0, o}, y = {1.5f, 2, full};
    const ladder_state empty = {-INFINITY, 0, none};
    ladder_merge(&run, &x, &empty);
    assert_true(x.m == -INFINITY && x.l == 0 && o[0] == 0);
    ladder_merge(&run, &x, &y);
    assert_true(x.m == 1.5f && x.l == 2 && o[0] == 3 && o[1] == -4);
    ladder_merge(&run, &x, &empty);
    assert_true(x.m == 1.5f && x.l == 2 && o[0] == 3 && o[1] == -4);
}

/* ---- the unified maximum ---- */

static void scores_out_of_reach_fall_back(void **state)
{
    (void)state;
    static const struct {
        float q_scale, phi;
        int64_t fallbacks;
    } cases[] = {{1, 0, 0}, {1, 3, 0}, {300, 0, 1}, {1, 500, 1}, {1, -500, 1}};
    const ladder_rung *rung = find("decode-unified");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const ladder_problem sizes = {
            .N = 64, .d = 8, .M = 64, .block = 8, .splits = 5, .phi = cases[i].phi};
        ladder_data data = make(&sizes, 11, cases[i].q_scale);
        const ladder_count c = count(&data, rung);
        assert_int_equal(c.fallbacks, cases[i].fallbacks);
        assert_true(error_of(&data, rung) < 2e-5);
        assert_true((c.flops == rung->flops(&data.problem)) == !cases[i].fallbacks);
        ladder_data_destroy(&data);
    }
}

/* Without the fallback the same scores overflow: naive softmax shows it. */
static void naive_softmax_overflows_where_safe_does_not(void **state)
{
    (void)state;
    const ladder_problem sizes = {.N = 64, .d = 8, .M = 64, .block = 8, .splits = 5};
    ladder_data data = make(&sizes, 11, 300);
    count(&data, find("softmax-naive"));
    assert_true(isnan(error_of(&data, find("softmax-naive"))));
    count(&data, find("softmax-online"));
    assert_true(error_of(&data, find("softmax-online")) < 1e-5);
    ladder_data_destroy(&data);
}

/* ---- the public call ---- */

static int take_two(void *user, const saccade_ladder_row *row)
{
    int *n = user;
    assert_non_null(row->name);
    return ++*n == 2;
}

static int check_row(void *user, const saccade_ladder_row *row)
{
    int *n = user;
    ++*n;
    assert_int_equal(row->reads + row->writes, row->accesses);
    assert_int_equal(row->flops_counted, row->flops);
    assert_true(row->seconds > 0 && row->error < 1e-4 && row->intensity > 0);
    return 0;
}

static void public_call_runs_and_refuses(void **state)
{
    (void)state;
    saccade_ladder_options o;
    saccade_ladder_options_init(&o);
    saccade_error err;
    int n = 0;
    o.N = 40, o.d = 8, o.M = 100;
    assert_int_equal(saccade_ladder_run(&o, take_two, &n, &err), SACCADE_OK);
    assert_int_equal(n, 2);
    n = 0;
    o.only = "flash2";
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_OK);
    assert_int_equal(n, 1);
    o.only = "flash9";
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_EINVAL);
    o.only = NULL;
    o.M = 7;
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "M");
    o.M = 40 * 8 + 1;
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_EINVAL);
    o.M = 100;
    o.splits = 41;
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_EINVAL);
    o.splits = 4;
    o.block = INT64_MAX;
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "block");
    o.block = 32;
    o.N = 0;
    assert_int_equal(saccade_ladder_run(&o, check_row, &n, &err), SACCADE_EINVAL);
    assert_int_equal(n, 1);
}

static void scalar_speed_is_plausible(void **state)
{
    (void)state;
    const double gflops = saccade_measure_scalar_gflops();
    assert_true(gflops > 0.01 && gflops < 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counters_equal_formulas_and_results_float64),
        cmocka_unit_test(stated_formulas_are_met_exactly_where_they_are_exact),
        cmocka_unit_test(timed_twins_give_the_same_bits),
        cmocka_unit_test(theorem_1_extra_memory_is_linear),
        cmocka_unit_test(theorems_2_and_5_over_a_range_of_m),
        cmocka_unit_test(theorem_4_accesses_follow_live_blocks),
        cmocka_unit_test(passes_fall_from_three_to_one),
        cmocka_unit_test(merging_is_associative_and_commutative),
        cmocka_unit_test(empty_parts_are_neutral),
        cmocka_unit_test(scores_out_of_reach_fall_back),
        cmocka_unit_test(naive_softmax_overflows_where_safe_does_not),
        cmocka_unit_test(public_call_runs_and_refuses),
        cmocka_unit_test(scalar_speed_is_plausible),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
