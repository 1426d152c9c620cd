/* saccade bench: suites of problems, each row timed by the median of runs after a warm-up and
 * set against a ceiling measured in this very process with the same threads: multiply-add (or
 * bf16) peak for work on many queries, read bandwidth for decode. */
#include "bench_table.h"
#include "files.h"
#include "variants.h"

#include <stdlib.h>
#include <string.h>

enum { REPEATS = 9 };

/* A row's text and sizes. */
typedef struct bench_case {
    cli_variant text;
    saccade_sizes sizes;
    saccade_dtype dtype;
    const char *kv_len;
} bench_case;

typedef struct bench {
    const cli_args *args;
    engine_options options;
    saccade_context *context;
    saccade_ceilings ceilings;
    bench_table table;
    const char *suite;
    double row_seconds; /* what one row may take */
    char level[16];     /* what the context came to */
    int threads;
} bench;

/* ---- one timed row ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of as many runs as fit. The warm-up counts when it alone fills the time. */
static saccade_status time_engine(const bench *b, engine *e, double *out, saccade_error *err)
{
    double seconds[1000], spent = 0;
    const int most = b->args->repeats ? (int)b->args->repeats : REPEATS;
    int n = 0;
    CLI_TRY(engine_run(e, &seconds[0], err));
    spent = seconds[0];
    while (n < most && (n == 0 ? spent < b->row_seconds / 2 : spent < b->row_seconds)) {
        CLI_TRY(engine_run(e, &seconds[n], err));
        spent += seconds[n++];
    }
    n = n ? n : 1;
    qsort(seconds, (size_t)n, sizeof seconds[0], by_value);
    *out = seconds[n / 2];
    return SACCADE_OK;
}

static void set_text(char *to, size_t bytes, const char *text)
{
    snprintf(to, bytes, "%s", text ? text : "");
}

static bench_row start_row(const bench *b, const bench_case *c, const char *backend)
{
    bench_row r = {
        .ms = NAN, .gflops = NAN, .gbytes_per_s = NAN, .ceiling = NAN, .of_ceiling = NAN};
    set_text(r.suite, sizeof r.suite, b->suite);
    set_text(r.variant, sizeof r.variant, c->text.name);
    set_text(r.backend, sizeof r.backend,
             backend && strcmp(backend, "auto") != 0 ? backend : "cpu");
    if (strcmp(r.backend, "cpu") == 0) /* the others know no levels */
        set_text(r.level, sizeof r.level, b->level);
    problem_show(&c->sizes, c->dtype, r.problem);
    r.threads = b->threads;
    return r;
}

static saccade_status finish_row(bench *b, const bench_row *row, saccade_error *err)
{
    cli_progress(NULL);
    bench_print_row(row);
    return bench_add(&b->table, row, err);
}

/* Few queries: K and V from memory once. Many: arithmetic. */
static void rate(const bench *b, const bench_case *c, double live, bench_row *r)
{
    const saccade_sizes *s = &c->sizes;
    const double seconds = 1e-3 * r->ms;
    const bool is_cuda = strcmp(r->backend, "cuda") == 0;
    const double rows = (double)s->B * (double)s->H * (double)s->Q;
    r->gflops = 2e-9 * (double)(s->D + s->Dv) * live / seconds;
    if (s->Q <= 16) {
        const double bytes = (double)saccade_dtype_bytes(c->dtype) * (double)(s->D + s->Dv);
        const double keys = live / rows * (double)s->B * (double)s->Hkv;
        r->gbytes_per_s = 1e-9 * bytes * keys / seconds;
    }
    if (is_cuda)
        return;
    /* f16 has instructions of its own nowhere here: it becomes f32, or tiles' bf16 */
    const bool is_bf16 =
        c->dtype == SACCADE_BF16 || (c->dtype == SACCADE_F16 && strcmp(b->level, "amx") == 0);
    r->ceiling = s->Q <= 16 ? b->ceilings.read_gbytes_per_s
                 : is_bf16  ? b->ceilings.bf16_gflops
                            : b->ceilings.fma_gflops;
    r->of_ceiling = (s->Q <= 16 ? r->gbytes_per_s : r->gflops) / r->ceiling;
}

