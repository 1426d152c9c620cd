/* dist.h: attention over ranks. api/ checks a caller's arguments; here keys are gathered and
 * solvers run. A run in gather mode:
 *
 *     pack keys that others need -> exchange -> pool of touched keys + chunk table -> solver
 *
 * The solver sees the whole sequence: its sizes, positions and block mask, keys in chunks, of
 * which those are absent that no row here touches, and the parts of rows of this rank. */
#ifndef SACCADE_DIST_DIST_H
#define SACCADE_DIST_DIST_H

#include "dist/shard.h"
#include "plan/plan.h"

/* ---- collective.c ---- */

/* The transport's exchange; EPEER where it fails. */
saccade_status dist_exchange(const saccade_transport *transport, const saccade_message *sends,
                             int32_t n_sends, const saccade_message *receives,
                             int32_t n_receives, saccade_error *err);
void dist_abort(const saccade_transport *transport);
/* EINVAL on all ranks if not all give the same digest; *is_heard: all know of all. */
saccade_status dist_agree(const saccade_transport *transport, const uint64_t digest[2],
                          int *is_heard, saccade_error *err);

/* ---- pieces.c: where keys of this rank's pool lie ---- */

/* Keys [first, first + count) of the whole sequence and where they lie among the keys that this
 * rank holds. */
typedef struct dist_piece {
    int64_t first, count, local;
} dist_piece;

/* By peer: what this rank receives from it (its own: what it touches of its own) and sends to
 * it. Piece i of peer p is piece[begin[p]] .. piece[begin[p + 1]]; keys: of each peer. */
typedef struct dist_pieces {
    int64_t *begin; /* [ranks + 1] */
    dist_piece *piece;
    int64_t *keys; /* [ranks] */
    int64_t all;
} dist_pieces;

saccade_status dist_lay_out(saccade_dist *dist, int32_t mask, saccade_error *err);
void dist_free_layout(saccade_dist *dist);
void dist_free_pieces(dist_pieces *pieces);

/* ---- dist.c ---- */

/* Lays out what the shard plan means for this rank; the plan becomes the object's own. */
saccade_status dist_open(saccade_plan *plan, const saccade_shard_plan *shards, int32_t mask,
                         const saccade_transport *transport, saccade_dist **out,
                         saccade_error *err);
/* Sizes of the whole sequence. */
saccade_sizes dist_sizes(const saccade_dist *dist, int64_t B);
/* EINVAL where chunks are no whole tiles of the plan: rows would not be computed as one device
 * does. */
saccade_status dist_check_tiles(const saccade_dist *dist, const saccade_plan *plan,
                                const saccade_sizes *sizes, saccade_error *err);
/* Bytes for a run whose solver wants so many: SIZE_MAX where no run can have them. */
size_t dist_workspace(const saccade_dist *dist, int64_t B, size_t solver);
/* run: as the solver takes it, but for keys and rows, which are this rank's. */
saccade_status dist_forward(saccade_dist *dist, plan_run *run, saccade_error *err);
/* to: dq of this rank's rows, dk and dv of its keys, captures whole, on every rank the same. */
saccade_status dist_backward(saccade_dist *dist, plan_run *run, const plan_gradients *to,
                             saccade_error *err);

/* dist_forward and dist_backward for k and v of the whole sequence, which hold what this rank's
 * rows touch; nothing is exchanged, and to is this rank's part. */
saccade_status dist_forward_local(saccade_dist *dist, plan_run *run, saccade_error *err);
saccade_status dist_backward_local(saccade_dist *dist, plan_run *run, const plan_gradients *to,
                                   saccade_error *err);

typedef struct dist_device dist_device;
typedef struct dist_stages dist_stages;

struct saccade_dist {
    saccade_plan *plan;
    const saccade_shard_plan *shards;
    saccade_transport transport;
    int64_t Q, KV, n_rows, n_keys; /* of all, and held here */
    plan_part *part;
    plan_rows rows;
    int64_t unit, units; /* keys in an entry of the table; entries */
    dist_pieces in, out;
    saccade_message *messages; /* [8 ranks] */
    int32_t *held;             /* [2 units + 1] the table of one batch; room for checks */
    /* [units + 1] each, see plan_rows; where keys are exchanged on streams */
    int32_t *far_before, *touched_before;
    dist_device *device; /* where a device has a carrier, from the first run on */
    dist_stages *stages; /* in staged mode; else NULL */
};

/* ---- gather.c ---- */

/* Bytes and parts of a run's memory before the solver's workspace. */
typedef struct dist_memory {
    size_t touched, table, k_pool, v_pool, k_sent, v_sent, bytes;
} dist_memory;
dist_memory dist_memory_of(const saccade_dist *dist, int64_t B);

/* Keys of all ranks that this one's rows touch. */
typedef struct dist_keys {
    saccade_tensor k, v;
    plan_chunks chunks;
} dist_keys;
/* k, v: held here, [B, Hkv, keys, dim]; NULL: none. */
saccade_status dist_gather(saccade_dist *dist, int64_t B, const saccade_tensor *k,
                           const saccade_tensor *v, char *memory, dist_keys *out,
                           saccade_error *err);

/* Bytes of a row of a pool, [kv heads][dim]. */
size_t dist_row_bytes(const saccade_dist *dist, int64_t dim);
/* One of K and V, t: packs what is sent and what stays, and appends its messages to messages,
 * room for 2 x ranks to send and behind them as many to receive. */
