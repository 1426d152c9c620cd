/* Strips of 32 rows through the keys of a chunk by the code of flow.h, one call a step. The
 * code multiplies the next step's first square and adds the values of the step before, so that
 * strips follow each other without a break; plain tiles here begin and end the chain.
 *
 * No maxima are looked for on the way. Each row has an anchor, a score as large as its first
 * ones, and l and O are relative to it: 2^x holds for 100 above and as much below. Where the
 * row's true maximum was further away, or a score is NaN, l shows it and the caller takes the
 * exact way, block by block, instead (item_flow.c). */

#if defined(LEVEL_AMX)

#include "cpu/flow/flow_run.h"
#include "cpu/kernels/vec.h"

#include "cpu/kernels/amx_tiles.h"
#include "cpu/kernels/amx_split.h"

enum { SQUARE_KEYS = FLOW_KEYS / FLOW_SQUARES };

/* One limit of the strip's rows: that of row 0, and whether it rises by one from row to row. */
typedef struct limit {
    int64_t at, least, most;
    int is_stair;
} limit;

typedef struct chain {
    const flow_run *a;
    const flow_shape *shape;
    flow_step_args step;
    char *memory;
    int32_t r0, rows; /* the strip at hand */
    int32_t half;     /* narrow: where the next step's first square is */
    limit first, past;
    cpu_prefetch_list prefetches;
} chain;

/* ---- addresses ---- */

static size_t unit_bytes(const chain *c)
{
    return UNIT_BYTES << c->shape->is_split;
}

static const char *k_of(const chain *c, const flow_step *at)
{
    return c->a->k + (size_t)(at->square * c->shape->depth) * unit_bytes(c);
}

static const char *v_of(const chain *c, const flow_step *at)
{
    return c->a->v + (size_t)(at->square * c->shape->panels) * unit_bytes(c);
}

static const char *q_of(const chain *c, int32_t strip)
{
    const flow_narrow *narrow = c->a->narrow;
    const char *q = narrow && narrow->q ? narrow->q : c->a->q;
    const int32_t place = narrow && !narrow->q ? strip % 2 : strip;
    return q + (size_t)place * UNIT * (size_t)c->shape->q_stride;
}

static float *o_of(const chain *c, int32_t strip)
{
    return c->a->o + (int64_t)(c->a->narrow ? 0 : strip) * UNIT * c->a->o_ld;
}

static float *numbers(const chain *c, int offset)
{
    return (float *)(void *)(c->memory + offset);
}

/* ---- the chain's ends, in plain tiles ---- */

/* Scores of a step's first square. */
static void first_square(const chain *c, const flow_step *at)
{
    const char *q = q_of(c, at->strip), *k = k_of(c, at);
    const flow_shape *s = c->shape;
    ZERO_UNIT();
    for (int32_t d = 0; d < s->depth; d++) {
        if (s->is_split)
            multiply_split(s->is_exact, q + d * SPLIT_ROW, s->q_stride, TILE_BYTES,
                           k + (int64_t)d * SPLIT_BYTES);
        else
            multiply_unit(q + d * TILE_BYTES, s->q_stride, k + (int64_t)d * UNIT_BYTES);
    }
    char *left = c->memory + FLOW_S, *right = left + FLOW_SQUARE_BYTES / 2;
    TILE_STORE(0, left, TILE_BYTES);
    TILE_STORE(1, right, TILE_BYTES);
    TILE_STORE(2, left + TILE_ROWS * TILE_BYTES, TILE_BYTES);
    TILE_STORE(3, right + TILE_ROWS * TILE_BYTES, TILE_BYTES);
}

static void last_values(const chain *c)
{
    const size_t v_step = (size_t)c->shape->panels * unit_bytes(c);
    for (int32_t panel = 0; panel < c->shape->panels; panel++) {
        const char *v = (const char *)c->step.v_before + (size_t)panel * unit_bytes(c);
        float *o = c->step.o_before + panel * UNIT;
        load_unit(o, c->shape->o_stride);
        for (int32_t d = 0; d < c->shape->squares; d++, v += v_step) {
            if (c->shape->is_split)
                multiply_split(0, (const char *)c->step.p_before + d * SPLIT_BYTES, TILE_BYTES,
                               UNIT_BYTES, v);
            else
                multiply_unit((const char *)c->step.p_before + d * UNIT_BYTES, TILE_BYTES, v);
        }
        store_unit(o, c->shape->o_stride);
    }
}

