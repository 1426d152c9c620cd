/* Attention over ranks that are threads, against one device: out, lse, row maxima bit for bit
 * at every level, for any number of ranks, mask, score, length and chunk, heads that differ,
 * batches; captured tensors that are read at positions of the whole sequence. In staged mode
 * near them, the same bits every time. And what happens when a rank fails: an error on all
 * others, in time. */
#include "base/clock.h"
#include "base/convert.h"
#include "saccade_dist.h"
#include "support/forward_case.h"
#include "support/rank_threads.h"
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { GATHERED = -1, RANKS_MOST = 8 };

typedef struct dist_case {
    const char *problem, *mask, *score;
    int32_t ranks, chunk_tiles; /* 0: chosen */
    int64_t block;              /* of the block mask; 0: 128 */
    int with_max;
    int is_imported; /* the block mask's blocks by index tensors */
} dist_case;

typedef struct world {
    const dist_case *c;
    const case_run *run;
    const char *level;
    const saccade_shard_plan *shards;
    const saccade_block_mask *mask;
    saccade_ranks *ranks;
    int64_t window; /* of staged mode; GATHERED: not so */
    /* whole results: one device's, and the ranks' put together */
    char *out, *out_all;
    float *lse, *lse_all, *most, *most_all;
} world;

typedef struct one_rank {
    world *w;
    int32_t rank;
    saccade_status status;
    saccade_error err;
} one_rank;

/* ---- rows of a tensor ---- */

static size_t element_of(const saccade_tensor *t)
{
    return saccade_dtype_bytes(t->dtype);
}

/* [B, heads, rows, dim] of the ranges' rows, without gaps; data NULL: no rows. */
static saccade_tensor rows_of(const saccade_tensor *t, const saccade_range *at, int32_t n,
                              int copied)
{
    int64_t rows = 0;
    for (int32_t i = 0; i < n; i++)
        rows += at[i].count;
    const int64_t shape[4] = {t->shape[0], t->shape[1], rows, t->shape[3]};
    saccade_tensor own = saccade_tensor_of(NULL, t->dtype, 4, shape);
    const size_t each = (size_t)shape[3] * element_of(t);
    char *to = own.data = rows ? malloc((size_t)(shape[0] * shape[1] * rows) * each) : NULL;
    for (int64_t bh = 0; copied && bh < shape[0] * shape[1]; bh++)
        for (int32_t i = 0; i < n; i++)
            for (int64_t j = at[i].first; j < at[i].first + at[i].count; j++, to += each)
                memcpy(to,
                       (const char *)t->data
                           + (bh / shape[1] * t->stride[0] + bh % shape[1] * t->stride[1]
                              + j * t->stride[2])
                                 * (int64_t)element_of(t),
                       each);
    return own;
}

/* Rows of `each` bytes back to where they were in [heads][length]. */
static void put_back(const char *from, const saccade_range *at, int32_t n, int64_t heads,
                     int64_t length, size_t each, char *to)
{
    for (int64_t h = 0; h < heads; h++)
        for (int32_t i = 0; i < n; i++) {
            memcpy(to + (size_t)(h * length + at[i].first) * each, from,
                   (size_t)at[i].count * each);
            from += (size_t)at[i].count * each;
        }
}

/* ---- one rank ---- */

static saccade_context *context_of(const char *level)
{
    saccade_context_options o;
    saccade_context *context = NULL;
    saccade_context_options_init(&o);
    o.threads = 2;
    o.level = level;
    assert_int_equal(saccade_context_create(&o, &context, NULL), SACCADE_OK);
    return context;
}

