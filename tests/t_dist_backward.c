/* Gradients over ranks that are threads: dQ is one device's bit for bit (in staged mode near
 * it), others are the same bits every time and on every rank, and near one device's; heads that
 * share keys, captured tensors of every kind of index, sinks, gradients that are added to,
 * batches, bf16. */
#include "base/convert.h"
#include "saccade_dist.h"
#include "support/rank_threads.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* SINKS_AT: where gradients of sinks lie in the table's */
enum { GATHERED = -1, RANKS_MOST = 5, D = 24, TABLE = 4096, Q_BITS = 7, SINKS_AT = TABLE - 8 };

typedef struct gradient_case {
    saccade_sizes sizes;
    saccade_dtype dtype;
    const char *mask, *score; /* reads table[...] of `rank` dimensions, or nothing */
    int32_t ranks, rank;
    int64_t shape[2]; /* of table */
    uint32_t added;
} gradient_case;

/* Inputs and gradients of a whole sequence or of a rank: q k v d_out, d_q d_k d_v. */
enum { IN_Q, IN_K, IN_V, IN_DO, OUT_Q, OUT_K, OUT_V, TENSORS };

typedef struct whole {
    const gradient_case *c;
    saccade_problem problem;
    saccade_mod *mask, *score;
    saccade_block_mask *blocks;
    saccade_shard_plan *shards;
    saccade_ranks *ranks;
    int64_t window;            /* of staged mode; GATHERED: not so */
    saccade_tensor t[TENSORS]; /* OUT_*: what ranks made */
    saccade_binding table;
    saccade_tensor sinks;
    float slopes[TABLE], d_table[RANKS_MOST][TABLE];
} whole;

typedef struct one_rank {
    whole *w;
    int32_t rank;
    saccade_error err;
    saccade_status status;
} one_rank;

/* ---- data ---- */

static int is_of_keys(int which)
{
    return which == IN_K || which == IN_V || which == OUT_K || which == OUT_V;
}

static saccade_tensor dense(const gradient_case *c, int which, int64_t rows)
{
    const int64_t heads = is_of_keys(which) ? c->sizes.Hkv : c->sizes.H;
    const int64_t shape[4] = {c->sizes.B, heads, rows, D};
    const size_t bytes =
        (size_t)(c->sizes.B * heads * rows * D) * saccade_dtype_bytes(c->dtype);
    return saccade_tensor_of(rows ? calloc(1, bytes) : NULL, c->dtype, 4, shape);
}

static void fill(const saccade_tensor *t, uint32_t *x)
{
    const int64_t n = t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
    for (int64_t i = 0; i < n; i++) {
        *x = *x * 1664525u + 1013904223u;
        const float value = (float)(int32_t)*x * 0x1p-31f;
        convert_from_f32(t->dtype, &value,
                         (char *)t->data + (size_t)i * saccade_dtype_bytes(t->dtype), 1);
    }
}

/* Rows of the ranges between a whole tensor and a rank's. */
static void move_rows(const saccade_tensor *all, const saccade_tensor *own,
                      const saccade_range *at, int32_t n, int back)
{
    const size_t each = (size_t)D * saccade_dtype_bytes(all->dtype);
    char *to = own->data;
    for (int64_t bh = 0; bh < all->shape[0] * all->shape[1]; bh++)
        for (int32_t i = 0; i < n; i++) {
            char *from = (char *)all->data + (size_t)(bh * all->shape[2] + at[i].first) * each;
            const size_t bytes = (size_t)at[i].count * each;
            memcpy(back ? from : to, back ? to : from, bytes);
            to += bytes;
        }
}

static int64_t count(const saccade_range *at, int32_t n)
{
    int64_t rows = 0;
    for (int32_t i = 0; i < n; i++)
        rows += at[i].count;
    return rows;
}

