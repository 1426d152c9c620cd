/* A plan with everything one run needs: context, block mask, workspace, and, for CUDA, copies
 * of all tensors on the device. */
#include "floats.h"
#include "job.h"

#include <stdlib.h>
#include <string.h>

/* ---- tensors ---- */

static saccade_status new_results(const saccade_sizes *s, saccade_dtype dtype, job_tensors *t,
                                  saccade_error *err)
{
    const int64_t out[] = {s->B, s->H, s->Q, s->Dv};
    const saccade_dtype lse = dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    CLI_TRY(floats_new(dtype, 4, out, &t->out, err));
    return floats_new(lse, 3, out, &t->lse, err);
}

saccade_status job_tensors_new(const saccade_sizes *s, saccade_dtype dtype, uint64_t seed,
                               job_tensors *out, saccade_error *err)
{
    const int64_t q[] = {s->B, s->H, s->Q, s->D}, k[] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[] = {s->B, s->Hkv, s->KV, s->Dv};
    job_tensors t = {.q = {.data = NULL}};
    saccade_status status;
    CLI_TRY_GOTO(floats_new(dtype, 4, q, &t.q, err));
    CLI_TRY_GOTO(floats_new(dtype, 4, k, &t.k, err));
    CLI_TRY_GOTO(floats_new(dtype, 4, v, &t.v, err));
    CLI_TRY_GOTO(new_results(s, dtype, &t, err));
    floats_fill_normal(&t.q, seed);
    floats_fill_normal(&t.k, seed ^ 0x5851f42d4c957f2d);
    floats_fill_normal(&t.v, seed ^ 0x14057b7ef767814f);
    *out = t;
    return SACCADE_OK;
out:
    job_tensors_free(&t);
    return status;
}

saccade_status job_tensors_copy(const job_tensors *in, saccade_dtype dtype, job_tensors *out,
                                saccade_error *err)
{
    const saccade_sizes s = {
        .B = in->q.shape[0], .H = in->q.shape[1], .Q = in->q.shape[2], .Dv = in->v.shape[3]};
    job_tensors t = {.q = {.data = NULL}};
    saccade_status status;
    CLI_TRY_GOTO(floats_convert(&in->q, dtype, &t.q, err));
    CLI_TRY_GOTO(floats_convert(&in->k, dtype, &t.k, err));
    CLI_TRY_GOTO(floats_convert(&in->v, dtype, &t.v, err));
    CLI_TRY_GOTO(new_results(&s, dtype, &t, err));
    *out = t;
    return SACCADE_OK;
out:
    job_tensors_free(&t);
    return status;
}

void job_tensors_free(job_tensors *t)
{
    saccade_tensor *all[] = {&t->q, &t->k, &t->v, &t->out, &t->lse};
    for (int i = 0; i < 5; i++) {
        free(all[i]->data);
        all[i]->data = NULL;
    }
}

/* ---- device ---- */

size_t engine_extent(const saccade_tensor *t)
{
    int64_t last = 0;
    for (int32_t i = 0; i < t->rank; i++)
        last += (t->shape[i] - 1) * t->stride[i];
    return (size_t)(last + 1) * saccade_dtype_bytes(t->dtype);
}

/* Replaces a host tensor by a copy on the device. */
static saccade_status to_device(engine *e, saccade_tensor *t, saccade_error *err)
{
    void *memory;
    if (t->dtype == SACCADE_NONE || t->device.kind == SACCADE_CUDA)
        return SACCADE_OK;
    CLI_FAIL_IF(e->n_device == ENGINE_DEVICE_TENSORS, SACCADE_ELIMIT, "cuda",
                "got too many tensors");
    CLI_TRY(saccade_device_alloc(0, engine_extent(t), &memory, err));
    e->device_memory[e->n_device++] = memory;
    CLI_TRY(saccade_device_copy(0, memory, t->data, engine_extent(t), err));
    t->data = memory;
    t->device = (saccade_device){SACCADE_CUDA, 0};
    return SACCADE_OK;
}

