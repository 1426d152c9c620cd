/* The problems of saccade bench: sizes that a CPU takes seconds for, and, on a device, those of
 * docs/performance.md. */
#include "bench.h"

#include <string.h>

static saccade_status time_cases(bench *b, const bench_case *cases, int n, saccade_error *err)
{
    return b->on_device ? bench_device_cases(b, cases, n, err)
                        : bench_host_cases(b, cases, n, err);
}

static saccade_status suite_paper(bench *b, saccade_error *err)
{
    static const saccade_sizes host[] = {{1, 4, 4, 8192, 8192, 64, 64},
                                         {1, 4, 1, 8192, 8192, 64, 64}};
    static const saccade_sizes device[] = {{4, 16, 16, 16384, 16384, 64, 64},
                                           {8, 16, 2, 16384, 16384, 64, 64}};
    bench_case cases[2 * VARIANTS];
    for (int i = 0; i < 2 * VARIANTS; i++)
        cases[i] = (bench_case){
            .text = (b->on_device ? cli_long_variants : cli_variants)[i % VARIANTS],
            .sizes = (b->on_device ? device : host)[i / VARIANTS],
            .dtype = SACCADE_BF16,
        };
    return time_cases(b, cases, 2 * VARIANTS, err);
}

static const cli_variant full = {"full", NULL, NULL, NULL};

/* Full and causal at each size. */
static saccade_status dense_on_device(bench *b, saccade_error *err)
{
    static const struct {
        saccade_sizes sizes;
        saccade_dtype dtype;
    } rows[] = {
        {{4, 16, 16, 16384, 16384, 64, 64}, SACCADE_BF16},
        {{2, 16, 16, 16384, 16384, 128, 128}, SACCADE_BF16},
        {{2, 32, 8, 8192, 8192, 128, 128}, SACCADE_BF16},
        {{8, 16, 16, 4096, 4096, 128, 128}, SACCADE_BF16},
        {{2, 8, 8, 8192, 8192, 256, 256}, SACCADE_BF16},
        {{2, 16, 16, 16384, 16384, 128, 128}, SACCADE_F16},
        {{1, 16, 16, 8192, 8192, 64, 64}, SACCADE_F32},
        {{1, 16, 16, 8192, 8192, 128, 128}, SACCADE_F32},
    };
    enum { N = 2 * sizeof rows / sizeof rows[0] };
    bench_case cases[N];
    for (int i = 0; i < N; i++)
        cases[i] = (bench_case){i % 2 ? *variant_find("causal") : full, rows[i / 2].sizes,
                                rows[i / 2].dtype, NULL};
    return time_cases(b, cases, N, err);
}

static saccade_status suite_dense(bench *b, saccade_error *err)
{
    if (b->on_device)
        return dense_on_device(b, err);
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    bench_case cases[6];
    for (int i = 0; i < 6; i++) {
        const int64_t d = i % 2 ? 128 : 64;
        cases[i] = (bench_case){full, {1, 16, 16, 4096, 4096, d, d}, dtypes[i / 2], NULL};
    }
    return time_cases(b, cases, 6, err);
}

/* docs/performance.md's six shapes, then variants of one of them, more rows, ragged lengths. */
static saccade_status decode_on_device(bench *b, saccade_error *err)
{
    const bench_case cases[] = {
        {full, {1, 32, 8, 1, 131072, 128, 128}, SACCADE_BF16, NULL},
        {full, {8, 32, 8, 1, 16384, 128, 128}, SACCADE_BF16, NULL},
        {*variant_find("causal"), {8, 32, 8, 1, 16384, 128, 128}, SACCADE_BF16, NULL},
        {*variant_find("alibi"), {8, 32, 8, 1, 16384, 128, 128}, SACCADE_BF16, NULL},
        {*variant_find("softcap"), {8, 32, 8, 1, 16384, 128, 128}, SACCADE_BF16, NULL},
        {full, {32, 32, 8, 1, 8192, 128, 128}, SACCADE_BF16, NULL},
        {full, {128, 32, 8, 1, 4096, 128, 128}, SACCADE_BF16, NULL},
        {full, {128, 32, 8, 1, 4096, 128, 128}, SACCADE_BF16, "3072"},
        {full, {16, 32, 32, 1, 8192, 128, 128}, SACCADE_BF16, NULL},
        {full, {16, 64, 8, 1, 32768, 128, 128}, SACCADE_BF16, NULL},
        {full, {16, 32, 8, 8, 8192, 128, 128}, SACCADE_BF16, NULL},
    };
    return time_cases(b, cases, sizeof cases / sizeof cases[0], err);
}

/* Keys of 8 heads whose K and V no cache holds: as many bytes as the ceiling read. */
static int64_t long_cache(const bench *b, int64_t dim, saccade_dtype dtype)
{
    return b->ceilings.read_bytes / (2 * 8 * dim * (int64_t)saccade_dtype_bytes(dtype));
}

/* `name` over a cache from memory: 8 heads of keys, `group` heads of queries to each. */
static bench_case decode_case(const bench *b, const char *name, int64_t group, int64_t Q,
                              int64_t d, saccade_dtype dtype)
{
    return (bench_case){
        *variant_find(name), {1, 8 * group, 8, Q, long_cache(b, d, dtype), d, d}, dtype, NULL};
}

