/* From a program's text to machine code, by NVRTC, which is found at run time, and by a cache
 * on disk. A program is one file of kern/; everything that it includes is handed to NVRTC as a
 * header in memory. What ptxas says of the code (registers, spills, serialised wgmma) stands in
 * NVRTC's log; it is read there and kept with the code. */
#include "cuda/driver/driver.h"

#include "base/dynlib.h"
#include "base/embed.h"
#include "base/filecache.h"
#include "base/hash.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { MAX_HEADERS = 128, MAX_OPTIONS = 8, KEY_SIZE = 64 };

#define NVRTC_FUNCTIONS(X)                                                                  \
    X(version, "nvrtcVersion", (int *major, int *minor))                                    \
    X(create, "nvrtcCreateProgram",                                                         \
      (void **program, const char *text, const char *name, int n, const char *const *texts, \
       const char *const *names))                                                           \
    X(compile, "nvrtcCompileProgram", (void *program, int n, const char *const *options))   \
    X(cubin_size, "nvrtcGetCUBINSize", (void *program, size_t *bytes))                      \
    X(cubin, "nvrtcGetCUBIN", (void *program, char *code))                                  \
    X(ptx_size, "nvrtcGetPTXSize", (void *program, size_t *bytes))                          \
    X(ptx, "nvrtcGetPTX", (void *program, char *code))                                      \
    X(log_size, "nvrtcGetProgramLogSize", (void *program, size_t *bytes))                   \
    X(log, "nvrtcGetProgramLog", (void *program, char *text))                               \
    X(destroy, "nvrtcDestroyProgram", (void **program))

typedef struct nvrtc {
#define X(name, symbol, parameters) int(*name) parameters;
    NVRTC_FUNCTIONS(X)
#undef X
} nvrtc;

/* Absolute names come first: add_compiler tells such a library's version from its file, without
 * loading it. */
static const char *const libraries[] = {"/usr/local/cuda/lib64/libnvrtc.so.13",
                                        "/usr/local/cuda/lib64/libnvrtc.so.12",
                                        "/usr/lib/x86_64-linux-gnu/libnvrtc.so.13",
                                        "/usr/lib/x86_64-linux-gnu/libnvrtc.so.12",
                                        "libnvrtc.so.13",
                                        "libnvrtc.so.12",
                                        "libnvrtc.so",
                                        NULL};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dynlib *library; /* stays open until the process ends */
static nvrtc compiler;
static saccade_error compiler_error;
static saccade_status compiler_status = SACCADE_EBACKEND;

static saccade_status load(saccade_error *err)
{
    TRY(dynlib_open(libraries, "NVRTC, the CUDA compiler", &library, err));
#define X(name, symbol, parameters)                                                      \
    *(void **)&compiler.name = dynlib_find(library, symbol);                             \
    FAIL_IF(!compiler.name, SACCADE_EBACKEND, "NVRTC lacks %s: got one older than 12.0", \
            symbol);
    NVRTC_FUNCTIONS(X)
#undef X
    return SACCADE_OK;
}

static void load_once(void)
{
    compiler_status = load(&compiler_error);
}

static saccade_status get_compiler(saccade_error *err)
{
    pthread_once(&once, load_once);
    FAIL_IF(compiler_status != SACCADE_OK, SACCADE_EBACKEND, "CUDA: %s",
            compiler_error.message);
    return SACCADE_OK;
}

/* The program as NVRTC wants it: the entry's text, and all it may include. */
typedef struct program {
    const char *entry;
    const char *text;
    const char *names[MAX_HEADERS], *texts[MAX_HEADERS];
    int n;
    char arch_option[64];
    const char *options[MAX_OPTIONS];
    int n_options;
} program;

static void add_header(program *p, const char *name, const char *text)
{
    assert(p->n < MAX_HEADERS);
    p->names[p->n] = name;
    p->texts[p->n] = text;
    p->n++;
}

