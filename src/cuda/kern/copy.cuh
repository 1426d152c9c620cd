/* Copies from global to shared memory by cp.async, 16 bytes at a time into swizzled rows, and
 * element by element where rows do not lie on 16 bytes. What is not there becomes 0, so that
 * what memory holds past the end is never multiplied. */
#pragma once

/* 16 bytes, or zeros where there is nothing */
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

/* 16 bytes' worth of elements that lie anywhere, `count` of which are there */
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

/* A thread copies every STEP'th row of one chunk: addresses are sums, not products, and the
 * swizzle of a row is that of the thread's first row with constant bits turned. */
template <int ROWS, int STEP>
DEVICE void copy_chunk(u32 place, const elem *head, const elem *from, long long step, int first,
                       int n, int is_there)
{
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        int is_row = first + i * STEP < n;
        copy16((place ^ (i * STEP & 7) * 16) + i * STEP * 128, is_row ? from : head,
               is_row && is_there);
        from += step;
    }
}

/* Rows first .. first + ROWS of one head, those from n on as zeros, by THREADS threads of
 * which this is number `thread`; DIM columns padded, REAL there. */
template <int ROWS, int DIM, int REAL, int THREADS>
DEVICE void copy_rows(u32 to, const elem *head, long long stride, int first, int n,
                      int is_plain, int thread)
{
    enum {
        EACH = 16 / (int)sizeof(elem),
        CHUNKS = DIM / EACH,
        STEP = THREADS > CHUNKS ? THREADS / CHUNKS : 1,
        IS_EVEN = THREADS % CHUNKS == 0 && ROWS % STEP == 0 && (STEP & (STEP - 1)) == 0
    };
    if (IS_EVEN && !is_plain) {
        int row = thread / CHUNKS, chunk = thread % CHUNKS, column = chunk * EACH;
        copy_chunk<ROWS, STEP>(swizzled(to, ROWS * 128, row, chunk), head,
                               head + (first + row) * stride + column, STEP * stride,
                               first + row, n, column < REAL);
        return;
    }
#pragma unroll 1
    for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, at = first + row, column = chunk * EACH;
        u32 place = swizzled(to, ROWS * 128, row, chunk);
        const elem *from = head + (at < n ? at : 0) * stride + (column < REAL ? column : 0);
        if (is_plain)
            copy_plain(place, from, at < n ? REAL - column : 0);
        else
            copy16(place, from, at < n && column < REAL);
    }
}
