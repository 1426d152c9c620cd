/* The largest score of each head, an output of forward: the largest of its rows' maxima, with
 * and without row_max beside it, by batch and over all batches, over batches, ragged sequences
 * and pages, on every back end that is here. */
#include "support/device_case.h"
#include "support/run_case.h"
#include "support/tensor_place.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 3, H = 4, HKV = 2, D = 32, KV = 96, PAGE = 16 };

static const int32_t lengths[B] = {KV, 0, 37}; /* live keys */

typedef struct max_case {
    const char *backend;
    saccade_dtype dtype;
    int64_t Q;
    int is_ragged, is_paged, has_nan, has_nan_key;
} max_case;

typedef struct inputs {
    int32_t first[B + 1], table[B * KV / PAGE];
    saccade_tensor q, k, v, out;
} inputs;

static saccade_tensor tensor4(saccade_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[4] = {a, b, c, D};
    return run_make(dtype, 4, shape);
}

/* Ragged: 0 rows, Q and 1. */
static void make(const max_case *c, inputs *x)
{
    const int64_t T[3] = {c->Q + 1, H, D};
    *x = (inputs){.first = {0, 0, (int32_t)c->Q, (int32_t)c->Q + 1}};
    if (c->is_ragged) {
        x->q = run_make(c->dtype, 3, T);
        x->out = run_make(c->dtype, 3, T);
    } else {
        x->q = tensor4(c->dtype, B, H, c->Q);
        x->out = tensor4(c->dtype, B, H, c->Q);
    }
    const int64_t pages = B * KV / PAGE;
    x->k = c->is_paged ? tensor4(c->dtype, pages, HKV, PAGE) : tensor4(c->dtype, B, HKV, KV);
    x->v = run_like(&x->k, c->dtype);
    for (int i = 0; i < pages; i++)
        x->table[i] = (int32_t)((i * 7 + 3) % pages);
    run_randomise(&x->q, 1);
    run_randomise(&x->k, 2);
    run_randomise(&x->v, 3);
    if (c->has_nan)
        run_put(&x->q, 0, NAN); /* of batch 0, or sequence 1, which has no key */
    if (c->has_nan_key)
        run_put(&x->k, 3 * D, NAN); /* whose score is not the last that a row looks at */
}

static saccade_plan *plan_of(const max_case *c)
{
    saccade_error err = {0};
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){B, H, HKV, c->Q, KV, D, D};
    p.dtype = c->dtype;
    p.backend = c->backend;
    p.page = c->is_paged ? PAGE : 0;
    p.ragged = c->is_ragged;
    p.head_max = 1;
    if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s %s", c->backend, err.where, err.message);
    return plan;
}

