/* Attention over quantised K and V on a CUDA device: support/quantised_case.h. */
#include "support/device_case.h"
#include "support/quantised_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void run_pages(const saccade_sizes *s, saccade_dtype dtype, const char *mask,
                      int32_t page, int step)
{
    if (!has_device())
        skip();
    quantised_cases("cuda", s, dtype, mask, page, step);
}

static void run(const saccade_sizes *s, saccade_dtype dtype, const char *mask, int step)
{
    run_pages(s, dtype, mask, 0, step);
}

static void decode(void **state)
{
    const saccade_sizes s = {2, 8, 2, 1, 3001, 128, 128};
    (void)state;
    run(&s, SACCADE_BF16, NULL, 1);
}

static void decode_of_small_heads(void **state)
{
    const saccade_sizes s = {3, 8, 4, 2, 333, 64, 128};
    (void)state;
    run(&s, SACCADE_BF16, "kv % 7 != 3", 5);
}

static void decode_of_a_window(void **state)
{
    const saccade_sizes s = {40, 8, 4, 1, 200, 128, 64};
    (void)state;
    run(&s, SACCADE_BF16, "kv >= 37 && kv < 190", 7);
}

/* Two spans to a multiprocessor of an H100 or H200: 256 of 264. */
static void decode_of_many_spans(void **state)
{
    const saccade_sizes s = {64, 8, 4, 1, 133, 128, 128}, small = {32, 8, 8, 1, 70, 64, 128};
    const saccade_sizes unequal = {8, 64, 32, 1, 144, 128, 128};
    (void)state;
    run(&s, SACCADE_BF16, NULL, 3);
    run(&s, SACCADE_F16, "kv >= 37 && kv < 120", 7);
    run(&small, SACCADE_BF16, "kv % 7 != 3", 5);
    run_pages(&unequal, SACCADE_BF16, NULL, 16, 5);
    run_pages(&unequal, SACCADE_BF16, "causal()", 3, 11);
}

static void prefill(void **state)
{
    const saccade_sizes s = {1, 4, 2, 150, 290, 64, 64};
    (void)state;
    run(&s, SACCADE_NONE, "causal()", 5);
}

static void odd_dims(void **state)
{
    const saccade_sizes s = {2, 4, 2, 3, 190, 36, 50};
    (void)state;
    run(&s, SACCADE_NONE, NULL, 7);
}

static void decode_of_pages(void **state)
{
    const saccade_sizes s = {2, 8, 2, 1, 1008, 128, 128}, few = {3, 8, 2, 3, 300, 64, 128};
    (void)state;
    run_pages(&s, SACCADE_BF16, NULL, 16, 1);
    run_pages(&s, SACCADE_F16, NULL, 48, 5);
    run_pages(&few, SACCADE_BF16, "kv % 5 != 3", 1, 5);
    run_pages(&few, SACCADE_F16, "kv >= 30", 3, 7);
}

static void decode_of_large_heads(void **state)
{
    const saccade_sizes s = {1, 4, 2, 1, 300, 256, 256}, narrow = {2, 6, 2, 2, 200, 80, 48};
    (void)state;
    run(&s, SACCADE_BF16, NULL, 5);
    run(&s, SACCADE_F16, NULL, 7);
    run(&narrow, SACCADE_BF16, "causal()", 5);
}

