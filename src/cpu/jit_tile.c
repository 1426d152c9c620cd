/* Machine code for the tile level: one loop over rows, inside it one over pairs of vectors of
 * columns, whose operations are interleaved so that both are in flight.
 *
 * Registers are given out as the code is written, by furthest next use (Belady; the body is
 * straight-line). Values of lower levels are never spilled: they are read again from their
 * arrays; the most used ones keep a register through the loop. What has no short instruction
 * sequence calls the interpreter's loop on one vector through the frame.
 *
 *   rbx call   rbp frame   r12 row of s   r13 column bytes   r14 row cell   r15 rows left
 *   r10 uniforms   r11 columns   rax rcx rdx rsi rdi r8 r9 scratch
 *   wide: zmm0-29, k1-k6 given out, zmm30-31, k7 scratch; else ymm0-12, ymm13-15 scratch */
#include "cpu/jit_graph.h"

#include "base/cpu_features.h"
#include "base/status.h"
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AVX512

#include "cpu/jit_asm.h"
#include "mod/arith.h"

#include <stdlib.h>

enum { LANES = 2, MAX_VALUES = JIT_MAX_NODES * LANES, MAX_REGISTERS = 30, MAX_MASKS = 7 };
enum { MAX_PINNED = 12, SLOT_BYTES = 64, CALL_SLOTS = 4 };
enum { NOWHERE = -1 };

typedef struct tile {
    const jit_graph *g;
    jit_asm a;
    int n_registers, scratch, vector_bytes;
    uint32_t result, mask;   /* mask: UINT32_MAX without one */
    uint32_t order[MAX_VALUES]; /* tile values in the order they are computed */
    int n_order, at;            /* at: which of them is being computed */
    int reg[MAX_VALUES], k[MAX_VALUES], slot[MAX_VALUES]; /* where a value is, or NOWHERE */
    int in_reg[MAX_REGISTERS + 2], in_k[MAX_MASKS + 1];   /* value of a register, or NOWHERE */
    uint8_t is_pinned[MAX_REGISTERS + 2], locked[MAX_REGISTERS + 2], k_locked[MAX_MASKS + 1];
    int max_reg[LANES], low; /* pinned: running maxima, and -inf */
    int n_slots;
} tile;

/* ---- operands ---- */

static jit_operand vec(const tile *t, int r)
{
    return jit_reg((t->a.is_wide ? ZYDIS_REGISTER_ZMM0 : ZYDIS_REGISTER_YMM0) + r);
}

static jit_operand mask_reg(int k)
{
    return jit_reg(ZYDIS_REGISTER_K0 + k);
}

static jit_operand field(size_t offset)
{
    return jit_mem(ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_NONE, 0, (int64_t)offset, 8);
}
#define FIELD(name) field(offsetof(jit_call, name))

static jit_operand frame_slot(const tile *t, int slot)
{
    return jit_mem(ZYDIS_REGISTER_RBP, ZYDIS_REGISTER_NONE, 0, (int64_t)slot * SLOT_BYTES,
                   t->vector_bytes);
}

static jit_operand gpr(ZydisRegister r)
{
    return jit_reg(r);
}

static const jit_node *node_of(const tile *t, uint32_t value)
{
    return &t->g->nodes[value / LANES];
}

static int is_mask(const tile *t, uint32_t value)
{
    return t->a.is_wide && node_of(t, value)->type == MOD_BOOL;
}

/* Values of lower levels are the same for both lanes, but for columns. */
static uint32_t value_of(const tile *t, uint32_t node, int lane)
{
    return node * LANES + (t->g->nodes[node].level >= JIT_COL ? (uint32_t)lane : 0);
}

/* ---- next uses ---- */

static int uses(const tile *t, int at, uint32_t value)
{
    const int lane = (int)(t->order[at] % LANES);
    const jit_node *n = node_of(t, t->order[at]);
    for (int i = 0; i < n->n_args; i++)
        if (value_of(t, n->args[i], lane) == value)
            return 1;
    return 0;
}

/* Results are stored at the end, so they are used at n_order. */
static int next_use(const tile *t, uint32_t value)
{
    for (int i = t->at; i < t->n_order; i++)
        if (uses(t, i, value))
            return i;
    for (int lane = 0; lane < LANES; lane++)
        if (value_of(t, t->result, lane) == value
            || (t->mask != UINT32_MAX && value_of(t, t->mask, lane) == value))
            return t->n_order;
    return INT32_MAX;
}

/* ---- registers ---- */

static void forget_reg(tile *t, int r)
{
    if (t->in_reg[r] != NOWHERE)
        t->reg[t->in_reg[r]] = NOWHERE;
    t->in_reg[r] = NOWHERE;
}

static int new_slot(tile *t)
{
    return t->n_slots++;
}

static void move_out(tile *t, int r)
{
    const uint32_t value = (uint32_t)t->in_reg[r];
    if (node_of(t, value)->level == JIT_TILE && t->slot[value] == NOWHERE
        && next_use(t, value) != INT32_MAX) {
        t->slot[value] = new_slot(t);
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VMOVUPS, frame_slot(t, t->slot[value]), vec(t, r));
    }
    forget_reg(t, r);
}

