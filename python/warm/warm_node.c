/* Forward and backward of a node of autograd's graph, where all is as it was: what Out in
 * torch/autograd.py does, without its frames of Python. */
#include "warm.h"

enum { MOST_SAVED = 32 };

static PyObject *forward_in_python, *backward_in_python, *is_grad_enabled;

static PyObject *ask_python(PyObject *function, PyObject *const *args, Py_ssize_t n)
{
    PyObject *all = PyTuple_New(n), *made = NULL;
    for (Py_ssize_t i = 0; all && i < n; i++)
        PyTuple_SetItem(all, i, Py_NewRef(args[i]));
    if (all)
        made = PyObject_CallObject(function, all);
    Py_XDECREF(all);
    return made;
}

/* q, k, v, out, lse, captures of the score, then of the mask. */
static PyObject *what_is_saved(PyObject *const *tensors, Py_ssize_t n, PyObject *made,
                               PyObject *of_mask)
{
    const Py_ssize_t n_mask = PyList_Size(of_mask);
    PyObject *saved = n_mask < 0 ? NULL : PyTuple_New(n + 2 + n_mask);
    for (Py_ssize_t i = 0; saved && i < n + 2 + n_mask; i++) {
        PyObject *t = i < 3       ? tensors[i]
                      : i < 5     ? PyTuple_GetItem(made, i - 3)
                      : i - 2 < n ? tensors[i - 2]
                                  : PyList_GetItem(of_mask, i - 2 - n);
        PyTuple_SetItem(saved, i, Py_NewRef(t));
    }
    return saved;
}

/* What the user is given of an output that is kept: itself, or rounded to call.narrow. */
static PyObject *rounded(PyObject *out, PyObject *call)
{
    PyObject *narrow = warm_get(call, NAME_NARROW), *made = NULL;
    if (narrow)
        made = narrow == Py_None
                   ? Py_NewRef(out)
                   : PyObject_CallMethodObjArgs(out, warm_names[NAME_TO], narrow, NULL);
    Py_XDECREF(narrow);
    return made;
}

static int keep(PyObject *node, PyObject *entry, PyObject *saved)
{
    return !saved || PyObject_SetAttr(node, warm_names[NAME_ENTRY], entry)
           || PyObject_SetAttr(node, warm_names[NAME_TO_SAVE], saved);
}

/* forward(ctx, entry, query, key, value, *captured): out. */
static PyObject *forward(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    PyObject *call = n < 5 ? NULL : warm_get(args[1], NAME_CALL), *out = NULL;
    if (!call)
        return PyErr_Occurred() ? NULL : ask_python(forward_in_python, args, n);
    PyObject *made = warm_forward(args[1], call, args + 2);
    if (made && made != Py_None) {
        PyObject *of_mask = warm_get(call, NAME_OF_MASK);
        PyObject *saved = of_mask ? what_is_saved(args + 2, n - 2, made, of_mask) : NULL;
        if (!keep(args[0], args[1], saved))
            out = rounded(PyTuple_GetItem(made, 0), call);
        Py_XDECREF(saved);
        Py_XDECREF(of_mask);
    }
    Py_DECREF(call);
    Py_XDECREF(made);
    return out || PyErr_Occurred() ? out : ask_python(forward_in_python, args, n);
}

/* Of warm_backward, (needs, run, what holds its plan), the Run if the needs are the node's. */
static PyObject *run_backward_of(PyObject *node, PyObject *known)
{
    PyObject *run =
        known && PyTuple_Check(known) ? warm_run_of(PyTuple_GetItem(known, 1)) : NULL;
    PyObject *needs = run ? warm_get(node, NAME_NEEDS_INPUT_GRAD) : NULL;
    const int is_same =
        needs ? PyObject_RichCompareBool(PyTuple_GetItem(known, 0), needs, Py_EQ) : 0;
    Py_XDECREF(needs);
    return is_same == 1 ? run : NULL;
}

static PyObject *known_of(PyObject *node)
{
    PyObject *entry = warm_get(node, NAME_ENTRY);
    PyObject *call = entry ? warm_get(entry, NAME_CALL) : NULL;
    PyObject *known = call ? warm_get(call, NAME_WARM_BACKWARD) : NULL;
    Py_XDECREF(call);
    Py_XDECREF(entry);
    return known;
}

static PyObject *run_backward(PyObject *node, PyObject *run, PyObject *d_out)
{
    PyObject *saved = warm_get(node, NAME_SAVED_TENSORS), *made = NULL;
    const Py_ssize_t n = saved ? PyTuple_Size(saved) : -1;
    if (!saved)
        PyErr_Clear(); /* Python says what changed */
    if (n >= 0 && n <= MOST_SAVED) {
        PyObject *given[MOST_SAVED + 3] = {Py_None, warm_zero};
        for (Py_ssize_t i = 0; i < n; i++)
            given[i + 2] = PyTuple_GetItem(saved, i);
        given[n + 2] = d_out;
        made = warm_run(run, given, n + 3);
    }
    Py_XDECREF(saved);
    return made;
}

/* 1, 0, or -1 with an error. */
static int is_recorded(void)
{
    PyObject *flag = PyObject_CallObject(is_grad_enabled, NULL);
    const int is_true = flag ? flag != Py_False : -1;
    Py_XDECREF(flag);
    return is_true;
}

/* node.apply(d_out): gradients, None for the entry. */
static PyObject *apply(PyObject *node, PyObject *const *args, Py_ssize_t n)
{
    PyObject *all[2] = {node, n == 1 ? args[0] : NULL}, *made = NULL;
    if (n != 1) {
        PyErr_SetString(PyExc_TypeError, "expected the gradient of one result");
        return NULL;
    }
    const int is_plain =
        is_recorded() == 0 && args[0] != Py_None && warm_is_negative(args[0]) == 0;
    PyObject *known = is_plain ? known_of(node) : NULL;
    PyObject *run = run_backward_of(node, known);
    if (run)
        made = run_backward(node, run, args[0]);
    Py_XDECREF(known);
    if (PyErr_Occurred() || (made && made != Py_None))
        return made;
    Py_XDECREF(made);
    return ask_python(backward_in_python, all, 2);
}

/* nodes(class of nodes, forward, backward, is_grad_enabled): its apply is the one here. */
static PyObject *nodes(PyObject *module, PyObject *args)
{
    static PyMethodDef definition = {"apply", FAST(apply), METH_FASTCALL, "apply(d_out)"};
    PyObject *type;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO", &type, &forward_in_python, &backward_in_python,
                          &is_grad_enabled))
        return NULL;
    Py_INCREF(forward_in_python);
    Py_INCREF(backward_in_python);
    Py_INCREF(is_grad_enabled);
    PyObject *method = PyDescr_NewMethod((PyTypeObject *)type, &definition);
    const int failed = !method || PyObject_SetAttrString(type, "apply", method);
    Py_XDECREF(method);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyMethodDef warm_node_functions[] = {
    {"forward", FAST(forward), METH_FASTCALL, "forward(ctx, entry, query, key, value, ...)"},
    {"nodes", nodes, METH_VARARGS, "nodes(class, forward, backward, is_grad_enabled)"},
    {NULL, NULL, 0, NULL},
};
