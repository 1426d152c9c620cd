/* Files that appear whole or not at all: written beside the target under another name, then
 * renamed over it. Devices and pipes (/dev/stdout, /dev/full) are written in place: renaming
 * would replace them. */
#include "outfile.h"
#include "signals.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static saccade_status fail(const char *path, const char *what, saccade_error *err)
{
    return cli_fail(err, SACCADE_EIO, path, "cannot %s: %s", what, strerror(errno));
}

/* Permissions that fopen would have given, or those of the file that is replaced. */
static void usual_mode(int fd, const struct stat *replaced)
{
    const mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, replaced ? replaced->st_mode & 07777 : 0666 & ~mask) != 0)
        return; /* the file keeps its narrow mode; it is whole all the same */
}

static saccade_status begin_aside(const char *path, const struct stat *replaced, outfile *out,
                                  saccade_error *err)
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
    usual_mode(fd, replaced);
    out->file = fdopen(fd, "wb");
    if (!out->file) {
        close(fd);
        return fail(path, "write", err);
    }
    return SACCADE_OK;
}

/* The program's standard output once it is a result's, and the name that it was given by, which
 * stands for something else since; else -1. */
static int result_fd = -1;
static const char *result_path;

static bool is_result(const char *path)
{
    return result_fd >= 0 && strcmp(path, result_path) == 0;
}

static bool is_same_file(const struct stat *info, int fd)
{
    struct stat other;
    return fstat(fd, &other) == 0 && info->st_dev == other.st_dev
           && info->st_ino == other.st_ino;
}

void outfile_keep_words_out(const char *path)
{
    struct stat info;
    if (result_fd >= 0 || !path || stat(path, &info) != 0 || !is_same_file(&info, STDOUT_FILENO)
        || is_same_file(&info, STDERR_FILENO))
        return;
    result_fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    result_path = path;
    if (result_fd >= 0)
        dup2(STDERR_FILENO, STDOUT_FILENO);
}

bool outfile_stat(const char *path, struct stat *out)
{
    return is_result(path) ? fstat(result_fd, out) == 0 : stat(path, out) == 0;
}

static FILE *open_in_place(const char *path)
{
    if (!is_result(path))
        return fopen(path, "wb");
    const int fd = fcntl(result_fd, F_DUPFD_CLOEXEC, 3);
    return fd < 0 ? NULL : fdopen(fd, "wb");
}

saccade_status outfile_check(const char *path, saccade_error *err)
{
    struct stat info;
    outfile out;
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode)
        && (!S_ISREG(info.st_mode) || is_result(path)))
        return SACCADE_OK; /* a pipe's reader would take opening and closing for all there is */
    CLI_TRY(outfile_begin(path, &out, err));
    outfile_abandon(&out);
    return SACCADE_OK;
}

saccade_status outfile_check_ending(const char *option, const char *path, saccade_error *err)
{
    const char *folder = strrchr(path, '/'), *end = strrchr(folder ? folder : path, '.');
    CLI_FAIL_IF(end && strcmp(end, ".svg") != 0, SACCADE_EINVAL, option,
                "got '%.80s', expected a name ending in .svg", path);
    return SACCADE_OK;
}

saccade_status outfile_begin(const char *path, outfile *out, saccade_error *err)
{
    struct stat info;
    outfile made = {NULL, NULL, NULL};
    saccade_status status = SACCADE_OK;
    CLI_FAIL_IF(!path[0], SACCADE_EINVAL, "file", "got an empty name, expected one to write");
    const bool exists = stat(path, &info) == 0;
    const bool is_whole = exists && S_ISREG(info.st_mode) && !is_result(path);
    made.path = is_whole ? realpath(path, NULL) : strdup(path); /* pipes have no such path */
    if (!made.path)
        return fail(path, "write", err);
    if (exists && S_ISDIR(info.st_mode)) {
        status = cli_fail(err, SACCADE_EIO, path, "got a folder, expected a file to write");
    } else if (exists && !is_whole) {
        made.file = open_in_place(path);
        if (!made.file)
            status = fail(path, "write", err);
    } else {
        status = begin_aside(path, exists ? &info : NULL, &made, err);
    }
    if (status == SACCADE_OK)
        *out = made;
    else
        outfile_abandon(&made);
    return status;
}

saccade_status outfile_finish(outfile *out, saccade_error *err)
{
    const bool was_bad = ferror(out->file) != 0;
    const int close_failed = fclose(out->file);
    out->file = NULL;
    return was_bad || close_failed ? fail(out->path, "write", err) : SACCADE_OK;
}

saccade_status outfile_commit(outfile *out, saccade_error *err)
{
    saccade_status status = out->file ? outfile_finish(out, err) : SACCADE_OK;
    if (status == SACCADE_OK && out->aside && rename(out->aside, out->path) != 0)
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
