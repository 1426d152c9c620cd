/* Runs in staged mode on hosts: window after window, the next one's keys on their way. */
#include "dist/staged.h"

#include "base/convert.h"
#include "base/integers.h"
#include "base/places.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include <math.h>
#include <string.h>

static saccade_tensor floats(char *data, int64_t B, int64_t H, int64_t rows, int64_t dim)
{
    return saccade_tensor_of(data, SACCADE_F32, dim ? 4 : 3, (int64_t[]){B, H, rows, dim});
}

/* Of a block mask what belongs to each window; NULL without one. */
static saccade_status find_masks(const saccade_dist *d, const plan_run *run,
                                 const stage_mask **out, saccade_error *err)
{
    *out = run->block_mask ? stage_mask_of(d, run->block_mask) : NULL;
    FAIL_AT(run->block_mask && !*out, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one that was not prepared for, expected saccade_dist_prepare before");
    return SACCADE_OK;
}

saccade_status stage_start(const saccade_dist *d, const plan_run *run, const stage_mask **masks,
                           saccade_error *err)
{
    const saccade_sizes sizes = stage_sizes(d, run->sizes.B, d->stages->size);
    TRY(find_masks(d, run, masks, err));
    TRY(dist_check_tiles(d, d->plan, &sizes, err));
    TRY(dist_check_tiles(d, d->stages->partial, &sizes, err));
    FAIL_AT(run->sizes.B * d->stages->in_most > INT32_MAX, SACCADE_ELIMIT, "k", 0, 0,
            "got %lld keys of %lld batches in a window, expected less than 2^31 rows",
            (long long)d->stages->in_most, (long long)run->sizes.B);
    return d->n_rows ? dist_check_held(d, run->block_mask, err) : SACCADE_OK;
}

/* Rows to compute against a window: none touch one without keys. */
static int has_work(const saccade_dist *d, int64_t w, const stage_mask *masks)
{
    return d->n_rows && d->stages->window[w].in.all && (!masks || masks->rows[w].n);
}

/* Nothing may be under way in memory that goes back to the caller. */
static saccade_status end(saccade_dist *d, saccade_status status)
{
    if (status != SACCADE_OK) {
        dist_abort(&d->transport);
        dist_line_drain(d->stages->line);
    }
    return status;
}

/* ---- forward ---- */

typedef struct forward_memory {
    size_t room[2], out, lse, part_out, part_lse, part_max, bytes;
} forward_memory;

static forward_memory forward_memory_of(const saccade_dist *d, int64_t B)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const size_t rows = (size_t)(B * s->H * d->n_rows) * sizeof(float);
    forward_memory m = {.bytes = 0};
    place_lines(stage_room_of(d, B).bytes, &m.room[0], &m.bytes);
    place_lines(stage_room_of(d, B).bytes, &m.room[1], &m.bytes);
    place_lines(rows * (size_t)s->Dv, &m.out, &m.bytes);
    place_lines(rows, &m.lse, &m.bytes);
    place_lines(rows * (size_t)s->Dv, &m.part_out, &m.bytes);
    place_lines(rows, &m.part_lse, &m.bytes);
    place_lines(rows, &m.part_max, &m.bytes);
    return m;
}

static int is_on_device(const saccade_dist *d)
{
    return d->plan->backend->device != SACCADE_CPU;
}

size_t dist_staged_workspace(const saccade_dist *d, int64_t B)
{
    if (is_on_device(d))
        return dist_stage_device_workspace(d, B);
    const saccade_sizes s = stage_sizes(d, B, d->stages->size);
    return sum_bytes(forward_memory_of(d, B).bytes, plan_workspace(d->stages->partial, &s));
}

/* What has been added up so far, and one window's part. */
typedef struct forward_state {
    saccade_tensor out, lse, part_out, part_lse, part_max;
    forward_memory at;
    char *memory;
} forward_state;

static void raise_max(const plan_rows *rows, const saccade_tensor *part,
                      const saccade_tensor *most)
{
    const int64_t H = part->shape[1];
    for (int64_t bh = 0; bh < part->shape[0] * H; bh++)
        for (int32_t n = 0; n < rows->n; n++)
            for (int64_t i = rows->part[n].row; i < rows->part[n].row + rows->part[n].count;
                 i++) {
                const float x = ((const float *)part->data)[bh * part->shape[2] + i];
                float *to = (float *)most->data + bh / H * most->stride[0]
                            + bh % H * most->stride[1] + i * most->stride[2];
                *to = isnan(x) || x > *to ? x : *to;
            }
}

static void clear_max(const saccade_tensor *most)
{
    tensor_walk at = {{0}, 0};
    do
        ((float *)most->data)[at.place] = -INFINITY;
    while (tensor_next(most, 3, &at));
}

