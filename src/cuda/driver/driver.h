/* driver.h: the CUDA driver and NVRTC, both found at run time; no CUDA header is
 * needed to build. */
#ifndef SACCADE_CUDA_DRIVER_DRIVER_H
#define SACCADE_CUDA_DRIVER_DRIVER_H

#include "base/status.h"

/* ---- driver.c: libcuda by dlopen ---- */

typedef unsigned long long cu_ptr;
typedef struct cu_map { /* CUtensorMap */
    _Alignas(64) uint64_t opaque[16];
} cu_map;

typedef struct cu_launch_attribute { /* CUlaunchAttribute */
    int id, pad;
    union {
        char bytes[64];
        int values[3];
    } value;
} cu_launch_attribute;

typedef struct cu_launch { /* CUlaunchConfig */
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void *stream;
    cu_launch_attribute *attributes;
    unsigned n_attributes;
} cu_launch;

/* Each driver function used: result, name in the table, symbol, parameters. */
#define CU_DRIVER_FUNCTIONS(X)                                                                \
    X(init, "cuInit", (unsigned flags))                                                       \
    X(error_string, "cuGetErrorString", (int error, const char **text))                       \
    X(device_count, "cuDeviceGetCount", (int *count))                                         \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))      \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (void **context, int device))               \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (int device))                          \
    X(context_current, "cuCtxGetCurrent", (void **context))                                   \
    X(context_device, "cuCtxGetDevice", (int *device))                                        \
    X(context_push, "cuCtxPushCurrent_v2", (void *context))                                   \
    X(context_pop, "cuCtxPopCurrent_v2", (void **context))                                    \
    X(context_synchronize, "cuCtxSynchronize", (void))                                        \
    X(alloc, "cuMemAlloc_v2", (cu_ptr * memory, size_t bytes))                                \
    X(free, "cuMemFree_v2", (cu_ptr memory))                                                  \
    X(copy, "cuMemcpy", (cu_ptr to, cu_ptr from, size_t bytes))                               \
    X(copy_on, "cuMemcpyAsync", (cu_ptr to, cu_ptr from, size_t bytes, void *stream))         \
    X(fill32, "cuMemsetD32Async", (cu_ptr to, unsigned value, size_t count, void *stream))    \
    X(copy_on_device, "cuMemcpyDtoDAsync_v2",                                                 \
      (cu_ptr to, cu_ptr from, size_t bytes, void *stream))                                   \
    X(stream_create, "cuStreamCreateWithPriority",                                            \
      (void **stream, unsigned flags, int priority))                                          \
    X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                   \
    X(stream_wait, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))          \
    X(stream_wait_value, "cuStreamWaitValue32_v2",                                            \
      (void *stream, cu_ptr at, uint32_t value, unsigned flags))                              \
    X(stream_synchronize, "cuStreamSynchronize", (void *stream))                              \
    X(stream_capturing, "cuStreamIsCapturing", (void *stream, int *state))                    \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                         \
    X(event_query, "cuEventQuery", (void *event))                                             \
    X(event_create, "cuEventCreate", (void **event, unsigned flags))                          \
    X(event_record, "cuEventRecord", (void *event, void *stream))                             \
    X(event_synchronize, "cuEventSynchronize", (void *event))                                 \
    X(event_elapsed, "cuEventElapsedTime", (float *ms, void *begin, void *end))               \
    X(event_destroy, "cuEventDestroy_v2", (void *event))                                      \
    X(library_load, "cuLibraryLoadData",                                                      \
      (void **library, const void *code, int *jit_options, void **jit_values, unsigned n_jit, \
       int *options, void **values, unsigned n))                                              \
    X(library_unload, "cuLibraryUnload", (void *library))                                     \
    X(library_kernel, "cuLibraryGetKernel", (void **kernel, void *library, const char *name)) \
    X(kernel_set, "cuKernelSetAttribute",                                                     \
      (int attribute, int value, void *kernel, int device))                                   \
    X(launch, "cuLaunchKernel",                                                               \
      (void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,               \
       void **parameters, void **extra))                                                      \
    X(launch_ex, "cuLaunchKernelEx",                                                          \
      (const cu_launch *how, void *kernel, void **parameters, void **extra))                  \
    X(encode_map, "cuTensorMapEncodeTiled",                                                   \
      (cu_map * map, int type, unsigned rank, void *address, const uint64_t *sizes,           \
       const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,   \
       int swizzle, int promotion, int oob_fill))

typedef struct cu_driver {
#define X(name, symbol, parameters) int(*name) parameters;
    CU_DRIVER_FUNCTIONS(X)
#undef X
} cu_driver;

/* The driver, loaded and initialised on first use; EBACKEND says why there is none. */
saccade_status cu_get_driver(const cu_driver **out, saccade_error *err);
/* Turns a driver result into a status that names the call. */
saccade_status cu_check(const cu_driver *driver, int result, const char *call,
                        saccade_error *err);
/* Makes device's primary context current unless a context of that device already is; cu_leave
 * undoes it. The process holds one reference to each primary context it has entered, so that
 * memory allocated there outlives the call. */
enum { CU_DEVICES_MOST = 64 };
saccade_status cu_enter(const cu_driver *driver, int device, void **pushed, saccade_error *err);
void cu_leave(const cu_driver *driver, void *pushed);
/* The device of the current context, the first where none is. */
int cu_current_device(const cu_driver *driver);

typedef struct cu_device {
    int sm;   /* 90 for compute capability 9.0 */
    int n_sm; /* multiprocessors */
    int l2_bytes;
} cu_device;
saccade_status cu_get_device(const cu_driver *driver, int device, cu_device *out,
                             saccade_error *err);

/* ---- compile.c: NVRTC and the cache ---- */

typedef struct cu_source {
    const char *name, *text;
} cu_source;

/* What ptxas said of a program. */
typedef struct cu_report {
    int registers, spill_bytes;
    int is_serialised; /* wgmma waits put in by ptxas, or setmaxnreg ignored */
    int from_cache;
    float seconds; /* to compile */
} cu_report;

typedef struct cu_image {
    void *code; /* cubin, or PTX for compute_ targets; free() */
    size_t bytes;
    cu_report report;
} cu_image;

/* Compiles kern/<entry> with the generated headers for arch ("sm_90a", "compute_80"), or takes
 * it from the cache. */
saccade_status cu_compile(const char *entry, const cu_source *generated, int n_generated,
                          const char *arch, cu_image *out, saccade_error *err);

#endif
