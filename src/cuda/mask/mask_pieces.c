/* What a block mask gives to kernels beside its runs, on devices: the pieces of keys that small
 * tiles walk, and the limits of rows whose live keys are one interval. Made when a mask is
 * prepared; dies with it. */
#include "cuda/mask/device_mask.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct copy {
    struct copy *next;
    int device, keys; /* of a piece; 0: limits */
    int64_t B, H;     /* of the work */
    uint64_t plan;    /* whose rows alone the work is of; 0: all rows */
    cu_pieces pieces;
    cu_limits limits;
} copy;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char slot_key;

static void free_memory(const copy *c)
{
    const cu_driver *driver;
    void *pushed;
    if (c->pieces.memory && cu_get_driver(&driver, NULL) == SACCADE_OK
        && cu_enter(driver, c->device, &pushed, NULL) == SACCADE_OK) {
        driver->free(c->pieces.memory);
        cu_leave(driver, pushed);
    }
}

static void destroy_copies(void *data)
{
    for (copy *c = data, *next; c; c = next) {
        next = c->next;
        free_memory(c);
        free(c);
    }
}

/* B, H and rows are those of pieces; limits, of 0 keys, serve any. */
static const copy *find(int device, const saccade_block_mask *mask, int keys,
                        const saccade_sizes *sizes, const saccade_plan *plan)
{
    const mask_device_copy *slot = mask_device_slot(mask, &slot_key);
    const copy *c = NULL;
    pthread_mutex_lock(&lock);
    for (c = slot ? slot->data : NULL; c; c = c->next)
        if (c->device == device && c->keys == keys
            && (!keys
                || (c->B == sizes->B && c->H == sizes->H && c->plan == cu_rows_owner(plan))))
            break;
    pthread_mutex_unlock(&lock);
    return c;
}

const cu_pieces *cu_pieces_find(int device, const saccade_block_mask *mask, int keys,
                                const saccade_sizes *sizes, const saccade_plan *plan)
{
    const copy *c = find(device, mask, keys, sizes, plan);
    return c ? &c->pieces : NULL;
}

cu_limits cu_limits_find(int device, const saccade_block_mask *mask, const saccade_plan *plan)
{
    const copy *c = find(device, mask, 0, NULL, NULL);
    return c && !(plan->problem.h_offset && c->limits.h) ? c->limits : (cu_limits){0};
}

