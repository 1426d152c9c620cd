/* Every named variant against a brute force in plain C, written from the published definition
   and by another route than the prelude's text where there is one: windows by their first
   element, tile and Z order by enumeration, buckets by their bounds. */
#include "base/embed.h"
#include "eval/eval.h"
#include "mod/ast.h"
#include "support/round_trip.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 64, HEADS = 4, BATCH = 2 };

/* ---- captured values ---- */

static const int32_t doc_start[] = {0, 5, 20, 41, 50, N};
static const int32_t doc_prefix[] = {0, 0, 0, 3, 3};
static int32_t doc[N], image[N], prefix[BATCH] = {7, 30};
static uint8_t is_global[N], ancestor[8 * 8];
static const int32_t seen[] = {0, 10, 10, 33, 33, N};
static const int32_t span[] = {4, 12, 30, 41, 41, 42};
static float t5_table[32 * HEADS], table[HEADS * 9], swin_table[HEADS * 15 * 15], gain[HEADS];
static float spatial[HEADS * 12];
static int32_t tiles[BATCH][HEADS][8][3];
static int32_t hops[BATCH * N * N];

static const struct {
    const char *name;
    saccade_dtype dtype;
    int32_t rank;
    int64_t shape[4];
    void *data;
} tensors[] = {
    {"doc", SACCADE_I32, 1, {N}, doc},
    {"start", SACCADE_I32, 1, {6}, (void *)doc_start},
    {"shared", SACCADE_I32, 1, {5}, (void *)doc_prefix},
    {"prefix", SACCADE_I32, 1, {BATCH}, prefix},
    {"is_global", SACCADE_BOOL, 1, {N}, is_global},
    {"image", SACCADE_I32, 1, {N}, image},
    {"seen", SACCADE_I32, 2, {3, 2}, (void *)seen},
    {"span", SACCADE_I32, 2, {3, 2}, (void *)span},
    {"ancestor", SACCADE_BOOL, 2, {8, 8}, ancestor},
    {"t5", SACCADE_F32, 2, {32, HEADS}, t5_table},
    {"table", SACCADE_F32, 2, {HEADS, 9}, table},
    {"swin", SACCADE_F32, 2, {HEADS, 225}, swin_table},
    {"gain", SACCADE_F32, 1, {HEADS}, gain},
    {"spatial", SACCADE_F32, 2, {HEADS, 12}, spatial},
    {"hops", SACCADE_I32, 3, {BATCH, N, N}, hops},
    {"tiles", SACCADE_I32, 4, {BATCH, HEADS, 8, 3}, tiles},
};
enum { N_TENSORS = sizeof tensors / sizeof tensors[0] };

static float noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static int fill(void **unused)
{
    (void)unused;
    uint32_t state = 1;
    for (int d = 0; d < 5; d++)
        for (int i = doc_start[d]; i < doc_start[d + 1]; i++)
            doc[i] = d;
    for (int i = 0; i < N; i++) {
        is_global[i] = i == 3 || i == 40;
        image[i] = i < 20 ? 0 : i < 45 ? 1 : 2;
    }
    /* a tree of 8 tokens: the parent of i is (i - 1) / 2 */
    for (int i = 0; i < 8; i++)
        for (int j = i;; j = (j - 1) / 2) {
            ancestor[i * 8 + j] = 1;
            if (j == 0)
                break;
        }
    for (size_t i = 0; i < sizeof t5_table / sizeof *t5_table; i++)
        t5_table[i] = noise(&state);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        table[i] = noise(&state);
    for (size_t i = 0; i < sizeof swin_table / sizeof *swin_table; i++)
        swin_table[i] = noise(&state);
    for (int i = 0; i < HEADS; i++)
        gain[i] = noise(&state);
    for (int i = 0; i < HEADS * 12; i++)
        spatial[i] = noise(&state);
    for (int i = 0; i < BATCH * N * N; i++)
        hops[i] = (i * 7 + i / N) % 12;
    for (int i = 0; i < BATCH * HEADS * 8 * 3; i++)
        tiles[i / 3 / 8 / HEADS][i / 3 / 8 % HEADS][i / 3 % 8][i % 3] = (i * 5 + i / 7) % 8;
    return 0;
}

