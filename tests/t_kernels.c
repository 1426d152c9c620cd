/* Every entry of every kernel table against plain double sums, with guards around what it may
 * write and NaN around what it may read, and the exponential against libm. The packed layouts
 * are those of docs/cpu.md, read here independently. */
#include "cpu/cpu.h"
#include "cpu/kv/prefetch.h"
#include "saccade_config.h"

#include "base/convert.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_ROWS = 64, MOST_D = 160 };

typedef struct entry {
    const cpu_kernels *kernels;
    int32_t level;
    int needs_bf16;
    int is_decode; /* tiles: their packed kernels write whole strips (t_amx.c has those) */
} entry;

static const entry entries[] = {
    {&cpu_f32_portable, CPU_PORTABLE, 0, 0},
    {&cpu_bf16_tiles_portable, CPU_PORTABLE, 0, 1},
    {&cpu_f16_tiles_portable, CPU_PORTABLE, 0, 1},
#if HAVE_LEVEL_AVX2
    {&cpu_f32_avx2, CPU_AVX2, 0, 0},
    {&cpu_bf16_tiles_avx2, CPU_AVX2, 0, 1},
    {&cpu_f16_tiles_avx2, CPU_AVX2, 0, 1},
#endif
#if HAVE_LEVEL_AVX512
    {&cpu_f32_avx512, CPU_AVX512, 0, 0},
    {&cpu_bf16_tiles_avx512, CPU_AVX512, 0, 1},
    {&cpu_f16_tiles_avx512, CPU_AVX512, 0, 1},
#endif
#if HAVE_LEVEL_AMX
    {&cpu_bf16_dot, CPU_AVX512, 1, 0},
    {&cpu_bf16_tiles_amx, CPU_AMX, 1, 1},
    {&cpu_f16_tiles_amx, CPU_AMX, 1, 1},
#endif
};

typedef void (*kernel_test)(const cpu_kernels *kernels);

static void for_each_entry(kernel_test test, int is_decode)
{
    cpu_level most = CPU_PORTABLE;
    assert_int_equal(cpu_level_allowed(&most, NULL), SACCADE_OK);
    for (size_t n = 0; n < sizeof entries / sizeof entries[0]; n++)
        if (entries[n].level <= (int32_t)most && entries[n].is_decode <= is_decode
            && (!entries[n].needs_bf16 || cpu_features_get()->has_avx512_bf16))
            test(entries[n].kernels);
}

static void for_each_table(kernel_test test)
{
    for_each_entry(test, 0);
}

static void for_each_decode(kernel_test test)
{
    for_each_entry(test, 1);
}

static uint64_t seed = 42;

static float noise(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(int32_t)(seed >> 33) / 0x1p30 - 1);
}

/* Elements that the dtype holds exactly, so that only sums round. */
static float rounded(saccade_dtype dtype, float x)
{
    uint16_t h;
    if (dtype == SACCADE_F32)
        return x;
    convert_from_f32(dtype, &x, &h, 1);
    convert_to_f32(dtype, &h, &x, 1);
    return x;
}

/* Rows of noise with 3 elements of NaN between them. */
typedef struct source {
    cpu_rows rows;
    float *value; /* [n][dim] */
    void *memory;
} source;

static source source_make(saccade_dtype dtype, int32_t n, int32_t dim)
{
    const size_t each = saccade_dtype_bytes(dtype), pitch = ((size_t)dim + 3) * each;
    source s = {.memory = malloc((size_t)n * pitch),
                .value = malloc((size_t)n * (size_t)dim * sizeof(float))};
    assert_true(s.memory && s.value);
    memset(s.memory, 0xff, (size_t)n * pitch);
    for (int32_t i = 0; i < n; i++)
        for (int32_t d = 0; d < dim; d++) {
            float *x = &s.value[i * dim + d];
            *x = rounded(dtype, noise());
            convert_from_f32(dtype, x, (char *)s.memory + (size_t)i * pitch + (size_t)d * each,
                             1);
        }
    s.rows = (cpu_rows){s.memory, (int64_t)pitch, dtype, dim};
    return s;
}

