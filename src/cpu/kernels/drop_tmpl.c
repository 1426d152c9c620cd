/* Philox over neighbouring patches at once, compiled once per level: products of 32 bits by the
 * instruction that has them where there is one, and a plain loop over patches elsewhere. */
#include "cpu/kernels/drop.h"
#include "cpu/kernels/vec.h"

#include <string.h>

#if !defined(LEVEL_AMX)

enum { MOST_COLUMN = 0x3fffffff }; /* positions wrap */

#if defined(LEVEL_AVX2) || defined(LEVEL_AVX512)

#include <immintrin.h>

typedef struct words {
    __m256i w[4];
} words;

/* High and low halves of the eight products. */
static ALWAYS_INLINE void multiply(__m256i x, uint32_t by, __m256i *high, __m256i *low)
{
    const __m256i m = _mm256_set1_epi32((int32_t)by);
    const __m256i even = _mm256_mul_epu32(x, m);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

static ALWAYS_INLINE void turn(words *x, uint32_t k0, uint32_t k1)
{
    __m256i a_high, a_low, b_high, b_low;
    multiply(x->w[0], 0xd2511f53u, &a_high, &a_low);
    multiply(x->w[2], 0xcd9e8d57u, &b_high, &b_low);
    x->w[0] =
        _mm256_xor_si256(_mm256_xor_si256(b_high, x->w[1]), _mm256_set1_epi32((int32_t)k0));
    x->w[2] =
        _mm256_xor_si256(_mm256_xor_si256(a_high, x->w[3]), _mm256_set1_epi32((int32_t)k1));
    x->w[1] = b_low;
    x->w[3] = a_low;
}

static ALWAYS_INLINE words begin(const dropout_words *head, uint32_t row, uint32_t column)
{
    const __m256i each = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i columns = _mm256_add_epi32(_mm256_set1_epi32((int32_t)column), each);
    return (words){{_mm256_set1_epi32((int32_t)row),
                    _mm256_and_si256(columns, _mm256_set1_epi32(MOST_COLUMN)),
                    _mm256_set1_epi32((int32_t)head->w[2]),
                    _mm256_set1_epi32((int32_t)head->w[3])}};
}

/* Two squares: words of even and of odd keys, 16 bits each, brought to the order of keys. */
static ALWAYS_INLINE void keep_squares(__m256i even, __m256i odd, __m256i least, uint16_t *to)
{
    __m256i low = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
    __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    low = _mm256_cmpeq_epi16(_mm256_max_epu16(low, least), low);
    high = _mm256_cmpeq_epi16(_mm256_max_epu16(high, least), high);
    _mm256_storeu_si256((void *)to, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((void *)(to + 16), _mm256_permute2x128_si256(low, high, 0x31));
}

static void keep_all(const dropout_words *head, uint32_t row, uint32_t column, int32_t squares,
                     int is_second, uint32_t threshold, uint16_t *keep)
{
    const __m256i least = _mm256_set1_epi16((int16_t)threshold);
    for (int32_t s = 0; s < squares; s += CPU_DROP_SQUARES) {
        const uint32_t at = column + 4 * (uint32_t)s;
        words x = begin(head, row, at), y = begin(head, row, at + 8);
        uint32_t k0 = head->w[0], k1 = head->w[1];
        for (int i = 0; i < DROPOUT_ROUNDS; i++) {
            turn(&x, k0, k1);
            turn(&y, k0, k1);
            k0 += 0x9e3779b9u;
            k1 += 0xbb67ae85u;
        }
        keep_squares(is_second ? x.w[1] : x.w[0], is_second ? x.w[3] : x.w[2], least,
                     keep + 16 * s);
        keep_squares(is_second ? y.w[1] : y.w[0], is_second ? y.w[3] : y.w[2], least,
                     keep + 16 * s + 32);
    }
}

#else

static void keep_all(const dropout_words *head, uint32_t row, uint32_t column, int32_t squares,
                     int is_second, uint32_t threshold, uint16_t *keep)
{
    for (int32_t n = 0; n < 4 * squares; n++) {
        const dropout_words x = dropout_patch(*head, row, (column + (uint32_t)n) & MOST_COLUMN);
        const uint32_t even = x.w[is_second], odd = x.w[2 + is_second];
        uint16_t *to = keep + 16 * (n / 4) + 2 * (n % 4);
        to[0] = (even & 0xffffu) >= threshold ? 0xffff : 0;
        to[1] = (odd & 0xffffu) >= threshold ? 0xffff : 0;
        to[8] = even >> 16 >= threshold ? 0xffff : 0;
        to[9] = odd >> 16 >= threshold ? 0xffff : 0;
    }
}

#endif

CPU_DROP(LEVEL_NAME(cpu_drop_squares))
{
    if (threshold == DROPOUT_ONE) /* no 16 bits reach it */
        memset(keep, 0, (size_t)squares * 16 * sizeof *keep);
    else
        keep_all(head, row, column, squares, is_second, threshold, keep);
}

#endif
