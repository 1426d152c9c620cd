/* Masks made of masks by their nodes: a && b, a || b, !a. Captures stay apart: where both have
   one of the same name, the second's is renamed, since other values may be bound to it. */
#include "mod/ast.h"

#include <stdio.h>
#include <string.h>

static bool is_taken(const mod_capture *captures, uint32_t n, const char *name)
{
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(captures[i].name, name) == 0)
            return true;
    return false;
}

/* "doc" -> "doc_2", "doc_3", ... whatever is free; cut where a name would get too long. */
static const char *free_name(arena *arena, const mod_capture *captures, uint32_t n,
                             const char *name)
{
    char text[AST_MAX_NAME + 1];
    if (!is_taken(captures, n, name))
        return arena_strdup(arena, name);
    for (uint32_t i = 2;; i++) {
        snprintf(text, sizeof text, "%.50s_%u", name, i);
        if (!is_taken(captures, n, text))
            return arena_strdup(arena, text);
    }
}

/* a's captures, then b's under names that are free among all. */
static saccade_status join_captures(const mod_fn *a, const mod_fn *b, arena *arena,
                                    mod_capture *captures, saccade_error *err)
{
    const uint32_t n = a->n_captures + b->n_captures;
    for (uint32_t i = 0; i < n; i++)
        captures[i] = i < a->n_captures ? a->captures[i] : b->captures[i - a->n_captures];
    for (uint32_t i = a->n_captures; i < n; i++) {
        const char *name = captures[i].name;
        captures[i].name = ""; /* so that it does not clash with itself */
        captures[i].name = free_name(arena, captures, n, name);
        FAIL_IF_NULL(captures[i].name);
    }
    return SACCADE_OK;
}

static saccade_status join_in(const mod_fn *a, const mod_fn *b, mod_op op, arena *scratch,
                              saccade_mod **out, saccade_error *err)
{
    const uint32_t n = a->n_captures + b->n_captures;
    mod_capture *captures = arena_array(scratch, n, sizeof *captures);
    const mod_fn *fn;
    FAIL_IF_NULL(captures);
    FAIL_IF(n > MOD_MAX_CAPTURES, SACCADE_ELIMIT,
            "got %u captures together, expected at most %d", n, MOD_MAX_CAPTURES);
    TRY(join_captures(a, b, scratch, captures, err));
    mod_builder *builder = mod_builder_create(scratch, a->kind, captures, n);
    FAIL_IF_NULL(builder);
    const uint32_t first = mod_emit_function(builder, a, 0);
    const uint32_t second = mod_emit_function(builder, b, a->n_captures);
    TRY(mod_finish(builder, mod_emit2(builder, op, first, second), &fn, err));
    return mod_from_function(fn, out, err);
}

saccade_status mod_join(const saccade_mod *a, const saccade_mod *b, mod_op op,
                        const char *const **second_names, saccade_mod **out, saccade_error *err)
{
    const mod_fn *x = mod_function(a), *y = mod_function(b);
    arena scratch;
    FAIL_AT(x == NULL || y == NULL || x->kind != SACCADE_MASK || y->kind != SACCADE_MASK,
            SACCADE_EINVAL, "join", 0, 0, "got no bound masks");
    arena_init(&scratch);
    saccade_status status = join_in(x, y, op, &scratch, out, err);
    if (status == SACCADE_OK && second_names != NULL) {
        status = mod_second_names(*out, x->n_captures, second_names, err);
        if (status != SACCADE_OK)
            saccade_mod_destroy(*out);
    }
    arena_free(&scratch);
    return status;
}

static saccade_status negate_in(const mod_fn *fn, arena *scratch, saccade_mod **out,
                                saccade_error *err)
{
    const mod_fn *negated;
    mod_builder *builder = mod_builder_create(scratch, fn->kind, fn->captures, fn->n_captures);
    FAIL_IF_NULL(builder);
    const uint32_t result = mod_emit_function(builder, fn, 0);
    TRY(mod_finish(builder, mod_emit1(builder, OP_not, result), &negated, err));
    return mod_from_function(negated, out, err);
}

saccade_status mod_negate(const saccade_mod *a, saccade_mod **out, saccade_error *err)
{
    const mod_fn *fn = mod_function(a);
    arena scratch;
    FAIL_AT(fn == NULL || fn->kind != SACCADE_MASK, SACCADE_EINVAL, "not", 0, 0,
            "got no bound mask");
    arena_init(&scratch);
    const saccade_status status = negate_in(fn, &scratch, out, err);
    arena_free(&scratch);
    return status;
}
