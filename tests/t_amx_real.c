/* The level AMX as it is chosen and compiled, also where the machine has no AMX (amx_trap.h):
 * whole problems against float64, and bit for bit what emulated tiles give. */
#include "support/amx_trap.h"
#include "support/forward_case.h"

#include "base/convert.h"
#include "measure/ceiling.h"
#include "cpu/cpu.h"
#include "saccade_config.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#if HAVE_LEVEL_AMX

static const cpu_kernels *kernels_of(const saccade_plan *plan)
{
    return ((const cpu_state *)plan->state)->needs.kernels;
}

static int is_trapped;

/* Skips the test, inside it. */
static void begin(void)
{
    is_trapped = cpu_features_get()->level < CPU_AMX;
    if (amx_trap_begin())
        return;
    print_message("neither AMX nor AVX512-BF16 with a decoder: no AMX instruction ran\n");
    skip();
}

/* Streams are compiled code, which builds without an assembler lack. */
static void begin_streams(void)
{
    if (!HAVE_ZYDIS)
        skip();
    begin();
}

/* Real tiles against truth and, bit for bit, against emulated ones. */
static void with_amx(const forward_case *c)
{
    case_run r;
    case_make(c, &r);
    const saccade_sizes *s = &r.sizes;
    const size_t n_out = (size_t)(s->B * s->H * s->Q * s->Dv);
    const size_t n = n_out + (size_t)(s->B * s->H * s->Q);
    float *real = malloc(n * sizeof *real), *emulated = malloc(n * sizeof *emulated);
    assert_true(real && emulated);
    const int64_t count = amx_trap_count();
    saccade_plan *plan = case_plan(&r, "amx", 2);
    const int is_f16 = r.dtype == SACCADE_F16;
    assert_ptr_equal(kernels_of(plan), is_f16 ? &cpu_f16_tiles_amx : &cpu_bf16_tiles_amx);
    case_check(&r, plan, NULL, "amx", real, real + n_out);
    assert_int_equal(amx_trap_count() > count, is_trapped);
    ((cpu_state *)plan->state)->needs.kernels =
        is_f16 ? &cpu_f16_tiles_avx512 : &cpu_bf16_tiles_avx512;
    case_check(&r, plan, NULL, "emulated", emulated, emulated + n_out);
    if (s->Q * (s->H / s->Hkv) > 1) /* one row takes dot products, no tiles */
        assert_memory_equal(real, emulated, n * sizeof *real);
    saccade_plan_destroy(plan);
    free(real);
    free(emulated);
    case_free(&r);
}

static void shapes(void **state)
{
    static const char *const sizes[] = {
        "q1 kv1 d1 bf16",
        "b2 h4/2 q5 kv17 d3 dv5 bf16",
        "b1 h1 q33 kv129 d64 bf16",
        "b1 h2/1 q70 kv300 d40 dv72 bf16",
        "b1 h1 q97 kv600 d128 bf16",
        "b1 h1 q40 kv257 d257 dv300 bf16",
        "b1 h1 q20 kv1300 d32 bf16",
        "b2 h4/2 q20 kv17 d3 dv5 f16",
        "b1 h2/1 q70 kv300 d40 dv72 f16",
        "b1 h1 q97 kv600 d64 f16",
        "b2 h8/1 q1 kv700 d128 bf16",
        "b1 h2 q1 kv700 d40 bf16",
        "b1 h16/2 q5 kv333 d80 dv200 bf16",
        "b1 h6/2 q20 kv290 d33 dv31 bf16",
    };
    (void)state;
    begin();
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++)
        with_amx(&(forward_case){.problem = sizes[n], .seed = n});
    amx_trap_end();
}

static void variants(void **state)
{
    static const forward_case list[] = {
        {.mask = "causal()", .q_offset = 500},
        {.mask = "doc[q] == doc[kv] && q >= kv"},
        {.mask = "q + 300 >= kv", .score = "alibi()"},
        {.score = "softcap(c)"},
        {.mask = "false"},
        {.mask = "kv == 0", .scale = 0.001f},
        {.score = "q < 2 ? -3.4028234e38 : score"},
        {.scale = -0.7f},
    };
    (void)state;
    begin();
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++) {
        forward_case c = list[n];
        c.problem = "b1 h2/1 q40 kv530 d24 bf16";
        with_amx(&c);
        c.problem = "b1 h2/1 q40 kv530 d24 f16";
        with_amx(&c);
    }
    amx_trap_end();
}

