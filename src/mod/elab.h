/* elab.h: what the parts of elaboration share. elaborate.c knows bodies and operators,
 * elab_walk.c walks expressions, calls.c inlines calls and built-ins, scope.c knows what a name
 * means. */
#ifndef SACCADE_MOD_ELAB_H
#define SACCADE_MOD_ELAB_H

#include "mod/ast.h"

enum {
    ELAB_MAX_DEPTH = 5 * MOD_MAX_DEPTH, /* operators inside operators, over all calls */
    ELAB_MAX_CALLS = 64                 /* bodies inside bodies: some 0.6 KB of stack each */
};

typedef struct value {
    unsigned types; /* type_set; one bit when bound */
    uint32_t node;  /* when bound */
    bool is_const;  /* an int known here: what sum() may count to */
    int32_t constant;
} value;

typedef struct local {
    const char *name;
    const char *tensor; /* tensor parameter: the capture it stands for; NULL: a value */
    ast_place place;    /* of the argument */
    const ast_source *source;
    value value;
    struct local *next;
} local;

/* Definitions that a call may mean, innermost first. The last, without a parent, is the
 * prelude: its body is empty, prelude_find has what is in it. */
typedef struct scope {
    const ast_body *body;
    const ast_source *source;
    const struct scope *parent;
} scope;

enum { FRAME_SCORE = 4, FRAME_VARS = 5 }; /* b h q kv as in mod_var, then score */

/* A body being elaborated: a source's, or one call's. */
typedef struct frame {
    struct frame *parent;
    const ast_def *def; /* NULL: the text itself */
    saccade_kind kind;
    value vars[FRAME_VARS];
    const scope *scope;
    const ast_source *source;
    local **buckets;
    uint32_t n_buckets; /* power of two */
} frame;

/* An expression whose operands are being walked. */
typedef struct elab_task {
    const ast_node *node;
    const ast_def *def; /* of a call; NULL: a built-in */
    frame callee;       /* the definition's; its scope is `inner` */
    scope inner;
    uint32_t next, n;       /* the operand to walk next, of how many */
    const ast_node **spine; /* binaries down the left edge, innermost first */
    value values[AST_MAX_ARGS];
    struct elab_task *below;
} elab_task;

typedef struct elab {
    mod_builder *builder; /* NULL: types only */
    elab_captures *captures;
    arena *scratch;
    saccade_error *err;
    frame *frame;
    uint32_t depth, calls;
    elab_task *tasks, *spare; /* elab_walk.c: expressions begun; records to use again */
    uint32_t *steps;          /* expressions visited so far, */
    uint32_t *check_steps;    /* and those of definitions looked at for their own sake */
    bool is_check;            /* such a definition: its parameters are unknown */
    ast_place call_place;     /* the user's call of a prelude definition now being inlined */
    const ast_source *call_source;
} elab;

/* ---- scope.c ---- */

/* fails at a place of the frame's text, or at the user's call of the prelude's text. */
saccade_status elab_fail(const elab *e, ast_place place, saccade_status code, const char *fmt,
                         ...) BASE_PRINTF(4, 5);
saccade_status elab_no_memory(const elab *e);
/* the place that reports of nodes made now should name. */
ast_place elab_place(const elab *e, ast_place place);
bool frame_init(elab *e, frame *f, uint32_t n_names);
local *frame_find(const frame *f, const char *name);
/* declares or replaces a value. */
saccade_status frame_set(elab *e, frame *f, const char *name, local what);
void frame_drop(frame *f, const char *name);
/* index of b h q kv score, or -1; of B H Hkv Q KV D Dv, or -1. */
int scope_var(const char *name);
int scope_size(const char *name);
/* the definition a call means, and its scope; NULL when there is none. ENOMEM only. */
saccade_status scope_find(elab *e, const char *name, const ast_def **def, const scope **where);
/* fails with "did you mean". */
saccade_status scope_unknown(const elab *e, const ast_node *call);
/* the capture of this name, made when generic; checks that its rank is always the same. */
saccade_status scope_capture(elab *e, const char *name, uint32_t rank, ast_place place,
                             const ast_source *source, uint32_t *index);

/* ---- elab_walk.c ---- */

saccade_status elab_expr(elab *e, const ast_node *node, value *out);
/* one body or term of sum() inside the present one; the caller takes it back from e->calls. */
saccade_status elab_enter(elab *e, ast_place place);

/* ---- elaborate.c ---- */

/* The value of a leaf node, and of an operator applied to its operands' values. */
saccade_status elab_constant(elab *e, const ast_node *node, value *out);
saccade_status elab_name(elab *e, const ast_node *node, value *out);
saccade_status elab_operator(elab *e, const ast_node *node, const value *args, value *out);
saccade_status elab_binary(elab *e, const ast_node *node, value left, value right, value *out);
/* may the name be indexed? then, of its int indices: */
saccade_status elab_index_begin(elab *e, const ast_node *node);
saccade_status elab_index(elab *e, const ast_node *node, const value *indices, value *out);
/* chooses the operation of this form for the values and emits it. operands: for messages. */
saccade_status elab_apply(elab *e, const char *form, const ast_node *at,
                          const ast_node *const *operands, const value *args, uint32_t n,
                          value *out);
/* makes v of the type (T_BOOL, T_INT or T_FLOAT), or fails saying what it is needed for. */
saccade_status elab_coerce(elab *e, ast_place place, type_set type, const char *what, value *v);
/* statements and result of a body in the frame, which becomes the current one. */
saccade_status elab_body(elab *e, frame *f, const ast_body *body, value *out);
value elab_int(elab *e, int32_t constant);

/* ---- calls.c ---- */

/* Finds what a name before "(" means, a definition or a built-in, and whether it has the right
 * number of arguments; sets how many of these are to be walked first. */
saccade_status elab_call_begin(elab *e, elab_task *t);
/* is the next argument the name of a tensor, not a value to be walked? */
bool elab_is_tensor(const elab_task *t);
/* of the arguments' values: */
saccade_status elab_builtin(elab *e, const ast_node *node, const value *args, value *out);
saccade_status elab_inline(elab *e, elab_task *t, value *out);
/* elaborates each definition of the body for its own sake, called or not. */
saccade_status elab_check_defs(elab *e, const scope *where);

#endif
