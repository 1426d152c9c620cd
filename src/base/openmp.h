/* Loops on the team of a runtime of OpenMP that the host has loaded, where it is shared. */
#ifndef SACCADE_BASE_OPENMP_H
#define SACCADE_BASE_OPENMP_H

typedef void (*openmp_parallel)(void (*work)(void *), void *data, unsigned threads,
                                unsigned flags);
typedef int (*openmp_number)(void);

/* all NULL: no more. 0 where a child of fork() could not be told apart. */
int openmp_share(openmp_parallel parallel, openmp_number thread_num, openmp_number in_parallel);

/* calls work(arg, t) for threads t of the team below n, 0 on this thread; 0: nothing is shared
   here, and nothing was called. They compute with the caller's floating-point settings. */
int openmp_run(int n, void (*work)(void *arg, int thread), void *arg);

#endif
