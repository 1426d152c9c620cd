/* The property that every bound mod must have: its print parses and binds to itself. */
#ifndef SACCADE_TESTS_ROUND_TRIP_H
#define SACCADE_TESTS_ROUND_TRIP_H

#include "saccade.h"

/* fails the running cmocka test, showing the text, when it does not. */
void round_trip_check(const saccade_mod *bound);
/* The same for a generic mod, a chain of texts too: what is printed parses, prints as the same
 * bytes, and gives the same nodes when captures of these dtypes are bound. */
void round_trip_check_generic(const saccade_mod *mod, const saccade_capture *captures,
                              int32_t n_captures);

#endif
