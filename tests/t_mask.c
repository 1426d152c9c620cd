/* Block masks are exactly what brute force gives: named masks and random expressions, block
   sizes that divide nothing, offsets per batch, both directions; and what is proven stays
   cheap at great lengths. */
#include "mask/mask.h"
#include "support/mask_brute.h"
#include "support/random_mod.h"
#include "support/sanitizers.h"
#include "support/short_run.h"
#include "saccade_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { N = 700 };

static int32_t doc[N], prefix[2], spans[8][2];
static uint8_t tree[64 * 64];
static float weight[N];
static int32_t W = 90, P = 200;

static saccade_binding all_bindings[] = {
    {"doc", {doc, SACCADE_I32, {0, 0}, 1, {N}, {1}}},
    {"prefix", {prefix, SACCADE_I32, {0, 0}, 1, {2}, {1}}},
    {"spans", {spans, SACCADE_I32, {0, 0}, 2, {8, 2}, {2, 1}}},
    {"tree", {tree, SACCADE_BOOL, {0, 0}, 2, {64, 64}, {64, 1}}},
    {"weight", {weight, SACCADE_F32, {0, 0}, 1, {N}, {1}}},
    {"W", {&W, SACCADE_I32, {0, 0}, 0, {0}, {0}}},
    {"P", {&P, SACCADE_I32, {0, 0}, 0, {0}, {0}}},
};
enum { N_BINDINGS = sizeof all_bindings / sizeof all_bindings[0] };

static void fill_captures(void)
{
    uint64_t state = 7;
    for (int i = 0; i < N; i++) {
        doc[i] = i / 83;
        weight[i] = (float)random_mod_below(&state, 100) / 10;
    }
    for (int i = 0; i < 8; i++) {
        spans[i][0] = 80 * i;
        spans[i][1] = 80 * i + 60;
    }
    for (int i = 0; i < 64 * 64; i++)
        tree[i] = random_mod_below(&state, 3) == 0;
    prefix[0] = 50;
    prefix[1] = 333;
}

static const char *const texts[] = {
    "true",
    "false",
    "q >= kv",
    "q <= kv",
    "q >= kv && q - kv <= W",
    "abs(q - kv) <= W && abs(q - kv) % 3 == 0",
    "kv < P || q >= kv",
    "kv < prefix[b] || q >= kv",
    "doc[q] == doc[kv]",
    "doc[q] == doc[kv] && q >= kv",
    "kv >= spans[doc[q] % 8, 0] && q >= kv && kv < spans[doc[kv] % 8, 1]",
    "kv < P || tree[q % 64, (kv - P) % 64]",
    "kv < P || kv < P + 64 && tree[q, kv - P]",
    "q / 100 == kv / 100 && q % 100 >= kv % 100",
    "h == 1 ? q >= kv : abs(q - kv) < 40 * (h + 1)",
    "weight[kv] > 5.0 && kv <= q + b",
    "(q & 15) == (kv & 15) || (q >> 6) == (kv >> 6)",
    "abs(clamp(q % 32, 3, 28) - kv % 32) <= 3 && abs(clamp(q / 32, 2, 19) - kv / 32) <= 2",
    "sqrt(1.0 * q) > 0.9 * sqrt(1.0 * kv)",
    "q * 7919 % 1000 < kv",
    "2 * q < KV && kv + Q > q",
};

static const saccade_sizes sizes = {2, 3, 3, 333, 411, 8, 8};

static saccade_block_mask *create(const saccade_mod *mod, const saccade_sizes *s,
                                  const saccade_positions *at, int32_t bq, int32_t bk)
{
    saccade_error err = {0};
    saccade_block_mask *mask = NULL;
    const mod_fn *fn = mod_function(mod);
    saccade_binding used[N_BINDINGS];
    int32_t n = 0;
    const saccade_block_mask_options options = {.size = sizeof options,
                                                .block_q = bq,
                                                .block_kv = bk};
    for (uint32_t i = 0; i < fn->n_captures; i++)
        for (int j = 0; j < N_BINDINGS; j++)
            if (strcmp(all_bindings[j].name, fn->captures[i].name) == 0)
                used[n++] = all_bindings[j];
    if (saccade_block_mask_create(NULL, mod, s, at, used, n, &options, &mask, &err))
        fail_msg("%s: %s", err.where, err.message);
    return mask;
}

