/* Block masks from and to other forms: FlexAttention's index tensors (checked entry by entry:
 * they may come from anywhere), and dense bytes. */
#include "mask/mask_build.h"

#include "base/context.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- import ---- */

typedef struct listed {
    int32_t column, full;
} listed;

static int by_column(const void *a, const void *b)
{
    const int32_t x = ((const listed *)a)->column, y = ((const listed *)b)->column;
    return (x > y) - (x < y);
}

/* Where an index tensor is wrong, for its message. */
typedef struct index_place {
    const char *tensor;
    int64_t head, row;
} index_place;

static saccade_status read_list(const saccade_block_indices *x, const int32_t *counts,
                                const int32_t *indices, int full, index_place at, listed *list,
                                int64_t *n, saccade_error *err)
{
    const int64_t line = at.head * x->rows + at.row;
    const int64_t count = counts ? counts[line] : 0;
    FAIL_AT(count < 0 || count > x->columns, SACCADE_EINVAL, at.tensor, 0, 0,
            "got count %lld in row %lld of head %lld, expected 0 to %lld", (long long)count,
            (long long)at.row, (long long)at.head, (long long)x->columns);
    FAIL_AT(*n + count > x->columns, SACCADE_EINVAL, at.tensor, 0, 0,
            "got %lld blocks in row %lld of head %lld, expected at most %lld",
            (long long)(*n + count), (long long)at.row, (long long)at.head,
            (long long)x->columns);
    for (int64_t i = 0; i < count; i++) {
        const int32_t column = indices[line * x->columns + i];
        FAIL_AT(column < 0 || column >= x->columns, SACCADE_EINVAL, at.tensor, 0, 0,
                "got block %d in row %lld of head %lld, expected 0 to %lld", column,
                (long long)at.row, (long long)at.head, (long long)x->columns - 1);
        list[(*n)++] = (listed){column, full};
    }
    return SACCADE_OK;
}

static saccade_status import_row(const saccade_block_indices *x, int64_t head, int64_t row,
                                 int all_live, listed *list, run_lists *lists,
                                 saccade_error *err)
{
    const index_place partial = {"kv_indices", head, row},
                      full = {"full_kv_indices", head, row};
    int64_t n = 0;
    TRY(read_list(x, x->kv_num_blocks, x->kv_indices, all_live, partial, list, &n, err));
    TRY(read_list(x, x->full_kv_num_blocks, x->full_kv_indices, 1, full, list, &n, err));
    qsort(list, (size_t)n, sizeof *list, by_column);
    for (int64_t i = 0; i < n; i++) {
        FAIL_AT(i && list[i].column == list[i - 1].column, SACCADE_EINVAL, "kv_indices", 0, 0,
                "got block %d twice in row %lld of head %lld", list[i].column, (long long)row,
                (long long)head);
        lists_add(lists, head * x->rows + row, list[i].column, 1, list[i].full);
    }
    return SACCADE_OK;
}

static saccade_status check_indices(const saccade_block_indices *x, const saccade_sizes *s,
                                    saccade_error *err)
{
    FAIL_AT(!x, SACCADE_EINVAL, "indices", 0, 0, "got NULL, expected index tensors");
    FAIL_AT(x->block_q < 1 || x->block_kv < 1 || x->block_q > MASK_LENGTH_MAX
                || x->block_kv > MASK_LENGTH_MAX,
            SACCADE_EINVAL, "indices", 0, 0, "got blocks of %d x %d, expected 1 to 2^30",
            x->block_q, x->block_kv);
    FAIL_AT((x->B != 1 && x->B != s->B) || (x->H != 1 && x->H != s->H), SACCADE_EINVAL,
            "indices", 0, 0, "got B %lld, H %lld, expected 1 or %lld, 1 or %lld",
            (long long)x->B, (long long)x->H, (long long)s->B, (long long)s->H);
    const int64_t rows = (s->Q + x->block_q - 1) / x->block_q;
    const int64_t columns = (s->KV + x->block_kv - 1) / x->block_kv;
    FAIL_AT(x->rows != rows || x->columns != columns, SACCADE_EINVAL, "indices", 0, 0,
            "got %lld rows of %lld blocks, expected %lld of %lld for %lld x %lld",
            (long long)x->rows, (long long)x->columns, (long long)rows, (long long)columns,
            (long long)s->Q, (long long)s->KV);
    FAIL_AT(!x->kv_num_blocks || !x->kv_indices
                || !x->full_kv_num_blocks != !x->full_kv_indices,
            SACCADE_EINVAL, "indices", 0, 0, "got a count without its indices or neither");
    return SACCADE_OK;
}

