/* Codes and scales of K and V: every code of every dtype, what saccade_quantize makes of
 * numbers, attention over codes against attention over the numbers that they stand for, and
 * what is refused. */
#include "base/convert.h"
#include "base/quantize.h"
#include "plan/plan.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const saccade_dtype dtypes[] = {SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8, SACCADE_I4};
enum { DTYPES = 4 };

/* ---- codes ---- */

static void codes_are_what_the_formats_say(void **state)
{
    (void)state;
    uint8_t all[256];
    float x[512];
    for (int i = 0; i < 256; i++)
        all[i] = (uint8_t)i;
    quant_decode(SACCADE_E4M3, all, 0, 256, x);
    assert_true(isnan(x[0x7f]) && isnan(x[0xff]));
    assert_true(x[0x7e] == 448 && x[0xfe] == -448);
    assert_true(x[1] == 0x1p-9f && x[7] == 7 * 0x1p-9f && x[8] == 0x1p-6f);
    assert_true(x[0x80] == 0 && signbit(x[0x80]) && x[0x38] == 1 && x[0x3c] == 1.5f);
    quant_decode(SACCADE_E5M2, all, 0, 256, x);
    assert_true(x[0x7c] == INFINITY && x[0xfc] == -INFINITY && isnan(x[0x7d]));
    assert_true(x[0x7b] == 57344 && x[1] == 0x1p-16f && x[4] == 0x1p-14f && x[0x3c] == 1);
    quant_decode(SACCADE_I8, all, 0, 256, x);
    for (int i = 0; i < 256; i++)
        assert_true(x[i] == (float)(i < 128 ? i : i - 256));
    quant_decode(SACCADE_I4, all, 0, 512, x);
    for (int i = 0; i < 256; i++) {
        const int lo = i & 15, hi = i >> 4;
        assert_true(x[2 * i] == (float)(lo < 8 ? lo : lo - 16)); /* the low half first */
        assert_true(x[2 * i + 1] == (float)(hi < 8 ? hi : hi - 16));
    }
}

static void finite_codes_come_back(void **state)
{
    (void)state;
    for (int k = 0; k < DTYPES; k++) {
        const int n = dtypes[k] == SACCADE_I4 ? 512 : 256;
        uint8_t all[256], back[256] = {0};
        float x[512];
        for (int i = 0; i < 256; i++)
            all[i] = (uint8_t)i;
        quant_decode(dtypes[k], all, 0, n, x);
        for (int i = 0; i < n; i++)
            quant_encode(dtypes[k], &x[i], 1, 1, back, i);
        for (int i = 0; i < n; i++) {
            float again;
            quant_decode(dtypes[k], back, i, 1, &again);
            const float most = quant_largest(dtypes[k]);
            if (isfinite(x[i])) /* -128 and -8 have no opposite: they are not made */
                assert_true(again == (x[i] < -most ? -most : x[i]));
            else
                assert_true(isnan(again));
        }
    }
}

static void halves_of_bytes_do_not_touch_each_other(void **state)
{
    (void)state;
    uint8_t row[3] = {0xa5, 0xa5, 0xa5};
    const float x[3] = {-7, 3, -1};
    quant_encode(SACCADE_I4, x, 3, 1, row, 1);
    assert_int_equal(row[0], 0x95);
    assert_int_equal(row[1], 0xf3);
    assert_int_equal(row[2], 0xa5);
}

/* ---- tensors ---- */

enum { B = 2, HKV = 2, H = 4, Q = 5, KV = 37, D = 24, DV = 20 };

static float noise(uint64_t *seed)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(*seed >> 40) * 0x1p-24f - 0.5f;
    }
    return 1.7f * sum;
}

typedef struct quantised {
    float x[B * HKV * KV * D], back[B * HKV * KV * D];
    uint8_t codes[B * HKV * KV * D];
    char scales[B * HKV * KV * D * 4];
    saccade_tensor from, to, scale, plain;
} quantised;

typedef struct granularity {
    int32_t tokens, channels;
    int is_shared; /* over batches and heads */
    saccade_dtype dtype;
} granularity;

