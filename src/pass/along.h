/* along.h: what of a mod depends on q - kv, beside b and h, and on nothing else: a bucket of
 * the distance, what is read there, a penalty. Back ends make such values once for each
 * diagonal of a tile. */
#ifndef SACCADE_PASS_ALONG_H
#define SACCADE_PASS_ALONG_H

#include "mod/mod.h"

/* By node of fn: 1 for those that are the same for all positions of a head with one q - kv;
 * what is the same for the whole head is among them. Sums of q and kv are, though they wrap;
 * has_compares: so are comparisons of q and kv, of true positions, which do not. NULL: out of
 * memory. */
unsigned char *pass_find_along(const mod_fn *fn, int has_compares, arena *scratch);
/* Whether n compares q and kv: q < kv, q == kv and the like. */
int pass_compares_places(const mod_fn *fn, const mod_node *n);

#endif
