/* Pages of machine code. */
#include "cpu/jit/jit_page.h"

#include "saccade_config.h"

#if HAVE_ZYDIS
#include <Zydis/Zydis.h>
#endif

#include <assert.h>
#include <string.h>
#include <sys/mman.h>

static size_t whole_pages(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

saccade_status jit_page_begin(size_t capacity, jit_page *out, saccade_error *err)
{
    const size_t size = whole_pages(capacity);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FAIL_IF(page == MAP_FAILED, SACCADE_ENOMEM, "jit: no memory for %zu bytes of code", size);
    *out = (jit_page){page, size};
    return SACCADE_OK;
}

saccade_status jit_page_end(jit_page *page, size_t size, saccade_error *err)
{
    const size_t used = whole_pages(size);
    assert(used <= page->size);
    if (used < page->size && munmap(page->bytes + used, page->size - used) == 0)
        page->size = used;
    FAIL_IF(mprotect(page->bytes, page->size, PROT_READ | PROT_EXEC) != 0, SACCADE_EBACKEND,
            "jit: the system allows no executable memory, the interpreter runs mods");
    return SACCADE_OK;
}

void jit_page_destroy(jit_page *page)
{
    if (page->bytes)
        munmap(page->bytes, page->size);
    page->bytes = NULL;
}

#if HAVE_ZYDIS
void jit_page_print(const jit_page *page, size_t begin, size_t size, const char *last,
                    strbuf *out)
{
    const uint8_t *from = page->bytes + begin, *at = from, *end = from + size;
    ZydisDisassembledInstruction line;
    int is_last = 0;
    while (
        at < end && !is_last
        && ZYAN_SUCCESS(ZydisDisassembleIntel(ZYDIS_MACHINE_MODE_LONG_64, (ZyanU64)(at - from),
                                              at, (ZyanUSize)(end - at), &line))) {
        strbuf_printf(out, "  %04llx  %s\n", (unsigned long long)line.runtime_address,
                      line.text);
        at += line.info.length;
        is_last = last && strstr(line.text, last);
    }
}
#else
void jit_page_print(const jit_page *page, size_t begin, size_t size, const char *last,
                    strbuf *out)
{
    (void)page, (void)begin, (void)size, (void)last, (void)out;
}
#endif
