/* Windows of keys: which pieces of a rank's keys lie in which, and what a block mask says of
 * each, cut out of it when it is prepared. */
#include "dist/staged.h"

#include "base/integers.h"
#include "base/status.h"
#include "mask/mask_build.h"

#include <stdlib.h>
#include <string.h>

/* ---- windows ---- */

enum { DEFAULT_WINDOWS = 8, LEAST_KEYS = 1024, BLOCK = 128 };

/* What the pieces of all ranks begin at a multiple of, the last key's end aside. */
static int64_t common_unit(const saccade_dist *d, int32_t mask)
{
    const int32_t ranks = d->transport.ranks;
    const saccade_range *at;
    int64_t unit = d->shards->options.chunk;
    for (int32_t i = 0; i < ranks * ranks; i++) {
        const int32_t n = saccade_shard_needs(d->shards, mask, i / ranks, i % ranks, &at);
        for (int32_t k = 0; k < n; k++) {
            const int64_t past = at[k].first + at[k].count;
            unit = common_divisor(unit, at[k].first);
            unit = past < d->KV ? common_divisor(unit, past) : unit;
        }
    }
    return unit;
}

/* The least common multiple, or `most` where it is larger. */
static int64_t common_multiple(int64_t a, int64_t b, int64_t most)
{
    const int64_t factor = a / common_divisor(a, b);
    return factor > most / b ? most : factor * b;
}

/* keys, or about an eighth of the sequence, in whole units and blocks, also imported ones; no
 * more than all keys. */
