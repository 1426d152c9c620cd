/* Words of a problem string, in any order. */
#include "support/problem_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Reads digits of *text into *value; 0 when there are none or the number is past 2^30. */
static int number(const char **text, int64_t *value)
{
    const char *s = *text;
    int64_t n = 0;
    if (*s < '0' || *s > '9')
        return 0;
    for (; *s >= '0' && *s <= '9'; s++) {
        n = 10 * n + (*s - '0');
        if (n > (int64_t)1 << 30)
            return 0;
    }
    *text = s;
    *value = n;
    return 1;
}

/* One word "b2", "h16/4", ... at *text; 0 when it is none of them. */
static int size_word(const char **text, saccade_sizes *sizes)
{
    const char *s = *text;
    const struct {
        const char *key;
        int64_t *value;
    } keys[] = {
        {"kv", &sizes->KV}, {"dv", &sizes->Dv}, {"b", &sizes->B},
        {"h", &sizes->H},   {"q", &sizes->Q},   {"d", &sizes->D},
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const size_t n = strlen(keys[i].key);
        if (strncmp(s, keys[i].key, n) != 0)
            continue;
        s += n;
        if (!number(&s, keys[i].value))
            return 0;
        if (keys[i].value == &sizes->H && *s == '/') {
            s++;
            if (!number(&s, &sizes->Hkv))
                return 0;
        }
        *text = s;
        return *s == 0 || *s == ' ';
    }
    return 0;
}

static int dtype_word(const char **text, saccade_dtype *dtype)
{
    static const saccade_dtype floats[] = {SACCADE_F16, SACCADE_BF16, SACCADE_F32, SACCADE_F64};
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        const char *name = saccade_dtype_name(floats[i]);
        const size_t n = strlen(name);
        if (strncmp(*text, name, n) == 0 && ((*text)[n] == 0 || (*text)[n] == ' ')) {
            *text += n;
            *dtype = floats[i];
            return 1;
        }
    }
    return 0;
}

void problem_case(const char *text, saccade_sizes *sizes, saccade_dtype *dtype)
{
    saccade_sizes s = {.B = 1, .H = 1};
    saccade_dtype t = SACCADE_F32;
    const char *at = text;
    while (*(at += strspn(at, " ")) != 0)
        if (!size_word(&at, &s) && !dtype_word(&at, &t))
            fail_msg("problem '%s': got '%s'", text, at);
    s.Hkv = s.Hkv ? s.Hkv : s.H;
    s.KV = s.KV ? s.KV : s.Q;
    s.Dv = s.Dv ? s.Dv : s.D;
    if (s.B < 1 || s.H < 1 || s.Q < 1 || s.D < 1 || s.H % s.Hkv != 0)
        fail_msg("problem '%s': a size is missing or 0, or heads are no multiple", text);
    *sizes = s;
    *dtype = t;
}
