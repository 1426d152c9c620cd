/* How reads of captures vary, and the classes by which their gradients are summed: a table of
 * texts, and for each read, of the table and of random mods, what its class claims of the
 * elements that scores read, over all scores of a small problem. */
#include "pass/facts.h"
#include "support/random_mod.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { NB = 2, NH = 3, NQ = 7, NKV = 9, POINTS = NB * NH * NQ * NKV };

static const saccade_sizes sizes = {NB, NH, NH, NQ, NKV, 16, 16};

/* ---- what a class claims ---- */

/* The element that a score reads, its sum by the class, and its head. */
typedef struct term {
    int32_t element[SACCADE_MAX_RANK], sum, head;
} term;

static int32_t sum_of(pass_scatter scatter, int32_t q, int32_t kv)
{
    switch (scatter) {
    case SCATTER_ROWS:
        return q;
    case SCATTER_COLUMNS:
        return kv;
    case SCATTER_DIAGONALS:
        return q - kv;
    case SCATTER_ELEMENTS:
        return q * NKV + kv;
    default:
        return 0;
    }
}

static void find_terms(const mod_fn *fn, const pass_read *read, const eval_env *env,
                       term *terms)
{
    double *values = malloc(fn->n_nodes * sizeof *values);
    for (int32_t i = 0; i < POINTS; i++) {
        const eval_point at = {i / (NH * NQ * NKV), i / (NQ * NKV) % NH, i / NKV % NQ, i % NKV,
                               0.25 * (i % 17)};
        term *t = &terms[i];
        memset(t, 0, sizeof *t);
        eval_scalar(fn, env, &at, values, NULL);
        for (int d = 0; d < read->rank; d++)
            t->element[d] = (int32_t)values[fn->args[fn->nodes[read->node].args + (uint32_t)d]];
        t->sum = sum_of(read->scatter, at.q, at.kv);
        t->head = at.b * NH + at.h;
    }
    free(values);
}

/* One sum has one element; sums that are not shared have elements of their own. */
static void check_claims(const mod_fn *fn, const pass_read *read, const eval_env *env,
                         const char *text)
{
    static term terms[POINTS];
    if (read->scatter == SCATTER_NONE || read->scatter == SCATTER_GENERAL)
        return;
    find_terms(fn, read, env, terms);
    for (int i = 0; i < POINTS; i++)
        for (int k = 0; k < i; k++) {
            const int is_same = terms[i].head == terms[k].head && terms[i].sum == terms[k].sum;
            const int meets = memcmp(terms[i].element, terms[k].element,
                                     sizeof terms[i].element)
                              == 0;
            if (is_same && !meets)
                fail_msg("%s: n%u has several elements for a sum of class %d", text, read->node,
                         (int)read->scatter);
            if (meets && !is_same && !read->is_shared)
                fail_msg("%s: n%u has one element for several sums of class %d", text,
                         read->node, (int)read->scatter);
            if (meets && read->scatter == SCATTER_ELEMENTS && terms[i].sum != terms[k].sum)
                fail_msg("%s: n%u has one element for several scores", text, read->node);
        }
}

/* What says to sum no keys has an element for each key of a row; by the sum of an index that
 * may be below 0, where the tensor has room for all of a row. */
static int check_keys(const mod_fn *fn, const pass_read *read, const eval_env *env,
                      const char *text)
{
    static term terms[POINTS];
    if (pass_sums_keys(read))
        return 0;
    find_terms(fn, read, env, terms);
    for (int i = 0; i < POINTS; i++)
        for (int k = i - i % NKV; k < i; k++)
            if (memcmp(terms[i].element, terms[k].element, sizeof terms[i].element) == 0)
                fail_msg("%s: n%u has one element for several keys of a row", text, read->node);
    return 1;
}

/* An index that has a sum f(q) + g(kv) is that, or below 0: over all squares from the first row
 * and key. */
