/* The public structs as callers of other versions meet them: smaller and larger ones, what the
 * layout table says of them, and calls with NULL where a pointer is expected. */
#include "saccade_measure.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* ---- versions ---- */

/* numbers that a preprocessor can compare */
#if SACCADE_VERSION_MAJOR < 0 || SACCADE_VERSION_MINOR < 0 || SACCADE_VERSION_PATCH < 0 \
    || SACCADE_ABI < 2
#error "a version below any that was made"
#endif

#define TEXT(x) #x
#define DOTTED(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

static void versions_agree(void **unused)
{
    (void)unused;
    assert_string_equal(
        SACCADE_VERSION,
        DOTTED(SACCADE_VERSION_MAJOR, SACCADE_VERSION_MINOR, SACCADE_VERSION_PATCH));
    assert_string_equal(SACCADE_VERSION, SACCADE_PROJECT_VERSION); /* CMakeLists.txt */
    assert_string_equal(saccade_version(), SACCADE_VERSION);
    assert_int_equal(saccade_abi(), SACCADE_ABI);
}

/* ---- sizes ---- */

/* A caller built for a library whose problem has one member more. */
typedef struct next_problem {
    saccade_problem known;
    uint64_t unknown;
} next_problem;

static saccade_status plan_of(const saccade_problem *p, saccade_error *err)
{
    saccade_plan *plan = NULL;
    const saccade_status status = saccade_plan_create(NULL, p, &plan, err);
    assert_true((status == SACCADE_OK) == (plan != NULL));
    saccade_plan_destroy(plan);
    return status;
}

static void larger_structs(void **unused)
{
    (void)unused;
    saccade_error err = {0};
    next_problem next;
    memset(&next, 0, sizeof next);
    saccade_problem_init(&next.known);
    next.known.size = sizeof next;
    assert_int_equal(plan_of(&next.known, &err), SACCADE_OK);
    next.unknown = 1;
    assert_int_equal(plan_of(&next.known, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "problem");
    assert_non_null(strstr(err.message, "newer"));
}

/* What lies past a smaller struct is not read: here it would be refused. */
static void smaller_structs(void **unused)
{
    (void)unused;
    saccade_error err = {0};
    saccade_problem p;
    saccade_problem_init(&p);
    p.backend = "no such back end";
    p.arch = "sm_1";
    assert_int_equal(plan_of(&p, &err), SACCADE_EINVAL);
    p.size = offsetof(saccade_problem, backend);
    assert_int_equal(plan_of(&p, &err), SACCADE_OK);
    p.size = 0;
    assert_int_equal(plan_of(&p, &err), SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "got size 0"));
    p.size = SIZE_MAX;
    assert_int_equal(plan_of(&p, &err), SACCADE_EINVAL);
}

