/* Gather mode on a device that has a carrier. Nothing passes the host: keys are packed and
 * exchanged on the carrier's side stream while this rank's own keys are copied to where they
 * stand and tiles that need no others are computed; gradients of others' keys are made first
 * and travel while the rest is computed.
 *
 *     side    pack -> exchange ----.               .-> pack -> exchange --.
 *     stream  own keys -> tiles ---+-> rest;  far -+-> near tiles --------+-> sums
 *
 * Kernels see keys where they stand in the whole sequence. */
#include "dist/dist.h"

#include "base/status.h"
#include "plan/carry.h"

#include <stdlib.h>
#include <string.h>

struct dist_device {
    const plan_carry *ops;
    plan_carrier *carrier;
    int32_t index;
    int64_t B;                                       /* that memory is for; 0: none yet */
    plan_row_pair *own, *out, *in, *in_back, *terms; /* on the device */
    int32_t *start;
    int64_t n_own, n_in;
    void *pool[2], *gradient[2]; /* K and V, dK and dV of the whole sequence */
    char *sent, *got;            /* messages */
    char *kept;                  /* the caller's, of the next run alone */
};

/* A run that is under way. */
typedef struct work {
    saccade_dist *d;
    plan_run *run;
    const plan_gradients *to;
    char *got;   /* keys of others */
    void *event; /* on the side stream, when messages are there */
} work;

static int64_t dim_of(const saccade_dist *d, int i)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    return i ? s->Dv : s->D;
}

static size_t key_bytes(const saccade_dist *d)
{
    return saccade_dtype_bytes(d->plan->problem.kv_dtype);
}

/* Keys that come from others. */
static int64_t far_keys(const saccade_dist *d)
{
    return d->in.all - d->in.keys[d->transport.rank];
}

/* Bytes of a message's rows, K and V together. */
static size_t rows_bytes(const saccade_dist *d, int64_t rows, size_t element)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    return (size_t)(rows * s->Hkv * (s->D + s->Dv)) * element;
}

size_t dist_received(const saccade_dist *d, int64_t B)
{
    return rows_bytes(d, B * far_keys(d), key_bytes(d));
}

/* ---- tables ---- */

/* Pieces of one peer: rows of the whole sequence, rows held here and numbers in a message. */
static plan_row_pair *list_peer(const dist_pieces *pieces, int32_t peer, int64_t before,
                                int is_in, plan_row_pair *to)
{
    int32_t number = 0;
    for (int64_t i = pieces->begin[peer]; i < pieces->begin[peer + 1]; i++) {
        const dist_piece *p = &pieces->piece[i];
        for (int64_t j = 0; j < p->count; j++, number++)
            *to++ = is_in ? (plan_row_pair){number, (int32_t)(p->first + j), (int32_t)before,
                                            (int32_t)pieces->keys[peer]}
                          : (plan_row_pair){(int32_t)(p->local + j), number, (int32_t)before,
                                            (int32_t)pieces->keys[peer]};
    }
    return to;
}

/* Everything but this rank's own. */
static int64_t list_others(const saccade_dist *d, const dist_pieces *pieces, int is_in,
                           plan_row_pair *to)
{
    int64_t before = 0;
    plan_row_pair *at = to;
    for (int32_t p = 0; p < d->transport.ranks; p++) {
        if (p == d->transport.rank)
            continue;
        at = list_peer(pieces, p, before, is_in, at);
        before += pieces->keys[p];
    }
    return at - to;
}

static int64_t list_own(const saccade_dist *d, plan_row_pair *to)
{
    const int32_t me = d->transport.rank;
    int64_t n = 0;
    for (int64_t i = d->in.begin[me]; i < d->in.begin[me + 1]; i++)
        for (int64_t j = 0; j < d->in.piece[i].count; j++)
            to[n++] = (plan_row_pair){(int32_t)(d->in.piece[i].local + j),
                                      (int32_t)(d->in.piece[i].first + j), 0, 0};
    return n;
}

/* Calls for every key held here that a rank's rows touch, rank by rank: its place here, and the
 * term that its gradient has from that rank. */
