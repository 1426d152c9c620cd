/* Forward on AMX tiles, emulated wherever the machine has none: against float64, streamed
 * against block by block, the tiles' own rules, real against emulated bit for bit. */
#include "support/forward_case.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cpu/cpu.h"
#include "saccade_config.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Tables that this machine runs for a dtype; what has a stream a second time, without it.
 * Emulated tiles take most of the time: where better levels serve, they come in their turn. */
enum { MOST = 8, ALL_TABLES = -1, TURNS = 3 };

static bool is_due(cpu_level level, int turn)
{
    return level == cpu_features_get()->level || turn == ALL_TABLES
           || turn % TURNS == (int)level;
}

static int tables(saccade_dtype dtype, int turn, cpu_kernels out[MOST])
{
    const int is_f16 = dtype == SACCADE_F16;
    const cpu_level level = cpu_features_get()->level;
    int n = 0;
    if (is_due(CPU_PORTABLE, turn))
        out[n++] = is_f16 ? cpu_f16_tiles_portable : cpu_bf16_tiles_portable;
#if HAVE_LEVEL_AVX2
    if (level >= CPU_AVX2 && is_due(CPU_AVX2, turn))
        out[n++] = is_f16 ? cpu_f16_tiles_avx2 : cpu_bf16_tiles_avx2;
#endif
#if HAVE_LEVEL_AVX512
    if (level >= CPU_AVX512)
        out[n++] = is_f16 ? cpu_f16_tiles_avx512 : cpu_bf16_tiles_avx512;
#endif
#if HAVE_LEVEL_AMX
    if (level >= CPU_AMX)
        out[n++] = is_f16 ? cpu_f16_tiles_amx : cpu_bf16_tiles_amx;
#endif
    (void)level;
    for (int i = 0, most = n; i < most; i++)
        if (out[i].flow) {
            out[n] = out[i];
            out[n++].flow = NULL;
        }
    return n;
}

static int next_turn(void)
{
    static int turn;
    return turn++;
}

static void use(saccade_plan *plan, const cpu_kernels *kernels)
{
    ((cpu_state *)plan->state)->needs.kernels = kernels;
}

static void with_every_table(const forward_case *c)
{
    cpu_kernels list[MOST];
    case_run r;
    case_make(c, &r);
    const int n = tables(r.dtype, next_turn(), list);
    for (int i = 0; i < n; i++) {
        char what[64];
        saccade_plan *plan = case_plan(&r, NULL, 2);
        use(plan, &list[i]);
        snprintf(what, sizeof what, "table %d, %s%s", i, list[i].name,
                 list[i].flow ? "" : ", plain");
        case_check(&r, plan, NULL, what, NULL, NULL);
        saccade_plan_destroy(plan);
    }
    case_free(&r);
}

/* In bf16 and in f16; in short runs every third time in f16, else in bf16. */
static void with_both(const forward_case *c)
{
    static int turn;
    char text[96];
    const forward_case f16 = case_in_f16(c, text);
    const int is_third = turn++ % 3 == 2;
    if (!is_short_run() || !is_third)
        with_every_table(c);
    if (!is_short_run() || is_third)
        with_every_table(&f16);
}

static void shapes(void **state)
{
    static const char *const sizes[] = {
        "q1 kv1 d1 bf16",
        "b2 h4/2 q5 kv17 d3 dv5 bf16",
        "b1 h2 q130 kv129 d64 bf16",
        "b2 h3/3 q133 kv400 d40 dv72 bf16",
        "b1 h4/1 q100 kv384 d128 bf16",
        "b1 h1 q97 kv515 d256 bf16",
        "b1 h2/1 q200 kv400 d96 dv160 bf16",
        "b1 h1 q113 kv300 d257 dv300 bf16",
        "b1 h1 q300 kv1400 d32 bf16",
    };
    (void)state;
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++)
        with_both(&(forward_case){.problem = sizes[n], .seed = n});
}

