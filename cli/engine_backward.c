/* Backward runs of an engine: tensors, arguments, workspace. */
#include "engine_backward.h"

#include "floats.h"

#include <stdlib.h>
#include <string.h>

static bool is_float(saccade_dtype dtype)
{
    return floats_is_float(dtype);
}

void backward_captures(const job *j, int32_t least_rank, cli_list *out)
{
    out->n = 0;
    for (int32_t i = 0; j->score && i < saccade_mod_capture_count(j->score); i++) {
        const saccade_capture c = saccade_mod_capture(j->score, i);
        if (is_float(c.dtype) && c.rank >= least_rank)
            out->item[out->n++] = c.name;
    }
}

saccade_status backward_new(const job_tensors *t, uint64_t seed, backward *out,
                            saccade_error *err)
{
    const saccade_tensor *like[] = {&t->q, &t->k, &t->v};
    backward made = {.n = BACKWARD_QKV};
    saccade_status status;
    CLI_TRY_GOTO(floats_new(t->q.dtype, 4, t->out.shape, &made.d_out, err));
    for (int i = 0; i < BACKWARD_QKV; i++)
        CLI_TRY_GOTO(floats_new(t->q.dtype, 4, like[i]->shape, &made.tensor[i], err));
    floats_fill_normal(&made.d_out, seed ^ 0x2545f4914f6cdd1d);
    *out = made;
    return SACCADE_OK;
out:
    backward_free(&made);
    return status;
}

saccade_status backward_add_capture(backward *b, const job *j, const char *name,
                                    saccade_dtype dtype, bool is_own, const char *where,
                                    saccade_error *err)
{
    const saccade_binding *found = NULL;
    for (int32_t n = 0; n < j->n_bindings; n++)
        if (strcmp(j->bindings[n].name, name) == 0)
            found = &j->bindings[n];
    CLI_FAIL_IF(!found, SACCADE_EINVAL, where, "got '%.40s', expected a name of --bind", name);
    CLI_FAIL_IF(b->n == BACKWARD_MOST, SACCADE_EINVAL, where, "got over %d names", CLI_LIST);
    const saccade_dtype own = found->tensor.dtype;
    const saccade_dtype sums = dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    const bool is_narrow = is_own && (own == SACCADE_BF16 || own == SACCADE_F16);
    CLI_TRY(floats_new(is_narrow ? own : sums, found->tensor.rank, found->tensor.shape,
                       &b->tensor[b->n], err));
    b->captures[b->n - BACKWARD_QKV] = (saccade_binding){name, b->tensor[b->n]};
    b->name[b->n++] = name;
    return SACCADE_OK;
}

/* d_out and gradients where the engine computes: themselves, or copies on the device. */
static saccade_status place(backward *b, const engine *e, saccade_error *err)
{
    b->on_device = e->on_device;
    for (int i = 0; i < 1 + b->n; i++) {
        const saccade_tensor *from = i ? &b->tensor[i - 1] : &b->d_out;
        saccade_tensor *t = &b->there[i];
        *t = *from;
        if (!e->on_device || !from->data)
            continue;
        t->data = NULL;
        t->device = (saccade_device){SACCADE_CUDA, 0};
        CLI_TRY(saccade_device_alloc(0, engine_extent(from), &t->data, err));
        CLI_TRY(saccade_device_copy(0, t->data, from->data, engine_extent(from), err));
        if (i > BACKWARD_QKV)
            b->captures[i - 1 - BACKWARD_QKV].tensor = *t;
    }
    return SACCADE_OK;
}

static saccade_status make_workspace(backward *b, saccade_error *err)
{
    const size_t bytes = b->args.workspace_bytes;
    if (b->on_device && bytes)
        CLI_TRY(saccade_device_alloc(0, bytes, &b->workspace, err));
    else
        b->workspace = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    CLI_FAIL_IF(bytes && !b->workspace, SACCADE_ENOMEM, "workspace",
                "out of memory for %zu bytes", bytes);
    b->args.workspace = b->workspace;
    return SACCADE_OK;
}

/* What lies where runs compute. */
static void free_placed(backward *b)
{
    for (int i = 0; b->on_device && i < 1 + BACKWARD_MOST; i++)
        saccade_device_free(0, b->there[i].data);
    if (b->on_device)
        saccade_device_free(0, b->workspace);
    else
        free(b->workspace);
    b->workspace = NULL;
    memset(b->there, 0, sizeof b->there);
}

static const saccade_tensor *wanted(const saccade_tensor *t)
{
    return t->data ? t : NULL;
}

saccade_status backward_bind(backward *b, engine *e, saccade_error *err)
{
    saccade_backward_args *a = &b->args;
    free_placed(b);
    CLI_TRY(place(b, e, err));
    saccade_backward_args_init(a);
    a->q = e->args.q;
    a->k = e->args.k;
    a->v = e->args.v;
    a->out = e->args.out;
    a->lse = e->args.lse;
    a->d_out = &b->there[0];
    a->d_q = wanted(&b->there[1]);
    a->d_k = wanted(&b->there[2]);
    a->d_v = wanted(&b->there[3]);
    a->d_captures = b->captures;
    a->n_d_captures = b->n - BACKWARD_QKV;
    a->positions = e->args.positions;
    a->block_mask = e->args.block_mask;
    a->bindings = e->args.bindings;
    a->n_bindings = e->args.n_bindings;
    a->sinks = e->args.sinks;
    a->dropout = e->args.dropout;
    a->pages = e->args.pages;
    CLI_TRY(saccade_backward_workspace(e->plan, a, &a->workspace_bytes, err));
    return make_workspace(b, err);
}

saccade_status backward_run(backward *b, engine *e, double *seconds, saccade_error *err)
{
    const double begin = cli_seconds();
    CLI_TRY(saccade_backward(e->plan, &b->args, err));
    if (b->on_device)
        CLI_TRY(saccade_device_synchronize(0, err));
    if (seconds)
        *seconds = cli_seconds() - begin;
    return SACCADE_OK;
}

saccade_status backward_fetch(backward *b, saccade_error *err)
{
    for (int i = 0; b->on_device && i < b->n; i++)
        if (b->tensor[i].data)
            CLI_TRY(saccade_device_copy(0, b->tensor[i].data, b->there[1 + i].data,
                                        engine_extent(&b->tensor[i]), err));
    return SACCADE_OK;
}

void backward_free(backward *b)
{
    free_placed(b);
    free(b->d_out.data);
    for (int i = 0; i < BACKWARD_MOST; i++)
        free(b->tensor[i].data);
    *b = (backward){.n = 0};
}
