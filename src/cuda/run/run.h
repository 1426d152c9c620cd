/* run.h: a run in the making, what the files that prepare and launch it share. */
#ifndef SACCADE_CUDA_RUN_RUN_H
#define SACCADE_CUDA_RUN_RUN_H

#include "cuda/mask/device_mask.h"
#include "cuda/program/program.h"

enum {
    RUN_COUNTER_BYTES = 256, /* head of the workspace: the tile counter */
    RUN_MAX_CAPTURES = 2 * MOD_MAX_CAPTURES
};

/* what a kernel is launched with */
typedef struct run_args {
    cu_program program;
    cu_family family; /* of its form */
    cu_fwd p;
    cu_capture captures[RUN_MAX_CAPTURES];
    cu_map maps[3], dense[CU_DENSE_MOST];
    const cu_driver *driver;
    void *stream;
    int n_first;      /* of cu_turns */
    int starts_early; /* see run_start_first */
} run_args;

/* ---- run_space.c ---- */

/* What a mod takes of shared memory for each group, bytes: columns of masks, shared values. */
int cu_group_bytes(const cu_form *form, const cu_mod_text *facts);
int cu_shared_bytes(const cu_form *form, const cu_mod_text *facts, const plan_problem *problem);
/* Of decode, where so many spans are counted in shared memory. */
int run_decode_shared(const cu_form *form, const cu_mod_text *facts,
                      const plan_problem *problem, int64_t spans);
size_t cu_workspace(const saccade_plan *plan, const saccade_sizes *sizes);

/* parts of decode's workspace */
typedef struct run_decode_sizes {
    size_t counts, part_o, part_ml, bytes; /* offsets */
} run_decode_sizes;

/* The tiles that a run's arguments are counted in: the program's, or CU_MAIN's for decode. */
const cu_form *run_tiles_form(const cu_state *s, cu_program program);
int run_rows(const cu_form *f);
int64_t run_tiles(const cu_form *f, const saccade_sizes *sizes);
/* groups of 16 rows, each with its flag */
int64_t run_groups(const cu_form *f, const saccade_sizes *sizes);
/* Whether a program of decode takes runs of these sizes; whether any does. */
int run_takes_decode(const cu_state *s, cu_program program, const saccade_sizes *sizes);
int run_is_decode(const cu_state *s, const saccade_sizes *sizes);
/* These sizes with as many rows as decode takes; Q 0 where it takes none. */
saccade_sizes run_short_sizes(const cu_state *s, const saccade_sizes *sizes);
/* What tiles of this form take, whole blocks of 256 bytes. */
size_t run_tiles_space(const cu_form *f, const saccade_sizes *sizes, int is_ragged);
/* Parts of a run's keys; whether its rows are few. */
int64_t run_parts(const cu_state *s, const saccade_sizes *sizes);
int run_is_in_parts(const cu_state *s, const saccade_sizes *sizes);
/* For spans of so many packed rows. */
run_decode_sizes run_decode_space(const cu_state *s, int span_rows, const saccade_sizes *sizes,
                                  int E);

/* What the programs of a run take; keys in one piece lie behind it. */
size_t run_programs_space(const saccade_plan *plan, const saccade_sizes *sizes);

/* ---- one_piece.c: keys of small pages, for forward's first pass ---- */

enum { CU_COLLECT_BYTES = 256 << 20 }; /* of keys in one piece, at most */
/* Whether forward's keys may be brought into one piece first. */
int cu_collects(const plan_problem *p, const cu_tile *tile);

/* Whether the run's keys are worth the copy and fit the room for it. */
int run_collects(const saccade_plan *plan, const plan_run *run);
/* Bytes of that room, for any run of at most these sizes. */
size_t run_keys_space(const saccade_plan *plan, const saccade_sizes *sizes);
/* [B][Hkv][KV][dim] on the device of K */
saccade_tensor run_in_one_piece(const plan_run *run, void *data, saccade_dtype dtype,
                                int64_t dim);
/* Starts the copy and gives `a` the keys in one piece. */
saccade_status run_collect_keys(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err);

/* ---- dense.c: tensors that scores read at their own query and key ---- */

/* Whether tensor copies take all those of the run that a program, CU_DENSE or CU_BWD_DENSE,
 * wants as tiles. */
int run_takes_dense(const saccade_plan *plan, const plan_run *run, cu_program program);
/* Their maps, and which of them are turned: a bit of each (dense.cuh). */
saccade_status run_map_dense(const saccade_plan *plan, const plan_run *run, cu_program program,
                             run_args *a, int *turned, saccade_error *err);

/* ---- choose_kernel.c ---- */

