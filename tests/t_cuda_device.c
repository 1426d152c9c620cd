/* CUDA kernels on a device: chosen cases, random ones, scores that climb in every way that
 * offsets must follow, addresses and strides of every kind, graphs, and that a run allocates
 * nothing. SACCADE_CUDA_CASES and SACCADE_CUDA_SEED: how many random cases, and which. An
 * argument chooses tests by name (tools/cuda-sanitize). */
#include "support/chunk_case.h"
#include "support/device_case.h"
#include "support/fail_alloc.h"
#include "support/problem_case.h"

#include "base/convert.h"
#include "cuda/cuda.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const device_options native = {0}, blocks = {.has_block_mask = 1};
static const device_options ptx = {.arch = "compute_80"};

/* Cases are small, and small tiles would take nearly all: other tests than these take large
 * ones, or what main() was started with. */
#define TILES "SACCADE_CUDA_TILES"
static const char *const tile_sizes[] = {"small", "large"};
static char usual_tiles[16] = "large";

/* ---- chosen cases ---- */

/* Every kernel once, small: this is what tools/cuda-sanitize runs. */
static void few_of_each(void **state)
{
    static const struct {
        forward_case c;
        device_options o;
    } rows[] = {
        {{.problem = "b1 h2 q200 kv300 d64 bf16", .mask = "causal()"}, {.has_block_mask = 1}},
        {{.problem = "b1 h2/1 q130 kv200 d128 f16", .mask = "document(doc)"}, {0}},
        {{.problem = "b1 h1 q70 kv130 d256 bf16", .score = "softcap(20)"}, {0}},
        {{.problem = "b1 h1 q200 kv600 d64 bf16", .data = CASE_JUMP}, {0}},
        {{.problem = "b2 h4/2 q2 kv300 d128 bf16", .kv_len = 257}, {0}},
        {{.problem = "b1 h4/2 q2 kv300 d64 bf16", .mask = "kv / 70 % (h + 1) == 0"},
         {.has_block_mask = 1}},
        {{.problem = "b1 h8/2 q1 kv500 d128 bf16", .mask = "kv >= 37"}, {0}},
        {{.problem = "b40 h8/4 q1 kv40 d64 bf16"}, {0}},
        {{.problem = "b1 h2 q70 kv100 d64 bf16", .score = "alibi()"}, {.shift = 1}},
        {{.problem = "b1 h2 q70 kv100 d36 dv50 bf16", .mask = "causal()"}, {0}},
        {{.problem = "b1 h2 q70 kv100 d128 f16"}, {.arch = "compute_80"}},
        {{.problem = "b1 h2 q70 kv100 d64 f32", .mask = "document(doc)"}, {0}},
        {{.problem = "b1 h1 q70 kv100 d256 f32"}, {0}},
    };
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int k = 0; k < 2; k++) {
        setenv(TILES, tile_sizes[k], 1);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
            n_bad += !device_case_holds(&rows[i].c, &rows[i].o);
    }
    setenv(TILES, usual_tiles, 1);
    print_message("few_of_each: %d cases twice\n", (int)(sizeof rows / sizeof rows[0]));
    assert_int_equal(n_bad, 0);
}

static void halves(void **state)
{
    static const forward_case cases[] = {
        {.problem = "b2 h4/2 q130 kv300 d64 bf16"},
        {.problem = "b2 h4/2 q130 kv300 d64 bf16", .mask = "causal()", .q_offset = 170},
        {.problem = "b1 h2 q200 kv260 d128 f16", .mask = "sliding_window(W)"},
        {.problem = "b1 h4 q300 kv300 d64 bf16", .score = "alibi()", .mask = "causal()"},
        {.problem = "b1 h3 q100 kv200 d64 bf16", .score = "score + float(kv - q) / float(h)"},
        {.problem = "b1 h2 q100 kv200 d256 bf16", .score = "softcap(20)"},
        {.problem = "b1 h2 q200 kv2900 d64 bf16", .score = "softcap(20)", .data = CASE_WIDE},
        {.problem = "b1 h2 q200 kv900 d64 bf16", .score = "softcap(50)"},
        {.problem = "b1 h2 q200 kv900 d128 f16", .score = "softcap(5)"},
        {.problem = "b1 h2 q300 kv300 d128 bf16", .mask = "document(doc) && causal()"},
        {.problem = "b1 h2 q90 kv400 d128 dv64 bf16", .kv_len = 333},
        {.problem = "b2 h8/2 q1 kv500 d128 bf16", .mask = "causal()", .q_offset = 499},
        {.problem = "b2 h8/2 q3 kv500 d64 bf16", .kv_len = 257},
        {.problem = "b2 h8/2 q1 kv500 d256 bf16", .mask = "document(doc)", .q_offset = 130},
        {.problem = "b2 h8/2 q1 kv900 d128 bf16", .mask = "kv / 90 % (h + 1) == 0"},
        {.problem = "b1 h8/2 q7 kv700 d128 f16", .mask = "kv <= q + 50 * h", .kv_len = 650},
        {.problem = "b1 h16/2 q1 kv3000 d64 bf16",
         .mask = "kv <= q && (h % 2 == 0 || q - kv < 64)",
         .q_offset = 2990},
        {.problem = "b1 h16/2 q2 kv3000 d64 bf16",
         .mask = "kv <= q && (h % 3 == 0 || q - kv < 64)",
         .q_offset = 2990},
        {.problem = "b2 h6/2 q2 kv1500 d256 bf16",
         .mask = "b == 0 && h == 4 ? kv / 100 == 7 : h / 3 == 1 && kv % 200 < 9"},
        {.problem = "b1 h16/2 q200 kv300 d64 bf16",
         .mask = "kv <= q && (h % 2 == 0 || q - kv < 64)"},
        {.problem = "b2 h8/2 q1 kv500 d256 bf16", .mask = "kv % 3 != q"},
        {.problem = "b2 h8/2 q7 kv900 d128 f16", .mask = "kv >= 500 && kv < 510"},
        {.problem = "b5 h12/4 q5 kv700 d80 dv40 bf16", .score = "alibi()"},
        {.problem = "b40 h8/4 q1 kv90 d128 bf16", .mask = "causal()"},
        /* more spans than multiprocessors, of unequal lengths, some without a key */
        {.problem = "b60 h16/8 q1 kv300 d64 bf16", .mask = "kv < 4 * b", .kv_len = 257},
        {.problem = "b50 h32/8 q3 kv200 d128 f16",
         .score = "alibi()",
         .mask = "kv % 5 != 3",
         .kv_len = 190},
        {.problem = "b40 h8 q1 kv700 d256 bf16", .kv_len = 650},
        {.problem = "b1 h2 q100 kv100 d64 bf16", .mask = "q > kv && kv % 3 == 0"},
        /* few queries that leave decode, to small tiles and to large ones */
        {.problem = "b40 h8 q64 kv64 d64 bf16", .mask = "kv <= q"},
        {.problem = "b8 h8 q64 kv512 d256 bf16", .mask = "kv <= q + 448"},
        {.problem = "b8 h17 q33 kv2200 d128 bf16", .mask = "kv <= q + 2167"},
    };
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        n_bad += !device_case_holds(&cases[i], &native);
        if (cases[i].mask)
            n_bad += !device_case_holds(&cases[i], &blocks);
    }
    assert_int_equal(n_bad, 0);
}

