/* Whether a block mask is a run's: made from the function that the plan has, and for its sizes.
 * Functions are immutable, so nodes are compared when the two first meet, and the plan's number
 * is kept in the mask. */
#include "mask/mask_build.h"

#include "base/status.h"

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

/* ---- sizes ---- */

saccade_status mask_check_run(const saccade_block_mask *mask,
                              const int32_t size[MOD_SIZE_COUNT], saccade_error *err)
{
    static const char name[] = "block_mask";
    static const char *const names[MOD_SIZE_COUNT] = {
        [SIZE_B] = "B",   [SIZE_H] = "H", [SIZE_HKV] = "Hkv", [SIZE_Q] = "Q",
        [SIZE_KV] = "KV", [SIZE_D] = "D", [SIZE_DV] = "Dv",
    };
    const mask_reads reads = mask->view.reads;
    const int32_t *made = mask->view.env.size;
    FAIL_AT(reads.deps & DEP_B && made[SIZE_B] != size[SIZE_B], SACCADE_EINVAL, name, 0, 0,
            "got one proven for %d batch entries, whose text reads b, expected the run's %d",
            made[SIZE_B], size[SIZE_B]);
    FAIL_AT(reads.deps & DEP_H && made[SIZE_H] != size[SIZE_H], SACCADE_EINVAL, name, 0, 0,
            "got one proven for %d heads, whose text reads h, expected the run's %d",
            made[SIZE_H], size[SIZE_H]);
    for (int i = 0; reads.sizes && i < MOD_SIZE_COUNT; i++)
        FAIL_AT(reads.sizes >> i & 1 && made[i] != size[i], SACCADE_EINVAL, name, 0, 0,
                "got one proven for %s = %d, which its text reads, expected the run's %d",
                names[i], made[i], size[i]);
    return SACCADE_OK;
}
