/* Captured tensors as compiled passes read them, against eval_read bit for bit: every dtype,
 * place in a word, sign of the stride and level of the index, in memory that begins or ends
 * where nothing can be read. */
#include "base/convert.h"
#include "base/cpu_features.h"
#include "cpu/jit/jit_graph.h"
#include "eval/eval_ops.h"
#include "pass/pass.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

enum { ROWS = 7, KEYS = 3 * JIT_GROUP, MOST = 200 };

static const saccade_dtype dtypes[] = {
    SACCADE_BOOL, SACCADE_U8,  SACCADE_I8,  SACCADE_U16,  SACCADE_I16, SACCADE_U32, SACCADE_I32,
    SACCADE_U64,  SACCADE_I64, SACCADE_F16, SACCADE_BF16, SACCADE_F32, SACCADE_F64,
};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

static mod_type type_of(saccade_dtype dtype)
{
    return dtype == SACCADE_BOOL ? MOD_BOOL : dtype >= SACCADE_F16 ? MOD_FLOAT : MOD_INT;
}

static int32_t best_level(void)
{
    cpu_level level;
    assert_int_equal(cpu_level_allowed(&level, NULL), SACCADE_OK);
    return (int32_t)level < CPU_AVX512 ? (int32_t)level : CPU_AVX512;
}

/* ---- memory between pages that nothing can read ---- */

typedef struct fenced {
    char *mapped, *begin, *end;
    size_t page;
} fenced;

