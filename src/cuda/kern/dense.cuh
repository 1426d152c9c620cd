/* Dense reads as tiles: what scores and masks read of tensors at their own query and key comes
 * by tensor copies beside K, or in backward beside Q, for a block all reads one behind the
 * other. Its scores are CFG_TILE_ROWS rows by CFG_TN columns: queries by keys, in backward keys
 * by queries. A tile lies in panels of swizzled lines: a line a row of the scores,
 * [panels][rows][LINE], or where rows are neighbours in memory (turned) a line a column,
 * [CFG_WGS][panels][CFG_TN][LINE]. Elements of 2 bytes come to registers by ldmatrix, which
 * leaves them as products leave scores. */
#pragma once

#include "shared.cuh"

/* Which of a program's dense reads are turned, a bit of each, as a type. */
template <int BITS> struct dense_ways {
    enum { TURNED = BITS };
};

#if CFG_DENSE
#define MASK_DENSE (DENSE_READS - SCORE_DENSE)

DEVICE constexpr int dense_bytes(int r)
{
#if SCORE_DENSE
    if (r < SCORE_DENSE)
        return score_dense_bytes(r);
#endif
#if MASK_DENSE
    if (r >= SCORE_DENSE)
        return mask_dense_bytes(r - SCORE_DENSE);
#endif
    return 0;
}

template <int R> struct dense_tile {
    enum {
        EACH = dense_bytes(R),
        LINE = CU_DENSE_ROW(CFG_TN * EACH),
        PANELS = CFG_TN * EACH / LINE,
        PANEL = CFG_TILE_ROWS * LINE,
        TURNED_LINE = CU_DENSE_ROW(64 * EACH),
        TURNED_PANELS = 64 * EACH / TURNED_LINE,
        TURNED_PANEL = CFG_TN * TURNED_LINE,
        BYTES = CFG_TILE_ROWS * CFG_TN * EACH
    };
    static_assert(PANELS * PANEL == BYTES, "whole panels hold a tile");
};

/* Bytes of the tiles of reads [first, past). */
DEVICE constexpr int dense_tiles_bytes(int first, int past)
{
    int bytes = 0;
    for (int r = first; r < past; r++)
        bytes += CFG_TILE_ROWS * CFG_TN * dense_bytes(r);
    return bytes;
}

DEVICE constexpr int dense_stage_bytes(void)
{
    return dense_tiles_bytes(0, DENSE_READS);
}

DEVICE int dense_is_turned(const cu_fwd &p, int r)
{
    return p.dense_turned >> r & 1;
}

/* Calls body with the ways that reads [READ, PAST) lie, TURNED those of reads before: each has
 * code of its own, as ptxas spills where one loop reads in both ways. */
template <int READ, int PAST, int TURNED = 0, class BODY>
DEVICE void with_ways(const cu_fwd &p, const BODY &body)
{
    if constexpr (READ == PAST)
        body(dense_ways<TURNED>());
    else if (dense_is_turned(p, READ))
        with_ways<READ + 1, PAST, TURNED | 1 << READ>(p, body);
    else
        with_ways<READ + 1, PAST, TURNED>(p, body);
}

/* ---- loads ---- */

struct dense_maps {
    tensor_map of[CU_DENSE_MOST];
};

#define DENSE_PARAMETER , const __grid_constant__ dense_maps md
#define DENSE_MAPS &md

/* Where tiles of a head lie in the maps: position of the first row, and what stands beside
 * queries and keys. */
struct dense_places {
    int row, of[DENSE_READS][3];
};

template <int R>
DEVICE void load_dense_read(u32 to, u32 full, const cu_fwd &p, const tensor_map *map,
                            const dense_places &at, int column)
{
    typedef dense_tile<R> shape;
    const int(&x)[3] = at.of[R];
    if (dense_is_turned(p, R)) {
#pragma unroll
        for (int i = 0; i < CFG_WGS * shape::TURNED_PANELS; i++)
            copy_box5(to + i * shape::TURNED_PANEL, map,
                      at.row + i * shape::TURNED_LINE / shape::EACH, column, x[0], x[1], x[2],
                      full);
    } else {
#pragma unroll
        for (int i = 0; i < shape::PANELS; i++)
            copy_box5(to + i * shape::PANEL, map, column + i * shape::LINE / shape::EACH,
                      at.row, x[0], x[1], x[2], full);
    }
}

