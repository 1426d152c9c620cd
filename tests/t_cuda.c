/* CUDA without a GPU: tiles as functions of integers, generated text, compilation for sm_90a
 * and sm_80 without spills, the cache. Parts that find no NVRTC skip, and say so. With a GPU:
 * t_cuda_device.c and t_cuda_devices.c. */
#include "support/chunk_case.h"
#include "support/device_case.h"
#include "support/short_run.h"

#include "saccade_dist.h"

#include "api/api.h"
#include "base/convert.h"
#include "cuda/backward/cuda_backward.h"
#include "cuda/cuda.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- contexts ---- */

static int n_retained, n_pushed;
static char contexts[2];

static int fake_current(void **context)
{
    *context = NULL;
    return 0;
}

static int fake_retain(void **context, int device)
{
    n_retained++;
    *context = &contexts[device & 1];
    return 0;
}

static int fake_push(void *context)
{
    assert_ptr_equal(context, &contexts[n_pushed >= 3]);
    n_pushed++;
    return 0;
}

static int fake_pop(void **context)
{
    *context = NULL;
    return 0;
}

/* A process holds one reference to a primary context, however often it is entered. */
static void contexts_are_retained_once(void **state)
{
    static const cu_driver fake = {.context_current = fake_current,
                                   .primary_retain = fake_retain,
                                   .context_push = fake_push,
                                   .context_pop = fake_pop};
    saccade_error err = {0};
    void *pushed;
    (void)state;
    n_retained = n_pushed = 0;
    for (int i = 0; i < 6; i++) { /* devices that no machine has */
        assert_int_equal(cu_enter(&fake, i < 3 ? 40 : 41, &pushed, NULL), SACCADE_OK);
        cu_leave(&fake, pushed);
    }
    assert_int_equal(n_retained, 2);
    assert_int_equal(n_pushed, 6);
    assert_int_equal(cu_enter(&fake, CU_DEVICES_MOST, &pushed, &err), SACCADE_ELIMIT);
    assert_non_null(strstr(err.message, "got device 64"));
}

/* ---- memory ---- */

static int n_held, alloc_fails, copy_fails;

static int fake_alloc(cu_ptr *memory, size_t bytes)
{
    *memory = alloc_fails ? 4096 : 256 + bytes; /* not to be taken for memory */
    n_held += !alloc_fails;
    return alloc_fails ? 2 : 0;
}

static int fake_free(cu_ptr memory)
{
    assert_true(memory == 256 + 96);
    n_held--;
    return 0;
}

static int fake_copy(cu_ptr to, cu_ptr from, size_t bytes)
{
    assert_true(to == 256 + 96 && from && bytes == 64);
    return copy_fails ? 700 : 0;
}

static int fake_error_string(int error, const char **text)
{
    *text = error == 700 ? "an illegal address" : "unknown";
    return 0;
}

/* Memory that could not be filled is given back. */
static void failed_copies_hold_no_memory(void **state)
{
    static const cu_driver fake = {.alloc = fake_alloc,
                                   .free = fake_free,
                                   .copy = fake_copy,
                                   .error_string = fake_error_string};
    const char host[64] = {0};
    saccade_error err = {0};
    cu_ptr memory = 1;
    (void)state;
    n_held = alloc_fails = copy_fails = 0;
    assert_int_equal(cu_alloc_filled(&fake, 96, host, 64, &memory, &err), SACCADE_OK);
    assert_true(memory == 256 + 96 && n_held == 1);
    fake_free(memory);
    copy_fails = 1;
    assert_int_equal(cu_alloc_filled(&fake, 96, host, 64, &memory, &err), SACCADE_EBACKEND);
    assert_true(memory == 0 && n_held == 0);
    alloc_fails = 1;
    assert_int_equal(cu_alloc_filled(&fake, 96, host, 64, &memory, &err), SACCADE_ENOMEM);
    assert_true(memory == 0 && n_held == 0);
}

/* ---- tiles ---- */

static void tiles_fit(void **state)
{
    static const saccade_dtype dtypes[] = {SACCADE_BF16, SACCADE_F16};
    (void)state;
    for (int D = 8; D <= 256; D += 8)
        for (int E = 8; E <= 256; E += 8)
            for (int f = 0; f < 2; f++)
                for (int n = 0; n < 4; n++) {
                    cu_tile tile;
                    const cu_family family = n & 1 ? CU_SM80 : CU_SM90;
                    const saccade_dtype dtype = dtypes[f];
                    const int most = n & 1 ? 166912 : 232448; /* A100's and H100's limits */
                    if (!cu_tile_choice(family, D, E, dtype, n / 2, &tile))
                        continue;
                    assert_true(cu_tile_shared(family, &tile, D, E) <= most);
                    assert_int_equal(tile.keys % 16, 0);
                    assert_true(cu_tile_threads(family, &tile, E) <= 1024);
                    assert_true(!tile.is_lazy || dtype == SACCADE_BF16);
                }
}

/* f32: whatever the head dims, some tile fits every GPU. */
/* The teams of the kernel of small tiles find room, and pieces are whole units. */
static void small_tiles_fit(void **state)
{
    cu_tile tile;
    (void)state;
    for (int D = 16; D <= 256; D += 16)
        for (int n = 0; cu_small_choice(D, D, n & 1, n / 2, &tile); n++) {
            const int shared = cu_small_shared(&tile, 3, D, D, 2) + 1024 /* the system's own */;
            assert_true(shared <= 228 << 10);
            assert_int_equal(tile.keys % PIECE_UNIT, 0);
            assert_int_equal(tile.groups, 1);
        }
    assert_false(cu_small_choice(256, 256, 0, 0, &tile));
    for (int D = 16; D <= 128; D += 16) {
        assert_true(cu_pair_choice(D, D, 0, &tile));
        assert_true(cu_small_shared(&tile, 2, D, D, 0) + 1024 <= 228 << 10);
    }
    assert_false(cu_pair_choice(256, 64, 0, &tile));
}

/* Whatever number of keys stays in shared memory, a few pieces hold it. */
static void keys_that_stay_fit(void **state)
{
    cu_tile tile;
    (void)state;
    for (int D = 16; D <= 128; D += 16)
        for (int KV = 1; KV <= FEW_KEYS; KV++)
            for (int rung = 0; cu_few_choice(D, D, KV, rung, &tile); rung++) {
                assert_true(tile.keys * tile.stages >= KV
                            && tile.keys * tile.stages < KV + 16 * tile.stages);
                assert_int_equal(tile.keys % 16, 0);
                assert_in_range(cu_few_buffers(&tile, D, D), 1, 2);
                assert_true(cu_few_shared(&tile, 3, D, D) <= cu_shared_most(90));
            }
    assert_false(cu_few_choice(64, 64, 0, 0, &tile)); /* a plan for any number */
    assert_false(cu_few_choice(64, 64, FEW_KEYS + 1, 0, &tile));
    assert_false(cu_few_choice(64, 144, 77, 0, &tile));
}

