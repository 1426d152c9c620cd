/* Captured tensors: every dtype and rank with any strides reads what the definition of its
   format says; bindings that don't fit are refused with a line that names the capture. */
#include "base/convert.h"
#include "support/random_fn.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const saccade_dtype dtypes[] = {
    SACCADE_BOOL, SACCADE_U8,  SACCADE_I8,  SACCADE_U16,  SACCADE_I16, SACCADE_U32, SACCADE_I32,
    SACCADE_U64,  SACCADE_I64, SACCADE_F16, SACCADE_BF16, SACCADE_F32, SACCADE_F64};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0], SIDE = 3 };

static mod_type type_of(saccade_dtype dtype)
{
    return dtype == SACCADE_BOOL ? MOD_BOOL : dtype <= SACCADE_I64 ? MOD_INT : MOD_FLOAT;
}

/* ---- values ---- */

/* Bytes that mean anything to the format, but integers that fit int32 and true bools. */
static void fill(random_source *r, saccade_dtype dtype, uint8_t *data, int64_t n)
{
    const size_t bytes = saccade_dtype_bytes(dtype);
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = random_bits(r);
        if (dtype == SACCADE_BOOL)
            bits &= 1;
        if (dtype == SACCADE_U32 || dtype == SACCADE_U64)
            bits &= INT32_MAX;
        if (dtype == SACCADE_I64)
            bits = (uint64_t)(int64_t)(int32_t)bits;
        memcpy(data + (size_t)i * bytes, &bits, bytes);
    }
}

/* A mod that reads t[i0, ..., i(rank-1)], one of them kv + 1, the others constant; as a float
 * score, so that every type can be looked at. */
static const mod_fn *reader(arena *arena, const mod_capture *c, const int32_t *index,
                            int moving)
{
    mod_builder *b = mod_builder_create(arena, SACCADE_SCORE, c, 1);
    uint32_t args[SACCADE_MAX_RANK];
    const mod_fn *fn;
    saccade_error err;
    const uint32_t kv = mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    for (int d = 0; d < c->rank; d++)
        args[d] = d == moving ? mod_emit2(b, OP_iadd, kv, mod_emit_int(b, 1))
                              : mod_emit_int(b, index[d]);
    uint32_t x = mod_emit(b, OP_LOAD, args, c->rank, 0, 0, 0);
    if (c->type == MOD_BOOL)
        x = mod_emit1(b, OP_b2i, x);
    if (c->type != MOD_FLOAT)
        x = mod_emit1(b, OP_i2f, x);
    assert_int_equal(mod_finish(b, x, &fn, &err), SACCADE_OK);
    return fn;
}

static int32_t held(int32_t index)
{
    return index < 0 ? 0 : index >= SIDE ? SIDE - 1 : index;
}

/* The float that an element is read as, by the conversions of base/. */
static float expected(const saccade_tensor *t, const int32_t *index)
{
    int64_t offset = 0;
    for (int32_t d = 0; d < t->rank; d++)
        offset += held(index[d]) * t->stride[d];
    const char *at = (const char *)t->data + offset * (int64_t)saccade_dtype_bytes(t->dtype);
    return (float)convert_element(t->dtype, at);
}

