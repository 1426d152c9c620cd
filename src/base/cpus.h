/* How many threads are worth running here. */
#ifndef SACCADE_BASE_CPUS_H
#define SACCADE_BASE_CPUS_H

/* OMP_NUM_THREADS (its first number) if set, else the CPUs that the calling thread may run on
   and that the control group pays for; at most OMP_THREAD_LIMIT; 1 .. most. Looked up once in a
   process. */
int cpus_usable(int most);

/* cpus_usable without OMP_NUM_THREADS: more threads than these would take turns. */
int cpus_available(int most);

/* whole CPUs, at least 1, that the CPU quotas of a process's control groups come to; 0 without
   a quota. `groups` is its /proc/self/cgroup, `root` where the groups' files are. */
int cpus_quota(const char *groups, const char *root);

#endif
