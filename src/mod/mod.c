/* The public object: a generic mod is one or more texts applied in turn, with the captures
   they mention; a bound one is typed nodes. Both own all they point to. */
#include "mod/ast.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct saccade_mod {
    arena arena;
    saccade_kind kind;
    const ast_source **parts; /* texts; parsed while generic, text alone once bound */
    uint32_t n_parts;
    elab_captures *captures; /* generic */
    const mod_fn *fn;        /* bound */
};

static saccade_status mod_new(saccade_kind kind, saccade_mod **out, saccade_error *err)
{
    FAIL_AT(kind != SACCADE_MASK && kind != SACCADE_SCORE && kind != SACCADE_WEIGHT,
            SACCADE_EINVAL, "kind", 0, 0, "got %d, expected SACCADE_MASK, _SCORE or _WEIGHT",
            (int)kind);
    saccade_mod *mod = calloc(1, sizeof *mod);
    FAIL_IF_NULL(mod);
    arena_init(&mod->arena);
    mod->kind = kind;
    *out = mod;
    return SACCADE_OK;
}

void saccade_mod_destroy(saccade_mod *mod)
{
    if (mod == NULL)
        return;
    arena_free(&mod->arena);
    free(mod);
}

/* ---- generic ---- */

/* a copy of the text; parsed too, unless the tree is no longer needed. */
static saccade_status add_part(saccade_mod *mod, const char *text, size_t bytes, bool is_parsed,
                               saccade_error *err)
{
    ast_source *source = arena_alloc(&mod->arena, sizeof *source);
    char *copy = NULL;
    FAIL_AT(bytes > MOD_MAX_TEXT, SACCADE_ELIMIT, NULL, 1, 1,
            "got a text of %zu bytes, expected at most %d", bytes, MOD_MAX_TEXT);
    FAIL_IF_NULL(source);
    copy = arena_memdup(&mod->arena, text, bytes);
    FAIL_IF_NULL(copy);
    *source = (ast_source){.text = copy, .bytes = bytes};
    if (is_parsed)
        TRY(parser_run(source, &mod->arena, err));
    mod->parts[mod->n_parts++] = source;
    return SACCADE_OK;
}

static saccade_status reserve_parts(saccade_mod *mod, uint32_t n, saccade_error *err)
{
    mod->parts = arena_array(&mod->arena, n, sizeof *mod->parts);
    FAIL_IF_NULL(mod->parts);
    return SACCADE_OK;
}

/* types as far as they are certain, and the captures. */
static saccade_status find_captures(saccade_mod *mod, saccade_error *err)
{
    arena scratch;
    uint32_t unused;
    mod->captures = arena_alloc(&mod->arena, sizeof *mod->captures);
    FAIL_IF_NULL(mod->captures);
    arena_init(&scratch);
    const saccade_status status = elab_run(mod->kind, mod->parts, mod->n_parts, mod->captures,
                                           NULL, &scratch, &unused, err);
    arena_free(&scratch);
    return status;
}

saccade_status saccade_mod_parse(saccade_kind kind, const char *text, size_t bytes,
                                 saccade_mod **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_mod *mod;
    FAIL_AT(out == NULL || (text == NULL && bytes > 0), SACCADE_EINVAL, "parse", 0, 0,
            "got NULL, expected a text and a result");
    TRY(mod_new(kind, &mod, err));
    TRY_GOTO(reserve_parts(mod, 1, err));
    TRY_GOTO(add_part(mod, text == NULL ? "" : text, bytes, true, err));
    TRY_GOTO(find_captures(mod, err));
    *out = mod;
    return SACCADE_OK;
out:
    saccade_mod_destroy(mod);
    return status;
}

/* ---- chains ---- */

static saccade_status copy_parts(const saccade_mod *from, bool is_parsed, saccade_mod *to,
                                 saccade_error *err)
{
    for (uint32_t i = 0; i < from->n_parts; i++)
        TRY(add_part(to, from->parts[i]->text, from->parts[i]->bytes, is_parsed, err));
    return SACCADE_OK;
}

static bool is_said(const saccade_mod *mod, const char *word)
{
    for (uint32_t i = 0; i < mod->n_parts; i++)
        if (memmem(mod->parts[i]->text, mod->parts[i]->bytes, word, strlen(word)))
            return true;
    return false;
}

/* several texts as one: each becomes a definition, its own definitions inside of it, and has a
 * name that no text says: part_1, or part2_1, ... */
