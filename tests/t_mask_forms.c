/* Everything a block mask turns into: index tensors there and back, dense bytes, and, or, not,
   windows, pictures; what it says of changed captures and of a budget; and that a failing
   allocation harms nothing. All against brute force over positions. */
#include "mask/mask.h"
#include "support/fail_alloc.h"
#include "support/mask_brute.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int32_t doc[600];
static const int64_t doc_shape[1] = {600};
static const saccade_sizes sizes = {2, 2, 2, 205, 170, 8, 8};
enum { BQ = 32, BK = 16, ROWS = 7, COLUMNS = 11 };

static saccade_binding doc_binding(void)
{
    return (saccade_binding){"doc", saccade_tensor_of(doc, SACCADE_I32, 1, doc_shape)};
}

static void fill_docs(int length)
{
    for (int i = 0; i < 600; i++)
        doc[i] = i / length;
}

static saccade_block_mask *make(const char *text, const saccade_sizes *s, int64_t budget)
{
    const saccade_block_mask_options options = {
        .size = sizeof options, .block_q = BQ, .block_kv = BK, .evaluation_budget = budget};
    const saccade_binding binding = doc_binding();
    const int n = strstr(text, "doc") != NULL;
    saccade_error err = {0};
    saccade_block_mask *mask;
    saccade_mod *mod = brute_mod(text, &binding, n);
    if (saccade_block_mask_create(NULL, mod, s, NULL, &binding, n, &options, &mask, &err))
        fail_msg("%s: %s %s", text, err.where, err.message);
    saccade_mod_destroy(mod);
    return mask;
}

static uint8_t *dense(const saccade_block_mask *mask, const saccade_sizes *s)
{
    uint8_t *live = malloc((size_t)(s->B * s->H * s->Q * s->KV));
    assert_int_equal(saccade_block_mask_to_dense(mask, live, NULL), SACCADE_OK);
    return live;
}

static const char *const texts[] = {
    "q >= kv",
    "doc[q] == doc[kv]",
    "q >= kv && doc[q] == doc[kv]",
    "(q + kv) % 3 == 0",
    "h == 0 ? q >= kv : kv < 50",
    "q + b * 40 >= kv + Q - KV",
    "false",
    "true",
};
enum { N_TEXTS = sizeof texts / sizeof texts[0] };

static uint8_t *brute_of(const char *text, const saccade_sizes *s)
{
    const saccade_binding binding = doc_binding();
    const int n = strstr(text, "doc") != NULL;
    saccade_mod *mod = brute_mod(text, &binding, n);
    uint8_t *live = brute_dense(mod, s, NULL, &binding, n);
    saccade_mod_destroy(mod);
    return live;
}

static void dense_is_brute_force(void **state)
{
    (void)state;
    for (int i = 0; i < N_TEXTS; i++) {
        saccade_block_mask *mask = make(texts[i], &sizes, 0);
        uint8_t *live = dense(mask, &sizes), *want = brute_of(texts[i], &sizes);
        assert_memory_equal(live, want, sizes.B * sizes.H * sizes.Q * sizes.KV);
        free(live);
        free(want);
        saccade_block_mask_destroy(mask);
    }
}

/* ---- composition ---- */

static void check_pair(int i, int j)
{
    const int64_t n = sizes.B * sizes.H * sizes.Q * sizes.KV;
    char name[200];
    saccade_block_mask *a = make(texts[i], &sizes, 0), *b = make(texts[j], &sizes, 0);
    saccade_block_mask *both, *either, *neither;
    uint8_t *x = brute_of(texts[i], &sizes), *y = brute_of(texts[j], &sizes);
    uint8_t *z = malloc((size_t)n);
    snprintf(name, sizeof name, "%s | %s", texts[i], texts[j]);
    assert_int_equal(saccade_block_mask_and(a, b, &both, NULL), SACCADE_OK);
    assert_int_equal(saccade_block_mask_or(a, b, &either, NULL), SACCADE_OK);
    assert_int_equal(saccade_block_mask_not(either, &neither, NULL), SACCADE_OK);
    for (int64_t k = 0; k < n; k++)
        z[k] = x[k] & y[k];
    brute_compare(both, &sizes, BQ, BK, z, name);
    for (int64_t k = 0; k < n; k++)
        z[k] = x[k] | y[k];
    brute_compare(either, &sizes, BQ, BK, z, name);
    for (int64_t k = 0; k < n; k++)
        z[k] = !z[k];
    brute_compare(neither, &sizes, BQ, BK, z, name);
    saccade_block_mask *const made[] = {a, b, both, either, neither};
    for (size_t k = 0; k < sizeof made / sizeof made[0]; k++)
        saccade_block_mask_destroy(made[k]);
    free(x);
    free(y);
    free(z);
}

