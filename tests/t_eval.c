/* Evaluation of mods: interpreter, oracle and the plainest walk over nodes agree bit for bit
   on random mods (what is downstream of the score: interpreter and walk), on every level. */
#include "base/cpu_features.h"
#include "support/random_fn.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t first_seed(void)
{
    const char *seed = getenv("SACCADE_SEED");
    return seed != NULL ? strtoull(seed, NULL, 10) : 1;
}

static int levels_to_test(const char *names[3])
{
    static const char *const all[] = {"portable", "avx2", "avx512"};
    const int best = (int)cpu_features_get()->level;
    int n = 0;
    for (int i = 0; i < 3 && i <= best; i++)
        names[n++] = all[i];
    return n;
}

/* ---- random mods ---- */

/* One row of keys, several strips, compared lane by lane. */
static void compare_row(const mod_fn *fn, const random_env *e, eval_state *state,
                        random_source *r, const char *what)
{
    static float score[EVAL_STRIP + 1], before[EVAL_STRIP];
    static uint8_t live[EVAL_STRIP + 1];
    static eval_cell cells[MOD_MAX_NODES];
    static double values[MOD_MAX_NODES];
    const int32_t b = random_below(r, 3), h = random_below(r, 8);
    const int32_t q = random_below(r, 8) ? random_below(r, RANDOM_Q) : random_int(r);
    const int32_t kv0 = random_below(r, 4) ? random_below(r, RANDOM_KV) : random_int(r);
    const int32_t n = 1 + random_below(r, random_below(r, 3) ? 40 : EVAL_STRIP);
    const bool is_score = fn->kind == SACCADE_SCORE;
    for (int32_t i = 0; i < n; i++)
        score[i] = before[i] = random_float(r);
    memset(live, 0xa5, sizeof live);
    score[n] = 1234.5f;
    eval_head(state, b, h);
    eval_row(state, q);
    if (is_score)
        eval_score(state, kv0, n, score);
    else
        eval_mask(state, kv0, n, live);
    assert_true(score[n] == 1234.5f && live[n] == 0xa5);
    for (int32_t i = 0; i < n; i++) {
        const int32_t kv = (int32_t)((uint32_t)kv0 + (uint32_t)i);
        const int32_t position[4] = {b, h, q, kv};
        const eval_point at = {b, h, q, kv, (double)before[i]};
        const eval_cell want = random_fn_value(fn, &e->env, position, before[i], cells);
        const eval_cell got = {.f = score[i]};
        const bool is_same = is_score ? random_same(MOD_FLOAT, got, want) : live[i] == want.i;
        if (!is_same)
            fail_msg("%s: b %d h %d q %d kv %d+%d: got %a, expected %a", what, b, h, q, kv0, i,
                     is_score ? (double)got.f : live[i], is_score ? (double)want.f : want.i);
        if (fn->nodes[fn->result].deps & DEP_SCORE || i % 7 != 0)
            continue;
        const double oracle = eval_scalar(fn, &e->env, &at, values, NULL);
        const eval_cell rounded = {.f = (float)oracle};
        assert_true(is_score ? random_same(MOD_FLOAT, rounded, want) : oracle == want.i);
    }
}

static void compare_mod(uint64_t seed, const char *level)
{
    random_source r = {seed};
    random_env e;
    arena arena;
    const eval_prog *prog;
    saccade_error err;
    char what[96];
    const random_shape shape = {.kind = random_below(&r, 2) ? SACCADE_MASK : SACCADE_SCORE,
                                .n_ops = 1 + random_below(&r, 60),
                                .no_score = random_below(&r, 2) != 0};
    snprintf(what, sizeof what, "SACCADE_SEED=%llu level %s", (unsigned long long)seed, level);
    arena_init(&arena);
    random_env_make(&e, &r);
    const mod_fn *fn = random_fn(&arena, &r, &e, &shape);
    assert_int_equal(eval_compile(fn, &arena, &prog, &err), SACCADE_OK);
    const size_t bytes = eval_state_bytes(prog);
    assert_int_equal(bytes % 64, 0);
    void *memory = aligned_alloc(64, bytes);
    memset(memory, 0xff, bytes);
    eval_state *state = eval_begin(prog, &e.env, memory);
    for (int row = 0; row < 4; row++)
        compare_row(fn, &e, state, &r, what);
    free(memory);
    random_env_free(&e);
    arena_free(&arena);
}

