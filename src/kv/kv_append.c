/* New keys into pools on the host, cast or quantised. */
#include "kv/kv.h"

#include "base/convert.h"
#include "base/parallel.h"
#include "base/quantize.h"

enum { PIECE = 256 }; /* elements that are widened at a time */

/* A row on its way. */
typedef struct append_row {
    const append_side *side;
    const char *from;
    char *to, *scale; /* scale: of its first group of channels */
} append_row;

static append_row row_of(const append_side *s, int64_t t, int64_t h, append_place at)
{
    const saccade_dtype to = (saccade_dtype)s->to_dtype;
    const int64_t bytes = (int64_t)saccade_dtype_bytes((saccade_dtype)s->from_dtype);
    append_row row = {s, (const char *)s->from + (t * s->from_n + h * s->from_h) * bytes,
                      (char *)s->to
                          + quant_bytes(to, at.page * s->to_b + h * s->to_h + at.key * s->to_n),
                      s->scale};
    const int64_t group = s->tokens ? at.key / s->tokens : 0;
    if (s->scale)
        row.scale += (at.page * s->scale_b + h * s->scale_h + group * s->scale_n)
                     * (s->scale_is_f16 ? 2 : 4);
    return row;
}

static void cast_row(const append_row *row)
{
    const append_side *s = row->side;
    const saccade_dtype from = (saccade_dtype)s->from_dtype, to = (saccade_dtype)s->to_dtype;
    const int64_t from_bytes = (int64_t)saccade_dtype_bytes(from);
    const int64_t to_bytes = (int64_t)saccade_dtype_bytes(to);
    float x[PIECE];
    for (int64_t d = 0; d < s->D; d += PIECE) {
        const int64_t n = s->D - d < PIECE ? s->D - d : PIECE;
        convert_to_f32(from, row->from + d * from_bytes, x, n);
        convert_from_f32(to, x, row->to + d * to_bytes, n);
    }
}

/* The scale of channels [d, end), which is made and kept, or read. */
static float settle_scale(const append_row *row, int64_t group, int64_t d, int64_t end)
{
    const append_side *s = row->side;
    const saccade_dtype from = (saccade_dtype)s->from_dtype;
    const saccade_dtype dtype = s->scale_is_f16 ? SACCADE_F16 : SACCADE_F32;
    const int64_t bytes = (int64_t)saccade_dtype_bytes(from);
    float x[PIECE], most = 0, scale = 1;
    char *at = row->scale + group * s->scale_d * (s->scale_is_f16 ? 2 : 4);
    if (!s->scale)
        return 1;
    if (!s->is_made) {
        convert_to_f32(dtype, at, &scale, 1);
        return scale;
    }
    for (; d < end; d += PIECE) {
        const int64_t n = end - d < PIECE ? end - d : PIECE;
        convert_to_f32(from, row->from + d * bytes, x, n);
        const float found = quant_most((saccade_dtype)s->to_dtype, x, n);
        most = found > most || found != found ? found : most;
    }
    scale = quant_scale((saccade_dtype)s->to_dtype, dtype, most);
    convert_from_f32(dtype, &scale, at, 1);
    return scale;
}

static void quantise_row(const append_row *row)
{
    const append_side *s = row->side;
    const saccade_dtype from = (saccade_dtype)s->from_dtype, to = (saccade_dtype)s->to_dtype;
    const int64_t bytes = (int64_t)saccade_dtype_bytes(from);
    const int64_t span = s->channels ? s->channels : s->D;
    float x[PIECE];
    for (int64_t first = 0; first < s->D; first += span) {
        const int64_t end = s->D - first < span ? s->D : first + span;
        const float scale = settle_scale(row, first / span, first, end);
        for (int64_t d = first; d < end; d += PIECE) {
            const int64_t n = end - d < PIECE ? end - d : PIECE;
            convert_to_f32(from, row->from + d * bytes, x, n);
            quant_encode(to, x, n, scale, row->to, d);
        }
    }
}

static void append_key(void *arg, int64_t t, int thread)
{
    const kv_append *a = arg;
    const append_place at = append_place_of(a, t);
    (void)thread;
    if (at.page < 0)
        return;
    for (int i = 0; i < a->sides; i++)
        for (int h = 0; h < a->heads; h++) {
            const append_row row = row_of(&a->side[i], t, h, at);
            (quant_is_dtype((saccade_dtype)a->side[i].to_dtype) ? quantise_row
                                                                : cast_row)(&row);
        }
}

void kv_append_keys(const kv_append *a, int threads)
{
    par_for(a->n, threads, append_key, (void *)(uintptr_t)a);
}
