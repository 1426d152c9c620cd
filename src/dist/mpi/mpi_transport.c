/* A transport over MPI: non-blocking receives and sends, looked at in turn until all are done,
 * the time is up, or another process tells that it has failed. Messages longer than an int go
 * in pieces.
 *
 * A process sends nothing to one that has not told that it is there and its receives are: what
 * MPI once holds for a process that comes late cannot be taken back, and would be read when the
 * memory is gone. After a failure transfers under way are ended by both sides. */
#include "saccade_mpi.h"

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* READY: receives are there. GONE: after a failure, none is under way any more. */
enum { DATA_TAG = 1, FAILED_TAG = 2, READY_TAG = 3, GONE_TAG = 4 };
static const size_t piece_bytes = (size_t)1 << 30;
static const double drain_seconds = 30; /* for what is under way when an exchange fails */

typedef struct mpi_world {
    MPI_Comm comm;
    int rank, ranks;
    atomic_int has_failed; /* in staged mode one thread may abort what another exchanges */
    MPI_Request *requests; /* grown by the largest exchange */
    int *peer;             /* of each request */
    int room;
    char *is_told; /* [ranks]: peers that have been told something, or are waited for */
} mpi_world;

/* One exchange. Its requests: receives, a READY of each peer that is sent to, then sends. */
typedef struct mpi_step {
    mpi_world *w;
    const saccade_message *sends, *receives;
    int32_t n_sends, n_receives;
    int n_in, n_ready, n; /* requests to receive, those and READY, and all */
    int next, waited;     /* place of the next send; peers that are not ready */
} mpi_step;

static saccade_status fail(saccade_error *err, saccade_status status, const char *message)
{
    if (err) {
        memset(err, 0, sizeof *err);
        err->status = status;
        snprintf(err->where, sizeof err->where, "mpi");
        snprintf(err->message, sizeof err->message, "%s", message);
    }
    return status;
}

/* ---- an exchange ---- */

static int pieces_of(const saccade_message *m, int32_t n)
{
    int pieces = 0;
    for (int32_t i = 0; i < n; i++)
        pieces += (int)((m[i].bytes + piece_bytes - 1) / piece_bytes);
    return pieces;
}

static int make_room(mpi_world *w, int n)
{
    if (n <= w->room)
        return 1;
    MPI_Request *more = realloc(w->requests, (size_t)n * sizeof(MPI_Request));
    w->requests = more ? more : w->requests;
    int *peer = realloc(w->peer, (size_t)n * sizeof(int));
    w->peer = peer ? peer : w->peer;
    if (!more || !peer)
        return 0;
    w->room = n;
    return 1;
}

/* All pieces of a message; returns the place of the next request. */
static int begin(mpi_world *w, const saccade_message *m, int is_send, int at)
{
    for (size_t off = 0; off < m->bytes; off += piece_bytes, at++) {
        const size_t left = m->bytes - off;
        const int bytes = (int)(left < piece_bytes ? left : piece_bytes);
        char *data = (char *)m->data + off;
        w->peer[at] = m->peer;
        if (is_send)
            MPI_Isend(data, bytes, MPI_BYTE, m->peer, DATA_TAG, w->comm, &w->requests[at]);
        else
            MPI_Irecv(data, bytes, MPI_BYTE, m->peer, DATA_TAG, w->comm, &w->requests[at]);
    }
    return at;
}

/* A message without bytes, which needs no receiver to be sent. */
static void tell(MPI_Comm comm, int peer, int tag)
{
    static const char nothing;
    MPI_Request request;
    if (MPI_Isend(&nothing, 0, MPI_BYTE, peer, tag, comm, &request) == MPI_SUCCESS)
        MPI_Request_free(&request);
}

static void tell_failure(MPI_Comm comm)
{
    int rank, ranks;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    for (int r = 0; r < ranks; r++)
        if (r != rank)
            tell(comm, r, FAILED_TAG);
}

/* Tells each peer of these messages once. */
static void tell_peers(mpi_world *w, const saccade_message *m, int32_t n, int tag)
{
    memset(w->is_told, 0, (size_t)w->ranks);
    for (int32_t i = 0; i < n; i++)
        if (m[i].bytes && !w->is_told[m[i].peer]) {
            w->is_told[m[i].peer] = 1;
            tell(w->comm, m[i].peer, tag);
        }
}

