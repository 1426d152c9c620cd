/* Every operation of ops.def against a definition of its own (wider integers, or one rounding
   of a double), over all combinations of extreme operands: one value at a time, downstream of
   the score, and in the loops of every level with each kind of operand. */
#include "support/random_fn.h"
#include "support/strip_levels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- definitions ---- */

#define INTS(name, value)                                               \
    static eval_cell want_##name(eval_cell a, eval_cell b, eval_cell c) \
    {                                                                   \
        const int64_t x = a.i, y = b.i, z = c.i;                        \
        (void)x, (void)y, (void)z;                                      \
        return (eval_cell){.i = (int32_t)(uint32_t)(uint64_t)(value)};  \
    }
#define FLOATS(name, value)                                             \
    static eval_cell want_##name(eval_cell a, eval_cell b, eval_cell c) \
    {                                                                   \
        const double x = (double)a.f, y = (double)b.f;                  \
        (void)x, (void)y, (void)c;                                      \
        return (eval_cell){.f = (float)(value)};                        \
    }
#define TRUTHS(name, value)                                             \
    static eval_cell want_##name(eval_cell a, eval_cell b, eval_cell c) \
    {                                                                   \
        const double x = (double)a.f, y = (double)b.f;                  \
        (void)c;                                                        \
        return (eval_cell){.i = (value) ? 1 : 0};                       \
    }

/* Python's %: has the sign of y. */
static int64_t modulo(int64_t x, int64_t y)
{
    return (x % y + y) % y;
}

static int32_t to_int(double x)
{
    if (isnan(x))
        return 0;
    return (int32_t)fmax(-2147483648.0, fmin(2147483647.0, trunc(x)));
}

INTS(iadd, x + y)
INTS(isub, x - y)
INTS(imul, x *y)
INTS(idiv, y == 0 ? 0 : x / y)
INTS(irem, y == 0 ? 0 : x % y)
INTS(ifloordiv, y == 0 ? 0 : (x - modulo(x, y)) / y)
INTS(ifloormod, y == 0 ? 0 : modulo(x, y))
INTS(ineg, -x)
INTS(iabs, x < 0 ? -x : x)
INTS(imin, x < y ? x : y)
INTS(imax, x < y ? y : x)
INTS(iand, x &y)
INTS(ior, x | y)
INTS(ixor, x ^ y)
INTS(inot, -1 - x)
INTS(ishl, x *(INT64_C(1) << modulo(y, 32)))
INTS(ishr, (int64_t)floor((double)x / (double)(INT64_C(1) << modulo(y, 32))))
INTS(ilt, x - y < 0)
INTS(ile, x - y <= 0)
INTS(ieq, x - y == 0)
INTS(ine, x - y != 0)
INTS(and, x *y)
INTS(or, x + y - x * y)
INTS(not, 1 - x)
INTS(beq, 1 - (x - y) * (x - y))
INTS(bne, (x - y) * (x - y))
INTS(bsel, x *y + (1 - x) * z)
INTS(isel, x *y + (1 - x) * z)
INTS(b2i, x)
TRUTHS(flt, x - y < 0 || (x == -INFINITY && y > x) || (y == INFINITY && x < y))
TRUTHS(fle, x < y || x == y)
TRUTHS(feq, !(x < y) && !(y < x) && !isnan(x) && !isnan(y))
TRUTHS(fne, x < y || y < x || isnan(x) || isnan(y))
FLOATS(fadd, x + y)
FLOATS(fsub, x - y)
FLOATS(fmul, x *y)
FLOATS(fdiv, y == 0 ? 0 : x / y)
FLOATS(fneg, copysign(x, signbit(x) ? 1.0 : -1.0))
FLOATS(fabs, copysign(x, 1.0))
FLOATS(fmin, x < y ? x : y)
FLOATS(fmax, x > y ? x : y)
FLOATS(ffloor, floor(x))
FLOATS(fceil, ceil(x))
FLOATS(fround, round(x))
FLOATS(ftrunc, trunc(x))
FLOATS(fsqrt, sqrt(x))
FLOATS(frsqrt, 1.0 / sqrt(x))
FLOATS(fexp, exp(x))
FLOATS(fexp2, exp2(x))
FLOATS(flog, log(x))
FLOATS(flog2, log2(x))
FLOATS(fsin, sin(x))
FLOATS(fcos, cos(x))
FLOATS(ftan, tan(x))
FLOATS(ftanh, tanh(x))
FLOATS(fsigmoid, 1.0 / (1.0 + exp(-x)))
FLOATS(ferf, erf(x))
FLOATS(fpow, pow(x, y))
FLOATS(fdetach, x)

