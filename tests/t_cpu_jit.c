/* Compiled score passes against the interpreter: masks bit for bit, scores within the fast
 * forms' error, over random mods, every operation, odd tiles and both levels. Single values and
 * the error of curves: t_cpu_jit_values.c. */
#include "base/cpu_features.h"
#include "cpu/jit/jit_graph.h"
#include "pass/pass.h"
#include "support/strip_levels.h"
#include "support/random_mod.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 21, COLS = 77, LD = 128, KV = 160, Q = 48 };

static const saccade_sizes sizes = {2, 3, 1, Q, KV, 16, 16};

static void *aligned(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(p);
    return p;
}

typedef struct engine {
    const mod_fn *fn;
    const pass_facts *facts;
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    eval_env env;
    const eval_prog *prog;
    void *memory;
    eval_state *state;
} engine;

static void engine_start(engine *e, const saccade_mod *mod, const saccade_binding *bindings,
                         int32_t n, arena *a)
{
    memset(e, 0, sizeof *e);
    eval_sizes(&sizes, e->env.size);
    e->env.tensors = e->tensors;
    if (!mod)
        return;
    e->fn = mod_function(mod);
    assert_int_equal(pass_facts_make(e->fn, a, &e->facts, NULL), SACCADE_OK);
    assert_int_equal(eval_resolve(e->fn, bindings, n, 1, e->tensors, NULL), SACCADE_OK);
    assert_int_equal(eval_compile(e->fn, a, &e->prog, NULL), SACCADE_OK);
    e->memory = aligned(eval_state_bytes(e->prog));
    e->state = eval_begin(e->prog, &e->env, e->memory);
}

/* What the interpreter makes of one row, as jit_tile promises it. */
static void expect_row(engine *score, engine *mask, int32_t b, int32_t h, int32_t q,
                       int32_t kv0, float scale, float *s)
{
    uint8_t live[LD];
    for (int j = 0; j < COLS; j++)
        s[j] *= scale;
    if (score->fn) {
        eval_head(score->state, b, h);
        eval_row(score->state, q);
        eval_score(score->state, kv0, COLS, s);
    }
    if (mask->fn) {
        eval_head(mask->state, b, h);
        eval_row(mask->state, q);
        eval_mask(mask->state, kv0, COLS, live);
        for (int j = 0; j < COLS; j++)
            s[j] = live[j] ? s[j] : -INFINITY;
    }
}

static int close_enough(float got, float want, float size)
{
    if (isnan(want) || isinf(want) || isnan(got) || isinf(got))
        return (isnan(want) && isnan(got)) || got == want;
    return fabsf(got - want) <= 1e-5f * (size + fabsf(want));
}

static void compare_tile(uint64_t seed, int32_t level, const random_mod *score_mod,
                         const random_mod *mask_mod)
{
    arena a;
    engine score, mask;
    jit_program *program = NULL;
    saccade_error err;
    arena_init(&a);
    engine_start(&score, score_mod ? score_mod->mod : NULL,
                 score_mod ? score_mod->bindings : NULL, score_mod ? score_mod->n_bindings : 0,
                 &a);
    engine_start(&mask, mask_mod ? mask_mod->mod : NULL, mask_mod ? mask_mod->bindings : NULL,
                 mask_mod ? mask_mod->n_bindings : 0, &a);
    const saccade_status made = jit_create(score.facts, mask.fn, level, &program, &err);
    if (made == SACCADE_EBACKEND) {
        assert_non_null(strstr(err.message, "jit: got a mod"));
    } else {
        assert_int_equal(made, SACCADE_OK);
        void *memory = aligned(jit_state_bytes(program));
        float *s = aligned(ROWS * LD * 4), want[LD], row_max[ROWS];
        jit_state *state = jit_begin(program, &score.env, &mask.env, 0.125f, memory);
        assert_non_null(state);
        for (int i = 0; i < ROWS * LD; i++)
            s[i] = (float)((int)(seed + (uint64_t)i * 2654435761u) % 1000) * 0.03f;
        float *copy = aligned(ROWS * LD * 4);
        memcpy(copy, s, ROWS * LD * 4);
        jit_head(state, 1, 2);
        jit_rows(state, 5, Q - 5);
        jit_cols(state, 32, KV - 32);
        jit_tile(state, s, LD, 3, ROWS, 32, COLS, 1, row_max);
        for (int i = 0; i < ROWS; i++) {
            memcpy(want, copy + i * LD, sizeof want);
            expect_row(&score, &mask, 1, 2, 5 + 3 + i, 64, 0.125f, want);
            float top = -INFINITY;
            for (int j = 0; j < COLS; j++) {
                const float got = s[i * LD + j];
                if (!close_enough(got, want[j], 30.0f)) {
                    printf("seed %llu level %d row %d column %d: got %g, expected %g\n%s\n%s\n",
                           (unsigned long long)seed, level, i, j, (double)got, (double)want[j],
                           score_mod ? score_mod->text : "", mask_mod ? mask_mod->text : "");
                    fail();
                }
                if (mask.fn) /* masks have one truth */
                    assert_int_equal(got == -INFINITY, want[j] == -INFINITY);
            }
            for (int j = 0; j < (COLS + JIT_GROUP - 1) / JIT_GROUP * JIT_GROUP; j++)
                top = s[i * LD + j] > top ? s[i * LD + j] : top;
            assert_true(row_max[i] == top || isnan(row_max[i]));
        }
        free(copy);
        free(s);
        free(memory);
        jit_destroy(program);
    }
    free(score.memory);
    free(mask.memory);
    arena_free(&a);
}