static void source_free(source *s)
{
    free(s->memory);
    free(s->value);
}

/* The same rows as groups that lie apart, each in memory of its own without a byte more. */
typedef struct groups {
    cpu_keys keys;
    char *at[KV_GROUPS];
    const char *ahead[KV_GROUPS];
} groups;

static void groups_make(const source *s, int32_t n, groups *to)
{
    const cpu_rows *rows = &s->rows;
    const size_t last = (size_t)rows->dim * saccade_dtype_bytes(rows->dtype);
    *to = (groups){.keys = {*rows, (const char *const *)to->at}};
    to->keys.rows.base = NULL;
    for (int32_t j = 0; j < n; j += KV_GROUP) {
        const size_t m = (size_t)(n - j < KV_GROUP ? n - j : KV_GROUP);
        const size_t bytes = (m - 1) * (size_t)rows->stride + last;
        char *copy = malloc(bytes);
        assert_non_null(copy);
        to->at[j / KV_GROUP] = memcpy(copy, rows->base + j * rows->stride, bytes);
        to->ahead[j / KV_GROUP] = copy;
    }
}

static void groups_free(groups *g)
{
    for (int t = 0; t < KV_GROUPS; t++)
        free(g->at[t]);
}

static saccade_dtype dtype_of(const cpu_kernels *k, int which)
{
    static const saccade_dtype all[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    return k->element == 2 ? SACCADE_BF16 : k->is_split ? SACCADE_F16 : all[which % 3];
}

static void *zeroed(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    assert_non_null(p);
    memset(p, 0, bytes);
    return p;
}

static void near(const char *what, const cpu_kernels *k, double x, double gold, double most)
{
    if (!(fabs(x - gold) <= most))
        fail_msg("%s, %s: got %.9g, expected %.9g within %.3g", k->name, what, x, gold, most);
}

/* What `terms` products may be off that come to `mass` without their signs. Where f16 goes as
 * two bf16 the product of both low parts, each at most 2^-8 of its number, is left out. */
static double allowed(const cpu_kernels *k, int32_t terms, double mass)
{
    return 1e-6 * (terms + 4) + (k->is_split ? 0x1p-16 * mass : 0);
}

/* ---- scores: packed, and straight from the rows ---- */

static void check_scores(const cpu_kernels *k, const source *q, const source *keys,
                         int32_t rows, int32_t n, const float *s, const char *what)
{
    const int32_t D = q->rows.dim, ld = CPU_BLOCK_KEYS;
    for (int32_t i = 0; i < rows; i++)
        for (int32_t j = 0; j < n; j++) {
            double sum = 0, mass = 0;
            for (int32_t d = 0; d < D; d++) {
                const double term = 0.5 * q->value[i * D + d] * keys->value[j * D + d];
                sum += term;
                mass += fabs(term);
            }
            near(what, k, s[i * ld + j], sum, allowed(k, D, mass));
        }
}

static void scores_of(const cpu_kernels *k, int which, int32_t rows, int32_t n, int32_t D)
{
    const int32_t q_ld = (D + 31) / 32 * 32, ld = CPU_BLOCK_KEYS;
    const int32_t padded = (n + k->panel - 1) / k->panel * k->panel;
    source q = source_make(dtype_of(k, which), rows, D);
    source keys = source_make(dtype_of(k, which), n, D);
    void *packed_q = zeroed((size_t)(rows * q_ld) * 4);
    void *packed_k = zeroed((size_t)padded * (size_t)(D + 1) * 4);
    float *s = zeroed((size_t)(MOST_ROWS * ld) * sizeof *s);
    k->pack_rows(&q.rows, rows, rows, q_ld, packed_q);
    k->pack_keys(&keys.rows, n, padded, packed_k);
    k->scores(packed_q, q_ld, packed_k, D, rows, n, 0.5f, s, ld);
    check_scores(k, &q, &keys, rows, n, s, "scores");
    for (int32_t at = rows * ld; at < MOST_ROWS * ld; at++)
        assert_true(s[at] == 0);
    free(packed_q);
    free(packed_k);
    free(s);
    source_free(&q);
    source_free(&keys);
}

static void qk_of(const cpu_kernels *k, int which, int32_t rows, int32_t n, int32_t D)
{
    const int32_t q_ld = (D + 31) / 32 * 32, ld = CPU_BLOCK_KEYS;
    source q = source_make(dtype_of(k, which), rows, D);
    source keys = source_make(dtype_of(k, which), n, D);
    void *packed = zeroed((size_t)(rows * q_ld) * 4);
    void *turned = zeroed((size_t)((rows + 31) / 32 * 32 * q_ld) * 4);
    float *s = zeroed((size_t)(MOST_ROWS * ld) * sizeof *s);
    cpu_prefetch next = prefetch_begin(&keys.rows, k->prefetch_parts, n);
    k->pack_rows(&q.rows, rows, rows, q_ld, packed);
    if (k->pack_decode)
        k->pack_decode(packed, q_ld, rows, D, turned);
    k->decode_qk(k->pack_decode ? turned : packed, q_ld, &(cpu_keys){keys.rows, NULL}, n, rows,
                 0.5f, s, ld, &next);
    assert_int_equal(next.rows, 0);
    check_scores(k, &q, &keys, rows, n, s, "dots");
    for (int32_t at = rows * ld; at < MOST_ROWS * ld; at++)
        assert_true(s[at] == 0);
    groups apart;
    float *same = zeroed((size_t)(MOST_ROWS * ld) * sizeof *s);
    groups_make(&keys, n, &apart);
    next = prefetch_groups(&keys.rows, apart.ahead, k->prefetch_parts,
                           (n + KV_GROUP - 1) / KV_GROUP);
    k->decode_qk(k->pack_decode ? turned : packed, q_ld, &apart.keys, n, rows, 0.5f, same, ld,
                 &next);
    assert_int_equal(prefetch_left(&next), 0);
    for (int32_t i = 0; i < rows; i++)
        assert_memory_equal(same + i * ld, s + i * ld, (size_t)n * sizeof *s);
    groups_free(&apart);
    free(same);
    free(packed);
    free(turned);
    free(s);
    source_free(&q);
    source_free(&keys);
}

typedef void shape_check(const cpu_kernels *, int, int32_t, int32_t, int32_t);

/* Calls `check` for many shapes, of at most `most` rows. */
static void for_each_shape(const cpu_kernels *k, int32_t most, shape_check *check)
{
    static const int32_t rows[] = {1, 2, 3, 5, 7, 8, 12, 13, 24, 33, 64};
    static const int32_t dims[] = {1, 2, 17, 32, 64, 80, 129, 160};
    static const int32_t keys[] = {CPU_BLOCK_KEYS, 37, 9, 60, 3}; /* whole panels, parts */
    int which = 0;
    for (size_t r = 0; r < sizeof rows / sizeof rows[0] && rows[r] <= most; r++)
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++, which++)
            check(k, which, rows[r], keys[which % 5], dims[d]);
}

