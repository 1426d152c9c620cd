/* A roofline (Williams, Waterman and Patterson, 2009): FLOP/s over FLOPs per byte, both
 * logarithmic. Memory allows the slope, arithmetic the level lines. Points carry numbers, with
 * names in the list beside; a number that would cover another is moved away and keeps a line
 * to its point. */
#include "roofline_svg.h"

#include <math.h>
#include <string.h>

/* Places in the picture, in pixels. */
enum {
    WIDTH = 1000,
    HEIGHT = 620,
    LEFT = 86,
    RIGHT = 700,
    TOP = 64,
    BOTTOM = 540,
    LIST = 730, /* where the list of names begins */
    LIST_STEP = 26,
    RADIUS = 5, /* of a point */
    HALF = 11,  /* of a number's box */
    TRIES = 240 /* places looked at for one number */
};

typedef struct box {
    double x, y, half_w, half_h;
} box;

typedef struct chart {
    FILE *out;
    double x_lo, x_hi, y_lo, y_hi; /* log10 of the ends of the axes */
    box taken[4 * ROOFLINE_POINTS];
    int n_taken;
} chart;

static double px(const chart *c, double intensity)
{
    return LEFT + (log10(intensity) - c->x_lo) / (c->x_hi - c->x_lo) * (RIGHT - LEFT);
}

static double py(const chart *c, double flops)
{
    return BOTTOM - (log10(flops) - c->y_lo) / (c->y_hi - c->y_lo) * (BOTTOM - TOP);
}

double roofline_at(const roofline_limits *limits, double intensity)
{
    return fmin(limits->bytes_per_second * intensity, limits->scalar_flops);
}

static double speed(const saccade_ladder_row *row)
{
    return (double)row->flops_counted / row->seconds;
}

static const char *color(const saccade_ladder_row *row)
{
    static const char *const colors[][2] = {{"softmax", "#2563eb"},
                                            {"attention", "#b45309"},
                                            {"flash", "#15803d"},
                                            {"decode", "#7e22ce"},
                                            {"backward", "#be123c"}};
    for (size_t i = 0; i < sizeof colors / sizeof colors[0]; i++)
        if (strncmp(row->name, colors[i][0], strlen(colors[i][0])) == 0)
            return colors[i][1];
    return "#333";
}

/* ---- where numbers go ---- */

static int overlaps(const box *a, const box *b)
{
    return fabs(a->x - b->x) < a->half_w + b->half_w
           && fabs(a->y - b->y) < a->half_h + b->half_h;
}

static int is_free(const chart *c, const box *b)
{
    if (b->x - b->half_w < LEFT || b->x + b->half_w > RIGHT || b->y - b->half_h < TOP
        || b->y + b->half_h > BOTTOM)
        return 0;
    for (int i = 0; i < c->n_taken; i++)
        if (overlaps(b, &c->taken[i]))
            return 0;
    return 1;
}

static void occupy(chart *c, box b)
{
    if (c->n_taken < (int)(sizeof c->taken / sizeof c->taken[0]))
        c->taken[c->n_taken++] = b;
}

/* The nearest free place on growing circles around the point. */
static box find_place(chart *c, double x, double y)
{
    for (int i = 0; i < TRIES; i++) {
        const double angle = 0.7854 * (i % 8) - 0.7854, far = 17 + 5.0 * (i / 8);
        const box b = {x + far * cos(angle), y + far * sin(angle), HALF, HALF};
        if (is_free(c, &b))
            return b;
    }
    return (box){x, y, HALF, HALF};
}

/* ---- parts ---- */

static void text(FILE *out, double x, double y, const char *attributes, const char *words)
{
    fprintf(out, "<text x='%.1f' y='%.1f' %s>%s</text>\n", x, y, attributes, words);
}

static void line(FILE *out, double x0, double y0, double x1, double y1, const char *attributes)
{
    fprintf(out, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' %s/>\n", x0, y0, x1, y1,
            attributes);
}

