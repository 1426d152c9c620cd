/* CPU forward at every level against float64: fixed cases for each rule, random problems, and
 * bits that must not depend on threads. */
#include "support/forward_case.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cpu/cpu.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void at_every_level(const forward_case *c)
{
    case_run r;
    case_make(c, &r);
    for (const char *const *level = case_levels(); *level; level++) {
        saccade_plan *plan = case_plan(&r, *level, 2);
        case_check(&r, plan, NULL, *level, NULL, NULL);
        saccade_plan_destroy(plan);
    }
    case_free(&r);
}

/* All of a list, each with the dtypes; in a short run with one of them, in turn. */
static void in_every_dtype(const char *sizes, const forward_case *c)
{
    static const char *const dtypes[] = {"f32", "f16", "bf16"};
    static int turn;
    const int only = is_short_run() ? turn++ % 3 : -1;
    for (int n = 0; n < 3; n++) {
        if (only >= 0 && n != only)
            continue;
        char problem[96];
        forward_case one = *c;
        snprintf(problem, sizeof problem, "%s %s", sizes, dtypes[n]);
        one.problem = problem;
        at_every_level(&one);
    }
}

static void shapes(void **state)
{
    static const char *const sizes[] = {
        "q1 kv1 d1",
        "q1 kv300 d64",
        "b2 h4/2 q5 kv17 d3 dv5",
        "b1 h2 q130 kv129 d64",
        "b3 h6/3 q33 kv260 d40 dv72",
        "b1 h4/1 q100 kv128 d128",
        "b1 h1 q7 kv515 d256",
        "b2 h4/2 q3 kv700 d96 dv160",
        "b1 h3/1 q1 kv333 d128 dv32",
        "b1 h1 q13 kv64 d257 dv300",
        "b1 h8/2 q2 kv1400 d32",
    };
    (void)state;
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++)
        in_every_dtype(sizes[n], &(forward_case){.seed = n});
}

static void extremes(void **state)
{
    (void)state;
    for (int data = 0; data < CASE_DATA; data++)
        for (int is_causal = 0; is_causal < 2; is_causal++)
            in_every_dtype("h2 q70 kv333 d64",
                           &(forward_case){.data = (case_data)data,
                                           .mask = is_causal ? "q + 200 >= kv" : NULL});
}

static void layouts(void **state)
{
    (void)state;
    for (int layout = 0; layout <= CASE_BROADCAST; layout++)
        in_every_dtype("b2 h4/2 q40 kv150 d20 dv28",
                       &(forward_case){.layout = (case_layout)layout, .mask = "causal()"});
}

static void positions(void **state)
{
    (void)state;
    in_every_dtype("b3 h2 q140 kv300 d16",
                   &(forward_case){.mask = "causal()", .q_offset = 100, .kv_len = 290});
    in_every_dtype("b3 h2 q1 kv700 d16", &(forward_case){.kv_len = 2, .score = "alibi()"});
    in_every_dtype(
        "b2 h4/1 q3 kv700 d48",
        &(forward_case){.mask = "q >= kv && q - kv < 90", .q_offset = 600, .kv_offset = 10});
}

/* Biases of thousands round like the plain computation's, in every level. */
static void far_positions(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= (is_short_run() ? 1 : 6); seed++)
        at_every_level(&(forward_case){
            .problem = "b1 h64 q1 kv4500 d24 f32", .score = "alibi()", .seed = seed});
}

static void variants(void **state)
{
    static const forward_case list[] = {
        {.mask = "causal()"},
        {.mask = "q >= kv && q - kv <= W", .score = "alibi()"},
        {.mask = "doc[q] == doc[kv] && q >= kv"},
        {.mask = "kv < 20 || q >= kv", .score = "softcap(c)"},
        {.score = "score + rel[h, (q - kv) & 63]"},
        {.score = "score * h_scale[h] + table[kv]"},
        {.mask = "q % 3 == 0"}, /* rows without a key */
        {.mask = "false"},
        {.mask = "true", .score = "kv == 5 ? -inf : score"},
        {.mask = "kv != 5", .score = "kv == 5 ? 1.0 / 0.0 + log(-1.0) : score"},
        {.mask = "kv == 0", .scale = 0.001f},              /* weights are 1, lse is about 0 */
        {.score = "q % 2 == 0 ? -1e30 : score"},           /* rows of nothing but a mask's */
        {.score = "score + (kv > q ? -3.4028234e38 : 0)"}, /* lowest numbers */
        {.score = "q < 2 ? -3.4028234e38 : score"},
        {.score = "q < 2 ? score * 1e9 : score"},
        {.score = "(q >= kv ? score : -inf) / float(h)"}, /* by 0 at the first head */
        {.score = "score * 1e-38 / (c * 4e-40)"},         /* by a subnormal number */
    };
    (void)state;
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++) {
        in_every_dtype("b2 h4/2 q150 kv310 d24", &list[n]);
        in_every_dtype("b1 h4/2 q3 kv310 d24", &list[n]);
    }
}

