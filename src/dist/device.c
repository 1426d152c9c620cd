/* Gather mode on a device that has a carrier. Nothing passes the host: keys are packed and
 * exchanged on the carrier's side stream while this rank's own keys are copied to where they
 * stand and tiles that need no others are computed; gradients of others' keys are made first
 * and travel while the rest is computed.
 *
 *     side    pack -> exchange ----.               .-> pack -> exchange --.
 *     stream  own keys -> tiles ---+-> rest;  far -+-> near tiles --------+-> sums
 *
 * A rank that needs no keys of others waits for its messages at the end alone. Kernels see keys
 * where they stand in the whole sequence. */
#include "dist/device.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

struct dist_device {
    dist_port port;
    dist_tables tables;
    dist_alone alone;
    void *pool[2], *gradient[2]; /* K and V, dK and dV of the whole sequence */
    char *sent, *got;            /* messages */
    uint32_t *told;              /* how far kernels are with gradients of others' keys, ever */
    uint32_t expected;           /* of told, by what was put on streams */
    char *kept;                  /* the caller's, of the next run alone */
};

/* A run that is under way. */
typedef struct work {
    saccade_dist *d;
    dist_device *g;
    plan_run *run;
    const plan_gradients *to;
    dist_captured captured;
    char *got;   /* keys of others */
    void *event; /* on the side stream, when messages are there; NULL: there are none yet */
} work;

static size_t key_bytes(const saccade_dist *d)
{
    return saccade_dtype_bytes(d->plan->problem.kv_dtype);
}

/* Keys that come from others. */
static int64_t far_keys(const saccade_dist *d)
{
    return d->in.all - d->in.keys[d->transport.rank];
}

size_t dist_received(const saccade_dist *d, int64_t B)
{
    return dist_rows_bytes(d, B * far_keys(d), key_bytes(d));
}

/* ---- memory ---- */

static saccade_status reserve_all(saccade_dist *d, dist_device *g, int64_t B,
                                  saccade_error *err)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const size_t element = key_bytes(d);
    const int is_trained = dist_wanted(d) != 0;
    size_t sent = dist_rows_bytes(d, B * d->out.all, element), got = dist_received(d, B);
    void *at;
    for (int i = 0; i < 2; i++) {
        const size_t n = (size_t)(B * s->Hkv * d->KV * dist_dim_of(d, i));
        TRY(dist_port_reserve(&g->port, n * element, &g->pool[i], err));
        if (is_trained)
            TRY(dist_port_reserve(&g->port, n * sizeof(float), &g->gradient[i], err));
    }
    if (is_trained) {
        const size_t back = dist_rows_bytes(d, B * far_keys(d), sizeof(float));
        const size_t come = dist_rows_bytes(d, B * d->out.all, sizeof(float));
        sent = sent > back ? sent : back;
        got = got > come ? got : come;
    }
    TRY(dist_port_reserve(&g->port, sent, &at, err));
    g->sent = at;
    TRY(dist_port_reserve(&g->port, got, &at, err));
    g->got = at;
    TRY(dist_port_reserve(&g->port, sizeof *g->told, &at, err));
    g->told = at;
    return SACCADE_OK;
}

static saccade_status open_device(saccade_dist *d, int32_t index, int64_t B, saccade_error *err)
{
    const dist_span whole = {.in = &d->in, .out = &d->out, .own_keys = d->n_keys};
    dist_device *g = calloc(1, sizeof *g);
    FAIL_IF_NULL(g);
    saccade_status status = dist_port_open(d, index, B, &g->port, err);
    if (status == SACCADE_OK)
        status = dist_place_tables(&g->port, &whole, &g->tables, err);
    if (status == SACCADE_OK)
        status = dist_place_alone(&g->port, &g->alone, err);
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
    dist_port_close(&g->port);
    free(g);
}

saccade_status dist_device_reserve(saccade_dist *d, int32_t index, int64_t B,
                                   saccade_error *err)
{
    if (d->device && d->device->port.index == index && d->device->port.B == B)
        return SACCADE_OK;
    return open_device(d, index, B, err);
}

saccade_status dist_device_keep(saccade_dist *d, int32_t index, int64_t B, void *memory,
                                saccade_error *err)
{
    TRY(dist_device_reserve(d, index, B, err));
    d->device->kept = memory;
    return SACCADE_OK;
}

static plan_rows_side pools(const work *w)
{
    return dist_pools(&w->g->port, w->g->pool, w->d->KV, w->d->plan->problem.kv_dtype);
}

