/* mask_build.h: from a mask function to runs, and the parts of a block mask's inside that its
 * source files share. */
#ifndef SACCADE_MASK_BUILD_H
#define SACCADE_MASK_BUILD_H

#include "eval/eval_ops.h"
#include "mask/mask.h"

#include <pthread.h>
#include <stdatomic.h>

/* Who is told how far a build is; an answer that is not 0 ends it. */
typedef struct mask_progress {
    saccade_progress call; /* NULL: nobody */
    void *user;
} mask_progress;

/* ---- run_build.c: runs by proof ---- */

/* Everything that decides the runs of a mask; borrowed. */
typedef struct mask_source {
    const pass_prover *prover;
    const eval_prog *prog;
    eval_env env;
    int64_t B, H; /* stored: 1 where the mask does not depend on it */
    int64_t Q, KV;
    const int32_t *q_offset, *kv_offset; /* [B of sizes] or NULL: 0 */
    int64_t budget;                      /* positions that may be evaluated per call; -1: any */
    int threads;
    mask_progress progress;
} mask_source;

/* ELIMIT where there are more rows or columns of blocks, of all heads, than memory is for. */
saccade_status build_check_rows(const mask_runs *shape, saccade_error *err);
saccade_status build_runs(const mask_source *source, int32_t block_q, int32_t block_kv,
                          mask_runs **out, saccade_error *err);

/* ---- run_resolve.c: one block that ranges leave open ---- */

enum { SEEN_LIVE = 1, SEEN_DEAD = 2, SEEN_BOTH = 3, SEEN_UNKNOWN = 4 };

/* What one thread works with. */
typedef struct mask_worker {
    const mask_source *source;
    void *scratch; /* of the prover */
    void *eval_memory;
    eval_state *eval; /* NULL: not begun for this head */
    int32_t b, h;
    int64_t budget_left; /* -1: any */
    int64_t positions;   /* evaluated so far */
    int has_evaluated;   /* since last cleared */
    int cuts_left;
    struct mask_watch *watch; /* NULL: nobody watches */
    _Atomic int64_t settled;  /* blocks */
    unsigned ticks;
} mask_worker;

saccade_status worker_open(const mask_source *source, mask_worker *worker, saccade_error *err);
void worker_close(mask_worker *worker);
void worker_head(mask_worker *worker, int32_t b, int32_t h);
/* What lies in a box (positions as the mod sees them) that a proof left open. */
int resolve_box(mask_worker *worker, const pass_box *box);

/* ---- run_progress.c: how far a build is ---- */

typedef struct mask_watch {
    mask_progress to;
    double blocks; /* of the whole build */
    mask_worker *workers;
    int n_workers; /* the first is the calling thread's, which tells */
    int64_t next_ns;
    _Atomic int is_stopped;
} mask_watch;

void watch_open(mask_watch *watch, mask_progress to, double blocks, mask_worker *workers,
                int n);
/* from time to time; and after so many blocks. */
void watch_tick(mask_worker *worker);
void watch_settled(mask_worker *worker, int64_t blocks);
/* are the rest's results no longer wanted? */
int watch_is_stopped(const mask_worker *worker);
/* tells that all is done; ESTOPPED if it is not. */
saccade_status watch_close(mask_watch *watch, saccade_error *err);

/* ---- run_lists.c: runs of many rows at a time ---- */

/* Rows of runs under construction; runs of one row are appended from left to right. */
typedef struct run_entry {
    int64_t row;
    saccade_run run;
} run_entry;
typedef struct run_lists {
    run_entry *entries;
    int64_t *last; /* [rows] index of the row's last entry, -1: none */
    int64_t rows, n, capacity;
    int failed;
} run_lists;

saccade_status lists_open(run_lists *lists, int64_t rows, saccade_error *err);
void lists_close(run_lists *lists);
void lists_add(run_lists *lists, int64_t row, int64_t first, int64_t count, int full);

/* Makes runs of n lists that follow each other row by row; sums are filled but for how blocks
 * were found. */
saccade_status lists_join(const run_lists *lists, int64_t n, const mask_runs *shape,
                          mask_runs **out, saccade_error *err);
void runs_destroy(mask_runs *runs);

/* Runs of query blocks per key block. */
saccade_status runs_transpose(const mask_runs *runs, mask_runs **out, saccade_error *err);
/* The live blocks of `runs` in blocks of finer sizes, which divide theirs. */
saccade_status runs_refine(const mask_runs *runs, int32_t block_q, int32_t block_kv, int64_t Q,
                           int64_t KV, mask_runs **out, saccade_error *err);

