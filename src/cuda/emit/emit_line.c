/* CUDA text of a score that is the incoming one, or a head's multiple of it, plus a line in q
 * and kv, as ALiBi and relative biases are: the offset at one position, exactly as the text has
 * it, and what it gains with each query and key. Backward's tiles then need no conversion of
 * integers for every score. */
#include "cuda/emit/emit.h"

enum { DEPTH = 12, MOVING = DEP_Q | DEP_KV };

static int is_line(const emitter *e, const mod_node *n, int depth)
{
    if (!(n->deps & MOVING))
        return !(n->deps & DEP_SCORE);
    if (depth == 0 || n->deps & DEP_SCORE)
        return 0;
    switch (n->op) {
    case OP_VAR:
        return 1;
    case OP_iadd:
    case OP_isub:
    case OP_fadd:
    case OP_fsub:
        return is_line(e, emit_arg(e, n, 0), depth - 1)
               && is_line(e, emit_arg(e, n, 1), depth - 1);
    case OP_ineg:
    case OP_fneg:
    case OP_i2f:
        return is_line(e, emit_arg(e, n, 0), depth - 1);
    case OP_fmul: {
        const int side = emit_arg(e, n, 0)->deps & MOVING ? 0 : 1;
        return !(emit_arg(e, n, 1 - side)->deps & MOVING)
               && is_line(e, emit_arg(e, n, side), depth - 1);
    }
    case OP_fdiv:
        return !(emit_arg(e, n, 1)->deps & MOVING) && is_line(e, emit_arg(e, n, 0), depth - 1);
    default:
        return 0;
    }
}

int emit_is_line(const emitter *e, const mod_node *n)
{
    return is_line(e, n, DEPTH);
}

static void put_gain(const emitter *e, const mod_node *n, int var);

/* gain of operand `moving`, times a function of the other operand */
static void put_scaled(const emitter *e, const mod_node *n, int moving, int var,
                       const char *function)
{
    strbuf_puts(e->out, "(");
    put_gain(e, emit_arg(e, n, moving), var);
    strbuf_printf(e->out, " * %s(", function);
    emit_value(e, e->out, emit_arg(e, n, 1 - moving), (place){ROW, 0});
    strbuf_puts(e->out, "))");
}

/* What a line gains from one position of var to the next. */
static void put_gain(const emitter *e, const mod_node *n, int var)
{
    const char *name = n->type == MOD_FLOAT ? "0.f" : "0";
    if (!(n->deps & MOVING)) {
        strbuf_puts(e->out, name);
        return;
    }
    switch (n->op) {
    case OP_VAR:
        strbuf_puts(e->out, n->imm.i == var ? "1" : "0");
        return;
    case OP_ineg:
    case OP_fneg:
    case OP_i2f:
        strbuf_puts(e->out, n->op == OP_i2f ? "(float)(" : "-(");
        put_gain(e, emit_arg(e, n, 0), var);
        strbuf_puts(e->out, ")");
        return;
    case OP_fmul:
        put_scaled(e, n, emit_arg(e, n, 0)->deps & MOVING ? 0 : 1, var, "");
        return;
    case OP_fdiv:
        put_scaled(e, n, 0, var, "sac_inverse");
        return;
    default: /* a sum or a difference */
        strbuf_puts(e->out, "(");
        put_gain(e, emit_arg(e, n, 0), var);
        strbuf_puts(e->out, n->op == OP_isub || n->op == OP_fsub ? " - " : " + ");
        put_gain(e, emit_arg(e, n, 1), var);
        strbuf_puts(e->out, ")");
    }
}

int emit_line(const emitter *whole)
{
    const pass_facts *known = whole->problem->score_facts;
    emitter e = *whole;
    if (!emit_has_slope_one(whole->problem) && !emit_has_head_slope(whole->problem))
        return 0;
    e.fn = known->offset;
    const mod_node *result = &e.fn->nodes[e.fn->result];
    if (!is_line(&e, result, DEPTH))
        return 0;
    strbuf_printf(e.out,
                  "DEVICE float line_offset(%s, int q, int k0, float &by_q, float &by_kv)\n{\n",
                  EMIT_SIGNATURE);
    for (uint32_t i = 0; i < e.fn->n_nodes; i++)
        if (!emit_is_leaf(&e.fn->nodes[i]))
            emit_node(&e, &e.fn->nodes[i], (place){ROW, 0});
    strbuf_puts(e.out, "    by_q = ");
    put_gain(&e, result, VAR_Q);
    strbuf_puts(e.out, ";\n    by_kv = ");
    put_gain(&e, result, VAR_KV);
    strbuf_puts(e.out, ";\n    return ");
    emit_value(&e, e.out, result, (place){ROW, 0});
    strbuf_puts(e.out, ";\n}\n\n");
    return 1;
}

int emit_row_slope(const emitter *whole)
{
    const mod_fn *slope = whole->problem->score_facts->slope;
    emitter e = *whole;
    if (!slope || slope->nodes[slope->result].deps & (DEP_KV | DEP_SCORE))
        return 0;
    e.fn = slope;
    strbuf_printf(e.out, "DEVICE float row_slope(%s, int q)\n{\n", EMIT_SIGNATURE);
    for (uint32_t i = 0; i < slope->n_nodes; i++)
        if (!emit_is_leaf(&slope->nodes[i]) && emit_rate_of(&slope->nodes[i]) == ROW)
            emit_node(&e, &slope->nodes[i], (place){ROW, 0});
    strbuf_puts(e.out, "    return ");
    emit_value(&e, e.out, &slope->nodes[slope->result], (place){ROW, 0});
    strbuf_puts(e.out, ";\n}\n\n");
    return 1;
}

int emit_has_slope_one(const plan_problem *p)
{
    const mod_fn *slope = p->score_facts->slope;
    return slope && slope->nodes[slope->result].op == OP_FLOAT
           && slope->nodes[slope->result].imm.f == 1;
}

int emit_has_head_slope(const plan_problem *p)
{
    const mod_fn *slope = p->score_facts->slope;
    if (!slope || !p->score_facts->offset || emit_has_slope_one(p))
        return 0;
    const mod_node *result = &slope->nodes[slope->result];
    return !(result->deps & (DEP_Q | DEP_KV | DEP_SCORE))
           && !(result->op == OP_FLOAT && result->imm.f == 0);
}
