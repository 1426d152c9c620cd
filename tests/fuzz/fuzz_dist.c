/* Attention over ranks under any mask in runs: five bytes choose lengths, ranks, chunk, block
   size; the rest is the text. Ranks are threads; what they make together must be one device's
   result, bit for bit. */
#include "saccade_dist.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 400, HEADER = 5, RANKS = 4, D = 8 };

typedef struct world {
    saccade_sizes sizes;
    saccade_problem problem;
    saccade_block_mask *mask;
    saccade_shard_plan *shards;
    saccade_ranks *ranks;
    float *out; /* [Q][D], of all ranks */
} world;

typedef struct one_rank {
    world *w;
    int32_t rank;
} one_rank;

static float q_data[MOST * D], k_data[MOST * D], v_data[MOST * D];

static void check(saccade_status status, const saccade_error *err)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "fuzz_dist: %s: %s\n", err->where, err->message);
    abort();
}

static void *workspace(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static saccade_tensor rows_of(float *data, int64_t n)
{
    return saccade_tensor_of(data, SACCADE_F32, 4, (int64_t[]){1, 1, n, D});
}

/* The ranges' rows of `whole`, or back to it. */
static int64_t move_rows(float *whole, float *own, const saccade_range *at, int32_t n, int back)
{
    int64_t rows = 0;
    for (int32_t i = 0; i < n; rows += at[i++].count) {
        float *a = whole + at[i].first * D, *b = own + rows * D;
        memcpy(back ? a : b, back ? b : a, (size_t)(at[i].count * D) * sizeof(float));
    }
    return rows;
}

static void *rank_thread(void *arg)
{
    const one_rank *me = arg;
    const world *w = me->w;
    float q[MOST * D], k[MOST * D], v[MOST * D], o[MOST * D];
    const saccade_range *at;
    saccade_error err = {0};
    saccade_transport t;
    saccade_dist *dist = NULL;
    saccade_forward_args a;
    saccade_transport_init(&t);
    check(saccade_ranks_transport(w->ranks, me->rank, &t, &err), &err);
    check(saccade_dist_create(NULL, &w->problem, w->shards, 0, &t, &dist, &err), &err);
    int32_t n = saccade_shard_keys(w->shards, me->rank, &at);
    const int64_t keys = move_rows(k_data, k, at, n, 0);
    move_rows(v_data, v, at, n, 0);
    n = saccade_shard_rows(w->shards, me->rank, &at);
    const int64_t rows = move_rows(q_data, q, at, n, 0);
    const saccade_tensor qt = rows_of(q, rows), kt = rows_of(k, keys), vt = rows_of(v, keys);
    const saccade_tensor ot = rows_of(o, rows);
    saccade_forward_args_init(&a);
    a.q = &qt;
    a.k = &kt;
    a.v = &vt;
    a.out = &ot;
    a.block_mask = w->mask;
    a.workspace_bytes = saccade_dist_workspace(dist, 1);
    a.workspace = workspace(a.workspace_bytes);
    check(saccade_dist_prepare(dist, w->mask, &err), &err);
    check(saccade_dist_forward(dist, &a, &err), &err);
    move_rows(w->out, o, at, n, 1);
    free(a.workspace);
    saccade_dist_destroy(dist);
    return NULL;
}

static void all_ranks(world *w, int32_t n)
{
    pthread_t thread[RANKS];
    one_rank rank[RANKS];
    saccade_error err = {0};
    check(saccade_ranks_create(n, &w->ranks, &err), &err);
    for (int32_t i = 0; i < n; i++) {
        rank[i] = (one_rank){w, i};
        if (pthread_create(&thread[i], NULL, rank_thread, &rank[i]))
            abort();
    }
    for (int32_t i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    saccade_ranks_destroy(w->ranks);
}

static void compare(world *w, int32_t n, int64_t chunk_tiles)
{
    static float out[MOST * D], out_all[MOST * D];
    const saccade_block_mask *masks[] = {w->mask};
    const size_t bytes = (size_t)(w->sizes.Q * D) * sizeof(float);
    const saccade_tensor q = rows_of(q_data, w->sizes.Q), k = rows_of(k_data, w->sizes.KV);
    const saccade_tensor v = rows_of(v_data, w->sizes.KV), o = rows_of(out, w->sizes.Q);
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_shard_options options;
    saccade_forward_args a;
    check(saccade_plan_create(NULL, &w->problem, &plan, &err), &err);
    check(saccade_plan_prepare(plan, w->mask, &err), &err);
    saccade_forward_args_init(&a);
    a.q = &q;
    a.k = &k;
    a.v = &v;
    a.out = &o;
    a.block_mask = w->mask;
    a.workspace_bytes = saccade_plan_workspace(plan, &w->sizes);
    a.workspace = workspace(a.workspace_bytes);
    check(saccade_forward(plan, &a, &err), &err);
    saccade_shard_options_init(&options);
    options.ranks = n;
    options.tile = (int32_t)saccade_plan_row_tile(plan, &w->sizes);
    options.chunk = chunk_tiles * options.tile;
    options.masks = masks;
    options.n_masks = 1;
    check(saccade_shard_plan_create(&options, &w->shards, &err), &err);
    w->out = out_all;
    memset(out_all, 0x55, bytes);
    all_ranks(w, n);
    if (memcmp(out, out_all, bytes)) {
        fprintf(stderr, "fuzz_dist: %d ranks differ from one device\n", n);
        abort();
    }
    saccade_shard_plan_destroy(w->shards);
    saccade_plan_destroy(plan);
    free(a.workspace);
}

static void fill(void)
{
    uint32_t x = 1;
    for (int i = 0; i < 3 * MOST * D && q_data[0] == 0; i++) {
        x = x * 1664525u + 1013904223u;
        float *data = i % 3 == 0 ? q_data : i % 3 == 1 ? k_data : v_data;
        data[MOST * D - 1 - i / 3] = (float)(int32_t)x * 0x1p-30f;
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    world w = {0};
    saccade_mod *generic = NULL, *mod = NULL;
    saccade_block_mask_options o;
    if (size < HEADER || size > 200)
        return 0;
    fill();
    w.sizes = (saccade_sizes){1, 1, 1, 1 + data[0] * 3 % MOST, 1 + data[1] * 3 % MOST, D, D};
    saccade_block_mask_options_init(&o);
    o.block_q = o.block_kv = 1 + data[4] % 64;
    if (saccade_mod_parse(SACCADE_MASK, (const char *)data + HEADER, size - HEADER, &generic,
                          NULL)
        != SACCADE_OK)
        return 0;
    if (saccade_mod_bind(generic, NULL, 0, &mod, NULL) == SACCADE_OK)
        (void)saccade_block_mask_create(NULL, mod, &w.sizes, NULL, NULL, 0, &o, &w.mask, NULL);
    saccade_problem_init(&w.problem);
    w.problem.sizes.D = w.problem.sizes.Dv = D;
    w.problem.mask = mod;
    if (w.mask)
        compare(&w, 1 + data[2] % RANKS, data[3] % 3);
    saccade_block_mask_destroy(w.mask);
    saccade_mod_destroy(mod);
    saccade_mod_destroy(generic);
    return 0;
}
