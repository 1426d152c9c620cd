/* Masks whose blocks are selected while a model runs: the same blocks as an imported mask's,
 * the same bits, forward and backward, on the host and on a GPU, whatever the entries hold. */
#include "saccade.h"

#include "base/convert.h"
#include "support/device_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 6, COLUMNS = 40, ROWS = 8, LISTS = 8 };

typedef struct select_case {
    saccade_sizes sizes;
    saccade_dtype dtype;
    int32_t block_q, block_kv;
    int has_mask, is_shared, has_gradients;
} select_case;

static uint64_t seed;
static int32_t below(int32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((seed >> 33) % (uint32_t)n);
}

/* ---- a selection, and the same as lists ---- */

typedef struct selected {
    int64_t B, Hkv, rows, columns;
    int32_t entry[LISTS * ROWS * MOST];
    int32_t count[4 * LISTS * ROWS], index[4 * LISTS * ROWS * COLUMNS];
} selected;

static int by_number(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* Entries among which are twins and numbers of no block. */
static void choose(const select_case *c, selected *x)
{
    x->B = c->is_shared ? 1 : c->sizes.B;
    x->Hkv = c->is_shared ? 1 : c->sizes.Hkv;
    x->rows = (c->sizes.Q + c->block_q - 1) / c->block_q;
    x->columns = (c->sizes.KV + c->block_kv - 1) / c->block_kv;
    assert_true(x->B * x->Hkv <= LISTS && x->rows <= ROWS && x->columns <= COLUMNS);
    for (int64_t i = 0; i < x->B * x->Hkv * x->rows * MOST; i++)
        x->entry[i] = below(7) == 0   ? -1 - below(3) * below(1 << 30)
                      : below(9) == 0 ? (int32_t)x->columns + below(3) * below(1 << 29)
                                      : below((int32_t)x->columns);
    for (int64_t i = 0; i < MOST; i++)
        x->entry[i] = -1; /* a row without blocks */
}

/* Lists of query heads. */
static saccade_block_indices lists_of(const select_case *c, selected *x)
{
    const int64_t H = c->is_shared ? 1 : c->sizes.H, group = H / x->Hkv;
    for (int64_t line = 0; line < x->B * H * x->rows; line++) {
        const int64_t bh = line / x->rows, g = bh / H * x->Hkv + bh % H / group;
        const int32_t *from = x->entry + (g * x->rows + line % x->rows) * MOST;
        int32_t *to = x->index + line * x->columns, found[MOST], n = 0, kept = 0;
        for (int i = 0; i < MOST; i++)
            if (from[i] >= 0 && from[i] < x->columns)
                found[n++] = from[i];
        qsort(found, (size_t)n, sizeof *found, by_number);
        for (int32_t i = 0; i < n; i++)
            if (i == 0 || found[i] != found[i - 1])
                to[kept++] = found[i];
        x->count[line] = kept;
    }
    return (saccade_block_indices){.B = x->B,
                                   .H = H,
                                   .rows = x->rows,
                                   .columns = x->columns,
                                   .block_q = c->block_q,
                                   .block_kv = c->block_kv,
                                   .kv_num_blocks = x->count,
                                   .kv_indices = x->index};
}

static saccade_tensor entries_of(selected *x)
{
    const int64_t shape[4] = {x->B, x->Hkv, x->rows, MOST};
    return saccade_tensor_of(x->entry, SACCADE_I32, 4, shape);
}

static saccade_block_mask *make_selected(const select_case *c, const selected *x,
                                         const saccade_mod *mod)
{
    const saccade_selection_options o = {.size = sizeof o,
                                         .B = x->B,
                                         .Hkv = x->Hkv,
                                         .block_q = c->block_q,
                                         .block_kv = c->block_kv,
                                         .most = MOST};
    saccade_block_mask *mask = NULL;
    saccade_error err = {0};
    const saccade_status status = saccade_block_mask_create_selected(
        NULL, &o, mod, &c->sizes, NULL, NULL, 0, &mask, &err);
    if (status != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    return mask;
}

static saccade_block_mask *make_imported(const select_case *c, selected *x,
                                         const saccade_mod *mod)
{
    const saccade_block_indices lists = lists_of(c, x);
    saccade_block_mask *mask = NULL;
    saccade_error err = {0};
    if (saccade_block_mask_import(NULL, &lists, mod, &c->sizes, NULL, NULL, 0, &mask, &err))
        fail_msg("%s: %s", err.where, err.message);
    return mask;
}

/* ---- runs, here or on device 0 ---- */

enum { Q, K, V, OUT, LSE, D_OUT, D_Q, D_K, D_V, TENSORS };

typedef struct place {
    int is_cuda, has_gradients;
    saccade_tensor t[TENSORS];
    size_t bytes[TENSORS];
    void *host[TENSORS];
    saccade_plan *plan;
    saccade_mod *mod;
    void *workspace;
    size_t workspace_bytes;
} place;

static void *room(int is_cuda, size_t bytes)
{
    saccade_error err = {0};
    void *memory = NULL;
    if (!is_cuda)
        memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    else if (saccade_device_alloc(0, bytes, &memory, &err))
        fail_msg("%s", err.message);
    assert_non_null(memory);
    return memory;
}

static void give_tensor(place *p, int i, const select_case *c, int64_t H, int64_t N, int64_t D)
{
    const int64_t shape[4] = {c->sizes.B, H, N, D}, n = shape[0] * H * N * D;
    const saccade_dtype dtype = i == LSE ? SACCADE_F32 : c->dtype;
    saccade_error err = {0};
    p->bytes[i] = (size_t)n * saccade_dtype_bytes(dtype);
    p->host[i] = malloc(p->bytes[i]);
    assert_non_null(p->host[i]);
    for (int64_t e = 0; e < n; e++) {
        const float x = ((float)below(4096) - 2048) / 1024;
        convert_from_f32(dtype, &x, (char *)p->host[i] + (size_t)e * saccade_dtype_bytes(dtype),
                         1);
    }
    p->t[i] = saccade_tensor_of(p->host[i], dtype, i == LSE ? 3 : 4, shape);
    if (!p->is_cuda)
        return;
    p->t[i].data = room(1, p->bytes[i]);
    p->t[i].device.kind = SACCADE_CUDA;
    assert_int_equal(
        saccade_device_copy(0, p->t[i].data, p->host[i], p->bytes[i], &err), SACCADE_OK);
}

static place place_make(const select_case *c, const char *backend)
{
    const saccade_sizes *s = &c->sizes;
    place p = {.is_cuda = strcmp(backend, "cuda") == 0, .has_gradients = c->has_gradients};
    saccade_problem problem;
    saccade_error err = {0};
    seed = 77;
    give_tensor(&p, Q, c, s->H, s->Q, s->D);
    give_tensor(&p, K, c, s->Hkv, s->KV, s->D);
    give_tensor(&p, V, c, s->Hkv, s->KV, s->Dv);
    give_tensor(&p, OUT, c, s->H, s->Q, s->Dv);
    give_tensor(&p, LSE, c, s->H, s->Q, 1);
    give_tensor(&p, D_OUT, c, s->H, s->Q, s->Dv);
    give_tensor(&p, D_Q, c, s->H, s->Q, s->D);
    give_tensor(&p, D_K, c, s->Hkv, s->KV, s->D);
    give_tensor(&p, D_V, c, s->Hkv, s->KV, s->Dv);
    p.mod = c->has_mask ? case_mod(SACCADE_MASK, "q + 70 >= kv && kv % 5 != 3") : NULL;
    saccade_problem_init(&problem);
    problem.sizes = *s;
    problem.dtype = c->dtype;
    problem.mask = p.mod;
    problem.backend = backend;
    problem.gradients =
        c->has_gradients ? SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V : 0;
    if (saccade_plan_create(NULL, &problem, &p.plan, &err))
        fail_msg("%s: %s", err.where, err.message);
    p.workspace_bytes = saccade_plan_workspace(p.plan, s);
    if (c->has_gradients && saccade_plan_backward_workspace(p.plan, s) > p.workspace_bytes)
        p.workspace_bytes = saccade_plan_backward_workspace(p.plan, s);
    p.workspace = room(p.is_cuda, p.workspace_bytes);
    return p;
}

static void place_drop(place *p)
{
    for (int i = 0; i < TENSORS; i++) {
        if (p->is_cuda)
            saccade_device_free(0, p->t[i].data);
        free(p->host[i]);
    }
    if (p->is_cuda)
        saccade_device_free(0, p->workspace);
    else
        free(p->workspace);
    saccade_plan_destroy(p->plan);
    saccade_mod_destroy(p->mod);
}

static saccade_status run_backward(place *p, const saccade_block_mask *mask, saccade_error *err)
{
    saccade_backward_args a;
    saccade_backward_args_init(&a);
    a.q = &p->t[Q];
    a.k = &p->t[K];
    a.v = &p->t[V];
    a.out = &p->t[OUT];
    a.lse = &p->t[LSE];
    a.d_out = &p->t[D_OUT];
    a.d_q = &p->t[D_Q];
    a.d_k = &p->t[D_K];
    a.d_v = &p->t[D_V];
    a.block_mask = mask;
    a.workspace = p->workspace;
    a.workspace_bytes = p->workspace_bytes;
    return saccade_backward(p->plan, &a, err);
}

/* out, lse and gradients lie in p->host afterwards. */
static void run(place *p, const saccade_block_mask *mask)
{
    saccade_error err = {0};
    saccade_forward_args a;
    saccade_forward_args_init(&a);
    a.q = &p->t[Q];
    a.k = &p->t[K];
    a.v = &p->t[V];
    a.out = &p->t[OUT];
    a.lse = &p->t[LSE];
    a.block_mask = mask;
    a.workspace = p->workspace;
    a.workspace_bytes = p->workspace_bytes;
    saccade_status status = saccade_forward(p->plan, &a, &err);
    if (status == SACCADE_OK && p->has_gradients)
        status = run_backward(p, mask, &err);
    if (status == SACCADE_OK && p->is_cuda)
        status = saccade_device_synchronize(0, &err);
    for (int i = OUT; status == SACCADE_OK && p->is_cuda && i < TENSORS; i++)
        status = saccade_device_copy(0, p->host[i], p->t[i].data, p->bytes[i], &err);
    if (status != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
}

static void prepare(const place *p, const saccade_block_mask *mask)
{
    saccade_error err = {0};
    if (saccade_plan_prepare(p->plan, mask, &err))
        fail_msg("%s: %s", err.where, err.message);
}

static void select_there(const place *p, saccade_block_mask *mask, selected *x)
{
    saccade_tensor t = entries_of(x);
    saccade_error err = {0};
    void *memory = NULL;
    if (p->is_cuda) {
        const size_t bytes = (size_t)(x->B * x->Hkv * x->rows * MOST) * sizeof *x->entry;
        memory = room(1, bytes);
        assert_int_equal(saccade_device_copy(0, memory, x->entry, bytes, &err), SACCADE_OK);
        t.data = memory;
        t.device.kind = SACCADE_CUDA;
    }
    if (saccade_block_mask_select(mask, &t, NULL, &err))
        fail_msg("%s: %s", err.where, err.message);
    if (p->is_cuda) {
        assert_int_equal(saccade_device_synchronize(0, &err), SACCADE_OK);
        saccade_device_free(0, memory);
    }
}

/* Three selections one after the other, each against an imported mask of the same blocks. */
static void check(const select_case *c, const char *backend)
{
    selected x;
    place p = place_make(c, backend);
    seed = 5;
    choose(c, &x);
    saccade_block_mask *mask = make_selected(c, &x, p.mod);
    prepare(&p, mask);
    for (int round = 0; round < 3; round++) {
        unsigned char *kept[TENSORS];
        if (round)
            choose(c, &x);
        saccade_block_mask *same = make_imported(c, &x, p.mod);
        prepare(&p, same);
        run(&p, same);
        for (int i = OUT; i < TENSORS; i++) {
            kept[i] = malloc(p.bytes[i]);
            assert_non_null(kept[i]);
            memcpy(kept[i], p.host[i], p.bytes[i]);
        }
        select_there(&p, mask, &x);
        run(&p, mask);
        for (int i = OUT; i < TENSORS; i++) {
            if ((i <= LSE || (c->has_gradients && i >= D_Q))
                && memcmp(kept[i], p.host[i], p.bytes[i]) != 0)
                fail_msg("%s, %s d%lld q%lld, blocks %d x %d, selection %d: tensor %d differs",
                         backend, saccade_dtype_name(c->dtype), (long long)c->sizes.D,
                         (long long)c->sizes.Q, c->block_q, c->block_kv, round, i);
            free(kept[i]);
        }
        saccade_block_mask_destroy(same);
    }
    saccade_block_mask_destroy(mask);
    place_drop(&p);
}

/* ---- tests ---- */

static const saccade_sizes few = {2, 4, 2, 100, 150, 16, 16};
static const saccade_sizes prompt = {2, 4, 2, 500, 700, 64, 64};
static const saccade_sizes one = {2, 8, 2, 1, 1200, 128, 128};

static void on_the_host(void **state)
{
    const select_case cases[] = {
        {few, SACCADE_F32, 32, 32, 1, 0, 1},  {few, SACCADE_F32, 16, 16, 0, 1, 1},
        {few, SACCADE_BF16, 64, 64, 1, 0, 1}, {few, SACCADE_F32, 128, 7, 0, 0, 0},
        {few, SACCADE_F32, 13, 5, 1, 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(&cases[i], "cpu");
        if (cases[i].dtype == SACCADE_F32)
            check(&cases[i], "ref");
    }
}

static void dense_is_the_same(void **state)
{
    const select_case c = {few, SACCADE_F32, 32, 16, 1, 0, 0};
    const size_t bytes = (size_t)(few.B * few.H * few.Q * few.KV);
    uint8_t *a = malloc(bytes), *b = malloc(bytes);
    saccade_mod *mod = case_mod(SACCADE_MASK, "q >= kv");
    saccade_error err;
    selected x;
    (void)state;
    seed = 3;
    choose(&c, &x);
    saccade_block_mask *mask = make_selected(&c, &x, mod), *same = make_imported(&c, &x, mod);
    const saccade_tensor t = entries_of(&x);
    assert_int_equal(saccade_block_mask_to_dense(mask, a, &err), SACCADE_OK);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(a[i], 0); /* nothing was selected yet */
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_OK);
    assert_int_equal(saccade_block_mask_to_dense(mask, a, &err), SACCADE_OK);
    assert_int_equal(saccade_block_mask_to_dense(same, b, &err), SACCADE_OK);
    assert_memory_equal(a, b, bytes);
    saccade_block_mask_destroy(mask);
    saccade_block_mask_destroy(same);
    saccade_mod_destroy(mod);
    free(a);
    free(b);
}

static void no_entries_are_no_blocks(void **state)
{
    const select_case c = {few, SACCADE_F32, 32, 16, 1, 0, 0};
    const size_t bytes = (size_t)(few.B * few.H * few.Q * few.KV);
    uint8_t *a = malloc(bytes);
    saccade_error err;
    selected x;
    (void)state;
    seed = 3;
    choose(&c, &x);
    saccade_block_mask *mask = make_selected(&c, &x, NULL);
    saccade_tensor t = entries_of(&x);
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_OK);
    assert_int_equal(saccade_block_mask_to_dense(mask, a, &err), SACCADE_OK);
    assert_non_null(memchr(a, 1, bytes));
    t.shape[3] = 0;
    t.data = NULL;
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_OK);
    assert_int_equal(saccade_block_mask_to_dense(mask, a, &err), SACCADE_OK);
    assert_null(memchr(a, 1, bytes));
    t.shape[2]--; /* shapes are still those of the mask */
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_EINVAL);
    saccade_block_mask_destroy(mask);
    free(a);
}

