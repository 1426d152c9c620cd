/* A transport over NCCL. What blocks the host (coming together, first connections) is done by a
 * thread of its own that is given up when the time is over. */
#include "cuda/ranks/nccl.h"

#include "base/record.h"
#include "base/threads.h"

#include <errno.h>
#include <stdlib.h>

static void let_go(nccl_world *w)
{
    if (atomic_fetch_sub(&w->references, 1) > 1)
        return;
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    pthread_mutex_destroy(&w->in_use);
    free(w);
}

static void abort_all(void *user)
{
    nccl_end(user);
}

/* ---- coming together ---- */

/* Every rank sends every other a few bytes, so that connections are there: NCCL makes them when
 * they are first used, and would wait then for whoever does not come. */
static int connect_all(nccl_world *w, void *comm)
{
    int failed = cu_nccl.group_start();
    for (int r = 0; r < w->ranks && !failed; r++) {
        if (r == w->rank)
            continue;
        failed = cu_nccl.send((const void *)(uintptr_t)w->staged, 16, NCCL_BYTES, r, comm,
                              w->stream);
        failed = failed ? failed
                        : cu_nccl.receive((void *)(uintptr_t)(w->staged + 16), 16, NCCL_BYTES,
                                          r, comm, w->stream);
    }
    const int ended = cu_nccl.group_end();
    failed = failed ? failed : ended;
    return failed ? failed : w->driver->stream_synchronize(w->stream);
}

static void *come_together(void *arg)
{
    nccl_world *w = arg;
    void *comm = NULL, *pushed;
    int result = 1;
    if (cu_enter(w->driver, w->device, &pushed, NULL) == SACCADE_OK) {
        result = cu_nccl.init_rank(&comm, w->ranks, w->id, w->rank);
        result = result ? result : connect_all(w, comm);
        cu_leave(w->driver, pushed);
    }
    pthread_mutex_lock(&w->lock);
    w->comm = comm;
    w->result = result;
    w->is_ready = result ? -1 : 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    let_go(w);
    return NULL;
}

static saccade_status wait_together(nccl_world *w, double seconds, saccade_error *err)
{
    const struct timespec until = nccl_time(nccl_limit(seconds));
    pthread_t thread;
    int state = 0, is_late = 0;
    atomic_fetch_add(&w->references, 1);
    if (thread_begin(&thread, NULL, come_together, w)) {
        atomic_fetch_sub(&w->references, 1);
        FAIL(SACCADE_ENOMEM, "nccl: no thread could be started");
    }
    pthread_detach(thread);
    pthread_mutex_lock(&w->lock);
    while (!w->is_ready && !is_late)
        is_late = pthread_cond_timedwait(&w->changed, &w->lock, &until) == ETIMEDOUT;
    state = w->is_ready;
    pthread_mutex_unlock(&w->lock);
    FAIL_AT(!state, SACCADE_EPEER, "transport", 0, 0,
            "rank %d: the others did not come together over NCCL within %g s", w->rank,
            seconds);
    FAIL_AT(state < 0, SACCADE_EPEER, "transport", 0, 0, "rank %d: NCCL: %s", w->rank,
            cu_nccl.error_string(w->result));
    return SACCADE_OK;
}

/* ---- the transport ---- */

static void begin_waiting(nccl_world *w)
{
    pthread_condattr_t how;
    pthread_condattr_init(&how);
    pthread_condattr_setclock(&how, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &how);
    pthread_condattr_destroy(&how);
    pthread_mutex_init(&w->lock, NULL);
    pthread_mutex_init(&w->in_use, NULL);
}

static saccade_status open_world(nccl_world *w, double seconds, saccade_error *err)
{
    void *pushed;
    TRY(cu_enter(w->driver, w->device, &pushed, err));
    int failed = w->driver->stream_create(&w->stream, 1 /* CU_STREAM_NON_BLOCKING */, 0);
    failed = failed ? failed : nccl_stage(w, 64);
    cu_leave(w->driver, pushed);
    TRY(cu_check(w->driver, failed, "a stream for NCCL", err));
    TRY(wait_together(w, seconds, err));
    w->is_watched = thread_begin(&w->watcher, NULL, nccl_watch, w) == 0;
    FAIL_IF(!w->is_watched, SACCADE_ENOMEM, "nccl: no thread could be started");
    return SACCADE_OK;
}

