/* The matrix stream of a step, and both streams with entry and exit around them.
 *
 *   rbx step   r12 the stream's memory   r13 P   r15 P before   rsi q   rdi k   r8 v   r9 O
 *   rcx 64     rbp row of Q   rdx row of O   (r10 r11 r14 rax: jit_regs.h)
 *   narrow: r10 r11 even and odd squares   rax a square's mask   r14 what it asks for
 *   tmm0-3 C by rows   tmm4 5 A   tmm6 7 B */
#include "cpu/flow/flow.h"

#include "base/status.h"
#include "cpu/jit/jit_page.h"
#include "saccade_config.h"

#include <stdlib.h>
#include <string.h>

/* where the code of a step is */
typedef struct step_place {
    size_t begin, size;
} step_place;

#if HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/jit/jit_regs.h"
#include "cpu/flow/flow_merge.h"

enum { TILE = 1024, UNIT = 2 * TILE, N_ACCUMULATORS = 4 };

/* Tiles of one operand: rows [base + stride * scale] apart, the first tile at `at`. */
typedef struct tiles {
    ZydisRegister base, stride;
    int scale;
    int64_t at;
    int64_t down, right; /* bytes to the tile below, to the one beside */
    int64_t low;         /* to the low part */
    int64_t step;        /* to those of the sum's next step */
} tiles;

typedef struct matrix {
    jit_asm a;
    flow_stream *stream;
    const flow_shape *shape;
    tiles pending; /* where accumulators go before they are used again */
    int has_pending[N_ACCUMULATORS];
    const tiles *from;          /* of the unit at hand; NULL: zeros */
    int is_new[N_ACCUMULATORS]; /* not yet begun */
    int needs, event;           /* of the stores, or STREAM_NO_EVENT */
} matrix;

/* ---- instructions ---- */

static jit_operand tile_reg(int r)
{
    return jit_reg(ZYDIS_REGISTER_TMM0 + r);
}

static jit_operand tile_at(const tiles *t, int is_low, int row, int column)
{
    return jit_mem(t->base, t->stride, t->scale,
                   t->at + row * t->down + column * t->right + is_low * t->low, 0);
}

static void dot(matrix *m, int c, int a, int b)
{
    flow_stream_note(m->stream, &m->a, 0);
    EMIT(&m->a, TDPBF16PS, tile_reg(c), tile_reg(a), tile_reg(b));
    flow_stream_note(m->stream, &m->a, 1);
}

/* Stores a sum that is due. This is put off until the accumulator is needed again, so that the
 * store waits for no product. */
static void flush(matrix *m, int c)
{
    if (!m->has_pending[c])
        return;
    flow_stream_note(m->stream, &m->a, 0);
    m->stream->need = m->needs;
    EMIT(&m->a, TILESTORED, tile_at(&m->pending, 0, c / 2, c % 2), tile_reg(c));
    m->has_pending[c] = 0;
    flow_stream_note(m->stream, &m->a, 0);
    if (c == N_ACCUMULATORS - 1 && m->event != STREAM_NO_EVENT)
        flow_stream_event(m->stream, m->event);
}

static void begin_accumulator(matrix *m, int c)
{
    flush(m, c);
    m->is_new[c] = 0;
    if (m->from)
        EMIT(&m->a, TILELOADD, tile_reg(c), tile_at(m->from, 0, c / 2, c % 2));
    else
        EMIT(&m->a, TILEZERO, tile_reg(c));
}

/* ---- units of 2 x 2 tiles ---- */

/* A step multiplies parts of A and B in rounds, 0 for high parts and 1 for low ones, the
 * smallest products first. bf16, which has no low parts, takes the third round alone. */
static const struct {
    uint8_t a, b;
} rounds[] = {{1, 1}, {1, 0}, {0, 0}, {0, 1}};
enum { ROUND_ALL = 0, ROUND_SPLIT = 1, ROUND_WHOLE = 2, ROUNDS = 4 };

