/* Pages of machine code. */
#include "cpu/jit_page.h"

#include <string.h>
#include <sys/mman.h>

saccade_status jit_page_create(const uint8_t *code, size_t size, jit_page *out,
                               saccade_error *err)
{
    out->size = (size + 4095) / 4096 * 4096;
    void *page =
        mmap(NULL, out->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FAIL_IF(page == MAP_FAILED, SACCADE_ENOMEM, "jit: no memory for %zu bytes of code", size);
    out->bytes = page;
    memcpy(page, code, size);
    FAIL_IF(mprotect(page, out->size, PROT_READ | PROT_EXEC) != 0, SACCADE_EBACKEND,
            "jit: the system allows no executable memory, the interpreter runs mods");
    return SACCADE_OK;
}

void jit_page_destroy(jit_page *page)
{
    if (page->bytes)
        munmap(page->bytes, page->size);
    page->bytes = NULL;
}
