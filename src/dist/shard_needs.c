/* What each rank needs of the others' keys: the union of what its rows touch under a mask, in
 * units that both blocks of keys and chunks are whole numbers of, cut by who holds them. */
#include "dist/shard.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

static int64_t units_of(const shard_source *s)
{
    return (s->KV + s->unit - 1) / s->unit;
}

/* ---- touched ---- */

/* Does a row of blocks have rows of this rank? */
static int has_rows(const shard_source *s, const int32_t *owner, int32_t rank, int64_t first,
                    int64_t past)
{
    for (int64_t c = first / s->chunk; c * s->chunk < past; c++)
        if (owner[c] == rank)
            return 1;
    return 0;
}

static void mark_row(const shard_source *s, const mask_runs *runs, int64_t row, int32_t *change)
{
    for (int64_t i = runs->row_begin[row]; i < runs->row_begin[row + 1]; i++) {
        const int64_t first = (int64_t)runs->runs[i].first * runs->block_kv;
        const int64_t past = first + (int64_t)runs->runs[i].count * runs->block_kv;
        change[first / s->unit]++;
        change[(smaller(past, s->KV) + s->unit - 1) / s->unit]--;
    }
}

static int holds_any(const shard_source *s, const int32_t *owner, int32_t rank)
{
    for (int64_t c = 0; c < s->chunks; c++)
        if (owner[c] == rank)
            return 1;
    return 0;
}

/* First where it changes, how much; then the sums. */
void shard_touched(const shard_source *s, int32_t mask, const int32_t *owner, int32_t rank,
                   int32_t *live)
{
    const int64_t units = units_of(s);
    const mask_runs *runs = s->runs[mask];
    memset(live, 0, (size_t)(units + 1) * sizeof *live);
    if (!runs) {
        live[0] = holds_any(s, owner, rank);
    } else {
        for (int64_t block = 0; block < runs->rows; block++) {
            const int64_t first = block * runs->block_q;
            if (!has_rows(s, owner, rank, first, smaller(first + runs->block_q, s->Q)))
                continue;
            for (int64_t head = 0; head < runs->B * runs->H; head++)
                mark_row(s, runs, head * runs->rows + block, live);
        }
    }
    for (int64_t u = 1; u < units; u++)
        live[u] += live[u - 1];
}

int64_t shard_traffic(const shard_source *s, const int32_t *owner, const int32_t *key_owner,
                      int32_t *scratch)
{
    const int64_t units = units_of(s);
    int64_t keys = 0;
    for (int32_t mask = 0; mask < s->n_masks; mask++)
        for (int32_t rank = 0; rank < s->ranks; rank++) {
            shard_touched(s, mask, owner, rank, scratch);
            for (int64_t u = 0; u < units; u++)
                if (scratch[u] && key_owner[u * s->unit / s->chunk] != rank)
                    keys += s->layers[mask] * (smaller((u + 1) * s->unit, s->KV) - u * s->unit);
        }
    return keys;
}

/* ---- lists ---- */

static int grow(shard_lists *lists)
{
    const int64_t capacity = lists->capacity ? 2 * lists->capacity : 64;
    saccade_range *range = realloc(lists->range, (size_t)capacity * sizeof *range);
    if (!range)
        return 0;
    lists->range = range;
    lists->capacity = capacity;
    return 1;
}

int shard_add(shard_lists *lists, int64_t list, int64_t first, int64_t count)
{
    saccade_range *last = lists->n > lists->begin[list] ? &lists->range[lists->n - 1] : NULL;
    if (last && last->first + last->count == first) {
        last->count += count;
        return 1;
    }
    if (lists->n == lists->capacity && !grow(lists))
        return 0;
    lists->range[lists->n++] = (saccade_range){first, count};
    return 1;
}

void shard_lists_free(shard_lists *lists)
{
    free(lists->begin);
    free(lists->range);
}

/* What `rank` needs of `peer`. */
static saccade_status add_needs(const shard_source *s, saccade_shard_plan *plan, int64_t list,
                                int32_t peer, const int32_t *live, saccade_error *err)
{
    shard_lists *needs = &plan->needs;
    needs->begin[list] = needs->n;
    for (int64_t i = plan->keys.begin[peer]; i < plan->keys.begin[peer + 1]; i++) {
        const saccade_range held = plan->keys.range[i];
        const int64_t past = held.first + held.count;
        for (int64_t j = held.first; j < past; j += s->unit)
            FAIL_IF(live[j / s->unit] && !shard_add(needs, list, j, smaller(s->unit, past - j)),
                    SACCADE_ENOMEM, "out of memory");
    }
    needs->begin[list + 1] = needs->n;
    return SACCADE_OK;
}

static void count_keys(const shard_source *s, saccade_shard_plan *plan, int32_t mask,
                       int32_t rank, int32_t peer, int64_t list)
{
    for (int64_t i = plan->needs.begin[list]; peer != rank && i < plan->needs.n; i++) {
        plan->received[rank] += s->layers[mask] * plan->needs.range[i].count;
        plan->sent[peer] += s->layers[mask] * plan->needs.range[i].count;
    }
}

saccade_status shard_find_needs(const shard_source *s, saccade_shard_plan *plan,
                                saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    int64_t list = 0;
    int32_t *live = malloc((size_t)(units_of(s) + 1) * sizeof *live);
    FAIL_IF_NULL(live);
    for (int32_t mask = 0; mask < s->n_masks; mask++)
        for (int32_t rank = 0; rank < s->ranks; rank++) {
            shard_touched(s, mask, plan->owner, rank, live);
            for (int32_t peer = 0; peer < s->ranks; peer++, list++) {
                TRY_GOTO(add_needs(s, plan, list, peer, live, err));
                count_keys(s, plan, mask, rank, peer, list);
            }
        }
out:
    free(live);
    return status;
}
