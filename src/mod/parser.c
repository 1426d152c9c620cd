/* Recursive descent over C's expression grammar, operators by precedence:

       text := def* body            def  := ("mask" | "score") name "(" params ")" "="
       body := def* (name "=" expr ";")* expr ";"?          (expr | "{" body "}") ";"

   Only the form is judged here; names, kinds and types are elaborate.c's. Nesting is counted,
   and so are the nodes, so no text can exhaust stack or memory. */
#include "mod/ast.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct parser {
    lexer lex;
    token tok;          /* the next one, not yet taken */
    const ast_source *source;
    arena *arena;
    uint32_t depth, n_nodes;
    uint32_t previous_line; /* of the last token taken */
    ast_place end;          /* of the last token taken */
    saccade_error *err;
} parser;

/* ---- names ---- */

static const struct {
    const char *name, *what;
} reserved[] = {
    {"b", "an index variable"},  {"h", "an index variable"},  {"q", "an index variable"},
    {"kv", "an index variable"}, {"score", "the score"},      {"B", "a size"},
    {"H", "a size"},             {"Hkv", "a size"},           {"Q", "a size"},
    {"KV", "a size"},            {"D", "a size"},             {"Dv", "a size"},
    {"inf", "a constant"},       {"nan", "a constant"},       {"true", "a constant"},
    {"false", "a constant"},     {"mask", "a keyword"},       {"int", "a keyword"},
    {"float", "a keyword"},      {"bool", "a keyword"},       {"if", "a keyword"},
    {"else", "a keyword"},       {"for", "a keyword"},        {"while", "a keyword"},
    {"do", "a keyword"},         {"return", "a keyword"},
};

const char *parser_reserved(const char *name)
{
    for (size_t i = 0; i < sizeof reserved / sizeof reserved[0]; i++)
        if (strcmp(reserved[i].name, name) == 0)
            return reserved[i].what;
    return types_is_builtin(name) ? "a built-in function" : NULL;
}

bool parser_is_name(const char *name)
{
    const size_t n = strlen(name);
    for (size_t i = 0; i < n; i++) {
        const char c = name[i];
        const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        if (!is_letter && !(i > 0 && c >= '0' && c <= '9'))
            return false;
    }
    return n > 0 && n <= AST_MAX_NAME;
}

/* ---- tokens ---- */

static saccade_status advance(parser *p)
{
    saccade_error *err = p->err;
    p->previous_line = p->tok.place.line;
    p->end = p->lex.at;
    return lexer_next(&p->lex, &p->tok, err);
}

static bool is(const token *t, const char *text)
{
    return t->kind == TOK_PUNCT && strcmp(t->text, text) == 0;
}

static bool is_word(const token *t, const char *word)
{
    return t->kind == TOK_NAME && strcmp(t->name, word) == 0;
}

/* did a // comment cut off the line that the last token stands on? */
static bool is_after_comment(const parser *p)
{
    return p->tok.after_comment && p->lex.comment_line == p->previous_line;
}

/* What a reader of Python or C may have meant by this token, as " (...)" or "". */
static const char *hint_for(const parser *p)
{
    static const struct {
        const char *got, *hint;
    } words[] = {
        {"and", " (write &&)"}, {"or", " (write ||)"}, {"not", " (write !x)"},
        {"if", " (write condition ? x : y)"}, {"else", " (write condition ? x : y)"},
        {"return", " (the last expression is the result)"},
        {"for", " (write sum(i, n, x))"}, {"while", " (write sum(i, n, x))"},
        {"int", " (locals have no types: x = ...;)"},
        {"float", " (locals have no types: x = ...;)"},
        {"bool", " (locals have no types: x = ...;)"},
    };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (is_word(&p->tok, words[i].got))
            return words[i].hint;
    if (is(&p->tok, "="))
        return " (== compares)";
    if (is(&p->tok, ","))
        return " (there is no comma operator)";
    if (is_after_comment(p))
        return " (// starts a comment; floordiv(x, y) divides)";
    return "";
}

/* "got X, expected Y" at the next token. */
static saccade_status unexpected(const parser *p, const char *expected)
{
    char got[48];
    const int n = p->tok.bytes < 32 ? (int)p->tok.bytes : 32;
    const bool is_end = p->tok.kind == TOK_END;
    if (is_end)
        snprintf(got, sizeof got, "the end of the text");
    else
        snprintf(got, sizeof got, "'%.*s'", n, p->source->text + p->tok.place.offset);
    return source_fail(p->source, is_end ? p->end : p->tok.place, p->err, SACCADE_EPARSE,
                       "got %s, expected %s%s", got, expected, hint_for(p));
}

