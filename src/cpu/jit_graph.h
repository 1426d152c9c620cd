/* jit_graph.h: a score and a mask as one graph sorted by levels, between jit_graph.c, which
 * builds and runs the lower levels, and jit_tile.c, which emits code for the tile level. */
#ifndef SACCADE_CPU_JIT_GRAPH_H
#define SACCADE_CPU_JIT_GRAPH_H

#include "cpu/jit.h"
#include "eval/strip.h"

typedef enum jit_level { JIT_UNIFORM, JIT_ROW, JIT_COL, JIT_TILE } jit_level;

/* Operations beside mod_op's. */
typedef enum jit_op {
    JIT_SCALE = MOD_OP_COUNT, /* the run's scale */
    JIT_LAST,                 /* imm = tensor * 8 + dim: size - 1 */
    JIT_STRIDE,               /* imm = tensor * 8 + dim */
    JIT_READ,                 /* element of tensor imm at offset x */
    JIT_INPUT,                /* the incoming score times x */
    JIT_DIV,                  /* x / y for y that is never 0 */
    JIT_FMA,                  /* x * y + z, one rounding */
    JIT_NEAREST,              /* x rounded to the nearest whole number */
    JIT_SCALEF,               /* x * 2^y for whole y */
    JIT_OP_COUNT
} jit_op;

typedef struct jit_node {
    uint16_t op;   /* mod_op or jit_op */
    uint8_t type;  /* mod_type */
    uint8_t level; /* jit_level */
    uint8_t n_args;
    uint8_t scored; /* depends on the score: fast forms are allowed */
    uint16_t slot;  /* among the nodes of its level: which array */
    uint32_t args[3];
    int32_t imm; /* constant's bits, variable, size, tensor */
} jit_node;

enum { JIT_MAX_TENSORS = 2 * MOD_MAX_CAPTURES };

typedef struct jit_graph {
    jit_node *nodes;
    uint32_t n_nodes, capacity;
    uint32_t score, mask; /* results; mask is UINT32_MAX without one */
    uint32_t n_score_tensors, n_tensors;
    uint8_t dtype[JIT_MAX_TENSORS];
    uint16_t n_slots[3]; /* of the lower levels */
} jit_graph;

/* What the emitted code reads, in the order of its displacements. */
typedef struct jit_call {
    float *s;
    int64_t ld_bytes;
    const int32_t *uniform; /* [slot] */
    const int32_t *rows;    /* [slot][JIT_ROWS], from the first row */
    const int32_t *cols;    /* [slot][JIT_COLS], from the first column */
    int64_t n_rows;
    int64_t col_bytes; /* 4 * columns, whole groups */
    float *row_max;
    void *frame; /* 64-aligned spill room */
    const void *tensors[JIT_MAX_TENSORS];
} jit_call;

/* nodes are taken from the arena. */
saccade_status jit_build_graph(const mod_fn *score, const mod_fn *mask, arena *a,
                               jit_graph *out, saccade_error *err);

/* jit.c, for code that is not a loop over a tile: the graph, where a state's frame lies behind
 * its uniform values, room for it, and pointers for rows from row0, keys from col0 on. */
const jit_graph *jit_graph_of(const jit_program *program);
int64_t jit_frame_at(const jit_program *program);
void jit_reserve(jit_program *program, int32_t spills);
void jit_place(const jit_state *state, int32_t row0, int32_t col0, jit_call *call);

/* Elements of 4 bytes, or the low half of 8, are gathered in line; others by a call. */
int jit_reads_inline(saccade_dtype dtype);

typedef void jit_code_fn(const jit_call *call);

typedef struct jit_code {
    jit_code_fn *run;
    const uint8_t *bytes;
    size_t size;
    int32_t spills; /* frame slots of 64 bytes */
} jit_code;

/* jit_tile.c: machine code for the tile level; masked: mask and score, else score alone. The
 * bytes go to `bytes` (room of `capacity`); *size says how many. */
saccade_status jit_emit_tile(const jit_graph *graph, int masked, int32_t level, uint8_t *bytes,
                             size_t capacity, size_t *size, int32_t *spills,
                             saccade_error *err);

#endif
