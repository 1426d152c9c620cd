/* Batches that share keys (saccade_prefix): the result is that of the same run without, whose
 * every batch names the shared pages itself, on every back end that is here. */
#include "support/device_case.h"
#include "support/run_case.h"
#include "support/tensor_place.h"

#include "plan/prefix.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum {
    MOST = 6,
    H = 8,
    HKV = 2,
    D = 64,
    PAGE = 16,
    PAGES = 24,
    KV = PAGES * PAGE,
    TENSORS = 16
};

typedef struct prefix_case {
    const char *mask, *score;
    saccade_dtype dtype;
    int64_t Q, page; /* the problem's */
    int n;           /* groups */
    int32_t groups[MOST + 1], shared[MOST], lengths[MOST];
    int has_sinks, is_plain_length; /* no batch is shorter than KV, and none says so */
} prefix_case;

static const prefix_case cases[] = {
    {"kv <= q",
     NULL,
     SACCADE_BF16,
     1,
     PAGE,
     2,
     {0, 4, 6},
     {256, 64},
     {300, 257, 384, 260, 64, 90},
     1,
     0},
    {"kv <= q && (kv < 144 || kv % 3 != 1)",
     "softcap(5.0)",
     SACCADE_F32,
     3,
     PAGE,
     3,
     {0, 3, 3, 6},
     {144, 32, 0},
     {200, 147, 150, 3, 40, 17},
     0,
     0},
    {NULL, NULL, SACCADE_BF16, 1, SACCADE_PAGE_ANY, 1, {0, 6}, {320}, {0}, 1, 1},
    {NULL,
     "score + 0.01 * h * kv",
     SACCADE_F16,
     40,
     PAGE,
     2,
     {0, 1, 6},
     {16, 160},
     {16, 200, 170, 384, 160, 161},
     0,
     0},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* [B][Q][heads][dim] seen as [B, heads, Q, dim]. */
static saccade_tensor rows_of(saccade_dtype dtype, int64_t Q, int64_t dim)
{
    const int64_t shape[4] = {MOST, Q, H, dim};
    saccade_tensor t = run_make(dtype, dim ? 4 : 3, shape);
    t.shape[1] = H, t.shape[2] = Q;
    t.stride[1] = dim ? dim : 1, t.stride[2] = H * (dim ? dim : 1);
    return t;
}

typedef struct inputs {
    int32_t whole[MOST * PAGES]; /* every batch names the pages that it shares */
    int32_t first[MOST * PAGES]; /* a group's first alone: others' entries lead nowhere */
    int32_t last[MOST];          /* q_offset */
    saccade_tensor q, k, v, sinks;
} inputs;

static void make(const prefix_case *c, inputs *x)
{
    const int64_t heads = H, pool[4] = {MOST * PAGES, HKV, PAGE, D};
    for (int i = 0; i < MOST * PAGES; i++)
        x->whole[i] = (i * 35 + 11) % (MOST * PAGES);
    memcpy(x->first, x->whole, sizeof x->first);
    for (int g = 0; g < c->n; g++)
        for (int b = c->groups[g] + 1; b < c->groups[g + 1]; b++)
            for (int j = 0; j < c->shared[g] / PAGE; j++) {
                x->whole[b * PAGES + j] = x->whole[c->groups[g] * PAGES + j];
                x->first[b * PAGES + j] = -7;
            }
    for (int b = 0; b < MOST; b++)
        x->last[b] = (c->is_plain_length ? KV : c->lengths[b]) - (int32_t)c->Q;
    x->q = rows_of(c->dtype, c->Q, D);
    x->k = run_make(c->dtype, 4, pool);
    x->v = run_make(c->dtype, 4, pool);
    x->sinks = run_make(SACCADE_F32, 1, &heads);
    saccade_tensor *all[] = {&x->q, &x->k, &x->v, &x->sinks};
    for (int i = 0; i < 4; i++)
        run_randomise(all[i], (uint64_t)i + 1);
    for (int64_t i = 0; i < run_count(&x->q); i++)
        run_put(&x->q, i, 4 * run_get(&x->q, i));
}

static saccade_problem problem_of(const prefix_case *c, const char *backend)
{
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){MOST, H, HKV, c->Q, KV, D, D};
    p.dtype = c->dtype;
    p.backend = backend;
    p.page = c->page;
    p.sinks_dtype = c->has_sinks ? SACCADE_F32 : SACCADE_NONE;
    p.head_max = 1;
    return p;
}

