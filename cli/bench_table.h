/* bench_table.h: rows of a benchmark, as they are printed, kept and drawn. */
#ifndef SACCADE_CLI_BENCH_TABLE_H
#define SACCADE_CLI_BENCH_TABLE_H

#include "outfile.h"
#include "problem_text.h"

#include <math.h>

/* NaN where a column does not apply. */
typedef struct bench_row {
    char suite[16], variant[48], problem[PROBLEM_BYTES], backend[8], level[16];
    int threads;
    double ms, gflops, gbytes_per_s, ceiling, of_ceiling;
    double sparsity; /* of 128 x 128 blocks */
} bench_row;

typedef struct bench_table {
    bench_row *rows;
    int n, room;
} bench_table;

saccade_status bench_add(bench_table *table, const bench_row *row, saccade_error *err);
void bench_print_header(void);
void bench_print_row(const bench_row *row);
saccade_status bench_write_csv(const bench_table *table, outfile *out, saccade_error *err);
/* Bars of gflops or gbytes_per_s against the ceiling, grouped by suite. */
saccade_status bench_write_plot(const bench_table *table, outfile *out, saccade_error *err);

#endif
