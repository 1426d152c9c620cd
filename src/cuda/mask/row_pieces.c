/* The pieces of keys that a small tile walks: the fewest that cover its live blocks. */
#include "cuda/mask/device_mask.h"

/* Whether the blocks [from, past) of a row are all FULL; at: the run that has the first. */
static int is_full(const mask_runs *r, int64_t at, int64_t end, int64_t from, int64_t past)
{
    for (; at < end && from < past; at++) {
        const saccade_run *run = &r->runs[at];
        if (!run->full || run->first > from)
            return 0;
        from = run->first + run->count;
    }
    return from >= past;
}

int cu_cut_row(const mask_runs *r, int64_t row, int keys, int *to)
{
    const int64_t blocks = keys / r->block_kv, end = r->row_begin[row + 1];
    int64_t next = 0;
    int n = 0;
    for (int64_t i = r->row_begin[row]; i < end; i++) {
        const int64_t first = r->runs[i].first, past = first + r->runs[i].count;
        next = next > first ? next : first;
        for (; next < past; next += blocks, n++)
            if (to)
                to[n] = (int)(next * r->block_kv) << PIECE_FLAGS
                        | !is_full(r, i, end, next, next + blocks);
    }
    return n;
}
