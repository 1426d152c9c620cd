/* What a mod allows where weights become bf16 and nobody asks for lse: a coarse tanh, and
 * weights as words. Both ask how far the score can be from the truth, or from finite. */
#include "cpu/jit_graph.h"

#include "base/status.h"
#include "pass/pass.h"

#include <math.h>

/* What errors of tanh may add to a score: a weight is off by as much, and by 4e-3 from its
 * rounding to bf16. */
static const float most_added = 0x1p-10f;

/* ---- how much of a value reaches the score ---- */

/* |x| of a constant node, else infinite. */
static float constant_size(const mod_fn *fn, uint32_t node)
{
    const mod_node *n = &fn->nodes[node];
    return n->op == OP_FLOAT ? fabsf(n->imm.f) : INFINITY;
}

/* Adds to the gains of n's operands what n's own passes on. */
static void pass_gain(const mod_fn *fn, const mod_node *n, float own, float *gain)
{
    const uint32_t *x = fn->args + n->args;
    switch (n->op) {
    case OP_fmul:
        gain[x[0]] += own * constant_size(fn, x[1]);
        gain[x[1]] += own * constant_size(fn, x[0]);
        return;
    case OP_fdiv:
        gain[x[0]] += own / (constant_size(fn, x[1]) < INFINITY ? constant_size(fn, x[1]) : 0);
        gain[x[1]] = INFINITY;
        return;
    case OP_fsel:
        gain[x[1]] += own;
        gain[x[2]] += own;
        gain[x[0]] = INFINITY;
        return;
    case OP_fadd:
    case OP_fsub:
    case OP_fmin:
    case OP_fmax:
    case OP_fneg:
    case OP_fabs:
    case OP_ftanh:
        for (int i = 0; i < n->n_args; i++)
            gain[x[i]] += own;
        return;
    default:
        for (int i = 0; i < n->n_args; i++)
            gain[x[i]] = INFINITY;
    }
}

int jit_allows_rough_tanh(const mod_fn *fn, arena *a)
{
    float *gain = arena_array(a, fn->n_nodes, sizeof *gain), sum = 0;
    if (!gain)
        return 0;
    gain[fn->result] = 1;
    for (uint32_t i = fn->n_nodes; i-- > 0;) {
        const mod_node *n = &fn->nodes[i];
        if (n->op == OP_ftanh && n->deps & DEP_SCORE)
            sum += gain[i];
        if (gain[i] != 0)
            pass_gain(fn, n, gain[i], gain);
    }
    return sum > 0 && sum * JIT_ROUGH_TANH <= most_added;
}

/* ---- finite scores ---- */

/* Whether an instruction that computes this for each score can raise the invalid flag. */
static int can_be_invalid(const mod_fn *fn, const mod_node *n)
{
    const int is_tile = n->deps & DEP_SCORE || (n->deps & DEP_Q && n->deps & DEP_KV);
    if (n->op == OP_fdiv)
        return is_tile && constant_size(fn, fn->args[n->args + 1]) == INFINITY;
    return is_tile && (n->op == OP_fsqrt || n->op == OP_frsqrt || n->op == OP_f2i);
}

/* A guess from ranges over ordinary sizes: a wrong one costs time alone, since a stream that
 * meets what is not finite is done again the exact way. */
int jit_stays_finite(const mod_fn *fn, arena *a)
{
    enum { ORDINARY = 1 << 20 };
    const pass_box box = {.hi = {ORDINARY, ORDINARY, ORDINARY, ORDINARY}};
    const pass_range score = {.flo = -1e30, .fhi = 1e30};
    eval_env env = {.tensors = NULL};
    pass_range *ranges = arena_array(a, fn->n_nodes, sizeof *ranges);
    if (!ranges)
        return 0;
    for (int i = 0; i < MOD_SIZE_COUNT; i++)
        env.size[i] = ORDINARY;
    pass_ranges(fn, &env, &box, &score, ranges);
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (can_be_invalid(fn, &fn->nodes[i]))
            return 0;
    const pass_range *r = &ranges[fn->result];
    return !r->may_nan && r->flo > -1e37 && r->fhi < 1e37;
}