/* One round of products. Tiles that the round before used are still in registers. */
static void emit_round(matrix *m, const tiles *a, const tiles *b, int round, int is_first)
{
    const int a_low = rounds[round].a, b_low = rounds[round].b;
    const int new_a = is_first || a_low != rounds[round - 1].a;
    const int new_b = is_first || b_low != rounds[round - 1].b;
    for (int c = 0; c < N_ACCUMULATORS; c++) {
        if (new_a && c % 2 == 0)
            EMIT(&m->a, TILELOADD, tile_reg(4 + c / 2), tile_at(a, a_low, c / 2, 0));
        if (new_b && c < 2)
            EMIT(&m->a, TILELOADDT1, tile_reg(6 + c), tile_at(b, b_low, 0, c));
        if (m->is_new[c])
            begin_accumulator(m, c);
        dot(m, c, 4 + c / 2, 6 + c % 2);
    }
}

/* C += A B over `depth` steps, C from memory or 0. Its store to `to` is put off. */
static void emit_unit(matrix *m, tiles a, tiles b, int depth, int first_round,
                      const tiles *from, tiles to, int needs, int event)
{
    const int is_split = m->shape->is_split, end = is_split ? ROUNDS : ROUND_WHOLE + 1;
    const int begin = is_split ? first_round : ROUND_WHOLE;
    m->from = from;
    for (int c = 0; c < N_ACCUMULATORS; c++)
        m->is_new[c] = 1;
    for (int d = 0; d < depth; d++, a.at += a.step, b.at += b.step)
        for (int round = begin; round < end; round++)
            emit_round(m, &a, &b, round, round == begin);
    for (int c = 0; c < N_ACCUMULATORS; c++)
        m->has_pending[c] = 1;
    m->pending = to;
    m->needs = needs;
    m->event = event;
}

/* Packed K and V: pairs of tiles side by side, rows 128 bytes apart. */
static tiles packed(ZydisRegister base, int64_t at, int64_t step)
{
    return (tiles){base, ZYDIS_REGISTER_RCX, 2, at, 0, 64, UNIT, step};
}

/* Q K^T of square n, from 1; the last is the next step's first. */
static void emit_scores(matrix *m, int n)
{
    const flow_shape *s = m->shape;
    const int is_next = n == s->squares, half = n % 2;
    const int last_there = n - 2; /* square that had the memory */
    const int64_t unit = UNIT << s->is_split;
    const ZydisRegister own = half ? ZYDIS_REGISTER_R11 : ZYDIS_REGISTER_R10;
    const tiles to = {.base = s->is_narrow ? own : ZYDIS_REGISTER_R12,
                      .stride = ZYDIS_REGISTER_RCX,
                      .scale = 1,
                      .at = s->is_narrow ? 0 : FLOW_S + half * FLOW_SQUARE_BYTES,
                      .down = TILE,
                      .right = FLOW_SQUARE_BYTES / 2};
    const tiles q = {.base = ZYDIS_REGISTER_RSI,
                     .stride = ZYDIS_REGISTER_RBP,
                     .scale = 1,
                     .down = 16 * (int64_t)s->q_stride,
                     .low = 64,
                     .step = 64 << s->is_split};
    if (is_next) {
        EMIT(&m->a, MOV, gpr(ZYDIS_REGISTER_RSI), field(offsetof(flow_step_args, q_next)));
        EMIT(&m->a, MOV, gpr(ZYDIS_REGISTER_RDI), field(offsetof(flow_step_args, k_next)));
    }
    emit_unit(m, q, packed(ZYDIS_REGISTER_RDI, is_next ? 0 : n * s->depth * unit, unit),
              s->depth, s->is_exact ? ROUND_ALL : ROUND_SPLIT, NULL, to,
              last_there >= 0 ? EVENT_SQUARE + last_there : STREAM_NO_EVENT,
              is_next ? STREAM_NO_EVENT : EVENT_SQUARE + n);
}

