/* threads.h: threads that leave signals to the host's own. */
#ifndef SACCADE_BASE_THREADS_H
#define SACCADE_BASE_THREADS_H

#include <pthread.h>
#include <stddef.h>

/* pthread_create with all signals blocked but those that an instruction raises: a handler of
 * the host's runs where that happened. attributes may be NULL. 0: it has begun. */
int thread_begin(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                 void *arg);

#endif
