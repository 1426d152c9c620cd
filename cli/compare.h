/* compare.h: results against float64, by the tolerance of the project. */
#ifndef SACCADE_CLI_COMPARE_H
#define SACCADE_CLI_COMPARE_H

#include "job.h"

/* Largest differences from float64. A NaN or infinity that is not the truth's makes it
 * infinite. */
typedef struct deviation {
    double out, lse;
    double rms_out;
    double most_out, most_lse; /* largest finite truth */
} deviation;

/* The largest difference; what a computation of this dtype is allowed whose plain form differs
 * so from float64: twice that and two units in the last place. */
double compare_worst(const saccade_tensor *got, const saccade_tensor *gold);
double compare_allowed(const saccade_tensor *plain, const saccade_tensor *gold,
                       saccade_dtype dtype);
/* The largest magnitude; the largest length of a row as a vector. Only finite numbers count. */
double compare_most(const saccade_tensor *t);
double compare_longest_row(const saccade_tensor *t);
void compare_results(const job_tensors *got, const job_tensors *gold, deviation *out);
/* Truth and plain same-dtype computation of a problem, and what kernels are allowed:
 * twice the plain one's error and two units in the last place (lse: four). */
typedef struct yardstick {
    job_tensors gold;
    deviation plain;
    double allowed_out, allowed_lse;
} yardstick;

/* gold and plain must outlive nothing: *out owns what it has. */
saccade_status yardstick_open(const job *j, const engine_options *options, const job_tensors *t,
                              yardstick *out, saccade_error *err);
void yardstick_close(yardstick *y);
bool yardstick_holds(const yardstick *y, const deviation *d);

#endif