static uint8_t *dense_of(const saccade_mod *mod, const saccade_sizes *s,
                         const saccade_positions *at)
{
    const mod_fn *fn = mod_function(mod);
    saccade_binding used[N_BINDINGS];
    int32_t n = 0;
    for (uint32_t i = 0; i < fn->n_captures; i++)
        for (int j = 0; j < N_BINDINGS; j++)
            if (strcmp(all_bindings[j].name, fn->captures[i].name) == 0)
                used[n++] = all_bindings[j];
    return brute_dense(mod, s, at, used, n);
}

/* Dimensions that repeat one element, as long as they come: the values count, not the shape. */
static void repeated_captures(void **state)
{
    static int32_t limits[8] = {5, 90, 17, 300, 41, 2, 120, 64};
    const int64_t most = INT32_MAX;
    saccade_binding t = {
        "t", {limits, SACCADE_I32, {0, 0}, 3, {most, most, 8}, {0, 0, 1}}};
    saccade_binding one = {"t", {limits, SACCADE_I32, {0, 0}, 3, {1, 1, 8}, {8, 8, 1}}};
    const saccade_block_mask_options options = {
        .size = sizeof options, .block_q = 32, .block_kv = 16};
    const char *const text = "t[q * 1000003, kv + 5, (q + kv) % 8] > abs(q - kv)";
    saccade_mod *mod = brute_mod(text, &t, 1);
    uint8_t *live = brute_dense(mod, &sizes, NULL, &one, 1);
    saccade_error err = {0};
    saccade_block_mask *mask;
    (void)state;
    if (saccade_block_mask_create(NULL, mod, &sizes, NULL, &t, 1, &options, &mask, &err))
        fail_msg("%s: %s", err.where, err.message);
    brute_compare(mask, &sizes, 32, 16, live, text);
    saccade_block_mask_destroy(mask);
    t.tensor.shape[0] = t.tensor.shape[1] = INT64_MAX;
    assert_int_equal(
        saccade_block_mask_create(NULL, mod, &sizes, NULL, &t, 1, &options, &mask, &err),
        SACCADE_EINVAL);
    assert_string_equal(err.where, "t");
    free(live);
    saccade_mod_destroy(mod);
}

/* A capture that only dead code names may be empty, and its elements are not read. */
static void empty_captures(void **state)
{
    static const char *const text[] = {"d = doc[q]; q >= kv", "d = rows[q, kv]; q >= kv"};
    static const int64_t strides[][2] = {{8, 1}, {0, 1}, {0, 0}};
    static int32_t nothing;
    const saccade_block_mask_options options = {
        .size = sizeof options, .block_q = 32, .block_kv = 16};
    saccade_binding all[] = {{"doc", {&nothing, SACCADE_I32, {0, 0}, 1, {0}, {0}}},
                             {"rows", {&nothing, SACCADE_I32, {0, 0}, 2, {0, 8}, {8, 1}}}};
    (void)state;
    for (int n = 0; n < 6; n++) {
        saccade_binding *b = &all[n % 2];
        saccade_error err = {0};
        saccade_block_mask *mask;
        saccade_mod *mod = brute_mod(text[n % 2], all, 2);
        for (int d = 0; d < 2; d++)
            b->tensor.stride[d] = strides[n / 2][d];
        uint8_t *live = brute_dense(mod, &sizes, NULL, b, 1);
        if (saccade_block_mask_create(NULL, mod, &sizes, NULL, b, 1, &options, &mask, &err))
            fail_msg("%s: %s", err.where, err.message);
        brute_compare(mask, &sizes, 32, 16, live, text[n % 2]);
        saccade_block_mask_destroy(mask);
        free(live);
        saccade_mod_destroy(mod);
    }
}

