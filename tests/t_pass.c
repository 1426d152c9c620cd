/* Passes over typed mods: simplified mods keep every bit, affine scores and interval masks are
   what they claim to be at every point, gradients are the limits of differences. */
#include "pass/pass.h"
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

enum { MAX_VALUES = MOD_MAX_NODES };
static double values[MAX_VALUES];
static eval_cell cells[MAX_VALUES];

static uint64_t first_seed(void)
{
    const char *seed = getenv("SACCADE_SEED");
    return seed != NULL ? strtoull(seed, NULL, 10) : 1;
}

/* ---- texts ---- */

/* Captures of every text here: W, P and c scalars, doc an int tensor of rank 1. */
static const saccade_capture known[] = {{"W", SACCADE_I32, 0},
                                        {"P", SACCADE_I32, 0},
                                        {"c", SACCADE_F32, 0},
                                        {"doc", SACCADE_I32, 1}};

static saccade_mod *bound_text(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *mod;
    saccade_error err;
    saccade_capture captures[4];
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++)
        for (int k = 0; k < 4; k++)
            if (strcmp(saccade_mod_capture(generic, i).name, known[k].name) == 0)
                captures[i] = known[k];
    if (saccade_mod_bind(generic, captures, n, &mod, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return mod;
}

static const mod_fn *simplified_text(saccade_mod *mod, arena *arena)
{
    const mod_fn *fn;
    saccade_error err;
    assert_int_equal(pass_simplify(mod_function(mod), arena, &fn, &err), SACCADE_OK);
    return fn;
}

/* Values for the captures, in the order fn has them. */
typedef struct text_env {
    int32_t W, P, doc[64];
    float c;
    saccade_tensor tensors[4];
    eval_env env;
} text_env;

static void text_env_fill(text_env *e, const mod_fn *fn)
{
    e->env = (eval_env){.size = {2, 8, 2, 64, 64, 64, 64}, .tensors = e->tensors};
    for (uint32_t i = 0; i < fn->n_captures; i++) {
        const char *name = fn->captures[i].name;
        void *data = strcmp(name, "W") == 0   ? (void *)&e->W
                     : strcmp(name, "P") == 0 ? (void *)&e->P
                     : strcmp(name, "c") == 0 ? (void *)&e->c
                                              : (void *)e->doc;
        e->tensors[i] = (saccade_tensor){.data = data,
                                         .dtype = fn->captures[i].dtype,
                                         .rank = fn->captures[i].rank,
                                         .shape = {64},
                                         .stride = {1}};
    }
}

/* ---- simplify ---- */

static void test_simplify_random(void **unused)
{
    (void)unused;
    for (uint64_t seed = first_seed(), i = 0; i < 1500; i++, seed++) {
        random_source r = {seed};
        random_env e;
        arena arena;
        const mod_fn *out;
        saccade_error err;
        const random_shape shape = {.kind = random_below(&r, 2) ? SACCADE_MASK : SACCADE_SCORE,
                                    .n_ops = 1 + random_below(&r, 60)};
        arena_init(&arena);
        random_env_make(&e, &r);
        const mod_fn *fn = random_fn(&arena, &r, &e, &shape);
        assert_int_equal(pass_simplify(fn, &arena, &out, &err), SACCADE_OK);
        assert_true(out->n_nodes <= fn->n_nodes);
        for (int k = 0; k < 40; k++) {
            const int32_t at[4] = {random_below(&r, 3), random_below(&r, 8), random_int(&r),
                                   random_int(&r)};
            const float score = random_float(&r);
            const eval_cell want = random_fn_value(fn, &e.env, at, score, cells);
            const eval_cell got = random_fn_value(out, &e.env, at, score, cells);
            if (!random_same((mod_type)fn->nodes[fn->result].type, got, want))
                fail_msg("SACCADE_SEED=%llu: got %08x, expected %08x", (unsigned long long)seed,
                         (unsigned)got.i, (unsigned)want.i);
        }
        random_env_free(&e);
        arena_free(&arena);
    }
}

/* Texts that become the same nodes, and look-alikes that must not. */
static void compare_texts(saccade_kind kind, const char *x, const char *y, int is_same)
{
    arena arena;
    strbuf a, b;
    saccade_error err;
    arena_init(&arena);
    strbuf_init(&a, 0);
    strbuf_init(&b, 0);
    saccade_mod *mods[2] = {bound_text(kind, x), bound_text(kind, y)};
    assert_int_equal(mod_print_nodes(simplified_text(mods[0], &arena), &a, &err), SACCADE_OK);
    assert_int_equal(mod_print_nodes(simplified_text(mods[1], &arena), &b, &err), SACCADE_OK);
    if ((strcmp(strbuf_text(&a), strbuf_text(&b)) == 0) != is_same)
        fail_msg("%s / %s:\n%s\n%s", x, y, strbuf_text(&a), strbuf_text(&b));
    saccade_mod_destroy(mods[0]);
    saccade_mod_destroy(mods[1]);
    strbuf_free(&a);
    strbuf_free(&b);
    arena_free(&arena);
}

static void test_simplify_texts(void **unused)
{
    static const char *const masks[][2] = {
        {"kv + 0 <= q * 1", "kv <= q"},
        {"(kv + 3) + 4 <= q", "kv + 7 <= q"},
        {"(kv + 3) - 4 <= q", "kv + -1 <= q"},
        {"!(kv <= q)", "q < kv"},
        {"!!(kv <= q) && true", "kv <= q"},
        {"kv <= q ? q - kv < W : false", "kv <= q && q - kv < W"},
        {"kv <= q && !(kv <= q)", "false && q == kv"},
        {"floordiv(kv, 8) == floordiv(q, 8)", "kv >> 3 == q >> 3"},
        {"floormod(kv, 8) == 0", "(kv & 7) == 0"},
        {"kv % 1 == 0", "true"},
        {"kv / 0 == 0", "true"},
        {"int(kv <= q) == 1", "kv <= q"},
        {"2 * 3 + 1 <= kv", "7 <= kv"},
        {"-(q - kv) <= 5", "kv - q <= 5"},
        {"q + kv == kv + q", "true"},
        {"max(kv, kv) <= min(q, 2147483647)", "kv <= q"},
    };
    static const char *const scores[][2] = {
        {"score * 1.0", "score"},
        {"score / 4.0", "score * 0.25"},
        {"score - 0.0", "score"},
        {"-(-score)", "score"},
        {"score + -c", "score - c"},
        {"floor(floor(score))", "floor(score)"},
        {"kv <= q ? score : score", "score"},
        {"!(kv <= q) ? score : c", "q < kv ? score : c"},
    };
    static const char *const different[][2] = {
        {"score + 0.0", "score"}, /* -0 + 0 is 0 */
        {"score * 0.0", "0.0"},   /* NaN */
        {"score / 3.0", "score * (1.0 / 3.0)"},
        {"score - score", "0.0"},
        {"score < c ? 1.0 : 0.0", "!(c <= score) ? 1.0 : 0.0"}, /* NaN */
        {"float(kv / 8)", "float(kv >> 3)"},                    /* kv < 0 */
    };
    (void)unused;
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++)
        compare_texts(SACCADE_MASK, masks[i][0], masks[i][1], 1);
    for (size_t i = 0; i < sizeof scores / sizeof scores[0]; i++)
        compare_texts(SACCADE_SCORE, scores[i][0], scores[i][1], 1);
    for (size_t i = 0; i < sizeof different / sizeof different[0]; i++)
        compare_texts(SACCADE_SCORE, different[i][0], different[i][1], 0);
}

