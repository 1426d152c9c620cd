/* mod_text.h: the text that is generated for a mod and for an instance's products. */
#ifndef SACCADE_CUDA_EMIT_MOD_TEXT_H
#define SACCADE_CUDA_EMIT_MOD_TEXT_H

#include "base/strings.h"
#include "cuda/kern/launch.h"
#include "cuda/tile/tile.h"
#include "plan/plan.h"

/* ---- emit.c, emit_products.c: text of the generated headers ---- */

typedef enum cu_score_kind { CU_SCORE_NONE, CU_SCORE_AFFINE, CU_SCORE_GENERAL } cu_score_kind;
typedef enum cu_mask_kind { CU_MASK_NONE, CU_MASK_INTERVAL, CU_MASK_GENERAL } cu_mask_kind;

/* Gradients of captures: what backward's tiles make of a read's terms (emit_terms.c). */
typedef enum cu_term {
    CU_TERM_NONE,
    CU_TERM_DIAGONAL,
    CU_TERM_ELEMENT,
    CU_TERM_SCALE,
    CU_TERM_LINE,
    CU_TERM_KEY,
    CU_TERM_ROW
} cu_term;

/* A read t[.., q, .., kv, ..] whose other indices the head or the batch knows. */
typedef struct cu_dense {
    unsigned node; /* of the score or the mask */
    int capture, rank, bytes;
    int q, kv; /* which of its dimensions go with the query and the key */
} cu_dense;

/* Values that many scores share: of nodes that depend, beside b and h, on q, kv or q - kv. */
enum { CU_SHARES_MOST = 3 };
typedef struct cu_shares {
    unsigned row[CU_SHARES_MOST], key[CU_SHARES_MOST], diagonal[CU_SHARES_MOST];
    int n_rows, n_keys, n_diagonals;
    /* loads of a score of its own that bwd_elements.cu keeps while batches or heads pass, and
     * the dtype that all of them have if it is one of 16 bits, else NONE */
    unsigned element[CU_SHARES_MOST];
    int n_elements;
    saccade_dtype element_dtype;
} cu_shares;

typedef struct cu_mod_text {
    cu_score_kind score;
    cu_mask_kind mask;
    int n_captures;    /* score's, then mask's */
    int column_words;  /* words of mask_column: what a mask needs of each key */
    int has_sure_keys; /* a general mask has mask_sure: below it every key is live */
    /* reads that CFG_DENSE takes as tiles, the score's, then the mask's */
    cu_dense dense[CU_DENSE_MOST];
    int n_dense, n_dense_score;
    cu_shares shares;  /* what programs with CFG_SHARES share of the score */
    cu_shares kept;    /* backward: what programs with CFG_KEPT keep of it */
    int has_row_slope; /* backward: the slope does not vary with the key or the score */
    int is_head_slope; /* backward: it varies with the head alone, and is no constant 1 or 0 */
    unsigned char term[8]; /* backward: cu_term of the first reads with gradients (CU_READS) */
    int n_terms;           /* .. that is not CU_TERM_NONE */
    double slope_most; /* backward: no larger derivative by the score; INFINITY: not known */
} cu_mod_text;

static inline int cu_has_shares(const cu_mod_text *facts)
{
    return facts->shares.n_rows + facts->shares.n_keys + facts->shares.n_diagonals > 0;
}

/* Bytes of a score's dense reads. */
static inline int cu_dense_bytes(const cu_mod_text *facts)
{
    int bytes = 0;
    for (int r = 0; r < facts->n_dense; r++)
        bytes += facts->dense[r].bytes;
    return bytes;
}

/* mod.cuh: the user's score and mask as device functions. */
saccade_status cu_emit_mod(const plan_problem *problem, strbuf *out, cu_mod_text *facts,
                           saccade_error *err);
/* cu_emit_mod for backward, with the score's derivative; its graph lives in scratch. */
saccade_status cu_emit_backward_mod(const plan_problem *problem, arena *scratch, strbuf *out,
                                    cu_mod_text *facts, saccade_error *err);
/* wgmma.cuh: the two products at the widths of an instance. */
void cu_emit_products(const cu_tile *tile, int E, int is_f16, strbuf *out);

#endif
