/* problem_case.h: what a test's problem string says, in the command line's words. */
#ifndef SACCADE_TESTS_PROBLEM_CASE_H
#define SACCADE_TESTS_PROBLEM_CASE_H

#include "saccade.h"

/* "b2 h16/4 q4096 kv4096 d128 dv64 bf16": q and d are needed, b and h are 1 if absent, `/kv
 * heads`, kv and dv are the query's, the dtype is f32. Anything else fails the test. */
void problem_case(const char *text, saccade_sizes *sizes, saccade_dtype *dtype);

#endif
