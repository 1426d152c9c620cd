/* Facts of mods: each against what evaluation shows. What a node varies with, gains as bounds
 * of how errors grow, slopes of limits, bounds of scores, and their words. */
#include "pass/facts.h"
#include "support/random_mod.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const saccade_sizes sizes = {2, 4, 2, 48, 64, 16, 16};

/* A text's facts; its float captures end in "f", others are ints. */
typedef struct found {
    arena a;
    saccade_mod *mod;
    const mod_fn *fn;
    const pass_facts *facts;
} found;

static void find(found *f, saccade_kind kind, const char *text)
{
    saccade_capture captures[8];
    saccade_mod *generic;
    saccade_error err;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        const char *end = strchr(captures[i].name, 0) - 1;
        captures[i].dtype = *end == 'f' ? SACCADE_F32 : SACCADE_I32;
    }
    if (saccade_mod_bind(generic, captures, n, &f->mod, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    arena_init(&f->a);
    assert_int_equal(pass_simplify(mod_function(f->mod), &f->a, &f->fn, NULL), SACCADE_OK);
    assert_int_equal(pass_facts_make(f->fn, &f->a, &f->facts, NULL), SACCADE_OK);
}

static void release(found *f)
{
    saccade_mod_destroy(f->mod);
    arena_free(&f->a);
}

/* ---- what nodes vary with ---- */

static void change(eval_point *at, int which, uint64_t *random)
{
    int32_t *const places[] = {&at->b, &at->h, &at->q, &at->kv};
    static const uint32_t most[] = {2, 4, 48, 64};
    if (which < 4)
        *places[which] = (int32_t)random_mod_below(random, most[which]);
    else
        at->score = (double)random_mod_below(random, 1000) * 0.125 - 60.0;
}

static void nodes_vary_with_no_more(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        random_mod r;
        saccade_tensor tensors[MOD_MAX_CAPTURES];
        eval_env env = {.tensors = tensors};
        random_mod_make(seed, seed & 1 ? SACCADE_MASK : SACCADE_SCORE, 0, 3 + (int)(seed % 3),
                        &sizes, &r);
        const mod_fn *fn = mod_function(r.mod);
        eval_sizes(&sizes, env.size);
        assert_int_equal(eval_resolve(fn, r.bindings, r.n_bindings, 1, tensors, NULL),
                         SACCADE_OK);
        double *before = malloc(2 * fn->n_nodes * sizeof *before);
        double *after = before + fn->n_nodes;
        uint64_t random = seed;
        eval_point at = {0, 0, 3, 5, 0.5};
        for (int step = 0; step < 40; step++) {
            const int which = (int)random_mod_below(&random, 5);
            eval_scalar(fn, &env, &at, before, NULL);
            change(&at, which, &random);
            eval_scalar(fn, &env, &at, after, NULL);
            for (uint32_t i = 0; i < fn->n_nodes; i++)
                if (!(fn->nodes[i].deps >> which & 1)
                    && memcmp(&before[i], &after[i], sizeof before[i]) != 0
                    && !(isnan(before[i]) && isnan(after[i])))
                    fail_msg("seed %llu: n%u changes with %d", (unsigned long long)seed, i,
                             which);
        }
        free(before);
        random_mod_free(&r);
    }
}

/* ---- scores ---- */

