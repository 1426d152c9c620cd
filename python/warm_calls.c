/* What a warm call from PyTorch does between Python and the library: looks at tensors, finds
 * the call that was made for their layout, makes the results, fills in addresses, calls.
 *
 * A Python extension in the stable ABI; the package runs without it, by ctypes, and slower.
 * Tensors are read through DLPack's exchange table (PyTorch 2.10 or later): no header of
 * PyTorch is needed. What is not plain (a subclass, another layout) is None: ask Python.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum {
    MOST_RANK = 8,
    MOST_TENSORS = 32,    /* of a call, inputs or results */
    MOST_WORDS = 1024,    /* arguments, tensors and bindings of a call: 8 KiB of stack */
    MOST_LAYOUTS = 16,    /* that one pair of mods is called with, by turns */
    ERROR_BYTES = 1024,   /* at least those of a saccade_error */
    LEAST_ROOM = 1 << 20, /* workspace that a thread keeps for its next call, at least */
};

/* dlpack.h 1.x, as far as it is used here. */
typedef struct {
    void *data;
    int32_t device_type, device_index, rank;
    uint32_t dtype; /* code, bits, lanes */
    int64_t *shape, *stride;
    uint64_t byte_offset;
} dl_tensor;
typedef struct {
    uint32_t major, minor;
    void *previous;
    int (*allocate)(void);
    int (*from_object)(void);
    int (*to_object)(void);
    int (*look)(void *object, dl_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_index, void **out);
} dl_exchange;

enum { DL_CUDA = 2 };

static const dl_exchange *exchange;
static PyTypeObject *plain_type, *parameter_type;
static PyObject *empty_like, *raise_error, *requires_grad, *room_key;

typedef struct {
    int32_t device_type, device_index, rank;
    uint32_t dtype;
    int64_t shape[MOST_RANK], stride[MOST_RANK];
} layout;

/* Whether it is a tensor like any other, which d then describes; never raises. */
static int look(PyObject *t, dl_tensor *d)
{
    if (Py_TYPE(t) != plain_type && Py_TYPE(t) != parameter_type)
        return 0;
    if (exchange->look(t, d) != 0) {
        PyErr_Clear();
        return 0;
    }
    return d->rank <= MOST_RANK && (d->rank == 0 || (d->shape && d->stride));
}

static void *address_of(const dl_tensor *d)
{
    return (char *)d->data + d->byte_offset;
}

static void keep_layout(layout *l, const dl_tensor *d)
{
    *l = (layout){d->device_type, d->device_index, d->rank, d->dtype, {0}, {0}};
    for (int i = 0; i < d->rank; i++) {
        l->shape[i] = d->shape[i];
        l->stride[i] = d->stride[i];
    }
}

static int has_layout(const layout *l, const dl_tensor *d)
{
    if (l->rank != d->rank || l->dtype != d->dtype || l->device_type != d->device_type
        || l->device_index != d->device_index)
        return 0;
    for (int i = 0; i < d->rank; i++)
        if (l->shape[i] != d->shape[i] || l->stride[i] != d->stride[i])
            return 0;
    return 1;
}

/* 1, 0, or -1 with an error. */
static int wants_gradient(PyObject *t)
{
    PyObject *flag = PyObject_GetAttr(t, requires_grad);
    if (!flag)
        return -1;
    int is_true = flag == Py_True;
    Py_DECREF(flag);
    return is_true;
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *new_object(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* ---- Layouts: the value that was made for query, key and value of these layouts ---- */

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
    return new_object(type);
}

static void layouts_free(PyObject *self)
{
    Layouts *s = (Layouts *)self;
    for (int i = 0; i < s->n; i++) {
        Py_DECREF(s->calls[i]->value);
        PyMem_Free(s->calls[i]);
    }
    free_object(self);
}

/* Looks at query, key, value; is_recorded: whether gradients are. 1, 0 for others, -1. */
static int look_at_three(PyObject *const *args, dl_tensor *d, int *needs)
{
    int is_recorded = args[3] == Py_True;
    *needs = is_recorded ? 8 : 0; /* of captures too, which are not seen here */
    for (int i = 0; i < 3; i++) {
        if (!look(args[i], &d[i]))
            return 0;
        int flag = is_recorded ? wants_gradient(args[i]) : 0;
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
        if (c->needs != needs || !has_layout(&c->of[0], &d[0]) || !has_layout(&c->of[1], &d[1])
            || !has_layout(&c->of[2], &d[2]))
            continue;
        memmove(s->calls + 1, s->calls, (size_t)i * sizeof s->calls[0]);
        return s->calls[0] = c;
    }
    return NULL;
}

static PyObject *layouts_find(PyObject *self, PyObject *const *args, Py_ssize_t n)
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
            keep_layout(&c->of[i], &d[i]);
        c->needs = needs;
    }
    c->value = Py_NewRef(args[4]);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* ---- Tensors: some, held weakly, as they were ---- */

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
    free_object(self);
}

