/* Lists of the rows that move between a rank's keys, messages and a pool of keys, made on the
 * host and kept on the device. */
#include "dist/device.h"

#include "base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- pairs ---- */

/* Pieces of one peer: rows of the pool, rows held here and numbers in a message. */
static plan_row_pair *list_peer(const dist_span *span, const dist_pieces *pieces, int32_t peer,
                                int64_t before, plan_row_pair *to)
{
    int32_t number = 0;
    for (int64_t i = pieces->begin[peer]; i < pieces->begin[peer + 1]; i++) {
        const dist_piece *p = &pieces->piece[i];
        const int64_t at = pieces == span->in ? p->first - span->first : p->local;
        for (int64_t j = 0; j < p->count; j++, number++)
            *to++ = pieces == span->in
                        ? (plan_row_pair){number, (int32_t)(at + j), (int32_t)before,
                                          (int32_t)pieces->keys[peer]}
                        : (plan_row_pair){(int32_t)(at + j), number, (int32_t)before,
                                          (int32_t)pieces->keys[peer]};
    }
    return to;
}

/* Everything but this rank's own. */
static plan_row_pair *list_others(const saccade_dist *d, const dist_span *span,
                                  const dist_pieces *pieces, plan_row_pair *to)
{
    int64_t before = 0;
    for (int32_t p = 0; p < d->transport.ranks; p++) {
        if (p == d->transport.rank)
            continue;
        to = list_peer(span, pieces, p, before, to);
        before += pieces->keys[p];
    }
    return to;
}

static plan_row_pair *list_own(const saccade_dist *d, const dist_span *span, plan_row_pair *to)
{
    const int32_t me = d->transport.rank;
    for (int64_t i = span->in->begin[me]; i < span->in->begin[me + 1]; i++) {
        const dist_piece *p = &span->in->piece[i];
        for (int64_t j = 0; j < p->count; j++)
            *to++ = (plan_row_pair){(int32_t)(p->local + j),
                                    (int32_t)(p->first - span->first + j), 0, 0};
    }
    return to;
}

/* ---- terms ---- */

/* Calls for every own key of the span that a rank's rows touch, rank by rank: its place among
 * the span's own, and the term that its gradient has from that rank. */
typedef void (*term_of)(void *user, int64_t local, plan_row_pair term);
static void each_term(const saccade_dist *d, const dist_span *span, term_of call, void *user)
{
    int64_t before = 0;
    for (int32_t p = 0; p < d->transport.ranks; p++) {
        const int is_own = p == d->transport.rank;
        const dist_pieces *from = is_own ? span->in : span->out;
        int32_t number = 0;
        for (int64_t i = from->begin[p]; i < from->begin[p + 1]; i++)
            for (int64_t j = 0; j < from->piece[i].count; j++, number++) {
                const int32_t row = (int32_t)(from->piece[i].first - span->first + j);
                call(user, from->piece[i].local + j - span->own_first,
                     is_own ? (plan_row_pair){row, 0, 0, 0}
                            : (plan_row_pair){-1, number, (int32_t)before,
                                              (int32_t)from->keys[p]});
            }
        before += is_own ? 0 : from->keys[p];
    }
}

typedef struct term_lists {
    int32_t *start, *next;
    plan_row_pair *term;
} term_lists;

static void count_term(void *user, int64_t local, plan_row_pair term)
{
    (void)term;
    ((term_lists *)user)->start[local + 1]++;
}

static void add_term(void *user, int64_t local, plan_row_pair term)
{
    term_lists *l = user;
    l->term[l->next[local]++] = term;
}

static saccade_status list_terms(const saccade_dist *d, const dist_span *span,
                                 plan_row_pair *term, int32_t *start, saccade_error *err)
{
    term_lists l = {start, calloc((size_t)span->own_keys + 1, sizeof *l.next), term};
    FAIL_IF_NULL(l.next);
    each_term(d, span, count_term, &l);
    for (int64_t i = 0; i < span->own_keys; i++)
        l.next[i + 1] = l.start[i + 1] += l.start[i];
    each_term(d, span, add_term, &l);
    free(l.next);
    return SACCADE_OK;
}

/* ---- all of them, in one piece ---- */

