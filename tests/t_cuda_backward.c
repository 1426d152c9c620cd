/* Backward on CUDA. Without a GPU: tiles as functions of integers, compilation for sm_90a and
 * sm_80 without spills and without products that wait one by one. With one: chosen and random
 * cases against the float64 truth, twice, bit for bit. SACCADE_CUDA_CASES and
 * SACCADE_CUDA_SEED: how many random cases, and which. */
#include "support/backward_args.h"
#include "support/device_case.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cuda/backward/cuda_backward.h"
#include "cuda/cuda.h"
#include "ref/ref.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- tiles ---- */

static void tiles_fit(void **state)
{
    (void)state;
    for (int D = 16; D <= 256; D += 16)
        for (int E = 16; E <= 256; E += 16) {
            const cu_form p = cu_backward_pass_choice(D, E);
            const cu_form p32 = cu_backward_pass32_choice(D, E);
            cu_form f;
            assert_true(cu_backward_shared_bytes(&p, D, E) <= cu_shared_most(86));
            assert_int_equal(BWD_ROWS % p.backward.rows, 0);
            assert_true(cu_backward_shared_bytes(&p32, D, E)
                        <= cu_shared_most(D > 128 || E > 128 ? 80 : 86));
            assert_int_equal(BWD_ROWS % p32.backward.rows, 0);
            for (int is_f32 = 0; is_f32 < 2; is_f32++) {
                const int is_wide = D > 128 || E > 128;
                const cu_form x = cu_backward_captures_choice(D, E, is_f32);
                const int archs[] = {80, 86, 90};
                assert_true(cu_backward_shared_bytes(&x, D, E)
                            <= cu_shared_most(is_f32 && is_wide ? 90 : 86));
                assert_int_equal(x.backward.rows, (is_f32 ? p32 : p).backward.rows);
                for (int i = 0; i < 3; i++) { /* fits wherever x does */
                    const int most = cu_shared_most(archs[i]);
                    const cu_form e =
                        cu_backward_elements_choice(D, E, is_f32, 12 * (i % 2), most);
                    assert_int_equal(e.tile.keys, e.backward.blocks * x.backward.rows);
                    assert_true(cu_backward_shared_bytes(&e, D, E) <= most
                                || cu_backward_shared_bytes(&x, D, E) > most);
                }
            }
            if (cu_backward_wide_choice(D, E, 0, &f)) {
                assert_true(cu_backward_shared_bytes(&f, D, E) <= cu_shared_most(90));
                assert_true(2 * f.backward.registers[0] + f.backward.registers[1] <= 504);
            }
            if (cu_backward_few_choice(D, E, 0, &f)) { /* 1 KB of each CTA is the GPU's */
                const int *n = f.backward.ctas, all = cu_shared_most(90) + 1024;
                assert_true(n[0] * (cu_backward_shared_bytes(&f, D, E) + 1024) <= all);
                assert_true(n[1] * (cu_backward_query_shared(&f, D, E) + 1024) <= all);
            }
            if (cu_backward_f32_choice(D, E, 0, &f)) {
                assert_true(cu_backward_shared_bytes(&f, D, E) <= cu_shared_most(90));
                assert_true(2 * f.backward.registers[0] + f.backward.registers[1] <= 504);
            }
            for (int rung = 0; cu_backward_tile_choice(D, E, rung, &f); rung++) {
                /* setmaxnreg moves registers about: no more than the launch has */
                const int *registers = f.backward.registers;
                const int most = cu_backward_threads(&f) > 384 ? 512 : 504;
                assert_true(f.tile.groups * registers[0] + registers[1]
                                + f.backward.has_helpers * registers[2]
                            <= most);
                assert_true(cu_backward_shared_bytes(&f, D, E) <= cu_shared_most(90));
            }
        }
}

/* Tiles of 192 and of 128 keys. */
static void choices_of_small_heads(cu_form f[2])
{
    for (int i = 0; i < 2; i++)
        assert_true(cu_backward_tile_choice(64, 64, i, &f[i]));
}

/* 176 tiles of 192 keys take two rounds of 132 multiprocessors, and so do 256 of 128. With a
 * mask all tiles have to run at once: 96 or 128. */
static void short_runs_take_smaller_tiles(void **state)
{
    const saccade_sizes few = {1, 16, 16, 2048, 2048, 64, 64};
    const saccade_sizes fewer = {1, 16, 16, 1024, 1024, 64, 64};
    const saccade_sizes many = {1, 32, 32, 16384, 16384, 64, 64};
    cu_form f[2];
    (void)state;
    choices_of_small_heads(f);
    assert_true(cu_backward_is_short(&f[0], &f[1], &few, 132, 1, 0, 0));
    assert_false(cu_backward_is_short(&f[0], &f[1], &few, 132, 1, 0, 1));
    assert_true(cu_backward_is_short(&f[0], &f[1], &fewer, 132, 1, 0, 1));
    assert_false(cu_backward_is_short(&f[0], &f[1], &many, 132, 1, 0, 0));
    assert_false(cu_backward_is_short(&f[0], &f[1], &few, 0, 1, 0, 0));
}

/* Two KV heads of eight query heads each: parts of them are as good as smaller tiles. */
static void parts_are_as_good_as_smaller_tiles(void **state)
{
    const saccade_sizes some = {1, 16, 2, 2048, 2048, 64, 64};
    const saccade_sizes few = {1, 16, 2, 1024, 1024, 64, 64};
    cu_form f[2];
    (void)state;
    choices_of_small_heads(f);
    assert_true(cu_backward_is_short(&f[0], &f[1], &some, 132, 1, 0, 1));
    assert_false(cu_backward_is_short(&f[0], &f[1], &some, 132, 8, 0, 1));
    assert_true(cu_backward_is_short(&f[0], &f[1], &few, 132, 8, 0, 1));
}

/* In 16,384 positions 200 documents have 2.6 blocks to a block of queries and 50 have 7.2; a
 * window of 256 has 5. */
static void few_blocks_take_two_kernels(void **state)
{
    (void)state;
    assert_true(cu_backward_sees_few(678, 1, 16384, BWD_FEW_BLOCKS));
    assert_true(cu_backward_sees_few(2 * 678, 2, 16384, BWD_FEW_BLOCKS));
    assert_true(cu_backward_sees_few(1270, 1, 16384, BWD_FEW_BLOCKS));
    assert_false(cu_backward_sees_few(1850, 1, 16384, BWD_FEW_BLOCKS));
    assert_false(cu_backward_sees_few(2 * 678, 2, 8192, BWD_FEW_BLOCKS));
    assert_false(cu_backward_sees_few(0, 1, 16384, BWD_FEW_BLOCKS));
}

