/* roofline_svg.h: the ladder drawn under this machine's limits. */
#ifndef SACCADE_CLI_ROOFLINE_SVG_H
#define SACCADE_CLI_ROOFLINE_SVG_H

#include "saccade.h"

#include <stdio.h>

enum { ROOFLINE_POINTS = 32 };

/* Draws n <= ROOFLINE_POINTS timed rows as numbered points; `title` goes above. */
void roofline_draw(FILE *out, const saccade_roofline *limits, const saccade_ladder_row *rows,
                   int n, const char *title);
/* FLOP/s that the limits allow at this many FLOPs a byte, with scalar arithmetic. */
double roofline_at(const saccade_roofline *limits, double intensity);

#endif
