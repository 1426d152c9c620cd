/* Keys of a run put into pages, in an order that a seed gives. */
#include "put_pages.h"

#include <stdlib.h>
#include <string.h>

/* Every row between a tensor of keys and its pool. */
static void move_rows(const saccade_tensor *t, const int32_t *table, const saccade_tensor *pool,
                      int is_out)
{
    const int64_t B = t->shape[0], H = t->shape[1], KV = t->shape[2], page = pool->shape[2];
    const int64_t n = (KV + page - 1) / page;
    const size_t each = saccade_dtype_bytes(t->dtype), row = (size_t)t->shape[3] * each;
    for (int64_t b = 0; b < B; b++)
        for (int64_t j = 0; j < KV; j++)
            for (int64_t h = 0; h < H; h++) {
                const int64_t at = table[b * n + j / page] * pool->stride[0]
                                   + h * pool->stride[1] + j % page * pool->stride[2];
                const int64_t from = b * t->stride[0] + h * t->stride[1] + j * t->stride[2];
                char *there = (char *)pool->data + (size_t)at * each;
                char *own = (char *)t->data + (size_t)from * each;
                memcpy(is_out ? own : there, is_out ? there : own, row);
            }
}

/* The pool of t's pages, [pages, Hkv, page, dim] with heads innermost but one, as caches lie;
 * keys past the end of a last page are zeros. */
static saccade_status fill_pool(const saccade_tensor *t, int64_t page, const int32_t *table,
                                saccade_tensor *pool, saccade_error *err)
{
    const int64_t B = t->shape[0], H = t->shape[1], KV = t->shape[2], dim = t->shape[3];
    const int64_t n = (KV + page - 1) / page, shape[] = {B * n, H, page, dim};
    void *data = calloc((size_t)(B * n * page * H * dim), saccade_dtype_bytes(t->dtype));
    CLI_FAIL_IF(!data, SACCADE_ENOMEM, "--page-size", "out of memory");
    *pool = saccade_tensor_of(data, t->dtype, 4, shape);
    pool->stride[0] = page * H * dim;
    pool->stride[1] = dim;
    pool->stride[2] = H * dim;
    move_rows(t, table, pool, 0);
    return SACCADE_OK;
}

static void shuffle(int32_t *order, int64_t n)
{
    uint64_t x = 88172645463325252u;
    for (int64_t i = 0; i < n; i++)
        order[i] = (int32_t)i;
    for (int64_t i = n - 1; i > 0; i--) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        const int64_t j = (int64_t)((x >> 11) % (uint64_t)(i + 1));
        const int32_t held = order[i];
        order[i] = order[j];
        order[j] = held;
    }
}

/* A page may be longer than all keys, as caches have them, but not so long that its empty rows
 * take more memory than any problem's. */
enum { LONGEST_PAGE = 4096 };

saccade_status paged_make(const saccade_tensor *k, const saccade_tensor *v, int64_t page,
                          paged *out, saccade_error *err)
{
    const int64_t n = (k->shape[2] + page - 1) / page, shape[] = {k->shape[0], n};
    paged made = {.k = {.data = NULL}};
    saccade_status status;
    CLI_FAIL_IF(page > LONGEST_PAGE && page > k->shape[2], SACCADE_EINVAL, "--page-size",
                "got %lld, expected at most %d, or as many as the keys, %lld", (long long)page,
                LONGEST_PAGE, (long long)k->shape[2]);
    int32_t *table = malloc((size_t)(k->shape[0] * n) * sizeof *table);
    CLI_FAIL_IF(!table, SACCADE_ENOMEM, "--page-size", "out of memory");
    shuffle(table, k->shape[0] * n);
    made.table = saccade_tensor_of(table, SACCADE_I32, 2, shape);
    CLI_TRY_GOTO(fill_pool(k, page, table, &made.k, err));
    CLI_TRY_GOTO(fill_pool(v, page, table, &made.v, err));
    *out = made;
    return SACCADE_OK;
out:
    paged_free(&made);
    return status;
}

saccade_status paged_room(const saccade_tensor *pool, saccade_tensor *out, saccade_error *err)
{
    const int64_t *n = pool->shape;
    void *data = calloc((size_t)(n[0] * n[1] * n[2] * n[3]), saccade_dtype_bytes(pool->dtype));
    CLI_FAIL_IF(!data, SACCADE_ENOMEM, "--page-size", "out of memory");
    *out = *pool;
    out->data = data;
    return SACCADE_OK;
}

void paged_take_out(const paged *p, const saccade_tensor *pool, const saccade_tensor *to)
{
    move_rows(to, p->table.data, pool, 1);
}

void paged_free(paged *p)
{
    free(p->table.data);
    free(p->k.data);
    free(p->v.data);
    p->table.data = p->k.data = p->v.data = NULL;
}
