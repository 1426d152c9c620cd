/* prefix.h: plans whose runs say which batches begin with the same keys. */
#ifndef SACCADE_PLAN_PREFIX_H
#define SACCADE_PLAN_PREFIX_H

#include "plan/plan.h"
#include "plan/prefix_lists.h"

/* What a back end on a device does between the two runs. */
typedef struct plan_prefix_steps {
    saccade_status (*prepare)(const saccade_plan *own,
                              saccade_error *err); /* when a plan is made */
    saccade_status (*write)(const prefix_lists *lists, int device, void *stream,
                            saccade_error *err);
    saccade_status (*merge)(const prefix_merge *merge, int device, void *stream,
                            saccade_error *err);
} plan_prefix_steps;

/* A plan of two, for a problem that was derived into it. */
saccade_status plan_create_prefix(saccade_plan *plan, const saccade_problem *problem,
                                  saccade_error *err);

/* ---- prefix_host.c ---- */

void plan_write_prefix(const prefix_lists *lists);
/* Parts as prefix_merge has them, f32 or f64; max: NULL where not wanted. */
typedef struct plan_parts {
    saccade_tensor out[2], lse[2], max[2]; /* [B, H, Q, Dv] and [B, H, Q] */
    int has_max;
} plan_parts;
void plan_merge_prefix(const plan_parts *parts, const plan_run *run, int threads);

#endif