static void f32(void **state)
{
    static const forward_case cases[] = {
        {.problem = "b2 h4/2 q130 kv300 d64 f32"},
        {.problem = "b2 h4/2 q130 kv300 d64 f32", .mask = "causal()", .q_offset = 170},
        {.problem = "b1 h2 q200 kv260 d128 f32", .mask = "sliding_window(W)"},
        {.problem = "b1 h4 q300 kv300 d64 f32", .score = "alibi()", .mask = "causal()"},
        {.problem = "b1 h2 q100 kv200 d256 f32", .score = "softcap(20)"},
        {.problem = "b1 h2 q300 kv300 d256 f32", .mask = "document(doc) && causal()"},
        {.problem = "b1 h2 q90 kv400 d40 dv136 f32", .kv_len = 333, .mask = "causal()"},
        {.problem = "b1 h2 q90 kv400 d256 dv20 f32", .layout = CASE_BNHD},
        {.problem = "b2 h8/2 q1 kv500 d128 f32", .mask = "causal()", .q_offset = 499},
        {.problem = "b1 h2 q100 kv150 d33 dv50 f32", .mask = "causal()"},
        {.problem = "b2 h4/2 q70 kv150 d130 dv250 f32", .layout = CASE_PADDED},
        {.problem = "b1 h2 q100 kv100 d64 f32", .scale = -0.25f, .score = "score * h_scale[h]"},
        {.problem = "b1 h2 q20 kv20 d8 f32", .mask = "causal()", .seed = 1},
        {.problem = "b1 h2 q20 kv20 d64 f32", .mask = "causal()", .seed = 2},
        {.problem = "b2 h4 q9 kv9 d64 f32", .mask = "kv == q", .seed = 3}, /* V as it is */
    };
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        n_bad += !device_case_holds(&cases[i], &native);
        n_bad += !device_case_holds(&cases[i], &ptx);
    }
    assert_int_equal(n_bad, 0);
}

/* Offsets must follow whatever the scores do. */
static void climbs(void **state)
{
    static const case_data data[] = {CASE_ASCENDING, CASE_DOMINANT, CASE_WIDE, CASE_LOW,
                                     CASE_CLIFF,     CASE_JUMP,     CASE_ZERO};
    static const struct {
        const char *problem, *mask, *score;
    } rows[] = {{"b1 h2 q200 kv600 d64 bf16", NULL, NULL},
                {"b1 h2 q600 kv600 d128 bf16", "causal()", NULL},
                {"b1 h2 q200 kv600 d64 bf16", NULL, "score + 2.0 * (kv - q)"},
                {"b1 h2 q200 kv600 d128 f16", NULL, "softcap(1000)"},
                {"b1 h2 q200 kv600 d64 bf16", "causal()", "softcap(20)"},
                {"b1 h2 q200 kv600 d256 bf16", "kv >= q", NULL},
                {"b1 h2 q200 kv600 d64 f32", "causal()", NULL},
                {"b2 h8/2 q2 kv600 d128 bf16", NULL, NULL},
                {"b60 h3 q1 kv100 d64 bf16", NULL, NULL}};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (size_t k = 0; k < sizeof data / sizeof data[0]; k++) {
            const forward_case c = {.problem = rows[i].problem,
                                    .mask = rows[i].mask,
                                    .score = rows[i].score,
                                    .data = data[k],
                                    .seed = k};
            n_bad += !device_case_holds(&c, &native);
        }
    assert_int_equal(n_bad, 0);
}

