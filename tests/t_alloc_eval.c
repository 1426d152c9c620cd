/* Every allocation of the passes and of compiling for the interpreter failing in turn. */
#include "eval/eval.h"
#include "pass/pass.h"
#include "support/fail_alloc.h"

#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

/* A long chain, so that arenas need several chunks: an affine score, or an interval mask. */
static const mod_fn *long_mod(arena *arena, saccade_kind kind)
{
    mod_builder *b = mod_builder_create(arena, kind, NULL, 0);
    const mod_fn *fn;
    const uint32_t kv = mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    const uint32_t q = mod_emit(b, OP_VAR, NULL, 0, VAR_Q, 0, 0);
    uint32_t x = kind == SACCADE_SCORE ? mod_emit(b, OP_SCORE, NULL, 0, 0, 0, 0)
                                       : mod_emit2(b, OP_ile, kv, q);
    for (int i = 0; i < 1000; i++) {
        if (kind == SACCADE_SCORE) {
            const uint32_t by = mod_emit_float(b, 1.0f + (float)i / 4096.0f);
            x = mod_emit2(b, OP_fadd, mod_emit2(b, OP_fmul, x, by), mod_emit1(b, OP_i2f, kv));
        } else {
            const uint32_t bound = mod_emit2(b, OP_iadd, q, mod_emit_int(b, i));
            x = mod_emit2(b, OP_and, x, mod_emit2(b, OP_ile, kv, bound));
        }
    }
    assert_int_equal(mod_finish(b, x, &fn, NULL), SACCADE_OK);
    return fn;
}

static saccade_status use_score(void *arg, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const mod_fn *fn = arg, *slope, *offset, *gradient;
    const eval_prog *prog;
    uint32_t score = 0, result;
    arena a;
    arena_init(&a);
    TRY_GOTO(pass_simplify(fn, &a, &fn, err));
    while (fn->nodes[score].op != OP_SCORE)
        score++;
    FAIL_IF_GOTO(!pass_affine(fn, &a, &slope, &offset), SACCADE_ENOMEM, "out of memory");
    TRY_GOTO(pass_gradient(fn, &score, 1, &a, &gradient, &result, err));
    TRY_GOTO(eval_compile(fn, &a, &prog, err));
out:
    arena_free(&a);
    return status;
}

static saccade_status use_mask(void *arg, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const mod_fn *fn = arg, *bounds_fn;
    uint32_t bounds[2];
    arena a;
    arena_init(&a);
    TRY_GOTO(pass_simplify(fn, &a, &fn, err));
    FAIL_IF_GOTO(!pass_interval(fn, &a, &bounds_fn, bounds), SACCADE_ENOMEM, "out of memory");
out:
    arena_free(&a);
    return status;
}

static void test_failing_allocations(void **unused)
{
    arena arena;
    (void)unused;
    arena_init(&arena);
    assert_true(fail_alloc_sweep("score", use_score, (void *)long_mod(&arena, SACCADE_SCORE))
                > 9);
    assert_true(fail_alloc_sweep("mask", use_mask, (void *)long_mod(&arena, SACCADE_MASK)) > 5);
    arena_free(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_failing_allocations)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