/* Shapes of plain attention, ragged lengths, then the variants, MHA and GQA. */
static saccade_status suite_decode(bench *b, saccade_error *err)
{
    if (b->on_device)
        return decode_on_device(b, err);
    static const struct {
        int64_t group, Q, D;
        saccade_dtype dtype;
    } shapes[] = {
        {1, 1, 128, SACCADE_BF16}, {4, 1, 128, SACCADE_BF16}, {8, 1, 128, SACCADE_BF16},
        {4, 4, 128, SACCADE_BF16}, {8, 8, 128, SACCADE_BF16}, {4, 1, 64, SACCADE_BF16},
        {4, 1, 80, SACCADE_BF16},  {1, 1, 128, SACCADE_F32},  {4, 1, 128, SACCADE_F32},
        {8, 1, 128, SACCADE_F32},  {4, 4, 128, SACCADE_F32},  {4, 1, 128, SACCADE_F16},
        {8, 1, 128, SACCADE_F16},
    };
    enum { SHAPES = sizeof shapes / sizeof shapes[0], MODS = VARIANTS - 1 };
    bench_case cases[SHAPES + 1 + 2 * MODS];
    int n = 0;
    for (; n < SHAPES; n++)
        cases[n] =
            decode_case(b, "full", shapes[n].group, shapes[n].Q, shapes[n].D, shapes[n].dtype);
    const int64_t kv = long_cache(b, 128, SACCADE_BF16) / 16;
    char half[24];
    snprintf(half, sizeof half, "%lld", (long long)kv / 2);
    cases[n++] = (bench_case){full, {16, 32, 8, 1, kv, 128, 128}, SACCADE_BF16, half};
    for (int i = 0; i < 2 * MODS; i++) /* the first variant is full */
        cases[n++] = decode_case(b, cli_variants[1 + i % MODS].name, i < MODS ? 1 : 4, 1, 128,
                                 SACCADE_BF16);
    return time_cases(b, cases, n, err);
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
    enum { N = 18, BYTES = 96 };
    static const int shapes[][2] = {{64, 7},  {64, 13},  {64, 25},
                                    {128, 7}, {128, 13}, {128, 25}};
    char names[N][BYTES], masks[N][BYTES];
    bench_case cases[N];
    for (int i = 0; i < N; i++) {
        const int canvas = shapes[i / 3][0];
        natten_text(i % 3, canvas, shapes[i / 3][1], names[i], masks[i], BYTES);
        const int64_t n = canvas * canvas, heads = b->on_device ? 16 : 4;
        cases[i] = (bench_case){{names[i], masks[i], NULL, NULL},
                                {b->on_device ? 4 : 1, heads, heads, n, n, 64, 64},
                                SACCADE_BF16,
                                NULL};
    }
    return time_cases(b, cases, N, err);
}

/* Does time follow live blocks? A narrow window's rate against that of full attention, were it
 * spent on live blocks alone. */
static saccade_status mask_runs_in_proportion(bench *b, saccade_error *err)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16};
    for (int i = 0; i < 2; i++) {
        const bench_case cases[] = {
            {full, {1, 4, 4, 8192, 8192, 64, 64}, dtypes[i], NULL},
            {{"sliding_window 256", "sliding_window(256)", NULL, NULL},
             {1, 4, 4, 65536, 65536, 64, 64},
             dtypes[i],
             NULL},
        };
        CLI_TRY(time_cases(b, &cases[0], 1, err));
        b->dense_gflops = b->table.rows[b->table.n - 1].gflops;
        const saccade_status status = time_cases(b, &cases[1], 1, err);
        b->dense_gflops = 0;
        CLI_TRY(status);
    }
    return SACCADE_OK;
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
        CLI_TRY(bench_time_mask(b, &c, err));
        if (b->on_device)
            CLI_TRY(bench_device_prepare(b, &c, err));
    }
    return b->on_device ? SACCADE_OK : mask_runs_in_proportion(b, err);
}

static saccade_status compile_variants(bench *b, saccade_error *err)
{
    for (int i = 0; i < VARIANTS; i++) {
        bench_case c = {cli_variants[i], {1, 4, 4, 8192, 8192, 64, 64}, SACCADE_BF16, NULL};
        if (c.text.bind) /* only its dtype and rank are compiled; making it takes time too */
            c.text.bind = "doc=i32[1]:iota";
        CLI_TRY(bench_time_compile(b, &c, err));
    }
    return SACCADE_OK;
}

/* On a device code is kept on disk: the first time must not find it there, the others do. */
static saccade_status suite_compile(bench *b, saccade_error *err)
{
    char folder[64];
    if (!b->on_device)
        return compile_variants(b, err);
    CLI_TRY(bench_cache_new(folder, err));
    saccade_status status = compile_variants(b, err);
    for (int i = 0; i < 4 && status == SACCADE_OK; i++) {
        const int64_t d = i < 2 ? 128 : 256;
        const bench_case c = {i % 2 ? *variant_find("causal") : full,
                              {1, 16, 16, 8192, 8192, d, d},
                              SACCADE_BF16,
                              NULL};
        status = bench_time_compile(b, &c, err);
    }
    bench_cache_restore(folder);
    return status;
}

const bench_suite bench_suites[BENCH_SUITES] = {
    {"paper", suite_paper, true},
    {"dense", suite_dense, true},
    {"backward", bench_suite_backward, true},
    {"decode", suite_decode, true},
    {"mask", suite_mask, false},
    {"compile", suite_compile, false},
    {"natten", suite_natten, true},
    {"shapes", bench_suite_shapes, true},
};
