/* range_form.h: what range rules of ints share, intervals and linear forms of them. */
#ifndef SACCADE_PASS_RANGE_FORM_H
#define SACCADE_PASS_RANGE_FORM_H

#include "pass/range_rules.h"

#define UNUSED(a, b) ((void)(a), (void)(b))

/* Above this a form is dropped, so that sums of products stay inside int64. */
enum { COEF_MAX = 1 << 20 };

typedef struct span {
    int64_t lo, hi;
} span;

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int is_point(const range_val *v)
{
    return v->lo == v->hi;
}

static inline int has_form(const range_val *v)
{
    return (v->coef[0] | v->coef[1] | v->coef[2] | v->coef[3]) != 0;
}

/* ---- range_form.c ---- */

/* floor(a / n), n not 0; the greatest common divisor, 0 of zeros. */
int64_t range_floor_div(int64_t a, int64_t n);
int64_t range_gcd(int64_t a, int64_t b);

/* Bounds of a linear form over the box. */
span range_form_span(const pass_box *box, const int64_t coef[4], int64_t rlo, int64_t rhi);
/* Bounds of x - y as integers, before any wrapping. */
span range_difference(const pass_box *box, const range_val *x, const range_val *y);
/* Makes *out from the exact interval [lo, hi] and an exact form, wrapping if it must; from the
 * interval alone; from what it is between. */
void range_finish(const pass_box *box, int64_t lo, int64_t hi, const int64_t coef[4],
                  int64_t rlo, int64_t rhi, range_val *out);
void range_finish_span(int64_t lo, int64_t hi, range_val *out);
void range_finish_corners(int64_t a, int64_t b, int64_t c, int64_t d, range_val *out);

/* ---- range_int.c ---- */

/* c x, |c| <= 2^31; floor(x / n) and x - n floor(x / n), n > 0 */
void range_scale(const pass_box *box, const range_val *x, int64_t c, range_val *out);
void range_floor_by(const pass_box *box, const range_val *x, int64_t n, range_val *out);
void range_mod_by(const pass_box *box, const range_val *x, int64_t n, range_val *out);

#endif
