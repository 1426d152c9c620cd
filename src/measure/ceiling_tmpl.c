/* The loops behind saccade_measure_ceilings, once per level: enough independent multiply-adds
 * to fill the pipeline (latency 4-5 times 2 units), all in registers; tiles that come from the
 * first-level cache, as every kernel's must; and a plain read of memory. */
#include "measure/ceiling.h"

#include <string.h>

#define PASTE2(name, level) name##_##level
#define PASTE(name, level) PASTE2(name, level)
#define LEVEL_OF(name) PASTE(name, LEVEL)

enum { CHAINS = 12 };
#define UNROLL _Pragma("GCC unroll 12")
#if defined(__x86_64__)
#define USED(x) __asm__ volatile("" : : "x"(x)) /* somebody wants the result */
#else
#define USED(x) __asm__ volatile("" : : "w"(x))
#endif

#if defined(LEVEL_AVX512) || defined(LEVEL_AMX)
#include <immintrin.h>
typedef __m512 vector;
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(LEVEL_AVX2)
#include <immintrin.h>
typedef __m256 vector;
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
typedef float vector __attribute__((vector_size(16)));
#define FMA(a, b, c) ((a) * (b) + (c)) /* two instructions where there is no fused one */
#endif
typedef uint64_t words __attribute__((vector_size(sizeof(vector))));

static CPU_CEILING_FLOPS(fma_flops)
{
    vector acc[CHAINS], x, y;
    UNROLL for (int j = 0; j < CHAINS; j++)
        memcpy(&acc[j], (const char *)data + 128 * j, sizeof x);
    memcpy(&x, (const char *)data + 2048, sizeof x);
    memcpy(&y, (const char *)data + 3072, sizeof y);
    for (int64_t i = 0; i < rounds; i++) {
        UNROLL for (int j = 0; j < CHAINS; j++) acc[j] = FMA(acc[j], x, y);
    }
    UNROLL for (int j = 1; j < CHAINS; j++) acc[0] += acc[j];
    USED(acc[0]);
    return 2.0 * CHAINS * (double)rounds * (double)(sizeof(vector) / sizeof(float));
}

static CPU_CEILING_READ(read_memory)
{
    const char *p = from, *end = p + bytes;
    words sum[4] = {{0}, {0}, {0}, {0}};
    for (; p < end; p += sizeof sum)
        for (int j = 0; j < 4; j++)
            sum[j] ^= *(const words *)(const void *)(p + (size_t)j * sizeof(words));
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    return sum[0][0];
}

#if defined(LEVEL_AMX)
static void configure_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    /* gcc 12 tells the optimiser of 8 bytes that ldtilecfg reads, not of all 64 */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* Four tiles of 16 x 16 f32 from two by two of 16 x 32 bf16, those loaded for each: more
 * products a load would need more than eight tiles. Products of tiles that stay in registers,
 * or hold zeros, are up to a quarter faster, and no kernel's. */
static CPU_CEILING_FLOPS(bf16_flops)
{
    enum { TILE = 1024, STEPS = CPU_CEILING_BYTES / (4 * TILE) };
    configure_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < rounds; i++) {
        const char *at = (const char *)data + i % STEPS * (4 * TILE);
        _tile_loadd(4, at, 64);
        _tile_loadd(6, at + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, at + 2 * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, at + 3 * TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 32 * (double)rounds;
}
#define BF16_FLOPS bf16_flops
#elif defined(LEVEL_AVX512)
__attribute__((target("avx512bf16"))) static CPU_CEILING_FLOPS(bf16_flops)
{
    __m512 acc[CHAINS];
    __m512bh x, y;
    UNROLL for (int j = 0; j < CHAINS; j++)
        memcpy(&acc[j], (const char *)data + 64 * j, sizeof acc[j]);
    memcpy(&x, data, sizeof x);
    memcpy(&y, (const char *)data + 2048, sizeof y);
    for (int64_t i = 0; i < rounds; i++) {
        UNROLL for (int j = 0; j < CHAINS; j++) acc[j] = _mm512_dpbf16_ps(acc[j], x, y);
    }
    UNROLL for (int j = 1; j < CHAINS; j++) acc[0] += acc[j];
    USED(acc[0]);
    return 2.0 * 32 * CHAINS * (double)rounds;
}
#define BF16_FLOPS bf16_flops
#else
#define BF16_FLOPS NULL
#endif

const cpu_ceiling LEVEL_OF(cpu_ceiling) = {fma_flops, BF16_FLOPS, read_memory};
