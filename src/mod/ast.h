/* ast.h: parsed text, private to mod/. A source is one text (a user's, or the prelude) with its
 * tree; trees are immutable after parsing and shared by everything elaborated from them. */
#ifndef SACCADE_MOD_AST_H
#define SACCADE_MOD_AST_H

#include "mod/mod.h"

#include "base/status.h"

#include <stdbool.h>

enum {
    AST_MAX_NAME = 63,       /* bytes of a name */
    AST_MAX_NODES = 1 << 18, /* expressions of one text */
    AST_MAX_DEFS = 256,      /* of one body */
    AST_MAX_INSIDE = 32,     /* definitions inside definitions */
    AST_MAX_PARAMS = 32,
    AST_MAX_ARGS = 32
};

/* A place in a text: byte offset from 0, line and column (in bytes) from 1. */
typedef struct ast_place {
    uint32_t offset, line, column;
} ast_place;

typedef enum token_kind {
    TOK_END,
    TOK_NAME,
    TOK_INT,
    TOK_FLOAT,
    TOK_PUNCT /* text says which */
} token_kind;

typedef struct token {
    token_kind kind;
    ast_place place;
    uint32_t bytes;
    char text[4];       /* TOK_PUNCT: spelling */
    const char *name;   /* TOK_NAME: in the arena */
    uint32_t int_value; /* TOK_INT: 0 to 2^31, or any 32 bits when hexadecimal */
    bool is_hex;
    float float_value;
    bool after_comment; /* a // comment stands before it on the line that ended before it */
} token;

typedef enum ast_kind {
    AST_INT,
    AST_FLOAT,
    AST_BOOL,
    AST_NAME,
    AST_INDEX, /* name[args] */
    AST_CALL,  /* name(args): built-in, conversion, sum or definition */
    AST_UNARY, /* form "-u" "!u" "~u" "+u" */
    AST_BINARY,
    AST_COND
} ast_kind;

typedef struct ast_node {
    uint8_t kind; /* ast_kind */
    bool parenthesised;
    uint16_t n_args;
    uint32_t spine; /* AST_BINARY: binaries down the left edge, this one included */
    ast_place place;
    const char *name; /* AST_NAME, AST_INDEX, AST_CALL; operator's form otherwise */
    const struct ast_node **args;
    union {
        int32_t i;
        float f;
    } value;
} ast_node;

typedef struct ast_statement {
    const char *name;
    ast_place place;
    const ast_node *value;
    const struct ast_statement *next;
} ast_statement;

typedef struct ast_body {
    const struct ast_def *defs;
    const ast_statement *statements;
    uint32_t n_statements;
    const ast_node *result;
    bool comment_follows; /* a // comment, on the line where the result ends */
} ast_body;

typedef struct ast_param {
    const char *name;
    bool is_tensor;
    ast_place place;
} ast_param;

typedef struct ast_def {
    saccade_kind kind;
    const char *name, *signature; /* "softcap(c)" */
    ast_place place;
    const ast_param *params;
    uint32_t n_params;
    ast_body body;
    const char *comment; /* text of the line comment just above, or "" */
    const struct ast_def *next;
} ast_def;

typedef struct ast_source {
    const char *text;
    size_t bytes;
    ast_body body;
    bool is_prelude;
} ast_source;

/* ---- source.c: places and messages ---- */

/* fills *err with the message, line, column and a clipped, printable excerpt with a caret. */
saccade_status source_fail(const ast_source *source, ast_place place, saccade_error *err,
                           saccade_status code, const char *fmt, ...) BASE_PRINTF(5, 6);
/* the excerpt lines alone, around a place. */
void source_excerpt(const ast_source *source, ast_place place, char excerpt[2][96]);
/* of names[n], the one close enough to name to be a slip of the pen, or NULL. */
const char *source_nearest(const char *name, const char *const *names, uint32_t n);

/* ---- lexer.c ---- */

typedef struct lexer {
    const ast_source *source;
    arena *arena;
    ast_place at;
    uint32_t comment_offset, comment_bytes, comment_line; /* the last // comment */
} lexer;

void lexer_init(lexer *lex, const ast_source *source, arena *arena);
saccade_status lexer_next(lexer *lex, token *out, saccade_error *err);
/* f32 text that reads back to the same bits; needs room for 32 bytes. */
void lexer_print_float(float value, char text[32]);

/* ---- scope.c ---- */

/* Names of a text's variables, by mod_var and then `score`, and of sizes, by mod_size. */
extern const char *const ast_vars[5], *const ast_sizes[MOD_SIZE_COUNT];

/* ---- parser.c ---- */

/* fills source->body from source->text; a prelude has definitions and no body. */
saccade_status parser_run(ast_source *source, arena *arena, saccade_error *err);
/* parser_run from a place of the text on. */
saccade_status parser_run_from(ast_source *source, ast_place from, arena *arena,
                               saccade_error *err);

/* ---- expression.c ---- */

/* what may not be declared, assigned or bound: "an index variable", ...; NULL when free. */
const char *parser_reserved(const char *name);
/* C's precedence of a binary operator, 1 (||) to 10 (*); 0 when it is none. */
int parser_precedence(const char *op);

/* ---- typing.c: overloads, from ops.def ---- */

/* sets of types: what a value may be while captures have no type yet. */
typedef enum type_set { T_BOOL = 1, T_INT = 2, T_FLOAT = 4, T_NUMBER = 6, T_ANY = 7 } type_set;

const char *types_name(unsigned set);
/* number of operands of the operations with this form, 0 when there are none. */
uint32_t types_arity(const char *form);
/* is "min" the name of a built-in function? */
bool types_is_builtin(const char *name);
/* the form, such as "floor(", of the built-in whose name is nearly this one, or NULL. */
const char *types_nearest_builtin(const char *name);
typedef struct overload {
    mod_op op;         /* the first operation that fits */
    unsigned result;   /* type_set over all that may */
    uint32_t wrong;    /* no operation fits: the operand to blame, */
    unsigned expected; /* and what it may be */
} overload;

/* chooses by operand types, int becoming float where that is all that fits. */
bool types_resolve(const char *form, const unsigned *types, uint32_t n, overload *out);

/* ---- elaborate.c: a tree made into types (generic) or nodes (bound) ---- */

typedef struct elab_capture {
    const char *name;
    ast_place place; /* first use */
    const ast_source *source;
    uint32_t rank;
    unsigned types; /* T_ANY until bound */
} elab_capture;

typedef struct elab_captures {
    elab_capture list[MOD_MAX_CAPTURES];
    uint32_t n;
    bool is_fixed; /* bound: no new ones */
} elab_captures;

/* Runs the sources one after the other (score: each sees the score before it; mask: and).
 * builder NULL: types only, gathering captures; scratch is used up. */
saccade_status elab_run(saccade_kind kind, const ast_source *const *sources, uint32_t n,
                        elab_captures *captures, mod_builder *builder, arena *scratch,
                        uint32_t *result, saccade_error *err);

/* ---- mod.c ---- */

/* names of the captures from `first` on, as an array that lives in the mod. */
saccade_status mod_second_names(saccade_mod *mod, uint32_t first, const char *const **out,
                                saccade_error *err);

/* ---- prelude.c ---- */

/* what stands for the prelude as the text around all texts; its definitions are found below. */
const ast_source *prelude_source(void);
/* the definition of this name, parsed once for the process, or NULL; ENOMEM only. Adds how many
 * definitions were looked at before. */
saccade_status prelude_find(const char *name, const ast_def **out, uint32_t *looked_at,
                            saccade_error *err);

#endif
