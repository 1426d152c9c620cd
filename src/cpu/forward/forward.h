/* forward.h: the forward operation. A run is cut into items (a block of query rows of one head,
 * or of all heads of a group), ordered by weight and given to threads:
 *
 *     for each wave of (batch, kv head), or of sequences:
 *         weigh items
 *         pack K and V, in parallel over blocks of keys          (or threads do: item_keys.c)
 *         run items, the longest first                            (item.c)
 *         merge the splits of each block of rows, in order of keys */
#ifndef SACCADE_CPU_FORWARD_FORWARD_H
#define SACCADE_CPU_FORWARD_FORWARD_H

#include "cpu/cpu.h"

size_t cpu_forward_workspace(const saccade_plan *plan, const saccade_sizes *sizes);
saccade_status cpu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err);

#endif