/* Receives are there before any peer learns of it. */
static void begin_step(mpi_step *s)
{
    static char nothing;
    mpi_world *w = s->w;
    int at = 0;
    for (int32_t i = 0; i < s->n_receives; i++)
        at = begin(w, &s->receives[i], 0, at);
    s->n_in = at;
    tell_peers(w, s->receives, s->n_receives, READY_TAG);
    memset(w->is_told, 0, (size_t)w->ranks);
    for (int32_t i = 0; i < s->n_sends; i++) {
        const int peer = s->sends[i].peer;
        if (!s->sends[i].bytes || w->is_told[peer])
            continue;
        w->is_told[peer] = 1;
        w->peer[at] = peer;
        MPI_Irecv(&nothing, 0, MPI_BYTE, peer, READY_TAG, w->comm, &w->requests[at++]);
    }
    s->waited = at - s->n_in;
    s->n_ready = s->next = at;
    s->n = at + pieces_of(s->sends, s->n_sends);
    for (; at < s->n; at++)
        w->requests[at] = MPI_REQUEST_NULL;
}

/* Sends to those that have become ready. */
static int send_to_ready(mpi_step *s)
{
    mpi_world *w = s->w;
    for (int i = s->n_in; s->waited && i < s->n_ready; i++) {
        int is_there = 0;
        if (w->requests[i] == MPI_REQUEST_NULL)
            continue;
        if (MPI_Test(&w->requests[i], &is_there, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return 0;
        for (int32_t k = 0; is_there && k < s->n_sends; k++)
            if (s->sends[k].peer == w->peer[i])
                s->next = begin(w, &s->sends[k], 1, s->next);
        s->waited -= is_there;
    }
    return 1;
}

/* Did all receives bring as many bytes as they had room for? Longer messages are an error that
 * MPI itself reports. */
static int is_whole(const saccade_message *m, int32_t n, const MPI_Status *status)
{
    for (int32_t i = 0; i < n; i++)
        for (size_t off = 0; off < m[i].bytes; off += piece_bytes, status++) {
            const size_t left = m[i].bytes - off;
            int bytes;
            MPI_Get_count(status, MPI_BYTE, &bytes);
            if (bytes != (int)(left < piece_bytes ? left : piece_bytes))
                return 0;
        }
    return 1;
}

static int another_failed(mpi_world *w)
{
    int flag = 0;
    if (MPI_Iprobe(MPI_ANY_SOURCE, FAILED_TAG, w->comm, &flag, MPI_STATUS_IGNORE))
        return 1;
    return flag;
}

/* 0 when all are done. */
static int wait_for(mpi_step *s, MPI_Status *status, double until)
{
    mpi_world *w = s->w;
    for (int done = 0, turn = 0;; turn++) {
        if (!send_to_ready(s))
            return 1;
        if (!s->waited && MPI_Testall(s->n, w->requests, &done, status) != MPI_SUCCESS)
            return 1;
        if (done)
            return 0;
        if (w->has_failed || (turn % 16 == 15 && (another_failed(w) || MPI_Wtime() > until)))
            return 1;
        sched_yield(); /* there may be more processes than cores */
    }
}

/* ---- after a failure ---- */

/* Whether a request is done, or its send will never be. */
static int is_over(mpi_world *w, int i, int is_send)
{
    int done = 1;
    if (w->requests[i] == MPI_REQUEST_NULL)
        return 1;
    MPI_Test(&w->requests[i], &done, MPI_STATUS_IGNORE);
    if (!done && is_send)
        MPI_Iprobe(w->peer[i], GONE_TAG, w->comm, &done, MPI_STATUS_IGNORE);
    return done;
}

/* Until requests [first, past) are over, or at the latest at this time. */
static void drain(mpi_world *w, int first, int past, int is_send, double until)
{
    for (int left = 1; left && MPI_Wtime() < until;) {
        left = 0;
        for (int i = first; i < past; i++)
            left += !is_over(w, i, is_send);
        sched_yield();
    }
}

/* What nobody has begun to send is cancelled. The rest is waited for, since it writes to or
 * reads from memory that the caller takes back: its peers are in this exchange. */
static void give_up(mpi_step *s, double until)
{
    mpi_world *w = s->w;
    for (int i = 0; i < s->n_ready; i++)
        if (w->requests[i] != MPI_REQUEST_NULL)
            MPI_Cancel(&w->requests[i]);
    drain(w, 0, s->n_ready, 0, until);
    tell_peers(w, s->receives, s->n_receives, GONE_TAG);
    drain(w, s->n_ready, s->next, 1, until);
    for (int i = 0; i < s->n; i++)
        if (w->requests[i] != MPI_REQUEST_NULL)
            MPI_Request_free(&w->requests[i]);
}

static int are_others(const mpi_world *w, const saccade_message *m, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (m[i].peer < 0 || m[i].peer >= w->ranks || m[i].peer == w->rank)
            return 0;
    return 1;
}

/* This exchange and all later ones. */
static int failed(mpi_world *w)
{
    w->has_failed = 1;
    return 1;
}

static int run_step(mpi_step *s, MPI_Status *status, double seconds)
{
    begin_step(s);
    if (wait_for(s, status, MPI_Wtime() + seconds)) {
        s->w->has_failed = 1; /* for abort of another thread too */
        give_up(s, MPI_Wtime() + drain_seconds);
        return 1;
    }
    return is_whole(s->receives, s->n_receives, status) ? 0 : SACCADE_OTHER_BYTES;
}

static int exchange(void *user, const saccade_message *sends, int32_t n_sends,
                    const saccade_message *receives, int32_t n_receives, double seconds)
{
    mpi_world *w = user;
    mpi_step s = {.w = w,
                  .sends = sends,
                  .receives = receives,
                  .n_sends = n_sends,
                  .n_receives = n_receives};
    if (w->has_failed || !are_others(w, sends, n_sends) || !are_others(w, receives, n_receives)
        || another_failed(w))
        return failed(w);
    const int n = pieces_of(receives, n_receives) + n_sends + pieces_of(sends, n_sends);
    MPI_Status *status = malloc(((size_t)n + 1) * sizeof *status);
    if (!status || !make_room(w, n)) {
        free(status);
        return failed(w);
    }
    const int has_failed = run_step(&s, status, seconds);
    free(status);
    if (has_failed)
        w->has_failed = 1;
    return has_failed;
}

static void abort_all(void *user)
{
    mpi_world *w = user;
    w->has_failed = 1;
    tell_failure(w->comm);
}

/* ---- the transport ---- */

/* A caller that was compiled with another header has a smaller or larger record, as
 * base/record.h says, which is not in this library. */
static int is_record(const saccade_transport *given)
{
    const size_t least = offsetof(saccade_transport, abort), most = (size_t)1 << 16;
    return given && given->size >= least && given->size <= most
           && given->size % sizeof given->size == 0;
}

/* Writes as much of *own as the caller's record holds, and 0 to what is left of it. */
static void fill_record(const saccade_transport *own, saccade_transport *to)
{
    const size_t size = to->size, shared = size < sizeof *own ? size : sizeof *own;
    memcpy(to, own, shared);
    memset((char *)to + shared, 0, size - shared);
    to->size = size;
}

static mpi_world *open_world(MPI_Comm comm)
{
    mpi_world *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->comm = comm;
    MPI_Comm_rank(comm, &w->rank);
    MPI_Comm_size(comm, &w->ranks);
    w->is_told = malloc((size_t)w->ranks);
    if (!w->is_told) {
        free(w);
        return NULL;
    }
    return w;
}

/* Memory comes after what all processes take part in, or others would wait there for one that
 * has none: so they find its failure when they exchange. */
saccade_status saccade_mpi_create(MPI_Comm comm, saccade_transport *out, saccade_error *err)
{
    MPI_Comm own;
    int is_ready = 0, level = MPI_THREAD_SINGLE;
    if (!is_record(out))
        return fail(err, SACCADE_EINVAL, "got no transport, expected an initialised one");
    MPI_Initialized(&is_ready);
    if (!is_ready)
        return fail(err, SACCADE_EINVAL, "got MPI not initialised, expected MPI_Init before");
    if (MPI_Comm_dup(comm, &own) != MPI_SUCCESS)
        return fail(err, SACCADE_EPEER, "the communicator cannot be duplicated");
    MPI_Query_thread(&level);
    MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
    mpi_world *w = open_world(own);
    if (!w) {
        tell_failure(own);
        return fail(err, SACCADE_ENOMEM, "out of memory");
    }
    saccade_transport made;
    saccade_transport_init(&made);
    if (out->size > offsetof(saccade_transport, seconds))
        made.seconds = out->seconds;
    made.rank = w->rank;
    made.ranks = w->ranks;
    made.user = w;
    made.exchange = exchange;
    made.abort = abort_all;
    made.caller_only = level < MPI_THREAD_MULTIPLE;
    fill_record(&made, out);
    return SACCADE_OK;
}

/* A communicator on which something failed, here or elsewhere, is left alone: freeing it would
 * wait for others. */
void saccade_mpi_destroy(saccade_transport *transport)
{
    mpi_world *w = transport ? transport->user : NULL;
    if (!w)
        return;
    if (!w->has_failed && !another_failed(w))
        MPI_Comm_free(&w->comm);
    free(w->requests);
    free(w->peer);
    free(w->is_told);
    free(w);
    transport->user = NULL;
}
