/* A call whose mods and layout were seen before: finds its entry in the table of
 * torch/entries.py and goes through it, as `run` there does in Python. */
#include "warm.h"

static struct {
    PyObject *table, *is_autocast, *is_grad_enabled, *thread_count, *node, *out_of, *nothing;
} of;

/* args: score_mod, block_mask, scale, want_lse, want_max, gqa. */
static PyObject *key_of(PyObject *const *args)
{
    PyObject *key = PyTuple_New(7);
    for (int i = 0; key && i < 7; i++) {
        PyObject *x = i < 2   ? warm_identity(args[i])
                      : i < 6 ? Py_NewRef(args[i])
                              : PyObject_CallObject(of.thread_count, NULL);
        if (!x) {
            Py_DECREF(key);
            return NULL;
        }
        PyTuple_SetItem(key, i, x);
    }
    return key;
}

/* 1, 0, or -1 with an error. */
static int is_true(PyObject *function)
{
    PyObject *flag = PyObject_CallObject(function, NULL);
    const int found = flag ? flag == Py_True : -1;
    Py_XDECREF(flag);
    return found;
}

/* The entry, a new reference, or None; NULL with an error. */
static PyObject *entry_of(PyObject *const *args, PyObject *is_recorded)
{
    PyObject *key = key_of(args + 3), *layouts = NULL, *entry = NULL;
    if (!key)
        return NULL;
    PyObject *known = PyDict_GetItemWithError(of.table, key);
    if (known && (layouts = warm_get(known, NAME_LAYOUTS))) {
        PyObject *const given[] = {args[0], args[1], args[2], is_recorded};
        entry = warm_find(layouts, given, 4);
    }
    Py_XDECREF(layouts);
    Py_DECREF(key);
    return entry || PyErr_Occurred() ? entry : Py_NewRef(Py_None);
}

/* The tensors that the score captures, None where something changed. */
static PyObject *current_of(PyObject *entry)
{
    PyObject *flag = warm_get(entry, NAME_IS_CONSTANT);
    const int is_constant = flag == Py_True;
    Py_XDECREF(flag);
    if (!flag)
        return NULL;
    if (is_constant)
        return Py_NewRef(of.nothing);
    PyObject *quick = warm_get(entry, NAME_QUICK), *current = NULL;
    if (quick)
        current = quick != Py_None
                      ? warm_current(quick)
                      : PyObject_CallMethodObjArgs(entry, warm_names[NAME_CURRENT], NULL);
    Py_XDECREF(quick);
    return current;
}

/* (out, None, None), out a node of the graph. */
static PyObject *out_alone(PyObject *entry, PyObject *const *args, PyObject *captured)
{
    const Py_ssize_t n = PySequence_Size(captured);
    PyObject *given = n < 0 ? NULL : PyTuple_New(4 + n), *out = NULL;
    for (Py_ssize_t i = 0; given && i < 4 + n; i++) {
        PyObject *x = !i      ? Py_NewRef(entry)
                      : i < 4 ? Py_NewRef(args[i - 1])
                              : PySequence_GetItem(captured, i - 4);
        PyTuple_SetItem(given, i, x);
    }
    if (given && !PyErr_Occurred())
        out = PyObject_CallObject(of.out_of, given);
    Py_XDECREF(given);
    return out ? Py_BuildValue("NOO", out, Py_None, Py_None) : NULL;
}

static PyObject *without_gradients(PyObject *entry, PyObject *const *args)
{
    PyObject *call = warm_get(entry, NAME_CALL), *made = NULL;
    PyObject *tail = call ? warm_get(entry, NAME_TAIL) : NULL;
    if (tail && (made = warm_forward(entry, call, args)) == Py_None) {
        Py_DECREF(made);
        made = PyObject_CallFunctionObjArgs(call, args[0], args[1], args[2], tail, NULL);
    }
    Py_XDECREF(tail);
    Py_XDECREF(call);
    return made;
}

static PyObject *through(PyObject *entry, PyObject *const *args, PyObject *captured)
{
    const int wants_more = args[6] != Py_False || args[7] != Py_False; /* lse, row maxima */
    PyObject *needs = warm_get(entry, NAME_NEEDS), *made;
    if (!needs)
        return NULL;
    if (PyTuple_Size(needs) <= 0)
        made = without_gradients(entry, args);
    else if (wants_more)
        made = PyObject_CallFunctionObjArgs(of.node, entry, args[0], args[1], args[2], captured,
                                            NULL);
    else
        made = out_alone(entry, args, captured);
    Py_DECREF(needs);
    return made;
}

/* call(query, key, value, score_mod, block_mask, scale, want_lse, want_max, gqa): what run
 * gives, or None where it is to look for itself. */
static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    const int is_autocast = n == 9 && of.table ? is_true(of.is_autocast) : 1;
    if (is_autocast)
        return is_autocast < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *is_recorded = PyObject_CallObject(of.is_grad_enabled, NULL);
    PyObject *entry = is_recorded ? entry_of(args, is_recorded) : NULL;
    PyObject *captured = entry && entry != Py_None ? current_of(entry) : NULL, *made = NULL;
    if (captured && captured != Py_None)
        made = through(entry, args, captured);
    Py_XDECREF(captured);
    Py_XDECREF(entry);
    Py_XDECREF(is_recorded);
    return made || PyErr_Occurred() ? made : Py_NewRef(Py_None);
}

/* entries(table, is_autocast, is_grad_enabled, thread_count, node, out_of): what call looks
 * at. */
static PyObject *entries(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOOOO", &PyDict_Type, &of.table, &of.is_autocast,
                          &of.is_grad_enabled, &of.thread_count, &of.node, &of.out_of))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        Py_INCREF(PyTuple_GetItem(args, i));
    of.nothing = PyTuple_New(0);
    return of.nothing ? Py_NewRef(Py_None) : NULL;
}

PyMethodDef warm_entry_functions[] = {
    {"call", FAST(call), METH_FASTCALL, "call(query, key, value, score_mod, block_mask, ...)"},
    {"entries", entries, METH_VARARGS, "entries(table, ...): what call looks at"},
    {NULL, NULL, 0, NULL},
};
