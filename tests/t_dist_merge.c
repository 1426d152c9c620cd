/* Decode over a cache that ranks share: each attends its own stretch of keys, in one piece or
 * in pages, one of them holds none; the merged result is near that of all keys on one device,
 * and the same bits on every rank. A rank that gives up is an error on the others. */
#include "base/clock.h"
#include "saccade_dist.h"
#include "support/rank_threads.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 3, B = 2, H = 4, HKV = 2, Q = 2, KV = 200, D = 16, PAGE = 16 };
enum { OUT = B * H * Q * D, LSE = B * H * Q };

static const int32_t held[RANKS] = {KV - 75, 0, 75}; /* keys of each rank, in this order */

typedef struct world {
    saccade_ranks *ranks;
    saccade_mod *mask, *score;
    float q[OUT], k[B * HKV * KV * D], v[B * HKV * KV * D];
    int is_paged, quitter; /* quitter: a rank that aborts; -1: none */
} world;

typedef struct one_rank {
    world *w;
    int32_t rank;
    float out[OUT], lse[LSE];
    saccade_status status;
    saccade_error err;
} one_rank;

static saccade_mod *mod(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *made;
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, NULL), SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &made, NULL), SACCADE_OK);
    saccade_mod_destroy(generic);
    return made;
}

static void *room(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

/* Attention over keys [first, first + n) of the cache. */
static saccade_status attend(const world *w, int32_t first, int32_t n, int is_paged, float *out,
                             float *lse, saccade_error *err)
{
    const int64_t pages = (n + PAGE - 1) / PAGE + 1, wide = is_paged ? pages * PAGE : n ? n : 1;
    const int64_t batch[] = {B}, list[] = {B, pages};
    int32_t at_q[B], at_kv[B], len[B], table[B * (KV / PAGE + 2)];
    float *k = calloc((size_t)(B * HKV * wide * D), sizeof *k);
    float *v = calloc((size_t)(B * HKV * wide * D), sizeof *v);
    for (int b = 0; b < B; b++) {
        at_q[b] = KV - Q;
        at_kv[b] = first;
        len[b] = n;
        for (int64_t p = 0; p < pages; p++)
            table[b * pages + p] = (int32_t)(b * pages + p);
        for (int g = 0; g < HKV; g++)
            for (int32_t j = 0; j < n; j++) {
                const int64_t to = is_paged
                                       ? ((b * pages + j / PAGE) * HKV + g) * PAGE + j % PAGE
                                       : (b * HKV + g) * wide + j;
                const int64_t from = (b * HKV + g) * KV + first + j;
                memcpy(k + to * D, w->k + from * D, D * sizeof *k);
                memcpy(v + to * D, w->v + from * D, D * sizeof *v);
            }
    }
    const int64_t shape[4] = {is_paged ? B * pages : B, HKV, is_paged ? PAGE : wide, D};
    const int64_t rows[4] = {B, H, Q, D};
    const saccade_tensor tq = saccade_tensor_of((void *)w->q, SACCADE_F32, 4, rows);
    const saccade_tensor tk = saccade_tensor_of(k, SACCADE_F32, 4, shape);
    const saccade_tensor tv = saccade_tensor_of(v, SACCADE_F32, 4, shape);
    const saccade_tensor to = saccade_tensor_of(out, SACCADE_F32, 4, rows);
    const saccade_tensor tl = saccade_tensor_of(lse, SACCADE_F32, 3, rows);
    const saccade_tensor t_q = saccade_tensor_of(at_q, SACCADE_I32, 1, batch);
    const saccade_tensor t_kv = saccade_tensor_of(at_kv, SACCADE_I32, 1, batch);
    const saccade_tensor t_len = saccade_tensor_of(len, SACCADE_I32, 1, batch);
    const saccade_tensor t_table = saccade_tensor_of(table, SACCADE_I32, 2, list);
    saccade_positions at;
    saccade_pages in;
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_forward_args a;
    saccade_positions_init(&at);
    at.q_offset = &t_q;
    at.kv_offset = &t_kv;
    at.kv_len = &t_len;
    saccade_pages_init(&in);
    in.table = &t_table;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = H, .Hkv = HKV, .D = D, .Dv = D};
    p.mask = w->mask;
    p.score = w->score;
    p.page = is_paged ? PAGE : 0;
    saccade_status status = saccade_plan_create(NULL, &p, &plan, err);
    const saccade_sizes sizes = {B, H, HKV, Q, is_paged ? pages * PAGE : wide, D, D};
    saccade_forward_args_init(&a);
    a.q = &tq;
    a.k = &tk;
    a.v = &tv;
    a.out = &to;
    a.lse = &tl;
    a.positions = &at;
    a.pages = is_paged ? &in : NULL;
    if (status == SACCADE_OK) {
        a.workspace_bytes = saccade_plan_workspace(plan, &sizes);
        a.workspace = room(a.workspace_bytes);
        status = saccade_forward(plan, &a, err);
        free(a.workspace);
    }
    saccade_plan_destroy(plan);
    free(k);
    free(v);
    return status;
}

