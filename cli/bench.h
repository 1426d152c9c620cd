/* bench.h: the parts of saccade bench: rows on the host, rows on a device, suites of them. */
#ifndef SACCADE_CLI_BENCH_H
#define SACCADE_CLI_BENCH_H

#include "bench_table.h"
#include "job.h"
#include "variants.h"

/* A row's text and sizes. */
typedef struct bench_case {
    cli_variant text;
    saccade_sizes sizes;
    saccade_dtype dtype;
    const char *kv_len; /* NULL: all */
} bench_case;

typedef struct bench {
    const cli_args *args;
    engine_options options;
    saccade_context *context;
    saccade_ceilings ceilings;
    saccade_device_ceilings device_ceilings;
    bench_table table;
    const char *suite;
    double row_seconds;   /* what one row may take */
    double dense_gflops;  /* not 0: masked rows stand against this rate on their live blocks */
    double scaled_gflops; /* not 0: what rows stand against */
    char level[16];       /* what the context came to; of a device: its architecture */
    int threads;
    bool on_device;
} bench;

/* ---- bench_rows.c ---- */

/* A row without its figures. */
bench_row bench_start_row(const bench *b, const bench_case *c, const char *backend);
/* Fills rates and ceiling from row->ms, the number of live scores and what memory gives, which
 * bounds few queries. */
void bench_rate(const bench *b, const bench_case *c, double live, double memory_gbytes_per_s,
                bench_row *row);
/* Prints it and keeps it. */
saccade_status bench_finish_row(bench *b, const bench_row *row, saccade_error *err);
double bench_median(double *values, int n); /* sorts them */
/* What products of this dtype give at most, in GFLOP/s; 0 where it was not measured. */
double bench_product_ceiling(const bench *b, saccade_dtype dtype);
/* The arguments that a row stands for. */
cli_args bench_case_args(const bench_case *c);

/* Each case one after the other. */
saccade_status bench_host_cases(bench *b, const bench_case *cases, int n, saccade_error *err);
saccade_status bench_time_mask(bench *b, const bench_case *c, saccade_error *err);
saccade_status bench_time_compile(bench *b, const bench_case *c, saccade_error *err);
/* Of the case's mask, when it has one. */
saccade_status bench_set_sparsity(const bench *b, const bench_case *c, bench_row *row,
                                  saccade_error *err);

/* ---- bench_device.c ---- */

/* The cases of one size in rounds. */
saccade_status bench_device_cases(bench *b, const bench_case *cases, int n, saccade_error *err);
/* What saccade_plan_prepare takes: runs for the plan's tiles, and their way to the device. */
saccade_status bench_device_prepare(bench *b, const bench_case *c, saccade_error *err);
/* An empty cache of code from here until bench_cache_restore. */
saccade_status bench_cache_new(char folder[64], saccade_error *err);
void bench_cache_restore(const char *folder);

/* ---- bench_suites.c ---- */

typedef struct bench_suite {
    const char *name;
    saccade_status (*run)(bench *b, saccade_error *err);
    bool has_ceiling;
} bench_suite;

/* Gradients on the host; nothing on a device. */
saccade_status bench_suite_backward(bench *b, saccade_error *err); /* bench_backward.c */

/* Where the margin over others is thin. */
saccade_status bench_suite_shapes(bench *b, saccade_error *err); /* bench_shapes.c */

enum { BENCH_SUITES = 8 };
extern const bench_suite bench_suites[BENCH_SUITES];

#endif
