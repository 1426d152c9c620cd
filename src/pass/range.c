/* Interval analysis: ranges of all nodes of a mod over a box of (b, h, q, kv).
 * One rule per operation, named in ops.def's column `range`, in range_int.c, range_bits.c and
 * range_float.c; here are the leaves, the walk over the nodes, and what is concluded for loads.
 * Captures are known by value when they are scalars in host memory, else by what their dtype
 * can hold. */
#include "pass/range_rules.h"

#include "eval/eval_ops.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const range_rule range_rules[MOD_OP_COUNT] = {
#define OP(name, signature, form, value, exact, fast, grad, range) [OP_##name] = range_##range,
#include "mod/ops.def"
#undef OP
};

void range_of_dtype(const mod_capture *capture, range_val *out)
{
    static const struct {
        saccade_dtype dtype;
        int32_t lo, hi;
    } narrow[] = {{SACCADE_BOOL, 0, 1},
                  {SACCADE_U8, 0, UINT8_MAX},
                  {SACCADE_I8, INT8_MIN, INT8_MAX},
                  {SACCADE_U16, 0, UINT16_MAX},
                  {SACCADE_I16, INT16_MIN, INT16_MAX}};
    memset(out, 0, sizeof *out);
    range_set_bool(out, 1, 1);
    range_set_float(out, -INFINITY, INFINITY, 1);
    range_set_span(out, INT32_MIN, INT32_MAX);
    for (size_t i = 0; i < sizeof narrow / sizeof narrow[0]; i++)
        if (narrow[i].dtype == capture->dtype)
            range_set_span(out, narrow[i].lo, narrow[i].hi);
}

static void set_value(mod_type type, eval_cell value, range_val *out)
{
    memset(out, 0, sizeof *out);
    if (type == MOD_BOOL)
        range_set_bool(out, value.i == 0, value.i != 0);
    else if (type == MOD_INT)
        range_set_int(out, value.i);
    else if (isnan(value.f))
        range_set_float(out, -INFINITY, INFINITY, 1);
    else
        range_set_float(out, value.f, value.f, 0);
}

static void set_scalar(const mod_fn *fn, const eval_env *env, int32_t capture, range_val *out)
{
    const saccade_tensor *t = env && env->tensors ? &env->tensors[capture] : NULL;
    if (t && t->data && t->device.kind == SACCADE_CPU)
        set_value(fn->captures[capture].type, eval_read(t->dtype, t->data, 0), out);
    else
        range_of_dtype(&fn->captures[capture], out);
}

/* A size of 0 or less is one not known yet. */
static void set_size(const eval_env *env, int32_t which, range_val *out)
{
    memset(out, 0, sizeof *out);
    if (env && env->size[which] > 0)
        range_set_int(out, env->size[which]);
    else
        range_set_span(out, 1, 1 << 30);
}

int range_leaf(const mod_fn *fn, const eval_env *env, const mod_node *node, const pass_box *box,
               range_val *out)
{
    switch (node->op) {
    case OP_BOOL:
    case OP_INT:
        set_value(node->type, (eval_cell){.i = node->imm.i}, out);
        return 1;
    case OP_FLOAT:
        set_value(MOD_FLOAT, (eval_cell){.f = node->imm.f}, out);
        return 1;
    case OP_SIZE:
        set_size(env, node->imm.i, out);
        return 1;
    case OP_SCALAR:
        set_scalar(fn, env, node->imm.i, out);
        return 1;
    case OP_VAR:
        if (!box)
            return 0;
        memset(out, 0, sizeof *out);
        range_set_var(out, box, node->imm.i);
        return 1;
    default:
        return 0;
    }
}

/* value % step == rest, from the linear form */
static void set_congruence(const range_val *v, pass_range *out)
{
    int32_t step = 0;
    out->step = 1;
    out->rest = 0;
    if (v->rlo != v->rhi)
        return;
    for (int i = 0; i < 4; i++)
        for (int32_t b = abs(v->coef[i]); b;) {
            const int32_t t = step % b;
            step = b;
            b = t;
        }
    if (step < 2)
        return;
    out->step = step;
    out->rest = (int32_t)(((v->rlo % step) + step) % step);
}

static void to_public(const range_val *v, mod_type type, pass_range *out)
{
    memset(out, 0, sizeof *out);
    if (type == MOD_INT) {
        out->lo = v->lo;
        out->hi = v->hi;
        set_congruence(v, out);
    } else if (type == MOD_FLOAT) {
        out->flo = v->flo;
        out->fhi = v->fhi;
        out->may_nan = v->may_nan;
    } else {
        out->can_false = v->can_false;
        out->can_true = v->can_true;
    }
}

static void set_score(const pass_range *given, range_val *out)
{
    memset(out, 0, sizeof *out);
    if (given)
        range_set_float(out, given->flo, given->fhi, given->may_nan);
    else
        range_set_float(out, -FLT_MAX, FLT_MAX, 0);
}

static void range_of_node(const mod_fn *fn, const eval_env *env, const pass_box *box,
                          const pass_range *score, const mod_node *node, range_val *values)
{
    const uint32_t *args = fn->args + node->args;
    range_val *out = &values[node - fn->nodes];
    if (node->op == OP_SCORE)
        set_score(score, out);
    else if (node->op == OP_LOAD)
        range_of_dtype(&fn->captures[node->imm.i], out);
    else if (!range_leaf(fn, env, node, box, out))
        range_rules[node->op](box, &values[args[0]], node->n_args > 1 ? &values[args[1]] : NULL,
                              node->n_args > 2 ? &values[args[2]] : NULL, out);
}

/* Values of all nodes; values: zeros. */
static void walk(const mod_fn *fn, const eval_env *env, const pass_box *box,
                 const pass_range *score, range_val *values)
{
    pass_box at = *box;
    const int32_t b = env ? env->b_offset : 0, h = env ? env->h_offset : 0;
    at.lo[VAR_B] += b;
    at.hi[VAR_B] += b;
    at.lo[VAR_H] += h;
    at.hi[VAR_H] += h;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        range_of_node(fn, env, &at, score, &fn->nodes[i], values);
}

void pass_ranges(const mod_fn *fn, const eval_env *env, const pass_box *box,
                 const pass_range *score_range, pass_range *ranges)
{
    range_val small[64], *values = small;
    if (fn->n_nodes > sizeof small / sizeof small[0])
        values = calloc(fn->n_nodes, sizeof *values);
    else
        memset(small, 0, sizeof small);
    if (values)
        walk(fn, env, box, score_range, values);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        if (values) {
            to_public(&values[i], fn->nodes[i].type, &ranges[i]);
        } else { /* out of memory: nothing is known, which is always true */
            const mod_capture any = {.dtype = SACCADE_I32};
            range_val all;
            range_of_dtype(&any, &all);
            to_public(&all, fn->nodes[i].type, &ranges[i]);
        }
    }
    if (values != small)
        free(values);
}

size_t pass_cover_bytes(uint32_t n_nodes)
{
    return n_nodes * sizeof(range_val);
}

pass_verdict pass_cover(const mod_fn *mask, const eval_env *env, const pass_box *box,
                        void *scratch)
{
    range_val *values = scratch;
    memset(values, 0, pass_cover_bytes(mask->n_nodes));
    walk(mask, env, box, NULL, values);
    return range_verdict(&values[mask->result]);
}
