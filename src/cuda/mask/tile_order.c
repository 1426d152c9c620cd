/* The order in which tiles are taken. Heads come in sections: half of L2 about holds what tiles
 * read of one, and the first heads of tiles of queries are sections of their own. In a section
 * the longest tiles come first, so that the last ones to run are short. Of each tile of keys
 * the order also says how it is walked. */
#include "cuda/mask/device_mask.h"

#include "cuda/kern/bwd.h"

#include <stdlib.h>

typedef struct work {
    int32_t tile;
    int64_t live;
} work;

static int longest_first(const void *a, const void *b)
{
    const work *x = a, *y = b;
    if (x->live != y->live)
        return x->live < y->live ? 1 : -1;
    return x->tile < y->tile ? -1 : x->tile > y->tile;
}

/* What a section has at least: about four tiles for each multiprocessor, of keys two, or one
 * where a tile goes through several heads (docs/lab/097). */
enum { SECTION_TILES = 512, SECTION_KEY_TILES = 256, SECTION_GROUP_TILES = 128 };

/* What the tiles of a KV head read again and again: K and V, or Q, dO and sums of dQ of all its
 * query heads, since tiles of unequal lengths are soon at different ones. */
static int64_t bytes_of_head(const saccade_sizes *s, int group)
{
    return group ? group * s->Q * ((s->D + s->Dv) * 2 + s->D * 4) : s->KV * (s->D + s->Dv) * 2;
}

/* KV heads in sections: the first ones each by itself, the others in n about equal parts. */
typedef struct sections {
    int64_t alone, heads, n;
} sections;

static int64_t at_least_one(int64_t n)
{
    return n > 0 ? n : 1;
}

/* The least KV heads of a section that ends with short tiles: as many as have so many tiles, or
 * fill half of L2. */
static int64_t heads_that_end_short(const mask_runs *r, const saccade_sizes *s,
                                    const cu_order *of)
{
    const int64_t bytes = at_least_one(bytes_of_head(s, of->group));
    const int64_t head_tiles = at_least_one(cu_group(s) * r->rows);
    const int64_t tiles = !of->group                          ? SECTION_TILES
                          : of->group == 1 || of->is_by_rows ? SECTION_KEY_TILES
                                                             : SECTION_GROUP_TILES;
    const int64_t by_tiles = (tiles + head_tiles - 1) / head_tiles;
    const int64_t by_bytes = of->is_by_rows ? 1 : (int64_t)(of->l2_bytes / 2) / bytes;
    return at_least_one(by_tiles > by_bytes ? by_tiles : by_bytes);
}

/* Tiles of queries come head by head but for those of the last section: a head's first tile
 * brings K and V from memory, and so some tile always does, and none waits for what all bring
 * at once (docs/lab/103). Sections of tiles of keys are equal but for a head, since a last one
 * that is short would end with long tiles. */
static sections cut_into_sections(const mask_runs *r, const saccade_sizes *s,
                                  const cu_order *of)
{
    const int64_t heads = s->B * s->Hkv, last = heads_that_end_short(r, s, of);
    if (of->group || heads <= last)
        return (sections){0, heads, at_least_one(heads / last)};
    return (sections){heads - last, heads, 1};
}

/* The first head of section i. */
static int64_t section_begin(const sections *x, int64_t i)
{
    return i < x->alone ? i : x->alone + (x->heads - x->alone) * (i - x->alone) / x->n;
}

/* When tiles run: of keys that come from elsewhere, those that need none first; tiles of keys
 * the other way round, and those of keys that no row reads last. */
typedef enum turn { TURN_FIRST, TURN_THEN, TURN_LAST, TURNS } turn;

/* How number k of a section walks. Under a causal mask the first ones, long, go from the last
 * block of queries back, all at the same block at a time. Whoever is through with a tile of n
 * blocks takes one of those that come behind, which begins n blocks later than the first ones
 * did: forward, they too are all at the same block (docs/lab/099). */
static int32_t walk_of(const cu_order *of, int64_t k)
{
    if (!of->is_by_rows)
        return 0;
    return ORDER_BY_ROWS | (k / of->at_once % 2 ? 0 : ORDER_BACK);
}