/* A register for `value` (or NOWHERE: for a while); locked until unlock_all. */
static int take_reg(tile *t, int value)
{
    int best = NOWHERE, best_use = -1;
    for (int r = 0; r < t->n_registers; r++) {
        if (t->is_pinned[r] || t->locked[r])
            continue;
        const int use = t->in_reg[r] == NOWHERE ? INT32_MAX
                                                : next_use(t, (uint32_t)t->in_reg[r]);
        if (use > best_use) {
            best = r;
            best_use = use;
        }
    }
    if (best == NOWHERE) {
        t->a.failed = 1;
        return 0;
    }
    if (t->in_reg[best] != NOWHERE)
        move_out(t, best);
    t->locked[best] = 1;
    t->in_reg[best] = value;
    if (value != NOWHERE)
        t->reg[value] = best;
    return best;
}

static void move_out_mask(tile *t, int k)
{
    const uint32_t value = (uint32_t)t->in_k[k];
    if (node_of(t, value)->level == JIT_TILE && t->slot[value] == NOWHERE
        && next_use(t, value) != INT32_MAX) {
        t->slot[value] = new_slot(t);
        jit_operand to = frame_slot(t, t->slot[value]);
        to.mem.size = 2;
        EMIT(&t->a, KMOVW, to, mask_reg(k));
    }
    t->k[value] = NOWHERE;
    t->in_k[k] = NOWHERE;
}

static int take_mask(tile *t, int value)
{
    int best = NOWHERE, best_use = -1;
    for (int k = 1; k < MAX_MASKS; k++) {
        if (t->k_locked[k])
            continue;
        const int use = t->in_k[k] == NOWHERE ? INT32_MAX
                                              : next_use(t, (uint32_t)t->in_k[k]);
        if (use > best_use) {
            best = k;
            best_use = use;
        }
    }
    if (best == NOWHERE) {
        t->a.failed = 1;
        return 1;
    }
    if (t->in_k[best] != NOWHERE)
        move_out_mask(t, best);
    t->k_locked[best] = 1;
    t->in_k[best] = value;
    if (value != NOWHERE)
        t->k[value] = best;
    return best;
}

/* Ends an instruction: temporaries and values without a further use give their registers back. */
static void unlock_all(tile *t)
{
    for (int r = 0; r < t->n_registers; r++) {
        t->locked[r] = 0;
        if (!t->is_pinned[r] && t->in_reg[r] != NOWHERE
            && next_use(t, (uint32_t)t->in_reg[r]) == INT32_MAX)
            forget_reg(t, r);
    }
    for (int k = 1; k < MAX_MASKS; k++) {
        t->k_locked[k] = 0;
        if (t->in_k[k] != NOWHERE && next_use(t, (uint32_t)t->in_k[k]) == INT32_MAX) {
            t->k[t->in_k[k]] = NOWHERE;
            t->in_k[k] = NOWHERE;
        }
    }
}

/* ---- values of lower levels ---- */

static void load_lower(tile *t, const jit_node *n, int lane, int r)
{
    const ZydisRegister none = ZYDIS_REGISTER_NONE;
    if (n->level == JIT_UNIFORM)
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VBROADCASTSS, vec(t, r),
                    jit_mem(ZYDIS_REGISTER_R10, none, 0, 4 * (int64_t)n->slot, 4));
    else if (n->level == JIT_ROW)
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VBROADCASTSS, vec(t, r),
                    jit_mem(ZYDIS_REGISTER_R14, none, 0, 4 * (int64_t)n->slot * JIT_ROWS, 4));
    else
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VMOVUPS, vec(t, r),
                    jit_mem(ZYDIS_REGISTER_R11, ZYDIS_REGISTER_R13, 1,
                            4 * (int64_t)n->slot * JIT_COLS + lane * t->vector_bytes,
                            t->vector_bytes));
    if (n->type == MOD_BOOL && !t->a.is_wide) { /* 0, 1 to 0, -1 */
        EMIT(&t->a, VPXOR, vec(t, t->scratch), vec(t, t->scratch), vec(t, t->scratch));
        EMIT(&t->a, VPSUBD, vec(t, r), vec(t, t->scratch), vec(t, r));
    }
}

/* Register that holds the value, locked. */
static int get(tile *t, uint32_t node, int lane)
{
    const uint32_t value = value_of(t, node, lane);
    const jit_node *n = node_of(t, value);
    if (t->reg[value] == NOWHERE) {
        const int r = take_reg(t, (int)value);
        if (n->level != JIT_TILE)
            load_lower(t, n, lane, r);
        else
            EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VMOVUPS, vec(t, r),
                        frame_slot(t, t->slot[value]));
    }
    t->locked[t->reg[value]] = 1;
    return t->reg[value];
}

/* The same for a bool in a mask register. */
static int get_mask(tile *t, uint32_t node, int lane)
{
    const uint32_t value = value_of(t, node, lane);
    const jit_node *n = node_of(t, value);
    if (t->k[value] == NOWHERE) {
        const int k = take_mask(t, (int)value);
        if (n->level != JIT_TILE) {
            load_lower(t, n, lane, t->scratch);
            EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VPTESTMD, mask_reg(k), vec(t, t->scratch),
                        vec(t, t->scratch));
        } else {
            jit_operand from = frame_slot(t, t->slot[value]);
            from.mem.size = 2;
            EMIT(&t->a, KMOVW, mask_reg(k), from);
        }
    }
    t->k_locked[t->k[value]] = 1;
    return t->k[value];
}

/* ---- simple operations ---- */

typedef struct simple_op {
    uint16_t op;
    ZydisMnemonic mnemonic;
    int imm; /* NOWHERE: none */
} simple_op;

