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

/* Rows first .. first + ROWS of one head, those from n on as zeros, by `threads` threads of
 * which this is number `thread`; DIM columns padded, REAL there. */
template <int ROWS, int DIM, int REAL>
DEVICE void copy_rows(u32 to, const elem *head, long long stride, int first, int n,
                      int is_plain, int thread, int threads)
{
    enum { EACH = 16 / (int)sizeof(elem), CHUNKS = DIM / EACH };
#pragma unroll 1
    for (int i = thread; i < ROWS * CHUNKS; i += threads) {
        int row = i / CHUNKS, chunk = i % CHUNKS, at = first + row, column = chunk * EACH;
        u32 place = swizzled(to, ROWS * 128, row, chunk);
        const elem *from = head + (at < n ? at : 0) * stride + (column < REAL ? column : 0);
        if (is_plain)
            copy_plain(place, from, at < n ? REAL - column : 0);
        else
            copy16(place, from, at < n && column < REAL);
    }
}
