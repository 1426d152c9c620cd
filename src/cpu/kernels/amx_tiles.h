/* amx_tiles.h: the eight tile registers, 16 rows of 64 bytes each, for templates of kernels.
 * Contract of AMX tiles:
 *   strip      32 query rows, two tiles high; rows past the item's are computed and not used
 *   Q [rows][D] and P [rows][keys] bf16, rows s_ld apart: tiles A of 16 rows x 32
 *   K [keys/32][D/2][32][2], V [keys/32][E/32][16][32][2] bf16, 16 pairs of keys: tiles B of
 *   16 pairs x 16 columns
 *   S [rows][keys] and O [rows][E] f32: tiles C of 16 x 16, accumulated over pairs
 * D, E and keys are multiples of 32 in packed memory, padded with 0.
 * Elsewhere than in level AMX the registers are plain memory, for tests: the same sums in the
 * same order, so that results are equal bit for bit (Intel SDM, TDPBF16PS). */
#ifndef SACCADE_CPU_KERNELS_AMX_TILES_H
#define SACCADE_CPU_KERNELS_AMX_TILES_H

#include "base/convert.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64, TILE_DEPTH = 32, N_TILES = 8 };

/* What ldtilecfg reads. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

#if defined(LEVEL_AMX)

/* Volatile keeps them in order among themselves, "memory" behind the stores that they read. */
#define TILE_LOAD(t, from, stride)                                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) \
                     : "memory")
/* For what is used once: leaves the nearest cache to S, P, Q and O. */
#define TILE_STREAM(t, from, stride)                                                       \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) \
                     : "memory")
#define TILE_STORE(t, to, stride)                                                          \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) \
                     : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
/* c += a b */
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

static inline void tiles_begin(void)
{
    tile_config config = {.palette = 1};
    for (int t = 0; t < N_TILES; t++) {
        config.row_bytes[t] = TILE_BYTES;
        config.rows[t] = TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

static inline void tiles_end(void)
{
    __asm__ volatile("tilerelease" ::);
}

#else

typedef union emulated_tile {
    uint16_t pairs[TILE_ROWS][TILE_DEPTH];
    float sums[TILE_ROWS][16];
} emulated_tile;

/* amx_tiles.c: one set for all kernels of a thread, since it lies in each thread's stack. */
extern _Thread_local emulated_tile cpu_emulated_tiles[N_TILES];

static inline void tile_load(int t, const void *from, int64_t stride)
{
    for (int r = 0; r < TILE_ROWS; r++)
        memcpy(cpu_emulated_tiles[t].pairs[r], (const char *)from + r * stride, TILE_BYTES);
}

static inline void tile_store(int t, void *to, int64_t stride)
{
    for (int r = 0; r < TILE_ROWS; r++)
        memcpy((char *)to + r * stride, cpu_emulated_tiles[t].pairs[r], TILE_BYTES);
}

/* The instruction takes and gives 0 for subnormal numbers. */
static inline float flush(float x)
{
    return fabsf(x) < FLT_MIN ? copysignf(0, x) : x;
}

static inline float flushed(uint16_t x)
{
    return bf16_to_f32(x & 0x7f80 ? x : x & 0x8000);
}

/* Even and odd products have sums of their own, added at the end. */
static inline void tile_dot(int c, int a, int b)
{
    float right[TILE_DEPTH / 2][TILE_DEPTH];
    for (int k = 0; k < TILE_DEPTH / 2; k++)
        for (int j = 0; j < TILE_DEPTH; j++)
            right[k][j] = flushed(cpu_emulated_tiles[b].pairs[k][j]);
    for (int r = 0; r < TILE_ROWS; r++) {
        float sum[TILE_DEPTH] = {0};
        for (int k = 0; k < TILE_DEPTH / 2; k++) {
            const float x[2] = {flushed(cpu_emulated_tiles[a].pairs[r][2 * k]),
                                flushed(cpu_emulated_tiles[a].pairs[r][2 * k + 1])};
            for (int j = 0; j < TILE_DEPTH; j++) /* the product is exact */
                sum[j] = flush(x[j % 2] * right[k][j] + sum[j]);
        }
        for (int j = 0; j < 16; j++)
            cpu_emulated_tiles[c].sums[r][j] =
                flush(cpu_emulated_tiles[c].sums[r][j] + flush(sum[2 * j] + sum[2 * j + 1]));
    }
}

#define TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define TILE_STREAM(t, from, stride) tile_load(t, from, stride)
#define TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define TILE_ZERO(t) memset(&cpu_emulated_tiles[t], 0, sizeof cpu_emulated_tiles[t])
#define TILE_DOT(c, a, b) tile_dot(c, a, b)

static inline void tiles_begin(void)
{
}

static inline void tiles_end(void)
{
}

#endif
#endif
