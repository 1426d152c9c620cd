/* Dropout of weights: which of a thread's fragment are kept, by the generator of mod/dropout.h.
 * A thread has rows q and q + 8 and pairs of keys 8 apart, which is how patches lie: one draw
 * serves 8 of its weights. Weights that are dropped become 0 after they were summed; the factor
 * of the others is applied where a row ends. */
#pragma once

#if CFG_DROP
#define DROPOUT_FN DEVICE
#include "dropout.h"

enum { MOST_ROW = 0x7fffffff, MOST_COLUMN = 0x3fffffff }; /* positions wrap */

/* What a head's patches are drawn with; the same in all lanes, and reduced over them, which
 * ends in uniform registers. */
DEVICE dropout_words drop_head(const cu_drop &d, int b, int h)
{
    u64 seed = d.seed, offset = d.offset;
    if (d.state)
        asm volatile("ld.global.b64 %0, [%2];\n"
                     "ld.global.b64 %1, [%2+8];"
                     : "=l"(seed), "=l"(offset)
                     : "l"(d.state));
    dropout_words x = dropout_head(seed, offset, (u32)(b + d.b_offset), (u32)(h + d.h_offset));
#pragma unroll
    for (int i = 0; i < 4; i++)
        x.w[i] = __reduce_or_sync(~0u, x.w[i]);
    return x;
}

/* The threshold in both halves of a word. At a rate of 1 the factor is 0 whatever is kept. */
DEVICE u32 drop_least(const cu_drop &d)
{
    return min(d.threshold, 0xffffu) * 0x10001u;
}

/* Whether the halves of x are not below those of least. */
DEVICE void drop_compare(u32 x, u32 least, bool &low, bool &high)
{
#if __CUDA_ARCH__ >= 900
    __vibmax_u16x2(x, least, &high, &low);
#else
    low = (x & 0xffffu) >= (least & 0xffffu);
    high = x >= (least & 0xffff0000u);
#endif
}

DEVICE void drop_two(float &low, float &high, u32 x, u32 least)
{
    bool keeps_low, keeps_high;
    drop_compare(x, least, keeps_low, keeps_high);
    low = keeps_low ? low : 0.f;
    high = keeps_high ? high : 0.f;
}

/* Whether one weight is dropped. */
DEVICE u32 drop_one(const dropout_words &head, u32 threshold, u32 q, u32 kv)
{
    dropout_words x = dropout_patch(head, dropout_row(q), kv / 16 * 4 + (kv >> 1 & 3));
    u32 even = q & 8 ? x.w[1] : x.w[0], odd = q & 8 ? x.w[3] : x.w[2];
    u32 two = kv & 1 ? odd : even;
    return (kv & 8 ? two >> 16 : two & 0xffffu) < threshold;
}

/* Of weights [first, past) of the fragment, a bit each, where patches do not lie as fragments
 * do. q and kv: positions of the thread's first weight. */
DEVICE u32 drop_bits(const dropout_words &head, u32 threshold, u32 q, u32 kv, int first,
                     int past)
{
    u32 bits = 0;
#pragma unroll 1
    for (int i = first; i < past; i++) {
        u32 row = q + (i & 2) * 4, key = kv + i / 4 * 8 + (i & 1);
        bits |= (drop_one(head, threshold, row, key) ^ 1) << (i & 31);
    }
    return bits;
}

/* Whether patches lie as the fragment does that begins at q and kv less r and c. */
DEVICE int drop_is_aligned(u32 q, u32 kv)
{
    return ((q | kv) & 15) == 0;
}

