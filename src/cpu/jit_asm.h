/* jit_asm.h: instructions into a buffer by the Zydis encoder. Only compiled with HAVE_ZYDIS. */
#ifndef SACCADE_CPU_JIT_ASM_H
#define SACCADE_CPU_JIT_ASM_H

#include <Zydis/Zydis.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct jit_asm {
    uint8_t *bytes;
    size_t size, capacity;
    int is_wide;     /* AVX-512: vectors of 64 bytes, masks in k registers */
    int failed;      /* sticky: buffer full or an instruction that does not exist */
    uint32_t *marks; /* NULL, or room for where each instruction ends */
    uint32_t n_marks, max_marks;
} jit_asm;

typedef ZydisEncoderOperand jit_operand;

static inline jit_operand jit_reg(ZydisRegister r)
{
    jit_operand o;
    memset(&o, 0, sizeof o);
    o.type = ZYDIS_OPERAND_TYPE_REGISTER;
    o.reg.value = r;
    return o;
}

static inline jit_operand jit_imm(int64_t x)
{
    jit_operand o;
    memset(&o, 0, sizeof o);
    o.type = ZYDIS_OPERAND_TYPE_IMMEDIATE;
    o.imm.s = x;
    return o;
}

/* [base + index * scale + displacement], `size` bytes; index may be ZYDIS_REGISTER_NONE. */
static inline jit_operand jit_mem(ZydisRegister base, ZydisRegister index, int scale,
                                  int64_t displacement, int size)
{
    jit_operand o;
    memset(&o, 0, sizeof o);
    o.type = ZYDIS_OPERAND_TYPE_MEMORY;
    o.mem.base = base;
    o.mem.index = index;
    o.mem.scale = index == ZYDIS_REGISTER_NONE ? 0 : (ZyanU8)scale;
    o.mem.displacement = displacement;
    o.mem.size = (ZyanU16)size;
    return o;
}

static inline void jit_put_request(jit_asm *a, ZydisEncoderRequest *r)
{
    ZyanUSize length = a->capacity - a->size;
    r->machine_mode = ZYDIS_MACHINE_MODE_LONG_64;
    if (a->failed || length < ZYDIS_MAX_INSTRUCTION_LENGTH
        || (a->marks && a->n_marks == a->max_marks)
        || ZYAN_FAILED(ZydisEncoderEncodeInstruction(r, a->bytes + a->size, &length))) {
        a->failed = 1;
        return;
    }
    a->size += length;
    if (a->marks)
        a->marks[a->n_marks++] = (uint32_t)a->size;
}

static inline void jit_put(jit_asm *a, ZydisMnemonic mnemonic, int n, const jit_operand *o)
{
    ZydisEncoderRequest r;
    memset(&r, 0, sizeof r);
    r.mnemonic = mnemonic;
    r.operand_count = (ZyanU8)n;
    for (int i = 0; i < n; i++)
        r.operands[i] = o[i];
    jit_put_request(a, &r);
}

/* The same for vector instructions: EVEX forms name their (empty) mask k0 second. */
static inline void jit_put_vector(jit_asm *a, ZydisMnemonic mnemonic, int n,
                                  const jit_operand *o)
{
    jit_operand all[ZYDIS_ENCODER_MAX_OPERANDS];
    if (!a->is_wide) {
        jit_put(a, mnemonic, n, o);
        return;
    }
    all[0] = o[0];
    all[1] = jit_reg(ZYDIS_REGISTER_K0);
    for (int i = 1; i < n; i++)
        all[i + 1] = o[i];
    jit_put(a, mnemonic, n + 1, all);
}

/* EVEX forms whose operands name their mask; is_broadcast: the last memory operand is one
 * number for all lanes; is_zeroing: lanes that the mask leaves out become 0. */
static inline void jit_put_evex(jit_asm *a, ZydisMnemonic mnemonic, int is_broadcast,
                                int is_zeroing, int n, const jit_operand *o)
{
    ZydisEncoderRequest r;
    memset(&r, 0, sizeof r);
    r.mnemonic = mnemonic;
    r.operand_count = (ZyanU8)n;
    r.evex.broadcast =
        is_broadcast ? ZYDIS_BROADCAST_MODE_1_TO_16 : ZYDIS_BROADCAST_MODE_INVALID;
    r.evex.zeroing_mask = is_zeroing ? ZYAN_TRUE : ZYAN_FALSE;
    for (int i = 0; i < n; i++)
        r.operands[i] = o[i];
    jit_put_request(a, &r);
}

/* EMIT(a, VADDPS, jit_reg(..), ..) and so on. */
#define EMIT(a, name, ...)                                                     \
    jit_put((a), ZYDIS_MNEMONIC_##name,                                        \
            (int)(sizeof((jit_operand[]){__VA_ARGS__}) / sizeof(jit_operand)), \
            (jit_operand[]){__VA_ARGS__})
#define EMIT_VECTOR(a, mnemonic, ...)                                                 \
    jit_put_vector((a), (mnemonic),                                                   \
                   (int)(sizeof((jit_operand[]){__VA_ARGS__}) / sizeof(jit_operand)), \
                   (jit_operand[]){__VA_ARGS__})

#endif
