/* Attention over ranks on GPUs. Without one: what moves rows compiles without spills. With one:
 * ranks that are threads of this process share it, and messages are copied on the device; with
 * two and more they have one each and messages go over NCCL. out and lse are one plan's bit for
 * bit (in staged mode near), gradients near, and the same bits again and with kept keys; those
 * of captures and of sinks are the same bits on all ranks. */
#include "base/convert.h"
#include "cuda/cuda.h"
#include "saccade_dist.h"
#include "support/device_case.h"
#include "support/problem_case.h"
#include "support/rank_threads.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS_MOST = 4, IN_Q = 0, IN_K, IN_V, IN_DO, OUT, LSE, DQ, DK, DV, TENSORS };

typedef struct gpu_case {
    const char *mask, *score; /* mask NULL: none */
    saccade_sizes sizes;
    saccade_dtype dtype;
    int32_t ranks;
    int64_t window; /* of staged mode; 0: keys are gathered */
    int has_sinks;
} gpu_case;

/* What all rows share: a tensor that scores read, and sinks; or the gradients of both. */
enum { X_LENGTH = 64, HEADS_MOST = 8 };
typedef struct shared {
    float x[X_LENGTH], sinks[HEADS_MOST];
} shared;

/* Tensors of the whole sequence on the host: one plan's, and the ranks' put together. */
typedef struct whole {
    const gpu_case *c;
    saccade_problem problem;
    saccade_block_mask *blocks;
    saccade_shard_plan *shards;
    saccade_binding doc, pair; /* a document for each position; an element for each score */
    saccade_tensor t[TENSORS], all[TENSORS], again[TENSORS];
    shared given, made, made_by[2][RANKS_MOST]; /* one plan's; ranks', by turn */
    saccade_ranks *ranks;
    saccade_nccl_id id;
    int is_nccl;
} whole;

typedef struct one_rank {
    whole *w;
    int32_t rank, device;
    saccade_transport inner;
    saccade_status status;
    saccade_error err;
} one_rank;

/* ---- messages between threads that share a GPU ---- */

static int exchange(void *user, const saccade_message *sends, int32_t n_sends,
                    const saccade_message *receives, int32_t n_receives, double seconds)
{
    const one_rank *me = user;
    return me->inner.exchange(me->inner.user, sends, n_sends, receives, n_receives, seconds);
}

/* Where a message lies goes to its receiver, who copies it and says so. */
typedef struct notice {
    void *data;
    size_t bytes;
} notice;

static int tell(one_rank *me, const saccade_message *sends, int32_t n_sends, notice *out,
                const saccade_message *receives, int32_t n_receives, notice *in)
{
    saccade_message to[2 * RANKS_MOST], from[2 * RANKS_MOST];
    for (int32_t i = 0; i < n_sends; i++) {
        out[i] = (notice){sends[i].data, sends[i].bytes};
        to[i] = (saccade_message){&out[i], sizeof out[i], sends[i].peer};
    }
    for (int32_t i = 0; i < n_receives; i++)
        from[i] = (saccade_message){&in[i], sizeof in[i], receives[i].peer};
    return exchange(me, to, n_sends, from, n_receives, 100);
}

static int exchange_on(void *user, const saccade_message *sends, int32_t n_sends,
                       const saccade_message *receives, int32_t n_receives, void *stream,
                       double seconds)
{
    one_rank *me = user;
    notice out[2 * RANKS_MOST], in[2 * RANKS_MOST];
    const cu_driver *driver;
    void *pushed;
    (void)seconds;
    if (cu_get_driver(&driver, NULL) || cu_enter(driver, me->device, &pushed, NULL))
        return 1;
    int failed = driver->stream_synchronize(stream)
                 || tell(me, sends, n_sends, out, receives, n_receives, in);
    for (int32_t i = 0; i < n_receives && !failed; i++)
        failed = in[i].bytes != receives[i].bytes
                 || driver->copy_on_device((cu_ptr)(uintptr_t)receives[i].data,
                                           (cu_ptr)(uintptr_t)in[i].data, in[i].bytes, stream);
    failed = failed || driver->stream_synchronize(stream)
             || tell(me, receives, n_receives, in, sends, n_sends, out);
    cu_leave(driver, pushed);
    return failed;
}