/* ---- strips ---- */

/* Gives anchors to those of 16 rows that have none yet: the largest score of the first square
 * if it is finite. Also finds what exponents add for the anchors. */
static void find_anchors(const chain *c, int32_t r)
{
    const float *s = numbers(c, FLOW_S + c->half * FLOW_SQUARE_BYTES) + r * VF;
    float *m = c->a->m + c->r0 + r;
    const int32_t n = c->rows - r < VF ? c->rows - r : VF;
    const __mmask16 rows = (__mmask16)(n > 0 ? (1u << n) - 1 : 0);
    const float shift = flow_shift(c->shape, 0), slope = flow_shift(c->shape, 1) - shift;
    vf each[VF];
    for (int i = 0; i < VF; i++)
        each[i] = vf_max(vf_load(s + i * VF), vf_load(s + 512 + i * VF));
    const vf most = vf_set(c->a->scale) * vf_max_each(each),
             old = _mm512_maskz_loadu_ps(rows, m);
    const __mmask16 is_nonfinite = _mm512_fpclass_ps_mask(most, 0x99);
    const __mmask16 is_new = _mm512_mask_cmp_ps_mask(rows, old, vf_set(-INFINITY), _CMP_EQ_OQ);
    const vf finite = _mm512_mask_mov_ps(most, is_nonfinite, vf_set(0));
    const vf now = _mm512_mask_mov_ps(old, is_new, finite);
    _mm512_mask_storeu_ps(m, rows, now);
    vf_store(numbers(c, FLOW_SHIFT) + r, vf_fma(now, vf_set(slope), vf_set(shift)));
}

/* One limit of the strip's rows, cut at the end of the keys. */
static limit limit_of(const chain *c, const int64_t *of)
{
    const __m512i stair = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const int64_t j1 = c->a->j1, last = of[c->r0 + c->rows - 1];
    const int64_t at = of[c->r0] < j1 ? of[c->r0] : j1, end = last < j1 ? last : j1;
    __m512i least = _mm512_set1_epi64(at), most = least;
    __mmask8 is_other = 0;
    if (c->a->narrow->is_stair) /* it may rest before it rises, and after that */
        return (limit){at, at, end, end - at == c->rows - 1};
    for (int32_t r = 0; r < c->rows; r += 8) {
        const __mmask8 rows = (__mmask8)(c->rows - r < 8 ? (1 << (c->rows - r)) - 1 : 0xff);
        const __m512i x = _mm512_min_epi64(_mm512_maskz_loadu_epi64(rows, of + c->r0 + r),
                                           _mm512_set1_epi64(j1));
        const __m512i line = _mm512_add_epi64(stair, _mm512_set1_epi64(at + r));
        is_other |= _mm512_mask_cmpneq_epi64_mask(rows, x, line);
        least = _mm512_mask_min_epi64(least, rows, least, x);
        most = _mm512_mask_max_epi64(most, rows, most, x);
    }
    return (limit){at, _mm512_reduce_min_epi64(least), _mm512_reduce_max_epi64(most),
                   !is_other};
}

static void clear_flag(void)
{
    _mm_setcsr(_mm_getcsr() & ~(unsigned)_MM_EXCEPT_INVALID);
}

static int is_flagged(void)
{
    return (_mm_getcsr() & _MM_EXCEPT_INVALID) != 0;
}

static void begin_strip(chain *c, int32_t strip)
{
    const flow_run *a = c->a;
    c->r0 = strip * UNIT;
    c->rows = a->rows - c->r0 < UNIT ? a->rows - c->r0 : UNIT;
    for (int32_t r = 0; r < UNIT; r += VF)
        find_anchors(c, r);
    memset(c->memory + FLOW_SUM, 0, UNIT * VF * sizeof(float));
    memset(c->memory + FLOW_OVER, 0, 64);
    if (a->narrow) {
        c->first = limit_of(c, a->first);
        c->past = limit_of(c, a->past);
    } else {
        clear_flag(); /* narrow: once for all strips, for that empties the pipelines */
    }
    if (a->jit)
        jit_place(a->jit, c->r0, 0, &c->step.mod);
}

