/* parse.h: what the two halves of the parser share. expression.c reads expressions, parser.c
 * definitions and bodies around them. */
#ifndef SACCADE_MOD_PARSE_H
#define SACCADE_MOD_PARSE_H

#include "mod/ast.h"

typedef struct parser {
    lexer lex;
    token tok; /* the next one, not yet taken */
    const ast_source *source;
    arena *arena;
    uint32_t depth, inside, n_nodes; /* inside: definitions being parsed */
    struct parse_open *open, *spare; /* the expression's open operators and brackets */
    uint32_t previous_line;          /* of the last token taken */
    ast_place end;                   /* of the last token taken */
    saccade_error *err;
} parser;

/* ---- expression.c ---- */

saccade_status parse_advance(parser *p);
bool parse_is(const token *t, const char *text);
bool parse_is_word(const token *t, const char *word);
/* did a // comment cut off the line that the last token stands on? */
bool parse_after_comment(const parser *p);
/* "got X, expected Y" at the next token. */
saccade_status parse_unexpected(const parser *p, const char *expected);
saccade_status parse_take(parser *p, const char *text);
saccade_status parse_no_memory(saccade_error *err);
/* one level deeper; the caller takes it back. */
saccade_status parse_enter(parser *p);
saccade_status parse_expression(parser *p, const ast_node **out);

#endif
