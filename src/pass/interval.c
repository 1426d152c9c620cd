/* A mask that is one interval of keys per row: each bool node, and its opposite, is carried
   as a pair of bounds lo <= kv < hi, free of kv. An inequality gives one when it compares
   kv, kv + c, c - kv, the distance of one of these from 0, or kv / n (n constant) with
   something free of kv, and c is provably small, so that kv + c can't wrap; the bounds
   themselves saturate. && intersects; || joins half-lines of one direction, what follows a
   half-line at its end, conditions free of kv, and terms of which one has a condition where
   the other has its opposite. Equality of captured values (documents) is not an interval
   here: only the values know. */
#include "pass/pass.h"

#include "base/status.h"
#include "mod/arith.h"
#include "pass/rewrite.h"

static const uint32_t NONE = UINT32_MAX;

enum { MOST_SIZE = 1 << 30 };

static uint32_t operand(const mod_fn *fn, uint32_t node, uint32_t k)
{
    return fn->args[fn->nodes[node].args + k];
}

/* ---- how large an int can be ---- */

typedef struct extent {
    int64_t lo, hi;
} extent;

static extent extent_or_all(int64_t lo, int64_t hi)
{
    if (lo < INT32_MIN || hi > INT32_MAX)
        return (extent){INT32_MIN, INT32_MAX};
    return (extent){lo, hi};
}

static extent extent_of_dtype(saccade_dtype dtype)
{
    switch (dtype) {
    case SACCADE_I8:
        return (extent){INT8_MIN, INT8_MAX};
    case SACCADE_U8:
        return (extent){0, UINT8_MAX};
    case SACCADE_I16:
        return (extent){INT16_MIN, INT16_MAX};
    case SACCADE_U16:
        return (extent){0, UINT16_MAX};
    default:
        return (extent){INT32_MIN, INT32_MAX};
    }
}

static extent extent_of_product(extent x, extent y)
{
    const int64_t p[4] = {x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi};
    int64_t lo = p[0], hi = p[0];
    for (int i = 1; i < 4; i++) {
        lo = p[i] < lo ? p[i] : lo;
        hi = p[i] > hi ? p[i] : hi;
    }
    return extent_or_all(lo, hi);
}

/* By a constant above 0: quotients shrink, rests are below it. */
static extent extent_of_quotient(mod_op op, extent x, int64_t by)
{
    switch (op) {
    case OP_idiv:
        return (extent){x.lo / by, x.hi / by};
    case OP_ifloordiv:
        return (extent){ar_floordiv((int32_t)x.lo, (int32_t)by),
                        ar_floordiv((int32_t)x.hi, (int32_t)by)};
    case OP_irem:
        return (extent){x.lo < 0 ? 1 - by : 0, by - 1};
    default:
        return (extent){0, by - 1};
    }
}

static extent extent_of_operation(const mod_fn *fn, const mod_node *n, const extent *all)
{
    static const extent any = {INT32_MIN, INT32_MAX};
    const uint32_t *args = fn->args + n->args;
    const extent x = all[args[0]], y = n->n_args > 1 ? all[args[1]] : any;
    switch (n->op) {
    case OP_iadd:
        return extent_or_all(x.lo + y.lo, x.hi + y.hi);
    case OP_isub:
        return extent_or_all(x.lo - y.hi, x.hi - y.lo);
    case OP_ineg:
        return extent_or_all(-x.hi, -x.lo);
    case OP_imul:
        return extent_of_product(x, y);
    case OP_imin:
        return (extent){x.lo < y.lo ? x.lo : y.lo, x.hi < y.hi ? x.hi : y.hi};
    case OP_imax:
        return (extent){x.lo > y.lo ? x.lo : y.lo, x.hi > y.hi ? x.hi : y.hi};
    case OP_idiv:
    case OP_ifloordiv:
    case OP_irem:
    case OP_ifloormod:
        return y.lo == y.hi && y.lo > 0 ? extent_of_quotient((mod_op)n->op, x, y.lo) : any;
    case OP_ishr:
        return y.lo == y.hi ? (extent){ar_shr((int32_t)x.lo, (int32_t)y.lo),
                                       ar_shr((int32_t)x.hi, (int32_t)y.lo)}
                            : any;
    case OP_iand:
        return y.lo == y.hi && y.lo >= 0 ? (extent){0, y.lo} : any;
    case OP_isel:
        return (extent){y.lo < all[args[2]].lo ? y.lo : all[args[2]].lo,
                        y.hi > all[args[2]].hi ? y.hi : all[args[2]].hi};
    default:
        return any;
    }
}