/* Elements 4g + {0,1} are of row q, 4g + {2,3} of row q + 8, at keys kv + 8g + {0,1}. */
template <int COUNT>
DEVICE void drop_weights(float (&s)[COUNT], const dropout_words &head, const cu_drop &d, u32 q,
                         u32 kv)
{
    static_assert(COUNT % 8 == 0, "blocks are of multiples of 16 keys");
    u32 lane = threadIdx.x & 31, c = lane & 3;
    if (drop_is_aligned(q - (lane >> 2), kv - 2 * c)) {
        u32 row = dropout_row(q), column = kv / 16 * 4 + c, least = drop_least(d);
#pragma unroll
        for (int i = 0; i < COUNT / 8; i++) {
            dropout_words x = dropout_patch(head, row, (column + 4 * i) & MOST_COLUMN);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                int at = 8 * i + (w & 1) * 2 + w / 2;
                drop_two(s[at], s[at + 4], x.w[w], least);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i += 32) {
        u32 bits = drop_bits(head, d.threshold, q, kv, i, min(COUNT, i + 32));
#pragma unroll
        for (int j = i; j < COUNT && j < i + 32; j++)
            s[j] = bits >> (j & 31) & 1 ? s[j] : 0.f;
    }
}

/* Which weights of the fragment drop_weights keeps: a bit each, set where kept; 32 at most. */
template <int COUNT>
DEVICE u32 drop_mask(const dropout_words &head, const cu_drop &d, u32 q, u32 kv)
{
    static_assert(COUNT % 8 == 0 && COUNT <= 32, "a word has them all");
    u32 lane = threadIdx.x & 31, c = lane & 3, bits = 0;
    if (!drop_is_aligned(q - (lane >> 2), kv - 2 * c))
        return drop_bits(head, d.threshold, q, kv, 0, COUNT);
    u32 row = dropout_row(q), column = kv / 16 * 4 + c, least = drop_least(d);
#pragma unroll
    for (int i = 0; i < COUNT / 8; i++) {
        dropout_words x = dropout_patch(head, row, (column + 4 * i) & MOST_COLUMN);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int at = 8 * i + (w & 1) * 2 + w / 2;
            bool low, high;
            drop_compare(x.w[w], least, low, high);
            bits |= (u32)low << at | (u32)high << (at + 4);
        }
    }
    return bits;
}

/* ---- transposed fragments: keys are rows ---- */

/* The bits of 8 weights of a square, in pairs of neighbouring queries 2c and 2c + 1: key r, key
 * r + 8, then both for queries 8 further on. Lanes of neighbouring keys share two patches: each
 * draws one and hands over the half that the other one needs. row and column: of the square. */
DEVICE void drop_pairs(u32 (&x)[4], const dropout_words &head, u32 row, u32 column)
{
    u32 lane = threadIdx.x & 31, is_odd = lane >> 2 & 1;
    dropout_words w = dropout_patch(head, row + 2 * (lane & 3) + is_odd, column + (lane >> 3));
    u32 own[2] = {is_odd ? w.w[2] : w.w[0], is_odd ? w.w[3] : w.w[1]};
    u32 low = is_odd ? 0x1054 : 0x5410, high = is_odd ? 0x3276 : 0x7632;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(~0u, is_odd ? w.w[i] : w.w[2 + i], 4);
        x[2 * i] = __byte_perm(own[i], other, low);
        x[2 * i + 1] = __byte_perm(own[i], other, high);
    }
}

/* As drop_bits, transposed: elements 4g + {0,1} are of queries q + 8g + {0,1}, key
 * kv, and 4g + {2,3} of key kv + 8. */
DEVICE u32 drop_turned_bits(const dropout_words &head, u32 threshold, u32 q, u32 kv, int to)
{
    u32 bits = 0;
#pragma unroll 1
    for (int i = 0; i < to; i++) {
        u32 row = q + i / 4 * 8 + (i & 1), key = kv + (i & 2) * 4;
        bits |= (drop_one(head, threshold, row, key) ^ 1) << i;
    }
    return bits;
}

DEVICE int drop_is_turned_aligned(u32 q, u32 kv)
{
    u32 lane = threadIdx.x & 31;
    return drop_is_aligned(q - 2 * (lane & 3), kv - (lane >> 2));
}

template <int COUNT>
DEVICE u32 drop_turned_mask(const dropout_words &head, const cu_drop &d, u32 q, u32 kv)
{
    static_assert(COUNT % 8 == 0 && COUNT <= 32, "a word has them all");
    u32 bits = 0, least = drop_least(d);
    if (!drop_is_turned_aligned(q, kv))
        return drop_turned_bits(head, d.threshold, q, kv, COUNT);
#pragma unroll
    for (int i = 0; i < COUNT / 8; i++) {
        u32 x[4];
        drop_pairs(x, head, (q / 16 + i) * 8 & MOST_ROW, kv / 16 * 4);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            bool low, high;
            drop_compare(x[n], least, low, high);
            bits |= (u32)low << (8 * i + 2 * n) | (u32)high << (8 * i + 2 * n + 1);
        }
    }
    return bits;
}

#if CFG_SM >= 90
/* The 64 bits of a product: of one instruction, where compilers make two for its halves. */
DEVICE void multiply(u32 x, u32 y, u32 &low, u32 &high)
{
    asm("{.reg .b64 z;\n"
        "mul.wide.u32 z, %2, %3;\n"
        "mov.b64 {%0, %1}, z;}"
        : "=r"(low), "=r"(high)
        : "r"(x), "r"(y));
}