/* ---- affine ---- */

static void check_affine(const char *text, int is_affine)
{
    arena arena;
    text_env e = {.W = 5, .P = 9, .c = 1.75f};
    const mod_fn *slope, *offset;
    random_source r = {7};
    arena_init(&arena);
    saccade_mod *mod = bound_text(SACCADE_SCORE, text);
    const mod_fn *fn = simplified_text(mod, &arena);
    text_env_fill(&e, fn);
    if (pass_affine(fn, &arena, &slope, &offset) != is_affine)
        fail_msg("%s: expected %s", text, is_affine ? "affine" : "not affine");
    for (int i = 0; i < 200 && is_affine; i++) {
        const eval_point at = {random_below(&r, 2), random_below(&r, 8), random_below(&r, 64),
                               random_below(&r, 64), random_below(&r, 2001) / 100.0 - 10.0};
        const double want = eval_scalar(fn, &e.env, &at, values, NULL);
        const double a = eval_scalar(slope, &e.env, &at, values, NULL);
        const double b = eval_scalar(offset, &e.env, &at, values, NULL);
        const double got = a * at.score + b;
        const double scale = fabs(a * at.score) + fabs(b) + fabs(want);
        assert_false(slope->nodes[slope->result].deps & DEP_SCORE);
        assert_false(offset->nodes[offset->result].deps & DEP_SCORE);
        if (!(got == want || fabs(got - want) <= 1e-6 * scale))
            fail_msg("%s: got %g, expected %g", text, got, want);
    }
    saccade_mod_destroy(mod);
    arena_free(&arena);
}

