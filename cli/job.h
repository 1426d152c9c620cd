/* job.h: what a user asked to compute (mods, captures, positions), and an engine that computes
 * it on tensors. */
#ifndef SACCADE_CLI_JOB_H
#define SACCADE_CLI_JOB_H

#include "cli.h"
#include "put_codes.h"
#include "put_pages.h"

/* Mask and score with their captures, for given sizes. All owned. */
typedef struct job {
    saccade_sizes sizes;
    saccade_mod *mask, *score, *weight; /* bound; NULL: none */
    saccade_mod *part[CLI_LIST];        /* of a score of several texts, each; bound */
    int n_parts;
    const char *mask_text; /* as given, for messages; so are the score's */
    cli_list score_texts;
    saccade_binding bindings[CLI_LIST];
    int32_t n_bindings;
    saccade_tensor q_offset, kv_len, sinks; /* dtype NONE: absent */
    int64_t seed;                           /* of a weight's dropout */
} job;

/* status, and in *err the option for the library's name of what it gave. */
saccade_status job_by_option(saccade_status status, saccade_error *err);

/* From --mask --score --weight --sinks --bind --q-offset --kv-len --seed. */
saccade_status job_open(const cli_args *args, const saccade_sizes *sizes, job *out,
                        saccade_error *err);
void job_close(job *j);
/* The job's positions; they point into *j. */
void job_positions(const job *j, saccade_positions *out);
/* Those of the job's bindings that a mod names; out: room for CLI_LIST. Returns how many. */
int32_t job_bindings_of(const job *j, const saccade_mod *mod, saccade_binding *out);
/* Block mask of the job's mask; NULL when it has none. */
saccade_status job_block_mask(const job *j, saccade_context *context, int32_t block_q,
                              int32_t block_kv, saccade_block_mask **out, saccade_error *err);
/* Exact number of live scores over B and H. */
saccade_status job_live_scores(const job *j, saccade_context *context, double *out,
                               saccade_error *err);
/* Reports the first index that leaves its tensor. */
saccade_status job_check_indices(const job *j, saccade_error *err);

/* Q, K, V and results on the host, [B, H, N, D] views. lse.dtype NONE: not wanted. */
typedef struct job_tensors {
    saccade_tensor q, k, v, out, lse;
} job_tensors;

/* Random normal Q, K, V of `dtype`, and room for out and lse. */
saccade_status job_tensors_new(const saccade_sizes *sizes, saccade_dtype dtype, uint64_t seed,
                               job_tensors *out, saccade_error *err);
/* The same numbers as `in` in another dtype, with results of its own. */
saccade_status job_tensors_copy(const job_tensors *in, saccade_dtype dtype, job_tensors *out,
                                saccade_error *err);
void job_tensors_free(job_tensors *t);

typedef struct engine_options {
    const char *backend, *level; /* NULL: auto, best */
    const char *arch;            /* CUDA target; NULL: the device's */
    int32_t threads;             /* 0: all */
    double scale;                /* NaN: 1 / sqrt(D) */
    int32_t block_q, block_kv;   /* of the block mask; 0: 128 */
    uint32_t gradients;          /* SACCADE_GRADIENT_*; 0: forward only */
    const cli_list *grad_of;     /* captures, with SACCADE_GRADIENT_CAPTURES */
    int64_t page;                /* keys of a page; 0: keys lie in one piece */
    code_groups codes;           /* of quantised keys */
    int32_t batch_invariant;     /* saccade_problem's */
    bool keeps_out; /* out of 16 bits is f32 until it is fetched: backward has all of it */
} engine_options;

/* A context of so many threads (0: all) and at most this level (NULL: the best). */
saccade_status engine_context(int32_t threads, const char *level, saccade_context **out,
                              saccade_error *err);

enum { ENGINE_DEVICE_TENSORS = 32 };

/* A plan and everything one run of it needs. */
typedef struct engine {
    saccade_context *context;
    saccade_plan *plan;
    saccade_block_mask *blocks;
    saccade_forward_args args;
    job_tensors tensors; /* what args and positions point to */
    saccade_tensor q_offset, kv_len, sinks, dropout;
    int64_t state[2]; /* of dropout: seed and offset */
    saccade_positions positions;
    saccade_binding bindings[CLI_LIST];
    void *workspace;
    const job_tensors *host;
    paged paged; /* with a page: what k and v are in tensors, and the table */
    saccade_tensor table;
    saccade_pages pages;
    coded coded; /* quantised keys: what k and v are in tensors, and their scales */
    saccade_tensor k_scale, v_scale;
    saccade_tensor kept; /* out in f32, on the host, where it is kept */
    bool on_device;
    void *device_memory[ENGINE_DEVICE_TENSORS];
    int n_device;
} engine;

/* The job and the tensors must outlive the engine, which stays where it was opened. */
saccade_status engine_open(const job *j, const engine_options *options, const job_tensors *t,
                           engine *out, saccade_error *err);
/* One run; *seconds (may be NULL) is its time. Results are on the host after engine_fetch. */
saccade_status engine_run(engine *e, double *seconds, saccade_error *err);
saccade_status engine_fetch(engine *e, saccade_error *err);
/* Bytes from the first to the last element of a view, whatever its strides. */
size_t engine_extent(const saccade_tensor *t);
void engine_close(engine *e);
/* engine_open, run, fetch, close. */
saccade_status engine_once(const job *j, const engine_options *options, const job_tensors *t,
                           double *seconds, saccade_error *err);
/* A plan only, for explain. */
saccade_status engine_plan(const job *j, const engine_options *options, saccade_dtype dtype,
                           saccade_context *context, saccade_plan **out, saccade_error *err);

#endif