static void composition_is_exact(void **state)
{
    (void)state;
    for (int i = 0; i < N_TEXTS; i++)
        for (int j = 0; j < N_TEXTS; j++)
            check_pair(i, j);
}

static void window_is_exact(void **state)
{
    static const int64_t cuts[][4] = {{0, 205, 0, 170},
                                      {204, 1, 0, 170},
                                      {33, 100, 17, 60},
                                      {150, 300, 0, 400},
                                      {-20, 60, -5, 300}};
    (void)state;
    for (int i = 0; i < N_TEXTS; i++)
        for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
            const int64_t *cut = cuts[c];
            /* the mask over a larger range of positions, with Q and KV as they were */
            int32_t q0 = (int32_t)cut[0], kv0 = (int32_t)cut[2];
            const saccade_tensor q_at = saccade_tensor_of(&q0, SACCADE_I32, 0, NULL);
            const saccade_tensor kv_at = saccade_tensor_of(&kv0, SACCADE_I32, 0, NULL);
            const saccade_positions at = {
                .size = sizeof at, .q_offset = &q_at, .kv_offset = &kv_at};
            saccade_sizes s = sizes;
            s.Q = cut[1];
            s.KV = cut[3];
            const char *text = i == 5 ? "q + b * 40 >= kv + 205 - 170" : texts[i];
            const saccade_binding binding = doc_binding();
            const int n = strstr(text, "doc") != NULL;
            saccade_mod *mod = brute_mod(text, &binding, n);
            uint8_t *want = brute_dense(mod, &s, &at, &binding, n);
            saccade_block_mask *whole = make(texts[i], &sizes, 0), *window;
            assert_int_equal(
                saccade_block_mask_window(whole, cut[0], cut[1], cut[2], cut[3], &window, NULL),
                SACCADE_OK);
            brute_compare(window, &s, BQ, BK, want, texts[i]);
            uint8_t *live = dense(window, &s);
            assert_memory_equal(live, want, s.B * s.H * s.Q * s.KV);
            saccade_block_mask_destroy(whole);
            saccade_block_mask_destroy(window);
            saccade_mod_destroy(mod);
            free(want);
            free(live);
        }
}

/* ---- index tensors ---- */

typedef struct tensors {
    saccade_block_indices x;
    int32_t counts[4 * ROWS], indices[4 * ROWS * COLUMNS];
    int32_t full_counts[4 * ROWS], full_indices[4 * ROWS * COLUMNS];
} tensors;

static void export_to(const saccade_block_mask *mask, tensors *t)
{
    memset(t, 0, sizeof *t);
    assert_int_equal(saccade_block_mask_export(mask, 0, &t->x, NULL), SACCADE_OK);
    assert_int_equal(t->x.rows, ROWS);
    assert_int_equal(t->x.columns, COLUMNS);
    t->x.kv_num_blocks = t->counts;
    t->x.kv_indices = t->indices;
    t->x.full_kv_num_blocks = t->full_counts;
    t->x.full_kv_indices = t->full_indices;
    assert_int_equal(saccade_block_mask_export(mask, 0, &t->x, NULL), SACCADE_OK);
}

static saccade_status import_from(const tensors *t, const char *text, saccade_block_mask **out,
                                  saccade_error *err)
{
    const saccade_binding binding = doc_binding();
    const int n = text && strstr(text, "doc") != NULL;
    saccade_mod *mod = text ? brute_mod(text, &binding, n) : NULL;
    const saccade_status status =
        saccade_block_mask_import(NULL, &t->x, mod, &sizes, NULL, &binding, n, out, err);
    saccade_mod_destroy(mod);
    return status;
}

