/* Shard plans of any mask in runs: seven bytes choose lengths, ranks, tile, chunk and block
 * sizes, the rest is the text. Rows and keys must be dealt once each, and of every live block
 * the ranks of its rows must be told of its keys, from who holds them, and of no others. */
#include "saccade_dist.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 96, HEADER = 7, HEADS = 2, RANKS = 6 };

typedef struct shape {
    saccade_sizes sizes;
    int32_t ranks, tile, block_q, block_kv;
    int64_t chunk;
} shape;

static void fail(const char *what, int64_t at)
{
    fprintf(stderr, "fuzz_shard: %s at %lld\n", what, (long long)at);
    abort();
}

static saccade_block_mask *mask_of(const unsigned char *text, size_t size, const shape *s,
                                   saccade_mod **mod)
{
    saccade_mod *generic = NULL;
    saccade_block_mask *mask = NULL;
    saccade_block_mask_options o;
    saccade_block_mask_options_init(&o);
    o.block_q = s->block_q;
    o.block_kv = s->block_kv;
    *mod = NULL;
    if (saccade_mod_parse(SACCADE_MASK, (const char *)text, size, &generic, NULL) != SACCADE_OK)
        return NULL;
    if (saccade_mod_bind(generic, NULL, 0, mod, NULL) == SACCADE_OK)
        (void)saccade_block_mask_create(NULL, *mod, &s->sizes, NULL, NULL, 0, &o, &mask, NULL);
    saccade_mod_destroy(generic);
    return mask;
}

/* Who holds each row or key. */
static void owners(const saccade_shard_plan *plan, const shape *s, int keys, int32_t *owner)
{
    const int64_t length = keys ? s->sizes.KV : s->sizes.Q;
    for (int64_t j = 0; j < length; j++)
        owner[j] = -1;
    for (int32_t r = 0; r < s->ranks; r++) {
        const saccade_range *at;
        const int32_t n =
            keys ? saccade_shard_keys(plan, r, &at) : saccade_shard_rows(plan, r, &at);
        for (int32_t i = 0; i < n; i++)
            for (int64_t j = at[i].first; j < at[i].first + at[i].count; j++) {
                if (j < 0 || j >= length || owner[j] >= 0)
                    fail("dealt twice, or not there", j);
                owner[j] = r;
            }
    }
    for (int64_t j = 0; j < length; j++)
        if (owner[j] < 0)
            fail("dealt to nobody", j);
}

static void touch(const saccade_block_mask *mask, const shape *s, int64_t row, uint8_t *touched)
{
    for (int64_t bh = 0; bh < s->sizes.B * s->sizes.H; bh++) {
        const saccade_run *run;
        const int64_t n =
            saccade_block_mask_row(mask, bh / HEADS, bh % HEADS, row / s->block_q, 0, &run);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = (int64_t)run[i].first * s->block_kv;
                 j < ((int64_t)run[i].first + run[i].count) * s->block_kv && j < s->sizes.KV;
                 j++)
                touched[j] = 1;
    }
}

static void check_rank(const saccade_shard_plan *plan, const saccade_block_mask *mask,
                       const shape *s, const int32_t *owner, const int32_t *key_owner,
                       int32_t rank)
{
    uint8_t touched[MOST] = {0};
    for (int64_t q = 0; q < s->sizes.Q; q++)
        if (owner[q] == rank)
            touch(mask, s, q, touched);
    for (int32_t peer = 0; peer < s->ranks; peer++) {
        const saccade_range *at;
        const int32_t n = saccade_shard_needs(plan, 0, rank, peer, &at);
        for (int32_t i = 0; i < n; i++)
            for (int64_t j = at[i].first; j < at[i].first + at[i].count; j++) {
                if (!touched[j] || key_owner[j] != peer)
                    fail("told of a key that is not touched, or elsewhere", j);
                touched[j] = 0;
            }
    }
    for (int64_t j = 0; j < s->sizes.KV; j++)
        if (touched[j])
            fail("not told of a key", j);
}

static void check_plan(const saccade_shard_plan *plan, const saccade_block_mask *mask,
                       const shape *s)
{
    int32_t owner[MOST], key_owner[MOST];
    owners(plan, s, 0, owner);
    owners(plan, s, 1, key_owner);
    for (int32_t r = 0; r < s->ranks; r++)
        check_rank(plan, mask, s, owner, key_owner, r);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    saccade_shard_plan *plan = NULL;
    saccade_shard_options o;
    saccade_mod *mod;
    if (size < HEADER || size > 300)
        return 0;
    shape s = {.sizes = {2, HEADS, 1, 1 + data[0] % MOST, 1 + data[1] % MOST, 8, 8},
               .ranks = 1 + data[2] % RANKS,
               .tile = 1 + data[3] % 40,
               .block_q = 1 + data[5] % 40,
               .block_kv = 1 + data[6] % 40};
    s.chunk = data[4] % 4 * s.tile;
    saccade_block_mask *mask = mask_of(data + HEADER, size - HEADER, &s, &mod);
    const saccade_block_mask *masks[] = {mask};
    saccade_shard_options_init(&o);
    o.masks = masks;
    o.n_masks = 1;
    o.ranks = s.ranks;
    o.tile = s.tile;
    o.chunk = s.chunk;
    if (mask && saccade_shard_plan_create(&o, &plan, NULL) != SACCADE_OK)
        fail("no plan", 0);
    if (plan)
        check_plan(plan, mask, &s);
    saccade_shard_plan_destroy(plan);
    saccade_block_mask_destroy(mask);
    saccade_mod_destroy(mod);
    return 0;
}
