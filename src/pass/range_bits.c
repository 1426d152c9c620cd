/* Range rules of bits and shifts of ints, of bools, and of what bools choose. */
#include "pass/range_form.h"

#include <string.h>

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
    range_finish_span(lo, max64(lo, min64(hi, most)), out);
}

static int is_low_mask(const range_val *y)
{
    return is_point(y) && y->lo > 0 && y->lo < INT32_MAX && (y->lo & (y->lo + 1)) == 0;
}

RULE(iand)
{
    (void)z;
    if (is_low_mask(y)) {
        range_mod_by(box, x, y->lo + 1, out);
        return;
    }
    if (is_low_mask(x)) {
        range_mod_by(box, y, x->lo + 1, out);
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
        range_scale(box, x, a, out);
    else
        range_finish_corners(x->lo * a, x->lo * b, x->hi * a, x->hi * b, out);
}

RULE(ishr)
{
    const span n = counts(y);
    (void)z;
    if (n.lo == n.hi)
        range_floor_by(box, x, (int64_t)1 << n.lo, out);
    else
        range_finish_corners(x->lo >> n.lo, x->lo >> n.hi, x->hi >> n.lo, x->hi >> n.hi, out);
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