static void emit_values(matrix *m, int panel)
{
    const flow_shape *s = m->shape;
    const int64_t unit = UNIT << s->is_split;
    const tiles p = {.base = ZYDIS_REGISTER_R15,
                     .stride = ZYDIS_REGISTER_RCX,
                     .scale = 1,
                     .down = TILE,
                     .low = UNIT,
                     .step = unit};
    const tiles o = {.base = ZYDIS_REGISTER_R9,
                     .stride = ZYDIS_REGISTER_RDX,
                     .scale = 1,
                     .at = (int64_t)panel * 128,
                     .down = 16 * (int64_t)s->o_stride,
                     .right = 64};
    emit_unit(m, p, packed(ZYDIS_REGISTER_R8, panel * unit, s->panels * unit), s->squares,
              ROUND_SPLIT, &o, o, STREAM_NO_EVENT, STREAM_NO_EVENT);
}

static saccade_status matrix_stream(const flow_shape *shape, flow_stream *stream,
                                    saccade_error *err)
{
    matrix m = {.a = flow_stream_asm(stream),
                .stream = stream,
                .shape = shape,
                .needs = STREAM_NO_EVENT,
                .event = STREAM_NO_EVENT};
    for (int n = 0, panel = 0; n < shape->squares; n++) {
        emit_scores(&m, n + 1);
        for (; panel * shape->squares < (n + 1) * shape->panels; panel++)
            emit_values(&m, panel);
    }
    for (int c = 0; c < N_ACCUMULATORS; c++)
        flush(&m, c);
    FAIL_IF(m.a.failed, SACCADE_EBACKEND, "jit: tiles of %d x %d dims do not fit", shape->depth,
            shape->panels);
    return SACCADE_OK;
}

/* ---- the step ---- */

static const ZydisRegister saved[] = {ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_RBP,
                                      ZYDIS_REGISTER_R12, ZYDIS_REGISTER_R13,
                                      ZYDIS_REGISTER_R14, ZYDIS_REGISTER_R15};
enum { SAVED = sizeof saved / sizeof *saved };

static void emit_entry(jit_asm *a, const flow_shape *shape)
{
    static const struct {
        ZydisRegister r;
        size_t offset;
    } loads[] =
        {
            {ZYDIS_REGISTER_R12, offsetof(jit_call, s)},
            {ZYDIS_REGISTER_R13, offsetof(flow_step_args, p)},
            {ZYDIS_REGISTER_R15, offsetof(flow_step_args, p_before)},
            {ZYDIS_REGISTER_RSI, offsetof(flow_step_args, q)},
            {ZYDIS_REGISTER_RDI, offsetof(flow_step_args, k)},
            {ZYDIS_REGISTER_R8, offsetof(flow_step_args, v_before)},
            {ZYDIS_REGISTER_R9, offsetof(flow_step_args, o_before)},
        },
      own[2][3] = {
          {{ZYDIS_REGISTER_R10, offsetof(jit_call, uniform)},
           {ZYDIS_REGISTER_R14, offsetof(jit_call, rows)},
           {ZYDIS_REGISTER_R11, offsetof(jit_call, cols)}},
          {{ZYDIS_REGISTER_R10, offsetof(flow_step_args, s[0])},
           {ZYDIS_REGISTER_R11, offsetof(flow_step_args, s[1])}},
      };
    for (int i = 0; i < SAVED; i++)
        EMIT(a, PUSH, gpr(saved[i]));
    EMIT(a, MOV, gpr(ZYDIS_REGISTER_RBX), gpr(ZYDIS_REGISTER_RDI));
    for (size_t i = 0; i < sizeof loads / sizeof *loads; i++)
        EMIT(a, MOV, gpr(loads[i].r), field(loads[i].offset));
    for (int i = 0; i < 3 - shape->is_narrow; i++)
        EMIT(a, MOV, gpr(own[shape->is_narrow][i].r), field(own[shape->is_narrow][i].offset));
    EMIT(a, MOV, gpr(ZYDIS_REGISTER_RCX), jit_imm(64));
    EMIT(a, MOV, gpr(ZYDIS_REGISTER_RBP), jit_imm(shape->q_stride));
    EMIT(a, MOV, gpr(ZYDIS_REGISTER_RDX), jit_imm(shape->o_stride));
}

