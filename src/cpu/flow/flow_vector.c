/* The vector stream of a step: for each row of each square the score function on a pair of
 * vectors, then the exponential, the row's sum and P. Straight-line code, no loops.
 *
 * The encoder sees one row; those of all squares are its copies. What moves from row to row, or
 * from square to square, is marked (flow_merge.h). */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/jit/jit_regs.h"
#include "cpu/flow/flow_merge.h"

#include "base/cpu_features.h"
#include "base/status.h"

#include <stdlib.h>

#define NO_RUN UINT32_MAX
enum { MOST_UNIFORMS = 6 };
enum { CUT = 1, LOW_BYTES = MAX_MASKS - 1 }; /* mask registers */
enum { SCORE, TIMES };                       /* results of the score mod */

typedef struct vectors {
    jit_emitter t;
    const flow_shape *shape;
    int factor, coefficient[FLOW_COEFFICIENTS]; /* registers, for the whole code */
    int column[LANES];                          /* numbers of a square's keys, when cut */
    int corrections, order, over, ones;         /* of words */
    int high;                                   /* mask of what a high part keeps */
    int square;
} vectors;

/* ---- operands ---- */

static jit_operand flow_at(int64_t offset, int size)
{
    return jit_mem(ZYDIS_REGISTER_R12, ZYDIS_REGISTER_NONE, 0, offset, size);
}

/* A register whose value stays the same in the whole code. */
static int keep(jit_emitter *t)
{
    const int r = jit_take_reg(t, NOWHERE);
    t->is_pinned[r] = 1;
    return r;
}

static void load_constant(vectors *v, int r, int which)
{
    EMIT_VECTOR(&v->t.a, Z(VBROADCASTSS), vec(&v->t, r),
                jit_mem(ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_NONE, 0,
                        (int64_t)offsetof(flow_step_args, constants) + 4 * which, 4));
}

/* Whether squares are cut by masks that lie in memory. */
static int has_masks(const flow_shape *shape)
{
    return shape->is_narrow && shape->is_word;
}

/* Loads a whole vector of what the step is given (rbx). */
static void load_whole(vectors *v, int r, size_t offset)
{
    EMIT_VECTOR(&v->t.a, Z(VMOVUPS), vec(&v->t, r),
                jit_mem(ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_NONE, 0, (int64_t)offset, 64));
}

static void load_words(vectors *v)
{
    jit_emitter *t = &v->t;
    v->corrections = keep(t);
    v->order = keep(t);
    v->over = keep(t);
    v->ones = keep(t);
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_EAX), jit_imm(0x3f803f80)); /* pairs of bf16 */
    EMIT_VECTOR(&t->a, Z(VPBROADCASTD), vec(t, v->ones), gpr(ZYDIS_REGISTER_EAX));
    load_whole(v, v->corrections, offsetof(flow_step_args, corrections));
    load_whole(v, v->order, offsetof(flow_step_args, order));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, v->over), flow_at(FLOW_OVER, 64));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), jit_imm(0x5555555555555555));
    EMIT(&t->a, KMOVQ, mask_reg(LOW_BYTES), gpr(ZYDIS_REGISTER_RAX));
    t->past_mask = LOW_BYTES;
}

/* Scores for bf16 weights that need no lse. */
static int is_approx(const vectors *v)
{
    return v->shape->score && !v->shape->is_exact && !v->shape->is_split;
}

/* The score is a factor of its own times a table's result. */
static int has_times(const vectors *v)
{
    return is_approx(v) && v->shape->score->approx_times != UINT32_MAX;
}

static void load_constants(vectors *v)
{
    if (v->shape->is_word)
        load_words(v);
    if (v->shape->is_split) {
        v->high = keep(&v->t);
        EMIT(&v->t.a, MOV, gpr(ZYDIS_REGISTER_EAX), jit_imm(-0x10000));
        EMIT_VECTOR(&v->t.a, Z(VPBROADCASTD), vec(&v->t, v->high), gpr(ZYDIS_REGISTER_EAX));
    }
    if (!is_approx(v)) {
        v->factor = keep(&v->t);
        load_constant(v, v->factor, 0);
    }
    for (int i = 0; i < flow_coefficients(v->shape); i++) {
        v->coefficient[i] = keep(&v->t);
        load_constant(v, v->coefficient[i], 1 + i);
    }
    for (int lane = 0; v->shape->is_cut && lane < LANES; lane++)
        v->column[lane] = keep(&v->t);
}

static void load_columns(vectors *v)
{
    for (int lane = 0; lane < LANES; lane++)
        load_whole(v, v->column[lane],
                   offsetof(flow_step_args, columns) + (size_t)(v->square * LANES + lane) * 64);
}

