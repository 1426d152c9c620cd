/* bpe.h: text to tokens and back by the byte-level byte-pair encoding that a GGUF file holds
 * (tokenizer.ggml.model "gpt2", pre "gpt-2" or "smollm"). Tokens that the file marks as control
 * or the user's own are found in text as they stand. */
#ifndef GENERATE_BPE_H
#define GENERATE_BPE_H

#include "gguf.h"

enum { BPE_MOST_TOKENS = 1 << 20, BPE_MOST_SPECIAL = 4096 };

typedef struct bpe bpe;

/* The file is borrowed until bpe_free. */
int bpe_make(const gguf *g, bpe **out, trouble *t);
void bpe_free(bpe *b);

int32_t bpe_tokens(const bpe *b);
/* The token's number, -1 where there is none; as the vocabulary spells it. */
int32_t bpe_find(const bpe *b, const char *token, size_t bytes);
/* out has room for as many tokens as the text has bytes. */
int bpe_encode(const bpe *b, const char *text, size_t bytes, int32_t *out, int64_t *n,
               trouble *t);
/* The bytes of a token, at most `room`; of a control token none. Returns their number. */
size_t bpe_decode(const bpe *b, int32_t token, char *out, size_t room);

#endif