static int32_t best_level(void)
{
    cpu_level level;
    assert_int_equal(cpu_level_allowed(&level, NULL), SACCADE_OK);
    return (int32_t)level;
}

static int jit_is_here(void)
{
    jit_program *p = NULL;
    if (jit_create(NULL, NULL, best_level(), &p, NULL) != SACCADE_OK)
        return 0;
    jit_destroy(p);
    return 1;
}

static void random_tiles(int with_score, int with_mask)
{
    if (!jit_is_here())
        skip();
    for (uint64_t seed = 1; seed <= 400; seed++) {
        random_mod score, mask;
        if (with_score)
            random_mod_make(seed, SACCADE_SCORE, RANDOM_MOD_TAME, 2 + (int)(seed % 3), &sizes,
                            &score);
        if (with_mask)
            random_mod_make(seed + 1000, SACCADE_MASK, 0, 2 + (int)(seed % 4), &sizes, &mask);
        for (int32_t level = CPU_AVX2; level <= CPU_AVX512 && level <= best_level(); level++)
            compare_tile(seed, level, with_score ? &score : NULL, with_mask ? &mask : NULL);
        if (with_score)
            random_mod_free(&score);
        if (with_mask)
            random_mod_free(&mask);
    }
}

static void test_masks(void **unused)
{
    (void)unused;
    random_tiles(0, 1);
}

static void test_scores(void **unused)
{
    (void)unused;
    random_tiles(1, 0);
}

static void test_both(void **unused)
{
    (void)unused;
    random_tiles(1, 1);
}

/* ---- every operation, differing from score to score ---- */

static saccade_mod *bind(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *bound;
    saccade_error err;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &bound, &err), SACCADE_OK);
    saccade_mod_destroy(generic);
    return bound;
}

/* Each line of ops.def by a fn of q and kv (or the score): int operands q - kv and kv - 70,
 * floats their thirds, bools comparisons of them. */
static const mod_fn *one_op(mod_op op, int scored, arena *a)
{
    const char *sig = mod_op_infos[op].signature;
    mod_builder *b = mod_builder_create(a, SACCADE_SCORE, NULL, 0);
    const uint32_t q = mod_emit(b, OP_VAR, NULL, 0, VAR_Q, 0, 0);
    const uint32_t kv = mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    const uint32_t ints[3] = {
        mod_emit2(b, OP_isub, q, kv),
        mod_emit2(b, OP_iadd, mod_emit2(b, OP_isub, kv, q), mod_emit_int(b, 9)),
        mod_emit2(b, OP_ixor, q, kv)};
    uint32_t x[3];
    int n = 0;
    for (const char *p = sig + 2; *p; p++, n++) {
        const uint32_t third =
            mod_emit2(b, OP_fdiv, mod_emit1(b, OP_i2f, ints[n]), mod_emit_float(b, 3.0f));
        const uint32_t score = mod_emit(b, OP_SCORE, NULL, 0, 0, 0, 0);
        x[n] = *p == 'I'          ? ints[n]
               : *p == 'B'        ? mod_emit2(b, OP_ilt, ints[n], mod_emit_int(b, 3))
               : scored && n == 0 ? score
                                  : third;
    }
    uint32_t r = mod_emit(b, op, x, (uint32_t)n, 0, 0, 0);
    if (sig[0] == 'B')
        r = mod_emit1(b, OP_b2i, r);
    if (sig[0] != 'F')
        r = mod_emit1(b, OP_i2f, r);
    const mod_fn *fn = NULL;
    assert_int_equal(mod_finish(b, r, &fn, NULL), SACCADE_OK);
    return fn;
}