static saccade_status read_indices(const saccade_block_indices *x, int all_live,
                                   mask_runs **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    run_lists lists = {0};
    const mask_runs shape = {.block_q = x->block_q,
                             .block_kv = x->block_kv,
                             .B = x->B,
                             .H = x->H,
                             .rows = x->rows,
                             .columns = x->columns};
    TRY(build_check_rows(&shape, err));
    listed *list = malloc((size_t)x->columns * sizeof *list);
    FAIL_IF_NULL_GOTO(list);
    TRY_GOTO(lists_open(&lists, x->B * x->H * x->rows, err));
    for (int64_t line = 0; line < lists.rows; line++)
        TRY_GOTO(import_row(x, line / x->rows, line % x->rows, all_live, list, &lists, err));
    TRY_GOTO(lists_join(&lists, 1, &shape, out, err));
    (*out)->stats.proven = (*out)->stats.blocks; /* told, not evaluated */
out:
    lists_close(&lists);
    free(list);
    return status;
}

saccade_status saccade_block_mask_import(saccade_context *context,
                                         const saccade_block_indices *indices,
                                         const saccade_mod *mask, const saccade_sizes *sizes,
                                         const saccade_positions *positions,
                                         const saccade_binding *bindings, int32_t n_bindings,
                                         saccade_block_mask **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    mask_offsets offsets;
    mask_recipe r = {
        .mod = mask, .tensors = tensors, .threads = context ? context->threads : 0};
    FAIL_AT(!out, SACCADE_EINVAL, "block_mask", 0, 0, "got NULL, expected a result");
    FAIL_AT(mask && (!mod_function(mask) || saccade_mod_kind(mask) != SACCADE_MASK),
            SACCADE_EINVAL, "block_mask", 0, 0,
            "got a score or a mod not bound, expected a bound mask");
    TRY(mask_check_sizes(sizes, err));
    r.sizes = *sizes;
    TRY(check_indices(indices, sizes, err));
    if (mask)
        TRY(eval_resolve(mod_function(mask), bindings, n_bindings, 1, tensors, err));
    TRY(mask_read_offsets(positions, sizes, &offsets, err));
    r.q_offset = offsets.q;
    r.kv_offset = offsets.kv;
    TRY_GOTO(read_indices(indices, mask == NULL, &r.imported, err));
    TRY_GOTO(mask_make(&r, out, err));
out:
    if (status != SACCADE_OK)
        runs_destroy(r.imported);
    mask_free_offsets(&offsets);
    return status;
}

/* ---- export ---- */

static void export_row(const saccade_block_indices *x, int64_t line, const saccade_run *runs,
                       int64_t n)
{
    int32_t *partial = x->kv_indices + line * x->columns, n_partial = 0, n_full = 0;
    int32_t *full = x->full_kv_indices ? x->full_kv_indices + line * x->columns : NULL;
    for (int64_t i = 0; i < n; i++)
        for (int32_t c = runs[i].first; c < runs[i].first + runs[i].count; c++) {
            if (full && runs[i].full)
                full[n_full++] = c;
            else
                partial[n_partial++] = c;
        }
    x->kv_num_blocks[line] = n_partial;
    if (full)
        x->full_kv_num_blocks[line] = n_full;
}

