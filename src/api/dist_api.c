/* Attention over ranks: arguments into a run of the whole sequence and this rank's part of it.
 * Whatever fails here ends the transport: the other ranks are waiting. */
#include "api/api.h"
#include "base/hash.h"
#include "base/quantize.h"
#include "dist/dist.h"

#include <stdlib.h>

/* ---- making ---- */

saccade_status api_check_transport(const saccade_transport *t, saccade_error *err)
{
    FAIL_AT(!t->exchange && t->ranks > 1, SACCADE_EINVAL, "transport", 0, 0,
            "got no exchange, expected a function");
    FAIL_AT(!(t->seconds > 0 && t->seconds < 1e6), SACCADE_EINVAL, "transport", 0, 0,
            "got %g seconds, expected more than 0 and less than 10^6", t->seconds);
    return SACCADE_OK;
}

static saccade_status check_transport(const saccade_transport *t,
                                      const saccade_shard_plan *shards, int32_t mask,
                                      saccade_error *err)
{
    const int32_t n_masks = shards->options.n_masks;
    FAIL_AT(t->ranks != shards->options.ranks || t->rank < 0 || t->rank >= t->ranks,
            SACCADE_EINVAL, "transport", 0, 0,
            "got rank %d of %d, expected one of the shard plan's %d", t->rank, t->ranks,
            shards->options.ranks);
    TRY(api_check_transport(t, err));
    FAIL_AT(mask < 0 || mask >= (n_masks ? n_masks : 1), SACCADE_EINVAL, "mask", 0, 0,
            "got %d, expected one of the shard plan's %d", mask, n_masks);
    return SACCADE_OK;
}

static saccade_status add_text(hash128 *hash, const saccade_mod *mod, saccade_error *err)
{
    const size_t length = mod ? saccade_mod_print(mod, NULL, 0) : 0;
    char *text = calloc(1, length + 1);
    const int is_whole =
        text && (!mod || (length && saccade_mod_print(mod, text, length + 1) == length));
    if (is_whole)
        hash_add_text(hash, text);
    free(text);
    FAIL_IF(!is_whole, SACCADE_ENOMEM, "out of memory");
    return SACCADE_OK;
}

static const int64_t GATHERED = INT64_MIN; /* instead of keys of a window */
enum { BATCH_MOST = 1 << 20 /* from which on no tile follows from it */ };

/* What all ranks must have in common. captures: whose gradients are wanted, a bit each. */
static saccade_status digest_of(const saccade_problem *p, uint64_t captures,
                                const saccade_shard_plan *shards, int32_t mask, int64_t window,
                                uint64_t digest[2], saccade_error *err)
{
    const int64_t numbers[] = {p->sizes.H,
                               p->sizes.Hkv,
                               p->sizes.D,
                               p->sizes.Dv,
                               p->dtype,
                               p->kv_dtype,
                               p->out_dtype,
                               p->d_out_dtype,
                               p->h_offset,
                               p->heads_global,
                               mask,
                               p->gradients,
                               p->sinks_dtype,
                               SACCADE_ABI,
                               shards->options.Q,
                               shards->options.KV,
                               shards->options.chunk,
                               p->batch_invariant,
                               window,
                               window == GATHERED ? 0 : shards->block_kv[mask]};
    hash128 hash;
    hash_init(&hash);
    hash_add(&hash, numbers, sizeof numbers);
    hash_add(&hash, &captures, sizeof captures);
    hash_add(&hash, &p->scale, sizeof p->scale);
    hash_add(&hash, shards->owner, (size_t)shards->chunks * sizeof *shards->owner);
    hash_add(&hash, shards->key_owner, (size_t)shards->key_chunks * sizeof *shards->key_owner);
    hash_add(&hash, shards->needs.range, (size_t)shards->needs.n * sizeof *shards->needs.range);
    TRY(add_text(&hash, p->score, err));
    TRY(add_text(&hash, p->mask, err));
    TRY(add_text(&hash, p->weight, err));
    digest[0] = hash.a;
    digest[1] = hash.b;
    return SACCADE_OK;
}

/* What a window's results are made by: out in f32, for sinks to be added at the end. */
static saccade_status create_partial(saccade_context *context, const saccade_problem *problem,
                                     saccade_plan **out, saccade_error *err)
{
    saccade_problem p = *problem;
    p.out_dtype = SACCADE_F32;
    p.sinks_dtype = SACCADE_NONE;
    p.gradients = 0;
    p.gradient_captures = NULL;
    p.n_gradient_captures = 0;
    return api_plan_create(context, &p, 1, out, err);
}

