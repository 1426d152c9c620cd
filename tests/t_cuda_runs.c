/* Forward and backward runs on CUDA beside the plain run of the same problem, bit for bit:
 * heads spread over runs, results in f32, captured graphs, runs that follow one another,
 * streams side by side, memory that is left alone. t_cuda_device and t_cuda_backward compare
 * with the truth. */
#include "support/device_case.h"

#include "base/convert.h"
#include "cuda/cuda.h"
#include "support/fail_alloc.h"
#include "support/problem_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { Q, K, V, OUT, LSE, D_OUT, DQ, DK, DV, TENSORS, AROUND = 256 };
enum { ALL = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

/* A problem, its tensors on the device, plan and workspace. */
typedef struct trial {
    saccade_problem problem;
    saccade_mod *score, *mask;
    saccade_block_mask *blocks;
    saccade_plan *plan;
    saccade_tensor t[TENSORS];
    size_t bytes[TENSORS];
    void *room[2]; /* workspaces of forward and backward, with AROUND bytes behind */
    size_t room_bytes[2];
    void *stream;
} trial;

static uint64_t draw(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

static void *there(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(saccade_device_alloc(0, bytes, &memory, NULL), SACCADE_OK);
    return memory;
}

static void move(void *to, const void *from, size_t bytes)
{
    assert_int_equal(saccade_device_copy(0, to, from, bytes, NULL), SACCADE_OK);
}

static void fill(void *to, size_t bytes, int value)
{
    char *host = malloc(bytes);
    assert_non_null(host);
    memset(host, value, bytes);
    move(to, host, bytes);
    free(host);
}

/* Random 16-bit elements of moderate size. */
static void randomise(const saccade_tensor *t, size_t bytes, uint64_t seed)
{
    uint16_t *host = malloc(bytes);
    assert_non_null(host);
    for (size_t i = 0; i < bytes / 2; i++) {
        const float x = (float)(int64_t)(draw(&seed) % 4001 - 2000) / 1000;
        host[i] = t->dtype == SACCADE_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
    }
    move(t->data, host, bytes);
    free(host);
}

static void make_tensor(trial *x, int which, saccade_dtype dtype, int64_t H, int64_t n,
                        int64_t dim)
{
    saccade_tensor *t = &x->t[which];
    const int64_t B = x->problem.sizes.B, shape[4] = {B, H, n, dim};
    const int32_t rank = which == LSE ? 3 : 4;
    x->bytes[which] = (size_t)(B * H * n * (rank == 4 ? dim : 1)) * saccade_dtype_bytes(dtype);
    *t = saccade_tensor_of(there(x->bytes[which]), dtype, rank, shape);
    t->device = (saccade_device){SACCADE_CUDA, 0};
    if (which == Q || which == K || which == V || which == D_OUT)
        randomise(t, x->bytes[which], (uint64_t)which + 5);
    else
        fill(t->data, x->bytes[which], 0xff);
}

static void make_rooms(trial *x)
{
    x->room_bytes[0] = saccade_plan_workspace(x->plan, &x->problem.sizes);
    x->room_bytes[1] = saccade_plan_backward_workspace(x->plan, &x->problem.sizes);
    for (int i = 0; i < 2; i++) {
        x->room[i] = there(x->room_bytes[i] + AROUND);
        fill(x->room[i], x->room_bytes[i] + AROUND, 0x5a);
    }
}

static void make_plan(trial *x)
{
    saccade_error err = {0};
    if (saccade_plan_create(NULL, &x->problem, &x->plan, &err) != SACCADE_OK)
        fail_msg("plan: %s", err.message);
    if (x->blocks && saccade_plan_prepare(x->plan, x->blocks, &err) != SACCADE_OK)
        fail_msg("prepare: %s", err.message);
    make_rooms(x);
}

static void open_trial(trial *x, const char *problem, const char *score, const char *mask,
                       uint32_t gradients)
{
    saccade_error err = {0};
    saccade_sizes *s = &x->problem.sizes;
    memset(x, 0, sizeof *x);
    saccade_problem_init(&x->problem);
    problem_case(problem, s, &x->problem.dtype);
    x->problem.backend = "cuda";
    x->problem.gradients = gradients;
    x->problem.score = x->score = score ? case_mod(SACCADE_SCORE, score) : NULL;
    x->problem.mask = x->mask = mask ? case_mod(SACCADE_MASK, mask) : NULL;
    if (mask)
        assert_int_equal(
            saccade_block_mask_create(NULL, x->mask, s, NULL, NULL, 0, NULL, &x->blocks, &err),
            SACCADE_OK);
    make_plan(x);
    const saccade_dtype dtype = x->problem.dtype;
    make_tensor(x, Q, dtype, s->H, s->Q, s->D);
    make_tensor(x, K, dtype, s->Hkv, s->KV, s->D);
    make_tensor(x, V, dtype, s->Hkv, s->KV, s->Dv);
    make_tensor(x, OUT, dtype, s->H, s->Q, s->Dv);
    make_tensor(x, LSE, SACCADE_F32, s->H, s->Q, 1);
    make_tensor(x, D_OUT, dtype, s->H, s->Q, s->Dv);
    make_tensor(x, DQ, dtype, s->H, s->Q, s->D);
    make_tensor(x, DK, dtype, s->Hkv, s->KV, s->D);
    make_tensor(x, DV, dtype, s->Hkv, s->KV, s->Dv);
}

static void close_trial(trial *x)
{
    for (int i = 0; i < TENSORS; i++)
        saccade_device_free(0, x->t[i].data);
    for (int i = 0; i < 2; i++)
        saccade_device_free(0, x->room[i]);
    saccade_plan_destroy(x->plan);
    saccade_block_mask_destroy(x->blocks);
    saccade_mod_destroy(x->score);
    saccade_mod_destroy(x->mask);
}

static void forward(const trial *x)
{
    saccade_forward_args a;
    saccade_error err = {0};
    saccade_forward_args_init(&a);
    a.q = &x->t[Q], a.k = &x->t[K], a.v = &x->t[V];
    a.out = &x->t[OUT], a.lse = &x->t[LSE];
    a.block_mask = x->blocks;
    a.workspace = x->room[0], a.workspace_bytes = x->room_bytes[0];
    a.stream = x->stream;
    if (saccade_forward(x->plan, &a, &err) != SACCADE_OK)
        fail_msg("forward: %s", err.message);
}

static void backward(const trial *x)
{
    saccade_backward_args a;
    saccade_error err = {0};
    saccade_backward_args_init(&a);
    a.q = &x->t[Q], a.k = &x->t[K], a.v = &x->t[V];
    a.out = &x->t[OUT], a.lse = &x->t[LSE], a.d_out = &x->t[D_OUT];
    a.d_q = &x->t[DQ], a.d_k = &x->t[DK], a.d_v = &x->t[DV];
    a.block_mask = x->blocks;
    a.workspace = x->room[1], a.workspace_bytes = x->room_bytes[1];
    a.stream = x->stream;
    if (saccade_backward(x->plan, &a, &err) != SACCADE_OK)
        fail_msg("backward: %s", err.message);
}

static void wait_for_all(void)
{
    saccade_error err = {0};
    if (saccade_device_synchronize(0, &err) != SACCADE_OK)
        fail_msg("%s", err.message);
}

static char *fetch(const void *from, size_t bytes)
{
    char *host = malloc(bytes);
    assert_non_null(host);
    move(host, from, bytes);
    return host;
}

/* What a run writes. */
typedef struct results {
    char *of[TENSORS];
} results;

static const int written[] = {OUT, LSE, DQ, DK, DV};
enum { WRITTEN = sizeof written / sizeof written[0] };

static results take(const trial *x)
{
    results r = {{NULL}};
    wait_for_all();
    for (int i = 0; i < WRITTEN; i++)
        r.of[written[i]] = fetch(x->t[written[i]].data, x->bytes[written[i]]);
    return r;
}

static void forget(results *r)
{
    for (int i = 0; i < TENSORS; i++)
        free(r->of[i]);
}

static void are_same(const trial *x, const results *a, const results *b, const char *what)
{
    for (int i = 0; i < WRITTEN; i++)
        if (memcmp(a->of[written[i]], b->of[written[i]], x->bytes[written[i]]) != 0)
            fail_msg("%s: tensor %d has other bits", what, written[i]);
}

static void clear_written(const trial *x)
{
    for (int i = 0; i < WRITTEN; i++)
        fill(x->t[written[i]].data, x->bytes[written[i]], 0xff);
}

static results plain_run(const trial *x)
{
    clear_written(x);
    forward(x);
    backward(x);
    return take(x);
}

static const char *const problems[] = {"b2 h4/2 q300 kv430 d64 bf16",
                                       "b1 h4/2 q260 kv300 d128 f16",
                                       "b1 h4/2 q100 kv130 d192 dv128 bf16"};
enum { PROBLEMS = sizeof problems / sizeof problems[0] };

/* ---- heads spread over runs ---- */

/* Heads [h0, h1) of a tensor with H heads in all, in place. */
static saccade_tensor heads_of(const saccade_tensor *t, int64_t h0, int64_t h1)
{
    saccade_tensor part = *t;
    part.data = (char *)t->data + h0 * t->stride[1] * (int64_t)saccade_dtype_bytes(t->dtype);
    part.shape[1] = h1 - h0;
    return part;
}

/* Key head g alone, with what is the whole run's. */
static void run_part(const trial *whole, int64_t g)
{
    trial part = *whole;
    saccade_sizes *s = &part.problem.sizes;
    const int64_t group = s->H / s->Hkv;
    part.problem.h_offset = g * group;
    part.problem.heads_global = s->H;
    s->H = group;
    s->Hkv = 1;
    make_plan(&part);
    for (int i = 0; i < TENSORS; i++) {
        const int is_key = i == K || i == V || i == DK || i == DV;
        part.t[i] = is_key ? heads_of(&whole->t[i], g, g + 1)
                           : heads_of(&whole->t[i], g * group, (g + 1) * group);
    }
    forward(&part);
    backward(&part);
    wait_for_all();
    saccade_device_free(0, part.room[0]);
    saccade_device_free(0, part.room[1]);
    saccade_plan_destroy(part.plan);
}

static void heads_of_several_runs(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    setenv("SACCADE_CUDA_TILES", "large", 1); /* else a run's own heads may choose */
    for (int i = 0; i < PROBLEMS; i++) {
        trial x;
        open_trial(&x, problems[i], "alibi()", "q >= kv - 40 * h", ALL);
        results once = plain_run(&x);
        clear_written(&x);
        for (int64_t g = 0; g < x.problem.sizes.Hkv; g++)
            run_part(&x, g);
        results parts = take(&x);
        are_same(&x, &once, &parts, problems[i]);
        forget(&once);
        forget(&parts);
        close_trial(&x);
    }
    unsetenv("SACCADE_CUDA_TILES");
}

/* ---- results in f32 ---- */

/* f32 results, rounded, are the 16-bit ones, and hold more than those. */
static void f32_results(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < PROBLEMS; i++)
        for (int is_decode = 0; is_decode < 2; is_decode++) {
            trial x, wide;
            const char *problem = is_decode ? "b2 h8/2 q1 kv700 d128 bf16" : problems[i];
            open_trial(&x, problem, NULL, is_decode ? NULL : "causal()", 0);
            open_trial(&wide, problem, NULL, is_decode ? NULL : "causal()", 0);
            saccade_plan_destroy(wide.plan);
            saccade_device_free(0, wide.room[0]);
            saccade_device_free(0, wide.room[1]);
            wide.problem.out_dtype = SACCADE_F32;
            make_plan(&wide);
            saccade_device_free(0, wide.t[OUT].data);
            const saccade_sizes *s = &wide.problem.sizes;
            make_tensor(&wide, OUT, SACCADE_F32, s->H, s->Q, s->Dv);
            forward(&x);
            forward(&wide);
            wait_for_all();
            uint16_t *narrow = (uint16_t *)(void *)fetch(x.t[OUT].data, x.bytes[OUT]);
            float *full = (float *)(void *)fetch(wide.t[OUT].data, wide.bytes[OUT]);
            size_t more = 0;
            for (size_t n = 0; n < x.bytes[OUT] / 2; n++) {
                uint16_t rounded;
                convert_from_f32(x.problem.dtype, &full[n], &rounded, 1);
                if (rounded != narrow[n])
                    fail_msg("%s: element %zu is %g in f32, 0x%x else", problem, n,
                             (double)full[n], (unsigned)narrow[n]);
                more += convert_element(x.problem.dtype, &narrow[n]) != (double)full[n];
            }
            assert_true(more > x.bytes[OUT] / 4);
            free(narrow);
            free(full);
            close_trial(&x);
            close_trial(&wide);
        }
}

/* ---- graphs, streams, memory ---- */

static void *new_stream(void)
{
    int (*create)(void **, unsigned);
    void *stream;
    *(void **)&create = device_driver_call("cuStreamCreate");
    assert_int_equal(create(&stream, 1), 0);
    return stream;
}

static void end_stream(void *stream)
{
    int (*destroy)(void *);
    *(void **)&destroy = device_driver_call("cuStreamDestroy_v2");
    assert_int_equal(destroy(stream), 0);
}

static void *enter(void)
{
    const cu_driver *driver;
    void *pushed;
    assert_int_equal(cu_get_driver(&driver, NULL), SACCADE_OK);
    assert_int_equal(cu_enter(driver, 0, &pushed, NULL), SACCADE_OK);
    return pushed;
}

static void leave(void *pushed)
{
    const cu_driver *driver;
    assert_int_equal(cu_get_driver(&driver, NULL), SACCADE_OK);
    cu_leave(driver, pushed);
}

/* Forward and backward as one graph, replayed over other inputs in the same memory. */
static void replay_graph(trial *x)
{
    int (*begin)(void *, int), (*end)(void *, void **), (*launch)(void *, void *);
    int (*instantiate)(void **, void *, unsigned long long), (*drop[2])(void *);
    void *graph, *ready;
    *(void **)&begin = device_driver_call("cuStreamBeginCapture_v2");
    *(void **)&end = device_driver_call("cuStreamEndCapture");
    *(void **)&instantiate = device_driver_call("cuGraphInstantiateWithFlags");
    *(void **)&launch = device_driver_call("cuGraphLaunch");
    *(void **)&drop[0] = device_driver_call("cuGraphExecDestroy");
    *(void **)&drop[1] = device_driver_call("cuGraphDestroy");
    results plain[2];
    for (int i = 0; i < 2; i++) {
        randomise(&x->t[Q], x->bytes[Q], 50 + (uint64_t)i);
        plain[i] = plain_run(x);
    }
    x->stream = new_stream();
    assert_int_equal(begin(x->stream, 2), 0);
    forward(x);
    backward(x);
    assert_int_equal(end(x->stream, &graph), 0);
    assert_int_equal(instantiate(&ready, graph, 0), 0);
    for (int i = 0; i < 4; i++) {
        randomise(&x->t[Q], x->bytes[Q], 50 + (uint64_t)(i & 1));
        clear_written(x);
        assert_int_equal(launch(ready, x->stream), 0);
        results again = take(x);
        are_same(x, &plain[i & 1], &again, "replay");
        forget(&again);
    }
    assert_int_equal(drop[0](ready), 0);
    assert_int_equal(drop[1](graph), 0);
    end_stream(x->stream);
    x->stream = NULL;
    forget(&plain[0]);
    forget(&plain[1]);
}

static void graphs_of_backward(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    void *pushed = enter();
    for (int i = 0; i < PROBLEMS; i++) {
        trial x;
        open_trial(&x, problems[i], "softcap(20)", "causal()", ALL);
        replay_graph(&x);
        close_trial(&x);
    }
    leave(pushed);
}

/* Runs whose queries, keys and incoming gradients are what the run before wrote, one behind the
 * other or each after a wait for all that is on the device. */
static results chain_runs(trial *x, int waits)
{
    enum { RUNS = 24 };
    const saccade_sizes *s = &x->problem.sizes;
    const int has_gradients = x->problem.gradients != 0, is_square = s->Q == s->KV;
    randomise(&x->t[Q], x->bytes[Q], 70);
    randomise(&x->t[D_OUT], x->bytes[D_OUT], 71);
    wait_for_all();
    for (int i = 0; i < RUNS; i++) {
        forward(x);
        if (waits)
            wait_for_all();
        if (has_gradients)
            backward(x);
        if (waits)
            wait_for_all();
        void *const q = x->t[Q].data, *const d_out = x->t[D_OUT].data;
        x->t[Q].data = x->t[OUT].data;
        x->t[OUT].data = q;
        if (is_square)
            x->t[K].data = x->t[Q].data;
        if (has_gradients) {
            x->t[D_OUT].data = x->t[DQ].data;
            x->t[DQ].data = d_out;
        }
    }
    return take(x);
}

/* A mask's copies on a device are of a plan's KV heads: plans of one mask have their own. */
static void one_mask_for_other_kv_heads(void **state)
{
    static const char *const each[] = {"b2 h8/4 q500 kv500 d64 bf16",
                                       "b2 h8/2 q500 kv500 d64 bf16",
                                       "b2 h8/8 q500 kv500 d64 bf16"};
    trial first;
    (void)state;
    if (!has_device())
        skip();
    open_trial(&first, each[0], NULL, "causal()", ALL);
    for (size_t i = 1; i < sizeof each / sizeof *each; i++) {
        saccade_error err = {0};
        trial x;
        open_trial(&x, each[i], NULL, "causal()", ALL);
        results own = plain_run(&x);
        saccade_block_mask *const blocks = x.blocks;
        x.blocks = first.blocks;
        if (saccade_plan_prepare(x.plan, x.blocks, &err) != SACCADE_OK)
            fail_msg("prepare: %s", err.message);
        clear_written(&x);
        results shared = plain_run(&x);
        are_same(&x, &own, &shared, each[i]);
        x.blocks = blocks;
        forget(&own);
        forget(&shared);
        close_trial(&x);
    }
    close_trial(&first);
}

static void runs_that_follow_one_another(void **state)
{
    static const struct {
        const char *problem, *mask;
        uint32_t gradients;
    } cases[] = {
        {"b1 h8/2 q1 kv1000 d128 bf16", NULL, 0},
        {"b64 h8/2 q1 kv300 d64 bf16", NULL, 0},
        {"b3 h4 q4 kv5000 d128 bf16", NULL, 0},
        {"b1 h8 q256 kv256 d128 bf16", NULL, ALL},
        {"b1 h8 q256 kv256 d64 bf16", "causal()", ALL},
        {"b2 h8 q900 kv900 d128 bf16", NULL, ALL},
        {"b1 h4 q1500 kv1500 d64 f16", "causal()", ALL},
    };
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        trial x;
        open_trial(&x, cases[i].problem, NULL, cases[i].mask, cases[i].gradients);
        clear_written(&x);
        void *const keys = x.t[K].data;
        results apart = chain_runs(&x, 1);
        x.t[K].data = keys;
        results close = chain_runs(&x, 0);
        x.t[K].data = keys;
        are_same(&x, &apart, &close, cases[i].problem);
        forget(&apart);
        forget(&close);
        close_trial(&x);
    }
}

