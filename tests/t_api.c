/* The edge of the library as a caller meets it: every wrong argument gets its one line, nothing
 * is set on failure, a whole run survives each failing allocation, back ends agree. */
#include "mask/mask.h"
#include "saccade_dist.h"
#include "saccade_measure.h"
#include "support/fail_alloc.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 2, H = 4, HKV = 2, Q = 9, KV = 13, D = 8, DV = 6 };

typedef struct setup {
    float q[B * H * Q * D], k[B * HKV * KV * D], v[B * HKV * KV * DV], out[B * H * Q * DV];
    float lse[B * H * Q];
    int32_t doc[KV];
    saccade_context *context;
    saccade_mod *score, *mask;
    saccade_block_mask *block_mask;
    saccade_plan *plan;
    saccade_tensor q_at, k_at, v_at, out_at, lse_at;
    saccade_forward_args args;
    saccade_binding binding;
} setup;

static saccade_status make_mod(saccade_kind kind, const char *text, const saccade_capture *c,
                               int32_t n, saccade_mod **out, saccade_error *err)
{
    saccade_mod *generic;
    saccade_status status = saccade_mod_parse(kind, text, strlen(text), &generic, err);
    if (status != SACCADE_OK)
        return status;
    status = saccade_mod_bind(generic, c, n, out, err);
    saccade_mod_destroy(generic);
    return status;
}

static saccade_tensor tensor4(void *data, int64_t h, int64_t n, int64_t d)
{
    const int64_t shape[4] = {B, h, n, d};
    return saccade_tensor_of(data, SACCADE_F32, 4, shape);
}

static const saccade_sizes sizes = {B, H, HKV, Q, KV, D, DV};

static void fill(setup *s)
{
    const int64_t keys[1] = {KV}, rows[3] = {B, H, Q};
    for (int i = 0; i < B * H * Q * D; i++)
        s->q[i] = sinf((float)i);
    for (int i = 0; i < B * HKV * KV * D; i++)
        s->k[i] = cosf((float)(3 * i));
    for (int i = 0; i < B * HKV * KV * DV; i++)
        s->v[i] = sinf((float)(7 * i));
    for (int i = 0; i < KV; i++)
        s->doc[i] = i / 5;
    s->binding = (saccade_binding){"doc", saccade_tensor_of(s->doc, SACCADE_I32, 1, keys)};
    s->q_at = tensor4(s->q, H, Q, D);
    s->k_at = tensor4(s->k, HKV, KV, D);
    s->v_at = tensor4(s->v, HKV, KV, DV);
    s->out_at = tensor4(s->out, H, Q, DV);
    s->lse_at = saccade_tensor_of(s->lse, SACCADE_F32, 3, rows);
    s->args = (saccade_forward_args){
        .size = sizeof s->args,
        .q = &s->q_at,
        .k = &s->k_at,
        .v = &s->v_at,
        .out = &s->out_at,
        .lse = &s->lse_at,
        .bindings = &s->binding,
        .n_bindings = 1,
    };
}