#define Z(name) ZYDIS_MNEMONIC_##name
static const simple_op simple_ops[] = {
    {OP_iadd, Z(VPADDD), NOWHERE},   {OP_isub, Z(VPSUBD), NOWHERE},
    {OP_imul, Z(VPMULLD), NOWHERE},  {OP_imin, Z(VPMINSD), NOWHERE},
    {OP_imax, Z(VPMAXSD), NOWHERE},  {OP_iabs, Z(VPABSD), NOWHERE},
    {OP_i2f, Z(VCVTDQ2PS), NOWHERE}, {OP_fadd, Z(VADDPS), NOWHERE},
    {OP_fsub, Z(VSUBPS), NOWHERE},   {OP_fmul, Z(VMULPS), NOWHERE},
    {OP_fmin, Z(VMINPS), NOWHERE},   {OP_fmax, Z(VMAXPS), NOWHERE},
    {OP_fsqrt, Z(VSQRTPS), NOWHERE},
};
/* Bitwise ones have another name with masks. */
static const struct {
    uint16_t op;
    ZydisMnemonic wide, narrow;
} bit_ops[] = {
    {OP_iand, Z(VPANDD), Z(VPAND)},
    {OP_ior, Z(VPORD), Z(VPOR)},
    {OP_ixor, Z(VPXORD), Z(VPXOR)},
};
static const simple_op round_ops[] = {
    {OP_ffloor, 0, 9}, {OP_fceil, 0, 10}, {OP_ftrunc, 0, 11}, {JIT_NEAREST, 0, 8},
};

static int emit_simple(tile *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof simple_ops / sizeof *simple_ops; i++) {
        if (simple_ops[i].op != n->op)
            continue;
        const int x = get(t, n->args[0], lane);
        const int y = n->n_args > 1 ? get(t, n->args[1], lane) : 0;
        const int d = take_reg(t, (int)value);
        if (n->n_args > 1)
            EMIT_VECTOR(&t->a, simple_ops[i].mnemonic, vec(t, d), vec(t, x), vec(t, y));
        else
            EMIT_VECTOR(&t->a, simple_ops[i].mnemonic, vec(t, d), vec(t, x));
        return 1;
    }
    return 0;
}

static int emit_bits(tile *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof bit_ops / sizeof *bit_ops; i++) {
        if (bit_ops[i].op != n->op)
            continue;
        const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
        const int d = take_reg(t, (int)value);
        EMIT_VECTOR(&t->a, t->a.is_wide ? bit_ops[i].wide : bit_ops[i].narrow, vec(t, d),
                    vec(t, x), vec(t, y));
        return 1;
    }
    return 0;
}

static int emit_round(tile *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof round_ops / sizeof *round_ops; i++) {
        if (round_ops[i].op != n->op)
            continue;
        const int x = get(t, n->args[0], lane), d = take_reg(t, (int)value);
        EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VRNDSCALEPS) : Z(VROUNDPS), vec(t, d), vec(t, x),
                    jit_imm(round_ops[i].imm));
        return 1;
    }
    return 0;
}

/* ---- comparisons ---- */

/* Predicates of vpcmpd and vcmpps: < <= == != as C has them for NaN. */
static const simple_op compare_ops[] = {
    {OP_ilt, Z(VPCMPD), 1},  {OP_ile, Z(VPCMPD), 2},  {OP_ieq, Z(VPCMPD), 0},
    {OP_ine, Z(VPCMPD), 4},  {OP_flt, Z(VCMPPS), 17}, {OP_fle, Z(VCMPPS), 18},
    {OP_feq, Z(VCMPPS), 0},  {OP_fne, Z(VCMPPS), 4},
};

static void all_ones(tile *t, int r)
{
    EMIT(&t->a, VPCMPEQD, vec(t, r), vec(t, r), vec(t, r));
}

/* AVX2 compares ints only by > and ==. */
static void compare_narrow(tile *t, int op, int d, int x, int y)
{
    if (op == OP_ieq || op == OP_ine)
        EMIT(&t->a, VPCMPEQD, vec(t, d), vec(t, x), vec(t, y));
    else if (op == OP_ilt)
        EMIT(&t->a, VPCMPGTD, vec(t, d), vec(t, y), vec(t, x));
    else
        EMIT(&t->a, VPCMPGTD, vec(t, d), vec(t, x), vec(t, y));
    if (op == OP_ine || op == OP_ile) {
        all_ones(t, t->scratch);
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, d), vec(t, t->scratch));
    }
}

static int emit_compare(tile *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof compare_ops / sizeof *compare_ops; i++) {
        if (compare_ops[i].op != n->op)
            continue;
        const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
        const jit_operand imm = jit_imm(compare_ops[i].imm);
        if (t->a.is_wide) {
            const int k = take_mask(t, (int)value);
            EMIT_VECTOR(&t->a, compare_ops[i].mnemonic, mask_reg(k), vec(t, x), vec(t, y), imm);
            return 1;
        }
        const int d = take_reg(t, (int)value);
        if (compare_ops[i].mnemonic == Z(VCMPPS))
            EMIT(&t->a, VCMPPS, vec(t, d), vec(t, x), vec(t, y), imm);
        else
            compare_narrow(t, n->op, d, x, y);
        return 1;
    }
    return 0;
}

/* ---- bools and selection ---- */

static void logic_wide(tile *t, int op, int d, int x, int y)
{
    const jit_operand o[3] = {mask_reg(d), mask_reg(x), mask_reg(y)};
    static const struct {
        int op;
        ZydisMnemonic mnemonic;
    } names[] = {
        {OP_and, Z(KANDW)}, {OP_or, Z(KORW)}, {OP_beq, Z(KXNORW)}, {OP_bne, Z(KXORW)},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].op == op)
            jit_put(&t->a, names[i].mnemonic, 3, o);
}

