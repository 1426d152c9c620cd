/* The loops of the strip interpreter, one per operation and kind of operand, from the `value`
   column of ops.def. Plain loops of fixed length that compilers vectorise; compiled once per
   level, with the same bits from each (no contraction, no reassociation). */
#include "eval/strip.h"

#include "mod/arith.h"

#include <string.h>

#if !defined(LEVEL_AMX) /* has nothing beyond AVX-512 for these loops */

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

/* ---- operations ---- */

/* clang-format off */

/* One loop; X, Y, Z are the operands' types, the *_same constants. */
#define LOOP(OUT, X, Y, Z, x_same, y_same, z_same, value)                     \
    do {                                                                     \
        const X *xs = xp, x0 = x_same ? *xs : (X)0;                          \
        const Y *ys = yp, y0 = y_same ? *ys : (Y)0;                          \
        const Z *zs = zp, z0 = z_same ? *zs : (Z)0;                          \
        OUT *outs = out;                                                     \
        for (int group = 0; group < groups; group++) {                       \
            for (int i = 0; i < STRIP_GROUP; i++) {                          \
                const X x = x_same ? x0 : xs[i];                             \
                const Y y = y_same ? y0 : ys[i];                             \
                const Z z = z_same ? z0 : zs[i];                             \
                (void)x, (void)y, (void)z;                                   \
                outs[i] = (OUT)value;                                        \
            }                                                                \
            xs += x_same ? 0 : STRIP_GROUP;                                  \
            ys += y_same ? 0 : STRIP_GROUP;                                  \
            zs += z_same ? 0 : STRIP_GROUP;                                  \
            outs += STRIP_GROUP;                                             \
        }                                                                    \
    } while (0)

/* Operands that an operation does not have count as the same. */
#define LOOPS(arity, OUT, X, Y, Z, value)                        \
    do {                                                         \
        if (arity == 1)                                          \
            LOOP(OUT, X, Y, Z, 0, 1, 1, value);                  \
        else if (arity == 2 && (same & 3) == STRIP_X_SAME)       \
            LOOP(OUT, X, Y, Z, 1, 0, 1, value);                  \
        else if (arity == 2 && (same & 3) == STRIP_Y_SAME)       \
            LOOP(OUT, X, Y, Z, 0, 1, 1, value);                  \
        else if (arity == 2)                                     \
            LOOP(OUT, X, Y, Z, 0, 0, 1, value);                  \
        else                                                     \
            LOOPS3(OUT, X, Y, Z, value);                         \
    } while (0)

#define LOOPS3(OUT, X, Y, Z, value)                              \
    switch (same) {                                              \
    case 0:                                                      \
        LOOP(OUT, X, Y, Z, 0, 0, 0, value);                      \
        break;                                                   \
    case STRIP_X_SAME:                                           \
        LOOP(OUT, X, Y, Z, 1, 0, 0, value);                      \
        break;                                                   \
    case STRIP_Y_SAME:                                           \
        LOOP(OUT, X, Y, Z, 0, 1, 0, value);                      \
        break;                                                   \
    case STRIP_Z_SAME:                                           \
        LOOP(OUT, X, Y, Z, 0, 0, 1, value);                      \
        break;                                                   \
    case STRIP_X_SAME | STRIP_Y_SAME:                            \
        LOOP(OUT, X, Y, Z, 1, 1, 0, value);                      \
        break;                                                   \
    case STRIP_X_SAME | STRIP_Z_SAME:                            \
        LOOP(OUT, X, Y, Z, 1, 0, 1, value);                      \
        break;                                                   \
    default:                                                     \
        LOOP(OUT, X, Y, Z, 0, 1, 1, value);                      \
    }