static void print_parts(const saccade_mod *mod, strbuf *out)
{
    const bool is_mask = mod->kind == SACCADE_MASK;
    char stem[AST_MAX_NAME] = "part_";
    for (uint32_t n = 2; is_said(mod, stem); n++)
        snprintf(stem, sizeof stem, "part%u_", n);
    for (uint32_t i = 0; i < mod->n_parts; i++) {
        strbuf_printf(out, "%s %s%u() = {\n", is_mask ? "mask" : "score", stem, i + 1);
        strbuf_add(out, mod->parts[i]->text, mod->parts[i]->bytes);
        strbuf_puts(out, "\n};\n");
    }
    for (uint32_t i = 0; i < mod->n_parts; i++) {
        const bool is_last = i + 1 == mod->n_parts;
        if (is_mask)
            strbuf_printf(out, "%s%u()%s", stem, i + 1, is_last ? "\n" : " && ");
        else
            strbuf_printf(out, "%s%s%u()%s", is_last ? "" : "score = ", stem, i + 1,
                          is_last ? "\n" : ";\n");
    }
}

/* What a chain prints is a text too: one past a limit of texts is refused as it is made. */
static saccade_status check_print(const saccade_mod *mod, saccade_error *err)
{
    strbuf text;
    saccade_mod *again = NULL;
    strbuf_init(&text, 0);
    print_parts(mod, &text);
    saccade_status status = strbuf_status(&text, err);
    if (status == SACCADE_OK)
        status = saccade_mod_parse(mod->kind, strbuf_text(&text), text.length, &again, err);
    saccade_mod_destroy(again);
    strbuf_free(&text);
    return status;
}

saccade_status saccade_mod_chain(const saccade_mod *first, const saccade_mod *then,
                                 saccade_mod **out, saccade_error *err)
{
    enum { MOST = 256 };
    saccade_status status = SACCADE_OK;
    saccade_mod *mod;
    FAIL_AT(first == NULL || then == NULL || out == NULL, SACCADE_EINVAL, "chain", 0, 0,
            "got NULL, expected two mods and a result");
    FAIL_AT(first->fn != NULL || then->fn != NULL, SACCADE_EINVAL, "chain", 0, 0,
            "got a bound mod, expected two generic ones");
    FAIL_AT(first->kind != then->kind, SACCADE_EINVAL, "chain", 0, 0,
            "got mods of two kinds, expected one kind");
    FAIL_AT(first->kind == SACCADE_WEIGHT, SACCADE_EINVAL, "chain", 0, 0,
            "got weights, expected masks or scores: a plan takes one weight");
    FAIL_AT(first->n_parts + then->n_parts > MOST, SACCADE_ELIMIT, "chain", 0, 0,
            "got more than %d texts", MOST);
    TRY(mod_new(first->kind, &mod, err));
    TRY_GOTO(reserve_parts(mod, first->n_parts + then->n_parts, err));
    TRY_GOTO(copy_parts(first, true, mod, err));
    TRY_GOTO(copy_parts(then, true, mod, err));
    TRY_GOTO(find_captures(mod, err));
    TRY_GOTO(check_print(mod, err));
    *out = mod;
    return SACCADE_OK;
out:
    saccade_mod_destroy(mod);
    return status;
}

/* ---- binding ---- */

static bool mod_type_of(saccade_dtype dtype, mod_type *type)
{
    if (dtype == SACCADE_BOOL)
        *type = MOD_BOOL;
    else if (dtype >= SACCADE_U8 && dtype <= SACCADE_I64)
        *type = MOD_INT;
    else if (dtype >= SACCADE_F16 && dtype <= SACCADE_F64)
        *type = MOD_FLOAT;
    else
        return false;
    return true;
}

static const saccade_capture *find_given(const saccade_capture *given, int32_t n,
                                         const char *name)
{
    for (int32_t i = 0; i < n; i++)
        if (strcmp(given[i].name, name) == 0)
            return &given[i];
    return NULL;
}

