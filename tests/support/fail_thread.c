/* Wrapper of pthread_create, linked into every test by --wrap. Off, it passes calls on. */
#include "support/fail_thread.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

/* given by the linker for --wrap=pthread_create; the names are its, not ours */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg);

static _Atomic int left = -1;
static _Atomic int failures;

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg)
{
    if (atomic_load(&left) == 0) {
        atomic_fetch_add(&failures, 1);
        return EAGAIN;
    }
    if (atomic_load(&left) > 0)
        atomic_fetch_sub(&left, 1);
    return __real_pthread_create(thread, attributes, start, arg);
}

void fail_thread_after(int n)
{
    atomic_store(&left, n);
}

int fail_thread_count(void)
{
    return atomic_load(&failures);
}
