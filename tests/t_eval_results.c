/* Several results of one score function: its value and its derivatives by the score and by what
 * it reads. The graph of both gives what the graphs of each give, bit for bit; so does the
 * interpreter; compiled passes are near it, on both levels, masked and not. */
#include "base/cpu_features.h"
#include "cpu/jit/jit.h"
#include "pass/pass.h"
#include "support/random_mod.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 9, COLS = 77, LD = 128, KV0 = 33, Q0 = 5, MOST = 8 };

static const saccade_sizes sizes = {2, 3, 1, 48, 160, 16, 16};

/* A score function with its derivatives. */
typedef struct derived {
    arena a;
    const mod_fn *fn, *joint;
    uint32_t wanted[MOST], results[MOST + 1], n; /* n: of wanted; 1 + n results */
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    eval_env env;
} derived;

static void derive(derived *d, const saccade_mod *mod, const saccade_binding *bindings,
                   int32_t n_bindings)
{
    memset(d, 0, sizeof *d);
    arena_init(&d->a);
    assert_int_equal(pass_simplify(mod_function(mod), &d->a, &d->fn, NULL), SACCADE_OK);
    d->wanted[d->n++] = pass_find_score(d->fn);
    for (uint32_t i = 0; i < d->fn->n_nodes && d->n < MOST; i++) {
        const mod_node *node = &d->fn->nodes[i];
        if ((node->op == OP_LOAD || node->op == OP_SCALAR) && node->type == MOD_FLOAT)
            d->wanted[d->n++] = i;
    }
    assert_int_equal(
        pass_value_and_gradient(d->fn, d->wanted, d->n, &d->a, &d->joint, d->results, NULL),
        SACCADE_OK);
    eval_sizes(&sizes, d->env.size);
    d->env.tensors = d->tensors;
    assert_int_equal(eval_resolve(d->fn, bindings, n_bindings, 1, d->tensors, NULL),
                     SACCADE_OK);
}

static void *aligned(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(p);
    return p;
}

static float input(int i, int j)
{
    return (float)((i * 37 + j * 11) % 101) * 0.25f - 12.0f;
}

static int same_bits(const void *x, const void *y, size_t bytes)
{
    return memcmp(x, y, bytes) == 0;
}

/* ---- one graph for all ---- */

static double at_node(const mod_fn *fn, uint32_t node, const eval_env *env,
                      const eval_point *at, double *values)
{
    mod_fn one = *fn;
    one.result = node;
    return eval_scalar(&one, env, at, values, NULL);
}

static void check_joint(derived *d, uint64_t seed)
{
    const mod_fn *alone;
    uint32_t results[MOST];
    assert_int_equal(pass_gradient(d->fn, d->wanted, d->n, &d->a, &alone, results, NULL),
                     SACCADE_OK);
    double *values = malloc((d->fn->n_nodes + d->joint->n_nodes) * sizeof *values);
    assert_non_null(values);
    for (int i = 0; i < 12; i++) {
        const eval_point at = {i % 2, i % 3, i * 7 % 48, i * 31 % 160, (double)input(i, i)};
        double want = at_node(d->fn, d->fn->result, &d->env, &at, values);
        for (uint32_t k = 0; k <= d->n; k++) {
            if (k > 0)
                want = at_node(alone, results[k - 1], &d->env, &at, values);
            const double got = at_node(d->joint, d->results[k], &d->env, &at, values);
            if (!same_bits(&got, &want, sizeof got) && !(isnan(got) && isnan(want)))
                fail_msg("seed %llu result %u: got %a, expected %a", (unsigned long long)seed,
                         k, got, want);
        }
    }
    free(values);
}

static void joined_graphs_agree(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        random_mod r;
        derived d;
        random_mod_make(seed, SACCADE_SCORE, 0, 2 + (int)(seed % 4), &sizes, &r);
        derive(&d, r.mod, r.bindings, r.n_bindings);
        check_joint(&d, seed);
        arena_free(&d.a);
        random_mod_free(&r);
    }
}

static saccade_mod *score_of(const char *text)
{
    saccade_mod *generic, *mod;
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &generic, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &mod, NULL), SACCADE_OK);
    saccade_mod_destroy(generic);
    return mod;
}