typedef void (*term_of)(void *user, int64_t local, plan_row_pair term);
static void each_term(const saccade_dist *d, term_of call, void *user)
{
    int64_t before = 0;
    for (int32_t p = 0; p < d->transport.ranks; p++) {
        const int is_own = p == d->transport.rank;
        const dist_pieces *from = is_own ? &d->in : &d->out;
        int32_t number = 0;
        for (int64_t i = from->begin[p]; i < from->begin[p + 1]; i++)
            for (int64_t j = 0; j < from->piece[i].count; j++, number++) {
                const int32_t row = (int32_t)(from->piece[i].first + j);
                call(user, from->piece[i].local + j,
                     is_own ? (plan_row_pair){row, 0, 0, 0}
                            : (plan_row_pair){-1, number, (int32_t)before,
                                              (int32_t)from->keys[p]});
            }
        before += is_own ? 0 : from->keys[p];
    }
}

typedef struct term_lists {
    int32_t *start, *next;
    plan_row_pair *term;
} term_lists;

static void count_term(void *user, int64_t local, plan_row_pair term)
{
    (void)term;
    ((term_lists *)user)->start[local + 1]++;
}

static void add_term(void *user, int64_t local, plan_row_pair term)
{
    term_lists *l = user;
    l->term[l->next[local]++] = term;
}

static saccade_status place_terms(saccade_dist *d, dist_device *g, saccade_error *err)
{
    const int64_t n = d->n_keys, most = d->out.all + d->in.keys[d->transport.rank];
    saccade_status status = SACCADE_OK;
    term_lists l = {.start = calloc((size_t)n + 1, sizeof *l.start),
                    .next = calloc((size_t)n + 1, sizeof *l.next),
                    .term = calloc((size_t)most + 1, sizeof *l.term)};
    void *at;
    FAIL_IF_GOTO(!l.start || !l.next || !l.term, SACCADE_ENOMEM, "out of memory");
    each_term(d, count_term, &l);
    for (int64_t i = 0; i < n; i++)
        l.next[i + 1] = l.start[i + 1] += l.start[i];
    each_term(d, add_term, &l);
    TRY_GOTO(g->ops->reserve(g->carrier, ((size_t)n + 1) * sizeof *l.start, l.start, &at, err));
    g->start = at;
    TRY_GOTO(
        g->ops->reserve(g->carrier, ((size_t)most + 1) * sizeof *l.term, l.term, &at, err));
    g->terms = at;
out:
    free(l.start);
    free(l.next);
    free(l.term);
    return status;
}

static saccade_status place_pairs(dist_device *g, const plan_row_pair *pairs, int64_t n,
                                  plan_row_pair **out, saccade_error *err)
{
    void *at;
    TRY(g->ops->reserve(g->carrier, ((size_t)n + 1) * sizeof *pairs, pairs, &at, err));
    *out = at;
    return SACCADE_OK;
}

static saccade_status place_tables(saccade_dist *d, dist_device *g, saccade_error *err)
{
    const int64_t most = d->in.all > d->out.all ? d->in.all : d->out.all;
    saccade_status status = SACCADE_OK;
    plan_row_pair *pairs = calloc((size_t)most + 1, sizeof *pairs);
    FAIL_IF_NULL(pairs);
    g->n_own = list_own(d, pairs);
    TRY_GOTO(place_pairs(g, pairs, g->n_own, &g->own, err));
    TRY_GOTO(place_pairs(g, pairs, list_others(d, &d->out, 0, pairs), &g->out, err));
    g->n_in = list_others(d, &d->in, 1, pairs);
    TRY_GOTO(place_pairs(g, pairs, g->n_in, &g->in, err));
    for (int64_t i = 0; i < g->n_in; i++)
        pairs[i] = (plan_row_pair){pairs[i].to, pairs[i].from, pairs[i].before, pairs[i].keys};
    TRY_GOTO(place_pairs(g, pairs, g->n_in, &g->in_back, err));
    TRY_GOTO(place_terms(d, g, err));
out:
    free(pairs);
    return status;
}

/* ---- memory ---- */

static saccade_status reserve(dist_device *g, size_t bytes, void **out, saccade_error *err)
{
    return g->ops->reserve(g->carrier, bytes ? bytes : 1, NULL, out, err);
}

