/* Attention over the processes of MPI: each holds some rows of a sequence and computes their
 * part; process 0 compares what all have made with one process's result, bit for bit.
 *
 *     mpirun -n 2 build/examples/context_parallel [ROWS]
 *
 * Every process makes the same block mask and the same shard plan; only keys travel. */
#include "saccade_mpi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 4, HKV = 2, D = 32 };

static void must(saccade_status status, const saccade_error *err)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "%s: %s\n", err->where, err->message);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* A number that anyone can make who knows where it stands in the whole sequence. */
static float value(int64_t seed, int64_t head, int64_t row, int64_t d)
{
    uint64_t x = (uint64_t)(((seed * 64 + head) << 40) + row * D + d) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (float)(int64_t)(x >> 40) * 0x1p-23f - 1;
}

/* [1, heads, rows of the ranges, D]; NULL where there are none. */
static float *make(int64_t seed, int64_t heads, const saccade_range *at, int32_t n,
                   int64_t *rows)
{
    *rows = 0;
    for (int32_t i = 0; i < n; i++)
        *rows += at[i].count;
    float *data = malloc((size_t)(heads * *rows * D + 1) * sizeof *data), *to = data;
    for (int64_t h = 0; data && h < heads; h++)
        for (int32_t i = 0; i < n; i++)
            for (int64_t j = at[i].first; j < at[i].first + at[i].count; j++)
                for (int64_t d = 0; d < D; d++)
                    *to++ = value(seed, h, j, d);
    return data;
}

static saccade_tensor tensor(float *data, int64_t heads, int64_t rows)
{
    return saccade_tensor_of(data, SACCADE_F32, 4, (int64_t[]){1, heads, rows, D});
}

