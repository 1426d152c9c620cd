/* dlopen over a list of candidate names. */
#include "base/dynlib.h"

#include "base/strings.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_SIZE = 256, TRIED_LIMIT = 320 };

struct dynlib {
    void *handle;
    char name[NAME_SIZE];
};

/* tries the names in order; the failures collect in `tried`. */
static void *open_first(const char *const *names, const char **name, strbuf *tried)
{
    for (; *names != NULL; names++) {
        void *handle = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
        *name = *names;
        if (handle != NULL)
            return handle;
        strbuf_printf(tried, "%s%s", tried->length == 0 ? "" : ", ", *names);
    }
    return NULL;
}

saccade_status dynlib_open(const char *const *names, const char *what, dynlib **out,
                           saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const char *name = NULL;
    void *handle = NULL;
    strbuf tried;
    strbuf_init(&tried, TRIED_LIMIT);
    dynlib *lib = calloc(1, sizeof *lib);
    FAIL_IF_NULL_GOTO(lib);
    handle = open_first(names, &name, &tried);
    FAIL_IF_GOTO(handle == NULL, SACCADE_EBACKEND, "%s: not found, tried %s", what,
                 strbuf_text(&tried));
    lib->handle = handle;
    strncpy(lib->name, name, NAME_SIZE - 1);
    *out = lib;
    lib = NULL;
out:
    free(lib);
    strbuf_free(&tried);
    return status;
}

void *dynlib_find(dynlib *lib, const char *symbol)
{
    return dlsym(lib->handle, symbol);
}

const char *dynlib_name(const dynlib *lib)
{
    return lib->name;
}

void dynlib_close(dynlib *lib)
{
    if (lib == NULL)
        return;
    dlclose(lib->handle);
    free(lib);
}
