/* words.c: the first match of GPT-2's pattern, alternative by alternative. */
#include "words.h"

#include "code_ranges.h"

#include <string.h>

typedef enum kind { LETTER, NUMBER, SPACE, SIGN } kind;

/* The code point that text begins with and its bytes; a byte that begins none: itself. */
static uint32_t code_at(const char *text, size_t bytes, size_t *length)
{
    const unsigned char *p = (const unsigned char *)text;
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = p[0] < 0x80       ? 1
               : p[0] >> 5 == 6  ? 2
               : p[0] >> 4 == 14 ? 3
               : p[0] >> 3 == 30 ? 4
                                 : 0;
    *length = 1;
    if (n < 2 || n > bytes)
        return n == 1 ? p[0] : UINT32_MAX;
    uint32_t code = p[0] & (0x7fU >> n);
    for (size_t i = 1; i < n; i++) {
        if (p[i] >> 6 != 2)
            return UINT32_MAX;
        code = code << 6 | (p[i] & 63);
    }
    if (code < least[n] || code > 0x10ffff || code >> 11 == 27)
        return UINT32_MAX;
    *length = n;
    return code;
}

static int is_within(const code_range *ranges, size_t n, uint32_t code)
{
    size_t low = 0;
    while (n) { /* ranges[low + n] and later begin past the code */
        const size_t half = n / 2;
        if (ranges[low + half].last < code) {
            low += half + 1;
            n -= half + 1;
        } else if (ranges[low + half].first > code) {
            n = half;
        } else {
            return 1;
        }
    }
    return 0;
}

static int is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xa0 || c == 0x1680
           || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f
           || c == 0x205f || c == 0x3000;
}

static kind kind_at(const char *text, size_t bytes, size_t *length)
{
    const uint32_t code = code_at(text, bytes, length);
    if (code == UINT32_MAX)
        return SIGN;
    if (is_space(code))
        return SPACE;
    if (is_within(letters, sizeof letters / sizeof *letters, code))
        return LETTER;
    return is_within(numbers, sizeof numbers / sizeof *numbers, code) ? NUMBER : SIGN;
}

/* Bytes of the run of one kind that text begins with; *last: of its last code point. */
static size_t run_of(kind wanted, const char *text, size_t bytes, size_t *last)
{
    size_t at = 0, length;
    *last = 0;
    while (at < bytes && kind_at(text + at, bytes - at, &length) == wanted) {
        at += length;
        *last = length;
    }
    return at;
}

static size_t contraction(const char *text, size_t bytes)
{
    static const char *const known[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const size_t n = strlen(known[i]);
        if (n <= bytes && memcmp(text, known[i], n) == 0)
            return n;
    }
    return 0;
}

size_t first_word(const char *text, size_t bytes, int single_digits)
{
    size_t length, last;
    if (single_digits && kind_at(text, bytes, &length) == NUMBER)
        return length;
    const size_t short_form = contraction(text, bytes);
    if (short_form)
        return short_form;
    const size_t begin = text[0] == ' ' && bytes > 1;
    const kind first = kind_at(text + begin, bytes - begin, &length);
    if (first != SPACE && !(begin && single_digits && first == NUMBER))
        return begin + run_of(first, text + begin, bytes - begin, &last);
    const size_t spaces = run_of(SPACE, text, bytes, &last);
    if (spaces == bytes || spaces == last)
        return spaces;
    if (single_digits && kind_at(text + spaces, bytes - spaces, &length) == NUMBER)
        return spaces;
    return spaces - last; /* the last one begins the next word */
}