static void run_rank(one_rank *me, saccade_dist *dist)
{
    world *w = me->w;
    const case_run *r = w->run;
    const saccade_sizes *s = &r->sizes;
    const saccade_range *rows, *keys;
    const int32_t n = saccade_shard_rows(w->shards, me->rank, &rows);
    const int32_t n_keys = saccade_shard_keys(w->shards, me->rank, &keys);
    saccade_tensor q = rows_of(&r->q.t, rows, n, 1), k = rows_of(&r->k.t, keys, n_keys, 1);
    saccade_tensor v = rows_of(&r->v.t, keys, n_keys, 1), out = q, lse = q;
    out.shape[3] = s->Dv;
    out = rows_of(&out, NULL, 0, 0); /* of no rows, to get its form */
    const int64_t n_rows = q.shape[2], shape[4] = {s->B, s->H, n_rows, s->Dv};
    const size_t heads = (size_t)(s->B * s->H);
    out = saccade_tensor_of(n_rows ? malloc(heads * (size_t)(n_rows * s->Dv) * element_of(&q))
                                   : NULL,
                            r->dtype, 4, shape);
    float *stats = n_rows ? malloc(2 * heads * (size_t)n_rows * sizeof *stats) : NULL;
    lse = saccade_tensor_of(stats, SACCADE_F32, 3, shape);
    const saccade_tensor most = saccade_tensor_of(
        stats ? stats + (int64_t)heads * n_rows : NULL, SACCADE_F32, 3, shape);
    saccade_forward_args a = r->args;
    a.q = n_rows ? &q : NULL;
    a.k = n_keys ? &k : NULL;
    a.v = n_keys ? &v : NULL;
    a.out = n_rows ? &out : NULL;
    a.lse = n_rows ? &lse : NULL;
    a.row_max = n_rows && w->c->with_max ? &most : NULL;
    a.block_mask = w->mask;
    a.workspace_bytes = saccade_dist_workspace(dist, s->B);
    a.workspace = aligned_alloc(64, (a.workspace_bytes + 63) / 64 * 64);
    me->status = saccade_dist_forward(dist, &a, &me->err);
    if (me->status == SACCADE_OK && n_rows) {
        put_back(out.data, rows, n, (int64_t)heads, s->Q, (size_t)s->Dv * element_of(&q),
                 w->out_all);
        put_back((char *)stats, rows, n, (int64_t)heads, s->Q, sizeof(float),
                 (char *)w->lse_all);
        if (w->c->with_max)
            put_back((char *)most.data, rows, n, (int64_t)heads, s->Q, sizeof(float),
                     (char *)w->most_all);
    }
    free(a.workspace);
    free(q.data);
    free(k.data);
    free(v.data);
    free(out.data);
    free(stats);
}

static void *rank_thread(void *arg)
{
    one_rank *me = arg;
    world *w = me->w;
    saccade_transport t;
    saccade_dist *dist = NULL;
    saccade_context *context = context_of(w->level);
    saccade_transport_init(&t);
    me->status = saccade_ranks_transport(w->ranks, me->rank, &t, &me->err);
    if (me->status == SACCADE_OK)
        me->status = w->window == GATHERED
                         ? saccade_dist_create(context, &w->run->problem, w->shards, 0, &t,
                                               &dist, &me->err)
                         : saccade_dist_create_staged(context, &w->run->problem, w->shards, 0,
                                                      w->window, &t, &dist, &me->err);
    if (me->status == SACCADE_OK && w->window != GATHERED)
        me->status = saccade_dist_prepare(dist, w->mask, &me->err);
    if (me->status == SACCADE_OK)
        run_rank(me, dist);
    saccade_dist_destroy(dist);
    saccade_context_destroy(context);
    return NULL;
}

/* ---- all ranks ---- */

static void all_ranks(world *w)
{
    one_rank rank[RANKS_MOST];
    const int32_t n = w->c->ranks;
    assert_int_equal(saccade_ranks_create(n, &w->ranks, NULL), SACCADE_OK);
    for (int32_t i = 0; i < n; i++)
        rank[i] = (one_rank){.w = w, .rank = i};
    rank_threads_run(n, rank_thread, rank, sizeof *rank);
    saccade_ranks_destroy(w->ranks);
    for (int32_t i = 0; i < n; i++)
        if (rank[i].status != SACCADE_OK)
            fail_msg("rank %d of \"%s\": %s: %s", i, w->c->problem, rank[i].err.where,
                     rank[i].err.message);
}

