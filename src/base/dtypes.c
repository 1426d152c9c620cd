/* Small facts of the public header that every folder needs: names of statuses and dtypes,
   sizes, plain tensors. */
#include "base/dtype_numbers.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include "saccade_config.h"

#include <stddef.h>
#include <stdint.h>

#if HAVE_THREADS
#define THREADS_BUILT "threads"
#else
#define THREADS_BUILT "no threads"
#endif
#if HAVE_ZYDIS
#define ZYDIS_BUILT "zydis"
#else
#define ZYDIS_BUILT "no zydis"
#endif
#if HAVE_PNG
#define PNG_BUILT "png"
#else
#define PNG_BUILT "no png"
#endif
#if HAVE_LEVEL_AMX
#define LEVELS_BUILT " avx2 avx512 amx"
#elif HAVE_LEVEL_AVX512
#define LEVELS_BUILT " avx2 avx512"
#elif HAVE_LEVEL_AVX2
#define LEVELS_BUILT " avx2"
#else
#define LEVELS_BUILT ""
#endif

_Static_assert(DTYPE_I8 == SACCADE_I8 && DTYPE_F16 == SACCADE_F16 && DTYPE_BF16 == SACCADE_BF16
                   && DTYPE_F32 == SACCADE_F32 && DTYPE_E4M3 == SACCADE_E4M3
                   && DTYPE_E5M2 == SACCADE_E5M2 && DTYPE_I4 == SACCADE_I4,
               "dtype_numbers.h has the public header's numbers");

/* By number, which a caller's cast may have made: see is_dtype. */
static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    [SACCADE_NONE] = {"none", 0}, [SACCADE_BOOL] = {"bool", 1}, [SACCADE_U8] = {"u8", 1},
    [SACCADE_I8] = {"i8", 1},     [SACCADE_U16] = {"u16", 2},   [SACCADE_I16] = {"i16", 2},
    [SACCADE_U32] = {"u32", 4},   [SACCADE_I32] = {"i32", 4},   [SACCADE_U64] = {"u64", 8},
    [SACCADE_I64] = {"i64", 8},   [SACCADE_F16] = {"f16", 2},   [SACCADE_BF16] = {"bf16", 2},
    [SACCADE_F32] = {"f32", 4},   [SACCADE_F64] = {"f64", 8},   [SACCADE_E4M3] = {"e4m3", 1},
    [SACCADE_E5M2] = {"e5m2", 1}, [SACCADE_I4] = {"i4", 1},
};

static const struct {
    saccade_status status;
    const char *name;
} statuses[] = {
    {SACCADE_OK, "ok"},
    {SACCADE_EINVAL, "invalid argument"},
    {SACCADE_EPARSE, "syntax error"},
    {SACCADE_ETYPE, "type error"},
    {SACCADE_ELIMIT, "limit exceeded"},
    {SACCADE_EVALUE, "value out of range"},
    {SACCADE_ENOMEM, "out of memory"},
    {SACCADE_EBACKEND, "back end not available"},
    {SACCADE_EIO, "input or output failed"},
    {SACCADE_ESTOPPED, "stopped"},
    {SACCADE_EPEER, "other rank failed"},
    {SACCADE_EINTERNAL, "internal error"},
};

const char *saccade_status_name(saccade_status status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++)
        if (statuses[i].status == status)
            return statuses[i].name;
    return "unknown status";
}

int32_t saccade_abi(void)
{
    return SACCADE_ABI;
}

const char *saccade_version(void)
{
    return SACCADE_VERSION;
}

const char *saccade_build(void)
{
    return THREADS_BUILT ", " ZYDIS_BUILT ", " PNG_BUILT ", levels portable" LEVELS_BUILT;
}

static int is_dtype(saccade_dtype dtype)
{
    const size_t i = (size_t)dtype;
    return i < sizeof dtypes / sizeof dtypes[0] && dtypes[i].name;
}

const char *saccade_dtype_name(saccade_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].name : "unknown";
}

size_t saccade_dtype_bytes(saccade_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].bytes : 0;
}

/* What a number cannot hold becomes the largest, which no run takes for a stride. */
static int64_t next_stride(int64_t stride, int64_t length)
{
    if (length < 0)
        return stride;
    return length > 0 && stride > INT64_MAX / length ? INT64_MAX : stride * length;
}

saccade_tensor saccade_tensor_of(void *data, saccade_dtype dtype, int32_t rank,
                                 const int64_t *shape)
{
    saccade_tensor t = {.data = data, .dtype = dtype, .rank = rank};
    int64_t stride = 1;
    for (int32_t i = rank - 1; i >= 0; i--) {
        if (i >= SACCADE_MAX_RANK) /* left for the call that gets it to refuse */
            continue;
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        stride = next_stride(stride, shape[i]);
    }
    return t;
}

saccade_status tensor_check_place(const saccade_tensor *t, const char *name, saccade_error *err)
{
    const size_t bytes = saccade_dtype_bytes(t->dtype);
    FAIL_AT(bytes && (uintptr_t)t->data % bytes, SACCADE_EINVAL, name, 0, 0,
            "got data at %p, expected a multiple of %zu, the bytes of an element of %s",
            t->data, bytes, saccade_dtype_name(t->dtype));
    return SACCADE_OK;
}
