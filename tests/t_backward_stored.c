/* Gradients of captures of which each position has an element of its own, which the CPU stores
 * instead of adding: against float64, and exactly what adding to zeros gives; over levels,
 * threads, dtypes, masks that leave tiles, strips and keys out, in buffers full of NaN. */
#include "saccade.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 2, H = 4, HKV = 2, Q = 230, KV = 410, D = 16, DV = 8 };
enum { ROOM = B * H * (Q + KV) * KV };

static const saccade_sizes sizes = {B, H, HKV, Q, KV, D, DV};

typedef struct stored_case {
    const char *score, *mask;
    int64_t shape[4]; /* of t */
    saccade_dtype dtype, held;
    int32_t kv_len; /* 0: all keys */
    int is_summed;  /* elements are shared: nothing is stored */
} stored_case;

#define ALL         \
    {               \
        B, H, Q, KV \
    }
static const stored_case cases[] = {
    {"score + t[b, h, q, kv]", NULL, ALL, SACCADE_F32, SACCADE_F32, 0, 0},
    {"score + t[b, h, q, kv]", NULL, ALL, SACCADE_BF16, SACCADE_BF16, 333, 0},
    {"score + t[b, h, q, kv]", "q + 7 >= kv", ALL, SACCADE_F32, SACCADE_BF16, 0, 0},
    {"score + t[b, h, q, kv]", "q - kv < 20 && kv - q < 9", ALL, SACCADE_BF16, SACCADE_F32, 0,
     0},
    {"2 * score - t[b, h, q, kv]", "(q / 40 + kv / 50) % 3 != 0", ALL, SACCADE_F16, SACCADE_F16,
     0, 0},
    {"5 * tanh((score + t[b, h, q, kv]) * 0.2)", "q / 100 == kv / 130", ALL, SACCADE_F32,
     SACCADE_F16, 0, 0},
    {"score * t[b, h, q, kv]", "q % 3 != 0 || kv > 200", ALL, SACCADE_BF16, SACCADE_BF16, 190,
     0},
    /* elements that no position reads */
    {"score + t[b, h, q + 1, kv + 2]",
     "q >= kv",
     {B, H, Q + 4, KV + 4},
     SACCADE_F32,
     SACCADE_BF16,
     0,
     0},
    /* keys apart */
    {"score + t[b, h, kv, q]", "q >= kv", {B, H, KV, Q}, SACCADE_F32, SACCADE_F32, 0, 0},
    /* lines that are slanted: distances of a query's own, turned ones, sums; one that leaves
     * the tensor, one that all heads share */
    {"score + t[b, h, q, kv - q + 229]",
     "q + 7 >= kv",
     {B, H, Q, Q + KV - 1},
     SACCADE_BF16,
     SACCADE_F32,
     0,
     0},
    {"3 * score + t[b, h, kv, q - kv + 409]",
     NULL,
     {B, H, KV, Q + KV},
     SACCADE_F32,
     SACCADE_F32,
     333,
     0},
    {"5 * tanh((score + t[b, h, q + kv, kv]) * 0.2)",
     "(q / 40 + kv / 50) % 3 != 0",
     {B, H, Q + KV - 1, KV},
     SACCADE_F32,
     SACCADE_F32,
     0,
     0},
    {"score + t[b, h, q, kv - q + 229 < 0 ? kv - q + 869 : kv - q + 229]",
     "q + 7 >= kv",
     {B, H, Q, Q + KV},
     SACCADE_BF16,
     SACCADE_F32,
     0,
     0},
    {"score + t[b, h, q, kv - q + 100 < 0 ? kv - q + 740 : kv - q + 100]",
     NULL,
     {B, H, Q, Q + KV},
     SACCADE_F32,
     SACCADE_F32,
     0,
     1},
    {"score + t[b, h, q, kv - q + 220]", NULL, {B, H, Q, Q + KV}, SACCADE_F32, SACCADE_F32, 0,
     1},
    {"score + t[b, 1, q, kv - q + 229]", "q >= kv", {B, H, Q, Q + KV}, SACCADE_F32, SACCADE_F32,
     0, 1},
    /* past the tensor's edge; two reads of it; heads and batches that share it */
    {"score + t[b, h, q + 3, kv]", NULL, ALL, SACCADE_F32, SACCADE_F32, 0, 1},
    {"score + t[b, h, q, kv] * t[b, h, q, 0]", "q >= kv", ALL, SACCADE_F32, SACCADE_F32, 0, 1},
    {"score + t[0, h, q, kv]", "q >= kv", ALL, SACCADE_F32, SACCADE_BF16, 0, 1},
    {"score + t[b, 1, q, kv]", NULL, ALL, SACCADE_BF16, SACCADE_F32, 0, 1},
};