static fenced fence(void)
{
    fenced f = {.page = (size_t)sysconf(_SC_PAGESIZE)};
    f.mapped = mmap(NULL, 4 * f.page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(f.mapped != MAP_FAILED);
    f.begin = f.mapped + f.page;
    f.end = f.begin + 2 * f.page;
    assert_int_equal(mprotect(f.begin, 2 * f.page, PROT_READ | PROT_WRITE), 0);
    uint64_t x = 88172645463325252u;
    for (char *p = f.begin; p < f.end; p++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        *p = x % 5 == 0 ? 0 : (char)(x >> 32);
    }
    return f;
}

/* ---- one read ---- */

/* Which variables the index has, bits of ROW and KEY; or both, so that it falls along keys, or
 * stands still for some. */
enum { NEITHER, ROW, KEY, BOTH, FALLING, STEPS, FORMS };
enum { STEP = 12 };

static int32_t index_at(int form, int32_t q, int32_t kv)
{
    if (form == FALLING)
        return 92 - kv - 5 * q;
    if (form == STEPS)
        return kv / STEP - 5 * q + 29;
    return (form & KEY ? kv : 0) - (form & ROW ? 5 * q : 0) - 3;
}

static uint32_t emit_index(mod_builder *b, int form)
{
    const int is_other = form > BOTH;
    uint32_t at = mod_emit_int(b, form == FALLING ? 92 : form == STEPS ? 29 : -3);
    if (form & ROW || is_other)
        at = mod_emit2(b, OP_isub, at,
                       mod_emit2(b, OP_imul, mod_emit(b, OP_VAR, NULL, 0, VAR_Q, 0, 0),
                                 mod_emit_int(b, 5)));
    if (!(form & KEY) && !is_other)
        return at;
    uint32_t kv = mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    if (form == STEPS)
        kv = mod_emit2(b, OP_idiv, kv, mod_emit_int(b, STEP));
    return form == FALLING ? mod_emit2(b, OP_isub, at, kv) : mod_emit2(b, OP_iadd, kv, at);
}

/* t[index], ints in two halves, so that a float holds each. */
static const mod_fn *one_read(saccade_dtype dtype, int form, int is_high, arena *a)
{
    mod_capture *capture = arena_array(a, 1, sizeof *capture); /* as long as what reads it */
    assert_non_null(capture);
    *capture = (mod_capture){"t", dtype, type_of(dtype), 1};
    mod_builder *b = mod_builder_create(a, SACCADE_SCORE, capture, 1);
    const mod_fn *fn;
    const uint32_t at = emit_index(b, form);
    uint32_t r = mod_emit(b, OP_LOAD, &at, 1, 0, 0, 0);
    if (type_of(dtype) == MOD_BOOL)
        r = mod_emit1(b, OP_b2i, r);
    if (type_of(dtype) != MOD_FLOAT) {
        r = is_high ? mod_emit2(b, OP_ishr, r, mod_emit_int(b, 12))
                    : mod_emit2(b, OP_iand, r, mod_emit_int(b, 4095));
        r = mod_emit1(b, OP_i2f, r);
    }
    assert_int_equal(mod_finish(b, r, &fn, NULL), SACCADE_OK);
    return fn;
}

static float expected(const saccade_tensor *t, int form, int is_high, int32_t q, int32_t kv)
{
    const int64_t i = eval_clamp(index_at(form, q, kv), t->shape[0]);
    const eval_cell x = eval_read(t->dtype, t->data, i * t->stride[0]);
    if (type_of(t->dtype) == MOD_FLOAT)
        return x.f;
    return (float)(is_high ? x.i >> 12 : x.i & 4095);
}

typedef struct compiled {
    arena arena;
    jit_program *program;
    void *memory;
} compiled;

static compiled compile(const mod_fn *fn, int32_t level)
{
    compiled c;
    const pass_facts *facts;
    arena_init(&c.arena);
    assert_int_equal(pass_facts_make(fn, &c.arena, &facts, NULL), SACCADE_OK);
    assert_int_equal(jit_create(facts, NULL, level, &c.program, NULL), SACCADE_OK);
    c.memory = aligned_alloc(64, jit_state_bytes(c.program));
    assert_non_null(c.memory);
    return c;
}

static void destroy(compiled *c)
{
    jit_destroy(c->program);
    free(c->memory);
    arena_free(&c->arena);
}

static void check_read(compiled *c, saccade_tensor *t, int form, int is_high, int32_t level)
{
    static _Alignas(64) float s[ROWS * KEYS];
    const eval_env env = {.tensors = t};
    float top[ROWS];
    jit_state *state = jit_begin(c->program, &env, &env, 1.0f, c->memory);
    assert_non_null(state);
    memset(s, 0, sizeof s);
    jit_head(state, 0, 0);
    jit_rows(state, 0, ROWS);
    jit_cols(state, 0, KEYS);
    jit_tile(state, s, KEYS, 0, ROWS, 0, KEYS, 0, top);
    for (int q = 0; q < ROWS; q++)
        for (int kv = 0; kv < KEYS; kv++) {
            const float got = s[q * KEYS + kv], want = expected(t, form, is_high, q, kv);
            if (f32_bits(got) != f32_bits(want))
                fail_msg("%s at %% 4 = %d, level %d, size %d, stride %d, form %d, row %d, key "
                         "%d: got %a, expected %a",
                         saccade_dtype_name(t->dtype), (int)((uintptr_t)t->data % 4), level,
                         (int)t->shape[0], (int)t->stride[0], form, q, kv, (double)got,
                         (double)want);
        }
}

/* Tensors of every size and stride at the place'th element from each end of the memory. */
static void check_places(compiled *c, const fenced *f, saccade_dtype dtype, int form,
                         int is_high, int32_t level)
{
    static const int64_t sizes[] = {1, 2, 3, 5, 64, MOST};
    static const int64_t strides[] = {1, -1, 2, -3};
    const int64_t bytes = (int64_t)saccade_dtype_bytes(dtype);
    for (int place = 0; place < 8; place++)
        for (size_t i = 0; i < 6 * 4; i++) {
            const int64_t n = sizes[i / 4], stride = strides[i % 4];
            const int64_t span = (n - 1) * (stride < 0 ? -stride : stride) + 1;
            char *low = place % 2 ? f->begin + place / 2 * bytes
                                  : f->end - (span + place / 2) * bytes;
            saccade_tensor t = saccade_tensor_of(low, dtype, 1, &n);
            t.stride[0] = stride;
            if (stride < 0)
                t.data = low + (span - 1) * bytes;
            check_read(c, &t, form, is_high, level);
        }
}

static void skip_without_jit(void)
{
    jit_program *p = NULL;
    if (jit_create(NULL, NULL, best_level(), &p, NULL) != SACCADE_OK)
        skip();
    jit_destroy(p);
}

static void every_dtype(void **state)
{
    (void)state;
    skip_without_jit();
    const fenced f = fence();
    for (int d = 0; d < N_DTYPES; d++)
        for (int form = 0; form < FORMS; form++)
            for (int is_high = 0; is_high <= (type_of(dtypes[d]) == MOD_INT); is_high++)
                for (int32_t level = CPU_AVX2; level <= best_level(); level++) {
                    arena a;
                    arena_init(&a);
                    compiled c = compile(one_read(dtypes[d], form, is_high, &a), level);
                    check_places(&c, &f, dtypes[d], form, is_high, level);
                    destroy(&c);
                    arena_free(&a);
                }
    munmap(f.mapped, 4 * f.page);
}

/* Every number of 16 bits, by runs of keys and one by one. */
static void every_half(void **state)
{
    static const saccade_dtype halves[] = {SACCADE_F16, SACCADE_BF16, SACCADE_I16, SACCADE_U16};
    static uint16_t all[1 << 16];
    const int64_t n = KEYS;
    (void)state;
    skip_without_jit();
    for (int i = 0; i < 1 << 16; i++)
        all[i] = (uint16_t)i;
    for (int d = 0; d < 4; d++)
        for (int32_t level = CPU_AVX2; level <= best_level(); level++) {
            arena a;
            arena_init(&a);
            compiled c = compile(one_read(halves[d], BOTH, 0, &a), level);
            for (int i = 0; i <= (1 << 16) - KEYS; i += KEYS - 8 - (i % 2)) {
                saccade_tensor t = saccade_tensor_of(all + i, halves[d], 1, &n);
                check_read(&c, &t, BOTH, 0, level);
                t.data = all + i + KEYS - 1;
                t.stride[0] = -1;
                check_read(&c, &t, BOTH, 0, level);
            }
            saccade_tensor t = saccade_tensor_of(all + (1 << 16) - KEYS, halves[d], 1, &n);
            check_read(&c, &t, BOTH, 0, level);
            destroy(&c);
            arena_free(&a);
        }
}

/* Elements that lie in two words are left to the interpreter. */
static void odd_addresses(void **state)
{
    static _Alignas(4) char bytes[64];
    const int64_t n = 8;
    arena a;
    (void)state;
    skip_without_jit();
    arena_init(&a);
    for (int d = 0; d < N_DTYPES; d++) {
        compiled c = compile(one_read(dtypes[d], BOTH, 0, &a), best_level());
        saccade_tensor t = saccade_tensor_of(bytes + 1, dtypes[d], 1, &n);
        const eval_env env = {.tensors = &t};
        const int is_odd = saccade_dtype_bytes(dtypes[d]) == 2;
        assert_int_equal(jit_begin(c.program, &env, &env, 1.0f, c.memory) == NULL, is_odd);
        destroy(&c);
    }
    arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_dtype),
        cmocka_unit_test(every_half),
        cmocka_unit_test(odd_addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
