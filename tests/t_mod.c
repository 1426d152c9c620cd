/* The language: what texts mean and with which words they are refused (cases/language.cases),
   excerpts of errors, limits, and the public functions of mods. */
#include "base/status.h"
#include "mod/mod.h"
#include "support/fail_alloc.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static saccade_status parse(saccade_kind kind, const char *text, saccade_mod **out,
                            saccade_error *err)
{
    return saccade_mod_parse(kind, text, strlen(text), out, err);
}

static saccade_status bind_all(const saccade_mod *generic, saccade_dtype dtype,
                               saccade_mod **out, saccade_error *err)
{
    saccade_capture captures[MOD_MAX_CAPTURES];
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = dtype;
    }
    return saccade_mod_bind(generic, captures, n, out, err);
}

/* the text parsed, and bound with one dtype for all captures. */
static saccade_status compile(saccade_kind kind, const char *text, saccade_dtype dtype,
                              saccade_mod **out, saccade_error *err)
{
    saccade_mod *generic;
    TRY(parse(kind, text, &generic, err));
    const saccade_status status = bind_all(generic, dtype, out, err);
    saccade_mod_destroy(generic);
    return status;
}

/* what it prints as; freed by the caller. */
static char *print(const saccade_mod *mod)
{
    const size_t n = saccade_mod_print(mod, NULL, 0);
    char *text = malloc(n + 1);
    assert_non_null(text);
    assert_int_equal(saccade_mod_print(mod, text, n + 1), n);
    assert_int_equal(strlen(text), n);
    return text;
}

static void assert_refused(saccade_kind kind, const char *text, saccade_status status)
{
    saccade_error err = {0};
    saccade_mod *mod = NULL;
    if (compile(kind, text, SACCADE_I32, &mod, &err) != status)
        fail_msg("%.200s: got %s: %s", text, saccade_status_name(err.status), err.message);
    assert_null(mod);
    assert_true(err.line >= 1 && err.column >= 1);
    assert_true(strlen(err.excerpt[0]) <= 80 && strlen(err.excerpt[1]) <= 80);
}

/* ---- cases/language.cases ---- */

static saccade_dtype dtype_named(const char *name)
{
    for (int dtype = SACCADE_BOOL; dtype <= SACCADE_F64; dtype++) {
        const char *known = saccade_dtype_name((saccade_dtype)dtype);
        if (known != NULL && strncmp(known, name, strlen(known)) == 0)
            return (saccade_dtype)dtype;
    }
    fail_msg("%s is no dtype", name);
    return SACCADE_NONE;
}

/* "mask[f32] x > 1": outcome as the lines that should follow. */
static char *outcome(const char *line)
{
    const saccade_kind kind = line[0] == 'm' ? SACCADE_MASK : SACCADE_SCORE;
    saccade_dtype dtype = SACCADE_I32;
    saccade_error err = {0};
    saccade_mod *mod;
    char *result = calloc(1, 8192);
    line += kind == SACCADE_MASK ? 4 : 5;
    if (*line == '[') {
        dtype = dtype_named(line + 1);
        line = strchr(line, ']') + 1;
    }
    line += *line == ' ';
    if (compile(kind, line, dtype, &mod, &err) != SACCADE_OK) {
        snprintf(result, 8192, "! %d:%d %s: %s\n", err.line, err.column,
                 saccade_status_name(err.status), err.message);
        return result;
    }
    char *text = print(mod);
    for (char *part = strtok(text, "\n"); part != NULL; part = strtok(NULL, "\n"))
        snprintf(result + strlen(result), 8192 - strlen(result), "= %s\n", part);
    free(text);
    saccade_mod_destroy(mod);
    return result;
}

static void check_case(const char *text, const char *expected)
{
    char *got = outcome(text);
    if (strcmp(got, expected) != 0)
        fail_msg("%s\ngot\n%sexpected\n%s", text, got, expected);
    free(got);
}

