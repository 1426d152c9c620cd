/* Simplification: nodes are emitted anew from the first to the last, each through the rules
   below, which look at the operands' nodes only; the builder shares equal nodes and drops dead
   ones. A rule must hold for every input bit for bit (NaN bits aside): int wraps, x + 0 is not
   x for -0, x * 0 is not 0 for NaN, a / b is not a * (1 / b) unless b is a power of two.
   A rule answers NONE when it doesn't apply. */
#include "pass/pass.h"

#include "base/status.h"
#include "mod/arith.h"
#include "pass/rewrite.h"

#include <math.h>
#include <string.h>

static const uint32_t NONE = UINT32_MAX;

/* ---- looking at operands ---- */

static mod_op op_at(const mod_builder *b, uint32_t x)
{
    return (mod_op)mod_peek(b, x)->op;
}

static bool is_constant(const mod_builder *b, uint32_t x)
{
    const mod_op op = op_at(b, x);
    return op == OP_BOOL || op == OP_INT || op == OP_FLOAT;
}

static bool is_int(const mod_builder *b, uint32_t x, int32_t value)
{
    return op_at(b, x) == OP_INT && mod_peek(b, x)->imm.i == value;
}

static bool is_bool(const mod_builder *b, uint32_t x, int32_t value)
{
    return op_at(b, x) == OP_BOOL && mod_peek(b, x)->imm.i == value;
}

/* Exactly this float, the sign of zero included. */
static bool is_float(const mod_builder *b, uint32_t x, float value)
{
    return op_at(b, x) == OP_FLOAT && f32_bits(mod_peek(b, x)->imm.f) == f32_bits(value);
}

static uint32_t arg(const mod_builder *b, uint32_t x, uint32_t k)
{
    return mod_peek_arg(b, x, k);
}

static uint32_t emit_cell(mod_builder *b, char type, eval_cell value)
{
    if (type == 'F')
        return mod_emit_float(b, value.f);
    return type == 'I' ? mod_emit_int(b, value.i) : mod_emit_bool(b, value.i);
}

static uint32_t fold(mod_builder *b, mod_op op, const uint32_t *x, uint32_t n)
{
    const char type = mod_op_infos[op].signature[0];
    eval_cell cells[3] = {{0}, {0}, {0}};
    double wide[3] = {0, 0, 0};
    for (uint32_t k = 0; k < n; k++) {
        if (!is_constant(b, x[k]))
            return NONE;
        cells[k].i = mod_peek(b, x[k])->imm.i; /* the bits, also of a float */
        wide[k] = op_at(b, x[k]) == OP_FLOAT ? (double)cells[k].f : cells[k].i;
    }
    const eval_cell value = eval_apply(op, cells[0], cells[1], cells[2]);
    if (type == 'F' && mod_builder_is_wide(b)
        && (double)value.f != eval_apply_wide(op, wide[0], wide[1], wide[2]))
        return NONE; /* and where it is NaN */
    return emit_cell(b, type, value);
}

/* ---- int ---- */

/* (x + c) + d, which is exact since both wrap. y is a constant. */
static uint32_t add_constant(mod_builder *b, uint32_t x, uint32_t y)
{
    if (is_int(b, y, 0))
        return x;
    if (op_at(b, y) != OP_INT || op_at(b, x) != OP_iadd || op_at(b, arg(b, x, 1)) != OP_INT)
        return NONE;
    const int32_t sum = ar_add(mod_peek(b, arg(b, x, 1))->imm.i, mod_peek(b, y)->imm.i);
    return rewrite_emit2(b, OP_iadd, arg(b, x, 0), mod_emit_int(b, sum));
}

static uint32_t int_sums(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    if (op == OP_iadd)
        return op_at(b, y) == OP_ineg ? rewrite_emit2(b, OP_isub, x, arg(b, y, 0))
                                      : add_constant(b, x, y);
    if (op == OP_isub) {
        if (x == y)
            return mod_emit_int(b, 0);
        if (is_int(b, x, 0))
            return rewrite_emit1(b, OP_ineg, y);
        if (is_int(b, y, 0))
            return x;
        if (op_at(b, y) == OP_ineg)
            return rewrite_emit2(b, OP_iadd, x, arg(b, y, 0));
        if (op_at(b, y) == OP_INT && op_at(b, x) == OP_iadd)
            return add_constant(b, x, mod_emit_int(b, ar_sub(0, mod_peek(b, y)->imm.i)));
    }
    if (op == OP_ineg && op_at(b, x) == OP_ineg)
        return arg(b, x, 0);
    if (op == OP_ineg && op_at(b, x) == OP_isub)
        return rewrite_emit2(b, OP_isub, arg(b, x, 1), arg(b, x, 0));
    return NONE;
}

