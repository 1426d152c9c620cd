/* Ranks that are threads of one process: a message is a pointer that its receiver copies from.
 * Every rank posts its sends, takes what is posted for it, and waits until its own are taken.
 * One lock for all, given up while bytes are copied: nobody leaves while others copy of it. */
#include "base/clock.h"
#include "base/record.h"
#include "base/status.h"
#include "saccade_dist.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct rank_end {
    saccade_ranks *ranks;
    int32_t rank;
    const saccade_message *sends; /* posted */
    int32_t n_sends, left;        /* of them not yet copied */
    int32_t copying;              /* from them, just now */
    int32_t *taken;               /* [ranks]: how many of them each rank has copied */
} rank_end;

struct saccade_ranks {
    int32_t n;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int has_failed;
    rank_end *end; /* [n] */
    int32_t *taken;
};

/* ---- waiting, with the lock ---- */

static const double seconds_most = 1e6; /* that a transport may have */

/* What is no number of seconds, or less than none, has passed. */
static struct timespec after(double seconds)
{
    const double given = seconds > 0 ? seconds : 0;
    const double taken = given < seconds_most ? given : seconds_most;
    const int64_t ns = clock_ns() + (int64_t)(taken * 1e9);
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000),
                             .tv_nsec = (long)(ns % 1000000000)};
}

static void fail_all(saccade_ranks *all)
{
    all->has_failed = 1;
    pthread_cond_broadcast(&all->changed);
}

/* 0: something may have changed; look again. */
static int wait_for_change(saccade_ranks *all, const struct timespec *until)
{
    if (!all->has_failed && pthread_cond_timedwait(&all->changed, &all->lock, until) != 0)
        fail_all(all); /* time is up, or there is no such time */
    return all->has_failed;
}

/* ---- messages, with the lock ---- */

/* The next message from `from` to rank `to`; NULL: not posted yet. */
static const saccade_message *next_of(const rank_end *from, int32_t to)
{
    int32_t before = from->taken[to];
    for (int32_t i = 0; i < from->n_sends; i++)
        if (from->sends[i].peer == to && before-- == 0)
            return &from->sends[i];
    return NULL;
}

static int take(saccade_ranks *all, const saccade_message *to, int32_t rank,
                const struct timespec *until)
{
    rank_end *from = &all->end[to->peer];
    const saccade_message *message;
    while (!(message = next_of(from, rank)))
        if (wait_for_change(all, until))
            return 1;
    if (all->has_failed)
        return 1;
    if (message->bytes != to->bytes) {
        fail_all(all);
        return SACCADE_OTHER_BYTES;
    }
    from->copying++;
    pthread_mutex_unlock(&all->lock);
    memcpy(to->data, message->data, to->bytes);
    pthread_mutex_lock(&all->lock);
    from->copying--;
    from->left--;
    from->taken[rank]++;
    pthread_cond_broadcast(&all->changed);
    return 0;
}

static int take_all(saccade_ranks *all, rank_end *me, const saccade_message *receives,
                    int32_t n, const struct timespec *until)
{
    for (int32_t i = 0; i < n; i++) {
        const int failed = take(all, &receives[i], me->rank, until);
        if (failed)
            return failed;
    }
    while (me->left > 0)
        if (wait_for_change(all, until))
            return 1;
    return all->has_failed;
}

static void post(saccade_ranks *all, rank_end *me, const saccade_message *sends, int32_t n)
{
    memset(me->taken, 0, (size_t)all->n * sizeof *me->taken);
    me->sends = sends;
    me->n_sends = me->left = n;
    pthread_cond_broadcast(&all->changed);
}

/* Copies are short and need nothing of this rank, so this wait ends. */
static void withdraw(saccade_ranks *all, rank_end *me)
{
    while (me->copying > 0)
        pthread_cond_wait(&all->changed, &all->lock);
    me->sends = NULL;
    me->n_sends = 0;
}