static void logic_narrow(tile *t, int op, int d, int x, int y)
{
    if (op == OP_and)
        EMIT(&t->a, VPAND, vec(t, d), vec(t, x), vec(t, y));
    else if (op == OP_or)
        EMIT(&t->a, VPOR, vec(t, d), vec(t, x), vec(t, y));
    else
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, x), vec(t, y));
    if (op == OP_beq) {
        all_ones(t, t->scratch);
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, d), vec(t, t->scratch));
    }
}

static int emit_logic(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_and && n->op != OP_or && n->op != OP_beq && n->op != OP_bne)
        return 0;
    if (t->a.is_wide) {
        const int x = get_mask(t, n->args[0], lane), y = get_mask(t, n->args[1], lane);
        logic_wide(t, n->op, take_mask(t, (int)value), x, y);
        return 1;
    }
    const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
    logic_narrow(t, n->op, take_reg(t, (int)value), x, y);
    return 1;
}

static int emit_not(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_not && n->op != OP_inot)
        return 0;
    if (n->op == OP_not && t->a.is_wide) {
        const int x = get_mask(t, n->args[0], lane);
        EMIT(&t->a, KNOTW, mask_reg(take_mask(t, (int)value)), mask_reg(x));
        return 1;
    }
    const int x = get(t, n->args[0], lane), d = take_reg(t, (int)value);
    if (t->a.is_wide) { /* all bits: the ternary function 0xff */
        EMIT_VECTOR(&t->a, Z(VPTERNLOGD), vec(t, t->scratch), vec(t, t->scratch),
                    vec(t, t->scratch), jit_imm(0xff));
        EMIT_VECTOR(&t->a, Z(VPXORD), vec(t, d), vec(t, x), vec(t, t->scratch));
    } else {
        all_ones(t, t->scratch);
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, x), vec(t, t->scratch));
    }
    return 1;
}

/* d = condition ? x : y */
static void blend(tile *t, int d, int condition, int x, int y)
{
    if (t->a.is_wide) {
        EMIT(&t->a, VBLENDMPS, vec(t, d), mask_reg(condition), vec(t, y), vec(t, x));
        return;
    }
    jit_operand o[4] = {vec(t, d), vec(t, y), vec(t, x), vec(t, condition)};
    o[3].reg.is4 = 1;
    jit_put(&t->a, Z(VBLENDVPS), 4, o);
}

static int emit_select(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op == OP_isel || n->op == OP_fsel || (n->op == OP_bsel && !t->a.is_wide)) {
        const int c = t->a.is_wide ? get_mask(t, n->args[0], lane) : get(t, n->args[0], lane);
        const int x = get(t, n->args[1], lane), y = get(t, n->args[2], lane);
        blend(t, take_reg(t, (int)value), c, x, y);
        return 1;
    }
    if (n->op != OP_bsel)
        return 0;
    const int c = get_mask(t, n->args[0], lane), x = get_mask(t, n->args[1], lane);
    const int y = get_mask(t, n->args[2], lane), d = take_mask(t, (int)value);
    EMIT(&t->a, KANDNW, mask_reg(7), mask_reg(c), mask_reg(y));
    EMIT(&t->a, KANDW, mask_reg(d), mask_reg(c), mask_reg(x));
    EMIT(&t->a, KORW, mask_reg(d), mask_reg(d), mask_reg(7));
    return 1;
}

/* ---- the rest that runs in line ---- */

/* Bits of one number in a register, by rax. */
static void load_bits(tile *t, int r, uint32_t bits)
{
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_EAX), jit_imm((int32_t)bits));
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VPBROADCASTD), vec(t, r), gpr(ZYDIS_REGISTER_EAX));
        return;
    }
    EMIT(&t->a, VMOVD, jit_reg(ZYDIS_REGISTER_XMM0 + r), gpr(ZYDIS_REGISTER_EAX));
    EMIT(&t->a, VPBROADCASTD, vec(t, r), jit_reg(ZYDIS_REGISTER_XMM0 + r));
}

static int emit_sign(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_fneg && n->op != OP_fabs && n->op != OP_ineg)
        return 0;
    const int x = get(t, n->args[0], lane), d = take_reg(t, (int)value);
    if (n->op == OP_ineg) {
        EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VPXORD) : Z(VPXOR), vec(t, t->scratch),
                    vec(t, t->scratch), vec(t, t->scratch));
        EMIT_VECTOR(&t->a, Z(VPSUBD), vec(t, d), vec(t, t->scratch), vec(t, x));
        return 1;
    }
    load_bits(t, t->scratch, n->op == OP_fneg ? 0x80000000u : 0x7fffffffu);
    EMIT_VECTOR(&t->a,
                n->op == OP_fneg ? (t->a.is_wide ? Z(VPXORD) : Z(VPXOR))
                                 : (t->a.is_wide ? Z(VPANDD) : Z(VPAND)),
                vec(t, d), vec(t, x), vec(t, t->scratch));
    return 1;
}

static int emit_b2i(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_b2i)
        return 0;
    if (!t->a.is_wide) {
        const int x = get(t, n->args[0], lane);
        EMIT(&t->a, VPSRLD, vec(t, take_reg(t, (int)value)), vec(t, x), jit_imm(31));
        return 1;
    }
    const int k = get_mask(t, n->args[0], lane), d = take_reg(t, (int)value);
    EMIT(&t->a, VPMOVM2D, vec(t, d), mask_reg(k));
    EMIT_VECTOR(&t->a, Z(VPSRLD), vec(t, d), vec(t, d), jit_imm(31));
    return 1;
}

