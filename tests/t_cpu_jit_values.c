/* Compiled passes against what arith.h and libm say, value by value: every operation on every
 * pair of extreme operands, bit for bit; the curves of scores over all float32, with their
 * largest error stated here; the coarse tanh and what may use it; all widths; pages that are
 * never writable and executable at once. Curves take a sample of all floats; with
 * SACCADE_EXHAUSTIVE set, all of them (an hour). */
#include "base/convert.h"
#include "base/cpu_features.h"
#include "cpu/jit/jit_graph.h"
#include "eval/eval_ops.h"
#include "pass/pass.h"
#include "support/ulp.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LD = 128, SIDE = 32 };

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

/* A compiled score and mask (either may be NULL) standing on rows and keys from 0 on. */
typedef struct compiled {
    jit_program *program;
    jit_state *state;
    void *memory;
} compiled;

static compiled compile(const mod_fn *score, const mod_fn *mask, int32_t level,
                        saccade_tensor *tensors)
{
    compiled c;
    const eval_env env = {.tensors = tensors};
    const pass_facts *facts = NULL;
    arena a;
    arena_init(&a);
    if (score)
        assert_int_equal(pass_facts_make(score, &a, &facts, NULL), SACCADE_OK);
    assert_int_equal(jit_create(facts, mask, level, &c.program, NULL), SACCADE_OK);
    arena_free(&a);
    c.memory = aligned_alloc(64, jit_state_bytes(c.program));
    assert_non_null(c.memory);
    c.state = jit_begin(c.program, &env, &env, 1.0f, c.memory);
    assert_non_null(c.state);
    jit_head(c.state, 0, 0);
    jit_rows(c.state, 0, SIDE);
    jit_cols(c.state, 0, LD);
    return c;
}

static void destroy(compiled *c)
{
    jit_destroy(c->program);
    free(c->memory);
}

static saccade_mod *bound(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *mod;
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, NULL), SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &mod, NULL), SACCADE_OK);
    saccade_mod_destroy(generic);
    return mod;
}

/* ---- every operation on extreme operands ---- */

static const int32_t some_ints[] = {
    INT32_MIN,   INT32_MIN + 1,
    -0x40000001, -(1 << 30),
    -65537,      -65536,
    -33,         -32,
    -31,         -8,
    -7,          -3,
    -2,          -1,
    0,           1,
    2,           3,
    5,           7,
    8,           31,
    32,          33,
    65535,       16777216,
    16777217,    1 << 30,
    12345,       -9999,
    INT32_MAX,   INT32_MAX - 1,
};
static const float some_floats[] = {
    0.0f,         -0.0f,          1.0f,        -1.0f,        0.5f,     -0.5f,
    1.5f,         2.5f,           -2.5f,       0.49999997f,  INFINITY, -INFINITY,
    NAN,          0x1p-149f,      -0x1p-126f,  2147483520.f, 0x1p31f,  0x1.fffffep127f,
    -0x1p31f,     8388607.5f,     8388608.0f,  3.1415927f,   -100.25f, -0x1.fffffep127f,
    88.75f,       1e30f,          16777217.0f, 0.1f,         -7.75f,   1e-20f,
    -0x1.8p-140f, 0x1.fffffep-1f,
};
_Static_assert(sizeof some_ints == SIDE * 4 && sizeof some_floats == SIDE * 4, "one each");

static eval_cell operand(char type, int i)
{
    if (type == 'F')
        return (eval_cell){.f = some_floats[i]};
    return (eval_cell){.i = type == 'B' ? some_ints[i] > 0 : some_ints[i]};
}

/* Which operand x, y and z is at a row and key: all pairs where there are two. */
static void places(int n, int q, int kv, int out[3])
{
    out[0] = n == 1 ? (q + kv) & (SIDE - 1) : kv;
    out[1] = q;
    out[2] = q ^ kv;
}

/* The operation on loads from captures 0 (ints) and 1 (floats). Ints leave in two halves, so
 * that a float holds each. */
