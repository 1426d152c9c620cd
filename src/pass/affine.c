/* A score that is a line in the incoming score: each node downstream of the score is carried
   as a pair (slope, offset), both free of it. Sums add pairs; products and quotients by
   something free of the score scale them; ?: selects. Offsets are added to each other before
   the score, but for such as may leave none of its digits when they are added one by one. */
#include "pass/pass.h"

#include "base/status.h"
#include "pass/rewrite.h"

#include <math.h>

static const uint32_t NONE = UINT32_MAX;

/* A builder that holds a copy of the mod. */
typedef struct shaper {
    const mod_fn *fn;
    mod_builder *b;
    uint32_t *copy; /* of each node of fn, in b */
} shaper;

static bool shaper_init(shaper *s, const mod_fn *fn, arena *arena)
{
    s->fn = fn;
    s->b = mod_builder_create(arena, fn->kind, fn->captures, fn->n_captures);
    s->copy = arena_array(arena, fn->n_nodes, sizeof *s->copy);
    if (s->b == NULL || s->copy == NULL)
        return false;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        s->copy[i] = rewrite_copy(s->b, fn, i, s->copy);
    return true;
}

static uint32_t operand(const mod_fn *fn, uint32_t node, uint32_t k)
{
    return fn->args[fn->nodes[node].args + k];
}

/* slope NONE: free of score, offset is the value; offset NONE: not a line. offset ZERO: none at
 * all, which is more than 0 times something that may be infinite. */
typedef struct line {
    uint32_t slope, offset;
    uint8_t terms; /* of the offset: TERM_ bits */
} line;

static const uint32_t ZERO = UINT32_MAX - 1;
static const line no_line = {NONE, NONE, 0};

/* What may be far larger than a score: a number that is, and a captured scalar. Tensors hold
 * biases, and factors of positions are slopes. */
enum { TERM_FAR = 1, TERM_SCALAR = 2 };

/* Of a node that is free of the score. */
static uint8_t terms_of(const mod_fn *fn, const mod_node *n, const line *lines)
{
    uint8_t all = 0;
    switch (n->op) {
    case OP_FLOAT:
        return fabsf(n->imm.f) > PASS_FAR && isfinite(n->imm.f) ? TERM_FAR : 0;
    case OP_SCALAR:
        return n->type == MOD_FLOAT ? TERM_SCALAR : 0;
    case OP_fadd:
    case OP_fsub:
    case OP_fmul:
    case OP_fdiv:
    case OP_fneg:
    case OP_fabs:
    case OP_fmin:
    case OP_fmax:
    case OP_fsel:
    case OP_fdetach:
        for (uint32_t k = n->op == OP_fsel; k < n->n_args; k++)
            all |= lines[fn->args[n->args + k]].terms;
        return n->op == OP_fmul || n->op == OP_fdiv ? all & TERM_FAR : all;
    default:
        return 0;
    }
}

static uint32_t or_zero(mod_builder *b, uint32_t node)
{
    return node == NONE || node == ZERO ? mod_emit_float(b, 0.0f) : node;
}

/* x + y or x - y, where either may be missing. */
static uint32_t sum_of_parts(mod_builder *b, mod_op op, uint32_t x, uint32_t y,
                             uint32_t missing)
{
    if (y == missing)
        return x;
    if (x == missing)
        return op == OP_fadd ? y : rewrite_emit1(b, OP_fneg, y);
    return rewrite_emit2(b, op, x, y);
}

/* Two that are both far may cancel, as in (score + 1e30) - 1e30, which is 0. */
static line sum_of_lines(mod_builder *b, mod_op op, line x, line y)
{
    if (x.terms && y.terms)
        return no_line;
    return (line){sum_of_parts(b, op, x.slope, y.slope, NONE),
                  sum_of_parts(b, op, x.offset, y.offset, ZERO), x.terms | y.terms};
}

/* x * y or x / y with y free of score. */
static line scaled_line(mod_builder *b, mod_op op, line x, uint32_t y)
{
    return (line){rewrite_emit2(b, op, x.slope, y),
                  x.offset == ZERO ? ZERO : rewrite_emit2(b, op, x.offset, y), x.terms};
}

static line selected_line(mod_builder *b, uint32_t c, line x, line y)
{
    const bool is_zero = x.offset == ZERO && y.offset == ZERO;
    return (line){rewrite_emit(b, OP_fsel, c, or_zero(b, x.slope), or_zero(b, y.slope)),
                  is_zero
                      ? ZERO
                      : rewrite_emit(b, OP_fsel, c, or_zero(b, x.offset), or_zero(b, y.offset)),
                  x.terms | y.terms};
}

static line line_of_operation(const shaper *s, uint32_t i, const line *lines)
{
    const mod_fn *fn = s->fn;
    const mod_node *n = &fn->nodes[i];
    const line x = lines[operand(fn, i, 0)];
    const line y = n->n_args > 1 ? lines[operand(fn, i, 1)] : no_line;
    const line z = n->n_args > 2 ? lines[operand(fn, i, 2)] : no_line;
    switch (n->op) {
    case OP_fadd:
    case OP_fsub:
        return x.offset == NONE || y.offset == NONE ? no_line
                                                    : sum_of_lines(s->b, (mod_op)n->op, x, y);
    case OP_fneg:
        return x.offset == NONE ? no_line
                                : sum_of_lines(s->b, OP_fsub, (line){NONE, ZERO, 0}, x);
    case OP_fmul:
        if (x.offset == NONE || y.offset == NONE || (x.slope != NONE && y.slope != NONE))
            return no_line;
        return x.slope == NONE ? scaled_line(s->b, OP_fmul, y, x.offset)
                               : scaled_line(s->b, OP_fmul, x, y.offset);
    case OP_fdiv:
        return x.offset == NONE || y.offset == NONE || y.slope != NONE
                   ? no_line
                   : scaled_line(s->b, OP_fdiv, x, y.offset);
    case OP_fsel:
        return x.offset == NONE || x.slope != NONE || y.offset == NONE || z.offset == NONE
                   ? no_line
                   : selected_line(s->b, x.offset, y, z);
    default:
        return no_line;
    }
}

static line line_of(const shaper *s, uint32_t i, const line *lines)
{
    const mod_node *n = &s->fn->nodes[i];
    if (!(n->deps & DEP_SCORE))
        return (line){NONE, s->copy[i], terms_of(s->fn, n, lines)};
    if (n->op == OP_SCORE)
        return (line){mod_emit_float(s->b, 1.0f), ZERO, 0};
    return line_of_operation(s, i, lines);
}

int pass_affine(const mod_fn *fn, arena *arena, const mod_fn **slope, const mod_fn **offset)
{
    shaper s;
    line *lines = arena_array(arena, fn->n_nodes, sizeof *lines);
    const mod_fn *slope_fn, *offset_fn;
    if (fn->kind != SACCADE_SCORE || lines == NULL || !shaper_init(&s, fn, arena))
        return 0;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        lines[i] = line_of(&s, i, lines);
    const line result = lines[fn->result];
    if (result.offset == NONE
        || mod_finish(s.b, or_zero(s.b, result.slope), &slope_fn, NULL) != SACCADE_OK
        || mod_finish(s.b, or_zero(s.b, result.offset), &offset_fn, NULL) != SACCADE_OK)
        return 0;
    *slope = slope_fn;
    *offset = offset_fn;
    return 1;
}
