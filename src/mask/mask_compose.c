/* and, or, not and windows of block masks.
 * A mask that is its mod is composed as a mod and proven anew. Imported masks are composed
 * block by block, a block being empty, full, or partial by its own mod; where one operand is
 * partial and the other's mod would be asked about a block that its index tensors settle, the
 * result has no single mod unless that mod agrees with them there, which is checked. */
#include "mask/mask_build.h"

#include "base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- two masks, one shape ---- */

static int32_t offset_at(const int32_t *offset, int64_t b)
{
    return offset ? offset[b] : 0;
}

static saccade_status check_same_place(const saccade_block_mask *a, const saccade_block_mask *b,
                                       saccade_error *err)
{
    const saccade_sizes *x = &a->view.sizes, *y = &b->view.sizes;
    FAIL_AT(memcmp(x, y, sizeof *x) != 0, SACCADE_EINVAL, "block_mask", 0, 0,
            "got sizes B %lld H %lld Q %lld KV %lld, expected the first's B %lld "
            "H %lld Q %lld KV %lld (and the same Hkv, D, Dv)",
            (long long)y->B, (long long)y->H, (long long)y->Q, (long long)y->KV,
            (long long)x->B, (long long)x->H, (long long)x->Q, (long long)x->KV);
    for (int64_t i = 0; i < x->B; i++)
        FAIL_AT(offset_at(a->q_offset, i) != offset_at(b->q_offset, i)
                    || offset_at(a->kv_offset, i) != offset_at(b->kv_offset, i),
                SACCADE_EINVAL, "block_mask", 0, 0,
                "got other offsets for batch %lld than the first's", (long long)i);
    return SACCADE_OK;
}

/* The mod of the result (NULL where neither has one) and its captures. */
static saccade_status join_mods(const saccade_block_mask *a, const saccade_block_mask *b,
                                mod_op op, saccade_mod **mod, saccade_tensor *tensors,
                                saccade_error *err)
{
    uint32_t n = 0;
    *mod = NULL;
    for (int i = 0; i < 2; i++) {
        const saccade_block_mask *m = i ? b : a;
        const uint32_t more = m->mod ? mod_function(m->mod)->n_captures : 0;
        FAIL_AT(n + more > MOD_MAX_CAPTURES, SACCADE_ELIMIT, "block_mask", 0, 0,
                "got %u captures together, expected at most %d", n + more, MOD_MAX_CAPTURES);
        if (more)
            memcpy(tensors + n, m->tensors, more * sizeof *tensors);
        n += more;
    }
    if (a->mod && b->mod)
        return mod_join(a->mod, b->mod, op, NULL, mod, err);
    if (a->mod || b->mod)
        return mod_from_function(mod_function(a->mod ? a->mod : b->mod), mod, err);
    return SACCADE_OK;
}

/* ---- block by block ---- */

enum { EMPTY, PARTIAL, FULL };

typedef struct joint {
    int is_and;
    int both_have_mods;
    const saccade_run *proven[2]; /* runs of each one's mod alone in this row, if needed */
    int64_t n_proven[2];
    run_lists *lists;
    int64_t row;
    int conflict;
} joint;

/* Does the mod alone give `kind` all over these blocks? */
static int agrees(const saccade_run *runs, int64_t n, int64_t first, int64_t past, int kind)
{
    int64_t at = first;
    for (int64_t i = 0; i < n && at < past; i++) {
        const int64_t run_past = (int64_t)runs[i].first + runs[i].count;
        if (run_past <= at || runs[i].first >= past)
            continue;
        if (kind != FULL || runs[i].first > at || !runs[i].full)
            return 0;
        at = run_past;
    }
    return kind == EMPTY || at >= past;
}

static int settled_kind(int is_and, int a, int b)
{
    return is_and ? (a < b ? a : b) : (a < b ? b : a);
}

static void join_piece(void *arg, int64_t first, int64_t past, int a, int b)
{
    joint *j = arg;
    const int kind = settled_kind(j->is_and, a, b);
    if (kind == PARTIAL && a != b && j->both_have_mods) { /* the settled one's mod is asked */
        const int which = a == PARTIAL;
        j->conflict |=
            !agrees(j->proven[which], j->n_proven[which], first, past, which ? b : a);
    }
    if (kind != EMPTY)
        lists_add(j->lists, j->row, first, past - first, kind == FULL);
}

/* Runs of the mod alone, for masks that are more than their mod. */
static saccade_status mod_runs(const saccade_block_mask *m, int32_t block_q, int32_t block_kv,
                               saccade_block_mask **mask, const mask_runs **runs,
                               saccade_error *err)
{
    mask_recipe r = mask_recipe_of(m);
    r.options.block_q = block_q;
    r.options.block_kv = block_kv;
    r.options.evaluation_budget = 0;
    TRY(mask_make(&r, mask, err));
    *runs = mask_own_runs(*mask);
    return SACCADE_OK;
}

