/* Random well-typed masks and scores with captured tensors and values for them, for every test
 * that compares engines. The same seed gives the same mod; print it when a test fails. */
#ifndef SACCADE_TESTS_RANDOM_MOD_H
#define SACCADE_TESTS_RANDOM_MOD_H

#include "saccade.h"

enum { RANDOM_MOD_CAPTURES = 9, RANDOM_MOD_TEXT = 16384 };

enum {
    RANDOM_MOD_TAME = 1,    /* scores: finite, well conditioned, comparable with a tolerance */
    RANDOM_MOD_IN_RANGE = 2 /* no index outside of its tensor */
};

typedef struct random_mod {
    saccade_mod *mod;                              /* bound */
    saccade_binding bindings[RANDOM_MOD_CAPTURES]; /* those that the text uses */
    int32_t n_bindings;
    char text[RANDOM_MOD_TEXT];
    void *memory[RANDOM_MOD_CAPTURES];
} random_mod;

/* splitmix64: uniform 64 bits, and a number below n. */
uint64_t random_mod_bits(uint64_t *state);
uint32_t random_mod_below(uint64_t *state, uint32_t n);

/* Text alone: well-typed when its captures get the dtypes of random_mod_make. Returns its
 * length; `size` of a few KiB is enough, what is longer comes out cut (and ill-formed). */
size_t random_mod_text(uint64_t seed, saccade_kind kind, int flags, int depth, char *text,
                       size_t size);
/* dtype of the capture of this name in such texts. */
saccade_dtype random_mod_dtype(const char *name);
/* Text, values for its captures at these sizes, and the bound mod. Ends the process with a
 * message if the text does not compile. */
void random_mod_make(uint64_t seed, saccade_kind kind, int flags, int depth,
                     const saccade_sizes *sizes, random_mod *out);
void random_mod_free(random_mod *r);

#endif
