/* NCCL itself waits for ever, so a thread watches: it looks at an event after each exchange
 * and, where one is late or NCCL tells of an error, ends the communicator. */
#include "cuda/ranks/nccl.h"

enum {
    FULL_POLL_NS = 200 * 1000, /* while somebody waits for room */
    STUCK_S = 5,               /* a thread inside NCCL for longer is freed by the end alone */
    RELAXED = 2                /* CU_STREAM_CAPTURE_MODE_RELAXED */
};

/* ---- the end of the communicator ---- */

/* The mode in which this thread's calls leave graphs alone that other threads capture; the one
 * before. */
static int set_capture_mode(const nccl_world *w, int mode)
{
    w->driver->capture_mode(&mode);
    return mode;
}

void nccl_end(nccl_world *w)
{
    if (atomic_exchange(&w->has_failed, 1) || !w->comm)
        return;
    const int64_t until = nccl_limit(STUCK_S);
    int is_mine = pthread_mutex_trylock(&w->in_use) == 0;
    while (!is_mine && clock_ns() < until) {
        nccl_nap();
        is_mine = pthread_mutex_trylock(&w->in_use) == 0;
    }
    const int mode = set_capture_mode(w, RELAXED);
    cu_nccl.abort(w->comm); /* kernels that wait for others end */
    set_capture_mode(w, mode);
    if (is_mine)
        pthread_mutex_unlock(&w->in_use);
}

int nccl_tells_error(nccl_world *w)
{
    int error = 0, failed = 0;
    if (pthread_mutex_trylock(&w->in_use))
        return 0;
    if (!atomic_load(&w->has_failed))
        failed = cu_nccl.async_error(w->comm, &error);
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
    const int64_t until = nccl_limit(next->seconds);
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
    return nccl_tells_error(w);
}

void *nccl_watch(void *arg)
{
    nccl_world *w = arg;
    void *pushed;
    if (cu_enter(w->driver, w->device, &pushed, NULL) != SACCADE_OK) {
        nccl_end(w); /* nobody would watch */
        return NULL;
    }
    set_capture_mode(w, RELAXED); /* or a query of an event would end others' captures */
    pthread_mutex_lock(&w->lock);
    while (!w->is_ending) {
        const struct timespec next = nccl_in(w->n == WATCHED ? FULL_POLL_NS : POLL_NS);
        if (w->n == 0)
            pthread_cond_wait(&w->changed, &w->lock);
        else
            pthread_cond_timedwait(&w->changed, &w->lock, &next);
        if (!w->is_ending && !atomic_load(&w->has_failed) && look(w))
            nccl_end(w);
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
        const struct timespec next = nccl_in(POLL_NS);
        pthread_cond_timedwait(&w->changed, &w->lock, &next);
    }
    watched *room = &w->each[(w->first + w->n) % WATCHED];
    pthread_mutex_unlock(&w->lock);
    return atomic_load(&w->has_failed) ? NULL : room;
}

/* The event is put there without the lock: that may have to wait until the device has done
 * something, which the watcher may have to see to. */
int nccl_add_watched(nccl_world *w, void *stream, double seconds)
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
    last->until = nccl_limit(seconds);
    w->n += !failed && !atomic_load(&w->has_failed);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return failed;
}
