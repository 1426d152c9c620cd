/* cuda_backward.h: gradients of queries, keys and values on a CUDA device.
 *
 *     bwd_prepare.cu   delta, lse in log2 units, bounds of K and V        every run
 *     bwd_sm90.cu      dK, dV and sums of dQ in fixed point, head dims to 128, aligned rows
 *     bwd_wide.cu      the same without sums, head dims from 128 to 256, and below where slopes
 *                      have no bound or rows see few keys: dK and dV, then dQ
 *     bwd_f32.cu       the same of f32, head dims to 128
 *     bwd_split.cu     before it: Q, K, V and dO in bf16 numbers
 *     bwd_finish.cu    dQ from its sums
 *     bwd_join.cu      dK and dV of KV heads whose query heads are cut into parts
 *     bwd_sinks.cu     gradients of sinks, where they are wanted
 *     bwd_sm80.cu      dK and dV, then dQ, each by CTAs that own them: every other problem
 *     bwd_captures.cu  gradients of what the score function captures
 *     bwd_elements.cu  those of dense captures that batches or heads share; on Hopper, where it
 *                      can, bwd_elements90.cu
 *     bwd_pages.cu     keys in chunks into one piece, and their gradients back
 *
 * No result depends on the order in which CTAs run, unless dQ is relaxed. A plan that wants
 * gradients compiles bwd_sm80.cu always, and bwd_sm90.cu if the GPU, the head dims and the
 * score function allow it: sums in fixed point need a bound of the score function's slope. */
#ifndef SACCADE_CUDA_BACKWARD_CUDA_BACKWARD_H
#define SACCADE_CUDA_BACKWARD_CUDA_BACKWARD_H

#include "cuda/emit/emit.h"
#include "cuda/run/run.h"
#include "cuda/kern/bwd.h"

#include <math.h>

struct run_args;

static inline int cu_backward_has_tiles(const cu_state *s)
{
    return s->programs[CU_BWD_TILES].form.tile.groups > 0;
}

/* Other kernels prepare and end what this program makes if there are tiles. */
static inline int cu_backward_has_dense(const cu_state *s)
{
    return cu_backward_has_tiles(s) && s->programs[CU_BWD_DENSE].form.tile.groups > 0;
}

static inline int cu_backward_has_wide(const cu_state *s)
{
    return s->programs[CU_BWD_WIDE].form.tile.groups > 0;
}

static inline int cu_backward_has_f32(const cu_state *s)
{
    return s->programs[CU_BWD_F32].form.tile.groups > 0;
}

/* Whether sums of dQ in fixed point, if the plan makes any, have a bound. */
static inline int cu_backward_is_bounded(const cu_state *s, const plan_problem *p)
{
    return p->is_relaxed || !(p->gradients & SACCADE_GRADIENT_Q)
           || s->backward_facts.slope_most < INFINITY || s->backward_facts.has_row_slope;
}

/* Whether dQ is summed in fixed point by programs of this form. */
static inline int cu_backward_is_fixed(const plan_problem *p, const cu_form *form)
{
    return form->family == CU_SM90 && !form->backward.value_stages
           && (p->gradients & SACCADE_GRADIENT_Q) && !p->is_relaxed;
}

/* Forms of CU_BWD_ELEMENTS90 and of CU_BWD_F32 among those of Hopper. */
static inline int cu_backward_is_elements90(const cu_form *form)
{
    return form->family == CU_SM90 && form->backward.blocks;
}

static inline int cu_backward_is_f32_wgmma(const cu_form *form)
{
    return form->family == CU_SM90 && form->backward.is_thirds;
}

/* Whether queries of a KV head may be cut into parts at all; not where gradients travel. */
static inline int cu_backward_may_cut(const plan_problem *p)
{
    const int has_keys = (p->gradients & (SACCADE_GRADIENT_K | SACCADE_GRADIENT_V)) != 0;
    return has_keys && !p->is_ragged && !p->has_rows;
}

