/* Attention over quantised K and V on a CUDA device: support/quantised_case.h. */
#include "support/device_case.h"
#include "support/quantised_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void run_pages(const saccade_sizes *s, saccade_dtype dtype, const char *mask,
                      int32_t page, int step)
{
    if (!has_device())
        skip();
    quantised_cases("cuda", s, dtype, mask, page, step);
}

static void run(const saccade_sizes *s, saccade_dtype dtype, const char *mask, int step)
{
    run_pages(s, dtype, mask, 0, step);
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

static void decode_of_pages(void **state)
{
    const saccade_sizes s = {2, 8, 2, 1, 1008, 128, 128}, few = {3, 8, 2, 3, 300, 64, 128};
    (void)state;
    run_pages(&s, SACCADE_BF16, NULL, 16, 1);
    run_pages(&s, SACCADE_F16, NULL, 48, 5);
    run_pages(&few, SACCADE_BF16, "kv % 5 != 3", 1, 5);
    run_pages(&few, SACCADE_F16, "kv >= 30", 3, 7);
}

static void decode_of_large_heads(void **state)
{
    const saccade_sizes s = {1, 4, 2, 1, 300, 256, 256}, narrow = {2, 6, 2, 2, 200, 80, 48};
    (void)state;
    run(&s, SACCADE_BF16, NULL, 5);
    run(&s, SACCADE_F16, NULL, 7);
    run(&narrow, SACCADE_BF16, "causal()", 5);
}

static void prefill_of_pages(void **state)
{
    const saccade_sizes s = {2, 4, 2, 70, 288, 64, 64};
    (void)state;
    run_pages(&s, SACCADE_NONE, "causal()", 16, 5);
    run_pages(&s, SACCADE_NONE, NULL, 3, 7);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode),
        cmocka_unit_test(decode_of_small_heads),
        cmocka_unit_test(prefill),
        cmocka_unit_test(decode_of_a_window),
        cmocka_unit_test(odd_dims),
        cmocka_unit_test(decode_of_pages),
        cmocka_unit_test(decode_of_large_heads),
        cmocka_unit_test(prefill_of_pages),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
