/* Pictures of shard plans: the block mask's cells, each row in its rank's colour, darker where
 * whole blocks count; in text a letter, small where a block counts in part. */
#include "dist/shard.h"

#include "base/integers.h"
#include "base/status.h"
#include "base/strings.h"
#include "mask/picture.h"

#include <stdlib.h>
#include <string.h>

enum { COLOURS = 8 };

/* Light and dark of each rank; ranks further on begin again. */
static const uint8_t palette[1 + 2 * COLOURS][3] = {
    {255, 255, 255},    {0x9d, 0xc3, 0xe6}, {0x1f, 0x4e, 0x79}, {0xf4, 0xb1, 0x83},
    {0xb4, 0x55, 0x0e}, {0xa9, 0xd1, 0x8e}, {0x37, 0x66, 0x1f}, {0xd5, 0xb2, 0xe0},
    {0x6b, 0x2f, 0x80}, {0xff, 0xd9, 0x66}, {0x8a, 0x6a, 0x00}, {0x9f, 0xdf, 0xda},
    {0x13, 0x6f, 0x69}, {0xf2, 0xa6, 0xb8}, {0x9c, 0x1d, 0x3c}, {0xc4, 0xc4, 0xc4},
    {0x4d, 0x4d, 0x4d},
};

/* Everything is live. */
static saccade_status whole_cells(const saccade_shard_plan *plan, int64_t width, int64_t height,
                                  picture *out, saccade_error *err)
{
    picture p = {.width = smaller(width, plan->key_chunks),
                 .height = smaller(height, plan->chunks)};
    p.cell = malloc((size_t)(p.width * p.height));
    FAIL_IF_NULL(p.cell);
    memset(p.cell, CELL_FULL, (size_t)(p.width * p.height));
    *out = p;
    return SACCADE_OK;
}

static saccade_status cells_of(const saccade_shard_plan *plan, const saccade_block_mask *mask,
                               int64_t b, int64_t h, int64_t width, int64_t height,
                               picture *out, saccade_error *err)
{
    if (!mask)
        return whole_cells(plan, width, height, out, err);
    return picture_make(mask_own_runs(mask), b, h, width, height, out, err);
}

/* The rank of the row in the middle of a line of cells. */
static int32_t rank_of(const saccade_shard_plan *plan, const picture *p, int64_t y)
{
    const int64_t row = (2 * y + 1) * plan->options.Q / (2 * p->height);
    return plan->owner[row / plan->options.chunk];
}

/* ---- text ---- */

static saccade_status draw_text(const saccade_shard_plan *plan, const saccade_block_mask *mask,
                                int64_t b, int64_t h, int32_t columns, strbuf *out,
                                saccade_error *err)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const int64_t width = picture_text_width(columns);
    picture p;
    TRY(cells_of(plan, mask, b, h, width, (width + 1) / 2, &p, err));
    for (int64_t y = 0; y < p.height; y++) {
        const char letter = letters[rank_of(plan, &p, y) % 26];
        for (int64_t x = 0; x < p.width; x++) {
            const int kind = p.cell[y * p.width + x];
            strbuf_putc(out, kind == CELL_FULL      ? letter
                             : kind == CELL_PARTIAL ? (char)(letter - 'A' + 'a')
                                                    : '.');
        }
        strbuf_putc(out, '\n');
    }
    strbuf_puts(out, "A is rank 0, B rank 1 ...; capital full, small partial, . empty\n");
    picture_free(&p);
    return strbuf_status(out, err);
}

/* ---- images ---- */

static saccade_status image_cells(const saccade_shard_plan *plan,
                                  const saccade_block_mask *mask, int64_t b, int64_t h,
                                  int32_t columns, picture *p, int *scale, saccade_error *err)
{
    const mask_runs *runs = mask ? mask_own_runs(mask) : NULL;
    const picture_size size =
        picture_image_size(picture_image_width(columns), runs ? runs->rows : plan->chunks,
                           runs ? runs->columns : plan->key_chunks);
    TRY(cells_of(plan, mask, b, h, size.width, size.height, p, err));
    *scale = size.scale;
    for (int64_t y = 0; y < p->height; y++) {
        const int32_t rank = rank_of(plan, p, y) % COLOURS;
        for (int64_t x = 0; x < p->width; x++) {
            uint8_t *cell = &p->cell[y * p->width + x];
            *cell = *cell == CELL_EMPTY ? 0 : (uint8_t)(1 + 2 * rank + (*cell == CELL_FULL));
        }
    }
    return SACCADE_OK;
}

