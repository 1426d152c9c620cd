/* Rows of gradients: large heads in every dtype, variants against full attention's own rate,
 * gradients of captured tensors against the same run without them. */
#include "bench.h"
#include "engine_backward.h"
#include "floats.h"

#include <string.h>

enum { REPEATS = 9 };

static const uint32_t inputs = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;

/* One run: by the device's own clock on a device, with L2 overwritten before it. */
static saccade_status time_once(backward *g, engine *e, saccade_device_timer *timer,
                                double *seconds, saccade_error *err)
{
    if (!timer)
        return backward_run(g, e, seconds, err);
    CLI_TRY(saccade_device_timer_begin(timer, NULL, 1, err));
    CLI_TRY(saccade_backward(e->plan, &g->args, err));
    return saccade_device_timer_end(timer, NULL, seconds, err);
}

/* Medians of as many runs as fit after a warm-up, which counts when it fills the time. */
static saccade_status time_runs(const bench *b, backward *g, engine *e,
                                saccade_device_timer *timer, double *out, saccade_error *err)
{
    double seconds[1000], first;
    const int most = b->args->repeats ? (int)b->args->repeats : REPEATS;
    int n = 0;
    const double begin = cli_seconds();
    CLI_TRY(time_once(g, e, timer, &first, err));
    seconds[0] = first;
    for (double room = b->row_seconds / 2; n < most && cli_seconds() - begin < room; n++) {
        CLI_TRY(time_once(g, e, timer, &seconds[n], err));
        room = b->row_seconds;
    }
    *out = bench_median(seconds, n ? n : 1);
    return SACCADE_OK;
}

static saccade_status time_engine(const bench *b, const job *j, const engine_options *options,
                                  const job_tensors *t, double *seconds, saccade_error *err)
{
    backward g = {.n = 0};
    saccade_device_timer *timer = NULL;
    engine e;
    CLI_TRY(engine_open(j, options, t, &e, err));
    saccade_status status = engine_run(&e, NULL, err);
    if (status == SACCADE_OK && b->on_device)
        status = saccade_device_timer_create(0, &timer, err);
    if (status == SACCADE_OK)
        status = backward_new(t, 1, &g, err);
    for (int i = 0; options->grad_of && i < options->grad_of->n && status == SACCADE_OK; i++)
        status = backward_add_capture(&g, j, options->grad_of->item[i], t->q.dtype, true,
                                      "bench", err);
    if (status == SACCADE_OK)
        status = backward_bind(&g, &e, err);
    if (status == SACCADE_OK)
        status = time_runs(b, &g, &e, timer, seconds, err);
    saccade_device_timer_destroy(timer);
    backward_free(&g);
    engine_close(&e);
    return status;
}

/* A row whose ceiling is `ceiling` in GFLOP/s, or that of products if it is 0. *gflops: its
 * rate. */
static saccade_status time_case(bench *b, const bench_case *c, int with_captures,
                                double ceiling, double *gflops, saccade_error *err)
{
    const cli_args args = bench_case_args(c);
    const saccade_sizes *s = &c->sizes;
    bench_row row = bench_start_row(b, c, b->options.backend);
    engine_options options = b->options;
    options.page = 0; /* forward alone is timed over pages */
    job_tensors t = {.q = {.data = NULL}};
    cli_list captures;
    double live, seconds = NAN;
    job j;
    cli_progress("%s %s", b->suite, c->text.name);
    CLI_TRY(job_open(&args, s, &j, err));
    backward_captures(&j, 0, &captures);
    options.gradients = inputs;
    if (with_captures && captures.n) {
        options.gradients |= SACCADE_GRADIENT_CAPTURES;
        options.grad_of = &captures;
    }
    saccade_status status = job_live_scores(&j, b->context, &live, err);
    if (status == SACCADE_OK)
        status = job_tensors_new(s, c->dtype, 1, &t, err);
    if (status == SACCADE_OK)
        status = time_engine(b, &j, &options, &t, &seconds, err);
    job_tensors_free(&t);
    job_close(&j);
    CLI_TRY(status);
    row.ms = 1e3 * seconds;
    row.gflops = 1e-9 * (double)(6 * s->D + 4 * s->Dv) * live / seconds;
    row.ceiling = ceiling > 0 ? ceiling : bench_product_ceiling(b, c->dtype);
    row.of_ceiling = row.ceiling > 0 ? row.gflops / row.ceiling : NAN;
    CLI_TRY(bench_set_sparsity(b, c, &row, err));
    *gflops = row.gflops;
    return bench_finish_row(b, &row, err);
}

