/* Limits of rows that are found together against those that each row has on its own. */
#include "saccade.h"

#include "cpu/cpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static saccade_plan *plan_of(const char *text, saccade_mod **bound)
{
    saccade_error err = {0};
    saccade_mod *mod;
    saccade_plan *plan;
    saccade_problem p;
    saccade_problem_init(&p);
    if (saccade_mod_parse(SACCADE_MASK, text, strlen(text), &mod, &err)
        || saccade_mod_bind(mod, NULL, 0, bound, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(mod);
    p.sizes = (saccade_sizes){.H = 2, .Hkv = 2, .D = 16, .Dv = 16};
    p.dtype = SACCADE_F32;
    p.backend = "cpu";
    p.mask = *bound;
    if (saccade_plan_create(NULL, &p, &plan, &err))
        fail_msg("%s: %s", text, err.message);
    return plan;
}

static void check(const pass_limits *limits, int32_t q, int32_t kv_offset)
{
    enum { ROWS = CPU_MOST_ROWS };
    int64_t first[2][ROWS], past[2][ROWS];
    cpu_limits all = {.first = first[0], .past = past[0]};
    cpu_limits one = {.first = first[1], .past = past[1]};
    const plan_run run = {.sizes = {1, 2, 2, 1 << 20, 1000, 16, 16},
                          .mask_env = {.size = {1, 2, 2, 1 << 20, 1000, 16, 16}}};
    eval_point row = {0, 1, q, 0, 0};
    double *values = calloc(limits->fn->n_nodes, sizeof *values);
    assert_non_null(values);
    cpu_find_limits(limits, &run, &row, ROWS, kv_offset, values, &all, 0);
    for (int32_t r = 0; r < ROWS; r++) {
        row.q = q + r;
        cpu_find_limits(limits, &run, &row, 1, kv_offset, values, &one, r);
        assert_true(first[0][r] == first[1][r] && past[0][r] == past[1][r]);
        assert_true(first[0][r] >= 0 && past[0][r] <= 1000);
    }
    free(values);
}

static void rows_between(void **state)
{
    static const char *const texts[] = {
        "q >= kv",
        "q >= kv && q - kv <= 40",
        "kv < 100 || q >= kv",
        "kv >= max(q - 300, 37) && kv < min(q + 20, 900)",
        "kv <= 2 * q",
        "kv >= q / 3 && q >= kv",
        "kv < q + 2147483000",
        "kv <= q % 7 && kv >= (q & 64)",
        "h == 0 ? kv < 5 : kv <= q",
    };
    static const int32_t starts[] = {0, 1, 95, 200, 700, 100000, -100, 1 << 29};
    (void)state;
    int n_found = 0;
    for (size_t n = 0; n < sizeof texts / sizeof *texts; n++) {
        saccade_mod *mod;
        saccade_plan *plan = plan_of(texts[n], &mod);
        const pass_limits *own = plan_limits(&plan->problem);
        for (size_t k = 0; own && k < sizeof starts / sizeof *starts; k++) {
            check(own, starts[k], 0);
            check(own, starts[k], 50);
        }
        n_found += own != NULL;
        saccade_plan_destroy(plan);
        saccade_mod_destroy(mod);
    }
    assert_true(n_found >= 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_between)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