static void extremes(void **state)
{
    static const char *const masks[] = {NULL, "q + 220 >= kv"};
    (void)state;
    for (int data = 0; data < CASE_DATA; data++)
        for (int n = 0; n < 2; n++)
            with_both(&(forward_case){.problem = "h1 q110 kv390 d64 bf16",
                                      .data = (case_data)data,
                                      .mask = masks[n]});
}

static void variants(void **state)
{
    static const forward_case list[] = {
        {.mask = "causal()", .q_offset = 290},
        {.mask = "q >= kv && q - kv <= W", .score = "alibi()"},
        {.mask = "doc[q] == doc[kv] && q >= kv"},
        {.mask = "kv < 20 || q >= kv", .score = "softcap(c)"},
        {.score = "score + rel[h, (q - kv) & 63]"},
        {.score = "score + rel_bf16[h, (q - kv) & 63]"},
        {.score = "score + table_f16[kv - q + 90]"},
        {.score = "score * h_scale[h] + table[kv]", .kv_len = 290},
        {.mask = "q % 3 == 0"},
        {.mask = "false"},
        {.score = "kv % 7 != 3 ? score : -inf"},
        {.score = "kv < 140 ? -inf : score"},
        {.mask = "kv != 5", .score = "kv == 5 ? 1.0 / 0.0 + log(-1.0) : score"},
        {.score = "kv == 200 && q == 3 ? inf : score"},
        {.mask = "kv == 0", .scale = 0.001f},
        {.score = "q < 2 ? -3.4028234e38 : score"},
        {.score = "q < 2 ? score * 1e9 : score"},
        {.scale = -0.7f},
        {.scale = 0.0625f, .layout = CASE_BNHD, .kv_offset = 9},
    };
    (void)state;
    for (size_t n = 0; n < sizeof list / sizeof list[0]; n++) {
        forward_case c = list[n];
        c.problem = "b2 h2/1 q140 kv300 d24 bf16";
        with_both(&c);
        c.problem = "b1 h4/2 q3 kv310 d24 bf16";
        with_both(&c);
    }
}

/* One infinite or NaN element of K or V in key 77, live or dead. */
static void nonfinite_value(const char *problem, float nonfinite, const char *mask, int is_key)
{
    cpu_kernels list[MOST];
    case_run r;
    case_make(&(forward_case){.problem = problem, .mask = mask}, &r);
    const int n = tables(r.dtype, next_turn(), list);
    const saccade_tensor *t = is_key ? &r.k.t : &r.v.t;
    convert_from_f32(r.dtype, &nonfinite, (uint16_t *)t->data + 77 * t->stride[2] + 3, 1);
    case_solve(&r);
    for (int i = 0; i < n; i++) {
        saccade_plan *plan = case_plan(&r, NULL, 1);
        use(plan, &list[i]);
        case_check(&r, plan, NULL, list[i].name, NULL, NULL);
        saccade_plan_destroy(plan);
    }
    case_free(&r);
}

static void nonfinite_values(void **state)
{
    static const float nonfinite[] = {NAN, INFINITY, -INFINITY};
    static const char *const masks[] = {NULL, "kv != 77", "kv >= 40"};
    (void)state;
    for (int n = 0; n < 3; n++)
        for (int mask = 0; mask < 3; mask++)
            for (int bits = 0; bits < 4; bits++)
                nonfinite_value(bits & 1 ? "h2 q120 kv300 d8 f16" : "h2 q120 kv300 d8 bf16",
                                nonfinite[n], masks[mask], bits >> 1);
}

