/* Sums of floats that are exact, and so the same in any order: an element has SUM_WORDS 64-bit
 * integers, word i in units of 2^(24 i - 149), and a float is added to the one or two that its
 * 24 bits fall into. 2^39 terms fit. The word behind them is not 0 where a term was NaN or
 * infinite. */
#pragma once

DEVICE void add_word(const cu_read &to, int word, long long at, u32 x, int is_negative)
{
    u64 wide = x;
    if (x)
        atomicAdd((unsigned long long *)to.words + word * to.n + at,
                  is_negative ? (unsigned long long)-(long long)wide
                              : (unsigned long long)wide);
}

/* The integers that a float is added to. */
struct exact_term {
    int word; /* the first of two; SUM_WORDS: NaN or infinite */
    u32 low, high;
    int is_negative;
};

DEVICE exact_term exact_term_of(float x)
{
    u32 bits = __float_as_uint(x), exponent = bits >> 23 & 255;
    u32 digits = bits & 0x7fffffu | (exponent ? 0x800000u : 0);
    u32 from = exponent - (exponent > 0); /* x is digits times 2^(from - 149) */
    int word = (int)from / 24;
    u64 shifted = (u64)digits << from % 24;
    return {exponent == 255 ? (int)SUM_WORDS : word, (u32)shifted & 0xffffffu,
            (u32)(shifted >> 24), (int)(bits >> 31)};
}

DEVICE void add_nan(const cu_read &to, long long at)
{
    to.words[(long long)SUM_WORDS * to.n + at] = 1;
}

DEVICE void add_exact_term(const cu_read &to, long long at, const exact_term &x)
{
    if (x.word == SUM_WORDS)
        return add_nan(to, at);
    add_word(to, x.word, at, x.low, x.is_negative);
    add_word(to, x.word + 1, at, x.high, x.is_negative);
}

DEVICE void add_exactly(const cu_read &to, long long at, float x)
{
    add_exact_term(to, at, exact_term_of(x));
}

/* Carried from word to word first, so that nothing cancels in floating point. */
DEVICE float exact_sum_of(const cu_read &from, long long at)
{
    u32 digits[SUM_WORDS];
    long long carry = 0;
#pragma unroll
    for (int i = 0; i < SUM_WORDS; i++) {
        carry += (long long)from.words[(long long)i * from.n + at];
        digits[i] = (u32)carry & 0xffffffu;
        carry >>= 24;
    }
    double sum = (double)carry;
#pragma unroll
    for (int i = SUM_WORDS - 1; i >= 0; i--)
        sum = sum * 16777216.0 + (double)digits[i];
    float x = (float)(sum * 1.401298464324817e-45); /* 2^-149, and no double ends there */
    return from.words[(long long)SUM_WORDS * from.n + at] ? __int_as_float(0x7fffffff) : x;
}