/* ---- compilation ---- */

/* A derived problem, without forward's programs. */
static saccade_plan *plan_for(const char *score, const char *mask, int D, int E,
                              saccade_dtype dtype)
{
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_mod *mods[2] = {score ? case_mod(SACCADE_SCORE, score) : NULL,
                            mask ? case_mod(SACCADE_MASK, mask) : NULL};
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = D, .Dv = E};
    p.dtype = dtype;
    p.backend = "cpu"; /* ref keeps the nodes as they were parsed, and no facts */
    p.score = mods[0];
    p.mask = mods[1];
    p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s %s d%d: %s", score ? score : "-", mask ? mask : "-", D, err.message);
    saccade_mod_destroy(mods[0]);
    saccade_mod_destroy(mods[1]);
    return plan;
}

static const struct {
    const char *score, *mask;
    int D, E;
    int has_tile; /* Hopper's tiles, or those of wide heads, are there, the first choice; 2: and
                   * a program for rows that see few keys */
    uint32_t gradients; /* 0: all three */
} instances[] = {{NULL, NULL, 64, 64, 1, 0},
                 {NULL, "causal()", 64, 64, 1, 0},
                 {NULL, "causal()", 128, 128, 1, 0},
                 {NULL, "sliding_window(W)", 80, 80, 1, 0},
                 {NULL, "document(doc) && causal()", 128, 64, 1, 0},
                 {NULL, "causal()", 48, 128, 1, 0},
                 {"alibi()", "causal()", 192, 128, 1, 0},
                 {"relative_bias()", NULL, 64, 64, 1, 0},
                 {"softcap(20)", "causal()", 128, 128, 0, 0},
                 {"score * score", NULL, 64, 64, 0, 0},
                 {NULL, "causal()", 128, 128, 1, SACCADE_GRADIENT_Q},
                 {"score * score", NULL, 64, 64, 0, SACCADE_GRADIENT_K | SACCADE_GRADIENT_V},
                 {NULL, NULL, 64, 64, 1, SACCADE_GRADIENT_V},
                 {NULL, "sliding_window(W)", 64, 64, 2, 0},
                 {NULL, "natten_2d(16, 16, 5, 5)", 64, 48, 2, 0},
                 {"score + float(kv - q) / 3.0", NULL, 64, 64, 0, 0}};

enum { INSTANCES = sizeof instances / sizeof instances[0] };

static void check_reports(const cu_state *s, const char *what)
{
    for (int n = 0; n < CU_PROGRAMS; n++) {
        const cu_report *report = &s->programs[n].image.report;
        if (report->spill_bytes || report->is_serialised)
            fail_msg("%s %s, %s: %d bytes spilled, serialised: %d", what, s->arch,
                     cu_program_kinds[n].name, report->spill_bytes, report->is_serialised);
    }
}

static void check_instance(int i, saccade_dtype dtype, const char *arch, int is_relaxed)
{
    saccade_error err = {0};
    char what[96];
    cu_form first;
    saccade_plan *plan = plan_for(instances[i].score, instances[i].mask, instances[i].D,
                                  instances[i].E, dtype);
    plan_problem p = plan->problem;
    const int is_sm90 = strcmp(arch, "sm_90a") == 0;
    cu_state s = {.family = dtype == SACCADE_F32 ? CU_F32 : is_sm90 ? CU_SM90 : CU_SM80};
    const cu_loaded *tiles = &s.programs[CU_BWD_TILES];
    p.is_relaxed = is_relaxed;
    if (instances[i].gradients)
        p.gradients = instances[i].gradients;
    snprintf(s.arch, sizeof s.arch, "%s", arch);
    snprintf(what, sizeof what, "score %s mask %s d%d",
             instances[i].score ? instances[i].score : "-",
             instances[i].mask ? instances[i].mask : "-", instances[i].D);
    if (cu_backward_emit(&s, &p, &plan->arena, &err) != SACCADE_OK
        || cu_compile_backward(&s, &p, &err) != SACCADE_OK)
        fail_msg("%s %s: %s", what, arch, err.message);
    check_reports(&s, what);
    assert_non_null(s.programs[CU_BWD_PLAIN].image.code);
    assert_non_null(s.programs[CU_BWD_PREPARE].image.code);
    assert_int_equal(!tiles->image.code, !s.programs[CU_BWD_FINISH].image.code);
    assert_int_equal(!!s.programs[CU_BWD_F32].image.code, is_sm90 && dtype == SACCADE_F32);
    assert_int_equal(!!s.programs[CU_BWD_SPLIT].image.code, is_sm90 && dtype == SACCADE_F32);
    if (dtype == SACCADE_F32)
        assert_null(tiles->image.code);
    else if (instances[i].has_tile && is_sm90 && instances[i].D > 128)
        assert_non_null(s.programs[CU_BWD_WIDE].image.code);
    else if (instances[i].has_tile && is_sm90) {
        assert_true(cu_backward_tile_choice(instances[i].D, instances[i].E, 0, &first));
        assert_int_equal(tiles->form.tile.groups, first.tile.groups);
        assert_int_equal(tiles->form.backward.has_helpers, first.backward.has_helpers);
        assert_non_null(tiles->image.code);
    }
    if (!is_sm90 || !cu_backward_is_bounded(&s, &p))
        assert_null(tiles->image.code);
    if (is_sm90 && dtype != SACCADE_F32 && !cu_backward_is_bounded(&s, &p))
        assert_non_null(s.programs[CU_BWD_WIDE].image.code);
    assert_int_equal(!!s.programs[CU_BWD_FEW].image.code,
                     is_sm90 && instances[i].has_tile == 2 && dtype != SACCADE_F32);
    cu_free_programs(&s);
    free(s.backward_text);
    saccade_plan_destroy(plan);
}

static void no_spills(void **state)
{
    (void)state;
    skip_without_nvrtc();
    check_instance(0, SACCADE_F32, "sm_80", 0);
    check_instance(1, SACCADE_F32, "sm_90a", 0);
    for (int i = 0; i < INSTANCES; i++) {
        if (i % 3 != 1 || is_thorough_run())
            check_instance(i, i & 1 ? SACCADE_F16 : SACCADE_BF16, "sm_90a", i == 2);
        if (i % 4 == 0 || (i % 2 == 0 && is_thorough_run()))
            check_instance(i, i & 2 ? SACCADE_BF16 : SACCADE_F16, "sm_80", 0);
    }
}

