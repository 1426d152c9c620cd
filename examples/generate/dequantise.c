/* dequantise.c: elements of a GGUF tensor to f32. Quantised types hold blocks of 32: an f16
 * scale, for Q4_1 an f16 least value too, then 32 bytes (Q8_0), or 16 whose low halves are
 * elements 0 to 15 and whose high halves are elements 16 to 31. */
#include "gguf.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 32 };

static float f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint32_t bits16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static float f32_of_f16(const uint8_t *p)
{
    const uint32_t h = bits16(p), sign = (h & 0x8000) << 16;
    const uint32_t exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31)
        return f32_of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent)
        return f32_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    return copysignf((float)fraction * 0x1p-24f, f32_of_bits(sign));
}

static void from_q8(const uint8_t *block, float *out)
{
    const float scale = f32_of_f16(block);
    for (int i = 0; i < BLOCK; i++)
        out[i] = scale * (float)(int8_t)block[2 + i];
}

/* x = scale * (half + shift) + least */
static void from_q4(const uint8_t *halves, float scale, int shift, float least, float *out)
{
    for (int i = 0; i < BLOCK / 2; i++) {
        out[i] = scale * (float)((halves[i] & 15) + shift) + least;
        out[i + BLOCK / 2] = scale * (float)((halves[i] >> 4) + shift) + least;
    }
}

void gguf_to_f32(const gguf_tensor *tensor, int64_t first, int64_t elements, float *out)
{
    const uint8_t *from = tensor->data;
    const int64_t b0 = first / BLOCK, blocks = elements / BLOCK;
    switch (tensor->type) {
    case 0:
        for (int64_t i = 0; i < elements; i++) {
            const uint8_t *p = from + 4 * (first + i);
            out[i] = f32_of_bits(bits16(p) | bits16(p + 2) << 16);
        }
        break;
    case 1:
        for (int64_t i = 0; i < elements; i++)
            out[i] = f32_of_f16(from + 2 * (first + i));
        break;
    case 30:
        for (int64_t i = 0; i < elements; i++)
            out[i] = f32_of_bits(bits16(from + 2 * (first + i)) << 16);
        break;
    case 2:
        for (int64_t i = 0; i < blocks; i++)
            from_q4(from + 18 * (b0 + i) + 2, f32_of_f16(from + 18 * (b0 + i)), -8, 0,
                    out + BLOCK * i);
        break;
    case 3:
        for (int64_t i = 0; i < blocks; i++)
            from_q4(from + 20 * (b0 + i) + 4, f32_of_f16(from + 20 * (b0 + i)), 0,
                    f32_of_f16(from + 20 * (b0 + i) + 2), out + BLOCK * i);
        break;
    default: /* Q8_0: no other passes the reader */
        for (int64_t i = 0; i < blocks; i++)
            from_q8(from + 34 * (b0 + i), out + BLOCK * i);
    }
}
