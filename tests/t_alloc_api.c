/* Every allocation behind the public calls failing in turn: each gives SACCADE_ENOMEM, sets
   nothing and keeps nothing. A forward run of the CPU back end allocates nothing at all. */
#include "support/fail_alloc.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 2, H = 2, HKV = 1, Q = 40, KV = 50, D = 8, DV = 4 };

static const char mask_text[] =
    "mask near(W) = q >= kv && q - kv <= W;\n"
    "near(W) && doc[q] == doc[kv] || sum(i, 3, int(q == i)) > 0";
static const char score_text[] = "score = alibi(); softcap(cap) + bias[h, kv]";

static const saccade_sizes sizes = {B, H, HKV, Q, KV, D, DV};
static int32_t window_size = 9, doc[KV];
static float cap = 20, bias[H * KV];
static float q_data[B * H * Q * D], k_data[B * HKV * KV * D], v_data[B * HKV * KV * DV];
static float out_data[B * H * Q * DV];

static saccade_binding binding(const char *name, void *data, saccade_dtype dtype, int32_t rank,
                               int64_t n0, int64_t n1)
{
    const int64_t shape[2] = {n0, n1};
    return (saccade_binding){name, saccade_tensor_of(data, dtype, rank, shape)};
}

static saccade_tensor tensor4(void *data, int64_t h, int64_t n, int64_t d)
{
    const int64_t shape[4] = {B, h, n, d};
    return saccade_tensor_of(data, SACCADE_F32, 4, shape);
}

static saccade_status make_mask(saccade_mod **out, saccade_error *err)
{
    const saccade_capture captures[] = {{"W", SACCADE_I32, 0}, {"doc", SACCADE_I32, 1}};
    saccade_mod *generic = NULL;
    saccade_status status =
        saccade_mod_parse(SACCADE_MASK, mask_text, sizeof mask_text - 1, &generic, err);
    if (status == SACCADE_OK)
        status = saccade_mod_bind(generic, captures, 2, out, err);
    saccade_mod_destroy(generic);
    return status;
}

static saccade_status make_score(saccade_mod **out, saccade_error *err)
{
    const saccade_capture captures[] = {{"cap", SACCADE_F32, 0}, {"bias", SACCADE_F32, 2}};
    saccade_mod *generic = NULL;
    saccade_status status =
        saccade_mod_parse(SACCADE_SCORE, score_text, sizeof score_text - 1, &generic, err);
    if (status == SACCADE_OK)
        status = saccade_mod_bind(generic, captures, 2, out, err);
    saccade_mod_destroy(generic);
    return status;
}

static saccade_status use_mods(void *arg, saccade_error *err)
{
    (void)arg;
    saccade_mod *mask = NULL, *score = NULL;
    saccade_status status = make_mask(&mask, err);
    if (status == SACCADE_OK)
        status = make_score(&score, err);
    if (status != SACCADE_OK)
        assert_null(score);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(score);
    return status;
}

static saccade_status use_chain(void *arg, saccade_error *err)
{
    (void)arg;
    saccade_mod *first = NULL, *then = NULL, *both = NULL;
    saccade_status status = saccade_mod_parse(SACCADE_SCORE, "alibi()", 7, &first, err);
    if (status == SACCADE_OK)
        status = saccade_mod_parse(SACCADE_SCORE, "softcap(c)", 10, &then, err);
    if (status == SACCADE_OK)
        status = saccade_mod_chain(first, then, &both, err);
    saccade_mod_destroy(first);
    saccade_mod_destroy(then);
    saccade_mod_destroy(both);
    return status;
}

static saccade_status use_wrong_text(void *arg, saccade_error *err)
{
    (void)arg;
    saccade_mod *mod = NULL;
    const saccade_status status = saccade_mod_parse(SACCADE_MASK, "q >= ", 5, &mod, err);
    assert_null(mod);
    return status == SACCADE_EPARSE ? SACCADE_OK : status;
}

/* what the block-mask uses share: made outside the sweep, so that each stays short */
typedef struct fixture {
    saccade_context *context;
    saccade_mod *mask, *score;
    saccade_binding bindings[4]; /* W, doc; cap, bias */
    int32_t n_bindings;
    saccade_block_mask *blocks;
    saccade_plan *plan;
    void *workspace;
    size_t workspace_bytes;
} fixture;

static saccade_status make_blocks(const fixture *f, saccade_block_mask **out,
                                  saccade_error *err)
{
    const saccade_block_mask_options options = {.size = sizeof options,
                                                .block_q = 16,
                                                .block_kv = 16};
    return saccade_block_mask_create(f->context, f->mask, &sizes, NULL, f->bindings, 2,
                                     &options, out, err);
}

