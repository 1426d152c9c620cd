/* CPUs by the environment, the affinity mask and the quotas of control groups, both versions
   (Linux, Documentation/admin-guide/cgroup-v2.rst: cpu.max; cgroup-v1: cpu.cfs_quota_us). A
   thread beyond the quota would only be stopped in every period. */
#include "base/cpus.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_SIZE = 1024, LINE_SIZE = 1024 };

/* ---- quotas ---- */

/* Up to two numbers from a group's file; returns how many it begins with. */
static int read_numbers(const char *folder, const char *name, double out[2])
{
    char path[PATH_SIZE];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= PATH_SIZE)
        return 0;
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    const int n = fscanf(file, "%lf %lf", &out[0], &out[1]);
    fclose(file);
    return n;
}

/* The quota of one group, in CPUs; none is 0 or less: "max 100000" (version 2) or "-1". */
static double quota_of(const char *folder, int version)
{
    double quota_and_period[2] = {0, 0}; /* in microseconds */
    if (version == 2) {
        if (read_numbers(folder, "cpu.max", quota_and_period) < 2)
            return 0;
    } else {
        double period[2] = {0, 0};
        read_numbers(folder, "cpu.cfs_quota_us", quota_and_period);
        read_numbers(folder, "cpu.cfs_period_us", period);
        quota_and_period[1] = period[0];
    }
    return quota_and_period[1] > 0 ? quota_and_period[0] / quota_and_period[1] : 0;
}

/* The least quota of a group and those it is in. A container sees its own group as the root. */
static double least_quota(const char *root, const char *group, int version)
{
    char folder[PATH_SIZE];
    double least = 0;
    const char *controller = version == 1 ? "/cpu" : "";
    if (snprintf(folder, sizeof folder, "%s%s%s", root, controller, group) >= PATH_SIZE)
        return 0;
    for (char *end = folder + strlen(folder); end; end = strrchr(folder, '/')) {
        *end = '\0';
        if (strlen(folder) < strlen(root) + strlen(controller))
            break;
        const double quota = quota_of(folder, version);
        if (quota > 0 && (least == 0 || quota < least))
            least = quota;
    }
    return least;
}

/* Reads "4:cpu,cpuacct:/group" (version 1) or "0::/group"; NULL for another controller. */
static const char *group_of(char *line, int *version)
{
    line[strcspn(line, "\n")] = '\0';
    char *list = strchr(line, ':');
    char *group = list ? strchr(list + 1, ':') : NULL;
    if (!group)
        return NULL;
    *group++ = '\0';
    *version = list[1] == '\0' ? 2 : 1;
    if (*version == 2)
        return group;
    char *rest = NULL;
    for (char *name = strtok_r(list + 1, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        if (strcmp(name, "cpu") == 0)
            return group;
    return NULL;
}

int cpus_quota(const char *groups, const char *root)
{
    char line[LINE_SIZE];
    double least = 0;
    FILE *file = fopen(groups, "re");
    while (file && fgets(line, sizeof line, file)) {
        int version = 0;
        const char *group = group_of(line, &version);
        const double quota = group ? least_quota(root, group, version) : 0;
        if (quota > 0 && (least == 0 || quota < least))
            least = quota;
    }
    if (file)
        fclose(file);
    if (least == 0)
        return 0;
    return least < 1 ? 1 : least < 1e6 ? (int)least : 1000000;
}

/* ---- all of it ---- */

/* A positive number of the environment, or the first of a list; 0: none. */
static int asked_for(const char *name)
{
    const char *text = getenv(name);
    const long n = text ? strtol(text, NULL, 10) : 0;
    return n < 1 ? 0 : n < 1000000 ? (int)n : 1000000;
}

static int in_affinity(void)
{
#ifdef __linux__
    enum { SETS = 8 }; /* of 1024 CPUs */
    cpu_set_t sets[SETS];
    if (sched_getaffinity(0, sizeof sets, sets) == 0)
        return CPU_COUNT_S(sizeof sets, sets);
#endif
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

static int least_of(int n, int bound)
{
    return bound > 0 && bound < n ? bound : n;
}

/* How many threads, with what OMP_NUM_THREADS says and without. */
typedef struct counts {
    int asked, there;
} counts;

static counts count_cpus(void)
{
    const int limit = asked_for("OMP_THREAD_LIMIT");
    int there = least_of(in_affinity(), cpus_quota("/proc/self/cgroup", "/sys/fs/cgroup"));
    int asked = asked_for("OMP_NUM_THREADS");
    there = least_of(there > 0 ? there : 1, limit);
    asked = asked > 0 ? least_of(asked, limit) : there;
    return (counts){asked, there};
}

static counts look_up(void)
{
    static _Atomic int asked, there; /* there is known once asked is */
    counts n = {atomic_load(&asked), 0};
    if (n.asked == 0) {
        n = count_cpus();
        atomic_store(&there, n.there);
        atomic_store(&asked, n.asked);
    }
    n.there = atomic_load(&there);
    return n;
}

int cpus_usable(int most)
{
    return least_of(most, look_up().asked);
}

int cpus_available(int most)
{
    return least_of(most, look_up().there);
}
