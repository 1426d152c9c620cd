/* A tree made into nodes: what operators, names and bodies come to; elab_walk.c walks the
   expressions. Calls are inlined by walking their body again with other values in the frame,
   so reassigning b h q kv score costs nothing and can't leak out of a call.
   Before captures have types the same walk runs on sets of types, without nodes, and reports
   only what is certain. */
#include "mod/elab.h"

#include <string.h>

value elab_int(elab *e, int32_t constant)
{
    value v = {.types = T_INT, .is_const = true, .constant = constant};
    if (e->builder != NULL)
        v.node = mod_emit_int(e->builder, constant);
    return v;
}

static uint32_t emit_at(elab *e, mod_op op, const uint32_t *args, uint32_t n, int32_t imm,
                        ast_place place)
{
    const ast_place at = elab_place(e, place);
    const uint16_t line = (uint16_t)(at.line < UINT16_MAX ? at.line : UINT16_MAX);
    const uint16_t column = (uint16_t)(at.column < UINT16_MAX ? at.column : UINT16_MAX);
    return mod_emit(e->builder, op, args, n, imm, line, column);
}

/* ---- conversion ---- */

/* int becomes float where a float is needed; a constant at once. */
static void widen(elab *e, value *v, ast_place place)
{
    if (e->builder != NULL && v->types == T_INT) {
        const mod_node *n = mod_peek(e->builder, v->node);
        v->node = n->op == OP_INT ? mod_emit_float(e->builder, (float)n->imm.i)
                                  : emit_at(e, OP_i2f, &v->node, 1, 0, place);
    }
    v->types = T_FLOAT;
    v->is_const = false;
}

static const char *coercion_hint(type_set type, unsigned got)
{
    if (type == T_BOOL)
        return "; a comparison such as x != 0 gives one";
    if (type == T_INT && (got & T_FLOAT) != 0)
        return "; int(x) truncates";
    if (got == T_BOOL)
        return "; int(x) gives 0 or 1, and x ? y : z chooses";
    return "";
}

saccade_status elab_coerce(elab *e, ast_place place, type_set type, const char *what, value *v)
{
    const unsigned ok = type == T_FLOAT ? T_NUMBER : type;
    if ((v->types & ok) == 0)
        return elab_fail(e, place, SACCADE_ETYPE, "%s: got %s, expected %s%s", what,
                         types_name(v->types), types_name(type), coercion_hint(type, v->types));
    if (type == T_FLOAT)
        widen(e, v, place);
    v->types = type;
    return SACCADE_OK;
}

/* ---- operators ---- */

static bool is_comparison(const ast_node *node)
{
    const int precedence = node->kind == AST_BINARY ? parser_precedence(node->name) : 0;
    return (precedence == 6 || precedence == 7) && !node->parenthesised;
}

/* What the writer most likely meant where an operand has the wrong type. */
static const char *operator_hint(const char *form, const ast_node *const *operands, uint32_t n,
                                 unsigned got)
{
    const bool is_bitwise = strchr("&|^", form[0]) != NULL && form[1] == '\0';
    const bool is_order = (form[0] == '<' || form[0] == '>') && form[1] != form[0];
    const bool is_logic = strcmp(form, "&&") == 0 || strcmp(form, "||") == 0 || form[0] == '!';
    if (got == T_BOOL && is_bitwise)
        return n == 2 && (is_comparison(operands[0]) || is_comparison(operands[1]))
                   ? "; comparisons bind tighter: write (x & 1) == 0, and && between bools"
                   : "; && || != are for bools";
    if ((is_order || form[1] == '=')
        && (is_comparison(operands[0]) || is_comparison(operands[n - 1])))
        return "; comparisons do not chain: write 0 <= x && x < 5";
    if (got == T_BOOL)
        return "; int(x) gives 0 or 1, and x ? y : z chooses";
    if (is_logic || strcmp(form, "?:") == 0)
        return "; a comparison such as x != 0 gives one";
    if ((got & T_FLOAT) != 0 && form[0] == '%')
        return "; int(x) truncates, x - y * floor(x / y) is a remainder";
    return (got & T_FLOAT) != 0 ? "; int(x) truncates" : "";
}

/* Which argument of a call an operand is, from 1. */
static unsigned argument_of(const ast_node *call, const ast_node *operand)
{
    unsigned i = 0;
    while (i + 1 < call->n_args && call->args[i] != operand)
        i++;
    return i + 1;
}

