/* Ranks as threads of one process. */
#ifndef SACCADE_TESTS_RANK_THREADS_H
#define SACCADE_TESTS_RANK_THREADS_H

#include <stddef.h>
#include <stdint.h>

/* Calls run on each of n elements of `bytes`, n at most 64, at the same time; returns when all
 * have. */
void rank_threads_run(int32_t n, void *(*run)(void *), void *ranks, size_t bytes);

#endif
