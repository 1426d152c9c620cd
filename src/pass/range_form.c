/* Values of ints as intervals and linear forms (range_rules.h), and what rules make of them.
 * Every rule computes in int64 what the operation gives without wrapping. If that fits int32
 * for the whole box, nothing wraps and the linear form holds; otherwise the result is all of
 * int32 (range_finish). */
#include "pass/range_form.h"

#include "base/integers.h"

#include <string.h>

#define REST_MAX ((int64_t)1 << 56)

int64_t range_floor_div(int64_t a, int64_t n)
{
    return a / n - (a % n != 0 && (a < 0) != (n < 0));
}

int64_t range_gcd(int64_t a, int64_t b)
{
    const int64_t divisor = common_divisor(a, b);
    return divisor < 0 ? -divisor : divisor;
}

void range_set_span(range_val *out, int64_t lo, int64_t hi)
{
    out->lo = out->rlo = lo;
    out->hi = out->rhi = hi;
    out->step = 0;
    memset(out->coef, 0, sizeof out->coef);
}

void range_set_int(range_val *out, int64_t value)
{
    range_set_span(out, value, value);
}

void range_set_var(range_val *out, const pass_box *box, int var)
{
    out->lo = box->lo[var];
    out->hi = box->hi[var];
    out->rlo = out->rhi = 0;
    out->step = 0;
    memset(out->coef, 0, sizeof out->coef);
    out->coef[var] = 1;
}

void range_set_bool(range_val *out, int can_false, int can_true)
{
    out->can_false = (uint8_t)can_false;
    out->can_true = (uint8_t)can_true;
}

span range_form_span(const pass_box *box, const int64_t coef[4], int64_t rlo, int64_t rhi)
{
    span s = {rlo, rhi};
    for (int v = 0; v < 4; v++) {
        if (coef[v] == 0)
            continue;
        const int64_t a = coef[v] * box->lo[v], b = coef[v] * box->hi[v];
        s.lo += a < b ? a : b;
        s.hi += a < b ? b : a;
    }
    return s;
}

void range_finish(const pass_box *box, int64_t lo, int64_t hi, const int64_t coef[4],
                  int64_t rlo, int64_t rhi, range_val *out)
{
    int fits = rlo > -REST_MAX && rhi < REST_MAX;
    for (int v = 0; v < 4; v++)
        fits &= coef[v] <= COEF_MAX && coef[v] >= -COEF_MAX;
    if (fits) {
        const span s = range_form_span(box, coef, rlo, rhi);
        lo = max64(lo, s.lo);
        hi = min64(hi, s.hi);
    }
    if (lo >= hi) {
        range_set_int(out, (int32_t)(uint32_t)(uint64_t)lo);
    } else if (lo < INT32_MIN || hi > INT32_MAX) {
        range_set_span(out, INT32_MIN, INT32_MAX);
    } else if (!fits) {
        range_set_span(out, lo, hi);
    } else {
        out->lo = lo;
        out->hi = hi;
        out->rlo = rlo;
        out->rhi = rhi;
        out->step = 0;
        for (int v = 0; v < 4; v++)
            out->coef[v] = (int32_t)coef[v];
    }
}

void range_finish_span(int64_t lo, int64_t hi, range_val *out)
{
    if (lo >= hi)
        range_set_int(out, (int32_t)(uint32_t)(uint64_t)lo);
    else if (lo < INT32_MIN || hi > INT32_MAX)
        range_set_span(out, INT32_MIN, INT32_MAX);
    else
        range_set_span(out, lo, hi);
}

void range_finish_corners(int64_t a, int64_t b, int64_t c, int64_t d, range_val *out)
{
    range_finish_span(min64(min64(a, b), min64(c, d)), max64(max64(a, b), max64(c, d)), out);
}

span range_difference(const pass_box *box, const range_val *x, const range_val *y)
{
    span d = {x->lo - y->hi, x->hi - y->lo};
    int64_t coef[4];
    for (int v = 0; v < 4; v++)
        coef[v] = (int64_t)x->coef[v] - y->coef[v];
    const span s = range_form_span(box, coef, x->rlo - y->rhi, x->rhi - y->rlo);
    d.lo = max64(d.lo, s.lo);
    d.hi = min64(d.hi, s.hi);
    return d;
}