static void refusals(void **state)
{
    const select_case c = {few, SACCADE_F32, 32, 16, 0, 0, 0};
    saccade_selection_options o = {.size = sizeof o,
                                   .B = 1,
                                   .Hkv = 2,
                                   .block_q = 32,
                                   .block_kv = 16,
                                   .most = MOST};
    saccade_block_mask *mask = NULL;
    saccade_error err;
    selected x;
    (void)state;
    o.Hkv = 4; /* that of query heads */
    assert_int_equal(saccade_block_mask_create_selected(NULL, &o, NULL, &few, NULL, NULL, 0,
                                                        &mask, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.where, "Hkv");
    o.Hkv = 2;
    o.most = 0;
    assert_int_equal(saccade_block_mask_create_selected(NULL, &o, NULL, &few, NULL, NULL, 0,
                                                        &mask, &err),
                     SACCADE_EINVAL);
    choose(&c, &x);
    mask = make_selected(&c, &x, NULL);
    saccade_tensor t = entries_of(&x);
    t.shape[3] = MOST + 1;
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "blocks");
    t.shape[3] = MOST;
    t.shape[2]--;
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_EINVAL);
    t = entries_of(&x);
    t.dtype = SACCADE_U32;
    assert_int_equal(saccade_block_mask_select(mask, &t, NULL, &err), SACCADE_EINVAL);
    saccade_block_mask *same = make_imported(&c, &x, NULL);
    t = entries_of(&x);
    assert_int_equal(saccade_block_mask_select(same, &t, NULL, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "block_mask");
    saccade_block_mask_destroy(mask);
    saccade_block_mask_destroy(same);
}

static void on_a_device(void **state)
{
    const select_case cases[] = {
        {prompt, SACCADE_BF16, 128, 128, 1, 0, 1}, {prompt, SACCADE_BF16, 384, 256, 0, 0, 1},
        {prompt, SACCADE_F16, 128, 128, 0, 1, 0},  {one, SACCADE_BF16, 1, 64, 0, 0, 0},
        {one, SACCADE_BF16, 64, 128, 1, 0, 0},  {one, SACCADE_F32, 128, 128, 1, 1, 0},
        {prompt, SACCADE_F32, 128, 128, 1, 0, 1},
    };
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&cases[i], "cuda");
}

static void compiles(void **state)
{
    (void)state;
    expect_program_compiles("select_lists.cu", "sm_90");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_is_the_same), cmocka_unit_test(on_the_host),
        cmocka_unit_test(refusals),          cmocka_unit_test(compiles),
        cmocka_unit_test(on_a_device),       cmocka_unit_test(no_entries_are_no_blocks),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