static saccade_status transport_of(one_rank *me, saccade_transport *out)
{
    const whole *w = me->w;
    saccade_transport_init(out);
    out->seconds = 100;
    if (w->is_nccl)
        return saccade_nccl_create(&w->id, me->rank, w->c->ranks, me->device, out, &me->err);
    saccade_transport_init(&me->inner);
    const saccade_status status =
        saccade_ranks_transport(w->ranks, me->rank, &me->inner, &me->err);
    *out = me->inner;
    out->user = me;
    out->exchange = exchange;
    out->exchange_on = exchange_on;
    out->abort = NULL;
    return status;
}

/* ---- tensors ---- */

static int is_of_keys(int i)
{
    return i == IN_K || i == IN_V || i == DK || i == DV;
}

static saccade_tensor dense(const gpu_case *c, int i, int64_t rows, void *data)
{
    const saccade_sizes *s = &c->sizes;
    const int64_t dim = i == LSE                                         ? 1
                        : i == IN_V || i == DV || i == OUT || i == IN_DO ? s->Dv
                                                                         : s->D;
    const int64_t shape[4] = {s->B, is_of_keys(i) ? s->Hkv : s->H, rows, dim};
    return saccade_tensor_of(data, i == LSE ? SACCADE_F32 : c->dtype, i == LSE ? 3 : 4, shape);
}

static size_t row_bytes(const saccade_tensor *t)
{
    return (size_t)(t->rank == 4 ? t->shape[3] : 1) * saccade_dtype_bytes(t->dtype);
}

static size_t bytes_of(const saccade_tensor *t)
{
    return (size_t)(t->shape[0] * t->shape[1] * t->shape[2]) * row_bytes(t);
}

/* Rows of the ranges out of the whole, or back. */
static void move_rows(const saccade_tensor *all, const saccade_tensor *own, char *data,
                      const saccade_range *at, int32_t n, int is_back)
{
    const size_t each = row_bytes(all);
    char *here = data;
    for (int64_t bh = 0; bh < own->shape[0] * own->shape[1]; bh++)
        for (int32_t i = 0; i < n; i++) {
            char *there = (char *)all->data + (size_t)(bh * all->shape[2] + at[i].first) * each;
            const size_t bytes = (size_t)at[i].count * each;
            memcpy(is_back ? there : here, is_back ? here : there, bytes);
            here += bytes;
        }
}

static void fill(const saccade_tensor *t, uint32_t *x)
{
    const int64_t n = (int64_t)(bytes_of(t) / saccade_dtype_bytes(t->dtype));
    for (int64_t i = 0; i < n; i++) {
        *x = *x * 1664525u + 1013904223u;
        const float value = (float)(int32_t)*x * 0x1p-30f;
        convert_from_f32(t->dtype, &value,
                         (char *)t->data + (size_t)i * saccade_dtype_bytes(t->dtype), 1);
    }
}

/* ---- a run on a GPU, over ranks or alone ---- */

typedef struct on_gpu {
    int device;
    saccade_tensor t[TENSORS];
    saccade_tensor doc, pair, x, sinks, d_x, d_sinks;
    void *shared, *d_shared;
    void *memory[TENSORS + 7];
    int n;
} on_gpu;

static saccade_status put(on_gpu *g, const void *from, size_t bytes, void **out,
                          saccade_error *err)
{
    const saccade_status status = saccade_device_alloc(g->device, bytes + 64, out, err);
    if (status != SACCADE_OK)
        return status;
    g->memory[g->n++] = *out;
    return from ? saccade_device_copy(g->device, *out, from, bytes, err) : SACCADE_OK;
}

static saccade_tensor vector(const on_gpu *g, void *data, int64_t n)
{
    saccade_tensor t = saccade_tensor_of(data, SACCADE_F32, 1, &n);
    t.device = (saccade_device){SACCADE_CUDA, g->device};
    return t;
}

static saccade_status upload_shared(on_gpu *g, const whole *w, saccade_error *err)
{
    shared unset;
    memset(&unset, 0xff, sizeof unset);
    saccade_status status = put(g, &w->given, sizeof w->given, &g->shared, err);
    if (status == SACCADE_OK)
        status = put(g, &unset, sizeof unset, &g->d_shared, err);
    shared *to = g->shared, *d = g->d_shared; /* on the device */
    g->x = vector(g, to->x, X_LENGTH);
    g->sinks = vector(g, to->sinks, w->c->sizes.H);
    g->d_x = vector(g, d->x, X_LENGTH);
    g->d_sinks = vector(g, d->sinks, w->c->sizes.H);
    return status;
}