static void draw_x_axis(const chart *c)
{
    char label[32];
    for (int e = (int)floor(c->x_lo); e <= (int)c->x_hi; e++) {
        for (int k = 1; k < 10; k++) {
            const double value = k * pow(10, e), x = px(c, value);
            if (log10(value) < c->x_lo - 1e-9 || log10(value) > c->x_hi + 1e-9)
                continue;
            line(c->out, x, TOP, x, BOTTOM, k == 1 ? "stroke='#cbd5e1'" : "stroke='#eef2f7'");
            snprintf(label, sizeof label, "%g", value);
            if (k == 1 || k == 2 || k == 5)
                text(c->out, x, BOTTOM + 18, "text-anchor='middle' font-size='12'", label);
        }
    }
    text(c->out, (LEFT + RIGHT) / 2.0, BOTTOM + 44, "text-anchor='middle' font-size='14'",
         "arithmetic intensity: counted FLOPs per byte of slow memory");
}

static void draw_y_axis(const chart *c)
{
    char label[32];
    for (int e = (int)floor(c->y_lo); e <= (int)c->y_hi; e++) {
        for (int k = 1; k < 10; k++) {
            const double value = k * pow(10, e), y = py(c, value);
            if (log10(value) < c->y_lo - 1e-9 || log10(value) > c->y_hi + 1e-9)
                continue;
            line(c->out, LEFT, y, RIGHT, y, k == 1 ? "stroke='#cbd5e1'" : "stroke='#eef2f7'");
            snprintf(label, sizeof label, "%g", value * 1e-9);
            if (k == 1)
                text(c->out, LEFT - 8, y + 4, "text-anchor='end' font-size='12'", label);
        }
    }
    fprintf(c->out,
            "<text transform='translate(26 %d) rotate(-90)' text-anchor='middle' "
            "font-size='14'>counted GFLOP/s</text>\n",
            (TOP + BOTTOM) / 2);
}

/* A level from where memory allows it to the right end, its name on it. */
static void draw_level(chart *c, const roofline_limits *limits, double flops, const char *style,
                       const char *words)
{
    const double y = py(c, flops), half = 3.3 * (double)strlen(words);
    const double x0 = fmax(px(c, flops / limits->bytes_per_second), LEFT);
    line(c->out, x0, y, RIGHT, y, style);
    text(c->out, RIGHT - 6, y - 7, "text-anchor='end' font-size='12' fill='#334155'", words);
    occupy(c, (box){RIGHT - 6 - half, y - 10, half, 10});
}

static void draw_limits(chart *c, const roofline_limits *limits)
{
    char words[96];
    const double ridge = limits->fma_flops / limits->bytes_per_second;
    const double x1 = fmin(ridge, pow(10, c->x_hi)), x0 = pow(10, c->x_lo);
    const double y0 = py(c, limits->bytes_per_second * x0);
    const double y1 = py(c, limits->bytes_per_second * x1);
    line(c->out, px(c, x0), y0, px(c, x1), y1, "stroke='#0f172a' stroke-width='2'");
    const double slope = atan2(y1 - y0, px(c, x1) - px(c, x0)) * 57.29578;
    const double mid = pow(10, c->x_lo + 0.28 * (c->x_hi - c->x_lo));
    fprintf(c->out,
            "<text transform='translate(%.1f %.1f) rotate(%.2f)' font-size='12' "
            "fill='#334155' text-anchor='middle'>memory %.1f GB/s</text>\n",
            px(c, mid) - 7, py(c, limits->bytes_per_second * mid) - 7, slope,
            limits->bytes_per_second * 1e-9);
    for (int i = -3; i <= 3; i++) /* the words on the slope */
        occupy(c, (box){px(c, mid) - 7 + 16 * i,
                        py(c, limits->bytes_per_second * mid) - 7
                            + 16 * i * (y1 - y0) / (px(c, x1) - px(c, x0)),
                        10, 10});
    snprintf(words, sizeof words, "scalar multiply and add %.1f GFLOP/s",
             limits->scalar_flops * 1e-9);
    draw_level(c, limits, limits->scalar_flops, "stroke='#0f172a' stroke-width='2'", words);
    snprintf(words, sizeof words, "widest vector FMA %.0f GFLOP/s (what kernels may use)",
             limits->fma_flops * 1e-9);
    draw_level(c, limits, limits->fma_flops, "stroke='#0f172a' stroke-dasharray='6 4'", words);
}

