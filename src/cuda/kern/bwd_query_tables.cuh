/* Gathers from a row that follows from the query, as of t[b, h, q, f(kv)] or t[i[q], j[kv]].
 * A thread adds a query's terms in the order of keys, in f32, to a table of its own in shared
 * memory: no additions meet, no integers are needed, and bits repeat. With two copies two
 * threads have a query's keys between them.
 *
 * At the end a table goes to the elements that its query reads: stored whole where no other
 * query reads them, else added exactly. Where rows of a query's own are too long for that,
 * terms are added to them in place. */
#pragma once

enum { ADD_AT_ONCE = 4 }; /* terms whose loads are under way together */

/* The table of a copy and a row. */
DEVICE float *query_table(const cu_table &x, int *room, int copy, int row)
{
    return (float *)room + x.at + (copy * STAY + row) * x.pitch;
}

/* Elements that meet take the sum of the one before. */
template <class AT>
DEVICE void add_some(float *table, const AT (&at)[ADD_AT_ONCE],
                     const float (&term)[ADD_AT_ONCE])
{
    float sum[ADD_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ADD_AT_ONCE; i++)
        sum[i] = table[at[i]];
#pragma unroll
    for (int i = 0; i < ADD_AT_ONCE; i++) {
#pragma unroll
        for (int k = 0; k < i; k++)
            sum[i] = at[k] == at[i] ? sum[k] : sum[i];
        sum[i] += term[i];
    }
#pragma unroll
    for (int i = 0; i < ADD_AT_ONCE; i++)
        table[at[i]] = sum[i];
}

/* Terms of a block of PASS keys, as terms_of_queries() leaves them. */
DEVICE void add_to_query_tables(const cu_bwd &p, const mod_args &mod, const cu_table &x, int r,
                                const query_tile &t, int key0, const float (&term)[S_COUNT],
                                float *tile, int *room)
{
    int row = threadIdx.x % STAY, copy = threadIdx.x / STAY, n = PASS / x.copies;
    int stride[CU_RANK];
#pragma unroll
    for (int d = 0; d < CU_RANK; d++)
        stride[d] = x.stride[d];
    share_terms(term, tile);
    __syncthreads();
    float *table = query_table(x, room, copy, row);
#pragma unroll 1
    for (int c = copy * n; c < (copy + 1) * n && copy < x.copies; c += ADD_AT_ONCE) {
        float of[ADD_AT_ONCE];
        int at[ADD_AT_ONCE];
#pragma unroll
        for (int i = 0; i < ADD_AT_ONCE; i++) {
            of[i] = tile[row * PITCH + c + i];
            at[i] = read_place(mod, p.f, t.b, t.h, r, t.row0 + row + t.q_offset,
                               key0 + c + i + t.kv_offset, stride);
        }
        add_some(table, at, of);
    }
    __syncthreads();
}

/* Rows that only their query reads, in place. */
DEVICE void add_to_rows(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                        const query_tile &t, int key0, const float (&term)[S_COUNT],
                        float *tile)
{
    int row = threadIdx.x;
    share_terms(term, tile);
    __syncthreads();
#pragma unroll 1
    for (int c = 0; c < PASS && row < rows_left(p, t); c += ADD_AT_ONCE) {
        float of[ADD_AT_ONCE];
        long long at[ADD_AT_ONCE];
        bool any = false;
#pragma unroll
        for (int i = 0; i < ADD_AT_ONCE; i++) {
            of[i] = tile[row * PITCH + c + i];
            any |= of[i] != 0.f; /* NaN too */
        }
        if (!any)
            continue;
#pragma unroll
        for (int i = 0; i < ADD_AT_ONCE; i++)
            at[i] = read_place(mod, p.f, t.b, t.h, r, t.row0 + row + t.q_offset,
                               key0 + c + i + t.kv_offset, to.stride);
        add_some(to.rows, at, of);
    }
    __syncthreads();
}

DEVICE void end_query_tables(const cu_bwd &p, const mod_args &mod, const cu_table &x,
                             const cu_read &to, int is_adding, int r, const query_tile &t,
                             int *room)
{
    int rows = rows_left(p, t);
    long long stride[CU_RANK];
    own_strides(x, to, stride);
    for (int i = threadIdx.x; i < rows * x.n; i += THREADS) {
        int row = i / x.n, element = i % x.n;
        float sum = 0.f;
        for (int copy = 0; copy < x.copies; copy++)
            sum += query_table(x, room, copy, row)[element];
        if (to.words && sum == 0.f) /* not NaN */
            continue;
        long long place = place_of_number(
            x, to,
            read_place(mod, p.f, t.b, t.h, r, t.row0 + row + t.q_offset, t.kv_offset, stride),
            element);
        if (to.words)
            add_exactly(to, place, sum);
        else
            put_element(to, place, sum, is_adding);
    }
}
