/* Loops over worker threads, and what a host may do around them: fork, have no thread left,
 * call from many threads at a time, handle signals, compute with its own rounding. */
#include "base/clock.h"
#include "base/cpus.h"
#include "base/parallel.h"
#include "saccade_config.h"
#include "saccade_threads.h"
#include "support/fail_thread.h"
#include "support/sanitizers.h"
#include "support/short_run.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { ITEMS = 200, HANG_SECONDS = 120 };
static const int64_t MEETING_NS = (int64_t)30 * 1000000000;

/* ---- loops to run ---- */

typedef struct tally {
    _Atomic int calls[ITEMS];
    _Atomic int threads; /* bit t: thread t took part; for the first 30 */
} tally;

static void count(void *arg, int64_t item, int thread)
{
    tally *t = arg;
    atomic_fetch_add(&t->calls[item], 1);
    if (thread < 30)
        atomic_fetch_or(&t->threads, 1 << thread);
}

/* Each thread keeps to its item until another has come, or half a minute has passed. */
static void meet(void *arg, int64_t item, int thread)
{
    tally *t = arg;
    const int64_t start = clock_ns();
    count(t, item, thread);
    while ((atomic_load(&t->threads) & (atomic_load(&t->threads) - 1)) == 0 &&
           clock_ns() - start < MEETING_NS)
        continue;
}

/* 0 if a loop on `threads` threads visits every item once. */
static int loop_is_wrong(int threads)
{
    tally t = {0};
    par_for(ITEMS, threads, count, &t);
    for (int i = 0; i < ITEMS; i++)
        if (atomic_load(&t.calls[i]) != 1)
            return 1;
    return atomic_load(&t.threads) >> threads != 0;
}

static int two_threads_meet(void)
{
    tally t = {0};
    par_for(2, 2, meet, &t);
    return atomic_load(&t.threads) == 3;
}

/* A loop on 4 threads; bit t: thread t took part. */
static int threads_of_a_loop(void)
{
    tally t = {0};
    par_for(ITEMS, 4, count, &t);
    return atomic_load(&t.threads);
}

/* ---- tests ---- */

/* Before any other test has made workers. */
static void loops_do_without_threads_that_cannot_be_created(void **state)
{
    (void)state;
    const int before = fail_thread_count();
    fail_thread_after(0);
    assert_int_equal(loop_is_wrong(4), 0);
    assert_int_equal(threads_of_a_loop(), 1);
    if (HAVE_THREADS)
        assert_true(fail_thread_count() > before);
    fail_thread_after(1);
    usleep(200000); /* until it is tried again */
    assert_int_equal(loop_is_wrong(4), 0);
    assert_in_range(threads_of_a_loop(), 1, 3);
    fail_thread_after(-1);
    usleep(200000);
    assert_int_equal(loop_is_wrong(4), 0);
}

static void threads_share_a_loop(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 8; threads++)
        assert_int_equal(loop_is_wrong(threads), 0);
    if (HAVE_THREADS)
        assert_true(two_threads_meet());
    else
        assert_int_equal(threads_of_a_loop(), 1);
}

/* Many short loops, from several threads, with more and fewer workers than there are. */
static void *call_often(void *arg)
{
    int *wrong = arg;
    for (int i = 0; i < 2000; i++)
        *wrong += loop_is_wrong(1 + i % 7);
    return NULL;
}

static void callers_may_be_many(void **state)
{
    (void)state;
    enum { CALLERS = 4 };
    pthread_t callers[CALLERS];
    int wrong[CALLERS] = {0};
    for (int i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_create(&callers[i], NULL, call_often, &wrong[i]), 0);
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
        assert_int_equal(wrong[i], 0);
    }
}

static void inner_loop(void *arg, int64_t item, int thread)
{
    int *wrong = arg;
    (void)thread;
    wrong[item] = loop_is_wrong(3);
}

static void loops_may_be_nested(void **state)
{
    (void)state;
    int wrong[12] = {0};
    par_for(12, 3, inner_loop, wrong);
    for (int i = 0; i < 12; i++)
        assert_int_equal(wrong[i], 0);
}

static int threads_are_wrong(void)
{
    return loop_is_wrong(4) || (HAVE_THREADS && !two_threads_meet());
}