static void test_affine(void **unused)
{
    static const char *const affine[] = {
        "score",
        "3.5",
        "score * c",
        "score + c * (kv - q)",
        "-(score / 3.0)",
        "score / c - score",
        "2.0 * (score + score * float(h)) - c",
        "kv <= q ? score : -inf",
        "kv <= q ? score + c : 2.0 * score",
        "c - score",
        "(kv <= q ? score : c) * 3.0",
        "alibi()",
        "score = alibi(); score * 2.0",
    };
    static const char *const other[] = {
        "tanh(score)",       "softcap(c)",    "score * score",
        "c / score",         "max(score, c)", "score < c ? score : c",
        "float(int(score))", "abs(score)",
    };
    (void)unused;
    for (size_t i = 0; i < sizeof affine / sizeof affine[0]; i++)
        check_affine(affine[i], 1);
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++)
        check_affine(other[i], 0);
}

/* ---- intervals ---- */

static int32_t bound_value(const mod_fn *fn, uint32_t node, const eval_env *env, int32_t q)
{
    const int32_t at[4] = {1, 3, q, 0};
    assert_false(fn->nodes[node].deps & DEP_KV);
    random_fn_value(fn, env, at, 0.0f, cells);
    return cells[node].i;
}

/* Positions near 0, near their ends, and near the bounds. */
static int32_t some_position(random_source *r)
{
    const int32_t end = (1 << 30) - 1;
    switch (random_below(r, 6)) {
    case 0:
        return end - random_below(r, 3);
    case 1:
        return -(1 << 29) + random_below(r, 3);
    case 2:
        return (int32_t)(random_bits(r) % (uint64_t)end);
    default:
        return random_below(r, 90) - 20;
    }
}

static void compare_interval(const char *text, const mod_fn *fn, const mod_fn *bounds_fn,
                             const uint32_t bounds[2], const text_env *e, random_source *r)
{
    const int32_t end = (1 << 30) - 1, q = some_position(r);
    const int32_t lo = bound_value(bounds_fn, bounds[0], &e->env, q);
    const int32_t hi = bound_value(bounds_fn, bounds[1], &e->env, q);
    for (int i = 0; i < 24; i++) {
        const int64_t near[] = {some_position(r), (int64_t)lo - 1 + random_below(r, 3),
                                (int64_t)hi - 1 + random_below(r, 3)};
        const int64_t kv = near[random_below(r, 3)];
        if (kv < -(1 << 29) || kv > end)
            continue;
        const eval_point at = {1, 3, q, (int32_t)kv, 0.0};
        const int want = (int)eval_scalar(fn, &e->env, &at, values, NULL);
        if ((lo <= kv && kv < hi) != want)
            fail_msg("%s: q %d kv %d W %d P %d: [%d, %d), expected %d", text, q, (int32_t)kv,
                     e->W, e->P, lo, hi, want);
    }
}

