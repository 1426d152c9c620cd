"""Making masks: create_block_mask, masks joined, torch's own taken over."""

from __future__ import annotations

import weakref
from typing import Any, Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..c import abi, objects
from ..trace.errors import words_of
from .block_mask import DEFAULT_BLOCK, BlockMask, BlockSize, MaskMod, block_pair
from .checks import check_indices, count_of, device_of
from .graph_breaks import disabled
from .graph_masks import numbered
from .index_lists import marks_of, ordered
from .mask_slices import moved_by
from .memory import is_without_values
from .mods import AnyMod, Resolved, captured, is_code, refuse_class, tensors_of, text_of
from .recording import fake_mode, is_described


_LONGEST = 1 << 30
_SAMPLE = 1 << 10  # positions at which a mask's indices are looked at before it is proven


def and_masks(*mask_mods: MaskMod) -> Callable[..., Any]:
    """One mask that is live where all are; of none, everywhere."""
    return _combine(mask_mods, lambda x, y: x & y, True)


def or_masks(*mask_mods: MaskMod) -> Callable[..., Any]:
    """One mask that is live where any is; of none, nowhere."""
    return _combine(mask_mods, lambda x, y: x | y, False)


def _combine(mods, join, empty):
    for m in mods:
        if not callable(m) and not isinstance(m, str):
            raise RuntimeError(f"mask_mods: got {words_of(m)}, expected a callable or text")
        refuse_class("mask_mods", m)
    callables = tuple(captured.callable_of(m) for m in mods)

    def combined(b, h, q_idx, kv_idx):
        result = empty
        for i, m in enumerate(callables):
            value = m(b, h, q_idx, kv_idx)
            result = value if i == 0 else join(result, value)
        return result

    return combined


