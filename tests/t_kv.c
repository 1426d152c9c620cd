/* The cache of pages: random calls held against a model that keeps every sequence's keys apart,
 * errors that change nothing, allocation failures, and attention over what it holds. */
#include "saccade_kv.h"

#include "support/fail_alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SEQUENCES = 6, PAGES = 40, PAGE = 4, MOST = 48, HEADS = 2, DIM = 3, COLUMNS = 12 };

/* What should be in the cache: the number of each key that was written, in order. */
typedef struct model {
    int is_there[SEQUENCES];
    int64_t length[SEQUENCES], dropped[SEQUENCES];
    int32_t key[SEQUENCES][MOST];
    float k_pool[PAGES][PAGE][HEADS][DIM], v_pool[PAGES][HEADS][PAGE][DIM];
    int32_t n_written;
} model;

static uint64_t seed;
static int32_t below(int32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((seed >> 33) % (uint32_t)n);
}

static saccade_kv *make_of(int64_t pages, int64_t page, int64_t sequences, int64_t most_keys)
{
    saccade_kv_options o;
    saccade_kv *cache = NULL;
    saccade_error err;
    saccade_kv_options_init(&o);
    o.pages = pages;
    o.page = page;
    o.sequences = sequences;
    o.most_keys = most_keys;
    if (saccade_kv_create(&o, &cache, &err))
        fail_msg("%s", err.message);
    return cache;
}

static saccade_kv *make(int64_t pages)
{
    return make_of(pages, PAGE, SEQUENCES, MOST);
}

/* NHD for K, HND for V. */
static saccade_tensor pool_of(model *m, int is_value)
{
    const int64_t shape[] = {PAGES, HEADS, PAGE, DIM};
    saccade_tensor t = saccade_tensor_of(is_value ? (void *)m->v_pool : (void *)m->k_pool,
                                         SACCADE_F32, 4, shape);
    if (!is_value) {
        t.stride[1] = DIM;
        t.stride[2] = HEADS * DIM;
    }
    return t;
}

static float value_of(int32_t key, int h, int d, int is_value)
{
    return (float)(key * 8 + h * DIM + d) + (is_value ? 0.5f : 0);
}

static void write_new(saccade_kv *cache, model *m, const int32_t *sequences,
                      const int32_t *counts, int32_t n)
{
    float k[SEQUENCES * MOST][HEADS][DIM], v[SEQUENCES * MOST][HEADS][DIM];
    saccade_error err;
    int64_t all = 0;
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < counts[i]; j++, all++) {
            const int32_t s = sequences[i], key = ++m->n_written;
            m->key[s][m->length[s]++] = key;
            for (int h = 0; h < HEADS; h++)
                for (int d = 0; d < DIM; d++) {
                    k[all][h][d] = value_of(key, h, d, 0);
                    v[all][h][d] = value_of(key, h, d, 1);
                }
        }
    assert_int_equal(saccade_kv_slots(cache, NULL, 0), all);
    if (!all)
        return;
    const int64_t shape[] = {all, HEADS, DIM};
    const saccade_tensor from_k = saccade_tensor_of(k, SACCADE_F32, 3, shape);
    const saccade_tensor from_v = saccade_tensor_of(v, SACCADE_F32, 3, shape);
    const saccade_tensor pool_k = pool_of(m, 0), pool_v = pool_of(m, 1);
    if (saccade_kv_write(cache, &pool_k, &pool_v, &from_k, &from_v, &err))
        fail_msg("%s: %s", err.where, err.message);
}

/* The cache holds what the model says, and no page more than is named. */
static void compare(const saccade_kv *cache, const model *m)
{
    int32_t table[COLUMNS], length;
    int is_used[PAGES] = {0}, n_used = 0;
    saccade_error err;
    for (int32_t s = 0; s < SEQUENCES; s++) {
        assert_int_equal(saccade_kv_length(cache, s), m->is_there[s] ? m->length[s] : -1);
        if (!m->is_there[s])
            continue;
        assert_int_equal(saccade_kv_table(cache, &s, 1, table, COLUMNS, &length, &err), 0);
        assert_int_equal(length, m->length[s]);
        for (int64_t j = 0; j < m->length[s]; j++) {
            const int32_t page = table[j / PAGE];
            if (j / PAGE < m->dropped[s]) {
                assert_int_equal(page, -1);
                continue;
            }
            assert_in_range(page, 0, PAGES - 1);
            is_used[page] = 1;
            for (int h = 0; h < HEADS; h++)
                for (int d = 0; d < DIM; d++) {
                    const int32_t key = m->key[s][j];
                    assert_true(m->k_pool[page][j % PAGE][h][d] == value_of(key, h, d, 0));
                    assert_true(m->v_pool[page][h][j % PAGE][d] == value_of(key, h, d, 1));
                }
        }
        for (int64_t i = (m->length[s] + PAGE - 1) / PAGE; i < COLUMNS; i++)
            assert_int_equal(table[i], -1);
    }
    for (int i = 0; i < PAGES; i++)
        n_used += is_used[i];
    assert_int_equal(saccade_kv_free_pages(cache), PAGES - n_used);
}

