/* Block masks whose blocks are selected while a model runs: imported ones whose lists change.
 * On the host here; back ends change their own copies. */
#include "mask/mask_build.h"

#include "base/context.h"
#include "base/integers.h"
#include "base/record.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

static saccade_status check_options(const saccade_selection_options *o, const saccade_sizes *s,
                                    saccade_error *err)
{
    FAIL_AT(o->block_q < 1 || o->block_kv < 1 || o->block_q > MASK_LENGTH_MAX
                || o->block_kv > MASK_LENGTH_MAX,
            SACCADE_EINVAL, "block", 0, 0, "got %d x %d, expected 1 to 2^30", o->block_q,
            o->block_kv);
    FAIL_AT(o->B != 1 && o->B != s->B, SACCADE_EINVAL, "B", 0, 0,
            "got %lld, expected 1 or %lld", (long long)o->B, (long long)s->B);
    FAIL_AT(s->Hkv < 1 || s->H % s->Hkv, SACCADE_EINVAL, "sizes.Hkv", 0, 0,
            "got %lld, expected a divisor of H = %lld", (long long)s->Hkv, (long long)s->H);
    FAIL_AT(o->Hkv != 1 && o->Hkv != s->Hkv, SACCADE_EINVAL, "Hkv", 0, 0,
            "got %lld, expected 1 or %lld", (long long)o->Hkv, (long long)s->Hkv);
    FAIL_AT(o->most < 1, SACCADE_EINVAL, "most", 0, 0, "got %d, expected 1 or more", o->most);
    return SACCADE_OK;
}

/* Lists of query heads, so that nobody need know of groups. */
static mask_runs shape_of(const struct mask_selection *x, const saccade_sizes *s,
                          int32_t block_q, int32_t block_kv)
{
    return (mask_runs){.block_q = block_q,
                       .block_kv = block_kv,
                       .B = x->B,
                       .H = x->Hkv == 1 ? 1 : s->H,
                       .rows = (s->Q + block_q - 1) / block_q,
                       .columns = (s->KV + block_kv - 1) / block_kv};
}

/* ---- lists ---- */

/* Entry i of row `row`, for query head h; -1 where it is no block. */
static int64_t entry_at(const saccade_tensor *t, const int64_t at[3], int64_t i,
                        int64_t columns)
{
    int64_t place = i * t->stride[3];
    for (int d = 0; d < 3; d++)
        place += at[d] * t->stride[d];
    const int64_t x = ((const int32_t *)t->data)[place];
    return x < 0 || x >= columns ? -1 : x;
}

/* blocks: NULL for none. is_there: a byte for each column, zeros, which it leaves so. */
static void add_row(const mask_runs *shape, const saccade_tensor *blocks, const int64_t at[3],
                    int all_live, unsigned char *is_there, int64_t row, run_lists *lists)
{
    int64_t first = shape->columns, past = 0;
    for (int64_t i = 0; blocks && i < blocks->shape[3]; i++) {
        const int64_t column = entry_at(blocks, at, i, shape->columns);
        if (column < 0)
            continue;
        is_there[column] = 1;
        first = smaller(first, column);
        past = larger(past, column + 1);
    }
    for (int64_t c = first; c < past; c++)
        if (is_there[c])
            lists_add(lists, row, c, 1, all_live);
    if (first < past)
        memset(is_there + first, 0, (size_t)(past - first));
}

static saccade_status make_lists(const mask_runs *shape, const struct mask_selection *x,
                                 const saccade_tensor *blocks, int all_live, mask_runs **out,
                                 saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    run_lists lists = {0};
    const int64_t group = shape->H / x->Hkv;
    TRY(build_check_rows(shape, err));
    unsigned char *is_there = calloc((size_t)shape->columns, 1);
    FAIL_IF_NULL(is_there);
    TRY_GOTO(lists_open(&lists, shape->B * shape->H * shape->rows, err));
    for (int64_t row = 0; row < lists.rows; row++) {
        const int64_t head = row / shape->rows;
        const int64_t at[3] = {head / shape->H, head % shape->H / group, row % shape->rows};
        add_row(shape, blocks, at, all_live, is_there, row, &lists);
    }
    TRY_GOTO(lists_join(&lists, 1, shape, out, err));
    (*out)->stats.proven = (*out)->stats.blocks; /* told, not evaluated */
out:
    lists_close(&lists);
    free(is_there);
    return status;
}

saccade_status mask_select(saccade_block_mask *mask, const saccade_tensor *blocks,
                           saccade_error *err)
{
    const mask_runs *old = mask_own_runs(mask);
    const mask_runs shape = {.block_q = old->block_q,
                             .block_kv = old->block_kv,
                             .B = old->B,
                             .H = old->H,
                             .rows = old->rows,
                             .columns = old->columns};
    mask_runs *own;
    TRY(make_lists(&shape, &mask->view.selection, blocks, mask->mod == NULL, &own, err));
    mask_replace_runs(mask, own);
    return SACCADE_OK;
}

/* ---- the object ---- */

saccade_status saccade_block_mask_create_selected(
    saccade_context *context, const saccade_selection_options *options, const saccade_mod *mask,
    const saccade_sizes *sizes, const saccade_positions *positions,
    const saccade_binding *bindings, int32_t n_bindings, saccade_block_mask **out,
    saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_selection_options o;
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    mask_offsets offsets;
    mask_recipe r = {
        .mod = mask, .tensors = tensors, .threads = context ? context->threads : 0};
    FAIL_AT(!out || !options, SACCADE_EINVAL, "block_mask", 0, 0,
            "got NULL, expected options and a result");
    FAIL_AT(mask && (!mod_function(mask) || saccade_mod_kind(mask) != SACCADE_MASK),
            SACCADE_EINVAL, "block_mask", 0, 0,
            "got a score or a mod not bound, expected a bound mask");
    saccade_selection_options_init(&o);
    TRY(RECORD_READ(&o, options, "selection options"));
    TRY(mask_check_sizes(sizes, err));
    TRY(check_options(&o, sizes, err));
    r.sizes = *sizes;
    if (mask)
        TRY(eval_resolve(mod_function(mask), bindings, n_bindings, 1, tensors, err));
    const struct mask_selection x = {o.B, o.Hkv, o.most};
    const mask_runs shape = shape_of(&x, sizes, o.block_q, o.block_kv);
    TRY(mask_read_offsets(positions, sizes, &offsets, err));
    r.q_offset = offsets.q;
    r.kv_offset = offsets.kv;
    TRY_GOTO(make_lists(&shape, &x, NULL, mask == NULL, &r.imported, err));
    TRY_GOTO(mask_make(&r, out, err));
    (*out)->view.selection = x;
out:
    if (status != SACCADE_OK)
        runs_destroy(r.imported);
    mask_free_offsets(&offsets);
    return status;
}
