/* apart.h: files that are written apart from each other and from what is read. */
#ifndef SACCADE_CLI_APART_H
#define SACCADE_CLI_APART_H

#include "cli.h"

/* A file, and the option that names it. */
typedef struct cli_file {
    const char *option, *path;
} cli_file;

/* Whether no file of written[n] is another of them, or one that the arguments name to be read,
 * whatever the paths are that lead there. */
saccade_status apart_check(const cli_args *args, const cli_file *written, int n,
                           saccade_error *err);

#endif
