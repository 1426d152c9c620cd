/* Fast hashes for keys and checksums; not for use against an adversary. Values are the same on
   every machine of the same byte order. */
#ifndef SACCADE_BASE_HASH_H
#define SACCADE_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

enum { HASH_HEX_SIZE = 33 }; /* 128 bits in hex and the terminating 0 */

typedef struct hash128 {
    uint64_t a, b;
} hash128;

/* a key of several pieces: init, add each (its length counts too, so "ab","c" differs from
   "a","bc"), then read hex. Reading doesn't end it. */
void hash_init(hash128 *h);
void hash_add(hash128 *h, const void *bytes, size_t size);
void hash_add_text(hash128 *h, const char *text);
void hash_hex(const hash128 *h, char hex[HASH_HEX_SIZE]);

#endif
