/* flow.h: 32 rows of Q against 128 keys as one stretch of machine code in which the vector
 * units' work stands between the tiles' (docs/lab/007 has the figures):
 *
 *     matrix stream   Q K^T of squares 1 2 3 and of the next step's 0; P V of the step before
 *     vector stream   score mod, cut, exponential, row sums, P of squares 0 1 2 3
 *
 * A square is 32 x 32 scores. Two squares of S exist at a time and two steps of P; each stream
 * waits only where the other's result or memory is needed. Between steps C code moves pointers:
 * steps of different strips follow each other without a break. Narrow steps have 96 keys: one
 * code for all of a short strip, small enough to stay where instructions are cached. */
#ifndef SACCADE_CPU_FLOW_FLOW_H
#define SACCADE_CPU_FLOW_FLOW_H

#include "base/strings.h"
#include "cpu/jit/jit_graph.h"

enum { FLOW_ROWS = 32, FLOW_KEYS = 128, FLOW_SQUARES = 4, FLOW_NARROW = 3 };

/* Where the parts of a flow's memory lie, 64-aligned, in bytes from its middle: from there
 * short displacements reach all of them but P. S holds two squares [2 halves][32 rows][16]. */
enum {
    FLOW_SQUARE_BYTES = 4096,
    FLOW_S = -2 * FLOW_SQUARE_BYTES,
    FLOW_SHIFT = 0,                /* float [32]: added to scores times the factor */
    FLOW_FIRST = FLOW_SHIFT + 128, /* int32 [32]: live keys of the step, when cut */
    FLOW_PAST = FLOW_FIRST + 128,
    FLOW_SUM = FLOW_PAST + 128,  /* float [32][16]: partial sums of rows */
    FLOW_OVER = FLOW_SUM + 2048, /* uint16 [32]: all words of weights, or-ed */
    FLOW_P = FLOW_OVER + 64,     /* two of bf16 [4 squares][1 or 2 parts][32 rows][32] */
    FLOW_P_BYTES = 16384,
    FLOW_MASKS = FLOW_P + 2 * FLOW_P_BYTES, /* of a narrow step's squares, words as below */
    FLOW_MASK_BYTES = 128,
    FLOW_END = FLOW_MASKS + FLOW_NARROW * FLOW_MASK_BYTES,
    FLOW_BYTES = FLOW_END - FLOW_S
};

/* Masks of rows in a square: words with a bit for each of its 32 keys, in the order in which a
 * row's weights are packed. One table has the keys before n live, n from -32 on, the other the
 * keys from n on. Where a limit rises by one key a row, the masks of a square are FLOW_ROWS
 * words of a table that follow each other. */
enum { FLOW_CUTS = 96, FLOW_CUT_LEAST = -32, FLOW_CUT_MOST = 32 };

/* What the code of one step reads. */
typedef struct flow_step_args {
    jit_call mod;           /* s: the middle of the stream's memory; frame is not used */
    const void *q, *q_next; /* strip of this step, of the next one */
    const void *k, *k_next; /* packed keys of this step, of the next one */
    const void *p_before, *v_before;
    float *o_before; /* strip of O that the step before adds to */
    void *p;
    const void *s[2]; /* narrow: where the step's even and odd squares are */
    const uint32_t *masks[FLOW_NARROW];
    const void *prefetch[FLOW_NARROW]; /* 2 KB to bring into L2 during a square's work */
    float constants[8];         /* factor of scores in the exponent, then the polynomial */
    uint8_t corrections[64];    /* of words of weights, by bits 1 to 6 */
    int64_t order[8];           /* of a row's packed quarters */
    int32_t columns[FLOW_KEYS]; /* 0 1 2 .. */
    float tanh_terms[JIT_TABLE_TERMS][JIT_TABLE_SEGMENTS];
} flow_step_args;

/* What the code of a plan depends on. */
typedef struct flow_shape {
    const jit_graph *score;     /* NULL: none */
    int64_t frame_at;           /* bytes from mod.uniform to spill room */
    int32_t depth, panels;      /* of 32 dims of Q, of 32 columns of V */
    int32_t q_stride, o_stride; /* bytes from row to row */
    int32_t squares;            /* of a step */
    int has_narrow;             /* code for narrow steps is wanted */
    int is_narrow;              /* this is it; squares of words are cut by masks in memory */
    int is_exact;               /* exponentials to 1e-7, else to 9e-5, or .. */
    int is_word;                /* .. weights are made as words of bf16, from finite scores */
    int is_cut;                 /* keys outside of [first, past) have no weight */
    int is_split;               /* elements are sums of two bf16 (block_amx_f16_tmpl.c) */
    int is_plain;               /* the streams one after the other, as far as they can be */
} flow_shape;

typedef void flow_step_fn(const flow_step_args *step);

/* Writes all code of a plan: exact and approximate steps, each cut by limits or whole, and
 * narrow ones; is_exact and is_cut of the shape are not read. *spills is how many slots the
 * frame in the mod's state must have. EBACKEND where there is no encoder, no executable memory,
 * or the mod is not straight-line code. */
typedef struct flow_code flow_code;
saccade_status flow_code_create(const flow_shape *shape, flow_code **out, int32_t *spills,
                                saccade_error *err);
void flow_code_destroy(flow_code *code);
const flow_shape *flow_code_shape(const flow_code *code, int is_exact);
flow_step_fn *flow_code_run(const flow_code *code, int is_exact, int is_cut);
/* Narrow steps, without lse; NULL: none were wanted. */
flow_step_fn *flow_code_narrow(const flow_code *code);
const flow_shape *flow_code_narrow_shape(const flow_code *code);
/* The tables of masks, [FLOW_CUTS]: keys before n live, or keys from n on. */
const uint32_t *flow_code_cuts(const flow_code *code, int is_from);
/* Sizes of all codes, and the approximate one's first row among its tiles, for explain. */
void flow_code_print(const flow_code *code, strbuf *out);

/* Of the exponential's polynomial; none by words. */
enum { FLOW_COEFFICIENTS = 6 };
int flow_coefficients(const flow_shape *shape);
/* What is added to a score times the factor so that a weight's exponent is 0 at the anchor. */
float flow_shift(const flow_shape *shape, float anchor);
/* Sets what does not change from step to step. scale: of scores without a score mod. */
void flow_step_begin(flow_step_args *step, const flow_shape *shape, float scale);

#endif