/* ---- brute force: masks ---- */

#define POINT int b, int h, int q, int k, double s
#define UNUSED (void)b, (void)h, (void)q, (void)k, (void)s
typedef double variant(POINT);

static double ref_noop(POINT)
{
    UNUSED;
    return 1;
}

static double ref_causal(POINT)
{
    UNUSED;
    return k <= q;
}

static double ref_inverse(POINT)
{
    UNUSED;
    return k >= q;
}

static double ref_window(POINT)
{
    UNUSED;
    for (int back = 0; back <= 9; back++)
        if (k == q - back)
            return 1;
    return 0;
}

static double ref_dilated(POINT)
{
    UNUSED;
    for (int steps = -4; steps <= 4; steps++)
        if (k == q + 3 * steps)
            return 1;
    return 0;
}

static double ref_global(POINT)
{
    UNUSED;
    const int is_token = q == 3 || q == 40 || k == 3 || k == 40;
    return is_token || (k >= q - 6 && k <= q + 6);
}

static double ref_prefix(POINT)
{
    UNUSED;
    return q < 11 && k < 11 ? 1 : k < 11 || k <= q;
}

static double ref_prefix_batch(POINT)
{
    UNUSED;
    return k < (b == 0 ? 7 : 30) || k <= q;
}

static int document_of(int i)
{
    int d = 0;
    while (i >= doc_start[d + 1])
        d++;
    return d;
}

static double ref_document(POINT)
{
    UNUSED;
    return document_of(q) == document_of(k);
}

static double ref_document_causal(POINT)
{
    UNUSED;
    const int d = document_of(q);
    return q - doc_start[d] >= k - doc_start[d] && k >= doc_start[d];
}

static double ref_shared_prefix(POINT)
{
    UNUSED;
    const int own = document_of(q), other = document_of(k);
    return own == other ? k <= q : other == doc_prefix[own];
}

static double ref_batchify(POINT)
{
    UNUSED;
    int sequence_q = 0, sequence_k = 0;
    for (; q >= 10; q -= 10)
        sequence_q++;
    for (; k >= 10; k -= 10)
        sequence_k++;
    return sequence_q == sequence_k && k <= q;
}

static double ref_flamingo(POINT)
{
    UNUSED;
    return k < 20 ? q < 10 : k < 45 ? q >= 10 && q < 33 : q >= 33;
}

/* NATTEN: the window of n elements starts as far left as it must to stay on the axis. */
static int in_window(int i, int j, int length, int n)
{
    int first = i - n / 2;
    if (first < 0)
        first = 0;
    if (first > length - n)
        first = length - n;
    return j >= first && j < first + n;
}

/* where the token of this index stands, by walking the tokens in order. */
typedef struct spot {
    int t, y, x;
} spot;

static spot row_major(int index, int columns)
{
    return (spot){0, index / columns, index % columns};
}

static spot tile_order(int index, spot canvas, spot tile)
{
    int at = 0;
    for (int t0 = 0; t0 < canvas.t; t0 += tile.t)
        for (int y0 = 0; y0 < canvas.y; y0 += tile.y)
            for (int x0 = 0; x0 < canvas.x; x0 += tile.x)
                for (int t = t0; t < t0 + tile.t; t++)
                    for (int y = y0; y < y0 + tile.y; y++)
                        for (int x = x0; x < x0 + tile.x; x++)
                            if (at++ == index)
                                return (spot){t, y, x};
    abort();
}

/* Z order: the four quadrants in turn, each in Z order. */
static spot z_order(int index, int size)
{
    if (size == 1)
        return (spot){0, 0, 0};
    const int quarter = size * size / 4, quadrant = index / quarter;
    spot s = z_order(index % quarter, size / 2);
    s.x += quadrant % 2 * size / 2;
    s.y += quadrant / 2 * size / 2;
    return s;
}

static double ref_natten(POINT)
{
    UNUSED;
    const spot i = row_major(q, 8), j = row_major(k, 8);
    return in_window(i.y, j.y, 8, 3) && in_window(i.x, j.x, 8, 5);
}

