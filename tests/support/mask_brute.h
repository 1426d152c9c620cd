/* Block masks against brute force: every position asked of the scalar oracle. */
#ifndef SACCADE_TESTS_MASK_BRUTE_H
#define SACCADE_TESTS_MASK_BRUTE_H

#include "saccade.h"

#include <stdint.h>

/* Parses and binds a mask; captures get the dtypes of the bindings of their name. Fails the
 * test when the text is wrong. */
saccade_mod *brute_mod(const char *text, const saccade_binding *bindings, int32_t n_bindings);

/* live [B][H][Q][KV] bytes of a bound mask; caller frees. */
uint8_t *brute_dense(const saccade_mod *mod, const saccade_sizes *sizes,
                     const saccade_positions *positions, const saccade_binding *bindings,
                     int32_t n_bindings);

/* Fails the test unless rows, transposed rows and sums of the mask are exactly what `live`
 * gives for its block size. `name` is printed. */
void brute_compare(const saccade_block_mask *mask, const saccade_sizes *sizes, int32_t block_q,
                   int32_t block_kv, const uint8_t *live, const char *name);

#endif
