/* Copies of block masks on devices: the runs of all rows of blocks, where each row begins among
 * them, and the order in which tiles are taken (tile_order.c). A copy is made when a mask is
 * prepared and dies with it. */
#include "cuda/mask/device_mask.h"

#include "cuda/kern/bwd.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct copy {
    struct copy *next;
    int device, rows, keys, group;
    int64_t B, H, Hkv;
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
            && c->B == sizes->B && c->H == sizes->H && c->Hkv == sizes->Hkv
            && c->plan == cu_rows_owner(plan))
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

/* What a copy is of, beside its runs. */
typedef struct about {
    cu_order order;
    int head_parts;    /* of a group's query heads: the order's group is of a part */
    int64_t most_runs; /* of a list, where lists may change; else 0 */
    size_t bits_bytes; /* likewise */
} about;

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
    return cu_order_tiles(r, s, &of->order, order, turns, err);
}

saccade_status cu_alloc_filled(const cu_driver *driver, size_t bytes, const void *host,
                               size_t filled, cu_ptr *out, saccade_error *err)
{
    int failed = driver->alloc(out, bytes);
    if (failed) {
        *out = 0;
        return cu_check(driver, failed, "table to device", err);
    }
    failed = driver->copy(*out, (cu_ptr)(uintptr_t)host, filled);
    const saccade_status status = cu_check(driver, failed, "table to device", err);
    if (status != SACCADE_OK) {
        driver->free(*out);
        *out = 0;
    }
    return status;
}

static saccade_status upload(const cu_driver *driver, int device, const mask_runs *r,
                             const saccade_sizes *s, const about *of, cu_runs *out,
                             saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const int64_t n_rows = r->B * r->H * r->rows, n_runs = r->row_begin[n_rows];
    const int64_t tiles = s->B * s->H * r->rows;
    const int64_t most = of->order.is_by_rows ? ORDER_TILE : INT32_MAX;
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
                     .n_blocks = of->most_runs ? 0 : cu_count_blocks(r),
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
    const int64_t apart = ((of->order.group ? rows : columns) + 1) / 2;
    of->most_runs = !of->order.group && x->most < apart ? x->most : apart;
    of->bits_bytes = (size_t)(x->B * x->Hkv * rows) * (size_t)((columns + 31) / 32) * 4;
}

static saccade_status upload_rows(const cu_driver *driver, const copy *c, const mask_runs *r,
                                  const saccade_sizes *s, const saccade_plan *plan,
                                  const saccade_block_mask *mask, cu_runs *out,
                                  saccade_error *err)
{
    const cu_device *on = &((const cu_state *)plan->state)->device;
    const int may = c->group < 0 ? -c->group : 0;
    about of = {.order = {.keys = c->keys,
                          .group = c->group > 0 ? 0 : (int)cu_group(s),
                          .at_once = on->n_sm,
                          .rows = plan->rows,
                          .l2_bytes = (size_t)on->l2_bytes},
                .head_parts = 1};
    cu_selected own;
    about_selection(mask, &of);
    /* What is selected may be anything, and is the same as what is imported. */
    const int is_known = !mask_get_view(mask)->imported_block_q;
    of.order.is_by_rows = is_known && may & RUNS_BY_ROWS && r->H == 1 && cu_sees_much(r);
    if (may & RUNS_IN_PARTS)
        TRY(cu_find_head_parts(r, s, on->n_sm, is_known, &of.head_parts, err));
    of.order.group /= of.head_parts;
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
                .Hkv = sizes->Hkv,
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