static eval_cell want_fsel(eval_cell a, eval_cell b, eval_cell c)
{
    return a.i ? b : c;
}

static eval_cell want_i2f(eval_cell a, eval_cell b, eval_cell c)
{
    (void)b, (void)c;
    return (eval_cell){.f = (float)(double)a.i};
}

static eval_cell want_f2i(eval_cell a, eval_cell b, eval_cell c)
{
    (void)b, (void)c;
    return (eval_cell){.i = to_int((double)a.f)};
}

static eval_cell (*const wants[MOD_OP_COUNT])(eval_cell, eval_cell, eval_cell) = {
#define OP(name, ...) [OP_##name] = want_##name,
#include "mod/ops.def"
#undef OP
};

/* ---- operands ---- */

enum { N_EXTREMES = 28 };

static const int32_t ints[N_EXTREMES] = {INT32_MIN,
                                         INT32_MIN + 1,
                                         -65536,
                                         -33,
                                         -32,
                                         -31,
                                         -8,
                                         -7,
                                         -3,
                                         -2,
                                         -1,
                                         0,
                                         1,
                                         2,
                                         3,
                                         5,
                                         7,
                                         8,
                                         31,
                                         32,
                                         33,
                                         65535,
                                         16777216,
                                         16777217,
                                         1 << 30,
                                         (1 << 30) + 1,
                                         INT32_MAX - 1,
                                         INT32_MAX};
static const float floats[N_EXTREMES] = {0.0f,
                                         -0.0f,
                                         1.0f,
                                         -1.0f,
                                         0.5f,
                                         -0.5f,
                                         1.5f,
                                         2.5f,
                                         -2.5f,
                                         0.49999997f,
                                         INFINITY,
                                         -INFINITY,
                                         NAN,
                                         0x1p-149f,
                                         -0x1p-126f,
                                         0x1.fffffep127f,
                                         -0x1.fffffep127f,
                                         2147483520.0f,
                                         0x1p31f,
                                         -0x1p31f,
                                         8388607.5f,
                                         8388608.0f,
                                         3.1415927f,
                                         -100.25f,
                                         88.75f,
                                         1e30f,
                                         16777217.0f,
                                         0.1f};

static eval_cell extreme(char type, int i)
{
    if (type == 'F')
        return (eval_cell){.f = floats[i]};
    return (eval_cell){.i = type == 'B' ? i & 1 : ints[i]};
}

static int is_curve(mod_op op)
{
    return op >= OP_frsqrt;
}

/* Curves are exact to a few ulp (t_eval_arith states them), all else to the bit. */
static int agrees(mod_op op, eval_cell got, eval_cell want)
{
    const int is_float = mod_op_infos[op].signature[0] == 'F';
    if (random_same(is_float ? MOD_FLOAT : MOD_INT, got, want))
        return 1;
    return is_curve(op)
           && fabs((double)got.f - want.f) <= 6e-7 * fabs((double)want.f) + 0x1p-148;
}

static void fail_op(mod_op op, const eval_cell x[3], eval_cell got, eval_cell want)
{
    fail_msg("%s(%08x, %08x, %08x): got %08x (%g), expected %08x (%g)", mod_op_infos[op].name,
             (unsigned)x[0].i, (unsigned)x[1].i, (unsigned)x[2].i, (unsigned)got.i,
             (double)got.f, (unsigned)want.i, (double)want.f);
}

