/* Requests to the encoder, and what it made of the last ones (docs/lab/009). */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AVX512

#include "cpu/jit/jit_asm.h"

#include <assert.h>

static size_t request_bytes(const jit_request *r)
{
    return offsetof(jit_request, o) + r->n * sizeof r->o[0];
}

static ZydisEncoderOperand encoder_operand(const jit_operand *o)
{
    ZydisEncoderOperand e;
    memset(&e, 0, sizeof e);
    e.type = (ZydisOperandType)o->type;
    if (o->type == ZYDIS_OPERAND_TYPE_REGISTER) {
        e.reg.value = (ZydisRegister)o->reg;
        e.reg.is4 = o->scale;
    } else if (o->type == ZYDIS_OPERAND_TYPE_IMMEDIATE) {
        e.imm.s = o->value;
    } else {
        e.mem.base = (ZydisRegister)o->reg;
        e.mem.index = (ZydisRegister)o->index;
        e.mem.scale = o->scale;
        e.mem.displacement = o->value;
        e.mem.size = o->bytes;
    }
    return e;
}

/* Encodes an instruction to `to` and returns its bytes; 0: it cannot be encoded, or has no
 * room. */
static size_t encode(const jit_request *r, uint8_t *to, size_t room)
{
    ZydisEncoderRequest e;
    ZyanUSize length = room;
    memset(&e, 0, sizeof e);
    e.machine_mode = ZYDIS_MACHINE_MODE_LONG_64;
    e.mnemonic = (ZydisMnemonic)r->mnemonic;
    e.operand_count = (ZyanU8)r->n;
    if (r->evex & JIT_BROADCAST)
        e.evex.broadcast = ZYDIS_BROADCAST_MODE_1_TO_16;
    if (r->evex & JIT_ZEROING)
        e.evex.zeroing_mask = ZYAN_TRUE;
    for (int i = 0; i < r->n; i++)
        e.operands[i] = encoder_operand(&r->o[i]);
    return ZYAN_FAILED(ZydisEncoderEncodeInstruction(&e, to, &length)) ? 0 : length;
}

static size_t line_of(const jit_request *r)
{
    const size_t n = request_bytes(r) / sizeof(uint64_t);
    uint64_t words[sizeof *r / sizeof(uint64_t)], hash = 0;
    memcpy(words, r, n * sizeof *words);
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash % JIT_MEMO_LINES;
}

/* Encodes, or copies what the memo holds of an equal instruction. */
static size_t recall(jit_memo *memo, const jit_request *r, uint8_t *to, size_t room)
{
    const size_t line = line_of(r), bytes = request_bytes(r);
    if (memcmp(&memo->lines[line].asked, r, bytes) != 0) {
        memset(memo->lines[line].bytes, 0, JIT_MAX_BYTES);
        memo->lines[line].size = (uint8_t)encode(r, memo->lines[line].bytes, JIT_MAX_BYTES);
        memcpy(&memo->lines[line].asked, r, bytes);
    }
    if (memo->lines[line].size > room)
        return 0;
    memcpy(to, memo->lines[line].bytes, JIT_MAX_BYTES);
    return memo->lines[line].size;
}

/* Notes where the marked displacement of the last instruction is: at its end, but for at most
 * one byte that may follow. */
static void note_mark(jit_asm *a, int64_t displacement)
{
    const int32_t marked = (int32_t)displacement, kind = (marked >> JIT_MARK_BITS) - 1;
    const int32_t unmarked = (int32_t)(displacement - jit_mark(kind));
    size_t at = a->size - sizeof marked;
    if (memcmp(a->bytes + at, &marked, sizeof marked) != 0)
        at--;
    assert(memcmp(a->bytes + at, &marked, sizeof marked) == 0);
    memcpy(a->bytes + at, &unmarked, sizeof unmarked);
    a->patches[a->n_patches++] = (jit_patch){(uint32_t)at, kind};
}

static void put_request(jit_asm *a, const jit_request *r)
{
    const size_t room = a->capacity - a->size;
    size_t size = 0;
    if (!a->failed && room >= JIT_MAX_BYTES && !(a->ends && a->n == a->max_n))
        size = a->memo ? recall(a->memo, r, a->bytes + a->size, room)
                       : encode(r, a->bytes + a->size, room);
    a->failed |= size == 0;
    a->size += size;
    if (!a->ends || size == 0)
        return;
    a->ends[a->n++] = (uint32_t)a->size;
    for (int i = 0; i < r->n; i++)
        if (r->o[i].type == ZYDIS_OPERAND_TYPE_MEMORY && r->o[i].value >> JIT_MARK_BITS > 0)
            note_mark(a, r->o[i].value);
}

void jit_put_evex(jit_asm *a, ZydisMnemonic mnemonic, int evex, int n, const jit_operand *o)
{
    jit_request r = {.mnemonic = (uint32_t)mnemonic, .evex = (uint16_t)evex, .n = (uint16_t)n};
    assert(n <= JIT_MAX_OPERANDS);
    for (int i = 0; i < n; i++)
        r.o[i] = o[i];
    put_request(a, &r);
}

void jit_put(jit_asm *a, ZydisMnemonic mnemonic, int n, const jit_operand *o)
{
    jit_put_evex(a, mnemonic, 0, n, o);
}

void jit_put_vector(jit_asm *a, ZydisMnemonic mnemonic, int n, const jit_operand *o)
{
    jit_operand all[JIT_MAX_OPERANDS];
    if (!a->is_wide) {
        jit_put(a, mnemonic, n, o);
        return;
    }
    assert(n < JIT_MAX_OPERANDS);
    all[0] = o[0];
    all[1] = jit_reg(ZYDIS_REGISTER_K0);
    for (int i = 1; i < n; i++)
        all[i + 1] = o[i];
    jit_put(a, mnemonic, n + 1, all);
}

enum { JUMP_BYTES = sizeof(int32_t) }; /* of the distance, at a jump's end */

size_t jit_jump(jit_asm *a, ZydisMnemonic mnemonic)
{
    ZydisEncoderRequest r;
    ZyanUSize length = a->capacity - a->size;
    memset(&r, 0, sizeof r);
    r.machine_mode = ZYDIS_MACHINE_MODE_LONG_64;
    r.mnemonic = mnemonic;
    r.branch_type = ZYDIS_BRANCH_TYPE_NEAR;
    r.branch_width = ZYDIS_BRANCH_WIDTH_32;
    r.operand_count = 1;
    r.operands[0].type = ZYDIS_OPERAND_TYPE_IMMEDIATE;
    assert(!a->ends);
    if (a->failed || length < ZYDIS_MAX_INSTRUCTION_LENGTH
        || ZYAN_FAILED(ZydisEncoderEncodeInstruction(&r, a->bytes + a->size, &length))
        || length <= JUMP_BYTES)
        a->failed = 1;
    else
        a->size += length;
    return a->size;
}

void jit_aim(jit_asm *a, size_t jump, size_t target)
{
    const int32_t distance = (int32_t)((int64_t)target - (int64_t)jump);
    if (!a->failed)
        memcpy(a->bytes + jump - JUMP_BYTES, &distance, JUMP_BYTES);
}

#endif
