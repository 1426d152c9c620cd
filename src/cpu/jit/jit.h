/* jit.h: score and mask of a mod as machine code over one tile of scores.
 *
 * Values are sorted by what they depend on: uniform (b, h), row (q), column (kv), tile. The
 * first three are computed once per head, row block and key block by the loops of eval/strip.h
 * into arrays, and so is what depends on kv - q alone, once for both blocks; what differs from
 * score to score becomes one pass of vector code over the tile:
 *
 *     s = score mod(scale * s), -inf where masked; row maximum on the way
 *
 * Masks and indices come out bit-equal to the interpreter's. x86-64 with AVX2 or AVX-512 and
 * Zydis; jit_create says EBACKEND where that is not so and the interpreter serves. */
#ifndef SACCADE_CPU_JIT_JIT_H
#define SACCADE_CPU_JIT_JIT_H

#include "pass/facts.h"

enum {
    JIT_ROWS = 512,  /* rows of one jit_rows call at most */
    JIT_COLS = 2048, /* keys of one jit_cols call at most */
    JIT_GROUP = 32,  /* the pass covers columns in whole groups of these */
    JIT_MAX_NODES = 512,
    JIT_MAX_RESULTS = 16
};

typedef struct jit_program jit_program; /* immutable, shared by threads */
typedef struct jit_state jit_state;     /* one per thread, in caller's memory */

/* score and mask may be NULL; level is a cpu_level. EBACKEND: no encoder, no executable memory,
 * another CPU, or a mod past JIT_MAX_NODES. */
saccade_status jit_create(const pass_facts *score, const mod_fn *mask, int32_t level,
                          jit_program **out, saccade_error *err);
/* Several results of one score function, its value first: floats at nodes results[0..n) of
 * score (pass_value_and_gradient), for jit_tiles. EBACKEND past JIT_MAX_RESULTS too. */
saccade_status jit_create_results(const mod_fn *score, const uint32_t *results, uint32_t n,
                                  const mod_fn *mask, int32_t level, jit_program **out,
                                  saccade_error *err);
/* For a plan: results of the interpreter, and compiled with the plan's mask where no limits
 * stand for it. *jit stays NULL where that gives EBACKEND: the interpreter gives the same. */
saccade_status jit_compile_results(const saccade_plan *plan, const mod_fn *fn,
                                   const uint32_t *results, uint32_t n, arena *arena,
                                   const eval_prog **prog, jit_program **jit,
                                   saccade_error *err);
void jit_destroy(jit_program *program);
size_t jit_state_bytes(const jit_program *program); /* multiple of 64 */
/* Starts using memory (64-aligned). NULL when a captured tensor reaches past 2^31 elements, or
 * one of 2-byte elements lies at an odd address: use the interpreter for this run. Envs'
 * tensors are borrowed. */
jit_state *jit_begin(const jit_program *program, const eval_env *score_env,
                     const eval_env *mask_env, float scale, void *memory);
/* Fix (b, h), then rows q0.. and keys kv0.. (positions, offsets included), in any order. */
void jit_head(jit_state *state, int32_t b, int32_t h);
void jit_rows(jit_state *state, int32_t q0, int32_t n);
void jit_cols(jit_state *state, int32_t kv0, int32_t n);

/* Rows [row0, row0 + rows) and columns [col0, col0 + cols) of those fixed: s[i * ld + j], in
 * place; col0 a multiple of JIT_GROUP, cols rounded up to whole groups (what is past cols is
 * written too and means nothing). masked: also the mask. row_max[i]: max of the whole groups'
 * columns, NaN aside; NULL is not allowed. */
void jit_tile(jit_state *state, float *s, int64_t ld, int32_t row0, int32_t rows, int32_t col0,
              int32_t cols, int masked, float *row_max);
/* jit_tile for a program of several results: tiles[0] holds the scores and becomes the value
 * (-inf where masked), tiles[k] becomes result k, which means nothing where the value is -inf.
 * All tiles have the same ld; they do not overlap. */
void jit_tiles(jit_state *state, float *const *tiles, int64_t ld, int32_t row0, int32_t rows,
               int32_t col0, int32_t cols, int masked);

/* Whether what streams lack, diagonals and reads by runs, is worth more than a stream. */
int jit_has_shortcuts(const jit_program *program);
/* Disassembly of both passes, for explain. */
saccade_status jit_print(const jit_program *program, strbuf *out, saccade_error *err);

#endif
