/* Sequences and their pages: add, fork, free, truncate, drop, grow. Checks come first and what
 * they pass cannot fail, so that a call that fails has changed nothing. */
#include "kv/kv.h"

#include "base/record.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

static const int64_t MOST = (int64_t)1 << 30;

/* ---- the cache ---- */

static saccade_status check_options(const saccade_kv_options *o, saccade_error *err)
{
    FAIL_AT(o->page < 1 || o->page > MOST, SACCADE_EINVAL, "page", 0, 0,
            "got %lld keys, expected 1 to 2^30", (long long)o->page);
    FAIL_AT(o->pages < 1 || o->pages > MOST, SACCADE_EINVAL, "pages", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)o->pages);
    FAIL_AT(o->sequences < 1 || o->sequences > 1 << 24, SACCADE_EINVAL, "sequences", 0, 0,
            "got %lld, expected 1 to 2^24", (long long)o->sequences);
    FAIL_AT(o->most_keys < 0 || o->most_keys > MOST, SACCADE_EINVAL, "most_keys", 0, 0,
            "got %lld, expected 0 to 2^30", (long long)o->most_keys);
    return SACCADE_OK;
}

/* Entries of a sequence: pages of all its keys, no more than hold 2^30 of them. */
static int64_t columns_of(const saccade_kv_options *o)
{
    const int64_t most = MOST / o->page + (MOST % o->page != 0);
    const int64_t wanted = o->most_keys ? (o->most_keys + o->page - 1) / o->page : o->pages;
    return wanted < most ? wanted : most;
}

static saccade_status allocate(saccade_kv *c, saccade_error *err)
{
    const double bytes = (double)c->sequences * (double)c->columns * sizeof *c->table;
    FAIL_IF(bytes > 0x1p46, SACCADE_ENOMEM, "out of memory");
    c->sequence = calloc((size_t)c->sequences, sizeof *c->sequence);
    c->growth = calloc((size_t)c->sequences, sizeof *c->growth);
    c->copy = calloc((size_t)c->sequences, sizeof *c->copy);
    c->users = calloc((size_t)c->pages, sizeof *c->users);
    c->free_page = calloc((size_t)c->pages, sizeof *c->free_page);
    c->table = calloc((size_t)(c->sequences * c->columns), sizeof *c->table);
    c->left = calloc((size_t)c->sequences, sizeof *c->left);
    c->marked = calloc((size_t)c->sequences, 1);
    FAIL_IF(!c->sequence || !c->growth || !c->copy || !c->users || !c->free_page || !c->table
                || !c->left || !c->marked,
            SACCADE_ENOMEM, "out of memory");
    return SACCADE_OK;
}

saccade_status saccade_kv_create(const saccade_kv_options *options, saccade_kv **out,
                                 saccade_error *err)
{
    saccade_kv_options o;
    FAIL_AT(!options || !out, SACCADE_EINVAL, "kv", 0, 0,
            "got NULL, expected options and a result");
    saccade_kv_options_init(&o);
    TRY(RECORD_READ(&o, options, "kv options"));
    TRY(check_options(&o, err));
    saccade_kv *c = calloc(1, sizeof *c);
    FAIL_IF_NULL(c);
    c->pages = c->n_free = o.pages;
    c->page = o.page;
    c->sequences = o.sequences;
    c->columns = columns_of(&o);
    c->most_keys = o.most_keys ? o.most_keys : c->columns * o.page;
    const saccade_status status = allocate(c, err);
    if (status != SACCADE_OK) {
        saccade_kv_destroy(c);
        return status;
    }
    for (int64_t i = 0; i < c->sequences; i++)
        c->sequence[i].length = -1;
    for (int64_t i = 0; i < c->pages; i++) /* the first page is taken first */
        c->free_page[i] = (int32_t)(c->pages - 1 - i);
    *out = c;
    return SACCADE_OK;
}

void saccade_kv_destroy(saccade_kv *c)
{
    if (!c)
        return;
    free(c->sequence);
    free(c->growth);
    free(c->copy);
    free(c->users);
    free(c->free_page);
    free(c->table);
    free(c->left);
    free(c->marked);
    free(c);
}

/* ---- pages ---- */

static int32_t take_page(saccade_kv *c)
{
    const int32_t page = c->free_page[--c->n_free];
    c->users[page] = 1;
    return page;
}

static void leave_page(saccade_kv *c, int32_t page)
{
    if (page >= 0 && --c->users[page] == 0)
        c->free_page[c->n_free++] = page;
}

/* What grow left to be written and copied is void once pages change hands. */
static void forget_growth(saccade_kv *c)
{
    c->n_growths = c->n_copies = 0;
}

/* EINVAL where there is no such sequence. */
static saccade_status check_sequence(const saccade_kv *c, int32_t sequence, saccade_error *err)
{
    FAIL_AT(!c, SACCADE_EINVAL, "kv", 0, 0, "got NULL, expected a cache");
    FAIL_AT(sequence < 0 || sequence >= c->sequences || c->sequence[sequence].length < 0,
            SACCADE_EINVAL, "sequence", 0, 0, "got %d, expected one that was added", sequence);
    return SACCADE_OK;
}

