/* Fragments of products to rows of global memory. */
#pragma once

/* Two rows of a fragment, 8 apart, to global memory, 16 bytes a lane; 0 where nothing was
 * added. */
template <int COUNT>
DEVICE void store_rows(u16 *head, long long stride, int row0, int n, int real, float factor,
                       int has, const float (&x)[COUNT])
{
    enum { CHUNKS = COUNT / 4 }; /* of 8 columns */
    int j = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = row0 + 8 * i;
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 4) {
            u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int at = c + k < CHUNKS ? 4 * (c + k) + 2 * i : 0;
                w[k] = has ? pack(x[at] * factor, x[at + 1] * factor) : 0;
            }
            quad_transpose(w);
            if (row < n && (c + j) * 8 < real)
                *(uint4 *)(head + row * stride + (c + j) * 8) =
                    make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}