static void test_operations(void **unused)
{
    (void)unused;
    if (!jit_is_here())
        skip();
    for (int op = OP_LOAD + 1; op < MOD_OP_COUNT; op++) {
        for (int scored = 0; scored < 2; scored++) {
            arena a;
            arena_init(&a);
            const mod_fn *fn = one_op((mod_op)op, scored, &a);
            random_mod as_mod = {0};
            assert_int_equal(mod_from_function(fn, &as_mod.mod, NULL), SACCADE_OK);
            snprintf(as_mod.text, sizeof as_mod.text, "%s%s", mod_op_infos[op].name,
                     scored ? " of the score" : "");
            for (int32_t l = CPU_AVX2; l <= CPU_AVX512 && l <= best_level(); l++)
                compare_tile((uint64_t)op, l, &as_mod, NULL);
            saccade_mod_destroy(as_mod.mod);
            arena_free(&a);
        }
    }
}

static void test_extremes(void **unused)
{
    (void)unused;
    if (!jit_is_here())
        skip();
    static const struct {
        const char *text;
        float in, out;
    } cases[] = {
        {"exp(score)", -INFINITY, 0},
        {"exp(score)", INFINITY, INFINITY},
        {"exp(score)", NAN, NAN},
        {"exp2(score)", -INFINITY, 0},
        {"exp2(score)", 1000, INFINITY},
        {"tanh(score)", INFINITY, 1},
        {"tanh(score)", -INFINITY, -1},
        {"tanh(score)", NAN, NAN},
        {"sigmoid(score)", -INFINITY, 0},
        {"sigmoid(score)", INFINITY, 1},
        {"1.0 / score", 0, 0},
        {"score < 0 ? -inf : score", -2, -INFINITY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        saccade_mod *mod = bind(SACCADE_SCORE, cases[i].text);
        for (int32_t l = CPU_AVX2; l <= CPU_AVX512 && l <= best_level(); l++) {
            arena a;
            engine score, none;
            jit_program *program;
            arena_init(&a);
            engine_start(&score, mod, NULL, 0, &a);
            engine_start(&none, NULL, NULL, 0, &a);
            assert_int_equal(jit_create(score.facts, NULL, l, &program, NULL), SACCADE_OK);
            void *memory = aligned(jit_state_bytes(program));
            jit_state *state = jit_begin(program, &score.env, &none.env, 1.0f, memory);
            float s[JIT_GROUP], top;
            for (int j = 0; j < JIT_GROUP; j++)
                s[j] = cases[i].in;
            jit_head(state, 0, 0);
            jit_rows(state, 0, 1);
            jit_cols(state, 0, JIT_GROUP);
            jit_tile(state, s, JIT_GROUP, 0, 1, 0, JIT_GROUP, 0, &top);
            for (int j = 0; j < JIT_GROUP; j++)
                if (!(s[j] == cases[i].out || (isnan(s[j]) && isnan(cases[i].out))))
                    fail_msg("%s at %g: got %g", cases[i].text, (double)cases[i].in,
                             (double)s[j]);
            free(score.memory);
            free(memory);
            jit_destroy(program);
            arena_free(&a);
        }
        saccade_mod_destroy(mod);
    }
}

/* How many arrays of diagonals a tile reads, and that what it makes of them is right. */
static void test_diagonals(void **unused)
{
    static const struct {
        saccade_kind kind;
        const char *text;
        int reads;
    } cases[] = {
        {SACCADE_SCORE, "score - 0.3 * log(1 + abs(q - kv))", 1},
        {SACCADE_SCORE, "score * cos((kv - q) * 0.1) + sin((q - kv) * 0.2)", 2},
        {SACCADE_SCORE, "score + float((kv - q) * 3 / 7 + q % 5)", 1},
        {SACCADE_SCORE, "3 * q - 3 * kv > 12 && abs(q - kv) < 30 ? score : score + 1", 1},
        {SACCADE_SCORE, "q = q + 3; kv = kv - 2; score + log(1 + abs(h - q + kv + KV)) * b", 1},
        {SACCADE_SCORE, "score + float(kv - q) * 0.1", 0},
        {SACCADE_MASK, "abs(q - kv) < 20 && (q - kv) % 3 != 1", 1},
        {SACCADE_MASK, "q >= kv && (q - kv) % 5 == 0 || kv % 7 == 1", 1},
        /* by one operation, and not of kv - q alone */
        {SACCADE_MASK, "q >= kv", 0},
        {SACCADE_SCORE, "score + float(2 * q - kv)", 0},
        {SACCADE_SCORE, "score + float(q * kv) - float(q) * 0.5", 0},
        {SACCADE_SCORE, "score + (float(q) - float(kv)) * 0.5", 0},
    };
    (void)unused;
    if (!jit_is_here())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int32_t level = CPU_AVX2; level <= CPU_AVX512 && level <= best_level(); level++) {
            const int is_score = cases[i].kind == SACCADE_SCORE;
            random_mod mod = {.mod = bind(cases[i].kind, cases[i].text)};
            const mod_fn *fn = mod_function(mod.mod);
            const pass_facts *facts;
            jit_program *program;
            arena a;
            int reads = 0;
            snprintf(mod.text, sizeof mod.text, "%s", cases[i].text);
            compare_tile(i, level, is_score ? &mod : NULL, is_score ? NULL : &mod);
            arena_init(&a);
            assert_int_equal(pass_facts_make(fn, &a, &facts, NULL), SACCADE_OK);
            assert_int_equal(jit_create(is_score ? facts : NULL, is_score ? NULL : fn, level,
                                        &program, NULL),
                             SACCADE_OK);
            const jit_graph *g = jit_graph_of(program);
            for (uint32_t k = 0; k < g->n_nodes; k++)
                reads += g->nodes[k].is_diagonal;
            if (reads != cases[i].reads)
                fail_msg("%s: reads %d arrays of diagonals", cases[i].text, reads);
            jit_destroy(program);
            arena_free(&a);
            saccade_mod_destroy(mod.mod);
        }
}

