/* Copies of block masks on devices: the runs of all rows of blocks, where each row begins among
 * them, and the order in which tiles are taken. A copy is made when a mask is prepared and dies
 * with it. The order takes heads in sections: half of L2 about holds what tiles read of one. In
 * a section it takes the longest tiles first, so that the last ones to run are short. */
#include "cuda/mask/device_mask.h"

#include "cuda/kern/bwd.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct copy {
    struct copy *next;
    int device, rows, keys, group;
    int64_t B, H;
    uint64_t plan; /* whose rows alone it is of; 0: all rows */
    cu_runs runs;
} copy;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char slot_key;

static void destroy_copies(void *data)
{
    const cu_driver *driver;
    void *pushed;
    for (copy *c = data, *next; c; c = next) {
        next = c->next;
        if (cu_get_driver(&driver, NULL) == SACCADE_OK
            && cu_enter(driver, c->device, &pushed, NULL) == SACCADE_OK) {
            driver->free(c->runs.memory);
            cu_leave(driver, pushed);
        }
        free(c);
    }
}

static copy *find(const mask_device_copy *slot, int device, int rows, int keys, int group,
                  const saccade_sizes *sizes, const saccade_plan *plan)
{
    for (copy *c = slot ? slot->data : NULL; c; c = c->next)
        if (c->device == device && c->rows == rows && c->keys == keys && c->group == group
            && c->B == sizes->B && c->H == sizes->H && c->plan == cu_rows_owner(plan))
            return c;
    return NULL;
}

const cu_runs *cu_runs_find(int device, const saccade_block_mask *mask, int rows, int keys,
                            int group, const saccade_sizes *sizes, const saccade_plan *plan)
{
    pthread_mutex_lock(&lock);
    const copy *c =
        find(mask_device_slot(mask, &slot_key), device, rows, keys, group, sizes, plan);
    pthread_mutex_unlock(&lock);
    return c ? &c->runs : NULL;
}

int cu_runs_copies(int device, const saccade_block_mask *mask, int first, int most,
                   cu_copy *out)
{
    int n = 0;
    pthread_mutex_lock(&lock);
    const mask_device_copy *slot = mask_device_slot(mask, &slot_key);
    for (const copy *c = slot ? slot->data : NULL; c; c = c->next) {
        if (c->device != device)
            continue;
        if (n >= first && n - first < most)
            out[n - first] = (cu_copy){&c->runs, c->rows, c->keys, c->group <= 0};
        n++;
    }
    pthread_mutex_unlock(&lock);
    return n;
}

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

/* What a copy is of, beside its runs. */
typedef struct about {
    int keys;
    int group; /* where rows are of keys: query heads of a KV head; else 0 */
    int head_parts;        /* of a group's query heads: group is then of a part */
    int is_by_rows;        /* tiles of keys are walked by rows */
    int at_once;           /* tiles that run at a time */
    int64_t most_runs;     /* of a list, where lists may change; else 0 */
    size_t bits_bytes;     /* likewise */
    const plan_rows *rows; /* NULL: all */
    size_t l2_bytes;
} about;

/* What a section has at least: about four tiles for each multiprocessor, of keys two, or one
 * where a tile goes through several heads (docs/lab/097). */
enum { SECTION_TILES = 512, SECTION_KEY_TILES = 256, SECTION_GROUP_TILES = 128 };

/* What the tiles of a KV head read again and again: K and V, or Q, dO and sums of dQ of all its
 * query heads, since tiles of unequal lengths are soon at different ones. */
static int64_t bytes_of_head(const saccade_sizes *s, int group)
{
    return group ? group * s->Q * ((s->D + s->Dv) * 2 + s->D * 4) : s->KV * (s->D + s->Dv) * 2;
}

/* How many sections the KV heads are cut into: as many as keep that many tiles, or fill half of
 * L2. They are equal but for a head, for a short last one would end with long tiles. */
static int64_t count_sections(const mask_runs *r, const saccade_sizes *s, const about *of)
{
    const int64_t head_bytes = bytes_of_head(s, of->group);
    const int64_t head_tiles = cu_group(s) * r->rows;
    const int64_t tiles = !of->group                          ? SECTION_TILES
                          : of->group == 1 || of->is_by_rows ? SECTION_KEY_TILES
                                                             : SECTION_GROUP_TILES;
    const int64_t by_tiles = (tiles + head_tiles - 1) / (head_tiles ? head_tiles : 1);
    const int64_t by_bytes = head_bytes > 0 && !of->is_by_rows
                                 ? (int64_t)(of->l2_bytes / 2) / head_bytes
                                 : 1;
    const int64_t least = by_tiles > by_bytes ? by_tiles : by_bytes;
    const int64_t n = s->B * s->Hkv / (least ? least : 1);
    return n ? n : 1;
}

