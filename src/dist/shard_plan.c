/* Shard plans: options checked, masks' runs read, chunks dealt, needs found, and what callers
 * ask of the result. */
#include "dist/shard.h"

#include "base/clock.h"
#include "base/integers.h"
#include "base/record.h"
#include "base/status.h"
#include "mask/mask_build.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_TILE = 128, CHUNKS_PER_RANK = 64 };
static const int64_t LENGTH_MAX = (int64_t)1 << 30;

/* ---- options ---- */

static saccade_status check_length(const char *name, int64_t n, saccade_error *err)
{
    FAIL_AT(n < 1 || n > LENGTH_MAX, SACCADE_EINVAL, name, 0, 0,
            "got %lld, expected 1 to 2^30, or a mask that says it", (long long)n);
    return SACCADE_OK;
}

static saccade_status check_masks(saccade_shard_options *o, saccade_error *err)
{
    FAIL_AT(o->n_masks < 0 || o->n_masks > SACCADE_MAX_SHARD_MASKS || (o->n_masks && !o->masks),
            SACCADE_EINVAL, "masks", 0, 0, "got %d%s, expected 0 to %d and their array",
            o->n_masks, o->masks ? "" : " and NULL", SACCADE_MAX_SHARD_MASKS);
    for (int32_t i = 0; i < o->n_masks; i++) {
        FAIL_AT(!o->masks[i], SACCADE_EINVAL, "masks", 0, 0, "got NULL in entry %d", i);
        const saccade_sizes *s = &mask_get_view(o->masks[i])->sizes;
        o->Q = o->Q ? o->Q : s->Q;
        o->KV = o->KV ? o->KV : s->KV;
        FAIL_AT(s->Q != o->Q || s->KV != o->KV, SACCADE_EINVAL, "masks", 0, 0,
                "got one of %lld x %lld positions in entry %d, expected %lld x %lld",
                (long long)s->Q, (long long)s->KV, i, (long long)o->Q, (long long)o->KV);
        const int32_t layers = o->layers ? o->layers[i] : 1;
        FAIL_AT(layers < 1 || layers > 100000, SACCADE_EINVAL, "layers", 0, 0,
                "got %d in entry %d, expected 1 to 100000", layers, i);
    }
    return SACCADE_OK;
}

/* Rows that a chunk has where the caller leaves it open: enough chunks to make ranks even, and
 * no more, for each may bring a stretch of keys of its own. */
static int64_t chunk_for(const saccade_shard_options *o)
{
    const int64_t rows = o->Q / ((int64_t)o->ranks * CHUNKS_PER_RANK) / o->tile * o->tile;
    return rows < o->tile ? o->tile : rows;
}

static saccade_status read_options(const saccade_shard_options *given, saccade_shard_options *o,
                                   saccade_error *err)
{
    saccade_shard_options_init(o);
    TRY(RECORD_READ(o, given, "shard options"));
    FAIL_AT(o->ranks < 1 || o->ranks > SACCADE_MAX_RANKS, SACCADE_EINVAL, "ranks", 0, 0,
            "got %d, expected 1 to %d", o->ranks, SACCADE_MAX_RANKS);
    TRY(check_masks(o, err));
    TRY(check_length("Q", o->Q, err));
    TRY(check_length("KV", o->KV, err));
    FAIL_AT(o->tile < 0 || o->tile > 65536, SACCADE_EINVAL, "tile", 0, 0,
            "got %d, expected 1 to 65536 rows, or 0 for %d", o->tile, DEFAULT_TILE);
    o->tile = o->tile ? o->tile : DEFAULT_TILE;
    FAIL_AT(o->chunk < 0 || o->chunk > LENGTH_MAX || o->chunk % o->tile, SACCADE_EINVAL,
            "chunk", 0, 0, "got %lld, expected a multiple of the tile's %d rows, or 0",
            (long long)o->chunk, o->tile);
    o->chunk = o->chunk ? o->chunk : chunk_for(o);
    FAIL_AT(ceil_div(o->Q > o->KV ? o->Q : o->KV, o->chunk) > 1 << 20, SACCADE_ELIMIT, "chunk",
            0, 0, "got %lld, expected at most 2^20 chunks", (long long)o->chunk);
    return SACCADE_OK;
}

/* The largest batch and heads of the masks: one of a single batch, or head, is every one's. */
static saccade_sizes largest_of(const saccade_shard_options *o)
{
    saccade_sizes most = {.B = 1, .H = 1};
    for (int32_t i = 0; i < o->n_masks; i++) {
        const saccade_sizes *sizes = &mask_get_view(o->masks[i])->sizes;
        most.B = larger(most.B, sizes->B);
        most.H = larger(most.H, sizes->H);
    }
    return most;
}

