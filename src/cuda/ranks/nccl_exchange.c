/* Exchanges over NCCL: one group of sends and receives each, on the run's stream, or for host
 * memory on a stream of the transport's own. */
#include "cuda/ranks/nccl.h"

#include <stdlib.h>

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
    int failed = cu_nccl.group_start();
    for (int32_t i = 0; i < n_sends && !failed; i++)
        failed = cu_nccl.send(sends[i].data, sends[i].bytes, NCCL_BYTES, sends[i].peer, w->comm,
                              stream);
    for (int32_t i = 0; i < n_receives && !failed; i++)
        failed = cu_nccl.receive(receives[i].data, receives[i].bytes, NCCL_BYTES,
                                 receives[i].peer, w->comm, stream);
    const int ended = cu_nccl.group_end();
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

int nccl_exchange_on(void *user, const saccade_message *sends, int32_t n_sends,
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
                              || nccl_add_watched(w, stream, seconds);
        if (failed)
            nccl_end(w);
    }
    cu_leave(w->driver, pushed);
    return failed || is_captured || atomic_load(&w->has_failed);
}

int nccl_stage(nccl_world *w, size_t bytes)
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
    const int64_t until = nccl_limit(seconds);
    void *event;
    int failed = w->driver->event_create(&event, 2);
    if (failed)
        return failed;
    failed = w->driver->event_record(event, w->stream);
    while (!failed && (failed = w->driver->event_query(event)) == 600) {
        if (atomic_load(&w->has_failed) || clock_ns() > until)
            break;
        failed = 0;
        nccl_nap();
    }
    w->driver->event_destroy(event);
    return failed;
}

static int exchange_host(nccl_world *w, const saccade_message *sends, int32_t n_sends,
                         const saccade_message *receives, int32_t n_receives, double seconds)
{
    saccade_message *m = calloc((size_t)(n_sends + n_receives) + 1, sizeof *m);
    int failed =
        !m || nccl_stage(w, bytes_of(sends, n_sends) + bytes_of(receives, n_receives) + 1);
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

int nccl_exchange(void *user, const saccade_message *sends, int32_t n_sends,
                  const saccade_message *receives, int32_t n_receives, double seconds)
{
    nccl_world *w = user;
    void *pushed;
    if (!enter(w, sends, n_sends, receives, n_receives, &pushed))
        return 1;
    if (exchange_host(w, sends, n_sends, receives, n_receives, seconds))
        nccl_end(w);
    cu_leave(w->driver, pushed);
    return atomic_load(&w->has_failed);
}