/* Fewer scores than other small tiles compute, and a head of several tiles. */
static void keys_that_stay_pay(void **state)
{
    static const struct {
        int D, group, Q, KV, pays;
    } rows[] = {{64, 1, 4096, 77, 1}, {64, 1, 4096, 128, 0}, {64, 1, 4096, 64, 0},
                {40, 1, 4096, 64, 1}, {64, 1, 197, 197, 1},  {64, 1, 192, 77, 0},
                {64, 4, 64, 77, 1},   {128, 1, 4096, 160, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const int D = rows[i].D;
        const saccade_sizes s = {2, 8 * rows[i].group, 8, rows[i].Q, rows[i].KV, D, D};
        cu_tile few, small;
        assert_true(cu_few_choice(cu_padded(D), cu_padded(D), rows[i].KV, 0, &few));
        assert_true(cu_small_choice(cu_padded(D), cu_padded(D), 0, 0, &small));
        assert_int_equal(cu_few_pays(&few, &small, D, &s), rows[i].pays);
    }
}

/* Sizes, and whether decode pays beside small tiles, and beside large ones. */
typedef struct pays_row {
    saccade_sizes s;
    int pays, beside_large;
} pays_row;

static void expect_pays(const pays_row *rows, size_t n, int span_rows)
{
    for (size_t i = 0; i < n; i++) {
        const int D = (int)rows[i].s.D;
        cu_tile small, large;
        assert_true(cu_small_choice(D, D, 0, 0, &small));
        assert_true(cu_tile_choice(CU_SM90, D, D, SACCADE_BF16, 0, &large));
        assert_int_equal(cu_decode_pays(132, span_rows, &small, 1, &rows[i].s), rows[i].pays);
        assert_int_equal(cu_decode_pays(132, span_rows, &large, 0, &rows[i].s),
                         rows[i].beside_large);
    }
}

/* Decode where it is bound by the keys that it reads, tiles where spans would read them again
 * and again or are so short that their ends count (figures of lab 137). */
static void decode_pays(void **state)
{
    static const pays_row rows[] = {
        {{8, 32, 8, 1, 8192, 128, 128}, 1, 1},  {{48, 32, 8, 1, 700, 128, 128}, 1, 1},
        {{64, 12, 12, 64, 64, 64, 64}, 0, 0},   {{48, 12, 12, 64, 8192, 64, 64}, 0, 0},
        {{48, 12, 12, 1, 64, 64, 64}, 0, 1},    {{48, 32, 8, 16, 8192, 128, 128}, 0, 0},
        {{8, 64, 8, 8, 8192, 128, 128}, 1, 1},  {{2, 12, 12, 64, 8192, 64, 64}, 1, 1},
        {{8, 16, 16, 33, 2048, 128, 128}, 0, 0}};
    (void)state;
    expect_pays(rows, sizeof rows / sizeof rows[0], CU_SPAN_ROWS);
}

/* Wide spans where tiles read the keys of a group again, and heads are no wider than 128
 * (figures of lab 140). */
static void wide_spans_pay(void **state)
{
    static const pays_row rows[] = {
        {{48, 32, 8, 16, 8192, 128, 128}, 1, 1}, {{48, 32, 8, 8, 8192, 128, 128}, 1, 1},
        {{48, 64, 8, 8, 8192, 128, 128}, 1, 1},  {{8, 128, 1, 1, 8192, 128, 128}, 1, 1},
        {{48, 32, 8, 16, 200, 128, 128}, 1, 1},  {{8, 12, 12, 33, 8192, 64, 64}, 1, 1},
        {{48, 12, 12, 64, 700, 64, 64}, 0, 0},   {{32, 8, 8, 24, 2048, 64, 64}, 0, 1}};
    static const saccade_sizes wide_heads = {48, 8, 8, 64, 2048, 256, 256};
    cu_tile large;
    (void)state;
    expect_pays(rows, sizeof rows / sizeof rows[0], CU_WIDE_ROWS);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        assert_true(cu_decode_wide_pays(132, 0, &rows[i].s));
    assert_true(cu_tile_choice(CU_SM90, 256, 256, SACCADE_BF16, 0, &large));
    assert_false(cu_decode_pays(132, CU_WIDE_ROWS, &large, 0, &wide_heads));
    assert_false(cu_decode_wide_pays(132, 1, &(saccade_sizes){48, 32, 8, 4, 8192, 128, 128}));
    assert_false(cu_decode_wide_pays(132, 0, &(saccade_sizes){8, 32, 8, 8, 8192, 128, 128}));
    assert_true(cu_decode_wide_pays(132, 1, &(saccade_sizes){8, 32, 8, 8, 8192, 128, 128}));
}

/* Pairs where three teams need as many rounds, if walks are long. */
static void pairs_pay(void **state)
{
    (void)state;
    assert_true(cu_pair_pays(132, 256, 1024));  /* b1 h16 q1024 */
    assert_true(cu_pair_pays(132, 512, 2048));  /* b1 h16 q2048 */
    assert_false(cu_pair_pays(132, 128, 512));  /* short walks */
    assert_false(cu_pair_pays(132, 300, 1024)); /* one round of three teams, two of two */
    assert_false(cu_pair_pays(132, 1024, 1024));
}

/* Small tiles where rows see few keys, large ones where they see many or where few tiles run.
 * */
static void small_tiles_pay(void **state)
{
    cu_tile small, large;
    (void)state;
    for (int dim = 64; dim <= 128; dim += 64) {
        assert_true(cu_small_choice(dim, dim, 0, 0, &small));
        assert_true(cu_tile_choice(CU_SM90, dim, dim, SACCADE_BF16, 0, &large));
        const int64_t most = 16 * 32768 / 64, few = most / large.groups;
        const cu_amount near[2] = {{most, most * 128 / small.keys, 3}, {few, few * 5 / 2, 3}};
        const cu_amount far[2] = {{most, most * 4096 / small.keys, 86}, {few, few * 32, 32}};
        const cu_amount lone[2] = {{64, 64 * 2048 / small.keys, 43}, {32, 32 * 16, 16}};
        assert_true(cu_small_pays(132, dim, 0, &small, near[0], &large, near[1]));
        assert_false(cu_small_pays(132, dim, 0, &small, far[0], &large, far[1]));
        assert_false(cu_small_pays(132, dim, 0, &small, lone[0], &large, lone[1]));
    }
    /* b2 h8 q4096: rows that split sectors make small tiles wait for their copies */
    const cu_amount many[2] = {{1024, 1024 * 32, 32}, {352, 352 * 32, 32}};
    assert_true(cu_pair_choice(64, 64, 0, &small));
    assert_true(cu_tile_choice(CU_SM90, 64, 64, SACCADE_BF16, 0, &large));
    assert_true(cu_small_pays(132, 64, 0, &small, many[0], &large, many[1]));
    assert_false(cu_small_pays(132, 40, 0, &small, many[0], &large, many[1]));
    assert_false(cu_small_pays(132, 48, 0, &small, many[0], &large, many[1]));
}

static void f32_tiles_fit(void **state)
{
    static const int sm[] = {80, 86, 89, 90, 100, 120};
    (void)state;
    for (int D = 16; D <= 256; D += 16)
        for (int E = 16; E <= 256; E += 16)
            for (int i = 0; i < 6; i++) {
                cu_tile tile;
                int n_fit = 0;
                for (int n = 0; cu_tile_choice(CU_F32, D, E, SACCADE_F32, n, &tile); n++) {
                    n_fit += cu_tile_shared(CU_F32, &tile, D, E) <= cu_shared_most(sm[i]);
                    assert_int_equal(tile.keys % (16 * cu_parts(E) / 2), 0);
                    assert_true(cu_tile_threads(CU_F32, &tile, E) <= 256);
                    assert_false(tile.is_lazy);
                }
                assert_true(n_fit > 0);
            }
}

static void decode_tiles_fit(void **state)
{
    (void)state;
    for (int D = 16; D <= 256; D += 16)
        for (int E = 16; E <= 256; E += 16) {
            cu_tile tile;
            assert_true(cu_decode_choice(D, E, 16, 9, 0, &tile));
            for (int rung = 0; cu_decode_wide_choice(D, E, 16, 9, rung, &tile); rung++) {
                assert_true(tile.stages >= 2 && tile.keys >= 16 && tile.groups == 8);
                assert_true(cu_decode_shared(&tile, CU_WIDE_ROWS, D, E, 16, 9, 4096) <= 232448);
            }
            for (int bits = 4; bits <= 16; bits *= 2)
                for (int rung = 0; cu_decode_choice(D, E, bits, 9, rung, &tile); rung++) {
                    assert_true(tile.stages >= (bits < 16 ? 2 : 1) && tile.keys >= 16);
                    assert_true(cu_decode_shared(&tile, CU_SPAN_ROWS, D, E, bits, 9, 4096)
                                <= 232448);
                }
        }
    for (int D = 16; D <= CU_LARGEST_D; D += 16)
        for (int E = 32; E <= CU_LARGEST_DV; E += 32)
            for (int bits = 4; bits <= 16 && cu_decode_parts(D, E) > 1; bits *= 2) {
                cu_tile tile;
                assert_true(cu_decode_wide_choice(D, E, bits, 9, 0, &tile));
                assert_true(tile.stages >= (bits < 16 ? 3 : 1));
                assert_true(tile.keys == 32 && tile.groups == 8);
                assert_true(cu_decode_shared(&tile, CU_WIDE_ROWS, D, E, bits, 9, CU_LARGE_SPANS)
                            <= 232448);
            }
    for (int words = 0; words < 600; words += 7) /* masks that keep much of each key */
        for (int rung = 0; rung < 4; rung++) {
            cu_tile tile;
            if (cu_decode_choice(128, 128, 16, words, rung, &tile))
                assert_true(cu_decode_shared(&tile, CU_SPAN_ROWS, 128, 128, 16, words, 4096)
                            <= 232448);
            else
                assert_true(rung > 0 || words > 200);
        }
    assert_true(cu_finds_spans(&(saccade_sizes){64, 96, 1, 128, 64, 64, 64}));
    assert_false(cu_finds_spans(&(saccade_sizes){10923, 96, 1, 128, 64, 64, 64}));
    assert_true(cu_decode_applies(&(saccade_sizes){1, 32, 8, 1, 100, 64, 64}, CU_SPAN_ROWS));
    assert_false(cu_decode_applies(&(saccade_sizes){1, 32, 8, 17, 100, 64, 64}, CU_SPAN_ROWS));
    /* one query's heads, however many */
    assert_true(cu_decode_applies(&(saccade_sizes){1, 71, 1, 1, 100, 64, 64}, CU_SPAN_ROWS));
    assert_true(cu_decode_applies(&(saccade_sizes){1, 256, 1, 1, 100, 64, 64}, CU_SPAN_ROWS));
    assert_false(cu_decode_applies(&(saccade_sizes){1, 71, 1, 2, 100, 64, 64}, CU_SPAN_ROWS));
    assert_false(cu_decode_applies(&(saccade_sizes){1, 257, 1, 1, 100, 64, 64}, CU_SPAN_ROWS));
    assert_true(cu_decode_applies(&(saccade_sizes){1, 32, 8, 32, 100, 64, 64}, CU_WIDE_ROWS));
    assert_false(cu_decode_applies(&(saccade_sizes){1, 32, 8, 33, 100, 64, 64}, CU_WIDE_ROWS));
    assert_true(cu_decode_applies(&(saccade_sizes){1, 8, 8, 64, 100, 64, 64}, CU_WIDE_ROWS));
    assert_false(cu_decode_applies(&(saccade_sizes){1, 8, 8, 65, 100, 64, 64}, CU_WIDE_ROWS));
    assert_int_equal(cu_decode_spans(&(saccade_sizes){2, 32, 8, 5, 100, 64, 64}, CU_SPAN_ROWS),
                     32);
    assert_int_equal(cu_decode_spans(&(saccade_sizes){2, 32, 8, 17, 100, 64, 64}, CU_WIDE_ROWS),
                     32);
}

/* ---- masks of groups ---- */

enum { GROUP_B = 2, GROUP_H = 6, GROUP_ROWS = 2, GROUP_COLUMNS = 23, GROUP_MOST = 1000 };

/* Blocks as letters, one word a row: runs of the same letter; 0 dead, 1 partial, 2 full. */
static void runs_of_blocks(const unsigned char *blocks, mask_runs *r, int64_t *begin,
                           saccade_run *runs)
{
    int64_t n = 0;
    for (int64_t row = 0; row < r->B * r->H * r->rows; row++) {
        const unsigned char *x = blocks + row * GROUP_COLUMNS;
        begin[row] = n;
        for (int k = 0; k < GROUP_COLUMNS; k++) {
            const int goes_on = k && x[k - 1] == x[k] && n > begin[row];
            if (x[k] && goes_on)
                runs[n - 1].count++;
            else if (x[k])
                runs[n++] = (saccade_run){k, 1, x[k] == 2};
        }
        begin[row + 1] = n;
    }
    r->row_begin = begin;
    r->runs = runs;
}

static unsigned char block_of(const mask_runs *r, int64_t row, int k)
{
    for (int64_t i = r->row_begin[row]; i < r->row_begin[row + 1]; i++)
        if (k >= r->runs[i].first && k < r->runs[i].first + r->runs[i].count)
            return (unsigned char)(1 + r->runs[i].full);
    return 0;
}

/* A block of a group is dead where all heads' are, full where all heads' are, else partial. */
static void groups_of_heads(void **state)
{
    static unsigned char blocks[GROUP_B * GROUP_H * GROUP_ROWS * GROUP_COLUMNS];
    static int64_t begin[GROUP_B * GROUP_H * GROUP_ROWS + 1];
    static saccade_run runs[GROUP_MOST];
    uint32_t x = 12345;
    (void)state;
    for (int round = 0; round < 60; round++) {
        mask_runs r = {
            .B = GROUP_B, .H = GROUP_H, .rows = GROUP_ROWS, .columns = GROUP_COLUMNS};
        cu_grouped g;
        for (size_t i = 0; i < sizeof blocks; i++) {
            x = x * 1664525u + 1013904223u;
            blocks[i] = round % 3 ? (unsigned char)((x >> 24) % 3) : (x >> 24) < 230 ? 2 : 0;
        }
        runs_of_blocks(blocks, &r, begin, runs);
        const int group = round % 2 ? 3 : 2, heads = GROUP_H / group;
        assert_int_equal(cu_group_heads(&r, group, &g, NULL), SACCADE_OK);
        assert_int_equal(g.r.H, heads);
        for (int64_t i = 0; i < GROUP_B * heads * GROUP_ROWS; i++) {
            const int64_t bg = i / GROUP_ROWS, row = i % GROUP_ROWS;
            int64_t live = 0;
            for (int k = 0; k < GROUP_COLUMNS; k++) {
                int n_live = 0, n_full = 0;
                for (int h = 0; h < group; h++) {
                    const int64_t head = bg / heads * GROUP_H + bg % heads * group + h;
                    const int b = blocks[(head * GROUP_ROWS + row) * GROUP_COLUMNS + k];
                    n_live += b > 0;
                    n_full += b == 2;
                }
                live += n_live > 0;
                assert_int_equal(block_of(&g.r, i, k), n_full == group ? 2 : n_live > 0);
            }
            assert_int_equal(g.r.row_live[i], live);
        }
        cu_grouped_free(&g);
    }
}

/* One launch: clusters find room, no CTA of one is without a block's worth of warps. */
static void decode_clusters_fit(void **state)
{
    unsigned grid = 0;
    (void)state;
    for (int spans = 1; spans <= 600; spans++)
        for (int blocks = 1; blocks <= 4096; blocks *= 4) {
            const int size = cu_decode_cluster(132, spans, blocks, 4, 1, &grid);
            assert_in_range(size, 0, 8);
            if (size == 0)
                continue;
            assert_true(grid <= 132 && grid % (unsigned)size == 0);
            assert_true(size == 1 || (size <= blocks && grid == (unsigned)(spans * size)));
        }
    assert_int_equal(cu_decode_cluster(132, 8, 4096, 4, 1, &grid), 8);
    assert_int_equal(cu_decode_cluster(132, 512, 256, 4, 0, &grid), 1);
    assert_int_equal(grid, 128);
    assert_int_equal(cu_decode_cluster(132, 8, 4096, 4, 0, &grid), 0);
    assert_int_equal(cu_decode_cluster(132, 133, 4096, 4, 0, &grid), 0);
}

/* Two CTAs to a multiprocessor have room, for spans that fill them. */
static void halves_of_decode_fit(void **state)
{
    (void)state;
    for (int bits = 4; bits <= 8; bits += 4)
        for (int dim = 32; dim <= 256; dim += 32) {
            cu_tile whole, half;
            const int is_there = cu_decode_half_choice(dim, dim, bits, 9, 0, &half);
            assert_true(is_there || dim > 128);
            assert_true(cu_decode_choice(dim, dim, bits, 9, 0, &whole));
            assert_int_equal(half.keys, whole.keys); /* they share lists and workspaces */
            const int bytes = cu_decode_shared(&half, CU_SPAN_ROWS, dim, dim, bits, 9, 0);
            assert_true(!is_there || 2 * bytes <= 231424);
        }
    for (int spans = 1; spans <= 4096; spans++) {
        const int rounds = (spans + 263) / 264;
        assert_true(!cu_decode_half_pays(132, spans) || spans > 237 * rounds);
    }
    assert_true(cu_decode_half_pays(132, 256) && cu_decode_half_pays(132, 1024));
    assert_false(cu_decode_half_pays(132, 8) || cu_decode_half_pays(132, 132));
    assert_true(cu_decode_owns_pays(132, 198) && cu_decode_owns_pays(132, 4096));
    assert_false(cu_decode_owns_pays(132, 132) || cu_decode_owns_pays(132, 197));
}

/* ---- text and compilation ---- */

static saccade_plan *plan_for(const char *score, const char *mask, int D, saccade_dtype dtype,
                              const char *arch)
{
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_mod *mods[2] = {score ? case_mod(SACCADE_SCORE, score) : NULL,
                            mask ? case_mod(SACCADE_MASK, mask) : NULL};
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = D, .Dv = D};
    p.dtype = dtype;
    p.backend = "cuda";
    p.arch = arch;
    p.score = mods[0];
    p.mask = mods[1];
    if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s %s d%d %s: %s", score ? score : "-", mask ? mask : "-", D, arch,
                 err.message);
    saccade_mod_destroy(mods[0]);
    saccade_mod_destroy(mods[1]);
    return plan;
}

