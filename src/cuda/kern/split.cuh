/* f32 as the sum of three bf16 numbers, which have all of its 24 bits. */
#pragma once

/* two neighbours in three words of bf16 */
DEVICE void split_two(float x, float y, u32 (&w)[3])
{
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float lo, hi;
        w[i] = pack(x, y);
        unpack(w[i], lo, hi);
        x -= lo;
        y -= hi;
    }
}
