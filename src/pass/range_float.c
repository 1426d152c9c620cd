/* Range rules of float operations.
 * Ends are computed in double and moved outward by more than the rounding of f32 (exactly
 * rounded operations) or than the error of the shared implementation (the others), so the
 * interval holds both the f32 value of a mask and the float64 oracle's. One value that is
 * known exactly stays exact through the exactly rounded operations. */
#include "pass/range_rules.h"

#include <float.h>
#include <math.h>

#define UNUSED1 ((void)box, (void)y, (void)z)
#define UNUSED2 ((void)box, (void)z)

/* Relative and absolute error granted to the shared f32 functions; theirs is below 1e-6. */
static const double LOOSE = 1e-5, LOOSE_POW = 1e-4, TINY = 1e-37;

void range_set_float(range_val *out, double lo, double hi, int may_nan)
{
    out->flo = lo;
    out->fhi = hi;
    out->may_nan = (uint8_t)may_nan;
}

static void set_top(range_val *out)
{
    range_set_float(out, -INFINITY, INFINITY, 1);
}

/* One f32 value, and not a NaN. */
static int is_exact(const range_val *x)
{
    return x->flo == x->fhi && !x->may_nan && x->flo == (double)(float)x->flo;
}

static int may_be_inf(const range_val *x)
{
    return isinf(x->flo) || isinf(x->fhi);
}

/* [lo, hi] widened by rounding; past the largest float a result may be it or infinity. */
static void set_wide(range_val *out, double lo, double hi, double relative, double absolute,
                     int may_nan)
{
    if (isnan(lo) || isnan(hi)) {
        set_top(out);
        return;
    }
    lo = isinf(lo) ? lo : lo - (fabs(lo) * relative + absolute);
    hi = isinf(hi) ? hi : hi + (fabs(hi) * relative + absolute);
    if (lo > FLT_MAX)
        lo = FLT_MAX;
    if (hi < -FLT_MAX)
        hi = -FLT_MAX;
    range_set_float(out, lo < -FLT_MAX ? -INFINITY : lo, hi > FLT_MAX ? INFINITY : hi, may_nan);
}

static void set_rounded(range_val *out, double lo, double hi, int may_nan)
{
    set_wide(out, lo, hi, 0x1p-23, 0x1p-149, may_nan);
    if (lo >= 0 && out->flo < 0) /* rounding keeps the sign */
        out->flo = 0;
    if (hi <= 0 && out->fhi > 0)
        out->fhi = 0;
}

static void set_exact(range_val *out, float value)
{
    if (isnan(value))
        set_top(out);
    else
        range_set_float(out, value, value, 0);
}

static int either_nan(const range_val *x, const range_val *y)
{
    return x->may_nan | y->may_nan;
}

RULE(fadd)
{
    UNUSED2;
    if (is_exact(x) && is_exact(y))
        set_exact(out, (float)x->flo + (float)y->flo);
    else
        set_rounded(out, x->flo + y->flo, x->fhi + y->fhi,
                    either_nan(x, y) | (may_be_inf(x) & may_be_inf(y)));
}

RULE(fneg)
{
    UNUSED1;
    range_set_float(out, -x->fhi, -x->flo, x->may_nan);
}

RULE(fdetach)
{
    UNUSED1;
    *out = *x;
}

RULE(fsub)
{
    range_val minus = {0};
    range_fneg(box, y, NULL, NULL, &minus);
    range_fadd(box, x, &minus, z, out);
}

static void set_corners(range_val *out, const double c[4], int may_nan)
{
    double lo = c[0], hi = c[0];
    for (int i = 0; i < 4; i++) {
        if (isnan(c[i])) {
            set_top(out);
            return;
        }
        lo = fmin(lo, c[i]);
        hi = fmax(hi, c[i]);
    }
    set_rounded(out, lo, hi, may_nan);
}

