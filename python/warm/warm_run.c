/* Run: one call of the library for tensors of one layout. */
#include "warm.h"

#include <dlfcn.h>
#include <stdlib.h>

enum {
    MOST_TENSORS = 32,    /* of a call, inputs or results */
    MOST_WORDS = 1024,    /* arguments, tensors and bindings of a call: 8 KiB of stack */
    ERROR_BYTES = 1024,   /* at least those of a saccade_error */
    LEAST_ROOM = 1 << 20, /* workspace that a thread keeps for its next call, at least */
    MOST_KEPT = 4 << 20,  /* workspace on a GPU that a layout's calls keep, at most */
    MOST_HELD = 64 << 20, /* that all calls of the process keep, at most */
};

typedef int32_t library_call(void *plan, void *args, void *error);
typedef struct {
    int word;      /* where the address goes; -1: nowhere */
    void *address; /* where it lies; the library knows it of one without a word */
    layout like;
} input;
typedef struct {
    int word;        /* -1: the result is None */
    int of;          /* the input that it is like, or -1: */
    PyObject *model; /* a tensor that it is like; with an input NULL, or: */
    PyObject *dtype; /* keywords of empty_like, where the result has a dtype of its own */
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
    int may_keep;         /* for the next call on its stream */
    PyObject *kept;       /* one for the next call on this stream, or NULL; see take_room */
    void *kept_stream;
} Run;

static size_t held_bytes; /* rooms of all Runs that have a kept one; under the GIL */

static void run_free(PyObject *self)
{
    Run *s = (Run *)self;
    for (int i = 0; i < s->n_outputs; i++) {
        Py_XDECREF(s->outputs[i].model);
        Py_XDECREF(s->outputs[i].dtype);
    }
    Py_XDECREF(s->room_model);
    if (s->kept)
        held_bytes -= s->room;
    Py_XDECREF(s->kept);
    PyMem_Free(s->words);
    PyMem_Free(s->links);
    warm_free_object(self);
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
        if (!warm_look(t, &d)) {
            PyErr_SetString(PyExc_TypeError, "expected plain tensors");
            return -1;
        }
        warm_keep_layout(&in->like, &d);
        in->address = warm_address_of(&d);
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
        if (out->of < 0)
            out->model = Py_NewRef(model);
        else if (model != Py_None && !(out->dtype = Py_BuildValue("{sO}", "dtype", model)))
            return -1;
        if (out->of >= s->n_inputs) {
            PyErr_SetString(PyExc_ValueError, "a result like an input that is not there");
            return -1;
        }
    }
    return 0;
}

/* Run(call, plan, words, links, inputs, outputs, room, room_model, places, may_keep): addresses
 * are integers, places those of tail, room, stream and dropout; the others are as above. */
static PyObject *run_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    Run *s = (Run *)warm_new_object(type);
    if (!s)
        return NULL;
    PyObject *call, *plan, *words, *links, *inputs, *outputs, *model;
    Py_ssize_t room;
    if (!PyArg_ParseTuple(args, "OOOOOOnO(iiii)p", &call, &plan, &words, &links, &inputs,
                          &outputs, &room, &model, &s->tail, &s->room_word, &s->stream_word,
                          &s->dropout_word, &s->may_keep))
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
    room = PyDict_GetItemWithError(of_thread, warm_names[NAME_ROOM]);
    if (!room || PyBytes_Size(room) < n + 64) {
        n = n > LEAST_ROOM ? n : LEAST_ROOM;
        if (PyErr_Occurred() || !(room = PyBytes_FromStringAndSize(NULL, n + 64)))
            return NULL;
        int failed = PyDict_SetItem(of_thread, warm_names[NAME_ROOM], room);
        Py_DECREF(room);
        if (failed)
            return NULL;
    }
    return PyBytes_AsString(room);
}

/* Whether a graph may be in the making on the stream: it runs again when no call does. */
static int may_be_captured(void *stream)
{
    typedef int query(void *stream, int *status);
    static query *ask; /* of the driver that PyTorch has loaded */
    static int is_sought;
    int status = 1;
    if (!is_sought) {
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        void *found = driver ? dlsym(driver, "cuStreamIsCapturing") : NULL;
        memcpy(&ask, &found, sizeof ask);
        is_sought = 1;
    }
    return !ask || ask(stream, &status) != 0 || status != 0;
}

/* Unless SACCADE_KEEP_WORKSPACE is 0, read once. */
static int may_keep(void)
{
    static int known = -1;
    if (known < 0) {
        const char *text = getenv("SACCADE_KEEP_WORKSPACE");
        known = !text || strcmp(text, "0") != 0;
    }
    return known;
}

/* Whether a workspace of this call may serve the next one on its stream: the work of both is
 * done one after the other there. */
static int is_kept(const Run *s, void *stream)
{
    return s->may_keep && may_keep() && s->room_model
           && s->inputs[0].like.device_type == DL_CUDA && s->room <= MOST_KEPT
           && !may_be_captured(stream);
}

/* A workspace that is a tensor. One that is kept is taken away, so that no other thread's call
 * begins with it before this one has launched all. */
static PyObject *take_room(Run *s, int keeps, void *stream)
{
    PyObject *held = s->kept;
    if (!keeps || !held || s->kept_stream != stream)
        return PyObject_CallFunctionObjArgs(warm_empty_like, s->room_model, NULL);
    s->kept = NULL;
    held_bytes -= s->room;
    return held;
}