static saccade_status reserve_all(saccade_dist *d, dist_device *g, int64_t B,
                                  saccade_error *err)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const size_t element = key_bytes(d);
    const int is_trained =
        (d->plan->problem.gradients & (SACCADE_GRADIENT_K | SACCADE_GRADIENT_V)) != 0;
    size_t sent = rows_bytes(d, B * d->out.all, element), got = dist_received(d, B);
    void *at;
    for (int i = 0; i < 2; i++) {
        const size_t n = (size_t)(B * s->Hkv * d->KV * dim_of(d, i));
        TRY(reserve(g, n * element, &g->pool[i], err));
        if (is_trained)
            TRY(reserve(g, n * sizeof(float), &g->gradient[i], err));
    }
    if (is_trained) {
        const size_t back = rows_bytes(d, B * far_keys(d), sizeof(float));
        const size_t come = rows_bytes(d, B * d->out.all, sizeof(float));
        sent = sent > back ? sent : back;
        got = got > come ? got : come;
    }
    TRY(reserve(g, sent, &at, err));
    g->sent = at;
    TRY(reserve(g, got, &at, err));
    g->got = at;
    g->B = B;
    return SACCADE_OK;
}

static saccade_status open_device(saccade_dist *d, int32_t index, int64_t B, saccade_error *err)
{
    const plan_carry *ops = d->plan->backend->carry;
    dist_device *g = calloc(1, sizeof *g);
    FAIL_IF_NULL(g);
    g->ops = ops;
    g->index = index;
    saccade_status status = ops->open(d->plan, index, &g->carrier, err);
    if (status == SACCADE_OK)
        status = place_tables(d, g, err);
    if (status == SACCADE_OK)
        status = reserve_all(d, g, B, err);
    if (status == SACCADE_OK) {
        g->kept = d->device ? d->device->kept : NULL;
        dist_device_close(d->device);
        d->device = g;
    } else {
        dist_device_close(g);
    }
    return status;
}

void dist_device_close(dist_device *g)
{
    if (!g)
        return;
    g->ops->close(g->carrier);
    free(g);
}

saccade_status dist_device_reserve(saccade_dist *d, int32_t index, int64_t B,
                                   saccade_error *err)
{
    if (d->device && d->device->index == index && d->device->B == B)
        return SACCADE_OK;
    FAIL_AT(d->KV > INT32_MAX / 2, SACCADE_ELIMIT, "shards", 0, 0,
            "got %lld keys, expected less than 2^30 on a GPU", (long long)d->KV);
    return open_device(d, index, B, err);
}

saccade_status dist_device_keep(saccade_dist *d, int32_t index, int64_t B, void *memory,
                                saccade_error *err)
{
    TRY(dist_device_reserve(d, index, B, err));
    d->device->kept = memory;
    return SACCADE_OK;
}

/* ---- sides of a move ---- */

static saccade_tensor whole(const saccade_dist *d, int i, void *data, saccade_dtype dtype)
{
    const int64_t shape[4] = {d->device->B, d->plan->problem.sizes.Hkv, d->KV, dim_of(d, i)};
    saccade_tensor t = saccade_tensor_of(data, dtype, 4, shape);
    t.device = (saccade_device){SACCADE_CUDA, d->device->index};
    return t;
}

static plan_rows_side pools(const saccade_dist *d)
{
    const saccade_dtype dtype = d->plan->problem.kv_dtype;
    return (plan_rows_side){
        {whole(d, 0, d->device->pool[0], dtype), whole(d, 1, d->device->pool[1], dtype)}, 0};
}

static plan_rows_side gradients(const saccade_dist *d)
{
    return (plan_rows_side){{whole(d, 0, d->device->gradient[0], SACCADE_F32),
                             whole(d, 1, d->device->gradient[1], SACCADE_F32)},
                            0};
}

/* A message of so many rows: K's, then V's. */
static plan_rows_side message(const saccade_dist *d, char *data, int64_t rows,
                              saccade_dtype dtype)
{
    plan_rows_side side = {.is_packed = 1};
    for (int i = 0; i < 2; i++) {
        side.t[i] = whole(d, i, data, dtype);
        data += (size_t)(d->device->B * rows * side.t[i].shape[1] * side.t[i].shape[3])
                * saccade_dtype_bytes(dtype);
    }
    return side;
}

static plan_rows_side given(const plan_run *run)
{
    return (plan_rows_side){{*run->k, *run->v}, 0};
}

static saccade_status move(const saccade_dist *d, plan_rows_side from, plan_rows_side to,
                           const plan_row_pair *pairs, int64_t n, void *stream,
                           saccade_error *err)
{
    const plan_move m = {.from = from, .to = to, .pairs = pairs, .n = n, .B = d->device->B};
    return n ? d->device->ops->move(d->device->carrier, &m, stream, err) : SACCADE_OK;
}

/* ---- exchange ---- */

