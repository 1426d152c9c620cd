/* minmax.h: least and greatest value of a captured tensor over a box of its indices. */
#ifndef SACCADE_PASS_MINMAX_H
#define SACCADE_PASS_MINMAX_H

#include "pass/range_rules.h"

typedef struct minmax minmax; /* immutable; the tensor's data stay borrowed */

/* Reads the whole tensor once. */
saccade_status minmax_create(const mod_capture *capture, const saccade_tensor *tensor,
                             minmax **out, saccade_error *err);
/* Range of the values at index[0..rank), each clamped into the tensor as every engine does. */
void minmax_query(const minmax *m, const range_val *const *index, range_val *out);
int minmax_is_int(const minmax *m);
void minmax_destroy(minmax *m);

#endif