def _device():
    """FlexAttention's default: the accelerator where there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.empty(0).device  # torch.compile can't follow torch.get_default_device


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: BlockSize = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool | None = None,
) -> BlockMask:
    """Proves which blocks are live; time and memory follow the boundary, not Q_LEN x KV_LEN.

    mask_mod: callable (b, h, q_idx, kv_idx) -> bool, language text, or a saccade mask.
    B, H: None or 1 broadcast. device: where index tensors appear, and of the calls that take
    the mask (default: index tensors on the GPU where there is one; calls anywhere).
    _compile and the dq arguments are accepted and not needed.
    """
    del _compile, compute_dq_write_order, dq_kv_order
    sizes = (B, H, Q_LEN, KV_LEN)
    given = (mask_mod, sizes, block_pair(BLOCK_SIZE), device, separate_full_blocks)
    is_taken = graphs_take_callables or not is_code(mask_mod)
    if torch.compiler.is_dynamo_compiling() and is_taken:
        return Unproven(given)
    if not torch.compiler.is_dynamo_compiling() and is_described() and _has_text(mask_mod):
        return Unproven(given)
    if is_transformed() and captures_wrapped(mask_mod):
        return Unproven(given)
    return _proven(*given)


is_transformed = torch._C._are_functorch_transforms_active


def captures_wrapped(mask_mod) -> bool:
    """Whether it captures a tensor of a transform of torch.func, which has no values there."""
    return any(map(is_without_values, tensors_of("mask", mask_mod)))


graphs_take_callables = False  # compiled.py knows


def _has_text(mask_mod):
    """Whether it does not depend on values of what it captures."""
    try:
        return not is_code(mask_mod) or text_of("mask", mask_mod, {}) is not None
    except ValueError:
        return False


class Unproven(BlockMask):
    """A block mask that a graph of torch.compile makes, or another recording, or a function
    that torch.func maps over what it captures: flex_attention of the same takes its mask_mod.
    What else is asked of it is had by proving, outside of the graph."""

    def __init__(self, given):
        self.given = given
        mask_mod, (_, _, Q, KV), self.BLOCK_SIZE, device, _ = given
        self._seq_lengths, self._mask_mod = (Q, KV), mask_mod

    def _adjust(self, new_q_len, new_kv_len):
        if not hasattr(self, "given"):
            return super()._adjust(new_q_len, new_kv_len)
        mask_mod, (B, H, _, _), *rest = self.given
        return Unproven((mask_mod, (B, H, new_q_len, new_kv_len), *rest))

    def _queries(self, first, count):
        if "given" not in self.__dict__:
            return super()._queries(first, count)
        mask_mod, (B, H, _, KV), *rest = self.given
        return Unproven((moved_by(mask_mod, first, count), (B, H, count, KV), *rest))

    @property
    def shape(self):
        if "given" not in self.__dict__:
            return super().shape
        _, (B, H, Q, KV), *_ = self.given
        return B or 1, H or 1, Q, KV

    def to(self, device):
        if "given" not in self.__dict__:
            return super().to(device)
        mask_mod, sizes, block, _, has_full = self.given
        return Unproven((mask_mod, sizes, block, device, has_full))

    def __getattr__(self, name):  # there is none before it is proven
        if "given" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"BlockMask has no attribute {name!r}")
        made = _read_outside(*self.__dict__.pop("given"))
        self.__dict__.update(made.__dict__)
        numbered[self._number] = self
        return getattr(self, name)


_IN_A_GRAPH = (
    "saccade: got a block mask that the compiled function makes itself, which has mask_mod and "
    "lengths there and no index tensors; expected create_block_mask outside of the compiled "
    "function"
)


_WITHOUT_VALUES = (
    "saccade: got a block mask made of tensors without values (torch.export, make_fx, "
    "FakeTensorMode), which has mask_mod and lengths there and no index tensors; expected "
    "flex_attention to take it as it is"
)


def _read(mask_mod, *rest):
    if fake_mode() is not None:
        text = mask_mod if isinstance(mask_mod, AnyMod) else text_of("mask", mask_mod, {})
        if any(isinstance(x, FakeTensor) for x in text.captures.values()):
            raise NotImplementedError(_WITHOUT_VALUES)
    return _proven(mask_mod, *rest)


_read_outside = disabled(_read, _IN_A_GRAPH)


@torch.compiler.disable  # around what is called: torch.compile(f) goes into an f it is around
def _proven(mask_mod, sizes, block, device, has_full):
    with torch._C._DisableFuncTorch():  # inside of grad and jvp plain tensors' views are not
        found = Resolved(mask_mod, "mask", "cpu")
        made = block_mask_of(found, *sizes, mask_mod, block, device)
        return made if has_full or made.lacks_sizes() else _all_partial(made)


def block_mask_of(
    found: Resolved,
    B,
    H,
    Q,
    KV,
    mask_mod=None,
    block=(DEFAULT_BLOCK, DEFAULT_BLOCK),
    device=None,
    dims=None,
) -> BlockMask:
    """A block mask of a mod that was resolved on the host. dims: Hkv, D and Dv; None where
    calls will say. Then blocks are whole or absent that are so for all of them, and a call
    proves anew what reads them."""
    B, H = (1 if n is None else count_of(name, n) for name, n in (("B", B), ("H", H)))
    Q, KV = count_of("Q_LEN", Q, 1, _LONGEST), count_of("KV_LEN", KV, 1, _LONGEST)
    Hkv, D, Dv = dims or (H or 1, 1, 1)
    sizes, budget = (B or 1, H or 1, Hkv, Q, KV, D, Dv), 0
    if dims is None and not found.bound.reads.isdisjoint(_OF_CALLS):
        sizes, budget = (B or 1, H or 1, 0, Q, KV, 0, 0), abi.EVALUATE_NONE
    elif any(v.shape for v in found.views):
        check_indices("mask", found, sizes, _SAMPLE)
    block_q, block_kv = block
    handle = objects.block_mask_create(
        found.bound, found.views, sizes, block_q, block_kv, found.tensors, budget=budget
    )
    made = BlockMask(
        (Q, KV),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        _handle=handle,
        _device=_device() if device is None else device_of(device),
        _lead=(B or 1, H or 1),
    )
    made.is_anywhere = device is None
    if any(v.shape for v in found.views):
        made._check = lambda sizes: check_indices("mask", found.again(), sizes, _SAMPLE)
    return made


_OF_CALLS = "Hkv", "D", "Dv"


def mask_of_tensors(mask_mod, q, k, v) -> BlockMask:
    """A block mask of a mod, resolved on the host, for a call of these tensors."""
    B, H, Q, D = q.shape
    dims = k.shape[1], D, v.shape[3]
    return block_mask_of(mask_mod, B, H, Q, k.shape[2], dims=dims)


_taken: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def mask_or_mod(given) -> tuple[BlockMask | None, Any]:
    """What a call got as block_mask: a BlockMask, or the mod to make one from; neither where
    nothing is masked, as in the one block without bounds that torch has for that."""
    if given is None or isinstance(given, BlockMask):
        return given, None
    made = adopted(given)
    if made is None:
        return None, given
    is_boundless = made.seq_lengths == (1, 1) and min(made.BLOCK_SIZE) >= 1 << 30
    return None if is_boundless else made, None


def is_theirs(mask) -> bool:
    """Whether it is a BlockMask of torch.nn.attention.flex_attention."""
    return hasattr(mask, "full_kv_indices") and hasattr(mask, "mask_mod")


def parts_of_theirs(mask) -> tuple[list[torch.Tensor], list[int], Any]:
    """(index tensors, lengths and block sizes, mask_mod) of such a BlockMask; nothing where it
    masks nothing."""
    block = [*mask.seq_lengths, *mask.BLOCK_SIZE]
    if block[0] == block[1] == 1 and min(block[2:]) >= 1 << 30:
        return [], [], None
    mod = mask.mask_mod
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if mask.full_kv_indices is not None:
        lists += [mask.full_kv_num_blocks, mask.full_kv_indices]
    return lists, block, None if getattr(mod, "__name__", "") == "noop_mask" else mod


def adopted(mask) -> BlockMask | None:
    """A BlockMask of torch.nn.attention.flex_attention as ours; None for anything else."""
    if mask is None or not is_theirs(mask):
        return None
    lists = (
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
    )
    now = (*map(id, lists), marks_of(lists), mask.mask_mod, mask.seq_lengths)
    known = _taken.get(mask)
    if known is None or known[0] != now:
        mod = mask.mask_mod
        mod = None if getattr(mod, "__name__", "") == "noop_mask" else mod
        made = BlockMask(
            mask.seq_lengths,
            *lists,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mod,
            _device=mask.kv_indices.device,
        )
        known = _taken[mask] = (now, made)
    return known[1]


def _all_partial(mask):
    return BlockMask(
        mask.seq_lengths,
        *ordered(mask.to_dense()),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        _device=mask.device,
    )
