/* Allocation failures on demand. The linker sends every allocation of our own code through
   here (--wrap); libc's and other libraries' own are not touched. */
#ifndef SACCADE_TESTS_FAIL_ALLOC_H
#define SACCADE_TESTS_FAIL_ALLOC_H

#include "saccade.h"

/* one way to use the library: makes and destroys all it needs, returns the first failure. */
typedef saccade_status (*fail_alloc_use)(void *arg, saccade_error *err);

/* Runs use() again and again, its first, second, ... allocation failing, until it gets through
   without meeting the failure. Each failed run must return SACCADE_ENOMEM and give back all
   that it took; so must the last, which must succeed. Returns the number of allocations.
   `use` must stay on this thread, and allocate the same each time. */
int fail_alloc_sweep(const char *name, fail_alloc_use use, void *arg);

/* The same for calls that may also succeed without the memory, by leaving out something that
   only makes the result better. */
int fail_alloc_sweep_lenient(const char *name, fail_alloc_use use, void *arg);

/* For uses that run threads of their own: from fail_alloc_by_thread(1) to (0) allocations fail,
 * and count, between fail_alloc_here(1) and (0) of their thread alone. */
void fail_alloc_by_thread(int is_by);
void fail_alloc_here(int is_here);

/* allocations of our own code that are not freed. */
int64_t fail_alloc_live(void);

#endif