/* The answer of a child; a hang ends by its alarm. */
static int answer_of_a_child(int (*is_wrong)(void))
{
    int status = 0;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(HANG_SECONDS);
        _exit(is_wrong());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

/* The thread sanitizer lets no child of a program with threads create any, and qemu's user
 * emulation ends such children by itself. */
static int is_fork_untestable(void)
{
    return HAS_THREAD_SANITIZER || is_emulated_run();
}

static void children_of_fork_have_their_own(void **state)
{
    (void)state;
    if (is_fork_untestable())
        skip();
    assert_int_equal(loop_is_wrong(4), 0);
    assert_int_equal(answer_of_a_child(threads_are_wrong), 0);
    assert_int_equal(loop_is_wrong(4), 0);
}

static void *fork_often(void *arg)
{
    int *answer = arg;
    for (int i = 0; i < 20 && *answer == 0; i++)
        *answer = answer_of_a_child(threads_are_wrong);
    return NULL;
}

static void fork_may_come_in_the_middle(void **state)
{
    (void)state;
    if (is_fork_untestable())
        skip();
    pthread_t forking, calling;
    int answer = 0, wrong = 0;
    assert_int_equal(pthread_create(&calling, NULL, call_often, &wrong), 0);
    assert_int_equal(pthread_create(&forking, NULL, fork_often, &answer), 0);
    pthread_join(calling, NULL);
    pthread_join(forking, NULL);
    assert_int_equal(answer, 0);
    assert_int_equal(wrong, 0);
}

typedef struct habits {
    tally meeting;
    _Atomic int rounding[2], blocked[2];
} habits;

static void note_habits(void *arg, int64_t item, int thread)
{
    habits *h = arg;
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, NULL, &set);
    atomic_store(&h->rounding[thread], fegetround());
    atomic_store(&h->blocked[thread], sigismember(&set, SIGTERM));
    if (HAVE_THREADS)
        meet(&h->meeting, item, thread);
}

static void workers_round_as_the_caller_and_leave_signals_to_it(void **state)
{
    (void)state;
    static const int roundings[] = {FE_DOWNWARD, FE_TONEAREST, FE_UPWARD, FE_TONEAREST};
    for (int i = 0; i < 4; i++) {
        habits h = {.rounding = {-1, -1}};
        assert_int_equal(fesetround(roundings[i]), 0);
        par_for(2, 2, note_habits, &h);
        fesetround(FE_TONEAREST);
        assert_int_equal(h.rounding[0], roundings[i]);
        assert_int_equal(h.blocked[0], 0);
        if (HAVE_THREADS) {
            assert_int_equal(h.rounding[1], roundings[i]);
            assert_int_equal(h.blocked[1], 1);
        }
    }
}

/* ---- a host's team ---- */

enum { TEAM = 3 };
static _Thread_local int team_number;
static _Thread_local int is_in_team;
static int n_teams;

typedef struct member {
    void (*work)(void *);
    void *data;
    int number;
} member;

static void *take_part(void *arg)
{
    const member *m = arg;
    team_number = m->number;
    is_in_team = 1;
    m->work(m->data);
    is_in_team = 0;
    return NULL;
}

/* As GOMP_parallel, in the size that the host likes. */
static void team_runs(void (*work)(void *), void *data, unsigned threads, unsigned flags)
{
    pthread_t thread[TEAM];
    member members[TEAM];
    assert_int_equal(threads + flags, 0);
    for (int n = 0; n < TEAM; n++)
        members[n] = (member){work, data, n};
    n_teams++;
    for (int n = 1; n < TEAM; n++)
        assert_int_equal(pthread_create(&thread[n], NULL, take_part, &members[n]), 0);
    take_part(&members[0]);
    for (int n = 1; n < TEAM; n++)
        pthread_join(thread[n], NULL);
}

static int team_thread(void)
{
    return team_number;
}

static int team_is_inside(void)
{
    return is_in_team;
}

/* A child has no team of its parent's. */
static int loop_takes_a_team(void)
{
    n_teams = 0;
    return loop_is_wrong(3) + n_teams;
}