static void one_device(world *w, saccade_plan *plan)
{
    const case_run *r = w->run;
    const saccade_sizes *s = &r->sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    saccade_error err = {0};
    const saccade_tensor out = saccade_tensor_of(w->out, r->dtype, 4, shape);
    const saccade_tensor lse = saccade_tensor_of(w->lse, SACCADE_F32, 3, shape);
    const saccade_tensor most = saccade_tensor_of(w->most, SACCADE_F32, 3, shape);
    saccade_forward_args a = r->args;
    a.out = &out;
    a.lse = &lse;
    a.row_max = w->c->with_max ? &most : NULL;
    a.block_mask = w->mask;
    a.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace = aligned_alloc(64, (a.workspace_bytes + 63) / 64 * 64);
    if (saccade_forward(plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
}

/* The same blocks by index tensors; the mask itself goes. */
static saccade_block_mask *imported(saccade_block_mask *mask, const case_run *r,
                                    const saccade_binding *used, int32_t n)
{
    saccade_error err = {0};
    saccade_block_mask *made = NULL;
    saccade_block_indices x = {0};
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, NULL), SACCADE_OK);
    const size_t rows = (size_t)(x.B * x.H * x.rows), all = rows * (size_t)x.columns;
    x.kv_num_blocks = calloc(2 * (rows + all), sizeof *x.kv_num_blocks);
    x.kv_indices = x.kv_num_blocks + rows;
    x.full_kv_num_blocks = x.kv_indices + all;
    x.full_kv_indices = x.full_kv_num_blocks + rows;
    if (saccade_block_mask_export(mask, 0, &x, &err)
        || saccade_block_mask_import(NULL, &x, r->mask, &r->sizes, r->args.positions, used, n,
                                     &made, &err))
        fail_msg("%s: %s", err.where, err.message);
    free(x.kv_num_blocks);
    saccade_block_mask_destroy(mask);
    return made;
}

static saccade_block_mask *mask_of(const dist_case *c, const case_run *r)
{
    saccade_binding used[8];
    int32_t n = 0;
    saccade_block_mask *mask = NULL;
    saccade_error err = {0};
    saccade_block_mask_options o;
    saccade_block_mask_options_init(&o);
    o.block_q = o.block_kv = (int32_t)c->block;
    if (!r->mask)
        return NULL;
    for (int32_t i = 0; i < saccade_mod_capture_count(r->mask); i++)
        for (int32_t b = 0; b < r->args.n_bindings; b++)
            if (!strcmp(saccade_mod_capture(r->mask, i).name, r->args.bindings[b].name))
                used[n++] = r->args.bindings[b];
    if (saccade_block_mask_create(NULL, r->mask, &r->sizes, r->args.positions, used, n, &o,
                                  &mask, &err))
        fail_msg("%s: %s", err.where, err.message);
    return c->is_imported ? imported(mask, r, used, n) : mask;
}

static saccade_shard_plan *shards_of(const dist_case *c, const case_run *r,
                                     const saccade_block_mask *mask, int64_t tile)
{
    const saccade_block_mask *masks[] = {mask};
    saccade_shard_plan *shards = NULL;
    saccade_error err = {0};
    saccade_shard_options o;
    saccade_shard_options_init(&o);
    o.ranks = c->ranks;
    o.tile = (int32_t)tile;
    o.chunk = c->chunk_tiles * tile;
    o.Q = r->sizes.Q;
    o.KV = r->sizes.KV;
    o.masks = masks;
    o.n_masks = mask != NULL;
    if (saccade_shard_plan_create(&o, &shards, &err))
        fail_msg("%s: %s", err.where, err.message);
    return shards;
}

/* The largest difference over the largest value; NaN and infinities must be the same. */
static double far(saccade_dtype dtype, const void *a, const void *b, size_t n)
{
    double most = 1e-30, difference = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t at = i * saccade_dtype_bytes(dtype);
        const double x = convert_element(dtype, (const char *)a + at);
        const double y = convert_element(dtype, (const char *)b + at);
        if (x == y || (isnan(x) && isnan(y)))
            continue;
        most = fmax(most, fabs(x));
        difference = isfinite(x - y) ? fmax(difference, fabs(x - y)) : INFINITY;
    }
    return difference / most;
}

