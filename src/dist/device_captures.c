/* Gradients of captures and sinks where tensors lie on a device: every rank makes its part in
 * f32, all get those of all, and each adds them up in the order of ranks, as return.c does on
 * the host. So they are whole, and the same bits on every rank. */
#include "dist/device.h"

#include "base/integers.h"
#include "base/status.h"

static int64_t elements(const plan_gradients *to)
{
    return dist_return_captured(to->captures, to->sinks).capture_elements;
}

size_t dist_captured_bytes(const saccade_dist *d, const plan_gradients *to)
{
    const int64_t n = elements(to) * d->transport.ranks;
    return (size_t)round_up(n * (int64_t)sizeof(float), 256);
}

size_t dist_captured_solver(const saccade_dist *d, const saccade_sizes *sizes,
                            const plan_gradients *to)
{
    saccade_tensor own[MOD_MAX_CAPTURES], sinks;
    const plan_gradients part = {.captures = own, .positions = to->positions};
    dist_lay_captures(NULL, to, own, &sinks);
    return plan_backward_workspace(d->plan, sizes, &part);
}

saccade_status dist_captured_begin(const dist_port *port, const plan_gradients *to,
                                   void *memory, void *stream, dist_captured *out,
                                   saccade_error *err)
{
    const saccade_device device = {SACCADE_CUDA, port->index};
    *out = (dist_captured){.n = elements(to), .parts = memory};
    if (!out->n)
        return SACCADE_OK;
    float *own = out->parts + port->dist->transport.rank * out->n;
    dist_lay_captures(own, to, out->own, &out->sinks);
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        out->own[c].device = device;
    out->sinks.device = device;
    return port->ops->clear(port->carrier, own, (size_t)out->n * sizeof *own, stream, err);
}

void dist_captured_part(const dist_captured *x, plan_gradients *part)
{
    if (!x->n)
        return;
    part->captures = x->own;
    part->sinks = part->sinks ? &x->sinks : NULL;
}

/* This rank's part to all others, and theirs. */
static saccade_status exchange(const dist_port *port, const dist_captured *x, void *stream,
                               saccade_error *err)
{
    const saccade_dist *d = port->dist;
    const int32_t ranks = d->transport.ranks, me = d->transport.rank;
    const size_t bytes = (size_t)x->n * sizeof *x->parts;
    saccade_message *sends = d->messages, *receives = sends + ranks;
    void *event;
    int32_t n = 0;
    for (int32_t r = 0; r < ranks; r++) {
        if (r == me)
            continue;
        sends[n] = (saccade_message){x->parts + me * x->n, bytes, r};
        receives[n++] = (saccade_message){x->parts + r * x->n, bytes, r};
    }
    TRY(port->ops->fork(port->carrier, stream, err));
    TRY(dist_exchange_messages(port, sends, n, receives, n, err));
    TRY(port->ops->mark(port->carrier, &event, err));
    return port->ops->await(port->carrier, event, stream, err);
}

/* own: this rank's part of the tensor. */
static saccade_status add_up(const dist_port *port, const dist_captured *x,
                             const saccade_tensor *own, const saccade_tensor *to, int is_added,
                             void *stream, saccade_error *err)
{
    const int32_t rank = port->dist->transport.rank;
    const plan_total total = {.parts = (const float *)own->data - rank * x->n,
                              .step = x->n,
                              .n_parts = port->dist->transport.ranks,
                              .to = to,
                              .is_added = is_added};
    return port->ops->total(port->carrier, &total, stream, err);
}

saccade_status dist_captured_end(const dist_port *port, const dist_captured *x,
                                 const plan_gradients *to, void *stream, saccade_error *err)
{
    const int adds_captures = (to->added & SACCADE_GRADIENT_CAPTURES) != 0;
    const int adds_sinks = (to->added & SACCADE_GRADIENT_SINKS) != 0;
    if (!x->n)
        return SACCADE_OK;
    TRY(exchange(port, x, stream, err));
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (to->captures[c].dtype != SACCADE_NONE)
            TRY(add_up(port, x, &x->own[c], &to->captures[c], adds_captures, stream, err));
    return to->sinks ? add_up(port, x, &x->sinks, to->sinks, adds_sinks, stream, err)
                     : SACCADE_OK;
}