static saccade_status upload_capture(on_gpu *g, const saccade_tensor *from, int64_t n,
                                     saccade_tensor *to, saccade_error *err)
{
    *to = *from;
    to->device = (saccade_device){SACCADE_CUDA, g->device};
    return put(g, from->data, (size_t)n * saccade_dtype_bytes(from->dtype), &to->data, err);
}

static saccade_status upload(on_gpu *g, const whole *w, const saccade_tensor *t,
                             const saccade_range *rows, int32_t n, const saccade_range *keys,
                             int32_t n_keys, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    for (int i = 0; i < TENSORS && status == SACCADE_OK; i++) {
        const saccade_range *at = is_of_keys(i) ? keys : rows;
        const int32_t count = is_of_keys(i) ? n_keys : n;
        int64_t length = 0;
        for (int32_t k = 0; k < count; k++)
            length += at[k].count;
        g->t[i] = dense(w->c, i, length, NULL);
        if (!length)
            continue;
        char *host = malloc(bytes_of(&g->t[i]));
        move_rows(&t[i], &g->t[i], host, at, count, 0);
        status = put(g, host, bytes_of(&g->t[i]), &g->t[i].data, err);
        g->t[i].device = (saccade_device){SACCADE_CUDA, g->device};
        free(host);
    }
    if (status == SACCADE_OK)
        status = upload_capture(g, &w->doc.tensor, w->doc.tensor.shape[0], &g->doc, err);
    if (status == SACCADE_OK && w->pair.tensor.data)
        status =
            upload_capture(g, &w->pair.tensor, w->c->sizes.Q * w->c->sizes.KV, &g->pair, err);
    return status == SACCADE_OK ? upload_shared(g, w, err) : status;
}

static saccade_status download(const on_gpu *g, const saccade_tensor *t, shared *made,
                               const saccade_range *rows, int32_t n, const saccade_range *keys,
                               int32_t n_keys, saccade_error *err)
{
    saccade_status status = saccade_device_synchronize(g->device, err);
    if (status == SACCADE_OK)
        status = saccade_device_copy(g->device, made, g->d_shared, sizeof *made, err);
    for (int i = OUT; i < TENSORS && status == SACCADE_OK; i++) {
        if (!g->t[i].data)
            continue;
        char *host = malloc(bytes_of(&g->t[i]));
        status = saccade_device_copy(g->device, host, g->t[i].data, bytes_of(&g->t[i]), err);
        move_rows(&t[i], &g->t[i], host, is_of_keys(i) ? keys : rows,
                  is_of_keys(i) ? n_keys : n, 1);
        free(host);
    }
    return status;
}

static const saccade_tensor *some(const saccade_tensor *t)
{
    return t->data ? t : NULL;
}

typedef struct call {
    saccade_forward_args f;
    saccade_backward_args b;
    saccade_binding bound[3], made;
} call;

static int reads(const char *text, const char *name)
{
    return text && strstr(text, name) != NULL;
}

static void make_call(const whole *w, on_gpu *g, call *to)
{
    saccade_forward_args_init(&to->f);
    saccade_backward_args_init(&to->b);
    int32_t n = 0;
    if (reads(w->c->mask, "doc["))
        to->bound[n++] = (saccade_binding){"doc", g->doc};
    if (reads(w->c->score, "x["))
        to->bound[n++] = (saccade_binding){"x", g->x};
    if (reads(w->c->score, "pair["))
        to->bound[n++] = (saccade_binding){"pair", g->pair};
    to->b.q = to->f.q = some(&g->t[IN_Q]);
    to->b.k = to->f.k = some(&g->t[IN_K]);
    to->b.v = to->f.v = some(&g->t[IN_V]);
    to->b.out = to->f.out = some(&g->t[OUT]);
    to->b.lse = to->f.lse = some(&g->t[LSE]);
    to->b.d_out = some(&g->t[IN_DO]);
    to->b.d_q = some(&g->t[DQ]);
    to->b.d_k = some(&g->t[DK]);
    to->b.d_v = some(&g->t[DV]);
    to->b.block_mask = to->f.block_mask = w->blocks;
    to->b.bindings = to->f.bindings = to->bound;
    to->b.n_bindings = to->f.n_bindings = n;
    to->made = (saccade_binding){"x", g->d_x};
    to->b.d_captures = &to->made;
    to->b.n_d_captures = reads(w->c->score, "x[");
    to->b.sinks = to->f.sinks = w->c->has_sinks ? &g->sinks : NULL;
    to->b.d_sinks = w->c->has_sinks ? &g->d_sinks : NULL;
}