/* The exponent of a constant power of two, or -1. */
static int power_of_two(const mod_builder *b, uint32_t x)
{
    if (op_at(b, x) != OP_INT)
        return -1;
    const uint32_t value = (uint32_t)mod_peek(b, x)->imm.i;
    if (value == 0 || value > 1u << 30 || (value & (value - 1)) != 0)
        return -1;
    int exponent = 0;
    while (value >> exponent != 1)
        exponent++;
    return exponent;
}

static uint32_t int_products(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    const bool is_quotient = op == OP_idiv || op == OP_ifloordiv;
    const bool is_rest = op == OP_irem || op == OP_ifloormod;
    const int exponent = power_of_two(b, y);
    if (op != OP_imul && !is_quotient && !is_rest)
        return NONE;
    if (is_int(b, y, 0) || (is_int(b, x, 0) && op != OP_imul))
        return mod_emit_int(b, 0); /* also x / 0 and x % 0 */
    if (is_int(b, y, 1) || is_int(b, y, -1)) {
        if (is_rest)
            return mod_emit_int(b, 0);
        return is_int(b, y, 1) ? x : rewrite_emit1(b, OP_ineg, x);
    }
    if (op == OP_ifloordiv && exponent > 0)
        return mod_emit2(b, OP_ishr, x, mod_emit_int(b, exponent));
    if (op == OP_ifloormod && exponent > 0)
        return rewrite_emit2(b, OP_iand, x, mod_emit_int(b, (int32_t)((1u << exponent) - 1)));
    return NONE;
}

static uint32_t int_bits(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    if (op == OP_iand)
        return x == y || is_int(b, y, -1) ? x : is_int(b, y, 0) ? y : NONE;
    if (op == OP_ior)
        return x == y || is_int(b, y, 0) ? x : is_int(b, y, -1) ? y : NONE;
    if (op == OP_ixor)
        return x == y ? mod_emit_int(b, 0) : is_int(b, y, 0) ? x : NONE;
    if (op == OP_inot)
        return op_at(b, x) == OP_inot ? arg(b, x, 0) : NONE;
    if (op == OP_ishl || op == OP_ishr)
        return op_at(b, y) == OP_INT && (mod_peek(b, y)->imm.i & 31) == 0 ? x : NONE;
    return NONE;
}

static uint32_t int_extremes(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    if (op == OP_iabs)
        return op_at(b, x) == OP_iabs ? x : NONE;
    if (op == OP_imin)
        return x == y || is_int(b, y, INT32_MAX) ? x : is_int(b, y, INT32_MIN) ? y : NONE;
    if (op == OP_imax)
        return x == y || is_int(b, y, INT32_MIN) ? x : is_int(b, y, INT32_MAX) ? y : NONE;
    return NONE;
}

static uint32_t simplify_int(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    uint32_t (*const rules[])(mod_builder *, mod_op, uint32_t,
                              uint32_t) = {int_sums, int_products, int_bits, int_extremes};
    for (int i = 0; i < 4; i++) {
        const uint32_t found = rules[i](b, op, x, y);
        if (found != NONE)
            return found;
    }
    return NONE;
}

/* ---- comparisons and bool ---- */

/* int(flag) == 0 and the like are the flag or its opposite. */
static uint32_t compare_flag(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    if (op_at(b, x) != OP_b2i || op_at(b, y) != OP_INT)
        return NONE;
    const int32_t value = mod_peek(b, y)->imm.i;
    if (value != 0 && value != 1)
        return mod_emit_bool(b, op == OP_ine);
    const bool wants_true = (value == 1) == (op == OP_ieq);
    return wants_true ? arg(b, x, 0) : rewrite_emit1(b, OP_not, arg(b, x, 0));
}

static uint32_t simplify_compare(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    switch (op) {
    case OP_ilt:
        if (x == y || is_int(b, x, INT32_MAX) || is_int(b, y, INT32_MIN))
            return mod_emit_bool(b, 0);
        return NONE;
    case OP_ile:
        if (x == y || is_int(b, x, INT32_MIN) || is_int(b, y, INT32_MAX))
            return mod_emit_bool(b, 1);
        return NONE;
    case OP_ieq:
    case OP_ine:
        return x == y ? mod_emit_bool(b, op == OP_ieq) : compare_flag(b, op, x, y);
    case OP_flt:
        return x == y ? mod_emit_bool(b, 0) : NONE; /* NaN too */
    case OP_beq:
    case OP_bne:
        if (x == y)
            return mod_emit_bool(b, op == OP_beq);
        if (op_at(b, y) != OP_BOOL)
            return NONE;
        return is_bool(b, y, op == OP_beq) ? x : rewrite_emit1(b, OP_not, x);
    default:
        return NONE;
    }
}

