/* picture.h: a block mask reduced to a small grid of cells. */
#ifndef SACCADE_MASK_PICTURE_H
#define SACCADE_MASK_PICTURE_H

#include "mask/mask_build.h"

enum { CELL_EMPTY, CELL_PARTIAL, CELL_FULL };

/* A cell joins whole blocks: FULL when all are, EMPTY when all are, else PARTIAL. */
typedef struct picture {
    int64_t width, height;
    uint8_t *cell; /* [height][width] */
} picture;

/* ---- picture.c ---- */

/* Width in characters (text) or pixels (image) for a requested width; 0 means the default. */
int64_t picture_text_width(int32_t columns);
int64_t picture_image_width(int32_t columns);
/* Cells of an image of rows x columns blocks, and pixels per cell: at most `width` wide, as
 * high as its shape asks for within a bound. */
typedef struct picture_size {
    int64_t width, height;
    int scale;
} picture_size;
picture_size picture_image_size(int64_t width, int64_t rows, int64_t columns);
/* One (b, h), at most width x height cells. */
saccade_status picture_make(const mask_runs *runs, int64_t b, int64_t h, int64_t width,
                            int64_t height, picture *out, saccade_error *err);
void picture_free(picture *p);
/* Begins an SVG document of such cells; `style` goes between its style tags. */
void picture_open_svg(const picture *p, int scale, const char *style, strbuf *out);

/* ---- picture_png.c ---- */

/* PNG of the cells, each `scale` pixels wide and high and of the colour that its value names:
 * red, green and blue in a palette of at most 256; *bytes from malloc. */
saccade_status picture_png(const picture *p, int scale, const uint8_t *palette, int colours,
                           void **bytes, size_t *size, saccade_error *err);

#endif
