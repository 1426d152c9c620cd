/* Every allocation of one rank failing in turn, in gather and staged mode, from creating to the
 * gradients. That rank says so, the others have an error for it before their time is up, and
 * nothing is left. */
#include "saccade_dist.h"
#include "support/fail_alloc.h"
#include "support/rank_threads.h"

#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 3, H = 2, N = 300, D = 8, ALL = H * N * D, GATHERED = -1 };

typedef struct world {
    int64_t window; /* of staged mode, or GATHERED */
    int32_t victim;
    saccade_mod *mask;
    saccade_block_mask *blocks;
    saccade_problem problem;
    saccade_shard_plan *shards;
    saccade_ranks *ranks;
    float data[ALL];
} world;

typedef struct one_rank {
    world *w;
    int32_t rank;
    saccade_status status;
    saccade_error err;
    float own[5 * ALL]; /* out, lse, dQ, dK, dV */
} one_rank;

static int64_t count(const saccade_range *at, int32_t n)
{
    int64_t rows = 0;
    for (int32_t i = 0; i < n; i++)
        rows += at[i].count;
    return rows;
}

/* Workspace is the caller's affair, and does not fail here. */
static void *room(const one_rank *me, size_t bytes)
{
    static _Alignas(64) char memory[RANKS][1 << 23];
    assert_in_range(bytes, 0, sizeof *memory);
    return memory[me->rank];
}

/* ---- one rank ---- */

static saccade_status gradients(one_rank *me, saccade_dist *dist, const saccade_forward_args *f,
                                const int64_t shape[2][4])
{
    saccade_tensor d[3];
    saccade_backward_args b;
    saccade_backward_args_init(&b);
    b.q = f->q;
    b.k = f->k;
    b.v = f->v;
    b.out = f->out;
    b.lse = f->lse;
    b.d_out = f->q;
    b.block_mask = f->block_mask;
    for (int i = 0; i < 3; i++)
        d[i] = saccade_tensor_of(me->own + (2 + i) * ALL, SACCADE_F32, 4, shape[i > 0]);
    b.d_q = &d[0];
    b.d_k = &d[1];
    b.d_v = &d[2];
    TRY(saccade_dist_backward_workspace(dist, &b, &b.workspace_bytes, &me->err));
    b.workspace = room(me, b.workspace_bytes);
    return saccade_dist_backward(dist, &b, &me->err);
}

static saccade_status run(one_rank *me, saccade_dist *dist)
{
    const world *w = me->w;
    const saccade_range *at;
    int64_t shape[2][4] = {{1, H, 0, D}, {1, H, 0, D}};
    saccade_forward_args f;
    int32_t n = saccade_shard_rows(w->shards, me->rank, &at);
    shape[0][2] = count(at, n);
    n = saccade_shard_keys(w->shards, me->rank, &at);
    shape[1][2] = count(at, n);
    const saccade_tensor q =
        saccade_tensor_of((void *)(uintptr_t)w->data, SACCADE_F32, 4, shape[0]);
    const saccade_tensor k =
        saccade_tensor_of((void *)(uintptr_t)w->data, SACCADE_F32, 4, shape[1]);
    const saccade_tensor out = saccade_tensor_of(me->own, SACCADE_F32, 4, shape[0]);
    const saccade_tensor lse = saccade_tensor_of(me->own + ALL, SACCADE_F32, 3, shape[0]);
    saccade_forward_args_init(&f);
    f.q = &q;
    f.k = f.v = &k;
    f.out = &out;
    f.lse = &lse;
    f.block_mask = w->blocks;
    f.workspace_bytes = saccade_dist_workspace(dist, 1);
    f.workspace = room(me, f.workspace_bytes);
    TRY(saccade_dist_prepare(dist, w->blocks, &me->err));
    TRY(saccade_dist_forward(dist, &f, &me->err));
    return gradients(me, dist, &f, (const int64_t(*)[4])shape);
}

