/* Tensors: some, held weakly, as they were. */
#include "warm.h"

typedef struct {
    PyObject *ref;
    void *address;
    layout like;
    int flag;
} held_tensor;
typedef struct {
    PyObject base;
    Py_ssize_t n;
    held_tensor *held;
} Tensors;

static void tensors_free(PyObject *self)
{
    Tensors *s = (Tensors *)self;
    for (Py_ssize_t i = 0; i < s->n; i++)
        Py_XDECREF(s->held[i].ref);
    PyMem_Free(s->held);
    warm_free_object(self);
}

static PyObject *tensors_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    Py_ssize_t n = PyTuple_Size(args);
    Tensors *s = (Tensors *)warm_new_object(type);
    if (!s)
        return NULL;
    s->held = PyMem_Calloc(n ? (size_t)n : 1, sizeof *s->held);
    if (!s->held) {
        Py_DECREF(s);
        return PyErr_NoMemory();
    }
    s->n = n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *t = PyTuple_GetItem(args, i);
        held_tensor *h = &s->held[i];
        dl_tensor d;
        const int is_negative = warm_is_negative(t);
        if (is_negative < 0) {
            Py_DECREF(s);
            return NULL;
        }
        if (is_negative || !warm_look(t, &d)) {
            PyErr_SetString(PyExc_TypeError, "expected plain tensors");
        } else if ((h->flag = warm_wants_gradient(t)) >= 0) {
            h->ref = PyWeakref_NewRef(t, NULL);
            h->address = warm_address_of(&d);
            warm_keep_layout(&h->like, &d);
        }
        if (!h->ref) {
            Py_DECREF(s);
            return NULL;
        }
    }
    return (PyObject *)s;
}

/* The tensors if all are there and as they were, else None. */
PyObject *warm_now(PyObject *self)
{
    Tensors *s = (Tensors *)self;
    PyObject *found = PyTuple_New(s->n);
    if (!found)
        return NULL;
    for (Py_ssize_t i = 0; i < s->n; i++) {
        held_tensor *h = &s->held[i];
        PyObject *t = Py_NewRef(PyWeakref_GetObject(h->ref));
        PyTuple_SetItem(found, i, t);
        dl_tensor d;
        int is_same = warm_look(t, &d) && h->address == warm_address_of(&d)
                      && warm_has_layout(&h->like, &d);
        int flag = is_same ? warm_wants_gradient(t) : 0;
        if (flag < 0 || !is_same || flag != h->flag) {
            Py_DECREF(found);
            return flag < 0 ? NULL : Py_NewRef(Py_None);
        }
    }
    return found;
}

static PyObject *tensors_now(PyObject *self, PyObject *unused)
{
    (void)unused;
    return warm_now(self);
}

static PyMethodDef tensors_methods[] = {
    {"now", tensors_now, METH_NOARGS, "the tensors if all are as they were, else None"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot tensors_slots[] = {{Py_tp_new, tensors_new},
                                      {Py_tp_dealloc, tensors_free},
                                      {Py_tp_methods, tensors_methods},
                                      {0, NULL}};
PyType_Spec warm_tensors_spec = {"saccade_warm.Tensors", sizeof(Tensors), 0, Py_TPFLAGS_DEFAULT,
                                 tensors_slots};
