/* jit_asm.h: instructions into a buffer by the Zydis encoder. Only compiled with HAVE_ZYDIS.
 *
 * Codes of a plan ask for the same few hundred instructions some thousand times: a memo keeps
 * what the encoder made of them. */
#ifndef SACCADE_CPU_JIT_JIT_ASM_H
#define SACCADE_CPU_JIT_JIT_ASM_H

#include <Zydis/Zydis.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 16 bytes for an encoder's 64. */
typedef struct jit_operand {
    int64_t value;       /* immediate, or displacement */
    uint16_t reg, index; /* ZydisRegister: register or base, and index of an address */
    uint16_t bytes;      /* of memory */
    uint8_t type;        /* ZydisOperandType */
    uint8_t scale;       /* of the index; of a register, 1: it stands in an immediate (is4) */
} jit_operand;

enum { JIT_MAX_OPERANDS = ZYDIS_ENCODER_MAX_OPERANDS, JIT_MAX_BYTES = 15 };

/* EVEX forms whose last memory operand is one number for all lanes; whose masked lanes are 0 */
enum { JIT_BROADCAST = 1, JIT_ZEROING = 2 };

typedef struct jit_request {
    uint32_t mnemonic; /* ZydisMnemonic */
    uint16_t evex, n;
    jit_operand o[JIT_MAX_OPERANDS]; /* [n] */
} jit_request;

/* What was asked for lately, by a hash; all 0 at first. */
enum { JIT_MEMO_LINES = 256 };
typedef struct jit_memo {
    struct {
        jit_request asked;
        uint8_t size, bytes[JIT_MAX_BYTES];
    } lines[JIT_MEMO_LINES];
} jit_memo;

/* A displacement that differs from copy to copy is given as its value in the first copy, below
 * 2^25, plus jit_mark(kind). It is encoded in four bytes without the mark, and their place is
 * noted as a patch of this kind. */
enum { JIT_MARK_BITS = 26 };
typedef struct jit_patch {
    uint32_t at; /* in bytes */
    int32_t kind;
} jit_patch;

static inline int64_t jit_mark(int kind)
{
    return ((int64_t)(kind + 1) << JIT_MARK_BITS) + (1 << (JIT_MARK_BITS - 1));
}

typedef struct jit_asm {
    uint8_t *bytes;
    size_t size, capacity;
    int is_wide;    /* AVX-512: vectors of 64 bytes, masks in k registers */
    int failed;     /* sticky: buffer full or an instruction that does not exist */
    jit_memo *memo; /* or NULL */
    /* NULL, or room for where each of max_n instructions ends, and for what is marked */
    uint32_t *ends;
    jit_patch *patches;
    uint32_t n, n_patches, max_n;
} jit_asm;

static inline jit_operand jit_reg(ZydisRegister r)
{
    return (jit_operand){.reg = (uint16_t)r, .type = ZYDIS_OPERAND_TYPE_REGISTER};
}

static inline jit_operand jit_imm(int64_t x)
{
    return (jit_operand){.value = x, .type = ZYDIS_OPERAND_TYPE_IMMEDIATE};
}

/* [base + index * scale + displacement], `size` bytes; index may be ZYDIS_REGISTER_NONE. */
static inline jit_operand jit_mem(ZydisRegister base, ZydisRegister index, int scale,
                                  int64_t displacement, int size)
{
    return (jit_operand){.value = displacement,
                         .reg = (uint16_t)base,
                         .index = (uint16_t)index,
                         .bytes = (uint16_t)size,
                         .type = ZYDIS_OPERAND_TYPE_MEMORY,
                         .scale = index == ZYDIS_REGISTER_NONE ? 0 : (uint8_t)scale};
}

/* ---- jit_asm.c ---- */

/* One instruction; n operands at o, not more than JIT_MAX_OPERANDS. */
void jit_put(jit_asm *a, ZydisMnemonic mnemonic, int n, const jit_operand *o);
/* jit_put for vector instructions: EVEX forms name their (empty) mask k0 second. */
void jit_put_vector(jit_asm *a, ZydisMnemonic mnemonic, int n, const jit_operand *o);
/* EVEX forms whose operands name their mask; evex: JIT_BROADCAST, JIT_ZEROING. */
void jit_put_evex(jit_asm *a, ZydisMnemonic mnemonic, int evex, int n, const jit_operand *o);

/* A jump to where jit_aim() says later; returns its end. Not where ends of instructions are
 * noted. */
size_t jit_jump(jit_asm *a, ZydisMnemonic mnemonic);
void jit_aim(jit_asm *a, size_t jump, size_t target);

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