static void give_back(on_gpu *g)
{
    for (int i = 0; i < g->n; i++)
        saccade_device_free(g->device, g->memory[i]);
}

/* turn 0: keys travel for both; 1: they are kept for backward where they are gathered. */
static saccade_status run_rank(one_rank *me, saccade_dist *dist, on_gpu *g, int turn)
{
    const int is_kept = turn && !me->w->c->window;
    const int64_t B = me->w->c->sizes.B;
    saccade_error *err = &me->err;
    call c;
    void *kept = NULL;
    make_call(me->w, g, &c);
    saccade_status status = saccade_dist_prepare(dist, me->w->blocks, err);
    c.f.workspace_bytes = saccade_dist_workspace(dist, B);
    if (status == SACCADE_OK)
        status = put(g, NULL, c.f.workspace_bytes, &c.f.workspace, err);
    if (status == SACCADE_OK && is_kept)
        status = put(g, NULL, saccade_dist_received(dist, B), &kept, err);
    if (status == SACCADE_OK && is_kept)
        status = saccade_dist_keep(dist, B, me->device, kept, err);
    if (status == SACCADE_OK)
        status = saccade_dist_forward(dist, &c.f, err);
    if (status == SACCADE_OK)
        status = saccade_dist_backward_workspace(dist, &c.b, &c.b.workspace_bytes, err);
    if (status == SACCADE_OK)
        status = put(g, NULL, c.b.workspace_bytes, &c.b.workspace, err);
    if (status == SACCADE_OK && is_kept)
        status = saccade_dist_keep(dist, B, me->device, kept, err);
    if (status == SACCADE_OK)
        status = saccade_dist_backward(dist, &c.b, err);
    return status;
}

static saccade_status both_turns(one_rank *me, saccade_dist *dist)
{
    whole *w = me->w;
    const saccade_range *rows, *keys;
    const int32_t n = saccade_shard_rows(w->shards, me->rank, &rows);
    const int32_t n_keys = saccade_shard_keys(w->shards, me->rank, &keys);
    saccade_status status = SACCADE_OK;
    for (int turn = 0; turn < 2 && status == SACCADE_OK; turn++) {
        on_gpu g = {.device = me->device};
        status = upload(&g, w, w->t, rows, n, keys, n_keys, &me->err);
        if (status == SACCADE_OK)
            status = run_rank(me, dist, &g, turn);
        if (status == SACCADE_OK)
            status = download(&g, turn ? w->again : w->all, &w->made_by[turn][me->rank], rows,
                              n, keys, n_keys, &me->err);
        give_back(&g);
    }
    return status;
}

static void *rank_thread(void *arg)
{
    one_rank *me = arg;
    saccade_transport t;
    saccade_dist *dist = NULL;
    const cu_driver *driver;
    void *pushed;
    me->status = cu_get_driver(&driver, &me->err);
    if (me->status == SACCADE_OK)
        me->status = cu_enter(driver, me->device, &pushed, &me->err);
    if (me->status != SACCADE_OK)
        return NULL;
    me->status = transport_of(me, &t);
    const whole *w = me->w;
    if (me->status == SACCADE_OK && w->c->window)
        me->status = saccade_dist_create_staged(NULL, &w->problem, w->shards, 0, w->c->window,
                                                &t, &dist, &me->err);
    else if (me->status == SACCADE_OK)
        me->status = saccade_dist_create(NULL, &w->problem, w->shards, 0, &t, &dist, &me->err);
    if (me->status == SACCADE_OK)
        me->status = both_turns(me, dist);
    saccade_dist_destroy(dist);
    if (me->w->is_nccl)
        saccade_nccl_destroy(&t);
    cu_leave(driver, pushed);
    return NULL;
}

static void all_ranks(whole *w, int32_t devices)
{
    one_rank rank[RANKS_MOST];
    const int32_t n = w->c->ranks;
    assert_int_equal(saccade_ranks_create(n, &w->ranks, NULL), SACCADE_OK);
    for (int32_t i = 0; i < n; i++)
        rank[i] = (one_rank){.w = w, .rank = i, .device = w->is_nccl ? i % devices : 0};
    rank_threads_run(n, rank_thread, rank, sizeof *rank);
    saccade_ranks_destroy(w->ranks);
    for (int32_t i = 0; i < n; i++)
        if (rank[i].status != SACCADE_OK)
            fail_msg("rank %d of %s: %s: %s", i, w->c->mask ? w->c->mask : "none",
                     rank[i].err.where, rank[i].err.message);
}