/* Of floats only == and != are opposites: with NaN neither x < y nor y <= x. */
static uint32_t negate(mod_builder *b, uint32_t x)
{
    const uint32_t left = arg(b, x, 0), right = arg(b, x, 1);
    switch (op_at(b, x)) {
    case OP_not:
        return left;
    case OP_ilt:
        return rewrite_emit2(b, OP_ile, right, left);
    case OP_ile:
        return rewrite_emit2(b, OP_ilt, right, left);
    case OP_ieq:
        return rewrite_emit2(b, OP_ine, left, right);
    case OP_ine:
        return rewrite_emit2(b, OP_ieq, left, right);
    case OP_feq:
        return rewrite_emit2(b, OP_fne, left, right);
    case OP_fne:
        return rewrite_emit2(b, OP_feq, left, right);
    case OP_beq:
        return rewrite_emit2(b, OP_bne, left, right);
    case OP_bne:
        return rewrite_emit2(b, OP_beq, left, right);
    default:
        return NONE;
    }
}

static bool are_opposite(mod_builder *b, uint32_t x, uint32_t y)
{
    return negate(b, x) == y || negate(b, y) == x;
}

static uint32_t simplify_bool(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    const int neutral = op == OP_and; /* true && x, false || x */
    if (op == OP_not)
        return negate(b, x);
    if (op != OP_and && op != OP_or)
        return NONE;
    if (is_bool(b, x, neutral) || x == y)
        return y;
    if (is_bool(b, y, neutral))
        return x;
    if (is_bool(b, x, !neutral) || is_bool(b, y, !neutral) || are_opposite(b, x, y))
        return mod_emit_bool(b, !neutral);
    return NONE;
}

/* ---- ?: ---- */

static uint32_t select_bool(mod_builder *b, uint32_t c, uint32_t x, uint32_t y)
{
    if (is_bool(b, y, 0))
        return rewrite_emit2(b, OP_and, c, x);
    if (is_bool(b, x, 1))
        return rewrite_emit2(b, OP_or, c, y);
    if (is_bool(b, x, 0))
        return rewrite_emit2(b, OP_and, rewrite_emit1(b, OP_not, c), y);
    if (is_bool(b, y, 1))
        return rewrite_emit2(b, OP_or, rewrite_emit1(b, OP_not, c), x);
    return NONE;
}

static uint32_t simplify_select(mod_builder *b, mod_op op, uint32_t c, uint32_t x, uint32_t y)
{
    if (op != OP_bsel && op != OP_isel && op != OP_fsel)
        return NONE;
    if (x == y)
        return x;
    if (op_at(b, c) == OP_BOOL)
        return mod_peek(b, c)->imm.i ? x : y;
    if (op_at(b, c) == OP_not)
        return rewrite_emit(b, op, arg(b, c, 0), y, x);
    return op == OP_bsel ? select_bool(b, c, x, y) : NONE;
}

/* ---- float ---- */

static bool is_whole(const mod_builder *b, uint32_t x)
{
    const mod_op op = op_at(b, x);
    return op == OP_ffloor || op == OP_fceil || op == OP_fround || op == OP_ftrunc
           || op == OP_i2f;
}

/* 1 / x for a power of two whose inverse is a normal float too; then x / c is x * (1 / c). */
static uint32_t exact_inverse(mod_builder *b, uint32_t x)
{
    if (op_at(b, x) != OP_FLOAT)
        return NONE;
    const float value = mod_peek(b, x)->imm.f;
    const uint32_t bits = f32_bits(value), exponent = bits >> 23 & 0xffu;
    if ((bits & 0x7fffffu) != 0 || exponent < 1 || exponent > 252)
        return NONE;
    return mod_emit_float(b, 1.0f / value);
}

static uint32_t float_sums(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    const bool is_opposite = op_at(b, y) == OP_fneg;
    if (op == OP_fadd) {
        if (is_float(b, y, -0.0f))
            return x;
        return is_opposite ? rewrite_emit2(b, OP_fsub, x, arg(b, y, 0)) : NONE;
    }
    if (op == OP_fsub) {
        if (is_float(b, y, 0.0f))
            return x;
        return is_opposite ? rewrite_emit2(b, OP_fadd, x, arg(b, y, 0)) : NONE;
    }
    if (op == OP_fneg && op_at(b, x) == OP_fneg)
        return arg(b, x, 0);
    return NONE;
}

static uint32_t float_products(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    if (op != OP_fmul && op != OP_fdiv)
        return NONE;
    if (is_float(b, y, 1.0f))
        return x;
    if (is_float(b, y, -1.0f))
        return rewrite_emit1(b, OP_fneg, x);
    if (op_at(b, x) == OP_fneg && op_at(b, y) == OP_fneg)
        return rewrite_emit2(b, op, arg(b, x, 0), arg(b, y, 0));
    if (op == OP_fmul)
        return NONE;
    if (is_float(b, y, 0.0f) || is_float(b, y, -0.0f))
        return mod_emit_float(b, 0.0f);
    const uint32_t inverse = exact_inverse(b, y);
    return inverse == NONE ? NONE : rewrite_emit2(b, OP_fmul, x, inverse);
}

