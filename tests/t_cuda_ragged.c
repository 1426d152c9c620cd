/* Gradients of ragged batches on a CUDA device, with dropout, sinks and captures, against
 * float64 of the same numbers: within twice what plain attention is off. Rows of no sequence
 * are NaN, and what lies there in results must not change; two runs give the same bits. Without
 * a device the same cases run on the CPU. */
#include "support/device_case.h"
#include "support/run_case.h"
#include "support/short_run.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 10, SPARE = 70, INPUTS = 20, CAPTURED = 2 };
enum { RESULTS = 6 + CAPTURED /* out lse dq dk dv d_sinks, captures' */ };

/* A float capture whose gradient is wanted. */
typedef struct captured {
    const char *name;
    int32_t rank;
    int64_t shape[3];
} captured;

typedef struct ragged_case {
    int32_t n, q[MOST], kv[MOST]; /* rows and keys of the sequences */
    int64_t H, Hkv, D, Dv;
    saccade_dtype dtype;
    const char *mask, *score, *weight;
    int is_end, has_sinks, is_kv_batched; /* keys in [B, Hkv, most, D] with lengths */
    captured of[CAPTURED];
} ragged_case;

#define MIXED \
    .n = 8, .q = {1, 130, 0, 64, 7, 260, 1, 33}, .kv = {300, 130, 40, 64, 70, 260, 0, 90}
#define ALIKE .n = 4, .q = {200, 65, 1, 320}, .kv = {200, 65, 1, 320}

