/* The process's worker threads: made when first wanted, kept asleep between loops.

   A host process never ends, hangs or changes for them: a thread that cannot be created is done
   without, a child of fork() makes its own, and all signals are blocked in them. */
#ifndef SACCADE_BASE_WORKERS_H
#define SACCADE_BASE_WORKERS_H

/* calls work(arg, 0) on this thread, and work(arg, 1), ... on at most n - 1 workers beside it;
   those that have not begun when the first returns never will. Workers that other callers use
   at the moment are not waited for. They compute with the caller's floating-point settings. */
void workers_run(int n, void (*work)(void *arg, int thread), void *arg);

#endif