/* Device code of a score for backward. */
static strbuf emitted(const char *score, cu_mod_text *facts)
{
    saccade_mod *mod = case_mod(SACCADE_SCORE, score);
    const pass_facts *known;
    strbuf text;
    arena a;
    arena_init(&a);
    assert_int_equal(pass_facts_make(mod_function(mod), &a, &known, NULL), SACCADE_OK);
    const plan_problem p = {.sizes = {1, 4, 4, 64, 64, 64, 64},
                            .group = 1,
                            .heads_global = 4,
                            .scale = 0.125f,
                            .dtype = SACCADE_BF16,
                            .score = mod_function(mod),
                            .score_facts = known};
    strbuf_init(&text, 0);
    assert_int_equal(cu_emit_backward_mod(&p, &a, &text, facts, NULL), SACCADE_OK);
    arena_free(&a);
    saccade_mod_destroy(mod);
    return text;
}

/* Bounds hold, and are not far off; slopes without one have no sums in fixed point. */
static void bounds_of_slopes(void **state)
{
    static const struct {
        const char *score;
        double most;
    } rows[] = {{"softcap(20)", 1},
                {"score + 0.5 * (kv - q)", 1},
                {"score * 3.0", 3},
                {"score > 1.0 ? 0.5 * score : -2.0 * score", 2}, /* which jumps */
                {"score > 1.0 ? 5000.0 * score : score", INFINITY},
                {"score * sigmoid(score)", INFINITY},
                {"score * score", INFINITY}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        cu_mod_text facts;
        strbuf text = emitted(rows[i].score, &facts);
        if (isinf(rows[i].most)
                ? !isinf(facts.slope_most)
                : !(facts.slope_most >= rows[i].most && facts.slope_most < 2.01 * rows[i].most))
            fail_msg("%s: got %g, expected %g", rows[i].score, facts.slope_most, rows[i].most);
        assert_non_null(strstr(strbuf_text(&text), "slope4("));
        assert_int_equal(!strstr(strbuf_text(&text), "sac_tanh4("), i != 0);
        strbuf_free(&text);
    }
}

/* A score that masks and changes nothing else has no slopes to multiply weights by: where it is
 * -inf weights are 0. */
static void masking_scores_have_slope_one(void **state)
{
    static const struct {
        const char *score;
        int is_one;
    } rows[] = {{"score + 0.5", 1},
                {"q >= kv ? score : -inf", 1},
                {"q < kv ? -inf : score - float(q)", 1},
                {"!(q >= kv && q - kv < 9) ? -inf : score", 1},
                {"q >= kv ? (q - kv < 9 ? score + 0.5 : -inf) : -inf", 1},
                {"q >= kv ? score : (kv < 3 ? -inf : score + 1.0)", 1},
                {"q >= kv ? score * 2.0 : -inf", 0},
                {"q >= kv ? score : 0.0", 0},
                {"q >= kv ? score : inf", 0},
                {"q >= kv ? score : (q < 5 ? score * 2.0 : -inf)", 0},
                {"q < kv ? score : (q - kv < 9 ? 1.0 : -inf)", 0}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        cu_mod_text facts;
        strbuf text = emitted(rows[i].score, &facts);
        const int is_one = strstr(strbuf_text(&text), "#define SLOPE_ONE 1") != NULL;
        if (is_one != rows[i].is_one)
            fail_msg("%s: slope %s", rows[i].score, is_one ? "1" : "not 1");
        strbuf_free(&text);
    }
}

/* Where a score may be -inf, V may hold anything behind it. */
static void masking_scores_are_known(void **state)
{
    static const struct {
        const char *score;
        int is_masking;
    } rows[] = {{"q >= kv ? score : -inf", 1},
                {"score + (q >= kv ? 0.0 : -inf)", 1},
                {"score + log(float(kv % 3))", 1},
                {"score * (q >= kv ? 1.0 : inf)", 1},
                {"score * score", 1},
                {"score + 0.5", 0},
                {"score * 1.5", 0},
                {"q >= kv ? score : -1e30", 0},
                {"relative_bias()", 0},
                {"alibi()", 0},
                {"distance_decay(0.1)", 0},
                {"sandwich(16)", 0},
                {"softcap(20.0)", 0}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        cu_mod_text facts;
        strbuf text = emitted(rows[i].score, &facts);
        const int got = strstr(strbuf_text(&text), "#define SCORE_MAY_MASK 1") != NULL;
        if (got != rows[i].is_masking)
            fail_msg("%s: may mask %d", rows[i].score, got);
        strbuf_free(&text);
    }
}

/* ---- plans ---- */

static saccade_status make_plan(const char *arch, saccade_dtype dtype, uint32_t gradients,
                                saccade_plan **out, saccade_error *err)
{
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){1, 4, 2, 100, 200, 64, 64};
    p.dtype = dtype;
    p.backend = "cuda";
    p.arch = arch;
    p.gradients = gradients;
    return saccade_plan_create(NULL, &p, out, err);
}

