/* Batch invariance: a row's bits, whatever else is in the run. Rows of a run are computed again
 * alone, with fewer mates, in another batch, without the keys that they do not see, and by
 * other numbers of threads, on every level and on emulated tiles. */
#include "support/device_case.h"
#include "support/short_run.h"

#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "saccade_config.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Rows [i0, i1) of batches [b0, b1), and the first keys of all. */
typedef struct part {
    int64_t b0, b1, i0, i1, keys;
} part;

typedef struct results {
    char *out;  /* [B, H, rows, Dv] of the part */
    float *lse; /* [B, H, rows] */
} results;

static saccade_tensor view_of(const saccade_tensor *t, const part *p, int64_t n0, int64_t n1)
{
    saccade_tensor view = *t;
    const int64_t at = p->b0 * t->stride[0] + n0 * t->stride[2];
    view.data = (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
    view.shape[0] = p->b1 - p->b0;
    view.shape[2] = n1 - n0;
    return view;
}

static saccade_sizes sizes_of(const case_run *r, const part *p)
{
    saccade_sizes s = r->sizes;
    s.B = p->b1 - p->b0;
    s.Q = p->i1 - p->i0;
    s.KV = p->keys;
    return s;
}

static results run(const case_run *r, const saccade_plan *plan, const part *p)
{
    saccade_error err = {0};
    const saccade_sizes s = sizes_of(r, p);
    int32_t number[3][64];
    saccade_tensor at[3];
    for (int64_t b = p->b0; b < p->b1; b++) {
        const int32_t len = r->positions[2][b], most = (int32_t)p->keys;
        number[0][b - p->b0] = r->positions[0][b] + (int32_t)p->i0;
        number[1][b - p->b0] = r->positions[1][b];
        number[2][b - p->b0] = len < most ? len : most;
    }
    for (int i = 0; i < 3; i++)
        at[i] = saccade_tensor_of(number[i], SACCADE_I32, 1, &s.B);
    saccade_positions positions;
    saccade_positions_init(&positions);
    positions.q_offset = &at[0];
    positions.kv_offset = &at[1];
    positions.kv_len = &at[2];
    const size_t rows = (size_t)(s.B * s.H * s.Q), element = saccade_dtype_bytes(r->dtype);
    results made = {calloc(rows * (size_t)s.Dv, element), calloc(rows, sizeof(float))};
    const saccade_tensor q = view_of(&r->q.t, p, p->i0, p->i1);
    const saccade_tensor k = view_of(&r->k.t, p, 0, p->keys);
    const saccade_tensor v = view_of(&r->v.t, p, 0, p->keys);
    const saccade_tensor out =
        saccade_tensor_of(made.out, r->dtype, 4, (int64_t[]){s.B, s.H, s.Q, s.Dv});
    const saccade_tensor lse =
        saccade_tensor_of(made.lse, SACCADE_F32, 3, (int64_t[]){s.B, s.H, s.Q});
    saccade_forward_args args = r->args;
    args.positions = &positions;
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &out;
    args.lse = &lse;
    args.workspace_bytes = (saccade_plan_workspace(plan, &s) + 63) / 64 * 64;
    args.workspace = args.workspace_bytes ? aligned_alloc(64, args.workspace_bytes) : NULL;
    if (saccade_forward(plan, &args, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    free(args.workspace);
    return made;
}

static void drop(results *x)
{
    free(x->out);
    free(x->lse);
}

/* The number of rows of a part whose bits are not those of the whole. */
static int differing(const case_run *r, const results *all, const results *own, const part *p)
{
    const int64_t n = p->i1 - p->i0, H = r->sizes.H, Q = r->sizes.Q;
    const size_t bytes = (size_t)r->sizes.Dv * saccade_dtype_bytes(r->dtype);
    int differ = 0;
    for (int64_t at = 0; at < (p->b1 - p->b0) * H * n; at++) {
        const int64_t whole = (p->b0 * H + at / n) * Q + p->i0 + at % n;
        differ +=
            memcmp(all->out + (size_t)whole * bytes, own->out + (size_t)at * bytes, bytes) != 0
            || memcmp(&all->lse[whole], &own->lse[at], sizeof(float)) != 0;
    }
    return differ;
}

static uint32_t draw(uint32_t *state, int64_t below)
{
    *state = *state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(*state >> 8) * (uint64_t)below >> 24);
}

/* Rows of one batch: the first of it, then parts that get longer. Where rows see no key past
 * their own position every second part has no later ones. */
static part part_of(const case_run *r, int n, int is_causal, uint32_t *state)
{
    const int64_t Q = r->sizes.Q, most = n == 0 ? 1 : (Q * n + 4) / 5;
    part p = {.keys = r->sizes.KV};
    p.b0 = draw(state, r->sizes.B);
    p.b1 = p.b0 + 1;
    p.i0 = draw(state, Q);
    p.i1 = p.i0 + most < Q ? p.i0 + most : Q;
    const int64_t seen = r->positions[0][p.b0] - r->positions[1][p.b0] + p.i1;
    if (is_causal && n % 2 == 0 && seen > 0 && seen < p.keys)
        p.keys = seen;
    return p;
}

static int is_causal_case(const case_run *r)
{
    return r->mask && strstr(r->c.mask, "q >= kv") == r->c.mask;
}

static int count_differing(const case_run *r, const saccade_plan *plan,
                           const saccade_plan *other)
{
    const int is_causal = is_causal_case(r);
    const part whole = {0, r->sizes.B, 0, r->sizes.Q, r->sizes.KV};
    uint32_t state = (uint32_t)r->c.seed;
    results all = run(r, plan, &whole);
    int differ = 0;
    for (int n = 0; n < (is_short_run() ? 2 : 5); n++) {
        const part p = part_of(r, n, is_causal, &state);
        results own = run(r, n % 2 ? other : plan, &p);
        differ += differing(r, &all, &own, &p);
        drop(&own);
    }
    drop(&all);
    return differ;
}

static const forward_case cases[] = {
    {.problem = "b2 h4/2 q70 kv700 d64 bf16", .mask = "q >= kv", .q_offset = 600, .seed = 1},
    {.problem = "b3 h2 q300 kv300 d32 f32", .mask = "q >= kv && q - kv < 40", .seed = 2},
    {.problem = "b2 h4/1 q9 kv8400 d32 f16", .mask = "q >= kv", .q_offset = 8300, .seed = 3},
    {.problem = "b1 h2 q60 kv4400 d24 dv40 bf16",
     .score = "alibi()",
     .kv_len = 4300,
     .seed = 4},
    {.problem = "b2 h32 q3 kv4400 d16 f32",
     .mask = "q >= kv || kv < 100",
     .score = "softcap(20.0)",
     .q_offset = 4200,
     .seed = 5},
    {.problem = "b2 h2 q50 kv600 d40 bf16", .mask = "doc[q] == doc[kv]", .seed = 6},
    {.problem = "b2 h3 q40 kv500 d64 f16",
     .data = CASE_WIDE,
     .mask = "(q + kv) % 3 != 0",
     .seed = 7},
    {.problem = "b1 h2 q33 kv300 d64 f16", .data = CASE_JUMP, .seed = 8},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static void rows_do_not_see_their_mates(void **unused)
{
    int usual = 0;
    (void)unused;
    for (int n = 0; n < CASES; n++) {
        case_run r;
        case_make(&cases[n], &r);
        for (const char *const *level = case_levels(); *level; level++) {
            saccade_plan *plan[4];
            for (int i = 0; i < 4; i++) {
                r.problem.batch_invariant = i < 2;
                plan[i] = case_plan(&r, *level, i % 2 ? 3 : 1);
            }
            const int differ = count_differing(&r, plan[0], plan[1]);
            usual += count_differing(&r, plan[2], plan[3]);
            case_check(&r, plan[1], NULL, *level, NULL, NULL);
            for (int i = 0; i < 4; i++)
                saccade_plan_destroy(plan[i]);
            if (differ)
                fail_msg("%s: %d rows have other bits alone\n  --problem \"%s\" mask %s",
                         *level, differ, r.c.problem, r.c.mask ? r.c.mask : "none");
        }
        case_free(&r);
    }
    assert_true(usual > 0); /* without the option some do */
}

static const cpu_kernels *tiles_for(saccade_dtype dtype)
{
#if HAVE_LEVEL_AVX512
    if (cpu_features_get()->level >= CPU_AVX512)
        return dtype == SACCADE_F16 ? &cpu_f16_tiles_avx512 : &cpu_bf16_tiles_avx512;
#endif
    return dtype == SACCADE_F16 ? &cpu_f16_tiles_portable : &cpu_bf16_tiles_portable;
}

/* Tiles where they are emulated; f16's make rows again that come out NaN. */
static void nor_on_tiles(void **unused)
{
    (void)unused;
    for (int n = 0; n < CASES; n++) {
        case_run r;
        case_make(&cases[n], &r);
        if (r.dtype != SACCADE_F32 && (!is_short_run() || n % 2)) {
            r.problem.batch_invariant = 1;
            saccade_plan *plan = case_plan(&r, NULL, 2);
            ((cpu_state *)plan->state)->needs.kernels = tiles_for(r.dtype);
            assert_int_equal(count_differing(&r, plan, plan), 0);
            saccade_plan_destroy(plan);
        }
        case_free(&r);
    }
}

/* A query with a NaN makes its own row NaN, by the careful kernels where there are any. */
static void nor_a_mate_that_is_nan(void **unused)
{
    const forward_case c = {.problem = "b1 h1 q40 kv4400 d64 f16", .seed = 9};
    case_run r;
    (void)unused;
    case_make(&c, &r);
    r.problem.batch_invariant = 1;
    const part all = {0, 1, 0, 40, 4400};
    saccade_plan *plan = case_plan(&r, NULL, 2);
    ((cpu_state *)plan->state)->needs.kernels = tiles_for(r.dtype);
    results sound = run(&r, plan, &all);
    ((uint16_t *)r.q.t.data)[7 * r.q.t.stride[2]] = 0x7e00;
    results mixed = run(&r, plan, &all);
    assert_true(isnan(mixed.lse[7]));
    assert_int_equal(differing(&r, &sound, &mixed, &all), 1);
    drop(&sound);
    drop(&mixed);
    saccade_plan_destroy(plan);
    case_free(&r);
}

/* ---- on a device ---- */

/* Rows of a case whose tensors are on the device; a part of one batch, or all of it. */
static results run_on_device(const cu_driver *driver, const device_case *d, const part *p,
                             int is_all)
{
    const case_run *r = d->r;
    saccade_error err = {0};
    const saccade_sizes s = sizes_of(r, p);
    const size_t rows = (size_t)(s.B * s.H * s.Q), element = saccade_dtype_bytes(r->dtype);
    const size_t bytes[3] = {rows * (size_t)s.Dv * element, rows * sizeof(float),
                             saccade_plan_workspace(d->plan, &s) + 64};
    cu_ptr at[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(driver->alloc(&at[i], bytes[i]), 0);
    int32_t number[3] = {r->positions[0][p->b0] + (int32_t)p->i0, r->positions[1][p->b0],
                         (int32_t)p->keys};
    if (r->positions[2][p->b0] < p->keys)
        number[2] = r->positions[2][p->b0];
    saccade_tensor position[3], q = view_of(&d->q, p, p->i0, p->i1);
    const saccade_tensor k = view_of(&d->k, p, 0, p->keys), v = view_of(&d->v, p, 0, p->keys);
    saccade_positions positions;
    saccade_positions_init(&positions);
    for (int i = 0; i < 3; i++)
        position[i] = saccade_tensor_of(&number[i], SACCADE_I32, 0, NULL);
    positions.q_offset = &position[0];
    positions.kv_offset = &position[1];
    positions.kv_len = &position[2];
    saccade_tensor out = saccade_tensor_of((void *)(uintptr_t)at[0], r->dtype, 4,
                                           (int64_t[]){s.B, s.H, s.Q, s.Dv});
    saccade_tensor lse =
        saccade_tensor_of((void *)(uintptr_t)at[1], SACCADE_F32, 3, (int64_t[]){s.B, s.H, s.Q});
    out.device = lse.device = d->q.device;
    saccade_forward_args args = d->args;
    if (!is_all)
        args.positions = &positions;
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &out;
    args.lse = &lse;
    args.row_max = NULL;
    args.workspace = (void *)(uintptr_t)at[2];
    args.workspace_bytes = bytes[2] / 64 * 64;
    if (saccade_forward(d->plan, &args, &err) != SACCADE_OK)
        fail_msg("%s: %s: %s", r->c.problem, err.where, err.message);
    results made = {malloc(bytes[0]), malloc(bytes[1])};
    assert_int_equal(driver->context_synchronize(), 0);
    assert_int_equal(driver->copy((cu_ptr)(uintptr_t)made.out, at[0], bytes[0]), 0);
    assert_int_equal(driver->copy((cu_ptr)(uintptr_t)made.lse, at[1], bytes[1]), 0);
    for (int i = 0; i < 3; i++)
        driver->free(at[i]);
    return made;
}

static const forward_case device_cases[] = {
    {.problem = "b2 h4/2 q70 kv700 d64 bf16", .mask = "q >= kv", .q_offset = 600, .seed = 1},
    {.problem = "b3 h2 q300 kv300 d128 f16", .mask = "q >= kv && q - kv < 40", .seed = 2},
    {.problem = "b2 h4/1 q40 kv9000 d64 bf16",
     .mask = "q >= kv",
     .q_offset = 8800,
     .data = CASE_ASCENDING,
     .seed = 3},
    {.problem = "b1 h2 q300 kv2000 d64 bf16",
     .score = "softcap(20.0)",
     .data = CASE_WIDE,
     .seed = 4},
    {.problem = "b2 h2 q200 kv600 d32 f32", .score = "alibi()", .data = CASE_WIDE, .seed = 5},
    {.problem = "b1 h2 q130 kv700 d40 dv72 bf16", .mask = "doc[q] == doc[kv]", .seed = 6},
    /* parts of 4096 keys: many rows walk them, few leave them to a kernel that joins them */
    {.problem = "b1 h8/2 q300 kv9000 d128 bf16",
     .mask = "q >= kv",
     .q_offset = 8700,
     .seed = 7},
    {.problem = "b2 h6/2 q200 kv8500 d64 f16",
     .mask = "q >= kv && q - kv < 4500",
     .score = "alibi()",
     .q_offset = 8250,
     .data = CASE_ASCENDING,
     .seed = 8},
    {.problem = "b1 h4/1 q150 kv5000 d256 bf16",
     .mask = "(q + kv) % 3 != 0",
     .score = "softcap(20.0)",
     .data = CASE_WIDE,
     .seed = 9},
    {.problem = "b1 h4/2 q140 kv4500 d96 dv64 f16", .data = CASE_JUMP, .seed = 10},
};

/* Runs of up to 128 rows where those have bits of their own: pieces of 2048 keys. */
static const forward_case short_cases[] = {
    {.problem = "b2 h4/2 q70 kv5000 d64 bf16", .mask = "q >= kv", .q_offset = 4800, .seed = 1},
    {.problem = "b64 h8/2 q1 kv4200 d128 bf16", .seed = 2},
    {.problem = "b2 h4/1 q40 kv9000 d64 f16",
     .mask = "q >= kv && q - kv < 3000",
     .q_offset = 8950,
     .data = CASE_ASCENDING,
     .seed = 3},
    {.problem = "b1 h2 q128 kv2500 d128 bf16",
     .mask = "(q + kv) % 3 != 0",
     .score = "softcap(20.0)",
     .data = CASE_WIDE,
     .seed = 4},
    {.problem = "b3 h6/2 q5 kv6200 d256 bf16", .mask = "q >= kv", .q_offset = 6190, .seed = 5},
};

static void rows_on_a_device(const forward_case *c, int n, int invariance)
{
    if (!has_device())
        skip();
    const cu_driver *driver;
    void *pushed;
    assert_int_equal(cu_get_driver(&driver, NULL), SACCADE_OK);
    assert_int_equal(cu_enter(driver, 0, &pushed, NULL), SACCADE_OK);
    for (const forward_case *end = c + n; c < end; c++) {
        const device_options options = {0};
        case_run r;
        device_case d;
        uint32_t state = (uint32_t)c->seed;
        case_make(c, &r);
        r.problem.backend = "cuda";
        r.problem.batch_invariant = invariance;
        if (!device_case_open(&r, &options, &d) || !device_case_run(&d)
            || !device_case_check(&d))
            fail_msg("%s", d.why);
        const part whole = {0, r.sizes.B, 0, r.sizes.Q, r.sizes.KV};
        results all = run_on_device(driver, &d, &whole, 1);
        for (int i = 0; i < 12; i++) {
            const part p = part_of(&r, i % 6, is_causal_case(&r), &state);
            results own = run_on_device(driver, &d, &p, 0);
            const int differ = differing(&r, &all, &own, &p);
            if (differ)
                fail_msg("%d of rows %lld to %lld have other bits alone\n  --problem \"%s\"",
                         differ, (long long)p.i0, (long long)p.i1, r.c.problem);
            drop(&own);
        }
        drop(&all);
        device_case_close(&d);
        case_free(&r);
    }
    cu_leave(driver, pushed);
}

static void nor_on_a_device(void **unused)
{
    (void)unused;
    rows_on_a_device(device_cases, sizeof device_cases / sizeof device_cases[0],
                     SACCADE_INVARIANT);
}

static void nor_in_short_runs_on_a_device(void **unused)
{
    (void)unused;
    rows_on_a_device(short_cases, sizeof short_cases / sizeof short_cases[0],
                     SACCADE_INVARIANT_SHORT);
}

static void other_numbers_are_refused(void **unused)
{
    saccade_context *context;
    saccade_plan *plan;
    saccade_error err = {0};
    saccade_problem problem;
    (void)unused;
    saccade_problem_init(&problem);
    problem.batch_invariant = 3;
    assert_int_equal(saccade_context_create(NULL, &context, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_create(context, &problem, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.message, "got 3, expected 0, 1 or 2");
    saccade_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_do_not_see_their_mates),
        cmocka_unit_test(nor_on_tiles),
        cmocka_unit_test(nor_a_mate_that_is_nan),
        cmocka_unit_test(nor_on_a_device),
        cmocka_unit_test(nor_in_short_runs_on_a_device),
        cmocka_unit_test(other_numbers_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
