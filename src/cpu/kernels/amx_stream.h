/* amx_stream.h: strips of backward as a stream of units, 32 x 32 scores: S and dP of a unit by
 * tiles, and between each two of their products some weights of the unit before, which vectors
 * make meanwhile. Scores stay in the nearest cache: two units lie in the ring at a time.
 *
 *     products   S(n) step 0 | S(n) step 1 .. | dP(n) ..        | S(n + 1) step 0 | ..
 *     weights    the last    | the first rows of unit n - 1, .. | the last        | ..
 *
 * A unit's first weights wait for a step: what tiles have just stored is not there yet. */
#ifndef SACCADE_CPU_KERNELS_AMX_STREAM_H
#define SACCADE_CPU_KERNELS_AMX_STREAM_H

#include "cpu/kernels/amx_units.h"
#include "cpu/kernels/weight_pairs.h"

/* Where the next weights are made: pointers of their own, which no store can change. */
typedef struct unit_cursor {
    const float *s, *base;
    char *p, *ds, *rows;
    int64_t stride;
    int32_t left; /* rows */
} unit_cursor;

static ALWAYS_INLINE unit_cursor cursor_of(const cpu_unit_weights *u)
{
    if (u->row >= UNIT) /* no unit is open: there are no pointers */
        return (unit_cursor){.left = 0};
    const int64_t pair = u->row / 2 * u->stride;
    return (unit_cursor){.s = u->s + u->row * UNIT,
                         .base = u->base + u->row,
                         .p = (char *)u->p + pair,
                         .ds = (char *)u->ds + pair,
                         .rows = (char *)u->rows + 2 * pair,
                         .stride = u->stride,
                         .left = UNIT - u->row};
}

static ALWAYS_INLINE void advance(unit_cursor *u, int32_t rows)
{
    u->s += rows * UNIT;
    u->base += rows;
    u->p += rows / 2 * u->stride;
    u->ds += rows / 2 * u->stride;
    u->rows += rows * u->stride;
    u->left -= rows;
}

/* p = 2^t, and p x, which is exactly 0 where t is -INF, whatever x is. p is 0 where 2^t is
 * subnormal, and NaN or infinite x are kept there. */
static ALWAYS_INLINE vf weigh(vf t, vf x, vf *p)
{
#if defined(VF_HAS_FRACTION)
    const __mmask16 live = _mm512_cmp_ps_mask(t, vf_set(-126.0f), _CMP_NLT_UQ);
    const __mmask16 seen = _mm512_cmp_ps_mask(t, vf_set(-INFINITY), _CMP_NEQ_UQ);
    *p = _mm512_maskz_scalef_ps(live, exp2_rough_fraction(t), t);
    return _mm512_maskz_mul_ps(seen, *p, x);
#else
    *p = exp2_rough(t);
    return vf_where_live(t, *p * x);
#endif
}

/* Emulated tiles need no straight code, and code in short vectors would be long. */
#if defined(LEVEL_AMX)
#define UNIT_STEP ALWAYS_INLINE
#else
#define UNIT_STEP NEVER_INLINE
#endif

/* Two rows from `row` on by VF keys. */
static UNIT_STEP void weigh_two(const unit_cursor *u, vf factor, int row, int j, int has_slope)
{
    const float *s = u->s + row * UNIT + j;
    vf p[2], ds[2];
    for (int i = 0; i < 2; i++, s += UNIT) {
        vf dx = vf_load(s + CPU_UNIT);
        if (has_slope)
            dx = dx * vf_load(s + 2 * CPU_UNIT);
        ds[i] = weigh(vf_fma(vf_load(s), factor, vf_set(u->base[row + i])), dx, &p[i]);
    }
    const two_rows halves = narrow_two(ds[0], ds[1]);
    const int64_t pair = row / 2 * u->stride;
    char *rows = u->rows + 2 * pair + j * 2;
    store_pairs((int32_t *)(void *)(u->p + pair) + j, narrow_two(p[0], p[1]));
    store_pairs((int32_t *)(void *)(u->ds + pair) + j, halves);
    store_first((uint16_t *)(void *)rows, halves);
    store_second((uint16_t *)(void *)(rows + u->stride), halves);
}