/* What a score mod needs for the whole code. */
static void load_uniforms(vectors *v)
{
    uint8_t wanted[JIT_MAX_NODES] = {0};
    jit_emitter *t = &v->t;
    jit_add_result(t, is_approx(v) ? t->g->approx : t->g->results[0]);
    if (has_times(v))
        jit_add_result(t, t->g->approx_times);
    jit_choose_order(t, wanted);
    if (is_approx(v)) {
        v->factor = jit_take_reg(t, (int)t->g->approx_factor * LANES);
        t->is_pinned[v->factor] = 1;
    }
    for (uint32_t i = 0, has_table = 0; i < t->g->n_nodes && !has_table; i++) {
        has_table = wanted[i] && t->g->nodes[i].op == JIT_TABLE;
        for (uint32_t term = 0; has_table && term < JIT_TABLE_TERMS; term++) {
            t->table[term] = keep(t);
            load_whole(v, t->table[term],
                       offsetof(flow_step_args, tanh_terms) + term * sizeof jit_tanh_terms[0]);
        }
    }
    jit_choose_pinned(t, wanted, JIT_UNIFORM, MOST_UNIFORMS);
    jit_load_pinned(t, JIT_UNIFORM, JIT_UNIFORM);
    for (int i = 0; has_times(v) && i < JIT_TABLE_TERMS; i++) {
        const jit_operand terms = vec(t, t->table[i]);
        EMIT_VECTOR(&t->a, Z(VMULPS), terms, terms, vec(t, v->factor));
    }
}

/* ---- a row ---- */

/* The exponent: score times factor, minus the anchor. */
static int emit_exponent(vectors *v, int lane)
{
    jit_emitter *t = &v->t;
    const int from = v->shape->score ? jit_get(t, t->results[SCORE], lane) : NOWHERE;
    const int is_own = from != NOWHERE && t->g->nodes[t->results[SCORE]].level == JIT_TILE;
    const int d = is_own ? from : jit_take_reg(t, NOWHERE);
    const int factor = has_times(v) ? jit_get(t, t->results[TIMES], lane) : v->factor;
    const jit_operand o[] = {vec(t, d), mask_reg(0), vec(t, factor),
                             flow_at(jit_mark(MARK_NUMBER) + FLOW_SHIFT, 4)};
    if (from == NOWHERE)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, d), scores_of(t, lane));
    else if (!is_own)
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, d), vec(t, from));
    jit_put_evex(&t->a, Z(VFMADD213PS), JIT_BROADCAST, 4, o);
    return d;
}

/* Which of a lane's keys lie in [first, past) of the row. */
static int emit_cut(vectors *v, int lane)
{
    enum { NOT_LESS = 5, LESS = 1 };
    jit_emitter *t = &v->t;
    const int k = jit_take_mask(t, NOWHERE);
    const jit_operand column = vec(t, v->column[lane]);
    const jit_operand first[] = {mask_reg(k), mask_reg(0), column,
                                 flow_at(jit_mark(MARK_NUMBER) + FLOW_FIRST, 4),
                                 jit_imm(NOT_LESS)};
    const jit_operand past[] = {mask_reg(k), mask_reg(k), column,
                                flow_at(jit_mark(MARK_NUMBER) + FLOW_PAST, 4), jit_imm(LESS)};
    jit_put_evex(&t->a, Z(VPCMPD), JIT_BROADCAST, 5, first);
    jit_put_evex(&t->a, Z(VPCMPD), JIT_BROADCAST, 5, past);
    return k;
}

/* 2^exponent, 0 where cut off, both lanes in step. */
static void emit_exponentials(vectors *v, const int exponent[LANES], int weight[LANES])
{
    enum { FRACTION = 9 }; /* x minus its floor, no exceptions */
    jit_emitter *t = &v->t;
    int fraction[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        fraction[lane] = jit_take_reg(t, NOWHERE);
        EMIT_VECTOR(&t->a, Z(VREDUCEPS), vec(t, fraction[lane]), vec(t, exponent[lane]),
                    jit_imm(FRACTION));
    }
    for (int lane = 0; lane < LANES; lane++) {
        weight[lane] = jit_take_reg(t, NOWHERE);
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, weight[lane]), vec(t, v->coefficient[0]));
    }
    for (int i = 1; i < flow_coefficients(v->shape); i++)
        for (int lane = 0; lane < LANES; lane++)
            EMIT_VECTOR(&t->a, Z(VFMADD213PS), vec(t, weight[lane]), vec(t, fraction[lane]),
                        vec(t, v->coefficient[i]));
    for (int lane = 0; lane < LANES; lane++) {
        const int k = v->shape->is_cut ? emit_cut(v, lane) : 0;
        const jit_operand o[] = {vec(t, weight[lane]), mask_reg(k), vec(t, weight[lane]),
                                 vec(t, exponent[lane])};
        jit_put_evex(&t->a, Z(VSCALEFPS), k ? JIT_ZEROING : 0, 4, o);
    }
}