static void facts_of_scores(void **state)
{
    static const struct {
        const char *text;
        int is_bounded, stays_finite, may_be_lowest, is_line;
        double tanh_gain;
    } list[] = {
        {"softcap(20.0)", 1, 1, 0, 0, 20},
        {"softcap(90.0)", 0, 1, 0, 0, 90},
        {"softcap(34.0)", 1, 1, 0, 0, 34},
        {"alibi()", 0, 1, 0, 1, 0},
        {"score + af[kv]", 0, 0, 1, 1, 0},
        {"score + af[h]", 0, 0, 1, 1, 0},
        {"q >= kv ? score : wf", 0, 0, 1, 1, 0},
        {"score + wf * (q < kv ? 1.0 : 0.0)", 0, 0, 1, 1, 0},
        {"score + min(0.0, -detach(af[b]))", 0, 0, 1, 1, 0},
        {"score + af[h] * (kv - q)", 0, 0, 0, 1, 0},
        {"score - af[h] * log(1.0 + wf * abs(kv - q))", 0, 0, 0, 1, 0},
        {"score * af[h]", 0, 0, 0, 1, 0},
        {"wf * tanh(score / wf)", 0, 0, 0, 0, INFINITY},
        {"score > wf ? score : 0.5", 0, 1, 0, 0, 0},
        {"score / (1.0 + wf * (q - kv))", 0, 0, 0, 1, 0},
        {"q > kv ? score : -3e38", 0, 0, 1, 1, 0},
        {"q > kv ? score : -inf", 0, 0, 0, 1, 0},
        {"KV * tanh(score / KV)", 0, 0, 0, 0, INFINITY},
        {"sigmoid(score)", 1, 1, 0, 0, 0},
        {"score * score", 0, 0, 0, 0, 0},
        {"2.0 * tanh(score) + tanh(3.0 * score) / 4.0", 1, 1, 0, 0, 2.25},
        {"min(tanh(score), -tanh(2.0 * score))", 1, 1, 0, 0, 2},
        {"0.5 * (q - kv)", 0, 1, 0, 1, 0},
        /* offsets lead positions that far */
        {"q > 1073741823 ? score * 100.0 : tanh(score)", 0, 1, 0, 0, 1},
        {"kv == 2147483647 ? score * 100.0 : tanh(score)", 0, 1, 0, 0, 1},
        {"min(q, kv) < -1073741823 ? score * 100.0 : tanh(score)", 0, 1, 0, 0, 1},
        {"min(q, kv) < -1073741824 ? score * 100.0 : tanh(score)", 1, 1, 0, 0, 1},
        {"max(b, h) > 1073741823 ? score * 100.0 : tanh(score)", 1, 1, 0, 0, 1},
        /* sums that a score comes out of with other digits are no lines */
        {"(score + 1e30) - 1e30", 0, 1, 0, 0, 0},
        {"(score * 2.0 - 1e30 * af[h]) + 1e30 * af[h]", 0, 0, 1, 0, 0},
        {"score + wf - vf", 0, 0, 1, 0, 0},
        {"(score + 1e9) - 1e9", 0, 1, 0, 1, 0},
        {"score + 1e30", 0, 1, 0, 1, 0},
        {"score + af[h] + bf[q] + 0.5", 0, 0, 1, 1, 0},
        {"score + wf + af[h] * (q - kv)", 0, 0, 1, 1, 0},
        {"(score + af[h]) + (q >= kv ? 0.0 : -1e30)", 0, 0, 1, 1, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        found f;
        find(&f, SACCADE_SCORE, list[i].text);
        const pass_facts *k = f.facts;
        if (k->is_bounded != list[i].is_bounded || k->stays_finite != list[i].stays_finite
            || k->may_be_lowest != list[i].may_be_lowest
            || (k->slope != NULL) != list[i].is_line
            || fabs(k->tanh_gain - list[i].tanh_gain) > 1e-6)
            fail_msg("%s: bounded %d finite %d lowest %d line %d tanh %g", list[i].text,
                     k->is_bounded, k->stays_finite, k->may_be_lowest, k->slope != NULL,
                     k->tanh_gain);
        assert_null(k->limits);
        release(&f);
    }
}

/* A change of tanh's argument by d changes tanh by d at most, and the score by gain d. */
static void gains_bound_changes(void **state)
{
    static const char *const texts[] = {
        "3.0 * score", "min(score, 2.0) - 4.0 * abs(score)", "softcap(20.0)",
        "score / 8.0 + (q > kv ? 5.0 * score : -score)", "max(score, 0.25 * score) + 1.0"};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        found f;
        double values[64];
        const eval_env env = {.tensors = NULL};
        find(&f, SACCADE_SCORE, texts[i]);
        assert_true(f.fn->n_nodes <= 64);
        const double gain = f.facts->gain[pass_find_score(f.fn)];
        assert_true(isfinite(gain));
        double largest = 0;
        for (int n = 0; n < 4000; n++) {
            const eval_point at = {0, 0, n % 2, 1 - n % 2, 0.01 * n - 20.0};
            eval_point next = at;
            next.score += 1e-3;
            const double rise = (eval_scalar(f.fn, &env, &next, values, NULL)
                                 - eval_scalar(f.fn, &env, &at, values, NULL))
                                * 1e3;
            largest = fabs(rise) > largest ? fabs(rise) : largest;
        }
        if (!(largest <= gain * (1 + 1e-6)) || !(largest > gain / 4))
            fail_msg("%s: rises by %g, gain %g", texts[i], largest, gain);
        release(&f);
    }
}

