/* Pictures of block masks: reduced to cells, then drawn with block characters or as SVG, one
 * rectangle per stretch of equal cells, stretches of equal rows joined. */
#include "mask/picture.h"

#include "base/status.h"

#include <stdlib.h>
#include <string.h>

enum {
    TEXT_WIDTH = 64,
    TEXT_MAX = 500, /* characters */
    IMAGE_WIDTH = 512,
    IMAGE_MAX = 2048 /* pixels */
};

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

/* ---- text ---- */

static int32_t wanted(int32_t columns, int32_t usual, int32_t most)
{
    return columns < 1 ? usual : columns > most ? most : columns;
}

/* Characters are about twice as high as wide: a small mask gets two for each block. */
static saccade_status draw_text(const saccade_block_mask *mask, int64_t b, int64_t h,
                                int32_t columns, strbuf *out, saccade_error *err)
{
    static const char *const marks[] = {" ", "▒", "█"};
    const mask_runs *runs = mask_own_runs(mask);
    const int64_t width = wanted(columns, TEXT_WIDTH, TEXT_MAX);
    const int per_block = 2 * runs->columns <= width ? 2 : 1;
    const int64_t cells = runs->columns < width ? runs->columns : width;
    const int64_t height = (runs->rows * cells + runs->columns * 2 - 1) / (runs->columns * 2);
    picture p;
    TRY(picture_make(runs, b, h, width, per_block == 2 ? 4 * width : height, &p, err));
    for (int64_t y = 0; y < p.height; y++) {
        for (int64_t x = 0; x < p.width * per_block; x++)
            strbuf_puts(out, marks[p.cell[y * p.width + x / per_block]]);
        strbuf_putc(out, '\n');
    }
    strbuf_printf(out,
                  "%lld x %lld positions, blocks of %d x %d: █ full  ▒ partial  blank "
                  "empty\n",
                  (long long)mask->view.sizes.Q, (long long)mask->view.sizes.KV, runs->block_q,
                  runs->block_kv);
    picture_free(&p);
    return strbuf_status(out, err);
}

/* ---- images ---- */

/* Cells and pixels per cell of an image of about `columns` pixels. */
static saccade_status image_cells(const saccade_block_mask *mask, int64_t b, int64_t h,
                                  int32_t columns, picture *p, int *scale, saccade_error *err)
{
    const mask_runs *runs = mask_own_runs(mask);
    const int64_t width = wanted(columns, IMAGE_WIDTH, IMAGE_MAX);
    const int64_t high = runs->rows * width / runs->columns;
    const int64_t height = high < 1 ? 1 : high > 2 * IMAGE_MAX ? 2 * IMAGE_MAX : high;
    *scale = runs->columns < width ? (int)(width / runs->columns) : 1;
    return picture_make(runs, b, h, width, height, p, err);
}

/* How many rows from y on have the stretch [x, past) of this kind, and have not been drawn. */
static int64_t rows_alike(const picture *p, int64_t x, int64_t past, int64_t y, int kind)
{
    int64_t rows = 1;
    for (; y + rows < p->height; rows++) {
        const uint8_t *line = p->cell + (y + rows) * p->width;
        if ((x > 0 && line[x - 1] == kind) || (past < p->width && line[past] == kind))
            return rows;
        for (int64_t c = x; c < past; c++)
            if (line[c] != kind)
                return rows;
    }
    return rows;
}

/* Was this stretch drawn with the row above? */
static int is_continued(const picture *p, int64_t x, int64_t past, int64_t y, int kind)
{
    if (y == 0)
        return 0;
    const uint8_t *line = p->cell + (y - 1) * p->width;
    if ((x > 0 && line[x - 1] == kind) || (past < p->width && line[past] == kind))
        return 0;
    for (int64_t c = x; c < past; c++)
        if (line[c] != kind)
            return 0;
    return 1;
}

static void draw_line(const picture *p, int64_t y, int scale, strbuf *out)
{
    static const char *const classes[] = {"", "p", "f"};
    for (int64_t x = 0, past; x < p->width; x = past) {
        const int kind = p->cell[y * p->width + x];
        for (past = x + 1; past < p->width && p->cell[y * p->width + past] == kind;)
            past++;
        if (kind == CELL_EMPTY || is_continued(p, x, past, y, kind))
            continue;
        strbuf_printf(out,
                      "<rect class=\"%s\" x=\"%lld\" y=\"%lld\" width=\"%lld\" "
                      "height=\"%lld\"/>\n",
                      classes[kind], (long long)(x * scale), (long long)(y * scale),
                      (long long)((past - x) * scale),
                      (long long)(rows_alike(p, x, past, y, kind) * scale));
    }
}

static saccade_status draw_svg(const saccade_block_mask *mask, int64_t b, int64_t h,
                               int32_t columns, strbuf *out, saccade_error *err)
{
    picture p;
    int scale;
    TRY(image_cells(mask, b, h, columns, &p, &scale, err));
    const long long width = p.width * scale, height = p.height * scale;
    strbuf_printf(out,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%lld\" height=\"%lld\" "
                  "viewBox=\"0 0 %lld %lld\" shape-rendering=\"crispEdges\">\n"
                  "<style>.f{fill:#1f4e79}.p{fill:#9dc3e6}</style>\n"
                  "<rect width=\"%lld\" height=\"%lld\" fill=\"#fff\" stroke=\"#888\"/>\n",
                  width, height, width, height, width, height);
    for (int64_t y = 0; y < p.height; y++)
        draw_line(&p, y, scale, out);
    strbuf_puts(out, "</svg>\n");
    picture_free(&p);
    return strbuf_status(out, err);
}

static saccade_status draw_png(const saccade_block_mask *mask, int64_t b, int64_t h,
                               int32_t columns, void **bytes, size_t *size, saccade_error *err)
{
    static const uint8_t palette[] = {255, 255, 255, 0x9d, 0xc3, 0xe6, 0x1f, 0x4e, 0x79};
    picture p;
    int scale;
    TRY(image_cells(mask, b, h, columns, &p, &scale, err));
    const saccade_status status = picture_png(&p, scale, palette, 3, bytes, size, err);
    picture_free(&p);
    return status;
}

saccade_status saccade_block_mask_render(const saccade_block_mask *mask, int64_t b, int64_t h,
                                         saccade_picture format, int32_t columns, void **bytes,
                                         size_t *size, saccade_error *err)
{
    strbuf text;
    FAIL_IF(!mask || !bytes || !size, SACCADE_EINVAL, "render: got NULL");
    FAIL_IF(b < 0 || h < 0 || b >= mask->view.sizes.B || h >= mask->view.sizes.H,
            SACCADE_EINVAL, "render: got b %lld h %lld, expected below %lld and %lld",
            (long long)b, (long long)h, (long long)mask->view.sizes.B,
            (long long)mask->view.sizes.H);
    FAIL_IF(format != SACCADE_TEXT && format != SACCADE_SVG && format != SACCADE_PNG,
            SACCADE_EINVAL, "render: got format %d, expected text, SVG or PNG", (int)format);
    if (format == SACCADE_PNG)
        return draw_png(mask, b, h, columns, bytes, size, err);
    strbuf_init(&text, 0);
    const saccade_status status = format == SACCADE_TEXT
                                      ? draw_text(mask, b, h, columns, &text, err)
                                      : draw_svg(mask, b, h, columns, &text, err);
    if (status == SACCADE_OK) {
        *size = text.length;
        *bytes = strbuf_steal(&text);
    }
    strbuf_free(&text);
    return status;
}