/* Query heads of a group that may be cut into parts, 1: none. */
static inline int cu_backward_cut_heads(const plan_problem *p)
{
    return cu_backward_may_cut(p) ? p->group : 1;
}

/* Whether rows of queries may be cut into parts, where no mask makes them unlike; not where
 * what is summed beside dK and dV counts tiles. */
static inline int cu_backward_cuts_rows(const plan_problem *p)
{
    return cu_backward_may_cut(p) && !p->is_invariant && !cu_has_captures(p);
}

/* Whether a run may have more than one part. */
static inline int cu_backward_has_parts(const plan_problem *p)
{
    return cu_backward_cut_heads(p) > 1 || cu_backward_cuts_rows(p);
}

/* Whether a CTA of Hopper's tiles takes one after the other: not where the launch counts tiles
 * that are stored, nor with sequences, whose tiles may be empty, nor where dQ's warpgroup
 * makes terms of captures, and has no register left. */
static inline int cu_backward_takes_many(const cu_mod_text *facts, const plan_problem *p)
{
    return !p->is_ragged && !p->has_rows && facts->n_terms == 0;
}

/* ---- backward_choices.c: pure functions ---- */

/* The rung'th choice of bwd_sm90.cu for these head dims, best first; 0 past the end. */
int cu_backward_tile_choice(int D, int E, int rung, cu_form *out);
/* Whether tiles of the second form end sooner than those of the first, for so few tiles that
 * the last ones keep few of n_sm multiprocessors busy. A mask makes tiles unlike: then only
 * where all of them run at once. group: query heads that may be cut into parts; cuts_rows:
 * their rows too. */
int cu_backward_is_short(const cu_form *first, const cu_form *second,
                         const saccade_sizes *sizes, int n_sm, int group, int cuts_rows,
                         int has_mask);
/* Gives one of its choices as many stages as fit beside dense reads, form->dense_bytes for a
 * score; 0 where they are too few. */
int cu_backward_fit_dense(int D, int E, cu_form *form);
/* cu_backward_tile_choice for bwd_wide.cu. */
int cu_backward_wide_choice(int D, int E, int rung, cu_form *out);
/* cu_backward_tile_choice for bwd_f32.cu. */
int cu_backward_f32_choice(int D, int E, int rung, cu_form *out);
/* cu_backward_tile_choice for runs whose rows see few keys: CU_BWD_FEW. */
int cu_backward_few_choice(int D, int E, int rung, cu_form *out);
/* Whether CU_BWD_FEW takes less time than CU_BWD_TILES. blocks: live ones of 64 x 64 of all
 * lists; most: BWD_FEW_BLOCKS, or BWD_FEW_DENSE in the place of CU_BWD_DENSE. */
int cu_backward_sees_few(int64_t blocks, int64_t lists, int64_t Q, int most);
/* The form of bwd_sm80.cu. */
cu_form cu_backward_pass_choice(int D, int E);
/* cu_backward_pass_choice for f32. */
cu_form cu_backward_pass32_choice(int D, int E);
/* The form of bwd_captures.cu. */
cu_form cu_backward_captures_choice(int D, int E, int is_f32);
/* The form of bwd_elements.cu for so many bytes of shared memory; kept: bytes that it keeps of
 * each score. */
cu_form cu_backward_elements_choice(int D, int E, int is_f32, int kept, int most);
/* The form of bwd_elements90.cu; 0 where there is none. */
int cu_backward_elements90_choice(int D, int E, int kept, cu_form *out);

/* ---- backward_shared.c: pure functions ---- */

int cu_backward_threads(const cu_form *form);
/* Of bwd_wide_queries. */
int cu_backward_query_threads(const cu_form *form);
int cu_backward_query_shared(const cu_form *form, int D, int E);
int cu_backward_shared_bytes(const cu_form *form, int D, int E);

/* ---- backward_text.c ---- */