saccade_status saccade_block_mask_export(const saccade_block_mask *mask, int transposed,
                                         saccade_block_indices *x, saccade_error *err)
{
    const mask_runs *runs;
    FAIL_AT(!mask || !x, SACCADE_EINVAL, "export", 0, 0,
            "got NULL, expected a mask and index tensors");
    TRY(mask_runs_for(mask, mask->options.block_q, mask->options.block_kv, transposed, &runs,
                      err));
    const int is_question =
        !x->kv_num_blocks && !x->kv_indices && !x->full_kv_num_blocks && !x->full_kv_indices;
    if (is_question) {
        x->B = runs->B;
        x->H = runs->H;
        x->rows = runs->rows;
        x->columns = runs->columns;
        x->block_q = runs->block_q;
        x->block_kv = runs->block_kv;
        return SACCADE_OK;
    }
    FAIL_AT(!x->kv_num_blocks || !x->kv_indices
                || !x->full_kv_num_blocks != !x->full_kv_indices,
            SACCADE_EINVAL, "export", 0, 0, "got a count without its indices or neither");
    FAIL_AT(x->B != runs->B || x->H != runs->H || x->rows != runs->rows
                || x->columns != runs->columns,
            SACCADE_EINVAL, "export", 0, 0,
            "got shape [%lld, %lld, %lld, %lld], expected "
            "[%lld, %lld, %lld, %lld]",
            (long long)x->B, (long long)x->H, (long long)x->rows, (long long)x->columns,
            (long long)runs->B, (long long)runs->H, (long long)runs->rows,
            (long long)runs->columns);
    for (int64_t line = 0; line < runs->B * runs->H * runs->rows; line++)
        export_row(x, line, runs->runs + runs->row_begin[line],
                   runs->row_begin[line + 1] - runs->row_begin[line]);
    return SACCADE_OK;
}

/* ---- dense ---- */

static void dense_block(const saccade_block_mask *m, eval_state *eval, int64_t b, int64_t q,
                        const saccade_run *run, uint8_t *row)
{
    const int64_t first = (int64_t)run->first * m->options.block_kv;
    const int64_t past = ((int64_t)run->first + run->count) * m->options.block_kv;
    const int64_t end = past < m->view.sizes.KV ? past : m->view.sizes.KV;
    if (run->full) {
        memset(row + first, 1, (size_t)(end - first));
        return;
    }
    eval_row(eval, (int32_t)(q + (m->q_offset ? m->q_offset[b] : 0)));
    for (int64_t kv = first; kv < end; kv += EVAL_STRIP)
        eval_mask(eval, (int32_t)(kv + (m->kv_offset ? m->kv_offset[b] : 0)),
                  (int32_t)(end - kv < EVAL_STRIP ? end - kv : EVAL_STRIP), row + kv);
}

static void dense_head(const saccade_block_mask *m, eval_state *eval, int64_t b, int64_t h,
                       uint8_t *dense)
{
    const mask_runs *runs = mask_own_runs(m);
    const int64_t Q = m->view.sizes.Q, KV = m->view.sizes.KV;
    if (eval)
        eval_head(eval, (int32_t)b, (int32_t)h);
    memset(dense, 0, (size_t)(Q * KV));
    for (int64_t q = 0; q < Q; q++) {
        const saccade_run *run;
        const int64_t n = runs_row(runs, b, h, q / runs->block_q, &run);
        for (int64_t i = 0; i < n; i++)
            dense_block(m, eval, b, q, &run[i], dense + q * KV);
    }
}

saccade_status saccade_block_mask_to_dense(const saccade_block_mask *mask, uint8_t *dense,
                                           saccade_error *err)
{
    void *memory = NULL;
    eval_state *eval = NULL;
    FAIL_AT(!mask || !dense, SACCADE_EINVAL, "to_dense", 0, 0,
            "got NULL, expected a mask and bytes");
    if (mask->prog) {
        memory = aligned_alloc(64, eval_state_bytes(mask->prog));
        FAIL_IF_NULL(memory);
        eval = eval_begin(mask->prog, &mask->view.env, memory);
    }
    const saccade_sizes *s = &mask->view.sizes;
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t h = 0; h < s->H; h++)
            dense_head(mask, eval, b, h, dense + (b * s->H + h) * s->Q * s->KV);
    free(memory);
    return SACCADE_OK;
}