/* Messages to, or from, each other rank, of the lanes wanted. */
static int32_t list_messages(const saccade_dist *d, const plan_rows_side *side,
                             const int64_t *keys, uint32_t wanted, saccade_message *to)
{
    int32_t n = 0;
    for (int i = 0; i < 2; i++) {
        const saccade_tensor *t = &side->t[i];
        const size_t row =
            (size_t)(d->device->B * t->shape[1] * t->shape[3]) * saccade_dtype_bytes(t->dtype);
        char *at = t->data;
        for (int32_t p = 0; p < d->transport.ranks; p++) {
            if (p == d->transport.rank)
                continue;
            const size_t bytes = (size_t)keys[p] * row;
            if (bytes && wanted >> i & 1)
                to[n++] = (saccade_message){at, bytes, p};
            at += bytes;
        }
    }
    return n;
}

static saccade_status exchange(saccade_dist *d, const plan_rows_side *sent,
                               const int64_t *sent_keys, const plan_rows_side *got,
                               const int64_t *got_keys, uint32_t wanted, saccade_error *err)
{
    const saccade_transport *t = &d->transport;
    saccade_message *sends = d->messages, *receives = d->messages + 4 * (size_t)t->ranks;
    const int32_t n = list_messages(d, sent, sent_keys, wanted, sends);
    const int32_t m = list_messages(d, got, got_keys, wanted, receives);
    if (n + m == 0)
        return SACCADE_OK;
    const int failed = t->exchange_on(t->user, sends, n, receives, m,
                                      d->device->ops->side(d->device->carrier), t->seconds);
    FAIL_AT(failed && d->device->ops->is_captured(d->device->carrier), SACCADE_EINVAL, "stream",
            0, 0,
            "got one that captures a CUDA graph, expected none: this transport's exchanges "
            "cannot be captured (code %d)",
            failed);
    FAIL_AT(failed, SACCADE_EPEER, "transport", 0, 0,
            "rank %d: another rank failed, or did not answer within %g s (code %d)", t->rank,
            t->seconds, failed);
    return SACCADE_OK;
}

/* ---- keys ---- */

/* Puts on the side stream what gets the others' keys, to w->got. */
static saccade_status start_gather(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    dist_device *g = d->device;
    const saccade_dtype dtype = d->plan->problem.kv_dtype;
    const plan_rows_side sent = message(d, g->sent, d->out.all, dtype);
    const plan_rows_side got = message(d, w->got, g->n_in, dtype);
    TRY(g->ops->fork(g->carrier, w->run->stream, err));
    if (d->out.all)
        TRY(move(d, given(w->run), sent, g->out, d->out.all, g->ops->side(g->carrier), err));
    TRY(exchange(d, &sent, d->out.keys, &got, d->in.keys, 3, err));
    return g->ops->mark(g->carrier, &w->event, err);
}

static saccade_status place_others(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    return move(d, message(d, w->got, d->device->n_in, d->plan->problem.kv_dtype), pools(d),
                d->device->in, d->device->n_in, w->run->stream, err);
}

static saccade_status place_own(work *w, saccade_error *err)
{
    return w->d->device->n_own ? move(w->d, given(w->run), pools(w->d), w->d->device->own,
                                      w->d->device->n_own, w->run->stream, err)
                               : SACCADE_OK;
}

/* plan_run.between of a forward run: the others' keys are there. */
static saccade_status arrive(void *user, saccade_error *err)
{
    work *w = user;
    const dist_device *g = w->d->device;
    TRY(g->ops->await(g->carrier, w->event, w->run->stream, err));
    return place_others(w, err);
}

/* ---- runs ---- */

static const saccade_tensor *any_tensor(const plan_run *run)
{
    return run->q ? run->q : run->k;
}

/* A rank that holds neither rows nor keys takes part in nothing. */
static int is_idle(const plan_run *run)
{
    return !any_tensor(run);
}

static saccade_status begin(saccade_dist *d, plan_run *run, work *w, saccade_error *err)
{
    TRY(dist_check_tiles(d, d->plan, &run->sizes, err));
    if (d->n_rows)
        TRY(dist_check_held(d, run->block_mask, err));
    TRY(dist_device_reserve(d, any_tensor(run)->device.index, run->sizes.B, err));
    *w = (work){.d = d, .run = run, .got = d->device->kept ? d->device->kept : d->device->got};
    return SACCADE_OK;
}