static const granularity granularities[] = {
    {0, 0, 1, SACCADE_F32}, {0, 0, 0, SACCADE_F32}, {1, 0, 0, SACCADE_F16},
    {0, 1, 0, SACCADE_F32}, {8, 4, 0, SACCADE_F16}, {5, 7, 1, SACCADE_F32},
};
enum { GRANULARITIES = sizeof granularities / sizeof *granularities };

static void quantise(quantised *t, saccade_dtype dtype, const granularity *g, int64_t dim,
                     uint64_t seed)
{
    saccade_error err = {0};
    const int64_t shape[4] = {B, HKV, KV, dim};
    const int64_t scales[4] = {g->is_shared ? 1 : B, g->is_shared ? 1 : HKV,
                               g->tokens ? (KV + g->tokens - 1) / g->tokens : 1,
                               g->channels ? (dim + g->channels - 1) / g->channels : 1};
    for (int64_t i = 0; i < B * HKV * KV * dim; i++)
        t->x[i] = noise(&seed) * (i % dim == 3 ? 9 : 1); /* a channel that stands out */
    t->from = saccade_tensor_of(t->x, SACCADE_F32, 4, shape);
    t->to = saccade_tensor_of(t->codes, dtype, 4, shape);
    t->scale = saccade_tensor_of(t->scales, g->dtype, 4, scales);
    t->plain = saccade_tensor_of(t->back, SACCADE_F32, 4, shape);
    saccade_quantize_args a;
    saccade_quantize_args_init(&a);
    a.from = &t->from;
    a.to = &t->to;
    a.scale = &t->scale;
    a.tokens = g->tokens;
    a.channels = g->channels;
    assert_int_equal(saccade_quantize(NULL, &a, &err), SACCADE_OK);
    const plan_groups groups = {g->tokens, g->channels};
    for (int64_t r = 0; r < B * HKV * KV; r++)
        plan_load_key(&t->to, &t->scale, &groups, r / KV / HKV, r / KV % HKV, r % KV,
                      t->back + r * dim);
}

/* Half a step of the code at hand, of the group's largest magnitude. */
static void quantising_is_to_the_nearest(void **state)
{
    (void)state;
    static quantised t;
    static const float steps[DTYPES] = {1 / 16.0f, 1 / 8.0f, 1 / 254.0f, 1 / 14.0f};
    for (int k = 0; k < DTYPES; k++)
        for (int i = 0; i < GRANULARITIES; i++) {
            float most = 0;
            quantise(&t, dtypes[k], &granularities[i], D, 7);
            for (int64_t j = 0; j < B * HKV * KV * D; j++)
                most = fmaxf(most, fabsf(t.x[j]));
            for (int64_t j = 0; j < B * HKV * KV * D; j++)
                assert_true(fabsf(t.x[j] - t.back[j]) <= 1.01f * steps[k] * most);
        }
}

static void finer_groups_are_nearer(void **state)
{
    (void)state;
    static quantised t;
    double last = INFINITY;
    for (int i = 0; i < 4; i++) {
        static const granularity finer[] = {{0, 0, 1, SACCADE_F32},
                                            {1, 0, 0, SACCADE_F32},
                                            {0, 1, 0, SACCADE_F32},
                                            {8, 1, 0, SACCADE_F32}};
        double sum = 0;
        quantise(&t, SACCADE_I4, &finer[i], D, 9);
        for (int64_t j = 0; j < B * HKV * KV * D; j++)
            sum += pow((double)t.x[j] - (double)t.back[j], 2);
        assert_true(sum < last);
        last = sum;
    }
}