/* Named as the text has it: a > b is applied as b < a, and clamp() as max() and min(). */
static saccade_status operand_error(elab *e, const char *form, const ast_node *at,
                                    const ast_node *const *operands, const unsigned *types,
                                    uint32_t n, const overload *found)
{
    const uint32_t wrong = found->wrong;
    const char *hint = operator_hint(form, operands, n, types[wrong]);
    if (at->kind == AST_CALL)
        return elab_fail(e, operands[wrong]->place, SACCADE_ETYPE,
                         "argument %u of %s(): got %s, expected %s%s",
                         argument_of(at, operands[wrong]), at->name, types_name(types[wrong]),
                         types_name(found->expected), hint);
    const int shown = at->kind == AST_UNARY ? 1 : 2;
    return elab_fail(e, at->place, SACCADE_ETYPE, "operand of '%.*s': got %s, expected %s%s",
                     shown, at->name, types_name(types[wrong]), types_name(found->expected),
                     hint);
}

/* constants of sum() and of positions: folded where nothing can go wrong. */
static bool fold(const char *form, const value *args, uint32_t n, int32_t *out)
{
    const int64_t x = args[0].constant, y = n > 1 ? args[1].constant : 0;
    int64_t result;
    for (uint32_t i = 0; i < n; i++)
        if (!args[i].is_const)
            return false;
    switch (form[1] == '\0' || strcmp(form, "-u") == 0 ? form[0] : 0) {
    case '+':
        result = x + y;
        break;
    case '-':
        result = n == 1 ? -x : x - y;
        break;
    case '*':
        result = x * y;
        break;
    case '/':
        result = y == 0 ? 0 : x / y;
        break;
    case '%':
        result = y == 0 ? 0 : x % y;
        break;
    default:
        return false;
    }
    *out = (int32_t)result;
    return result == (int32_t)result;
}

saccade_status elab_apply(elab *e, const char *form, const ast_node *at,
                          const ast_node *const *operands, const value *args, uint32_t n,
                          value *out)
{
    unsigned types[3];
    uint32_t nodes[3];
    overload found;
    for (uint32_t i = 0; i < n; i++)
        types[i] = args[i].types;
    if (!types_resolve(form, types, n, &found))
        return operand_error(e, form, at, operands, types, n, &found);
    value result = {.types = found.result};
    if (e->builder != NULL) {
        for (uint32_t i = 0; i < n; i++) {
            value v = args[i];
            if (mod_op_infos[found.op].signature[2 + i] == 'F')
                widen(e, &v, at->place);
            nodes[i] = v.node;
        }
        result.node = emit_at(e, found.op, nodes, n, 0, at->place);
    }
    result.is_const = found.result == T_INT && fold(form, args, n, &result.constant);
    *out = result;
    return SACCADE_OK;
}

/* > and >= are < and <= with operands exchanged. */
saccade_status elab_binary(elab *e, const ast_node *node, value left, value right, value *out)
{
    const bool is_swapped = node->name[0] == '>' && node->name[1] != '>';
    const ast_node *operands[] = {node->args[is_swapped], node->args[!is_swapped]};
    const value args[] = {is_swapped ? right : left, is_swapped ? left : right};
    const char *form = node->name;
    if (is_swapped)
        form = form[1] == '=' ? "<=" : "<";
    return elab_apply(e, form, node, operands, args, 2, out);
}

/* ---- names ---- */

static value read_capture(elab *e, uint32_t index, const value *indices, uint32_t n,
                          ast_place place)
{
    value v = {.types = e->captures->list[index].types};
    uint32_t nodes[SACCADE_MAX_RANK];
    for (uint32_t i = 0; i < n; i++)
        nodes[i] = indices[i].node;
    if (e->builder != NULL)
        v.node = emit_at(e, n == 0 ? OP_SCALAR : OP_LOAD, nodes, n, (int32_t)index, place);
    return v;
}

#define NO_POSITIONS "got '%s' in a weight, expected numbers, sizes and captured scalars alone"

static saccade_status elab_var(elab *e, const ast_node *node, int var, value *out)
{
    if (var == FRAME_SCORE && e->frame->kind == SACCADE_MASK)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "got 'score' in a mask, expected it only in score functions");
    if (e->frame->kind == SACCADE_WEIGHT)
        return elab_fail(e, node->place, SACCADE_ETYPE, NO_POSITIONS, node->name);
    *out = e->frame->vars[var];
    return SACCADE_OK;
}

