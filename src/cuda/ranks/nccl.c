/* A transport over NCCL, found at run time: one group of sends and receives to an exchange, put
 * on the run's stream. NCCL itself waits for ever, so a thread watches: it looks at an event
 * after each exchange and, where one is late or NCCL tells of an error, ends the communicator.
 * What blocks the host (coming together, first connections) is done by a thread of its own that
 * is given up when the time is over. */
#include "cuda/driver/driver.h"

#include "base/clock.h"
#include "base/dynlib.h"
#include "base/record.h"
#include "saccade_dist.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the library ---- */

enum { NCCL_BYTES = 0 /* ncclInt8 */ };

#define NCCL_FUNCTIONS(X)                                                                    \
    X(unique_id, "ncclGetUniqueId", (saccade_nccl_id * id))                                  \
    X(init_rank, "ncclCommInitRank", (void **comm, int ranks, saccade_nccl_id id, int rank)) \
    X(abort, "ncclCommAbort", (void *comm))                                                  \
    X(destroy, "ncclCommDestroy", (void *comm))                                              \
    X(async_error, "ncclCommGetAsyncError", (void *comm, int *error))                        \
    X(group_start, "ncclGroupStart", (void))                                                 \
    X(group_end, "ncclGroupEnd", (void))                                                     \
    X(send, "ncclSend",                                                                      \
      (const void *data, size_t count, int type, int peer, void *comm, void *stream))        \
    X(receive, "ncclRecv",                                                                   \
      (void *data, size_t count, int type, int peer, void *comm, void *stream))

static struct {
#define X(name, symbol, parameters) int(*name) parameters;
    NCCL_FUNCTIONS(X)
#undef X
    const char *(*error_string)(int error);
} nccl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static saccade_error load_error;
static saccade_status load_status = SACCADE_EBACKEND;

static saccade_status load(saccade_error *err)
{
    static const char *const names[] = {"libnccl.so.2", "libnccl.so", NULL};
    dynlib *library; /* open until the process ends */
    TRY(dynlib_open(names, "NCCL", &library, err));
#define X(name, symbol, parameters)                      \
    *(void **)&nccl.name = dynlib_find(library, symbol); \
    FAIL_IF(!nccl.name, SACCADE_EBACKEND, "NCCL lacks %s: got one older than 2.7", symbol);
    NCCL_FUNCTIONS(X)
#undef X
    *(void **)&nccl.error_string = dynlib_find(library, "ncclGetErrorString");
    FAIL_IF(!nccl.error_string, SACCADE_EBACKEND, "NCCL lacks ncclGetErrorString");
    return SACCADE_OK;
}

static void load_once(void)
{
    load_status = load(&load_error);
}

static saccade_status get_nccl(saccade_error *err)
{
    pthread_once(&once, load_once);
    FAIL_IF(load_status != SACCADE_OK, SACCADE_EBACKEND, "%s", load_error.message);
    return SACCADE_OK;
}

saccade_status saccade_nccl_make_id(saccade_nccl_id *out, saccade_error *err)
{
    FAIL_IF(!out, SACCADE_EINVAL, "nccl: got NULL for the id");
    TRY(get_nccl(err));
    const int failed = nccl.unique_id(out);
    FAIL_IF(failed, SACCADE_EBACKEND, "ncclGetUniqueId: %s", nccl.error_string(failed));
    return SACCADE_OK;
}

/* ---- a rank ---- */

enum {
    WATCHED = 64,
    POLL_NS = 20 * 1000 * 1000,
    FULL_POLL_NS = 200 * 1000, /* while somebody waits for room */
    STUCK_S = 5,               /* a thread inside NCCL for longer is freed by the end alone */
    RELAXED = 2                /* CU_STREAM_CAPTURE_MODE_RELAXED */
};

/* An exchange on a stream that may not be done. It has `seconds` from when it was queued, or
 * from when the one before it was done. */
typedef struct watched {
    void *event;
    int64_t until;
    double seconds;
} watched;

typedef struct nccl_world {
    const cu_driver *driver;
    int device, rank, ranks;
    saccade_nccl_id id;
    void *comm, *stream; /* stream: for host memory */
    cu_ptr staged;       /* memory of an exchange of host memory */
    size_t staged_bytes;
    double seconds; /* what is under way may take when the transport is destroyed */
    atomic_int has_failed;
    pthread_mutex_t in_use; /* held while NCCL works with comm; has_failed is read inside */
    pthread_t watcher;
    int is_watched, is_ending;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    watched each[WATCHED]; /* a ring: from `first`, `n` of them */
    int first, n;
    atomic_int references; /* of the caller, and of a thread that comes together */
    int is_ready;          /* with the lock: 1 together, -1 not to be had */
    int is_destroyed;      /* with the lock: the communicator */
    int result;
} nccl_world;

