/* Outputs that lie in each other's memory or in an input's. Only what is certain is refused: an
 * element of one in the bytes of an element of the other is looked for dimension by dimension,
 * the largest stride first, so that views of one packed tensor pass. Where both have the same
 * strides that finds all; where they differ, an overlap may pass. */
#include "api/api.h"

#include "base/tensor_walk.h"

#include <stdlib.h>

/* One dimension of either: bytes between its elements, and how many of them one tensor's may
 * lie before or after the other's. */
typedef struct apart {
    int64_t stride, least, most;
} apart;

typedef struct apart_list {
    apart at[2 * SACCADE_MAX_RANK];
    int32_t n;
    int64_t bytes[2]; /* of an element of each */
} apart_list;

static int by_stride(const void *a, const void *b)
{
    const apart *x = a, *y = b;
    return (x->stride < y->stride) - (x->stride > y->stride);
}

/* Dimensions of one stride are one; elements of stride 0 are one place. */
static void add_dimensions(apart_list *list, const saccade_tensor *t, int is_second)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    list->bytes[is_second] = bytes;
    for (int32_t d = 0; d < t->rank; d++) {
        const int64_t stride = t->stride[d] * bytes, last = t->shape[d] - 1;
        int32_t i = 0;
        if (!stride || !last)
            continue;
        while (i < list->n && list->at[i].stride != stride)
            i++;
        if (i == list->n)
            list->at[list->n++] = (apart){.stride = stride};
        if (is_second)
            list->at[i].least -= last;
        else
            list->at[i].most += last;
    }
}

static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* Whether bytes `from` on, from the first element of one to that of the other, are made up for
 * by dimensions i on. A stride passes over all that lies within, so two numbers can be right.
 */
static int can_meet(const apart_list *list, int32_t i, int64_t from)
{
    if (i == list->n)
        return from < list->bytes[0] && from > -list->bytes[1];
    const apart *d = &list->at[i];
    const int64_t first = floor_div(from, d->stride);
    for (int64_t n = first; n <= first + 1; n++)
        if (n >= d->least && n <= d->most && can_meet(list, i + 1, from - n * d->stride))
            return 1;
    return 0;
}

static int has_data(const saccade_tensor *t)
{
    return t && t->data && t->data != (const void *)api_nothing;
}

static int is_there(const saccade_tensor *t)
{
    return has_data(t) && !tensor_is_empty(t);
}

/* Bytes from the first to past the last. */
static uintptr_t end_of(const saccade_tensor *t)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    int64_t last = 0;
    for (int32_t d = 0; d < t->rank; d++)
        last += (t->shape[d] - 1) * t->stride[d];
    return (uintptr_t)t->data + (uintptr_t)((last + 1) * bytes);
}

static int overlap(const saccade_tensor *a, const saccade_tensor *b)
{
    apart_list list = {.n = 0};
    if (!is_there(a) || !is_there(b))
        return 0;
    if (a->data == b->data)
        return 1;
    if (end_of(a) <= (uintptr_t)b->data || end_of(b) <= (uintptr_t)a->data)
        return 0;
    add_dimensions(&list, a, 0);
    add_dimensions(&list, b, 1);
    qsort(list.at, (size_t)list.n, sizeof *list.at, by_stride);
    return can_meet(&list, 0, (int64_t)((uintptr_t)b->data - (uintptr_t)a->data));
}

static saccade_status check_outputs(const api_places *x, saccade_error *err)
{
    for (int32_t i = 0; i < x->n_outputs; i++)
        for (int32_t j = 0; j < i; j++) {
            const api_place *a = &x->outputs[j], *b = &x->outputs[i];
            FAIL_AT(!(a->bit & x->added && b->bit & x->added) && overlap(a->tensor, b->tensor),
                    SACCADE_EINVAL, b->name, 0, 0,
                    "got elements that lie in those of %.60s, expected memory of its own%s",
                    a->name, a->bit && b->bit ? ", or both in accumulate" : "");
        }
    return SACCADE_OK;
}

static saccade_status check_input(const api_places *x, const saccade_tensor *input,
                                  const char *name, saccade_error *err)
{
    for (int32_t i = 0; i < x->n_outputs && has_data(input); i++) {
        const api_place *to = &x->outputs[i];
        FAIL_AT(has_data(to->tensor) && to->tensor->data == input->data, SACCADE_EINVAL,
                to->name, 0, 0,
                "got the data of %.60s, expected memory of its own: no output lies in an input",
                name);
    }
    return SACCADE_OK;
}

saccade_status api_check_places(const api_places *places, saccade_error *err)
{
    TRY(check_outputs(places, err));
    for (int32_t i = 0; i < places->n_inputs; i++)
        TRY(check_input(places, places->inputs[i].tensor, places->inputs[i].name, err));
    for (int32_t i = 0; i < places->n_bindings; i++)
        TRY(check_input(places, &places->bindings[i].tensor, places->bindings[i].name, err));
    return SACCADE_OK;
}
