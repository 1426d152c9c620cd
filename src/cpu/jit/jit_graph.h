/* jit_graph.h: a score and a mask as one graph sorted by levels. jit_graph.c builds it, jit.c
 * runs the lower levels over arrays, and jit_loop.c emits code for the tile level. */
#ifndef SACCADE_CPU_JIT_JIT_GRAPH_H
#define SACCADE_CPU_JIT_JIT_GRAPH_H

#include "cpu/jit/jit.h"
#include "eval/strip.h"

typedef enum jit_level { JIT_UNIFORM, JIT_ROW, JIT_COL, JIT_TILE } jit_level;

/* Operations beside mod_op's. */
typedef enum jit_op {
    JIT_SCALE = MOD_OP_COUNT, /* the run's scale */
    JIT_LAST,                 /* imm = tensor * 8 + dim: size - 1 */
    JIT_STRIDE,               /* imm = tensor * 8 + dim */
    JIT_SKIP,                 /* imm = tensor: elements from a word's start to the first */
    JIT_READ,                 /* element of tensor imm at offset x */
    JIT_INPUT,                /* the incoming score times x */
    JIT_DIV,                  /* x / y for y that is never 0 */
    JIT_FMA,                  /* x * y + z, one rounding */
    JIT_NEAREST,              /* x rounded to the nearest whole number */
    JIT_SCALEF,               /* x * 2^y for whole y */
    JIT_TABLE,                /* jit_tanh_terms of 4 <= x < 64 */
    JIT_OP_COUNT
} jit_op;

typedef struct jit_node {
    uint16_t op;   /* mod_op or jit_op */
    uint8_t type;   /* mod_type */
    uint8_t varies; /* DEP_ bits; with the score fast forms are allowed */
    uint8_t level;  /* jit_level, by varies */
    uint8_t n_args;
    uint8_t is_along;    /* it depends on b, h and kv - q alone (pass/along.h) */
    uint8_t is_diagonal; /* tiles read it from its array of diagonals */
    uint16_t slot;       /* among the nodes of its level: which array */
    uint16_t diagonal;   /* which array of diagonals, from 1; 0: it has none */
    uint32_t args[3];
    int32_t imm; /* constant's bits, variable, size, tensor */
} jit_node;

enum { JIT_MAX_TENSORS = 2 * MOD_MAX_CAPTURES };

typedef struct jit_graph {
    jit_node *nodes;
    uint32_t n_nodes, capacity;
    uint32_t results[JIT_MAX_RESULTS]; /* values of scores; the mask cuts the first */
    uint32_t n_results, mask;          /* mask: UINT32_MAX without one */
    uint8_t has_max;                   /* row maxima of the first are wanted */
    /* The score in streams without lse: approx * approx_factor, in the units of the weights'
     * exponents (with is_finite, of weights that are made as words). If approx_times is not
     * UINT32_MAX, it is one more factor; approx is then the result of a table, whose terms may
     * hold approx_factor already. */
    uint32_t approx, approx_factor, approx_times;
    uint8_t is_finite, is_approx, has_approx_tanh; /* the last two: while it is built */
    uint32_t n_score_tensors, n_tensors;
    uint8_t dtype[JIT_MAX_TENSORS];
    uint16_t n_slots[3]; /* of the lower levels */
    uint16_t n_diagonals;
} jit_graph;

/* out[i] = element offsets[i] of data, int32 offsets. */
typedef void jit_read_fn(void *out, const void *offsets, const void *data, int32_t dtype,
                         int32_t n);

/* What the emitted code reads, in the order of its displacements. Functions that it calls are
 * found here too, so that code holds no address and may lie anywhere. */
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
    int64_t apart[JIT_MAX_RESULTS]; /* bytes from s to the tile of each result */
    const strip_table *strips;      /* of the code's level */
    jit_read_fn *read;              /* for dtypes that are not read in line */
    const int32_t *lanes;           /* its table of lanes */
    const int32_t *diagonals;       /* [slot][JIT_DIAGONALS], from the first row and column */
} jit_call;

/* What a lane's number becomes, by rows: itself, less than 0, and counted from the last of 16
 * or 8 lanes. */
enum { JIT_LANES = 16 };
enum { JIT_LANES_UP, JIT_LANES_DOWN, JIT_LANES_BACK16, JIT_LANES_BACK8, JIT_LANES_ROWS };

/* tanh x for |x| <= 5.8, past which it is 1: u = root x, y = u^2 + 4, u times a cubic in y, of
 * 4 segments an octave, found by the last two bits of y's exponent and the first two of its
 * fraction. At most JIT_ROUGH_TANH off (t_cpu_jit_values.c tries all floats). */
#define JIT_ROUGH_TANH 1.1e-5f
#define JIT_TANH_ROOT 0x1.55e3fep+0f
#define JIT_TANH_MOST 0x1.efbdcap+2f /* of u */
enum { JIT_TABLE_TERMS = 4, JIT_TABLE_SEGMENTS = 16 };
extern const float jit_tanh_terms[JIT_TABLE_TERMS][JIT_TABLE_SEGMENTS];

/* Exponents of weights: log2 e, and units of a word. */
#define JIT_LOG2_E 0x1.715476p+0f
enum { JIT_WORD_ONE = 128 };

/* jit_diagonals.c: gives arrays of diagonals to nodes of a graph that is done. Cells go by
 * kv - q, the first of the last row and first key that are fixed. */
enum { JIT_DIAGONALS = JIT_ROWS + JIT_COLS };
void jit_find_diagonals(jit_graph *g);

/* nodes are taken from the arena. */
saccade_status jit_build_graph(const pass_facts *score, const mod_fn *mask, arena *a,
                               jit_graph *out, saccade_error *err);
/* Without row maxima and without the approximate score. */
saccade_status jit_build_results(const mod_fn *score, const uint32_t *results, uint32_t n,
                                 const mod_fn *mask, arena *a, jit_graph *out,
                                 saccade_error *err);

/* jit.c, for code that is not a loop over a tile: the graph, where a state's frame lies behind
 * its uniform values, room for it, and pointers for rows from row0, keys from col0 on. */
const jit_graph *jit_graph_of(const jit_program *program);
int64_t jit_frame_at(const jit_program *program);
void jit_reserve(jit_program *program, int32_t spills);
void jit_place(const jit_state *state, int32_t row0, int32_t col0, jit_call *call);

/* Elements of up to 4 bytes, or the low half of 8, are gathered in line; others by a call. */
int jit_reads_inline(saccade_dtype dtype);
/* Those of 1 and 2 bytes are cut out of the aligned word of 4 that holds them, which no page
 * ends within: offsets of such tensors count from the word that holds the first element. */
enum { JIT_WORD_BYTES = 4 };
int jit_reads_words(saccade_dtype dtype);

typedef void jit_code_fn(const jit_call *call);

/* jit_loop.c: machine code for the tile level. The bytes go to `bytes` (room of `capacity`);
 * *size says how many. */
enum { JIT_MASKED = 1, JIT_FEW_ROWS = 2, JIT_FORMS = 4 }; /* mask too; no diagonals */
saccade_status jit_emit_tile(const jit_graph *graph, int form, int32_t level, uint8_t *bytes,
                             size_t capacity, size_t *size, int32_t *spills,
                             saccade_error *err);

#endif
