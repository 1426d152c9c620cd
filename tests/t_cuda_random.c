/* Random scores and masks compiled by NVRTC, forward and backward, for sm_90a and sm_80: what
 * the language allows has CUDA text that compiles. Nothing runs here, so values and ranges do
 * not matter, but the forms do that kernels have faster ways for: lines in the positions over
 * constants, what follows from the row alone, captures of every dtype. */
#include "support/device_case.h"
#include "support/problem_case.h"
#include "support/random_mod.h"
#include "support/short_run.h"

#include "base/strings.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- captures: one of each dtype, and scalars ---- */

static const struct {
    const char *name;
    saccade_dtype dtype;
    int32_t rank;
} captures[] = {
    {"a", SACCADE_F32, 0},     {"half", SACCADE_F16, 0},    {"n", SACCADE_I32, 0},
    {"on", SACCADE_BOOL, 0},   {"t_f64", SACCADE_F64, 1},   {"t_f32", SACCADE_F32, 2},
    {"t_f16", SACCADE_F16, 1}, {"t_bf16", SACCADE_BF16, 3}, {"t_bool", SACCADE_BOOL, 1},
    {"t_u8", SACCADE_U8, 1},   {"t_i8", SACCADE_I8, 2},     {"t_u16", SACCADE_U16, 1},
    {"t_i16", SACCADE_I16, 2}, {"t_u32", SACCADE_U32, 1},   {"t_i32", SACCADE_I32, 2},
    {"t_u64", SACCADE_U64, 1}, {"t_i64", SACCADE_I64, 1},
};
enum {
    SCALARS = 4,
    FLOATS_TO = 8,
    BOOLS_TO = 9,
    CAPTURES = sizeof captures / sizeof captures[0]
};

/* Of a name in scores, which are made here, or in masks, which random_mod makes. */
static saccade_dtype dtype_of(const char *name)
{
    for (int i = 0; i < CAPTURES; i++)
        if (strcmp(captures[i].name, name) == 0)
            return captures[i].dtype;
    return random_mod_dtype(name);
}

/* ---- texts ---- */

typedef struct writer {
    uint64_t state;
    strbuf text;
    int is_row; /* without keys and scores */
    int n_locals;
} writer;

static uint32_t pick(writer *w, uint32_t n)
{
    return random_mod_below(&w->state, n);
}

#define PUT(w, ...) strbuf_printf(&(w)->text, __VA_ARGS__)
#define ONE_OF(w, ...)                            \
    one_of(w, (const char *const[]){__VA_ARGS__}, \
           sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))

static const char *one_of(writer *w, const char *const *list, uint32_t n)
{
    return list[pick(w, n)];
}

static void put_int(writer *w, int depth);

static void put_index(writer *w, int depth)
{
    if (depth > 0 && pick(w, 4) == 0)
        put_int(w, depth - 1);
    else if (w->is_row)
        PUT(w, "%s", ONE_OF(w, "q", "h", "b", "q / 3", "q % 8", "n"));
    else
        PUT(w, "%s",
            ONE_OF(w, "kv", "q", "h", "kv", "q - kv + Q", "clamp(kv - q, -8, 8) + 8", "kv / 3",
                   "q % 8", "(q + kv) % 16"));
}

static void put_load(writer *w, int capture, int depth)
{
    PUT(w, "%s", captures[capture].name);
    for (int i = 0; i < captures[capture].rank; i++) {
        PUT(w, i > 0 ? ", " : "[");
        put_index(w, depth);
    }
    PUT(w, captures[capture].rank > 0 ? "]" : "");
}

static void put_int_leaf(writer *w, int depth)
{
    if (pick(w, 4) == 0)
        put_load(w, BOOLS_TO + (int)pick(w, CAPTURES - BOOLS_TO), depth);
    else if (w->is_row)
        PUT(w, "%s", ONE_OF(w, "q", "h", "b", "Q", "KV", "n", "7", "H"));
    else
        PUT(w, "%s",
            ONE_OF(w, "q", "kv", "kv", "h", "(kv - q)", "(q - kv)", "KV", "D", "n", "3"));
}

static void put_int(writer *w, int depth)
{
    const uint32_t form = depth > 0 ? pick(w, 6) : 0;
    if (form == 0) {
        put_int_leaf(w, depth);
        return;
    }
    PUT(w, form == 5 ? "abs(" : "(");
    put_int(w, depth - 1);
    if (form < 3) {
        PUT(w, "%s", ONE_OF(w, " + ", " - ", " * "));
        put_int(w, depth - 1);
    } else if (form < 5) {
        PUT(w, "%s", ONE_OF(w, " / ", " % ", " * "));
        PUT(w, "%s", ONE_OF(w, "3", "8", "-5", "n", "Q"));
    }
    PUT(w, ")");
}

