/* Runs by the public interface, on the host or on device 0. */
#include "support/run_case.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

int64_t run_count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

saccade_tensor run_make(saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    t.data = calloc((size_t)run_count(&t), saccade_dtype_bytes(dtype));
    assert_non_null(t.data);
    return t;
}

saccade_tensor run_like(const saccade_tensor *t, saccade_dtype dtype)
{
    return run_make(dtype, t->rank, t->shape);
}

double run_get(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

void run_put(const saccade_tensor *t, int64_t at, double x)
{
    const float narrow = (float)x;
    if (t->dtype == SACCADE_F64)
        ((double *)t->data)[at] = x;
    else
        convert_from_f32(t->dtype, &narrow,
                         (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype), 1);
}

void run_randomise(const saccade_tensor *t, uint64_t seed)
{
    for (int64_t i = 0; i < run_count(t); i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        run_put(t, i, (double)(seed >> 40) * 0x1p-23 - 1);
    }
}

void run_drop(run_results *r)
{
    saccade_tensor *all[] = {&r->out, &r->lse, &r->row_max, &r->dq,
                             &r->dk,  &r->dv,  &r->d_sinks};
    for (int i = 0; i < 7; i++)
        free(all[i]->data);
}

/* ---- where a back end's tensors lie ---- */

enum { MOVED = 32, BINDINGS = 8 };

/* What a run has on a device: views of it, and host tensors to be written back. */
typedef struct device_room {
    int is_used;
    int n, n_back;
    void *memory[MOVED];
    saccade_tensor view[MOVED];
    struct {
        void *host;
        const void *device;
        size_t bytes;
    } back[MOVED];
    saccade_binding bindings[BINDINGS];
    saccade_positions at;
} device_room;

static void *device_memory(device_room *room, size_t bytes)
{
    assert_true(room->n < MOVED);
    if (saccade_device_alloc(0, bytes, &room->memory[room->n], NULL) != SACCADE_OK)
        fail_msg("no memory on the device");
    return room->memory[room->n++];
}

static void copy(void *to, const void *from, size_t bytes)
{
    assert_int_equal(saccade_device_copy(0, to, from, bytes, NULL), SACCADE_OK);
}

static size_t bytes_of(const saccade_tensor *t)
{
    int64_t past = 1;
    for (int32_t d = 0; d < t->rank; d++)
        past += (t->shape[d] - 1) * t->stride[d];
    return (size_t)past * saccade_dtype_bytes(t->dtype);
}

/* t where the run reads it; scalars stay. is_output: also brought back at the end. */
static const saccade_tensor *place(device_room *room, const saccade_tensor *t, int is_output)
{
    if (!room->is_used || !t || t->rank == 0)
        return t;
    const int slot = room->n;
    const size_t bytes = bytes_of(t);
    room->view[slot] = *t;
    room->view[slot].data = device_memory(room, bytes);
    room->view[slot].device = (saccade_device){SACCADE_CUDA, 0};
    copy(room->view[slot].data, t->data, bytes);
    if (is_output) {
        room->back[room->n_back].host = t->data;
        room->back[room->n_back].device = room->view[slot].data;
        room->back[room->n_back++].bytes = bytes;
    }
    return &room->view[slot];
}

static const saccade_binding *place_bindings(device_room *room, const saccade_binding *all,
                                             int32_t n)
{
    if (!room->is_used)
        return all;
    for (int32_t i = 0; i < n; i++) {
        room->bindings[i] = all[i];
        room->bindings[i].tensor = *place(room, &all[i].tensor, 0);
    }
    return room->bindings;
}

static const saccade_positions *place_positions(device_room *room, const saccade_positions *at)
{
    if (!room->is_used || !at)
        return at;
    room->at = *at;
    room->at.q_offset = place(room, at->q_offset, 0);
    room->at.kv_offset = place(room, at->kv_offset, 0);
    room->at.kv_len = place(room, at->kv_len, 0);
    return &room->at;
}

static void *workspace(device_room *room, size_t *bytes)
{
    *bytes = (*bytes + 63) / 64 * 64;
    if (!*bytes)
        return NULL;
    return room->is_used ? device_memory(room, *bytes) : aligned_alloc(64, *bytes);
}

static void end(device_room *room, void *workspace)
{
    if (!room->is_used) {
        free(workspace);
        return;
    }
    if (saccade_device_synchronize(0, NULL) != SACCADE_OK)
        fail_msg("the device failed");
    for (int i = 0; i < room->n_back; i++)
        copy(room->back[i].host, room->back[i].device, room->back[i].bytes);
    for (int i = 0; i < room->n; i++)
        saccade_device_free(0, room->memory[i]);
}

/* ---- runs ---- */

static saccade_plan *plan_of(const run_options *o, device_room *room)
{
    saccade_error err = {0};
    saccade_context *context;
    saccade_plan *plan;
    const saccade_context_options options = {
        .size = sizeof options, .threads = 2, .level = o->level};
    room->is_used = o->problem.backend && strcmp(o->problem.backend, "cuda") == 0;
    assert_int_equal(saccade_context_create(&options, &context, &err), SACCADE_OK);
    if (saccade_plan_create(context, &o->problem, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    saccade_context_destroy(context);
    return plan;
}

void run_forward(const case_run *r, const run_options *o, run_results *to)
{
    const saccade_sizes *s = &r->sizes;
    const saccade_problem *p = &o->problem;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    const saccade_dtype stat = p->dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    saccade_error err = {0};
    device_room room = {0};
    saccade_plan *plan = plan_of(o, &room);
    saccade_forward_args a = r->args;
    *to = (run_results){.out = run_make(p->out_dtype ? p->out_dtype : p->dtype, 4, shape),
                        .lse = run_make(stat, 3, shape),
                        .row_max = run_make(stat, 3, shape)};
    a.q = place(&room, &r->q.t, 0);
    a.k = place(&room, &r->k.t, 0);
    a.v = place(&room, &r->v.t, 0);
    a.out = place(&room, &to->out, 1);
    a.lse = o->want == CASE_OUT_ONLY ? NULL : place(&room, &to->lse, 1);
    a.row_max = o->want == CASE_ALL ? place(&room, &to->row_max, 1) : NULL;
    a.sinks = place(&room, o->sinks, 0);
    a.dropout = o->is_dropout_there ? place(&room, o->dropout, 0) : o->dropout;
    a.positions = place_positions(&room, a.positions);
    a.bindings = place_bindings(&room, a.bindings, a.n_bindings);
    a.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace = workspace(&room, &a.workspace_bytes);
    if (saccade_forward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    end(&room, a.workspace);
    saccade_plan_destroy(plan);
}

void run_backward(const case_run *r, const run_options *o, run_results *f)
{
    saccade_error err = {0};
    device_room room = {0};
    saccade_plan *plan = plan_of(o, &room);
    saccade_backward_args a;
    const saccade_dtype dtype = o->problem.dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    f->dq = run_like(&r->q.t, dtype);
    f->dk = run_like(&r->k.t, dtype);
    f->dv = run_like(&r->v.t, dtype);
    saccade_backward_args_init(&a);
    if (o->sinks) {
        f->d_sinks = run_like(o->sinks, dtype);
        for (int64_t i = 0; i < run_count(o->sinks); i++)
            run_put(&f->d_sinks, i, o->start);
        a.d_sinks = place(&room, &f->d_sinks, 1);
    }
    a.accumulate = o->start != 0 ? SACCADE_GRADIENT_SINKS : 0;
    a.q = place(&room, &r->q.t, 0);
    a.k = place(&room, &r->k.t, 0);
    a.v = place(&room, &r->v.t, 0);
    a.out = place(&room, &f->out, 0);
    a.lse = place(&room, &f->lse, 0);
    a.d_out = place(&room, o->d_out, 0);
    a.d_lse = place(&room, o->d_lse, 0);
    a.d_q = place(&room, &f->dq, 1);
    a.d_k = place(&room, &f->dk, 1);
    a.d_v = place(&room, &f->dv, 1);
    a.sinks = place(&room, o->sinks, 0);
    a.dropout = o->is_dropout_there ? place(&room, o->dropout, 0) : o->dropout;
    a.positions = place_positions(&room, r->args.positions);
    a.bindings = place_bindings(&room, r->args.bindings, r->args.n_bindings);
    a.n_bindings = r->args.n_bindings;
    assert_int_equal(saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err),
                     SACCADE_OK);
    a.workspace = workspace(&room, &a.workspace_bytes);
    if (saccade_backward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    end(&room, a.workspace);
    saccade_plan_destroy(plan);
}

/* ---- comparison ---- */

double run_ulp(saccade_dtype dtype, double at)
{
    const int bits = dtype == SACCADE_BF16 ? 8 : dtype == SACCADE_F16 ? 11 : 24;
    return at == 0 ? 0 : ldexp(1, ilogb(at) - bits + 1);
}

void run_compare(const char *what, const case_run *r, const saccade_tensor *got,
                 const saccade_tensor *plain, const saccade_tensor *gold, int ulps)
{
    double error = 0, most = 0;
    for (int64_t i = 0; i < run_count(gold); i++)
        if (isfinite(run_get(gold, i))) {
            error = fmax(error, fabs(run_get(plain, i) - run_get(gold, i)));
            most = fmax(most, fabs(run_get(gold, i)));
        }
    const double bound = 2 * error + ulps * run_ulp(got->dtype, most);
    for (int64_t i = 0; i < run_count(gold); i++) {
        const double x = run_get(got, i), y = run_get(gold, i);
        const int is_same = isnan(y) ? isnan(x) : x == y;
        if (isfinite(y) ? !(fabs(x - y) <= bound) : !is_same)
            fail_msg("%s[%lld]: got %.9g, expected %.9g within %.3g, %s", what, (long long)i, x,
                     y, bound, r->c.problem);
    }
}