static void try_grow(saccade_kv *cache, model *m)
{
    int32_t sequences[SEQUENCES], counts[SEQUENCES], n = 0;
    saccade_error err;
    int is_valid = 1, fits = 1;
    for (int32_t s = 0; s < SEQUENCES; s++)
        if (below(3)) {
            sequences[n] = s;
            counts[n] = below(4) ? below(6) : below(MOST);
            is_valid &= m->is_there[s];
            fits &= m->length[s] + counts[n] <= MOST;
            n++;
        }
    const saccade_status status = saccade_kv_grow(cache, sequences, counts, n, &err);
    if (!is_valid)
        assert_true(status == SACCADE_EINVAL || (!fits && status == SACCADE_ELIMIT));
    else if (!fits)
        assert_int_equal(status, SACCADE_ELIMIT);
    else if (status == SACCADE_OK)
        write_new(cache, m, sequences, counts, n);
    else
        assert_int_equal(status, SACCADE_ELIMIT);
}

static void try_fork(saccade_kv *cache, model *m, int32_t s)
{
    int32_t child = -1;
    saccade_error err;
    int n_there = 0;
    for (int i = 0; i < SEQUENCES; i++)
        n_there += m->is_there[i];
    const int is_new = below(2);
    const saccade_status status =
        is_new ? saccade_kv_add(cache, &child, &err) : saccade_kv_fork(cache, s, &child, &err);
    const int is_valid = n_there < SEQUENCES && (is_new || m->is_there[s]);
    assert_int_equal(status == SACCADE_OK, is_valid);
    if (status)
        return;
    assert_false(m->is_there[child]);
    m->is_there[child] = 1;
    m->length[child] = is_new ? 0 : m->length[s];
    m->dropped[child] = is_new ? 0 : m->dropped[s];
    memcpy(m->key[child], m->key[s], sizeof m->key[s]);
}

static void try_shorter(saccade_kv *cache, model *m, int32_t s)
{
    const int64_t to = below(MOST + 2) - 1;
    saccade_error err;
    if (below(2)) {
        const int is_valid = m->is_there[s] && to >= 0 && to <= m->length[s]
                             && !(to % PAGE && to / PAGE < m->dropped[s]);
        assert_int_equal(saccade_kv_truncate(cache, s, to, &err),
                         is_valid ? SACCADE_OK : SACCADE_EINVAL);
        if (is_valid) {
            m->length[s] = to;
            if (m->dropped[s] > to / PAGE)
                m->dropped[s] = to / PAGE;
        }
        return;
    }
    const int is_valid = m->is_there[s] && to >= 0 && to <= m->length[s];
    assert_int_equal(saccade_kv_drop(cache, s, to, &err),
                     is_valid ? SACCADE_OK : SACCADE_EINVAL);
    if (is_valid && m->dropped[s] < to / PAGE)
        m->dropped[s] = to / PAGE;
}

static void random_calls(void **state)
{
    model *m = malloc(sizeof *m);
    (void)state;
    assert_non_null(m);
    for (int round = 0; round < 40; round++) {
        saccade_kv *cache = make(PAGES);
        saccade_error err;
        memset(m, 0, sizeof *m);
        seed = (uint64_t)round + 1;
        for (int step = 0; step < 120; step++) {
            const int32_t s = below(SEQUENCES);
            switch (below(8)) {
            case 0:
            case 1:
                try_fork(cache, m, s);
                break;
            case 2:
                assert_int_equal(saccade_kv_free(cache, s, &err),
                                 m->is_there[s] ? SACCADE_OK : SACCADE_EINVAL);
                m->is_there[s] = 0;
                m->length[s] = m->dropped[s] = 0;
                break;
            case 3:
                try_shorter(cache, m, s);
                break;
            default:
                try_grow(cache, m);
            }
            compare(cache, m);
        }
        saccade_kv_destroy(cache);
    }
    free(m);
}