static void draw_points(chart *c, const saccade_ladder_row *rows, int n)
{
    for (int i = 0; i < n; i++) {
        const double x = px(c, rows[i].intensity), y = py(c, speed(&rows[i]));
        fprintf(c->out, "<circle cx='%.1f' cy='%.1f' r='%d' fill='%s'/>\n", x, y, RADIUS,
                color(&rows[i]));
        occupy(c, (box){x, y, RADIUS, RADIUS});
    }
    for (int i = 0; i < n; i++) {
        const double x = px(c, rows[i].intensity), y = py(c, speed(&rows[i]));
        char style[64], number[16];
        const box b = find_place(c, x, y);
        occupy(c, b);
        snprintf(style, sizeof style, "stroke='%s'", color(&rows[i]));
        if (hypot(b.x - x, b.y - y) > 18)
            line(c->out, x, y, b.x, b.y, style);
        fprintf(c->out, "<circle cx='%.1f' cy='%.1f' r='9' fill='white' stroke='%s'/>\n", b.x,
                b.y, color(&rows[i]));
        snprintf(number, sizeof number, "%d", i + 1);
        text(c->out, b.x, b.y + 4, "text-anchor='middle' font-size='11'", number);
    }
}

static void draw_list(const chart *c, const saccade_ladder_row *rows, int n)
{
    char words[96];
    for (int i = 0; i < n; i++) {
        const double y = TOP + 12 + LIST_STEP * i;
        fprintf(c->out, "<circle cx='%d' cy='%.1f' r='10' fill='white' stroke='%s'/>\n", LIST,
                y, color(&rows[i]));
        snprintf(words, sizeof words, "%d", i + 1);
        text(c->out, LIST, y + 4, "text-anchor='middle' font-size='11'", words);
        snprintf(words, sizeof words, "%s", rows[i].title);
        text(c->out, LIST + 18, y + 4, "font-size='13'", words);
    }
}

/* Ends of the axes: whole decades below and above what is drawn; intensity to half ones. */
static void find_ranges(chart *c, const roofline_limits *limits, const saccade_ladder_row *rows,
                        int n)
{
    double x_lo = 0.25, x_hi = 4, y_lo = 1e9;
    for (int i = 0; i < n; i++) {
        x_lo = fmin(x_lo, rows[i].intensity);
        x_hi = fmax(x_hi, rows[i].intensity);
        y_lo = fmin(y_lo, speed(&rows[i]));
    }
    c->x_lo = floor(2 * log10(x_lo / 1.5)) / 2;
    c->x_hi = ceil(2 * log10(x_hi * 1.5)) / 2;
    c->y_lo = floor(log10(y_lo));
    c->y_hi = ceil(log10(fmax(limits->fma_flops, limits->scalar_flops) * 1.2));
}

void roofline_draw(FILE *out, const roofline_limits *limits, const saccade_ladder_row *rows,
                   int n, const char *title)
{
    chart c = {.out = out};
    find_ranges(&c, limits, rows, n);
    fprintf(out,
            "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' "
            "viewBox='0 0 %d %d' font-family='sans-serif' fill='#0f172a'>\n"
            "<rect width='%d' height='%d' fill='white'/>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, WIDTH, HEIGHT);
    text(out, LEFT, 36, "font-size='13'", title);
    draw_x_axis(&c);
    draw_y_axis(&c);
    draw_limits(&c, limits);
    draw_points(&c, rows, n);
    draw_list(&c, rows, n);
    fputs("</svg>\n", out);
}
