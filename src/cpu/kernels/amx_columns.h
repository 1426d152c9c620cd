/* amx_columns.h: columns of rows as tiles A, and sums by dims turned into sums by keys, for the
 * backward kernels on tiles. */
#ifndef SACCADE_CPU_KERNELS_AMX_COLUMNS_H
#define SACCADE_CPU_KERNELS_AMX_COLUMNS_H

#include "cpu/kernels/amx_units.h"
#include "cpu/kernels/backward_kernels.h"

/* 32 rows x 32 dims in pairs of rows [16][32] become [32 dims][32 rows]. Pairs are words of 32
 * bits: squares of VF pairs x VF dims are transposed. */
static ALWAYS_INLINE void turn_pairs(uint16_t pairs[TILE_ROWS][UNIT][2], float *to)
{
    for (int32_t c = 0; c < UNIT; c += VF)
        for (int32_t r = 0; r < TILE_ROWS; r += VF) {
            vf square[VF];
            for (int32_t t = 0; t < VF; t++)
                square[t] = vf_load((const float *)(const void *)pairs[r + t][c]);
            vf_transpose(square);
            for (int32_t t = 0; t < VF; t++)
                vf_store(to + (c + t) * TILE_ROWS + r, square[t]);
        }
}

static CPU_TURN_SUMS(turn_sums)
{
    for (int32_t j = 0; j < keys; j += VF)
        for (int32_t d = 0; d < dims; d += VF) {
            vf square[VF];
            for (int32_t t = 0; t < VF; t++)
                square[t] = vf_load(from + (int64_t)(d + t) * from_ld + j);
            vf_transpose(square);
            for (int32_t t = 0; t < VF; t++)
                vf_store(to + (int64_t)(j + t) * to_ld + d, square[t]);
        }
}

#endif