/* Windows of one block, then about an eighth of the keys; each twice. */
static void staged(world *w)
{
    const saccade_sizes *s = &w->run->sizes;
    const size_t rows = (size_t)(s->B * s->H * s->Q), n = rows * (size_t)s->Dv;
    const size_t bytes = n * saccade_dtype_bytes(w->run->dtype);
    const double bound = w->run->dtype == SACCADE_F32 ? 0x1p-17 : 0x1p-7;
    char *first = malloc(bytes);
    for (int turn = 0; turn < (is_short_run() ? 2 : 3); turn++) {
        w->window = turn < 2 ? 1 : 0;
        memset(w->out_all, 0x55, bytes);
        memset(w->lse_all, 0x55, rows * sizeof *w->lse_all);
        all_ranks(w);
        const double out = far(w->run->dtype, w->out, w->out_all, n);
        const double lse = far(SACCADE_F32, w->lse, w->lse_all, rows);
        const double most = far(SACCADE_F32, w->most, w->most_all, rows);
        if (!(out <= bound && lse <= 0x1p-17 && most <= 0x1p-17))
            fail_msg("%d staged ranks at level %s are off by %g (lse %g, maxima %g): --problem "
                     "\"%s\" mask %s",
                     w->c->ranks, w->level, out, lse, most, w->c->problem,
                     w->c->mask ? w->c->mask : "none");
        if (turn == 1)
            assert_memory_equal(first, w->out_all, bytes);
        memcpy(first, w->out_all, bytes);
    }
    free(first);
}

static void at_level(const dist_case *c, const case_run *r, const char *level)
{
    const saccade_sizes *s = &r->sizes;
    const size_t rows = (size_t)(s->B * s->H * s->Q);
    const size_t bytes = rows * (size_t)s->Dv * saccade_dtype_bytes(r->dtype);
    saccade_context *context = context_of(level);
    saccade_plan *plan = NULL;
    world w = {.c = c, .run = r, .level = level, .window = GATHERED};
    assert_int_equal(saccade_plan_create(context, &r->problem, &plan, NULL), SACCADE_OK);
    saccade_block_mask *mask = mask_of(c, r);
    if (mask)
        assert_int_equal(saccade_plan_prepare(plan, mask, NULL), SACCADE_OK);
    saccade_shard_plan *shards = shards_of(c, r, mask, saccade_plan_row_tile(plan, s));
    w.mask = mask;
    w.shards = shards;
    w.out = calloc(2, bytes);
    w.out_all = w.out + bytes;
    w.lse = calloc(4 * rows, sizeof *w.lse);
    w.lse_all = w.lse + rows;
    w.most = w.lse_all + rows;
    w.most_all = w.most + rows;
    one_device(&w, plan);
    all_ranks(&w);
    if (memcmp(w.out, w.out_all, bytes) || memcmp(w.lse, w.lse_all, rows * sizeof *w.lse)
        || memcmp(w.most, w.most_all, rows * sizeof *w.most))
        fail_msg(
            "%d ranks at level %s differ from one device: --problem \"%s\" mask %s score %s",
            c->ranks, level, c->problem, c->mask ? c->mask : "none",
            c->score ? c->score : "none");
    staged(&w);
    free(w.out);
    free(w.lse);
    saccade_shard_plan_destroy(shards);
    saccade_block_mask_destroy(mask);
    saccade_plan_destroy(plan);
    saccade_context_destroy(context);
}

static void check(const dist_case *c)
{
    const forward_case f = {
        .problem = c->problem, .mask = c->mask, .score = c->score, .seed = 11};
    case_run r;
    case_make(&f, &r);
    for (const char *const *level = case_levels(); *level; level++)
        at_level(c, &r, *level);
    case_free(&r);
}

