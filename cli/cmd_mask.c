/* saccade mask: the block mask of a text, its cost and its picture. */
#include "job.h"
#include "outfile.h"

#include <string.h>
#include <unistd.h>

static void print_count(const char *what, int64_t n, int64_t of)
{
    printf("%-12s %lld", what, (long long)n);
    if (of > 0)
        printf(" (%.4g %%)", 100.0 * (double)n / (double)of);
    putchar('\n');
}

static void print_bytes(int64_t bytes)
{
    if (bytes < 10000)
        printf("size         %lld bytes\n", (long long)bytes);
    else if (bytes < 10 << 20)
        printf("size         %.1f KiB\n", (double)bytes / 1024);
    else
        printf("size         %.1f MiB\n", (double)bytes / (1 << 20));
}

static void print_stats(const saccade_block_mask_stats *s, int32_t block_q, int32_t block_kv)
{
    char title[64];
    snprintf(title, sizeof title, " of %dx%d", block_q, block_kv);
    printf("blocks       %lld%s\n", (long long)s->blocks, title);
    print_count("full", s->full, s->blocks);
    print_count("partial", s->partial, s->blocks);
    printf("sparsity     %.4f\n", s->sparsity);
    print_count("proven", s->proven, s->blocks);
    print_count("evaluated", s->evaluated, s->blocks);
    if (s->unknown)
        print_count("unknown", s->unknown, s->blocks);
    printf("runs         %lld\n", (long long)s->runs);
    print_bytes(s->bytes);
    printf(s->seconds < 1 ? "time         %.3g ms\n" : "time         %.0f ms\n",
           1e3 * s->seconds);
}

static saccade_status format_of(const char *path, saccade_picture *out, saccade_error *err)
{
    const char *end = strrchr(path, '.');
    *out = end && strcmp(end, ".png") == 0 ? SACCADE_PNG : SACCADE_SVG;
    CLI_FAIL_IF(!end || (*out == SACCADE_SVG && strcmp(end, ".svg") != 0), SACCADE_EINVAL, "-o",
                "got '%.80s', expected a name ending in .svg or .png", path);
    return SACCADE_OK;
}

/* Drawn before anything is printed: a picture that cannot be had is all the user reads. */
static saccade_status render(const cli_args *args, const saccade_block_mask *mask, void **bytes,
                             size_t *size, saccade_error *err)
{
    saccade_picture format = SACCADE_TEXT;
    if (args->out_file)
        CLI_TRY(format_of(args->out_file, &format, err));
    CLI_TRY(saccade_block_mask_render(mask, args->at_b, args->at_h, format,
                                      (int32_t)args->columns, bytes, size, err));
    if (!args->out_file)
        return SACCADE_OK;
    const saccade_status status = outfile_put(args->out_file, *bytes, *size, err);
    if (status != SACCADE_OK)
        saccade_free(*bytes);
    return status;
}

static saccade_status show(const cli_args *args, const job *j, saccade_context *context,
                           saccade_error *err)
{
    int32_t block_q, block_kv;
    saccade_block_mask *mask;
    saccade_block_mask_stats stats;
    void *bytes;
    size_t size;
    CLI_TRY(cli_parse_block(args->block, &block_q, &block_kv, err));
    CLI_TRY(cli_check_at(args, &j->sizes, err));
    CLI_TRY(job_block_mask(j, context, block_q, block_kv, &mask, err));
    saccade_block_mask_stats_init(&stats);
    saccade_status status = saccade_block_mask_get_stats(mask, &stats, err);
    if (status == SACCADE_OK)
        status = render(args, mask, &bytes, &size, err);
    if (status == SACCADE_OK) {
        print_stats(&stats, block_q, block_kv);
        if (args->out_file)
            printf("picture      %s\n", args->out_file);
        else
            fwrite(bytes, 1, size, stdout);
        saccade_free(bytes);
    }
    saccade_block_mask_destroy(mask);
    return status;
}

saccade_status cmd_mask(const cli_args *args, saccade_error *err)
{
    const int64_t batch = args->batch ? args->batch : 1, heads = args->heads ? args->heads : 1;
    saccade_context *context;
    job j;
    CLI_FAIL_IF(!args->mask, SACCADE_EINVAL, "--mask", "got nothing, expected a text");
    CLI_FAIL_IF(!args->q, SACCADE_EINVAL, "--q", "got nothing, expected a number of queries");
    const saccade_sizes sizes = {batch, heads, heads, args->q, args->kv ? args->kv : args->q,
                                 64,    64};
    CLI_TRY(engine_context((int32_t)args->threads, NULL, &context, err));
    saccade_status status = job_open(args, &sizes, &j, err);
    if (status == SACCADE_OK) {
        status = show(args, &j, context, err);
        job_close(&j);
    }
    saccade_context_destroy(context);
    return status;
}
