/* outfile.h: files that appear whole or not at all. */
#ifndef SACCADE_CLI_OUTFILE_H
#define SACCADE_CLI_OUTFILE_H

#include "cli.h"

struct stat;

typedef struct outfile {
    FILE *file;
    char *path, *aside; /* aside: NULL when path is no regular file and is written in place */
} outfile;

/* Before the first word is printed: where `path`, NULL or what a result is to be written to, is
 * the standard output (-o /dev/stdout), the output is the result's alone, and words go to
 * standard error. */
void outfile_keep_words_out(const char *path);
/* stat of what writing to `path` reaches; whether it exists. */
bool outfile_stat(const char *path, struct stat *out);
/* Whether it could be written, for long work that writes in the end; leaves nothing there. */
saccade_status outfile_check(const char *path, saccade_error *err);
/* Whether the name of a picture ends in .svg, if it has an ending. */
saccade_status outfile_check_ending(const char *option, const char *path, saccade_error *err);
/* Opens a new file beside `path`; a folder that is missing or closed shows here. */
saccade_status outfile_begin(const char *path, outfile *out, saccade_error *err);
/* Flushes and closes: what fails after it is renaming alone. Of several files that belong
 * together all are finished before one is committed. */
saccade_status outfile_finish(outfile *out, saccade_error *err);
/* Finishes, unless that is done, and renames. Either way *out is done with. */
saccade_status outfile_commit(outfile *out, saccade_error *err);
/* Leaves nothing behind; fine after commit and on a zeroed struct. */
void outfile_abandon(outfile *out);
/* All three in one. */
saccade_status outfile_put(const char *path, const void *bytes, size_t size,
                           saccade_error *err);

#endif
