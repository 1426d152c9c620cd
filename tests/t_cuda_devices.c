/* CUDA from several threads and on several devices: threads that plan and run by themselves,
 * threads that share one plan, and both on all devices at once. With one device the threads
 * share it; what needs two says so and skips. */
#include "support/device_case.h"

#include "cuda/cuda.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { THREADS = 4, ROUNDS = 12, MOST = 16 };

static const forward_case cases[] = {
    {.problem = "b2 h4/2 q130 kv300 d64 bf16", .mask = "causal()", .q_offset = 170},
    {.problem = "b1 h2 q200 kv260 d128 f16", .mask = "sliding_window(W)"},
    {.problem = "b1 h2 q100 kv200 d64 f32", .score = "softcap(20)"},
    {.problem = "b2 h8/2 q1 kv300 d128 bf16", .mask = "document(doc)", .q_offset = 130},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static int device_count(void)
{
    int32_t n = 0;
    return saccade_device_count(&n, NULL) == SACCADE_OK ? n : 0;
}

/* ---- one thread's work ---- */

typedef struct worker {
    pthread_t thread;
    const case_run *r;
    device_options options;
    int is_good;
    char why[DEVICE_WHY];
} worker;

/* Everything from plan to comparison. */
static void *work_alone(void *argument)
{
    worker *w = argument;
    w->is_good = device_case_all(w->r, &w->options, w->why);
    return NULL;
}

/* One tensor set, run and compared many times. */
static void *work_rounds(void *argument)
{
    worker *w = argument;
    device_case d;
    w->is_good = device_case_open(w->r, &w->options, &d);
    for (int i = 0; i < ROUNDS && w->is_good; i++)
        w->is_good = device_case_clear(&d) && device_case_run(&d) && device_case_check(&d);
    memcpy(w->why, d.why, DEVICE_WHY);
    device_case_close(&d);
    return NULL;
}

static void run_all(worker *workers, int n, void *(*work)(void *))
{
    for (int i = 0; i < n; i++)
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    for (int i = 0; i < n; i++)
        pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < n; i++)
        if (!workers[i].is_good)
            fail_msg("thread %d of %d, device %d: %s", i, n, workers[i].options.device,
                     workers[i].why);
}

/* ---- tests; devices are dealt out to the threads in turn ---- */

static void plans_of_their_own(int n_devices)
{
    worker workers[MOST] = {0};
    case_run r[CASES];
    const int n = n_devices * THREADS < MOST ? n_devices * THREADS : MOST;
    for (int i = 0; i < CASES; i++)
        case_make(&cases[i], &r[i]);
    for (int i = 0; i < n; i++) {
        workers[i].r = &r[i / n_devices % CASES];
        workers[i].options.device = i % n_devices;
        workers[i].options.has_block_mask = i & 1;
    }
    run_all(workers, n, work_alone);
    for (int i = 0; i < CASES; i++)
        case_free(&r[i]);
}

static void one_plan(int n_devices)
{
    const int n = n_devices * THREADS < MOST ? n_devices * THREADS : MOST;
    for (int c = 0; c < CASES; c++) {
        worker workers[MOST] = {0};
        saccade_error err = {0};
        saccade_plan *plan;
        case_run r;
        case_make(&cases[c], &r);
        r.problem.backend = "cuda";
        if (saccade_plan_create(NULL, &r.problem, &plan, &err) != SACCADE_OK)
            fail_msg("%s", err.message);
        for (int i = 0; i < n; i++) {
            workers[i].r = &r;
            workers[i].options = (device_options){.device = i % n_devices, .plan = plan};
            workers[i].options.has_block_mask = i / n_devices & 1;
        }
        run_all(workers, n, work_rounds);
        saccade_plan_destroy(plan);
        case_free(&r);
    }
}

static void threads_plan_for_themselves(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    plans_of_their_own(1);
}

static void threads_share_a_plan(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    one_plan(1);
}

static int has_two(void)
{
    const int n = device_count();
    if (n < 2)
        print_message("%d CUDA device%s: two are needed\n", n, n == 1 ? "" : "s");
    return n >= 2;
}

static void devices_at_once(void **state)
{
    (void)state;
    if (!has_two())
        skip();
    plans_of_their_own(device_count());
    one_plan(device_count());
}

/* A device that is not the current one: the run goes where its tensors are. */
static void tensors_say_where(void **state)
{
    const cu_driver *driver;
    (void)state;
    if (!has_two())
        skip();
    assert_int_equal(cu_get_driver(&driver, NULL), SACCADE_OK);
    for (int current = 0; current < 2; current++) {
        void *pushed, *before, *after;
        char why[DEVICE_WHY];
        case_run r;
        case_make(&cases[current], &r);
        assert_int_equal(cu_enter(driver, current, &pushed, NULL), SACCADE_OK);
        driver->context_current(&before);
        if (!device_case_all(&r, &(device_options){.device = 1 - current}, why))
            fail_msg("device %d current: %s", current, why);
        driver->context_current(&after);
        assert_ptr_equal(before, after);
        cu_leave(driver, pushed);
        case_free(&r);
    }
}

int main(void)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_plan_for_themselves),
        cmocka_unit_test(threads_share_a_plan),
        cmocka_unit_test(devices_at_once),
        cmocka_unit_test(tensors_say_where),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
