/* ref.h: readable truth. attention.c is the float64 oracle; the ladder is the history of the
 * algorithm, each step a short function that counts its memory accesses and FLOPs. No SIMD. */
#ifndef SACCADE_REF_H
#define SACCADE_REF_H

#include "plan/plan.h"

/* ---- attention.c ---- */

/* Float64 attention, forward. out [B,H,Q,Dv], lse, row_max [B,H,Q] doubles, row-major; lse and
 * row_max may be NULL. Reads run's q, k, v of any float dtype, exactly. A live NaN or +inf
 * score makes the row's out, lse and row_max NaN. */
saccade_status ref_forward(const plan_problem *problem, const plan_run *run, double *out,
                           double *lse, double *row_max, saccade_error *err);

/* ---- plain.c ---- */

/* Plain same-dtype attention of docs/design.md: S in f32, P rounded to dtype, f32
 * accumulation. */
saccade_status ref_plain(const plan_problem *problem, const plan_run *run, float *out,
                         float *lse, saccade_error *err);

/* ---- plain_backward.c ---- */

/* Gradients of the solver "plain", by plan_problem's gradients and gradient_captures. */
saccade_status ref_plain_backward(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *gradients, saccade_error *err);

/* ---- backward.c ---- */

/* Gradients of sum(out * d_out) + sum(lse * d_lse) in float64; d_lse may be NULL. dq [B,H,Q,D],
 * dk [B,Hkv,KV,D], dv [B,Hkv,KV,Dv]. */
saccade_status ref_backward(const plan_problem *problem, const plan_run *run,
                            const double *d_out, const double *d_lse, double *dq, double *dk,
                            double *dv, saccade_error *err);
/* ref_backward for gradients by rows' sinks, [B,H,Q]; that of a sink that serves many rows is
 * their sum. */
saccade_status ref_backward_sinks(const plan_problem *problem, const plan_run *run,
                                  const double *d_out, const double *d_lse, double *terms,
                                  saccade_error *err);
/* ref_backward for gradients by the score's float captures: d_captures[i] (NULL: not wanted, or
 * not float) holds the elements of capture i row-major by its run's shape, and is added to. */
saccade_status ref_backward_captures(const plan_problem *problem, const plan_run *run,
                                     const double *d_out, const double *d_lse,
                                     double *const *d_captures, saccade_error *err);

/* ---- tangent.c ---- */

saccade_status ref_tangent(const saccade_plan *plan, const plan_run *run,
                           const plan_tangents *tangents, saccade_error *err);

/* ---- backward_solver.c ---- */

size_t ref_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                              const plan_gradients *gradients);
saccade_status ref_backward_solve(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *gradients, saccade_error *err);

#endif
