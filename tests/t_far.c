/* Masks at positions near both ends of what offsets may give, where sums of positions wrap:
 * every level against ref, with and without a block mask. */
#include "plan/plan.h"
#include "support/forward_case.h"
#include "support/random_mod.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { Q = 3, KV = 300, FAR = 1 << 30, TEXT = 256 };

/* ---- texts ---- */

/* Near 0, and near what makes a sum of two far positions wrap. */
static long long some_constant(uint64_t *seed)
{
    static const long long near[] = {0, 0, 100, FAR / 2, FAR, 2ll * FAR - 8, -FAR / 2, -FAR};
    const long long c = near[random_mod_below(seed, sizeof near / sizeof near[0])];
    return c + (long long)random_mod_below(seed, 7) - 3;
}

static void some_side(uint64_t *seed, char *to, size_t size)
{
    static const char *const sides[] = {"q",       "kv",       "q - kv",     "kv - q",
                                        "kv + %lld", "%lld - kv", "q + %lld - kv", "%lld",
                                        "%lld",    "q - %lld", "kv / 16",    "kv >> 3",
                                        "q / 16",  "q >> 3"};
    snprintf(to, size, sides[random_mod_below(seed, sizeof sides / sizeof sides[0])],
             some_constant(seed));
}

static void some_mask(uint64_t *seed, char text[TEXT])
{
    static const char *const operations[] = {"<", "<=", ">", ">=", "=="};
    const uint32_t n = 1 + random_mod_below(seed, 2);
    text[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        char x[64], y[64], one[160];
        some_side(seed, x, sizeof x);
        some_side(seed, y, sizeof y);
        snprintf(one, sizeof one, "%s%s %s %s",
                 i == 0 ? "" : random_mod_below(seed, 3) == 0 ? " || " : " && ", x,
                 operations[random_mod_below(seed, 5)], y);
        strcat(text, one);
    }
}

static int32_t some_offset(uint64_t *seed)
{
    static const int32_t near[] = {0, FAR, -FAR, FAR / 2, -FAR / 2, FAR - KV, 12345};
    const int64_t x = near[random_mod_below(seed, sizeof near / sizeof near[0])];
    const int64_t moved = x + (int64_t)random_mod_below(seed, 2 * KV) - KV;
    return (int32_t)(moved > FAR ? FAR : moved < -FAR ? -FAR : moved);
}

/* ---- runs ---- */

typedef struct far_case {
    const char *text;
    saccade_mod *mask;
    int32_t q_offset, kv_offset;
} far_case;

typedef struct far_positions {
    saccade_tensor q_offset, kv_offset;
    saccade_positions at; /* points to them */
} far_positions;

static const saccade_positions *positions_of(const far_case *c, far_positions *p)
{
    p->q_offset = saccade_tensor_of((void *)&c->q_offset, SACCADE_I32, 0, NULL);
    p->kv_offset = saccade_tensor_of((void *)&c->kv_offset, SACCADE_I32, 0, NULL);
    saccade_positions_init(&p->at);
    p->at.q_offset = &p->q_offset;
    p->at.kv_offset = &p->kv_offset;
    return &p->at;
}

static saccade_plan *plan_of(const far_case *c, const char *backend, const char *level)
{
    saccade_context *context = NULL;
    saccade_plan *plan = NULL;
    saccade_error err = {0};
    saccade_problem p;
    saccade_problem_init(&p);
    const saccade_context_options options = {.size = sizeof options,
                                             .threads = 1,
                                             .level = level};
    p.sizes = (saccade_sizes){.H = 1, .Hkv = 1, .D = 1, .Dv = 1};
    p.mask = c->mask;
    p.backend = backend;
    if (saccade_context_create(&options, &context, &err)
        || saccade_plan_create(context, &p, &plan, &err))
        fail_msg("%s: %s", c->text, err.message);
    saccade_context_destroy(context);
    return plan;
}

/* All scores are 0: a row is the mean of its live keys' values. */
static void run(const far_case *c, const saccade_plan *plan, const saccade_block_mask *mask,
                float out[Q])
{
    static _Alignas(64) char workspace[1 << 24];
    static float zeros[KV], v[KV];
    const int64_t rows[4] = {1, 1, Q, 1}, keys[4] = {1, 1, KV, 1};
    const saccade_sizes sizes = {1, 1, 1, Q, KV, 1, 1};
    saccade_error err = {0};
    for (int j = 0; j < KV; j++)
        v[j] = (float)(j % 97) - 20;
    far_positions p;
    const saccade_tensor q = saccade_tensor_of(zeros, SACCADE_F32, 4, rows);
    const saccade_tensor k = saccade_tensor_of(zeros, SACCADE_F32, 4, keys);
    const saccade_tensor values = saccade_tensor_of(v, SACCADE_F32, 4, keys);
    const saccade_tensor o = saccade_tensor_of(out, SACCADE_F32, 4, rows);
    const saccade_forward_args args = {
        .size = sizeof args,
        .q = &q,
        .k = &k,
        .v = &values,
        .out = &o,
        .positions = positions_of(c, &p),
        .block_mask = mask,
        .workspace = workspace,
        .workspace_bytes = sizeof workspace};
    assert_true(saccade_plan_workspace(plan, &sizes) <= sizeof workspace);
    if ((mask && saccade_plan_prepare(plan, mask, &err)) || saccade_forward(plan, &args, &err))
        fail_msg("%s: %s", c->text, err.message);
}