static saccade_status join_rows(const mask_runs *const runs[2], const mask_runs *const alone[2],
                                int is_and, mask_runs **out, saccade_error *err)
{
    mask_runs shape = *runs[0];
    saccade_status status = SACCADE_OK;
    run_lists lists = {0};
    shape.B = runs[0]->B > runs[1]->B ? runs[0]->B : runs[1]->B;
    shape.H = runs[0]->H > runs[1]->H ? runs[0]->H : runs[1]->H;
    joint j = {.is_and = is_and, .both_have_mods = alone[0] && alone[1], .lists = &lists};
    for (int i = 0; i < 2 && j.both_have_mods; i++) { /* one list may be of mods that differ */
        shape.B = alone[i]->B > shape.B ? alone[i]->B : shape.B;
        shape.H = alone[i]->H > shape.H ? alone[i]->H : shape.H;
    }
    TRY(build_check_rows(&shape, err));
    TRY_GOTO(lists_open(&lists, shape.B * shape.H * shape.rows, err));
    for (; j.row < lists.rows; j.row++) {
        const int64_t head = j.row / shape.rows, row = j.row % shape.rows;
        const int64_t b = head / shape.H, h = head % shape.H;
        const saccade_run *list[2];
        int64_t n[2];
        for (int i = 0; i < 2; i++) {
            n[i] = runs_row(runs[i], b, h, row, &list[i]);
            if (j.both_have_mods)
                j.n_proven[i] = runs_row(alone[i], b, h, row, &j.proven[i]);
        }
        runs_walk(list[0], n[0], list[1], n[1], shape.columns, join_piece, &j);
        FAIL_IF_GOTO(j.conflict, SACCADE_EINVAL,
                     "block_mask: got imported blocks that their mod contradicts in block row "
                     "%lld, so that no one mod stands for the result",
                     (long long)row);
    }
    TRY_GOTO(lists_join(&lists, 1, &shape, out, err));
    (*out)->stats.proven = (*out)->stats.blocks;
out:
    lists_close(&lists);
    return status;
}

/* The imported one's blocks; of two, the finer, which then divide the other's. */
static void joint_blocks(const saccade_block_mask *a, const saccade_block_mask *b, int32_t *bq,
                         int32_t *bk)
{
    const saccade_block_mask *x = a->is_imported ? a : b, *y = b->is_imported ? b : a;
    *bq = x->options.block_q < y->options.block_q ? x->options.block_q : y->options.block_q;
    *bk = x->options.block_kv < y->options.block_kv ? x->options.block_kv : y->options.block_kv;
}

static saccade_status join_blocks(const saccade_block_mask *a, const saccade_block_mask *b,
                                  int is_and, mask_runs **out, saccade_error *err)
{
    const saccade_block_mask *const from[2] = {a, b};
    int32_t bq, bk;
    joint_blocks(a, b, &bq, &bk);
    const mask_runs *runs[2] = {NULL, NULL}, *alone[2] = {NULL, NULL};
    saccade_block_mask *made[2] = {NULL, NULL};
    saccade_status status = SACCADE_OK;
    for (int i = 0; i < 2; i++) {
        TRY_GOTO(mask_runs_for(from[i], bq, bk, 0, &runs[i], err));
        if (a->mod && b->mod)
            TRY_GOTO(mod_runs(from[i], bq, bk, &made[i], &alone[i], err));
    }
    TRY_GOTO(join_rows(runs, alone, is_and, out, err));
out:
    saccade_block_mask_destroy(made[0]);
    saccade_block_mask_destroy(made[1]);
    return status;
}

static saccade_status compose(const saccade_block_mask *a, const saccade_block_mask *b,
                              int is_and, saccade_block_mask **out, saccade_error *err)
{
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    saccade_mod *mod = NULL;
    saccade_status status = SACCADE_OK;
    FAIL_AT(!a || !b || !out, SACCADE_EINVAL, "block_mask", 0, 0,
            "got NULL, expected masks and a result");
    TRY(check_same_place(a, b, err));
    mask_recipe r = mask_recipe_of(a);
    TRY_GOTO(join_mods(a, b, is_and ? OP_and : OP_or, &mod, tensors, err));
    r.mod = mod;
    r.tensors = tensors;
    r.reads.deps |= b->view.reads.deps;
    r.reads.sizes |= b->view.reads.sizes;
    if (a->is_imported || b->is_imported)
        TRY_GOTO(join_blocks(a, b, is_and, &r.imported, err));
    TRY_GOTO(mask_make(&r, out, err));
out:
    if (status != SACCADE_OK)
        runs_destroy(r.imported);
    saccade_mod_destroy(mod);
    return status;
}

