/* A benchmark's rows on the terminal and as CSV. */
#include "bench_table.h"

#include <stdlib.h>
#include <string.h>

saccade_status bench_add(bench_table *table, const bench_row *row, saccade_error *err)
{
    if (table->n == table->room) {
        const int room = table->room ? 2 * table->room : 64;
        bench_row *rows = realloc(table->rows, (size_t)room * sizeof *rows);
        CLI_FAIL_IF(!rows, SACCADE_ENOMEM, "bench", "out of memory");
        table->rows = rows;
        table->room = room;
    }
    table->rows[table->n++] = *row;
    return SACCADE_OK;
}

/* Four significant digits; nothing for NaN. */
static const char *cell(double x, char *out, size_t bytes)
{
    if (isnan(x))
        out[0] = 0;
    else
        snprintf(out, bytes, x >= 1000 ? "%.0f" : "%.4g", x);
    return out;
}

void bench_print_header(void)
{
    printf("%-8s %-28s %-40s %-7s %-8s %3s %9s %8s %8s %8s %7s %8s\n", "suite", "variant",
           "problem", "backend", "level", "thr", "ms", "GFLOP/s", "GB/s", "ceiling", "of it",
           "sparsity");
}

void bench_print_row(const bench_row *r)
{
    char ms[16], gflops[16], gbytes[16], ceiling[16], of[16] = "", sparsity[16] = "";
    if (!isnan(r->of_ceiling))
        snprintf(of, sizeof of, "%.1f %%", 100 * r->of_ceiling);
    if (!isnan(r->sparsity))
        snprintf(sparsity, sizeof sparsity, "%.4f", r->sparsity);
    printf("%-8s %-28s %-40s %-7s %-8s %3d %9s %8s %8s %8s %7s %8s\n", r->suite, r->variant,
           r->problem, r->backend, r->level, r->threads, cell(r->ms, ms, sizeof ms),
           cell(r->gflops, gflops, sizeof gflops), cell(r->gbytes_per_s, gbytes, sizeof gbytes),
           cell(r->ceiling, ceiling, sizeof ceiling), of, sparsity);
    fflush(stdout);
}

saccade_status bench_write_csv(const bench_table *table, outfile *out, saccade_error *err)
{
    fputs("suite,variant,problem,backend,level,threads,ms,gflops,gbytes_per_s,ceiling,"
          "of_ceiling,sparsity\n",
          out->file);
    for (int i = 0; i < table->n; i++) {
        const bench_row *r = &table->rows[i];
        const double numbers[] = {r->ms,      r->gflops,     r->gbytes_per_s,
                                  r->ceiling, r->of_ceiling, r->sparsity};
        fprintf(out->file, "%s,\"%s\",%s,%s,%s,%d", r->suite, r->variant, r->problem,
                r->backend, r->level, r->threads);
        for (int c = 0; c < 6; c++)
            fprintf(out->file, isnan(numbers[c]) ? "," : ",%.6g", numbers[c]);
        fputc('\n', out->file);
    }
    return outfile_commit(out, err);
}
