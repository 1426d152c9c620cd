/* Typed nodes as text that parses and binds back to the same nodes. The builder's canonical
   order makes that easy: any text with the same operations on the same operands gives the same
   order, so a node used once is written inside its user and only shared ones become locals.
   Captures are numbered by first mention; where the text would mention them in another order,
   or not at all, it starts with locals that do and are dropped as dead when read back. */
#include "mod/ast.h"

#include <stdio.h>
#include <string.h>

enum { INLINE_NODES = 24 }; /* operations on one line before a node gets its own */

typedef struct printer {
    const mod_fn *fn;
    strbuf text;
    uint32_t *uses;
    uint32_t *weight; /* nodes written inline, the node's own included */
    char prefix[AST_MAX_NAME + 2];
    uint32_t mentioned[MOD_MAX_CAPTURES], n_mentioned;
} printer;

static bool is_leaf(const mod_node *n)
{
    return n->n_args == 0;
}

static bool is_inline(const printer *p, uint32_t i)
{
    return is_leaf(&p->fn->nodes[i]) || (p->uses[i] == 1 && p->weight[i] < INLINE_NODES);
}

static void weigh(printer *p)
{
    const mod_fn *fn = p->fn;
    for (uint32_t i = 0; i < fn->n_args; i++)
        p->uses[fn->args[i]]++;
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        p->weight[i] = 1;
        for (uint32_t j = 0; j < fn->nodes[i].n_args; j++) {
            const uint32_t arg = fn->args[fn->nodes[i].args + j];
            p->weight[i] += is_inline(p, arg) ? p->weight[arg] : 1;
        }
    }
}

/* locals are called prefix and number; no capture may be. */
static void choose_prefix(printer *p)
{
    size_t n = 1;
    strcpy(p->prefix, "n");
    for (uint32_t i = 0; i < p->fn->n_captures; i++) {
        const char *name = p->fn->captures[i].name;
        if (strncmp(name, p->prefix, n) == 0 && name[n] >= '0' && name[n] <= '9') {
            p->prefix[n++] = '_';
            p->prefix[n] = '\0';
            i = UINT32_MAX; /* start again */
        }
    }
}

static void mention(printer *p, uint32_t capture)
{
    for (uint32_t i = 0; i < p->n_mentioned; i++)
        if (p->mentioned[i] == capture)
            return;
    p->mentioned[p->n_mentioned++] = capture;
}

static void print_leaf(printer *p, const mod_node *n)
{
    char number[32];
    switch (n->op) {
    case OP_BOOL:
        strbuf_puts(&p->text, n->imm.i ? "true" : "false");
        return;
    case OP_INT:
        strbuf_printf(&p->text, "%d", n->imm.i);
        return;
    case OP_FLOAT:
        lexer_print_float(n->imm.f, number);
        strbuf_puts(&p->text, number);
        return;
    case OP_VAR:
        strbuf_puts(&p->text, ast_vars[n->imm.i]);
        return;
    case OP_SCORE:
        strbuf_puts(&p->text, "score");
        return;
    case OP_SIZE:
        strbuf_puts(&p->text, ast_sizes[n->imm.i]);
        return;
    default:
        strbuf_puts(&p->text, p->fn->captures[n->imm.i].name);
        mention(p, (uint32_t)n->imm.i);
    }
}

/* ---- operators ---- */

enum { PREC_COND = 0, PREC_UNARY = 11, PREC_PRIMARY = 12 };

static bool is_negative(const mod_node *n)
{
    return (n->op == OP_INT && n->imm.i < 0)
           || (n->op == OP_FLOAT && (n->imm.f < 0 || 1 / n->imm.f < 0));
}

static int precedence(const printer *p, uint32_t i)
{
    const mod_node *n = &p->fn->nodes[i];
    const char *form = mod_op_infos[n->op].form;
    if (is_leaf(n))
        return is_negative(n) ? PREC_UNARY : PREC_PRIMARY;
    if (!is_inline(p, i) || n->op == OP_LOAD || form[strlen(form) - 1] == '(')
        return PREC_PRIMARY;
    if (form[1] == 'u')
        return PREC_UNARY;
    return form[0] == '?' ? PREC_COND : parser_precedence(form);
}

static void print_value(printer *p, uint32_t i);

/* an operand, in parentheses when it binds no tighter than `above`. */
static void print_operand(printer *p, uint32_t i, int above)
{
    const bool is_wrapped = precedence(p, i) <= above;
    if (is_wrapped)
        strbuf_putc(&p->text, '(');
    print_value(p, i);
    if (is_wrapped)
        strbuf_putc(&p->text, ')');
}

static void print_list(printer *p, const mod_node *n, char close)
{
    for (uint32_t j = 0; j < n->n_args; j++) {
        if (j > 0)
            strbuf_puts(&p->text, ", ");
        print_value(p, p->fn->args[n->args + j]);
    }
    strbuf_putc(&p->text, close);
}

/* "-8" is a constant and "-(8)" is not. */
static void print_unary(printer *p, const char *form, uint32_t arg)
{
    const uint8_t op = p->fn->nodes[arg].op;
    const bool is_number = op == OP_INT || op == OP_FLOAT;
    strbuf_putc(&p->text, form[0]);
    print_operand(p, arg, is_number ? PREC_PRIMARY : PREC_UNARY);
}

