/* amx_units.h: a unit of 2 x 2 tiles, 32 rows x 32 columns: C in registers 0 to 3 by rows, A in
 * 4 and 5, B in 6 and 7. For templates of kernels on tiles. */
#ifndef SACCADE_CPU_KERNELS_AMX_UNITS_H
#define SACCADE_CPU_KERNELS_AMX_UNITS_H

#include "cpu/kernels/amx_tiles.h"
#include "cpu/kernels/vec.h"

/* Rows and columns; bytes of a packed step of B: 16 pairs x 32 columns. */
enum { UNIT = 2 * TILE_ROWS, UNIT_BYTES = 2 * TILE_ROWS * TILE_BYTES };

/* About what a thread does of a short run: tiles in a nanosecond, or their emulation. */
#if defined(LEVEL_AMX)
enum { TILES_FLOPS = 300 };
#else
enum { TILES_FLOPS = 9 };
#endif

#define ZERO_UNIT()   \
    do {              \
        TILE_ZERO(0); \
        TILE_ZERO(1); \
        TILE_ZERO(2); \
        TILE_ZERO(3); \
    } while (0)

static ALWAYS_INLINE void load_unit(const float *from, int64_t stride)
{
    const char *top = (const char *)from, *low = top + TILE_ROWS * stride;
    TILE_LOAD(0, top, stride);
    TILE_LOAD(1, top + TILE_BYTES, stride);
    TILE_LOAD(2, low, stride);
    TILE_LOAD(3, low + TILE_BYTES, stride);
}

static ALWAYS_INLINE void store_unit(float *to, int64_t stride)
{
    char *top = (char *)to, *low = top + TILE_ROWS * stride;
    TILE_STORE(0, top, stride);
    TILE_STORE(1, top + TILE_BYTES, stride);
    TILE_STORE(2, low, stride);
    TILE_STORE(3, low + TILE_BYTES, stride);
}

/* n floats, a multiple of VF, times factor. */
static ALWAYS_INLINE void scale_row(float *x, int32_t n, float factor)
{
    for (int32_t j = 0; j < n && factor != 1; j += VF)
        vf_store(x + j, vf_set(factor) * vf_load(x + j));
}

/* C += 32 rows of A x one packed step of B. */
static ALWAYS_INLINE void multiply_unit(const char *a, int64_t a_stride, const char *b)
{
    TILE_LOAD(4, a, a_stride);
    TILE_STREAM(6, b, 2 * TILE_BYTES);
    TILE_DOT(0, 4, 6);
    TILE_STREAM(7, b + TILE_BYTES, 2 * TILE_BYTES);
    TILE_DOT(1, 4, 7);
    TILE_LOAD(5, a + TILE_ROWS * a_stride, a_stride);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
}

/* One tile of sums goes, the next comes in its place, or zeros where there is none. */
#define SWAP_TILE(t, past, past_at, next, next_at, stride)          \
    do {                                                            \
        if (past)                                                   \
            TILE_STORE(t, (char *)(past) + (past_at), stride);      \
        if (next)                                                   \
            TILE_LOAD(t, (const char *)(next) + (next_at), stride); \
        else                                                        \
            TILE_ZERO(t);                                           \
    } while (0)

/* The first products of a unit whose sums lie at next (NULL: they begin as 0), behind those of
 * a unit whose sums go to past, if there is one: tile by tile, so that stores wait for nothing.
 * is_streamed: B is. */
static ALWAYS_INLINE void multiply_first(int is_streamed, const char *a, int64_t a_stride,
                                         const char *b, int64_t b_stride, float *past,
                                         const float *next, int64_t stride)
{
    const int64_t low = TILE_ROWS * stride;
    TILE_LOAD(4, a, a_stride);
    if (is_streamed)
        TILE_STREAM(6, b, b_stride);
    else
        TILE_LOAD(6, b, b_stride);
    SWAP_TILE(0, past, 0, next, 0, stride);
    TILE_DOT(0, 4, 6);
    if (is_streamed)
        TILE_STREAM(7, b + TILE_BYTES, b_stride);
    else
        TILE_LOAD(7, b + TILE_BYTES, b_stride);
    SWAP_TILE(1, past, TILE_BYTES, next, TILE_BYTES, stride);
    TILE_DOT(1, 4, 7);
    TILE_LOAD(5, a + TILE_ROWS * a_stride, a_stride);
    SWAP_TILE(2, past, low, next, low, stride);
    TILE_DOT(2, 5, 6);
    SWAP_TILE(3, past, low + TILE_BYTES, next, low + TILE_BYTES, stride);
    TILE_DOT(3, 5, 7);
}

/* Rows [from, past) of a unit of sums into the nearest cache. */
static ALWAYS_INLINE void prefetch_sums(const float *at, int64_t stride, int32_t from,
                                        int32_t past)
{
    const char *row = (const char *)at + from * stride;
    __asm__ volatile("" : "+r"(row));
    for (int32_t i = from; i < past && i < UNIT; i++, row += stride) {
        __builtin_prefetch(row, 1, 3);
        __builtin_prefetch(row + TILE_BYTES, 1, 3);
    }
}

#endif