#define R float
#define M(f) fm_##f
#define OP(name, signature, form, value, exact, fast, grad, range)                            \
    static void op_##name(void *restrict out, const void *restrict xp,                        \
                          const void *restrict yp, const void *restrict zp, int groups,       \
                          int same)                                                           \
    {                                                                                         \
        enum { ARITY = EVAL_ARITY(signature) };                                               \
        (void)same;                                                                           \
        if (EVAL_IS_FLOAT(signature) && (signature)[0] == 'F')                                \
            LOOPS(ARITY, strip_float, strip_float, strip_float, strip_float,                  \
                  EVAL_FLOAT_VALUE(name, value));                                             \
        else if (EVAL_IS_FLOAT(signature))                                                    \
            LOOPS(ARITY, strip_int, strip_float, strip_float, strip_float,                    \
                  EVAL_FLOAT_VALUE(name, value));                                             \
        else if (EVAL_IS_SELECT(signature))                                                   \
            LOOPS(ARITY, strip_float, strip_int, strip_float, strip_float,                    \
                  EVAL_FLOAT_VALUE(name, value));                                             \
        else if ((signature)[0] == 'F')                                                       \
            LOOPS(ARITY, strip_float, strip_int, strip_int, strip_int, (value));              \
        else                                                                                  \
            LOOPS(ARITY, strip_int, strip_int, strip_int, strip_int, (value));                \
    }
#include "mod/ops.def"
#undef OP
#undef M
#undef R
/* clang-format on */

/* ---- elements of captures ---- */

/* clang-format off */
#define READS(dtype, T, OUT, value)                                                  \
    static void read_##dtype(void *out, const void *data, int64_t stride, int n)      \
    {                                                                                \
        const T *from = data;                                                        \
        OUT *to = out;                                                               \
        if (stride == 1) {                                                           \
            for (int i = 0; i < n; i++) {                                            \
                const T x = from[i];                                                 \
                to[i] = (OUT)value;                                                  \
            }                                                                        \
            return;                                                                  \
        }                                                                            \
        for (int i = 0; i < n; i++) {                                                \
            const T x = from[i * stride];                                            \
            to[i] = (OUT)value;                                                      \
        }                                                                            \
    }                                                                                \
    static void gather_##dtype(void *out, const void *data, const int64_t *offsets, int n) \
    {                                                                                \
        const T *from = data;                                                        \
        OUT *to = out;                                                               \
        for (int i = 0; i < n; i++) {                                                \
            const T x = from[offsets[i]];                                            \
            to[i] = (OUT)value;                                                      \
        }                                                                            \
    }

READS(bool, uint8_t, strip_int, (x != 0))
READS(u8, uint8_t, strip_int, x)
READS(i8, int8_t, strip_int, x)
READS(u16, uint16_t, strip_int, x)
READS(i16, int16_t, strip_int, x)
READS(i32, int32_t, strip_int, x)
READS(i64, int64_t, strip_int, (uint32_t)x)
READS(f16, uint16_t, strip_float, f16_to_f32(x))
READS(bf16, uint16_t, strip_float, bf16_to_f32(x))
READS(f32, float, strip_float, x)
READS(f64, double, strip_float, x)
/* clang-format on */

static void add_offsets(int64_t *offsets, const void *index, int64_t size, int64_t stride,
                        int n)
{
    const strip_int *x = index;
    const int32_t last = size > INT32_MAX ? INT32_MAX : (int32_t)(size - 1);
    for (int i = 0; i < n; i++) {
        const int32_t above = x[i] < 0 ? 0 : x[i];
        offsets[i] += (int64_t)(above > last ? last : above) * stride;
    }
}

static void count(void *out, int32_t first, int groups)
{
    strip_int *to = out;
    for (int i = 0; i < groups * STRIP_GROUP; i++)
        to[i] = ar_add(first, i);
}

static void to_bytes(uint8_t *out, const void *x, int n)
{
    const strip_int *from = x;
    for (int i = 0; i < n; i++)
        out[i] = (uint8_t)from[i];
}

/* clang-format off */
const strip_table PASTE(strip_table_, LEVEL) = {
#define OP(name, ...) .op[OP_##name] = op_##name,
#include "mod/ops.def"
#undef OP
#define READ(DTYPE, dtype) .read[SACCADE_##DTYPE] = read_##dtype, \
                           .gather[SACCADE_##DTYPE] = gather_##dtype,
    READ(BOOL, bool) READ(U8, u8) READ(I8, i8) READ(U16, u16) READ(I16, i16)
    READ(U32, i32) READ(I32, i32) READ(U64, i64) READ(I64, i64)
    READ(F16, f16) READ(BF16, bf16) READ(F32, f32) READ(F64, f64)
    .add_offsets = add_offsets,
    .count = count,
    .to_bytes = to_bytes,
};
/* clang-format on */

#endif