static void random_problems(void **state)
{
    static const char *const masks[] = {NULL, "causal()", "doc[q] == doc[kv]",
                                        "(q + kv) % 3 != h"};
    static const char *const scores[] = {NULL, "alibi()", "softcap(c)", "score + table[kv]"};
    uint64_t x = 20261121;
    (void)state;
    for (uint64_t seed = 1; seed <= 16; seed++) {
        char problem[96];
        int pick[8];
        for (int i = 0; i < 8; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            pick[i] = (int)(x >> 40);
        }
        const int heads = 1 + pick[0] % 2, Q = 97 + pick[1] % 130, KV = 60 + pick[2] % 400;
        snprintf(problem, sizeof problem, "b%d h%d/%d q%d kv%d d%d dv%d bf16", 1 + pick[3] % 2,
                 heads * (1 + pick[4] % 2), heads, Q, KV, 1 + pick[5] % 80, 1 + pick[6] % 80);
        with_both(&(forward_case){
            .problem = problem,
            .mask = masks[pick[7] % 4],
            .score = scores[pick[7] / 4 % 4],
            .layout = (case_layout)(pick[7] / 16 % 4),
            .data = (case_data)(pick[7] / 64 % CASE_DATA),
            .q_offset = pick[7] / 1024 % 2 * 300,
            .seed = seed,
        });
    }
}

static void threads_of(const char *problem)
{
    cpu_kernels list[MOST];
    case_run r;
    case_make(&(forward_case){.problem = problem, .mask = "causal()", .q_offset = 500}, &r);
    const int n = tables(r.dtype, ALL_TABLES, list);
    const size_t bytes = 4 * 200 * 32 * sizeof(float);
    float *first = malloc(bytes), *other = malloc(bytes);
    assert_true(first && other);
    for (int i = 0; i < n; i++)
        for (int threads = 1; threads <= 3; threads++) {
            saccade_plan *plan = case_plan(&r, NULL, threads);
            use(plan, &list[i]);
            case_check(&r, plan, NULL, list[i].name, threads == 1 ? first : other, NULL);
            assert_true(threads == 1 || memcmp(first, other, bytes) == 0);
            saccade_plan_destroy(plan);
        }
    free(first);
    free(other);
    case_free(&r);
}

static void threads_do_not_matter(void **state)
{
    (void)state;
    threads_of("b1 h4/2 q200 kv900 d32 bf16");
    threads_of("b1 h4/2 q200 kv900 d32 f16");
}

/* Without lse exponentials are coarser: the output stays in its bounds. */
static void rough_of(const char *problem)
{
    cpu_kernels list[MOST];
    for (int data = 0; data < CASE_DATA; data++) {
        case_run r;
        case_make(&(forward_case){.problem = problem, .data = (case_data)data}, &r);
        const int n = tables(r.dtype, ALL_TABLES, list);
        uint16_t *out = malloc(2 * 100 * 64 * sizeof *out);
        assert_non_null(out);
        for (int i = 0; i < n; i++) {
            saccade_error err = {0};
            saccade_plan *plan = case_plan(&r, NULL, 1);
            use(plan, &list[i]);
            saccade_forward_args args = r.args;
            const size_t bytes = saccade_plan_workspace(plan, &r.sizes);
            void *workspace = aligned_alloc(64, bytes);
            assert_non_null(workspace);
            saccade_tensor o = r.q.t;
            o.data = out;
            for (int d = 3, stride = 1; d >= 0; stride *= (int)o.shape[d--])
                o.stride[d] = stride;
            args.out = &o;
            args.workspace = workspace;
            args.workspace_bytes = bytes;
            assert_int_equal(saccade_forward(plan, &args, &err), SACCADE_OK);
            for (int64_t at = 0; at < 2 * 100 * 64; at++)
                assert_true(fabs(convert_element(r.dtype, out + at) - r.out[at])
                            <= r.out_bound);
            free(workspace);
            saccade_plan_destroy(plan);
        }
        free(out);
        case_free(&r);
    }
}

static void approx(void **state)
{
    (void)state;
    rough_of("h2 q100 kv390 d64 bf16");
    rough_of("h2 q100 kv390 d64 f16");
}

/* ---- kernels by themselves ---- */

static void fill(uint16_t *x, int n, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = bf16_from_f32((float)(int32_t)seed * 0x1p-31f);
    }
}

