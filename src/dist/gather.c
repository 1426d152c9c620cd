/* Gathering: the keys that this rank's rows touch, from all ranks, into one pool of rows
 * [kv heads][dim]. What comes from a peer lies together, batch by batch, as it was packed
 * there, so it is received where it stays; the chunk table says which key each row is. */
#include "dist/dist.h"

#include "base/places.h"
#include "base/status.h"
#include "mask/mask_build.h"

#include <stdlib.h>
#include <string.h>

int64_t dist_pool_row(const dist_pieces *pieces, int64_t B, int32_t peer, int64_t b)
{
    int64_t before = 0;
    for (int32_t p = 0; p < peer; p++)
        before += pieces->keys[p];
    return before * B + b * pieces->keys[peer];
}

/* ---- memory ---- */

size_t dist_row_bytes(const saccade_dist *d, int64_t dim)
{
    const plan_problem *p = &d->plan->problem;
    return (size_t)(p->sizes.Hkv * dim) * saccade_dtype_bytes(p->kv_dtype);
}

dist_memory dist_memory_of(const saccade_dist *d, int64_t B)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const size_t in = (size_t)(B * d->in.all), out = (size_t)(B * d->out.all);
    dist_memory m = {0};
    place_lines((size_t)(d->units + 1) * sizeof(int32_t), &m.touched, &m.bytes);
    place_lines((size_t)(B * d->units) * sizeof(int32_t), &m.table, &m.bytes);
    place_lines((in ? in : 1) * dist_row_bytes(d, s->D), &m.k_pool, &m.bytes);
    place_lines((in ? in : 1) * dist_row_bytes(d, s->Dv), &m.v_pool, &m.bytes);
    place_lines(out * dist_row_bytes(d, s->D), &m.k_sent, &m.bytes);
    place_lines(out * dist_row_bytes(d, s->Dv), &m.v_sent, &m.bytes);
    return m;
}

/* ---- packing ---- */

/* Pieces of one peer, all batches, as rows [kv heads][dim]. */
static void pack(const dist_pieces *pieces, int32_t peer, const saccade_tensor *t, char *to)
{
    const size_t element = saccade_dtype_bytes(t->dtype);
    const size_t bytes = (size_t)t->shape[3] * element;
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t i = pieces->begin[peer]; i < pieces->begin[peer + 1]; i++) {
            const dist_piece *piece = &pieces->piece[i];
            for (int64_t j = 0; j < piece->count; j++)
                for (int64_t g = 0; g < t->shape[1]; g++, to += bytes)
                    memcpy(to,
                           (const char *)t->data
                               + (b * t->stride[0] + g * t->stride[1]
                                  + (piece->local + j) * t->stride[2])
                                     * (int64_t)element,
                           bytes);
        }
}

/* ---- the table ---- */

void dist_fill_table(const dist_pieces *in, int32_t ranks, int64_t B, int64_t first,
                     int64_t unit, int64_t units, int32_t *table)
{
    for (int64_t i = 0; i < B * units; i++)
        table[i] = -1;
    for (int32_t p = 0; p < ranks; p++)
        for (int64_t b = 0; b < B; b++) {
            int64_t row = dist_pool_row(in, B, p, b);
            for (int64_t i = in->begin[p]; i < in->begin[p + 1]; i++) {
                const dist_piece *piece = &in->piece[i];
                for (int64_t j = 0; j < piece->count; j += unit)
                    table[b * units + (piece->first - first + j) / unit] = (int32_t)(row + j);
                row += piece->count;
            }
        }
}

static void fill_table(const saccade_dist *d, int64_t B, int32_t *table)
{
    dist_fill_table(&d->in, d->transport.ranks, B, 0, d->unit, d->units, table);
}

saccade_tensor dist_pool_of(const saccade_dist *d, int64_t B, int64_t keys, int64_t dim,
                            char *data)
{
    const plan_problem *p = &d->plan->problem;
    const int64_t rows = B * keys > 0 ? B * keys : 1;
    saccade_tensor t =
        saccade_tensor_of(data, p->kv_dtype, 4, (int64_t[]){B, p->sizes.Hkv, rows, dim});
    t.stride[0] = 0;
    t.stride[1] = dim;
    t.stride[2] = p->sizes.Hkv * dim;
    return t;
}

/* ---- all of it ---- */

