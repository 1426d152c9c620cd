/* forward.h: the forward operation. A run is cut into items (a block of query rows of one head,
 * or of all heads of a group), ordered by weight and given to threads:
 *
 *     for each wave of (batch, kv head), or of sequences:
 *         weigh items, unless they are alike
 *         run items, the longest first, on as many threads as they are worth   (item.c)
 *             a block of keys is packed by the thread that first needs it      (item_keys.c)
 *             the last split of a block of rows merges them, in order of keys */
#ifndef SACCADE_CPU_FORWARD_FORWARD_H
#define SACCADE_CPU_FORWARD_FORWARD_H

#include "cpu/cpu.h"

size_t cpu_forward_workspace(const saccade_plan *plan, const saccade_sizes *sizes);
saccade_status cpu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err);

#endif
