/* words.h: text into the words that byte-pair merges stay within, as GPT-2's pattern does it:
 * 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
#ifndef GENERATE_WORDS_H
#define GENERATE_WORDS_H

#include <stddef.h>

/* Bytes of the first word of text that is not empty. single_digits: numbers are cut off first,
 * each code point of them alone. A byte that is no UTF-8 counts as a sign. */
size_t first_word(const char *text, size_t bytes, int single_digits);

#endif