static saccade_mod *mod_of(const whole *w, saccade_kind kind, const char *text)
{
    saccade_error err = {0};
    saccade_mod *generic, *bound;
    const saccade_capture table = {"table", SACCADE_F32, w->c->rank};
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err))
        fail_msg("%s: %s", text, err.message);
    if (saccade_mod_bind(generic, &table, saccade_mod_capture_count(generic), &bound, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

/* Workspace full of large numbers, which nothing may depend on. */
static void *room(size_t bytes)
{
    const size_t all = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, all);
    return memory ? memset(memory, 0x7e, all) : NULL;
}

static int has_table(const gradient_case *c)
{
    return c->score && strstr(c->score, "table") != NULL;
}

/* Cases of three ranks and more. */
static int has_sinks(const gradient_case *c)
{
    return c->ranks >= 3;
}

static saccade_tensor sinks_of(const gradient_case *c, float *data)
{
    return saccade_tensor_of(data, SACCADE_F32, 1, &c->sizes.H);
}

/* ---- runs: forward, then backward ---- */

typedef struct call {
    saccade_forward_args forward;
    saccade_backward_args backward;
    saccade_tensor out, lse, d_sinks;
    saccade_binding d_table;
} call;

/* Tensors that are not there are NULL. */
static const saccade_tensor *some(const saccade_tensor *t)
{
    return t->data ? t : NULL;
}

static void make_call(const whole *w, const saccade_tensor *t, float *d_table, call *to)
{
    const gradient_case *c = w->c;
    to->out = dense(c, IN_Q, t[IN_Q].shape[2]);
    to->lse = saccade_tensor_of(
        to->out.data
            ? malloc((size_t)(c->sizes.B * c->sizes.H * to->out.shape[2]) * sizeof(float))
            : NULL,
        SACCADE_F32, 3, to->out.shape);
    saccade_forward_args *f = &to->forward;
    saccade_backward_args *b = &to->backward;
    saccade_forward_args_init(f);
    saccade_backward_args_init(b);
    b->q = f->q = some(&t[IN_Q]);
    b->k = f->k = some(&t[IN_K]);
    b->v = f->v = some(&t[IN_V]);
    b->out = f->out = some(&to->out);
    b->lse = f->lse = some(&to->lse);
    b->block_mask = f->block_mask = w->blocks;
    b->bindings = f->bindings = &w->table;
    b->n_bindings = f->n_bindings = has_table(c);
    b->d_out = some(&t[IN_DO]);
    b->d_q = some(&t[OUT_Q]);
    b->d_k = some(&t[OUT_K]);
    b->d_v = some(&t[OUT_V]);
    to->d_table =
        (saccade_binding){"table", saccade_tensor_of(d_table, SACCADE_F32, c->rank, c->shape)};
    b->d_captures = &to->d_table;
    b->n_d_captures = has_table(c);
    b->accumulate = c->added;
    to->d_sinks = sinks_of(c, d_table + SINKS_AT);
    b->sinks = f->sinks = has_sinks(c) ? &w->sinks : NULL;
    b->d_sinks = has_sinks(c) ? &to->d_sinks : NULL;
}

static void end_call(call *c)
{
    free(c->out.data);
    free(c->lse.data);
}

static saccade_status run_rank(one_rank *me, saccade_dist *dist, const saccade_tensor *t)
{
    call c;
    make_call(me->w, t, me->w->d_table[me->rank], &c);
    c.forward.workspace_bytes = saccade_dist_workspace(dist, me->w->c->sizes.B);
    c.forward.workspace = room(c.forward.workspace_bytes);
    saccade_status status = saccade_dist_prepare(dist, me->w->blocks, &me->err);
    if (status == SACCADE_OK)
        status = saccade_dist_forward(dist, &c.forward, &me->err);
    if (status == SACCADE_OK)
        status = saccade_dist_backward_workspace(dist, &c.backward, &c.backward.workspace_bytes,
                                                 &me->err);
    if (status == SACCADE_OK) {
        c.backward.workspace = room(c.backward.workspace_bytes);
        status = saccade_dist_backward(dist, &c.backward, &me->err);
        free(c.backward.workspace);
    }
    free(c.forward.workspace);
    end_call(&c);
    return status;
}

static void *rank_thread(void *arg)
{
    one_rank *me = arg;
    whole *w = me->w;
    saccade_transport transport;
    saccade_dist *dist = NULL;
    saccade_tensor own[TENSORS];
    const saccade_range *rows, *keys;
    const int32_t n = saccade_shard_rows(w->shards, me->rank, &rows);
    const int32_t n_keys = saccade_shard_keys(w->shards, me->rank, &keys);
    for (int i = 0; i < TENSORS; i++) {
        own[i] = dense(w->c, i, is_of_keys(i) ? count(keys, n_keys) : count(rows, n));
        move_rows(&w->t[i], &own[i], is_of_keys(i) ? keys : rows, is_of_keys(i) ? n_keys : n,
                  0);
    }
    saccade_transport_init(&transport);
    me->status = saccade_ranks_transport(w->ranks, me->rank, &transport, &me->err);
    if (me->status == SACCADE_OK)
        me->status = w->window == GATHERED
                         ? saccade_dist_create(NULL, &w->problem, w->shards, 0, &transport,
                                               &dist, &me->err)
                         : saccade_dist_create_staged(NULL, &w->problem, w->shards, 0,
                                                      w->window, &transport, &dist, &me->err);
    if (me->status == SACCADE_OK)
        me->status = run_rank(me, dist, own);
    for (int i = OUT_Q; i < TENSORS; i++)
        move_rows(&w->t[i], &own[i], is_of_keys(i) ? keys : rows, is_of_keys(i) ? n_keys : n,
                  1);
    for (int i = 0; i < TENSORS; i++)
        free(own[i].data);
    saccade_dist_destroy(dist);
    return NULL;
}

/* What gradients start from when they are added to. */
static void begin_gradients(const whole *w, const saccade_tensor *t)
{
    uint32_t x = 99;
    for (int i = OUT_Q; i < TENSORS; i++)
        if (w->c->added)
            fill(&t[i], &x);
}

static void all_ranks(whole *w)
{
    one_rank rank[RANKS_MOST];
    begin_gradients(w, w->t);
    assert_int_equal(saccade_ranks_create(w->c->ranks, &w->ranks, NULL), SACCADE_OK);
    for (int32_t r = 0; r < w->c->ranks; r++) {
        rank[r] = (one_rank){.w = w, .rank = r};
        for (int i = 0; i < TABLE; i++)
            w->d_table[r][i] = w->c->added ? 1 : -77;
    }
    rank_threads_run(w->c->ranks, rank_thread, rank, sizeof *rank);
    saccade_ranks_destroy(w->ranks);
    for (int32_t r = 0; r < w->c->ranks; r++)
        if (rank[r].status != SACCADE_OK)
            fail_msg("rank %d: %s: %s", r, rank[r].err.where, rank[r].err.message);
    for (int32_t r = 1; r < w->c->ranks; r++)
        assert_memory_equal(w->d_table[0], w->d_table[r], sizeof w->d_table[0]);
}

static void one_device(const whole *w, const saccade_plan *plan, const saccade_tensor *t,
                       float *d_table)
{
    saccade_error err = {0};
    call c;
    begin_gradients(w, t);
    for (int i = 0; i < TABLE; i++)
        d_table[i] = w->c->added ? 1 : -77;
    make_call(w, t, d_table, &c);
    c.forward.workspace_bytes = saccade_plan_workspace(plan, &w->c->sizes);
    c.forward.workspace = room(c.forward.workspace_bytes);
    c.backward.workspace_bytes = saccade_plan_backward_workspace(plan, &w->c->sizes);
    c.backward.workspace = room(c.backward.workspace_bytes);
    if (saccade_plan_prepare(plan, w->blocks, &err) || saccade_forward(plan, &c.forward, &err)
        || saccade_backward(plan, &c.backward, &err))
        fail_msg("%s: %s", err.where, err.message);
    free(c.forward.workspace);
    free(c.backward.workspace);
    end_call(&c);
}

/* ---- comparing ---- */

static double value(const saccade_tensor *t, int64_t i)
{
    return convert_element(t->dtype,
                           (const char *)t->data + (size_t)i * saccade_dtype_bytes(t->dtype));
}

/* Sums of the same terms in another order, each rounded to f32, the results to the dtype. Of
 * bf16, windows that are added up may leave another last bit of out, from which sums in f32
 * are made too: 2^-15.6 on AMX. */
static void near_to(const gradient_case *c, const char *what, const saccade_tensor *a,
                    const saccade_tensor *b, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs(value(a, i)));
    const double bound = most
                         * (a->dtype != SACCADE_F32   ? 0x1p-7
                            : c->dtype != SACCADE_F32 ? 0x1p-13
                                                      : 0x1p-18);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(value(a, i) - value(b, i)) <= bound))
            fail_msg("%s of %d ranks under %s: %g, of one device %g (largest %g)", what,
                     c->ranks, c->mask, value(b, i), value(a, i), most);
}

