/* A context: how much of the machine a caller lets the library use. */
#ifndef SACCADE_BASE_CONTEXT_H
#define SACCADE_BASE_CONTEXT_H

#include "saccade.h"

struct saccade_context {
    int32_t threads;
    int32_t level; /* cpu_features.h level */
};

#endif
