"""flex_attention where calls are recorded: torch.compile, torch.export, make_fx, jit.trace.

It is one operator there, whose arguments are tensors, numbers and text: Q, K, V, what the mods
capture, their text, and a block mask. torch.compile knows a BlockMask by its number, so that a
new one compiles nothing; what is recorded for another process holds its index tensors.

torch.compile can't follow our tracing of a Python callable: dynamo.py has it make a graph of
the callable, which is traced later. Everything else runs Python while it records: callables
become text there.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, List, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..c import abi, objects
from . import dynamo, masks, warm
from .beside import CallBeside, drawn_state
from .block_mask import BlockMask, noop_mask
from .calls import HALVES, autocast, decoded, new_call, output_like, rounded, stats_dtype
from .checks import (
    INVARIANCE,
    backend_of,
    check_call,
    check_dropout,
    check_layout,
    check_mask_heads,
    check_selections,
    check_shapes,
    mask_of_call,
    way_of,
)
from .entries import run
from .gradients import gradient_like, gradients
from .graph_breaks import disabled
from .graph_masks import of_number, stands_for
from .masks import mask_of_tensors, mask_or_mod
from .memory import NO_VMAP, has_moved
from .mod_arguments import OPERANDS, ModArguments, Operands
from .mods import AnyMod, Resolved, name_of_dtype, place, text_of, untraced
from .recording import fake_mode, is_traced

_calls: dict = {}
_AS_IS = contextlib.nullcontext()
_seeded: set = set()  # GPUs where what warm calls hold is not made in a graph's pool


class _OpCall:
    """A call whose captured tensors come with each run; it holds none of them."""

    def __init__(self, q, k, v, score: Optional[AnyMod], n_tensors, mask, how):
        scale, backend, dropout, want_lse, want_max, keeps = how
        found = None
        if score is not None:
            found = Resolved(score, "score", q.device.type, q.dtype is torch.float64)
        self.reusable, self.n_tensors = found is None or not found.copied, n_tensors
        given = scale, backend, want_lse, want_max
        self.call = new_call(
            q, k, v, found, mask, *given, dropout=dropout, may_keep=not q.is_cuda, keeps=keeps
        )
        if q.is_cuda and q.device not in _seeded:
            self.call.warm = None  # holds a tensor, which a pool of CUDA graphs forbids
        self.addresses = [v.address for v in found.views] if found is not None else []
        self.tail = None if self.addresses else self.call.bound_to(())
        self.read: List[torch.Tensor] = []
        self.keep = found.tensors[n_tensors if self.reusable else 0 :] if found else []
        self.numbers = found.tensors[n_tensors:] if found else []

    def has_read(self, captures, lists) -> bool:
        """Whether the mask was made from the values that these have, and reads them where they
        lay."""
        mask = self.call.runner.mask
        if mask is not None and has_moved(mask.tensors or (), mask.views):
            return False
        return all(map(torch.equal, [*lists, *captures[self.n_tensors :]], self.read))

    def _drawn(self, state):
        return self.call if state is None else CallBeside(self.call, state)

    def __call__(self, q, k, v, captures, state):
        call = self._drawn(state)
        if self.tail is not None:
            return call(q, k, v, self.tail[0])
        places = self.addresses
        if self.reusable:
            mine = zip(captures[: self.n_tensors], places)
            new = [a if _is_fetched(t) else t.data_ptr() for t, a in mine]
            places = new + places[len(new) :]
        tail, array = self.call.bound_to(places)
        return call(q, k, v, tail)

    def backward(self, needs, tensors, captures, d_lse, state):
        """tensors: q k v out lse d_out; needs: of q, k, v and captures."""
        n, device = self.n_tensors, tensors[0].device.type
        placed = [place(t, device) for t in captures[:n]] + self.numbers
        wanted = needs[: 3 + n] + (False,) * len(self.numbers)
        made, _ = gradients(self._drawn(state), wanted, *tensors, d_lse, placed)
        shown, more = made[:3], iter(made[3:])
        for t, w in zip(captures, needs[3:]):
            shown.append(next(more).view(t.shape).to(t.device, t.dtype) if w else None)
        return shown


def _layout(t: torch.Tensor) -> tuple:
    return t.dtype, t.shape, t.stride(), t.device


def _is_fetched(t) -> bool:
    """Whether it is a number that calls take from a GPU, and not read where it lies."""
    return t.is_cuda and t.dim() == 0


def _op_call(q, k, v, x: Operands, *wants) -> _OpCall:
    """wants: lse, row maxima, the output in f32."""
    live = of_number(x.block_mask, x.block) if x.block_mask else None
    mods, how = x.mods, (x.scale, x.backend, x.dropout, *wants)
    key = (
        tuple(map(_layout, (q, k, v, *mods.captures, *x.lists))),
        tuple(mods.numbers),
        mods[2:],
        x.block_mask,
        live.version if live is not None else None,
        tuple(x.block),
        how,
        torch.get_num_threads(),
    )
    found = _calls.get(key)
    is_fetched = any(map(_is_fetched, mods.captures))
    if found is None or is_fetched or not found.has_read(mods.captures, x.lists):
        check_call(q, k, v, True)
        for_score, for_mask = mods.named()
        live = mask_of(x, for_mask)
        if isinstance(live, AnyMod):
            made = Resolved(live, "mask", "cpu")
            live = mask_of_tensors(made, q, k, v)
        if live is not None:
            live = mask_of_call(live, q, k, v)
        made_score = AnyMod("score", mods.score, for_score) if mods.score else None
        n_tensors = len(mods.score_tensors())
        found = _OpCall(q, k, v, made_score, n_tensors, live, how)
        if len(_calls) >= 512:
            _calls.clear()
        if found.reusable:
            found.read = [t.clone() for t in (*x.lists, *mods.captures[n_tensors:])]
            _calls[key] = found
    return found


def mask_of(x: Operands, captures) -> Any:
    """The mask that they mean, which captures these: a BlockMask, what is live, or None."""
    if x.block_mask:
        return of_number(x.block_mask, x.block)
    mod = AnyMod("mask", x.mods.mask, captures) if x.mods.mask else None
    return _listed(x.lists, x.block, mod) if x.lists else mod


def _listed(lists, block, mod) -> BlockMask:
    """A BlockMask of the index tensors that a graph holds; block: Q, KV and the block sizes."""
    num, idx, full_num, full_idx = (*lists, None, None)[:4]
    return BlockMask(
        (block[0], block[1]),
        num,
        idx,
        full_num,
        full_idx,
        BLOCK_SIZE=(block[2], block[3]),
        mask_mod=mod,
        _device=lists[0].device,
    )


@contextlib.contextmanager
def _unrecorded():
    """Tensors made here are constants of what is recorded."""
    with untraced(), _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


_parts: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def _parts_of(m: BlockMask) -> tuple:
    """(index tensors, lengths and block sizes, mask): what stands for a BlockMask elsewhere."""
    known = _parts.get(m)
    if known is None or known[0] is not m.version:
        with _unrecorded():
            lists = [m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices]
            mod = None if m.mask_mod is noop_mask else _as_text("mask", m.mask_mod)
            lists = [t.contiguous() for t in lists if t is not None]
        known = _parts[m] = m.version, (lists, [*m.seq_lengths, *m.BLOCK_SIZE], mod)
    return known[1]


def _as_text(kind: str, mod: Any, is_double: bool = False) -> Any:
    """A mod as what an operator can be given."""
    if mod is None or isinstance(mod, (str, AnyMod)):
        return mod
    return text_of(kind, mod, {}, is_double)


@torch.library.custom_op(
    "saccade::flex",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPERANDS}, bool want_lse, bool want_max, "
    "bool enable_gqa, bool keeps=False) -> (Tensor, Tensor, Tensor)",
)
def flex(q, k, v, *given):
    """keeps: whether out is f32, for backward; the graph rounds it for the user."""
    x, (want_lse, want_max, enable_gqa, keeps) = _read(given)
    live = of_number(x.block_mask, x.block) if x.block_mask else None
    is_plain = x.backend == "auto" and not x.dropout and not q.is_cuda
    if is_plain and not (x.mods.captures or x.mods.numbers or x.lists):
        mods = x.mods.score or None, x.mods.mask or None if live is None else live
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IS:
            found = run(q, k, v, *mods, x.scale, None, want_lse, want_max, enable_gqa)
    else:
        call = _op_call(q, k, v, x, want_lse, want_max, keeps)
        found = call(q, k, v, x.mods.captures, x.drawn)
    out, lse, row_max = found
    if live is not None and lse is not None:
        # what is saved for backward, or detached from it, holds the mask
        lse.untyped_storage().saccade_block_mask = live
        lse.untyped_storage().saccade_selections = live.selections
    lse = _no_rows(q) if lse is None else lse
    return out, lse, _no_rows(q) if row_max is None else row_max


def _read(given):
    """Operands, and the four that are behind them: graphs of before `keeps` have three."""
    x, rest = Operands.read(given)
    return x, (*rest, False)[:4]


def _no_rows(q):
    return torch.empty(0, dtype=stats_dtype(q), device=q.device)


@flex.register_fake
def _(q, k, v, *given):
    want_lse, want_max, enable_gqa, keeps = _read(given)[1]

    def rows(wanted):
        return q.new_empty(q.shape[:3] if wanted else (0,), dtype=stats_dtype(q))

    check_layout(q, k, v)
    check_shapes(q, k, v, enable_gqa)
    if q.device.type == "cuda" and q.device not in _seeded:
        _seed(q.device)
    out = output_like(q, v.shape[3], torch.float32 if keeps else None)
    return out, rows(want_lse), rows(want_max)


def _seed(device):
    with _disable_current_modes():
        for dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32):
            warm.seed_of(dtype, device)
    _seeded.add(device)


@torch.library.custom_op(
    "saccade::flex_backward",
    mutates_args=(),
    schema=f"(Tensor[] tensors, Tensor? d_lse, bool[] needs, {OPERANDS}, bool want_max) -> "
    "Tensor[]",
)
def flex_backward(tensors, d_lse, needs, *given):
    """tensors: q k v out lse d_out. Gradients of q, k, v and captures; empty where needs, of
    the same, says so."""
    x, (want_max,) = Operands.read(given)
    live = of_number(x.block_mask, x.block) if x.block_mask else None
    if live is not None and live.selections:
        known = getattr(tensors[4].untyped_storage(), "saccade_selections", live.selections)
        check_selections(live, known)
    q, out, d_out = tensors[0], tensors[3], tensors[5]
    found = _op_call(*tensors[:3], x, True, want_max, out.dtype is not q.dtype)
    tensors = [*tensors[:5], d_out.to(q.dtype)]
    made = found.backward(tuple(needs), tensors, x.mods.captures, d_lse, x.drawn)
    return [_none_of(tensors[0]) if t is None else t for t in made]


def _none_of(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty((0,))


@flex_backward.register_fake
def _(tensors, d_lse, needs, captures, *_):
    batch = tensors[0].shape[0]
    made = [gradient_like(t, batch) for t in tensors[:3]]
    made += [t.new_empty(t.shape) for t in captures]
    return [t if w else _none_of(tensors[0]) for t, w in zip(made, needs)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.rest = inputs[4:8], inputs[8], inputs[10], inputs[11:14], inputs[16]
    ctx.n = len(inputs[3])
    ctx.none = [_no_gradient(x) for x in inputs[4:]]
    ctx.save_for_backward(*inputs[:3], *output[:2], inputs[14], *inputs[3], *inputs[9])


def _no_gradient(x: Any) -> Any:
    """None, in a list where x is one of tensors, which an empty list is."""
    is_list = isinstance(x, list) and all(isinstance(t, torch.Tensor) for t in x)
    return [None] * len(x) if is_list else None


def _backward(ctx: Any, d_out: Any, d_lse: Any, _: Any) -> Any:
    """One more operator, so that a graph with a backward pass compiles."""
    saved = list(ctx.saved_tensors)
    tensors, drawn, n = saved[:5], saved[5], 6 + ctx.n
    captures, lists = saved[6:n], saved[n:]
    needs = ctx.needs_input_grad
    wanted = [*needs[:3], *(needs[3] if ctx.n else ())]
    tensors.append(torch.zeros_like(tensors[3]) if d_out is None else d_out)
    mods, number, block, how, want_max = ctx.rest
    made: List[Any] = torch.ops.saccade.flex_backward(
        tensors,
        d_lse,
        wanted,
        captures,
        *mods,
        number,
        lists,
        block,
        *how,
        drawn,
        want_max,
    )
    made = [t if w else None for t, w in zip(made, wanted)]
    return (*made[:3], list(made[3:]), *ctx.none)


def _vmap(*arguments: Any) -> Any:
    raise NotImplementedError(NO_VMAP)


flex.register_autograd(_backward, setup_context=_setup)
flex.register_vmap(_vmap)


def _is_exporting() -> bool:
    """torch.compiler.is_exporting, which torch.compile of PyTorch 2.11 takes for true."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def in_graph(
    q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa, dropout=0.0
):
    """run, as one operator."""
    if torch.compiler.is_dynamo_compiling() and _is_to_break(_is_of_callable(block_mask)):
        given = score_mod, block_mask, scale, options, want_lse, want_max, gqa, dropout
        return _between_graphs(q, k, v, *given)
    lists: List[torch.Tensor] = []
    block: List[int] = []
    number, backend = 0, backend_of(options) if options else "auto"
    drawn = drawn_state(q) if dropout else None
    rest = scale, backend, dropout, drawn, want_lse, want_max, gqa
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q, k, v)
    q, k, v = decoded(q, k, v)
    if torch.compiler.is_dynamo_compiling():
        if isinstance(block_mask, masks.Unproven) and hasattr(block_mask, "given"):
            block_mask = unproven(block_mask.given, q, k)
        elif isinstance(block_mask, BlockMask):
            number, lists, block, block_mask = stands_for(block_mask, q.device, _is_exporting())
        elif masks.is_theirs(block_mask):
            lists, block, block_mask = masks.parts_of_theirs(block_mask)
        score, score_mod = _callable_apart(score_mod)
        mask, block_mask = _callable_apart(block_mask)
        if score is not None or mask is not None:
            mods = tuple(ModArguments.of(score_mod, block_mask))
            attend = _outside if dynamo.flex is None else dynamo.flex
            given = (number, tuple(lists), tuple(block), *rest)
            found = attend(q, k, v, score, mask, mods, given)
            return _wanted(found, want_lse, want_max)
        mods = ModArguments.of(score_mod, block_mask)
    else:
        mods, lists, block = described(q, k, score_mod, block_mask)
    return _wanted(_operator(q, k, v, mods, number, lists, block, *rest), want_lse, want_max)


