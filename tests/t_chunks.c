/* Keys in chunks against the same keys in one piece, bit for bit, at every level: any size of
 * chunk, any order, one pool for all batches, absent chunks where nothing is live, NaN in every
 * row that no chunk names. */
#include "saccade.h"

#include "cpu/forward/forward.h"
#include "support/chunk_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct results {
    void *out;
    float *lse;
    size_t out_bytes, lse_bytes;
} results;

/* One run through the solver's own interface, which is where chunks are known so far. */
static results run_once(const case_run *r, saccade_plan *plan, const saccade_tensor *k,
                        const saccade_tensor *v, const plan_chunks *chunks)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t out_shape[] = {s->B, s->H, s->Q, s->Dv};
    const int64_t rows = s->B * s->H * s->Q;
    saccade_error err = {0};
    results to = {.out_bytes = (size_t)(rows * s->Dv) * saccade_dtype_bytes(r->dtype),
                  .lse_bytes = (size_t)rows * sizeof(float)};
    to.out = malloc(to.out_bytes);
    to.lse = malloc(to.lse_bytes);
    const saccade_tensor out = saccade_tensor_of(to.out, r->dtype, 4, out_shape);
    const saccade_tensor lse = saccade_tensor_of(to.lse, SACCADE_F32, 3, out_shape);
    plan->problem.has_chunks = chunks != NULL;
    ((cpu_state *)plan->state)->needs.room_bytes = kv_room(&plan->problem, CPU_BLOCK_KEYS);
    plan_run run = {.sizes = *s, .q = &r->q.t, .k = k, .v = v, .out = &out, .lse = &lse};
    run.chunks = chunks;
    eval_sizes(s, run.score_env.size);
    eval_sizes(s, run.mask_env.size);
    run.workspace_bytes = cpu_geometry_of(&cpu_state_of(plan)->needs, s).bytes;
    run.workspace = aligned_alloc(64, (run.workspace_bytes + 64) / 64 * 64);
    assert_non_null(run.workspace);
    if (cpu_forward(plan, &run, &err))
        fail_msg("%s", err.message);
    free(run.workspace);
    return to;
}

static void drop(results r)
{
    free(r.out);
    free(r.lse);
}

static void at_level(const chunk_case *c, const case_run *r, const char *level)
{
    int32_t table[CHUNK_MOST];
    plan_chunks chunks;
    int64_t rows;
    chunk_table(c, &r->sizes, table, &chunks, &rows);
    const saccade_tensor k = chunk_pool(&r->k.t, &chunks, rows);
    const saccade_tensor v = chunk_pool(&r->v.t, &chunks, rows);
    saccade_plan *plan = case_plan(r, level, 2);
    const results whole = run_once(r, plan, &r->k.t, &r->v.t, NULL);
    const results parts = run_once(r, plan, &k, &v, &chunks);
    if (memcmp(whole.out, parts.out, whole.out_bytes)
        || memcmp(whole.lse, parts.lse, whole.lse_bytes))
        fail_msg("chunks of %d at level %s differ: --problem \"%s\" mask %s score %s", c->size,
                 level, c->problem, c->mask ? c->mask : "none", c->score ? c->score : "none");
    drop(whole);
    drop(parts);
    saccade_plan_destroy(plan);
    free(k.data);
    free(v.data);
}

static void check(const chunk_case *c)
{
    const forward_case f = {
        .problem = c->problem, .mask = c->mask, .score = c->score, .seed = 7};
    case_run r;
    case_make(&f, &r);
    for (const char *const *level = case_levels(); *level; level++)
        at_level(c, &r, *level);
    case_free(&r);
}

static void any_size_and_order(void **state)
{
    static const char *const problems[] = {
        "b2 h4/2 q70 kv333 d40 dv24 f32",
        "b2 h2 q130 kv300 d64 bf16",
        "b2 h3 q40 kv290 d33 f16",
        "b2 h8/2 q1 kv400 d64 bf16",
        "b2 h4/1 q2 kv310 d64 f32",
        "b2 h4/1 q1 kv310 d40 f16",
    };
    static const int32_t sizes[] = {1, 3, 16, 50, 256, 300};
    (void)state;
    for (size_t p = 0; p < sizeof problems / sizeof *problems; p++)
        for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
            check(&(chunk_case){problems[p], NULL, NULL, sizes[n], 0});
            check(&(chunk_case){problems[p], "kv <= q + 280", "alibi()", sizes[n], 0});
        }
}

static void absent_where_nothing_is_live(void **state)
{
    (void)state;
    check(&(chunk_case){"b2 h2 q40 kv300 d32 f32", "kv >= 200", NULL, 16, 200});
    check(&(chunk_case){"b2 h2 q1 kv300 d32 f32", "kv >= 200 && (q + kv) % 3 != 1", NULL, 7,
                        200});
    check(&(chunk_case){"b2 h2 q1 kv600 d64 bf16", "kv >= 500", NULL, 1, 500});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_size_and_order),
        cmocka_unit_test(absent_where_nothing_is_live),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
