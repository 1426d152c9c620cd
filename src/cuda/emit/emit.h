/* emit.h: what the files that write a mod's CUDA text share. */
#ifndef SACCADE_CUDA_EMIT_EMIT_H
#define SACCADE_CUDA_EMIT_EMIT_H

#include "cuda/emit/mod_text.h"
#include "cuda/kern/bwd.h"

typedef enum rate { ROW, COLUMN, ELEMENT } rate;

/* where text is being written: the copy's number is of the column (0, 1) or element (0..3) */
typedef struct place {
    rate rate;
    int copy;
} place;

typedef struct emitter {
    const mod_fn *fn;
    const plan_problem *problem;
    strbuf *out;
    int first_capture;  /* of this fn among the arguments */
    const double *gain; /* of a score: by how much its result follows each node */
    const cu_dense *dense; /* reads of fn that programs with CFG_DENSE have as tiles */
    int n_dense;
    const cu_shares *shares; /* where text takes shared values; else NULL */
} emitter;

/* ---- capture_reads.c ---- */

/* Reads of captures whose gradients are wanted. */
typedef struct cu_reads_found {
    const pass_read *read[CU_READS_MOST];
    int n;
} cu_reads_found;

static inline int cu_has_captures(const plan_problem *p)
{
    return p->score && p->gradients & SACCADE_GRADIENT_CAPTURES && p->gradient_captures;
}

/* 0: there are more than CU_READS_MOST. */
int cu_find_reads(const plan_problem *p, cu_reads_found *out);
/* Whether an index is this variable alone, so that its values have elements of their own. */
int cu_read_has_own(const pass_read *read, int var);
/* Whether each of so many batches and heads has. */
static inline int cu_read_is_own(const pass_read *read, int64_t B, int64_t H)
{
    return (B == 1 || cu_read_has_own(read, VAR_B)) && (H == 1 || cu_read_has_own(read, VAR_H));
}
/* Whether each score of a head has an element of its own, as long as indices that may count
 * from the end do not. */
static inline int cu_read_has_elements(const pass_read *read)
{
    for (int d = 0; d < read->rank; d++) { /* stores go along lines */
        const pass_index *index = &read->index[d];
        if (index->varies & (DEP_Q | DEP_KV | DEP_SCORE)
            && (index->sum_line.known & (DEP_Q | DEP_KV)) != (DEP_Q | DEP_KV))
            return 0;
    }
    return read->scatter == SCATTER_ELEMENTS || read->is_own_inside;
}
/* The name of a capture one of whose indices varies with the score, or NULL. */
const char *cu_reads_by_score(const plan_problem *p);

/* first parameters of every generated function */
#define EMIT_SIGNATURE "const mod_args &mod, const cu_fwd &p, int b, int h"

static inline int emit_is_leaf(const mod_node *n)
{
    return n->op <= OP_SCALAR;
}

static inline const mod_node *emit_arg(const emitter *e, const mod_node *n, int i)
{
    return &e->fn->nodes[e->fn->args[n->args + i]];
}

static inline unsigned emit_number(const emitter *e, const mod_node *n)
{
    return (unsigned)(n - e->fn->nodes);
}

/* ---- emit_nodes.c ---- */

rate emit_rate_of(const mod_node *n);
const char *emit_type(const mod_node *n);
void emit_float(strbuf *out, float x);
/* The value of node n as seen from a place. */
void emit_value(const emitter *e, strbuf *out, const mod_node *n, place at);
/* One statement: node n at a place. */
void emit_node(const emitter *e, const mod_node *n, place at);
/* All nodes of one rate, each in all its copies; `except` is left out. */
void emit_nodes(const emitter *e, rate which, const mod_node *except);
/* Whether node i becomes the fast tanh, four at once. needs: gain. */
int emit_is_fast_tanh(const emitter *e, uint32_t i);
/* Marks what the marked nodes are made of. */
void emit_mark_operands(const emitter *e, unsigned char *needed);
/* The marked nodes that are no row's: once each, or all copies. */
void emit_marked(const emitter *e, const unsigned char *needed, int all);
/* Marks row values that columns and elements read, or that are the result. */
void emit_mark_kept(const emitter *e, unsigned char *kept);
void emit_row_members(const emitter *e, const unsigned char *kept);
void emit_row_values(const emitter *e, const unsigned char *kept);
/* <what>_row and <what>_row_begin: row values and who keeps them. */
void emit_row_struct(const emitter *e, const char *what, const unsigned char *kept);

