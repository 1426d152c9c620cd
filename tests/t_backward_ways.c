/* A problem whose captures' gradients are summed in every way there is: equal bits over
 * threads, every allocation behind its plans and the reference's backward runs failing in turn;
 * a run of the CPU back end allocates nothing at all. */
#include "support/fail_alloc.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { H = 4, HKV = 2, Q = 110, KV = 400, D = 8, DV = 4 };

static const saccade_sizes sizes = {1, H, HKV, Q, KV, D, DV};
static const char score_text[] =
    "softcap(cap) * s[h] + row[q] * col[kv] + rel[q - kv + KV] + bias[h, q, kv]"
    " + any[(q * 7 + kv * kv) % 13]";
static const char mask_text[] = "q + 12 >= kv && (q + kv) % 5 != 0";
static const char *const names[] = {"cap", "s", "row", "col", "rel", "bias", "any"};
enum { CAPTURES = sizeof names / sizeof names[0] };
static const int64_t shapes[CAPTURES][3] = {{0}, {H}, {Q}, {KV}, {Q + KV}, {H, Q, KV}, {13}};
static const int32_t ranks[CAPTURES] = {0, 1, 1, 1, 1, 3, 1};

static float numbers[H * Q * KV], sums[CAPTURES][H * Q * KV];
static float out[H * Q * DV], lse[H * Q], dq[H * Q * D], dk[HKV * KV * D], dv[HKV * KV * DV];

typedef struct fixture {
    saccade_context *context;
    saccade_mod *score, *mask;
    saccade_block_mask *blocks;
    saccade_plan *plan; /* the one to run */
    saccade_backward_args args;
    saccade_tensor q, k, v, out, lse, dq, dk, dv;
    saccade_binding captures[CAPTURES], d_captures[CAPTURES];
    saccade_tensor kv_len;
    saccade_positions few; /* keys, where they are not counted in millions a second */
} fixture;

static saccade_tensor tensor(float *data, int64_t heads, int64_t n, int64_t dim)
{
    const int64_t shape[4] = {1, heads, n, dim};
    return saccade_tensor_of(data, SACCADE_F32, 4, shape);
}

static saccade_status make_plan(const fixture *f, const char *backend, saccade_plan **to,
                                saccade_error *err)
{
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.score = f->score;
    p.mask = f->mask;
    p.backend = backend;
    p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V
                  | SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = names;
    p.n_gradient_captures = CAPTURES;
    return saccade_plan_create(f->context, &p, to, err);
}

static saccade_status make_blocks(const fixture *f, saccade_block_mask **to,
                                  saccade_error *err)
{
    return saccade_block_mask_create(f->context, f->mask, &sizes, NULL, NULL, 0, NULL, to, err);
}

static saccade_status use_plan(void *arg, saccade_error *err)
{
    saccade_plan *plan = NULL;
    const saccade_status status = make_plan(arg, "cpu", &plan, err);
    saccade_plan_destroy(plan);
    return status;
}

static saccade_status use_prepare(void *arg, saccade_error *err)
{
    const fixture *f = arg;
    saccade_block_mask *blocks = NULL;
    saccade_status status = make_blocks(f, &blocks, err);
    if (status == SACCADE_OK)
        status = saccade_plan_prepare(f->plan, blocks, err);
    saccade_block_mask_destroy(blocks);
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

static saccade_status use_backward(void *arg, saccade_error *err)
{
    const fixture *f = arg;
    return saccade_backward(f->plan, &f->args, err);
}

static saccade_mod *mod_of(saccade_kind kind, const char *text)
{
    saccade_capture captures[CAPTURES];
    saccade_mod *generic, *bound;
    for (int i = 0; i < CAPTURES; i++)
        captures[i] = (saccade_capture){names[i], SACCADE_F32, ranks[i]};
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, NULL), 0);
    assert_int_equal(
        saccade_mod_bind(generic, captures, saccade_mod_capture_count(generic), &bound, NULL),
        0);
    saccade_mod_destroy(generic);
    return bound;
}

static int set_up(void **state)
{
    static fixture f;
    const saccade_context_options options = {.size = sizeof options, .threads = 1};
    for (int i = 0; i < H * Q * KV; i++)
        numbers[i] = sinf((float)i);
    f.score = mod_of(SACCADE_SCORE, score_text);
    f.mask = mod_of(SACCADE_MASK, mask_text);
    f.q = tensor(numbers, H, Q, D);
    f.k = tensor(numbers + 100, HKV, KV, D);
    f.v = tensor(numbers + 200, HKV, KV, DV);
    f.out = tensor(out, H, Q, DV);
    f.lse = saccade_tensor_of(lse, SACCADE_F32, 3, (int64_t[]){1, H, Q});
    f.dq = tensor(dq, H, Q, D);
    f.dk = tensor(dk, HKV, KV, D);
    f.dv = tensor(dv, HKV, KV, DV);
    for (int i = 0; i < CAPTURES; i++) {
        f.captures[i] = (saccade_binding){
            names[i], saccade_tensor_of(numbers, SACCADE_F32, ranks[i], shapes[i])};
        f.d_captures[i] = (saccade_binding){
            names[i], saccade_tensor_of(sums[i], SACCADE_F32, ranks[i], shapes[i])};
    }
    numbers[0] = 3; /* the cap */
    static int32_t kv_len = 20;
    f.kv_len = saccade_tensor_of(&kv_len, SACCADE_I32, 0, NULL);
    saccade_positions_init(&f.few);
    f.few.kv_len = &f.kv_len;
    *state = &f;
    return saccade_context_create(&options, &f.context, NULL) != SACCADE_OK;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    saccade_mod_destroy(f->score);
    saccade_mod_destroy(f->mask);
    saccade_context_destroy(f->context);
    return 0;
}