DEVICE void drop_round(u32 (&w)[4], u32 k0, u32 k1)
{
    u32 a, b, c, d;
    multiply(w[0], 0xd2511f53u, a, b);
    multiply(w[2], 0xcd9e8d57u, c, d);
    w[0] = d ^ w[1] ^ k0;
    w[1] = c;
    w[2] = b ^ w[3] ^ k1;
    w[3] = a;
}

/* ---- weights packed in pairs: a mask for each ---- */

/* A draw is a chain of products: so many of them run side by side. */
enum { DROP_AT_ONCE = 2 };

struct drop_place {
    u32 row, column;
};

/* IS_WHOLE: products by multiply: fewer instructions, and other needs of registers. */
template <int IS_WHOLE, int N>
DEVICE void drop_patches(dropout_words (&x)[N], const dropout_words &head,
                         const drop_place (&at)[N])
{
    u32 k0 = head.w[0], k1 = head.w[1];
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = {{at[n].row, at[n].column, head.w[2], head.w[3]}};
#pragma unroll
    for (int i = 0; i < DROPOUT_ROUNDS; i++) {
#pragma unroll
        for (int n = 0; n < N; n++)
            if (IS_WHOLE)
                drop_round(x[n].w, k0, k1);
            else
                x[n] = dropout_philox(k0, k1, x[n].w[0], x[n].w[1], x[n].w[2], x[n].w[3], 1);
        k0 += DROPOUT_STEP_0;
        k1 += DROPOUT_STEP_1;
    }
}

/* The threshold t in a form that makes a sign in two instructions: for t up to 2^15 that of
 * min(x, t) + 2^15 - t, for larger ones that of max(x, t - 1) + 2^15 - t is set where x is
 * not below t, and neither passes over the bounds of a half. */
template <int MOST> struct drop_bound {
    u32 bound, lift;
};

template <int MOST> DEVICE drop_bound<MOST> drop_bound_of(const cu_drop &d)
{
    u32 least = drop_least(d);
    return {MOST ? least - 0x10001u : least, 0x80008000u - least};
}

/* The signs of both halves are set for weights that are kept. */
template <int MOST> DEVICE u32 drop_signed(u32 x, const drop_bound<MOST> &t)
{
    u32 y;
    if (MOST)
        asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(t.bound));
    else
        asm("min.u16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(t.bound));
    return y + t.lift;
}

/* Weights whose half of x has no sign get one themselves. */
DEVICE void drop_by_sign(float &low, float &high, u32 x)
{
    u32 a = __float_as_uint(low), b = __float_as_uint(high);
    asm("lop3.b32 %0, %0, %1, %2, 0xf2;" : "+r"(a) : "r"(x << 16), "r"(0x80000000u));
    asm("lop3.b32 %0, %0, %1, %2, 0xf2;" : "+r"(b) : "r"(x), "r"(0x80000000u));
    low = __uint_as_float(a);
    high = __uint_as_float(b);
}

/* Bytes of 0 or 255 by the signs of those of x and y that the selector names. */
DEVICE u32 signs(u32 x, u32 y, u32 selector)
{
    u32 mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(x), "r"(y), "r"(selector));
    return mask;
}

