/* What stands between requests and code: the memo against the encoder, byte for byte, and rows
 * that a stream holds once against the same rows written out. */
#include "saccade_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#if HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/flow/flow_merge.h"
#include "support/random_mod.h"

#include <stdlib.h>

#define Z(name) ZYDIS_MNEMONIC_##name

/* ---- the memo ---- */

static int below(uint64_t *seed, int n)
{
    return (int)random_mod_below(seed, (uint32_t)n);
}

static jit_operand any_vector(uint64_t *seed)
{
    return jit_reg(ZYDIS_REGISTER_ZMM0 + below(seed, 4));
}

static jit_operand any_memory(uint64_t *seed, int bytes)
{
    static const int64_t displacements[] = {0, 4, 64, -64, 100, 8192, -8256, 0x5a000000};
    static const ZydisRegister bases[] = {ZYDIS_REGISTER_R12, ZYDIS_REGISTER_R13};
    return jit_mem(bases[below(seed, 2)], ZYDIS_REGISTER_NONE, 0, displacements[below(seed, 8)],
                   bytes);
}

/* One of a few hundred instructions, some of which do not exist. */
static void put_any(jit_asm *a, uint64_t seed)
{
    const jit_operand x = any_vector(&seed), y = any_vector(&seed), z = any_vector(&seed);
    const jit_operand k = jit_reg(ZYDIS_REGISTER_K0 + below(&seed, 4));
    switch (below(&seed, 7)) {
    case 0:
        EMIT_VECTOR(a, Z(VADDPS), x, y, z);
        return;
    case 1:
        EMIT_VECTOR(a, Z(VMOVUPS), x, any_memory(&seed, 64));
        return;
    case 2:
        EMIT_VECTOR(a, Z(VPSRLD), x, y, jit_imm(below(&seed, 32)));
        return;
    case 3:
        jit_put_evex(a, Z(VFMADD213PS), JIT_BROADCAST, 4,
                     (jit_operand[]){x, k, y, any_memory(&seed, 4)});
        return;
    case 4:
        jit_put_evex(a, Z(VCVTPS2DQ), below(&seed, 2) ? JIT_ZEROING : 0, 3,
                     (jit_operand[]){x, k, y});
        return;
    case 5:
        EMIT(a, MOV, jit_reg(ZYDIS_REGISTER_RAX), jit_imm((int64_t)1 << below(&seed, 63)));
        return;
    default:
        EMIT(a, RET, x, y);
    }
}

static void memo_gives_the_encoders_bytes(void **state)
{
    enum { REQUESTS = 20000, FORMS = 700 };
    uint8_t plain[32], recalled[32];
    uint64_t seed = 1;
    int n_failed = 0;
    (void)state;
    jit_memo *memo = calloc(1, sizeof *memo);
    assert_non_null(memo);
    for (int i = 0; i < REQUESTS; i++) {
        const uint64_t form = 1 + (uint64_t)below(&seed, FORMS);
        jit_asm a = {.bytes = plain, .capacity = sizeof plain, .is_wide = 1}, b = a;
        b.bytes = recalled;
        b.memo = memo;
        put_any(&a, form);
        put_any(&b, form);
        assert_int_equal(a.failed, b.failed);
        assert_int_equal(a.size, b.size);
        if (!a.failed)
            assert_memory_equal(plain, recalled, a.size);
        n_failed += a.failed;
    }
    assert_in_range(n_failed, 1, REQUESTS - 1);
    free(memo);
}

static void memo_keeps_to_the_room(void **state)
{
    uint8_t bytes[24];
    uint32_t ends[1];
    jit_patch patches[1];
    jit_memo *memo = calloc(1, sizeof *memo);
    (void)state;
    assert_non_null(memo);
    jit_asm a = {.bytes = bytes, .capacity = sizeof bytes, .is_wide = 1, .memo = memo};
    for (int i = 0; i < 3; i++) /* 10 bytes each, and 15 must be left */
        EMIT(&a, MOV, jit_reg(ZYDIS_REGISTER_RAX), jit_imm(INT64_MAX));
    assert_int_equal(a.size, 10);
    assert_true(a.failed);
    a = (jit_asm){.bytes = bytes, .capacity = 24, .ends = ends, .patches = patches, .max_n = 1};
    for (int i = 0; i < 2; i++)
        EMIT(&a, PUSH, jit_reg(ZYDIS_REGISTER_RBX));
    assert_int_equal(a.n, 1);
    assert_true(a.failed);
    free(memo);
}

/* ---- streams ---- */

enum { ROWS = 32, SQUARES = 3, CODE = 1 << 16, FAR = 1 << 16 /* past short displacements */ };

static const int32_t added[SQUARES][MARKS] = {
    {0, 0, 0, 0, 0}, {4096, 2048, 0, 0, 128}, {0, 4096, -64, 12, 256}};

static jit_operand at(int64_t displacement, int bytes)
{
    return jit_mem(ZYDIS_REGISTER_R12, ZYDIS_REGISTER_NONE, 0, displacement, bytes);
}

