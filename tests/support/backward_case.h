/* backward_case.h: gradients of a forward case: what forward left, an upstream gradient, the
 * float64 truth and bounds from plain gradients in the same dtype, and the comparison. */
#ifndef SACCADE_TESTS_BACKWARD_CASE_H
#define SACCADE_TESTS_BACKWARD_CASE_H

#include "support/forward_case.h"

enum { BACKWARD_DQ, BACKWARD_DK, BACKWARD_DV, BACKWARD_GRADIENTS };

typedef struct backward_case {
    forward_case forward;
    int has_d_lse, is_added; /* is_added: gradients start from ones */
    int unwanted;            /* a bit for each of BACKWARD_DQ.. that is not asked for */
    int pad;                 /* elements between rows of dO and gradients */
    int has_captures;        /* gradients of all that the score reads are asked for */
    int has_f32_out;         /* out is f32, dO of the case's dtype */
    const struct cpu_backward_kernels *kernels; /* NULL: those of the level */
} backward_case;

typedef struct backward_case_run {
    backward_case c;
    case_run f;
    case_tensor out, lse, d_out, d_lse; /* d_lse: no memory where there is none */
    double *gold[BACKWARD_GRADIENTS];   /* row-major */
    double bound[BACKWARD_GRADIENTS];
    double *captured[8]; /* by capture of the derived score, NULL: none; row-major */
    double captured_bound[8];
    int64_t captured_count[8];
} backward_case_run;

void backward_case_make(const backward_case *c, backward_case_run *r);
/* Truth and bounds again, of tensors that the test has changed. */
void backward_case_solve(backward_case_run *r);
void backward_case_free(backward_case_run *r);
/* Live tiles are proven while running; or by a block mask's runs; or by those of the mask's own
 * blocks of odd sizes, exported and imported. */
typedef enum backward_mask { BACKWARD_PROVEN, BACKWARD_RUNS, BACKWARD_IMPORTED } backward_mask;
/* Runs and fails the test, printing the case, where a gradient is out of bounds or a guard
 * changed. copies[n]: NULL, or room for the gradient's bytes as written, guards included. */
void backward_case_check(const backward_case_run *r, const char *level, int32_t threads,
                         backward_mask mask, char *copies[BACKWARD_GRADIENTS]);
size_t backward_case_bytes(const backward_case_run *r, int which);

#endif
