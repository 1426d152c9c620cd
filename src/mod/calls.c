/* Calls: built-ins, conversions, sum(), and definitions, which are inlined. */
#include "mod/elab.h"

#include <stdio.h>
#include <string.h>

/* ---- built-ins ---- */

static saccade_status wrong_count(elab *e, const ast_node *node, const char *signature,
                                  uint32_t expected)
{
    return elab_fail(e, node->place, SACCADE_EPARSE, "got %u argument%s, expected %u: %s",
                     node->n_args, node->n_args == 1 ? "" : "s", expected, signature);
}

/* clamp(x, lo, hi) = min(max(x, lo), hi). */
static saccade_status call_clamp(elab *e, const ast_node *node, const value *args, value *out)
{
    value inner[2];
    const ast_node *operands[] = {node->args[0], node->args[2]};
    TRY(elab_apply(e, "max(", node, node->args, args, 2, &inner[0]));
    inner[1] = args[2];
    return elab_apply(e, "min(", node, operands, inner, 2, out);
}

/* int(x), float(x): nothing is done to what has the type already. */
static saccade_status call_convert(elab *e, const ast_node *node, const char *form,
                                   const value *arg, value *out)
{
    const unsigned to = form[0] == 'i' ? T_INT : T_FLOAT, from = arg->types;
    *out = *arg;
    if (from == to)
        return SACCADE_OK;
    if (to == T_FLOAT && from == T_BOOL)
        return elab_fail(
            e, node->args[0]->place, SACCADE_ETYPE,
            "argument of float(): got bool, expected a number; int(x) gives 0 or 1");
    TRY(elab_apply(e, form, node, node->args, arg, 1, out));
    out->types = from & to ? to : out->types;
    return SACCADE_OK;
}

static saccade_status sum_count(elab *e, const ast_node *node, int32_t *n)
{
    value count;
    TRY(elab_expr(e, node, &count));
    TRY(elab_coerce(e, node->place, T_INT, "the count of sum()", &count));
    if (!count.is_const && e->is_check)
        count.constant = 1;
    else if (!count.is_const)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "the count of sum(): got a value known only when running, expected a "
                         "constant; choose terms by sum(i, 8, i < n ? x : 0)");
    if (count.constant < 0 || count.constant > MOD_MAX_SUM)
        return elab_fail(e, node->place, SACCADE_ELIMIT,
                         "got a sum() of %d terms, expected 0 to %d", count.constant,
                         MOD_MAX_SUM);
    *n = count.constant;
    return SACCADE_OK;
}

/* one term, with the index as a constant; what it hid comes back afterwards. */
static saccade_status sum_term(elab *e, const ast_node *node, int32_t i, value *out)
{
    frame *f = e->frame;
    const char *name = node->args[0]->name;
    local *hidden = frame_find(f, name);
    const local kept = hidden ? *hidden : (local){0};
    TRY(frame_set(e, f, name, (local){.value = elab_int(e, i)}));
    TRY(elab_enter(e, node->place));
    TRY(elab_expr(e, node->args[2], out));
    e->calls--;
    if ((out->types & T_NUMBER) == 0)
        return elab_fail(e, node->args[2]->place, SACCADE_ETYPE,
                         "a term of sum(): got bool, expected a number; int(x) gives 0 or 1");
    out->types &= T_NUMBER;
    if (hidden)
        return frame_set(e, f, name, kept);
    frame_drop(f, name);
    return SACCADE_OK;
}

static saccade_status call_sum(elab *e, const ast_node *node, value *out)
{
    int32_t n = 0;
    value args[2];
    const ast_node *operands[] = {node->args[2], node->args[2]};
    if (node->args[0]->kind != AST_NAME || scope_var(node->args[0]->name) >= 0
        || parser_reserved(node->args[0]->name) != NULL)
        return elab_fail(e, node->args[0]->place, SACCADE_EPARSE,
                         "got no free name, expected sum(i, n, expression with i)");
    TRY(sum_count(e, node->args[1], &n));
    TRY(sum_term(e, node, 0, &args[0]));
    if (n == 0) {
        const unsigned types = args[0].types;
        args[0] = elab_int(e, 0);
        if (types == T_FLOAT)
            TRY(elab_coerce(e, node->place, T_FLOAT, "sum()", &args[0]));
        args[0].types = e->builder ? args[0].types : types;
    }
    for (int32_t i = 1; i < n; i++) {
        TRY(sum_term(e, node, i, &args[1]));
        TRY(elab_apply(e, "+", node, operands, args, 2, &args[0]));
    }
    args[0].is_const = false;
    *out = args[0];
    return SACCADE_OK;
}