enum { ALL = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

/* Two numbers a row lie in dQ where each of its bytes is its own and holds nothing yet. */
static void dense_results_hold_rows(const saccade_plan *plan)
{
    enum { B = 2, H = 4, Q = 100, D = 64, ROWS = 128 };
    const saccade_sizes sizes = {B, H, 2, Q, 200, D, D};
    const size_t most = plan_backward_workspace(plan, &sizes, NULL);
    const struct {
        int64_t batch, head, row;
        uint32_t added;
        int is_less;
    } rows[] = {
        {H * Q * D, Q *D, D, 0, 1},     {Q * H * D, D, H *D, 0, 1},
        {H * Q * 2 * D, Q *D, D, 0, 0}, {H * Q * D, Q *D, D, SACCADE_GRADIENT_Q, 0},
        {0, Q *D, D, 0, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const saccade_tensor dq = {.dtype = SACCADE_BF16,
                                   .rank = 4,
                                   .shape = {B, H, Q, D},
                                   .stride = {rows[i].batch, rows[i].head, rows[i].row, 1}};
        const plan_gradients g = {.dq = &dq, .added = rows[i].added};
        const size_t bytes = plan_backward_workspace(plan, &sizes, &g);
        assert_int_equal(most - bytes, rows[i].is_less ? B * H * ROWS * 8 : 0);
    }
}

/* What a plan for an architecture holds and says. */
static void plan_of_gradients(void **state)
{
    static const struct {
        const char *arch;
        uint32_t gradients;
        const char *program[4]; /* has; then has not */
        const char *says;
    } rows[] = {
        {"sm_90a", ALL, {"tiles", "plain", "prepare", "finish"}, "fixed point"},
        {"sm_80", ALL, {"plain", "prepare"}, "scores twice"},
        {"sm_80", 0, {NULL}, "problem: "},
    };
    static const char *const names[] = {"tiles", "plain", "prepare", "finish"};
    const saccade_sizes more = {2, 4, 2, 1000, 2000, 64, 64}, few = {1, 4, 2, 10, 20, 64, 64};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        char *text, line[64];
        if (make_plan(rows[i].arch, SACCADE_BF16, rows[i].gradients, &plan, &err)
            || saccade_plan_explain(plan, &text, &err))
            fail_msg("%s: %s", rows[i].arch, err.message);
        for (int n = 0; n < 4; n++) {
            int has = 0;
            for (int k = 0; k < 4 && rows[i].program[k]; k++)
                has |= strcmp(rows[i].program[k], names[n]) == 0;
            snprintf(line, sizeof line, "\nprogram backward %s: ", names[n]);
            if (!!strstr(text, line) != has)
                fail_msg("%s, gradients %u: %s\n%s", rows[i].arch, rows[i].gradients, names[n],
                         text);
        }
        assert_non_null(strstr(text, rows[i].says));
        assert_int_equal(!!strstr(text, "\nbackward workspace: "), !!rows[i].gradients);
        const size_t bytes = saccade_plan_backward_workspace(plan, &plan->problem.sizes);
        assert_int_equal(bytes > 0, !!rows[i].gradients);
        assert_true(saccade_plan_backward_workspace(plan, &few) <= bytes);
        assert_true(saccade_plan_backward_workspace(plan, &more) <= 32 * bytes);
        if (i == 0)
            dense_results_hold_rows(plan);
        saccade_free(text);
        saccade_plan_destroy(plan);
    }
}

/* Refused when the plan is made, in words that say what to do. */
static void refusals(void **state)
{
    static const struct {
        saccade_dtype dtype;
        uint32_t gradients;
        const char *says;
    } rows[] = {
        {SACCADE_F64, ALL, "takes bf16, f16 and f32"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        assert_int_equal(make_plan("sm_90a", rows[i].dtype, rows[i].gradients, &plan, &err),
                         SACCADE_EBACKEND);
        if (!strstr(err.message, rows[i].says))
            fail_msg("got '%s'", err.message);
    }
}

/* ---- on a device ---- */

/* One gradient: on the device among a pattern, and its truth. */
typedef struct gradient {
    saccade_tensor t;
    size_t bytes;
    double *gold;
    char *first; /* results of the first run */
} gradient;

enum { AROUND = 64 }; /* elements before and behind */

/* What is asked of a case: gradients, and how they are written. */
typedef struct request {
    uint32_t wanted, added; /* added: to ones */
    int is_f32, is_relaxed;
} request;

typedef struct backward_case {
    device_case d;
    request as;
    saccade_tensor captures[2][8]; /* score's, mask's */
    double *d_out, *d_lse;
    saccade_tensor d_out_there, d_lse_there;
    gradient g[3]; /* dq, dk, dv */
    void *workspace;
    size_t workspace_bytes;
} backward_case;

static uint64_t draw(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

static double draw_normal(uint64_t *seed)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (double)draw(seed) / 2147483648.0;
    return sum;
}

static double store(saccade_dtype dtype, void *to, double x)
{
    if (dtype == SACCADE_F32)
        return *(float *)to = (float)x;
    const uint16_t bits =
        dtype == SACCADE_BF16 ? bf16_from_f32((float)x) : f16_from_f32((float)x);
    memcpy(to, &bits, sizeof bits);
    return convert_element(dtype, to);
}

static void *there(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(saccade_device_alloc(0, bytes, &memory, NULL), SACCADE_OK);
    return memory;
}

static saccade_tensor dense(void *data, saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = {.data = data, .dtype = dtype, .rank = rank};
    int64_t step = 1;
    t.device = (saccade_device){SACCADE_CUDA, 0};
    for (int32_t i = rank - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = step;
        step *= shape[i];
    }
    return t;
}

/* dO in the problem's dtype and dlse, on both sides */
static void make_incoming(backward_case *c, uint64_t seed)
{
    const case_run *r = c->d.r;
    const saccade_sizes *s = &r->sizes;
    const int64_t rows = s->B * s->H * s->Q, n = rows * s->Dv;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    const size_t each = saccade_dtype_bytes(r->dtype);
    char *bits = malloc((size_t)n * each);
    float *lse = malloc((size_t)rows * sizeof *lse);
    c->d_out = malloc((size_t)n * sizeof *c->d_out);
    c->d_lse = malloc((size_t)rows * sizeof *c->d_lse);
    assert_true(bits && lse && c->d_out && c->d_lse);
    for (int64_t i = 0; i < n; i++)
        c->d_out[i] = store(r->dtype, bits + (size_t)i * each, draw_normal(&seed));
    for (int64_t i = 0; i < rows; i++)
        c->d_lse[i] = lse[i] = (float)draw_normal(&seed);
    const size_t shift = (size_t)c->d.options.shift * each;
    c->d_out_there =
        dense((char *)there((size_t)n * each + shift) + shift, r->dtype, 4, shape);
    c->d_lse_there = dense(there((size_t)rows * 4), SACCADE_F32, 3, shape);
    assert_int_equal(saccade_device_copy(0, c->d_out_there.data, bits, (size_t)n * each, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_device_copy(0, c->d_lse_there.data, lse, (size_t)rows * 4, NULL),
                     SACCADE_OK);
    free(bits);
    free(lse);
}

static void make_gradients(backward_case *c)
{
    const saccade_sizes *s = &c->d.r->sizes;
    const saccade_dtype dtype = c->as.is_f32 ? SACCADE_F32 : c->d.r->dtype;
    const size_t each = saccade_dtype_bytes(dtype);
    const int64_t shapes[3][4] = {{s->B, s->H, s->Q, s->D},
                                  {s->B, s->Hkv, s->KV, s->D},
                                  {s->B, s->Hkv, s->KV, s->Dv}};
    for (int i = 0; i < 3; i++) {
        const int64_t n = shapes[i][0] * shapes[i][1] * shapes[i][2] * shapes[i][3];
        gradient *g = &c->g[i];
        g->bytes = (size_t)(n + 2 * AROUND) * each;
        g->gold = calloc((size_t)n, sizeof *g->gold);
        assert_non_null(g->gold);
        g->t = dense((char *)there(g->bytes) + AROUND * each, dtype, 4, shapes[i]);
    }
}

/* elements of a gradient, without what lies around */
static int64_t count(const gradient *g)
{
    return (int64_t)(g->bytes / saccade_dtype_bytes(g->t.dtype)) - 2 * AROUND;
}

static char *base_of(const gradient *g)
{
    return (char *)g->t.data - AROUND * saccade_dtype_bytes(g->t.dtype);
}

/* captures of a mod by name, on the host or on the device */
static void resolve(const mod_fn *fn, const saccade_binding *all, int32_t n_all,
                    saccade_device_kind device, saccade_tensor *out)
{
    saccade_binding mine[8];
    int32_t n = 0;
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        for (int32_t j = 0; j < n_all; j++)
            if (strcmp(all[j].name, fn->captures[i].name) == 0)
                mine[n++] = all[j];
    if (fn)
        assert_int_equal(
            eval_resolve_on(fn, mine, n, device, device == SACCADE_CPU, out, NULL),
            SACCADE_OK);
}

static void solve(backward_case *c, int has_dlse)
{
    const case_run *r = c->d.r;
    const saccade_forward_args *a = &r->args;
    const plan_problem *p = &c->d.plan->problem;
    plan_run run = {.sizes = r->sizes,
                    .q = &r->q.t,
                    .k = &r->k.t,
                    .v = &r->v.t,
                    .positions = case_positions(a->positions),
                    .block_mask = a->block_mask};
    resolve(p->score, a->bindings, a->n_bindings, SACCADE_CPU, c->captures[0]);
    resolve(p->mask, a->bindings, a->n_bindings, SACCADE_CPU, c->captures[1]);
    eval_sizes(&run.sizes, run.score_env.size);
    eval_sizes(&run.sizes, run.mask_env.size);
    run.score_env.tensors = c->captures[0];
    run.mask_env.tensors = c->captures[1];
    assert_int_equal(ref_backward(p, &run, c->d_out, has_dlse ? c->d_lse : NULL, c->g[0].gold,
                                  c->g[1].gold, c->g[2].gold, NULL),
                     SACCADE_OK);
}

/* The pattern around, and ones where the result is added to them. */
static void clear_gradient(const gradient *g, int is_added)
{
    const size_t each = saccade_dtype_bytes(g->t.dtype);
    const float one = 1;
    char *host = malloc(g->bytes);
    assert_non_null(host);
    memset(host, 0xff, g->bytes);
    for (int64_t i = 0; is_added && i < count(g); i++) {
        if (g->t.dtype == SACCADE_F32)
            memcpy(host + (size_t)(AROUND + i) * each, &one, sizeof one);
        else
            store(g->t.dtype, host + (size_t)(AROUND + i) * each, 1);
    }
    assert_int_equal(saccade_device_copy(0, base_of(g), host, g->bytes, NULL), SACCADE_OK);
    free(host);
}

static void start(backward_case *c, int has_dlse)
{
    const saccade_forward_args *f = &c->d.args;
    saccade_backward_args a = backward_args_of(f);
    saccade_error err = {0};
    for (int i = 0; i < 3; i++)
        clear_gradient(&c->g[i], c->as.added >> i & 1);
    a.d_out = &c->d_out_there;
    a.d_lse = has_dlse ? &c->d_lse_there : NULL;
    a.d_q = c->as.wanted & SACCADE_GRADIENT_Q ? &c->g[0].t : NULL;
    a.d_k = c->as.wanted & SACCADE_GRADIENT_K ? &c->g[1].t : NULL;
    a.d_v = c->as.wanted & SACCADE_GRADIENT_V ? &c->g[2].t : NULL;
    a.accumulate = c->as.added;
    a.workspace = c->workspace;
    a.workspace_bytes = c->workspace_bytes;
    if (saccade_backward(c->d.plan, &a, &err) != SACCADE_OK)
        fail_msg("backward: %s: %s", err.where, err.message);
    if (saccade_device_synchronize(0, &err) != SACCADE_OK)
        fail_msg("backward: %s", err.message);
}

static char *fetch(const gradient *g)
{
    char *host = malloc(g->bytes);
    assert_non_null(host);
    assert_int_equal(saccade_device_copy(0, host, base_of(g), g->bytes, NULL), SACCADE_OK);
    return host;
}

/* Weights and dS are rounded once to the dtype before they are multiplied, and so is the
 * result: over a tensor that gives a relative error of 0.75 eps (docs/lab), and no element is
 * off by more than a few eps of the largest. In f32 products of split operands add a few eps
 * of 2^-22. Guards around the tensor keep their pattern. */
static void compare(const backward_case *c, int which, const char *host)
{
    static const char *const names[3] = {"dq", "dk", "dv"};
    const gradient *g = &c->g[which];
    const size_t each = saccade_dtype_bytes(g->t.dtype);
    const double eps = c->d.r->dtype == SACCADE_BF16  ? 0x1p-8
                       : c->d.r->dtype == SACCADE_F16 ? 0x1p-11
                                                      : 0x1p-19;
    const double before = c->as.added >> which & 1;
    double error = 0, norm = 0, most = 0, worst = 0;
    for (size_t i = 0; i < AROUND * each; i++)
        assert_true((unsigned char)host[i] == 0xff
                    && (unsigned char)host[g->bytes - 1 - i] == 0xff);
    for (int64_t i = 0; i < count(g); i++) {
        const double gold = g->gold[i] + before;
        const double x = convert_element(g->t.dtype, host + (size_t)(AROUND + i) * each);
        const double off = fabs(x - gold);
        error += off * off;
        norm += gold * gold;
        most = fmax(most, fabs(gold));
        if (!(off <= worst))
            worst = off;
    }
    if (!(sqrt(error) <= 2 * eps * sqrt(norm)) || !(worst <= 6 * eps * most))
        fail_msg("%s %s mask %s score %s q_offset %d kv_len %d shift %d wanted %u added %u f32 "
                 "%d: relative error %.3g, largest %.3g of %.3g",
                 names[which], c->d.r->c.problem, c->d.r->c.mask ? c->d.r->c.mask : "-",
                 c->d.r->c.score ? c->d.r->c.score : "-", c->d.r->c.q_offset,
                 c->d.r->c.kv_len, c->d.options.shift, c->as.wanted, c->as.added, c->as.is_f32,
                 sqrt(error / norm), worst, most);
}

/* The plan made again with sums of dQ in any order. */
static void relax(saccade_plan *plan, const saccade_block_mask *mask)
{
    saccade_error err = {0};
    plan->solver->destroy(plan);
    plan->problem.is_relaxed = 1;
    if (plan->solver->create(plan, &err) != SACCADE_OK
        || (mask && saccade_plan_prepare(plan, mask, &err) != SACCADE_OK))
        fail_msg("relaxed: %s", err.message);
}

static void open_case(case_run *r, const device_options *options, const request *as,
                      backward_case *c)
{
    memset(c, 0, sizeof *c);
    c->as = *as;
    r->problem.gradients = as->wanted;
    if (!device_case_open(r, options, &c->d) || !device_case_run(&c->d))
        fail_msg("%s", c->d.why);
    if (as->is_relaxed)
        relax(c->d.plan, c->d.mask);
    make_incoming(c, r->c.seed + 17);
    make_gradients(c);
    c->workspace_bytes = saccade_plan_backward_workspace(c->d.plan, &r->sizes);
    char *pattern = malloc(c->workspace_bytes);
    assert_non_null(pattern);
    memset(pattern, 0xff, c->workspace_bytes);
    c->workspace = there(c->workspace_bytes);
    assert_int_equal(
        saccade_device_copy(0, c->workspace, pattern, c->workspace_bytes, NULL), SACCADE_OK);
    free(pattern);
}

static void close_case(backward_case *c)
{
    const size_t shift =
        (size_t)c->d.options.shift * saccade_dtype_bytes(c->d_out_there.dtype);
    saccade_device_free(0, c->workspace);
    saccade_device_free(0, (char *)c->d_out_there.data - shift);
    saccade_device_free(0, c->d_lse_there.data);
    for (int i = 0; i < 3; i++) {
        saccade_device_free(0, base_of(&c->g[i]));
        free(c->g[i].gold);
        free(c->g[i].first);
    }
    free(c->d_out);
    free(c->d_lse);
    device_case_close(&c->d);
}

/* Each gradient close to the truth, twice the same bits unless relaxed; what is not wanted is
 * not touched. */
static void is_right(case_run *r, const device_options *options, const request *as)
{
    const int has_dlse = (int)(r->c.seed & 1);
    backward_case c;
    open_case(r, options, as, &c);
    solve(&c, has_dlse);
    for (int run = 0; run < 2; run++) {
        start(&c, has_dlse);
        for (int i = 0; i < 3; i++) {
            char *host = fetch(&c.g[i]);
            if (as->wanted >> i & 1)
                compare(&c, i, host);
            else
                for (size_t n = 0; n < c.g[i].bytes; n++)
                    assert_int_equal((unsigned char)host[n], 0xff);
            if (run && !as->is_relaxed && memcmp(host, c.g[i].first, c.g[i].bytes) != 0)
                fail_msg("gradient %d of %s: other bits in the second run", i, r->c.problem);
            free(c.g[i].first);
            c.g[i].first = host;
        }
    }
    close_case(&c);
}

/* All gradients; dq alone, in f32; dk, added to ones, and dv. */
static void holds(const forward_case *f, const device_options *options)
{
    static const request rows[] = {{.wanted = ALL},
                                   {.wanted = SACCADE_GRADIENT_Q, .is_f32 = 1},
                                   {.wanted = SACCADE_GRADIENT_K | SACCADE_GRADIENT_V,
                                    .added = SACCADE_GRADIENT_K}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        case_run r;
        case_make(f, &r);
        is_right(&r, options, &rows[i]);
        case_free(&r);
    }
}

static const device_options native = {0}, blocks = {.has_block_mask = 1};

typedef struct chosen_case {
    forward_case c;
    device_options o;
} chosen_case;

static void all_hold(const chosen_case *rows, size_t n)
{
    if (!has_device())
        skip();
    for (size_t i = 0; i < n; i++)
        holds(&rows[i].c, &rows[i].o);
}

#define TILES "SACCADE_CUDA_TILES"

/* Masks whose rows may see few keys have a program of their own, which cases of this size would
 * leave to small tiles otherwise. */
static void few_keys(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b2 h2 q330 kv330 d64 bf16", .mask = "document(doc) && causal()"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h4/2 q200 kv300 d64 f16",
          .mask = "sliding_window(W)",
          .q_offset = 100,
          .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b2 h4/1 q130 kv257 d40 dv64 bf16", .mask = "document(doc)"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q260 kv200 d64 dv24 bf16",
          .mask = "document(doc)",
          .score = "softcap(20)",
          .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q300 kv300 d48 f16",
          .mask = "q % 3 == kv % 5 || q >= kv",
          .score = "alibi()"},
         {.has_block_mask = 1}},
        {{.problem = "b2 h2 q100 kv200 d64 bf16", .mask = "sliding_window(W)", .kv_len = 90},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q257 kv300 d64 bf16", .mask = "document(doc)", .layout = CASE_BNHD},
         {.has_block_mask = 1}},
    };
    (void)state;
    setenv(TILES, "small", 1);
    all_hold(rows, sizeof rows / sizeof rows[0]);
    unsetenv(TILES);
}

