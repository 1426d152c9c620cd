/* The suite shapes: where the margin over others is thin. Many cores, small heads, short runs
 * and medium lengths, then how rates grow with threads; on a device short runs, narrow windows,
 * neighbourhoods, odd batches of decode and many documents. */
#include "bench.h"

#include <assert.h>

typedef struct shape {
    const char *variant, *mask, *bind; /* NULL: none */
    saccade_sizes sizes;
    saccade_dtype dtype;
} shape;

enum { MOST_SHAPES = 64 };

static bench_case case_of(const shape *s)
{
    return (bench_case){{s->variant, s->mask, NULL, s->bind}, s->sizes, s->dtype, NULL};
}

#define BF16 SACCADE_BF16
#define F32 SACCADE_F32

/* ---- on the host ---- */

static const shape host_shapes[] = {
    {"BERT", NULL, NULL, {16, 12, 12, 384, 384, 64, 64}, BF16},
    {"BERT", NULL, NULL, {16, 12, 12, 384, 384, 64, 64}, F32},
    {"ViT", NULL, NULL, {4, 16, 16, 729, 729, 72, 72}, BF16},
    {"ViT", NULL, NULL, {4, 16, 16, 729, 729, 72, 72}, F32},
    {"full", NULL, NULL, {1, 12, 12, 1536, 1536, 96, 96}, BF16},
    {"full", NULL, NULL, {1, 12, 12, 1536, 1536, 96, 96}, F32},
    {"causal", "causal()", NULL, {1, 28, 4, 1536, 1536, 128, 128}, BF16},
    {"causal", "causal()", NULL, {1, 28, 4, 1536, 1536, 128, 128}, F32},
    {"short", NULL, NULL, {1, 32, 8, 37, 37, 128, 128}, BF16},
    {"short", NULL, NULL, {1, 32, 8, 37, 37, 128, 128}, F32},
    {"short", NULL, NULL, {1, 32, 8, 128, 128, 128, 128}, BF16},
    {"short", NULL, NULL, {1, 32, 8, 128, 128, 128, 128}, F32},
    {"tiny heads", NULL, NULL, {1, 2, 2, 64, 64, 32, 32}, BF16},
    {"tiny heads", NULL, NULL, {1, 2, 2, 64, 64, 32, 32}, F32},
    {"medium", NULL, NULL, {1, 12, 12, 300, 300, 64, 64}, F32},
    {"medium", NULL, NULL, {1, 16, 16, 512, 512, 64, 64}, F32},
    {"medium", NULL, NULL, {2, 16, 16, 512, 512, 128, 128}, F32},
    {"medium", NULL, NULL, {1, 12, 12, 1024, 1024, 64, 64}, F32},
    {"medium", "causal()", NULL, {1, 16, 16, 1024, 1024, 128, 128}, F32},
    {"medium", NULL, NULL, {1, 16, 16, 1500, 1500, 64, 64}, F32},
    {"window 512", "sliding_window(512)", NULL, {1, 8, 2, 8192, 8192, 128, 128}, BF16},
    {"decode", NULL, NULL, {1, 32, 8, 1, 16384, 128, 128}, BF16},
    {"decode", NULL, NULL, {1, 32, 8, 1, 16384, 128, 128}, F32},
};

/* Rows that are timed on 1, 2, 4, .. threads. */
static const shape scaled_shapes[] = {
    {"dense", NULL, NULL, {1, 16, 16, 2048, 2048, 64, 64}, BF16},
    {"dense", NULL, NULL, {1, 16, 16, 2048, 2048, 64, 64}, F32},
    {"causal", "causal()", NULL, {1, 16, 16, 2048, 2048, 128, 128}, BF16},
    {"causal", "causal()", NULL, {1, 16, 16, 2048, 2048, 128, 128}, F32},
    {"window", "sliding_window(512)", NULL, {1, 16, 16, 4096, 4096, 64, 64}, BF16},
    {"window", "sliding_window(512)", NULL, {1, 16, 16, 4096, 4096, 64, 64}, F32},
    {"documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(12)",
     {1, 16, 16, 4096, 4096, 64, 64},
     BF16},
    {"documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(12)",
     {1, 16, 16, 4096, 4096, 64, 64},
     F32},
    {"BERT", NULL, NULL, {16, 12, 12, 384, 384, 64, 64}, BF16},
    {"BERT", NULL, NULL, {16, 12, 12, 384, 384, 64, 64}, F32},
};
enum { SCALED = sizeof scaled_shapes / sizeof scaled_shapes[0] };

/* What one thread does, and what products gave it. */
typedef struct alone {
    double gflops, peak;
} alone;

/* A row's ceiling is one thread's rate times what the machine's products gained: of_ceiling is
 * the parallel efficiency. */