/* Joins two rows of runs: calls piece() for every maximal stretch of columns [first, past) over
 * which neither changes, in order; kinds are 0 absent, 1 PARTIAL, 2 FULL. */
typedef void (*run_piece)(void *arg, int64_t first, int64_t past, int kind_a, int kind_b);
void runs_walk(const saccade_run *a, int64_t n_a, const saccade_run *b, int64_t n_b,
               int64_t columns, run_piece piece, void *arg);
/* The runs of block row `row` of stored batch and head b, h (broadcast if stored once). */
int64_t runs_row(const mask_runs *runs, int64_t b, int64_t h, int64_t row,
                 const saccade_run **first);

/* ---- mask_object.c: the object ---- */

typedef struct mask_cached {
    struct mask_cached *next;
    mask_runs *runs, *transposed;
} mask_cached;

typedef struct mask_slot {
    struct mask_slot *next;
    const void *key;
    mask_device_copy copy;
} mask_slot;

/* Plans that a mask knows at a time; one more takes the place of the first. */
enum { MASK_MET = 8 };

/* The public options, read. */
typedef struct mask_options {
    int32_t block_q, block_kv; /* 1 or more */
    int64_t evaluation_budget;
} mask_options;

struct saccade_block_mask {
    saccade_mod *mod; /* owned; NULL: imported without one */
    const mod_fn *fn; /* the mod simplified, as plans have it */
    mask_view view;
    saccade_tensor *tensors; /* captures of the mod */
    eval_cell *scalars;      /* of those that are scalars, what they were when it was proven */
    int32_t *q_offset, *kv_offset;
    int64_t B, H; /* stored */
    mask_options options;
    int threads;
    mask_progress progress; /* while it is made */
    pass_prover *prover;    /* NULL without a mod */
    arena arena;            /* of fn and prog */
    const eval_prog *prog;
    uint64_t content;   /* hash of the captures it was proven from */
    int is_imported;    /* the first cached runs are the truth, not the mod */
    double seconds;     /* to make it */
    mask_cached *cache; /* options' block size first */
    mask_slot *slots;
    pthread_mutex_t lock;           /* of cache and slots */
    _Atomic uint64_t met[MASK_MET]; /* numbers of plans whose mask is the mod; 0: none */
    atomic_uint n_met;
};

/* What a new mask is made of: mod, sizes and tensors are copied. offsets may be NULL. */
typedef struct mask_recipe {
    const saccade_mod *mod;
    saccade_sizes sizes;
    const saccade_tensor *tensors;
    const int32_t *q_offset, *kv_offset;
    mask_options options;
    int threads;
    mask_progress progress;
    mask_runs *imported; /* taken over on success; NULL: proven from mod */
    mask_reads reads;    /* of the proofs that imported blocks came from, in part */
} mask_recipe;

saccade_status mask_make(const mask_recipe *recipe, saccade_block_mask **out,
                         saccade_error *err);
/* What blocks hang on that are proven from this function, best a simplified one. */
mask_reads mask_reads_of(const mod_fn *fn);
mask_recipe mask_recipe_of(const saccade_block_mask *mask);

/* ---- mask_runs.c ---- */

saccade_status mask_make_runs(const saccade_block_mask *m, int32_t block_q, int32_t block_kv,
                              mask_runs **out, saccade_error *err);
/* The runs at the mask's own block size. */
const mask_runs *mask_own_runs(const saccade_block_mask *mask);
/* A new list of blocks: device copies and runs made from the one before are dropped. */
void mask_replace_runs(saccade_block_mask *mask, mask_runs *own);
void mask_drop_cached(mask_cached *c);
/* Drops device copies. */
void mask_drop_slots(saccade_block_mask *mask);

/* ---- mask_create.c ---- */

/* Of any axis. */
#define MASK_LENGTH_MAX ((int64_t)1 << 30)
/* Copies offsets into arrays of B (NULL when all are 0), which the caller frees. */
typedef struct mask_offsets {
    int32_t *q, *kv;
} mask_offsets;
saccade_status mask_read_offsets(const saccade_positions *positions, const saccade_sizes *sizes,
                                 mask_offsets *out, saccade_error *err);
void mask_free_offsets(mask_offsets *offsets);

/* ---- mask_captures.c ---- */

uint64_t mask_hash_captures(const saccade_block_mask *mask);
/* Notes the scalars' present values. */
void mask_keep_scalars(saccade_block_mask *mask);

#endif