/* Whether decode by wide spans is to take runs of these sizes. */
int run_wants_wide(const cu_state *s, const saccade_sizes *sizes);
/* Copies on a device of a block mask's runs, for every forward program that sizes like these
 * may take. */
saccade_status run_make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                             const cu_driver *driver, int device, const saccade_sizes *sizes,
                             saccade_error *err);

/* The program that a run takes. */
saccade_status run_choose_program(const saccade_plan *plan, const plan_run *run,
                                  cu_program *out, saccade_error *err);
/* The block mask's runs in that program's blocks; NULL without a block mask. */
saccade_status run_find_runs(const saccade_plan *plan, const plan_run *run, cu_program program,
                             const cu_runs **out, saccade_error *err);

/* ---- run_args.c ---- */

/* The stride of a dimension, 0 where it makes no difference. */
int64_t run_stride(const saccade_tensor *t, int d);
cu_stride run_strides(const saccade_tensor *t);
/* The logarithm of a size that is a power of two, or -1. */
int run_shift(int64_t size);
/* Whether rows of t lie on 16 bytes, which tensor copies and 16-byte stores need. */
int run_has_aligned_rows(const saccade_tensor *t);
/* Whether tensor copies, 16-byte loads and 16-byte stores do for this run. */
int run_is_aligned(const plan_run *run);
/* L2 fetches: 128 bytes suit blocks that many CTAs read (256 are slower where rows begin
 * anywhere, docs/lab/128); decode reads all once, and there plain lines gave 4310 GB/s, 256
 * bytes 4050 (B16 64/8 KV32768 D128, H200). */
enum { PROMOTE_NONE = 0, PROMOTE_128 = 2 };
/* Map over (d, n, h, b) in boxes of 64 columns x rows, 128-byte swizzle. */
saccade_status run_encode_map(const cu_driver *driver, const saccade_tensor *t, int rows,
                              int promotion, cu_map *out, saccade_error *err);
/* Keys of one tensor copy for blocks of a tile: whole blocks, or what divides chunks too. Sets
 * how the kernel copies keys. */
int run_place_box(const plan_run *run, int is_decode, const cu_tile *tile, cu_chunks *chunks);
saccade_status run_captures(const mod_fn *fn, const saccade_tensor *tensors, cu_capture *out,
                            saccade_error *err);
void run_fill(const saccade_plan *plan, const plan_run *run, const cu_form *form,
              const cu_runs *runs, cu_fwd *p);
/* The part of it that is of a block mask; runs NULL: none. */
void run_fill_runs(const plan_problem *problem, const cu_runs *runs, cu_fwd *p);

/* ---- run_start.c ---- */

/* CUlaunchAttributeID: CTAs of a cluster; whether the kernel may be placed while the one before
 * still runs (it waits for it by itself) */
enum { WITH_NOTHING = 0, WITH_CLUSTER = 4, WITH_OVERLAP = 6 };

saccade_status run_start(const run_args *a, void *kernel, int64_t grid, int threads, int shared,
                         void **parameters, saccade_error *err);
saccade_status run_start_with(const run_args *a, void *kernel, const unsigned grid[2],
                              int threads, int shared, int attribute, int value,
                              void **parameters, saccade_error *err);
/* The first kernel of a run, in clusters of so many CTAs. With a->starts_early it may be placed
 * while the caller's kernel before it still runs, and waits for that one itself: it hides the
 * time that a launch takes. */
saccade_status run_start_first(const run_args *a, void *kernel, unsigned grid, int threads,
                               int shared, int cluster, void **parameters, saccade_error *err);

/* ---- launch.c: what every run does first ---- */

saccade_status cu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err);

/* Shared memory above 48 KB is asked for once per device. */
saccade_status run_make_ready(cu_state *s, const plan_problem *problem, const cu_driver *driver,
                              int device, saccade_error *err);
/* Programs of interval masks hold their limits alone, which far positions do not have. */
saccade_status run_check_positions(const cu_state *s, const plan_run *run, saccade_error *err);

/* ---- launch_tiles.c, launch_small.c, launch_parts.c, launch_decode.c: a run's kernels ---- */

/* A kernel after another one of the run: on sm_90a it may be placed while that one still runs,
 * and waits for it by itself. */
saccade_status run_start_next(const run_args *a, void *kernel, int64_t grid, int threads,
                              int shared, void **parameters, saccade_error *err);
saccade_status run_launch_tiles(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err);
saccade_status run_launch_small(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err);
saccade_status run_launch_parts(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err);
saccade_status run_launch_decode(const saccade_plan *plan, const plan_run *run, run_args *a,
                                 saccade_error *err);
/* Sequences of a ragged run that are short enough for decode, where tiles take the others. */
saccade_status run_launch_short(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err);

#endif
