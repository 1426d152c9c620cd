/* Files that examples/generate reads are untrusted: each wrong length, count, type, offset and
 * name has its line, and no prefix and no flipped bit of a file leads out of it. The file is
 * copied to memory of its own size, so that sanitizers see a byte past the end. */
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "bpe.h"
#include "words.h"

enum { MOST = 1 << 16 };

typedef struct writer {
    uint8_t bytes[MOST];
    size_t n;
} writer;

static void put(writer *w, const void *bytes, size_t n)
{
    assert_true(w->n + n <= MOST);
    memcpy(w->bytes + w->n, bytes, n);
    w->n += n;
}

static void put_u32(writer *w, uint32_t x)
{
    put(w, &x, 4);
}

static void put_u64(writer *w, uint64_t x)
{
    put(w, &x, 8);
}

static void put_text(writer *w, const char *text)
{
    put_u64(w, strlen(text));
    put(w, text, strlen(text));
}

static void put_head(writer *w, uint64_t tensors, uint64_t values)
{
    w->n = 0;
    put(w, "GGUF", 4);
    put_u32(w, 3);
    put_u64(w, tensors);
    put_u64(w, values);
}

static void put_word(writer *w, const char *key, const char *value)
{
    put_text(w, key);
    put_u32(w, GGUF_TEXT);
    put_text(w, value);
}

static void put_array(writer *w, const char *key, uint32_t type, uint64_t count)
{
    put_text(w, key);
    put_u32(w, GGUF_ARRAY);
    put_u32(w, type);
    put_u64(w, count);
}

static void put_tensor(writer *w, const char *name, uint64_t columns, uint64_t rows,
                       uint32_t type, uint64_t offset)
{
    put_text(w, name);
    put_u32(w, 2);
    put_u64(w, columns);
    put_u64(w, rows);
    put_u32(w, type);
    put_u64(w, offset);
}

/* Bytes as GPT-2 spells them, the 256 of them, then two merges and a control token. */
static void put_tokens(writer *w)
{
    char spelled[3];
    put_array(w, "tokenizer.ggml.tokens", GGUF_TEXT, 259);
    for (unsigned b = 0, others = 0; b < 256; b++) {
        const int prints = (b > 32 && b < 127) || (b > 160 && b != 173);
        const unsigned code = prints ? b : 256 + others++;
        spelled[0] = (char)(code < 128 ? code : 0xc0 | code >> 6);
        spelled[1] = (char)(code < 128 ? 0 : 0x80 | (code & 63));
        spelled[2] = 0;
        put_text(w, spelled);
    }
    put_text(w, "ab");
    put_text(w, "abc");
    put_text(w, "<|end|>");
    put_array(w, "tokenizer.ggml.token_type", GGUF_I32, 259);
    for (int i = 0; i < 259; i++)
        put_u32(w, i == 258 ? 3 : 1);
    put_array(w, "tokenizer.ggml.merges", GGUF_TEXT, 2);
    put_text(w, "a b");
    put_text(w, "ab c");
}

static void put_whole(writer *w)
{
    put_head(w, 2, 7);
    put_word(w, "tokenizer.ggml.model", "gpt2");
    put_word(w, "tokenizer.ggml.pre", "smollm");
    put_tokens(w);
    put_text(w, "a.number");
    put_u32(w, GGUF_F32);
    put_u32(w, 0x3fc00000); /* 1.5 */
    put_text(w, "an.integer");
    put_u32(w, GGUF_I16);
    put(w, "\xfe\xff", 2);
    put_tensor(w, "first", 4, 2, 0, 0);
    put_tensor(w, "second", 32, 1, 8, 32);
    while (w->n % 32)
        put(w, "", 1);
    for (int i = 0; i < 8; i++)
        put_u32(w, 0x3f800000 + ((uint32_t)i << 20));
    put(w, "\x00\x38", 2); /* 0.5 */
    for (int i = 0; i < 32; i++)
        put(w, &(int8_t){(int8_t)(i - 16)}, 1);
}

