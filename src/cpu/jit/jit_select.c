/* Instructions of one operation: tables for what is one instruction, a few short sequences,
 * and for the rest a call of the interpreter's loop on one vector through the frame. */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AVX512

#include "cpu/jit/jit_regs.h"

#include "base/cpu_features.h"

/* ---- simple operations ---- */

typedef struct simple_op {
    uint16_t op;
    ZydisMnemonic mnemonic;
    int imm; /* NOWHERE: none */
} simple_op;

static const simple_op simple_ops[] = {
    {OP_iadd, Z(VPADDD), NOWHERE},   {OP_isub, Z(VPSUBD), NOWHERE},
    {OP_imul, Z(VPMULLD), NOWHERE},  {OP_imin, Z(VPMINSD), NOWHERE},
    {OP_imax, Z(VPMAXSD), NOWHERE},  {OP_iabs, Z(VPABSD), NOWHERE},
    {OP_i2f, Z(VCVTDQ2PS), NOWHERE}, {OP_fadd, Z(VADDPS), NOWHERE},
    {OP_fsub, Z(VSUBPS), NOWHERE},   {OP_fmul, Z(VMULPS), NOWHERE},
    {OP_fmin, Z(VMINPS), NOWHERE},   {OP_fmax, Z(VMAXPS), NOWHERE},
    {OP_fsqrt, Z(VSQRTPS), NOWHERE},
};
/* Bitwise instructions have another name where they take a mask. */
static const struct {
    uint16_t op;
    ZydisMnemonic wide, narrow;
} bit_ops[] = {
    {OP_iand, Z(VPANDD), Z(VPAND)},
    {OP_ior, Z(VPORD), Z(VPOR)},
    {OP_ixor, Z(VPXORD), Z(VPXOR)},
};
static const simple_op round_ops[] = {
    {OP_ffloor, 0, 9},
    {OP_fceil, 0, 10},
    {OP_ftrunc, 0, 11},
    {JIT_NEAREST, 0, 8},
};

static int emit_simple(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof simple_ops / sizeof *simple_ops; i++) {
        if (simple_ops[i].op != n->op)
            continue;
        const int x = jit_get(t, n->args[0], lane);
        const int y = n->n_args > 1 ? jit_get(t, n->args[1], lane) : 0;
        const int d = jit_take_reg(t, (int)value);
        if (n->n_args > 1)
            EMIT_VECTOR(&t->a, simple_ops[i].mnemonic, vec(t, d), vec(t, x), vec(t, y));
        else
            EMIT_VECTOR(&t->a, simple_ops[i].mnemonic, vec(t, d), vec(t, x));
        return 1;
    }
    return 0;
}

static int emit_bits(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof bit_ops / sizeof *bit_ops; i++) {
        if (bit_ops[i].op != n->op)
            continue;
        const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
        const int d = jit_take_reg(t, (int)value);
        EMIT_VECTOR(&t->a, t->a.is_wide ? bit_ops[i].wide : bit_ops[i].narrow, vec(t, d),
                    vec(t, x), vec(t, y));
        return 1;
    }
    return 0;
}

static int emit_round(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof round_ops / sizeof *round_ops; i++) {
        if (round_ops[i].op != n->op)
            continue;
        const int x = jit_get(t, n->args[0], lane), d = jit_take_reg(t, (int)value);
        EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VRNDSCALEPS) : Z(VROUNDPS), vec(t, d), vec(t, x),
                    jit_imm(round_ops[i].imm));
        return 1;
    }
    return 0;
}

/* ---- comparisons ---- */

/* Predicates of vpcmpd and vcmpps: < <= == != as C has them for NaN. */
static const simple_op compare_ops[] = {
    {OP_ilt, Z(VPCMPD), 1}, {OP_ile, Z(VPCMPD), 2},  {OP_ieq, Z(VPCMPD), 0},
    {OP_ine, Z(VPCMPD), 4}, {OP_flt, Z(VCMPPS), 17}, {OP_fle, Z(VCMPPS), 18},
    {OP_feq, Z(VCMPPS), 0}, {OP_fne, Z(VCMPPS), 4},
};

