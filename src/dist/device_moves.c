/* Rows of keys and gradients moved on a device, and exchanged on its side stream. */
#include "dist/device.h"

#include "base/status.h"

#include <string.h>

saccade_status dist_port_open(saccade_dist *d, int32_t index, int64_t B, dist_port *out,
                              saccade_error *err)
{
    *out = (dist_port){.dist = d, .ops = d->plan->backend->carry, .index = index, .B = B};
    FAIL_AT(d->KV > INT32_MAX / 2, SACCADE_ELIMIT, "shards", 0, 0,
            "got %lld keys, expected less than 2^30 on a GPU", (long long)d->KV);
    return out->ops->open(d->plan, index, &out->carrier, err);
}

void dist_port_close(dist_port *port)
{
    if (port->carrier)
        port->ops->close(port->carrier);
}

saccade_status dist_port_reserve(const dist_port *port, size_t bytes, void **out,
                                 saccade_error *err)
{
    return port->ops->reserve(port->carrier, bytes ? bytes : 1, NULL, out, err);
}

const saccade_tensor *dist_any_tensor(const plan_run *run, const plan_gradients *to)
{
    const saccade_tensor *found = run->q ? run->q : run->k;
    if (found || !to)
        return found;
    found = to->sinks;
    for (int c = 0; c < MOD_MAX_CAPTURES && !found; c++)
        found = to->captures[c].dtype != SACCADE_NONE ? &to->captures[c] : NULL;
    return found;
}

/* ---- sides of a move ---- */

int64_t dist_dim_of(const saccade_dist *d, int i)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    return i ? s->Dv : s->D;
}

size_t dist_rows_bytes(const saccade_dist *d, int64_t rows, size_t element)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    return (size_t)(rows * s->Hkv * (s->D + s->Dv)) * element;
}

static saccade_tensor tensor_of(const dist_port *port, int i, void *data, int64_t keys,
                                saccade_dtype dtype)
{
    const saccade_dist *d = port->dist;
    const int64_t shape[4] = {port->B, d->plan->problem.sizes.Hkv, keys, dist_dim_of(d, i)};
    saccade_tensor t = saccade_tensor_of(data, dtype, 4, shape);
    t.device = (saccade_device){SACCADE_CUDA, port->index};
    return t;
}

plan_rows_side dist_pools(const dist_port *port, void *const data[2], int64_t keys,
                          saccade_dtype dtype)
{
    return (plan_rows_side){
        {tensor_of(port, 0, data[0], keys, dtype), tensor_of(port, 1, data[1], keys, dtype)},
        0};
}

plan_rows_side dist_message(const dist_port *port, char *data, int64_t rows,
                            saccade_dtype dtype)
{
    plan_rows_side side = {.is_packed = 1};
    for (int i = 0; i < 2; i++) {
        side.t[i] = tensor_of(port, i, data, port->dist->KV, dtype);
        data += (size_t)(port->B * rows * side.t[i].shape[1] * side.t[i].shape[3])
                * saccade_dtype_bytes(dtype);
    }
    return side;
}

saccade_status dist_move(const dist_port *port, const plan_rows_side *from,
                         const plan_rows_side *to, const plan_row_pair *pairs, int64_t n,
                         void *stream, saccade_error *err)
{
    const plan_move m = {.from = *from, .to = *to, .pairs = pairs, .n = n, .B = port->B};
    return n ? port->ops->move(port->carrier, &m, stream, err) : SACCADE_OK;
}

saccade_status dist_move_own(const dist_port *port, const plan_run *run,
                             const plan_rows_side *to, const plan_row_pair *pairs, int64_t n,
                             void *stream, saccade_error *err)
{
    if (!n)
        return SACCADE_OK; /* a rank that holds no keys has no tensors of them */
    const plan_rows_side own = {{*run->k, *run->v}, 0};
    return dist_move(port, &own, to, pairs, n, stream, err);
}

/* ---- exchange ---- */