static saccade_status time_backend(bench *b, const bench_case *c, const job *j,
                                   const job_tensors *t, const char *backend, double live,
                                   saccade_error *err)
{
    engine e;
    double seconds;
    engine_options options = b->options;
    bench_row row = start_row(b, c, backend);
    options.backend = backend;
    CLI_TRY(engine_open(j, &options, t, &e, err));
    const saccade_status status = time_engine(b, &e, &seconds, err);
    engine_close(&e);
    CLI_TRY(status);
    row.ms = 1e3 * seconds;
    rate(b, c, live, &row);
    return finish_row(b, &row, err);
}

static saccade_status time_on(bench *b, const bench_case *c, const char *backend,
                              saccade_error *err)
{
    cli_args args = {.scale = NAN, .kv_len = c->kv_len};
    double live;
    job_tensors t = {.q = {.data = NULL}};
    job j;
    variant_apply(&c->text, &args);
    if (c->sizes.Q < c->sizes.KV)
        args.q_offset = "end";
    cli_progress("%s %s %s", b->suite, c->text.name, backend ? backend : "");
    CLI_TRY(job_open(&args, &c->sizes, &j, err));
    saccade_status status = job_live_scores(&j, b->context, &live, err);
    if (status == SACCADE_OK)
        status = job_tensors_new(&c->sizes, c->dtype, 1, &t, err);
    if (status == SACCADE_OK)
        status = time_backend(b, c, &j, &t, backend, live, err);
    job_tensors_free(&t);
    job_close(&j);
    return status;
}

/* What three passes over all scores can do in a second or so: one head, and no more queries and
 * keys than that; the row says so. */
static bench_case for_plain(const bench_case *c)
{
    const double most_flops = 8e9;
    bench_case small = *c;
    saccade_sizes *s = &small.sizes;
    s->B = s->H = s->Hkv = 1;
    while ((double)s->Q * (double)s->KV * 2 * (double)(s->D + s->Dv) > most_flops) {
        s->Q = s->Q > 1 ? s->Q / 2 : 1;
        s->KV /= 2;
    }
    return small;
}

static saccade_status time_case(bench *b, const bench_case *c, saccade_error *err)
{
    CLI_TRY(time_on(b, c, b->options.backend, err));
    if (!b->args->baseline)
        return SACCADE_OK;
    const bench_case small = for_plain(c);
    return time_on(b, &small, "plain", err);
}

/* ---- rows that time something else than a run ---- */

static saccade_status mask_once(const bench *b, const job *j, double *seconds,
                                saccade_block_mask_stats *stats, saccade_error *err)
{
    saccade_block_mask *mask;
    const double begin = cli_seconds();
    CLI_TRY(job_block_mask(j, b->context, 128, 128, &mask, err));
    *seconds = cli_seconds() - begin;
    *stats = saccade_block_mask_get_stats(mask);
    saccade_block_mask_destroy(mask);
    return SACCADE_OK;
}

static saccade_status time_mask(bench *b, const bench_case *c, saccade_error *err)
{
    enum { RUNS = 5 };
    cli_args args = {.scale = NAN};
    saccade_block_mask_stats stats;
    double seconds[RUNS];
    job j;
    variant_apply(&c->text, &args);
    cli_progress("%s %s", b->suite, c->text.name);
    CLI_TRY(job_open(&args, &c->sizes, &j, err));
    saccade_status status = SACCADE_OK;
    for (int i = 0; i < RUNS && status == SACCADE_OK; i++)
        status = mask_once(b, &j, &seconds[i], &stats, err);
    job_close(&j);
    CLI_TRY(status);
    qsort(seconds, RUNS, sizeof seconds[0], by_value);
    bench_row row = start_row(b, c, "cpu");
    row.ms = 1e3 * seconds[RUNS / 2];
    return finish_row(b, &row, err);
}

