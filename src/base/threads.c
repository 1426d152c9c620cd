/* A thread of the library's begins with the signals of its host blocked. */
#include "base/threads.h"

#include <signal.h>

int thread_begin(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                 void *arg)
{
    static const int raised[] = {SIGILL, SIGFPE, SIGSEGV, SIGBUS, SIGTRAP};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof raised / sizeof *raised; i++)
        sigdelset(&all, raised[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(thread, attributes, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
