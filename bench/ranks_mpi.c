/* Processes of MPI with one thread each against one process: how much of what a second thread
 * gains in one process a second process gains.
 *
 *     mpirun -n 2 build/bench/ranks_mpi [ROWS [MASK [ROUNDS]]]
 *
 * Forward and backward of b1 h8/2 d64 f32 on process 0 with one thread, with as many as there
 * are processes (the others sleep), and on all with one thread each, gathered and staged, by
 * turns; least and median; cpu: processor time of the slowest process, for threads the
 * process's over their number. ROUNDS 0: memory alone. */
#include "saccade_mpi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { H = 8, HKV = 2, D = 64, MOST_ROUNDS = 99 };
enum { Q, K, V, OUT, D_OUT, D_Q, D_K, D_V, TENSORS };

static void must(saccade_status status, const saccade_error *err)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "%s: %s\n", err->where, err->message);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static double seconds_on(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *room(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
}

/* Tensors of so many rows and keys. */
typedef struct data {
    saccade_tensor t[TENSORS], lse;
    saccade_forward_args forward;
    saccade_backward_args backward;
} data;

static void fill(data *d, int64_t rows, int64_t keys, const saccade_block_mask *mask)
{
    uint32_t x = 1;
    for (int i = 0; i < TENSORS; i++) {
        const int is_key = i == K || i == V || i == D_K || i == D_V;
        const int64_t shape[4] = {1, is_key ? HKV : H, is_key ? keys : rows, D};
        const int64_t n = shape[1] * shape[2] * D;
        float *to = room((size_t)n * sizeof *to);
        for (int64_t k = 0; k < n; k++)
            to[k] = (float)((x = x * 1664525u + 1013904223u) >> 8) * 0x1p-24f - 0.5f;
        d->t[i] = saccade_tensor_of(to, SACCADE_F32, 4, shape);
    }
    d->lse = saccade_tensor_of(room((size_t)(H * rows) * sizeof(float)), SACCADE_F32, 3,
                               (int64_t[]){1, H, rows});
    saccade_forward_args_init(&d->forward);
    saccade_backward_args_init(&d->backward);
    d->forward.q = d->backward.q = &d->t[Q];
    d->forward.k = d->backward.k = &d->t[K];
    d->forward.v = d->backward.v = &d->t[V];
    d->forward.out = d->backward.out = &d->t[OUT];
    d->forward.lse = d->backward.lse = &d->lse;
    d->backward.d_out = &d->t[D_OUT];
    d->backward.d_q = &d->t[D_Q];
    d->backward.d_k = &d->t[D_K];
    d->backward.d_v = &d->t[D_V];
    d->forward.block_mask = d->backward.block_mask = mask;
}

static void give_rooms(data *d, size_t forward, size_t backward)
{
    d->forward.workspace = room(forward);
    d->forward.workspace_bytes = forward;
    d->backward.workspace = room(backward);
    d->backward.workspace_bytes = backward;
}

/* Who waits for process 0 must not take its cores. */
static void sleep_until_all(void)
{
    MPI_Request request;
    int is_done = 0;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    while (MPI_Test(&request, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !is_done)
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
}

typedef struct round_times {
    double wall[2], cpu[2]; /* forward, backward; cpu: the most of any process */
} round_times;

enum { ONE, THREADS, RANKS, STAGED, WAYS };

static saccade_plan *plans[2];
static saccade_dist *dists[2];

static void run_one(data *d, int way, int pass)
{
    saccade_error err = {0};
    if (way < RANKS)
        must(pass ? saccade_backward(plans[way], &d->backward, &err)
                  : saccade_forward(plans[way], &d->forward, &err),
             &err);
    else
        must(pass ? saccade_dist_backward(dists[way - RANKS], &d->backward, &err)
                  : saccade_dist_forward(dists[way - RANKS], &d->forward, &err),
             &err);
}

static round_times measure(data *d, int way, int rank, int ranks)
{
    round_times t = {{0}, {0}};
    for (int pass = 0; pass < 2; pass++) {
        sleep_until_all();
        const double wall = seconds_on(CLOCK_MONOTONIC);
        const clockid_t clock =
            way == THREADS ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID;
        const double cpu = seconds_on(clock);
        if (way >= RANKS || rank == 0)
            run_one(d, way, pass);
        double took[2] = {seconds_on(CLOCK_MONOTONIC) - wall, seconds_on(clock) - cpu};
        took[1] /= way == THREADS ? ranks : 1;
        sleep_until_all();
        MPI_Allreduce(MPI_IN_PLACE, took, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        t.wall[pass] = took[0];
        t.cpu[pass] = took[1];
    }
    return t;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, const round_times *t, int n)
{
    double each[4][MOST_ROUNDS];
    for (int i = 0; i < n; i++)
        for (int pass = 0; pass < 2; pass++) {
            each[pass][i] = t[i].wall[pass];
            each[2 + pass][i] = t[i].cpu[pass];
        }
    for (int k = 0; k < 4; k++)
        qsort(each[k], (size_t)n, sizeof(double), compare);
    printf("%-22s forward %8.2f ms (median %8.2f, cpu %8.2f)  backward %8.2f (%8.2f, cpu %8.2f)"
           "\n",
           name, 1e3 * each[0][0], 1e3 * each[0][n / 2], 1e3 * each[2][0], 1e3 * each[1][0],
           1e3 * each[1][n / 2], 1e3 * each[3][0]);
}

static saccade_context *context_of(int threads)
{
    saccade_context_options o;
    saccade_context *context;
    saccade_error err = {0};
    saccade_context_options_init(&o);
    o.threads = threads;
    must(saccade_context_create(&o, &context, &err), &err);
    return context;
}

int main(int argc, char **argv)
{
    const int64_t length = argc > 1 ? atoll(argv[1]) : 4096;
    const char *text = argc > 2 ? argv[2] : "causal()";
    const int asked = argc > 3 ? atoi(argv[3]) : 5;
    const int rounds = asked < 0 ? 0 : asked > MOST_ROUNDS ? MOST_ROUNDS : asked;
    const saccade_sizes sizes = {1, H, HKV, length, length, D, D};
    saccade_error err = {0};
    saccade_mod *generic, *mod;
    saccade_block_mask *mask;
    saccade_problem p;
    saccade_shard_options o;
    saccade_shard_plan *shards;
    saccade_transport t;
    data whole, own, staged;
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    saccade_transport_init(&t);
    must(saccade_mpi_create(MPI_COMM_WORLD, &t, &err), &err);
    must(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err), &err);
    must(saccade_mod_bind(generic, NULL, 0, &mod, &err), &err);
    must(saccade_block_mask_create(NULL, mod, &sizes, NULL, NULL, 0, NULL, &mask, &err), &err);
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.mask = mod;
    p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    saccade_context *one = context_of(1), *all = context_of(t.ranks);
    must(saccade_plan_create(one, &p, &plans[0], &err), &err);
    must(saccade_plan_create(all, &p, &plans[1], &err), &err);
    must(saccade_plan_prepare(plans[0], mask, &err), &err);
    must(saccade_plan_prepare(plans[1], mask, &err), &err);

    const saccade_block_mask *masks[] = {mask};
    saccade_shard_options_init(&o);
    o.ranks = t.ranks;
    o.tile = (int32_t)saccade_plan_row_tile(plans[0], &sizes);
    o.masks = masks;
    o.n_masks = 1;
    must(saccade_shard_plan_create(&o, &shards, &err), &err);
    must(saccade_dist_create(one, &p, shards, 0, &t, &dists[0], &err), &err);
    must(saccade_dist_create_staged(one, &p, shards, 0, 0, &t, &dists[1], &err), &err);
    must(saccade_dist_prepare(dists[0], mask, &err), &err);
    must(saccade_dist_prepare(dists[1], mask, &err), &err);

    saccade_shard_stats stats;
    saccade_shard_stats_init(&stats);
    must(saccade_shard_get_stats(shards, t.rank, &stats, &err), &err);
    fill(&whole, length, length, mask);
    fill(&own, stats.rows, stats.keys, mask);
    give_rooms(&whole, saccade_plan_workspace(plans[1], &sizes),
               saccade_plan_backward_workspace(plans[1], &sizes));
    size_t back[2];
    staged = own;
    for (int i = 0; i < 2; i++) {
        data *d = i ? &staged : &own;
        must(saccade_dist_backward_workspace(dists[i], &d->backward, &back[i], &err), &err);
        give_rooms(d, saccade_dist_workspace(dists[i], 1), back[i]);
    }
    round_times times[WAYS][MOST_ROUNDS];
    for (int n = -1; n < rounds && rounds; n++)
        for (int way = 0; way < WAYS; way++) {
            data *d = way < RANKS ? &whole : way == RANKS ? &own : &staged;
            times[way][n < 0 ? 0 : n] = measure(d, way, t.rank, t.ranks);
        }
    if (t.rank == 0) {
        static const char *const names[] = {"one thread", "threads", "ranks", "ranks, staged"};
        printf("%s, b1 h%d/%d q%lld d%d f32, %d ranks, imbalance %.3f, keys received %lld,"
               " workspace %zu + %zu MiB, staged %zu + %zu\n",
               text, H, HKV, (long long)length, D, t.ranks, stats.imbalance,
               (long long)stats.received, own.forward.workspace_bytes >> 20, back[0] >> 20,
               staged.forward.workspace_bytes >> 20, back[1] >> 20);
        for (int way = 0; way < WAYS && rounds; way++)
            print(names[way], times[way], rounds);
    }
    saccade_dist_destroy(dists[0]);
    saccade_dist_destroy(dists[1]);
    saccade_mpi_destroy(&t);
    MPI_Finalize();
    return 0;
}