void jit_all_ones(jit_emitter *t, int r)
{
    EMIT(&t->a, VPCMPEQD, vec(t, r), vec(t, r), vec(t, r));
}

/* AVX2 compares ints only by > and ==. */
static void compare_narrow(jit_emitter *t, int op, int d, int x, int y)
{
    if (op == OP_ieq || op == OP_ine)
        EMIT(&t->a, VPCMPEQD, vec(t, d), vec(t, x), vec(t, y));
    else if (op == OP_ilt)
        EMIT(&t->a, VPCMPGTD, vec(t, d), vec(t, y), vec(t, x));
    else
        EMIT(&t->a, VPCMPGTD, vec(t, d), vec(t, x), vec(t, y));
    if (op == OP_ine || op == OP_ile) {
        jit_all_ones(t, t->scratch);
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, d), vec(t, t->scratch));
    }
}

static int emit_compare(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    for (size_t i = 0; i < sizeof compare_ops / sizeof *compare_ops; i++) {
        if (compare_ops[i].op != n->op)
            continue;
        const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
        const jit_operand imm = jit_imm(compare_ops[i].imm);
        if (t->a.is_wide) {
            const int k = jit_take_mask(t, (int)value);
            EMIT_VECTOR(&t->a, compare_ops[i].mnemonic, mask_reg(k), vec(t, x), vec(t, y), imm);
            return 1;
        }
        const int d = jit_take_reg(t, (int)value);
        if (compare_ops[i].mnemonic == Z(VCMPPS))
            EMIT(&t->a, VCMPPS, vec(t, d), vec(t, x), vec(t, y), imm);
        else
            compare_narrow(t, n->op, d, x, y);
        return 1;
    }
    return 0;
}

/* ---- bools and selection ---- */

static void logic_wide(jit_emitter *t, int op, int d, int x, int y)
{
    const jit_operand o[3] = {mask_reg(d), mask_reg(x), mask_reg(y)};
    static const struct {
        int op;
        ZydisMnemonic mnemonic;
    } names[] = {
        {OP_and, Z(KANDW)},
        {OP_or, Z(KORW)},
        {OP_beq, Z(KXNORW)},
        {OP_bne, Z(KXORW)},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].op == op)
            jit_put(&t->a, names[i].mnemonic, 3, o);
}

static void logic_narrow(jit_emitter *t, int op, int d, int x, int y)
{
    if (op == OP_and)
        EMIT(&t->a, VPAND, vec(t, d), vec(t, x), vec(t, y));
    else if (op == OP_or)
        EMIT(&t->a, VPOR, vec(t, d), vec(t, x), vec(t, y));
    else
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, x), vec(t, y));
    if (op == OP_beq) {
        jit_all_ones(t, t->scratch);
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, d), vec(t, t->scratch));
    }
}

static int emit_logic(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_and && n->op != OP_or && n->op != OP_beq && n->op != OP_bne)
        return 0;
    if (t->a.is_wide) {
        const int x = jit_get_mask(t, n->args[0], lane), y = jit_get_mask(t, n->args[1], lane);
        logic_wide(t, n->op, jit_take_mask(t, (int)value), x, y);
        return 1;
    }
    const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
    logic_narrow(t, n->op, jit_take_reg(t, (int)value), x, y);
    return 1;
}

static int emit_not(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_not && n->op != OP_inot)
        return 0;
    if (n->op == OP_not && t->a.is_wide) {
        const int x = jit_get_mask(t, n->args[0], lane);
        EMIT(&t->a, KNOTW, mask_reg(jit_take_mask(t, (int)value)), mask_reg(x));
        return 1;
    }
    const int x = jit_get(t, n->args[0], lane), d = jit_take_reg(t, (int)value);
    if (t->a.is_wide) { /* all bits: the ternary function 0xff */
        EMIT_VECTOR(&t->a, Z(VPTERNLOGD), vec(t, t->scratch), vec(t, t->scratch),
                    vec(t, t->scratch), jit_imm(0xff));
        EMIT_VECTOR(&t->a, Z(VPXORD), vec(t, d), vec(t, x), vec(t, t->scratch));
    } else {
        jit_all_ones(t, t->scratch);
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, x), vec(t, t->scratch));
    }
    return 1;
}

