/* The order of CUDA's tiles: all of them once, the longest first, and how each is
 * walked; into how many parts the query heads of a group are cut. */
#include "cuda/kern/bwd.h"
#include "cuda/mask/device_mask.h"
#include "support/forward_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- parts of heads ---- */

enum { LENGTHS = 1024 };

/* Of `heads` KV heads with n tiles each under a causal mask: each tile meets `step` blocks
 * fewer than the one before. Longest first. */
static cu_tile_lengths causal_lengths(int64_t heads, int64_t n, int64_t step, int64_t *blocks)
{
    for (int64_t i = 0; i < heads * n; i++)
        blocks[i] = (n - i / heads) * step;
    return (cu_tile_lengths){.blocks = blocks, .n = heads * n};
}

static int64_t sum_of(const cu_tile_lengths *x)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < x->n; i++)
        sum += x->blocks ? x->blocks[i] : x->each;
    return sum;
}

/* The time is never less than an equal share nor than the longest part, and near the larger of
 * both where heads are cut. */
static void heads_are_cut_where_tiles_are_few(void **state)
{
    int64_t blocks[LENGTHS];
    const struct {
        int64_t heads, n, step;
        int group, least, most;
    } cases[] = {{2, 86, 3, 8, 2, 2},  /* h16/2 q16384 d64 */
                 {8, 64, 2, 4, 1, 1},  /* h32/8 q8192 d128 */
                 {8, 16, 2, 4, 2, 2},  /* h32/8 q2048 d128 */
                 {16, 64, 2, 1, 1, 1}, /* no groups */
                 {1, 8, 2, 3, 3, 3},   /* of three heads there is no half */
                 {1, 1, 1, 8, 8, 8},   /* a block each */
                 {1, 1, 1, 2, 1, 1}};  /* less than the second kernel takes */
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const cu_tile_lengths x =
            causal_lengths(cases[i].heads, cases[i].n, cases[i].step, blocks);
        const int group = cases[i].group;
        double time;
        const int parts = cu_head_parts(132, group, &x, &time);
        const double share = (double)(sum_of(&x) * group) / 132;
        const double longest = (double)(x.blocks[0] * group / parts);
        assert_in_range(parts, cases[i].least, cases[i].most);
        assert_int_equal(group % parts, 0);
        assert_true(parts <= cu_head_parts_most(132, group, x.n));
        assert_true(time >= share && time >= longest);
        if (parts > 1)
            assert_true(time <= 1.35 * (share > longest ? share : longest) + 8);
    }
}

/* 172 equal tiles take two rounds of 132; 344 halves of them take three. */
static void equal_tiles_are_cut_too(void **state)
{
    const cu_tile_lengths x = {.n = 172, .each = 256}, many = {.n = 1024, .each = 256};
    double time;
    (void)state;
    assert_int_equal(cu_head_parts(132, 1, &x, &time), 1);
    assert_true(time == 2 * 256);
    assert_int_equal(cu_head_parts(132, 8, &x, &time), 2);
    assert_true(time < 2 * 256 * 8 * 0.8);
    assert_int_equal(cu_head_parts(132, 8, &many, &time), 1);
    assert_int_equal(cu_head_parts_most(132, 8, 172), 2);
    assert_int_equal(cu_head_parts_most(132, 8, 529), 1);
}

/* A head's last tile has fewer groups of 64 keys: such tiles fill the last round of others. */
static void last_tiles_are_short(void **state)
{
    const cu_tile_lengths whole = cu_equal_tiles(10, 384, 3, 1, 16);
    const cu_tile_lengths one = cu_equal_tiles(10, 1, 3, 1, 16);
    const cu_tile_lengths two = cu_equal_tiles(10, 193 + 64, 3, 1, 16);
    const cu_tile_lengths three = cu_equal_tiles(10, 192 + 129, 3, 1, 16);
    const cu_tile_lengths bert = cu_equal_tiles(96, 1024, 3, 1, 16);
    double time;
    (void)state;
    assert_true(whole.n == 20 && whole.n_short == 0);
    assert_true(three.n == 20 && three.n_short == 0);
    assert_true(one.n == 10 && one.n_short == 10);
    assert_int_equal(cu_equal_tiles(10, 1, 3, 0, 16).n_short, 0);
    assert_true(two.n == 20 && two.n_short == 10);
    assert_true(one.share > 1 / 3. && one.share < two.share && two.share < 1);
    cu_query_parts(132, 1, 0, &bert, &time); /* 480 whole ones and 96: four rounds, not five */
    assert_true(time == 4 * 16);
    cu_query_parts(132, 1, 0, &one, &time);
    assert_true(time < 16);
    cu_query_parts(5, 1, 0, &two, &time); /* 10 and 10 of them: two rounds and two short ones */
    assert_true(time > 3 * 16 && time < 4 * 16);
}