void dist_list_keys(const saccade_dist *d, const dist_pieces *in, const dist_pieces *out,
                    int64_t B, const saccade_tensor *t, int64_t dim, char *pool, char *sent,
                    saccade_message *messages, int32_t *n_sends, int32_t *n_receives)
{
    const int32_t ranks = d->transport.ranks, me = d->transport.rank;
    const size_t bytes = dist_row_bytes(d, dim);
    saccade_message *sends = messages, *receives = messages + 2 * (size_t)ranks;
    for (int32_t p = 0; p < ranks; p++) {
        char *from = sent + (size_t)dist_pool_row(out, B, p, 0) * bytes;
        char *to = pool + (size_t)dist_pool_row(in, B, p, 0) * bytes;
        if (p == me) {
            if (in->keys[p])
                pack(in, p, t, to);
            continue;
        }
        if (out->keys[p]) {
            pack(out, p, t, from);
            sends[(*n_sends)++] =
                (saccade_message){from, (size_t)(B * out->keys[p]) * bytes, p};
        }
        if (in->keys[p])
            receives[(*n_receives)++] =
                (saccade_message){to, (size_t)(B * in->keys[p]) * bytes, p};
    }
}

saccade_status dist_gather(saccade_dist *d, int64_t B, const saccade_tensor *k,
                           const saccade_tensor *v, char *memory, dist_keys *out,
                           saccade_error *err)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const dist_memory m = dist_memory_of(d, B);
    int32_t *table = (int32_t *)(void *)(memory + m.table), n_sends = 0, n_receives = 0;
    dist_list_keys(d, &d->in, &d->out, B, k, s->D, memory + m.k_pool, memory + m.k_sent,
                   d->messages, &n_sends, &n_receives);
    dist_list_keys(d, &d->in, &d->out, B, v, s->Dv, memory + m.v_pool, memory + m.v_sent,
                   d->messages, &n_sends, &n_receives);
    TRY(dist_exchange(&d->transport, d->messages, n_sends,
                      d->messages + 2 * (size_t)d->transport.ranks, n_receives, err));
    fill_table(d, B, table);
    out->k = dist_pool_of(d, B, d->in.all, s->D, memory + m.k_pool);
    out->v = dist_pool_of(d, B, d->in.all, s->Dv, memory + m.v_pool);
    out->chunks = (plan_chunks){.first = table,
                                .row_stride = d->units,
                                .count = (int32_t)d->units,
                                .size = (int32_t)d->unit};
    return SACCADE_OK;
}

/* ---- what is missing ---- */

/* Units that rows of blocks [first, past) of all heads touch: where it changes, how much. */
static void mark_rows(const saccade_dist *d, const mask_runs *runs, int64_t first, int64_t past,
                      int32_t *touched)
{
    for (int64_t head = 0; head < runs->B * runs->H; head++)
        for (int64_t row = first; row < past; row++) {
            const int64_t at = head * runs->rows + row;
            for (int64_t i = runs->row_begin[at]; i < runs->row_begin[at + 1]; i++) {
                const int64_t j0 = (int64_t)runs->runs[i].first * runs->block_kv;
                const int64_t j1 = j0 + (int64_t)runs->runs[i].count * runs->block_kv;
                touched[j0 / d->unit]++;
                touched[((j1 < d->KV ? j1 : d->KV) + d->unit - 1) / d->unit]--;
            }
        }
}

/* touched: room for units + 1. */
static saccade_status check_keys(const saccade_dist *d, const saccade_block_mask *mask,
                                 const int32_t *table, int32_t *touched, saccade_error *err)
{
    int32_t sum = 0;
    memset(touched, 0, (size_t)(d->units + 1) * sizeof *touched);
    touched[0] = mask == NULL;
    for (int32_t i = 0; mask && i < d->rows.n; i++) {
        const mask_runs *runs = mask_own_runs(mask);
        const int64_t past = d->part[i].first + d->part[i].count - 1;
        mark_rows(d, runs, d->part[i].first / runs->block_q, past / runs->block_q + 1, touched);
    }
    for (int64_t u = 0; u < d->units; u++) {
        sum += touched[u];
        FAIL_AT(
            sum > 0 && table[u] < 0, SACCADE_EINVAL, "block_mask", 0, 0,
            "got %s keys %lld and on, which the shard plan leaves out, expected the mask that "
            "it was made from",
            mask ? "one that needs" : "none, so that rows see", (long long)(u * d->unit));
    }
    return SACCADE_OK;
}

saccade_status dist_check_keys(const saccade_dist *d, const saccade_block_mask *mask,
                               char *memory, saccade_error *err)
{
    const dist_memory m = dist_memory_of(d, 1);
    return check_keys(d, mask, (const int32_t *)(const void *)(memory + m.table),
                      (int32_t *)(void *)(memory + m.touched), err);
}

saccade_status dist_list_held(saccade_dist *d, saccade_error *err)
{
    d->held = calloc(2 * (size_t)d->units + 1, sizeof *d->held);
    FAIL_IF_NULL(d->held);
    fill_table(d, 1, d->held);
    return SACCADE_OK;
}

saccade_status dist_check_held(const saccade_dist *d, const saccade_block_mask *mask,
                               saccade_error *err)
{
    return check_keys(d, mask, d->held, d->held + d->units, err);
}