/* The total is asked for here, where it grows: others may have kept theirs during the call. */
static void keep_room(Run *s, PyObject *held, void *stream)
{
    PyObject *old = s->kept;
    if (!old && held_bytes + s->room > MOST_HELD) {
        Py_DECREF(held);
        return;
    }
    held_bytes += old ? 0 : s->room;
    s->kept = held;
    s->kept_stream = stream;
    Py_XDECREF(old);
}

/* Where the workspace begins, 0 and an error where there is none; *held: what holds it. */
static uint64_t room_of(Run *s, int keeps, void *stream, PyObject **held)
{
    uintptr_t at;
    if (s->room_model) {
        dl_tensor d;
        *held = take_room(s, keeps, stream);
        if (!*held || !warm_look(*held, &d))
            return 0;
        at = (uintptr_t)warm_address_of(&d);
    } else {
        at = (uintptr_t)own_room((Py_ssize_t)s->room);
    }
    return at ? (at + 63) & ~(uintptr_t)63 : 0;
}

static PyObject *make_output(const output *out, PyObject *const *inputs)
{
    PyObject *like = out->of < 0 ? out->model : inputs[out->of];
    if (!out->dtype)
        return PyObject_CallFunctionObjArgs(warm_empty_like, like, NULL);
    PyObject *one = PyTuple_New(1), *made = NULL;
    if (one) {
        PyTuple_SetItem(one, 0, Py_NewRef(like));
        made = PyObject_Call(warm_empty_like, one, out->dtype);
    }
    Py_XDECREF(one);
    return made;
}

/* Makes the results and writes their addresses; a tuple, or NULL. */
static PyObject *make_outputs(const Run *s, PyObject *const *inputs, uint64_t *words)
{
    PyObject *made = PyTuple_New(s->n_outputs);
    for (int i = 0; made && i < s->n_outputs; i++) {
        const output *out = &s->outputs[i];
        PyObject *t = Py_None;
        dl_tensor d;
        if (out->word < 0) {
            Py_INCREF(t);
        } else if ((t = make_output(out, inputs)) && warm_look(t, &d)) {
            words[out->word] = (uint64_t)(uintptr_t)warm_address_of(&d);
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

/* run(tail, dropout, *inputs): the results, or None where an input is of another layout, or one
 * without a word lies elsewhere. tail: bytes for the place of that name, or None; dropout: an
 * address. */
PyObject *warm_run(PyObject *self, PyObject *const *args, Py_ssize_t n)
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
        const input *in = &s->inputs[i];
        if (!warm_look(args[i + 2], &d) || !warm_has_layout(&in->like, &d))
            Py_RETURN_NONE;
        void *address = warm_address_of(&d);
        if (in->word >= 0)
            words[in->word] = (uint64_t)(uintptr_t)address;
        else if (address != in->address)
            Py_RETURN_NONE;
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
    if (first->device_type == DL_CUDA
        && warm_exchange->current_stream(DL_CUDA, first->device_index, &stream) != 0)
        goto failed;
    const int keeps = s->room && is_kept(s, stream);
    if (s->room && !(words[s->room_word] = room_of(s, keeps, stream, &held)))
        goto failed;
    words[s->stream_word] = (uint64_t)(uintptr_t)stream;
    Py_BEGIN_ALLOW_THREADS;
    status = s->call(s->plan, words, error);
    Py_END_ALLOW_THREADS;
    if (status == 0) {
        if (keeps)
            keep_room(s, held, stream);
        else
            Py_XDECREF(held);
        return made;
    }
    PyObject *none = PyObject_CallFunction(warm_raise_error, "iy#", (int)status, (char *)error,
                                           (Py_ssize_t)sizeof error);
    Py_XDECREF(none);
failed:
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "no memory or stream for a call");
    Py_XDECREF(held);
    Py_DECREF(made);
    return NULL;
}

PyObject *warm_run_of(PyObject *method)
{
    if (!method || !PyCFunction_Check(method)
        || PyCFunction_GetFunction(method) != FAST(warm_run))
        return NULL;
    return PyCFunction_GetSelf(method);
}

PyObject *warm_forward(PyObject *entry, PyObject *call, PyObject *const *three)
{
    PyObject *method = warm_get(call, NAME_WARM), *made = NULL;
    PyObject *tail = method ? warm_get(entry, NAME_TAIL) : NULL, *run = warm_run_of(method);
    if (tail) {
        PyObject *const given[] = {tail, warm_zero, three[0], three[1], three[2]};
        made = run ? warm_run(run, given, 5) : Py_NewRef(Py_None);
    }
    Py_XDECREF(tail);
    Py_XDECREF(method);
    return made;
}

static PyMethodDef run_methods[] = {
    {"run", FAST(warm_run), METH_FASTCALL, "run(tail, dropout, *inputs): the results, or None"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot run_slots[] = {
    {Py_tp_new, run_new}, {Py_tp_dealloc, run_free}, {Py_tp_methods, run_methods}, {0, NULL}};
PyType_Spec warm_run_spec = {"saccade_warm.Run", sizeof(Run), 0, Py_TPFLAGS_DEFAULT, run_slots};