/* Messages to, or from, each other rank, of the lanes wanted. */
static int32_t list_messages(const dist_port *port, const plan_rows_side *side,
                             const int64_t *keys, uint32_t wanted, saccade_message *to)
{
    const saccade_transport *transport = &port->dist->transport;
    int32_t n = 0;
    for (int i = 0; i < 2; i++) {
        const saccade_tensor *t = &side->t[i];
        const size_t row =
            (size_t)(port->B * t->shape[1] * t->shape[3]) * saccade_dtype_bytes(t->dtype);
        char *at = t->data;
        for (int32_t p = 0; p < transport->ranks; p++) {
            if (p == transport->rank)
                continue;
            const size_t bytes = (size_t)keys[p] * row;
            if (bytes && wanted >> i & 1)
                to[n++] = (saccade_message){at, bytes, p};
            at += bytes;
        }
    }
    return n;
}

saccade_status dist_exchange_messages(const dist_port *port, const saccade_message *sends,
                                      int32_t n, const saccade_message *receives, int32_t m,
                                      saccade_error *err)
{
    const saccade_transport *t = &port->dist->transport;
    if (n + m == 0)
        return SACCADE_OK;
    const int failed = t->exchange_on(t->user, sends, n, receives, m,
                                      port->ops->side(port->carrier), t->seconds);
    FAIL_AT(failed && port->ops->is_captured(port->carrier), SACCADE_EINVAL, "stream", 0, 0,
            "got one that captures a CUDA graph, expected none: this transport's exchanges "
            "cannot be captured (code %d)",
            failed);
    FAIL_AT(failed, SACCADE_EPEER, "transport", 0, 0,
            "another rank failed, or did not answer rank %d within %g s (code %d)", t->rank,
            t->seconds, failed);
    return SACCADE_OK;
}

saccade_status dist_exchange_on(const dist_port *port, const plan_rows_side *sent,
                                const int64_t *sent_keys, const plan_rows_side *got,
                                const int64_t *got_keys, uint32_t wanted, saccade_error *err)
{
    const saccade_dist *d = port->dist;
    saccade_message *sends = d->messages;
    saccade_message *receives = sends + 4 * (size_t)d->transport.ranks;
    const int32_t n = list_messages(port, sent, sent_keys, wanted, sends);
    const int32_t m = list_messages(port, got, got_keys, wanted, receives);
    return dist_exchange_messages(port, sends, n, receives, m, err);
}

/* ---- gradients ---- */

uint32_t dist_wanted(const saccade_dist *d)
{
    const uint32_t bits = d->plan->problem.gradients;
    return (bits & SACCADE_GRADIENT_K ? 1u : 0) | (bits & SACCADE_GRADIENT_V ? 2u : 0);
}

/* These rows of a tensor. */
static saccade_tensor rows_from(const saccade_tensor *t, int64_t first, int64_t rows)
{
    saccade_tensor cut = *t;
    cut.data = (char *)t->data + first * t->stride[2] * (int64_t)saccade_dtype_bytes(t->dtype);
    cut.shape[2] = rows;
    return cut;
}

saccade_status dist_add_on_device(const dist_port *port, const dist_tables *tables,
                                  const plan_rows_side *pool, const plan_rows_side *got,
                                  const dist_alone *alone, const plan_gradients *to,
                                  void *stream, saccade_error *err)
{
    const saccade_tensor *any = to->dk ? to->dk : to->dv;
    if (!tables->own_keys || !any)
        return SACCADE_OK;
    const plan_sum s = {
        .pool = *pool,
        .got = *got,
        .to = {{rows_from(to->dk ? to->dk : any, tables->own_first, tables->own_keys),
                rows_from(to->dv ? to->dv : any, tables->own_first, tables->own_keys)},
               0},
        .start = tables->start,
        .terms = tables->terms,
        .rows = alone ? alone->others : NULL,
        .n = alone ? alone->n_others : tables->own_keys,
        .B = port->B,
        .wanted = dist_wanted(port->dist),
        .added = (to->added & SACCADE_GRADIENT_K ? 1u : 0)
                 | (to->added & SACCADE_GRADIENT_V ? 2u : 0),
    };
    return port->ops->sum(port->carrier, &s, stream, err);
}