static saccade_status check_window(const saccade_plan *plan, int64_t window, saccade_error *err)
{
    FAIL_AT(window < 0 || window > 1 << 30, SACCADE_EINVAL, "keys", 0, 0,
            "got %lld, expected 0 to 2^30 keys of a window", (long long)window);
    FAIL_AT(plan->problem.is_invariant, SACCADE_EINVAL, "batch_invariant", 0, 0,
            "got one in staged mode, expected none: its results depend on the windows");
    return SACCADE_OK;
}

static saccade_status check_problem(const saccade_problem *p, saccade_error *err)
{
    FAIL_AT(p->page, SACCADE_EINVAL, "page", 0, 0,
            "got %lld, expected 0: ranks hold their keys in one piece each",
            (long long)p->page);
    FAIL_AT(p->shared_prefix, SACCADE_EINVAL, "shared_prefix", 0, 0,
            "got %d over ranks, expected 0", p->shared_prefix);
    FAIL_AT(p->head_max, SACCADE_EINVAL, "head_max", 0, 0,
            "got %d over ranks, expected 0: each has maxima of its rows alone (row_max)",
            p->head_max);
    FAIL_AT(p->ragged, SACCADE_EINVAL, "ragged", 0, 0,
            "got a ragged problem over ranks, expected one whose batches have one length");
    FAIL_AT(quant_is_dtype(p->kv_dtype), SACCADE_EINVAL, "kv_dtype", 0, 0,
            "got %s, expected f32, f16 or bf16: ranks exchange no quantised keys",
            saccade_dtype_name(p->kv_dtype));
    return SACCADE_OK;
}

static int has_whole_tiles(const saccade_shard_plan *shards, int64_t tile)
{
    for (int32_t r = 0; r < shards->options.ranks; r++) {
        const saccade_range *rows;
        const int32_t n = saccade_shard_rows(shards, r, &rows);
        for (int32_t i = 0; i < n; i++)
            if (rows[i].first % tile)
                return 0;
    }
    return 1;
}

/* Runs of some batch must be able to take the chunks, of all ranks so that all say the same:
 * a run's tile may follow from its batch. */
static saccade_status check_chunks(const saccade_plan *plan, const saccade_shard_plan *shards,
                                   saccade_error *err)
{
    saccade_sizes sizes = plan->problem.sizes;
    sizes.Q = shards->options.Q;
    sizes.KV = shards->options.KV;
    for (sizes.B = 1; sizes.B <= BATCH_MOST; sizes.B *= 2)
        if (has_whole_tiles(shards, plan->solver->row_tile(plan, &sizes)))
            return SACCADE_OK;
    sizes.B = 1;
    FAIL_AT(1, SACCADE_EINVAL, "shards", 0, 0,
            "got chunks of %lld rows, expected a multiple of %lld (saccade_plan_row_tile, for "
            "saccade_shard_options.tile)",
            (long long)shards->options.chunk, (long long)plan->solver->row_tile(plan, &sizes));
}

/* *is_heard: whether a failure is all ranks'. */
static saccade_status create(saccade_context *context, const saccade_problem *problem,
                             const saccade_shard_plan *shards, int32_t mask, int64_t window,
                             const saccade_transport *transport, saccade_dist **out,
                             int *is_heard, saccade_error *err)
{
    saccade_problem p;
    saccade_plan *plan = NULL, *partial = NULL;
    saccade_dist *dist = NULL;
    uint64_t digest[2];
    TRY(check_transport(transport, shards, mask, err));
    saccade_problem_init(&p);
    TRY(RECORD_READ(&p, problem, "problem"));
    TRY(check_problem(&p, err));
    TRY(api_plan_create(context, &p, 1, &plan, err));
    saccade_status status = SACCADE_OK;
    if (window != GATHERED) {
        TRY_GOTO(check_window(plan, window, err));
        TRY_GOTO(create_partial(context, &p, &partial, err));
    }
    TRY_GOTO(digest_of(&p, plan->problem.gradient_captures, shards, mask, window, digest, err));
    FAIL_IF_GOTO(!plan->solver->row_tile, SACCADE_EBACKEND,
                 "dist: back end %s computes no part of a sequence, expected cpu or cuda",
                 plan->backend->name);
    TRY_GOTO(check_chunks(plan, shards, err));
    TRY_GOTO(dist_agree(transport, digest, is_heard, err));
    *is_heard = 0;
    TRY_GOTO(dist_open(plan, shards, mask, transport, &dist, err));
    plan = NULL;
    if (partial)
        TRY_GOTO(dist_open_stages(dist, partial, mask, window, err));
    *out = dist;
    return SACCADE_OK;
out:
    if (dist && dist->stages)
        partial = NULL; /* the stages' own */
    saccade_dist_destroy(dist);
    saccade_plan_destroy(partial);
    saccade_plan_destroy(plan);
    return status;
}

