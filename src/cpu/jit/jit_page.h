/* jit_page.h: pages of machine code: written while they are writable, run after they have
 * become executable instead; never both. */
#ifndef SACCADE_CPU_JIT_JIT_PAGE_H
#define SACCADE_CPU_JIT_JIT_PAGE_H

#include "base/status.h"
#include "base/strings.h"

#include <stddef.h>
#include <stdint.h>

typedef struct jit_page {
    uint8_t *bytes; /* NULL: none */
    size_t size;
} jit_page;

/* Room for code, all 0, to be written from its front on. */
saccade_status jit_page_begin(size_t capacity, jit_page *out, saccade_error *err);
/* The first `size` bytes become executable, the rest goes back. EBACKEND: the system allows no
 * executable memory. */
saccade_status jit_page_end(jit_page *page, size_t size, saccade_error *err);
void jit_page_destroy(jit_page *page);
/* Disassembly of size bytes from begin on, up to the first line with `last` in it (NULL: all of
 * it); nothing where there is no decoder. */
void jit_page_print(const jit_page *page, size_t begin, size_t size, const char *last,
                    strbuf *out);

#endif
