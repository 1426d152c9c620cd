/* A transport over MPI: non-blocking receives and sends, looked at in turn until all are done,
 * the time is up, or another process tells that it has failed. Messages longer than an int go
 * in pieces. */
#include "saccade_mpi.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DATA_TAG = 1, FAILED_TAG = 2 };
static const size_t piece_bytes = (size_t)1 << 30;

typedef struct mpi_world {
    MPI_Comm comm;
    int rank, ranks;
    atomic_int has_failed; /* in staged mode one thread may abort what another exchanges */
    MPI_Request *requests; /* grown by the largest exchange */
    int room;
} mpi_world;

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
    if (!more)
        return 0;
    w->requests = more;
    w->room = n;
    return 1;
}

static int begin(mpi_world *w, const saccade_message *m, int32_t n, int is_send, int at)
{
    for (int32_t i = 0; i < n; i++)
        for (size_t off = 0; off < m[i].bytes; off += piece_bytes, at++) {
            const size_t left = m[i].bytes - off;
            const int bytes = (int)(left < piece_bytes ? left : piece_bytes);
            char *data = (char *)m[i].data + off;
            if (is_send)
                MPI_Isend(data, bytes, MPI_BYTE, m[i].peer, DATA_TAG, w->comm,
                          &w->requests[at]);
            else
                MPI_Irecv(data, bytes, MPI_BYTE, m[i].peer, DATA_TAG, w->comm,
                          &w->requests[at]);
        }
    return at;
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
static int wait_for(mpi_world *w, int n, MPI_Status *status, double until)
{
    for (int done = 0, turn = 0;; turn++) {
        if (MPI_Testall(n, w->requests, &done, status) != MPI_SUCCESS)
            return 1;
        if (done)
            return 0;
        if (w->has_failed || (turn % 16 == 15 && (another_failed(w) || MPI_Wtime() > until)))
            return 1;
        sched_yield(); /* there may be more processes than cores */
    }
}

/* Requests that will not be done are cancelled where that can be and given up. */
static void give_up(mpi_world *w, int n)
{
    for (int i = 0; i < n; i++) {
        if (w->requests[i] == MPI_REQUEST_NULL)
            continue;
        MPI_Cancel(&w->requests[i]);
        MPI_Request_free(&w->requests[i]);
    }
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

static int exchange(void *user, const saccade_message *sends, int32_t n_sends,
                    const saccade_message *receives, int32_t n_receives, double seconds)
{
    mpi_world *w = user;
    const double until = MPI_Wtime() + seconds;
    const int n = pieces_of(receives, n_receives) + pieces_of(sends, n_sends);
    if (w->has_failed || !are_others(w, sends, n_sends) || !are_others(w, receives, n_receives))
        return failed(w);
    MPI_Status *status = malloc(((size_t)n + 1) * sizeof *status);
    if (!status || !make_room(w, n)) {
        free(status);
        return failed(w);
    }
    const int at = begin(w, receives, n_receives, 0, 0);
    begin(w, sends, n_sends, 1, at);
    w->has_failed = wait_for(w, n, status, until);
    if (w->has_failed)
        give_up(w, n);
    else
        w->has_failed = !is_whole(receives, n_receives, status);
    free(status);
    return w->has_failed;
}

/* Small messages that need no receiver to be sent. */
static void abort_all(void *user)
{
    mpi_world *w = user;
    static const char nothing;
    w->has_failed = 1;
    for (int r = 0; r < w->ranks; r++) {
        MPI_Request request;
        if (r != w->rank
            && MPI_Isend(&nothing, 0, MPI_BYTE, r, FAILED_TAG, w->comm, &request)
                   == MPI_SUCCESS)
            MPI_Request_free(&request);
    }
}

/* ---- the transport ---- */

saccade_status saccade_mpi_create(MPI_Comm comm, saccade_transport *out, saccade_error *err)
{
    int is_ready = 0, level = MPI_THREAD_SINGLE;
    if (!out || out->size != sizeof *out)
        return fail(err, SACCADE_EINVAL, "got no transport, expected an initialised one");
    MPI_Initialized(&is_ready);
    if (!is_ready)
        return fail(err, SACCADE_EINVAL, "got MPI not initialised, expected MPI_Init before");
    mpi_world *w = calloc(1, sizeof *w);
    if (!w)
        return fail(err, SACCADE_ENOMEM, "out of memory");
    if (MPI_Comm_dup(comm, &w->comm) != MPI_SUCCESS) {
        free(w);
        return fail(err, SACCADE_EPEER, "the communicator cannot be duplicated");
    }
    MPI_Query_thread(&level);
    MPI_Comm_set_errhandler(w->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(w->comm, &w->rank);
    MPI_Comm_size(w->comm, &w->ranks);
    out->rank = w->rank;
    out->ranks = w->ranks;
    out->user = w;
    out->exchange = exchange;
    out->abort = abort_all;
    out->caller_only = level < MPI_THREAD_MULTIPLE;
    return SACCADE_OK;
}

/* A communicator on which something failed is left alone: freeing it would wait for others. */
void saccade_mpi_destroy(saccade_transport *transport)
{
    mpi_world *w = transport ? transport->user : NULL;
    if (!w)
        return;
    if (!w->has_failed)
        MPI_Comm_free(&w->comm);
    free(w->requests);
    free(w);
    transport->user = NULL;
}
