/* Forward cases run whole by the public interface on any back end: results on the host, inputs
 * and outputs moved where the back end is a device. */
#ifndef SACCADE_TESTS_RUN_CASE_H
#define SACCADE_TESTS_RUN_CASE_H

#include "support/forward_case.h"

/* All dense and on the host; free with run_drop. */
typedef struct run_results {
    saccade_tensor out, lse, row_max, dq, dk, dv, d_sinks;
} run_results;

typedef struct run_options {
    saccade_problem problem; /* of the case's mods */
    const char *level;
    const saccade_tensor *sinks;
    const saccade_tensor *dropout; /* seed and offset */
    int is_dropout_there;          /* they lie where q does */
    case_outputs want;
    const saccade_tensor *d_out, *d_lse; /* of backward */
    double start; /* backward: what d_sinks begins with and is added to; 0: overwritten */
} run_options;

int64_t run_count(const saccade_tensor *t);
/* Elements of dense tensors, zeros at first. */
saccade_tensor run_make(saccade_dtype dtype, int32_t rank, const int64_t *shape);
saccade_tensor run_like(const saccade_tensor *t, saccade_dtype dtype);
double run_get(const saccade_tensor *t, int64_t at);
void run_put(const saccade_tensor *t, int64_t at, double x);
void run_randomise(const saccade_tensor *t, uint64_t seed); /* -1 to 1 */

/* Makes the results that are wanted. */
void run_forward(const case_run *r, const run_options *o, run_results *to);
/* From forward's out and lse in *f: the problem's gradients, f32 (f64 in f64 problems). */
void run_backward(const case_run *r, const run_options *o, run_results *f);
void run_drop(run_results *r);

/* Within 2 |plain - gold| + ulps of the largest, inf and NaN exactly. */
void run_compare(const char *what, const case_run *r, const saccade_tensor *got,
                 const saccade_tensor *plain, const saccade_tensor *gold, int ulps);
double run_ulp(saccade_dtype dtype, double at);

#endif
