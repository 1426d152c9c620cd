/* Proofs that a mask holds always or never over a box.
 * The nodes are compiled once: what is constant is evaluated when the prover is made, the rest
 * becomes a list of rules with the places of their operands, and tables over the captured
 * tensors answer loads. A proof is one walk over that list; a second proof with the same
 * scratch (pass_prove_next) walks only what depends on a variable whose range has changed. */
#include "base/tensor_walk.h"
#include "pass/minmax.h"
#include "pass/range_rules.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* An operand is a constant of the prover, a value of the scratch, or a variable. */
enum {
    MAX_INDEX = SACCADE_MAX_RANK,
    CUT_PIECES = 4 /* quotients in a box that is still worth cutting at one */
};
#define IS_LIVE ((uint32_t)1 << 31)

typedef struct step {
    range_rule rule;     /* NULL: a load or a variable */
    const minmax *table; /* a load's; NULL: by type */
    uint32_t out;        /* place in the scratch */
    uint32_t args;       /* first operand in pass_prover.args */
    uint8_t n_args, deps, var, op;
} step;

typedef struct state {
    pass_box box;
    range_val values[];
} state;

struct pass_prover {
    step *steps;
    uint32_t *args;
    range_val *constants;
    uint32_t n_steps, n_live, n_constants;
    uint32_t result; /* operand */
    minmax **tables;
    uint32_t n_tables;
};

/* ---- making ---- */

/* Dead code may name a capture that is empty. */
static saccade_status make_tables(const mod_fn *fn, const eval_env *env, pass_prover *p,
                                  saccade_error *err)
{
    p->tables = calloc(fn->n_captures + 1, sizeof *p->tables);
    FAIL_IF_NULL(p->tables);
    p->n_tables = fn->n_captures;
    for (uint32_t i = 0; env && env->tensors && i < fn->n_captures; i++) {
        const saccade_tensor *t = &env->tensors[i];
        if (fn->captures[i].rank == 0 || !t->data || t->device.kind != SACCADE_CPU
            || tensor_is_empty(t) || !mod_loads(fn, i))
            continue;
        TRY(minmax_create(&fn->captures[i], t, &p->tables[i], err));
    }
    return SACCADE_OK;
}

static int all_constant(const mod_fn *fn, const mod_node *node, const uint32_t *place)
{
    for (uint32_t i = 0; i < node->n_args; i++)
        if (place[fn->args[node->args + i]] & IS_LIVE)
            return 0;
    return 1;
}

static const range_val *operand(const pass_prover *p, const state *s, uint32_t place)
{
    return place & IS_LIVE ? &s->values[place & ~IS_LIVE] : &p->constants[place];
}

static void load(const pass_prover *p, const step *st, const uint32_t *args, const state *s,
                 range_val *out)
{
    const range_val *index[MAX_INDEX];
    for (uint32_t i = 0; i < st->n_args; i++)
        index[i] = operand(p, s, args[i]);
    minmax_query(st->table, index, out);
}

static void run_step(const pass_prover *p, const step *st, const pass_box *box, const state *s,
                     range_val *out)
{
    const uint32_t *args = p->args + st->args;
    if (st->rule)
        st->rule(box, operand(p, s, args[0]), st->n_args > 1 ? operand(p, s, args[1]) : NULL,
                 st->n_args > 2 ? operand(p, s, args[2]) : NULL, out);
    else if (st->table)
        load(p, st, args, s, out);
    else
        range_set_var(out, box, st->var);
}

/* Gives node i a place: a constant's, computed now, or a step's. */
static void compile_node(const mod_fn *fn, const eval_env *env, pass_prover *p, uint32_t i,
                         uint32_t *place)
{
    static const pass_box no_box = {{0}, {0}};
    const mod_node *node = &fn->nodes[i];
    range_val *constant = &p->constants[p->n_constants];
    step st = {.rule = range_rules[node->op],
               .n_args = node->n_args,
               .deps = node->deps,
               .args = node->args,
               .op = node->op};
    if (node->op == OP_LOAD)
        st.table = p->tables[node->imm.i];
    for (uint32_t a = 0; a < node->n_args; a++)
        p->args[node->args + a] = place[fn->args[node->args + a]];
    const int is_leaf = range_leaf(fn, env, node, NULL, constant);
    const int is_blind = node->op == OP_LOAD && !st.table;
    if (is_blind)
        range_of_dtype(&fn->captures[node->imm.i], constant);
    if (is_leaf || is_blind || (node->n_args && all_constant(fn, node, place))) {
        if (!is_leaf && !is_blind)
            run_step(p, &st, &no_box, NULL, constant);
        place[i] = p->n_constants++;
        return;
    }
    st.var = (uint8_t)(node->op == OP_VAR ? node->imm.i : 0);
    st.out = p->n_live;
    place[i] = IS_LIVE | p->n_live++;
    p->steps[p->n_steps++] = st;
}