/* Everything up to a plan, on one thread; what was made is in *s also after a failure. */
static saccade_status build(setup *s, const char *backend, saccade_error *err)
{
    const saccade_context_options options = {.size = sizeof options, .threads = 1};
    const saccade_capture doc = {"doc", SACCADE_I32, 1};
    saccade_problem p;
    saccade_problem_init(&p);
    saccade_status status = saccade_context_create(&options, &s->context, err);
    if (status == SACCADE_OK)
        status = make_mod(SACCADE_SCORE, "score + 0.1 * (kv - q)", NULL, 0, &s->score, err);
    if (status == SACCADE_OK)
        status = make_mod(SACCADE_MASK, "doc[q] == doc[kv]", &doc, 1, &s->mask, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_create(s->context, s->mask, &sizes, NULL, &s->binding, 1,
                                           NULL, &s->block_mask, err);
    p.sizes = sizes;
    p.score = s->score;
    p.mask = s->mask;
    p.backend = backend;
    if (status == SACCADE_OK)
        status = saccade_plan_create(s->context, &p, &s->plan, err);
    if (status == SACCADE_OK)
        status = saccade_plan_prepare(s->plan, s->block_mask, err);
    return status;
}

static void tear_down(setup *s)
{
    saccade_plan_destroy(s->plan);
    saccade_block_mask_destroy(s->block_mask);
    saccade_mod_destroy(s->mask);
    saccade_mod_destroy(s->score);
    saccade_context_destroy(s->context);
    free(s->args.workspace);
}

static saccade_status forward(setup *s, saccade_error *err)
{
    const size_t bytes = saccade_plan_workspace(s->plan, &sizes);
    s->args.workspace_bytes = (bytes + 63) / 64 * 64;
    free(s->args.workspace);
    s->args.workspace = bytes ? aligned_alloc(64, s->args.workspace_bytes) : NULL;
    if (bytes && !s->args.workspace)
        return SACCADE_ENOMEM;
    s->args.block_mask = s->block_mask;
    return saccade_forward(s->plan, &s->args, err);
}

static setup *ready(const char *backend)
{
    saccade_error err;
    setup *s = calloc(1, sizeof *s);
    assert_non_null(s);
    fill(s);
    if (build(s, backend, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", backend, err.where, err.message);
    return s;
}

/* ---- agreement ---- */

static void back_ends_agree(void **unused)
{
    (void)unused;
    static const char *const names[] = {"ref", "cpu", "plain", "auto"};
    float first[B * H * Q * DV];
    for (int i = 0; i < 4; i++) {
        saccade_error err;
        setup *s = ready(names[i]);
        if (forward(s, &err) != SACCADE_OK)
            fail_msg("%s: %s: %s", names[i], err.where, err.message);
        if (i == 0)
            memcpy(first, s->out, sizeof first);
        for (int j = 0; j < B * H * Q * DV; j++)
            assert_true(fabsf(first[j] - s->out[j]) < 1e-5f);
        tear_down(s);
        free(s);
    }
}

/* Without a block mask the same, bit for bit. */
static void block_mask_is_optional(void **unused)
{
    (void)unused;
    saccade_error err;
    float with[B * H * Q * DV];
    setup *s = ready("cpu");
    assert_int_equal(saccade_forward(NULL, &s->args, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_forward(s->plan, NULL, &err), SACCADE_EINVAL);
    assert_int_equal(forward(s, &err), SACCADE_OK);
    memcpy(with, s->out, sizeof with);
    memset(s->out, 0xff, sizeof s->out);
    s->args.block_mask = NULL;
    assert_int_equal(saccade_forward(s->plan, &s->args, &err), SACCADE_OK);
    assert_memory_equal(with, s->out, sizeof with);
    tear_down(s);
    free(s);
}

static void explain_says_what_runs(void **unused)
{
    (void)unused;
    saccade_error err;
    char *text = NULL;
    setup *s = ready("cpu");
    assert_int_equal(saccade_plan_explain(s->plan, &text, &err), SACCADE_OK);
    assert_non_null(strstr(text, "b2 h4/2 q9 kv13 d8 dv6 f32"));
    assert_non_null(strstr(text, "backend: cpu"));
    saccade_free(text);
    tear_down(s);
    free(s);
}

/* A score within the limit whose gradient is beyond it runs forward, and is explained. */
static void gradients_may_be_too_large(void **unused)
{
    static const char *const text = "sum(i, 2000, sin(score * i) * cos(score + i))";
    saccade_mod *score;
    saccade_problem p;
    saccade_plan *plan;
    saccade_error err;
    char *words;
    (void)unused;
    assert_int_equal(make_mod(SACCADE_SCORE, text, NULL, 0, &score, NULL), SACCADE_OK);
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 1, .Hkv = 1, .D = 8, .Dv = 8};
    p.dtype = SACCADE_F32;
    p.backend = "cpu";
    p.score = score;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_explain(plan, &words, &err), SACCADE_OK);
    assert_non_null(strstr(words, "gradient by score: of more operations"));
    saccade_free(words);
    saccade_plan_destroy(plan);
    p.gradients = SACCADE_GRADIENT_Q;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_ELIMIT);
    assert_non_null(strstr(err.message, "gradient: got more than 16384 operations"));
    saccade_mod_destroy(score);
}

/* Sums of constants are folded for kernels, and computed by the truth. */
static void only_the_truth_reads_parsed_nodes(void **unused)
{
    static const char *const backends[] = {"cpu", "ref"};
    const char *text = "kv < 3 + 4";
    saccade_mod *generic, *mask;
    (void)unused;
    assert_int_equal(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &mask, NULL), SACCADE_OK);
    for (int i = 0; i < 2; i++) {
        saccade_problem p;
        saccade_plan *plan;
        char *words;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){.H = 1, .Hkv = 1, .D = 8, .Dv = 8};
        p.dtype = SACCADE_F32;
        p.backend = backends[i];
        p.mask = mask;
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, NULL), SACCADE_OK);
        assert_int_equal(saccade_plan_explain(plan, &words, NULL), SACCADE_OK);
        assert_int_equal(strstr(words, "iadd") != NULL, i == 1);
        assert_int_equal(strstr(words, "facts of mask") != NULL, i == 0);
        saccade_free(words);
        saccade_plan_destroy(plan);
    }
    saccade_mod_destroy(mask);
    saccade_mod_destroy(generic);
}

/* ---- mistakes ---- */

static void expect(setup *s, const char *where, const char *part)
{
    saccade_error err = {0};
    const saccade_status status = saccade_forward(s->plan, &s->args, &err);
    if (status == SACCADE_OK || strcmp(err.where, where) != 0 || !strstr(err.message, part))
        fail_msg("got %d '%s': '%s', expected '%s': '%s'", status, err.where, err.message,
                 where, part);
    assert_null(strchr(err.message, '\n'));
}

