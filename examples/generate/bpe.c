/* bpe.c: byte-pair encoding (Sennrich et al., arXiv 1508.07909) over bytes, as GPT-2 spells
 * them: bytes that print stand for themselves, the others for code points from 256 on. Within a
 * word the pair of the lowest rank is merged first, the left one of equals; a heap of pairs
 * finds it, so that a word of n bytes takes n log n steps. */
#include "bpe.h"

#include "words.h"

#include <stdlib.h>
#include <string.h>

enum { NORMAL = 1, CONTROL = 3, USERS = 4 };

typedef struct merge {
    int32_t left, right, rank, whole; /* left -1: an empty place */
} merge;

struct bpe {
    const char *file;
    gguf_text *tokens;
    int32_t n, n_special;
    int32_t *types, *special; /* types; special: longest first */
    int32_t *by_text;         /* hash table of tokens, -1: empty */
    merge *merges;            /* hash table */
    uint64_t text_mask, merge_mask;
    int32_t of_byte[256];
    uint8_t byte_of[324]; /* of a code point; only those below 324 spell bytes */
    int single_digits;
};

/* ---- how bytes are spelled ---- */

static uint32_t spelled(unsigned byte)
{
    uint32_t others = 0;
    for (unsigned i = 0; i <= byte; i++) {
        const int prints = (i > 32 && i < 127) || (i > 160 && i != 173);
        if (i == byte)
            return prints ? byte : 256 + others;
        others += !prints;
    }
    return 0;
}

static size_t put_code(uint32_t code, char *out) /* below 2048 */
{
    if (code < 128) {
        out[0] = (char)code;
        return 1;
    }
    out[0] = (char)(0xc0 | code >> 6);
    out[1] = (char)(0x80 | (code & 63));
    return 2;
}

/* ---- tables ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 31) * UINT64_C(0x9e3779b97f4a7c15);
    return x ^ x >> 29;
}

static uint64_t hash_of(const char *data, uint64_t bytes)
{
    uint64_t h = bytes;
    for (uint64_t i = 0; i < bytes; i++)
        h = mix(h ^ (unsigned char)data[i]);
    return h;
}

static uint64_t mask_for(uint64_t n)
{
    uint64_t size = 64;
    while (size < 2 * n)
        size *= 2;
    return size - 1;
}

int32_t bpe_find(const bpe *b, const char *token, size_t bytes)
{
    for (uint64_t at = hash_of(token, bytes);; at++) {
        const int32_t i = b->by_text[at & b->text_mask];
        if (i < 0)
            return -1;
        if (b->tokens[i].size == bytes && memcmp(b->tokens[i].data, token, bytes) == 0)
            return i;
    }
}

/* The pair's merge, or the empty place where it would be. */
static merge *place_of(const bpe *b, int32_t left, int32_t right)
{
    for (uint64_t at = mix((uint64_t)left << 32 | (uint32_t)right);; at++) {
        merge *m = &b->merges[at & b->merge_mask];
        if (m->left < 0 || (m->left == left && m->right == right))
            return m;
    }
}

static int32_t type_at(const gguf_value *types, int32_t i)
{
    int32_t type; /* the file is little-endian, as machines are that this runs on */
    memcpy(&type, types->at + 4 * (size_t)i, 4);
    return type;
}