def described(q, k, score_mod, block_mask):
    """(mods, index tensors, lengths and block sizes) as arguments of an operator that runs of
    Python are recorded by."""
    lists: List[torch.Tensor] = []
    block: List[int] = []
    score_mod = _as_text("score", score_mod, q.dtype is torch.float64)
    if isinstance(block_mask, masks.Unproven) and hasattr(block_mask, "given"):
        block_mask = unproven(block_mask.given, q, k)
    whole, block_mask = mask_or_mod(block_mask)
    if whole is not None and whole.lacks_sizes():
        block_mask = whole.mask_mod  # which the run proves for its sizes
    elif whole is not None:
        lists, block, block_mask = _parts_of(whole)
        if whole.is_anywhere and whole.device != q.device:
            with _unrecorded():
                lists = [t.to(q.device) for t in lists]
    mods = ModArguments.of(score_mod, _as_text("mask", block_mask))
    lists = _with_fakes("block_mask: got a BlockMask", lists)
    captures = _with_fakes("got a mod that captures a tensor", mods.captures)
    return mods._replace(captures=captures), lists, block


def _with_fakes(what, tensors):
    """Tensors as a FakeTensorMode that is on takes them."""
    mode = fake_mode()
    if mode is None or mode.allow_non_fake_inputs:
        return tensors
    is_real = [not isinstance(t, (FakeTensor, FunctionalTensor)) for t in tensors]
    if any(is_real) and is_traced():
        raise NotImplementedError(
            f"saccade: {what} from outside of what is traced, expected it inside, or "
            "_allow_non_fake_inputs=True of make_fx"
        )
    return [mode.from_tensor(t) if real else t for t, real in zip(tensors, is_real)]