static forward_state begin_forward(const saccade_dist *d, const plan_run *run)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const int64_t B = run->sizes.B, n = d->n_rows;
    const forward_memory m = forward_memory_of(d, B);
    char *memory = run->workspace;
    forward_state f = {.out = floats(memory + m.out, B, s->H, n, s->Dv),
                       .lse = floats(memory + m.lse, B, s->H, n, 0),
                       .part_out = floats(memory + m.part_out, B, s->H, n, s->Dv),
                       .part_lse = floats(memory + m.part_lse, B, s->H, n, 0),
                       .part_max = floats(memory + m.part_max, B, s->H, n, 0),
                       .at = m,
                       .memory = memory};
    memset(f.out.data, 0, (size_t)(B * s->H * n * s->Dv) * sizeof(float));
    for (int64_t i = 0; i < B * s->H * n; i++)
        ((float *)f.lse.data)[i] = -INFINITY;
    if (run->row_max)
        clear_max(run->row_max);
    return f;
}

static saccade_status run_window(saccade_dist *d, int64_t w, const plan_run *run,
                                 const stage_mask *masks, forward_state *f, saccade_error *err)
{
    saccade_plan *partial = d->stages->partial;
    stage_run part;
    stage_begin(d, w, run, masks, f->memory + f->at.room[w % 2], &part);
    part.run.sinks.dtype = SACCADE_NONE;
    part.run.out = &f->part_out;
    part.run.lse = &f->part_lse;
    part.run.row_max = run->row_max ? &f->part_max : NULL;
    part.run.workspace = f->memory + f->at.bytes;
    part.run.workspace_bytes = run->workspace_bytes - f->at.bytes;
    TRY(partial->solver->forward(partial, &part.run, err));
    stage_merge(part.run.rows, &f->part_out, &f->part_lse, &f->out, &f->lse, partial->threads);
    if (run->row_max)
        raise_max(part.run.rows, &f->part_max, run->row_max);
    return SACCADE_OK;
}

static saccade_status forward(saccade_dist *d, plan_run *run, saccade_error *err)
{
    const stage_mask *masks;
    TRY(stage_start(d, run, &masks, err));
    forward_state f = begin_forward(d, run);
    int64_t keys = stage_ask(d, 0, run, f.memory + f.at.room[0]);
    for (int64_t w = 0; w < d->stages->n; w++) {
        const int64_t here = keys;
        if (w + 1 < d->stages->n)
            keys = stage_ask(d, w + 1, run, f.memory + f.at.room[(w + 1) % 2]);
        TRY(dist_line_wait(d->stages->line, here, err));
        if (has_work(d, w, masks))
            TRY(run_window(d, w, run, masks, &f, err));
    }
    if (d->n_rows)
        stage_finish(d, run, &f.out, &f.lse);
    return SACCADE_OK;
}

saccade_status dist_staged_forward(saccade_dist *d, plan_run *run, saccade_error *err)
{
    return is_on_device(d) ? dist_stage_device_forward(d, run, err)
                           : end(d, forward(d, run, err));
}

/* ---- backward ---- */

/* Gradients of a window's keys, made here and come from others. */
typedef struct gradient_room {
    size_t k_pool, v_pool, k_got, v_got, bytes;
} gradient_room;

typedef struct backward_memory {
    size_t room[2], gradient[2], sum, dq, captures, bytes;
} backward_memory;

static gradient_room gradient_room_of(const saccade_dist *d, int64_t B)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const int64_t most = B * d->stages->in_most;
    const size_t in = (size_t)((most ? most : 1) * s->Hkv) * sizeof(float);
    const size_t out = (size_t)(B * d->stages->out_most * s->Hkv) * sizeof(float);
    gradient_room m = {0};
    place_lines(in * (size_t)s->D, &m.k_pool, &m.bytes);
    place_lines(in * (size_t)s->Dv, &m.v_pool, &m.bytes);
    place_lines(out * (size_t)s->D, &m.k_got, &m.bytes);
    place_lines(out * (size_t)s->Dv, &m.v_got, &m.bytes);
    return m;
}

static backward_memory backward_memory_of(const saccade_dist *d, int64_t B,
                                          const dist_return *captures)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const int64_t widest = s->D > s->Dv ? s->D : s->Dv;
    backward_memory m = {.bytes = 0};
    for (int i = 0; i < 2; i++) {
        place_lines(stage_room_of(d, B).bytes, &m.room[i], &m.bytes);
        place_lines(gradient_room_of(d, B).bytes, &m.gradient[i], &m.bytes);
    }
    place_lines((size_t)(B * d->stages->own_most * s->Hkv * widest) * sizeof(float), &m.sum,
                &m.bytes);
    place_lines((size_t)(B * s->H * d->n_rows * s->D) * sizeof(float), &m.dq, &m.bytes);
    place_lines((size_t)(captures->capture_elements * (d->transport.ranks + 1)) * sizeof(float),
                &m.captures, &m.bytes);
    return m;
}