/* Latent attention: two warps to a row. Rows lie on 16 bytes, apart from each other too. */
static void decode_of_latent_heads(void **state)
{
    /* clang-format off */
    static const quantised_case cases[] = {
        {{2, 16, 1, 1, 700, 576, 512}, SACCADE_BF16, SACCADE_E4M3,
         {1, 0, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 16, 1, 1, 700, 576, 512}, SACCADE_BF16, SACCADE_I8,
         {1, 0, 0, SACCADE_F16}, 0, NULL, 0},
        {{1, 70, 1, 2, 999, 576, 512}, SACCADE_BF16, SACCADE_I4,
         {1, 0, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 1, 3, 300, 576, 512}, SACCADE_F16, SACCADE_E4M3,
         {1, 0, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 2, 5, 301, 576, 512}, SACCADE_BF16, SACCADE_E5M2,
         {0, 0, 1, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 2, 5, 301, 320, 288}, SACCADE_F16, SACCADE_I4,
         {0, 0, 0, SACCADE_F32}, 32, NULL, 0},
        {{2, 4, 2, 3, 200, 272, 48}, SACCADE_BF16, SACCADE_I8,
         {1, 0, 0, SACCADE_F32}, 16, NULL, 0},
        {{2, 4, 2, 3, 200, 64, 304}, SACCADE_BF16, SACCADE_E4M3,
         {1, 0, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 4, 2, 3, 200, 64, 304}, SACCADE_BF16, SACCADE_E4M3,
         {1, 16, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 1, 2, 256, 576, 512}, SACCADE_BF16, SACCADE_E4M3,
         {1, 128, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 1, 2, 256, 576, 512}, SACCADE_F16, SACCADE_I4,
         {1, 32, 0, SACCADE_F16}, 0, NULL, 0},
        {{2, 8, 1, 2, 256, 576, 512}, SACCADE_BF16, SACCADE_I8,
         {0, 1, 0, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 1, 2, 240, 576, 512}, SACCADE_BF16, SACCADE_I4,
         {16, 7, 1, SACCADE_F32}, 0, NULL, 0},
        {{2, 8, 1, 2, 240, 576, 512}, SACCADE_BF16, SACCADE_E4M3,
         {8, 4, 0, SACCADE_F16}, 0, "kv % 7 != 3", 0},
        {{2, 6, 1, 40, 260, 576, 512}, SACCADE_BF16, SACCADE_E4M3,
         {1, 0, 0, SACCADE_F32}, 0, "causal()", 0},
        {{3, 16, 1, 2, 960, 576, 512}, SACCADE_BF16, SACCADE_E4M3,
         {1, 0, 0, SACCADE_F32}, 0, NULL, 64},
        {{3, 16, 1, 2, 960, 576, 512}, SACCADE_BF16, SACCADE_I8,
         {16, 0, 0, SACCADE_F32}, 0, "kv >= 30", 16},
        {{3, 16, 1, 1, 300, 576, 512}, SACCADE_F16, SACCADE_I4,
         {1, 0, 0, SACCADE_F32}, 0, NULL, 3},
        {{3, 16, 1, 1, 300, 576, 512}, SACCADE_BF16, SACCADE_E5M2,
         {1, 64, 0, SACCADE_F32}, 0, NULL, 1},
    };
    /* clang-format on */
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        quantised_check("cuda", &cases[i], i + 1);
}

static void prefill_of_pages(void **state)
{
    const saccade_sizes s = {2, 4, 2, 70, 288, 64, 64};
    (void)state;
    run_pages(&s, SACCADE_NONE, "causal()", 16, 5);
    run_pages(&s, SACCADE_NONE, NULL, 3, 7);
}

/* ---- batch invariance ---- */

enum { SEEN = 5010, KEYS = 5024, HEADS = 2, GROUP = 4, DIM = 128, BATCHES = 2 };

/* Q, K, V, the scales of K and of V, and the output. */
typedef struct data {
    uint16_t q[BATCHES * HEADS * GROUP * DIM];
    uint8_t k[BATCHES * HEADS * KEYS * DIM], v[BATCHES * HEADS * KEYS * DIM];
    float k_scale[BATCHES * HEADS * KEYS], v_scale[BATCHES * HEADS * KEYS];
    uint16_t out[BATCHES * HEADS * GROUP * DIM];
} data;

static void fill(data *x)
{
    uint32_t state = 7;
    for (size_t i = 0; i < sizeof x->q / sizeof *x->q; i++) {
        state = state * 1664525u + 1013904223u;
        x->q[i] = (uint16_t)(0x3e00u | (state >> 16 & 0x81ffu)); /* 0.125 to 2, both signs */
    }
    for (size_t i = 0; i < sizeof x->k; i++) {
        state = state * 1664525u + 1013904223u;
        x->k[i] = (uint8_t)(state >> 24 & 0xb7u);
        x->v[i] = (uint8_t)(state >> 16 & 0xb7u);
    }
    for (size_t i = 0; i < sizeof x->k_scale / sizeof *x->k_scale; i++) {
        x->k_scale[i] = 0.05f + 0.001f * (float)(i % 17);
        x->v_scale[i] = 0.7f + 0.013f * (float)(i % 19);
    }
}

/* Scales of V of the keys that no row sees, in the last block that rows see and after it. */
static void set_unseen(data *x, float scale)
{
    for (int head = 0; head < BATCHES * HEADS; head++)
        for (int key = SEEN; key < KEYS; key++)
            x->v_scale[head * KEYS + key] = scale;
}

static saccade_tensor tensor_at(data *base, const void *part, const data *host,
                                saccade_dtype dtype, int64_t heads, int64_t n, int64_t d,
                                saccade_device_kind kind)
{
    const int64_t shape[4] = {BATCHES, heads, n, d};
    char *at = (char *)base + ((const char *)part - (const char *)host);
    saccade_tensor t = saccade_tensor_of(at, dtype, 4, shape);
    t.device.kind = kind;
    return t;
}

static saccade_plan *plan_of_codes(const char *backend, const saccade_mod *mask)
{
    saccade_problem p;
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){BATCHES, HEADS * GROUP, HEADS, 1, KEYS, DIM, DIM};
    p.dtype = SACCADE_BF16;
    p.kv_dtype = SACCADE_E4M3;
    p.k_scale_tokens = p.v_scale_tokens = 1;
    p.mask = mask;
    p.backend = backend;
    p.batch_invariant = SACCADE_INVARIANT_SHORT;
    if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    return plan;
}

