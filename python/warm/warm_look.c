/* Tensors as DLPack's exchange table shows them, their layouts, and objects of our types. */
#include "warm.h"

int warm_look(PyObject *t, dl_tensor *d)
{
    if (Py_TYPE(t) != warm_plain_type && Py_TYPE(t) != warm_parameter_type)
        return 0;
    if (warm_exchange->look(t, d) != 0) {
        PyErr_Clear();
        return 0;
    }
    return d->rank <= WARM_MOST_RANK && (d->rank == 0 || (d->shape && d->stride));
}

void *warm_address_of(const dl_tensor *d)
{
    return (char *)d->data + d->byte_offset;
}

void warm_keep_layout(layout *l, const dl_tensor *d)
{
    *l = (layout){d->device_type, d->device_index, d->rank, d->dtype, {0}, {0}};
    for (int i = 0; i < d->rank; i++) {
        l->shape[i] = d->shape[i];
        l->stride[i] = d->stride[i];
    }
}

int warm_has_layout(const layout *l, const dl_tensor *d)
{
    if (l->rank != d->rank || l->dtype != d->dtype || l->device_type != d->device_type
        || l->device_index != d->device_index)
        return 0;
    for (int i = 0; i < d->rank; i++)
        if (l->shape[i] != d->shape[i] || l->stride[i] != d->stride[i])
            return 0;
    return 1;
}

int warm_wants_gradient(PyObject *t)
{
    PyObject *flag = warm_get(t, NAME_REQUIRES_GRAD);
    if (!flag)
        return -1;
    int is_true = flag == Py_True;
    Py_DECREF(flag);
    return is_true;
}

int warm_is_negative(PyObject *t)
{
    PyObject *flag = PyObject_CallFunctionObjArgs(warm_is_neg, t, NULL);
    if (!flag)
        return -1;
    int is_true = flag == Py_True;
    Py_DECREF(flag);
    return is_true;
}

void warm_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyObject *warm_new_object(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}