/* From text to plan. */
static saccade_status compile_once(const bench *b, const bench_case *c, const cli_args *args,
                                   double *seconds, saccade_error *err)
{
    job j;
    saccade_plan *plan;
    const double begin = cli_seconds();
    CLI_TRY(job_open(args, &c->sizes, &j, err));
    const saccade_status status =
        engine_plan(&j, &b->options, c->dtype, b->context, &plan, err);
    *seconds = cli_seconds() - begin;
    if (status == SACCADE_OK)
        saccade_plan_destroy(plan);
    job_close(&j);
    return status;
}

/* The first time, which is what counts, and the median. */
static saccade_status time_compile(bench *b, const bench_case *c, saccade_error *err)
{
    enum { RUNS = 9 };
    cli_args args = {.scale = NAN};
    double seconds[RUNS];
    char name[48];
    bench_case named = *c;
    variant_apply(&c->text, &args);
    for (int i = 0; i < RUNS; i++)
        CLI_TRY(compile_once(b, c, &args, &seconds[i], err));
    const double first = seconds[0];
    qsort(seconds, RUNS, sizeof seconds[0], by_value);
    named.text.name = name;
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s%s", c->text.name, i ? ", again" : ", first");
        bench_row row = start_row(b, &named, b->options.backend);
        row.ms = 1e3 * (i ? seconds[RUNS / 2] : first);
        CLI_TRY(finish_row(b, &row, err));
    }
    return SACCADE_OK;
}

/* Sparsity of each case, as a list after the table: it is a fact of the mask, not a speed. */
static saccade_status natten_sparsity(bench *b, const bench_case *cases, int n,
                                      saccade_error *err)
{
    for (int i = 0; i < n; i++) {
        cli_args args = {.scale = NAN};
        saccade_block_mask_stats stats;
        double seconds;
        job j;
        variant_apply(&cases[i].text, &args);
        CLI_TRY(job_open(&args, &cases[i].sizes, &j, err));
        const saccade_status status = mask_once(b, &j, &seconds, &stats, err);
        job_close(&j);
        CLI_TRY(status);
        printf("natten   %-28s sparsity %.4f of 128x128 blocks\n", cases[i].text.name,
               stats.sparsity);
    }
    return SACCADE_OK;
}

static saccade_status time_cases(bench *b, const bench_case *cases, int n, saccade_error *err)
{
    b->row_seconds = 60.0 / n / (b->args->baseline ? 2 : 1);
    for (int i = 0; i < n; i++)
        CLI_TRY(time_case(b, &cases[i], err));
    return SACCADE_OK;
}

/* ---- suites ---- */

static saccade_status suite_paper(bench *b, saccade_error *err)
{
    bench_case cases[2 * VARIANTS];
    for (int i = 0; i < 2 * VARIANTS; i++)
        cases[i] = (bench_case){
            .text = cli_variants[i % VARIANTS],
            .sizes = {1, 4, i < VARIANTS ? 4 : 1, 8192, 8192, 64, 64},
            .dtype = SACCADE_BF16,
        };
    return time_cases(b, cases, 2 * VARIANTS, err);
}

static saccade_status suite_dense(bench *b, saccade_error *err)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    bench_case cases[7];
    for (int i = 0; i < 6; i++) {
        const int64_t d = i % 2 ? 128 : 64;
        cases[i] = (bench_case){
            {"full", NULL, NULL, NULL}, {1, 16, 16, 4096, 4096, d, d}, dtypes[i / 2], NULL};
    }
    cases[6] = (bench_case){{"sliding_window", "sliding_window(256)", NULL, NULL},
                            {1, 4, 4, 65536, 65536, 64, 64},
                            SACCADE_BF16,
                            NULL};
    return time_cases(b, cases, 7, err);
}