static void one_plan(whole *w, saccade_plan *plan)
{
    const saccade_range rows = {0, w->c->sizes.Q}, keys = {0, w->c->sizes.KV};
    saccade_error err = {0};
    on_gpu g = {.device = 0};
    call c;
    saccade_status status = upload(&g, w, w->t, &rows, 1, &keys, 1, &err);
    make_call(w, &g, &c);
    c.f.workspace_bytes = saccade_plan_workspace(plan, &w->c->sizes);
    if (status || saccade_backward_workspace(plan, &c.b, &c.b.workspace_bytes, &err)
        || put(&g, NULL, c.f.workspace_bytes, &c.f.workspace, &err)
        || put(&g, NULL, c.b.workspace_bytes, &c.b.workspace, &err)
        || (w->blocks && saccade_plan_prepare(plan, w->blocks, &err))
        || saccade_forward(plan, &c.f, &err) || saccade_backward(plan, &c.b, &err)
        || download(&g, w->t, &w->made, &rows, 1, &keys, 1, &err))
        fail_msg("one plan: %s: %s", err.where, err.message);
    give_back(&g);
}

/* ---- cases ---- */

/* Norm of the difference over the norm. */
static double distance(const saccade_tensor *a, const saccade_tensor *b)
{
    const size_t each = saccade_dtype_bytes(a->dtype);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < bytes_of(a) / each; i++) {
        const double x = convert_element(a->dtype, (const char *)a->data + i * each);
        const double y = convert_element(b->dtype, (const char *)b->data + i * each);
        difference += (x - y) * (x - y);
        norm += x * x;
    }
    return sqrt(difference / (norm > 0 ? norm : 1));
}

/* n gradients that all ranks have. */
static void compare_shared(const whole *w, const char *name, size_t at, int64_t n)
{
    const char *of = (const char *)&w->made_by[0][0] + at;
    const int64_t shape[4] = {1, 1, 1, n};
    for (int turn = 0; turn < 2; turn++)
        for (int32_t r = 0; r < w->c->ranks; r++)
            if (memcmp((const char *)&w->made_by[turn][r] + at, of, (size_t)n * sizeof(float)))
                fail_msg("d%s under %s: rank %d has others in run %d", name, w->c->mask, r,
                         turn);
    const saccade_tensor one = saccade_tensor_of((char *)&w->made + at, SACCADE_F32, 4, shape);
    const saccade_tensor all = saccade_tensor_of((char *)of, SACCADE_F32, 4, shape);
    const double far = distance(&one, &all);
    if (!(far <= 2e-3))
        fail_msg("d%s of %d ranks under %s: off by %g of one plan's", name, w->c->ranks,
                 w->c->mask, far);
}

static void compare(const whole *w)
{
    static const char *const names[] = {"q", "k", "v", "dO", "out", "lse", "dQ", "dK", "dV"};
    const char *mask = w->c->mask ? w->c->mask : "none";
    if (reads(w->c->score, "x["))
        compare_shared(w, "x", offsetof(shared, x), X_LENGTH);
    if (w->c->has_sinks)
        compare_shared(w, "sinks", offsetof(shared, sinks), w->c->sizes.H);
    for (int i = OUT; i < TENSORS; i++) {
        const size_t bytes = bytes_of(&w->t[i]);
        if (memcmp(w->all[i].data, w->again[i].data, bytes))
            fail_msg("%s of %d ranks under %s: two runs differ", names[i], w->c->ranks, mask);
        const double far = distance(&w->t[i], &w->all[i]);
        if (w->c->window) {
            if (!(far <= (i == LSE ? 1e-5 : 4e-3)))
                fail_msg("%s of %d ranks under %s by windows: off by %g of one plan's",
                         names[i], w->c->ranks, mask, far);
            continue;
        }
        if (i < DQ ? memcmp(w->t[i].data, w->all[i].data, bytes) != 0 : !(far <= 4e-3))
            fail_msg("%s of %d ranks under %s: off by %g of one plan's", names[i], w->c->ranks,
                     mask, far);
    }
}

