/* How far a build is, told by the calling thread alone: every thread counts the blocks it has
   settled, and the caller adds them up now and then. Whoever is told may end the build. */
#include "mask/mask_build.h"

#include "base/clock.h"

enum {
    TICKS = 16,               /* between looks at the clock: a tick is 0.1 us of work or more */
    PERIOD_NS = 50 * 1000000, /* between two calls */
};

void watch_open(mask_watch *watch, mask_progress to, double blocks, mask_worker *workers, int n)
{
    *watch = (mask_watch){.to = to,
                          .blocks = blocks,
                          .workers = workers,
                          .n_workers = n,
                          .next_ns = clock_ns() + PERIOD_NS};
    for (int i = 0; i < n && to.call; i++)
        workers[i].watch = watch;
}

static void tell(mask_watch *w, double fraction)
{
    if (w->to.call(w->to.user, fraction < 1 ? fraction : 1))
        atomic_store_explicit(&w->is_stopped, 1, memory_order_relaxed);
}

void watch_tick(mask_worker *worker)
{
    mask_watch *w = worker->watch;
    if (!w || worker != &w->workers[0] || ++worker->ticks % TICKS != 0)
        return;
    const int64_t now = clock_ns();
    if (now < w->next_ns || watch_is_stopped(worker))
        return;
    double settled = 0;
    for (int i = 0; i < w->n_workers; i++)
        settled += (double)atomic_load_explicit(&w->workers[i].settled, memory_order_relaxed);
    tell(w, settled / w->blocks);
    w->next_ns = clock_ns() + PERIOD_NS;
}

void watch_settled(mask_worker *worker, int64_t blocks)
{
    if (!worker->watch)
        return;
    const int64_t before = atomic_load_explicit(&worker->settled, memory_order_relaxed);
    atomic_store_explicit(&worker->settled, before + blocks, memory_order_relaxed);
    watch_tick(worker);
}

int watch_is_stopped(const mask_worker *worker)
{
    return worker->watch
           && atomic_load_explicit(&worker->watch->is_stopped, memory_order_relaxed);
}

saccade_status watch_close(mask_watch *w, saccade_error *err)
{
    if (w->to.call && !atomic_load(&w->is_stopped))
        tell(w, 1);
    FAIL_AT(atomic_load(&w->is_stopped), SACCADE_ESTOPPED, "block_mask", 0, 0,
            "stopped by the progress function");
    return SACCADE_OK;
}
