/* The block mask of every mask of the prelude is what brute force gives, position by position,
   for blocks that divide nothing; no variant can be left out of the list unnoticed. */
#include "support/mask_brute.h"
#include "support/random_mod.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { Q = 250, KV = 275, N = 300 };

static const saccade_sizes sizes = {2, 2, 2, Q, KV, 8, 8};
static int32_t doc[N], start[8], prefix_doc[8], prefix[2] = {20, 131}, image[N], seen[4][2];
static int32_t spans[3][2] = {{10, 60}, {100, 180}, {181, 190}}, tiles[2 * 2 * 8 * 3];
static uint8_t is_global[N], ancestor[Q * 64];

static const saccade_binding bindings[] = {
    {"doc", {doc, SACCADE_I32, {0, 0}, 1, {N}, {1}}},
    {"start", {start, SACCADE_I32, {0, 0}, 1, {8}, {1}}},
    {"prefix_doc", {prefix_doc, SACCADE_I32, {0, 0}, 1, {8}, {1}}},
    {"prefix", {prefix, SACCADE_I32, {0, 0}, 1, {2}, {1}}},
    {"image", {image, SACCADE_I32, {0, 0}, 1, {N}, {1}}},
    {"seen", {seen, SACCADE_I32, {0, 0}, 2, {4, 2}, {2, 1}}},
    {"spans", {spans, SACCADE_I32, {0, 0}, 2, {3, 2}, {2, 1}}},
    {"tiles", {tiles, SACCADE_I32, {0, 0}, 4, {2, 2, 8, 3}, {48, 24, 3, 1}}},
    {"is_global", {is_global, SACCADE_BOOL, {0, 0}, 1, {N}, {1}}},
    {"ancestor", {ancestor, SACCADE_BOOL, {0, 0}, 2, {Q, 64}, {64, 1}}},
};
enum { N_BINDINGS = sizeof bindings / sizeof bindings[0] };

static void fill(void)
{
    uint64_t state = 3;
    for (int i = 0; i < N; i++) {
        doc[i] = i / 45;
        image[i] = i / 80;
        is_global[i] = i % 97 == 5;
    }
    for (int i = 0; i < 8; i++) {
        start[i] = 45 * i;
        prefix_doc[i] = i / 3 * 3;
    }
    for (int i = 0; i < 4; i++) {
        seen[i][0] = 70 * i;
        seen[i][1] = 70 * i + 90;
    }
    for (int i = 0; i < Q * 64; i++)
        ancestor[i] = random_mod_below(&state, 3) == 0;
    for (int i = 0; i < 2 * 2 * 8 * 3; i++)
        tiles[i] = (int32_t)random_mod_below(&state, 9);
}

static const char *const calls[] = {
    "noop()",
    "causal()",
    "inverse_causal()",
    "sliding_window(40)",
    "last_keys(41)",
    "dilated_window(60, 4)",
    "global_window(30, is_global)",
    "prefix_lm(77)",
    "prefix_lm_batch(prefix)",
    "document(doc)",
    "document_causal(doc)",
    "packed_causal(doc, start)",
    "shared_prefix(doc, start, prefix_doc)",
    "batchify(70)",
    "flamingo(image, seen)",
    "natten_2d(16, 18, 5, 3)",
    "natten_tiled(16, 16, 5, 5, 4, 4)",
    "natten_morton(16, 16, 5, 3)",
    "sta_axis(q / 32, kv / 32, 9, 3)",
    "sta_2d(16, 16, 4, 4, 3, 2)",
    "sta_3d(4, 8, 8, 2, 4, 4, 1, 3, 2)",
    "sta_3d_text(4, 6, 8, 2, 3, 4, 1, 3, 2)",
    "block_causal(50)",
    "block_diffusion(120, 25)",
    "speculative_tree(180, ancestor)",
    "transfusion(3, spans)",
    "svg_spatial(20, 9, 1.5, 30)",
    "svg_temporal(20, 1.5, 8, 32)",
    "top_tiles(tiles, 32, 3)",
};
enum { N_CALLS = sizeof calls / sizeof calls[0] };

/* Bindings that the bound text names. */
static int32_t used_by(const saccade_mod *mod, saccade_binding *used)
{
    int32_t n = 0;
    for (int32_t i = 0; i < saccade_mod_capture_count(mod); i++)
        for (int j = 0; j < N_BINDINGS; j++)
            if (strcmp(bindings[j].name, saccade_mod_capture(mod, i).name) == 0)
                used[n++] = bindings[j];
    return n;
}

static void every_variant_is_exact(void **state)
{
    static const int32_t blocks[][2] = {{128, 128}, {32, 48}, {21, 10}};
    (void)state;
    for (int i = 0; i < N_CALLS; i++) {
        saccade_binding used[N_BINDINGS];
        saccade_mod *mod = brute_mod(calls[i], bindings, N_BINDINGS);
        const int32_t n = used_by(mod, used);
        uint8_t *live = brute_dense(mod, &sizes, NULL, used, n);
        for (size_t j = 0; j < sizeof blocks / sizeof blocks[0]; j++) {
            const saccade_block_mask_options options = {.size = sizeof options,
                                                        .block_q = blocks[j][0],
                                                        .block_kv = blocks[j][1]};
            saccade_block_mask *mask;
            assert_int_equal(saccade_block_mask_create(NULL, mod, &sizes, NULL, used, n,
                                                       &options, &mask, NULL),
                             SACCADE_OK);
            brute_compare(mask, &sizes, blocks[j][0], blocks[j][1], live, calls[i]);
            saccade_block_mask_destroy(mask);
        }
        free(live);
        saccade_mod_destroy(mod);
    }
}

static void no_variant_is_left_out(void **state)
{
    const saccade_prelude_entry *entry;
    (void)state;
    for (int32_t i = 0; (entry = saccade_prelude(i)) != NULL; i++) {
        const size_t length = strlen(entry->name);
        int is_listed = entry->kind != SACCADE_MASK;
        for (int j = 0; j < N_CALLS; j++)
            is_listed |= strncmp(calls[j], entry->name, length) == 0 && calls[j][length] == '(';
        if (!is_listed)
            fail_msg("%s is not in this test's list", entry->name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_variant_is_exact),
        cmocka_unit_test(no_variant_is_left_out),
    };
    fill();
    return cmocka_run_group_tests_name("mask prelude", tests, NULL, NULL);
}
