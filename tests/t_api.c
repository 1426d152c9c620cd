/* The edge of the library as a caller meets it: every wrong argument gets its one line, nothing
 * is set on failure, a whole run survives each failing allocation, back ends agree. */
#include "saccade.h"
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
    s->args = (saccade_forward_args){
        .q = tensor4(s->q, H, Q, D),
        .k = tensor4(s->k, HKV, KV, D),
        .v = tensor4(s->v, HKV, KV, DV),
        .out = tensor4(s->out, H, Q, DV),
        .lse = saccade_tensor_of(s->lse, SACCADE_F32, 3, rows),
        .bindings = &s->binding,
        .n_bindings = 1,
    };
}

/* Everything up to a plan, on one thread; what was made is in *s also after a failure. */
static saccade_status build(setup *s, const char *backend, saccade_error *err)
{
    const saccade_context_options options = {.threads = 1};
    const saccade_capture doc = {"doc", SACCADE_I32, 1};
    saccade_problem p = saccade_problem_default();
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
    const saccade_forward_args good = s->args;
#define WRONG(change, where, part) \
    do {                           \
        s->args = good;            \
        change;                    \
        expect(s, where, part);    \
    } while (0)
    WRONG(s->args.q.dtype = SACCADE_F16, "q", "got dtype f16, expected f32");
    WRONG(s->args.q.rank = 3, "q", "got rank 3, expected 4");
    WRONG(s->args.q.data = NULL, "q", "no data");
    WRONG(s->args.q.shape[1] = 3, "q", "got length 3 in dimension 1, expected 4");
    WRONG(s->args.k.shape[0] = 1, "k", "got length 1 in dimension 0, expected 2");
    WRONG(s->args.v.shape[2] = 7, "v", "got length 7 in dimension 2, expected 13");
    WRONG(s->args.k.stride[3] = 2, "k", "stride 2 in the last dimension");
    WRONG(s->args.v.stride[2] = -4, "v", "got stride -4");
    WRONG(s->args.out.stride[0] = 0, "out", "stride 0 in dimension 0 of an output");
    WRONG(s->args.out.stride[2] -= 1, "out", "elements that do not overlap");
    WRONG(s->args.out.stride[1] = s->args.out.stride[2], "out", "elements that do not overlap");
    WRONG(s->args.workspace = NULL, "workspace", "got no data");
    WRONG(s->args.n_bindings = -1, "bindings", "got -1");
    WRONG(s->args.lse.dtype = SACCADE_F16, "lse", "got dtype f16");
    WRONG(s->args.q.device.kind = SACCADE_CUDA, "q", "on the GPU");
    WRONG(s->args.q.shape[2] = 0, "q", "got length 0");
    WRONG(s->args.workspace_bytes = 0, "workspace", "got 0 bytes");
    WRONG(s->args.workspace = (char *)good.workspace + 1, "workspace", "multiple of 64");
#undef WRONG
    s->args = good;
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
    s->args.positions.kv_len = saccade_tensor_of(length, SACCADE_I32, 1, batches);
    expect(s, "kv_len", "got 14 for batch 1, expected 0 to 13");
    s->args.positions = (saccade_positions){0};
    s->args.positions.q_offset = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    expect(s, "block_mask", "other offsets");
    s->args.positions = (saccade_positions){0};
    s->binding.name = "dog";
    expect(s, "dog", "neither score nor mask");
    s->binding.name = "doc";
    s->args.n_bindings = 0;
    assert_int_equal(saccade_forward(s->plan, &s->args, &err), SACCADE_OK); /* mask's */
    s->args.block_mask = NULL;
    expect(s, "doc", "");
    tear_down(s);
    free(s);
}

static void wrong_problems(void **unused)
{
    (void)unused;
    static const struct {
        saccade_sizes sizes;
        saccade_dtype dtype;
        float scale;
        const char *backend, *where;
    } cases[] = {
        {{1, 3, 2, 0, 0, 8, 8}, SACCADE_F32, 1, "cpu", "heads"},
        {{1, 1, 0, 0, 0, 8, 8}, SACCADE_F32, 1, "cpu", "heads"},
        {{1, 1, 1, 0, 0, 0, 8}, SACCADE_F32, 1, "cpu", "head dim"},
        {{-1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, 1, "cpu", "sizes"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_I32, 1, "cpu", "dtype"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, INFINITY, "cpu", "scale"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F32, 1, "gpu", "backend"},
        {{1, 1, 1, 0, 0, 8, 8}, SACCADE_F64, 1, "cpu", "plan"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        saccade_problem p = saccade_problem_default();
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
    saccade_context_options o = {.threads = -1};
    assert_int_equal(saccade_context_create(&o, &c, &err), SACCADE_EINVAL);
    o = (saccade_context_options){.level = "sse9"};
    assert_int_equal(saccade_context_create(&o, &c, &err), SACCADE_EINVAL);
    assert_null(c);
    saccade_context_destroy(NULL);
    saccade_plan_destroy(NULL);
}

/* The read ceiling: any alignment, no byte past the end, clear errors. */
static void memory_is_read(void **unused)
{
    (void)unused;
    enum { PAGE = 4096 };
    const saccade_context_options o = {.threads = 2};
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(back_ends_agree),
        cmocka_unit_test(block_mask_is_optional),
        cmocka_unit_test(explain_says_what_runs),
        cmocka_unit_test(wrong_tensors),
        cmocka_unit_test(wrong_positions_and_captures),
        cmocka_unit_test(wrong_problems),
        cmocka_unit_test(wrong_contexts),
        cmocka_unit_test(memory_is_read),
        cmocka_unit_test(indices_are_checked),
        cmocka_unit_test(failing_allocations),
        cmocka_unit_test(forward_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