static void equal_to_one_device(void **state)
{
    static const dist_case cases[] = {
        {"b1 h4/2 q700 kv700 d40 dv24 f32", "causal()", NULL, 2, 0, 0, 0, 0},
        {"b2 h2 q611 kv611 d32 bf16", "causal()", "alibi()", 3, 1, 64, 0, 0},
        {"b1 h2 q900 kv900 d32 f16", "q - kv < 100 && q >= kv", "softcap(20.0)", 4, 1, 0, 0, 0},
        {"b1 h2/1 q500 kv500 d33 f32", "doc[q] == doc[kv]", NULL, 5, 1, 32, 1, 0},
        {"b2 h2 q400 kv333 d16 f32", "h == 0 ? kv < 100 : (q + kv) % 3 != 1",
         "score + h_scale[h] * (kv - q)", 3, 1, 40, 0, 0},
        {"b1 h2 q600 kv600 d32 bf16", NULL, "score + rel[h, q / 64]", 2, 2, 0, 0, 0},
        {"b2 h1 q97 kv97 d8 f32", "causal()", NULL, 4, 0, 0, 1, 0},
        {"b1 h1 q1 kv500 d64 bf16", "kv >= 200", NULL, 3, 0, 16, 0, 0},
        {"b1 h2 q300 kv300 d16 f32", "kv > 1000", NULL, 2, 0, 0, 0, 0},
        {"b1 h2 q300 kv300 d16 f32", "causal()", NULL, 1, 0, 0, 0, 0},
        {"b1 h2 q800 kv800 d16 f32", "causal()", NULL, 3, 0, 80, 0, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&cases[i]);
}

/* ---- failures ---- */

/* A rank that does not come, comes too late, with other bytes, or ends early. */
typedef struct lonely {
    saccade_ranks *ranks;
    int32_t rank;
    double seconds;
    size_t bytes;
    int aborts, failed;
} lonely;

static void *lonely_thread(void *arg)
{
    lonely *me = arg;
    saccade_transport t;
    char sent[64] = {0}, got[64];
    saccade_transport_init(&t);
    assert_int_equal(saccade_ranks_transport(me->ranks, me->rank, &t, NULL), SACCADE_OK);
    const saccade_message send = {sent, me->bytes, 1 - me->rank};
    const saccade_message receive = {got, 32, 1 - me->rank};
    if (me->aborts)
        t.abort(t.user);
    else
        me->failed = t.exchange(t.user, &send, 1, &receive, 1, me->seconds);
    return NULL;
}

/* The time that the caller allows stays. */
static void transports_keep_their_seconds(void **unused)
{
    saccade_ranks *ranks;
    saccade_transport t;
    (void)unused;
    assert_int_equal(saccade_ranks_create(2, &ranks, NULL), SACCADE_OK);
    saccade_transport_init(&t);
    assert_int_equal(saccade_ranks_transport(ranks, 1, &t, NULL), SACCADE_OK);
    assert_true(t.seconds == 60);
    t.seconds = 3;
    assert_int_equal(saccade_ranks_transport(ranks, 1, &t, NULL), SACCADE_OK);
    assert_true(t.seconds == 3 && t.rank == 1 && t.ranks == 2);
    saccade_ranks_destroy(ranks);
}

static void pair(const lonely *a, const lonely *b, int failed_a, int failed_b)
{
    saccade_ranks *ranks;
    const int32_t n = b ? 2 : 1;
    lonely each[2] = {*a, b ? *b : *a};
    assert_int_equal(saccade_ranks_create(2, &ranks, NULL), SACCADE_OK);
    const int64_t start = clock_ns();
    for (int32_t i = 0; i < n; i++) {
        each[i].ranks = ranks;
        each[i].rank = i;
    }
    rank_threads_run(n, lonely_thread, each, sizeof *each);
    if (b && b->bytes == 31)
        assert_true(each[0].failed == SACCADE_OTHER_BYTES
                    || each[1].failed == SACCADE_OTHER_BYTES);
    assert_true(clock_ns() - start < 20 * (int64_t)1000000000);
    assert_int_equal(each[0].failed != 0, failed_a);
    if (b)
        assert_int_equal(each[1].failed != 0, failed_b);
    saccade_ranks_destroy(ranks);
}

static void failures_of_the_transport(void **state)
{
    (void)state;
    const lonely good = {.seconds = 100, .bytes = 32},
                 short_time = {.seconds = 0.1, .bytes = 32};
    const lonely other_bytes = {.seconds = 100, .bytes = 31};
    const lonely aborts = {.seconds = 100, .aborts = 1};
    pair(&good, &good, 0, 0);
    pair(&short_time, NULL, 1, 0);
    for (int i = 0; i < 4; i++) { /* no time that could pass */
        const lonely no_time = {.seconds = (double[]){0, -1, -INFINITY, NAN}[i], .bytes = 32};
        pair(&no_time, NULL, 1, 0);
    }
    for (int i = 0; i < 2; i++) { /* more than a clock counts */
        const lonely long_time = {.seconds = i ? 1e300 : INFINITY, .bytes = 32};
        pair(&long_time, &long_time, 0, 0);
    }
    pair(&good, &other_bytes, 1, 1); /* who sees it first says so */
    pair(&good, &aborts, 1, 0);
    pair(&aborts, &good, 0, 1);
}

/* One rank is given something else than the others: all get an error, that one the reason. */
enum {
    OTHER_PROBLEM,
    OTHER_INVARIANCE,
    OTHER_GRADIENT,
    OTHER_WINDOW,
    NO_QUERIES,
    OTHER_MASK,
    UPDATED,    /* all, in staged mode: the mask, since it was prepared */
    UNPREPARED, /* all, in staged mode: a run ends the transport, the next one says so */
    NOT_THERE,  /* when the others run: they have an error when their time is up */
    FAILURES
};

typedef struct mistaken {
    saccade_ranks *ranks;
    saccade_shard_plan *shards;
    saccade_block_mask *mask[2];
    saccade_mod *mod[2], *score;
    int32_t rank;
    int failure, is_staged;
    saccade_status status, then;
    saccade_error err;
} mistaken;

static void *mistaken_thread(void *arg)
{
    static const char *const captures[] = {"h_scale", "rel"};
    mistaken *me = arg;
    const int odd = me->rank == 1;
    saccade_problem p;
    saccade_transport t;
    saccade_dist *dist = NULL;
    saccade_forward_args a;
    saccade_problem_init(&p);
    p.sizes.D = p.sizes.Dv = odd && me->failure == OTHER_PROBLEM ? 16 : 8;
    p.mask = me->mod[me->failure == OTHER_MASK];
    p.batch_invariant = odd && me->failure == OTHER_INVARIANCE;
    if (me->failure == OTHER_GRADIENT) {
        p.score = me->score;
        p.gradients = SACCADE_GRADIENT_CAPTURES;
        p.gradient_captures = &captures[odd];
        p.n_gradient_captures = 1;
    }
    saccade_transport_init(&t);
    assert_int_equal(saccade_ranks_transport(me->ranks, me->rank, &t, NULL), SACCADE_OK);
    t.seconds = me->failure == NOT_THERE ? 0.2 : 100;
    me->status = me->is_staged
                     ? saccade_dist_create_staged(
                         NULL, &p, me->shards, 0,
                         odd && me->failure == OTHER_WINDOW ? 300 : 128, &t, &dist, &me->err)
                     : saccade_dist_create(NULL, &p, me->shards, 0, &t, &dist, &me->err);
    if (me->status != SACCADE_OK || (odd && me->failure == NOT_THERE)) {
        saccade_dist_destroy(dist);
        return NULL;
    }
    const saccade_range *at;
    int64_t rows = 0;
    for (int32_t i = 0, n = saccade_shard_rows(me->shards, me->rank, &at); i < n; i++)
        rows += at[i].count;
    float *data = calloc((size_t)(2 * rows * 8), sizeof *data);
    const int64_t shape[] = {1, 1, rows, 8};
    const saccade_tensor t4 = saccade_tensor_of(data, SACCADE_F32, 4, shape);
    const saccade_tensor out = saccade_tensor_of(data + rows * 8, SACCADE_F32, 4, shape);
    saccade_forward_args_init(&a);
    a.q = odd && me->failure == NO_QUERIES ? NULL : &t4;
    a.k = a.v = &t4;
    a.out = &out;
    a.block_mask = me->mask[me->failure == OTHER_MASK];
    saccade_block_mask *own = NULL;
    if (me->failure == UPDATED) {
        static const saccade_sizes sizes = {1, 1, 1, 400, 400, 8, 8};
        assert_int_equal(saccade_block_mask_create(NULL, me->mod[0], &sizes, NULL, NULL, 0,
                                                   NULL, &own, NULL),
                         SACCADE_OK);
        a.block_mask = own;
    }
    a.workspace_bytes = saccade_dist_workspace(dist, 1);
    a.workspace = aligned_alloc(64, (a.workspace_bytes + 63) / 64 * 64);
    const int is_early = me->is_staged && me->failure == UNPREPARED;
    if (!is_early)
        me->status = saccade_dist_prepare(dist, a.block_mask, &me->err);
    if (own)
        assert_int_equal(saccade_block_mask_update(own, NULL), SACCADE_OK);
    if (me->status == SACCADE_OK)
        me->status = saccade_dist_forward(dist, &a, &me->err);
    if (is_early) { /* what would do fails after what did not, and says why */
        assert_int_equal(saccade_dist_prepare(dist, a.block_mask, NULL), SACCADE_OK);
        me->then = saccade_dist_forward(dist, &a, &me->err);
    }
    free(a.workspace);
    free(data);
    saccade_dist_destroy(dist);
    saccade_block_mask_destroy(own);
    return NULL;
}

static void check_failure(const mistaken *each, int failure, int is_staged)
{
    for (int32_t i = 0; failure <= OTHER_WINDOW && i < 3; i++) {
        if (failure == OTHER_WINDOW && !is_staged)
            continue;
        const int is_refused = is_staged && failure == OTHER_INVARIANCE; /* rank 1's, before */
        assert_int_equal(each[i].status, is_refused && i != 1 ? SACCADE_EPEER : SACCADE_EINVAL);
        assert_string_equal(each[i].err.where, !is_refused ? "dist"
                                               : i == 1    ? "batch_invariant"
                                                           : "transport");
    }
    if (failure == NO_QUERIES) {
        assert_int_equal(each[1].status, SACCADE_EINVAL);
        assert_string_equal(each[1].err.where, "q");
        assert_true(each[0].status == SACCADE_OK || each[0].status == SACCADE_EPEER);
        assert_int_equal(each[2].status, SACCADE_EPEER);
    }
    if (failure == OTHER_MASK)
        assert_int_equal(each[2].status, SACCADE_EINVAL); /* keys that nobody sent it */
    for (int32_t i = 0; is_staged && failure == UPDATED && i < 3; i++)
        assert_true(each[i].status == SACCADE_EINVAL || each[i].status == SACCADE_EPEER);
    for (int32_t i = 0; is_staged && failure == UNPREPARED && i < 3; i++) {
        if (each[i].status == SACCADE_EPEER)
            continue; /* another rank's failure came while it was made */
        assert_int_equal(each[i].status, SACCADE_EINVAL);
        assert_int_equal(each[i].then, SACCADE_EPEER);
        assert_string_equal(each[i].err.where, "transport");
    }
    if (failure == NOT_THERE)
        assert_int_equal(each[2].status, SACCADE_EPEER);
}

static void failures_in(int is_staged)
{
    static const saccade_sizes sizes = {1, 1, 1, 400, 400, 8, 8};
    mistaken all = {.is_staged = is_staged}, each[3];
    all.mod[0] = case_mod(SACCADE_MASK, "q - kv < 20 && q >= kv");
    all.mod[1] = case_mod(SACCADE_MASK, "q >= kv");
    all.score = case_mod(SACCADE_SCORE, "score + h_scale[h] + rel[h, q / 64]");
    for (int i = 0; i < 2; i++)
        assert_int_equal(saccade_block_mask_create(NULL, all.mod[i], &sizes, NULL, NULL, 0,
                                                   NULL, &all.mask[i], NULL),
                         SACCADE_OK);
    saccade_shard_options o;
    saccade_shard_options_init(&o);
    o.ranks = 3;
    o.tile = 96;
    o.n_masks = 1;
    o.masks = (const saccade_block_mask *const *)all.mask;
    assert_int_equal(saccade_shard_plan_create(&o, &all.shards, NULL), SACCADE_OK);
    for (int failure = 0; failure < FAILURES; failure++) {
        assert_int_equal(saccade_ranks_create(3, &all.ranks, NULL), SACCADE_OK);
        for (int32_t i = 0; i < 3; i++) {
            each[i] = all;
            each[i].rank = i;
            each[i].failure = failure;
        }
        rank_threads_run(3, mistaken_thread, each, sizeof *each);
        saccade_ranks_destroy(all.ranks);
        check_failure(each, failure, is_staged);
    }
    saccade_shard_plan_destroy(all.shards);
    saccade_mod_destroy(all.score);
    for (int i = 0; i < 2; i++) {
        saccade_block_mask_destroy(all.mask[i]);
        saccade_mod_destroy(all.mod[i]);
    }
}

static void failures_of_a_rank(void **state)
{
    (void)state;
    failures_in(0);
}

static void failures_in_staged_mode(void **state)
{
    (void)state;
    failures_in(1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_to_one_device),
        cmocka_unit_test(transports_keep_their_seconds),
        cmocka_unit_test(failures_of_the_transport),
        cmocka_unit_test(failures_of_a_rank),
        cmocka_unit_test(failures_in_staged_mode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