static void extremes(void **state)
{
    (void)state;
    begin();
    for (int data = 0; data < CASE_DATA; data++) {
        with_amx(&(forward_case){.problem = "h1 q40 kv400 d64 bf16", .data = (case_data)data});
        with_amx(&(forward_case){.problem = "h1 q40 kv400 d64 f16", .data = (case_data)data});
    }
    amx_trap_end();
}

/* f16 loses nothing but the last rounding: the mean square of all errors is little above that
 * of the rounding of truth to f16. Products of high parts alone would give many times it. */
static void f16_is_rounded_once(void **state)
{
    enum { N = 100 * 64 };
    static float out[N], lse[100];
    (void)state;
    begin();
    for (int outputs = CASE_ALL; outputs <= CASE_OUT_ONLY; outputs++) {
        case_run r;
        double error = 0, rounding = 0;
        case_make(&(forward_case){.problem = "h1 q100 kv700 d64 f16",
                                  .outputs = (case_outputs)outputs},
                  &r);
        saccade_plan *plan = case_plan(&r, "amx", 1);
        case_check(&r, plan, NULL, "f16", out, lse);
        for (int i = 0; i < N; i++) {
            const double own = f16_to_f32(f16_from_f32((float)r.out[i])) - r.out[i];
            error += (out[i] - r.out[i]) * (out[i] - r.out[i]);
            rounding += own * own;
        }
        assert_true(error < 1.2 * rounding); /* 1.09 with rough exponentials */
        saccade_plan_destroy(plan);
        case_free(&r);
    }
    amx_trap_end();
}

/* The ceiling's loop: what it says it has done, with every tile loaded. */
static void ceiling(void **state)
{
    enum { ROUNDS = 9 };
    static _Alignas(64) uint16_t data[CPU_CEILING_BYTES / 2];
    (void)state;
    begin();
    const int64_t count = amx_trap_count();
    assert_true(cpu_ceiling_amx.bf16_dot(ROUNDS, data) == ROUNDS * 4 * 2.0 * 16 * 16 * 32);
    if (is_trapped) /* and configuration, four zeros, release */
        assert_int_equal(amx_trap_count() - count, ROUNDS * 8 + 6);
    amx_trap_end();
}

/* Streams: row maxima are what they do not give. */
static void streamed_as(const forward_case *c)
{
    case_run r;
    case_make(c, &r);
    const int64_t count = amx_trap_count();
    saccade_plan *plan = case_plan(&r, "amx", 2);
    assert_non_null(((const cpu_state *)plan->state)->code);
    case_check(&r, plan, NULL, "stream", NULL, NULL);
    assert_int_equal(amx_trap_count() > count, is_trapped);
    saccade_plan_destroy(plan);
    case_free(&r);
}

static void streamed_in(const forward_case *c)
{
    for (int outputs = CASE_NO_MAX; outputs <= CASE_OUT_ONLY; outputs++) {
        forward_case own = *c;
        own.outputs = (case_outputs)outputs;
        streamed_as(&own);
    }
}

/* In bf16 and in f16. */
static void streamed(const forward_case *c)
{
    char text[96];
    const forward_case f16 = case_in_f16(c, text);
    streamed_in(c);
    streamed_in(&f16);
}

/* Large ones: the ends of what there is, the most outputs in bf16 and the fewest in f16. */
static void streamed_large(const forward_case *c)
{
    char text[96];
    forward_case f16 = case_in_f16(c, text);
    f16.outputs = CASE_OUT_ONLY;
    forward_case bf16 = *c;
    bf16.outputs = CASE_NO_MAX;
    streamed_as(&bf16);
    streamed_as(&f16);
}

static void stream_shapes(void **state)
{
    static const char *const sizes[] = {
        "b1 h1 q97 kv128 d32 bf16",         "b1 h1 q130 kv129 d64 bf16",
        "b1 h2/1 q150 kv700 d40 dv72 bf16", "b1 h1 q100 kv600 d128 bf16",
        "b1 h1 q97 kv257 d200 dv260 bf16",  "b1 h1 q97 kv2300 d16 dv8 bf16",
    };
    (void)state;
    begin_streams();
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++)
        streamed(&(forward_case){.problem = sizes[n], .seed = n});
    streamed_large(&(forward_case){.problem = "b2 h32 q260 kv140 d8 bf16", .seed = 9});
    amx_trap_end();
}

