/* signals.h: what a program that is told to stop leaves behind: nothing. */
#ifndef SACCADE_CLI_SIGNALS_H
#define SACCADE_CLI_SIGNALS_H

#include <stdbool.h>

/* Once, before any file is made. A file that grows too large becomes an error of its write. */
void signals_open(void);

/* From make() to the next signals_forget the file is removed if the program is told to stop.
 * make() fills in the template's name, as mkstemp does, and its answer is returned. */
int signals_make(char *path, int (*make)(char *path));
void signals_forget(const char *path);

/* Between hold and release a first Ctrl-C or SIGTERM only sets a flag, so that work which looks
 * at it can end by itself; a second one, a tenth of a second later or more, ends the program.
 */
void signals_hold(void);
void signals_release(void);
bool signals_told_to_stop(void);
/* Dies of the signal that was held back, as the shell expects; returns if there was none. */
void signals_obey(void);

#endif
