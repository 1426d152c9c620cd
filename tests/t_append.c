/* saccade_append: codes, scales and casts are those of saccade_quantize and of rounding, in
 * every form of table, on the host and on a GPU; nothing outside of the pool is written. */
#include "saccade_kv.h"

#include "base/convert.h"
#include "base/quantize.h"
#include "cuda/cuda.h"
#include "support/device_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    PAGES = 9,
    PAGE = 4,
    HEADS = 2,
    KEYS = 13,
    B = 3,
    GUARD = 64,
    COLUMNS = 4,
    MOST_DIM = 150
};

typedef struct append_case {
    saccade_dtype from, to, scale;
    int tokens, channels, dim, is_hnd;
} append_case;

static float noise(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    const float x = (float)(*seed >> 40) * 0x1p-24f - 0.5f;
    return x * (*seed >> 35 & 7 ? 1 : 40);
}

/* ---- memory that is watched: guards before and after ---- */

typedef struct block {
    unsigned char *whole;
    size_t bytes;
} block;

static block block_make(size_t bytes)
{
    block x = {malloc(bytes + 2 * GUARD), bytes};
    assert_non_null(x.whole);
    memset(x.whole, 0xa5, bytes + 2 * GUARD);
    return x;
}

static void block_drop(block *x)
{
    for (size_t i = 0; i < GUARD; i++)
        assert_true(x->whole[i] == 0xa5 && x->whole[GUARD + x->bytes + i] == 0xa5);
    free(x->whole);
}

/* A call's tensors; pools and scales of K and V alike. */
typedef struct append_data {
    append_case c;
    block from[2], pool[2], scale[2];
    saccade_tensor t_from[2], t_pool[2], t_scale[2];
} append_data;

static int64_t row_groups(const append_case *c)
{
    return c->tokens ? (PAGE + c->tokens - 1) / c->tokens : 1;
}

static int64_t channel_groups(const append_case *c)
{
    return c->channels ? (c->dim + c->channels - 1) / c->channels : 1;
}

/* [pages, heads, page, dim] as NHD or HND; rows of i4 begin at whole bytes. */
static saccade_tensor pool_tensor(const append_case *c, const block *memory)
{
    const int64_t shape[4] = {PAGES, HEADS, PAGE, c->dim}, wide = (c->dim + 1) / 2 * 2;
    saccade_tensor t = saccade_tensor_of(memory->whole + GUARD, c->to, 4, shape);
    t.stride[0] = HEADS * PAGE * wide;
    t.stride[1] = c->is_hnd ? PAGE * wide : wide;
    t.stride[2] = c->is_hnd ? wide : HEADS * wide;
    return t;
}

static append_data data_make(const append_case *c, uint64_t seed)
{
    append_data x = {.c = *c};
    const size_t from_bytes = saccade_dtype_bytes(c->from);
    const int64_t wide = (c->dim + 1) / 2 * 2;
    for (int i = 0; i < 2; i++) {
        float row[MOST_DIM];
        const int64_t from[3] = {KEYS, HEADS, c->dim};
        const int64_t scales[4] = {PAGES, HEADS, row_groups(c), channel_groups(c)};
        x.from[i] = block_make((size_t)(KEYS * HEADS * c->dim) * from_bytes);
        for (int64_t n = 0; n < KEYS * HEADS; n++) {
            for (int64_t d = 0; d < c->dim; d++)
                row[d] = n == 7 ? 0 : noise(&seed);
            row[0] = n == 11 ? INFINITY : row[0];
            convert_from_f32(c->from, row,
                             x.from[i].whole + GUARD + (size_t)(n * c->dim) * from_bytes,
                             c->dim);
        }
        x.pool[i] = block_make((size_t)quant_bytes(c->to, PAGES * HEADS * PAGE * wide));
        x.scale[i] = block_make((size_t)(scales[0] * scales[1] * scales[2] * scales[3])
                                * saccade_dtype_bytes(c->scale));
        for (size_t n = 0; n < x.scale[i].bytes / saccade_dtype_bytes(c->scale); n++) {
            const float given = 0.01f + 0.001f * (float)(n % 17);
            convert_from_f32(c->scale, &given,
                             x.scale[i].whole + GUARD + n * saccade_dtype_bytes(c->scale), 1);
        }
        x.t_from[i] = saccade_tensor_of(x.from[i].whole + GUARD, c->from, 3, from);
        x.t_pool[i] = pool_tensor(c, &x.pool[i]);
        x.t_scale[i] = saccade_tensor_of(x.scale[i].whole + GUARD, c->scale, 4, scales);
    }
    return x;
}