/* Rows of several heads in an item of streams, so that a strip may have rows of two. */
static int32_t heads_of_item(const char *problem)
{
    case_run r;
    case_make(&(forward_case){.problem = problem}, &r);
    saccade_plan *plan = case_plan(&r, "amx", 2);
    const int32_t heads =
        cpu_geometry_of(&((const cpu_state *)plan->state)->needs, &r.sizes).item_heads;
    saccade_plan_destroy(plan);
    case_free(&r);
    return heads;
}

static void stream_heads_together(void **state)
{
    static const char *const sizes[] = {"b1 h32/8 q37 kv150 d64 bf16",
                                        "b4 h16/2 q23 kv300 d40 dv72 bf16"};
    (void)state;
    begin_streams();
    assert_int_equal(heads_of_item(sizes[0]), 2);
    assert_int_equal(heads_of_item(sizes[1]), 4);
    assert_int_equal(heads_of_item("b1 h16/4 q37 kv150 d64 bf16"), 1); /* too few items */
    for (int data = 0; data < CASE_DATA; data++)
        for (int n = 0; n < 2; n++)
            streamed(&(forward_case){.problem = sizes[n], .data = (case_data)data});
    streamed(&(forward_case){.problem = sizes[0], .kv_len = 140, .layout = CASE_BROADCAST});
    amx_trap_end();
}

/* An imported mask's blocks, which no mod asks for: a strip's rows of two heads lie in three
 * rows of blocks, of which the middle one alone has the second block of keys. */
static void stream_heads_with_imported_blocks(void **state)
{
    enum { B = 1, H = 32, SIZE = 16, KEYS = 256, ROWS = 3, COLUMNS = 2 };
    static int32_t count[H * ROWS], index[H * ROWS * COLUMNS];
    static const char problem[] = "b1 h32/8 q37 kv512 d64 bf16";
    case_run masked, plain;
    saccade_error err = {0};
    saccade_block_mask *mask;
    (void)state;
    begin_streams();
    for (int n = 0; n < H * ROWS; n++) {
        count[n] = 1;
        index[n * COLUMNS] = n % ROWS == 1;
    }
    case_make(&(forward_case){.problem = problem,
                              .mask = "(q / 16 == 1) == (kv >= 256)",
                              .outputs = CASE_NO_MAX},
              &masked);
    case_make(&(forward_case){.problem = problem}, &plain);
    const saccade_block_indices x = {.B = B,
                                     .H = H,
                                     .rows = ROWS,
                                     .columns = COLUMNS,
                                     .block_q = SIZE,
                                     .block_kv = KEYS,
                                     .kv_num_blocks = count,
                                     .kv_indices = index};
    if (saccade_block_mask_import(NULL, &x, NULL, &plain.sizes, NULL, NULL, 0, &mask, &err)
        != SACCADE_OK)
        fail_msg("%s", err.message);
    saccade_plan *plan = case_plan(&plain, "amx", 2);
    assert_int_equal(saccade_plan_prepare(plan, mask, &err), SACCADE_OK);
    case_check(&masked, plan, mask, "imported blocks", NULL, NULL);
    saccade_plan_destroy(plan);
    saccade_block_mask_destroy(mask);
    case_free(&masked);
    case_free(&plain);
    amx_trap_end();
}