static void let_go(nccl_world *w)
{
    if (atomic_fetch_sub(&w->references, 1) > 1)
        return;
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    pthread_mutex_destroy(&w->in_use);
    free(w);
}

static struct timespec at(int64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000),
                             .tv_nsec = (long)(ns % 1000000000)};
}

static int64_t limit_of(double seconds)
{
    return clock_ns() + (int64_t)(seconds * 1e9);
}

static struct timespec in(int64_t ns)
{
    return at(clock_ns() + ns);
}

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000}, NULL);
}

/* ---- the end of the communicator ---- */

/* The mode in which this thread's calls leave graphs alone that other threads capture; the one
 * before. */
static int set_capture_mode(const nccl_world *w, int mode)
{
    w->driver->capture_mode(&mode);
    return mode;
}

/* Frees the communicator, so whoever is inside NCCL comes out first. Who does not may wait in
 * there for a kernel that waits for a peer: only the end frees both. */
static void end_comm(nccl_world *w)
{
    if (atomic_exchange(&w->has_failed, 1) || !w->comm)
        return;
    const int64_t until = limit_of(STUCK_S);
    int is_mine = pthread_mutex_trylock(&w->in_use) == 0;
    while (!is_mine && clock_ns() < until) {
        nap();
        is_mine = pthread_mutex_trylock(&w->in_use) == 0;
    }
    const int mode = set_capture_mode(w, RELAXED);
    nccl.abort(w->comm); /* kernels that wait for others end */
    set_capture_mode(w, mode);
    if (is_mine)
        pthread_mutex_unlock(&w->in_use);
}

/* Whether NCCL tells of an error; not while another thread uses the communicator. */
static int tells_error(nccl_world *w)
{
    int error = 0, failed = 0;
    if (pthread_mutex_trylock(&w->in_use))
        return 0;
    if (!atomic_load(&w->has_failed))
        failed = nccl.async_error(w->comm, &error);
    pthread_mutex_unlock(&w->in_use);
    return failed != 0 || error != 0;
}

/* ---- the watcher ---- */

/* With the lock: the oldest exchange is done. */
static void take_oldest(nccl_world *w)
{
    w->first = (w->first + 1) % WATCHED;
    w->n--;
    watched *next = &w->each[w->first];
    const int64_t until = limit_of(next->seconds);
    if (w->n && next->until < until)
        next->until = until;
    pthread_cond_broadcast(&w->changed);
}

/* With the lock: exchanges that are done leave the ring; whether one is late or broken. */
static int look(nccl_world *w)
{
    while (w->n) {
        const watched *oldest = &w->each[w->first];
        const int state = w->driver->event_query(oldest->event);
        if (state == 0) {
            take_oldest(w);
            continue;
        }
        if (state != 600) /* CUDA_ERROR_NOT_READY */
            return 1;
        if (clock_ns() > oldest->until)
            return 1;
        break;
    }
    return tells_error(w);
}

static void *watch(void *arg)
{
    nccl_world *w = arg;
    void *pushed;
    if (cu_enter(w->driver, w->device, &pushed, NULL) != SACCADE_OK) {
        end_comm(w); /* nobody would watch */
        return NULL;
    }
    set_capture_mode(w, RELAXED); /* or a query of an event would end others' captures */
    pthread_mutex_lock(&w->lock);
    while (!w->is_ending) {
        const struct timespec next = in(w->n == WATCHED ? FULL_POLL_NS : POLL_NS);
        if (w->n == 0)
            pthread_cond_wait(&w->changed, &w->lock);
        else
            pthread_cond_timedwait(&w->changed, &w->lock, &next);
        if (!w->is_ending && !atomic_load(&w->has_failed) && look(w))
            end_comm(w);
        if (atomic_load(&w->has_failed))
            w->n = 0;
    }
    pthread_mutex_unlock(&w->lock);
    cu_leave(w->driver, pushed);
    return NULL;
}

/* A place past the ring's last, for which the watcher makes room where it is full; the watcher
 * leaves it alone until it is counted. NULL: the transport has ended. */
static watched *find_room(nccl_world *w)
{
    pthread_mutex_lock(&w->lock);
    while (w->n == WATCHED && !atomic_load(&w->has_failed)) {
        const struct timespec next = in(POLL_NS);
        pthread_cond_timedwait(&w->changed, &w->lock, &next);
    }
    watched *room = &w->each[(w->first + w->n) % WATCHED];
    pthread_mutex_unlock(&w->lock);
    return atomic_load(&w->has_failed) ? NULL : room;
}

/* An event after what is on the stream. It is put there without the lock: that may have to wait
 * until the device has done something, which the watcher may have to see to. */