/* Whether weights made as words came out wrong: a score far above the anchor has carried into
 * the sign bit, and a score that was NaN or beyond int32 has raised the invalid flag. */
static int has_overflow(const chain *c)
{
    const __m512i words = _mm512_loadu_si512(c->memory + FLOW_OVER);
    return _mm512_movepi16_mask(words) != 0 || (!c->a->narrow && is_flagged());
}

static void end_strip(const chain *c)
{
    const int is_lost = c->shape->is_word && has_overflow(c);
    for (int32_t r = 0; r < c->rows; r += VF) {
        const float *sums = numbers(c, FLOW_SUM) + r * VF;
        const int32_t n = c->rows - r < VF ? c->rows - r : VF;
        const __mmask16 rows = (__mmask16)((1u << n) - 1);
        float *l = c->a->l + c->r0 + r;
        vf each[VF];
        for (int i = 0; i < VF; i++)
            each[i] = vf_load(sums + i * VF);
        const vf sum = is_lost ? vf_set(NAN) : vf_sum_each(each);
        _mm512_mask_storeu_ps(l, rows, _mm512_maskz_loadu_ps(rows, l) + sum);
    }
}

/* Limits of 32 rows, `all` where there are none, as keys of the step that begins at j0. */
static void clip(const int64_t *limits, int64_t all, int64_t most, int64_t j0, int32_t *to)
{
    for (int32_t r = 0; r < UNIT; r++) {
        int64_t j = limits ? limits[r] : all;
        j = (j < most ? j : most) - j0;
        to[r] = (int32_t)(j < 0 ? 0 : j > FLOW_KEYS ? FLOW_KEYS : j);
    }
}

/* The live keys of each row in a step. Rows past the item's last may have any. */
static void set_cut(const chain *c, int64_t j0)
{
    const flow_run *a = c->a;
    int32_t *first = (int32_t *)(void *)(c->memory + FLOW_FIRST);
    int32_t *past = (int32_t *)(void *)(c->memory + FLOW_PAST);
    clip(a->first ? a->first + c->r0 : NULL, 0, a->j1, j0, first);
    clip(a->past ? a->past + c->r0 : NULL, a->j1, a->j1, j0, past);
}

/* ---- narrow steps ---- */

static int64_t cut_of(int64_t n)
{
    n = n < FLOW_CUT_LEAST ? FLOW_CUT_LEAST : n > FLOW_CUT_MOST ? FLOW_CUT_MOST : n;
    return n - FLOW_CUT_LEAST;
}

/* A square's mask, row by row. */
static const uint32_t *make_mask(const chain *c, int64_t j, int32_t square)
{
    const uint32_t *before = flow_code_cuts(c->a->code, 0),
                   *from = flow_code_cuts(c->a->code, 1);
    uint32_t *to =
        (uint32_t *)(void *)(c->memory + FLOW_MASKS + (int64_t)square * FLOW_MASK_BYTES);
    for (int32_t r = 0; r < c->rows; r++) {
        const int64_t past = c->a->past[c->r0 + r];
        to[r] = before[cut_of((past < c->a->j1 ? past : c->a->j1) - j)]
                & from[cut_of(c->a->first[c->r0 + r] - j)];
    }
    return to;
}

/* The masks of the square of 32 keys from j on. */
static const uint32_t *mask_of(const chain *c, int64_t j, int32_t square)
{
    const uint32_t *before = flow_code_cuts(c->a->code, 0),
                   *from = flow_code_cuts(c->a->code, 1);
    const int is_begun = c->first.most <= j, is_open = c->past.least >= j + SQUARE_KEYS;
    if (is_begun && is_open)
        return before + cut_of(FLOW_CUT_MOST);
    if (is_begun && c->past.is_stair)
        return before + cut_of(c->past.at - j);
    if (is_open && c->first.is_stair)
        return from + cut_of(c->first.at - j);
    return make_mask(c, j, square);
}

