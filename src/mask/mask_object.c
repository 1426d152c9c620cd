/* The block mask as an object: what it is made of, its cache of runs per block size, the state
 * of its captures, and the places for back ends' device copies. */
#include "mask/mask_build.h"

#include "base/clock.h"
#include "base/context.h"
#include "base/hash.h"
#include "base/record.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_BLOCK = 128 };
static const int64_t LENGTH_MAX = (int64_t)1 << 30;

/* ---- content of captures ---- */

static void hash_element(hash128 *hash, const saccade_tensor *t, int64_t off)
{
    const size_t bytes = saccade_dtype_bytes(t->dtype);
    hash_add(hash, (const char *)t->data + off * (int64_t)bytes, bytes);
}

/* Elements below dimension d, in the order of their indices. */
static void hash_dimension(hash128 *hash, const saccade_tensor *t, int d, int64_t off)
{
    if (d == t->rank) {
        hash_element(hash, t, off);
    } else if (d == t->rank - 1 && t->stride[d] == 1) {
        const size_t bytes = saccade_dtype_bytes(t->dtype);
        hash_add(hash, (const char *)t->data + off * (int64_t)bytes,
                 (size_t)t->shape[d] * bytes);
    } else {
        const int64_t n = t->stride[d] ? t->shape[d] : 1;
        for (int64_t i = 0; i < n; i++)
            hash_dimension(hash, t, d + 1, off + i * t->stride[d]);
    }
}

static uint64_t hash_captures(const saccade_block_mask *mask)
{
    const mod_fn *fn = mask->mod ? mod_function(mask->mod) : NULL;
    hash128 hash;
    hash_init(&hash);
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        hash_dimension(&hash, &mask->tensors[i], 0, 0);
    return hash.a ^ hash.b;
}

/* ---- making ---- */

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

static saccade_status copy_offset(const int32_t *from, int64_t B, int64_t length,
                                  const char *name, int32_t **out, saccade_error *err)
{
    *out = NULL;
    for (int64_t b = 0; from && b < B; b++)
        FAIL_AT(from[b] < -LENGTH_MAX || from[b] + length - 1 > INT32_MAX, SACCADE_EINVAL, name,
                0, 0, "got %d for batch %lld, expected positions within 32 bits", from[b],
                (long long)b);
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

static saccade_status make_runs(const saccade_block_mask *m, int32_t block_q, int32_t block_kv,
                                mask_runs **out, saccade_error *err)
{
    if (!m->is_imported) {
        const mask_source source = source_of(m);
        return build_runs(&source, block_q, block_kv, out, err);
    }
    const mask_runs *own = mask_own_runs(m);
    FAIL_IF(own->block_q % block_q || own->block_kv % block_kv, SACCADE_EINVAL,
            "block_mask: got blocks of %d x %d, expected a divisor of the imported %d x %d",
            block_q, block_kv, own->block_q, own->block_kv);
    return runs_refine(own, block_q, block_kv, m->view.sizes.Q, m->view.sizes.KV, out, err);
}

static saccade_status add_own_runs(saccade_block_mask *m, mask_runs *imported,
                                   saccade_error *err)
{
    mask_cached *first = calloc(1, sizeof *first);
    FAIL_IF_NULL(first);
    m->cache = first;
    if (!imported)
        return make_runs(m, m->options.block_q, m->options.block_kv, &first->runs, err);
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
    set_stored(m, recipe);
    m->content = hash_captures(m);
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
                         .threads = mask->threads};
}

static void drop_cached(mask_cached *c)
{
    while (c) {
        mask_cached *next = c->next;
        runs_destroy(c->runs);
        runs_destroy(c->transposed);
        free(c);
        c = next;
    }
}

/* Drops device copies. */
static void drop_slots(saccade_block_mask *mask)
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
    drop_cached(mask->cache->next);
    *mask->cache = (mask_cached){.runs = own};
    drop_slots(mask);
}

