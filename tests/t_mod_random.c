/* Random well-typed texts: they compile, and what is printed of them compiles to the same
   nodes. So does every text made by mutating them, or it is refused with one clear line. */
#include "base/status.h"
#include "mod/mod.h"
#include "pass/pass.h"
#include "support/fail_alloc.h"
#include "support/random_mod.h"
#include "support/round_trip.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const saccade_sizes sizes = {2, 4, 2, 16, 24, 8, 8};

static void printed_texts_read_back(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_mod r;
        const saccade_kind kind = seed & 1 ? SACCADE_MASK : SACCADE_SCORE;
        random_mod_make(seed, kind, seed & 2 ? RANDOM_MOD_TAME : 0, 1 + (int)(seed % 6), &sizes,
                        &r);
        round_trip_check(r.mod);
        random_mod_free(&r);
    }
}

/* so do nodes that no text was written for: what simplification leaves. */
static void simplified_nodes_read_back(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 600; seed++) {
        random_mod r;
        arena scratch;
        saccade_error err = {0};
        saccade_mod *simple = NULL;
        const mod_fn *fn;
        random_mod_make(seed, seed & 1 ? SACCADE_MASK : SACCADE_SCORE, 0, 2 + (int)(seed % 5),
                        &sizes, &r);
        arena_init(&scratch);
        if (pass_simplify(mod_function(r.mod), &scratch, &fn, &err)
            || mod_from_function(fn, &simple, &err))
            fail_msg("seed %llu: %s", (unsigned long long)seed, err.message);
        round_trip_check(simple);
        saccade_mod_destroy(simple);
        arena_free(&scratch);
        random_mod_free(&r);
    }
}

/* ---- chains ---- */

/* Texts that say the names which a printed chain might give its parts: as captures, locals,
 * definitions and parameters; and texts that end in odd places. */
static const char *const odd_scores[] = {
    "score + part_1",
    "score + part_2[q] * part_10",
    "part_1 = score * 2; part_1 + 1",
    "score part_2(part_1) = part_1 * score; part_2(3.0)",
    "score f() = score + part_1; score = f(); f() // part_3",
    "q = kv; score + q // the end",
    "score + part2_1 + part3_1",
    "score = score + part; score;",
    "/* part_ */ score",
};
static const char *const odd_masks[] = {
    "kv < part_1 + q",
    "part_2[kv] + part_1 > 0",
    "part_1 = q >= kv; part_1",
    "mask part_2(part_1) = kv < part_1; part_2(9)",
    "mask f() = q >= kv; f() || part_3 > 1 // part_3",
    "q = kv; q > 5 // the end",
    "q + part2_1 > part3_1",
};

static saccade_mod *some_part(uint64_t *state, saccade_kind kind, char text[RANDOM_MOD_TEXT])
{
    enum { SCORES = sizeof odd_scores / sizeof odd_scores[0] };
    enum { MASKS = sizeof odd_masks / sizeof odd_masks[0] };
    saccade_mod *mod;
    saccade_error err = {0};
    const char *odd = kind == SACCADE_MASK ? odd_masks[random_mod_below(state, MASKS)]
                                           : odd_scores[random_mod_below(state, SCORES)];
    if (random_mod_below(state, 3) != 0)
        snprintf(text, RANDOM_MOD_TEXT, "%s", odd);
    else
        random_mod_text(random_mod_bits(state), kind, 0, 3, text, RANDOM_MOD_TEXT);
    if (saccade_mod_parse(kind, text, strlen(text), &mod, &err) != SACCADE_OK)
        fail_msg("%s: %s", text, err.message);
    return mod;
}

static int32_t captures_of(const saccade_mod *mod, saccade_capture *out)
{
    const int32_t n = saccade_mod_capture_count(mod);
    for (int32_t i = 0; i < n; i++) {
        out[i] = saccade_mod_capture(mod, i);
        const int is_odd = strncmp(out[i].name, "part", 4) == 0;
        out[i].dtype = is_odd ? SACCADE_I32 : random_mod_dtype(out[i].name);
    }
    return n;
}