static const char *nearest_given(const elab_capture *c, const saccade_capture *given, int32_t n)
{
    static const char *const known[] = {"b",   "h", "q",  "kv", "score", "B",   "H",
                                        "Hkv", "Q", "KV", "D",  "Dv",    "inf", "true"};
    const char *names[MOD_MAX_CAPTURES];
    uint32_t n_names = 0;
    for (int32_t i = 0; i < n && n_names < MOD_MAX_CAPTURES; i++)
        names[n_names++] = given[i].name;
    const char *nearest = source_nearest(c->name, names, n_names);
    if (nearest == NULL && c->rank == 0)
        nearest = source_nearest(c->name, known, sizeof known / sizeof known[0]);
    return nearest;
}

static saccade_status bind_one(const elab_capture *c, const saccade_capture *given, int32_t n,
                               mod_capture *out, saccade_error *err)
{
    const saccade_capture *g = find_given(given, n, c->name);
    mod_type type;
    if (g == NULL) {
        const char *nearest = nearest_given(c, given, n);
        return source_fail(c->source, c->place, err, SACCADE_EINVAL,
                           "got no value for '%s', expected %s of that name to be bound%s%s%s",
                           c->name, c->rank == 0 ? "a scalar" : "a tensor",
                           nearest ? "; did you mean '" : "", nearest ? nearest : "",
                           nearest ? "'?" : "");
    }
    if (g->rank != (int32_t)c->rank)
        return source_fail(c->source, c->place, err, SACCADE_EINVAL,
                           "got '%s' of rank %d, expected rank %u as used here", c->name,
                           g->rank, c->rank);
    if (!mod_type_of(g->dtype, &type))
        return source_fail(c->source, c->place, err, SACCADE_EINVAL,
                           "got dtype %s for '%s', expected bool, an integer or a float",
                           saccade_dtype_name(g->dtype), c->name);
    *out = (mod_capture){c->name, g->dtype, (uint8_t)type, (uint8_t)c->rank};
    return SACCADE_OK;
}

static saccade_status check_extra(const elab_captures *captures, const saccade_capture *given,
                                  int32_t n, saccade_error *err)
{
    for (int32_t i = 0; i < n; i++) {
        uint32_t j = 0;
        const char *name = given[i].name;
        FAIL_AT(name == NULL, SACCADE_EINVAL, "bind", 0, 0, "got a capture without a name");
        const char *reason = parser_reserved(name);
        FAIL_AT(reason != NULL, SACCADE_EINVAL, name, 0, 0,
                "got a value for it, but it is %s and can't be bound", reason);
        while (j < captures->n && strcmp(captures->list[j].name, name) != 0)
            j++;
        FAIL_AT(j == captures->n, SACCADE_EINVAL, name, 0, 0,
                "got a value for it, but the text does not use it");
        FAIL_AT(find_given(given, i, name) != NULL, SACCADE_EINVAL, name, 0, 0,
                "got two values for it");
    }
    return SACCADE_OK;
}

static saccade_status bind_types(const saccade_mod *mod, const saccade_capture *given,
                                 int32_t n, elab_captures *typed, mod_capture *out,
                                 saccade_error *err)
{
    TRY(check_extra(mod->captures, given, n, err));
    *typed = *mod->captures;
    typed->is_fixed = true;
    for (uint32_t i = 0; i < typed->n; i++) {
        TRY(bind_one(&typed->list[i], given, n, &out[i], err));
        typed->list[i].types = 1u << out[i].type;
    }
    return SACCADE_OK;
}

/* typed nodes in scratch, copied into the new mod. */
static saccade_status bind_in(const saccade_mod *mod, const saccade_capture *given, int32_t n,
                              arena *scratch, saccade_mod *bound, saccade_error *err)
{
    elab_captures *typed = arena_alloc(scratch, sizeof *typed);
    mod_capture *captures = arena_array(scratch, MOD_MAX_CAPTURES, sizeof *captures);
    const mod_fn *fn;
    uint32_t result;
    FAIL_IF_NULL(typed);
    FAIL_IF_NULL(captures);
    TRY(bind_types(mod, given, n, typed, captures, err));
    mod_builder *builder = mod_builder_create(scratch, mod->kind, captures, typed->n);
    FAIL_IF_NULL(builder);
    TRY(elab_run(mod->kind, mod->parts, mod->n_parts, typed, builder, scratch, &result, err));
    const saccade_status status = mod_finish(builder, result, &fn, err);
    if (status == SACCADE_ELIMIT)
        return source_fail(mod->parts[0], (ast_place){0, 1, 1}, err, status,
                           "got more than %d operations, definitions and sum() written out",
                           MOD_MAX_NODES);
    TRY(status);
    TRY(mod_copy_function(fn, &bound->arena, &bound->fn, err));
    TRY(reserve_parts(bound, mod->n_parts, err));
    return copy_parts(mod, false, bound, err);
}