def unproven(given, q, k):
    """The mask itself, of a block mask that the same graph makes for these sizes."""
    mask_mod, (B, H, Q, KV) = given[:2]
    check_mask_heads(min(B or 1, q.shape[0]), min(H or 1, q.shape[1]), q)
    if Q != q.shape[2] or KV != k.shape[2]:
        raise ValueError(
            f"block_mask was created for lengths {Q} and {KV}, expected one for "
            f"{q.shape[2]} and {k.shape[2]}"
        )
    return mask_mod


def _callable_apart(mod):
    """(callable, None), or None and what is not one."""
    is_text = mod is None or isinstance(mod, (str, AnyMod))
    return (None, mod) if is_text else (mod, None)


def _wanted(found, want_lse, want_max):
    out, lse, row_max = found
    return out, lse if want_lse else None, row_max if want_max else None


def _operator(q, k, v, mods, number, lists, block, *rest):
    *how, want_lse, want_max, enable_gqa = rest
    trains = torch.is_grad_enabled() and any(
        [t.requires_grad for t in (q, k, v, *mods.captures)]
    )
    keeps = trains and q.dtype in HALVES and _keeps(*_learned(mods))
    out, lse, row_max = torch.ops.saccade.flex(
        q,
        k,
        v,
        *mods,
        number,
        lists,
        block,
        *how,
        want_lse or trains,
        want_max,
        enable_gqa,
        keeps,
    )
    return rounded(out, q.dtype if keeps else None), lse, row_max


