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

/* ---- transports: how bytes get from rank to rank --------------------------------------- */

/* Bytes that this rank sends to, or receives from, another. */
typedef struct saccade_message {
    void *data; /* only read when sent */
    size_t bytes;
    int32_t peer;
} saccade_message;

/* All of these sends and receives at once; returns 0 when all are done and `data` may be used
 * again. Messages from one rank to another arrive in the order given; one of other bytes than
 * its receiver expects is a failure (SACCADE_OTHER_BYTES, where a transport can tell).
 * Anything but 0 is a failure; so is whatever is not done after `seconds`: it ends the
 * transport, on every rank. */
enum { SACCADE_OTHER_BYTES = 2 };
typedef int (*saccade_exchange)(void *user, const saccade_message *sends, int32_t n_sends,
                                const saccade_message *receives, int32_t n_receives,
                                double seconds);
/* This rank has failed: exchanges of all ranks, under way or to come, fail at once. */
typedef void (*saccade_abort)(void *user);

/* The same of device memory, put on a stream: returns 0 when it is queued; what comes on the
 * stream afterwards finds it done. If it is not done after `seconds` the transport ends: after
 * a synchronize the next call on the transport then reports EPEER, and what was computed after
 * the exchange must not be used. */
typedef int (*saccade_exchange_on)(void *user, const saccade_message *sends, int32_t n_sends,
                                   const saccade_message *receives, int32_t n_receives,
                                   void *stream, double seconds);

/* One rank's end. Reductions are made of exchanges by the library, in the order of ranks, so
 * that no engine's own order shows in results. */
typedef struct saccade_transport {
    size_t size;
    int32_t rank, ranks;
    void *user;
    saccade_exchange exchange;
    saccade_abort abort;             /* NULL: others find out when their time is up */
    double seconds;                  /* an exchange may take, 60 by default */
    saccade_exchange_on exchange_on; /* NULL: no device memory */
    int32_t caller_only; /* exchange is for the threads that call the library; else in staged
                          * mode one of its own calls it, and nobody else meanwhile */
} saccade_transport;
static inline void saccade_transport_init(saccade_transport *transport)
{
    saccade_record_init(transport, sizeof *transport);
    transport->ranks = 1;
    transport->seconds = 60;
}

/* Ranks, 1 to SACCADE_MAX_RANKS, that are threads of one process. transport() fills the end of
 * one rank, which borrows the ranks until destroy, so what uses one ends before; each end is
 * used by one thread at a time. */
typedef struct saccade_ranks saccade_ranks;
SACCADE_API saccade_status saccade_ranks_create(int32_t ranks, saccade_ranks **out,
                                                saccade_error *err);
SACCADE_API saccade_status saccade_ranks_transport(saccade_ranks *ranks, int32_t rank,
                                                   saccade_transport *out, saccade_error *err);
SACCADE_API void saccade_ranks_destroy(saccade_ranks *ranks);

/* Ranks that have a GPU each, over NCCL's C interface, found at run time (libnccl.so.2;
 * EBACKEND where it is not). One rank makes the id and gives it to the others; then all create
 * at the same time, each with its own device, or have an error when `seconds` of *out have
 * passed. Fills rank, ranks, user and functions of an initialised transport; host memory goes
 * through the device. An exchange on a stream has `seconds` from when it is queued, or from
 * when the one before it was done; streams that capture a CUDA graph are refused (EINVAL). What
 * fails later, or is not done in time, ends the transport on this rank; other ranks find out
 * when their time is up. destroy is called by all ranks at about the same time: NCCL waits
 * there for those of one host. It waits at most `seconds` of *out for exchanges under way and
 * as long for the others, and for nothing after a failure. */
typedef struct saccade_nccl_id {
    char bytes[128];
} saccade_nccl_id;
SACCADE_API saccade_status saccade_nccl_make_id(saccade_nccl_id *out, saccade_error *err);
SACCADE_API saccade_status saccade_nccl_create(const saccade_nccl_id *id, int32_t rank,
                                               int32_t ranks, int32_t device,
                                               saccade_transport *out, saccade_error *err);