static void test_random_mods(void **unused)
{
    const char *levels[3];
    const int n = levels_to_test(levels);
    const uint64_t seed = first_seed();
    (void)unused;
    for (int l = 0; l < n; l++) {
        setenv("SACCADE_LEVEL", levels[l], 1);
        for (uint64_t i = 0; i < 150; i++)
            compare_mod(seed + i, levels[l]);
    }
    unsetenv("SACCADE_LEVEL");
}

/* ---- reports of indices outside ---- */

typedef struct small_mod {
    arena arena;
    mod_builder *b;
    uint32_t q, kv, zero;
} small_mod;

static const mod_capture doc_capture = {"doc", SACCADE_I32, MOD_INT, 1};
static int32_t doc_data[4] = {5, 6, 7, 8};
static const saccade_tensor doc_tensor = {
    .data = doc_data, .dtype = SACCADE_I32, .rank = 1, .shape = {4}, .stride = {1}};

static void small_begin(small_mod *m)
{
    arena_init(&m->arena);
    m->b = mod_builder_create(&m->arena, SACCADE_MASK, &doc_capture, 1);
    m->q = mod_emit(m->b, OP_VAR, NULL, 0, VAR_Q, 0, 0);
    m->kv = mod_emit(m->b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    m->zero = mod_emit_int(m->b, 0);
}

/* doc[index] > 0, at a place of the text. */
static uint32_t small_load(small_mod *m, uint32_t index)
{
    const uint32_t load = mod_emit(m->b, OP_LOAD, &index, 1, 0, 3, 7);
    return mod_emit2(m->b, OP_ilt, m->zero, load);
}

static double small_value(small_mod *m, uint32_t result, int32_t q, int32_t kv,
                          eval_report *report)
{
    const mod_fn *fn;
    saccade_error err;
    double values[32];
    const eval_env env = {.tensors = &doc_tensor};
    const eval_point at = {.q = q, .kv = kv};
    assert_int_equal(mod_finish(m->b, result, &fn, &err), SACCADE_OK);
    const double value = eval_scalar(fn, &env, &at, values, report);
    if (report->node >= 0)
        assert_int_equal(fn->nodes[report->node].line, 3);
    return value;
}

static void test_report(void **unused)
{
    small_mod m;
    eval_report report;
    (void)unused;
    small_begin(&m);
    const uint32_t load = small_load(&m, m.kv);
    assert_true(small_value(&m, load, 0, 3, &report) == 1 && report.node == -1);
    assert_true(small_value(&m, load, 0, 4, &report) == 1);
    assert_true(report.node >= 0 && report.dim == 0 && report.index == 4 && report.size == 4);
    assert_true(small_value(&m, load, 0, -1, &report) == 1 && report.index == -1);
    arena_free(&m.arena);
}

/* q < 10 guards the load: it is read when q >= 10 for ||, q < 10 for && and ?:. */
static void test_guards(void **unused)
{
    static const int read_when_guard[] = {1, 0, 1, 0};
    (void)unused;
    for (int form = 0; form < 4; form++)
        for (int is_guard = 0; is_guard < 2; is_guard++) {
            small_mod m;
            eval_report report;
            small_begin(&m);
            const uint32_t guard = mod_emit2(m.b, OP_ilt, m.q, mod_emit_int(m.b, 10));
            const uint32_t no = mod_emit_bool(m.b, 0), load = small_load(&m, m.kv);
            const uint32_t results[] = {
                mod_emit2(m.b, OP_and, guard, load),
                mod_emit2(m.b, OP_or, guard, load),
                mod_emit3(m.b, OP_bsel, guard, load, no),
                mod_emit3(m.b, OP_bsel, guard, no, load),
            };
            small_value(&m, results[form], is_guard ? 9 : 10, 99, &report);
            assert_int_equal(report.node >= 0, is_guard == read_when_guard[form]);
            /* the same load, also read where nothing guards it */
            small_value(&m, mod_emit2(m.b, OP_bne, results[form], load), 9, 99, &report);
            assert_true(report.node >= 0);
            arena_free(&m.arena);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_mods),
        cmocka_unit_test(test_report),
        cmocka_unit_test(test_guards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
