/* Expressions: C's grammar, by operator precedence (Dijkstra's shunting yard, 1961). What is
   open stands in a list of our own, not on the stack, so that a thread with a small one may
   parse; nesting is counted, and so are the nodes, so no text can exhaust memory. */
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

/* What a reader of Python or C may have meant by a word, as " (...)" or "". */
static const char *hint_for_word(const parser *p)
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
    return "";
}

static const char *hint_for(const parser *p)
{
    const char *of_word = hint_for_word(p);
    if (of_word[0] != '\0')
        return of_word;
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

/* ---- what is open ---- */

typedef enum open_kind { UNARY, BINARY, PAREN, CALL, INDEX, THEN, ELSE } open_kind;

/* An operator or a bracket whose last operand is still to come. */
typedef struct parse_open {
    open_kind kind;
    int precedence;   /* BINARY */
    ast_node *node;   /* UNARY, BINARY, THEN, ELSE: the operator's, the operand missing */
    const char *name; /* CALL, INDEX, and with how many arguments so far */
    ast_place place;
    uint32_t n_args;
    const ast_node *args[AST_MAX_ARGS];
    struct parse_open *below;
} parse_open;

static saccade_status open_up(parser *p, open_kind kind, ast_node *node)
{
    parse_open *o = p->spare;
    if (kind != BINARY)
        TRY(parse_enter(p)); /* there are ten precedences, so other things count */
    if (o != NULL)
        p->spare = o->below;
    else if ((o = arena_alloc(p->arena, sizeof *o)) == NULL)
        return parse_no_memory(p->err);
    o->kind = kind;
    o->node = node;
    o->below = p->open;
    p->open = o;
    return SACCADE_OK;
}

static void close_up(parser *p)
{
    parse_open *o = p->open;
    p->depth -= o->kind != BINARY;
    p->open = o->below;
    o->below = p->spare;
    p->spare = o;
}

/* is the innermost open thing of this kind? */
static bool is_in(const parser *p, open_kind kind)
{
    return p->open != NULL && p->open->kind == kind;
}

/* Operators that bind at least so tightly get *node as their last operand. */
static void fold(parser *p, int precedence, const ast_node **node)
{
    while (is_in(p, UNARY) || (is_in(p, BINARY) && p->open->precedence >= precedence)) {
        ast_node *whole = p->open->node;
        whole->args[whole->n_args - 1] = *node;
        *node = whole;
        close_up(p);
    }
}

/* All operators do, ?: too. */
static void fold_all(parser *p, const ast_node **node)
{
    fold(p, 1, node);
    while (is_in(p, ELSE)) {
        p->open->node->args[2] = *node;
        *node = p->open->node;
        close_up(p);
    }
}

/* ---- calls and indices ---- */

/* past the "[", which a "]" may not follow. */
static saccade_status enter_index(parser *p)
{
    TRY(parse_advance(p));
    return parse_is(&p->tok, "]") ? parse_unexpected(p, "an index") : SACCADE_OK;
}

static saccade_status open_list(parser *p, open_kind kind, const token *name)
{
    TRY(kind == INDEX ? enter_index(p) : parse_advance(p));
    TRY(open_up(p, kind, NULL));
    p->open->name = name->name;
    p->open->place = name->place;
    p->open->n_args = 0;
    return SACCADE_OK;
}

/* Past the closing bracket: the whole call or index. */
static saccade_status close_list(parser *p, const ast_node **out)
{
    const parse_open *o = p->open;
    const ast_kind kind = o->kind == CALL ? AST_CALL : AST_INDEX;
    ast_node *node = NULL;
    TRY(new_node(p, kind, o->place, o->name, o->n_args, &node));
    for (uint32_t i = 0; i < o->n_args; i++)
        node->args[i] = o->args[i];
    close_up(p);
    *out = node;
    return SACCADE_OK;
}

/* After an argument: *more when another is to come, otherwise *node is the whole. */
static saccade_status next_argument(parser *p, const ast_node **node, bool *more)
{
    const bool is_call = p->open->kind == CALL;
    const char *close = is_call ? ")" : "]";
    const uint32_t most = is_call ? AST_MAX_ARGS : SACCADE_MAX_RANK;
    p->open->args[p->open->n_args++] = *node;
    *more = false;
    if (parse_is(&p->tok, ",")) {
        TRY(parse_advance(p));
        if (parse_is(&p->tok, close))
            return parse_unexpected(p,
                                    is_call ? "an argument after ','" : "an index after ','");
    } else if (!parse_is(&p->tok, close)) {
        return parse_unexpected(p, is_call ? "',' or ')'" : "',' or ']'");
    } else {
        TRY(parse_advance(p));
        if (is_call || !parse_is(&p->tok, "["))
            return close_list(p, node);
        TRY(enter_index(p)); /* t[i][j] */
    }
    if (p->open->n_args == most)
        return source_fail(p->source, p->tok.place, p->err, SACCADE_ELIMIT,
                           "got more than %u, the most before '%s'", most, close);
    *more = true;
    return SACCADE_OK;
}

/* ---- expressions ---- */

static const char *unary_form(const token *t)
{
    static const char *const forms[] = {"-u", "!u", "~u", "+u"};
    for (int i = 0; i < 4; i++)
        if (t->kind == TOK_PUNCT && t->text[0] == forms[i][0] && t->text[1] == '\0')
            return forms[i];
    return NULL;
}

/* A sign: with the number behind it a constant, else open. */
static saccade_status parse_unary(parser *p, const char *form, const ast_node **out)
{
    const ast_place place = p->tok.place;
    ast_node *node = NULL;
    TRY(parse_enter(p));
    p->depth--;
    TRY(parse_advance(p));
    if (form[0] == '-' && (p->tok.kind == TOK_INT || p->tok.kind == TOK_FLOAT))
        return parse_number(p, place, true, out);
    if (form[0] == '-' && parse_is_word(&p->tok, "inf"))
        return parse_constant(p, place, true, out);
    TRY(new_node(p, AST_UNARY, place, form, 1, &node));
    return open_up(p, UNARY, node);
}

/* A name, f() or x; f(x) and t[i] are opened. */
static saccade_status parse_name(parser *p, const ast_node **out)
{
    const token name = p->tok;
    ast_node *node = NULL;
    if (hint_for_word(p)[0] != '\0' && !parse_is_word(&p->tok, "int")
        && !parse_is_word(&p->tok, "float"))
        return parse_unexpected(p, "an expression");
    TRY(parse_advance(p));
    if (parse_is(&p->tok, "["))
        return open_list(p, INDEX, &name);
    if (parse_is(&p->tok, "(")) {
        TRY(open_list(p, CALL, &name));
        if (!parse_is(&p->tok, ")"))
            return SACCADE_OK;
        TRY(parse_advance(p));
        return close_list(p, out);
    }
    TRY(new_node(p, AST_NAME, name.place, name.name, 0, &node));
    *out = node;
    return SACCADE_OK;
}

/* Opens what stands before the next operand, and gives that. */
static saccade_status parse_operand(parser *p, const ast_node **out)
{
    *out = NULL;
    while (*out == NULL) {
        const char *form = unary_form(&p->tok);
        if (form != NULL) {
            TRY(parse_unary(p, form, out));
        } else if (p->tok.kind == TOK_INT || p->tok.kind == TOK_FLOAT) {
            TRY(parse_number(p, p->tok.place, false, out));
        } else if (is_constant(&p->tok)) {
            TRY(parse_constant(p, p->tok.place, false, out));
        } else if (p->tok.kind == TOK_NAME) {
            TRY(parse_name(p, out));
        } else if (parse_is(&p->tok, "(")) {
            TRY(parse_advance(p));
            TRY(open_up(p, PAREN, NULL));
        } else {
            return parse_unexpected(p, "an expression");
        }
    }
    return SACCADE_OK;
}

/* The left operand is there; the right one is to come. */
static saccade_status open_binary(parser *p, int op, const ast_node *left)
{
    ast_node *node = NULL;
    fold(p, binaries[op].precedence, &left);
    TRY(new_node(p, AST_BINARY, p->tok.place, binaries[op].text, 2, &node));
    node->args[0] = left;
    node->spine = 1 + (left->kind == AST_BINARY ? left->spine : 0);
    TRY(open_up(p, BINARY, node));
    p->open->precedence = binaries[op].precedence;
    return parse_advance(p);
}

static saccade_status open_condition(parser *p, const ast_node *condition)
{
    ast_node *node = NULL;
    fold(p, 1, &condition);
    TRY(new_node(p, AST_COND, p->tok.place, "?:", 3, &node));
    node->args[0] = condition;
    TRY(parse_advance(p));
    return open_up(p, THEN, node);
}

/* After "?": the operand is what comes if true. */
static saccade_status next_branch(parser *p, const ast_node *node)
{
    p->open->node->args[1] = node;
    p->open->kind = ELSE;
    return parse_take(p, ":");
}

static saccade_status close_paren(parser *p, const ast_node *node)
{
    ((ast_node *)node)->parenthesised = true;
    close_up(p);
    return parse_take(p, ")");
}

/* Closes what the operand ends. *more when another operand is to come, otherwise *node is the
   whole expression. */
static saccade_status parse_operators(parser *p, const ast_node **node, bool *more)
{
    for (;;) {
        const int op = find_binary(&p->tok);
        *more = true;
        if (op >= 0)
            return open_binary(p, op, *node);
        if (parse_is(&p->tok, "?"))
            return open_condition(p, *node);
        fold_all(p, node);
        *more = p->open != NULL;
        if (!*more)
            return SACCADE_OK;
        if (is_in(p, THEN))
            return next_branch(p, *node);
        if (is_in(p, PAREN)) {
            TRY(close_paren(p, *node));
            continue;
        }
        TRY(next_argument(p, node, more));
        if (*more)
            return SACCADE_OK;
    }
}

saccade_status parse_expression(parser *p, const ast_node **out)
{
    bool more = true;
    TRY(parse_enter(p));
    while (more) {
        TRY(parse_operand(p, out));
        TRY(parse_operators(p, out, &more));
    }
    p->depth--;
    return SACCADE_OK;
}
