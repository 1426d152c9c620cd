/* warm.h: what a warm call from PyTorch does between Python and the library: looks at tensors,
 * finds the call that was made for their layout, makes the results, fills in addresses, calls.
 *
 *     warm_look.c      tensors by DLPack's exchange table, their layouts
 *     warm_layouts.c   Layouts: what was made for query, key and value of some layouts
 *     warm_tensors.c   Tensors: some, held weakly, as they were
 *     warm_mods.c      mods: what tells one from another, whether all is as it was
 *     warm_run.c       Run: one call of the library for tensors of one layout
 *     warm_node.c      forward and backward of a node of autograd's graph
 *     warm_entry.c     a call whose mods were seen before, from its table to its result
 *     warm_module.c    the module
 *
 * A Python extension in the stable ABI; the package runs without it, by ctypes, and slower.
 * Tensors are read through DLPack's exchange table (PyTorch 2.10 or later): no header of
 * PyTorch is needed. What is not plain (a subclass, another layout) is None: ask Python. */
#ifndef SACCADE_PYTHON_WARM_H
#define SACCADE_PYTHON_WARM_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { WARM_MOST_RANK = 8, DL_CUDA = 2 };

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

typedef struct {
    int32_t device_type, device_index, rank;
    uint32_t dtype;
    int64_t shape[WARM_MOST_RANK], stride[WARM_MOST_RANK];
} layout;

/* ---- of the process: warm_module.c's begin sets them ---- */

extern const dl_exchange *warm_exchange;
extern PyTypeObject *warm_plain_type, *warm_parameter_type;
extern PyObject *warm_empty_like, *warm_is_neg, *warm_raise_error, *warm_zero;

/* Names of attributes and keys, interned. */
typedef enum {
    NAME_REQUIRES_GRAD,
    NAME_ROOM,
    NAME_ENTRY,
    NAME_CALL,
    NAME_CURRENT,
    NAME_IS_CONSTANT,
    NAME_LAYOUTS,
    NAME_NEEDS,
    NAME_TAIL,
    NAME_WARM,
    NAME_WARM_BACKWARD,
    NAME_OF_MASK,
    NAME_NARROW,
    NAME_TO,
    NAME_TO_SAVE,
    NAME_SAVED_TENSORS,
    NAME_NEEDS_INPUT_GRAD,
    NAME_QUICK,
    NAME_KWDEFAULTS,
    NAME_DEFAULTS,
    NAME_DICT,
    NAME_CODE,
    NAME_GLOBALS,
    NAME_CLOSURE,
    NAME_CELL_CONTENTS,
    NAME_MARKS,
    NAME_STAMP,
    NAME_VERSION,
    WARM_NAMES
} warm_name;
extern PyObject *warm_names[WARM_NAMES];

/* A new reference, or NULL with an error. */
static inline PyObject *warm_get(PyObject *object, warm_name name)
{
    return PyObject_GetAttr(object, warm_names[name]);
}

#define FAST(f) ((PyCFunction)(void (*)(void))(f))

/* ---- warm_look.c ---- */

/* Whether it is a tensor like any other, which d then describes; never raises. */
int warm_look(PyObject *t, dl_tensor *d);
void *warm_address_of(const dl_tensor *d);
void warm_keep_layout(layout *l, const dl_tensor *d);
int warm_has_layout(const layout *l, const dl_tensor *d);
/* 1, 0, or -1 with an error. */
int warm_wants_gradient(PyObject *t);
/* Whether memory holds the negatives of a tensor's values, as of z.conj().imag, which warm_look
 * does not see; 1, 0, or -1 with an error. */
int warm_is_negative(PyObject *t);
void warm_free_object(PyObject *self);
PyObject *warm_new_object(PyTypeObject *type);

/* ---- types ---- */

extern PyType_Spec warm_layouts_spec, warm_tensors_spec, warm_run_spec;

/* Of a Layouts: find(q, k, v, is_recorded). */
PyObject *warm_find(PyObject *layouts, PyObject *const *args, Py_ssize_t n);

/* Of a Tensors, what its method of this name does: the tensors, or None. */
PyObject *warm_now(PyObject *tensors);

/* Of a Run, what its method of this name does: run(tail, dropout, *inputs). */
PyObject *warm_run(PyObject *run, PyObject *const *args, Py_ssize_t n);
/* The Run whose method `run` this is, borrowed; NULL where it is none. */
PyObject *warm_run_of(PyObject *method);
/* Forward of an entry: the results, or None where its call is to run in Python. three: query,
 * key and value. */
PyObject *warm_forward(PyObject *entry, PyObject *call, PyObject *const *three);

/* ---- warm_mods.c ---- */

extern PyMethodDef warm_mods_functions[];

/* Equal for mods that are the same object, or functions of one code that hold the same; NULL
 * with an error. */
PyObject *warm_identity(PyObject *mod);
/* The tensors that a score captures, None where something changed. */
PyObject *warm_current(PyObject *quick);

/* ---- warm_node.c ---- */

extern PyMethodDef warm_node_functions[]; /* of the module */

/* ---- warm_entry.c ---- */

extern PyMethodDef warm_entry_functions[];

#endif
