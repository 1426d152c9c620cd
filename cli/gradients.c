/* Backward over files: dq, dk, dv and gradients of captures, each in a file of its own beside
 * O: o.npy gives o.dq.npy, o.dk.npy, o.dv.npy and o.dNAME.npy. */
#include "gradients.h"

#include <stdlib.h>
#include <string.h>

/* Whether backward needs all of out for them, of a back end that takes delta from it; cpu makes
 * delta anew. */
static bool wants_out(const job *j, const cli_list *grad_of, const char *backend)
{
    int32_t sums = 0;
    const bool takes_it =
        backend && (strcmp(backend, "cuda") == 0 || strcmp(backend, "plain") == 0);
    if (!j->score || !takes_it)
        return false;
    return saccade_mod_sums_keys(j->score, grad_of->item, grad_of->n, &sums, NULL) == SACCADE_OK
           && sums; /* of what it refuses the plan says why */
}

void gradients_ask(const cli_args *args, const job *j, engine_options *options)
{
    if (!args->d_out_file)
        return;
    options->gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (args->grad_of.n) {
        options->gradients |= SACCADE_GRADIENT_CAPTURES;
        options->grad_of = &args->grad_of;
        options->keeps_out = wants_out(j, &args->grad_of, options->backend);
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

/* A name in a text, and so in no other folder. */
static bool is_name(const char *word)
{
    static const char all[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";
    const bool begins_with_digit = word[0] >= '0' && word[0] <= '9';
    return word[0] && !begins_with_digit && word[strspn(word, all)] == 0;
}

static saccade_status begin(const cli_args *args, const file_tensors *f, gradients *g,
                            saccade_error *err)
{
    static const char *const qkv[] = {"q", "k", "v"};
    const saccade_tensor *like[] = {&f->t.q, &f->t.k, &f->t.v};
    g->run.n = BACKWARD_QKV;
    CLI_TRY(files_load_out(args->d_out_file, f, &g->run.d_out, err));
    for (int i = 0; i < BACKWARD_QKV + args->grad_of.n; i++) {
        g->name[i] = i < BACKWARD_QKV ? qkv[i] : args->grad_of.item[i - BACKWARD_QKV];
        CLI_FAIL_IF(!is_name(g->name[i]), SACCADE_EINVAL, "--grad-of",
                    "got '%.40s', expected a name in --score", g->name[i]);
        for (int other = 0; other < i; other++)
            CLI_FAIL_IF(strcmp(g->name[i], g->name[other]) == 0, SACCADE_EINVAL, "--grad-of",
                        "got '%.40s' twice, or a name whose file another gradient has",
                        g->name[i]);
        CLI_TRY(begin_file(args->out_file, g->name[i], &g->file[i], err));
        g->n = i + 1;
        if (i < BACKWARD_QKV)
            CLI_TRY(files_room(f, like[i]->dtype, like[i]->shape[1], like[i]->shape[2],
                               like[i]->shape[3], &g->run.tensor[i], err));
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

static saccade_status run(backward *b, engine *e, double *seconds, saccade_error *err)
{
    CLI_TRY(backward_bind(b, e, err));
    CLI_TRY(backward_run(b, e, seconds, err));
    return backward_fetch(b, err);
}

/* Gradients of K and V are made in pools, as K and V lie, and taken out of them. */
static saccade_status run_over_pages(backward *b, engine *e, double *seconds,
                                     saccade_error *err)
{
    const saccade_tensor room[2] = {b->tensor[1], b->tensor[2]};
    saccade_tensor pool[2] = {{.data = NULL}, {.data = NULL}};
    saccade_status status;
    CLI_TRY_GOTO(paged_room(&e->paged.k, &pool[0], err));
    CLI_TRY_GOTO(paged_room(&e->paged.v, &pool[1], err));
    memcpy(&b->tensor[1], pool, sizeof pool);
    status = run(b, e, seconds, err);
    memcpy(&b->tensor[1], room, sizeof room);
    for (int i = 0; i < 2 && status == SACCADE_OK; i++)
        paged_take_out(&e->paged, &pool[i], &room[i]);
out:
    free(pool[0].data);
    free(pool[1].data);
    return status;
}

saccade_status gradients_run(gradients *g, const cli_args *args, const job *j, engine *e,
                             double *seconds, saccade_error *err)
{
    if (g->n == 0)
        return SACCADE_OK;
    for (int i = 0; i < args->grad_of.n; i++)
        CLI_TRY(backward_add_capture(&g->run, j, args->grad_of.item[i], e->args.q->dtype, false,
                                     "--grad-of", err));
    return e->args.pages ? run_over_pages(&g->run, e, seconds, err)
                         : run(&g->run, e, seconds, err);
}

saccade_status gradients_write(gradients *g, const file_tensors *files, saccade_error *err)
{
    for (int i = 0; i < g->n; i++)
        CLI_TRY(i < BACKWARD_QKV ? files_write(files, &g->run.tensor[i], g->file[i].file, err)
                                 : npy_write(g->file[i].file, &g->run.tensor[i], err));
    return SACCADE_OK;
}

saccade_status gradients_finish(gradients *g, saccade_error *err)
{
    for (int i = 0; i < g->n; i++)
        CLI_TRY(outfile_finish(&g->file[i], err));
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
    backward_free(&g->run);
    for (int i = 0; i < g->n; i++)
        outfile_abandon(&g->file[i]);
}
