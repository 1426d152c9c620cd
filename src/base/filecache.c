/* Atomic file cache.
   An entry is a header (magic, sizes, 128-bit sum of key and bytes) and the bytes. What is read
   back ends up as executable code, so an entry counts only if it is a regular file of this user
   that others can't write, and its sum is right. The sum guards against damage, not malice. */
#include "base/filecache.h"

#include "base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef PATH_MAX
#define PATH_MAX 4096
#endif

enum { KEY_MAX = 128, FOLDER_MAX = PATH_MAX - KEY_MAX - 40 };

static const uint64_t ENTRY_MAX = UINT64_C(1) << 30; /* bytes; a cubin is far smaller */

typedef struct entry_header {
    char magic[8];
    uint64_t size; /* bytes after the header */
    char sum[HASH_HEX_SIZE + 7];
} entry_header;

static entry_header make_header(const char *key, const void *bytes, size_t size)
{
    entry_header header = {.magic = "SACCADE", .size = size};
    hash128 h;
    hash_init(&h);
    hash_add_text(&h, key);
    hash_add(&h, bytes, size);
    hash_hex(&h, header.sum);
    return header;
}

static bool key_is_valid(const char *key)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.";
    const size_t length = strnlen(key, KEY_MAX + 1);
    return length >= 1 && length <= KEY_MAX && key[0] != '.' && strspn(key, allowed) == length;
}

/* mkdir -p, private to the user. */
static bool make_folders(char *path)
{
    for (char *slash = path + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        const bool made = mkdir(path, 0700) == 0 || errno == EEXIST || errno == EROFS;
        *slash = '/';
        if (!made)
            return false;
    }
    return mkdir(path, 0700) == 0 || errno == EEXIST;
}

/* The folder used now, made if need be; fails when there is none to use. */
static saccade_status find_folder(char *path, size_t path_size, saccade_error *err)
{
    static const struct {
        const char *variable, *suffix;
    } places[] = {
        {"SACCADE_CACHE_DIR", ""},
        {"XDG_CACHE_HOME", "/saccade"},
        {"HOME", "/.cache/saccade"},
    };
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const char *root = getenv(places[i].variable);
        if (root == NULL || root[0] != '/') /* XDG: a relative path is to be ignored */
            continue;
        const int length = snprintf(path, path_size, "%s%s", root, places[i].suffix);
        FAIL_AT(length < 0 || (size_t)length >= path_size || length > FOLDER_MAX, SACCADE_EIO,
                "cache", 0, 0, "path in %s is too long", places[i].variable);
        FAIL_AT(!make_folders(path), SACCADE_EIO, "cache", 0, 0, "can't make folder %.200s: %s",
                path, strerror(errno));
        return SACCADE_OK;
    }
    FAIL(SACCADE_EIO, "cache: none of SACCADE_CACHE_DIR, XDG_CACHE_HOME, HOME names a folder");
}

static saccade_status entry_path(const char *key, char path[PATH_MAX], saccade_error *err)
{
    FAIL_AT(!key_is_valid(key), SACCADE_EINVAL, "cache", 0, 0, "key '%.40s' has a wrong form",
            key);
    TRY(find_folder(path, FOLDER_MAX, err));
    strcat(path, "/");
    strcat(path, key);
    return SACCADE_OK;
}

static bool read_all(int fd, void *bytes, size_t size)
{
    unsigned char *p = bytes;
    while (size != 0) {
        const ssize_t got = read(fd, p, size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        p += got;
        size -= (size_t)got;
    }
    return true;
}

static bool write_all(int fd, const void *bytes, size_t size)
{
    const unsigned char *p = bytes;
    while (size != 0) {
        const ssize_t put = write(fd, p, size);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return false;
        p += put;
        size -= (size_t)put;
    }
    return true;
}

/* an own regular file of plausible size. */
static bool file_is_trusted(int fd, const entry_header *header)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid()
           && (st.st_mode & (S_IWGRP | S_IWOTH)) == 0 && header->size <= ENTRY_MAX
           && (uint64_t)st.st_size == sizeof *header + header->size;
}

static void *read_entry(int fd, const char *key, size_t *size)
{
    entry_header header;
    if (!read_all(fd, &header, sizeof header) || memcmp(header.magic, "SACCADE", 8) != 0
        || !file_is_trusted(fd, &header))
        return NULL;
    void *bytes = malloc(header.size + 1);
    if (bytes == NULL)
        return NULL;
    if (read_all(fd, bytes, header.size)) {
        const entry_header want = make_header(key, bytes, header.size);
        if (memcmp(&want, &header, sizeof want) == 0) {
            *size = header.size;
            return bytes;
        }
    }
    free(bytes);
    return NULL;
}

bool filecache_get(const char *key, void **bytes, size_t *size)
{
    char path[PATH_MAX];
    if (entry_path(key, path, NULL) != SACCADE_OK)
        return false;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    void *found = read_entry(fd, key, size);
    close(fd);
    if (found != NULL)
        *bytes = found;
    return found != NULL;
}

saccade_status filecache_put(const char *key, const void *bytes, size_t size,
                             saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    char path[PATH_MAX], aside[PATH_MAX + 8];
    FAIL_AT(size > ENTRY_MAX, SACCADE_ELIMIT, "cache", 0, 0, "entry of %zu bytes, at most %llu",
            size, (unsigned long long)ENTRY_MAX);
    TRY(entry_path(key, path, err));
    snprintf(aside, sizeof aside, "%s.XXXXXX", path);
    int fd = mkostemp(aside, O_CLOEXEC); /* mode 0600 */
    FAIL_AT(fd < 0, SACCADE_EIO, "cache", 0, 0, "can't write in %.200s: %s", path,
            strerror(errno));
    const entry_header header = make_header(key, bytes, size);
    FAIL_IF_GOTO(!write_all(fd, &header, sizeof header) || !write_all(fd, bytes, size)
                     || fsync(fd) != 0,
                 SACCADE_EIO, "cache: writing %.200s: %s", aside, strerror(errno));
    FAIL_IF_GOTO(rename(aside, path) != 0, SACCADE_EIO, "cache: renaming to %.200s: %s", path,
                 strerror(errno));
out:
    close(fd);
    if (status != SACCADE_OK)
        unlink(aside);
    return status;
}
