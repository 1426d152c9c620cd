/* Runs of a block mask: made for a block size when a kernel asks for it, kept in the mask with
 * their transpose, and the places for back ends' copies of them. */
#include "mask/mask_build.h"

#include "base/status.h"

#include <stdlib.h>

/* ---- making ---- */

/* An option's 0 is no limit, a source's is none to spend. */
static int64_t budget_of(int64_t option)
{
    return option == 0 ? -1 : option == SACCADE_EVALUATE_NONE ? 0 : option;
}

static mask_source source_of(const saccade_block_mask *m)
{
    return (mask_source){.prover = m->prover,
                         .prog = m->prog,
                         .env = m->view.env,
                         .B = m->B,
                         .H = m->H,
                         .Q = m->view.sizes.Q,
                         .KV = m->view.sizes.KV,
                         .q_offset = m->q_offset,
                         .kv_offset = m->kv_offset,
                         .budget = budget_of(m->options.evaluation_budget),
                         .threads = m->threads,
                         .progress = m->progress};
}

saccade_status mask_make_runs(const saccade_block_mask *m, int32_t block_q, int32_t block_kv,
                              mask_runs **out, saccade_error *err)
{
    if (!m->is_imported) {
        const mask_source source = source_of(m);
        return build_runs(&source, block_q, block_kv, out, err);
    }
    const mask_runs *own = mask_own_runs(m);
    FAIL_AT(own->block_q % block_q || own->block_kv % block_kv, SACCADE_EINVAL, "block_mask", 0,
            0, "got blocks of %d x %d, expected a divisor of the imported %d x %d", block_q,
            block_kv, own->block_q, own->block_kv);
    return runs_refine(own, block_q, block_kv, m->view.sizes.Q, m->view.sizes.KV, out, err);
}

/* ---- the cache ---- */

const mask_runs *mask_own_runs(const saccade_block_mask *mask)
{
    return mask->cache->runs;
}

static mask_cached *find_cached(const saccade_block_mask *mask, int32_t block_q,
                                int32_t block_kv)
{
    mask_cached *c = mask->cache;
    while (c && (c->runs->block_q != block_q || c->runs->block_kv != block_kv))
        c = c->next;
    return c;
}

static saccade_status cached_runs(saccade_block_mask *mask, int32_t block_q, int32_t block_kv,
                                  int transposed, const mask_runs **out, saccade_error *err)
{
    mask_cached *c = find_cached(mask, block_q, block_kv);
    if (!c) {
        mask_runs *runs;
        TRY(mask_make_runs(mask, block_q, block_kv, &runs, err));
        c = calloc(1, sizeof *c);
        if (!c)
            runs_destroy(runs);
        FAIL_IF_NULL(c);
        c->runs = runs;
        c->next = mask->cache->next;
        mask->cache->next = c;
    }
    if (transposed && !c->transposed)
        TRY(runs_transpose(c->runs, &c->transposed, err));
    *out = transposed ? c->transposed : c->runs;
    return SACCADE_OK;
}

saccade_status mask_runs_for(const saccade_block_mask *mask, int32_t block_q, int32_t block_kv,
                             int transposed, const mask_runs **out, saccade_error *err)
{
    saccade_block_mask *m = (saccade_block_mask *)mask; /* the cache is not its meaning */
    FAIL_AT(block_q < 1 || block_kv < 1, SACCADE_EINVAL, "block_mask", 0, 0,
            "got blocks of %d x %d, expected 1 or more", block_q, block_kv);
    pthread_mutex_lock(&m->lock);
    const saccade_status status = cached_runs(m, block_q, block_kv, transposed, out, err);
    pthread_mutex_unlock(&m->lock);
    return status;
}

const mask_runs *mask_runs_ready(const saccade_block_mask *mask, int32_t block_q,
                                 int32_t block_kv, int transposed)
{
    saccade_block_mask *m = (saccade_block_mask *)mask;
    pthread_mutex_lock(&m->lock);
    const mask_cached *c = find_cached(m, block_q, block_kv);
    const mask_runs *runs = !c ? NULL : transposed ? c->transposed : c->runs;
    pthread_mutex_unlock(&m->lock);
    return runs;
}

saccade_status mask_runs_prepared(const saccade_block_mask *mask, int32_t block_q,
                                  int32_t block_kv, int transposed, const mask_runs **out,
                                  saccade_error *err)
{
    *out = mask_runs_ready(mask, block_q, block_kv, transposed);
    FAIL_AT(!*out, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one not prepared for this plan, expected saccade_plan_prepare before the run");
    return SACCADE_OK;
}

mask_device_copy *mask_device_slot(const saccade_block_mask *mask, const void *key)
{
    saccade_block_mask *m = (saccade_block_mask *)mask;
    pthread_mutex_lock(&m->lock);
    mask_slot *slot = m->slots;
    while (slot && slot->key != key)
        slot = slot->next;
    if (!slot) {
        slot = calloc(1, sizeof *slot);
        if (slot) {
            slot->key = key;
            slot->next = m->slots;
            m->slots = slot;
        }
    }
    pthread_mutex_unlock(&m->lock);
    return slot ? &slot->copy : NULL;
}

/* ---- dropping ---- */

void mask_drop_cached(mask_cached *c)
{
    while (c) {
        mask_cached *next = c->next;
        runs_destroy(c->runs);
        runs_destroy(c->transposed);
        free(c);
        c = next;
    }
}

void mask_drop_slots(saccade_block_mask *mask)
{
    for (mask_slot *s = mask->slots; s; s = s->next)
        if (s->copy.data && s->copy.destroy) {
            s->copy.destroy(s->copy.data);
            s->copy.data = NULL;
        }
}

void mask_replace_runs(saccade_block_mask *mask, mask_runs *own)
{
    runs_destroy(mask->cache->runs);
    runs_destroy(mask->cache->transposed);
    mask_drop_cached(mask->cache->next);
    *mask->cache = (mask_cached){.runs = own};
    mask_drop_slots(mask);
}