/* Small tiles by two teams, from one piece of keys to many, with rows that have to be made
 * again; and as runs choose them themselves. */
static void pairs(void **state)
{
    static const char *const problems[] = {
        "b1 h2 q200 kv600 d64 bf16",       "b1 h2 q200 kv600 d128 bf16",
        "b2 h4/2 q70 kv128 d40 dv64 bf16", "b1 h4/2 q65 kv96 d128 dv72 bf16",
        "b1 h2 q64 kv129 d64 bf16",        "b3 h8/2 q130 kv1100 d64 bf16"};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int n = 0; n < 2; n++)
        n_bad += !device_case_holds(
            &(forward_case){.problem = n ? "b1 h3 q70 kv1030 d128 bf16"
                                         : "b1 h3 q70 kv1030 d64 bf16"},
            &native);
    setenv("SACCADE_CUDA_TILES", "pair", 1);
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        for (int data = 0; data < CASE_DATA; data++) {
            const forward_case c = {.problem = problems[i],
                                    .data = (case_data)data,
                                    .kv_len = data % 2 ? 0 : 90,
                                    .scale = data % 3 ? 0 : -0.2f};
            n_bad += !device_case_holds(&c, &native);
        }
    unsetenv("SACCADE_CUDA_TILES");
    assert_int_equal(n_bad, 0);
}

/* Heads whose keys stay in shared memory: every number of pieces and of buffers, KV heads that
 * several CTAs share or that change within one, batches with few keys or none, rows that have
 * to be made again. */
static void keys_that_stay(void **state)
{
    static const char *const problems[] = {
        "b2 h5 q300 kv77 d64 bf16",          "b3 h8/2 q130 kv77 d40 bf16",
        "b2 h3 q500 kv200 d64 f16",          "b1 h2 q700 kv256 d128 bf16",
        "b2 h6/3 q257 kv150 d72 dv40 bf16",  "b40 h12/4 q200 kv5 d128 f16",
        "b2 h4/2 q140 kv240 d16 dv120 bf16", "b64 h6 q130 kv197 d64 bf16"};
    static const char *const scores[] = {NULL, "alibi()", "score + h_scale[h]", NULL};
    static const int32_t lengths[] = {0, 2, -1, -61}; /* rising ones too, from 0 */
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    setenv("SACCADE_CUDA_TILES", "small", 1);
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        for (int data = 0; data < CASE_DATA; data++) {
            const forward_case c = {.problem = problems[i],
                                    .score = scores[(i + (size_t)data) % 4],
                                    .data = (case_data)data,
                                    .kv_len = lengths[(i + (size_t)data) % 4],
                                    .scale = data % 4 == 3 ? -0.2f : 0};
            n_bad += !device_case_holds(&c, &native);
        }
    unsetenv("SACCADE_CUDA_TILES");
    for (size_t i = 0; i < 3; i++)
        n_bad += !device_case_holds(&(forward_case){.problem = problems[i]}, &native);
    assert_int_equal(n_bad, 0);
}

/* Spans of up to 64 rows, whose keys other warps load: rows of every number of warps, heads
 * that end within a warp's, whole spans, parts of spans that few or many CTAs join, masks by
 * limits, by lists and by blocks, rows that have to be made again. */
static void wide_spans(void **state)
{
    static const forward_case cases[] = {
        {.problem = "b2 h8/2 q5 kv300 d64 bf16"},
        {.problem = "b1 h8/2 q16 kv3000 d128 bf16", .mask = "causal()", .q_offset = 2984},
        {.problem = "b3 h12/4 q7 kv900 d128 f16", .score = "alibi()"},
        {.problem = "b2 h6/2 q21 kv700 d256 bf16", .mask = "sliding_window(W)"},
        {.problem = "b2 h4/2 q17 kv500 d80 dv40 bf16", .kv_len = 333},
        {.problem = "b60 h16/2 q8 kv200 d64 f16", .mask = "kv < 4 * b", .kv_len = 190},
        {.problem = "b40 h16/4 q9 kv333 d128 bf16", .score = "softcap(20)"},
        {.problem = "b1 h64 q33 kv1500 d64 bf16", .mask = "document(doc)"},
        {.problem = "b1 h4/1 q16 kv9000 d64 bf16", .mask = "kv / 90 % (h + 1) == 0"},
        {.problem = "b1 h8/2 q9 kv3000 d64 bf16",
         .mask = "kv <= q && (h % 3 == 0 || q - kv < 64)",
         .q_offset = 2990},
        {.problem = "b2 h8/2 q7 kv900 d128 f16", .mask = "kv >= 500 && kv < 510"},
        /* the last rows see nothing, those before them more than the first */
        {.problem = "b1 h2 q64 kv700 d64 bf16",
         .mask = "kv >= q + q && kv <= q + 300",
         .q_offset = 250},
        {.problem = "b2 h8/2 q11 kv500 d256 bf16", .mask = "kv % 3 != q"},
        {.problem = "b2 h71/1 q1 kv700 d64 bf16"},
        {.problem = "b2 h16/2 q30 kv700 d64 bf16", .mask = "causal()", .q_offset = 600},
        {.problem = "b3 h24/8 q31 kv400 d128 f16", .kv_len = 390},
        {.problem = "b1 h200/2 q1 kv2100 d128 bf16", .score = "score + h_scale[h]"},
        {.problem = "b30 h12/4 q6 kv0 d64 bf16"},
        /* heads wider than 256: two warps share a row */
        {.problem = "b2 h16/1 q3 kv500 d576 dv512 bf16"},
        {.problem = "b1 h5/1 q40 kv700 d320 dv296 f16", .mask = "causal()", .q_offset = 600},
        {.problem = "b2 h6/3 q9 kv200 d64 dv304 bf16", .mask = "document(doc)"},
        {.problem = "b2 h40/2 q1 kv1500 d512 bf16", .score = "alibi()", .kv_len = 1400},
        {.problem = "b1 h4/2 q200 kv90 d264 dv64 bf16", .mask = "sliding_window(W)"},
        {.problem = "b2 h8/1 q3 kv300 d320 dv48 bf16"},
        {.problem = "b1 h4/2 q2 kv200 d272 dv8 f16"},
        {.problem = "b1 h2 q64 kv40 d16 bf16", .mask = "q > kv && kv % 3 == 0"}};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    setenv(TILES, "decode", 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int data = 0; data < CASE_DATA; data++) {
            forward_case c = cases[i];
            c.data = (case_data)data;
            n_bad += !device_case_holds(&c, &native);
        }
    setenv(TILES, usual_tiles, 1);
    assert_int_equal(n_bad, 0);
}