static void data_drop(append_data *x)
{
    for (int i = 0; i < 2; i++) {
        block_drop(&x->from[i]);
        block_drop(&x->pool[i]);
        block_drop(&x->scale[i]);
    }
}

static saccade_append_args args_of(append_data *x)
{
    saccade_append_args a;
    saccade_append_args_init(&a);
    a.k = &x->t_from[0];
    a.v = &x->t_from[1];
    a.k_pool = &x->t_pool[0];
    a.v_pool = &x->t_pool[1];
    a.k_scale_tokens = a.v_scale_tokens = x->c.tokens;
    a.k_scale_channels = a.v_scale_channels = x->c.channels;
    if (!quant_is_dtype(x->c.to))
        return a;
    a.k_scale = &x->t_scale[0];
    a.v_scale = &x->t_scale[1];
    return a;
}

/* ---- what is expected ---- */

/* Key t of K or V to a place of a second pool, through saccade_quantize or rounding. */
static void put_key(append_data *x, int side, int64_t t, int64_t slot)
{
    const append_case *c = &x->c;
    const int64_t page = slot / PAGE, key = slot % PAGE;
    const saccade_tensor *pool = &x->t_pool[side], *scale = &x->t_scale[side];
    const size_t bytes = saccade_dtype_bytes(c->from);
    for (int64_t h = 0; h < HEADS; h++) {
        const int64_t at = page * pool->stride[0] + h * pool->stride[1] + key * pool->stride[2];
        const int64_t one[4] = {1, 1, 1, c->dim}, groups[4] = {1, 1, 1, channel_groups(c)};
        char *from = (char *)x->t_from[side].data + (size_t)((t * HEADS + h) * c->dim) * bytes;
        char *to = (char *)pool->data + quant_bytes(c->to, at);
        if (!quant_is_dtype(c->to)) {
            float row[MOST_DIM];
            convert_to_f32(c->from, from, row, c->dim);
            convert_from_f32(c->to, row, to, c->dim);
            continue;
        }
        const int64_t group = c->tokens ? key / c->tokens : 0;
        saccade_tensor f = saccade_tensor_of(from, c->from, 4, one);
        saccade_tensor q = saccade_tensor_of(to, c->to, 4, one);
        saccade_tensor s = saccade_tensor_of(
            (char *)scale->data
                + (page * scale->stride[0] + h * scale->stride[1] + group * scale->stride[2])
                      * (int64_t)saccade_dtype_bytes(c->scale),
            c->scale, 4, groups);
        q.stride[0] = q.stride[1] = q.stride[2] = (c->dim + 1) / 2 * 2;
        const saccade_quantize_args a = {.size = sizeof a,
                                         .from = &f,
                                         .to = &q,
                                         .scale = &s,
                                         .tokens = 1,
                                         .channels = c->channels,
                                         .is_given = c->tokens != 1};
        saccade_error err = {0};
        if (saccade_quantize(NULL, &a, &err))
            fail_msg("%s: %s", err.where, err.message);
    }
}

static void same_bytes(const block *got, const block *wanted, const append_case *c,
                       const char *what)
{
    for (size_t i = 0; i < got->bytes; i++)
        if (got->whole[GUARD + i] != wanted->whole[GUARD + i])
            fail_msg("%s of %s from %s, dim %d, groups %d x %d, byte %zu: got %02x, expected "
                     "%02x",
                     what, saccade_dtype_name(c->to), saccade_dtype_name(c->from), c->dim,
                     c->tokens, c->channels, i, got->whole[GUARD + i],
                     wanted->whole[GUARD + i]);
}

static void same_data(append_data *got, append_data *wanted)
{
    for (int i = 0; i < 2; i++) {
        same_bytes(&got->pool[i], &wanted->pool[i], &got->c, i ? "V" : "K");
        same_bytes(&got->scale[i], &wanted->scale[i], &got->c, "scales");
    }
}

