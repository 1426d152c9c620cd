/* Growable, bounded text. Capacity doubles; the terminating 0 is always there. */
#include "base/strings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_LIMIT = 64 * 1024 * 1024, FIRST_CAPACITY = 128 };

void strbuf_init(strbuf *sb, size_t limit)
{
    *sb = (strbuf){.limit = limit == 0 ? DEFAULT_LIMIT : limit};
}

static bool fail(strbuf *sb, saccade_status code)
{
    sb->failed = code;
    return false;
}

/* room for `more` bytes and the terminator. */
static bool reserve(strbuf *sb, size_t more)
{
    if (sb->failed != SACCADE_OK)
        return false;
    if (more > sb->limit - sb->length)
        return fail(sb, SACCADE_ELIMIT);
    const size_t need = sb->length + more + 1;
    if (need <= sb->capacity)
        return true;
    size_t capacity = sb->capacity == 0 ? FIRST_CAPACITY : 2 * sb->capacity;
    if (capacity < need)
        capacity = need;
    char *text = realloc(sb->text, capacity);
    if (text == NULL)
        return fail(sb, SACCADE_ENOMEM);
    sb->text = text;
    sb->capacity = capacity;
    return true;
}

static bool add_formatted(strbuf *sb, const char *fmt, va_list args)
{
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(NULL, 0, fmt, again);
    va_end(again);
    if (length < 0)
        return fail(sb, SACCADE_ELIMIT);
    if (!reserve(sb, (size_t)length))
        return false;
    vsnprintf(sb->text + sb->length, (size_t)length + 1, fmt, args);
    sb->length += (size_t)length;
    return true;
}

bool strbuf_printf(strbuf *sb, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    const bool done = add_formatted(sb, fmt, args);
    va_end(args);
    return done;
}

bool strbuf_add(strbuf *sb, const char *text, size_t length)
{
    if (!reserve(sb, length))
        return false;
    if (length != 0)
        memcpy(sb->text + sb->length, text, length);
    sb->length += length;
    sb->text[sb->length] = '\0';
    return true;
}

bool strbuf_puts(strbuf *sb, const char *text)
{
    return strbuf_add(sb, text, strlen(text));
}

bool strbuf_putc(strbuf *sb, char c)
{
    return strbuf_add(sb, &c, 1);
}

bool strbuf_number(strbuf *sb, int digits, double value)
{
    char raw[64];
    size_t n = 0;
    snprintf(raw, sizeof raw, "%.*g", digits, value);
    for (const char *at = raw; *at; at++) {
        const char c = *at;
        if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '-' || c == '+')
            raw[n++] = c;
        else if (n == 0 || raw[n - 1] != '.') /* a mark may be several bytes */
            raw[n++] = '.';
    }
    return strbuf_add(sb, raw, n);
}

const char *strbuf_text(const strbuf *sb)
{
    return sb->text == NULL ? "" : sb->text;
}

saccade_status strbuf_status(const strbuf *sb, saccade_error *err)
{
    FAIL_AT(sb->failed == SACCADE_ELIMIT, SACCADE_ELIMIT, "text", 0, 0,
            "longer than %zu bytes, the limit here", sb->limit);
    FAIL_IF(sb->failed != SACCADE_OK, sb->failed, "out of memory");
    return SACCADE_OK;
}

char *strbuf_steal(strbuf *sb)
{
    char *text = NULL;
    if (reserve(sb, 0)) {
        text = sb->text;
        text[sb->length] = '\0';
        sb->text = NULL;
    }
    strbuf_free(sb);
    return text;
}

void strbuf_free(strbuf *sb)
{
    free(sb->text);
    strbuf_init(sb, sb->limit);
}
