/* shard.h: which rank holds which rows and keys, and what it needs of the others'. Everything
 * here is arithmetic on the runs of block masks: nothing is computed and nothing travels. */
#ifndef SACCADE_DIST_SHARD_H
#define SACCADE_DIST_SHARD_H

#include "mask/mask.h"
#include "saccade_dist.h"

/* A list of ranges for each of `n` lists: list i is range[begin[i]] .. range[begin[i + 1]]. */
typedef struct shard_lists {
    int64_t *begin;
    saccade_range *range;
    int64_t n, capacity;
} shard_lists;

struct saccade_shard_plan {
    saccade_shard_options options; /* without masks */
    int64_t chunks, key_chunks;
    int32_t *owner, *key_owner;                /* [chunks], [key_chunks]: rank */
    shard_lists rows, keys;                    /* by rank */
    shard_lists needs;                         /* by (mask, rank, peer) */
    double *area;                              /* [ranks] */
    int64_t *received, *sent;                  /* [ranks] keys, layers times */
    int32_t block_kv[SACCADE_MAX_SHARD_MASKS]; /* of masks with imported blocks; else 0 */
    double seconds;
};

/* What the plan is made from: the masks' runs. Borrowed. */
typedef struct shard_source {
    int32_t ranks, n_masks; /* n_masks of 1 and no runs: everything is live */
    int64_t Q, KV, chunk, chunks, key_chunks;
    int64_t unit; /* keys: all blocks of keys and all chunks begin at a multiple of it */
    const saccade_block_mask *masks[SACCADE_MAX_SHARD_MASKS];
    const mask_runs *runs[SACCADE_MAX_SHARD_MASKS];
    double weight[SACCADE_MAX_SHARD_MASKS]; /* layers, times how many of the largest batch and
                                             * heads among the masks share a row of runs */
    int32_t layers[SACCADE_MAX_SHARD_MASKS];
    const double *area; /* [chunks] */
} shard_source;

/* ---- shard_area.c ---- */

/* Live positions of each chunk of rows, over masks, layers, batch and heads. */
saccade_status shard_areas(const shard_source *source, double *area, saccade_error *err);

/* ---- shard_balance.c ---- */

/* Chunk to rank; key chunks follow the rows where lengths are equal. Memory for what was tried
 * is taken and given back. */
saccade_status shard_balance(const shard_source *source, int32_t *owner, int32_t *key_owner,
                             saccade_error *err);

/* ---- shard_needs.c ---- */

/* live[u] for units of keys: what the rows of a rank's chunks touch under one mask. */
void shard_touched(const shard_source *source, int32_t mask, const int32_t *owner, int32_t rank,
                   int32_t *live);
/* Keys that travel under these owners, over masks, layers times; scratch: a number per unit and
 * one more. */
int64_t shard_traffic(const shard_source *source, const int32_t *owner,
                      const int32_t *key_owner, int32_t *scratch);
/* Fills plan->needs, received and sent. */
saccade_status shard_find_needs(const shard_source *source, saccade_shard_plan *plan,
                                saccade_error *err);
/* Appends to the list under construction, joining neighbours; 0: no memory. */
int shard_add(shard_lists *lists, int64_t list, int64_t first, int64_t count);
void shard_lists_free(shard_lists *lists);

#endif
