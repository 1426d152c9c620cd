/* Backward over files: dq, dk, dv and gradients of captures, each in a file of its own beside
 * O: o.npy gives o.dq.npy, o.dk.npy, o.dv.npy and o.dNAME.npy. */
#include "gradients.h"

#include "floats.h"

#include <stdlib.h>
#include <string.h>

void gradients_ask(const cli_args *args, engine_options *options)
{
    if (!args->d_out_file)
        return;
    options->gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (args->grad_of.n) {
        options->gradients |= SACCADE_GRADIENT_CAPTURES;
        options->grad_of = &args->grad_of;
    }
}

/* O's path without .npy, then .dNAME.npy. */
static saccade_status begin_file(const char *out_file, const char *name, outfile *file,
                                 saccade_error *err)
{
    const size_t all = strlen(out_file);
    const int has_end = all > 4 && strcmp(out_file + all - 4, ".npy") == 0;
    const size_t bytes = all + strlen(name) + sizeof ".d.npy";
    char *path = malloc(bytes);
    CLI_FAIL_IF(!path, SACCADE_ENOMEM, "--grad", "out of memory");
    snprintf(path, bytes, "%.*s.d%s.npy", (int)(has_end ? all - 4 : all), out_file, name);
    const saccade_status status = outfile_begin(path, file, err);
    free(path);
    return status;
}

static saccade_status begin(const cli_args *args, const file_tensors *f, gradients *g,
                            saccade_error *err)
{
    static const char *const qkv[] = {"q", "k", "v"};
    const saccade_tensor *like[] = {&f->t.q, &f->t.k, &f->t.v};
    CLI_TRY(files_load_out(args->d_out_file, f, &g->d_out, err));
    for (int i = 0; i < GRADIENTS_QKV + args->grad_of.n; i++) {
        g->name[i] = i < GRADIENTS_QKV ? qkv[i] : args->grad_of.item[i - GRADIENTS_QKV];
        for (int other = 0; other < i; other++)
            CLI_FAIL_IF(strcmp(g->name[i], g->name[other]) == 0, SACCADE_EINVAL, "--grad-of",
                        "got '%.40s' twice, or a name whose file another gradient has",
                        g->name[i]);
        CLI_TRY(begin_file(args->out_file, g->name[i], &g->file[i], err));
        g->n = i + 1;
        if (i < GRADIENTS_QKV)
            CLI_TRY(files_room(f, like[i]->dtype, like[i]->shape[1], like[i]->shape[2],
                               like[i]->shape[3], &g->tensor[i], err));
    }
    return SACCADE_OK;
}

saccade_status gradients_begin(const cli_args *args, const file_tensors *files, gradients *out,
                               saccade_error *err)
{
    CLI_FAIL_IF(args->grad_of.n && !args->d_out_file, SACCADE_EINVAL, "--grad-of",
                "got it without --grad, expected the gradient of O to start from");
    return args->d_out_file ? begin(args, files, out, err) : SACCADE_OK;
}

/* Room for captures' gradients, in f32 (f64 in f64), row-major in the captures' shapes. */
static saccade_status make_captures(gradients *g, const engine *e, saccade_binding *to,
                                    saccade_error *err)
{
    const saccade_dtype dtype = e->args.q->dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    for (int i = GRADIENTS_QKV; i < g->n; i++) {
        const saccade_binding *found = NULL;
        for (int32_t n = 0; n < e->args.n_bindings; n++)
            if (strcmp(e->bindings[n].name, g->name[i]) == 0)
                found = &e->bindings[n];
        CLI_FAIL_IF(!found, SACCADE_EINVAL, "--grad-of",
                    "got '%.40s', expected a name of --bind", g->name[i]);
        CLI_TRY(floats_new(dtype, found->tensor.rank, found->tensor.shape, &g->tensor[i], err));
        to[i - GRADIENTS_QKV] = (saccade_binding){g->name[i], g->tensor[i]};
    }
    return SACCADE_OK;
}

saccade_status gradients_run(gradients *g, const file_tensors *files, engine *e,
                             double *seconds, saccade_error *err)
{
    saccade_binding captures[CLI_LIST];
    saccade_backward_args a;
    if (g->n == 0)
        return SACCADE_OK;
    CLI_TRY(make_captures(g, e, captures, err));
    saccade_backward_args_init(&a);
    a.q = e->args.q;
    a.k = e->args.k;
    a.v = e->args.v;
    a.out = e->args.out;
    a.lse = e->args.lse;
    a.d_out = &g->d_out;
    a.d_q = &g->tensor[0];
    a.d_k = &g->tensor[1];
    a.d_v = &g->tensor[2];
    a.d_captures = captures;
    a.n_d_captures = g->n - GRADIENTS_QKV;
    a.positions = e->args.positions;
    a.block_mask = e->args.block_mask;
    a.bindings = e->args.bindings;
    a.n_bindings = e->args.n_bindings;
    a.workspace_bytes = saccade_plan_backward_workspace(e->plan, &files->sizes);
    a.workspace =
        a.workspace_bytes ? aligned_alloc(64, (a.workspace_bytes + 63) / 64 * 64) : NULL;
    CLI_FAIL_IF(a.workspace_bytes && !a.workspace, SACCADE_ENOMEM, "workspace",
                "out of memory for %zu bytes", a.workspace_bytes);
    const double begin = cli_seconds();
    const saccade_status status = saccade_backward(e->plan, &a, err);
    *seconds = cli_seconds() - begin;
    free(a.workspace);
    return status;
}

saccade_status gradients_write(gradients *g, const file_tensors *files, saccade_error *err)
{
    for (int i = 0; i < g->n; i++)
        CLI_TRY(i < GRADIENTS_QKV ? files_write(files, &g->tensor[i], g->file[i].file, err)
                                  : npy_write(g->file[i].file, &g->tensor[i], err));
    return SACCADE_OK;
}

saccade_status gradients_commit(gradients *g, saccade_error *err)
{
    for (int i = 0; i < g->n; i++)
        CLI_TRY(outfile_commit(&g->file[i], err));
    return SACCADE_OK;
}

void gradients_end(gradients *g)
{
    free(g->d_out.data);
    for (int i = 0; i < g->n; i++) {
        free(g->tensor[i].data);
        outfile_abandon(&g->file[i]);
    }
}