static void stream_variants(void **state)
{
    static const forward_case list[] = {
        {.mask = "causal()", .q_offset = 500},
        {.mask = "causal()"},
        {.mask = "sliding_window(W)"},
        {.mask = "doc[q] == doc[kv] && q >= kv"},
        {.mask = "q + 300 >= kv", .score = "alibi()"},
        {.score = "softcap(c)"},
        {.score = "softcap(20.0)"},
        {.score = "score + 0.25 * (doc[(q ^ kv) & 63] & 3)"},
        {.score = "((q & 1) == 0 ? (kv & 2) == 0 : (kv & 4) == 0) ? score : 0.5 * score"},
        {.score = "tanh(score) * 3.0 - tanh(0.5 * score)", .scale = 0.5f},
        {.score = "score = alibi(); softcap(60.0)", .mask = "causal()", .q_offset = 400},
        {.score = "rel[h, (q ^ kv) & 63] + score", .kv_offset = 7},
        {.score = "score + table[kv] * q"},
        {.score = "score + 1e6 + table[kv]", .mask = "(q + kv) % 90 != 0 || kv < 128"},
        {.score = "score + 3e7 * (kv & 1)", .mask = "kv < 300 || kv % 3 != 1"},
        {.score = "score * h_scale[h] + 3000", .kv_len = 333},
        {.mask = "false"},
    };
    (void)state;
    begin_streams();
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++) {
        forward_case c = list[n];
        c.problem = "b1 h2/1 q140 kv530 d24 bf16";
        streamed(&c);
        c.problem = "b1 h1 q40 kv340 d50 bf16";
        if (c.score)
            streamed(&c);
    }
    /* items of as many rows as there can be, each with values of its own */
    streamed_large(
        &(forward_case){.problem = "b1 h128/1 q513 kv40 d8 bf16",
                        .score = "score + 0.1 * (q % 7) * (kv % 3) + (q > 300 ? 1 : kv)"});
    amx_trap_end();
}

/* Strips whose live squares are no multiple of four, after and before others, in blocks of keys
 * that lie in the cache already. */
static void stream_windows(void **state)
{
    static const forward_case list[] = {
        {.problem = "b1 h1 q340 kv600 d64 bf16", .mask = "q >= kv && q - kv <= 256"},
        {.problem = "b1 h1 q300 kv320 d96 dv40 bf16", .mask = "q >= kv && q - kv <= 128"},
        {.problem = "b1 h2 q200 kv330 d24 bf16", .mask = "q + 45 >= kv && q - kv <= 77"},
        {.problem = "b1 h1 q260 kv500 d32 bf16",
         .mask = "q >= kv && q - kv < 170",
         .q_offset = 130,
         .kv_len = 333},
        {.problem = "b1 h1 q170 kv420 d64 bf16", .mask = "2 * q >= kv && 2 * q - kv <= 100"},
        {.problem = "b1 h2 q300 kv290 d40 bf16",
         .mask = "q + 5 >= kv && kv >= 50 && q - kv <= 90"},
        {.problem = "b1 h1 q150 kv400 d64 bf16", .mask = "q + 99 >= kv && q - kv <= 64"},
    };
    (void)state;
    begin_streams();
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++)
        streamed(&list[n]);
    streamed_large(&(forward_case){.problem = "b1 h33/1 q520 kv520 d8 bf16",
                                   .mask = "q >= kv && q - kv < 200"});
    streamed_large(&(forward_case){.problem = "b1 h128/1 q513 kv513 d8 bf16",
                                   .mask = "q >= kv && q - kv < 20"});
    amx_trap_end();
}

/* The merged streams and the same ones in plain order: the same bits. */
static void plain_order(void **state)
{
    static const forward_case list[] = {
        {.problem = "h1 q130 kv700 d64 bf16", .mask = "causal()", .q_offset = 500},
        {.problem = "h1 q130 kv300 d128 bf16", .score = "alibi()"},
        {.problem = "h1 q100 kv200 d96 dv40 bf16", .score = "softcap(c)"},
        {.problem = "h1 q100 kv400 d64 bf16",
         .score = "softcap(30.0)",
         .mask = "q + 300 >= kv"},
        {.problem = "h1 q250 kv300 d64 bf16", .mask = "q >= kv && q - kv <= 150"},
    };
    (void)state;
    begin_streams();
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++)
        for (int outputs = CASE_NO_MAX; outputs <= CASE_OUT_ONLY; outputs++) {
            static float merged[130 * 128], plain[130 * 128];
            forward_case c = list[n];
            case_run r;
            int32_t spills;
            c.outputs = (case_outputs)outputs;
            case_make(&c, &r);
            saccade_plan *plan = case_plan(&r, "amx", 1);
            cpu_state *own = plan->state;
            case_check(&r, plan, NULL, "merged", merged, NULL);
            flow_shape shape = *flow_code_shape(own->code, 0);
            shape.is_plain = 1;
            flow_code_destroy(own->code);
            assert_int_equal(flow_code_create(&shape, &own->code, &spills, NULL), SACCADE_OK);
            case_check(&r, plan, NULL, "plain", plain, NULL);
            const int64_t count = r.sizes.H * r.sizes.Q * r.sizes.Dv;
            assert_memory_equal(merged, plain, (size_t)count * sizeof *merged);
            saccade_plan_destroy(plan);
            case_free(&r);
        }
    amx_trap_end();
}