static void named_masks_are_exact(void **state)
{
    static const int32_t blocks[][2] = {{128, 128}, {64, 32}, {37, 50}, {1, 411}, {500, 7}};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        saccade_mod *mod = brute_mod(texts[i], all_bindings, N_BINDINGS);
        uint8_t *live = dense_of(mod, &sizes, NULL);
        for (size_t j = 0; j < sizeof blocks / sizeof blocks[0]; j++) {
            if (is_short_run() && j % 2 != i % 2)
                continue;
            saccade_block_mask *mask = create(mod, &sizes, NULL, blocks[j][0], blocks[j][1]);
            brute_compare(mask, &sizes, blocks[j][0], blocks[j][1], live, texts[i]);
            saccade_block_mask_destroy(mask);
        }
        free(live);
        saccade_mod_destroy(mod);
    }
}

static void offsets_are_exact(void **state)
{
    static int32_t q_off[2] = {77, -30}, kv_off[2] = {5, 200}, one = 100;
    static const int64_t two[1] = {2};
    const saccade_tensor q = saccade_tensor_of(q_off, SACCADE_I32, 1, two);
    const saccade_tensor kv = saccade_tensor_of(kv_off, SACCADE_I32, 1, two);
    const saccade_tensor all = saccade_tensor_of(&one, SACCADE_I32, 0, NULL);
    const saccade_positions each = {.size = sizeof each, .q_offset = &q, .kv_offset = &kv};
    const saccade_positions same = {.size = sizeof same, .q_offset = &all};
    const saccade_positions *const at[2] = {&each, &same};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        saccade_mod *mod = brute_mod(texts[i], all_bindings, N_BINDINGS);
        for (int j = 0; j < 2; j++) {
            if (is_short_run() && j != (int)(i % 2))
                continue;
            uint8_t *live = dense_of(mod, &sizes, at[j]);
            saccade_block_mask *mask = create(mod, &sizes, at[j], 48, 64);
            brute_compare(mask, &sizes, 48, 64, live, texts[i]);
            saccade_block_mask_destroy(mask);
            free(live);
        }
        saccade_mod_destroy(mod);
    }
}

static void random_masks_are_exact(void **state)
{
    const char *given = getenv("SACCADE_SEED");
    const uint64_t first = given ? strtoull(given, NULL, 10) : 1;
    (void)state;
    for (uint64_t seed = first; seed < first + (is_short_run() ? 60 : 250); seed++) {
        uint64_t r = seed;
        random_mod m;
        char name[64];
        saccade_error err = {0};
        saccade_block_mask *mask;
        const saccade_sizes s = {2,
                                 4,
                                 2,
                                 1 + (int64_t)random_mod_below(&r, 90),
                                 1 + (int64_t)random_mod_below(&r, 130),
                                 8,
                                 8};
        saccade_block_mask_options options = {.size = sizeof options};
        options.block_q = 1 + (int32_t)random_mod_below(&r, 40);
        options.block_kv = 1 + (int32_t)random_mod_below(&r, 40);
        random_mod_make(seed, SACCADE_MASK, RANDOM_MOD_IN_RANGE * (int)(seed % 2),
                        2 + (int)random_mod_below(&r, 4), &s, &m);
        snprintf(name, sizeof name, "SACCADE_SEED=%llu", (unsigned long long)seed);
        if (saccade_block_mask_create(NULL, m.mod, &s, NULL, m.bindings, m.n_bindings, &options,
                                      &mask, &err))
            fail_msg("%s: %s %s", name, err.where, err.message);
        uint8_t *live = brute_dense(m.mod, &s, NULL, m.bindings, m.n_bindings);
        brute_compare(mask, &s, options.block_q, options.block_kv, live, name);
        free(live);
        saccade_block_mask_destroy(mask);
        random_mod_free(&m);
    }
}