/* d = condition ? x : y */
void jit_blend(jit_emitter *t, int d, int condition, int x, int y)
{
    if (t->a.is_wide) {
        EMIT(&t->a, VBLENDMPS, vec(t, d), mask_reg(condition), vec(t, y), vec(t, x));
        return;
    }
    jit_operand o[4] = {vec(t, d), vec(t, y), vec(t, x), vec(t, condition)};
    o[3].scale = 1; /* is4 */
    jit_put(&t->a, Z(VBLENDVPS), 4, o);
}

static int emit_select(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op == OP_isel || n->op == OP_fsel || (n->op == OP_bsel && !t->a.is_wide)) {
        const int c =
            t->a.is_wide ? jit_get_mask(t, n->args[0], lane) : jit_get(t, n->args[0], lane);
        const int x = jit_get(t, n->args[1], lane), y = jit_get(t, n->args[2], lane);
        jit_blend(t, jit_take_reg(t, (int)value), c, x, y);
        return 1;
    }
    if (n->op != OP_bsel)
        return 0;
    const int c = jit_get_mask(t, n->args[0], lane), x = jit_get_mask(t, n->args[1], lane);
    const int y = jit_get_mask(t, n->args[2], lane), d = jit_take_mask(t, (int)value);
    EMIT(&t->a, KANDNW, mask_reg(7), mask_reg(c), mask_reg(y));
    EMIT(&t->a, KANDW, mask_reg(d), mask_reg(c), mask_reg(x));
    EMIT(&t->a, KORW, mask_reg(d), mask_reg(d), mask_reg(7));
    return 1;
}

/* ---- the rest that runs in line ---- */

/* Loads a constant into all lanes of a register, through rax. */
static void load_bits(jit_emitter *t, int r, uint32_t bits)
{
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_EAX), jit_imm((int32_t)bits));
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VPBROADCASTD), vec(t, r), gpr(ZYDIS_REGISTER_EAX));
        return;
    }
    EMIT(&t->a, VMOVD, jit_reg(ZYDIS_REGISTER_XMM0 + r), gpr(ZYDIS_REGISTER_EAX));
    EMIT(&t->a, VPBROADCASTD, vec(t, r), jit_reg(ZYDIS_REGISTER_XMM0 + r));
}

static int emit_negate(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_ineg)
        return 0;
    const int x = jit_get(t, n->args[0], lane), d = jit_take_reg(t, (int)value);
    EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VPXORD) : Z(VPXOR), vec(t, t->scratch),
                vec(t, t->scratch), vec(t, t->scratch));
    EMIT_VECTOR(&t->a, Z(VPSUBD), vec(t, d), vec(t, t->scratch), vec(t, x));
    return 1;
}

static int emit_b2i(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_b2i)
        return 0;
    if (!t->a.is_wide) {
        const int x = jit_get(t, n->args[0], lane);
        EMIT(&t->a, VPSRLD, vec(t, jit_take_reg(t, (int)value)), vec(t, x), jit_imm(31));
        return 1;
    }
    const int k = jit_get_mask(t, n->args[0], lane), d = jit_take_reg(t, (int)value);
    EMIT(&t->a, VPMOVM2D, vec(t, d), mask_reg(k));
    EMIT_VECTOR(&t->a, Z(VPSRLD), vec(t, d), vec(t, d), jit_imm(31));
    return 1;
}

static int emit_shift(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_ishl && n->op != OP_ishr)
        return 0;
    const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
    const int d = jit_take_reg(t, (int)value);
    load_bits(t, t->scratch, 31);
    EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VPANDD) : Z(VPAND), vec(t, t->scratch),
                vec(t, t->scratch), vec(t, y));
    EMIT_VECTOR(&t->a, n->op == OP_ishl ? Z(VPSLLVD) : Z(VPSRAVD), vec(t, d), vec(t, x),
                vec(t, t->scratch));
    return 1;
}

/* x / y, 0 where y is 0. */
static int emit_divide(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != OP_fdiv)
        return 0;
    const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
    const int d = jit_take_reg(t, (int)value), zero = t->scratch;
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

