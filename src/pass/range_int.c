/* Range rules of int and bool operations.
 * Every rule computes in int64 what the operation gives without wrapping. If that fits int32
 * for the whole box, nothing wraps and the linear form holds; otherwise the result is all of
 * int32 (finish). Division and remainder by a constant n split the form into multiples of n
 * and the rest: q % n is q - n * k on any box that stays inside one quotient k. */
#include "pass/range_rules.h"

#include <string.h>

/* Above this a form is dropped, so that sums of products stay inside int64. */
enum { COEF_MAX = 1 << 20, RESIDUE_MAX = 1 << 29 };
#define REST_MAX ((int64_t)1 << 56)

typedef struct span {
    int64_t lo, hi;
} span;

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int is_point(const range_val *v)
{
    return v->lo == v->hi;
}

static int has_form(const range_val *v)
{
    return (v->coef[0] | v->coef[1] | v->coef[2] | v->coef[3]) != 0;
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

/* Bounds of a linear form over the box. */
static span form_span(const pass_box *box, const int64_t coef[4], int64_t rlo, int64_t rhi)
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

/* Makes *out from the exact interval [lo, hi] and an exact form, wrapping if it must. */
static void finish(const pass_box *box, int64_t lo, int64_t hi, const int64_t coef[4],
                   int64_t rlo, int64_t rhi, range_val *out)
{
    int fits = rlo > -REST_MAX && rhi < REST_MAX;
    for (int v = 0; v < 4; v++)
        fits &= coef[v] <= COEF_MAX && coef[v] >= -COEF_MAX;
    if (fits) {
        const span s = form_span(box, coef, rlo, rhi);
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

static void finish_span(int64_t lo, int64_t hi, range_val *out)
{
    if (lo >= hi)
        range_set_int(out, (int32_t)(uint32_t)(uint64_t)lo);
    else if (lo < INT32_MIN || hi > INT32_MAX)
        range_set_span(out, INT32_MIN, INT32_MAX);
    else
        range_set_span(out, lo, hi);
}

static void finish_corners(int64_t a, int64_t b, int64_t c, int64_t d, range_val *out)
{
    finish_span(min64(min64(a, b), min64(c, d)), max64(max64(a, b), max64(c, d)), out);
}

/* Bounds of x - y as integers, before any wrapping. */
static span difference(const pass_box *box, const range_val *x, const range_val *y)
{
    span d = {x->lo - y->hi, x->hi - y->lo};
    int64_t coef[4];
    for (int v = 0; v < 4; v++)
        coef[v] = (int64_t)x->coef[v] - y->coef[v];
    const span s = form_span(box, coef, x->rlo - y->rhi, x->rhi - y->rlo);
    d.lo = max64(d.lo, s.lo);
    d.hi = min64(d.hi, s.hi);
    return d;
}

/* ---- sums and products ---- */

#define RULE(name)                                                                 \
    void range_##name(const pass_box *box, const range_val *x, const range_val *y, \
                      const range_val *z, range_val *out)
#define UNUSED(a, b) ((void)(a), (void)(b))

static int64_t floor_div(int64_t a, int64_t n)
{
    return a / n - (a % n != 0 && (a < 0) != (n < 0));
}

static int64_t gcd64(int64_t a, int64_t b)
{
    a = a < 0 ? -a : a;
    b = b < 0 ? -b : b;
    while (b) {
        const int64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* Adds to *out what is known of its value modulo step, where that says something and the
 * value, exactly within [lo, hi], did not wrap. */
static void set_residue(range_val *out, int64_t lo, int64_t hi, int64_t step, int64_t slo,
                        int64_t shi)
{
    if (step < 2 || step > RESIDUE_MAX || shi - slo >= step - 1 || lo < INT32_MIN
        || hi > INT32_MAX || out->lo == out->hi)
        return;
    const int64_t whole = floor_div(slo, step) * step;
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
    const int64_t step = gcd64(x->step, y->step), lo = x->lo + y->lo, hi = x->hi + y->hi;
    (void)z;
    for (int v = 0; v < 4; v++)
        coef[v] = (int64_t)x->coef[v] + y->coef[v];
    finish(box, lo, hi, coef, x->rlo + y->rlo, x->rhi + y->rhi, out);
    set_residue(out, lo, hi, step, a.lo + b.lo, a.hi + b.hi);
}

RULE(isub)
{
    int64_t coef[4];
    const span a = residue_of(x), b = residue_of(y);
    const int64_t step = gcd64(x->step, y->step), lo = x->lo - y->hi, hi = x->hi - y->lo;
    (void)z;
    for (int v = 0; v < 4; v++)
        coef[v] = (int64_t)x->coef[v] - y->coef[v];
    finish(box, lo, hi, coef, x->rlo - y->rhi, x->rhi - y->rlo, out);
    set_residue(out, lo, hi, step, a.lo - b.hi, a.hi - b.lo);
}

/* c * x; |c| <= 2^31 */
static void scale(const pass_box *box, const range_val *x, int64_t c, range_val *out)
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
        finish(box, lo, hi, coef, min64(c * x->rlo, c * x->rhi), max64(c * x->rlo, c * x->rhi),
               out);
    else
        finish_span(lo, hi, out);
    set_residue(out, lo, hi, step * size, min64(ra, rb), max64(ra, rb));
}

RULE(imul)
{
    (void)z;
    if (is_point(y))
        scale(box, x, y->lo, out);
    else if (is_point(x))
        scale(box, y, x->lo, out);
    else
        finish_corners(x->lo * y->lo, x->lo * y->hi, x->hi * y->lo, x->hi * y->hi, out);
}

RULE(ineg)
{
    UNUSED(y, z);
    scale(box, x, -1, out);
}

RULE(inot)
{
    int64_t coef[4];
    UNUSED(y, z);
    for (int v = 0; v < 4; v++)
        coef[v] = -(int64_t)x->coef[v];
    finish(box, -x->hi - 1, -x->lo - 1, coef, -x->rhi - 1, -x->rlo - 1, out);
}

RULE(iabs)
{
    (void)z;
    if (x->lo >= 0)
        *out = *x;
    else if (x->hi <= 0)
        range_ineg(box, x, y, z, out);
    else
        finish_span(0, max64(-x->lo, x->hi), out);
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
    span s = form_span(box, rest, x->rlo, x->rhi);
    if (!any) { /* the rest is x itself */
        s.lo = max64(s.lo, x->lo);
        s.hi = min64(s.hi, x->hi);
    }
    return s;
}

/* floor(x / n), n > 0 */
static void floor_by(const pass_box *box, const range_val *x, int64_t n, range_val *out)
{
    int64_t whole[4], rest[4];
    const span r = split(box, x, n, whole, rest);
    finish(box, floor_div(x->lo, n), floor_div(x->hi, n), whole, floor_div(r.lo, n),
           floor_div(r.hi, n), out);
}

/* x - n * floor(x / n), n > 0 */
static void mod_by(const pass_box *box, const range_val *x, int64_t n, range_val *out)
{
    int64_t whole[4], rest[4], step = n;
    const span r = split(box, x, n, whole, rest);
    const int64_t k = floor_div(r.lo, n);
    if (k == floor_div(r.hi, n)) {
        finish(box, r.lo - n * k, r.hi - n * k, rest, x->rlo - n * k, x->rhi - n * k, out);
        return;
    }
    if (x->step && x->step % n == 0 && x->slo / n == x->shi / n) {
        range_set_span(out, x->slo % n, x->shi % n);
        return;
    }
    for (int v = 0; v < 4; v++)
        step = gcd64(step, rest[v]);
    if (x->rlo != x->rhi)
        step = 1;
    const int64_t first = x->rlo - step * floor_div(x->rlo, step); /* congruence */
    finish_span(step > 1 ? first : 0, step > 1 ? n - step + first : n - 1, out);
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
    finish_span(lo, hi, out);
}

static int64_t trunc_div(int64_t a, int64_t n)
{
    return a / n;
}

RULE(idiv)
{
    (void)z;
    if (is_point(y) && y->lo > 0 && x->lo >= 0)
        floor_by(box, x, y->lo, out);
    else
        divide(x, y, trunc_div, out);
}

RULE(ifloordiv)
{
    (void)z;
    if (is_point(y) && y->lo > 0)
        floor_by(box, x, y->lo, out);
    else
        divide(x, y, floor_div, out);
}

RULE(irem)
{
    const int64_t n = max64(y->hi, -y->lo); /* largest |y| */
    const int64_t most = max64(n - 1, 0);
    (void)z;
    if (is_point(y) && x->lo >= 0 && n > 0)
        mod_by(box, x, n, out);
    else if (x->lo >= 0 && x->hi < y->lo)
        *out = *x;
    else
        finish_span(x->lo < 0 ? max64(x->lo, -most) : 0, x->hi > 0 ? min64(x->hi, most) : 0,
                    out);
}

RULE(ifloormod)
{
    (void)z;
    if (is_point(y) && y->lo > 0)
        mod_by(box, x, y->lo, out);
    else if (x->lo >= 0 && x->hi < y->lo)
        *out = *x;
    else
        finish_span(min64(y->lo + 1, 0), max64(y->hi - 1, 0), out);
}

/* ---- order ---- */

RULE(imin)
{
    const span d = difference(box, x, y);
    (void)z;
    if (d.hi <= 0)
        *out = *x;
    else if (d.lo >= 0)
        *out = *y;
    else
        finish_span(min64(x->lo, y->lo), min64(x->hi, y->hi), out);
}

RULE(imax)
{
    const span d = difference(box, x, y);
    (void)z;
    if (d.lo >= 0)
        *out = *x;
    else if (d.hi <= 0)
        *out = *y;
    else
        finish_span(max64(x->lo, y->lo), max64(x->hi, y->hi), out);
}

RULE(ilt)
{
    const span d = difference(box, x, y);
    (void)z;
    range_set_bool(out, d.hi >= 0, d.lo < 0);
}

RULE(ile)
{
    const span d = difference(box, x, y);
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
        step = gcd64(step, (int64_t)x->coef[v] - y->coef[v]);
    return step < 2 || (x->rlo - y->rlo) % step == 0;
}

RULE(ieq)
{
    const span d = difference(box, x, y);
    (void)z;
    range_set_bool(out, d.lo != 0 || d.hi != 0, d.lo <= 0 && d.hi >= 0 && can_vanish(x, y));
}

RULE(ine)
{
    range_val equal;
    range_ieq(box, x, y, z, &equal);
    range_set_bool(out, equal.can_true, equal.can_false);
}

/* ---- bits ---- */

/* Bits that every value of the range shares. */
typedef struct bits {
    uint32_t known, value; /* value is 0 where not known */
} bits;

static bits bits_of(const range_val *x)
{
    const uint32_t lo = (uint32_t)x->lo, differ = lo ^ (uint32_t)x->hi;
    bits b = {differ ? ~(uint32_t)0 << (31 - __builtin_clz(differ)) << 1 : ~(uint32_t)0, 0};
    b.value = lo & b.known;
    if (x->rlo == x->rhi && has_form(x)) { /* low bits: a congruence modulo a power of two */
        uint32_t all = 0;
        for (int v = 0; v < 4; v++)
            all |= (uint32_t)x->coef[v];
        const uint32_t low = (all & -all) - 1;
        b.known |= low;
        b.value |= (uint32_t)x->rlo & low;
    }
    return b;
}

static void from_bits(bits b, int64_t most, range_val *out)
{
    const uint32_t free = ~b.known, sign = (uint32_t)1 << 31;
    const int32_t lo = (int32_t)(b.value | (free & sign));
    const int32_t hi = (int32_t)(b.value | (free & ~sign));
    finish_span(lo, max64(lo, min64(hi, most)), out);
}

static int is_low_mask(const range_val *y)
{
    return is_point(y) && y->lo > 0 && y->lo < INT32_MAX && (y->lo & (y->lo + 1)) == 0;
}

RULE(iand)
{
    (void)z;
    if (is_low_mask(y)) {
        mod_by(box, x, y->lo + 1, out);
        return;
    }
    if (is_low_mask(x)) {
        mod_by(box, y, x->lo + 1, out);
        return;
    }
    const bits a = bits_of(x), b = bits_of(y);
    const uint32_t zeros = (a.known & ~a.value) | (b.known & ~b.value);
    const uint32_t ones = a.value & b.value;
    const int64_t most = min64(x->lo >= 0 ? x->hi : INT32_MAX, y->lo >= 0 ? y->hi : INT32_MAX);
    from_bits((bits){zeros | ones, ones}, most, out);
}

RULE(ior)
{
    const bits a = bits_of(x), b = bits_of(y);
    const uint32_t zeros = (a.known & ~a.value) & (b.known & ~b.value);
    const uint32_t ones = a.value | b.value;
    UNUSED(box, z);
    from_bits((bits){zeros | ones, ones}, INT32_MAX, out);
}

RULE(ixor)
{
    const bits a = bits_of(x), b = bits_of(y);
    const uint32_t known = a.known & b.known;
    UNUSED(box, z);
    from_bits((bits){known, (a.value ^ b.value) & known}, INT32_MAX, out);
}

/* Shift counts are taken mod 32. */
static span counts(const range_val *y)
{
    span s = {0, 31};
    if (is_point(y))
        s.lo = s.hi = y->lo & 31;
    else if (y->lo >= 0 && y->hi <= 31)
        s = (span){y->lo, y->hi};
    return s;
}

RULE(ishl)
{
    const span n = counts(y);
    const int64_t a = (int64_t)1 << n.lo, b = (int64_t)1 << n.hi;
    (void)z;
    if (a == b)
        scale(box, x, a, out);
    else
        finish_corners(x->lo * a, x->lo * b, x->hi * a, x->hi * b, out);
}

RULE(ishr)
{
    const span n = counts(y);
    (void)z;
    if (n.lo == n.hi)
        floor_by(box, x, (int64_t)1 << n.lo, out);
    else
        finish_corners(x->lo >> n.lo, x->lo >> n.hi, x->hi >> n.lo, x->hi >> n.hi, out);
}

/* ---- bool ---- */

RULE(and)
{
    UNUSED(box, z);
    range_set_bool(out, x->can_false | y->can_false, x->can_true & y->can_true);
}

RULE(or)
{
    UNUSED(box, z);
    range_set_bool(out, x->can_false & y->can_false, x->can_true | y->can_true);
}

RULE(not )
{
    UNUSED(box, z);
    (void)y;
    range_set_bool(out, x->can_true, x->can_false);
}

RULE(beq)
{
    UNUSED(box, z);
    range_set_bool(out, (x->can_true & y->can_false) | (x->can_false & y->can_true),
                   (x->can_true & y->can_true) | (x->can_false & y->can_false));
}

RULE(bne)
{
    range_val equal;
    range_beq(box, x, y, z, &equal);
    range_set_bool(out, equal.can_true, equal.can_false);
}

RULE(bsel)
{
    (void)box;
    range_set_bool(out, (x->can_true & y->can_false) | (x->can_false & z->can_false),
                   (x->can_true & y->can_true) | (x->can_false & z->can_true));
}

RULE(isel)
{
    (void)box;
    if (!x->can_false) {
        *out = *y;
    } else if (!x->can_true) {
        *out = *z;
    } else {
        range_set_span(out, min64(y->lo, z->lo), max64(y->hi, z->hi));
        if (memcmp(y->coef, z->coef, sizeof y->coef) == 0) { /* one form, wider remainder */
            memcpy(out->coef, y->coef, sizeof out->coef);
            out->rlo = min64(y->rlo, z->rlo);
            out->rhi = max64(y->rhi, z->rhi);
        }
    }
}

RULE(b2i)
{
    UNUSED(box, z);
    (void)y;
    range_set_span(out, !x->can_false, x->can_true);
}