typedef struct results {
    saccade_tensor out, lse, row_max, head_max;
} results;

static void make_results(const prefix_case *c, results *r)
{
    const int64_t heads[2] = {1, H};
    r->out = rows_of(c->dtype, c->Q, D);
    r->lse = rows_of(SACCADE_F32, c->Q, 0);
    r->row_max = rows_of(SACCADE_F32, c->Q, 0);
    r->head_max = run_make(SACCADE_F32, 2, heads);
}

static void drop_results(results *r)
{
    free(r->out.data), free(r->lse.data), free(r->row_max.data), free(r->head_max.data);
}

/* Numbers of this many i32. */
static saccade_tensor ints(const int32_t *at, int32_t rank, int64_t n, int64_t m)
{
    const int64_t shape[2] = {n, m};
    return saccade_tensor_of((void *)(uintptr_t)at, SACCADE_I32, rank, shape);
}

static void solve(const prefix_case *c, const inputs *x, const char *backend, int is_shared,
                  results *r)
{
    saccade_error err = {0};
    saccade_problem problem = problem_of(c, backend);
    saccade_mod *mods[2] = {c->mask ? case_mod(SACCADE_MASK, c->mask) : NULL,
                            c->score ? case_mod(SACCADE_SCORE, c->score) : NULL};
    saccade_plan *plan = NULL;
    tensor_place p = {.is_on_device = strcmp(backend, "cuda") == 0};
    const saccade_tensor table = ints(is_shared ? x->first : x->whole, 2, MOST, PAGES);
    const saccade_tensor len = ints(c->lengths, 1, MOST, 0), last = ints(x->last, 1, MOST, 0);
    const saccade_tensor groups = ints(c->groups, 1, c->n + 1, 0);
    const saccade_tensor shared = ints(c->shared, 1, c->n, 0);
    saccade_positions at;
    saccade_pages pages;
    saccade_prefix prefix;
    saccade_forward_args a;
    problem.mask = mods[0], problem.score = mods[1];
    problem.shared_prefix = is_shared;
    saccade_positions_init(&at);
    saccade_pages_init(&pages);
    saccade_prefix_init(&prefix);
    saccade_forward_args_init(&a);
    if (saccade_plan_create(NULL, &problem, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s %s", backend, err.where, err.message);
    at.q_offset = place_put(&p, &last, 0);
    at.kv_len = c->is_plain_length ? NULL : place_put(&p, &len, 0);
    pages.table = place_put(&p, &table, 0);
    prefix.cu_groups = place_put(&p, &groups, 0);
    prefix.lengths = place_put(&p, &shared, 0);
    a.q = place_put(&p, &x->q, 0), a.k = place_put(&p, &x->k, 0), a.v = place_put(&p, &x->v, 0);
    a.out = place_put(&p, &r->out, 1), a.lse = place_put(&p, &r->lse, 1);
    a.row_max = place_put(&p, &r->row_max, 1), a.head_max = place_put(&p, &r->head_max, 1);
    a.sinks = c->has_sinks ? place_put(&p, &x->sinks, 0) : NULL;
    a.positions = &at;
    a.pages = &pages;
    a.prefix = is_shared ? &prefix : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, &problem.sizes);
    a.workspace = place_room(&p, a.workspace_bytes);
    if (saccade_forward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s %s", backend, err.where, err.message);
    place_take_back(&p);
    place_leave(&p, a.workspace);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(mods[0]);
    saccade_mod_destroy(mods[1]);
}

/* Elements of dense data, whatever their order. */
static void compare(const char *what, const char *backend, int n, const saccade_tensor *got,
                    const saccade_tensor *want, double bound)
{
    for (int64_t i = 0; i < run_count(got); i++) {
        const double x = run_get(got, i), y = run_get(want, i);
        if (!(x == y || fabs(x - y) <= bound * (1 + fabs(y))))
            fail_msg("case %d, %s: %s %lld is %g, expected %g", n, backend, what, (long long)i,
                     x, y);
    }
}

static void is_as_without(void **state)
{
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    (void)state;
    const int n_backends = has_device() ? 3 : 2;
    for (int n = 0; n < CASES; n++) {
        const prefix_case *c = &cases[n];
        const double ulp = c->dtype == SACCADE_BF16  ? 0x1p-8
                           : c->dtype == SACCADE_F16 ? 0x1p-11
                                                     : 1e-6;
        results want;
        inputs x;
        make(c, &x);
        make_results(c, &want);
        solve(c, &x, "ref", 0, &want);
        for (int i = 0; i < n_backends; i++) {
            results got;
            make_results(c, &got);
            solve(c, &x, backends[i], 1, &got);
            const double bound = i ? 4 * ulp : 1.01 * ulp; /* ref: rounded once */
            compare("out", backends[i], n, &got.out, &want.out, bound);
            compare("lse", backends[i], n, &got.lse, &want.lse, 2e-5);
            compare("row_max", backends[i], n, &got.row_max, &want.row_max, 2e-5);
            compare("head_max", backends[i], n, &got.head_max, &want.head_max, 2e-5);
            drop_results(&got);
        }
        drop_results(&want);
        free(x.q.data), free(x.k.data), free(x.v.data), free(x.sinks.data);
    }
}

/* A page may be longer than all keys that a run has room for: its workspace is for these. */
static void stays_in_its_workspace(void **state)
{
    enum { LONG = 64, KEYS = 7, SHORT = 8, GUARD = 1 << 16, GUARD_BYTE = 0xa5 };
    static const char *const backends[] = {"ref", "cpu", "plain"};
    const int64_t of_q[4] = {1, 2, 1, D}, pool[4] = {1, 2, LONG, D};
    const int64_t v_pool[4] = {1, 2, LONG, SHORT};
    const int64_t of_out[4] = {1, 2, 1, SHORT};
    const int32_t zero[2] = {0, 0}, one[2] = {0, 1};
    const saccade_tensor q = run_make(SACCADE_F32, 4, of_q), k = run_make(SACCADE_F32, 4, pool),
                         v = run_make(SACCADE_F32, 4, v_pool),
                         out = run_make(SACCADE_F32, 4, of_out), table = ints(zero, 2, 1, 1),
                         groups = ints(one, 1, 2, 0), shared = ints(zero, 1, 1, 0);
    saccade_problem problem;
    saccade_pages pages;
    saccade_prefix prefix;
    saccade_forward_args a;
    (void)state;
    saccade_problem_init(&problem);
    saccade_pages_init(&pages);
    saccade_prefix_init(&prefix);
    saccade_forward_args_init(&a);
    problem.sizes = (saccade_sizes){1, 2, 2, 1, KEYS, D, SHORT};
    problem.page = LONG;
    problem.shared_prefix = 1;
    pages.table = &table, pages.KV = KEYS;
    prefix.cu_groups = &groups, prefix.lengths = &shared;
    a.q = &q, a.k = &k, a.v = &v, a.out = &out, a.pages = &pages, a.prefix = &prefix;
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan = NULL;
        problem.backend = backends[i];
        assert_int_equal(saccade_plan_create(NULL, &problem, &plan, &err), SACCADE_OK);
        a.workspace_bytes = saccade_plan_workspace(plan, &problem.sizes);
        a.workspace = aligned_alloc(64, (a.workspace_bytes + 63) / 64 * 64 + GUARD);
        assert_non_null(a.workspace);
        const unsigned char *behind = (unsigned char *)a.workspace + a.workspace_bytes;
        memset(a.workspace, GUARD_BYTE, a.workspace_bytes + GUARD);
        assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_OK);
        for (int n = 0; n < GUARD; n++)
            if (behind[n] != GUARD_BYTE)
                fail_msg("%s: byte %d behind the workspace was written", backends[i], n);
        free(a.workspace);
        saccade_plan_destroy(plan);
    }
    free(q.data), free(k.data), free(v.data), free(out.data);
}