static const mod_fn *on_loads(mod_op op, int is_high, arena *a)
{
    static const mod_capture captures[] = {{"i", SACCADE_I32, MOD_INT, 1},
                                           {"f", SACCADE_F32, MOD_FLOAT, 1}};
    const char *sig = mod_op_infos[op].signature;
    const int n = (int)strlen(sig + 2);
    mod_builder *b = mod_builder_create(a, SACCADE_SCORE, captures, 2);
    const uint32_t q = mod_emit(b, OP_VAR, NULL, 0, VAR_Q, 0, 0);
    const uint32_t kv = mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    const uint32_t around =
        mod_emit2(b, OP_iand, mod_emit2(b, OP_iadd, q, kv), mod_emit_int(b, SIDE - 1));
    const uint32_t index[3] = {n == 1 ? around : kv, q, mod_emit2(b, OP_ixor, q, kv)};
    const mod_fn *fn;
    uint32_t x[3];
    for (int i = 0; i < n; i++) {
        x[i] = mod_emit(b, OP_LOAD, &index[i], 1, sig[2 + i] == 'F', 0, 0);
        if (sig[2 + i] == 'B')
            x[i] = mod_emit2(b, OP_ilt, mod_emit_int(b, 0), x[i]);
    }
    uint32_t r = mod_emit(b, op, x, (uint32_t)n, 0, 0, 0);
    if (sig[0] == 'B')
        r = mod_emit1(b, OP_b2i, r);
    if (sig[0] != 'F') {
        r = is_high ? mod_emit2(b, OP_ishr, r, mod_emit_int(b, 12))
                    : mod_emit2(b, OP_iand, r, mod_emit_int(b, 4095));
        r = mod_emit1(b, OP_i2f, r);
    }
    assert_int_equal(mod_finish(b, r, &fn, NULL), SACCADE_OK);
    return fn;
}

static float expected(mod_op op, int is_high, int q, int kv)
{
    const char *sig = mod_op_infos[op].signature;
    const int n = (int)strlen(sig + 2);
    eval_cell x[3] = {{0}};
    int at[3];
    places(n, q, kv, at);
    for (int i = 0; i < n; i++)
        x[i] = operand(sig[2 + i], at[i]);
    const eval_cell r = eval_apply(op, x[0], x[1], x[2]);
    if (sig[0] == 'F')
        return r.f;
    return (float)(is_high ? r.i >> 12 : r.i & 4095);
}

static void check_operation(mod_op op, int is_high, int32_t level)
{
    const int64_t side = SIDE;
    saccade_tensor tensors[2] = {saccade_tensor_of((void *)some_ints, SACCADE_I32, 1, &side),
                                 saccade_tensor_of((void *)some_floats, SACCADE_F32, 1, &side)};
    static _Alignas(64) float s[SIDE * LD];
    float top[SIDE];
    arena a;
    arena_init(&a);
    const mod_fn *fn = on_loads(op, is_high, &a);
    if (fn->n_captures == 1) /* the one that is left is the first */
        tensors[0] = tensors[fn->captures[0].dtype == SACCADE_F32];
    compiled c = compile(fn, NULL, level, tensors);
    memset(s, 0, sizeof s);
    jit_tile(c.state, s, LD, 0, SIDE, 0, SIDE, 0, top);
    for (int q = 0; q < SIDE; q++)
        for (int kv = 0; kv < SIDE; kv++) {
            const float got = s[q * LD + kv], want = expected(op, is_high, q, kv);
            if (f32_bits(got) != f32_bits(want) && !(isnan(got) && isnan(want)))
                fail_msg("%s, level %d, operands of row %d and key %d: got %a, expected %a",
                         mod_op_infos[op].name, level, q, kv, (double)got, (double)want);
        }
    destroy(&c);
    arena_free(&a);
}

static void every_operation(void **state)
{
    (void)state;
    skip_without_jit();
    for (mod_op op = OP_LOAD + 1; op < MOD_OP_COUNT; op++)
        for (int32_t level = CPU_AVX2; level <= best_level(); level++)
            for (int is_high = 0; is_high < 2; is_high++)
                check_operation(op, is_high, level);
}

/* ---- curves of scores ---- */

/* max: the largest error in ulp of the result. */
static const struct curve {
    const char *name;
    mod_op op;
    double (*wide)(double);
    double max;
} curves[] = {
    {"exp", OP_fexp, exp, 1.2},    {"exp2", OP_fexp2, exp2, 1.0},
    {"tanh", OP_ftanh, tanh, 5.1}, {"sigmoid", OP_fsigmoid, wide_sigmoid, 2.5},
    {"log", OP_flog, log, 0.9},    {"log2", OP_flog2, log2, 0.9},
    {"sqrt", OP_fsqrt, sqrt, 0.5}, {"erf", OP_ferf, erf, 1.4},
};
enum { N_CURVES = sizeof curves / sizeof curves[0] };