static int emit_shift(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_ishl && n->op != OP_ishr)
        return 0;
    const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
    const int d = take_reg(t, (int)value);
    load_bits(t, t->scratch, 31);
    EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VPANDD) : Z(VPAND), vec(t, t->scratch),
                vec(t, t->scratch), vec(t, y));
    EMIT_VECTOR(&t->a, n->op == OP_ishl ? Z(VPSLLVD) : Z(VPSRAVD), vec(t, d), vec(t, x),
                vec(t, t->scratch));
    return 1;
}

/* x / y, 0 where y is 0. */
static int emit_divide(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_fdiv)
        return 0;
    const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
    const int d = take_reg(t, (int)value), zero = t->scratch;
    EMIT_VECTOR(&t->a, Z(VDIVPS), vec(t, d), vec(t, x), vec(t, y));
    EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VPXORD) : Z(VPXOR), vec(t, zero), vec(t, zero),
                vec(t, zero));
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VCMPPS), mask_reg(7), vec(t, y), vec(t, zero), jit_imm(0));
        EMIT(&t->a, VBLENDMPS, vec(t, d), mask_reg(7), vec(t, d), vec(t, zero));
    } else {
        EMIT(&t->a, VCMPPS, vec(t, zero), vec(t, y), vec(t, zero), jit_imm(0));
        EMIT(&t->a, VANDNPS, vec(t, d), vec(t, zero), vec(t, d));
    }
    return 1;
}

/* x * y + z into a copy of x. */
static int emit_fma(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_FMA)
        return 0;
    const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
    const int z = get(t, n->args[2], lane), d = take_reg(t, (int)value);
    EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, d), vec(t, x));
    EMIT_VECTOR(&t->a, Z(VFMADD213PS), vec(t, d), vec(t, y), vec(t, z));
    return 1;
}

/* x * 2^n; AVX2 multiplies by two powers, so that neither leaves the normal numbers. */
static int emit_scalef(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_SCALEF)
        return 0;
    const int x = get(t, n->args[0], lane), y = get(t, n->args[1], lane);
    const int d = take_reg(t, (int)value);
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VSCALEFPS), vec(t, d), vec(t, x), vec(t, y));
        return 1;
    }
    const jit_operand whole = vec(t, 14), half = vec(t, 15), bias = vec(t, 13);
    EMIT(&t->a, VCVTPS2DQ, whole, vec(t, y));
    EMIT(&t->a, VPSRAD, half, whole, jit_imm(1));
    EMIT(&t->a, VPSUBD, whole, whole, half);
    load_bits(t, 13, 127);
    EMIT(&t->a, VPADDD, whole, whole, bias);
    EMIT(&t->a, VPADDD, half, half, bias);
    EMIT(&t->a, VPSLLD, whole, whole, jit_imm(23));
    EMIT(&t->a, VPSLLD, half, half, jit_imm(23));
    EMIT(&t->a, VMULPS, vec(t, d), vec(t, x), whole);
    EMIT(&t->a, VMULPS, vec(t, d), vec(t, d), half);
    return 1;
}

static int emit_input(tile *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_INPUT)
        return 0;
    const int scale = get(t, n->args[0], lane), d = take_reg(t, (int)value);
    EMIT_VECTOR(&t->a, Z(VMULPS), vec(t, d), vec(t, scale),
                jit_mem(ZYDIS_REGISTER_R12, ZYDIS_REGISTER_R13, 1, lane * t->vector_bytes,
                        t->vector_bytes));
    return 1;
}

static int emit_read(tile *t, const jit_node *n, uint32_t value, int lane)
{
    const saccade_dtype dtype = (saccade_dtype)t->g->dtype[n->op == JIT_READ ? n->imm : 0];
    if (n->op != JIT_READ || !jit_reads_inline(dtype))
        return 0;
    const int i = get(t, n->args[0], lane), d = take_reg(t, (int)value);
    const int scale = (int)saccade_dtype_bytes(dtype);
    const ZydisRegister index = vec(t, i).reg.value;
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX),
         field(offsetof(jit_call, tensors) + 8 * (size_t)n->imm));
    if (t->a.is_wide) {
        EMIT(&t->a, KXNORW, mask_reg(7), mask_reg(7), mask_reg(7));
        EMIT(&t->a, VGATHERDPS, vec(t, d), mask_reg(7),
             jit_mem(ZYDIS_REGISTER_RAX, index, scale, 0, 4));
    } else {
        all_ones(t, t->scratch);
        EMIT(&t->a, VGATHERDPS, vec(t, d), jit_mem(ZYDIS_REGISTER_RAX, index, scale, 0, 4),
             vec(t, t->scratch));
    }
    return 1;
}

/* ---- calls ---- */

static void read_lanes(void *out, const void *offsets, const void *data, int32_t dtype,
                       int32_t n)
{
    int32_t *to = out;
    for (int i = 0; i < n; i++)
        to[i] = eval_read((saccade_dtype)dtype, data, ((const int32_t *)offsets)[i]).i;
}

