/* Words of codes, as loads of matrices leave them, widened to pairs for tensor-core products. A
 * word of K holds neighbouring channels of one key, one of V the same channels of two keys;
 * which channel is which column of a product is free, so codes stay where they are. */
#pragma once

enum { CODE_BITS = CFG_CODES == DTYPE_I4 ? 4 : 8, PAIRS = 16 / CODE_BITS };

/* The codes of a word as f16, two to a register: all codes are f16 exactly. Of K: channels
 * (0, 1), (2, 3); of V: channel 0 of both keys, channel 1; of i4 alike: (0, 4), (1, 5), (2, 6),
 * (3, 7). */
template <int IS_VALUE> DEVICE void widen(u32 w, u32 (&h)[PAIRS])
{
#if CFG_CODES == DTYPE_I4
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 x = ((w >> 4 * i) & 0x000f000f) ^ 0x64086408; /* 1024 + 8 + code */
        asm("sub.f16x2 %0, %1, %2;" : "=r"(h[i]) : "r"(x), "r"(0x64086408));
    }
#elif CFG_CODES == DTYPE_I8
    u32 x = w ^ 0x80808080;
    h[0] = __byte_perm(x, 0x64646464, IS_VALUE ? 0x4240 : 0x4140); /* 1024 + 128 + code */
    h[1] = __byte_perm(x, 0x64646464, IS_VALUE ? 0x4341 : 0x4342);
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm("sub.f16x2 %0, %1, %2;" : "=r"(h[i]) : "r"(h[i]), "r"(0x64806480));
#elif CFG_CODES == DTYPE_E5M2
    h[0] = __byte_perm(w, 0, IS_VALUE ? 0x2404 : 0x1404);
    h[1] = __byte_perm(w, 0, IS_VALUE ? 0x3414 : 0x3424);
#else
    u32 x = IS_VALUE ? __byte_perm(w, 0, 0x3120) : w;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi;}"
        : "=r"(h[0]), "=r"(h[1])
        : "r"(x));
#endif
}

DEVICE void halves_to_floats(u32 h, float &lo, float &hi)
{
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(lo), "=f"(hi)
        : "r"(h));
}

DEVICE u32 pack_halves(float lo, float hi)
{
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Pairs times their scales, as elements of Q's dtype. */
DEVICE u32 scaled_pair(u32 h, float scale_lo, float scale_hi)
{
    float lo, hi;
    halves_to_floats(h, lo, hi);
    return pack(lo * scale_lo, hi * scale_hi);
}

#if !CFG_F16
/* A word of V as pairs of bf16, which has bits enough for every code. */
DEVICE void widen_value(u32 w, u32 (&h)[PAIRS])
{
#if CFG_CODES == DTYPE_I4
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 x = ((w >> 4 * i) & 0x000f000f) ^ 0x43084308; /* 128 + 8 + code */
        asm("sub.bf16x2 %0, %1, %2;" : "=r"(h[i]) : "r"(x), "r"(0x43084308));
    }
#elif CFG_CODES == DTYPE_I8
#pragma unroll
    for (int i = 0; i < 2; i++) { /* 128 + low bits, less 128, or 256 where negative */
        u32 x = w >> 8 * i, all = (x & 0x007f007f) | 0x43004300;
        u32 less = (x & 0x00800080) | 0x43004300;
        asm("sub.bf16x2 %0, %1, %2;" : "=r"(h[i]) : "r"(all), "r"(less));
    }
#else
    widen<1>(w, h);
#pragma unroll
    for (int i = 0; i < 2; i++)
        h[i] = scaled_pair(h[i], 1.f, 1.f);
#endif
}
#endif

/* ---- products ---- */

DEVICE void mma_halves(float *d, const u32 *a, u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
