/* Filling a saccade_error. Messages are cut at the size of their field, never overrun it. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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