static double ref_natten_tiled(POINT)
{
    UNUSED;
    const spot canvas = {1, 4, 16}, tile = {1, 2, 4};
    const spot i = tile_order(q, canvas, tile), j = tile_order(k, canvas, tile);
    return in_window(i.y, j.y, 4, 3) && in_window(i.x, j.x, 16, 7);
}

static double ref_natten_morton(POINT)
{
    UNUSED;
    const spot i = z_order(q, 8), j = z_order(k, 8);
    return in_window(i.y, j.y, 8, 5) && in_window(i.x, j.x, 8, 3);
}

static double ref_sta_2d(POINT)
{
    UNUSED;
    const spot canvas = {1, 8, 8}, tile = {1, 2, 1};
    const spot i = tile_order(q, canvas, tile), j = tile_order(k, canvas, tile);
    return in_window(i.y / 2, j.y / 2, 4, 2) && in_window(i.x, j.x, 8, 3);
}

static double ref_sta_3d(POINT)
{
    UNUSED;
    const spot canvas = {3, 4, 4}, tile = {1, 2, 1};
    const spot i = tile_order(q, canvas, tile), j = tile_order(k, canvas, tile);
    return in_window(i.t, j.t, 3, 2) && in_window(i.y / 2, j.y / 2, 2, 1)
           && in_window(i.x, j.x, 4, 3);
}

static double ref_sta_3d_text(POINT)
{
    UNUSED;
    return q >= 48 || k >= 48 ? 1 : ref_sta_3d(b, h, q, k, s);
}

static double ref_sta_axis(POINT)
{
    UNUSED;
    return in_window(q, k, N, 10);
}

static double ref_block_causal(POINT)
{
    UNUSED;
    return k < q - q % 7 + 7;
}

/* BD3-LM's three masks, one by one: block diagonal, offset block causal, block causal. */
static double ref_block_diffusion(POINT)
{
    UNUSED;
    const int half = 32, block = 8;
    if (q < half && k < half)
        return q / block == k / block;
    if (q < half)
        return q / block > (k - half) / block;
    return k >= half && (q - half) / block >= (k - half) / block;
}

static double ref_tree(POINT)
{
    UNUSED;
    if (k < 20)
        return 1;
    for (int i = q; i > 0; i = (i - 1) / 2)
        if (i == k - 20)
            return 1;
    return k == 20;
}

static double ref_transfusion(POINT)
{
    UNUSED;
    int group_q = -1, group_k = -2;
    for (int m = 0; m < 3; m++) {
        for (int i = span[2 * m]; i < span[2 * m + 1]; i++) {
            group_q = i == q ? m : group_q;
            group_k = i == k ? m : group_k;
        }
    }
    return k <= q || group_q == group_k;
}

static double ref_svg_spatial(POINT)
{
    UNUSED;
    const int reach = 12; /* 1.5 frames of 8 tokens */
    if (k < 5 || q < 3)
        return 1;
    return q > k ? q - k < reach : k - q < reach;
}

/* tokens after the prompt, laid out frame by frame: near in place, in whatever frame. */
static double ref_svg_temporal(POINT)
{
    UNUSED;
    if (k < 4 || q < 4)
        return 1;
    int place_q = 0, place_k = 0;
    for (int i = 4; i <= q; i++)
        place_q = i == 4 ? 0 : (place_q + 1) % 10;
    for (int i = 4; i <= k; i++)
        place_k = i == 4 ? 0 : (place_k + 1) % 10;
    return abs(place_q - place_k) < 3; /* floor(2 * 10 / 6) */
}

static double ref_top_tiles(POINT)
{
    UNUSED;
    for (int i = 0; i < 3; i++)
        if (k >= 8 * tiles[b][h][q / 8][i] && k < 8 * tiles[b][h][q / 8][i] + 8)
            return 1;
    return 0;
}

/* ---- brute force: scores ---- */

static double ref_relative(POINT)
{
    UNUSED;
    return s + q - k;
}

static double ref_alibi(POINT)
{
    UNUSED;
    const double slopes[HEADS] = {0.25, 0.0625, 0.015625, 0.00390625};
    return s - slopes[h] * (q - k);
}

static double ref_softcap(POINT)
{
    UNUSED;
    const double e = exp(2 * s / 5);
    return 5 * (e - 1) / (e + 1);
}