static void emit_exit(jit_asm *a)
{
    for (int i = SAVED; i-- > 0;)
        EMIT(a, POP, gpr(saved[i]));
    jit_put(a, Z(VZEROUPPER), 0, NULL);
    jit_put(a, Z(RET), 0, NULL);
}

/* Whether two shapes have the same matrix stream. Exact and approximate steps differ in it only
 * where low parts are multiplied. */
static int has_same_tiles(const flow_shape *x, const flow_shape *y)
{
    return x->is_narrow == y->is_narrow && (!x->is_split || x->is_exact == y->is_exact);
}

/* Steps of one plan, one after the other from *end on. */
static saccade_status emit_steps(const flow_shape *shapes, int n, uint8_t *bytes,
                                 size_t capacity, step_place *places, size_t *end,
                                 int32_t *spills, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    flow_stream tiles_part = {0}, vectors_part = {0};
    jit_memo *memo = calloc(1, sizeof *memo);
    FAIL_IF_NULL_GOTO(memo);
    TRY_GOTO(flow_stream_create(&tiles_part, memo, err));
    TRY_GOTO(flow_stream_create(&vectors_part, memo, err));
    for (int i = 0; i < n; i++) {
        int32_t own = 0;
        jit_asm out = {
            .bytes = bytes + *end, .capacity = capacity - *end, .is_wide = 1, .memo = memo};
        if (i == 0 || !has_same_tiles(&shapes[i - 1], &shapes[i])) {
            flow_stream_clear(&tiles_part);
            TRY_GOTO(matrix_stream(&shapes[i], &tiles_part, err));
        }
        flow_stream_clear(&vectors_part);
        TRY_GOTO(flow_vector(&shapes[i], &vectors_part, &own, err));
        emit_entry(&out, &shapes[i]);
        flow_stream_merge(&tiles_part, &vectors_part, shapes[i].is_plain, &out);
        emit_exit(&out);
        FAIL_IF_GOTO(out.failed, SACCADE_EBACKEND, "jit: steps do not fit %zu bytes", capacity);
        places[i] = (step_place){*end, out.size};
        *end = (*end + out.size + 63) / 64 * 64;
        *spills = own > *spills ? own : *spills;
    }
out:
    flow_stream_destroy(&tiles_part);
    flow_stream_destroy(&vectors_part);
    free(memo);
    return status;
}

#else

static saccade_status emit_steps(const flow_shape *shapes, int n, uint8_t *bytes,
                                 size_t capacity, step_place *places, size_t *end,
                                 int32_t *spills, saccade_error *err)
{
    (void)shapes, (void)n, (void)bytes, (void)capacity, (void)places, (void)end, (void)spills;
    FAIL(SACCADE_EBACKEND, "jit: built without Zydis, tiles run block by block");
}

#endif

/* ---- the codes of a plan ---- */

enum { CODES = 4, NARROW = CODES };

struct flow_code {
    flow_shape shape[CODES + 1]; /* is_exact * 2 + is_cut */
    int n;                       /* codes */
    jit_page page;
    step_place place[CODES + 1];
    flow_step_fn *run[CODES + 1];
    uint32_t cuts[2][FLOW_CUTS];
};

/* The packing instruction takes four keys of each of two vectors of 16 keys in turn. */
static void fill_cuts(uint32_t cuts[2][FLOW_CUTS])
{
    uint32_t before = 0;
    for (int n = 0; n < FLOW_CUTS; n++) {
        const int key = n + FLOW_CUT_LEAST;
        cuts[0][n] = before;
        cuts[1][n] = ~before;
        if (key >= 0 && key < FLOW_CUT_MOST)
            before |= 1u << (key % 16 / 4 * 8 + key / 16 * 4 + key % 4);
    }
}

