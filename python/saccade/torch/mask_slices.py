"""Slices of block masks: what an index picks, of index tensors and of the mod.

Batches, heads and rows of blocks are picked; the mod goes on seeing the positions that it saw
before. All of it can be traced by torch.compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..trace import tracer as tracing
from .mods import AnyMod, captured


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every position is live."""
    return b.new_ones(size=(), dtype=torch.bool) if hasattr(b, "new_ones") else True


class Range(NamedTuple):
    """Numbers at equal distances, as a slice or an integer picks them."""

    first: Any
    count: Any
    step: Any

    def last(self):
        return self.first + (self.count - 1) * self.step

    def numbers(self):
        return torch.arange(self.count, device="cpu") * self.step + self.first


def picks_of(index, shape):
    """What an index picks of dimensions of this shape: a Range for each, or the numbers in a
    tensor."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) > 3:
        raise IndexError(f"got {len(index)} indices, expected at most 3: batch, head, row")
    found = []
    for axis, n in enumerate(shape):
        x = index[axis] if axis < len(index) else slice(None)
        found.append(_pick(slice(None) if x is Ellipsis else x, n, axis))
    return found


def queries_of(index, Q):
    """(first, count) of four indices that pick queries of a dense mask."""
    queries = index[2]
    whole = slice(None)
    if any(x != whole for x in (index[0], index[1], index[3])):
        raise IndexError(
            "got 4 indices, expected at most 3: batch, head, row, or mask[:, :, queries, :]"
        )
    if not isinstance(queries, slice) or queries.step not in (None, 1):
        raise IndexError(f"got queries {queries!r}, expected a slice of step 1")
    first, count, _ = _pick(queries, Q, 2)
    return first, count


def moved_by(mod, first, count):
    """The mod of so many queries from this one on."""
    if mod is noop_mask:
        return mod
    if torch.compiler.is_dynamo_compiling() and isinstance(mod, (str, AnyMod)):
        rows = torch.arange(count, dtype=torch.int32, device="cpu") + first
        return _moved_text(mod, [None, None, rows], 1)
    inner = captured.callable_of(mod)

    def moved(b, h, q_idx, kv_idx):
        return inner(b, h, q_idx + first, kv_idx)

    return moved


def _pick(x, n, axis):
    if isinstance(x, int):
        if not -n <= x < n:
            raise IndexError(f"got index {x} in dimension {axis}, expected {-n} to {n - 1}")
        return Range(x % n, 1, 1)
    if isinstance(x, slice):
        step = 1 if x.step is None else x.step
        if step < 1:
            raise ValueError(
                f"got a slice of step {step} in dimension {axis}, expected 1 or more"
            )
        first, stop = _bound(x.start, 0, n), _bound(x.stop, n, n)
        return Range(first, max(0, -(-(stop - first) // step)), step)
    if x is None or isinstance(x, (float, str)):
        raise IndexError(f"got {x!r} in dimension {axis}, expected an int, a slice or a tensor")
    x = x.cpu() if isinstance(x, torch.Tensor) else torch.tensor(x, device="cpu")
    return torch.arange(n, device="cpu")[x.reshape(1) if x.dim() == 0 else x]


def _bound(x, absent, n):
    x = absent if x is None else x
    return min(max(x + n, 0) if x < 0 else x, n)


def are_ranges(picks) -> bool:
    return all(isinstance(p, Range) for p in picks)


def rows_of(pick, Q, block):
    """How many queries the picked rows of blocks have: a slice ends where the mask does, rows
    that a tensor picks are whole blocks."""
    if not isinstance(pick, Range):
        return pick.shape[0] * block
    if pick.count == 0:
        return 0
    return pick.count * block - max(0, (pick.last() + 1) * block - Q)


def picked(t, picks):
    """An index tensor's part; None of None."""
    for axis, p in enumerate(picks):
        if t is not None:
            t = t.index_select(axis, _numbers(p).to(t.device))
    return t


def _numbers(pick):
    return pick.numbers() if isinstance(pick, Range) else pick


def _is_in_place(pick, n) -> bool:
    """Whether what is picked stays where it is. The first few see their own positions; a single
    one may serve any batch or head."""
    if isinstance(pick, Range):
        return pick.first == 0 and pick.step == 1 and (pick.count > 1 or n == 1)
    if torch.compiler.is_dynamo_compiling():
        return False
    return pick.tolist() == list(range(len(pick))) and (len(pick) > 1 or n == 1)


def moved(mod, picks, shape, block):
    """The mod of the picked part; block: queries of a row of blocks."""
    moves = [
        None if _is_in_place(p, n) else _numbers(p).to(torch.int32)
        for p, n in zip(picks, shape)
    ]
    moves = [None] * (3 - len(moves)) + moves
    if moves[0] is None and moves[1] is None and moves[2] is None:
        return mod
    if torch.compiler.is_dynamo_compiling():
        if mod is noop_mask:
            return mod
        if isinstance(mod, (str, AnyMod)):
            return _moved_text(mod, moves, block)
    return _moved(captured.callable_of(mod), moves, block)


def _moved(inner, moves, block):
    b_map, h_map, rows = moves

    def moved(b, h, q_idx, kv_idx):
        b = b if b_map is None else b_map[b]
        h = h if h_map is None else h_map[h]
        q = q_idx if rows is None else rows[q_idx // block] * block + q_idx % block
        return inner(b, h, q, kv_idx)

    return moved


def _moved_text(mod, moves, block):
    """Of text, inside of a graph."""
    text = mod if isinstance(mod, str) else mod.text
    held = {} if isinstance(mod, str) else mod.captures
    kinds = []
    for name, x in held.items():
        if isinstance(x, torch.Tensor):
            kinds.append((name, x.dtype, x.dim()))
        else:
            kinds.append((name, torch.int32 if isinstance(x, int) else torch.float32, 0))
    is_moved = (moves[0] is not None, moves[1] is not None, moves[2] is not None)
    text, names = _text_around(text, tuple(kinds), is_moved, block)
    given = {**held, "b of": moves[0], "h of": moves[1], "row of": moves[2]}
    return AnyMod("mask", text, {name: given[source] for name, source in names})


@torch.compiler.assume_constant_result
def _text_around(text, kinds, is_moved, block):
    """The text, and what each of its captures is: one of the inner text's or a map of moved
    places. kinds: (name, dtype, rank) of the inner text's captures."""
    held = {n: torch.zeros((2,) * rank, dtype=dtype, device="cpu") for n, dtype, rank in kinds}
    maps = [torch.zeros(2, dtype=torch.int32, device="cpu") if m else None for m in is_moved]
    around = _moved(captured.callable_of(AnyMod("mask", text, held)), maps, block)
    text, captures = tracing.run(around, "mask")
    sources = {id(t): n for n, t in held.items()}
    sources.update((id(t), n) for n, t in zip(("b of", "h of", "row of"), maps))
    return text, tuple((name, sources[id(x)]) for name, x in captures)