static saccade_status forward(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    plan_run part = *w->run;
    TRY(start_gather(w, err));
    if (!d->n_rows)
        return d->device->ops->await(d->device->carrier, w->event, w->run->stream, err);
    TRY(place_own(w, err));
    const plan_rows_side keys = pools(d);
    part.k = &keys.t[0];
    part.v = &keys.t[1];
    part.rows = &d->rows;
    part.between = arrive;
    part.between_user = w;
    return d->plan->solver->forward(d->plan, &part, err);
}

saccade_status dist_device_forward(saccade_dist *d, plan_run *run, saccade_error *err)
{
    work w;
    if (is_idle(run))
        return SACCADE_OK;
    TRY(begin(d, run, &w, err));
    const saccade_status status = forward(&w, err);
    d->device->kept = NULL;
    return status;
}

/* ---- backward ---- */

static uint32_t wanted_of(const saccade_dist *d)
{
    const uint32_t bits = d->plan->problem.gradients;
    return (bits & SACCADE_GRADIENT_K ? 1u : 0) | (bits & SACCADE_GRADIENT_V ? 2u : 0);
}

/* plan_run.between of a backward run: gradients of others' keys are made. */
static saccade_status send_back(void *user, saccade_error *err)
{
    work *w = user;
    saccade_dist *d = w->d;
    dist_device *g = d->device;
    const uint32_t wanted = wanted_of(d);
    if (!wanted)
        return SACCADE_OK;
    const plan_rows_side got = message(d, g->got, d->out.all, SACCADE_F32);
    plan_rows_side sent = message(d, g->sent, g->n_in, SACCADE_F32);
    TRY(g->ops->fork(g->carrier, w->run->stream, err));
    TRY(move(d, gradients(d), sent, g->in_back, g->n_in, g->ops->side(g->carrier), err));
    TRY(exchange(d, &sent, d->in.keys, &got, d->out.keys, wanted, err));
    return g->ops->mark(g->carrier, &w->event, err);
}

static saccade_status add_up(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    dist_device *g = d->device;
    const plan_gradients *to = w->to;
    const saccade_tensor *any = to->dk ? to->dk : to->dv;
    if (!wanted_of(d))
        return SACCADE_OK;
    TRY(g->ops->await(g->carrier, w->event, w->run->stream, err));
    if (!d->n_keys)
        return SACCADE_OK;
    const plan_sum s = {
        .pool = gradients(d),
        .got = message(d, g->got, d->out.all, SACCADE_F32),
        .to = {{to->dk ? *to->dk : *any, to->dv ? *to->dv : *any}, 0},
        .start = g->start,
        .terms = g->terms,
        .n = d->n_keys,
        .B = g->B,
        .wanted = wanted_of(d),
        .added = (to->added & SACCADE_GRADIENT_K ? 1u : 0)
                 | (to->added & SACCADE_GRADIENT_V ? 2u : 0),
    };
    return g->ops->sum(g->carrier, &s, w->run->stream, err);
}

static saccade_status compute_back(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    const plan_rows_side keys = pools(d), made = gradients(d);
    const uint32_t wanted = wanted_of(d);
    plan_gradients part = *w->to;
    plan_run run = *w->run;
    run.k = &keys.t[0];
    run.v = &keys.t[1];
    run.rows = &d->rows;
    run.between = send_back;
    run.between_user = w;
    part.dk = wanted & 1 ? &made.t[0] : NULL;
    part.dv = wanted & 2 ? &made.t[1] : NULL;
    part.added &= SACCADE_GRADIENT_Q;
    return d->plan->solver->backward(d->plan, &run, &part, err);
}

static saccade_status backward(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    dist_device *g = d->device;
    if (!g->kept) {
        TRY(start_gather(w, err));
        TRY(g->ops->await(g->carrier, w->event, w->run->stream, err));
    }
    if (d->n_rows) {
        TRY(place_own(w, err));
        TRY(place_others(w, err));
        TRY(compute_back(w, err));
    } else {
        TRY(send_back(w, err));
    }
    return add_up(w, err);
}

saccade_status dist_device_backward(saccade_dist *d, plan_run *run, const plan_gradients *to,
                                    saccade_error *err)
{
    work w;
    if (is_idle(run))
        return SACCADE_OK;
    TRY(begin(d, run, &w, err));
    w.to = to;
    const saccade_status status = backward(&w, err);
    d->device->kept = NULL;
    return status;
}
