/* The CUDA driver, found at run time, and device memory for programs without a CUDA toolkit. */
#include "cuda/driver/driver.h"

#include "base/dynlib.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* CU_DEVICE_ATTRIBUTE_ values */
enum { MULTIPROCESSORS = 16, L2_BYTES = 38, CC_MAJOR = 75, CC_MINOR = 76 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dynlib *library; /* open until the process ends */
static cu_driver driver_table;
static saccade_error driver_error;
static saccade_status driver_status = SACCADE_EBACKEND;

static saccade_status load(saccade_error *err)
{
    static const char *const names[] = {"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1",
                                        "libcuda.so", NULL};
    TRY(dynlib_open(names, "the CUDA driver", &library, err));
#define X(name, symbol, parameters)                              \
    *(void **)&driver_table.name = dynlib_find(library, symbol); \
    FAIL_IF(!driver_table.name, SACCADE_EBACKEND,                \
            "the CUDA driver lacks %s: got one older than 12.0", symbol);
    CU_DRIVER_FUNCTIONS(X)
#undef X
    TRY(cu_check(&driver_table, driver_table.init(0), "cuInit", err));
    int count = 0;
    TRY(cu_check(&driver_table, driver_table.device_count(&count), "cuDeviceGetCount", err));
    FAIL_IF(count == 0, SACCADE_EBACKEND, "the CUDA driver sees no device");
    return SACCADE_OK;
}

static void load_once(void)
{
    driver_status = load(&driver_error);
}

saccade_status cu_get_driver(const cu_driver **out, saccade_error *err)
{
    pthread_once(&once, load_once);
    FAIL_IF(driver_status != SACCADE_OK, SACCADE_EBACKEND, "CUDA: %s", driver_error.message);
    *out = &driver_table;
    return SACCADE_OK;
}

saccade_status cu_check(const cu_driver *driver, int result, const char *call,
                        saccade_error *err)
{
    const char *text = NULL;
    if (result == 0)
        return SACCADE_OK;
    driver->error_string(result, &text);
    FAIL_IF(result == 2, SACCADE_ENOMEM, "%s: out of device memory", call);
    FAIL(SACCADE_EBACKEND, "%s: CUDA error %d, %s", call, result, text ? text : "unknown");
}

/* The device's primary context, retained once. Of two threads that come first, the second gives
 * its reference back. */
static saccade_status primary_context(const cu_driver *driver, int device, void **out,
                                      saccade_error *err)
{
    static void *_Atomic contexts[CU_DEVICES_MOST];
    void *none = NULL;
    *out = atomic_load(&contexts[device]);
    if (*out)
        return SACCADE_OK;
    TRY(cu_check(driver, driver->primary_retain(out, device), "cuDevicePrimaryCtxRetain", err));
    if (!atomic_compare_exchange_strong(&contexts[device], &none, *out))
        driver->primary_release(device);
    return SACCADE_OK;
}

saccade_status cu_enter(const cu_driver *driver, int device, void **pushed, saccade_error *err)
{
    void *context = NULL;
    int current = -1;
    *pushed = NULL;
    FAIL_IF(device < 0 || device >= CU_DEVICES_MOST, SACCADE_ELIMIT,
            "CUDA: got device %d, expected 0 to %d", device, CU_DEVICES_MOST - 1);
    TRY(cu_check(driver, driver->context_current(&context), "cuCtxGetCurrent", err));
    if (context && driver->context_device(&current) == 0 && current == device)
        return SACCADE_OK;
    TRY(primary_context(driver, device, &context, err));
    TRY(cu_check(driver, driver->context_push(context), "cuCtxPushCurrent", err));
    *pushed = context;
    return SACCADE_OK;
}

int cu_current_device(const cu_driver *driver)
{
    void *context = NULL;
    int device = 0;
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    return device;
}

void cu_leave(const cu_driver *driver, void *pushed)
{
    void *popped;
    if (pushed)
        driver->context_pop(&popped);
}

saccade_status cu_get_device(const cu_driver *driver, int device, cu_device *out,
                             saccade_error *err)
{
    int major = 0, minor = 0;
    int failed = driver->device_attribute(&major, CC_MAJOR, device);
    failed = failed ? failed : driver->device_attribute(&minor, CC_MINOR, device);
    failed = failed ? failed : driver->device_attribute(&out->n_sm, MULTIPROCESSORS, device);
    failed = failed ? failed : driver->device_attribute(&out->l2_bytes, L2_BYTES, device);
    TRY(cu_check(driver, failed, "cuDeviceGetAttribute", err));
    out->sm = major * 10 + minor;
    return SACCADE_OK;
}

/* ---- public: device memory ---- */

saccade_status saccade_device_count(int32_t *count, saccade_error *err)
{
    const cu_driver *driver;
    int n = 0;
    FAIL_IF(!count, SACCADE_EINVAL, "device count: got NULL");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_check(driver, driver->device_count(&n), "cuDeviceGetCount", err));
    *count = n;
    return SACCADE_OK;
}

saccade_status saccade_device_alloc(int32_t device, size_t bytes, void **out,
                                    saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    cu_ptr memory = 0;
    FAIL_IF(!out, SACCADE_EINVAL, "device memory: got NULL");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status =
        cu_check(driver, driver->alloc(&memory, bytes ? bytes : 1), "cuMemAlloc", err);
    cu_leave(driver, pushed);
    if (status == SACCADE_OK)
        *out = (void *)(uintptr_t)memory;
    return status;
}

void saccade_device_free(int32_t device, void *memory)
{
    const cu_driver *driver;
    void *pushed;
    if (!memory || cu_get_driver(&driver, NULL) != SACCADE_OK
        || cu_enter(driver, device, &pushed, NULL) != SACCADE_OK)
        return;
    driver->free((cu_ptr)(uintptr_t)memory);
    cu_leave(driver, pushed);
}

saccade_status saccade_device_copy(int32_t device, void *to, const void *from, size_t bytes,
                                   saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status =
        cu_check(driver, driver->copy((cu_ptr)(uintptr_t)to, (cu_ptr)(uintptr_t)from, bytes),
                 "cuMemcpy", err);
    cu_leave(driver, pushed);
    return status;
}

saccade_status saccade_device_synchronize(int32_t device, saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    const saccade_status status =
        cu_check(driver, driver->context_synchronize(), "cuCtxSynchronize", err);
    cu_leave(driver, pushed);
    return status;
}