/* ---- lists ---- */

/* Of B batches of Q rows: pieces of 5 rows, tables of 3 entries, of which 2 may be shared. */
enum { PIECE = 5, ENTRIES = 3, SHARED = 2 };

static prefix_lists lists_of(int B, int Q, int n, const int *groups, const int *shared,
                             const int *table)
{
    prefix_lists l = {.groups = groups,
                      .shared = shared,
                      .table = table,
                      .table_step = ENTRIES,
                      .B = B,
                      .Q = Q,
                      .n = n,
                      .entries = ENTRIES,
                      .all_len = ENTRIES * PAGE - 1,
                      .page = PAGE,
                      .piece = PIECE,
                      .pieces = B * Q / PIECE + n,
                      .most = SHARED};
    const size_t pieces = (size_t)l.pieces, batches = (size_t)B;
    l.piece_first = malloc((pieces * (2 + SHARED) + 1 + batches * (2 + ENTRIES)) * sizeof(int));
    assert_non_null(l.piece_first);
    l.piece_len = l.piece_first + pieces + 1;
    l.piece_table = l.piece_len + pieces;
    l.begin = l.piece_table + pieces * SHARED;
    l.rest = l.begin + batches;
    l.rest_table = l.rest + batches;
    return l;
}

/* Piece by piece and batch by batch, from what a group is. */
static void check_lists(const prefix_lists *l)
{
    int piece = 0;
    for (int g = 0; g < l->n; g++)
        for (int row = l->groups[g] * l->Q; row < l->groups[g + 1] * l->Q; row += PIECE) {
            assert_int_equal(l->piece_first[piece], row);
            assert_int_equal(l->piece_len[piece], l->shared[g]);
            for (int j = 0; j < SHARED; j++)
                assert_int_equal(l->piece_table[piece * SHARED + j],
                                 j * PAGE < l->shared[g] ? l->table[l->groups[g] * ENTRIES + j]
                                                         : -1);
            piece++;
        }
    for (; piece <= l->pieces; piece++) {
        assert_int_equal(l->piece_first[piece], l->groups[l->n] * l->Q);
        if (piece < l->pieces)
            assert_int_equal(l->piece_len[piece], 0);
    }
    for (int b = 0, g = 0; b < l->B; b++) {
        while (g < l->n && l->groups[g + 1] <= b)
            g++;
        const int shared = g < l->n && l->groups[g] <= b ? l->shared[g] : 0;
        assert_int_equal(l->begin[b], shared);
        assert_int_equal(l->rest[b], l->all_len - shared);
        for (int j = 0; j < ENTRIES; j++)
            assert_int_equal(l->rest_table[b * ENTRIES + j],
                             j * PAGE + shared < l->all_len
                                 ? l->table[b * ENTRIES + shared / PAGE + j]
                                 : -1);
    }
}