static saccade_status take(parser *p, const char *text)
{
    char expected[8];
    if (is(&p->tok, text))
        return advance(p);
    snprintf(expected, sizeof expected, "'%s'", text);
    return unexpected(p, expected);
}

static saccade_status out_of_memory(saccade_error *err)
{
    FAIL(SACCADE_ENOMEM, "out of memory");
}

/* ---- nodes ---- */

static saccade_status new_node(parser *p, ast_kind kind, ast_place place, const char *name,
                               uint32_t n_args, ast_node **out)
{
    if (++p->n_nodes > AST_MAX_NODES)
        return source_fail(p->source, place, p->err, SACCADE_ELIMIT,
                           "got a text of more than %d expressions", AST_MAX_NODES);
    ast_node *node = arena_alloc(p->arena, sizeof *node);
    const ast_node **args = arena_array(p->arena, n_args, sizeof *args);
    if (node == NULL || args == NULL)
        return out_of_memory(p->err);
    *node = (ast_node){.kind = (uint8_t)kind, .place = place, .name = name,
                       .n_args = (uint16_t)n_args, .args = args};
    *out = node;
    return SACCADE_OK;
}

static saccade_status enter(parser *p)
{
    if (++p->depth > MOD_MAX_DEPTH)
        return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                           "got nesting deeper than %d", MOD_MAX_DEPTH);
    return SACCADE_OK;
}

static saccade_status parse_expr(parser *p, const ast_node **out);

/* expr ("," expr)* up to `close`, which is taken; adds to args[*n]. */
static saccade_status parse_list(parser *p, const char *close, const ast_node **args,
                                 uint32_t *n, uint32_t most)
{
    while (!is(&p->tok, close)) {
        if (*n == most)
            return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                               "got more than %u, the most before '%s'", most, close);
        TRY(parse_expr(p, &args[(*n)++]));
        if (is(&p->tok, close))
            break;
        if (!is(&p->tok, ","))
            return unexpected(p, close[0] == ')' ? "',' or ')'" : "',' or ']'");
        TRY(advance(p));
    }
    return advance(p);
}

static saccade_status with_args(parser *p, ast_kind kind, const token *name,
                                const ast_node **args, uint32_t n, const ast_node **out)
{
    ast_node *node = NULL;
    TRY(new_node(p, kind, name->place, name->name, n, &node));
    for (uint32_t i = 0; i < n; i++)
        node->args[i] = args[i];
    *out = node;
    return SACCADE_OK;
}

/* name "[" i, j "]" "[" k "]" ... */
static saccade_status parse_index(parser *p, const token *name, const ast_node **out)
{
    const ast_node *args[SACCADE_MAX_RANK];
    uint32_t n = 0;
    while (is(&p->tok, "[")) {
        TRY(advance(p));
        if (is(&p->tok, "]"))
            return unexpected(p, "an index");
        TRY(parse_list(p, "]", args, &n, SACCADE_MAX_RANK));
    }
    return with_args(p, AST_INDEX, name, args, n, out);
}

static saccade_status parse_name(parser *p, const ast_node **out)
{
    const token name = p->tok;
    const ast_node *args[AST_MAX_ARGS];
    uint32_t n = 0;
    TRY(advance(p));
    if (is(&p->tok, "[")) {
        return parse_index(p, &name, out);
    } else if (is(&p->tok, "(")) {
        TRY(advance(p));
        TRY(parse_list(p, ")", args, &n, AST_MAX_ARGS));
        return with_args(p, AST_CALL, &name, args, n, out);
    }
    return with_args(p, AST_NAME, &name, NULL, 0, out);
}

/* A number, negated when a minus stood right before it: -8 is a constant, -(8) is not. */
static saccade_status parse_number(parser *p, ast_place place, bool is_negative,
                                   const ast_node **out)
{
    ast_node *node = NULL;
    const bool is_int = p->tok.kind == TOK_INT;
    TRY(new_node(p, is_int ? AST_INT : AST_FLOAT, place, NULL, 0, &node));
    if (is_int && !is_negative && !p->tok.is_hex && p->tok.int_value > INT32_MAX)
        return source_fail(p->source, place, p->err, SACCADE_EPARSE,
                           "got 2147483648, expected an int up to 2147483647");
    if (is_int)
        node->value.i = (int32_t)(is_negative ? 0u - p->tok.int_value : p->tok.int_value);
    else
        node->value.f = is_negative ? -p->tok.float_value : p->tok.float_value;
    *out = node;
    return advance(p);
}

