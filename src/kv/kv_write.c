/* New keys into pools on the host, and the copies of pages that come before. */
#include "kv/kv.h"

#include "base/convert.h"
#include "base/parallel.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include <string.h>

/* ---- checks ---- */

static int is_float(saccade_dtype dtype)
{
    return dtype == SACCADE_F32 || dtype == SACCADE_F16 || dtype == SACCADE_BF16;
}

static saccade_status check_tensor(const saccade_tensor *t, const char *name,
                                   const int64_t *shape, int32_t rank, saccade_error *err)
{
    FAIL_AT(!t || !t->data, SACCADE_EINVAL, name, 0, 0, "got no tensor, expected one");
    TRY(tensor_check_place(t, name, err));
    FAIL_AT(t->device.kind != SACCADE_CPU, SACCADE_EINVAL, name, 0, 0,
            "got a tensor on a GPU, expected one on the host (see saccade_kv_slots)");
    FAIL_AT(!is_float(t->dtype), SACCADE_EINVAL, name, 0, 0,
            "got dtype %s, expected f32, f16 or bf16", saccade_dtype_name(t->dtype));
    FAIL_AT(t->rank != rank, SACCADE_EINVAL, name, 0, 0, "got rank %d, expected %d", t->rank,
            rank);
    for (int32_t d = 0; d < rank; d++)
        FAIL_AT(t->shape[d] < 0, SACCADE_EINVAL, name, 0, 0,
                "got length %lld in dimension %d, expected 0 or more", (long long)t->shape[d],
                d);
    for (int32_t d = 0; d < rank; d++)
        FAIL_AT(t->stride[d] < 0, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d, expected 0 or more", (long long)t->stride[d],
                d);
    FAIL_AT(tensor_reach(t) > TENSOR_MOST_REACH, SACCADE_EINVAL, name, 0, 0,
            "got strides that reach %.0f elements on, expected elements within 2^58 of the "
            "first",
            tensor_reach(t));
    for (int32_t d = 0; d < rank; d++)
        FAIL_AT(shape[d] >= 0 && t->shape[d] != shape[d], SACCADE_EINVAL, name, 0, 0,
                "got length %lld in dimension %d, expected %lld", (long long)t->shape[d], d,
                (long long)shape[d]);
    FAIL_AT(t->shape[rank - 1] > 1 && t->stride[rank - 1] != 1, SACCADE_EINVAL, name, 0, 0,
            "got stride %lld in the last dimension, expected 1",
            (long long)t->stride[rank - 1]);
    return SACCADE_OK;
}

/* Keys of a pool are written: no two of their elements may be one place. */
static saccade_status check_apart(const saccade_tensor *pool, const char *name,
                                  saccade_error *err)
{
    for (int32_t d = 0; d < pool->rank; d++) {
        const double last = tensor_inner_reach(pool, d);
        FAIL_AT(pool->shape[d] > 1 && (double)pool->stride[d] <= last, SACCADE_EINVAL, name, 0,
                0,
                "got stride %lld in dimension %d of a pool, expected over %.0f: elements that "
                "do not overlap",
                (long long)pool->stride[d], d, last);
    }
    return SACCADE_OK;
}

/* A pool and what goes to it. */
static saccade_status check_pair(const saccade_kv *c, const saccade_tensor *pool,
                                 const char *pool_name, const saccade_tensor *from,
                                 const char *from_name, saccade_error *err)
{
    const int64_t pools[4] = {c->pages, -1, c->page, -1};
    TRY(check_tensor(pool, pool_name, pools, 4, err));
    TRY(check_apart(pool, pool_name, err));
    const int64_t keys[3] = {saccade_kv_slots(c, NULL, 0), pool->shape[1], pool->shape[3]};
    return check_tensor(from, from_name, keys, 3, err);
}

/* ---- rows ---- */