size_t dist_staged_backward_workspace(const saccade_dist *d, int64_t B,
                                      const plan_gradients *to)
{
    if (is_on_device(d))
        return dist_stage_device_backward_workspace(d, B, to);
    const saccade_sizes s = stage_sizes(d, B, d->stages->size);
    const dist_return captures = dist_return_captured(to->captures, to->sinks);
    return sum_bytes(backward_memory_of(d, B, &captures).bytes,
                     plan_backward_workspace(d->plan, &s, NULL));
}

typedef struct backward_state {
    const plan_run *run;
    const plan_gradients *to;
    const stage_mask *masks;
    saccade_tensor dq, captures[MOD_MAX_CAPTURES], sinks;
    dist_return captured;
    backward_memory at;
    gradient_room room;
    char *memory;
} backward_state;

static float *gradient_at(const backward_state *s, int64_t w, size_t part)
{
    return (float *)(void *)(s->memory + s->at.gradient[w % 2] + part);
}

static saccade_tensor gradient_of(const saccade_tensor *pool, float *data)
{
    saccade_tensor t = *pool;
    t.data = data;
    t.dtype = SACCADE_F32;
    return t;
}

static saccade_status back_window(saccade_dist *d, int64_t w, backward_state *s,
                                  saccade_error *err)
{
    const uint32_t wanted = d->plan->problem.gradients;
    plan_gradients part = *s->to;
    stage_run r;
    stage_begin(d, w, s->run, s->masks, s->memory + s->at.room[w % 2], &r);
    const saccade_tensor dk = gradient_of(&r.k, gradient_at(s, w, s->room.k_pool));
    const saccade_tensor dv = gradient_of(&r.v, gradient_at(s, w, s->room.v_pool));
    part.dq = s->to->dq ? &s->dq : NULL;
    part.dk = wanted & SACCADE_GRADIENT_K ? &dk : NULL;
    part.dv = wanted & SACCADE_GRADIENT_V ? &dv : NULL;
    part.captures = s->captures;
    part.sinks = NULL;
    part.added = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_CAPTURES;
    r.run.workspace = s->memory + s->at.bytes;
    r.run.workspace_bytes = s->run->workspace_bytes - s->at.bytes;
    return d->plan->solver->backward(d->plan, &r.run, &part, err);
}

/* Rows that touch nothing of the window leave no gradient for its keys. */
static void clear_window(int64_t w, const backward_state *s)
{
    memset(gradient_at(s, w, s->room.k_pool), 0, s->room.k_got - s->room.k_pool);
}

/* Puts the way back of a window's gradients on the line. */
static int64_t give_back(saccade_dist *d, int64_t w, const backward_state *s)
{
    const plan_problem *p = &d->plan->problem;
    const dist_window *window = &d->stages->window[w];
    saccade_message *messages = dist_line_room(d->stages->line);
    int32_t n_sends = 0, n_receives = 0;
    if (p->gradients & SACCADE_GRADIENT_K)
        dist_list_gradients(d, &window->in, &window->out, s->run->sizes.B, p->sizes.D,
                            gradient_at(s, w, s->room.k_pool), gradient_at(s, w, s->room.k_got),
                            messages, &n_sends, &n_receives);
    if (p->gradients & SACCADE_GRADIENT_V)
        dist_list_gradients(d, &window->in, &window->out, s->run->sizes.B, p->sizes.Dv,
                            gradient_at(s, w, s->room.v_pool), gradient_at(s, w, s->room.v_got),
                            messages, &n_sends, &n_receives);
    return dist_line_put(d->stages->line, n_sends, n_receives);
}

static void add_window(const saccade_dist *d, int64_t w, const backward_state *s)
{
    const dist_window *window = &d->stages->window[w];
    float *sum = (float *)(void *)(s->memory + s->at.sum);
    dist_add_ranks(d, &window->in, &window->out, gradient_at(s, w, s->room.k_pool),
                   gradient_at(s, w, s->room.k_got), window->own_first, window->own_keys, sum,
                   s->to->dk, (s->to->added & SACCADE_GRADIENT_K) != 0);
    dist_add_ranks(d, &window->in, &window->out, gradient_at(s, w, s->room.v_pool),
                   gradient_at(s, w, s->room.v_got), window->own_first, window->own_keys, sum,
                   s->to->dv, (s->to->added & SACCADE_GRADIENT_V) != 0);
}

