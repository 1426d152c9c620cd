/* eval.h: values of mods. eval_scalar is the readable truth, one score at a time in float64;
 * the strip interpreter evaluates a run of neighbouring keys at once in int32 and float32 and
 * defines what a mask is. Both read captured tensors through eval_env. */
#ifndef SACCADE_EVAL_H
#define SACCADE_EVAL_H

#include "mod/mod.h"

#include <stdbool.h>

/* What a mod is evaluated in. tensors[i] belongs to captures[i] of the mod_fn; borrowed. */
typedef struct eval_env {
    int32_t size[MOD_SIZE_COUNT];
    const saccade_tensor *tensors;
    /* What b and h in texts are more than the batch and head that engines are set to. */
    int32_t b_offset, h_offset;
    bool is_wide; /* a score of an f64 problem: eval_scalar keeps all but indices in double */
} eval_env;

/* Fills tensors[] (n_captures of fn, caller's) from bindings by name and checks dtype, rank,
 * device, sizes (a dimension of 0 that is indexed), and that 64-bit and unsigned values fit
 * int32. EINVAL names the capture. Values are scanned only when `scan` (int64 captures). */
saccade_status eval_resolve(const mod_fn *fn, const saccade_binding *bindings,
                            int32_t n_bindings, int scan, saccade_tensor *tensors,
                            saccade_error *err);
/* eval_resolve for tensors on another device; scalars are on the CPU always. */
saccade_status eval_resolve_on(const mod_fn *fn, const saccade_binding *bindings,
                               int32_t n_bindings, saccade_device_kind device, int scan,
                               saccade_tensor *tensors, saccade_error *err);
void eval_sizes(const saccade_sizes *sizes, int32_t size[MOD_SIZE_COUNT]);

/* ---- oracle.c ---- */

/* b and h are without env's offsets. */
typedef struct eval_point {
    int32_t b, h, q, kv;
    double score;
} eval_point;

/* First index found outside its tensor (read clamped), honouring && || ?: */
typedef struct eval_report {
    int32_t node; /* the load, -1: none */
    int32_t dim;
    int32_t index;
    int64_t size;
} eval_report;

/* Mask (0 or 1) or score at one point. What does not depend on score is f32 and int32 as in
 * every engine, what does is double. With env->is_wide everything is double, f64 captures too,
 * but for the indices of loads, which stay those of every engine.
 * `values`: scratch, eval_scalar_values doubles. report may be NULL. */
size_t eval_scalar_values(const mod_fn *fn, bool is_wide);
double eval_scalar(const mod_fn *fn, const eval_env *env, const eval_point *at, double *values,
                   eval_report *report);

/* ---- strip.c: the vectorised interpreter ---- */

enum { EVAL_STRIP = 512 }; /* keys per call at most */

typedef struct eval_prog eval_prog;   /* immutable, shared by threads */
typedef struct eval_state eval_state; /* one per thread, in caller's memory */

saccade_status eval_compile(const mod_fn *fn, arena *arena, const eval_prog **out,
                            saccade_error *err);
/* Several results of one fn, at nodes results[0..n), n >= 1, and nothing that they do not need:
 * eval_results gives floats, eval_integers integers. */
saccade_status eval_compile_results(const mod_fn *fn, const uint32_t *results, uint32_t n,
                                    arena *arena, const eval_prog **out, saccade_error *err);
size_t eval_state_bytes(const eval_prog *prog); /* multiple of 64 */
/* Starts using `memory` (64-aligned, eval_state_bytes) for prog under env; env is copied, its
 * tensors borrowed. Nodes that depend on nothing are computed here. */
eval_state *eval_begin(const eval_prog *prog, const eval_env *env, void *memory);
/* Fixes (b, h), without env's offsets, then a row q; computes what depends on no key. head
 * before row. */
void eval_head(eval_state *state, int32_t b, int32_t h);
void eval_row(eval_state *state, int32_t q);
/* live[i] = mask at kv0 + i, 0 or 1, i < n <= EVAL_STRIP. */
void eval_mask(eval_state *state, int32_t kv0, int32_t n, uint8_t *live);
/* score[i] = score mod at (kv0 + i, score[i]), in place. */
void eval_score(eval_state *state, int32_t kv0, int32_t n, float *score);
/* out[k][i] = result k at (kv0 + i, score[i]); one of out may be score. */
void eval_results(eval_state *state, int32_t kv0, int32_t n, const float *score,
                  float *const *out);
/* out[k][i] = result k at kv0 + i, none of which varies with the score. */
void eval_integers(eval_state *state, int32_t kv0, int32_t n, int32_t *const *out);

#endif