static void test_scores(const cpu_kernels *k)
{
    for_each_shape(k, 24, scores_of);
}

static void for_decode_shapes(const cpu_kernels *k, shape_check *check)
{
    if (k->begin)
        k->begin();
    for_each_shape(k, k->decode_rows, check);
    if (k->end)
        k->end();
}

static void test_decode_qk(const cpu_kernels *k)
{
    for_decode_shapes(k, qk_of);
}

static void scores_hold(void **state)
{
    (void)state;
    for_each_table(test_scores);
    for_each_decode(test_decode_qk);
}

/* ---- values ---- */

typedef struct weights {
    float value[MOST_ROWS][CPU_BLOCK_KEYS];
    float alpha[MOST_ROWS];
    float *packed; /* as softmax leaves P */
} weights;

static void weights_make(const cpu_kernels *k, int32_t rows, int32_t n, weights *w)
{
    const int32_t ld = CPU_BLOCK_KEYS;
    w->packed = zeroed((size_t)(MOST_ROWS * ld) * sizeof(float));
    memset(w->value, 0, sizeof w->value);
    for (int32_t i = 0; i < rows; i++) {
        w->alpha[i] = noise();
        for (int32_t j = 0; j < n; j++) {
            const float p = rounded(k->element == 2 ? SACCADE_BF16
                                    : k->is_split   ? SACCADE_F16
                                                    : SACCADE_F32,
                                    fabsf(noise()));
            uint16_t *parts = (uint16_t *)(void *)(w->packed + i * ld);
            w->value[i][j] = p;
            if (k->element == 2) {
                parts[j] = bf16_from_f32(p);
            } else if (k->is_split) {
                parts += j / 32 * 64 + j % 32;
                parts[0] = bf16_from_f32(p);
                parts[32] = bf16_from_f32(p - bf16_to_f32(parts[0]));
            } else {
                w->packed[i * ld + j] = p;
            }
        }
    }
}