/* 0 and the line, or 1; everything that a file offers is touched. */
static int reads(const uint8_t *bytes, size_t n, trouble *t)
{
    uint8_t *copy = malloc(n + !n);
    gguf g;
    bpe *b = NULL;
    assert_non_null(copy);
    memcpy(copy, bytes, n);
    int is_read = gguf_parse("x", copy, n, &g, t) == 0;
    if (is_read) {
        for (uint64_t i = 0; i < g.n_tensors; i++) {
            float *values = malloc((size_t)g.tensors[i].elements * sizeof *values);
            assert_non_null(values);
            gguf_to_f32(&g.tensors[i], 0, g.tensors[i].elements, values);
            free(values);
        }
        is_read = bpe_make(&g, &b, t) == 0;
    }
    if (is_read) {
        int32_t tokens[16];
        int64_t count;
        char text[64];
        if (bpe_encode(b, "abcab <|end|>12", 15, tokens, &count, t) == 0)
            for (int64_t i = 0; i < count; i++)
                bpe_decode(b, tokens[i], text, sizeof text);
        bpe_free(b);
    }
    gguf_close(&g);
    free(copy);
    return is_read;
}

static void refused(const writer *w, const char *line)
{
    trouble t = {""};
    assert_false(reads(w->bytes, w->n, &t));
    if (!strstr(t.text, line))
        print_message("expected: %s\ngot:      %s\n", line, t.text);
    assert_non_null(strstr(t.text, line));
    assert_null(strchr(t.text, '\n'));
}

static void whole_files_are_read(void **state)
{
    (void)state;
    writer *w = malloc(sizeof *w);
    trouble t = {""};
    gguf g;
    double number;
    int64_t integer;
    float values[32];
    put_whole(w);
    assert_int_equal(gguf_parse("x", w->bytes, w->n, &g, &t), 0);
    assert_int_equal(gguf_number(&g, "a.number", NAN, &number, &t), 0);
    assert_true(number == 1.5);
    assert_int_equal(gguf_integer(&g, "an.integer", -5, 5, 0, &integer, &t), 0);
    assert_int_equal(integer, -2);
    assert_int_equal(gguf_integer(&g, "an.integer", 0, 5, 0, &integer, &t), -1);
    assert_string_equal(t.text, "x: an.integer: got -2, expected 0 to 5");
    assert_int_equal(gguf_integer(&g, "none", 0, 5, 3, &integer, &t), 0);
    assert_int_equal(integer, 3);
    gguf_to_f32(gguf_find_tensor(&g, "first"), 0, 8, values);
    assert_true(values[0] == 1 && values[1] == 1.125 && values[7] == 1.875);
    gguf_to_f32(gguf_find_tensor(&g, "second"), 0, 32, values);
    assert_true(values[0] == -8 && values[31] == 7.5);
    gguf_close(&g);
    free(w);
}

static void text_becomes_tokens_and_back(void **state)
{
    (void)state;
    static const char text[] = "abcab 7\t<|end|>a\xff";
    static const int32_t expected[] = {257, 256, ' ', '7', '\t', 258, 'a', 255};
    writer *w = malloc(sizeof *w);
    trouble t = {""};
    gguf g;
    bpe *b;
    int32_t tokens[64];
    int64_t n;
    char back[64], *to = back;
    put_whole(w);
    assert_int_equal(gguf_parse("x", w->bytes, w->n, &g, &t), 0);
    assert_int_equal(bpe_make(&g, &b, &t), 0);
    assert_int_equal(bpe_encode(b, text, sizeof text - 1, tokens, &n, &t), 0);
    assert_int_equal(n, 8);
    assert_memory_equal(tokens, expected, sizeof expected);
    for (int64_t i = 0; i < n; i++)
        to += bpe_decode(b, tokens[i], to, 8);
    assert_int_equal(to - back, sizeof text - 1 - 7); /* control tokens show nothing */
    assert_memory_equal(back, "abcab 7\ta\xff", sizeof text - 1 - 7);
    bpe_free(b);
    gguf_close(&g);
    free(w);
}

