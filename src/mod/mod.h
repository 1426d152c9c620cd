/* mod.h: the language inside the library. A generic mod is parsed text (an opaque tree:
 * captures have no dtype yet); binding it gives a mod_fn, straight-line typed nodes in
 * evaluation order, which is all that the later parts ever see. Both are immutable. */
#ifndef SACCADE_MOD_H
#define SACCADE_MOD_H

#include "saccade.h"

#include "base/arena.h"
#include "base/strings.h"

typedef enum mod_type { MOD_BOOL, MOD_INT, MOD_FLOAT } mod_type;

/* One value per line of ops.def, after the leaves. */
typedef enum mod_op {
    OP_BOOL,   /* constant: imm.i 0 or 1 */
    OP_INT,    /* constant: imm.i */
    OP_FLOAT,  /* constant: imm.f (NaN and infinities too) */
    OP_VAR,    /* imm.i = mod_var: b h q kv (int) */
    OP_SCORE,  /* the incoming score, float */
    OP_SIZE,   /* imm.i = mod_size: B H Hkv Q KV D Dv (int) */
    OP_SCALAR, /* imm.i = capture index, rank 0 */
    OP_LOAD,   /* imm.i = capture index; n_args = rank >= 1, int indices */
#define OP(name, ...) OP_##name,
#include "mod/ops.def"
#undef OP
    MOD_OP_COUNT
} mod_op;

typedef enum mod_var { VAR_B, VAR_H, VAR_Q, VAR_KV } mod_var;
typedef enum mod_size {
    SIZE_B,
    SIZE_H,
    SIZE_HKV,
    SIZE_Q,
    SIZE_KV,
    SIZE_D,
    SIZE_DV,
    MOD_SIZE_COUNT
} mod_size;

/* What a node's value depends on; sizes and scalars are constant during a run. */
enum { DEP_B = 1, DEP_H = 2, DEP_Q = 4, DEP_KV = 8, DEP_SCORE = 16 };

typedef struct mod_node {
    uint8_t op;     /* mod_op */
    uint8_t type;   /* mod_type of the value */
    uint8_t n_args; /* operands: 0..3, or the rank of a load */
    uint8_t deps;   /* DEP_ bits */
    uint32_t args;  /* first operand in mod_fn.args */
    union {
        int32_t i;
        float f;
    } imm;
    uint16_t line, column; /* place in the text, for reports; 0 when made by a pass */
} mod_node;

typedef struct mod_capture {
    const char *name;
    saccade_dtype dtype;
    uint8_t type; /* mod_type of a loaded value: bool, int or float */
    uint8_t rank;
} mod_capture;

/* Nodes are in topological order, hash-consed (no two equal), without dead ones; the last node
 * is the result. */
typedef struct mod_fn {
    saccade_kind kind;
    const mod_node *nodes;
    const uint32_t *args; /* operand pool: node indices */
    const mod_capture *captures;
    uint32_t n_nodes, n_args, n_captures;
    uint32_t result;
} mod_fn;

/* Whether a capture's elements are read: a text may only name it. */
static inline int mod_loads(const mod_fn *fn, uint32_t capture)
{
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (fn->nodes[i].op == OP_LOAD && fn->nodes[i].imm.i == (int32_t)capture)
            return 1;
    return 0;
}

/* The facts of one line of ops.def. */
typedef struct mod_op_info {
    const char *name;      /* "iadd" */
    const char *signature; /* "I:II": result and operands, B I F */
    const char *form;      /* how it prints: "+", or "min(" for calls; see ops.def */
} mod_op_info;
extern const mod_op_info mod_op_infos[MOD_OP_COUNT];

enum {
    MOD_MAX_TEXT = 1 << 22,  /* bytes of text: the longest that a typed mod prints as */
    MOD_MAX_STEPS = 1 << 18, /* expressions visited, each call of a definition anew */
    MOD_MAX_DEPTH = 200,     /* nesting of expressions */
    MOD_MAX_NODES = 1 << 14, /* typed nodes after inlining and sum() */
    MOD_MAX_CAPTURES = 64,
    MOD_MAX_SUM = 4096 /* terms of one sum() */
};

/* ---- builder.c: typed nodes, one at a time, folded into a mod_fn ---- */

typedef struct mod_builder mod_builder; /* lives in the arena it was made in */