static float inputs[3][B * H * KV * D], numbers[ROOM], truth[ROOM], held_sums[ROOM];

/* ---- tensors ---- */

static void *room_of(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 128) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0xff, (bytes + 128) / 64 * 64);
    return memory;
}

static saccade_tensor make(saccade_dtype dtype, const float *from, int rank,
                           const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    int64_t n = 1;
    for (int d = 0; d < rank; d++)
        n *= shape[d];
    t.data = room_of((size_t)n * saccade_dtype_bytes(dtype));
    if (from)
        convert_from_f32(dtype, from, t.data, n);
    return t;
}

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

/* ---- runs ---- */

static saccade_mod *mod_of(saccade_kind kind, const stored_case *c, const char *text)
{
    const saccade_capture t = {"t", c->held, 4};
    saccade_mod *generic, *bound;
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, NULL), 0);
    assert_int_equal(
        saccade_mod_bind(generic, &t, saccade_mod_capture_count(generic), &bound, NULL), 0);
    saccade_mod_destroy(generic);
    return bound;
}

typedef struct way {
    const char *backend, *level;
    int32_t threads;
    int is_added, has_blocks;
    saccade_dtype gradient;
} way;

static saccade_plan *plan_of(const stored_case *c, const way *w, saccade_context *context,
                             saccade_mod *score, saccade_mod *mask)
{
    const char *const names[] = {"t"};
    saccade_problem p;
    saccade_plan *plan;
    saccade_error err = {0};
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.dtype = c->dtype;
    p.score = score;
    p.mask = mask;
    p.backend = w->backend;
    p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = names;
    p.n_gradient_captures = 1;
    if (saccade_plan_create(context, &p, &plan, &err))
        fail_msg("%s", err.message);
    return plan;
}

static void forward(const saccade_plan *plan, const saccade_backward_args *b)
{
    saccade_forward_args a;
    saccade_forward_args_init(&a);
    a.q = b->q;
    a.k = b->k;
    a.v = b->v;
    a.out = b->out;
    a.lse = b->lse;
    a.positions = b->positions;
    a.block_mask = b->block_mask;
    a.bindings = b->bindings;
    a.n_bindings = b->n_bindings;
    a.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    a.workspace = room_of(a.workspace_bytes);
    assert_int_equal(saccade_forward(plan, &a, NULL), SACCADE_OK);
    free(a.workspace);
}

static void backward(const saccade_plan *plan, saccade_backward_args *b)
{
    saccade_error err = {0};
    assert_int_equal(saccade_backward_workspace(plan, b, &b->workspace_bytes, NULL), 0);
    b->workspace = room_of(b->workspace_bytes);
    if (saccade_backward(plan, b, &err))
        fail_msg("%s", err.message);
    free(b->workspace);
}