saccade_status saccade_block_mask_and(const saccade_block_mask *a, const saccade_block_mask *b,
                                      saccade_block_mask **out, saccade_error *err)
{
    return compose(a, b, 1, out, err);
}

saccade_status saccade_block_mask_or(const saccade_block_mask *a, const saccade_block_mask *b,
                                     saccade_block_mask **out, saccade_error *err)
{
    return compose(a, b, 0, out, err);
}

/* ---- not ---- */

typedef struct turned {
    run_lists *lists;
    int64_t row;
} turned;

static void turn_piece(void *arg, int64_t first, int64_t past, int a, int b)
{
    turned *t = arg;
    (void)b;
    if (a != FULL)
        lists_add(t->lists, t->row, first, past - first, a == EMPTY);
}

static saccade_status turn_blocks(const mask_runs *runs, mask_runs **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    run_lists lists = {0};
    turned t = {.lists = &lists};
    TRY_GOTO(lists_open(&lists, runs->B * runs->H * runs->rows, err));
    for (; t.row < lists.rows; t.row++)
        runs_walk(runs->runs + runs->row_begin[t.row],
                  runs->row_begin[t.row + 1] - runs->row_begin[t.row], NULL, 0, runs->columns,
                  turn_piece, &t);
    TRY_GOTO(lists_join(&lists, 1, runs, out, err));
    (*out)->stats.proven = (*out)->stats.blocks;
out:
    lists_close(&lists);
    return status;
}

saccade_status saccade_block_mask_not(const saccade_block_mask *a, saccade_block_mask **out,
                                      saccade_error *err)
{
    saccade_mod *mod = NULL;
    saccade_status status = SACCADE_OK;
    FAIL_AT(!a || !out, SACCADE_EINVAL, "block_mask", 0, 0,
            "got NULL, expected masks and a result");
    mask_recipe r = mask_recipe_of(a);
    if (a->mod)
        TRY_GOTO(mod_negate(a->mod, &mod, err));
    r.mod = mod;
    if (a->is_imported)
        TRY_GOTO(turn_blocks(mask_own_runs(a), &r.imported, err));
    TRY_GOTO(mask_make(&r, out, err));
out:
    if (status != SACCADE_OK)
        runs_destroy(r.imported);
    saccade_mod_destroy(mod);
    return status;
}

/* ---- window ---- */

static int reads_size(const mod_fn *fn, mod_size which)
{
    return mask_reads_of(fn).sizes >> which & 1;
}

/* Q and KV in the text go on meaning the original's lengths: they become constants. */
static saccade_status fix_sizes(const mod_fn *fn, const saccade_sizes *sizes, saccade_mod **out,
                                saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const mod_fn *fixed;
    arena scratch;
    arena_init(&scratch);
    mod_builder *b = mod_builder_create(&scratch, fn->kind, fn->captures, fn->n_captures);
    uint32_t *place = arena_array(&scratch, fn->n_nodes, sizeof *place);
    FAIL_IF_GOTO(!b || !place, SACCADE_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *node = &fn->nodes[i];
        uint32_t args[SACCADE_MAX_RANK];
        for (uint32_t a = 0; a < node->n_args; a++)
            args[a] = place[fn->args[node->args + a]];
        if (node->op == OP_SIZE && (node->imm.i == SIZE_Q || node->imm.i == SIZE_KV))
            place[i] = mod_emit_int(b, (int32_t)(node->imm.i == SIZE_Q ? sizes->Q : sizes->KV));
        else if (node->op == OP_FLOAT)
            place[i] = mod_emit_float(b, node->imm.f);
        else
            place[i] = mod_emit(b, node->op, args, node->n_args, node->imm.i, node->line,
                                node->column);
    }
    TRY_GOTO(mod_finish(b, place[fn->result], &fixed, err));
    TRY_GOTO(mod_from_function(fixed, out, err));
out:
    arena_free(&scratch);
    return status;
}

/* Offsets of the window: *out is always an array of B, or NULL when all are 0. */
static saccade_status move_offsets(const int32_t *from, int64_t B, int64_t by, int64_t length,
                                   int32_t **out, saccade_error *err)
{
    *out = NULL;
    if (!from && by == 0)
        return SACCADE_OK;
    int32_t *moved = malloc((size_t)B * sizeof *moved);
    FAIL_IF_NULL(moved);
    for (int64_t b = 0; b < B; b++) {
        const int64_t first = offset_at(from, b) + by;
        if (first < INT32_MIN / 2 || first + length - 1 > INT32_MAX) {
            free(moved);
            FAIL(SACCADE_EINVAL,
                 "window: got first position %lld, expected positions within "
                 "32 bits",
                 (long long)first);
        }
        moved[b] = (int32_t)first;
    }
    *out = moved;
    return SACCADE_OK;
}

