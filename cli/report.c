/* What the user reads when something goes wrong or takes long: one line of error, a suggestion
 * for a mistyped word, one line of progress. */
#include "cli.h"

#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Of a path that is longer than there is room for, the end: it tells files apart. */
static void put_where(saccade_error *err, const char *where)
{
    const size_t n = strlen(where), room = sizeof err->where - 1;
    if (n <= room)
        memcpy(err->where, where, n + 1);
    else
        snprintf(err->where, sizeof err->where, "...%s", where + n - (room - 3));
}

saccade_status cli_fail(saccade_error *err, saccade_status status, const char *where,
                        const char *format, ...)
{
    va_list args;
    memset(err, 0, sizeof *err);
    err->status = status;
    put_where(err, where ? where : "");
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    return status;
}

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

/* Names and file contents may hold anything; a terminal gets no control characters. */
static void put_clean(const char *text)
{
    while (*text) {
        const int n = shown_bytes((const unsigned char *)text);
        fprintf(stderr, "%.*s", n == 0 ? 1 : n, n == 0 ? "?" : text);
        text += n == 0 ? 1 : n;
    }
}

void cli_report(const saccade_error *err)
{
    fputs("saccade: ", stderr);
    if (err->where[0]) {
        put_clean(err->where);
        fputs(": ", stderr);
    }
    if (err->line > 0)
        fprintf(stderr, "%d:%d: ", err->line, err->column);
    put_clean(err->message[0] ? err->message : saccade_status_name(err->status));
    fputc('\n', stderr);
    for (int i = 0; i < 2 && err->line > 0 && err->excerpt[i][0]; i++) {
        put_clean(err->excerpt[i]);
        fputc('\n', stderr);
    }
}

int cli_exit_code(saccade_status status)
{
    if ((int)status == CLI_CHECK_FAILED)
        return 1;
    if (status == SACCADE_OK)
        return 0;
    return status == SACCADE_EINTERNAL ? 3 : 2;
}

static int least(int a, int b)
{
    return a < b ? a : b;
}

/* Edit distance of two short words; long ones are far. */
static int distance(const char *a, const char *b)
{
    enum { MOST = 32 };
    int row[MOST + 1];
    const int n = (int)strlen(a), m = (int)strlen(b);
    if (n > MOST || m > MOST)
        return MOST;
    for (int j = 0; j <= m; j++)
        row[j] = j;
    for (int i = 1; i <= n; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            const int change = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            row[j] = least(change, 1 + least(row[j], row[j - 1]));
        }
    }
    return row[m];
}

const char *cli_nearest(const char *word, const char *const *names, int n_names)
{
    const char *best = NULL;
    int best_distance = 1 + (int)strlen(word) / 3;
    for (int i = 0; i < n_names; i++) {
        const int d = distance(word, names[i]);
        if (d <= best_distance) {
            best = names[i];
            best_distance = d - 1; /* the first of equals stays */
        }
    }
    return best;
}

void cli_progress(const char *format, ...)
{
    static bool shown;
    va_list args;
    if (!isatty(STDERR_FILENO))
        return;
    if (shown || !format)
        fputs("\r\033[K", stderr);
    shown = format != NULL;
    if (!format)
        return;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

double cli_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
