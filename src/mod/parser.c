/* Recursive descent over definitions and bodies:

       text := def* body            def  := ("mask" | "score") name "(" params ")" "="
       body := def* (name "=" expr ";")* expr ";"?          (expr | "{" body "}") ";"

   Only the form is judged here; what names mean and types are elaboration's. */
#include "mod/parse.h"

#include <stdio.h>
#include <string.h>

/* ---- definitions and bodies ---- */

/* fails when the next token is no name that may be declared. */
static saccade_status declarable(const parser *p, const char *what)
{
    if (p->tok.kind != TOK_NAME)
        return parse_unexpected(p, what);
    const char *reason = parser_reserved(p->tok.name);
    if (reason != NULL)
        return source_fail(p->source, p->tok.place, p->err, SACCADE_EPARSE,
                           "got '%s', which is %s; expected %s", p->tok.name, reason, what);
    return SACCADE_OK;
}

static saccade_status parse_param(parser *p, ast_param *params, uint32_t *n)
{
    TRY(declarable(p, "a parameter's name"));
    for (uint32_t i = 0; i < *n; i++)
        if (strcmp(params[i].name, p->tok.name) == 0)
            return source_fail(p->source, p->tok.place, p->err, SACCADE_EPARSE,
                               "got parameter '%s' twice", p->tok.name);
    if (*n == AST_MAX_PARAMS)
        return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                           "got more than %d parameters", AST_MAX_PARAMS);
    params[*n] = (ast_param){.name = p->tok.name, .place = p->tok.place};
    TRY(parse_advance(p));
    if (parse_is(&p->tok, "[")) {
        TRY(parse_advance(p));
        TRY(parse_take(p, "]"));
        params[*n].is_tensor = true;
    }
    ++*n;
    return SACCADE_OK;
}

static saccade_status parse_params(parser *p, ast_def *def)
{
    ast_param params[AST_MAX_PARAMS];
    uint32_t n = 0;
    strbuf sb;
    strbuf_init(&sb, 0);
    TRY(parse_take(p, "("));
    bool more = !parse_is(&p->tok, ")");
    while (more) {
        TRY(parse_param(p, params, &n));
        more = parse_is(&p->tok, ",");
        if (!more && !parse_is(&p->tok, ")"))
            return parse_unexpected(p, "',' or ')'");
        if (more)
            TRY(parse_advance(p));
    }
    strbuf_printf(&sb, "%s(", def->name);
    for (uint32_t i = 0; i < n; i++)
        strbuf_printf(&sb, "%s%s%s", i > 0 ? ", " : "", params[i].name,
                      params[i].is_tensor ? "[]" : "");
    strbuf_putc(&sb, ')');
    def->params = arena_memdup(p->arena, params, n * sizeof *params);
    def->n_params = n;
    def->signature = sb.failed ? NULL : arena_strdup(p->arena, strbuf_text(&sb));
    strbuf_free(&sb);
    if (def->params == NULL || def->signature == NULL)
        return parse_no_memory(p->err);
    return parse_advance(p);
}

static saccade_status parse_body(parser *p, ast_body *body, bool is_block);

static saccade_status parse_def_body(parser *p, ast_def *def)
{
    TRY(parse_enter(p));
    if (++p->inside > AST_MAX_INSIDE)
        return source_fail(p->source, def->place, p->err, SACCADE_ELIMIT,
                           "got definitions nested deeper than %d", AST_MAX_INSIDE);
    if (parse_is(&p->tok, "{")) {
        TRY(parse_advance(p));
        TRY(parse_body(p, &def->body, true));
        TRY(parse_take(p, "}"));
        if (parse_is(&p->tok, ";"))
            TRY(parse_advance(p));
    } else {
        TRY(parse_expression(p, &def->body.result));
        TRY(parse_take(p, ";"));
    }
    p->inside--;
    p->depth--;
    return SACCADE_OK;
}

/* the line comment that ends just above the definition, without its slashes. */
static const char *comment_above(const parser *p, uint32_t line)
{
    if (p->lex.comment_bytes < 2 || p->lex.comment_line + 1 != line)
        return "";
    const char *text = p->source->text + p->lex.comment_offset + 2;
    size_t n = p->lex.comment_bytes - 2;
    for (; n > 0 && *text == ' '; n--)
        text++;
    return arena_strndup(p->arena, text, n);
}

static saccade_status parse_def(parser *p, ast_def **out)
{
    ast_def *def = arena_alloc(p->arena, sizeof *def);
    if (def == NULL)
        return parse_no_memory(p->err);
    /* `mask` has been lexed, so the comment before it is the last one seen. */
    def->comment = comment_above(p, p->tok.place.line);
    def->kind = parse_is_word(&p->tok, "mask") ? SACCADE_MASK : SACCADE_SCORE;
    const char *kind_word = def->kind == SACCADE_MASK ? "mask" : "score";
    TRY(parse_advance(p));
    if (parse_is(&p->tok, "="))
        return source_fail(
            p->source, p->tok.place, p->err, SACCADE_EPARSE,
            "got '=' after '%s', which can't be assigned to, expected another name", kind_word);
    TRY(declarable(p, "the definition's name"));
    def->name = p->tok.name;
    def->place = p->tok.place;
    TRY(parse_advance(p));
    TRY(parse_params(p, def));
    TRY(parse_take(p, "="));
    TRY(parse_def_body(p, def));
    *out = def;
    return def->comment == NULL ? parse_no_memory(p->err) : SACCADE_OK;
}

