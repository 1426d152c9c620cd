/* saccade ladder: every algorithm on the way to fused attention on one problem, what it did
 * against what the formulas say, how fast, how exact, and where it stands under the machine's
 * limits. Exit status 1 when a counter is not what its formula says. */
#include "job.h"
#include "machine.h"
#include "outfile.h"
#include "roofline_svg.h"

#include <stdlib.h>
#include <string.h>

typedef struct ladder_table {
    saccade_ladder_row row[ROOFLINE_POINTS];
    int n;
    bool is_timed;
} ladder_table;

static int keep(void *user, const saccade_ladder_row *row)
{
    ladder_table *table = user;
    const size_t known = row->size < sizeof *row ? row->size : sizeof *row;
    memcpy(&table->row[table->n++], row, known); /* the library's may be of another version */
    if (table->is_timed)
        cli_progress("ladder: %s done", row->title);
    return table->n == ROOFLINE_POINTS;
}

static bool is_exact(const saccade_ladder_row *r)
{
    return r->reads + r->writes == r->accesses && r->flops_counted == r->flops;
}

/* ---- tables ---- */

static void print_counts(const ladder_table *table)
{
    printf("%2s  %-24s %6s %12s   %-25s %12s   %s\n", "", "counted = formula", "passes",
           "accesses", "", "FLOPs", "");
    for (int i = 0; i < table->n; i++) {
        const saccade_ladder_row *r = &table->row[i];
        const int64_t accesses = r->reads + r->writes;
        printf("%2d  %-24s %6.2f %12lld %s %-25s %12lld %s %s\n", i + 1, r->title, r->passes,
               (long long)accesses, accesses == r->accesses ? "=" : "!=", r->accesses_text,
               (long long)r->flops_counted,
               r->flops_counted == r->flops ? "=" : "!=", r->flops_text);
    }
}

static void print_stated(const ladder_table *table)
{
    printf("\n%2s  %-24s %-22s %10s %10s %9s   %s\n", "", "memory", "accesses, source says",
           "counted /", "extra", "on chip", "source");
    for (int i = 0; i < table->n; i++) {
        const saccade_ladder_row *r = &table->row[i];
        printf("%2d  %-24s %-22s %10.4g %10lld %9lld   %s\n", i + 1, r->title, r->stated_text,
               (double)(r->reads + r->writes) / r->stated, (long long)r->extra,
               (long long)r->chip, r->source);
    }
}

static void print_speed(const ladder_table *table, const roofline_limits *limits)
{
    printf("\n%2s  %-24s %9s %10s %9s %8s %10s\n", "", "one core, scalar f32", "FLOP/byte",
           "ms", "GFLOP/s", "of roof", "error");
    for (int i = 0; i < table->n; i++) {
        const saccade_ladder_row *r = &table->row[i];
        const double speed = (double)r->flops_counted / r->seconds;
        printf("%2d  %-24s %9.3g %10.4g %9.3g %7.0f%% %10.2g\n", i + 1, r->title, r->intensity,
               1e3 * r->seconds, 1e-9 * speed, 100 * speed / roofline_at(limits, r->intensity),
               r->error);
    }
    printf("\nlimits measured now, one core: memory %.1f GB/s, scalar %.1f GFLOP/s, "
           "widest vector FMA %.0f GFLOP/s\n",
           1e-9 * limits->bytes_per_second, 1e-9 * limits->scalar_flops,
           1e-9 * limits->fma_flops);
}

/* ---- theorem 2: accesses over M ---- */

static saccade_status count_one(const saccade_ladder_options *options, const char *name,
                                double *accesses, saccade_error *err)
{
    saccade_ladder_options o = *options;
    ladder_table table = {.n = 0, .is_timed = false};
    o.only = name;
    o.is_timed = 0;
    CLI_TRY(saccade_ladder_run(&o, keep, &table, err));
    *accesses = (double)(table.row[0].reads + table.row[0].writes);
    return SACCADE_OK;
}