static void *rank_thread(void *arg)
{
    one_rank *me = arg;
    const world *w = me->w;
    const int64_t rows[4] = {B, H, Q, D};
    const saccade_tensor out = saccade_tensor_of(me->out, SACCADE_F32, 4, rows);
    const saccade_tensor lse = saccade_tensor_of(me->lse, SACCADE_F32, 3, rows);
    saccade_transport t;
    int32_t first = 0;
    saccade_transport_init(&t);
    me->status = saccade_ranks_transport(w->ranks, me->rank, &t, &me->err);
    if (me->rank == w->quitter) {
        t.abort(t.user);
        return NULL;
    }
    for (int32_t r = 0; r < me->rank; r++)
        first += held[r];
    if (me->status == SACCADE_OK)
        me->status = attend(w, first, held[me->rank], w->is_paged, me->out, me->lse, &me->err);
    const size_t bytes = saccade_dist_merge_workspace(&t, &out);
    void *workspace = room(bytes);
    if (me->status == SACCADE_OK)
        me->status = saccade_dist_merge(NULL, &t, &out, &lse, &out, workspace, bytes, &me->err);
    free(workspace);
    return NULL;
}

static void all_ranks(world *w, one_rank rank[RANKS])
{
    assert_int_equal(saccade_ranks_create(RANKS, &w->ranks, NULL), SACCADE_OK);
    for (int32_t i = 0; i < RANKS; i++)
        rank[i] = (one_rank){.w = w, .rank = i};
    rank_threads_run(RANKS, rank_thread, rank, sizeof *rank);
    saccade_ranks_destroy(w->ranks);
}

static void open_world(world *w)
{
    uint32_t x = 3;
    float *each[] = {w->q, w->k, w->v};
    const size_t n[] = {OUT, B * HKV * KV * D, B * HKV * KV * D};
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < n[t]; i++) {
            x = x * 1664525u + 1013904223u;
            each[t][i] = (float)(int32_t)x * 0x1p-30f;
        }
    w->mask = mod(SACCADE_MASK, "causal()");
    w->score = mod(SACCADE_SCORE, "alibi()");
    w->quitter = -1;
}

static void close_world(world *w)
{
    saccade_mod_destroy(w->mask);
    saccade_mod_destroy(w->score);
    free(w);
}

static void as_one_device(void **state)
{
    static float out[OUT], lse[LSE];
    static one_rank rank[RANKS];
    saccade_error err = {0};
    (void)state;
    for (int is_paged = 0; is_paged < 2; is_paged++) {
        world *w = calloc(1, sizeof *w);
        open_world(w);
        w->is_paged = is_paged;
        if (attend(w, 0, KV, 0, out, lse, &err))
            fail_msg("%s: %s", err.where, err.message);
        all_ranks(w, rank);
        for (int r = 0; r < RANKS; r++) {
            if (rank[r].status != SACCADE_OK)
                fail_msg("rank %d: %s: %s", r, rank[r].err.where, rank[r].err.message);
            assert_memory_equal(rank[r].out, rank[0].out, sizeof out);
            assert_memory_equal(rank[r].lse, rank[0].lse, sizeof lse);
        }
        for (int i = 0; i < OUT; i++)
            assert_true(fabsf(rank[0].out[i] - out[i]) <= 4e-6f);
        for (int i = 0; i < LSE; i++)
            assert_true(fabsf(rank[0].lse[i] - lse[i]) <= 4e-6f);
        close_world(w);
    }
}

static void one_gives_up(void **state)
{
    static one_rank rank[RANKS];
    world *w = calloc(1, sizeof *w);
    const int64_t start = clock_ns();
    (void)state;
    open_world(w);
    w->quitter = 1;
    all_ranks(w, rank);
    assert_int_equal(rank[0].status, SACCADE_EPEER);
    assert_int_equal(rank[2].status, SACCADE_EPEER);
    assert_true(clock_ns() - start < (int64_t)20e9);
    close_world(w);
}

static void refusals(void **state)
{
    float data[32] = {0}, lse[4] = {0};
    const int64_t rows[4] = {1, 1, 2, 4};
    saccade_transport t;
    saccade_error err = {0};
    _Alignas(64) char memory[4096];
    saccade_tensor out = saccade_tensor_of(data, SACCADE_F32, 4, rows);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, rows);
    (void)state;
    saccade_transport_init(&t);
    assert_int_equal(saccade_dist_merge(NULL, &t, &out, &l, &out, memory, 8, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.where, "workspace");
    assert_int_equal(saccade_dist_merge(NULL, &t, &out, &l, &out, memory, sizeof memory, &err),
                     SACCADE_OK);
    const double never[] = {0, -1, 1e6, 1e300, INFINITY, NAN};
    for (int i = 0; i < 6; i++) {
        t.seconds = never[i];
        assert_int_equal(
            saccade_dist_merge(NULL, &t, &out, &l, &out, memory, sizeof memory, &err),
            SACCADE_EINVAL);
        assert_string_equal(err.where, "transport");
    }
    t.seconds = 60;
    out.stride[2] = 8;
    assert_int_equal(saccade_dist_merge(NULL, &t, &out, &l, &out, memory, sizeof memory, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.where, "out");
    t.ranks = 2;
    assert_int_equal(saccade_dist_merge(NULL, &t, &out, &l, &out, memory, sizeof memory, &err),
                     SACCADE_EINVAL);
    assert_int_equal(saccade_dist_merge_workspace(NULL, &out), SIZE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_one_device),
        cmocka_unit_test(one_gives_up),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