static saccade_status compile(const mod_fn *fn, const eval_env *env, pass_prover *p,
                              saccade_error *err)
{
    uint32_t *place = calloc(fn->n_nodes, sizeof *place);
    p->steps = calloc(fn->n_nodes, sizeof *p->steps);
    p->args = calloc((size_t)fn->n_args + 1, sizeof *p->args);
    p->constants = calloc(fn->n_nodes, sizeof *p->constants);
    if (!place || !p->steps || !p->args || !p->constants) {
        free(place);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        compile_node(fn, env, p, i, place);
    p->result = place[fn->result];
    free(place);
    return SACCADE_OK;
}

saccade_status pass_prover_create(const mod_fn *fn, const eval_env *env, pass_prover **out,
                                  saccade_error *err)
{
    pass_prover *p = calloc(1, sizeof *p);
    saccade_status status = SACCADE_OK;
    FAIL_IF_NULL(p);
    assert(fn->kind == SACCADE_MASK);
    TRY_GOTO(make_tables(fn, env, p, err));
    TRY_GOTO(compile(fn, env, p, err));
    *out = p;
out:
    if (status != SACCADE_OK)
        pass_prover_destroy(p);
    return status;
}

void pass_prover_destroy(pass_prover *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; p->tables && i < p->n_tables; i++)
        minmax_destroy(p->tables[i]);
    free(p->tables);
    free(p->steps);
    free(p->args);
    free(p->constants);
    free(p);
}

size_t pass_prover_scratch(const pass_prover *p)
{
    return sizeof(state) + p->n_live * sizeof(range_val);
}

/* ---- proving ---- */

static pass_verdict walk(const pass_prover *p, const pass_box *box, unsigned changed, state *s)
{
    for (uint32_t i = 0; i < p->n_steps; i++)
        if (p->steps[i].deps & changed)
            run_step(p, &p->steps[i], box, s, &s->values[p->steps[i].out]);
    s->box = *box;
    return range_verdict(operand(p, s, p->result));
}

pass_verdict pass_prove(const pass_prover *prover, const pass_box *box, void *scratch)
{
    return walk(prover, box, DEP_B | DEP_H | DEP_Q | DEP_KV, scratch);
}

pass_verdict pass_prove_next(const pass_prover *prover, const pass_box *box, void *scratch)
{
    const state *s = scratch;
    unsigned changed = 0;
    for (int v = 0; v < 4; v++)
        if (s->box.lo[v] != box->lo[v] || s->box.hi[v] != box->hi[v])
            changed |= 1u << v;
    return walk(prover, box, changed, scratch);
}

/* ---- cuts ---- */

/* value = v + rest or rest - v for one variable v. */
static int is_one_variable(const range_val *x, int *var)
{
    int found = -1;
    if (x->rlo != x->rhi)
        return 0;
    for (int v = 0; v < 4; v++) {
        if (x->coef[v] == 0)
            continue;
        if (found >= 0 || (x->coef[v] != 1 && x->coef[v] != -1))
            return 0;
        found = v;
    }
    *var = found;
    return found >= 0;
}

/* The first position of v from which on x >= least (or below it, when x falls). */
static int32_t where(const range_val *x, int var, int64_t least)
{
    return (int32_t)(x->coef[var] > 0 ? least - x->rlo : x->rlo - least + 1);
}

/* Divisor of a step that cuts its operand into pieces of n values; 0: no such step. */
static int64_t divisor_of(const step *st, const range_val *y)
{
    switch (st->op) { /* operands of others may have no integer range */
    case OP_idiv:
    case OP_irem:
    case OP_ifloordiv:
    case OP_ifloormod:
        return y->lo == y->hi && y->lo > 0 ? y->lo : 0;
    case OP_ishr:
        return y->lo == y->hi ? (int64_t)1 << (y->lo & 31) : 0;
    case OP_iand:
        return y->lo == y->hi && y->lo > 0 && (y->lo & (y->lo + 1)) == 0 ? y->lo + 1 : 0;
    default:
        return 0;
    }
}

static int64_t quotient(int64_t x, int64_t n)
{
    return x >= 0 ? x / n : -((n - 1 - x) / n);
}

static int cut_at_quotient(const pass_prover *p, const step *st, const state *s, int *var,
                           int32_t *at)
{
    const uint32_t *args = p->args + st->args;
    if (st->n_args != 2)
        return 0;
    const range_val *x = operand(p, s, args[0]);
    const int64_t n = divisor_of(st, operand(p, s, args[1]));
    if (n == 0 || !is_one_variable(x, var))
        return 0;
    const int64_t first = quotient(x->lo, n), last = quotient(x->hi, n);
    if (first == last || last - first > CUT_PIECES)
        return 0;
    *at = where(x, *var, (first + (last - first + 1) / 2) * n);
    return 1;
}

/* Where the values of a rank-1 tensor first differ from the first of the box. */
static int cut_at_change(const pass_prover *p, const step *st, const state *s, int *var,
                         int32_t *at)
{
    if (!st->table || st->n_args != 1)
        return 0;
    const range_val *x = operand(p, s, p->args[st->args]);
    range_val part = *x, first, value;
    const range_val *index = &part;
    if (!is_one_variable(x, var) || x->lo == x->hi)
        return 0;
    part.hi = part.lo;
    minmax_query(st->table, &index, &first);
    int64_t same = x->lo, other = x->hi + 1;
    while (same + 1 < other) {
        part.hi = same + (other - same) / 2;
        minmax_query(st->table, &index, &value);
        const int is_same = value.lo == first.lo && value.hi == first.lo;
        *(is_same ? &same : &other) = part.hi;
    }
    if (other > x->hi)
        return 0;
    *at = where(x, *var, other);
    return 1;
}

int pass_prove_cut(const pass_prover *prover, const void *scratch, int *var, int32_t *at)
{
    const state *s = scratch;
    for (uint32_t i = 0; i < prover->n_steps; i++) {
        const step *st = &prover->steps[i];
        const int is_int = st->table && minmax_is_int(st->table);
        if (cut_at_quotient(prover, st, s, var, at)
            || (is_int && cut_at_change(prover, st, s, var, at)))
            return *at > s->box.lo[*var] && *at <= s->box.hi[*var];
    }
    return 0;
}