void saccade_block_mask_destroy(saccade_block_mask *mask)
{
    if (!mask)
        return;
    drop_slots(mask);
    while (mask->slots) {
        mask_slot *next = mask->slots->next;
        free(mask->slots);
        mask->slots = next;
    }
    drop_cached(mask->cache);
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

/* ---- arguments ---- */

saccade_status mask_check_sizes(const saccade_sizes *s, saccade_error *err)
{
    FAIL_AT(!s, SACCADE_EINVAL, "sizes", 0, 0, "got NULL");
    FAIL_AT(s->B < 1 || s->B > LENGTH_MAX, SACCADE_EINVAL, "sizes.B", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->B);
    FAIL_AT(s->H < 1 || s->H > LENGTH_MAX, SACCADE_EINVAL, "sizes.H", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->H);
    FAIL_AT(s->Q < 1 || s->Q > LENGTH_MAX, SACCADE_EINVAL, "sizes.Q", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->Q);
    FAIL_AT(s->KV < 1 || s->KV > LENGTH_MAX, SACCADE_EINVAL, "sizes.KV", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->KV);
    return SACCADE_OK;
}

/* Offsets of one axis, whose positions stay within 32 bits; t may be NULL. */
static saccade_status read_offset(const saccade_tensor *t, const char *name, int64_t B,
                                  int64_t length, int32_t **out, saccade_error *err)
{
    if (!t)
        return SACCADE_OK;
    FAIL_AT(t->dtype != SACCADE_I32 || t->rank < 0 || t->rank > 1, SACCADE_EINVAL, name, 0, 0,
            "got %s of rank %d, expected i32 of rank 0 or 1", saccade_dtype_name(t->dtype),
            t->rank);
    FAIL_AT(t->device.kind != SACCADE_CPU || !t->data, SACCADE_EINVAL, name, 0, 0,
            "got no data on the CPU, where block masks are made");
    FAIL_AT(t->rank == 1 && t->shape[0] != B, SACCADE_EINVAL, name, 0, 0,
            "got shape [%lld], expected [%lld]", (long long)t->shape[0], (long long)B);
    int32_t *offset = malloc((size_t)B * sizeof *offset);
    int any = 0;
    FAIL_IF_NULL(offset);
    *out = offset;
    for (int64_t b = 0; b < B; b++) {
        offset[b] = ((const int32_t *)t->data)[t->rank ? b * t->stride[0] : 0];
        any |= offset[b] != 0;
        FAIL_AT(offset[b] < -LENGTH_MAX || offset[b] + length - 1 > INT32_MAX, SACCADE_EINVAL,
                name, 0, 0, "got %d for batch %lld, expected positions within 32 bits",
                offset[b], (long long)b);
    }
    if (!any) {
        free(offset);
        *out = NULL;
    }
    return SACCADE_OK;
}

void mask_free_offsets(mask_offsets *offsets)
{
    free(offsets->q);
    free(offsets->kv);
}

saccade_status mask_read_offsets(const saccade_positions *positions, const saccade_sizes *s,
                                 mask_offsets *out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_positions p;
    *out = (mask_offsets){NULL, NULL};
    saccade_positions_init(&p);
    if (positions)
        TRY(RECORD_READ(&p, positions, "positions"));
    TRY_GOTO(read_offset(p.q_offset, "q_offset", s->B, s->Q, &out->q, err));
    TRY_GOTO(read_offset(p.kv_offset, "kv_offset", s->B, s->KV, &out->kv, err));
out:
    if (status != SACCADE_OK)
        mask_free_offsets(out);
    return status;
}

static saccade_status read_options(const saccade_block_mask_options *given, mask_recipe *out,
                                   saccade_error *err)
{
    saccade_block_mask_options o;
    saccade_block_mask_options_init(&o);
    if (given)
        TRY(RECORD_READ(&o, given, "block mask options"));
    FAIL_AT(o.block_q < 0 || o.block_kv < 0 || o.block_q > LENGTH_MAX
                || o.block_kv > LENGTH_MAX,
            SACCADE_EINVAL, "block", 0, 0, "got %d x %d, expected 1 to 2^30, or 0 for %d",
            o.block_q, o.block_kv, DEFAULT_BLOCK);
    FAIL_AT(o.evaluation_budget < SACCADE_EVALUATE_NONE, SACCADE_EINVAL, "evaluation_budget", 0,
            0, "got %lld, expected positions, 0 for any number or SACCADE_EVALUATE_NONE",
            (long long)o.evaluation_budget);
    out->options = (mask_options){.block_q = o.block_q ? o.block_q : DEFAULT_BLOCK,
                                  .block_kv = o.block_kv ? o.block_kv : DEFAULT_BLOCK,
                                  .evaluation_budget = o.evaluation_budget};
    out->progress = (mask_progress){o.progress, o.progress_user};
    return SACCADE_OK;
}

saccade_status saccade_block_mask_create(saccade_context *context, const saccade_mod *mask,
                                         const saccade_sizes *sizes,
                                         const saccade_positions *positions,
                                         const saccade_binding *bindings, int32_t n_bindings,
                                         const saccade_block_mask_options *options,
                                         saccade_block_mask **out, saccade_error *err)
{
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    mask_offsets offsets;
    FAIL_IF(!out, SACCADE_EINVAL, "block_mask: got NULL for the result");
    FAIL_IF(!mask || !mod_function(mask), SACCADE_EINVAL,
            "block_mask: got %s, expected a bound mask", mask ? "a mod not bound" : "NULL");
    FAIL_IF(saccade_mod_kind(mask) != SACCADE_MASK, SACCADE_EINVAL,
            "block_mask: got a score, expected a mask");
    mask_recipe r = {
        .mod = mask, .tensors = tensors, .threads = context ? context->threads : 0};
    TRY(mask_check_sizes(sizes, err));
    r.sizes = *sizes;
    TRY(read_options(options, &r, err));
    TRY(eval_resolve(mod_function(mask), bindings, n_bindings, 1, tensors, err));
    TRY(mask_read_offsets(positions, sizes, &offsets, err));
    r.q_offset = offsets.q;
    r.kv_offset = offsets.kv;
    const saccade_status status = mask_make(&r, out, err);
    mask_free_offsets(&offsets);
    return status;
}

/* ---- runs for block sizes ---- */

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
        TRY(make_runs(mask, block_q, block_kv, &runs, err));
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
    FAIL_IF(block_q < 1 || block_kv < 1, SACCADE_EINVAL,
            "block_mask: got blocks of %d x %d, expected 1 or more", block_q, block_kv);
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

const mask_view *mask_get_view(const saccade_block_mask *mask)
{
    return &mask->view;
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
    FAIL_IF(!mask, SACCADE_EINVAL, "block_mask: got NULL");
    if (!mask->mod)
        return SACCADE_OK; /* nothing it was proven from */
    TRY(check_captures(mask, err));
    TRY(pass_prover_create(mask->fn, &mask->view.env, &prover, err));
    old = mask->prover;
    mask->prover = prover;
    if (!mask->is_imported) {
        const saccade_status status =
            make_runs(mask, mask->options.block_q, mask->options.block_kv, &runs, err);
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
    drop_cached(mask->cache->next);
    mask->cache->next = NULL;
    drop_slots(mask);
    mask_keep_scalars(mask);
    mask->content = hash_captures(mask);
    mask->seconds = (double)(clock_ns() - start) * 1e-9;
    return SACCADE_OK;
}

int saccade_block_mask_is_stale(const saccade_block_mask *mask)
{
    return mask && hash_captures(mask) != mask->content;
}

/* ---- looking ---- */

const saccade_mod *saccade_block_mask_mod(const saccade_block_mask *mask)
{
    return mask ? mask->mod : NULL;
}

saccade_status saccade_block_mask_get_stats(const saccade_block_mask *mask,
                                            saccade_block_mask_stats *stats, saccade_error *err)
{
    FAIL_IF(!mask, SACCADE_EINVAL, "block_mask: got NULL");
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