/* A smaller N than the table's where that is large: the ratios do not depend on it. */
static saccade_status print_sweep(const saccade_ladder_options *options, saccade_error *err)
{
    static const char *const names[] = {"attention-standard", "flash1-block", "flash2",
                                        "backward-flash"};
    saccade_ladder_options o = *options;
    o.N = o.N < 256 ? o.N : 256;
    o.splits = o.splits < o.N ? o.splits : o.N;
    const double Nd = (double)o.N * (double)o.d;
    if (o.N < 4)
        return SACCADE_OK;
    printf("\ntheorem 2 at N %lld: accesses, and in units of N^2 d^2 / M\n%10s", (long long)o.N,
           "M");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        printf(" %20s %7s", names[i], "ratio");
    puts("");
    for (o.M = 4 * o.d; o.M <= o.N * o.d; o.M *= 2) {
        printf("%10lld", (long long)o.M);
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            double accesses;
            CLI_TRY(count_one(&o, names[i], &accesses, err));
            printf(" %20.0f %7.2f", accesses, accesses * (double)o.M / (Nd * Nd));
        }
        puts("");
    }
    return SACCADE_OK;
}

/* ---- the command ---- */

static void draw(FILE *out, const saccade_ladder_options *o, const ladder_table *table,
                 const roofline_limits *limits)
{
    char where[MACHINE_BYTES], title[128 + MACHINE_BYTES];
    machine_and_date(where);
    snprintf(title, sizeof title,
             "The ladder under its roofline: N %lld, d %lld, M %lld, f32, one core; %s",
             (long long)o->N, (long long)o->d, (long long)o->M, where);
    roofline_draw(out, limits, table->row, table->n, title);
}

static void read_options(const cli_args *args, saccade_ladder_options *o)
{
    saccade_ladder_options_init(o);
    o->N = args->ladder_n ? args->ladder_n : o->N;
    o->d = args->ladder_d ? args->ladder_d : o->d;
    if (args->ladder_m)
        o->M = args->ladder_m;
    else if (o->M > o->N * o->d)
        o->M = o->N * o->d;
    o->splits = o->splits < o->N ? o->splits : o->N;
    o->seed = (uint64_t)cli_seed(args);
}

static saccade_status measure(roofline_limits *out, saccade_error *err)
{
    saccade_context *context;
    saccade_ceilings found;
    saccade_ceilings_init(&found);
    CLI_TRY(engine_context(1, NULL, &context, err));
    const saccade_status status = saccade_measure_ceilings(context, &found, err);
    saccade_context_destroy(context);
    CLI_TRY(status);
    out->bytes_per_second = 1e9 * found.read_gbytes_per_s;
    out->fma_flops = 1e9 * found.fma_gflops;
    out->scalar_flops = 1e9 * saccade_measure_scalar_gflops();
    return SACCADE_OK;
}

static saccade_status climb(const saccade_ladder_options *o, FILE *picture, ladder_table *table,
                            saccade_error *err)
{
    roofline_limits limits;
    cli_progress("ladder: measuring the machine");
    CLI_TRY(measure(&limits, err));
    CLI_TRY(saccade_ladder_run(o, keep, table, err));
    cli_progress(NULL);
    printf("N %lld, d %lld, chip M %lld elements, seed %llu\n\n", (long long)o->N,
           (long long)o->d, (long long)o->M, (unsigned long long)o->seed);
    print_counts(table);
    print_stated(table);
    print_speed(table, &limits);
    CLI_TRY(print_sweep(o, err));
    draw(picture, o, table, &limits);
    return SACCADE_OK;
}

saccade_status cmd_ladder(const cli_args *args, saccade_error *err)
{
    saccade_ladder_options o;
    const char *path = args->out_file ? args->out_file : "ladder.svg";
    ladder_table table = {.n = 0, .is_timed = true};
    outfile picture;
    int n_wrong = 0;
    read_options(args, &o);
    CLI_TRY(outfile_check_ending("-o", path, err));
    CLI_TRY(outfile_begin(path, &picture, err)); /* before the work, not after it */
    const saccade_status status = climb(&o, picture.file, &table, err);
    if (status != SACCADE_OK) {
        outfile_abandon(&picture);
        if (strcmp(err->where, "M") == 0) /* N and d are within bounds of their own */
            snprintf(err->where, sizeof err->where, "--m");
        return status;
    }
    CLI_TRY(outfile_commit(&picture, err));
    printf("\nroofline: %s\n", path);
    for (int i = 0; i < table.n; i++)
        n_wrong += !is_exact(&table.row[i]);
    return n_wrong ? (saccade_status)CLI_CHECK_FAILED : SACCADE_OK;
}
