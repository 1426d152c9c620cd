"""Mods as arguments of an operator, which takes tensors, numbers and text."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import torch

from .mods import AnyMod


class ModArguments(NamedTuple):
    """Two mods as an operator's arguments. names: those of the score's tensors and then numbers
    ("slope w:float"), a bar, the mask's; captures and numbers are in the same order."""

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
                    if isinstance(c, torch.Tensor):
                        tensors.append(name)
                        captures.append(c)
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
