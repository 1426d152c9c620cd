/* Block masks whose heads differ, for kernels that read K and V once for a group of heads: the
 * runs of a group are those of its heads together. */
#include "cuda/mask/device_mask.h"

#include <stdlib.h>
#include <string.h>

enum { DEAD, PARTIAL, FULL };

/* The states of one row of blocks for a whole group of heads. A block is DEAD if it is dead for
 * every head, FULL if it is full for every head, and PARTIAL otherwise. */
static void mark_group(const mask_runs *r, int64_t b, int64_t g, int64_t group, int64_t row,
                       unsigned char *state)
{
    memset(state, DEAD, (size_t)r->columns);
    for (int64_t h = g * group; h < (g + 1) * group; h++) {
        const int64_t at = (b * r->H + h) * r->rows + row;
        int64_t next = 0; /* the first block behind the runs seen so far */
        for (int64_t i = r->row_begin[at]; i <= r->row_begin[at + 1]; i++) {
            const saccade_run *run = i < r->row_begin[at + 1] ? &r->runs[i] : NULL;
            const int64_t first = run ? run->first : r->columns;
            /* blocks between two runs are dead for this head */
            for (int64_t k = next; k < first; k++)
                state[k] = state[k] == FULL ? PARTIAL : state[k];
            for (int64_t k = first; run && k < first + run->count; k++) {
                const int is_first = state[k] == DEAD && h == g * group;
                state[k] = run->full && (is_first || state[k] == FULL) ? FULL : PARTIAL;
            }
            next = run ? first + run->count : next;
        }
    }
}

/* Writes a row's runs of equal states, dead ones left out, and counts its live blocks. The
 * result is the number of runs; with runs NULL nothing is written. */
static int64_t put_states(const unsigned char *state, int64_t columns, saccade_run *runs,
                          int64_t *live)
{
    int64_t n = 0;
    *live = 0;
    for (int64_t k = 0, first = 0; k < columns; k++) {
        if (k + 1 < columns && state[k + 1] == state[k])
            continue;
        if (state[k] != DEAD) {
            if (runs)
                runs[n] = (saccade_run){.first = (int32_t)first,
                                        .count = (int32_t)(k + 1 - first),
                                        .full = state[k] == FULL};
            n++;
            *live += k + 1 - first;
        }
        first = k + 1;
    }
    return n;
}

saccade_status cu_group_heads(const mask_runs *r, int64_t group, cu_grouped *out,
                              saccade_error *err)
{
    const int64_t heads = r->H / group, n_rows = r->B * heads * r->rows;
    out->r = *r;
    out->r.H = heads;
    out->runs = NULL;
    /* one block of memory: where each row's runs begin, each row's live blocks, and one row of
     * states to work in */
    int64_t *begin = out->rows =
        malloc((size_t)(2 * n_rows + 1) * sizeof *begin + (size_t)r->columns);
    FAIL_IF_NULL(begin);
    int64_t *live = begin + n_rows + 1;
    unsigned char *state = (unsigned char *)(live + n_rows);
    for (int is_last = 0; is_last < 2; is_last++) { /* counts the runs, then writes them */
        begin[0] = 0;
        for (int64_t i = 0; i < n_rows; i++) {
            mark_group(r, i / r->rows / heads, i / r->rows % heads, group, i % r->rows, state);
            begin[i + 1] = begin[i]
                           + put_states(state, r->columns,
                                        is_last ? out->runs + begin[i] : NULL, &live[i]);
        }
        if (!is_last)
            out->runs = malloc((size_t)(begin[n_rows] + 1) * sizeof *out->runs);
        FAIL_IF_NULL(out->runs);
    }
    out->r.row_begin = begin;
    out->r.row_live = live;
    out->r.runs = out->runs;
    return SACCADE_OK;
}

void cu_grouped_free(cu_grouped *g)
{
    free(g->runs);
    free(g->rows);
    *g = (cu_grouped){0};
}
