/* Time for measurements. */
#ifndef SACCADE_BASE_CLOCK_H
#define SACCADE_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* nanoseconds since some fixed moment; never goes back. */
static inline int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* nanoseconds that this thread has been running: what others do meanwhile doesn't count. */
static inline int64_t clock_thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
