/* Reverse mode: from the result down, each node hands its adjoint (d result / d node) to its
   operands by the rule of ops.def's grad column.
   An adjoint is a value and a guard: where ?: did not choose an operand, its adjoint is 0
   whatever its value, also when a derivative on the way is infinite or NaN there; so the guard
   is carried along beside the value and applied when adjoints meet or arrive. Their sum lives
   where one of them does: it is guarded still, since 0 times an infinite derivative is NaN.
   At points without a derivative: |x| at 0 gives 0; a tie of min and max gives each operand
   half, but nothing where one of them is a constant, as a bound of clamp; and what divides by
   0 gives 0, as in the language. */
#include "pass/pass.h"

#include "base/status.h"
#include "pass/rewrite.h"

#include <stdbool.h>

static const uint32_t NONE = UINT32_MAX;

typedef struct adjoint {
    uint32_t value;      /* NONE: no way from the result leads here */
    uint32_t guard;      /* bool; NONE: always */
    bool is_zero_beyond; /* the value itself is 0 where the guard is false */
} adjoint;

typedef struct tape {
    const mod_fn *fn;
    mod_builder *b;
    uint32_t *copy;     /* of each node, in b */
    uint8_t *is_wanted; /* some wanted node is among its operands' operands */
    uint8_t *varies;    /* with the score or a float capture, where none is detached */
    adjoint *adjoints;
    uint32_t node; /* whose adjoint is being handed on */
} tape;

/* ---- writing formulas ---- */

static uint32_t number(tape *t, float value)
{
    return mod_emit_float(t->b, value);
}

/* A constant in two floats, of which f32 has the first. */
static uint32_t number2(tape *t, float high, float low)
{
    return rewrite_emit2(t->b, OP_fadd, number(t, high), number(t, low));
}

static uint32_t add(tape *t, uint32_t x, uint32_t y)
{
    return rewrite_emit2(t->b, OP_fadd, x, y);
}

static uint32_t sub(tape *t, uint32_t x, uint32_t y)
{
    return rewrite_emit2(t->b, OP_fsub, x, y);
}

static uint32_t mul(tape *t, uint32_t x, uint32_t y)
{
    return rewrite_emit2(t->b, OP_fmul, x, y);
}

static uint32_t over(tape *t, uint32_t x, uint32_t y)
{
    return rewrite_emit2(t->b, OP_fdiv, x, y);
}

static uint32_t negative(tape *t, uint32_t x)
{
    return rewrite_emit1(t->b, OP_fneg, x);
}

static uint32_t call(tape *t, mod_op op, uint32_t x)
{
    return rewrite_emit1(t->b, op, x);
}

static uint32_t choose(tape *t, uint32_t condition, uint32_t x, uint32_t y)
{
    return rewrite_emit(t->b, OP_fsel, condition, x, y);
}

static uint32_t less(tape *t, uint32_t x, uint32_t y)
{
    return rewrite_emit2(t->b, OP_flt, x, y);
}

/* Operand k of the present node, its value, its adjoint's value. */
static uint32_t operand(const tape *t, uint32_t k)
{
    return t->copy[t->fn->args[t->fn->nodes[t->node].args + k]];
}

static uint32_t result(const tape *t)
{
    return t->copy[t->node];
}

static uint32_t incoming(const tape *t)
{
    return t->adjoints[t->node].value;
}

/* ---- adjoints ---- */

static uint32_t settled(tape *t, adjoint a)
{
    if (a.guard == NONE || a.is_zero_beyond)
        return a.value;
    return choose(t, a.guard, a.value, number(t, 0.0f));
}

static uint32_t both(tape *t, uint32_t x, uint32_t y)
{
    return x == NONE ? y : rewrite_emit2(t->b, OP_and, x, y);
}

static uint32_t either(tape *t, uint32_t x, uint32_t y)
{
    if (x == NONE || y == NONE)
        return NONE;
    const uint32_t any = rewrite_emit2(t->b, OP_or, x, y);
    return any == mod_emit_bool(t->b, 1) ? NONE : any;
}

static adjoint sum(tape *t, adjoint x, adjoint y)
{
    if (x.guard == y.guard)
        return (adjoint){add(t, x.value, y.value), x.guard,
                         x.is_zero_beyond && y.is_zero_beyond};
    return (adjoint){add(t, settled(t, x), settled(t, y)), either(t, x.guard, y.guard), true};
}

static void give_if(tape *t, uint32_t k, uint32_t value, uint32_t condition)
{
    const uint32_t arg = t->fn->args[t->fn->nodes[t->node].args + k];
    const adjoint from = t->adjoints[t->node];
    adjoint *to = &t->adjoints[arg];
    if (!t->is_wanted[arg])
        return;
    const bool is_as_it_came = value == from.value || value == negative(t, from.value);
    adjoint a = {value, from.guard, from.is_zero_beyond && is_as_it_came};
    if (condition != NONE)
        a = (adjoint){value, both(t, from.guard, condition), false};
    *to = to->value == NONE ? a : sum(t, *to, a);
}

