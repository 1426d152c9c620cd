/* Staged mode on a device that has a carrier: while one window of keys is computed the next is
 * packed, exchanged and placed on the side stream, and gradients of the one before travel.
 *
 *     side    keys 0 -> keys 1 -> (gradients 0) -> keys 2 -> (gradients 1) -> ..
 *     stream            window 0 -> merge -> window 1 -> merge -> (sums 0) -> ..
 *
 * Keys lie in two rooms of a window each; results are added up in f32. */
#include "dist/device.h"
#include "dist/staged.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>

struct dist_stage_device {
    dist_port port;
    dist_tables *tables;               /* [windows] */
    void *pool[2][2], *gradient[2][2]; /* [room][K, V], dK and dV */
    char *sent, *got, *back[2];        /* messages; gradients from others, by room */
};

/* ---- memory ---- */

static saccade_status reserve_rooms(const saccade_dist *d, dist_stage_device *g,
                                    saccade_error *err)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const dist_stages *stages = d->stages;
    const size_t element = saccade_dtype_bytes(d->plan->problem.kv_dtype);
    const int is_trained = dist_wanted(d) != 0;
    const int64_t B = g->port.B;
    const size_t in = dist_rows_bytes(d, B * stages->in_most, is_trained ? 4 : element);
    const size_t out = dist_rows_bytes(d, B * stages->out_most, element);
    void *at;
    for (int i = 0; i < 4; i++) {
        const size_t n = (size_t)(B * s->Hkv * stages->size * dist_dim_of(d, i % 2));
        TRY(dist_port_reserve(&g->port, n * element, &g->pool[i / 2][i % 2], err));
        if (is_trained)
            TRY(dist_port_reserve(&g->port, n * sizeof(float), &g->gradient[i / 2][i % 2],
                                  err));
    }
    for (int i = 0; i < 2 && is_trained; i++) {
        TRY(dist_port_reserve(&g->port, dist_rows_bytes(d, B * stages->out_most, 4), &at, err));
        g->back[i] = at;
    }
    TRY(dist_port_reserve(&g->port, is_trained && in > out ? in : out, &at, err));
    g->sent = at;
    TRY(dist_port_reserve(&g->port, in, &at, err));
    g->got = at;
    return SACCADE_OK;
}

static saccade_status fill_device(saccade_dist *d, dist_stage_device *g, int32_t index,
                                  int64_t B, saccade_error *err)
{
    const dist_stages *s = d->stages;
    g->tables = calloc((size_t)s->n, sizeof *g->tables);
    FAIL_IF_NULL(g->tables);
    TRY(dist_port_open(d, index, B, &g->port, err));
    TRY(g->port.ops->load_merge(g->port.carrier, d->plan, err));
    for (int64_t i = 0; i < s->n; i++) {
        const dist_window *w = &s->window[i];
        const dist_span span = {&w->in, &w->out, w->first, w->own_first, w->own_keys};
        TRY(dist_place_tables(&g->port, &span, &g->tables[i], err));
    }
    return reserve_rooms(d, g, err);
}

void dist_stage_device_close(dist_stage_device *g)
{
    if (!g)
        return;
    dist_port_close(&g->port);
    free(g->tables);
    free(g);
}

static saccade_status open_for(saccade_dist *d, int32_t index, int64_t B, saccade_error *err)
{
    dist_stage_device *g = d->stages->device;
    if (g && g->port.index == index && g->port.B == B)
        return SACCADE_OK;
    g = calloc(1, sizeof *g);
    FAIL_IF_NULL(g);
    const saccade_status status = fill_device(d, g, index, B, err);
    if (status != SACCADE_OK) {
        dist_stage_device_close(g);
        return status;
    }
    dist_stage_device_close(d->stages->device);
    d->stages->device = g;
    return SACCADE_OK;
}

/* ---- a run ---- */

typedef struct device_run {
    saccade_dist *d;
    dist_stage_device *g;
    const plan_run *run;
    const stage_mask *masks;
    dist_captured captured;
    void *keys;   /* event on the side stream: the next window's are placed */
    int64_t last; /* window that this rank's rows touch; -1: none */
} device_run;