static void check_reads(random_source *r, saccade_dtype dtype, int rank)
{
    static float score[EVAL_STRIP];
    static double values[64];
    arena arena;
    const eval_prog *prog;
    saccade_error err;
    saccade_tensor t = {.dtype = dtype, .rank = rank};
    const mod_capture c = {"t", dtype, (uint8_t)type_of(dtype), (uint8_t)rank};
    int64_t step = 1, first = 0;
    int32_t index[SACCADE_MAX_RANK];
    const int moving = random_below(r, rank), kv0 = random_below(r, 6) - 4;
    for (int d = 0; d < rank; d++) { /* column-major, padded; some reversed, some broadcast */
        const int how = random_below(r, 6);
        t.shape[d] = SIDE;
        t.stride[d] = how == 0 ? 0 : how == 1 ? -step : step;
        first += how == 1 ? (SIDE - 1) * step : 0;
        step *= how == 0 ? 1 : SIDE;
        index[d] = random_below(r, SIDE + 4) - 2;
    }
    const size_t bytes = saccade_dtype_bytes(dtype);
    uint8_t *data = malloc((size_t)step * bytes);
    fill(r, dtype, data, step);
    t.data = data + (size_t)first * bytes;
    arena_init(&arena);
    const mod_fn *fn = reader(&arena, &c, index, moving);
    const eval_env env = {.tensors = &t};
    assert_int_equal(eval_compile(fn, &arena, &prog, &err), SACCADE_OK);
    void *memory = aligned_alloc(64, eval_state_bytes(prog));
    eval_state *state = eval_begin(prog, &env, memory);
    const int n = 1 + random_below(r, 9);
    eval_head(state, 0, 0);
    eval_row(state, 0);
    eval_score(state, kv0, n, score);
    for (int i = 0; i < n; i++) {
        index[moving] = kv0 + i + 1;
        const eval_point at = {.kv = kv0 + i};
        const eval_cell want = {.f = expected(&t, index)}, got = {.f = score[i]};
        const eval_cell oracle = {.f = (float)eval_scalar(fn, &env, &at, values, NULL)};
        if (!random_same(MOD_FLOAT, got, want) || !random_same(MOD_FLOAT, oracle, want))
            fail_msg("%s rank %d: got %a and %a, expected %a", saccade_dtype_name(dtype), rank,
                     (double)got.f, (double)oracle.f, (double)want.f);
    }
    free(memory);
    free(data);
    arena_free(&arena);
}

static void test_reads(void **unused)
{
    random_source r = {3};
    (void)unused;
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < N_DTYPES; i++)
            for (int rank = 1; rank <= SACCADE_MAX_RANK; rank++)
                check_reads(&r, dtypes[i], rank);
}

/* ---- bindings ---- */

static const mod_capture captures[2] = {{"W", SACCADE_I32, MOD_INT, 0},
                                        {"doc", SACCADE_I64, MOD_INT, 1}};

