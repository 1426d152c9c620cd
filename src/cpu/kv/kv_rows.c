/* Rows in memory: by one stride, or keys gathered from the chunks that hold them. */
#include "cpu/kv/kv_rows.h"

#include "cpu/kv/prefetch.h"

#include <string.h>

cpu_rows cpu_rows_of(const saccade_tensor *t, int64_t b, int64_t h)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    return (cpu_rows){
        .base = (const char *)t->data + (b * t->stride[0] + h * t->stride[1]) * bytes,
        .stride = t->stride[2] * bytes,
        .dtype = t->dtype,
        .dim = (int32_t)t->shape[3],
    };
}

kv_view kv_view_of(const plan_run *run, const saccade_tensor *t, int64_t b, int64_t g)
{
    const plan_chunks *c = run->chunks;
    kv_view view = {.rows = cpu_rows_of(t, b, g), .n_rows = t->shape[2]};
    if (c) {
        view.first = c->first + b * c->row_stride;
        view.count = c->count;
        view.size = c->size;
    }
    return view;
}

/* The row that holds key j, -1 in an absent chunk and past the last; *left: that key and those
 * that follow it there. Rows past the tensor's are its last one. */
static int64_t row_of(const kv_view *view, int64_t j, int64_t *left)
{
    const int64_t chunk = j / view->size, at = j % view->size;
    const int64_t first = chunk < view->count ? view->first[chunk] : -1;
    *left = view->size - at;
    if (first < 0)
        return -1;
    if (first + view->size <= view->n_rows)
        return first + at;
    *left = 1;
    return first + at < view->n_rows ? first + at : view->n_rows - 1;
}

/* Whether keys [j, j + n) lie one after the other, from row *row on. */
static int is_one_piece(const kv_view *view, int64_t j, int64_t n, int64_t *row)
{
    int64_t left, next;
    *row = row_of(view, j, &left);
    if (*row < 0)
        return 0;
    for (int64_t done = left; done < n; done += left) {
        next = row_of(view, j + done, &left);
        if (next != *row + done)
            return 0;
    }
    return 1;
}

static void gather(const kv_view *view, int64_t j, int64_t n, char *to)
{
    const size_t each = (size_t)view->rows.dim * saccade_dtype_bytes(view->rows.dtype);
    int64_t left;
    for (int64_t end = j + n; j < end; j += left) {
        const int64_t row = row_of(view, j, &left);
        left = left < end - j ? left : end - j;
        for (int64_t r = 0; r < left; r++, to += each) {
            if (row < 0)
                memset(to, 0, each);
            else
                memcpy(to, cpu_rows_from(view->rows, row + r).base, each);
        }
    }
}

cpu_rows kv_block(const kv_view *view, int64_t j, int64_t n, void *room)
{
    cpu_rows rows = view->rows;
    int64_t row = j;
    if (!view->first || is_one_piece(view, j, n, &row))
        return cpu_rows_from(rows, row);
    gather(view, j, n, room);
    rows.base = room;
    rows.stride = rows.dim * (int64_t)saccade_dtype_bytes(rows.dtype);
    return rows;
}

cpu_prefetch kv_prefetch(const kv_view *view, int64_t j, int32_t n)
{
    int64_t row = j;
    if (view->first && !is_one_piece(view, j, n, &row))
        return (cpu_prefetch){0};
    const cpu_rows rows = cpu_rows_from(view->rows, row);
    return prefetch_begin(&rows, n);
}

size_t kv_room(const plan_problem *problem, int64_t n)
{
    const saccade_sizes *s = &problem->sizes;
    const int64_t dim = s->D > s->Dv ? s->D : s->Dv;
    if (!problem->has_chunks)
        return 0;
    return (size_t)(n * dim) * saccade_dtype_bytes(problem->kv_dtype);
}