/* Heads wider than 256 whose values are the first columns of their keys. */
static void latent_heads(void **state)
{
    static const forward_case cases[] = {
        {.problem = "b2 h16/1 q3 kv500 d576 dv512 bf16"},
        {.problem = "b3 h128/1 q1 kv1000 d576 dv512 f16", .kv_len = 987},
        {.problem = "b1 h5/1 q40 kv700 d320 dv256 f16", .mask = "causal()", .q_offset = 600},
        {.problem = "b2 h6/3 q9 kv200 d384 dv128 bf16", .mask = "document(doc)"},
        {.problem = "b2 h40/2 q1 kv1500 d512 bf16", .score = "alibi()", .kv_len = 1400},
        {.problem = "b1 h4/2 q200 kv90 d264 dv256 bf16", .mask = "sliding_window(W)"},
        {.problem = "b50 h8/2 q3 kv300 d448 dv384 bf16", .kv_len = -101},
        {.problem = "b1 h64/1 q2 kv9000 d576 dv512 bf16", .score = "softcap(20)"},
        {.problem = "b2 h8/1 q11 kv500 d576 dv512 bf16", .mask = "kv % 3 != q"},
        {.problem = "b1 h4/1 q16 kv9000 d512 f16", .mask = "kv / 90 % (h + 1) == 0"},
        {.problem = "b60 h36/12 q1 kv150 d512 bf16", .mask = "kv < 4 * b", .kv_len = 140},
        {.problem = "b30 h12/4 q6 kv0 d512 bf16"}};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int data = 0; data < CASE_DATA; data++) {
            forward_case c = cases[i];
            c.data = (case_data)data;
            c.layout = CASE_LATENT;
            n_bad += !device_case_holds(&c, &native);
        }
    assert_int_equal(n_bad, 0);
}

/* Scores so large that rounding them in log2 units is powers of two, and so low, as biases that
 * stand for masks are, that they would be infinite there: rows of nothing else are means of V.
 */
static void far_scores(void **state)
{
    static const char *const problems[] = {
        "b1 h2 q200 kv300 d64 bf16", "b1 h2 q200 kv300 d128 f16", "b1 h2 q200 kv300 d64 f32",
        "b1 h4/2 q1 kv300 d64 bf16", "b1 h1 q2 kv9000 d64 f16",   "b60 h4/2 q2 kv200 d64 bf16"};
    static const char *const scores[] = {
        "(q + h) % 2 == 0 ? -1e30 : score", "(q + h) % 2 == 0 ? -3.4028234e38 : score",
        "score + (kv > 100 ? -3.4028234e38 : 0)", "(q + h) % 2 == 0 ? score - 3e9 : score",
        "-3e9 - 2.0 * q"};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        for (size_t k = 0; k < sizeof scores / sizeof scores[0]; k++) {
            const forward_case c = {.problem = problems[i],
                                    .mask = k % 2 ? "kv != 5 && h != 1" : NULL,
                                    .score = scores[k],
                                    .seed = k};
            if (i % 2 == 0)
                n_bad += !device_case_holds(&c, &ptx);
            n_bad += !device_case_holds(&c, &native);
        }
    assert_int_equal(n_bad, 0);
}

/* Operations downstream of score, where kernels may be fast but not wrong. */
static void operations(void **state)
{
    static const char *const scores[] = {"8 * sigmoid(score)",
                                         "exp(0.3 * score)",
                                         "exp2(0.3 * score) - 0.5",
                                         "4 * log(abs(score) + 1.0)",
                                         "4 * log2(abs(score) + 0.25)",
                                         "score / (1.0 + abs(score))",
                                         "3 * sin(score) + cos(score)",
                                         "pow(abs(score) + 0.5, 1.5)",
                                         "2 * erf(score) + sqrt(abs(score))",
                                         "rsqrt(abs(score) + 0.1)",
                                         "20 * tanh(score / 20)",
                                         "tanh(score) * h_scale[h]"};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof scores / sizeof scores[0]; i++)
        for (int n = 0; n < 2; n++) {
            const forward_case c = {.problem = n ? "b1 h2 q100 kv200 d64 f32"
                                                 : "b1 h2 q100 kv200 d64 bf16",
                                    .score = scores[i]};
            n_bad += !device_case_holds(&c, &native);
        }
    assert_int_equal(n_bad, 0);
}

