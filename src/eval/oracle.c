/* The readable truth: a mod at one point. Values are held as double, which holds every int32
   and f32 exactly; what does not depend on the score is computed in int32 and f32 as every
   engine does (docs/design.md, rule 3), the rest in double.
   All nodes are computed, since values are pure; which loads the text would have reached by
   && || ?: is asked only when one of them was out of range. */
#include "eval/eval.h"

#include "eval/eval_ops.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

typedef struct walk {
    const mod_fn *fn;
    const eval_env *env;
    double *values;        /* of the walk's nodes */
    const double *indices; /* what loads are indexed by; the same but in a wide walk */
    bool is_wide;
    bool any_outside;
} walk;

static eval_cell cell_of(mod_type type, double value)
{
    if (type == MOD_FLOAT)
        return (eval_cell){.f = (float)value};
    return (eval_cell){.i = (int32_t)value};
}

static double value_of(mod_type type, eval_cell cell)
{
    return type == MOD_FLOAT ? (double)cell.f : (double)cell.i;
}

static double load(walk *w, const mod_node *n)
{
    const saccade_tensor *t = &w->env->tensors[n->imm.i];
    int64_t offset = 0;
    for (uint32_t d = 0; d < n->n_args; d++) {
        const int32_t index = (int32_t)w->indices[w->fn->args[n->args + d]];
        if (index < 0 || index >= t->shape[d])
            w->any_outside = true;
        offset += eval_clamp(index, t->shape[d]) * t->stride[d];
    }
    if (w->is_wide)
        return eval_read_wide(t->dtype, t->data, offset);
    return value_of((mod_type)n->type, eval_read(t->dtype, t->data, offset));
}

static double operation(const walk *w, const mod_node *n)
{
    const bool is_wide = w->is_wide || (n->deps & DEP_SCORE);
    double value[3] = {0, 0, 0};
    eval_cell cell[3] = {{0}, {0}, {0}};
    for (uint32_t k = 0; k < n->n_args; k++) {
        const uint32_t arg = w->fn->args[n->args + k];
        value[k] = w->values[arg];
        cell[k] = cell_of((mod_type)w->fn->nodes[arg].type, is_wide ? 0.0 : value[k]);
    }
    if (is_wide)
        return eval_apply_wide((mod_op)n->op, value[0], value[1], value[2]);
    return value_of((mod_type)n->type, eval_apply((mod_op)n->op, cell[0], cell[1], cell[2]));
}

static double leaf_or_operation(walk *w, const mod_node *n, const eval_point *at)
{
    const int32_t position[4] = {at->b + w->env->b_offset, at->h + w->env->h_offset, at->q,
                                 at->kv};
    switch (n->op) {
    case OP_BOOL:
    case OP_INT:
        return n->imm.i;
    case OP_FLOAT:
        return (double)n->imm.f;
    case OP_VAR:
        return position[n->imm.i];
    case OP_SCORE:
        return at->score;
    case OP_SIZE:
        return w->env->size[n->imm.i];
    case OP_SCALAR:
    case OP_LOAD:
        return load(w, n);
    default:
        return operation(w, n);
    }
}

/* ---- reports ---- */

enum { WORDS = MOD_MAX_NODES / 64 + 1 };

static bool has(const uint64_t *set, uint32_t node)
{
    return set[node / 64] >> node % 64 & 1;
}

static void add(uint64_t *set, uint32_t node)
{
    set[node / 64] |= 1ull << node % 64;
}

/* Whether the score decides a node's value, given what is known of its operands. */
static bool is_open(const walk *w, const mod_node *n, const uint64_t *open)
{
    const uint32_t *x = w->fn->args + n->args;
    if (n->op == OP_SCORE)
        return true;
    if (n->op == OP_and || n->op == OP_or)
        for (int k = 0; k < 2; k++)
            if (!has(open, x[k]) && (w->values[x[k]] != 0) == (n->op == OP_or))
                return false;
    if (n->op == OP_bsel || n->op == OP_isel || n->op == OP_fsel)
        return has(open, x[0]) || has(open, x[w->values[x[0]] != 0 ? 1 : 2]);
    for (uint32_t k = 0; k < n->n_args; k++)
        if (has(open, x[k]))
            return true;
    return false;
}

/* Does the text read operand k of n, given its first operand's value? Where the score decides
 * that, it may. */
static bool reaches(const mod_node *n, uint32_t k, double first, bool first_is_open)
{
    if (first_is_open)
        return true;
    switch (n->op) {
    case OP_and:
        return k == 0 || first != 0;
    case OP_or:
        return k == 0 || first == 0;
    case OP_bsel:
    case OP_isel:
    case OP_fsel:
        return k == 0 || (k == 1) == (first != 0);
    default:
        return true;
    }
}

/* Marks what the result needs. Users follow operands, so one walk from the end is enough. */
static void mark_reached(const walk *w, uint64_t *reached)
{
    uint64_t open[WORDS] = {0};
    const mod_fn *fn = w->fn;
    for (uint32_t i = 0; i <= fn->result; i++)
        if (fn->nodes[i].deps & DEP_SCORE && is_open(w, &fn->nodes[i], open))
            add(open, i);
    add(reached, fn->result);
    for (uint32_t i = fn->result + 1; i-- > 0;) {
        const mod_node *n = &fn->nodes[i];
        for (uint32_t k = 0; has(reached, i) && k < n->n_args; k++) {
            const uint32_t first = fn->args[n->args];
            if (reaches(n, k, w->values[first], has(open, first)))
                add(reached, fn->args[n->args + k]);
        }
    }
}

static bool report_load(const walk *w, uint32_t node, eval_report *report)
{
    const mod_node *n = &w->fn->nodes[node];
    const saccade_tensor *t = &w->env->tensors[n->imm.i];
    for (uint32_t d = 0; d < n->n_args; d++) {
        const int32_t index = (int32_t)w->values[w->fn->args[n->args + d]];
        if (index >= 0 && index < t->shape[d])
            continue;
        *report = (eval_report){(int32_t)node, (int32_t)d, index, t->shape[d]};
        return true;
    }
    return false;
}

static void report_outside(const walk *w, eval_report *report)
{
    uint64_t reached[WORDS] = {0};
    assert(w->fn->n_nodes <= MOD_MAX_NODES);
    mark_reached(w, reached);
    for (uint32_t i = 0; i <= w->fn->result; i++)
        if (w->fn->nodes[i].op == OP_LOAD && has(reached, i) && report_load(w, i, report))
            return;
}

size_t eval_scalar_values(const mod_fn *fn, bool is_wide)
{
    return is_wide ? 2 * (size_t)fn->n_nodes : fn->n_nodes;
}

static double walk_nodes(walk *w, const eval_point *at)
{
    for (uint32_t i = 0; i < w->fn->n_nodes; i++)
        w->values[i] = leaf_or_operation(w, &w->fn->nodes[i], at);
    return w->values[w->fn->result];
}

double eval_scalar(const mod_fn *fn, const eval_env *env, const eval_point *at, double *values,
                   eval_report *report)
{
    walk w = {.fn = fn, .env = env, .values = values, .indices = values};
    const double result = walk_nodes(&w, at);
    if (report != NULL) {
        *report = (eval_report){.node = -1};
        if (w.any_outside)
            report_outside(&w, report);
    }
    if (!env->is_wide)
        return result;
    w.values = values + fn->n_nodes;
    w.is_wide = true;
    return walk_nodes(&w, at);
}
