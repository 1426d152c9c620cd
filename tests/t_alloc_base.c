/* Every allocation of src/base failing in turn. */
#include "base/arena.h"
#include "base/dynlib.h"
#include "base/strings.h"
#include "support/fail_alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static saccade_status use_arena(void *arg, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    arena a;
    (void)arg;
    arena_init(&a);
    for (size_t size = 1; size < 100000; size *= 3)
        FAIL_IF_NULL_GOTO(arena_alloc(&a, size));
    FAIL_IF_NULL_GOTO(arena_strdup(&a, "some text"));
out:
    arena_free(&a);
    return status;
}

static saccade_status use_text(void *arg, saccade_error *err)
{
    strbuf sb;
    (void)arg;
    strbuf_init(&sb, 0);
    for (int i = 0; i < 1000; i++)
        strbuf_printf(&sb, "%d,", i);
    const saccade_status status = strbuf_status(&sb, err);
    strbuf_free(&sb);
    return status;
}

static saccade_status use_library(void *arg, saccade_error *err)
{
    static const char *const names[] = {"libm.so.6", NULL};
    dynlib *lib = NULL;
    (void)arg;
    TRY(dynlib_open(names, "maths", &lib, err));
    dynlib_close(lib);
    return SACCADE_OK;
}

static void base_survives_failing_allocations(void **state)
{
    (void)state;
    assert_true(fail_alloc_sweep("arena", use_arena, NULL) >= 3);
    assert_true(fail_alloc_sweep("text", use_text, NULL) >= 3);
    assert_int_equal(fail_alloc_sweep("library", use_library, NULL), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base_survives_failing_allocations),
    };
    return cmocka_run_group_tests_name("alloc base", tests, NULL, NULL);
}