static saccade_status all_to_device(engine *e, saccade_error *err)
{
    saccade_forward_args *a = &e->args;
    saccade_tensor *all[] = {&e->tensors.q,   &e->tensors.k, &e->tensors.v, &e->tensors.out,
                             &e->tensors.lse, &e->q_offset,  &e->kv_len,    &e->sinks,
                             &e->table,       &e->k_scale,   &e->v_scale};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        CLI_TRY(to_device(e, all[i], err));
    for (int32_t i = 0; i < a->n_bindings; i++)
        if (e->bindings[i].tensor.rank > 0)
            CLI_TRY(to_device(e, &e->bindings[i].tensor, err));
    CLI_FAIL_IF(e->n_device == ENGINE_DEVICE_TENSORS, SACCADE_ELIMIT, "cuda",
                "got too many tensors");
    if (a->workspace_bytes) {
        CLI_TRY(saccade_device_alloc(0, a->workspace_bytes, &a->workspace, err));
        e->device_memory[e->n_device++] = a->workspace;
    }
    return SACCADE_OK;
}

static saccade_status from_device(const saccade_tensor *there, const saccade_tensor *here,
                                  saccade_error *err)
{
    if (here->dtype == SACCADE_NONE || there->device.kind != SACCADE_CUDA)
        return SACCADE_OK;
    return saccade_device_copy(0, here->data, there->data, engine_extent(here), err);
}

saccade_status engine_fetch(engine *e, saccade_error *err)
{
    const saccade_tensor *out = e->kept.data ? &e->kept : &e->host->out;
    CLI_TRY(from_device(&e->tensors.out, out, err));
    CLI_TRY(from_device(&e->tensors.lse, &e->host->lse, err));
    if (e->kept.data)
        floats_convert_into(&e->kept, &e->host->out);
    return SACCADE_OK;
}

/* ---- engine ---- */

saccade_status engine_context(int32_t threads, const char *level, saccade_context **out,
                              saccade_error *err)
{
    saccade_context_options options;
    saccade_context_options_init(&options);
    options.threads = threads;
    options.level = level;
    return job_by_option(saccade_context_create(&options, out, err), err);
}

static bool is(const char *backend, const char *name)
{
    return backend && strcmp(backend, name) == 0;
}

static bool keeps_out(const engine_options *o, saccade_dtype dtype)
{
    return o->keeps_out && (dtype == SACCADE_F16 || dtype == SACCADE_BF16);
}

saccade_status engine_plan(const job *j, const engine_options *o, saccade_dtype dtype,
                           saccade_context *context, saccade_plan **out, saccade_error *err)
{
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = j->sizes;
    p.dtype = dtype;
    p.scale = o->scale;
    p.score = j->score;
    p.mask = j->mask;
    p.weight = j->weight;
    p.sinks_dtype = j->sinks.dtype;
    p.backend = o->backend;
    p.arch = is(o->backend, "cuda") ? o->arch : NULL;
    p.gradients = o->gradients;
    p.page = o->page;
    p.kv_dtype = o->codes.dtype;
    p.k_scale_tokens = p.v_scale_tokens = o->codes.tokens;
    p.k_scale_channels = p.v_scale_channels = o->codes.channels;
    p.batch_invariant = o->batch_invariant;
    if (keeps_out(o, dtype)) {
        p.out_dtype = SACCADE_F32;
        p.d_out_dtype = dtype;
    }
    if (o->grad_of) {
        p.gradient_captures = o->grad_of->item;
        p.n_gradient_captures = o->grad_of->n;
    }
    return job_by_option(saccade_plan_create(context, &p, out, err), err);
}

static saccade_status make(const job *j, const engine_options *o, engine *e, saccade_error *err)
{
    saccade_forward_args *a = &e->args;
    CLI_TRY(engine_context(o->threads, o->level, &e->context, err));
    CLI_TRY(engine_plan(j, o, a->q->dtype, e->context, &e->plan, err));
    if (!is(o->backend, "ref") && !is(o->backend, "plain")) {
        CLI_TRY(job_block_mask(j, e->context, o->block_q, o->block_kv, &e->blocks, err));
        if (e->blocks)
            CLI_TRY(saccade_plan_prepare(e->plan, e->blocks, err));
    }
    a->block_mask = e->blocks;
    a->workspace_bytes = saccade_plan_workspace(e->plan, &j->sizes);
    e->on_device = is(o->backend, "cuda");
    if (e->on_device)
        return all_to_device(e, err);
    if (a->workspace_bytes) {
        e->workspace = aligned_alloc(64, (a->workspace_bytes + 63) / 64 * 64);
        CLI_FAIL_IF(!e->workspace, SACCADE_ENOMEM, "workspace", "out of memory for %zu bytes",
                    a->workspace_bytes);
        a->workspace = e->workspace;
    }
    return SACCADE_OK;
}

