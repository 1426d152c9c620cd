/* Signals that end the program: unfinished files are removed first (unlink may be called in a
 * handler), then the signal does what it always does, so that the shell sees its status. */
#include "signals.h"

#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    FILES = 8,
    ONCE_NS = 100000000, /* signals this close together are one: timeout(1) sends two at once */
};

static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGXCPU};
enum { ENDING = sizeof ending / sizeof ending[0] };

static const char *volatile files[FILES]; /* changed with the signals blocked */
static volatile sig_atomic_t is_held, told;
static struct timespec told_at; /* written before told, by the handler alone */

static void block(sigset_t *before)
{
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; i < ENDING; i++)
        sigaddset(&set, ending[i]);
    sigprocmask(SIG_BLOCK, &set, before);
}

/* The first request to stop, or one that came with it. */
static bool is_first(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!told)
        told_at = now;
    return (now.tv_sec - told_at.tv_sec) * 1000000000LL + (now.tv_nsec - told_at.tv_nsec)
           < ONCE_NS;
}

static void stop(int signal_number)
{
    if (is_held && (signal_number == SIGINT || signal_number == SIGTERM) && is_first()) {
        told = signal_number;
        return;
    }
    for (int i = 0; i < FILES; i++)
        if (files[i])
            unlink(files[i]);
    signal(signal_number, SIG_DFL);
    raise(signal_number); /* comes when the handler returns */
}

void signals_open(void)
{
    struct sigaction action = {.sa_handler = stop}, before;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < ENDING; i++)
        if (sigaction(ending[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(ending[i], &action, NULL); /* nohup's choice stays */
    signal(SIGXFSZ, SIG_IGN);
}

int signals_make(char *path, int (*make)(char *path))
{
    sigset_t before;
    block(&before);
    const int made = make(path);
    for (int i = 0; i < FILES && made >= 0; i++) {
        if (!files[i]) {
            files[i] = path;
            break;
        }
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return made;
}

void signals_forget(const char *path)
{
    sigset_t before;
    block(&before);
    for (int i = 0; i < FILES; i++)
        if (files[i] == path)
            files[i] = NULL;
    sigprocmask(SIG_SETMASK, &before, NULL);
}

void signals_hold(void)
{
    is_held = 1;
}

void signals_release(void)
{
    is_held = 0;
}

bool signals_told_to_stop(void)
{
    return told != 0;
}

void signals_obey(void)
{
    is_held = 0;
    if (told)
        raise(told);
}
