/* carry.h: what attention over ranks asks of a device: memory that stays, rows of keys moved
 * between tensors and messages, and a second stream, on which messages travel while kernels
 * compute. A back end whose tensors lie on the host needs none. */
#ifndef SACCADE_PLAN_CARRY_H
#define SACCADE_PLAN_CARRY_H

#include "plan/plan.h"

typedef struct plan_carrier plan_carrier;

/* A row of one side and the row of the other that it becomes. Of a message, whose rows lie
 * [peer][batch][row][heads][dim]: the number among the peer's own `keys`, after `before` of
 * other peers, for each batch. */
typedef struct plan_row_pair {
    int32_t from, to, before, keys;
} plan_row_pair;

/* K's, then V's: tensors [B, Hkv, rows, dim], or messages where is_packed (data alone counts,
 * and dtype). */
typedef struct plan_rows_side {
    saccade_tensor t[2];
    int is_packed;
} plan_rows_side;

/* Tables lie on the device. */
typedef struct plan_move {
    plan_rows_side from, to;
    const plan_row_pair *pairs;
    int64_t n, B;
} plan_move;

/* Row i of `to` becomes the sum of the terms [start[i], start[i + 1]), float32, in their order:
 * rows `from` of pool or, where that is -1, rows `to` of got. */
typedef struct plan_sum {
    plan_rows_side pool, got, to;
    const int32_t *start;
    const plan_row_pair *terms;
    const int32_t *rows; /* [n] of `to`; NULL: the first n */
    int64_t n, B;
    uint32_t wanted, added; /* bit 0: K, bit 1: V */
} plan_sum;

/* Partial results of rows become one, window after window (rows_merge.cu): part and sum are
 * float32, dense: [B, H, rows, dim], their lse and maxima [B, H, rows]. part NULL: nothing is
 * added; lse NULL: the sum is only stored. The last one writes the results. */
typedef struct plan_merge {
    const float *part, *part_lse, *part_max;
    float *sum, *lse;
    const saccade_tensor *out, *out_lse, *row_max; /* the latter two: NULL: not wanted */
    const plan_sinks *sinks;                       /* NULL: none */
    int64_t B, H, rows, dim;
    int is_first, is_last, is_added; /* the sum holds nothing yet; to what out holds */
} plan_merge;

/* What ranks made of a tensor's elements, added up in their order, in double: n_parts of them,
 * dense float32, `step` elements from one to the next. */
typedef struct plan_total {
    const float *parts;
    int64_t step;
    int32_t n_parts;
    const saccade_tensor *to;
    int is_added; /* to what it holds */
} plan_total;

typedef struct plan_carry {
    saccade_status (*open)(const saccade_plan *plan, int32_t device, plan_carrier **out,
                           saccade_error *err);
    void (*close)(plan_carrier *c);
    /* Memory until close: a copy of `from`, or zeros. */
    saccade_status (*reserve)(plan_carrier *c, size_t bytes, const void *from, void **out,
                              saccade_error *err);
    /* stream NULL: the default one. The side stream is the carrier's own. */
    saccade_status (*move)(plan_carrier *c, const plan_move *m, void *stream,
                           saccade_error *err);
    saccade_status (*sum)(plan_carrier *c, const plan_sum *s, void *stream, saccade_error *err);
    /* Of plans that make gradients of captures or sinks. */
    saccade_status (*total)(plan_carrier *c, const plan_total *t, void *stream,
                            saccade_error *err);
    /* Fills memory with zeros. */
    saccade_status (*clear)(plan_carrier *c, void *at, size_t bytes, void *stream,
                            saccade_error *err);
    /* Makes ready for merge, once. */
    saccade_status (*load_merge)(plan_carrier *c, const saccade_plan *plan, saccade_error *err);
    saccade_status (*merge)(plan_carrier *c, const plan_merge *m, void *stream,
                            saccade_error *err);
    void *(*side)(plan_carrier *c);
    /* fork: the side stream waits for `stream`. mark records an event on the side stream; await
     * makes `stream` wait for it. Only the most recent marks stay valid. */
    saccade_status (*fork)(plan_carrier *c, void *stream, saccade_error *err);
    saccade_status (*mark)(plan_carrier *c, void **event, saccade_error *err);
    saccade_status (*await)(plan_carrier *c, void *event, void *stream, saccade_error *err);
    /* What comes on the side stream waits until *count, on the device, is `least` or has passed
     * it; what adds to it is on a stream already. */
    saccade_status (*await_count)(plan_carrier *c, const uint32_t *count, uint32_t least,
                                  saccade_error *err);
    /* Whether what comes on the side stream is recorded rather than run. */
    int (*is_captured)(plan_carrier *c);
} plan_carry;

#endif