/* The gradient of t, in f32. */
static void run(const stored_case *c, const way *w, float *to)
{
    static const float zeros[ROOM];
    static int32_t kv_len;
    const saccade_context_options options = {sizeof options, w->threads, w->level};
    const int64_t q[4] = {B, H, Q, D}, k[4] = {B, HKV, KV, D}, v[4] = {B, HKV, KV, DV};
    const int64_t o[4] = {B, H, Q, DV};
    saccade_tensor t[] = {make(c->dtype, inputs[0], 4, q),
                          make(c->dtype, inputs[1], 4, k),
                          make(c->dtype, inputs[2], 4, v),
                          make(c->dtype, NULL, 4, o),
                          make(SACCADE_F32, NULL, 3, o),
                          make(c->dtype, inputs[1], 4, o),
                          make(c->dtype, NULL, 4, q),
                          make(c->held, numbers, 4, c->shape),
                          make(w->gradient, w->is_added ? zeros : NULL, 4, c->shape)};
    const saccade_binding value = {"t", t[7]}, sum = {"t", t[8]};
    const saccade_tensor len = saccade_tensor_of(&kv_len, SACCADE_I32, 0, NULL);
    saccade_context *context;
    saccade_block_mask *blocks = NULL;
    saccade_backward_args b;
    saccade_positions positions;
    saccade_positions_init(&positions);
    kv_len = c->kv_len;
    positions.kv_len = c->kv_len ? &len : NULL;
    assert_int_equal(saccade_context_create(&options, &context, NULL), SACCADE_OK);
    saccade_mod *score = mod_of(SACCADE_SCORE, c, c->score);
    saccade_mod *mask = c->mask ? mod_of(SACCADE_MASK, c, c->mask) : NULL;
    saccade_plan *plan = plan_of(c, w, context, score, mask);
    if (w->has_blocks && mask) {
        assert_int_equal(saccade_block_mask_create(context, mask, &sizes, &positions, NULL, 0,
                                                   NULL, &blocks, NULL),
                         SACCADE_OK);
        assert_int_equal(saccade_plan_prepare(plan, blocks, NULL), SACCADE_OK);
    }
    saccade_backward_args_init(&b);
    b.q = &t[0];
    b.k = &t[1];
    b.v = &t[2];
    b.out = &t[3];
    b.lse = &t[4];
    b.d_out = &t[5];
    b.d_q = &t[6];
    b.positions = &positions;
    b.block_mask = blocks;
    b.bindings = &value;
    b.n_bindings = 1;
    b.d_captures = &sum;
    b.n_d_captures = 1;
    b.accumulate = w->is_added ? SACCADE_GRADIENT_CAPTURES : 0;
    forward(plan, &b);
    backward(plan, &b);
    const size_t bytes = (size_t)count(&t[8]) * saccade_dtype_bytes(w->gradient);
    for (size_t n = 0; n < 64; n++)
        assert_int_equal(((unsigned char *)t[8].data)[bytes + n], 0xff);
    convert_to_f32(w->gradient, t[8].data, to, count(&t[8]));
    saccade_plan_destroy(plan);
    saccade_block_mask_destroy(blocks);
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
    saccade_context_destroy(context);
    for (size_t n = 0; n < sizeof t / sizeof *t; n++)
        free(t[n].data);
}

/* ---- tests ---- */

static float most_of(const float *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

static void check_truth(const float *got, int64_t n, float most, const char *what)
{
    for (int64_t i = 0; i < n; i++) {
        if (!(fabsf(got[i] - truth[i]) <= most))
            fail_msg("%s: element %lld: got %g, expected %g", what, (long long)i,
                     (double)got[i], (double)truth[i]);
    }
}

static int is_there(const char *level)
{
    const saccade_context_options options = {sizeof options, 1, level};
    saccade_context *context = NULL;
    const saccade_status status = saccade_context_create(&options, &context, NULL);
    saccade_context_destroy(context);
    return status == SACCADE_OK;
}

static void check_case(const stored_case *c)
{
    static const char *const levels[] = {"portable", "avx2", "avx512", "amx"};
    static float got[ROOM];
    const way ref = {"ref", NULL, 1, 0, 0, SACCADE_F32};
    int64_t n = 1;
    for (int d = 0; d < 4; d++)
        n *= c->shape[d];
    run(c, &ref, truth);
    const float most =
        most_of(truth, n) * (c->dtype == SACCADE_F32 && c->held == SACCADE_F32 ? 1e-5f : 0.03f);
    assert_true(most > 0);
    for (int l = 0; l < 4 && is_there(levels[l]); l++)
        for (int narrow = 0; narrow < (c->held == SACCADE_F32 ? 1 : 2); narrow++) {
            way w = {"cpu", levels[l], 1, 1, 0, narrow ? c->held : SACCADE_F32};
            run(c, &w, held_sums);
            check_truth(held_sums, n, most, c->score);
            w.is_added = 0;
            for (int turn = 0; turn < 4; turn++) {
                w.threads = turn % 2 ? 3 : 1;
                w.has_blocks = turn / 2;
                run(c, &w, got);
                check_truth(got, n, most, c->score);
                for (int64_t i = 0; i < n; i++) /* exact zeros too */
                    if (got[i] != held_sums[i])
                        fail_msg("%s: element %lld: stored %g, added %g", c->score,
                                 (long long)i, (double)got[i], (double)held_sums[i]);
                if (turn % 2 == 0)
                    memcpy(held_sums, got, sizeof got);
                assert_memory_equal(got, held_sums, (size_t)n * sizeof *got);
            }
        }
}

static void stored(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        if (!cases[n].is_summed)
            check_case(&cases[n]);
}

static void shared_elements_are_summed(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        if (cases[n].is_summed)
            check_case(&cases[n]);
}

static int set_up(void **state)
{
    (void)state;
    for (int i = 0; i < ROOM; i++)
        numbers[i] = sinf((float)i);
    for (int n = 0; n < 3; n++)
        for (int i = 0; i < B * H * KV * D; i++)
            inputs[n][i] = sinf((float)(i * (n + 2) % 10007));
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored),
        cmocka_unit_test(shared_elements_are_summed),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