static void check_values(const cpu_kernels *k, const source *v, const weights *w, int32_t rows,
                         int32_t n, const float *o, int32_t o_ld, const char *what)
{
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < v->rows.dim; d++) {
            double sum = 0.25 * w->alpha[i], mass = 0;
            for (int32_t j = 0; j < n; j++) {
                const double term = (double)w->value[i][j] * v->value[j * v->rows.dim + d];
                sum += term;
                mass += fabs(term);
            }
            near(what, k, o[i * o_ld + d], sum, allowed(k, n, mass));
        }
}

static float *quarters(size_t n)
{
    float *o = zeroed(n * sizeof *o);
    for (size_t at = 0; at < n; at++)
        o[at] = 0.25f;
    return o;
}

/* Keys in stretches give the bits of all keys, where weights between them are 0. */
static void check_stretches(const cpu_kernels *k, const weights *w, const void *v, int32_t keys,
                            int32_t rows, int32_t o_ld, const float *o)
{
    enum { GAP_FROM = 32, GAP_PAST = 96, LD = CPU_BLOCK_KEYS };
    const int32_t panels = o_ld / k->panel, left = keys - GAP_PAST;
    const size_t size = (size_t)(MOST_ROWS * o_ld), element = (size_t)k->element;
    const cpu_stretch all[] = {{0, GAP_FROM, 0}, {GAP_FROM, keys, GAP_FROM}};
    const cpu_stretch some[] = {{0, GAP_FROM, 0}, {GAP_PAST, keys, GAP_FROM}};
    if (!k->values_of || left <= 0)
        return;
    float *dead = zeroed((size_t)rows * LD * sizeof *dead),
          *dense = zeroed((size_t)rows * LD * 4);
    float *a = quarters(size), *b = quarters(size);
    k->values_of(w->packed, LD, v, all, 2, LD, rows, panels, w->alpha, a, o_ld);
    assert_memory_equal(a, o, size * sizeof *o);
    for (int32_t i = 0; i < rows; i++) {
        const char *from = (const char *)(w->packed + i * LD);
        char *zeros = (char *)(dead + i * LD), *close = (char *)(dense + i * LD);
        memcpy(zeros, from, GAP_FROM * element);
        memcpy(close, from, GAP_FROM * element);
        memcpy(zeros + GAP_PAST * element, from + GAP_PAST * element, (size_t)left * element);
        memcpy(close + GAP_FROM * element, from + GAP_PAST * element, (size_t)left * element);
    }
    free(a);
    a = quarters(size);
    k->values(dead, LD, v, keys, LD, rows, panels, w->alpha, a, o_ld);
    k->values_of(dense, LD, v, some, 2, LD, rows, panels, w->alpha, b, o_ld);
    assert_memory_equal(a, b, size * sizeof *a);
    free(dead);
    free(dense);
    free(a);
    free(b);
}