static const struct {
    const char *score, *mask;
} variants[] = {{NULL, NULL},
                {NULL, "causal()"},
                {"relative_bias()", NULL},
                {"alibi()", "causal()"},
                {NULL, "sliding_window(W)"},
                {NULL, "kv < W || q >= kv"},
                {"softcap(20)", "causal()"},
                {NULL, "document(doc) && causal()"}};

enum { VARIANTS = sizeof variants / sizeof variants[0] };

/* No program of the plan spills, and none waits for its products one by one. */
static void check_programs(int variant, int D, saccade_dtype dtype, const char *arch,
                           int is_first_tile)
{
    char *text = NULL;
    saccade_plan *plan =
        plan_for(variants[variant].score, variants[variant].mask, D, dtype, arch);
    assert_int_equal(saccade_plan_explain(plan, &text, NULL), SACCADE_OK);
    if (!strstr(text, "spill bytes: 0\n") || !strstr(text, "serialised products: no\n")
        || (is_first_tile && strstr(text, "tile note")))
        fail_msg("variant %d, d%d, %s:\n%.800s", variant, D, arch, strstr(text, "arch:"));
    saccade_free(text);
    saccade_plan_destroy(plan);
}

static void no_spills(void **state)
{
    (void)state;
    skip_without_nvrtc();
    /* The others than bf16 on sm_90a: in thorough runs, else every fourth variant from here. */
    static const int rest[4] = {0, 3, 0, 2};
    for (int i = 0; i < VARIANTS; i++) {
        const int D = i % 3 == 0 ? 64 : i % 3 == 1 ? 128 : 256;
        for (int n = 0; n < 4; n++)
            if (n == 0 || i % 4 == rest[n] || (is_thorough_run() && !(n & 2 && i & 1)))
                check_programs(i, D, n & 2 ? SACCADE_F32 : SACCADE_BF16,
                               n & 1 ? "sm_80" : "sm_90a", 1);
    }
}