/* a name alone that is a definition's is a call whose parentheses were forgotten. */
static saccade_status check_not_function(elab *e, const ast_node *node)
{
    const scope *where;
    const ast_def *def;
    TRY(scope_find(e, node->name, &def, &where));
    if (def != NULL)
        return elab_fail(e, node->place, SACCADE_EPARSE,
                         "got '%s' without arguments, expected a call: %s", node->name,
                         def->signature);
    if (types_is_builtin(node->name))
        return elab_fail(e, node->place, SACCADE_EPARSE,
                         "got '%s' without arguments, expected a call: %s(...)", node->name,
                         node->name);
    const char *reason = parser_reserved(node->name);
    if (reason != NULL)
        return elab_fail(e, node->place, SACCADE_EPARSE,
                         "got '%s', which is %s; expected an expression", node->name, reason);
    return SACCADE_OK;
}

saccade_status elab_name(elab *e, const ast_node *node, value *out)
{
    const local *found = frame_find(e->frame, node->name);
    const int var = scope_var(node->name), size = scope_size(node->name);
    uint32_t index;
    if (var >= 0)
        return elab_var(e, node, var, out);
    if (size >= 0) {
        *out = (value){.types = T_INT};
        if (e->builder != NULL)
            out->node = mod_emit(e->builder, OP_SIZE, NULL, 0, size, 0, 0);
        return SACCADE_OK;
    }
    if (found != NULL && found->tensor != NULL)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "got tensor parameter '%s' as a scalar, expected %s[...]", node->name,
                         node->name);
    if (found != NULL) {
        *out = found->value;
        return SACCADE_OK;
    }
    TRY(check_not_function(e, node));
    TRY(scope_capture(e, node->name, 0, node->place, e->frame->source, &index));
    *out = read_capture(e, index, NULL, 0, node->place);
    return SACCADE_OK;
}

saccade_status elab_index_begin(elab *e, const ast_node *node)
{
    const local *found = frame_find(e->frame, node->name);
    if (e->frame->kind == SACCADE_WEIGHT)
        return elab_fail(e, node->place, SACCADE_ETYPE, NO_POSITIONS, node->name);
    if (scope_var(node->name) >= 0 || parser_reserved(node->name) != NULL)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "got an index of '%s', which is %s; expected a captured tensor",
                         node->name, parser_reserved(node->name));
    if (found != NULL && found->tensor == NULL)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "got an index of the scalar '%s'; a tensor parameter is declared %s[]",
                         node->name, node->name);
    return SACCADE_OK;
}

saccade_status elab_index(elab *e, const ast_node *node, const value *indices, value *out)
{
    const local *found = frame_find(e->frame, node->name);
    uint32_t index;
    if (found != NULL)
        TRY(scope_capture(e, found->tensor, node->n_args, found->place, found->source, &index));
    else
        TRY(scope_capture(e, node->name, node->n_args, node->place, e->frame->source, &index));
    *out = read_capture(e, index, indices, node->n_args, node->place);
    return SACCADE_OK;
}

/* ---- constants and operators ---- */

saccade_status elab_constant(elab *e, const ast_node *node, value *out)
{
    if (node->kind == AST_INT) {
        *out = elab_int(e, node->value.i);
        return SACCADE_OK;
    }
    *out = (value){.types = node->kind == AST_FLOAT ? T_FLOAT : T_BOOL};
    if (e->builder != NULL)
        out->node = node->kind == AST_FLOAT ? mod_emit_float(e->builder, node->value.f)
                                            : mod_emit_bool(e->builder, node->value.i);
    return SACCADE_OK;
}

static saccade_status elab_plus(const elab *e, const ast_node *node, value operand, value *out)
{
    if ((operand.types & T_NUMBER) == 0)
        return elab_fail(e, node->place, SACCADE_ETYPE,
                         "operand of '+': got bool, expected a number; int(x) gives 0 or 1");
    operand.types &= T_NUMBER;
    *out = operand;
    return SACCADE_OK;
}

saccade_status elab_operator(elab *e, const ast_node *node, const value *args, value *out)
{
    if (node->name[0] == '+')
        return elab_plus(e, node, args[0], out);
    return elab_apply(e, node->name, node, node->args, args, node->n_args, out);
}

/* ---- bodies ---- */

