/* staged.h: staged mode. Keys are taken by windows of the sequence, the same on all
 * ranks: what a rank's rows touch of one window is in memory while it is computed, that of the
 * next is on its way. A window's result is a partial one in f32, added to what was there:
 *
 *     line    keys 0 -> keys 1 -> (gradients 0) -> keys 2 -> (gradients 1) -> ..
 *     caller            window 0 -> merge -> window 1 -> merge -> ..
 *
 * The line is a thread on hosts, and a stream on GPUs (staged_device.c). All ranks put the same
 * exchanges in the same order, though some be empty. */
#ifndef SACCADE_DIST_STAGED_H
#define SACCADE_DIST_STAGED_H

#include "dist/dist.h"

/* ---- exchange_line.c: exchanges one after the other, on a thread of their own ---- */

enum { LINE_MOST = 4 }; /* that may wait, or be under way, at a time */

typedef struct dist_line dist_line;
saccade_status dist_line_open(const saccade_transport *transport, dist_line **out,
                              saccade_error *err);
void dist_line_close(dist_line *line);
/* Room for 2 x ranks messages to send, and behind them as many to receive, of the next put. */
saccade_message *dist_line_room(dist_line *line);
/* Returns the exchange's number; its messages' data is in use until it is waited for. */
int64_t dist_line_put(dist_line *line, int32_t n_sends, int32_t n_receives);
/* Until this exchange and all before it are done; EPEER where one has failed. */
saccade_status dist_line_wait(dist_line *line, int64_t number, saccade_error *err);
/* After a failure: until no exchange is under way. */
void dist_line_drain(dist_line *line);

/* ---- staged.c: windows, and what a block mask says of them ---- */

typedef struct dist_window {
    int64_t first, keys;         /* of the sequence */
    int64_t own_first, own_keys; /* those of them that this rank holds, among its keys */
    dist_pieces in, out;
} dist_window;

typedef struct stage_mask {
    struct stage_mask *next;
    const saccade_block_mask *of; /* NULL: none */
    uint64_t number;              /* mask_view's when it was cut */
    saccade_block_mask **mask;    /* [windows] */
    plan_rows *rows;              /* [windows] that touch keys of it */
    plan_part *part;
} stage_mask;

typedef struct dist_stage_device dist_stage_device;

struct dist_stages {
    int64_t size, unit; /* keys of a window; what all pieces begin at a multiple of */
    int64_t n;
    dist_window *window;
    int64_t in_most, out_most, own_most; /* keys of a window, of all peers */
    saccade_plan *partial;               /* out in f32, sinks apart */
    dist_line *line;                     /* NULL on devices */
    dist_stage_device *device;           /* from the first run on one */
    stage_mask *masks;
};

saccade_sizes stage_sizes(const saccade_dist *dist, int64_t B, int64_t keys);
/* NULL: it has not been prepared as it is now. */
const stage_mask *stage_mask_of(const saccade_dist *dist, const saccade_block_mask *mask);

/* ---- staged_keys.c: what a window's run reads ---- */

/* Bytes and parts of one of the two rooms for keys. */
typedef struct stage_room {
    size_t table, k_pool, v_pool, k_sent, v_sent, offset, length, bytes;
} stage_room;
stage_room stage_room_of(const saccade_dist *dist, int64_t B);
/* Puts the exchange of window w on the line; room: one of the two. */
int64_t stage_ask(saccade_dist *dist, int64_t w, const plan_run *run, char *room);

/* A run of one window, and what it points to. */
typedef struct stage_run {
    plan_run run;
    saccade_tensor k, v, kv_offset, kv_len;
    plan_chunks chunks;
} stage_run;
void stage_begin(const saccade_dist *dist, int64_t w, const plan_run *run,
                 const stage_mask *masks, char *room, stage_run *out);

/* ---- staged_run.c ---- */

/* What runs of either pass check first, and what belongs to their block mask; NULL without. */
saccade_status stage_start(const saccade_dist *dist, const plan_run *run,
                           const stage_mask **masks, saccade_error *err);

/* ---- staged_device.c ---- */

void dist_stage_device_close(dist_stage_device *device);
size_t dist_stage_device_workspace(const saccade_dist *dist, int64_t B);
size_t dist_stage_device_backward_workspace(const saccade_dist *dist, int64_t B,
                                            const plan_gradients *to);
saccade_status dist_stage_device_forward(saccade_dist *dist, plan_run *run, saccade_error *err);
saccade_status dist_stage_device_backward(saccade_dist *dist, plan_run *run,
                                          const plan_gradients *to, saccade_error *err);

/* ---- staged_merge.c ---- */

/* Adds a partial result of these rows to what is there; both are f32, dense. */
void stage_merge(const plan_rows *rows, const saccade_tensor *part_out,
                 const saccade_tensor *part_lse, const saccade_tensor *out,
                 const saccade_tensor *lse, int threads);
/* Sinks, and the dtypes and strides of the run's results. */
void stage_finish(const saccade_dist *dist, const plan_run *run, const saccade_tensor *out,
                  const saccade_tensor *lse);

#endif