static saccade_status check_position(const saccade_tensor *t, const char *name,
                                     saccade_error *err)
{
    FAIL_AT(t->dtype != SACCADE_NONE && (t->rank || t->device.kind != SACCADE_CPU),
            SACCADE_EINVAL, name, 0, 0,
            "got a tensor of rank %d on %s, expected one number on the host in staged mode on "
            "GPUs, whose windows it places",
            t->rank, t->device.kind == SACCADE_CPU ? "the host" : "a GPU");
    return SACCADE_OK;
}

enum { MOST_MERGED = 65535 /* batches times heads, of one launch */ };

static saccade_status begin(saccade_dist *d, int32_t device, const plan_run *run, device_run *r,
                            saccade_error *err)
{
    const dist_stages *s = d->stages;
    const int64_t H = d->plan->problem.sizes.H;
    *r = (device_run){.d = d, .run = run, .last = -1};
    FAIL_AT(
        run->sizes.B * H > MOST_MERGED, SACCADE_ELIMIT, "q", 0, 0,
        "got %lld batches of %lld heads, expected at most %d together in staged mode on GPUs",
        (long long)run->sizes.B, (long long)H, MOST_MERGED);
    TRY(stage_start(d, run, &r->masks, err));
    TRY(check_position(&run->positions.kv_offset, "kv_offset", err));
    TRY(check_position(&run->positions.kv_len, "kv_len", err));
    TRY(open_for(d, device, run->sizes.B, err));
    r->g = s->device;
    for (int64_t w = 0; w < s->n; w++)
        r->last = s->window[w].in.all ? w : r->last;
    return SACCADE_OK;
}

/* Puts on the side stream what brings the keys of window w to their room. */
static saccade_status ask(device_run *r, int64_t w, saccade_error *err)
{
    dist_stage_device *g = r->g;
    const dist_port *port = &g->port;
    const dist_tables *t = &g->tables[w];
    const saccade_dtype dtype = r->d->plan->problem.kv_dtype;
    const plan_rows_side sent = dist_message(port, g->sent, t->n_out, dtype);
    const plan_rows_side got = dist_message(port, g->got, t->n_in, dtype);
    const plan_rows_side to =
        dist_pools(port, g->pool[w % 2], r->d->stages->window[w].keys, dtype);
    void *side = port->ops->side(port->carrier);
    TRY(port->ops->fork(port->carrier, r->run->stream, err));
    TRY(dist_move_own(port, r->run, &sent, t->out, t->n_out, side, err));
    TRY(dist_exchange_on(port, &sent, t->out_keys, &got, t->in_keys, 3, err));
    TRY(dist_move_own(port, r->run, &to, t->own, t->n_own, side, err));
    TRY(dist_move(port, &got, &to, t->in, t->n_in, side, err));
    return port->ops->mark(port->carrier, &r->keys, err);
}

/* What comes on the stream has the keys of window w; those of the next are on their way. */
static saccade_status next_keys(device_run *r, int64_t w, saccade_error *err)
{
    const dist_port *port = &r->g->port;
    if (w == 0)
        TRY(ask(r, 0, err));
    TRY(port->ops->await(port->carrier, r->keys, r->run->stream, err));
    return w + 1 < r->d->stages->n ? ask(r, w + 1, err) : SACCADE_OK;
}

/* A run of one window, and what it points to. */
typedef struct window_run {
    plan_run run;
    plan_rows_side keys;
    int32_t kv_offset, kv_len;
} window_run;

static int64_t number_of(const saccade_tensor *t, int64_t otherwise)
{
    return t->dtype == SACCADE_NONE ? otherwise : *(const int32_t *)t->data;
}

static void open_window(const device_run *r, int64_t w, window_run *out)
{
    const dist_window *window = &r->d->stages->window[w];
    const plan_positions *at = &r->run->positions;
    const int64_t left = number_of(&at->kv_len, r->d->KV) - window->first;
    out->run = *r->run;
    out->keys =
        dist_pools(&r->g->port, r->g->pool[w % 2], window->keys, r->d->plan->problem.kv_dtype);
    out->run.k = &out->keys.t[0];
    out->run.v = &out->keys.t[1];
    out->run.rows = &r->d->rows;
    out->run.block_mask = r->masks ? r->masks->mask[w] : NULL;
    out->run.sizes.KV = window->keys;
    out->kv_offset = (int32_t)(number_of(&at->kv_offset, 0) + window->first);
    out->kv_len = (int32_t)(left < 0 ? 0 : smaller(left, window->keys));
    out->run.positions.kv_offset = saccade_tensor_of(&out->kv_offset, SACCADE_I32, 0, NULL);
    if (at->kv_len.dtype != SACCADE_NONE)
        out->run.positions.kv_len = saccade_tensor_of(&out->kv_len, SACCADE_I32, 0, NULL);
}