static const ragged_case cases[] = {
    {ALIKE, 4, 2, 64, 64, SACCADE_BF16, .mask = "causal()"},
    {MIXED, 2, 2, 128, 128, SACCADE_BF16, .mask = "causal()", .is_end = 1},
    {MIXED, 2, 1, 64, 64, SACCADE_F16, .score = "softcap(5.0)", .weight = "dropout(0.2)"},
    {ALIKE, 2, 1, 128, 128, SACCADE_BF16, .mask = "causal()", .weight = "dropout(0.1)",
     .has_sinks = 1},
    {MIXED, 4, 2, 64, 64, SACCADE_BF16, .mask = "(q + kv) % 3 != 1", .has_sinks = 1},
    {MIXED, 2, 2, 40, 24, SACCADE_BF16, .mask = "sliding_window(40)", .score = "alibi()"},
    {MIXED, 2, 2, 33, 65, SACCADE_F16, .mask = "causal()", .weight = "dropout(0.5)"},
    {MIXED, 2, 1, 64, 64, SACCADE_F32, .mask = "causal()", .is_end = 1,
     .weight = "dropout(0.3)"},
    {MIXED, 2, 1, 64, 64, SACCADE_BF16, .mask = "causal()", .is_end = 1, .is_kv_batched = 1},
    {MIXED, 2, 1, 64, 64, SACCADE_BF16, .mask = "kv >= q", .is_kv_batched = 1},
    {ALIKE, 2, 2, 256, 256, SACCADE_BF16, .mask = "causal()", .weight = "dropout(0.1)"},
    {.n = 1, .q = {100}, .kv = {150}, 2, 2, 128, 64, SACCADE_BF16, .mask = "kv <= q + 30"},
    /* captures: a line of the head and a scale, diagonals, elements that sequences share, rows
     * and columns, of each sequence, in f32 */
    {ALIKE, 4, 2, 64, 64, SACCADE_BF16, .mask = "causal()",
     .score = "score * u[h] + slope[h] * (kv - q) * 0.01",
     .of = {{"slope", 1, {4}}, {"u", 1, {4}}}},
    {MIXED, 2, 1, 128, 128, SACCADE_F16, .mask = "q >= kv - 30", .is_end = 1,
     .score = "score + t[h, clamp(q - kv, -20, 50) + 20]",
     .of = {{"t", 2, {2, 71}}}},
    {MIXED, 2, 2, 64, 64, SACCADE_BF16, .score = "score + t[h, q, kv]",
     .of = {{"t", 3, {2, 260, 300}}}},
    {MIXED, 2, 1, 40, 24, SACCADE_BF16, .mask = "kv <= q + 100", .weight = "dropout(0.2)",
     .score = "score * t[q] + u[h, kv]", .of = {{"t", 1, {260}}, {"u", 2, {2, 300}}}},
    {MIXED, 2, 2, 256, 256, SACCADE_BF16, .score = "score * t[b, h]", .has_sinks = 1,
     .of = {{"t", 2, {8, 2}}}},
    {MIXED, 2, 1, 64, 64, SACCADE_F32, .mask = "causal()", .is_end = 1,
     .score = "score + t[h] * (kv - q) * 0.01 + u[b, abs(q - kv) % 7]",
     .of = {{"t", 1, {2}}, {"u", 2, {8, 7}}}},
    {ALIKE, 2, 2, 64, 64, SACCADE_BF16, .mask = "causal()", .is_kv_batched = 1,
     .score = "score + t[b, q - kv + 319]", .of = {{"t", 2, {4, 639}}}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* A case's tensors: inputs are NaN where no sequence has a row. */
typedef struct batch {
    const ragged_case *c;
    int32_t q_first[MOST + 1], kv_first[MOST + 1], kv_len[MOST];
    int64_t max_q, max_kv, rows, keys;
    saccade_tensor q, k, v, d_out, d_lse, sinks, of[CAPTURED];
} batch;

static saccade_tensor rows_of(saccade_dtype dtype, int64_t rows, int64_t heads, int64_t dim)
{
    const int64_t shape[3] = {rows, heads, dim};
    return run_make(dtype, dim ? 3 : 2, shape);
}

static void put_nan(const saccade_tensor *t, int64_t first, int64_t past)
{
    const int64_t each = t->stride[0];
    for (int64_t i = first * each; i < past * each; i++)
        run_put(t, i, NAN);
}

static saccade_tensor keys_of(const batch *x, saccade_dtype dtype, int64_t dim)
{
    const ragged_case *c = x->c;
    const int64_t shape[4] = {c->n, c->Hkv, x->max_kv, dim};
    return c->is_kv_batched ? run_make(dtype, 4, shape) : rows_of(dtype, x->keys, c->Hkv, dim);
}

static void make(const ragged_case *c, batch *x)
{
    *x = (batch){.c = c, .max_q = 1, .max_kv = 1};
    for (int b = 0; b < c->n; b++) {
        x->q_first[b + 1] = x->q_first[b] + c->q[b];
        x->kv_first[b + 1] = x->kv_first[b] + c->kv[b];
        x->kv_len[b] = c->kv[b];
        x->max_q = c->q[b] > x->max_q ? c->q[b] : x->max_q;
        x->max_kv = c->kv[b] > x->max_kv ? c->kv[b] : x->max_kv;
    }
    x->rows = x->q_first[c->n] + SPARE;
    x->keys = x->kv_first[c->n] + SPARE;
    x->q = rows_of(c->dtype, x->rows, c->H, c->D);
    x->d_out = rows_of(c->dtype, x->rows, c->H, c->Dv);
    x->d_lse = rows_of(SACCADE_F32, x->rows, c->H, 0);
    x->k = keys_of(x, c->dtype, c->D);
    x->v = keys_of(x, c->dtype, c->Dv);
    x->sinks = run_make(SACCADE_F32, 1, &c->H);
    const saccade_tensor *all[] = {&x->q, &x->k, &x->v, &x->d_out, &x->d_lse, &x->sinks};
    for (int i = 0; i < 6; i++)
        run_randomise(all[i], (uint64_t)i + 3);
    for (int64_t i = 0; i < run_count(&x->q); i++)
        run_put(&x->q, i, 3 * run_get(&x->q, i));
    for (int i = 0; i < CAPTURED; i++) {
        x->of[i] = run_make(SACCADE_F32, c->of[i].rank, c->of[i].shape);
        run_randomise(&x->of[i], (uint64_t)i + 90);
    }
    put_nan(&x->q, x->q_first[c->n], x->rows);
    put_nan(&x->d_out, x->q_first[c->n], x->rows);
    put_nan(&x->d_lse, x->q_first[c->n], x->rows);
    for (int i = 1; i < 3 && !c->is_kv_batched; i++)
        put_nan(all[i], x->kv_first[c->n], x->keys);
}

static void drop(batch *x)
{
    saccade_tensor *all[] = {&x->q, &x->k, &x->v, &x->d_out, &x->d_lse, &x->sinks};
    for (int i = 0; i < 6; i++)
        free(all[i]->data);
    for (int i = 0; i < CAPTURED; i++)
        free(x->of[i].data);
}

/* ---- a run ---- */

/* Tensors as the run takes them: widened to f32, on the device. */
typedef struct place {
    int is_there, is_wide, n;
    saccade_tensor t[INPUTS];
    void *wide[INPUTS];
    const saccade_tensor *host[INPUTS]; /* results to be copied back */
} place;

static size_t bytes_of(const saccade_tensor *t)
{
    return (size_t)run_count(t) * saccade_dtype_bytes(t->dtype);
}

static const saccade_tensor *put(place *p, const saccade_tensor *t, int is_result)
{
    saccade_error err = {0};
    saccade_tensor *to = &p->t[p->n];
    *to = *t;
    if (p->is_wide && (t->dtype == SACCADE_BF16 || t->dtype == SACCADE_F16)) {
        *to = run_like(t, SACCADE_F32);
        convert_to_f32(t->dtype, t->data, to->data, run_count(t));
        p->wide[p->n] = to->data;
    }
    if (p->is_there) {
        to->device = (saccade_device){SACCADE_CUDA, 0};
        if (saccade_device_alloc(0, bytes_of(t), &to->data, &err)
            || saccade_device_copy(0, to->data, t->data, bytes_of(t), &err))
            fail_msg("%s", err.message);
    }
    p->host[p->n++] = is_result ? t : NULL;
    return to;
}

static void take_back(place *p)
{
    saccade_error err = {0};
    if (p->is_there && saccade_device_synchronize(0, &err))
        fail_msg("%s", err.message);
    for (int i = 0; i < p->n; i++) {
        if (p->is_there && p->host[i])
            assert_int_equal(saccade_device_copy(0, p->host[i]->data, p->t[i].data,
                                                 bytes_of(p->host[i]), &err),
                             SACCADE_OK);
        if (p->is_there)
            saccade_device_free(0, p->t[i].data);
        free(p->wide[i]);
    }
}

static void *room_of(const place *p, size_t *bytes)
{
    void *room = NULL;
    saccade_error err = {0};
    *bytes = (*bytes + 64) / 64 * 64;
    if (!p->is_there)
        return aligned_alloc(64, *bytes);
    assert_int_equal(saccade_device_alloc(0, *bytes, &room, &err), SACCADE_OK);
    return room;
}

static void leave(const place *p, void *room)
{
    if (p->is_there)
        saccade_device_free(0, room);
    else
        free(room);
}

static saccade_plan *plan_of(const batch *x, const char *backend, saccade_dtype dtype,
                             saccade_mod **mods)
{
    const ragged_case *c = x->c;
    const char *names[CAPTURED];
    saccade_error err = {0};
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){c->n, c->H, c->Hkv, x->max_q, x->max_kv, c->D, c->Dv};
    p.dtype = p.kv_dtype = dtype;
    p.backend = backend;
    p.mask = mods[0] = c->mask ? case_mod(SACCADE_MASK, c->mask) : NULL;
    p.score = mods[1] = c->score ? case_mod(SACCADE_SCORE, c->score) : NULL;
    p.weight = mods[2] = c->weight ? case_mod(SACCADE_WEIGHT, c->weight) : NULL;
    p.ragged = 1;
    p.sinks_dtype = c->has_sinks ? SACCADE_F32 : SACCADE_NONE;
    p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V
                  | (c->has_sinks ? SACCADE_GRADIENT_SINKS : 0u)
                  | (c->of[0].name ? SACCADE_GRADIENT_CAPTURES : 0u);
    for (int i = 0; i < CAPTURED && c->of[i].name; i++)
        names[p.n_gradient_captures++] = c->of[i].name;
    p.gradient_captures = names;
    if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s %s", err.where, err.message);
    return plan;
}

static void make_results(const batch *x, saccade_dtype dtype, saccade_tensor *r)
{
    const ragged_case *c = x->c;
    r[0] = rows_of(dtype, x->rows, c->H, c->Dv);
    r[1] = rows_of(SACCADE_F32, x->rows, c->H, 0);
    r[2] = rows_of(SACCADE_F32, x->rows, c->H, c->D);
    r[3] = keys_of(x, SACCADE_F32, c->D);
    r[4] = keys_of(x, SACCADE_F32, c->Dv);
    r[5] = run_make(SACCADE_F32, 1, &c->H);
    for (int i = 0; i < CAPTURED; i++)
        r[6 + i] = run_make(SACCADE_F32, c->of[i].rank, c->of[i].shape);
    for (int i = 0; i < 5; i++)
        memset(r[i].data, 0x5a, bytes_of(&r[i]));
}

static void solve(const batch *x, const char *backend, saccade_dtype dtype, saccade_tensor *r)
{
    const ragged_case *c = x->c;
    const int64_t n = c->n, n1 = n + 1, two = 2;
    int64_t state[2] = {77, 5};
    saccade_error err = {0};
    saccade_mod *mods[3];
    saccade_plan *plan = plan_of(x, backend, dtype, mods);
    place p = {.is_there = strcmp(backend, "cuda") == 0, .is_wide = dtype != c->dtype};
    const saccade_tensor cu_q = saccade_tensor_of((void *)x->q_first, SACCADE_I32, 1, &n1);
    const saccade_tensor cu_kv = saccade_tensor_of((void *)x->kv_first, SACCADE_I32, 1, &n1);
    const saccade_tensor lengths = saccade_tensor_of((void *)x->kv_len, SACCADE_I32, 1, &n);
    const saccade_tensor seed = saccade_tensor_of(state, SACCADE_I64, 1, &two);
    saccade_positions at;
    saccade_ragged ragged;
    saccade_forward_args f;
    saccade_backward_args b;
    saccade_binding captures[CAPTURED], d_captures[CAPTURED];
    int n_captures = 0;
    make_results(x, dtype, r);
    saccade_positions_init(&at);
    saccade_ragged_init(&ragged);
    saccade_forward_args_init(&f);
    saccade_backward_args_init(&b);
    ragged.cu_seqlens_q = put(&p, &cu_q, 0);
    ragged.cu_seqlens_kv = c->is_kv_batched ? NULL : put(&p, &cu_kv, 0);
    at.kv_len = c->is_kv_batched ? put(&p, &lengths, 0) : NULL;
    ragged.max_q = x->max_q;
    ragged.max_kv = c->is_kv_batched ? 0 : x->max_kv;
    ragged.align_end = c->is_end;
    f.q = b.q = put(&p, &x->q, 0), f.k = b.k = put(&p, &x->k, 0), f.v = b.v = put(&p, &x->v, 0);
    b.out = f.out = put(&p, &r[0], 1), b.lse = f.lse = put(&p, &r[1], 1);
    f.sinks = b.sinks = c->has_sinks ? put(&p, &x->sinks, 0) : NULL;
    f.dropout = b.dropout = c->weight ? put(&p, &seed, 0) : NULL;
    for (; n_captures < CAPTURED && c->of[n_captures].name; n_captures++)
        captures[n_captures] =
            (saccade_binding){c->of[n_captures].name, *put(&p, &x->of[n_captures], 0)};
    f.bindings = b.bindings = captures;
    f.n_bindings = b.n_bindings = n_captures;
    f.positions = b.positions = &at;
    f.ragged = b.ragged = &ragged;
    const saccade_sizes sizes = {n, c->H, c->Hkv, x->max_q, x->max_kv, c->D, c->Dv};
    f.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    f.workspace = room_of(&p, &f.workspace_bytes);
    if (saccade_forward(plan, &f, &err))
        fail_msg("%s: %s: %s", backend, err.where, err.message);
    b.d_out = put(&p, &x->d_out, 0), b.d_lse = put(&p, &x->d_lse, 0);
    b.d_q = put(&p, &r[2], 1), b.d_k = put(&p, &r[3], 1), b.d_v = put(&p, &r[4], 1);
    b.d_sinks = c->has_sinks ? put(&p, &r[5], 1) : NULL;
    for (int i = 0; i < n_captures; i++)
        d_captures[i] = (saccade_binding){c->of[i].name, *put(&p, &r[6 + i], 1)};
    b.d_captures = d_captures;
    b.n_d_captures = n_captures;
    assert_int_equal(saccade_backward_workspace(plan, &b, &b.workspace_bytes, &err),
                     SACCADE_OK);
    if (!n_captures)
        assert_true(b.workspace_bytes <= saccade_plan_backward_workspace(plan, &sizes));
    b.workspace = room_of(&p, &b.workspace_bytes);
    if (saccade_backward(plan, &b, &err))
        fail_msg("%s: %s: %s", backend, err.where, err.message);
    take_back(&p);
    leave(&p, f.workspace);
    leave(&p, b.workspace);
    saccade_plan_destroy(plan);
    for (int i = 0; i < 3; i++)
        saccade_mod_destroy(mods[i]);
}

/* ---- comparison ---- */

/* Elements of rows of no sequence hold what they held. */
static int is_outside(const batch *x, int result, int64_t at, const saccade_tensor *t)
{
    const int is_keys = result == 3 || result == 4;
    if (result >= 5 || (is_keys && x->c->is_kv_batched))
        return 0;
    return at / t->stride[0] >= (is_keys ? x->kv_first : x->q_first)[x->c->n];
}

static int compare(const batch *x, int i, const saccade_tensor *got, const saccade_tensor *same,
                   const saccade_tensor *gold)
{
    static const char *const names[RESULTS] = {"out", "lse", "dq",      "dk",
                                               "dv",  "d_sinks", "d_first", "d_second"};
    const int bits = x->c->dtype == SACCADE_BF16 ? 8 : x->c->dtype == SACCADE_F16 ? 11 : 24;
    const size_t each = saccade_dtype_bytes(got->dtype);
    double plain = 0, most = 0, worst = 0;
    for (int64_t at = 0; at < run_count(got); at++) {
        if (is_outside(x, i, at, got)) {
            for (size_t n = 0; n < each; n++)
                if (((const unsigned char *)got->data)[(size_t)at * each + n] != 0x5a)
                    fail_msg("%s: element %lld of no sequence was written", names[i],
                             (long long)at);
            continue;
        }
        const double g = run_get(gold, at), y = run_get(got, at);
        if (!isfinite(g)) {
            worst = y == g ? worst : NAN;
            continue;
        }
        plain = fmax(plain, fabs(run_get(same, at) - g));
        most = fmax(most, fabs(g));
        worst = isnan(worst) || fabs(y - g) <= worst ? worst : fabs(y - g);
    }
    const double bound = 2 * plain + 16 * ldexp(1, ilogb(most + 1e-30) - bits);
    if (worst <= bound)
        return 1;
    print_message(
        "%s off by %.3g, %.3g allowed, largest %.3g: mask %s score %s %s d%lld dv%lld %s "
        "end %d sinks %d batched %d\n",
        names[i], worst, bound, most, x->c->mask ? x->c->mask : "none",
        x->c->score ? x->c->score : "none", x->c->weight ? x->c->weight : "none",
        (long long)x->c->D, (long long)x->c->Dv, saccade_dtype_name(x->c->dtype), x->c->is_end,
        x->c->has_sinks, x->c->is_kv_batched);
    return 0;
}

static int holds(const ragged_case *c, const char *backend)
{
    saccade_tensor gold[RESULTS], same[RESULTS], got[RESULTS], again[RESULTS];
    batch x;
    int is_good = 1;
    make(c, &x);
    solve(&x, "ref", SACCADE_F32, gold);
    solve(&x, "plain", c->dtype, same);
    solve(&x, backend, c->dtype, got);
    solve(&x, backend, c->dtype, again);
    for (int i = 0; i < RESULTS; i++) {
        is_good &= compare(&x, i, &got[i], &same[i], &gold[i]);
        assert_memory_equal(got[i].data, again[i].data, bytes_of(&got[i]));
        free(gold[i].data);
        free(same[i].data);
        free(got[i].data);
        free(again[i].data);
    }
    drop(&x);
    return is_good;
}

static void on_device(void **unused)
{
    int n_bad = 0;
    (void)unused;
    if (!has_device())
        skip();
    for (int i = 0; i < CASES; i++)
        n_bad += is_device_case(i) && !holds(&cases[i], "cuda");
    assert_int_equal(n_bad, 0);
}

static void on_the_host(void **unused)
{
    int n_bad = 0;
    (void)unused;
    for (int i = 0; i < CASES; i += is_short_run() ? 11 : 3)
        n_bad += !holds(&cases[i], "cpu");
    assert_int_equal(n_bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_the_host),
        cmocka_unit_test(on_device),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