static void *workspace(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

/* The masks and scores of the whole sequence, as in a program for one device. */
typedef struct model {
    saccade_problem problem;
    saccade_mod *mask, *score;
    saccade_block_mask *blocks;
    saccade_sizes sizes;
} model;

static saccade_mod *mod(saccade_kind kind, const char *text)
{
    saccade_error err;
    saccade_mod *generic, *bound;
    must(saccade_mod_parse(kind, text, strlen(text), &generic, &err), &err);
    must(saccade_mod_bind(generic, NULL, 0, &bound, &err), &err);
    saccade_mod_destroy(generic);
    return bound;
}

static void model_open(int64_t rows, model *m)
{
    saccade_error err;
    m->sizes = (saccade_sizes){1, H, HKV, rows, rows, D, D};
    m->mask = mod(SACCADE_MASK, "causal() && q - kv < 2000");
    m->score = mod(SACCADE_SCORE, "alibi()");
    saccade_problem_init(&m->problem);
    m->problem.sizes = m->sizes;
    m->problem.mask = m->mask;
    m->problem.score = m->score;
    must(saccade_block_mask_create(NULL, m->mask, &m->sizes, NULL, NULL, 0, NULL, &m->blocks,
                                   &err),
         &err);
}

static void model_close(model *m)
{
    saccade_block_mask_destroy(m->blocks);
    saccade_mod_destroy(m->mask);
    saccade_mod_destroy(m->score);
}

/* This process's rows of the result, [H][rows][D]. */
static float *attend(const model *m, const saccade_shard_plan *shards,
                     const saccade_transport *transport, int64_t *rows)
{
    saccade_error err;
    saccade_dist *dist;
    saccade_forward_args a;
    const saccade_range *at;
    int64_t keys;
    int32_t n = saccade_shard_rows(shards, transport->rank, &at);
    float *q = make(1, H, at, n, rows),
          *out = malloc((size_t)(H * *rows * D + 1) * sizeof *out);
    n = saccade_shard_keys(shards, transport->rank, &at);
    float *k = make(2, HKV, at, n, &keys), *v = make(3, HKV, at, n, &keys);
    const saccade_tensor tq = tensor(q, H, *rows), tk = tensor(k, HKV, keys);
    const saccade_tensor tv = tensor(v, HKV, keys), to = tensor(out, H, *rows);
    must(saccade_dist_create(NULL, &m->problem, shards, 0, transport, &dist, &err), &err);
    must(saccade_dist_prepare(dist, m->blocks, &err), &err);
    saccade_forward_args_init(&a);
    a.q = *rows ? &tq : NULL;
    a.k = keys ? &tk : NULL;
    a.v = keys ? &tv : NULL;
    a.out = *rows ? &to : NULL;
    a.block_mask = m->blocks;
    a.workspace_bytes = saccade_dist_workspace(dist, 1);
    a.workspace = workspace(a.workspace_bytes);
    must(saccade_dist_forward(dist, &a, &err), &err);
    free(a.workspace);
    saccade_dist_destroy(dist);
    free(q);
    free(k);
    free(v);
    return out;
}

/* The same by this process alone. */
static float *attend_alone(const model *m, const saccade_plan *plan)
{
    saccade_error err;
    saccade_forward_args a;
    const saccade_range all = {0, m->sizes.Q};
    int64_t n;
    float *q = make(1, H, &all, 1, &n), *k = make(2, HKV, &all, 1, &n);
    float *v = make(3, HKV, &all, 1, &n), *out = malloc((size_t)(H * n * D) * sizeof *out);
    const saccade_tensor tq = tensor(q, H, n), tk = tensor(k, HKV, n), tv = tensor(v, HKV, n);
    const saccade_tensor to = tensor(out, H, n);
    saccade_forward_args_init(&a);
    a.q = &tq;
    a.k = &tk;
    a.v = &tv;
    a.out = &to;
    a.block_mask = m->blocks;
    a.workspace_bytes = saccade_plan_workspace(plan, &m->sizes);
    a.workspace = workspace(a.workspace_bytes);
    must(saccade_plan_prepare(plan, m->blocks, &err), &err);
    must(saccade_forward(plan, &a, &err), &err);
    free(a.workspace);
    free(q);
    free(k);
    free(v);
    return out;
}

/* Rows of rank r, as they came, against those of the whole result. */
static int is_equal(const saccade_shard_plan *shards, int32_t r, const float *part,
                    const float *all, int64_t Q)
{
    const saccade_range *at;
    const int32_t n = saccade_shard_rows(shards, r, &at);
    for (int64_t h = 0; h < H; h++)
        for (int32_t i = 0; i < n; part += at[i++].count * D)
            if (memcmp(part, all + (h * Q + at[i].first) * D,
                       (size_t)(at[i].count * D) * sizeof *part))
                return 0;
    return 1;
}

static int compare(const model *m, const saccade_plan *plan, const saccade_shard_plan *shards,
                   const saccade_transport *t, float *own, int64_t rows)
{
    int equal = 1;
    if (t->rank != 0) {
        MPI_Send(own, (int)(H * rows * D), MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
        return 1;
    }
    float *all = attend_alone(m, plan), *part = malloc((size_t)(H * m->sizes.Q * D) * 4);
    for (int32_t r = 0; r < t->ranks; r++) {
        if (r)
            MPI_Recv(part, (int)(H * m->sizes.Q * D), MPI_FLOAT, r, 0, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        equal &= is_equal(shards, r, r ? part : own, all, m->sizes.Q);
    }
    free(all);
    free(part);
    return equal;
}

int main(int argc, char **argv)
{
    saccade_error err;
    saccade_transport transport;
    saccade_shard_options o;
    saccade_shard_plan *shards;
    saccade_shard_stats stats;
    saccade_plan *plan;
    model m;
    int64_t rows;
    MPI_Init(&argc, &argv);
    const int64_t length = argc > 1 ? atoll(argv[1]) : 3000;
    saccade_transport_init(&transport);
    must(saccade_mpi_create(MPI_COMM_WORLD, &transport, &err), &err);
    model_open(length, &m);
    must(saccade_plan_create(NULL, &m.problem, &plan, &err), &err);

    const saccade_block_mask *masks[] = {m.blocks};
    saccade_shard_options_init(&o);
    o.ranks = transport.ranks;
    o.tile = (int32_t)saccade_plan_row_tile(plan, &m.sizes);
    o.masks = masks;
    o.n_masks = 1;
    must(saccade_shard_plan_create(&o, &shards, &err), &err);

    float *own = attend(&m, shards, &transport, &rows);
    const int equal = compare(&m, plan, shards, &transport, own, rows);
    saccade_shard_stats_init(&stats);
    must(saccade_shard_get_stats(shards, transport.rank, &stats, &err), &err);
    printf("rank %d of %d: %lld rows, %.3f of the mean area, %lld keys received\n",
           transport.rank, transport.ranks, (long long)rows, stats.area / stats.mean_area,
           (long long)stats.received);
    if (transport.rank == 0)
        printf("%s one process's result, bit for bit\n", equal ? "equal to" : "NOT");

    free(own);
    saccade_shard_plan_destroy(shards);
    saccade_plan_destroy(plan);
    model_close(&m);
    saccade_mpi_destroy(&transport);
    MPI_Finalize();
    return !equal;
}