static bool is_sum(const ast_node *node)
{
    return strcmp(node->name, "sum") == 0;
}

static bool is_clamp(const ast_node *node)
{
    return strcmp(node->name, "clamp") == 0;
}

static saccade_status begin_builtin(elab *e, const ast_node *node, uint32_t *n)
{
    char form[AST_MAX_NAME + 2], signature[AST_MAX_NAME + 16];
    snprintf(form, sizeof form, "%s(", node->name);
    const uint32_t expected = is_sum(node) || is_clamp(node) ? 3 : types_arity(form);
    snprintf(signature, sizeof signature, "%s%s)", form,
             is_sum(node)     ? "i, n, x"
             : is_clamp(node) ? "x, low, high"
             : expected == 1  ? "x"
                              : "x, y");
    if (node->n_args != expected)
        return wrong_count(e, node, signature, expected);
    *n = is_sum(node) ? 0 : expected; /* its arguments are walked as often as it has terms */
    return SACCADE_OK;
}

saccade_status elab_builtin(elab *e, const ast_node *node, const value *args, value *out)
{
    char form[AST_MAX_NAME + 2];
    snprintf(form, sizeof form, "%s(", node->name);
    if (is_sum(node))
        return call_sum(e, node, out);
    if (is_clamp(node))
        return call_clamp(e, node, args, out);
    if (strcmp(form, "int(") == 0 || strcmp(form, "float(") == 0)
        return call_convert(e, node, form, args, out);
    return elab_apply(e, form, node, node->args, args, node->n_args, out);
}

/* ---- definitions ---- */

static saccade_status check_recursion(elab *e, const ast_node *node, const ast_def *def)
{
    for (const frame *f = e->frame; f != NULL; f = f->parent)
        if (f->def == def)
            return elab_fail(
                e, node->place, SACCADE_EPARSE,
                "got a call of '%s' inside of itself; there is no recursion, sum() "
                "is the only loop",
                def->name);
    return SACCADE_OK;
}

/* the capture or tensor parameter that is passed on. */
static saccade_status bind_tensor(elab *e, const ast_node *arg, const ast_def *def,
                                  const ast_param *param, local *out)
{
    const bool is_name = arg->kind == AST_NAME && parser_reserved(arg->name) == NULL;
    const local *found = is_name ? frame_find(e->frame, arg->name) : NULL;
    if (!is_name || (found != NULL && found->tensor == NULL))
        return elab_fail(e, arg->place, SACCADE_ETYPE,
                         "argument '%s' of %s: got an expression, expected the name of a "
                         "captured tensor",
                         param->name, def->signature);
    if (found != NULL)
        *out = *found;
    else
        *out = (local){.tensor = arg->name, .place = arg->place, .source = e->frame->source};
    return SACCADE_OK;
}

static saccade_status bind_params(elab *e, const ast_node *node, const ast_def *def,
                                  const value *args, frame *callee)
{
    for (uint32_t i = 0; i < def->n_params; i++) {
        local what = {.value = args[i]};
        if (def->params[i].is_tensor)
            TRY(bind_tensor(e, node->args[i], def, &def->params[i], &what));
        TRY(frame_set(e, callee, def->params[i].name, what));
    }
    return SACCADE_OK;
}

static saccade_status check_call(elab *e, const ast_node *node, const ast_def *def)
{
    if (node->n_args != def->n_params)
        return wrong_count(e, node, def->signature, def->n_params);
    if (def->kind == SACCADE_SCORE && e->frame->kind == SACCADE_MASK)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "got score function '%s' in a mask, expected masks only there",
                         def->name);
    if (e->frame->kind == SACCADE_WEIGHT)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "got '%s' in a weight, expected numbers, sizes and captured scalars "
                         "alone",
                         def->name);
    return check_recursion(e, node, def);
}

