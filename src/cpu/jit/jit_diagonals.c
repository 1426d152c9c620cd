/* Values that depend on kv - q, beside b and h, and on nothing else: a bucket of the distance,
 * what is read there, a penalty. Of a tile's scores most share theirs with others, so tiles
 * read them from arrays with a cell for each diagonal, which the interpreter's loops fill once
 * for rows and keys that are fixed. Few rows share little: they have code that computes them,
 * as it does what a few instructions make. */
#include "cpu/jit/jit_graph.h"

#include <string.h>

enum { MOST_DIAGONALS = 48 };
enum { COST_READ = 10, COST_CALL = 50, LEAST_COST = 5 };

static int is_uniform(const jit_node *n)
{
    return n->level == JIT_UNIFORM;
}

/* One row stands for all: its values are the same for all diagonals. */
static int has_cells(const jit_node *n)
{
    return n->level == JIT_COL || n->level == JIT_TILE;
}

/* Nodes that stand for several of a mod's, as clamped indices and offsets do, are along where
 * their operands are. */
static void complete_along(jit_graph *g)
{
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        jit_node *n = &g->nodes[i];
        int all = n->n_args > 0 && !(n->varies & DEP_SCORE);
        for (int k = 0; k < n->n_args; k++)
            all = all && g->nodes[n->args[k]].is_along;
        n->is_along |= (uint8_t)(is_uniform(n) || all);
    }
}

static int is_call(int op)
{
    static const uint16_t in_line[] = {
        OP_iadd, OP_isub, OP_imul, OP_imin,  OP_imax,   OP_iabs,  OP_ineg,   OP_iand, OP_ior,
        OP_ixor, OP_inot, OP_ishl, OP_ishr,  OP_i2f,    OP_b2i,   OP_fadd,   OP_fsub, OP_fmul,
        OP_fdiv, OP_fmin, OP_fmax, OP_fsqrt, OP_ffloor, OP_fceil, OP_ftrunc, OP_ilt,  OP_ile,
        OP_ieq,  OP_ine,  OP_flt,  OP_fle,   OP_feq,    OP_fne,   OP_and,    OP_or,   OP_not,
        OP_beq,  OP_bne,  OP_isel, OP_fsel,  OP_bsel,
    };
    for (size_t i = 0; i < sizeof in_line / sizeof *in_line; i++)
        if (in_line[i] == op)
            return 0;
    return 1;
}

/* About how many instructions a tile computes it by, its operands' among them. */
static int cost_of(const jit_node *n, const int *cost)
{
    int sum = n->op == JIT_READ ? COST_READ : is_call(n->op) ? COST_CALL : 1;
    if (n->level != JIT_TILE)
        return 0;
    for (int i = 0; i < n->n_args; i++)
        sum += cost[n->args[i]];
    return sum < COST_CALL ? sum : COST_CALL;
}

/* Marks what the nodes marked are made of. */
static void mark_operands(const jit_graph *g, uint8_t *marked)
{
    for (uint32_t i = g->n_nodes; i-- > 0;)
        for (int k = 0; marked[i] && k < g->nodes[i].n_args; k++)
            marked[g->nodes[i].args[k]] = 1;
}

static void mark_results(const jit_graph *g, uint8_t *marked)
{
    for (uint32_t k = 0; k < g->n_results; k++)
        marked[g->results[k]] = 1;
    if (g->mask != UINT32_MAX)
        marked[g->mask] = 1;
}

/* Those that tiles read: of what results need, the last ones that are along. */
static void find_read(const jit_graph *g, uint8_t *read)
{
    uint8_t wanted[JIT_MAX_NODES] = {0}, used[JIT_MAX_NODES] = {0};
    int cost[JIT_MAX_NODES];
    mark_results(g, wanted);
    memcpy(used, wanted, sizeof used);
    mark_operands(g, wanted);
    for (uint32_t i = 0; i < g->n_nodes; i++)
        for (int k = 0; wanted[i] && !g->nodes[i].is_along && k < g->nodes[i].n_args; k++)
            used[g->nodes[i].args[k]] = 1;
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        cost[i] = cost_of(&g->nodes[i], cost);
        read[i] = used[i] && g->nodes[i].is_along && cost[i] >= LEAST_COST;
    }
}

void jit_find_diagonals(jit_graph *g)
{
    uint8_t needed[JIT_MAX_NODES] = {0}, read[JIT_MAX_NODES] = {0};
    uint16_t n = 0;
    complete_along(g);
    find_read(g, read);
    memcpy(needed, read, sizeof needed);
    mark_operands(g, needed);
    for (uint32_t i = 0; i < g->n_nodes; i++)
        n = (uint16_t)(n + (needed[i] && has_cells(&g->nodes[i])));
    g->n_diagonals = n > MOST_DIAGONALS ? 0 : n;
    n = 0;
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        const int has = g->n_diagonals > 0 && needed[i] && has_cells(&g->nodes[i]);
        g->nodes[i].diagonal = has ? ++n : 0;
        g->nodes[i].is_diagonal = (uint8_t)(has && read[i]);
    }
}
