/* The deepest texts that are legal, from text to result, in a thread with a small stack: musl
 * gives 128 KiB, and hosts with many threads less than glibc's 8 MiB. */
#include "mod/mod.h"
#include "support/sanitizers.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Sanitizers make frames some times as large. */
enum {
    SANITIZED = HAS_ADDRESS_SANITIZER || HAS_THREAD_SANITIZER,
    TEXT_STACK = SANITIZED ? 1 << 20 : 64 << 10, /* text to bound mod */
    RUN_STACK = SANITIZED ? 4 << 20 : 128 << 10, /* all the rest */
    TEXT_SIZE = 1 << 17,
};

/* ---- the deepest texts ---- */

/* n times `open`, then `middle`, then n times `close`; %d in either is the count. */
static void nest(char *text, const char *head, const char *open, int n, const char *middle,
                 const char *close)
{
    size_t used = 0;
    used += (size_t)snprintf(text, TEXT_SIZE, "%s", head);
    for (int i = 0; i < n; i++)
        used += (size_t)snprintf(text + used, TEXT_SIZE - used, open, i, i);
    used += (size_t)snprintf(text + used, TEXT_SIZE - used, "%s", middle);
    for (int i = n - 1; i >= 0; i--)
        used += (size_t)snprintf(text + used, TEXT_SIZE - used, close, i, i);
    assert_true(used < TEXT_SIZE);
}

static const struct {
    const char *what, *head, *open;
    int n;
    const char *middle, *close;
} deepest[] = {
    {"parentheses", "q >= ", "(", 199, "kv", ")"},
    {"signs", "", "!", 198, "(q >= kv)", ""},
    {"precedences in parentheses", "q < ", "(q|q^kv&kv+2*", 199, "kv", ")"},
    {"conditions", "", "q == kv + %d ? q < kv + 9 : ", 199, "true", ""},
    {"conditions in conditions", "", "kv == %d ? ", 199, "true", " : q > %d"},
    {"calls of built-ins", "q < ", "min(kv + %d, ", 199, "kv", ")"},
    {"indices", "q < ", "t[", 199, "q", "]"},
    {"definitions in definitions", "", "mask f%d() = { ", 32, "q >= kv", "} f%d()"},
    {"calls in bodies", "mask f0() = q >= kv;", "", 1, "", ""},
    {"arguments in arguments", "mask id(x) = x; ", "id(", 199, "q >= kv", ")"},
    {"sums in sums", "q < ", "sum(i%d, 1, ", 64, "kv", ")"},
    {"a long chain", "q >= kv", " && q + %d > kv", 4000, "", ""},
};
enum { DEEPEST = sizeof deepest / sizeof deepest[0] };

static void make_text(int i, char *text)
{
    size_t used = 0;
    if (strcmp(deepest[i].what, "calls in bodies") != 0) {
        nest(text, deepest[i].head, deepest[i].open, deepest[i].n, deepest[i].middle,
             deepest[i].close);
        return;
    }
    used += (size_t)snprintf(text, TEXT_SIZE, "mask f0() = q >= kv; ");
    for (int k = 1; k < 64; k++)
        used += (size_t)snprintf(text + used, TEXT_SIZE - used,
                                 "mask f%d() = { mask g() = true; !(g() && !f%d()); } ", k,
                                 k - 1);
    snprintf(text + used, TEXT_SIZE - used, "f63()");
}

/* ---- what a thread does with one ---- */

typedef struct job {
    const char *what, *text;
    saccade_mod *mod; /* bound */
    saccade_status status;
    saccade_error err;
    const char *level;
    int32_t rows;
} job;

enum { N = 40, D = 16, HEADS = 2 };

static int32_t table[N];

static void *read_text(void *arg)
{
    job *j = arg;
    saccade_mod *generic = NULL;
    saccade_capture t = {"t", SACCADE_I32, 1};
    j->status = saccade_mod_parse(SACCADE_MASK, j->text, strlen(j->text), &generic, &j->err);
    if (j->status != SACCADE_OK)
        return NULL;
    const int32_t n = saccade_mod_capture_count(generic);
    j->status = saccade_mod_bind(generic, &t, n, &j->mod, &j->err);
    saccade_mod_destroy(generic);
    return NULL;
}

static const saccade_binding *bindings(void)
{
    static saccade_binding b;
    static const int64_t shape[1] = {N};
    b = (saccade_binding){"t", saccade_tensor_of(table, SACCADE_I32, 1, shape)};
    return &b;
}

static saccade_status print_and_check(const job *j, const saccade_sizes *sizes, int32_t n,
                                      saccade_error *err)
{
    char *text = malloc(saccade_mod_print(j->mod, NULL, 0) + 1);
    assert_non_null(text);
    saccade_mod_print(j->mod, text, saccade_mod_print(j->mod, NULL, 0) + 1);
    free(text);
    return saccade_mod_check(j->mod, sizes, NULL, bindings(), n, 0, err);
}

static saccade_status make_mask(const job *j, saccade_context *context,
                                const saccade_sizes *sizes, int32_t n,
                                saccade_block_mask **out, saccade_error *err)
{
    void *picture = NULL;
    size_t bytes;
    const saccade_block_mask_options options = {
        .size = sizeof options, .block_q = 16, .block_kv = 16};
    saccade_status status = saccade_block_mask_create(context, j->mod, sizes, NULL, bindings(),
                                                      n, &options, out, err);
    if (status == SACCADE_OK)
        status =
            saccade_block_mask_render(*out, 0, 0, SACCADE_SVG, 0, &picture, &bytes, err);
    saccade_free(picture);
    return status;
}

