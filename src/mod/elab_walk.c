/* The walk over expressions, operands first. What is begun stands in a list of our own, not on
   the stack: only bodies of calls and terms of sum() are walked one inside another by
   recursion, and these are counted, so that a thread with a small stack may parse and bind.
   Steps are counted too: no text takes long. */
#include "mod/elab.h"

saccade_status elab_enter(elab *e, ast_place place)
{
    if (++e->calls > ELAB_MAX_CALLS)
        return elab_fail(e, place, SACCADE_ELIMIT, "got calls and sums nested deeper than %d",
                         ELAB_MAX_CALLS);
    return SACCADE_OK;
}

/* ---- begin ---- */

/* Chains like a || b || c lean left and may be long, so the left edge is one task: its
   innermost operand first, then the right one of each. */
static saccade_status begin_binary(elab *e, elab_task *t)
{
    const ast_node *node = t->node;
    t->n = node->spine + 1;
    t->spine = arena_array(e->scratch, node->spine, sizeof *t->spine);
    if (t->spine == NULL)
        return elab_no_memory(e);
    for (uint32_t i = node->spine; i > 0; i--) {
        t->spine[i - 1] = node;
        node = node->args[0];
    }
    return SACCADE_OK;
}

static saccade_status count_step(elab *e, const ast_node *node)
{
    if (++*e->steps > MOD_MAX_STEPS)
        return elab_fail(e, node->place, SACCADE_ELIMIT,
                         "got more than %d steps, definitions and sum() written out",
                         MOD_MAX_STEPS);
    if (++e->depth > ELAB_MAX_DEPTH)
        return elab_fail(e, node->place, SACCADE_ELIMIT,
                         "got operators and calls nested deeper than %d", ELAB_MAX_DEPTH);
    return SACCADE_OK;
}

static saccade_status push(elab *e, const ast_node *node)
{
    elab_task *t = e->spare;
    if (t != NULL)
        e->spare = t->below;
    else if ((t = arena_alloc(e->scratch, sizeof *t)) == NULL)
        return elab_no_memory(e);
    t->node = node;
    t->def = NULL;
    t->next = 0;
    t->n = node->n_args;
    t->below = e->tasks;
    e->tasks = t;
    return SACCADE_OK;
}

static void pop(elab *e)
{
    elab_task *t = e->tasks;
    e->depth--;
    e->tasks = t->below;
    t->below = e->spare;
    e->spare = t;
}

static saccade_status begin(elab *e, const ast_node *node)
{
    TRY(count_step(e, node));
    TRY(push(e, node));
    elab_task *t = e->tasks;
    if (node->kind == AST_BINARY)
        return begin_binary(e, t);
    if (node->kind == AST_INDEX)
        return elab_index_begin(e, node);
    if (node->kind == AST_CALL)
        return elab_call_begin(e, t);
    return SACCADE_OK;
}

/* ---- operands ---- */

static const ast_node *operand(const elab_task *t)
{
    if (t->node->kind != AST_BINARY)
        return t->node->args[t->next];
    return t->next == 0 ? t->spine[0]->args[0] : t->spine[t->next - 1]->args[1];
}

static saccade_status take_operand(elab *e, elab_task *t, value v)
{
    const uint32_t i = t->next++;
    if (t->node->kind == AST_BINARY && i > 0)
        return elab_binary(e, t->spine[i - 1], t->values[0], v, &t->values[0]);
    t->values[i] = v;
    if (t->node->kind == AST_INDEX)
        return elab_coerce(e, t->node->args[i]->place, T_INT, "index", &t->values[i]);
    return SACCADE_OK;
}

/* ---- end ---- */

static saccade_status end(elab *e, elab_task *t, value *out)
{
    switch ((ast_kind)t->node->kind) {
    case AST_INT:
    case AST_FLOAT:
    case AST_BOOL:
        return elab_constant(e, t->node, out);
    case AST_NAME:
        return elab_name(e, t->node, out);
    case AST_INDEX:
        return elab_index(e, t->node, t->values, out);
    case AST_CALL:
        return t->def != NULL ? elab_inline(e, t, out)
                              : elab_builtin(e, t->node, t->values, out);
    case AST_BINARY:
        *out = t->values[0];
        return SACCADE_OK;
    case AST_UNARY:
    case AST_COND:
        return elab_operator(e, t->node, t->values, out);
    }
    return SACCADE_EINTERNAL;
}

static saccade_status check_size(const elab *e, const ast_node *node)
{
    if (e->builder != NULL && mod_builder_status(e->builder) == SACCADE_ELIMIT)
        return elab_fail(e, node->place, SACCADE_ELIMIT,
                         "got more than %d operations, definitions and sum() written out",
                         MOD_MAX_NODES);
    return SACCADE_OK;
}

saccade_status elab_expr(elab *e, const ast_node *node, value *out)
{
    elab_task *const outer = e->tasks;
    TRY(begin(e, node));
    for (;;) {
        elab_task *t = e->tasks;
        while (t->next < t->n && elab_is_tensor(t))
            t->values[t->next++] = (value){0};
        if (t->next < t->n) {
            TRY(begin(e, operand(t)));
            continue;
        }
        TRY(end(e, t, out));
        TRY(check_size(e, t->node));
        pop(e);
        if (e->tasks == outer)
            return SACCADE_OK;
        TRY(take_operand(e, e->tasks, *out));
    }
}