static void mixed_dtypes(void **state)
{
    (void)state;
    at_every_level(&(forward_case){
        .problem = "h4/2 q40 kv150 d32 f32", .kv_dtype = SACCADE_BF16, .mask = "causal()"});
    at_every_level(
        &(forward_case){.problem = "h4/2 q40 kv150 d32 bf16", .kv_dtype = SACCADE_F16});
}

static void put_element(const saccade_tensor *t, int64_t at, float x)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    convert_from_f32(t->dtype, &x, (char *)t->data + at * bytes, 1);
}

static void check_levels(case_run *r, int threads)
{
    case_solve(r);
    for (const char *const *level = case_levels(); *level; level++) {
        saccade_plan *plan = case_plan(r, *level, threads);
        case_check(r, plan, NULL, *level, NULL, NULL);
        saccade_plan_destroy(plan);
    }
}

/* What lies in K and V at masked positions, NaN and infinities, never reaches a result; where
 * it is live it does. */
static void nonfinite_value(const char *problem, float nonfinite, int is_live, int is_key)
{
    case_run r;
    case_make(&(forward_case){.problem = problem, .mask = is_live ? "true" : "kv != 77"}, &r);
    const saccade_tensor *t = is_key ? &r.k.t : &r.v.t;
    put_element(t, 77 * t->stride[2] + 3, nonfinite);
    check_levels(&r, 1);
    case_free(&r);
}

