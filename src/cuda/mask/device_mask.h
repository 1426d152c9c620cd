/* device_mask.h: block masks on devices, and plans with some rows of a sequence. */
#ifndef SACCADE_CUDA_MASK_DEVICE_MASK_H
#define SACCADE_CUDA_MASK_DEVICE_MASK_H

#include "cuda/kern/launch.h"
#include "cuda/program/program.h"
#include "plan/plan.h"

/* ---- mask_upload.c: block masks on devices ---- */

/* Tiles by when they run, where keys come from elsewhere (plan_rows): so many come before
 * others, which are those of rows that need no such keys, or those of such keys themselves; 0:
 * there are not both kinds. Those behind the needed ones are of keys that no row reads. */
typedef struct cu_turns {
    int first, needed;
} cu_turns;

typedef struct cu_runs {
    cu_ptr memory; /* one allocation: runs, run_start, order */
    cu_ptr runs, run_start, order;
    int keys, mask_b, mask_h, n_qblk, n_tiles; /* keys: of a block */
    cu_turns turns;   /* of n_tiles */
    int64_t n_blocks; /* of all lists; 0 where lists may change */
    int step_heads;   /* query heads that a step of mask_h passes */
    int head_parts;   /* of a group's query heads; order then has as many times the tiles */
    /* Lists by batch, head and row, 1 where all have the same, and blocks that their runs
     * count; bits: room for a selection's, of masks that are selected. */
    int list_batches, list_heads, list_columns;
    cu_ptr bits;
} cu_runs;

/* In place of a group, which is at least 1: RUNS_OF_KEYS, transposed runs, of blocks of rows
 * for each block of keys; minus the sum of what their order may do: RUNS_BY_ROWS, walk tiles by
 * rows (kern/bwd.h); RUNS_IN_PARTS, cut the query heads of a group into parts. */
enum { RUNS_OF_KEYS = 0, RUNS_BY_ROWS = 1, RUNS_IN_PARTS = 2 };

/* Device copy for these tiles, made on first use (may allocate; prepare does it). order covers
 * B x H of the sizes given, transposed B x Hkv. group: so many heads share a row, whose blocks
 * are live where one head's are (mask_h then steps by groups), or RUNS_*. A plan with rows of
 * its own has copies of its own, of those rows. */
saccade_status cu_runs_make(const cu_driver *driver, int device, const saccade_block_mask *mask,
                            int rows, int keys, int group, const saccade_sizes *sizes,
                            const saccade_plan *plan, saccade_error *err);
/* Memory in the current context that begins with a copy of the host's; 0 where this fails. */
saccade_status cu_alloc_filled(const cu_driver *driver, size_t bytes, const void *host,
                               size_t filled, cu_ptr *out, saccade_error *err);
/* Where rows of blocks of a run's head 0 begin: block masks are of all heads. */
cu_ptr cu_runs_start(const cu_runs *runs, const plan_problem *problem);
/* EINVAL where a plan's heads do not begin with a group of the mask's. */
saccade_status cu_runs_check(const plan_problem *problem, const saccade_block_mask *mask,
                             saccade_error *err);
/* The copies on a device of a mask that is selected, for select_launch.c: fills at most `most`
 * from number `first` on and returns how many there are. */
typedef struct cu_copy {
    const cu_runs *runs;
    int rows, keys, is_transposed;
} cu_copy;
int cu_runs_copies(int device, const saccade_block_mask *mask, int first, int most,
                   cu_copy *out);
/* The copy made before, or NULL. */
const cu_runs *cu_runs_find(int device, const saccade_block_mask *mask, int rows, int keys,
                            int group, const saccade_sizes *sizes, const saccade_plan *plan);

/* ---- tile_order.c ---- */

typedef struct cu_order {
    int keys;       /* of a block of the runs */
    int group;      /* where rows are of keys: query heads of a KV head, or of a part; else 0 */
    int is_by_rows; /* tiles of keys are walked by rows */
    int at_once;    /* tiles that run at a time */
    const plan_rows *rows; /* NULL: all */
    size_t l2_bytes;
} cu_order;

/* The first row of blocks of head bh of B x heads; the runs may have fewer heads, or more. */
static inline int64_t cu_first_row(const mask_runs *r, int64_t heads, int64_t bh)
{
    const int64_t b = r->B == 1 ? 0 : bh / heads, h = bh % heads * r->H / heads;
    return (b * r->H + h) * r->rows;
}

/* The work order of tiles of these runs: tiles [B x H x r->rows] of the sizes given. With rows
 * whose keys partly come from elsewhere, turns->first tiles that need none of those come first.
 */
saccade_status cu_order_tiles(const mask_runs *r, const saccade_sizes *s, const cu_order *of,
                              int32_t *order, cu_turns *turns, saccade_error *err);
/* Blocks that are live, of all lists. */
int64_t cu_count_blocks(const mask_runs *r);
/* Whether tiles of keys see a quarter of all queries in the mean. Those of a narrow window are
 * never at the same block: by rows each would keep blocks of all heads in L2. */
int cu_sees_much(const mask_runs *r);

/* ---- row_pieces.c, mask_pieces.c: what small tiles walk, and limits of rows ---- */

enum { PIECE_UNIT = 16 /* pieces begin at multiples of so many keys */ };