/* Plans without a mod have a program of pairs, which neither spills nor waits. */
static void programs_of_pairs(void **state)
{
    (void)state;
    skip_without_nvrtc();
    for (int n = 0; n < 4; n++) {
        saccade_plan *plan = plan_for(NULL, n == 3 ? "causal()" : NULL, n == 1 ? 128 : 64,
                                      n == 2 ? SACCADE_F16 : SACCADE_BF16, "sm_90a");
        const cu_image *image = &((const cu_state *)plan->state)->programs[CU_PAIR].image;
        assert_int_equal(image->code != NULL, n < 2);
        assert_int_equal(image->report.spill_bytes, 0);
        assert_false(image->report.is_serialised);
        saccade_plan_destroy(plan);
    }
}

/* Decode that loads by warps of its own keeps some addresses in memory, and the careful path
 * over codes of latent heads some numbers. */
static int spills_allowed(cu_program program, const saccade_problem *p)
{
    const int has_codes = p->kv_dtype != SACCADE_NONE && p->kv_dtype != p->dtype;
    return program == CU_DECODE_WIDE || (program == CU_LATENT && has_codes)
               ? cu_program_kinds[program].spill_most
               : 0;
}

static void expect_no_spills(const cu_state *s, const saccade_problem *p)
{
    for (int n = 0; n < CU_PROGRAMS; n++)
        if (s->programs[n].image.report.spill_bytes > spills_allowed((cu_program)n, p))
            fail_msg("%s, d%lld, %s: %d bytes spilled", cu_program_kinds[n].name,
                     (long long)p->sizes.D, p->arch, s->programs[n].image.report.spill_bytes);
}

/* Plans that say how many keys there are have a program that keeps them, which neither spills
 * nor waits. */
static void programs_of_keys_that_stay(void **state)
{
    static const struct {
        int D, KV;
        saccade_dtype dtype;
        const char *score, *mask;
        int is_there;
    } rows[] = {{64, 77, SACCADE_BF16, NULL, NULL, 1},
                {64, 257, SACCADE_BF16, NULL, NULL, 0},
                {128, 256, SACCADE_F16, NULL, NULL, 1},
                {40, 96, SACCADE_BF16, "alibi()", NULL, 1},
                {80, 160, SACCADE_BF16, "softcap(20)", NULL, 1},
                {64, 77, SACCADE_BF16, NULL, "causal()", 0}};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_problem p;
        saccade_plan *plan = NULL;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){
            .H = 4, .Hkv = 2, .KV = rows[i].KV, .D = rows[i].D, .Dv = rows[i].D};
        p.dtype = rows[i].dtype;
        p.backend = "cuda";
        p.arch = "sm_90a";
        p.score = rows[i].score ? case_mod(SACCADE_SCORE, rows[i].score) : NULL;
        p.mask = rows[i].mask ? case_mod(SACCADE_MASK, rows[i].mask) : NULL;
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, NULL), SACCADE_OK);
        const cu_loaded *few = &((const cu_state *)plan->state)->programs[CU_FEW];
        assert_int_equal(few->image.code != NULL, rows[i].is_there);
        assert_int_equal(few->rung, 0);
        expect_no_spills(plan->state, &p);
        saccade_plan_destroy(plan);
        saccade_mod_destroy((saccade_mod *)p.score);
        saccade_mod_destroy((saccade_mod *)p.mask);
    }
}

/* Warpgroups that multiply in a CTA with others that load; 0: nobody hands registers over. */
static int growing_groups(cu_program which, const cu_form *form)
{
    const cu_operation operation = cu_program_kinds[which].operation;
    if (operation == CU_OP_DECODE)
        return form->span_rows > CU_SPAN_ROWS ? form->tile.groups / 4 : 0;
    if (form->family != CU_SM90 || (operation != CU_OP_FORWARD && operation != CU_OP_SMALL))
        return 0;
    return form->teams ? form->teams : form->tile.groups;
}

static int constant_of(const cu_headers *headers, const char *name)
{
    const char *line = strstr(strbuf_text(&headers->config), name);
    assert_non_null(line);
    return atoi(line + strlen(name));
}

static void check_registers(const saccade_plan *plan)
{
    const cu_state *s = plan->state;
    for (int n = 0; n < CU_PROGRAMS; n++) {
        const cu_loaded *l = &s->programs[n];
        const int groups = l->image.code ? growing_groups((cu_program)n, &l->form) : 0;
        cu_headers headers;
        if (!groups)
            continue;
        strbuf_init(&headers.config, 0);
        strbuf_init(&headers.products, 0);
        cu_write_forward(s, &plan->problem, &cu_program_kinds[n], &l->form, &headers);
        const int scores = constant_of(&headers, "CFG_REGS_SCORES ");
        const int wanted = constant_of(&headers, "CFG_REGS_PRODUCER ") + scores
                           + (groups - !!scores) * constant_of(&headers, "CFG_REGS_CONSUMER ");
        if (wanted > (groups + 1) * l->image.report.registers)
            fail_msg("%s, d%d, page %d: %d of %d", cu_program_kinds[n].name,
                     (int)plan->problem.sizes.D, (int)plan->problem.page, wanted,
                     (groups + 1) * l->image.report.registers);
        strbuf_free(&headers.config);
        strbuf_free(&headers.products);
    }
}

static saccade_problem large_heads(int D, int Dv, saccade_dtype dtype, const char *arch)
{
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 16, .Hkv = 1, .D = D, .Dv = Dv};
    p.dtype = dtype;
    p.backend = "cuda";
    p.arch = arch;
    return p;
}

/* Two warps share columns of V: each has whole pieces of products, of codes whole 16 bytes. */
static void values_of_large_heads_are_padded(void **state)
{
    (void)state;
    assert_int_equal(cu_padded_values(256, 40, 16), 48);
    assert_int_equal(cu_padded_values(256, 32, 4), 32);
    assert_int_equal(cu_padded_values(272, 48, 16), 64);
    assert_int_equal(cu_padded_values(576, 8, 16), 32);
    assert_int_equal(cu_padded_values(64, 296, 16), 320);
    assert_int_equal(cu_padded_values(576, 272, 8), 288);
    assert_int_equal(cu_padded_values(576, 288, 4), 320);
    assert_int_equal(cu_padded_values(576, 512, 4), 512);
}

/* Heads of latent attention: decode alone, over keys of every form. */
static void programs_of_large_heads(void **state)
{
    static const struct {
        int D, Dv, page;
        const char *mask;
        saccade_dtype dtype, kv_dtype;
        int tokens, channels, is_latent;
    } rows[] = {{576, 512, 0, NULL, SACCADE_BF16, SACCADE_NONE, 0, 0, 1},
                {576, 512, 64, "causal()", SACCADE_F16, SACCADE_NONE, 0, 0, 1},
                {576, 512, 16, "document(doc)", SACCADE_BF16, SACCADE_NONE, 0, 0, 1},
                {320, 256, 0, "sliding_window(W)", SACCADE_BF16, SACCADE_NONE, 0, 0, 1},
                {448, 384, 0, NULL, SACCADE_F16, SACCADE_NONE, 0, 0, 1},
                {512, 512, 0, NULL, SACCADE_BF16, SACCADE_NONE, 0, 0, 1},
                {504, 512, 0, NULL, SACCADE_BF16, SACCADE_NONE, 0, 0, 0},
                {576, 288, 0, NULL, SACCADE_BF16, SACCADE_NONE, 0, 0, 0},
                {64, 304, 0, "causal()", SACCADE_BF16, SACCADE_NONE, 0, 0, 0},
                {576, 512, 0, NULL, SACCADE_BF16, SACCADE_E4M3, 1, 0, 1},
                {576, 512, 0, "causal()", SACCADE_BF16, SACCADE_I4, 1, 64, 1},
                {448, 384, 0, NULL, SACCADE_F16, SACCADE_I8, 0, 0, 1},
                {576, 512, 0, NULL, SACCADE_BF16, SACCADE_E4M3, 1, 8, 0},
                {576, 512, 1, "causal()", SACCADE_BF16, SACCADE_I8, 1, 0, 0},
                {576, 512, 0, NULL, SACCADE_F16, SACCADE_E5M2, 0, 0, 1},
                {576, 288, 0, NULL, SACCADE_BF16, SACCADE_I4, 1, 0, 0},
                {272, 512, 0, NULL, SACCADE_BF16, SACCADE_E4M3, 1, 128, 0}};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const saccade_sizes run = {8, 16, 1, 2, 4096, rows[i].D, rows[i].Dv};
        saccade_problem p = large_heads(rows[i].D, rows[i].Dv, rows[i].dtype, "sm_90a");
        saccade_plan *plan = NULL;
        saccade_error err;
        p.page = rows[i].page;
        p.mask = rows[i].mask ? case_mod(SACCADE_MASK, rows[i].mask) : NULL;
        p.kv_dtype = rows[i].kv_dtype;
        p.k_scale_tokens = p.v_scale_tokens = rows[i].tokens;
        p.k_scale_channels = p.v_scale_channels = rows[i].channels;
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("%s: %s", err.where, err.message);
        const cu_state *s = plan->state;
        for (int n = 0; n < CU_PROGRAMS; n++)
            assert_int_equal(s->programs[n].image.code != NULL,
                             n == CU_DECODE_WIDE || (n == CU_LATENT && rows[i].is_latent));
        if (!rows[i].page)
            expect_no_spills(s, &p);
        check_registers(plan);
        const size_t bytes = saccade_plan_workspace(plan, &run);
        assert_true(bytes > 0 && bytes < (size_t)1 << 30);
        saccade_plan_destroy(plan);
        saccade_mod_destroy((saccade_mod *)p.mask);
    }
}

