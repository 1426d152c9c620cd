/* tensor_walk.h: where tensors' elements lie and how far apart, and strided tensors element by
 * element, in row-major order of their indices. */
#ifndef SACCADE_TENSOR_WALK_H
#define SACCADE_TENSOR_WALK_H

#include "saccade.h"

#include <string.h>

/* EINVAL where data is no multiple of an element's size, as the hardware and C want it; on
 * devices as well. NULL passes. */
saccade_status tensor_check_place(const saccade_tensor *t, const char *name,
                                  saccade_error *err);

static inline int tensor_is_empty(const saccade_tensor *t)
{
    for (int32_t d = 0; d < t->rank; d++)
        if (t->shape[d] < 1)
            return 1;
    return 0;
}

/* How many places elements have along a dimension: one where its stride is 0, none where it is
 * empty. */
static inline int64_t tensor_places(const saccade_tensor *t, int32_t d)
{
    return t->stride[d] || !t->shape[d] ? t->shape[d] : 1;
}

/* An element: its index along each dimension, and its place counted from the first one.
 * Zeroed, it is the first element. */
typedef struct tensor_walk {
    int64_t at[SACCADE_MAX_RANK], place;
} tensor_walk;

/* Goes on to the next element over the first `rank` dimensions; 0 after the last. Every extent
 * is 1 or more. */
static inline int tensor_next(const saccade_tensor *t, int32_t rank, tensor_walk *walk)
{
    for (int32_t d = rank - 1; d >= 0; d--) {
        walk->place += t->stride[d];
        if (++walk->at[d] < t->shape[d])
            return 1;
        walk->place -= walk->at[d] * t->stride[d];
        walk->at[d] = 0;
    }
    return 0;
}

/* Sets all elements to 0: row by row where those of the last dimension follow each other. */
static inline void tensor_clear(const saccade_tensor *t)
{
    const size_t each = saccade_dtype_bytes(t->dtype);
    const int32_t outer = t->rank - (t->rank > 0 && t->stride[t->rank - 1] == 1);
    const size_t bytes = each * (size_t)(outer < t->rank ? t->shape[outer] : 1);
    tensor_walk walk = {{0}, 0};
    do
        memset((char *)t->data + walk.place * (int64_t)each, 0, bytes);
    while (tensor_next(t, outer, &walk));
}

/* No tensor reaches over more elements: their bytes are within what an address counts. */
#define TENSOR_MOST_REACH 0x1p58

/* Elements from the first to the last; as a double, since an int might wrap. */
static inline double tensor_reach(const saccade_tensor *t)
{
    double reach = 0;
    for (int32_t d = 0; d < t->rank; d++)
        if (t->shape[d] > 1)
            reach += (double)(t->shape[d] - 1) * (double)t->stride[d];
    return reach;
}

/* Elements from the first to the last of the dimensions that lie inside dimension i: those of
 * smaller strides, or of the same before it. A larger stride of i passes over all of them. */
static inline double tensor_inner_reach(const saccade_tensor *t, int32_t i)
{
    double last = 0;
    for (int32_t j = 0; j < t->rank; j++)
        if (t->shape[j] > 1
            && (t->stride[j] < t->stride[i] || (t->stride[j] == t->stride[i] && j < i)))
            last += (double)(t->shape[j] - 1) * (double)t->stride[j];
    return last;
}

#endif
