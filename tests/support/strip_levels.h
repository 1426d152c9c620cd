/* strip_levels.h: the interpreter's loops of every level that this machine runs. */
#ifndef SACCADE_TESTS_STRIP_LEVELS_H
#define SACCADE_TESTS_STRIP_LEVELS_H

#include "eval/strip.h"

/* From portable on; the number of them is strip_levels(). */
extern const strip_table *const strip_level[];
int strip_levels(void);

#endif