static PyObject *tensors_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    Py_ssize_t n = PyTuple_Size(args);
    Tensors *s = (Tensors *)new_object(type);
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
        if (!look(t, &d)) {
            PyErr_SetString(PyExc_TypeError, "expected plain tensors");
        } else if ((h->flag = wants_gradient(t)) >= 0) {
            h->ref = PyWeakref_NewRef(t, NULL);
            h->address = address_of(&d);
            keep_layout(&h->like, &d);
        }
        if (!h->ref) {
            Py_DECREF(s);
            return NULL;
        }
    }
    return (PyObject *)s;
}

/* The tensors if all are there and as they were, else None. */
static PyObject *tensors_now(PyObject *self, PyObject *unused)
{
    (void)unused;
    Tensors *s = (Tensors *)self;
    PyObject *found = PyTuple_New(s->n);
    if (!found)
        return NULL;
    for (Py_ssize_t i = 0; i < s->n; i++) {
        held_tensor *h = &s->held[i];
        PyObject *t = Py_NewRef(PyWeakref_GetObject(h->ref));
        PyTuple_SetItem(found, i, t);
        dl_tensor d;
        int is_same = look(t, &d) && h->address == address_of(&d) && has_layout(&h->like, &d);
        int flag = is_same ? wants_gradient(t) : 0;
        if (flag < 0 || !is_same || flag != h->flag) {
            Py_DECREF(found);
            return flag < 0 ? NULL : Py_NewRef(Py_None);
        }
    }
    return found;
}

/* ---- Run: one call of the library for tensors of one layout ---- */

typedef int32_t library_call(void *plan, void *args, void *error);
typedef struct {
    int word; /* where the address goes; -1: nowhere */
    layout like;
} input;
typedef struct {
    int word;        /* -1: the result is None */
    int of;          /* the input that it is like, or -1: */
    PyObject *model; /* a tensor that it is like */
} output;
typedef struct {
    PyObject base;
    library_call *call;
    void *plan;
    uint64_t *words; /* the arguments, the tensors behind them */
    int n_words, n_links, n_inputs, n_outputs, tail, room_word, stream_word, dropout_word;
    int *links; /* words that hold offsets into the words, to be addresses */
    input inputs[MOST_TENSORS];
    output outputs[MOST_TENSORS];
    size_t room;
    PyObject *room_model; /* of a workspace that is a tensor */
} Run;

static void run_free(PyObject *self)
{
    Run *s = (Run *)self;
    for (int i = 0; i < s->n_outputs; i++)
        Py_XDECREF(s->outputs[i].model);
    Py_XDECREF(s->room_model);
    PyMem_Free(s->words);
    PyMem_Free(s->links);
    free_object(self);
}

static int read_words(Run *s, PyObject *bytes, PyObject *links)
{
    char *data;
    Py_ssize_t n_bytes, n_links = PyTuple_Size(links);
    if (n_links < 0 || PyBytes_AsStringAndSize(bytes, &data, &n_bytes))
        return -1;
    if (n_bytes > 8 * MOST_WORDS) {
        PyErr_SetString(PyExc_ValueError, "more arguments than a warm call has room for");
        return -1;
    }
    s->n_words = (int)((n_bytes + 7) / 8);
    s->words = PyMem_Calloc((size_t)s->n_words + 1, 8);
    s->links = PyMem_Calloc((size_t)n_links + 1, sizeof *s->links);
    if (!s->words || !s->links) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(s->words, data, (size_t)n_bytes);
    for (s->n_links = 0; s->n_links < n_links; s->n_links++)
        s->links[s->n_links] = (int)PyLong_AsLong(PyTuple_GetItem(links, s->n_links));
    return PyErr_Occurred() ? -1 : 0;
}

static int read_inputs(Run *s, PyObject *pairs)
{
    for (int n = (int)PyTuple_Size(pairs); s->n_inputs < n; s->n_inputs++) {
        input *in = &s->inputs[s->n_inputs];
        PyObject *t;
        dl_tensor d;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, s->n_inputs), "Oi", &t, &in->word))
            return -1;
        if (!look(t, &d)) {
            PyErr_SetString(PyExc_TypeError, "expected plain tensors");
            return -1;
        }
        keep_layout(&in->like, &d);
    }
    return 0;
}

