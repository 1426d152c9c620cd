/* The processor's name, from /proc/cpuinfo where there is one, and the date. */
#include "machine.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* The rest of the first line that begins with this word, without what would end an SVG text. */
static void first_value(const char *word, char *out, size_t bytes)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && !*out && fgets(line, sizeof line, f)) {
        const char *value = strchr(line, ':');
        if (strncmp(line, word, strlen(word)) != 0 || !value)
            continue;
        value += 1 + strspn(value + 1, " \t");
        snprintf(out, bytes, "%.*s", (int)strcspn(value, "\n<&"), value);
    }
    if (f)
        fclose(f);
}

void machine_and_date(char out[MACHINE_BYTES])
{
    char name[96] = "", day[16] = "";
    const time_t now = time(NULL);
    struct tm at;
    first_value("model name", name, sizeof name);
    if (localtime_r(&now, &at))
        strftime(day, sizeof day, "%Y-%m-%d", &at);
    snprintf(out, MACHINE_BYTES, "%s, %s", *name ? name : "unnamed processor", day);
}
