/* Rows of saccade bench on the host: each timed by the median of runs after a warm-up. */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

enum { REPEATS = 9 };

/* ---- one timed row ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof values[0], by_value);
    return values[n / 2];
}

/* One run's seconds and, where memory bounds it, what a plain read of the same K and V gives
 * just after: other tenants of a machine change it from minute to minute. */
typedef struct timing {
    double seconds, read_gbytes_per_s;
} timing;

/* Few queries: K and V come from memory once. Many: arithmetic. */
static bool is_by_memory(const bench_case *c)
{
    return c->sizes.Q <= 16;
}

static saccade_status read_keys(const bench *b, const job_tensors *t, double *rate,
                                saccade_error *err)
{
    const saccade_tensor *both[2] = {&t->k, &t->v};
    double bytes = 0, seconds = 0, now;
    for (int i = 0; i < 2; i++) {
        int64_t n = saccade_dtype_bytes(both[i]->dtype);
        for (int d = 0; d < both[i]->rank; d++)
            n *= both[i]->shape[d];
        CLI_TRY(saccade_measure_read(b->context, both[i]->data, n, &now, err));
        bytes += (double)n;
        seconds += 1e-9 * (double)n / now;
    }
    *rate = 1e-9 * bytes / seconds;
    return SACCADE_OK;
}

static saccade_status time_once(const bench *b, engine *e, const job_tensors *keys, timing *out,
                                saccade_error *err)
{
    *out = (timing){.read_gbytes_per_s = NAN};
    CLI_TRY(engine_run(e, &out->seconds, err));
    return keys ? read_keys(b, keys, &out->read_gbytes_per_s, err) : SACCADE_OK;
}

/* Medians of as many runs as fit. The warm-up counts when it alone fills the time. keys: NULL
 * where memory is not what bounds it. */
static saccade_status time_engine(const bench *b, engine *e, const job_tensors *keys,
                                  timing *out, saccade_error *err)
{
    double seconds[1000], rates[1000];
    const int most = b->args->repeats ? (int)b->args->repeats : REPEATS;
    int n = 0;
    timing now;
    CLI_TRY(time_once(b, e, keys, &now, err));
    seconds[0] = now.seconds;
    rates[0] = now.read_gbytes_per_s;
    const double begin = cli_seconds() - now.seconds;
    for (double room = b->row_seconds / 2; n < most && cli_seconds() - begin < room; n++) {
        CLI_TRY(time_once(b, e, keys, &now, err));
        seconds[n] = now.seconds;
        rates[n] = now.read_gbytes_per_s;
        room = b->row_seconds;
    }
    n = n ? n : 1;
    *out = (timing){bench_median(seconds, n), bench_median(rates, n)};
    return SACCADE_OK;
}

static void set_text(char *to, size_t bytes, const char *text)
{
    snprintf(to, bytes, "%s", text ? text : "");
}

bench_row bench_start_row(const bench *b, const bench_case *c, const char *backend)
{
    bench_row r = {.ms = NAN,
                   .gflops = NAN,
                   .gbytes_per_s = NAN,
                   .ceiling = NAN,
                   .of_ceiling = NAN,
                   .sparsity = NAN};
    set_text(r.suite, sizeof r.suite, b->suite);
    set_text(r.variant, sizeof r.variant, c->text.name);
    set_text(r.backend, sizeof r.backend,
             backend && strcmp(backend, "auto") != 0 ? backend : "cpu");
    if (strcmp(r.backend, b->on_device ? "cuda" : "cpu") == 0) /* the others know no levels */
        set_text(r.level, sizeof r.level, b->level);
    problem_show(&c->sizes, c->dtype, r.problem);
    r.threads = b->threads;
    return r;
}

/* A rate above its ceiling shows that there was none: the keys lay in a cache, or the machine
 * was busy while the ceiling was measured. Such a row is given without. */
saccade_status bench_finish_row(bench *b, const bench_row *row, saccade_error *err)
{
    bench_row told = *row;
    if (told.of_ceiling > 1)
        told.ceiling = told.of_ceiling = NAN;
    cli_progress(NULL);
    bench_print_row(&told);
    return bench_add(&b->table, &told, err);
}

/* f16 has instructions of its own on no CPU here: it becomes f32, or on tiles three products of
 * bf16. On a device f32 products are three of tf32, which runs at half of bf16's rate. */
double bench_product_ceiling(const bench *b, saccade_dtype dtype)
{
    if (b->on_device)
        return b->device_ceilings.bf16_gflops / (dtype == SACCADE_F32 ? 6 : 1);
    if (dtype == SACCADE_F16 && strcmp(b->level, "amx") == 0)
        return b->ceilings.bf16_gflops / 3;
    return dtype == SACCADE_BF16 ? b->ceilings.bf16_gflops : b->ceilings.fma_gflops;
}

void bench_rate(const bench *b, const bench_case *c, double live, double memory_gbytes_per_s,
                bench_row *r)
{
    const saccade_sizes *s = &c->sizes;
    const double seconds = 1e-3 * r->ms;
    const double rows = (double)s->B * (double)s->H * (double)s->Q;
    r->gflops = 2e-9 * (double)(s->D + s->Dv) * live / seconds;
    if (!is_by_memory(c)) {
        const double most = bench_product_ceiling(b, c->dtype);
        if (most > 0) { /* it was measured */
            r->ceiling = most;
            r->of_ceiling = r->gflops / most;
        }
        return;
    }
    const double bytes = (double)saccade_dtype_bytes(c->dtype) * (double)(s->D + s->Dv);
    const double keys = live / rows * (double)s->B * (double)s->Hkv;
    r->gbytes_per_s = 1e-9 * bytes * keys / seconds;
    r->ceiling = memory_gbytes_per_s;
    r->of_ceiling = r->gbytes_per_s / r->ceiling;
}