/* When tiles run: of keys that come from elsewhere, those that need none first; tiles of keys
 * the other way round, and those of keys that no row reads last. */
typedef enum turn { TURN_FIRST, TURN_THEN, TURN_LAST, TURNS } turn;

/* How number k of a section walks. Under a causal mask the first ones, long, go from the last
 * block of queries back, all at the same block at a time. Whoever is through with a tile of n
 * blocks takes one of those that come behind, which begins n blocks later than the first ones
 * did: forward, they too are all at the same block (docs/lab/099). */
static int32_t walk_of(const about *of, int64_t k)
{
    if (!of->is_by_rows)
        return 0;
    return ORDER_BY_ROWS | (k / of->at_once % 2 ? 0 : ORDER_BACK);
}

/* Rows of blocks whose turn it is; turns: of each, or NULL: one for all. */
static void fill_section(const mask_runs *r, const saccade_sizes *s, const about *of,
                         const uint8_t *turns, turn now, int64_t first, int64_t past, work *w,
                         int32_t **order)
{
    int64_t n = 0;
    for (int64_t bh = first; bh < past; bh++) {
        const int64_t b = r->B == 1 ? 0 : bh / s->H, h = bh % s->H * r->H / s->H;
        const int64_t row = (b * r->H + h) * r->rows;
        for (int64_t k = 0; k < r->rows; k++)
            if (!turns || turns[row + k] == now)
                w[n++] = (work){(int32_t)(bh * r->rows + k), r->row_live[row + k]};
    }
    qsort(w, (size_t)n, sizeof *w, longest_first);
    for (int64_t k = 0; k < n; k++)
        *(*order)++ = w[k].tile | walk_of(of, k);
}