/* Operand i of a call goes to slot i of the frame, bools as 0 and 1. */
static void store_operand(tile *t, uint32_t node, int lane, int slot)
{
    const int is_bool = t->g->nodes[node].type == MOD_BOOL;
    if (!is_bool) {
        EMIT_VECTOR(&t->a, Z(VMOVUPS), frame_slot(t, slot), vec(t, get(t, node, lane)));
        return;
    }
    if (t->a.is_wide)
        EMIT(&t->a, VPMOVM2D, vec(t, t->scratch), mask_reg(get_mask(t, node, lane)));
    else
        EMIT(&t->a, VMOVAPS, vec(t, t->scratch), vec(t, get(t, node, lane)));
    EMIT_VECTOR(&t->a, Z(VPSRLD), vec(t, t->scratch), vec(t, t->scratch), jit_imm(31));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), frame_slot(t, slot), vec(t, t->scratch));
}

/* Everything in registers is lost in a call: values that are needed go out, pinned ones come
 * back afterwards. */
static void clear_registers(tile *t)
{
    for (int r = 0; r < t->n_registers; r++)
        if (!t->is_pinned[r] && t->in_reg[r] != NOWHERE)
            move_out(t, r);
    for (int k = 1; k < MAX_MASKS; k++)
        if (t->in_k[k] != NOWHERE)
            move_out_mask(t, k);
}

static void load_pinned(tile *t, int from_level, int to_level)
{
    for (int r = 0; r < t->n_registers; r++) {
        if (!t->is_pinned[r] || t->in_reg[r] == NOWHERE)
            continue;
        const jit_node *n = node_of(t, (uint32_t)t->in_reg[r]);
        if (n->level >= from_level && n->level <= to_level)
            load_lower(t, n, 0, r);
    }
}

static void load_bases(tile *t)
{
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R10), FIELD(uniform));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R11), FIELD(cols));
    load_bits(t, t->low, 0xff800000u);
}

static void slot_address(tile *t, ZydisRegister r, int slot)
{
    EMIT(&t->a, LEA, gpr(r), jit_mem(ZYDIS_REGISTER_RBP, ZYDIS_REGISTER_NONE, 0,
                                     (int64_t)slot * SLOT_BYTES, 8));
}

static void emit_call(tile *t, const jit_node *n, uint32_t value, int lane)
{
    const strip_table *table = t->a.is_wide ? &strip_table_avx512 : &strip_table_avx2;
    const int is_read = n->op == JIT_READ;
    uint64_t target;
    for (int i = 0; i < n->n_args; i++)
        store_operand(t, n->args[i], lane, i);
    unlock_all(t);
    clear_registers(t);
    for (int i = 0; i < LANES; i++)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), frame_slot(t, CALL_SLOTS + i), vec(t, t->max_reg[i]));
    slot_address(t, ZYDIS_REGISTER_RDI, 3);
    slot_address(t, ZYDIS_REGISTER_RSI, 0);
    if (is_read) {
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RDX),
             field(offsetof(jit_call, tensors) + 8 * (size_t)n->imm));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_ECX), jit_imm(t->g->dtype[n->imm]));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R8D), jit_imm(t->vector_bytes / 4));
        target = (uint64_t)(uintptr_t)read_lanes;
    } else {
        slot_address(t, ZYDIS_REGISTER_RDX, 1);
        slot_address(t, ZYDIS_REGISTER_RCX, 2);
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R8D), jit_imm(1));
        EMIT(&t->a, XOR, gpr(ZYDIS_REGISTER_R9D), gpr(ZYDIS_REGISTER_R9D));
        target = (uint64_t)(uintptr_t)table->op[n->op];
    }
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), jit_imm((int64_t)target));
    EMIT(&t->a, CALL, gpr(ZYDIS_REGISTER_RAX));
    load_bases(t);
    load_pinned(t, JIT_UNIFORM, JIT_ROW);
    for (int i = 0; i < LANES; i++)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, t->max_reg[i]), frame_slot(t, CALL_SLOTS + i));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, t->scratch), frame_slot(t, 3));
    if (is_mask(t, value)) {
        EMIT_VECTOR(&t->a, Z(VPTESTMD), mask_reg(take_mask(t, (int)value)),
                    vec(t, t->scratch), vec(t, t->scratch));
        return;
    }
    const int d = take_reg(t, (int)value);
    if (n->type == MOD_BOOL) {
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, d), vec(t, d));
        EMIT(&t->a, VPSUBD, vec(t, d), vec(t, d), vec(t, t->scratch));
    } else {
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, d), vec(t, t->scratch));
    }
}

/* ---- the body ---- */

typedef int emit_fn(tile *t, const jit_node *n, uint32_t value, int lane);
static emit_fn *const emitters[] = {
    emit_simple, emit_bits,  emit_round,  emit_compare, emit_logic, emit_not,   emit_select,
    emit_sign,   emit_b2i,   emit_shift,  emit_divide,  emit_fma,   emit_scalef, emit_input,
    emit_read,
};

static void emit_value(tile *t, uint32_t value)
{
    const jit_node *n = node_of(t, value);
    const int lane = (int)(value % LANES);
    for (size_t i = 0; i < sizeof emitters / sizeof *emitters; i++)
        if (emitters[i](t, n, value, lane))
            return;
    emit_call(t, n, value, lane);
}

/* Score (or -inf where the mask is false) into s, and into the running maximum. */
static void store_result(tile *t, int lane)
{
    int r = get(t, t->result, lane);
    if (t->mask != UINT32_MAX) {
        const int c = t->a.is_wide ? get_mask(t, t->mask, lane) : get(t, t->mask, lane);
        const int d = take_reg(t, NOWHERE);
        blend(t, d, c, r, t->low);
        r = d;
    }
    EMIT_VECTOR(&t->a, Z(VMOVUPS),
                jit_mem(ZYDIS_REGISTER_R12, ZYDIS_REGISTER_R13, 1, lane * t->vector_bytes,
                        t->vector_bytes),
                vec(t, r));
    EMIT_VECTOR(&t->a, Z(VMAXPS), vec(t, t->max_reg[lane]), vec(t, r),
                vec(t, t->max_reg[lane]));
    for (int i = 0; i < t->n_registers; i++)
        if (t->locked[i] && t->in_reg[i] == NOWHERE)
            t->locked[i] = 0;
}

