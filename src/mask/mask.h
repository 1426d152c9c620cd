/* mask.h: block masks inside the library. Position space: rows and keys are counted from 0
 * here; the mod sees row + q_offset[b], key + kv_offset[b]. */
#ifndef SACCADE_MASK_H
#define SACCADE_MASK_H

#include "eval/eval.h"
#include "mod/mod.h"
#include "pass/pass.h"

/* Runs for one pair of block sizes. A block is FULL when every in-range position of it is live
 * (ragged tails included). Immutable once made. */
typedef struct mask_runs {
    int32_t block_q, block_kv;
    int64_t B, H;             /* 1 where the mask does not depend on it */
    int64_t rows, columns;    /* blocks of queries and of keys (exchanged when transposed) */
    const int64_t *row_begin; /* [B*H*rows + 1]: index of the first run of each block row */
    const saccade_run *runs;
    const int64_t *row_live; /* [B*H*rows]: live blocks of each block row */
    saccade_block_mask_stats stats;
} mask_runs;

/* Runs for these block sizes, made on first use and kept in the mask (this is the step that may
 * allocate; saccade_plan_prepare calls it). Thread-safe. */
saccade_status mask_runs_for(const saccade_block_mask *mask, int32_t block_q, int32_t block_kv,
                             int transposed, const mask_runs **out, saccade_error *err);
/* Those of mask_runs_for that are made, or NULL; for use inside runs. */
const mask_runs *mask_runs_ready(const saccade_block_mask *mask, int32_t block_q,
                                 int32_t block_kv, int transposed);
/* mask_runs_ready, or EINVAL where they are not made. */
saccade_status mask_runs_prepared(const saccade_block_mask *mask, int32_t block_q,
                                  int32_t block_kv, int transposed, const mask_runs **out,
                                  saccade_error *err);

/* Where the live keys of every row are one interval, first and past of each in *out, [runs->B]
 * [runs->H][Q][2], which the caller frees; else NULL, as without memory. runs: not transposed.
 * Gives up after `most` evaluated positions. */
saccade_status mask_row_limits(const saccade_block_mask *mask, const mask_runs *runs,
                               int64_t most, int32_t **out, saccade_error *err);

/* What a proof knew beside the lengths, which a run must have too: of index variables DEP_B and
 * DEP_H, of sizes 1 << mod_size. */
typedef struct mask_reads {
    uint8_t deps, sizes;
} mask_reads;

/* What kernels need for PARTIAL blocks: the mod (NULL: all live inside listed blocks), resolved
 * captures, sizes and positions the mask was made for. Borrowed from the mask. */
typedef struct mask_view {
    const saccade_mod *mod;
    uint64_t number; /* of what the mask says: no other mask's, and a new one by an update */
    eval_env env;
    saccade_sizes sizes;
    const int32_t *q_offset, *kv_offset;     /* [B of sizes] or NULL: 0 */
    int imported_block_q, imported_block_kv; /* block sizes of an imported mask, else 0 */
    mask_reads reads;                        /* none where all blocks were imported */
    /* Of a mask whose blocks are selected while running, which counts as imported: its lists
     * (1 where all have the same) and the most entries of one; most 0: none. */
    struct mask_selection {
        int64_t B, Hkv;
        int most;
    } selection;
} mask_view;
const mask_view *mask_get_view(const saccade_block_mask *mask);

/* Runs imported as index tensors are the truth themselves; all others are proven from the mod
 * and say nothing that it does not. mask may be NULL: no. */
static inline int mask_is_imported(const saccade_block_mask *mask)
{
    return mask && mask_get_view(mask)->imported_block_q != 0;
}

/* Whether the mask was made from fn as it was bound, not simplified. `number` stands for fn's
 * owner, a plan: not 0, and no other's in this process. Thread-safe; allocates nothing. */
int mask_is_of(const saccade_block_mask *mask, const mod_fn *fn, uint64_t number);

/* EINVAL where the proof knew other sizes than a run has, of those that it read, or one batch
 * or head where the run has several and they differ. */
saccade_status mask_check_run(const saccade_block_mask *mask,
                              const int32_t size[MOD_SIZE_COUNT], saccade_error *err);

/* Tensors of fn, the mask's mod or what became of it, for a run: EINVAL where one is not what
 * the mask was proven from, a scalar by its value, a tensor by its address, shape, strides and
 * dtype. A tensor on another device than the proof's cannot be compared and passes. */
saccade_status mask_check_captures(const saccade_block_mask *mask, const mod_fn *fn,
                                   const saccade_tensor *tensors, saccade_error *err);

/* The lists of a selected mask from a tensor on the host; copies on devices are dropped. */
saccade_status mask_select(saccade_block_mask *mask, const saccade_tensor *blocks,
                           saccade_error *err);

/* EINVAL where a length that masks and mods read is not 1 to 2^30. */
saccade_status mask_check_sizes(const saccade_sizes *sizes, saccade_error *err);

/* A slot for one back end's device copy, freed by its own function with the mask. */
typedef struct mask_device_copy {
    void *data;
    void (*destroy)(void *data);
} mask_device_copy;
mask_device_copy *mask_device_slot(const saccade_block_mask *mask, const void *key);

#endif
