"""What is wrong with a mod, and at which line of the user's."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PACKAGE = str(Path(__file__).resolve().parents[1])


class TraceError(TypeError):
    """A mod did something that has no meaning for one score; names the user's line."""


class NeedsConstant(TraceError):
    """The mod needs the value of a Python number that was turned into a capture."""


class NoSuchMethod(TraceError, AttributeError):
    """What is asked of a traced value has no meaning; hasattr says that it is not there."""


def _user_line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame and (
        frame.f_code.co_filename.startswith(_PACKAGE)
        or "/torch/" in frame.f_code.co_filename.replace("\\", "/")
    ):
        frame = frame.f_back
    if not frame:
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{line}: {linecache.getline(name, line).strip()}\n    "


def words_of(value: object) -> str:
    """What a value is, for messages: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def fail(message: str, kind: type[TraceError] = TraceError) -> NoReturn:
    raise kind(_user_line() + message)
