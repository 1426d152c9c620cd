/* roofline_svg.h: the ladder drawn under this machine's limits. */
#ifndef SACCADE_CLI_ROOFLINE_SVG_H
#define SACCADE_CLI_ROOFLINE_SVG_H

#include "saccade_measure.h"

#include <stdio.h>

enum { ROOFLINE_POINTS = 32 };

/* Of one core. */
typedef struct roofline_limits {
    double bytes_per_second;        /* reading memory */
    double scalar_flops, fma_flops; /* FLOP/s of scalar code, of the widest multiply-add */
} roofline_limits;

/* Draws n <= ROOFLINE_POINTS timed rows as numbered points; `title` goes above. */
void roofline_draw(FILE *out, const roofline_limits *limits, const saccade_ladder_row *rows,
                   int n, const char *title);
/* FLOP/s that the limits allow at this many FLOPs a byte, with scalar arithmetic. */
double roofline_at(const roofline_limits *limits, double intensity);

#endif