static saccade_status explain(const saccade_plan *plan, saccade_error *err)
{
    char *text = NULL;
    const saccade_status status = saccade_plan_explain(plan, &text, err);
    saccade_free(text);
    return status;
}

static float data[4][HEADS * N * D];

static saccade_status forward(const saccade_plan *plan, const saccade_block_mask *mask,
                              int32_t rows, int32_t n, saccade_error *err)
{
    const saccade_sizes sizes = {1, HEADS, HEADS, rows, N, D, D};
    const int64_t q[4] = {1, HEADS, rows, D}, k[4] = {1, HEADS, N, D};
    saccade_tensor t[4];
    for (int i = 0; i < 4; i++)
        t[i] = saccade_tensor_of(data[i], SACCADE_F32, 4, i == 1 || i == 2 ? k : q);
    saccade_forward_args run = {
        .size = sizeof run,
        .q = &t[0],
        .k = &t[1],
        .v = &t[2],
        .out = &t[3],
        .block_mask = mask,
        .bindings = bindings(),
        .n_bindings = n,
        .workspace_bytes = saccade_plan_workspace(plan, &sizes),
    };
    run.workspace = aligned_alloc(64, (run.workspace_bytes + 64) / 64 * 64);
    assert_non_null(run.workspace);
    const saccade_status status = saccade_forward(plan, &run, err);
    free(run.workspace);
    return status;
}

/* Everything that follows the text, on one thread. */
static void *use(void *arg)
{
    job *j = arg;
    const saccade_sizes sizes = {1, HEADS, HEADS, j->rows, N, D, D};
    const int32_t n = saccade_mod_capture_count(j->mod);
    const saccade_context_options options = {
        .size = sizeof options, .threads = 1, .level = j->level};
    saccade_context *context = NULL;
    saccade_block_mask *mask = NULL;
    saccade_plan *plan = NULL;
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.mask = j->mod;
    j->status = saccade_context_create(&options, &context, &j->err);
    if (!j->status)
        j->status = print_and_check(j, &sizes, n, &j->err);
    if (!j->status)
        j->status = make_mask(j, context, &sizes, n, &mask, &j->err);
    if (!j->status)
        j->status = saccade_plan_create(context, &p, &plan, &j->err);
    if (!j->status)
        j->status = explain(plan, &j->err);
    if (!j->status)
        j->status = forward(plan, NULL, j->rows, n, &j->err);
    if (!j->status)
        j->status = saccade_plan_prepare(plan, mask, &j->err);
    if (!j->status)
        j->status = forward(plan, mask, j->rows, n, &j->err);
    saccade_plan_destroy(plan);
    saccade_block_mask_destroy(mask);
    saccade_context_destroy(context);
    return NULL;
}

static void run_with_stack(void *(*work)(void *), job *j, size_t bytes)
{
    pthread_attr_t attributes;
    pthread_t thread;
    assert_int_equal(pthread_attr_init(&attributes), 0);
    const long least = sysconf(_SC_THREAD_STACK_MIN); /* 128 KiB on aarch64 */
    bytes = least > 0 && bytes < (size_t)least ? (size_t)least : bytes;
    assert_int_equal(pthread_attr_setstacksize(&attributes, bytes), 0);
    assert_int_equal(pthread_create(&thread, &attributes, work, j), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    if (j->status != SACCADE_OK)
        fail_msg("%s, %d rows: %s (%d:%d)", j->what, j->rows, j->err.message, j->err.line,
                 j->err.column);
}

/* ---- tests ---- */

static void deepest_texts_need_little_stack(void **state)
{
    (void)state;
    static char text[TEXT_SIZE];
    for (int i = 0; i < DEEPEST; i++) {
        make_text(i, text);
        job j = {.what = deepest[i].what, .text = text};
        run_with_stack(read_text, &j, TEXT_STACK);
        for (int32_t rows = N; rows <= N; rows++) {
            j.rows = rows;
            run_with_stack(use, &j, RUN_STACK);
        }
        saccade_mod_destroy(j.mod);
    }
}

/* One level more is refused by its limit, so the texts above are the deepest. */
static void deeper_texts_are_refused(void **state)
{
    (void)state;
    static char text[TEXT_SIZE];
    for (int i = 0; i < DEEPEST; i++) {
        if (strcmp(deepest[i].what, "calls in bodies") == 0 || deepest[i].n > 1000)
            continue;
        nest(text, deepest[i].head, deepest[i].open, deepest[i].n + 1, deepest[i].middle,
             deepest[i].close);
        saccade_mod *mod = NULL;
        saccade_error err;
        if (saccade_mod_parse(SACCADE_MASK, text, strlen(text), &mod, &err) != SACCADE_ELIMIT)
            fail_msg("%s: one more is not refused", deepest[i].what);
    }
}

int main(void)
{
    for (int i = 0; i < N; i++)
        table[i] = (i * 7 + 3) % N;
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < HEADS * N * D; k++)
            data[i][k] = sinf((float)(k * (i + 3)));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deepest_texts_need_little_stack),
        cmocka_unit_test(deeper_texts_are_refused),
    };
    return cmocka_run_group_tests_name("small_stack", tests, NULL, NULL);
}