/* 77 keys of 20 heads are 20 tiles of 4096 queries, for 132 multiprocessors. Parts of rows all
 * run at once; a mask, or no more than two blocks, are not worth a second kernel. */
static void rows_are_cut_where_keys_are_few(void **state)
{
    const cu_tile_lengths cross = {.n = 20, .each = 64}, many = {.n = 67, .each = 64};
    const cu_tile_lengths few = {.n = 20, .each = 2};
    double time;
    (void)state;
    cu_cut cut = cu_query_parts(132, 1, 1, &cross, &time);
    assert_int_equal(cut.heads, 1);
    assert_in_range(cut.rows, 4, 6);
    assert_true(time < 64 / 3.);
    assert_true(cut.rows <= cu_row_parts_most(132, cross.n, cross.each));
    cut = cu_query_parts(132, 2, 1, &cross, &time);
    assert_int_equal(cut.heads, 2);
    assert_in_range(cut.rows, 2, 3);
    assert_int_equal(cu_query_parts(132, 1, 0, &cross, &time).rows, 1);
    assert_int_equal(cu_query_parts(132, 1, 1, &many, &time).rows, 1);
    assert_int_equal(cu_query_parts(132, 1, 1, &few, &time).rows, 1);
    assert_int_equal(cu_row_parts_most(132, 132, 64), 1);
    assert_int_equal(cu_row_parts_most(132, 0, 64), 1);
    assert_int_equal(cu_row_parts_most(132, 1, 3), 1);
    assert_int_equal(cu_row_parts_most(132, 1, 64), 64);
}

/* Room for a run is room for smaller ones, whose fewer tiles may have more parts. */
static void room_for_parts_is_room_for_smaller_runs(void **state)
{
    static const int64_t heads[] = {1, 2, 5, 20, 131, 132, 400};
    static const int64_t keys[] = {1, 77, 192, 193, 764, 5000, 20000};
    static const int64_t blocks[] = {1, 2, 4, 5, 64, 4096};
    enum { TILE = 192 };
    (void)state;
    for (int n = 0; n < 2 * 7 * 7 * 6; n++) {
        const int group = n & 1 ? 8 : 1, h = n / 2 % 7, k = n / 14 % 7, b = n / 98;
        const int64_t tiles = heads[h] * ((keys[k] + TILE - 1) / TILE);
        const cu_tile_lengths x = {.n = tiles, .each = blocks[b]};
        double time;
        const cu_cut cut = cu_query_parts(132, group, 1, &x, &time);
        const int any = cu_head_parts_most(132, group, tiles); /* of masks */
        const int parts = cut.heads * cut.rows > any ? cut.heads * cut.rows : any;
        for (int i = h; i < 7 && parts > 1; i++)
            for (int j = k; j < 7; j++)
                for (int l = b; l < 6; l++)
                    assert_true(cu_part_rows_most(132, group, 1, heads[i], keys[j], blocks[l],
                                                  TILE)
                                >= heads[h] * keys[k] * parts);
    }
}

/* ---- orders ---- */

enum { KEYS = 128, Q = 8192, TILES = Q / KEYS, BLOCKS = Q / BWD_ROWS, AT_ONCE = 16 };

typedef struct ordered {
    saccade_block_mask *mask;
    const mask_runs *r; /* of keys */
    saccade_sizes sizes;
    int32_t *order;
    int64_t n;
} ordered;

/* Of a mask of Q positions; sizes' heads are those of the order, whose tiles are of keys where
 * it has a group, else of queries. */