static extent extent_of(const mod_fn *fn, uint32_t i, const extent *all)
{
    const mod_node *n = &fn->nodes[i];
    switch (n->op) {
    case OP_BOOL:
    case OP_INT:
        return (extent){n->imm.i, n->imm.i};
    case OP_VAR:
        return (extent){n->imm.i <= VAR_H ? 0 : PASS_NEAR_MIN, PASS_NEAR_MAX};
    case OP_SIZE:
        return (extent){0, MOST_SIZE};
    case OP_SCALAR: /* by value, of any width */
        return (extent){INT32_MIN, INT32_MAX};
    case OP_LOAD:
        return extent_of_dtype(fn->captures[n->imm.i].dtype);
    default:
        break;
    }
    if (n->type == MOD_INT && n->n_args > 0)
        return extent_of_operation(fn, n, all);
    return n->type == MOD_BOOL ? (extent){0, 1} : (extent){INT32_MIN, INT32_MAX};
}

/* ---- intervals ---- */

/* kv seen through a shape: value = sign * kv + c, or kv / by. */
typedef struct ramp {
    int sign;      /* 1, -1; 0: no ramp */
    uint32_t c;    /* node of the builder, NONE: 0 */
    extent size;   /* of c */
    int32_t by;    /* 1, or the divisor */
    bool is_floor; /* the quotient rounds down, else towards 0 */
} ramp;

/* Nodes of the builder; lo NONE: not an interval. Constant ends INT32_MIN, INT32_MAX: open. */
typedef struct interval {
    uint32_t lo, hi;
} interval;

typedef struct bounder {
    const mod_fn *fn;
    mod_builder *b;
    uint32_t *copy; /* of each node of fn, in b */
    extent *extents;
    ramp *ramps;            /* of int nodes */
    interval *intervals[2]; /* of bool nodes: where they hold, and where they do not */
} bounder;

enum { HOLDS, FAILS };

static const interval no_interval = {NONE, NONE};

static uint32_t least(mod_builder *b)
{
    return mod_emit_int(b, INT32_MIN);
}

static uint32_t most(mod_builder *b)
{
    return mod_emit_int(b, INT32_MAX);
}

static bool is_free(const mod_fn *fn, uint32_t node)
{
    return !(fn->nodes[node].deps & DEP_KV);
}

static ramp ramp_of_quotient(const mod_fn *fn, uint32_t node)
{
    const mod_op op = (mod_op)fn->nodes[node].op;
    const ramp none = {0};
    if (op != OP_idiv && op != OP_ifloordiv && op != OP_ishr)
        return none;
    const mod_node *n = &fn->nodes[operand(fn, node, 1)];
    if (fn->nodes[operand(fn, node, 0)].op != OP_VAR || n->op != OP_INT)
        return none;
    ramp r = {.sign = 1, .c = NONE, .by = n->imm.i, .is_floor = op != OP_idiv};
    if (op == OP_ishr)
        r.by = (n->imm.i & 31) < 30 ? 1 << (n->imm.i & 31) : 0;
    return r.by > 1 && r.by <= PASS_NEAR_MAX ? r : none;
}

static int64_t least_of_ramp(const ramp *r)
{
    return r->size.lo + (r->sign > 0 ? PASS_NEAR_MIN : -PASS_NEAR_MAX);
}

