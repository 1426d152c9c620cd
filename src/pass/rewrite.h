/* rewrite.h: between the passes: emitting nodes already simplified. */
#ifndef SACCADE_PASS_REWRITE_H
#define SACCADE_PASS_REWRITE_H

#include "eval/eval_ops.h"
#include "mod/mod.h"

#include <stdbool.h>

/* A node with the value that op has on these operands (of its arity; the others are ignored),
 * for all inputs: a constant, one of the operands, or something no longer. */
uint32_t rewrite_emit(mod_builder *b, mod_op op, uint32_t x, uint32_t y, uint32_t z);
uint32_t rewrite_emit1(mod_builder *b, mod_op op, uint32_t x);
uint32_t rewrite_emit2(mod_builder *b, mod_op op, uint32_t x, uint32_t y);

/* Copies node i of fn, its operands already copied (new_of), simplified. */
uint32_t rewrite_copy(mod_builder *b, const mod_fn *fn, uint32_t i, const uint32_t *new_of);

#endif
