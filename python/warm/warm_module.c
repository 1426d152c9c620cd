/* The module: what it takes of PyTorch, its types and functions. */
#include "warm.h"

const dl_exchange *warm_exchange;
PyTypeObject *warm_plain_type, *warm_parameter_type;
PyObject *warm_empty_like, *warm_is_neg, *warm_raise_error, *warm_zero;
PyObject *warm_names[WARM_NAMES];

static const char *const names[WARM_NAMES] = {
    [NAME_REQUIRES_GRAD] = "requires_grad",
    [NAME_ROOM] = "saccade.room",
    [NAME_ENTRY] = "entry",
    [NAME_CALL] = "call",
    [NAME_CURRENT] = "current",
    [NAME_IS_CONSTANT] = "is_constant",
    [NAME_LAYOUTS] = "layouts",
    [NAME_NEEDS] = "needs",
    [NAME_TAIL] = "tail",
    [NAME_WARM] = "warm",
    [NAME_WARM_BACKWARD] = "warm_backward",
    [NAME_OF_MASK] = "of_mask",
    [NAME_NARROW] = "narrow",
    [NAME_TO] = "to",
    [NAME_TO_SAVE] = "to_save",
    [NAME_SAVED_TENSORS] = "saved_tensors",
    [NAME_NEEDS_INPUT_GRAD] = "needs_input_grad",
    [NAME_QUICK] = "quick",
    [NAME_KWDEFAULTS] = "__kwdefaults__",
    [NAME_DEFAULTS] = "__defaults__",
    [NAME_DICT] = "__dict__",
    [NAME_CODE] = "__code__",
    [NAME_GLOBALS] = "__globals__",
    [NAME_CLOSURE] = "__closure__",
    [NAME_CELL_CONTENTS] = "cell_contents",
    [NAME_MARKS] = "_marks",
    [NAME_STAMP] = "_stamp",
    [NAME_VERSION] = "version",
};

/* begin(Tensor, Parameter, empty_like, raise_error): whether this PyTorch can be read so. */
static PyObject *begin(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *plain, *parameter, *make, *raise;
    if (!PyArg_ParseTuple(args, "OOOO", &plain, &parameter, &make, &raise))
        return NULL;
    PyObject *capsule = PyObject_GetAttrString(plain, "__dlpack_c_exchange_api__");
    const dl_exchange *found =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    if (!found || found->major != 1 || !found->look || !found->current_stream)
        Py_RETURN_FALSE;
    if (!(warm_is_neg = PyObject_GetAttrString(plain, "is_neg")))
        return NULL;
    warm_exchange = found;
    warm_plain_type = (PyTypeObject *)Py_NewRef(plain);
    warm_parameter_type = (PyTypeObject *)Py_NewRef(parameter);
    warm_empty_like = Py_NewRef(make);
    warm_raise_error = Py_NewRef(raise);
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"begin", begin, METH_VARARGS, "begin(Tensor, Parameter, empty_like, raise_error)"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "saccade_warm",
    "Warm calls from PyTorch.",
    -1,
    functions,
    NULL,
    NULL,
    NULL,
    NULL,
};

static int add_types(PyObject *module)
{
    PyType_Spec *const specs[] = {&warm_layouts_spec, &warm_tensors_spec, &warm_run_spec};
    for (int i = 0; i < 3; i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        if (!type || PyModule_AddObject(module, strchr(specs[i]->name, '.') + 1, type))
            return -1;
    }
    return 0;
}

PyMODINIT_FUNC PyInit_saccade_warm(void)
{
    for (int i = 0; i < WARM_NAMES; i++)
        if (!(warm_names[i] = PyUnicode_InternFromString(names[i])))
            return NULL;
    PyObject *module = PyModule_Create(&definition);
    warm_zero = PyLong_FromLong(0);
    if (!module || !warm_zero || add_types(module)
        || PyModule_AddFunctions(module, warm_mods_functions)
        || PyModule_AddFunctions(module, warm_node_functions)
        || PyModule_AddFunctions(module, warm_entry_functions))
        return NULL;
    return module;
}