static void words_follow_the_pattern(void **state)
{
    (void)state;
    static const char *const cases[][6] = {
        {"it's  a", "it", "'s", " ", " a", NULL},
        {" x 12", " x", " ", "1", "2", NULL},
        {"a\n\n b", "a", "\n\n", " b", NULL},
        {"\xc3\xa9t\xc3\xa9!?", "\xc3\xa9t\xc3\xa9", "!?", NULL},
        {"1  ", "1", "  ", NULL},
        {"\xff\xfe z", "\xff\xfe", " z", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *at = cases[i][0];
        for (int k = 1; cases[i][k]; k++) {
            const size_t n = first_word(at, strlen(at), 1);
            assert_int_equal(n, strlen(cases[i][k]));
            assert_memory_equal(at, cases[i][k], n);
            at += n;
        }
        assert_int_equal(*at, 0);
    }
    assert_int_equal(first_word(" 12 ", 4, 0), 3);
}

static void no_prefix_and_no_bit_leads_out(void **state)
{
    (void)state;
    writer *w = malloc(sizeof *w);
    trouble t;
    put_whole(w);
    assert_true(reads(w->bytes, w->n, &t));
    for (size_t n = 0; n < w->n; n++)
        assert_false(reads(w->bytes, n, &t));
    const size_t step = is_emulated_run() ? 29 : 1;
    for (size_t bit = 0; bit < 8 * w->n; bit += step) {
        w->bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        reads(w->bytes, w->n, &t); /* some are as good as before, none leads out */
        w->bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    assert_true(reads(w->bytes, w->n, &t));
    free(w);
}

static void what_is_wrong_has_its_line(void **state)
{
    (void)state;
    writer *w = malloc(sizeof *w);
    put_head(w, 0, 0);
    w->bytes[0] = 'g';
    refused(w, "x: got no \"GGUF\" at its begin, expected a GGUF file");
    put_head(w, 0, 0);
    w->bytes[4] = 9;
    refused(w, "x: got GGUF version 9, expected 2 or 3");
    put_head(w, UINT64_MAX, 0);
    refused(w, "expected at most 8192 and 4096");
    put_head(w, 0, 1);
    put_text(w, "");
    refused(w, "byte 24: got a key of 0 bytes, expected 1 to 128, none of them 0");
    put_head(w, 0, 1);
    put_u64(w, UINT64_MAX);
    refused(w, "byte 32: got 0 bytes up to the end, expected 18446744073709551615 for a key");
    put_head(w, 0, 1);
    put_text(w, "k");
    put_u32(w, 13);
    refused(w, "x: k: got type 13, expected one of GGUF's");
    put_head(w, 0, 1);
    put_text(w, "k\xc2\x9b\x1b");
    put_u32(w, 13);
    refused(w, "x: k???: got type 13");
    put_head(w, 0, 1);
    put_array(w, "k", GGUF_ARRAY, 1);
    refused(w, "x: k: got type 9, expected one of GGUF's that is no array");
    put_head(w, 0, 1);
    put_array(w, "k", GGUF_U64, UINT64_MAX / 4);
    refused(w, "x: k: got 4611686018427387903 elements, more than any file holds");
    put_head(w, 0, 1);
    put_array(w, "k", GGUF_TEXT, UINT64_MAX);
    refused(w, "expected 8 for a text");
    put_head(w, 0, 2);
    put_word(w, "k", "1");
    put_word(w, "k", "2");
    refused(w, "x: k: got the key twice, expected once");
    put_head(w, 1, 1);
    put_word(w, "general.alignment", "32");
    put_tensor(w, "t", 1, 1, 0, 0);
    refused(w, "x: general.alignment: got type 8, expected an integer");
    free(w);
}

static void wrong_tensors_have_their_line(void **state)
{
    (void)state;
    static const struct {
        uint64_t columns, rows, offset;
        uint32_t type;
        const char *line;
    } cases[] = {
        {0, 1, 0, 0, "x: tensor t: got extent 0, expected 1 to 2^40 elements"},
        {UINT64_C(1) << 30, 1 << 20, 0, 0, "got extent 1048576, expected 1 to 2^40 elements"},
        {4, 4, 0, 12, "x: tensor t: got type 12, expected F32 (0), F16 (1)"},
        {33, 1, 0, 2, "x: tensor t: got rows of 33, expected a multiple of 32"},
        {4, 4, 8, 0, "got 64 bytes at 8 of the data, expected a place aligned to 32"},
        {4, 4, 32, 0, "got 64 bytes at 32 of the data, expected a place aligned to"},
        {4, 4, UINT64_MAX - 31, 0, "got 64 bytes at 18446744073709551584 of the data"},
    };
    writer *w = malloc(sizeof *w);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_head(w, 1, 0);
        put_tensor(w, "t", cases[i].columns, cases[i].rows, cases[i].type, cases[i].offset);
        while (w->n % 32)
            put(w, "", 1);
        for (int k = 0; k < 16; k++)
            put_u32(w, 0);
        refused(w, cases[i].line);
    }
    put_head(w, 2, 0);
    put_tensor(w, "t", 1, 1, 0, 0);
    put_tensor(w, "t", 1, 1, 0, 0);
    refused(w, "x: tensor t: got it twice, expected once");
    put_head(w, 1, 0);
    put_text(w, "t");
    put_u32(w, 5);
    refused(w, "x: tensor t: got rank 5, expected 1 to 4");
    free(w);
}

static void wrong_tokens_have_their_line(void **state)
{
    (void)state;
    writer *w = malloc(sizeof *w);
    put_head(w, 0, 2);
    put_word(w, "tokenizer.ggml.model", "llama");
    put_word(w, "tokenizer.ggml.pre", "default");
    refused(w, "got \"llama\" and \"default\", expected \"gpt2\" and \"gpt-2\" or \"smollm\"");
    put_head(w, 0, 4);
    put_word(w, "tokenizer.ggml.model", "gpt2");
    put_word(w, "tokenizer.ggml.pre", "gpt-2");
    put_array(w, "tokenizer.ggml.tokens", GGUF_TEXT, 1);
    put_text(w, "a");
    put_array(w, "tokenizer.ggml.token_type", GGUF_I32, 0);
    refused(w, "tokenizer.ggml.token_type: got 0, expected one for each of 1 tokens");
    put_head(w, 0, 5);
    put_word(w, "tokenizer.ggml.model", "gpt2");
    put_word(w, "tokenizer.ggml.pre", "gpt-2");
    put_tokens(w);
    w->n -= 4; /* "ab c" becomes "ab d" in effect: a joint that is none */
    put(w, "ab d", 4);
    refused(w, "tokenizer.ggml.merges: number 1: got \"ab d\", expected two tokens whose");
    put_head(w, 0, 4);
    put_word(w, "tokenizer.ggml.model", "gpt2");
    put_word(w, "tokenizer.ggml.pre", "gpt-2");
    put_array(w, "tokenizer.ggml.tokens", GGUF_TEXT, 2);
    put_text(w, "a\n");
    put_text(w, "a\n");
    put_array(w, "tokenizer.ggml.token_type", GGUF_I32, 2);
    put_u64(w, 0);
    refused(w, "tokenizer.ggml.tokens: got \"a?\" twice, expected once");
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_files_are_read),
        cmocka_unit_test(text_becomes_tokens_and_back),
        cmocka_unit_test(words_follow_the_pattern),
        cmocka_unit_test(no_prefix_and_no_bit_leads_out),
        cmocka_unit_test(what_is_wrong_has_its_line),
        cmocka_unit_test(wrong_tensors_have_their_line),
        cmocka_unit_test(wrong_tokens_have_their_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
