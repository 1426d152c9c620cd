"""Context parallelism: one sequence over the processes of a torch.distributed group.

    with context_parallel(group, (B, H, N, D), masks=[block_mask]) as cp:
        q, k, v = (cp.shard(t) for t in (q, k, v))       # this rank's rows
        out = flex_attention(q, k, v, score_mod, block_mask)

Masks and scores are those of the whole sequence: they see whole positions, whatever rows lie
here. Runs on CPUs over gloo and on CUDA over NCCL. What a call does is in ranks_calls.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from ..c import abi, objects
from ..c import dist as c_dist
from . import active
from .agreement import Differs, agree, digest, limit_of
from .bounds import check_score
from .calls import autocast, decoded
from .checks import (
    MOST_ROWS,
    brief,
    check_flags,
    check_groups,
    check_layout,
    check_plain,
    count_of,
    device_of,
)
from .exchange import Gathering, Heads, expand
from .masks import mask_or_mod
from .memory import check_memory
from .messages import Messages
from .mods import Resolved, dtype_name, view
from .no_rows import of_no_rows
from .once import link
from .ranks_calls import Attention, Exchanged, Gathered, Spread, numbers_of

# Of all ranks, beside Differs: how checkpointing ends what it computes again.
_SHARED = tuple(
    x for x in [getattr(torch.utils.checkpoint, "_StopRecomputationError", None)] if x
)
MODES = ("gather", "staged", "heads")
WAYS = ("torch", "nccl")
_contexts: Any = weakref.WeakKeyDictionary()  # how many each group had
_communicators: Any = weakref.WeakKeyDictionary()  # by group, then by device and seconds


class ContextParallel:
    """What context_parallel gives: the rows of this rank, and attention over all ranks."""

    def __init__(
        self,
        group,
        query_shape,
        masks,
        layers,
        kv_heads,
        dtype,
        seconds,
        device,
        mode,
        by,
        keep,
        stage_keys,
    ):
        B, H, N, D = _sizes_of(query_shape)
        masks, layers = _layers_of(masks, layers)
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
        if by not in WAYS:
            raise ValueError(f"by: got {by!r}, expected one of {', '.join(WAYS)}")
        check_flags(keep=keep)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: got {dtype!r}, expected a torch.dtype")
        _check_group(group)
        seconds = _seconds_of(seconds)
        stage_keys = _stage_keys_of(stage_keys, mode)
        self.heads = H, _kv_heads_of(kv_heads, H)
        self.group, self.mode, self.length = group, mode, N
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: this process is not in it")
        self._number = _number_in(group)  # one that fails below counts, as it does elsewhere
        self.device = _device_of(group, device)
        if mode == "heads" and any(n % self.ranks for n in self.heads):
            raise ValueError(
                f"mode: got 'heads' with {self.heads[0]} and {self.heads[1]} heads, expected "
                f"multiples of the {self.ranks} ranks"
            )
        self._given = [_whole(m) for m in masks]
        self.masks = [m.proven_for(B, H, self.heads[1], D, D) for m in self._given]
        handles = [m.handle() for m in self.masks]
        cpu = self.device.type == "cpu"
        self.window = stage_keys if mode == "staged" else None
        self._context = objects.context(-torch.get_num_threads() if cpu else 0)
        tile = self._tile((B, D), dtype, handles)
        # over heads any rows do: all ranks see all of them
        dealt = (handles, layers) if mode != "heads" else ((), ())
        self.shards = c_dist.ShardPlan(self.ranks, tile, N, *dealt)
        self._whole = c_dist.ShardPlan(1, tile, N, handles, layers)
        self._limit = limit_of(seconds, self.device)
        self._messages = Messages(group, self.device)
        exchange = self._messages.exchange
        self._transport = c_dist.Transport(self.rank, self.ranks, seconds, exchange)
        self._alone = c_dist.Transport(0, 1, seconds, exchange)
        self._calls, self._failure = 0, ""
        self._before: list = []  # what each `with` that is open found
        self._made: dict = {}
        self._checked: set = set()
        self._pools: dict = {}
        self._ways: dict = {}
        self._moved: dict = {}
        self._rows = [expand(self.shards.rows(r)) for r in range(self.ranks)]
        self._own_rows = self._rows[self.rank].to(self.device)
        self.keep = keep
        is_own = not cpu and mode != "heads" and _has_nccl(group)
        is_own &= by == "nccl" or mode == "staged"
        own = self._over_nccl(seconds) if is_own else None
        if mode == "staged" and not cpu and own is None:
            raise ValueError(
                f"mode: got 'staged' on {self.device}, expected a group of NCCL's and libnccl "
                "where the library finds it"
            )
        self._transport = own or self._transport
        self.local = not cpu and own is None  # keys travel by torch's collectives

    def _tile(self, sizes, dtype, handles):
        """Rows that chunks are whole numbers of, so that results are one device's."""
        (B, D), (H, Hkv) = sizes, self.heads
        names = [dtype_name(torch.empty(0, dtype=dtype))] * 2
        mod = handles[0].mod if handles else None
        hint = B if self.device.type == "cuda" else 0
        with torch.cuda.device_of(torch.empty(0, device=self.device)):
            plan = objects.plan(
                self._context,
                hint,
                *(H, Hkv, D, D),
                *names,
                *(None, None, mod, self.device.type, 7, ()),
            )
        N = self.length
        return abi.lib.saccade_plan_row_tile(plan.handle, abi.Sizes(B, H, Hkv, N, N, D, D))

    # ---- rows ----

    @property
    def positions(self) -> torch.Tensor:
        """Whole positions of this rank's rows, int64, rising: for rotary embeddings, labels."""
        return self._rows[self.rank].clone()

    def shard(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """This rank's rows of a tensor of all rows; differentiable."""
        rows = _rows_of(tensor, dim)
        if rows != self.length:
            raise ValueError(f"got {rows} rows, expected all {self.length}")
        own = self._own_rows if tensor.device == self.device else self._rows[self.rank]
        return tensor.index_select(dim, own.to(tensor.device))

    def unshard(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """All rows from each rank's, on every rank. Differentiable: the gradient is this rank's
        rows of what comes in, and so that of one process where every rank has the same loss of
        all rows, which is not to be divided by their number."""
        rows = _rows_of(tensor, dim)
        if rows != len(self._own_rows):
            raise ValueError(f"got {rows} rows, expected this rank's {len(self._own_rows)}")
        whole: torch.Tensor = _Whole.apply(self, tensor, dim)
        return whole

    def _gathered(self, tensor, dim):
        """As bytes, which every group carries."""
        own = tensor.detach().resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
        rest = own.shape[1:]
        width = rest.numel() * own.element_size()
        padded = own.new_zeros((max(map(len, self._rows)), width), dtype=torch.uint8)
        padded[: len(own)] = own.view(-1).view(torch.uint8).view(len(own), width)
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.group)
        whole = padded.new_empty((self.length, width))
        for at, part in zip(self._rows, parts):
            whole[at.to(whole.device)] = part[: len(at)]
        return whole.view(-1).view(own.dtype).view(self.length, *rest).movedim(0, dim)

    def statistics(self) -> list[c_dist.ShardStats]:
        """By rank: what it holds and computes, and the keys that travel; over heads each rank
        computes all rows of its share, and that share of these keys travels."""
        told = [self.shards.stats(r) for r in range(self.ranks)]
        if self.mode != "heads":
            return told
        area = self._whole.stats(0).area / self.ranks
        return [s._replace(area=area, mean_area=area, imbalance=1.0) for s in told]

    # ---- the transport ----

    def _over_nccl(self, seconds):
        """The library's own communicator; None, on all ranks, where one has none. A group has
        one, made by the first of its contexts: ended, it would wait for the other ranks, and
        garbage is collected on each in its own time."""
        group = self.group or dist.group.WORLD
        key = self.device.index or 0, seconds
        known = _communicators.setdefault(group, {}) if group is not None else {}
        found = known.get(key)
        if not self._all_agree(found is not None and not found.has_failed):
            known[key] = found = self._new_communicator(seconds)
        return found

    def _new_communicator(self, seconds):
        made = [None]
        if self.rank == 0:
            try:
                made = [c_dist.nccl_id()]
            except (abi.SaccadeError, MemoryError):
                pass
        first = dist.get_global_rank(self.group, 0) if self.group else 0
        dist.broadcast_object_list(made, first, self.group, device=self.device)
        if made[0] is None:
            return None
        index = self.device.index or 0
        try:
            found = c_dist.NcclTransport(made[0], self.rank, self.ranks, index, seconds)
        except (abi.SaccadeError, MemoryError):  # or the others would wait for its answer
            found = None
        return found if self._all_agree(found is not None) else None

    def _all_agree(self, mine):
        agreed = torch.tensor([mine], dtype=torch.int32, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, self.group)
        return bool(agreed.item())

    # ---- attention ----

    @contextlib.contextmanager
    def guarded(self):
        """Around what all ranks do. After a failure on this one nothing of it is exchanged any
        more: a later call would meet what the others still do of this one."""
        if self._failure or self._transport.has_failed:
            raise RuntimeError(
                "context_parallel: got a call after one that failed before"
                f"{self._failure and f' ({self._failure})'}, expected a new context_parallel, "
                "over a new group where other ranks waited"
            )
        try:
            yield
        except (Differs, *_SHARED):
            raise
        except BaseException as reason:
            if not getattr(reason, "is_shared", False):
                text = str(reason).partition("\n")[0]
                self._failure = f"{type(reason).__name__}: {text}"
                self._transport.abort()
            raise

    @property
    def call(self) -> int:
        """The number of what is being computed: of the call, of what it captures by value, and
        whether it is backward. Messages carry it."""
        return self._messages.call

    @call.setter
    def call(self, number: int) -> None:
        self._messages.call = number

    def attention(self, q, k, v, score_mod, block_mask, scale, enable_gqa):
        """(out, lse) of this rank's rows."""
        with self.guarded():
            self._calls += 1
            self.call = digest([self._number, self._calls])
            return self._attention(q, k, v, score_mod, block_mask, scale, enable_gqa)

    def _attention(self, q, k, v, score_mod, block_mask, scale, enable_gqa):
        active.note_checkpointed()
        for name, t in (("query", q), ("key", k), ("value", v)):
            self._check_rows(name, t)
        q, k, v = decoded(*autocast(q, k, v))
        self._check(q, k, v, enable_gqa)
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        index, mask = self._mask_of(block_mask)
        if not q.shape[0]:
            return of_no_rows(q, k, v, score_mod, True, False)[:2]
        kind = self.device.type
        score = Resolved(score_mod, "score", kind) if score_mod is not None else None
        if score is not None and mask is not None and mask.mod is not None:
            score = score.apart(mask.mod.names)
        captured = score.captured if score is not None else []
        self._check_score(index, score, q, k)
        way = Spread if self.mode == "heads" else Gathered if self.local else Exchanged
        call = way(self, index, mask, score, scale)
        return Attention.apply(call, link(q, k, v, *captured), q, k, v, *captured)

    def _check_rows(self, name, t):
        check_plain(name, t)
        if t.device != self.device:
            raise ValueError(
                f"{name}: got a tensor on {t.device}, expected {self.device}, where these "
                "ranks run"
            )
        check_memory(name, t)
        if t.dim() != 4 or t.shape[2] != len(self._own_rows):
            raise ValueError(
                f"{name}: got shape {tuple(t.shape)}, expected [B, H, "
                f"{len(self._own_rows)}, D] with this rank's rows"
            )

    def _check(self, q, k, v, enable_gqa):
        check_layout(q, k, v)
        check_groups(f"query {tuple(q.shape)}, key {tuple(k.shape)}", q, k, enable_gqa)
        heads = q.shape[1], k.shape[1], v.shape[1]
        if self.mode == "heads" and heads != (*self.heads, self.heads[1]):
            raise ValueError(
                f"query, key, value: got {heads[0]}, {heads[1]} and {heads[2]} heads, expected "
                f"{self.heads[0]}, {self.heads[1]} and {self.heads[1]}, as context_parallel "
                "was given by query_shape and kv_heads"
            )

    def _check_score(self, index, score, q, k):
        """As without ranks, at positions of the whole sequence, in a first call of a kind."""
        if score is None:
            return
        shapes = [torch.Size((*t.shape[:2], self.length, t.shape[3])) for t in (q, k)]
        key = index, score.bound.text, *shapes, *[t.shape for t in score.tensors]
        if key not in self._checked:
            check_score(score, self.masks[index] if self.masks else None, *shapes)
            self._checked.add(key)

    def _mask_of(self, given):
        if given is None and not self.masks:
            return 0, None
        mask, _ = mask_or_mod(given)
        for i, known in enumerate(self._given):
            if mask is known:
                return i, self.masks[i].handle()
        got = "None" if given is None else "one that context_parallel was not given"
        raise ValueError(f"block_mask: got {got}, expected one among its masks")

    def made(self, index, mask, score, q, k, v, scale, bits, names, more):
        """The plan of a kind of call, made by all ranks at the first of them, and over heads a
        digest of it; there q, k and v have as many heads as are here. more: members of the
        problem, which follow from the others."""
        name = dtype_name(q)
        bound = score.bound if score is not None else None
        hint = q.shape[0] if self.device.type == "cuda" else 0
        sizes = (hint, q.shape[1], k.shape[1], 0, 0, q.shape[3], v.shape[3])
        is_spread = self.mode == "heads"
        heads = (("h_offset", self.rank * q.shape[1]), ("heads_global", self.heads[0]))
        mod = mask.mod if mask else None
        kind = self.device.type
        problem = (
            sizes,
            name,
            name,
            scale,
            bound,
            mod,
            kind,
            bits,
            names,
            (*heads, *more) if is_spread else more,
        )
        read = score.tensors if is_spread and score is not None else ()
        read = tuple([(t.dtype, t.shape) for t in read])
        found = self._made.get((index, problem, read))
        if found is None:
            shards = self._whole if is_spread else self.shards
            transport = self._alone if is_spread else self._transport
            found = c_dist.Dist(self._context, problem, shards, index, transport, self.window)
            told = self._told(index, problem, read) if is_spread else 0
            if not is_spread and self.masks:  # the library compares texts and runs alone
                self._agree("mask", self.masks[index].told())
            numbers = numbers_of(score)
            if numbers and (not is_spread or kind == "cuda"):
                self._agree("score", numbers)
            self._made[index, problem, read] = found = found, told
        found[0].prepare(mask)
        return found

    def _told(self, index, problem, read):
        """Over heads no plan of the library is all ranks': a digest of what the others' plans
        compare, which CPUs tell each other with every exchange."""
        sizes, name, _, scale, score, _, _, bits, names, _ = problem
        parts = [self.length, self.heads, sizes, name, scale, bits, names, index]
        parts += [score.text, score.names, read] if score is not None else []
        if self.masks:
            parts += self.masks[index].told()
        if self.device.type == "cuda":
            self._agree("mask or problem", parts)
        return digest(parts)

    def _agree(self, what, parts):
        agree(what, digest(parts), self.group, self.device, self._limit)

    def of_mask(self, mask):
        """(name, view) of what a kernel reads of the mask's captures: on CUDA all of them."""
        if self.device.type == "cpu" or mask is None or mask.mod is None:
            return []
        moved = self._moved.get(mask)
        if moved is None:
            moved = [t if t.dim() == 0 else t.to(self.device) for t in mask.tensors or ()]
            self._moved[mask] = moved
        return [(n, view(t)) for n, t in zip(mask.mod.names, moved)]

    def gathering(self, index) -> Gathering:
        """Which rows travel for a mask."""
        way = self._ways.get(index)
        if way is None:
            way = self._ways[index] = Gathering(
                self.shards,
                index,
                self.rank,
                self.ranks,
                self.group,
                self.device,
                self._limit,
            )
        return way

    def spreading(self) -> Heads:
        way = self._ways.get("heads")
        if way is None:
            rows = [self.shards.rows(r) for r in range(self.ranks)]
            way = self._ways["heads"] = Heads(
                rows, self.rank, self.length, self.group, self.device, self._limit
            )
        return way

    def pools(self, index, k, v):
        """Keys of the whole sequence, zeros where no row here touches any. Calls of one stream
        share them: each fills them anew."""
        stream = torch.cuda.current_stream().cuda_stream if k.is_cuda else 0
        key = index, k.shape, v.shape, k.dtype, stream
        found = self._pools.get(key)
        if found is None:
            found = self._pools[key] = tuple(
                t.new_zeros((*t.shape[:2], self.length, t.shape[3])) for t in (k, v)
            )
        return found

    def __enter__(self) -> "ContextParallel":
        if active.parallel not in (None, self):
            raise RuntimeError(
                "saccade: got a context_parallel inside of another, expected one at a time"
            )
        self._before.append(active.parallel)
        active.parallel = self
        return self

    def __exit__(self, *_: Any) -> None:
        active.parallel = self._before.pop()


class _Whole(torch.autograd.Function):
    """unshard"""

    @staticmethod
    def forward(ctx, cp, tensor, dim):
        ctx.cp, ctx.dim = cp, dim
        return cp._gathered(tensor, dim)

    @staticmethod
    def backward(ctx, d_whole):
        return None, ctx.cp.shard(d_whole, ctx.dim), None


def context_parallel(
    group: Optional[dist.ProcessGroup],
    query_shape: Sequence[int],
    masks: Sequence[Any] = (),
    *,
    layers: Optional[Sequence[int]] = None,
    kv_heads: Optional[int] = None,
    dtype: torch.dtype = torch.float32,
    seconds: float = 300.0,
    device: Optional[torch.device | str] = None,
    mode: str = "gather",
    by: str = "nccl",
    keep: bool = True,
    stage_keys: int = 0,
) -> ContextParallel:
    """Deals the rows of a sequence to the processes of a group, so that each has as much to
    compute under the masks; called by all of them with equal arguments. Inside of `with` (one
    at a time in a process) flex_attention takes this rank's rows of query, key and value, with
    masks and scores of the whole sequence: block_mask is one of `masks`, or None if there are
    none. out and lse are one process's bit for bit (near them with "staged", and with "heads"
    where a rank has few: docs/parallel.md), and so is query's gradient with "gather" on CPUs;
    all gradients are the same bits every time, and those of tensors that a score captures are
    whole and the same on every rank: what sums or averages gradients over the ranks, as DDP and
    FSDP do, counts them `ranks` times, beside others' once. backward may come after `with`, but
    not that of checkpointed calls (torch.utils.checkpoint), which computes them again and is an
    error there. An exception in a call, or its backward, ends the context on this rank; others
    find out within `seconds`.

    query_shape: [B, H, N, D] of the whole query. masks: the BlockMasks of a model's layers,
    [.., N, N]; layers: how many layers have each. seconds: how long a rank waits for others
    (on CUDA where by is "nccl"; the group's own limit holds for the group's collectives).
    device: cpu, or this rank's CUDA device; by default the current CUDA device where the group
    was made with backend nccl. dtype: of query, key and value.
    mode: "gather" brings each rank the keys that its rows touch; "staged" does so by windows
    of stage_keys keys (0: an eighth of the sequence, 1024 at least), the next on its way while
    one is computed: memory is bounded, results are near one process's and the same every time;
    "heads" exchanges rows for heads and back (Ulysses, arXiv 2309.14509), for head counts that
    the ranks divide.
    by: on CUDA, "nccl" lets keys travel by a communicator of the library's own, while what
    needs none of them is computed (where libnccl is found and the group is NCCL's; else by the
    group's collectives, as with "torch"), and CUDA graphs cannot be captured over it. keep:
    with "nccl", keys that came for forward stay for backward, where they are gathered.
    """
    return ContextParallel(
        group,
        query_shape,
        masks,
        layers,
        kv_heads,
        dtype,
        seconds,
        device,
        mode,
        by,
        keep,
        stage_keys,
    )


def _has_nccl(group):
    """Whether the group's collectives of CUDA tensors are NCCL's. One that was made without a
    backend is called "undefined", and has one for each kind of device."""
    if "nccl" in str(dist.get_backend(group)):
        return True
    try:
        own = (group or dist.group.WORLD)._get_backend(torch.device("cuda"))
        return "nccl" in own.name()
    except (AttributeError, RuntimeError):  # none for CUDA, or a group of another kind
        return False


def _sizes_of(query_shape):
    sizes = tuple(query_shape)
    if len(sizes) != 4 or not all(map(_is_size, sizes)):
        raise ValueError(f"query_shape: got {sizes}, expected [B, H, N, D], four sizes")
    return sizes


def _is_size(n):
    return isinstance(n, Integral) and not isinstance(n, bool) and 0 < n <= MOST_ROWS


def _kv_heads_of(given, H):
    if given is None:
        return H
    n = count_of("kv_heads", given, 1)
    if H % n:
        raise ValueError(f"kv_heads: got {n}, expected a divisor of the query's {H} heads")
    return n


def _seconds_of(given):
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number or not 0 < given < 1e6:
        raise ValueError(f"seconds: got {brief(given)}, expected more than 0, less than 10^6")
    return float(given)


def _stage_keys_of(given, mode):
    n = count_of("stage_keys", given, most=MOST_ROWS)
    if n and mode != "staged":
        raise ValueError(f"stage_keys: got {n} with mode {mode!r}, expected mode 'staged'")
    return n


def _number_in(group):
    """Of a context among its group's: what one that failed has left there is no other's."""
    group = group or dist.group.WORLD
    _contexts[group] = _contexts.get(group, 0) + 1
    return _contexts[group]


def _check_group(group):
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    hint = " (mesh.get_group())" if hasattr(group, "get_group") else ""
    raise TypeError(f"group: got {brief(group)}, expected a ProcessGroup{hint} or None")


def _layers_of(masks, layers):
    """Lists of masks and of how many layers have each."""
    if not isinstance(masks, Sequence):
        raise TypeError(f"masks: got {type(masks).__name__}, expected a list of BlockMasks")
    counts = [1] * len(masks) if layers is None else [count_of("layers", n, 1) for n in layers]
    if len(counts) != len(masks):
        raise ValueError(
            f"layers: got {len(counts)} numbers, expected one for each of {len(masks)} masks"
        )
    return list(masks), counts


def _device_of(group, given):
    if given is None:
        given = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    device = device_of(given)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, expected cpu or cuda")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _rows_of(tensor, dim):
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dim: got {dim}, expected one of the tensor's {tensor.dim()}")
    return tensor.shape[dim]


def _whole(given):
    mask, mod = mask_or_mod(given)
    if mask is None or mod is not None:
        raise TypeError(f"masks: got {given!r}, expected BlockMasks")
    return mask
