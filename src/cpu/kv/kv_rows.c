/* Rows in memory: by one stride, or keys gathered from the chunks that hold them. */
#include "cpu/kv/kv_rows.h"

#include "base/quantize.h"
#include "cpu/kv/prefetch.h"

#include <string.h>

cpu_rows cpu_rows_of(const saccade_tensor *t, int64_t b, int64_t h)
{
    return (cpu_rows){
        .base = (const char *)t->data
                + quant_bytes(t->dtype, b * t->stride[0] + h * t->stride[1]),
        .stride = quant_bytes(t->dtype, t->stride[2]),
        .dtype = t->dtype,
        .dim = (int32_t)t->shape[3],
    };
}

kv_view kv_view_of(const plan_run *run, const saccade_tensor *t, int64_t b, int64_t g)
{
    const plan_chunks *c = run->chunks;
    const int is_paged = c && c->is_paged;
    kv_view view = {.rows = cpu_rows_of(t, is_paged ? 0 : b, g)};
    if (c) {
        const plan_entries entries = plan_entries_of(c, b);
        view.first = entries.first;
        view.count = entries.count;
        view.size = c->size;
        view.is_paged = is_paged;
        view.entry_stride =
            is_paged ? quant_bytes(t->dtype, t->stride[0]) : view.rows.stride;
        view.last = t->shape[is_paged ? 0 : 2] - 1;
    }
    return view;
}

/* Rows and pages past the tensor's are its last one. */
const char *kv_place_of(const kv_view *view, int64_t j, int64_t *left)
{
    const int64_t chunk = j / view->size, at = j - chunk * view->size;
    const int64_t first = chunk < view->count ? view->first[chunk] : -1;
    const char *base = view->rows.base + at * view->rows.stride;
    *left = view->size - at;
    if (first < 0)
        return NULL;
    if (view->is_paged)
        return base + (first < view->last ? first : view->last) * view->entry_stride;
    if (first + view->size <= view->last + 1)
        return base + first * view->entry_stride;
    *left = 1;
    return view->rows.base
           + (first + at < view->last ? first + at : view->last) * view->entry_stride;
}

/* Where keys [j, j + n) lie if that is one after the other, else NULL. */
static const char *one_piece(const kv_view *view, int64_t j, int64_t n)
{
    int64_t left;
    const char *base = kv_place_of(view, j, &left);
    for (int64_t done = left; base && done < n; done += left)
        if (kv_place_of(view, j + done, &left) != base + done * view->rows.stride)
            return NULL;
    return base;
}

/* The block after this one comes nearer while this one is copied and used. */
static void prefetch_block(const kv_view *view, int64_t j, int64_t n)
{
    const int64_t each = view->rows.dim * (int64_t)saccade_dtype_bytes(view->rows.dtype);
    int64_t left;
    for (int64_t end = j + n; j < end; j += left) {
        const char *at = kv_place_of(view, j, &left);
        left = left < end - j ? left : end - j;
        for (int64_t r = 0; at && r < left; r++)
            for (int64_t line = 0; line < each; line += LINE_BYTES)
                __builtin_prefetch(at + r * view->rows.stride + line, 0, 2);
    }
}

static void gather(const kv_view *view, int64_t j, int64_t n, char *to)
{
    const size_t each = (size_t)view->rows.dim * saccade_dtype_bytes(view->rows.dtype);
    int64_t left;
    for (int64_t end = j + n; j < end; j += left) {
        const char *from = kv_place_of(view, j, &left);
        left = left < end - j ? left : end - j;
        for (int64_t r = 0; r < left; r++, to += each) {
            if (from)
                memcpy(to, from + r * view->rows.stride, each);
            else
                memset(to, 0, each);
        }
    }
}

cpu_rows kv_block(const kv_view *view, int64_t j, int64_t n, void *room)
{
    cpu_rows rows = view->rows;
    if (view->codes.convert)
        return kv_convert(view, j, n, room);
    if (!view->first)
        return cpu_rows_from(rows, j);
    rows.base = one_piece(view, j, n);
    if (rows.base)
        return rows;
    prefetch_block(view, j + n, n);
    gather(view, j, n, room);
    rows.base = room;
    rows.stride = rows.dim * (int64_t)saccade_dtype_bytes(rows.dtype);
    return rows;
}

/* Where each group of keys [j, j + n) begins; 0 where chunks cut groups or are absent. */
static int find_groups(const kv_view *view, int64_t j, int64_t n, const char *groups[KV_GROUPS])
{
    if (j % KV_GROUP || view->size % KV_GROUP)
        return 0;
    for (int64_t done = 0; done < n; done += KV_GROUP) {
        int64_t left;
        groups[done / KV_GROUP] = kv_place_of(view, j + done, &left);
        if (!groups[done / KV_GROUP] || left < KV_GROUP)
            return 0;
    }
    return 1;
}

cpu_keys kv_keys(const kv_view *view, int64_t j, int64_t n, void *room,
                 const char *groups[KV_GROUPS])
{
    cpu_keys keys = {view->rows, NULL};
    if (!view->first || view->codes.convert)
        return (cpu_keys){kv_block(view, j, n, room), NULL};
    keys.rows.base = one_piece(view, j, n);
    if (!keys.rows.base && find_groups(view, j, n, groups))
        keys.groups = groups;
    else if (!keys.rows.base)
        keys.rows = kv_block(view, j, n, room);
    return keys;
}

cpu_prefetch kv_prefetch(const kv_view *view, int64_t j, int32_t n, int parts,
                         const char *groups[KV_GROUPS])
{
    cpu_rows rows = cpu_rows_from(view->rows, view->first ? 0 : j);
    if (view->first)
        rows.base = one_piece(view, j, n);
    if (rows.base)
        return prefetch_begin(&rows, parts, n);
    if (!find_groups(view, j, n, groups))
        return (cpu_prefetch){0};
    return prefetch_groups(&rows, groups, parts, (n + KV_GROUP - 1) / KV_GROUP);
}

size_t kv_room(const plan_problem *problem, int64_t n)
{
    const saccade_sizes *s = &problem->sizes;
    const int64_t dim = s->D > s->Dv ? s->D : s->Dv;
    if (quant_is_dtype(problem->kv_dtype)) /* floats, and scales by row and by channel */
        return (size_t)(n * dim + n + dim + 2 * 16) * sizeof(float);
    if (!problem->has_chunks)
        return 0;
    return (size_t)(n * dim) * saccade_dtype_bytes(problem->kv_dtype);
}