static void cases_hold(void **state)
{
    char line[1024], text[1024] = "", expected[8192] = "";
    FILE *file = fopen(SACCADE_SOURCE_DIR "/tests/cases/language.cases", "r");
    int n = 0;
    (void)state;
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (line[0] == '=' || line[0] == '!') {
            strcat(expected, line);
            continue;
        }
        if (text[0] != '\0') {
            check_case(text, expected);
            n++;
        }
        line[strcspn(line, "\n")] = '\0';
        strcpy(text, line[0] == '#' ? "" : line);
        expected[0] = '\0';
    }
    if (text[0] != '\0')
        check_case(text, expected);
    fclose(file);
    assert_true(n > 150);
}

/* ---- excerpts ---- */

static void assert_excerpt(const char *text, size_t bytes, int32_t line, int32_t column,
                           const char *shown, const char *caret)
{
    saccade_error err = {0};
    saccade_mod *mod = NULL;
    assert_int_not_equal(saccade_mod_parse(SACCADE_MASK, text, bytes, &mod, &err), SACCADE_OK);
    assert_int_equal(err.line, line);
    assert_int_equal(err.column, column);
    assert_string_equal(err.excerpt[0], shown);
    assert_string_equal(err.excerpt[1], caret);
}

static void excerpts_point_at_the_place(void **state)
{
    (void)state;
    assert_excerpt("q >= kv &&\n\tq + ) 1\r\nx", 21, 2, 6, " q + ) 1", "     ^");
    assert_excerpt("q >= \x80\xff\x01", 8, 1, 6, "q >= ???", "     ^");
    assert_excerpt("q \0 kv", 6, 1, 3, "q ? kv", "  ^");
    assert_excerpt("", 0, 1, 1, "", "^");
}

static void long_lines_are_clipped_around_the_place(void **state)
{
    char text[400];
    saccade_error err = {0};
    saccade_mod *mod;
    (void)state;
    for (size_t at = 0; at < 299; at++) {
        for (int i = 0; i < 300; i++)
            text[i] = i % 2 ? '+' : 'q';
        text[at] = '$';
        assert_int_equal(saccade_mod_parse(SACCADE_MASK, text, 299, &mod, &err),
                         SACCADE_EPARSE);
        const size_t length = strlen(err.excerpt[0]), caret = strlen(err.excerpt[1]) - 1;
        assert_int_equal(err.column, at + 1);
        assert_true(length <= 80 && caret < 80);
        assert_int_equal(err.excerpt[0][caret], '$');
        if (caret != at)
            assert_memory_equal(err.excerpt[0], "...", 3);
        if (length - caret < 299 - at)
            assert_string_equal(err.excerpt[0] + length - 3, "...");
    }
}

/* ---- limits ---- */

/* `head`, n times `part`, `tail`. */
static char *repeated(const char *head, const char *part, int n, const char *tail)
{
    const size_t each = strlen(part);
    char *text = malloc(strlen(head) + each * (size_t)n + strlen(tail) + 1);
    char *at = text + sprintf(text, "%s", head);
    for (int i = 0; i < n; i++, at += each)
        memcpy(at, part, each);
    strcpy(at, tail);
    return text;
}

static void assert_limited(const char *head, const char *part, int n, const char *tail)
{
    char *text = repeated(head, part, n, tail);
    assert_refused(SACCADE_MASK, text, SACCADE_ELIMIT);
    free(text);
}

static void texts_cannot_exhaust_anything(void **state)
{
    char doubling[4096] = "mask f0(x) = x > q; ";
    (void)state;
    assert_limited("q > kv", " ", MOD_MAX_TEXT, "");
    assert_limited("", "(", 100000, "");
    assert_limited("", "!", 100000, "true");
    assert_limited("", "q > 1 ? true : ", 1000, "true");
    assert_limited("", "min(1, ", 1000, "");
    assert_limited("", "mask f() = { ", 1000, "");
    assert_limited("t[", "t[", 1000, "");
    assert_limited("", "q > 1 || ", 200000, "true");
    assert_limited("", "mask f() = true; ", 1, "sum(i, 5000, 1) > 0");
    assert_limited("", "sum(i, 4096, ", 3, "i))) > 0");
    assert_limited("f(", "1, ", 100, "1)");
    /* each call doubles the work, the last would be 2^40 */
    for (int i = 1; i <= 40; i++)
        sprintf(doubling + strlen(doubling), "mask f%d(x) = f%d(x + 1) || f%d(x + 2); ", i,
                i - 1, i - 1);
    strcat(doubling, "f40(0)");
    assert_refused(SACCADE_MASK, doubling, SACCADE_ELIMIT);
}

