/* Returning: gradients of gathered keys go back to the ranks that hold the keys, which add them
 * up in the order of ranks, and so are those of captured tensors. All in f32, so that bits
 * depend on the number of ranks alone. */
#include "dist/dist.h"

#include "base/convert.h"
#include "base/places.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include <string.h>

/* ---- memory ---- */

static int64_t at_least_one(int64_t n)
{
    return n > 0 ? n : 1;
}

static void place(int64_t floats, size_t *off, size_t *end)
{
    place_lines((size_t)floats * sizeof(float), off, end);
}

static int64_t elements_of(const saccade_tensor *t)
{
    int64_t n = t->dtype == SACCADE_NONE ? 0 : 1;
    for (int32_t d = 0; d < t->rank && n; d++)
        n *= t->shape[d];
    return n;
}

dist_return dist_return_captured(const saccade_tensor *captures, const saccade_tensor *sinks)
{
    dist_return m = {0};
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        m.capture_elements += elements_of(&captures[c]);
    m.capture_elements += sinks ? elements_of(sinks) : 0;
    return m;
}

dist_return dist_return_of(const saccade_dist *d, int64_t B, const saccade_tensor *captures,
                           const saccade_tensor *sinks)
{
    const saccade_sizes *s = &d->plan->problem.sizes;
    const int64_t in = at_least_one(B * d->in.all) * s->Hkv, out = B * d->out.all * s->Hkv;
    const int64_t own = B * d->n_keys * s->Hkv;
    dist_return m = dist_return_captured(captures, sinks);
    place(in * s->D, &m.k_pool, &m.bytes);
    place(in * s->Dv, &m.v_pool, &m.bytes);
    place(out * s->D, &m.k_got, &m.bytes);
    place(out * s->Dv, &m.v_got, &m.bytes);
    place(own * (s->D > s->Dv ? s->D : s->Dv), &m.sum, &m.bytes);
    place(m.capture_elements * (d->transport.ranks + 1), &m.captures, &m.bytes);
    return m;
}

/* ---- keys ---- */

void dist_list_gradients(const saccade_dist *d, const dist_pieces *in, const dist_pieces *out,
                         int64_t B, int64_t dim, float *pool, float *got,
                         saccade_message *messages, int32_t *n_sends, int32_t *n_receives)
{
    const int32_t ranks = d->transport.ranks;
    const int64_t width = d->plan->problem.sizes.Hkv * dim;
    saccade_message *sends = messages, *receives = messages + 2 * (size_t)ranks;
    const size_t bytes = (size_t)width * sizeof(float);
    for (int32_t p = 0; p < ranks; p++) {
        if (p == d->transport.rank)
            continue;
        if (in->keys[p])
            sends[(*n_sends)++] = (saccade_message){pool + dist_pool_row(in, B, p, 0) * width,
                                                    (size_t)(B * in->keys[p]) * bytes, p};
        if (out->keys[p])
            receives[(*n_receives)++] =
                (saccade_message){got + dist_pool_row(out, B, p, 0) * width,
                                  (size_t)(B * out->keys[p]) * bytes, p};
    }
}

/* Adds what peer p has of the keys held here to sum [B][keys][width]: those from `first` on. */
static void add_peer(int64_t B, int64_t width, const dist_pieces *pieces, int32_t p,
                     const float *from, int64_t first, int64_t keys, float *sum)
{
    for (int64_t b = 0; b < B; b++) {
        const float *at = from + dist_pool_row(pieces, B, p, b) * width;
        for (int64_t i = pieces->begin[p]; i < pieces->begin[p + 1]; i++) {
            const dist_piece *piece = &pieces->piece[i];
            float *to = sum + (b * keys + piece->local - first) * width;
            for (int64_t n = 0; n < piece->count * width; n++)
                to[n] += at[n];
            at += piece->count * width;
        }
    }
}

void dist_store_row(saccade_dtype dtype, const float *row, int64_t n, int is_added, void *to)
{
    float sums[64];
    const int64_t each = (int64_t)saccade_dtype_bytes(dtype);
    if (!is_added) {
        convert_from_f32(dtype, row, to, n);
        return;
    }
    for (int64_t at = 0; at < n; at += 64) {
        const int64_t left = n - at < 64 ? n - at : 64;
        char *place = (char *)to + at * each;
        convert_to_f32(dtype, place, sums, left);
        for (int64_t i = 0; i < left; i++)
            sums[i] = row[at + i] + sums[i];
        convert_from_f32(dtype, sums, place, left);
    }
}

/* Rows [kv heads][dim] of sum to a caller's [B, Hkv, keys, dim]. */
static void store_keys(const saccade_tensor *to, const float *sum, int is_added)
{
    const int64_t heads = to->shape[1], dim = to->shape[3];
    const int64_t each = (int64_t)saccade_dtype_bytes(to->dtype);
    for (int64_t b = 0; b < to->shape[0]; b++)
        for (int64_t j = 0; j < to->shape[2]; j++)
            for (int64_t h = 0; h < heads; h++, sum += dim)
                dist_store_row(to->dtype, sum, dim, is_added,
                               (char *)to->data
                                   + (b * to->stride[0] + h * to->stride[1] + j * to->stride[2])
                                         * each);
}

