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

#define ZERO_UNIT()                                                                          \
    do {                                                                                     \
        TILE_ZERO(0);                                                                        \
        TILE_ZERO(1);                                                                        \
        TILE_ZERO(2);                                                                        \
        TILE_ZERO(3);                                                                        \
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

#endif