static void too_many_operations_are_refused(void **state)
{
    char *text = malloc(1 << 20), *at = text;
    (void)state;
    for (int i = 0; i < MOD_MAX_NODES / 2; i++)
        at += sprintf(at, "%sq > %d", i ? " || " : "", i);
    assert_refused(SACCADE_MASK, text, SACCADE_ELIMIT);
    free(text);
    text = malloc(1 << 12);
    at = text;
    for (int i = 0; i <= MOD_MAX_CAPTURES; i++)
        at += sprintf(at, "%sa%d > 0", i ? " || " : "", i);
    assert_refused(SACCADE_MASK, text, SACCADE_ELIMIT);
    free(text);
}

static void long_chains_and_many_locals_are_fine(void **state)
{
    saccade_error err = {0};
    saccade_mod *mod;
    char *text = malloc(1 << 20), *at = text;
    (void)state;
    for (int i = 0; i < 4000; i++)
        at += sprintf(at, "x%d = q + %d; ", i, i);
    at += sprintf(at, "x0 > 0");
    for (int i = 1; i < 4000; i++)
        at += sprintf(at, " || x%d > 0", i);
    assert_int_equal(compile(SACCADE_MASK, text, SACCADE_I32, &mod, &err), SACCADE_OK);
    saccade_mod_destroy(mod);
    free(text);
}

/* ---- binding ---- */

