/* Dropout of weights: which of a thread's fragment are kept, by the generator of mod/dropout.h.
 * A thread has rows q and q + 8 and pairs of keys 8 apart, which is how patches lie: one draw
 * serves 8 of its weights. Weights that are dropped become 0 after they were summed; the factor
 * of the others is applied where a row ends. */
#pragma once

#if CFG_DROP
#define DROPOUT_FN DEVICE
#include "dropout.h"

enum { MOST_ROW = 0x7fffffff, MOST_COLUMN = 0x3fffffff }; /* positions wrap */

/* What a head's patches are drawn with; the same in all lanes, which ptxas sees by the shuffles
 * and so keeps what follows from it in uniform registers. */
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
        x.w[i] = __shfl_sync(~0u, x.w[i], 0);
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

/* The same fragment's weights as bits, where there are few; set: kept. */
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
/* ---- bits for weights packed in pairs, drawn while products make the scores ---- */

/* For each half of x 1 if it is below that of least, else 0. */
DEVICE u32 drop_below(u32 x, u32 least)
{
    u32 y;
    asm("{.reg .b32 most, less;\n"
        "max.u16x2 most, %1, %2;\n"
        "sub.u32 less, most, %1;\n"
        "min.u16x2 %0, less, %3;}"
        : "=r"(y)
        : "r"(x), "r"(least), "r"(0x10001));
    return y;
}

/* Halves of 16 bits: ones where the sign of a byte of x or y is set. */
template <int SELECTOR> DEVICE u32 signs(u32 x, u32 y)
{
    u32 mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(x), "r"(y), "n"(SELECTOR));
    return mask;
}

/* Bits 15 - n of both halves are set for weights that are dropped. Here n counts a fragment's 8
 * squares of 16 keys, and in each row q and row q + 8; `even` has a square's keys 2c and 2c +
 * 8, `odd` 2c + 1 and 2c + 9. */
struct dropped {
    u32 even, odd;
};

template <int COUNT> struct dropped_words {
    dropped of[(COUNT + 63) / 64];
};

DEVICE dropped drop_draw_one_by_one(const dropout_words &head, u32 threshold, u32 q, u32 kv,
                                    int squares)
{
    dropped x = {0, 0};
#pragma unroll 1
    for (int n = 0; n < 2 * squares; n++) {
        u32 row = q + (n & 1) * 8, key = kv + n / 2 * 16;
        x.even = x.even * 2 + drop_one(head, threshold, row, key)
                 + (drop_one(head, threshold, row, key + 8) << 16);
        x.odd = x.odd * 2 + drop_one(head, threshold, row, key + 1)
                + (drop_one(head, threshold, row, key + 9) << 16);
    }
    return x;
}

/* q and kv: positions of a fragment's first weight. */
template <int COUNT>
DEVICE void drop_draw(dropped_words<COUNT> &to, const dropout_words &head, const cu_drop &d,
                      u32 q, u32 kv)
{
    static_assert(COUNT % 8 == 0, "blocks are of multiples of 16 keys");
    u32 lane = threadIdx.x & 31, c = lane & 3, least = drop_least(d);
    u32 row = dropout_row(q), column = kv / 16 * 4 + c;
    int is_aligned = drop_is_aligned(q - (lane >> 2), kv - 2 * c);
#pragma unroll
    for (int w = 0; w < (COUNT + 63) / 64; w++) {
        const int squares = min(8, COUNT / 8 - 8 * w);
        dropped x = {0, 0};
        if (is_aligned) {
#pragma unroll
            for (int i = 0; i < squares; i++) {
                dropout_words y =
                    dropout_patch(head, row, (column + 4 * (8 * w + i)) & MOST_COLUMN);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    x.even = x.even * 2 + drop_below(y.w[r], least);
                    x.odd = x.odd * 2 + drop_below(y.w[2 + r], least);
                }
            }
        } else {
            x = drop_draw_one_by_one(head, d.threshold, q, kv + 128 * w, squares);
        }
        to.of[w].even = x.even << (16 - 2 * squares);
        to.of[w].odd = x.odd << (16 - 2 * squares);
        asm volatile("" : "+r"(to.of[w].even), "+r"(to.of[w].odd)); /* here, not later */
    }
}

/* p: weights of neighbouring keys packed, as they go to the product with V. */
template <int COUNT>
DEVICE void drop_packed(u32 (&p)[COUNT / 2], const dropped_words<COUNT> &from)
{
#pragma unroll
    for (int i = 0; i < COUNT / 8; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 even = from.of[i / 8].even << (i % 8 * 2 + r);
            u32 odd = from.of[i / 8].odd << (i % 8 * 2 + r);
            p[4 * i + r] &= ~signs<0xdd99>(even, odd);
            p[4 * i + 2 + r] &= ~signs<0xffbb>(even, odd);
        }
    }
}

/* Of a transposed fragment of 64 queries, whose packed pairs are of neighbouring queries: bits
 * 15 - n of both halves are of pair n. */
DEVICE u32 drop_draw_turned(const dropout_words &head, const cu_drop &d, u32 q, u32 kv)
{
    u32 bits = 0, least = drop_least(d);
    if (drop_is_turned_aligned(q, kv)) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 x[4];
            drop_pairs(x, head, (q / 16 + i) * 8 & MOST_ROW, kv / 16 * 4);
#pragma unroll
            for (int n = 0; n < 4; n++)
                bits = bits * 2 + drop_below(x[n], least);
        }
    } else {
#pragma unroll 1
        for (int n = 0; n < 16; n++) {
            u32 row = q + n / 2 * 8, key = kv + (n & 1) * 8;
            bits = bits * 2 + drop_one(head, d.threshold, row, key)
                   + (drop_one(head, d.threshold, row + 1, key) << 16);
        }
    }
    asm volatile("" : "+r"(bits)); /* here, not later */
    return bits;
}

DEVICE void drop_turned(u32 (&w)[16], u32 bits)
{
#pragma unroll
    for (int n = 0; n < 16; n++)
        w[n] &= ~signs<0xbb99>(bits << n, bits << n);
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
