/* kv_rows.h: the one place that knows where a row of Q, K, V or O lies. Kernels get rows that
 * follow each other by one stride, from the first row they may touch; whether keys lie in one
 * piece or in chunks is settled here, once per block and never per row where they do. */
#ifndef SACCADE_CPU_KV_KV_ROWS_H
#define SACCADE_CPU_KV_KV_ROWS_H

#include "plan/plan.h"

/* Row r starts at base + r * stride bytes. */
typedef struct cpu_rows {
    const char *base;
    int64_t stride;
    saccade_dtype dtype;
    int32_t dim;
} cpu_rows;

/* All rows of one (b, head) of a tensor [B, H, N, D]. */
cpu_rows cpu_rows_of(const saccade_tensor *t, int64_t b, int64_t h);

static inline cpu_rows cpu_rows_from(cpu_rows rows, int64_t r)
{
    rows.base += r * rows.stride;
    return rows;
}

/* Keys as decode takes them: rows by one stride, or groups of KV_GROUP rows that lie apart. */
enum { KV_GROUP = 16, KV_GROUPS = 16 /* at most */ };

typedef struct cpu_keys {
    cpu_rows rows;
    const char *const *groups; /* where each group begins; NULL: all are in one piece */
} cpu_keys;

/* Where key j lies, and those after it up to the end of its group. */
static inline const char *cpu_key(const cpu_keys *keys, int64_t j)
{
    return keys->groups ? keys->groups[j / KV_GROUP] + j % KV_GROUP * keys->rows.stride
                        : keys->rows.base + j * keys->rows.stride;
}

static inline cpu_rows cpu_keys_from(const cpu_keys *keys, int64_t j)
{
    cpu_rows rows = keys->rows;
    rows.base = cpu_key(keys, j);
    return rows;
}

/* n quantised rows as floats of dtype f32 or bf16, one after the other from `to` on: a code
 * times by_row of its row and by_channel of its place, which has whole vectors (NULL: 1). */
#define KV_DEQUANTISE(name)                                                                  \
    void name(const cpu_rows *from, int32_t n, const float *by_row, const float *by_channel, \
              saccade_dtype dtype, void *to)

/* What the rows of a quantised K or V become. convert NULL: they are floats already. */
typedef struct kv_codes {
    KV_DEQUANTISE((*convert));
    saccade_dtype dtype;         /* f32 or bf16 */
    const saccade_tensor *scale; /* NULL: 1 */
    plan_groups groups;
    int64_t b, g;
    float factor; /* of kv_raw's scales */
} kv_codes;

/* The keys of one (b, kv head) of K or V, by their logical numbers. */
typedef struct kv_view {
    cpu_rows rows;        /* of the tensor */
    const int32_t *first; /* entries of chunks, NULL: logical keys are rows */
    int64_t entry_stride; /* bytes from an entry's first key to that of the next number */
    int64_t last;         /* the last row, or the last page */
    int32_t count, size;  /* chunks; keys of a chunk */
    int32_t is_paged;
    kv_codes codes;
} kv_view;

kv_view kv_view_of(const plan_run *run, const saccade_tensor *t, int64_t b, int64_t g);
/* kv_view_of a K (or V) that may be quantised: its blocks are then floats of this dtype. */
kv_view kv_view_as(const plan_problem *problem, const plan_run *run, int is_value, int64_t b,
                   int64_t g, KV_DEQUANTISE((*convert)), saccade_dtype dtype);
/* Keys [j, j + n) as rows that follow each other: where they lie if that is in one piece, else
 * copied to `room`, n rows without gaps; quantised ones are converted there. Keys of absent
 * chunks are zeros. */
cpu_rows kv_block(const kv_view *view, int64_t j, int64_t n, void *room);
/* kv_block as keys of decode, which are not copied where they lie in groups. */
cpu_keys kv_keys(const kv_view *view, int64_t j, int64_t n, void *room,
                 const char *groups[KV_GROUPS]);
/* kv_block of quantised keys. */
cpu_rows kv_convert(const kv_view *view, int64_t j, int64_t n, void *room);
/* Whether each row of quantised keys has one scale, or none. */
int kv_is_by_row(const kv_view *view);
/* Such keys [j, j + n) as codes, and the scale of each: where they lie, or copied to `room`. */
cpu_rows kv_raw(const kv_view *view, int64_t j, int64_t n, void *room, float *by_row);
/* Where key j of a view with chunks lies, NULL in an absent one and past the last; *left: that
 * key and those that follow it there. */
const char *kv_place_of(const kv_view *view, int64_t j, int64_t *left);
/* Bytes of room for n keys of D and Dv elements; 0 where keys are floats in one piece. */
size_t kv_room(const plan_problem *problem, int64_t n);

#endif
