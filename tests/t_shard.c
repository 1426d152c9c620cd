/* Shard plans: rows and keys are dealt once each, what a rank needs is what its rows touch and
 * no more (against the block mask itself), areas are even (counted position by position where a
 * mask's rows are known), and the same arguments give the same plan. */
#include "saccade_dist.h"

#include "support/fail_alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- masks ---- */

typedef struct held_mask {
    saccade_mod *mod;
    saccade_block_mask *mask;
    saccade_sizes sizes;
} held_mask;

/* doc: [KV], for texts that name it. */
static held_mask mask_of(const char *text, saccade_sizes sizes, int32_t *doc, int32_t block_q,
                         int32_t block_kv)
{
    saccade_error err = {0};
    saccade_mod *generic;
    held_mask m = {.sizes = sizes};
    saccade_block_mask_options options;
    saccade_block_mask_options_init(&options);
    options.block_q = block_q;
    options.block_kv = block_kv;
    assert_int_equal(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err), 0);
    const int32_t n = saccade_mod_capture_count(generic);
    saccade_capture capture = {"doc", SACCADE_I32, 1};
    assert_int_equal(saccade_mod_bind(generic, &capture, n, &m.mod, &err), 0);
    const saccade_binding binding = {
        "doc", saccade_tensor_of(doc, SACCADE_I32, 1, (int64_t[]){sizes.KV})};
    if (saccade_block_mask_create(NULL, m.mod, &sizes, NULL, &binding, n, &options, &m.mask,
                                  &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return m;
}

static void drop(held_mask *m)
{
    saccade_block_mask_destroy(m->mask);
    saccade_mod_destroy(m->mod);
}

static saccade_sizes square(int64_t n, int64_t H)
{
    return (saccade_sizes){1, H, H, n, n, 64, 64};
}

static saccade_shard_plan *plan_of(const saccade_shard_options *o)
{
    saccade_error err = {0};
    saccade_shard_plan *plan = NULL;
    if (saccade_shard_plan_create(o, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    return plan;
}

static saccade_shard_options options_of(const saccade_block_mask *const *masks, int32_t n,
                                        int32_t ranks, int32_t tile)
{
    saccade_shard_options o;
    saccade_shard_options_init(&o);
    o.masks = masks;
    o.n_masks = n;
    o.ranks = ranks;
    o.tile = tile;
    return o;
}

/* ---- balance ---- */

/* Documents of uneven lengths: the i-th is about as long as every (i % 7 + 1)-th of others. */
static void cut_documents(int32_t *doc, int64_t n, int32_t count)
{
    double all = 0, done = 0;
    for (int32_t d = 0; d < count; d++)
        all += d % 7 + 1;
    for (int64_t j = 0, d = 0; j < n; j++) {
        while (d + 1 < count && (double)j >= (done + (double)(d % 7) + 1) / all * (double)n)
            done += (double)(d++ % 7) + 1;
        doc[j] = (int32_t)d;
    }
}

typedef enum kind { CAUSAL, WINDOW, DOCUMENTS, CAUSAL_DOCUMENTS, PREFIX } kind;
static const char *const texts[] = {"causal()", "sliding_window(1024)", "doc[q] == doc[kv]",
                                    "doc[q] == doc[kv] && q >= kv", "prefix_lm(4096)"};

/* Live keys of row q. */
static int64_t live_of(kind kind, int64_t q, int64_t n, const int32_t *doc)
{
    int64_t first = q, past = q;
    if (kind == DOCUMENTS || kind == CAUSAL_DOCUMENTS) {
        while (first > 0 && doc[first - 1] == doc[q])
            first--;
        while (kind == DOCUMENTS && past + 1 < n && doc[past + 1] == doc[q])
            past++;
        return past - first + 1;
    }
    if (kind == PREFIX)
        return q < 4096 ? 4096 : q + 1;
    return kind == WINDOW && q >= 1024 ? 1025 : q + 1;
}

/* Live positions of the rank with the most over the mean. */
static double exact_imbalance(const saccade_shard_plan *plan, int32_t ranks, const int64_t *sum)
{
    double most = 0, all = 0;
    for (int32_t r = 0; r < ranks; r++) {
        const saccade_range *at;
        const int32_t n = saccade_shard_rows(plan, r, &at);
        double own = 0;
        for (int32_t i = 0; i < n; i++)
            own += (double)(sum[at[i].first + at[i].count] - sum[at[i].first]);
        most = own > most ? own : most;
        all += own;
    }
    return most * ranks / all;
}

static void even_on(kind kind, int64_t n, int32_t documents)
{
    int32_t *doc = malloc((size_t)n * sizeof *doc);
    int64_t *sum = calloc((size_t)n + 1, sizeof *sum);
    cut_documents(doc, n, documents ? documents : 1);
    for (int64_t q = 0; q < n; q++) /* rows of a document follow from the row before */
        sum[q + 1] = sum[q]
                     + (kind == DOCUMENTS && q && doc[q] == doc[q - 1] ? sum[q] - sum[q - 1]
                        : kind == CAUSAL_DOCUMENTS && q && doc[q] == doc[q - 1]
                            ? sum[q] - sum[q - 1] + 1
                            : live_of(kind, q, n, doc));
    held_mask m = mask_of(texts[kind], square(n, 1), doc, 0, 0);
    const saccade_block_mask *masks[] = {m.mask};
    for (int32_t ranks = 2; ranks <= 8; ranks++)
        for (int32_t tile = 96; tile <= 128; tile += 32) {
            const saccade_shard_options o = options_of(masks, 1, ranks, tile);
            saccade_shard_plan *plan = plan_of(&o);
            saccade_shard_stats stats;
            saccade_shard_stats_init(&stats);
            assert_int_equal(saccade_shard_get_stats(plan, 0, &stats, NULL), SACCADE_OK);
            const double exact = exact_imbalance(plan, ranks, sum);
            if (stats.imbalance > 1.03 || exact > 1.03)
                fail_msg("%s of %lld, %d documents, %d ranks, tile %d: imbalance %.4f, of "
                         "positions %.4f",
                         texts[kind], (long long)n, documents, ranks, tile, stats.imbalance,
                         exact);
            saccade_shard_plan_destroy(plan);
        }
    drop(&m);
    free(doc);
    free(sum);
}

static void areas_are_even(void **state)
{
    (void)state;
    for (int64_t n = 32768; n <= 131072; n *= 4) {
        even_on(CAUSAL, n, 0);
        even_on(WINDOW, n, 0);
        even_on(PREFIX, n, 0);
        for (int32_t documents = 12; documents <= 200; documents += 188) {
            even_on(DOCUMENTS, n, documents);
            even_on(CAUSAL_DOCUMENTS, n, documents);
        }
    }
}

/* ---- traffic ---- */

static void narrow_masks_send_little(void **state)
{
    (void)state;
    held_mask m = mask_of("sliding_window(1024)", square(1 << 20, 1), NULL, 0, 0);
    const saccade_block_mask *masks[] = {m.mask};
    const saccade_shard_options o = options_of(masks, 1, 2, 0);
    saccade_shard_plan *plan = plan_of(&o);
    const saccade_range *at, *rows;
    assert_int_equal(saccade_shard_rows(plan, 0, &rows), 1);
    assert_true(labs((long)rows->count - (1 << 19)) < 1024);
    assert_int_equal(saccade_shard_needs(plan, 0, 0, 1, &at), 0);
    assert_int_equal(saccade_shard_needs(plan, 0, 1, 0, &at), 1);
    assert_int_equal(at->first, rows->count - 1024);
    assert_int_equal(at->count, 1024);
    saccade_shard_plan_destroy(plan);
    drop(&m);
}

/* ---- everything, against the block mask ---- */

/* Each of [0, length) in exactly one rank's ranges, which rise and do not touch; to owner. */
static void dealt_once(const saccade_shard_plan *plan, int32_t ranks, int64_t length, int keys,
                       int32_t *owner)
{
    memset(owner, 0xff, (size_t)length * sizeof *owner);
    for (int32_t r = 0; r < ranks; r++) {
        const saccade_range *at;
        const int32_t n =
            keys ? saccade_shard_keys(plan, r, &at) : saccade_shard_rows(plan, r, &at);
        assert_true(n >= 0);
        for (int32_t i = 0; i < n; i++) {
            assert_true(at[i].count > 0 && at[i].first + at[i].count <= length);
            assert_true(i == 0 || at[i].first > at[i - 1].first + at[i - 1].count);
            for (int64_t j = at[i].first; j < at[i].first + at[i].count; j++) {
                assert_int_equal(owner[j], -1);
                owner[j] = r;
            }
        }
    }
    for (int64_t j = 0; j < length; j++)
        assert_true(owner[j] >= 0);
}

/* touched[key]: some block that a row of the rank lies in is live there. */
static void touch(const held_mask *m, const int32_t *owner, int32_t rank, int32_t block_q,
                  int32_t block_kv, uint8_t *touched)
{
    const saccade_sizes *s = &m->sizes;
    memset(touched, 0, (size_t)s->KV);
    for (int64_t q = 0; q < s->Q; q++)
        for (int64_t bh = 0; owner[q] == rank && bh < s->B * s->H; bh++) {
            const saccade_run *run;
            const int64_t n =
                saccade_block_mask_row(m->mask, bh / s->H, bh % s->H, q / block_q, 0, &run);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = (int64_t)run[i].first * block_kv;
                     j < s->KV && j < ((int64_t)run[i].first + run[i].count) * block_kv; j++)
                    touched[j] = 1;
        }
}

static void needs_are_what_is_touched(const saccade_shard_plan *plan, const held_mask *m,
                                      int32_t index, int32_t ranks, const int32_t *owner,
                                      const int32_t *key_owner, int32_t block_q,
                                      int32_t block_kv)
{
    uint8_t *touched = malloc((size_t)m->sizes.KV);
    for (int32_t r = 0; r < ranks; r++) {
        touch(m, owner, r, block_q, block_kv, touched);
        for (int32_t peer = 0; peer < ranks; peer++) {
            const saccade_range *at;
            const int32_t n = saccade_shard_needs(plan, index, r, peer, &at);
            assert_true(n >= 0);
            for (int32_t i = 0; i < n; i++)
                for (int64_t j = at[i].first; j < at[i].first + at[i].count; j++) {
                    assert_int_equal(key_owner[j], peer);
                    assert_int_equal(touched[j], 1); /* and not a second time */
                    touched[j] = 0;
                }
        }
        for (int64_t j = 0; j < m->sizes.KV; j++)
            assert_int_equal(touched[j], 0);
    }
    free(touched);
}

static uint32_t next_random(uint32_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 17;
    *x ^= *x << 5;
    return *x;
}

static void same_plans(const saccade_shard_plan *a, const saccade_shard_plan *b, int32_t ranks)
{
    for (int32_t r = 0; r < ranks; r++) {
        const saccade_range *x, *y;
        const int32_t n = saccade_shard_rows(a, r, &x);
        assert_int_equal(n, saccade_shard_rows(b, r, &y));
        assert_memory_equal(x, y, (size_t)n * sizeof *x);
    }
}

static void one_random(uint32_t *x)
{
    static const char *const random_texts[] = {
        "causal()",
        "q - kv < 40 && kv <= q + 3",
        "doc[kv] == doc[q % KV]",
        "h == 0 ? kv < 30 : q >= kv",
        "(q * 7 + kv * 3) % 11 < 4 && b <= kv",
        "kv > 1000",
    };
    int32_t doc[256];
    saccade_sizes s = {1 + next_random(x) % 2, 2, 1, 1 + next_random(x) % 200, 0, 8, 8};
    s.KV = next_random(x) % 3 ? s.Q : 1 + next_random(x) % 200;
    for (int i = 0; i < 256; i++)
        doc[i] = (int32_t)(next_random(x) % 4);
    const int32_t blocks[2] = {1 + (int32_t)(next_random(x) % 40),
                               1 + (int32_t)(next_random(x) % 40)};
    const int32_t ranks = 1 + (int32_t)(next_random(x) % 5);
    held_mask m[2];
    const saccade_block_mask *masks[2];
    const int32_t layers[2] = {1 + (int32_t)(next_random(x) % 3), 2};
    for (int i = 0; i < 2; i++) {
        m[i] = mask_of(random_texts[next_random(x) % 6], s, doc, blocks[0], blocks[1]);
        masks[i] = m[i].mask;
    }
    saccade_shard_options o = options_of(masks, 1 + (int32_t)(next_random(x) % 2), ranks,
                                         1 + (int32_t)(next_random(x) % 48));
    o.layers = layers;
    o.chunk = next_random(x) % 2 ? 2 * o.tile : 0;
    saccade_shard_plan *plan = plan_of(&o), *again = plan_of(&o);
    int32_t owner[200], key_owner[200];
    dealt_once(plan, ranks, s.Q, 0, owner);
    dealt_once(plan, ranks, s.KV, 1, key_owner);
    same_plans(plan, again, ranks);
    if (s.Q == s.KV)
        assert_memory_equal(owner, key_owner, (size_t)s.Q * sizeof *owner);
    for (int32_t i = 0; i < o.n_masks; i++)
        needs_are_what_is_touched(plan, &m[i], i, ranks, owner, key_owner, blocks[0],
                                  blocks[1]);
    saccade_shard_plan_destroy(plan);
    saccade_shard_plan_destroy(again);
    drop(&m[0]);
    drop(&m[1]);
}

static void random_masks(void **state)
{
    uint32_t x = 2463534242u;
    (void)state;
    for (int i = 0; i < 150; i++)
        one_random(&x);
}

/* ---- weights ---- */

/* A mask of one head is every head's, beside one of 16 too. */
static void a_mask_counts_for_all_heads(void **state)
{
    (void)state;
    held_mask one = mask_of("q >= kv", square(2000, 1), NULL, 0, 0);
    held_mask all = mask_of("q >= kv", square(2000, 16), NULL, 0, 0);
    held_mask other = mask_of("q <= kv", square(2000, 16), NULL, 0, 0);
    double area[2];
    for (int i = 0; i < 2; i++) {
        const saccade_block_mask *masks[] = {i ? all.mask : one.mask, other.mask};
        saccade_shard_options o = options_of(masks, 2, 1, 0);
        o.layers = (int32_t[]){3, 1};
        saccade_shard_plan *plan = plan_of(&o);
        saccade_shard_stats stats;
        saccade_shard_stats_init(&stats);
        assert_int_equal(saccade_shard_get_stats(plan, 0, &stats, NULL), SACCADE_OK);
        area[i] = stats.area;
        saccade_shard_plan_destroy(plan);
    }
    assert_true(area[0] == area[1]);
    drop(&one);
    drop(&all);
    drop(&other);
}

/* ---- mistakes ---- */

static void refused(const saccade_shard_options *o, const char *where)
{
    saccade_error err = {0};
    saccade_shard_plan *plan = NULL;
    assert_int_not_equal(saccade_shard_plan_create(o, &plan, &err), SACCADE_OK);
    assert_string_equal(err.where, where);
    assert_null(plan);
}

static void mistakes(void **state)
{
    (void)state;
    saccade_shard_options o = options_of(NULL, 0, 2, 0), bad;
    const saccade_range *at;
    refused(&o, "Q");
    o.Q = 100;
    refused(&o, "KV");
    o.KV = 1 << 30;
    bad = o, bad.ranks = 0, refused(&bad, "ranks");
    bad = o, bad.ranks = 1025, refused(&bad, "ranks");
    bad = o, bad.n_masks = 1, refused(&bad, "masks");
    bad = o, bad.tile = 1, refused(&bad, "chunk"); /* 2^30 chunks */
    bad = o, bad.chunk = 100, refused(&bad, "chunk");
    bad = o, bad.tile = -1, refused(&bad, "tile");
    held_mask a = mask_of("causal()", square(300, 1), NULL, 0, 0);
    held_mask b = mask_of("causal()", square(301, 1), NULL, 0, 0);
    const saccade_block_mask *masks[] = {a.mask, b.mask};
    bad = options_of(masks, 2, 2, 0), refused(&bad, "masks");
    bad.n_masks = 1, bad.layers = (int32_t[]){0}, refused(&bad, "layers");
    bad.layers = NULL;
    saccade_shard_plan *plan = plan_of(&bad);
    assert_int_equal(saccade_shard_rows(plan, 2, &at), -1);
    assert_int_equal(saccade_shard_keys(plan, -1, &at), -1);
    assert_int_equal(saccade_shard_needs(plan, 1, 0, 0, &at), -1);
    saccade_shard_plan_destroy(plan);
    saccade_shard_plan_destroy(NULL);
    drop(&a);
    drop(&b);
}

static saccade_status make_and_drop(void *arg, saccade_error *err)
{
    saccade_shard_plan *plan = NULL;
    const saccade_status status = saccade_shard_plan_create(arg, &plan, err);
    assert_true((status == SACCADE_OK) == (plan != NULL));
    saccade_shard_plan_destroy(plan);
    return status;
}

static void without_memory(void **state)
{
    (void)state;
    held_mask m = mask_of("causal()", square(1000, 1), NULL, 0, 0);
    const saccade_block_mask *masks[] = {m.mask};
    saccade_shard_options o = options_of(masks, 1, 3, 0);
    assert_true(fail_alloc_sweep("shard plan", make_and_drop, &o) > 10);
    drop(&m);
}

/* ---- pictures ---- */

static void pictures(void **state)
{
    (void)state;
    held_mask m = mask_of("causal()", square(1024, 1), NULL, 128, 128);
    const saccade_block_mask *masks[] = {m.mask};
    const saccade_shard_options o = options_of(masks, 1, 2, 128);
    saccade_shard_plan *plan = plan_of(&o);
    void *bytes;
    size_t size;
    assert_int_equal(
        saccade_shard_render(plan, m.mask, 0, 0, SACCADE_TEXT, 8, &bytes, &size, NULL),
        SACCADE_OK);
    assert_true(size > 36
                && memcmp(bytes, "aa......\nBBbb....\nBBBBbb..\nAAAAAAaa\n", 36) == 0);
    saccade_free(bytes);
    assert_int_equal(
        saccade_shard_render(plan, m.mask, 0, 0, SACCADE_SVG, 0, &bytes, &size, NULL),
        SACCADE_OK);
    assert_true(size > 100 && memcmp(bytes, "<svg", 4) == 0);
    saccade_free(bytes);
    assert_int_equal(
        saccade_shard_render(plan, m.mask, 0, 1, SACCADE_SVG, 0, &bytes, &size, NULL),
        SACCADE_EINVAL);
    assert_int_equal(saccade_shard_render(plan, m.mask, 0, 0, 9, 0, &bytes, &size, NULL),
                     SACCADE_EINVAL);
    saccade_shard_plan_destroy(plan);
    drop(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(areas_are_even), cmocka_unit_test(narrow_masks_send_little),
        cmocka_unit_test(random_masks),   cmocka_unit_test(a_mask_counts_for_all_heads),
        cmocka_unit_test(mistakes),       cmocka_unit_test(without_memory),
        cmocka_unit_test(pictures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
