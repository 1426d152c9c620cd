/* Philox over neighbouring patches at once, compiled once per level: plain loops over lanes. */
#include "cpu/kernels/drop.h"
#include "cpu/kernels/vec.h"

#if !defined(LEVEL_AMX)

enum { LANES = 4 * CPU_DROP_SQUARES };

static ALWAYS_INLINE void draw(const dropout_words *head, uint32_t row, uint32_t column,
                               uint32_t x[4][LANES])
{
    uint32_t k0 = head->w[0], k1 = head->w[1];
    for (uint32_t n = 0; n < LANES; n++) {
        x[0][n] = row;
        x[1][n] = (column + n) & 0x3fffffffu; /* positions wrap */
        x[2][n] = head->w[2];
        x[3][n] = head->w[3];
    }
    for (int round = 0; round < DROPOUT_ROUNDS; round++) {
        for (int n = 0; n < LANES; n++) {
            const uint64_t a = (uint64_t)0xd2511f53u * x[0][n];
            const uint64_t b = (uint64_t)0xcd9e8d57u * x[2][n];
            x[0][n] = (uint32_t)(b >> 32) ^ x[1][n] ^ k0;
            x[1][n] = (uint32_t)b;
            x[2][n] = (uint32_t)(a >> 32) ^ x[3][n] ^ k1;
            x[3][n] = (uint32_t)a;
        }
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

CPU_DROP(LEVEL_NAME(cpu_drop_squares))
{
    uint32_t x[4][LANES];
    for (int32_t s = 0; s < squares; s += CPU_DROP_SQUARES) {
        draw(head, row, column + 4 * (uint32_t)s, x);
        const uint32_t *even = x[is_second], *odd = x[2 + is_second];
        for (int n = 0; n < LANES; n++) {
            uint16_t *to = keep + 16 * (s + n / 4) + 2 * (n % 4);
            to[0] = (even[n] & 0xffffu) >= threshold ? 0xffff : 0;
            to[1] = (odd[n] & 0xffffu) >= threshold ? 0xffff : 0;
            to[8] = even[n] >> 16 >= threshold ? 0xffff : 0;
            to[9] = odd[n] >> 16 >= threshold ? 0xffff : 0;
        }
    }
}

#endif