/* Chains of chains too; captures of one name but two ranks make a chain refused. */
static void chains_read_back(void **state)
{
    static char text[RANDOM_MOD_TEXT];
    int n_checked = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 1200; seed++) {
        uint64_t bits = seed;
        const saccade_kind kind = seed & 1 ? SACCADE_MASK : SACCADE_SCORE;
        saccade_mod *chain = some_part(&bits, kind, text);
        for (uint32_t i = random_mod_below(&bits, 4); i > 0; i--) {
            saccade_mod *part = some_part(&bits, kind, text), *both = NULL;
            const int is_before = random_mod_below(&bits, 2) == 0;
            const saccade_status status = saccade_mod_chain(
                is_before ? part : chain, is_before ? chain : part, &both, NULL);
            saccade_mod_destroy(part);
            if (status != SACCADE_OK)
                continue;
            saccade_mod_destroy(chain);
            chain = both;
            n_checked++;
        }
        saccade_capture captures[MOD_MAX_CAPTURES];
        round_trip_check_generic(chain, captures, captures_of(chain, captures));
        saccade_mod_destroy(chain);
    }
    assert_true(n_checked > 1000);
}

/* As deep as a text may be, it may be too deep in a chain, but never in what that prints. */
static void deep_chains_read_back(void **state)
{
    char text[1024];
    int n_made = 0, n_refused = 0;
    (void)state;
    for (int depth = 150; depth < 230; depth++) {
        saccade_mod *mod, *both;
        saccade_error err = {0};
        saccade_status status;
        memset(text, '(', (size_t)depth);
        memcpy(text + depth, "score", 5);
        memset(text + depth + 5, ')', (size_t)depth);
        if (saccade_mod_parse(SACCADE_SCORE, text, 2 * (size_t)depth + 5, &mod, &err))
            break;
        status = saccade_mod_chain(mod, mod, &both, &err);
        if (status == SACCADE_OK) {
            round_trip_check_generic(both, NULL, 0);
            saccade_mod_destroy(both);
            n_made++;
        } else {
            assert_int_equal(status, SACCADE_ELIMIT);
            n_refused++;
        }
        saccade_mod_destroy(mod);
    }
    assert_true(n_made > 0 && n_refused < 5);
}

/* ---- texts that are mostly wrong ---- */

/* A text that compiles is printed and read back; one that does not gives one clear line. */
static void check_any(saccade_kind kind, const char *text, size_t bytes, uint64_t seed)
{
    static const saccade_dtype dtypes[] = {SACCADE_I32, SACCADE_F32, SACCADE_BOOL};
    saccade_error err = {0};
    saccade_capture captures[MOD_MAX_CAPTURES];
    saccade_mod *generic, *bound;
    if (saccade_mod_parse(kind, text, bytes, &generic, &err) != SACCADE_OK) {
        if (err.line < 1 || err.column < 1 || err.message[0] == '\0'
            || strlen(err.excerpt[0]) > 80 || strlen(err.excerpt[1]) > 80)
            fail_msg("seed %llu: poor error for %.*s", (unsigned long long)seed, (int)bytes,
                     text);
        return;
    }
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = dtypes[(seed + (uint64_t)i) % 3];
    }
    if (saccade_mod_bind(generic, captures, n, &bound, &err) == SACCADE_OK) {
        round_trip_check(bound);
        saccade_mod_destroy(bound);
    }
    saccade_mod_destroy(generic);
}

