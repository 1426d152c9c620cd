/* saccade run: attention over NumPy files. Outputs are opened before the work and renamed after
 * it, so that a wrong path costs no time and a failure leaves nothing behind. */
#include "files.h"
#include "floats.h"
#include "outfile.h"

#include <stdlib.h>
#include <string.h>

/* O as its file wants it: row-major in the layout, rank and dtype of Q's. */
static saccade_status write_out(const file_tensors *f, FILE *file, saccade_error *err)
{
    const saccade_tensor *o = &f->t.out;
    const saccade_sizes *s = &f->sizes;
    const int64_t shape[] = {s->B, f->is_bnhd ? s->Q : s->H, f->is_bnhd ? s->H : s->Q, s->Dv};
    const int64_t flat[] = {s->Q, s->Dv};
    const int32_t skipped = 4 - f->rank;
    saccade_tensor t = f->rank == 2
                           ? saccade_tensor_of(o->data, o->dtype, 2, flat)
                           : saccade_tensor_of(o->data, o->dtype, f->rank, shape + skipped);
    if (t.dtype == f->file_dtype)
        return npy_write(file, &t, err);
    saccade_tensor converted;
    CLI_TRY(floats_convert(&t, f->file_dtype, &converted, err));
    const saccade_status status = npy_write(file, &converted, err);
    free(converted.data);
    return status;
}

static saccade_status write_lse(const file_tensors *f, FILE *file, saccade_error *err)
{
    const int32_t skipped = 4 - f->rank;
    const saccade_tensor t =
        saccade_tensor_of(f->t.lse.data, f->t.lse.dtype, 3 - skipped, f->t.lse.shape + skipped);
    return npy_write(file, &t, err);
}

static saccade_status compute(const cli_args *args, file_tensors *f, run_report *report,
                              saccade_error *err)
{
    engine_options options;
    job j;
    engine e;
    CLI_TRY(files_engine_options(args, &options, err));
    CLI_TRY(job_open(args, &f->sizes, &j, err));
    saccade_status status = engine_open(&j, &options, &f->t, &e, err);
    if (status == SACCADE_OK) {
        status = engine_run(&e, &report->seconds, err);
        if (status == SACCADE_OK)
            status = engine_fetch(&e, err);
        if (e.blocks)
            report->sparsity = saccade_block_mask_get_stats(e.blocks).sparsity;
        engine_close(&e);
    }
    job_close(&j);
    return status;
}

static saccade_status run_into(const cli_args *args, file_tensors *f, outfile *out,
                               outfile *lse, run_report *report, saccade_error *err)
{
    CLI_TRY(outfile_begin(args->out_file, out, err));
    if (args->lse_file)
        CLI_TRY(outfile_begin(args->lse_file, lse, err));
    CLI_TRY(compute(args, f, report, err));
    CLI_TRY(write_out(f, out->file, err));
    if (args->lse_file)
        CLI_TRY(write_lse(f, lse->file, err));
    CLI_TRY(outfile_commit(out, err));
    return args->lse_file ? outfile_commit(lse, err) : SACCADE_OK;
}

saccade_status run_files(const cli_args *args, run_report *report, saccade_error *err)
{
    file_tensors f;
    outfile out = {NULL, NULL, NULL}, lse = {NULL, NULL, NULL};
    CLI_FAIL_IF(!args->out_file, SACCADE_EINVAL, "-o", "got no file, expected one");
    CLI_FAIL_IF(args->lse_file && strcmp(args->lse_file, args->out_file) == 0, SACCADE_EINVAL,
                "--lse", "got the file of -o, expected another");
    CLI_TRY(files_load(args, &f, err));
    *report = (run_report){.sizes = f.sizes, .dtype = f.t.q.dtype};
    const saccade_status status = run_into(args, &f, &out, &lse, report, err);
    outfile_abandon(&out);
    outfile_abandon(&lse);
    files_free(&f);
    return status;
}

saccade_status cmd_run(const cli_args *args, saccade_error *err)
{
    run_report r;
    CLI_TRY(run_files(args, &r, err));
    printf("%s: [%lld, %lld, %lld, %lld], computed in %s in %.3g ms", args->out_file,
           (long long)r.sizes.B, (long long)r.sizes.H, (long long)r.sizes.Q,
           (long long)r.sizes.Dv, saccade_dtype_name(r.dtype), 1e3 * r.seconds);
    if (args->mask)
        printf(", %.1f %% of blocks skipped", 100 * r.sparsity);
    putchar('\n');
    return SACCADE_OK;
}