/* Rows on any address, with any stride, in every dtype; decode too. */
static void placements(void **state)
{
    static const char *const problems[] = {
        "b2 h4/2 q150 kv200 d64 bf16",  "b1 h2 q100 kv150 d128 f16",
        "b1 h2 q100 kv150 d256 bf16",   "b1 h2 q100 kv150 d36 dv50 bf16",
        "b1 h2 q100 kv150 d1 dv3 f16",  "b2 h8/2 q1 kv300 d64 bf16",
        "b2 h4/2 q100 kv200 d64 f32",   "b1 h2 q100 kv150 d37 dv130 f32",
        "b2 h4/2 q100 kv200 d250 bf16",
    };
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        for (int n = 0; n < 5; n++) {
            const forward_case c = {.problem = problems[i],
                                    .mask = n & 1 ? "document(doc) && causal()" : NULL,
                                    .q_offset = n & 1 ? 40 : 0,
                                    .layout = n == 4 ? CASE_BHND : (case_layout)n,
                                    .kv_len = n == 2 ? 123 : 0};
            const device_options o = {.shift = n == 4 ? 1 : 0, .has_block_mask = n == 1};
            n_bad += !device_case_holds(&c, &o);
        }
    assert_int_equal(n_bad, 0);
}

/* ---- imported block masks ---- */

/* Lists say what no mod does; heads of a group see different ones. */
static void imported_lists(void **state)
{
    static const struct {
        const char *problem, *mask;
    } rows[] = {{"b2 h4/2 q300 kv400 d64 bf16", "(q / 128 + kv / 128 + h) % 3 != 0"},
                {"b1 h2 q300 kv400 d128 f16", "(q / 128 + kv / 128 + h) % 3 != 0"},
                {"b1 h2 q300 kv400 d256 bf16", "(q / 128 + kv / 128) % 2 == 0"},
                {"b1 h2 q300 kv400 d64 f32", "(q / 128 + kv / 128 + h) % 3 != 0"},
                {"b1 h8/2 q1 kv700 d128 bf16", "(kv / 128 + h) % 3 != 0"},
                {"b2 h8/2 q3 kv700 d64 bf16", "kv / 128 % 2 == b"},
                {"b2 h8/2 q1 kv700 d128 bf16", "b == 0 && kv / 128 % 2 == 0"}};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int n = 0; n < 3; n++) {
            const forward_case c = {.problem = rows[i].problem, .mask = rows[i].mask};
            const device_options o = {
                .imported_block = 128, .arch = n == 1 ? "compute_80" : NULL, .shift = n == 2};
            n_bad += !device_case_holds(&c, &o);
        }
    assert_int_equal(n_bad, 0);
}

/* Full blocks of lists are live whatever the mod hides of them, where the keys end too. */
static void imported_blocks_are_whole(void **state)
{
    static const char *const problems[] = {
        "b2 h4/2 q300 kv400 d64 bf16", "b1 h2 q300 kv400 d128 f16",
        "b1 h2 q300 kv400 d256 bf16",  "b1 h2 q300 kv400 d64 f32",
        "b2 h8/2 q3 kv700 d64 bf16",   "b2 h8/2 q60 kv700 d128 bf16"};
    static const char *const mods[] = {"q >= kv", "(q * 7 + kv) % 3 != 0", "kv < 100"};
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < (int)(sizeof problems / sizeof problems[0]); i++)
        for (int n = 0; n < 3; n++)
            for (int k = 0; k < 3; k++) {
                const forward_case c = {.problem = problems[i],
                                        .mask = "kv / 128 % 2 == b || q / 128 == kv / 128",
                                        .kv_len = k == 1 ? 333 : 0};
                const device_options o = {.imported_block = 128,
                                          .imported_mod = mods[n],
                                          .arch = k == 2 ? "compute_80" : NULL};
                n_bad += !device_case_holds(&c, &o);
            }
    assert_int_equal(n_bad, 0);
}

/* Rows that are done again, for a NaN at a key that the mod masks, keep to the lists too. */
static void imported_rows_again(void **state)
{
    static const char *const problems[] = {"b1 h4/2 q200 kv400 d128 bf16",
                                           "b1 h4/2 q200 kv400 d64 bf16",
                                           "b1 h4/2 q1 kv400 d64 bf16"};
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < 3; i++) {
        const forward_case c = {.problem = problems[i],
                                .mask = "kv != 77 && (q / 128 + kv / 128) % 2 == 0"};
        const device_options o = {.imported_block = 128, .imported_mod = "kv != 77"};
        char why[DEVICE_WHY];
        const float wild = NAN;
        case_run r;
        case_make(&c, &r);
        uint16_t *v = r.v.t.data;
        convert_from_f32(r.dtype, &wild, v + 77 * r.v.t.stride[2] + 3, 1);
        case_solve(&r);
        if (!device_case_all(&r, &o, why))
            fail_msg("%s", why);
        case_free(&r);
    }
}

static void unsuited_lists_say_so(void **state)
{
    const forward_case c = {.problem = "b1 h2 q100 kv100 d64 bf16", .mask = "kv / 16 % 2 == 0"};
    const device_options o = {.imported_block = 16};
    case_run r;
    device_case d;
    (void)state;
    if (!has_device())
        skip();
    case_make(&c, &r);
    assert_false(device_case_open(&r, &o, &d));
    assert_non_null(strstr(d.why, "expected multiples of 64 x 64"));
    device_case_close(&d);
    case_free(&r);
}