static void values_and_derivatives_share(void **state)
{
    saccade_mod *mod = score_of("softcap(20.0)");
    derived d;
    int n_tanh = 0;
    (void)state;
    derive(&d, mod, NULL, 0);
    for (uint32_t i = 0; i < d.joint->n_nodes; i++)
        n_tanh += d.joint->nodes[i].op == OP_ftanh;
    assert_int_equal(n_tanh, 1);
    arena_free(&d.a);
    saccade_mod_destroy(mod);
}

static void unused_scores_have_no_slope(void **state)
{
    saccade_mod *mod = score_of("0.5 * (q - kv)");
    derived d;
    (void)state;
    derive(&d, mod, NULL, 0);
    assert_true(d.wanted[0] == PASS_NO_NODE);
    const mod_node *slope = &d.joint->nodes[d.results[1]];
    assert_true(slope->op == OP_FLOAT && slope->imm.f == 0.0f);
    arena_free(&d.a);
    saccade_mod_destroy(mod);
}

/* ---- the interpreter ---- */

static eval_state *start(derived *d, const mod_fn *fn, const uint32_t *results, uint32_t n,
                         void **memory)
{
    const eval_prog *prog;
    assert_int_equal(eval_compile_results(fn, results, n, &d->a, &prog, NULL), SACCADE_OK);
    *memory = aligned(eval_state_bytes(prog));
    return eval_begin(prog, &d->env, *memory);
}

/* All results of a strip, in place of the score and after it. */
static void run_strip(eval_state *state, int32_t q, uint32_t n, float (*out)[LD])
{
    float *to[MOST + 1];
    for (uint32_t k = 0; k < n; k++)
        to[k] = out[k];
    for (int j = 0; j < LD; j++)
        out[0][j] = input(q - Q0, j);
    eval_head(state, 1, 2);
    eval_row(state, q);
    eval_results(state, KV0, COLS, out[0], to);
}

static void check_strips(derived *d, uint64_t seed)
{
    static float all[MOST + 1][LD], one[1][LD];
    void *memory, *alone;
    eval_state *state = start(d, d->joint, d->results, d->n + 1, &memory);
    run_strip(state, Q0 + 1, d->n + 1, all);
    for (uint32_t k = 0; k <= d->n; k++) {
        run_strip(start(d, d->joint, &d->results[k], 1, &alone), Q0 + 1, 1, one);
        if (!same_bits(one[0], all[k], COLS * sizeof(float)))
            fail_msg("seed %llu: result %u of %u", (unsigned long long)seed, k, d->n + 1);
        free(alone);
    }
    free(memory);
}

static void strips_have_all_results(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        random_mod r;
        derived d;
        random_mod_make(seed, SACCADE_SCORE, 0, 2 + (int)(seed % 4), &sizes, &r);
        derive(&d, r.mod, r.bindings, r.n_bindings);
        check_strips(&d, seed);
        arena_free(&d.a);
        random_mod_free(&r);
    }
}

/* ---- compiled passes ---- */

static int32_t best_level(void)
{
    cpu_level level;
    assert_int_equal(cpu_level_allowed(&level, NULL), SACCADE_OK);
    return (int32_t)level < CPU_AVX512 ? (int32_t)level : CPU_AVX512;
}

static void skip_without_jit(void)
{
    jit_program *p = NULL;
    if (jit_create(NULL, NULL, best_level(), &p, NULL) != SACCADE_OK)
        skip();
    jit_destroy(p);
}

static int is_near(float got, float want)
{
    if (!isfinite(want) || !isfinite(got))
        return (isnan(want) && isnan(got)) || got == want;
    return fabsf(got - want) <= 2e-5f * (30.0f + fabsf(want));
}

/* tiles: the program's; masked: keys after the row have no value. */
static void compare(derived *d, float *const *tiles, int masked, int32_t level, uint64_t seed)
{
    static float want[MOST + 1][LD];
    void *memory;
    eval_state *state = start(d, d->joint, d->results, d->n + 1, &memory);
    for (int i = 0; i < ROWS; i++) {
        run_strip(state, Q0 + i, d->n + 1, want);
        for (uint32_t k = 0; k <= d->n; k++)
            for (int j = 0; j < COLS; j++) {
                const float got = tiles[k][i * LD + j];
                const int is_dead = masked && KV0 + j > 8 * (Q0 + i);
                if (is_dead ? k == 0 && got != -INFINITY : !is_near(got, want[k][j]))
                    fail_msg("seed %llu level %d masked %d result %u row %d column %d: got %g, "
                             "expected %g",
                             (unsigned long long)seed, level, masked, k, i, j, (double)got,
                             (double)(is_dead ? -INFINITY : want[k][j]));
            }
    }
    free(memory);
}