static saccade_status suite_decode(bench *b, saccade_error *err)
{
    static const cli_variant full = {"full", NULL, NULL, NULL};
    /* K and V of 256 MiB: far past the caches */
    const bench_case cases[] = {
        {full, {1, 8, 8, 1, 65536, 128, 128}, SACCADE_BF16, NULL},
        {full, {1, 32, 8, 1, 65536, 128, 128}, SACCADE_BF16, NULL},
        {full, {1, 64, 8, 1, 65536, 128, 128}, SACCADE_BF16, NULL},
        {full, {1, 32, 8, 1, 32768, 128, 128}, SACCADE_F32, NULL},
        {full, {1, 32, 8, 8, 65536, 128, 128}, SACCADE_BF16, NULL},
        {*variant_find("causal"), {1, 32, 8, 1, 65536, 128, 128}, SACCADE_BF16, NULL},
        {*variant_find("alibi"), {1, 32, 8, 1, 65536, 128, 128}, SACCADE_BF16, NULL},
        {*variant_find("softcap"), {1, 32, 8, 1, 65536, 128, 128}, SACCADE_BF16, NULL},
        {full, {16, 32, 8, 1, 8192, 128, 128}, SACCADE_BF16, "4096"},
    };
    return time_cases(b, cases, sizeof cases / sizeof cases[0], err);
}

/* The three orders of tokens in FlexAttention's appendix; `mask` gets the text. */
static void natten_text(int order, int canvas, int kernel, char *name, char *mask, size_t bytes)
{
    static const char *const orders[] = {"naive", "tiled", "morton"};
    static const char *const calls[] = {"natten_2d", "natten_tiled", "natten_morton"};
    snprintf(name, bytes, "%s %dx%d k%d", orders[order], canvas, canvas, kernel);
    snprintf(mask, bytes, "%s(%d, %d, %d, %d%s)", calls[order], canvas, canvas, kernel, kernel,
             order == 1 ? ", 8, 8" : "");
}

static saccade_status suite_natten(bench *b, saccade_error *err)
{
    enum { N = 9, BYTES = 96 };
    static const int shapes[][2] = {{64, 7}, {64, 13}, {128, 13}};
    char names[N][BYTES], masks[N][BYTES];
    bench_case cases[N];
    for (int i = 0; i < N; i++) {
        const int canvas = shapes[i / 3][0];
        natten_text(i % 3, canvas, shapes[i / 3][1], names[i], masks[i], BYTES);
        cases[i] = (bench_case){{names[i], masks[i], NULL, NULL},
                                {1, 4, 4, canvas * canvas, canvas * canvas, 64, 64},
                                SACCADE_BF16,
                                NULL};
    }
    CLI_TRY(time_cases(b, cases, N, err));
    return natten_sparsity(b, cases, N, err);
}

static saccade_status suite_mask(bench *b, saccade_error *err)
{
    static const cli_variant masks[] = {
        {"causal", "causal()", NULL, NULL},
        {"sliding_window", "sliding_window(1024)", NULL, NULL},
        {"prefix_lm", "prefix_lm(2048)", NULL, NULL},
        {"document 12", "document(doc)", NULL, "doc=i32[KV]:docs(12)"},
        {"document 10000", "document(doc)", NULL, "doc=i32[KV]:docs(10000)"},
        {"document 12, causal", "document(doc) && causal()", NULL, "doc=i32[KV]:docs(12)"},
        {"prefix_lm, window", "prefix_lm(2048) && sliding_window(8192)", NULL, NULL},
        {"batchify", "batchify(4096)", NULL, NULL},
    };
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        const bench_case c = {
            masks[i], {1, 1, 1, 1 << 20, 1 << 20, 64, 64}, SACCADE_BF16, NULL};
        CLI_TRY(time_mask(b, &c, err));
    }
    return SACCADE_OK;
}

static saccade_status suite_compile(bench *b, saccade_error *err)
{
    for (int i = 0; i < VARIANTS; i++) {
        bench_case c = {cli_variants[i], {1, 4, 4, 8192, 8192, 64, 64}, SACCADE_BF16, NULL};
        if (c.text.bind) /* only its dtype and rank are compiled; making it takes time too */
            c.text.bind = "doc=i32[1]:iota";
        CLI_TRY(time_compile(b, &c, err));
    }
    return SACCADE_OK;
}

