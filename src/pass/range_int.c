/* Range rules of arithmetic on ints, and of their order. Division and remainder by a constant n
 * split the form into multiples of n and the rest: q % n is q - n * k on any box that stays
 * inside one quotient k. */
#include "pass/range_form.h"

enum { RESIDUE_MAX = 1 << 29 };

/* ---- sums and products ---- */

/* Adds to *out what is known of its value modulo step, where that says something and the
 * value, exactly within [lo, hi], did not wrap. */
static void set_residue(range_val *out, int64_t lo, int64_t hi, int64_t step, int64_t slo,
                        int64_t shi)
{
    if (step < 2 || step > RESIDUE_MAX || shi - slo >= step - 1 || lo < INT32_MIN
        || hi > INT32_MAX || out->lo == out->hi)
        return;
    const int64_t whole = range_floor_div(slo, step) * step;
    out->step = (int32_t)step;
    out->slo = (int32_t)(slo - whole);
    out->shi = (int32_t)(shi - whole);
}

static span residue_of(const range_val *x)
{
    return x->step ? (span){x->slo, x->shi} : (span){x->lo, x->hi};
}

RULE(iadd)
{
    int64_t coef[4];
    const span a = residue_of(x), b = residue_of(y);
    const int64_t step = range_gcd(x->step, y->step), lo = x->lo + y->lo, hi = x->hi + y->hi;
    (void)z;
    for (int v = 0; v < 4; v++)
        coef[v] = (int64_t)x->coef[v] + y->coef[v];
    range_finish(box, lo, hi, coef, x->rlo + y->rlo, x->rhi + y->rhi, out);
    set_residue(out, lo, hi, step, a.lo + b.lo, a.hi + b.hi);
}

RULE(isub)
{
    int64_t coef[4];
    const span a = residue_of(x), b = residue_of(y);
    const int64_t step = range_gcd(x->step, y->step), lo = x->lo - y->hi, hi = x->hi - y->lo;
    (void)z;
    for (int v = 0; v < 4; v++)
        coef[v] = (int64_t)x->coef[v] - y->coef[v];
    range_finish(box, lo, hi, coef, x->rlo - y->rhi, x->rhi - y->rlo, out);
    set_residue(out, lo, hi, step, a.lo - b.hi, a.hi - b.lo);
}

void range_scale(const pass_box *box, const range_val *x, int64_t c, range_val *out)
{
    const int64_t step = x->step ? x->step : 1, size = c < 0 ? -c : c;
    const span s = x->step ? (span){x->slo, x->shi} : (span){0, 0};
    const int64_t a = c * x->lo, b = c * x->hi, ra = c * s.lo, rb = c * s.hi;
    const int64_t lo = min64(a, b), hi = max64(a, b);
    int64_t coef[4];
    int small = has_form(x) && x->rlo > -((int64_t)1 << 31) && x->rhi < ((int64_t)1 << 31);
    for (int v = 0; v < 4; v++) {
        coef[v] = c * x->coef[v];
        small &= coef[v] <= COEF_MAX && coef[v] >= -COEF_MAX;
    }
    if (small)
        range_finish(box, lo, hi, coef, min64(c * x->rlo, c * x->rhi),
                     max64(c * x->rlo, c * x->rhi), out);
    else
        range_finish_span(lo, hi, out);
    set_residue(out, lo, hi, step * size, min64(ra, rb), max64(ra, rb));
}

RULE(imul)
{
    (void)z;
    if (is_point(y))
        range_scale(box, x, y->lo, out);
    else if (is_point(x))
        range_scale(box, y, x->lo, out);
    else
        range_finish_corners(x->lo * y->lo, x->lo * y->hi, x->hi * y->lo, x->hi * y->hi, out);
}

RULE(ineg)
{
    UNUSED(y, z);
    range_scale(box, x, -1, out);
}

RULE(inot)
{
    int64_t coef[4];
    UNUSED(y, z);
    for (int v = 0; v < 4; v++)
        coef[v] = -(int64_t)x->coef[v];
    range_finish(box, -x->hi - 1, -x->lo - 1, coef, -x->rhi - 1, -x->rlo - 1, out);
}

RULE(iabs)
{
    (void)z;
    if (x->lo >= 0)
        *out = *x;
    else if (x->hi <= 0)
        range_ineg(box, x, y, z, out);
    else
        range_finish_span(0, max64(-x->lo, x->hi), out);
}

/* ---- division ---- */

/* x = n * whole + rest, both linear forms; n > 0. Returns the bounds of rest. */
static span split(const pass_box *box, const range_val *x, int64_t n, int64_t whole[4],
                  int64_t rest[4])
{
    int any = 0;
    for (int v = 0; v < 4; v++) {
        const int divides = x->coef[v] % n == 0;
        whole[v] = divides ? x->coef[v] / n : 0;
        rest[v] = divides ? 0 : x->coef[v];
        any |= whole[v] != 0;
    }
    span s = range_form_span(box, rest, x->rlo, x->rhi);
    if (!any) { /* the rest is x itself */
        s.lo = max64(s.lo, x->lo);
        s.hi = min64(s.hi, x->hi);
    }
    return s;
}

