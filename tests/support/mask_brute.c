/* Block masks against brute force. */
#include "support/mask_brute.h"

#include "eval/eval.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

saccade_mod *brute_mod(const char *text, const saccade_binding *bindings, int32_t n_bindings)
{
    saccade_error err = {0};
    saccade_mod *generic, *bound;
    saccade_capture captures[MOD_MAX_CAPTURES];
    if (saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err))
        fail_msg("%s: %s", text, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        for (int32_t j = 0; j < n_bindings; j++)
            if (strcmp(bindings[j].name, captures[i].name) == 0)
                captures[i].dtype = bindings[j].tensor.dtype;
    }
    if (saccade_mod_bind(generic, captures, n, &bound, &err))
        fail_msg("%s: %s %s", text, err.where, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static int32_t offset_of(const saccade_tensor *t, int64_t b)
{
    if (!t)
        return 0;
    return ((const int32_t *)t->data)[t->rank ? b * t->stride[0] : 0];
}

uint8_t *brute_dense(const saccade_mod *mod, const saccade_sizes *s,
                     const saccade_positions *positions, const saccade_binding *bindings,
                     int32_t n_bindings)
{
    const saccade_positions none = {.size = sizeof none}, *at = positions ? positions : &none;
    const mod_fn *fn = mod_function(mod);
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    saccade_error err = {0};
    eval_env env = {.tensors = tensors};
    if (eval_resolve(fn, bindings, n_bindings, 1, tensors, &err))
        fail_msg("%s: %s", err.where, err.message);
    eval_sizes(s, env.size);
    double *values = malloc(fn->n_nodes * sizeof *values);
    uint8_t *live = malloc((size_t)(s->B * s->H * s->Q * s->KV)), *to = live;
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t h = 0; h < s->H; h++)
            for (int64_t q = 0; q < s->Q; q++)
                for (int64_t kv = 0; kv < s->KV; kv++) {
                    const eval_point point = {(int32_t)b, (int32_t)h,
                                              (int32_t)q + offset_of(at->q_offset, b),
                                              (int32_t)kv + offset_of(at->kv_offset, b), 0};
                    *to++ = eval_scalar(fn, &env, &point, values, NULL) != 0;
                }
    free(values);
    return live;
}

/* 0 empty, 1 partial, 2 full */
static int block_kind(const uint8_t *live, const saccade_sizes *s, int64_t q0, int64_t bq,
                      int64_t k0, int64_t bk)
{
    int64_t n = 0, sum = 0;
    for (int64_t q = q0; q < q0 + bq && q < s->Q; q++)
        for (int64_t kv = k0; kv < k0 + bk && kv < s->KV; kv++, n++)
            sum += live[q * s->KV + kv];
    return sum == 0 ? 0 : sum == n ? 2 : 1;
}

/* Kinds of a row from its runs, which must be sorted, merged and inside. */
static void read_row(const saccade_block_mask *mask, int64_t b, int64_t h, int64_t row,
                     int transposed, int64_t columns, uint8_t *kinds, const char *name)
{
    const saccade_run *runs;
    const int64_t n = saccade_block_mask_row(mask, b, h, row, transposed, &runs);
    memset(kinds, 0, (size_t)columns);
    assert_true(n >= 0);
    for (int64_t i = 0; i < n; i++) {
        if (runs[i].count < 1 || runs[i].first < 0
            || runs[i].first + (int64_t)runs[i].count > columns)
            fail_msg("%s: row %lld: run %d+%d of %lld", name, (long long)row, runs[i].first,
                     runs[i].count, (long long)columns);
        if (i
            && runs[i].first
                   < runs[i - 1].first + runs[i - 1].count + (runs[i].full == runs[i - 1].full))
            fail_msg("%s: row %lld: runs overlap or are not merged", name, (long long)row);
        memset(kinds + runs[i].first, runs[i].full ? 2 : 1, (size_t)runs[i].count);
    }
}

static void compare_head(const saccade_block_mask *mask, const saccade_sizes *s, int32_t bq,
                         int32_t bk, const uint8_t *live, int64_t b, int64_t h,
                         int64_t found[3], const char *name)
{
    const int64_t rows = (s->Q + bq - 1) / bq, columns = (s->KV + bk - 1) / bk;
    uint8_t *kinds = malloc((size_t)(rows > columns ? rows : columns));
    for (int transposed = 0; transposed < 2; transposed++)
        for (int64_t i = 0; i < (transposed ? columns : rows); i++) {
            read_row(mask, b, h, i, transposed, transposed ? rows : columns, kinds, name);
            for (int64_t j = 0; j < (transposed ? rows : columns); j++) {
                const int64_t row = transposed ? j : i, column = transposed ? i : j;
                const int want = block_kind(live, s, row * bq, bq, column * bk, bk);
                found[want] += !transposed;
                if (want != kinds[j])
                    fail_msg(
                        "%s: b %lld h %lld block %lld,%lld of %dx%d%s: got %d, expected %d",
                        name, (long long)b, (long long)h, (long long)row, (long long)column, bq,
                        bk, transposed ? " transposed" : "", kinds[j], want);
            }
        }
    free(kinds);
}

void brute_compare(const saccade_block_mask *mask, const saccade_sizes *s, int32_t block_q,
                   int32_t block_kv, const uint8_t *live, const char *name)
{
    saccade_block_mask_stats stats;
    saccade_block_mask_stats_init(&stats);
    assert_int_equal(saccade_block_mask_get_stats(mask, &stats, NULL), SACCADE_OK);
    int64_t found[3] = {0};
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t h = 0; h < s->H; h++)
            compare_head(mask, s, block_q, block_kv, live + (b * s->H + h) * s->Q * s->KV, b, h,
                         found, name);
    /* stored once or per batch and head: the sums differ by a whole factor */
    const int64_t all = found[0] + found[1] + found[2];
    assert_true(stats.blocks > 0 && all % stats.blocks == 0);
    const int64_t times = all / stats.blocks;
    assert_int_equal(stats.proven + stats.evaluated + stats.unknown, stats.blocks);
    assert_int_equal(stats.full * times, found[2]);
    assert_int_equal(stats.partial * times, found[1]);
}
