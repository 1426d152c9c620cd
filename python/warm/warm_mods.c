/* Mods: what tells one from another, and whether an entry's tensors and mask are as they were;
 * what identity in torch/watch.py and current in torch/entries.py do for all others. */
#include "warm.h"

static PyObject *function, *method, *text, *in_python;

/* Appends x and gives it up; 0, or -1 with an error. */
static int append(PyObject *list, PyObject *x)
{
    const int failed = x ? PyList_Append(list, x) : -1;
    Py_XDECREF(x);
    return failed;
}

/* Appends what tells x from others: tensors and functions by themselves, others by their value.
 * 1, 0 for one that Python is to look at, -1 with an error. */
static int append_identity(PyObject *key, PyObject *x)
{
    PyObject *type = (PyObject *)Py_TYPE(x);
    if (type == (PyObject *)warm_plain_type || type == (PyObject *)warm_parameter_type
        || type == function)
        return append(key, PyLong_FromVoidPtr(x)) ? -1 : 1;
    if (type != (PyObject *)&PyLong_Type && type != (PyObject *)&PyFloat_Type
        && type != (PyObject *)&PyUnicode_Type)
        return 0;
    const int is_some = PyObject_IsTrue(x); /* 0.0 is not -0.0 */
    if (is_some < 0 || PyList_Append(key, type)
        || append(key, is_some ? Py_NewRef(x) : PyObject_Repr(x)))
        return -1;
    return 1;
}

/* Of a function's closure; as above. */
static int append_cells(PyObject *key, PyObject *closure)
{
    const Py_ssize_t n = closure == Py_None ? 0 : PyTuple_Size(closure);
    int known = n < 0 ? -1 : 1;
    for (Py_ssize_t i = 0; known > 0 && i < n; i++) {
        PyObject *x = warm_get(PyTuple_GetItem(closure, i), NAME_CELL_CONTENTS);
        known = x ? append_identity(key, x) : 0;
        Py_XDECREF(x);
    }
    if (!known)
        PyErr_Clear(); /* a cell that is empty */
    return known;
}

/* Whether the function has this attribute, and nothing is in it; as above. */
static int has_no(PyObject *mod, warm_name name)
{
    PyObject *held = warm_get(mod, name);
    const int is_some = held ? PyObject_IsTrue(held) : -1;
    Py_XDECREF(held);
    return is_some < 0 ? -1 : !is_some;
}

static int append_parts(PyObject *key, PyObject *mod)
{
    static const warm_name absent[] = {NAME_KWDEFAULTS, NAME_DICT, NAME_DEFAULTS};
    static const warm_name parts[] = {NAME_CODE, NAME_GLOBALS};
    int known = 1;
    for (int i = 0; known > 0 && i < 3; i++)
        known = has_no(mod, absent[i]);
    for (int i = 0; known > 0 && i < 2; i++) {
        PyObject *x = warm_get(mod, parts[i]);
        if (!x || append(key, PyLong_FromVoidPtr(x)))
            known = -1;
        Py_XDECREF(x);
    }
    PyObject *closure = known > 0 ? warm_get(mod, NAME_CLOSURE) : NULL;
    if (known > 0)
        known = closure ? append_cells(key, closure) : -1;
    Py_XDECREF(closure);
    return known;
}

PyObject *warm_identity(PyObject *mod)
{
    PyObject *type = (PyObject *)Py_TYPE(mod);
    if (type == method || type == text || type == (PyObject *)&PyUnicode_Type)
        return PyObject_CallFunctionObjArgs(in_python, mod, NULL);
    if (type != function)
        return PyLong_FromVoidPtr(mod);
    PyObject *key = PyList_New(0), *made = NULL;
    const int known = key ? append_parts(key, mod) : -1;
    if (known > 0)
        made = PyList_AsTuple(key);
    else if (!known)
        made = PyObject_CallFunctionObjArgs(in_python, mod, NULL);
    Py_XDECREF(key);
    return made;
}

static PyObject *identity(PyObject *module, PyObject *mod)
{
    (void)module;
    return warm_identity(mod);
}

/* mods(types of functions, methods and texts with captures, identity): what identity looks
 * at. */
static PyObject *mods(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO", &function, &method, &text, &in_python))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        Py_INCREF(PyTuple_GetItem(args, i));
    return Py_NewRef(Py_None);
}

/* Whether the mask that ref holds weakly is there and of this version; 1, 0, or -1 with an
 * error. One without marks, whose index tensors nobody can have changed, has its stamp. */
static int is_mask(PyObject *ref, PyObject *version)
{
    PyObject *mask = ref == Py_None ? Py_None : PyWeakref_GetObject(ref);
    if (ref == Py_None || mask == Py_None)
        return ref == Py_None;
    Py_INCREF(mask);
    PyObject *marks = warm_get(mask, NAME_MARKS);
    PyObject *now = marks ? warm_get(mask, marks == Py_None ? NAME_STAMP : NAME_VERSION) : NULL;
    Py_XDECREF(marks);
    Py_XDECREF(now);
    Py_DECREF(mask);
    return now ? now == version : -1;
}

/* quick of an entry: (mask held weakly or None, its version, Tensors watched.., captured). */
PyObject *warm_current(PyObject *quick)
{
    const Py_ssize_t n = PyTuple_Size(quick);
    const int is_same = is_mask(PyTuple_GetItem(quick, 0), PyTuple_GetItem(quick, 1));
    PyObject *now = is_same < 0 ? NULL : Py_NewRef(Py_None);
    for (Py_ssize_t i = 2; is_same > 0 && i < n && (i == 2 || (now && now != Py_None)); i++) {
        PyObject *held = PyTuple_GetItem(quick, i);
        Py_XDECREF(now);
        now = held == Py_None ? PyTuple_New(0) : warm_now(held);
    }
    return now;
}

PyMethodDef warm_mods_functions[] = {
    {"identity", identity, METH_O, "identity(mod): as torch/watch.py's"},
    {"mods", mods, METH_VARARGS, "mods(types of functions, methods and texts, identity)"},
    {NULL, NULL, 0, NULL},
};