static int64_t window_size(const saccade_dist *d, int32_t mask, int64_t unit, int64_t keys)
{
    const int64_t eighth = (d->KV + DEFAULT_WINDOWS - 1) / DEFAULT_WINDOWS;
    const int64_t asked = keys ? keys : eighth > LEAST_KEYS ? eighth : LEAST_KEYS;
    const int32_t imported = d->shards->block_kv[mask];
    const int64_t all = (d->KV + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t blocks = common_multiple(unit, BLOCK, all);
    const int64_t step = common_multiple(blocks, imported > 0 ? imported : 1, all);
    return ((asked < d->KV ? asked : d->KV) + step - 1) / step * step;
}

/* Of these pieces what lies in keys [first, past). */
static saccade_status cut_pieces(const dist_pieces *all, int32_t ranks, int64_t first,
                                 int64_t past, dist_pieces *out, saccade_error *err)
{
    int64_t n = 0;
    out->begin = calloc((size_t)ranks + 1, sizeof *out->begin);
    out->keys = calloc((size_t)ranks, sizeof *out->keys);
    for (int64_t i = 0; i < all->begin[ranks]; i++)
        n += all->piece[i].first < past && all->piece[i].first + all->piece[i].count > first;
    out->piece = calloc((size_t)n + 1, sizeof *out->piece);
    FAIL_IF(!out->begin || !out->keys || !out->piece, SACCADE_ENOMEM, "out of memory");
    n = 0;
    for (int32_t p = 0; p < ranks; p++) {
        for (int64_t i = all->begin[p]; i < all->begin[p + 1]; i++) {
            const dist_piece *from = &all->piece[i];
            const int64_t a = from->first > first ? from->first : first;
            const int64_t end = from->first + from->count, z = end < past ? end : past;
            if (a >= z)
                continue;
            out->piece[n++] = (dist_piece){a, z - a, from->local + a - from->first};
            out->keys[p] += z - a;
        }
        out->begin[p + 1] = n;
        out->all += out->keys[p];
    }
    return SACCADE_OK;
}

/* Which of the keys that this rank holds are of the window. */
static void find_own(const saccade_dist *d, dist_window *w)
{
    const saccade_range *held;
    const int32_t n = saccade_shard_keys(d->shards, d->transport.rank, &held);
    for (int32_t i = 0; i < n; i++) {
        const int64_t past = held[i].first + held[i].count, end = w->first + w->keys;
        const int64_t a = held[i].first > w->first ? held[i].first : w->first;
        const int64_t before = w->first - held[i].first;
        w->own_first += before <= 0 ? 0 : before < held[i].count ? before : held[i].count;
        w->own_keys += a < (past < end ? past : end) ? (past < end ? past : end) - a : 0;
    }
}

static saccade_status cut_windows(saccade_dist *d, dist_stages *s, saccade_error *err)
{
    const int32_t ranks = d->transport.ranks;
    s->n = (d->KV + s->size - 1) / s->size;
    s->window = calloc((size_t)s->n, sizeof *s->window);
    FAIL_IF_NULL(s->window);
    for (int64_t i = 0; i < s->n; i++) {
        dist_window *w = &s->window[i];
        w->first = i * s->size;
        w->keys = d->KV - w->first < s->size ? d->KV - w->first : s->size;
        TRY(cut_pieces(&d->in, ranks, w->first, w->first + w->keys, &w->in, err));
        TRY(cut_pieces(&d->out, ranks, w->first, w->first + w->keys, &w->out, err));
        find_own(d, w);
        s->in_most = larger(s->in_most, w->in.all);
        s->out_most = larger(s->out_most, w->out.all);
        s->own_most = larger(s->own_most, w->own_keys);
    }
    return SACCADE_OK;
}

saccade_status dist_open_stages(saccade_dist *d, saccade_plan *partial, int32_t mask,
                                int64_t keys, saccade_error *err)
{
    dist_stages *s = d->stages = calloc(1, sizeof *s);
    FAIL_IF_NULL(s);
    s->partial = partial; /* from here on the object's own */
    partial->rows = &d->rows;
    s->unit = common_unit(d, mask);
    s->size = window_size(d, mask, s->unit, keys);
    TRY(cut_windows(d, s, err));
    if (d->plan->backend->device != SACCADE_CPU) {
        d->rows.far_before = d->rows.touched_before = NULL; /* a window's keys are all there */
        return SACCADE_OK;
    }
    return dist_line_open(&d->transport, &s->line, err);
}

saccade_sizes stage_sizes(const saccade_dist *d, int64_t B, int64_t keys)
{
    saccade_sizes s = dist_sizes(d, B);
    s.KV = keys;
    return s;
}

/* ---- block masks ---- */

static void free_mask(const dist_stages *s, stage_mask *m)
{
    for (int64_t w = 0; m->mask && w < s->n; w++)
        saccade_block_mask_destroy(m->mask[w]);
    free(m->mask);
    free(m->rows);
    free(m->part);
    free(m);
}

void dist_close_stages(dist_stages *s)
{
    if (!s)
        return;
    dist_line_close(s->line);
    dist_stage_device_close(s->device);
    while (s->masks) {
        stage_mask *next = s->masks->next;
        free_mask(s, s->masks);
        s->masks = next;
    }
    for (int64_t i = 0; s->window && i < s->n; i++) {
        dist_free_pieces(&s->window[i].in);
        dist_free_pieces(&s->window[i].out);
    }
    saccade_plan_destroy(s->partial);
    free(s->window);
    free(s);
}

const stage_mask *stage_mask_of(const saccade_dist *d, const saccade_block_mask *mask)
{
    const stage_mask *m = d->stages->masks;
    while (m && (m->of != mask || m->number != mask_get_view(mask)->number))
        m = m->next;
    return m;
}

/* Whether rows [first, past) touch a key of the window. */
static int is_touched(const mask_runs *runs, int64_t first, int64_t past)
{
    const int64_t row0 = first / runs->block_q, row1 = (past - 1) / runs->block_q + 1;
    for (int64_t head = 0; head < runs->B * runs->H; head++)
        if (runs->row_begin[head * runs->rows + row0]
            < runs->row_begin[head * runs->rows + row1])
            return 1;
    return 0;
}

/* Rows of this rank, in whole chunks, that touch keys of the window: joined to parts from *part
 * on, which is moved past them. */
static plan_rows touching_rows(const saccade_dist *d, const mask_runs *runs, int64_t chunk,
                               plan_part **part)
{
    plan_rows rows = {.part = *part, .all = d->Q};
    for (int32_t i = 0; i < d->rows.n; i++) {
        const plan_part *whole = &d->part[i];
        int is_joined = 0;
        for (int64_t at = 0; at < whole->count; at += chunk) {
            const int64_t n = whole->count - at < chunk ? whole->count - at : chunk;
            const int is_live = is_touched(runs, whole->first + at, whole->first + at + n);
            if (is_live && is_joined)
                (*part)[-1].count += n;
            else if (is_live)
                *(*part)++ = (plan_part){whole->first + at, n, whole->row + at};
            rows.n += is_live && !is_joined;
            is_joined = is_live;
        }
    }
    return rows;
}

static saccade_status cut_mask(const saccade_dist *d, const saccade_block_mask *mask,
                               stage_mask *m, saccade_error *err)
{
    const dist_stages *s = d->stages;
    const int64_t chunk = d->shards->options.chunk;
    int64_t most = 1;
    for (int32_t i = 0; i < d->rows.n; i++)
        most += (d->part[i].count + chunk - 1) / chunk;
    m->of = mask;
    m->number = mask_get_view(mask)->number;
    m->mask = calloc((size_t)s->n, sizeof *m->mask);
    m->rows = calloc((size_t)s->n, sizeof *m->rows);
    m->part = calloc((size_t)(s->n * most), sizeof *m->part);
    FAIL_IF(!m->mask || !m->rows || !m->part, SACCADE_ENOMEM, "out of memory");
    plan_part *part = m->part;
    for (int64_t i = 0; i < s->n; i++) {
        const dist_window *w = &s->window[i];
        if (w->in.all == 0)
            continue;
        TRY(saccade_block_mask_window(mask, 0, d->Q, w->first, w->keys, &m->mask[i], err));
        m->rows[i] = touching_rows(d, mask_own_runs(m->mask[i]), chunk, &part);
        TRY(s->partial->solver->prepare(s->partial, m->mask[i], err));
        TRY(d->plan->solver->prepare(d->plan, m->mask[i], err));
    }
    return SACCADE_OK;
}

saccade_status dist_prepare_stages(const saccade_dist *d, const saccade_block_mask *mask,
                                   saccade_error *err)
{
    dist_stages *s = d->stages;
    FAIL_AT(mask && mask_get_view(mask)->selection.most, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one whose blocks are selected, expected another in staged mode, which cuts it "
            "into windows once");
    if (!mask)
        return d->plan->backend->device == SACCADE_CPU
                   ? SACCADE_OK
                   : s->partial->solver->prepare(s->partial, NULL, err);
    stage_mask *m = calloc(1, sizeof *m), **at = &s->masks;
    FAIL_IF_NULL(m);
    const saccade_status status = cut_mask(d, mask, m, err);
    if (status != SACCADE_OK) {
        free_mask(s, m);
        return status;
    }
    while (*at && (*at)->of != mask)
        at = &(*at)->next;
    if (*at) { /* of what was there before */
        stage_mask *old = *at;
        *at = old->next;
        free_mask(s, old);
    }
    m->next = s->masks;
    s->masks = m;
    return SACCADE_OK;
}