static saccade_mod *bound(saccade_kind kind, const char *text)
{
    saccade_error err = {0};
    saccade_mod *generic, *made = NULL;
    const saccade_capture doc = {"doc", SACCADE_I32, 1}, x = {"x", SACCADE_F32, 1},
                          pair = {"pair", SACCADE_BF16, 2};
    const saccade_capture *capture = reads(text, "doc[") ? &doc
                                     : reads(text, "x[") ? &x
                                                         : &pair;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err)
        || saccade_mod_bind(generic, capture, saccade_mod_capture_count(generic), &made, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return made;
}

static void want_gradients(const gpu_case *c, saccade_problem *p)
{
    static const char *const names[] = {"x"};
    p->gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (reads(c->score, "x[")) {
        p->gradients |= SACCADE_GRADIENT_CAPTURES;
        p->gradient_captures = names;
        p->n_gradient_captures = 1;
    }
    if (c->has_sinks) {
        p->gradients |= SACCADE_GRADIENT_SINKS;
        p->sinks_dtype = SACCADE_F32;
    }
}

static void open_whole(const gpu_case *c, whole *w, saccade_plan **plan)
{
    saccade_error err = {0};
    uint32_t x = 5;
    const saccade_sizes *s = &c->sizes;
    *w = (whole){.c = c};
    int32_t *doc = malloc((size_t)s->Q * sizeof *doc);
    for (int64_t i = 0; i < s->Q; i++)
        doc[i] = (int32_t)(i * i / 90000 + i / 300);
    w->doc = (saccade_binding){"doc", saccade_tensor_of(doc, SACCADE_I32, 1, &s->Q)};
    if (reads(c->score, "pair[")) {
        const int64_t shape[4] = {1, 1, s->Q, s->KV}, *two = shape + 2;
        saccade_tensor all = saccade_tensor_of(NULL, SACCADE_BF16, 4, shape);
        all.data = malloc(bytes_of(&all));
        fill(&all, &x);
        w->pair = (saccade_binding){"pair", saccade_tensor_of(all.data, SACCADE_BF16, 2, two)};
    }
    for (int i = 0; i < TENSORS; i++) {
        saccade_tensor *each[] = {&w->t[i], &w->all[i], &w->again[i]};
        for (int k = 0; k < 3; k++) {
            *each[k] = dense(c, i, is_of_keys(i) ? s->KV : s->Q, NULL);
            each[k]->data = calloc(1, bytes_of(each[k]));
        }
        if (i < OUT)
            fill(&w->t[i], &x);
    }
    saccade_problem_init(&w->problem);
    w->problem.sizes = *s;
    w->problem.dtype = c->dtype;
    w->problem.backend = "cuda";
    w->problem.mask = c->mask ? bound(SACCADE_MASK, c->mask) : NULL;
    w->problem.score = c->score ? bound(SACCADE_SCORE, c->score) : NULL;
    for (int i = 0; i < X_LENGTH; i++)
        w->given.x[i] = sinf((float)i) * 0.5f + 1;
    for (int i = 0; i < HEADS_MOST; i++)
        w->given.sinks[i] = (float)i * 0.5f;
    want_gradients(c, &w->problem);
    const int32_t n_doc = reads(c->mask, "doc[");
    if (saccade_plan_create(NULL, &w->problem, plan, &err)
        || (c->mask
            && saccade_block_mask_create(NULL, w->problem.mask, s, NULL, &w->doc, n_doc, NULL,
                                         &w->blocks, &err)))
        fail_msg("%s: %s", err.where, err.message);
    const saccade_block_mask *masks[] = {w->blocks};
    saccade_shard_options o;
    saccade_shard_options_init(&o);
    o.ranks = c->ranks;
    o.tile = (int32_t)saccade_plan_row_tile(*plan, s);
    o.Q = s->Q;
    o.KV = s->KV;
    o.masks = masks;
    o.n_masks = w->blocks != NULL;
    if (saccade_shard_plan_create(&o, &w->shards, &err))
        fail_msg("%s: %s", err.where, err.message);
}

static void close_whole(whole *w, saccade_plan *plan)
{
    for (int i = 0; i < TENSORS; i++) {
        free(w->t[i].data);
        free(w->all[i].data);
        free(w->again[i].data);
    }
    free(w->doc.tensor.data);
    free(w->pair.tensor.data);
    saccade_shard_plan_destroy(w->shards);
    saccade_block_mask_destroy(w->blocks);
    saccade_plan_destroy(plan);
    saccade_mod_destroy((saccade_mod *)w->problem.mask);
    saccade_mod_destroy((saccade_mod *)w->problem.score);
}