static void give(tape *t, uint32_t k, uint32_t value)
{
    give_if(t, k, value, NONE);
}

/* ---- rules, named in ops.def ---- */

static void grad_none(tape *t)
{
    (void)t;
}

static void grad_select(tape *t)
{
    give_if(t, 1, incoming(t), operand(t, 0));
    give_if(t, 2, incoming(t), rewrite_emit1(t->b, OP_not, operand(t, 0)));
}

static void grad_add(tape *t)
{
    give(t, 0, incoming(t));
    give(t, 1, incoming(t));
}

static void grad_sub(tape *t)
{
    give(t, 0, incoming(t));
    give(t, 1, negative(t, incoming(t)));
}

static void grad_mul(tape *t)
{
    give(t, 0, mul(t, incoming(t), operand(t, 1)));
    give(t, 1, mul(t, incoming(t), operand(t, 0)));
}

static void grad_div(tape *t)
{
    const uint32_t share = over(t, incoming(t), operand(t, 1));
    give(t, 0, share);
    give(t, 1, negative(t, mul(t, share, result(t))));
}

static void grad_neg(tape *t)
{
    give(t, 0, negative(t, incoming(t)));
}

static void grad_abs(tape *t)
{
    const uint32_t x = operand(t, 0), zero = number(t, 0.0f);
    const uint32_t below = choose(t, less(t, x, zero), negative(t, incoming(t)), zero);
    give(t, 0, choose(t, less(t, zero, x), incoming(t), below));
}

static int operand_varies(const tape *t, uint32_t k)
{
    return t->varies[t->fn->args[t->fn->nodes[t->node].args + k]];
}

/* x and y: the operands in the order in which x < y takes the first. */
static void choose_one(tape *t, uint32_t x, uint32_t y)
{
    uint32_t share = incoming(t), first = less(t, x, y), second = first;
    if (!operand_varies(t, 0)) { /* the second where it wins, or is NaN */
        second = rewrite_emit2(t->b, OP_fle, x, y);
    } else if (operand_varies(t, 1)) {
        const uint32_t is_tie = rewrite_emit2(t->b, OP_feq, x, y);
        share = choose(t, is_tie, mul(t, share, number(t, 0.5f)), share);
        first = rewrite_emit2(t->b, OP_fle, x, y);
    }
    give_if(t, 0, share, first);
    give_if(t, 1, share, rewrite_emit1(t->b, OP_not, second));
}

static void grad_min(tape *t)
{
    choose_one(t, operand(t, 0), operand(t, 1));
}

static void grad_max(tape *t)
{
    choose_one(t, operand(t, 1), operand(t, 0));
}

static void grad_sqrt(tape *t)
{
    give(t, 0, over(t, mul(t, incoming(t), number(t, 0.5f)), result(t)));
}

static void grad_rsqrt(tape *t) /* -1/2 x^(-3/2) = -1/2 y / x */
{
    const uint32_t half = mul(t, result(t), number(t, -0.5f));
    give(t, 0, mul(t, incoming(t), over(t, half, operand(t, 0))));
}

static void grad_exp(tape *t)
{
    give(t, 0, mul(t, incoming(t), result(t)));
}

static void grad_exp2(tape *t)
{
    const uint32_t ln_2 = number2(t, 0x1.62e43p-1f, -0x1.05c61p-29f);
    give(t, 0, mul(t, incoming(t), mul(t, result(t), ln_2)));
}

static void grad_log(tape *t)
{
    give(t, 0, over(t, incoming(t), operand(t, 0)));
}

static void grad_log2(tape *t)
{
    const uint32_t by_ln_2 = number2(t, 0x1.715476p+0f, 0x1.4ae0cp-26f);
    give(t, 0, over(t, mul(t, incoming(t), by_ln_2), operand(t, 0)));
}

static void grad_sin(tape *t)
{
    give(t, 0, mul(t, incoming(t), call(t, OP_fcos, operand(t, 0))));
}

static void grad_cos(tape *t)
{
    give(t, 0, negative(t, mul(t, incoming(t), call(t, OP_fsin, operand(t, 0)))));
}

static void grad_tan(tape *t)
{
    const uint32_t square = mul(t, result(t), result(t));
    give(t, 0, mul(t, incoming(t), add(t, square, number(t, 1.0f))));
}

static void grad_tanh(tape *t)
{
    const uint32_t square = mul(t, result(t), result(t));
    give(t, 0, mul(t, incoming(t), sub(t, number(t, 1.0f), square)));
}

