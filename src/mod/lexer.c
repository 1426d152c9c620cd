/* Text to tokens: C's names, numbers, operators and comments. Numbers are read without the
   locale: strtof sees digits and an exponent only, never a decimal point. */
#include "mod/ast.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NUMBER = 64 }; /* bytes of a number */

void lexer_init(lexer *lex, const ast_source *source, arena *arena)
{
    *lex = (lexer){.source = source, .arena = arena, .at = {0, 1, 1}};
}

static int peek(const lexer *lex, uint32_t ahead)
{
    const size_t i = (size_t)lex->at.offset + ahead;
    return i < lex->source->bytes ? (unsigned char)lex->source->text[i] : -1;
}

static void advance(lexer *lex, uint32_t n)
{
    for (; n > 0; n--) {
        const bool is_newline = peek(lex, 0) == '\n';
        lex->at.offset++;
        lex->at.line += is_newline;
        lex->at.column = is_newline ? 1 : lex->at.column + 1;
    }
}

static bool is_digit(int c)
{
    return c >= '0' && c <= '9';
}

static bool is_letter(int c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static int hex_digit(int c)
{
    if (is_digit(c))
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* comments hold any bytes but 0, which would end a printed text early. */
static saccade_status skip_in_comment(lexer *lex, saccade_error *err)
{
    if (peek(lex, 0) == 0)
        return source_fail(lex->source, lex->at, err, SACCADE_EPARSE,
                           "got byte 0x00 in a comment, expected text");
    advance(lex, 1);
    return SACCADE_OK;
}

static saccade_status skip_line_comment(lexer *lex, saccade_error *err)
{
    lex->comment_offset = lex->at.offset;
    lex->comment_line = lex->at.line;
    while (peek(lex, 0) >= 0 && peek(lex, 0) != '\n')
        TRY(skip_in_comment(lex, err));
    lex->comment_bytes = lex->at.offset - lex->comment_offset;
    return SACCADE_OK;
}

static saccade_status skip_block_comment(lexer *lex, saccade_error *err)
{
    const ast_place start = lex->at;
    advance(lex, 2);
    while (peek(lex, 0) != '*' || peek(lex, 1) != '/') {
        if (peek(lex, 0) < 0)
            return source_fail(lex->source, start, err, SACCADE_EPARSE,
                               "got a comment without its end, expected */");
        TRY(skip_in_comment(lex, err));
    }
    advance(lex, 2);
    return SACCADE_OK;
}

static saccade_status skip_blanks(lexer *lex, saccade_error *err)
{
    for (;;) {
        const int c = peek(lex, 0);
        if (c == ' ' || c == '\t' || c == '\n' || c == '\r')
            advance(lex, 1);
        else if (c == '/' && peek(lex, 1) == '/')
            TRY(skip_line_comment(lex, err));
        else if (c == '/' && peek(lex, 1) == '*')
            TRY(skip_block_comment(lex, err));
        else
            return SACCADE_OK;
    }
}

static saccade_status lex_name(lexer *lex, token *out, saccade_error *err)
{
    uint32_t n = 0;
    while (is_letter(peek(lex, n)) || is_digit(peek(lex, n)))
        n++;
    if (n > AST_MAX_NAME)
        return source_fail(lex->source, lex->at, err, SACCADE_ELIMIT,
                           "got a name of %u bytes, expected at most %d", n, AST_MAX_NAME);
    out->kind = TOK_NAME;
    out->bytes = n;
    out->name = arena_strndup(lex->arena, lex->source->text + lex->at.offset, n);
    FAIL_IF_NULL(out->name);
    return SACCADE_OK;
}

static saccade_status bad_number(const lexer *lex, uint32_t n, const char *expected,
                                 saccade_error *err)
{
    const int shown = n < 24 ? (int)n : 24;
    return source_fail(lex->source, lex->at, err, SACCADE_EPARSE,
                       "got number '%.*s', expected %s", shown,
                       lex->source->text + lex->at.offset, expected);
}

static saccade_status lex_hex(lexer *lex, uint32_t n, token *out, saccade_error *err)
{
    uint64_t value = 0;
    for (uint32_t i = 2; i < n; i++) {
        const int digit = hex_digit(peek(lex, i));
        if (digit < 0 || i > 9)
            return bad_number(lex, n, "0x and one to eight hexadecimal digits", err);
        value = value * 16 + (uint64_t)digit;
    }
    if (n < 3)
        return bad_number(lex, n, "0x and one to eight hexadecimal digits", err);
    out->kind = TOK_INT;
    out->int_value = (uint32_t)value;
    out->is_hex = true;
    return SACCADE_OK;
}

static saccade_status lex_int(lexer *lex, uint32_t n, token *out, saccade_error *err)
{
    uint64_t value = 0;
    if (n > 1 && peek(lex, 0) == '0')
        return bad_number(lex, n, "no leading 0 (there are no octal numbers)", err);
    for (uint32_t i = 0; i < n && value <= UINT32_MAX; i++)
        value = value * 10 + (uint64_t)(peek(lex, i) - '0');
    if (value > (uint64_t)INT32_MAX + 1)
        return bad_number(lex, n, "an int up to 2147483647; write 1e10 for a float", err);
    out->kind = TOK_INT;
    out->int_value = (uint32_t)value;
    return SACCADE_OK;
}

/* of digits and an exponent: is any digit not 0? */
static bool is_nonzero(const char *digits)
{
    return is_digit(digits[strspn(digits, "0")]);
}

/* "1.25e3" is read as "125e1". */
static saccade_status lex_float(lexer *lex, uint32_t n, token *out, saccade_error *err)
{
    char digits[MAX_NUMBER + 32];
    uint32_t i = 0, n_digits = 0;
    int fraction = 0, exponent = 0, sign = 1;
    bool in_fraction = false;
    for (; i < n && (is_digit(peek(lex, i)) || peek(lex, i) == '.'); i++) {
        if (peek(lex, i) == '.') {
            if (in_fraction)
                return bad_number(lex, n, "one decimal point", err);
            in_fraction = true;
            continue;
        }
        digits[n_digits++] = (char)peek(lex, i);
        fraction += in_fraction;
    }
    if (i < n && (peek(lex, i) | 32) == 'e') {
        i++;
        if (i < n && (peek(lex, i) == '+' || peek(lex, i) == '-'))
            sign = peek(lex, i++) == '-' ? -1 : 1;
        if (i >= n || !is_digit(peek(lex, i)))
            return bad_number(lex, n, "digits of an exponent", err);
        for (; i < n && is_digit(peek(lex, i)); i++)
            exponent = exponent > 9999 ? exponent : exponent * 10 + peek(lex, i) - '0';
    }
    if (i < n && (peek(lex, i) | 32) == 'f')
        i++;
    if (i != n)
        return bad_number(lex, n, "a number such as 8, 0x1f, 0.5, 1e-3 or 2.0f", err);
    snprintf(digits + n_digits, sizeof digits - n_digits, "e%d", sign * exponent - fraction);
    out->kind = TOK_FLOAT;
    out->float_value = strtof(digits, NULL);
    if (isinf(out->float_value))
        return bad_number(lex, n, "at most 3.4e38; write inf", err);
    if (out->float_value == 0 && is_nonzero(digits))
        return bad_number(lex, n, "at least 1.4e-45; write 0.0", err);
    return SACCADE_OK;
}

/* bytes that belong to a number: C's preprocessing number. */
static uint32_t number_length(const lexer *lex, bool *is_int)
{
    uint32_t n = 0;
    const bool is_hex = peek(lex, 0) == '0' && (peek(lex, 1) | 32) == 'x';
    *is_int = true;
    for (;; n++) {
        const int c = peek(lex, n);
        const bool is_sign =
            (c == '+' || c == '-') && n > 0 && !is_hex && (peek(lex, n - 1) | 32) == 'e';
        if (!is_digit(c) && !is_letter(c) && c != '.' && !is_sign)
            return n;
        *is_int = *is_int && is_digit(c);
    }
}

static saccade_status lex_number(lexer *lex, token *out, saccade_error *err)
{
    bool is_int;
    const uint32_t n = number_length(lex, &is_int);
    out->bytes = n;
    if (n > MAX_NUMBER)
        return bad_number(lex, n, "at most 64 characters", err);
    if (is_int)
        return lex_int(lex, n, out, err);
    if (peek(lex, 0) == '0' && (peek(lex, 1) | 32) == 'x')
        return lex_hex(lex, n, out, err);
    return lex_float(lex, n, out, err);
}

/* What C has and the language has not, and what to write instead. */
static const struct {
    const char *text, *hint;
} foreign[] = {
    {"++", "x = x + 1"},   {"--", "x = x - 1"},   {"+=", "x = x + ..."}, {"-=", "x = x - ..."},
    {"*=", "x = x * ..."}, {"/=", "x = x / ..."}, {"%=", "x = x % ..."}, {"&=", "x = x & ..."},
    {"|=", "x = x | ..."}, {"^=", "x = x ^ ..."}, {"**", "pow(x, y)"},   {"->", "a name"},
    {"=>", ">="},          {"=<", "<="},          {"<>", "!="},
};

static saccade_status lex_punct(lexer *lex, token *out, saccade_error *err)
{
    static const char *const two[] = {"<<", ">>", "<=", ">=", "==", "!=", "&&", "||"};
    const int c = peek(lex, 0), d = peek(lex, 1);
    out->kind = TOK_PUNCT;
    for (size_t i = 0; i < sizeof two / sizeof two[0]; i++) {
        if (c == two[i][0] && d == two[i][1]) {
            memcpy(out->text, two[i], 3);
            out->bytes = 2;
            return SACCADE_OK;
        }
    }
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        if (c == foreign[i].text[0] && d == foreign[i].text[1])
            return source_fail(lex->source, lex->at, err, SACCADE_EPARSE,
                               "got '%s', which the language does not have; write %s",
                               foreign[i].text, foreign[i].hint);
    }
    out->bytes = 1;
    out->text[0] = (char)c;
    if (c > 0 && strchr("+-*/%&|^~!<>=?:()[]{},;", c) != NULL)
        return SACCADE_OK;
    if (c >= ' ' && c <= '~')
        return source_fail(lex->source, lex->at, err, SACCADE_EPARSE,
                           "got '%c', expected a name, a number or an operator", c);
    return source_fail(lex->source, lex->at, err, SACCADE_EPARSE,
                       "got byte 0x%02x, expected ASCII outside of comments", (unsigned)c);
}

saccade_status lexer_next(lexer *lex, token *out, saccade_error *err)
{
    const uint32_t comment_before = lex->comment_offset;
    TRY(skip_blanks(lex, err));
    const int c = peek(lex, 0);
    *out = (token){.kind = TOK_END, .place = lex->at};
    out->after_comment = lex->comment_bytes > 0 && lex->comment_offset != comment_before;
    if (c < 0)
        return SACCADE_OK;
    if (is_letter(c))
        TRY(lex_name(lex, out, err));
    else if (is_digit(c) || (c == '.' && is_digit(peek(lex, 1))))
        TRY(lex_number(lex, out, err));
    else
        TRY(lex_punct(lex, out, err));
    advance(lex, out->bytes);
    return SACCADE_OK;
}

/* Digits and exponent of "%.*e" without its decimal point, whatever the locale's is. */
static void print_digits(float value, int precision, char text[32])
{
    char raw[48], digits[16];
    int n = 0;
    snprintf(raw, sizeof raw, "%.*e", precision, (double)value);
    const char *at = raw;
    for (; *at != 'e' && *at != '\0'; at++)
        if (is_digit(*at) && n < 15)
            digits[n++] = *at;
    digits[n] = '\0';
    const int exponent = *at == 'e' ? atoi(at + 1) : 0;
    if (exponent >= -4 && exponent < 0)
        snprintf(text, 31, "0.%.*s%s", -exponent - 1, "000", digits);
    else if (exponent >= 0 && exponent < n - 1)
        snprintf(text, 31, "%.*s.%s", exponent + 1, digits, digits + exponent + 1);
    else if (exponent >= 0 && exponent < 9)
        snprintf(text, 31, "%s%.*s.0", digits, exponent - n + 1, "00000000");
    else
        snprintf(text, 31, "%.1s.%se%d", digits, n > 1 ? digits + 1 : "0", exponent);
}

/* the value that print_digits' text stands for. */
static float read_back(const char *text)
{
    ast_source source = {.text = text, .bytes = strlen(text)};
    lexer lex;
    token t = {0};
    lexer_init(&lex, &source, NULL);
    return lexer_next(&lex, &t, NULL) == SACCADE_OK ? t.float_value : NAN;
}

void lexer_print_float(float value, char text[32])
{
    if (isnan(value) || isinf(value)) {
        snprintf(text, 32, "%s", isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
        return;
    }
    const bool is_negative = signbit(value) != 0;
    char *magnitude = text + is_negative;
    text[0] = '-';
    for (int precision = 0; precision <= 8; precision++) {
        print_digits(is_negative ? -value : value, precision, magnitude);
        if (read_back(magnitude) == (is_negative ? -value : value))
            return;
    }
}
