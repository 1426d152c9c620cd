/* Expressions: C's grammar, operators by precedence climbing. Nesting is counted, and so are
   the nodes, so no text can exhaust stack or memory. */
#include "mod/parse.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- names ---- */

static const struct {
    const char *name, *what;
} reserved[] = {
    {"b", "an index variable"},
    {"h", "an index variable"},
    {"q", "an index variable"},
    {"kv", "an index variable"},
    {"score", "the score"},
    {"B", "a size"},
    {"H", "a size"},
    {"Hkv", "a size"},
    {"Q", "a size"},
    {"KV", "a size"},
    {"D", "a size"},
    {"Dv", "a size"},
    {"inf", "a constant"},
    {"nan", "a constant"},
    {"true", "a constant"},
    {"false", "a constant"},
    {"mask", "a keyword"},
    {"int", "a keyword"},
    {"float", "a keyword"},
    {"bool", "a keyword"},
    {"if", "a keyword"},
    {"else", "a keyword"},
    {"for", "a keyword"},
    {"while", "a keyword"},
    {"do", "a keyword"},
    {"return", "a keyword"},
};

const char *parser_reserved(const char *name)
{
    for (size_t i = 0; i < sizeof reserved / sizeof reserved[0]; i++)
        if (strcmp(reserved[i].name, name) == 0)
            return reserved[i].what;
    return types_is_builtin(name) ? "a built-in function" : NULL;
}

/* ---- tokens ---- */

saccade_status parse_advance(parser *p)
{
    saccade_error *err = p->err;
    p->previous_line = p->tok.place.line;
    p->end = p->lex.at;
    return lexer_next(&p->lex, &p->tok, err);
}

bool parse_is(const token *t, const char *text)
{
    return t->kind == TOK_PUNCT && strcmp(t->text, text) == 0;
}

bool parse_is_word(const token *t, const char *word)
{
    return t->kind == TOK_NAME && strcmp(t->name, word) == 0;
}

/* did a // comment cut off the line that the last token stands on? */
bool parse_after_comment(const parser *p)
{
    return p->tok.after_comment && p->lex.comment_line == p->previous_line;
}

/* What a reader of Python or C may have meant by this token, as " (...)" or "". */
static const char *hint_for(const parser *p)
{
    static const struct {
        const char *got, *hint;
    } words[] = {
        {"and", " (write &&)"},
        {"or", " (write ||)"},
        {"not", " (write !x)"},
        {"if", " (write condition ? x : y)"},
        {"else", " (write condition ? x : y)"},
        {"return", " (the last expression is the result)"},
        {"for", " (write sum(i, n, x))"},
        {"while", " (write sum(i, n, x))"},
        {"int", " (locals have no types: x = ...;)"},
        {"float", " (locals have no types: x = ...;)"},
        {"bool", " (locals have no types: x = ...;)"},
    };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (parse_is_word(&p->tok, words[i].got))
            return words[i].hint;
    if (parse_is(&p->tok, "="))
        return " (== compares)";
    if (parse_is(&p->tok, ","))
        return " (there is no comma operator)";
    if (parse_after_comment(p))
        return " (// starts a comment; floordiv(x, y) divides)";
    return "";
}

/* "got X, expected Y" at the next token. */
saccade_status parse_unexpected(const parser *p, const char *expected)
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

saccade_status parse_take(parser *p, const char *text)
{
    char expected[8];
    if (parse_is(&p->tok, text))
        return parse_advance(p);
    snprintf(expected, sizeof expected, "'%s'", text);
    return parse_unexpected(p, expected);
}

saccade_status parse_no_memory(saccade_error *err)
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
        return parse_no_memory(p->err);
    *node = (ast_node){.kind = (uint8_t)kind,
                       .place = place,
                       .name = name,
                       .n_args = (uint16_t)n_args,
                       .args = args};
    *out = node;
    return SACCADE_OK;
}

saccade_status parse_enter(parser *p)
{
    if (++p->depth > MOD_MAX_DEPTH)
        return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                           "got nesting deeper than %d", MOD_MAX_DEPTH);
    return SACCADE_OK;
}

