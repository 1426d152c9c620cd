/* Files to read. Opening a pipe that nobody writes to would wait for ever, without a word; so
 * nothing waits to be opened, and then reads do wait, for what a writer sends. */
#include "infile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

saccade_status infile_open(const char *path, FILE **out, saccade_error *err)
{
    CLI_FAIL_IF(!path[0], SACCADE_EINVAL, "file", "got an empty name, expected one to read");
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    const bool waits = fd >= 0 && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) == 0;
    FILE *file = waits ? fdopen(fd, "rb") : NULL;
    if (!file) {
        cli_fail(err, SACCADE_EIO, path, "cannot open: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return SACCADE_EIO;
    }
    *out = file;
    return SACCADE_OK;
}

bool infile_is_regular(FILE *file)
{
    struct stat info;
    return fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode);
}
