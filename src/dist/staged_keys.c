/* What the run of one window reads: its keys, from all ranks, in one of two rooms, the table of
 * where they lie, and where the window stands in the sequence. */
#include "dist/staged.h"

#include "base/places.h"
#include "base/status.h"

static int64_t units_of(const dist_stages *s, int64_t keys)
{
    return (keys + s->unit - 1) / s->unit;
}

stage_room stage_room_of(const saccade_dist *d, int64_t B)
{
    const dist_stages *s = d->stages;
    const saccade_sizes *sizes = &d->plan->problem.sizes;
    const size_t in = (size_t)(B * s->in_most), out = (size_t)(B * s->out_most);
    stage_room m = {0};
    place_lines((size_t)(B * units_of(s, s->size)) * sizeof(int32_t), &m.table, &m.bytes);
    place_lines((in ? in : 1) * dist_row_bytes(d, sizes->D), &m.k_pool, &m.bytes);
    place_lines((in ? in : 1) * dist_row_bytes(d, sizes->Dv), &m.v_pool, &m.bytes);
    place_lines(out * dist_row_bytes(d, sizes->D), &m.k_sent, &m.bytes);
    place_lines(out * dist_row_bytes(d, sizes->Dv), &m.v_sent, &m.bytes);
    place_lines((size_t)B * sizeof(int32_t), &m.offset, &m.bytes);
    place_lines((size_t)B * sizeof(int32_t), &m.length, &m.bytes);
    return m;
}

int64_t stage_ask(saccade_dist *d, int64_t w, const plan_run *run, char *room)
{
    const dist_stages *s = d->stages;
    const dist_window *window = &s->window[w];
    const saccade_sizes *sizes = &d->plan->problem.sizes;
    const int64_t B = run->sizes.B;
    const stage_room m = stage_room_of(d, B);
    saccade_message *messages = dist_line_room(s->line);
    int32_t n_sends = 0, n_receives = 0;
    dist_list_keys(d, &window->in, &window->out, B, run->k, sizes->D, room + m.k_pool,
                   room + m.k_sent, messages, &n_sends, &n_receives);
    dist_list_keys(d, &window->in, &window->out, B, run->v, sizes->Dv, room + m.v_pool,
                   room + m.v_sent, messages, &n_sends, &n_receives);
    return dist_line_put(s->line, n_sends, n_receives);
}

/* Where the window's keys stand, and how many of them live. */
static void place_window(const dist_window *w, const plan_run *run, int32_t *offset,
                         int32_t *length, stage_run *out)
{
    const int64_t B = run->sizes.B;
    for (int64_t b = 0; b < B; b++) {
        const plan_position p = plan_position_of(&run->positions, run->sizes.KV, b);
        const int64_t left = p.kv_len - w->first;
        offset[b] = (int32_t)(p.kv_offset + w->first);
        length[b] = (int32_t)(left < 0 ? 0 : left < w->keys ? left : w->keys);
    }
    out->kv_offset = saccade_tensor_of(offset, SACCADE_I32, 1, &B);
    out->kv_len = saccade_tensor_of(length, SACCADE_I32, 1, &B);
    out->run.positions.kv_offset = out->kv_offset;
    out->run.positions.kv_len = out->kv_len;
}

void stage_begin(const saccade_dist *d, int64_t w, const plan_run *run, const stage_mask *masks,
                 char *room, stage_run *out)
{
    const dist_stages *s = d->stages;
    const dist_window *window = &s->window[w];
    const saccade_sizes *sizes = &d->plan->problem.sizes;
    const int64_t B = run->sizes.B, units = units_of(s, window->keys);
    const stage_room m = stage_room_of(d, B);
    int32_t *table = (int32_t *)(void *)(room + m.table);
    out->run = *run;
    dist_fill_table(&window->in, d->transport.ranks, B, window->first, s->unit, units, table);
    out->k = dist_pool_of(d, B, window->in.all, sizes->D, room + m.k_pool);
    out->v = dist_pool_of(d, B, window->in.all, sizes->Dv, room + m.v_pool);
    out->chunks = (plan_chunks){
        .first = table, .row_stride = units, .count = (int32_t)units, .size = (int32_t)s->unit};
    out->run.k = &out->k;
    out->run.v = &out->v;
    out->run.chunks = &out->chunks;
    out->run.rows = masks ? &masks->rows[w] : &d->rows;
    out->run.block_mask = masks ? masks->mask[w] : NULL;
    out->run.sizes.KV = window->keys;
    place_window(window, run, (int32_t *)(void *)(room + m.offset),
                 (int32_t *)(void *)(room + m.length), out);
}
