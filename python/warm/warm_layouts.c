/* Layouts: the value that was made for query, key and value of these layouts. */
#include "warm.h"

enum { MOST_LAYOUTS = 16 }; /* that one pair of mods is called with, by turns */

typedef struct {
    layout of[3];
    int needs; /* bits of those that require a gradient, 8: recorded; 0: none is recorded */
    PyObject *value;
} known_call;
typedef struct {
    PyObject base;
    int n;
    known_call *calls[MOST_LAYOUTS]; /* the last used one first */
} Layouts;

static PyObject *layouts_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)args, (void)named;
    return warm_new_object(type);
}

static void layouts_free(PyObject *self)
{
    Layouts *s = (Layouts *)self;
    for (int i = 0; i < s->n; i++) {
        Py_DECREF(s->calls[i]->value);
        PyMem_Free(s->calls[i]);
    }
    warm_free_object(self);
}

/* Looks at query, key, value; is_recorded: whether gradients are. 1, 0 for others, -1. */
static int look_at_three(PyObject *const *args, dl_tensor *d, int *needs)
{
    int is_recorded = args[3] == Py_True;
    *needs = is_recorded ? 8 : 0; /* of captures too, which are not seen here */
    for (int i = 0; i < 3; i++) {
        if (!warm_look(args[i], &d[i]))
            return 0;
        const int is_negative = warm_is_negative(args[i]);
        if (is_negative)
            return is_negative < 0 ? -1 : 0;
        int flag = is_recorded ? warm_wants_gradient(args[i]) : 0;
        if (flag < 0)
            return -1;
        *needs |= flag << i;
    }
    return 1;
}

static known_call *known(Layouts *s, const dl_tensor *d, int needs)
{
    for (int i = 0; i < s->n; i++) {
        known_call *c = s->calls[i];
        if (c->needs != needs || !warm_has_layout(&c->of[0], &d[0])
            || !warm_has_layout(&c->of[1], &d[1]) || !warm_has_layout(&c->of[2], &d[2]))
            continue;
        memmove(s->calls + 1, s->calls, (size_t)i * sizeof s->calls[0]);
        return s->calls[0] = c;
    }
    return NULL;
}

PyObject *warm_find(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    dl_tensor d[3];
    int needs, is_plain = n == 4 ? look_at_three(args, d, &needs) : 0;
    if (is_plain < 0)
        return NULL;
    known_call *found = is_plain ? known((Layouts *)self, d, needs) : NULL;
    return Py_NewRef(found ? found->value : Py_None);
}

static PyObject *layouts_keep(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Layouts *s = (Layouts *)self;
    dl_tensor d[3];
    int needs, is_plain = n == 5 ? look_at_three(args, d, &needs) : 0;
    if (is_plain < 0)
        return NULL;
    if (!is_plain)
        Py_RETURN_NONE;
    known_call *c = known(s, d, needs);
    PyObject *old = c ? c->value : NULL;
    if (!c) {
        if (s->n == MOST_LAYOUTS) { /* the one that was not used for longest goes */
            c = s->calls[--s->n];
            old = c->value;
        } else if (!(c = PyMem_Malloc(sizeof *c))) {
            return PyErr_NoMemory();
        }
        memmove(s->calls + 1, s->calls, (size_t)s->n++ * sizeof s->calls[0]);
        s->calls[0] = c;
        for (int i = 0; i < 3; i++)
            warm_keep_layout(&c->of[i], &d[i]);
        c->needs = needs;
    }
    c->value = Py_NewRef(args[4]);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyMethodDef layouts_methods[] = {
    {"find", FAST(warm_find), METH_FASTCALL, "find(q, k, v, is_recorded): what is kept"},
    {"keep", FAST(layouts_keep), METH_FASTCALL, "keep(q, k, v, is_recorded, value)"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot layouts_slots[] = {{Py_tp_new, layouts_new},
                                      {Py_tp_dealloc, layouts_free},
                                      {Py_tp_methods, layouts_methods},
                                      {0, NULL}};
PyType_Spec warm_layouts_spec = {"saccade_warm.Layouts", sizeof(Layouts), 0, Py_TPFLAGS_DEFAULT,
                                 layouts_slots};
