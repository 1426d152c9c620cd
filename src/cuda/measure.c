/* What a device gives at most, and how long it took: events on a stream, after L2 was
 * overwritten where a cold run is to be timed. Nothing here is used by a run. */
#include "cuda/cuda.h"

#include "base/record.h"
#include "saccade_measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PEAK_COLUMNS = 256, /* of a wgmma; its tile is 64 rows high */
    PEAK_ROUNDS = 5000, /* about 3 ms of products */
    PEAK_THREADS = 256,
    PEAK_SHARED = (2 * 64 + PEAK_COLUMNS) * 128 + 1024,
    REPEATS = 9,
    MAX_SHARED = 8, /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    FLUSH_L2 = 4    /* times the size of L2 is overwritten */
};

static const size_t COPY_BYTES = (size_t)1 << 30;

/* ---- a timer ---- */

struct saccade_device_timer {
    const cu_driver *driver;
    int32_t device;
    void *begin, *end; /* events */
    cu_ptr flush;
    size_t flush_words;
};

static saccade_status make_timer(saccade_device_timer *t, saccade_error *err)
{
    const cu_driver *d = t->driver;
    cu_device about;
    TRY(cu_get_device(d, t->device, &about, err));
    t->flush_words = (size_t)about.l2_bytes * FLUSH_L2 / 4;
    TRY(cu_check(d, d->event_create(&t->begin, 0), "cuEventCreate", err));
    TRY(cu_check(d, d->event_create(&t->end, 0), "cuEventCreate", err));
    return cu_check(d, d->alloc(&t->flush, t->flush_words * 4), "cuMemAlloc", err);
}

saccade_status saccade_device_timer_create(int32_t device, saccade_device_timer **out,
                                           saccade_error *err)
{
    const cu_driver *driver;
    void *pushed;
    FAIL_IF(!out, SACCADE_EINVAL, "device timer: got NULL, expected room for one");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, device, &pushed, err));
    saccade_status status = SACCADE_ENOMEM;
    saccade_device_timer *t = calloc(1, sizeof *t);
    if (t) {
        t->driver = driver;
        t->device = device;
        status = make_timer(t, err);
    } else {
        status_fail(err, status, "out of memory");
    }
    cu_leave(driver, pushed);
    if (status == SACCADE_OK)
        *out = t;
    else
        saccade_device_timer_destroy(t);
    return status;
}

void saccade_device_timer_destroy(saccade_device_timer *t)
{
    void *pushed;
    if (!t)
        return;
    if (cu_enter(t->driver, t->device, &pushed, NULL) == SACCADE_OK) {
        if (t->begin)
            t->driver->event_destroy(t->begin);
        if (t->end)
            t->driver->event_destroy(t->end);
        if (t->flush)
            t->driver->free(t->flush);
        cu_leave(t->driver, pushed);
    }
    free(t);
}

saccade_status saccade_device_timer_begin(saccade_device_timer *t, void *stream, int is_cold,
                                          saccade_error *err)
{
    void *pushed;
    FAIL_IF(!t, SACCADE_EINVAL, "device timer: got NULL");
    const cu_driver *d = t->driver;
    TRY(cu_enter(d, t->device, &pushed, err));
    int failed = is_cold ? d->fill32(t->flush, 0x3f800000, t->flush_words, stream) : 0;
    failed = failed ? failed : d->event_record(t->begin, stream);
    cu_leave(d, pushed);
    return cu_check(d, failed, "beginning to time", err);
}

saccade_status saccade_device_timer_end(saccade_device_timer *t, void *stream, double *seconds,
                                        saccade_error *err)
{
    float ms = 0;
    void *pushed;
    FAIL_IF(!t || !seconds, SACCADE_EINVAL, "device timer: got NULL");
    const cu_driver *d = t->driver;
    TRY(cu_enter(d, t->device, &pushed, err));
    int failed = d->event_record(t->end, stream);
    failed = failed ? failed : d->event_synchronize(t->end);
    failed = failed ? failed : d->event_elapsed(&ms, t->begin, t->end);
    cu_leave(d, pushed);
    TRY(cu_check(d, failed, "what was timed", err));
    *seconds = 1e-3 * (double)ms;
    return SACCADE_OK;
}

/* ---- ceilings ---- */

typedef struct peak {
    const cu_driver *driver;
    saccade_device_timer *timer;
    cu_device about;
    void *library, *kernel;
    cu_ptr from, to;
} peak;

saccade_status cu_compile_peak(const char *arch, cu_image *out, saccade_error *err)
{
    const cu_tile tile = {.keys = PEAK_COLUMNS};
    char config[128];
    strbuf products;
    strbuf_init(&products, 0);
    snprintf(config, sizeof config,
             "#pragma once\n#define CFG_SM %d\n#define CFG_F16 0\n#define CFG_F32 0\n"
             "#define CFG_TN %d\n",
             strcmp(arch, "sm_90a") == 0 ? 90 : 80, PEAK_COLUMNS);
    cu_emit_products(&tile, 16, 0, &products);
    const cu_source generated[] = {{"cfg.cuh", config}, {"wgmma.cuh", strbuf_text(&products)}};
    saccade_status status = strbuf_status(&products, err);
    if (status == SACCADE_OK)
        status = cu_compile("peak.cu", generated, 2, arch, out, err);
    strbuf_free(&products);
    return status;
}

