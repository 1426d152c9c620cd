/* Chains of and, or, not, window, update, export and import, over random masks and captures,
   against brute force. A chain knows what it stands for as a map of a world of positions that
   reaches past the masks' lengths on all sides; a window is a rectangle of that world. */
#include "mask/mask.h"
#include "support/mask_brute.h"
#include "support/random_mod.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MARGIN = 40, LENGTH = 70, WORLD = LENGTH + 2 * MARGIN, HEADS = 4, LEAVES = 3 };

static const int32_t block_sizes[][2] = {{16, 16}, {7, 13}, {1, 1}, {128, 5}, {32, 64}};

/* One mask and its truth; all of a chain's share the rectangle. */
typedef struct link {
    saccade_block_mask *mask;
    uint8_t world[HEADS][WORLD][WORLD];
} link;

typedef struct chain {
    uint64_t state;
    int64_t q0, Q, kv0, KV;
    int32_t block_q, block_kv;
    int has_import; /* from then on windows keep to the grid, PARTIAL is an upper bound */
    link links[LEAVES];
    random_mod mods[LEAVES];
} chain;

static const saccade_sizes first_sizes = {2, 2, 2, LENGTH, LENGTH - 9, 8, 8};

static saccade_sizes sizes_of(const chain *c)
{
    saccade_sizes s = first_sizes;
    s.Q = c->Q;
    s.KV = c->KV;
    return s;
}

/* What the mod says all over the world, under the sizes it was made for. */
static void fill_world(link *l, const random_mod *r)
{
    const mod_fn *fn = mod_function(r->mod);
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    eval_env env = {.tensors = tensors};
    double *values = malloc(fn->n_nodes * sizeof *values);
    assert_int_equal(eval_resolve(fn, r->bindings, r->n_bindings, 1, tensors, NULL), 0);
    eval_sizes(&first_sizes, env.size);
    for (int head = 0; head < HEADS; head++)
        for (int q = 0; q < WORLD; q++)
            for (int kv = 0; kv < WORLD; kv++) {
                const eval_point at = {head / 2, head % 2, q - MARGIN, kv - MARGIN, 0};
                l->world[head][q][kv] = eval_scalar(fn, &env, &at, values, NULL) != 0;
            }
    free(values);
}

static void open_leaf(chain *c, int i, uint64_t seed)
{
    const saccade_block_mask_options options = {.size = sizeof options,
                                                .block_q = c->block_q,
                                                .block_kv = c->block_kv};
    saccade_error err = {0};
    random_mod *r = &c->mods[i];
    random_mod_make(seed, SACCADE_MASK, 0, 3, &first_sizes, r);
    if (saccade_block_mask_create(NULL, r->mod, &first_sizes, NULL, r->bindings, r->n_bindings,
                                  &options, &c->links[i].mask, &err))
        fail_msg("%s: %s %s", r->text, err.where, err.message);
    fill_world(&c->links[i], r);
}

static void check(const chain *c, const link *l, const char *name)
{
    const saccade_sizes s = sizes_of(c);
    const size_t bytes = (size_t)(HEADS * c->Q * c->KV);
    uint8_t *want = malloc(bytes), *got = malloc(bytes), *to = want;
    for (int head = 0; head < HEADS; head++)
        for (int64_t q = 0; q < c->Q; q++, to += c->KV)
            memcpy(to, &l->world[head][MARGIN + c->q0 + q][MARGIN + c->kv0], (size_t)c->KV);
    if (!c->has_import)
        brute_compare(l->mask, &s, c->block_q, c->block_kv, want, name);
    assert_int_equal(saccade_block_mask_to_dense(l->mask, got, NULL), SACCADE_OK);
    if (memcmp(got, want, bytes) != 0)
        fail_msg("%s: dense bytes differ", name);
    free(want);
    free(got);
}

static void replace(link *l, saccade_block_mask *mask)
{
    saccade_block_mask_destroy(l->mask);
    l->mask = mask;
}

/* The limits of a mask's text (captures, nodes) may end a chain; nothing else may. */
static int joined(saccade_status status, const char *name)
{
    if (status != SACCADE_OK && status != SACCADE_ELIMIT)
        fail_msg("%s: status %d", name, status);
    return status == SACCADE_OK;
}

static void step_join(chain *c, int is_and, const char *name)
{
    link *to = &c->links[random_mod_below(&c->state, LEAVES)];
    const link *with = &c->links[random_mod_below(&c->state, LEAVES)];
    saccade_block_mask *out;
    saccade_error err = {0};
    if (!joined(is_and ? saccade_block_mask_and(to->mask, with->mask, &out, &err)
                       : saccade_block_mask_or(with->mask, to->mask, &out, &err),
                name))
        return;
    uint8_t *x = &to->world[0][0][0];
    const uint8_t *y = &with->world[0][0][0];
    for (size_t i = 0; i < sizeof to->world; i++)
        x[i] = is_and ? x[i] & y[i] : x[i] | y[i];
    replace(to, out);
}

static void step_not(chain *c, const char *name)
{
    link *l = &c->links[random_mod_below(&c->state, LEAVES)];
    saccade_block_mask *out;
    if (!joined(saccade_block_mask_not(l->mask, &out, NULL), name))
        return;
    for (size_t i = 0; i < sizeof l->world; i++)
        (&l->world[0][0][0])[i] ^= 1;
    replace(l, out);
}