saccade_status saccade_mod_bind(const saccade_mod *mod, const saccade_capture *captures,
                                int32_t n_captures, saccade_mod **out, saccade_error *err)
{
    saccade_mod *bound;
    arena scratch;
    FAIL_AT(mod == NULL || out == NULL || n_captures < 0
                || (captures == NULL && n_captures > 0),
            SACCADE_EINVAL, "bind", 0, 0, "got NULL or a negative count");
    FAIL_AT(mod->fn != NULL, SACCADE_EINVAL, "bind", 0, 0,
            "got a bound mod, expected a generic one");
    TRY(mod_new(mod->kind, &bound, err));
    arena_init(&scratch);
    const saccade_status status = bind_in(mod, captures, n_captures, &scratch, bound, err);
    arena_free(&scratch);
    if (status == SACCADE_OK)
        *out = bound;
    else
        saccade_mod_destroy(bound);
    return status;
}

/* ---- questions ---- */

saccade_kind saccade_mod_kind(const saccade_mod *mod)
{
    return mod ? mod->kind : (saccade_kind)0;
}

int32_t saccade_mod_capture_count(const saccade_mod *mod)
{
    if (!mod)
        return 0;
    return (int32_t)(mod->fn != NULL ? mod->fn->n_captures : mod->captures->n);
}

saccade_capture saccade_mod_capture(const saccade_mod *mod, int32_t i)
{
    if (i < 0 || i >= saccade_mod_capture_count(mod))
        return (saccade_capture){0};
    if (mod->fn != NULL) {
        const mod_capture *c = &mod->fn->captures[i];
        return (saccade_capture){c->name, c->dtype, c->rank};
    }
    const elab_capture *c = &mod->captures->list[i];
    return (saccade_capture){c->name, SACCADE_NONE, (int32_t)c->rank};
}

const mod_fn *mod_function(const saccade_mod *mod)
{
    return mod->fn;
}

void mod_show_place(const saccade_mod *mod, saccade_error *err)
{
    if (err == NULL || mod->n_parts != 1 || err->line < 1 || err->column < 1)
        return;
    const ast_source *source = mod->parts[0];
    ast_place place = {0, (uint32_t)err->line, (uint32_t)err->column};
    uint32_t line = 1;
    for (; place.offset < source->bytes && line < place.line; place.offset++)
        line += source->text[place.offset] == '\n';
    place.offset += place.column - 1;
    if (place.offset <= source->bytes)
        source_excerpt(source, place, err->excerpt);
}

/* ---- printing ---- */

size_t saccade_mod_print(const saccade_mod *mod, char *text, size_t bytes)
{
    strbuf out;
    strbuf_init(&out, 0);
    if (!mod)
        strbuf_add(&out, "", 0);
    else if (mod->fn != NULL)
        mod_print_fn(mod->fn, &out, NULL);
    else if (mod->n_parts == 1)
        strbuf_add(&out, mod->parts[0]->text, mod->parts[0]->bytes);
    else
        print_parts(mod, &out);
    const size_t length = out.failed == SACCADE_OK ? out.length : 0;
    if (text && bytes > 0) {
        const size_t n = length < bytes - 1 ? length : bytes - 1;
        memcpy(text, strbuf_text(&out), n);
        text[n] = '\0';
    }
    strbuf_free(&out);
    return length;
}

/* ---- made from nodes ---- */

saccade_status mod_from_function(const mod_fn *fn, saccade_mod **out, saccade_error *err)
{
    saccade_mod *mod;
    TRY(mod_new(fn->kind, &mod, err));
    const saccade_status status = mod_copy_function(fn, &mod->arena, &mod->fn, err);
    if (status == SACCADE_OK)
        *out = mod;
    else
        saccade_mod_destroy(mod);
    return status;
}

saccade_status mod_second_names(saccade_mod *mod, uint32_t first, const char *const **out,
                                saccade_error *err)
{
    const uint32_t n = mod->fn->n_captures - first;
    const char **names = arena_array(&mod->arena, n, sizeof *names);
    FAIL_IF_NULL(names);
    for (uint32_t i = 0; i < n; i++)
        names[i] = mod->fn->captures[first + i].name;
    *out = names;
    return SACCADE_OK;
}