SACCADE_API void saccade_nccl_destroy(saccade_transport *transport);

/* ---- attention over ranks ---------------------------------------------------------------- */

/* One rank's part of a plan. */
typedef struct saccade_dist saccade_dist;

/* Rows that runs of these sizes take together: what saccade_shard_options.tile is to be a
 * multiple of. 0: the plan's back end cannot compute some rows of a sequence alone, or no run
 * can have these sizes. */
SACCADE_API int64_t saccade_plan_row_tile(const saccade_plan *plan, const saccade_sizes *sizes);

/* Called by all ranks at the same time, with equal problems and shard plans (EINVAL if not),
 * whose chunks are whole tiles of runs of some batch (saccade_plan_row_tile; EINVAL if not);
 * `mask` is the problem's among those of the shard plan, and every run is given that block
 * mask, as the plan leaves out what it masks. The shard plan and what the transport
 * points to are borrowed until destroy. Runs on CPUs, and on CUDA with a transport that has
 * exchange_on: there prepare comes first, with mask NULL if there is none. */
SACCADE_API saccade_status saccade_dist_create(saccade_context *context,
                                               const saccade_problem *problem,
                                               const saccade_shard_plan *shards, int32_t mask,
                                               const saccade_transport *transport,
                                               saccade_dist **out, saccade_error *err);
/* The same in staged mode: a run takes the sequence's keys by windows of `keys` of them (0:
 * about an eighth; rounded up to whole blocks, at most all), gets those of the next while it
 * computes, and adds a window's result to what it has, in f32. Keys take the memory of two
 * windows, whatever the mask touches. Results depend on the windows, in last bits, and are
 * the same every time, also gradients. prepare comes first with each block mask, and again
 * when it was updated. Windows are whole numbers of the blocks of a mask by index tensors.
 * On GPUs kv_offset and kv_len are numbers on the host. */
SACCADE_API saccade_status saccade_dist_create_staged(saccade_context *context,
                                                      const saccade_problem *problem,
                                                      const saccade_shard_plan *shards,
                                                      int32_t mask, int64_t keys,
                                                      const saccade_transport *transport,
                                                      saccade_dist **out, saccade_error *err);
/* Before its shard plan and its transport, which it borrows. */
SACCADE_API void saccade_dist_destroy(saccade_dist *dist);
/* Bytes of workspace of a forward run of batch B; SIZE_MAX where no run can have it. */
SACCADE_API size_t saccade_dist_workspace(const saccade_dist *dist, int64_t B);
/* Before the first run with a block mask, which is of the whole sequence. A mask that is
 * refused (EINVAL) is so on all ranks; any other failure ends the transport. */
SACCADE_API saccade_status saccade_dist_prepare(const saccade_dist *dist,
                                                const saccade_block_mask *mask,
                                                saccade_error *err);
/* saccade_forward with q, out, lse, row_max and sinks that each row has of its own of this
 * rank's rows, and k, v of its keys, in the order of saccade_shard_rows and _keys; NULL
 * where it holds none. Positions, captures and the block mask are those of the whole
 * sequence, equal on all ranks. Called by all ranks at the same time. Gets the keys that its
 * rows touch, then computes: out, lse and row_max are those of one device, bit for bit.
 * Allocates nothing (but what the transport does; on a GPU the first run of a batch size
 * makes room for keys of the whole sequence, which stays). On a GPU runs of one saccade_dist
 * follow each other on one stream, and what needs no keys of others is computed while they
 * travel.
 * EPEER: another rank failed or did not answer in time. After any failure the transport
 * has ended. */
SACCADE_API saccade_status saccade_dist_forward(saccade_dist *dist,
                                                const saccade_forward_args *args,
                                                saccade_error *err);

