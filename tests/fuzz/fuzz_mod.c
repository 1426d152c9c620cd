/* Any bytes as a text of the language: an error with a place inside the text, or a mod whose
   printed form parses back to the same print, and whose typed nodes pass the verifier. All on
   a small stack, which no text may exhaust. */
#include "mod/mod.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what, const char *text)
{
    fprintf(stderr, "fuzz_mod: %s: %s\n", what, text);
    abort();
}

static char *print(const saccade_mod *mod)
{
    const size_t length = saccade_mod_print(mod, NULL, 0);
    char *text = malloc(length + 1);
    if (text == NULL || saccade_mod_print(mod, text, length + 1) != length)
        fail("print changes its mind about its length", text == NULL ? "" : text);
    return text;
}

/* an error names its status, has a message, and a line and column that can be shown. */
static void check_error(saccade_status status, const saccade_error *err)
{
    if (err->status != status || err->message[0] == '\0' || err->line < 1 || err->column < 1)
        fail("error without place or message", err->message);
    if (memchr(err->excerpt[0], '\0', sizeof err->excerpt[0]) == NULL)
        fail("excerpt without an end", err->message);
}

static void check_print(const saccade_mod *mod, saccade_kind kind)
{
    saccade_mod *again = NULL;
    saccade_error err;
    char *text = print(mod);
    if (saccade_mod_parse(kind, text, strlen(text), &again, &err) != SACCADE_OK) {
        if (err.status != SACCADE_ELIMIT) /* the printed form may be longer than allowed */
            fail(err.message, text);
    } else {
        char *twice = print(again);
        if (strcmp(text, twice) != 0)
            fail("prints otherwise after parsing", text);
        free(twice);
    }
    saccade_mod_destroy(again);
    free(text);
}

/* what a bound mod prints gives the same nodes again: text for text. */
static void check_typed_print(const saccade_mod *bound, saccade_kind kind)
{
    saccade_capture captures[MOD_MAX_CAPTURES];
    saccade_mod *generic = NULL, *again = NULL;
    saccade_error err = {0};
    char *text = print(bound);
    const int32_t n = saccade_mod_capture_count(bound);
    for (int32_t i = 0; i < n; i++)
        captures[i] = saccade_mod_capture(bound, i);
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err) != SACCADE_OK
        || saccade_mod_bind(generic, captures, n, &again, &err) != SACCADE_OK)
        fail(err.message, text);
    char *twice = print(again);
    if (strcmp(text, twice) != 0
        || mod_function(again)->n_nodes != mod_function(bound)->n_nodes)
        fail("typed nodes change when printed and read", text);
    free(text);
    free(twice);
    saccade_mod_destroy(generic);
    saccade_mod_destroy(again);
}

static void check_bind(const saccade_mod *mod, saccade_dtype dtype)
{
    saccade_capture captures[MOD_MAX_CAPTURES];
    saccade_mod *bound = NULL;
    saccade_error err;
    const int32_t n = saccade_mod_capture_count(mod);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(mod, i);
        captures[i].dtype = dtype;
    }
    if (saccade_mod_bind(mod, captures, n, &bound, &err) == SACCADE_OK) {
        if (mod_verify(mod_function(bound), &err) != SACCADE_OK)
            fail("verifier", err.message);
        check_typed_print(bound, saccade_mod_kind(mod));
        saccade_mod_destroy(bound);
    } else if (err.message[0] == '\0') {
        fail("bind fails without a message", "");
    }
}

typedef struct input {
    const char *text;
    size_t bytes;
} input;

static void *check_text(void *arg)
{
    const input *in = arg;
    for (int kind = SACCADE_MASK; kind <= SACCADE_SCORE; kind++) {
        saccade_mod *mod = NULL;
        saccade_error err = {0};
        const saccade_status status =
            saccade_mod_parse((saccade_kind)kind, in->text, in->bytes, &mod, &err);
        if (status != SACCADE_OK) {
            check_error(status, &err);
            continue;
        }
        check_print(mod, (saccade_kind)kind);
        check_bind(mod, SACCADE_I32);
        check_bind(mod, SACCADE_F32);
        check_bind(mod, SACCADE_BOOL);
        saccade_mod_destroy(mod);
    }
    return NULL;
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size)
{
    enum { STACK = 1 << 20 }; /* 64 KiB without the sanitizers that fuzzing runs with */
    input in = {(const char *)bytes, size};
    pthread_attr_t attributes;
    pthread_t thread = 0;
    int error = pthread_attr_init(&attributes);
    if (!error)
        error = pthread_attr_setstacksize(&attributes, STACK);
    if (!error)
        error = pthread_create(&thread, &attributes, check_text, &in);
    if (error)
        fail("no thread to run on", "");
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    return 0;
}