static flow_shape shape_of(const flow_shape *common, int code)
{
    flow_shape s = *common;
    s.is_narrow = code == NARROW;
    s.is_exact = !s.is_narrow && code / 2;
    s.is_word = (!s.score || s.score->is_finite) && !s.is_split && !s.is_exact;
    s.is_cut = s.is_narrow ? !s.is_word : code % 2;
    s.squares = s.is_narrow ? FLOW_NARROW : FLOW_SQUARES;
    return s;
}

static saccade_status emit_all(flow_code *c, const flow_shape *shape, int32_t *spills,
                               saccade_error *err)
{
    enum { CAPACITY = 1 << 20 };
    size_t end = 0;
    TRY(jit_page_begin(CAPACITY, &c->page, err));
    uint8_t *bytes = c->page.bytes;
    fill_cuts(c->cuts);
    c->n = shape->has_narrow ? CODES + 1 : CODES;
    for (int i = 0; i < c->n; i++)
        c->shape[i] = shape_of(shape, i);
    TRY(emit_steps(c->shape, c->n, bytes, CAPACITY, c->place, &end, spills, err));
    return jit_page_end(&c->page, end, err);
}

static flow_step_fn *step_at(const flow_code *c, size_t begin)
{
    const uint8_t *at = c->page.bytes + begin;
    flow_step_fn *run;
    memcpy(&run, &at, sizeof run); /* ISO C has no such cast */
    return run;
}

saccade_status flow_code_create(const flow_shape *shape, flow_code **out, int32_t *spills,
                                saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    flow_code *c = calloc(1, sizeof *c);
    *spills = 0;
    FAIL_IF_NULL(c);
    TRY_GOTO(emit_all(c, shape, spills, err));
    for (int i = 0; i < c->n; i++)
        c->run[i] = step_at(c, c->place[i].begin);
    *out = c;
    c = NULL;
out:
    flow_code_destroy(c);
    return status;
}

void flow_code_destroy(flow_code *c)
{
    if (c)
        jit_page_destroy(&c->page);
    free(c);
}

const flow_shape *flow_code_shape(const flow_code *c, int is_exact)
{
    return &c->shape[is_exact * 2];
}

flow_step_fn *flow_code_narrow(const flow_code *c)
{
    return c->run[NARROW];
}

const flow_shape *flow_code_narrow_shape(const flow_code *c)
{
    return &c->shape[NARROW];
}

const uint32_t *flow_code_cuts(const flow_code *c, int is_from)
{
    return c->cuts[is_from];
}

flow_step_fn *flow_code_run(const flow_code *c, int is_exact, int is_cut)
{
    return c->run[is_exact * 2 + is_cut];
}

/* Whether a table of tanh is in the code. */
static int is_tanh_approx(const flow_shape *shape)
{
    int has_table = 0;
    for (uint32_t i = 0; shape->score && !shape->is_split && i < shape->score->n_nodes; i++)
        has_table |= shape->score->nodes[i].op == JIT_TABLE;
    return has_table;
}

void flow_code_print(const flow_code *c, strbuf *out)
{
    static const char *const names[] = {"whole", "cut", "whole", "cut", "narrow"};
    const flow_shape *approx = &c->shape[0];
    strbuf_printf(out, "stream: steps of %d rows x %d keys; code of a step:\n", FLOW_ROWS,
                  FLOW_KEYS);
    for (int i = 0; i < c->n; i++)
        strbuf_printf(out, "  %s, %s: %zu bytes\n",
                      c->shape[i].is_exact ? "with lse" : "without lse", names[i],
                      c->place[i].size);
    strbuf_printf(out, "without lse: weights by %s%s; until its first row is done:\n",
                  approx->is_word ? "words of bf16" : "a cubic",
                  is_tanh_approx(approx) ? ", tanh to 1.1e-5" : "");
    jit_page_print(&c->page, c->place[0].begin, c->place[0].size, "[r13]", out);
}