static void indices_there_and_back(void **state)
{
    static tensors t, again;
    (void)state;
    for (int i = 0; i < N_TEXTS; i++) {
        saccade_block_mask *mask = make(texts[i], &sizes, 0), *back, *negated;
        uint8_t *want = brute_of(texts[i], &sizes);
        export_to(mask, &t);
        assert_int_equal(import_from(&t, texts[i], &back, NULL), SACCADE_OK);
        brute_compare(back, &sizes, BQ, BK, want, texts[i]);
        export_to(back, &again);
        assert_memory_equal(t.counts, again.counts, sizeof t.counts);
        assert_memory_equal(t.indices, again.indices, sizeof t.indices);
        assert_int_equal(saccade_block_mask_not(back, &negated, NULL), SACCADE_OK);
        const int64_t n = sizes.B * sizes.H * sizes.Q * sizes.KV;
        uint8_t *live = dense(negated, &sizes);
        for (int64_t k = 0; k < n; k++)
            assert_int_equal(live[k], !want[k]);
        free(live);
        free(want);
        saccade_block_mask_destroy(mask);
        saccade_block_mask_destroy(back);
        saccade_block_mask_destroy(negated);
    }
}

/* Imported blocks without a mod, composed with a mask that has one. */
static void imported_blocks_compose(void **state)
{
    static tensors t;
    const int64_t n = sizes.B * sizes.H * sizes.Q * sizes.KV;
    (void)state;
    saccade_block_mask *causal = make("q >= kv", &sizes, 0), *docs, *blocks, *joint[2], *window;
    docs = make("doc[q] == doc[kv]", &sizes, 0);
    export_to(docs, &t);
    assert_int_equal(import_from(&t, NULL, &blocks, NULL), SACCADE_OK);
    assert_int_equal(saccade_block_mask_and(causal, blocks, &joint[0], NULL), SACCADE_OK);
    assert_int_equal(saccade_block_mask_or(blocks, causal, &joint[1], NULL), SACCADE_OK);
    uint8_t *x = dense(causal, &sizes), *y = dense(blocks, &sizes);
    uint8_t *both = dense(joint[0], &sizes), *either = dense(joint[1], &sizes);
    for (int64_t k = 0; k < n; k++) {
        assert_int_equal(both[k], x[k] & y[k]);
        assert_int_equal(either[k], x[k] | y[k]);
    }
    /* finer tiles inside the imported ones, but no others */
    const mask_runs *runs;
    assert_int_equal(mask_runs_for(blocks, 8, 16, 0, &runs, NULL), SACCADE_OK);
    assert_int_equal(runs->rows, 26);
    assert_int_equal(mask_runs_for(blocks, 24, 16, 0, &runs, NULL), SACCADE_EINVAL);
    /* windows on the grid, and no others */
    assert_int_equal(saccade_block_mask_window(blocks, 64, 100, 16, 90, &window, NULL),
                     SACCADE_OK);
    saccade_sizes s = sizes;
    s.Q = 100;
    s.KV = 90;
    uint8_t *cut = dense(window, &s);
    for (int64_t q = 0; q < 100; q++)
        for (int64_t kv = 0; kv < 90; kv++)
            assert_int_equal(cut[q * 90 + kv], y[(q + 64) * sizes.KV + kv + 16]);
    saccade_block_mask_destroy(window);
    assert_int_equal(saccade_block_mask_window(blocks, 5, 10, 0, 90, &window, NULL),
                     SACCADE_EINVAL);
    assert_int_equal(saccade_block_mask_window(blocks, 0, 300, 0, 90, &window, NULL),
                     SACCADE_EINVAL);
    saccade_block_mask *const made[] = {causal, docs, blocks, joint[0], joint[1]};
    for (size_t k = 0; k < sizeof made / sizeof made[0]; k++)
        saccade_block_mask_destroy(made[k]);
    uint8_t *const arrays[] = {x, y, both, either, cut};
    for (size_t k = 0; k < sizeof arrays / sizeof arrays[0]; k++)
        free(arrays[k]);
}

