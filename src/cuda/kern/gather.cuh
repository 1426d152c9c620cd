/* Keys of small pages: a warp copies rows to shared memory by 16 bytes, as tensor copies of
 * single rows take 100 cycles each (H200). The copies arrive at a barrier that counts all lanes
 * of the warp. */
#pragma once

#include "copy.cuh"

/* The lane arrives at the barrier when all copies that it has begun are done. */
DEVICE void gather_arrive(u32 full)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
}

#if CFG_CHUNKS
/* Elements from the first row of a head to a key's; -1 where it is not there. */
DEVICE long long gather_place(int b, int row, const cu_stride &stride)
{
    return row < 0 ? -1 : b * stride.b + row * stride.n;
}

/* 32 keys, from row r0 of a block of ROWS on, into panels of 64 columns, of which REAL are
 * there: lane i knows where key i lies. What is not there becomes zeros. Four rows go at a
 * time. */
template <int ROWS, int PANELS, int REAL, int AT_ONCE>
DEVICE void gather_rows(u32 to, int r0, const elem *head, long long mine)
{
    int lane = threadIdx.x & 31, piece = lane & 7;
#pragma unroll AT_ONCE
    for (int i = lane >> 3; i < min(32, ROWS - r0); i += 4) {
        long long from = __shfl_sync(~0u, mine, i);
        int row = r0 + i;
        u32 place = to + row * 128 + (piece ^ (row & 7)) * 16;
#pragma unroll
        for (int p = 0; p < PANELS; p++) {
            int column = p * 64 + piece * 8, is_there = from >= 0 && column < REAL;
            copy16(place + p * ROWS * 128, head + (is_there ? from + column : 0), is_there);
        }
    }
}
#endif
