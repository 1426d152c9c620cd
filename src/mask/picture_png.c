/* PNG of a picture's cells by libpng, into memory; EBACKEND when built without it. */
#include "mask/picture.h"

#include "base/status.h"
#include "saccade_config.h"

#include <stdlib.h>
#include <string.h>

#if HAVE_PNG
#include <png.h>

/* One row of pixels, one byte each: an index into the palette. */
static void fill_row(const picture *p, int64_t y, int scale, uint8_t *row)
{
    for (int64_t x = 0; x < p->width; x++)
        memset(row + x * scale, p->cell[y * p->width + x], (size_t)scale);
}

/* libpng tells by words alone: "out of memory", "insufficient memory", or zlib's return code
   where that could not be set up. */
static saccade_status fail_of(const char *message, saccade_error *err)
{
    FAIL_IF(strstr(message, "memory") || strstr(message, "zlib"), SACCADE_ENOMEM,
            "out of memory for a PNG");
    FAIL_AT(1, SACCADE_EINTERNAL, "png", 0, 0, "%s", message);
}

saccade_status picture_png(const picture *p, int scale, const uint8_t *palette, int colours,
                           void **bytes, size_t *size, saccade_error *err)
{
    png_image image = {.version = PNG_IMAGE_VERSION,
                       .format = PNG_FORMAT_RGB_COLORMAP,
                       .colormap_entries = (png_uint_32)colours};
    const int64_t width = p->width * scale, height = p->height * scale;
    saccade_status status = SACCADE_OK;
    png_alloc_size_t wanted = 0;
    void *file = NULL;
    uint8_t *pixels = malloc((size_t)(width * height));
    FAIL_IF_NULL(pixels);
    image.width = (png_uint_32)width;
    image.height = (png_uint_32)height;
    for (int64_t y = 0; y < height; y++)
        fill_row(p, y / scale, scale, pixels + y * width);
    wanted = PNG_IMAGE_PNG_SIZE_MAX(image);
    file = malloc(wanted);
    FAIL_IF_NULL_GOTO(file);
    if (!png_image_write_to_memory(&image, file, &wanted, 0, pixels, 0, palette))
        status = fail_of(image.message, err);
out:
    free(pixels);
    if (status == SACCADE_OK) {
        *bytes = file;
        *size = wanted;
    } else {
        free(file);
    }
    return status;
}

#else

saccade_status picture_png(const picture *p, int scale, const uint8_t *palette, int colours,
                           void **bytes, size_t *size, saccade_error *err)
{
    (void)p, (void)scale, (void)palette, (void)colours, (void)bytes, (void)size;
    FAIL_AT(1, SACCADE_EBACKEND, "png", 0, 0,
            "the library was built without libpng; SVG needs nothing");
}

#endif