static void grad_sigmoid(tape *t)
{
    const uint32_t rest = sub(t, number(t, 1.0f), result(t));
    give(t, 0, mul(t, incoming(t), mul(t, result(t), rest)));
}

static void grad_erf(tape *t)
{
    const uint32_t x = operand(t, 0);
    const uint32_t bell = call(t, OP_fexp, negative(t, mul(t, x, x)));
    const uint32_t two_by_sqrt_pi = number2(t, 0x1.20dd76p+0f, -0x1.f7ac92p-25f);
    give(t, 0, mul(t, incoming(t), mul(t, bell, two_by_sqrt_pi)));
}

/* x^(y-1). Where y - 1 is rounded, both are even, and an odd power has the sign of x. */
static uint32_t lower_power(tape *t, uint32_t x, uint32_t y)
{
    const uint32_t less = sub(t, y, number(t, 1.0f));
    const uint32_t power = rewrite_emit2(t->b, OP_fpow, x, less);
    const uint32_t is_rounded = rewrite_emit2(t->b, OP_fne, sub(t, less, y), number(t, -1.0f));
    const uint32_t is_negative = rewrite_emit2(t->b, OP_flt, x, number(t, 0.0f));
    const uint32_t is_turned = rewrite_emit2(t->b, OP_and, is_rounded, is_negative);
    return rewrite_emit(t->b, OP_fsel, is_turned, negative(t, power), power);
}

/* x^y: y x^(y-1), 0 for y = 0; and x^y log x, 0 for x = 0. */
static void grad_pow(tape *t)
{
    const uint32_t x = operand(t, 0), y = operand(t, 1), zero = number(t, 0.0f);
    const uint32_t lower = lower_power(t, x, y);
    give_if(t, 0, mul(t, incoming(t), mul(t, y, lower)), rewrite_emit2(t->b, OP_fne, y, zero));
    give_if(t, 1, mul(t, incoming(t), mul(t, result(t), call(t, OP_flog, x))),
            rewrite_emit2(t->b, OP_fne, x, zero));
}

static void (*const rules[MOD_OP_COUNT])(tape *) = {
#define OP(name, signature, form, value, exact, fast, grad, range) [OP_##name] = grad_##grad,
#include "mod/ops.def"
#undef OP
};

/* ---- the walk ---- */

static int is_read(const mod_node *node)
{
    return (node->op == OP_LOAD || node->op == OP_SCALAR) && node->type == MOD_FLOAT;
}

static int has_rule(int op)
{
    return rules[op] != NULL && rules[op] != grad_none;
}

static saccade_status tape_init(tape *t, const mod_fn *fn, const uint32_t *wanted, uint32_t n,
                                bool is_wide, arena *arena, saccade_error *err)
{
    *t = (tape){.fn = fn};
    t->b = mod_builder_create(arena, fn->kind, fn->captures, fn->n_captures);
    t->copy = arena_array(arena, fn->n_nodes, sizeof *t->copy);
    t->is_wanted = arena_array(arena, fn->n_nodes, sizeof *t->is_wanted);
    t->varies = arena_array(arena, fn->n_nodes, sizeof *t->varies);
    t->adjoints = arena_array(arena, fn->n_nodes, sizeof *t->adjoints);
    FAIL_IF_NULL(t->b);
    FAIL_IF_NULL(t->copy);
    FAIL_IF_NULL(t->is_wanted);
    FAIL_IF_NULL(t->varies);
    FAIL_IF_NULL(t->adjoints);
    if (is_wide)
        mod_builder_be_wide(t->b);
    for (uint32_t i = 0; i < n; i++)
        if (wanted[i] != PASS_NO_NODE)
            t->is_wanted[wanted[i]] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *node = &fn->nodes[i];
        t->copy[i] = rewrite_copy(t->b, fn, i, t->copy);
        t->adjoints[i] = (adjoint){NONE, NONE, false};
        t->varies[i] = node->op == OP_SCORE || is_read(node);
        for (uint32_t k = 0; k < node->n_args; k++) {
            t->is_wanted[i] |= t->is_wanted[fn->args[node->args + k]];
            if (has_rule(node->op))
                t->varies[i] |= t->varies[fn->args[node->args + k]];
        }
    }
    return SACCADE_OK;
}

static uint32_t derivative(tape *t, uint32_t wanted)
{
    if (wanted == PASS_NO_NODE || t->adjoints[wanted].value == NONE)
        return number(t, 0.0f);
    return settled(t, t->adjoints[wanted]);
}