void dist_add_ranks(const saccade_dist *d, const dist_pieces *in, const dist_pieces *out,
                    const float *pool, const float *got, int64_t first, int64_t keys,
                    float *sum, const saccade_tensor *to, int is_added)
{
    if (!to || !keys)
        return;
    saccade_tensor part = *to;
    const int64_t B = to->shape[0], width = to->shape[1] * to->shape[3];
    part.data =
        (char *)to->data + first * to->stride[2] * (int64_t)saccade_dtype_bytes(to->dtype);
    part.shape[2] = keys;
    memset(sum, 0, (size_t)(B * keys * width) * sizeof *sum);
    for (int32_t p = 0; p < d->transport.ranks; p++)
        if (p == d->transport.rank)
            add_peer(B, width, in, p, pool, first, keys, sum);
        else
            add_peer(B, width, out, p, got, first, keys, sum);
    store_keys(&part, sum, is_added);
}

saccade_status dist_return_keys(saccade_dist *d, int64_t B, char *memory, const dist_return *m,
                                const plan_gradients *to, saccade_error *err)
{
    const plan_problem *p = &d->plan->problem;
    float *k_pool = (float *)(void *)(memory + m->k_pool);
    float *v_pool = (float *)(void *)(memory + m->v_pool);
    float *k_got = (float *)(void *)(memory + m->k_got);
    float *v_got = (float *)(void *)(memory + m->v_got);
    float *sum = (float *)(void *)(memory + m->sum);
    int32_t n_sends = 0, n_receives = 0;
    if (p->gradients & SACCADE_GRADIENT_K)
        dist_list_gradients(d, &d->in, &d->out, B, p->sizes.D, k_pool, k_got, d->messages,
                            &n_sends, &n_receives);
    if (p->gradients & SACCADE_GRADIENT_V)
        dist_list_gradients(d, &d->in, &d->out, B, p->sizes.Dv, v_pool, v_got, d->messages,
                            &n_sends, &n_receives);
    TRY(dist_exchange(&d->transport, d->messages, n_sends,
                      d->messages + 2 * (size_t)d->transport.ranks, n_receives, err));
    dist_add_ranks(d, &d->in, &d->out, k_pool, k_got, 0, d->n_keys, sum, to->dk,
                   (to->added & SACCADE_GRADIENT_K) != 0);
    dist_add_ranks(d, &d->in, &d->out, v_pool, v_got, 0, d->n_keys, sum, to->dv,
                   (to->added & SACCADE_GRADIENT_V) != 0);
    return SACCADE_OK;
}

/* ---- captures, and sinks behind them ---- */

void dist_lay_captures(float *at, const plan_gradients *to, saccade_tensor *own,
                       saccade_tensor *own_sinks)
{
    const saccade_tensor *captures = to->captures;
    for (int c = 0; c < MOD_MAX_CAPTURES; c++) {
        own[c].dtype = SACCADE_NONE;
        if (captures[c].dtype == SACCADE_NONE)
            continue;
        own[c] = saccade_tensor_of(at, SACCADE_F32, captures[c].rank, captures[c].shape);
        at = at ? at + elements_of(&captures[c]) : NULL;
    }
    if (to->sinks)
        *own_sinks = saccade_tensor_of(at, SACCADE_F32, to->sinks->rank, to->sinks->shape);
}

void dist_begin_captures(char *memory, const dist_return *m, const plan_gradients *to,
                         saccade_tensor *own, saccade_tensor *own_sinks)
{
    float *at = (float *)(void *)(memory + m->captures);
    memset(at, 0, (size_t)m->capture_elements * sizeof *at);
    dist_lay_captures(at, to, own, own_sinks);
}

/* Rank by rank, in double, rounded once. parts: [ranks][n]. */
static void store_capture(const saccade_tensor *to, const float *parts, int64_t n,
                          int32_t ranks, int is_added)
{
    tensor_walk at = {{0}, 0};
    do {
        char *place = (char *)to->data + at.place * (int64_t)saccade_dtype_bytes(to->dtype);
        double sum = is_added ? convert_element(to->dtype, place) : 0;
        for (int32_t r = 0; r < ranks; r++)
            sum += (double)parts[r * n];
        const float x = (float)sum;
        convert_from_f32(to->dtype, &x, place, 1);
        parts++;
    } while (tensor_next(to, to->rank, &at));
}

saccade_status dist_return_captures(saccade_dist *d, char *memory, const dist_return *m,
                                    const plan_gradients *to, saccade_error *err)
{
    const int32_t ranks = d->transport.ranks, me = d->transport.rank;
    const int64_t n = m->capture_elements;
    const size_t bytes = (size_t)n * sizeof(float);
    float *own = (float *)(void *)(memory + m->captures), *parts = own + n;
    int32_t others = 0;
    if (!n)
        return SACCADE_OK;
    memcpy(parts + me * n, own, bytes);
    for (int32_t r = 0; r < ranks; r++) {
        if (r == me)
            continue;
        d->messages[others] = (saccade_message){own, bytes, r};
        d->messages[ranks + others++] = (saccade_message){parts + r * n, bytes, r};
    }
    TRY(dist_exchange(&d->transport, d->messages, others, d->messages + ranks, others, err));
    for (int c = 0; c < MOD_MAX_CAPTURES; c++) {
        if (to->captures[c].dtype == SACCADE_NONE)
            continue;
        store_capture(&to->captures[c], parts, n, ranks,
                      (to->added & SACCADE_GRADIENT_CAPTURES) != 0);
        parts += elements_of(&to->captures[c]);
    }
    if (to->sinks)
        store_capture(to->sinks, parts, n, ranks, (to->added & SACCADE_GRADIENT_SINKS) != 0);
    return SACCADE_OK;
}