/* Waits for the gradients of window w and adds them up. */
static saccade_status take_back(saccade_dist *d, int64_t w, int64_t number,
                                const backward_state *s, saccade_error *err)
{
    TRY(dist_line_wait(d->stages->line, number, err));
    add_window(d, w, s);
    return SACCADE_OK;
}

static saccade_status all_windows(saccade_dist *d, backward_state *s, saccade_error *err)
{
    const int64_t n = d->stages->n;
    int64_t keys = stage_ask(d, 0, s->run, s->memory + s->at.room[0]), back = 0;
    for (int64_t w = 0; w < n; w++) {
        const int64_t here = keys;
        if (w + 1 < n)
            keys = stage_ask(d, w + 1, s->run, s->memory + s->at.room[(w + 1) % 2]);
        TRY(dist_line_wait(d->stages->line, here, err));
        if (has_work(d, w, s->masks))
            TRY(back_window(d, w, s, err));
        else if (d->stages->window[w].in.all)
            clear_window(w, s);
        const int64_t before = back;
        back = give_back(d, w, s);
        if (w)
            TRY(take_back(d, w - 1, before, s, err));
    }
    return take_back(d, n - 1, back, s, err);
}

static double tensor_at(const saccade_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d)
{
    const int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + d;
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* A row's part of its sink's gradient, as plan_sum_sinks asks for it. */
static double sink_term(const void *of, int64_t b, int64_t h, int64_t i)
{
    const backward_state *s = of;
    const plan_part *part = plan_part_of(s->run->rows, i);
    const int64_t row = part->row + i - part->first;
    const saccade_tensor *out = s->run->out, *d_out = s->to->d_out, *lse = s->run->lse;
    const double sink = plan_sink_of(s->run, b, h, row);
    double delta = s->to->d_lse ? -tensor_at(s->to->d_lse, b, h, row, 0) : 0;
    for (int64_t d = 0; d < out->shape[3]; d++)
        delta += tensor_at(out, b, h, row, d) * tensor_at(d_out, b, h, row, d);
    delta = plan_sink_delta(s->run, s->to, b, h, row, delta);
    return -plan_sink_weight(sink, tensor_at(lse, b, h, row, 0)) * delta;
}

static void sum_sinks(const saccade_dist *d, backward_state *s)
{
    const plan_run *const whole = s->run;
    plan_run run = *whole;
    plan_gradients to = *s->to;
    run.rows = &d->rows;
    s->run = &run; /* sink_term's */
    to.sinks = &s->sinks;
    to.added = SACCADE_GRADIENT_SINKS;
    plan_sum_sinks(&run, &to, sink_term, s, d->plan->threads);
    s->run = whole;
}

static void store_dq(const backward_state *s)
{
    const saccade_tensor *to = s->to->dq;
    const int64_t heads = to->shape[1], dim = to->shape[3];
    const int is_added = (s->to->added & SACCADE_GRADIENT_Q) != 0;
    const float *from = s->dq.data;
    for (int64_t bh = 0; bh < to->shape[0] * heads; bh++)
        for (int64_t i = 0; i < to->shape[2]; i++, from += dim)
            dist_store_row(to->dtype, from, dim, is_added,
                           (char *)to->data
                               + (bh / heads * to->stride[0] + bh % heads * to->stride[1]
                                  + i * to->stride[2])
                                     * (int64_t)saccade_dtype_bytes(to->dtype));
}

static saccade_status backward(saccade_dist *d, plan_run *run, const plan_gradients *to,
                               saccade_error *err)
{
    const saccade_sizes *sizes = &d->plan->problem.sizes;
    const int64_t B = run->sizes.B;
    backward_state s = {.run = run, .to = to, .memory = run->workspace};
    TRY(stage_start(d, run, &s.masks, err));
    s.captured = dist_return_captured(to->captures, to->sinks);
    s.at = backward_memory_of(d, B, &s.captured);
    s.room = gradient_room_of(d, B);
    s.captured.captures = s.at.captures;
    s.dq = floats(s.memory + s.at.dq, B, sizes->H, d->n_rows, sizes->D);
    memset(s.dq.data, 0, (size_t)(B * sizes->H * d->n_rows * sizes->D) * sizeof(float));
    dist_begin_captures(s.memory, &s.captured, to, s.captures, &s.sinks);
    TRY(all_windows(d, &s, err));
    if (to->sinks && d->n_rows)
        sum_sinks(d, &s);
    if (to->dq && d->n_rows)
        store_dq(&s);
    return dist_return_captures(d, s.memory, &s.captured, to, err);
}

saccade_status dist_staged_backward(saccade_dist *d, plan_run *run, const plan_gradients *to,
                                    saccade_error *err)
{
    return is_on_device(d) ? dist_stage_device_backward(d, run, to, err)
                           : end(d, backward(d, run, to, err));
}
