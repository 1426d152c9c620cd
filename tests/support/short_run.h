/* short_run.h: whether tests leave out cases that differ from others in few lines, and take one
 * level a case. Sanitizers and emulators walk the same code ten times as slowly: `.ci/run` sets
 * SACCADE_TEST_SHORT there. `.ci/run all` does not, and sets SACCADE_TEST_ALL, with which
 * tests of NVRTC compile every instance of every program. */
#ifndef SACCADE_TESTS_SHORT_RUN_H
#define SACCADE_TESTS_SHORT_RUN_H

#include <stdlib.h>

static inline int is_short_run(void)
{
    return getenv("SACCADE_TEST_SHORT") != NULL;
}

/* An emulator takes minutes for what others do in seconds. */
static inline int is_emulated_run(void)
{
    return getenv("SACCADE_TEST_EMULATED") != NULL;
}

static inline int is_thorough_run(void)
{
    return getenv("SACCADE_TEST_ALL") != NULL;
}

#endif