static ordered order_of(const char *text, int64_t batches, int64_t heads, const cu_order *of)
{
    ordered x = {.sizes = {batches, heads, heads, Q, Q, 128, 128}};
    saccade_mod *mod = case_mod(SACCADE_MASK, text);
    saccade_error err = {0};
    cu_turns turns;
    if (saccade_block_mask_create(NULL, mod, &x.sizes, NULL, NULL, 0, NULL, &x.mask, &err)
        != SACCADE_OK)
        fail_msg("%s", err.message);
    const int is_of_keys = of->group != 0;
    assert_int_equal(mask_runs_for(x.mask, is_of_keys ? BWD_ROWS : KEYS, KEYS, is_of_keys, &x.r,
                                   &err),
                     SACCADE_OK);
    x.n = batches * heads * x.r->rows;
    x.order = malloc((size_t)x.n * sizeof *x.order);
    assert_non_null(x.order);
    assert_int_equal(cu_order_tiles(x.r, &x.sizes, of, x.order, &turns, &err), SACCADE_OK);
    assert_int_equal(turns.needed, x.n);
    saccade_mod_destroy(mod);
    return x;
}

static void drop(ordered *x)
{
    free(x->order);
    saccade_block_mask_destroy(x->mask);
}

static const cu_order of_groups = {
    .keys = KEYS, .group = 4, .at_once = AT_ONCE, .l2_bytes = 50 << 20};

static int64_t blocks_of(const ordered *x, int32_t entry)
{
    const int64_t row = (entry & ORDER_TILE) % TILES;
    int64_t n = 0;
    for (int64_t i = x->r->row_begin[row]; i < x->r->row_begin[row + 1]; i++)
        n += x->r->runs[i].count;
    return n;
}

static void all_tiles_come_once(void **state)
{
    static const char *const masks[] = {"q >= kv", "q >= kv && q - kv < 700",
                                        "kv < 500 || q >= kv", "q % 3 != kv % 5"};
    (void)state;
    for (int n = 0; n < 16; n++) {
        cu_order of = of_groups;
        of.is_by_rows = n & 1;
        of.group = n & 2 ? 4 : 1;
        ordered x = order_of(masks[n / 4], 1 + n % 3, 2 + n % 4, &of);
        char *seen = calloc((size_t)x.n, 1);
        assert_non_null(seen);
        for (int64_t i = 0; i < x.n; i++) {
            const int32_t tile = of.is_by_rows ? x.order[i] & ORDER_TILE : x.order[i];
            assert_in_range(tile, 0, x.n - 1);
            assert_false(seen[tile]++);
            assert_int_equal(!!(x.order[i] & ORDER_BY_ROWS), of.is_by_rows);
            assert_true(of.is_by_rows || x.order[i] == tile);
        }
        free(seen);
        drop(&x);
    }
}

/* A section has 256 tiles at least: four heads here. */
static void sections_begin_with_their_longest_tiles(void **state)
{
    cu_order of = of_groups;
    (void)state;
    of.is_by_rows = 1;
    ordered x = order_of("q >= kv", 1, 8, &of);
    for (int64_t i = 0; i < x.n; i++) {
        const int64_t head = (x.order[i] & ORDER_TILE) / TILES;
        assert_int_equal(head / 4, i / 256);
        if (i % 256)
            assert_true(blocks_of(&x, x.order[i]) <= blocks_of(&x, x.order[i - 1]));
        assert_int_equal(!!(x.order[i] & ORDER_BACK), i % 256 / AT_ONCE % 2 == 0);
    }
    drop(&x);
}

/* Tiles of queries: 512 of the last heads, eight here, come by their length, others head by
 * head; where half of L2 holds more heads, those of as many. */
static void tiles_of_queries_come_head_by_head(void **state)
{
    enum { HEADS = 20 };
    static const size_t l2_bytes[] = {16 << 20, 96 << 20};
    static const int64_t last[] = {8, 12}; /* K and V of a head are 4 MB */
    (void)state;
    for (int n = 0; n < 2; n++) {
        cu_order of = of_groups;
        of.group = 0;
        of.l2_bytes = l2_bytes[n];
        ordered x = order_of("q >= kv", 2, HEADS / 2, &of);
        char seen[HEADS * TILES] = {0};
        for (int64_t i = 0; i < x.n; i++) {
            const int64_t head = x.order[i] / TILES, alone = HEADS - last[n];
            assert_in_range(x.order[i], 0, x.n - 1);
            assert_false(seen[x.order[i]]++);
            if (i / TILES < alone)
                assert_int_equal(head, i / TILES);
            if (i && (i / TILES < alone ? i % TILES : i > alone * TILES))
                assert_true(blocks_of(&x, x.order[i]) <= blocks_of(&x, x.order[i - 1]));
        }
        drop(&x);
    }
}