/* What changes evenly from key to key, or from row to row. */
static void put_line(writer *w)
{
    PUT(w, "float(%s)",
        w->is_row ? ONE_OF(w, "q", "q - n", "2 * q + 1")
                  : ONE_OF(w, "kv - q", "kv", "q - kv", "3 * kv + h"));
}

static void put_float(writer *w, int depth);

static void put_bool(writer *w, int depth)
{
    switch (depth > 0 ? pick(w, 5) : 4) {
    case 0:
        PUT(w, "(");
        put_bool(w, depth - 1);
        PUT(w, "%s", ONE_OF(w, " && ", " || ", " == "));
        put_bool(w, depth - 1);
        PUT(w, ")");
        break;
    case 1:
        PUT(w, "(");
        put_float(w, depth - 1);
        PUT(w, "%s", ONE_OF(w, " < ", " >= ", " == "));
        put_float(w, depth - 1);
        PUT(w, ")");
        break;
    case 2:
        put_load(w, BOOLS_TO - 1, depth);
        break;
    case 3:
        PUT(w, "%s", ONE_OF(w, "on", "!on"));
        break;
    default:
        PUT(w, "(");
        put_int(w, depth - 1);
        PUT(w, "%s", ONE_OF(w, " < ", " >= ", " != "));
        put_int(w, depth - 1);
        PUT(w, ")");
    }
}

static void put_float_leaf(writer *w, int depth)
{
    switch (pick(w, 6)) {
    case 0:
        PUT(w, "%s", ONE_OF(w, "a", "half", "0.5", "-3.0", "1e-3", "inf"));
        break;
    case 1:
        put_load(w, SCALARS + (int)pick(w, FLOATS_TO - SCALARS), depth);
        break;
    case 2:
        if (w->n_locals > 0) {
            PUT(w, "row");
            break;
        } /* fall through */
    case 3:
        PUT(w, "float(");
        put_int(w, depth - 1);
        PUT(w, ")");
        break;
    default:
        PUT(w, w->is_row ? "float(q)" : "score");
    }
}

static void put_call(writer *w, const char *name, int n, int depth)
{
    PUT(w, "%s(", name);
    for (int i = 0; i < n; i++) {
        PUT(w, i > 0 ? ", " : "");
        put_float(w, depth - 1);
    }
    PUT(w, ")");
}

static void put_float(writer *w, int depth)
{
    if (depth <= 0) {
        put_float_leaf(w, depth);
        return;
    }
    switch (pick(w, 8)) {
    case 0:
        put_call(w, ONE_OF(w, "tanh", "exp", "sigmoid", "abs", "-", "exp2", "sin", "floor"), 1,
                 depth);
        break;
    case 1:
        put_call(w, ONE_OF(w, "min", "max"), 2, depth);
        break;
    case 2:
        PUT(w, "(");
        put_bool(w, depth - 1);
        PUT(w, " ? ");
        put_float(w, depth - 1);
        PUT(w, " : ");
        put_float(w, depth - 1);
        PUT(w, ")");
        break;
    case 3:
    case 4:
        PUT(w, "(");
        if (pick(w, 2))
            put_line(w);
        else
            put_float(w, depth - 1);
        PUT(w, " / %s)", ONE_OF(w, "3.0", "7", "0.3", "8.0", "-5.0", "a", "float(n)", "Q"));
        break;
    case 5:
        put_float_leaf(w, depth);
        break;
    default:
        PUT(w, "(");
        put_float(w, depth - 1);
        PUT(w, "%s", ONE_OF(w, " + ", " - ", " * ", " / "));
        put_float(w, depth - 1);
        PUT(w, ")");
    }
}

/* Half of them with a local that follows from the row alone. */
static void put_score(writer *w)
{
    if (pick(w, 2)) {
        PUT(w, "row = ");
        w->is_row = 1;
        put_float(w, 2);
        w->is_row = 0;
        w->n_locals = 1;
        PUT(w, "; ");
    }
    PUT(w, "score%s", ONE_OF(w, " + ", " + ", " * ", " / a - "));
    put_float(w, 1 + (int)pick(w, 3));
}

/* ---- plans ---- */

/* Forms that kernels have code of their own for in these dtypes. */
static const struct {
    const char *problem, *score;
} known[] = {
    {"b1 h4/2 q200 kv256 d64 bf16", "score + float(kv - q) / 3.0"},
    {"b1 h2 q150 kv200 d128 f16", "score + float(kv) / float(n) / Q"},
};
enum { KNOWN = sizeof known / sizeof known[0], SIZE = 64 };