/* The first `exact` buckets hold one distance each, the others up to `far` are logarithmic:
   bucket exact + i starts at distance exact (far / exact)^(i / (n - exact)). */
static int t5_bucket(int distance, int n, int far)
{
    const int exact = n / 2;
    int bucket = distance < exact ? distance : exact;
    if (distance < exact)
        return bucket;
    while (bucket < n - 1
           && distance
                  >= exact
                         * pow((double)far / exact, (double)(bucket + 1 - exact) / (n - exact))
                         * (1 - 1e-9))
        bucket++;
    return bucket;
}

static double ref_t5(POINT)
{
    UNUSED;
    const int bucket = t5_bucket(abs(k - q), 16, 100) + (k > q ? 16 : 0);
    return s + t5_table[bucket * HEADS + h];
}

static double ref_t5_causal(POINT)
{
    UNUSED;
    return s + t5_table[t5_bucket(q > k ? q - k : 0, 32, 128) * HEADS + h];
}

static double ref_table(POINT)
{
    UNUSED;
    const int distance = q - k < -4 ? -4 : q - k > 4 ? 4 : q - k;
    return s + table[h * 9 + 4 + distance];
}

static double ref_swin(POINT)
{
    UNUSED;
    const spot i = row_major(q, 8), j = row_major(k, 8);
    return s + swin_table[h * 225 + (i.y - j.y + 7) * 15 + i.x - j.x + 7];
}

static double ref_head_scale(POINT)
{
    UNUSED;
    return s * gain[h];
}

static double ref_decay(POINT)
{
    UNUSED;
    const double distance = q - k;
    return s / (1 + distance * distance / 8);
}

static double ref_sandwich(POINT)
{
    UNUSED;
    double sum = 0;
    for (int i = 1; i <= 6; i++)
        sum += cos((q - k) * exp(-log(10000) * i / 6));
    return s + sum * HEADS / 8 / (h + 1);
}

static double ref_graphormer(POINT)
{
    UNUSED;
    return s + spatial[h * 12 + hops[(b * N + q) * N + k]];
}