/* x + y, x - y or y - x for a ramp x and y free of kv. */
static ramp moved_ramp(const bounder *w, ramp x, mod_op op, uint32_t still, bool is_left)
{
    mod_builder *b = w->b;
    const uint32_t y = w->copy[still];
    const extent i = x.size, j = w->extents[still];
    ramp r = x;
    if (op == OP_iadd) {
        r.size = (extent){i.lo + j.lo, i.hi + j.hi};
        r.c = x.c == NONE ? y : rewrite_emit2(b, OP_iadd, x.c, y);
    } else if (is_left) {
        r.size = (extent){i.lo - j.hi, i.hi - j.lo};
        r.c = x.c == NONE ? rewrite_emit1(b, OP_ineg, y) : rewrite_emit2(b, OP_isub, x.c, y);
    } else {
        r.sign = -x.sign;
        r.size = (extent){j.lo - i.hi, j.hi - i.lo};
        r.c = x.c == NONE ? y : rewrite_emit2(b, OP_isub, y, x.c);
    }
    const int64_t lo = least_of_ramp(&r);
    const int64_t hi = r.size.hi + (r.sign > 0 ? PASS_NEAR_MAX : -PASS_NEAR_MIN);
    if (lo < INT32_MIN || hi > INT32_MAX)
        r.sign = 0; /* it might wrap */
    return r;
}

static ramp ramp_of(const bounder *w, uint32_t node)
{
    const mod_fn *fn = w->fn;
    const mod_node *n = &fn->nodes[node];
    const ramp none = {0};
    if (n->type != MOD_INT || is_free(fn, node))
        return none;
    if (n->op == OP_VAR)
        return (ramp){.sign = 1, .c = NONE, .by = 1};
    if (n->op != OP_iadd && n->op != OP_isub)
        return ramp_of_quotient(fn, node);
    const uint32_t x = operand(fn, node, 0), y = operand(fn, node, 1);
    const bool is_left = !is_free(fn, x);
    const ramp from = w->ramps[is_left ? x : y];
    const uint32_t still = is_left ? y : x;
    if (from.sign == 0 || from.by != 1 || !is_free(fn, still))
        return none;
    return moved_ramp(w, from, (mod_op)n->op, still, is_left);
}

/* x op y for op + or -, held within int32; `size` is y's extent, x's is x_size. */
static uint32_t saturating(mod_builder *b, mod_op op, uint32_t x, extent x_size, uint32_t y,
                           extent y_size)
{
    const uint32_t plain = rewrite_emit2(b, op, x, y);
    const extent z = op == OP_iadd ? (extent){x_size.lo + y_size.lo, x_size.hi + y_size.hi}
                                   : (extent){x_size.lo - y_size.hi, x_size.hi - y_size.lo};
    const uint32_t zero = mod_emit_int(b, 0);
    uint32_t result = plain;
    if (z.lo >= INT32_MIN && z.hi <= INT32_MAX)
        return plain;
    /* it went the wrong way: y moved it up and it is smaller, or down and larger */
    const uint32_t up =
        op == OP_iadd ? rewrite_emit2(b, OP_ilt, zero, y) : rewrite_emit2(b, OP_ilt, y, zero);
    if (z.hi > INT32_MAX)
        result = rewrite_emit(b, OP_isel,
                              rewrite_emit2(b, OP_and, up, rewrite_emit2(b, OP_ilt, plain, x)),
                              most(b), result);
    if (z.lo < INT32_MIN)
        result = rewrite_emit(b, OP_isel,
                              rewrite_emit2(b, OP_and, rewrite_emit1(b, OP_not, up),
                                            rewrite_emit2(b, OP_ilt, x, plain)),
                              least(b), result);
    return result;
}

static uint32_t next(mod_builder *b, uint32_t x, extent size)
{
    return saturating(b, OP_iadd, x, size, mod_emit_int(b, 1), (extent){1, 1});
}

/* The least kv with kv / by >= x, for |x| by within int32: x by, or for x <= 0 and quotients
 * towards 0, (x - 1) by + 1. */
static uint32_t first_of_quotient(mod_builder *b, const ramp *r, uint32_t x)
{
    const uint32_t by = mod_emit_int(b, r->by), one = mod_emit_int(b, 1);
    const uint32_t first = rewrite_emit2(b, OP_imul, x, by);
    if (r->is_floor)
        return first;
    const uint32_t low = rewrite_emit2(
        b, OP_iadd, rewrite_emit2(b, OP_imul, rewrite_emit2(b, OP_isub, x, one), by), one);
    return rewrite_emit(b, OP_isel, rewrite_emit2(b, OP_ilt, mod_emit_int(b, 0), x), first,
                        low);
}

