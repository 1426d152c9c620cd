/* One rank's part of a plan: made once, run by all ranks at the same time. */
#include "dist/dist.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>

saccade_status dist_open(saccade_plan *plan, const saccade_shard_plan *shards, int32_t mask,
                         const saccade_transport *transport, saccade_dist **out,
                         saccade_error *err)
{
    saccade_dist *d = calloc(1, sizeof *d);
    FAIL_IF_NULL(d);
    d->shards = shards;
    d->transport = *transport;
    const saccade_status status = dist_lay_out(d, mask, err);
    if (status != SACCADE_OK) {
        saccade_dist_destroy(d);
        return status;
    }
    d->plan = plan;
    plan->rows = &d->rows;
    *out = d;
    return SACCADE_OK;
}

void saccade_dist_destroy(saccade_dist *dist)
{
    if (!dist)
        return;
    dist_device_close(dist->device);
    dist_close_stages(dist->stages);
    dist_free_layout(dist);
    saccade_plan_destroy(dist->plan);
    free(dist);
}

saccade_sizes dist_sizes(const saccade_dist *d, int64_t B)
{
    saccade_sizes s = d->plan->problem.sizes;
    s.B = B;
    s.Q = d->Q;
    s.KV = d->KV;
    return s;
}

size_t dist_workspace(const saccade_dist *d, int64_t B, size_t solver)
{
    return sum_bytes(dist_memory_of(d, B).bytes, solver);
}

saccade_status dist_check_tiles(const saccade_dist *d, const saccade_plan *plan,
                                const saccade_sizes *sizes, saccade_error *err)
{
    const int64_t tile = plan->solver->row_tile(plan, sizes);
    const int is_host =
        d->plan->backend->device == SACCADE_CPU; /* where parts run one by one */
    for (int32_t i = 0; i < d->rows.n; i++)
        FAIL_AT(d->part[i].first % tile || (!is_host && d->part[i].row % tile), SACCADE_EINVAL,
                "shards", 0, 0,
                "got chunks of %lld rows, expected a multiple of %lld (saccade_plan_row_tile)",
                (long long)d->shards->options.chunk, (long long)tile);
    return SACCADE_OK;
}

static saccade_status check_run(const saccade_dist *d, const saccade_sizes *sizes,
                                saccade_error *err)
{
    TRY(dist_check_tiles(d, d->plan, sizes, err));
    FAIL_AT(sizes->B * d->in.all > INT32_MAX, SACCADE_ELIMIT, "k", 0, 0,
            "got %lld keys of %lld batches to gather, expected less than 2^31 rows",
            (long long)d->in.all, (long long)sizes->B);
    return SACCADE_OK;
}

saccade_status dist_forward(saccade_dist *d, plan_run *run, saccade_error *err)
{
    char *memory = run->workspace;
    const size_t own = dist_memory_of(d, run->sizes.B).bytes;
    dist_keys keys;
    TRY(check_run(d, &run->sizes, err));
    TRY(dist_gather(d, run->sizes.B, run->k, run->v, memory, &keys, err));
    if (!d->n_rows)
        return SACCADE_OK;
    TRY(dist_check_keys(d, run->block_mask, memory, err));
    run->k = &keys.k;
    run->v = &keys.v;
    run->chunks = &keys.chunks;
    run->rows = &d->rows;
    run->workspace = memory + own;
    run->workspace_bytes -= own;
    return d->plan->solver->forward(d->plan, run, err);
}

/* ---- backward ---- */

static saccade_tensor pool_gradient(const saccade_tensor *pool, char *data)
{
    saccade_tensor t = *pool;
    t.data = data;
    t.dtype = SACCADE_F32;
    return t;
}

/* This rank's rows against the keys it touches: dQ is whole, the rest its part of all. */
static saccade_status run_part(saccade_dist *d, plan_run *run, const plan_gradients *to,
                               char *memory, const dist_return *m, dist_keys *keys,
                               saccade_error *err)
{
    const saccade_tensor dk = pool_gradient(&keys->k, memory + m->k_pool);
    const saccade_tensor dv = pool_gradient(&keys->v, memory + m->v_pool);
    plan_gradients part = *to;
    part.dk = d->plan->problem.gradients & SACCADE_GRADIENT_K ? &dk : NULL;
    part.dv = d->plan->problem.gradients & SACCADE_GRADIENT_V ? &dv : NULL;
    part.added &= SACCADE_GRADIENT_Q;
    run->k = &keys->k;
    run->v = &keys->v;
    run->chunks = &keys->chunks;
    run->rows = &d->rows;
    return d->plan->solver->backward(d->plan, run, &part, err);
}

saccade_status dist_backward(saccade_dist *d, plan_run *run, const plan_gradients *to,
                             saccade_error *err)
{
    char *memory = run->workspace, *back;
    const int64_t B = run->sizes.B;
    const size_t own = dist_memory_of(d, B).bytes;
    const dist_return m = dist_return_of(d, B, to->captures, to->sinks);
    saccade_tensor captures[MOD_MAX_CAPTURES], sinks;
    dist_keys keys;
    TRY(check_run(d, &run->sizes, err));
    TRY(dist_gather(d, B, run->k, run->v, memory, &keys, err));
    back = memory + own;
    dist_begin_captures(back, &m, to, captures, &sinks);
    run->workspace = back + m.bytes;
    run->workspace_bytes -= own + m.bytes;
    if (d->n_rows) {
        TRY(dist_check_keys(d, run->block_mask, memory, err));
        plan_gradients part = *to;
        part.captures = captures;
        part.sinks = to->sinks ? &sinks : NULL;
        TRY(run_part(d, run, &part, back, &m, &keys, err));
    }
    TRY(dist_return_keys(d, B, back, &m, to, err));
    return dist_return_captures(d, back, &m, to, err);
}

/* ---- keys that the caller has gathered ---- */

/* Keys lie where they stand: the host's solver is told so by a table of one chunk. */
static saccade_status start_local(saccade_dist *d, plan_run *run, plan_chunks *chunks,
                                  saccade_error *err)
{
    static const int32_t start = 0;
    TRY(dist_check_tiles(d, d->plan, &run->sizes, err));
    TRY(dist_check_held(d, run->block_mask, err));
    *chunks = (plan_chunks){.first = &start, .count = 1, .size = (int32_t)d->KV};
    run->chunks = d->plan->problem.has_chunks ? chunks : NULL;
    run->rows = &d->rows;
    return SACCADE_OK;
}

saccade_status dist_forward_local(saccade_dist *d, plan_run *run, saccade_error *err)
{
    plan_chunks chunks;
    TRY(start_local(d, run, &chunks, err));
    return d->plan->solver->forward(d->plan, run, err);
}

saccade_status dist_backward_local(saccade_dist *d, plan_run *run, const plan_gradients *to,
                                   saccade_error *err)
{
    plan_chunks chunks;
    TRY(start_local(d, run, &chunks, err));
    return d->plan->solver->backward(d->plan, run, to, err);
}
