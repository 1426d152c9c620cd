/* Instructions of reads of captured tensors. A gather takes whatever offsets a vector has; but
 * those of `t[h, q, kv]` follow each other, those of `t[h, q - kv]` do so backwards, and those
 * of `t[h, kv / 64]` or of clamped distances are one. Which it is, code finds out as it runs: a
 * comparison and a branch that is foreseen cost a quarter of a gather and less. Streams, which
 * have no branches, gather. */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AVX512

#include "cpu/jit/jit_regs.h"

/* ---- how offsets go with keys ---- */

enum { FLAT = 0, UP = 1, DOWN = 2, EITHER = UP | DOWN, MOST_DEPTH = 10 };

static int turned(int way)
{
    return (way & UP ? DOWN : 0) | (way & DOWN ? UP : 0);
}

/* Where factors are positive. A guess: it decides what code looks for first. */
static int way_of(const jit_graph *g, uint32_t x, int depth)
{
    const jit_node *n = &g->nodes[x];
    int way = FLAT;
    if (!(n->varies & DEP_KV))
        return FLAT;
    if (n->op == OP_VAR)
        return UP;
    if (depth == MOST_DEPTH)
        return EITHER;
    switch (n->op) {
    case OP_isub:
        return way_of(g, n->args[0], depth + 1) | turned(way_of(g, n->args[1], depth + 1));
    case OP_ineg:
        return turned(way_of(g, n->args[0], depth + 1));
    case OP_idiv:
    case OP_irem:
    case OP_ifloordiv:
    case OP_ifloormod:
        return way_of(g, n->args[0], depth + 1) | way_of(g, n->args[1], depth + 1);
    case OP_iadd:
    case OP_imul:
    case OP_imin:
    case OP_imax:
    case OP_isel:
        for (int i = n->op == OP_isel; i < n->n_args; i++)
            way |= way_of(g, n->args[i], depth + 1);
        return way;
    default:
        return EITHER;
    }
}

/* ---- gathers ---- */

/* d = 4 bytes at tensor + i * scale, registers: d is another than i. */
static void gather(jit_emitter *t, int32_t tensor, int d, int i, int scale)
{
    const ZydisRegister index = (ZydisRegister)vec(t, i).reg;
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX),
         field(offsetof(jit_call, tensors) + 8 * (size_t)tensor));
    if (t->a.is_wide) {
        EMIT(&t->a, KXNORW, mask_reg(7), mask_reg(7), mask_reg(7));
        EMIT(&t->a, VGATHERDPS, vec(t, d), mask_reg(7),
             jit_mem(ZYDIS_REGISTER_RAX, index, scale, 0, 4));
    } else {
        jit_all_ones(t, t->scratch);
        EMIT(&t->a, VGATHERDPS, vec(t, d), jit_mem(ZYDIS_REGISTER_RAX, index, scale, 0, 4),
             vec(t, t->scratch));
    }
}

/* Gathers the words that hold elements of 1 or 2 bytes, and turns each so that its element is
 * lowest. */
static void gather_words(jit_emitter *t, int32_t tensor, int bytes, int d, int i)
{
    const int to_word = bytes == 1 ? 2 : 1; /* bits of an offset */
    const int to_bits = 5 - to_word, part = t->scratch + !t->a.is_wide;
    EMIT_VECTOR(&t->a, Z(VPSRAD), vec(t, part), vec(t, i), jit_imm(to_word));
    gather(t, tensor, d, part, JIT_WORD_BYTES);
    if (t->a.is_wide) { /* rotates by the last 5 bits */
        EMIT_VECTOR(&t->a, Z(VPSLLD), vec(t, part), vec(t, i), jit_imm(to_bits));
        EMIT_VECTOR(&t->a, Z(VPRORVD), vec(t, d), vec(t, d), vec(t, part));
    } else {
        EMIT(&t->a, VPSLLD, vec(t, part), vec(t, i), jit_imm(32 - to_word));
        EMIT(&t->a, VPSRLD, vec(t, part), vec(t, part), jit_imm(32 - to_word - to_bits));
        EMIT(&t->a, VPSRLVD, vec(t, d), vec(t, d), vec(t, part));
    }
}

/* ---- one load ---- */