static saccade_status assemble(const char *entry, const cu_source *generated, int n_generated,
                               const char *arch, program *p, saccade_error *err)
{
    static const char *const empty[] = {"math.h", "stdint.h", "string.h"};
    const char *convert = "";
    memset(p, 0, sizeof *p);
    p->entry = entry;
    for (const embedded_text *f = cuda_kern_files; f->name; f++) {
        if (strcmp(f->name, entry) == 0)
            p->text = f->text;
        else if (!strstr(f->name, ".cu") || strstr(f->name, ".cuh"))
            add_header(p, f->name, f->text);
        if (strcmp(f->name, "convert.cuh") == 0)
            convert = f->text;
    }
    FAIL_IF(!p->text, SACCADE_EINTERNAL, "cuda: no kernel file %s", entry);
    add_header(p, "base/convert.h", convert);
    for (int i = 0; i < 3; i++)
        add_header(p, empty[i], "");
    for (int i = 0; i < n_generated; i++)
        add_header(p, generated[i].name, generated[i].text);
    snprintf(p->arch_option, sizeof p->arch_option, "--gpu-architecture=%s", arch);
    p->options[p->n_options++] = p->arch_option;
    p->options[p->n_options++] = "--std=c++17";
    p->options[p->n_options++] = "-default-device";
    p->options[p->n_options++] = "--fmad=false"; /* see arith.cuh */
    if (strncmp(arch, "sm_", 3) == 0)
        p->options[p->n_options++] = "--ptxas-options=-v";
    return SACCADE_OK;
}

/* Adds what tells this compiler from others: the path, size and time of its file if it has a
 * known path, since loading its 100 MB only to ask for its version would take longer than all
 * the rest. Otherwise it is loaded and asked. */
static saccade_status add_compiler(hash128 *h, saccade_error *err)
{
    struct stat s;
    for (int i = 0; libraries[i]; i++) {
        if (libraries[i][0] != '/' || stat(libraries[i], &s) != 0)
            continue;
        const int64_t identity[2] = {(int64_t)s.st_size, (int64_t)s.st_mtime};
        hash_add_text(h, libraries[i]);
        hash_add(h, identity, sizeof identity);
        return SACCADE_OK;
    }
    int version[2] = {0, 0};
    TRY(get_compiler(err));
    compiler.version(&version[0], &version[1]);
    hash_add(h, version, sizeof version);
    return SACCADE_OK;
}

static saccade_status make_key(const program *p, char key[KEY_SIZE], saccade_error *err)
{
    hash128 h;
    char hex[HASH_HEX_SIZE];
    hash_init(&h);
    hash_add_text(&h, "report 3"); /* to be changed when the form of a cache entry changes */
    TRY(add_compiler(&h, err));
    hash_add_text(&h, p->text);
    for (int i = 0; i < p->n; i++) {
        hash_add_text(&h, p->names[i]);
        hash_add_text(&h, p->texts[i]);
    }
    for (int i = 0; i < p->n_options; i++)
        hash_add_text(&h, p->options[i]);
    hash_hex(&h, hex);
    snprintf(key, KEY_SIZE, "cuda-%s", hex);
    return SACCADE_OK;
}

/* the largest number that stands before `unit` in the log */
static int number_before(const char *log, const char *unit)
{
    int most = 0;
    for (const char *at = strstr(log, unit); at; at = strstr(at + 1, unit)) {
        const char *digit = at;
        while (digit > log && digit[-1] == ' ')
            digit--;
        while (digit > log && digit[-1] >= '0' && digit[-1] <= '9')
            digit--;
        const int n = atoi(digit);
        most = n > most ? n : most;
    }
    return most;
}

static void read_log(const char *log, cu_report *out)
{
    static const char *const serial[] = {"C7505", "C7508", "C7510", "C7511", "C7512",
                                         "C7513", "C7514", "C7515", "C7517", "C7520"};
    out->registers = number_before(log, " registers");
    out->spill_bytes = number_before(log, " bytes spill stores");
    out->is_serialised = 0;
    for (size_t i = 0; i < sizeof serial / sizeof serial[0]; i++)
        out->is_serialised |= strstr(log, serial[i]) != NULL;
}