/* ---- keys in chunks ---- */

/* A dense copy of `bytes` on the device; the host's data is freed. */
static saccade_tensor to_device(saccade_tensor t, size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(saccade_device_alloc(0, bytes, &memory, NULL), SACCADE_OK);
    assert_int_equal(saccade_device_copy(0, memory, t.data, bytes, NULL), SACCADE_OK);
    free(t.data);
    t.data = memory;
    t.device = (saccade_device){SACCADE_CUDA, 0};
    return t;
}

static size_t pool_bytes(const saccade_tensor *t)
{
    const int64_t n = t->shape[1] * t->shape[2] * t->shape[3];
    return (size_t)n * saccade_dtype_bytes(t->dtype);
}

static void *outputs_of(device_case *d)
{
    char *bytes = malloc(d->out.bytes + d->lse.bytes);
    assert_non_null(bytes);
    assert_int_equal(saccade_device_copy(0, bytes, d->out.base, d->out.bytes, NULL),
                     SACCADE_OK);
    assert_int_equal(
        saccade_device_copy(0, bytes + d->out.bytes, d->lse.base, d->lse.bytes, NULL),
        SACCADE_OK);
    return bytes;
}

/* The case's outputs anew, by a plan whose keys lie in chunks. */
static void run_chunks(const chunk_case *c, device_case *d)
{
    const saccade_sizes *sizes = &d->r->sizes;
    int32_t table[CHUNK_MOST];
    int64_t rows;
    saccade_error err = {0};
    saccade_problem problem = d->r->problem;
    plan_chunks chunks;
    problem.arch = d->options.arch;
    saccade_plan *plan = chunk_plan(&problem, cuda_solvers);
    chunk_table(c, sizes, table, &chunks, &rows);
    saccade_tensor k = chunk_pool(&d->r->k.t, &chunks, rows);
    saccade_tensor v = chunk_pool(&d->r->v.t, &chunks, rows);
    k = to_device(k, pool_bytes(&k));
    v = to_device(v, pool_bytes(&v));
    plan_run run = {.sizes = *sizes,
                    .q = d->args.q,
                    .k = &k,
                    .v = &v,
                    .chunks = &chunks,
                    .out = d->args.out,
                    .lse = d->args.lse};
    void *on_device = NULL;
    eval_sizes(sizes, run.score_env.size);
    eval_sizes(sizes, run.mask_env.size);
    run.workspace_bytes = saccade_plan_workspace(plan, sizes);
    assert_int_equal(saccade_device_alloc(0, run.workspace_bytes, &run.workspace, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_device_alloc(0, sizeof table, &on_device, NULL), SACCADE_OK);
    assert_int_equal(saccade_device_copy(0, on_device, table, sizeof table, NULL), SACCADE_OK);
    chunks.first = on_device;
    if (cu_forward(plan, &run, &err) != SACCADE_OK)
        fail_msg("%s: %s", c->problem, err.message);
    assert_int_equal(saccade_device_synchronize(0, NULL), SACCADE_OK);
    saccade_device_free(0, run.workspace);
    saccade_device_free(0, on_device);
    saccade_device_free(0, k.data);
    saccade_device_free(0, v.data);
    saccade_plan_destroy(plan);
}

/* Keys in chunks and in one piece, by the same tiles: PTX for sm_80 has no other program. */
static void chunks_give_the_same_bits(void **state)
{
    static const char *const problems[] = {
        "b2 h4/2 q130 kv300 d64 bf16",  "b2 h2 q70 kv290 d128 f16",
        "b2 h2 q70 kv300 d256 bf16",    "b2 h4/2 q70 kv310 d36 dv50 bf16",
        "b2 h8/2 q1 kv400 d64 bf16",    "b2 h2 q70 kv200 d64 f32",
        "b1 h2 q40 kv210 d33 dv130 f32"};
    static const int32_t sizes[] = {1, 3, 16, 50, 256, 500};
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++)
        for (size_t n = 0; n < 2 * sizeof sizes / sizeof sizes[0]; n++) {
            const chunk_case c = {.problem = problems[i],
                                  .mask = n % 2 ? "kv >= 100 && kv <= q + 280" : NULL,
                                  .score = n % 2 ? "alibi()" : NULL,
                                  .size = sizes[n / 2],
                                  .dead = n % 2 ? 100 : 0};
            const forward_case f = {
                .problem = c.problem, .mask = c.mask, .score = c.score, .seed = n};
            case_run r;
            device_case d;
            case_make(&f, &r);
            if (!device_case_open(&r, &ptx, &d))
                fail_msg("%s", d.why);
            d.args.row_max = NULL;
            assert_true(device_case_run(&d));
            char *whole = outputs_of(&d);
            assert_true(device_case_clear(&d));
            run_chunks(&c, &d);
            char *parts = outputs_of(&d);
            if (memcmp(whole, parts, d.out.bytes + d.lse.bytes))
                fail_msg("chunks of %d differ: %s, mask %s", c.size, c.problem,
                         c.mask ? c.mask : "none");
            free(whole);
            free(parts);
            device_case_close(&d);
            case_free(&r);
        }
}

/* ---- random cases ---- */

static uint64_t draw(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % n;
}

static int64_t between(uint64_t *state, int64_t least, int64_t most)
{
    return least + (int64_t)draw(state, (uint64_t)(most - least + 1));
}