static void values_of(const cpu_kernels *k, int which, int32_t rows, int32_t n, int32_t E)
{
    static weights w;
    const int32_t o_ld = (E + k->panel - 1) / k->panel * k->panel, block = CPU_BLOCK_KEYS;
    source v = source_make(dtype_of(k, which), n, E);
    void *packed = zeroed((size_t)block * (size_t)o_ld * 4);
    float *o = quarters((size_t)(MOST_ROWS * o_ld));
    weights_make(k, rows, n, &w);
    assert_int_equal(k->pack_values(&v.rows, n, block, packed), 0);
    const int32_t keys = k->element == 4 && !k->is_split ? n : (n + 15) / 16 * 16;
    k->values(w.packed, block, packed, keys, block, rows, o_ld / k->panel, w.alpha, o, o_ld);
    check_values(k, &v, &w, rows, n, o, o_ld, "values");
    for (int32_t at = rows * o_ld; at < MOST_ROWS * o_ld; at++)
        assert_true(o[at] == 0.25f);
    check_stretches(k, &w, packed, keys, rows, o_ld, o);
    free(o);
    free(packed);
    free(w.packed);
    source_free(&v);
}

static void pv_of(const cpu_kernels *k, int which, int32_t rows, int32_t n, int32_t E)
{
    static weights w;
    const int32_t o_ld = (E + k->panel - 1) / k->panel * k->panel, block = CPU_BLOCK_KEYS;
    source v = source_make(dtype_of(k, which), n, E);
    float *o = quarters((size_t)(MOST_ROWS * o_ld));
    cpu_prefetch next = prefetch_begin(&v.rows, k->prefetch_parts, n);
    weights_make(k, rows, n, &w);
    assert_int_equal(k->decode_pv(w.packed, block, &(cpu_keys){v.rows, NULL}, n, rows, w.alpha,
                                  o, o_ld, &next),
                     n);
    assert_int_equal(next.rows, 0);
    check_values(k, &v, &w, rows, n, o, o_ld, "sums");
    for (int32_t at = rows * o_ld; at < MOST_ROWS * o_ld; at++)
        assert_true(o[at] == 0.25f);
    groups apart;
    float *same = quarters((size_t)(MOST_ROWS * o_ld));
    groups_make(&v, n, &apart);
    next = prefetch_groups(&v.rows, apart.ahead, k->prefetch_parts,
                           (n + KV_GROUP - 1) / KV_GROUP);
    assert_int_equal(
        k->decode_pv(w.packed, block, &apart.keys, n, rows, w.alpha, same, o_ld, &next), n);
    assert_int_equal(prefetch_left(&next), 0);
    assert_memory_equal(same, o, (size_t)(MOST_ROWS * o_ld) * sizeof *o);
    groups_free(&apart);
    free(same);
    free(o);
    free(w.packed);
    source_free(&v);
}

static void test_values(const cpu_kernels *k)
{
    for_each_shape(k, 24, values_of);
}

static void test_decode_pv(const cpu_kernels *k)
{
    for_decode_shapes(k, pv_of);
}

static void values_hold(void **state)
{
    (void)state;
    for_each_table(test_values);
    for_each_decode(test_decode_pv);
}

/* One infinity or NaN anywhere in V is seen, and stops `sums` before its key: O is then that of
 * the keys before. */