/* Groups of 0 to 4 batches, and batches of no group before and behind them. */
static void lists_are_of_groups(void **state)
{
    enum { BATCHES = 60, GROUPS = 20 };
    uint32_t seed = 7;
    (void)state;
    for (int n = 0; n < 40; n++) {
        int groups[GROUPS + 1], shared[GROUPS], table[BATCHES * ENTRIES];
        groups[0] = n % 3;
        for (int g = 0; g < GROUPS; g++) {
            seed = seed * 1664525u + 1013904223u;
            const int past = groups[g] + (int)(seed >> 16) % 5;
            groups[g + 1] = past < BATCHES ? past : BATCHES;
            shared[g] = (int)(seed >> 8) % (SHARED + 1) * PAGE;
        }
        for (int i = 0; i < BATCHES * ENTRIES; i++)
            table[i] = 1000 + i;
        const prefix_lists l = lists_of(BATCHES, 1 + n % 7, GROUPS, groups, shared, table);
        plan_write_prefix(&l);
        check_lists(&l);
        free(l.piece_first);
    }
}

/* The host's time grows with groups and batches, not with their product, which took twenty
 * seconds here. */
static void lists_of_many_groups_take_no_time(void **state)
{
    enum { MANY = 1 << 17, SECONDS = 4 };
    int *numbers = malloc((size_t)MANY * (2 + ENTRIES) * sizeof *numbers + sizeof *numbers);
    int *groups = numbers, *shared = groups + MANY + 1, *table = shared + MANY;
    (void)state;
    assert_non_null(numbers);
    for (int i = 0; i <= MANY; i++)
        groups[i] = i;
    for (int i = 0; i < MANY; i++)
        shared[i] = i % (SHARED + 1) * PAGE;
    for (int i = 0; i < MANY * ENTRIES; i++)
        table[i] = i;
    const prefix_lists l = lists_of(MANY, 1, MANY, groups, shared, table);
    const clock_t start = clock();
    plan_write_prefix(&l);
    assert_true((double)(clock() - start) / CLOCKS_PER_SEC < SECONDS);
    check_lists(&l);
    free(l.piece_first);
    free(numbers);
}

