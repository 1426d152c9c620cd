/* Threads that cannot be created, on demand: pthread_create goes through here (--wrap). */
#ifndef SACCADE_TESTS_FAIL_THREAD_H
#define SACCADE_TESTS_FAIL_THREAD_H

/* From now on the calls after the first `n` fail with EAGAIN; -1: none does. */
void fail_thread_after(int n);

/* calls that have failed so far. */
int fail_thread_count(void);

#endif