/* doc[kv] < W, both captured. */
static const mod_fn *two_captures(arena *arena)
{
    mod_builder *b = mod_builder_create(arena, SACCADE_MASK, captures, 2);
    const mod_fn *fn;
    saccade_error err;
    const uint32_t kv = mod_emit(b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    const uint32_t doc = mod_emit(b, OP_LOAD, &kv, 1, 1, 0, 0);
    const uint32_t w = mod_emit(b, OP_SCALAR, NULL, 0, 0, 0, 0);
    assert_int_equal(mod_finish(b, mod_emit2(b, OP_ilt, doc, w), &fn, &err), SACCADE_OK);
    return fn;
}

static int64_t docs[4] = {1, 2, 3, 4};
static int64_t width = 5;

/* Sound bindings, to be spoilt. */
static void sound(saccade_binding out[3])
{
    const int64_t shape[1] = {4};
    out[0] = (saccade_binding){"doc", saccade_tensor_of(docs, SACCADE_I64, 1, shape)};
    out[1] = (saccade_binding){"W", saccade_tensor_of(&width, SACCADE_I64, 0, shape)};
    out[2] = out[1];
}

static void expect_failure(const saccade_binding *bindings, int32_t n, saccade_status status,
                           const char *where, const char *message)
{
    arena arena;
    saccade_error err;
    saccade_tensor tensors[2] = {{.rank = 77}, {.rank = 77}};
    arena_init(&arena);
    assert_int_equal(eval_resolve(two_captures(&arena), bindings, n, 1, tensors, &err), status);
    assert_string_equal(err.where, where);
    assert_string_equal(err.message, message);
    assert_int_equal(tensors[0].rank, 77);
    arena_free(&arena);
}

static void test_resolve(void **unused)
{
    arena arena;
    saccade_error err;
    saccade_tensor tensors[2];
    saccade_binding b[3];
    (void)unused;
    arena_init(&arena);
    sound(b);
    assert_int_equal(eval_resolve(two_captures(&arena), b, 2, 1, tensors, &err), SACCADE_OK);
    assert_ptr_equal(tensors[0].data, &width);
    assert_ptr_equal(tensors[1].data, docs);
    arena_free(&arena);
}

static void test_resolve_failures(void **unused)
{
    saccade_binding b[3];
    (void)unused;
    sound(b);
    expect_failure(b, 1, SACCADE_EINVAL, "W", "got no value for this captured name");
    expect_failure(b, 3, SACCADE_EINVAL, "W", "got two values, expected one");
    b[2].name = "V";
    expect_failure(b, 3, SACCADE_EINVAL, "V", "got a value for a name that is not captured");
    b[2].name = NULL;
    expect_failure(b, 3, SACCADE_EINVAL, "bindings", "got no name in entry 2, expected one");
    sound(b);
    b[0].tensor.dtype = SACCADE_F32;
    expect_failure(b, 2, SACCADE_EINVAL, "doc", "dtype: got f32, expected an integer dtype");
    b[0].tensor.dtype = SACCADE_I32;
    expect_failure(b, 2, SACCADE_EINVAL, "doc", "dtype: got i32, expected i64 as it was bound");
    sound(b);
    b[0].tensor.rank = 2;
    expect_failure(b, 2, SACCADE_EINVAL, "doc", "rank: got 2, expected 1");
    sound(b);
    b[0].tensor.shape[0] = 0;
    expect_failure(b, 2, SACCADE_EINVAL, "doc",
                   "shape: got 0 in dimension 0, which is indexed, expected >= 1");
    b[0].tensor.shape[0] = -1;
    expect_failure(b, 2, SACCADE_EINVAL, "doc", "shape: got -1 in dimension 0, expected >= 1");
    sound(b);
    b[0].tensor.data = NULL;
    expect_failure(b, 2, SACCADE_EINVAL, "doc", "data: got NULL");
    sound(b);
    b[0].tensor.device.kind = SACCADE_CUDA;
    expect_failure(b, 2, SACCADE_EINVAL, "doc", "device: got cuda, expected cpu");
}

static void test_resolve_values(void **unused)
{
    saccade_binding b[3];
    (void)unused;
    sound(b);
    docs[2] = INT64_C(1) << 31;
    expect_failure(b, 2, SACCADE_EVALUE, "doc",
                   "value at [2]: got 2147483648, expected a 32-bit integer");
    docs[2] = -(INT64_C(1) << 31) - 1;
    expect_failure(b, 2, SACCADE_EVALUE, "doc",
                   "value at [2]: got -2147483649, expected a 32-bit integer");
    docs[2] = 3;
    width = INT64_C(1) << 40;
    expect_failure(b, 2, SACCADE_EVALUE, "W",
                   "value: got 1099511627776, expected a 32-bit integer");
    width = 5;
}

static void test_resolve_places(void **unused)
{
    saccade_binding b[3];
    saccade_tensor tensors[2];
    saccade_error err;
    arena arena;
    (void)unused;
    sound(b);
    arena_init(&arena);
    b[0].tensor.data = (char *)docs + 4;
    assert_int_equal(eval_resolve(two_captures(&arena), b, 2, 0, tensors, &err),
                     SACCADE_EINVAL);
    assert_string_equal(err.where, "doc");
    assert_non_null(strstr(err.message, "expected a multiple of 8"));
    arena_free(&arena);
}

/* ---- shapes ---- */

/* t[i, j, k] with these shape and strides. */
static saccade_status resolve_shape(const int64_t shape[3], const int64_t stride[3],
                                    saccade_error *err)
{
    static const int32_t index[3] = {0, 0, 0};
    static uint16_t data[32];
    const mod_capture c = {"t", SACCADE_U16, MOD_INT, 3};
    arena arena;
    saccade_tensor out;
    saccade_binding b = {"t", saccade_tensor_of(data, SACCADE_U16, 0, NULL)};
    b.tensor.rank = 3;
    memcpy(b.tensor.shape, shape, 3 * sizeof *shape);
    memcpy(b.tensor.stride, stride, 3 * sizeof *stride);
    arena_init(&arena);
    const saccade_status status =
        eval_resolve(reader(&arena, &c, index, 2), &b, 1, 1, &out, err);
    arena_free(&arena);
    return status;
}

static void test_shape_bounds(void **unused)
{
    const int64_t most = INT32_MAX, far = INT64_MAX / 64;
    saccade_error err;
    (void)unused;
    assert_int_equal(resolve_shape((int64_t[3]){most, most, 8}, (int64_t[3]){0, 0, 1}, &err),
                     SACCADE_OK);
    assert_int_equal(resolve_shape((int64_t[3]){2, 2, 8}, (int64_t[3]){far, -far, 1}, &err),
                     SACCADE_OK);
    static const int64_t large[][3] = {{INT64_C(1) << 32, 1, 8},
                                       {1, (int64_t)INT32_MAX + 1, 8},
                                       {INT64_MAX, INT64_MAX, 8},
                                       {1, 1, INT64_MAX}};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        assert_int_equal(resolve_shape(large[i], (int64_t[3]){0, 0, 1}, &err),
                         SACCADE_EINVAL);
        assert_non_null(strstr(err.message, "expected at most 2147483647"));
    }
    static const int64_t wide[][3] = {{INT64_MAX, 0, 1},
                                      {INT64_MIN, 0, 1},
                                      {INT64_MAX / 4, INT64_MAX / 4, 1},
                                      {INT64_MAX / 16, INT64_MAX / 16, INT64_MIN / 16},
                                      {INT64_MAX / 2, INT64_MIN / 2, 0}};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        assert_int_equal(resolve_shape((int64_t[3]){2, 2, 8}, wide[i], &err),
                         SACCADE_EINVAL);
        assert_non_null(strstr(err.message, "expected elements within 2^63 bytes"));
    }
    assert_int_equal(resolve_shape((int64_t[3]){most, most, most}, (int64_t[3]){1, 1, 1},
                                   &err),
                     SACCADE_EINVAL);
    assert_non_null(strstr(err.message, "got over 2^48 elements"));
}