/* Every kernel once: what tools/cuda-sanitize runs. */
static void few_of_each(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b1 h2/1 q130 kv200 d64 bf16", .mask = "causal()", .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q130 kv200 d128 f16", .mask = "document(doc)"}, {0}},
        {{.problem = "b1 h2 q100 kv150 d128 bf16", .score = "softcap(20)"}, {0}},
        {{.problem = "b1 h1 q70 kv130 d256 bf16", .mask = "causal()"}, {.has_block_mask = 1}},
        {{.problem = "b1 h1 q70 kv130 d36 dv50 bf16"}, {.shift = 1}},
        {{.problem = "b1 h2/1 q70 kv130 d128 dv64 f32", .mask = "causal()"},
         {.has_block_mask = 1}},
    };
    static const chosen_case few = {
        {.problem = "b1 h2/1 q130 kv200 d64 bf16", .mask = "document(doc)"},
        {.has_block_mask = 1}};
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
    setenv(TILES, "small", 1);
    all_hold(&few, 1);
    unsetenv(TILES);
}

static void lengths(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b1 h2 q200 kv300 d64 bf16"}, {0}},
        {{.problem = "b1 h2 q500 kv700 d64 bf16", .kv_len = 555}, {0}},
        {{.problem = "b2 h2 q300 kv500 d128 f16", .mask = "causal()", .q_offset = 170,
          .kv_offset = 3, .kv_len = 450, .seed = 1},
         {0}},
        {{.problem = "b1 h2/1 q70 kv130 d128 bf16", .seed = 1}, {0}},
        {{.problem = "b1 h2/1 q170 kv330 d64 dv128 bf16"}, {0}},
        {{.problem = "b1 h2/1 q170 kv330 d128 dv64 f16"}, {0}},
        /* too many tiles for those of short runs */
        {{.problem = "b4 h16 q70 kv1000 d64 bf16", .seed = 1}, {0}},
        {{.problem = "b4 h16 q70 kv800 d64 f16", .mask = "causal()", .q_offset = 700},
         {.has_block_mask = 1}},
        /* more tiles than multiprocessors, and some without a live key */
        {{.problem = "b5 h16 q70 kv500 d64 bf16", .kv_len = 200, .seed = 1}, {0}},
        {{.problem = "b5 h16 q130 kv400 d128 bf16", .kv_len = 130, .seed = 1}, {0}},
        /* many heads of few keys */
        {{.problem = "b64 h5 q30 kv40 d16 bf16"}, {0}},
        {{.problem = "b60 h4 q60 kv100 d64 f16", .mask = "causal()", .q_offset = 40}, {0}},
        {{.problem = "b64 h3 q50 kv69 d32 bf16", .score = "softcap(20)", .kv_len = 60}, {0}},
        {{.problem = "b30 h3 q20 kv260 d40 dv64 bf16", .layout = CASE_BNHD}, {0}},
    };
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
}