static saccade_status load(peak *p, saccade_error *err)
{
    const cu_driver *d = p->driver;
    const int is_hopper = p->about.sm == 90;
    char arch[16];
    cu_image image;
    snprintf(arch, sizeof arch, "sm_%d%s", p->about.sm, is_hopper ? "a" : "");
    TRY(cu_compile_peak(arch, &image, err));
    int failed = d->library_load(&p->library, image.code, NULL, NULL, 0, NULL, NULL, 0);
    free(image.code);
    failed = failed ? failed : d->library_kernel(&p->kernel, p->library, "peak");
    if (!failed && is_hopper)
        failed = d->kernel_set(MAX_SHARED, PEAK_SHARED, p->kernel, p->timer->device);
    return cu_check(d, failed, "loading the measured loop", err);
}

/* What one CTA multiplies and adds, times two. */
static double flops_of_cta(const peak *p, int rounds)
{
    return 2.0 * rounds
           * (p->about.sm == 90 ? 2 * 64.0 * PEAK_COLUMNS * 64 : 8 * 64.0 * 32 * 16);
}

static saccade_status time_products(peak *p, double *gflops, saccade_error *err)
{
    const cu_driver *d = p->driver;
    const int is_hopper = p->about.sm == 90, ctas = p->about.n_sm * (is_hopper ? 1 : 2);
    int rounds = is_hopper ? PEAK_ROUNDS : 2 * PEAK_ROUNDS;
    void *parameters[] = {&rounds, &p->to};
    double seconds, best = 0;
    for (int i = 0; i < REPEATS; i++) {
        TRY(saccade_device_timer_begin(p->timer, NULL, 1, err));
        TRY(cu_check(d,
                     d->launch(p->kernel, (unsigned)ctas, 1, 1, PEAK_THREADS, 1, 1,
                               is_hopper ? PEAK_SHARED : 0, NULL, parameters, NULL),
                     "cuLaunchKernel", err));
        TRY(saccade_device_timer_end(p->timer, NULL, &seconds, err));
        const double rate = 1e-9 * ctas * flops_of_cta(p, rounds) / seconds;
        best = rate > best ? rate : best;
    }
    *gflops = best;
    return SACCADE_OK;
}

/* Bytes read and bytes written, both. */
static saccade_status time_copy(peak *p, double *gbytes, saccade_error *err)
{
    const cu_driver *d = p->driver;
    double seconds, best = 0;
    for (int i = 0; i < REPEATS; i++) {
        TRY(saccade_device_timer_begin(p->timer, NULL, 0, err));
        TRY(cu_check(d, d->copy_on_device(p->to, p->from, COPY_BYTES, NULL),
                     "cuMemcpyDtoDAsync", err));
        TRY(saccade_device_timer_end(p->timer, NULL, &seconds, err));
        const double rate = 2e-9 * (double)COPY_BYTES / seconds;
        best = rate > best ? rate : best;
    }
    *gbytes = best;
    return SACCADE_OK;
}

static saccade_status measure(peak *p, saccade_device_ceilings *out, saccade_error *err)
{
    const cu_driver *d = p->driver;
    TRY(cu_get_device(d, p->timer->device, &p->about, err));
    TRY(load(p, err));
    TRY(cu_check(d, d->alloc(&p->from, COPY_BYTES), "cuMemAlloc", err));
    TRY(cu_check(d, d->alloc(&p->to, COPY_BYTES), "cuMemAlloc", err));
    TRY(cu_check(d, d->fill32(p->from, 0x3f8147ae, COPY_BYTES / 4, NULL), "cuMemsetD32Async",
                 err));
    TRY(time_products(p, &out->bf16_gflops, err));
    return time_copy(p, &out->copy_gbytes_per_s, err);
}

saccade_status saccade_measure_device(int32_t device, saccade_device_ceilings *out,
                                      saccade_error *err)
{
    peak p = {.library = NULL};
    saccade_device_ceilings made;
    void *pushed;
    TRY(record_check_size(out, "device ceilings", err));
    TRY(cu_get_driver(&p.driver, err));
    TRY(saccade_device_timer_create(device, &p.timer, err));
    saccade_status status = cu_enter(p.driver, device, &pushed, err);
    if (status == SACCADE_OK) {
        status = measure(&p, &made, err);
        if (p.library)
            p.driver->library_unload(p.library);
        p.driver->free(p.from);
        p.driver->free(p.to);
        cu_leave(p.driver, pushed);
    }
    saccade_device_timer_destroy(p.timer);
    if (status == SACCADE_OK)
        record_write(out, &made, sizeof made);
    return status;
}
