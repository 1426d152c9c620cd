/* Parallel loops: OpenMP where it was found, else serial. */
#ifndef SACCADE_BASE_PARALLEL_H
#define SACCADE_BASE_PARALLEL_H

#include <stdint.h>

/* item: 0 .. n_items - 1; thread: 0 .. n_threads - 1, for per-thread scratch. */
typedef void (*par_fn)(void *arg, int64_t item, int thread);

/* threads a loop may use here: the OpenMP setting, 1 without OpenMP. */
int par_max_threads(void);

/* calls fn for each item once, dynamically scheduled, on at most n_threads threads (<= 0: all);
   returns when all are done. fn must not depend on which thread runs which item. */
void par_for(int64_t n_items, int n_threads, par_fn fn, void *arg);

#endif