/* Somewhere in the world; inside of the present window and on its grid after an import. */
static void random_cut(chain *c, int64_t at, int64_t n, int32_t block, int64_t *to,
                       int64_t *length)
{
    if (c->has_import) {
        const int64_t skip =
            block * (int64_t)random_mod_below(&c->state, (uint32_t)((n - 1) / block + 1));
        *to = at + skip;
        *length = 1 + random_mod_below(&c->state, (uint32_t)(n - skip));
        return;
    }
    *to = (int64_t)random_mod_below(&c->state, WORLD) - MARGIN;
    *length = 1 + random_mod_below(&c->state, (uint32_t)(WORLD - MARGIN - *to));
}

/* A rectangle cut out of what may itself be a window. */
static void step_window(chain *c, const char *name)
{
    int64_t q0, kv0, Q, KV;
    random_cut(c, c->q0, c->Q, c->block_q, &q0, &Q);
    random_cut(c, c->kv0, c->KV, c->block_kv, &kv0, &KV);
    for (int i = 0; i < LEAVES; i++) {
        saccade_block_mask *out;
        saccade_error err;
        if (saccade_block_mask_window(c->links[i].mask, q0 - c->q0, Q, kv0 - c->kv0, KV, &out,
                                      &err))
            fail_msg("%s: %s %s", name, err.where, err.message);
        replace(&c->links[i], out);
    }
    c->q0 = q0;
    c->Q = Q;
    c->kv0 = kv0;
    c->KV = KV;
}

static void step_update(chain *c, const char *name)
{
    link *l = &c->links[random_mod_below(&c->state, LEAVES)];
    if (saccade_block_mask_is_stale(l->mask)
        || saccade_block_mask_update(l->mask, NULL) != SACCADE_OK)
        fail_msg("%s: update", name);
}

static void export_to(const saccade_block_mask *mask, saccade_block_indices *x)
{
    memset(x, 0, sizeof *x);
    assert_int_equal(saccade_block_mask_export(mask, 0, x, NULL), SACCADE_OK);
    const size_t lines = (size_t)(x->B * x->H * x->rows), all = lines * (size_t)x->columns;
    x->kv_num_blocks = calloc(lines, sizeof(int32_t));
    x->kv_indices = calloc(all, sizeof(int32_t));
    x->full_kv_num_blocks = calloc(lines, sizeof(int32_t));
    x->full_kv_indices = calloc(all, sizeof(int32_t));
    assert_int_equal(saccade_block_mask_export(mask, 0, x, NULL), SACCADE_OK);
}

static void free_indices(saccade_block_indices *x)
{
    free(x->kv_num_blocks);
    free(x->kv_indices);
    free(x->full_kv_num_blocks);
    free(x->full_kv_indices);
}

/* There and back by index tensors, with the mod and captures that the mask has by now. */
static void step_import(chain *c, const char *name)
{
    link *l = &c->links[random_mod_below(&c->state, LEAVES)];
    const mask_view *view = mask_get_view(l->mask);
    const saccade_sizes s = sizes_of(c);
    saccade_binding bindings[MOD_MAX_CAPTURES];
    const int32_t n = saccade_mod_capture_count(view->mod);
    for (int32_t i = 0; i < n; i++)
        bindings[i] =
            (saccade_binding){saccade_mod_capture(view->mod, i).name, view->env.tensors[i]};
    const saccade_tensor q = saccade_tensor_of((void *)view->q_offset, SACCADE_I32, 1, &s.B);
    const saccade_tensor kv = saccade_tensor_of((void *)view->kv_offset, SACCADE_I32, 1, &s.B);
    const saccade_positions at = {.size = sizeof at,
                                  .q_offset = view->q_offset ? &q : NULL,
                                  .kv_offset = view->kv_offset ? &kv : NULL};
    saccade_block_indices x;
    saccade_block_mask *out;
    saccade_error err;
    export_to(l->mask, &x);
    if (saccade_block_mask_import(NULL, &x, view->mod, &s, &at, bindings, n, &out, &err))
        fail_msg("%s: %s %s", name, err.where, err.message);
    free_indices(&x);
    replace(l, out);
    c->has_import = 1;
}

/* One chain; half of the chains pass through index tensors. */
static void run_chain(uint64_t seed)
{
    static chain c;
    char name[64];
    memset(&c, 0, sizeof c);
    c.state = seed;
    c.Q = first_sizes.Q;
    c.KV = first_sizes.KV;
    const int32_t *block = block_sizes[seed % (sizeof block_sizes / sizeof *block_sizes)];
    c.block_q = block[0];
    c.block_kv = block[1];
    for (int i = 0; i < LEAVES; i++)
        open_leaf(&c, i, seed * LEAVES + (uint64_t)i);
    for (int step = 0; step < 6; step++) {
        snprintf(name, sizeof name, "seed %llu step %d", (unsigned long long)seed, step);
        const uint32_t what = random_mod_below(&c.state, seed % 2 ? 6 : 7);
        if (what < 2)
            step_join(&c, what == 0, name);
        else if (what == 2)
            step_not(&c, name);
        else if (what < 5)
            step_window(&c, name);
        else if (what == 5)
            step_update(&c, name);
        else
            step_import(&c, name);
        for (int i = 0; i < LEAVES; i++)
            check(&c, &c.links[i], name);
    }
    for (int i = 0; i < LEAVES; i++) {
        saccade_block_mask_destroy(c.links[i].mask);
        random_mod_free(&c.mods[i]);
    }
}

static void chains_are_exact(void **state)
{
    const char *n = getenv("SACCADE_TEST_CHAINS");
    const uint64_t chains = n ? strtoull(n, NULL, 10) : 24;
    (void)state;
    for (uint64_t seed = 1; seed <= chains; seed++)
        run_chain(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chains_are_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
