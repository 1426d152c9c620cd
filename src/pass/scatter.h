/* scatter.h: how what a score function reads varies, and how the gradient of a captured tensor
 * is therefore summed so that its bits depend on no order of execution. Each score (b, h, q,
 * kv) adds a term to the element that it read:
 *
 *   HEADS      t[h], w         one sum a head
 *   ROWS       t[q], t[doc[q]] one sum a row of scores
 *   COLUMNS    t[h, kv]        one sum a column
 *   DIAGONALS  t[h, q - kv]    one sum for each q - kv; buckets of it too
 *   ELEMENTS   t[h, q, kv]     each score of a head has an element of its own
 *   GENERAL    t[idx[q, kv]]   none of these: each score adds for itself, in a fixed order or
 *                              in fixed point, whose sums have none
 *
 * is_shared: sums of a head, or of several, may go to one element; then its owner adds them in
 * a fixed order. Otherwise each sum is one plain store. All of it holds while no index leaves
 * its tensor: clamped indices meet at the tensor's edges, so a run that clamps is GENERAL. */
#ifndef SACCADE_PASS_SCATTER_H
#define SACCADE_PASS_SCATTER_H

#include "mod/mod.h"

typedef enum pass_scatter {
    SCATTER_NONE, /* not a float: there is no gradient */
    SCATTER_HEADS,
    SCATTER_ROWS,
    SCATTER_COLUMNS,
    SCATTER_DIAGONALS,
    SCATTER_ELEMENTS,
    SCATTER_GENERAL
} pass_scatter;

/* One dimension of a read. */
typedef struct pass_index {
    uint8_t varies; /* DEP_ bits */
    /* A node that within a head is f(q) + g(kv), which may wrap, and that is the index wherever
     * it is not below 0, as x of `x < 0 ? x + n : x`; PASS_NO_NODE: there is none. */
    uint32_t sum;
    mod_line line, sum_line; /* of the index, of that node */
} pass_index;

/* The index is coef . (b, h, q, kv) + what is constant during a run. */
static inline int pass_index_is_line(const pass_index *index)
{
    return index->line.known == (DEP_B | DEP_H | DEP_Q | DEP_KV);
}

typedef struct pass_read {
    uint32_t node, capture; /* an OP_LOAD or OP_SCALAR of fn; its capture */
    pass_scatter scatter;
    /* It is, or would be, ELEMENTS where no sum of an index is below 0: of x[kv - q + n] in
     * languages whose negative indices count from the end. */
    uint8_t is_own_inside;
    uint8_t is_shared, rank;
    pass_index index[SACCADE_MAX_RANK];
} pass_read;

/* Every read of fn, in the order of its nodes. Reads of one tensor are given classes that go
 * together: sums of each are added one after the other. */
saccade_status pass_find_reads(const mod_fn *fn, arena *arena, const pass_read **out,
                               uint32_t *n, saccade_error *err);
/* Whether keys of a row may read one element: unless an index moves with kv. */
int pass_sums_keys(const pass_read *read);
void pass_read_print(const mod_fn *fn, const pass_read *read, strbuf *out);

#endif
