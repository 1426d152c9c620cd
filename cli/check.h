/* check.h: the parts of saccade check: forward, and backward. */
#ifndef SACCADE_CLI_CHECK_H
#define SACCADE_CLI_CHECK_H

#include "job.h"
#include "problem_text.h"

/* Ways to run, slowest first. */
typedef struct check_way {
    const char *backend, *level;
} check_way;
enum { CHECK_WAYS = 5 };
extern const check_way check_ways[CHECK_WAYS];
bool check_wants(const engine_options *options, const check_way *way);

typedef struct check_row {
    const char *name; /* of the variant */
    char problem[PROBLEM_BYTES];
} check_row;

/* What came out over all rows; without any, nothing was checked. */
typedef struct verdict {
    bool is_good;
    int64_t rows;
    bool has_header;        /* which is printed before the first row */
    saccade_error left_out; /* why the last of the ways did not run */
} verdict;

/* ---- check_backward.c ---- */

/* Gradients of Q, K, V and of the score's captures of rank 2 and more (sums into fewer numbers
 * have an error of their own), from a random gradient of the output. */
saccade_status check_backward(const job *j, const engine_options *options, const job_tensors *t,
                              const check_row *row, verdict *all, saccade_error *err);

#endif