static void check_compiled(derived *d, const mod_fn *mask, int32_t level, uint64_t seed)
{
    const eval_env none = {.tensors = NULL};
    float *tiles[MOST + 1];
    jit_program *program;
    saccade_error err;
    if (jit_create_results(d->joint, d->results, d->n + 1, mask, level, &program, &err)) {
        assert_non_null(strstr(err.message, "jit: got a mod"));
        return;
    }
    void *memory = aligned(jit_state_bytes(program));
    jit_state *state = jit_begin(program, &d->env, &none, 1.0f, memory);
    assert_non_null(state);
    for (uint32_t k = 0; k <= d->n; k++)
        tiles[k] = aligned(ROWS * LD * sizeof(float));
    jit_head(state, 1, 2);
    jit_rows(state, Q0, ROWS);
    jit_cols(state, KV0, LD);
    for (int masked = 0; masked < 2; masked++) {
        for (int i = 0; i < ROWS * LD; i++)
            tiles[0][i] = input(i / LD, i % LD);
        jit_tiles(state, tiles, LD, 0, ROWS, 0, COLS, masked);
        compare(d, tiles, masked, level, seed);
    }
    for (uint32_t k = 0; k <= d->n; k++)
        free(tiles[k]);
    free(memory);
    jit_destroy(program);
}

static void compiled_passes_have_all_results(void **state)
{
    saccade_mod *generic, *mask;
    const char *text = "kv <= 8 * q";
    (void)state;
    skip_without_jit();
    assert_int_equal(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &mask, NULL), SACCADE_OK);
    for (uint64_t seed = 1; seed <= 200; seed++) {
        random_mod r;
        derived d;
        random_mod_make(seed, SACCADE_SCORE, RANDOM_MOD_TAME, 2 + (int)(seed % 3), &sizes, &r);
        derive(&d, r.mod, r.bindings, r.n_bindings);
        for (int32_t level = CPU_AVX2; level <= best_level(); level++)
            check_compiled(&d, mod_function(mask), level, seed);
        arena_free(&d.a);
        random_mod_free(&r);
    }
    saccade_mod_destroy(mask);
    saccade_mod_destroy(generic);
}

static void softcap_is_near_its_truth(void **state)
{
    saccade_mod *mod = score_of("softcap(20.0)");
    const eval_env none = {.tensors = NULL};
    float s[LD], slope[LD], *const tiles[] = {s, slope};
    derived d;
    (void)state;
    skip_without_jit();
    derive(&d, mod, NULL, 0);
    for (int32_t level = CPU_AVX2; level <= best_level(); level++) {
        jit_program *p;
        assert_int_equal(jit_create_results(d.joint, d.results, 2, NULL, level, &p, NULL),
                         SACCADE_OK);
        void *memory = aligned(jit_state_bytes(p));
        jit_state *at = jit_begin(p, &none, &none, 4.0f, memory);
        for (int j = 0; j < LD; j++)
            s[j] = input(0, j);
        jit_head(at, 0, 0);
        jit_rows(at, 0, 1);
        jit_cols(at, 0, LD);
        jit_tiles(at, tiles, LD, 0, 1, 0, LD, 0);
        for (int j = 0; j < LD; j++) {
            const double t = tanh(4.0 * (double)input(0, j) / 20.0);
            assert_true(fabs((double)s[j] - 20.0 * t) < 2e-5);
            assert_true(fabs((double)slope[j] - (1.0 - t * t)) < 1e-6);
        }
        free(memory);
        jit_destroy(p);
    }
    arena_free(&d.a);
    saccade_mod_destroy(mod);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(joined_graphs_agree),
        cmocka_unit_test(values_and_derivatives_share),
        cmocka_unit_test(unused_scores_have_no_slope),
        cmocka_unit_test(strips_have_all_results),
        cmocka_unit_test(compiled_passes_have_all_results),
        cmocka_unit_test(softcap_is_near_its_truth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