static void read_masks(const saccade_shard_options *o, shard_source *s)
{
    const saccade_sizes most = largest_of(o);
    s->n_masks = o->n_masks ? o->n_masks : 1;
    s->layers[0] = 1;
    s->weight[0] = 1;
    s->unit = o->chunk;
    for (int32_t i = 0; i < o->n_masks; i++) {
        const mask_runs *runs = mask_own_runs(o->masks[i]);
        s->masks[i] = o->masks[i];
        s->runs[i] = runs;
        s->layers[i] = o->layers ? o->layers[i] : 1;
        s->weight[i] = s->layers[i] * ((double)most.B / (double)runs->B)
                       * ((double)most.H / (double)runs->H);
        s->unit = common_divisor(s->unit, runs->block_kv);
    }
}

/* ---- making ---- */

/* Chunks as ranges of their owners. */
static saccade_status list_chunks(const shard_source *s, const int32_t *owner, int64_t chunks,
                                  int64_t length, shard_lists *out, saccade_error *err)
{
    out->begin = calloc((size_t)s->ranks + 1, sizeof *out->begin);
    FAIL_IF_NULL(out->begin);
    for (int32_t r = 0; r < s->ranks; r++) {
        out->begin[r] = out->n;
        for (int64_t c = 0; c < chunks; c++) {
            const int64_t first = c * s->chunk, left = length - first;
            FAIL_IF(owner[c] == r
                        && !shard_add(out, r, first, left < s->chunk ? left : s->chunk),
                    SACCADE_ENOMEM, "out of memory");
        }
        out->begin[r + 1] = out->n;
    }
    return SACCADE_OK;
}

static saccade_status take_memory(const shard_source *s, saccade_shard_plan *p,
                                  saccade_error *err)
{
    const size_t ranks = (size_t)s->ranks;
    p->owner = calloc((size_t)s->chunks, sizeof *p->owner);
    p->key_owner = calloc((size_t)s->key_chunks, sizeof *p->key_owner);
    p->area = calloc(ranks, sizeof *p->area);
    p->received = calloc(2 * ranks, sizeof *p->received);
    p->needs.begin = calloc((size_t)s->n_masks * ranks * ranks + 1, sizeof *p->needs.begin);
    FAIL_IF(!p->owner || !p->key_owner || !p->area || !p->received || !p->needs.begin,
            SACCADE_ENOMEM, "out of memory");
    p->sent = p->received + ranks;
    return SACCADE_OK;
}

static saccade_status fill_plan(shard_source *s, saccade_shard_plan *p, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    double *area = malloc((size_t)s->chunks * sizeof *area);
    FAIL_IF_NULL(area);
    s->area = area;
    TRY_GOTO(shard_areas(s, area, err));
    TRY_GOTO(take_memory(s, p, err));
    TRY_GOTO(shard_balance(s, p->owner, p->key_owner, err));
    for (int64_t c = 0; c < s->chunks; c++)
        p->area[p->owner[c]] += area[c];
    TRY_GOTO(list_chunks(s, p->owner, s->chunks, s->Q, &p->rows, err));
    TRY_GOTO(list_chunks(s, p->key_owner, s->key_chunks, s->KV, &p->keys, err));
    status = shard_find_needs(s, p, err);
out:
    free(area);
    return status;
}

saccade_status saccade_shard_plan_create(const saccade_shard_options *options,
                                         saccade_shard_plan **out, saccade_error *err)
{
    const int64_t start = clock_ns();
    saccade_shard_options o;
    FAIL_AT(!options || !out, SACCADE_EINVAL, "shard plan", 0, 0,
            "got NULL, expected options and a result");
    TRY(read_options(options, &o, err));
    shard_source source = {.ranks = o.ranks,
                           .Q = o.Q,
                           .KV = o.KV,
                           .chunk = o.chunk,
                           .chunks = ceil_div(o.Q, o.chunk),
                           .key_chunks = ceil_div(o.KV, o.chunk)};
    read_masks(&o, &source);
    saccade_shard_plan *p = calloc(1, sizeof *p);
    FAIL_IF_NULL(p);
    for (int32_t i = 0; i < o.n_masks; i++)
        p->block_kv[i] = mask_get_view(o.masks[i])->imported_block_kv;
    o.masks = NULL;
    o.layers = NULL;
    p->options = o;
    p->chunks = source.chunks;
    p->key_chunks = source.key_chunks;
    const saccade_status status = fill_plan(&source, p, err);
    p->seconds = (double)(clock_ns() - start) * 1e-9;
    if (status == SACCADE_OK)
        *out = p;
    else
        saccade_shard_plan_destroy(p);
    return status;
}

