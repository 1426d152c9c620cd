/* range_rules.h: the range of one operation from the ranges of its operands.
 *
 * An int is known twice: as an interval, and as a linear form of the box's variables with an
 * interval as remainder, value = coef . (b h q kv) + r, rlo <= r <= rhi, which holds for every
 * point of the box without wrapping. The form is what proves q - kv <= W: differences of
 * variables lose nothing. A residue besides, so that (y * n + x) % n is x again.
 * Floats are intervals of doubles, rounded outward. */
#ifndef SACCADE_PASS_RANGE_RULES_H
#define SACCADE_PASS_RANGE_RULES_H

#include "pass/pass.h"

typedef struct range_val {
    int64_t lo, hi;   /* int */
    int64_t rlo, rhi; /* int: remainder of the linear form */
    int32_t coef[4];
    int32_t step; /* int: value = step * k + s, slo <= s <= shi; 0: not known */
    int32_t slo, shi;
    double flo, fhi; /* float; what NaN would be is not in it */
    uint8_t may_nan, can_false, can_true;
} range_val;

/* Of a bool. */
static inline pass_verdict range_verdict(const range_val *x)
{
    return !x->can_true ? PASS_NEVER : !x->can_false ? PASS_ALWAYS : PASS_UNKNOWN;
}

/* Operands that the operation lacks are NULL. */
typedef void (*range_rule)(const pass_box *box, const range_val *x, const range_val *y,
                           const range_val *z, range_val *out);

/* by mod_op; NULL for leaves */
extern const range_rule range_rules[MOD_OP_COUNT];

#define OP(name, signature, form, value, exact, fast, grad, range)                  \
    void range_##range(const pass_box *box, const range_val *x, const range_val *y, \
                       const range_val *z, range_val *out);
#include "mod/ops.def"
#undef OP

/* The head of a rule's definition. */
#define RULE(name)                                                                 \
    void range_##name(const pass_box *box, const range_val *x, const range_val *y, \
                      const range_val *z, range_val *out)

/* ---- range_form.c: values ---- */

void range_set_int(range_val *out, int64_t value);
void range_set_span(range_val *out, int64_t lo, int64_t hi);
void range_set_var(range_val *out, const pass_box *box, int var);
void range_set_bool(range_val *out, int can_false, int can_true);

/* ---- range_float.c: values ---- */

void range_set_float(range_val *out, double lo, double hi, int may_nan);

/* ---- range.c: leaves ---- */

/* What a type alone says of a loaded value. */
void range_of_dtype(const mod_capture *capture, range_val *out);
/* Constants, sizes and scalars; variables too when box is not NULL. 0 when op is no such. */
int range_leaf(const mod_fn *fn, const eval_env *env, const mod_node *node, const pass_box *box,
               range_val *out);

#endif