static int read_tokens(bpe *b, const gguf *g, trouble *t)
{
    const gguf_value *tokens, *types;
    if (gguf_array(g, "tokenizer.ggml.tokens", GGUF_TEXT, BPE_MOST_TOKENS, &tokens, t)
        || gguf_array(g, "tokenizer.ggml.token_type", GGUF_I32, BPE_MOST_TOKENS, &types, t))
        return -1;
    if (tokens->count == 0 || types->count != tokens->count)
        return refuse(t,
                      "%s: tokenizer.ggml.token_type: got %llu, expected one for each of %llu "
                      "tokens",
                      g->file, (unsigned long long)types->count,
                      (unsigned long long)tokens->count);
    b->n = (int32_t)tokens->count;
    b->text_mask = mask_for(tokens->count);
    b->tokens = calloc(tokens->count, sizeof *b->tokens);
    b->types = calloc(tokens->count, sizeof *b->types);
    b->by_text = malloc((b->text_mask + 1) * sizeof *b->by_text);
    if (!b->tokens || !b->types || !b->by_text)
        return refuse(t, "%s: no memory for its tokens", g->file);
    memset(b->by_text, 0xff, (b->text_mask + 1) * sizeof *b->by_text);
    const uint8_t *at = tokens->at;
    for (int32_t i = 0; i < b->n; i++) {
        const gguf_text text = gguf_next_text(&at);
        b->types[i] = type_at(types, i);
        if (bpe_find(b, text.data, text.size) >= 0)
            return refuse(t, "%s: tokenizer.ggml.tokens: got \"%.*s\" twice, expected once",
                          g->file, (int)(text.size < 64 ? text.size : 64), text.data);
        b->tokens[i] = text;
        uint64_t place = hash_of(text.data, text.size);
        while (b->by_text[place & b->text_mask] >= 0)
            place++;
        b->by_text[place & b->text_mask] = i;
    }
    return 0;
}

/* "left right" of two tokens whose joint is one. */
static int read_merge(bpe *b, gguf_text text, int32_t rank, trouble *t)
{
    const char *space = text.size < 1024 ? memchr(text.data, ' ', text.size) : NULL;
    const size_t left = space ? (size_t)(space - text.data) : 0;
    char joint[1024];
    merge m = {-1, -1, rank, -1};
    if (space) {
        memcpy(joint, text.data, left);
        memcpy(joint + left, space + 1, text.size - left - 1);
        m.left = bpe_find(b, text.data, left);
        m.right = bpe_find(b, space + 1, text.size - left - 1);
        m.whole = bpe_find(b, joint, text.size - 1);
    }
    if (m.left < 0 || m.right < 0 || m.whole < 0)
        return refuse(t,
                      "%s: tokenizer.ggml.merges: number %d: got \"%.*s\", expected two tokens "
                      "whose joint is one",
                      b->file, rank, (int)(text.size < 64 ? text.size : 64), text.data);
    merge *place = place_of(b, m.left, m.right);
    if (place->left < 0)
        *place = m;
    return 0;
}

static int read_merges(bpe *b, const gguf *g, trouble *t)
{
    const gguf_value *merges;
    if (gguf_array(g, "tokenizer.ggml.merges", GGUF_TEXT, BPE_MOST_TOKENS, &merges, t))
        return -1;
    b->merge_mask = mask_for(merges->count);
    b->merges = malloc((b->merge_mask + 1) * sizeof *b->merges);
    if (!b->merges)
        return refuse(t, "%s: no memory for its merges", g->file);
    memset(b->merges, 0xff, (b->merge_mask + 1) * sizeof *b->merges);
    const uint8_t *at = merges->at;
    for (uint64_t i = 0; i < merges->count; i++)
        if (read_merge(b, gguf_next_text(&at), (int32_t)i, t))
            return -1;
    return 0;
}

static int by_length(const void *x, const void *y, void *of)
{
    const gguf_text *tokens = of;
    const uint64_t a = tokens[*(const int32_t *)x].size, b = tokens[*(const int32_t *)y].size;
    return (a < b) - (a > b);
}

static int find_special(bpe *b, trouble *t)
{
    b->special = malloc(BPE_MOST_SPECIAL * sizeof *b->special);
    if (!b->special)
        return refuse(t, "%s: no memory for its tokens", b->file);
    for (int32_t i = 0; i < b->n; i++) {
        if ((b->types[i] != CONTROL && b->types[i] != USERS) || b->tokens[i].size == 0)
            continue;
        if (b->n_special == BPE_MOST_SPECIAL)
            return refuse(t, "%s: tokenizer.ggml.token_type: got more than %d control tokens",
                          b->file, BPE_MOST_SPECIAL);
        b->special[b->n_special++] = i;
    }
    qsort_r(b->special, (size_t)b->n_special, sizeof *b->special, by_length, b->tokens);
    return 0;
}

