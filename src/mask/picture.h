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

/* One (b, h), at most width x height cells. */
saccade_status picture_make(const mask_runs *runs, int64_t b, int64_t h, int64_t width,
                            int64_t height, picture *out, saccade_error *err);
void picture_free(picture *p);

/* ---- picture_png.c ---- */

/* PNG of the cells, each `scale` pixels wide and high and of the colour that its value names:
 * red, green and blue in a palette of at most 256; *bytes from malloc. */
saccade_status picture_png(const picture *p, int scale, const uint8_t *palette, int colours,
                           void **bytes, size_t *size, saccade_error *err);

#endif