static void extremes(void **state)
{
    (void)state;
    const float x[4] = {INFINITY, 1, NAN, -2};
    float back[4];
    uint8_t codes[4];
    quant_encode(SACCADE_E4M3, x, 4, 0.5f, codes, 0);
    quant_decode(SACCADE_E4M3, codes, 0, 4, back);
    assert_true(isnan(back[0]) && back[1] == 2 && isnan(back[2]) && back[3] == -4);
    const float zeros[4] = {0, -0.0f, 3, -3}; /* of a head that was given a scale of 0 */
    for (int i = 0; i < 2; i++) {
        quant_encode(dtypes[i], zeros, 4, 0, codes, 0);
        quant_decode(dtypes[i], codes, 0, 4, back);
        assert_true(back[0] == 0 && back[1] == 0);
        assert_true(back[2] == quant_largest(dtypes[i]) && back[3] == -back[2]);
    }
    assert_true(quant_most(SACCADE_E4M3, x, 4) == 2 && !isfinite(quant_most(SACCADE_I8, x, 4)));
    assert_true(isnan(quant_scale(SACCADE_I8, SACCADE_F32, INFINITY)));
    assert_true(quant_scale(SACCADE_I4, SACCADE_F16, 0) == 1);
    assert_true(quant_scale(SACCADE_E5M2, SACCADE_F16, 1e-9f) > 0);
    assert_true(isfinite(quant_scale(SACCADE_I4, SACCADE_F16, 1e9f)));
}

/* ---- attention ---- */

typedef struct attention {
    float q[B * H * Q * D], out[2][B * H * Q * DV], lse[2][B * H * Q];
    saccade_tensor qt, ot[2], lt[2];
} attention;

static saccade_status attend(attention *a, int n, const char *backend, const quantised *k,
                             const quantised *v, const granularity *g, saccade_error *err)
{
    saccade_problem p;
    saccade_plan *plan;
    saccade_forward_args run;
    const saccade_sizes sizes = {B, H, HKV, Q, KV, D, DV};
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.backend = backend;
    if (g) {
        p.kv_dtype = k->to.dtype;
        p.k_scale_tokens = p.v_scale_tokens = g->tokens;
        p.k_scale_channels = p.v_scale_channels = g->channels;
    }
    saccade_status status = saccade_plan_create(NULL, &p, &plan, err);
    if (status != SACCADE_OK)
        return status;
    saccade_forward_args_init(&run);
    run.q = &a->qt;
    run.k = g ? &k->to : &k->plain;
    run.v = g ? &v->to : &v->plain;
    run.k_scale = g ? &k->scale : NULL;
    run.v_scale = g ? &v->scale : NULL;
    run.out = &a->ot[n];
    run.lse = &a->lt[n];
    run.workspace_bytes = (saccade_plan_workspace(plan, &sizes) + 63) / 64 * 64;
    run.workspace = aligned_alloc(64, run.workspace_bytes);
    status = saccade_forward(plan, &run, err);
    free(run.workspace);
    saccade_plan_destroy(plan);
    return status;
}

static void begin(attention *a)
{
    const int64_t q[4] = {B, H, Q, D}, o[4] = {B, H, Q, DV};
    uint64_t seed = 3;
    for (int i = 0; i < B * H * Q * D; i++)
        a->q[i] = noise(&seed);
    a->qt = saccade_tensor_of(a->q, SACCADE_F32, 4, q);
    for (int n = 0; n < 2; n++) {
        a->ot[n] = saccade_tensor_of(a->out[n], SACCADE_F32, 4, o);
        a->lt[n] = saccade_tensor_of(a->lse[n], SACCADE_F32, 3, o);
    }
}

static void attention_is_that_over_the_numbers(void **state)
{
    (void)state;
    static attention a;
    static quantised k, v;
    static const char *const backends[] = {"ref", "plain"};
    saccade_error err = {0};
    begin(&a);
    for (int i = 0; i < DTYPES * GRANULARITIES * 2; i++) {
        const granularity *g = &granularities[i / 2 % GRANULARITIES];
        quantise(&k, dtypes[i / 2 / GRANULARITIES], g, D, 11);
        quantise(&v, dtypes[i / 2 / GRANULARITIES], g, DV, 12);
        if (attend(&a, 0, backends[i % 2], &k, &v, g, &err) != SACCADE_OK
            || attend(&a, 1, backends[i % 2], &k, &v, NULL, &err) != SACCADE_OK)
            fail_msg("%s: %s", err.where, err.message);
        for (int j = 0; j < B * H * Q * DV; j++)
            assert_true(fabsf(a.out[0][j] - a.out[1][j]) <= 2e-6f);
        for (int j = 0; j < B * H * Q; j++)
            assert_true(fabsf(a.lse[0][j] - a.lse[1][j]) <= 2e-6f);
    }
}