static saccade_status create_any(saccade_context *context, const saccade_problem *problem,
                                 const saccade_shard_plan *shards, int32_t mask, int64_t window,
                                 const saccade_transport *transport, saccade_dist **out,
                                 saccade_error *err)
{
    saccade_transport own;
    FAIL_AT(!problem || !shards || !transport || !out, SACCADE_EINVAL, "dist", 0, 0,
            "got NULL, expected problem, shard plan, transport and result");
    saccade_transport_init(&own);
    TRY(RECORD_READ(&own, transport, "transport"));
    int is_heard = 0;
    const saccade_status status =
        create(context, problem, shards, mask, window, &own, out, &is_heard, err);
    if (status != SACCADE_OK && !is_heard)
        dist_abort(&own);
    return status;
}

saccade_status saccade_dist_create(saccade_context *context, const saccade_problem *problem,
                                   const saccade_shard_plan *shards, int32_t mask,
                                   const saccade_transport *transport, saccade_dist **out,
                                   saccade_error *err)
{
    return create_any(context, problem, shards, mask, GATHERED, transport, out, err);
}

saccade_status saccade_dist_create_staged(saccade_context *context,
                                          const saccade_problem *problem,
                                          const saccade_shard_plan *shards, int32_t mask,
                                          int64_t keys, const saccade_transport *transport,
                                          saccade_dist **out, saccade_error *err)
{
    return create_any(context, problem, shards, mask, keys == GATHERED ? -1 : keys, transport,
                      out, err);
}

int64_t saccade_plan_row_tile(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const int is_told = plan && sizes && plan->solver->row_tile && plan_is_possible(sizes);
    return is_told ? plan->solver->row_tile(plan, sizes) : 0;
}

static int is_on_device(const saccade_dist *d)
{
    return d->plan->backend->device != SACCADE_CPU;
}

size_t saccade_dist_workspace(const saccade_dist *dist, int64_t B)
{
    if (!dist || B < 1 || B > 1 << 30)
        return SIZE_MAX;
    if (dist->stages)
        return dist_staged_workspace(dist, B);
    const saccade_sizes sizes = dist_sizes(dist, B);
    const size_t solver = plan_workspace(dist->plan, &sizes);
    return is_on_device(dist) ? solver : dist_workspace(dist, B, solver);
}

static saccade_status prepare(const saccade_dist *dist, const saccade_block_mask *mask,
                              saccade_error *err)
{
    if (is_on_device(dist) && !mask)
        TRY(dist->plan->solver->prepare(dist->plan, NULL, err));
    if (mask)
        TRY(saccade_plan_prepare(dist->plan, mask, err));
    return dist->stages ? dist_prepare_stages(dist, mask, err) : SACCADE_OK;
}

/* A mask that is refused is refused on all ranks. What else fails does so on this one, while
 * others go on to a run and wait for it there. */
saccade_status saccade_dist_prepare(const saccade_dist *dist, const saccade_block_mask *mask,
                                    saccade_error *err)
{
    FAIL_AT(!dist, SACCADE_EINVAL, "prepare", 0, 0,
            "got NULL, expected one rank's part of a plan");
    const saccade_status status = prepare(dist, mask, err);
    if (status != SACCADE_OK && status != SACCADE_EINVAL)
        dist_abort(&dist->transport);
    return status;
}

/* ---- running ---- */

/* The batch of a rank that holds nothing: the largest that its other arguments have, of which
 * some may be shared by all. */
static int64_t batch_of(const api_inputs *in)
{
    const saccade_positions *at = in->positions;
    const saccade_tensor *each[] = {at ? at->q_offset : NULL, at ? at->kv_offset : NULL,
                                    at ? at->kv_len : NULL, in->sinks};
    int64_t most = in->block_mask ? mask_get_view(in->block_mask)->sizes.B : 1;
    for (int i = 0; i < 4; i++) {
        const int is_batched = each[i] && each[i]->rank == (each[i] == in->sinks ? 3 : 1);
        if (is_batched && each[i]->shape[0] > most && each[i]->shape[0] <= 1 << 30)
            most = each[i]->shape[0];
    }
    return most;
}

saccade_status api_read_shard(const saccade_dist *d, const api_inputs *in, int64_t n_keys,
                              plan_run *run, saccade_error *err)
{
    const plan_problem *p = &d->plan->problem;
    const saccade_device_kind device = d->plan->backend->device;
    int64_t q[4] = {0, p->sizes.H, d->n_rows, p->sizes.D};
    if (d->n_rows) {
        TRY(api_check_tensor(in->q, &(api_expected){"q", p->dtype, 4, device}, q, err));
        run->q = in->q;
    }
    int64_t k[4] = {q[0], p->sizes.Hkv, n_keys, p->sizes.D};
    int64_t v[4] = {q[0], p->sizes.Hkv, n_keys, p->sizes.Dv};
    if (n_keys) {
        TRY(api_check_tensor(in->k, &(api_expected){"k", p->kv_dtype, 4, device}, k, err));
        v[0] = k[0];
        TRY(api_check_tensor(in->v, &(api_expected){"v", p->kv_dtype, 4, device}, v, err));
        run->k = in->k;
        run->v = in->v;
    }
    run->sizes = dist_sizes(d, d->n_rows ? q[0] : n_keys ? k[0] : batch_of(in));
    return SACCADE_OK;
}

