/* Range analysis is sound: on random mods over random boxes, every node's range holds every
   value it takes, and no verdict is contradicted by a point. And it is sharp where masks need
   it: the boxes below must be proven. */
#include "pass/pass.h"
#include "support/random_fn.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t first_seed(void)
{
    const char *seed = getenv("SACCADE_SEED");
    return seed != NULL ? strtoull(seed, NULL, 10) : 1;
}

static pass_box random_box(random_source *r)
{
    pass_box box;
    const int32_t limit[4] = {3, 8, RANDOM_Q, RANDOM_KV};
    for (int v = 0; v < 4; v++) {
        const int32_t wide = random_below(r, 3) ? 1 + random_below(r, 9) : limit[v];
        box.lo[v] = random_below(r, 8) ? random_below(r, limit[v]) : random_int(r) / 2;
        box.hi[v] = box.lo[v] + random_below(r, wide);
    }
    return box;
}

static int holds(mod_type type, const pass_range *r, eval_cell value)
{
    if (type == MOD_BOOL)
        return value.i ? r->can_true : r->can_false;
    if (type == MOD_FLOAT)
        return isnan(value.f) ? r->may_nan : r->flo <= value.f && value.f <= r->fhi;
    const int64_t step = r->step > 1 ? r->step : 1;
    return r->lo <= value.i && value.i <= r->hi && (value.i - (int64_t)r->rest) % step == 0;
}

/* 40 points of the box, its corners among them. */
static void check_box(const mod_fn *fn, const eval_env *env, const pass_box *box,
                      pass_verdict verdict, random_source *r, uint64_t seed)
{
    static pass_range ranges[MOD_MAX_NODES];
    static eval_cell cells[MOD_MAX_NODES];
    const pass_range score = {.flo = -10, .fhi = 10};
    pass_ranges(fn, env, box, &score, ranges);
    for (int point = 0; point < 40; point++) {
        int32_t at[4];
        for (int v = 0; v < 4; v++)
            at[v] = point < 16 ? ((point >> v) & 1 ? box->hi[v] : box->lo[v])
                               : box->lo[v] + random_below(r, box->hi[v] - box->lo[v] + 1);
        const eval_cell result =
            random_fn_value(fn, env, at, (float)random_below(r, 21) - 10, cells);
        for (uint32_t i = 0; i < fn->n_nodes; i++)
            if (!holds(fn->nodes[i].type, &ranges[i], cells[i]))
                fail_msg("SACCADE_SEED=%llu node %u %s: value %d %g, range %lld..%lld step %d "
                         "rest %d, %g..%g nan %d, false %d true %d",
                         (unsigned long long)seed, i, mod_op_infos[fn->nodes[i].op].name,
                         cells[i].i, (double)cells[i].f, (long long)ranges[i].lo,
                         (long long)ranges[i].hi, ranges[i].step, ranges[i].rest, ranges[i].flo,
                         ranges[i].fhi, ranges[i].may_nan, ranges[i].can_false,
                         ranges[i].can_true);
        if (fn->kind == SACCADE_MASK && verdict != PASS_UNKNOWN)
            assert_int_equal(verdict == PASS_ALWAYS, result.i);
    }
}

/* Both ways of proving agree. */
static pass_verdict prove_twice(const pass_prover *prover, const pass_box *box, int is_first,
                                void *scratch, void *again, uint64_t seed)
{
    const pass_verdict verdict = pass_prove(prover, box, scratch);
    const pass_verdict next =
        is_first ? pass_prove(prover, box, again) : pass_prove_next(prover, box, again);
    if (verdict != next)
        fail_msg("SACCADE_SEED=%llu: verdict %d, step by step %d", (unsigned long long)seed,
                 verdict, next);
    return verdict;
}

static void check_mask(const mod_fn *fn, const eval_env *env, random_source *r, uint64_t seed,
                       int *decided)
{
    saccade_error err;
    pass_prover *prover = NULL;
    assert_int_equal(pass_prover_create(fn, env, &prover, &err), SACCADE_OK);
    void *scratch = malloc(pass_prover_scratch(prover));
    void *again = malloc(pass_prover_scratch(prover));
    for (int i = 0; i < 12; i++) {
        const pass_box box = random_box(r);
        const pass_verdict verdict = prove_twice(prover, &box, i == 0, scratch, again, seed);
        *decided += verdict != PASS_UNKNOWN;
        check_box(fn, env, &box, verdict, r, seed);
    }
    free(scratch);
    free(again);
    pass_prover_destroy(prover);
}

static void check_mod(uint64_t seed, int *decided)
{
    random_source r = {seed};
    random_env e;
    arena arena;
    const random_shape shape = {.kind = random_below(&r, 3) ? SACCADE_MASK : SACCADE_SCORE,
                                .n_ops = 1 + random_below(&r, 50)};
    arena_init(&arena);
    random_env_make(&e, &r);
    const mod_fn *fn = random_fn(&arena, &r, &e, &shape);
    if (fn->kind == SACCADE_MASK) {
        check_mask(fn, &e.env, &r, seed, decided);
    } else {
        const pass_box box = random_box(&r);
        check_box(fn, &e.env, &box, PASS_UNKNOWN, &r, seed);
    }
    random_env_free(&e);
    arena_free(&arena);
}

static void ranges_hold_every_value(void **state)
{
    const uint64_t seed = first_seed();
    int decided = 0;
    (void)state;
    for (uint64_t i = 0; i < 1500; i++)
        check_mod(seed + i, &decided);
    assert_true(decided > 1500); /* it does prove things */
}