static void forget_all(tile *t)
{
    for (int r = 0; r < t->n_registers; r++)
        if (!t->is_pinned[r])
            forget_reg(t, r);
    for (int k = 1; k < MAX_MASKS; k++) {
        if (t->in_k[k] != NOWHERE)
            t->k[t->in_k[k]] = NOWHERE;
        t->in_k[k] = NOWHERE;
    }
    memset(t->locked, 0, sizeof t->locked);
    memset(t->k_locked, 0, sizeof t->k_locked);
}

static void emit_body(tile *t)
{
    for (t->at = 0; t->at < t->n_order;) {
        const uint32_t value = t->order[t->at];
        emit_value(t, value);
        t->at++;
        unlock_all(t);
    }
    for (int lane = 0; lane < LANES; lane++) {
        store_result(t, lane);
        memset(t->locked, 0, sizeof t->locked);
        memset(t->k_locked, 0, sizeof t->k_locked);
    }
    forget_all(t);
}

/* Largest of a row, over both lanes' vectors, to [row_max]. */
static void reduce_max(tile *t)
{
    const int top = t->scratch, part = t->scratch + 1;
    const ZydisRegister y = ZYDIS_REGISTER_YMM0, x = ZYDIS_REGISTER_XMM0;
    EMIT_VECTOR(&t->a, Z(VMAXPS), vec(t, top), vec(t, t->max_reg[0]), vec(t, t->max_reg[1]));
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VEXTRACTF32X8), jit_reg(y + part), vec(t, top), jit_imm(1));
        EMIT_VECTOR(&t->a, Z(VMAXPS), jit_reg(y + top), jit_reg(y + top), jit_reg(y + part));
        EMIT_VECTOR(&t->a, Z(VEXTRACTF32X4), jit_reg(x + part), jit_reg(y + top), jit_imm(1));
    } else {
        EMIT(&t->a, VEXTRACTF128, jit_reg(x + part), vec(t, top), jit_imm(1));
    }
    EMIT_VECTOR(&t->a, Z(VMAXPS), jit_reg(x + top), jit_reg(x + top), jit_reg(x + part));
    for (int imm = 0x4e; imm; imm = imm == 0x4e ? 0xb1 : 0) { /* swap halves, then pairs */
        EMIT_VECTOR(&t->a, Z(VPSHUFD), jit_reg(x + part), jit_reg(x + top), jit_imm(imm));
        EMIT_VECTOR(&t->a, Z(VMAXPS), jit_reg(x + top), jit_reg(x + top), jit_reg(x + part));
    }
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), FIELD(row_max));
    EMIT_VECTOR(&t->a, Z(VMOVSS),
                jit_mem(ZYDIS_REGISTER_RAX, ZYDIS_REGISTER_NONE, 0, 0, 4), jit_reg(x + top));
    EMIT(&t->a, ADD, FIELD(row_max), jit_imm(4));
}

/* Jump back to `target` while not zero (or while less). */
static void jump_back(tile *t, ZydisMnemonic mnemonic, size_t target)
{
    ZydisEncoderRequest r;
    ZyanUSize length = t->a.capacity - t->a.size;
    memset(&r, 0, sizeof r);
    r.machine_mode = ZYDIS_MACHINE_MODE_LONG_64;
    r.mnemonic = mnemonic;
    r.branch_type = ZYDIS_BRANCH_TYPE_NEAR;
    r.branch_width = ZYDIS_BRANCH_WIDTH_32;
    r.operand_count = 1;
    r.operands[0] = jit_imm((int64_t)target - (int64_t)t->a.size - 6); /* 0f 8x + 4 bytes */
    if (t->a.failed || length < ZYDIS_MAX_INSTRUCTION_LENGTH
        || ZYAN_FAILED(ZydisEncoderEncodeInstruction(&r, t->a.bytes + t->a.size, &length))
        || length != 6)
        t->a.failed = 1;
    else
        t->a.size += length;
}

/* ---- what is computed, what is pinned ---- */

static void mark(const jit_graph *g, uint32_t node, uint8_t *wanted)
{
    wanted[node] = 1;
    for (uint32_t i = node + 1; i-- > 0;)
        for (int k = 0; wanted[i] && k < g->nodes[i].n_args; k++)
            wanted[g->nodes[i].args[k]] = 1;
}

static void choose_order(tile *t, uint8_t *wanted)
{
    mark(t->g, t->result, wanted);
    if (t->mask != UINT32_MAX)
        mark(t->g, t->mask, wanted);
    for (uint32_t i = 0; i < t->g->n_nodes; i++)
        for (int lane = 0; wanted[i] && t->g->nodes[i].level == JIT_TILE && lane < LANES; lane++)
            t->order[t->n_order++] = i * LANES + (uint32_t)lane;
}

static int use_count(const tile *t, uint32_t node)
{
    int n = 0;
    for (int i = 0; i < t->n_order; i += LANES)
        n += uses(t, i, node * LANES);
    return n;
}