static void place(size_t bytes, size_t *off, size_t *end)
{
    *off = *end;
    *end += (bytes + 255) / 256 * 256;
}

static saccade_tensor floats(const device_run *r, size_t at, int64_t dim)
{
    const int64_t shape[4] = {r->run->sizes.B, r->d->plan->problem.sizes.H, r->d->n_rows, dim};
    saccade_tensor t =
        saccade_tensor_of((char *)r->run->workspace + at, SACCADE_F32, dim ? 4 : 3, shape);
    t.device = (saccade_device){SACCADE_CUDA, r->g->port.index};
    return t;
}

/* ---- forward ---- */

typedef struct forward_memory {
    size_t sum, lse, part_out, part_lse, part_max, bytes;
} forward_memory;

static forward_memory forward_memory_of(const saccade_dist *d, int64_t B)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const size_t rows = (size_t)(B * s->H * d->n_rows) * sizeof(float);
    forward_memory m = {.bytes = 0};
    place(rows * (size_t)s->Dv, &m.sum, &m.bytes);
    place(rows, &m.lse, &m.bytes);
    place(rows * (size_t)s->Dv, &m.part_out, &m.bytes);
    place(rows, &m.part_lse, &m.bytes);
    place(rows, &m.part_max, &m.bytes);
    return m;
}

size_t dist_stage_device_workspace(const saccade_dist *d, int64_t B)
{
    const saccade_sizes s = stage_sizes(d, B, d->stages->size);
    return sum_bytes(forward_memory_of(d, B).bytes, plan_workspace(d->stages->partial, &s));
}

/* Adds a window's part, or none. */
static saccade_status merge(const device_run *r, const forward_memory *m, int has_part,
                            int is_first, int is_last, saccade_error *err)
{
    const saccade_sizes *s = &r->d->plan->problem.sizes;
    char *memory = r->run->workspace;
    const plan_merge x = {
        .part = has_part ? (float *)(void *)(memory + m->part_out) : NULL,
        .part_lse = (float *)(void *)(memory + m->part_lse),
        .part_max = has_part ? (float *)(void *)(memory + m->part_max) : NULL,
        .sum = (float *)(void *)(memory + m->sum),
        .lse = (float *)(void *)(memory + m->lse),
        .out = r->run->out,
        .out_lse = r->run->lse,
        .row_max = r->run->row_max,
        .sinks = &r->run->sinks,
        .B = r->run->sizes.B,
        .H = s->H,
        .rows = r->d->n_rows,
        .dim = s->Dv,
        .is_first = is_first,
        .is_last = is_last,
    };
    return r->g->port.ops->merge(r->g->port.carrier, &x, r->run->stream, err);
}

static saccade_status forward_window(const device_run *r, int64_t w, const forward_memory *m,
                                     saccade_error *err)
{
    const saccade_plan *partial = r->d->stages->partial;
    const int64_t dim = r->d->plan->problem.sizes.Dv;
    const saccade_tensor out = floats(r, m->part_out, dim), lse = floats(r, m->part_lse, 0),
                         most = floats(r, m->part_max, 0);
    window_run part;
    open_window(r, w, &part);
    part.run.sinks.dtype = SACCADE_NONE;
    part.run.sinks.data = NULL;
    part.run.out = &out;
    part.run.lse = &lse;
    part.run.row_max = r->run->row_max ? &most : NULL;
    part.run.workspace = (char *)r->run->workspace + m->bytes;
    part.run.workspace_bytes = r->run->workspace_bytes - m->bytes;
    return partial->solver->forward(partial, &part.run, err);
}

