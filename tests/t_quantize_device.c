/* Attention over quantised K and V on a CUDA device: support/quantised_case.h. */
#include "support/device_case.h"
#include "support/quantised_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void run(const saccade_sizes *s, saccade_dtype dtype, const char *mask, int step)
{
    if (!has_device())
        skip();
    quantised_cases("cuda", s, dtype, mask, 0, step);
}

static void decode(void **state)
{
    const saccade_sizes s = {2, 8, 2, 1, 3001, 128, 128};
    (void)state;
    run(&s, SACCADE_BF16, NULL, 1);
}

static void decode_of_small_heads(void **state)
{
    const saccade_sizes s = {3, 8, 4, 2, 333, 64, 128};
    (void)state;
    run(&s, SACCADE_BF16, "kv % 7 != 3", 5);
}

static void decode_of_a_window(void **state)
{
    const saccade_sizes s = {40, 8, 4, 1, 200, 128, 64};
    (void)state;
    run(&s, SACCADE_BF16, "kv >= 37 && kv < 190", 7);
}

static void prefill(void **state)
{
    const saccade_sizes s = {1, 4, 2, 150, 290, 64, 64};
    (void)state;
    run(&s, SACCADE_NONE, "causal()", 5);
}

static void odd_dims(void **state)
{
    const saccade_sizes s = {2, 4, 2, 3, 190, 36, 50};
    (void)state;
    run(&s, SACCADE_NONE, NULL, 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode),   cmocka_unit_test(decode_of_small_heads),
        cmocka_unit_test(prefill),  cmocka_unit_test(decode_of_a_window),
        cmocka_unit_test(odd_dims),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