/* What follows product t of a step of four, which has `pairs` pairs of rows in all. */
static ALWAYS_INLINE void weigh_some(const unit_cursor *u, vf factor, int t, int pairs,
                                     int has_slope)
{
#pragma GCC unroll 8
    for (int n = 2 * pairs * t / 4; n < 2 * pairs * (t + 1) / 4; n++)
#pragma GCC unroll 4
        for (int j = n % 2 * TILE_ROWS; j < (n % 2 + 1) * TILE_ROWS; j += VF)
            weigh_two(u, factor, n / 2 * 2, j, has_slope);
}

/* multiply_unit with weights of the next rows, if any are left. */
static UNIT_STEP void multiply_beside(const char *a, int64_t a_stride, const char *b,
                                      unit_cursor *u, vf factor, int pairs, int has_slope)
{
    if (u->left <= 0) {
        multiply_unit(a, a_stride, b);
        return;
    }
    TILE_LOAD(4, a, a_stride);
    TILE_STREAM(6, b, 2 * TILE_BYTES);
    TILE_DOT(0, 4, 6);
    weigh_some(u, factor, 0, pairs, has_slope);
    TILE_STREAM(7, b + TILE_BYTES, 2 * TILE_BYTES);
    TILE_DOT(1, 4, 7);
    weigh_some(u, factor, 1, pairs, has_slope);
    TILE_LOAD(5, a + TILE_ROWS * a_stride, a_stride);
    TILE_DOT(2, 5, 6);
    weigh_some(u, factor, 2, pairs, has_slope);
    TILE_DOT(3, 5, 7);
    weigh_some(u, factor, 3, pairs, has_slope);
    advance(u, 2 * pairs);
}

typedef struct unit_operands {
    const char *q, *k, *o, *v;
    int64_t q_stride, o_stride;
    int32_t q_steps, o_steps;
} unit_operands;

/* Sums of dP begin as -delta of their rows. */
static ALWAYS_INLINE void load_delta(const cpu_stream *w)
{
    const float *low = w->delta + TILE_ROWS * TILE_ROWS;
    TILE_LOAD(0, w->delta, TILE_BYTES);
    TILE_LOAD(1, w->delta, TILE_BYTES);
    TILE_LOAD(2, low, TILE_BYTES);
    TILE_LOAD(3, low, TILE_BYTES);
}

static ALWAYS_INLINE void make_unit(const unit_operands *x, cpu_stream *w, float *to, int pairs,
                                    int has_slope)
{
    const vf factor = vf_set(w->factor);
    unit_cursor u = cursor_of(&w->before);
    ZERO_UNIT();
    multiply_beside(x->q, x->q_stride, x->k, &u, factor, pairs, has_slope);
    u = cursor_of(&w->last);
    for (int32_t d = 1; d < x->q_steps; d++)
        multiply_beside(x->q + d * TILE_BYTES, x->q_stride, x->k + d * UNIT_BYTES, &u, factor,
                        pairs, has_slope);
    store_unit(to, UNIT * 4);
    load_delta(w);
    for (int32_t d = 0; d < x->o_steps; d++)
        multiply_beside(x->o + d * TILE_BYTES, x->o_stride, x->v + d * UNIT_BYTES, &u, factor,
                        pairs, has_slope);
    store_unit(to + CPU_UNIT, UNIT * 4);
    w->last.row = UNIT - u.left;
}

#define UNITS(name, pairs, has_slope)                                               \
    static NEVER_INLINE void name(const unit_operands *x, cpu_stream *w, float *to) \
    {                                                                               \
        make_unit(x, w, to, pairs, has_slope);                                      \
    }
UNITS(units_1, 1, 0)
UNITS(units_2, 2, 0)
UNITS(units_4, 4, 0)
UNITS(units_8, 8, 0)
UNITS(units_1_sloped, 1, 1)
UNITS(units_2_sloped, 2, 1)
UNITS(units_4_sloped, 4, 1)
UNITS(units_8_sloped, 8, 1)

typedef void make_units(const unit_operands *x, cpu_stream *w, float *to);

/* All but a unit's first step have so many pairs of rows that none of its 16 are left. */
static make_units *units_of(int32_t steps, int has_slope)
{
    static make_units *const table[2][4] = {
        {units_1, units_2, units_4, units_8},
        {units_1_sloped, units_2_sloped, units_4_sloped, units_8_sloped}};
    return table[has_slope][steps >= 16 ? 0 : steps >= 8 ? 1 : steps >= 4 ? 2 : 3];
}

static void open_stream(cpu_stream *w)
{
    w->is_open = 1;
    w->last.row = w->before.row = UNIT;
    w->slot = w->strip = 0;
}