static int add_watched(nccl_world *w, void *stream, double seconds)
{
    watched *last = find_room(w);
    if (!last)
        return 1;
    int failed = 0;
    if (!last->event)
        failed = w->driver->event_create(&last->event, 2 /* CU_EVENT_DISABLE_TIMING */);
    failed = failed ? failed : w->driver->event_record(last->event, stream);
    pthread_mutex_lock(&w->lock);
    last->seconds = seconds;
    last->until = limit_of(seconds);
    w->n += !failed && !atomic_load(&w->has_failed);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return failed;
}

/* ---- exchanges ---- */

static int are_others(const nccl_world *w, const saccade_message *m, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (m[i].peer < 0 || m[i].peer >= w->ranks || m[i].peer == w->rank)
            return 0;
    return 1;
}

/* Into the device's context, where these messages can be exchanged. */
static int enter(const nccl_world *w, const saccade_message *sends, int32_t n_sends,
                 const saccade_message *receives, int32_t n_receives, void **pushed)
{
    return !atomic_load(&w->has_failed) && are_others(w, sends, n_sends)
           && are_others(w, receives, n_receives)
           && cu_enter(w->driver, w->device, pushed, NULL) == SACCADE_OK;
}

static int put_group(nccl_world *w, const saccade_message *sends, int32_t n_sends,
                     const saccade_message *receives, int32_t n_receives, void *stream)
{
    int failed = nccl.group_start();
    for (int32_t i = 0; i < n_sends && !failed; i++)
        failed = nccl.send(sends[i].data, sends[i].bytes, NCCL_BYTES, sends[i].peer, w->comm,
                           stream);
    for (int32_t i = 0; i < n_receives && !failed; i++)
        failed = nccl.receive(receives[i].data, receives[i].bytes, NCCL_BYTES, receives[i].peer,
                              w->comm, stream);
    const int ended = nccl.group_end();
    return failed ? failed : ended;
}

static int put_on(nccl_world *w, const saccade_message *sends, int32_t n_sends,
                  const saccade_message *receives, int32_t n_receives, void *stream)
{
    int failed = 1;
    pthread_mutex_lock(&w->in_use);
    if (!atomic_load(&w->has_failed))
        failed = put_group(w, sends, n_sends, receives, n_receives, stream);
    pthread_mutex_unlock(&w->in_use);
    return failed;
}

static int exchange_on(void *user, const saccade_message *sends, int32_t n_sends,
                       const saccade_message *receives, int32_t n_receives, void *stream,
                       double seconds)
{
    nccl_world *w = user;
    void *pushed;
    if (!enter(w, sends, n_sends, receives, n_receives, &pushed))
        return 1;
    int is_captured = 0; /* into a graph: refused, since nothing could be watched */
    int failed = w->driver->stream_capturing(stream, &is_captured);
    if (!is_captured) {
        failed = failed ? failed
                        : put_on(w, sends, n_sends, receives, n_receives, stream)
                              || add_watched(w, stream, seconds);
        if (failed)
            end_comm(w);
    }
    cu_leave(w->driver, pushed);
    return failed || is_captured || atomic_load(&w->has_failed);
}

static int stage(nccl_world *w, size_t bytes)
{
    if (bytes <= w->staged_bytes)
        return 0;
    if (w->staged)
        w->driver->free(w->staged);
    w->staged_bytes = 0;
    const int failed = w->driver->alloc(&w->staged, bytes);
    w->staged_bytes = failed ? 0 : bytes;
    return failed;
}

static size_t bytes_of(const saccade_message *m, int32_t n)
{
    size_t bytes = 0;
    for (int32_t i = 0; i < n; i++)
        bytes += m[i].bytes;
    return bytes;
}

/* Messages of host memory become ones of the device, one after the other from *place on, copied
 * on the stream of the exchange: a copy by itself may return before the device has it all. */
static int to_device(nccl_world *w, const saccade_message *m, int32_t n, int is_copied,
                     cu_ptr *place, saccade_message *out)
{
    int failed = 0;
    for (int32_t i = 0; i < n && !failed; i++) {
        out[i] = (saccade_message){(void *)(uintptr_t)*place, m[i].bytes, m[i].peer};
        if (is_copied)
            failed =
                w->driver->copy_on(*place, (cu_ptr)(uintptr_t)m[i].data, m[i].bytes, w->stream);
        *place += m[i].bytes;
    }
    return failed;
}

/* 0 when what is on w->stream is done in time. */
static int wait_for(nccl_world *w, double seconds)
{
    const int64_t until = limit_of(seconds);
    void *event;
    int failed = w->driver->event_create(&event, 2);
    if (failed)
        return failed;
    failed = w->driver->event_record(event, w->stream);
    while (!failed && (failed = w->driver->event_query(event)) == 600) {
        if (atomic_load(&w->has_failed) || clock_ns() > until)
            break;
        failed = 0;
        nap();
    }
    w->driver->event_destroy(event);
    return failed;
}

