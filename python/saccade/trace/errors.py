"""What is wrong with a mod, and at which line of the user's."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

_PACKAGE = str(Path(__file__).resolve().parents[1])
_WIDTH = 80  # characters of a line that are shown


class TraceError(TypeError):
    """A mod did something that has no meaning for one score; names the user's line."""


class NeedsConstant(TraceError):
    """The mod needs the value of a Python number that was turned into a capture."""


class NoSuchMethod(TraceError, AttributeError):
    """What is asked of a traced value has no meaning; hasattr says that it is not there."""


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame and (
        frame.f_code.co_filename.startswith(_PACKAGE)
        or "/torch/" in frame.f_code.co_filename.replace("\\", "/")
    ):
        frame = frame.f_back
    return frame


def shown(code: CodeType, line: int, at: int = 0) -> str:
    """A file's line for a message: all of a short one, of a long one what is around the
    instruction, if Python (3.11 and later) knows where that is."""
    text = linecache.getline(code.co_filename, line).rstrip()
    first = len(text) - len(text.lstrip())
    begin = first
    if len(text) - first > _WIDTH and hasattr(code, "co_positions"):
        places = itertools.islice(code.co_positions(), at // 2, None)
        on, last, start, stop = next((p for p in places if p[2] != p[3]), (None,) * 4)
        if on == line and start is not None and stop is not None:
            end = stop if last == line else start + _WIDTH
            middle = max((start + end) // 2, end + 4 - _WIDTH // 2)  # a method is at the end
            begin = max(first, min(middle - _WIDTH // 2, len(text) - _WIDTH))
    part = text[begin : begin + _WIDTH]
    before = "..." if begin > first else ""
    after = "..." if begin + _WIDTH < len(text) else ""
    return f"{code.co_filename}:{line}: {before}{part}{after}\n    "


def of_name(value: object) -> str:
    """' x' where the user's line knows a value as x, else nothing."""
    frame = _user_frame()
    if frame is None:
        return ""
    named = [n for n in frame.f_code.co_names if frame.f_globals.get(n) is value]
    named = [n for n, x in frame.f_locals.items() if x is value] + named
    return f" {named[0]}" if named else ""


def words_of(value: object) -> str:
    """What a value is, for messages: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def fail(message: str, kind: type[Exception] = TraceError) -> NoReturn:
    frame = _user_frame()
    where = shown(frame.f_code, frame.f_lineno, frame.f_lasti) if frame else ""
    raise kind(where + message)