static saccade_status time_dense(bench *b, saccade_error *err)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    const int64_t n = b->on_device ? 8192 : 2048;
    double rate;
    for (int i = b->on_device ? 4 : 0; i < 12; i++) { /* f32: host alone */
        const int64_t d = i % 4 < 2 ? 64 : 128;
        const bench_case c = {*variant_find(i % 2 ? "causal" : "full"),
                              {1, 16, 16, n, n, d, d},
                              dtypes[i / 4],
                              NULL};
        CLI_TRY(time_case(b, &c, 0, 0, &rate, err));
    }
    return SACCADE_OK;
}

static saccade_status time_variants(bench *b, saccade_dtype dtype, saccade_error *err)
{
    const int64_t n = b->on_device ? 8192 : 2048, heads = b->on_device ? 16 : 8;
    double full = 0, rate;
    for (int i = 0; i < VARIANTS; i++) {
        const bench_case c = {(b->on_device ? cli_long_variants : cli_variants)[i],
                              {1, heads, heads, n, n, 64, 64},
                              dtype,
                              NULL};
        CLI_TRY(time_case(b, &c, 0, i ? full : 0, &rate, err));
        full = i ? full : rate;
    }
    return SACCADE_OK;
}

/* Each with its values alone, then with their gradients. */
static saccade_status time_captures(bench *b, saccade_dtype dtype, saccade_error *err)
{
    static const cli_variant scores[] = {
        {"w[h] * score", NULL, "score * w[h]", "w=f32[H]:normal"},
        {"t[h, q - kv + c]", NULL, "score + t[h, q - kv + KV]", "t=f32[H,8200]:normal"},
        {"t5_bias", NULL, "t5_bias(t, 32, 128)", "t=f32[32,H]:normal"},
        {"relative_table_2d", NULL, "relative_table_2d(t, 64, 64)", "t=f32[H,16129]:normal"},
        {"bias[b, h, q, kv]", NULL, "score + bias[b, h, q, kv]", "bias=f32[B,H,Q,KV]:normal"},
        {"the same in bf16", NULL, "score + bias[b, h, q, kv]", "bias=bf16[B,H,Q,KV]:normal"},
    };
    for (size_t i = 0; i < sizeof scores / sizeof scores[0]; i++) {
        char name[48];
        const int64_t n = b->on_device && i < 4 ? 4096 : 2048, heads = b->on_device ? 16 : 8;
        const int64_t batch = b->on_device ? 2 : 1;
        bench_case c = {scores[i], {batch, heads, heads, n, n, 64, 64}, dtype, NULL};
        double without, rate;
        CLI_TRY(time_case(b, &c, 0, 0, &without, err));
        snprintf(name, sizeof name, "%s, gradient", scores[i].name);
        c.text.name = name;
        CLI_TRY(time_case(b, &c, 1, without, &rate, err));
    }
    return SACCADE_OK;
}

saccade_status bench_suite_backward(bench *b, saccade_error *err)
{
    enum { ROWS = 12 + 2 * VARIANTS + 24 };
    b->row_seconds = 60.0 / ROWS;
    CLI_TRY(time_dense(b, err));
    if (b->on_device) {
        CLI_TRY(time_variants(b, SACCADE_BF16, err));
        return time_captures(b, SACCADE_BF16, err);
    }
    CLI_TRY(time_variants(b, SACCADE_F32, err));
    CLI_TRY(time_variants(b, SACCADE_BF16, err));
    CLI_TRY(time_captures(b, SACCADE_F32, err));
    return time_captures(b, SACCADE_BF16, err);
}
