/* eval_ops.h: shared by the files of eval/ and by pass/: one operation on one value. */
#ifndef SACCADE_EVAL_OPS_H
#define SACCADE_EVAL_OPS_H

#include "mod/mod.h"

/* A bool (0 or 1), int or float; which one is known from the operation. */
typedef union eval_cell {
    int32_t i;
    float f;
} eval_cell;

/* The result of an operation with operands (not of a leaf) in int32 and f32. Operands that the
 * operation does not have are ignored. */
eval_cell eval_apply(mod_op op, eval_cell x, eval_cell y, eval_cell z);

/* eval_apply for what depends on the score: floats are double, mathematics is libm's. */
double eval_apply_wide(mod_op op, double x, double y, double z);

/* One element, as captures are read: integers keep their low 32 bits, f64 is rounded. */
eval_cell eval_read(saccade_dtype dtype, const void *data, int64_t offset);
/* eval_read in double: f64 as it is. */
double eval_read_wide(saccade_dtype dtype, const void *data, int64_t offset);

/* Index clamped into [0, size); size >= 1. */
static inline int64_t eval_clamp(int32_t index, int64_t size)
{
    return index < 0 ? 0 : index < size ? index : size - 1;
}

/* Reading ops.def: operands of `signature` are floats, or bools and ints, or (fsel) a bool and
 * floats; the condition is a constant, only one block is compiled in. The bit operations have
 * no float reading: FLOAT_VALUE gives 0 there, by the comma hidden in EVAL_BITS_<name>. */
#define EVAL_IS_FLOAT(signature) ((signature)[2] == 'F')
#define EVAL_IS_SELECT(signature) ((signature)[0] == 'F' && (signature)[2] == 'B')
#define EVAL_ARITY(signature) ((int)sizeof(signature) - 3)
#define EVAL_BITS_iand ~, 0
#define EVAL_BITS_ior ~, 0
#define EVAL_BITS_ixor ~, 0
#define EVAL_BITS_inot ~, 0
#define EVAL_SECOND(x, y, ...) y
#define EVAL_PICK(...) EVAL_SECOND(__VA_ARGS__)
#define EVAL_FLOAT_VALUE(name, value) EVAL_PICK(EVAL_BITS_##name, (value), )

#endif