/* Reads [FIRST, PAST) of a block. */
template <int FIRST, int PAST>
DEVICE void load_dense_reads(u32 to, u32 full, const cu_fwd &p, const dense_maps *maps,
                             const dense_places &at, int column)
{
    if constexpr (FIRST < PAST) {
        load_dense_read<FIRST>(to + dense_tiles_bytes(0, FIRST), full, p, &maps->of[FIRST], at,
                               column);
        load_dense_reads<FIRST + 1, PAST>(to, full, p, maps, at, column);
    }
}

/* Bytes of a block; is_masked: what the mask reads comes too. */
DEVICE int dense_block_bytes(int is_masked)
{
    return dense_tiles_bytes(0, is_masked ? DENSE_READS : SCORE_DENSE);
}

/* The block whose first column has this position; `full` expects its bytes. */
DEVICE void load_dense_tiles(u32 to, u32 full, const cu_fwd &p, const dense_maps *maps,
                             const dense_places &at, int column, int is_masked)
{
    load_dense_reads<0, SCORE_DENSE>(to, full, p, maps, at, column);
    if (is_masked)
        load_dense_reads<SCORE_DENSE, DENSE_READS>(to, full, p, maps, at, column);
}

/* row: position of the first one */
DEVICE dense_places dense_places_at(const cu_fwd &p, const mod_args &mod, int b, int h, int row)
{
    dense_places at;
    at.row = row;
#if SCORE_DENSE
    score_dense_place(mod, p, b, h, at.of);
#endif
#if MASK_DENSE
    mask_dense_place(mod, p, b, h, at.of + SCORE_DENSE);
#endif
    return at;
}

/* ---- fragments ---- */

/* A byte of a line, swizzled as tensor copies write it. */
template <int LINE> DEVICE u32 dense_at(u32 panel, int row, int byte)
{
    return panel + row * LINE + (byte ^ ((row * LINE >> 7) & (LINE / 16 - 1)) * 16);
}

/* A thread's base address in the tile, found once a block. Other columns of its swizzled line
 * are an exclusive or away; lines 8 further on are swizzled alike. */
template <int R> DEVICE u32 dense_lane(const cu_fwd &p, u32 at, int wg)
{
    typedef dense_tile<R> shape;
    int lane = threadIdx.x & 31, first = (threadIdx.x >> 5 & 3) * 16;
    if (dense_is_turned(p, R)) {
        u32 panel = at
                    + (wg * shape::TURNED_PANELS + first * shape::EACH / shape::TURNED_LINE)
                          * shape::TURNED_PANEL;
        int byte = first * shape::EACH % shape::TURNED_LINE;
        if (shape::EACH == 2)
            return dense_at<shape::TURNED_LINE>(panel, (lane & 7) + (lane >> 4) * 8,
                                                byte + (lane >> 3 & 1) * 16);
        return dense_at<shape::TURNED_LINE>(panel, (lane & 3) * 2,
                                            byte + lane / 4 * shape::EACH);
    }
    if (shape::EACH == 2)
        return dense_at<shape::LINE>(at, wg * 64 + first + (lane & 15), (lane >> 4) * 16);
    return dense_at<shape::LINE>(at, wg * 64 + first + lane / 4, (lane & 3) * 2 * shape::EACH);
}

/* at: of the block's tiles. */
template <int R = 0>
DEVICE void dense_begin(const cu_fwd &p, u32 at, int wg, u32 (&lane)[DENSE_READS])
{
    if constexpr (R < DENSE_READS) {
        lane[R] = dense_lane<R>(p, at + dense_tiles_bytes(0, R), wg);
        dense_begin<R + 1>(p, at, wg, lane);
    }
}

