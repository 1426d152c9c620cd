/* saccade_dist.h: attention over several ranks: processes, machines, or threads that play them.
 *
 * The rows of a sequence are cut into chunks and dealt to ranks; K and V lie where their rows
 * lie. A shard plan says which chunk goes where, so that every rank has as much to compute, and
 * which keys each rank has to get from which other: only those that its rows' masks touch.
 * Masks and scores always see positions of the whole sequence, never those of a shard.
 *
 * This is a header of its own because most users run on one device: saccade.h stays what one
 * sitting reads. Its structs that may grow follow the same rule. */
#ifndef SACCADE_DIST_H
#define SACCADE_DIST_H

#include "saccade.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- shard plans ------------------------------------------------------------------------- */

typedef struct saccade_shard_plan saccade_shard_plan;

/* Rows, or keys, [first, first + count) of the whole sequence. */
typedef struct saccade_range {
    int64_t first, count;
} saccade_range;

enum { SACCADE_MAX_RANKS = 1024, SACCADE_MAX_SHARD_MASKS = 64 };

typedef struct saccade_shard_options {
    size_t size;
    int32_t ranks; /* 1, the default, to SACCADE_MAX_RANKS */
    int32_t tile;  /* rows that a run takes together; 0: 128. saccade_plan_row_tile tells
                          * which keeps a plan's results those of one device, bit for bit */
    int64_t chunk; /* rows that stay together, a multiple of tile; 0: chosen */
    int64_t Q, KV; /* lengths; 0: the masks' */
    const saccade_block_mask *const *masks; /* all of one length: those of a model's layers */
    const int32_t *layers;                  /* how many layers have each mask; NULL: one each */
    int32_t n_masks;                        /* 0: every position counts */
} saccade_shard_options;
static inline void saccade_shard_options_init(saccade_shard_options *options)
{
    saccade_record_init(options, sizeof *options);
    options->ranks = 1;
}

/* A pure function of its arguments: every rank that calls it gets the same, and nothing is
 * exchanged. Masks are read and not kept. */
SACCADE_API saccade_status saccade_shard_plan_create(const saccade_shard_options *options,
                                                     saccade_shard_plan **out,
                                                     saccade_error *err);
SACCADE_API void saccade_shard_plan_destroy(saccade_shard_plan *plan);
/* What it was made for: ranks, tile, chunk as chosen, lengths and n_masks; no masks. */
SACCADE_API saccade_status saccade_shard_plan_options(const saccade_shard_plan *plan,
                                                      saccade_shard_options *options,
                                                      saccade_error *err);

/* Rows of Q (and of out, lse), and of K and V, that a rank holds, in the order in which they
 * lie there: rising. Neighbouring chunks are one range. Returns the number of ranges, -1 where
 * there is no such rank; borrowed until destroy. */
SACCADE_API int32_t saccade_shard_rows(const saccade_shard_plan *plan, int32_t rank,
                                       const saccade_range **ranges);
SACCADE_API int32_t saccade_shard_keys(const saccade_shard_plan *plan, int32_t rank,
                                       const saccade_range **ranges);
/* Keys held by `peer` that the rows of `rank` touch under the mask, rising; peer may be rank
 * itself. Without masks `mask` is 0. */
SACCADE_API int32_t saccade_shard_needs(const saccade_shard_plan *plan, int32_t mask,
                                        int32_t rank, int32_t peer,
                                        const saccade_range **ranges);

/* Sums over all masks, each as often as it has layers. Bytes that travel: keys x batch x Hkv x
 * (D + Dv) x bytes of an element. */
typedef struct saccade_shard_stats {
    size_t size;
    int64_t rows, keys;     /* that the rank holds */
    double area;            /* live positions over batch and heads, in PARTIAL blocks about */
    int64_t received, sent; /* keys, to and from others */
    int32_t peers;          /* that something is received from */
    double mean_area;       /* over ranks */
    double imbalance;       /* of all ranks: largest area / mean */
    double seconds;         /* time to make the plan */
} saccade_shard_stats;
static inline void saccade_shard_stats_init(saccade_shard_stats *stats)
{
    saccade_record_init(stats, sizeof *stats);
}
SACCADE_API saccade_status saccade_shard_get_stats(const saccade_shard_plan *plan, int32_t rank,
                                                   saccade_shard_stats *stats,
                                                   saccade_error *err);
/* Picture of one (b, h) of a mask whose rows have their ranks' colours (letters in text); mask
 * NULL: everything is live. As saccade_block_mask_render; free with saccade_free. */
SACCADE_API saccade_status saccade_shard_render(const saccade_shard_plan *plan,
                                                const saccade_block_mask *mask, int64_t b,
                                                int64_t h, saccade_picture format,
                                                int32_t columns, void **bytes, size_t *size,
                                                saccade_error *err);

#ifdef __cplusplus
}
#endif
#endif
