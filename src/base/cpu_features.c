/* Run-time detection on x86-64: CPUID says what the core has, XGETBV what the system saves on a
   context switch, and arch_prctl whether this process may use AMX tiles (Linux 5.16 and later).
   Elsewhere the level is portable. */
#include "base/cpu_features.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const level_names[CPU_LEVELS] = {
    [CPU_PORTABLE] = "portable",
    [CPU_AVX2] = "avx2",
    [CPU_AVX512] = "avx512",
    [CPU_AMX] = "amx",
};

/* written once, under the once flag: a cache of facts that can't change. */
static cpu_features found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)

#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

enum {
    XCR0_AVX = 0x6,         /* XMM, YMM */
    XCR0_AVX512 = 0xe6,     /* and mask registers, both halves of ZMM */
    XCR0_AMX = 0x60000,     /* tile configuration and data */
    ARCH_REQ_PERM = 0x1023, /* arch_prctl: request permission for a state component */
    TILE_DATA = 18,
};

static bool bit(unsigned word, int index)
{
    return (word >> index & 1) != 0;
}

/* what the system saves; 0 when it doesn't use XSAVE at all. */
static unsigned saved_state(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return a;
}

static int32_t family(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    const unsigned base = a >> 8 & 0xf, extended = a >> 20 & 0xff;
    return (int32_t)(base == 0xf ? base + extended : base);
}

static void detect_avx2(cpu_features *f)
{
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        f->has_fma = bit(c, 12);
        f->has_f16c = bit(c, 29);
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
        f->has_avx2 = bit(b, 5);
}

static void detect_avx512(cpu_features *f)
{
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        f->has_avx512f = bit(b, 16);
        f->has_avx512dq = bit(b, 17);
        f->has_avx512bw = bit(b, 30);
        f->has_avx512vl = bit(b, 31);
        f->has_avx512_vbmi = bit(c, 1);
    }
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d))
        f->has_avx512_bf16 = bit(a, 5);
}

static bool amx_is_allowed(void)
{
#if defined(__linux__)
    return syscall(SYS_arch_prctl, ARCH_REQ_PERM, TILE_DATA) == 0;
#else
    return false;
#endif
}

static void detect_amx(cpu_features *f)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(d, 24) || !amx_is_allowed())
        return;
    f->has_amx_tile = true;
    f->has_amx_bf16 = bit(d, 22);
}

static void detect_isa(cpu_features *f)
{
    const unsigned saved = saved_state();
    f->family = family();
    if ((saved & XCR0_AVX) == XCR0_AVX)
        detect_avx2(f);
    if ((saved & XCR0_AVX512) == XCR0_AVX512)
        detect_avx512(f);
    if ((saved & XCR0_AMX) == XCR0_AMX)
        detect_amx(f);
}

#else

static void detect_isa(cpu_features *f)
{
    (void)f;
}

#endif

static cpu_level highest(const cpu_features *f)
{
    const bool avx2 = f->has_avx2 && f->has_fma && f->has_f16c;
    const bool avx512 =
        avx2 && f->has_avx512f && f->has_avx512bw && f->has_avx512vl && f->has_avx512dq;
    const bool amx = avx512 && f->has_avx512_bf16 && f->has_avx512_vbmi && f->has_amx_tile
                     && f->has_amx_bf16;
    return amx ? CPU_AMX : avx512 ? CPU_AVX512 : avx2 ? CPU_AVX2 : CPU_PORTABLE;
}

static void detect(void)
{
    detect_isa(&found);
    found.level = highest(&found);
}

const cpu_features *cpu_features_get(void)
{
    pthread_once(&once, detect);
    return &found;
}

const char *cpu_level_name(cpu_level level)
{
    return level_names[level];
}

saccade_status cpu_level_parse(const char *name, cpu_level *out, saccade_error *err)
{
    for (int level = 0; level < CPU_LEVELS; level++) {
        if (strcmp(name, level_names[level]) == 0) {
            *out = (cpu_level)level;
            return SACCADE_OK;
        }
    }
    FAIL_AT(1, SACCADE_EINVAL, "level", 0, 0,
            "got '%.20s', expected portable, avx2, avx512 or amx", name);
}

saccade_status cpu_level_allowed(cpu_level *out, saccade_error *err)
{
    cpu_level level = cpu_features_get()->level;
    const char *wish = getenv("SACCADE_LEVEL");
    if (wish != NULL && wish[0] != '\0') {
        cpu_level asked = level;
        FAIL_AT(cpu_level_parse(wish, &asked, NULL) != SACCADE_OK, SACCADE_EINVAL,
                "SACCADE_LEVEL", 0, 0,
                "got '%.20s' in the environment, expected portable, avx2, avx512 or amx", wish);
        if (asked < level)
            level = asked;
    }
    *out = level;
    return SACCADE_OK;
}

const char *cpu_level_bound(void)
{
    cpu_level allowed;
    const bool is_lowered =
        cpu_level_allowed(&allowed, NULL) == SACCADE_OK && allowed < cpu_features_get()->level;
    return is_lowered ? "the environment's SACCADE_LEVEL" : "the best of this machine";
}
