/* A block mask and a plan must mean the same mask. Nodes are compared when the two first meet;
 * later runs go by the number of the plan, from any thread. */
#include "mask/mask_build.h"
#include "support/forward_case.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const saccade_sizes sizes = {1, 2, 1, 40, 50, 8, 8};

typedef struct pair {
    saccade_mod *own, *other;
    const mod_fn *same, *differs;
    saccade_block_mask *mask;
} pair;

static pair make_pair(void)
{
    saccade_error err;
    pair p = {.own = case_mod(SACCADE_MASK, "q >= kv && h < 1"),
              .other = case_mod(SACCADE_MASK, "q >= kv && h < 2")};
    p.same = mod_function(p.own);
    p.differs = mod_function(p.other);
    const saccade_status status =
        saccade_block_mask_create(NULL, p.own, &sizes, NULL, NULL, 0, NULL, &p.mask, &err);
    assert_int_equal(status, SACCADE_OK);
    return p;
}

static void free_pair(pair *p)
{
    saccade_block_mask_destroy(p->mask);
    saccade_mod_destroy(p->own);
    saccade_mod_destroy(p->other);
}

static void nodes_are_compared_once(void **unused)
{
    (void)unused;
    pair p = make_pair();
    assert_false(mask_is_of(p.mask, p.differs, 1));
    assert_false(mask_is_of(p.mask, p.differs, 1)); /* a refusal is not kept */
    assert_true(mask_is_of(p.mask, p.same, 1));
    assert_true(mask_is_of(p.mask, p.differs, 1)); /* by the number: no node is looked at */
    assert_false(mask_is_of(p.mask, p.differs, 2));
    for (uint64_t n = 2; n < 2 + MASK_MET; n++)
        assert_true(mask_is_of(p.mask, p.same, n));
    assert_false(mask_is_of(p.mask, p.differs, 1)); /* the first is forgotten, not mistaken */
    assert_true(mask_is_of(p.mask, p.same, 1));
    free_pair(&p);
}

/* The same text bound twice is the same mask; so is what was printed and parsed. */
static void equal_texts_are_one_mask(void **unused)
{
    (void)unused;
    pair p = make_pair();
    saccade_mod *again = case_mod(SACCADE_MASK, "(q >= kv) && h < 1");
    assert_ptr_not_equal(mod_function(again), p.same);
    assert_true(mask_is_of(p.mask, mod_function(again), 7));
    saccade_mod_destroy(again);
    free_pair(&p);
}

enum { THREADS = 4, ROUNDS = 2000, NUMBERS = 5 };

typedef struct meeting {
    pthread_t thread;
    const pair *p;
    uint64_t first;
    int n_wrong;
} meeting;

/* More plans than a mask knows at a time, so that threads push each other's out. */
static void *meet(void *arg)
{
    meeting *m = arg;
    for (int i = 0; i < ROUNDS; i++) {
        const uint64_t number = m->first + (uint64_t)(i % NUMBERS);
        m->n_wrong += !mask_is_of(m->p->mask, m->p->same, number);
        m->n_wrong += mask_is_of(m->p->mask, m->p->differs, number + 1000);
    }
    return NULL;
}

static void threads_agree(void **unused)
{
    (void)unused;
    pair p = make_pair();
    meeting all[THREADS];
    for (int i = 0; i < THREADS; i++) {
        all[i] = (meeting){.p = &p, .first = 1 + (uint64_t)(i * NUMBERS)};
        assert_int_equal(pthread_create(&all[i].thread, NULL, meet, &all[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(all[i].thread, NULL), 0);
        assert_int_equal(all[i].n_wrong, 0);
    }
    free_pair(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_are_compared_once),
        cmocka_unit_test(equal_texts_are_one_mask),
        cmocka_unit_test(threads_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