static saccade_status forward(device_run *r, saccade_error *err)
{
    const dist_stages *s = r->d->stages;
    const forward_memory m = forward_memory_of(r->d, r->run->sizes.B);
    int is_begun = 0;
    for (int64_t w = 0; w < s->n; w++) {
        TRY(next_keys(r, w, err));
        if (!s->window[w].in.all)
            continue;
        TRY(forward_window(r, w, &m, err));
        TRY(merge(r, &m, 1, !is_begun, w == r->last, err));
        is_begun = 1;
    }
    return is_begun || !r->d->n_rows ? SACCADE_OK : merge(r, &m, 0, 1, 1, err);
}

saccade_status dist_stage_device_forward(saccade_dist *d, plan_run *run, saccade_error *err)
{
    device_run r;
    const saccade_tensor *any = dist_any_tensor(run, NULL);
    if (!any)
        return SACCADE_OK;
    TRY(begin(d, any->device.index, run, &r, err));
    return forward(&r, err);
}

/* ---- backward ---- */

static size_t dq_bytes(const saccade_dist *d, int64_t B)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    size_t at, bytes = 0;
    place((size_t)(B * s->H * d->n_rows * s->D) * sizeof(float), &at, &bytes);
    return bytes;
}

/* Before the solver's own: dQ in f32, then what ranks make of captures' gradients. */
static size_t own_bytes(const saccade_dist *d, int64_t B, const plan_gradients *to)
{
    return dq_bytes(d, B) + dist_captured_bytes(d, to);
}

/* Positions of any window: where sums of captures go is to be the same in all. */
static plan_positions of_windows(const plan_gradients *to)
{
    plan_positions x = {.pages = NULL};
    if (to->positions)
        x = *to->positions;
    x.kv_offset = saccade_tensor_of(NULL, SACCADE_I32, 0, NULL);
    x.kv_offset.device.kind = SACCADE_CUDA; /* not known */
    return x;
}

/* The last window may be shorter, whose captures may have sums in more parts. */
size_t dist_stage_device_backward_workspace(const saccade_dist *d, int64_t B,
                                            const plan_gradients *to)
{
    const dist_stages *stages = d->stages;
    const plan_positions positions = of_windows(to);
    plan_gradients each = *to;
    size_t most = 0;
    each.positions = &positions;
    for (int i = 0; i < 2; i++) {
        const int64_t keys = i ? stages->window[stages->n - 1].keys : stages->size;
        const saccade_sizes s = stage_sizes(d, B, keys);
        const size_t bytes = dist_captured_solver(d, &s, &each);
        most = bytes > most ? bytes : most;
    }
    return sum_bytes(own_bytes(d, B, to), most);
}

static plan_rows_side gradients_of(const device_run *r, int64_t w)
{
    return dist_pools(&r->g->port, r->g->gradient[w % 2], r->d->stages->window[w].keys,
                      SACCADE_F32);
}

/* Sinks have the same gradients in each: the first one makes them. */
static saccade_status back_window(const device_run *r, int64_t w, const plan_gradients *to,
                                  int is_begun, saccade_error *err)
{
    const saccade_dist *d = r->d;
    const size_t own = own_bytes(d, r->run->sizes.B, to);
    const saccade_tensor dq = floats(r, 0, d->plan->problem.sizes.D);
    const plan_rows_side made = gradients_of(r, w);
    const uint32_t wanted = dist_wanted(d);
    const plan_positions positions = of_windows(to);
    plan_gradients part = *to;
    window_run x;
    part.positions = &positions;
    open_window(r, w, &x);
    dist_captured_part(&r->captured, &part);
    part.sinks = is_begun ? NULL : part.sinks;
    part.dq = to->dq ? &dq : NULL;
    part.dk = wanted & 1 ? &made.t[0] : NULL;
    part.dv = wanted & 2 ? &made.t[1] : NULL;
    part.added = is_begun ? SACCADE_GRADIENT_Q | SACCADE_GRADIENT_CAPTURES : 0;
    x.run.workspace = (char *)r->run->workspace + own;
    x.run.workspace_bytes = r->run->workspace_bytes - own;
    return d->plan->solver->backward(d->plan, &x.run, &part, err);
}