static void check(const gpu_case *c, int32_t devices)
{
    whole w;
    saccade_plan *plan = NULL;
    open_whole(c, &w, &plan);
    w.is_nccl = devices >= c->ranks && c->ranks > 1;
    if (w.is_nccl && saccade_nccl_make_id(&w.id, NULL) != SACCADE_OK) {
        print_message("no NCCL here: messages are copied\n");
        w.is_nccl = 0;
    }
    one_plan(&w, plan);
    all_ranks(&w, devices);
    compare(&w);
    close_whole(&w, plan);
}

static void run_cases(const gpu_case *cases, size_t n)
{
    int32_t devices = 0;
    if (!has_device() || saccade_device_count(&devices, NULL) != SACCADE_OK)
        return;
    for (size_t i = 0; i < n; i++) {
        print_message("%s, %d ranks\n", cases[i].mask ? cases[i].mask : "no mask",
                      cases[i].ranks);
        check(&cases[i], 1); /* copies */
        if (devices >= cases[i].ranks)
            check(&cases[i], devices);
    }
}

static const char slopes[] = "score + x[h] * (kv - q) * 0.01",
                  distances[] = "score + x[min(abs(q - kv) / 4, 63)]",
                  products[] = "score * x[h] + x[q % 40 + 8]", pairs[] = "score + pair[q, kv]";

static void equal_to_one_plan(void **state)
{
    static const gpu_case cases[] = {
        {"causal()", slopes, {1, 4, 2, 1100, 1100, 64, 64}, SACCADE_BF16, 3, 0, 1},
        {"q - kv < 300 && kv - q < 300",
         distances,
         {2, 4, 4, 1500, 1500, 128, 128},
         SACCADE_BF16,
         2,
         0,
         0},
        {"causal()", products, {1, 2, 1, 900, 900, 32, 32}, SACCADE_F32, 4, 0, 1},
        {"q >= kv && q - kv < 200",
         NULL,
         {2, 4, 1, 2000, 2000, 128, 128},
         SACCADE_BF16,
         2,
         0,
         0},
        {"doc[q] == doc[kv] && q >= kv",
         NULL,
         {1, 2, 2, 3000, 3000, 64, 64},
         SACCADE_BF16,
         3,
         0,
         0},
        {"causal()", "alibi()", {1, 4, 2, 1100, 1100, 64, 64}, SACCADE_BF16, 4, 0, 0},
        {NULL, NULL, {1, 2, 1, 900, 900, 64, 64}, SACCADE_BF16, 2, 0, 0},
        {"causal()", pairs, {1, 4, 2, 1160, 1160, 64, 64}, SACCADE_BF16, 3, 0, 0},
        {"causal()", pairs, {2, 2, 2, 900, 904, 128, 128}, SACCADE_BF16, 2, 0, 1},
        {"causal()", NULL, {1, 2, 1, 900, 900, 40, 36}, SACCADE_F16, 2, 0, 0},
    };
    (void)state;
    run_cases(cases, sizeof cases / sizeof *cases);
}

static void near_by_windows(void **state)
{
    static const gpu_case cases[] = {
        {"causal()", slopes, {1, 4, 2, 1100, 1100, 64, 64}, SACCADE_BF16, 3, 256, 1},
        {"q >= kv && q - kv < 300",
         distances,
         {2, 4, 4, 1500, 1500, 128, 128},
         SACCADE_BF16,
         2,
         512,
         1},
        {"causal()", "alibi()", {1, 4, 2, 1100, 1100, 64, 64}, SACCADE_BF16, 3, 256, 0},
        {"q >= kv && q - kv < 200",
         NULL,
         {2, 4, 1, 2000, 2000, 128, 128},
         SACCADE_BF16,
         2,
         512,
         0},
        {"doc[q] == doc[kv] && q >= kv",
         NULL,
         {1, 2, 2, 3000, 3000, 64, 64},
         SACCADE_BF16,
         2,
         1000,
         0},
        {NULL, "softcap(20.0)", {2, 2, 1, 900, 900, 64, 64}, SACCADE_BF16, 2, 384, 0},
        {"causal()", pairs, {1, 4, 2, 1160, 1160, 64, 64}, SACCADE_BF16, 3, 256, 0},
        {"causal()", NULL, {1, 2, 1, 900, 900, 40, 36}, SACCADE_F16, 2, 128, 0},
    };
    (void)state;
    run_cases(cases, sizeof cases / sizeof *cases);
}