static const struct {
    const char *name;
    saccade_status (*run)(bench *b, saccade_error *err);
    bool has_ceiling;
} suites[] = {
    {"paper", suite_paper, true},      {"dense", suite_dense, true},
    {"decode", suite_decode, true},    {"mask", suite_mask, false},
    {"compile", suite_compile, false}, {"natten", suite_natten, true},
};
enum { SUITES = sizeof suites / sizeof suites[0] };

/* ---- the command ---- */

static saccade_status check_names(const cli_args *args, saccade_error *err)
{
    const char *names[SUITES];
    for (int s = 0; s < SUITES; s++)
        names[s] = suites[s].name;
    for (int i = 0; i < args->suite.n; i++) {
        bool is_known = false;
        for (int s = 0; s < SUITES; s++)
            is_known |= strcmp(args->suite.item[i], names[s]) == 0;
        const char *meant = cli_nearest(args->suite.item[i], names, SUITES);
        CLI_FAIL_IF(
            !is_known, SACCADE_EINVAL, "--suite", "got '%.40s', %s%s", args->suite.item[i],
            meant ? "did you mean " : "expected paper, dense, decode, mask, compile or natten",
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

/* The level and threads that a plan of this context has, by its own account. */
static saccade_status read_context(bench *b, saccade_error *err)
{
    const job none = {.sizes = {1, 1, 1, 128, 128, 64, 64}};
    const engine_options options = {.backend = "cpu", .scale = NAN};
    saccade_plan *plan;
    char *text;
    CLI_TRY(engine_plan(&none, &options, SACCADE_F32, b->context, &plan, err));
    const saccade_status status = saccade_plan_explain(plan, &text, err);
    saccade_plan_destroy(plan);
    CLI_TRY(status);
    const char *level = strstr(text, "level: "), *threads = strstr(text, "threads: ");
    if (level)
        sscanf(level, "level: %15s", b->level);
    if (threads)
        sscanf(threads, "threads: %d", &b->threads);
    saccade_free(text);
    return SACCADE_OK;
}

/* Before each suite, and the best so far counts: a limit that something else on the machine
 * held down is none. */
static saccade_status measure_ceilings(bench *b, saccade_error *err)
{
    saccade_ceilings now, *best = &b->ceilings;
    cli_progress("measuring the machine");
    CLI_TRY(saccade_measure_ceilings(b->context, &now, err));
    cli_progress(NULL);
    best->fma_gflops = fmax(best->fma_gflops, now.fma_gflops);
    best->bf16_gflops = fmax(best->bf16_gflops, now.bf16_gflops);
    best->read_gbytes_per_s = fmax(best->read_gbytes_per_s, now.read_gbytes_per_s);
    printf("%-8s ceilings: f32 %.1f GFLOP/s, bf16 %.1f GFLOP/s, read %.2f GB/s\n", b->suite,
           best->fma_gflops, best->bf16_gflops, best->read_gbytes_per_s);
    return SACCADE_OK;
}

static saccade_status run_suites(bench *b, saccade_error *err)
{
    CLI_TRY(read_context(b, err));
    bench_print_header();
    for (int s = 0; s < SUITES; s++) {
        if (!wants(b->args, suites[s].name))
            continue;
        b->suite = suites[s].name;
        if (suites[s].has_ceiling)
            CLI_TRY(measure_ceilings(b, err));
        CLI_TRY(suites[s].run(b, err));
    }
    if (b->args->csv)
        CLI_TRY(bench_write_csv(&b->table, b->args->csv, err));
    return b->args->plot ? bench_write_plot(&b->table, b->args->plot, err) : SACCADE_OK;
}

saccade_status cmd_bench(const cli_args *args, saccade_error *err)
{
    bench b = {.args = args};
    CLI_TRY(check_names(args, err));
    CLI_TRY(files_engine_options(args, &b.options, err));
    const saccade_context_options options = {.threads = b.options.threads,
                                             .level = b.options.level};
    CLI_TRY(saccade_context_create(&options, &b.context, err));
    const saccade_status status = run_suites(&b, err);
    free(b.table.rows);
    saccade_context_destroy(b.context);
    return status;
}
