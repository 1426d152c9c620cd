/* What attention over ranks asks of a GPU (plan/carry.h): rows moved and gradients added up by
 * kern/rows_move.cu, partial results merged by kern/rows_merge.cu, gradients of captures added
 * up by kern/total.cu, and a side stream for messages. */
#include "plan/carry.h"

#include "cuda/program/program.h"
#include "cuda/kern/merge.h"
#include "cuda/kern/move.h"
#include "cuda/kern/total.h"

#include <stdlib.h>

enum {
    THREADS = 256,
    EACH = 4,     /* units a thread moves */
    SUM_ROWS = 8, /* rows of a CTA that sums */
    MARKS = 3,    /* of the side stream that hold at a time */
    EVENTS = 1 + MARKS,
    HIGHEST = -1000, /* priorities are cut to what the device has */
    UNTIMED = 2,     /* CU_EVENT_DISABLE_TIMING */
    UNBLOCKED = 1,   /* CU_STREAM_NON_BLOCKING */
    PASSED = 0       /* CU_STREAM_WAIT_VALUE_GEQ: the difference is not negative as an int32 */
};

typedef struct memory {
    struct memory *next;
    cu_ptr at;
} memory;

struct plan_carrier {
    const cu_driver *driver;
    int device;
    void *library, *move, *sum;
    void *merge_library, *merge;
    void *total_library, *total;
    void *side, *event[EVENTS]; /* fork's, then marks', by turns */
    int marks;
    memory *held;
};

/* ---- open and close ---- */

