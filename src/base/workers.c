/* A pool of threads that its host cannot trip over. OpenMP would do the loops, but libgomp ends
   the process where a thread cannot be created, and hangs in a child of fork().

   A worker's state says who may touch it:
     WATCHING -> CALLED        by a caller; a worker that watches sees it within microseconds
     ASLEEP   -> AWAITED       the same, and its semaphore is still to be posted
     AWAITED  -> CALLED        by the thread that posts the semaphore. The caller posts two;
                               each worker that wakes posts two more. A post takes
                               microseconds, which the caller should spend on the loop
     CALLED   -> WORKING       by the worker: its task is now the worker's to read
     CALLED   -> WATCHING, AWAITED -> ASLEEP   by the caller: taken back, nothing was begun
     WORKING  -> WATCHING -> ASLEEP   by the worker */
#include "base/workers.h"

#include "base/clock.h"
#include "base/cpus.h"
#include "base/parallel.h"
#include "base/relax.h"
#include "base/threads.h"

#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

enum {
    WORKERS_MAX = PAR_THREADS_MAX - 1,
    STACK_BYTES = 1 << 20, /* kernels need a tenth of it, sanitizers three times that */
    WATCH_NS = 50000,      /* about what ten wake-ups cost; longer takes cores from the host */
    RETRY_NS = 100000000,  /* after a thread could not be created */
};

typedef enum worker_state { WATCHING, ASLEEP, AWAITED, CALLED, WORKING } worker_state;

/* One call of workers_run, on its caller's stack. */
typedef struct crew {
    void (*work)(void *arg, int thread);
    void *arg;
    fenv_t arithmetic;
    int cpu;          /* the caller's, when it called */
    _Atomic int busy; /* workers that are to leave, and 1 while the caller watches for it */
    _Atomic int n_awaited; /* workers that sleep and nobody has woken yet */
    sem_t all_left;        /* posted by who brings busy to 0 */
} crew;

typedef struct worker {
    _Alignas(64) _Atomic int state;
    int thread; /* its number in the crew */
    crew *crew;
    struct worker *next; /* in the list of idle ones, or of a crew's */
    sem_t called;
} worker;

static worker workers[WORKERS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static worker *idle;
static int n_workers;
static int64_t retry_at; /* clock_ns() */
static bool is_fork_safe;

/* ---- a worker's life ---- */

/* Watches until *value is `wanted`, for WATCH_NS at most. */
static bool watch(_Atomic int *value, int wanted)
{
    enum { LOOKS = 32 }; /* between looks at the clock */
    const int64_t until = clock_ns() + WATCH_NS;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) == wanted)
                return true;
            cpu_relax();
        }
    } while (clock_ns() < until);
    return false;
}

static bool is_asleep(worker *w)
{
    const int state = atomic_load(&w->state);
    return state == ASLEEP || state == AWAITED;
}

static bool becomes(worker *w, int seen, worker_state next)
{
    return atomic_compare_exchange_strong(&w->state, &seen, next);
}

static void wait_for_call(worker *w)
{
    for (;;) {
        if (!watch(&w->state, CALLED) && becomes(w, WATCHING, ASLEEP))
            while (is_asleep(w))
                sem_wait(&w->called);
        if (becomes(w, CALLED, WORKING))
            return;
    }
}

/* The first few of a list that sleep and are awaited. */
static void wake_some(crew *c, worker *list)
{
    enum { FEW = 2 };
    int n = 0;
    for (worker *w = list; w && n < FEW && atomic_load(&c->n_awaited) > 0; w = w->next)
        if (atomic_load(&w->state) == AWAITED && becomes(w, AWAITED, CALLED)) {
            atomic_fetch_sub(&c->n_awaited, 1);
            sem_post(&w->called);
            n++;
        }
}

/* Kernels may wake a worker on the caller's CPU, where it only takes turns with the caller, and
   leave it there while both sleep now and then. It asks for another CPU, once: where it has run
   is where it will be woken. */
static void move_off(int cpu)
{
#ifdef __linux__
    enum { SETS = 8 }; /* of 1024 CPUs */
    cpu_set_t all[SETS], others[SETS];
    if (sched_getcpu() != cpu || cpu < 0 || sched_getaffinity(0, sizeof all, all) != 0)
        return;
    memcpy(others, all, sizeof all);
    CPU_CLR_S((size_t)cpu, sizeof others, others);
    if (sched_setaffinity(0, sizeof others, others) == 0) /* fails where there is no other */
        sched_setaffinity(0, sizeof all, all);
#else
    (void)cpu;
#endif
}