static void print_operation(printer *p, const mod_node *n)
{
    const char *form = mod_op_infos[n->op].form;
    const uint32_t *args = p->fn->args + n->args;
    if (n->op == OP_LOAD) {
        strbuf_printf(&p->text, "%s[", p->fn->captures[n->imm.i].name);
        print_list(p, n, ']');
        mention(p, (uint32_t)n->imm.i);
    } else if (form[strlen(form) - 1] == '(') {
        strbuf_puts(&p->text, form);
        print_list(p, n, ')');
    } else if (form[1] == 'u') {
        print_unary(p, form, args[0]);
    } else if (form[0] == '?') {
        print_operand(p, args[0], PREC_COND);
        strbuf_puts(&p->text, " ? ");
        print_operand(p, args[1], PREC_COND);
        strbuf_puts(&p->text, " : ");
        print_operand(p, args[2], PREC_COND);
    } else {
        const int level = parser_precedence(form);
        print_operand(p, args[0], level - 1);
        strbuf_printf(&p->text, " %s ", form);
        print_operand(p, args[1], level);
    }
}

static void print_value(printer *p, uint32_t i)
{
    const mod_node *n = &p->fn->nodes[i];
    if (is_leaf(n))
        print_leaf(p, n);
    else if (is_inline(p, i))
        print_operation(p, n);
    else
        strbuf_printf(&p->text, "%s%u", p->prefix, i);
}

/* ---- the text ---- */

static void print_body(printer *p)
{
    for (uint32_t i = 0; i + 1 < p->fn->n_nodes; i++) {
        if (is_inline(p, i))
            continue;
        strbuf_printf(&p->text, "%s%u = ", p->prefix, i);
        print_operation(p, &p->fn->nodes[i]);
        strbuf_puts(&p->text, ";\n");
    }
    const mod_node *result = &p->fn->nodes[p->fn->result];
    const bool is_weight = p->fn->kind == SACCADE_WEIGHT;
    if (is_weight)
        strbuf_puts(&p->text, "dropout(");
    if (is_leaf(result))
        print_leaf(p, result);
    else
        print_operation(p, result);
    strbuf_puts(&p->text, is_weight ? ")\n" : "\n");
}

static bool mentions_in_order(const printer *p)
{
    for (uint32_t i = 0; i < p->n_mentioned; i++)
        if (p->mentioned[i] != i)
            return false;
    return p->n_mentioned == p->fn->n_captures;
}

static void print_mentions(const printer *p, strbuf *out)
{
    for (uint32_t i = 0; i < p->fn->n_captures; i++) {
        const mod_capture *c = &p->fn->captures[i];
        strbuf_printf(out, "%s0 = %s", p->prefix, c->name);
        for (uint32_t j = 0; j < c->rank; j++)
            strbuf_puts(out, j == 0 ? "[0" : ", 0");
        strbuf_puts(out, c->rank > 0 ? "];\n" : ";\n");
    }
}

saccade_status mod_print_fn(const mod_fn *fn, strbuf *out, saccade_error *err)
{
    printer p = {.fn = fn};
    arena scratch;
    arena_init(&scratch);
    strbuf_init(&p.text, 0);
    p.uses = arena_array(&scratch, fn->n_nodes, sizeof *p.uses);
    p.weight = arena_array(&scratch, fn->n_nodes, sizeof *p.weight);
    if (p.uses != NULL && p.weight != NULL) {
        weigh(&p);
        choose_prefix(&p);
        print_body(&p);
        if (!mentions_in_order(&p))
            print_mentions(&p, out);
        strbuf_puts(out, strbuf_text(&p.text));
    }
    const bool is_whole = p.uses != NULL && p.weight != NULL && p.text.failed == SACCADE_OK;
    strbuf_free(&p.text);
    arena_free(&scratch);
    FAIL_IF(!is_whole, SACCADE_ENOMEM, "out of memory");
    return strbuf_status(out, err);
}

/* ---- nodes, for people ---- */

static void print_node_operands(const mod_fn *fn, const mod_node *n, strbuf *out)
{
    char number[32];
    switch (n->op) {
    case OP_BOOL:
        strbuf_puts(out, n->imm.i ? " true" : " false");
        break;
    case OP_INT:
        strbuf_printf(out, " %d", n->imm.i);
        break;
    case OP_FLOAT:
        lexer_print_float(n->imm.f, number);
        strbuf_printf(out, " %s", number);
        break;
    case OP_VAR:
        strbuf_printf(out, " %s", ast_vars[n->imm.i]);
        break;
    case OP_SIZE:
        strbuf_printf(out, " %s", ast_sizes[n->imm.i]);
        break;
    case OP_SCALAR:
    case OP_LOAD:
        strbuf_printf(out, " %s", fn->captures[n->imm.i].name);
        break;
    default:
        break;
    }
    for (uint32_t j = 0; j < n->n_args; j++)
        strbuf_printf(out, " n%u", fn->args[n->args + j]);
}

static void print_deps(unsigned deps, strbuf *out)
{
    static const char *const names[] = {"b", "h", "q", "kv", "score"};
    const char *gap = "";
    strbuf_putc(out, '{');
    for (int i = 0; i < 5; i++) {
        if ((deps >> i & 1) == 0)
            continue;
        strbuf_printf(out, "%s%s", gap, names[i]);
        gap = " ";
    }
    strbuf_putc(out, '}');
}

saccade_status mod_print_nodes(const mod_fn *fn, strbuf *out, saccade_error *err)
{
    static const char *const types[] = {"bool", "int", "float"};
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        strbuf_printf(out, "n%u %s ", i, types[n->type]);
        print_deps(n->deps, out);
        strbuf_printf(out, " = %s", mod_op_infos[n->op].name);
        print_node_operands(fn, n, out);
        strbuf_putc(out, '\n');
    }
    return strbuf_status(out, err);
}
