/* Wrappers of the allocator, linked into every test by --wrap. Off, they only count. What libc
   allocates inside itself and we free (getline) would count wrong, so nothing here uses it. */
#include "support/fail_alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* given by the linker for --wrap=NAME; the names are its, not ours */
void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **out, size_t alignment, size_t size);
void __real_free(void *p);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **out, size_t alignment, size_t size);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t n);
void __wrap_free(void *p);

static _Atomic int64_t live;
static _Atomic int64_t left = -1; /* allocations until the one that fails; -1: none fails */
static _Atomic int64_t failures;
static _Atomic bool is_by_thread; /* only those of threads that are to fail */
static _Thread_local bool is_to_fail;

static int fails_now(void)
{
    if (atomic_load(&is_by_thread) && !is_to_fail)
        return 0;
    if (atomic_load(&left) < 0 || atomic_fetch_sub(&left, 1) != 0)
        return 0;
    atomic_fetch_add(&failures, 1);
    return 1;
}

static void *counted(void *p)
{
    if (p != NULL)
        atomic_fetch_add(&live, 1);
    return p;
}

void *__wrap_malloc(size_t size)
{
    return fails_now() ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails_now() ? NULL : counted(__real_calloc(count, size));
}

void *__wrap_realloc(void *p, size_t size)
{
    if (fails_now())
        return NULL;
    void *moved = __real_realloc(p, size);
    return p == NULL ? counted(moved) : moved;
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return fails_now() ? NULL : counted(__real_aligned_alloc(alignment, size));
}

int __wrap_posix_memalign(void **out, size_t alignment, size_t size)
{
    enum { OUT_OF_MEMORY = 12 }; /* ENOMEM */
    const int result =
        fails_now() ? OUT_OF_MEMORY : __real_posix_memalign(out, alignment, size);
    if (result == 0)
        counted(*out);
    return result;
}

char *__wrap_strndup(const char *text, size_t n)
{
    const size_t length = strnlen(text, n);
    char *copy = __wrap_malloc(length + 1);
    if (copy != NULL) {
        memcpy(copy, text, length);
        copy[length] = '\0';
    }
    return copy;
}

char *__wrap_strdup(const char *text)
{
    return __wrap_strndup(text, strlen(text));
}

void __wrap_free(void *p)
{
    if (p != NULL)
        atomic_fetch_sub(&live, 1);
    __real_free(p);
}

void fail_alloc_by_thread(int is_by)
{
    atomic_store(&is_by_thread, is_by != 0);
}

void fail_alloc_here(int is_here)
{
    is_to_fail = is_here != 0;
}

int64_t fail_alloc_live(void)
{
    return atomic_load(&live);
}

/* one run, its allocation n failing; tells whether it got that far. */
static bool run_failing(const char *name, fail_alloc_use use, void *arg, int n, bool is_lenient)
{
    saccade_error err = {0};
    const int64_t before = fail_alloc_live();
    const int64_t failures_before = atomic_load(&failures);
    atomic_store(&left, n);
    const saccade_status status = use(arg, &err);
    atomic_store(&left, -1);
    const bool hit = atomic_load(&failures) != failures_before;
    const bool may_succeed = !hit || is_lenient;
    if (!(status == SACCADE_OK && may_succeed) && !(status == SACCADE_ENOMEM && hit))
        fail_msg("%s: allocation %d failing gave status %d, '%s'", name, n + 1, status,
                 err.message);
    if (status == SACCADE_ENOMEM && err.status != SACCADE_ENOMEM)
        fail_msg("%s: allocation %d failing left err at %d", name, n + 1, err.status);
    if (fail_alloc_live() != before)
        fail_msg("%s: allocation %d failing leaked %lld blocks", name, n + 1,
                 (long long)(fail_alloc_live() - before));
    return hit;
}

static int sweep(const char *name, fail_alloc_use use, void *arg, bool is_lenient)
{
    enum { MOST = 100000 };
    int n = 0;
    while (n < MOST && run_failing(name, use, arg, n, is_lenient))
        n++;
    if (n == MOST)
        fail_msg("%s: allocates more than %d times", name, MOST);
    return n;
}

int fail_alloc_sweep(const char *name, fail_alloc_use use, void *arg)
{
    return sweep(name, use, arg, false);
}

int fail_alloc_sweep_lenient(const char *name, fail_alloc_use use, void *arg)
{
    return sweep(name, use, arg, true);
}
