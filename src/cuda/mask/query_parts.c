/* Queries of a KV head in parts. A tile of keys walks all query heads of its group, so that
 * few KV heads make few tiles, and long ones under a causal mask: with 2 KV heads of 16,384
 * keys the longest takes half as long again as an equal share of 132 multiprocessors. Cut into
 * parts, a KV head stands for several, whose dK and dV bwd_join adds (docs/lab/100). Where few
 * keys have many queries and no mask makes them unlike, rows are cut too (docs/lab/130). */
#include "cuda/mask/device_mask.h"

#include "base/integers.h"

#include <stdlib.h>

enum { ROUNDS_MOST = 4 /* of tiles, where heads are cut: with more, tiles end evenly */ };

/* Blocks of queries that a multiprocessor walks in the time that the launch of bwd_join takes,
 * and that of its sums, a tile. */
static const double LAUNCH_BLOCKS = 2, TILE_BLOCKS = 0.045;

static int may_be(int parts, int group, int n_sm, int64_t tiles)
{
    return group % parts == 0 && (parts == 1 || tiles * parts <= (int64_t)ROUNDS_MOST * n_sm);
}

int cu_head_parts_most(int n_sm, int group, int64_t tiles)
{
    int most = 1;
    for (int parts = 2; parts <= group; parts++)
        most = may_be(parts, group, n_sm, tiles) ? parts : most;
    return most;
}

/* ends: a heap of when multiprocessors are free, the earliest first. */
static void take_earliest(int64_t *ends, int n, int64_t work)
{
    int at = 0;
    const int64_t end = ends[0] + work;
    for (int next = 1; next < n; next = 2 * at + 1) {
        next += next + 1 < n && ends[next + 1] < ends[next];
        if (ends[next] >= end)
            break;
        ends[at] = ends[next];
        at = next;
    }
    ends[at] = end;
}

/* What a step takes beside its groups, in their time. */
static const double BESIDE_GROUPS = 0.6;

cu_tile_lengths cu_equal_tiles(int64_t heads, int64_t KV, int groups, int passes, int64_t each)
{
    const int64_t keys = (int64_t)groups * ROW_BLOCK, left = KV % keys;
    const int64_t live = ceil_div(left, ROW_BLOCK);
    cu_tile_lengths x = {.n = heads * ceil_div(KV, keys), .each = each, .share = 1};
    if (passes && left && live < groups) {
        x.n_short = heads;
        x.share = ((double)live + BESIDE_GROUPS) / (groups + BESIDE_GROUPS);
    }
    return x;
}

/* Rounds of tiles without a mask: multiprocessors without one in the last round of whole ones
 * take short ones meanwhile. */
static double rounds_of(const cu_tile_lengths *x, int parts, int n_sm)
{
    const int64_t whole = (x->n - x->n_short) * parts, shorts = x->n_short * parts;
    const int64_t idle = ceil_div(whole, n_sm) * n_sm - whole;
    const int64_t meanwhile = shorts ? idle * (int64_t)(1 / x->share) : 0;
    const int64_t after = larger(shorts - meanwhile, 0);
    return (double)ceil_div(whole, n_sm)
           + (after ? (double)ceil_div(after, n_sm) * x->share : 0);
}

/* When the last of these tiles ends, each taken, longest first, by whoever is free; in blocks
 * of one head times the group. ends: room. */
static double time_of(const cu_tile_lengths *x, int parts, int n_sm, int group, int64_t *ends)
{
    int64_t last = 0;
    if (!x->blocks)
        return rounds_of(x, parts, n_sm) * (double)(x->each * group) / parts;
    for (int i = 0; i < n_sm; i++)
        ends[i] = 0;
    for (int64_t i = 0; i < x->n * parts; i++)
        take_earliest(ends, n_sm, x->blocks[i / parts] * (group / parts));
    for (int i = 0; i < n_sm; i++)
        last = ends[i] > last ? ends[i] : last;
    return (double)last;
}

int cu_head_parts(int n_sm, int group, const cu_tile_lengths *x, double *time)
{
    enum { SM_MOST = 1024 };
    int64_t ends[SM_MOST];
    int best = 1;
    n_sm = n_sm < 1 ? 1 : n_sm < SM_MOST ? n_sm : SM_MOST;
    for (int parts = 1; parts <= group; parts++) {
        if (!may_be(parts, group, n_sm, x->n))
            continue;
        const double joined = LAUNCH_BLOCKS + TILE_BLOCKS * (double)(x->n * parts);
        const double now = time_of(x, parts, n_sm, group, ends) + (parts > 1 ? joined : 0);
        if (parts == 1 || now < *time) {
            *time = now;
            best = parts;
        }
    }
    return best;
}

/* Fewer blocks of queries than these are not cut: what the join takes is not saved. */
enum { ROW_BLOCKS = 4 };

int cu_row_parts_most(int n_sm, int64_t tiles, int64_t blocks)
{
    const int64_t most = tiles > 0 && tiles < n_sm ? n_sm / tiles : 1;
    return blocks < ROW_BLOCKS ? 1 : (int)smaller(most, blocks);
}

int64_t cu_part_rows_most(int n_sm, int group, int cuts_rows, int64_t heads, int64_t keys,
                          int64_t blocks, int tile_keys)
{
    const int64_t once = (int64_t)n_sm * tile_keys, rows = heads * group * keys;
    const int64_t of_heads = group > 1 ? smaller(rows, ROUNDS_MOST * once) : 0;
    if (!cuts_rows || blocks < ROW_BLOCKS)
        return of_heads;
    return larger(of_heads, rows < once ? smaller(rows * blocks, once) : once);
}

cu_cut cu_query_parts(int n_sm, int group, int cuts_rows, const cu_tile_lengths *x,
                      double *time)
{
    cu_cut best = {cu_head_parts(n_sm, group, x, time), 1};
    const int most =
        cuts_rows && !x->blocks ? cu_row_parts_most(n_sm, x->n * group, x->each) : 1;
    for (int rows = 2; rows <= most; rows++) {
        const double joined = LAUNCH_BLOCKS + TILE_BLOCKS * (double)(x->n * group * rows);
        const double now = (double)ceil_div(x->each, rows) + joined;
        if (now < *time) {
            *time = now;
            best = (cu_cut){group, rows};
        }
    }
    return best;
}

static int longer_first(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

saccade_status cu_find_head_parts(const mask_runs *r, const saccade_sizes *s, int n_sm,
                                  int is_known, int *parts, saccade_error *err)
{
    const int64_t heads = s->B * s->Hkv, n = heads * r->rows;
    const int group = (int)cu_group(s);
    const cu_tile_lengths equal = {.n = n, .each = r->columns};
    double time;
    *parts = 1;
    if (cu_head_parts_most(n_sm, group, n) == 1)
        return SACCADE_OK;
    if (!is_known) {
        *parts = cu_head_parts(n_sm, group, &equal, &time);
        return SACCADE_OK;
    }
    int64_t *blocks = malloc(((size_t)n + 1) * sizeof *blocks);
    FAIL_IF_NULL(blocks);
    for (int64_t i = 0; i < n; i++)
        blocks[i] = r->row_live[cu_first_row(r, s->Hkv, i / r->rows) + i % r->rows];
    qsort(blocks, (size_t)n, sizeof *blocks, longer_first);
    *parts = cu_head_parts(n_sm, group, &(cu_tile_lengths){.blocks = blocks, .n = n}, &time);
    free(blocks);
    return SACCADE_OK;
}
