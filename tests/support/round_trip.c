/* Text of typed nodes, read back: the same operations on the same operands, captures in the
   same order. */
#include "support/round_trip.h"

#include "mod/mod.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void assert_same(const mod_fn *a, const mod_fn *b, const char *text)
{
    int same = a->n_nodes == b->n_nodes && a->n_args == b->n_args
               && a->n_captures == b->n_captures && a->result == b->result;
    for (uint32_t i = 0; same && i < a->n_nodes; i++) {
        const mod_node *x = &a->nodes[i], *y = &b->nodes[i];
        same = x->op == y->op && x->type == y->type && x->n_args == y->n_args
               && x->args == y->args && x->deps == y->deps && x->imm.i == y->imm.i;
    }
    same = same && memcmp(a->args, b->args, a->n_args * sizeof *a->args) == 0;
    for (uint32_t i = 0; same && i < a->n_captures; i++)
        same = strcmp(a->captures[i].name, b->captures[i].name) == 0
               && a->captures[i].dtype == b->captures[i].dtype;
    if (!same)
        fail_msg("printed text gives other nodes:\n%s", text);
}

static char *printed(const saccade_mod *mod, size_t *n)
{
    *n = saccade_mod_print(mod, NULL, 0);
    char *text = malloc(*n + 1);
    assert_non_null(text);
    assert_int_equal(saccade_mod_print(mod, text, *n + 1), *n);
    return text;
}

static saccade_mod *bind_same(const saccade_mod *mod, const saccade_capture *captures,
                              int32_t n_captures, const char *text)
{
    saccade_error err = {0};
    saccade_mod *bound;
    if (saccade_mod_bind(mod, captures, n_captures, &bound, &err))
        fail_msg("%d:%d: %s %s\n%s", err.line, err.column, err.where, err.message, text);
    return bound;
}

void round_trip_check_generic(const saccade_mod *mod, const saccade_capture *captures,
                              int32_t n_captures)
{
    saccade_error err = {0};
    saccade_mod *again;
    size_t n, n_again;
    char *text = printed(mod, &n);
    if (saccade_mod_parse(saccade_mod_kind(mod), text, n, &again, &err))
        fail_msg("%d:%d: %s %s\n%s", err.line, err.column, err.where, err.message, text);
    char *text_again = printed(again, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(text, text_again, n);
    saccade_mod *first = bind_same(mod, captures, n_captures, text);
    saccade_mod *second = bind_same(again, captures, n_captures, text);
    assert_same(mod_function(first), mod_function(second), text);
    saccade_mod_destroy(first);
    saccade_mod_destroy(second);
    saccade_mod_destroy(again);
    free(text);
    free(text_again);
}

/* what a bound mod prints, parsed and bound as it was. */
static saccade_mod *read_back(const saccade_mod *mod, char **text)
{
    saccade_error err = {0};
    saccade_mod *generic = NULL, *bound = NULL;
    saccade_capture captures[MOD_MAX_CAPTURES];
    const size_t n = saccade_mod_print(mod, NULL, 0);
    *text = malloc(n + 1);
    assert_int_equal(saccade_mod_print(mod, *text, n + 1), n);
    const int32_t n_captures = saccade_mod_capture_count(mod);
    for (int32_t i = 0; i < n_captures; i++)
        captures[i] = saccade_mod_capture(mod, i);
    if (saccade_mod_parse(saccade_mod_kind(mod), *text, n, &generic, &err)
        || saccade_mod_bind(generic, captures, n_captures, &bound, &err))
        fail_msg("%d:%d: %s %s\n%s", err.line, err.column, err.where, err.message, *text);
    saccade_mod_destroy(generic);
    return bound;
}

void round_trip_check(const saccade_mod *mod)
{
    char *text;
    saccade_mod *again = read_back(mod, &text);
    assert_same(mod_function(mod), mod_function(again), text);
    free(text);
    saccade_mod_destroy(again);
}