static int check_sums(const mod_fn *fn, const pass_read *read, const eval_env *env,
                      const char *text)
{
    double *values = malloc(fn->n_nodes * sizeof *values);
    int n = 0;
    for (int d = 0; d < read->rank; d++) {
        static int32_t sum[POINTS];
        const uint32_t of = read->index[d].sum;
        const uint32_t index = fn->args[fn->nodes[read->node].args + (uint32_t)d];
        for (int32_t i = 0; i < POINTS && of != PASS_NO_NODE; i++) {
            const eval_point at = {i / (NH * NQ * NKV), i / (NQ * NKV) % NH, i / NKV % NQ,
                                   i % NKV, 0.5};
            eval_scalar(fn, env, &at, values, NULL);
            sum[i] = (int32_t)values[of];
            if (sum[i] >= 0 && sum[i] != (int32_t)values[index])
                fail_msg("%s: index %d is not its sum", text, d);
            const int32_t head = i - i % (NQ * NKV), row = i - i % NKV, key = head + i % NKV;
            const uint32_t along = (uint32_t)sum[i] - (uint32_t)sum[row];
            if (along != (uint32_t)sum[key] - (uint32_t)sum[head])
                fail_msg("%s: index %d is no f(q) + g(kv)", text, d);
        }
        n += of != PASS_NO_NODE;
    }
    free(values);
    return n;
}

/* ---- texts ---- */

static float floats[8][POINTS];
static int32_t ints[8][POINTS];

/* Float captures are t u w, others ints; tensors are as large as any index of the table. */
static saccade_mod *bind(const char *text, saccade_tensor *tensors)
{
    saccade_capture captures[8];
    saccade_mod *generic, *mod;
    saccade_error err;
    if (saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &generic, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = strchr("tuw", captures[i].name[0]) ? SACCADE_F32 : SACCADE_I32;
    }
    if (saccade_mod_bind(generic, captures, n, &mod, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    for (int32_t i = 0; i < n; i++) {
        static const int64_t shape[SACCADE_MAX_RANK] = {2, 3, 3, 3, 2, 1, 1, 1};
        const mod_capture *c = &mod_function(mod)->captures[i];
        void *data = c->type == MOD_FLOAT ? (void *)floats[i] : (void *)ints[i];
        tensors[i] = saccade_tensor_of(data, c->dtype, c->rank, shape);
    }
    return mod;
}

static const struct row {
    const char *text;
    pass_scatter scatter;
    int is_shared;
} rows[] = {
    {"score * w", SCATTER_HEADS, 1},
    {"score + t[b, h]", SCATTER_HEADS, 0},
    {"score + t[h]", SCATTER_HEADS, 1},
    {"score + t[h / 2, b]", SCATTER_HEADS, 1},
    {"score + t[b, h, 5]", SCATTER_HEADS, 0},
    {"score + t[q]", SCATTER_ROWS, 1},
    {"score + t[b, h, q]", SCATTER_ROWS, 0},
    {"score + t[b, h, Q - q]", SCATTER_ROWS, 0},
    {"score + t[b, h, q + h]", SCATTER_ROWS, 1},
    {"score + t[b, h, q / 2]", SCATTER_ROWS, 1},
    {"score + t[q / 2]", SCATTER_ROWS, 1},
    {"score + t[doc[q]]", SCATTER_ROWS, 1},
    {"score + t[h, kv]", SCATTER_COLUMNS, 1},
    {"score + t[b, kv, h]", SCATTER_COLUMNS, 0},
    {"score + t[doc[kv]]", SCATTER_COLUMNS, 1},
    {"score + t[ids[b, kv], h]", SCATTER_COLUMNS, 1},
    {"score + t[h, q - kv + 100]", SCATTER_DIAGONALS, 1},
    {"score + t[b, h, q - kv + W]", SCATTER_DIAGONALS, 0},
    {"score + t[b, h, kv - q]", SCATTER_DIAGONALS, 0},
    {"score + t[clamp((q - kv) / 3, 0, 31), h]", SCATTER_DIAGONALS, 1},
    {"score + t[clamp(int(8.0 * log(1.0 + max(q - kv, 0))), 0, 31), h]", SCATTER_DIAGONALS, 1},
    {"score + t[far[q - kv + 50]]", SCATTER_DIAGONALS, 1},
    {"score + t[2 * q - 2 * kv]", SCATTER_DIAGONALS, 1},
    {"score + t[q - kv > 3 ? 1 : 0]", SCATTER_DIAGONALS, 1},
    {"score + t[kv > q ? 1 : 0]", SCATTER_DIAGONALS, 1},
    {"score + t[q == kv ? 3 : q <= kv ? 1 : 0, h]", SCATTER_DIAGONALS, 1},
    {"t5_bias(t, 32, 128)", SCATTER_DIAGONALS, 1},
    {"t5_causal_bias(t, 32, 128)", SCATTER_DIAGONALS, 1},
    {"score + t[b, h, q, kv]", SCATTER_ELEMENTS, 0},
    {"score + t[h, q, kv]", SCATTER_ELEMENTS, 1},
    {"score + t[q, kv]", SCATTER_ELEMENTS, 1},
    {"score + t[b, h, q - kv + 40, kv]", SCATTER_ELEMENTS, 0},
    {"score + t[b, h, q, doc[kv]]", SCATTER_GENERAL, 1},
    {"score + t[b, h, q + h, kv]", SCATTER_GENERAL, 1},
    {"score + t[idx[q, kv]]", SCATTER_GENERAL, 1},
    {"score + t[q + kv]", SCATTER_GENERAL, 1},
    {"score + t[q < 2 * kv ? 1 : 0]", SCATTER_GENERAL, 1},
    {"score + t[q < kv + W ? 1 : 0]", SCATTER_GENERAL, 1},
    {"score + t[q - 2 * kv]", SCATTER_GENERAL, 1},
    {"score + t[q / 2, kv / 2]", SCATTER_GENERAL, 1},
    {"score + t[int(score)]", SCATTER_GENERAL, 1},
    {"score + t[doc[q] == doc[kv] ? 1 : 0]", SCATTER_GENERAL, 1},
    {"score + t[h, doc[q] * W - doc[kv] / 2 + 40]", SCATTER_GENERAL, 1},
    {"x = q / 3 - kv / 2; score + t[h, x < 0 ? x + 9 : x]", SCATTER_GENERAL, 1},
    {"relative_table_2d(t, 3, 3)", SCATTER_GENERAL, 1},
};

static const pass_read *float_read(const pass_facts *facts, uint32_t nth)
{
    for (uint32_t i = 0; i < facts->n_reads; i++)
        if (facts->reads[i].scatter != SCATTER_NONE && nth-- == 0)
            return &facts->reads[i];
    return NULL;
}

static void classes_of_texts(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < POINTS; k++)
            ints[i][k] = (k * 5 + 3) % 11;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_tensor tensors[8];
        eval_env env = {.tensors = tensors};
        const pass_facts *facts;
        const mod_fn *fn;
        arena a;
        arena_init(&a);
        saccade_mod *mod = bind(rows[i].text, tensors);
        eval_sizes(&sizes, env.size);
        assert_int_equal(pass_simplify(mod_function(mod), &a, &fn, NULL), SACCADE_OK);
        assert_int_equal(pass_facts_make(fn, &a, &facts, NULL), SACCADE_OK);
        const pass_read *read = float_read(facts, 0);
        assert_non_null(read);
        if (read->scatter != rows[i].scatter
            || (read->scatter != SCATTER_GENERAL && read->is_shared != rows[i].is_shared))
            fail_msg("%s: class %d, shared %d", rows[i].text, (int)read->scatter,
                     read->is_shared);
        check_claims(fn, read, &env, rows[i].text);
        check_keys(fn, read, &env, rows[i].text);
        check_sums(fn, read, &env, rows[i].text);
        saccade_mod_destroy(mod);
        arena_free(&a);
    }
}

