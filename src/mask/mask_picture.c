/* Pictures of block masks, drawn with block characters or as SVG, one rectangle per stretch of
 * equal cells, stretches of equal rows joined. */
#include "mask/picture.h"

#include "base/status.h"

/* ---- text ---- */

/* Characters are about twice as high as wide: a small mask gets two for each block. */
static saccade_status draw_text(const saccade_block_mask *mask, int64_t b, int64_t h,
                                int32_t columns, strbuf *out, saccade_error *err)
{
    static const char *const marks[] = {" ", "▒", "█"};
    const mask_runs *runs = mask_own_runs(mask);
    const int64_t width = picture_text_width(columns), most = 4 * width;
    const int per_block = 2 * runs->columns <= width ? 2 : 1;
    const int64_t cells = runs->columns < width ? runs->columns : width;
    const int64_t height = (runs->rows * cells + runs->columns * 2 - 1) / (runs->columns * 2);
    picture p;
    TRY(picture_make(runs, b, h, width, per_block == 2 || height > most ? most : height, &p,
                     err));
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

static saccade_status image_cells(const saccade_block_mask *mask, int64_t b, int64_t h,
                                  int32_t columns, picture *p, int *scale, saccade_error *err)
{
    const mask_runs *runs = mask_own_runs(mask);
    const picture_size size =
        picture_image_size(picture_image_width(columns), runs->rows, runs->columns);
    *scale = size.scale;
    return picture_make(runs, b, h, size.width, size.height, p, err);
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
    picture_open_svg(&p, scale, ".f{fill:#1f4e79}.p{fill:#9dc3e6}", out);
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
    FAIL_AT(!mask || !bytes || !size, SACCADE_EINVAL, "render", 0, 0,
            "got NULL, expected a mask and results");
    FAIL_AT(b < 0 || h < 0 || b >= mask->view.sizes.B || h >= mask->view.sizes.H,
            SACCADE_EINVAL, "render", 0, 0, "got b %lld h %lld, expected below %lld and %lld",
            (long long)b, (long long)h, (long long)mask->view.sizes.B,
            (long long)mask->view.sizes.H);
    FAIL_AT(format != SACCADE_TEXT && format != SACCADE_SVG && format != SACCADE_PNG,
            SACCADE_EINVAL, "render", 0, 0, "got format %d, expected text, SVG or PNG",
            (int)format);
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
