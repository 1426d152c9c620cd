/* Parallel loops over the process's worker threads (workers.h); serial in builds without. */
#ifndef SACCADE_BASE_PARALLEL_H
#define SACCADE_BASE_PARALLEL_H

#include <stdint.h>

/* threads that a loop may use at most. */
enum { PAR_THREADS_MAX = 4096 };

/* item: 0 .. n_items - 1; thread: 0, the caller, .. n_threads - 1, for per-thread scratch. */
typedef void (*par_fn)(void *arg, int64_t item, int thread);

/* threads that a loop uses if not told: cpus_usable(), 1 in builds without threads. */
int par_max_threads(void);

/* n, or fewer where there are not so many CPUs for the process. */
int par_threads_available(int n);

/* calls fn for each item once, dynamically scheduled, on at most n_threads threads (<= 0: all);
   returns when all are done. Fewer threads run where more are not to be had, down to the
   caller's alone. fn must not depend on which thread runs which item. */
void par_for(int64_t n_items, int n_threads, par_fn fn, void *arg);

#endif
