"""Arrays of other libraries by DLPack, both ways, without any of them installed.

Source: the DLPack specification, version 0 structs (DLTensor, DLManagedTensor), which every
producer still gives when asked without a version.
"""

from __future__ import annotations

import ctypes as C
import math

from .c import abi, objects
from .trace.errors import words_of

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_NAMES = {(_BOOL, 8): "bool", (_BFLOAT, 16): "bf16"}
_NAMES |= {(_INT, n): f"i{n}" for n in (8, 16, 32, 64)}
_NAMES |= {(_UINT, n): f"u{n}" for n in (8, 16, 32, 64)}
_NAMES |= {(_FLOAT, n): f"f{n}" for n in (16, 32, 64)}
_CODES = {name: key for key, name in _NAMES.items()}


class _Device(C.Structure):
    _fields_ = [("type", C.c_int32), ("id", C.c_int32)]


class _DataType(C.Structure):
    _fields_ = [("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16)]


class _Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("device", _Device),
        ("ndim", C.c_int32),
        ("dtype", _DataType),
        ("shape", C.POINTER(C.c_int64)),
        ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    ]


class _Managed(C.Structure):
    pass


_Deleter = C.CFUNCTYPE(None, C.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", C.c_void_p), ("deleter", _Deleter)]

_Destructor = C.PYFUNCTYPE(None, C.c_void_p)


def _python(name, result, *arguments):
    """A function of Python's own, whose types no other module changes."""
    return C.PYFUNCTYPE(result, *arguments)((name, C.pythonapi))


_pointer = _python("PyCapsule_GetPointer", C.c_void_p, C.py_object, C.c_char_p)
_new = _python("PyCapsule_New", C.py_object, C.c_void_p, C.c_char_p, _Destructor)
_is_valid = _python("PyCapsule_IsValid", C.c_int, C.c_void_p, C.c_char_p)
_pointer_of_dead = _python("PyCapsule_GetPointer", C.c_void_p, C.c_void_p, C.c_char_p)


def _row_major(shape):
    stride, strides = 1, []
    for n in reversed(shape):
        strides.append(stride)
        stride *= n
    return tuple(reversed(strides))


def view(array, name: str = "array"):
    """(View, capsule): the capsule keeps the memory; hold it as long as the view is used."""
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name}: got {words_of(array)}, expected an array with "
            "__dlpack__ (NumPy, JAX, CuPy, PyTorch, ...)"
        )
    if getattr(array, "is_neg", bool)():  # PyTorch: signs that are not in memory
        array = array.resolve_neg()
    capsule = _capsule_of(array, name)
    t = C.cast(_pointer(capsule, b"dltensor"), C.POINTER(_Managed)).contents.tensor
    kind = (t.dtype.code, t.dtype.bits)
    if t.dtype.lanes != 1 or kind not in _NAMES:
        raise ValueError(
            f"{name}: got DLPack dtype {kind} x {t.dtype.lanes}, expected bool, an "
            "integer or a float"
        )
    if t.device.type not in (_CPU, _CUDA, _CUDA_HOST):
        raise ValueError(f"{name}: got DLPack device {t.device.type}, expected CPU or CUDA")
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else _row_major(shape)
    cuda = t.device.type == _CUDA
    return (
        objects.View(
            (t.data or 0) + t.byte_offset,
            _NAMES[kind],
            abi.CUDA if cuda else abi.CPU,
            t.device.id if cuda else 0,
            shape,
            strides,
        ),
        capsule,
    )


def _capsule_of(array, name):
    """Of a copy, where a read-only NumPy array refuses: what is given is only read."""
    try:
        return array.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as reason:
        if getattr(array, "requires_grad", False):
            raise ValueError(
                f"{name}: got a tensor that requires grad, expected detach() of it; "
                "saccade.torch.flex_attention has gradients"
            ) from None
        try:
            return array.copy().__dlpack__()
        except (AttributeError, BufferError, TypeError, ValueError):
            raise ValueError(
                f"{name}: got {words_of(array)} that DLPack can't describe "
                f"({str(reason).rstrip('.')}), expected numbers in memory, native byte order"
            ) from None


class Buffer:
    """Fresh row-major host memory that other libraries take by from_dlpack."""

    def __init__(self, shape, dtype: str):
        bits = _CODES[dtype][1]
        self.shape, self.dtype = tuple(shape), dtype
        n = math.prod(shape) * bits // 8
        self._memory = C.create_string_buffer(n + 64)
        self.address = (C.addressof(self._memory) + 63) & ~63

    def view(self) -> objects.View:
        return objects.View(
            self.address, self.dtype, abi.CPU, 0, self.shape, _row_major(self.shape)
        )

    def as_numpy(self, numpy):
        """The same memory as an array of NumPy's."""
        kind = numpy.dtype(f"float{_CODES[self.dtype][1]}")
        start = self.address - C.addressof(self._memory)
        count = math.prod(self.shape)
        return numpy.frombuffer(self._memory, kind, count, start).reshape(self.shape)

    def __dlpack_device__(self):
        return (_CPU, 0)

    def __dlpack__(self, **_):
        code, bits = _CODES[self.dtype]
        rank = len(self.shape)
        shape = (C.c_int64 * rank)(*self.shape)
        strides = (C.c_int64 * rank)(*_row_major(self.shape))
        m = _Managed()
        key = C.addressof(m)
        m.tensor = _Tensor(
            self.address, _Device(_CPU, 0), rank, _DataType(code, bits, 1), shape, strides, 0
        )
        m.deleter = _release
        _alive[key] = (m, shape, strides, self)
        return _new(key, b"dltensor", _end)


_alive: dict = {}


@_Deleter
def _release(managed):
    _alive.pop(C.addressof(managed.contents), None)


@_Destructor
def _end(capsule):
    """Of a capsule that may have been looked at and never taken, as `view` does."""
    if _is_valid(capsule, b"dltensor"):
        _alive.pop(_pointer_of_dead(capsule, b"dltensor"), None)