static void test_print(void **unused)
{
    (void)unused;
    if (!jit_is_here())
        skip();
    saccade_mod *mask = bind(SACCADE_MASK, "q >= kv");
    jit_program *p;
    strbuf out;
    strbuf_init(&out, 0);
    assert_int_equal(jit_create(NULL, mod_function(mask), best_level(), &p, NULL), SACCADE_OK);
    assert_int_equal(jit_print(p, &out, NULL), SACCADE_OK);
    assert_non_null(strstr(strbuf_text(&out), "vmaxps"));
    assert_non_null(strstr(strbuf_text(&out), "ret"));
    strbuf_free(&out);
    jit_destroy(p);
    saccade_mod_destroy(mask);
}

/* What is called and read is found through the call's arguments: equal code wherever it lies,
 * without the address of any function of the interpreter's. */
static void code_holds_no_address(void **unused)
{
    enum { BYTES = 1 << 16 };
    static const mod_capture captures[] = {{"t", SACCADE_F64, MOD_FLOAT, 2}};
    const pass_facts *facts;
    const mod_fn *fn;
    jit_graph graph;
    arena a;
    (void)unused;
    if (!jit_is_here())
        skip();
    arena_init(&a);
    mod_builder *b = mod_builder_create(&a, SACCADE_SCORE, captures, 1);
    const uint32_t score = mod_emit(b, OP_SCORE, NULL, 0, 0, 0, 0);
    const uint32_t at[2] = {mod_emit(b, OP_VAR, NULL, 0, VAR_Q, 0, 0),
                            mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0)};
    const uint32_t bias = mod_emit(b, OP_LOAD, at, 2, 0, 0, 0); /* f64: read by a call */
    const uint32_t sum = mod_emit2(b, OP_fadd, mod_emit1(b, OP_flog, score), bias);
    assert_int_equal(mod_finish(b, sum, &fn, NULL), SACCADE_OK);
    assert_int_equal(pass_facts_make(fn, &a, &facts, NULL), SACCADE_OK);
    assert_int_equal(jit_build_graph(facts, NULL, &a, &graph, NULL), SACCADE_OK);
    uint8_t *code = malloc(2 * BYTES);
    for (int32_t l = CPU_AVX2; l <= CPU_AVX512 && l <= best_level(); l++) {
        const strip_table *strips = strip_level[l];
        size_t size[2];
        int32_t spills;
        for (int i = 0; i < 2; i++)
            assert_int_equal(jit_emit_tile(&graph, 0, l, code + i * (BYTES - 64), BYTES - 64,
                                           &size[i], &spills, NULL),
                             SACCADE_OK);
        assert_true(size[0] == size[1] && memcmp(code, code + BYTES - 64, size[0]) == 0);
        assert_null(memmem(code, size[0], &strips->op[OP_flog], sizeof(strip_op *)));
        assert_null(memmem(code, size[0], &strips, sizeof strips));
    }
    free(code);
    arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_operations), cmocka_unit_test(test_masks),
        cmocka_unit_test(test_scores),     cmocka_unit_test(test_both),
        cmocka_unit_test(test_diagonals),  cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_print),      cmocka_unit_test(code_holds_no_address),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