/* NULL when out of memory; afterwards failures are sticky and reported by mod_finish. */
mod_builder *mod_builder_create(arena *arena, saccade_kind kind, const mod_capture *captures,
                                uint32_t n_captures);
/* The function will be evaluated in double, so do not fold a constant whose value is not exact
 * in f32. */
void mod_builder_be_wide(mod_builder *b);
bool mod_builder_is_wide(const mod_builder *b);
/* Index of an equal or new node. line, column may be 0. */
uint32_t mod_emit(mod_builder *b, mod_op op, const uint32_t *args, uint32_t n_args, int32_t imm,
                  uint16_t line, uint16_t column);
uint32_t mod_emit_float(mod_builder *b, float value);
uint32_t mod_emit_int(mod_builder *b, int32_t value);
uint32_t mod_emit_bool(mod_builder *b, int value);
uint32_t mod_emit1(mod_builder *b, mod_op op, uint32_t x);
uint32_t mod_emit2(mod_builder *b, mod_op op, uint32_t x, uint32_t y);
uint32_t mod_emit3(mod_builder *b, mod_op op, uint32_t x, uint32_t y, uint32_t z);
const mod_node *mod_peek(const mod_builder *b, uint32_t node);
uint32_t mod_peek_arg(const mod_builder *b, uint32_t node, uint32_t k);
/* The first failure so far, without its message. */
saccade_status mod_builder_status(const mod_builder *b);
/* Drops dead nodes, verifies, and gives a mod_fn in the builder's arena. */
saccade_status mod_finish(mod_builder *b, uint32_t result, const mod_fn **out,
                          saccade_error *err);
/* mod_finish for several results (not verified, of any types): roots[i] is changed to its place
 * in *out, and the last one is out->result. */
saccade_status mod_finish_roots(mod_builder *b, uint32_t *roots, uint32_t n, const mod_fn **out,
                                saccade_error *err);
/* Emits all of fn's nodes, its capture i being the builder's first_capture + i; its result. */
uint32_t mod_emit_function(mod_builder *b, const mod_fn *fn, uint32_t first_capture);
/* Deep copy into an arena, names included. */
saccade_status mod_copy_function(const mod_fn *fn, arena *arena, const mod_fn **out,
                                 saccade_error *err);

/* ---- lines.c ---- */

/* How an int changes with each position (bit and index by mod_var) while the others stand
 * still: by coef a step, if known; wraps. What depends on the score has no line. */
typedef struct mod_line {
    uint8_t known;
    int32_t coef[4];
} mod_line;
enum { MOD_MOST_COEF = 1 << 16 };

/* By node of fn; NULL: out of memory. */
const mod_line *mod_find_lines(const mod_fn *fn, arena *arena);

/* ---- verify.c ---- */

/* EINTERNAL when operand types, order, deps, capture indices or the result type do not fit. */
saccade_status mod_verify(const mod_fn *fn, saccade_error *err);

/* ---- print.c ---- */

/* Text of a typed mod, one local a line, that parses and binds back to the same nodes. */
saccade_status mod_print_fn(const mod_fn *fn, strbuf *out, saccade_error *err);
/* "n7 float score = fadd n3 n5" a line, for explain and dumps. */
saccade_status mod_print_nodes(const mod_fn *fn, strbuf *out, saccade_error *err);

/* ---- mod.c: the public object ---- */

/* Typed nodes of a bound mod; NULL while generic. Borrowed from the mod. */
const mod_fn *mod_function(const saccade_mod *mod);
/* Adds the excerpt to an error that names a line and column of this mod's text (a node's). */
void mod_show_place(const saccade_mod *mod, saccade_error *err);
/* A mod that owns a copy of typed nodes (for passes and for and/or/not of masks). */
saccade_status mod_from_function(const mod_fn *fn, saccade_mod **out, saccade_error *err);

/* ---- join.c ---- */

/* Both typed masks in one, joined by op (OP_and, OP_or); captures with equal names are kept
 * apart by renaming the second's ("doc" -> "doc_2"). second_names[i] gives the new name of
 * b's capture i and lives in the result. */
saccade_status mod_join(const saccade_mod *a, const saccade_mod *b, mod_op op,
                        const char *const **second_names, saccade_mod **out,
                        saccade_error *err);
saccade_status mod_negate(const saccade_mod *a, saccade_mod **out, saccade_error *err);

#endif
