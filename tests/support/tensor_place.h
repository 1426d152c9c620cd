/* Tensors of a run where its back end has them: on the host as they are, or copied to device 0,
 * results copied back. Failures fail the test. */
#ifndef SACCADE_TESTS_TENSOR_PLACE_H
#define SACCADE_TESTS_TENSOR_PLACE_H

#include "saccade.h"

enum { PLACE_TENSORS = 16 };

/* Zeroed but for is_on_device. */
typedef struct tensor_place {
    int is_on_device, n;
    saccade_tensor t[PLACE_TENSORS];
    const saccade_tensor *host[PLACE_TENSORS]; /* of results */
} tensor_place;

/* The tensor to hand over; t stays where it is until place_take_back. */
const saccade_tensor *place_put(tensor_place *p, const saccade_tensor *t, int is_result);
/* Waits, brings results back and frees what was made. */
void place_take_back(tensor_place *p);
/* A workspace; free with place_leave. */
void *place_room(const tensor_place *p, size_t bytes);
void place_leave(const tensor_place *p, void *room);

#endif