/* ---- the transport ---- */

static int are_others(const saccade_ranks *all, const saccade_message *m, int32_t n, int32_t me)
{
    for (int32_t i = 0; i < n; i++)
        if (m[i].peer < 0 || m[i].peer >= all->n || m[i].peer == me)
            return 0;
    return 1;
}

static int exchange(void *user, const saccade_message *sends, int32_t n_sends,
                    const saccade_message *receives, int32_t n_receives, double seconds)
{
    rank_end *me = user;
    saccade_ranks *all = me->ranks;
    const struct timespec until = after(seconds);
    pthread_mutex_lock(&all->lock);
    if (!are_others(all, sends, n_sends, me->rank)
        || !are_others(all, receives, n_receives, me->rank))
        fail_all(all);
    int failed = all->has_failed;
    if (!failed) {
        post(all, me, sends, n_sends);
        failed = take_all(all, me, receives, n_receives, &until);
        withdraw(all, me);
    }
    pthread_mutex_unlock(&all->lock);
    return failed;
}

static void abort_all(void *user)
{
    saccade_ranks *all = ((rank_end *)user)->ranks;
    pthread_mutex_lock(&all->lock);
    fail_all(all);
    pthread_mutex_unlock(&all->lock);
}

saccade_status saccade_ranks_transport(saccade_ranks *ranks, int32_t rank,
                                       saccade_transport *out, saccade_error *err)
{
    saccade_transport own, given;
    FAIL_AT(!ranks || !out, SACCADE_EINVAL, "ranks", 0, 0,
            "got NULL, expected ranks and a transport");
    FAIL_AT(rank < 0 || rank >= ranks->n, SACCADE_EINVAL, "rank", 0, 0,
            "got %d, expected 0 to %d", rank, ranks->n - 1);
    saccade_transport_init(&given);
    TRY(RECORD_READ(&given, out, "transport"));
    saccade_transport_init(&own);
    own.seconds = given.seconds;
    own.rank = rank;
    own.ranks = ranks->n;
    own.user = &ranks->end[rank];
    own.exchange = exchange;
    own.abort = abort_all;
    record_write(out, &own, sizeof own);
    return SACCADE_OK;
}

/* ---- the ranks ---- */

static void begin_waiting(saccade_ranks *all)
{
    pthread_condattr_t how;
    pthread_condattr_init(&how);
    pthread_condattr_setclock(&how, CLOCK_MONOTONIC);
    pthread_cond_init(&all->changed, &how);
    pthread_condattr_destroy(&how);
    pthread_mutex_init(&all->lock, NULL);
}

saccade_status saccade_ranks_create(int32_t n, saccade_ranks **out, saccade_error *err)
{
    FAIL_AT(!out, SACCADE_EINVAL, "ranks", 0, 0, "got NULL, expected a result");
    FAIL_AT(n < 1 || n > SACCADE_MAX_RANKS, SACCADE_EINVAL, "ranks", 0, 0,
            "got %d, expected 1 to %d", n, SACCADE_MAX_RANKS);
    saccade_ranks *all = calloc(1, sizeof *all);
    FAIL_IF_NULL(all);
    begin_waiting(all);
    all->n = n;
    all->end = calloc((size_t)n, sizeof *all->end);
    all->taken = calloc((size_t)n * (size_t)n, sizeof *all->taken);
    if (!all->end || !all->taken) {
        saccade_ranks_destroy(all);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    for (int32_t r = 0; r < n; r++)
        all->end[r] = (rank_end){.ranks = all, .rank = r, .taken = all->taken + (int64_t)r * n};
    *out = all;
    return SACCADE_OK;
}

void saccade_ranks_destroy(saccade_ranks *ranks)
{
    if (!ranks)
        return;
    pthread_cond_destroy(&ranks->changed);
    pthread_mutex_destroy(&ranks->lock);
    free(ranks->end);
    free(ranks->taken);
    free(ranks);
}
