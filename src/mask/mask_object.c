/* The block mask as an object: what it is made of, made again when captures change, and what
 * callers may ask of it. */
#include "mask/mask_build.h"

#include "base/clock.h"
#include "base/record.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- making ---- */

static uint64_t next_number(void)
{
    static _Atomic uint64_t n_made;
    return atomic_fetch_add(&n_made, 1) + 1;
}

static int varies(const int32_t *offset, int64_t B)
{
    for (int64_t b = 1; offset && b < B; b++)
        if (offset[b] != offset[0])
            return 1;
    return 0;
}

/* B and H are stored only where the mask depends on them. */
static void set_stored(saccade_block_mask *m, const mask_recipe *r)
{
    if (r->imported) {
        m->B = r->imported->B;
        m->H = r->imported->H;
        return;
    }
    const int deps = m->fn->nodes[m->fn->result].deps;
    const int by_b = (deps & DEP_B) != 0 || ((deps & DEP_Q) && varies(r->q_offset, r->sizes.B))
                     || ((deps & DEP_KV) && varies(r->kv_offset, r->sizes.B));
    m->B = by_b ? r->sizes.B : 1;
    m->H = deps & DEP_H ? r->sizes.H : 1;
}

mask_reads mask_reads_of(const mod_fn *fn)
{
    mask_reads r = {.deps = fn->nodes[fn->result].deps & (DEP_B | DEP_H)};
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (fn->nodes[i].op == OP_SIZE)
            r.sizes |= (uint8_t)(1 << fn->nodes[i].imm.i);
    return r;
}

static saccade_status copy_offset(const int32_t *from, int64_t B, int64_t length,
                                  const char *name, int32_t **out, saccade_error *err)
{
    *out = NULL;
    for (int64_t b = 0; from && b < B; b++)
        FAIL_AT(from[b] < -MASK_LENGTH_MAX || from[b] + length - 1 > INT32_MAX, SACCADE_EINVAL,
                name, 0, 0,
                "got %d for batch %lld, expected -2^30 or more and positions within 32 bits",
                from[b], (long long)b);
    if (!from)
        return SACCADE_OK;
    *out = malloc((size_t)B * sizeof **out);
    FAIL_IF_NULL(*out);
    memcpy(*out, from, (size_t)B * sizeof **out);
    return SACCADE_OK;
}

static saccade_status copy_recipe(saccade_block_mask *m, const mask_recipe *r,
                                  saccade_error *err)
{
    m->options = r->options;
    m->threads = r->threads;
    m->progress = r->progress;
    m->view.sizes = r->sizes;
    eval_sizes(&r->sizes, m->view.env.size);
    TRY(copy_offset(r->q_offset, r->sizes.B, r->sizes.Q, "q_offset", &m->q_offset, err));
    TRY(copy_offset(r->kv_offset, r->sizes.B, r->sizes.KV, "kv_offset", &m->kv_offset, err));
    m->view.q_offset = m->q_offset;
    m->view.kv_offset = m->kv_offset;
    if (!r->mod)
        return SACCADE_OK;
    const mod_fn *fn = mod_function(r->mod);
    TRY(mod_from_function(fn, &m->mod, err));
    m->view.mod = m->mod;
    m->tensors = calloc((size_t)fn->n_captures + 1, sizeof *m->tensors);
    m->scalars = calloc((size_t)fn->n_captures + 1, sizeof *m->scalars);
    FAIL_IF_NULL(m->tensors);
    FAIL_IF_NULL(m->scalars);
    if (fn->n_captures)
        memcpy(m->tensors, r->tensors, fn->n_captures * sizeof *m->tensors);
    mask_keep_scalars(m);
    m->view.env.tensors = m->tensors;
    TRY(pass_simplify(mod_function(m->mod), &m->arena, &m->fn, err));
    TRY(eval_compile(m->fn, &m->arena, &m->prog, err));
    return pass_prover_create(m->fn, &m->view.env, &m->prover, err);
}

static saccade_status add_own_runs(saccade_block_mask *m, mask_runs *imported,
                                   saccade_error *err)
{
    mask_cached *first = calloc(1, sizeof *first);
    FAIL_IF_NULL(first);
    m->cache = first;
    if (!imported)
        return mask_make_runs(m, m->options.block_q, m->options.block_kv, &first->runs, err);
    first->runs = imported;
    m->is_imported = 1;
    m->options.block_q = m->view.imported_block_q = imported->block_q;
    m->options.block_kv = m->view.imported_block_kv = imported->block_kv;
    return SACCADE_OK;
}

saccade_status mask_make(const mask_recipe *recipe, saccade_block_mask **out,
                         saccade_error *err)
{
    const int64_t start = clock_ns();
    saccade_status status = SACCADE_OK;
    saccade_block_mask *m = calloc(1, sizeof *m);
    FAIL_IF_NULL(m);
    arena_init(&m->arena);
    pthread_mutex_init(&m->lock, NULL);
    TRY_GOTO(copy_recipe(m, recipe, err));
    m->view.reads = recipe->imported ? recipe->reads : mask_reads_of(m->fn);
    m->view.number = next_number();
    set_stored(m, recipe);
    m->content = mask_hash_captures(m);
    TRY_GOTO(add_own_runs(m, recipe->imported, err));
    m->progress = (mask_progress){0}; /* whose user may be gone later */
    m->seconds = (double)(clock_ns() - start) * 1e-9;
    *out = m;
out:
    if (status != SACCADE_OK) {
        if (m->cache && m->is_imported)
            m->cache->runs = NULL; /* still the caller's */
        saccade_block_mask_destroy(m);
    }
    return status;
}