RULE(fmul)
{
    const double c[4] = {x->flo * y->flo, x->flo * y->fhi, x->fhi * y->flo, x->fhi * y->fhi};
    UNUSED2;
    if (is_exact(x) && is_exact(y))
        set_exact(out, (float)x->flo * (float)y->flo);
    else if (may_be_inf(x) || may_be_inf(y))
        set_top(out); /* 0 * inf hides inside intervals */
    else
        set_corners(out, c, either_nan(x, y));
}

/* x / 0 is 0, also for a NaN x. */
RULE(fdiv)
{
    UNUSED2;
    if (y->flo <= 0 && y->fhi >= 0) {
        if (is_exact(y))
            range_set_float(out, 0, 0, 0);
        else
            set_top(out);
    } else if (is_exact(x) && is_exact(y)) {
        set_exact(out, (float)x->flo / (float)y->flo);
    } else if (may_be_inf(x) && may_be_inf(y)) {
        set_top(out);
    } else {
        const double c[4] = {x->flo / y->flo, x->flo / y->fhi, x->fhi / y->flo,
                             x->fhi / y->fhi};
        set_corners(out, c, either_nan(x, y));
    }
}

RULE(fabs)
{
    UNUSED1;
    if (x->flo >= 0)
        range_set_float(out, x->flo, x->fhi, x->may_nan);
    else if (x->fhi <= 0)
        range_set_float(out, -x->fhi, -x->flo, x->may_nan);
    else
        range_set_float(out, 0, fmax(-x->flo, x->fhi), x->may_nan);
}

/* x < y ? x : y, so that a NaN x gives y and a NaN y gives NaN. */
RULE(fmin)
{
    UNUSED2;
    range_set_float(out, fmin(x->flo, y->flo), x->may_nan ? y->fhi : fmin(x->fhi, y->fhi),
                    y->may_nan);
}

RULE(fmax)
{
    UNUSED2;
    range_set_float(out, x->may_nan ? y->flo : fmax(x->flo, y->flo), fmax(x->fhi, y->fhi),
                    y->may_nan);
}

/* ---- rounding: monotone and exact ---- */

RULE(ffloor)
{
    UNUSED1;
    range_set_float(out, floor(x->flo), floor(x->fhi), x->may_nan);
}

RULE(fceil)
{
    UNUSED1;
    range_set_float(out, ceil(x->flo), ceil(x->fhi), x->may_nan);
}

/* Ties may go either way here. */
RULE(fround)
{
    UNUSED1;
    range_set_float(out, ceil(x->flo - 0.5), floor(x->fhi + 0.5), x->may_nan);
}

RULE(ftrunc)
{
    UNUSED1;
    range_set_float(out, trunc(x->flo), trunc(x->fhi), x->may_nan);
}

/* ---- functions ---- */

/* A rising function, evaluated at both ends. */
static void set_rising(range_val *out, const range_val *x, double (*f)(double), double absolute,
                       double least, double most)
{
    set_wide(out, f(x->flo), f(x->fhi), LOOSE, absolute, x->may_nan);
    if (out->flo < least)
        out->flo = least;
    if (out->fhi > most)
        out->fhi = most;
}

RULE(fsqrt)
{
    UNUSED1;
    set_rounded(out, sqrt(fmax(x->flo, 0)), sqrt(fmax(x->fhi, 0)), x->may_nan | (x->flo < 0));
}

RULE(frsqrt)
{
    UNUSED1;
    if (x->flo <= 0)
        set_top(out);
    else
        set_wide(out, 1 / sqrt(x->fhi), 1 / sqrt(x->flo), LOOSE, TINY, x->may_nan);
}

RULE(fexp)
{
    UNUSED1;
    set_rising(out, x, exp, TINY, 0, INFINITY);
}

RULE(fexp2)
{
    UNUSED1;
    set_rising(out, x, exp2, TINY, 0, INFINITY);
}