static void stream_extremes(void **state)
{
    (void)state;
    begin_streams();
    for (int data = 0; data < CASE_DATA; data++)
        streamed(&(forward_case){.problem = "h1 q100 kv400 d64 bf16", .data = (case_data)data});
    for (int data = 0; data < CASE_DATA; data++)
        streamed(&(forward_case){.problem = "h1 q200 kv240 d64 bf16",
                                 .mask = "q + 9 >= kv && q - kv <= 80",
                                 .data = (case_data)data});
    amx_trap_end();
}

/* lse of few keys leaves no room for coarse exponentials. */
static void few_keys(void **state)
{
    static const int keys[] = {1, 2, 3, 5, 9, 16, 17, 31, 33, 127, 129, 255};
    (void)state;
    begin_streams();
    for (size_t n = 0; n < sizeof keys / sizeof keys[0]; n++) {
        char problem[64];
        snprintf(problem, sizeof problem, "h1 q97 kv%d d%d bf16", keys[n], n % 2 ? 33 : 64);
        streamed(&(forward_case){.problem = problem, .seed = n});
    }
    amx_trap_end();
}

/* explain tells a stream's codes, and how its weights are made. */
static void explained(void **state)
{
    static const struct {
        const char *problem, *score, *weights;
        int has_table;
    } list[] = {
        {"h1 q1000 kv400 d64 bf16", NULL, "weights by words of bf16;", 0},
        {"h1 q1000 kv400 d64 bf16", "softcap(20.0)", "by words of bf16, tanh to", 1},
        {"h1 q1000 kv400 d64 bf16", "kv == 9 ? -inf : score", "weights by a cubic;", 0},
        {"h1 q1000 kv400 d64 f16", "softcap(20.0)", "weights by a cubic;", 0},
    };
    (void)state;
    begin_streams();
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++) {
        case_run r;
        char *text = NULL;
        case_make(&(forward_case){.problem = list[n].problem, .score = list[n].score}, &r);
        saccade_plan *plan = case_plan(&r, "amx", 1);
        assert_int_equal(saccade_plan_explain(plan, &text, NULL), SACCADE_OK);
        assert_non_null(strstr(text, "stream: steps of 32 rows x 128 keys"));
        assert_non_null(strstr(text, list[n].weights));
        const char *code = strstr(text, "tdpbf16ps"), *end = strstr(text, "[r13], zmm");
        assert_true(code && end && code < end);
        const char *table = strstr(text, "vpermps");
        assert_int_equal(table && table < end, list[n].has_table);
        saccade_free(text);
        saccade_plan_destroy(plan);
        case_free(&r);
    }
    amx_trap_end();
}

/* Rows taken are rows stored, by way of the caches or past them; O is 0 then, and numbers that
 * are none are told of. */
static void rows_are_taken(void **state)
{
    enum { ROWS = 5, E = 64, LD = 96 };
    static const float sums[ROWS] = {1.5f, 0, 3e-20f, 7, 2e15f};
    _Alignas(64) static uint16_t out[3][ROWS + 1][E];
    (void)state;
    begin();
    const cpu_kernels *k = &cpu_bf16_tiles_amx;
    for (int nonfinite = 0; nonfinite < 3; nonfinite++)
        for (int is_far = 0; is_far < 2; is_far++) {
            _Alignas(64) static float o[ROWS * LD];
            for (int i = 0; i < ROWS * LD; i++)
                o[i] = i / LD == 1 ? 0 : (float)(i % 89 - 40) * 0.37f;
            o[3 * LD + 17] = nonfinite == 1 ? INFINITY : nonfinite == 2 ? NAN : 1;
            memset(out, 0x55, sizeof out);
            cpu_store_rows_avx512(o, LD, sums, ROWS, SACCADE_BF16, E, out[0], 2 * E);
            k->store_rows(o, LD, sums, ROWS, SACCADE_BF16, E, out[1], 2 * E);
            assert_int_equal(
                k->take_rows(o, LD, sums, ROWS, SACCADE_BF16, E, out[2], 2 * E, is_far),
                nonfinite != 0);
            assert_memory_equal(out[0], out[1], sizeof out[0]);
            assert_memory_equal(out[0], out[2], sizeof out[0]);
            for (int i = 0; i < ROWS * LD; i++)
                assert_true(i % LD >= E || o[i] == 0);
        }
    amx_trap_end();
}