static void masks(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b2 h4/2 q700 kv700 d128 bf16", .mask = "causal()", .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b2 h4/1 q500 kv650 d64 f16", .mask = "sliding_window(W)"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2/1 q400 kv400 d128 bf16", .mask = "document(doc)"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q300 kv300 d80 bf16", .mask = "document(doc) && causal()"}, {0}},
        {{.problem = "b1 h2 q150 kv300 d128 bf16", .mask = "kv < q - 60"}, {0}},
    };
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
}

static void scores(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b1 h4/2 q256 kv384 d64 bf16", .score = "softcap(20)", .mask = "causal()"},
         {0}},
        {{.problem = "b1 h3 q200 kv250 d64 bf16",
          .score = "score * 2.0 + float(kv - q) / float(3 * h)"}, /* by 0: 0 */
         {0}},
        {{.problem = "b1 h4 q256 kv384 d128 bf16", .score = "alibi()", .mask = "causal()"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q200 kv260 d64 bf16", .score = "score + 0.1 * score * score"}, {0}},
        {{.problem = "b2 h4/2 q300 kv450 d128 bf16",
          .score = "score + 0.1 * score * score",
          .mask = "document(doc) && causal()",
          .kv_len = 430,
          .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b1 h4/1 q333 kv290 d80 dv48 f16",
          .score = "score * sigmoid(score)",
          .mask = "causal()",
          .q_offset = 50,
          .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b2 h2 q333 kv290 d32 dv64 bf16",
          .score = "score * sigmoid(score)",
          .mask = "sliding_window(W)"},
         {.has_block_mask = 1}},
        {{.problem = "b2 h2 q333 kv290 d64 bf16", .score = "score > 0.5 ? score : 0.1 * score"},
         {0}},
    };
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
}

