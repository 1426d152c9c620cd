/* What libsaccade.a calls of other libraries, refused: linked with -static where those have no
 * archive. An encoder that encodes nothing leaves mods to the interpreter, as a system that
 * allows no executable memory does. */
#include <stdint.h>

#if ABSENT_ZYDIS
static const uint32_t refused = 0x80000000u; /* the bit of ZyanStatus that says failed */

uint32_t ZydisEncoderEncodeInstruction(const void *request, void *buffer, void *length);
uint32_t ZydisDisassembleIntel(int mode, uint64_t address, const void *buffer, uint64_t length,
                               void *out);

uint32_t ZydisEncoderEncodeInstruction(const void *request, void *buffer, void *length)
{
    (void)request, (void)buffer, (void)length;
    return refused;
}

uint32_t ZydisDisassembleIntel(int mode, uint64_t address, const void *buffer, uint64_t length,
                               void *out)
{
    (void)mode, (void)address, (void)buffer, (void)length, (void)out;
    return refused;
}
#endif

#if ABSENT_PNG
#include <png.h>
#include <string.h>

int png_image_write_to_memory(png_imagep image, void *memory, png_alloc_size_t *bytes, int to_8,
                              const void *buffer, png_int_32 stride, const void *colormap)
{
    (void)memory, (void)bytes, (void)to_8, (void)buffer, (void)stride, (void)colormap;
    strcpy(image->message, "libpng is not linked into this program");
    return 0;
}
#endif