/* "mask name" and "score name" start a definition; "score =" and "score +" do not. */
static saccade_status peek(const parser *p, token *out)
{
    lexer ahead = p->lex;
    return lexer_next(&ahead, out, p->err);
}

static saccade_status is_def(const parser *p, bool *out)
{
    token next;
    *out = parse_is_word(&p->tok, "mask");
    if (parse_is_word(&p->tok, "score")) {
        TRY(peek(p, &next));
        *out = next.kind == TOK_NAME;
    }
    return SACCADE_OK;
}

static saccade_status parse_defs(parser *p, ast_body *body)
{
    const ast_def **tail = &body->defs;
    for (uint32_t n = 0;; n++) {
        bool more;
        ast_def *def = NULL;
        TRY(is_def(p, &more));
        if (!more)
            return SACCADE_OK;
        if (n == AST_MAX_DEFS)
            return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                               "got more than %d definitions in one place", AST_MAX_DEFS);
        TRY(parse_def(p, &def));
        for (const ast_def *d = body->defs; d != NULL; d = d->next)
            if (strcmp(d->name, def->name) == 0)
                return source_fail(p->source, def->place, p->err, SACCADE_EPARSE,
                                   "got a second definition of '%s', the first is at %u:%u",
                                   def->name, d->place.line, d->place.column);
        *tail = def;
        tail = &def->next;
    }
}

static bool is_assignable(const char *name)
{
    static const char *const names[] = {"b", "h", "q", "kv", "score"};
    for (int i = 0; i < 5; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return parser_reserved(name) == NULL;
}

static saccade_status parse_statement(parser *p, ast_statement **out)
{
    ast_statement *s = arena_alloc(p->arena, sizeof *s);
    if (s == NULL)
        return parse_no_memory(p->err);
    if (!is_assignable(p->tok.name))
        return declarable(p, "a name to assign to");
    s->name = p->tok.name;
    s->place = p->tok.place;
    TRY(parse_advance(p));
    TRY(parse_take(p, "="));
    TRY(parse_expression(p, &s->value));
    if (p->tok.kind == TOK_END || parse_is(&p->tok, "}"))
        return parse_unexpected(p,
                                "';' and then the result: the last statement is an expression, "
                                "and == compares");
    TRY(parse_take(p, ";"));
    *out = s;
    return SACCADE_OK;
}

static saccade_status parse_result(parser *p, ast_body *body, bool is_block)
{
    if (p->tok.kind == TOK_END || parse_is(&p->tok, "}"))
        return parse_unexpected(p, body->n_statements > 0
                                       ? "the result: the last statement is an expression"
                                       : "an expression");
    TRY(parse_expression(p, &body->result));
    body->comment_follows = parse_after_comment(p);
    const bool has_end = parse_is(&p->tok, ";");
    if (has_end)
        TRY(parse_advance(p));
    if (is_block ? parse_is(&p->tok, "}") : p->tok.kind == TOK_END)
        return SACCADE_OK;
    if (has_end)
        return parse_unexpected(p, is_block
                                       ? "'}' after the result; a step before it is an "
                                         "assignment, such as score = f();"
                                       : "nothing after the result; a step before it is an "
                                         "assignment, such as score = f();");
    return parse_unexpected(p, is_block ? "an operator or '}'"
                                        : "an operator or the end of the text");
}

static saccade_status parse_body(parser *p, ast_body *body, bool is_block)
{
    const ast_statement **tail = &body->statements;
    TRY(parse_defs(p, body));
    while (p->tok.kind == TOK_NAME) {
        token next;
        ast_statement *s = NULL;
        TRY(peek(p, &next));
        if (!parse_is(&next, "="))
            break;
        TRY(parse_statement(p, &s));
        *tail = s;
        tail = &s->next;
        body->n_statements++;
    }
    return parse_result(p, body, is_block);
}

saccade_status parser_run(ast_source *source, arena *arena, saccade_error *err)
{
    return parser_run_from(source, (ast_place){0, 1, 1}, arena, err);
}

saccade_status parser_run_from(ast_source *source, ast_place from, arena *arena,
                               saccade_error *err)
{
    parser p = {.source = source, .arena = arena, .err = err};
    lexer_init(&p.lex, source, arena);
    p.lex.at = p.tok.place = from;
    TRY(parse_advance(&p));
    if (!source->is_prelude)
        return parse_body(&p, &source->body, false);
    TRY(parse_defs(&p, &source->body));
    return p.tok.kind == TOK_END ? SACCADE_OK : parse_unexpected(&p, "a definition");
}