/* With the lock: waits for exchanges that are under way; whether all are done. */
static int finish(nccl_world *w)
{
    const int64_t until = nccl_limit(w->seconds);
    while (w->n && !atomic_load(&w->has_failed) && clock_ns() < until) {
        const struct timespec next = nccl_in(POLL_NS);
        pthread_cond_timedwait(&w->changed, &w->lock, &next);
    }
    return w->n == 0 && !atomic_load(&w->has_failed);
}

static void *destroy_comm(void *arg)
{
    nccl_world *w = arg;
    void *pushed;
    if (cu_enter(w->driver, w->device, &pushed, NULL) == SACCADE_OK) {
        cu_nccl.destroy(w->comm);
        cu_leave(w->driver, pushed);
    }
    pthread_mutex_lock(&w->lock);
    w->is_destroyed = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    let_go(w);
    return NULL;
}

/* NCCL may wait there until the host's other ranks do the same. Whether it was in time. */
static int destroy_in_time(nccl_world *w)
{
    const struct timespec until = nccl_time(nccl_limit(w->seconds));
    pthread_t thread;
    int is_late = 0;
    atomic_fetch_add(&w->references, 1);
    if (thread_begin(&thread, NULL, destroy_comm, w)) {
        atomic_fetch_sub(&w->references, 1);
        return 0;
    }
    pthread_detach(thread);
    pthread_mutex_lock(&w->lock);
    while (!w->is_destroyed && !is_late)
        is_late = pthread_cond_timedwait(&w->changed, &w->lock, &until) == ETIMEDOUT;
    const int is_destroyed = w->is_destroyed;
    pthread_mutex_unlock(&w->lock);
    return is_destroyed;
}

static void free_device(nccl_world *w)
{
    for (int i = 0; i < WATCHED; i++)
        if (w->each[i].event)
            w->driver->event_destroy(w->each[i].event);
    w->driver->free(w->staged);
    w->driver->stream_destroy(w->stream);
}

/* Whoever still comes together, or does not come back from destroying, keeps what it needs:
 * stream and memory are then left alone. A communicator with something unfinished is aborted:
 * destroying it would wait for its peers. */
static void close_world(nccl_world *w)
{
    void *pushed;
    pthread_mutex_lock(&w->lock);
    const int is_ready = w->is_ready, is_done = is_ready > 0 && finish(w);
    w->is_ending = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (w->is_watched)
        pthread_join(w->watcher, NULL);
    if (is_ready && cu_enter(w->driver, w->device, &pushed, NULL) == SACCADE_OK) {
        int is_over = !is_done || nccl_tells_error(w);
        if (is_over)
            nccl_end(w);
        else
            is_over = destroy_in_time(w);
        if (is_over)
            free_device(w);
        cu_leave(w->driver, pushed);
    }
    let_go(w);
}

saccade_status saccade_nccl_create(const saccade_nccl_id *id, int32_t rank, int32_t ranks,
                                   int32_t device, saccade_transport *out, saccade_error *err)
{
    saccade_transport own;
    const cu_driver *driver;
    FAIL_IF(!id || !out, SACCADE_EINVAL, "nccl: got NULL, expected an id and a transport");
    saccade_transport_init(&own);
    TRY(RECORD_READ(&own, out, "transport"));
    FAIL_AT(ranks < 1 || ranks > SACCADE_MAX_RANKS || rank < 0 || rank >= ranks, SACCADE_EINVAL,
            "rank", 0, 0, "got %d of %d, expected one of 1 to %d", rank, ranks,
            SACCADE_MAX_RANKS);
    FAIL_AT(!(own.seconds > 0 && own.seconds < 1e6), SACCADE_EINVAL, "transport", 0, 0,
            "got %g seconds, expected more than 0 and less than 10^6", own.seconds);
    TRY(nccl_get(err));
    TRY(cu_get_driver(&driver, err));
    nccl_world *w = calloc(1, sizeof *w);
    FAIL_IF_NULL(w);
    begin_waiting(w);
    w->driver = driver;
    w->device = device;
    w->rank = rank;
    w->ranks = ranks;
    w->id = *id;
    w->seconds = own.seconds;
    atomic_init(&w->references, 1);
    const saccade_status status = open_world(w, own.seconds, err);
    if (status != SACCADE_OK) {
        close_world(w);
        return status;
    }
    own.rank = rank;
    own.ranks = ranks;
    own.user = w;
    own.exchange = nccl_exchange;
    own.exchange_on = nccl_exchange_on;
    own.abort = abort_all;
    record_write(out, &own, sizeof own);
    return SACCADE_OK;
}

void saccade_nccl_destroy(saccade_transport *transport)
{
    if (!transport || !transport->user)
        return;
    close_world(transport->user);
    transport->user = NULL;
}
