/* Parallel loops over OpenMP. One thread never enters OpenMP, so a serial run costs nothing and
   starts no thread pool. */
#include "base/parallel.h"

#ifdef _OPENMP
#include <omp.h>
#endif

static void serial(int64_t n_items, par_fn fn, void *arg)
{
    for (int64_t item = 0; item < n_items; item++)
        fn(arg, item, 0);
}

#ifdef _OPENMP

int par_max_threads(void)
{
    const int n = omp_get_max_threads();
    return n < 1 ? 1 : n;
}

void par_for(int64_t n_items, int n_threads, par_fn fn, void *arg)
{
    int n = n_threads > 0 ? n_threads : par_max_threads();
    if (n > n_items)
        n = (int)n_items;
    if (n <= 1) {
        serial(n_items, fn, arg);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(n)
    for (int64_t item = 0; item < n_items; item++)
        fn(arg, item, omp_get_thread_num());
}

#else

int par_max_threads(void)
{
    return 1;
}

void par_for(int64_t n_items, int n_threads, par_fn fn, void *arg)
{
    (void)n_threads;
    serial(n_items, fn, arg);
}

#endif
