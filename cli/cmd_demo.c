/* saccade demo, which `make run` calls: writes Q, K, V as .npy, runs the eight variants over
 * them by the code of `saccade run`, holds rows of each output against float64, and leaves the
 * masks as pictures on a page to look at. */
#include "compare.h"
#include "files.h"
#include "floats.h"
#include "outfile.h"
#include "variants.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    PATH_BYTES = 512,
    RUNS = 3,    /* the median is told */
    WINDOW = 32, /* rows of each head compared at the start, the middle and the end */
    WINDOWS = 3
};

static const saccade_sizes mha = {1, 8, 8, 2048, 2048, 64, 64};
static const saccade_sizes gqa = {1, 8, 2, 2048, 2048, 64, 64};

typedef struct demo_row {
    const cli_variant *variant;
    const saccade_sizes *sizes;
    double sparsity, seconds, gflops, error, allowed;
} demo_row;

typedef struct demo {
    const char *folder;
    int64_t threads;
    char q[PATH_BYTES], k[PATH_BYTES], v[PATH_BYTES], o[PATH_BYTES];
    demo_row rows[2 * VARIANTS];
    int n_rows;
    bool has_png;
} demo;

static void path_of(const demo *d, const char *name, const char *end, char *out)
{
    snprintf(out, PATH_BYTES, "%s/%s%s", d->folder, name, end);
}

static saccade_status make_folder(const char *folder, saccade_error *err)
{
    CLI_FAIL_IF(mkdir(folder, 0777) != 0 && errno != EEXIST, SACCADE_EIO, folder,
                "cannot make the folder: %s", strerror(errno));
    CLI_FAIL_IF(strlen(folder) > PATH_BYTES - 64, SACCADE_EINVAL, "-o", "got a long name");
    return SACCADE_OK;
}

/* ---- input files ---- */

static saccade_status write_inputs(demo *d, const saccade_sizes *sizes, saccade_error *err)
{
    job_tensors t;
    const char *heads = sizes == &mha ? "mha" : "gqa";
    char name[3][16];
    for (int i = 0; i < 3; i++)
        snprintf(name[i], sizeof name[i], "%c_%s", "qkv"[i], heads);
    path_of(d, name[0], ".npy", d->q);
    path_of(d, name[1], ".npy", d->k);
    path_of(d, name[2], ".npy", d->v);
    cli_progress("%s: writing Q, K and V", sizes == &mha ? "MHA 8/8" : "GQA 8/2");
    CLI_TRY(job_tensors_new(sizes, SACCADE_F32, 1, &t, err));
    saccade_status status = npy_save(d->q, &t.q, err);
    if (status == SACCADE_OK)
        status = npy_save(d->k, &t.k, err);
    if (status == SACCADE_OK)
        status = npy_save(d->v, &t.v, err);
    job_tensors_free(&t);
    return status;
}

/* ---- error against float64 ---- */

/* Rows [first, first + WINDOW) of Q and O, at their positions. */
static saccade_status check_window(const cli_args *args, const file_tensors *f,
                                   const saccade_tensor *o, int64_t first, demo_row *row,
                                   saccade_error *err)
{
    saccade_sizes sizes = f->sizes;
    cli_args at = *args;
    job_tensors t = f->t;
    char offset[24];
    engine_options options;
    deviation d;
    yardstick y;
    job j;
    sizes.Q = t.q.shape[2] = WINDOW;
    t.q.data = (char *)t.q.data + first * t.q.stride[2] * 4;
    snprintf(offset, sizeof offset, "%lld", (long long)first);
    at.q_offset = offset;
    CLI_TRY(files_engine_options(args, &options, err));
    CLI_TRY(job_open(&at, &sizes, &j, err));
    saccade_status status = yardstick_open(&j, &options, &t, &y, err);
    job_close(&j);
    CLI_TRY(status);
    t.out = *o;
    t.out.shape[2] = WINDOW;
    t.out.data = (char *)o->data + first * o->stride[2] * 4;
    t.lse = y.gold.lse; /* run was not asked for it */
    compare_results(&t, &y.gold, &d);
    row->error = fmax(row->error, d.out);
    row->allowed = fmax(row->allowed, y.allowed_out);
    yardstick_close(&y);
    return SACCADE_OK;
}