void cu_write_backward(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                       const cu_form *form, cu_headers *out);

/* Whether a run of these sizes takes CU_BWD_SHORT. */
static inline int cu_backward_takes_short(const saccade_plan *plan, const saccade_sizes *sizes,
                                          int has_mask)
{
    const cu_state *s = plan->state;
    const int group = cu_backward_cut_heads(&plan->problem);
    const cu_form *first = &s->programs[CU_BWD_TILES].form;
    const cu_form *second = &s->programs[CU_BWD_SHORT].form;
    return first->tile.groups > 0 && second->tile.groups > 0
           && cu_backward_is_short(first, second, sizes, s->device.n_sm, group,
                                   !has_mask && cu_backward_cuts_rows(&plan->problem),
                                   has_mask);
}

/* ---- backward_forms.c: columns of the table of programs ---- */

int cu_backward_tiles_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_short_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_dense_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_few_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_wide_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_f32_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_split_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_plain_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_prepare_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_finish_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_join_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_sinks_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_captures_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_elements_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_elements90_form(const cu_state *s, const plan_problem *p, int rung,
                                cu_form *out);
int cu_backward_pages_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
int cu_backward_shared(const cu_state *s, const plan_problem *p, const cu_form *form);
/* The score function's value and derivative as text; its graph lives in scratch. */
saccade_status cu_backward_emit(cu_state *s, const plan_problem *p, arena *scratch,
                                saccade_error *err);

/* ---- backward_masks.c ---- */

/* An imported mask's blocks are taken whole or in parts. */
int cu_backward_is_suited(const saccade_block_mask *mask, int rows, int keys);
/* Whether there is CU_BWD_DENSE, for this mask. */
int cu_backward_suits_dense(const cu_state *s, const saccade_block_mask *mask);
/* Makes what backward runs with this block mask need on a device. */
saccade_status cu_backward_make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                     int device, const saccade_sizes *sizes,
                                     saccade_error *err);
/* Whether a run with this block mask takes CU_BWD_FEW. most: as in cu_backward_sees_few. */
int cu_backward_takes_few(const saccade_plan *plan, const saccade_block_mask *mask, int device,
                          const saccade_sizes *sizes, int most);
/* The copy made before of the blocks of queries that tiles of so many keys meet, or NULL. */
const cu_runs *cu_backward_key_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                    int device, const saccade_sizes *sizes, int keys);
/* What of it a run reads; all stay NULL without a block mask. */
typedef struct cu_backward_runs {
    const cu_runs *tiles;   /* blocks of queries for each tile of keys */
    const cu_runs *queries; /* where queries stay: blocks of keys for each tile of queries */
    const cu_runs *wide_queries; /* queries, in tiles of bwd_wide.cu and bwd_f32.cu */
} cu_backward_runs;
saccade_status cu_backward_find_runs(const saccade_plan *plan, const plan_run *run,
                                     cu_program program, cu_backward_runs *out,
                                     saccade_error *err);

/* Of 64 queries, of a head. */
static inline int64_t cu_backward_query_blocks(const saccade_sizes *s)
{
    return (s->Q + BWD_ROWS - 1) / BWD_ROWS;
}

/* ---- capture_layout.c ---- */

/* Where the terms of a read go. */
typedef enum cu_capture_way {
    CU_SUMS_EXACT,  /* to sums whose order changes no bit, in the workspace */
    CU_SUMS_STORED, /* to the gradient: each score has an element of its own */
    CU_SUMS_TABLE,  /* to tables of queries, which are stored in the gradient */
    CU_SUMS_ROW     /* to the gradient, or f32 in the workspace, query by query in order */
} cu_capture_way;

/* Depends only on what the workspace was asked with, so that a run finds what its caller made
 * room for: on positions without offsets and on no number that a run brings. */