static const struct {
    const char *text;
    variant *ref;
    int n_q; /* 0: N */
} cases[] = {
    {"noop()", ref_noop, 0},
    {"causal()", ref_causal, 0},
    {"inverse_causal()", ref_inverse, 0},
    {"sliding_window(9)", ref_window, 0},
    {"last_keys(10)", ref_window, 0},
    {"dilated_window(12, 3)", ref_dilated, 0},
    {"global_window(6, is_global)", ref_global, 0},
    {"prefix_lm(11)", ref_prefix, 0},
    {"prefix_lm_batch(prefix)", ref_prefix_batch, 0},
    {"document(doc)", ref_document, 0},
    {"document_causal(doc)", ref_document_causal, 0},
    {"packed_causal(doc, start)", ref_document_causal, 0},
    {"shared_prefix(doc, start, shared)", ref_shared_prefix, 0},
    {"batchify(10)", ref_batchify, 0},
    {"flamingo(image, seen)", ref_flamingo, 0},
    {"natten_2d(8, 8, 3, 5)", ref_natten, 0},
    {"natten_tiled(4, 16, 3, 7, 2, 4)", ref_natten_tiled, 0},
    {"natten_morton(8, 8, 5, 3)", ref_natten_morton, 0},
    {"sta_axis(q, kv, KV, 10)", ref_sta_axis, 0},
    {"sta_2d(8, 8, 2, 1, 2, 3)", ref_sta_2d, 0},
    {"sta_3d(3, 4, 4, 1, 2, 1, 2, 1, 3)", ref_sta_3d, 48},
    {"sta_3d_text(3, 4, 4, 1, 2, 1, 2, 1, 3)", ref_sta_3d_text, 0},
    {"block_causal(7)", ref_block_causal, 0},
    {"block_diffusion(32, 8)", ref_block_diffusion, 0},
    {"speculative_tree(20, ancestor)", ref_tree, 8},
    {"transfusion(3, span)", ref_transfusion, 0},
    {"svg_spatial(5, 3, 1.5, 8)", ref_svg_spatial, 0},
    {"svg_temporal(4, 2, 6, 10)", ref_svg_temporal, 0},
    {"top_tiles(tiles, 8, 3)", ref_top_tiles, 0},
    {"relative_bias()", ref_relative, 0},
    {"alibi()", ref_alibi, 0},
    {"softcap(5)", ref_softcap, 0},
    {"t5_bias(t5, 32, 100)", ref_t5, 0},
    {"t5_causal_bias(t5, 32, 128)", ref_t5_causal, 0},
    {"relative_table(table, 4)", ref_table, 0},
    {"relative_table_2d(swin, 8, 8)", ref_swin, 0},
    {"head_scale(gain)", ref_head_scale, 0},
    {"distance_decay(0.125)", ref_decay, 0},
    {"sandwich(6)", ref_sandwich, 0},
    {"graphormer(spatial, hops)", ref_graphormer, 0},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

/* ---- comparison ---- */

static saccade_mod *compile(saccade_kind kind, const char *text, saccade_binding *bindings,
                            int32_t *n)
{
    saccade_error err = {0};
    saccade_mod *generic, *bound;
    saccade_capture captures[8];
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err))
        fail_msg("%s: %s", text, err.message);
    *n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < *n; i++) {
        int t = 0;
        captures[i] = saccade_mod_capture(generic, i);
        while (strcmp(tensors[t].name, captures[i].name) != 0)
            assert_true(++t < N_TENSORS);
        captures[i].dtype = tensors[t].dtype;
        bindings[i] = (saccade_binding){tensors[t].name,
                                        saccade_tensor_of(tensors[t].data, tensors[t].dtype,
                                                          tensors[t].rank, tensors[t].shape)};
    }
    if (saccade_mod_bind(generic, captures, *n, &bound, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static const saccade_prelude_entry *entry_of(const char *text)
{
    const size_t n = strcspn(text, "(");
    const saccade_prelude_entry *e;
    for (int32_t i = 0; (e = saccade_prelude(i)) != NULL; i++)
        if (strncmp(e->name, text, n) == 0 && e->name[n] == '\0')
            return e;
    fail_msg("%s is not in the prelude", text);
    return NULL;
}

static void compare_at(const mod_fn *fn, const eval_env *env, int c, eval_point at,
                       double *values)
{
    eval_report report = {.node = -1};
    const double got = eval_scalar(fn, env, &at, values, &report);
    const double want = cases[c].ref(at.b, at.h, at.q, at.kv, at.score);
    const double tolerance = fn->kind == SACCADE_MASK ? 0 : 2e-6 * (1 + fabs(want));
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s at b %d, h %d, q %d, kv %d: got %g, expected %g", cases[c].text, at.b,
                 at.h, at.q, at.kv, got, want);
    if (report.node >= 0)
        fail_msg("%s at q %d, kv %d: index %d outside of its tensor", cases[c].text, at.q,
                 at.kv, report.index);
}

static void compare(int c)
{
    const saccade_sizes sizes = {BATCH,
                                 HEADS,
                                 HEADS,
                                 cases[c].n_q ? cases[c].n_q : N,
                                 strstr(cases[c].text, "tree") ? 28
                                 : cases[c].n_q                ? cases[c].n_q
                                                               : N,
                                 8,
                                 8};
    saccade_binding bindings[8];
    saccade_tensor resolved[8];
    saccade_error err = {0};
    int32_t n = 0;
    saccade_mod *mod = compile(entry_of(cases[c].text)->kind, cases[c].text, bindings, &n);
    const mod_fn *fn = mod_function(mod);
    eval_env env = {.tensors = resolved};
    eval_sizes(&sizes, env.size);
    if (eval_resolve(fn, bindings, n, 1, resolved, &err))
        fail_msg("%s: %s", cases[c].text, err.message);
    double *values = calloc(fn->n_nodes, sizeof *values);
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++)
            for (int q = 0; q < sizes.Q; q++)
                for (int k = 0; k < sizes.KV; k++) {
                    const eval_point at = {b, h, q, k, (q * 13 + k * 5 + h) % 17 / 4.0 - 2};
                    compare_at(fn, &env, c, at, values);
                }
    free(values);
    saccade_mod_destroy(mod);
}

static void variants_match_brute_force(void **state)
{
    (void)state;
    for (int c = 0; c < N_CASES; c++)
        compare(c);
}