static void nonfinite_values(void **state)
{
    static const char *const problems[] = {"h2 q50 kv200 d8 f32", "h2 q50 kv200 d8 bf16",
                                           "h2 q3 kv200 d32 f32", "h2 q3 kv200 d64 bf16"};
    static const float nonfinite[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (int p = 0; p < 4; p++)
        for (int n = 0; n < 3; n++)
            for (int bits = 0; bits < 4; bits++)
                nonfinite_value(problems[p], nonfinite[n], bits & 1, bits >> 1);
}

/* All scores of a part are NaN: its maximum says nothing, the row is NaN all the same. */
static void parts_of_nan(void **state)
{
    static const char *const problems[] = {
        "h2/1 q1 kv12288 d16 f32", "h2/1 q6 kv12288 d16 bf16", "h1 q100 kv12288 d16 f16"};
    static const char *const scores[] = {"sqrt(-1.0 - score * score)",
                                         "kv < 9000 ? score : sqrt(-1.0 - score * score)",
                                         "kv < 3000 ? sqrt(-1.0 - score * score) : score"};
    (void)state;
    for (int n = 0; n < 9; n++) {
        case_run r;
        case_make(&(forward_case){.problem = problems[n / 3], .score = scores[n % 3]}, &r);
        case_solve(&r);
        for (const char *const *level = case_levels(); *level; level++) {
            saccade_plan *plan = case_plan(&r, *level, 2);
            case_check(&r, plan, NULL, *level, NULL, NULL);
            saccade_plan_destroy(plan);
        }
        case_free(&r);
    }
}

/* A NaN of V in a part whose weight is below f32's range is NaN all the same, whichever parts
 * come first. */
static void parts_of_no_weight(void **state)
{
    static const char *const problems[] = {
        "h2/1 q1 kv12288 d16 f32", "h2/1 q6 kv12288 d16 bf16", "h1 q100 kv12288 d16 f16"};
    static const char *const scores[] = {"kv < 3000 ? score - 300.0 : score",
                                         "kv < 9000 ? score : score - 300.0"};
    (void)state;
    for (int n = 0; n < 12; n++) {
        case_run r;
        case_make(&(forward_case){.problem = problems[n / 4], .score = scores[n % 2]}, &r);
        const saccade_tensor *v = &r.v.t;
        put_element(v, (n % 2 ? 12000 : 77) * v->stride[2] + 3, NAN);
        r.problem.batch_invariant = n / 2 % 2;
        check_levels(&r, 2);
        case_free(&r);
    }
}

static void check_threads(const forward_case *c)
{
    case_run r;
    case_make(c, &r);
    const size_t rows = (size_t)(r.sizes.B * r.sizes.H * r.sizes.Q);
    const size_t bytes = rows * (size_t)r.sizes.Dv * sizeof(float);
    float *first = malloc(bytes), *other = malloc(bytes);
    assert_true(first && other);
    for (const char *const *level = case_levels(); *level; level++)
        for (int threads = 1; threads <= 4; threads++) {
            saccade_plan *plan = case_plan(&r, *level, threads);
            case_check(&r, plan, NULL, *level, threads == 1 ? first : other, NULL);
            assert_true(threads == 1 || memcmp(first, other, bytes) == 0);
            saccade_plan_destroy(plan);
        }
    free(first);
    free(other);
    case_free(&r);
}

/* Windows, and few heads without a mask: threads pack the keys that their items need, in memory
 * for a few of them. */
static void threads_do_not_matter(void **state)
{
    static const char *const general = "(q ^ kv) % 5 != 0";
    static const forward_case cases[] = {
        {.problem = "b1 h2 q200 kv900 d32 f32", .mask = general},
        {.problem = "b1 h4/1 q1 kv3000 d64 bf16", .mask = general},
        {.problem = "b2 h3 q500 kv700 d32 f32"},
        {.problem = "b2 h6/2 q300 kv900 d40 bf16", .score = "score + 0.02 * (kv - q)"},
        {.problem = "b2 h4/2 q150 kv400 d16 f16", .mask = general},
        {.problem = "b2 h2/1 q1700 kv1700 d8 f32", .mask = "sliding_window(W)"},
        {.problem = "b1 h4 q1700 kv1500 d16 bf16", .mask = "sliding_window(W)"},
        {.problem = "b1 h1 q1200 kv1200 d256 f16", .mask = "q >= kv && q - kv < 600"},
    };
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n += is_short_run() ? 2 : 1)
        check_threads(&cases[n]);
}

/* On several threads few items of f32 have blocks of rows of one size, on one thread others:
 * the bits are the same, with keys that take the careful way too. */
static void blocks_of_rows_do_not_matter(void **state)
{
    static const char *const masks[] = {NULL, "causal()", "q >= kv && q - kv < 90",
                                        "doc[q] == doc[kv]", "(q ^ kv) % 5 != 0"};
    static const char *const scores[] = {NULL, "alibi()", "softcap(c)"};
    static const float nonfinite[] = {0, NAN, INFINITY};
    (void)state;
    for (int n = 0; n < 5 * 3 * 3; n += is_short_run() ? 2 : 1) {
        case_run r;
        case_make(&(forward_case){.problem = "b1 h3 q301 kv301 d24 f32",
                                  .mask = masks[n % 5],
                                  .score = scores[n / 5 % 3],
                                  .seed = (uint64_t)n},
                  &r);
        if (n / 15)
            ((float *)r.v.t.data)[r.v.t.stride[1] + 77 * r.v.t.stride[2] + 3] =
                nonfinite[n / 15];
        case_solve(&r);
        const size_t bytes = (size_t)(r.sizes.H * r.sizes.Q) * 24 * sizeof(float);
        float *out[2] = {malloc(bytes), malloc(bytes)};
        for (const char *const *level = case_levels(); *level; level++) {
            int32_t block[2];
            for (int several = 0; several < 2; several++) {
                saccade_plan *plan = case_plan(&r, *level, several ? 3 : 1);
                const cpu_needs *needs = &((const cpu_state *)plan->state)->needs;
                cpu_geometry g = cpu_geometry_of(needs, &r.sizes);
                cpu_cut_evenly(needs, &r.sizes, &g);
                block[several] = g.block_rows;
                case_check(&r, plan, NULL, *level, out[several], NULL);
                saccade_plan_destroy(plan);
            }
            assert_int_equal(block[0], 96);
            assert_int_equal(block[1], 76);
            assert_memory_equal(out[0], out[1], bytes);
        }
        free(out[0]);
        free(out[1]);
        case_free(&r);
    }
}