static const char *operand_types(mod_op op)
{
    return mod_op_infos[op].signature + 2;
}

/* All combinations, counted by one number; an operand that isn't there does not count. */
static int combinations(mod_op op)
{
    int n = 1;
    for (size_t k = 0; k < strlen(operand_types(op)); k++)
        n *= N_EXTREMES;
    return n;
}

static void combine(mod_op op, int which, eval_cell x[3])
{
    const char *types = operand_types(op);
    for (size_t k = 0; k < 3; k++) {
        x[k] = k < strlen(types) ? extreme(types[k], which % N_EXTREMES) : (eval_cell){0};
        which /= N_EXTREMES;
    }
}

/* ---- one value ---- */

static void test_values(void **unused)
{
    (void)unused;
    for (mod_op op = OP_LOAD + 1; op < MOD_OP_COUNT; op++)
        for (int i = 0; i < combinations(op); i++) {
            eval_cell x[3];
            combine(op, i, x);
            const eval_cell got = eval_apply(op, x[0], x[1], x[2]);
            const eval_cell want = wants[op](x[0], x[1], x[2]);
            if (!agrees(op, got, want))
                fail_op(op, x, got, want);
        }
}

static double widened(char type, eval_cell x)
{
    return type == 'F' ? (double)x.f : (double)x.i;
}

/* Downstream of the score: the same, once rounded. */
static void test_wide_values(void **unused)
{
    (void)unused;
    for (mod_op op = OP_LOAD + 1; op < MOD_OP_COUNT; op++)
        for (int i = 0; i < combinations(op); i++) {
            const char *types = operand_types(op);
            eval_cell x[3], got;
            combine(op, i, x);
            const size_t n = strlen(types);
            const double value = eval_apply_wide(op, widened(types[0], x[0]),
                                                 n > 1 ? widened(types[1], x[1]) : 0.0,
                                                 n > 2 ? widened(types[2], x[2]) : 0.0);
            if (mod_op_infos[op].signature[0] == 'F')
                got.f = (float)value;
            else
                got.i = (int32_t)value;
            if (!agrees(op, got, wants[op](x[0], x[1], x[2])))
                fail_op(op, x, got, wants[op](x[0], x[1], x[2]));
        }
}

/* ---- loops ---- */

/* One call on one group: operands named in `same` have one value, the others run. */
static void check_loop(const strip_table *table, mod_op op, int start, int same)
{
    eval_cell x[3][STRIP_GROUP], at[STRIP_GROUP][3], out[STRIP_GROUP];
    for (int i = 0; i < STRIP_GROUP; i++) {
        combine(op, (int)(((int64_t)start + i * 37) % combinations(op)), at[i]);
        for (int k = 0; k < 3; k++) {
            if (same >> k & 1)
                at[i][k] = at[0][k];
            x[k][i] = at[i][k];
        }
    }
    table->op[op](out, x[0], x[1], x[2], 1, same);
    for (int i = 0; i < STRIP_GROUP; i++) {
        const eval_cell got = out[i], want = eval_apply(op, at[i][0], at[i][1], at[i][2]);
        const int is_float = mod_op_infos[op].signature[0] == 'F';
        if (!random_same(is_float ? MOD_FLOAT : MOD_INT, got, want))
            fail_op(op, at[i], got, want);
    }
}

static void test_loops(void **unused)
{
    (void)unused;
    for (int t = 0; t < strip_levels(); t++)
        for (mod_op op = OP_LOAD + 1; op < MOD_OP_COUNT; op++) {
            const int arity = (int)strlen(operand_types(op));
            for (int same = 0; same < (1 << arity) - 1; same++)
                for (int start = 0; start < combinations(op); start += arity == 3 ? 97 : 7)
                    check_loop(strip_level[t], op, start, same);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_wide_values),
        cmocka_unit_test(test_loops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
