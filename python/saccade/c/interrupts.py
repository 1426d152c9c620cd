"""Ctrl-C, and other signals whose handlers raise, during calls of the library.

Python runs a signal's handler between two of its instructions, on the main thread, and a call
of the library has none. The library's progress function is called some 20 times a second on the
thread of the call, and is Python here.
"""

from __future__ import annotations

import ctypes as C
import sys
import threading
from contextlib import contextmanager
from typing import Any, Callable, Generator, Iterator

from .structs import BlockMaskOptions

_PROGRESS = C.CFUNCTYPE(C.c_int, C.c_void_p)  # the fraction is of no use here
_local = threading.local()


class _Look:
    """A progress function that ends the work where a handler raised, and what it raised.

    It goes on with a generator: an exception at the first instruction of a function is in no
    try of that function's, and ctypes would drop it."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        looks = self._looks()
        next(looks)
        self._call = _PROGRESS(looks.send)  # kept, as the library has its address
        self.address = C.cast(self._call, C.c_void_p).value

    def _looks(self) -> Generator[int, Any, None]:
        try:
            while True:
                yield 0
        except GeneratorExit:
            return
        except BaseException as reason:
            self.raised = reason
        yield 1


@contextmanager
def watching_signals(options: BlockMaskOptions) -> Iterator[None]:
    """Around a call that is given these options."""
    look = getattr(_local, "look", None) or _Look()
    _local.look = None  # a handler may make a mask too
    options.progress = look.address
    try:
        yield
    except Exception:
        if look.raised is None:
            raise
        raise look.raised.with_traceback(None) from None
    finally:
        if look.raised is None:
            _local.look = look


@contextmanager
def noting_dropped(note: Callable[[BaseException], None]) -> Iterator[None]:
    """Around a call of the library that calls functions in Python: what a handler raises at the
    first instruction of one is in no try of that function's, and ctypes drops it, so that the
    function counts as done. note is given it."""
    before, thread, is_open = sys.unraisablehook, threading.get_ident(), True

    def hook(given: Any) -> None:
        is_ours = is_open and threading.get_ident() == thread
        if is_ours and "ctypes callback" in (given.err_msg or "") and given.exc_value:
            note(given.exc_value)
        else:
            before(given)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        is_open = False  # another thread's may lie above this one
        sys.unraisablehook = before