static saccade_status check_output(const cli_args *args, demo_row *row, saccade_error *err)
{
    file_tensors f;
    npy_array o = {.data = NULL};
    CLI_TRY(files_load(args, &f, err));
    saccade_status status = npy_read(args->out_file, &o, err);
    for (int w = 0; w < WINDOWS && status == SACCADE_OK; w++) {
        const saccade_tensor out = npy_tensor(&o);
        const int64_t first = w * (f.sizes.Q - WINDOW) / (WINDOWS - 1);
        status = check_window(args, &f, &out, first, row, err);
    }
    npy_free(&o);
    files_free(&f);
    return status;
}

/* ---- one row ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static saccade_status live_flops(const cli_args *args, const saccade_sizes *sizes, double *out,
                                 saccade_error *err)
{
    job j;
    double live = 0;
    CLI_TRY(job_open(args, sizes, &j, err));
    const saccade_status status = job_live_scores(&j, NULL, &live, err);
    job_close(&j);
    *out = 2.0 * (double)(sizes->D + sizes->Dv) * live;
    return status;
}

static saccade_status run_row(demo *d, demo_row *row, saccade_error *err)
{
    double seconds[RUNS], flops;
    run_report report;
    cli_args args = {.seed = -1,
                     .q_file = d->q,
                     .k_file = d->k,
                     .v_file = d->v,
                     .out_file = d->o,
                     .scale = NAN,
                     .threads = d->threads};
    variant_apply(row->variant, &args);
    for (int i = 0; i < RUNS; i++) {
        CLI_TRY(run_files(&args, &report, err));
        seconds[i] = report.seconds;
    }
    qsort(seconds, RUNS, sizeof seconds[0], by_value);
    row->seconds = seconds[RUNS / 2];
    row->sparsity = report.sparsity;
    CLI_TRY(live_flops(&args, row->sizes, &flops, err));
    row->gflops = 1e-9 * flops / row->seconds;
    return check_output(&args, row, err);
}

static const char *heads_of(const demo_row *row)
{
    return row->sizes == &mha ? "MHA 8/8" : "GQA 8/2";
}

static void print_header(void)
{
    printf("b1 h8 q2048 kv2048 d64 f32; error against float64 over %d rows of each head\n\n",
           WINDOW * WINDOWS);
    printf("%-16s %-8s %10s %9s %11s %12s %12s\n", "variant", "heads", "sparsity", "ms",
           "GFLOP/s", "error", "allowed");
}

static void print_row(const demo_row *row)
{
    printf("%-16s %-8s %8.1f %% %9.2f %11.1f %12.1e %12.1e\n", row->variant->name,
           heads_of(row), 100 * row->sparsity, 1e3 * row->seconds, row->gflops, row->error,
           row->allowed);
    fflush(stdout);
}

static saccade_status run_heads(demo *d, const saccade_sizes *sizes, saccade_error *err)
{
    CLI_TRY(write_inputs(d, sizes, err));
    for (int i = 0; i < VARIANTS; i++) {
        demo_row *row = &d->rows[d->n_rows];
        char name[32];
        *row = (demo_row){.variant = &cli_variants[i], .sizes = sizes};
        cli_progress("%d of %d: %s %s", d->n_rows + 1, 2 * VARIANTS, heads_of(row),
                     row->variant->name);
        snprintf(name, sizeof name, "o_%s_%s", sizes == &mha ? "mha" : "gqa",
                 row->variant->name);
        path_of(d, name, ".npy", d->o);
        CLI_TRY(run_row(d, row, err));
        cli_progress(NULL);
        if (!d->n_rows)
            print_header();
        print_row(row);
        d->n_rows++;
    }
    return SACCADE_OK;
}

/* ---- pictures ---- */