static void set_log(range_val *out, const range_val *x, double (*f)(double))
{
    const double lo = x->flo < FLT_MIN ? -INFINITY : f(x->flo);
    const double hi = x->fhi <= 0 ? 0 : f(x->fhi);
    set_wide(out, lo, hi, LOOSE, LOOSE, x->may_nan | (x->flo < 0));
}

RULE(flog)
{
    UNUSED1;
    set_log(out, x, log);
}

RULE(flog2)
{
    UNUSED1;
    set_log(out, x, log2);
}

RULE(fsin)
{
    UNUSED1;
    range_set_float(out, -1 - LOOSE, 1 + LOOSE, x->may_nan | may_be_inf(x));
}

RULE(fcos)
{
    range_fsin(box, x, y, z, out);
}

RULE(ftan)
{
    UNUSED1;
    (void)x;
    set_top(out);
}

RULE(ftanh)
{
    UNUSED1;
    set_rising(out, x, tanh, LOOSE, -1 - LOOSE, 1 + LOOSE);
}

static double logistic(double x)
{
    return 1 / (1 + exp(-x));
}

RULE(fsigmoid)
{
    UNUSED1;
    set_rising(out, x, logistic, LOOSE, -LOOSE, 1 + LOOSE);
}

RULE(ferf)
{
    UNUSED1;
    set_rising(out, x, erf, LOOSE, -1 - LOOSE, 1 + LOOSE);
}

/* For a positive base it is monotone in each operand. */
RULE(fpow)
{
    const double c[4] = {pow(x->flo, y->flo), pow(x->flo, y->fhi), pow(x->fhi, y->flo),
                         pow(x->fhi, y->fhi)};
    UNUSED2;
    if (x->flo < FLT_MIN || either_nan(x, y) || may_be_inf(x) || may_be_inf(y)) {
        set_top(out);
        return;
    }
    set_wide(out, fmin(fmin(c[0], c[1]), fmin(c[2], c[3])),
             fmax(fmax(c[0], c[1]), fmax(c[2], c[3])), LOOSE_POW, TINY, 0);
}

/* ---- comparison, selection, conversion ---- */

RULE(flt)
{
    UNUSED2;
    range_set_bool(out, x->fhi >= y->flo || either_nan(x, y), x->flo < y->fhi);
}

RULE(fle)
{
    UNUSED2;
    range_set_bool(out, x->fhi > y->flo || either_nan(x, y), x->flo <= y->fhi);
}

RULE(feq)
{
    const int same = x->flo == x->fhi && y->flo == y->fhi && x->flo == y->flo;
    UNUSED2;
    range_set_bool(out, !same || either_nan(x, y), x->flo <= y->fhi && y->flo <= x->fhi);
}

RULE(fne)
{
    range_val equal;
    range_feq(box, x, y, z, &equal);
    range_set_bool(out, equal.can_true, equal.can_false);
}

RULE(fsel)
{
    (void)box;
    if (!x->can_false)
        *out = *y;
    else if (!x->can_true)
        *out = *z;
    else
        range_set_float(out, fmin(y->flo, z->flo), fmax(y->fhi, z->fhi), either_nan(y, z));
}

/* Rounding an int to f32 is monotone, so the ends are exact; the oracle's (double) is the same
 * rounded value. */
RULE(i2f)
{
    UNUSED1;
    range_set_float(out, (float)x->lo, (float)x->hi, 0);
}

static int64_t truncated(double x)
{
    if (x >= 2147483647.0)
        return INT32_MAX;
    return x <= -2147483648.0 ? INT32_MIN : (int64_t)x;
}

RULE(f2i)
{
    int64_t lo = truncated(x->flo), hi = truncated(x->fhi);
    UNUSED1;
    if (x->may_nan) { /* NaN gives 0 */
        lo = lo < 0 ? lo : 0;
        hi = hi > 0 ? hi : 0;
    }
    range_set_span(out, lo, hi);
}