/* Head dims and addresses that tensor copies do not take. */
static void placements(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b1 h2 q130 kv200 d64 bf16", .mask = "causal()"}, {.shift = 3}},
        {{.problem = "b1 h2 q130 kv200 d35 dv20 f16", .mask = "causal()"}, {0}},
        {{.problem = "b1 h2/1 q150 kv170 d192 dv128 bf16", .mask = "causal()"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h1 q150 kv170 d256 bf16", .score = "softcap(20)"}, {0}},
    };
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
}

static void floats(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b2 h4/2 q200 kv300 d64 f32", .mask = "causal()", .q_offset = 100,
          .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q130 kv200 d128 f32", .score = "softcap(20)"}, {0}},
        {{.problem = "b1 h2/1 q100 kv150 d256 f32", .mask = "causal()"}, {0}},
        {{.problem = "b1 h2 q70 kv130 d35 dv90 f32", .mask = "sliding_window(W)"}, {0}},
        {{.problem = "b1 h2 q100 kv170 d192 dv128 f32", .kv_len = 150}, {.shift = 3}},
        {{.problem = "b1 h4/2 q100 kv170 d40 dv23 f32", .mask = "causal()", .kv_len = 150},
         {.shift = 3}},
        {{.problem = "b1 h2 q90 kv200 d20 dv64 f32", .score = "softcap(20)",
          .mask = "sliding_window(W)", .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b2 h2/1 q290 kv330 d128 f32", .mask = "document(doc)", .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q100 kv170 d96 dv64 f32", .score = "alibi()", .kv_len = 150}, {0}},
        {{.problem = "b1 h2 q200 kv260 d64 f32", .score = "score + 0.1 * score * score"}, {0}},
    };
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
}

/* Head dims above 128: tiles of their own. */
static void wide_heads(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b2 h4/2 q300 kv450 d256 bf16", .mask = "causal()", .q_offset = 150,
          .seed = 1},
         {.has_block_mask = 1}},
        {{.problem = "b1 h4/2 q260 kv200 d192 dv128 bf16", .mask = "document(doc) && causal()"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q200 kv330 d160 f16", .score = "alibi()", .seed = 1}, {0}},
        {{.problem = "b1 h2/1 q130 kv300 d128 dv256 bf16", .mask = "sliding_window(W)",
          .kv_len = 250},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q200 kv260 d256 f16", .score = "score + 0.1 * score * score"}, {0}},
    };
    (void)state;
    all_hold(rows, sizeof rows / sizeof rows[0]);
}

static void relaxed(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b2 h4/2 q500 kv700 d64 bf16", .mask = "causal()", .kv_len = 655},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q300 kv300 d128 bf16", .score = "score + 0.1 * score * score"},
         {0}},
    };
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        case_run r;
        case_make(&rows[i].c, &r);
        is_right(&r, &rows[i].o, &(request){.wanted = ALL, .is_relaxed = 1});
        case_free(&r);
    }
}