/* Puts the way back of a window's gradients on the side stream. */
static saccade_status give_back(const device_run *r, int64_t w, void **event,
                                saccade_error *err)
{
    const dist_port *port = &r->g->port;
    const dist_tables *t = &r->g->tables[w];
    const uint32_t wanted = dist_wanted(r->d);
    if (!wanted)
        return SACCADE_OK;
    const plan_rows_side made = gradients_of(r, w);
    const plan_rows_side sent = dist_message(port, r->g->sent, t->n_in, SACCADE_F32);
    const plan_rows_side got = dist_message(port, r->g->back[w % 2], t->n_out, SACCADE_F32);
    TRY(port->ops->fork(port->carrier, r->run->stream, err));
    TRY(dist_move(port, &made, &sent, t->in_back, t->n_in, port->ops->side(port->carrier),
                  err));
    TRY(dist_exchange_on(port, &sent, t->in_keys, &got, t->out_keys, wanted, err));
    return port->ops->mark(port->carrier, event, err);
}

/* Adds up the gradients of window w when they are there. */
static saccade_status take_back(const device_run *r, int64_t w, void *event,
                                const plan_gradients *to, saccade_error *err)
{
    const dist_port *port = &r->g->port;
    const dist_tables *t = &r->g->tables[w];
    if (!dist_wanted(r->d))
        return SACCADE_OK;
    TRY(port->ops->await(port->carrier, event, r->run->stream, err));
    const plan_rows_side made = gradients_of(r, w);
    const plan_rows_side got = dist_message(port, r->g->back[w % 2], t->n_out, SACCADE_F32);
    return dist_add_on_device(port, t, &made, &got, NULL, to, r->run->stream, err);
}

/* From f32 to what is asked for; zeros where no window was touched. */
static saccade_status store_dq(const device_run *r, const plan_gradients *to,
                               saccade_error *err)
{
    const saccade_sizes *s = &r->d->plan->problem.sizes;
    float *sum = r->run->workspace;
    const plan_merge x = {.sum = sum,
                          .lse = r->last < 0 ? sum : NULL,
                          .out = to->dq,
                          .B = r->run->sizes.B,
                          .H = s->H,
                          .rows = r->d->n_rows,
                          .dim = s->D,
                          .is_first = r->last < 0,
                          .is_last = 1,
                          .is_added = (to->added & SACCADE_GRADIENT_Q) != 0};
    return r->g->port.ops->merge(r->g->port.carrier, &x, r->run->stream, err);
}

/* Rows that see no key at all may have gradients of sinks yet, from those of lse. */
static int has_work(const device_run *r, int64_t w, const plan_gradients *to)
{
    const int is_for_sinks = to->sinks && r->d->n_rows && r->last < 0 && w == 0;
    return r->d->stages->window[w].in.all || is_for_sinks;
}

static saccade_status backward(device_run *r, const plan_gradients *to, saccade_error *err)
{
    const dist_stages *s = r->d->stages;
    const dist_port *port = &r->g->port;
    char *parts = (char *)r->run->workspace + dq_bytes(r->d, r->run->sizes.B);
    void *before = NULL, *now = NULL;
    int is_begun = 0;
    TRY(dist_captured_begin(port, to, parts, r->run->stream, &r->captured, err));
    for (int64_t w = 0; w < s->n; w++) {
        const int is_run = has_work(r, w, to);
        TRY(next_keys(r, w, err));
        if (is_run)
            TRY(back_window(r, w, to, is_begun, err));
        is_begun |= is_run;
        TRY(give_back(r, w, &now, err));
        if (w)
            TRY(take_back(r, w - 1, before, to, err));
        before = now;
    }
    TRY(take_back(r, s->n - 1, before, to, err));
    if (to->dq && r->d->n_rows)
        TRY(store_dq(r, to, err));
    return dist_captured_end(port, &r->captured, to, r->run->stream, err);
}

saccade_status dist_stage_device_backward(saccade_dist *d, plan_run *run,
                                          const plan_gradients *to, saccade_error *err)
{
    device_run r;
    const saccade_tensor *any = dist_any_tensor(run, to);
    if (!any)
        return SACCADE_OK;
    TRY(begin(d, any->device.index, run, &r, err));
    return backward(&r, to, err);
}
