/* What a shard plan means for one rank's memory: the parts of rows it computes, the pieces of
 * its keys that it sends, and the order of the pool that pieces of all ranks make. */
#include "dist/dist.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>

static saccade_status find_parts(saccade_dist *d, saccade_error *err)
{
    const saccade_range *at;
    const int32_t n = saccade_shard_rows(d->shards, d->transport.rank, &at);
    d->part = calloc((size_t)n + 1, sizeof *d->part);
    FAIL_IF_NULL(d->part);
    for (int32_t i = 0; i < n; i++) {
        d->part[i] = (plan_part){at[i].first, at[i].count, d->n_rows};
        d->n_rows += at[i].count;
    }
    d->rows = (plan_rows){.part = d->part, .n = n, .all = d->Q};
    return SACCADE_OK;
}

/* Where `first`, one of the keys that the rank holds, lies among them. */
static int64_t local_of(const saccade_range *held, int32_t n, int64_t first)
{
    int64_t before = 0;
    for (int32_t i = 0; i < n && held[i].first + held[i].count <= first; i++)
        before += held[i].count;
    for (int32_t i = 0; i < n; i++)
        if (held[i].first <= first && first < held[i].first + held[i].count)
            return before + first - held[i].first;
    return before;
}

/* What `to` needs of `from`, for each peer as the one or the other. */
static saccade_status find_pieces(saccade_dist *d, int32_t mask, int is_in, dist_pieces *out,
                                  saccade_error *err)
{
    const int32_t ranks = d->transport.ranks, me = d->transport.rank;
    const saccade_range *at, *held;
    int64_t n = 0;
    for (int32_t p = 0; p < ranks; p++)
        n += saccade_shard_needs(d->shards, mask, is_in ? me : p, is_in ? p : me, &at);
    out->begin = calloc((size_t)ranks + 1, sizeof *out->begin);
    out->keys = calloc((size_t)ranks, sizeof *out->keys);
    out->piece = calloc((size_t)n + 1, sizeof *out->piece);
    FAIL_IF(!out->begin || !out->keys || !out->piece, SACCADE_ENOMEM, "out of memory");
    n = 0;
    for (int32_t p = 0; p < ranks; p++) {
        const int32_t holder = is_in ? p : me;
        const int32_t n_held = saccade_shard_keys(d->shards, holder, &held);
        const int32_t count = saccade_shard_needs(d->shards, mask, is_in ? me : p, holder, &at);
        out->begin[p] = n;
        for (int32_t i = 0; i < count && (is_in || p != me); i++) {
            out->piece[n++] =
                (dist_piece){at[i].first, at[i].count, local_of(held, n_held, at[i].first)};
            out->keys[p] += at[i].count;
        }
        out->begin[p + 1] = n;
        out->all += out->keys[p];
    }
    return SACCADE_OK;
}

/* All pieces begin at a multiple of it, and end at one or at the last key. */
static int64_t unit_of(const dist_pieces *in, int64_t chunk, int64_t KV, int32_t ranks)
{
    int64_t unit = chunk;
    for (int64_t i = 0; i < in->begin[ranks]; i++) {
        const int64_t past = in->piece[i].first + in->piece[i].count;
        unit = common_divisor(unit, in->piece[i].first);
        unit = past < KV ? common_divisor(unit, past) : unit;
    }
    return unit;
}

/* Which keys this rank's rows read, and which of them come from others while kernels run. */
static saccade_status find_far(saccade_dist *d, saccade_error *err)
{
    int64_t first = d->KV, past = 0;
    d->far_before = calloc((size_t)d->units + 2, sizeof *d->far_before);
    d->touched_before = calloc((size_t)d->units + 2, sizeof *d->touched_before);
    FAIL_IF(!d->far_before || !d->touched_before, SACCADE_ENOMEM, "out of memory");
    for (int32_t p = 0; p < d->transport.ranks; p++)
        for (int64_t i = d->in.begin[p]; i < d->in.begin[p + 1]; i++) {
            const dist_piece *at = &d->in.piece[i];
            first = at->first < first ? at->first : first;
            past = at->first + at->count > past ? at->first + at->count : past;
            for (int64_t j = 0; j < at->count; j += d->unit) {
                d->touched_before[(at->first + j) / d->unit + 1] = 1;
                d->far_before[(at->first + j) / d->unit + 1] = p != d->transport.rank;
            }
        }
    for (int64_t u = 0; u < d->units; u++) {
        d->far_before[u + 1] += d->far_before[u];
        d->touched_before[u + 1] += d->touched_before[u];
    }
    d->rows.far_before = d->far_before;
    d->rows.touched_before = d->touched_before;
    d->rows.touched_first = first < past ? first : 0;
    d->rows.touched_past = past;
    d->rows.unit = d->unit;
    d->rows.units = d->units;
    return SACCADE_OK;
}

saccade_status dist_lay_out(saccade_dist *d, int32_t mask, saccade_error *err)
{
    const saccade_shard_options *o = &d->shards->options;
    const saccade_range *at;
    d->Q = o->Q;
    d->KV = o->KV;
    TRY(find_parts(d, err));
    for (int32_t i = 0, n = saccade_shard_keys(d->shards, d->transport.rank, &at); i < n; i++)
        d->n_keys += at[i].count;
    TRY(find_pieces(d, mask, 1, &d->in, err));
    TRY(find_pieces(d, mask, 0, &d->out, err));
    d->unit = unit_of(&d->in, o->chunk, d->KV, o->ranks);
    d->units = (d->KV + d->unit - 1) / d->unit;
    d->messages = calloc(8 * (size_t)o->ranks, sizeof *d->messages);
    FAIL_IF_NULL(d->messages);
    if (d->transport.exchange_on)
        TRY(find_far(d, err));
    return dist_list_held(d, err);
}

void dist_free_pieces(dist_pieces *pieces)
{
    free(pieces->begin);
    free(pieces->piece);
    free(pieces->keys);
}

void dist_free_layout(saccade_dist *d)
{
    dist_free_pieces(&d->in);
    dist_free_pieces(&d->out);
    free(d->part);
    free(d->messages);
    free(d->held);
    free(d->far_before);
    free(d->touched_before);
}
