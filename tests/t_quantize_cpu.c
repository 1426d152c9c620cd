/* Attention of the CPU's kernels over quantised K and V, decode and prefill, in one piece and
 * in pages, at every level: support/quantised_case.h. */
#include "support/quantised_case.h"
#include "support/short_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static int step_of(int step)
{
    return is_emulated_run() ? 5 * step : step;
}

static void decode(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 8, 2, 1, 301, 64, 64};
    quantised_cases("cpu", &s, SACCADE_NONE, NULL, 0, step_of(1));
}

static void decode_of_odd_dims(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 6, 2, 3, 133, 35, 21};
    quantised_cases("cpu", &s, SACCADE_NONE, "kv != 7", 0, step_of(1));
}

static void prefill(void **state)
{
    (void)state;
    const saccade_sizes s = {1, 2, 1, 130, 290, 32, 48};
    quantised_cases("cpu", &s, SACCADE_NONE, "causal()", 0, step_of(1));
}

static void decode_in_pages(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 4, 2, 1, 288, 32, 32};
    quantised_cases("cpu", &s, SACCADE_NONE, NULL, 16, step_of(1));
}

static void prefill_in_pages(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 2, 1, 100, 160, 40, 24};
    quantised_cases("cpu", &s, SACCADE_NONE, "causal()", 16, step_of(2));
}

/* MLA's shape: K of 576 dims, V the first 512 of them. */
static void wide_heads(void **state)
{
    (void)state;
    const saccade_sizes s = {1, 16, 1, 1, 270, 576, 512};
    quantised_cases("cpu", &s, SACCADE_NONE, NULL, 0, step_of(5));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode),          cmocka_unit_test(decode_of_odd_dims),
        cmocka_unit_test(prefill),         cmocka_unit_test(decode_in_pages),
        cmocka_unit_test(prefill_in_pages), cmocka_unit_test(wide_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