static void wrong_tensors(void **unused)
{
    (void)unused;
    saccade_error err;
    setup *s = ready("cpu");
    assert_int_equal(forward(s, &err), SACCADE_OK);
    const setup good = *s;
#define WRONG(change, where, part) \
    do {                           \
        change;                    \
        expect(s, where, part);    \
        s->args = good.args;       \
        s->q_at = good.q_at;       \
        s->k_at = good.k_at;       \
        s->v_at = good.v_at;       \
        s->out_at = good.out_at;   \
        s->lse_at = good.lse_at;   \
    } while (0)
    WRONG(s->q_at.dtype = SACCADE_F16, "q", "got dtype f16, expected f32");
    WRONG(s->q_at.rank = 3, "q", "got rank 3, expected 4");
    WRONG(s->q_at.data = NULL, "q", "no data");
    WRONG(s->q_at.data = (char *)good.q_at.data + 2, "q", "expected a multiple of 4");
    WRONG(s->lse_at.data = (char *)good.lse_at.data + 1, "lse", "expected a multiple of 4");
    WRONG(s->q_at.shape[1] = 3, "q", "got length 3 in dimension 1, expected 4");
    WRONG(s->k_at.shape[0] = 1, "k", "got length 1 in dimension 0, expected 2");
    WRONG(s->v_at.shape[2] = 7, "v", "got length 7 in dimension 2, expected 13");
    WRONG(s->k_at.stride[3] = 2, "k", "stride 2 in the last dimension");
    WRONG(s->v_at.stride[2] = -4, "v", "got stride -4");
    WRONG(s->k_at.stride[2] = INT64_MAX, "k", "expected elements within 2^58 of the first");
    WRONG(s->out_at.stride[0] = (int64_t)1 << 62, "out", "within 2^58");
    WRONG(s->out_at.stride[0] = 0, "out", "stride 0 in dimension 0 of an output");
    WRONG(s->out_at.stride[2] -= 1, "out", "elements that do not overlap");
    WRONG(s->out_at.stride[1] = s->out_at.stride[2], "out", "elements that do not overlap");
    WRONG(s->q_at.device.kind = (saccade_device_kind)7, "q", "device kind 7");
    WRONG(s->k_at.device.kind = (saccade_device_kind)-1, "k", "device kind -1");
    WRONG(s->args.q = NULL, "q", "got NULL");
    WRONG(s->args.out = NULL, "out", "got NULL");
    WRONG(s->out_at.data = s->v, "out", "got the data of v, expected memory of its own");
    WRONG(s->lse_at.data = s->q, "lse", "got the data of q");
    WRONG(s->lse_at.data = s->out, "lse", "got elements that lie in those of out");
    WRONG(s->args.row_max = &s->lse_at, "row_max", "those of lse");
    WRONG(s->args.workspace = NULL, "workspace", "got no data");
    WRONG(s->args.n_bindings = -1, "bindings", "got -1");
    WRONG(s->lse_at.dtype = SACCADE_F16, "lse", "got dtype f16");
    WRONG(s->q_at.device.kind = SACCADE_CUDA, "q", "on a GPU");
    WRONG(s->q_at.shape[2] = 0, "q", "got length 0");
    WRONG(s->args.workspace_bytes = 0, "workspace", "got 0 bytes");
    WRONG(s->args.workspace = (char *)good.args.workspace + 1, "workspace", "multiple of 64");
#undef WRONG
    tear_down(s);
    free(s);
}

static void wrong_positions_and_captures(void **unused)
{
    (void)unused;
    saccade_error err;
    int32_t length[B] = {3, KV + 1}, offset = 4;
    const int64_t batches[1] = {B};
    setup *s = ready("cpu");
    assert_int_equal(forward(s, &err), SACCADE_OK);
    const saccade_tensor lengths = saccade_tensor_of(length, SACCADE_I32, 1, batches);
    const saccade_tensor offsets = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    const saccade_positions long_keys = {.size = sizeof long_keys, .kv_len = &lengths};
    const saccade_positions moved = {.size = sizeof moved, .q_offset = &offsets};
    s->args.positions = &long_keys;
    expect(s, "kv_len", "got 14 for batch 1, expected 0 to 13");
    saccade_tensor odd = lengths;
    odd.data = (char *)length + 1;
    const saccade_positions odd_keys = {.size = sizeof odd_keys, .kv_len = &odd};
    s->args.positions = &odd_keys;
    expect(s, "kv_len", "expected a multiple of 4, the bytes of an element of i32");
    s->args.positions = &moved;
    expect(s, "block_mask", "other offsets");
    s->args.positions = NULL;
    s->binding.name = "dog";
    expect(s, "dog", "no text names");
    s->binding.name = "doc";
    s->args.n_bindings = 0;
    assert_int_equal(saccade_forward(s->plan, &s->args, &err), SACCADE_OK); /* mask's */
    s->args.block_mask = NULL;
    expect(s, "doc", "");
    tear_down(s);
    free(s);
}

/* An architecture is one of a GPU's: other back ends would pass over it. */
static void architectures_are_of_gpus(void **unused)
{
    static const char *const others[] = {"cpu", "ref", "plain"};
    saccade_plan *plan = NULL;
    saccade_error err;
    saccade_problem p;
    (void)unused;
    saccade_problem_init(&p);
    p.arch = "sm_90a";
    for (int i = 0; i < 3; i++) {
        p.backend = others[i];
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, "arch");
        assert_non_null(strstr(err.message, others[i]));
    }
    for (int i = 0; i < 2; i++) {
        p.backend = i ? "auto" : NULL;
        p.arch = "foo";
        assert_int_not_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
        p.arch = "sm_90a";
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK) {
            assert_int_equal(err.status, SACCADE_EBACKEND); /* no compiler of such code here */
            continue;
        }
        char *text;
        assert_int_equal(saccade_plan_explain(plan, &text, &err), SACCADE_OK);
        assert_non_null(strstr(text, "backend: cuda"));
        saccade_free(text);
        saccade_plan_destroy(plan);
    }
}