/* Whether a tensor of 16-bit elements keeps all bounds, in integers that do not wrap. */
static bool is_within_bounds(const int64_t shape[3], const int64_t stride[3])
{
    const __int128 most = (__int128)1 << 48;
    __int128 up = 0, down = 0, elements = 1;
    for (int d = 0; d < 3; d++) {
        const __int128 length = (__int128)shape[d] * stride[d] * 2;
        if (shape[d] < 1 || shape[d] > INT32_MAX)
            return false;
        *(length < 0 ? &down : &up) += length;
        elements *= stride[d] != 0 && elements <= most ? shape[d] : 1;
    }
    return up <= INT64_MAX && down > INT64_MIN && elements <= most;
}

static void test_random_shapes(void **unused)
{
    static const int64_t sizes[] = {1,  2,         7,
                                    1 << 20,       INT32_MAX, (int64_t)INT32_MAX + 1,
                                    0,  INT64_MAX, -1};
    static const int64_t steps[] = {0,         1,         -1,
                                    0,         8,         (int64_t)1 << 31,
                                    INT64_MAX, INT64_MIN, (int64_t)1 << 41,
                                    -((int64_t)1 << 30)};
    random_source r = {17};
    int n_fine = 0;
    (void)unused;
    for (int round = 0; round < 20000; round++) {
        int64_t shape[3], stride[3];
        saccade_error err;
        for (int d = 0; d < 3; d++) {
            shape[d] = sizes[random_below(&r, random_below(&r, 2) ? 5 : 9)];
            stride[d] = steps[random_below(&r, 10)];
        }
        const bool is_fine = is_within_bounds(shape, stride);
        if ((resolve_shape(shape, stride, &err) == SACCADE_OK) != is_fine)
            fail_msg("[%lld, %lld, %lld] {%lld, %lld, %lld}: expected %s", (long long)shape[0],
                     (long long)shape[1], (long long)shape[2], (long long)stride[0],
                     (long long)stride[1], (long long)stride[2], is_fine ? "OK" : "EINVAL");
        n_fine += is_fine;
    }
    assert_true(n_fine > 2000 && n_fine < 18000);
}