static void binding_names_the_capture(void **state)
{
    saccade_error err = {0};
    saccade_mod *generic, *bound = NULL;
    (void)state;
    assert_int_equal(parse(SACCADE_MASK, "doc[q] == doc[kv] && q < width", &generic, &err), 0);
    assert_int_equal(saccade_mod_capture_count(generic), 2);
    assert_string_equal(saccade_mod_capture(generic, 0).name, "doc");
    assert_int_equal(saccade_mod_capture(generic, 0).rank, 1);
    assert_int_equal(saccade_mod_capture(generic, 1).dtype, SACCADE_NONE);
    assert_null(saccade_mod_capture(generic, 2).name);
    assert_null(mod_function(generic));

    static const struct {
        saccade_capture given[3];
        int32_t n;
        const char *message;
    } wrong[] = {
        {{{"doc", SACCADE_I32, 1}},
         1,
         "got no value for 'width', expected a scalar of that name to be bound"},
        {{{"doc", SACCADE_I32, 1}, {"with", SACCADE_I32, 0}},
         2,
         "got a value for it, but the text does not use it"},
        {{{"doc", SACCADE_I32, 2}, {"width", SACCADE_I32, 0}},
         2,
         "got 'doc' of rank 2, expected rank 1 as used here"},
        {{{"doc", SACCADE_NONE, 1}, {"width", SACCADE_I32, 0}},
         2,
         "got dtype none for 'doc', expected bool, an integer or a float"},
        {{{"doc", SACCADE_I32, 1}, {"width", SACCADE_I32, 0}, {"q", SACCADE_I32, 0}},
         3,
         "got a value for it, but it is an index variable and can't be bound"},
        {{{"doc", SACCADE_I32, 1}, {"width", SACCADE_I32, 0}, {"doc", SACCADE_I32, 1}},
         3,
         "got two values for it"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        assert_int_equal(saccade_mod_bind(generic, wrong[i].given, wrong[i].n, &bound, &err),
                         SACCADE_EINVAL);
        assert_string_equal(err.message, wrong[i].message);
    }
    assert_null(bound);
    const saccade_capture given[] = {{"width", SACCADE_F64, 0}, {"doc", SACCADE_U16, 1}};
    assert_int_equal(saccade_mod_bind(generic, given, 2, &bound, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_capture(bound, 1).dtype, SACCADE_F64);
    assert_int_equal(mod_function(bound)->captures[1].type, MOD_FLOAT);
    assert_int_equal(saccade_mod_bind(bound, given, 2, &bound, &err), SACCADE_EINVAL);
    saccade_mod_destroy(bound);
    saccade_mod_destroy(generic);
}

static void unbound_names_are_guessed_at(void **state)
{
    saccade_error err = {0};
    saccade_mod *generic, *bound;
    const saccade_capture given = {"document", SACCADE_I32, 1};
    (void)state;
    assert_int_equal(parse(SACCADE_MASK, "documnt[q] == k", &generic, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &bound, &err), SACCADE_EINVAL);
    assert_string_equal(err.excerpt[0], "documnt[q] == k");
    assert_int_equal(saccade_mod_bind(generic, &given, 1, &bound, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "document");
    saccade_mod_destroy(generic);
}

/* Nodes keep the place they were written at; what a named variant makes, that of its call. */
static void nodes_know_their_place(void **state)
{
    saccade_error err = {0};
    saccade_mod *mod;
    int loads = 0;
    (void)state;
    assert_int_equal(compile(SACCADE_MASK,
                             "mask f(t[]) = t[q] > 1;\n  f(a) && document(doc)\n"
                             " && 3 <\n\tbias[q - 1]",
                             SACCADE_I32, &mod, &err),
                     SACCADE_OK);
    const mod_fn *fn = mod_function(mod);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        static const int places[4][2] = {{1, 15}, {2, 11}, {2, 11}, {4, 2}};
        if (fn->nodes[i].op != OP_LOAD)
            continue;
        assert_int_equal(fn->nodes[i].line, places[loads][0]);
        assert_int_equal(fn->nodes[i].column, places[loads++][1]);
    }
    assert_int_equal(loads, 4);
    err = (saccade_error){.line = 4, .column = 2};
    mod_show_place(mod, &err);
    assert_string_equal(err.excerpt[0], " bias[q - 1]");
    assert_string_equal(err.excerpt[1], " ^");
    saccade_mod_destroy(mod);
}

static void print_stops_at_the_end_of_the_buffer(void **state)
{
    saccade_error err = {0};
    saccade_mod *mod;
    char text[16];
    (void)state;
    assert_int_equal(compile(SACCADE_MASK, "q >= kv", SACCADE_I32, &mod, &err), SACCADE_OK);
    for (size_t room = 0; room <= 9; room++) {
        memset(text, '#', sizeof text);
        assert_int_equal(saccade_mod_print(mod, text, room), 8);
        if (room > 0)
            assert_int_equal(strlen(text), room < 9 ? room - 1 : 8);
        assert_int_equal(text[room], '#');
    }
    saccade_mod_destroy(mod);
}

/* ---- mods made of mods ---- */

static void chains_see_the_score_before(void **state)
{
    saccade_error err = {0};
    saccade_mod *a, *b, *c, *ab, *abc, *bound, *again;
    (void)state;
    assert_int_equal(parse(SACCADE_SCORE, "q = q + 1; score + q * W // first", &a, &err), 0);
    assert_int_equal(parse(SACCADE_SCORE, "score f() = score * 2; f() + q", &b, &err), 0);
    assert_int_equal(parse(SACCADE_SCORE, "score f() = score - W; f()", &c, &err), 0);
    assert_int_equal(saccade_mod_chain(a, b, &ab, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_chain(ab, c, &abc, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_capture_count(abc), 1);
    assert_int_equal(bind_all(abc, SACCADE_F32, &bound, &err), SACCADE_OK);
    char *text = print(bound), *generic = print(abc);
    assert_string_equal(text, "(score + float(q + 1) * W) * 2.0 + float(q) - W\n");
    saccade_mod_destroy(bound);
    /* a generic chain prints as one text that means the same */
    assert_int_equal(compile(SACCADE_SCORE, generic, SACCADE_F32, &again, &err), SACCADE_OK);
    char *second = print(again);
    assert_string_equal(second, text);
    free(text);
    free(second);
    free(generic);
    saccade_mod *all[] = {a, b, c, ab, abc, again};
    for (int i = 0; i < 6; i++)
        saccade_mod_destroy(all[i]);
}

static void chained_masks_are_both_required(void **state)
{
    saccade_error err = {0};
    saccade_mod *a, *b, *s, *ab = NULL, *bound;
    (void)state;
    assert_int_equal(parse(SACCADE_MASK, "q = q - 1; q >= kv", &a, &err), SACCADE_OK);
    assert_int_equal(parse(SACCADE_MASK, "q < W", &b, &err), SACCADE_OK);
    assert_int_equal(parse(SACCADE_SCORE, "score * W[q]", &s, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_chain(a, s, &ab, &err), SACCADE_EINVAL);
    assert_null(ab);
    assert_int_equal(saccade_mod_chain(a, b, &ab, &err), SACCADE_OK);
    assert_int_equal(bind_all(ab, SACCADE_I32, &bound, &err), SACCADE_OK);
    char *text = print(bound);
    assert_string_equal(text, "kv <= q - 1 && q < W\n");
    assert_int_equal(saccade_mod_chain(bound, b, &ab, &err), SACCADE_EINVAL);
    free(text);
    saccade_mod *all[] = {a, b, s, ab, bound};
    for (int i = 0; i < 5; i++)
        saccade_mod_destroy(all[i]);
}

static void joined_masks_keep_their_captures_apart(void **state)
{
    saccade_error err = {0};
    saccade_mod *a, *b, *both, *twice, *not ;
    const char *const *names;
    (void)state;
    assert_int_equal(compile(SACCADE_MASK, "doc[q] == doc[kv]", SACCADE_I32, &a, &err), 0);
    assert_int_equal(compile(SACCADE_MASK, "doc[q] < W", SACCADE_F32, &b, &err), 0);
    assert_int_equal(mod_join(a, b, OP_or, &names, &both, &err), SACCADE_OK);
    assert_string_equal(names[0], "doc_2");
    assert_string_equal(names[1], "W");
    char *text = print(both);
    assert_string_equal(text, "doc[q] == doc[kv] || doc_2[q] < W\n");
    free(text);
    assert_int_equal(mod_join(both, both, OP_and, &names, &twice, &err), SACCADE_OK);
    assert_string_equal(names[0], "doc_3");
    assert_string_equal(names[1], "doc_2_2");
    assert_int_equal(mod_negate(a, &not, &err), SACCADE_OK);
    text = print(not );
    assert_string_equal(text, "!(doc[q] == doc[kv])\n");
    free(text);
    saccade_mod *all[] = {a, b, both, twice, not };
    for (int i = 0; i < 5; i++)
        saccade_mod_destroy(all[i]);
}

static void captures_keep_their_order_in_print(void **state)
{
    saccade_error err = {0};
    saccade_mod *mod, *again;
    (void)state;
    /* mentioned out of order, and one not at all once dead code is gone */
    assert_int_equal(compile(SACCADE_MASK, "x = c + n0; y = b_[q]; a[kv] > 0 && b_[q] > c",
                             SACCADE_I32, &mod, &err),
                     SACCADE_OK);
    char *text = print(mod);
    assert_int_equal(compile(SACCADE_MASK, text, SACCADE_I32, &again, &err), SACCADE_OK);
    char *second = print(again);
    assert_string_equal(text, second);
    for (int32_t i = 0; i < 4; i++)
        assert_string_equal(saccade_mod_capture(again, i).name,
                            saccade_mod_capture(mod, i).name);
    free(text);
    free(second);
    saccade_mod_destroy(mod);
    saccade_mod_destroy(again);
}

/* ---- verifier ---- */

static void broken_nodes_are_noticed(void **state)
{
    saccade_error err = {0};
    saccade_mod *mod;
    (void)state;
    assert_int_equal(compile(SACCADE_MASK, "doc[q] + 1 > kv", SACCADE_I32, &mod, &err), 0);
    const mod_fn *good = mod_function(mod);
    mod_node nodes[16];
    uint32_t args[16];
    mod_fn bad = *good;
    bad.nodes = nodes;
    bad.args = args;
    assert_int_equal(mod_verify(good, &err), SACCADE_OK);
    for (uint32_t i = 0; i < good->n_nodes; i++) {
        for (int what = 0; what < 5; what++) {
            memcpy(nodes, good->nodes, good->n_nodes * sizeof *nodes);
            memcpy(args, good->args, good->n_args * sizeof *args);
            mod_node *n = &nodes[i];
            if (what == 0)
                n->op = MOD_OP_COUNT;
            else if (what == 1)
                n->type = n->type == MOD_FLOAT ? MOD_INT : MOD_FLOAT;
            else if (what == 2)
                n->n_args++;
            else if (what == 3)
                n->deps ^= DEP_SCORE;
            else if (n->n_args > 0)
                args[n->args] = i;
            else
                n->op = OP_LOAD;
            assert_int_equal(mod_verify(&bad, &err), SACCADE_EINTERNAL);
        }
    }
    saccade_mod_destroy(mod);
}

/* ---- allocation failure ---- */

static saccade_status use_mods(void *arg, saccade_error *err)
{
    static const char text[] = "mask f(t[]) = t[q] == t[kv]; f(doc) && causal() || W > q";
    saccade_mod *generic = NULL, *both = NULL, *bound = NULL, *joined = NULL;
    saccade_status status = SACCADE_OK;
    const char *const *names;
    (void)arg;
    TRY_GOTO(parse(SACCADE_MASK, text, &generic, err));
    TRY_GOTO(saccade_mod_chain(generic, generic, &both, err));
    TRY_GOTO(bind_all(both, SACCADE_I32, &bound, err));
    TRY_GOTO(mod_join(bound, bound, OP_and, &names, &joined, err));
out:
    saccade_mod_destroy(generic);
    saccade_mod_destroy(both);
    saccade_mod_destroy(bound);
    saccade_mod_destroy(joined);
    return status;
}

static saccade_status use_print(void *arg, saccade_error *err)
{
    strbuf sb;
    strbuf_init(&sb, 0);
    saccade_status status = mod_print_fn(mod_function(arg), &sb, err);
    if (status == SACCADE_OK)
        status = mod_print_nodes(mod_function(arg), &sb, err);
    strbuf_free(&sb);
    return status;
}

static void mods_survive_failing_allocations(void **state)
{
    saccade_error err = {0};
    saccade_mod *mod;
    (void)state;
    for (int32_t i = 0; saccade_prelude(i) != NULL; i++)
        continue; /* each is parsed once for the process */
    assert_true(fail_alloc_sweep("mods", use_mods, NULL) > 10);
    assert_int_equal(compile(SACCADE_SCORE, "score + sandwich(4)", SACCADE_I32, &mod, &err), 0);
    assert_true(fail_alloc_sweep("print", use_print, mod) > 2);
    saccade_mod_destroy(mod);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cases_hold),
        cmocka_unit_test(excerpts_point_at_the_place),
        cmocka_unit_test(long_lines_are_clipped_around_the_place),
        cmocka_unit_test(texts_cannot_exhaust_anything),
        cmocka_unit_test(too_many_operations_are_refused),
        cmocka_unit_test(long_chains_and_many_locals_are_fine),
        cmocka_unit_test(binding_names_the_capture),
        cmocka_unit_test(unbound_names_are_guessed_at),
        cmocka_unit_test(nodes_know_their_place),
        cmocka_unit_test(print_stops_at_the_end_of_the_buffer),
        cmocka_unit_test(chains_see_the_score_before),
        cmocka_unit_test(chained_masks_are_both_required),
        cmocka_unit_test(joined_masks_keep_their_captures_apart),
        cmocka_unit_test(captures_keep_their_order_in_print),
        cmocka_unit_test(broken_nodes_are_noticed),
        cmocka_unit_test(mods_survive_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
