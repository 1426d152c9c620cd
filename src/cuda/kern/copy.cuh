/* Copies from global to shared memory by cp.async: 16 bytes at a time into swizzled rows, or
 * element by element if rows do not lie on 16 bytes. Rows and columns past the end become
 * zeros, so that what memory holds there is never multiplied. */
#pragma once

#include "kv.cuh"

/* Copies 16 bytes, or stores zeros. */
DEVICE void copy16(u32 to, const void *from, int is_there)
{
    int bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}

DEVICE void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> DEVICE void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Copies 16 bytes' worth of elements at any address; those from `count` on become zeros. */
#if CFG_F32
DEVICE void copy_plain(u32 to, const elem *from, int count)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int bytes = i < count ? 4 : 0;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 4 * i),
                     "l"(from + (i < count ? i : 0)), "r"(bytes)
                     : "memory");
    }
}
#else
DEVICE void copy_plain(u32 to, const elem *from, int count)
{
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 lo = 2 * i < count ? __ldg(from + 2 * i) : 0;
        u32 hi = 2 * i + 1 < count ? __ldg(from + 2 * i + 1) : 0;
        w[i] = lo | hi << 16;
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
}
#endif

/* A thread copies 16 bytes of every STEP'th row: addresses are sums, not products, and the
 * swizzle of a row is that of the thread's first row with constant bits turned. */
template <int ROWS, int STEP>
DEVICE void copy_column(u32 place, const row_source &rows, int column, int first, int n,
                        int is_there)
{
#if CFG_CHUNKS
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        bool is_row;
        const elem *from = row_if(rows, first + i * STEP, n, is_row) + column;
        copy16((place ^ (i * STEP & 7) * 16) + i * STEP * 128, from, is_row && is_there);
    }
#else
    const elem *from = row_address(rows, first) + column;
    long long step = STEP * rows.stride;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        int is_row = first + i * STEP < n;
        copy16((place ^ (i * STEP & 7) * 16) + i * STEP * 128, is_row ? from : rows.head,
               is_row && is_there);
        from += step;
    }
#endif
}

/* Copies rows first .. first + ROWS - 1, those from n on as zeros, by THREADS threads of which
 * this one has number `thread`. A row has DIM columns, of which REAL are in global memory. */
template <int ROWS, int DIM, int REAL, int THREADS>
DEVICE void copy_rows(u32 to, const row_source &rows, int first, int n, int is_plain,
                      int thread)
{
    enum {
        EACH = 16 / (int)sizeof(elem),
        PIECES = DIM / EACH, /* of 16 bytes, in a row */
        STEP = THREADS > PIECES ? THREADS / PIECES : 1,
        IS_EVEN = THREADS % PIECES == 0 && ROWS % STEP == 0 && (STEP & (STEP - 1)) == 0
    };
    if (IS_EVEN && !is_plain) {
        int row = thread / PIECES, piece = thread % PIECES, column = piece * EACH;
        copy_column<ROWS, STEP>(swizzled(to, ROWS * 128, row, piece), rows, column, first + row,
                                n, column < REAL);
        return;
    }
#pragma unroll 1
    for (int i = thread; i < ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES, column = piece * EACH;
        bool is_row;
        u32 place = swizzled(to, ROWS * 128, row, piece);
        const elem *from =
            row_if(rows, first + row, n, is_row) + (column < REAL ? column : 0);
        if (is_plain)
            copy_plain(place, from, is_row ? REAL - column : 0);
        else
            copy16(place, from, is_row && column < REAL);
    }
}