static void carry_close(plan_carrier *c)
{
    void *pushed;
    if (!c)
        return;
    if (cu_enter(c->driver, c->device, &pushed, NULL) == SACCADE_OK) {
        if (c->side)
            c->driver->stream_destroy(c->side);
        for (int i = 0; i < EVENTS; i++)
            if (c->event[i])
                c->driver->event_destroy(c->event[i]);
        void *const libraries[] = {c->library, c->merge_library, c->total_library};
        for (int i = 0; i < 3; i++)
            if (libraries[i])
                c->driver->library_unload(libraries[i]);
        for (memory *m = c->held; m; m = m->next)
            c->driver->free(m->at);
        cu_leave(c->driver, pushed);
    }
    for (memory *m = c->held, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    free(c);
}

/* With the device's context current. */
static saccade_status load_file(const plan_carrier *c, const char *file, const char *arch,
                                void **library, saccade_error *err)
{
    cu_image image;
    TRY(cu_compile(file, NULL, 0, arch, &image, err));
    const int failed =
        c->driver->library_load(library, image.code, NULL, NULL, 0, NULL, NULL, 0);
    free(image.code);
    return cu_check(c->driver, failed, file, err);
}

static saccade_status load_kernel(const plan_carrier *c, void *library, const char *name,
                                  void **kernel, saccade_error *err)
{
    return cu_check(c->driver, c->driver->library_kernel(kernel, library, name), name, err);
}

/* Whether ranks add up gradients of captures or sinks. */
static int has_totals(const saccade_plan *plan)
{
    const uint32_t bits = SACCADE_GRADIENT_CAPTURES | SACCADE_GRADIENT_SINKS;
    return (plan->problem.gradients & bits) != 0;
}

static saccade_status load(plan_carrier *c, const saccade_plan *plan, saccade_error *err)
{
    const cu_driver *d = c->driver;
    const char *arch = ((const cu_state *)plan->state)->arch;
    TRY(load_file(c, "rows_move.cu", arch, &c->library, err));
    TRY(load_kernel(c, c->library, "rows_move", &c->move, err));
    TRY(load_kernel(c, c->library, "rows_sum", &c->sum, err));
    if (has_totals(plan)) {
        TRY(load_file(c, "total.cu", arch, &c->total_library, err));
        TRY(load_kernel(c, c->total_library, "ranks_total", &c->total, err));
    }
    int failed = d->stream_create(&c->side, UNBLOCKED, HIGHEST);
    for (int i = 0; i < EVENTS && !failed; i++)
        failed = d->event_create(&c->event[i], UNTIMED);
    return cu_check(d, failed, "a second stream", err);
}

static saccade_status carry_open(const saccade_plan *plan, int32_t device, plan_carrier **out,
                                 saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(cu_get_driver(&driver, err));
    plan_carrier *c = calloc(1, sizeof *c);
    FAIL_IF_NULL(c);
    c->driver = driver;
    c->device = device;
    saccade_status status = cu_enter(driver, device, &pushed, err);
    if (status == SACCADE_OK) {
        status = load(c, plan, err);
        cu_leave(driver, pushed);
    }
    if (status == SACCADE_OK)
        *out = c;
    else
        carry_close(c);
    return status;
}

static saccade_status allocate(plan_carrier *c, memory *m, size_t bytes, const void *from,
                               saccade_error *err)
{
    const cu_driver *d = c->driver;
    void *pushed;
    TRY(cu_enter(d, c->device, &pushed, err));
    const size_t words = (bytes + 3) / 4;
    int failed = d->alloc(&m->at, words ? 4 * words : 4);
    if (!failed && from)
        failed = d->copy(m->at, (cu_ptr)(uintptr_t)from, bytes);
    else if (!failed)
        failed = d->fill32(m->at, 0, words, NULL);
    failed = failed ? failed : d->context_synchronize();
    cu_leave(d, pushed);
    return cu_check(d, failed, "memory for keys of other ranks", err);
}

static saccade_status carry_reserve(plan_carrier *c, size_t bytes, const void *from, void **out,
                                    saccade_error *err)
{
    memory *m = calloc(1, sizeof *m);
    FAIL_IF_NULL(m);
    m->next = c->held;
    c->held = m; /* freed with it, after a failure too */
    TRY(allocate(c, m, bytes, from, err));
    *out = (void *)(uintptr_t)m->at;
    return SACCADE_OK;
}

/* ---- rows ---- */

static cu_rows rows_of(const plan_rows_side *side, int i)
{
    const saccade_tensor *t = &side->t[i];
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    if (side->is_packed)
        return (cu_rows){.data = t->data,
                         .h = t->shape[3] * bytes,
                         .n = t->shape[1] * t->shape[3] * bytes,
                         .is_packed = 1};
    return (cu_rows){.data = t->data,
                     .b = t->stride[0] * bytes,
                     .h = t->stride[1] * bytes,
                     .n = t->stride[2] * bytes};
}

/* Whether all rows of a side, of so many bytes, begin and end at multiples of `unit` bytes. */
static int takes(const cu_rows *r, int bytes, int unit)
{
    const int64_t all = (int64_t)(uintptr_t)r->data | r->b | r->h | r->n | bytes;
    return all % unit == 0;
}

enum { GRID_Y_MOST = 65535 };

static saccade_status start(const plan_carrier *c, void *kernel, int64_t grid_x, int64_t grid_y,
                            unsigned grid_z, void *parameters, void *stream, saccade_error *err)
{
    void *all[] = {parameters}, *pushed;
    FAIL_IF(grid_x > INT32_MAX, SACCADE_ELIMIT,
            "cuda: got too many rows of keys to move between ranks");
    FAIL_IF(grid_y > GRID_Y_MOST, SACCADE_ELIMIT,
            "cuda: got %lld batches x heads over ranks, expected at most %d", (long long)grid_y,
            GRID_Y_MOST);
    TRY(cu_enter(c->driver, c->device, &pushed, err));
    const int failed = c->driver->launch(kernel, (unsigned)grid_x, (unsigned)grid_y, grid_z,
                                         THREADS, 1, 1, 0, stream, all, NULL);
    cu_leave(c->driver, pushed);
    return cu_check(c->driver, failed, "cuLaunchKernel", err);
}

static saccade_status carry_move(plan_carrier *c, const plan_move *m, void *stream,
                                 saccade_error *err)
{
    static const int units[] = {16, 4, 2};
    cu_move x = {.pair = (const cu_row_pair *)m->pairs,
                 .n = (int)m->n,
                 .heads = (int)m->from.t[0].shape[1]};
    int64_t most = 0;
    int unit = 0;
    if (m->n == 0)
        return SACCADE_OK;
    for (int i = 0; i < 2; i++) {
        x.from[i] = rows_of(&m->from, i);
        x.to[i] = rows_of(&m->to, i);
        x.bytes[i] =
            (int)(m->from.t[i].shape[3] * (int64_t)saccade_dtype_bytes(m->from.t[i].dtype));
        most = x.bytes[i] > most ? x.bytes[i] : most;
        while (unit < 2
               && !(takes(&x.from[i], x.bytes[i], units[unit])
                    && takes(&x.to[i], x.bytes[i], units[unit])))
            unit++;
    }
    x.unit = units[unit];
    FAIL_IF(m->n > INT32_MAX / (most / x.unit + 1), SACCADE_ELIMIT,
            "cuda: got too many rows of keys to move between ranks");
    const int64_t each = (int64_t)THREADS * EACH;
    return start(c, c->move, (m->n * (most / x.unit) + each - 1) / each, m->B * x.heads, 2, &x,
                 stream, err);
}

static saccade_status carry_sum(plan_carrier *c, const plan_sum *s, void *stream,
                                saccade_error *err)
{
    cu_sum x = {.start = s->start,
                .term = (const cu_row_pair *)s->terms,
                .rows = s->rows,
                .n = (int)s->n,
                .heads = (int)s->pool.t[0].shape[1],
                .wanted = (int)s->wanted,
                .added = (int)s->added,
                .unit = 4};
    if (s->n == 0 || !s->wanted)
        return SACCADE_OK;
    for (int i = 0; i < 2; i++) {
        x.pool[i] = rows_of(&s->pool, i);
        x.got[i] = rows_of(&s->got, i);
        x.to[i] = rows_of(&s->to, i);
        x.dim[i] = (int)s->pool.t[i].shape[3];
        x.dtype[i] = s->to.t[i].dtype;
        if (!takes(&x.pool[i], 4 * x.dim[i], 16) || !takes(&x.got[i], 4 * x.dim[i], 16))
            x.unit = 1;
    }
    return start(c, c->sum, (s->n + SUM_ROWS - 1) / SUM_ROWS, s->B * x.heads, 2, &x, stream,
                 err);
}

/* ---- captures ---- */

static saccade_status carry_total(plan_carrier *c, const plan_total *t, void *stream,
                                  saccade_error *err)
{
    cu_total x = {.parts = t->parts,
                  .step = t->step,
                  .n = 1,
                  .to = t->to->data,
                  .ranks = t->n_parts,
                  .dtype = t->to->dtype,
                  .is_added = t->is_added,
                  .shape = cu_shape_of(t->to)};
    for (int32_t d = 0; d < t->to->rank; d++)
        x.n *= t->to->shape[d];
    return x.n ? start(c, c->total, (x.n + THREADS - 1) / THREADS, 1, 1, &x, stream, err)
               : SACCADE_OK;
}

static saccade_status carry_clear(plan_carrier *c, void *at, size_t bytes, void *stream,
                                  saccade_error *err)
{
    void *pushed;
    if (!bytes)
        return SACCADE_OK;
    TRY(cu_enter(c->driver, c->device, &pushed, err));
    const int failed = c->driver->fill32((cu_ptr)(uintptr_t)at, 0, bytes / 4, stream);
    cu_leave(c->driver, pushed);
    return cu_check(c->driver, failed, "cuMemsetD32Async", err);
}

/* ---- partial results ---- */

static saccade_status carry_load_merge(plan_carrier *c, const saccade_plan *plan,
                                       saccade_error *err)
{
    const char *arch = ((const cu_state *)plan->state)->arch;
    void *pushed;
    if (c->merge)
        return SACCADE_OK;
    TRY(cu_enter(c->driver, c->device, &pushed, err));
    saccade_status status = load_file(c, "rows_merge.cu", arch, &c->merge_library, err);
    if (status == SACCADE_OK)
        status = load_kernel(c, c->merge_library, "rows_merge", &c->merge, err);
    cu_leave(c->driver, pushed);
    return status;
}

static cu_merge_side merge_side(const saccade_tensor *t)
{
    const int64_t bytes = t ? (int64_t)saccade_dtype_bytes(t->dtype) : 0;
    return t ? (cu_merge_side){t->data, t->stride[0] * bytes, t->stride[1] * bytes,
                               t->stride[2] * bytes, t->dtype}
             : (cu_merge_side){.data = NULL};
}

static cu_merge_side sinks_side(const plan_sinks *s)
{
    const int64_t bytes = s ? (int64_t)saccade_dtype_bytes(s->dtype) : 0;
    return s && s->dtype != SACCADE_NONE
               ? (cu_merge_side){(void *)(uintptr_t)s->data, s->stride[0] * bytes,
                                 s->stride[1] * bytes, s->stride[2] * bytes, s->dtype}
               : (cu_merge_side){.data = NULL};
}

static saccade_status carry_merge(plan_carrier *c, const plan_merge *m, void *stream,
                                  saccade_error *err)
{
    cu_merge x = {.part = m->part,
                  .part_lse = m->part_lse,
                  .part_max = m->part_max,
                  .sum = m->sum,
                  .lse = m->lse,
                  .out = merge_side(m->out),
                  .out_lse = merge_side(m->out_lse),
                  .row_max = merge_side(m->row_max),
                  .sinks = sinks_side(m->sinks),
                  .rows = (int)m->rows,
                  .heads = (int)m->H,
                  .dim = (int)m->dim,
                  .is_first = m->is_first,
                  .is_last = m->is_last,
                  .is_added = m->is_added};
    return start(c, c->merge, (m->rows + SUM_ROWS - 1) / SUM_ROWS, m->B * m->H, 1, &x, stream,
                 err);
}

/* ---- streams ---- */

static void *carry_side(plan_carrier *c)
{
    return c->side;
}

static saccade_status order(plan_carrier *c, void *event, void *before, void *after,
                            saccade_error *err)
{
    const cu_driver *d = c->driver;
    void *pushed;
    TRY(cu_enter(d, c->device, &pushed, err));
    int failed = d->event_record(event, before);
    failed = failed || !after ? failed : d->stream_wait(after, event, 0);
    cu_leave(d, pushed);
    return cu_check(d, failed, "ordering streams", err);
}

static saccade_status carry_fork(plan_carrier *c, void *stream, saccade_error *err)
{
    return order(c, c->event[0], stream, c->side, err);
}

static saccade_status carry_mark(plan_carrier *c, void **event, saccade_error *err)
{
    c->marks = (c->marks + 1) % MARKS;
    *event = c->event[1 + c->marks];
    return order(c, *event, c->side, NULL, err);
}

static saccade_status carry_await(plan_carrier *c, void *event, void *stream,
                                  saccade_error *err)
{
    void *pushed;
    TRY(cu_enter(c->driver, c->device, &pushed, err));
    const int failed = c->driver->stream_wait(stream, event, 0);
    cu_leave(c->driver, pushed);
    return cu_check(c->driver, failed, "cuStreamWaitEvent", err);
}

static saccade_status carry_await_count(plan_carrier *c, const uint32_t *count, uint32_t least,
                                        saccade_error *err)
{
    void *pushed;
    TRY(cu_enter(c->driver, c->device, &pushed, err));
    const int failed =
        c->driver->stream_wait_value(c->side, (cu_ptr)(uintptr_t)count, least, PASSED);
    cu_leave(c->driver, pushed);
    return cu_check(c->driver, failed, "cuStreamWaitValue32", err);
}

static int carry_is_captured(plan_carrier *c)
{
    int state = 0;
    void *pushed;
    if (cu_enter(c->driver, c->device, &pushed, NULL) != SACCADE_OK)
        return 0;
    const int failed = c->driver->stream_capturing(c->side, &state);
    cu_leave(c->driver, pushed);
    return !failed && state != 0;
}

const plan_carry cu_carry = {
    .open = carry_open,
    .close = carry_close,
    .reserve = carry_reserve,
    .move = carry_move,
    .sum = carry_sum,
    .total = carry_total,
    .clear = carry_clear,
    .load_merge = carry_load_merge,
    .merge = carry_merge,
    .side = carry_side,
    .fork = carry_fork,
    .mark = carry_mark,
    .await = carry_await,
    .await_count = carry_await_count,
    .is_captured = carry_is_captured,
};