cli_args bench_case_args(const bench_case *c)
{
    cli_args args = {.scale = NAN, .kv_len = c->kv_len};
    variant_apply(&c->text, &args);
    if (c->sizes.Q < c->sizes.KV)
        args.q_offset = "end";
    return args;
}

static saccade_status mask_once(const bench *b, const job *j, double *seconds,
                                saccade_block_mask_stats *stats, saccade_error *err)
{
    saccade_block_mask *mask;
    const double begin = cli_seconds();
    CLI_TRY(job_block_mask(j, b->context, 128, 128, &mask, err));
    *seconds = cli_seconds() - begin;
    saccade_block_mask_stats_init(stats);
    const saccade_status status = saccade_block_mask_get_stats(mask, stats, err);
    saccade_block_mask_destroy(mask);
    return status;
}

saccade_status bench_set_sparsity(const bench *b, const bench_case *c, bench_row *row,
                                  saccade_error *err)
{
    const cli_args args = bench_case_args(c);
    saccade_block_mask_stats stats = {0};
    double seconds;
    job j;
    if (!args.mask)
        return SACCADE_OK;
    CLI_TRY(job_open(&args, &c->sizes, &j, err));
    const saccade_status status = mask_once(b, &j, &seconds, &stats, err);
    job_close(&j);
    row->sparsity = stats.sparsity;
    return status;
}

static saccade_status time_backend(bench *b, const bench_case *c, const job *j,
                                   const job_tensors *t, const char *backend, double live,
                                   saccade_error *err)
{
    engine e;
    timing found;
    engine_options options = b->options;
    bench_row row = bench_start_row(b, c, backend);
    job_tensors asked = *t;
    asked.lse = (saccade_tensor){.dtype = SACCADE_NONE}; /* as inference asks, and PyTorch */
    options.backend = backend;
    CLI_TRY(engine_open(j, &options, &asked, &e, err));
    const saccade_status status = time_engine(b, &e, is_by_memory(c) ? t : NULL, &found, err);
    engine_close(&e);
    CLI_TRY(status);
    row.ms = 1e3 * found.seconds;
    bench_rate(b, c, live, found.read_gbytes_per_s, &row);
    CLI_TRY(bench_set_sparsity(b, c, &row, err));
    if (b->dense_gflops > 0 && row.sparsity < 1) {
        const saccade_sizes *s = &c->sizes;
        const double all = (double)s->B * (double)s->H * (double)s->Q * (double)s->KV;
        row.ceiling = b->dense_gflops * live / (all * (1 - row.sparsity));
        row.of_ceiling = row.gflops / row.ceiling;
    }
    if (b->scaled_gflops > 0) {
        row.ceiling = b->scaled_gflops;
        row.of_ceiling = row.gflops / row.ceiling;
    }
    return bench_finish_row(b, &row, err);
}

static saccade_status time_on(bench *b, const bench_case *c, const char *backend,
                              saccade_error *err)
{
    const cli_args args = bench_case_args(c);
    double live;
    job_tensors t = {.q = {.data = NULL}};
    job j;
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
    const bench_case small = for_plain(c);
    const char *backend = b->options.backend ? b->options.backend : "auto";
    const bool is_slow = strcmp(backend, "ref") == 0 || strcmp(backend, "plain") == 0;
    CLI_TRY(time_on(b, is_slow ? &small : c, backend, err));
    return b->args->baseline ? time_on(b, &small, "plain", err) : SACCADE_OK;
}

/* ---- rows that time something else than a run ---- */

saccade_status bench_time_mask(bench *b, const bench_case *c, saccade_error *err)
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
    bench_row row = bench_start_row(b, c, "cpu");
    row.ms = 1e3 * bench_median(seconds, RUNS);
    row.sparsity = stats.sparsity;
    return bench_finish_row(b, &row, err);
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

/* The first time, which is what counts, and the median of the others. */
saccade_status bench_time_compile(bench *b, const bench_case *c, saccade_error *err)
{
    enum { RUNS = 9 };
    cli_args args = {.scale = NAN};
    double seconds[RUNS];
    char name[48];
    bench_case named = *c;
    variant_apply(&c->text, &args);
    for (int i = 0; i < RUNS; i++)
        CLI_TRY(compile_once(b, c, &args, &seconds[i], err));
    const double first = seconds[0], again = bench_median(seconds + 1, RUNS - 1);
    named.text.name = name;
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s%s", c->text.name, i ? ", again" : ", first");
        bench_row row = bench_start_row(b, &named, b->options.backend);
        row.ms = 1e3 * (i ? again : first);
        CLI_TRY(bench_finish_row(b, &row, err));
    }
    return SACCADE_OK;
}

saccade_status bench_host_cases(bench *b, const bench_case *cases, int n, saccade_error *err)
{
    const double fair = 60.0 / n / (b->args->baseline ? 2 : 1);
    b->row_seconds = fair < 10 ? fair : 10;
    for (int i = 0; i < n; i++)
        CLI_TRY(time_case(b, &cases[i], err));
    return SACCADE_OK;
}