static void check_interval(const char *text, int is_interval)
{
    arena arena;
    text_env e = {0};
    const mod_fn *bounds_fn;
    uint32_t bounds[2];
    random_source r = {11};
    arena_init(&arena);
    saccade_mod *mod = bound_text(SACCADE_MASK, text);
    const mod_fn *fn = simplified_text(mod, &arena);
    text_env_fill(&e, fn);
    for (int i = 0; i < 64; i++)
        e.doc[i] = random_int(&r);
    if (pass_interval(fn, &arena, &bounds_fn, bounds) != is_interval)
        fail_msg("%s: expected %s", text, is_interval ? "an interval" : "no interval");
    for (int i = 0; i < 2000 && is_interval; i++) {
        e.W = random_int(&r);
        e.P = random_int(&r);
        e.c = random_float(&r);
        compare_interval(text, fn, bounds_fn, bounds, &e, &r);
    }
    saccade_mod_destroy(mod);
    arena_free(&arena);
}

static void test_interval(void **unused)
{
    static const char *const intervals[] = {
        "true",
        "false",
        "causal()",
        "sliding_window(256)",
        "sliding_window(W)",
        "kv < P",
        "kv < P || kv <= q",
        "kv <= q && kv < P",
        "q - kv <= W",
        "q - kv < W && kv - q < P",
        "kv == q",
        "kv == P",
        "kv == q + 3",
        "h < 4 && kv <= q",
        "h < 4 || kv <= q",
        "h < W ? kv <= q : kv < P",
        "c < 0.5 || kv >= q",
        "kv - q + 5 <= 3 + W",
        "abs(c) <= 1.0 && q >= kv",
        "!(kv < P) && !(kv > q)",
        "kv + 7 > P",
        "9 - kv >= W",
        "kv >> 4 <= q >> 4",
        "floordiv(kv, 5) >= floordiv(q, 5)",
        "kv / 7 == q / 7",
        "kv / 7 < q / 7",
        "kv / 7 >= q / 7",
        "kv / 16 == q / 16 && kv <= q",
        "doc[q] <= kv",
        "kv > doc[q] && kv <= q",
        "kv >= q && kv >= P || kv > W && true",
        "kv <= KV - 3",
        "q >= kv && q - kv <= 2147483647",
        "kv / 4 <= 3",
        "min(q, P) >= kv",
        "kv < q == true",
        "abs(q - kv) <= 5",
        "abs(q - kv) < W",
        "abs(kv - q - 3) <= W && kv <= q",
        "W >= abs(kv)",
        "!(abs(q - kv) > 7)",
        "!(W <= abs((doc[h] & 63) - kv))",
        "!(q - kv >= 100 || q < kv)",
        "!(kv <= q && kv < P)",
        "!(kv != q)",
        "!(h < 4 && kv <= q)",
        "!(h < 4 || kv <= q)",
        "!(h < W ? kv <= q : kv < P)",
        "kv < q || kv == q",
        "kv == q || kv > q",
        "h < 2 && kv <= q || h >= 2 && kv == q",
        "W < h && kv <= q && kv > P || kv == q && !(W < h)",
        "kv <= q && (h == 3 && kv > P) || !(h == 3) && abs(q - kv) < 9",
    };
    static const char *const others[] = {
        "doc[q] == doc[kv]",
        "kv != q",
        "kv <= q || kv >= P",
        "kv % 2 == 0",
        "kv + W <= q",
        "kv * 2 <= q",
        "kv - q <= q - kv",
        "kv <= q || q - kv < 5 && kv < P",
        "doc[kv] <= q",
        "kv / W <= q",
        "abs(q - kv) >= 5",
        "abs(q - kv) == 5",
        "abs(kv + W) <= q",
        "abs(kv / 2) <= q",
        "!(kv == q)",
        "kv != q && kv <= q + 4",
        "kv <= q || kv == q + 2",
        "kv == q || kv == q + 1",
        "h < 2 && kv <= q || h >= 3 && kv == q",
        "kv / 7 <= P",
        "kv <= q ? kv < P : true",
    };
    (void)unused;
    for (size_t i = 0; i < sizeof intervals / sizeof intervals[0]; i++)
        check_interval(intervals[i], 1);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        check_interval(others[i], 0);
}

