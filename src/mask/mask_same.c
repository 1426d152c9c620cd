/* Whether a block mask was made from the function that a plan has. Both are immutable, so nodes
 * are compared when the two first meet, and the plan's number is kept in the mask. */
#include "mask/mask_build.h"

#include <assert.h>
#include <string.h>

/* Equal nodes, operands and captures; places in the text do not count. */
static int same_function(const mod_fn *a, const mod_fn *b)
{
    if (a->n_nodes != b->n_nodes || a->n_args != b->n_args || a->n_captures != b->n_captures
        || a->result != b->result)
        return 0;
    for (uint32_t i = 0; i < a->n_nodes; i++) {
        const mod_node *x = &a->nodes[i], *y = &b->nodes[i];
        if (x->op != y->op || x->type != y->type || x->n_args != y->n_args
            || x->imm.i != y->imm.i || (x->n_args && x->args != y->args))
            return 0;
    }
    for (uint32_t i = 0; i < a->n_captures; i++)
        if (a->captures[i].dtype != b->captures[i].dtype
            || a->captures[i].rank != b->captures[i].rank
            || strcmp(a->captures[i].name, b->captures[i].name) != 0)
            return 0;
    return a->n_args == 0 || memcmp(a->args, b->args, a->n_args * sizeof *a->args) == 0;
}

int mask_is_of(const saccade_block_mask *mask, const mod_fn *fn, uint64_t number)
{
    saccade_block_mask *m = (saccade_block_mask *)mask; /* whom it met is not its meaning */
    assert(number != 0);
    for (int i = 0; i < MASK_MET; i++)
        if (atomic_load_explicit(&m->met[i], memory_order_relaxed) == number)
            return 1;
    if (!m->mod || !same_function(mod_function(m->mod), fn))
        return 0;
    const unsigned next = atomic_fetch_add_explicit(&m->n_met, 1, memory_order_relaxed);
    atomic_store_explicit(&m->met[next % MASK_MET], number, memory_order_relaxed);
    return 1;
}
