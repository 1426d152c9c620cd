/* Tables of gathers: the elements of one capture that a head's scores may read, where they are
 * few (buckets, offsets in a window, pairs of kinds). A CTA sums its terms there before it adds
 * them to their elements exactly, each once.
 *
 * Sums are of integers, which have no order: a term in units of the largest one so far, in two
 * or three digits of DIGIT bits, which are summed apart, so that shared memory adds 32 bits of
 * each. A larger term, or more of them than 32 bits hold, empties the table first. Of each
 * element there are as many copies as fit: lane i adds to copy i modulo copies. */
#pragma once

enum {
    DIGIT = 14,
    LOW_DIGITS = 1 << 2 * DIGIT,
    TABLE_BLOCKS = (1 << 17) / (STAY * PASS), /* that 32 bits hold */
    ROOM_ABOVE = 2, /* powers of two: a term empties the table only where it passes the top */
    LEAST_TOP = 3 * DIGIT /* so that all scales are ordinary floats */
};

/* The unit of a table: terms lie below 2^(top - 126). */
struct table_unit {
    int top, blocks; /* blocks of terms so far */
};

/* Bits of a term without its sign. */
DEVICE int term_bits(int digits)
{
    return digits * DIGIT - 1;
}

DEVICE void clear_tables(const cu_tables &x, float4 *room)
{
    for (int i = threadIdx.x; i < x.bytes / 16; i += THREADS)
        room[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

/* A warp's largest finite term, as an exponent. */
DEVICE int peak_of(const float (&term)[S_COUNT])
{
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        most = fmaxf(most, fabsf(term[i]) < -NEG_INF ? fabsf(term[i]) : 0.f);
    return (int)(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23);
}

/* The element that number i of a table stands for; first: that of number 0. */
DEVICE long long place_of_number(const cu_table &x, const cu_read &to, long long first, int i)
{
#pragma unroll 1
    for (int d = x.rank - 1; d >= 0; d--)
        if (x.size[d]) {
            first += i % x.size[d] * to.stride[d];
            i /= x.size[d];
        }
    return first;
}

/* Strides of the dimensions that are none of a table's. */
DEVICE void own_strides(const cu_table &x, const cu_read &to, long long (&stride)[CU_RANK])
{
#pragma unroll
    for (int d = 0; d < CU_RANK; d++)
        stride[d] = x.size[d] ? 0 : to.stride[d];
}

/* Adds the sums to the elements, and clears them. */
DEVICE void empty_table(const cu_bwd &p, const mod_args &mod, const cu_table &x,
                        const cu_read &to, int r, const query_tile &t, table_unit &unit,
                        int *room)
{
    long long stride[CU_RANK];
    own_strides(x, to, stride);
    long long first =
        read_place(mod, p.f, t.b, t.h, r, t.row0 + t.q_offset, t.kv_offset, stride);
    float size = __int_as_float((unit.top - term_bits(x.digits) + 1) << 23);
    for (int i = threadIdx.x; i < x.n; i += THREADS) {
        long long sum = 0;
        for (int c = 0; c < x.copies; c++) { /* threads start at banks of their own */
            int *at = room + x.at + i * x.copies + ((c + i) & (x.copies - 1));
#pragma unroll 1
            for (int w = x.digits - 1; w >= 0; w--) {
                int *word = at + w * x.n * x.copies;
                sum += (w ? (long long)*word : (long long)(u32)*word) << (w * DIGIT);
                *word = 0;
            }
        }
        if (sum != 0)
            add_exactly(to, place_of_number(x, to, first, i), (float)sum * size);
    }
    unit.blocks = 0;
}

DEVICE void add_word(u32 at, int x)
{
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

/* x: in units; next: bytes from one digit of an element to the next. All digits but the lowest
 * have a sign. */
DEVICE void add_digits(u32 at, int next, int digits, float x)
{
    if (digits == 3) { /* the high one leaves a rest that is exact */
        float high = rintf(x * (1.f / LOW_DIGITS));
        add_word(at + 2 * next, (int)high);
        x = fmaf(-high, LOW_DIGITS, x);
    }
    int low = __float2int_rn(x);
    add_word(at, low & ((1 << DIGIT) - 1));
    add_word(at + next, low >> DIGIT);
}

/* Terms that are infinite or NaN. */
DEVICE void add_special(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                        const query_tile &t, int row, int key0, const float (&term)[S_COUNT])
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++) {
        int q = row + 8 * (i / 2 & 1) + t.q_offset;
        int kv = key0 + i / 4 * 8 + 2 * (lane & 3) + (i & 1) + t.kv_offset;
        if (!(fabsf(term[i]) < -NEG_INF))
            add_nan(to, read_place(mod, p.f, t.b, t.h, r, q, kv, to.stride));
    }
}

/* Terms of a block of PASS keys, as terms_of_queries() leaves them. peaks: peak_of() all warps'
 * terms. */
DEVICE void add_to_table(const cu_bwd &p, const mod_args &mod, const cu_table &x,
                         const cu_read &to, int r, const query_tile &t, int key0,
                         const float (&term)[S_COUNT], table_unit &unit, const int (&peaks)[4],
                         int *room)
{
    int lane = threadIdx.x & 31, row = t.row0 + warp_row() + lane / 4, at[S_COUNT];
    int peak = max(max(peaks[0], peaks[1]), max(peaks[2], peaks[3]));
    if (peak > unit.top || unit.blocks == TABLE_BLOCKS) {
        if (unit.blocks > 0) {
            __syncthreads();
            empty_table(p, mod, x, to, r, t, unit, room);
            __syncthreads();
        }
        unit.top = max(peak + ROOM_ABOVE, LEAST_TOP);
    }
    unit.blocks++;
    float per_unit = __int_as_float((term_bits(x.digits) + 253 - unit.top) << 23);
    int stride[CU_RANK];
#pragma unroll
    for (int d = 0; d < CU_RANK; d++)
        stride[d] = x.stride[d];
    u32 own = smem_address(room + x.at + (lane & (x.copies - 1)));
    int is_special = 0;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++) {
        at[i] = read_place(mod, p.f, t.b, t.h, r, row + 8 * (i / 2 & 1) + t.q_offset,
                           key0 + i / 4 * 8 + 2 * (lane & 3) + (i & 1) + t.kv_offset, stride);
        is_special |= !(fabsf(term[i]) < -NEG_INF);
    }
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        add_digits(own + at[i] * x.copies * 4, x.n * x.copies * 4, x.digits,
                   fabsf(term[i]) < -NEG_INF ? term[i] * per_unit : 0.f);
    if (__any_sync(~0u, is_special))
        add_special(p, mod, to, r, t, row, key0, term);
}