/* After it the crew may be gone. */
static void leave(crew *c)
{
    if (atomic_fetch_sub(&c->busy, 1) == 1)
        sem_post(&c->all_left);
}

static void *live(void *arg)
{
    worker *w = arg;
    for (;;) {
        wait_for_call(w);
        crew *c = w->crew;
        wake_some(c, w->next);
        fesetenv(&c->arithmetic);
        move_off(c->cpu);
        c->work(c->arg, w->thread);
        atomic_store(&w->state, WATCHING);
        leave(c);
    }
    return NULL;
}

/* ---- the pool ---- */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* The threads stayed with the parent. */
static void in_child(void)
{
    idle = NULL;
    n_workers = 0;
    retry_at = 0;
    pthread_mutex_unlock(&lock);
}

/* Code that threads run must stay: the library may have been loaded by dlopen. */
static void stay_loaded(void)
{
    Dl_info self;
    if (dladdr(workers, &self) && self.dli_fname)
        dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

static void prepare(void)
{
    is_fork_safe = pthread_atfork(before_fork, after_fork, in_child) == 0;
    stay_loaded();
}

static bool start(worker *w)
{
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const int failed = thread_begin(&thread, &attributes, live, w);
    pthread_attr_destroy(&attributes);
    return failed == 0;
}

/* One more worker, unless there are as many as a loop of n threads, or all CPUs, can use. */
static worker *new_worker(int n)
{
    const int cpus = cpus_usable(PAR_THREADS_MAX);
    if (n_workers >= (n > cpus ? n : cpus) - 1 || clock_ns() < retry_at)
        return NULL;
    worker *w = &workers[n_workers];
    *w = (worker){.state = WATCHING};
    sem_init(&w->called, 0, 0);
    if (!start(w)) {
        sem_destroy(&w->called);
        retry_at = clock_ns() + RETRY_NS;
        return NULL;
    }
    n_workers++;
    return w;
}

/* Up to n - 1 workers, as a list. */
static worker *take(int n)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    worker *taken = NULL;
    pthread_once(&once, prepare);
    if (!is_fork_safe)
        return NULL;
    pthread_mutex_lock(&lock);
    for (int i = 1; i < n; i++) {
        worker *w = idle ? idle : new_worker(n);
        if (!w)
            break;
        if (w == idle)
            idle = w->next;
        w->next = taken;
        taken = w;
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

static void give_back(worker *taken)
{
    worker *last = taken;
    while (last->next)
        last = last->next;
    pthread_mutex_lock(&lock);
    last->next = idle;
    idle = taken;
    pthread_mutex_unlock(&lock);
}

/* ---- a crew ---- */

/* Returns how many it called. */
static int call(worker *taken, crew *c)
{
    int thread = 0;
    for (worker *w = taken; w; w = w->next) {
        w->crew = c;
        w->thread = ++thread;
        while (!becomes(w, WATCHING, CALLED)) /* it may be falling asleep */
            if (becomes(w, ASLEEP, AWAITED)) {
                atomic_fetch_add(&c->n_awaited, 1);
                break;
            }
    }
    wake_some(c, taken);
    return thread;
}

/* Returns how many had not begun. */
static int take_back(worker *taken)
{
    int n = 0;
    for (worker *w = taken; w; w = w->next)
        n += becomes(w, CALLED, WATCHING) || becomes(w, AWAITED, ASLEEP)
             || becomes(w, CALLED, WATCHING); /* one that is woken in between */
    return n;
}

static void wait_until_all_left(crew *c)
{
    if (watch(&c->busy, 1) || atomic_fetch_sub(&c->busy, 1) == 1)
        return;
    while (sem_wait(&c->all_left) != 0)
        continue; /* a signal */
}

void workers_run(int n, void (*work)(void *arg, int thread), void *arg)
{
    worker *taken = take(n);
    if (!taken) {
        work(arg, 0);
        return;
    }
    crew c = {.work = work, .arg = arg, .busy = n}; /* no worker is seen out before all count */
    sem_init(&c.all_left, 0, 0);
    fegetenv(&c.arithmetic);
    c.cpu = sched_getcpu();
    const int called = call(taken, &c);
    work(arg, 0);
    const int gone = n - 1 - called + take_back(taken);
    atomic_fetch_sub(&c.busy, gone);
    wait_until_all_left(&c);
    sem_destroy(&c.all_left);
    give_back(taken);
}
