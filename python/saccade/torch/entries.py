"""Which call belongs to given arguments: tables that make a warm call cheap, and run.

A call is looked up by identity of the mods, for warm calls; by text and layout of captures, for
other mods that come to the same; by code and layout of captures, for functions made anew around
other tensors and numbers. None keeps a mod or a tensor of the caller alive: entries go when
what they were made from does.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..c.abi import BadValue
from . import warm
from .autograd import Slots, apply, node, out_of
from .beside import Beside, with_sinks
from .bounds import check_score
from .calls import FakeCall, autocast, decoded, keeps_f32, new_call
from .checks import (
    NoRows,
    backend_of,
    check_call,
    check_layout,
    check_shapes,
    mask_of_call,
)
from .masks import mask_of_tensors, mask_or_mod
from .mask_slices import noop_mask
from .memory import refuse_wrapped
from .mods import AnyMod, Resolved, as_tensor, dtype_name, in_names_of
from .no_rows import of_no_rows
from .watch import Watch, held_at, identity, layout, owners

# By identity of the mods, for warm calls; by text and layout of captures, for other mods that
# come to the same; by code and layout of captures, for functions made anew around other tensors
# and numbers. None keeps a mod or a tensor of the caller alive: entries go when what they were
# made from does.
_entries: dict = {}
_calls: dict = {}
_patterns: dict = {}
_warm: dict = {}  # by identity of the mods; then the extension looks at the tensors
_ENTRIES = 512
# At which rate weights are dropped, the dtype of sinks, if they train, and whether the output
# is f32 (None: where gradients of captures want it).
PLAIN = 0.0, "", False, None
_lock = threading.Lock()


class _Entry:
    """A call for one pair of mods and one layout, and how to see that they still hold. needs:
    for which of query, key, value and the captured tensors the call has gradients; () for
    none."""

    __slots__ = (
        "call",
        "tail",
        "keep",
        "watches",
        "mask",
        "version",
        "captured",
        "held",
        "flags",
        "needs",
        "slots",
        "shows_lse",
        "refs",
        "is_kept",
        "is_large",
        "is_constant",
        "quick",
    )

    def __init__(self, call, tail, keep, watches, mask, shows_lse):
        self.call, self.tail, self.keep, self.watches = call, tail, keep, watches
        self.mask = weakref.ref(mask) if mask is not None else None
        self.version = mask.version if mask is not None else None
        self.captured, self.flags, self.needs, self.slots = (), (), (), None
        self.held = None
        self.shows_lse = shows_lse
        self.refs, self.is_kept = [], False
        self.is_large = False  # it holds a proven mask, or copies of captures
        self.is_constant = False  # nothing of it can change: there are no mods
        self.quick = None  # what the extension asks instead of current

    def trains(self, needs, captured, slots):
        """Grad mode is on; captured: the tensors that the score captures."""
        self.flags = tuple([t.requires_grad for t in captured])
        self.captured = [weakref.ref(t) for t in captured]
        self.held = warm.tensors_of(captured) if captured else None
        self.slots = slots
        if needs != 8 or True in self.flags:
            self.needs = (needs & 1 > 0, needs & 2 > 0, needs & 4 > 0, *self.flags)

    def quicken(self):
        """Lets the extension look at what current does, if that is a mask and tensors alone."""
        if self.held is None and self.captured or not all(w.is_quick() for w in self.watches):
            return
        watched = [w.held for w in self.watches if w.held is not None]
        handle = self.call.runner.mask
        read = [t for t in handle.tensors or () if t.dim()] if handle is not None else []
        if read:
            watched.append(warm.tensors_of(read))
            if watched[-1] is None:
                return
        self.quick = (self.mask, self.version, *watched, self.held)

    def current(self):
        """The tensors that the score captures, None where something changed; () where no
        gradient is asked for."""
        if self.mask is not None:
            mask = self.mask()
            if mask is None or mask.version is not self.version:
                return None
        for w in self.watches:
            if not w.unchanged():
                return None
        if self.held is not None:
            return self.held.now()
        captured = [ref() for ref in self.captured]
        for t, flag in zip(captured, self.flags):
            if t is None or t.requires_grad is not flag:
                return None
        return captured


def run(
    q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa, dropout=0.0,
    sinks=None, keeps=None,
):  # fmt: skip
    """flex_attention for tensors with memory. sinks: in the dtype of lse. keeps: whether the
    output is f32, if not what is saved alone."""
    key = is_recorded = None
    is_apart = options or dropout or sinks is not None or keeps
    try:
        if warm.extension is not None and not is_apart:
            made = warm.extension.call(
                q, k, v, score_mod, block_mask, scale, want_lse, want_max, gqa
            )
            if made is not None:
                return made
        if warm.extension is not None and not (is_apart or _is_to_cast(q, k, v)):
            is_recorded = torch.is_grad_enabled()
            key = (
                identity(score_mod),
                identity(block_mask),
                scale,
                want_lse,
                want_max,
                gqa,
                torch.get_num_threads(),
            )
            known = _warm.get(key)
            found = known.find(q, k, v, is_recorded) if known is not None else None
            captured = found.current() if found is not None else None
            if captured is not None:
                if found.needs:
                    return node(found, q, k, v, captured)
                return found.call(q, k, v, found.tail)
    except BadValue as reason:
        raise _in_names_of(reason, score_mod, block_mask) from None
    beside, trains_sinks = PLAIN, False
    if is_apart:
        trains_sinks = sinks is not None and sinks.requires_grad and torch.is_grad_enabled()
        beside = dropout, "" if sinks is None else dtype_name(sinks), trains_sinks, keeps
    try:
        found, q, k, v = _find(
            q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa, beside
        )
        if key is not None and found.is_kept:
            _keep_warm(key, found, q, k, v, is_recorded, score_mod, block_mask)
        if dropout or sinks is not None:
            found = Beside(found, q, dropout, sinks)
    except NoRows:
        if sinks is None:
            return of_no_rows(q, k, v, score_mod, want_lse, want_max)
        out, lse, row_max = of_no_rows(q, k, v, score_mod, True, want_max)
        out, lse = with_sinks(out, lse, sinks)
        return out, lse if want_lse else None, row_max
    except (AttributeError, RuntimeError):
        check_call(q, k, v, gqa)  # says what is wrong with them, if anything is
        raise
    try:
        if found.needs or trains_sinks:
            return apply(found, q, k, v, [ref() for ref in found.captured], sinks)
        return found.call(q, k, v, found.tail)
    except RuntimeError as reason:
        if isinstance(q, FakeTensor):
            return FakeCall(want_lse, want_max)(q, k, v, None)
        refuse_wrapped(q, k, v)
        if isinstance(reason, BadValue):
            raise _in_names_of(reason, score_mod, block_mask) from None
        raise


def _in_names_of(reason, score_mod, block_mask):
    """in_names_of for a call whose mods were resolved before."""
    if reason.status != "EVALUE" or reason.line:
        return reason
    mods = ("mask", getattr(block_mask, "mask_mod", block_mask)), ("score", score_mod)
    found, taken = [], []
    for kind, m in mods:
        if m not in (None, noop_mask):
            found.append(Resolved(m, kind, "cpu").apart(taken))
            taken = found[-1].names
    return in_names_of(reason, found)


def _either_autocast():
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


_T = torch.Tensor
is_autocast = getattr(torch._C, "_is_any_autocast_enabled", _either_autocast)


if warm.extension is not None:
    warm.extension.mods(types.FunctionType, types.MethodType, AnyMod, identity)
    warm.extension.entries(
        _warm,
        is_autocast,
        torch.is_grad_enabled,
        torch.get_num_threads,
        node,
        out_of,
    )


def _is_to_cast(q, k, v):
    """Whether autocast is on and they are not, for all that is seen here, what it makes of
    them."""
    if not is_autocast():
        return False
    is_all = isinstance(q, _T) and isinstance(k, _T) and isinstance(v, _T)
    if not is_all or q.device.type not in ("cpu", "cuda"):  # autocast knows no meta device
        return True
    dtype = torch.get_autocast_dtype(q.device.type)
    return not (q.dtype is dtype and k.dtype is dtype and v.dtype is dtype)


class _Known:
    """The entries of one pair of mods, by layouts of query, key and value."""

    __slots__ = ("layouts", "find", "refs")

    def __init__(self):
        self.layouts = warm.extension.Layouts()
        self.find, self.refs = self.layouts.find, []


def _keep_warm(key, entry, q, k, v, is_recorded, *mods):
    """entry: one that is kept, and goes when what it was made from does."""
    known = _warm.get(key)
    if known is None:
        known = _Known()
        _keep(_warm, key, known, _owners_of(entry, [m for m in mods if m is not None]))
    entry.quicken()
    known.layouts.keep(q, k, v, is_recorded, entry)


def _needs(q, k, v):
    """What of these needs gradients, as bits; 8: grad mode, in which captures may."""
    if not torch.is_grad_enabled():
        return 0
    return 8 + q.requires_grad + 2 * k.requires_grad + 4 * v.requires_grad


def _find(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa, beside):
    """The entry of a call, and its tensors as autocast wants them."""
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q, k, v)
    if k.dtype is not q.dtype or v.dtype is not q.dtype:
        q, k, v = decoded(q, k, v)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    key = (
        identity(score_mod),
        identity(block_mask),
        scale,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        want_lse,
        want_max,
        backend_of(options),
        gqa,
        (torch.get_num_threads(), *beside),
        _needs(q, k, v),
    )
    found = _entries.get(key)
    if found is None or found.current() is None:
        found = _like(key, score_mod, block_mask)
    if found is None:
        found = _make(key, q, k, v, score_mod, block_mask)
    return found, q, k, v


def _make(key, q, k, v, score_mod, block_mask):
    scale, (want_lse, want_max, backend, gqa, (_, *beside), needs) = key[2], key[15:]
    dropout, sinks, trains_sinks, keeps = beside
    if q.device.type == "meta" or isinstance(q, FakeTensor):
        check_layout(q, k, v)
        check_shapes(q, k, v, gqa)
        entry = _Entry(
            FakeCall(want_lse or needs > 8, want_max), None, None, [], None, want_lse
        )
        if needs:
            entry.trains(needs, [], None)
        return entry
    check_call(q, k, v, gqa)
    refuse_wrapped(q, k, v)
    device, watches, parts = q.device.type, [], list(key[2:])
    score = made_mask = whole = None
    if score_mod is not None:
        score = Resolved(score_mod, "score", device, q.dtype is torch.float64)
        watches.append(Watch(score_mod, score, by_value=False))
        parts.append((id(score.bound), tuple(v[1:] for v in score.views), score.flags))
    mask, mask_mod = mask_or_mod(block_mask)
    if mask is not None:
        whole, mask = mask, mask_of_call(mask, q, k, v)
        parts.append((mask.number, mask.version))
    elif mask_mod is not None:
        made_mask = Resolved(mask_mod, "mask", "cpu")
        watches.append(Watch(block_mask, made_mask, by_value=True))
        mask = mask_of_tensors(made_mask, q, k, v)
        parts = None  # values of captures went into the proof
    captured = score.captured if score is not None else []
    wanted = _wanted(needs, score)
    content = tuple(parts) if parts and all(w.fixed for w in watches) else None
    call = _calls.get(content) if content else None
    if call is None:
        if score is not None:
            check_score(score, mask, q.shape, k.shape)
        lse = want_lse or trains_sinks or bool(wanted)
        learned = [n for n, w in zip(score.names, wanted[3:]) if w] if score is not None else ()
        if keeps is None:
            keeps = keeps_f32(q.dtype, score and score.bound, learned)
        call = new_call(
            q, k, v, score, mask, scale, backend, lse, want_max, wanted, dropout, sinks=sinks,
            keeps=keeps,
        )  # fmt: skip
        if content:
            _keep(_calls, content, call, [mask] if mask is not None else [])
    tail, array = call.bound_to([v.address for v in score.views] if score is not None else [])
    keep = array, score.tensors if score is not None else None
    entry = _Entry(call, tail, keep, watches, whole, want_lse)
    entry.is_constant = score is None and block_mask is None
    if needs:
        slots = Slots(score.values, score.tensors, score.is_flat) if score is not None else None
        entry.trains(needs, captured, slots)
    if needs and score is not None and score.is_inside:
        entry.keep = keep, captured  # nodes of this call's graph
    elif all(w.fixed for w in watches):
        if made_mask is not None or whole is block_mask:  # not one taken over from torch
            mods = [m for m in (score_mod, block_mask) if m is not None]
            entry.is_large = made_mask is not None or (score is not None and bool(score.copied))
            _keep(_entries, key, entry, _owners_of(entry, mods))
            entry.is_kept = True
            if made_mask is None and score is not None:
                _make_pattern(key, entry, score_mod, score)
    return entry


def _wanted(needs, score):
    """Of query, key, value and the captures by name; () where nothing needs a gradient."""
    flags = score.flags if score is not None else ()
    if not needs or (needs == 8 and True not in flags):
        return ()
    return needs & 1 > 0, needs & 2 > 0, needs & 4 > 0, *flags


class _Pattern:
    """What entries for functions of one code have in common, whatever tensors of one layout
    and numbers their closures hold: `cells` says where, `others` are captures that lie outside
    of the closure."""

    __slots__ = (
        "call",
        "cells",
        "others",
        "watch",
        "mask",
        "version",
        "flags",
        "shows_lse",
        "is_flat",
        "last",
        "refs",
    )

    def __init__(self, entry, score):
        self.call, self.cells = entry.call, score.cells
        self.flags, self.shows_lse = entry.flags, entry.shows_lse
        self.is_flat = score.is_flat
        others = [x for i, x in zip(score.cells, score.values) if i is None]
        tensors = [x for x in others if isinstance(x, torch.Tensor)]
        self.watch = entry.watches[0].of(tensors)
        self.others = [
            weakref.ref(x) if isinstance(x, torch.Tensor) else lambda x=x: x for x in others
        ]
        self.mask, self.version, self.refs = entry.mask, entry.version, []
        self.last = None, []

    def comes_again(self, identity, tensors):
        """Whether the call before was for the same: most functions made anew come once."""
        before, refs = self.last
        if before == identity and all(r() is t for r, t in zip(refs, tensors)):
            return True
        self.last = identity, [weakref.ref(t) for t in tensors]
        return False


def _make_pattern(key, entry, score_mod, score):
    kind, numbers = layout(score_mod)
    wide = any(t.dim() == 0 and t.dtype is torch.int64 for t in score.captured)
    if kind is None or score.cells is None or score.copied or wide:
        return
    mask = [entry.mask()] if entry.mask is not None else []
    held = [x for x in owners(score_mod) if not isinstance(x, torch.Tensor)]
    is_fixed = score.walk is not None and score.walk.constants
    values = numbers if is_fixed else None  # what the text was written for
    _keep(_patterns, (kind, values, *key[1:]), _Pattern(entry, score), held + mask)


def _like(key, score_mod, block_mask):
    """The entry for a function that differs from one seen before in its captures alone."""
    kind, numbers = layout(score_mod)
    if kind is None:
        return None
    found = _patterns.get((kind, None, *key[1:])) or _patterns.get((kind, numbers, *key[1:]))
    if found is None or not found.watch.unchanged():
        return None
    if found.mask is not None:
        mask = found.mask()
        if mask is not block_mask or mask.version is not found.version:
            return None
    held = iter(held_at(score_mod, [i for i in found.cells if i is not None]))
    others = iter(found.others)
    values = [next(others)() if i is None else next(held) for i in found.cells]
    if any(x is None for x in values):  # a tensor that is gone
        return None
    used = [x for x in values if isinstance(x, torch.Tensor)]
    if any(t.is_neg() for t in used):  # read by a copy
        return None
    needs = key[-1]
    if needs and tuple([t.requires_grad for t in used]) != found.flags:
        return None
    is_double = found.call.stats is torch.float64
    is_text = type(score_mod) is AnyMod
    names = score_mod.captures if is_text else ["a number"] * len(values)
    places = [as_tensor(x, n, is_double) for n, x in zip(names, values)]
    tail, array = found.call.bound_to([t.data_ptr() for t in places])
    keep = array, [t for t, x in zip(places, values) if t is not x]
    mask = block_mask if found.mask is not None else None
    entry = _Entry(found.call, tail, keep, [], mask, found.shows_lse)
    if needs:
        entry.trains(needs, used, Slots(values, places, found.is_flat))
    if found.comes_again(key[0], used):
        entry.watches.append(found.watch.of(used))
        mods = owners(score_mod) + ([mask] if mask is not None else [])
        _keep(_entries, key, entry, mods)
        entry.is_kept = True
    return entry


def _keep(table, key, value, owners):
    """Adds to a bounded table what goes when one of its owners does."""
    forget = functools.partial(_forget, table, key)
    with _lock:
        while len(table) >= _ENTRIES:
            table.pop(_oldest(table), None)
        table[key] = value
    value.refs = [_reference(o, forget) for o in owners]


def _oldest(table):
    """The key that came first. Weak references take keys out at any time, on any thread."""
    while True:
        try:
            return next(iter(table), None)
        except RuntimeError:  # one went between iter and next
            pass


def _owners_of(entry, mods):
    """With whose end an entry ends. Of a text made anew little is kept but for its captures'
    time; what is large ends with the text."""
    texts = [m for m in mods if entry.is_large and type(m) is AnyMod]
    return [x for m in mods for x in owners(m)] + texts


def _reference(owner, forget):
    try:
        return weakref.ref(owner, forget)
    except TypeError:  # an object that has none: kept, so that its id stays its own
        return owner


def _forget(table, key, _):
    table.pop(key, None)
