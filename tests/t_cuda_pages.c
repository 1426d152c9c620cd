/* Keys in pages on a CUDA device against the same keys in one piece, bit for bit: prefill and
 * decode, every form of table, layouts of pools, sizes that whole tiles and single rows are
 * copied for, lengths and tables on the device; tables that lead out of the pool. */
#include "cuda/program/program.h"
#include "support/device_case.h"
#include "support/page_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Memory of pools is one piece that K and V share; each is moved from its first element on. */
static int differs(const page_case *c)
{
    page_run r;
    page_make(&r, c);
    page_clear_ends(&r);
    page_results whole = page_run_once(&r, 0, NULL), paged = page_run_once(&r, 1, NULL);
    const int bad = memcmp(whole.out, paged.out, whole.out_bytes) != 0
                    || memcmp(whole.lse, paged.lse, whole.lse_bytes) != 0;
    if (bad)
        print_message("differs: --problem \"%s\" pages of %d, form %d, layout %d, mask %s\n",
                      c->problem, c->page, c->form, c->layout, c->mask ? c->mask : "none");
    page_drop(&whole);
    page_drop(&paged);
    page_free(&r);
    return bad;
}

/* Of a score whose larger tiles spill or not by what else a program does. */
static const char spilling[] = "20 * tanh(score / 20) + 0.01 * float((q * q + kv) % 7)";

/* Pages and sequences side by side take the tiles of keys in one piece all the same. */
static void check_tiles(saccade_problem *p)
{
    const cu_form *form[3];
    saccade_plan *plan[3];
    p->dtype = SACCADE_BF16;
    p->backend = "cuda";
    p->arch = "sm_90a";
    for (int i = 0; i < 3; i++) {
        p->page = i == 1 ? 64 : 0;
        p->ragged = i == 2;
        plan[i] = compiled_plan(p, 0);
        form[i] = &((const cu_state *)plan[i]->state)->programs[CU_MAIN].form;
        assert_int_equal(form[i]->tile.groups, form[0]->tile.groups);
        assert_int_equal(form[i]->tile.keys, form[0]->tile.keys);
    }
    for (int i = 0; i < 3; i++)
        saccade_plan_destroy(plan[i]);
    saccade_mod_destroy((saccade_mod *)p->mask);
    saccade_mod_destroy((saccade_mod *)p->score);
    saccade_mod_destroy((saccade_mod *)p->weight);
}

static void tiles_of_one_piece(void **state)
{
    saccade_problem p;
    (void)state;
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 2, .Hkv = 2, .D = 64, .Dv = 64};
    p.mask = case_mod(SACCADE_MASK, "causal()");
    p.score = case_mod(SACCADE_SCORE, spilling);
    check_tiles(&p);
    saccade_problem_init(&p);
    p.sizes = (saccade_sizes){.H = 2, .Hkv = 2, .D = 256, .Dv = 256};
    p.weight = case_mod(SACCADE_WEIGHT, "dropout(0.1)");
    check_tiles(&p);
}

static void same_bits(void **state)
{
    static const page_problem rows[] = {
        {"b2 h4/2 q200 kv700 d64 bf16", "causal()", NULL},
        {"b3 h2 q130 kv600 d128 bf16", "kv <= q + 500", "alibi()"},
        {"b1 h2 q200 kv500 d64 bf16", "causal()", spilling},
        {"b2 h2/1 q70 kv500 d128 dv64 f16", NULL, NULL},
        {"b1 h2 q100 kv300 d256 bf16", NULL, "softcap(20)"},
        {"b4 h8/2 q1 kv1000 d128 bf16", NULL, NULL},
        {"b2 h8/2 q2 kv900 d64 f16", "kv % 7 != 3", NULL},
        {"b2 h4/4 q1 kv700 d256 bf16", "kv >= 100", NULL},
        {"b2 h2 q40 kv300 d40 f32", "causal()", NULL},
        {"b2 h2 q70 kv300 d36 bf16", NULL, NULL},
    };
    int n_bad = 0, n = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int p = 0; p < PAGE_SIZES; p++, n++) {
            page_case c = page_case_of(&rows[i], page_sizes[p], n);
            c.is_known = c.page < 16; /* forward has a program for those */
            n_bad += differs(&c);
        }
    print_message("same_bits: %d cases\n", n);
    assert_int_equal(n_bad, 0);
}

/* Where many rows read keys of small pages, those are brought into one piece first. */
static void long_runs(void **state)
{
    static const page_problem rows[] = {
        {"b2 h8/2 q400 kv1500 d128 bf16", "kv <= q + 1100", NULL},
        {"b1 h4/1 q513 kv2000 d64 bf16", "kv <= q + 1500 && kv > q + 600", "alibi()"},
        {"b3 h4 q600 kv1030 d128 dv64 f16", NULL, "softcap(20)"},
        {"b2 h2 q600 kv1500 d192 dv128 bf16", "causal()", NULL},
        {"b1 h8/1 q500 kv3900 d64 bf16", "kv % 7 != 3", NULL},
        {"b2 h4/2 q300 kv1200 d40 f16", "kv >= 700 && kv <= q + 900", NULL},
    };
    static const int32_t pages[] = {1, 3, 16, 96};
    int n_bad = 0, n = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int p = 0; p < 4; p++, n++) {
            page_case c = page_case_of(&rows[i], pages[p], n);
            c.dead = i == 5 ? 700 : 0;
            n_bad += differs(&c);
        }
    assert_int_equal(n_bad, 0);
}

static void absent_pages(void **state)
{
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int p = 0; p < PAGE_SIZES; p++) {
        n_bad += differs(&(page_case){.problem = "b2 h2 q130 kv600 d128 bf16",
                                      .mask = "kv >= 300",
                                      .backend = "cuda",
                                      .page = page_sizes[p],
                                      .dead = 300});
        n_bad += differs(&(page_case){.problem = "b2 h8/2 q1 kv600 d64 bf16",
                                      .mask = "kv >= 300",
                                      .backend = "cuda",
                                      .page = page_sizes[p],
                                      .form = LAST_PAGES,
                                      .dead = 300});
    }
    assert_int_equal(n_bad, 0);
}

static void entries_that_lead_out(void **state)
{
    static const char *const problems[] = {
        "b2 h2 q130 kv600 d128 bf16", "b2 h8/2 q1 kv600 d64 bf16", "b2 h2 q40 kv300 d40 f32"};
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < 3; i++)
        for (int n = 0; n < PAGE_LEAD_OUT; n++)
            page_lead_out((page_case){.problem = problems[i]}, n, NULL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_of_one_piece),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(long_runs),
        cmocka_unit_test(absent_pages),
        cmocka_unit_test(entries_that_lead_out),
    };
    setenv("SACCADE_CUDA_TILES", "large", 1); /* small ones, of keys in one piece, differ */
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