/* NaN in every key that the mask below hides from all queries. */
static void poison_keys(const case_run *r)
{
    const saccade_tensor *k = &r->k.t;
    const int64_t each = (int64_t)saccade_dtype_bytes(k->dtype);
    for (int64_t b = 0; b < k->shape[0]; b++)
        for (int64_t h = 0; h < k->shape[1]; h++)
            for (int64_t n = 7; n < k->shape[2]; n += 16)
                for (int64_t d = 0; d < k->shape[3]; d++)
                    store(k->dtype,
                          (char *)k->data
                              + (b * k->stride[0] + h * k->stride[1] + n * k->stride[2]
                                 + d * k->stride[3])
                                    * each,
                          NAN);
}

#define BEHIND "kv % 16 == 7 ? q >= Q : q >= kv"

static void nan_at_masked_keys(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b1 h2/1 q200 kv300 d64 bf16", .mask = "kv % 16 != 7"}, {0}},
        {{.problem = "b1 h2 q300 kv300 d128 f16", .mask = "kv % 16 != 7 && q >= kv"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q100 kv200 d256 bf16", .mask = "kv % 16 != 7"}, {0}},
        /* the mask leaves these keys to positions behind the last query of a block */
        {{.problem = "b1 h2/1 q200 kv230 d64 bf16", .mask = BEHIND, .seed = 1}, {0}},
        {{.problem = "b1 h2 q330 kv350 d128 f16", .mask = BEHIND}, {.has_block_mask = 1}},
        {{.problem = "b1 h2 q130 kv200 d64 f16", .mask = BEHIND}, {.has_block_mask = 1}},
        {{.problem = "b1 h2/1 q200 kv300 d64 bf16", .mask = "kv % 16 != 7"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q100 kv120 d192 bf16", .mask = BEHIND, .score = "softcap(20)"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q70 kv120 d64 bf16", .mask = BEHIND}, {.shift = 3}},
        {{.problem = "b1 h2/1 q200 kv300 d64 f32", .mask = "kv % 16 != 7"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h2 q100 kv150 d128 f32", .mask = BEHIND}, {.has_block_mask = 1}},
    };
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < 2 * (sizeof rows / sizeof rows[0]); i++) {
        case_run r;
        setenv(TILES, i & 1 ? "small" : "", 1);
        case_make(&rows[i / 2].c, &r);
        poison_keys(&r);
        is_right(&r, &rows[i / 2].o, &(request){.wanted = ALL});
        case_free(&r);
    }
    unsetenv(TILES);
}

/* Rows of which f32 does not tell the weights have gradients of exact zeros. */
static void low_rows_are_zeros(void **state)
{
    static const chosen_case rows[] = {
        {{.problem = "b1 h2 q100 kv200 d64 bf16", .score = "score - 3e38"}, {0}},
        {{.problem = "b1 h2 q100 kv200 d128 bf16", .score = "score - 3e38"}, {.shift = 3}},
    };
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        backward_case c;
        case_run r;
        case_make(&rows[i].c, &r);
        open_case(&r, &rows[i].o, &(request){.wanted = ALL}, &c);
        start(&c, 0);
        for (int g = 0; g < 3; g++) {
            char *host = fetch(&c.g[g]);
            for (int64_t n = 0; n < count(&c.g[g]); n++)
                assert_true(convert_element(c.g[g].t.dtype, host + (AROUND + n) * 2) == 0);
            free(host);
        }
        close_case(&c);
        case_free(&r);
    }
}

static int64_t environment(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoll(text, NULL, 10) : otherwise;
}

/* Problems of either dtype. */
static void draw_cases(const char *one, const char *other)
{
    static const char *const texts[] = {NULL, "causal()", "sliding_window(W)", "document(doc)",
                                        "q % 3 == kv % 5 || q >= kv"};
    static const char *const mods[] = {NULL, NULL, "softcap(20)", "alibi()"};
    static const int dims[] = {64, 128, 96, 40, 33, 256, 192};
    const int64_t n = environment("SACCADE_CUDA_CASES", 12);
    uint64_t seed = (uint64_t)environment("SACCADE_CUDA_SEED", 1);
    if (!has_device())
        skip();
    for (int64_t i = 0; i < n; i++) {
        char text[96];
        const int group = 1 + (int)(draw(&seed) % 3);
        snprintf(text, sizeof text, "b%d h%d/%d q%d kv%d d%d %s", 1 + (int)(draw(&seed) % 2),
                 group * 2, 2, 64 + (int)(draw(&seed) % 500), 64 + (int)(draw(&seed) % 500),
                 dims[draw(&seed) % 7], draw(&seed) % 2 ? one : other);
        const forward_case c = {.problem = text,
                                .mask = texts[draw(&seed) % 5],
                                .score = mods[draw(&seed) % 4],
                                .layout = (case_layout)(draw(&seed) % 3),
                                .q_offset = (int32_t)(draw(&seed) % 2 * 100),
                                .seed = draw(&seed)};
        setenv(TILES, draw(&seed) % 2 ? "small" : "", 1);
        holds(&c, draw(&seed) % 2 ? &blocks : &native);
    }
    unsetenv(TILES);
}

static void random_cases(void **state)
{
    (void)state;
    draw_cases("bf16", "f16");
}

static void random_floats(void **state)
{
    (void)state;
    draw_cases("f32", "f32");
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_fit),
        cmocka_unit_test(short_runs_take_smaller_tiles),
        cmocka_unit_test(parts_are_as_good_as_smaller_tiles),
        cmocka_unit_test(few_blocks_take_two_kernels),
        cmocka_unit_test(no_spills),
        cmocka_unit_test(bounds_of_slopes),
        cmocka_unit_test(masking_scores_have_slope_one),
        cmocka_unit_test(masking_scores_are_known), cmocka_unit_test(plan_of_gradients),
        cmocka_unit_test(refusals),         cmocka_unit_test(few_of_each),
        cmocka_unit_test(lengths),          cmocka_unit_test(few_keys),
        cmocka_unit_test(masks),            cmocka_unit_test(scores),
        cmocka_unit_test(placements),       cmocka_unit_test(wide_heads),
        cmocka_unit_test(floats),
        cmocka_unit_test(relaxed),
        cmocka_unit_test(random_cases),     cmocka_unit_test(nan_at_masked_keys),
        cmocka_unit_test(low_rows_are_zeros), cmocka_unit_test(random_floats),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