/* One list for all heads and batches, whose mod differs: it is held against each of them. */
static void imported_lists_are_of_every_head(void **state)
{
    static const struct {
        const char *text;
        int32_t q_offset[2];
        int is_fine;
    } rows[] = {{"q < 8 && kv < 8", {0, 0}, 1},
                {"h == 0 ? q < 8 && kv < 8 : true", {0, 0}, 0},
                {"b == 0 ? q < 8 && kv < 8 : true", {0, 0}, 0},
                {"q < 8 && kv < 8", {0, -8}, 0},
                {"q < 8 && kv < 8", {-8, -8}, 0}};
    static const saccade_sizes two = {2, 2, 2, 16, 16, 8, 8};
    const int64_t batches[1] = {2};
    int32_t none[2] = {0, 0}, full[2] = {1, 0}, blocks[4] = {0, 0, 0, 0};
    const saccade_block_indices first = {1, 1, 2, 2, 8, 8, none, blocks, full, blocks};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_block_mask *lists, *even, *both = NULL;
        saccade_error err = {.message = ""};
        int32_t offset[2] = {rows[i].q_offset[0], rows[i].q_offset[1]};
        const saccade_tensor t = saccade_tensor_of(offset, SACCADE_I32, 1, batches);
        const saccade_positions at = {.size = sizeof at, .q_offset = &t};
        saccade_block_mask_options o;
        saccade_block_mask_options_init(&o);
        o.block_q = o.block_kv = 8;
        saccade_mod *mod = brute_mod(rows[i].text, NULL, 0);
        saccade_mod *other = brute_mod("kv % 2 == 0", NULL, 0);
        assert_int_equal(
            saccade_block_mask_import(NULL, &first, mod, &two, &at, NULL, 0, &lists, &err),
            SACCADE_OK);
        assert_int_equal(
            saccade_block_mask_create(NULL, other, &two, &at, NULL, 0, &o, &even, &err),
            SACCADE_OK);
        const saccade_status got = saccade_block_mask_or(lists, even, &both, &err);
        if (got != (rows[i].is_fine ? SACCADE_OK : SACCADE_EINVAL)
            || (got && !strstr(err.message, "their mod contradicts")))
            fail_msg("%s: got %d '%s'", rows[i].text, got, err.message);
        for (int64_t k = 0; both && k < 4; k++) {
            uint8_t *live = dense(both, &two);
            for (int64_t q = 0; q < 16; q++)
                for (int64_t kv = 0; kv < 16; kv++)
                    assert_int_equal(live[(k * 16 + q) * 16 + kv],
                                     (q < 8 && kv < 8) || kv % 2 == 0);
            free(live);
        }
        saccade_block_mask_destroy(both);
        saccade_block_mask_destroy(lists);
        saccade_block_mask_destroy(even);
        saccade_mod_destroy(mod);
        saccade_mod_destroy(other);
    }
}

/* Of two imported masks the finer blocks count, whichever comes first. */
static void imported_block_sizes_may_differ(void **state)
{
    static tensors t;
    int32_t one = 1, zero = 0;
    const saccade_block_indices coarse = {1, 1, 1, 1, 256, 256, &one, &zero, NULL, NULL};
    saccade_block_mask *docs = make("doc[q] == doc[kv]", &sizes, 0), *fine, *all, *both[2];
    (void)state;
    export_to(docs, &t);
    assert_int_equal(import_from(&t, NULL, &fine, NULL), SACCADE_OK);
    assert_int_equal(
        saccade_block_mask_import(NULL, &coarse, NULL, &sizes, NULL, NULL, 0, &all, NULL),
        SACCADE_OK);
    assert_int_equal(saccade_block_mask_and(fine, all, &both[0], NULL), SACCADE_OK);
    assert_int_equal(saccade_block_mask_and(all, fine, &both[1], NULL), SACCADE_OK);
    uint8_t *want = dense(fine, &sizes);
    for (int i = 0; i < 2; i++) {
        uint8_t *got = dense(both[i], &sizes);
        assert_memory_equal(got, want, sizes.B * sizes.H * sizes.Q * sizes.KV);
        free(got);
    }
    free(want);
    saccade_block_mask *const made[] = {docs, fine, all, both[0], both[1]};
    for (size_t k = 0; k < sizeof made / sizeof made[0]; k++)
        saccade_block_mask_destroy(made[k]);
}