/* A million tokens: sizes, not times. */
static void great_lengths_stay_small(void **state)
{
    static const struct {
        const char *text;
        int64_t runs_per_row;
    } cases[] = {{"q >= kv", 2}, {"q >= kv && q - kv <= W", 3}, {"kv < P || q >= kv", 4}};
    const saccade_sizes s = {1, 1, 1, 1 << 20, 1 << 20, 64, 64};
    const saccade_sizes greatest = {1, 1, 1, 1 << 30, 1 << 30, 64, 64};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        saccade_mod *mod = brute_mod(cases[i].text, all_bindings, N_BINDINGS);
        saccade_block_mask *mask = create(mod, &s, NULL, 128, 128);
        saccade_block_mask_stats stats;
        saccade_block_mask_stats_init(&stats);
        assert_int_equal(saccade_block_mask_get_stats(mask, &stats, NULL), SACCADE_OK);
        assert_int_equal(stats.blocks, (int64_t)8192 * 8192);
        assert_int_equal(stats.proven, stats.blocks);
        assert_int_equal(stats.evaluated_positions, 0);
        assert_true(stats.runs <= cases[i].runs_per_row * 8192);
        assert_true(stats.bytes < 1 << 20);
        saccade_block_mask_destroy(mask);
        mask = create(mod, &greatest, NULL, 1 << 20, 1 << 20);
        assert_int_equal(saccade_block_mask_get_stats(mask, &stats, NULL), SACCADE_OK);
        assert_int_equal(stats.blocks, 1024 * 1024);
        assert_true(stats.runs <= cases[i].runs_per_row * 1024);
        saccade_block_mask_destroy(mask);
        saccade_mod_destroy(mod);
    }
}

/* ---- a picture without memory ---- */

static int64_t address_space(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld", &pages), 1);
    fclose(file);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

static int may_grow(int64_t bytes)
{
    const struct rlimit limit = {(rlim_t)(address_space() + bytes), RLIM_INFINITY};
    return setrlimit(RLIMIT_AS, &limit) == 0;
}

/* What the heap holds in reserve too. */
static void use_up_memory(void)
{
    void *volatile block;
    may_grow(0);
    for (size_t size = 1 << 20; size >= 64; size /= 2)
        do
            block = malloc(size);
        while (block);
}

/* The status of a PNG made with so many bytes of address space more. */
static int status_with(const saccade_block_mask *mask, int64_t bytes)
{
    int answer = 0;
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        void *picture;
        size_t size;
        saccade_error err;
        use_up_memory();
        if (!may_grow(bytes))
            _exit(SACCADE_OK);
        _exit(saccade_block_mask_render(mask, 0, 0, SACCADE_PNG, 1024, &picture, &size, &err));
    }
    assert_int_equal(waitpid(child, &answer, 0), child);
    return answer;
}

/* libpng's own allocations fail too, and that is no mistake of ours. */
static void png_without_memory_says_so(void **state)
{
    (void)state;
    enum { STEP = 96 << 10, STEPS = 60 };
    const int every = is_short_run() ? 4 : 1;
    if (!HAVE_PNG || HAS_ADDRESS_SANITIZER || HAS_THREAD_SANITIZER)
        skip(); /* sanitizers need more address space than there is */
    const saccade_sizes s = {1, 1, 1, 131072, 131072, 8, 8};
    saccade_mod *mod = brute_mod("q * 7 >= kv * 3", NULL, 0);
    saccade_block_mask *mask = create(mod, &s, NULL, 128, 128);
    int n_failed = 0;
    for (int i = 0; i < STEPS; i += every) {
        const int status = status_with(mask, (int64_t)i * STEP);
        if (status != SACCADE_OK && status != SACCADE_ENOMEM << 8)
            fail_msg("with %d KiB more: status %d", i * STEP >> 10, status >> 8);
        n_failed += status != SACCADE_OK;
    }
    assert_in_range(n_failed, 1, STEPS - 1);
    saccade_block_mask_destroy(mask);
    saccade_mod_destroy(mod);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(named_masks_are_exact),
        cmocka_unit_test(repeated_captures),
        cmocka_unit_test(empty_captures),
        cmocka_unit_test(offsets_are_exact),
        cmocka_unit_test(random_masks_are_exact),
        cmocka_unit_test(great_lengths_stay_small),
        cmocka_unit_test(png_without_memory_says_so),
    };
    fill_captures();
    return cmocka_run_group_tests_name("mask", tests, NULL, NULL);
}