/* ---- gradients ---- */

static double value_at(const mod_fn *fn, const eval_env *env, eval_point at, double score)
{
    at.score = score;
    return eval_scalar(fn, env, &at, values, NULL);
}

static int is_near(double got, double want, double scale)
{
    return fabs(got - want) <= 3e-4 * (1.0 + scale + fabs(want));
}

/* The limit from the left, the right or both sides, of differences in double. */
static int is_derivative(const mod_fn *fn, const eval_env *env, eval_point at, double got)
{
    const double d = 1e-5, x = at.score;
    const double below = value_at(fn, env, at, x - d), here = value_at(fn, env, at, x);
    const double above = value_at(fn, env, at, x + d);
    const double scale = fabs(above - 2.0 * here + below) / d; /* curvature */
    return is_near(got, (above - below) / (2.0 * d), scale)
           || is_near(got, (above - here) / d, scale)
           || is_near(got, (here - below) / d, scale);
}

static uint32_t find_node(const mod_fn *fn, mod_op op, int32_t imm)
{
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (fn->nodes[i].op == op && (op == OP_SCORE || fn->nodes[i].imm.i == imm))
            return i;
    return UINT32_MAX;
}

/* fn with score and scalar capture c exchanged. */
static const mod_fn *exchanged(const mod_fn *fn, arena *arena, int32_t c)
{
    mod_builder *b = mod_builder_create(arena, fn->kind, fn->captures, fn->n_captures);
    uint32_t *copy = arena_array(arena, fn->n_nodes, sizeof *copy);
    const mod_fn *out;
    saccade_error err;
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        uint32_t args[SACCADE_MAX_RANK];
        for (uint32_t k = 0; k < n->n_args; k++)
            args[k] = copy[fn->args[n->args + k]];
        if (n->op == OP_SCORE)
            copy[i] = mod_emit(b, OP_SCALAR, NULL, 0, c, 0, 0);
        else if (n->op == OP_SCALAR && n->imm.i == c)
            copy[i] = mod_emit(b, OP_SCORE, NULL, 0, 0, 0, 0);
        else
            copy[i] = mod_emit(b, (mod_op)n->op, args, n->n_args, n->imm.i, 0, 0);
    }
    assert_int_equal(mod_finish(b, copy[fn->result], &out, &err), SACCADE_OK);
    return out;
}

enum { CAPTURE_C = 3 }; /* "c" of random_env: f32 scalar */