/* ---- sequences ---- */

saccade_status saccade_kv_add(saccade_kv *c, int32_t *sequence, saccade_error *err)
{
    int32_t i = 0;
    FAIL_AT(!c || !sequence, SACCADE_EINVAL, "kv", 0, 0,
            "got NULL, expected a cache and a result");
    while (i < c->sequences && c->sequence[i].length >= 0)
        i++;
    FAIL_AT(i == c->sequences, SACCADE_ELIMIT, "sequences", 0, 0,
            "got one more, expected at most %lld", (long long)c->sequences);
    c->sequence[i] = (kv_sequence){0, 0};
    *sequence = i;
    return SACCADE_OK;
}

saccade_status saccade_kv_fork(saccade_kv *c, int32_t sequence, int32_t *child,
                               saccade_error *err)
{
    TRY(check_sequence(c, sequence, err));
    TRY(saccade_kv_add(c, child, err));
    const int64_t n = kv_pages_of(c, c->sequence[sequence].length);
    const int32_t *from = kv_row(c, sequence);
    int32_t *to = kv_row(c, *child);
    forget_growth(c);
    c->sequence[*child] = c->sequence[sequence];
    for (int64_t i = 0; i < n; i++) {
        to[i] = from[i];
        if (from[i] >= 0)
            c->users[from[i]]++;
    }
    return SACCADE_OK;
}

static void shorten(saccade_kv *c, int32_t sequence, int64_t length)
{
    kv_sequence *s = &c->sequence[sequence];
    int32_t *row = kv_row(c, sequence);
    for (int64_t i = kv_pages_of(c, length); i < kv_pages_of(c, s->length); i++)
        leave_page(c, row[i]);
    forget_growth(c);
    s->length = length;
    if (s->dropped > kv_pages_of(c, length))
        s->dropped = kv_pages_of(c, length);
}

saccade_status saccade_kv_free(saccade_kv *c, int32_t sequence, saccade_error *err)
{
    TRY(check_sequence(c, sequence, err));
    shorten(c, sequence, 0);
    c->sequence[sequence].length = -1;
    return SACCADE_OK;
}

saccade_status saccade_kv_truncate(saccade_kv *c, int32_t sequence, int64_t length,
                                   saccade_error *err)
{
    TRY(check_sequence(c, sequence, err));
    const kv_sequence *s = &c->sequence[sequence];
    FAIL_AT(length < 0 || length > s->length, SACCADE_EINVAL, "length", 0, 0,
            "got %lld, expected 0 to %lld", (long long)length, (long long)s->length);
    FAIL_AT(length % c->page && kv_pages_of(c, length) <= s->dropped, SACCADE_EINVAL, "length",
            0, 0, "got %lld, expected %lld or more: the page of its last key was dropped",
            (long long)length, (long long)(s->dropped * c->page));
    shorten(c, sequence, length);
    return SACCADE_OK;
}

saccade_status saccade_kv_drop(saccade_kv *c, int32_t sequence, int64_t first,
                               saccade_error *err)
{
    TRY(check_sequence(c, sequence, err));
    kv_sequence *s = &c->sequence[sequence];
    FAIL_AT(first < 0 || first > s->length, SACCADE_EINVAL, "first", 0, 0,
            "got %lld, expected 0 to %lld", (long long)first, (long long)s->length);
    int32_t *row = kv_row(c, sequence);
    forget_growth(c);
    for (; s->dropped < first / c->page; s->dropped++) {
        leave_page(c, row[s->dropped]);
        row[s->dropped] = -1;
    }
    return SACCADE_OK;
}

/* ---- growing ---- */

/* The page that a sequence's next key goes to, if it has begun; else -1. */
static int32_t open_page(const saccade_kv *c, int32_t sequence)
{
    const int64_t length = c->sequence[sequence].length;
    return length % c->page ? kv_row(c, sequence)[length / c->page] : -1;
}

/* Pages that a grow needs. Of sequences that share an open page all that write to it get one of
 * their own but the last, if nobody else shares it. */
static int64_t pages_needed(saccade_kv *c, const int32_t *sequences, const int32_t *counts,
                            int32_t n)
{
    int64_t needed = 0, n_left = 0;
    for (int32_t i = 0; i < n; i++) {
        const int64_t length = c->sequence[sequences[i]].length;
        const int32_t open = counts[i] ? open_page(c, sequences[i]) : -1;
        needed += kv_pages_of(c, length + counts[i]) - kv_pages_of(c, length);
        if (open >= 0 && c->users[open] > 1) {
            needed++;
            c->users[open]--;
            c->left[n_left++] = open;
        }
    }
    while (n_left)
        c->users[c->left[--n_left]]++;
    return needed;
}