static saccade_status elab_statement(elab *e, frame *f, const ast_statement *s)
{
    const int var = scope_var(s->name);
    value v;
    if (var >= 0 && f->kind == SACCADE_WEIGHT)
        return elab_fail(e, s->place, SACCADE_ETYPE, NO_POSITIONS, s->name);
    if (var == FRAME_SCORE && f->kind == SACCADE_MASK)
        return elab_fail(e, s->place, SACCADE_ETYPE,
                         "got 'score' in a mask, expected it only in score functions");
    TRY(elab_expr(e, s->value, &v));
    if (var < 0)
        return frame_set(e, f, s->name, (local){.value = v});
    TRY(elab_coerce(e, s->value->place, var == FRAME_SCORE ? T_FLOAT : T_INT, s->name, &v));
    f->vars[var] = v;
    return SACCADE_OK;
}

/* A weight is dropout(rate): its value is the rate, which nothing within a run changes. */
static saccade_status elab_weight(elab *e, frame *f, const ast_body *body, value *out)
{
    const ast_node *call = body->result;
    if (call->kind != AST_CALL || strcmp(call->name, "dropout") != 0 || call->n_args != 1)
        return elab_fail(e, call->place, SACCADE_ETYPE,
                         "got something else than a call of dropout, expected dropout(rate)");
    TRY(elab_expr(e, call->args[0], out));
    TRY(elab_coerce(e, call->args[0]->place, T_FLOAT, "a rate", out));
    e->frame = f->parent;
    return SACCADE_OK;
}

saccade_status elab_body(elab *e, frame *f, const ast_body *body, value *out)
{
    e->frame = f;
    for (const ast_statement *s = body->statements; s != NULL; s = s->next)
        TRY(elab_statement(e, f, s));
    if (f->kind == SACCADE_WEIGHT)
        return elab_weight(e, f, body, out);
    TRY(elab_expr(e, body->result, out));
    const bool is_mask = f->kind == SACCADE_MASK;
    if (is_mask && body->comment_follows && (out->types & T_BOOL) == 0)
        return elab_fail(e, body->result->place, SACCADE_ETYPE,
                         "a mask's result: got %s, expected bool; // starts a comment, "
                         "floordiv(x, y) divides",
                         types_name(out->types));
    TRY(elab_coerce(e, body->result->place, is_mask ? T_BOOL : T_FLOAT,
                    is_mask ? "a mask's result" : "a score's result", out));
    e->frame = f->parent;
    return SACCADE_OK;
}

static void init_vars(elab *e, frame *f, const value *score)
{
    for (int i = 0; i < FRAME_SCORE; i++) {
        f->vars[i] = (value){.types = T_INT};
        if (e->builder != NULL)
            f->vars[i].node = mod_emit(e->builder, OP_VAR, NULL, 0, i, 0, 0);
    }
    if (score != NULL)
        f->vars[FRAME_SCORE] = *score;
}

static saccade_status elab_source(elab *e, saccade_kind kind, const ast_source *source,
                                  const scope *outer, const value *score, value *out)
{
    const scope inner = {&source->body, source, outer};
    frame f = {.kind = kind, .scope = &inner, .source = source};
    if (!frame_init(e, &f, source->body.n_statements))
        return elab_no_memory(e);
    init_vars(e, &f, score);
    TRY(elab_body(e, &f, &source->body, out));
    return e->builder == NULL ? elab_check_defs(e, &inner) : SACCADE_OK;
}

saccade_status elab_run(saccade_kind kind, const ast_source *const *sources, uint32_t n,
                        elab_captures *captures, mod_builder *builder, arena *scratch,
                        uint32_t *result, saccade_error *err)
{
    uint32_t steps = 0, check_steps = 0;
    elab e = {.builder = builder,
              .captures = captures,
              .scratch = scratch,
              .err = err,
              .steps = &steps,
              .check_steps = &check_steps};
    const ast_source *prelude = prelude_source();
    value all = {.types = T_FLOAT}, next;
    const scope outer = {&prelude->body, prelude, NULL};
    if (builder != NULL)
        all.node = kind == SACCADE_SCORE ? mod_emit(builder, OP_SCORE, NULL, 0, 0, 0, 0)
                                         : mod_emit_bool(builder, 1);
    for (uint32_t i = 0; i < n; i++) {
        TRY(elab_source(&e, kind, sources[i], &outer, &all, &next));
        if (builder != NULL && kind == SACCADE_MASK && i > 0)
            next.node = mod_emit2(builder, OP_and, all.node, next.node);
        all = next;
    }
    *result = all.node;
    return SACCADE_OK;
}