static void random_problem(writer *w, char problem[SIZE])
{
    const char *heads = ONE_OF(w, "2", "4/2", "8/1"), *rows = ONE_OF(w, "1", "150", "256");
    const char *dims = ONE_OF(w, "d64", "d128", "d40");
    snprintf(problem, SIZE, "b2 h%s q%s kv300 %s %s", heads, rows, dims,
             ONE_OF(w, "bf16", "f16", "f32"));
}

static saccade_mod *bind(saccade_kind kind, const char *text, const char *what)
{
    saccade_error err = {0};
    saccade_capture of[CAPTURES + RANDOM_MOD_CAPTURES];
    saccade_mod *generic, *bound;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err))
        fail_msg("%s %d:%d: %s", what, err.line, err.column, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        of[i] = saccade_mod_capture(generic, i);
        of[i].dtype = dtype_of(of[i].name);
    }
    if (saccade_mod_bind(generic, of, n, &bound, &err))
        fail_msg("%s %d:%d: %s", what, err.line, err.column, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

/* Names of the float captures that a score reads. */
static int32_t float_captures(const saccade_mod *score, const char *names[CAPTURES])
{
    int32_t n = 0;
    for (int32_t i = 0; i < saccade_mod_capture_count(score); i++) {
        const saccade_capture c = saccade_mod_capture(score, i);
        if (c.dtype == SACCADE_F16 || c.dtype == SACCADE_BF16 || c.dtype == SACCADE_F32)
            names[n++] = c.name;
    }
    return n;
}

typedef enum wanted { FORWARD, GRADIENTS, GRADIENTS_OF_CAPTURES } wanted;

static void compile(const char *problem, const char *score, const char *mask, const char *arch,
                    wanted wanted, const char *what)
{
    const char *names[CAPTURES];
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_problem p;
    saccade_problem_init(&p);
    problem_case(problem, &p.sizes, &p.dtype);
    saccade_mod *score_mod = bind(SACCADE_SCORE, score, what);
    saccade_mod *mask_mod = mask ? bind(SACCADE_MASK, mask, what) : NULL;
    p.score = score_mod;
    p.mask = mask_mod;
    p.arch = arch;
    if (wanted != FORWARD)
        p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (wanted == GRADIENTS_OF_CAPTURES) {
        p.gradient_captures = names;
        p.n_gradient_captures = float_captures(score_mod, names);
        p.gradients |= p.n_gradient_captures ? SACCADE_GRADIENT_CAPTURES : 0;
    }
    if (saccade_plan_create(NULL, &p, &plan, &err))
        fail_msg("%s: %s\n%s", err.where, err.message, what);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(score_mod);
    saccade_mod_destroy(mask_mod);
}

/* The seed's last bits say what is asked for, so that any eight in turn are of all kinds. */
static void random_plan(uint64_t seed)
{
    static const wanted kinds[] = {FORWARD, GRADIENTS, FORWARD, GRADIENTS_OF_CAPTURES};
    char problem[SIZE], mask[RANDOM_MOD_TEXT] = "", what[2 * RANDOM_MOD_TEXT];
    const char *arch = seed & 1 ? "sm_80" : "sm_90a";
    writer w = {.state = seed};
    strbuf_init(&w.text, 0);
    random_problem(&w, problem);
    put_score(&w);
    if (seed % 3 == 1)
        random_mod_text(seed, SACCADE_MASK, RANDOM_MOD_IN_RANGE, 3, mask, sizeof mask);
    const char *score = strbuf_text(&w.text);
    snprintf(what, sizeof what, "SACCADE_SEED=%llu --arch %s --problem '%s' --score '%s' %s%s",
             (unsigned long long)seed, arch, problem, score, mask[0] ? "--mask " : "", mask);
    compile(problem, score, mask[0] ? mask : NULL, arch, kinds[seed >> 1 & 3], what);
    strbuf_free(&w.text);
}

static void known_scores_compile(void **state)
{
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < 2 * KNOWN; i++)
        compile(known[i / 2].problem, known[i / 2].score, NULL, i & 1 ? "sm_80" : "sm_90a",
                i & 1 ? FORWARD : GRADIENTS, known[i / 2].score);
}

static void random_scores_compile(void **state)
{
    const char *plans = getenv("SACCADE_TEST_PLANS"), *seed = getenv("SACCADE_SEED");
    const int n = plans ? atoi(plans) : is_short_run() ? 4 : 16;
    const uint64_t first = seed ? strtoull(seed, NULL, 0) : 1;
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < n; i++)
        random_plan(first + (uint64_t)i);
}

int main(int argc, char **argv)
{
    setenv("SACCADE_CACHE_DIR", "/dev/null", 1); /* nothing of this is compiled again */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_scores_compile),
        cmocka_unit_test(random_scores_compile),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
