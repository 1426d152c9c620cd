/* ulp.h: how far a float is from the exact result, and functions that libm lacks. */
#ifndef SACCADE_TESTS_ULP_H
#define SACCADE_TESTS_ULP_H

/* In units of the last place of the exact result, subnormal ones' that of the smallest; inf and
 * NaN must agree, else INFINITY. */
double ulp_error(float got, double want);
double wide_sigmoid(double x);

#endif