/* Two problems at once, each on a stream of its own. */
static void two_streams(void **state)
{
    enum { ROUNDS = 20 };
    trial x[2];
    results alone[2];
    (void)state;
    if (!has_device())
        skip();
    void *pushed = enter();
    for (int i = 0; i < 2; i++) {
        open_trial(&x[i], problems[i], "softcap(20)", "causal()", ALL);
        alone[i] = plain_run(&x[i]);
        clear_written(&x[i]);
        x[i].stream = new_stream();
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < 2; i++) {
            forward(&x[i]);
            backward(&x[i]);
        }
    for (int i = 0; i < 2; i++) {
        results beside = take(&x[i]);
        are_same(&x[i], &alone[i], &beside, problems[i]);
        forget(&beside);
        forget(&alone[i]);
        end_stream(x[i].stream);
        close_trial(&x[i]);
    }
    leave(pushed);
}

static saccade_status backward_again(void *arg, saccade_error *err)
{
    (void)err;
    backward(arg);
    return SACCADE_OK;
}

/* No call allocates, nothing behind the workspaces changes, and what lay in them before does
 * not matter. */
static void memory_is_left_alone(void **state)
{
    int (*memory_info)(size_t *, size_t *);
    (void)state;
    if (!has_device())
        skip();
    void *pushed = enter();
    *(void **)&memory_info = device_driver_call("cuMemGetInfo_v2");
    for (int i = 0; i < PROBLEMS; i++) {
        size_t before, after, total;
        trial x;
        open_trial(&x, problems[i], NULL, "causal()", ALL);
        results first = plain_run(&x);
        for (int n = 0; n < 2; n++)
            fill(x.room[n], x.room_bytes[n], 0xff);
        results second = plain_run(&x);
        are_same(&x, &first, &second, "another workspace");
        assert_int_equal(memory_info(&before, &total), 0);
        assert_int_equal(fail_alloc_sweep("backward on a device", backward_again, &x), 0);
        wait_for_all();
        assert_int_equal(memory_info(&after, &total), 0);
        assert_int_equal(before, after);
        for (int n = 0; n < 2; n++) {
            char *behind = fetch((char *)x.room[n] + x.room_bytes[n], AROUND);
            for (int k = 0; k < AROUND; k++)
                assert_int_equal(behind[k], 0x5a);
            free(behind);
        }
        forget(&first);
        forget(&second);
        close_trial(&x);
    }
    leave(pushed);
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_of_several_runs),
        cmocka_unit_test(f32_results),
        cmocka_unit_test(graphs_of_backward),
        cmocka_unit_test(two_streams),
        cmocka_unit_test(memory_is_left_alone),
        cmocka_unit_test(runs_that_follow_one_another),
        cmocka_unit_test(one_mask_for_other_kv_heads),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