/* Which ends a comparison of a ramp with x sets: x <= ramp, ramp <= x; strict: <. */
typedef struct ends {
    bool lower, upper, strict;
} ends;

/* An int free of kv, as a node of the builder. */
typedef struct still {
    uint32_t node;
    extent size;
} still;

static interval of_quotient(const bounder *w, const ramp *r, still x, ends e)
{
    mod_builder *b = w->b;
    const extent size = x.size;
    const uint32_t after = rewrite_emit2(b, OP_iadd, x.node, mod_emit_int(b, 1));
    const int64_t reach = (int64_t)r->by * 2;
    interval at = {least(b), most(b)};
    if (size.lo * r->by < INT32_MIN + reach || size.hi * r->by > INT32_MAX - reach)
        return no_interval;
    if (e.lower)
        at.lo = first_of_quotient(b, r, e.strict ? after : x.node);
    if (e.upper)
        at.hi = first_of_quotient(b, r, e.strict ? x.node : after);
    return at;
}

static extent within_int(int64_t lo, int64_t hi)
{
    return (extent){lo < INT32_MIN ? INT32_MIN : lo, hi > INT32_MAX ? INT32_MAX : hi};
}

/* kv + c against x is kv against x - c; c - kv against x is kv against c - x, turned round. */
static interval of_sum(const bounder *w, const ramp *r, still x, ends e)
{
    mod_builder *b = w->b;
    const bool is_up = r->sign > 0;
    const bool is_from = is_up ? e.lower : e.upper, is_to = is_up ? e.upper : e.lower;
    const extent size = x.size;
    interval at = {least(b), most(b)};
    if (r->c != NONE && is_up) {
        x.node = saturating(b, OP_isub, x.node, size, r->c, r->size);
        x.size = within_int(size.lo - r->size.hi, size.hi - r->size.lo);
    } else if (r->c != NONE) {
        x.node = saturating(b, OP_isub, r->c, r->size, x.node, size);
        x.size = within_int(r->size.lo - size.hi, r->size.hi - size.lo);
    }
    if (is_from)
        at.lo = e.strict ? next(b, x.node, x.size) : x.node;
    if (is_to)
        at.hi = e.strict ? x.node : next(b, x.node, x.size);
    return at;
}

static interval of_both(mod_builder *b, interval i, interval j)
{
    if (i.lo == NONE || j.lo == NONE)
        return no_interval;
    return (interval){rewrite_emit2(b, OP_imax, i.lo, j.lo),
                      rewrite_emit2(b, OP_imin, i.hi, j.hi)};
}

/* |ramp| <= x: it lies between -x and x, which hold nothing for x below 0. */
static interval of_distance(const bounder *w, const ramp *r, still x, bool is_strict)
{
    const extent none = {0, 0};
    const still minus = {saturating(w->b, OP_isub, mod_emit_int(w->b, 0), none, x.node, x.size),
                         within_int(-x.size.hi, -x.size.lo)};
    return of_both(w->b, of_sum(w, r, minus, (ends){true, false, is_strict}),
                   of_sum(w, r, x, (ends){false, true, is_strict}));
}

/* If the node is abs(ramp), that ramp; else sign 0. The ramp must stay above INT32_MIN, whose
 * abs wraps. */
static ramp distant_ramp(const bounder *w, uint32_t node)
{
    const ramp none = {0};
    if (w->fn->nodes[node].op != OP_iabs)
        return none;
    const ramp r = w->ramps[operand(w->fn, node, 0)];
    return r.sign != 0 && r.by == 1 && least_of_ramp(&r) > INT32_MIN ? r : none;
}