static saccade_status draw(demo *d, const cli_variant *v, saccade_picture format,
                           saccade_error *err)
{
    cli_args args = {.scale = NAN};
    char path[PATH_BYTES];
    saccade_block_mask *mask = NULL;
    void *bytes;
    size_t size;
    job j;
    variant_apply(v, &args);
    args.score.n = 0;
    args.mask = v->mask ? v->mask : "true";
    CLI_TRY(job_open(&args, &mha, &j, err));
    saccade_status status = job_block_mask(&j, NULL, 32, 32, &mask, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_render(mask, 0, 0, format, 0, &bytes, &size, err);
    if (status == SACCADE_OK) {
        path_of(d, v->name, format == SACCADE_SVG ? ".svg" : ".png", path);
        status = outfile_put(path, bytes, size, err);
        saccade_free(bytes);
    }
    saccade_block_mask_destroy(mask);
    job_close(&j);
    return status;
}

static saccade_status draw_all(demo *d, saccade_error *err)
{
    d->has_png = true;
    for (int i = 0; i < VARIANTS; i++) {
        cli_progress("drawing %s", cli_variants[i].name);
        CLI_TRY(draw(d, &cli_variants[i], SACCADE_SVG, err));
        const saccade_status status =
            d->has_png ? draw(d, &cli_variants[i], SACCADE_PNG, err) : SACCADE_OK;
        if (status == SACCADE_EBACKEND)
            d->has_png = false;
        else
            CLI_TRY(status);
    }
    cli_progress(NULL);
    return SACCADE_OK;
}

/* ---- page ---- */

static void put_escaped(FILE *f, const char *text)
{
    for (; *text; text++)
        if (*text == '<')
            fputs("&lt;", f);
        else if (*text == '&')
            fputs("&amp;", f);
        else
            fputc(*text, f);
}

static void put_figure(FILE *f, const demo_row *row)
{
    const cli_variant *v = row->variant;
    fprintf(f, "<figure><img src=\"%s.svg\" alt=\"block mask of %s\">\n<figcaption><b>%s</b>",
            v->name, v->name, v->name);
    const char *const texts[] = {v->mask, v->score, v->bind};
    static const char *const names[] = {"mask", "score", "bind"};
    for (int i = 0; i < 3; i++) {
        if (!texts[i])
            continue;
        fprintf(f, "<br>%s <code>", names[i]);
        put_escaped(f, texts[i]);
        fputs("</code>", f);
    }
    fputs("</figcaption></figure>\n", f);
}

static void put_rows(FILE *f, const demo *d)
{
    fputs("<table><tr><th>variant<th>heads<th>sparsity<th>ms<th>live GFLOP/s"
          "<th>error<th>allowed</tr>\n",
          f);
    for (int i = 0; i < d->n_rows; i++) {
        const demo_row *r = &d->rows[i];
        fprintf(f, "<tr><td>%s<td>%s<td>%.1f %%<td>%.2f<td>%.1f<td>%.1e<td>%.1e</tr>\n",
                r->variant->name, heads_of(r), 100 * r->sparsity, 1e3 * r->seconds, r->gflops,
                r->error, r->allowed);
    }
    fputs("</table>\n", f);
}

static saccade_status write_page(const demo *d, saccade_error *err)
{
    outfile out;
    char path[PATH_BYTES];
    path_of(d, "index", ".html", path);
    CLI_TRY(outfile_begin(path, &out, err));
    fputs(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Saccade</title>\n"
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}\n"
        "table{border-collapse:collapse}td,th{padding:.15em .9em;text-align:right}\n"
        "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f2f2f2}\n"
        "figure{display:inline-block;width:15em;margin:1em 1em 1em 0;vertical-align:top}\n"
        "img{width:100%;border:1px solid #bbb}figcaption{margin-top:.4em}\n"
        "code{font-size:85%}</style>\n"
        "<h1>Saccade: eight variants</h1>\n"
        "<p>Batch 1, 8 query heads, 2048 queries and keys, head dim 64, f32. Error: largest\n"
        "difference from float64 over 96 rows of each head; allowed: twice that of a plain\n"
        "f32 computation and two units in the last place.</p>\n",
        out.file);
    put_rows(out.file, d);
    fputs("<h2>Masks</h2><p>One square is 32 queries by 32 keys; queries go down, keys to the\n"
          "right. Dark: every score counts; light: some do; white: none does, and none is\n"
          "computed.</p>\n",
          out.file);
    for (int i = 0; i < VARIANTS; i++)
        put_figure(out.file, &d->rows[i]);
    fputs("</html>\n", out.file);
    return outfile_commit(&out, err);
}

/* ---- the command ---- */

saccade_status cmd_demo(const cli_args *args, saccade_error *err)
{
    demo d = {.folder = args->folder ? args->folder : "out", .threads = args->threads};
    bool is_good = true;
    CLI_TRY(make_folder(d.folder, err));
    CLI_TRY(run_heads(&d, &mha, err));
    CLI_TRY(run_heads(&d, &gqa, err));
    CLI_TRY(draw_all(&d, err));
    CLI_TRY(write_page(&d, err));
    for (int i = 0; i < d.n_rows; i++)
        is_good &= d.rows[i].error <= d.rows[i].allowed;
    printf("\nGFLOP/s counts 2(D+Dv) per live score. Pictures and table: %s/index.html%s\n",
           d.folder, d.has_png ? "" : " (no PNG: built without libpng)");
    if (!is_good)
        puts("an error is larger than allowed");
    return is_good ? SACCADE_OK : (saccade_status)CLI_CHECK_FAILED;
}
