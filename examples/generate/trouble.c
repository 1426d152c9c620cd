/* trouble.c: the one line of what is wrong. Of untrusted text what is not printable
 * ASCII is shown as question marks. */
#include "trouble.h"

#include <stdarg.h>
#include <stdio.h>

int refuse(trouble *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(t->text, sizeof t->text, format, arguments);
    va_end(arguments);
    for (char *p = t->text; *p; p++)
        if (*p < ' ' || *p > '~')
            *p = '?';
    return -1;
}
