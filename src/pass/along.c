/* Which values are the same along a diagonal, from the leaves up. */
#include "pass/along.h"

/* Sums and products of q and kv, which wrap, are not of q - kv alone when they are compared. */
int pass_compares_places(const mod_fn *fn, const mod_node *n)
{
    if (n->op != OP_ilt && n->op != OP_ile && n->op != OP_ieq && n->op != OP_ine)
        return 0;
    const mod_node *x = &fn->nodes[fn->args[n->args]], *y = &fn->nodes[fn->args[n->args + 1]];
    return x->op == OP_VAR && y->op == OP_VAR
           && ((x->imm.i == VAR_Q && y->imm.i == VAR_KV)
               || (x->imm.i == VAR_KV && y->imm.i == VAR_Q));
}

/* Sums of multiples of q and kv, which cancel along a diagonal though they wrap. */
static int is_difference(const mod_node *n, const mod_line *line)
{
    const int both = DEP_Q | DEP_KV;
    return n->type == MOD_INT && (line->known & both) == both
           && line->coef[VAR_Q] == -line->coef[VAR_KV];
}

static int is_along(const mod_fn *fn, const mod_node *n, const mod_line *line, int has_compares,
                    const unsigned char *all)
{
    if (!(n->deps & (DEP_Q | DEP_KV | DEP_SCORE))
        || (has_compares && pass_compares_places(fn, n)))
        return 1;
    if (n->deps & DEP_SCORE || n->n_args == 0)
        return 0;
    if (is_difference(n, line))
        return 1;
    for (int i = 0; i < n->n_args; i++)
        if (!all[fn->args[n->args + (uint32_t)i]])
            return 0;
    return 1;
}

unsigned char *pass_find_along(const mod_fn *fn, int has_compares, arena *scratch)
{
    const mod_line *lines = mod_find_lines(fn, scratch);
    unsigned char *along = arena_array(scratch, fn->n_nodes, sizeof *along);
    for (uint32_t i = 0; lines && along && i < fn->n_nodes; i++)
        along[i] = (unsigned char)is_along(fn, &fn->nodes[i], &lines[i], has_compares, along);
    return lines ? along : NULL;
}