/* ---- the call, here or on device 0 ---- */

typedef saccade_status append_call(saccade_append_args *a, saccade_error *err);

static saccade_status append_here(saccade_append_args *a, saccade_error *err)
{
    return saccade_append(NULL, a, err);
}

/* By one thread: what two keys of one place leave there is anybody's. */
static saccade_status append_alone(saccade_append_args *a, saccade_error *err)
{
    const saccade_context_options options = {.size = sizeof options, .threads = 1};
    saccade_context *context;
    TRY(saccade_context_create(&options, &context, err));
    const saccade_status status = saccade_append(context, a, err);
    saccade_context_destroy(context);
    return status;
}

/* Elements from a tensor's first to its last, as bytes. */
static size_t extent(const saccade_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->rank; i++)
        last += (t->shape[i] - 1) * t->stride[i];
    return (size_t)quant_bytes(t->dtype, last + 1);
}

static saccade_tensor moved(const saccade_tensor *t)
{
    saccade_error err = {0};
    saccade_tensor copy = *t;
    copy.device = (saccade_device){SACCADE_CUDA, 0};
    if (saccade_device_alloc(0, extent(t), &copy.data, &err)
        || saccade_device_copy(0, copy.data, t->data, extent(t), &err))
        fail_msg("%s", err.message);
    return copy;
}

/* Everything is copied to the device, and pools and scales back. */
static saccade_status append_there(saccade_append_args *args, saccade_error *err)
{
    saccade_append_args a = *args;
    saccade_pages pages;
    saccade_tensor there[12];
    const saccade_tensor *here[12];
    const saccade_tensor **place[] = {
        &a.k,     &a.v,      &a.k_pool,     &a.v_pool,    &a.k_scale,    &a.v_scale,
        &a.slots, &a.kv_len, &a.cu_seqlens, &pages.table, &pages.indptr, &pages.last_page_len};
    saccade_pages_init(&pages);
    if (a.pages) {
        pages = *a.pages;
        a.pages = &pages;
    }
    for (int i = 0; i < 12; i++) {
        here[i] = *place[i];
        if (!here[i])
            continue;
        there[i] = moved(here[i]);
        *place[i] = &there[i];
    }
    saccade_status status = saccade_append(NULL, &a, err);
    if (status == SACCADE_OK)
        status = saccade_device_synchronize(0, err);
    for (int i = 0; i < 12; i++) {
        if (status == SACCADE_OK && here[i] && i >= 2 && i < 6)
            status = saccade_device_copy(0, here[i]->data, there[i].data, extent(here[i]), err);
        if (here[i])
            saccade_device_free(0, there[i].data);
    }
    return status;
}

static void call(append_call *run, saccade_append_args *a)
{
    saccade_error err = {0};
    if (run(a, &err))
        fail_msg("%s: %s", err.where, err.message);
}

static saccade_tensor numbers(const int32_t *x, int64_t n)
{
    return saccade_tensor_of((void *)(uintptr_t)x, SACCADE_I32, 1, &n);
}

/* ---- what codes and casts are ---- */

static const int32_t slots[KEYS] = {5, 6, 7, 35, 0, -1, 12, 13, 14, 36, 15, 1 << 30, 20};

static void check_values(append_call *run, const append_case *c)
{
    append_data got = data_make(c, 5), wanted = data_make(c, 5);
    saccade_append_args a = args_of(&got);
    const saccade_tensor t = numbers(slots, KEYS);
    a.slots = &t;
    call(run, &a);
    for (int64_t i = 0; i < KEYS; i++)
        for (int side = 0; side < 2 && slots[i] >= 0 && slots[i] < PAGES * PAGE; side++)
            put_key(&wanted, side, i, slots[i]);
    same_data(&got, &wanted);
    data_drop(&got);
    data_drop(&wanted);
}