static void every_struct_has_its_size(void **unused)
{
    (void)unused;
    saccade_error err = {0};
    saccade_context *context = NULL;
    saccade_context_options options;
    saccade_ceilings ceilings;
    saccade_ladder_options ladder;
    memset(&options, 0, sizeof options);
    memset(&ceilings, 0, sizeof ceilings);
    memset(&ladder, 0, sizeof ladder);
    assert_int_equal(saccade_context_create(&options, &context, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "context options");
    assert_int_equal(saccade_ladder_run(&ladder, NULL, NULL, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_context_create(NULL, &context, &err), SACCADE_OK);
    assert_int_equal(saccade_measure_ceilings(context, &ceilings, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "ceilings");
    saccade_context_destroy(context);
}

/* A caller of an older version gets what its struct holds, one of a newer zeros besides. */
static void statistics_fit_the_caller(void **unused)
{
    (void)unused;
    static const saccade_sizes sizes = {1, 1, 1, 256, 256, 8, 8};
    struct {
        saccade_block_mask_stats known;
        int64_t unknown;
    } next = {.unknown = 7};
    saccade_block_mask_stats older;
    saccade_mod *generic, *mod;
    saccade_block_mask *mask;
    assert_int_equal(saccade_mod_parse(SACCADE_MASK, "q >= kv", 7, &generic, NULL), SACCADE_OK);
    assert_int_equal(saccade_mod_bind(generic, NULL, 0, &mod, NULL), SACCADE_OK);
    assert_int_equal(
        saccade_block_mask_create(NULL, mod, &sizes, NULL, NULL, 0, NULL, &mask, NULL),
        SACCADE_OK);
    memset(&older, 0x55, sizeof older);
    older.size = offsetof(saccade_block_mask_stats, partial);
    assert_int_equal(saccade_block_mask_get_stats(mask, &older, NULL), SACCADE_OK);
    assert_int_equal(older.size, offsetof(saccade_block_mask_stats, partial));
    assert_int_equal(older.full, 1);
    assert_int_equal(older.partial, 0x5555555555555555);
    next.known.size = sizeof next;
    assert_int_equal(saccade_block_mask_get_stats(mask, &next.known, NULL), SACCADE_OK);
    assert_int_equal(next.known.partial, 2);
    assert_int_equal(next.unknown, 0);
    older.size = 0;
    assert_int_equal(saccade_block_mask_get_stats(mask, &older, NULL), SACCADE_EINVAL);
    assert_int_equal(saccade_block_mask_get_stats(mask, NULL, NULL), SACCADE_EINVAL);
    saccade_block_mask_destroy(mask);
    saccade_mod_destroy(mod);
    saccade_mod_destroy(generic);
}

/* ---- layout ---- */

static const saccade_layout_entry *entry_of(const char *record, const char *member)
{
    const saccade_layout_entry *e;
    for (int32_t i = 0; (e = saccade_layout(i)); i++)
        if (strcmp(e->record, record) == 0 && !e->member == !member
            && (!member || strcmp(e->member, member) == 0))
            return e;
    return NULL;
}

static void layout_is_the_compilers(void **unused)
{
    (void)unused;
    static const char *const sized[] = {
        "saccade_problem",         "saccade_positions",          "saccade_forward_args",
        "saccade_context_options", "saccade_block_mask_options", "saccade_block_mask_stats",
        "saccade_ladder_options",  "saccade_ladder_row",         "saccade_ceilings",
        "saccade_device_ceilings", "saccade_merge_args",         "saccade_backward_args",
        "saccade_tangent_args",    "saccade_quantize_args"};
    for (size_t i = 0; i < sizeof sized / sizeof *sized; i++) {
        const saccade_layout_entry *size = entry_of(sized[i], "size");
        assert_non_null(size);
        assert_int_equal(size->offset, 0);
        assert_int_equal(size->bytes, sizeof(size_t));
    }
    assert_int_equal(entry_of("saccade_tensor", NULL)->bytes, sizeof(saccade_tensor));
    assert_int_equal(entry_of("saccade_tensor", "stride")->offset,
                     offsetof(saccade_tensor, stride));
    assert_int_equal(entry_of("saccade_error", "excerpt")->bytes, 2 * 96);
    assert_int_equal(entry_of("saccade_sizes", "Dv")->offset, offsetof(saccade_sizes, Dv));
    assert_int_equal(entry_of("saccade_problem", "arch")->offset,
                     offsetof(saccade_problem, arch));
    assert_null(saccade_layout(-1));
    assert_null(saccade_layout(1 << 20));
}

/* Members follow each other without holes larger than alignment: none was left out. */
static void layout_has_every_member(void **unused)
{
    (void)unused;
    const saccade_layout_entry *e, *record = NULL;
    int32_t end = 0;
    for (int32_t i = 0;; i++) {
        e = saccade_layout(i);
        if (record && (!e || !e->member))
            assert_true(record->bytes - end < 8);
        if (!e)
            break;
        if (!e->member) {
            record = e;
            end = 0;
            continue;
        }
        assert_string_equal(e->record, record->record);
        assert_true(e->offset >= end && e->offset - end < 8);
        end = e->offset + e->bytes;
    }
}

/* ---- NULL ---- */

static void null_is_an_error(void **unused)
{
    (void)unused;
    const saccade_run *runs = NULL;
    saccade_sizes sizes = {1, 1, 1, 4, 4, 8, 8};
    saccade_error err = {0};
    char text[4] = "abc", *explained = NULL;
    assert_int_equal(saccade_mod_kind(NULL), 0);
    assert_int_equal(saccade_mod_capture_count(NULL), 0);
    assert_null(saccade_mod_capture(NULL, 0).name);
    assert_int_equal(saccade_mod_print(NULL, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_int_equal(saccade_context_create(NULL, NULL, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_plan_workspace(NULL, &sizes), 0);
    assert_int_equal(saccade_plan_explain(NULL, &explained, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_plan_prepare(NULL, NULL, &err), SACCADE_EINVAL);
    assert_int_equal(saccade_block_mask_row(NULL, 0, 0, 0, 0, &runs), -1);
    assert_int_equal(saccade_block_mask_row(NULL, 0, 0, 0, 0, NULL), -1);
    saccade_problem p;
    saccade_plan *plan;
    saccade_problem_init(&p);
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    assert_int_equal(saccade_plan_workspace(plan, NULL), 0);
    assert_int_equal(saccade_plan_explain(plan, NULL, &err), SACCADE_EINVAL);
    saccade_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(larger_structs),
        cmocka_unit_test(smaller_structs),
        cmocka_unit_test(every_struct_has_its_size),
        cmocka_unit_test(statistics_fit_the_caller),
        cmocka_unit_test(layout_is_the_compilers),
        cmocka_unit_test(layout_has_every_member),
        cmocka_unit_test(versions_agree),
        cmocka_unit_test(null_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
