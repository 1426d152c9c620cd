/* A benchmark as a picture: one bar a row, its length the fraction of the ceiling where there
 * is one, else of the suite's longest; the figure written beside it. */
#include "bench_table.h"
#include "machine.h"

#include <string.h>

enum { LEFT = 470, BAR = 420, LINE = 22, HEAD = 34, WIDTH = LEFT + BAR + 150 };

/* What a bar shows: the rate that the ceiling is in, or where there is none the time. */
typedef struct figure {
    double value;
    const char *unit;
} figure;

static figure figure_of(const bench_row *r)
{
    return !isnan(r->gbytes_per_s) ? (figure){r->gbytes_per_s, "GB/s"}
           : !isnan(r->gflops)     ? (figure){r->gflops, "GFLOP/s"}
                                   : (figure){r->ms, "ms"};
}

static void put_bar(FILE *f, const bench_row *r, double most, int y)
{
    const bool has_ceiling = !isnan(r->of_ceiling);
    const figure shown = figure_of(r);
    const double part = has_ceiling ? r->of_ceiling : shown.value / most;
    const bool is_plain = strcmp(r->backend, "plain") == 0;
    fprintf(f,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s  <tspan fill=\"#666\">%s</tspan>"
            "</text>\n",
            LEFT - 8, y + 15, r->variant, r->problem);
    if (has_ceiling)
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#eee\"/>\n", LEFT,
                y + 3, BAR, LINE - 6);
    fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", LEFT,
            y + 3, BAR * fmin(fmax(part, 0), 1), LINE - 6, is_plain ? "#c9a227" : "#2f6db5");
    fprintf(f, "<text x=\"%d\" y=\"%d\">%.4g %s", LEFT + BAR + 8, y + 15, shown.value,
            shown.unit);
    if (has_ceiling)
        fprintf(f, ", %.0f %%", 100 * r->of_ceiling);
    fputs("</text>\n", f);
}

/* The longest bar of a suite in the unit of its row. */
static double most_of(const bench_table *t, const bench_row *row)
{
    const figure wanted = figure_of(row);
    double most = 0;
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->rows[i].suite, row->suite) == 0
            && strcmp(figure_of(&t->rows[i]).unit, wanted.unit) == 0)
            most = fmax(most, figure_of(&t->rows[i]).value);
    return most;
}

static bool has_plain(const bench_table *t)
{
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->rows[i].backend, "plain") == 0)
            return true;
    return false;
}

saccade_status bench_write_plot(const bench_table *t, outfile *out, saccade_error *err)
{
    int groups = 0, y = 8 + 2 * LINE;
    for (int i = 0; i < t->n; i++)
        groups += i == 0 || strcmp(t->rows[i].suite, t->rows[i - 1].suite) != 0;
    const int height = 16 + (t->n + 2) * LINE + groups * HEAD;
    char where[MACHINE_BYTES];
    machine_and_date(where);
    fprintf(out->file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            WIDTH, height, WIDTH, height);
    fprintf(out->file,
            "<text x=\"12\" y=\"20\" font-weight=\"bold\">saccade %s: speed of attention, "
            "measured on %s, %d threads</text>\n",
            saccade_version(), where, t->n > 0 ? t->rows[0].threads : 0);
    fprintf(out->file,
            "<text x=\"%d\" y=\"42\" fill=\"#666\">grey: the ceiling, measured in the same run"
            "%s</text>\n",
            LEFT, has_plain(t) ? "; yellow: plain, three passes" : "");
    const char *suite = "";
    for (int i = 0; i < t->n; i++) {
        if (strcmp(t->rows[i].suite, suite) != 0) {
            suite = t->rows[i].suite;
            fprintf(out->file,
                    "<text x=\"12\" y=\"%d\" font-weight=\"bold\" font-size=\"15\">"
                    "%s</text>\n",
                    y + 20, suite);
            y += HEAD;
        }
        put_bar(out->file, &t->rows[i], most_of(t, &t->rows[i]), y);
        y += LINE;
    }
    fputs("</svg>\n", out->file);
    return outfile_commit(out, err);
}