static void too_many_rows_are_refused(void **state)
{
    static const int64_t most = (int64_t)1 << 30;
    const saccade_sizes huge[] = {
        {1, 1, 1, most, 1, 8, 8}, {1, 1, 1, 1, most, 8, 8}, {most, most, 1, 1, 1, 8, 8}};
    const saccade_block_mask_options ones = {.size = sizeof ones, .block_q = 1, .block_kv = 1};
    saccade_mod *mod = brute_mod("b + h + q >= kv", NULL, 0);
    (void)state;
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++) {
        saccade_block_mask *out;
        assert_int_equal(
            saccade_block_mask_create(NULL, mod, &huge[i], NULL, NULL, 0, &ones, &out, NULL),
            SACCADE_ELIMIT);
    }
    saccade_mod_destroy(mod);
}

/* Rows of all heads whose number wraps to 0, to 64 and to less than nothing. */
static void too_many_imported_rows_are_refused(void **state)
{
    static int32_t counts[64], indices[64];
    static const int64_t lines[][3] = {{1 << 22, 1 << 22, 1 << 20},
                                       {(1 << 22) + 1, 1 << 22, 1 << 20},
                                       {1 << 22, 1 << 22, 1 << 19},
                                       {1 << 30, 1, 1},
                                       {1, 1, 1 << 30}};
    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        const saccade_sizes s = {lines[i][0], lines[i][1], 1, lines[i][2], 1, 8, 8};
        const saccade_block_indices x = {.B = s.B,
                                         .H = s.H,
                                         .rows = s.Q,
                                         .columns = 1,
                                         .block_q = 1,
                                         .block_kv = 1,
                                         .kv_num_blocks = counts,
                                         .kv_indices = indices};
        saccade_block_mask *out;
        assert_int_equal(
            saccade_block_mask_import(NULL, &x, NULL, &s, NULL, NULL, 0, &out, NULL),
            SACCADE_ELIMIT);
    }
}

static void hostile_indices_are_refused(void **state)
{
    static tensors good, bad;
    saccade_block_mask *mask = make("doc[q] == doc[kv]", &sizes, 0), *out = NULL;
    (void)state;
    export_to(mask, &good);
    for (int i = 0; i < 9; i++) {
        saccade_error err = {0};
        export_to(mask, &bad);
        switch (i) {
        case 0:
            bad.counts[2] = COLUMNS + 1;
            break;
        case 1:
            bad.counts[2] = -1;
            break;
        case 2:
            bad.full_counts[1] = INT32_MAX;
            break;
        case 3:
            bad.indices[0] = -3;
            break;
        case 4:
            bad.indices[0] = COLUMNS;
            break;
        case 5:
            bad.counts[0] = 2;
            bad.indices[0] = bad.indices[1] = 4;
            break;
        case 6:
            bad.counts[0] = bad.full_counts[0] = 1;
            bad.indices[0] = bad.full_indices[0] = 4;
            break;
        case 7:
            bad.x.rows = ROWS + 1;
            break;
        case 8:
            bad.x.block_q = 0;
            break;
        }
        assert_int_equal(import_from(&bad, NULL, &out, &err), SACCADE_EINVAL);
        assert_null(out);
        assert_true(strlen(err.message) > 20 && !strchr(err.message, '\n'));
    }
    saccade_block_mask_destroy(mask);
}

/* ---- budget, change, pictures ---- */