/* A rank that does not come: the other has an error when the time is up. */
static void missing_rank(void **state)
{
    int32_t devices = 0;
    saccade_nccl_id id;
    saccade_transport t;
    saccade_error err = {0};
    (void)state;
    if (saccade_device_count(&devices, NULL) != SACCADE_OK || devices < 1
        || saccade_nccl_make_id(&id, NULL) != SACCADE_OK)
        return;
    saccade_transport_init(&t);
    t.seconds = 1;
    assert_int_equal(saccade_nccl_create(&id, 0, 2, 0, &t, &err), SACCADE_EPEER);
}

static void rows_move_compiles(void **state)
{
    (void)state;
    expect_program_compiles("rows_move.cu", "sm_90a");
    expect_program_compiles("rows_merge.cu", "sm_90a");
    expect_program_compiles("total.cu", "sm_90a");
}

/* Plans of some rows store gradients of keys by themselves: none of these tiles spills. Sums of
 * captures' gradients beside them do by a few words at D128. */
static void programs_of_some_rows(void **state)
{
    static const struct {
        const char *problem, *score;
    } each[] = {
        {"b1 h4/2 q64 kv64 d128 bf16", NULL},
        {"b1 h4/2 q64 kv64 d64 f16", NULL},
        {"b1 h4/2 q64 kv64 d64 bf16", slopes},
    };
    (void)state;
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
        const gpu_case wanted = {.score = each[i].score};
        saccade_problem p;
        saccade_problem_init(&p);
        problem_case(each[i].problem, &p.sizes, &p.dtype);
        p.backend = "cuda";
        p.arch = "sm_90a";
        p.score = each[i].score ? bound(SACCADE_SCORE, each[i].score) : NULL;
        want_gradients(&wanted, &p);
        expect_plan_does_not_spill(&p, 1, CU_BWD_TILES);
        saccade_mod_destroy((saccade_mod *)p.score);
    }
}

/* The larger tiles of this score spill or not by what else a program does: plans of some rows
 * take those that the whole sequence's plan takes, or their bits would be others. */
static void tiles_of_some_rows(void **state)
{
    static const char *const problems[] = {"b2 h2 q64 kv64 d128 bf16",
                                           "b2 h2 q64 kv64 d40 f32"};
    (void)state;
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        saccade_problem p;
        saccade_problem_init(&p);
        problem_case(problems[i], &p.sizes, &p.dtype);
        p.backend = "cuda";
        p.arch = "sm_90a";
        p.score = bound(SACCADE_SCORE, "score + x[(q * q + kv) % 7]");
        p.mask = bound(SACCADE_MASK, "causal() && q - kv < 700");
        saccade_plan *plans[] = {compiled_plan(&p, 0), compiled_plan(&p, 1)};
        const cu_state *all = plans[0]->state, *some = plans[1]->state;
        for (int k = 0; k < CU_PROGRAMS; k++) {
            const cu_form *a = &all->programs[k].form, *b = &some->programs[k].form;
            if (cu_program_kinds[k].operation != CU_OP_FORWARD && k != CU_SMALL)
                continue;
            assert_int_equal(a->tile.groups, b->tile.groups);
            assert_int_equal(a->tile.keys, b->tile.keys);
            assert_int_equal(a->tile.is_lazy, b->tile.is_lazy);
        }
        saccade_plan_destroy(plans[1]);
        saccade_plan_destroy(plans[0]);
        saccade_mod_destroy((saccade_mod *)p.score);
        saccade_mod_destroy((saccade_mod *)p.mask);
    }
}

static void refusals(void **state)
{
    saccade_nccl_id id = {{0}};
    saccade_transport t;
    saccade_error err = {0};
    (void)state;
    saccade_transport_init(&t);
    assert_int_equal(saccade_nccl_create(&id, 2, 2, 0, &t, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "rank");
    t.seconds = -1;
    assert_int_equal(saccade_nccl_create(&id, 0, 2, 0, &t, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_nccl_make_id(NULL, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_dist_received(NULL, 1), SIZE_MAX);
    saccade_nccl_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_move_compiles), cmocka_unit_test(programs_of_some_rows),
        cmocka_unit_test(tiles_of_some_rows), cmocka_unit_test(refusals),
        cmocka_unit_test(equal_to_one_plan),  cmocka_unit_test(near_by_windows),
        cmocka_unit_test(missing_rank),
    };
    setenv("SACCADE_CUDA_TILES", "large", 1); /* plans of some rows have no others */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