static int read_outputs(Run *s, PyObject *triples)
{
    for (int n = (int)PyTuple_Size(triples); s->n_outputs < n; s->n_outputs++) {
        output *out = &s->outputs[s->n_outputs];
        PyObject *model;
        if (!PyArg_ParseTuple(PyTuple_GetItem(triples, s->n_outputs), "iiO", &out->word,
                              &out->of, &model))
            return -1;
        out->model = Py_NewRef(model);
        if (out->of >= s->n_inputs) {
            PyErr_SetString(PyExc_ValueError, "a result like an input that is not there");
            return -1;
        }
    }
    return 0;
}

/* Run(call, plan, words, links, inputs, outputs, room, room_model, places): addresses are
 * integers, places those of tail, room, stream and dropout; the others are as above. */
static PyObject *run_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    Run *s = (Run *)new_object(type);
    if (!s)
        return NULL;
    PyObject *call, *plan, *words, *links, *inputs, *outputs, *model;
    Py_ssize_t room;
    if (!PyArg_ParseTuple(args, "OOOOOOnO(iiii)", &call, &plan, &words, &links, &inputs,
                          &outputs, &room, &model, &s->tail, &s->room_word, &s->stream_word,
                          &s->dropout_word))
        goto failed;
    if (PyTuple_Size(inputs) > MOST_TENSORS || PyTuple_Size(outputs) > MOST_TENSORS) {
        PyErr_SetString(PyExc_ValueError, "more tensors than a warm call has room for");
        goto failed;
    }
    s->call = (library_call *)PyLong_AsVoidPtr(call);
    s->plan = PyLong_AsVoidPtr(plan);
    s->room = (size_t)room;
    s->room_model = model == Py_None ? NULL : Py_NewRef(model);
    if (PyErr_Occurred() || read_words(s, words, links) || read_inputs(s, inputs)
        || read_outputs(s, outputs))
        goto failed;
    return (PyObject *)s;
failed:
    Py_DECREF(s);
    return NULL;
}

/* The thread's own memory, n bytes and more; borrowed. */
static void *own_room(Py_ssize_t n)
{
    PyObject *of_thread = PyThreadState_GetDict(), *room;
    if (!of_thread)
        return NULL;
    room = PyDict_GetItemWithError(of_thread, room_key);
    if (!room || PyBytes_Size(room) < n + 64) {
        n = n > LEAST_ROOM ? n : LEAST_ROOM;
        if (PyErr_Occurred() || !(room = PyBytes_FromStringAndSize(NULL, n + 64)))
            return NULL;
        int failed = PyDict_SetItem(of_thread, room_key, room);
        Py_DECREF(room);
        if (failed)
            return NULL;
    }
    return PyBytes_AsString(room);
}

/* Where the workspace begins, 0 and an error where there is none; *held: what holds it. */
static uint64_t room_of(const Run *s, PyObject **held)
{
    uintptr_t at;
    if (s->room_model) {
        dl_tensor d;
        *held = PyObject_CallFunctionObjArgs(empty_like, s->room_model, NULL);
        if (!*held || !look(*held, &d))
            return 0;
        at = (uintptr_t)address_of(&d);
    } else {
        at = (uintptr_t)own_room((Py_ssize_t)s->room);
    }
    return at ? (at + 63) & ~(uintptr_t)63 : 0;
}

/* Makes the results and writes their addresses; a tuple, or NULL. */
static PyObject *make_outputs(const Run *s, PyObject *const *inputs, uint64_t *words)
{
    PyObject *made = PyTuple_New(s->n_outputs);
    for (int i = 0; made && i < s->n_outputs; i++) {
        const output *out = &s->outputs[i];
        PyObject *t = Py_None, *like = out->of < 0 ? out->model : inputs[out->of];
        dl_tensor d;
        if (out->word < 0) {
            Py_INCREF(t);
        } else if ((t = PyObject_CallFunctionObjArgs(empty_like, like, NULL)) && look(t, &d)) {
            words[out->word] = (uint64_t)(uintptr_t)address_of(&d);
        } else {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "no plain tensors here");
            Py_XDECREF(t);
            Py_DECREF(made);
            return NULL;
        }
        PyTuple_SetItem(made, i, t);
    }
    return made;
}

/* run(tail, dropout, *inputs): the results, or None where an input is of another layout. tail:
 * bytes for the place of that name, or None; dropout: an address. */