/* Scores and values of all tables, on the same packed operands, are the same bits. */
static void same_bits(void **state)
{
    enum { N = 128, D = 96 };
    static uint16_t q[32 * D], rows[N * D];
    static float k[N * D / 2], v[N * D / 2], first[32 * N + 32 * D], other[32 * N + 32 * D];
    cpu_kernels list[MOST];
    const int n = tables(SACCADE_BF16, ALL_TABLES, list);
    (void)state;
    fill(q, 32 * D, 1);
    fill(rows, N * D, 2);
    const cpu_rows from = {(const char *)rows, D * 2, SACCADE_BF16, D};
    for (int i = 0; i < n; i++) {
        float *s = i ? other : first, *o = s + 32 * N, alpha[32];
        memset(s, 0, sizeof first);
        for (int r = 0; r < 32; r++)
            alpha[r] = 1;
        list[i].begin();
        list[i].pack_keys(&from, N, N, k);
        assert_int_equal(list[i].pack_values(&from, N, N, v), 0);
        list[i].scores(q, D, k, D, 32, N, 1, s, N);
        for (int r = 0; r < 32; r++) /* any weights */
            memcpy(s + r * N, rows + r * 64, N * sizeof *rows);
        list[i].values(s, N, v, N, N, 32, D / 32, alpha, o, D);
        list[i].end();
        if (i)
            assert_memory_equal(first, other, sizeof first);
    }
}

/* Every finite f16 number is the sum of its two parts, neither of them below what tiles take
 * for 0; the rest have NaN for a part. */
static void parts_are_exact(void **state)
{
    enum { LD = 64, ALL = 65536 };
    static uint16_t numbers[ALL], parts[2 * ALL];
    cpu_kernels list[MOST];
    const int n = tables(SACCADE_F16, ALL_TABLES, list);
    int n_finite = 0;
    (void)state;
    for (int x = 0; x < ALL; x++)
        numbers[x] = (uint16_t)x;
    for (int i = 0; i < n; i++, n_finite = 0) {
        const cpu_rows from = {(const char *)numbers, LD * 2, SACCADE_F16, LD};
        list[i].pack_rows(&from, ALL / LD, ALL / LD, LD, parts);
        for (int x = 0; x < ALL; x++) {
            const uint16_t *at = parts + x / 32 * 64 + x % 32;
            const float whole = f16_to_f32((uint16_t)x);
            const float high = bf16_to_f32(at[0]), low = bf16_to_f32(at[32]);
            if (!isfinite(whole)) {
                assert_true(isnan(high) || isnan(low));
                continue;
            }
            n_finite++;
            assert_true(high == bf16_to_f32(bf16_from_f32(whole)));
            assert_true(high + low == whole && (double)high + (double)low == (double)whole);
            assert_true(low == 0 || fabsf(low) >= 0x1p-24f);
        }
        assert_int_equal(n_finite, 63488);
    }
}

/* Rows with a single 1 take every finite f16 number, subnormal ones too, out of K as it was. */
static void decode_qk_is_exact(void **state)
{
    enum { D = 32, N = CPU_BLOCK_KEYS, ALL = 65536 };
    static uint16_t q[D * D], k[N * D];
    static float packed[D * D], turned[D * D], s[D * N];
    cpu_kernels list[MOST];
    const int n = tables(SACCADE_F16, ALL_TABLES, list);
    (void)state;
    for (int d = 0; d < D; d++)
        q[d * D + d] = 0x3c00;
    const cpu_rows rows = {(const char *)q, D * 2, SACCADE_F16, D};
    const cpu_rows keys = {(const char *)k, D * 2, SACCADE_F16, D};
    for (int i = 0; i < n; i++) {
        list[i].pack_rows(&rows, D, D, D, packed);
        list[i].pack_decode(packed, D, D, D, turned);
        list[i].begin();
        for (int first = 0; first < ALL; first += N * D) {
            cpu_prefetch nothing = {0};
            for (int x = 0; x < N * D; x++)
                k[x] = (uint16_t)((first + x) & 0x7c00) == 0x7c00 ? 0 : (uint16_t)(first + x);
            list[i].decode_qk(turned, D, &(cpu_keys){keys, NULL}, N, D, 1, s, N, &nothing);
            for (int x = 0; x < N * D; x++)
                assert_true(s[x % D * N + x / D] == f16_to_f32(k[x]));
        }
        list[i].end();
    }
}