/* A name that two texts read as tensors of two kinds cannot be bound in any run. */
static void one_kind_for_a_name(void **unused)
{
    static const struct {
        saccade_capture in_mask, in_score;
        const char *mask, *score;
        int is_fine;
    } rows[] = {
        {{"x", SACCADE_F32, 1}, {"x", SACCADE_F16, 1}, "x[q] > 0.0", "score + x[q]", 0},
        {{"x", SACCADE_F32, 1}, {"x", SACCADE_F32, 1}, "x[q] > 0.0", "score + x[q]", 1},
        {{"x", SACCADE_F32, 0}, {"x", SACCADE_F16, 0}, "x > 0.0", "score + x", 1},
        {{"x", SACCADE_I32, 0}, {"x", SACCADE_F32, 0}, "x > 0", "score + x", 0},
        {{"x", SACCADE_F32, 0}, {"x", SACCADE_F32, 1}, "x > 0.0", "score + x[q]", 0},
        {{"x", SACCADE_F32, 1},
         {"x", SACCADE_F16, 1},
         "x[q] > 0.0",
         "y = x[q]; score",
         1}, /* which reads nothing */
    };
    (void)unused;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        saccade_error err;
        saccade_mod *mask, *score;
        saccade_plan *plan = NULL;
        saccade_problem p;
        saccade_problem_init(&p);
        assert_int_equal(make_mod(SACCADE_MASK, rows[i].mask, &rows[i].in_mask, 1, &mask, &err),
                         SACCADE_OK);
        assert_int_equal(
            make_mod(SACCADE_SCORE, rows[i].score, &rows[i].in_score, 1, &score, &err),
            SACCADE_OK);
        p.mask = mask;
        p.score = score;
        const saccade_status status = saccade_plan_create(NULL, &p, &plan, &err);
        if (status != (rows[i].is_fine ? SACCADE_OK : SACCADE_EINVAL))
            fail_msg("row %zu: got %d", i, status);
        if (!rows[i].is_fine)
            assert_string_equal(err.where, "x");
        saccade_plan_destroy(plan);
        saccade_mod_destroy(mask);
        saccade_mod_destroy(score);
    }
}

/* A block mask and a run must mean the same captures: whole blocks would come from one, the
 * others from the other. */
static void masks_of_other_captures(void **unused)
{
    (void)unused;
    saccade_error err;
    const int64_t keys[1] = {KV};
    int32_t other[2 * KV];
    setup *s = ready("cpu");
    assert_int_equal(forward(s, &err), SACCADE_OK);
    memcpy(other, s->doc, sizeof s->doc);
    s->binding.tensor = saccade_tensor_of(other, SACCADE_I32, 1, keys);
    expect(s, "doc", "another address");
    s->binding.tensor = saccade_tensor_of(s->doc, SACCADE_I32, 1, keys);
    s->binding.tensor.shape[0] = KV - 1;
    expect(s, "doc", "another shape");
    s->binding.tensor.shape[0] = KV;
    s->binding.tensor.stride[0] = 0;
    expect(s, "doc", "other strides");
    s->binding.tensor.stride[0] = 1;
    assert_int_equal(saccade_forward(s->plan, &s->args, &err), SACCADE_OK);
    s->args.block_mask = NULL;
    s->binding.tensor = saccade_tensor_of(other, SACCADE_I32, 1, keys);
    assert_int_equal(saccade_forward(s->plan, &s->args, &err), SACCADE_OK);
    tear_down(s);
    free(s);
}

/* Scalars count by value, wherever they lie and of whatever width, and as they were when the
 * mask was proven. */
