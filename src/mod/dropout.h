/* dropout.h: which weights of a row are kept, one text for C and for CUDA. A weight of position
 * (b, h, q, kv), as mods see them, has 16 random bits and is kept if they are not below a
 * threshold. The bits come from Philox4x32 with 7 rounds (Salmon and others, SC 2011), which is
 * counted, not stepped: any weight's are known without any other's. Frozen: results of a seed
 * are the same in all versions, back ends, tiles, pages, splits and shards.
 *
 *     w = philox(key seed, counter {offset low, offset high, b, h})            once a head
 *     x = philox(key {w0, w1}, counter {row, column, w2, w3})                  once a patch
 *
 * A patch is 8 weights of a square of 16 positions by 16 whose first are multiples of 16:
 * queries r and r + 8 (r < 8) by keys 2c, 2c + 1, 2c + 8, 2c + 9 (c < 4); row = q / 16 * 8 + r,
 * column = kv / 16 * 4 + c, of q and kv as unsigned numbers. Word x[2 (kv & 1) + (q >> 3 & 1)],
 * its low half for kv & 8 = 0. So a thread's fragment of a tensor-core product of 16 queries by
 * 16 keys is one patch, and in one of keys by queries two neighbours share two. */
#ifndef SACCADE_MOD_DROPOUT_H
#define SACCADE_MOD_DROPOUT_H

#ifndef DROPOUT_FN
#define DROPOUT_FN static inline
#endif

enum { DROPOUT_ROUNDS = 7, DROPOUT_ONE = 1 << 16 /* a rate of 1, as a threshold */ };

/* What the keys of Philox gain with a round. */
#define DROPOUT_STEP_0 0x9e3779b9u
#define DROPOUT_STEP_1 0xbb67ae85u

typedef struct dropout_words {
    unsigned w[4];
} dropout_words;

DROPOUT_FN dropout_words dropout_philox(unsigned k0, unsigned k1, unsigned c0, unsigned c1,
                                        unsigned c2, unsigned c3, int rounds)
{
    dropout_words x = {{c0, c1, c2, c3}};
    for (int i = 0; i < rounds; i++) {
        const unsigned long long a = 0xd2511f53ull * x.w[0], b = 0xcd9e8d57ull * x.w[2];
        const unsigned x1 = x.w[1], x3 = x.w[3];
        x.w[0] = (unsigned)(b >> 32) ^ x1 ^ k0;
        x.w[1] = (unsigned)b;
        x.w[2] = (unsigned)(a >> 32) ^ x3 ^ k1;
        x.w[3] = (unsigned)a;
        k0 += DROPOUT_STEP_0;
        k1 += DROPOUT_STEP_1;
    }
    return x;
}

/* What the patches of a head are drawn with. */
DROPOUT_FN dropout_words dropout_head(unsigned long long seed, unsigned long long offset,
                                      unsigned b, unsigned h)
{
    return dropout_philox((unsigned)seed, (unsigned)(seed >> 32), (unsigned)offset,
                          (unsigned)(offset >> 32), b, h, DROPOUT_ROUNDS);
}

DROPOUT_FN dropout_words dropout_patch(dropout_words head, unsigned row, unsigned column)
{
    return dropout_philox(head.w[0], head.w[1], row, column, head.w[2], head.w[3],
                          DROPOUT_ROUNDS);
}

DROPOUT_FN unsigned dropout_row(unsigned q)
{
    return q / 16 * 8 + (q & 7);
}

/* The bits of one weight. */
DROPOUT_FN unsigned dropout_bits(dropout_words head, unsigned q, unsigned kv)
{
    const dropout_words x = dropout_patch(head, dropout_row(q), kv / 16 * 4 + (kv >> 1 & 3));
    return x.w[2 * (kv & 1) + (q >> 3 & 1)] >> (kv & 8 ? 16 : 0) & 0xffffu;
}

#endif
