/* Tensors where a run wants them. */
#include "support/tensor_place.h"

#include "saccade_measure.h"
#include "support/run_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static size_t bytes_of(const saccade_tensor *t)
{
    return (size_t)run_count(t) * saccade_dtype_bytes(t->dtype);
}

void *place_room(const tensor_place *p, size_t bytes)
{
    void *room = NULL;
    saccade_error err = {0};
    if (!p->is_on_device)
        return aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (saccade_device_alloc(0, bytes + 64, &room, &err))
        fail_msg("%s", err.message);
    return room;
}

void place_leave(const tensor_place *p, void *room)
{
    if (p->is_on_device)
        saccade_device_free(0, room);
    else
        free(room);
}

const saccade_tensor *place_put(tensor_place *p, const saccade_tensor *t, int is_result)
{
    assert_true(p->n < PLACE_TENSORS);
    saccade_tensor *to = &p->t[p->n];
    *to = *t;
    p->host[p->n++] = is_result ? t : NULL;
    if (p->is_on_device) {
        to->device = (saccade_device){SACCADE_CUDA, 0};
        to->data = place_room(p, bytes_of(t));
        assert_int_equal(saccade_device_copy(0, to->data, t->data, bytes_of(t), NULL),
                         SACCADE_OK);
    }
    return to;
}

void place_take_back(tensor_place *p)
{
    if (p->is_on_device)
        assert_int_equal(saccade_device_synchronize(0, NULL), SACCADE_OK);
    for (int i = 0; p->is_on_device && i < p->n; i++) {
        if (p->host[i])
            assert_int_equal(saccade_device_copy(0, p->host[i]->data, p->t[i].data,
                                                 bytes_of(p->host[i]), NULL),
                             SACCADE_OK);
        saccade_device_free(0, p->t[i].data);
    }
}
