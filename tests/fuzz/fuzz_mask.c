/* Any mask over small sizes: five bytes choose lengths, block sizes and offset, the rest is the
   text. Every block of the mask is compared with all its positions under the oracle: absent
   blocks hold nothing live, FULL ones nothing dead, PARTIAL ones both. */
#include "eval/eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 48, HEADER = 5, HEADS = 2 };

typedef struct problem {
    saccade_sizes sizes;
    int32_t block_q, block_kv, q_offset;
    saccade_binding bindings[MOD_MAX_CAPTURES];
    int32_t n_bindings;
    saccade_tensor tensors[MOD_MAX_CAPTURES];
} problem;

/* values of all captures: small, and not monotone */
static int32_t values[4096];

static void fail(const char *what, int64_t row, int64_t column)
{
    fprintf(stderr, "fuzz_mask: %s at block %lld, %lld\n", what, (long long)row,
            (long long)column);
    abort();
}

static saccade_mod *bind(const unsigned char *text, size_t size, problem *p)
{
    saccade_capture captures[MOD_MAX_CAPTURES];
    saccade_mod *mod = NULL, *bound = NULL;
    if (saccade_mod_parse(SACCADE_MASK, (const char *)text, size, &mod, NULL) != SACCADE_OK)
        return NULL;
    p->n_bindings = saccade_mod_capture_count(mod);
    for (int32_t i = 0; i < p->n_bindings; i++) {
        static const int64_t shape[SACCADE_MAX_RANK] = {7, 5, 3, 2, 2, 2, 1, 1};
        captures[i] = saccade_mod_capture(mod, i);
        captures[i].dtype = SACCADE_I32;
        p->bindings[i].tensor =
            saccade_tensor_of(values + 13 * i, SACCADE_I32, captures[i].rank, shape);
    }
    if (saccade_mod_bind(mod, captures, p->n_bindings, &bound, NULL) == SACCADE_OK)
        for (int32_t i = 0; i < p->n_bindings; i++)
            p->bindings[i].name = saccade_mod_capture(bound, i).name;
    saccade_mod_destroy(mod);
    return bound;
}

/* live positions of one block, by the oracle. */
static int64_t count_live(const mod_fn *fn, const eval_env *env, const problem *p, int32_t h,
                          int64_t row, int64_t column, int64_t *total, double *scratch)
{
    int64_t live = 0;
    *total = 0;
    for (int64_t i = row * p->block_q; i < p->sizes.Q && i < (row + 1) * p->block_q; i++)
        for (int64_t j = column * p->block_kv;
             j < p->sizes.KV && j < (column + 1) * p->block_kv; j++) {
            const eval_point at = {0, h, (int32_t)i + p->q_offset, (int32_t)j, 0};
            live += eval_scalar(fn, env, &at, scratch, NULL) != 0;
            *total += 1;
        }
    return live;
}

/* what the mask says of a block: 0 absent, 1 PARTIAL, 2 FULL */
static int state_of(const saccade_block_mask *mask, int32_t h, int64_t row, int64_t column)
{
    const saccade_run *runs = NULL;
    const int64_t n = saccade_block_mask_row(mask, 0, h, row, 0, &runs);
    for (int64_t i = 0; i < n; i++)
        if (column >= runs[i].first && column < runs[i].first + runs[i].count)
            return runs[i].full ? 2 : 1;
    return 0;
}

static void check_block(const saccade_block_mask *mask, const mod_fn *fn, const eval_env *env,
                        const problem *p, int32_t h, int64_t row, int64_t column,
                        double *scratch)
{
    int64_t total;
    const int64_t live = count_live(fn, env, p, h, row, column, &total, scratch);
    const int want = live == 0 ? 0 : live == total ? 2 : 1;
    if (state_of(mask, h, row, column) != want)
        fail(want == 0 ? "expected absent" : want == 1 ? "expected PARTIAL" : "expected FULL",
             row, column);
}

static void check_mask(const saccade_block_mask *mask, const saccade_mod *mod, problem *p)
{
    const mod_fn *fn = mod_function(mod);
    eval_env env = {.tensors = p->tensors};
    eval_sizes(&p->sizes, env.size);
    if (eval_resolve(fn, p->bindings, p->n_bindings, 1, p->tensors, NULL) != SACCADE_OK)
        fail("resolving again", 0, 0);
    double *scratch = malloc(fn->n_nodes * sizeof *scratch);
    for (int32_t h = 0; scratch != NULL && h < HEADS; h++)
        for (int64_t i = 0; i * p->block_q < p->sizes.Q; i++)
            for (int64_t j = 0; j * p->block_kv < p->sizes.KV; j++)
                check_block(mask, fn, &env, p, h, i, j, scratch);
    free(scratch);
}

static problem problem_of(const unsigned char *bytes)
{
    problem p = {.sizes = {1, HEADS, 1, 1 + bytes[0] % MOST, 1 + bytes[1] % MOST, 8, 8}};
    p.block_q = 1 + bytes[2] % 20;
    p.block_kv = 1 + bytes[3] % 20;
    p.q_offset = (int32_t)bytes[4] - 128;
    return p;
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size)
{
    if (size <= HEADER)
        return 0;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        values[i] = (int32_t)(i * i % 23) - 3;
    problem p = problem_of(bytes);
    saccade_mod *mod = bind(bytes + HEADER, size - HEADER, &p);
    if (mod == NULL)
        return 0;
    const saccade_positions at = {
        .q_offset = saccade_tensor_of(&p.q_offset, SACCADE_I32, 0, NULL)};
    const saccade_block_mask_options options = {
        .block_q = p.block_q, .block_kv = p.block_kv};
    saccade_block_mask *mask = NULL;
    saccade_error err = {0};
    const saccade_status status = saccade_block_mask_create(
        NULL, mod, &p.sizes, &at, p.bindings, p.n_bindings, &options, &mask, &err);
    if (status == SACCADE_OK)
        check_mask(mask, mod, &p);
    else if (status == SACCADE_EINTERNAL || err.message[0] == '\0')
        fail(err.message, 0, 0);
    saccade_block_mask_destroy(mask);
    saccade_mod_destroy(mod);
    return 0;
}
