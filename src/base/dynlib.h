/* Libraries found at run time, so that nothing optional is needed to build or start. */
#ifndef SACCADE_BASE_DYNLIB_H
#define SACCADE_BASE_DYNLIB_H

#include "base/status.h"

typedef struct dynlib dynlib;

/* opens the first of the NULL-terminated names that loads; `what` names it in the message.
   Fails with SACCADE_EBACKEND, saying what was tried. */
saccade_status dynlib_open(const char *const *names, const char *what, dynlib **out,
                           saccade_error *err);

/* address of a symbol, or NULL. */
void *dynlib_find(dynlib *lib, const char *symbol);

/* the name that loaded; valid while open. */
const char *dynlib_name(const dynlib *lib);

void dynlib_close(dynlib *lib);

#endif