static saccade_status derive(tape *t, const mod_fn *fn, const uint32_t *wanted, uint32_t n,
                             bool is_wide, arena *arena, saccade_error *err)
{
    FAIL_IF(fn->kind != SACCADE_SCORE || n == 0, SACCADE_EINTERNAL,
            "gradient: got a mask or nothing wanted");
    TRY(tape_init(t, fn, wanted, n, is_wide, arena, err));
    t->adjoints[fn->result].value = number(t, 1.0f);
    for (t->node = fn->result + 1; t->node-- > 0;)
        if (incoming(t) != NONE && rules[fn->nodes[t->node].op] != NULL)
            rules[fn->nodes[t->node].op](t);
    return SACCADE_OK;
}

/* The function of these results; of too many nodes, the message says whose they are. */
static saccade_status finish(tape *t, uint32_t *results, uint32_t n, const mod_fn **out,
                             saccade_error *err)
{
    const saccade_status status = mod_finish_roots(t->b, results, n, out, err);
    FAIL_IF(status == SACCADE_ELIMIT, SACCADE_ELIMIT,
            "gradient: got more than %d operations of a score and its gradients, definitions "
            "and sum() written out",
            MOD_MAX_NODES);
    return status;
}

saccade_status pass_gradient(const mod_fn *fn, const uint32_t *wanted, uint32_t n, arena *arena,
                             const mod_fn **out, uint32_t *results, saccade_error *err)
{
    tape t;
    TRY(derive(&t, fn, wanted, n, true, arena, err));
    for (uint32_t i = 0; i < n; i++)
        results[i] = derivative(&t, wanted[i]);
    return finish(&t, results, n, out, err);
}

saccade_status pass_value_and_gradient(const mod_fn *fn, const uint32_t *wanted, uint32_t n,
                                       arena *arena, const mod_fn **out, uint32_t *results,
                                       saccade_error *err)
{
    tape t;
    TRY(derive(&t, fn, wanted, n, false, arena, err));
    results[0] = t.copy[fn->result];
    for (uint32_t i = 0; i < n; i++)
        results[1 + i] = derivative(&t, wanted[i]);
    return finish(&t, results, n + 1, out, err);
}

/* The captures, then one more for the rates of each that holds floats; twin[i]: which. */
static mod_capture *with_rates(const mod_fn *fn, arena *arena, int32_t *twin, uint32_t *n)
{
    mod_capture *all = arena_array(arena, 2 * fn->n_captures + 1, sizeof *all);
    *n = fn->n_captures;
    for (uint32_t i = 0; all && i < fn->n_captures; i++) {
        all[i] = fn->captures[i];
        twin[i] = -1;
        if (all[i].type != MOD_FLOAT)
            continue;
        twin[i] = (int32_t)*n;
        all[*n] = fn->captures[i];
        all[(*n)++].dtype = SACCADE_F32;
    }
    return all;
}

/* A read of the rates of node i's capture, at the indices where node i reads the capture. */
static uint32_t rate_of(tape *t, uint32_t i, const int32_t *twin)
{
    const mod_node *read = &t->fn->nodes[i];
    uint32_t args[SACCADE_MAX_RANK] = {0};
    for (uint32_t k = 0; k < read->n_args; k++)
        args[k] = t->copy[t->fn->args[read->args + k]];
    return mod_emit(t->b, (mod_op)read->op, args, read->n_args, twin[read->imm.i], 0, 0);
}

saccade_status pass_tangent(const mod_fn *fn, arena *arena, const mod_fn **out, int32_t *twin,
                            uint32_t results[3], saccade_error *err)
{
    uint32_t *wanted = arena_array(arena, fn->n_nodes + 1, sizeof *wanted), n = 1;
    mod_fn of = *fn;
    tape t;
    FAIL_IF_NULL(wanted);
    of.captures = with_rates(fn, arena, twin, &of.n_captures);
    FAIL_IF_NULL(of.captures);
    FAIL_IF(of.n_captures > MOD_MAX_CAPTURES, SACCADE_ELIMIT,
            "tangents: got %u captures and rates of them, expected at most %d", of.n_captures,
            MOD_MAX_CAPTURES);
    wanted[0] = pass_find_score(fn);
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (is_read(&fn->nodes[i]))
            wanted[n++] = i;
    TRY(derive(&t, &of, wanted, n, false, arena, err));
    results[0] = t.copy[fn->result];
    results[1] = derivative(&t, wanted[0]);
    results[2] = number(&t, 0.0f);
    for (uint32_t i = 1; i < n; i++)
        if (t.adjoints[wanted[i]].value != NONE)
            results[2] = add(&t, results[2],
                             mul(&t, derivative(&t, wanted[i]), rate_of(&t, wanted[i], twin)));
    return finish(&t, results, 3, out, err);
}

uint32_t pass_find_score(const mod_fn *fn)
{
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (fn->nodes[i].op == OP_SCORE)
            return i;
    return PASS_NO_NODE;
}