static void check_curve(const struct curve *curve, int32_t level)
{
    const uint64_t stride = getenv("SACCADE_EXHAUSTIVE") ? 1 : 9973;
    arena a;
    const mod_fn *fn;
    double worst = 0;
    float at = 0;
    arena_init(&a);
    mod_builder *b = mod_builder_create(&a, SACCADE_SCORE, NULL, 0);
    const uint32_t score = mod_emit(b, OP_SCORE, NULL, 0, 0, 0, 0);
    assert_int_equal(mod_finish(b, mod_emit1(b, curve->op, score), &fn, NULL), SACCADE_OK);
    compiled c = compile(fn, NULL, level, NULL);
    for (uint64_t bits = 0; bits < 1ull << 32;) {
        float s[LD], x[LD], top;
        for (int j = 0; j < LD; j++, bits += stride)
            s[j] = x[j] = f32_from_bits((uint32_t)bits);
        jit_tile(c.state, s, LD, 0, 1, 0, LD, 0, &top);
        for (int j = 0; j < LD; j++) {
            const double error = ulp_error(s[j], curve->wide((double)x[j]));
            at = error > worst ? x[j] : at;
            worst = error > worst ? error : worst;
        }
    }
    printf("%-8s level %d: %.3f ulp at %a\n", curve->name, level, worst, (double)at);
    if (worst > curve->max)
        fail_msg("%s, level %d: %.3f ulp at %a, expected at most %.2f", curve->name, level,
                 worst, (double)at, curve->max);
    destroy(&c);
    arena_free(&a);
}

static void every_curve(void **state)
{
    (void)state;
    skip_without_jit();
    for (int i = 0; i < N_CURVES; i++)
        for (int32_t level = CPU_AVX2; level <= best_level(); level++)
            check_curve(&curves[i], level);
}

/* ---- the coarse tanh ---- */

/* As the stream's instructions compute it. */
static float rough_tanh(float x)
{
    float u = x * JIT_TANH_ROOT;
    u = u < -JIT_TANH_MOST ? -JIT_TANH_MOST : u > JIT_TANH_MOST ? JIT_TANH_MOST : u;
    const float y = fmaf(u, u, 4.0f);
    const uint32_t segment = f32_bits(y) >> 21 & (JIT_TABLE_SEGMENTS - 1);
    float p = jit_tanh_terms[0][segment];
    for (int i = 1; i < JIT_TABLE_TERMS; i++)
        p = fmaf(p, y, jit_tanh_terms[i][segment]);
    return u * p;
}

/* Its error, and that beside the result. */
static void rough_tanh_is_near(void **state)
{
    const uint64_t stride = getenv("SACCADE_EXHAUSTIVE") ? 1 : 9973;
    double worst = 0;
    (void)state;
    for (uint64_t bits = 0; bits < 1ull << 32; bits += stride) {
        const float x = f32_from_bits((uint32_t)bits), got = rough_tanh(x);
        const double want = tanh((double)x), error = fabs((double)got - want);
        assert_int_equal(isnan(got), isnan(want));
        worst = error > worst ? error : worst;
        assert_false(fabs(want) > 1e-30 && error > 1.5e-5 * fabs(want));
    }
    printf("coarse tanh: %.3g\n", worst);
    assert_true(worst <= (double)JIT_ROUGH_TANH);
    assert_true(rough_tanh(INFINITY) == -rough_tanh(-INFINITY));
}