/* The same of V: keys j, j + 32 and so on. */
static void decode_pv_is_exact(void **state)
{
    enum { E = 64, N = CPU_BLOCK_KEYS, ROWS = 8, ALL = 65536 };
    static uint16_t v[N * E];
    static float p[ROWS * N], o[ROWS * E], alpha[ROWS];
    cpu_kernels list[MOST];
    const int n = tables(SACCADE_F16, ALL_TABLES, list);
    (void)state;
    const cpu_rows values = {(const char *)v, E * 2, SACCADE_F16, E};
    for (int i = 0; i < n; i++) {
        list[i].begin();
        for (int j = 0; j < 32; j++) {
            cpu_prefetch nothing = {0};
            memset(p, 0, sizeof p);
            for (int x = 0; x < N * E; x++) {
                const int bits = (x * 4 + j) % ALL;
                v[x] = (uint16_t)((bits & 0x7c00) == 0x7c00 ? 0 : bits);
            }
            for (int r = 0; r < ROWS; r++)
                ((uint16_t *)(void *)(p + r * N))[r * 64 + j] = 0x3f80;
            list[i].decode_pv(p, N, &(cpu_keys){values, NULL}, N, ROWS, alpha, o, E, &nothing);
            for (int x = 0; x < ROWS * E; x++)
                assert_true(o[x] == f16_to_f32(v[(x / E * 32 + j) * E + x % E]));
        }
        list[i].end();
    }
}

/* Against sums in double: 0 past the ends of keys and dims, nothing read there. */
static void packing(void **state)
{
    enum { N = 50, D = 33, PADDED = 128 };
    cpu_kernels list[MOST];
    const int n = tables(SACCADE_BF16, ALL_TABLES, list);
    static float k[PADDED * 32], v[PADDED * 32], s[32 * PADDED];
    static uint16_t q[32 * 64], rows[N * D];
    (void)state;
    fill(rows, N * D, 3);
    for (int i = 0; i < n; i++) {
        const cpu_rows from = {(const char *)rows, D * 2, SACCADE_BF16, D};
        list[i].begin();
        list[i].pack_rows(&from, 32, 32, 64, q);
        list[i].pack_keys(&from, N, PADDED, k);
        list[i].scores(q, 64, k, D, 32, PADDED, 0.5f, s, PADDED);
        assert_int_equal(list[i].pack_values(&from, N, PADDED, v), 0);
        list[i].end();
        for (int r = 0; r < 32; r++)
            for (int j = 0; j < PADDED; j++) {
                double sum = 0;
                for (int d = 0; d < D && j < N; d++)
                    sum += bf16_to_f32(rows[r * D + d]) * (double)bf16_to_f32(rows[j * D + d]);
                assert_true(fabs(s[r * PADDED + j] - 0.5 * sum) < 1e-5);
            }
        const uint16_t *values = (const uint16_t *)(const void *)v;
        for (int d = 0; d < 64; d++)
            for (int j = 0; j < PADDED; j++) {
                const int unit = j / 32 * 2 + d / 32;
                const int at = unit * 1024 + j % 32 / 2 * 64 + d % 32 * 2 + j % 2;
                assert_int_equal(values[at], j < N && d < D ? rows[j * D + d] : 0);
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packing),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(shapes),
        cmocka_unit_test(extremes),
        cmocka_unit_test(variants),
        cmocka_unit_test(nonfinite_values),
        cmocka_unit_test(approx),
        cmocka_unit_test(random_problems),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(parts_are_exact),
        cmocka_unit_test(decode_qk_is_exact),
        cmocka_unit_test(decode_pv_is_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
