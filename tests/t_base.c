/* Arena, text buffer, errors, hash, levels, loops, libraries and the file cache. */
#include "base/arena.h"
#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/dynlib.h"
#include "base/filecache.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "base/strings.h"

#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static saccade_status fails_at(saccade_error *err)
{
    FAIL_AT(1, SACCADE_EPARSE, "mask", 3, 14, "got %s, expected %s", "'x'", "a number");
    return SACCADE_OK;
}

static saccade_status forwards(saccade_error *err)
{
    TRY(fails_at(err));
    return SACCADE_OK;
}

static void errors_carry_place_and_message(void **state)
{
    (void)state;
    saccade_error err;
    assert_int_equal(forwards(&err), SACCADE_EPARSE);
    assert_int_equal(err.status, SACCADE_EPARSE);
    assert_int_equal(err.line, 3);
    assert_int_equal(err.column, 14);
    assert_string_equal(err.where, "mask");
    assert_string_equal(err.message, "got 'x', expected a number");
    assert_int_equal(forwards(NULL), SACCADE_EPARSE);
}

static void long_messages_are_cut(void **state)
{
    (void)state;
    char text[2000];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    saccade_error err;
    status_fail_at(&err, SACCADE_EINVAL, text, 1, 1, "%s", text);
    assert_int_equal(strlen(err.message), sizeof err.message - 1);
    assert_int_equal(strlen(err.where), sizeof err.where - 1);
}

static void messages_are_one_line(void **state)
{
    (void)state;
    saccade_error err;
    status_fail_at(&err, SACCADE_EINVAL, "a\nb", 0, 0, "got '%s', expected é",
                   "\x1b[31m\x7f;\n");
    assert_string_equal(err.where, "a?b");
    assert_string_equal(err.message, "got '?[31m?;?', expected é");
}

/* What is no well-formed character, or one of U+0080 to U+009F, which terminals obey. */
static void messages_have_no_bytes_that_terminals_obey(void **state)
{
    static const struct {
        const char *text, *shown;
    } texts[] = {
        {"\xc2\x9b"
         "2J",
         "??2J"},
        {"\xc2\x80 \xc2\x9f \xc2\xa0", "?? ?? \xc2\xa0"},
        {"\x9b"
         "2J \x80 \xff",
         "?2J ? ?"},
        {"\xc0\x9b \xc1\xbf", "?? ??"}, /* overlong */
        {"\xe0\x82\x9b \xe0\xa0\x80", "??? \xe0\xa0\x80"},
        {"\xf0\x80\x82\x9b \xf0\x90\x80\x80", "???? \xf0\x90\x80\x80"},
        {"\xed\x9f\xbf \xed\xa0\x80", "\xed\x9f\xbf ???"}, /* surrogates */
        {"\xf4\x8f\xbf\xbf \xf4\x90\x80\x80", "\xf4\x8f\xbf\xbf ????"},
        {"\xc3", "?"}, /* cut */
        {"\xe2\x82 \xe2", "?? ?"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        saccade_error err;
        status_fail_at(&err, SACCADE_EINVAL, texts[i].text, 0, 0, "%s", texts[i].text);
        assert_string_equal(err.where, texts[i].shown);
        assert_string_equal(err.message, texts[i].shown);
    }
}

static void arena_gives_zeroed_aligned_memory(void **state)
{
    (void)state;
    arena a;
    arena_init(&a);
    for (size_t size = 0; size < 3000; size += 7) {
        unsigned char *p = arena_alloc(&a, size);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        for (size_t i = 0; i < size; i++)
            assert_int_equal(p[i], 0);
        memset(p, 0xa5, size);
    }
    assert_non_null(arena_alloc(&a, 5 * 1024 * 1024));
    assert_string_equal(arena_strdup(&a, "causal"), "causal");
    assert_string_equal(arena_strndup(&a, "causal", 3), "cau");
    assert_string_equal(arena_strndup(&a, "ab", 9), "ab");
    assert_null(arena_alloc(&a, SIZE_MAX));
    assert_null(arena_array(&a, SIZE_MAX / 4, 8));
    arena_free(&a);
    assert_null(a.head);
    arena_free(&a);
}

static void text_grows_up_to_its_limit(void **state)
{
    (void)state;
    strbuf sb;
    strbuf_init(&sb, 1000);
    assert_string_equal(strbuf_text(&sb), "");
    for (int i = 0; i < 100; i++)
        assert_true(strbuf_printf(&sb, "%03d", i));
    assert_int_equal(sb.length, 300);
    assert_true(strbuf_puts(&sb, "end") && strbuf_putc(&sb, '!'));
    assert_string_equal(strbuf_text(&sb) + 297, "099end!");
    char big[900];
    assert_false(strbuf_add(&sb, memset(big, 'x', sizeof big), sizeof big));
    assert_false(strbuf_putc(&sb, 'y'));
    assert_string_equal(strbuf_text(&sb) + 297, "099end!");
    saccade_error err;
    assert_int_equal(strbuf_status(&sb, &err), SACCADE_ELIMIT);
    assert_non_null(strstr(err.message, "1000"));
    strbuf_free(&sb);
    char *empty = strbuf_steal(&sb);
    assert_string_equal(empty, "");
    free(empty);
}

/* In a locale with a decimal comma, where there is one, as in others. */
static void numbers_have_points(void **state)
{
    static const struct {
        double value;
        int digits;
        const char *text;
    } list[] = {{0.125, 9, "0.125"},   {-2.5e-20, 6, "-2.5e-20"}, {90, 6, "90"},
                {INFINITY, 6, "inf"}, {1.0 / 3, 6, "0.333333"},  {1e30, 6, "1e+30"}};
    (void)state;
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8"))
        (void)setlocale(LC_NUMERIC, "de_DE.utf8");
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        strbuf sb;
        strbuf_init(&sb, 0);
        assert_true(strbuf_number(&sb, list[i].digits, list[i].value));
        assert_string_equal(strbuf_text(&sb), list[i].text);
        strbuf_free(&sb);
    }
    setlocale(LC_NUMERIC, "C");
}