/* d/d score and d/d c against differences of fn and of fn exchanged; 1 if there was one. */
static int check_gradient(uint64_t seed)
{
    random_source r = {seed};
    random_env e;
    arena arena;
    const mod_fn *grad;
    saccade_error err;
    uint32_t wanted[2], results[2];
    const random_shape shape = {
        .kind = SACCADE_SCORE, .n_ops = 1 + random_below(&r, 25), .is_smooth = true};
    arena_init(&arena);
    random_env_make(&e, &r);
    float c = (float)(random_below(&r, 4001) - 2000) / 1000.0f;
    double g = (double)c * 0.7 + 0.1;
    e.tensors[CAPTURE_C].data = &c;
    e.tensors[CAPTURE_C + 1].data = &g;
    const mod_fn *fn = random_fn(&arena, &r, &e, &shape);
    wanted[0] = find_node(fn, OP_SCORE, 0);
    wanted[1] = find_node(fn, OP_SCALAR, CAPTURE_C);
    const int is_useful = wanted[0] != UINT32_MAX && wanted[1] != UINT32_MAX;
    if (is_useful) {
        const mod_fn *turned = exchanged(fn, &arena, CAPTURE_C);
        assert_int_equal(pass_gradient(fn, wanted, 2, &arena, &grad, results, &err),
                         SACCADE_OK);
        assert_int_equal(grad->nodes[results[0]].type, MOD_FLOAT);
        for (int k = 0; k < 5; k++) {
            const double score = (random_below(&r, 4001) - 2000) / 1024.0; /* an exact float */
            const eval_point at = {0, random_below(&r, 8), random_below(&r, 40),
                                   random_below(&r, 700), score};
            const float c_before = c;
            eval_scalar(grad, &e.env, &at, values, NULL);
            const double by_score = values[results[0]], by_c = values[results[1]];
            int ok = is_derivative(fn, &e.env, at, by_score);
            eval_point turned_at = at;
            turned_at.score = (double)c;
            c = (float)score;
            ok = ok && is_derivative(turned, &e.env, turned_at, by_c);
            c = c_before;
            if (!ok)
                fail_msg("SACCADE_SEED=%llu point %d: d/dscore %g, d/dc %g",
                         (unsigned long long)seed, k, by_score, by_c);
        }
    }
    random_env_free(&e);
    arena_free(&arena);
    return is_useful;
}

static void test_gradient_random(void **unused)
{
    int n = 0;
    (void)unused;
    for (uint64_t seed = first_seed(), i = 0; i < 3000; i++, seed++)
        n += check_gradient(seed);
    assert_true(n >= 200);
}

/* d result / d score of a text at kv 3. */
static double gradient_at(const char *text, double score, bool is_wide)
{
    arena arena;
    const mod_fn *grad;
    uint32_t result;
    saccade_error err;
    const eval_env env = {.size = {1, 1, 1, 8, 8, 8, 8}, .is_wide = is_wide};
    const eval_point at = {.kv = 3, .score = score};
    arena_init(&arena);
    saccade_mod *mod = bound_text(SACCADE_SCORE, text);
    const mod_fn *fn = mod_function(mod);
    const uint32_t wanted = find_node(fn, OP_SCORE, 0);
    assert_int_equal(pass_gradient(fn, &wanted, 1, &arena, &grad, &result, &err), SACCADE_OK);
    assert_int_equal(result, grad->result);
    const double slope = eval_scalar(grad, &env, &at, values, NULL);
    saccade_mod_destroy(mod);
    arena_free(&arena);
    return slope;
}

