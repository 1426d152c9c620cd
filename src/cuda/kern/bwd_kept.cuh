/* What bwd_elements.cu keeps of its scores while batches or heads pass: elements of tensors
 * that these share, read once. A thread has those of its own scores, of four together, in
 * shared memory; elements of 16 bits as they are. */
#pragma once

#include "bwd_element_terms.cuh"

#if CFG_KEPT
enum { KEPT_BYTES = KEPT_DTYPE ? 8 : 16 /* of four scores */ };

/* Where a thread's four scores lie, piece i of its fragment of a block. */
DEVICE u32 kept_place(u32 block, int read, int i)
{
    return block + ((read * (S_COUNT / 4) + i) * THREADS + threadIdx.x) * KEPT_BYTES;
}

enum { KEPT_BLOCK = READS_KEPT * (S_COUNT / 4) * THREADS * KEPT_BYTES };

DEVICE void put_kept(u32 block, int i, const reads_shared &x)
{
#pragma unroll
    for (int r = 0; r < READS_KEPT; r++) {
        const u32(&word)[4] = x.element[r];
        u32 at = kept_place(block, r, i);
#if KEPT_DTYPE
        store_two_words(
            at, pack_as(__uint_as_float(word[0]), __uint_as_float(word[1]), KEPT_DTYPE),
            pack_as(__uint_as_float(word[2]), __uint_as_float(word[3]), KEPT_DTYPE));
#else
        store_four(at, word[0], word[1], word[2], word[3]);
#endif
    }
}

DEVICE void take_pair(u32 x, u32 &lo, u32 &hi)
{
#if KEPT_DTYPE == DTYPE_BF16
    lo = x << 16;
    hi = x & 0xffff0000u;
#else
    lo = __float_as_uint(half_to_float((u16)x));
    hi = __float_as_uint(half_to_float((u16)(x >> 16)));
#endif
}

DEVICE void take_kept(u32 block, int i, reads_shared &to)
{
#pragma unroll
    for (int r = 0; r < READS_KEPT; r++) {
        u32 at = kept_place(block, r, i);
#if KEPT_DTYPE
        u32 x, y;
        load_two_words(x, y, at);
        take_pair(x, to.element[r][0], to.element[r][1]);
        take_pair(y, to.element[r][2], to.element[r][3]);
#else
        int4 x = load_four(at);
        to.element[r][0] = x.x, to.element[r][1] = x.y;
        to.element[r][2] = x.z, to.element[r][3] = x.w;
#endif
    }
}

/* Those of a block of keys, of the tile's queries. */
DEVICE void keep_block(const cu_bwd &p, const mod_args &mod, const query_tile &t, int key0,
                       u32 block)
{
    int lane = threadIdx.x & 31, q = t.row0 + warp_row() + lane / 4 + t.q_offset;
    slope_row r0, r1;
    slope_row_begin(mod, p.f, t.b, t.h, q, r0);
    slope_row_begin(mod, p.f, t.b, t.h, q + 8, r1);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int kv = key0 + 8 * i + 2 * (lane & 3) + t.kv_offset;
        reads_shared x;
        reads_keep4(mod, p.f, t.b, t.h, r0, r1, kv, kv + 1, x);
        put_kept(block, i, x);
    }
}
#endif

/* reads4 of piece i of a fragment of a block, with what is kept of that. */
DEVICE void reads_of_piece(const cu_bwd &p, const mod_args &mod, const query_tile &t,
                           const slope_row &r0, const slope_row &r1, int kv, float (&x)[4],
                           float (&by)[READS_ALL][4], u32 kept, int i)
{
#if CFG_KEPT
    reads_shared shared;
    take_kept(kept, i, shared);
    reads4(mod, p.f, t.b, t.h, r0, r1, kv, kv + 1, x, by, shared);
#else
    reads4(mod, p.f, t.b, t.h, r0, r1, kv, kv + 1, x, by);
#endif
}
