/* tangent.h: forward mode on CPUs: out, lse and how they change where q, k, v and captures do,
 * in one pass over the keys. For a live score x of weight p, with s = scale q . k and x = f(s):
 *
 *     s' = scale (q' . k + q . k')    x' = f_s s' + sum over reads r of f_r r'
 *     lse' = sum p x'                 out' = sum p (x' - lse') v + p v'
 *
 * x' is linear in s', so a score mod runs as one graph of its value, f_s and the rest.
 *
 *     for each wave of (batch, kv head):
 *         pack K, V and their rates, by blocks of keys            (tangent_run.c)
 *         for each head, each block of rows:                      (tangent_item.c)
 *             for each live block of keys, strip by strip:
 *                 S, S', score mod, mask                          (tangent_scores.c)
 *                 P and P' relative to m and c                    (kernels/tangent_kernels.h)
 *                 O' += P' V + P V'    O += P V
 *             store out, lse, out', lse'
 *
 * Items have rows of their own, so results are equal bit for bit over runs and threads. A
 * position that is not live gives exactly 0; where V or V' hold an infinity or NaN, live keys
 * alone are added. */
#ifndef SACCADE_CPU_TANGENT_TANGENT_H
#define SACCADE_CPU_TANGENT_TANGENT_H

#include "cpu/cpu.h"
#include "cpu/kernels/tangent_kernels.h"

/* What a plan keeps. */
typedef struct cpu_tangent_plan {
    const cpu_tangent_kernels *kernels;
    /* f_s as a score mod, NULL where there is no score mod and it is 1. */
    const mod_fn *slope;
    int has_slopes;                 /* it varies within a head, and is a result */
    int has_rates;                  /* the score reads floats, whose rates are a result */
    int32_t twin[MOD_MAX_CAPTURES]; /* where a capture's rates are among the graph's */
    uint32_t n_captures;            /* of the graph */
    uint32_t n_results;             /* the value, slopes, rates */
    const eval_prog *score;         /* of all; NULL where there is but the value */
    jit_program *jit;               /* and the mask; NULL: the interpreter runs them */
} cpu_tangent_plan;

/* ---- tangent_plan.c ---- */

/* needs: plan->state of forward. What it makes lives in the arena; destroy frees code. */
saccade_status cpu_tangent_create(const saccade_plan *plan, arena *arena, cpu_tangent_plan *out,
                                  saccade_error *err);
void cpu_tangent_destroy(cpu_tangent_plan *plan);
void cpu_tangent_explain(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                         strbuf *out);

/* Byte counts are multiples of 64. */
typedef struct tangent_geometry {
    int32_t q_ld, o_ld; /* elements of a packed row of Q; floats of a row of O */
    int32_t rows;       /* of an item in memory: whole strips */
    int64_t row_blocks, key_blocks;
    int64_t heads, wave;     /* (batch, kv head) pairs in all, and packed at a time */
    size_t k_bytes, v_bytes; /* a packed block of keys, of K and of V */
    size_t flag_off, thread_off, thread_bytes, bytes; /* packed blocks come first */
} tangent_geometry;

/* One thread's memory, in the order of tangent_worker's pointers. */
typedef struct tangent_scratch {
    size_t q, q_dot, s, x, y, slope, added, o, o_dot, stats, live, row, most, ranges, limits,
        values, score, mask, jit, bytes;
} tangent_scratch;
tangent_scratch tangent_scratch_of(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                                   const tangent_geometry *g);
tangent_geometry tangent_geometry_of(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                                     const saccade_sizes *sizes);
size_t cpu_tangent_workspace(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                             const saccade_sizes *sizes);

/* ---- tangent_run.c ---- */

saccade_status cpu_tangent(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                           const plan_run *run, const plan_tangents *t, saccade_error *err);

typedef struct tangent_job {
    const saccade_plan *plan;
    const cpu_tangent_plan *tangent;
    const plan_run *run;
    const plan_tangents *t;
    cpu_live live;
    eval_env score_env; /* of the graph, with rates of captures */
    saccade_tensor captures[MOD_MAX_CAPTURES];
    tangent_geometry g;
    int64_t head0; /* first (batch, kv head) of the wave */
    char *memory;  /* the workspace */
} tangent_job;

/* A block of keys as items read it; dots are NULL where no rates are given. */
typedef struct tangent_keys {
    char *k, *v, *k_dot, *v_dot;
    char *nonfinite; /* V or V' holds an infinity or NaN */
} tangent_keys;
tangent_keys tangent_keys_of(const tangent_job *job, int64_t head, int64_t block);

/* ---- tangent_item.c ---- */

/* A strip of rows against a block of keys, or the part of it that the rows can see. */
typedef struct tangent_tile {
    tangent_keys keys;
    int64_t j0;         /* of the block */
    int32_t n, padded;  /* its keys, and as packed */
    int32_t from, past; /* those that the strip sees; from is a multiple of JIT_GROUP */
    int is_full;
} tangent_tile;

typedef struct tangent_worker {
    const tangent_job *job;
    plan_position at;      /* of the item's batch */
    int64_t b, g, h, head; /* head: (batch, kv head), of the wave */
    int64_t i0;
    int32_t m; /* rows */
    float head_slope;
    char *q, *q_dot;
    float *s, *x, *y, *slope, *added;                   /* [strip][CPU_BLOCK_KEYS] */
    float *o, *o_dot;                                   /* [rows][o_ld] */
    float *row_m, *row_l, *row_c, *rest, *alpha, *ones; /* [rows] */
    float *row, *most;
    uint8_t *live;
    void *ranges;
    cpu_limits limits;
    double *values;
    jit_state *jit;
    eval_state *score, *mask;
    int64_t score_head, mask_head, jit_head; /* that states are set to, -1: none */
    int64_t jit_i0, jit_j0;
} tangent_worker;

void tangent_begin_threads(tangent_job *job);
/* par_fn over blocks of rows of the wave's heads. */
void tangent_run_item(void *job, int64_t index, int thread);

/* ---- tangent_scores.c ---- */

/* What the kernel of S multiplies by: 1 where a compiled pass scales. */
float tangent_scale_of(const tangent_worker *w, const tangent_tile *t);
/* Score mod and mask on n rows from r0 on, whose scores begin at w->s. */
void tangent_change_scores(tangent_worker *w, const tangent_tile *t, int32_t r0, int32_t n);

/* ---- tangent_store.c ---- */

/* The item's results. */
void tangent_store(tangent_worker *w);

#endif