static void the_program_compiles(void **state)
{
    (void)state;
    expect_program_compiles("prefix.cu", "sm_90a");
}

/* ---- bad calls ---- */

static void refused(saccade_problem p, const char *where)
{
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    p.shared_prefix = 1;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
}

static void bad_problems(void **state)
{
    const saccade_problem good = problem_of(&cases[1], "cpu");
    saccade_mod *score = case_mod(SACCADE_SCORE, "score - q");
    saccade_problem p = good;
    (void)state;
    p.page = 0;
    refused(p, "shared_prefix");
    p = good, p.batch_invariant = 1;
    refused(p, "shared_prefix");
    p = good, p.gradients = SACCADE_GRADIENT_Q;
    refused(p, "shared_prefix");
    p = good, p.score = score;
    refused(p, "score");
    saccade_mod_destroy(score);
}

/* A run of case 1 with other numbers. */
static void bad_run(const int32_t *groups, const int32_t *shared, int64_t max_keys,
                    const char *where)
{
    const prefix_case *c = &cases[1];
    saccade_error err = {0};
    saccade_problem problem = problem_of(c, "cpu");
    saccade_plan *plan = NULL;
    saccade_positions at;
    saccade_pages pages;
    saccade_prefix prefix;
    saccade_forward_args a;
    results r;
    inputs x;
    make(c, &x);
    make_results(c, &r);
    problem.shared_prefix = 1;
    saccade_positions_init(&at);
    saccade_pages_init(&pages);
    saccade_prefix_init(&prefix);
    saccade_forward_args_init(&a);
    assert_int_equal(saccade_plan_create(NULL, &problem, &plan, &err), SACCADE_OK);
    const saccade_tensor table = ints(x.first, 2, MOST, PAGES),
                         len = ints(c->lengths, 1, MOST, 0);
    const saccade_tensor cu = ints(groups, 1, c->n + 1, 0), lengths = ints(shared, 1, c->n, 0);
    at.kv_len = &len;
    pages.table = &table;
    prefix.cu_groups = &cu, prefix.lengths = &lengths, prefix.max_keys = max_keys;
    a.q = &x.q, a.k = &x.k, a.v = &x.v, a.out = &r.out;
    a.positions = &at, a.pages = &pages, a.prefix = groups ? &prefix : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, &problem.sizes);
    a.workspace = aligned_alloc(64, (a.workspace_bytes + 64) / 64 * 64);
    assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
    assert_non_null(strstr(err.message, "expected"));
    free(a.workspace);
    saccade_plan_destroy(plan);
    drop_results(&r);
    free(x.q.data), free(x.k.data), free(x.v.data), free(x.sinks.data);
}

static void bad_runs(void **state)
{
    const prefix_case *c = &cases[1];
    (void)state;
    bad_run(NULL, NULL, 0, "prefix");
    bad_run((const int32_t[]){0, 3, 3, 5}, c->shared, 0, "cu_groups");
    bad_run((const int32_t[]){0, 7, 3, 6}, c->shared, 0, "cu_groups");
    bad_run(c->groups, (const int32_t[]){144, 32, 8}, 0, "prefix.lengths");
    bad_run(c->groups, c->shared, 128, "prefix.lengths");
    bad_run(c->groups, (const int32_t[]){160, 32, 0}, 0, "kv_len");
    bad_run(c->groups, c->shared, KV + 1, "max_keys");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_as_without),
        cmocka_unit_test(stays_in_its_workspace),
        cmocka_unit_test(lists_are_of_groups),
        cmocka_unit_test(lists_of_many_groups_take_no_time),
        cmocka_unit_test(the_program_compiles),
        cmocka_unit_test(bad_problems),
        cmocka_unit_test(bad_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