/* The pieces of `keys` keys, a multiple of the runs' block_kv, that cover the live blocks of a
 * row of blocks and do not overlap, as cu_work has them. Returns their number; to may be
 * NULL. */
int cu_cut_row(const mask_runs *r, int64_t row, int keys, int *to);

/* On a device: cu_work of every CTA and the pieces it points into. */
typedef struct cu_pieces {
    cu_ptr memory, work, pieces;
    int n_first; /* of the work: tiles before plan_run.between */
    int64_t keys; /* that a tile walks in the mean */
} cu_pieces;

/* Makes both for a plan where they serve it: pieces of so many keys, and limits of rows
 * where the mask is evaluated and they are known. May allocate; prepare does it. */
saccade_status cu_pieces_make(const cu_driver *driver, int device,
                              const saccade_block_mask *mask, int keys,
                              const saccade_sizes *sizes, const saccade_plan *plan,
                              saccade_error *err);
saccade_status cu_limits_make(const cu_driver *driver, int device,
                              const saccade_block_mask *mask, const saccade_plan *plan,
                              saccade_error *err);
/* What was made before; NULL, or no limits, where nothing was. Both count heads from the mask's
 * first on: they do not serve a plan of later heads where the mask has several. */
const cu_pieces *cu_pieces_find(int device, const saccade_block_mask *mask, int keys,
                                const saccade_sizes *sizes, const saccade_plan *plan);
cu_limits cu_limits_find(int device, const saccade_block_mask *mask, const saccade_plan *plan);

/* ---- query_parts.c ---- */

/* Tiles of keys by how many blocks of queries each meets in one head, longest first; blocks
 * NULL: `each`, of which the last n_short take a share of the time. */
typedef struct cu_tile_lengths {
    const int64_t *blocks;
    int64_t n, each, n_short;
    double share;
} cu_tile_lengths;

/* Those of so many heads without a mask, of groups of ROW_BLOCK keys; passes: groups without a
 * live key pass a tile's steps. */
cu_tile_lengths cu_equal_tiles(int64_t heads, int64_t KV, int groups, int passes, int64_t each);

/* Into how many parts the query heads of a group are best cut, a divisor of group, and the time
 * that the tiles take then on n_sm multiprocessors, in blocks. */
int cu_head_parts(int n_sm, int group, const cu_tile_lengths *tiles, double *time);
/* The most that it says for so many tiles of whatever lengths. */
int cu_head_parts_most(int n_sm, int group, int64_t tiles);

/* Parts of the queries of a KV head: of its group's heads, and of the rows of each. */
typedef struct cu_cut {
    int heads, rows;
} cu_cut;

/* cu_head_parts where rows may be cut as well, cuts_rows: of equal tiles whose parts all run at
 * once, and then every head is a part. */
cu_cut cu_query_parts(int n_sm, int group, int cuts_rows, const cu_tile_lengths *tiles,
                      double *time);

/* The most parts of rows for so many tiles of a head each, of so many blocks of queries. */
int cu_row_parts_most(int n_sm, int64_t tiles, int64_t blocks);
/* No fewer keys than those of all parts of a run that has at most so many KV heads, keys to
 * each and blocks of queries, in tiles of at most tile_keys. */
int64_t cu_part_rows_most(int n_sm, int group, int cuts_rows, int64_t heads, int64_t keys,
                          int64_t blocks, int tile_keys);

/* cu_head_parts of transposed runs; is_known 0: as if they were of all blocks. */
saccade_status cu_find_head_parts(const mask_runs *r, const saccade_sizes *s, int n_sm,
                                  int is_known, int *parts, saccade_error *err);

/* ---- head_groups.c ---- */

/* Runs of r->H / group heads; free with cu_grouped_free, after a failure too. */
typedef struct cu_grouped {
    mask_runs r;
    void *rows;
    saccade_run *runs;
} cu_grouped;
saccade_status cu_group_heads(const mask_runs *r, int64_t group, cu_grouped *out,
                              saccade_error *err);
void cu_grouped_free(cu_grouped *g);

/* ---- row_parts.c: plans with some rows of a sequence ---- */

/* Whose rows alone a mask's copy is of: a plan's number, or 0 for all rows. */
uint64_t cu_rows_owner(const saccade_plan *plan);
/* Rows that are here. */
int64_t cu_row_count(const plan_rows *rows);
/* With Q the rows that are here; without plan->rows the same. */
saccade_sizes cu_local_sizes(const saccade_plan *plan, const saccade_sizes *sizes);
/* With Q those of the whole sequence, of which a run has some. */
saccade_sizes cu_whole_sizes(const saccade_plan *plan, const saccade_sizes *sizes);
saccade_status cu_local_run(const saccade_plan *plan, const plan_run *run, plan_run *out,
                            saccade_error *err);
/* Makes the table of where rows stand; allocates. */
saccade_status cu_place_rows(const saccade_plan *plan, const cu_driver *driver, int device,
                             saccade_error *err);
void cu_free_rows(cu_state *s);
/* Runs of the rows that are here; free with cu_selected_free, after a failure too. unit: rows
 * of a block, which divides where parts begin. */
typedef struct cu_selected {
    mask_runs r;
    int64_t *begin, *live;
    saccade_run *runs;
} cu_selected;
saccade_status cu_select_rows(const mask_runs *r, const plan_rows *rows, int unit,
                              int is_transposed, cu_selected *out, saccade_error *err);
void cu_selected_free(cu_selected *s);

#endif
