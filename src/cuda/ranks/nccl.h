/* nccl.h: a rank of the transport over NCCL, what its files share. */
#ifndef SACCADE_CUDA_RANKS_NCCL_H
#define SACCADE_CUDA_RANKS_NCCL_H

#include "cuda/driver/driver.h"

#include "base/clock.h"
#include "saccade_dist.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* ---- nccl_library.c ---- */

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

/* The library's functions, when nccl_get has been successful once. */
typedef struct nccl_functions {
#define X(name, symbol, parameters) int(*name) parameters;
    NCCL_FUNCTIONS(X)
#undef X
    const char *(*error_string)(int error);
} nccl_functions;
extern nccl_functions cu_nccl;
saccade_status nccl_get(saccade_error *err);

/* ---- a rank ---- */

enum { WATCHED = 64, POLL_NS = 20 * 1000 * 1000 };

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

static inline struct timespec nccl_time(int64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000),
                             .tv_nsec = (long)(ns % 1000000000)};
}

static inline int64_t nccl_limit(double seconds)
{
    return clock_ns() + (int64_t)(seconds * 1e9);
}

static inline struct timespec nccl_in(int64_t ns)
{
    return nccl_time(clock_ns() + ns);
}

static inline void nccl_nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000}, NULL);
}

/* ---- nccl_watch.c ---- */

/* Frees the communicator, so whoever is inside NCCL comes out first. Who does not may wait in
 * there for a kernel that waits for a peer: only the end frees both. */
void nccl_end(nccl_world *w);
/* Whether NCCL tells of an error; not while another thread uses the communicator. */
int nccl_tells_error(nccl_world *w);
/* A thread: ends the communicator where an exchange is late or broken. */
void *nccl_watch(void *world);
/* An event after what is on the stream, for the watcher. 0, or why there is none. */
int nccl_add_watched(nccl_world *w, void *stream, double seconds);

/* ---- nccl_exchange.c: saccade_transport's functions ---- */

int nccl_exchange_on(void *user, const saccade_message *sends, int32_t n_sends,
                     const saccade_message *receives, int32_t n_receives, void *stream,
                     double seconds);
int nccl_exchange(void *user, const saccade_message *sends, int32_t n_sends,
                  const saccade_message *receives, int32_t n_receives, double seconds);
/* Memory of the device for so many bytes, w->staged. */
int nccl_stage(nccl_world *w, size_t bytes);

#endif
