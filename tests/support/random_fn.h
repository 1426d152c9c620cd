/* Random typed mods over captures of every dtype, with the tensors they read: food for
 * everything that evaluates, changes or compiles nodes. */
#ifndef SACCADE_TESTS_RANDOM_FN_H
#define SACCADE_TESTS_RANDOM_FN_H

#include "eval/eval.h"
#include "eval/eval_ops.h"

#include <stdbool.h>

typedef struct random_source {
    uint64_t state;
} random_source;

uint64_t random_bits(random_source *r);
int32_t random_below(random_source *r, int32_t n);
/* From small to extreme; NaN and infinities among the floats. */
int32_t random_int(random_source *r);
float random_float(random_source *r);

enum { RANDOM_CAPTURES = 18, RANDOM_KV = 700, RANDOM_Q = 40 };

/* The captures and their values. Tensors have odd strides (padded, broadcast, reversed), and
 * each ends where its allocation does, so that sanitizers see a read outside of it. */
typedef struct random_env {
    eval_env env;
    mod_capture captures[RANDOM_CAPTURES];
    saccade_tensor tensors[RANDOM_CAPTURES];
    void *memory[RANDOM_CAPTURES];
} random_env;

void random_env_make(random_env *e, random_source *r);
void random_env_free(random_env *e);

typedef struct random_shape {
    saccade_kind kind;
    int n_ops;
    bool no_score;   /* a score mod that doesn't read the score */
    bool no_loads;
    bool is_smooth;  /* only operations with derivatives, arguments kept in their domains */
} random_shape;

/* A random mod over e's captures, in the arena. Fails the test when out of memory. */
const mod_fn *random_fn(arena *arena, random_source *r, const random_env *e,
                        const random_shape *shape);

/* All nodes of fn at a point, in int32 and f32 throughout, the score too: the plainest way. */
eval_cell random_fn_value(const mod_fn *fn, const eval_env *env, const int32_t position[4],
                          float score, eval_cell *cells);

/* Equal bits, or both NaN floats. */
bool random_same(mod_type type, eval_cell x, eval_cell y);

#endif