/* one random edit: a byte changed, bytes dropped, a piece copied elsewhere. */
static size_t mutate(uint64_t *state, char *text, size_t n, size_t room)
{
    const size_t at = n ? random_mod_below(state, (uint32_t)n) : 0;
    const size_t length = 1 + random_mod_below(state, 8);
    switch (random_mod_below(state, 4)) {
    case 0:
        if (n > 0)
            text[at] = (char)random_mod_bits(state);
        return n;
    case 1:
        if (at + length > n)
            return at;
        memmove(text + at, text + at + length, n - at - length);
        return n - length;
    case 2:
        if (n > 0)
            text[at] = " ()[]{};,=+-*<>!&|?:.09eqkvW"[random_mod_below(state, 28)];
        return n;
    default:
        if (at + length > n || n + length > room)
            return n;
        const size_t to = random_mod_below(state, (uint32_t)n);
        char piece[8];
        memcpy(piece, text + at, length);
        memmove(text + to + length, text + to, n - to);
        memcpy(text + to, piece, length);
        return n + length;
    }
}

static void mutated_texts_do_no_harm(void **state)
{
    static char text[RANDOM_MOD_TEXT];
    (void)state;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        uint64_t random = seed * 7919;
        const saccade_kind kind = seed & 1 ? SACCADE_MASK : SACCADE_SCORE;
        size_t n = random_mod_text(seed, kind, 0, 2 + (int)(seed % 3), text, sizeof text);
        for (int edits = 1 + (int)random_mod_below(&random, 6); edits > 0; edits--)
            n = mutate(&random, text, n, sizeof text);
        check_any(kind, text, n, seed);
    }
}

static void token_soups_do_no_harm(void **state)
{
    static const char *const tokens[] = {
        "q",        "kv",       "h",           "b",    "score",  "W",       "t[",
        "]",        "(",        ")",           "{",    "}",      ";",       ",",
        "=",        "==",       "<",           ">=",   "&&",     "||",      "!",
        "-",        "+",        "*",           "/",    "%",      "?",       ":",
        "1",        "0x7f",     "2.5",         "1e9",  "mask ",  "score ",  "f(",
        "f() = ",   "g(x) = ",  "t[] ",        "true", "inf",    "min(",    "sum(i, 3, ",
        "causal()", "softcap(", "document(t)", "int(", "// c\n", "/* c */",
    };
    (void)state;
    for (uint64_t seed = 1; seed <= 20000; seed++) {
        char text[512] = "";
        uint64_t random = seed;
        for (int n = 1 + (int)random_mod_below(&random, 24); n > 0; n--) {
            strcat(text, tokens[random_mod_below(&random, sizeof tokens / sizeof *tokens)]);
            strcat(text, " ");
        }
        check_any(SACCADE_MASK, text, strlen(text), seed);
        check_any(SACCADE_SCORE, text, strlen(text), seed);
    }
}

/* ---- allocation failure ---- */

static saccade_status use_text(void *arg, saccade_error *err)
{
    const char *text = arg;
    saccade_mod *generic = NULL, *bound = NULL;
    saccade_status status = SACCADE_OK;
    saccade_capture captures[MOD_MAX_CAPTURES];
    TRY_GOTO(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, err));
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = random_mod_dtype(captures[i].name);
    }
    TRY_GOTO(saccade_mod_bind(generic, captures, n, &bound, err));
out:
    saccade_mod_destroy(generic);
    saccade_mod_destroy(bound);
    return status;
}

static void texts_survive_failing_allocations(void **state)
{
    static char text[RANDOM_MOD_TEXT];
    (void)state;
    for (int32_t i = 0; saccade_prelude(i) != NULL; i++)
        continue; /* each is parsed once for the process */
    for (uint64_t seed = 1; seed <= 30; seed++) {
        random_mod_text(seed, SACCADE_MASK, 0, 6, text, sizeof text);
        assert_true(fail_alloc_sweep("text", use_text, text) > 5);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(printed_texts_read_back),
        cmocka_unit_test(simplified_nodes_read_back),
        cmocka_unit_test(chains_read_back),
        cmocka_unit_test(deep_chains_read_back),
        cmocka_unit_test(mutated_texts_do_no_harm),
        cmocka_unit_test(token_soups_do_no_harm),
        cmocka_unit_test(texts_survive_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