static saccade_status check_cut(const char *what, int64_t at, int64_t n, int32_t block,
                                int64_t length, saccade_error *err)
{
    FAIL_AT(at % block != 0, SACCADE_EINVAL, "window", 0, 0,
            "got first %s %lld, expected a multiple of %d, the imported block size", what,
            (long long)at, block);
    FAIL_AT(at < 0 || at + n > length, SACCADE_EINVAL, "window", 0, 0,
            "got %ss %lld to %lld, expected some of the 0 to %lld that index tensors "
            "were imported for",
            what, (long long)at, (long long)(at + n - 1), (long long)length - 1);
    return SACCADE_OK;
}

/* Rows and columns of imported blocks from (row0, column0) on. */
static saccade_status cut_blocks(const mask_runs *runs, int64_t row0, int64_t column0,
                                 mask_runs *shape, mask_runs **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    run_lists lists = {0};
    TRY_GOTO(lists_open(&lists, runs->B * runs->H * shape->rows, err));
    for (int64_t at = 0; at < lists.rows; at++) {
        const int64_t from = at / shape->rows * runs->rows + row0 + at % shape->rows;
        for (int64_t i = runs->row_begin[from]; i < runs->row_begin[from + 1]; i++) {
            int64_t first = runs->runs[i].first - column0, past = first + runs->runs[i].count;
            first = first < 0 ? 0 : first;
            past = past > shape->columns ? shape->columns : past;
            if (first < past)
                lists_add(&lists, at, first, past - first, runs->runs[i].full);
        }
    }
    TRY_GOTO(lists_join(&lists, 1, shape, out, err));
    (*out)->stats.proven = (*out)->stats.blocks;
out:
    lists_close(&lists);
    return status;
}

static saccade_status cut_imported(const saccade_block_mask *mask, int64_t q0, int64_t Q,
                                   int64_t kv0, int64_t KV, mask_runs **out, saccade_error *err)
{
    const mask_runs *runs = mask_own_runs(mask);
    mask_runs shape = *runs;
    TRY(check_cut("query", q0, Q, runs->block_q, mask->view.sizes.Q, err));
    TRY(check_cut("key", kv0, KV, runs->block_kv, mask->view.sizes.KV, err));
    shape.rows = (Q + runs->block_q - 1) / runs->block_q;
    shape.columns = (KV + runs->block_kv - 1) / runs->block_kv;
    return cut_blocks(runs, q0 / runs->block_q, kv0 / runs->block_kv, &shape, out, err);
}

saccade_status saccade_block_mask_window(const saccade_block_mask *mask, int64_t q0, int64_t Q,
                                         int64_t kv0, int64_t KV, saccade_block_mask **out,
                                         saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_mod *mod = NULL;
    int32_t *q_offset = NULL, *kv_offset = NULL;
    FAIL_AT(!mask || !out, SACCADE_EINVAL, "window", 0, 0,
            "got NULL, expected a mask and a result");
    const int64_t most = (int64_t)1 << 30;
    FAIL_AT(q0 < -most || q0 > most || kv0 < -most || kv0 > most, SACCADE_EINVAL, "window", 0,
            0, "got first query %lld and key %lld, expected within 2^30", (long long)q0,
            (long long)kv0);
    const saccade_sizes *from = &mask->view.sizes;
    mask_recipe r = mask_recipe_of(mask);
    r.sizes.Q = Q;
    r.sizes.KV = KV;
    TRY(mask_check_sizes(&r.sizes, err));
    const mod_fn *fn = mask->mod ? mod_function(mask->mod) : NULL;
    if (fn
        && ((Q != from->Q && reads_size(fn, SIZE_Q))
            || (KV != from->KV && reads_size(fn, SIZE_KV)))) {
        TRY_GOTO(fix_sizes(fn, from, &mod, err));
        r.mod = mod;
    }
    TRY_GOTO(move_offsets(mask->q_offset, from->B, q0, Q, &q_offset, err));
    TRY_GOTO(move_offsets(mask->kv_offset, from->B, kv0, KV, &kv_offset, err));
    r.q_offset = q_offset;
    r.kv_offset = kv_offset;
    if (mask->is_imported)
        TRY_GOTO(cut_imported(mask, q0, Q, kv0, KV, &r.imported, err));
    TRY_GOTO(mask_make(&r, out, err));
out:
    if (status != SACCADE_OK)
        runs_destroy(r.imported);
    saccade_mod_destroy(mod);
    free(q_offset);
    free(kv_offset);
    return status;
}