/* Where ?: does not choose, nothing of that arm is in the gradient; values by hand. */
static void test_gradient_ends(void **unused)
{
    static const struct {
        const char *text;
        double score, want;
    } cases[] = {
        {"score > 0.0 ? sqrt(score) : 0.0", -1.0, 0.0},
        {"score > 0.0 ? sqrt(score) : 0.0", 4.0, 0.25},
        {"score > 0.0 ? log(score) * score : score", -2.0, 1.0},
        {"abs(score)", 0.0, 0.0},
        {"abs(score)", -3.0, -1.0},
        {"max(score, 2.0)", 1.0, 0.0},
        {"min(score, 2.0)", 1.0, 1.0},
        /* ties: half each, and none against a constant */
        {"max(score, 2.0)", 2.0, 0.0},
        {"max(2.0, score)", 2.0, 0.0},
        {"min(score, 2.0)", 2.0, 0.0},
        {"min(2.0, score)", 2.0, 0.0},
        {"min(2.0, score)", 1.0, 1.0},
        {"max(2.0, score)", 3.0, 1.0},
        {"clamp(score, -1.0, 2.0)", -1.0, 0.0},
        {"clamp(score, -1.0, 2.0)", 0.0, 1.0},
        {"clamp(score, -1.0, 2.0)", 2.0, 0.0},
        {"max(score, float(kv))", 3.0, 0.0},
        {"max(score, detach(score))", 1.0, 0.0},
        {"max(score, floor(score))", 1.0, 0.0},
        {"max(score, 0.5 * score)", 0.0, 0.75},
        {"min(0.5 * score, 4.0 * score)", 0.0, 2.25},
        {"max(0.5 * score, 4.0 * score)", -1.0, 0.5},
        {"max(0.5 * score, kv < 5 ? score : -inf)", 0.0, 0.75},
        {"pow(score, 2.0)", -3.0, -6.0},
        {"pow(score, 0.0)", 0.0, 0.0},
        {"pow(score, 1.0)", 0.0, 1.0},
        {"pow(score, -2147483648.0)", -1.0, 2147483648.0}, /* y - 1 is rounded */
        {"pow(score, -16777216.0)", -1.0, 16777216.0},
        {"pow(score, 16777218.0)", -1.0, -16777218.0},
        {"pow(score, 16777218.0)", 1.0, 16777218.0},
        {"pow(score, 16777216.0)", -1.0, -16777216.0},
        {"pow(score, 16777215.0)", -1.0, 16777215.0},
        {"score / 0.0", 1.0, 0.0},
        {"floor(score) + score", 1.5, 1.0},
        {"kv < 5 ? score : -inf", 1.0, 1.0},
        {"kv > 5 ? -inf * score : score", 1.0, 1.0},
        {"softcap(20.0)", 0.0, 1.0},
        {"float(int(score)) * score", 3.5, 3.0},
        {"score + detach(round(score) - score)", 1.75, 1.0},
        {"detach(score) * score", 3.0, 3.0},
        {"detach(score)", 3.0, 0.0},
        /* one product of two arms, neither of them chosen */
        {"(kv > 5 ? score * inf : score) + (kv > 6 ? score * inf : 2.0 * score)", 1.0, 3.0},
        {"(kv > 5 ? sqrt(score) : 0.0) * (kv > 6 ? sqrt(score) : 1.0)", -1.0, 0.0},
        {"kv < 5 ? 2.0 * score : (kv > 6 ? score * inf : score) + score * inf", 1.0, 2.0},
    };
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double got = gradient_at(cases[i].text, cases[i].score, false);
        if (!(fabs(got - cases[i].want) <= 1e-6))
            fail_msg("%s at %g: got %g, expected %g", cases[i].text, cases[i].score, got,
                     cases[i].want);
    }
}

/* The reference's constants are those of double: f32 holds the first seven digits of each. */
static void test_gradient_in_double(void **unused)
{
    static const struct {
        const char *text;
        double score, want;
    } cases[] = {
        {"score * (0.25 + 1e-9)", 3.0, 0.25 + (double)1e-9f},
        {"score * (1.0 / 3.0)", 3.0, 1.0 / 3.0},
        {"exp2(score)", 1.0, 1.3862943611198906},
        {"pow(score, 16777218.0)", -1.0, -16777218.0},
        {"log2(score)", 2.0, 0.7213475204444817},
        {"erf(score)", 0.0, 1.1283791670955126},
        {"tanh(score * sqrt(2.0))", 0.0, 1.4142135623730951},
    };
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double got = gradient_at(cases[i].text, cases[i].score, true);
        if (!(fabs(got - cases[i].want) <= 1e-15))
            fail_msg("%s: got %.17g, expected %.17g", cases[i].text, got, cases[i].want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_simplify_random),
        cmocka_unit_test(test_simplify_texts),
        cmocka_unit_test(test_affine),
        cmocka_unit_test(test_interval),
        cmocka_unit_test(test_gradient_random),
        cmocka_unit_test(test_gradient_ends),
        cmocka_unit_test(test_gradient_in_double),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