static PyObject *run_run(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Run *s = (Run *)self;
    if (n != s->n_inputs + 2)
        Py_RETURN_NONE;
    uint64_t words[MOST_WORDS], error[ERROR_BYTES / 8];
    memcpy(words, s->words, 8 * (size_t)s->n_words);
    for (int i = 0; i < s->n_links; i++)
        words[s->links[i]] += (uint64_t)(uintptr_t)words;
    if (args[0] != Py_None) {
        char *tail;
        Py_ssize_t bytes;
        if (PyBytes_AsStringAndSize(args[0], &tail, &bytes))
            return NULL;
        memcpy(words + s->tail, tail, (size_t)bytes);
    }
    for (int i = 0; i < s->n_inputs; i++) {
        dl_tensor d;
        if (!look(args[i + 2], &d) || !has_layout(&s->inputs[i].like, &d))
            Py_RETURN_NONE;
        if (s->inputs[i].word >= 0)
            words[s->inputs[i].word] = (uint64_t)(uintptr_t)address_of(&d);
    }
    words[s->dropout_word] = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *made = make_outputs(s, args + 2, words), *held = NULL;
    if (!made)
        return NULL;
    void *stream = NULL;
    int32_t status = 0;
    const layout *first = &s->inputs[0].like;
    if (s->room && !(words[s->room_word] = room_of(s, &held)))
        goto failed;
    if (first->device_type == DL_CUDA
        && exchange->current_stream(DL_CUDA, first->device_index, &stream) != 0)
        goto failed;
    words[s->stream_word] = (uint64_t)(uintptr_t)stream;
    Py_BEGIN_ALLOW_THREADS;
    status = s->call(s->plan, words, error);
    Py_END_ALLOW_THREADS;
    if (status == 0) {
        Py_XDECREF(held);
        return made;
    }
    PyObject *none = PyObject_CallFunction(raise_error, "iy#", (int)status, (char *)error,
                                           (Py_ssize_t)sizeof error);
    Py_XDECREF(none);
failed:
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "no memory or stream for a call");
    Py_XDECREF(held);
    Py_DECREF(made);
    return NULL;
}

/* ---- the module ---- */

#define FAST(f) ((PyCFunction)(void (*)(void))(f))
static PyMethodDef layouts_methods[] = {
    {"find", FAST(layouts_find), METH_FASTCALL, "find(q, k, v, is_recorded): what is kept"},
    {"keep", FAST(layouts_keep), METH_FASTCALL, "keep(q, k, v, is_recorded, value)"},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef tensors_methods[] = {
    {"now", tensors_now, METH_NOARGS, "the tensors if all are as they were, else None"},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef run_methods[] = {
    {"run", FAST(run_run), METH_FASTCALL, "run(tail, dropout, *inputs): the results, or None"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot layouts_slots[] = {{Py_tp_new, layouts_new},
                                      {Py_tp_dealloc, layouts_free},
                                      {Py_tp_methods, layouts_methods},
                                      {0, NULL}};
static PyType_Slot tensors_slots[] = {{Py_tp_new, tensors_new},
                                      {Py_tp_dealloc, tensors_free},
                                      {Py_tp_methods, tensors_methods},
                                      {0, NULL}};
static PyType_Slot run_slots[] = {
    {Py_tp_new, run_new}, {Py_tp_dealloc, run_free}, {Py_tp_methods, run_methods}, {0, NULL}};
static PyType_Spec specs[] = {
    {"saccade_warm.Layouts", sizeof(Layouts), 0, Py_TPFLAGS_DEFAULT, layouts_slots},
    {"saccade_warm.Tensors", sizeof(Tensors), 0, Py_TPFLAGS_DEFAULT, tensors_slots},
    {"saccade_warm.Run", sizeof(Run), 0, Py_TPFLAGS_DEFAULT, run_slots},
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
    exchange = found;
    plain_type = (PyTypeObject *)Py_NewRef(plain);
    parameter_type = (PyTypeObject *)Py_NewRef(parameter);
    empty_like = Py_NewRef(make);
    raise_error = Py_NewRef(raise);
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

PyMODINIT_FUNC PyInit_saccade_warm(void)
{
    static const char *const names[] = {"Layouts", "Tensors", "Run"};
    PyObject *module = PyModule_Create(&definition);
    requires_grad = PyUnicode_InternFromString("requires_grad");
    room_key = PyUnicode_InternFromString("saccade.room");
    if (!module || !requires_grad || !room_key)
        return NULL;
    for (int i = 0; i < 3; i++) {
        PyObject *type = PyType_FromSpec(&specs[i]);
        if (!type || PyModule_AddObject(module, names[i], type))
            return NULL;
    }
    return module;
}