static void block_masks(void **state)
{
    static const char *const masks[] = {"causal()", "doc[q] == doc[kv]",
                                        "h % 2 == 0 ? q >= kv : kv >= q", "false"};
    (void)state;
    for (int n = 0; n < 8; n++) {
        case_run r;
        saccade_error err = {0};
        saccade_block_mask *mask;
        case_make(&(forward_case){.problem = n < 4 ? "b2 h4/2 q300 kv300 d16 f32"
                                                   : "b2 h4/2 q5 kv900 d16 bf16",
                                  .mask = masks[n % 4],
                                  .q_offset = n >= 4 ? 600 : 0},
                  &r);
        if (saccade_block_mask_create(NULL, r.mask, &r.sizes, r.args.positions,
                                      r.args.bindings, r.args.n_bindings, NULL, &mask, &err)
            != SACCADE_OK)
            fail_msg("%s", err.message);
        for (const char *const *level = case_levels(); *level; level++) {
            saccade_plan *plan = case_plan(&r, *level, 2);
            assert_int_equal(saccade_plan_prepare(plan, mask, &err), SACCADE_OK);
            case_check(&r, plan, mask, *level, NULL, NULL);
            saccade_plan_destroy(plan);
        }
        saccade_block_mask_destroy(mask);
        case_free(&r);
    }
}

/* The mask's own blocks, out as index tensors of odd sizes and in again. */
static void check_imported(const case_run *r, const saccade_block_mask *mask)
{
    saccade_error err = {0};
    saccade_block_indices x = {0};
    saccade_block_mask *imported;
    int32_t **const lists[4] = {&x.kv_num_blocks, &x.full_kv_num_blocks, &x.kv_indices,
                                &x.full_kv_indices};
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, &err), SACCADE_OK);
    for (int n = 0; n < 4; n++) {
        *lists[n] = calloc((size_t)(x.B * x.H * x.rows * (n < 2 ? 1 : x.columns)), 4);
        assert_non_null(*lists[n]);
    }
    assert_int_equal(saccade_block_mask_export(mask, 0, &x, &err), SACCADE_OK);
    if (saccade_block_mask_import(NULL, &x, r->mask, &r->sizes, r->args.positions,
                                  r->args.bindings, r->args.n_bindings, &imported, &err)
        != 0)
        fail_msg("%s", err.message);
    for (const char *const *level = case_levels(); *level; level++) {
        saccade_plan *plan = case_plan(r, *level, 2);
        assert_int_equal(saccade_plan_prepare(plan, imported, &err), SACCADE_OK);
        case_check(r, plan, imported, "imported", NULL, NULL);
        saccade_plan_destroy(plan);
    }
    saccade_block_mask_destroy(imported);
    for (int n = 0; n < 4; n++)
        free(*lists[n]);
}

static void imported_masks(void **state)
{
    static const char *const masks[] = {"causal()", "doc[q] == doc[kv]",
                                        "h % 2 == 0 ? q >= kv : kv >= q"};
    static const char *const problems[] = {"b2 h4/2 q300 kv300 d16 f32",
                                           "b1 h4/2 q2 kv400 d32 bf16"};
    (void)state;
    for (int n = 0; n < 6; n++) {
        case_run r;
        saccade_error err = {0};
        saccade_block_mask *mask;
        const saccade_block_mask_options options = {.size = sizeof options,
                                                    .block_q = 70,
                                                    .block_kv = 24};
        case_make(&(forward_case){.problem = problems[n / 3],
                                  .mask = masks[n % 3],
                                  .score = n % 2 ? "alibi()" : NULL,
                                  .q_offset = n >= 3 ? 200 : 0},
                  &r);
        if (saccade_block_mask_create(NULL, r.mask, &r.sizes, r.args.positions,
                                      r.args.bindings, r.args.n_bindings, &options, &mask, &err)
            != SACCADE_OK)
            fail_msg("%s", err.message);
        check_imported(&r, mask);
        saccade_block_mask_destroy(mask);
        case_free(&r);
    }
}