/* All kinds of displacements, one before an immediate byte, and one that is not marked. */
static void put_row(jit_asm *a, const int64_t displacement[MARKS])
{
    const jit_operand x = jit_reg(ZYDIS_REGISTER_ZMM1), k = jit_reg(ZYDIS_REGISTER_K1);
    EMIT_VECTOR(a, Z(VMOVUPS), x, at(displacement[MARK_SCORES] - FAR, 64));
    EMIT_VECTOR(a, Z(VADDPS), x, x, at(FAR, 64));
    EMIT_VECTOR(a, Z(VADDPS), x, x, at(displacement[MARK_COLUMN] + FAR, 64));
    EMIT_VECTOR(a, Z(VADDPS), x, x, at(displacement[MARK_VECTOR] - FAR, 64));
    jit_put_evex(a, Z(VPCMPD), JIT_BROADCAST, 5,
                 (jit_operand[]){k, jit_reg(ZYDIS_REGISTER_K0), x,
                                 at(displacement[MARK_NUMBER] + FAR, 4), jit_imm(5)});
    EMIT_VECTOR(a, Z(VMOVUPS), at(displacement[MARK_WEIGHTS] + FAR, 64), x);
}

static void put_marked(jit_asm *a)
{
    int64_t marks[MARKS];
    for (int kind = 0; kind < MARKS; kind++)
        marks[kind] = jit_mark(kind);
    put_row(a, marks);
}

static void put_plain(jit_asm *a, int square, int row)
{
    static const int64_t row_bytes[MARKS] = {64, 64, 64, 4, 0};
    int64_t displacement[MARKS];
    for (int kind = 0; kind < MARKS; kind++)
        displacement[kind] = added[square][kind] + row * row_bytes[kind];
    put_row(a, displacement);
}

static void put_setup(jit_asm *a, int number)
{
    EMIT(a, MOV, jit_reg(ZYDIS_REGISTER_RAX), jit_imm(number));
}

/* Squares of rows, each after a line of its own: event 0 is their end. */
static void write_rows(flow_stream *s, int is_repeated)
{
    jit_asm a = flow_stream_asm(s);
    uint32_t run = 0;
    flow_stream_clear(s);
    for (int square = 0; square < SQUARES; square++) {
        put_setup(&a, square);
        flow_stream_note(s, &a, 0);
        s->need = square == 1 ? 1 : STREAM_NO_EVENT;
        if (is_repeated && square) {
            flow_stream_again(s, run, added[square]);
        } else if (is_repeated) {
            put_marked(&a);
            run = flow_stream_repeat(s, &a, 1, ROWS, added[square]);
        }
        for (int row = 0; row < ROWS && !is_repeated; row++)
            put_plain(&a, square, row);
        flow_stream_note(s, &a, 1);
    }
    flow_stream_event(s, 0);
    put_setup(&a, SQUARES);
    flow_stream_note(s, &a, 0);
    assert_false(a.failed);
}

/* The other stream: its event 1 lets square 1 begin, its last instruction waits for rows. */
static void write_pushes(flow_stream *s)
{
    enum { PUSHES = 40, EVENT_AT = 5 };
    jit_asm a = flow_stream_asm(s);
    for (int i = 0; i < PUSHES; i++) {
        s->need = i == PUSHES - 1 ? 0 : STREAM_NO_EVENT;
        EMIT(&a, PUSH, jit_reg(ZYDIS_REGISTER_RBX));
        flow_stream_note(s, &a, 1);
        if (i == EVENT_AT)
            flow_stream_event(s, 1);
    }
}

static void rows_held_once_are_written_out(void **state)
{
    static uint8_t bytes[2][CODE];
    flow_stream rows, pushes;
    (void)state;
    assert_int_equal(flow_stream_create(&rows, NULL, NULL), SACCADE_OK);
    assert_int_equal(flow_stream_create(&pushes, NULL, NULL), SACCADE_OK);
    write_pushes(&pushes);
    for (int is_plain = 0; is_plain < 2; is_plain++) {
        size_t size[2], stands_for[2];
        for (int is_repeated = 0; is_repeated < 2; is_repeated++) {
            jit_asm out = {.bytes = bytes[is_repeated], .capacity = CODE};
            write_rows(&rows, is_repeated);
            flow_stream_merge(&pushes, &rows, is_plain, &out);
            assert_false(out.failed);
            size[is_repeated] = out.size;
            stands_for[is_repeated] = rows.size;
            assert_int_equal(out.size, rows.size + pushes.size);
        }
        assert_int_equal(size[0], size[1]);
        assert_int_equal(stands_for[0], stands_for[1]);
        assert_memory_equal(bytes[0], bytes[1], size[0]);
    }
    flow_stream_destroy(&rows);
    flow_stream_destroy(&pushes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memo_gives_the_encoders_bytes),
        cmocka_unit_test(memo_keeps_to_the_room),
        cmocka_unit_test(rows_held_once_are_written_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    return 0;
}

#endif