/* true false inf nan; inf may carry a minus. */
static saccade_status parse_constant(parser *p, ast_place place, bool is_negative,
                                     const ast_node **out)
{
    ast_node *node = NULL;
    const char *word = p->tok.name;
    const bool is_float = strcmp(word, "inf") == 0 || strcmp(word, "nan") == 0;
    TRY(new_node(p, is_float ? AST_FLOAT : AST_BOOL, place, NULL, 0, &node));
    if (is_float) {
        node->value.f = word[0] == 'n' ? NAN : is_negative ? -INFINITY : INFINITY;
    } else {
        node->value.i = word[0] == 't';
    }
    *out = node;
    return advance(p);
}

static bool is_constant(const token *t)
{
    return is_word(t, "true") || is_word(t, "false") || is_word(t, "inf") || is_word(t, "nan");
}

static saccade_status parse_primary(parser *p, const ast_node **out)
{
    if (p->tok.kind == TOK_INT || p->tok.kind == TOK_FLOAT)
        return parse_number(p, p->tok.place, false, out);
    if (is_constant(&p->tok))
        return parse_constant(p, p->tok.place, false, out);
    if (p->tok.kind == TOK_NAME && hint_for(p)[0] != '\0' && !is_word(&p->tok, "int")
        && !is_word(&p->tok, "float"))
        return unexpected(p, "an expression");
    if (p->tok.kind == TOK_NAME)
        return parse_name(p, out);
    if (!is(&p->tok, "("))
        return unexpected(p, "an expression");
    TRY(advance(p));
    TRY(parse_expr(p, out));
    ((ast_node *)*out)->parenthesised = true;
    return take(p, ")");
}

static saccade_status parse_unary(parser *p, const ast_node **out)
{
    static const char *const forms[] = {"-u", "!u", "~u", "+u"};
    const token op = p->tok;
    ast_node *node = NULL;
    const char *form = NULL;
    for (int i = 0; i < 4; i++)
        if (op.kind == TOK_PUNCT && op.text[0] == forms[i][0] && op.text[1] == '\0')
            form = forms[i];
    if (form == NULL)
        return parse_primary(p, out);
    TRY(enter(p));
    TRY(advance(p));
    if (form[0] == '-' && (p->tok.kind == TOK_INT || p->tok.kind == TOK_FLOAT)) {
        TRY(parse_number(p, op.place, true, out));
    } else if (form[0] == '-' && is_word(&p->tok, "inf")) {
        TRY(parse_constant(p, op.place, true, out));
    } else {
        TRY(new_node(p, AST_UNARY, op.place, form, 1, &node));
        TRY(parse_unary(p, &node->args[0]));
        *out = node;
    }
    p->depth--;
    return SACCADE_OK;
}

static const struct {
    const char *text;
    int precedence;
} binaries[] = {
    {"||", 1}, {"&&", 2}, {"|", 3},  {"^", 4},  {"&", 5}, {"==", 6}, {"!=", 6}, {"<", 7},
    {"<=", 7}, {">", 7},  {">=", 7}, {"<<", 8}, {">>", 8}, {"+", 9},  {"-", 9},  {"*", 10},
    {"/", 10}, {"%", 10},
};

static int find_binary(const token *t)
{
    for (int i = 0; i < (int)(sizeof binaries / sizeof binaries[0]); i++)
        if (is(t, binaries[i].text))
            return i;
    return -1;
}

int parser_precedence(const char *op)
{
    for (size_t i = 0; i < sizeof binaries / sizeof binaries[0]; i++)
        if (strcmp(binaries[i].text, op) == 0)
            return binaries[i].precedence;
    return 0;
}

static saccade_status parse_binary(parser *p, int lowest, const ast_node **out)
{
    TRY(parse_unary(p, out));
    for (int op; (op = find_binary(&p->tok)) >= 0 && binaries[op].precedence >= lowest;) {
        ast_node *node = NULL;
        TRY(new_node(p, AST_BINARY, p->tok.place, binaries[op].text, 2, &node));
        TRY(advance(p));
        node->args[0] = *out;
        node->spine = 1 + ((*out)->kind == AST_BINARY ? (*out)->spine : 0);
        TRY(parse_binary(p, binaries[op].precedence + 1, &node->args[1]));
        *out = node;
    }
    return SACCADE_OK;
}

