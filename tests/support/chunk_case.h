/* Keys in chunks: tables in a random order and the pools of rows that they name. */
#ifndef SACCADE_TESTS_CHUNK_CASE_H
#define SACCADE_TESTS_CHUNK_CASE_H

#include "support/forward_case.h"

enum { CHUNK_MOST = 2048 }; /* entries of a table */

typedef struct chunk_case {
    const char *problem, *mask, *score;
    int32_t size;
    int64_t dead; /* keys before this one are live in no row: their chunks are absent */
} chunk_case;

/* A random order of chunks with holes between them; rows: of the pools that it names. */
void chunk_table(const chunk_case *c, const saccade_sizes *sizes, int32_t *table,
                 plan_chunks *out, int64_t *rows);

/* The rows of `from` [B, Hkv, KV, dim] in a pool of `rows` rows by the table, stride 0 over
 * batches, with NaN in every row that no chunk names; its data is the caller's to free. */
saccade_tensor chunk_pool(const saccade_tensor *from, const plan_chunks *c, int64_t rows);

/* A plan by the first of these solvers that applies, whose runs bring a table. */
saccade_plan *chunk_plan(const saccade_problem *problem, const plan_solver *const *solvers);

#endif