/* Numbers of pairs of each list, one after the other, and then the starts of terms. */
static saccade_status fill(const dist_port *port, const dist_span *span, dist_tables *t,
                           plan_row_pair *pairs, saccade_error *err)
{
    const saccade_dist *d = port->dist;
    plan_row_pair *at = list_own(d, span, pairs);
    at = list_others(d, span, span->out, at);
    at = list_others(d, span, span->in, at);
    for (int64_t i = 0; i < t->n_in; i++, at++) {
        const plan_row_pair p = at[-t->n_in];
        *at = (plan_row_pair){p.to, p.from, p.before, p.keys};
    }
    return list_terms(d, span, at, (int32_t *)(void *)(at + t->n_own + t->n_out), err);
}

saccade_status dist_place_tables(const dist_port *port, const dist_span *span, dist_tables *t,
                                 saccade_error *err)
{
    const int32_t me = port->dist->transport.rank;
    *t = (dist_tables){.n_own = span->in->keys[me],
                       .n_out = span->out->all - span->out->keys[me],
                       .n_in = span->in->all - span->in->keys[me],
                       .own_first = span->own_first,
                       .own_keys = span->own_keys,
                       .in_keys = span->in->keys,
                       .out_keys = span->out->keys};
    const int64_t terms = t->n_own + t->n_out;
    const int64_t n = t->n_own + t->n_out + 2 * t->n_in + terms;
    const size_t bytes =
        (size_t)n * sizeof(plan_row_pair) + (size_t)(span->own_keys + 1) * sizeof(int32_t);
    plan_row_pair *pairs = calloc(1, bytes);
    void *at;
    FAIL_IF_NULL(pairs);
    saccade_status status = fill(port, span, t, pairs, err);
    if (status == SACCADE_OK)
        status = port->ops->reserve(port->carrier, bytes, pairs, &at, err);
    free(pairs);
    TRY(status);
    t->own = at;
    t->out = t->own + t->n_own;
    t->in = t->out + t->n_out;
    t->in_back = t->in + t->n_in;
    t->terms = t->in_back + t->n_in;
    t->start = (int32_t *)(void *)(t->terms + terms);
    return SACCADE_OK;
}

/* ---- gradients that no other rank has a part of ---- */

/* Sets row[u] for each unit that this rank reads from its own keys; then clears units that
 * other ranks also read. */
static void find_alone(const saccade_dist *d, int32_t *row)
{
    const int32_t me = d->transport.rank;
    for (int64_t i = d->in.begin[me]; i < d->in.begin[me + 1]; i++) {
        const dist_piece *p = &d->in.piece[i];
        for (int64_t j = 0; j < p->count; j += d->unit)
            row[(p->first + j) / d->unit] = (int32_t)(p->local + j);
    }
    for (int64_t i = 0; i < d->out.begin[d->transport.ranks]; i++) {
        const dist_piece *p = &d->out.piece[i];
        for (int64_t u = p->first / d->unit; u * d->unit < p->first + p->count; u++)
            row[u] = -1;
    }
}

/* Keys of this rank that are in none of these units; returns how many. */
static int64_t list_rest(const saccade_dist *d, const int32_t *row, int32_t *rest)
{
    int64_t n = 0;
    for (int64_t u = 0; u < d->units; u++)
        for (int64_t j = 0; row[u] >= 0 && j < d->unit && u * d->unit + j < d->KV; j++)
            rest[row[u] + j] = 1;
    for (int64_t i = 0; i < d->n_keys; i++)
        if (!rest[i])
            rest[n++] = (int32_t)i;
    return n;
}

saccade_status dist_place_alone(const dist_port *port, dist_alone *out, saccade_error *err)
{
    const saccade_dist *d = port->dist;
    int32_t *row = calloc((size_t)(d->units + d->n_keys) + 1, sizeof *row);
    void *at;
    FAIL_IF_NULL(row);
    for (int64_t u = 0; u < d->units; u++)
        row[u] = -1;
    find_alone(d, row);
    const int64_t n = list_rest(d, row, row + d->units);
    const saccade_status status =
        port->ops->reserve(port->carrier, (size_t)(d->units + n) * sizeof *row, row, &at, err);
    free(row);
    TRY(status);
    *out = (dist_alone){at, (int32_t *)at + d->units, n};
    return SACCADE_OK;
}
