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
                                    saccade_dtype dtype, const char *where, saccade_error *err)
{
    const saccade_binding *found = NULL;
    for (int32_t n = 0; n < j->n_bindings; n++)
        if (strcmp(j->bindings[n].name, name) == 0)
            found = &j->bindings[n];
    CLI_FAIL_IF(!found, SACCADE_EINVAL, where, "got '%.40s', expected a name of --bind", name);
    CLI_FAIL_IF(b->n == BACKWARD_MOST, SACCADE_EINVAL, where, "got over %d names", CLI_LIST);
    CLI_TRY(floats_new(dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32, found->tensor.rank,
                       found->tensor.shape, &b->tensor[b->n], err));
    b->captures[b->n - BACKWARD_QKV] = (saccade_binding){name, b->tensor[b->n]};
    b->name[b->n++] = name;
    return SACCADE_OK;
}

static const saccade_tensor *wanted(const saccade_tensor *t)
{
    return t->data ? t : NULL;
}

saccade_status backward_bind(backward *b, engine *e, saccade_error *err)
{
    saccade_backward_args *a = &b->args;
    saccade_backward_args_init(a);
    a->q = e->args.q;
    a->k = e->args.k;
    a->v = e->args.v;
    a->out = e->args.out;
    a->lse = e->args.lse;
    a->d_out = &b->d_out;
    a->d_q = wanted(&b->tensor[0]);
    a->d_k = wanted(&b->tensor[1]);
    a->d_v = wanted(&b->tensor[2]);
    a->d_captures = b->captures;
    a->n_d_captures = b->n - BACKWARD_QKV;
    a->positions = e->args.positions;
    a->block_mask = e->args.block_mask;
    a->bindings = e->args.bindings;
    a->n_bindings = e->args.n_bindings;
    a->sinks = e->args.sinks;
    a->dropout = e->args.dropout;
    CLI_TRY(saccade_backward_workspace(e->plan, a, &a->workspace_bytes, err));
    free(b->workspace);
    b->workspace =
        a->workspace_bytes ? aligned_alloc(64, (a->workspace_bytes + 63) / 64 * 64) : NULL;
    CLI_FAIL_IF(a->workspace_bytes && !b->workspace, SACCADE_ENOMEM, "workspace",
                "out of memory for %zu bytes", a->workspace_bytes);
    a->workspace = b->workspace;
    return SACCADE_OK;
}

saccade_status backward_run(backward *b, engine *e, double *seconds, saccade_error *err)
{
    const double begin = cli_seconds();
    CLI_TRY(saccade_backward(e->plan, &b->args, err));
    if (seconds)
        *seconds = cli_seconds() - begin;
    return SACCADE_OK;
}

void backward_free(backward *b)
{
    free(b->d_out.data);
    free(b->workspace);
    for (int i = 0; i < BACKWARD_MOST; i++)
        free(b->tensor[i].data);
    *b = (backward){.n = 0};
}