static int read_kind(bpe *b, const gguf *g, trouble *t)
{
    const gguf_value *model = gguf_find(g, "tokenizer.ggml.model");
    const gguf_value *pre = gguf_find(g, "tokenizer.ggml.pre");
    gguf_text name = {"", 0}, how = {"", 0};
    const uint8_t *at;
    if (model && model->type == GGUF_TEXT && !model->is_array)
        name = gguf_next_text((at = model->at, &at));
    if (pre && pre->type == GGUF_TEXT && !pre->is_array)
        how = gguf_next_text((at = pre->at, &at));
    b->single_digits = gguf_is(how, "smollm");
    if (!gguf_is(name, "gpt2") || (!b->single_digits && !gguf_is(how, "gpt-2")))
        return refuse(t,
                      "%s: tokenizer.ggml.model and .pre: got \"%.*s\" and \"%.*s\", expected "
                      "\"gpt2\" and \"gpt-2\" or \"smollm\"",
                      g->file, (int)(name.size < 32 ? name.size : 32), name.data,
                      (int)(how.size < 32 ? how.size : 32), how.data);
    return 0;
}

int bpe_make(const gguf *g, bpe **out, trouble *t)
{
    char text[2];
    bpe *b = calloc(1, sizeof *b);
    *out = NULL;
    if (!b)
        return refuse(t, "%s: no memory for its tokens", g->file);
    b->file = g->file;
    if (read_kind(b, g, t) || read_tokens(b, g, t) || read_merges(b, g, t)
        || find_special(b, t)) {
        bpe_free(b);
        return -1;
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        b->of_byte[byte] = bpe_find(b, text, put_code(spelled(byte), text));
        b->byte_of[spelled(byte)] = (uint8_t)byte;
    }
    *out = b;
    return 0;
}

void bpe_free(bpe *b)
{
    if (!b)
        return;
    free(b->tokens);
    free(b->types);
    free(b->by_text);
    free(b->merges);
    free(b->special);
    free(b);
}

int32_t bpe_tokens(const bpe *b)
{
    return b->n;
}

/* ---- a word ---- */

typedef struct pair {
    int32_t rank, at, left, right; /* tokens, as they were when it was found */
} pair;

typedef struct word {
    int32_t *token, *next, *before; /* a list over places; token -1: merged away */
    pair *heap;
    int64_t n_heap;
} word;