/* Two sequences of one open page: the one that writes first gets a copy, the other keeps it. */
static void copy_on_write(void **state)
{
    saccade_kv *cache = make(4);
    int32_t a, b, counts[] = {1, 1}, pairs[4], tables[2];
    saccade_error err;
    (void)state;
    assert_int_equal(saccade_kv_add(cache, &a, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_grow(cache, &a, (int32_t[]){PAGE + 1}, 1, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_fork(cache, a, &b, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_free_pages(cache), 2);
    assert_int_equal(saccade_kv_grow(cache, (int32_t[]){a, b}, counts, 2, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_copies(cache, pairs, 2), 1);
    assert_int_equal(pairs[0], 1);
    assert_int_equal(pairs[1], 2);
    assert_int_equal(saccade_kv_free_pages(cache), 1);
    /* the rest does not fit, and all stays as it is, pending copies too */
    counts[0] = counts[1] = PAGE;
    assert_int_equal(saccade_kv_grow(cache, (int32_t[]){a, b}, counts, 2, &err),
                     SACCADE_ELIMIT);
    assert_string_equal(err.message, "got 1 free, expected 2 or more");
    assert_int_equal(saccade_kv_copies(cache, NULL, 0), 1);
    assert_int_equal(saccade_kv_table(cache, &a, 1, tables, 1, NULL, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_kv_grow(cache, (int32_t[]){a, a}, counts, 2, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.message, "got 0 twice, expected it once");
    saccade_kv_destroy(cache);
    saccade_kv_destroy(NULL);
}

/* Keys that come when nothing was made ready for them are refused, not left out. */
static void keys_without_a_grow(void **state)
{
    float numbers[8] = {0};
    const int64_t shape[3] = {1, 1, 8};
    const saccade_tensor k = saccade_tensor_of(numbers, SACCADE_F32, 3, shape);
    saccade_kv *cache = make(4);
    saccade_error err;
    int32_t s;
    (void)state;
    assert_int_equal(saccade_kv_add(cache, &s, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_grow(cache, &s, (int32_t[]){1}, 1, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_drop(cache, s, 0, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_write(cache, &k, NULL, &k, NULL, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "k");
    saccade_kv_destroy(cache);
}

/* What would be written before a pool, past what an address counts, or to one place twice. */
static void strides_of_pools(void **state)
{
    enum { PAGES = 4, KEYS = 4, DIM = 2 };
    float numbers[PAGES * KEYS * DIM] = {0}, row[DIM] = {1, 2};
    const int64_t shape[4] = {PAGES, 1, KEYS, DIM}, one[3] = {1, 1, DIM};
    const saccade_tensor k = saccade_tensor_of(row, SACCADE_F32, 3, one);
    saccade_kv *cache = make_of(PAGES, KEYS, 1, 0);
    saccade_error err;
    int32_t s;
    (void)state;
    assert_int_equal(saccade_kv_add(cache, &s, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_grow(cache, &s, (int32_t[]){1}, 1, &err), SACCADE_OK);
    for (int64_t stride = -1; stride <= 0; stride++)
        for (int d = 0; d <= 2; d += 2) {
            saccade_tensor pool = saccade_tensor_of(numbers, SACCADE_F32, 4, shape);
            pool.stride[d] = stride;
            assert_int_equal(saccade_kv_write(cache, &pool, NULL, &k, NULL, &err),
                             SACCADE_EINVAL);
            assert_string_equal(err.where, "k_pool");
            assert_non_null(strstr(err.message, stride < 0 ? "expected 0 or more"
                                                           : "elements that do not overlap"));
        }
    saccade_tensor near = saccade_tensor_of(numbers, SACCADE_F32, 4, shape), far = near;
    near.stride[2] = 1; /* keys that share all but one channel */
    far.stride[0] = (int64_t)1 << 62;
    assert_int_equal(saccade_kv_write(cache, &near, NULL, &k, NULL, &err), SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "elements that do not overlap"));
    assert_int_equal(saccade_kv_write(cache, &far, NULL, &k, NULL, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "k_pool");
    assert_non_null(strstr(err.message, "within 2^58 of the first"));
    saccade_kv_destroy(cache);
}

/* A sequence ends where most_keys says, not where its last page does. */
static void most_keys_of_a_sequence(void **state)
{
    saccade_kv *cache = make_of(9, 6, 1, 13);
    saccade_error err;
    int32_t s;
    (void)state;
    assert_int_equal(saccade_kv_add(cache, &s, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_grow(cache, &s, (int32_t[]){14}, 1, &err), SACCADE_ELIMIT);
    assert_string_equal(err.message, "got 14 for sequence 0, expected 0 to 13");
    assert_int_equal(saccade_kv_grow(cache, &s, (int32_t[]){13}, 1, &err), SACCADE_OK);
    assert_int_equal(saccade_kv_grow(cache, &s, (int32_t[]){1}, 1, &err), SACCADE_ELIMIT);
    assert_int_equal(saccade_kv_grow(cache, &s, (int32_t[]){-1}, 1, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_kv_length(cache, s), 13);
    saccade_kv_destroy(cache);
}

static saccade_status use(void *arg, saccade_error *err)
{
    saccade_kv_options o;
    saccade_kv *cache;
    int32_t s, child;
    (void)arg;
    saccade_kv_options_init(&o);
    o.pages = 8;
    o.page = 16;
    o.sequences = 3;
    saccade_status status = saccade_kv_create(&o, &cache, err);
    if (status)
        return status;
    status = saccade_kv_add(cache, &s, err);
    if (!status)
        status = saccade_kv_grow(cache, &s, (int32_t[]){20}, 1, err);
    if (!status)
        status = saccade_kv_fork(cache, s, &child, err);
    saccade_kv_destroy(cache);
    return status;
}

static void allocations(void **state)
{
    (void)state;
    assert_true(fail_alloc_sweep("kv", use, NULL) > 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls),
        cmocka_unit_test(copy_on_write),
        cmocka_unit_test(keys_without_a_grow),
        cmocka_unit_test(strides_of_pools),
        cmocka_unit_test(most_keys_of_a_sequence),
        cmocka_unit_test(allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