/* ---- what must be proven ---- */

static const int64_t doc_shape[1] = {1024};
static int32_t doc_data[1024];

static saccade_mod *mask_of(const char *text)
{
    saccade_error err = {0};
    saccade_mod *generic, *bound;
    saccade_capture captures[MOD_MAX_CAPTURES];
    if (saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err))
        fail_msg("%s: %s", text, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = SACCADE_I32;
    }
    if (saccade_mod_bind(generic, captures, n, &bound, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static pass_verdict prove(const char *text, int32_t q0, int32_t q1, int32_t k0, int32_t k1)
{
    saccade_error err;
    pass_prover *prover;
    saccade_mod *mod = mask_of(text);
    const saccade_tensor doc = saccade_tensor_of(doc_data, SACCADE_I32, 1, doc_shape);
    const saccade_sizes sizes = {1, 4, 4, 1024, 1024, 64, 64};
    eval_env env = {.tensors = &doc};
    const pass_box box = {{0, 0, q0, k0}, {0, 3, q1, k1}};
    eval_sizes(&sizes, env.size);
    assert_int_equal(pass_prover_create(mod_function(mod), &env, &prover, &err), SACCADE_OK);
    void *scratch = malloc(pass_prover_scratch(prover));
    const pass_verdict verdict = pass_prove(prover, &box, scratch);
    free(scratch);
    pass_prover_destroy(prover);
    saccade_mod_destroy(mod);
    return verdict;
}

static void masks_are_proven(void **state)
{
    static const struct {
        const char *text;
        int32_t q0, q1, k0, k1;
        pass_verdict verdict;
    } cases[] = {
        {"q >= kv", 127, 255, 0, 127, PASS_ALWAYS},
        {"q >= kv", 0, 127, 128, 255, PASS_NEVER},
        {"q >= kv", 0, 127, 127, 255, PASS_UNKNOWN},
        {"q >= kv && q - kv <= 300", 256, 383, 128, 255, PASS_ALWAYS},
        {"q >= kv && q - kv <= 300", 512, 639, 0, 127, PASS_NEVER},
        {"abs(q - kv) <= 255", 256, 383, 128, 255, PASS_ALWAYS},
        {"2 * q - 2 * kv + 1 == 0", 0, 1023, 0, 1023, PASS_NEVER},
        {"(4 * kv + 2) % 4 == 2", 0, 1023, 0, 1023, PASS_ALWAYS},
        {"q / 128 == kv / 128", 128, 255, 128, 255, PASS_ALWAYS},
        {"q / 100 == kv / 100 && q % 100 >= kv % 100", 250, 299, 200, 250, PASS_ALWAYS},
        {"q / 100 == kv / 100 && q % 100 >= kv % 100", 200, 249, 250, 299, PASS_NEVER},
        {"(q / 8 * 1024 + kv % 512) % 1024 < 512", 0, 1023, 0, 1023, PASS_ALWAYS},
        {"floormod(kv - 500, 64) < 64", 0, 1023, 0, 1023, PASS_ALWAYS},
        {"(kv & 63) >= 32", 0, 1023, 96, 127, PASS_ALWAYS},
        {"(kv >> 5) == 3", 0, 1023, 96, 127, PASS_ALWAYS},
        {"((kv | 7) & 7) == 7", 0, 1023, 0, 1023, PASS_UNKNOWN},
        {"(q ^ kv) < 64", 64, 127, 64, 127, PASS_ALWAYS},
        {"(q ^ kv) < 64", 64, 127, 128, 191, PASS_NEVER},
        {"min(q, kv) + max(q, kv) >= 0", 0, 1023, 0, 1023, PASS_ALWAYS},
        {"sqrt(1.0 * kv) < 32.0", 0, 1023, 0, 1000, PASS_ALWAYS},
        {"exp2(-8.0 * (h + 1) / H) <= 0.26", 0, 1023, 0, 1023, PASS_ALWAYS},
        {"kv * 4194304 >= 0", 0, 0, 0, 1023, PASS_UNKNOWN}, /* wraps */
        {"kv * 4194304 >= 0", 0, 0, 0, 511, PASS_ALWAYS},
        {"doc[q] == doc[kv]", 0, 99, 0, 99, PASS_ALWAYS},
        {"doc[q] == doc[kv]", 0, 99, 100, 1023, PASS_NEVER},
        {"doc[q] == doc[kv]", 0, 100, 0, 100, PASS_UNKNOWN},
        {"q - 100 * doc[q] >= kv - 100 * doc[kv]", 250, 299, 200, 250, PASS_ALWAYS},
        {"doc[kv + 5000] == doc[1023]", 0, 1023, 0, 1023, PASS_ALWAYS}, /* clamped */
    };
    (void)state;
    for (int i = 0; i < 1024; i++)
        doc_data[i] = i / 100;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (prove(cases[i].text, cases[i].q0, cases[i].q1, cases[i].k0, cases[i].k1)
            != cases[i].verdict)
            fail_msg("%s on q %d..%d kv %d..%d: expected verdict %d", cases[i].text,
                     cases[i].q0, cases[i].q1, cases[i].k0, cases[i].k1, cases[i].verdict);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_hold_every_value),
        cmocka_unit_test(masks_are_proven),
    };
    return cmocka_run_group_tests_name("range", tests, NULL, NULL);
}