/* ---- values that do not fit ---- */

/* One value in rows of any step, wherever it stands: the last that fits, the first that does
 * not, which is named by its indices. */
static void scan_one(saccade_dtype dtype, int64_t step, int at, int64_t value, bool fits)
{
    enum { ROWS = 3, COLUMNS = 5, MOST = ROWS * COLUMNS * 2 };
    static const int32_t index[2] = {0, 0};
    const int64_t shape[2] = {ROWS, COLUMNS};
    const int row = at / COLUMNS, column = at % COLUMNS;
    const mod_capture c = {"t", dtype, MOD_INT, 2};
    uint64_t data[MOST] = {0};
    arena arena;
    saccade_tensor out;
    saccade_error err;
    saccade_binding b = {"t", saccade_tensor_of(data, dtype, 2, shape)};
    char message[96];
    b.tensor.stride[0] = COLUMNS * step;
    b.tensor.stride[1] = step;
    const size_t bytes = saccade_dtype_bytes(dtype);
    memcpy((char *)data + bytes * (size_t)((row * COLUMNS + column) * step), &value, bytes);
    arena_init(&arena);
    const mod_fn *fn = reader(&arena, &c, index, 1);
    const saccade_status wanted = fits ? SACCADE_OK : SACCADE_EVALUE;
    assert_int_equal(eval_resolve(fn, &b, 1, 1, &out, &err), wanted);
    snprintf(message, sizeof message, "value at [%d, %d]: got %lld, expected a 32-bit integer",
             row, column, (long long)value);
    if (!fits)
        assert_string_equal(err.message, message);
    assert_int_equal(eval_resolve(fn, &b, 1, 0, &out, &err), SACCADE_OK);
    arena_free(&arena);
}

static void test_resolve_rows(void **unused)
{
    const int64_t most = INT32_MAX, least = INT32_MIN;
    (void)unused;
    for (int at = 0; at < 15; at++)
        for (int64_t step = 1; step <= 2; step++) {
            scan_one(SACCADE_U32, step, at, most, true);
            scan_one(SACCADE_U32, step, at, most + 1, false);
            scan_one(SACCADE_U64, step, at, most, true);
            scan_one(SACCADE_U64, step, at, most + 1, false);
            scan_one(SACCADE_I64, step, at, most, true);
            scan_one(SACCADE_I64, step, at, most + 1, false);
            scan_one(SACCADE_I64, step, at, least, true);
            scan_one(SACCADE_I64, step, at, least - 1, false);
            scan_one(SACCADE_I64, step, at, INT64_MIN, false);
            scan_one(SACCADE_I64, step, at, INT64_MAX, false);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads),
        cmocka_unit_test(test_resolve),
        cmocka_unit_test(test_resolve_failures),
        cmocka_unit_test(test_shape_bounds),
        cmocka_unit_test(test_random_shapes),
        cmocka_unit_test(test_resolve_values),
        cmocka_unit_test(test_resolve_places),
        cmocka_unit_test(test_resolve_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