/* ---- masks ---- */

static void slopes_of_limits(void **state)
{
    static const struct {
        const char *text;
        pass_slope first, past;
    } list[] = {
        {"causal()", {0, 0}, {1, 1}},        {"q >= kv && q - kv <= 7", {1, 1}, {1, 1}},
        {"kv <= 3 * q", {0, 0}, {1, 0}},     {"kv < 5", {0, 0}, {0, 0}},
        {"kv <= min(q, 9)", {0, 0}, {0, 1}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        found f;
        find(&f, SACCADE_MASK, list[i].text);
        const pass_limits *l = f.facts->limits;
        assert_non_null(l);
        const pass_slope got[2] = {l->slope[l->node[0]], l->slope[l->node[1]]};
        const pass_slope want[2] = {list[i].first, list[i].past};
        if (memcmp(got, want, sizeof got) != 0)
            fail_msg("%s: %d..%d, %d..%d", list[i].text, got[0].lo, got[0].hi, got[1].lo,
                     got[1].hi);
        release(&f);
    }
}

static void other_masks_have_no_limits(void **state)
{
    static const char *const texts[] = {"document(doc)", "q % 3 == kv % 5", "kv != q"};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        found f;
        find(&f, SACCADE_MASK, texts[i]);
        assert_null(f.facts->limits);
        release(&f);
    }
}

/* ---- words ---- */

static void check_words(saccade_kind kind, const char *text, const char *words)
{
    found f;
    strbuf out;
    strbuf_init(&out, 0);
    find(&f, kind, text);
    assert_int_equal(pass_facts_print(f.facts, &out, NULL), SACCADE_OK);
    if (!strstr(strbuf_text(&out), words))
        fail_msg("%s: no '%s' in:\n%s", text, words, strbuf_text(&out));
    strbuf_free(&out);
    release(&f);
}

static void facts_in_words(void **state)
{
    (void)state;
    check_words(SACCADE_MASK, "causal()", "one interval of keys per row");
    check_words(SACCADE_MASK, "causal()", "gains 1 to 1 from row to row");
    check_words(SACCADE_MASK, "document(doc)", "evaluated on PARTIAL blocks");
    check_words(SACCADE_SCORE, "softcap(20.0)", "within +-35, proven");
    check_words(SACCADE_SCORE, "softcap(20.0)", "changes by 20 times an error of its tanh");
    check_words(SACCADE_SCORE, "alibi()", "slope * score + offset");
    check_words(SACCADE_SCORE, "score + af[h, q]", "reads af[h + c, q + c]; its gradient");
    check_words(SACCADE_SCORE, "score * score", "may not stay finite");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_vary_with_no_more),    cmocka_unit_test(facts_of_scores),
        cmocka_unit_test(gains_bound_changes),        cmocka_unit_test(slopes_of_limits),
        cmocka_unit_test(other_masks_have_no_limits), cmocka_unit_test(facts_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