static uint32_t simplify_float(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    switch (op) {
    case OP_fadd:
    case OP_fsub:
    case OP_fneg:
        return float_sums(b, op, x, y);
    case OP_fmul:
    case OP_fdiv:
        return float_products(b, op, x, y);
    case OP_fabs:
        if (op_at(b, x) == OP_fabs)
            return x;
        return op_at(b, x) == OP_fneg ? rewrite_emit1(b, OP_fabs, arg(b, x, 0)) : NONE;
    case OP_fmin:
    case OP_fmax:
        return x == y ? x : NONE;
    case OP_ffloor:
    case OP_fceil:
    case OP_fround:
    case OP_ftrunc:
        return is_whole(b, x) ? x : NONE;
    default:
        return NONE;
    }
}

/* ---- emitting ---- */

/* Operands may change places: && and || not, whose order says what guards what. */
static bool is_commutative(mod_op op)
{
    return op == OP_iadd || op == OP_imul || op == OP_imin || op == OP_imax || op == OP_iand
           || op == OP_ior || op == OP_ixor || op == OP_ieq || op == OP_ine || op == OP_feq
           || op == OP_fne || op == OP_beq || op == OP_bne || op == OP_fadd || op == OP_fmul;
}

/* Constants to the right, else the earlier node to the left, so that equal sums meet. */
static bool is_misordered(const mod_builder *b, uint32_t x, uint32_t y)
{
    if (is_constant(b, x) != is_constant(b, y))
        return is_constant(b, x);
    return x > y;
}

static uint32_t simplified(mod_builder *b, mod_op op, const uint32_t *x, uint32_t n)
{
    const uint32_t y = n > 1 ? x[1] : x[0];
    uint32_t found = fold(b, op, x, n);
    if (found == NONE)
        found = simplify_int(b, op, x[0], y);
    if (found == NONE)
        found = simplify_compare(b, op, x[0], y);
    if (found == NONE)
        found = simplify_bool(b, op, x[0], y);
    if (found == NONE && n == 3)
        found = simplify_select(b, op, x[0], x[1], x[2]);
    if (found == NONE)
        found = simplify_float(b, op, x[0], y);
    return found;
}

static uint32_t emit_at(mod_builder *b, mod_op op, const uint32_t *args, uint16_t line,
                        uint16_t column)
{
    const uint32_t n = (uint32_t)strlen(mod_op_infos[op].signature) - 2;
    uint32_t x[3] = {args[0], args[1], args[2]};
    if (is_commutative(op) && is_misordered(b, x[0], x[1])) {
        x[0] = args[1];
        x[1] = args[0];
    }
    const uint32_t found = simplified(b, op, x, n);
    return found != NONE ? found : mod_emit(b, op, x, n, 0, line, column);
}

uint32_t rewrite_emit(mod_builder *b, mod_op op, uint32_t x, uint32_t y, uint32_t z)
{
    const uint32_t args[3] = {x, y, z};
    return emit_at(b, op, args, 0, 0);
}

uint32_t rewrite_emit1(mod_builder *b, mod_op op, uint32_t x)
{
    return rewrite_emit(b, op, x, x, x);
}

uint32_t rewrite_emit2(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    return rewrite_emit(b, op, x, y, y);
}

uint32_t rewrite_copy(mod_builder *b, const mod_fn *fn, uint32_t i, const uint32_t *new_of)
{
    const mod_node *n = &fn->nodes[i];
    uint32_t args[SACCADE_MAX_RANK] = {0};
    for (uint32_t k = 0; k < n->n_args; k++)
        args[k] = new_of[fn->args[n->args + k]];
    if (n->op <= OP_LOAD)
        return mod_emit(b, (mod_op)n->op, args, n->n_args, n->imm.i, n->line, n->column);
    return emit_at(b, (mod_op)n->op, args, n->line, n->column);
}

saccade_status pass_simplify(const mod_fn *fn, arena *arena, const mod_fn **out,
                             saccade_error *err)
{
    mod_builder *b = mod_builder_create(arena, fn->kind, fn->captures, fn->n_captures);
    uint32_t *new_of = arena_array(arena, fn->n_nodes, sizeof *new_of);
    FAIL_IF_NULL(b);
    FAIL_IF_NULL(new_of);
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        new_of[i] = rewrite_copy(b, fn, i, new_of);
    return mod_finish(b, new_of[fn->result], out, err);
}