static int is_sooner(const pair *a, const pair *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void push(word *w, pair p)
{
    int64_t i = w->n_heap++;
    for (; i > 0 && is_sooner(&p, &w->heap[(i - 1) / 2]); i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = p;
}

static pair pop(word *w)
{
    const pair first = w->heap[0], last = w->heap[--w->n_heap];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < w->n_heap; i = child) {
        if (child + 1 < w->n_heap && is_sooner(&w->heap[child + 1], &w->heap[child]))
            child++;
        if (!is_sooner(&w->heap[child], &last))
            break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = last;
    return first;
}

static void consider(const bpe *b, word *w, int32_t at)
{
    if (at < 0 || w->next[at] < 0)
        return;
    const int32_t left = w->token[at], right = w->token[w->next[at]];
    const merge *m = place_of(b, left, right);
    if (m->left >= 0)
        push(w, (pair){m->rank, at, left, right});
}

/* Merges all that can be; then `token` has the word's tokens where it is not negative. */
static void merge_all(const bpe *b, word *w, int32_t n)
{
    w->n_heap = 0;
    for (int32_t i = 0; i < n; i++) {
        w->next[i] = i + 1 < n ? i + 1 : -1;
        w->before[i] = i - 1;
    }
    for (int32_t i = 0; i < n; i++)
        consider(b, w, i);
    while (w->n_heap) {
        const pair p = pop(w);
        const int32_t right = w->next[p.at];
        if (w->token[p.at] != p.left || right < 0 || w->token[right] != p.right)
            continue; /* one of them has been merged meanwhile */
        w->token[p.at] = place_of(b, p.left, p.right)->whole;
        w->token[right] = -1;
        w->next[p.at] = w->next[right];
        if (w->next[right] >= 0)
            w->before[w->next[right]] = p.at;
        consider(b, w, w->before[p.at]);
        consider(b, w, p.at);
    }
}

/* ---- text ---- */

/* The token that the text begins with as it stands, -1: none. */
static int32_t special_at(const bpe *b, const char *text, size_t bytes)
{
    for (int32_t i = 0; i < b->n_special; i++) {
        const gguf_text token = b->tokens[b->special[i]];
        if (token.size <= bytes && memcmp(token.data, text, token.size) == 0)
            return b->special[i];
    }
    return -1;
}

static int encode_word(const bpe *b, word *w, const char *text, size_t bytes, int32_t *out,
                       int64_t *n, trouble *t)
{
    for (size_t i = 0; i < bytes; i++) {
        w->token[i] = b->of_byte[(unsigned char)text[i]];
        if (w->token[i] < 0)
            return refuse(t, "text: got byte 0x%02x, for which %s has no token",
                          (unsigned char)text[i], b->file);
    }
    merge_all(b, w, (int32_t)bytes);
    for (size_t i = 0; i < bytes; i++)
        if (w->token[i] >= 0)
            out[(*n)++] = w->token[i];
    return 0;
}

static int encode_plain(const bpe *b, word *w, const char *text, size_t bytes, int32_t *out,
                        int64_t *n, trouble *t)
{
    for (size_t at = 0; at < bytes;) {
        const size_t length = first_word(text + at, bytes - at, b->single_digits);
        if (encode_word(b, w, text + at, length, out, n, t))
            return -1;
        at += length;
    }
    return 0;
}

static int encode_all(const bpe *b, word *w, const char *text, size_t bytes, int32_t *out,
                      int64_t *n, trouble *t)
{
    size_t from = 0, at = 0;
    while (at < bytes) {
        const int32_t special = special_at(b, text + at, bytes - at);
        if (special < 0) {
            at++;
            continue;
        }
        if (encode_plain(b, w, text + from, at - from, out, n, t))
            return -1;
        out[(*n)++] = special;
        from = at += b->tokens[special].size;
    }
    return encode_plain(b, w, text + from, bytes - from, out, n, t);
}

int bpe_encode(const bpe *b, const char *text, size_t bytes, int32_t *out, int64_t *n,
               trouble *t)
{
    *n = 0;
    if (bytes > 1 << 28)
        return refuse(t, "text: got %zu bytes, expected at most 2^28", bytes);
    /* a word of n bytes has n - 1 pairs at first, and 2 come with each of n - 1 merges */
    word w = {malloc((bytes + 1) * sizeof(int32_t)), malloc((bytes + 1) * sizeof(int32_t)),
              malloc((bytes + 1) * sizeof(int32_t)), malloc((3 * bytes + 1) * sizeof(pair)), 0};
    int status = -1;
    if (w.token && w.next && w.before && w.heap)
        status = encode_all(b, &w, text, bytes, out, n, t);
    else
        refuse(t, "text: no memory for the tokens of %zu bytes", bytes);
    free(w.token);
    free(w.next);
    free(w.before);
    free(w.heap);
    return status;
}

size_t bpe_decode(const bpe *b, int32_t token, char *out, size_t room)
{
    size_t n = 0;
    if (token < 0 || token >= b->n || b->types[token] == CONTROL)
        return 0;
    const gguf_text text = b->tokens[token];
    for (uint64_t i = 0; i < text.size && n < room; i++) {
        const uint32_t c = (unsigned char)text.data[i];
        const int is_two = c >> 5 == 6 && i + 1 < text.size && b->types[token] != USERS;
        const uint32_t code = is_two ? (c & 31) << 6 | (text.data[i + 1] & 63) : c;
        i += (uint64_t)is_two;
        out[n++] = is_two && code < 324 ? (char)b->byte_of[code] : (char)c;
    }
    return n;
}