static saccade_status use_blocks(void *arg, saccade_error *err)
{
    saccade_block_mask *blocks = NULL;
    const saccade_status status = make_blocks(arg, &blocks, err);
    if (status != SACCADE_OK)
        assert_null(blocks);
    saccade_block_mask_destroy(blocks);
    return status;
}

static saccade_status use_algebra(void *arg, saccade_error *err)
{
    const fixture *f = arg;
    saccade_block_mask *not_mask = NULL, *any = NULL, *all = NULL, *window = NULL;
    saccade_status status = saccade_block_mask_not(f->blocks, &not_mask, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_or(f->blocks, not_mask, &any, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_and(f->blocks, not_mask, &all, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_window(f->blocks, 3, 20, 5, 30, &window, err);
    saccade_block_mask_destroy(not_mask);
    saccade_block_mask_destroy(any);
    saccade_block_mask_destroy(all);
    saccade_block_mask_destroy(window);
    return status;
}

static saccade_status use_pictures(void *arg, saccade_error *err)
{
    const fixture *f = arg;
    for (int format = SACCADE_TEXT; format <= SACCADE_PNG; format++) {
        void *bytes = NULL;
        size_t size = 0;
        const saccade_status status = saccade_block_mask_render(
            f->blocks, 0, 0, (saccade_picture)format, 0, &bytes, &size, err);
        saccade_free(bytes);
        if (status == SACCADE_EBACKEND && format == SACCADE_PNG)
            continue; /* built without libpng */
        if (status != SACCADE_OK)
            return status;
    }
    return SACCADE_OK;
}

static saccade_status use_export(void *arg, saccade_error *err)
{
    uint8_t dense[B * H * Q * KV];
    saccade_block_mask *blocks = NULL;
    saccade_status status = make_blocks(arg, &blocks, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_to_dense(blocks, dense, err);
    if (status == SACCADE_OK)
        status = saccade_block_mask_update(blocks, err);
    saccade_block_mask_destroy(blocks);
    return status;
}

static saccade_status make_plan(const fixture *f, const char *backend, saccade_plan **out,
                                saccade_error *err)
{
    saccade_problem problem;
    saccade_problem_init(&problem);
    problem.sizes = sizes;
    problem.dtype = SACCADE_F32;
    problem.mask = f->mask;
    problem.score = f->score;
    problem.backend = backend;
    return saccade_plan_create(f->context, &problem, out, err);
}

static saccade_status use_plan(void *arg, saccade_error *err)
{
    saccade_plan *plan = NULL;
    const saccade_status status = make_plan(arg, "cpu", &plan, err);
    saccade_plan_destroy(plan);
    return status;
}

static saccade_status use_explain(void *arg, saccade_error *err)
{
    const fixture *f = arg;
    char *text = NULL;
    const saccade_status status = saccade_plan_explain(f->plan, &text, err);
    saccade_free(text);
    return status;
}

static saccade_status use_reference(void *arg, saccade_error *err)
{
    saccade_plan *plan = NULL;
    const saccade_status status = make_plan(arg, "ref", &plan, err);
    saccade_plan_destroy(plan);
    return status;
}

static saccade_status use_prepare(void *arg, saccade_error *err)
{
    fixture *f = arg;
    saccade_block_mask *blocks = NULL;
    saccade_status status = make_blocks(f, &blocks, err);
    if (status == SACCADE_OK)
        status = saccade_plan_prepare(f->plan, blocks, err);
    saccade_block_mask_destroy(blocks);
    return status;
}

static saccade_status use_forward(void *arg, saccade_error *err)
{
    const fixture *f = arg;
    const saccade_tensor q = tensor4(q_data, H, Q, D), k = tensor4(k_data, HKV, KV, D);
    const saccade_tensor v = tensor4(v_data, HKV, KV, DV), out = tensor4(out_data, H, Q, DV);
    const saccade_forward_args args = {
        .size = sizeof args,
        .q = &q,
        .k = &k,
        .v = &v,
        .out = &out,
        .block_mask = f->blocks,
        .bindings = f->bindings,
        .n_bindings = f->n_bindings,
        .workspace = f->workspace,
        .workspace_bytes = f->workspace_bytes,
    };
    return saccade_forward(f->plan, &args, err);
}

/* A mask of many operations, whose live tiles are proven while running. */
static void a_long_mask_allocates_nothing(void **state)
{
    static const char text[] = "sum(i, 40, int(q * i % 7 == kv % 5)) > 3";
    fixture f = *(fixture *)*state;
    saccade_problem problem;
    saccade_mod *generic;
    saccade_error err = {0};
    assert_int_equal(
        saccade_mod_parse(SACCADE_MASK, text, sizeof text - 1, &generic, &err), SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &f.mask, &err), SACCADE_OK);
    saccade_problem_init(&problem);
    problem.sizes = sizes;
    problem.dtype = SACCADE_F32;
    problem.backend = "cpu";
    problem.mask = f.mask;
    assert_int_equal(saccade_plan_create(f.context, &problem, &f.plan, &err), SACCADE_OK);
    f.blocks = NULL;
    f.n_bindings = 0;
    f.workspace_bytes = saccade_plan_workspace(f.plan, &sizes);
    f.workspace = aligned_alloc(64, (f.workspace_bytes + 64) / 64 * 64);
    assert_int_equal(fail_alloc_sweep_lenient("long mask", use_forward, &f), 0);
    free(f.workspace);
    saccade_plan_destroy(f.plan);
    saccade_mod_destroy(f.mask);
    saccade_mod_destroy(generic);
}

static int set_up(void **state)
{
    static fixture f;
    saccade_error err = {0};
    for (int i = 0; i < KV; i++)
        doc[i] = i / 20;
    for (size_t i = 0; i < sizeof q_data / sizeof q_data[0]; i++)
        q_data[i] = sinf((float)i);
    for (size_t i = 0; i < sizeof k_data / sizeof k_data[0]; i++)
        k_data[i] = cosf((float)i);
    const saccade_context_options options = {.size = sizeof options, .threads = 1};
    f.n_bindings = 4;
    f.bindings[0] = binding("W", &window_size, SACCADE_I32, 0, 0, 0);
    f.bindings[1] = binding("doc", doc, SACCADE_I32, 1, KV, 0);
    f.bindings[2] = binding("cap", &cap, SACCADE_F32, 0, 0, 0);
    f.bindings[3] = binding("bias", bias, SACCADE_F32, 2, H, KV);
    if (saccade_context_create(&options, &f.context, &err) != SACCADE_OK
        || make_mask(&f.mask, &err) != SACCADE_OK || make_score(&f.score, &err) != SACCADE_OK
        || make_blocks(&f, &f.blocks, &err) != SACCADE_OK
        || make_plan(&f, "cpu", &f.plan, &err) != SACCADE_OK
        || saccade_plan_prepare(f.plan, f.blocks, &err) != SACCADE_OK) {
        print_error("set-up: %s: %s\n", err.where, err.message);
        return -1;
    }
    f.workspace_bytes = saccade_plan_workspace(f.plan, &sizes);
    f.workspace = aligned_alloc(64, (f.workspace_bytes + 64) / 64 * 64);
    *state = &f;
    return f.workspace == NULL ? -1 : 0;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    free(f->workspace);
    saccade_plan_destroy(f->plan);
    saccade_block_mask_destroy(f->blocks);
    saccade_mod_destroy(f->mask);
    saccade_mod_destroy(f->score);
    saccade_context_destroy(f->context);
    return 0;
}

static void mods(void **state)
{
    assert_true(fail_alloc_sweep("parse and bind", use_mods, *state) > 0);
    assert_true(fail_alloc_sweep("chain", use_chain, *state) > 0);
    assert_true(fail_alloc_sweep("wrong text", use_wrong_text, *state) >= 0);
}

static void block_masks(void **state)
{
    assert_true(fail_alloc_sweep("block mask", use_blocks, *state) > 0);
    assert_true(fail_alloc_sweep("and, or, not, window", use_algebra, *state) > 0);
    assert_true(fail_alloc_sweep("pictures", use_pictures, *state) > 0);
    assert_true(fail_alloc_sweep("dense, update", use_export, *state) >= 0);
}

static void plans(void **state)
{
    assert_true(fail_alloc_sweep("plan cpu", use_plan, *state) > 0);
    assert_true(fail_alloc_sweep_lenient("explain", use_explain, *state) > 0);
    assert_true(fail_alloc_sweep("plan ref", use_reference, *state) > 0);
    assert_true(fail_alloc_sweep("prepare", use_prepare, *state) > 0);
}

static void a_run_allocates_nothing(void **state)
{
    assert_int_equal(fail_alloc_sweep("forward", use_forward, *state), 0);
    int n_finite = 0;
    for (int i = 0; i < B * H * Q * DV; i++)
        n_finite += isfinite(out_data[i]) != 0;
    assert_int_equal(n_finite, B * H * Q * DV);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mods),
        cmocka_unit_test(block_masks),
        cmocka_unit_test(plans),
        cmocka_unit_test(a_run_allocates_nothing),
        cmocka_unit_test(a_long_mask_allocates_nothing),
    };
    return cmocka_run_group_tests_name("alloc api", tests, set_up, tear_down);
}
