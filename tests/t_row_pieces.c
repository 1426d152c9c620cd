/* Rows whose live keys are one interval, and the pieces of keys that small tiles walk, against
 * the mask position by position. */
#include "cuda/cuda.h"
#include "mask/mask.h"
#include "support/mask_brute.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 205, KEYS = 330, HEADS = 2 };

static const saccade_sizes sizes = {2, HEADS, HEADS, ROWS, KEYS, 8, 8};
static int32_t doc[KEYS];

static saccade_binding doc_binding(void)
{
    static const int64_t shape[1] = {KEYS};
    for (int i = 0; i < KEYS; i++)
        doc[i] = i < 70 ? i / 23 : 5 + i / 90;
    return (saccade_binding){"doc", saccade_tensor_of(doc, SACCADE_I32, 1, shape)};
}

static saccade_block_mask *mask_of(const char *text)
{
    const saccade_binding binding = doc_binding();
    const int n = strstr(text, "doc") != NULL;
    saccade_error err = {0};
    saccade_block_mask *mask;
    saccade_mod *mod = brute_mod(text, &binding, n);
    if (saccade_block_mask_create(NULL, mod, &sizes, NULL, &binding, n, NULL, &mask, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(mod);
    return mask;
}

static uint8_t *dense_of(const saccade_block_mask *mask)
{
    uint8_t *live = malloc(2 * HEADS * ROWS * KEYS);
    assert_non_null(live);
    assert_int_equal(saccade_block_mask_to_dense(mask, live, NULL), SACCADE_OK);
    return live;
}

static int is_live(const uint8_t *live, int64_t bh, int q, int kv)
{
    return live[(bh * ROWS + q) * KEYS + kv];
}

/* Whether the row is one interval, and then that it is [from, past). */
static int is_interval(const uint8_t *live, int64_t bh, int q, const int32_t *limits)
{
    int changes = 0;
    for (int kv = 0; kv < KEYS; kv++) {
        changes += is_live(live, bh, q, kv) && (kv == 0 || !is_live(live, bh, q, kv - 1));
        if (limits)
            assert_int_equal(is_live(live, bh, q, kv), kv >= limits[0] && kv < limits[1]);
    }
    return changes <= 1;
}

static void limits_are_exact(void **state)
{
    static const struct {
        const char *text;
        int is_found;
    } rows[] = {{"q >= kv && doc[q] == doc[kv]", 1}, {"doc[q] == doc[kv]", 1},
                {"q >= kv && q - kv <= 40", 1},      {"h == 0 ? q >= kv : kv < 50", 1},
                {"q >= kv && (q - kv) % 3 == 0", 0}, {"kv < 9 || q - kv == 20", 0},
                {"b == 1 && doc[q] < 2", 1},         {"false", 1}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_block_mask *mask = mask_of(rows[i].text);
        uint8_t *live = dense_of(mask);
        const mask_runs *r;
        int32_t *limits;
        assert_int_equal(mask_runs_for(mask, 64, 16, 0, &r, NULL), SACCADE_OK);
        assert_int_equal(mask_row_limits(mask, r, 1 << 20, &limits, NULL), SACCADE_OK);
        assert_int_equal(limits != NULL, rows[i].is_found);
        int all = 1;
        for (int64_t bh = 0; bh < 2 * HEADS; bh++)
            for (int q = 0; q < ROWS; q++) {
                const int64_t b = r->B == 1 ? 0 : bh / HEADS, h = r->H == 1 ? 0 : bh % HEADS;
                all &= is_interval(live, bh, q,
                                   limits ? limits + ((b * r->H + h) * ROWS + q) * 2 : NULL);
            }
        assert_int_equal(all, rows[i].is_found);
        free(limits);
        free(live);
        saccade_block_mask_destroy(mask);
    }
}

static void limits_give_up(void **state)
{
    (void)state;
    saccade_block_mask *mask = mask_of("q >= kv && doc[q] == doc[kv]");
    const mask_runs *r;
    int32_t *limits;
    assert_int_equal(mask_runs_for(mask, 64, 16, 0, &r, NULL), SACCADE_OK);
    assert_int_equal(mask_row_limits(mask, r, 100, &limits, NULL), SACCADE_OK);
    assert_null(limits);
    saccade_block_mask_destroy(mask);
}

/* Whether all of a piece is live in the rows of a block; in a block of keys that the end of the
 * keys cuts, those that are there. */
static int is_full(const uint8_t *live, int64_t bh, int block, int first, int keys)
{
    for (int q = block * 64; q < ROWS && q < block * 64 + 64; q++)
        for (int kv = first; kv < first + keys; kv++)
            if (kv < KEYS ? !is_live(live, bh, q, kv) : kv >= (KEYS + 15) / 16 * 16)
                return 0;
    return 1;
}

/* Pieces of a block of rows of one head hold every live key once and none twice, and say
 * whether the mask is needed. */
static void check_row(const uint8_t *live, int64_t bh, int block, const int *pieces, int n,
                      int keys)
{
    uint8_t is_held[KEYS + 256] = {0};
    for (int i = 0; i < n; i++) {
        const int first = pieces[i] >> PIECE_FLAGS;
        assert_true(i == 0 || first >= (pieces[i - 1] >> PIECE_FLAGS) + keys);
        memset(is_held + first, 1, (size_t)keys);
        assert_int_equal(pieces[i] & 1, !is_full(live, bh, block, first, keys));
    }
    for (int q = block * 64; q < ROWS && q < block * 64 + 64; q++)
        for (int kv = 0; kv < KEYS; kv++)
            assert_true(is_held[kv] || !is_live(live, bh, q, kv));
}

static void check_head(const mask_runs *r, const uint8_t *live, int64_t stored, int keys)
{
    const int64_t b = r->B == 1 ? 0 : stored / r->H, h = stored % r->H;
    int pieces[KEYS];
    for (int block = 0; block < r->rows; block++) {
        const int64_t row = stored * r->rows + block;
        const int n = cu_cut_row(r, row, keys, pieces);
        assert_int_equal(n, cu_cut_row(r, row, keys, NULL));
        check_row(live, b * HEADS + h, block, pieces, n, keys);
    }
}

static void pieces_cover_what_is_live(void **state)
{
    static const char *const texts[] = {
        "q >= kv && doc[q] == doc[kv]",
        "q >= kv",
        "true",
        "abs(q / 20 - kv / 20) < 2 && abs(q % 20 - kv % 20) < 3",
        "h == 0 ? q >= kv : kv < 50",
        "false"};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        saccade_block_mask *mask = mask_of(texts[i]);
        uint8_t *live = dense_of(mask);
        const mask_runs *r;
        assert_int_equal(mask_runs_for(mask, 64, PIECE_UNIT, 0, &r, NULL), SACCADE_OK);
        for (int64_t stored = 0; stored < r->B * r->H; stored++)
            for (int keys = 32; keys <= 96; keys += 16)
                check_head(r, live, stored, keys);
        free(live);
        saccade_block_mask_destroy(mask);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(limits_are_exact),
        cmocka_unit_test(limits_give_up),
        cmocka_unit_test(pieces_cover_what_is_live),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
