/* Growable text with an upper bound. The first failure sticks: callers print freely and ask
   once, at the end. */
#ifndef SACCADE_BASE_STRINGS_H
#define SACCADE_BASE_STRINGS_H

#include "base/status.h"

#include <stdbool.h>
#include <stdarg.h>
#include <stddef.h>

typedef struct strbuf {
    char *text; /* 0-terminated; NULL until something is added */
    size_t length;
    size_t capacity;
    size_t limit;          /* most bytes of text allowed */
    saccade_status failed; /* SACCADE_OK, SACCADE_ENOMEM or SACCADE_ELIMIT */
} strbuf;

/* makes an empty buffer; limit 0 means 64 MiB. Allocates nothing yet. */
void strbuf_init(strbuf *sb, size_t limit);

/* appends; false once anything has failed, and then leaves the text as it was. */
bool strbuf_printf(strbuf *sb, const char *fmt, ...) BASE_PRINTF(2, 3);
bool strbuf_add(strbuf *sb, const char *text, size_t length);
bool strbuf_puts(strbuf *sb, const char *text);
bool strbuf_putc(strbuf *sb, char c);
/* %.<digits>g with a point, whatever the locale has instead. */
bool strbuf_number(strbuf *sb, int digits, double value);

/* the text so far, never NULL; valid till the next append. */
const char *strbuf_text(const strbuf *sb);

/* the sticky status, with its message. */
saccade_status strbuf_status(const strbuf *sb, saccade_error *err);

/* hands the text over (caller frees; NULL after a failure) and leaves an empty buffer. */
char *strbuf_steal(strbuf *sb);

void strbuf_free(strbuf *sb);

#endif