/* A multiprocessor that walks tiles as the order says, a block at a time. */
typedef struct walker {
    int64_t at, last;
    int step;
} walker;

static void take(const ordered *x, walker *w, int32_t entry)
{
    const saccade_run *run = &x->r->runs[x->r->row_begin[(entry & ORDER_TILE) % TILES]];
    const int64_t last = run->first + blocks_of(x, entry) - 1;
    w->step = entry & ORDER_BACK ? -1 : 1;
    w->at = w->step < 0 ? last : run->first;
    w->last = w->step < 0 ? run->first : last;
}

/* The mean number of blocks that walkers are at, at a time. */
static double blocks_in_use(const ordered *x)
{
    walker w[AT_ONCE];
    int64_t next = 0, times = 0, used = 0;
    for (int i = 0; i < AT_ONCE; i++)
        take(x, &w[i], x->order[next++]);
    for (; next < x->n; times++) {
        char seen[BLOCKS] = {0};
        for (int i = 0; i < AT_ONCE; i++) {
            used += !seen[w[i].at];
            seen[w[i].at] = 1;
            if (w[i].at != w[i].last)
                w[i].at += w[i].step;
            else if (next < x->n)
                take(x, &w[i], x->order[next++]);
        }
    }
    return (double)used / (double)times;
}

/* Under a causal mask tiles that run at a time are at few blocks: two, and their neighbours
 * where tiles of one length end together. Head by head, from the first block on, each is at one
 * of its own. */
static void tiles_meet(void **state)
{
    cu_order of = of_groups;
    (void)state;
    of.is_by_rows = 1;
    ordered x = order_of("q >= kv", 1, 1, &of);
    const double by_rows = blocks_in_use(&x);
    drop(&x);
    of.is_by_rows = 0;
    x = order_of("q >= kv", 1, 1, &of);
    const double by_heads = blocks_in_use(&x);
    drop(&x);
    if (by_rows > 3 || by_heads < 10)
        fail_msg("%.1f blocks by rows, %.1f by heads, of %d", by_rows, by_heads, AT_ONCE);
}

static void narrow_windows_see_little(void **state)
{
    (void)state;
    ordered x = order_of("q >= kv", 1, 1, &of_groups);
    assert_true(cu_sees_much(x.r));
    assert_int_equal(cu_count_blocks(x.r), TILES * (TILES + 1));
    drop(&x);
    x = order_of("q >= kv && q - kv < 1024", 1, 1, &of_groups);
    assert_false(cu_sees_much(x.r));
    drop(&x);
}

/* By the runs of a causal mask: as by the list of its lengths. */
static void parts_follow_from_runs(void **state)
{
    int64_t blocks[LENGTHS];
    double time;
    int parts;
    (void)state;
    ordered x = order_of("q >= kv", 1, 1, &of_groups);
    const cu_tile_lengths all = causal_lengths(1, TILES, 2, blocks);
    const saccade_sizes grouped = {1, 8, 1, Q, Q, 128, 128};
    assert_int_equal(cu_find_head_parts(x.r, &grouped, 132, 1, &parts, NULL), SACCADE_OK);
    assert_int_equal(parts, cu_head_parts(132, 8, &all, &time));
    assert_true(parts > 1);
    assert_int_equal(cu_find_head_parts(x.r, &grouped, 132, 0, &parts, NULL), SACCADE_OK);
    assert_int_equal(
        parts, cu_head_parts(132, 8, &(cu_tile_lengths){.n = TILES, .each = BLOCKS}, &time));
    assert_int_equal(cu_find_head_parts(x.r, &x.sizes, 132, 1, &parts, NULL), SACCADE_OK);
    assert_int_equal(parts, 1);
    drop(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_cut_where_tiles_are_few),
        cmocka_unit_test(equal_tiles_are_cut_too),
        cmocka_unit_test(last_tiles_are_short),
        cmocka_unit_test(rows_are_cut_where_keys_are_few),
        cmocka_unit_test(room_for_parts_is_room_for_smaller_runs),
        cmocka_unit_test(all_tiles_come_once),
        cmocka_unit_test(sections_begin_with_their_longest_tiles),
        cmocka_unit_test(tiles_of_queries_come_head_by_head),
        cmocka_unit_test(tiles_meet),
        cmocka_unit_test(narrow_windows_see_little),
        cmocka_unit_test(parts_follow_from_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