enum { PART = 2 * FLOW_ROWS * FLOW_KEYS / FLOW_SQUARES }; /* bytes of a square's P, or half */

/* Where a row of P goes. */
static jit_operand weights_at(int is_low)
{
    return jit_mem(ZYDIS_REGISTER_R13, ZYDIS_REGISTER_NONE, 0,
                   jit_mark(MARK_WEIGHTS) + is_low * PART, 64);
}

/* Cuts weights to their first 8 significant bits. What that takes off goes to P as low
 * parts. */
static void emit_low_parts(vectors *v, const int weight[LANES], const int low[LANES])
{
    jit_emitter *t = &v->t;
    for (int lane = 0; lane < LANES; lane++) {
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, low[lane]), vec(t, weight[lane]));
        EMIT_VECTOR(&t->a, Z(VPANDD), vec(t, weight[lane]), vec(t, weight[lane]),
                    vec(t, v->high));
        EMIT_VECTOR(&t->a, Z(VSUBPS), vec(t, low[lane]), vec(t, low[lane]),
                    vec(t, weight[lane]));
    }
    EMIT_VECTOR(&t->a, Z(VCVTNE2PS2BF16), vec(t, low[0]), vec(t, low[1]), vec(t, low[0]));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), weights_at(1), vec(t, low[0]));
}

/* Packs a row's weights as P has them, into a register, and adds them to the row's sum. */
static int emit_floats(vectors *v, const int exponent[LANES])
{
    jit_emitter *t = &v->t;
    const jit_operand sum = flow_at(jit_mark(MARK_VECTOR) + FLOW_SUM, 64);
    int weight[LANES];
    emit_exponentials(v, exponent, weight);
    const int packed = jit_take_reg(t, NOWHERE);
    EMIT_VECTOR(&t->a, Z(VADDPS), vec(t, packed), vec(t, weight[0]), vec(t, weight[1]));
    EMIT_VECTOR(&t->a, Z(VADDPS), vec(t, packed), vec(t, packed), sum);
    EMIT_VECTOR(&t->a, Z(VMOVUPS), sum, vec(t, packed));
    if (v->shape->is_split)
        emit_low_parts(v, weight, exponent);
    EMIT_VECTOR(&t->a, Z(VCVTNE2PS2BF16), vec(t, packed), vec(t, weight[1]), vec(t, weight[0]));
    return packed;
}

/* emit_floats for weights made as words. Packing interleaves quarters of the two vectors, which
 * is put right at the end. */
static int emit_words(vectors *v, const int exponent[LANES])
{
    jit_emitter *t = &v->t;
    const jit_operand sum = flow_at(jit_mark(MARK_VECTOR) + FLOW_SUM, 64);
    const int word = exponent[0], part = exponent[1], total = jit_take_reg(t, NOWHERE);
    for (int lane = 0; lane < LANES; lane++) {
        const int k = v->shape->is_cut ? emit_cut(v, lane) : 0;
        const jit_operand o[] = {vec(t, exponent[lane]), mask_reg(k), vec(t, exponent[lane])};
        jit_put_evex(&t->a, Z(VCVTPS2DQ), k ? JIT_ZEROING : 0, 3, o);
    }
    if (has_masks(v->shape))
        EMIT(&t->a, KMOVD, mask_reg(CUT),
             jit_mem(ZYDIS_REGISTER_RAX, ZYDIS_REGISTER_NONE, 0, jit_mark(MARK_NUMBER), 4));
    const jit_operand pack[] = {vec(t, word), mask_reg(has_masks(v->shape) ? CUT : 0),
                                vec(t, exponent[0]), vec(t, exponent[1])};
    jit_put_evex(&t->a, Z(VPACKUSDW), has_masks(v->shape) ? JIT_ZEROING : 0, 4, pack);
    EMIT_VECTOR(&t->a, Z(VPORQ), vec(t, v->over), vec(t, v->over), vec(t, word));
    EMIT_VECTOR(&t->a, Z(VPSRLW), vec(t, part), vec(t, word), jit_imm(1));
    const jit_operand look[] = {vec(t, part), mask_reg(LOW_BYTES), vec(t, part),
                                vec(t, v->corrections)};
    jit_put_evex(&t->a, Z(VPERMB), JIT_ZEROING, 4, look);
    EMIT_VECTOR(&t->a, Z(VPSUBW), vec(t, word), vec(t, word), vec(t, part));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, total), sum);
    EMIT_VECTOR(&t->a, Z(VDPBF16PS), vec(t, total), vec(t, word), vec(t, v->ones));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), sum, vec(t, total));
    EMIT_VECTOR(&t->a, Z(VPERMQ), vec(t, word), vec(t, v->order), vec(t, word));
    return word;
}

