/* Any mask over small sizes: seven bytes choose lengths, block sizes, offsets (near 0 or near
   their bounds) and the form of captures, the rest is the text. Every block of the mask is
   compared with all its positions under the oracle: absent blocks hold nothing live, FULL ones
   nothing dead, PARTIAL ones both. Captures of impossible shapes are refused. */
#include "eval/eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 48, HEADER = 7, HEADS = 2 };

typedef struct problem {
    saccade_sizes sizes;
    int32_t block_q, block_kv, q_offset, kv_offset;
    int form; /* of captures */
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

/* A capture as the form has it: as it is, its first dimension repeated without end, or all
 * reversed; or with more elements than there can be, which must be refused. */
enum { AS_IT_IS, REPEATED, REVERSED, TOO_LONG, TOO_WIDE, FORMS };

static saccade_tensor shaped(saccade_tensor t, int form)
{
    if (t.rank == 0 || form == AS_IT_IS)
        return t;
    if (form == REPEATED) {
        t.shape[0] = INT32_MAX;
        t.stride[0] = 0;
    }
    for (int32_t d = 0; form == REVERSED && d < t.rank; d++) {
        t.data = (int32_t *)t.data + (t.shape[d] - 1) * t.stride[d];
        t.stride[d] = -t.stride[d];
    }
    if (form == TOO_LONG)
        t.shape[t.rank - 1] = INT64_MAX;
    if (form == TOO_WIDE)
        t.stride[0] = INT64_MAX / 2;
    return t;
}

static int is_impossible(const problem *p)
{
    for (int32_t i = 0; i < p->n_bindings; i++)
        if (p->bindings[i].tensor.rank > 0 && p->form >= TOO_LONG)
            return 1;
    return 0;
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
        p->bindings[i].tensor = shaped(
            saccade_tensor_of(values + 13 * i, SACCADE_I32, captures[i].rank, shape), p->form);
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
            const eval_point at = {0, h, (int32_t)i + p->q_offset,
                                   (int32_t)j + p->kv_offset, 0};
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

/* An offset within 128 of 0, or of a bound. */
static int32_t near_base(int which, int by)
{
    static const int32_t bases[] = {0, 1 << 30, -(1 << 30), 1 << 29, -(1 << 29)};
    const int64_t at = (int64_t)bases[which % 16 % 5] + by - 128;
    return (int32_t)(at > 1 << 30 ? 1 << 30 : at < -(1 << 30) ? -(1 << 30) : at);
}

static problem problem_of(const unsigned char *bytes)
{
    problem p = {.sizes = {1, HEADS, 1, 1 + bytes[0] % MOST, 1 + bytes[1] % MOST, 8, 8}};
    p.block_q = 1 + bytes[2] % 20;
    p.block_kv = 1 + bytes[3] % 20;
    p.q_offset = near_base(bytes[5], bytes[4]);
    p.kv_offset = bytes[5] >> 4 ? near_base(bytes[5] >> 4, bytes[4]) : 0;
    p.form = bytes[6] % FORMS;
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
    const saccade_tensor q_offset = saccade_tensor_of(&p.q_offset, SACCADE_I32, 0, NULL);
    const saccade_tensor kv_offset = saccade_tensor_of(&p.kv_offset, SACCADE_I32, 0, NULL);
    const saccade_positions at = {
        .size = sizeof at, .q_offset = &q_offset, .kv_offset = &kv_offset};
    const saccade_block_mask_options options = {
        .size = sizeof options, .block_q = p.block_q, .block_kv = p.block_kv};
    saccade_block_mask *mask = NULL;
    saccade_error err = {0};
    const saccade_status status = saccade_block_mask_create(
        NULL, mod, &p.sizes, &at, p.bindings, p.n_bindings, &options, &mask, &err);
    if (status == SACCADE_OK && is_impossible(&p))
        fail("impossible capture taken", 0, 0);
    if (status == SACCADE_OK)
        check_mask(mask, mod, &p);
    else if (status == SACCADE_EINTERNAL || err.message[0] == '\0')
        fail(err.message, 0, 0);
    saccade_block_mask_destroy(mask);
    saccade_mod_destroy(mod);
    return 0;
}