static plan_rows_side gradients(const work *w)
{
    return dist_pools(&w->g->port, w->g->gradient, w->d->KV, SACCADE_F32);
}

/* ---- keys ---- */

/* Puts on the side stream what gets the others' keys, to w->got. */
static saccade_status start_gather(work *w, saccade_error *err)
{
    const dist_port *port = &w->g->port;
    const dist_tables *t = &w->g->tables;
    const saccade_dtype dtype = w->d->plan->problem.kv_dtype;
    const plan_rows_side sent = dist_message(port, w->g->sent, t->n_out, dtype);
    const plan_rows_side got = dist_message(port, w->got, t->n_in, dtype);
    TRY(port->ops->fork(port->carrier, w->run->stream, err));
    TRY(dist_move_own(port, w->run, &sent, t->out, t->n_out, port->ops->side(port->carrier),
                      err));
    TRY(dist_exchange_on(port, &sent, t->out_keys, &got, t->in_keys, 3, err));
    return port->ops->mark(port->carrier, &w->event, err);
}

static saccade_status place_others(work *w, saccade_error *err)
{
    const dist_port *port = &w->g->port;
    const dist_tables *t = &w->g->tables;
    const plan_rows_side got =
        dist_message(port, w->got, t->n_in, w->d->plan->problem.kv_dtype);
    const plan_rows_side to = pools(w);
    return dist_move(port, &got, &to, t->in, t->n_in, w->run->stream, err);
}

static saccade_status place_own(work *w, saccade_error *err)
{
    const dist_tables *t = &w->g->tables;
    const plan_rows_side to = pools(w);
    return dist_move_own(&w->g->port, w->run, &to, t->own, t->n_own, w->run->stream, err);
}

static saccade_status await_others(const work *w, saccade_error *err)
{
    return w->event ? w->g->port.ops->await(w->g->port.carrier, w->event, w->run->stream, err)
                    : SACCADE_OK;
}

/* plan_run.between of a forward run: the others' keys are there. */
static saccade_status arrive(void *user, saccade_error *err)
{
    work *w = user;
    TRY(await_others(w, err));
    return place_others(w, err);
}

/* ---- runs ---- */

static saccade_status begin(saccade_dist *d, int32_t device, plan_run *run, work *w,
                            saccade_error *err)
{
    TRY(dist_check_tiles(d, d->plan, &run->sizes, err));
    if (d->n_rows)
        TRY(dist_check_held(d, run->block_mask, err));
    TRY(dist_device_reserve(d, device, run->sizes.B, err));
    dist_device *g = d->device;
    *w = (work){.d = d, .g = g, .run = run, .got = g->kept ? g->kept : g->got};
    return SACCADE_OK;
}

static saccade_status forward(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    plan_run part = *w->run;
    TRY(start_gather(w, err));
    if (!d->n_rows)
        return await_others(w, err);
    TRY(place_own(w, err));
    const plan_rows_side keys = pools(w);
    part.k = &keys.t[0];
    part.v = &keys.t[1];
    part.rows = &d->rows;
    if (far_keys(d)) {
        part.between = arrive;
        part.between_user = w;
        return d->plan->solver->forward(d->plan, &part, err);
    }
    TRY(d->plan->solver->forward(d->plan, &part, err));
    return await_others(w, err); /* K and V are the caller's again */
}

saccade_status dist_device_forward(saccade_dist *d, plan_run *run, saccade_error *err)
{
    work w;
    const saccade_tensor *any = dist_any_tensor(run, NULL);
    if (!any)
        return SACCADE_OK;
    TRY(begin(d, any->device.index, run, &w, err));
    const saccade_status status = forward(&w, err);
    d->device->kept = NULL;
    return status;
}

/* ---- backward ---- */

/* What comes on the side stream waits for gradients of others' keys (plan_far.send). */
static saccade_status await_own(work *w, uint32_t added, saccade_error *err)
{
    const dist_port *port = &w->g->port;
    w->g->expected += added;
    return added ? port->ops->await_count(port->carrier, w->g->told, w->g->expected, err)
                 : port->ops->fork(port->carrier, w->run->stream, err);
}