/* What large heads are not had with is said when the plan is made. */
static void refusals_of_large_heads(void **state)
{
    static const struct {
        int D, Dv;
        saccade_dtype dtype;
        const char *arch;
        int gradients, is_invariant;
        saccade_dtype kv_dtype;
    } rows[] = {{592, 512, SACCADE_BF16, "sm_90a", 0, 0, SACCADE_NONE},
                {576, 528, SACCADE_BF16, "sm_90a", 0, 0, SACCADE_NONE},
                {576, 512, SACCADE_F32, "sm_90a", 0, 0, SACCADE_NONE},
                {576, 512, SACCADE_BF16, "sm_80", 0, 0, SACCADE_NONE},
                {576, 512, SACCADE_F16, "sm_90a", 1, 0, SACCADE_NONE},
                {576, 512, SACCADE_F16, "sm_90a", 0, 1, SACCADE_NONE},
                {576, 512, SACCADE_BF16, "sm_80", 0, 0, SACCADE_E4M3},
                {576, 512, SACCADE_F32, "sm_90a", 0, 0, SACCADE_I8},
                {568, 512, SACCADE_BF16, "sm_90a", 0, 0, SACCADE_E4M3},
                {576, 496, SACCADE_BF16, "sm_90a", 0, 0, SACCADE_I4},
                {576, 512, SACCADE_BF16, "sm_90a", 0, SACCADE_INVARIANT_SHORT, SACCADE_E4M3}};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_problem p = large_heads(rows[i].D, rows[i].Dv, rows[i].dtype, rows[i].arch);
        saccade_plan *plan = NULL;
        saccade_error err;
        p.gradients = rows[i].gradients ? SACCADE_GRADIENT_Q : 0;
        p.batch_invariant = rows[i].is_invariant;
        p.kv_dtype = rows[i].kv_dtype;
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EBACKEND);
        assert_non_null(strstr(err.message, "head dims"));
    }
}

/* Keys in chunks: programs for any GPU, none of which spills. */
static void programs_of_chunks(void **state)
{
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < 6; i++) {
        saccade_problem p;
        if (i % 3 == 1 && !is_thorough_run())
            continue;
        saccade_problem_init(&p);
        const int D = i < 2 ? 64 : i < 4 ? 128 : 256;
        p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = D, .Dv = D};
        p.dtype = i == 3 ? SACCADE_F32 : i == 4 ? SACCADE_F16 : SACCADE_BF16;
        p.arch = i % 2 ? "sm_80" : "sm_90a";
        p.mask = i < 4 ? case_mod(SACCADE_MASK, "causal()") : NULL;
        saccade_plan *plan = chunk_plan(&p, cuda_solvers);
        const cu_state *s = plan->state;
        const int is_sm90 = strcmp(p.arch, "sm_90a") == 0 && p.dtype != SACCADE_F32;
        assert_int_equal(s->programs[CU_DECODE].image.code != NULL, is_sm90);
        assert_int_equal(s->programs[CU_UNALIGNED].image.code != NULL, is_sm90);
        expect_no_spills(s, &p);
        assert_int_equal(s->programs[CU_MAIN].form.family == CU_SM90, is_sm90);
        assert_int_equal(s->programs[CU_MAIN].rung, 0);
        assert_non_null(s->programs[CU_MAIN].image.code);
        saccade_plan_destroy(plan);
        saccade_mod_destroy((saccade_mod *)p.mask);
    }
}

/* Some rows of a sequence, gradients too: no program spills, and decode has none. */
static void programs_of_rows(void **state)
{
    static const struct {
        const char *mask, *score, *arch;
        int D;
    } rows[] = {{"(q ^ kv) % 5 != 0", NULL, "sm_90a", 128},
                {"causal()", "score * sigmoid(score)", "sm_90a", 64},
                {"causal()", "softcap(20)", "sm_90a", 128},
                {"causal()", "alibi()", "sm_80", 64}};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < (is_thorough_run() ? sizeof rows / sizeof rows[0] : 2); i++) {
        saccade_error err = {0};
        saccade_plan *plan = NULL;
        saccade_problem p;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = rows[i].D, .Dv = rows[i].D};
        p.dtype = SACCADE_BF16;
        p.backend = "cuda";
        p.arch = rows[i].arch;
        p.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
        p.mask = case_mod(SACCADE_MASK, rows[i].mask);
        p.score = rows[i].score ? case_mod(SACCADE_SCORE, rows[i].score) : NULL;
        if (api_plan_create(NULL, &p, 1, &plan, &err) != SACCADE_OK)
            fail_msg("%s", err.message);
        const cu_state *s = plan->state;
        assert_null(s->programs[CU_DECODE].image.code);
        if (rows[i].D == 64 && s->family == CU_SM90) /* as a plan without a score has */
            assert_int_equal(cu_row_tile(plan, NULL), 192);
        assert_int_equal(cu_row_tile(plan, NULL) % ROW_BLOCK, 0);
        expect_no_spills(s, &p);
        saccade_plan_destroy(plan);
        saccade_mod_destroy((saccade_mod *)p.mask);
        saccade_mod_destroy((saccade_mod *)p.score);
    }
}

/* 1 live and proven whole, 2 live, by block; transposed runs have keys for rows. */
static void spread_runs(const mask_runs *r, int64_t head, uint8_t *to, int64_t columns)
{
    for (int64_t row = 0; row < r->rows; row++) {
        int64_t live = 0, at = head * r->rows + row;
        for (int64_t i = r->row_begin[at]; i < r->row_begin[at + 1]; i++)
            for (int32_t j = 0; j < r->runs[i].count; j++, live++) {
                assert_int_equal(to[row * columns + r->runs[i].first + j], 0);
                to[row * columns + r->runs[i].first + j] = r->runs[i].full ? 1 : 2;
            }
        assert_int_equal(live, r->row_live[at]);
    }
}

/* Block by block: what is here of a block mask is what the mask has there. */
static void rows_of_block_masks(void **state)
{
    enum { N = 1000, UNIT = 64, BLOCKS = 16 };
    static const plan_part parts[] = {{64, 192, 0}, {384, 64, 192}, {832, 168, 256}};
    static const int there[] = {1, 2, 3, 6, 13, 14, 15};
    const plan_rows rows = {.part = parts, .n = 3, .all = N};
    enum { HERE = sizeof there / sizeof there[0] };
    saccade_mod *mod =
        case_mod(SACCADE_MASK, "h == 0 ? q >= kv : (q / 64 * 5 + kv / 50) % 3 != 1");
    const saccade_sizes sizes = {1, 2, 2, N, N, 64, 64};
    saccade_block_mask *mask = NULL;
    (void)state;
    assert_int_equal(
        saccade_block_mask_create(NULL, mod, &sizes, NULL, NULL, 0, NULL, &mask, NULL), 0);
    assert_int_equal(cu_row_count(&rows), 424);
    for (int transposed = 0; transposed < 2; transposed++) {
        const mask_runs *r;
        cu_selected own;
        assert_int_equal(mask_runs_for(mask, UNIT, UNIT, transposed, &r, NULL), 0);
        assert_int_equal(cu_select_rows(r, &rows, UNIT, transposed, &own, NULL), 0);
        for (int64_t h = 0; h < 2; h++) {
            uint8_t all[BLOCKS * BLOCKS] = {0}, here[BLOCKS * BLOCKS] = {0};
            spread_runs(r, h, all, BLOCKS);
            spread_runs(&own.r, h, here, BLOCKS);
            for (int i = 0; i < HERE; i++)
                for (int j = 0; j < BLOCKS; j++)
                    assert_int_equal(transposed ? here[j * BLOCKS + i] : here[i * BLOCKS + j],
                                     transposed ? all[j * BLOCKS + there[i]]
                                                : all[there[i] * BLOCKS + j]);
        }
        cu_selected_free(&own);
    }
    saccade_block_mask_destroy(mask);
    saccade_mod_destroy(mod);
}

/* As if the other rank had sent the same. */
static int echo(void *user, const saccade_message *sends, int32_t n_sends,
                const saccade_message *receives, int32_t n_receives, double seconds)
{
    (void)user, (void)seconds;
    for (int32_t i = 0; i < n_sends && i < n_receives; i++)
        memcpy(receives[i].data, sends[i].data, sends[i].bytes);
    return 0;
}