void dist_list_keys(const saccade_dist *dist, const dist_pieces *in, const dist_pieces *out,
                    int64_t B, const saccade_tensor *t, int64_t dim, char *pool, char *sent,
                    saccade_message *messages, int32_t *n_sends, int32_t *n_receives);
/* Where units of keys from `first` on lie in a pool, -1 where they do not: [B][units]. */
void dist_fill_table(const dist_pieces *in, int32_t ranks, int64_t B, int64_t first,
                     int64_t unit, int64_t units, int32_t *table);
/* Row of the pool where a batch's keys of a peer begin. */
int64_t dist_pool_row(const dist_pieces *pieces, int64_t B, int32_t peer, int64_t b);
saccade_tensor dist_pool_of(const saccade_dist *dist, int64_t B, int64_t keys, int64_t dim,
                            char *data);

/* EINVAL where a row of this rank touches a key that was not gathered; mask NULL: all do. */
saccade_status dist_check_keys(const saccade_dist *dist, const saccade_block_mask *mask,
                               char *memory, saccade_error *err);
/* dist_check_keys for keys that the caller gathers. */
saccade_status dist_check_held(const saccade_dist *dist, const saccade_block_mask *mask,
                               saccade_error *err);
saccade_status dist_list_held(saccade_dist *dist, saccade_error *err);

/* ---- staged.c, staged_run.c, staged_device.c: keys window by window ---- */

/* partial: the plan with out in f32 and without sinks, the object's own once it has stages. */
saccade_status dist_open_stages(saccade_dist *dist, saccade_plan *partial, int32_t mask,
                                int64_t keys, saccade_error *err);
void dist_close_stages(dist_stages *stages);
saccade_status dist_prepare_stages(const saccade_dist *dist, const saccade_block_mask *mask,
                                   saccade_error *err);
size_t dist_staged_workspace(const saccade_dist *dist, int64_t B);
size_t dist_staged_backward_workspace(const saccade_dist *dist, int64_t B,
                                      const plan_gradients *to);
saccade_status dist_staged_forward(saccade_dist *dist, plan_run *run, saccade_error *err);
saccade_status dist_staged_backward(saccade_dist *dist, plan_run *run, const plan_gradients *to,
                                    saccade_error *err);

/* ---- device.c: gather mode where tensors do not lie on the host ---- */

/* Bytes that a run of batch B gets from others. */
size_t dist_received(const saccade_dist *dist, int64_t B);
/* Memory and tables for runs of batch B on a device, made on first use. */
saccade_status dist_device_reserve(saccade_dist *dist, int32_t device, int64_t B,
                                   saccade_error *err);
/* The next run leaves what it gets in `memory`, or a backward run takes it from there. */
saccade_status dist_device_keep(saccade_dist *dist, int32_t device, int64_t B, void *memory,
                                saccade_error *err);
size_t dist_device_backward_workspace(const saccade_dist *dist, int64_t B,
                                      const plan_gradients *to);
saccade_status dist_device_forward(saccade_dist *dist, plan_run *run, saccade_error *err);
saccade_status dist_device_backward(saccade_dist *dist, plan_run *run, const plan_gradients *to,
                                    saccade_error *err);
void dist_device_close(dist_device *device);

/* ---- return.c ---- */

/* Bytes and parts of a backward run's memory, behind those of gathering; floats. */
typedef struct dist_return {
    size_t k_pool, v_pool, k_got, v_got, sum, captures, bytes;
    int64_t capture_elements; /* of all captures whose gradients are wanted, and of sinks */
} dist_return;
/* captures: gradients by capture of the score mod; dtype NONE: not wanted. sinks: NULL: not. */
dist_return dist_return_of(const saccade_dist *dist, int64_t B, const saccade_tensor *captures,
                           const saccade_tensor *sinks);
/* Counts of elements alone. */
dist_return dist_return_captured(const saccade_tensor *captures, const saccade_tensor *sinks);
/* This rank's parts of them, one after the other in f32 from `at` on; NULL: shapes alone. */
void dist_lay_captures(float *at, const plan_gradients *to, saccade_tensor *own,
                       saccade_tensor *own_sinks);
/* own, own_sinks: likewise, 0 so far. */
void dist_begin_captures(char *memory, const dist_return *parts, const plan_gradients *to,
                         saccade_tensor *own, saccade_tensor *own_sinks);
saccade_status dist_return_keys(saccade_dist *dist, int64_t B, char *memory,
                                const dist_return *parts, const plan_gradients *to,
                                saccade_error *err);
/* Messages of one of dK and dV, as dist_list_keys: what was received goes back, what was sent
 * comes back. */
void dist_list_gradients(const saccade_dist *dist, const dist_pieces *in,
                         const dist_pieces *out, int64_t B, int64_t dim, float *pool,
                         float *got, saccade_message *messages, int32_t *n_sends,
                         int32_t *n_receives);
/* n elements from f32, or added to what is there, which is rounded once. */
void dist_store_row(saccade_dtype dtype, const float *row, int64_t n, int is_added, void *to);
/* The parts of all ranks of the gradients of keys [first, first + keys) held here, into those
 * rows of `to` (NULL: not wanted). */
void dist_add_ranks(const saccade_dist *dist, const dist_pieces *in, const dist_pieces *out,
                    const float *pool, const float *got, int64_t first, int64_t keys,
                    float *sum, const saccade_tensor *to, int is_added);
saccade_status dist_return_captures(saccade_dist *dist, char *memory, const dist_return *parts,
                                    const plan_gradients *to, saccade_error *err);

#endif