static void draw_line(const picture *p, int64_t y, int scale, strbuf *out)
{
    for (int64_t x = 0, past; x < p->width; x = past) {
        const int colour = p->cell[y * p->width + x];
        for (past = x + 1; past < p->width && p->cell[y * p->width + past] == colour;)
            past++;
        if (!colour)
            continue;
        const uint8_t *c = palette[colour];
        strbuf_printf(out,
                      "<rect fill=\"#%02x%02x%02x\" x=\"%lld\" y=\"%lld\" width=\"%lld\" "
                      "height=\"%d\"/>\n",
                      c[0], c[1], c[2], (long long)(x * scale), (long long)(y * scale),
                      (long long)((past - x) * scale), scale);
    }
}

static saccade_status draw_svg(const picture *p, int scale, strbuf *out, saccade_error *err)
{
    picture_open_svg(p, scale, "", out);
    for (int64_t y = 0; y < p->height; y++)
        draw_line(p, y, scale, out);
    strbuf_puts(out, "</svg>\n");
    return strbuf_status(out, err);
}

/* ---- the call ---- */

static saccade_status draw(const saccade_shard_plan *plan, const saccade_block_mask *mask,
                           int64_t b, int64_t h, saccade_picture format, int32_t columns,
                           strbuf *text, saccade_error *err)
{
    picture p;
    int scale;
    if (format == SACCADE_TEXT)
        return draw_text(plan, mask, b, h, columns, text, err);
    TRY(image_cells(plan, mask, b, h, columns, &p, &scale, err));
    const saccade_status status = draw_svg(&p, scale, text, err);
    picture_free(&p);
    return status;
}

static saccade_status draw_png(const saccade_shard_plan *plan, const saccade_block_mask *mask,
                               int64_t b, int64_t h, int32_t columns, void **bytes,
                               size_t *size, saccade_error *err)
{
    picture p;
    int scale;
    TRY(image_cells(plan, mask, b, h, columns, &p, &scale, err));
    const saccade_status status =
        picture_png(&p, scale, palette[0], 1 + 2 * COLOURS, bytes, size, err);
    picture_free(&p);
    return status;
}

saccade_status saccade_shard_render(const saccade_shard_plan *plan,
                                    const saccade_block_mask *mask, int64_t b, int64_t h,
                                    saccade_picture format, int32_t columns, void **bytes,
                                    size_t *size, saccade_error *err)
{
    strbuf text;
    FAIL_AT(!plan || !bytes || !size, SACCADE_EINVAL, "shard render", 0, 0,
            "got NULL, expected a plan and results");
    FAIL_AT(format != SACCADE_TEXT && format != SACCADE_SVG && format != SACCADE_PNG,
            SACCADE_EINVAL, "shard render", 0, 0, "got format %d, expected text, SVG or PNG",
            (int)format);
    if (mask) {
        const saccade_sizes *s = &mask_get_view(mask)->sizes;
        FAIL_AT(b < 0 || h < 0 || b >= s->B || h >= s->H, SACCADE_EINVAL, "shard render", 0, 0,
                "got b %lld h %lld, expected below %lld and %lld", (long long)b, (long long)h,
                (long long)s->B, (long long)s->H);
        FAIL_AT(s->Q != plan->options.Q || s->KV != plan->options.KV, SACCADE_EINVAL,
                "shard render", 0, 0,
                "got a mask of %lld x %lld positions, expected the plan's", (long long)s->Q,
                (long long)s->KV);
    }
    if (format == SACCADE_PNG)
        return draw_png(plan, mask, b, h, columns, bytes, size, err);
    strbuf_init(&text, 0);
    const saccade_status status = draw(plan, mask, b, h, format, columns, &text, err);
    if (status == SACCADE_OK) {
        *size = text.length;
        *bytes = strbuf_steal(&text);
    }
    strbuf_free(&text);
    return status;
}