static void count_abort(void *user)
{
    ++*(int *)user;
}

/* Where rows of some rank begin in the middle of a tile, all are refused when they are made. */
static void rows_amid_a_tile(void **state)
{
    saccade_problem p;
    saccade_shard_options o;
    saccade_shard_plan *shards;
    (void)state;
    skip_without_nvrtc();
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 1, .Hkv = 1, .D = 64, .Dv = 64};
    p.dtype = SACCADE_BF16;
    p.arch = "sm_80";
    p.backend = "cuda";
    saccade_shard_options_init(&o);
    o.ranks = 2;
    o.chunk = o.tile = 16;
    o.Q = o.KV = 32;
    assert_int_equal(saccade_shard_plan_create(&o, &shards, NULL), SACCADE_OK);
    for (int32_t rank = 0; rank < o.ranks; rank++) {
        saccade_dist *dist = NULL;
        saccade_transport t;
        saccade_error err = {0};
        int n_aborts = 0;
        saccade_transport_init(&t);
        t.rank = rank;
        t.ranks = o.ranks;
        t.exchange = echo;
        t.abort = count_abort;
        t.user = &n_aborts;
        assert_int_equal(saccade_dist_create(NULL, &p, shards, 0, &t, &dist, &err),
                         SACCADE_EINVAL);
        assert_string_equal(err.where, "shards");
        assert_null(dist);
        assert_int_equal(n_aborts, 1);
    }
    saccade_shard_plan_destroy(shards);
}

/* Sequences of unequal lengths: tiles for every GPU, Hopper's too, none of which spills. */
static void programs_of_ragged_runs(void **state)
{
    static const char *const masks[] = {"causal()", NULL, "(q + kv) % 3 != 1"};
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < (is_short_run() ? 1 : is_thorough_run() ? 5 : 3); i++) {
        saccade_problem p;
        saccade_plan *plan;
        saccade_error err = {0};
        saccade_problem_init(&p);
        const int D = i < 3 ? 128 : 64;
        p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = D, .Dv = D};
        p.dtype = i == 2 ? SACCADE_F32 : i == 4 ? SACCADE_F16 : SACCADE_BF16;
        p.arch = i == 1 ? "sm_80" : "sm_90a";
        p.backend = "cuda";
        p.ragged = 1;
        p.batch_invariant = i < 3 ? 0 : SACCADE_INVARIANT_SHORT;
        p.mask = masks[i % 3] ? case_mod(SACCADE_MASK, masks[i % 3]) : NULL;
        if (saccade_plan_create(NULL, &p, &plan, &err))
            fail_msg("%s: %s", err.where, err.message);
        const cu_state *s = plan->state;
        const int has_decode = i != 1 && p.dtype != SACCADE_F32;
        assert_int_equal(s->programs[CU_DECODE].image.code != NULL, has_decode);
        expect_no_spills(s, &p);
        saccade_plan_destroy(plan);
        saccade_mod_destroy((saccade_mod *)p.mask);
    }
}

/* Decode over codes: a scale a key in pages, scales of groups in one piece. */
static void decode_of_codes(void **state)
{
    static const saccade_dtype codes[] = {SACCADE_E4M3, SACCADE_I4, SACCADE_E4M3};
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < (is_short_run() ? 1 : is_thorough_run() ? 3 : 2); i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        saccade_problem p;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){.H = 8, .Hkv = 2, .D = 128, .Dv = 128};
        p.dtype = i % 2 ? SACCADE_F16 : SACCADE_BF16;
        p.kv_dtype = codes[i];
        p.backend = "cuda";
        p.arch = "sm_90a";
        p.page = i == 1 ? 0 : 16;
        p.batch_invariant = i == 2 ? SACCADE_INVARIANT_SHORT : 0;
        p.k_scale_tokens = p.v_scale_tokens = i == 1 ? 16 : 1;
        p.k_scale_channels = p.v_scale_channels = i == 1 ? 32 : 0;
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("%s: %s", err.where, err.message);
        const cu_state *s = plan->state;
        assert_non_null(s->programs[CU_DECODE].image.code);
        assert_int_equal(s->programs[CU_DECODE].rung, 0);
        assert_int_equal(s->programs[CU_DECODE_HALF].image.code != NULL, i != 2);
        expect_no_spills(s, &p);
        saccade_plan_destroy(plan);
    }
}

/* Results in f32 of bf16 and f16 problems: the same tiles, and no program spills. */
static void programs_of_pages(void **state)
{
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_problem p;
    char *text = NULL;
    (void)state;
    skip_without_nvrtc();
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = 128, .Dv = 128};
    p.dtype = SACCADE_BF16;
    p.backend = "cuda";
    p.arch = "sm_90a";
    p.page = 48;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    const cu_state *s = plan->state;
    expect_no_spills(s, &p);
    assert_int_equal(saccade_plan_explain(plan, &text, &err), SACCADE_OK);
    assert_non_null(strstr(text, "pages, decode: copied by 16 bytes or less\n"));
    assert_non_null(strstr(text, "pages, forward: tensor copies of 16 keys\n"));
    saccade_free(text);
    saccade_plan_destroy(plan);
}

/* Kernels that read out in backward take it for f32. */
static void check_reads_out(const saccade_plan *plan)
{
    static const cu_program readers[] = {CU_BWD_PREPARE, CU_BWD_SINKS};
    const cu_state *s = plan->state;
    for (size_t i = 0; i < sizeof readers / sizeof readers[0]; i++) {
        cu_headers headers;
        strbuf_init(&headers.config, 0);
        strbuf_init(&headers.products, 0);
        cu_write_backward(s, &plan->problem, &cu_program_kinds[readers[i]],
                          &s->programs[readers[i]].form, &headers);
        assert_int_equal(constant_of(&headers, "CFG_OUT_F32 "), 1);
        strbuf_free(&headers.config);
        strbuf_free(&headers.products);
    }
}

/* Forward's; then with gradients, of a score's captures and of sinks too, where backward reads
 * them. d_out stays in 16 bits. */
static void programs_of_f32_results(void **state)
{
    static const char text[] = "score + slope[h] * (kv - q)";
    static const char *const names[] = {"slope"};
    static const struct {
        int D, Dv;
        saccade_dtype dtype;
        const char *arch;
        int32_t ragged;
        int64_t KV;
    } rows[] = {{128, 128, SACCADE_BF16, "sm_90a", 0, 0},
                {40, 17, SACCADE_F16, "sm_80", 0, 0},
                {64, 64, SACCADE_BF16, "sm_90a", 1, 0},
                {64, 64, SACCADE_BF16, "sm_90a", 0, 256}, /* by kernels that keep all keys */
                {256, 256, SACCADE_F16, "sm_80", 0, 0}};
    const saccade_capture capture = {"slope", SACCADE_F32, 1};
    saccade_mod *parsed, *score;
    (void)state;
    skip_without_nvrtc();
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &parsed, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_mod_bind(parsed, &capture, 1, &score, NULL), SACCADE_OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        saccade_problem p;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){
            .H = 4, .Hkv = 2, .KV = rows[i].KV, .D = rows[i].D, .Dv = rows[i].Dv};
        p.dtype = rows[i].dtype;
        p.out_dtype = SACCADE_F32;
        p.backend = "cuda";
        p.arch = rows[i].arch;
        p.ragged = rows[i].ragged;
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("d%d, %s: %s", rows[i].D, p.arch, err.message);
        const cu_state *s = plan->state;
        assert_non_null(s->programs[CU_MAIN].image.code);
        expect_no_spills(s, &p);
        saccade_plan_destroy(plan);
        p.gradients = SACCADE_GRADIENT_Q;
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EBACKEND);
        p.gradients |= SACCADE_GRADIENT_K | SACCADE_GRADIENT_V | SACCADE_GRADIENT_CAPTURES
                       | SACCADE_GRADIENT_SINKS;
        p.d_out_dtype = rows[i].dtype;
        p.sinks_dtype = SACCADE_F32;
        p.score = score;
        p.gradient_captures = names;
        p.n_gradient_captures = 1;
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("d%d, %s: %s", rows[i].D, p.arch, err.message);
        s = plan->state;
        assert_non_null(s->programs[CU_BWD_PREPARE].image.code);
        assert_non_null(s->programs[CU_BWD_SINKS].image.code);
        check_reads_out(plan);
        expect_no_spills(s, &p);
        saccade_plan_destroy(plan);
    }
    saccade_mod_destroy(score);
    saccade_mod_destroy(parsed);
}

/* A mask that keeps more of each key than shared memory holds is refused by name. */
static void masks_of_many_words(void **state)
{
    static const char text[] = "sum(i, 400, int(a[kv, i] > q)) > 3";
    const saccade_capture a = {.name = "a", .dtype = SACCADE_I32, .rank = 2};
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_mod *parsed, *mask;
    saccade_problem p;
    (void)state;
    assert_int_equal(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &parsed, NULL),
                     SACCADE_OK);
    assert_int_equal(saccade_mod_bind(parsed, &a, 1, &mask, NULL), SACCADE_OK);
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 2, .Hkv = 2, .D = 64, .Dv = 64};
    p.dtype = SACCADE_BF16;
    p.backend = "cuda";
    p.arch = "sm_90a";
    p.mask = mask;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EBACKEND);
    assert_non_null(strstr(err.message, "got a mask that keeps 400 words of each key"));
    saccade_mod_destroy(mask);
    saccade_mod_destroy(parsed);
}