/* Numbers that a caller writes as ints make no int of a formula's product, which would wrap. */
static void an_int_rate_does_not_wrap(void **state)
{
    static const int32_t distances[] = {1, 46341, 65536, 1 << 20};
    const saccade_sizes sizes = {1, 1, 1, 1 << 21, 1 << 21, 8, 8};
    saccade_binding bindings[1];
    eval_env env = {.tensors = NULL};
    int32_t n = 0;
    (void)state;
    saccade_mod *mod = compile(SACCADE_SCORE, "distance_decay(1)", bindings, &n);
    const mod_fn *fn = mod_function(mod);
    double *values = calloc(fn->n_nodes, sizeof *values);
    assert_non_null(values);
    eval_sizes(&sizes, env.size);
    for (size_t i = 0; i < sizeof distances / sizeof distances[0]; i++) {
        const double d = distances[i], want = 3 / (1 + d * d);
        const eval_point at = {0, 0, distances[i], 0, 3};
        eval_report report = {.node = -1};
        const double got = eval_scalar(fn, &env, &at, values, &report);
        if (!(fabs(got - want) <= 2e-6 * want))
            fail_msg("distance %d: got %g, expected %g", distances[i], got, want);
    }
    free(values);
    saccade_mod_destroy(mod);
}

static void variants_print_and_read_back(void **state)
{
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        saccade_binding bindings[8];
        int32_t n;
        saccade_mod *mod = compile(entry_of(cases[c].text)->kind, cases[c].text, bindings, &n);
        round_trip_check(mod);
        saccade_mod_destroy(mod);
    }
}

static void every_variant_is_tested_and_described(void **state)
{
    (void)state;
    const saccade_prelude_entry *e;
    for (int32_t i = 0; (e = saccade_prelude(i)) != NULL; i++) {
        const size_t n = strlen(e->name);
        int is_tested = 0;
        for (int c = 0; c < N_CASES; c++)
            is_tested |= strncmp(cases[c].text, e->name, n) == 0 && cases[c].text[n] == '(';
        if (!is_tested)
            fail_msg("%s has no brute force", e->name);
        assert_true(strncmp(e->signature, e->name, n) == 0 && e->signature[n] == '(');
        if (strchr(e->comment, ';') == NULL || strlen(e->comment) < 12)
            fail_msg("%s: comment '%s' is not 'formula; source'", e->name, e->comment);
    }
    assert_null(saccade_prelude(-1));
    assert_null(saccade_prelude(1000));
}

/* Definitions are found by their first words and parsed one by one: as many, and the same, as
   one parse of the whole text finds. */
static void definitions_are_those_of_one_parse(void **state)
{
    ast_source whole = {.text = mod_prelude_files[0].text,
                        .bytes = mod_prelude_files[0].bytes,
                        .is_prelude = true};
    arena memory;
    int32_t n = 0;
    (void)state;
    arena_init(&memory);
    assert_int_equal(parser_run(&whole, &memory, NULL), SACCADE_OK);
    for (const ast_def *def = whole.body.defs; def != NULL; def = def->next, n++) {
        const saccade_prelude_entry *e = saccade_prelude(n);
        const ast_def *found;
        uint32_t looked_at = 0;
        assert_non_null(e);
        assert_string_equal(e->name, def->name);
        assert_string_equal(e->signature, def->signature);
        assert_string_equal(e->comment, def->comment);
        assert_int_equal(e->kind, def->kind);
        assert_int_equal(prelude_find(def->name, &found, &looked_at, NULL), SACCADE_OK);
        assert_int_equal(looked_at, n);
        assert_memory_equal(&found->place, &def->place, sizeof def->place);
        assert_int_equal(found->body.n_statements, def->body.n_statements);
        assert_memory_equal(&found->body.result->place, &def->body.result->place,
                            sizeof def->place);
    }
    assert_null(saccade_prelude(n));
    arena_free(&memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variants_match_brute_force),
        cmocka_unit_test(an_int_rate_does_not_wrap),
        cmocka_unit_test(variants_print_and_read_back),
        cmocka_unit_test(every_variant_is_tested_and_described),
        cmocka_unit_test(definitions_are_those_of_one_parse),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
