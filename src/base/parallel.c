/* Parallel loops: the caller and its helpers take items from one counter until none is left.
   The caller then takes back what no worker has begun, and waits only for those at work. */
#include "base/parallel.h"

#include "base/cpus.h"
#include "base/openmp.h"
#include "base/workers.h"

#include "saccade_config.h"

#include <stdatomic.h>

typedef struct loop {
    par_fn fn;
    void *arg;
    int64_t n_items;
    _Atomic int64_t next;
} loop;

static void serial(int64_t n_items, par_fn fn, void *arg)
{
    for (int64_t item = 0; item < n_items; item++)
        fn(arg, item, 0);
}

static void take_items(void *arg, int thread)
{
    loop *l = arg;
    int64_t item;
    while ((item = atomic_fetch_add_explicit(&l->next, 1, memory_order_relaxed)) < l->n_items)
        l->fn(l->arg, item, thread);
}

int par_max_threads(void)
{
    return HAVE_THREADS ? cpus_usable(PAR_THREADS_MAX) : 1;
}

int par_threads_available(int n)
{
    return HAVE_THREADS ? cpus_available(n) : 1;
}

void par_for(int64_t n_items, int n_threads, par_fn fn, void *arg)
{
    int n = n_threads > 0 ? n_threads : par_max_threads();
    if (n > n_items)
        n = (int)n_items;
    if (n > PAR_THREADS_MAX)
        n = PAR_THREADS_MAX;
    if (!HAVE_THREADS || n <= 1) {
        serial(n_items, fn, arg);
        return;
    }
    loop l = {.fn = fn, .arg = arg, .n_items = n_items};
    if (!openmp_run(n, take_items, &l))
        workers_run(n, take_items, &l);
}