/* Whether a register may be written over: its value has no use after this one. */
static int is_last_use(const jit_emitter *t, uint32_t node, int lane)
{
    const uint32_t value = value_of(t, node, lane);
    if (!is_computed(t, node_of(t, value)))
        return 0;
    return jit_next_use_from(t, value, t->at + 1) == INT32_MAX;
}

/* x / y for an ordinary y: by a reciprocal of 14 bits and the remainder, which makes it 28,
 * where a division occupies its unit for 16 cycles. */
static int emit_quotient(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_DIV)
        return 0;
    const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
    const int d = jit_take_reg(t, (int)value), r = t->scratch, rest = t->scratch + 1;
    if (!t->a.is_wide) {
        EMIT(&t->a, VDIVPS, vec(t, d), vec(t, x), vec(t, y));
        return 1;
    }
    EMIT_VECTOR(&t->a, Z(VRCP14PS), vec(t, r), vec(t, y));
    EMIT_VECTOR(&t->a, Z(VMULPS), vec(t, d), vec(t, x), vec(t, r));
    EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, rest), vec(t, x));
    EMIT_VECTOR(&t->a, Z(VFNMADD231PS), vec(t, rest), vec(t, d), vec(t, y));
    EMIT_VECTOR(&t->a, Z(VFMADD231PS), vec(t, d), vec(t, rest), vec(t, r));
    return 1;
}

/* x * y + z, over x or into a copy of it. */
static int emit_fma(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_FMA)
        return 0;
    const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
    const int z = jit_get(t, n->args[2], lane);
    int d = x;
    if (is_last_use(t, n->args[0], lane)) {
        jit_rename(t, x, value);
    } else {
        d = jit_take_reg(t, (int)value);
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, d), vec(t, x));
    }
    EMIT_VECTOR(&t->a, Z(VFMADD213PS), vec(t, d), vec(t, y), vec(t, z));
    return 1;
}

/* A cubic in x whose terms are picked by the bits below and above the end of x's exponent. */
static int emit_table(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    enum { SEGMENT_BITS = 21 }; /* below the number of the segment */
    if (n->op != JIT_TABLE)
        return 0;
    const int x = jit_get(t, n->args[0], lane), d = jit_take_reg(t, (int)value);
    const int segment = t->scratch, term = t->scratch + 1;
    EMIT_VECTOR(&t->a, Z(VPSRLD), vec(t, segment), vec(t, x), jit_imm(SEGMENT_BITS));
    EMIT_VECTOR(&t->a, Z(VPERMPS), vec(t, d), vec(t, segment), vec(t, t->table[0]));
    for (int i = 1; i < JIT_TABLE_TERMS; i++) {
        EMIT_VECTOR(&t->a, Z(VPERMPS), vec(t, term), vec(t, segment), vec(t, t->table[i]));
        EMIT_VECTOR(&t->a, Z(VFMADD213PS), vec(t, d), vec(t, x), vec(t, term));
    }
    return 1;
}

/* x * 2^n; AVX2 multiplies by two powers, so that neither leaves the normal numbers. */
static int emit_scalef(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_SCALEF)
        return 0;
    const int x = jit_get(t, n->args[0], lane), y = jit_get(t, n->args[1], lane);
    const int d = jit_take_reg(t, (int)value);
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

static int emit_input(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    if (n->op != JIT_INPUT)
        return 0;
    const int scale = jit_get(t, n->args[0], lane), d = jit_take_reg(t, (int)value);
    EMIT_VECTOR(&t->a, Z(VMULPS), vec(t, d), vec(t, scale), scores_of(t, lane));
    return 1;
}

/* ---- calls ---- */

/* Puts operand i of a call into slot i of the frame, bools as 0 and 1. */
static void store_operand(jit_emitter *t, uint32_t node, int lane, int slot)
{
    const int is_bool = t->g->nodes[node].type == MOD_BOOL;
    if (!is_bool) {
        EMIT_VECTOR(&t->a, Z(VMOVUPS), frame_slot(t, slot), vec(t, jit_get(t, node, lane)));
        return;
    }
    if (t->a.is_wide)
        EMIT(&t->a, VPMOVM2D, vec(t, t->scratch), mask_reg(jit_get_mask(t, node, lane)));
    else
        EMIT(&t->a, VMOVAPS, vec(t, t->scratch), vec(t, jit_get(t, node, lane)));
    EMIT_VECTOR(&t->a, Z(VPSRLD), vec(t, t->scratch), vec(t, t->scratch), jit_imm(31));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), frame_slot(t, slot), vec(t, t->scratch));
}