/* Masks of a step that begins at key j0, and where its squares are. */
static void set_narrow(chain *c, int64_t j0)
{
    flow_step_args *s = &c->step;
    for (int32_t n = 0; n < 2; n++)
        s->s[n] = c->memory + FLOW_S + (c->half ^ n) * FLOW_SQUARE_BYTES;
    c->half ^= FLOW_NARROW % 2;
    for (int32_t n = 0; n < FLOW_NARROW; n++)
        s->prefetch[n] =
            c->prefetches.n ? c->prefetches.at[--c->prefetches.n] : c->memory + FLOW_S;
    if (!c->shape->is_word)
        set_cut(c, j0);
    for (int32_t n = 0; c->shape->is_word && n < FLOW_NARROW; n++)
        s->masks[n] = mask_of(c, j0 + n * SQUARE_KEYS, n);
}

/* ---- steps ---- */

static flow_step_fn *place_step(chain *c, const flow_step *at)
{
    const flow_run *a = c->a;
    const int64_t j0 = a->j0 + (int64_t)at->square * SQUARE_KEYS;
    if (a->narrow) {
        set_narrow(c, j0);
        return flow_code_narrow(a->code);
    }
    if (at->is_cut)
        set_cut(c, j0);
    return flow_code_run(a->code, a->is_exact, at->is_cut);
}

static void run_step(chain *c, const flow_step *at, const flow_step *next)
{
    flow_step_args *s = &c->step;
    s->q = q_of(c, at->strip);
    s->k = k_of(c, at);
    s->q_next = q_of(c, next->strip);
    s->k_next = k_of(c, next);
    flow_step_fn *run = place_step(c, at);
    if (c->a->jit)
        s->mod.cols += at->square * SQUARE_KEYS;
    run(s);
    if (c->a->jit)
        s->mod.cols -= at->square * SQUARE_KEYS;
    s->v_before = v_of(c, at);
    s->o_before = o_of(c, at->strip);
    const void *p = s->p_before;
    s->p_before = s->p;
    s->p = (void *)(uintptr_t)p;
}

/* Numbers of weights below 2^-126 are 0, as tiles take them: denormal ones cost 100 cycles. */
static unsigned flush_to_zero(void)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON);
    return before;
}

static void begin_chain(chain *c)
{
    const flow_run *a = c->a;
    flow_step_begin(&c->step, c->shape, a->scale);
    c->step.mod.s = numbers(c, 0);
    c->step.p = c->memory + FLOW_P;
    c->step.p_before = c->memory + FLOW_P + FLOW_P_BYTES;
    memset(c->memory + FLOW_P + FLOW_P_BYTES, 0, (size_t)c->shape->squares * unit_bytes(c));
    c->step.v_before = v_of(c, a->steps);
    c->step.o_before = o_of(c, a->steps->strip);
    if (a->narrow)
        a->narrow->begin(a->narrow->arg, a->steps->strip, &c->prefetches);
    first_square(c, a->steps);
}

CPU_FLOW(LEVEL_NAME(cpu_flow_run))
{
    const unsigned control = flush_to_zero();
    const flow_narrow *narrow = run->narrow;
    const flow_step *steps = run->steps;
    chain c = {.a = run,
               .shape = narrow ? flow_code_narrow_shape(run->code)
                               : flow_code_shape(run->code, run->is_exact),
               .memory = run->memory - FLOW_S};
    clear_flag();
    begin_chain(&c);
    for (int32_t n = 0; n < run->n; n++) {
        const int is_first = n == 0 || steps[n].strip != steps[n - 1].strip;
        const int is_end = n + 1 == run->n;
        const int is_last = is_end || steps[n + 1].strip != steps[n].strip;
        if (is_first)
            begin_strip(&c, steps[n].strip);
        if (narrow && is_last && !is_end)
            narrow->begin(narrow->arg, steps[n + 1].strip, &c.prefetches);
        run_step(&c, &steps[n], &steps[is_end ? n : n + 1]);
        if (narrow && is_first && n > 0)
            narrow->end(narrow->arg, steps[n - 1].strip);
        if (is_last)
            end_strip(&c);
    }
    last_values(&c);
    if (narrow) {
        narrow->end(narrow->arg, steps[run->n - 1].strip);
        _mm_sfence(); /* results may have gone past the caches */
    }
    const int is_lost = narrow && c.shape->is_word && is_flagged();
    _mm_setcsr(control);
    return is_lost;
}

#endif