static void budget_is_sound(void **state)
{
    static const char *const hard = "(q * q + kv * 7) % 11 < 5";
    uint8_t *want = brute_of(hard, &sizes);
    (void)state;
    for (int64_t budget = 0; budget <= 40000; budget = 4 * budget + 500) {
        saccade_block_mask *mask = make(hard, &sizes, budget ? budget : SACCADE_EVALUATE_NONE);
        saccade_block_mask_stats s;
        saccade_block_mask_stats_init(&s);
        assert_int_equal(saccade_block_mask_get_stats(mask, &s, NULL), SACCADE_OK);
        uint8_t *live = dense(mask, &sizes);
        assert_memory_equal(live, want, sizes.B * sizes.H * sizes.Q * sizes.KV);
        assert_true(s.evaluated_positions <= budget);
        assert_int_equal(s.proven + s.evaluated + s.unknown, s.blocks);
        free(live);
        saccade_block_mask_destroy(mask);
    }
    free(want);
    saccade_block_mask *none =
        make("kv % 2 == 0 && kv % 2 == 1", &sizes, SACCADE_EVALUATE_NONE);
    saccade_block_mask_stats s;
    saccade_block_mask_stats_init(&s);
    assert_int_equal(saccade_block_mask_get_stats(none, &s, NULL), SACCADE_OK);
    assert_true(s.unknown > 0); /* live by lack of proof */
    assert_true(s.partial > 0);
    saccade_block_mask_destroy(none);
    saccade_block_mask *all = make("kv % 2 == 0 && kv % 2 == 1", &sizes, 0); /* the default */
    assert_int_equal(saccade_block_mask_get_stats(all, &s, NULL), SACCADE_OK);
    assert_int_equal(s.unknown, 0);
    assert_int_equal(s.partial, 0);
    saccade_block_mask_destroy(all);
}

static void change_is_seen(void **state)
{
    (void)state;
    fill_docs(50);
    saccade_block_mask *mask = make("doc[q] == doc[kv]", &sizes, 0);
    assert_false(saccade_block_mask_is_stale(mask));
    fill_docs(33);
    assert_true(saccade_block_mask_is_stale(mask));
    assert_int_equal(saccade_block_mask_update(mask, NULL), SACCADE_OK);
    assert_false(saccade_block_mask_is_stale(mask));
    uint8_t *want = brute_of("doc[q] == doc[kv]", &sizes);
    brute_compare(mask, &sizes, BQ, BK, want, "after update");
    free(want);
    saccade_block_mask_destroy(mask);
    fill_docs(50);
}

static int copies_freed;

static void count_free(void *data)
{
    (void)data;
    copies_freed++;
}

static void device_copies_go_with_the_mask(void **state)
{
    static int key, copy;
    saccade_block_mask *mask = make("q >= kv", &sizes, 0);
    (void)state;
    mask_device_copy *slot = mask_device_slot(mask, &key);
    assert_ptr_equal(slot, mask_device_slot(mask, &key));
    *slot = (mask_device_copy){&copy, count_free};
    copies_freed = 0;
    assert_int_equal(saccade_block_mask_update(mask, NULL), SACCADE_OK);
    assert_int_equal(copies_freed, 1);
    slot->data = &copy;
    saccade_block_mask_destroy(mask);
    assert_int_equal(copies_freed, 2);
}

static void pictures_are_drawn(void **state)
{
    static const char want[] = "██▒▒▒▒    \n██████▒▒▒▒\n██████████\n"
                               "96 x 80 positions, blocks of 32 x 16: ";
    const saccade_sizes s = {1, 1, 1, 96, 80, 8, 8};
    saccade_block_mask *mask = make("q + 16 > kv", &s, 0);
    void *bytes;
    size_t size;
    (void)state;
    assert_int_equal(
        saccade_block_mask_render(mask, 0, 0, SACCADE_TEXT, 0, &bytes, &size, NULL),
        SACCADE_OK);
    assert_memory_equal(bytes, want, strlen(want));
    saccade_free(bytes);
    assert_int_equal(saccade_block_mask_render(mask, 0, 0, SACCADE_SVG, 0, &bytes, &size, NULL),
                     SACCADE_OK);
    assert_non_null(strstr(bytes, "</svg>"));
    saccade_free(bytes);
    saccade_error err = {0};
    const saccade_status png =
        saccade_block_mask_render(mask, 0, 0, SACCADE_PNG, 0, &bytes, &size, &err);
    if (png == SACCADE_OK) {
        assert_memory_equal(bytes, "\x89PNG\r\n", 6);
        saccade_free(bytes);
    } else {
        assert_int_equal(png, SACCADE_EBACKEND);
    }
    assert_int_equal(saccade_block_mask_render(mask, 0, 1, SACCADE_SVG, 0, &bytes, &size, NULL),
                     SACCADE_EINVAL);
    saccade_block_mask_destroy(mask);
}