/* plan_far.send */
static saccade_status send_back(void *user, uint32_t added, saccade_error *err)
{
    work *w = user;
    const dist_port *port = &w->g->port;
    const dist_tables *t = &w->g->tables;
    const uint32_t wanted = dist_wanted(w->d);
    if (!wanted)
        return SACCADE_OK;
    const plan_rows_side made = gradients(w);
    const plan_rows_side got = dist_message(port, w->g->got, t->n_out, SACCADE_F32);
    const plan_rows_side sent = dist_message(port, w->g->sent, t->n_in, SACCADE_F32);
    TRY(await_own(w, added, err));
    TRY(dist_move(port, &made, &sent, t->in_back, t->n_in, port->ops->side(port->carrier),
                  err));
    TRY(dist_exchange_on(port, &sent, t->in_keys, &got, t->out_keys, wanted, err));
    return port->ops->mark(port->carrier, &w->event, err);
}

/* Whether kernels of any kind store rows of it: they do so by 16 bytes. */
static int takes_kernels(const saccade_tensor *t)
{
    const int64_t bytes = t ? (int64_t)saccade_dtype_bytes(t->dtype) : 0;
    int64_t all = t ? (int64_t)(uintptr_t)t->data | t->shape[3] * bytes : 0;
    for (int i = 0; t && i < 3; i++)
        all |= t->stride[i] * bytes;
    return all % 16 == 0;
}

static int are_stored_alone(const work *w)
{
    return takes_kernels(w->to->dk) && takes_kernels(w->to->dv);
}

static saccade_status add_up(const work *w, saccade_error *err)
{
    const dist_tables *t = &w->g->tables;
    TRY(await_others(w, err));
    if (!dist_wanted(w->d))
        return SACCADE_OK;
    const plan_rows_side made = gradients(w);
    const plan_rows_side got = dist_message(&w->g->port, w->g->got, t->n_out, SACCADE_F32);
    return dist_add_on_device(&w->g->port, t, &made, &got,
                              are_stored_alone(w) ? &w->g->alone : NULL, w->to, w->run->stream,
                              err);
}

static saccade_status compute_back(work *w, saccade_error *err)
{
    saccade_dist *d = w->d;
    const plan_rows_side keys = pools(w), made = gradients(w);
    const uint32_t wanted = dist_wanted(d);
    const size_t own = dist_captured_bytes(d, w->to);
    plan_gradients part = *w->to;
    plan_run run = *w->run;
    const plan_far far = {.send = far_keys(d) ? send_back : NULL,
                          .user = w,
                          .told = w->g->told,
                          .row = are_stored_alone(w) ? w->g->alone.row : NULL,
                          .dk = wanted & 1 ? w->to->dk : NULL,
                          .dv = wanted & 2 ? w->to->dv : NULL,
                          .added = w->to->added};
    run.k = &keys.t[0];
    run.v = &keys.t[1];
    run.rows = &d->rows;
    run.far = &far;
    run.workspace = (char *)run.workspace + own;
    run.workspace_bytes -= own;
    dist_captured_part(&w->captured, &part);
    part.dk = wanted & 1 ? &made.t[0] : NULL;
    part.dv = wanted & 2 ? &made.t[1] : NULL;
    part.added &= SACCADE_GRADIENT_Q;
    return d->plan->solver->backward(d->plan, &run, &part, err);
}

static saccade_status backward(work *w, saccade_error *err)
{
    const saccade_dist *d = w->d;
    TRY(dist_captured_begin(&w->g->port, w->to, w->run->workspace, w->run->stream, &w->captured,
                            err));
    if (!w->g->kept)
        TRY(start_gather(w, err));
    if (far_keys(d) && !w->g->kept)
        TRY(await_others(w, err));
    if (!far_keys(d)) /* nothing of others is made here */
        TRY(send_back(w, 0, err));
    if (d->n_rows) {
        TRY(place_own(w, err));
        TRY(place_others(w, err));
        TRY(compute_back(w, err));
    }
    TRY(add_up(w, err));
    return dist_captured_end(&w->g->port, &w->captured, w->to, w->run->stream, err);
}

size_t dist_device_backward_workspace(const saccade_dist *d, int64_t B,
                                      const plan_gradients *to)
{
    const saccade_sizes sizes = dist_sizes(d, B);
    return sum_bytes(dist_captured_bytes(d, to), dist_captured_solver(d, &sizes, to));
}

saccade_status dist_device_backward(saccade_dist *d, plan_run *run, const plan_gradients *to,
                                    saccade_error *err)
{
    work w;
    const saccade_tensor *any = dist_any_tensor(run, to);
    if (!any)
        return SACCADE_OK;
    TRY(begin(d, any->device.index, run, &w, err));
    w.to = to;
    const saccade_status status = backward(&w, err);
    d->device->kept = NULL;
    return status;
}