typedef struct cu_capture_layout {
    cu_reads_found reads;
    cu_capture_way way[CU_READS_MOST];
    int may_be_row[CU_READS_MOST]; /* STORED is ROW in runs whose indices leave the tensor */
    int parts[CU_READS_MOST];      /* of the batches and heads that share elements */
    size_t room_at[CU_READS_MOST]; /* reads of one capture share it */
    size_t bytes;
} cu_capture_layout;

enum { CU_OF_KEYS = DEP_KV | DEP_SCORE }; /* indices that are not a query's alone */

/* Whether the indices of a read that do not vary with any of `but` stay inside. */
int cu_read_is_inside(const plan_problem *p, const pass_read *read, int but,
                      const saccade_tensor *t, const saccade_sizes *s, const eval_env *env,
                      const plan_position *at);
/* Whether batches, or heads, have elements of a read each for itself. */
int cu_read_is_apart(const pass_read *read, const saccade_sizes *s, int var);
/* How many batches and heads have elements of a read apart from each other. */
int64_t cu_count_apart(const pass_read *read, const saccade_sizes *s);
/* Whether batches or heads that have no elements of their own may have others all the same, as
 * t[h / 2, q, kv] has. */
int cu_read_may_move(const pass_read *read, const saccade_sizes *s);
/* Whether aligned runs take CU_BWD_ELEMENTS90 for a read of shared elements, and its CTAs for
 * so many batches and heads with elements apart. */
int cu_elements_by_wgmma(const cu_state *s, const pass_read *read, const saccade_sizes *sizes);
int64_t cu_elements90_ctas(const cu_state *s, int64_t apart, const saccade_sizes *sizes);
/* Of keys, of a CTA of CU_BWD_ELEMENTS: fewer where those of all blocks are too few to go
 * round. rows: blocks of queries whose elements are apart. */
int cu_element_blocks(const cu_state *s, int64_t rows, int64_t keys);
/* What a run's host knows of a position: 0 where it lies on a device. */
int cu_knows_position(const saccade_tensor *t, int32_t *position);
/* captures: gradients, whose shapes and dtypes are looked at. positions: of the run, or NULL
 * for zeros. */
cu_capture_layout cu_lay_out_captures(const saccade_plan *plan, const saccade_sizes *s,
                                      const saccade_tensor *captures,
                                      const plan_positions *positions);
static inline int64_t cu_element_count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}
/* Of exact sums of a tensor. */
size_t cu_words_bytes(const saccade_tensor *t);
/* Bytes of a layout; 0 where gradients is NULL. */
size_t cu_captures_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                             const plan_gradients *gradients);

/* ---- capture_sums.c ---- */

typedef struct cu_capture_run {
    const saccade_plan *plan;
    const plan_run *run;
    const plan_gradients *g;
    const struct run_args *a;
    cu_bwd *p;
    cu_capture_layout at;
    cu_read of[CU_READS_MOST];
    cu_reads c; /* what kernels take: the first of these, then others */
    cu_tables tables;
    int is_added;
} cu_capture_run;

/* Before the first kernel. room_at: where in the run's workspace the sums lie; has_tiles:
 * whether backward's tiles run, which make some of the terms. */
saccade_status cu_begin_captures(const saccade_plan *plan, const plan_run *run,
                                 const plan_gradients *g, size_t room_at, int has_tiles,
                                 const struct run_args *a, cu_capture_run *x,
                                 saccade_error *err);
/* After the last one: the other terms, and what all of them come to. */
saccade_status cu_end_captures(cu_capture_run *x, cu_bwd *p, saccade_error *err);

/* ---- capture_tables.c ---- */

/* Bytes of shared memory of bwd_captures without tables, whole 16. */
int cu_captures_base(const saccade_plan *plan);
/* Words of shared memory that tables of queries take for a read, beside those taken; 0 where
 * they do not fit. */
int64_t cu_query_table_words(const saccade_plan *plan, const pass_read *read,
                             const saccade_tensor *t, int64_t taken);
