/* Keys in chunks: see chunk_case.h. */
#include "support/chunk_case.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x >> 11;
}

saccade_tensor chunk_pool(const saccade_tensor *from, const plan_chunks *c, int64_t rows)
{
    const size_t each = saccade_dtype_bytes(from->dtype);
    const int64_t heads = from->shape[1], KV = from->shape[2], dim = from->shape[3];
    saccade_tensor pool = *from;
    const float nan = NAN;
    char *data = malloc((size_t)(heads * rows * dim) * each);
    assert_non_null(data);
    for (int64_t i = 0; i < heads * rows * dim; i++)
        convert_from_f32(from->dtype, &nan, data + (size_t)i * each, 1);
    pool.data = data;
    pool.shape[2] = rows;
    pool.stride[0] = 0;
    pool.stride[1] = rows * dim;
    pool.stride[2] = dim;
    for (int64_t b = 0; b < from->shape[0]; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t j = 0; j < KV; j++) {
                const int32_t first = c->first[b * c->row_stride + j / c->size];
                const int64_t row = first + j % c->size;
                const int64_t *stride = from->stride;
                const int64_t at = b * stride[0] + h * stride[1] + j * stride[2];
                if (first >= 0)
                    memcpy(data + (size_t)(h * pool.stride[1] + row * dim) * each,
                           (const char *)from->data + (size_t)at * each, (size_t)dim * each);
            }
    return pool;
}

void chunk_table(const chunk_case *c, const saccade_sizes *sizes, int32_t *table,
                 plan_chunks *out, int64_t *rows)
{
    const int32_t count = (int32_t)((sizes->KV + c->size - 1) / c->size);
    const int32_t all = (int32_t)sizes->B * count;
    int32_t order[CHUNK_MOST];
    uint64_t x = 88172645463325252u + (uint64_t)c->size;
    assert_true(all <= CHUNK_MOST);
    for (int32_t n = 0; n < all; n++)
        order[n] = n;
    for (int32_t n = all - 1; n > 0; n--) {
        const int32_t other = (int32_t)(next_random(&x) % (uint64_t)(n + 1)), held = order[n];
        order[n] = order[other];
        order[other] = held;
    }
    for (int32_t n = 0; n < all; n++) {
        const int is_dead = (int64_t)(n % count + 1) * c->size <= c->dead;
        table[n] = is_dead ? -1 : 2 * order[n] * c->size;
    }
    *rows = 2 * (int64_t)all * c->size;
    *out =
        (plan_chunks){.first = table, .row_stride = count, .count = count, .size = c->size};
}

saccade_plan *chunk_plan(const saccade_problem *problem, const plan_solver *const *solvers)
{
    saccade_error err = {0};
    saccade_plan *plan = calloc(1, sizeof *plan);
    assert_non_null(plan);
    arena_init(&plan->arena);
    if (plan_derive(problem, plan, &err) != SACCADE_OK)
        fail_msg("%s", err.message);
    plan->problem.has_chunks = 1;
    if (plan_choose(plan, solvers, &err) != SACCADE_OK)
        fail_msg("%s", err.message);
    return plan;
}