static saccade_status fetch(void *handle, int is_ptx, cu_image *out, saccade_error *err)
{
    size_t bytes = 0;
    int failed =
        is_ptx ? compiler.ptx_size(handle, &bytes) : compiler.cubin_size(handle, &bytes);
    FAIL_IF(failed || bytes == 0, SACCADE_EBACKEND, "NVRTC gave no code");
    char *code = malloc(bytes);
    FAIL_IF_NULL(code);
    failed = is_ptx ? compiler.ptx(handle, code) : compiler.cubin(handle, code);
    if (failed) {
        free(code);
        FAIL(SACCADE_EBACKEND, "NVRTC gave no code");
    }
    out->code = code;
    out->bytes = bytes;
    return SACCADE_OK;
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* NVRTC 12.9 and later has a cache of its own. What comes from there comes without ptxas's
 * notes, so that spills would go unseen: it is switched off. */
static int add_no_cache(const program *p, const char *options[])
{
    int major = 0, minor = 0, n = p->n_options;
    memcpy(options, p->options, sizeof p->options);
    compiler.version(&major, &minor);
    if (major > 12 || (major == 12 && minor >= 9))
        options[n++] = "--no-cache";
    return n;
}

/* The text is ours, an architecture that is not known the caller's. */
static saccade_status say_failure(const program *p, const char *log, saccade_error *err)
{
    const char *arch = p->arch_option + sizeof "--gpu-architecture";
    const char *error = strstr(log, "error") ? strstr(log, "error") : log;
    FAIL_AT(strstr(log, "--gpu-architecture") != NULL, SACCADE_EBACKEND, "arch", 0, 0,
            "got '%s', which the NVRTC here does not know", arch);
    FAIL(SACCADE_EINTERNAL, "NVRTC fails on %s for %s: %.*s", p->entry, arch,
         (int)strcspn(error, "\n"), error);
}

static saccade_status build(const program *p, cu_image *out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    void *handle = NULL;
    char *log = NULL;
    const char *options[MAX_OPTIONS + 1];
    size_t log_bytes = 0;
    TRY(get_compiler(err));
    const int n_options = add_no_cache(p, options);
    const double begin = seconds_now();
    FAIL_IF_GOTO(compiler.create(&handle, p->text, p->entry, p->n, p->texts, p->names),
                 SACCADE_EBACKEND, "NVRTC does not take %s", p->entry);
    const int failed = compiler.compile(handle, n_options, options);
    if (compiler.log_size(handle, &log_bytes) == 0)
        log = calloc(1, log_bytes + 1);
    FAIL_IF_NULL_GOTO(log);
    compiler.log(handle, log);
    if (failed)
        TRY_GOTO(say_failure(p, log, err));
    read_log(log, &out->report);
    out->report.seconds = (float)(seconds_now() - begin);
    TRY_GOTO(fetch(handle, strstr(p->arch_option, "compute_") != NULL, out, err));
out:
    free(log);
    if (handle)
        compiler.destroy(&handle);
    return status;
}

/* A cache entry is the report followed by the code. */
static int from_cache(const char *key, cu_image *out)
{
    void *bytes;
    size_t size;
    if (!filecache_get(key, &bytes, &size))
        return 0;
    if (size <= sizeof out->report) {
        free(bytes);
        return 0;
    }
    memcpy(&out->report, bytes, sizeof out->report);
    out->report.from_cache = 1;
    out->bytes = size - sizeof out->report;
    memmove(bytes, (char *)bytes + sizeof out->report, out->bytes);
    out->code = bytes;
    return 1;
}

/* Failures are ignored: without an entry the program is compiled again next time. */
static void to_cache(const char *key, const cu_image *image)
{
    const size_t size = sizeof image->report + image->bytes;
    char *bytes = malloc(size);
    if (!bytes)
        return;
    memcpy(bytes, &image->report, sizeof image->report);
    memcpy(bytes + sizeof image->report, image->code, image->bytes);
    filecache_put(key, bytes, size, NULL);
    free(bytes);
}

saccade_status cu_compile(const char *entry, const cu_source *generated, int n_generated,
                          const char *arch, cu_image *out, saccade_error *err)
{
    program p;
    char key[KEY_SIZE];
    cu_image image = {0};
    TRY(assemble(entry, generated, n_generated, arch, &p, err));
    TRY(make_key(&p, key, err));
    if (!from_cache(key, &image)) {
        TRY(build(&p, &image, err));
        to_cache(key, &image);
    }
    *out = image;
    return SACCADE_OK;
}