static void compare(const far_case *c, const float *want, const float *got, const char *what)
{
    for (int i = 0; i < Q; i++)
        if (!(fabsf(got[i] - want[i]) <= 1e-4f))
            fail_msg("mask %s, q_offset %d, kv_offset %d, %s: row %d: got %g, expected %g",
                     c->text, (int)c->q_offset, (int)c->kv_offset, what, i, (double)got[i],
                     (double)want[i]);
}

static saccade_block_mask *block_mask_of(const far_case *c)
{
    const saccade_sizes sizes = {1, 1, 1, Q, KV, 1, 1};
    far_positions p;
    saccade_block_mask *mask;
    saccade_error err = {0};
    if (saccade_block_mask_create(NULL, c->mask, &sizes, positions_of(c, &p), NULL, 0, NULL,
                                  &mask, &err))
        fail_msg("%s: %s", c->text, err.message);
    return mask;
}

static void check_levels(const far_case *c)
{
    float want[Q], got[Q];
    saccade_plan *ref = plan_of(c, "ref", NULL);
    saccade_block_mask *mask = block_mask_of(c);
    run(c, ref, NULL, want);
    run(c, ref, mask, got);
    compare(c, want, got, "ref, block mask");
    for (const char *const *level = case_levels(); *level; level++) {
        saccade_plan *plan = plan_of(c, "cpu", *level);
        run(c, plan, NULL, got);
        compare(c, want, got, *level);
        run(c, plan, mask, got);
        compare(c, want, got, "block mask");
        saccade_plan_destroy(plan);
    }
    saccade_block_mask_destroy(mask);
    saccade_plan_destroy(ref);
}

static void check_text(const char *text, int32_t q_offset, int32_t kv_offset)
{
    far_case c = {text, case_mod(SACCADE_MASK, text), q_offset, kv_offset};
    check_levels(&c);
    saccade_mod_destroy(c.mask);
}

static void known(void **state)
{
    (void)state;
    check_text("q - kv <= 100", FAR, -FAR);
    check_text("kv + 1073741824 >= 0", 0, FAR - 1);
    check_text("q >= kv", FAR, FAR);
    check_text("q >= kv && q - kv < 256", -FAR, -FAR);
    check_text("kv / 16 == q / 16", FAR, FAR - 40);
}

static void random_masks(void **state)
{
    (void)state;
    for (uint64_t n = 0; n < 3000; n++) {
        uint64_t seed = n;
        char text[TEXT];
        some_mask(&seed, text);
        const int32_t q_offset = some_offset(&seed);
        check_text(text, q_offset, random_mod_below(&seed, 3) ? some_offset(&seed) : q_offset);
    }
}

/* What the host knows of positions; a GPU's offsets it does not. */
static void near(void **state)
{
    (void)state;
    int32_t q[2] = {0, FAR - 9}, kv[2] = {-FAR / 2, 0}, len[2] = {KV, 4};
    const int64_t two[1] = {2};
    const saccade_sizes sizes = {2, 1, 1, 9, KV, 1, 1};
    plan_positions at = {.q_offset = saccade_tensor_of(q, SACCADE_I32, 1, two),
                            .kv_offset = saccade_tensor_of(kv, SACCADE_I32, 1, two),
                            .kv_len = saccade_tensor_of(len, SACCADE_I32, 1, two)};
    assert_true(plan_is_near(&(plan_positions){0}, &sizes));
    assert_true(plan_is_near(&at, &sizes));
    q[1]++;
    assert_false(plan_is_near(&at, &sizes));
    at.q_offset.device.kind = SACCADE_CUDA;
    assert_true(plan_is_near(&at, &sizes));
    kv[1] = FAR - 4;
    assert_true(plan_is_near(&at, &sizes));
    len[1]++;
    assert_false(plan_is_near(&at, &sizes));
    len[1] = 0;
    assert_true(plan_is_near(&at, &sizes));
    kv[0]--;
    assert_false(plan_is_near(&at, &sizes));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(near),
        cmocka_unit_test(known),
        cmocka_unit_test(random_masks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
