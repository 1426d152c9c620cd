/* short_run.h: whether tests leave out cases that differ from others in few lines. Sanitizers
 * and emulators walk the same code ten times as slowly: `.ci/run` sets SACCADE_TEST_SHORT
 * there, `.ci/run all` does not. */
#ifndef SACCADE_TESTS_SHORT_RUN_H
#define SACCADE_TESTS_SHORT_RUN_H

#include <stdlib.h>

static inline int is_short_run(void)
{
    return getenv("SACCADE_TEST_SHORT") != NULL;
}

#endif