/* saccade_backward likewise, for problems that name gradients: d_q of this rank's rows, d_k and
 * d_v of its keys, added up over ranks in their order; gradients of captures and of
 * sinks, which all rows share here, are whole and the same on every rank, so they are added up
 * nowhere else. Gradients of stride 0
 * are refused. For a number of ranks and a shard plan the same bits every time, and d_q is one
 * device's. */
SACCADE_API saccade_status saccade_dist_backward(saccade_dist *dist,
                                                 const saccade_backward_args *args,
                                                 saccade_error *err);
/* On GPUs: the next run leaves what it receives in `memory`, saccade_dist_received bytes of the
 * device; if that is a backward run, it takes it from there and asks for nothing. So keys need
 * not travel again for gradients. All ranks do alike. */
SACCADE_API size_t saccade_dist_received(const saccade_dist *dist, int64_t B);
SACCADE_API saccade_status saccade_dist_keep(saccade_dist *dist, int64_t B, int32_t device,
                                             void *memory, saccade_error *err);
/* The two of them without an exchange, for keys that the caller has gathered: q, out, lse,
 * row_max, d_out and d_q are of this rank's rows, k and v of the whole sequence, of which what
 * saccade_shard_needs names for the rank is read, and what lies beside it in a block of keys
 * must be finite. d_k and d_v are of the whole sequence too, and with captures' gradients this
 * rank's part: the caller adds them up over ranks. On CPUs, and on CUDA, where the plan's
 * problem names the back end; there prepare comes first without a block mask too (mask NULL).
 * Ranks that hold no rows make no such call. */
SACCADE_API saccade_status saccade_dist_forward_local(saccade_dist *dist,
                                                      const saccade_forward_args *args,
                                                      saccade_error *err);
SACCADE_API saccade_status saccade_dist_backward_local(saccade_dist *dist,
                                                       const saccade_backward_args *args,
                                                       saccade_error *err);
/* Bytes of workspace: of forward, or of backward without gradients of captures; and of this
 * backward run, whose tensors' shapes and positions on the host count, not other data. */
SACCADE_API size_t saccade_dist_local_workspace(const saccade_dist *dist, int64_t B,
                                                int is_backward);
SACCADE_API saccade_status saccade_dist_local_backward_workspace(
    const saccade_dist *dist, const saccade_backward_args *args, size_t *bytes,
    saccade_error *err);
/* Bytes of workspace for this run; needs its tensors' shapes and positions on the host, not
 * other data. Asks nothing of other ranks. */
SACCADE_API saccade_status saccade_dist_backward_workspace(const saccade_dist *dist,
                                                           const saccade_backward_args *args,
                                                           size_t *bytes, saccade_error *err);

/* ---- caches spread over ranks ---------------------------------------------------------- */

/* Decode where each rank holds some keys of a cache, in one piece or in pages, and all have the
 * queries: each runs saccade_forward over its own keys (kv_offset says where they stand, kv_len
 * how many there are, 0 too), with out and lse in f32, and this puts the parts together, as
 * saccade_merge does, in the order of ranks: on every rank the same bits. `out` and `lse` are
 * this rank's, dense [B, H, Q, Dv] and [B, H, Q] on the host; `result` is f32, f16 or bf16, and
 * may be `out`; lse becomes that of all keys. Called by all ranks at the same time with equal
 * shapes. A failure ends the transport. */
SACCADE_API size_t saccade_dist_merge_workspace(const saccade_transport *transport,
                                                const saccade_tensor *out);
SACCADE_API saccade_status saccade_dist_merge(const saccade_context *context,
                                              const saccade_transport *transport,
                                              const saccade_tensor *out,
                                              const saccade_tensor *lse,
                                              const saccade_tensor *result, void *workspace,
                                              size_t workspace_bytes, saccade_error *err);

#ifdef __cplusplus
}
#endif
#endif