/* Takes its memory on the device, which is freed where this fails. */
static saccade_status keep(const copy *made, const saccade_block_mask *mask, saccade_error *err)
{
    copy *c = malloc(sizeof *c);
    mask_device_copy *slot = mask_device_slot(mask, &slot_key);
    if (!c || !slot) {
        free_memory(made);
        free(c);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    pthread_mutex_lock(&lock);
    *c = *made;
    c->next = slot->data;
    slot->data = c;
    slot->destroy = destroy_copies;
    pthread_mutex_unlock(&lock);
    return SACCADE_OK;
}

static saccade_status to_device(const cu_driver *driver, int device, const void *host,
                                size_t bytes, cu_ptr *out, saccade_error *err)
{
    void *pushed;
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status = cu_alloc_filled(driver, bytes, host, bytes, out, err);
    cu_leave(driver, pushed);
    return status;
}

/* ---- limits ---- */

enum { LIMIT_ROWS = 1 << 22, LIMIT_POSITIONS = 1 << 25 };

/* Limits lie by heads of the mask: a plan whose heads are some of them has none of its own, and
 * leaves them to be made for others. */
static saccade_status suits_limits(const saccade_block_mask *mask, const saccade_plan *plan,
                                   int *out, saccade_error *err)
{
    const cu_state *s = plan->state;
    const mask_runs *r;
    *out = s->facts.mask == CU_MASK_GENERAL && s->family == CU_SM90 && !mask_is_imported(mask);
    if (!*out || !plan->problem.h_offset)
        return SACCADE_OK;
    TRY(mask_runs_for(mask, ROW_BLOCK, PIECE_UNIT, 0, &r, err));
    *out = r->H == 1;
    return SACCADE_OK;
}

static saccade_status find_limits(const saccade_block_mask *mask, const mask_runs **runs,
                                  int32_t **out, saccade_error *err)
{
    const mask_view *view = mask_get_view(mask);
    *out = NULL;
    if (view->sizes.Q > LIMIT_ROWS)
        return SACCADE_OK;
    TRY(mask_runs_for(mask, ROW_BLOCK, PIECE_UNIT, 0, runs, err));
    if ((*runs)->B * (*runs)->H * view->sizes.Q > LIMIT_ROWS
        || (*runs)->stats.partial > LIMIT_POSITIONS / (ROW_BLOCK * PIECE_UNIT))
        return SACCADE_OK;
    return mask_row_limits(mask, *runs, LIMIT_POSITIONS, out, err);
}

saccade_status cu_limits_make(const cu_driver *driver, int device,
                              const saccade_block_mask *mask, const saccade_plan *plan,
                              saccade_error *err)
{
    const mask_runs *r = NULL;
    const int64_t rows = mask_get_view(mask)->sizes.Q;
    int32_t *host;
    int is_suited;
    copy made = {.device = device};
    TRY(suits_limits(mask, plan, &is_suited, err));
    if (!is_suited || find(device, mask, 0, NULL, NULL))
        return SACCADE_OK;
    TRY(find_limits(mask, &r, &host, err));
    saccade_status status = SACCADE_OK;
    if (host) {
        status = to_device(driver, device, host, (size_t)(r->B * r->H * rows) * 8,
                           &made.pieces.memory, err);
        made.limits =
            (cu_limits){(const int *)(uintptr_t)made.pieces.memory,
                        r->B == 1 ? 0 : (int)(r->H * rows), r->H == 1 ? 0 : (int)rows};
    }
    free(host);
    return status == SACCADE_OK ? keep(&made, mask, err) : status;
}

/* ---- pieces ---- */

typedef struct row_pieces {
    int first, count;
} row_pieces;

typedef struct piece_lists {
    row_pieces *rows;
    int *pieces;
    int64_t n;
} piece_lists;

static saccade_status cut_rows(const mask_runs *r, int keys, piece_lists *out,
                               saccade_error *err)
{
    const int64_t n_rows = r->B * r->H * r->rows;
    out->rows = malloc(((size_t)n_rows + 1) * sizeof *out->rows);
    FAIL_IF_NULL(out->rows);
    for (int64_t i = 0; i < n_rows; i++) {
        out->rows[i] = (row_pieces){(int)out->n, cu_cut_row(r, i, keys, NULL)};
        out->n += out->rows[i].count;
        FAIL_IF(out->n > INT32_MAX, SACCADE_ELIMIT, "cuda: got a block mask of too many runs");
    }
    out->pieces = calloc((size_t)out->n + 1, sizeof *out->pieces);
    FAIL_IF_NULL(out->pieces);
    for (int64_t i = 0; i < n_rows; i++)
        cu_cut_row(r, i, keys, out->pieces + out->rows[i].first);
    return SACCADE_OK;
}

/* The work of each tile of the order, and behind it the pieces. */
static saccade_status upload_work(const cu_driver *driver, int device, const mask_runs *r,
                                  const piece_lists *x, const saccade_sizes *s,
                                  const saccade_plan *plan, cu_pieces *out, saccade_error *err)
{
    const cu_order of = {.keys = r->block_kv,
                         .rows = plan->rows,
                         .l2_bytes =
                             (size_t)((const cu_state *)plan->state)->device.l2_bytes};
    cu_turns turns = {0, 0};
    const size_t tiles = (size_t)(s->B * s->H * r->rows);
    const size_t bytes = tiles * sizeof(cu_work) + ((size_t)x->n + 1) * sizeof(int);
    cu_work *work = malloc(bytes);
    int32_t *order = malloc(tiles * sizeof *order);
    saccade_status status =
        work && order ? cu_order_tiles(r, s, &of, order, &turns, err) : SACCADE_ENOMEM;
    out->n_first = turns.first;
    for (size_t i = 0; i < tiles && status == SACCADE_OK; i++) {
        const int64_t bh = order[i] / r->rows;
        const int64_t b = r->B == 1 ? 0 : bh / s->H, h = r->H == 1 ? 0 : bh % s->H;
        const row_pieces row = x->rows[(b * r->H + h) * r->rows + order[i] % r->rows];
        work[i] = (cu_work){order[i], row.first, row.count, x->pieces[row.first]};
    }
    if (status == SACCADE_OK) {
        int *pieces = (int *)(work + tiles);
        for (int64_t i = 0; i < x->n; i++)
            pieces[i] = x->pieces[i];
        status = to_device(driver, device, work, bytes, &out->memory, err);
    }
    out->work = out->memory;
    out->pieces = out->memory + tiles * sizeof(cu_work);
    free(work);
    free(order);
    FAIL_IF(status == SACCADE_ENOMEM, SACCADE_ENOMEM, "out of memory");
    return status;
}

static saccade_status make_pieces(const cu_driver *driver, const mask_runs *r,
                                  const saccade_sizes *sizes, const saccade_plan *plan,
                                  copy *made, saccade_error *err)
{
    piece_lists lists = {0};
    saccade_status status = cut_rows(r, made->keys, &lists, err);
    if (status == SACCADE_OK)
        status = upload_work(driver, made->device, r, &lists, sizes, plan, &made->pieces, err);
    const int64_t tiles = r->B * r->H * r->rows; /* none where no row is here */
    made->pieces.keys = tiles ? lists.n * made->keys / tiles : 0;
    free(lists.rows);
    free(lists.pieces);
    return status;
}

saccade_status cu_pieces_make(const cu_driver *driver, int device,
                              const saccade_block_mask *mask, int keys,
                              const saccade_sizes *sizes, const saccade_plan *plan,
                              saccade_error *err)
{
    const mask_runs *r;
    cu_selected own = {.runs = NULL};
    copy made = {.device = device,
                 .keys = keys,
                 .B = sizes->B,
                 .H = sizes->H,
                 .plan = cu_rows_owner(plan)};
    if (find(device, mask, keys, sizes, plan))
        return SACCADE_OK;
    TRY(mask_runs_for(mask, ROW_BLOCK, PIECE_UNIT, 0, &r, err));
    saccade_status status = SACCADE_OK;
    if (plan->rows)
        status = cu_select_rows(r, plan->rows, ROW_BLOCK, 0, &own, err);
    if (status == SACCADE_OK)
        status = make_pieces(driver, plan->rows ? &own.r : r, sizes, plan, &made, err);
    cu_selected_free(&own);
    return status == SACCADE_OK ? keep(&made, mask, err) : status;
}
