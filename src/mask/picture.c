/* What pictures of block masks share: cells that count blocks, and how large a picture is. */
#include "mask/picture.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

enum {
    TEXT_WIDTH = 64,
    TEXT_MAX = 500, /* characters */
    IMAGE_WIDTH = 512,
    IMAGE_MAX = 2048 /* pixels */
};

/* ---- sizes ---- */

int64_t picture_text_width(int32_t columns)
{
    return columns < 1 ? TEXT_WIDTH : smaller(columns, TEXT_MAX);
}

int64_t picture_image_width(int32_t columns)
{
    return columns < 1 ? IMAGE_WIDTH : smaller(columns, IMAGE_MAX);
}

picture_size picture_image_size(int64_t width, int64_t rows, int64_t columns)
{
    picture_size s = {.width = smaller(width, columns), .scale = 1};
    if (columns < width)
        s.scale = (int)(width / columns);
    s.height = smaller(rows, rows * width / columns);
    s.height = smaller(s.height, IMAGE_MAX / s.scale);
    s.height = s.height < 1 ? 1 : s.height;
    return s;
}

void picture_open_svg(const picture *p, int scale, const char *style, strbuf *out)
{
    const long long width = p->width * scale, height = p->height * scale;
    strbuf_printf(out,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%lld\" height=\"%lld\" "
                  "viewBox=\"0 0 %lld %lld\" shape-rendering=\"crispEdges\">\n",
                  width, height, width, height);
    if (style[0])
        strbuf_printf(out, "<style>%s</style>\n", style);
    strbuf_printf(out, "<rect width=\"%lld\" height=\"%lld\" fill=\"#fff\" stroke=\"#888\"/>\n",
                  width, height);
}

/* ---- cells ---- */

/* Blocks of one line of cells, counted per cell. */
typedef struct line_counts {
    int64_t width, columns;
    int64_t *full, *live;
} line_counts;

static int64_t cell_start(int64_t cell, int64_t cells, int64_t blocks)
{
    return cell * blocks / cells;
}

/* The cell that a block lies in. */
static int64_t cell_of(int64_t block, int64_t cells, int64_t blocks)
{
    return ((block + 1) * cells - 1) / blocks;
}

static void count_run(line_counts *line, const saccade_run *run)
{
    const int64_t first = run->first, past = first + run->count;
    for (int64_t c = cell_of(first, line->width, line->columns); c < line->width; c++) {
        const int64_t from = cell_start(c, line->width, line->columns);
        const int64_t to = cell_start(c + 1, line->width, line->columns);
        if (from >= past)
            return;
        const int64_t n = (past < to ? past : to) - (first > from ? first : from);
        line->live[c] += n;
        line->full[c] += run->full ? n : 0;
    }
}

static void settle_line(const line_counts *line, int64_t rows, uint8_t *cell)
{
    for (int64_t c = 0; c < line->width; c++) {
        const int64_t blocks = rows
                               * (cell_start(c + 1, line->width, line->columns)
                                  - cell_start(c, line->width, line->columns));
        cell[c] = line->live[c] == 0        ? CELL_EMPTY
                  : line->full[c] == blocks ? CELL_FULL
                                            : CELL_PARTIAL;
    }
}

saccade_status picture_make(const mask_runs *runs, int64_t b, int64_t h, int64_t width,
                            int64_t height, picture *out, saccade_error *err)
{
    picture p = {.width = width < runs->columns ? width : runs->columns,
                 .height = height < runs->rows ? height : runs->rows};
    saccade_status status = SACCADE_OK;
    line_counts line = {.width = p.width, .columns = runs->columns};
    p.cell = malloc((size_t)(p.width * p.height));
    line.full = malloc((size_t)p.width * 2 * sizeof *line.full);
    FAIL_IF_GOTO(!p.cell || !line.full, SACCADE_ENOMEM, "out of memory");
    line.live = line.full + p.width;
    for (int64_t y = 0; y < p.height; y++) {
        const int64_t from = cell_start(y, p.height, runs->rows);
        const int64_t to = cell_start(y + 1, p.height, runs->rows);
        memset(line.full, 0, (size_t)p.width * 2 * sizeof *line.full);
        for (int64_t row = from; row < to; row++) {
            const saccade_run *run;
            const int64_t n = runs_row(runs, b, h, row, &run);
            for (int64_t i = 0; i < n; i++)
                count_run(&line, &run[i]);
        }
        settle_line(&line, to - from, p.cell + y * p.width);
    }
    *out = p;
out:
    free(line.full);
    if (status != SACCADE_OK)
        free(p.cell);
    return status;
}

void picture_free(picture *p)
{
    free(p->cell);
}