mask_recipe mask_recipe_of(const saccade_block_mask *mask)
{
    return (mask_recipe){.mod = mask->mod,
                         .sizes = mask->view.sizes,
                         .tensors = mask->tensors,
                         .q_offset = mask->q_offset,
                         .kv_offset = mask->kv_offset,
                         .options = mask->options,
                         .threads = mask->threads,
                         .reads = mask->view.reads};
}

void saccade_block_mask_destroy(saccade_block_mask *mask)
{
    if (!mask)
        return;
    mask_drop_slots(mask);
    while (mask->slots) {
        mask_slot *next = mask->slots->next;
        free(mask->slots);
        mask->slots = next;
    }
    mask_drop_cached(mask->cache);
    pass_prover_destroy(mask->prover);
    saccade_mod_destroy(mask->mod);
    arena_free(&mask->arena);
    free(mask->tensors);
    free(mask->scalars);
    free(mask->q_offset);
    free(mask->kv_offset);
    pthread_mutex_destroy(&mask->lock);
    free(mask);
}

/* ---- captures that change ---- */

/* Checks the captures' present values (integers of 64 bits may have left int32). */
static saccade_status check_captures(const saccade_block_mask *mask, saccade_error *err)
{
    const mod_fn *fn = mod_function(mask->mod);
    saccade_binding bindings[MOD_MAX_CAPTURES];
    saccade_tensor same[MOD_MAX_CAPTURES];
    for (uint32_t i = 0; i < fn->n_captures; i++)
        bindings[i] = (saccade_binding){fn->captures[i].name, mask->tensors[i]};
    return eval_resolve(fn, bindings, (int32_t)fn->n_captures, 1, same, err);
}

saccade_status saccade_block_mask_update(saccade_block_mask *mask, saccade_error *err)
{
    const int64_t start = clock_ns();
    pass_prover *prover, *old;
    mask_runs *runs = NULL;
    FAIL_AT(!mask, SACCADE_EINVAL, "block_mask", 0, 0, "got NULL, expected one");
    if (!mask->mod)
        return SACCADE_OK; /* nothing it was proven from */
    TRY(check_captures(mask, err));
    TRY(pass_prover_create(mask->fn, &mask->view.env, &prover, err));
    old = mask->prover;
    mask->prover = prover;
    if (!mask->is_imported) {
        const saccade_status status =
            mask_make_runs(mask, mask->options.block_q, mask->options.block_kv, &runs, err);
        if (status != SACCADE_OK) {
            mask->prover = old;
            pass_prover_destroy(prover);
            return status;
        }
        runs_destroy(mask->cache->runs);
        runs_destroy(mask->cache->transposed);
        mask->cache->runs = runs;
        mask->cache->transposed = NULL;
    }
    pass_prover_destroy(old);
    mask_drop_cached(mask->cache->next);
    mask->cache->next = NULL;
    mask_drop_slots(mask);
    mask_keep_scalars(mask);
    mask->view.number = next_number();
    mask->content = mask_hash_captures(mask);
    mask->seconds = (double)(clock_ns() - start) * 1e-9;
    return SACCADE_OK;
}

int saccade_block_mask_is_stale(const saccade_block_mask *mask)
{
    return mask && mask_hash_captures(mask) != mask->content;
}

/* ---- looking ---- */

const mask_view *mask_get_view(const saccade_block_mask *mask)
{
    return &mask->view;
}

const saccade_mod *saccade_block_mask_mod(const saccade_block_mask *mask)
{
    return mask ? mask->mod : NULL;
}

saccade_status saccade_block_mask_get_stats(const saccade_block_mask *mask,
                                            saccade_block_mask_stats *stats, saccade_error *err)
{
    FAIL_AT(!mask, SACCADE_EINVAL, "block_mask", 0, 0, "got NULL, expected one");
    TRY(record_check_size(stats, "statistics", err));
    saccade_block_mask_stats own = mask_own_runs(mask)->stats;
    own.seconds = mask->seconds;
    record_write(stats, &own, sizeof own);
    return SACCADE_OK;
}

int64_t saccade_block_mask_row(const saccade_block_mask *mask, int64_t b, int64_t h,
                               int64_t row, int transposed, const saccade_run **runs)
{
    const mask_runs *all;
    if (!runs)
        return -1;
    *runs = NULL;
    if (!mask || b < 0 || h < 0 || b >= mask->view.sizes.B || h >= mask->view.sizes.H
        || mask_runs_for(mask, mask->options.block_q, mask->options.block_kv, transposed, &all,
                         NULL)
               != SACCADE_OK
        || row < 0 || row >= all->rows)
        return -1;
    return runs_row(all, b, h, row, runs);
}
