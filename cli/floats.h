/* floats.h: elements of any dtype as double and back; random elements. */
#ifndef SACCADE_CLI_FLOATS_H
#define SACCADE_CLI_FLOATS_H

#include "cli.h"

double floats_get(const void *data, saccade_dtype dtype, int64_t at);
/* Rounds to nearest even; ints truncate. */
void floats_set(void *data, saccade_dtype dtype, int64_t at, double value);
bool floats_is_float(saccade_dtype dtype);

/* Row-major copy of a tensor in another dtype; owned by the caller: free(out->data). */
saccade_status floats_convert(const saccade_tensor *in, saccade_dtype dtype,
                              saccade_tensor *out, saccade_error *err);
/* The elements of `in` in those of `out`, which has its shape. */
void floats_convert_into(const saccade_tensor *in, const saccade_tensor *out);
/* Row-major, owned; elements are not set. */
saccade_status floats_new(saccade_dtype dtype, int32_t rank, const int64_t *shape,
                          saccade_tensor *out, saccade_error *err);
int64_t floats_count(const saccade_tensor *tensor);

/* splitmix64: the state is the seed. */
uint64_t floats_random(uint64_t *state);
double floats_uniform(uint64_t *state); /* in [0, 1) */
double floats_normal(uint64_t *state);
/* Row-major tensor of normal numbers; the same seed gives the same numbers in every dtype. Past
 * a million elements they repeat. */
void floats_fill_normal(saccade_tensor *tensor, uint64_t seed);

#endif
