"""The C library by ctypes: calls of its functions, with errors as exceptions.

`structs.py` mirrors the headers, `loading.py` finds the library; both are offered here. Nothing
knows tensors of any framework; views are (pointer, dtype, device, shape, stride).
"""

from __future__ import annotations

import ctypes as C

from .loading import lib
from .structs import *  # noqa: F403
from .structs import Error

OK = 0
STATUS = {
    10: "EINVAL",
    20: "EPARSE",
    21: "ETYPE",
    22: "ELIMIT",
    23: "EVALUE",
    30: "ENOMEM",
    40: "EBACKEND",
    50: "EIO",
    60: "ESTOPPED",
    70: "EPEER",
    90: "EINTERNAL",
}


class SaccadeError(RuntimeError):
    """A call the library refused. `status` is its name; `line`, `column` place it in a text.
    is_shared: over ranks, where all of them have the error."""

    is_shared = False

    def __init__(self, status: str, message: str, line: int = 0, column: int = 0):
        super().__init__(message)
        self.status, self.line, self.column = status, line, column


class BadValue(SaccadeError, ValueError):
    """The caller's mistake: shapes, dtypes, names, text."""


def message_of(e: Error) -> str:
    where = e.where.decode("utf-8", "replace")
    place = f"{e.line}:{e.column}: " if e.line else f"{where}: " if where else ""
    lines = [place + e.message.decode("utf-8", "replace")]
    lines += [x.value.decode("utf-8", "replace") for x in e.excerpt if x.value]
    return "\n".join(lines)


def check(status: int, e: Error) -> None:
    """Raises what a failed call reported."""
    if status == OK:
        return
    name = STATUS.get(status, str(status))
    if name == "ENOMEM":
        raise MemoryError(message_of(e))
    kind = BadValue if status < 30 else SaccadeError
    raise kind(name, message_of(e), e.line, e.column)


def call(name: str, *arguments) -> None:
    """Calls saccade_<name>(*arguments, &error) and raises on failure."""
    e = Error()
    check(getattr(lib, "saccade_" + name)(*arguments, C.byref(e)), e)


def create(name: str, *arguments) -> int:
    """The same for calls that end in (..., &out, &error); gives the new object."""
    out, e = C.c_void_p(), Error()
    check(getattr(lib, "saccade_" + name)(*arguments, C.byref(out), C.byref(e)), e)
    assert out.value is not None
    return out.value
