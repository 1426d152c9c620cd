"""Mods, and what a call has beside them, as arguments of an operator, which takes tensors,
numbers and text."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import torch
from torch.fx.experimental import symbolic_shapes

from .mods import AnyMod


_has_static_value = getattr(symbolic_shapes, "has_static_value", None)


def _is_open(x: Any) -> bool:
    """Whether it is an integer that a graph of torch.compile leaves open."""
    if _has_static_value is None or not torch.compiler.is_dynamo_compiling():
        return False
    return isinstance(x, int) and not _has_static_value(x)


def _as_input(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    return torch.scalar_tensor(x, dtype=torch.int64, device="cpu")


class ModArguments(NamedTuple):
    """Two mods as an operator's arguments. names: those of the score's tensors and then numbers
    ("slope w:float"), a bar, the mask's; captures and numbers are in the same order. Integers
    that a graph leaves open are tensors."""

    captures: List[torch.Tensor]
    numbers: List[float]
    names: str
    score: str
    mask: str

    @classmethod
    def of(cls, score: Any, mask: Any) -> "ModArguments":
        captures: List[torch.Tensor] = []
        numbers: List[float] = []
        parts: List[str] = []
        texts: List[str] = []
        for mod in (score, mask):
            tensors: List[str] = []
            words: List[str] = []
            if isinstance(mod, AnyMod):
                texts.append(mod.text)
                for name, c in mod.captures.items():
                    if isinstance(c, torch.Tensor) or _is_open(c):
                        tensors.append(name)
                        captures.append(_as_input(c))
                    else:
                        words.append(name + (":int" if isinstance(c, int) else ":float"))
                        numbers.append(float(c))
            else:
                texts.append(mod or "")
            parts.append(" ".join(tensors + words))
        return cls(captures, numbers, " | ".join(parts), texts[0], texts[1])

    def named(self) -> list[dict[str, Any]]:
        """The captures of the score by name, and those of the mask."""
        tensors, numbers, made = iter(self.captures), iter(self.numbers), []
        for part in self.names.split("|"):
            found: dict[str, Any] = {}
            for word in part.split():
                name, _, kind = word.partition(":")
                x = next(numbers) if kind else next(tensors)
                found[name] = int(x) if kind == "int" else x
            made.append(found)
        return made

    def score_tensors(self) -> List[str]:
        """The names of the tensors that the score captures, with which captures begin."""
        return [word for word in self.names.partition("|")[0].split() if ":" not in word]


class Operands(NamedTuple):
    """What operators of attention are given beside query, key and value. lists and block: of a
    block mask that is known by no number, its index tensors, and its lengths and block sizes;
    else the steps from the mask of that number to the call's. drawn: seed and offset of calls
    that drop weights, at the rate dropout."""

    mods: ModArguments
    block_mask: int
    lists: List[torch.Tensor]
    block: List[int]
    scale: Optional[float]
    backend: str
    dropout: float = 0.0
    drawn: Optional[torch.Tensor] = None

    def flat(self) -> tuple[Any, ...]:
        """As arguments of OPERANDS."""
        return (*self.mods, *self[1:])

    @classmethod
    def read(cls, given: Sequence[Any]) -> tuple["Operands", Sequence[Any]]:
        """Of the arguments that begin with those of OPERANDS; and what is behind them.
        Ahead-of-time code passes empty lists as None."""
        captures, numbers, names, score, mask, number, lists, block, *rest = given[:12]
        mods = ModArguments(captures or [], numbers or [], names, score, mask)
        return cls(mods, number, lists or [], block or [], *rest), given[12:]


# Operands in an operator's schema.
OPERANDS = (
    "Tensor[] captures, float[] numbers, str names, str score, str mask, SymInt block_mask, "
    "Tensor[] lists, SymInt[] block, float? scale, str backend, float dropout, Tensor? drawn"
)