static void test_nonfinite(const cpu_kernels *k)
{
    static const float nonfinite[] = {NAN, INFINITY, -INFINITY};
    static weights w;
    void *packed = zeroed((size_t)CPU_BLOCK_KEYS * MOST_D * 4);
    weights_make(k, 4, CPU_BLOCK_KEYS, &w);
    if (k->begin)
        k->begin();
    for (int n = 0; n < 60; n++) {
        const int32_t rows = 1 + n % 4, j = n * 71 % CPU_BLOCK_KEYS, d = n * 31 % MOST_D;
        source v = source_make(dtype_of(k, n), CPU_BLOCK_KEYS, MOST_D);
        const size_t each = saccade_dtype_bytes(v.rows.dtype);
        cpu_prefetch next = {0};
        convert_from_f32(v.rows.dtype, &nonfinite[n % 3],
                         (char *)v.memory + j * v.rows.stride + (size_t)d * each, 1);
        assert_true(k->pack_values(&v.rows, CPU_BLOCK_KEYS, CPU_BLOCK_KEYS, packed) != 0);
        float *o = quarters((size_t)MOST_ROWS * MOST_D);
        const cpu_keys keys = {v.rows, NULL};
        const int32_t done = k->decode_pv(w.packed, CPU_BLOCK_KEYS, &keys, CPU_BLOCK_KEYS, rows,
                                          w.alpha, o, MOST_D, &next);
        assert_true(done <= j && j - done < CPU_BLOCK_KEYS / (k->begin ? 1 : 2));
        check_values(k, &v, &w, rows, done, o, MOST_D, "sums before a nonfinite value");
        free(o);
        source_free(&v);
    }
    if (k->end)
        k->end();
    free(w.packed);
    free(packed);
}

static void nonfinite_is_seen(void **state)
{
    (void)state;
    for_each_decode(test_nonfinite);
}

/* ---- softmax ---- */

static double weight(const cpu_kernels *k, const float *row, int32_t j)
{
    return k->element == 2 ? (double)bf16_to_f32(((const uint16_t *)(const void *)row)[j])
                           : (double)row[j];
}

/* Two blocks in a row, the second with larger scores, or smaller, or dead. */
static void test_softmax(const cpu_kernels *k)
{
    static const float base[][2] = {
        {0, 3},         {3, 0},         {-INFINITY, 1},
        {1, -INFINITY}, {-3700, -3690}, {-0x1p24f - 8, -0x1p24f + 2},
        {-2e9f, -2e9f}, {2e9f, 2e9f},   {-FLT_MAX, -FLT_MAX},
        {-1e30f, 1},    {1, -1e30f},    {-INFINITY, -FLT_MAX}};
    enum { N = 48, LD = CPU_BLOCK_KEYS };
    float *s = zeroed(2 * LD * sizeof *s);
    const double unit = k->element == 2 ? 0x1p-8 : 3e-7;
    for (size_t n = 0; n < sizeof base / sizeof base[0]; n++) {
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, alpha[2];
        double gold_m = -INFINITY, gold_l = 0;
        for (int block = 0; block < 2; block++) {
            double x[N], most = gold_m;
            for (int j = 0; j < N; j++) {
                x[j] = j % 5 == 1 ? -INFINITY : base[n][block] + noise();
                s[j] = s[LD + j] = (float)x[j];
                most = fmax(most, s[j]);
                x[j] = s[j];
            }
            const double from = most == -INFINITY ? 0 : most;
            const double off = /* m log2 e's rounding */
                1e-7 * fmin(fabs(from), CPU_FUSED_MOST);
            gold_l *= exp(gold_m - from);
            k->softmax(s, LD, 2, N, NULL, m, l, alpha);
            near("alpha", k, alpha[1], exp(gold_m - from), 1e-5 + off * exp(gold_m - from));
            gold_m = most;
            for (int j = 0; j < N; j++) {
                gold_l += exp(x[j] - from);
                near("p", k, weight(k, s + LD, j), exp(x[j] - from), unit + off);
            }
            assert_true(m[0] == (float)gold_m && m[1] == m[0]);
            near("l", k, l[1], gold_l, gold_l * (2e-6 + off));
            for (int j = 0; j < N && gold_l > 0; j++) /* is in all of a row's weights alike */
                near("share", k, weight(k, s + LD, j) / l[1], exp(x[j] - from) / gold_l,
                     unit + 1e-6);
        }
    }
    free(s);
}

