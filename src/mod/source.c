/* Places in a text, made into messages: line, column, and two lines of at most 80 columns, the
   text around the place and a caret. Whatever bytes a text holds, what is printed is ASCII. */
#include "mod/ast.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    COLUMNS = 80,
    BEFORE = 50 /* columns kept before the place when a line is too long */
};

static char printable(char c)
{
    if (c == '\t')
        return ' ';
    return c >= ' ' && c <= '~' ? c : '?';
}

/* end of the line's text from `at`, looking no further than `most` bytes. */
static size_t line_end(const ast_source *source, size_t at, size_t most)
{
    size_t end = at;
    while (end < source->bytes && end - at < most && source->text[end] != '\n'
           && source->text[end] != '\r')
        end++;
    return end;
}

void source_excerpt(const ast_source *source, ast_place place, char excerpt[2][96])
{
    const size_t start = place.offset - (place.column - 1);
    const bool is_cut = place.column > COLUMNS - 10;
    const size_t first = is_cut ? place.offset - BEFORE : start;
    const size_t end = line_end(source, first, COLUMNS + 1);
    const size_t n = end - first > COLUMNS ? COLUMNS : end - first;
    const size_t caret = place.offset - first;

    for (size_t i = 0; i < n; i++)
        excerpt[0][i] = printable(source->text[first + i]);
    excerpt[0][n] = '\0';
    if (is_cut)
        memcpy(excerpt[0], "...", 3);
    if (end - first > COLUMNS)
        memcpy(excerpt[0] + COLUMNS - 3, "...", 3);
    memset(excerpt[1], ' ', caret);
    memcpy(excerpt[1] + caret, "^", 2);
}

saccade_status source_fail(const ast_source *source, ast_place place, saccade_error *err,
                           saccade_status code, const char *fmt, ...)
{
    char message[sizeof err->message];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    for (char *c = message; *c; c++)
        *c = printable(*c);
    status_fail_at(err, code, NULL, (int32_t)place.line, (int32_t)place.column, "%s", message);
    if (err != NULL)
        source_excerpt(source, place, err->excerpt);
    return code;
}

/* Edits between two short names: insert, drop, replace; row by row. */
static unsigned distance(const char *a, const char *b)
{
    unsigned row[AST_MAX_NAME + 2];
    const size_t n = strlen(b);
    for (unsigned j = 0; j <= n; j++)
        row[j] = j;
    for (unsigned i = 0; a[i] != '\0'; i++) {
        unsigned diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < n; j++) {
            const unsigned above = row[j + 1];
            unsigned best = diagonal + (a[i] != b[j]);
            best = above + 1 < best ? above + 1 : best;
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j + 1] = best;
            diagonal = above;
        }
    }
    return row[n];
}

const char *source_nearest(const char *name, const char *const *names, uint32_t n)
{
    const size_t length = strlen(name);
    unsigned best = length < 2 ? 0 : length < 4 ? 2 : length < 8 ? 3 : 4; /* fewer than this */
    const char *nearest = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (length > AST_MAX_NAME || strlen(names[i]) > AST_MAX_NAME)
            continue;
        const unsigned d = distance(name, names[i]);
        if (d < best) {
            best = d;
            nearest = names[i];
        }
    }
    return nearest;
}