/* expr ("," expr)* up to `close`, which is taken; adds to args[*n]. */
static saccade_status parse_list(parser *p, const char *close, const ast_node **args,
                                 uint32_t *n, uint32_t most)
{
    while (!parse_is(&p->tok, close)) {
        if (*n == most)
            return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                               "got more than %u, the most before '%s'", most, close);
        TRY(parse_expression(p, &args[(*n)++]));
        if (parse_is(&p->tok, close))
            break;
        if (!parse_is(&p->tok, ","))
            return parse_unexpected(p, close[0] == ')' ? "',' or ')'" : "',' or ']'");
        TRY(parse_advance(p));
    }
    return parse_advance(p);
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
    while (parse_is(&p->tok, "[")) {
        TRY(parse_advance(p));
        if (parse_is(&p->tok, "]"))
            return parse_unexpected(p, "an index");
        TRY(parse_list(p, "]", args, &n, SACCADE_MAX_RANK));
    }
    return with_args(p, AST_INDEX, name, args, n, out);
}

static saccade_status parse_name(parser *p, const ast_node **out)
{
    const token name = p->tok;
    const ast_node *args[AST_MAX_ARGS];
    uint32_t n = 0;
    TRY(parse_advance(p));
    if (parse_is(&p->tok, "[")) {
        return parse_index(p, &name, out);
    } else if (parse_is(&p->tok, "(")) {
        TRY(parse_advance(p));
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
    return parse_advance(p);
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
    return parse_advance(p);
}

static bool is_constant(const token *t)
{
    return parse_is_word(t, "true") || parse_is_word(t, "false") || parse_is_word(t, "inf")
           || parse_is_word(t, "nan");
}

static saccade_status parse_primary(parser *p, const ast_node **out)
{
    if (p->tok.kind == TOK_INT || p->tok.kind == TOK_FLOAT)
        return parse_number(p, p->tok.place, false, out);
    if (is_constant(&p->tok))
        return parse_constant(p, p->tok.place, false, out);
    if (p->tok.kind == TOK_NAME && hint_for(p)[0] != '\0' && !parse_is_word(&p->tok, "int")
        && !parse_is_word(&p->tok, "float"))
        return parse_unexpected(p, "an expression");
    if (p->tok.kind == TOK_NAME)
        return parse_name(p, out);
    if (!parse_is(&p->tok, "("))
        return parse_unexpected(p, "an expression");
    TRY(parse_advance(p));
    TRY(parse_expression(p, out));
    ((ast_node *)*out)->parenthesised = true;
    return parse_take(p, ")");
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
    TRY(parse_enter(p));
    TRY(parse_advance(p));
    if (form[0] == '-' && (p->tok.kind == TOK_INT || p->tok.kind == TOK_FLOAT)) {
        TRY(parse_number(p, op.place, true, out));
    } else if (form[0] == '-' && parse_is_word(&p->tok, "inf")) {
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
    {"||", 1}, {"&&", 2}, {"|", 3},  {"^", 4},  {"&", 5},  {"==", 6},
    {"!=", 6}, {"<", 7},  {"<=", 7}, {">", 7},  {">=", 7}, {"<<", 8},
    {">>", 8}, {"+", 9},  {"-", 9},  {"*", 10}, {"/", 10}, {"%", 10},
};

static int find_binary(const token *t)
{
    for (int i = 0; i < (int)(sizeof binaries / sizeof binaries[0]); i++)
        if (parse_is(t, binaries[i].text))
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
        TRY(parse_advance(p));
        node->args[0] = *out;
        node->spine = 1 + ((*out)->kind == AST_BINARY ? (*out)->spine : 0);
        TRY(parse_binary(p, binaries[op].precedence + 1, &node->args[1]));
        *out = node;
    }
    return SACCADE_OK;
}

saccade_status parse_expression(parser *p, const ast_node **out)
{
    ast_node *node = NULL;
    TRY(parse_enter(p));
    TRY(parse_binary(p, 1, out));
    if (parse_is(&p->tok, "?")) {
        TRY(new_node(p, AST_COND, p->tok.place, "?:", 3, &node));
        TRY(parse_advance(p));
        node->args[0] = *out;
        TRY(parse_expression(p, &node->args[1]));
        TRY(parse_take(p, ":"));
        TRY(parse_expression(p, &node->args[2]));
        *out = node;
    }
    p->depth--;
    return SACCADE_OK;
}
