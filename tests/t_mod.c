/* The language: what texts mean (as printed nodes), what is refused, and with which words. */
#include "mod/mod.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* the text parsed, and bound with one dtype for all captures. */
static saccade_status compile(saccade_kind kind, const char *text, saccade_dtype dtype,
                              saccade_mod **out, saccade_error *err)
{
    saccade_mod *mod;
    saccade_capture captures[MOD_MAX_CAPTURES];
    saccade_status status = saccade_mod_parse(kind, text, strlen(text), &mod, err);
    if (status != SACCADE_OK)
        return status;
    const int32_t n = saccade_mod_capture_count(mod);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(mod, i);
        captures[i].dtype = dtype;
    }
    status = saccade_mod_bind(mod, captures, n, out, err);
    saccade_mod_destroy(mod);
    return status;
}

static void means(saccade_kind kind, const char *text, const char *printed)
{
    saccade_error err = {0};
    saccade_mod *mod = NULL;
    char out[2048];
    if (compile(kind, text, SACCADE_I32, &mod, &err) != SACCADE_OK)
        fail_msg("%s: %d:%d: %s", text, err.line, err.column, err.message);
    assert_true(saccade_mod_print(mod, out, sizeof out) < sizeof out);
    assert_string_equal(out, printed);
    saccade_mod_destroy(mod);
}

static void precedence_is_cs(void **state)
{
    (void)state;
    means(SACCADE_MASK, "q >= kv", "kv <= q\n");
    means(SACCADE_MASK, "(q & 1) == 0 || q + 2 * kv << 1 < 9 && !(kv == 3)",
          "(q & 1) == 0 || q + 2 * kv << 1 < 9 && !(kv == 3)\n");
    means(SACCADE_MASK, "q - (kv - 1) == (q - kv) - 1", "q - (kv - 1) == q - kv - 1\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(precedence_is_cs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