void saccade_shard_plan_destroy(saccade_shard_plan *plan)
{
    if (!plan)
        return;
    shard_lists_free(&plan->rows);
    shard_lists_free(&plan->keys);
    shard_lists_free(&plan->needs);
    free(plan->owner);
    free(plan->key_owner);
    free(plan->area);
    free(plan->received);
    free(plan);
}

/* ---- asking ---- */

saccade_status saccade_shard_plan_options(const saccade_shard_plan *plan,
                                          saccade_shard_options *options, saccade_error *err)
{
    FAIL_AT(!plan || !options, SACCADE_EINVAL, "shard plan", 0, 0,
            "got NULL, expected a plan and options");
    TRY(record_check_size(options, "shard options", err));
    record_write(options, &plan->options, sizeof plan->options);
    return SACCADE_OK;
}

static int32_t list_at(const shard_lists *lists, int64_t list, const saccade_range **ranges)
{
    *ranges = lists->n ? lists->range + lists->begin[list] : NULL;
    return (int32_t)(lists->begin[list + 1] - lists->begin[list]);
}

static int has_rank(const saccade_shard_plan *plan, int32_t rank)
{
    return plan && rank >= 0 && rank < plan->options.ranks;
}

int32_t saccade_shard_rows(const saccade_shard_plan *plan, int32_t rank,
                           const saccade_range **ranges)
{
    return has_rank(plan, rank) && ranges ? list_at(&plan->rows, rank, ranges) : -1;
}

int32_t saccade_shard_keys(const saccade_shard_plan *plan, int32_t rank,
                           const saccade_range **ranges)
{
    return has_rank(plan, rank) && ranges ? list_at(&plan->keys, rank, ranges) : -1;
}

int32_t saccade_shard_needs(const saccade_shard_plan *plan, int32_t mask, int32_t rank,
                            int32_t peer, const saccade_range **ranges)
{
    if (!has_rank(plan, rank) || !has_rank(plan, peer) || !ranges || mask < 0
        || mask >= (plan->options.n_masks ? plan->options.n_masks : 1))
        return -1;
    const int64_t ranks = plan->options.ranks;
    return list_at(&plan->needs, (mask * ranks + rank) * ranks + peer, ranges);
}

static int64_t count_of(const shard_lists *lists, int64_t list)
{
    int64_t n = 0;
    for (int64_t i = lists->begin[list]; i < lists->begin[list + 1]; i++)
        n += lists->range[i].count;
    return n;
}

static int32_t count_peers(const saccade_shard_plan *plan, int64_t rank)
{
    const int64_t ranks = plan->options.ranks;
    const int64_t masks = plan->options.n_masks ? plan->options.n_masks : 1;
    int32_t peers = 0;
    for (int64_t peer = 0; peer < ranks; peer++) {
        int64_t keys = 0;
        for (int64_t m = 0; m < masks; m++)
            keys += count_of(&plan->needs, (m * ranks + rank) * ranks + peer);
        peers += peer != rank && keys > 0;
    }
    return peers;
}

saccade_status saccade_shard_get_stats(const saccade_shard_plan *plan, int32_t rank,
                                       saccade_shard_stats *stats, saccade_error *err)
{
    saccade_shard_stats own;
    double all = 0, most = 0;
    FAIL_AT(!plan || !stats, SACCADE_EINVAL, "shard stats", 0, 0,
            "got NULL, expected a plan and statistics");
    FAIL_AT(!has_rank(plan, rank), SACCADE_EINVAL, "rank", 0, 0, "got %d, expected 0 to %d",
            rank, plan->options.ranks - 1);
    TRY(record_check_size(stats, "shard stats", err));
    saccade_shard_stats_init(&own);
    for (int32_t r = 0; r < plan->options.ranks; r++) {
        all += plan->area[r];
        most = plan->area[r] > most ? plan->area[r] : most;
    }
    own.rows = count_of(&plan->rows, rank);
    own.keys = count_of(&plan->keys, rank);
    own.area = plan->area[rank];
    own.received = plan->received[rank];
    own.sent = plan->sent[rank];
    own.peers = count_peers(plan, rank);
    own.mean_area = all / plan->options.ranks;
    own.imbalance = all > 0 ? most / own.mean_area : 1;
    own.seconds = plan->seconds;
    record_write(stats, &own, sizeof own);
    return SACCADE_OK;
}