static saccade_status time_scaled(bench *b, const shape *s, alone *one, saccade_error *err)
{
    const bench_case c = case_of(s);
    const double peak = bench_product_ceiling(b, s->dtype);
    b->scaled_gflops = one->gflops * peak / one->peak;
    const saccade_status status = bench_host_cases(b, &c, 1, err);
    b->scaled_gflops = 0;
    CLI_TRY(status);
    if (one->gflops == 0)
        *one = (alone){b->table.rows[b->table.n - 1].gflops, peak};
    return SACCADE_OK;
}

static saccade_status time_on_threads(bench *b, alone ones[SCALED], saccade_error *err)
{
    saccade_ceilings all = b->ceilings;
    saccade_context *context = b->context;
    CLI_TRY(engine_context(b->threads, b->options.level, &b->context, err));
    saccade_ceilings_init(&b->ceilings);
    saccade_status status = saccade_measure_ceilings(b->context, &b->ceilings, err);
    for (int i = 0; i < SCALED && status == SACCADE_OK; i++)
        status = time_scaled(b, &scaled_shapes[i], &ones[i], err);
    saccade_context_destroy(b->context);
    b->context = context;
    b->ceilings = all;
    return status;
}

/* Powers of two up to all threads, and those. */
static saccade_status time_scaling(bench *b, saccade_error *err)
{
    const int all = b->threads, asked = b->options.threads;
    alone ones[SCALED] = {{0}};
    saccade_status status = SACCADE_OK;
    for (int n = 1, last = 0; !last && status == SACCADE_OK; n *= 2) {
        last = n >= all;
        b->threads = last ? all : n;
        b->options.threads = b->threads;
        status = time_on_threads(b, ones, err);
    }
    b->threads = all;
    b->options.threads = asked;
    return status;
}

/* ---- on a device ---- */

static const shape device_shapes[] = {
    {"short", NULL, NULL, {1, 16, 16, 1024, 1024, 64, 64}, BF16},
    {"short, causal", "causal()", NULL, {1, 16, 16, 1024, 1024, 64, 64}, BF16},
    {"short", NULL, NULL, {1, 16, 16, 512, 512, 128, 128}, BF16},
    {"short, causal", "causal()", NULL, {1, 16, 16, 512, 512, 128, 128}, BF16},
    {"short", NULL, NULL, {4, 32, 8, 512, 512, 128, 128}, BF16},
    {"short, causal", "causal()", NULL, {4, 32, 8, 512, 512, 128, 128}, BF16},
    {"short, causal", "causal()", NULL, {32, 16, 16, 512, 512, 64, 64}, BF16},
    {"window 128", "sliding_window(128)", NULL, {1, 64, 8, 8192, 8192, 64, 64}, BF16},
    {"13x13 of 128x128",
     "natten_2d(128, 128, 13, 13)",
     NULL,
     {4, 16, 16, 16384, 16384, 64, 64},
     BF16},
    {"decode", NULL, NULL, {64, 32, 4, 1, 3000, 128, 128}, BF16},
    {"decode", NULL, NULL, {256, 16, 2, 1, 2048, 128, 128}, BF16},
    {"12 documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(12)",
     {1, 16, 16, 32768, 32768, 64, 64},
     BF16},
    {"200 documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(200)",
     {1, 16, 16, 32768, 32768, 64, 64},
     BF16},
    {"2000 documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(2000)",
     {1, 16, 16, 32768, 32768, 64, 64},
     BF16},
    {"12 documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(12)",
     {1, 16, 16, 32768, 32768, 128, 128},
     BF16},
    {"200 documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(200)",
     {1, 16, 16, 32768, 32768, 128, 128},
     BF16},
    {"2000 documents",
     "document(doc) && causal()",
     "doc=i32[KV]:docs(2000)",
     {1, 16, 16, 32768, 32768, 128, 128},
     BF16},
};

/* ---- both ---- */

static int list(const shape *shapes, int n, bench_case cases[MOST_SHAPES])
{
    for (int i = 0; i < n; i++)
        cases[i] = case_of(&shapes[i]);
    return n;
}

saccade_status bench_suite_shapes(bench *b, saccade_error *err)
{
    enum {
        HOST = sizeof host_shapes / sizeof host_shapes[0],
        DEVICE = sizeof device_shapes / sizeof device_shapes[0],
    };
    static_assert((int)HOST <= (int)MOST_SHAPES && (int)DEVICE <= (int)MOST_SHAPES,
                  "room for all");
    bench_case cases[MOST_SHAPES];
    if (b->on_device)
        return bench_device_cases(b, cases, list(device_shapes, DEVICE, cases), err);
    CLI_TRY(bench_host_cases(b, cases, list(host_shapes, HOST, cases), err));
    return time_scaling(b, err);
}