/* What rows have in all units. Returns -lse log2 e; that of strips before is still in use. */
static const float *take_strip(const cpu_strip_weights *strip, cpu_stream *w)
{
    float *base = w->base[w->strip];
    w->strip = (w->strip + 1) % CPU_STREAM_STRIPS;
    for (int32_t i = 0; i < UNIT; i += VF)
        vf_store(base + i, vf_load(strip->lse + i) * vf_set(-LOG2_E));
    for (int32_t i = 0; i < UNIT; i++)
        for (int32_t j = 0; j < TILE_ROWS; j += VF)
            vf_store(w->delta + i * TILE_ROWS + j, vf_set(-strip->delta[i]));
    w->factor = strip->scale * LOG2_E;
    w->has_slope = strip->slope != NULL;
    return base;
}

/* Keys of a unit that all rows of the strip see: [first, past), of the strip. */
typedef struct unit_limits {
    int64_t first, past;
} unit_limits;

static unit_limits limits_of(const cpu_stream *w)
{
    unit_limits all = {0, w->n_keys};
    for (int32_t r = 0; w->first && r < UNIT; r++) {
        const int64_t first = w->first[r] - w->key, past = w->past[r] - w->key;
        all.first = first > all.first ? first : all.first;
        all.past = past < all.past ? past : all.past;
    }
    return all;
}

static int32_t clamp_key(int64_t key)
{
    return key < 0 ? 0 : key < UNIT ? (int32_t)key : UNIT;
}

/* What no row or not every row sees of keys from j on becomes -INF. */
static void cut_unit(const cpu_stream *w, float *unit, int32_t j)
{
    const int32_t n = clamp_key(w->n_keys - j);
    for (int32_t r = 0; r < UNIT; r++, unit += UNIT) {
        const int32_t first = w->first ? clamp_key(w->first[r] - w->key - j) : 0;
        const int32_t past = w->first ? clamp_key(w->past[r] - w->key - j) : UNIT;
        const int32_t end = past < n ? past : n;
        for (int32_t k = 0; k < UNIT; k++)
            unit[k] = k >= first && k < end ? unit[k] : -INFINITY;
    }
}

static CPU_STREAM(stream_strip)
{
    const cpu_strip_scores *c = scores;
    unit_operands x = {.q = c->q,
                       .k = c->k,
                       .o = c->o,
                       .v = c->v,
                       .q_stride = (int64_t)c->q_ld * 2,
                       .o_stride = (int64_t)c->o_ld * 2,
                       .q_steps = (c->D + TILE_DEPTH - 1) / TILE_DEPTH,
                       .o_steps = (c->Dv + TILE_DEPTH - 1) / TILE_DEPTH};
    if (!stream->is_open)
        open_stream(stream);
    const float *base = take_strip(weights, stream);
    make_units *make = units_of(x.q_steps + x.o_steps, stream->has_slope);
    const unit_limits all = limits_of(stream);
    for (int32_t j = 0; j < weights->n; j += UNIT) {
        float *to = stream->ring + stream->slot * CPU_UNIT_TILES * CPU_UNIT;
        make(&x, stream, to);
        if (stream->change)
            stream->change(stream->arg, to, j);
        if (j < all.first || j + UNIT > all.past)
            cut_unit(stream, to, j);
        stream->before = stream->last;
        stream->last = (cpu_unit_weights){.s = to,
                                          .base = base,
                                          .p = (int32_t *)weights->p + j,
                                          .ds = (int32_t *)weights->ds + j,
                                          .rows = (uint16_t *)(void *)weights->dp + j,
                                          .stride = (int64_t)weights->ld * 4};
        stream->slot = (stream->slot + 1) % CPU_RING_UNITS;
        x.k += x.q_steps * UNIT_BYTES;
        x.v += x.o_steps * UNIT_BYTES;
    }
}

static ALWAYS_INLINE void end_unit(const cpu_unit_weights *w, float factor, int has_slope)
{
    for (unit_cursor u = cursor_of(w); u.left > 0; advance(&u, 2))
        for (int j = 0; j < UNIT; j += VF)
            weigh_two(&u, vf_set(factor), 0, j, has_slope);
}

static CPU_END_STREAM(end_stream)
{
    for (int n = 0; stream->is_open && n < 2; n++) {
        const cpu_unit_weights *unit = n ? &stream->last : &stream->before;
        if (stream->has_slope)
            end_unit(unit, stream->factor, 1);
        else
            end_unit(unit, stream->factor, 0);
    }
    stream->is_open = 0;
}

#endif
