/* Ints as lines in the positions: by how much each changes when one position takes a step and
 * the others stand still. Sums, differences, negatives and multiples by a constant of lines
 * are lines; all other operations are, where the position does not reach them. */
#include "mod/mod.h"

#include "base/status.h"

/* a x + b y in one position; 0: a coefficient grows too large. */
static int combine(const mod_line *x, int64_t a, const mod_line *y, int64_t b, int v,
                   mod_line *out)
{
    const int64_t coef = a * x->coef[v] + b * y->coef[v];
    out->coef[v] = (int32_t)coef;
    return (x->known & y->known) >> v & 1 && coef >= -MOD_MOST_COEF && coef <= MOD_MOST_COEF;
}

/* Whether the operation keeps lines in position v. */
static int is_line(const mod_fn *fn, const mod_node *n, int v, const mod_line *all,
                   mod_line *out)
{
    const uint32_t *args = fn->args + n->args;
    const mod_line *x = n->n_args > 0 ? &all[args[0]] : NULL;
    const mod_line *y = n->n_args > 1 ? &all[args[1]] : x;
    switch (n->op) {
    case OP_VAR:
        out->coef[v] = 1;
        return 1;
    case OP_iadd:
        return combine(x, 1, y, 1, v, out);
    case OP_isub:
        return combine(x, 1, y, -1, v, out);
    case OP_ineg:
        return combine(x, -1, x, 0, v, out);
    case OP_imul:
        if (fn->nodes[args[0]].op == OP_INT)
            return combine(y, fn->nodes[args[0]].imm.i, y, 0, v, out);
        return fn->nodes[args[1]].op == OP_INT
               && combine(x, fn->nodes[args[1]].imm.i, x, 0, v, out);
    default:
        return 0;
    }
}

static mod_line line_of(const mod_fn *fn, const mod_node *n, const mod_line *all)
{
    mod_line line = {0};
    if (n->deps & DEP_SCORE)
        return line;
    for (int v = VAR_B; v <= VAR_KV; v++) {
        if (!(n->deps >> v & 1) || is_line(fn, n, v, all, &line))
            line.known |= (uint8_t)(1 << v);
        else
            line.coef[v] = 0;
    }
    return line;
}

const mod_line *mod_find_lines(const mod_fn *fn, arena *arena)
{
    mod_line *lines = arena_array(arena, fn->n_nodes, sizeof *lines);
    for (uint32_t i = 0; lines && i < fn->n_nodes; i++)
        lines[i] = line_of(fn, &fn->nodes[i], lines);
    return lines;
}
