/* infile.h: files to read. */
#ifndef SACCADE_CLI_INFILE_H
#define SACCADE_CLI_INFILE_H

#include "cli.h"

/* Opens without waiting for a pipe's writer. */
saccade_status infile_open(const char *path, FILE **out, saccade_error *err);
/* Is it a regular file, whose length is known? */
bool infile_is_regular(FILE *file);

#endif
