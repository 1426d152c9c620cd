/* A thread for each rank, and the wait for them all. */
#include "support/rank_threads.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

void rank_threads_run(int32_t n, void *(*run)(void *), void *ranks, size_t bytes)
{
    enum { MOST = 64 };
    pthread_t thread[MOST];
    assert_in_range(n, 0, MOST);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(
            pthread_create(&thread[i], NULL, run, (char *)ranks + (size_t)i * bytes), 0);
    for (int32_t i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
}
