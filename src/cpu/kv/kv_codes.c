/* Quantised keys as floats: which scales which rows have, and where the rows lie. */
#include "cpu/kv/kv_rows.h"

#include "base/convert.h"
#include "base/quantize.h"

#include <string.h>

kv_view kv_view_as(const plan_problem *problem, const plan_run *run, int is_value, int64_t b,
                   int64_t g, KV_DEQUANTISE((*convert)), saccade_dtype dtype)
{
    kv_view view = kv_view_of(run, is_value ? run->v : run->k, b, g);
    if (quant_is_dtype(problem->kv_dtype))
        view.codes = (kv_codes){convert,
                                dtype,
                                is_value ? run->v_scale : run->k_scale,
                                is_value ? problem->v_groups : problem->k_groups,
                                b,
                                g,
                                1};
    return view;
}

/* Every stride-th of n scales from `at` on. */
static void widen_scales(saccade_dtype dtype, const char *at, int64_t stride, int64_t n,
                         float *to)
{
    if (stride == (int64_t)saccade_dtype_bytes(dtype))
        convert_to_f32(dtype, at, to, n);
    else
        for (int64_t i = 0; i < n; i++, at += stride)
            convert_to_f32(dtype, at, to + i, 1);
}

/* Scales of n rows, one each. */
static void scales_by_row(const kv_codes *c, int64_t outer, int64_t row, int64_t n, float *to)
{
    const int32_t tokens = c->groups.tokens;
    for (int64_t i = 0; i < n; i++) {
        const plan_scale_row at = plan_scales_of(c->scale, &c->groups, outer, c->g, row + i);
        if (tokens == 1) { /* the others follow */
            const int64_t bytes = (int64_t)saccade_dtype_bytes(c->scale->dtype);
            widen_scales(c->scale->dtype, at.at, c->scale->stride[2] * bytes, n - i, to + i);
            return;
        }
        widen_scales(c->scale->dtype, at.at, 0, 1, to + i);
        const int64_t left = tokens ? tokens - (row + i) % tokens : n - i;
        for (int64_t same = 1; same < left && i + 1 < n; same++, i++)
            to[i + 1] = to[i];
    }
}

/* Scales of a row's channels, the last ones repeated to fill a vector. Those of groups come
 * first, side by side, and are spread from the last on, so that none is overwritten unread. */
static void scales_by_channel(const kv_codes *c, int64_t outer, int64_t row, int32_t dim,
                              float *to)
{
    const plan_scale_row at = plan_scales_of(c->scale, &c->groups, outer, c->g, row);
    const int32_t each = c->groups.channels, n = (dim + each - 1) / each;
    widen_scales(c->scale->dtype, at.at, at.stride, n, to);
    for (int32_t g = n - 1; g >= 0; g--) {
        const int32_t first = g * each;
        const int32_t past = g == n - 1 ? (dim + 15) / 16 * 16 : first + each;
        const float scale = to[g];
        for (int32_t d = first; d < past; d++)
            to[d] = scale;
    }
}

/* Rows that follow each other from number `row` on, of batch or page `outer`. */
typedef struct code_rows {
    cpu_rows rows;
    int64_t outer, row, n;
} code_rows;

static void convert_rows(const kv_codes *c, const code_rows *from, float *scales, char *to)
{
    const int32_t dim = from->rows.dim, tokens = c->groups.tokens;
    const int64_t each = dim * (int64_t)saccade_dtype_bytes(c->dtype);
    float *by_row = scales, *by_channel = scales + (from->n + 15) / 16 * 16;
    const int has_channels = c->scale && c->groups.channels;
    for (int64_t i = 0; i < from->n; i++)
        by_row[i] = 1;
    if (c->scale && !has_channels)
        scales_by_row(c, from->outer, from->row, from->n, by_row);
    for (int64_t i = 0, own; i < from->n; i += own) {
        const int64_t row = from->row + i, left = from->n - i;
        const int64_t same = tokens && has_channels ? tokens - row % tokens : left;
        const cpu_rows piece = cpu_rows_from(from->rows, i);
        own = same < left ? same : left;
        if (has_channels)
            scales_by_channel(c, from->outer, row, dim, by_channel);
        c->convert(&piece, (int32_t)own, by_row + i, has_channels ? by_channel : NULL, c->dtype,
                   to + i * each);
    }
}

/* Keys from j on that lie in one piece, at most n of them; base NULL: they are absent. */
static code_rows rows_of(const kv_view *view, int64_t j, int64_t n)
{
    code_rows found = {cpu_rows_from(view->rows, j), view->codes.b, j, n};
    int64_t left;
    if (!view->first)
        return found;
    found.rows.base = kv_place_of(view, j, &left);
    found.n = left < n ? left : n;
    if (!found.rows.base)
        return found;
    const int64_t entry = view->first[j / view->size], at = j % view->size;
    found.outer = view->is_paged ? entry : view->codes.b;
    found.row = view->is_paged ? at : entry + at;
    if (view->is_paged && found.outer > view->last)
        found.outer = view->last;
    if (!view->is_paged && found.row > view->last)
        found.row = view->last;
    return found;
}

cpu_rows kv_convert(const kv_view *view, int64_t j, int64_t n, void *room)
{
    const int32_t dim = view->rows.dim;
    const int64_t each = dim * (int64_t)saccade_dtype_bytes(view->codes.dtype);
    float *scales = (float *)room + n * dim;
    char *to = room;
    for (int64_t end = j + n; j < end;) {
        const code_rows found = rows_of(view, j, end - j);
        if (found.rows.base)
            convert_rows(&view->codes, &found, scales, to);
        else
            memset(to, 0, (size_t)(found.n * each));
        to += found.n * each;
        j += found.n;
    }
    return (cpu_rows){room, each, view->codes.dtype, dim};
}

int kv_is_by_row(const kv_view *view)
{
    return view->codes.convert && (!view->codes.scale || !view->codes.groups.channels);
}

/* Scales of rows, times the factor; of absent keys 1. */
static void raw_scales(const kv_codes *c, const code_rows *from, float *by_row)
{
    for (int64_t i = 0; i < from->n; i++)
        by_row[i] = 1;
    if (c->scale && from->rows.base)
        scales_by_row(c, from->outer, from->row, from->n, by_row);
    for (int64_t i = 0; i < from->n; i++)
        by_row[i] *= c->factor;
}

static void copy_rows(const code_rows *from, int64_t each, char *to)
{
    if (!from->rows.base) {
        memset(to, 0, (size_t)(from->n * each));
        return;
    }
    for (int64_t i = 0; i < from->n; i++)
        memcpy(to + i * each, cpu_rows_from(from->rows, i).base, (size_t)each);
}

cpu_rows kv_raw(const kv_view *view, int64_t j, int64_t n, void *room, float *by_row)
{
    const int64_t each = quant_bytes(view->rows.dtype, view->rows.dim);
    char *to = room;
    for (int64_t at = 0; at < n;) {
        const code_rows found = rows_of(view, j + at, n - at);
        raw_scales(&view->codes, &found, by_row + at);
        if (found.n == n && found.rows.base)
            return found.rows;
        copy_rows(&found, each, to + at * each);
        at += found.n;
    }
    return (cpu_rows){room, each, view->rows.dtype, view->rows.dim};
}