static saccade_status check_growth(saccade_kv *c, const int32_t *sequences,
                                   const int32_t *counts, int32_t n, saccade_error *err)
{
    FAIL_AT(!c, SACCADE_EINVAL, "kv", 0, 0, "got NULL, expected a cache");
    FAIL_AT(n < 0 || n > c->sequences || (n && (!sequences || !counts)), SACCADE_EINVAL, "n", 0,
            0, "got %d%s, expected 0 to %lld and their arrays", n,
            sequences && counts ? "" : " and NULL", (long long)c->sequences);
    memset(c->marked, 0, (size_t)c->sequences);
    for (int32_t i = 0; i < n; i++) {
        TRY(check_sequence(c, sequences[i], err));
        FAIL_AT(c->marked[sequences[i]], SACCADE_EINVAL, "sequences", 0, 0,
                "got %d twice, expected it once", sequences[i]);
        c->marked[sequences[i]] = 1;
        const int64_t length = c->sequence[sequences[i]].length;
        FAIL_AT(counts[i] < 0 || counts[i] > c->most_keys - length,
                counts[i] < 0 ? SACCADE_EINVAL : SACCADE_ELIMIT, "counts", 0, 0,
                "got %d for sequence %d, expected 0 to %lld", counts[i], sequences[i],
                (long long)(c->most_keys - length));
    }
    return SACCADE_OK;
}

static void grow(saccade_kv *c, int32_t sequence, int32_t count)
{
    kv_sequence *s = &c->sequence[sequence];
    int32_t *row = kv_row(c, sequence);
    const int32_t open = count ? open_page(c, sequence) : -1;
    if (open >= 0 && c->users[open] > 1) {
        const int32_t own = take_page(c);
        leave_page(c, open);
        row[s->length / c->page] = own;
        c->copy[c->n_copies++] = (kv_copy){open, own};
    }
    for (int64_t i = kv_pages_of(c, s->length); i < kv_pages_of(c, s->length + count); i++)
        row[i] = take_page(c);
    c->growth[c->n_growths++] = (kv_growth){sequence, s->length, count};
    s->length += count;
}

saccade_status saccade_kv_grow(saccade_kv *c, const int32_t *sequences, const int32_t *counts,
                               int32_t n, saccade_error *err)
{
    TRY(check_growth(c, sequences, counts, n, err));
    const int64_t needed = pages_needed(c, sequences, counts, n);
    FAIL_AT(needed > c->n_free, SACCADE_ELIMIT, "pages", 0, 0,
            "got %lld free, expected %lld or more", (long long)c->n_free, (long long)needed);
    forget_growth(c);
    for (int32_t i = 0; i < n; i++)
        grow(c, sequences[i], counts[i]);
    return SACCADE_OK;
}

/* ---- what it comes to ---- */

int64_t saccade_kv_copies(const saccade_kv *c, int32_t *pairs, int64_t most)
{
    for (int64_t i = 0; c && pairs && i < c->n_copies && i < most; i++) {
        pairs[2 * i] = c->copy[i].from;
        pairs[2 * i + 1] = c->copy[i].to;
    }
    return c ? c->n_copies : 0;
}

int64_t saccade_kv_slots(const saccade_kv *c, int64_t *slots, int64_t most)
{
    int64_t n = 0;
    for (int64_t i = 0; c && i < c->n_growths; i++) {
        const kv_growth *g = &c->growth[i];
        const int32_t *row = kv_row(c, g->sequence);
        for (int64_t j = g->first; j < g->first + g->count; j++, n++)
            if (slots && n < most)
                slots[n] = row[j / c->page] * c->page + j % c->page;
    }
    return n;
}

saccade_status saccade_kv_table(const saccade_kv *c, const int32_t *sequences, int32_t n,
                                int32_t *table, int64_t columns, int32_t *lengths,
                                saccade_error *err)
{
    FAIL_AT(n < 0 || (n && !sequences), SACCADE_EINVAL, "kv", 0, 0,
            "got %d sequences%s, expected 0 or more and their array", n,
            sequences ? "" : " and NULL");
    for (int32_t i = 0; i < n; i++) {
        TRY(check_sequence(c, sequences[i], err));
        const int64_t pages = kv_pages_of(c, c->sequence[sequences[i]].length);
        FAIL_AT(table && pages > columns, SACCADE_EINVAL, "columns", 0, 0,
                "got %lld, expected %lld or more, the pages of sequence %d", (long long)columns,
                (long long)pages, sequences[i]);
    }
    for (int32_t i = 0; i < n; i++) {
        const int64_t length = c->sequence[sequences[i]].length;
        const int32_t *row = kv_row(c, sequences[i]);
        if (lengths)
            lengths[i] = (int32_t)length;
        for (int64_t j = 0; table && j < columns; j++)
            table[i * columns + j] = j < kv_pages_of(c, length) ? row[j] : -1;
    }
    return SACCADE_OK;
}

int64_t saccade_kv_length(const saccade_kv *c, int32_t sequence)
{
    return c && sequence >= 0 && sequence < c->sequences ? c->sequence[sequence].length : -1;
}

int64_t saccade_kv_free_pages(const saccade_kv *c)
{
    return c ? c->n_free : 0;
}
