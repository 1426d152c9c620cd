/* gradient_sums.h: gradients of tensors in which one element stands at several places. A
 * dimension of stride 0 repeats its elements, and a row of a chunk table may hold several
 * logical keys: the gradient of such an element is the sum over all its places.
 *
 * Back ends make the gradient of every place in a tensor of its own (`each`, f32 or f64), and
 * it is added up here: in double, in one order whatever the threads, rounded once. */
#ifndef SACCADE_PLAN_GRADIENT_SUMS_H
#define SACCADE_PLAN_GRADIENT_SUMS_H

#include "plan/plan.h"

/* Whether one element stands at several places: some stride is 0 along more than one. */
static inline int plan_is_repeated(const saccade_tensor *t)
{
    int is_repeated = 0;
    for (int32_t d = 0; d < t->rank; d++)
        is_repeated |= t->stride[d] == 0 && t->shape[d] > 1;
    return is_repeated;
}

/* `each` and `to` have one shape; `to` gets the sums over its dimensions of stride 0. */
void plan_sum_repeated(const saccade_tensor *each, const saccade_tensor *to, int is_added,
                       int threads);

/* Bytes of plan_sum_chunks's room in runs of these sizes, whatever the size of their chunks. */
size_t plan_sum_room(const saccade_sizes *sizes);

/* `each` [B, Hkv, KV, dim] by logical keys; `to` [B, Hkv, rows, dim] by rows of the table:
 * every row gets the sum over the keys that it holds, 0 where it holds none. Batches or heads
 * along which `to` has stride 0 share their rows. A key past the pool's rows is its last row's,
 * as when it is read. room: plan_sum_room(). At most 2^32 chunks. */
void plan_sum_chunks(const saccade_tensor *each, const plan_chunks *chunks, uint64_t *room,
                     const saccade_tensor *to, int is_added, int threads);
/* ELIMIT: more chunks than plan_sum_chunks sorts. */
saccade_status plan_check_places(const plan_run *run, saccade_error *err);
/* The one or the other, by whether the run has chunks (NULL: no). */
void plan_sum_places(const saccade_tensor *each, const plan_chunks *chunks, uint64_t *room,
                     const saccade_tensor *to, int is_added, int threads);

#endif
