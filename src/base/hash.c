/* Two multiply-and-rotate lanes over 8-byte words, each step a bijection of the state, closed
   by the 64-bit finaliser of MurmurHash3 (Appleby, public domain), which spreads every bit. */
#include "base/hash.h"

#include <stdio.h>
#include <string.h>

static const uint64_t K1 = UINT64_C(0x9e3779b97f4a7c15); /* 2^64 / golden ratio */
static const uint64_t K2 = UINT64_C(0xc2b2ae3d27d4eb4f); /* odd, bits well spread */

static uint64_t rotl(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

static uint64_t finish(uint64_t x)
{
    x = (x ^ x >> 33) * UINT64_C(0xff51afd7ed558ccd);
    x = (x ^ x >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return x ^ x >> 33;
}

static void step(hash128 *h, uint64_t word)
{
    h->a = (rotl(h->a ^ word * K1, 29)) * K2;
    h->b = (rotl(h->b + word * K2, 37)) * K1 ^ h->a;
}

void hash_init(hash128 *h)
{
    h->a = K2;
    h->b = K1;
}

void hash_add(hash128 *h, const void *bytes, size_t size)
{
    const unsigned char *p = bytes;
    uint64_t word;
    size_t left = size;
    for (; left >= sizeof word; left -= sizeof word, p += sizeof word) {
        memcpy(&word, p, sizeof word);
        step(h, word);
    }
    word = 0;
    if (left != 0)
        memcpy(&word, p, left);
    step(h, word);
    step(h, size);
}

void hash_add_text(hash128 *h, const char *text)
{
    hash_add(h, text, strlen(text));
}

void hash_hex(const hash128 *h, char hex[HASH_HEX_SIZE])
{
    const uint64_t a = finish(h->a + rotl(h->b, 32));
    const uint64_t b = finish(h->b ^ a);
    snprintf(hex, HASH_HEX_SIZE, "%016llx%016llx", (unsigned long long)a,
             (unsigned long long)b);
}
