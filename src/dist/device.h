/* device.h: what runs over ranks share where tensors lie on a device that has a carrier: lists
 * of the rows that move, on the device, moves of rows, and exchanges on the side stream. */
#ifndef SACCADE_DIST_DEVICE_H
#define SACCADE_DIST_DEVICE_H

#include "dist/dist.h"
#include "plan/carry.h"

/* A device that a rank's runs of batch B use. */
typedef struct dist_port {
    saccade_dist *dist;
    const plan_carry *ops;
    plan_carrier *carrier;
    int32_t index;
    int64_t B;
} dist_port;
saccade_status dist_port_open(saccade_dist *dist, int32_t index, int64_t B, dist_port *out,
                              saccade_error *err);
void dist_port_close(dist_port *port);
/* Zeros, until it is closed. */
saccade_status dist_port_reserve(const dist_port *port, size_t bytes, void **out,
                                 saccade_error *err);

/* ---- device_tables.c ---- */

/* Keys of the sequence that a pool holds from `first` on, and those of them that this rank
 * holds, among its keys. */
typedef struct dist_span {
    const dist_pieces *in, *out;
    int64_t first, own_first, own_keys;
} dist_span;

/* On the device: this rank's own keys into the pool; out of its keys into messages; out of
 * messages into the pool, and back; and what the gradient of each own key is the sum of. */
typedef struct dist_tables {
    plan_row_pair *own, *out, *in, *in_back, *terms;
    int32_t *start;
    int64_t n_own, n_out, n_in, own_first, own_keys;
    const int64_t *in_keys, *out_keys; /* by rank */
} dist_tables;
/* On the device: whole units of plan_rows whose gradients no other rank has a part of, by unit
 * the place of its first key among this rank's, or -1; and all other keys of this rank. */
typedef struct dist_alone {
    int32_t *row, *others;
    int64_t n_others;
} dist_alone;
saccade_status dist_place_alone(const dist_port *port, dist_alone *out, saccade_error *err);
saccade_status dist_place_tables(const dist_port *port, const dist_span *span, dist_tables *out,
                                 saccade_error *err);

/* ---- device_moves.c ---- */

/* Some tensor of a run, whose device is that of all; to: of a backward run. NULL: this rank,
 * which holds neither rows nor keys, takes part in nothing. */
const saccade_tensor *dist_any_tensor(const plan_run *run, const plan_gradients *to);
/* Bytes of rows of a message, K and V together. */
size_t dist_rows_bytes(const saccade_dist *dist, int64_t rows, size_t element);
/* Elements of a row of K's head (0), or of V's (1). */
int64_t dist_dim_of(const saccade_dist *dist, int i);

/* K and V, or their gradients, of so many keys; a message of so many rows: K's, then V's. */
plan_rows_side dist_pools(const dist_port *port, void *const data[2], int64_t keys,
                          saccade_dtype dtype);
plan_rows_side dist_message(const dist_port *port, char *data, int64_t rows,
                            saccade_dtype dtype);
saccade_status dist_move(const dist_port *port, const plan_rows_side *from,
                         const plan_rows_side *to, const plan_row_pair *pairs, int64_t n,
                         void *stream, saccade_error *err);
/* The run's own K and V, into something or into a message. */
saccade_status dist_move_own(const dist_port *port, const plan_run *run,
                             const plan_rows_side *to, const plan_row_pair *pairs, int64_t n,
                             void *stream, saccade_error *err);
/* On the side stream; keys: of each rank. wanted: bit 0: K's, bit 1: V's. */
saccade_status dist_exchange_on(const dist_port *port, const plan_rows_side *sent,
                                const int64_t *sent_keys, const plan_rows_side *got,
                                const int64_t *got_keys, uint32_t wanted, saccade_error *err);
/* These messages, on the side stream; 0 of both: nothing is done. */
saccade_status dist_exchange_messages(const dist_port *port, const saccade_message *sends,
                                      int32_t n, const saccade_message *receives, int32_t m,
                                      saccade_error *err);
/* Gradients of the own keys of a span: what this rank made and what others did, into `to`.
 * alone: those of its keys are there; NULL: none are. */
saccade_status dist_add_on_device(const dist_port *port, const dist_tables *tables,
                                  const plan_rows_side *pool, const plan_rows_side *got,
                                  const dist_alone *alone, const plan_gradients *to,
                                  void *stream, saccade_error *err);
/* Bit 0: gradients of K, bit 1: of V. */
uint32_t dist_wanted(const saccade_dist *dist);

/* ---- device_captures.c ---- */

/* Gradients of captures and sinks in a backward run: parts of all ranks, `n` floats each, of
 * which this rank's are made here. */
typedef struct dist_captured {
    int64_t n;
    float *parts;
    saccade_tensor own[MOD_MAX_CAPTURES], sinks;
} dist_captured;
/* Bytes of a run's memory, a multiple of 256. */
size_t dist_captured_bytes(const saccade_dist *dist, const plan_gradients *to);
/* Bytes that a run of the solver takes which makes a part of them. */
size_t dist_captured_solver(const saccade_dist *dist, const saccade_sizes *sizes,
                            const plan_gradients *to);
/* This rank's are 0 so far. */
saccade_status dist_captured_begin(const dist_port *port, const plan_gradients *to,
                                   void *memory, void *stream, dist_captured *out,
                                   saccade_error *err);
/* Where the solver is to leave this rank's. */
void dist_captured_part(const dist_captured *captured, plan_gradients *part);
/* What all ranks made, into `to`. */
saccade_status dist_captured_end(const dist_port *port, const dist_captured *captured,
                                 const plan_gradients *to, void *stream, saccade_error *err);

#endif
