/* Two processes of which the second fails the first in some ways: it aborts, it sends other
 * bytes than expected, it does not come, it comes when the first has given up and its memory is
 * gone. Each time the first has an error in time, and one that comes late has one too. */
#include "saccade_mpi.h"

#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ABORTS, OTHER_BYTES, DOES_NOT_COME, COMES_LATE, WAYS };
enum { MANY = 1 << 20 }; /* bytes that MPI does not send before they are received */

static int exchange_many(const saccade_transport *t)
{
    char *data = mmap(NULL, (size_t)2 * MANY, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return 0;
    const saccade_message send = {data, MANY, 1 - t->rank};
    const saccade_message receive = {data + MANY, MANY, 1 - t->rank};
    const int failed = t->exchange(t->user, &send, 1, &receive, 1, t->seconds);
    munmap(data, (size_t)2 * MANY); /* who still sends it finds nothing */
    return failed;
}

static int exchange(const saccade_transport *t, size_t sent, size_t expected)
{
    char a[64] = {0}, b[64];
    const saccade_message send = {a, sent, 1 - t->rank}, receive = {b, expected, 1 - t->rank};
    return t->exchange(t->user, &send, 1, &receive, 1, t->seconds);
}

static int first(const saccade_transport *t, int way)
{
    const double start = MPI_Wtime();
    const int failed = way == COMES_LATE ? exchange_many(t) : exchange(t, 32, 32);
    const double took = MPI_Wtime() - start;
    const double most = way >= DOES_NOT_COME ? t->seconds + 10 : 20;
    if (failed && way == COMES_LATE)
        t->abort(t->user);                                 /* as the library does */
    if (failed && took < most && exchange(t, 32, 32) != 0) /* and it stays ended */
        return 0;
    fprintf(stderr, "mpi_failures: way %d: %s after %.1f s\n", way,
            failed ? "failed" : "no error", took);
    return 1;
}

static int second(const saccade_transport *t, int way)
{
    if (way == ABORTS)
        t->abort(t->user);
    else if (way == OTHER_BYTES)
        (void)exchange(t, 31, 32);
    if (way != COMES_LATE)
        return 0;
    usleep(900 * 1000);
    return exchange_many(t) == 0;
}

int main(int argc, char **argv)
{
    int bad = 0;
    MPI_Init(&argc, &argv);
    for (int way = 0; way < WAYS; way++) {
        saccade_error err;
        saccade_transport t;
        saccade_transport_init(&t);
        if (way == ABORTS) /* as of a caller whose record had no caller_only */
            t.size = offsetof(saccade_transport, caller_only);
        if (saccade_mpi_create(MPI_COMM_WORLD, &t, &err) != SACCADE_OK || t.ranks != 2)
            return 1;
        t.seconds = way >= DOES_NOT_COME ? 0.3 : 100;
        if (exchange(&t, 7, 7) != 0)
            bad = 1;
        if (t.rank == 0)
            bad |= first(&t, way);
        else
            bad |= second(&t, way);
        MPI_Barrier(MPI_COMM_WORLD);
        saccade_mpi_destroy(&t);
    }
    MPI_Finalize();
    return bad;
}