/* The workspace of the largest run serves every smaller one. */
static void workspace_grows(void **state)
{
    static const int64_t sizes[] = {0, 1, 3, 12, 13, 96, 97, 1000, 6000, 100000};
    enum { N = sizeof sizes / sizeof sizes[0] };
    case_run r;
    (void)state;
    case_make(&(forward_case){.problem = "b1 h8/1 q1 kv1 d64 f32"}, &r);
    saccade_plan *plan = case_plan(&r, NULL, 3);
    for (int n = 0; n < N * N * N; n++) {
        const int at[3] = {n % N, n / N % N, n / N / N};
        saccade_sizes s = {sizes[at[0]], 8, 1, sizes[at[1]], sizes[at[2]], 64, 64};
        const size_t bytes = saccade_plan_workspace(plan, &s);
        int64_t *const dims[3] = {&s.B, &s.Q, &s.KV};
        assert_true(bytes > 0);
        for (int d = 0; d < 3; d++) {
            if (at[d] == 0)
                continue;
            const int64_t kept = *dims[d];
            *dims[d] = sizes[at[d] - 1];
            assert_true(saccade_plan_workspace(plan, &s) <= bytes);
            *dims[d] = kept;
        }
    }
    saccade_plan_destroy(plan);
    case_free(&r);
}

/* The items of a wave have numbers of 32 bits, however many heads a run has. */
static void waves_end(void **state)
{
    static const saccade_sizes sizes = {1 << 27, 16, 16, 1, 1, 1, 1};
    case_run r;
    (void)state;
    case_make(&(forward_case){.problem = "b1 h16 q1 kv1 d1 f32", .mask = "q * kv % 3 < 2"},
              &r);
    saccade_plan *plan = case_plan(&r, NULL, 1);
    const cpu_geometry g =
        cpu_geometry_of(&((const cpu_state *)plan->state)->needs, &sizes);
    assert_true(g.heads == (int64_t)1 << 31);
    assert_true(g.wave >= 1 && g.wave * g.head_items <= INT32_MAX);
    saccade_plan_destroy(plan);
    case_free(&r);
}

static uint64_t step(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void random_problems(void **state)
{
    static const char *const dtypes[] = {"f32", "f16", "bf16"};
    static const char *const masks[] = {NULL, "causal()", "doc[q] == doc[kv]",
                                        "(q + kv) % 3 != h"};
    static const char *const scores[] = {NULL, "alibi()", "softcap(c)", "score + table[kv]"};
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t x = seed * 977;
        char problem[96];
        const int group = 1 + (int)(step(&x) % 4), kv_heads = 1 + (int)(step(&x) % 3);
        const int B = 1 + (int)(step(&x) % 3), long_q = step(&x) % 3 == 0;
        const int Q = 1 + (int)(step(&x) % (long_q ? 220 : 20)), KV = 1 + (int)(step(&x) % 600);
        snprintf(problem, sizeof problem, "b%d h%d/%d q%d kv%d d%d dv%d %s", B,
                 group * kv_heads, kv_heads, Q, KV, 1 + (int)(step(&x) % 80),
                 1 + (int)(step(&x) % 80), dtypes[step(&x) % 3]);
        const int32_t kv_len = step(&x) % 3 ? 0 : 1 + (int32_t)(step(&x) % (unsigned)KV);
        forward_case c = {.problem = problem, .kv_len = kv_len, .seed = seed};
        c.mask = masks[step(&x) % 4];
        c.score = scores[step(&x) % 4];
        c.layout = (case_layout)(step(&x) % 4);
        c.data = (case_data)(step(&x) % CASE_DATA);
        c.q_offset = (int32_t)(step(&x) % 2 * 300);
        at_every_level(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes),
        cmocka_unit_test(extremes),
        cmocka_unit_test(layouts),
        cmocka_unit_test(positions),
        cmocka_unit_test(far_positions),
        cmocka_unit_test(variants),
        cmocka_unit_test(mixed_dtypes),
        cmocka_unit_test(nonfinite_values),
        cmocka_unit_test(parts_of_nan),
        cmocka_unit_test(parts_of_no_weight),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(blocks_of_rows_do_not_matter),
        cmocka_unit_test(block_masks),
        cmocka_unit_test(random_problems),
        cmocka_unit_test(workspace_grows),
        cmocka_unit_test(waves_end),
        cmocka_unit_test(imported_masks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