/* A mask that is far higher than wide is drawn coarser: 2048 pixels, four lines a character. */
static void high_pictures_are_bounded(void **state)
{
    const saccade_sizes s = {1, 1, 1, 1 << 22, 40 * BK, 8, 8};
    saccade_block_mask *mask = make("q >= kv", &s, 0);
    char *text;
    void *bytes;
    size_t size, lines = 0;
    (void)state;
    assert_int_equal(
        saccade_block_mask_render(mask, 0, 0, SACCADE_TEXT, 50, &bytes, &size, NULL),
        SACCADE_OK);
    text = bytes;
    for (size_t i = 0; i < size; i++)
        lines += text[i] == '\n';
    assert_int_equal(lines, 4 * 50 + 1);
    saccade_free(bytes);
    assert_int_equal(saccade_block_mask_render(mask, 0, 0, SACCADE_SVG, 0, &bytes, &size, NULL),
                     SACCADE_OK);
    assert_non_null(strstr(bytes, " height=\"2040\" ")); /* of 12 pixels each */
    saccade_free(bytes);
    const saccade_status png =
        saccade_block_mask_render(mask, 0, 0, SACCADE_PNG, 0, &bytes, &size, NULL);
    assert_true(png == SACCADE_OK || png == SACCADE_EBACKEND);
    if (png == SACCADE_OK)
        saccade_free(bytes);
    saccade_block_mask_destroy(mask);
}

/* ---- failing allocations ---- */

static saccade_status use_masks(void *arg, saccade_error *err)
{
    const saccade_block_mask_options options = {
        .size = sizeof options, .block_q = BQ, .block_kv = BK};
    const saccade_binding binding = doc_binding();
    const saccade_context_options one = {.size = sizeof one, .threads = 1};
    saccade_context *context = NULL;
    saccade_block_mask *a = NULL, *b = NULL, *c = NULL;
    const mask_runs *runs;
    void *bytes = NULL;
    size_t size;
    saccade_status status = saccade_context_create(&one, &context, err);
    if (!status)
        status = saccade_block_mask_create(context, arg, &sizes, NULL, &binding, 1, &options,
                                           &a, err);
    if (!status)
        status = saccade_block_mask_not(a, &b, err);
    if (!status)
        status = saccade_block_mask_window(b, 1, 50, 2, 60, &c, err);
    if (!status)
        status = mask_runs_for(c, 64, 64, 1, &runs, err);
    if (!status)
        status = saccade_block_mask_render(c, 0, 0, SACCADE_SVG, 0, &bytes, &size, err);
    if (!status)
        status = saccade_block_mask_update(a, err);
    saccade_free(bytes);
    saccade_block_mask_destroy(a);
    saccade_block_mask_destroy(b);
    saccade_block_mask_destroy(c);
    saccade_context_destroy(context);
    return status;
}

static void failing_allocations_harm_nothing(void **state)
{
    const saccade_binding binding = doc_binding();
    saccade_mod *mod = brute_mod("doc[q] == doc[kv] && (q * 3 + kv) % 7 < 5", &binding, 1);
    (void)state;
    assert_true(fail_alloc_sweep("block masks", use_masks, mod) > 50);
    saccade_mod_destroy(mod);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_is_brute_force),
        cmocka_unit_test(composition_is_exact),
        cmocka_unit_test(window_is_exact),
        cmocka_unit_test(indices_there_and_back),
        cmocka_unit_test(imported_blocks_compose),
        cmocka_unit_test(imported_lists_are_of_every_head),
        cmocka_unit_test(imported_block_sizes_may_differ),
        cmocka_unit_test(too_many_rows_are_refused),
        cmocka_unit_test(too_many_imported_rows_are_refused),
        cmocka_unit_test(hostile_indices_are_refused),
        cmocka_unit_test(budget_is_sound),
        cmocka_unit_test(change_is_seen),
        cmocka_unit_test(device_copies_go_with_the_mask),
        cmocka_unit_test(pictures_are_drawn),
        cmocka_unit_test(high_pictures_are_bounded),
        cmocka_unit_test(failing_allocations_harm_nothing),
    };
    fill_docs(50);
    return cmocka_run_group_tests_name("mask forms", tests, NULL, NULL);
}