static void hash_of(const void *bytes, size_t size, char hex[HASH_HEX_SIZE])
{
    hash128 h;
    hash_init(&h);
    hash_add(&h, bytes, size);
    hash_hex(&h, hex);
}

static void hashes_tell_pieces_apart(void **state)
{
    (void)state;
    char a[HASH_HEX_SIZE], b[HASH_HEX_SIZE];
    hash128 h;
    hash_init(&h);
    hash_add_text(&h, "ab");
    hash_add_text(&h, "c");
    hash_hex(&h, a);
    hash_init(&h);
    hash_add_text(&h, "a");
    hash_add_text(&h, "bc");
    hash_hex(&h, b);
    assert_int_equal(strlen(a), 32);
    assert_string_not_equal(a, b);
    unsigned char bytes[64] = {0};
    hash_of(bytes, sizeof bytes, a);
    for (size_t i = 0; i < sizeof bytes * 8; i++) {
        bytes[i / 8] ^= (unsigned char)(1u << i % 8);
        hash_of(bytes, sizeof bytes, b);
        assert_string_not_equal(a, b);
        bytes[i / 8] ^= (unsigned char)(1u << i % 8);
    }
    hash_of(bytes, 63, b);
    assert_string_not_equal(a, b);
}

static void level_is_lowered_by_the_environment(void **state)
{
    (void)state;
    cpu_level level;
    saccade_error err;
    const char *before = getenv("SACCADE_LEVEL");
    char *saved = before == NULL ? NULL : strdup(before);
    setenv("SACCADE_LEVEL", "portable", 1);
    assert_int_equal(cpu_level_allowed(&level, &err), SACCADE_OK);
    assert_int_equal(level, CPU_PORTABLE);
    setenv("SACCADE_LEVEL", "amx", 1);
    assert_int_equal(cpu_level_allowed(&level, &err), SACCADE_OK);
    assert_int_equal(level, cpu_features_get()->level);
    setenv("SACCADE_LEVEL", "sse9", 1);
    assert_int_equal(cpu_level_allowed(&level, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "SACCADE_LEVEL");
    assert_non_null(strstr(err.message, "got 'sse9' in the environment"));
    unsetenv("SACCADE_LEVEL");
    assert_int_equal(cpu_level_allowed(&level, &err), SACCADE_OK);
    assert_int_equal(level, cpu_features_get()->level);
    if (saved != NULL)
        setenv("SACCADE_LEVEL", saved, 1);
    free(saved);
}

enum { N_ITEMS = 1000, MAX_THREADS = 64 };

typedef struct tally {
    int calls[N_ITEMS]; /* each written by the one call of its item */
    int64_t thread_sum[MAX_THREADS];
} tally;

static void count(void *arg, int64_t item, int thread)
{
    tally *t = arg;
    t->calls[item]++;
    t->thread_sum[thread] += item;
}

static void loops_visit_every_item_once(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 4; threads++) {
        tally t = {0};
        par_for(N_ITEMS, threads, count, &t);
        int64_t sum = 0;
        for (int i = 0; i < N_ITEMS; i++)
            assert_int_equal(t.calls[i], 1);
        for (int i = 0; i < MAX_THREADS; i++)
            sum += i < threads ? t.thread_sum[i] : 0;
        assert_int_equal(sum, N_ITEMS * (N_ITEMS - 1) / 2);
    }
    assert_true(par_max_threads() >= 1);
    par_for(0, 0, count, NULL);
}

static void libraries_load_by_the_first_name_found(void **state)
{
    (void)state;
    static const char *const good[] = {"libsaccade-absent.so", "libm.so.6", NULL};
    static const char *const bad[] = {"libsaccade-absent.so.1", "libsaccade-absent.so", NULL};
    dynlib *lib = NULL;
    saccade_error err;
    assert_int_equal(dynlib_open(good, "maths", &lib, &err), SACCADE_OK);
    assert_string_equal(dynlib_name(lib), "libm.so.6");
    assert_non_null(dynlib_find(lib, "cos"));
    assert_null(dynlib_find(lib, "saccade_no_such_symbol"));
    dynlib_close(lib);
    lib = NULL;
    assert_int_equal(dynlib_open(bad, "CUDA driver", &lib, &err), SACCADE_EBACKEND);
    assert_null(lib);
    assert_string_equal(err.message, "CUDA driver: not found, tried libsaccade-absent.so.1, "
                                     "libsaccade-absent.so");
    dynlib_close(NULL);
}