/* row_max may be NULL. */
static void solve(const max_case *c, const inputs *x, const saccade_tensor *row_max,
                  const saccade_tensor *head_max)
{
    const int64_t n = B, n1 = B + 1, table[2] = {B, KV / PAGE};
    saccade_error err = {0};
    saccade_plan *plan = plan_of(c);
    tensor_place p = {.is_on_device = strcmp(c->backend, "cuda") == 0};
    const saccade_tensor len = saccade_tensor_of((void *)lengths, SACCADE_I32, 1, &n);
    const saccade_tensor cu = saccade_tensor_of((void *)x->first, SACCADE_I32, 1, &n1);
    const saccade_tensor pages = saccade_tensor_of((void *)x->table, SACCADE_I32, 2, table);
    const saccade_sizes sizes = {B, H, HKV, c->Q, KV, D, D};
    saccade_positions at;
    saccade_ragged ragged;
    saccade_pages keys;
    saccade_forward_args a;
    saccade_positions_init(&at);
    saccade_ragged_init(&ragged);
    saccade_pages_init(&keys);
    saccade_forward_args_init(&a);
    at.kv_len = place_put(&p, &len, 0);
    ragged.cu_seqlens_q = place_put(&p, &cu, 0);
    ragged.max_q = c->Q;
    keys.table = place_put(&p, &pages, 0);
    a.q = place_put(&p, &x->q, 0), a.k = place_put(&p, &x->k, 0), a.v = place_put(&p, &x->v, 0);
    a.out = place_put(&p, &x->out, 1);
    a.row_max = row_max ? place_put(&p, row_max, 1) : NULL;
    a.head_max = place_put(&p, head_max, 1);
    a.positions = &at;
    a.ragged = c->is_ragged ? &ragged : NULL;
    a.pages = c->is_paged ? &keys : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    a.workspace = place_room(&p, a.workspace_bytes);
    if (saccade_forward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s %s", c->backend, err.where, err.message);
    place_take_back(&p);
    place_leave(&p, a.workspace);
    saccade_plan_destroy(plan);
}

static double greater(double a, double b)
{
    return b > a || isnan(b) ? b : a;
}

static int same(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

static double rows_max(const max_case *c, const inputs *x, const saccade_tensor *rows, int b,
                       int h)
{
    double most = -INFINITY;
    const int first = c->is_ragged ? x->first[b] : 0;
    const int past = c->is_ragged ? x->first[b + 1] : (int)c->Q;
    for (int64_t i = first; i < past; i++)
        most = greater(most, run_get(rows, c->is_ragged ? i * H + h : (b * H + h) * c->Q + i));
    return most;
}

/* The largest score of the last batch, whose length is 37, from q and k themselves. */
static double last_max(const max_case *c, const inputs *x, int h)
{
    double most = -INFINITY;
    for (int64_t i = 0; i < (c->is_ragged ? 1 : c->Q); i++)
        for (int64_t j = 0; j < lengths[B - 1]; j++) {
            const int64_t q =
                c->is_ragged ? (x->first[B - 1] * H + h) : ((B - 1) * H + h) * c->Q + i;
            const int64_t page =
                c->is_paged ? x->table[(B - 1) * (KV / PAGE) + j / PAGE] : B - 1;
            const int64_t each = c->is_paged ? PAGE : KV;
            const int64_t k = (page * HKV + h / (H / HKV)) * each + j % each;
            double s = 0;
            for (int64_t d = 0; d < D; d++)
                s += run_get(&x->q, q * D + d) * run_get(&x->k, k * D + d);
            most = fmax(most, s / sqrt(D));
        }
    return most;
}

static void check(const max_case *c)
{
    const int64_t each[2] = {B, H}, all[2] = {1, H}, rows3[3] = {B, H, c->Q};
    const int64_t rows2[2] = {c->Q + 1, H};
    inputs x;
    make(c, &x);
    const saccade_tensor rows =
        run_make(SACCADE_F32, c->is_ragged ? 2 : 3, c->is_ragged ? rows2 : rows3);
    const saccade_tensor own = run_make(SACCADE_F32, 2, each);
    const saccade_tensor joint = run_make(SACCADE_F32, 2, all);
    solve(c, &x, &rows, &own);
    solve(c, &x, NULL, &joint);
    for (int h = 0; h < H; h++) {
        double most = -INFINITY;
        for (int b = 0; b < B; b++) {
            const double got = run_get(&own, b * H + h), want = rows_max(c, &x, &rows, b, h);
            if (!same(got, want) || (lengths[b] == 0 && got != -INFINITY))
                fail_msg("%s: b %d h %d: got %g, expected %g", c->backend, b, h, got, want);
            most = greater(most, want);
        }
        if (!same(run_get(&joint, h), most))
            fail_msg("%s: h %d of all: got %g, expected %g", c->backend, h, run_get(&joint, h),
                     most);
        const double last = last_max(c, &x, h), got = run_get(&own, (B - 1) * H + h);
        if (!(fabs(got - last) <= 1e-5))
            fail_msg("%s: h %d: got %g, the scores say %g", c->backend, h, got, last);
    }
    const saccade_tensor *made[] = {&x.q, &x.k, &x.v, &x.out, &rows, &own, &joint};
    for (int i = 0; i < 7; i++)
        free(made[i]->data);
}

static void is_that_of_the_rows(void **state)
{
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    (void)state;
    const int n = has_device() ? 3 : 2;
    for (int i = 0; i < n; i++)
        for (int form = 0; form < 8; form++) {
            const max_case c = {.backend = backends[i],
                                .dtype = form % 2 ? SACCADE_BF16 : SACCADE_F32,
                                .Q = form < 4 ? 3 : 70,
                                .is_ragged = form / 2 % 2,
                                .is_paged = form % 3 == 0,
                                .has_nan = form == 5,
                                .has_nan_key = form == 2 || form == 4};
            check(&c);
        }
}

static void the_program_compiles(void **state)
{
    (void)state;
    expect_program_compiles("head_max.cu", "sm_90a");
}

static void bad_calls(void **state)
{
    const max_case c = {.backend = "cpu", .dtype = SACCADE_F32, .Q = 2};
    const int64_t each[2] = {B + 1, H};
    saccade_error err = {0};
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_forward_args a;
    inputs x;
    (void)state;
    make(&c, &x);
    const saccade_tensor own = run_make(SACCADE_F32, 2, each);
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){B, H, HKV, c.Q, KV, D, D};
    p.head_max = 2;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "head_max");
    saccade_forward_args_init(&a);
    a.q = &x.q, a.k = &x.k, a.v = &x.v, a.out = &x.out, a.head_max = &own;
    for (p.head_max = 0; p.head_max < 2; p.head_max++) {
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
        a.workspace_bytes = saccade_plan_workspace(plan, &p.sizes);
        a.workspace = aligned_alloc(64, (a.workspace_bytes + 64) / 64 * 64);
        assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, "head_max");
        free(a.workspace);
        saccade_plan_destroy(plan);
    }
    free(x.q.data), free(x.k.data), free(x.v.data), free(x.out.data), free(own.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_that_of_the_rows),
        cmocka_unit_test(the_program_compiles),
        cmocka_unit_test(bad_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
