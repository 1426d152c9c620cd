/* pass.h: transformations and analyses of typed mods. Each says what it needs and gives. */
#ifndef SACCADE_PASS_H
#define SACCADE_PASS_H

#include "eval/eval.h"
#include "mod/mod.h"

/* ---- simplify.c ---- */

/* Same values, fewer nodes: folds constants, identities that hold for all inputs (NaN, wrap
 * and -0 included), common subexpressions, dead nodes. needs: verified fn. gives: new fn in
 * arena. breaks: nothing. */
saccade_status pass_simplify(const mod_fn *fn, arena *arena, const mod_fn **out,
                             saccade_error *err);

/* ---- affine.c, interval.c: for facts.c, which asks them once ---- */

/* Beside numbers above this a score loses digits that count, even in a double. */
#define PASS_FAR 0x1p40f
/* score_out = slope * score + offset with slope and offset free of score (either may vary with
 * b h q kv); gives both as functions of kind SCORE. Returns 0 when it is not of that form.
 * needs: simplified fn. */
int pass_affine(const mod_fn *fn, arena *arena, const mod_fn **slope, const mod_fn **offset);
/* The mask is, for each (b, h, q), one interval lo <= kv < hi (possibly empty) with lo and hi
 * free of kv: gives them as int nodes of one fn (results in bounds[0], bounds[1], node
 * indices; missing bounds are INT32_MIN / INT32_MAX constants; lo >= hi: no key). Conjunctions
 * of such masks too, and disjunctions of half-lines (prefix-LM). 0 otherwise, so for what only
 * captured values decide (documents). needs: simplified fn; exact for positions from
 * PASS_NEAR_MIN to PASS_NEAR_MAX: farther off, differences of positions may wrap, and what is
 * live is then no interval at all. */
enum { PASS_NEAR_MIN = -(1 << 29), PASS_NEAR_MAX = (1 << 30) - 1 };
int pass_interval(const mod_fn *fn, arena *arena, const mod_fn **bounds_fn, uint32_t bounds[2]);

/* ---- gradient.c ---- */

#define PASS_NO_NODE UINT32_MAX

/* d result / d wanted[i] for i < n, where each wanted is OP_SCORE or an OP_LOAD / OP_SCALAR
 * node of fn, or PASS_NO_NODE, whose derivative is 0; gives one fn holding all of them,
 * results[i] its node. For the reference: constants are exact in double. needs: verified score
 * fn. */
saccade_status pass_gradient(const mod_fn *fn, const uint32_t *wanted, uint32_t n, arena *arena,
                             const mod_fn **out, uint32_t *results, saccade_error *err);
/* pass_gradient's derivatives and the value in one fn, which share what they have in common,
 * for kernels: constants are folded in f32. results[0] is the value, results[1 + i] its
 * derivative by wanted[i]. Captures keep their indices. */
saccade_status pass_value_and_gradient(const mod_fn *fn, const uint32_t *wanted, uint32_t n,
                                       arena *arena, const mod_fn **out, uint32_t *results,
                                       saccade_error *err);
/* Forward mode, which is linear in the score's rate s': results are the value, its derivative
 * by score and what the rates of float captures add, so that the value's rate is results[1] s'
 * + results[2]. *out has fn's captures and after them those that hold such rates, in f32:
 * twin[i] of capture i, -1 where it holds none. ELIMIT where they are too many. */
saccade_status pass_tangent(const mod_fn *fn, arena *arena, const mod_fn **out, int32_t *twin,
                            uint32_t results[3], saccade_error *err);
/* The node of the incoming score; PASS_NO_NODE: fn does not use it. */
uint32_t pass_find_score(const mod_fn *fn);

/* ---- range.c: interval analysis ---- */

/* Interval of a node over a box. int: [lo, hi] within int32. float: [flo, fhi], may_nan. bool:
 * can_false, can_true. congruence: value = rest modulo step, for ints when step > 1. */
typedef struct pass_range {
    int64_t lo, hi;
    int32_t step, rest;
    double flo, fhi;
    uint8_t may_nan, can_false, can_true;
} pass_range;

typedef struct pass_box {
    int32_t lo[4], hi[4]; /* inclusive; by mod_var: b h q kv */
} pass_box;

/* Ranges of all nodes over a box (ranges[fn->n_nodes], caller's); score is any finite float
 * unless score_range is given. Heads of the box are without env's h_offset. */
void pass_ranges(const mod_fn *fn, const eval_env *env, const pass_box *box,
                 const pass_range *score_range, pass_range *ranges);

/* What a mask is over all of a box. */
typedef enum pass_verdict { PASS_NEVER, PASS_ALWAYS, PASS_UNKNOWN } pass_verdict;

/* By ranges of its nodes, without allocating: scratch has pass_cover_bytes(mask->n_nodes). */
pass_verdict pass_cover(const mod_fn *mask, const eval_env *env, const pass_box *box,
                        void *scratch);
size_t pass_cover_bytes(uint32_t n_nodes);

/* ---- prover.c: verdicts on masks over boxes ---- */

/* A mask made ready for many boxes: min/max tables over the captures it indexes are built
 * here, so it holds for the captured values at this moment. env may have tensors NULL:
 * captures are then known by type only. */
typedef struct pass_prover pass_prover;
saccade_status pass_prover_create(const mod_fn *fn, const eval_env *env, pass_prover **out,
                                  saccade_error *err);
size_t pass_prover_scratch(const pass_prover *prover); /* bytes per thread */
pass_verdict pass_prove(const pass_prover *prover, const pass_box *box, void *scratch);
/* pass_prove, walking only what depends on variables whose range differs from the last proof's
 * with this scratch. needs: at least one pass_prove with it. */
pass_verdict pass_prove_next(const pass_prover *prover, const pass_box *box, void *scratch);
/* A good place to cut the box of the last proof with this scratch, when it came out UNKNOWN:
 * where a quotient by a constant or an indexed value changes. Positions from *at on are the
 * upper part. 0 when none is seen. */
int pass_prove_cut(const pass_prover *prover, const void *scratch, int *var, int32_t *at);
void pass_prover_destroy(pass_prover *prover);

#endif