static void *rank_thread(void *arg)
{
    one_rank *me = arg;
    const world *w = me->w;
    saccade_transport t;
    saccade_dist *dist = NULL;
    saccade_transport_init(&t);
    me->status = saccade_ranks_transport(w->ranks, me->rank, &t, &me->err);
    t.seconds = 1e4; /* who waits for it to pass hangs */
    if (me->rank == w->victim)
        fail_alloc_here(1);
    if (me->status == SACCADE_OK)
        me->status =
            w->window == GATHERED
                ? saccade_dist_create(NULL, &w->problem, w->shards, 0, &t, &dist, &me->err)
                : saccade_dist_create_staged(NULL, &w->problem, w->shards, 0, w->window, &t,
                                             &dist, &me->err);
    if (me->status == SACCADE_OK)
        me->status = run(me, dist);
    if (me->rank == w->victim)
        fail_alloc_here(0);
    saccade_dist_destroy(dist);
    return NULL;
}

/* ---- all ranks ---- */

/* The others' work is done where the victim's is, and not where it has failed. */
static saccade_status use(void *arg, saccade_error *err)
{
    static one_rank rank[RANKS];
    world *w = arg;
    TRY(saccade_ranks_create(RANKS, &w->ranks, err));
    for (int32_t r = 0; r < RANKS; r++)
        rank[r] = (one_rank){.w = w, .rank = r};
    rank_threads_run(RANKS, rank_thread, rank, sizeof *rank);
    saccade_ranks_destroy(w->ranks);
    const saccade_status status = rank[w->victim].status;
    for (int32_t r = 0; r < RANKS; r++)
        if (r != w->victim && rank[r].status != (status ? SACCADE_EPEER : SACCADE_OK))
            fail_msg("rank %d: status %d where rank %d has %d: %s", r, rank[r].status,
                     w->victim, status, rank[r].err.message);
    *err = rank[w->victim].err;
    return status;
}

static void open_world(world *w)
{
    static const char text[] = "q >= kv && q - kv < 90";
    saccade_shard_options o;
    saccade_mod *parsed;
    memset(w, 0, sizeof *w);
    for (int i = 0; i < ALL; i++)
        w->data[i] = (float)(i * 37 % 101) * 0.02f - 1;
    assert_int_equal(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &parsed, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_mod_bind(parsed, NULL, 0, &w->mask, NULL), SACCADE_OK);
    saccade_mod_destroy(parsed);
    saccade_problem_init(&w->problem);
    w->problem.sizes = (saccade_sizes){1, H, H, N, N, D, D};
    w->problem.mask = w->mask;
    w->problem.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    assert_int_equal(saccade_block_mask_create(NULL, w->mask, &w->problem.sizes, NULL, NULL, 0,
                                               NULL, &w->blocks, NULL),
                     SACCADE_OK);
    const saccade_block_mask *masks[] = {w->blocks};
    saccade_shard_options_init(&o);
    o.ranks = RANKS;
    o.tile = 96; /* more than the row tile of any back end divides */
    o.masks = masks;
    o.n_masks = 1;
    assert_int_equal(saccade_shard_plan_create(&o, &w->shards, NULL), SACCADE_OK);
}

static void ranks_survive_failing_allocations(void **state)
{
    static world w;
    static const int64_t windows[] = {GATHERED, 100};
    (void)state;
    open_world(&w);
    fail_alloc_by_thread(1);
    for (int i = 0; i < 2; i++)
        for (w.victim = 0; w.victim < RANKS; w.victim += RANKS - 1) {
            w.window = windows[i];
            saccade_error err;
            assert_int_equal(use(&w, &err), SACCADE_OK); /* what stays is there then */
            assert_true(fail_alloc_sweep_lenient(i ? "staged" : "gather", use, &w) >= 20);
        }
    fail_alloc_by_thread(0);
    saccade_shard_plan_destroy(w.shards);
    saccade_block_mask_destroy(w.blocks);
    saccade_mod_destroy(w.mask);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks_survive_failing_allocations)};
    return cmocka_run_group_tests_name("alloc dist", tests, NULL, NULL);
}