static void classes_of_random_mods(void **state)
{
    int n[SCATTER_GENERAL + 1] = {0}, n_sums = 0, n_keys = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 250; seed++) {
        random_mod r;
        saccade_tensor tensors[MOD_MAX_CAPTURES];
        eval_env env = {.tensors = tensors};
        const pass_read *reads;
        uint32_t n_reads;
        arena a;
        arena_init(&a);
        random_mod_make(seed, SACCADE_SCORE, 0, 3 + (int)(seed % 3), &sizes, &r);
        const mod_fn *fn = mod_function(r.mod);
        eval_sizes(&sizes, env.size);
        assert_int_equal(eval_resolve(fn, r.bindings, r.n_bindings, 1, tensors, NULL),
                         SACCADE_OK);
        assert_int_equal(pass_find_reads(fn, &a, &reads, &n_reads, NULL), SACCADE_OK);
        for (uint32_t i = 0; i < n_reads; i++) {
            n[reads[i].scatter]++;
            check_claims(fn, &reads[i], &env, r.text);
            n_keys += check_keys(fn, &reads[i], &env, r.text);
            n_sums += check_sums(fn, &reads[i], &env, r.text);
        }
        arena_free(&a);
        random_mod_free(&r);
    }
    for (int i = 0; i <= SCATTER_GENERAL; i++)
        printf("class %d: %d reads\n", i, n[i]);
    printf("an element for each key of a row: %d reads\n", n_keys);
    assert_true(n[SCATTER_HEADS] > 20 && n[SCATTER_GENERAL] > 20 && n_sums > 100);
    assert_true(n_keys > 20);
}

