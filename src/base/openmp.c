/* The team is asked for in the size that the host gave it: libgomp ends threads that a smaller
   one leaves over, and would make them again for the host's next loop. Those that have nothing
   to do leave at once. The library links no runtime, as it would then load one of its own. */
#include "base/openmp.h"

#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

static _Atomic(openmp_parallel) shared;
static _Atomic(openmp_number) number, inside;
static int is_fork_safe;

typedef struct team {
    void (*work)(void *arg, int thread);
    void *arg;
    int n;
    fenv_t arithmetic;
} team;

/* The threads stayed with the parent. */
static void in_child(void)
{
    atomic_store(&shared, NULL);
}

static void prepare(void)
{
    is_fork_safe = pthread_atfork(NULL, NULL, in_child) == 0;
}

int openmp_share(openmp_parallel parallel, openmp_number thread_num, openmp_number in_parallel)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    if (parallel && !is_fork_safe)
        return 0;
    atomic_store(&number, thread_num);
    atomic_store(&inside, in_parallel);
    atomic_store(&shared, parallel);
    return 1;
}

static void take_part(void *data)
{
    const team *all = data;
    const int thread = atomic_load_explicit(&number, memory_order_relaxed)();
    fenv_t own;
    if (thread >= all->n)
        return;
    fegetenv(&own);
    fesetenv(&all->arithmetic);
    all->work(all->arg, thread);
    fesetenv(&own);
}

int openmp_run(int n, void (*work)(void *arg, int thread), void *arg)
{
    const openmp_parallel parallel = atomic_load_explicit(&shared, memory_order_acquire);
    team all = {.work = work, .arg = arg, .n = n};
    if (!parallel || atomic_load_explicit(&inside, memory_order_relaxed)())
        return 0;
    fegetenv(&all.arithmetic);
    parallel(take_part, &all, 0, 0);
    return 1;
}
