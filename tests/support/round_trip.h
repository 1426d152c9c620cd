/* The property that every bound mod must have: its print parses and binds to itself. */
#ifndef SACCADE_TESTS_ROUND_TRIP_H
#define SACCADE_TESTS_ROUND_TRIP_H

#include "saccade.h"

/* fails the running cmocka test, showing the text, when it does not. */
void round_trip_check(const saccade_mod *bound);

#endif
