/* jit_regs.h: where values are while a tile's code is written. Shared by jit_regs.c, which
 * gives out registers, jit_select.c, which writes the instructions of one operation, and
 * jit_loop.c, which writes the loops around them. Only compiled with HAVE_ZYDIS.
 *
 *   rbx call   rbp frame   r12 row of s   r13 column bytes   r14 row cell   r15 rows left
 *   r10 uniforms   r11 columns   r9 diagonals of the row   rax rcx rdx rsi rdi r8 scratch
 *   in a stream (flow_merge.c): no loops, so that places are displacements; of the general
 *   registers only rbx r10 r11 r12 r14 and rax are the vectors', flow_matrix.c has the others
 *   wide: zmm0-29, k1-k6 (k1-k5 where weights are words) given out, zmm30-31, k7 scratch;
 *   else ymm0-12, ymm13-15 scratch */
#ifndef SACCADE_CPU_JIT_JIT_REGS_H
#define SACCADE_CPU_JIT_JIT_REGS_H

#include "cpu/jit/jit_asm.h"
#include "cpu/jit/jit_graph.h"

#define Z(name) ZYDIS_MNEMONIC_##name

enum { LANES = 2, MAX_VALUES = JIT_MAX_NODES * LANES, MAX_REGISTERS = 30, MAX_MASKS = 7 };
enum { MAX_PINNED = 18, SLOT_BYTES = 64, CALL_SLOTS = 4 };
enum { NOWHERE = -1 };

typedef struct jit_emitter {
    const jit_graph *g;
    jit_asm a;
    int n_registers, scratch, vector_bytes;
    /* Nodes whose values last to the end of the body, where jit_loop.c or flow_vector.c takes
     * them, each in an order of its own. */
    uint32_t results[JIT_MAX_RESULTS + 1];
    int n_results;
    int has_max;     /* max_reg are in use */
    int n_order, at; /* at: which of order is being computed */
    int in_reg[MAX_REGISTERS + 2], in_k[MAX_MASKS + 1]; /* value of a register, or NOWHERE */
    uint8_t is_pinned[MAX_REGISTERS + 2], locked[MAX_REGISTERS + 2], k_locked[MAX_MASKS + 1];
    int past_mask;           /* k registers from 1 to before this are given out */
    int max_reg[LANES], low; /* pinned: running maxima, and -inf */
    int n_slots;
    /* where the pair of vectors at hand lies */
    ZydisRegister s_base;       /* r12, or another in a stream */
    ZydisRegister column_index; /* r13, or none */
    ZydisRegister frame_base;   /* rbp, or r10 with the frame behind the lower levels */
    int64_t frame_at;           /* all in bytes, added to what the registers hold */
    int64_t s_at, lane_bytes;   /* scores of lane 0; from lane to lane */
    int64_t row_at, column_at;
    int is_stream;              /* calls are not possible */
    int has_diagonals;          /* they are read, by r9, which streams have not */
    int table[JIT_TABLE_TERMS]; /* registers of jit_tanh_terms, in a stream */
    /* last, since only what the graph has is ever touched */
    uint32_t order[MAX_VALUES]; /* tile values in the order they are computed */
    int reg[MAX_VALUES], k[MAX_VALUES], slot[MAX_VALUES]; /* where a value is, or NOWHERE */
    int last_use[MAX_VALUES];                             /* in order, or NOWHERE */
} jit_emitter;

/* ---- operands ---- */

static inline jit_operand vec(const jit_emitter *t, int r)
{
    return jit_reg((t->a.is_wide ? ZYDIS_REGISTER_ZMM0 : ZYDIS_REGISTER_YMM0) + r);
}

static inline jit_operand mask_reg(int k)
{
    return jit_reg(ZYDIS_REGISTER_K0 + k);
}

static inline jit_operand field(size_t offset)
{
    return jit_mem(ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_NONE, 0, (int64_t)offset, 8);
}
#define FIELD(name) field(offsetof(jit_call, name))