static void random_problem(uint64_t *x, char *text, size_t size)
{
    static const char *const dtypes[] = {"bf16", "bf16", "f16", "f32"};
    static const int dims[] = {64, 64, 128, 128, 256, 80, 96, 192};
    const int64_t G = between(x, 1, 3), H = G * between(x, 1, 5);
    const int64_t M = draw(x, 3) ? between(x, 1, 400) : between(x, 1, 16);
    const int64_t D = draw(x, 3) ? dims[draw(x, 8)] : between(x, 1, 256);
    const int64_t E = draw(x, 3) ? D : between(x, 1, 256);
    snprintf(text, size, "b%d h%d/%d q%d kv%d d%d dv%d %s", (int)between(x, 1, 3), (int)H,
             (int)G, (int)M, (int)between(x, 1, 450), (int)D, (int)E, dtypes[draw(x, 4)]);
}

static void random_case(uint64_t *x, const char *problem, forward_case *c, device_options *o)
{
    static const char *const masks[] = {NULL,
                                        "causal()",
                                        "sliding_window(W)",
                                        "document(doc) && causal()",
                                        "document(doc)",
                                        "kv < W || q >= kv",
                                        "(q / 3 + kv / 5) % 2 == 0",
                                        "kv <= q + h",
                                        "kv < q - 5 && table[kv] > 0.0",
                                        "kv % 7 == 3"};
    static const char *const scores[] = {NULL,
                                         NULL,
                                         "alibi()",
                                         "softcap(20)",
                                         "score + (q - kv)",
                                         "score * h_scale[h] + table[kv]",
                                         "score + rel[h, abs(q - kv) % 64]",
                                         "score = alibi(); softcap(c)",
                                         "score - 0.5 * kv",
                                         "kv % 2 == 0 ? score : -inf",
                                         "8 * sigmoid(score)",
                                         "4 * log(abs(score) + 1.0)",
                                         "score / (1.0 + abs(score))",
                                         "3 * sin(score) + cos(score)",
                                         "pow(abs(score) + 0.5, 1.5)",
                                         "2 * erf(score) + sqrt(abs(score))",
                                         "max(score, 0.1 * score)"};
    *c = (forward_case){.problem = problem,
                        .mask = masks[draw(x, 10)],
                        .score = scores[draw(x, 17)],
                        .layout = (case_layout)(draw(x, 2) ? draw(x, 4) : 0),
                        .data = (case_data)(draw(x, 2) ? draw(x, CASE_DATA) : 0),
                        .q_offset = draw(x, 2) ? (int32_t)between(x, 1, 60) : 0,
                        .kv_offset = draw(x, 4) ? 0 : (int32_t)between(x, 1, 40),
                        .kv_len = draw(x, 3) ? 0 : (int32_t)between(x, 1, 450),
                        .scale = draw(x, 8) ? 0 : -0.125f,
                        .seed = draw(x, 1 << 20)};
    *o = (device_options){.arch = draw(x, 5) ? NULL : "compute_80",
                          .shift = draw(x, 6) ? 0 : (int)between(x, 1, 7),
                          .has_block_mask = draw(x, 2) != 0};
}

static int64_t number_from(const char *variable, int64_t otherwise)
{
    const char *text = getenv(variable);
    return text ? atoll(text) : otherwise;
}

static void random_cases(void **state)
{
    const int64_t n = number_from("SACCADE_CUDA_CASES", 16);
    const int64_t seed = number_from("SACCADE_CUDA_SEED", 1);
    int64_t n_failed = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = (uint64_t)(seed * 1000003 + i);
        char problem[96];
        saccade_sizes sizes;
        saccade_dtype dtype;
        forward_case c;
        device_options o;
        random_problem(&x, problem, sizeof problem);
        random_case(&x, problem, &c, &o);
        problem_case(problem, &sizes, &dtype);
        if (c.kv_len > sizes.KV)
            c.kv_len = (int32_t)sizes.KV;
        setenv(TILES, tile_sizes[i % 2], 1);
        n_failed += !device_case_holds(&c, &o);
    }
    setenv(TILES, usual_tiles, 1);
    assert_int_equal(n_failed, 0);
}

/* ---- graphs and allocation ---- */

typedef struct recording {
    void *stream, *graph, *launchable;
} recording;

/* The run as a graph, on a stream of its own. */
static void record(device_case *d, recording *out)
{
    int (*create)(void **, unsigned), (*begin)(void *, int), (*end)(void *, void **);
    int (*instantiate)(void **, void *, unsigned long long);
    *(void **)&create = device_driver_call("cuStreamCreate");
    *(void **)&begin = device_driver_call("cuStreamBeginCapture_v2");
    *(void **)&end = device_driver_call("cuStreamEndCapture");
    *(void **)&instantiate = device_driver_call("cuGraphInstantiateWithFlags");
    assert_int_equal(create(&out->stream, 1), 0);
    assert_int_equal(begin(out->stream, 2), 0);
    d->args.stream = out->stream;
    const saccade_status status = saccade_forward(d->plan, &d->args, NULL);
    assert_int_equal(end(out->stream, &out->graph), 0);
    assert_int_equal(status, SACCADE_OK);
    assert_int_equal(instantiate(&out->launchable, out->graph, 0), 0);
}

static void replay(const recording *r)
{
    int (*launch)(void *, void *), (*wait)(void *);
    *(void **)&launch = device_driver_call("cuGraphLaunch");
    *(void **)&wait = device_driver_call("cuStreamSynchronize");
    assert_int_equal(launch(r->launchable, r->stream), 0);
    assert_int_equal(wait(r->stream), 0);
}