static jit_operand lanes(const jit_emitter *t, int row)
{
    return jit_mem(ZYDIS_REGISTER_RAX, ZYDIS_REGISTER_NONE, 0,
                   (int64_t)(row * JIT_LANES * sizeof(int32_t)), t->vector_bytes);
}

/* Jumps if register x has the lanes of i; returns the jump. */
static size_t jump_if_equal(jit_emitter *t, int x, int i)
{
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VPCMPEQD), mask_reg(7), vec(t, x), vec(t, i));
        EMIT(&t->a, KORTESTW, mask_reg(7), mask_reg(7));
        return jit_jump(&t->a, Z(JB)); /* carry: all ones */
    }
    const int all = t->scratch + 1;
    EMIT(&t->a, VPCMPEQD, vec(t, all), vec(t, x), vec(t, i));
    EMIT(&t->a, VPMOVMSKB, gpr(ZYDIS_REGISTER_ECX), vec(t, all));
    EMIT(&t->a, CMP, gpr(ZYDIS_REGISTER_ECX), jit_imm(-1));
    return jit_jump(&t->a, Z(JZ));
}

/* rax = where offsets count from, rcx = the first lane's offset */
static void load_first(jit_emitter *t, int32_t tensor, int i)
{
    EMIT(&t->a, VMOVD, gpr(ZYDIS_REGISTER_ECX), jit_reg(ZYDIS_REGISTER_XMM0 + i));
    EMIT(&t->a, MOVSXD, gpr(ZYDIS_REGISTER_RCX), gpr(ZYDIS_REGISTER_ECX));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX),
         field(offsetof(jit_call, tensors) + 8 * (size_t)tensor));
}

static jit_operand element(int bytes, int64_t at, int64_t read)
{
    return jit_mem(ZYDIS_REGISTER_RAX, ZYDIS_REGISTER_RCX, bytes, at * bytes, (int)read);
}

/* Loads consecutive elements, one for each lane, into the lanes' low bits; the first is `at`
 * elements after the first lane's. */
static void load_run(jit_emitter *t, int bytes, int d, int64_t at)
{
    const int n = t->vector_bytes / 4;
    const jit_operand from = element(bytes, at, (int64_t)n * bytes);
    if (bytes == 4)
        EMIT_VECTOR(&t->a, Z(VMOVUPS), vec(t, d), from);
    else
        EMIT_VECTOR(&t->a, bytes == 2 ? Z(VPMOVZXWD) : Z(VPMOVZXBD), vec(t, d), from);
}

static void load_backwards(jit_emitter *t, int bytes, int d)
{
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RDX), FIELD(lanes));
    load_run(t, bytes, d, 1 - t->vector_bytes / 4);
    EMIT_VECTOR(&t->a, t->a.is_wide ? Z(VMOVDQU32) : Z(VMOVDQU), vec(t, t->scratch),
                jit_mem(ZYDIS_REGISTER_RDX, ZYDIS_REGISTER_NONE, 0,
                        (int64_t)sizeof(int32_t) * JIT_LANES
                            * (t->a.is_wide ? JIT_LANES_BACK16 : JIT_LANES_BACK8),
                        t->vector_bytes));
    EMIT_VECTOR(&t->a, Z(VPERMD), vec(t, d), vec(t, t->scratch), vec(t, d));
}

static void load_same(jit_emitter *t, int bytes, int d)
{
    const ZydisMnemonic name = bytes == 4   ? Z(VPBROADCASTD)
                               : bytes == 2 ? Z(VPBROADCASTW)
                                            : Z(VPBROADCASTB);
    EMIT_VECTOR(&t->a, name, vec(t, d), element(bytes, 0, bytes));
}

/* ---- all of a read ---- */

/* d = elements of `bytes` at offsets i in the low bits of the lanes; what is above them means
 * nothing. */