static saccade_status fill_order(const mask_runs *r, const saccade_sizes *s, const about *of,
                                 const uint8_t *turns, int32_t *order, cu_turns *out,
                                 saccade_error *err)
{
    const int64_t group = cu_group(s), heads = s->B * s->Hkv;
    const int64_t sections = count_sections(r, s, of);
    const int64_t most = (heads + sections - 1) / sections * group;
    int32_t *at = order;
    work *w = malloc((size_t)(most * r->rows) * sizeof *w);
    FAIL_IF_NULL(w);
    int before[TURNS] = {0}; /* tiles up to the end of a turn */
    for (int now = TURN_FIRST; now < (turns ? TURNS : 1); now++) {
        for (int64_t i = 0; i < sections; i++)
            fill_section(r, s, of, turns, (turn)now, heads * i / sections * group,
                         heads * (i + 1) / sections * group, w, &at);
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
static saccade_status find_turns(const mask_runs *r, const about *of, uint8_t **out,
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

static saccade_status order_tiles(const mask_runs *r, const saccade_sizes *s, const about *of,
                                  int32_t *order, cu_turns *out, saccade_error *err)
{
    uint8_t *turns;
    TRY(find_turns(r, of, &turns, err));
    const saccade_status status = fill_order(r, s, of, turns, order, out, err);
    free(turns);
    return status;
}

saccade_status cu_order_tiles(const mask_runs *r, const saccade_sizes *s, size_t l2_bytes,
                              const plan_rows *rows, int32_t *order, int *n_first,
                              saccade_error *err)
{
    const about of = {.keys = r->block_kv, .rows = rows, .l2_bytes = l2_bytes};
    cu_turns turns = {0, 0};
    const saccade_status status = order_tiles(r, s, &of, order, &turns, err);
    *n_first = turns.first;
    return status;
}

/* Fills one block of memory: the runs, then where rows begin, then the order of tiles. */
static saccade_status fill(const mask_runs *r, const saccade_sizes *s, const about *of,
                           int64_t n_runs, char *to, cu_turns *turns, saccade_error *err)
{
    const int64_t n_rows = r->B * r->H * r->rows;
    cu_run *runs = (cu_run *)to;
    int32_t *start = (int32_t *)(runs + n_runs), *order = start + n_rows + 1;
    for (int64_t row = 0; row < n_rows; row++) {
        int32_t before = 0;
        for (int64_t i = r->row_begin[row]; i < r->row_begin[row + 1]; i++) {
            runs[i] = (cu_run){r->runs[i].first, r->runs[i].count, !r->runs[i].full, before};
            before += r->runs[i].count;
        }
    }
    for (int64_t i = 0; i <= n_rows; i++)
        start[i] = (int32_t)r->row_begin[i];
    return order_tiles(r, s, of, order, turns, err);
}

saccade_status cu_alloc_filled(const cu_driver *driver, size_t bytes, const void *host,
                               size_t filled, cu_ptr *out, saccade_error *err)
{
    int failed = driver->alloc(out, bytes);
    if (failed) {
        *out = 0;
        return cu_check(driver, failed, "block mask to device", err);
    }
    failed = driver->copy(*out, (cu_ptr)(uintptr_t)host, filled);
    const saccade_status status = cu_check(driver, failed, "block mask to device", err);
    if (status != SACCADE_OK) {
        driver->free(*out);
        *out = 0;
    }
    return status;
}

static int64_t count_blocks(const mask_runs *r)
{
    int64_t n = 0;
    for (int64_t i = 0; i < r->row_begin[r->B * r->H * r->rows]; i++)
        n += r->runs[i].count;
    return n;
}

static saccade_status upload(const cu_driver *driver, int device, const mask_runs *r,
                             const saccade_sizes *s, const about *of, cu_runs *out,
                             saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const int64_t n_rows = r->B * r->H * r->rows, n_runs = r->row_begin[n_rows];
    const int64_t tiles = s->B * s->H * r->rows, most = of->is_by_rows ? ORDER_TILE : INT32_MAX;
    const int64_t room = of->most_runs ? n_rows * of->most_runs : n_runs;
    const size_t run_bytes = (size_t)room * sizeof(cu_run);
    const size_t bytes = run_bytes + (size_t)(n_rows + 1 + tiles) * sizeof(int32_t);
    void *pushed;
    FAIL_IF(room > INT32_MAX || tiles > most, SACCADE_ELIMIT,
            "cuda: got a block mask of %lld runs, expected fewer than 2^31", (long long)room);
    char *host = calloc(1, bytes);
    FAIL_IF_NULL(host);
    *out = (cu_runs){.keys = r->block_kv,
                     .mask_b = r->B == 1 ? 0 : (int)(r->H * r->rows),
                     .mask_h = r->H == 1 ? 0 : (int)r->rows,
                     .step_heads = 1,
                     .head_parts = of->head_parts,
                     .list_batches = (int)r->B,
                     .list_heads = (int)r->H,
                     .list_columns = (int)r->columns,
                     .n_blocks = of->most_runs ? 0 : count_blocks(r),
                     .n_qblk = (int)r->rows,
                     .n_tiles = (int)tiles};
    status = fill(r, s, of, room, host, &out->turns, err);
    if (status == SACCADE_OK)
        status = cu_enter(driver, device, &pushed, err);
    if (status == SACCADE_OK) {
        status =
            cu_alloc_filled(driver, bytes + of->bits_bytes, host, bytes, &out->memory, err);
        cu_leave(driver, pushed);
    }
    free(host);
    out->runs = out->memory;
    out->run_start = out->runs + run_bytes;
    out->order = out->run_start + (size_t)(n_rows + 1) * sizeof(int32_t);
    out->bits = out->memory + bytes;
    return status;
}

static saccade_status upload_groups(const cu_driver *driver, int device, const mask_runs *r,
                                    int group, const saccade_sizes *s, const about *of,
                                    cu_runs *out, saccade_error *err)
{
    cu_grouped g = {0};
    saccade_sizes heads = *s;
    heads.H = heads.Hkv = s->Hkv * of->head_parts;
    if (group < 2 || r->H == 1)
        return upload(driver, device, r, group > 0 ? s : &heads, of, out, err);
    saccade_status status = cu_group_heads(r, group, &g, err);
    if (status == SACCADE_OK)
        status = upload(driver, device, &g.r, &heads, of, out, err);
    out->step_heads = group;
    cu_grouped_free(&g);
    return status;
}

cu_ptr cu_runs_start(const cu_runs *runs, const plan_problem *problem)
{
    const size_t rows = (size_t)(problem->h_offset / runs->step_heads) * (size_t)runs->mask_h;
    return runs->run_start + rows * sizeof(int32_t);
}

saccade_status cu_runs_check(const plan_problem *problem, const saccade_block_mask *mask,
                             saccade_error *err)
{
    FAIL_AT(problem->h_offset % problem->group && mask_get_view(mask)->sizes.H > 1,
            SACCADE_EINVAL, "block_mask", 0, 0,
            "got one of several heads with h_offset %d, expected a multiple of H / Hkv = %d, "
            "or a block mask of one head",
            problem->h_offset, problem->group);
    return SACCADE_OK;
}

/* Room for whatever may be selected: runs do not touch each other. */
static void about_selection(const saccade_block_mask *mask, about *of)
{
    const mask_view *view = mask_get_view(mask);
    const struct mask_selection *x = &view->selection;
    const int64_t block_q = view->imported_block_q, block_kv = view->imported_block_kv;
    if (!x->most)
        return;
    const int64_t rows = (view->sizes.Q + block_q - 1) / block_q;
    const int64_t columns = (view->sizes.KV + block_kv - 1) / block_kv;
    const int64_t apart = ((of->group ? rows : columns) + 1) / 2;
    of->most_runs = !of->group && x->most < apart ? x->most : apart;
    of->bits_bytes = (size_t)(x->B * x->Hkv * rows) * (size_t)((columns + 31) / 32) * 4;
}

/* Whether tiles of keys see a quarter of all queries in the mean. Those of a narrow window are
 * never at the same block: by rows each would keep blocks of all heads in L2. */
static int sees_much(const mask_runs *r)
{
    return 4 * count_blocks(r) >= r->B * r->H * r->rows * r->columns;
}

static int longer_first(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* Into how many parts the query heads of a group are cut, by the tiles' lengths. */
static saccade_status find_parts(const mask_runs *r, const saccade_sizes *s, int n_sm,
                                 int *parts, saccade_error *err)
{
    const int64_t heads = s->B * s->Hkv, n = heads * r->rows;
    const int group = (int)cu_group(s);
    double time;
    *parts = 1;
    if (cu_head_parts_most(n_sm, group, n) == 1)
        return SACCADE_OK;
    int64_t *blocks = calloc((size_t)n + 1, sizeof *blocks);
    FAIL_IF_NULL(blocks);
    for (int64_t i = 0; i < n; i++) {
        const int64_t bh = i / r->rows, b = r->B == 1 ? 0 : bh / s->Hkv;
        const int64_t row = (b * r->H + bh % s->Hkv * r->H / s->Hkv) * r->rows + i % r->rows;
        for (int64_t k = r->row_begin[row]; k < r->row_begin[row + 1]; k++)
            blocks[i] += r->runs[k].count;
    }
    qsort(blocks, (size_t)n, sizeof *blocks, longer_first);
    *parts = cu_head_parts(n_sm, group, &(cu_tile_lengths){blocks, n, 0}, &time);
    free(blocks);
    return SACCADE_OK;
}

static saccade_status upload_rows(const cu_driver *driver, const copy *c, const mask_runs *r,
                                  const saccade_sizes *s, const saccade_plan *plan,
                                  const saccade_block_mask *mask, cu_runs *out,
                                  saccade_error *err)
{
    const cu_device *on = &((const cu_state *)plan->state)->device;
    about of = {.keys = c->keys,
                .head_parts = 1,
                .is_by_rows =
                    c->group < 0 && -c->group & RUNS_BY_ROWS && r->H == 1 && sees_much(r),
                .at_once = on->n_sm,
                .rows = plan->rows,
                .l2_bytes = (size_t)on->l2_bytes};
    cu_selected own;
    about_selection(mask, &of);
    of.is_by_rows &= !of.most_runs; /* what is selected may be anything */
    if (c->group < 0 && -c->group & RUNS_IN_PARTS)
        TRY(find_parts(r, s, on->n_sm, &of.head_parts, err));
    of.group = c->group > 0 ? 0 : (int)cu_group(s) / of.head_parts;
    FAIL_AT(plan->rows && of.most_runs, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one that is selected over ranks, expected one made on the host");
    if (!plan->rows)
        return upload_groups(driver, c->device, r, c->group, s, &of, out, err);
    saccade_status status = cu_select_rows(r, plan->rows, c->rows, c->group <= 0, &own, err);
    if (status == SACCADE_OK)
        status = upload_groups(driver, c->device, &own.r, c->group, s, &of, out, err);
    cu_selected_free(&own);
    return status;
}

saccade_status cu_runs_make(const cu_driver *driver, int device, const saccade_block_mask *mask,
                            int rows, int keys, int group, const saccade_sizes *sizes,
                            const saccade_plan *plan, saccade_error *err)
{
    const mask_runs *r;
    saccade_status status = SACCADE_OK;
    if (cu_runs_find(device, mask, rows, keys, group, sizes, plan))
        return SACCADE_OK;
    mask_device_copy *slot = mask_device_slot(mask, &slot_key);
    FAIL_IF_NULL(slot);
    TRY(mask_runs_for(mask, rows, keys, group <= 0, &r, err));
    copy *c = calloc(1, sizeof *c);
    FAIL_IF_NULL(c);
    *c = (copy){.device = device,
                .rows = rows,
                .keys = keys,
                .group = group,
                .B = sizes->B,
                .H = sizes->H,
                .plan = cu_rows_owner(plan)};
    status = upload_rows(driver, c, r, sizes, plan, mask, &c->runs, err);
    if (status != SACCADE_OK) {
        free(c);
        return status;
    }
    pthread_mutex_lock(&lock);
    c->next = slot->data;
    slot->data = c;
    slot->destroy = destroy_copies;
    pthread_mutex_unlock(&lock);
    return SACCADE_OK;
}