static void drop(const recording *r)
{
    int (*destroy_exec)(void *), (*destroy_graph)(void *), (*destroy_stream)(void *);
    *(void **)&destroy_exec = device_driver_call("cuGraphExecDestroy");
    *(void **)&destroy_graph = device_driver_call("cuGraphDestroy");
    *(void **)&destroy_stream = device_driver_call("cuStreamDestroy_v2");
    assert_int_equal(destroy_exec(r->launchable), 0);
    assert_int_equal(destroy_graph(r->graph), 0);
    assert_int_equal(destroy_stream(r->stream), 0);
}

static void move_positions(device_case *d, const case_run *to)
{
    const size_t bytes = (size_t)to->sizes.B * sizeof(int32_t);
    for (int i = 0; i < 3; i++)
        assert_int_equal(
            saccade_device_copy(0, d->position[i].data, to->positions[i], bytes, NULL),
            SACCADE_OK);
}

/* A graph replayed with other lengths and offsets in the same memory. */
static void graph_of(const char *problem, const char *mask)
{
    const forward_case c = {
        .problem = problem, .mask = mask, .q_offset = 170, .kv_offset = 3, .kv_len = 250};
    const cu_driver *driver;
    case_run r[2];
    device_case d;
    recording graph;
    void *pushed;
    forward_case other = c;
    other.q_offset = 90;
    other.kv_offset = 20;
    other.kv_len = 211;
    case_make(&c, &r[0]);
    case_make(&other, &r[1]);
    assert_int_equal(cu_get_driver(&driver, NULL), SACCADE_OK);
    assert_int_equal(cu_enter(driver, 0, &pushed, NULL), SACCADE_OK);
    if (!device_case_open(&r[0], &native, &d))
        fail_msg("%s", d.why);
    record(&d, &graph);
    for (int i = 0; i < 3; i++) {
        d.r = &r[i & 1];
        move_positions(&d, d.r);
        assert_true(device_case_clear(&d));
        replay(&graph);
        if (!device_case_check(&d))
            fail_msg("replay %d: %s", i, d.why);
    }
    drop(&graph);
    device_case_close(&d);
    cu_leave(driver, pushed);
    case_free(&r[0]);
    case_free(&r[1]);
}

static void graphs(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    graph_of("b2 h4/2 q130 kv300 d64 bf16", "causal()");
    graph_of("b2 h4/2 q130 kv300 d128 f16", "document(doc)");
    graph_of("b2 h4/2 q130 kv300 d64 f32", "causal()");
    graph_of("b2 h8/2 q2 kv300 d128 bf16", "causal()");
}

static saccade_status forward_again(void *arg, saccade_error *err)
{
    device_case *d = arg;
    return saccade_forward(d->plan, &d->args, err);
}

static void nothing_is_allocated(void **state)
{
    static const char *const problems[] = {"b2 h4/2 q130 kv300 d64 bf16",
                                           "b2 h4/2 q1 kv300 d64 bf16",
                                           "b2 h4/2 q130 kv300 d64 f32"};
    int (*memory_info)(size_t *, size_t *);
    const cu_driver *driver;
    void *pushed;
    (void)state;
    if (!has_device())
        skip();
    *(void **)&memory_info = device_driver_call("cuMemGetInfo_v2");
    assert_int_equal(cu_get_driver(&driver, NULL), SACCADE_OK);
    assert_int_equal(cu_enter(driver, 0, &pushed, NULL), SACCADE_OK);
    for (size_t i = 0; i < sizeof problems / sizeof problems[0]; i++) {
        const forward_case c = {.problem = problems[i], .mask = "causal()", .q_offset = 200};
        size_t before, after, total;
        case_run r;
        device_case d;
        case_make(&c, &r);
        if (!device_case_open(&r, &blocks, &d) || !device_case_run(&d))
            fail_msg("%s", d.why);
        assert_int_equal(memory_info(&before, &total), 0);
        assert_int_equal(fail_alloc_sweep("forward on a device", forward_again, &d), 0);
        for (int n = 0; n < 50; n++)
            assert_true(device_case_run(&d));
        assert_int_equal(memory_info(&after, &total), 0);
        assert_int_equal(before, after);
        device_case_close(&d);
        case_free(&r);
    }
    cu_leave(driver, pushed);
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    if (getenv(TILES))
        snprintf(usual_tiles, sizeof usual_tiles, "%s", getenv(TILES));
    setenv(TILES, usual_tiles, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_of_each),
        cmocka_unit_test(halves),
        cmocka_unit_test(f32),
        cmocka_unit_test(climbs),
        cmocka_unit_test(pairs),
        cmocka_unit_test(keys_that_stay),
        cmocka_unit_test(wide_spans),
        cmocka_unit_test(latent_heads),
        cmocka_unit_test(placements),
        cmocka_unit_test(operations),
        cmocka_unit_test(graphs),
        cmocka_unit_test(nothing_is_allocated),
        cmocka_unit_test(random_cases),
        cmocka_unit_test(imported_lists),
        cmocka_unit_test(imported_blocks_are_whole),
        cmocka_unit_test(imported_rows_again),
        cmocka_unit_test(unsuited_lists_say_so),
        cmocka_unit_test(chunks_give_the_same_bits),
        cmocka_unit_test(far_scores),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