/* ---- emit_dense.c ---- */

/* Finds reads of e->fn that may come as tiles, adds them to those of the facts, and writes what
 * programs with CFG_DENSE take: <WHAT>_TILES, the parameter by which elements come, and
 * <what>_dense_bytes() and _dense_place(), how the tensors lie. */
saccade_status emit_dense(emitter *e, const char *what, const char *WHAT, cu_mod_text *facts,
                          saccade_error *err);
/* Which of these node n is, or -1. */
int emit_dense_read(const emitter *e, const mod_node *n);

/* ---- emit_shares.c ---- */

/* Finds what of the results scores share, has_rows: what a query brings, too, for the facts. If
 * there is something, writes what programs with CFG_SHARES take: <WHAT>_ROWS, _KEYS and
 * _DIAGONALS, how many there are; <what>_shared, those of four scores; how they are made,
 * <what>_of_row(), _of_key() and _of_diagonal(); and <what>_share_rows(), which gives rows
 * theirs. Text up to emit_shares_end, which is then due, takes e->shares. needs: <what>_row. */
saccade_status emit_shares(emitter *e, const char *what, const char *WHAT,
                           const uint32_t *results, int n, int has_rows, cu_mod_text *facts,
                           saccade_error *err);
void emit_shares_end(emitter *e);
/* The value of node n if e->shares has it; tells whether. */
int emit_shared(const emitter *e, const mod_node *n, place at);
/* What makes a word of 32 bits of a node's value, as shared values are. */
const char *emit_to_word(const mod_node *n);

/* ---- emit_line.c ---- */

/* Whether the score is the incoming one plus what does not depend on it. */
int emit_has_slope_one(const plan_problem *p);
/* Whether that offset, from the score times 1 or a slope of the head, is a line in q and kv;
 * then its text is written. */
int emit_line(const emitter *e);

/* Whether node n is a line in q and kv, without the score. */
int emit_is_line(const emitter *e, const mod_node *n);

/* Whether the score is a slope, of no key and no score, times the incoming one plus what does
 * not depend on it; then row_slope() is written: sums in fixed point have their bound by it. */
int emit_row_slope(const emitter *e);
/* Whether that slope is of the head alone, and not surely 1 or 0. */
int emit_has_head_slope(const plan_problem *p);

/* ---- emit_score.c, emit_slope.c, emit_reads.c, emit_terms.c, emit_mask.c ---- */

saccade_status emit_score(emitter *e, cu_mod_text *facts, saccade_error *err);
/* k where node `root` is tanh(k * score) by the fast tanh, k of the bare dot product and a
 * positive constant of moderate size; else 0. needs: gain. */
double emit_tanh_rate(const emitter *e, const mod_node *root);
/* Value and derivative of the score; the graph of both lives in scratch. */
saccade_status emit_slope(emitter *e, arena *scratch, cu_mod_text *facts, saccade_error *err);
/* What programs with CFG_CAPTURES take of the graph of value and derivatives, e->fn; results:
 * of the value, of the derivative by the score, of those by the reads. Finds what CFG_KEPT
 * keeps. */
saccade_status emit_reads(emitter *e, const cu_reads_found *reads, const uint32_t *results,
                          cu_mod_text *facts, saccade_error *err);
/* emit_reads for programs with CFG_TERMS: reads whose terms backward's tiles make. */
saccade_status emit_terms(emitter *e, const cu_reads_found *reads, const uint32_t *results,
                          arena *scratch, cu_mod_text *facts, saccade_error *err);
saccade_status emit_mask(emitter *e, cu_mod_text *facts, saccade_error *err);

#endif