/* ---- several reads of a tensor ---- */

static void check_pair(const char *text, pass_scatter first, pass_scatter second, int is_shared)
{
    saccade_tensor tensors[8];
    const pass_facts *facts;
    arena a;
    arena_init(&a);
    saccade_mod *mod = bind(text, tensors);
    assert_int_equal(pass_facts_make(mod_function(mod), &a, &facts, NULL), SACCADE_OK);
    const pass_read *x = float_read(facts, 0), *y = float_read(facts, 1);
    assert_true(x && y && !float_read(facts, 2));
    if (x->scatter != first || y->scatter != second || x->is_shared != is_shared
        || y->is_shared != is_shared)
        fail_msg("%s: classes %d %d, shared %d %d", text, (int)x->scatter, (int)y->scatter,
                 x->is_shared, y->is_shared);
    saccade_mod_destroy(mod);
    arena_free(&a);
}

static void reads_of_one_tensor_meet(void **state)
{
    (void)state;
    check_pair("score + t[b, h, q] + t[b, h, kv]", SCATTER_ROWS, SCATTER_COLUMNS, 1);
    check_pair("score + t[b, h, q] + u[b, h, kv]", SCATTER_ROWS, SCATTER_COLUMNS, 0);
    check_pair("score + t[b, h, q, kv] + t[b, h, kv, q]", SCATTER_GENERAL, SCATTER_GENERAL, 1);
    check_pair("score + t[q, 0] + t[q, kv]", SCATTER_ROWS, SCATTER_GENERAL, 1);
}

/* ---- dimensions and words ---- */

static void words_of(const char *text, const char *words)
{
    saccade_tensor tensors[8];
    const pass_facts *facts;
    strbuf out;
    arena a;
    arena_init(&a);
    strbuf_init(&out, 0);
    saccade_mod *mod = bind(text, tensors);
    assert_int_equal(pass_facts_make(mod_function(mod), &a, &facts, NULL), SACCADE_OK);
    assert_int_equal(pass_facts_print(facts, &out, NULL), SACCADE_OK);
    if (!strstr(strbuf_text(&out), words))
        fail_msg("%s: no '%s' in:\n%s", text, words, strbuf_text(&out));
    saccade_mod_destroy(mod);
    strbuf_free(&out);
    arena_free(&a);
}

static void reads_in_words(void **state)
{
    (void)state;
    words_of("score + t[h, q - kv + W]", "reads t[h + c, q - kv + c]; its gradient: a sum for "
                                         "each diagonal, added in order\n");
    words_of("score + t[b, h, 2 * q]", "reads t[b + c, h + c, 2 q + c]; its gradient: a sum "
                                       "for each row, added in order\n");
    words_of("score + t[doc[kv], h]", "reads t[f(kv), h + c]; its gradient: a sum for each "
                                      "column, added in order\n");
    words_of("score + t[doc[kv], h]", "reads doc[kv + c]\n");
    words_of("score * w", "reads w[]; its gradient: a sum for each head, added in order\n");
    words_of("score + t[idx[q, kv]]", "its gradient: each score adds for itself\n");
    words_of("score + t[h, q / 3 - kv / 2 + 5]", "reads t[h + c, f(q) + g(kv)]; its gradient: "
                                                 "each score adds for itself\n");
    words_of("x = q / 3 - kv / 2; score + t[x < 0 ? x + 9 : x]", "reads t[f(q) + g(kv)]; its");
    words_of("score + t[q / 3 * (kv / 2)]", "reads t[f(q, kv)]; its gradient");
    words_of("score + t[b, h, q, kv]", "an element for each score, stored once\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes_of_texts),
        cmocka_unit_test(classes_of_random_mods),
        cmocka_unit_test(reads_of_one_tensor_meet),
        cmocka_unit_test(reads_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