/* Halves of a word by the two lowest bits. */
DEVICE u32 halves_of_bits(u32 bits)
{
    return (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
}

template <int MOST, int COUNT>
DEVICE void drop_squares(u32 (&p)[COUNT], const dropout_words &head, const cu_drop &d, u32 row,
                         u32 column)
{
    drop_bound<MOST> t = drop_bound_of<MOST>(d);
#pragma unroll
    for (int i = 0; i < COUNT / 4; i += DROP_AT_ONCE) {
        dropout_words x[DROP_AT_ONCE];
        drop_place at[DROP_AT_ONCE];
#pragma unroll
        for (int n = 0; n < DROP_AT_ONCE; n++)
            at[n] = {row, (column + 4 * (i + n)) & MOST_COLUMN};
        drop_patches<0>(x, head, at);
#pragma unroll
        for (int n = 0; n < 2 * DROP_AT_ONCE && 4 * i + 2 * n < COUNT; n++) {
            u32 even = drop_signed(x[n / 2].w[n & 1], t);
            u32 odd = drop_signed(x[n / 2].w[2 + (n & 1)], t);
            int to = 4 * (i + n / 2) + (n & 1);
            p[to] &= signs(even, odd, 0xdd99);
            p[to + 2] &= signs(even, odd, 0xffbb);
        }
    }
}

/* p: weights of neighbouring keys packed, as they go to the product with V; those that are
 * dropped become 0. q and kv: positions of the fragment's first weight. */
template <int COUNT>
DEVICE void drop_packed(u32 (&p)[COUNT], const dropout_words &head, const cu_drop &d, u32 q,
                        u32 kv)
{
    static_assert(COUNT % 4 == 0, "blocks are of multiples of 16 keys");
    u32 lane = threadIdx.x & 31, c = lane & 3;
    u32 row = dropout_row(q), column = kv / 16 * 4 + c;
    if (!drop_is_aligned(q - (lane >> 2), kv - 2 * c)) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 16) {
            u32 bits = drop_bits(head, d.threshold, q, kv, 2 * i, 2 * min(COUNT, i + 16));
#pragma unroll
            for (int j = i; j < COUNT && j < i + 16; j++)
                p[j] &= halves_of_bits(bits >> 2 * (j - i));
        }
    } else if (d.threshold <= 0x8000) {
        drop_squares<0>(p, head, d, row, column);
    } else {
        drop_squares<1>(p, head, d, row, column);
    }
}

/* As drop_pairs: signs go from lane to lane, and become masks where they are put together. */
template <int MOST>
DEVICE u32 drop_turned_squares(const dropout_words &head, const cu_drop &d, u32 q, u32 kv)
{
    u32 kept = 0;
    drop_bound<MOST> t = drop_bound_of<MOST>(d);
    u32 lane = threadIdx.x & 31, is_odd = lane >> 2 & 1;
    u32 low = is_odd ? 0x99dd : 0xdd99, high = is_odd ? 0xbbff : 0xffbb;
#pragma unroll
    for (int i = 0; i < 4; i += DROP_AT_ONCE) {
        dropout_words x[DROP_AT_ONCE];
        drop_place at[DROP_AT_ONCE];
#pragma unroll
        for (int n = 0; n < DROP_AT_ONCE; n++)
            at[n] = {((q / 16 + i + n) * 8 & MOST_ROW) + 2 * (lane & 3) + is_odd,
                     kv / 16 * 4 + (lane >> 3)};
        drop_patches<1>(x, head, at);
#pragma unroll
        for (int n = 0; n < 2 * DROP_AT_ONCE; n++) {
            u32 even = drop_signed(x[n / 2].w[n & 1], t);
            u32 odd = drop_signed(x[n / 2].w[2 + (n & 1)], t);
            u32 own = is_odd ? odd : even;
            u32 other = __shfl_xor_sync(~0u, is_odd ? even : odd, 4);
            int to = 4 * (i + n / 2) + 2 * (n & 1);
            kept |= signs(own, other, low) & 0x10001u << to;
            kept |= signs(own, other, high) & 0x10001u << (to + 1);
        }
    }
    return kept;
}

/* Which weights of a transposed fragment of 64 queries are kept: of word n of packed ones,
 * which are of neighbouring queries, bits n and 16 + n. */
DEVICE u32 drop_turned(const dropout_words &head, const cu_drop &d, u32 q, u32 kv)
{
    if (drop_is_turned_aligned(q, kv))
        return d.threshold <= 0x8000 ? drop_turned_squares<0>(head, d, q, kv)
                                     : drop_turned_squares<1>(head, d, q, kv);
    u32 bits = drop_turned_bits(head, d.threshold, q, kv, 32), kept = 0;
#pragma unroll
    for (int i = 0; i < 16; i++)
        kept |= (bits >> 2 * i & 1) << i | (bits >> (2 * i + 1) & 1) << (16 + i);
    return kept;
}
#endif
#endif

/* The words of the head that a walk is at; nothing without dropout. */
struct dropper {
#if CFG_DROP
    dropout_words head;
    int h; /* -1: none yet */
#endif
};

DEVICE dropper no_dropper(void)
{
    dropper x;
#if CFG_DROP
    x.h = -1;
#endif
    return x;
}

DEVICE void dropper_enter(dropper &x, const cu_fwd &p, int b, int h)
{
#if CFG_DROP
    if (x.h != h)
        x.head = drop_head(p.drop, b, h);
    x.h = h;
#endif
}

/* What sums of kept weights are multiplied by. */
DEVICE float value_factor(const cu_fwd &p)
{
#if CFG_DROP
    return p.drop.factor;
#else
    return 1.f;
#endif
}