bool elab_is_tensor(const elab_task *t)
{
    return t->def != NULL && t->def->params[t->next].is_tensor;
}

saccade_status elab_call_begin(elab *e, elab_task *t)
{
    const ast_node *node = t->node;
    const ast_def *def;
    const scope *where;
    if (types_is_builtin(node->name))
        return begin_builtin(e, node, &t->n);
    TRY(scope_find(e, node->name, &def, &where));
    if (def == NULL)
        return scope_unknown(e, node);
    TRY(check_call(e, node, def));
    t->def = def;
    t->inner = (scope){&def->body, where->source, where};
    t->callee =
        (frame){.parent = e->frame, .def = def, .kind = def->kind, .source = where->source};
    t->callee.scope = &t->inner;
    return SACCADE_OK;
}

static saccade_status fill_frame(elab *e, elab_task *t)
{
    memcpy(t->callee.vars, e->frame->vars, sizeof t->callee.vars);
    if (!frame_init(e, &t->callee, t->def->n_params + t->def->body.n_statements))
        return elab_no_memory(e);
    return bind_params(e, t->node, t->def, t->values, &t->callee);
}

saccade_status elab_inline(elab *e, elab_task *t, value *out)
{
    const bool enters_prelude = t->inner.source->is_prelude && !e->frame->source->is_prelude;
    TRY(fill_frame(e, t));
    TRY(elab_enter(e, t->node->place));
    if (enters_prelude) {
        e->call_place = t->node->place;
        e->call_source = e->frame->source;
    }
    TRY(elab_body(e, &t->callee, &t->def->body, out));
    if (enters_prelude)
        e->call_source = NULL;
    e->calls--;
    return SACCADE_OK;
}

/* ---- definitions that nobody calls ---- */

/* stands for a capture that no text can name. */
static saccade_status check_tensor(elab *e, const ast_param *p, local *what)
{
    char text[AST_MAX_NAME + 3];
    if (!p->is_tensor)
        return SACCADE_OK;
    snprintf(text, sizeof text, "%s[]", p->name);
    what->tensor = arena_strdup(e->scratch, text);
    return what->tensor == NULL ? elab_no_memory(e) : SACCADE_OK;
}

static saccade_status check_body(elab *e, const ast_def *def, const scope *inner)
{
    frame f = {.def = def, .kind = def->kind, .scope = inner, .source = inner->source};
    value result;
    e->captures->n = 0;
    e->frame = NULL;
    e->tasks = NULL;
    e->depth = e->calls = 0;
    for (int i = 0; i < FRAME_VARS; i++)
        f.vars[i].types = i == FRAME_SCORE ? T_FLOAT : T_INT;
    if (!frame_init(e, &f, def->n_params + def->body.n_statements))
        return elab_no_memory(e);
    for (uint32_t i = 0; i < def->n_params; i++) {
        const ast_param *p = &def->params[i];
        local what = {.value = {.types = T_ANY}, .place = p->place, .source = inner->source};
        TRY(check_tensor(e, p, &what));
        TRY(frame_set(e, &f, p->name, what));
    }
    return elab_body(e, &f, &def->body, &result);
}

static saccade_status check_defs(elab *e, const scope *where)
{
    saccade_status status = SACCADE_OK;
    for (const ast_def *def = where->body->defs; def != NULL && !status; def = def->next) {
        const scope inner = {&def->body, where->source, where};
        status = check_body(e, def, &inner);
        if (status == SACCADE_OK)
            status = check_defs(e, &inner);
    }
    /* what is not called may be as long as it likes */
    return status == SACCADE_ELIMIT ? SACCADE_OK : status;
}

saccade_status elab_check_defs(elab *e, const scope *where)
{
    elab apart = *e;
    if (where->body->defs == NULL)
        return SACCADE_OK;
    apart.captures = arena_alloc(e->scratch, sizeof *apart.captures);
    if (apart.captures == NULL)
        return elab_no_memory(e);
    apart.is_check = true;
    apart.spare = NULL;
    apart.steps = e->check_steps;
    return check_defs(&apart, where);
}