/* a cache folder of this test's own; returns its path. */
static const char *fresh_cache(void)
{
    static char folder[64];
    strcpy(folder, "/tmp/saccade-test-XXXXXX");
    assert_non_null(mkdtemp(folder));
    setenv("SACCADE_CACHE_DIR", folder, 1);
    return folder;
}

static void entry_file(char path[128], const char *folder, const char *key)
{
    snprintf(path, 128, "%s/%s", folder, key);
}

static void flip_byte(const char *path, long offset)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, offset, SEEK_SET);
    const int c = fgetc(f);
    fseek(f, offset, SEEK_SET);
    fputc(c ^ 0x10, f);
    fclose(f);
}

static void cache_returns_what_was_put(void **state)
{
    (void)state;
    const char *folder = fresh_cache();
    char path[128];
    void *bytes = NULL;
    size_t size = 0;
    saccade_error err;
    assert_false(filecache_get("k1", &bytes, &size));
    assert_int_equal(filecache_put("k1", "hello", 5, &err), SACCADE_OK);
    assert_int_equal(filecache_put("k1", "world!", 6, &err), SACCADE_OK);
    assert_true(filecache_get("k1", &bytes, &size));
    assert_int_equal(size, 6);
    assert_memory_equal(bytes, "world!", 6);
    free(bytes);
    assert_int_equal(filecache_put("empty", "", 0, &err), SACCADE_OK);
    assert_true(filecache_get("empty", &bytes, &size));
    assert_int_equal(size, 0);
    free(bytes);
    assert_int_equal(filecache_put("../k", "x", 1, &err), SACCADE_EINVAL);
    assert_int_equal(filecache_put("", "x", 1, &err), SACCADE_EINVAL);
    entry_file(path, folder, "k1");
    unlink(path);
    entry_file(path, folder, "empty");
    unlink(path);
    assert_int_equal(rmdir(folder), 0); /* nothing written aside is left */
}

static void damaged_and_foreign_entries_are_ignored(void **state)
{
    (void)state;
    const char *folder = fresh_cache();
    char path[128], other[128];
    void *bytes = NULL;
    size_t size = 0;
    entry_file(path, folder, "k");
    entry_file(other, folder, "other");
    static const long offsets[] = {0, 8, 20, 56, 60};
    for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
        assert_int_equal(filecache_put("k", "0123456789", 10, NULL), SACCADE_OK);
        flip_byte(path, offsets[i]);
        assert_false(filecache_get("k", &bytes, &size));
    }
    assert_int_equal(filecache_put("k", "0123456789", 10, NULL), SACCADE_OK);
    assert_int_equal(truncate(path, 60), 0);
    assert_false(filecache_get("k", &bytes, &size));
    assert_int_equal(filecache_put("k", "0123456789", 10, NULL), SACCADE_OK);
    chmod(path, 0666); /* others could have written it */
    assert_false(filecache_get("k", &bytes, &size));
    chmod(path, 0600);
    assert_true(filecache_get("k", &bytes, &size));
    free(bytes);
    assert_int_equal(rename(path, other), 0); /* a good entry under a wrong key */
    assert_false(filecache_get("other", &bytes, &size));
    assert_int_equal(symlink(other, path), 0);
    assert_false(filecache_get("k", &bytes, &size));
    unlink(path);
    unlink(other);
    rmdir(folder);
}

static void cache_without_a_folder_is_an_error(void **state)
{
    (void)state;
    saccade_error err;
    setenv("SACCADE_CACHE_DIR", "/proc/no-such-place/x", 1);
    assert_int_equal(filecache_put("k", "x", 1, &err), SACCADE_EIO);
    assert_non_null(strstr(err.message, "/proc/no-such-place"));
}

static void clock_does_not_go_back(void **state)
{
    (void)state;
    const int64_t before = clock_ns();
    assert_true(clock_ns() >= before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_carry_place_and_message),
        cmocka_unit_test(long_messages_are_cut),
        cmocka_unit_test(messages_are_one_line),
        cmocka_unit_test(messages_have_no_bytes_that_terminals_obey),
        cmocka_unit_test(arena_gives_zeroed_aligned_memory),
        cmocka_unit_test(text_grows_up_to_its_limit),
        cmocka_unit_test(numbers_have_points),
        cmocka_unit_test(hashes_tell_pieces_apart),
        cmocka_unit_test(level_is_lowered_by_the_environment),
        cmocka_unit_test(loops_visit_every_item_once),
        cmocka_unit_test(libraries_load_by_the_first_name_found),
        cmocka_unit_test(cache_returns_what_was_put),
        cmocka_unit_test(damaged_and_foreign_entries_are_ignored),
        cmocka_unit_test(cache_without_a_folder_is_an_error),
        cmocka_unit_test(clock_does_not_go_back),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