void jit_load_bases(jit_emitter *t)
{
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R10), FIELD(uniform));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R11), FIELD(cols));
    if (t->has_diagonals)
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R9), FIELD(diagonals));
    load_bits(t, t->low, 0xff800000u);
}

static void slot_address(jit_emitter *t, ZydisRegister r, int slot)
{
    EMIT(&t->a, LEA, gpr(r),
         jit_mem(ZYDIS_REGISTER_RBP, ZYDIS_REGISTER_NONE, 0, (int64_t)slot * SLOT_BYTES, 8));
}

static void emit_call(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    const int is_read = n->op == JIT_READ;
    jit_operand target = FIELD(read);
    if (t->is_stream) {
        t->a.failed = 1;
        return;
    }
    for (int i = 0; i < n->n_args; i++)
        store_operand(t, n->args[i], lane, i);
    jit_unlock_all(t);
    jit_clear_registers(t);
    for (int i = 0; t->has_max && i < LANES; i++)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), frame_slot(t, CALL_SLOTS + i), vec(t, t->max_reg[i]));
    slot_address(t, ZYDIS_REGISTER_RDI, 3);
    slot_address(t, ZYDIS_REGISTER_RSI, 0);
    if (is_read) {
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RDX),
             field(offsetof(jit_call, tensors) + 8 * (size_t)n->imm));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_ECX), jit_imm(t->g->dtype[n->imm]));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R8D), jit_imm(t->vector_bytes / 4));
    } else {
        slot_address(t, ZYDIS_REGISTER_RDX, 1);
        slot_address(t, ZYDIS_REGISTER_RCX, 2);
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R8D), jit_imm(1));
        EMIT(&t->a, XOR, gpr(ZYDIS_REGISTER_R9D), gpr(ZYDIS_REGISTER_R9D));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), FIELD(strips));
        target = jit_mem(ZYDIS_REGISTER_RAX, ZYDIS_REGISTER_NONE, 0,
                         (int64_t)(offsetof(strip_table, op) + sizeof(strip_op *) * n->op), 8);
    }
    EMIT(&t->a, CALL, target);
    jit_load_bases(t);
    jit_load_pinned(t, JIT_UNIFORM, JIT_ROW);
    for (int i = 0; t->has_max && i < LANES; i++)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, t->max_reg[i]), frame_slot(t, CALL_SLOTS + i));
    EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, t->scratch), frame_slot(t, 3));
    if (is_mask(t, value)) {
        EMIT_VECTOR(&t->a, Z(VPTESTMD), mask_reg(jit_take_mask(t, (int)value)),
                    vec(t, t->scratch), vec(t, t->scratch));
        return;
    }
    const int d = jit_take_reg(t, (int)value);
    if (n->type == MOD_BOOL) {
        EMIT(&t->a, VPXOR, vec(t, d), vec(t, d), vec(t, d));
        EMIT(&t->a, VPSUBD, vec(t, d), vec(t, d), vec(t, t->scratch));
    } else {
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, d), vec(t, t->scratch));
    }
}

/* ---- choosing ---- */

typedef int emit_fn(jit_emitter *t, const jit_node *n, uint32_t value, int lane);
static emit_fn *const emitters[] = {
    emit_simple, emit_bits,   emit_round, emit_compare, emit_logic,  emit_not,
    emit_select, emit_negate, emit_b2i,   emit_shift,   emit_divide, emit_quotient,
    emit_fma,    emit_scalef, emit_input, jit_emit_read, emit_table,
};

void jit_emit_value(jit_emitter *t, uint32_t value)
{
    const jit_node *n = node_of(t, value);
    const int lane = (int)(value % LANES);
    for (size_t i = 0; i < sizeof emitters / sizeof *emitters; i++)
        if (emitters[i](t, n, value, lane))
            return;
    emit_call(t, n, value, lane);
}

#endif