saccade_status api_read_shard_outputs(const saccade_dist *d, const saccade_forward_args *a,
                                      plan_run *run, saccade_error *err)
{
    saccade_sizes local = run->sizes;
    local.Q = d->n_rows;
    if (!d->n_rows)
        return SACCADE_OK;
    TRY(api_check_outputs(d->plan, a, &local, err));
    run->out = a->out;
    run->lse = a->lse;
    run->row_max = a->row_max;
    return SACCADE_OK;
}

saccade_status api_refuse_over_ranks(const saccade_forward_args *a, saccade_error *err)
{
    static const char no_scale[] = "ranks share no quantised keys";
    const struct {
        const void *given;
        const char *name, *why;
    } each[] = {
        {a->ragged, "ragged", "ranks share one sequence"},
        {a->pages, "pages", "ranks hold their keys in one piece each"},
        {a->prefix, "prefix", "ranks share one sequence"},
        {a->k_scale, "k_scale", no_scale},
        {a->v_scale, "v_scale", no_scale},
        {a->head_max, "head_max", "each has maxima of its rows alone (row_max)"},
    };
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        FAIL_AT(each[i].given, SACCADE_EINVAL, each[i].name, 0, 0,
                "got one over ranks, expected NULL: %s", each[i].why);
    return SACCADE_OK;
}

saccade_status api_check_exchange(const saccade_dist *d, saccade_error *err)
{
    FAIL_AT(is_on_device(d) && !(d->plan->backend->carry && d->transport.exchange_on),
            SACCADE_EBACKEND, "transport", 0, 0,
            "got one that exchanges host memory alone, expected one with exchange_on, as of "
            "saccade_nccl_create, or saccade_dist_forward_local");
    return SACCADE_OK;
}

size_t saccade_dist_received(const saccade_dist *dist, int64_t B)
{
    return dist && B >= 1 && B <= 1 << 30 ? dist_received(dist, B) : SIZE_MAX;
}

saccade_status saccade_dist_keep(saccade_dist *dist, int64_t B, int32_t device, void *memory,
                                 saccade_error *err)
{
    FAIL_AT(!dist || !memory || B < 1 || B > 1 << 30, SACCADE_EINVAL, "dist keep", 0, 0,
            "got NULL or batch %lld, expected one rank's part of a plan, its batch "
            "and memory",
            (long long)B);
    FAIL_AT(!is_on_device(dist), SACCADE_EBACKEND, "dist keep", 0, 0,
            "keys are kept on GPUs alone: on hosts they are gathered again");
    FAIL_AT(dist->stages, SACCADE_EINVAL, "dist keep", 0, 0,
            "got a part in staged mode, which keeps no window of keys");
    TRY(api_check_exchange(dist, err));
    return dist_device_keep(dist, device, B, memory, err);
}

static saccade_status forward(saccade_dist *d, const saccade_forward_args *args,
                              saccade_error *err)
{
    saccade_forward_args a;
    api_captures captures;
    plan_run run = {.out = NULL};
    FAIL_AT(!args, SACCADE_EINVAL, "dist forward", 0, 0, "got NULL, expected arguments");
    saccade_forward_args_init(&a);
    TRY(RECORD_READ(&a, args, "arguments"));
    const api_inputs in = API_INPUTS_OF(a);
    TRY(api_refuse_over_ranks(&a, err));
    TRY(api_check_exchange(d, err));
    TRY(api_read_shard(d, &in, d->n_keys, &run, err));
    TRY(api_read_sinks(d->plan, in.sinks, d->n_rows, &run, err));
    TRY(api_read_context(d->plan, &in, &run, &captures, err));
    TRY(api_read_shard_outputs(d, &a, &run, err));
    TRY(api_read_workspace(&in, saccade_dist_workspace(d, run.sizes.B), &run, err));
    if (d->stages)
        return dist_staged_forward(d, &run, err);
    return is_on_device(d) ? dist_device_forward(d, &run, err) : dist_forward(d, &run, err);
}

saccade_status saccade_dist_forward(saccade_dist *dist, const saccade_forward_args *args,
                                    saccade_error *err)
{
    FAIL_AT(!dist, SACCADE_EINVAL, "dist forward", 0, 0,
            "got NULL, expected one rank's part of a plan");
    const saccade_status status = forward(dist, args, err);
    if (status != SACCADE_OK)
        dist_abort(&dist->transport);
    return status;
}
