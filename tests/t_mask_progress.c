/* Block masks tell how far they are, by growing fractions, on the caller's thread, up to 1. One
 * that is told to stop does, and what is made is the same either way. */
#include "mask/mask.h"
#include "support/mask_brute.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const char SLOW[] = "(q*2654435 + kv*40503) % 7 < 3"; /* which ranges prove nothing of */

typedef struct listener {
    pthread_t thread;
    double last, stop_from; /* 2: never */
    int calls, is_wrong;
} listener;

static int listen_to(void *user, double fraction)
{
    listener *l = user;
    l->calls++;
    l->is_wrong |= fraction < l->last || fraction > 1;
    l->is_wrong |= !pthread_equal(pthread_self(), l->thread);
    l->last = fraction;
    return fraction >= l->stop_from;
}

static saccade_status make(const char *text, int64_t n, int32_t threads, listener *l,
                           saccade_block_mask **out, saccade_error *err)
{
    const saccade_sizes sizes = {1, 2, 2, n, n, 8, 8};
    const saccade_context_options options = {.size = sizeof options, .threads = threads};
    const saccade_block_mask_options told = {.size = sizeof told,
                                             .progress = l ? listen_to : NULL,
                                             .progress_user = l};
    saccade_context *context;
    saccade_mod *mod = brute_mod(text, NULL, 0);
    assert_int_equal(saccade_context_create(&options, &context, err), SACCADE_OK);
    const saccade_status status =
        saccade_block_mask_create(context, mod, &sizes, NULL, NULL, 0, &told, out, err);
    saccade_context_destroy(context);
    saccade_mod_destroy(mod);
    return status;
}

static void fractions_grow_to_one(void **state)
{
    (void)state;
    static const char *const texts[] = {SLOW, "q >= kv", "q * kv % 5 == h", "true"};
    for (int i = 0; i < 4; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            listener l = {.thread = pthread_self(), .stop_from = 2};
            saccade_block_mask *told = NULL, *untold = NULL;
            saccade_error err;
            assert_int_equal(make(texts[i], 9000, threads, &l, &told, &err), SACCADE_OK);
            assert_int_equal(make(texts[i], 9000, threads, NULL, &untold, &err), SACCADE_OK);
            assert_int_equal(l.is_wrong, 0);
            assert_true(l.calls >= 1);
            assert_true(l.last == 1);
            saccade_block_mask_stats a = {.size = sizeof a}, b = {.size = sizeof b};
            assert_int_equal(saccade_block_mask_get_stats(told, &a, NULL), SACCADE_OK);
            assert_int_equal(saccade_block_mask_get_stats(untold, &b, NULL), SACCADE_OK);
            assert_int_equal(a.full, b.full);
            assert_int_equal(a.partial, b.partial);
            assert_int_equal(a.evaluated_positions, b.evaluated_positions);
            saccade_block_mask_destroy(told);
            saccade_block_mask_destroy(untold);
        }
    }
}

/* A million positions take minutes; the first word ends it. */
static void a_build_stops_when_told_to(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 2; threads++) {
        listener l = {.thread = pthread_self(), .stop_from = 0};
        saccade_block_mask *mask = NULL;
        saccade_error err;
        assert_int_equal(make(SLOW, 1 << 20, threads, &l, &mask, &err), SACCADE_ESTOPPED);
        assert_int_equal(err.status, SACCADE_ESTOPPED);
        assert_non_null(strstr(err.message, "stopped"));
        assert_null(mask);
        assert_int_equal(l.calls, 1);
        assert_true(l.last < 1);
    }
    assert_string_equal(saccade_status_name(SACCADE_ESTOPPED), "stopped");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fractions_grow_to_one),
        cmocka_unit_test(a_build_stops_when_told_to),
    };
    return cmocka_run_group_tests_name("mask_progress", tests, NULL, NULL);
}