def _learned(mods):
    """The score's text; name, dtype and rank of what it captures; and the names of what of it
    requires gradients."""
    score, _ = mods.named()
    types = [
        (n, x.dtype, x.dim()) if isinstance(x, torch.Tensor) else (n, type(x).__name__, 0)
        for n, x in score.items()
    ]
    wanted = [n for n, x in score.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    return mods.score, tuple(types), tuple(wanted)


@torch.compiler.assume_constant_result
def _keeps(text, types, wanted) -> bool:
    """keeps_f32 of a score in 16 bits as a graph has it; an error is the call's to say."""
    kinds = {"int": "i32", "float": "f32"}
    try:
        named = [(n, kinds[t] if t in kinds else name_of_dtype(t), r) for n, t, r in types]
        bound = objects.bound_mod(abi.SCORE, text, tuple(named)) if wanted else None
        return bound is not None and bound.sums_keys(wanted)
    except ValueError:
        return False


def _of_graphs(q, k, v, found, mods, number, lists, block, *rest):
    """The operator for mods of which some were graphs: `found`, None for the others."""
    mods = ModArguments(*mods)
    for_score, for_mask = mods.named()
    score = found[0] or (AnyMod("score", mods.score, for_score) if mods.score else None)
    mask = found[1] or (AnyMod("mask", mods.mask, for_mask) if mods.mask else None)
    both, want_lse = ModArguments.of(score, mask), rest[-3]
    out, lse, row_max = _operator(q, k, v, both, number, list(lists), list(block), *rest)
    return out, lse if want_lse else _none_of(out), row_max


def _is_of_callable(mask) -> bool:
    """Whether a mask is a callable, or is made of one in this graph."""
    if isinstance(mask, masks.Unproven):
        mask = mask.given[0] if hasattr(mask, "given") else None
    if isinstance(mask, BlockMask) or masks.is_theirs(mask):
        return False
    return _callable_apart(mask)[0] is not None


@torch.compiler.assume_constant_result
def _is_to_break(has_callable: bool) -> bool:
    """Whether a transform of torch.func is active that no graph holds: any but forward mode,
    for which the operator has rules, and that too of a callable mask. Graphs are kept for the
    transforms that are around them."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    is_reverse = any(x.key() != torch._C._functorch.TransformType.Jvp for x in stack)
    return is_reverse or (has_callable and len(stack) > 0)


def _run_apart(q, k, v, score, mask, scale, options, want_lse, want_max, gqa, dropout=0.0):
    """run, wherever a graph was left."""
    from .functional import transformed

    given = q, k, v, score, mask, scale, options, want_lse, want_max, gqa
    if torch._C._are_functorch_transforms_active():
        if dropout:
            check_dropout(dropout, "torch.func's transforms")
        return transformed(*given)
    return run(*given, dropout=dropout)


_between_graphs = disabled(
    _run_apart,
    "saccade: got flex_attention inside of torch.func.grad, vjp or vmap, or of jvp with a "
    "callable mask, with fullgraph=True; expected fullgraph=False, which breaks the graph, or "
    "torch.autograd.grad and masks as text",
)


@torch.compiler.disable
def _outside(q, k, v, score, mask, mods, rest):
    """run, for callables that are in no graph."""
    mods = ModArguments(*mods)
    x, wanted = Operands(mods, *rest[:7]), rest[7:]
    for_score, for_mask = mods.named()
    if score is None and mods.score:
        score = AnyMod("score", mods.score, for_score)
    if mask is None:
        mask = mask_of(x, for_mask)
    elif x.lists:
        mask = _listed(x.lists, x.block, mask)
    name, is_invariant = way_of(x.backend)
    options = {"BACKEND": name, "BATCH_INVARIANT": INVARIANCE[is_invariant]}
    return _run_apart(q, k, v, score, mask, x.scale, options, *wanted, dropout=x.dropout)


masks.graphs_take_callables = dynamo.flex is not None
if dynamo.flex is not None:
    dynamo.flex.call, dynamo.flex.outside = _of_graphs, _outside