static int64_t elements(const saccade_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

static size_t bytes_of(const saccade_tensor *t)
{
    return (size_t)elements(t) * saccade_dtype_bytes(t->dtype);
}

static void compare(const whole *w, const saccade_tensor *device, const float *d_table)
{
    static const char *const names[] = {"", "", "", "", "dQ", "dK", "dV"};
    if (w->window != GATHERED)
        near_to(w->c, "dQ", &device[OUT_Q], &w->t[OUT_Q], elements(&device[OUT_Q]));
    else if (memcmp(device[OUT_Q].data, w->t[OUT_Q].data, bytes_of(&device[OUT_Q])))
        fail_msg("dQ of %d ranks under %s is not one device's", w->c->ranks, w->c->mask);
    for (int i = OUT_K; i < TENSORS; i++)
        near_to(w->c, names[i], &device[i], &w->t[i], elements(&device[i]));
    if (has_sinks(w->c)) {
        const saccade_tensor one = sinks_of(w->c, (float *)(uintptr_t)d_table + SINKS_AT);
        const saccade_tensor all = sinks_of(w->c, (float *)(uintptr_t)w->d_table[0] + SINKS_AT);
        near_to(w->c, "d_sinks", &one, &all, w->c->sizes.H);
    }
    if (!has_table(w->c))
        return;
    const int64_t n = w->c->shape[0] * (w->c->rank > 1 ? w->c->shape[1] : 1);
    const saccade_tensor a = saccade_tensor_of((void *)d_table, SACCADE_F32, 1, &n);
    const saccade_tensor b = saccade_tensor_of((void *)w->d_table[0], SACCADE_F32, 1, &n);
    near_to(w->c, "d_table", &a, &b, n);
}

/* ---- cases ---- */

static void open_case(const gradient_case *c, whole *w, saccade_plan **plan)
{
    static const char *const captured[] = {"table"};
    uint32_t x = 7;
    memset(w, 0, sizeof *w);
    w->c = c;
    for (int i = 0; i < TABLE; i++)
        w->slopes[i] = (float)(i % 13) * 0.05f;
    w->table = (saccade_binding){"table",
                                 saccade_tensor_of(w->slopes, SACCADE_F32, c->rank, c->shape)};
    w->sinks = sinks_of(c, w->slopes + 1);
    for (int i = 0; i < TENSORS; i++) {
        w->t[i] = dense(c, i, is_of_keys(i) ? c->sizes.KV : c->sizes.Q);
        if (i < OUT_Q)
            fill(&w->t[i], &x);
    }
    w->mask = mod_of(w, SACCADE_MASK, c->mask);
    w->score = c->score ? mod_of(w, SACCADE_SCORE, c->score) : NULL;
    saccade_problem_init(&w->problem);
    w->problem.sizes = c->sizes;
    w->problem.dtype = c->dtype;
    w->problem.mask = w->mask;
    w->problem.score = w->score;
    w->problem.gradients = Q_BITS;
    if (has_sinks(c)) {
        w->problem.sinks_dtype = SACCADE_F32;
        w->problem.gradients |= SACCADE_GRADIENT_SINKS;
    }
    if (has_table(c)) {
        w->problem.gradients |= SACCADE_GRADIENT_CAPTURES;
        w->problem.gradient_captures = captured;
        w->problem.n_gradient_captures = 1;
    }
    assert_int_equal(saccade_plan_create(NULL, &w->problem, plan, NULL), SACCADE_OK);
    assert_int_equal(saccade_block_mask_create(NULL, w->mask, &c->sizes, NULL, NULL, 0, NULL,
                                               &w->blocks, NULL),
                     SACCADE_OK);
    const saccade_block_mask *masks[] = {w->blocks};
    saccade_shard_options o;
    saccade_shard_options_init(&o);
    o.ranks = c->ranks;
    o.tile = (int32_t)saccade_plan_row_tile(*plan, &c->sizes);
    o.masks = masks;
    o.n_masks = 1;
    assert_int_equal(saccade_shard_plan_create(&o, &w->shards, NULL), SACCADE_OK);
}

static void close_case(whole *w, saccade_plan *plan)
{
    for (int i = 0; i < TENSORS; i++)
        free(w->t[i].data);
    saccade_shard_plan_destroy(w->shards);
    saccade_block_mask_destroy(w->blocks);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(w->mask);
    saccade_mod_destroy(w->score);
}

static void check(const gradient_case *c, int64_t window)
{
    whole *w = malloc(sizeof *w);
    saccade_plan *plan = NULL;
    saccade_tensor device[TENSORS];
    float *d_table = malloc(TABLE * sizeof *d_table), first[TABLE];
    open_case(c, w, &plan);
    w->window = window;
    for (int i = 0; i < TENSORS; i++)
        device[i] = i < OUT_Q ? w->t[i] : dense(c, i, is_of_keys(i) ? c->sizes.KV : c->sizes.Q);
    one_device(w, plan, device, d_table);
    all_ranks(w);
    compare(w, device, d_table);
    for (int i = OUT_Q; i < TENSORS; i++) /* keeps the first run's, for the second */
        memcpy(device[i].data, w->t[i].data, bytes_of(&w->t[i]));
    memcpy(first, w->d_table[0], sizeof first);
    all_ranks(w);
    for (int i = OUT_Q; i < TENSORS; i++)
        assert_memory_equal(device[i].data, w->t[i].data, bytes_of(&w->t[i]));
    assert_memory_equal(first, w->d_table[0], sizeof first);
    for (int i = OUT_Q; i < TENSORS; i++)
        free(device[i].data);
    close_case(w, plan);
    free(d_table);
    free(w);
}

static void gradients_over_ranks(void **state)
{
    static const gradient_case cases[] = {
        {{1, 2, 1, 500, 500, D, D}, SACCADE_F32, "causal()", NULL, 2, 0, {0}, 0},
        {{2, 4, 2, 401, 401, D, D}, SACCADE_F32, "causal()", "alibi()", 3, 0, {0}, 0},
        {{1, 2, 2, 450, 450, D, D},
         SACCADE_F32,
         "q - kv < 90 && q >= kv",
         "score + table[h]",
         4,
         1,
         {2},
         Q_BITS | SACCADE_GRADIENT_CAPTURES | SACCADE_GRADIENT_SINKS},
        {{1, 2, 1, 400, 300, D, D},
         SACCADE_F32,
         "(q * 7 + kv) % 5 < 3",
         "score + table[h, kv]",
         3,
         2,
         {2, 300},
         0},
        {{2, 2, 1, 333, 333, D, D},
         SACCADE_F32,
         "q / 100 == kv / 100",
         "score * (1 + table[q])",
         5,
         1,
         {333},
         0},
        {{1, 1, 1, 300, 300, D, D},
         SACCADE_F32,
         "causal()",
         "score + table[q - kv]",
         2,
         1,
         {300},
         0},
        /* places that have no order: sums in fixed point */
        {{1, 2, 1, 410, 410, D, D},
         SACCADE_F32,
         "causal()",
         "score + table[(q * 7 + kv * 3) % 31]",
         3,
         1,
         {31},
         0},
        {{1, 2, 1, 390, 390, D, D}, SACCADE_BF16, "causal()", "softcap(3.0)", 3, 0, {0}, 0},
        {{1, 1, 1, 200, 200, D, D}, SACCADE_F32, "kv > 1000", NULL, 2, 0, {0}, 0},
        {{1, 1, 1, 200, 200, D, D},
         SACCADE_F32,
         "causal()",
         "score + table[kv]",
         1,
         1,
         {200},
         0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(&cases[i], GATHERED);
        check(&cases[i], i % 2 ? 100 : 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(gradients_over_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