/* Which scores are made of it: those that grow an error no more than a bf16 weight bears. */
static void where_tanh_is_rough(void **state)
{
    static const struct {
        const char *text;
        int is_approx, is_finite;
    } list[] = {
        {"softcap(20.0)", 1, 1},
        {"softcap(85.0)", 1, 1},
        {"softcap(95.0)", 0, 1},
        {"20.0 * tanh(score / 20.0) + 80.0 * tanh(score)", 0, 1},
        {"40.0 * tanh(score) - 30.0 * tanh(2.0 * score)", 1, 1},
        {"score = softcap(20.0); softcap(50.0)", 1, 1},
        {"score * tanh(score)", 0, 1},
        {"exp(tanh(score))", 0, 1},
        {"q > kv ? 30.0 * tanh(score) : score", 1, 1},
        {"q > kv ? 30.0 * tanh(score) : -inf", 1, 0},
        {"score + tanh(0.1 * (q - kv))", 0, 1},
        {"alibi()", 0, 1},
        {"kv == 3 ? -inf : score", 0, 0},
        {"sqrt(score)", 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        saccade_mod *score = bound(SACCADE_SCORE, list[i].text);
        const pass_facts *facts;
        const mod_fn *fn;
        jit_graph g;
        arena a;
        int has_table = 0;
        arena_init(&a);
        assert_int_equal(pass_simplify(mod_function(score), &a, &fn, NULL), SACCADE_OK);
        assert_int_equal(pass_facts_make(fn, &a, &facts, NULL), SACCADE_OK);
        assert_int_equal(jit_build_graph(facts, NULL, &a, &g, NULL), SACCADE_OK);
        for (uint32_t n = 0; n < g.n_nodes; n++)
            has_table |= g.nodes[n].op == JIT_TABLE;
        if (has_table != list[i].is_approx || g.is_finite != list[i].is_finite)
            fail_msg("%s: coarse tanh %d, finite %d", list[i].text, has_table, g.is_finite);
        arena_free(&a);
        saccade_mod_destroy(score);
    }
}

/* ---- widths ---- */

static float input(int q, int kv)
{
    return (float)((q * 37 + kv * 11) % 101) * 0.3f - 9.0f;
}

/* What a narrow tile gives is what the widest gives there, and nothing else is touched. */
static void check_width(jit_state *state, const float *whole, int row0, int rows, int col0,
                        int cols)
{
    static _Alignas(64) float s[SIDE * LD];
    const int groups = (cols + JIT_GROUP - 1) / JIT_GROUP * JIT_GROUP;
    float top[SIDE + 1];
    top[rows] = -7;
    for (int i = 0; i < SIDE * LD; i++)
        s[i] = input(row0 + i / LD, col0 + i % LD);
    jit_tile(state, s, LD, row0, rows, col0, cols, 1, top);
    assert_true(top[rows] == -7);
    for (int i = 0; i < SIDE * LD; i++) {
        const int q = row0 + i / LD, kv = col0 + i % LD;
        if (i / LD < rows && i % LD < cols)
            assert_true(s[i] == whole[q * LD + kv]);
        else if (i / LD >= rows || i % LD >= groups)
            assert_true(s[i] == input(q, kv));
    }
}

static void all_widths(void **state)
{
    static _Alignas(64) float whole[SIDE * LD];
    saccade_mod *score = bound(SACCADE_SCORE, "20.0 * tanh(score / 20.0) + 0.25 * (kv - q)");
    saccade_mod *mask = bound(SACCADE_MASK, "q >= kv || (q * kv) % 3 == 1");
    (void)state;
    skip_without_jit();
    for (int32_t level = CPU_AVX2; level <= best_level(); level++) {
        compiled c = compile(mod_function(score), mod_function(mask), level, NULL);
        float top[SIDE];
        for (int i = 0; i < SIDE * LD; i++)
            whole[i] = input(i / LD, i % LD);
        jit_tile(c.state, whole, LD, 0, SIDE, 0, LD, 1, top);
        for (int cols = 1; cols <= LD; cols++)
            check_width(c.state, whole, cols % 5, 1 + cols % 7, 0, cols);
        for (int cols = 1; cols <= LD - JIT_GROUP; cols++)
            check_width(c.state, whole, cols % 3, 1 + cols % 9, JIT_GROUP, cols);
        destroy(&c);
    }
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
}

/* ---- pages ---- */

static void never_both(void **state)
{
    saccade_mod *mask = bound(SACCADE_MASK, "q >= kv");
    char line[512];
    int n_executable = 0;
    (void)state;
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps)
        skip();
    skip_without_jit();
    compiled c = compile(NULL, mod_function(mask), best_level(), NULL);
    while (fgets(line, sizeof line, maps)) {
        const char *rights = strchr(line, ' ') + 1;
        assert_false(rights[1] == 'w' && rights[2] == 'x');
        n_executable += rights[2] == 'x';
    }
    assert_true(n_executable > 1);
    fclose(maps);
    destroy(&c);
    saccade_mod_destroy(mask);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation),    cmocka_unit_test(every_curve),
        cmocka_unit_test(rough_tanh_is_near), cmocka_unit_test(where_tanh_is_rough),
        cmocka_unit_test(all_widths),         cmocka_unit_test(never_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
