/* Filling a saccade_error. Messages are cut at the size of their field, never overrun it, and
 * stay one line, whatever the caller's strings in them hold. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void make_printable(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

static void fill(saccade_error *err, saccade_status code, const char *where, int32_t line,
                 int32_t column, const char *fmt, va_list args)
{
    if (err == NULL)
        return;
    memset(err, 0, sizeof *err);
    err->status = code;
    err->line = line;
    err->column = column;
    if (where != NULL)
        snprintf(err->where, sizeof err->where, "%s", where);
    vsnprintf(err->message, sizeof err->message, fmt, args);
    make_printable(err->where);
    make_printable(err->message);
}

saccade_status status_fail(saccade_error *err, saccade_status code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fill(err, code, NULL, 0, 0, fmt, args);
    va_end(args);
    return code;
}

saccade_status status_fail_at(saccade_error *err, saccade_status code, const char *where,
                              int32_t line, int32_t column, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fill(err, code, where, line, column, fmt, args);
    va_end(args);
    return code;
}