static void a_host_may_share_its_team(void **state)
{
    (void)state;
    saccade_error err;
    if (!HAVE_THREADS)
        return;
    assert_int_equal(saccade_share_openmp(team_runs, team_thread, NULL, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_share_openmp(team_runs, team_thread, team_is_inside, &err),
                     SACCADE_OK);
    for (int threads = 1; threads <= 5; threads++) {
        n_teams = 0;
        assert_int_equal(loop_is_wrong(threads), 0);
        assert_int_equal(n_teams, threads > 1);
    }
    n_teams = 0;
    loops_may_be_nested(state); /* inner loops on threads of the library's own */
    assert_int_equal(n_teams, 1);
    if (!is_fork_untestable())
        assert_int_equal(answer_of_a_child(loop_takes_a_team), 0);
    n_teams = 0;
    assert_int_equal(saccade_share_openmp(NULL, NULL, NULL, &err), SACCADE_OK);
    assert_int_equal(loop_is_wrong(3), 0);
    assert_int_equal(n_teams, 0);
}

/* ---- quotas ---- */

static void put(const char *folder, const char *path, const char *text)
{
    char name[512], command[600];
    snprintf(name, sizeof name, "%s/%s", folder, path);
    *strrchr(name, '/') = '\0';
    snprintf(command, sizeof command, "mkdir -p '%s'", name);
    assert_int_equal(system(command), 0);
    snprintf(name, sizeof name, "%s/%s", folder, path);
    FILE *file = fopen(name, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void quotas_of_control_groups_bound_the_threads(void **state)
{
    (void)state;
    char folder[] = "/tmp/saccade-cpus-XXXXXX", groups[64], command[96];
    assert_non_null(mkdtemp(folder));
    snprintf(groups, sizeof groups, "%s/groups", folder);
    assert_int_equal(cpus_quota(groups, folder), 0); /* no such file */

    put(folder, "groups", "0::/a/b\n");
    assert_int_equal(cpus_quota(groups, folder), 0);
    put(folder, "a/b/cpu.max", "max 100000\n");
    assert_int_equal(cpus_quota(groups, folder), 0);
    put(folder, "a/b/cpu.max", "750000 100000\n");
    assert_int_equal(cpus_quota(groups, folder), 7);
    put(folder, "a/cpu.max", "250000 100000\n");
    assert_int_equal(cpus_quota(groups, folder), 2);
    put(folder, "cpu.max", "10000 100000\n");
    assert_int_equal(cpus_quota(groups, folder), 1);

    put(folder, "groups", "12:memory:/x\n4:cpuacct,cpu:/c\n1:name=systemd:/a\n");
    assert_int_equal(cpus_quota(groups, folder), 0);
    put(folder, "cpu/c/cpu.cfs_quota_us", "-1\n");
    put(folder, "cpu/c/cpu.cfs_period_us", "50000\n");
    assert_int_equal(cpus_quota(groups, folder), 0);
    put(folder, "cpu/c/cpu.cfs_quota_us", "200000\n");
    assert_int_equal(cpus_quota(groups, folder), 4);
    put(folder, "cpu/cpu.cfs_quota_us", "150000\n");
    put(folder, "cpu/cpu.cfs_period_us", "50000\n");
    assert_int_equal(cpus_quota(groups, folder), 3);

    snprintf(command, sizeof command, "rm -r '%s'", folder);
    assert_int_equal(system(command), 0);
}

/* What a program with this environment may use; limit, cpus: no OMP_THREAD_LIMIT, any CPU.
 * wanted: by its own account, on CPUs that are there. */
typedef struct surroundings {
    const char *threads, *limit;
    int cpus, wanted;
} surroundings;

static void stay_on(int cpus)
{
#ifdef __linux__
    cpu_set_t all, some;
    CPU_ZERO(&some);
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    for (int cpu = 0, n = 0; cpu < CPU_SETSIZE && n < cpus; cpu++)
        if (CPU_ISSET(cpu, &all)) {
            CPU_SET(cpu, &some);
            n++;
        }
    assert_int_equal(sched_setaffinity(0, sizeof some, &some), 0);
#else
    (void)cpus;
#endif
}

static int usable_in(surroundings s)
{
    int status = 0;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setenv("OMP_NUM_THREADS", s.threads, 1);
        if (s.limit)
            setenv("OMP_THREAD_LIMIT", s.limit, 1);
        if (s.cpus)
            stay_on(s.cpus);
        _exit(s.wanted ? cpus_available(s.wanted) : cpus_usable(100));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status);
}

static int usable_with(const char *threads)
{
    return usable_in((surroundings){.threads = threads});
}

/* Before anything here asks for the number, which is looked up once. */
static void the_environment_says_how_many_threads(void **state)
{
    (void)state;
    assert_int_equal(usable_with("3"), 3);
    assert_int_equal(usable_with("5,2"), 5);
    assert_int_equal(usable_with("1"), 1);
    assert_int_equal(usable_with("1000000000000"), 100);
    const int all = usable_with("");
    assert_in_range(all, 1, 100);
    assert_int_equal(usable_with("0"), all);
    assert_int_equal(usable_with("-4"), all);
    assert_int_equal(usable_with("some"), all);
    assert_int_equal(usable_in((surroundings){"7", "3", 0, 0}), 3);
    assert_int_equal(usable_in((surroundings){"2", "30", 0, 0}), 2);
    assert_int_equal(usable_in((surroundings){"", "1", 0, 0}), 1);
    assert_int_equal(usable_in((surroundings){"", "0", 0, 0}), all);
#ifdef __linux__
    assert_int_equal(usable_in((surroundings){"", NULL, 1, 0}), 1);
    assert_in_range(usable_in((surroundings){"", NULL, 2, 0}), 1, all < 2 ? all : 2);
    assert_int_equal(usable_in((surroundings){"4", NULL, 1, 0}), 4); /* was asked for */
    assert_int_equal(usable_in((surroundings){"4", NULL, 1, 3}), 1);
    assert_int_equal(usable_in((surroundings){"1", NULL, 0, 100}), all);
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_environment_says_how_many_threads),
        cmocka_unit_test(loops_do_without_threads_that_cannot_be_created),
        cmocka_unit_test(threads_share_a_loop),
        cmocka_unit_test(callers_may_be_many),
        cmocka_unit_test(loops_may_be_nested),
        cmocka_unit_test(children_of_fork_have_their_own),
        cmocka_unit_test(fork_may_come_in_the_middle),
        cmocka_unit_test(workers_round_as_the_caller_and_leave_signals_to_it),
        cmocka_unit_test(a_host_may_share_its_team),
        cmocka_unit_test(quotas_of_control_groups_bound_the_threads),
    };
    return cmocka_run_group_tests_name("parallel", tests, NULL, NULL);
}
