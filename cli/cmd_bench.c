/* saccade bench: suites of problems, each row timed by the median of runs after a warm-up and
 * set against a ceiling measured in this very process: multiply-add (or bf16) peak for work on
 * many queries, bandwidth of memory for decode. */
#include "apart.h"
#include "bench.h"
#include "files.h"

#include <stdlib.h>
#include <string.h>

static saccade_status check_names(const cli_args *args, saccade_error *err)
{
    const char *names[BENCH_SUITES];
    for (int s = 0; s < BENCH_SUITES; s++)
        names[s] = bench_suites[s].name;
    for (int i = 0; i < args->suite.n; i++) {
        bool is_known = false;
        for (int s = 0; s < BENCH_SUITES; s++)
            is_known |= strcmp(args->suite.item[i], names[s]) == 0;
        const char *meant = cli_nearest(args->suite.item[i], names, BENCH_SUITES);
        CLI_FAIL_IF(!is_known, SACCADE_EINVAL, "--suite", "got '%.40s', %s%s",
                    args->suite.item[i],
                    meant ? "did you mean "
                          : "expected paper, dense, backward, decode, mask, compile, natten or "
                            "shapes",
                    meant ? meant : "");
    }
    CLI_FAIL_IF(args->baseline && strcmp(args->baseline, "plain") != 0, SACCADE_EINVAL,
                "--baseline", "got '%.40s', expected plain", args->baseline);
    return SACCADE_OK;
}

static bool wants(const cli_args *args, const char *suite)
{
    for (int i = 0; i < args->suite.n; i++)
        if (strcmp(args->suite.item[i], suite) == 0)
            return true;
    return args->suite.n == 0;
}

/* The level and threads that a plan of this context has, by its own account; of a device, its
 * architecture and the one thread that drives it. */
static saccade_status read_context(bench *b, saccade_error *err)
{
    const job none = {.sizes = {1, 1, 1, 128, 128, 64, 64}};
    const engine_options options = {.backend = b->on_device ? "cuda" : "cpu", .scale = NAN};
    saccade_plan *plan;
    char *text;
    CLI_TRY(engine_plan(&none, &options, b->on_device ? SACCADE_BF16 : SACCADE_F32, b->context,
                        &plan, err));
    const saccade_status status = saccade_plan_explain(plan, &text, err);
    saccade_plan_destroy(plan);
    CLI_TRY(status);
    const char *level = strstr(text, b->on_device ? "arch: " : "level: ");
    const char *threads = strstr(text, "threads: ");
    if (level)
        sscanf(level, "%*s %15s", b->level);
    if (threads && !b->on_device)
        sscanf(threads, "threads: %d", &b->threads);
    saccade_free(text);
    return SACCADE_OK;
}

/* Before each suite, and the best so far counts: a limit that something else on the machine
 * held down is none. */
static saccade_status measure_host(bench *b, saccade_error *err)
{
    saccade_ceilings now, *best = &b->ceilings;
    saccade_ceilings_init(&now);
    cli_progress("measuring the machine");
    CLI_TRY(saccade_measure_ceilings(b->context, &now, err));
    cli_progress(NULL);
    best->fma_gflops = fmax(best->fma_gflops, now.fma_gflops);
    best->bf16_gflops = fmax(best->bf16_gflops, now.bf16_gflops);
    best->read_gbytes_per_s = fmax(best->read_gbytes_per_s, now.read_gbytes_per_s);
    best->read_bytes = now.read_bytes;
    printf("%-8s ceilings: f32 %.1f GFLOP/s, bf16 %.1f GFLOP/s%s, read %.2f GB/s\n", b->suite,
           best->fma_gflops, best->bf16_gflops,
           strcmp(b->level, "amx") == 0 ? " (tiles from L1, random numbers)" : "",
           best->read_gbytes_per_s);
    return SACCADE_OK;
}

static saccade_status measure_device(bench *b, saccade_error *err)
{
    saccade_device_ceilings now, *best = &b->device_ceilings;
    saccade_device_ceilings_init(&now);
    cli_progress("measuring the device");
    CLI_TRY(saccade_measure_device(0, &now, err));
    cli_progress(NULL);
    best->bf16_gflops = fmax(best->bf16_gflops, now.bf16_gflops);
    best->copy_gbytes_per_s = fmax(best->copy_gbytes_per_s, now.copy_gbytes_per_s);
    printf("%-8s ceilings: bf16 products %.0f GFLOP/s (f32: a sixth), copy %.0f GB/s\n",
           b->suite, best->bf16_gflops, best->copy_gbytes_per_s);
    return SACCADE_OK;
}

static saccade_status measure(bench *b, saccade_error *err)
{
    return b->on_device ? measure_device(b, err) : measure_host(b, err);
}

static saccade_status run_suites(bench *b, saccade_error *err)
{
    CLI_TRY(read_context(b, err));
    bench_print_header();
    for (int s = 0; s < BENCH_SUITES; s++) {
        if (!wants(b->args, bench_suites[s].name))
            continue;
        b->suite = bench_suites[s].name;
        if (bench_suites[s].has_ceiling)
            CLI_TRY(measure(b, err));
        CLI_TRY(bench_suites[s].run(b, err));
    }
    return SACCADE_OK;
}

static saccade_status write_table(const bench_table *table, const char *path,
                                  saccade_status (*write)(const bench_table *, outfile *,
                                                          saccade_error *),
                                  saccade_error *err)
{
    outfile out;
    if (!path)
        return SACCADE_OK;
    CLI_TRY(outfile_begin(path, &out, err));
    return write(table, &out, err);
}

/* What can't be written shows before the work, not after it. */
static saccade_status run_and_write(bench *b, saccade_error *err)
{
    const char *csv = b->args->csv, *plot = b->args->plot;
    const cli_file both[] = {{"--csv", csv}, {"--plot", plot}};
    if (csv && plot)
        CLI_TRY(apart_check(b->args, both, 2, err));
    if (csv)
        CLI_TRY(outfile_check(csv, err));
    if (plot)
        CLI_TRY(outfile_check_ending("--plot", plot, err));
    if (plot)
        CLI_TRY(outfile_check(plot, err));
    CLI_TRY(run_suites(b, err));
    CLI_TRY(write_table(&b->table, csv, bench_write_csv, err));
    return write_table(&b->table, plot, bench_write_plot, err);
}

saccade_status cmd_bench(const cli_args *args, saccade_error *err)
{
    bench b = {.args = args, .threads = 1};
    CLI_TRY(check_names(args, err));
    CLI_TRY(files_engine_options(args, &b.options, err));
    b.on_device = args->backend && strcmp(args->backend, "cuda") == 0;
    CLI_FAIL_IF(b.on_device && args->baseline, SACCADE_EINVAL, "--baseline",
                "got it with --backend cuda, expected a CPU: plain is there only");
    CLI_TRY(engine_context(b.options.threads, b.options.level, &b.context, err));
    const saccade_status status = run_and_write(&b, err);
    free(b.table.rows);
    saccade_context_destroy(b.context);
    return status;
}