template <int BYTES> DEVICE u32 load_shared(u32 at)
{
    u16 y;
    if (BYTES == 4)
        return load_word(at);
    if (BYTES == 2)
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(y) : "r"(at) : "memory");
    else
        asm volatile("ld.shared.u8 %0, [%1];" : "=h"(y) : "r"(at) : "memory");
    return y;
}

/* Elements of 2 bytes, two to a word. */
DEVICE void split_words(const u32 (&x)[4], u32 (&w)[2][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i / 2][i % 2 * 2] = x[i] & 0xffff;
        w[i / 2][i % 2 * 2 + 1] = x[i] >> 16;
    }
}

/* Elements of read R for the scores of 16 columns from column k of the block on, 8 in each of
 * w. */
template <int R> DEVICE void dense_straight(u32 lane, int k, u32 (&w)[2][4])
{
    typedef dense_tile<R> shape;
    enum { EACH = shape::EACH, LINE = shape::LINE };
    u32 x[4];
    if (EACH == 2) {
        load_matrices(x, (lane ^ k * 2 % LINE) + k * 2 / LINE * shape::PANEL);
        split_words(x, w);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int byte = (k + i / 2 * 8) * EACH;
        u32 at = (lane ^ byte % LINE) + byte / LINE * shape::PANEL + i % 2 * 8 * LINE;
        u32 *to = &w[i / 2][i % 2 * 2];
        if (EACH == 4) {
            load_two_words(to[0], to[1], at);
        } else {
            u32 both = load_shared<2>(at);
            to[0] = both & 255;
            to[1] = both >> 8;
        }
    }
}

template <int R> DEVICE void dense_turned(u32 lane, int k, u32 (&w)[2][4])
{
    typedef dense_tile<R> shape;
    enum { EACH = shape::EACH, LINE = shape::TURNED_LINE };
    u32 x[4];
    if (EACH == 2) {
        load_matrices_transposed(x, lane + k * LINE);
        split_words(x, w);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int swizzle = LINE == 128 ? i % 2 * 16 : 0;
        w[i / 4][i % 4] = load_shared<EACH>((lane ^ swizzle ^ i / 2 % 2 * 8 * EACH)
                                            + (k + i / 4 * 8 + i % 2) * LINE);
    }
}

/* Elements of reads [FIRST, FIRST + COUNT) for the scores of 16 columns from column k on.
 * TURNED: a bit for each of all reads. */
template <int FIRST, int COUNT, int TURNED>
DEVICE void dense_pairs(const u32 (&lane)[DENSE_READS], int k, u32 (*w)[2][4])
{
    if constexpr (COUNT > 0) {
        if (TURNED >> FIRST & 1)
            dense_turned<FIRST>(lane[FIRST], k, *w);
        else
            dense_straight<FIRST>(lane[FIRST], k, *w);
        dense_pairs<FIRST + 1, COUNT - 1, TURNED>(lane, k, w + 1);
    }
}

/* Of such pairs those for half `j`. */
template <int COUNT>
DEVICE void dense_half(const u32 (&pairs)[COUNT][2][4], int j, u32 (&w)[COUNT][4])
{
#pragma unroll
    for (int i = 0; i < 4 * COUNT; i++)
        w[i / 4][i % 4] = pairs[i / 4][j][i % 4];
}

#else
#define DENSE_PARAMETER
#define DENSE_MAPS 0

struct dense_maps;

template <int READ, int PAST, class BODY>
DEVICE void with_ways(const cu_fwd &, const BODY &body)
{
    body(dense_ways<0>());
}

DEVICE constexpr int dense_stage_bytes(void)
{
    return 0;
}

DEVICE int dense_block_bytes(int)
{
    return 0;
}

struct dense_places {
};

DEVICE dense_places dense_places_at(const cu_fwd &, const mod_args &, int, int, int)
{
    return dense_places();
}
#endif
