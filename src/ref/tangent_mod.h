/* tangent_mod.h: how a score mod and its derivatives change with what they read: the second
 * derivative, by the pass that made the first. */
#ifndef SACCADE_REF_TANGENT_MOD_H
#define SACCADE_REF_TANGENT_MOD_H

#include "ref/rows.h"

/* A function and its derivatives by all that it reads of score and float captures. */
typedef struct tangent_fn {
    mod_fn fn;
    mod_fn by; /* its result is that of each derivative in turn */
    uint32_t n, *nodes, *results;
} tangent_fn;

/* A score mod f: f itself, and the tangents of df/dscore and of df/d each of its reads. */
typedef struct tangent_mod {
    tangent_fn value;
    tangent_fn *slopes; /* as many as value has derivatives, in their order */
    size_t n_values;    /* scratch of eval_scalar */
} tangent_mod;

/* Where in the problem's captures a read lies, and how fast they change. */
typedef struct tangent_captures {
    const double *dots[MOD_MAX_CAPTURES]; /* row-major; NULL: not at all */
} tangent_captures;

/* needs: a problem with a score. What it makes lives in the arena. */
saccade_status tangent_mod_of(const plan_problem *problem, arena *arena, tangent_mod *out,
                              saccade_error *err);
/* d of the function at key j where score changes by s_dot and captures by theirs. */
double tangent_of(const tangent_fn *of, const ref_inputs *in, const tangent_captures *captures,
                  const ref_row *row, int64_t j, double s_dot);
/* The capture that derivative k is by, -1: score; *place: of the element it reads. */
int32_t tangent_read(const tangent_fn *of, const ref_inputs *in, const ref_row *row, int64_t j,
                     uint32_t k, int64_t *place);
double tangent_slope(const tangent_fn *of, const ref_inputs *in, const ref_row *row, int64_t j,
                     uint32_t k);

#endif
