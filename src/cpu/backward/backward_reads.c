/* Reads of captures whose gradients are wanted, by the facts of the score mod. */
#include "cpu/backward/backward.h"

#include "base/status.h"

#include <stdlib.h>

static backward_axis axis_of(pass_scatter scatter)
{
    switch (scatter) {
    case SCATTER_HEADS:
        return BACKWARD_HEAD;
    case SCATTER_ROWS:
        return BACKWARD_ROW;
    case SCATTER_COLUMNS:
        return BACKWARD_COLUMN;
    case SCATTER_DIAGONALS:
        return BACKWARD_DIAGONAL;
    default:
        return BACKWARD_PLACE;
    }
}

/* Dense reads have indices that are lines in q and kv, plus what is constant within a head: q,
 * kv or neither, or, where each position has an element of its own, kv - q and the like, and
 * lines that count from the end below 0. */
static void find_steps(const pass_read *r, backward_read *out)
{
    out->is_dense = 1;
    for (int d = 0; d < r->rank; d++) {
        const pass_index *index = &r->index[d];
        const mod_line *line = &index->sum_line;
        const int32_t q = line->coef[VAR_Q], kv = line->coef[VAR_KV];
        const int is_line =
            line->known & DEP_Q && line->known & DEP_KV && abs(q) <= 1 && abs(kv) <= 1;
        const int is_whole = index->line.known == line->known;
        out->is_slanted |= is_line && (!is_whole || q < 0 || kv < 0 || q + kv > 1);
        out->is_dense &= is_line;
        out->by_q[d] = (int8_t)(is_line ? q : 0);
        out->by_kv[d] = (int8_t)(is_line ? kv : 0);
    }
    out->is_dense &= !out->is_slanted || out->is_own;
}

saccade_status backward_check_reads(const pass_facts *score, uint64_t captures,
                                    saccade_error *err)
{
    for (uint32_t i = 0; i < score->n_reads; i++) {
        const pass_read *r = &score->reads[i];
        const mod_node *load = &score->fn->nodes[r->node];
        for (int d = 0; d < r->rank && captures >> r->capture & 1; d++)
            FAIL_AT(r->index[d].varies & DEP_SCORE, SACCADE_EBACKEND,
                    score->fn->captures[r->capture].name, load->line, load->column,
                    "gradient: got an index that varies with the score, expected one of "
                    "positions and captures");
    }
    return SACCADE_OK;
}

uint32_t backward_find_reads(const pass_facts *score, uint64_t captures, backward_read *reads,
                             uint32_t most)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < score->n_reads; i++) {
        const pass_read *r = &score->reads[i];
        backward_read read = {.node = r->node, .capture = (int32_t)r->capture, .rank = r->rank};
        if (r->scatter == SCATTER_NONE || !(captures >> r->capture & 1))
            continue;
        read.axis = axis_of(r->scatter);
        read.is_own = r->scatter == SCATTER_ELEMENTS || r->is_own_inside;
        read.sums_keys = pass_sums_keys(r);
        find_steps(r, &read);
        for (int d = 0; d < r->rank; d++)
            read.sum[d] = r->index[d].sum;
        if (n < most)
            reads[n] = read;
        n++;
    }
    return n;
}