/* Sinks take no tile away, forward, decode and backward, and no program spills. */
static void programs_of_sinks(void **state)
{
    static const struct {
        int D;
        saccade_dtype dtype, sinks;
        const char *arch;
    } rows[] = {{128, SACCADE_BF16, SACCADE_BF16, "sm_90a"},
                {64, SACCADE_F16, SACCADE_F16, "sm_90a"},
                {64, SACCADE_F32, SACCADE_F32, "sm_80"}};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        saccade_problem p;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = rows[i].D, .Dv = rows[i].D};
        p.dtype = rows[i].dtype;
        p.backend = "cuda";
        p.arch = rows[i].arch;
        p.sinks_dtype = rows[i].sinks;
        p.gradients = p.dtype == SACCADE_F32 ? 0 : SACCADE_GRADIENT_V | SACCADE_GRADIENT_SINKS;
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("d%d, %s: %s", rows[i].D, p.arch, err.message);
        const cu_state *s = plan->state;
        assert_int_equal(s->programs[CU_MAIN].rung, 0);
        assert_int_equal(!p.gradients, !s->programs[CU_BWD_SINKS].image.code);
        expect_no_spills(s, &p);
        for (int n = 0; n < CU_PROGRAMS; n++)
            assert_false(s->programs[n].image.report.is_serialised);
        saccade_plan_destroy(plan);
    }
}

/* Where O leaves the fewest registers, smaller tiles take over. */
static void no_spills_in_wide_heads(void **state)
{
    (void)state;
    skip_without_nvrtc();
    for (int i = 1; i < VARIANTS; i += 2)
        check_programs(i, 256, i & 2 ? SACCADE_BF16 : SACCADE_F16, "sm_80", 0);
}

/* The loop that measures a device. */
static void peak_compiles(void **state)
{
    static const char *const archs[] = {"sm_90a", "sm_80"};
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < 2; i++) {
        cu_image image;
        saccade_error err = {0};
        if (cu_compile_peak(archs[i], &image, &err) != SACCADE_OK)
            fail_msg("%s: %s", archs[i], err.message);
        assert_int_equal(image.report.spill_bytes, 0);
        assert_false(image.report.is_serialised);
        free(image.code);
    }
}

static const pass_facts *facts_of(const saccade_mod *mod, arena *a)
{
    const pass_facts *facts = NULL;
    if (mod)
        assert_int_equal(pass_facts_make(mod_function(mod), a, &facts, NULL), SACCADE_OK);
    return facts;
}

/* Device code of a mod of each kind, or NULL. */
static strbuf emitted_at(const char *score, const char *mask, int32_t h_offset,
                         int32_t heads_global)
{
    saccade_mod *mods[2] = {score ? case_mod(SACCADE_SCORE, score) : NULL,
                            mask ? case_mod(SACCADE_MASK, mask) : NULL};
    arena a;
    arena_init(&a);
    const plan_problem p = {.sizes = {1, 4, 4, 64, 64, 64, 64},
                            .group = 1,
                            .h_offset = h_offset,
                            .heads_global = heads_global,
                            .scale = 0.125f,
                            .score = mods[0] ? mod_function(mods[0]) : NULL,
                            .mask = mods[1] ? mod_function(mods[1]) : NULL,
                            .score_facts = facts_of(mods[0], &a),
                            .mask_facts = facts_of(mods[1], &a)};
    cu_mod_text facts;
    strbuf text;
    strbuf_init(&text, 0);
    assert_int_equal(cu_emit_mod(&p, &text, &facts, NULL), SACCADE_OK);
    arena_free(&a);
    saccade_mod_destroy(mods[0]);
    saccade_mod_destroy(mods[1]);
    return text;
}

static strbuf emitted(const char *score, const char *mask)
{
    return emitted_at(score, mask, 0, 4);
}

/* Texts see all heads where a run holds a part of them; kernels count their own. */
static void text_of_heads(void **state)
{
    static const char *const texts[][2] = {{"score * float(h) / H", NULL},
                                           {NULL, "kv <= q + h * H"},
                                           {NULL, "(q + kv) % (h + H) != 3"}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        strbuf own = emitted(texts[i][0], texts[i][1]);
        strbuf all = emitted_at(texts[i][0], texts[i][1], 1207, 5003);
        assert_null(strstr(strbuf_text(&own), "1207"));
        if (!strstr(strbuf_text(&all), "(1207 + ") || !strstr(strbuf_text(&all), "5003"))
            fail_msg("%s:\n%s", texts[i][i > 0], strbuf_text(&all));
        strbuf_free(&own);
        strbuf_free(&all);
    }
}

static void text_of_mods(void **state)
{
    static const struct {
        const char *score, *mask, *has;
    } rows[] = {{"alibi()", NULL, "#define MOD_SCORE SCORE_AFFINE"},
                {"relative_bias()", NULL, "#define MOD_SCORE SCORE_AFFINE"},
                {"score + 0.5 + 0.25 * (q - kv)", NULL, "#define MOD_SCORE SCORE_AFFINE"},
                {"(score + 1e30) - 1e30", NULL, "#define MOD_SCORE SCORE_GENERAL"},
                {"score + 1e30", NULL, "#define MOD_SCORE SCORE_GENERAL"},
                {"score + float(kv - q) / 3.0", NULL, "* sac_inverse(3.f)"},
                {"softcap(20)", NULL, "#define SCORE_UNIT 20.f"},
                {"softcap(20)", NULL, "sac_tanh4("},
                {"softcap(20)", NULL, "#define SCORE_TANH 1"},
                {"score = alibi(); softcap(20)", NULL, "#define SCORE_TANH 0"},
                {"softcap(1000)", NULL, "fm_tanh("}, /* would magnify the fast one's error */
                {"score * score", NULL, "#define MOD_SCORE SCORE_GENERAL"},
                {NULL, "causal()", "#define MOD_MASK MASK_INTERVAL"},
                {NULL, "sliding_window(W)", "#define MOD_MASK MASK_INTERVAL"},
                {NULL, "document(doc)", "#define MASK_COLUMN_WORDS 1"},
                {NULL, "q % 3 == kv % 5", "#define MOD_MASK MASK_GENERAL"},
                {NULL, "q % 3 == kv % 5", "#define MOD_SURE 0"},
                {NULL, "(q + kv) % 5 == 2 || kv <= q - 9", "to = max(to, 1 + min(0x7ffffffe, "},
                {NULL, "kv < W || (q + kv) % 5 == 2", "#define MOD_SURE 1"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        strbuf text = emitted(rows[i].score, rows[i].mask);
        if (!strstr(strbuf_text(&text), rows[i].has))
            fail_msg("expected %s in:\n%s", rows[i].has, strbuf_text(&text));
        strbuf_free(&text);
    }
}

static float number_after(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    assert_non_null(at);
    at += strlen(name);
    return strtof(at + strspn(at, " ("), NULL);
}

/* The polynomial in place of unit * tanh(k * s), as kernels evaluate it, up to its edge. */
static void check_factor(const char *text, const char *score, double k, double unit)
{
    const float edge = number_after(text, "TANH_EDGE"), c0 = number_after(text, "TANH_C0"),
                c1 = number_after(text, "TANH_C1"), c2 = number_after(text, "TANH_C2"),
                c3 = number_after(text, "TANH_C3"), c4 = number_after(text, "TANH_C4");
    assert_true(fabs(edge * k * k - 0.25) < 1e-6);
    for (float s = 1e-4f * sqrtf(edge); s * s < edge; s *= 1.0001f) {
        const float v = fmaf(s, s, -edge);
        const float y = s * fmaf(fmaf(fmaf(fmaf(c4, v, c3), v, c2), v, c1), v, c0);
        const double gold = unit * tanh(k * (double)s) * 1.4426950408889634;
        if (!(fabs((double)y - gold) <= 2.1e-7 * gold))
            fail_msg("%s at %g: got %.9g, expected %.9g", score, (double)s, (double)y, gold);
    }
}

static void tanh_factor_is_close(void **state)
{
    static const struct {
        const char *score;
        double k, unit; /* k = 0: no polynomial */
    } rows[] = {{"softcap(20)", 0.125 / 20, 20}, {"30 * tanh(0.25 * score)", 0.125 / 4, 30},
                {"tanh(score)", 0.125, 1},       {"tanh(score * -2.0)", 0, 1},
                {"tanh(score + 1.0)", 0, 1},     {"20 * tanh(score / 20) + 1.0", 0, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        strbuf text = emitted(rows[i].score, NULL);
        if (rows[i].k == 0)
            assert_non_null(strstr(strbuf_text(&text), "#define SCORE_TANH 0"));
        else
            check_factor(strbuf_text(&text), rows[i].score, rows[i].k, rows[i].unit);
        strbuf_free(&text);
    }
}

/* Warps hand over no more registers than a CTA is launched with: more would be waited for
 * without end. */
static void registers_are_there(void **state)
{
    static const struct {
        int D, page;
    } rows[] = {{128, 8}, {256, 64}, {64, 0}, {256, 0}};
    (void)state;
    skip_without_nvrtc();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_plan *plan = NULL;
        saccade_problem p;
        saccade_problem_init(&p);
        p.sizes = (saccade_sizes){.H = 4, .Hkv = 2, .D = rows[i].D, .Dv = rows[i].D};
        p.dtype = SACCADE_BF16;
        p.backend = "cuda";
        p.arch = "sm_90a";
        p.page = rows[i].page;
        assert_int_equal(saccade_plan_create(NULL, &p, &plan, NULL), SACCADE_OK);
        check_registers(plan);
        saccade_plan_destroy(plan);
    }
}

/* A plan's programs are those of the table whose forms its GPU has, and explain says so. */
static void programs_of_a_plan(void **state)
{
    static const struct {
        const char *arch;
        int has[CU_PROGRAMS];
    } rows[] = {
        {"sm_90a",
         {[CU_DECODE_WIDE] = 1,
          [CU_DECODE] = 1,
          [CU_SMALL] = 1,
          [CU_MAIN] = 1,
          [CU_EXACT] = 1,
          [CU_UNALIGNED] = 1,
          [CU_CAREFUL] = 1}},
        {"sm_80", {[CU_MAIN] = 1, [CU_EXACT] = 1, [CU_CAREFUL] = 1}},
    };
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < 2; i++) {
        char *text = NULL;
        saccade_plan *plan =
            plan_for("score + 0.25", "q >= kv + 3", 64, SACCADE_BF16, rows[i].arch);
        const cu_state *s = plan->state;
        assert_int_equal(saccade_plan_explain(plan, &text, NULL), SACCADE_OK);
        for (int n = 0; n < CU_PROGRAMS; n++) {
            char line[64];
            snprintf(line, sizeof line, "\nprogram %s: ", cu_program_kinds[n].name);
            assert_int_equal(s->programs[n].form.tile.groups > 0, rows[i].has[n]);
            assert_int_equal(s->programs[n].image.code != NULL, rows[i].has[n]);
            assert_int_equal(strstr(text, line) != NULL, rows[i].has[n]);
        }
        saccade_free(text);
        saccade_plan_destroy(plan);
    }
}