static interval of_comparison(const bounder *w, uint32_t node, int side)
{
    const mod_fn *fn = w->fn;
    mod_op op = (mod_op)fn->nodes[node].op;
    uint32_t x = operand(fn, node, 0), y = operand(fn, node, 1);
    if (op == (side == FAILS ? OP_ieq : OP_ine))
        return no_interval;
    if (side == FAILS) { /* !(x < y) is y <= x */
        const uint32_t first = x;
        x = y;
        y = first;
        op = op == OP_ilt ? OP_ile : op == OP_ile ? OP_ilt : OP_ieq;
    }
    const bool is_left = !is_free(fn, x); /* the side of kv */
    const uint32_t moving = is_left ? x : y, other = is_left ? y : x;
    if (!is_free(fn, other))
        return no_interval;
    const still at = {w->copy[other], w->extents[other]};
    const ramp far = distant_ramp(w, moving), r = w->ramps[moving];
    if (far.sign != 0 && is_left && op != OP_ieq)
        return of_distance(w, &far, at, op == OP_ilt);
    if (r.sign == 0)
        return no_interval;
    const ends e =
        op == OP_ieq ? (ends){true, true, false} : (ends){!is_left, is_left, op == OP_ilt};
    return r.by > 1 ? of_quotient(w, &r, at, e) : of_sum(w, &r, at, e);
}

/* A condition free of kv: all keys or none. */
static interval of_condition(mod_builder *b, uint32_t condition)
{
    return (interval){rewrite_emit(b, OP_isel, condition, least(b), most(b)), most(b)};
}

/* One interval where a condition free of kv holds, another where it does not. */
static interval of_choice(mod_builder *b, uint32_t condition, interval i, interval j)
{
    if (i.lo == NONE || j.lo == NONE)
        return no_interval;
    return (interval){rewrite_emit(b, OP_isel, condition, i.lo, j.lo),
                      rewrite_emit(b, OP_isel, condition, i.hi, j.hi)};
}

/* Keys of a half-line i and those of j where that is one interval: j is a half-line of the same
 * direction, or begins where i ends. */
static interval beside(mod_builder *b, interval i, interval j)
{
    if (i.lo == least(b) && (j.lo == least(b) || j.lo == i.hi))
        return (interval){least(b), rewrite_emit2(b, OP_imax, i.hi, j.hi)};
    if (i.hi == most(b) && (j.hi == most(b) || j.hi == i.lo))
        return (interval){rewrite_emit2(b, OP_imin, i.lo, j.lo), most(b)};
    return no_interval;
}

static interval of_either(mod_builder *b, interval i, interval j)
{
    if (i.lo == NONE || j.lo == NONE)
        return no_interval;
    const interval first = beside(b, i, j);
    return first.lo == NONE ? beside(b, j, i) : first;
}

static bool are_opposite(const mod_fn *fn, uint32_t x, uint32_t y)
{
    const mod_node *m = &fn->nodes[x], *n = &fn->nodes[y];
    if (m->op == OP_not || n->op == OP_not)
        return m->op == OP_not ? operand(fn, x, 0) == y : operand(fn, y, 0) == x;
    if (m->n_args != 2 || n->n_args != 2)
        return false;
    const uint32_t x0 = operand(fn, x, 0), x1 = operand(fn, x, 1);
    const uint32_t y0 = operand(fn, y, 0), y1 = operand(fn, y, 1);
    if ((m->op == OP_ieq && n->op == OP_ine) || (m->op == OP_ine && n->op == OP_ieq))
        return (x0 == y0 && x1 == y1) || (x0 == y1 && x1 == y0);
    return ((m->op == OP_ilt && n->op == OP_ile) || (m->op == OP_ile && n->op == OP_ilt))
           && x0 == y1 && x1 == y0;
}

enum { MOST_TERMS = 8 };

/* Terms of a conjunction that are free of kv; at most MOST_TERMS of its first ones. */
static int conditions_of(const mod_fn *fn, uint32_t node, uint32_t *terms)
{
    uint32_t stack[MOST_TERMS];
    int n = 0, depth = 0;
    stack[depth++] = node;
    while (depth > 0 && n < MOST_TERMS) {
        const uint32_t x = stack[--depth];
        if (fn->nodes[x].op == OP_and && !is_free(fn, x) && depth + 2 <= MOST_TERMS) {
            stack[depth++] = operand(fn, x, 0);
            stack[depth++] = operand(fn, x, 1);
        } else if (is_free(fn, x)) {
            terms[n++] = x;
        }
    }
    return n;
}