/* A forward run, and the arguments of the backward run after it. */
static void begin(fixture *f, const char *backend)
{
    saccade_forward_args a;
    saccade_backward_args *b = &f->args;
    saccade_error err = {0};
    assert_int_equal(make_plan(f, backend, &f->plan, NULL), SACCADE_OK);
    f->blocks = NULL;
    if (strcmp(backend, "cpu") == 0) {
        assert_int_equal(make_blocks(f, &f->blocks, NULL), SACCADE_OK);
        assert_int_equal(saccade_plan_prepare(f->plan, f->blocks, NULL), SACCADE_OK);
    }
    saccade_forward_args_init(&a);
    saccade_backward_args_init(b);
    a.q = b->q = &f->q;
    a.k = b->k = &f->k;
    a.v = b->v = &f->v;
    a.out = b->out = &f->out;
    a.lse = b->lse = &f->lse;
    a.block_mask = b->block_mask = f->blocks;
    a.positions = b->positions = f->blocks ? NULL : &f->few;
    a.bindings = b->bindings = f->captures;
    a.n_bindings = b->n_bindings = CAPTURES;
    a.workspace_bytes = saccade_plan_workspace(f->plan, &sizes);
    a.workspace = aligned_alloc(64, (a.workspace_bytes + 64) / 64 * 64);
    if (saccade_forward(f->plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
    b->d_out = &f->out;
    b->d_q = &f->dq;
    b->d_k = &f->dk;
    b->d_v = &f->dv;
    b->d_captures = f->d_captures;
    b->n_d_captures = CAPTURES;
    if (saccade_backward_workspace(f->plan, b, &b->workspace_bytes, &err))
        fail_msg("%s: %s", err.where, err.message);
    b->workspace = aligned_alloc(64, (b->workspace_bytes + 64) / 64 * 64);
    assert_non_null(b->workspace);
}

static void end(fixture *f)
{
    free(f->args.workspace);
    saccade_block_mask_destroy(f->blocks);
    saccade_plan_destroy(f->plan);
}

/* All of a capture's gradient, and not with 0 alone. */
static void check_written(int i)
{
    int n = 1, n_moving = 0;
    for (int d = 0; d < ranks[i]; d++)
        n *= (int)shapes[i][d];
    for (int at = 0; at < n; at++) {
        assert_true(isfinite(sums[i][at]));
        n_moving += sums[i][at] != 0;
    }
    assert_true(n_moving > n / 16);
}

static void threads_change_no_bit(void **state)
{
    static float held[CAPTURES][H * Q * KV], held_dq[H * Q * D];
    const fixture *f = *state;
    for (int threads = 1; threads <= 3; threads++) {
        const saccade_context_options options = {.size = sizeof options, .threads = threads};
        fixture mine = *f;
        assert_int_equal(saccade_context_create(&options, &mine.context, NULL), SACCADE_OK);
        begin(&mine, "cpu");
        memset(sums, 0xff, sizeof sums);
        assert_int_equal(saccade_backward(mine.plan, &mine.args, NULL), SACCADE_OK);
        for (int i = 0; i < CAPTURES; i++)
            check_written(i);
        if (threads == 1) {
            memcpy(held, sums, sizeof held);
            memcpy(held_dq, dq, sizeof held_dq);
        }
        assert_memory_equal(held, sums, sizeof held);
        assert_memory_equal(held_dq, dq, sizeof held_dq);
        end(&mine);
        saccade_context_destroy(mine.context);
    }
}

static void plans(void **state)
{
    fixture *f = *state;
    assert_true(fail_alloc_sweep("plan", use_plan, f) > 0);
    begin(f, "cpu");
    assert_true(fail_alloc_sweep("prepare", use_prepare, f) > 0);
    assert_true(fail_alloc_sweep_lenient("explain", use_explain, f) > 0);
    end(f);
}

static void a_run_allocates_nothing(void **state)
{
    fixture *f = *state;
    begin(f, "cpu");
    memset(dq, 0xff, sizeof dq);
    assert_int_equal(fail_alloc_sweep("backward", use_backward, f), 0);
    for (int i = 0; i < H * Q * D; i++)
        assert_true(isfinite(dq[i]));
    end(f);
}

static void references(void **state)
{
    static const char *const backends[] = {"ref", "plain"};
    fixture *f = *state;
    for (int n = 0; n < 2; n++) {
        begin(f, backends[n]);
        assert_true(fail_alloc_sweep(backends[n], use_backward, f) > 2);
        end(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(plans),
        cmocka_unit_test(a_run_allocates_nothing),
        cmocka_unit_test(references),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