/* Rows of blocks whose turn it is; turns: of each, or NULL: one for all. */
static void fill_section(const mask_runs *r, const saccade_sizes *s, const cu_order *of,
                         const uint8_t *turns, turn now, int64_t first, int64_t past, work *w,
                         int32_t **order)
{
    int64_t n = 0;
    for (int64_t bh = first; bh < past; bh++) {
        const int64_t row = cu_first_row(r, s->H, bh);
        for (int64_t k = 0; k < r->rows; k++)
            if (!turns || turns[row + k] == now)
                w[n++] = (work){(int32_t)(bh * r->rows + k), r->row_live[row + k]};
    }
    qsort(w, (size_t)n, sizeof *w, longest_first);
    for (int64_t k = 0; k < n; k++)
        *(*order)++ = w[k].tile | walk_of(of, k);
}

static saccade_status fill_order(const mask_runs *r, const saccade_sizes *s, const cu_order *of,
                                 const uint8_t *turns, int32_t *order, cu_turns *out,
                                 saccade_error *err)
{
    const int64_t group = cu_group(s);
    const sections cut = cut_into_sections(r, s, of);
    const int64_t n_sections = cut.alone + cut.n;
    const int64_t most = (cut.heads - cut.alone + cut.n - 1) / cut.n;
    int32_t *at = order;
    work *w = malloc((size_t)(most * group * r->rows) * sizeof *w);
    FAIL_IF_NULL(w);
    int before[TURNS] = {0}; /* tiles up to the end of a turn */
    for (int now = TURN_FIRST; now < (turns ? TURNS : 1); now++) {
        for (int64_t i = 0; i < n_sections; i++)
            fill_section(r, s, of, turns, (turn)now, section_begin(&cut, i) * group,
                         section_begin(&cut, i + 1) * group, w, &at);
        before[now] = (int)(at - order);
    }
    out->needed = before[turns ? TURN_THEN : TURN_FIRST];
    out->first = before[TURN_FIRST] < out->needed ? before[TURN_FIRST] : 0;
    free(w);
    return SACCADE_OK;
}

static turn turn_of_keys(const plan_rows *rows, int64_t first, int64_t past)
{
    return plan_has_far(rows, first, past)       ? TURN_FIRST
           : plan_has_touched(rows, first, past) ? TURN_THEN
                                                 : TURN_LAST;
}

static turn turn_of_rows(const mask_runs *r, const plan_rows *rows, int64_t row, int64_t keys)
{
    for (int64_t i = r->row_begin[row]; i < r->row_begin[row + 1]; i++) {
        const int64_t from = r->runs[i].first * keys;
        if (plan_has_far(rows, from, from + r->runs[i].count * keys))
            return TURN_THEN;
    }
    return TURN_FIRST;
}

/* A turn for each row of blocks, to be freed; NULL where no keys come from elsewhere. */
static saccade_status find_turns(const mask_runs *r, const cu_order *of, uint8_t **out,
                                 saccade_error *err)
{
    const int64_t n = r->B * r->H * r->rows, keys = of->keys;
    *out = NULL;
    if (!of->rows || !of->rows->far_before)
        return SACCADE_OK;
    uint8_t *turns = calloc((size_t)n + 1, 1);
    FAIL_IF_NULL(turns);
    for (int64_t row = 0; row < n; row++) {
        const int64_t at = row % r->rows * keys;
        turns[row] = (uint8_t)(of->group ? turn_of_keys(of->rows, at, at + keys)
                                                 : turn_of_rows(r, of->rows, row, keys));
    }
    *out = turns;
    return SACCADE_OK;
}

saccade_status cu_order_tiles(const mask_runs *r, const saccade_sizes *s, const cu_order *of,
                              int32_t *order, cu_turns *out, saccade_error *err)
{
    uint8_t *turns;
    TRY(find_turns(r, of, &turns, err));
    const saccade_status status = fill_order(r, s, of, turns, order, out, err);
    free(turns);
    return status;
}

int64_t cu_count_blocks(const mask_runs *r)
{
    int64_t n = 0;
    for (int64_t i = 0; i < r->row_begin[r->B * r->H * r->rows]; i++)
        n += r->runs[i].count;
    return n;
}

int cu_sees_much(const mask_runs *r)
{
    return 4 * cu_count_blocks(r) >= r->B * r->H * r->rows * r->columns;
}
