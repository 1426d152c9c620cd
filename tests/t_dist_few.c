/* More ranks than tiles of rows: those that hold nothing call all the same, whatever form the
 * sinks have, and with windows of staged mode that are larger than the sequence. */
#include "saccade_dist.h"
#include "support/rank_threads.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3, B = 2, H = 2, N = 5, D = 8, ALL = B * H * N * D, GATHERED = -1 };

typedef struct few_case {
    int64_t sinks[3]; /* shape; rank 1 where the second is 0 */
    int64_t window;
} few_case;

typedef struct few {
    const few_case *c;
    saccade_problem problem;
    saccade_shard_plan *shards;
    saccade_ranks *ranks;
    saccade_tensor q, k, v, out, sinks;
    float data[3 * ALL], sink[B * H * N], one[ALL], made[ALL];
} few;

typedef struct one_rank {
    few *w;
    int32_t rank;
    size_t workspace;
    saccade_status status;
    saccade_error err;
} one_rank;

static const int64_t shape[4] = {B, H, N, D};

static void *room(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void *rank_thread(void *arg)
{
    one_rank *me = arg;
    few *w = me->w;
    const saccade_range *at;
    const int has_rows = saccade_shard_rows(w->shards, me->rank, &at) > 0;
    const int is_own = w->c->sinks[2] > 1; /* a sink of each row */
    saccade_transport t;
    saccade_dist *dist = NULL;
    saccade_forward_args a;
    saccade_transport_init(&t);
    assert_int_equal(saccade_ranks_transport(w->ranks, me->rank, &t, NULL), SACCADE_OK);
    me->status = w->c->window == GATHERED
                     ? saccade_dist_create(NULL, &w->problem, w->shards, 0, &t, &dist, &me->err)
                     : saccade_dist_create_staged(NULL, &w->problem, w->shards, 0, w->c->window,
                                                  &t, &dist, &me->err);
    if (me->status != SACCADE_OK)
        return NULL;
    saccade_forward_args_init(&a);
    a.q = has_rows ? &w->q : NULL;
    a.k = has_rows ? &w->k : NULL;
    a.v = has_rows ? &w->v : NULL;
    a.out = has_rows ? &w->out : NULL;
    a.sinks = has_rows || !is_own ? &w->sinks : NULL;
    a.workspace_bytes = me->workspace = saccade_dist_workspace(dist, B);
    a.workspace = me->workspace < 1 << 24 ? room(me->workspace) : NULL;
    me->status = saccade_dist_forward(dist, &a, &me->err);
    free(a.workspace);
    saccade_dist_destroy(dist);
    return NULL;
}

static int64_t one_device(few *w)
{
    const saccade_sizes sizes = {B, H, H, N, N, D, D};
    saccade_plan *plan = NULL;
    saccade_forward_args a;
    assert_int_equal(saccade_plan_create(NULL, &w->problem, &plan, NULL), SACCADE_OK);
    w->out.data = w->one;
    saccade_forward_args_init(&a);
    a.q = &w->q;
    a.k = &w->k;
    a.v = &w->v;
    a.out = &w->out;
    a.sinks = &w->sinks;
    a.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    a.workspace = room(a.workspace_bytes);
    assert_int_equal(saccade_forward(plan, &a, NULL), SACCADE_OK);
    const int64_t tile = saccade_plan_row_tile(plan, &sizes);
    free(a.workspace);
    saccade_plan_destroy(plan);
    w->out.data = w->made;
    return tile;
}

static void begin(const few_case *c, few *w)
{
    memset(w, 0, sizeof *w);
    w->c = c;
    for (int i = 0; i < 3 * ALL; i++)
        w->data[i] = (float)(i * 37 % 101) * 0.02f - 1;
    for (int i = 0; i < B * H * N; i++)
        w->sink[i] = (float)(i % 7) * 0.3f - 1;
    w->q = saccade_tensor_of(w->data, SACCADE_F32, 4, shape);
    w->k = saccade_tensor_of(w->data + ALL, SACCADE_F32, 4, shape);
    w->v = saccade_tensor_of(w->data + 2 * ALL, SACCADE_F32, 4, shape);
    w->out = saccade_tensor_of(w->made, SACCADE_F32, 4, shape);
    w->sinks = saccade_tensor_of(w->sink, SACCADE_F32, c->sinks[1] ? 3 : 1, c->sinks);
    saccade_problem_init(&w->problem);
    w->problem.sizes = (saccade_sizes){.H = H, .Hkv = H, .D = D, .Dv = D};
    w->problem.sinks_dtype = SACCADE_F32;
}

static void check(const few_case *c)
{
    few w;
    one_rank rank[RANKS];
    saccade_shard_options o;
    begin(c, &w);
    saccade_shard_options_init(&o);
    o.ranks = RANKS;
    o.tile = (int32_t)one_device(&w);
    o.Q = o.KV = N;
    assert_int_equal(saccade_shard_plan_create(&o, &w.shards, NULL), SACCADE_OK);
    assert_int_equal(saccade_ranks_create(RANKS, &w.ranks, NULL), SACCADE_OK);
    for (int32_t i = 0; i < RANKS; i++)
        rank[i] = (one_rank){.w = &w, .rank = i};
    rank_threads_run(RANKS, rank_thread, rank, sizeof *rank);
    for (int32_t i = 0; i < RANKS; i++) {
        assert_true(rank[i].workspace < (size_t)sysconf(_SC_NPROCESSORS_ONLN) << 20);
        if (rank[i].status != SACCADE_OK)
            fail_msg("rank %d: %s: %s", i, rank[i].err.where, rank[i].err.message);
    }
    for (int i = 0; i < ALL; i++)
        assert_true(c->window == GATHERED ? w.made[i] == w.one[i]
                                          : fabsf(w.made[i] - w.one[i]) < 1e-6f);
    saccade_ranks_destroy(w.ranks);
    saccade_shard_plan_destroy(w.shards);
}

static void ranks_that_hold_nothing(void **state)
{
    static const few_case cases[] = {
        {{H, 0, 0}, GATHERED}, {{B, H, 1}, GATHERED}, {{1, H, N}, GATHERED},
        {{B, H, N}, GATHERED}, {{B, H, 1}, 0},        {{B, H, N}, 1 << 30},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&cases[i]);
}

/* Chunks that no plan computes are refused when parts are made, on all ranks. */
static void strange_chunks(void **state)
{
    const few_case c = {{H, 0, 0}, GATHERED};
    one_rank rank[RANKS];
    saccade_shard_options o;
    few w;
    (void)state;
    begin(&c, &w);
    saccade_shard_options_init(&o);
    o.ranks = RANKS;
    o.tile = 100;
    o.Q = o.KV = 4000;
    assert_int_equal(saccade_shard_plan_create(&o, &w.shards, NULL), SACCADE_OK);
    assert_int_equal(saccade_ranks_create(RANKS, &w.ranks, NULL), SACCADE_OK);
    for (int32_t i = 0; i < RANKS; i++)
        rank[i] = (one_rank){.w = &w, .rank = i};
    rank_threads_run(RANKS, rank_thread, rank, sizeof *rank);
    for (int32_t i = 0; i < RANKS; i++) {
        assert_int_equal(rank[i].status, SACCADE_EINVAL);
        assert_string_equal(rank[i].err.where, "shards");
    }
    saccade_ranks_destroy(w.ranks);
    saccade_shard_plan_destroy(w.shards);
}

typedef struct tiled {
    const saccade_shard_plan *shards;
    saccade_ranks *ranks;
    saccade_problem problem;
    int32_t rank;
    saccade_status status;
    saccade_error err;
} tiled;

static void *tiled_thread(void *arg)
{
    tiled *me = arg;
    saccade_transport t;
    saccade_dist *dist = NULL;
    saccade_transport_init(&t);
    assert_int_equal(saccade_ranks_transport(me->ranks, me->rank, &t, NULL), SACCADE_OK);
    me->status = saccade_dist_create(NULL, &me->problem, me->shards, 0, &t, &dist, &me->err);
    if (me->status == SACCADE_OK)
        me->status = saccade_dist_prepare(dist, NULL, &me->err);
    saccade_dist_destroy(dist);
    return NULL;
}

/* Where tiles follow from the batch (streamed kernels), those of any batch make parts. */
static void tiles_of_every_batch(void **state)
{
    tiled each[RANKS], one = {.rank = 0};
    saccade_plan *plan;
    saccade_shard_plan *shards;
    saccade_shard_options o;
    (void)state;
    saccade_problem_init(&one.problem);
    one.problem.sizes = (saccade_sizes){.H = 2, .Hkv = 2, .D = 64, .Dv = 64};
    one.problem.dtype = SACCADE_BF16;
    assert_int_equal(saccade_plan_create(NULL, &one.problem, &plan, NULL), SACCADE_OK);
    for (int64_t batch = 1; batch <= 64; batch *= 4) {
        const saccade_sizes sizes = {batch, 2, 2, 4096, 4096, 64, 64};
        saccade_shard_options_init(&o);
        o.ranks = RANKS;
        o.tile = (int32_t)saccade_plan_row_tile(plan, &sizes);
        o.Q = o.KV = 4096;
        assert_int_equal(saccade_shard_plan_create(&o, &shards, NULL), SACCADE_OK);
        one.shards = shards;
        assert_int_equal(saccade_ranks_create(RANKS, &one.ranks, NULL), SACCADE_OK);
        for (int32_t i = 0; i < RANKS; i++) {
            each[i] = one;
            each[i].rank = i;
        }
        rank_threads_run(RANKS, tiled_thread, each, sizeof *each);
        for (int32_t i = 0; i < RANKS; i++)
            if (each[i].status != SACCADE_OK)
                fail_msg("tile %d: %s: %s", o.tile, each[i].err.where, each[i].err.message);
        saccade_ranks_destroy(one.ranks);
        saccade_shard_plan_destroy(shards);
    }
    saccade_plan_destroy(plan);
}

/* Members that no call over ranks reads are refused, not ignored. */
static void strange_members(void **state)
{
    enum { RAGGED, PAGES, PREFIX, K_SCALE, HEAD_MAX, STRANGE };
    static const char *const names[] = {"ragged", "pages", "prefix", "k_scale", "head_max"};
    const few_case c = {{H, 0, 0}, GATHERED};
    saccade_shard_options o;
    saccade_dist *dist = NULL;
    saccade_transport t;
    few w;
    (void)state;
    begin(&c, &w);
    w.problem.gradients = SACCADE_GRADIENT_Q;
    saccade_shard_options_init(&o);
    o.Q = o.KV = N;
    assert_int_equal(saccade_shard_plan_create(&o, &w.shards, NULL), SACCADE_OK);
    saccade_transport_init(&t);
    assert_int_equal(saccade_dist_create(NULL, &w.problem, w.shards, 0, &t, &dist, NULL),
                     SACCADE_OK);
    for (int i = 0; i < STRANGE; i++) {
        saccade_forward_args a;
        saccade_backward_args back;
        saccade_ragged ragged;
        saccade_pages pages;
        saccade_prefix prefix;
        saccade_error err = {0};
        saccade_forward_args_init(&a);
        saccade_backward_args_init(&back);
        saccade_ragged_init(&ragged);
        saccade_pages_init(&pages);
        saccade_prefix_init(&prefix);
        a.q = a.k = a.v = a.out = &w.q;
        a.sinks = &w.sinks;
        back.ragged = a.ragged = i == RAGGED ? &ragged : NULL;
        back.pages = a.pages = i == PAGES ? &pages : NULL;
        a.prefix = i == PREFIX ? &prefix : NULL;
        a.k_scale = i == K_SCALE ? &w.k : NULL;
        a.head_max = i == HEAD_MAX ? &w.k : NULL;
        assert_int_equal(saccade_dist_forward(dist, &a, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, names[i]);
        assert_int_equal(saccade_dist_forward_local(dist, &a, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, names[i]);
        if (i > PAGES)
            continue;
        assert_int_equal(saccade_dist_backward(dist, &back, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, names[i]);
        assert_int_equal(saccade_dist_backward_local(dist, &back, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, names[i]);
    }
    saccade_dist_destroy(dist);
    saccade_shard_plan_destroy(w.shards);
}

/* The number that was given is named. */
static void negative_windows(void **state)
{
    static const int64_t all[] = {-1, -5, INT64_MIN};
    const few_case c = {{H, 0, 0}, GATHERED};
    saccade_shard_options o;
    saccade_transport t;
    few w;
    (void)state;
    begin(&c, &w);
    saccade_shard_options_init(&o);
    o.Q = o.KV = N;
    assert_int_equal(saccade_shard_plan_create(&o, &w.shards, NULL), SACCADE_OK);
    saccade_transport_init(&t);
    for (int i = 0; i < 3; i++) {
        saccade_dist *dist = NULL;
        saccade_error err = {0};
        assert_int_equal(
            saccade_dist_create_staged(NULL, &w.problem, w.shards, 0, all[i], &t, &dist, &err),
            SACCADE_EINVAL);
        assert_string_equal(err.where, "keys");
        assert_non_null(strstr(err.message, i == 1 ? "got -5," : "got -1,"));
    }
    saccade_shard_plan_destroy(w.shards);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strange_chunks),          cmocka_unit_test(tiles_of_every_batch),
        cmocka_unit_test(ranks_that_hold_nothing), cmocka_unit_test(strange_members),
        cmocka_unit_test(negative_windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