void range_floor_by(const pass_box *box, const range_val *x, int64_t n, range_val *out)
{
    int64_t whole[4], rest[4];
    const span r = split(box, x, n, whole, rest);
    range_finish(box, range_floor_div(x->lo, n), range_floor_div(x->hi, n), whole,
                 range_floor_div(r.lo, n), range_floor_div(r.hi, n), out);
}

void range_mod_by(const pass_box *box, const range_val *x, int64_t n, range_val *out)
{
    int64_t whole[4], rest[4], step = n;
    const span r = split(box, x, n, whole, rest);
    const int64_t k = range_floor_div(r.lo, n);
    if (k == range_floor_div(r.hi, n)) {
        range_finish(box, r.lo - n * k, r.hi - n * k, rest, x->rlo - n * k, x->rhi - n * k,
                     out);
        return;
    }
    if (x->step && x->step % n == 0 && x->slo / n == x->shi / n) {
        range_set_span(out, x->slo % n, x->shi % n);
        return;
    }
    for (int v = 0; v < 4; v++)
        step = range_gcd(step, rest[v]);
    if (x->rlo != x->rhi)
        step = 1;
    const int64_t first = x->rlo - step * range_floor_div(x->rlo, step); /* congruence */
    range_finish_span(step > 1 ? first : 0, step > 1 ? n - step + first : n - 1, out);
}

/* Corners of a division that is monotone in each operand while the divisor keeps its sign. */
static void divide(const range_val *x, const range_val *y,
                   int64_t (*quotient)(int64_t, int64_t), range_val *out)
{
    const int64_t n[4] = {y->lo, min64(y->hi, -1), max64(y->lo, 1), y->hi};
    int64_t lo = INT64_MAX, hi = INT64_MIN;
    if (y->lo <= 0 && y->hi >= 0)
        lo = hi = 0; /* x / 0 is 0 */
    for (int i = 0; i < 4; i++) {
        if (n[i] == 0 || (i < 2 ? y->lo >= 0 : y->hi <= 0))
            continue;
        const int64_t a = quotient(x->lo, n[i]), b = quotient(x->hi, n[i]);
        lo = min64(lo, min64(a, b));
        hi = max64(hi, max64(a, b));
    }
    range_finish_span(lo, hi, out);
}

static int64_t trunc_div(int64_t a, int64_t n)
{
    return a / n;
}

RULE(idiv)
{
    (void)z;
    if (is_point(y) && y->lo > 0 && x->lo >= 0)
        range_floor_by(box, x, y->lo, out);
    else
        divide(x, y, trunc_div, out);
}

RULE(ifloordiv)
{
    (void)z;
    if (is_point(y) && y->lo > 0)
        range_floor_by(box, x, y->lo, out);
    else
        divide(x, y, range_floor_div, out);
}

RULE(irem)
{
    const int64_t n = max64(y->hi, -y->lo); /* largest |y| */
    const int64_t most = max64(n - 1, 0);
    (void)z;
    if (is_point(y) && x->lo >= 0 && n > 0)
        range_mod_by(box, x, n, out);
    else if (x->lo >= 0 && x->hi < y->lo)
        *out = *x;
    else
        range_finish_span(x->lo < 0 ? max64(x->lo, -most) : 0,
                          x->hi > 0 ? min64(x->hi, most) : 0, out);
}

RULE(ifloormod)
{
    (void)z;
    if (is_point(y) && y->lo > 0)
        range_mod_by(box, x, y->lo, out);
    else if (x->lo >= 0 && x->hi < y->lo)
        *out = *x;
    else
        range_finish_span(min64(y->lo + 1, 0), max64(y->hi - 1, 0), out);
}

/* ---- order ---- */

RULE(imin)
{
    const span d = range_difference(box, x, y);
    (void)z;
    if (d.hi <= 0)
        *out = *x;
    else if (d.lo >= 0)
        *out = *y;
    else
        range_finish_span(min64(x->lo, y->lo), min64(x->hi, y->hi), out);
}

RULE(imax)
{
    const span d = range_difference(box, x, y);
    (void)z;
    if (d.lo >= 0)
        *out = *x;
    else if (d.hi <= 0)
        *out = *y;
    else
        range_finish_span(max64(x->lo, y->lo), max64(x->hi, y->hi), out);
}

RULE(ilt)
{
    const span d = range_difference(box, x, y);
    (void)z;
    range_set_bool(out, d.hi >= 0, d.lo < 0);
}

RULE(ile)
{
    const span d = range_difference(box, x, y);
    (void)z;
    range_set_bool(out, d.hi > 0, d.lo <= 0);
}

/* x - y is a constant modulo the common divisor of its coefficients: can it be 0? */
static int can_vanish(const range_val *x, const range_val *y)
{
    int64_t step = 0;
    if (x->rlo != x->rhi || y->rlo != y->rhi)
        return 1;
    for (int v = 0; v < 4; v++)
        step = range_gcd(step, (int64_t)x->coef[v] - y->coef[v]);
    return step < 2 || (x->rlo - y->rlo) % step == 0;
}

RULE(ieq)
{
    const span d = range_difference(box, x, y);
    (void)z;
    range_set_bool(out, d.lo != 0 || d.hi != 0, d.lo <= 0 && d.hi >= 0 && can_vanish(x, y));
}

RULE(ine)
{
    range_val equal;
    range_ieq(box, x, y, z, &equal);
    range_set_bool(out, equal.can_true, equal.can_false);
}
