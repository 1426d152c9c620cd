/* ladder.h: the history of the algorithm, from naive softmax to split keys and the recomputing
 * backward, on one problem of N queries, N keys and dim d. Memory is of two kinds: slow (the
 * papers' HBM), whose every access is counted, and the chip (SRAM, M elements), which is free.
 * Each algorithm is compiled twice: counting, and plain for the clock (ladder_timed.c). */
#ifndef SACCADE_REF_LADDER_H
#define SACCADE_REF_LADDER_H

#include "saccade_measure.h"

/* What an algorithm did. Accesses are elements, in slow memory. */
typedef struct ladder_count {
    int64_t reads, writes;
    int64_t flops;     /* + - * / max and exp are one each */
    int64_t repeats;   /* exponentials taken again of the same argument, not in flops */
    int64_t visits;    /* (query, key) pairs met in walks over slow memory */
    int64_t extra;     /* elements of slow memory taken besides inputs and outputs */
    int64_t chip;      /* most elements held on the chip at once */
    int64_t fallbacks; /* rows done again because the unified maximum did not fit */
} ladder_count;

/* Inputs, all in slow memory, row-major f32. Q holds the scale 1 / sqrt(d) already. */
typedef struct ladder_problem {
    int64_t N, d, M;
    int64_t block;          /* scores per block of block-online softmax */
    int64_t splits;         /* of the keys in decoding */
    float phi;              /* unified maximum of Flash-Decoding++ */
    const float *Q, *K, *V; /* [N][d] */
    const float *X;         /* [N][N] Q K^T: input of the softmaxes */
    const float *dO, *O;    /* [N][d] for backward: O, P, m, l as forward left them */
    const float *P;         /* [N][N] */
    const float *m, *l;     /* [N] */
} ladder_problem;

typedef struct ladder_memory {
    float *start, *at, *end;
} ladder_memory;

/* One run of one algorithm. out: [N][N] softmax, [N][d] attention, [1][d] decoding,
 * [3][N][d] dQ dK dV. */
typedef struct ladder_run {
    const ladder_problem *p;
    float *out;
    ladder_memory slow, chip; /* room for the algorithm's own arrays */
    ladder_count count;
} ladder_run;

/* Every rung: its function. Table and formulas are in ladder_table.c. */
#define LADDER_RUNGS(X)   \
    X(softmax_naive)      \
    X(softmax_safe)       \
    X(softmax_online)     \
    X(softmax_block)      \
    X(attention_standard) \
    X(attention_3_pass)   \
    X(flash1_row)         \
    X(flash1_block)       \
    X(flash1_sparse)      \
    X(flash2)             \
    X(decode_split)       \
    X(decode_unified)     \
    X(backward_standard)  \
    X(backward_flash)

#define LADDER_DECLARE(name)             \
    void ladder_##name(ladder_run *run); \
    void ladder_timed_##name(ladder_run *run);
LADDER_RUNGS(LADDER_DECLARE)

/* ---- blocks ---- */

/* Sizes of blocks for M elements on the chip, Algorithm 1 line 1; the stationary side is the
 * longer one: keys in FlashAttention-1 and backward, queries in FlashAttention-2. */
typedef struct ladder_blocks {
    int64_t stationary, moving;     /* rows of one block */
    int64_t n_stationary, n_moving; /* blocks */
} ladder_blocks;

static inline int64_t ladder_least(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static inline ladder_blocks ladder_blocks_of(const ladder_problem *p)
{
    const int64_t most = ladder_least((p->M + 4 * p->d - 1) / (4 * p->d), p->N);
    ladder_blocks b = {.stationary = most, .moving = ladder_least(most, p->d)};
    b.n_stationary = (p->N + b.stationary - 1) / b.stationary;
    b.n_moving = (p->N + b.moving - 1) / b.moving;
    return b;
}

/* The block mask of the sparse rung: the diagonal, its neighbours, and the first keys (local
 * and global attention). i: block of queries, j: block of keys. */
static inline int ladder_is_live(const ladder_blocks *b, int64_t i, int64_t j)
{
    const int64_t q0 = i * b->moving, q1 = q0 + b->moving;
    const int64_t k0 = j * b->stationary, k1 = k0 + b->stationary;
    return j == 0 || (k0 < q1 + b->moving && q0 < k1 + b->moving);
}

/* ---- state of a part of the keys, and its merge ---- */

/* Softmax over some keys: maximum, sum of exp(x - m), and their weighted mean of values. */
typedef struct ladder_state {
    float m, l;
    float *o; /* [d] */
} ladder_state;

/* x = x and y together. Associative and commutative; m = -INF, l = 0 is neutral. */
void ladder_merge(ladder_run *run, ladder_state *x, const ladder_state *y);
void ladder_timed_merge(ladder_run *run, ladder_state *x, const ladder_state *y);

/* ---- ladder_table.c ---- */

typedef enum ladder_kind {
    LADDER_SOFTMAX,
    LADDER_ATTENTION,
    LADDER_SPARSE,
    LADDER_DECODE,
    LADDER_BACKWARD
} ladder_kind;

typedef struct ladder_rung {
    const char *name, *title, *source;
    ladder_kind kind;
    void (*counted)(ladder_run *run);
    void (*timed)(ladder_run *run);
    /* What the counters must equal, exactly, and the text of the formula. */
    int64_t (*accesses)(const ladder_problem *p);
    const char *accesses_text;
    int64_t (*flops)(const ladder_problem *p);
    const char *flops_text;
    /* What the source states: its formula, or its order of growth. */
    double (*stated)(const ladder_problem *p);
    const char *stated_text;
} ladder_rung;

extern const ladder_rung ladder_rungs[]; /* ends with a NULL name */
int64_t ladder_out_size(const ladder_rung *rung, const ladder_problem *p);

/* ---- ladder_data.c: a problem with random inputs, and the truth in float64 ---- */

typedef struct ladder_data {
    ladder_problem problem;
    float *inputs; /* holds what problem points to */
    double *truth; /* the last one asked for */
    ladder_kind truth_kind;
    int has_truth;
    float *out;
    float *slow, *chip;
    int64_t slow_size, chip_size;
} ladder_data;

saccade_status ladder_data_create(const ladder_problem *sizes, uint64_t seed, float q_scale,
                                  ladder_data *out, saccade_error *err);
void ladder_data_destroy(ladder_data *data);
/* Empties the algorithm's memory and gives a run that writes to data->out. */
ladder_run ladder_start(ladder_data *data);
/* Largest |out - truth| of a finished run. */
saccade_status ladder_error(ladder_data *data, const ladder_rung *rung, double *error,
                            saccade_error *err);

#endif