static void expect(saccade_status status, const saccade_error *err, const char *where,
                   const char *part)
{
    assert_int_equal(status, SACCADE_EINVAL);
    assert_string_equal(err->where, where);
    if (!strstr(err->message, part))
        fail_msg("got '%s', expected '%s' in it", err->message, part);
}

static void what_does_not_fit_is_refused(void **state)
{
    (void)state;
    static attention a;
    static quantised k, v;
    const granularity g = {8, 4, 0, SACCADE_F32};
    granularity wrong = g;
    saccade_error e = {0};
    begin(&a);
    quantise(&k, SACCADE_I4, &g, D, 1);
    quantise(&v, SACCADE_I4, &g, DV, 2);
    wrong.tokens = 4;
    expect(attend(&a, 0, "ref", &k, &v, &wrong, &e), &e, "k_scale",
           "got length 5 in dimension 2, expected 10 or more");
    wrong = (granularity){8, 5, 0, SACCADE_F32};
    expect(attend(&a, 0, "ref", &k, &v, &wrong, &e), &e, "k_scale",
           "got length 6 in dimension 3, expected 5");
    wrong = (granularity){-1, 0, 0, SACCADE_F32};
    expect(attend(&a, 0, "ref", &k, &v, &wrong, &e), &e, "k_scale_tokens", "got -1");
    quantised odd = k;
    odd.to.stride[1] = KV * D + 1;
    expect(attend(&a, 0, "ref", &odd, &v, &g, &e), &e, "k",
           "got stride 889 in dimension 1 of i4, expected an even number");
    odd = k;
    odd.scale.dtype = SACCADE_BF16;
    expect(attend(&a, 0, "ref", &odd, &v, &g, &e), &e, "k_scale", "got dtype bf16");
    odd = k;
    odd.scale.shape[1] = 3;
    expect(attend(&a, 0, "ref", &odd, &v, &g, &e), &e, "k_scale", "got length 3");
    odd = v;
    odd.to.dtype = SACCADE_I8;
    expect(attend(&a, 0, "ref", &k, &odd, &g, &e), &e, "v", "got dtype i8, expected i4");
}

static void problems_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_error e = {0};
    saccade_problem_init(&p);
    p.v_scale_channels = 1;
    expect(saccade_plan_create(NULL, &p, &plan, &e), &e, "v_scale_channels",
           "got 1 with kv_dtype f32");
    p.v_scale_channels = 0;
    p.kv_dtype = SACCADE_U8;
    expect(saccade_plan_create(NULL, &p, &plan, &e), &e, "kv_dtype", "got u8");
    p.kv_dtype = SACCADE_E4M3;
    p.gradients = SACCADE_GRADIENT_Q;
    expect(saccade_plan_create(NULL, &p, &plan, &e), &e, "gradients", "with kv_dtype e4m3");
    assert_null(plan);
    saccade_tangent_args a;
    saccade_tangent_args_init(&a);
    p.gradients = 0;
    p.backend = "ref";
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &e), SACCADE_OK);
    assert_int_equal(saccade_tangent(plan, &a, &e), SACCADE_EBACKEND);
    assert_non_null(strstr(e.message, "got kv_dtype e4m3"));
    saccade_plan_destroy(plan);
    plan = NULL;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_are_what_the_formats_say),
        cmocka_unit_test(finite_codes_come_back),
        cmocka_unit_test(halves_of_bytes_do_not_touch_each_other),
        cmocka_unit_test(quantising_is_to_the_nearest),
        cmocka_unit_test(finer_groups_are_nearer),
        cmocka_unit_test(extremes),
        cmocka_unit_test(attention_is_that_over_the_numbers),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(problems_that_do_not_fit_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