/* The uniform and row values with the most uses get registers for the whole loop. */
static void choose_pinned(tile *t, const uint8_t *wanted)
{
    const int most = t->a.is_wide ? MAX_PINNED : 3;
    for (int taken = 0; taken < most; taken++) {
        int best = NOWHERE, best_uses = 0;
        for (uint32_t i = 0; i < t->g->n_nodes; i++) {
            const jit_node *n = &t->g->nodes[i];
            if (!wanted[i] || n->level > JIT_ROW || n->type == MOD_BOOL
                || t->reg[i * LANES] != NOWHERE)
                continue;
            const int count = use_count(t, i);
            if (count > best_uses) {
                best = (int)i;
                best_uses = count;
            }
        }
        if (best == NOWHERE)
            return;
        t->is_pinned[take_reg(t, best * LANES)] = 1;
    }
}

static void start(tile *t, const jit_graph *g, int masked, int32_t level, uint8_t *bytes,
                  size_t capacity)
{
    memset(t, 0, sizeof *t);
    t->g = g;
    t->a = (jit_asm){.bytes = bytes, .capacity = capacity, .is_wide = level >= CPU_AVX512};
    t->vector_bytes = t->a.is_wide ? 64 : 32;
    t->n_registers = t->a.is_wide ? 30 : 13;
    t->scratch = t->a.is_wide ? 30 : 14;
    t->result = g->score;
    t->mask = masked ? g->mask : UINT32_MAX;
    t->n_slots = CALL_SLOTS + LANES;
    for (int i = 0; i < MAX_VALUES; i++)
        t->reg[i] = t->k[i] = t->slot[i] = NOWHERE;
    for (int i = 0; i < MAX_REGISTERS + 2; i++)
        t->in_reg[i] = NOWHERE;
    for (int i = 0; i <= MAX_MASKS; i++)
        t->in_k[i] = NOWHERE;
}

static void take_fixed(tile *t)
{
    int *const fixed[] = {&t->max_reg[0], &t->max_reg[1], &t->low};
    for (int i = 0; i < 3; i++) {
        *fixed[i] = take_reg(t, NOWHERE);
        t->is_pinned[*fixed[i]] = 1;
    }
}

static const ZydisRegister saved[] = {
    ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_RBP, ZYDIS_REGISTER_R12,
    ZYDIS_REGISTER_R13, ZYDIS_REGISTER_R14, ZYDIS_REGISTER_R15,
};
enum { SAVED = sizeof saved / sizeof *saved };

/* Six pushes and 8 bytes keep the stack a multiple of 16 for calls. */
static void emit_entry(tile *t)
{
    for (int i = 0; i < SAVED; i++)
        EMIT(&t->a, PUSH, gpr(saved[i]));
    EMIT(&t->a, SUB, gpr(ZYDIS_REGISTER_RSP), jit_imm(8));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RBX), gpr(ZYDIS_REGISTER_RDI));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RBP), FIELD(frame));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R12), FIELD(s));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R14), FIELD(rows));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R15), FIELD(n_rows));
    load_bases(t);
    load_pinned(t, JIT_UNIFORM, JIT_UNIFORM);
}

static void emit_exit(tile *t)
{
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_RSP), jit_imm(8));
    for (int i = SAVED; i-- > 0;)
        EMIT(&t->a, POP, gpr(saved[i]));
    jit_put(&t->a, Z(VZEROUPPER), 0, NULL);
    jit_put(&t->a, Z(RET), 0, NULL);
}

static void emit_rows(tile *t)
{
    const size_t row = t->a.size;
    load_pinned(t, JIT_ROW, JIT_ROW);
    for (int i = 0; i < LANES; i++)
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, t->max_reg[i]), vec(t, t->low));
    EMIT(&t->a, XOR, gpr(ZYDIS_REGISTER_R13D), gpr(ZYDIS_REGISTER_R13D));
    const size_t column = t->a.size;
    emit_body(t);
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_R13), jit_imm(LANES * t->vector_bytes));
    EMIT(&t->a, CMP, gpr(ZYDIS_REGISTER_R13), FIELD(col_bytes));
    jump_back(t, Z(JL), column);
    reduce_max(t);
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_R12), FIELD(ld_bytes));
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_R14), jit_imm(4));
    EMIT(&t->a, SUB, gpr(ZYDIS_REGISTER_R15), jit_imm(1));
    jump_back(t, Z(JNZ), row);
}

saccade_status jit_emit_tile(const jit_graph *graph, int masked, int32_t level, uint8_t *bytes,
                             size_t capacity, size_t *size, int32_t *spills,
                             saccade_error *err)
{
    uint8_t wanted[JIT_MAX_NODES] = {0};
    tile *t = malloc(sizeof *t);
    FAIL_IF_NULL(t);
    start(t, graph, masked, level, bytes, capacity);
    choose_order(t, wanted);
    take_fixed(t);
    choose_pinned(t, wanted);
    emit_entry(t);
    emit_rows(t);
    emit_exit(t);
    const int failed = t->a.failed;
    *size = t->a.size;
    *spills = t->n_slots;
    free(t);
    FAIL_IF(failed, SACCADE_EBACKEND, "jit: got a mod whose code does not fit %zu bytes, the "
            "interpreter runs it", capacity);
    return SACCADE_OK;
}

#else

saccade_status jit_emit_tile(const jit_graph *graph, int masked, int32_t level, uint8_t *bytes,
                             size_t capacity, size_t *size, int32_t *spills,
                             saccade_error *err)
{
    (void)graph, (void)masked, (void)level, (void)bytes, (void)capacity, (void)size;
    (void)spills;
    FAIL(SACCADE_EBACKEND, "jit: built without Zydis, the interpreter runs mods");
}

#endif