static void check_all_values(append_call *run)
{
    static const saccade_dtype from[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    static const saccade_dtype to[] = {SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8,  SACCADE_I4,
                                       SACCADE_F32,  SACCADE_F16,  SACCADE_BF16};
    static const struct {
        int tokens, channels, dim;
    } groups[] = {{1, 0, 128}, {1, 0, 37}, {1, 32, 144}, {1, 7, 30}, {0, 0, 64}, {2, 5, 33}};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 7; j++)
            for (int n = 0; n < (j < 4 ? 6 : 2); n++) {
                const append_case c = {from[i],
                                       to[j],
                                       n % 2 ? SACCADE_F16 : SACCADE_F32,
                                       j < 4 ? groups[n].tokens : 0,
                                       j < 4 ? groups[n].channels : 0,
                                       groups[n].dim,
                                       n % 3 == 0};
                check_values(run, &c);
            }
}

static void values(void **state)
{
    (void)state;
    check_all_values(append_here);
}

/* ---- where keys go ---- */

static const append_case plain = {SACCADE_F32, SACCADE_E4M3, SACCADE_F32, 1, 0, 16, 0};

/* New keys of three sequences: 5 that end at 9, none, 8 that end at 8. Absent and impossible
 * pages among them: the keys in them are nowhere. */
static const int32_t table[B][COLUMNS] = {{3, 1, 8, 7}, {0, 0, 0, 0}, {-1, 2, 5, 99}};
static const int32_t lengths[B] = {9, 4, 8}, starts[B + 1] = {0, 5, 5, 13};
static const int32_t places[KEYS] = {
    1 * PAGE, 1 * PAGE + 1, 1 * PAGE + 2, 1 * PAGE + 3, 8 * PAGE,     -1,          -1,
    -1,       -1,           2 * PAGE,     2 * PAGE + 1, 2 * PAGE + 2, 2 * PAGE + 3};

static void expect_places(append_call *run, saccade_append_args *a, append_data *got,
                          const int32_t *at)
{
    append_data wanted = data_make(&plain, 5);
    call(run, a);
    for (int64_t i = 0; i < KEYS; i++)
        for (int side = 0; side < 2 && at[i] >= 0; side++)
            put_key(&wanted, side, i, at[i]);
    same_data(got, &wanted);
    data_drop(&wanted);
}

static void check_tables(append_call *run)
{
    const int64_t shape[2] = {B, COLUMNS};
    const saccade_tensor rows =
        saccade_tensor_of((void *)(uintptr_t)table, SACCADE_I32, 2, shape);
    const saccade_tensor n = numbers(lengths, B), first = numbers(starts, B + 1);
    saccade_pages pages;
    append_data x = data_make(&plain, 5);
    saccade_append_args a = args_of(&x);
    saccade_pages_init(&pages);
    pages.table = &rows;
    a.pages = &pages;
    a.kv_len = &n;
    a.cu_seqlens = &first;
    expect_places(run, &a, &x, places);
    data_drop(&x);

    static const int32_t entries[] = {3, 1, 8, -1, 2}, indptr[] = {0, 3, 3, 5},
                         last[] = {1, 1, 4};
    const saccade_tensor list = numbers(entries, 5), at = numbers(indptr, B + 1);
    const saccade_tensor ends = numbers(last, B);
    x = data_make(&plain, 5);
    a = args_of(&x);
    pages.table = &list;
    pages.indptr = &at;
    pages.last_page_len = &ends;
    a.pages = &pages;
    a.cu_seqlens = &first;
    expect_places(run, &a, &x, places);
    data_drop(&x);
}

static void tables(void **state)
{
    (void)state;
    check_tables(append_here);
}

/* Page b is all of batch b; every batch has one new key, or pages and keys are as many. */
static void check_one_piece(append_call *run)
{
    static const int32_t length[PAGES] = {1, 4, 0, 5, 2, -3, 3, 1 << 30, 4};
    static const int32_t slot[PAGES] = {0, 7, -1, -1, 17, -1, 26, -1, 35};
    append_data got = data_make(&plain, 5), wanted = data_make(&plain, 5);
    saccade_append_args a = args_of(&got);
    const saccade_tensor n = numbers(length, PAGES);
    got.t_from[0].shape[0] = got.t_from[1].shape[0] = PAGES;
    a.kv_len = &n;
    call(run, &a);
    for (int64_t i = 0; i < PAGES; i++)
        for (int side = 0; side < 2 && slot[i] >= 0; side++)
            put_key(&wanted, side, i, slot[i]);
    same_data(&got, &wanted);
    data_drop(&got);
    data_drop(&wanted);
}