/* Tables of the reads of a launch, x->c. */
void cu_choose_tables(cu_capture_run *x);

/* ---- backward_pages.c: keys in chunks ---- */

/* A run over keys in one piece that stands for one over chunks. Points into itself and to what
 * that run points to. */
typedef struct cu_paged {
    plan_run run;
    plan_gradients g;
    cu_pages x;
    cu_own own;
    saccade_tensor k, v, dk, dv, kv_len;
} cu_paged;

/* Bytes of runs of these sizes beside backward's other; 0 where keys lie in one piece. */
size_t cu_pages_workspace(const saccade_plan *plan, const saccade_sizes *sizes);
/* room: of so many bytes; p, run and g here and below: of the run over chunks. ELIMIT: more
 * entries or keys than launches count. */
saccade_status cu_pages_place(const saccade_plan *plan, const plan_run *run,
                              const plan_gradients *g, const cu_bwd *p, void *room,
                              cu_paged *out, saccade_error *err);
/* Before that run's kernels, and after them. */
saccade_status cu_pages_begin(const cu_paged *paged, const cu_loaded *program, cu_bwd *p,
                              const struct run_args *a, saccade_error *err);
saccade_status cu_pages_end(const cu_paged *paged, const plan_run *run, const plan_gradients *g,
                            const cu_loaded *program, cu_bwd *p, const struct run_args *a,
                            saccade_error *err);

/* ---- backward_space.c ---- */

/* Offsets of the parts of cu_bwd. */
typedef struct cu_backward_space {
    size_t precision, bounds, tiles_taken, dq_sum, dq_steps, parts[2], bytes;
    size_t thirds[4];         /* of Q, K, V and dO: cu_thirds */
    size_t lse2, minus_delta; /* of the workspace, or of dQ: */
    int is_in_result;
} cu_backward_space;

/* gradients: those of a run, or NULL: enough for any. */
cu_backward_space cu_backward_space_of(const saccade_plan *plan, const saccade_sizes *s,
                                       const plan_gradients *gradients);
/* Blocks of a head where ragged sequences are packed; 0: by batch they are fewer. */
int64_t cu_backward_packed_blocks(const saccade_plan *plan, const saccade_sizes *s,
                                  const plan_gradients *gradients);
/* Shape of a tensor of cu_thirds. */
void cu_backward_thirds_shape(const saccade_plan *plan, const saccade_sizes *s, int which,
                              int64_t (*shape)[4]);
/* Into how many parts a run of these sizes cuts the queries of a KV head at most. */
int cu_backward_parts_most(const saccade_plan *plan, const saccade_sizes *s);
size_t cu_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                             const plan_gradients *gradients);
/* But for what keys in chunks take. */
size_t cu_backward_whole_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                                   const plan_gradients *gradients);

/* ---- backward_args.c ---- */

/* What does not depend on the program. */
void cu_backward_fill(const saccade_plan *plan, const plan_run *run, const plan_gradients *g,
                      cu_bwd *p);
/* Whether a program is bwd_sm90.cu's. */
int cu_backward_makes_sums(cu_program program);
/* Where lse and delta of the rows lie, for this program. */
void cu_backward_fill_rows(const saccade_plan *plan, const plan_run *run,
                           const plan_gradients *g, cu_program program, cu_bwd *p);
/* Tiles of so many keys, and the runs of query blocks of each; runs NULL: no block mask. */
void cu_backward_fill_tiles(const plan_problem *problem, const cu_runs *runs, int keys,
                            cu_fwd *p);
/* Tiles of queries, and the runs of key blocks of each; runs NULL: no block mask. */
void cu_backward_fill_queries(const plan_problem *problem, const cu_runs *runs, cu_bwd *p);

/* ---- backward_launch.c ---- */

saccade_status cu_backward(const saccade_plan *plan, const plan_run *run,
                           const plan_gradients *gradients, saccade_error *err);

#endif