static int exchange_host(nccl_world *w, const saccade_message *sends, int32_t n_sends,
                         const saccade_message *receives, int32_t n_receives, double seconds)
{
    saccade_message *m = calloc((size_t)(n_sends + n_receives) + 1, sizeof *m);
    int failed = !m || stage(w, bytes_of(sends, n_sends) + bytes_of(receives, n_receives) + 1);
    cu_ptr place = w->staged;
    failed = failed || to_device(w, sends, n_sends, 1, &place, m);
    failed = failed || to_device(w, receives, n_receives, 0, &place, m + n_sends);
    failed = failed || put_on(w, m, n_sends, m + n_sends, n_receives, w->stream)
             || wait_for(w, seconds);
    for (int32_t i = 0; i < n_receives && !failed; i++)
        failed = w->driver->copy((cu_ptr)(uintptr_t)receives[i].data,
                                 (cu_ptr)(uintptr_t)m[n_sends + i].data, receives[i].bytes);
    free(m);
    return failed;
}

static int exchange(void *user, const saccade_message *sends, int32_t n_sends,
                    const saccade_message *receives, int32_t n_receives, double seconds)
{
    nccl_world *w = user;
    void *pushed;
    if (!enter(w, sends, n_sends, receives, n_receives, &pushed))
        return 1;
    if (exchange_host(w, sends, n_sends, receives, n_receives, seconds))
        end_comm(w);
    cu_leave(w->driver, pushed);
    return atomic_load(&w->has_failed);
}

static void abort_all(void *user)
{
    end_comm(user);
}

/* ---- coming together ---- */

/* Every rank sends every other a few bytes, so that connections are there: NCCL makes them when
 * they are first used, and would wait then for whoever does not come. */
static int connect_all(nccl_world *w, void *comm)
{
    int failed = nccl.group_start();
    for (int r = 0; r < w->ranks && !failed; r++) {
        if (r == w->rank)
            continue;
        failed =
            nccl.send((const void *)(uintptr_t)w->staged, 16, NCCL_BYTES, r, comm, w->stream);
        failed = failed ? failed
                        : nccl.receive((void *)(uintptr_t)(w->staged + 16), 16, NCCL_BYTES, r,
                                       comm, w->stream);
    }
    const int ended = nccl.group_end();
    failed = failed ? failed : ended;
    return failed ? failed : w->driver->stream_synchronize(w->stream);
}

static void *come_together(void *arg)
{
    nccl_world *w = arg;
    void *comm = NULL, *pushed;
    int result = 1;
    if (cu_enter(w->driver, w->device, &pushed, NULL) == SACCADE_OK) {
        result = nccl.init_rank(&comm, w->ranks, w->id, w->rank);
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
    const struct timespec until = at(limit_of(seconds));
    pthread_t thread;
    int state = 0, is_late = 0;
    atomic_fetch_add(&w->references, 1);
    if (pthread_create(&thread, NULL, come_together, w)) {
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
            nccl.error_string(w->result));
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
    failed = failed ? failed : stage(w, 64);
    cu_leave(w->driver, pushed);
    TRY(cu_check(w->driver, failed, "a stream for NCCL", err));
    TRY(wait_together(w, seconds, err));
    w->is_watched = pthread_create(&w->watcher, NULL, watch, w) == 0;
    FAIL_IF(!w->is_watched, SACCADE_ENOMEM, "nccl: no thread could be started");
    return SACCADE_OK;
}

/* With the lock: waits for exchanges that are under way; whether all are done. */
static int finish(nccl_world *w)
{
    const int64_t until = limit_of(w->seconds);
    while (w->n && !atomic_load(&w->has_failed) && clock_ns() < until) {
        const struct timespec next = in(POLL_NS);
        pthread_cond_timedwait(&w->changed, &w->lock, &next);
    }
    return w->n == 0 && !atomic_load(&w->has_failed);
}

static void *destroy_comm(void *arg)
{
    nccl_world *w = arg;
    void *pushed;
    if (cu_enter(w->driver, w->device, &pushed, NULL) == SACCADE_OK) {
        nccl.destroy(w->comm);
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
    const struct timespec until = at(limit_of(w->seconds));
    pthread_t thread;
    int is_late = 0;
    atomic_fetch_add(&w->references, 1);
    if (pthread_create(&thread, NULL, destroy_comm, w)) {
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
        int is_over = !is_done || tells_error(w);
        if (is_over)
            end_comm(w);
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
    TRY(get_nccl(err));
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
    own.exchange = exchange;
    own.exchange_on = exchange_on;
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