static void one_piece(void **state)
{
    (void)state;
    check_one_piece(append_here);
}

/* Numbers of no sense lead nowhere or into the pool: guards and sanitizers watch. */
static void check_nonsense(append_call *run)
{
    const int64_t shape[2] = {B, COLUMNS};
    const int32_t extreme[] = {INT32_MIN, INT32_MAX, -1, 0, 1, 5, 100, 1 << 29};
    uint64_t seed = 9;
    for (int round = 0; round < 40; round++) {
        int32_t entries[B * COLUMNS], first[B + 1], length[B], start[B + 1];
        append_data x = data_make(&plain, 5);
        saccade_append_args a = args_of(&x);
        saccade_pages pages;
        int32_t *const all[] = {entries, first, length, start};
        const int n[] = {B * COLUMNS, B + 1, B, B + 1};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < n[i]; j++) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                all[i][j] = extreme[seed >> 61];
            }
        const int64_t list = B * COLUMNS;
        saccade_tensor t = saccade_tensor_of(entries, SACCADE_I32, 2, shape);
        const saccade_tensor begin = numbers(start, B + 1), keys = numbers(first, B + 1);
        const saccade_tensor len = numbers(length, B);
        saccade_pages_init(&pages);
        if (round % 2) {
            t = saccade_tensor_of(entries, SACCADE_I32, 1, &list);
            pages.indptr = &begin;
        }
        pages.table = &t;
        a.pages = &pages;
        a.cu_seqlens = &keys;
        a.kv_len = &len;
        call(run, &a);
        data_drop(&x);
    }
}

static void nonsense(void **state)
{
    (void)state;
    check_nonsense(append_alone);
}

/* ---- refusals ---- */

static void refuse(saccade_append_args *a, const char *where)
{
    saccade_error err = {0};
    assert_int_equal(saccade_append(NULL, a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
}

static void refusals(void **state)
{
    append_data x = data_make(&plain, 5);
    const saccade_append_args good = args_of(&x);
    const saccade_tensor t = numbers(slots, KEYS), n = numbers(lengths, B);
    saccade_append_args a = good;
    saccade_tensor bad;
    saccade_error err;
    (void)state;
    refuse(&a, "kv_len");
    a.slots = &n;
    refuse(&a, "slots");
    bad = t;
    bad.dtype = SACCADE_F32;
    a.slots = &bad;
    assert_int_equal(saccade_append(NULL, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.message, "got dtype f32, expected i32 or i64");
    a.slots = &t;
    a.kv_len = &n;
    refuse(&a, "slots");
    a = good;
    a.slots = &t;
    a.v_pool = NULL;
    refuse(&a, "v_pool");
    a = good;
    a.slots = &t;
    a.k_scale = NULL;
    refuse(&a, "k_scale");
    a.k_scale = good.k_scale;
    bad = x.t_scale[1];
    bad.shape[0] = 1;
    a.v_scale = &bad;
    refuse(&a, "v_scale");
    a.v_scale = good.v_scale;
    bad = x.t_pool[0];
    bad.shape[3] = 15;
    a.k_pool = &bad;
    refuse(&a, "k_pool");
    bad = x.t_pool[0];
    bad.dtype = SACCADE_I32;
    refuse(&a, "k_pool");
    bad.dtype = SACCADE_F32; /* which has no scales */
    a.k_scale = NULL;
    a.k_scale_tokens = 1;
    assert_int_equal(saccade_append(NULL, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "k_scale");
    assert_non_null(strstr(err.message, "with a pool of f32"));
    a = good;
    a.kv_len = &n; /* three lengths for nine pages */
    refuse(&a, "kv_len");
    data_drop(&x);
}

/* ---- on a GPU ---- */

static void device_values(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    check_all_values(append_there);
}

static void device_places(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    check_tables(append_there);
    check_one_piece(append_there);
    check_nonsense(append_there);
}

static void compiles(void **state)
{
    (void)state;
    expect_program_compiles("append_keys.cu", "sm_90");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values),        cmocka_unit_test(tables),
        cmocka_unit_test(one_piece),     cmocka_unit_test(nonsense),
        cmocka_unit_test(refusals),      cmocka_unit_test(compiles),
        cmocka_unit_test(device_values), cmocka_unit_test(device_places),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
