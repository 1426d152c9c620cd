/* saccade run: attention over NumPy files. Outputs are opened before the work and renamed when
 * all of them are written, so that a wrong path costs no time and a failure leaves nothing
 * behind. */
#include "apart.h"
#include "files.h"
#include "gradients.h"
#include "outfile.h"

static saccade_status write_lse(const file_tensors *f, FILE *file, saccade_error *err)
{
    const int32_t skipped = 4 - f->rank;
    const saccade_tensor t =
        saccade_tensor_of(f->t.lse.data, f->t.lse.dtype, 3 - skipped, f->t.lse.shape + skipped);
    return npy_write(file, &t, err);
}

static saccade_status read_sparsity(const saccade_block_mask *mask, double *out,
                                    saccade_error *err)
{
    saccade_block_mask_stats stats;
    saccade_block_mask_stats_init(&stats);
    CLI_TRY(saccade_block_mask_get_stats(mask, &stats, err));
    *out = stats.sparsity;
    return SACCADE_OK;
}

static saccade_status compute(const cli_args *args, file_tensors *f, gradients *g,
                              run_report *report, saccade_error *err)
{
    engine_options options;
    job j;
    engine e;
    CLI_TRY(files_engine_options(args, &options, err));
    CLI_TRY(job_open(args, &f->sizes, &j, err));
    gradients_ask(args, &j, &options);
    saccade_status status = engine_open(&j, &options, &f->t, &e, err);
    if (status == SACCADE_OK) {
        status = engine_run(&e, &report->seconds, err);
        if (status == SACCADE_OK)
            status = gradients_run(g, args, &j, &e, &report->backward_seconds, err);
        if (status == SACCADE_OK)
            status = engine_fetch(&e, err);
        if (status == SACCADE_OK && e.blocks)
            status = read_sparsity(e.blocks, &report->sparsity, err);
        engine_close(&e);
    }
    job_close(&j);
    return status;
}

/* Gradients' files are named by -o, and one of them may be what another option names. */
static saccade_status check_apart(const cli_args *args, const gradients *g, saccade_error *err)
{
    cli_file written[2 + BACKWARD_MOST] = {{"-o", args->out_file}};
    int n = 1;
    if (args->lse_file)
        written[n++] = (cli_file){"--lse", args->lse_file};
    for (int i = 0; i < g->n; i++)
        written[n++] = (cli_file){"--grad", g->file[i].path};
    return apart_check(args, written, n, err);
}

static saccade_status run_into(const cli_args *args, file_tensors *f, outfile *out,
                               outfile *lse, gradients *g, run_report *report,
                               saccade_error *err)
{
    CLI_TRY(outfile_begin(args->out_file, out, err));
    if (args->lse_file)
        CLI_TRY(outfile_begin(args->lse_file, lse, err));
    CLI_TRY(gradients_begin(args, f, g, err));
    CLI_TRY(check_apart(args, g, err));
    CLI_TRY(compute(args, f, g, report, err));
    CLI_TRY(files_write(f, &f->t.out, out->file, err));
    CLI_TRY(gradients_write(g, f, err));
    if (args->lse_file)
        CLI_TRY(write_lse(f, lse->file, err));
    CLI_TRY(outfile_finish(out, err));
    CLI_TRY(gradients_finish(g, err));
    if (args->lse_file)
        CLI_TRY(outfile_finish(lse, err));
    CLI_TRY(outfile_commit(out, err));
    CLI_TRY(gradients_commit(g, err));
    return args->lse_file ? outfile_commit(lse, err) : SACCADE_OK;
}

/* What would be read by nothing. */
static saccade_status check_used(const cli_args *args, saccade_error *err)
{
    CLI_FAIL_IF(args->seed >= 0 && !args->weight, SACCADE_EINVAL, "--seed",
                "got it without --weight, expected what it is the seed of");
    return cli_check_block(args, err);
}

saccade_status run_files(const cli_args *args, run_report *report, saccade_error *err)
{
    file_tensors f;
    outfile out = {NULL, NULL, NULL}, lse = {NULL, NULL, NULL};
    gradients g = {.n = 0};
    CLI_FAIL_IF(!args->out_file, SACCADE_EINVAL, "-o", "got no file, expected one");
    CLI_TRY(check_used(args, err));
    CLI_TRY(files_load(args, &f, err));
    *report = (run_report){.rank = f.rank, .dtype = f.t.q.dtype};
    files_shape(&f, &f.t.out, report->shape);
    const saccade_status status = run_into(args, &f, &out, &lse, &g, report, err);
    gradients_end(&g);
    outfile_abandon(&out);
    outfile_abandon(&lse);
    files_free(&f);
    return status;
}

saccade_status cmd_run(const cli_args *args, saccade_error *err)
{
    run_report r;
    CLI_TRY(run_files(args, &r, err));
    printf("%s: ", args->out_file);
    for (int32_t i = 0; i < r.rank; i++)
        printf("%s%lld", i ? ", " : "[", (long long)r.shape[i]);
    printf("], computed in %s in %.3g ms", saccade_dtype_name(r.dtype), 1e3 * r.seconds);
    if (args->mask)
        printf(", %.1f %% of blocks skipped", 100 * r.sparsity);
    if (args->d_out_file)
        printf(", gradients in %.3g ms", 1e3 * r.backward_seconds);
    putchar('\n');
    return SACCADE_OK;
}