/* args and positions to the engine's own tensors. */
static void point_args(engine *e, int64_t KV, int32_t n_bindings)
{
    saccade_forward_args_init(&e->args);
    saccade_positions_init(&e->positions);
    e->args.q = &e->tensors.q;
    e->args.k = &e->tensors.k;
    e->args.v = &e->tensors.v;
    e->args.out = &e->tensors.out;
    e->args.lse = e->tensors.lse.dtype == SACCADE_NONE ? NULL : &e->tensors.lse;
    if (e->table.dtype != SACCADE_NONE) {
        saccade_pages_init(&e->pages);
        e->pages.table = &e->table;
        e->pages.KV = KV;
        e->args.pages = &e->pages;
    }
    if (e->k_scale.dtype != SACCADE_NONE) {
        e->args.k_scale = &e->k_scale;
        e->args.v_scale = &e->v_scale;
    }
    e->positions.q_offset = e->q_offset.dtype == SACCADE_NONE ? NULL : &e->q_offset;
    e->positions.kv_len = e->kv_len.dtype == SACCADE_NONE ? NULL : &e->kv_len;
    e->args.positions = &e->positions;
    e->args.bindings = e->bindings;
    e->args.n_bindings = n_bindings;
}

saccade_status engine_open(const job *j, const engine_options *options, const job_tensors *t,
                           engine *e, saccade_error *err)
{
    const int64_t two[1] = {2};
    *e = (engine){.host = t,
                  .tensors = *t,
                  .q_offset = j->q_offset,
                  .kv_len = j->kv_len,
                  .sinks = j->sinks,
                  .state = {j->seed}};
    e->dropout = saccade_tensor_of(e->state, SACCADE_I64, 1, two);
    memcpy(e->bindings, j->bindings, sizeof e->bindings);
    if (options->page) {
        CLI_TRY(paged_make(&t->k, &t->v, options->page, &e->paged, err));
        e->tensors.k = e->paged.k;
        e->tensors.v = e->paged.v;
        e->table = e->paged.table;
    }
    if (options->codes.dtype != SACCADE_NONE) {
        CLI_TRY(coded_make(&t->k, &t->v, &options->codes, &e->coded, err));
        e->tensors.k = e->coded.k;
        e->tensors.v = e->coded.v;
        e->k_scale = e->coded.k_scale;
        e->v_scale = e->coded.v_scale;
    }
    if (keeps_out(options, t->q.dtype)) {
        CLI_TRY(floats_new(SACCADE_F32, 4, t->out.shape, &e->kept, err));
        e->tensors.out = e->kept;
    }
    point_args(e, j->sizes.KV, j->n_bindings);
    e->args.sinks = e->sinks.dtype == SACCADE_NONE ? NULL : &e->sinks;
    e->args.dropout = j->weight ? &e->dropout : NULL;
    const saccade_status status = make(j, options, e, err);
    if (status != SACCADE_OK)
        engine_close(e);
    return status;
}

saccade_status engine_run(engine *e, double *seconds, saccade_error *err)
{
    const double begin = cli_seconds();
    CLI_TRY(job_by_option(saccade_forward(e->plan, &e->args, err), err));
    if (e->on_device)
        CLI_TRY(saccade_device_synchronize(0, err));
    if (seconds)
        *seconds = cli_seconds() - begin;
    return SACCADE_OK;
}

void engine_close(engine *e)
{
    while (e->n_device > 0)
        saccade_device_free(0, e->device_memory[--e->n_device]);
    free(e->workspace);
    free(e->kept.data);
    paged_free(&e->paged);
    coded_free(&e->coded);
    saccade_block_mask_destroy(e->blocks);
    saccade_plan_destroy(e->plan);
    saccade_context_destroy(e->context);
    *e = (engine){.plan = NULL};
}

saccade_status engine_once(const job *j, const engine_options *options, const job_tensors *t,
                           double *seconds, saccade_error *err)
{
    engine e;
    CLI_TRY(engine_open(j, options, t, &e, err));
    saccade_status status = engine_run(&e, seconds, err);
    if (status == SACCADE_OK)
        status = engine_fetch(&e, err);
    engine_close(&e);
    return status;
}