static void fetch(jit_emitter *t, const jit_node *n, int bytes, int d, int i)
{
    const jit_graph *g = t->g;
    const int has_runs =
        !t->is_stream && bytes <= 4 && !(g->nodes[n->args[0]].varies & DEP_SCORE);
    const int is_back = way_of(g, n->args[0], 0) == DOWN;
    size_t run = 0, same = 0;
    if (has_runs) {
        EMIT_VECTOR(&t->a, Z(VPBROADCASTD), vec(t, t->scratch),
                    jit_reg(ZYDIS_REGISTER_XMM0 + i));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), FIELD(lanes));
        EMIT_VECTOR(&t->a, Z(VPADDD), vec(t, t->scratch + 1), vec(t, t->scratch),
                    lanes(t, is_back ? JIT_LANES_DOWN : JIT_LANES_UP));
        run = jump_if_equal(t, t->scratch + 1, i);
        same = jump_if_equal(t, t->scratch, i);
    }
    if (bytes < JIT_WORD_BYTES)
        gather_words(t, n->imm, bytes, d, i);
    else
        gather(t, n->imm, d, i, bytes);
    if (!has_runs)
        return;
    const size_t gathered = jit_jump(&t->a, Z(JMP));
    jit_aim(&t->a, run, t->a.size);
    load_first(t, n->imm, i);
    if (is_back)
        load_backwards(t, bytes, d);
    else
        load_run(t, bytes, d, 0);
    const size_t loaded = jit_jump(&t->a, Z(JMP));
    jit_aim(&t->a, same, t->a.size);
    load_first(t, n->imm, i);
    load_same(t, bytes, d);
    jit_aim(&t->a, gathered, t->a.size);
    jit_aim(&t->a, loaded, t->a.size);
}

/* The low `bits` of every lane, with zeros or copies of the sign above them. */
static void extend(jit_emitter *t, int d, int bits, int is_signed)
{
    EMIT_VECTOR(&t->a, Z(VPSLLD), vec(t, d), vec(t, d), jit_imm(32 - bits));
    EMIT_VECTOR(&t->a, is_signed ? Z(VPSRAD) : Z(VPSRLD), vec(t, d), vec(t, d),
                jit_imm(32 - bits));
}

/* The low half of every lane from f16. */
static void widen_halves(jit_emitter *t, int d)
{
    const jit_operand x = jit_reg(ZYDIS_REGISTER_XMM0 + d);
    const jit_operand y = jit_reg(ZYDIS_REGISTER_YMM0 + d);
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VPMOVDW), y, vec(t, d));
        EMIT_VECTOR(&t->a, Z(VCVTPH2PS), vec(t, d), y);
        return;
    }
    extend(t, d, 16, 0);
    EMIT(&t->a, VPACKUSDW, y, y, y); /* by halves of the vector: quarters 0 and 2 */
    EMIT(&t->a, VPERMQ, y, y, jit_imm(8));
    EMIT(&t->a, VCVTPH2PS, y, x);
}

/* A value of the dtype from the low bits of every lane of d, which is the value's register but
 * where the value is a mask. */
static void convert_low(jit_emitter *t, saccade_dtype dtype, int d, uint32_t value)
{
    const int bits = 8 * (int)saccade_dtype_bytes(dtype);
    const jit_operand zero = vec(t, t->scratch);
    if (dtype == SACCADE_BF16) {
        EMIT_VECTOR(&t->a, Z(VPSLLD), vec(t, d), vec(t, d), jit_imm(16));
    } else if (dtype == SACCADE_F16) {
        widen_halves(t, d);
    } else if (is_mask(t, value)) {
        EMIT_VECTOR(&t->a, Z(VPSLLD), vec(t, d), vec(t, d), jit_imm(32 - bits));
        EMIT_VECTOR(&t->a, Z(VPTESTMD), mask_reg(jit_take_mask(t, (int)value)), vec(t, d),
                    vec(t, d));
    } else {
        extend(t, d, bits, dtype == SACCADE_I8 || dtype == SACCADE_I16);
        if (dtype == SACCADE_BOOL) {
            EMIT(&t->a, VPXOR, zero, zero, zero);
            EMIT(&t->a, VPCMPGTD, vec(t, d), vec(t, d), zero);
        }
    }
}

int jit_emit_read(jit_emitter *t, const jit_node *n, uint32_t value, int lane)
{
    const saccade_dtype dtype = (saccade_dtype)t->g->dtype[n->op == JIT_READ ? n->imm : 0];
    if (n->op != JIT_READ || !jit_reads_inline(dtype))
        return 0;
    const int i = jit_get(t, n->args[0], lane);
    const int d = is_mask(t, value) ? t->scratch + 1 : jit_take_reg(t, (int)value);
    fetch(t, n, (int)saccade_dtype_bytes(dtype), d, i);
    if (jit_reads_words(dtype))
        convert_low(t, dtype, d, value);
    return 1;
}

#endif
