"""Block masks inside of torch.compile's graphs.

A graph knows a mask from outside by its number, so that a new one compiles nothing, and by
steps: integers that say how the graph slices and crops it. Both are looked up when the graph
runs, and so are its index tensors, where they are asked for. A mask that the graph itself made
from index tensors, or changed, has the number 0: it is its tensors and its mask_mod.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, List, NamedTuple

import torch

from .index_lists import columns_of, dense_of, lists_of_blocks, transposed_lists
from .mask_slices import noop_mask

_numbers = itertools.count(1)
numbered: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def enter(mask) -> int:
    """A number for a mask."""
    number = next(_numbers)
    numbered[number] = mask
    return number


def of_number(number: int, steps=()) -> Any:
    """The mask that a graph means."""
    try:
        found = numbered[number]
    except KeyError:
        raise RuntimeError(
            "saccade: the BlockMask of a compiled graph is gone, expected it to live as long "
            "as the compiled function is called"
        ) from None
    return found.after(tuple(steps)) if steps else found


class Part(NamedTuple):
    """A mask of a graph as steps of one from outside, with the shape of its kv_indices and how
    many index tensors it has, beside their transposes."""

    of: Any
    steps: tuple
    shape: tuple
    n_lists: int


def part_of(mask, steps, shape, n_lists) -> Part:
    before = mask._part_of
    if before is None:
        return Part(mask, steps, shape, n_lists)
    return Part(before.of, before.steps + steps, shape, n_lists)


def _whole(mask):
    """(the mask from outside, steps)."""
    part = mask._part_of
    return (mask, ()) if part is None else (part.of, part.steps)


def has_number(mask) -> bool:
    return _whole(mask)[0]._number != 0


def how_many(mask) -> int:
    """Index tensors, beside their transposes."""
    if mask._part_of is not None:
        return mask._part_of.n_lists
    return 2 if mask._is_given and mask._forward[3] is None else 4


def stands_for(mask, device, is_for_export):
    """(number, index tensors, steps, mask_mod), of which the first and the third are of a mask
    from outside, the others of one that is the graph's; then lengths and block sizes are in the
    place of steps. What is exported holds no numbers, but index tensors as constants, on the
    device of the call where the mask is for any; none where their proof lacked sizes of a call,
    which then proves the mask_mod."""
    of, steps = _whole(mask)
    if of._number and not is_for_export:
        return of._number, [], list(steps), None
    if of._number and _lacks_sizes(of._number):
        return 0, [], [], mask._mask_mod
    if of._number:
        given = of._number, steps, str(device)
        lists = [_constant_list(*given, i) for i in range(how_many(mask))]
    else:
        lists = [t for t in mask._forward if t is not None]
    mod = None if mask._mask_mod is noop_mask else mask._mask_mod
    return 0, lists, [*mask._seq_lengths, *mask.BLOCK_SIZE], mod


# ---- steps: 0 and new lengths, 4 and the queries that are picked, or how many dimensions are
# sliced, and how ----


def slices(picks):
    """How many dimensions, and of each the first, the number and the distance of what is
    picked."""
    made = [len(picks)]
    for p in picks:
        made += [p.first, p.count, p.step]
    return tuple(made)


def follow(mask, steps) -> Any:
    """A mask after all steps."""
    rest = list(steps)
    while rest:
        n = rest.pop(0)
        if n == 0:
            mask = mask._adjust(*rest[:2])
            del rest[:2]
        elif n == 4:
            first, count = rest[:2]
            mask = mask[:, :, first : first + count, :]
            del rest[:2]
        else:
            given = [rest[3 * axis : 3 * axis + 3] for axis in range(n)]
            mask = mask[tuple(slice(i, i + count * step, step) for i, count, step in given)]
            del rest[: 3 * n]
    return mask


# ---- index tensors ----


@torch.library.custom_op("saccade::block_mask_lists", mutates_args=())
def _lists(
    number: int, steps: List[int], is_transposed: bool, shape: List[int], n: int,
    device: torch.device,
) -> List[torch.Tensor]:  # fmt: skip
    """The first n index tensors of a mask. shape: that of its kv_indices."""
    found = of_number(number, steps or ())._lists(is_transposed)
    return [t.clone() for t in found[:n]]


@_lists.register_fake
def _(number, steps, is_transposed, shape, n, device):
    *lead, rows, columns = shape
    shape = [*lead, columns, rows] if is_transposed else shape
    return [
        torch.empty(shape[: len(shape) - (i + 1) % 2], dtype=torch.int32, device=device)
        for i in range(n)
    ]


def lists_of(mask, is_transposed):
    """Four index tensors, None for those that the mask has not."""
    if is_transposed and not mask._has_transpose:
        return (None,) * 4
    if mask._is_given and mask._part_of is None:
        if not is_transposed:
            return mask._forward
        if mask._transpose is not None:
            return mask._transpose
        return transposed_lists(mask._forward, mask._seq_lengths[1], mask.BLOCK_SIZE[1])
    of, steps = _whole(mask)
    n, shape = how_many(mask), list(mask.index_shape())
    made = torch.ops.saccade.block_mask_lists(
        of._number, list(steps), is_transposed, shape, n, mask._device
    )
    return (*made, *[None] * (4 - n))


@torch.compiler.assume_constant_result
def _constant_list(number, steps, device, position) -> torch.Tensor:
    """One of the index tensors, plain also under a transform of torch.func."""
    with torch._C._DisableFuncTorch():
        mask = of_number(number, steps)
        found: torch.Tensor = mask._lists(False)[position]
        return found.to(device) if mask.is_anywhere else found


@torch.compiler.assume_constant_result
def _lacks_sizes(number) -> bool:
    """Whether a mask reads b or B, h or H where it was made for any number of them."""
    of: bool = of_number(number).lacks_sizes()
    return of


def cropped_shape(mask, lengths):
    """Of kv_indices after _adjust, which has both batches and heads."""
    lead = mask.index_shape()[:-2]
    sizes = [-(-n // b) for n, b in zip(lengths, mask.BLOCK_SIZE)]
    return (*[1] * (2 - len(lead)), *lead, *sizes)


def cropped(mask, lengths):
    """Index tensors of the upper left of a mask; nothing is live beyond what it had."""
    *_, rows, new = cropped_shape(mask, lengths)
    num, idx, fnum, fidx = mask._lists(False)
    wide = columns_of(mask._seq_lengths[1], mask.BLOCK_SIZE[1], idx, fidx)
    partial = _cropped(num, idx, wide, rows, new)
    full = partial * 0 if fidx is None else _cropped(fnum, fidx, wide, rows, new)
    return lists_of_blocks(partial, full, lengths, mask.BLOCK_SIZE)


def _cropped(num, idx, columns, rows, new_columns):
    dense = dense_of(num, idx, columns)[..., :rows, :new_columns]
    more = (0, new_columns - dense.shape[-1], 0, rows - dense.shape[-2])
    return torch.nn.functional.pad(dense, more)