typedef struct write_job {
    const saccade_kv *cache;
    const saccade_tensor *pool, *from;
} write_job;

static char *row_at(const saccade_tensor *t, int64_t a, int64_t b, int64_t c)
{
    const int64_t at = a * t->stride[0] + b * t->stride[1] + c * t->stride[2];
    return (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
}

static void copy_page(void *arg, int64_t item, int thread)
{
    const write_job *job = arg;
    const saccade_tensor *t = job->pool;
    const kv_copy *x = &job->cache->copy[item];
    const size_t bytes = (size_t)t->shape[3] * saccade_dtype_bytes(t->dtype);
    (void)thread;
    for (int64_t h = 0; h < t->shape[1]; h++)
        for (int64_t j = 0; j < t->shape[2]; j++)
            memcpy(row_at(t, x->to, h, j), row_at(t, x->from, h, j), bytes);
}

static void cast_row(const saccade_tensor *from, const char *row, const saccade_tensor *to,
                     char *at)
{
    enum { PART = 64 };
    float wide[PART];
    const int64_t n = to->shape[3];
    const int64_t from_bytes = (int64_t)saccade_dtype_bytes(from->dtype);
    const int64_t to_bytes = (int64_t)saccade_dtype_bytes(to->dtype);
    if (from->dtype == to->dtype) {
        memcpy(at, row, (size_t)(n * to_bytes));
        return;
    }
    for (int64_t d = 0; d < n; d += PART) {
        const int64_t m = n - d < PART ? n - d : PART;
        convert_to_f32(from->dtype, row + d * from_bytes, wide, m);
        convert_from_f32(to->dtype, wide, at + d * to_bytes, m);
    }
}

/* All heads of the keys of one growth. */
static void write_keys(void *arg, int64_t item, int thread)
{
    const write_job *job = arg;
    const saccade_kv *c = job->cache;
    const kv_growth *g = &c->growth[item];
    const int32_t *row = kv_row(c, g->sequence);
    int64_t first = 0;
    (void)thread;
    for (int64_t i = 0; i < item; i++)
        first += c->growth[i].count;
    for (int64_t j = 0; j < g->count; j++)
        for (int64_t h = 0; h < job->pool->shape[1]; h++) {
            const int64_t key = g->first + j;
            const char *from = (const char *)job->from->data
                               + ((first + j) * job->from->stride[0] + h * job->from->stride[1])
                                     * (int64_t)saccade_dtype_bytes(job->from->dtype);
            cast_row(job->from, from, job->pool,
                     row_at(job->pool, row[key / c->page], h, key % c->page));
        }
}

static void write_pool(const saccade_kv *c, const saccade_tensor *pool,
                       const saccade_tensor *from)
{
    write_job job = {c, pool, from};
    par_for(c->n_copies, 0, copy_page, &job);
    par_for(c->n_growths, 0, write_keys, &job);
}

saccade_status saccade_kv_write(const saccade_kv *c, const saccade_tensor *k_pool,
                                const saccade_tensor *v_pool, const saccade_tensor *k,
                                const saccade_tensor *v, saccade_error *err)
{
    FAIL_AT(!c, SACCADE_EINVAL, "kv", 0, 0, "got NULL, expected a cache");
    const int64_t n = saccade_kv_slots(c, NULL, 0);
    FAIL_AT(
        !n && k && k->rank == 3 && k->shape[0] > 0, SACCADE_EINVAL, "k", 0, 0,
        "got %lld keys, expected the 0 of the last grow: fork, free, truncate and drop end it",
        (long long)k->shape[0]);
    if (!n)
        return SACCADE_OK;
    TRY(check_pair(c, k_pool, "k_pool", k, "k", err));
    if (v_pool || v)
        TRY(check_pair(c, v_pool, "v_pool", v, "v", err));
    write_pool(c, k_pool, k);
    if (v_pool)
        write_pool(c, v_pool, v);
    return SACCADE_OK;
}