/* A condition that x has as a term where y has its opposite; NONE: there is none. */
static uint32_t dividing(const mod_fn *fn, uint32_t x, uint32_t y)
{
    uint32_t of_x[MOST_TERMS], of_y[MOST_TERMS];
    const int n = conditions_of(fn, x, of_x), m = conditions_of(fn, y, of_y);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < m; k++)
            if (are_opposite(fn, of_x[i], of_y[k]))
                return of_x[i];
    return NONE;
}

/* x || y, or where x && y fails, which is !x || !y. */
static interval of_union(const bounder *w, uint32_t node, int side)
{
    const mod_fn *fn = w->fn;
    mod_builder *b = w->b;
    const uint32_t x = operand(fn, node, 0), y = operand(fn, node, 1);
    const interval i = w->intervals[side][x], j = w->intervals[side][y];
    const interval all = {least(b), most(b)};
    if (is_free(fn, x) || is_free(fn, y)) {
        const uint32_t condition = w->copy[is_free(fn, x) ? x : y];
        const interval other = is_free(fn, x) ? j : i;
        return side == HOLDS ? of_choice(b, condition, all, other)
                             : of_choice(b, condition, other, all);
    }
    const uint32_t condition = side == HOLDS ? dividing(fn, x, y) : NONE;
    if (condition != NONE) /* where it holds, y holds nowhere */
        return of_choice(b, w->copy[condition], i, j);
    return of_either(b, i, j);
}

static interval interval_of(const bounder *w, uint32_t node, int side)
{
    const mod_fn *fn = w->fn;
    mod_builder *b = w->b;
    const mod_op op = (mod_op)fn->nodes[node].op;
    const interval *of = w->intervals[side];
    if (fn->nodes[node].type != MOD_BOOL)
        return no_interval;
    if (is_free(fn, node))
        return of_condition(b, side == HOLDS ? w->copy[node]
                                             : rewrite_emit1(b, OP_not, w->copy[node]));
    if (op == OP_ilt || op == OP_ile || op == OP_ieq || op == OP_ine)
        return of_comparison(w, node, side);
    if (op == OP_not)
        return w->intervals[1 - side][operand(fn, node, 0)];
    if ((op == OP_and && side == HOLDS) || (op == OP_or && side == FAILS))
        return of_both(b, of[operand(fn, node, 0)], of[operand(fn, node, 1)]);
    if (op == OP_or || op == OP_and)
        return of_union(w, node, side);
    if (op == OP_bsel && is_free(fn, operand(fn, node, 0)))
        return of_choice(b, w->copy[operand(fn, node, 0)], of[operand(fn, node, 1)],
                         of[operand(fn, node, 2)]);
    return no_interval;
}

int pass_interval(const mod_fn *fn, arena *arena, const mod_fn **bounds_fn, uint32_t bounds[2])
{
    bounder w = {.fn = fn};
    w.b = mod_builder_create(arena, fn->kind, fn->captures, fn->n_captures);
    w.copy = arena_array(arena, fn->n_nodes, sizeof *w.copy);
    w.extents = arena_array(arena, fn->n_nodes, sizeof *w.extents);
    w.ramps = arena_array(arena, fn->n_nodes, sizeof *w.ramps);
    for (int side = HOLDS; side <= FAILS; side++)
        w.intervals[side] = arena_array(arena, fn->n_nodes, sizeof *w.intervals[side]);
    if (fn->kind != SACCADE_MASK || w.b == NULL || w.copy == NULL || w.extents == NULL
        || w.ramps == NULL || w.intervals[HOLDS] == NULL || w.intervals[FAILS] == NULL)
        return 0;
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        w.copy[i] = rewrite_copy(w.b, fn, i, w.copy);
        w.extents[i] = extent_of(fn, i, w.extents);
        w.ramps[i] = ramp_of(&w, i);
        for (int side = HOLDS; side <= FAILS; side++)
            w.intervals[side][i] = interval_of(&w, i, side);
    }
    uint32_t roots[2] = {w.intervals[HOLDS][fn->result].lo, w.intervals[HOLDS][fn->result].hi};
    const mod_fn *out;
    if (roots[0] == NONE || mod_finish_roots(w.b, roots, 2, &out, NULL) != SACCADE_OK)
        return 0;
    *bounds_fn = out;
    bounds[0] = roots[0];
    bounds[1] = roots[1];
    return 1;
}
