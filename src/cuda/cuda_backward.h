/* cuda_backward.h: gradients of queries, keys and values on a CUDA device.
 *
 *     bwd_prepare.cu   delta, lse in log2 units, bounds of K and V        every run
 *     bwd_sm90.cu      dK, dV and sums of dQ in fixed point, head dims to 128, aligned rows
 *     bwd_finish.cu    dQ from its sums
 *     bwd_sm80.cu      dK and dV, then dQ, each by CTAs that own them: every other problem
 *
 * No result depends on the order in which CTAs run, unless dQ is relaxed. A plan compiles the
 * second way always, and the first if the GPU, the head dims and the score function allow it:
 * sums in fixed point need a bound of the score function's slope. */
#ifndef SACCADE_CUDA_CUDA_BACKWARD_H
#define SACCADE_CUDA_CUDA_BACKWARD_H

#include "cuda/cuda.h"
#include "cuda/kern/bwd.h"

/* Tuning of bwd_sm90.cu: may change speed, nothing else. */
typedef struct cu_backward_tile {
    int groups; /* consumer warpgroups of 64 keys */
    int stages; /* blocks of queries in flight */
    int is_split; /* loads and sums into global memory by warps of their own */
    int registers[3]; /* a thread of the consumers, of dQ's group, of the warps just named */
} cu_backward_tile;

/* Tuning of bwd_sm80.cu. */
typedef struct cu_backward_pass {
    int rows;   /* of a block that passes by */
    int parts;  /* warps that share 16 rows, each with a part of the columns */
    int stages;
} cu_backward_pass;

typedef enum cu_backward_program {
    CU_BWD_PREPARE, /* kernel bwd_prepare, other bwd_bounds */
    CU_BWD_FINISH,
    CU_BWD_TILES, /* bwd_sm90 */
    CU_BWD_PLAIN, /* bwd_keys, other bwd_queries */
    CU_BWD_PROGRAMS
} cu_backward_program;

/* What a plan holds for backward. */
typedef struct cu_backward {
    int is_relaxed; /* sums of dQ as floats, in the order in which CTAs come */
    cu_backward_tile tile; /* groups 0: no CU_BWD_TILES */
    cu_backward_pass pass;
    cu_mod_text facts;
    char *mod_text;
    cu_loaded programs[CU_BWD_PROGRAMS];
    _Atomic uint64_t ready; /* bit per device: attributes set */
} cu_backward;

/* A run: what forward took and left (out and lse), and where gradients go; NULL: not wanted. */
typedef struct cu_backward_run {
    const plan_run *forward;
    const saccade_tensor *d_out, *d_lse; /* d_lse may be NULL */
    const saccade_tensor *dq, *dk, *dv;  /* in the problem's dtype */
    void *workspace;
} cu_backward_run;

/* Whether dQ is summed in fixed point, by tiles. */
static inline int cu_backward_is_fixed(const cu_backward *b)
{
    return b->tile.groups > 0 && !b->is_relaxed;
}

/* ---- backward_text.c: pure functions ---- */

/* The rung'th choice for these head dims, best first; 0 past the end. */
int cu_backward_tile_choice(int D, int E, int rung, cu_backward_tile *out);
cu_backward_pass cu_backward_pass_choice(int D, int E);
int cu_backward_tile_threads(const cu_backward_tile *tile);
int cu_backward_tile_shared(const cu_backward_tile *tile, int D, int E);
int cu_backward_pass_threads(const cu_backward_pass *pass);
int cu_backward_pass_shared(const cu_backward_pass *pass, int D, int E);
/* cfg.cuh and wgmma.cuh of an instance. */
void cu_backward_config(const cu_backward *b, const plan_problem *problem, int is_sm90,
                        strbuf *out);
void cu_backward_products(int D, int E, int is_f16, strbuf *out);

/* ---- backward_programs.c ---- */

/* For the plan's own problem and architecture; destroy after a failure too. */
saccade_status cu_backward_create(const saccade_plan *plan, int is_relaxed, arena *scratch,
                                  cu_backward *out, saccade_error *err);
void cu_backward_destroy(cu_backward *b);

/* ---- backward_launch.c ---- */

size_t cu_backward_workspace(const saccade_plan *plan, const cu_backward *b,
                             const saccade_sizes *sizes);
/* Makes what runs with this block mask need on the current device. */
saccade_status cu_backward_prepare(const saccade_plan *plan, const cu_backward *b,
                                   const saccade_block_mask *mask, saccade_error *err);
saccade_status cu_backward_start(const saccade_plan *plan, cu_backward *b,
                                 const cu_backward_run *run, saccade_error *err);

#endif