/* One query of each head over SEEN keys; out in x. On a device `there` is a copy of x. */
static void attend(const saccade_plan *plan, data *x, data *there, void *workspace,
                   size_t bytes, saccade_device_kind kind)
{
    saccade_error err = {0};
    saccade_forward_args a;
    const int64_t H = HEADS * GROUP;
    data *const at = kind == SACCADE_CUDA ? there : x;
    saccade_tensor q = tensor_at(at, x->q, x, SACCADE_BF16, H, 1, DIM, kind);
    saccade_tensor k = tensor_at(at, x->k, x, SACCADE_E4M3, HEADS, KEYS, DIM, kind);
    saccade_tensor v = tensor_at(at, x->v, x, SACCADE_E4M3, HEADS, KEYS, DIM, kind);
    saccade_tensor ks = tensor_at(at, x->k_scale, x, SACCADE_F32, HEADS, KEYS, 1, kind);
    saccade_tensor vs = tensor_at(at, x->v_scale, x, SACCADE_F32, HEADS, KEYS, 1, kind);
    saccade_tensor out = tensor_at(at, x->out, x, SACCADE_BF16, H, 1, DIM, kind);
    saccade_forward_args_init(&a);
    a.q = &q;
    a.k = &k;
    a.v = &v;
    a.k_scale = &ks;
    a.v_scale = &vs;
    a.out = &out;
    a.workspace = workspace;
    a.workspace_bytes = bytes;
    if (kind == SACCADE_CUDA)
        assert_int_equal(saccade_device_copy(0, there, x, sizeof *x, &err), SACCADE_OK);
    if (saccade_forward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    if (kind == SACCADE_CUDA) {
        assert_int_equal(saccade_device_synchronize(0, &err), SACCADE_OK);
        assert_int_equal(saccade_device_copy(0, x, there, sizeof *x, &err), SACCADE_OK);
    }
}

/* A row's bits do not follow from the scales of keys that its mask hides. */
static void check_unseen_scales(const char *backend, saccade_device_kind kind)
{
    static const float scales[] = {0.8f, 9000.0f, 1e-30f};
    const saccade_sizes sizes = {BATCHES, HEADS * GROUP, HEADS, 1, KEYS, DIM, DIM};
    saccade_mod *mask = case_mod(SACCADE_MASK, "kv < 5010");
    saccade_plan *plan = plan_of_codes(backend, mask);
    saccade_error err = {0};
    const size_t bytes = saccade_plan_workspace(plan, &sizes) / 64 * 64 + 64;
    data *x = calloc(1, sizeof *x);
    uint16_t first[BATCHES * HEADS * GROUP * DIM];
    void *workspace = NULL, *there = NULL;
    assert_non_null(x);
    if (kind == SACCADE_CUDA) {
        assert_int_equal(saccade_device_alloc(0, bytes, &workspace, &err), SACCADE_OK);
        assert_int_equal(saccade_device_alloc(0, sizeof *x, &there, &err), SACCADE_OK);
    } else
        workspace = aligned_alloc(64, bytes);
    fill(x);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        set_unseen(x, scales[i]);
        attend(plan, x, there, workspace, bytes, kind);
        if (i == 0)
            memcpy(first, x->out, sizeof first);
        else if (memcmp(first, x->out, sizeof first) != 0)
            fail_msg("%s: other bits where unseen scales are %g", backend, (double)scales[i]);
    }
    for (int key = 0; key < KEYS; key++) /* those that are seen make others */
        x->v_scale[key] *= 1.5f;
    attend(plan, x, there, workspace, bytes, kind);
    assert_memory_not_equal(first, x->out, sizeof first);
    if (kind == SACCADE_CUDA) {
        saccade_device_free(0, workspace);
        saccade_device_free(0, there);
    } else
        free(workspace);
    free(x);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(mask);
}

static void unseen_scales_on_the_host(void **state)
{
    (void)state;
    check_unseen_scales("cpu", SACCADE_CPU);
}

static void unseen_scales(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    check_unseen_scales("cuda", SACCADE_CUDA);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode),
        cmocka_unit_test(decode_of_small_heads),
        cmocka_unit_test(decode_of_many_spans),
        cmocka_unit_test(prefill),
        cmocka_unit_test(decode_of_a_window),
        cmocka_unit_test(odd_dims),
        cmocka_unit_test(decode_of_pages),
        cmocka_unit_test(decode_of_large_heads),
        cmocka_unit_test(decode_of_latent_heads),
        cmocka_unit_test(prefill_of_pages),
        cmocka_unit_test(unseen_scales_on_the_host),
        cmocka_unit_test(unseen_scales),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
