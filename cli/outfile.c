/* Files that appear whole or not at all: written beside the target under another name, then
 * renamed over it. Devices and pipes (/dev/stdout, /dev/full) are written in place: renaming
 * would replace them. */
#include "outfile.h"
#include "signals.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static saccade_status fail(const char *path, const char *what, saccade_error *err)
{
    return cli_fail(err, SACCADE_EIO, path, "cannot %s: %s", what, strerror(errno));
}

/* Permissions that fopen would have given. */
static void usual_mode(int fd)
{
    const mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, 0666 & ~mask) != 0)
        return; /* the file keeps its narrow mode; it is whole all the same */
}

static saccade_status begin_aside(const char *path, outfile *out, saccade_error *err)
{
    const size_t n = strlen(out->path) + 8;
    out->aside = malloc(n);
    CLI_FAIL_IF(!out->aside, SACCADE_ENOMEM, path, "out of memory");
    snprintf(out->aside, n, "%s.XXXXXX", out->path);
    const int fd = signals_make(out->aside, mkstemp);
    if (fd < 0) {
        free(out->aside);
        out->aside = NULL;
        return fail(path, "write", err);
    }
    usual_mode(fd);
    out->file = fdopen(fd, "wb");
    if (!out->file) {
        close(fd);
        return fail(path, "write", err);
    }
    return SACCADE_OK;
}

saccade_status outfile_check(const char *path, saccade_error *err)
{
    struct stat info;
    outfile out;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode))
        return SACCADE_OK; /* a pipe's reader would take opening and closing for all there is */
    CLI_TRY(outfile_begin(path, &out, err));
    outfile_abandon(&out);
    return SACCADE_OK;
}

saccade_status outfile_begin(const char *path, outfile *out, saccade_error *err)
{
    struct stat info;
    outfile made = {NULL, NULL, NULL};
    saccade_status status = SACCADE_OK;
    CLI_FAIL_IF(!path[0], SACCADE_EINVAL, "file", "got an empty name, expected one to write");
    const bool exists = stat(path, &info) == 0;
    made.path = exists ? realpath(path, NULL) : strdup(path);
    CLI_FAIL_IF(!made.path, SACCADE_ENOMEM, path, "out of memory");
    if (exists && S_ISDIR(info.st_mode)) {
        status = cli_fail(err, SACCADE_EIO, path, "got a folder, expected a file to write");
    } else if (exists && !S_ISREG(info.st_mode)) {
        made.file = fopen(path, "wb");
        if (!made.file)
            status = fail(path, "write", err);
    } else {
        status = begin_aside(path, &made, err);
    }
    if (status == SACCADE_OK)
        *out = made;
    else
        outfile_abandon(&made);
    return status;
}

saccade_status outfile_commit(outfile *out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const bool was_bad = ferror(out->file) != 0;
    const int close_failed = fclose(out->file);
    out->file = NULL;
    if (was_bad || close_failed)
        status = fail(out->path, "write", err);
    else if (out->aside && rename(out->aside, out->path) != 0)
        status = fail(out->path, "replace", err);
    if (status == SACCADE_OK && out->aside) {
        signals_forget(out->aside);
        free(out->aside);
        out->aside = NULL;
    }
    outfile_abandon(out);
    return status;
}

void outfile_abandon(outfile *out)
{
    if (out->file)
        fclose(out->file);
    if (out->aside) {
        unlink(out->aside);
        signals_forget(out->aside);
    }
    free(out->aside);
    free(out->path);
    *out = (outfile){NULL, NULL, NULL};
}

saccade_status outfile_put(const char *path, const void *bytes, size_t size, saccade_error *err)
{
    outfile out;
    CLI_TRY(outfile_begin(path, &out, err));
    fwrite(bytes, 1, size, out.file);
    return outfile_commit(&out, err);
}