static saccade_status parse_expr(parser *p, const ast_node **out)
{
    ast_node *node = NULL;
    TRY(enter(p));
    TRY(parse_binary(p, 1, out));
    if (is(&p->tok, "?")) {
        TRY(new_node(p, AST_COND, p->tok.place, "?:", 3, &node));
        TRY(advance(p));
        node->args[0] = *out;
        TRY(parse_expr(p, &node->args[1]));
        TRY(take(p, ":"));
        TRY(parse_expr(p, &node->args[2]));
        *out = node;
    }
    p->depth--;
    return SACCADE_OK;
}

/* ---- definitions and bodies ---- */

/* fails when the next token is no name that may be declared. */
static saccade_status declarable(const parser *p, const char *what)
{
    if (p->tok.kind != TOK_NAME)
        return unexpected(p, what);
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
    TRY(advance(p));
    if (is(&p->tok, "[")) {
        TRY(advance(p));
        TRY(take(p, "]"));
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
    TRY(take(p, "("));
    while (!is(&p->tok, ")")) {
        TRY(parse_param(p, params, &n));
        if (!is(&p->tok, ",") && !is(&p->tok, ")"))
            return unexpected(p, "',' or ')'");
        if (is(&p->tok, ","))
            TRY(advance(p));
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
        return out_of_memory(p->err);
    return advance(p);
}

static saccade_status parse_body(parser *p, ast_body *body, bool is_block);

static saccade_status parse_def_body(parser *p, ast_def *def)
{
    TRY(enter(p));
    if (is(&p->tok, "{")) {
        TRY(advance(p));
        TRY(parse_body(p, &def->body, true));
        TRY(take(p, "}"));
        if (is(&p->tok, ";"))
            TRY(advance(p));
    } else {
        TRY(parse_expr(p, &def->body.result));
        TRY(take(p, ";"));
    }
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
        return out_of_memory(p->err);
    /* `mask` has been lexed, so the comment before it is the last one seen. */
    def->comment = comment_above(p, p->tok.place.line);
    def->kind = is_word(&p->tok, "mask") ? SACCADE_MASK : SACCADE_SCORE;
    TRY(advance(p));
    TRY(declarable(p, "the definition's name"));
    def->name = p->tok.name;
    def->place = p->tok.place;
    TRY(advance(p));
    TRY(parse_params(p, def));
    TRY(take(p, "="));
    TRY(parse_def_body(p, def));
    *out = def;
    return def->comment == NULL ? out_of_memory(p->err) : SACCADE_OK;
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
    *out = is_word(&p->tok, "mask");
    if (is_word(&p->tok, "score")) {
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
        return out_of_memory(p->err);
    if (!is_assignable(p->tok.name))
        return declarable(p, "a name to assign to");
    s->name = p->tok.name;
    s->place = p->tok.place;
    TRY(advance(p));
    TRY(take(p, "="));
    TRY(parse_expr(p, &s->value));
    if (p->tok.kind == TOK_END || is(&p->tok, "}"))
        return unexpected(p, "';' and then the result: the last statement is an expression, "
                             "and == compares");
    TRY(take(p, ";"));
    *out = s;
    return SACCADE_OK;
}

static saccade_status parse_result(parser *p, ast_body *body, bool is_block)
{
    if (p->tok.kind == TOK_END || is(&p->tok, "}"))
        return unexpected(p, body->n_statements > 0
                                 ? "the result: the last statement is an expression"
                                 : "an expression");
    TRY(parse_expr(p, &body->result));
    body->comment_follows = is_after_comment(p);
    const bool has_end = is(&p->tok, ";");
    if (has_end)
        TRY(advance(p));
    if (is_block ? is(&p->tok, "}") : p->tok.kind == TOK_END)
        return SACCADE_OK;
    if (has_end)
        return unexpected(p, is_block ? "'}' after the result; a step before it is an "
                                        "assignment, such as score = f();"
                                      : "nothing after the result; a step before it is an "
                                        "assignment, such as score = f();");
    return unexpected(p, is_block ? "an operator or '}'" : "an operator or the end of the text");
}

static saccade_status parse_body(parser *p, ast_body *body, bool is_block)
{
    const ast_statement **tail = &body->statements;
    TRY(parse_defs(p, body));
    while (p->tok.kind == TOK_NAME) {
        token next;
        ast_statement *s = NULL;
        TRY(peek(p, &next));
        if (!is(&next, "="))
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
    parser p = {.source = source, .arena = arena, .err = err};
    lexer_init(&p.lex, source, arena);
    p.tok.place = p.lex.at;
    TRY(advance(&p));
    if (!source->is_prelude)
        return parse_body(&p, &source->body, false);
    TRY(parse_defs(&p, &source->body));
    return p.tok.kind == TOK_END ? SACCADE_OK : unexpected(&p, "a definition");
}
