/* Filling a saccade_error. Messages are cut at the size of their field, never overrun it, and
 * stay one line, whatever the caller's strings in them hold. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Bytes of the character at `t` that a terminal may show, well-formed UTF-8 (Unicode, table
 * 3-7); 0: a control character, of U+0080 to U+009F too, or a byte of no character. */
static int shown_bytes(const unsigned char *t)
{
    const unsigned char c = t[0];
    const int n = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    const int least = c == 0xc2 || c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
    const int most = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    if (c < 0x20 || c == 0x7f || (c >= 0x80 && c < 0xc2) || c > 0xf4)
        return 0;
    if (n > 1 && (t[1] < least || t[1] > most))
        return 0;
    for (int i = 2; i < n; i++)
        if (t[i] < 0x80 || t[i] > 0xbf)
            return 0;
    return n;
}

static void make_printable(char *text)
{
    while (*text) {
        const int n = shown_bytes((const unsigned char *)text);
        if (n == 0)
            *text = '?';
        text += n == 0 ? 1 : n;
    }
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
