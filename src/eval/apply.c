/* One operation on one value: the `value` column of ops.def read in f32 with the shared
   mathematics of arith.h, and in double with libm's; and one element of a captured tensor. */
#include "eval/eval_ops.h"

#include "mod/arith.h"

#include <math.h>

/* ---- f32 ---- */

/* clang-format off */
#define R float
#define M(f) fm_##f
#define OP(name, signature, form, value, exact, fast, grad, range)      \
    static eval_cell apply_##name(eval_cell a, eval_cell b, eval_cell c) \
    {                                                                   \
        if (EVAL_IS_FLOAT(signature)) {                                 \
            const float x = a.f, y = b.f, z = c.f;                      \
            (void)x, (void)y, (void)z;                                  \
            if ((signature)[0] == 'F')                                  \
                return (eval_cell){.f = (float)EVAL_FLOAT_VALUE(name, value)};  \
            return (eval_cell){.i = (int32_t)EVAL_FLOAT_VALUE(name, value)};    \
        }                                                               \
        if (EVAL_IS_SELECT(signature)) {                                \
            const int32_t x = a.i;                                      \
            const float y = b.f, z = c.f;                               \
            (void)x, (void)y, (void)z;                                  \
            return (eval_cell){.f = (float)EVAL_FLOAT_VALUE(name, value)};      \
        }                                                               \
        const int32_t x = a.i, y = b.i, z = c.i;                        \
        (void)x, (void)y, (void)z;                                      \
        if ((signature)[0] == 'F')                                      \
            return (eval_cell){.f = (float)(value)};                    \
        return (eval_cell){.i = (int32_t)(value)};                      \
    }
#include "mod/ops.def"
#undef OP
#undef M
#undef R
/* clang-format on */

eval_cell eval_apply(mod_op op, eval_cell x, eval_cell y, eval_cell z)
{
    switch (op) {
#define OP(name, ...) \
    case OP_##name:   \
        return apply_##name(x, y, z);
#include "mod/ops.def"
#undef OP
    default:
        return (eval_cell){0};
    }
}

/* ---- double ---- */

static double wide_fabs(double x)
{
    return fabs(x);
}

static double wide_rsqrt(double x)
{
    return 1.0 / sqrt(x);
}

static double wide_sigmoid(double x)
{
    const double e = exp(-fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

static int32_t wide_f2i(double x)
{
    if (x != x)
        return 0;
    return x <= INT32_MIN ? INT32_MIN : x >= INT32_MAX ? INT32_MAX : (int32_t)x;
}

#define wide_floor floor
#define wide_ceil ceil
#define wide_round round
#define wide_trunc trunc
#define wide_sqrt sqrt
#define wide_exp exp
#define wide_exp2 exp2
#define wide_log log
#define wide_log2 log2
#define wide_sin sin
#define wide_cos cos
#define wide_tan tan
#define wide_tanh tanh
#define wide_erf erf
#define wide_pow pow

/* clang-format off */
#define R double
#define M(f) wide_##f
#define ar_f2i wide_f2i
#define OP(name, signature, form, value, exact, fast, grad, range) \
    static double widen_##name(double a, double b, double c)       \
    {                                                              \
        if (EVAL_IS_FLOAT(signature)) {                            \
            const double x = a, y = b, z = c;                      \
            (void)x, (void)y, (void)z;                             \
            return (double)EVAL_FLOAT_VALUE(name, value);          \
        }                                                          \
        if (EVAL_IS_SELECT(signature)) {                           \
            const int32_t x = (int32_t)a;                          \
            const double y = b, z = c;                             \
            (void)x, (void)y, (void)z;                             \
            return (double)EVAL_FLOAT_VALUE(name, value);          \
        }                                                          \
        const int32_t x = (int32_t)a, y = (int32_t)b, z = (int32_t)c; \
        (void)x, (void)y, (void)z;                                 \
        return (double)(value);                                    \
    }
#include "mod/ops.def"
#undef OP
#undef ar_f2i
#undef M
#undef R
/* clang-format on */

double eval_apply_wide(mod_op op, double x, double y, double z)
{
    switch (op) {
#define OP(name, ...) \
    case OP_##name:   \
        return widen_##name(x, y, z);
#include "mod/ops.def"
#undef OP
    default:
        return 0.0;
    }
}

/* ---- elements ---- */

eval_cell eval_read(saccade_dtype dtype, const void *data, int64_t offset)
{
    switch (dtype) {
    case SACCADE_BOOL:
        return (eval_cell){.i = ((const uint8_t *)data)[offset] != 0};
    case SACCADE_U8:
        return (eval_cell){.i = ((const uint8_t *)data)[offset]};
    case SACCADE_I8:
        return (eval_cell){.i = ((const int8_t *)data)[offset]};
    case SACCADE_U16:
        return (eval_cell){.i = ((const uint16_t *)data)[offset]};
    case SACCADE_I16:
        return (eval_cell){.i = ((const int16_t *)data)[offset]};
    case SACCADE_U32:
    case SACCADE_I32:
        return (eval_cell){.i = ((const int32_t *)data)[offset]};
    case SACCADE_U64:
    case SACCADE_I64:
        return (eval_cell){.i = (int32_t)(uint32_t)((const uint64_t *)data)[offset]};
    case SACCADE_F16:
        return (eval_cell){.f = f16_to_f32(((const uint16_t *)data)[offset])};
    case SACCADE_BF16:
        return (eval_cell){.f = bf16_to_f32(((const uint16_t *)data)[offset])};
    case SACCADE_F32:
        return (eval_cell){.f = ((const float *)data)[offset]};
    case SACCADE_F64:
        return (eval_cell){.f = (float)((const double *)data)[offset]};
    case SACCADE_E4M3: /* not of captures */
    case SACCADE_E5M2:
    case SACCADE_I4:
    case SACCADE_NONE:
        break;
    }
    return (eval_cell){0};
}

double eval_read_wide(saccade_dtype dtype, const void *data, int64_t offset)
{
    const eval_cell cell = eval_read(dtype, data, offset);
    if (dtype == SACCADE_F64)
        return ((const double *)data)[offset];
    return dtype >= SACCADE_F16 && dtype <= SACCADE_F32 ? (double)cell.f : (double)cell.i;
}