/* The weight of a row's only key is 1, but for the rounding of m log2 e, up or down. */
static void test_one_key(const cpu_kernels *k)
{
    float *s = zeroed(CPU_BLOCK_KEYS * sizeof *s);
    for (int n = 0; n < 2000; n++) {
        const float one = noise() * ldexpf(1, n % 20 - 16);
        float m = -INFINITY, l = 0, alpha;
        for (int j = 0; j < 16; j++)
            s[j] = j == n % 16 ? one : -INFINITY;
        k->softmax(s, CPU_BLOCK_KEYS, 1, 16, NULL, &m, &l, &alpha);
        near("l of one key", k, l, 1, 0x1p-24 + fabs((double)one) * 0x1p-24);
    }
    free(s);
}

static void softmax_holds(void **state)
{
    (void)state;
    for_each_table(test_softmax);
    for_each_table(test_one_key);
}

/* exp of every 61st float from -110 to -0, of all with SACCADE_EXHAUSTIVE set: the polynomial,
 * and the rounding of s log2 e. */
static void test_exponential(const cpu_kernels *k)
{
    const float zero = 0;
    const uint32_t step = getenv("SACCADE_EXHAUSTIVE") ? 1 : 61;
    float *s = zeroed(CPU_BLOCK_KEYS * sizeof *s);
    if (k->element == 2)
        goto out;
    for (uint32_t bits = f32_bits(1e-9f); bits < f32_bits(110.0f);) {
        float x[CPU_BLOCK_KEYS], m = -INFINITY, l = 0, alpha;
        for (int j = 0; j < CPU_BLOCK_KEYS; j++, bits += step)
            s[j] = x[j] = -f32_from_bits(bits);
        k->softmax(s, CPU_BLOCK_KEYS, 1, CPU_BLOCK_KEYS, &zero, &m, &l, &alpha);
        for (int j = 0; j < CPU_BLOCK_KEYS; j++) {
            const double gold = exp((double)x[j]), most = 2.5e-7 + 1.2e-7 * fabs((double)x[j]);
            near("exp", k, s[j], gold, fmax(gold * most, 0x1p-126));
        }
    }
out:
    free(s);
}

static void exponential_holds(void **state)
{
    (void)state;
    for_each_table(test_exponential);
}

/* A NaN score makes the row's l NaN, +INF too; its neighbours stay as they are. */
static void test_not_finite(const cpu_kernels *k)
{
    static const float nonfinite[] = {NAN, INFINITY};
    enum { LD = CPU_BLOCK_KEYS };
    float *s = zeroed(2 * LD * sizeof *s);
    for (int n = 0; n < 2; n++)
        for (int at = 0; at < 64; at++) {
            float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, alpha[2];
            for (int j = 0; j < 64; j++)
                s[j] = s[LD + j] = (float)j / 64;
            s[at] = nonfinite[n];
            k->softmax(s, LD, 2, 64, NULL, m, l, alpha);
            assert_true(isnan(l[0]));
            assert_true(l[1] > 1 && l[1] <= 64 && m[1] == 63.0f / 64);
        }
    free(s);
}

static void not_finite_is_kept(void **state)
{
    (void)state;
    for_each_table(test_not_finite);
}

/* ---- order of work ---- */

static void order_is_by_weight(void **state)
{
    int64_t weight[500];
    int32_t order[500];
    (void)state;
    for (int n = 0; n < 500; n += 7) {
        for (int i = 0; i < n; i++)
            weight[i] = (int64_t)(8 * fabsf(noise()));
        cpu_order(weight, order, n);
        for (int i = 1; i < n; i++)
            assert_true(
                weight[order[i - 1]] > weight[order[i]]
                || (weight[order[i - 1]] == weight[order[i]] && order[i - 1] < order[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_hold),        cmocka_unit_test(values_hold),
        cmocka_unit_test(nonfinite_is_seen),  cmocka_unit_test(softmax_holds),
        cmocka_unit_test(exponential_holds),  cmocka_unit_test(not_finite_is_kept),
        cmocka_unit_test(order_is_by_weight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