static void second_plan_is_cached(void **state)
{
    (void)state;
    skip_without_nvrtc();
    for (int i = 0; i < 2; i++) {
        saccade_plan *plan =
            plan_for("score + 0.25", "q >= kv + 3", 64, SACCADE_BF16, "sm_90a");
        const cu_state *s = plan->state;
        for (int n = 0; n < CU_PROGRAMS && i; n++)
            assert_true(!s->programs[n].image.code || s->programs[n].image.report.from_cache);
        saccade_plan_destroy(plan);
    }
}

/* Tiles of few rows with bits of their own hold the main tile's blocks. */
static void part_tiles_fit(void **state)
{
    (void)state;
    for (int dim = 8; dim <= 256; dim += 8)
        for (int words = 0; words <= 4; words += 2) {
            cu_tile main;
            for (int rung = 0; cu_tile_choice(CU_SM90, dim, dim, SACCADE_BF16, rung, &main);
                 rung++) {
                const cu_tile tile =
                    cu_part_tile(&main, dim, dim, main.keys * words * (int)sizeof(int));
                assert_int_equal(tile.keys, main.keys);
                const int part = cu_part_keys(&main, dim);
                assert_int_equal(cu_part_keys(&tile, dim), part);
                assert_true(part % main.keys == 0 && part >= PART_KEYS);
                assert_true(tile.groups == 1 && tile.stages >= 2);
                assert_true(cu_tile_shared(CU_SM90, &tile, dim, dim)
                                + tile.keys * words * (int)sizeof(int)
                            <= cu_shared_most(90));
            }
        }
}

/* batch_invariant: the loop over parts and the program for few rows take the main tile. */
static void programs_of_invariant_runs(void **state)
{
    (void)state;
    if (!is_thorough_run()) {
        print_message("not asked to be thorough\n");
        skip();
    }
    skip_without_nvrtc();
    for (int i = 0; i < 4; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        saccade_problem p;
        saccade_problem_init(&p);
        const int D = i < 2 ? 128 : i == 2 ? 64 : 256;
        p.sizes = (saccade_sizes){.H = 8, .Hkv = 2, .D = D, .Dv = D};
        p.dtype = i % 2 ? SACCADE_F16 : SACCADE_BF16;
        p.backend = "cuda";
        p.arch = "sm_90a";
        p.page = i == 1 ? 16 : 0;
        p.batch_invariant = SACCADE_INVARIANT;
        p.mask = case_mod(SACCADE_MASK, "causal()");
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("%s: %s", err.where, err.message);
        const cu_state *s = plan->state;
        assert_int_equal(s->programs[CU_MAIN].rung, D > 128); /* 48 keys: 64 spill 36 bytes */
        assert_int_equal(s->programs[CU_PARTS].form.tile.keys,
                         s->programs[CU_MAIN].form.tile.keys);
        assert_null(s->programs[CU_DECODE].image.code);
        expect_no_spills(s, &p);
        size_t before = 0;
        for (int64_t Q = 1; Q < 1 << 14; Q *= 2) {
            const saccade_sizes sizes = {2, 8, 2, Q, 20000, D, D};
            const size_t bytes = saccade_plan_workspace(plan, &sizes);
            assert_true(bytes >= before);
            before = bytes;
        }
        saccade_plan_destroy(plan);
        saccade_mod_destroy((saccade_mod *)p.mask);
    }
}

/* Batches of more spans than decode counts go to tiles, smaller ones to decode: the workspace
 * of the largest serves all. */
static void workspace_grows_with_the_batch(void **state)
{
    (void)state;
    skip_without_nvrtc();
    saccade_plan *plan = plan_for("score + 0.25", "q >= kv + 3", 64, SACCADE_BF16, "sm_90a");
    size_t before = 0;
    for (int64_t B = 1; B <= 1 << 14; B *= 2) {
        const saccade_sizes s = {B, 4, 2, 4, 3000, 64, 64};
        const size_t bytes = saccade_plan_workspace(plan, &s);
        assert_true(bytes >= before);
        before = bytes;
    }
    saccade_plan_destroy(plan);
}

static void bad_arch(void **state)
{
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_problem p;
    saccade_problem_init(&p);
    (void)state;
    p.dtype = SACCADE_BF16;
    p.backend = "cuda";
    p.arch = "sm_35";
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "sm_80"));
    assert_null(plan);
}

/* An argument runs only the tests that it names, as in cmocka's patterns. */
int main(int argc, char **argv)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contexts_are_retained_once),
        cmocka_unit_test(failed_copies_hold_no_memory),
        cmocka_unit_test(tiles_fit),
        cmocka_unit_test(f32_tiles_fit),
        cmocka_unit_test(small_tiles_fit),
        cmocka_unit_test(small_tiles_pay),
        cmocka_unit_test(keys_that_stay_fit),
        cmocka_unit_test(keys_that_stay_pay),
        cmocka_unit_test(decode_pays),
        cmocka_unit_test(wide_spans_pay),
        cmocka_unit_test(pairs_pay),
        cmocka_unit_test(programs_of_pairs),
        cmocka_unit_test(programs_of_keys_that_stay),
        cmocka_unit_test(part_tiles_fit),
        cmocka_unit_test(decode_tiles_fit),
        cmocka_unit_test(decode_clusters_fit),
        cmocka_unit_test(halves_of_decode_fit),
        cmocka_unit_test(groups_of_heads),
        cmocka_unit_test(text_of_mods),
        cmocka_unit_test(text_of_heads),
        cmocka_unit_test(tanh_factor_is_close),
        cmocka_unit_test(bad_arch),
        cmocka_unit_test(registers_are_there),
        cmocka_unit_test(programs_of_a_plan),
        cmocka_unit_test(no_spills),
        cmocka_unit_test(no_spills_in_wide_heads),
        cmocka_unit_test(values_of_large_heads_are_padded),
        cmocka_unit_test(programs_of_large_heads),
        cmocka_unit_test(refusals_of_large_heads),
        cmocka_unit_test(programs_of_chunks),
        cmocka_unit_test(programs_of_pages),
        cmocka_unit_test(programs_of_ragged_runs),
        cmocka_unit_test(decode_of_codes),
        cmocka_unit_test(programs_of_rows),
        cmocka_unit_test(rows_of_block_masks),
        cmocka_unit_test(rows_amid_a_tile),
        cmocka_unit_test(programs_of_invariant_runs),
        cmocka_unit_test(programs_of_f32_results),
        cmocka_unit_test(masks_of_many_words),
        cmocka_unit_test(programs_of_sinks),
        cmocka_unit_test(second_plan_is_cached),
        cmocka_unit_test(workspace_grows_with_the_batch),
        cmocka_unit_test(peak_compiles),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
