/* NCCL, found at run time. */
#include "cuda/ranks/nccl.h"

#include "base/dynlib.h"

nccl_functions cu_nccl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static saccade_error load_error;
static saccade_status load_status = SACCADE_EBACKEND;
static dynlib *library; /* open until the process ends */

static saccade_status find_functions(saccade_error *err)
{
#define X(name, symbol, parameters)                         \
    *(void **)&cu_nccl.name = dynlib_find(library, symbol); \
    FAIL_IF(!cu_nccl.name, SACCADE_EBACKEND, "NCCL lacks %s: got one older than 2.7", symbol);
    NCCL_FUNCTIONS(X)
#undef X
    *(void **)&cu_nccl.error_string = dynlib_find(library, "ncclGetErrorString");
    FAIL_IF(!cu_nccl.error_string, SACCADE_EBACKEND, "NCCL lacks ncclGetErrorString");
    return SACCADE_OK;
}

static void load_once(void)
{
    static const char *const names[] = {"libnccl.so.2", "libnccl.so", NULL};
    load_status = dynlib_open(names, "NCCL", &library, &load_error);
    if (load_status != SACCADE_OK)
        return;
    load_status = find_functions(&load_error);
    if (load_status == SACCADE_OK)
        return;
    dynlib_close(library);
    library = NULL;
}

saccade_status nccl_get(saccade_error *err)
{
    pthread_once(&once, load_once);
    FAIL_IF(load_status != SACCADE_OK, SACCADE_EBACKEND, "%s", load_error.message);
    return SACCADE_OK;
}

saccade_status saccade_nccl_make_id(saccade_nccl_id *out, saccade_error *err)
{
    FAIL_AT(!out, SACCADE_EINVAL, "nccl", 0, 0, "got NULL, expected room for the id");
    TRY(nccl_get(err));
    const int failed = cu_nccl.unique_id(out);
    FAIL_IF(failed, SACCADE_EBACKEND, "ncclGetUniqueId: %s", cu_nccl.error_string(failed));
    return SACCADE_OK;
}