/* Rows of a strip past the item's last do not follow from the items that its thread ran before:
 * a large score there would have the strip made again, by other sums. The last item has one
 * row. */
static void threads_leave_nothing(void **state)
{
    enum { ROWS = 513, D = 32, THREADS = 6 };
    static float one[ROWS * D], many[ROWS * D];
    const forward_case c = {.problem = "q513 kv777 d32 bf16",
                            .score = "score + 0.15 * float(kv - q)",
                            .outputs = CASE_OUT_ONLY};
    case_run r;
    (void)state;
    begin();
    case_make(&c, &r);
    for (int n = 0; n < 2; n++) {
        saccade_plan *plan = case_plan(&r, "amx", n ? THREADS : 1);
        case_check(&r, plan, NULL, "leftovers", n ? many : one, NULL);
        saccade_plan_destroy(plan);
    }
    assert_memory_equal(one, many, sizeof one);
    case_free(&r);
    amx_trap_end();
}

/* Keys of f16 that hold an infinity or a NaN of any bits: no score is finite, and those of a
 * NaN are not infinite either. */
static void nonfinite_keys(void **state)
{
    enum { D = 32, N = CPU_BLOCK_KEYS, ROWS = 3, FIRST = 0x7c00, WILD = 0x400 };
    static uint16_t q[ROWS * D], keys[N * D];
    static float packed[ROWS * D], turned[32 * D], s[ROWS * N];
    const cpu_kernels *k = &cpu_f16_tiles_amx;
    const cpu_rows rows = {(const char *)q, D * 2, SACCADE_F16, D};
    const cpu_rows all = {(const char *)keys, D * 2, SACCADE_F16, D};
    (void)state;
    begin();
    for (int i = 0; i < ROWS * D; i++)
        q[i] = f16_from_f32(i < D ? -1 : (float)(i % 7) - 3.1f);
    k->pack_rows(&rows, ROWS, ROWS, D, packed);
    k->pack_decode(packed, D, ROWS, D, turned);
    k->begin();
    for (int first = 0; first < 2 * WILD; first += N) {
        cpu_prefetch nothing = {0};
        for (int i = 0; i < N * D; i++)
            keys[i] = f16_from_f32((float)(i % 11) - 5);
        for (int j = 0; j < N; j++)
            keys[j * D + j % D] = (uint16_t)((FIRST + (first + j) / 2) | (j % 2) << 15);
        k->decode_qk(turned, D, &(cpu_keys){all, NULL}, N, ROWS, 1, s, N, &nothing);
        for (int i = 0; i < ROWS * N; i++)
            assert_true(isnan(s[i]) || (isinf(s[i]) && first + i % N < 2));
    }
    k->end();
    amx_trap_end();
}

/* The handler itself: a level that is gone again after the end. */
static void trap_ends(void **state)
{
    (void)state;
    const cpu_level level = cpu_features_get()->level;
    begin();
    assert_int_equal(cpu_features_get()->level, CPU_AMX);
    amx_trap_end();
    assert_int_equal(cpu_features_get()->level, level);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trap_ends),       cmocka_unit_test(shapes),
        cmocka_unit_test(variants),        cmocka_unit_test(extremes),
        cmocka_unit_test(stream_shapes),   cmocka_unit_test(stream_variants),
        cmocka_unit_test(stream_heads_together),
        cmocka_unit_test(stream_heads_with_imported_blocks),
        cmocka_unit_test(stream_extremes), cmocka_unit_test(stream_windows),
        cmocka_unit_test(plain_order),     cmocka_unit_test(ceiling),
        cmocka_unit_test(few_keys),        cmocka_unit_test(explained),
        cmocka_unit_test(rows_are_taken),  cmocka_unit_test(f16_is_rounded_once),
        cmocka_unit_test(nonfinite_keys),  cmocka_unit_test(threads_leave_nothing),
    };
    unsetenv("SACCADE_LEVEL"); /* this test is of one level */
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    puts("built without the level AMX: skipped");
    return 0;
}

#endif