static inline jit_operand frame_slot(const jit_emitter *t, int slot)
{
    return jit_mem(t->frame_base, ZYDIS_REGISTER_NONE, 0,
                   t->frame_at + (int64_t)slot * SLOT_BYTES, t->vector_bytes);
}

/* Incoming scores of a lane. */
static inline jit_operand scores_of(const jit_emitter *t, int lane)
{
    return jit_mem(t->s_base, t->column_index, 1, t->s_at + lane * t->lane_bytes,
                   t->vector_bytes);
}

static inline jit_operand gpr(ZydisRegister r)
{
    return jit_reg(r);
}

static inline const jit_node *node_of(const jit_emitter *t, uint32_t value)
{
    return &t->g->nodes[value / LANES];
}

/* Whether code computes it; all other values are read, of lower levels and of diagonals. */
static inline int is_computed(const jit_emitter *t, const jit_node *n)
{
    return n->level == JIT_TILE && !(t->has_diagonals && n->is_diagonal);
}

static inline int is_mask(const jit_emitter *t, uint32_t value)
{
    return t->a.is_wide && node_of(t, value)->type == MOD_BOOL;
}

/* Values of lower levels are the same for both lanes, but for columns. */
static inline uint32_t value_of(const jit_emitter *t, uint32_t node, int lane)
{
    return node * LANES + (t->g->nodes[node].level >= JIT_COL ? (uint32_t)lane : 0);
}

/* ---- jit_regs.c ---- */

/* Position of the value's next use at `from` or later; INT32_MAX: none. Results are used at
 * n_order. */
int jit_next_use_from(const jit_emitter *t, uint32_t value, int from);
/* Once the order stands. */
void jit_find_last_uses(jit_emitter *t);
/* A register, mask register for a value (NOWHERE: for a while); locked until jit_unlock_all. */
int jit_take_reg(jit_emitter *t, int value);
int jit_take_mask(jit_emitter *t, int value);
/* Register, mask register that holds a node's value, brought in where needed; locked. */
int jit_get(jit_emitter *t, uint32_t node, int lane);
int jit_get_mask(jit_emitter *t, uint32_t node, int lane);
/* The register's value gives way to another one. */
void jit_rename(jit_emitter *t, int r, uint32_t value);
/* Ends an operation: values without a further use give their registers back. */
void jit_unlock_all(jit_emitter *t);
/* Writes all values with a further use to the frame (before a call). */
void jit_clear_registers(jit_emitter *t);
/* Forgets where values are, pinned ones aside (at the loop's end). */
void jit_forget_all(jit_emitter *t);
/* Reads pinned values of these levels into their registers. */
void jit_load_pinned(jit_emitter *t, int from_level, int to_level);

/* ---- jit_loop.c, shared with flow_merge.c ---- */

/* An empty state for code by `to`; graph may be NULL. */
void jit_start(jit_emitter *t, const jit_graph *g, int32_t level, jit_asm to);
/* One more node of t->results. */
void jit_add_result(jit_emitter *t, uint32_t node);
/* wanted [n_nodes], 0: becomes 1 for what the results need; tile values get their order. */
void jit_choose_order(jit_emitter *t, uint8_t *wanted);
/* The values up to `level` with the most uses get registers for the whole code. */
void jit_choose_pinned(jit_emitter *t, const uint8_t *wanted, jit_level level, int most);
/* Instructions of all tile values, in order. */
void jit_emit_values(jit_emitter *t);

/* ---- jit_select.c ---- */

/* Instructions that compute one value. */
void jit_emit_value(jit_emitter *t, uint32_t value);
void jit_all_ones(jit_emitter *t, int r);
/* d = condition ? x : y, registers. */
void jit_blend(jit_emitter *t, int d, int condition, int x, int y);
/* Bases of the arrays, and -inf, into their registers. */
void jit_load_bases(jit_emitter *t);

/* ---- jit_reads.c ---- */

/* 0: the node is no read, or one by a call. */
int jit_emit_read(jit_emitter *t, const jit_node *n, uint32_t value, int lane);

#endif