static void masks_of_other_scalars(void **unused)
{
    (void)unused;
    saccade_error err;
    const saccade_capture width = {"W", SACCADE_I32, 0};
    int32_t proven = 3, same = 3;
    int64_t wide = 3;
    setup *s = ready("cpu");
    saccade_plan_destroy(s->plan);
    saccade_mod_destroy(s->mask);
    saccade_block_mask_destroy(s->block_mask);
    saccade_problem p;
    saccade_problem_init(&p);
    assert_int_equal(make_mod(SACCADE_MASK, "abs(q - kv) < W", &width, 1, &s->mask, &err),
                     SACCADE_OK);
    p.sizes = sizes;
    p.mask = s->mask;
    s->binding = (saccade_binding){"W", saccade_tensor_of(&proven, SACCADE_I32, 0, NULL)};
    assert_int_equal(saccade_block_mask_create(NULL, s->mask, &sizes, NULL, &s->binding, 1,
                                               NULL, &s->block_mask, &err),
                     SACCADE_OK);
    assert_int_equal(saccade_plan_create(NULL, &p, &s->plan, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_prepare(s->plan, s->block_mask, &err), SACCADE_OK);
    assert_int_equal(forward(s, &err), SACCADE_OK);
    s->binding.tensor = saccade_tensor_of(&same, SACCADE_I32, 0, NULL);
    assert_int_equal(forward(s, &err), SACCADE_OK);
    s->binding.tensor = saccade_tensor_of(&wide, SACCADE_I64, 0, NULL);
    assert_int_equal(forward(s, &err), SACCADE_OK);
    wide = 4;
    expect(s, "W", "another value");
    proven = 4;
    expect(s, "W", "another value");
    assert_int_equal(saccade_block_mask_update(s->block_mask, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_prepare(s->plan, s->block_mask, &err), SACCADE_OK);
    assert_int_equal(forward(s, &err), SACCADE_OK);
    s->args.n_bindings = 0;
    proven = 5;
    expect(s, "W", "another value");
    tear_down(s);
    free(s);
}

/* A plan of a mask and a block mask of it for `made`, proven, or all blocks imported. */
static setup *of_mask(const char *text, const saccade_sizes *made, int is_imported)
{
    int32_t n[4] = {2, 2, 2, 2}, lists[8] = {0, 1, 0, 1, 0, 1, 0, 1};
    const saccade_block_indices all = {1, 1, 2, 2, 8, 8, n, lists, NULL, NULL};
    saccade_block_mask_options o;
    saccade_problem p;
    saccade_error err = {.message = ""};
    setup *s = ready("cpu");
    saccade_plan_destroy(s->plan);
    saccade_mod_destroy(s->mask);
    saccade_block_mask_destroy(s->block_mask);
    s->args.n_bindings = 0;
    saccade_problem_init(&p);
    saccade_block_mask_options_init(&o);
    o.block_q = o.block_kv = 8;
    if (make_mod(SACCADE_MASK, text, NULL, 0, &s->mask, &err) != SACCADE_OK
        || (is_imported ? saccade_block_mask_import(NULL, &all, s->mask, made, NULL, NULL, 0,
                                                    &s->block_mask, &err)
                        : saccade_block_mask_create(NULL, s->mask, made, NULL, NULL, 0, &o,
                                                    &s->block_mask, &err))
               != SACCADE_OK)
        fail_msg("%s: %s: %s", text, err.where, err.message);
    p.sizes = sizes;
    p.mask = s->mask;
    assert_int_equal(saccade_plan_create(NULL, &p, &s->plan, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_prepare(s->plan, s->block_mask, &err), SACCADE_OK);
    s->args.block_mask = s->block_mask;
    return s;
}

/* Whole blocks would come from one set of sizes and what is live in others from another. */
static void masks_of_other_sizes(void **unused)
{
    static const struct {
        const char *text;
        saccade_sizes made;
        const char *words; /* NULL: fine */
    } cases[] = {
        {"kv < D",
         {B, H, HKV, Q, KV, 1, DV},
         "for D = 1, which its text reads, expected the "
         "run's 8"},
        {"kv < D", {B, H, HKV, Q, KV, 0, DV}, "for D = 0"},
        {"kv < D", {B, 1, 1, Q, KV, D, 1}, NULL},
        {"kv < 2 * Dv", {B, H, HKV, Q, KV, D, D}, "for Dv = 8"},
        {"kv < 4 * Hkv", {B, H, H, Q, KV, D, DV}, "for Hkv = 4"},
        {"kv < 2 * H", {B, 1, 1, Q, KV, D, DV}, "for H = 1"},
        {"kv < 5 * B", {1, H, HKV, Q, KV, D, DV}, "for B = 1"},
        {"kv <= 2 * h",
         {B, 1, 1, Q, KV, D, DV},
         "for 1 heads, whose text reads h, expected the "
         "run's 4"},
        {"kv <= 5 * b", {1, H, HKV, Q, KV, D, DV}, "for 1 batch entries"},
        {"kv <= 2 * h + b", {B, H, 1, Q, KV, 1, 1}, NULL},
        {"kv < 12 && (kv < Q || kv < KV)", {1, 1, 1, Q, KV, 1, 1}, NULL},
    };
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setup *s = of_mask(cases[i].text, &cases[i].made, 0);
        saccade_error err = {.message = ""};
        if (cases[i].words)
            expect(s, "block_mask", cases[i].words);
        else if (forward(s, &err) != SACCADE_OK)
            fail_msg("%s: %s: %s", cases[i].text, err.where, err.message);
        tear_down(s);
        free(s);
    }
}

/* Lists that were imported are the truth for all sizes; what was proven in them is not. */
static void imported_masks_of_other_sizes(void **unused)
{
    const saccade_sizes made = {1, 1, 1, Q, KV, 1, 1};
    saccade_block_mask *both;
    saccade_error err;
    (void)unused;
    setup *lists = of_mask("kv <= h || kv < D", &made, 1), *s = of_mask("kv < D", &made, 0);
    if (forward(lists, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    assert_int_equal(saccade_block_mask_or(lists->block_mask, s->block_mask, &both, &err),
                     SACCADE_OK);
    saccade_plan_destroy(s->plan);
    saccade_block_mask_destroy(s->block_mask);
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.mask = saccade_block_mask_mod(both);
    s->args.block_mask = s->block_mask = both;
    assert_int_equal(saccade_plan_create(NULL, &p, &s->plan, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_prepare(s->plan, both, &err), SACCADE_OK);
    expect(s, "block_mask", "for D = 1");
    tear_down(lists);
    tear_down(s);
    free(lists);
    free(s);
}

/* What lies on a GPU cannot be compared with the host's tensor that the proof read. */
static void masks_of_device_captures(void **unused)
{
    (void)unused;
    setup *s = ready("cpu");
    saccade_tensor device = s->binding.tensor;
    device.data = &device;
    const mod_fn *fn = mod_function(s->mask);
    assert_int_equal(mask_check_captures(s->block_mask, fn, &device, NULL), SACCADE_EINVAL);
    device.device.kind = SACCADE_CUDA;
    assert_int_equal(mask_check_captures(s->block_mask, fn, &device, NULL), SACCADE_OK);
    tear_down(s);
    free(s);
}

/* Captures that nothing reads any more, or whose score came to nothing, are known by name. */
static void captures_without_use(void **unused)
{
    static const char *const texts[] = {"x = scales[h]; score", "score + 0 * int(scales[h])"};
    const saccade_capture scales = {"scales", SACCADE_F32, 1};
    const int64_t heads[1] = {H};
    float values[H] = {1, 2};
    (void)unused;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        saccade_error err;
        setup *s = ready("cpu");
        saccade_mod *score;
        saccade_problem p;
        saccade_problem_init(&p);
        assert_int_equal(make_mod(SACCADE_SCORE, texts[i], &scales, 1, &score, &err),
                         SACCADE_OK);
        saccade_plan_destroy(s->plan);
        p.sizes = sizes;
        p.score = score;
        assert_int_equal(saccade_plan_create(NULL, &p, &s->plan, &err), SACCADE_OK);
        s->binding =
            (saccade_binding){"scales", saccade_tensor_of(values, SACCADE_F32, 1, heads)};
        saccade_block_mask_destroy(s->block_mask);
        s->block_mask = NULL;
        if (forward(s, &err) != SACCADE_OK)
            fail_msg("%s: %s: %s", texts[i], err.where, err.message);
        s->binding.name = "scale";
        expect(s, "scale", "no text names");
        saccade_mod_destroy(score);
        tear_down(s);
        free(s);
    }
}

static void wrong_problems(void **unused)
{
    (void)unused;
    static const struct {
        saccade_sizes sizes;
        saccade_dtype dtype;
        double scale;
        const char *backend, *where;
    } cases[] = {
        {{1, 3, 2, 0, 0, 8, 8}, SACCADE_F32, 1, "cpu", "heads"},
        {{1, 1, 0, 0, 0, 8, 8}, SACCADE_F32, 1, "cpu", "heads"},
        {{1, 1, 1, 0, 0, 0, 8}, SACCADE_F32, 1, "cpu", "head dim"},
        {{-1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, 1, "cpu", "sizes"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_I32, 1, "cpu", "dtype"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, INFINITY, "cpu", "scale"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, 1e39, "cpu", "scale"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F64, -INFINITY, "ref", "scale"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, 1, "gpu", "backend"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F64, 1, "cpu", "plan"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        saccade_problem p;
        saccade_problem_init(&p);
        saccade_plan *plan = NULL;
        saccade_error err = {0};
        p.sizes = cases[i].sizes;
        p.dtype = cases[i].dtype;
        p.scale = cases[i].scale;
        p.backend = cases[i].backend;
        assert_int_not_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
        assert_string_equal(err.where, cases[i].where);
        assert_null(plan);
    }
}

static void wrong_contexts(void **unused)
{
    (void)unused;
    saccade_context *c = NULL;
    saccade_error err;
    saccade_context_options o = {.size = sizeof o, .threads = -4097};
    assert_int_equal(saccade_context_create(&o, &c, &err), SACCADE_EINVAL);
    o = (saccade_context_options){.size = sizeof o, .level = "sse9"};
    assert_int_equal(saccade_context_create(&o, &c, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "level");
    assert_string_equal(err.message, "got 'sse9', expected portable, avx2, avx512 or amx");
    o = (saccade_context_options){.size = sizeof o, .threads = 4097};
    assert_int_equal(saccade_context_create(&o, &c, &err), SACCADE_EINVAL);
    assert_null(c);
    saccade_context_destroy(NULL);
    saccade_plan_destroy(NULL);
}

/* What an error is about has its place, not only a word of the message. */
static void errors_have_a_place(void **unused)
{
    saccade_error err;
    saccade_plan *plan;
    saccade_mod *mod;
    const saccade_sizes one = {.B = 1, .H = 1, .Hkv = 1, .Q = 1, .KV = 1, .D = 1, .Dv = 1};
    (void)unused;
#define PLACE(call, place)                               \
    do {                                                 \
        assert_int_not_equal(call, SACCADE_OK);          \
        assert_string_equal(err.where, place);           \
        assert_memory_equal(err.message, "got NULL", 8); \
    } while (0)
    PLACE(saccade_forward(NULL, NULL, &err), "forward");
    PLACE(saccade_backward(NULL, NULL, &err), "backward");
    PLACE(saccade_tangent(NULL, NULL, &err), "tangent");
    PLACE(saccade_plan_create(NULL, NULL, &plan, &err), "plan");
    PLACE(saccade_plan_explain(NULL, NULL, &err), "explain");
    PLACE(saccade_plan_prepare(NULL, NULL, &err), "prepare");
    PLACE(saccade_context_create(NULL, NULL, &err), "context");
    PLACE(saccade_mod_parse(SACCADE_MASK, NULL, 3, &mod, &err), "parse");
    PLACE(saccade_mod_bind(NULL, NULL, 0, &mod, &err), "bind");
    PLACE(saccade_block_mask_create(NULL, NULL, &one, NULL, NULL, 0, NULL, NULL, &err),
          "block_mask");
    PLACE(saccade_block_mask_render(NULL, 0, 0, SACCADE_TEXT, 0, NULL, NULL, &err), "render");
    PLACE(saccade_block_mask_export(NULL, 0, NULL, &err), "export");
    PLACE(saccade_measure_ceilings(NULL, NULL, &err), "ceilings");
    PLACE(saccade_measure_read(NULL, NULL, 0, NULL, &err), "read");
#undef PLACE
    setup *s = ready("cpu");
    s->args.bindings = NULL;
    expect(s, "bindings", "got 1 and NULL, expected");
    saccade_sizes other = sizes;
    other.H = HKV; /* fewer than every run of this plan has */
    assert_true(saccade_plan_workspace(s->plan, &other) == SIZE_MAX);
    other.H = 2 * H;
    assert_true(saccade_plan_workspace(s->plan, &other) < SIZE_MAX);
    assert_true(saccade_plan_workspace(NULL, &other) == 0);
    tear_down(s);
    free(s);
}

/* The read ceiling: any alignment, no byte past the end, clear errors. */
static void memory_is_read(void **unused)
{
    (void)unused;
    enum { PAGE = 4096 };
    const saccade_context_options o = {.size = sizeof o, .threads = 2};
    saccade_context *c = NULL;
    saccade_error err;
    char *data = calloc(5, PAGE);
    double rate = 0;
    assert_non_null(data);
    assert_int_equal(saccade_context_create(&o, &c, &err), SACCADE_OK);
    for (int from = 0; from < 3; from++) {
        assert_int_equal(saccade_measure_read(c, data + from, 5 * PAGE - from, &rate, &err),
                         SACCADE_OK);
        assert_true(rate > 0 && rate < 1e6);
    }
    assert_int_equal(saccade_measure_read(c, data, 3 * PAGE - 1, &rate, &err), SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "got 12287 bytes"));
    assert_int_equal(saccade_measure_read(c, NULL, 5 * PAGE, &rate, &err), SACCADE_EINVAL);
    free(data);
    saccade_context_destroy(c);
}

static void indices_are_checked(void **unused)
{
    (void)unused;
    const saccade_capture doc = {"doc", SACCADE_I32, 1};
    saccade_mod *mod;
    saccade_error err;
    setup *s = ready("cpu");
    assert_int_equal(
        make_mod(SACCADE_MASK, "kv < 4 ||\n doc[kv - 4] == doc[q + 9]", &doc, 1, &mod, &err),
        SACCADE_OK);
    assert_int_equal(saccade_mod_check(mod, &sizes, NULL, &s->binding, 1, 0, &err),
                     SACCADE_EVALUE);
    assert_int_equal(err.line, 2);
    assert_non_null(strstr(err.message, "got index 13"));
    saccade_mod_destroy(mod);
    assert_int_equal(
        make_mod(SACCADE_MASK, "kv < 4 || doc[kv - 4] == doc[q]", &doc, 1, &mod, &err),
        SACCADE_OK);
    assert_int_equal(saccade_mod_check(mod, &sizes, NULL, &s->binding, 1, 0, &err), SACCADE_OK);
    saccade_mod_destroy(mod);
    tear_down(s);
    free(s);
}

/* All of a capture's indices, of however many positions and whatever the score. */
static void indices_are_seen(void **unused)
{
    static const struct {
        const char *text;
        saccade_sizes sizes;
        const char *words; /* NULL: fine */
    } cases[] = {
        {"score > 1.0 ? float(doc[q + 1000]) : score", {1, 1, 1, 2, 2, 1, 1}, "got index 1000"},
        {"score <= 1.0 ? score : float(doc[q + 1000])", {1, 1, 1, 2, 2, 1, 1}, "index 1000"},
        {"score > 1.0 && q < 13 ? float(doc[q]) : score", {1, 1, 1, 20, 2, 1, 1}, NULL},
        {"q < 13 && score > 1.0 ? float(doc[q]) : score", {1, 1, 1, 20, 2, 1, 1}, NULL},
        {"q >= 13 || score > 1.0 ? score : float(doc[q])", {1, 1, 1, 20, 2, 1, 1}, NULL},
        {"score > 1.0 || q < 13 ? float(doc[q]) : score", {1, 1, 1, 20, 2, 1, 1}, "index 13"},
        {"score > 1.0 && doc[q] > 0 ? 1.0 : score", {1, 1, 1, 20, 2, 1, 1}, "index 13"},
        {"(score > 1.0 ? q : 3) > 50 ? float(doc[q]) : score",
         {1, 1, 1, 20, 2, 1, 1},
         "index 13"},
        {"!(q < 13 && score > 1.0) ? score : float(doc[q])", {1, 1, 1, 20, 2, 1, 1}, NULL},
        /* 2^93 positions, sampled up to the end, and none outside of the sizes */
        {"score + float(doc[b < 0 || b > 1073741823 ? 99 : 0]) + float(doc[h < 0 || h > "
         "1073741823 ? 99 : 0]) + float(doc[q < 0 || q > 7 || kv < 0 || kv > 1073741823 ? 99 : "
         "0])",
         {1 << 30, 1 << 30, 1, 8, 1 << 30, 1, 1},
         NULL},
        {"score + float(doc[b > 1072000000 ? 99 : 0])",
         {1 << 30, 1 << 30, 1, 8, 1 << 30, 1, 1},
         "got index 99"},
        {"score + float(doc[h > 1072000000 ? 99 : 0])",
         {1, 1 << 30, 1, 1 << 30, 1 << 30, 1, 1},
         "got index 99"},
    };
    const saccade_capture doc = {"doc", SACCADE_I32, 1};
    (void)unused;
    setup *s = ready("cpu");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        saccade_mod *mod;
        saccade_error err = {.message = ""};
        assert_int_equal(make_mod(SACCADE_SCORE, cases[i].text, &doc, 1, &mod, &err),
                         SACCADE_OK);
        const saccade_status got =
            saccade_mod_check(mod, &cases[i].sizes, NULL, &s->binding, 1, 1000, &err);
        if (got != (cases[i].words ? SACCADE_EVALUE : SACCADE_OK)
            || (cases[i].words && !strstr(err.message, cases[i].words)))
            fail_msg("%s: got %d '%s'", cases[i].text, got, err.message);
        saccade_mod_destroy(mod);
    }
    tear_down(s);
    free(s);
}

/* Positions are held against their shape and type before anything reads them. */
static void checked_positions_are_checked(void **unused)
{
    (void)unused;
    const saccade_capture doc = {"doc", SACCADE_I32, 1};
    const int64_t three = 3;
    static int32_t values[3];
    static double wide[1];
    saccade_tensor t = saccade_tensor_of(values, SACCADE_I32, 1, &three);
    saccade_positions p;
    saccade_mod *mod;
    saccade_error err;
    setup *s = ready("cpu");
    saccade_positions_init(&p);
    assert_int_equal(make_mod(SACCADE_MASK, "doc[kv] == doc[q]", &doc, 1, &mod, &err),
                     SACCADE_OK);
    p.q_offset = &t; /* of three batches, where there are fewer */
    assert_true(sizes.B != 3);
    assert_int_equal(saccade_mod_check(mod, &sizes, &p, &s->binding, 1, 0, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.where, "q_offset");
    t = saccade_tensor_of(wide, SACCADE_F64, 0, NULL);
    assert_int_equal(saccade_mod_check(mod, &sizes, &p, &s->binding, 1, 0, &err),
                     SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "f64"));
    t = saccade_tensor_of(NULL, SACCADE_I32, 0, NULL);
    p.q_offset = NULL;
    p.kv_len = &t;
    assert_int_equal(saccade_mod_check(mod, &sizes, &p, &s->binding, 1, 0, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.where, "kv_len");
    assert_int_equal(saccade_mod_check(mod, NULL, NULL, &s->binding, 1, 0, &err),
                     SACCADE_EINVAL);
    assert_int_equal(saccade_mod_check(mod, &sizes, NULL, &s->binding, 1, 0, &err), SACCADE_OK);
    saccade_mod_destroy(mod);
    tear_down(s);
    free(s);
}

/* ---- allocations ---- */

static saccade_status whole_use(void *arg, saccade_error *err)
{
    setup s = {0};
    fill(&s);
    saccade_status status = build(&s, arg, err);
    char *text = NULL;
    if (status == SACCADE_OK)
        status = saccade_plan_explain(s.plan, &text, err);
    saccade_free(text);
    tear_down(&s);
    return status;
}

static void failing_allocations(void **unused)
{
    (void)unused;
    assert_true(fail_alloc_sweep("cpu plan", whole_use, "cpu") > 10);
    assert_true(fail_alloc_sweep("ref plan", whole_use, "ref") > 10);
}

/* Once planned, forward takes nothing from the heap. */
static void forward_allocates_nothing(void **unused)
{
    (void)unused;
    saccade_error err;
    setup *s = ready("cpu");
    assert_int_equal(forward(s, &err), SACCADE_OK);
    const int64_t before = fail_alloc_live();
    for (int i = 0; i < 3; i++)
        assert_int_equal(saccade_forward(s->plan, &s->args, &err), SACCADE_OK);
    assert_int_equal(fail_alloc_live(), before);
    tear_down(s);
    free(s);
}

/* Sizes no memory holds ask for all there is, rather than for what is left of a sum. */
static void workspace_never_wraps(void **state)
{
    static const char *const backends[] = {"ref", "plain", "cpu"};
    const int64_t most = (int64_t)1 << 30;
    const saccade_sizes many[] = {{most, H, HKV, 1, most, D, DV},
                                  {most, H, HKV, most, 1, D, DV},
                                  {1, H, HKV, 1, INT64_MAX, D, DV},
                                  {1, H, HKV, INT64_MAX, 1, D, DV},
                                  {INT64_MAX, H, HKV, 1, 1, D, DV}};
    (void)state;
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        setup *s = ready(backends[i]);
        for (size_t n = 0; n < sizeof many / sizeof many[0]; n++) {
            assert_true(saccade_plan_workspace(s->plan, &many[n]) == SIZE_MAX);
            assert_int_equal(saccade_plan_row_tile(s->plan, &many[n]), 0);
        }
        const saccade_sizes large = {1, H, HKV, most, most, D, DV};
        assert_true(saccade_plan_workspace(s->plan, &large) < SIZE_MAX / 2);
        tear_down(s);
        free(s);
    }
}

/* Strides that no number holds are the largest, and not some small one that passes. */
static void strides_never_wrap(void **state)
{
    const int64_t most = (int64_t)1 << 30, shape[] = {1, most, most, 16};
    const int64_t wide[] = {2, INT64_MAX, 3, -1};
    const saccade_tensor q = saccade_tensor_of(NULL, SACCADE_F32, 4, shape);
    (void)state;
    assert_true(q.stride[1] == most * 16);
    assert_true(q.stride[0] == INT64_MAX);
    assert_true(saccade_tensor_of(NULL, SACCADE_F32, 4, wide).stride[0] == INT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(back_ends_agree),
        cmocka_unit_test(block_mask_is_optional),
        cmocka_unit_test(explain_says_what_runs),
        cmocka_unit_test(gradients_may_be_too_large),
        cmocka_unit_test(only_the_truth_reads_parsed_nodes),
        cmocka_unit_test(wrong_tensors),
        cmocka_unit_test(wrong_positions_and_captures),
        cmocka_unit_test(architectures_are_of_gpus),
        cmocka_unit_test(one_kind_for_a_name),
        cmocka_unit_test(masks_of_other_captures),
        cmocka_unit_test(masks_of_other_scalars),
        cmocka_unit_test(masks_of_other_sizes),
        cmocka_unit_test(imported_masks_of_other_sizes),
        cmocka_unit_test(masks_of_device_captures),
        cmocka_unit_test(captures_without_use),
        cmocka_unit_test(wrong_problems),
        cmocka_unit_test(wrong_contexts),
        cmocka_unit_test(errors_have_a_place),
        cmocka_unit_test(memory_is_read),
        cmocka_unit_test(indices_are_checked),
        cmocka_unit_test(indices_are_seen),
        cmocka_unit_test(checked_positions_are_checked),
        cmocka_unit_test(failing_allocations),
        cmocka_unit_test(forward_allocates_nothing),
        cmocka_unit_test(workspace_never_wraps),
        cmocka_unit_test(strides_never_wrap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