/* One row of a square. Narrow shapes have two squares: R10 points to the scores of the first
 * one, R11 to those of the second. */
static void emit_row(vectors *v)
{
    jit_emitter *t = &v->t;
    int exponent[LANES];
    t->s_at = jit_mark(MARK_SCORES);
    if (v->shape->is_narrow)
        t->s_base = v->square % 2 ? ZYDIS_REGISTER_R11 : ZYDIS_REGISTER_R10;
    else
        t->s_at += FLOW_S;
    t->row_at = jit_mark(MARK_NUMBER);
    t->column_at = jit_mark(MARK_COLUMN);
    t->n_slots = CALL_SLOTS + LANES;
    if (v->shape->is_narrow) /* a line a row: more at a time would keep tiles waiting */
        EMIT(&t->a, PREFETCHT1,
             jit_mem(ZYDIS_REGISTER_R14, ZYDIS_REGISTER_NONE, 0, jit_mark(MARK_VECTOR), 1));
    if (v->shape->score)
        jit_emit_values(t);
    for (int lane = 0; lane < LANES; lane++)
        exponent[lane] = emit_exponent(v, lane);
    const int packed = v->shape->is_word ? emit_words(v, exponent) : emit_floats(v, exponent);
    EMIT_VECTOR(&t->a, Z(VMOVUPS), weights_at(0), vec(t, packed));
    jit_forget_all(t);
}

/* All rows of a square. rows: where those are that are like them, or NO_RUN. */
static void add_rows(vectors *v, flow_stream *stream, uint32_t *rows)
{
    const int32_t n = v->square, is_wide = !v->shape->is_narrow;
    const int32_t add[MARKS] = {
        [MARK_SCORES] = is_wide * (n % 2) * FLOW_SQUARE_BYTES,
        [MARK_WEIGHTS] = (n << v->shape->is_split) * PART,
        [MARK_COLUMN] = n * (FLOW_KEYS / FLOW_SQUARES) * 4,
    };
    if (*rows != NO_RUN) {
        flow_stream_again(stream, *rows, add);
        return;
    }
    emit_row(v);
    *rows = flow_stream_repeat(stream, &v->t.a, 1, FLOW_ROWS, add);
}

saccade_status flow_vector(const flow_shape *shape, flow_stream *stream, int32_t *spills,
                           saccade_error *err)
{
    uint32_t rows[2] = {NO_RUN, NO_RUN};
    vectors *v = malloc(sizeof *v);
    FAIL_IF_NULL(v);
    jit_emitter *t = &v->t;
    v->shape = shape;
    jit_start(t, shape->score, CPU_AMX, flow_stream_asm(stream));
    t->column_index = ZYDIS_REGISTER_NONE;
    t->frame_base = ZYDIS_REGISTER_R10;
    t->frame_at = shape->frame_at;
    t->lane_bytes = FLOW_SQUARE_BYTES / LANES;
    t->is_stream = 1;
    load_constants(v);
    if (shape->score)
        load_uniforms(v);
    jit_forget_all(t);
    *spills = 0;
    for (v->square = 0; v->square < shape->squares; v->square++) {
        if (shape->is_cut)
            load_columns(v);
        if (has_masks(shape))
            EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX),
                 field(offsetof(flow_step_args, masks[0]) + 8 * (size_t)v->square));
        if (shape->is_narrow)
            EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R14),
                 field(offsetof(flow_step_args, prefetch[0]) + 8 * (size_t)v->square));
        flow_stream_note(stream, &t->a, 0);
        stream->need = v->square ? EVENT_SQUARE + v->square : STREAM_NO_EVENT;
        add_rows(v, stream, &rows[shape->is_narrow && v->square % 2]);
        *spills = t->n_slots > *spills ? t->n_slots : *spills;
        flow_stream_event(stream, EVENT_SQUARE + v->square);
    }
    if (shape->is_word)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), flow_at(FLOW_OVER, 64), vec(t, v->over));
    flow_stream_note(stream, &t->a, 0);
    const int failed =
        t->a.failed || stream->size > STREAM_BYTES || stream->length > STREAM_INSTRUCTIONS;
    free(v);
    FAIL_IF(failed, SACCADE_EBACKEND, "jit: got a mod that is not straight-line code");
    return SACCADE_OK;
}

#endif
