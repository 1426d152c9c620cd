/* saccade_threads.h: the threads of a host that computes with OpenMP, shared. The rules of
 * saccade.h hold. */
#ifndef SACCADE_THREADS_H
#define SACCADE_THREADS_H

#include "saccade.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Three functions of the runtime that the host has loaded: GOMP_parallel, omp_get_thread_num
 * and omp_in_parallel, as libgomp, libomp and libiomp5 have them. */
typedef void (*saccade_openmp_parallel)(void (*work)(void *data), void *data, unsigned threads,
                                        unsigned flags);
typedef int (*saccade_openmp_number)(void);

/* From now on the process's loops run on the runtime's team instead of on threads of the
 * library's own: its threads watch for work for milliseconds after each of the host's loops,
 * and others would take turns with them. Loops inside of the host's parallel regions, and those
 * of children of fork(), where such runtimes hang, keep to the library's own. With all three
 * NULL so do all. Not while a call computes. */
SACCADE_API saccade_status saccade_share_openmp(saccade_openmp_parallel parallel,
                                                saccade_openmp_number thread_num,
                                                saccade_openmp_number in_parallel,
                                                saccade_error *err);

#ifdef __cplusplus
}
#endif
#endif
